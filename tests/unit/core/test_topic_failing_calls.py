"""Each call of the file system fails once, or from then on, for every call in turn; and Ctrl-C comes at any line.

A named error, nothing acknowledged is lost, nothing is half done; what met a full disk works on when there is room again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import shutil
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
    options_of,
    script,
    small_limits,
    view,
)

from qewqew_core import BadPath, DiskFull, QewQewError, QueueBroken, QueueClosed

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
        number += 3
    assert number > 60
    assert {"open", "write", "sync", "sync_directory"} <= kinds <= {*CHANGES, "link", "remove_directory"}
    if error == errno.EIO:
        assert refusals > 20
