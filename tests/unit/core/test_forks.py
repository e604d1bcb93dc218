"""A child that outlives its parent keeps nothing of it: no lock, no place in a line, whatever the parent did at the fork."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain import numbers
from test_group_commit import led, until

from qewqew_core import Queue, Stage, Topic
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.topic import topic_paths

PARENT = """
import os, sys, threading, time
from qewqew_core import Queue, Stage, Topic
from qewqew_core.disk import lock
from qewqew_core.limits import LIMITS
from qewqew_core.queue import recovery
from qewqew_core.topic import topic_recovery

def queue():
    Queue(path, lock_timeout=600)

def stage():
    lock.PATIENCE = 60  # it tries to lead as long
    with Stage(path, lock_timeout=600) as staging:
        staging.put(b"of the parent")
        staging.commit()

def spilled():
    LIMITS.spill_bytes = 100
    staging = Stage(path)
    staging.put_many([bytes(100)] * 10)
    kept.append(staging)

def topic():
    opened = Topic(path, lock_timeout=600)
    opened.append(b"of the parent")

def opening():
    recover = recovery.recover
    recovery.recover = lambda *arguments: (recover(*arguments), time.sleep(600))
    Queue(path)

def opening_a_topic():
    recover = topic_recovery.recover
    topic_recovery.recover = lambda *arguments: (recover(*arguments), time.sleep(600))
    Topic(path).append(b"of the parent")

def reader():
    opened = Topic(path).reader("r")
    kept.append(opened)
    take, first = opened._shared._take_lock, [True]
    opened._shared._take_lock = lambda: (take(), time.sleep(600))
    opened.read()

path, kept = sys.argv[1], []
threading.Thread(target=globals()[sys.argv[2]], daemon=True).start()
for _ in sys.stdin:
    if not os.fork():
        print(os.getpid(), flush=True)
        time.sleep(600)
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    with Queue(path) as q:
        q.put(b"first")
        yield


@contextlib.contextmanager
def held_topic(path: Path) -> Iterator[None]:
    with Topic(path) as topic:
        topic.append(b"first")
        yield


@contextlib.contextmanager
def made(path: Path) -> Iterator[None]:
    with held(path):
        pass
    yield


@contextlib.contextmanager
def made_topic(path: Path) -> Iterator[None]:
    with held_topic(path), Topic(path) as topic:
        topic.reader("r").close()
    yield


LINE = lock._LINE, lock._OWNERS - lock._LINE
WHOLE = 0, lock._LINE
# What is there, what the parent does, and which file and bytes it has locked by then
CASES: dict[
    str, tuple[Callable[[Path], contextlib.AbstractContextManager[None]], str, Callable[[Path], Path], tuple[int, int]]
] = {
    "waits for a queue": (held, "queue", lambda path: path, LINE),
    "leads": (held, "stage", lambda path: path, (lock._LEAD, 1)),
    "has a stage on disk": (made, "spilled", lambda path: next(iter(path.parent.glob("q.staged/*.1"))).with_suffix(""), WHOLE),
    "opens a queue": (made, "opening", lambda path: path, WHOLE),
    "waits for a topic": (held_topic, "topic", lambda path: Path(topic_paths.lock_of(str(path))), LINE),
    "opens a topic": (made_topic, "opening_a_topic", lambda path: Path(topic_paths.lock_of(str(path))), WHOLE),
    "uses a reader": (made_topic, "reader", lambda path: path / "state" / "r.lock", (0, 1)),
}


def is_locked(file: Path, start: int = 0, length: int = 0) -> bool:
    fd = os.open(file, os.O_RDWR)
    try:
        return lock.first_locked(fd, start, length) is not None
    finally:
        os.close(fd)


def locked_files(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file() and is_locked(file)]


class Parent:
    """A program that does this, and forks when it is asked to. Its child lives until the end."""

    def __init__(self, path: Path, what: str) -> None:
        self.program = subprocess.Popen(
            [sys.executable, "-c", PARENT, path, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.children = list[int]()

    def fork(self) -> None:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        self.children.append(int(self.program.stdout.readline()))

    def kill(self) -> None:
        self.program.kill()
        self.program.wait()

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
        self.kill()
        for pipe in (self.program.stdin, self.program.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("case", CASES)
def test_a_child_that_outlives_a_killed_parent_keeps_none_of_its_locks(tmp_path: Path, case: str) -> None:
    made, what, file, where = CASES[case]
    path = tmp_path / ("t" if made in (held_topic, made_topic) else "q")

    def is_there() -> bool:
        with contextlib.suppress(FileNotFoundError, StopIteration):
            return is_locked(file(path), *where)
        return False

    with contextlib.ExitStack() as others:
        others.enter_context(made(path))
        with Parent(path, what) as parent:
            until(is_there)
            parent.fork()
            assert is_there(), "the parent goes on"
            parent.kill()
            others.close()
            assert locked_files(tmp_path) == []


def test_nor_those_that_the_parent_gets_after_the_fork(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with held(path), Parent(path, "stage") as parent:
        with led(path):
            until(lambda: list(tmp_path.glob("q.staged/*.put")))
            parent.fork()
        until(lambda: is_locked(path, lock._LEAD, 1))
        parent.kill()
        assert not is_locked(path, lock._LEAD, 1)
        assert not is_locked(path, *LINE)


def test_a_fork_leaves_files_alone_that_have_the_numbers_of_files_that_were_closed(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            Queue(tmp_path / "q") as q,
            Stage(tmp_path / "q2") as stage,
            Topic(tmp_path / "t") as topic,
            topic.reader("r") as reader,
        ):
            q.put_many(numbers(0, 100))
            stage.put(b"x")
            stage.commit()
            topic.append(b"x")
            assert reader.read().body == b"x"
    others = [os.open(tmp_path / f"other {number}", os.O_RDWR | os.O_CREAT) for number in range(30)]
    if not (child := os.fork()):
        for fd in others:
            os.write(fd, b"of the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for number, fd in enumerate(others):
        os.close(fd)
        assert (tmp_path / f"other {number}").read_bytes() == b"of the child"


def test_a_file_that_could_not_be_made_whole_leaves_no_number_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets its number next keeps the file after a fork."""
    files = Files()

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "_made", fails)
        with pytest.raises(OSError, match="Input/output"):
            files.open(str(tmp_path / "made"), new=True)
    fd = os.open(tmp_path / "another", os.O_RDWR | os.O_CREAT)
    try:
        if (pid := os.fork()) == 0:
            os.write(fd, b"of the child")
            os._exit(0)
        os.waitpid(pid, 0)
    finally:
        os.close(fd)
    assert (tmp_path / "another").read_bytes() == b"of the child"
