"""Ctrl-C at any moment while a topic, a reader or a session is opened or closed: nothing stays locked, no descriptor stays open.

What was interrupted is finished by the next `close`, or by opening again, in the same process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
from disk import NoSync
from interrupting import Interrupt, interrupts
from stride import Every

from qewqew_core import Locked, Message, QewQewError, Topic
from qewqew_core.limits import LIMITS
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic_session import TopicSession

# A `__del__` that meets an object which an interrupt has left half made.
pytestmark = pytest.mark.filterwarnings(r"error:[\s\S]*AttributeError:pytest.PytestUnraisableExceptionWarning")

MODULES = (
    "topic/topic",
    "topic/reader",
    "disk/engine",
    "topic/shared_log",
    "topic/deliveries",
    "topic/participant",
    "topic/reader_batches",
    "topic/reader_files",
    "topic/reader_inspection",
    "topic/reader_log",
    "topic/writer",
    "topic/blocks",
    "topic/topic_recovery",
    "topic/topic_session",
    "topic/outgoing",
    "topic/view",
    "disk/files",
    "disk/descriptors",
    "disk/directories",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing cuts logs back, and a session has a file."""
    monkeypatch.setattr(LIMITS, "topic_spill_bytes", 100)
    monkeypatch.setattr(LIMITS, "log_bytes_at_close", 100)
    monkeypatch.setattr(LIMITS, "reader_log_bytes_at_close", 100)


def topic_at(path: Path) -> Topic:
    return Topic(path, block_size=700, lock_timeout=0, max_bytes=4000, _files=NoSync())


@dataclass
class Opened:
    topic: Topic
    reader: Reader
    temporary: Reader
    session: TopicSession

    def close(self) -> None:
        for one in (self.session, self.temporary, self.reader, self.topic):
            one.close()


def opened(path: Path) -> Opened:
    """Of twelve messages, 0 is committed, 1 to 5 are in flight."""
    topic = topic_at(path)
    topic.append_many([Message(b"%d" % number * 50, "odd" if number % 2 else "even") for number in range(12)])
    reader, temporary = topic.reader("r"), topic.reader("passing", temporary=True)
    reader.commit(reader.read())
    reader.read_many(3)
    session = topic.session()
    session.read_many(reader, 2)
    session.append(b"x" * 90)
    session.append(b"spilled" * 9)
    return Opened(topic, reader, temporary, session)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def check_closed(before: int, interrupt: Interrupt) -> None:
    """Between the system's call that opens a file and the list that takes its descriptor is a moment that nobody can close; what
    stays open then is one descriptor, and nothing is locked by it.
    """
    assert descriptors() - before in ((0, 1) if "open" in interrupt.where else (0,)), f"{interrupt.where}: descriptors stay open"


def check_free(path: Path, what: str, delivered: list[int]) -> None:
    """Whoever opens the topic now need not wait for anybody, and the reader gets what was not committed, at once."""
    with topic_at(path) as topic:
        topic.append(b"new")
        with topic.reader("r", redeliver_after=None) as reader:
            assert [one.number for one in reader.read_many(100)] == delivered, what
            reader.commit()
        assert topic.verify().problems == [], what
        topic.writer()  # which removes temporary readers of which nobody lives
        assert topic.readers() == ["r"], what


@pytest.mark.parametrize("which", ["session", "temporary", "reader", "topic"])
def test_a_close_that_was_interrupted_anywhere_is_finished_by_the_next_one(tmp_path: Path, every: Every, which: str) -> None:
    topic_at(tmp_path / "warm").close()
    for interrupt in interrupts(every, MODULES, quick=30, full=10):
        before = descriptors()
        path = tmp_path / str(interrupt.point)
        made = opened(path)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            getattr(made, which).close()
        with contextlib.suppress(QewQewError):
            getattr(made, which).close()
        made.close()
        del made
        check_closed(before, interrupt)
        check_free(path, f"interrupted at {interrupt.where}", [*range(1, 13)])
    assert interrupt.point > 40  # how many there are differs from one Python to the next


def open_topic(path: Path) -> Topic:
    return topic_at(path)


def open_writer(path: Path) -> Topic:
    topic = topic_at(path)
    topic.writer()
    return topic


def open_reader(path: Path) -> Topic:
    topic = topic_at(path)
    topic.reader("r").close()
    return topic


def make_reader(path: Path) -> Topic:
    topic = topic_at(path)
    topic.reader("passing", "odd", temporary=True).close()
    return topic


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("act", [open_topic, open_writer, open_reader, make_reader])
def test_an_opening_that_was_interrupted_anywhere_leaves_nothing_locked_and_nothing_open(
    tmp_path: Path, every: Every, act: Callable[[Path], Topic], crashed: bool
) -> None:
    base = tmp_path / "base"
    (tmp_path / "made").mkdir()
    made = opened(tmp_path / "made" / "t")
    if not crashed:
        made.close()
    shutil.copytree(tmp_path / "made", base)
    made.close()
    del made
    for interrupt in interrupts(every, MODULES, quick=120, full=40):
        before = descriptors()
        folder = tmp_path / str(interrupt.point)
        shutil.copytree(base, folder)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            act(folder / "t").close()
        check_closed(before, interrupt)
        check_free(folder / "t", f"interrupted at {interrupt.where}", [*range(1, 13)])
    assert interrupt.point > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may come in a `__del__`
def test_real_signals_leave_nothing_locked(tmp_path: Path) -> None:
    """At any moment, also within a line."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    until, count = time.monotonic() + 3, 0
    try:
        while time.monotonic() < until or count < 20:
            path = tmp_path / str(count)
            made, count = opened(path), count + 1
            with contextlib.suppress(KeyboardInterrupt, QewQewError):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 * (count % 200 + 1))
                    made.close()
                    topic_at(path).reader("r").close()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            with contextlib.suppress(QewQewError):
                made.close()
            made.close()
            del made
            gc.collect()
            try:
                check_free(path, f"try {count}", [*range(1, 13)])
            except Locked as error:
                raise AssertionError(f"try {count} left a lock") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
