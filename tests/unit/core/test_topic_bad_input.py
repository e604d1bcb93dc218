"""Bad input that only a topic can get: its directory, readers, and fields of messages; the rest: test_bad_input.py."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import commands
import pytest
from damage import tree
from refusal import refused
from zbus_cases import forget_log

from qewqew_core import (
    BadArgument,
    BadPath,
    Corrupt,
    Message,
    QewQewError,
    Queue,
    Topic,
    inspect_reader,
    repair_topic,
)
from qewqew_core.formats import zbus
from qewqew_core.topic.topic_inspection import inspect_topic

NAN = float("nan")


@pytest.fixture
def topic(tmp_path) -> Iterator[Topic]:
    """With three messages, and the lock of the writer."""
    with Topic(tmp_path / "t", block_size=500) as one:
        for number in range(3):
            one.append(b"%d" % number, tag="t")
        yield one


# Paths


@pytest.mark.parametrize("name", ["a\nb", "a\x7fb"])
def test_a_path_that_cannot_be_a_topic_is_refused_and_nothing_is_made(tmp_path, name):
    for call in (Topic, lambda path: inspect_reader(path, "r")):
        with refused(tmp_path, BadPath, "printable"):
            call(tmp_path / name)


def test_the_root_directory_is_no_topic():
    with pytest.raises(BadPath):
        Topic("/")


@pytest.mark.parametrize("name", ["x" * 200, "ü ñ 日", "-rf", "a.b.idx", "~", "con", "t."])
def test_strange_names_are_names(tmp_path, name):
    with Topic(tmp_path / name) as one, one.reader(name[:100]) as reader:
        one.append(b"x")
        assert reader.read().body == b"x"
        assert reader.lease("k") is None
    with Topic(f"{tmp_path}/{name}/") as one:  # a slash at the end is what shells add
        assert len(one) == 1


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"something")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
        for name in ("file", "nowhere", "q"):
            with refused(tmp_path, BadPath, "topic"):
                Topic(tmp_path / name)


def test_a_directory_with_other_files_is_not_made_a_topic(topic, tmp_path):
    topic.reader("r").close()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("Dear")
    (tmp_path / "link").symlink_to(tmp_path / "t")  # the index is called as the directory
    for name in ("home", "link", "t/data", "t/state"):
        with refused(tmp_path, BadPath, "other files"):
            Topic(tmp_path / name)
    with refused(tmp_path, BadPath):
        inspect_reader(tmp_path / "home", "r")
    shutil.copytree(tmp_path / "t", tmp_path / "renamed")
    with refused(tmp_path, BadPath, r"it has no renamed\.idx"):
        Topic(tmp_path / "renamed")


def test_an_empty_directory_may_become_a_topic(tmp_path):
    (tmp_path / "t").mkdir()
    with Topic(tmp_path / "t") as one:
        assert one.append(b"x") == 0


@pytest.mark.parametrize("name", ["data", "reader", "state", "t.idx"])
def test_a_part_of_the_topic_that_is_something_else_is_named(tmp_path, name):
    with Topic(tmp_path / "t") as one:
        one.append(b"x")
    shutil.rmtree(tmp_path / "t" / name) if name != "t.idx" else (tmp_path / "t" / name).unlink()
    if name == "t.idx":
        (tmp_path / "t" / name).mkdir()
    else:
        (tmp_path / "t" / name).write_bytes(b"in the way")
    with pytest.raises((BadPath, Corrupt)) as caught:
        Topic(tmp_path / "t").reader("r")
    assert name in str(caught.value)
    if name != "t.idx":
        assert (tmp_path / "t" / name).read_bytes() == b"in the way"


@pytest.mark.parametrize("data", [b"", b"short", b"\0" * 2000, b"\0\0\0\2" + bytes(zbus.INDEX_SIZE - 4), b"{json}" * 50_000])
def test_an_index_that_is_none_is_refused_and_left_alone(tmp_path, data):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "t.idx").write_bytes(data)
    before = (tmp_path / "t" / "t.idx").read_bytes()
    with pytest.raises(Corrupt) as caught:
        Topic(tmp_path / "t")
    assert caught.value.path == str(tmp_path / "t" / "t.idx")
    assert (tmp_path / "t" / "t.idx").read_bytes()[: len(before)] == before


LOOKS: dict[str, Callable[[Path], object]] = {
    "open": Topic,
    "inspect_topic": inspect_topic,
    "inspect_reader": lambda path: inspect_reader(path, "r"),
}
COMMANDS = {"ls": 5, "stat": 5, "check": 2, "metrics": 0, "topic readers list": 5, "peek": 5, "export": 5, "verify": 5}


@pytest.mark.parametrize("look", [*LOOKS, *COMMANDS])
@pytest.mark.parametrize("size", [0, 23, 27, 500, 1023, 2000, zbus.INDEX_SIZE - 1])
def test_an_index_that_was_cut_short_is_damage_for_all_who_look_and_repair_builds_it(tmp_path, look, size):
    """Before, those who only look got a bare struct.error, and an index of more than its first entries passed for whole."""
    path = tmp_path / "t"
    with Topic(path) as topic:
        topic.append(b"1")
        topic.reader("r").close()
    os.truncate(path / "t.idx", size)
    wrong = rf"t\.idx.*the index was cut short: it has {size:,} bytes, not 287,744.*restore the index, or let `qewqew repair`"
    if look in LOOKS:
        with pytest.raises(Corrupt, match=wrong):
            LOOKS[look](path)
    else:
        result = commands.run(*look.split(), tmp_path if look in ("ls", "check", "metrics") else path)
        assert result.exit_code == COMMANDS[look], (result.stdout, result.stderr)
        if look == "metrics":
            assert f'qewqew_readable{{path="{path}",kind="topic",reader=""}} 0' in result.stdout
        else:
            assert re.search(wrong, result.stdout + result.stderr)
    assert (path / "t.idx").stat().st_size == size
    assert repair_topic(path).damage
    with Topic(path) as topic:
        assert [message.body for message in topic] == [b"1"]


def test_a_topic_whose_index_is_missing_is_not_begun_anew(topic, tmp_path):
    """Its messages would be overwritten."""
    topic.close()
    (tmp_path / "t" / "t.idx").unlink()
    before = tree(tmp_path / "t" / "data")
    with pytest.raises((BadPath, Corrupt), match=r"idx"):
        Topic(tmp_path / "t")
    forget_log(tmp_path / "t")
    with pytest.raises((BadPath, Corrupt), match=r"idx"):
        Topic(tmp_path / "t")
    assert tree(tmp_path / "t" / "data") == before


# Readers


@pytest.mark.parametrize(
    "name", [None, 5, b"r", "", "a/b", "/", "..", ".", ".hidden", "a\0b", "a\nb", "x" * 101, "é" * 51, "\ud800", "\u202e"]
)
def test_a_name_that_cannot_be_a_readers_is_refused_everywhere(topic, tmp_path, name):
    topic.reader("good").close()
    for call in (topic.reader, lambda name: topic.copy_reader("good", name), lambda name: inspect_reader(topic.path, name)):
        with refused(tmp_path, BadPath, "reader"):
            call(name)
    for call in (topic.delete_reader, lambda name: topic.copy_reader(name, "copy")):
        with refused(tmp_path, BadArgument, "has no reader"):
            call(name)
    assert topic.readers() == ["good"]


def test_readers_whose_names_look_like_files_of_others_do_not_meet_them(topic):
    names = [
        "r",
        "r.wal",
        "r.wal.tmp",
        "r.lock",
        "r.batches",
        "r.dead",
        "r.rdx",
        "r.rdx.tmp",
        "r.nak",
        "x" * 100,
        "r-",
        "1-1.spill",
    ]
    readers = [topic.reader(name) for name in names]
    assert topic.readers() == sorted(names)
    for place, one in enumerate(readers):
        assert one.read().number == 0
        one.commit()
        assert len(one.lease("k", max_records=1)) == 1
        assert one.batches()[0].id in os.listdir(f"{topic.path}/state/{names[place]}.batches")
    topic.delete_reader("r")
    for one in readers[1:]:
        assert one.read().number == 2
        one.batches()[0].ack()
        one.close()


@pytest.mark.req("ZD15")
@pytest.mark.parametrize(
    "arguments",
    [
        *({"window": bad} for bad in (0, -1, 1.5, "5", None, True, 1 << 30)),
        *({"redeliver_after": bad} for bad in (-1, NAN, float("inf"), "60", True)),
        *({"start": bad} for bad in ("first", -1, 9, 1.0, None, NAN, datetime(2026, 1, 1), timedelta(1))),
        *({"filter": bad} for bad in (5, b"a", "x" * 128, ["a"])),
    ],
    ids=str,
)
def test_arguments_of_a_reader_that_cannot_be_are_refused_and_no_reader_is_made(topic, arguments):
    before = {*Path(topic.path).rglob("*")}
    with pytest.raises(BadArgument):
        topic.reader("r", **arguments)
    assert topic.readers() == []
    assert {path.name for path in {*Path(topic.path).rglob("*")} - before} <= {"reader", "state", "r.lock"}
    with topic.reader("r") as one:
        assert one.read().number == 0


def reader_calls() -> list[tuple[str, Callable]]:
    calls: list[tuple[str, Callable]] = []
    for bad in (NAN, "1", True, [1]):
        calls.append((f"read timeout {bad}", lambda one, bad=bad: one.read(timeout=bad)))
        calls.append((f"peek timeout {bad}", lambda one, bad=bad: one.peek(timeout=bad)))
        calls.append((f"read_many timeout {bad}", lambda one, bad=bad: one.read_many(1, timeout=bad)))
    for bad in (-1, NAN, float("inf"), "1", None, True):
        calls.append((f"nack delay {bad}", lambda one, bad=bad: one.nack(delay=bad)))
    for bad in ("message", b"0", 0, None, [], Message(b"0"), Message(b"0", number=0)):
        calls.append((f"commit {bad}", lambda one, bad=bad: one.commit(bad)))
        calls.append((f"nack {bad}", lambda one, bad=bad: one.nack(bad)))
    for bad in (-1, 4, 1.0, "1", True, 1 << 64):
        calls.append((f"seek number {bad}", lambda one, bad=bad: one.seek(number=bad)))
    for bad in (-1, 1, 1.0, "1", 1 << 64):
        calls.append((f"seek offset {bad}", lambda one, bad=bad: one.seek(offset=bad)))
    for bad in (0, "now", datetime(2026, 1, 1), NAN):
        calls.append((f"seek time {bad}", lambda one, bad=bad: one.seek(time=bad)))
    calls.append(("seek nothing", lambda one: one.seek()))
    calls.append(("seek two", lambda one: one.seek(number=0, offset=0)))
    return calls


@pytest.mark.parametrize("call", [call for _, call in reader_calls()], ids=[name for name, _ in reader_calls()])
def test_calls_of_a_reader_with_bad_arguments_change_nothing(topic, call):
    with topic.reader("r", window=5) as one:
        first = one.read()
        before = tree(Path(topic.path))
        with pytest.raises(BadArgument):
            call(one)
        assert tree(Path(topic.path)) == before
        assert one.position().number == 0
        assert one.commit(first) == 1


def test_a_time_that_never_was_finds_its_place(topic):
    """Years outside of what the clock can be are times all the same."""
    from datetime import UTC

    with topic.reader("r") as one:
        one.seek(time=datetime.max.replace(tzinfo=UTC))
        assert one.position().number == 3
        one.seek(time=datetime.min.replace(tzinfo=UTC))
        assert one.position().number == 0


def test_a_negative_timeout_is_over_at_once(topic):
    """As for a queue: what is left of a deadline may be negative."""
    with topic.reader("r") as one:
        assert one.read(timeout=-1).number == 0
        assert one.read_many(9, timeout=-0.5) != []
        assert one.read_many(9, timeout=-0.5) == []


def test_an_rdx_that_names_no_place_is_an_error_and_other_readers_work(topic):
    """Nobody knows what it meant; the oldest message would be a guess."""
    Path(topic.path, "reader", "bad.rdx").write_bytes(zbus.new_reader(0, 0, 7))
    Path(topic.path, "reader", "short.rdx").write_bytes(b"")
    with pytest.raises(Corrupt, match="no message begins") as caught:
        topic.reader("bad")
    assert caught.value.path.endswith("bad.rdx")
    assert Path(topic.path, "reader", "bad.rdx").read_bytes() == zbus.new_reader(0, 0, 7)
    with topic.reader("good") as one, topic.reader("short") as short:
        assert one.read().number == short.read().number == 0


# What is appended


def test_a_message_is_not_an_iterable_of_messages(topic, tmp_path):
    with topic.session() as session:
        for one in (Message(b"one"), Message(b"", "t")):
            for call in (topic.append_many, lambda messages: topic.append_many(messages, key="k"), session.append_many):
                with refused(tmp_path, BadArgument, "append_many takes an iterable of messages"):
                    call(one)
    assert len(topic) == 3


@pytest.mark.req("Z5", "ZD15")
@pytest.mark.parametrize(
    "fields",
    [
        *({"tag": bad} for bad in (5, b"t", "x" * 128, "x" * 256, "x" * 259, "\ud800", ["t"])),
        *({"id": bad} for bad in (5, b"t", "x" * 40, "é" * 20, "x" * 256, "x" * 258, "\ud800")),
        *({"corr_offset": bad} for bad in (1.0, "1", None, True, NAN, 1 << 63, -(1 << 63) - 1)),
        *({"timestamp": bad} for bad in (-1, 1.0, "1", True, NAN, 1 << 63, datetime(2026, 1, 1))),
    ],
    ids=str,
)
def test_fields_of_a_message_that_cannot_be_are_refused(topic, tmp_path, fields):
    with topic.session() as session:
        for call in (topic.append, session.append, lambda body, **more: topic.append_many([b"good", Message(body, **more)])):
            with refused(tmp_path, BadArgument):
                call(b"x", **fields)
    assert len(topic) == 3


def test_a_session_reads_from_nothing_but_a_reader(topic):
    with topic.session() as session:
        for bad in (None, "r", topic, 5):
            with pytest.raises(BadArgument, match="readers of its own"):
                session.read(bad)
            with pytest.raises(BadArgument, match="readers of its own"):
                session.read_many(bad, 1)


def test_bad_calls_in_threads_leave_no_lock_behind(topic):
    """An error inside a call must give back every lock that it took."""
    with topic.reader("r") as one:

        def work() -> None:
            for call in (lambda: topic.append(5), lambda: one.seek(number=99), lambda: one.commit("x"), lambda: one.lease("")):
                with contextlib.suppress(QewQewError):
                    call()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        assert topic.append(b"3") == 3
        assert len(list(one)) == 4
