"""Who may open a queue: one owner at a time, between processes, between threads, and against a Java process.

The lock is the one that the original takes, a write lock on the header file (we leave out bytes far behind its end, see `_Line`),
as an *open file description* lock (`F_OFD_SETLK`): it collides with the POSIX locks of the JVM in both directions, with a
second opening in the same process, and it is not dropped when another descriptor of the file is closed.
portalocker's default is flock(2), which does not collide with Java's lock at all; where the system has no
OFD locks, portalocker's `LockfLocker` takes the POSIX lock instead, and the registry below stands in
for what POSIX locks lack between threads. The kernel releases either lock when the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from qewqew_core.errors import QueueLocked

_T = TypeVar("_T")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid
_LINE = 1 << 62  # where in a file those who wait stand in line: far behind all that is written
_LONGEST_PAUSE = 0.02  # seconds between two tries
_PATIENCE = 1.0  # seconds without moving forward
_held: set[tuple[int, int]] = set()  # (device, inode) of the headers that this process holds
_held_guard = threading.Lock()


def _forked() -> None:
    """A forked child holds nothing, and whoever held the guard does not exist in it."""
    global _held_guard
    _held_guard = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forked)


class HeaderLock:
    """The lock on one header file; `fd` is its descriptor, open for reading and writing."""

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self.fd = fd
        self._identity = identity

    def release(self) -> None:
        """Unlock, then close. Files of the queue must be deleted before, while it is still held."""
        with contextlib.suppress(OSError):
            # A forked child may share the open file description: closing alone would leave the lock with it.
            _set(self.fd, fcntl.F_UNLCK)
        os.close(self.fd)
        with _held_guard:
            _held.discard(self._identity)


class _Line:
    """Those who wait for a lock on a file, in the order in which they came: each holds a byte behind what the lock covers, the
    next one behind all that are held.

    Without it, who comes back at once finds the lock free before those who sleep between two tries have looked. Where nobody
    can stand in line (there is no file, a Java process has all of it, no OFD locks), everybody is the first.
    """

    def __init__(self, fd: int | None) -> None:
        self.moved = time.monotonic()  # when we were told last that fewer are before us
        self._fd = fd
        self._place = _LINE
        self._before = sys.maxsize
        if fd is not None:
            with contextlib.suppress(OSError):
                self._join(fd)

    def _join(self, fd: int) -> None:
        free = _LINE
        while True:
            while (taken := first_locked(fd, free, 0)) is not None:
                if taken < _LINE:
                    return
                free = taken + 1
            if set_bytes(fd, fcntl.F_WRLCK, free, 1):
                self._place = free
                return

    def before(self) -> int:
        """How many are before us. Of several the kernel names any: if not the first one, we say fewer, but never 0."""
        found, at = 0, _LINE
        while self._fd is not None and at < self._place:
            taken = first_locked(self._fd, at, self._place - at)
            if taken is None:
                break
            found, at = found + 1, max(taken, at) + 1
        if found < self._before:
            self.moved = time.monotonic()
        self._before = found
        return found

    def leave(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                set_bytes(self._fd, fcntl.F_UNLCK, _LINE, 0)


def in_turn(fd: int | None, timeout: float, act: Callable[[], _T | None]) -> _T | None:
    """What ``act`` gives when it is our turn among those who wait, with a descriptor of this file, for a lock.

    It is called again as long as it gives None, for up to ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    waiting = _Line(fd)
    try:
        while True:
            before, now = waiting.before(), time.monotonic()
            still = now - waiting.moved
            # Nobody waits for ever for one who is before him and was stopped.
            if (not before or still > _PATIENCE or now >= deadline) and (taken := act()) is not None:
                return taken
            if now >= deadline:
                return None
            # The longer it has taken, the less it matters to be late by a twentieth. Jitter: not to knock in step.
            pause = max(still / 20, 0.001 * before or 0.0002) * random.uniform(0.5, 1.5)  # noqa: S311
            time.sleep(min(pause, _LONGEST_PAUSE, max(0.0, deadline - now)))
    finally:
        waiting.leave()


def acquire(path: str, timeout: float, *, follow: bool = True) -> tuple[HeaderLock, bool]:
    """Lock the header file at ``path``; make an empty one if there is none (then True comes with the lock).

    Waits up to ``timeout`` seconds, behind those who came before, then raises `QueueLocked`. Errors of opening the file pass
    through.
    """
    fd = None
    if hasattr(fcntl, "F_OFD_SETLK"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        taken = in_turn(fd, timeout, lambda: _try(path, follow))
    finally:
        if fd is not None:
            os.close(fd)
    if taken is None:
        raise _locked(path, timeout)
    return taken


def _try(path: str, follow: bool) -> tuple[HeaderLock, bool] | None:
    # Registered before any descriptor is opened: closing one would drop a POSIX lock that this process holds.
    created, flags = False, os.O_RDWR | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with _held_guard:
        try:
            status = os.stat(path, follow_symlinks=follow)
            if (status.st_dev, status.st_ino) in _held:
                return None
            fd = os.open(path, flags)
        except FileNotFoundError:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
                created = True
            except FileExistsError:
                if follow and os.path.islink(path):  # a link to nothing: the header is written through it
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
                    created = True
                else:
                    return None
        mine = os.fstat(fd)
        identity = (mine.st_dev, mine.st_ino)
        try:
            if identity not in _held and _set(fd, fcntl.F_WRLCK) and _is_still(path, mine):
                _held.add(identity)
                return HeaderLock(fd, identity), created
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


def _is_still(path: str, mine: os.stat_result) -> bool:
    """Whether the locked file is the one at ``path``: its last owner deletes the header of an empty queue."""
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)


def set_bytes(fd: int, kind: int, start: int, length: int) -> bool:
    """Lock or unlock these bytes (0: all from ``start`` on) without waiting; False if another open file has some of them."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def first_locked(fd: int, start: int, length: int) -> int | None:
    """Where a lock begins that another open file has on some of these bytes (0: all from ``start`` on)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    kind, _, found, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else found


def _set(fd: int, kind: int) -> bool:
    """Take or drop the header's lock without waiting; False if somebody else holds it."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        return set_bytes(fd, kind, 0, _LINE)
    if kind == fcntl.F_UNLCK:
        fcntl.lockf(fd, fcntl.LOCK_UN)
        return True
    # Late: Spark executors import this package to read batches, and need not have portalocker.
    from portalocker import AlreadyLocked, LockFlags
    from portalocker.portalocker import LockfLocker

    try:
        LockfLocker().lock(fd, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
    except AlreadyLocked:
        return False
    return True


def _locked(path: str, timeout: float) -> QueueLocked:
    pid = holder(path)
    who = "another program" if pid is None else "this process" if pid == os.getpid() else f"process {pid}"
    return QueueLocked(
        f"{who} has the queue open; gave up after {timeout:g} s. A queue has one owner at a time: close it there, "
        "or wait longer with lock_timeout",
        path=path,
        pid=pid,
    )


def holder(path: str) -> int | None:
    """The process that holds the header's lock, where the system tells it; never takes or drops a lock."""
    try:
        status = os.stat(path)
        with _held_guard:
            if (status.st_dev, status.st_ino) in _held:
                return os.getpid()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open("/proc/locks") as locks:
            lines = [line.split() for line in locks]
    except OSError:
        return None
    for line in lines:  # "1: POSIX  ADVISORY  WRITE 4242 08:01:1234 0 EOF"; a waiter has "->" in second place
        if len(line) >= 7 and line[1] in ("POSIX", "OFDLCK") and line[3] == "WRITE" and line[5:7] == [wanted, "0"]:
            return int(line[4]) if int(line[4]) > 0 else _process_with(status)
    return None


def _process_with(header: os.stat_result) -> int | None:
    """The process that has the header open and locked: the kernel's list names no process for OFD locks."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # processes come and go, and those of other users cannot be read
            for fd in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{name}/fd/{fd}")
                    if (status.st_dev, status.st_ino) == (header.st_dev, header.st_ino):
                        with open(f"/proc/{name}/fdinfo/{fd}") as info:
                            locks = [line.split() for line in info if "OFDLCK" in line]
                        if any(lock[-2] == "0" for lock in locks):  # else it stands in line
                            return int(name)
    return None
