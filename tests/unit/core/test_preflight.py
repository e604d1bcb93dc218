"""`qewqew preflight`: what it says of a place is what a task would find there, and it leaves nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fsspec
import pytest
from commands import done, refused, run
from test_owners import as_root, as_user, directory_of

from qewqew_core import Queue, Topic
from qewqew_core.tools import marker


def answers(*arguments: object) -> tuple[int, dict[str, str]]:
    """The exit code, and the texts of what is wrong."""
    result = run("preflight", *arguments, "--json")
    return result.exit_code, {found["what"]: found["text"] for found in json.loads(result.stdout) if not found["ok"]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    marker.init(str(tmp_path / "queues"), "lake-1")
    return tmp_path / "queues"


def test_a_directory_that_tasks_can_use_is_all_right_and_stays_as_it_was(directory: Path) -> None:
    with Queue(directory / "orders") as queue, Topic(directory / "events") as topic:
        queue.put(b"x")
        topic.append(b"x")
        before = set(directory.rglob("*"))
        assert answers(directory, "--id", "lake-1", "--min-free-bytes", 1) == (0, {})  # also while tasks work there
        assert set(directory.rglob("*")) == before
    told = done("preflight", directory).decode().splitlines()
    assert len(told) == 5
    assert all(line.startswith("ok ") for line in told)
    assert "its id is lake-1" in told[1]
    assert told[4].endswith("that can be read: 2")


def test_a_place_that_is_no_directory_of_queues_is_said_to_be_none(directory: Path, tmp_path: Path) -> None:
    with Queue(directory / "orders") as queue, Topic(directory / "events") as topic:
        queue.put(b"x")
        topic.append(b"x")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for path, text in (
        (tmp_path / "missing", "the directory cannot be used: No such file or directory"),
        (tmp_path / "dangling", "the directory cannot be used: No such file or directory"),
        (tmp_path / "file", "this is a file; give the directory of the queues, not one of them"),
        (tmp_path / "empty", "a mount may be missing. If it is the right one, and new, run `qewqew init"),
        (directory / "orders", "this is a file; give the directory of the queues"),
        (directory / "events", "this is a topic; give the directory of the queues"),
    ):
        code, wrong = answers(path)
        assert (code, [*wrong]) == (1, ["directory"])
        assert wrong["directory"].startswith(f"BadPath: {path}: ")
        assert text in wrong["directory"]
    assert list((tmp_path / "empty").iterdir()) == []
    code, wrong = answers(directory, "--id", "lake-2")
    assert (code, "has the id 'lake-1', and not 'lake-2'" in wrong["directory"]) == (1, True)


def test_each_thing_that_is_wrong_is_told_with_its_remedy(directory: Path) -> None:
    with Queue(directory / "orders") as queue:
        queue.put(b"x")
    log = bytearray((directory / "orders.wal").read_bytes())
    log[30] ^= 1
    (directory / "orders.wal").write_bytes(log)
    code, wrong = answers(directory, "--min-free-bytes", 1 << 62)
    assert (code, [*wrong]) == (1, ["free room", "what is there"])
    assert wrong["free room"].startswith("DiskFull: ")
    assert "make room" in wrong["free room"]
    assert wrong["what is there"].startswith(f"Corrupt: {directory}/orders.wal")
    assert "WRONG" in run("preflight", directory, "--min-free-bytes", 1 << 62).stdout


@as_root
def test_another_user_is_told_who_may_use_the_directory_and_what_is_in_it() -> None:
    with directory_of(12345, 0o755) as directory:

        def make(path: Path) -> None:
            marker.init(str(path))
            with Queue(path / "orders") as queue:
                queue.put(b"x")

        as_user(make, directory)

        def told(path: Path, *what: str) -> None:
            code, wrong = answers(path)
            assert (code, [*wrong]) == (1, [*what])
            for text in wrong.values():
                assert text.startswith("BadPath: ")
                assert "This is user 12346, and the" in text
                assert "belongs to 12345, mode " in text

        as_user(lambda path: told(path, "directory"), directory, 12346)
        os.chown(directory / marker.NAME, 0, 0)  # an image has it
        (directory / marker.NAME).chmod(0o644)
        as_user(lambda path: told(path, "a new queue", "what is there"), directory, 12346)
        assert answers(directory) == (0, {})  # root works for the owner
        assert not list(directory.glob(".qewqew-preflight*"))


@as_root
def test_a_group_is_asked_for_as_the_tasks_would(tmp_path: Path) -> None:
    for name, group, code in (("shared", "12399", 0), ("own", None, 1)):
        marker.init(str(tmp_path / name), group=group)
        result = run("--group", "12399", "preflight", tmp_path / name)
        assert (result.exit_code, "WRONG  a new queue    BadPath" in result.stdout) == (code, bool(code))
    assert "chmod 2770" in result.stdout


def test_spark_is_looked_for_if_it_is_asked_for(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spark-submit", "java"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answers(directory, "--spark") == (0, {})
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert answers(directory) == (0, {})
    code, wrong = answers(directory, "--spark")
    assert (code, [*wrong]) == (1, ["spark-submit", "Java"])
    assert wrong["spark-submit"].startswith("SparkSubmitNotFound: 'spark-submit' is neither on PATH")
    assert wrong["Java"].startswith("JavaNotFound: spark-submit needs Java")


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_place_in_a_store_is_tried(kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/staged" if kind == "file" else "memory://preflight/staged"
    try:
        for _ in range(2):
            assert answers(url) == (0, {})
        assert "creates a file only if there is none" in done("preflight", url).decode()
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_place_in_a_store_that_cannot_be_used_is_told_with_the_cause(tmp_path: Path) -> None:
    for url, text in (
        ("http://lake/staged", "http:// cannot create a file only where there is none"),
        ("s3://user:hushhush@lake/staged", "the s3 URL contains a password"),
        (f"file://{tmp_path}/file/staged", "BadPath: "),
    ):
        (tmp_path / "file").touch()
        code, wrong = answers(url)
        assert (code, text in wrong["place"], "hushhush" in wrong["place"]) == (1, True, False)
    refused(2, "preflight", "s3://lake/staged", "--id", "lake-1", match="has no id")
    refused(2, "preflight", tmp_path, "--option", "anon=true", match="--option is for the URL of a store")
