"""Who may open a queue: one owner at a time, between processes, between threads, and against a Java process.

The lock is the one that the original takes: a write lock on the header file, except on bytes far behind its end (see `_Line`).
It is an *open file description* lock. Such a lock collides with the POSIX locks of the JVM in both directions and with a second
opening in the same process, and it stays when another descriptor of the file is closed. portalocker takes and releases it, with
the locker of `ofd`, also for readers and their consumers. The kernel drops it when the process dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from qewqew_core.disk import waker
from qewqew_core.disk.descriptors import Closes, Descriptors, NotCopied, close_all, close_each, has_open
from qewqew_core.disk.files import DISK, Files, check_regular
from qewqew_core.errors import BadPath, Locked
from qewqew_core.limits import uptime_ms

_T = TypeVar("_T")
_HEADER = 2  # bytes
_LINE = 1 << 62  # where in a file waiters stand in line: far behind everything that is written …
_OWNERS = _LINE + (1 << 61)  # … and where the owner has the byte that says who it is and since when, behind them …
_LEAD = _OWNERS + (1 << 60)  # … and the byte of the stage that leads others
_PID_BITS, _LATEST = 32, (1 << 28) - 1  # eight years, in seconds: bytes before that of the leader
_QUICK_LOOKS = 0.005  # seconds for which a waiter looks by itself: a call of a reader takes less time than waking a thread
_LONGEST_PAUSE = 0.02  # seconds between two looks if the kernel does not wake us
PATIENCE = 1.0  # seconds without moving forward


def check_system(path: str) -> None:
    """Raise `BadPath` if the system does not have the locks that all this needs."""
    if sys.platform != "linux" or not hasattr(fcntl, "F_OFD_SETLK"):
        raise BadPath(
            "cannot be opened: this system has no open file description locks, without which two owners could destroy each "
            "other's records. Use Linux 3.15 or newer. Nothing was changed; inspect works on any system",
            path=path,
        )


# Locks on bytes of an open file. portalocker is imported late: Spark's executors read batches with this package and need not have
# it, and it imports redis where that is installed, which takes 0.5 s and 17 MiB.


def take(fd: int, start: int, length: int) -> bool:
    """Lock these bytes (0: all from ``start`` on) without waiting; False if another opening of the file has some of them."""
    from qewqew_core.disk import ofd

    try:
        ofd.RangeLocker(start, length).lock(fd, ofd.NOW)
    except ofd.AlreadyLocked:
        return False
    except ofd.LockException as error:
        raise error.__cause__ or error from None  # as any other call of the system would
    return True


def drop(fd: int, start: int, length: int) -> None:
    """Unlock these bytes."""
    from qewqew_core.disk import ofd

    try:
        ofd.RangeLocker(start, length).unlock(fd)
    except ofd.LockException as error:
        raise error.__cause__ or error from None


def first_locked(fd: int, start: int, length: int) -> int | None:
    """Where a lock begins that another opening has on some of these bytes (0: all from ``start`` on)."""
    from qewqew_core.disk import ofd

    found = ofd.lock_on(fd, start, length)
    return found and found[0]


def whole(fd: int) -> bool:
    """Lock the whole file, which collides with a Java program's lock; False if another opening has a lock on a part of it."""
    return take(fd, 0, _LINE)


def unlock(*fds: int) -> None:
    """Unlock before closing: a forked child may share the open file descriptions, and closing alone would leave it the locks."""
    for fd in fds:
        with contextlib.suppress(OSError, ImportError):  # when the interpreter ends nothing can be imported any more
            drop(fd, 0, 0)


def release_each(descriptors: dict[int, int], *which: int) -> None:
    """Unlock and close all of them, or these."""
    unlock(*map(descriptors.__getitem__, which or descriptors))
    close_each(descriptors, *which)


class HeaderLock(NotCopied):
    """The lock on one header file; `fd` is its descriptor, open for reading and writing. From `acquire`."""

    def __init__(self, files: Files) -> None:
        self._descriptors: list[int] = []  # at most one
        self._files = files
        self._identity: tuple[int, int] | None = None

    @property
    def fd(self) -> int:
        return self._descriptors[0] if self._descriptors else -1

    def release(self) -> None:
        """Unlock, then close, or finish what an interrupted call has begun. Delete files of the queue before this."""
        unlock(*self._descriptors)
        close_all(self._descriptors)

    def forked(self) -> None:
        """In a forked child: close without unlocking, since the lock stays the parent's."""
        close_all(self._descriptors)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):  # else it was interrupted while it was made, or is closed
            close_all(self._descriptors)

    def is_still_at(self, path: str) -> bool:
        """Whether the locked file is the one at ``path``: its last owner deletes the header of an empty queue."""
        try:
            now, _ = self._files.inode_and_size(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return now == self._identity

    def _try(self, path: str, follow: bool) -> bool | None:
        """Lock the file without waiting. Returns whether it was made; None if somebody else has the lock."""
        created = False
        try:
            self._files.open_into(self._descriptors, path, follow=follow)
        except FileNotFoundError:
            try:
                self._files.open_into(self._descriptors, path, new=True)
            except FileExistsError:
                return None
            created = True
        mine = self._files.status(self.fd)
        check_regular(mine, path)
        if mine.st_size != _HEADER and not created and self._files.is_link(path):
            raise OSError(errno.ELOOP, "it leads to a file with other contents", path)
        self._identity = mine.st_dev, mine.st_ino
        if whole(self.fd) and self.is_still_at(path):
            since = min(uptime_ms() // 1000, _LATEST)
            take(self.fd, _OWNERS + (since << _PID_BITS) + os.getpid(), 1)  # see `holding`
            return created
        close_all(self._descriptors)
        return None


def _count(fd: int, at: int, end: int) -> int:
    """How many locks others have on the bytes from ``at`` to ``end``. If there are several, the kernel names any of them, so this
    may be too few, but never 0.
    """
    found = 0
    while at < end and (taken := first_locked(fd, at, end - at)) is not None:
        found += 1
        if taken < at:  # a Java program has all of the file
            break
        at = taken + 1
    return found


class NotNeeded(Exception):
    """What the lock was waited for has come about without it."""


def is_held(fd: int) -> bool:
    """Whether another opening of the file has the lock."""
    return first_locked(fd, 0, _LINE) is not None


def is_awaited(fd: int) -> bool:
    """Whether another process of ours, or another opening in this one, stands in line for a lock on the file."""
    return first_locked(fd, _LINE, _OWNERS - _LINE) is not None


class _Line:
    """The waiters for a lock on a file, in the order in which they came. Each holds a byte behind what the lock covers, and a new
    one takes the byte behind all that are held.

    Without a line, a process that comes back at once would find the lock free before others, which sleep between two tries, have
    looked. If nobody can stand in line (there is no file, or a Java process has all of it), everybody is the first.
    """

    def __init__(self, fd: int | None) -> None:
        self.moved = time.monotonic()  # when we were told last that fewer are before us
        self._fd = fd
        self.place = _LINE
        self._before = sys.maxsize

    def join(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._join(self._fd)

    def _join(self, fd: int) -> None:
        free = _LINE
        while True:
            while (taken := first_locked(fd, free, _OWNERS - free)) is not None:
                if taken < _LINE:
                    return
                free = taken + 1
            if take(fd, free, 1):
                self.place = free
                return

    def before(self) -> int:
        """How many are before us; perhaps too few, but never 0 if there are any."""
        found = 0 if self._fd is None else _count(self._fd, _LINE, self.place)
        if found < self._before:
            self.moved = time.monotonic()
        self._before = found
        return found

    def leave(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                drop(self._fd, _LINE, 0)


@dataclass
class Waits:
    """How this process has waited for locks until now, for metrics."""

    seconds: float = 0.0
    refused: int = 0  # how often it gave up


WAITS = Waits()


class Lead(Closes):
    """Which of the stages that commit at once leads the others, see `group_commit`: the one that has a byte of the header locked.

    Correctness does not depend on it. If nobody can lock the byte, because there is no file, everybody leads.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._fds = Descriptors()
        self.is_taken = False
        with contextlib.suppress(OSError):
            files.open_into(self._fds, path, follow=True)

    def take(self) -> bool:
        """Lead until `close`, unless another stage does."""
        # To ask first is cheaper than to fail.
        self.is_taken = all(first_locked(fd, _LEAD, 1) is None and take(fd, _LEAD, 1) for fd in self._fds)
        return self.is_taken

    def close(self) -> None:
        self.is_taken = False
        unlock(*self._fds)
        self._fds.close()


def in_turn(
    fd: int | None,
    timeout: float,
    act: Callable[[], _T | None],
    length: int = _LINE,
    find: Callable[[], int | None] = lambda: None,
) -> _T | None:
    """What ``act`` gives when it is our turn among those who wait, with a descriptor of this file, for a lock on its first
    ``length`` bytes. If the file is not there yet, ``find`` gives the descriptor as soon as it is.

    It is called again as long as it gives None, for up to ``timeout`` seconds. After a few quick looks the kernel wakes us:
    when those before us have left the line, and then when the lock is dropped.
    """
    began = time.monotonic()
    deadline = began + timeout
    waiting = _Line(fd)
    try:
        waiting.join()
        while True:
            before, now = waiting.before(), time.monotonic()
            if fd is not None and before and first_locked(fd, 0, length) is not None:
                waiting.moved = now  # somebody has the lock: nobody before us is late
            still = now - waiting.moved
            # Nobody waits forever for a process before it that was stopped.
            is_turn = not before or still > PATIENCE or now >= deadline
            taken = act() if is_turn else None
            if taken is not None or now >= deadline:
                WAITS.refused += taken is None
                waiting.leave()
                return taken
            if fd is not None and now - began > _QUICK_LOOKS:
                held = (0, length) if is_turn else (_LINE, waiting.place - _LINE)
                if waker.sleep_until_free(fd, *held, min(deadline - now, PATIENCE)):
                    continue
            if fd is None and (fd := find()) is not None:
                waiting = _Line(fd)
                waiting.join()
                continue
            # The longer it has taken, the less it matters to be late by a twentieth. Jitter: not to knock in step.
            pause = max(still / 20, 0.001 * before or 0.0002) * random.uniform(0.5, 1.5)  # noqa: S311
            time.sleep(min(pause, _LONGEST_PAUSE, max(0.0, deadline - now)))
    except BaseException:
        waiting.leave()  # also if leaving was interrupted: nobody must wait for a process that has gone
        raise
    finally:
        WAITS.seconds += time.monotonic() - began


def whole_at_last(fd: int) -> bool:
    """The same as `whole`, after the lock of another file of the store was taken: an owner that dies drops its locks one after
    the other, so this one may still be held for a moment.
    """
    return whole(fd) or in_turn(fd, PATIENCE, lambda: whole(fd) or None) is not None


def acquire(
    files: Files,
    path: str,
    timeout: float,
    *,
    follow: bool = True,
    until: float | None = None,
    unless: Callable[[], bool] | None = None,
    what: str = "queue",
) -> tuple[HeaderLock, bool]:
    """Lock the header file of the queue at ``path``, or the lock file of a topic (``what``); make an empty one if there is none
    (then True comes with the lock).

    Waits up to ``timeout`` seconds, behind those who came before, then raises `Locked`. ``until``: when they are over, by the
    monotonic clock, if some have passed already. Raises `NotNeeded` if ``unless()`` is true when our turn comes. Errors of
    opening the file pass through. When it raises, nothing stays open or locked.
    """
    check_system(path)
    header, line = HeaderLock(files), list[int]()

    def attempt() -> bool | None:
        if unless is not None and unless():
            raise NotNeeded
        return header._try(path, follow)

    def find() -> int | None:
        with contextlib.suppress(OSError):
            files.open_into(line, path, follow=follow)
        return line[0] if line else None

    try:
        rest = timeout if until is None else max(0.0, until - time.monotonic())
        created = in_turn(find(), rest, attempt, find=find)
        close_all(line)
        if created is None:
            raise _locked(path, timeout, what)
    except BaseException:
        close_all(line)
        header.release()
        raise
    return header, created


def _locked(path: str, timeout: float, what: str) -> Locked:
    pid = holder(path)
    who = "another program" if pid is None else "this process" if pid == os.getpid() else f"process {pid}"
    does, has = ("has the queue open", "owner") if what == "queue" else (f"appends to the {what}", "writer")
    return Locked(
        f"{who} {does}; gave up after {timeout:g} s. A {what} has one {has} at a time: close it there, or wait longer with "
        "lock_timeout",
        path=path,
        pid=pid,
    )


class Holding(NamedTuple):
    """Who has a lock, as far as the system tells."""

    pid: int | None
    seconds: int | None  # for how long; None: a Java program, or another version of QewQew, has it
    waiters: int  # at least


def holding(path: str) -> Holding | None:
    """Who has the header, or the lock file of a topic, locked; None if nobody has. Never takes or drops a lock."""
    from qewqew_core.disk import ofd

    with contextlib.suppress(OSError), Descriptors([DISK.open_to_read(path, follow=True)]) as (fd,):
        if (found := ofd.lock_on(fd, 0, _LINE)) is None:
            return None
        _, pid = found
        waiters = _count(fd, _LINE, _OWNERS)
        if pid > 0:  # a POSIX lock, as a Java program takes
            return Holding(pid, None, waiters)
        # An OFD lock names no process. Our owners say theirs by another lock; in another container the number may be another's.
        said = (first_locked(fd, _OWNERS, _LEAD - _OWNERS) or _OWNERS) - _OWNERS
        since, pid = said >> _PID_BITS, said & ((1 << _PID_BITS) - 1)
        held = max(0, uptime_ms() // 1000 - since) if since else None
        return Holding(pid if pid and has_open(pid, fd) else None, held, waiters)
    return None


def holder(path: str) -> int | None:
    """The process that has it locked, if the system tells that."""
    found = holding(path)
    return found and found.pid
