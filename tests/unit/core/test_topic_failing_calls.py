"""Each call of the file system fails once, or from then on, for every call in turn; and Ctrl-C comes at any line.

A named error, nothing acknowledged is lost, nothing is half done; what met a full disk works on when there is room again.
"""

from __future__ import annotations

import contextlib
import errno
import linecache
import logging
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import JournalDisk
from test_failing_calls import CHANGES, NEVER, FailingDisk, Stopped, _failing
from test_topic_crash import (  # noqa: F401 - a fixture
    EMPTY,
    NoSync,
    View,
    Workload,
    check,
    differences,
    is_between,
    options_of,
    script,
    small_limits,
    view,
)

import qewqew_core.topic
from qewqew_core import BadPath, DiskFull, QewQewError, QueueBroken, QueueClosed, Topic
from qewqew_core.reader import Reader
from qewqew_core.topic_session import TopicSession

LENGTH = 40


class FailingTopicDisk(FailingDisk):
    """What topics call besides."""

    link = _failing("link")
    remove_directory = _failing("remove_directory")


class FailingWorkload(Workload):
    """Goes on after a full disk, as a user would, and stops at any other error. `done` counts what has returned."""

    done = 0
    refused = False

    def open(self) -> None:
        try:
            super().open()
        except DiskFull:
            self.disk.left = NEVER
            super().open()
        except QewQewError:
            self.disk.left = NEVER
            raise Stopped from None

    def close(self) -> None:
        try:
            super().close()
        except DiskFull:
            self.disk.left = NEVER
            super().close()
        except QewQewError:
            self.stop()

    def do(self, operation: Callable[[Workload], object]) -> None:
        try:
            operation(self)
        except (DiskFull, BadPath):  # BadPath: the first append opens files
            self.disk.left = NEVER  # there is room again: it works without opening anything anew
            operation(self)
        except QueueBroken:
            self.stop()
        self.steps.append((0, view(self.topic)))
        self.done += 1

    def stop(self) -> None:
        """What is broken refuses all calls, and lets go of everything."""
        self.disk.left = NEVER
        calls = [(reader, reader.position) for reader in self.readers]
        if self.topic._writer is not None:
            calls.append((self.topic._writer, lambda: self.topic.append(b"refused")))
        for one, call in calls:
            if isinstance(one._refusal, QueueBroken):
                self.refused = True
                with pytest.raises(QueueBroken):
                    call()
        for session in self.sessions:
            with contextlib.suppress(QueueBroken, QueueClosed):
                session.close()
        for reader in self.readers:
            reader.close()
        self.topic.close()
        raise Stopped


def run_with_failure(
    tmp_path: Path, seed: int, good: list[View], number: int, error: int, short: bool, for_ever: bool
) -> tuple[str | None, bool]:
    root = tmp_path / "work"
    root.mkdir()
    disk = FailingTopicDisk(str(root), number, error, short, for_ever)
    luck = random.Random(seed)
    work = FailingWorkload(disk, str(root / "t"), "commit", options_of(luck))
    stopped = False
    try:
        script(work, luck, LENGTH, EMPTY)
    except Stopped:
        stopped = True
    what = f"seed {seed}: {disk.failed}, change number {number}, failed with {errno.errorcode[error]}"
    before = work.steps[-1][1] if work.steps else EMPTY
    check(root, [before, good[min(work.done + 1, len(good) - 1)]] if stopped else [before], work, what)
    shutil.rmtree(root)
    return disk.failed, work.refused


@pytest.fixture(params=[3, 4])
def good_run(request, tmp_path, small_limits) -> tuple[int, list[View]]:  # noqa: F811
    """What the topic is after each operation of the same script, on a disk that never fails."""
    root = tmp_path / "good"
    root.mkdir()
    luck = random.Random(request.param)
    work = Workload(JournalDisk(str(root)), str(root / "t"), "commit", options_of(luck))
    script(work, luck, LENGTH, EMPTY)
    return request.param, [seen for _, seen in work.steps]


@pytest.mark.parametrize(
    ("error", "short", "for_ever"),
    [(errno.EIO, False, False), (errno.EIO, True, True), (errno.ENOSPC, False, False), (errno.ENOSPC, True, True)],
    ids=["EIO once", "EIO from then on, short writes", "full disk once", "full disk until there is room, short writes"],
)
def test_any_call_may_fail(tmp_path, good_run, error, short, for_ever):
    logging.getLogger("qewqew_core").setLevel(logging.ERROR)
    number, kinds, refusals = 1, set(), 0
    while True:
        failed, refused = run_with_failure(tmp_path, *good_run, number, error, short, for_ever)
        if not failed:
            break
        kinds.add(failed)
        refusals += refused
        number += 5
    assert number > 60
    assert {"open", "write", "sync", "sync_directory"} <= kinds <= {*CHANGES, "link", "remove_directory"}
    if error == errno.EIO:
        assert refusals > 10


# Ctrl-C

WATCHED = {
    str(Path(qewqew_core.topic.__file__).with_name(f"{name}.py"))
    for name in (
        "topic",
        "appending",
        "outgoing",
        "topic_log",
        "topic_session",
        "reader",
        "reader_log",
        "journal",
        "leasing",
        "batch",
    )
}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the code of topics runs."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # Not while an error is handled, or locks are given back: that is what would be interrupted a second time.
        if code.co_filename not in WATCHED or code.co_name in ("_break", "__init__", "__del__", "_enter", "_leave", "_release"):
            return None
        # No signal is handled at these lines, and the lock that a `with` has taken would not be released.
        if event == "line" and not linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)


def append(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.append(b"new", tag="a")


def append_many_with_a_new_block(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.append_many([b"%d" % number * 90 for number in range(9)], key="key")


def commit(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.commit()


def nack(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.nack()


def lease(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.lease("key", max_records=4)


def end_leases(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.batches()[0].to_dead_letters("why")


def commit_session(topic: Topic, reader: Reader, session: TopicSession) -> None:
    session.commit(key="key")


def trim(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.trim()


@pytest.mark.parametrize(
    "operation", [append, append_many_with_a_new_block, commit, nack, lease, end_leases, commit_session, trim]
)
def test_a_call_that_was_interrupted_anywhere_has_happened_or_not(tmp_path, small_limits, operation):  # noqa: F811
    before, after = interrupted(tmp_path / "whole", operation, 1 << 30)[1:]
    assert (before == after) is (operation is nack)
    for line in range(1, 6000, 3):
        left, now, _ = interrupted(tmp_path / "t", operation, line)
        assert now == before
        with Topic(tmp_path / "t" / "t", _files=NoSync()) as topic:
            for name in topic.readers():
                topic.reader(name).close()
            seen = view(topic)
            assert is_between(seen, before, after), f"line {line}: {differences(seen, [before, after])}"
            assert topic.verify().problems == []
            with topic.reader("r") as reader:
                assert sorted(one.number for one in reader) == sorted(seen.readers["r"].pending)
        shutil.rmtree(tmp_path / "t")
        if left > 0:
            break
    assert left > 0, "it was interrupted each time"


def interrupted(folder: Path, operation: Callable[..., None], line: int) -> tuple[int, View, View]:
    """The lines that were left, and the topic before and after the operation."""
    folder.mkdir()
    topic = Topic(folder / "t", block_size=600, max_records=4, slow_readers="move", _files=NoSync())
    topic.max_records = None
    topic.append_many([b"old %d" % number for number in range(6)])
    topic.append(b"last")
    reader, other, session = topic.reader("r"), topic.reader("s"), topic.session()
    if operation is not trim:  # a leased batch keeps its blocks
        reader.lease("first", max_records=1)
    reader.read_many(2)
    session.read_many(reader, 1)
    session.read_many(other, 2)
    session.append_many([b"in session", b"spilled" * 30])
    before, interrupt = view(topic), Interrupt(line)
    if operation is trim:
        topic.max_records = 1
        reader.seek(number=6)
        before = view(topic)
    try:
        with interrupt:
            operation(topic, reader, session)
    except (KeyboardInterrupt, QueueBroken):
        pass
    topic.max_records = None
    after = view(topic) if interrupt.left > 0 else before
    for one in (session, reader, other, topic):
        with contextlib.suppress(QueueBroken, QueueClosed):
            one.close()
    return interrupt.left, before, after
