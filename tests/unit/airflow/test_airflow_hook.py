"""The hook: which names are queues, and what a connection may say."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qewqew_airflow.errors import WrongConnection, errno_of
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.preflight import main
from qewqew_core import BadArgument, BadPath, Broken, Message
from qewqew_core.tools import marker
from qewqew_core.tools.listing import Kind, kind_of

Connect = Callable[..., None]


@pytest.mark.parametrize("name", ["orders", "orders.qew", "shop/orders", "a b", "größe", "x" * 200])
def test_a_queue_lies_in_the_directory_of_its_connection(directory: Path, name: str) -> None:
    (directory / "shop").mkdir()
    assert QewQewHook().path(name) == str(directory / name)
    assert not (directory / name).exists()


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "../orders", "shop/../../orders", "/etc/orders", "shop//orders", "orders/", "./orders"],
        *["a\0b", "a\nb", "x" * 201, "\ud800", None, 7, b"orders"],
    ],
)
def test_a_name_that_is_none_or_leaves_the_directory_is_refused(directory: Path, name: Any) -> None:
    with pytest.raises(BadPath, match="is not the name of a queue"):
        QewQewHook().path(name)
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


@pytest.mark.parametrize("error", [errno.ENOTCONN, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_mount_that_does_not_answer_is_no_missing_directory(
    error: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount that is gone, or whose server is: nobody is to make another directory there."""
    answer = os.stat

    def ask(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if path == str(directory):
            raise OSError(error, os.strerror(error), path)
        return answer(path, *more, **named)

    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", ask)
        hook = QewQewHook()
        said = rf"its file system does not answer \({os.strerror(error)}\).* mount it again"
        for look in hook.directory, partial(hook.path, "orders"), partial(kind_of, str(directory)):
            with pytest.raises(Broken, match=said) as caught:
                look()
            assert "mkdir" not in str(caught.value)
        assert not hook.test_connection()[0]
    assert hook.directory() == str(directory)


def test_a_directory_that_is_a_link_out_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (directory / "shop").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadPath, match="leads out of"):
        QewQewHook().path("shop/orders")


def test_a_queue_that_is_a_link_out_is_refused_even_if_it_dangles(directory: Path, tmp_path: Path) -> None:
    (directory / "orders").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadPath, match="leads out of"):
        QewQewHook().path("orders")


def test_a_directory_beside_with_the_same_beginning_is_outside(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "queues2").mkdir()
    (directory / "orders").symlink_to(tmp_path / "queues2" / "orders")
    with pytest.raises(BadPath, match="leads out of"):
        QewQewHook().path("orders")


def test_a_link_inside_the_directory_is_the_queue_it_points_to(directory: Path) -> None:
    """One queue under two paths would get two sets of chunk files."""
    (directory / "orders").touch()
    (directory / "alias").symlink_to("orders")
    assert QewQewHook().path("alias") == str(directory / "orders")


def test_the_directory_of_the_connection_may_be_a_link_itself(tmp_path: Path, directory: Path, connect: Connect) -> None:
    (tmp_path / "link").symlink_to(directory)
    connect("qewqew_default", "qewqew", str(tmp_path / "link"))
    assert QewQewHook().path("orders") == str(directory / "orders")


@pytest.mark.parametrize("host", [None, "", "queues", "~/queues", "./queues"])
def test_a_connection_without_an_absolute_directory_is_refused(connect: Connect, host: str | None) -> None:
    connect("qewqew_default", "qewqew", host)
    with pytest.raises(BadPath, match=r"qewqew_default.*absolute path"):
        QewQewHook().path("orders")


def test_a_directory_that_does_not_exist_is_not_created(directory: Path, connect: Connect) -> None:
    connect("qewqew_default", "qewqew", str(directory / "missing"))
    with pytest.raises(BadPath, match=r"missing: .*does not exist on this worker; .*qewqew init"):
        QewQewHook().path("orders")
    with pytest.raises(BadPath, match="does not exist"):
        QewQewHook().inspect("orders")
    assert not (directory / "missing").exists()


@pytest.mark.parametrize("conn_type", ["http", "fs", "spark"])
def test_a_connection_of_another_type_is_refused_before_anything_is_touched(
    directory: Path, connect: Connect, conn_type: str
) -> None:
    connect("qewqew_default", conn_type, str(directory))
    for use in (lambda: QewQewHook().queue("orders"), lambda: QewQewHook().topic("t"), lambda: QewQewHook().inspect("orders")):
        with pytest.raises(WrongConnection, match=f"is of type '{conn_type}'"):
            use()
    found, message = QewQewHook().test_connection()
    assert (found, "WrongConnection" in message) == (False, True)
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_a_missing_subdirectory_is_named(directory: Path) -> None:
    with pytest.raises(BadPath, match=r"queues/shop: .*does not exist"):
        QewQewHook().path("shop/orders")


def test_a_file_in_place_of_the_directory_is_refused(directory: Path, connect: Connect) -> None:
    (directory / "file").touch()
    connect("qewqew_default", "qewqew", str(directory / "file"))
    with pytest.raises(BadPath, match="needs a directory, but this is a file"):
        QewQewHook().path("orders")


def test_a_directory_that_cannot_be_read_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, for whom every directory is readable.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadPath, match="cannot read it"):
        QewQewHook().inspect("orders")


def test_chunk_files_and_directories_are_no_queues(directory: Path) -> None:
    with QewQewHook().queue("orders") as queue:
        queue.put(b"1")
    (directory / "shop").mkdir()
    for name in ("orders.30001", "shop"):
        with pytest.raises(BadPath):
            QewQewHook().queue(name)


def test_the_settings_of_a_queue_come_from_the_extra(connect: Connect) -> None:
    settings = {
        "chunk_size": 4096,
        "sync": "never",
        "lock_timeout": 0.5,
        "max_records": 1000,
        "max_bytes": 2**40,
        "min_free_bytes": 0,
        "log_bytes": 1 << 20,
        "max_attempts": 2,
        "retry_delay": 1.5,
        "retention": 60,
        "retention_bytes": 0,
        "group": "etl",
    }
    connect("qewqew_default", "qewqew", "/", **settings)
    assert QewQewHook().settings() == {**settings, "retention": timedelta(seconds=60)}


def test_settings_may_be_text_and_empty_ones_are_not_set(connect: Connect) -> None:
    connect("qewqew_default", "qewqew", "/", chunk_size="4096", sync="", max_attempts=None, lock_timeout="2.5")
    assert QewQewHook().settings() == {"chunk_size": 4096, "lock_timeout": 2.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("chunk_size", value) for value in (11, 2**31, "big", 1.5, True, [1])],
        *[("sync", value) for value in ("always", 1)],
        *[("lock_timeout", value) for value in (-1, "soon", "nan", "inf", True)],
        *[(name, value) for name in ("max_records", "max_bytes") for value in (0, -1, "many", 1.5)],
        *[("min_free_bytes", value) for value in (-1, "1G")],
        *[("log_bytes", value) for value in (0, "1M", 2**30 + 1)],
        *[("max_attempts", value) for value in (0, -1)],
        ("retry_delay", -1),
        *[("retention", value) for value in (-1, 1e12)],
        ("retention_bytes", -1),
        *[("group", value) for value in (1, True, "et\nl", "no-such-group")],
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(connect: Connect, directory: Path, name: str, value: Any) -> None:
    connect("qewqew_default", "qewqew", str(directory), **{name: value})
    with pytest.raises(BadArgument, match=f"'qewqew_default': extra {name}|no group 'no-such-group'"):
        QewQewHook().queue("orders")
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_an_unknown_setting_is_refused(connect: Connect) -> None:
    """A misspelt sync would be a queue that is less durable than its owner thinks."""
    connect("qewqew_default", "qewqew", "/", snyc="never")
    with pytest.raises(BadArgument, match="'snyc'; it may have hostname, directory_id, chunk_size, sync"):
        QewQewHook().settings()


def test_a_queue_opens_with_the_settings_and_what_is_given_wins(connect: Connect, directory: Path) -> None:
    connect("qewqew_default", "qewqew", str(directory), chunk_size=100)
    with QewQewHook().queue("orders") as queue:
        queue.put(b"1")
        assert (directory / "orders.30001").stat().st_size == 100
    with QewQewHook().queue("others", chunk_size=200) as queue:
        queue.put(b"1")
        assert (directory / "others.30001").stat().st_size == 200


def test_a_group_shares_what_a_connection_names_it_for(connect: Connect, directory: Path) -> None:
    connect("qewqew_default", "qewqew", str(directory), group=str(os.getegid()))
    os.chown(directory, -1, os.getegid())
    directory.chmod(0o2770)
    (directory / marker.NAME).unlink()
    marker.init(str(directory), group=str(os.getegid()))
    with QewQewHook().queue("orders") as queue:
        queue.put(b"1")
    with QewQewHook().topic("events") as topic:
        topic.append(b"1")
    with closing(QewQewHook().into(Kind.QUEUE, "staged")) as stage:
        stage.add([Message(b"1")])
        stage.commit()
    modes = {stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}
    assert modes == {0o660, 0o2770}
    connect("qewqew_default", "qewqew", str(directory))
    with pytest.raises(BadPath, match="is shared by the group"):
        QewQewHook().queue("orders")
    with pytest.raises(BadPath, match="is shared by the group"):
        QewQewHook().topic("events")


def test_a_topic_opens_with_the_settings_that_are_meant_for_topics(connect: Connect, directory: Path) -> None:
    """A queue refuses what exceeds max_records, a topic removes it: one number must not be taken for the other."""
    general = {"sync": "never", "lock_timeout": 0.5, "min_free_bytes": 1, "log_bytes": 9, "max_attempts": 2, "retention_bytes": 0}
    of_queues = {"chunk_size": 4096, "max_records": 1000, "max_bytes": 2**20}
    of_topics = {"block_size": 300, "max_age": 60, "max_records": 7, "max_bytes": 2**30, "slow_readers": "move"}
    connect("qewqew_default", "qewqew", str(directory), **general, **of_queues, topic={**of_topics, "delete_committed": True})
    hook = QewQewHook()
    assert hook.settings() == {**general, **of_queues}
    assert hook.topic_settings() == {**general, **of_topics, "max_age": timedelta(minutes=1), "delete_committed": True}
    with hook.topic("events") as topic:
        assert (topic.max_records, topic.max_age, topic.delete_committed) == (7, timedelta(minutes=1), True)
    with hook.topic("events", max_records=None, delete_committed=False) as topic:
        assert (topic.max_records, topic.block_size, topic.delete_committed) == (None, 300, False)


@pytest.mark.parametrize("empty", [None, "", {}, {"max_age": "", "max_records": None}])
def test_settings_of_topics_that_are_empty_are_not_set(connect: Connect, empty: Any) -> None:
    connect("qewqew_default", "qewqew", "/", topic=empty, sync="never")
    assert QewQewHook().topic_settings() == {"sync": "never"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("block_size", value) for value in (0, 2**31, "big", True)],
        *[("max_age", value) for value in (0, -1, "soon", True)],
        *[(name, value) for name in ("max_records", "max_bytes") for value in (0, "many")],
        *[("delete_committed", value) for value in (1, "yes", "false")],
        *[("slow_readers", value) for value in ("drop", 1)],
    ],
)
def test_a_setting_of_topics_out_of_range_is_refused_by_name(connect: Connect, directory: Path, name: str, value: Any) -> None:
    connect("qewqew_default", "qewqew", str(directory), topic={name: value})
    with pytest.raises(BadArgument, match=f"'qewqew_default': extra topic {name}"):
        QewQewHook().topic("events")
    with pytest.raises(BadArgument, match=f"extra topic {name}"):  # a connection is right or wrong, whatever is opened
        QewQewHook().queue("orders")
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ({"max_recrods": 1}, "extra topic has 'max_recrods'; it may have block_size, max_age"),
        ({"chunk_size": 4096}, "extra topic has 'chunk_size'"),
        ([1], "extra topic must be an object"),
        ("max_age", "extra topic must be an object"),
    ],
)
def test_settings_of_topics_that_do_not_exist_are_refused(connect: Connect, topic: Any, message: str) -> None:
    connect("qewqew_default", "qewqew", "/", topic=topic)
    with pytest.raises(BadArgument, match=message):
        QewQewHook().topic_settings()


def test_nothing_else_is_made_inside_a_topic(directory: Path) -> None:
    """A queue beside its own files would make it a directory that is no topic, or be taken for one of its files."""
    with QewQewHook().topic("events") as topic:
        topic.append(b"1")
    for name in ("events/orders", "events/data/orders", "events/state/orders"):
        with pytest.raises(BadPath, match=r"leads into the topic .*queues/events; "):
            QewQewHook().path(name)
    assert QewQewHook().path("events") == str(directory / "events")


def test_a_topic_cannot_be_a_queue_nor_a_queue_a_topic(directory: Path) -> None:
    with QewQewHook().topic("events") as topic:
        topic.append(b"1")
    with QewQewHook().queue("orders") as queue:
        queue.put(b"1")
        with pytest.raises(BadPath):
            QewQewHook().topic("orders")
    with pytest.raises(BadPath):
        QewQewHook().queue("events")
    for name in ("../events", "", "a\nb"):
        for use in (QewQewHook().topic, lambda name: QewQewHook().inspect_reader(name, "load")):
            with pytest.raises(BadPath, match="is not the name"):
                use(name)


def test_inspecting_a_reader_counts_what_waits_for_it_and_makes_nothing(directory: Path) -> None:
    hook = QewQewHook()
    assert hook.inspect_reader("events", "load").records == 0
    assert [path.name for path in directory.iterdir()] == [marker.NAME]
    with hook.topic("events") as topic:
        topic.append_many([b"abc", b"de"])
    assert [hook.inspect_reader("events", "load").records, hook.inspect_reader("events", "load").bytes] == [2, 5]
    assert not list((directory / "events" / "reader").iterdir())


def test_inspecting_a_queue_that_does_not_exist_counts_nothing_and_makes_nothing(directory: Path) -> None:
    stats = QewQewHook().inspect("orders")
    assert (stats.records, stats.bytes, stats.oldest, stats.returned) == (0, 0, None, 0)
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_the_connection_test_says_what_is_wrong(connect: Connect, directory: Path) -> None:
    works, message = QewQewHook().test_connection()
    assert works
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        *("settings", "directory", "marker", "free room", "a new queue", "what is there")
    ]
    assert [path.name for path in directory.iterdir()] == [marker.NAME]
    connect("qewqew_default", "qewqew", str(directory), sync="always")
    works, message = QewQewHook().test_connection()
    assert not works
    assert message.startswith("BadArgument: connection 'qewqew_default': extra sync")
    connect("qewqew_default", "qewqew", str(directory / "missing"))
    works, message = QewQewHook().test_connection()
    assert not works
    assert message.startswith("BadPath: ")
    connect("qewqew_default", "qewqew", str(directory), hostname="elsewhere")
    works, message = QewQewHook().test_connection()
    assert (works, "has this directory on host 'elsewhere', but this runs on" in message) == (False, True)
    connect("qewqew_default", "qewqew", str(directory), min_free_bytes=1 << 62)
    with QewQewHook().queue("orders", min_free_bytes=0) as queue:
        queue.put(b"x")
    (directory / "orders.wal").write_bytes(b"no log")
    works, message = QewQewHook().test_connection()
    assert (works, [line.partition(":")[0] for line in message.splitlines()]) == (False, ["DiskFull", "Corrupt"])


def test_what_tasks_of_a_connection_need_is_asked_for_on_a_worker(
    connect: Connect, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "")  # which main sets

    def answers(*arguments: str) -> tuple[int, dict[str, str]]:
        code = main([*arguments])
        wrong = (line.removeprefix("WRONG ").partition(": ") for line in capsys.readouterr().out.splitlines() if "WRONG" in line)
        return code, {what: text for what, _, text in wrong}

    assert answers("qewqew_default") == (0, {})
    for name in ("spark-submit", "java"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answers("qewqew_default", "--spark") == (0, {})
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, wrong = answers("qewqew_default", "--spark")
    assert (code, [*wrong]) == (1, ["spark-submit", "Java"])
    assert wrong["spark-submit"].startswith("SparkSubmitNotFound: ")
    assert wrong["Java"].startswith("JavaNotFound: spark-submit needs Java")
    connect("elsewhere", "qewqew", str(directory), hostname="w1")
    assert "give the task a queue= that only the worker on 'w1' serves" in answers("elsewhere")[1]["directory"]
    assert "run 'airflow triggerer --queues LANE' on 'w1'" in answers("elsewhere", "--triggerer")[1]["directory"]
    connect("spark", "spark", "local")
    assert "WrongConnection: " in answers("spark")[1]["settings"]


def test_a_directory_without_the_marker_or_with_another_id_is_refused(connect: Connect, directory: Path) -> None:
    """Where a mount is missing, its directory is there, and empty: a queue in it would hide the records of the real one."""
    connect("qewqew_default", "qewqew", str(directory), directory_id="lake-1")
    uses = [
        lambda: QewQewHook().queue("orders"),
        lambda: QewQewHook().topic("orders"),
        lambda: QewQewHook().into(Kind.QUEUE, "orders"),
        lambda: QewQewHook().inspect("orders"),
        lambda: QewQewHook().inspect_reader("orders", "r"),
    ]

    def refused(message: str) -> None:
        for use in uses:
            with pytest.raises(BadPath, match=message) as caught:
                use()
            assert errno_of(caught.value) == errno.ENOENT  # a task is tried again
        found, said = QewQewHook().test_connection()
        assert not found
        assert re.search(message, said)

    refused("has the id '.*', and not 'lake-1'")
    (directory / marker.NAME).unlink()
    refused("has no marker .* so a mount may be missing")
    assert list(directory.iterdir()) == []
    marker.init(str(directory), "lake-1")
    assert QewQewHook().inspect("orders").records == 0
    assert QewQewHook().test_connection()[0]
    connect("qewqew_default", "qewqew", str(directory), directory_id="no id")
    with pytest.raises(BadArgument, match="directory_id must be 1 to 100 letters"):
        QewQewHook().inspect("orders")
