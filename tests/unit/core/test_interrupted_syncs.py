"""Ctrl-C while a call waits for the disk: what it was to do is there at once, for everybody, or never; and it is there once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core import Broken, Queue, Stage, Topic
from qewqew_core.disk.files import Files

Call = Callable[[], object]
Look = Callable[[], list[bytes]]


class Interrupting(Files):
    """Ctrl-C comes during these syncs, which are counted from `arm` on."""

    def __init__(self, *which: int) -> None:
        super().__init__()
        self.which, self.done, self.armed = which, 0, False

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self.armed:
            self.done += 1
            if self.done in self.which:
                raise KeyboardInterrupt


def of_queue(path: Path, files: Files, stack: contextlib.ExitStack) -> tuple[Call, Call, Look]:
    q = stack.enter_context(Queue(path / "q", _files=files))
    return lambda: q.put(b"new"), lambda: q.put(b"later"), lambda: list(q)


def of_queue_session(path: Path, files: Files, stack: contextlib.ExitStack) -> tuple[Call, Call, Look]:
    q = stack.enter_context(Queue(path / "q", _files=files))
    session = q.session()
    stack.callback(session.close)
    session.put(b"new")

    def later() -> None:
        session.put(b"later")
        session.commit()

    return session.commit, later, lambda: list(q)


def of_stage(path: Path, files: Files, stack: contextlib.ExitStack) -> tuple[Call, Call, Look]:
    stage = Stage(path / "q", _files=files)
    stack.callback(stage.close)
    stage.put(b"new")

    def later() -> None:
        stage.put(b"later")
        stage.commit()

    def look() -> list[bytes]:
        with Queue(path / "q") as q:
            return list(q)

    return stage.commit, later, look


def of_topic(path: Path, files: Files, stack: contextlib.ExitStack) -> tuple[Call, Call, Look]:
    topic = stack.enter_context(Topic(path / "t", _files=files))
    return lambda: topic.append(b"new"), lambda: topic.append(b"later"), lambda: by_all(topic, path)


def of_topic_session(path: Path, files: Files, stack: contextlib.ExitStack) -> tuple[Call, Call, Look]:
    topic = stack.enter_context(Topic(path / "t", _files=files))
    topic.append(b"read")
    topic.writer()
    reader, session = topic.reader("r"), topic.session()
    stack.callback(reader.close)
    session.read(reader)
    session.append(b"new")

    def later() -> None:
        session.append(b"later")
        session.commit()

    def look() -> list[bytes]:
        seen = by_all(topic, path)
        assert reader.stats().records == len(seen) - (b"new" in seen)  # what the session has read
        return seen

    return session.commit, later, look


def by_all(topic: Topic, path: Path) -> list[bytes]:
    """As the topic says, which another object must say too, and a reader of that one."""
    seen = [one.body for one in topic]
    with Topic(path / "t") as other, other.reader("another", temporary=True) as reader:
        assert [one.body for one in other] == [one.body for one in reader.read_many(9)] == seen
    assert len(topic) == topic.stats().next == len(seen)
    return seen


@pytest.mark.parametrize("which", [(n,) for n in range(1, 9)] + [(n, n + 1) for n in range(1, 4)])
@pytest.mark.parametrize("made", [of_queue, of_queue_session, of_stage, of_topic, of_topic_session])
def test_what_was_interrupted_is_there_at_once_or_never(tmp_path: Path, made: Callable[..., tuple[Call, Call, Look]], which):
    files = Interrupting(*which)
    with contextlib.ExitStack() as stack:
        act, later, look = made(tmp_path, files, stack)
        files.armed = True
        with contextlib.suppress(KeyboardInterrupt):
            act()
        files.armed = False
        seen = None
        with contextlib.suppress(Broken):
            before = look()
            later()
            waits = (
                made not in (of_queue, of_topic) and b"new" not in before
            )  # a session or a stage that was not committed keeps it
            seen = [*before, *[b"new"][:waits], b"later"]
            assert look() == seen
    with contextlib.ExitStack() as stack:
        found = made(tmp_path, Files(), stack)[2]()
    assert found.count(b"new") <= 1
    assert seen is None or [one for one in found if one != b"read"] == [one for one in seen if one != b"read"]
