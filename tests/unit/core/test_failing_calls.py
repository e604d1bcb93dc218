"""Each call of the file system fails once, for every call in turn: a named error, and nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from disk import JournalDisk
from test_crash import View, Workload, check, script, small_limits  # noqa: F401 - a fixture

from qewqew_core import DiskFull, QewQewError, Queue, QueueBroken

NEVER = 1 << 60
LENGTH = 40
CHANGES = ("open", "write", "allocate", "truncate", "sync", "sync_directory", "rename", "unlink", "make_directory")


class FailingDisk(JournalDisk):
    """Fails the n-th call that could change something; ``short``: a write that fails has written half."""

    def __init__(self, root: str, number: int, error: int, short: bool, for_ever: bool) -> None:
        super().__init__(root)
        self.left, self.error, self.short, self.for_ever = number, error, short, for_ever
        self.failed: str | None = None


def _failing(name: str):
    def call(self, *arguments, **named):
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.for_ever and name != "unlink"):
            self.failed = self.failed or name
            if name == "write" and self.short:
                fd, data, offset = arguments
                JournalDisk.write(self, fd, data[: len(data) // 2], offset)
            raise OSError(self.error, "made to fail", arguments[0] if isinstance(arguments[0], str) else None)
        return getattr(JournalDisk, name)(self, *arguments, **named)

    return call


for _name in CHANGES:
    setattr(FailingDisk, _name, _failing(_name))


class Stopped(Exception):
    """The workload met an error after which the queue object refuses to go on."""


class FailingWorkload(Workload):
    """Goes on after a full disk, as a user would, and stops at any other error. `done` counts what has returned."""

    done = 0

    def open(self) -> None:
        self._or_stop(super().open)

    def close(self) -> None:
        self._or_stop(super().close)

    def _or_stop(self, call) -> None:
        try:
            call()
        except QewQewError:
            self.disk.left = NEVER
            raise Stopped from None

    def do(self, operation) -> None:
        try:
            operation(self.q)
        except DiskFull:
            self.disk.left = NEVER  # there is room again: it works without opening the queue anew
            operation(self.q)
        except QueueBroken:
            self.disk.left = NEVER
            with pytest.raises(QueueBroken):
                self.q.put(b"refused")
            self.q.close()
            raise Stopped from None
        self.done += 1


def run_with_failure(
    tmp_path: Path, seed: int, steps: list[View], number: int, error: int, short: bool, for_ever: bool
) -> str | None:
    root = tmp_path / "work"
    root.mkdir()
    disk = FailingDisk(str(root), number, error, short, for_ever)
    work = FailingWorkload(disk, str(root / "q"), "commit", chunk_size=64)
    with contextlib.suppress(Stopped):
        script(work, random.Random(seed), LENGTH)
    what = f"seed {seed}: {disk.failed}, change number {number}, failed with {errno.errorcode[error]}"
    check(root, steps[work.done : work.done + 2], work, what)  # what was in flight has happened, or not
    shutil.rmtree(root)
    return disk.failed


@pytest.fixture(params=[1, 2])
def good_run(request, tmp_path, small_limits) -> tuple[int, list[View]]:  # noqa: F811
    """What the queue is after each operation of the same script, on a disk that never fails."""
    root = tmp_path / "good"
    root.mkdir()
    work = Workload(JournalDisk(str(root)), str(root / "q"), "commit", chunk_size=64)
    script(work, random.Random(request.param), LENGTH)
    return request.param, [seen for _, seen in work.steps]


@pytest.mark.parametrize(
    ("error", "short", "for_ever"),
    [(errno.EIO, False, False), (errno.EIO, True, True), (errno.ENOSPC, False, False), (errno.ENOSPC, True, True)],
    ids=["EIO once", "EIO from then on, short writes", "full disk once", "full disk until there is room, short writes"],
)
def test_any_call_may_fail(tmp_path, good_run, error, short, for_ever):
    number, kinds = 1, set()
    while failed := run_with_failure(tmp_path, *good_run, number, error, short, for_ever):
        kinds.add(failed)
        number += 3
    assert number > 60
    assert {"open", "write", "sync", "sync_directory"} <= kinds


def test_a_failed_fsync_is_not_tried_again(tmp_path):
    class Refusing(JournalDisk):
        tries = 0

        def sync(self, fd):
            if self.refuse:
                self.tries += 1
                raise OSError(errno.EIO, "made to fail")

    disk = Refusing(str(tmp_path))
    disk.refuse = False
    q = Queue(tmp_path / "q", _files=disk)
    q.put(b"kept")
    disk.refuse = True
    with pytest.raises(QueueBroken, match="refuses every further call"):
        q.put(b"refused")
    for call in (lambda: q.put(b"more"), q.get, q.peek, lambda: len(q), q.clear, lambda: q.lease("key")):
        with pytest.raises(QueueBroken):
            call()
    q.close()
    assert disk.tries == 1
    disk.refuse = False
    with Queue(tmp_path / "q") as again:  # the put that raised must not come back, the one that returned must
        assert list(again) == [b"kept"]


def test_a_failed_fsync_fails_every_commit_that_waited_for_it(tmp_path):
    """The second thread must not try again, be told that all is well, and acknowledge what was cut off the log."""
    entered, go_on = threading.Event(), threading.Event()

    class FailsOnce(JournalDisk):
        armed = False

        def sync(self, fd):
            if self.armed:
                self.armed = False
                entered.set()
                go_on.wait(60)
                raise OSError(errno.EIO, "made to fail")

    disk = FailsOnce(str(tmp_path))
    q = Queue(tmp_path / "q", _files=disk)
    q.put(b"kept")
    disk.armed = True
    outcomes = []

    def put(record):
        try:
            q.put(record)
            outcomes.append("stored")
        except QueueBroken:
            outcomes.append("refused")

    first = threading.Thread(target=put, args=(b"first",))
    first.start()
    assert entered.wait(60)
    second = threading.Thread(target=put, args=(b"second",))
    second.start()
    while len(q) < 3:  # the second put is committed, and waits for its fsync
        time.sleep(0.001)
    go_on.set()
    first.join()
    second.join()
    assert outcomes == ["refused", "refused"]
    q.close()
    with Queue(tmp_path / "q") as again:
        assert list(again) == [b"kept"]
