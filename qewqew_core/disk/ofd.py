"""The locker that we give to portalocker: which kind of lock it takes, and on which bytes. Imported when the first lock is taken.

portalocker's own lockers take flock(2) or POSIX locks. The former do not collide with Java's locks at all. The latter do not
collide within a process, and are dropped when any descriptor of the file is closed. Ours is a `PosixLocker` with another kind of
lock. portalocker's global `LOCKER` stays as it is, because others in this process may use it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from typing import Any

from portalocker import AlreadyLocked, LockException, LockFlags
from portalocker.portalocker import PosixLocker
from portalocker.types import HasFileno

__all__ = ["NOW", "AlreadyLocked", "LockException", "RangeLocker", "lock_on", "wait_until_free"]

NOW = LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING
_CALLS = {  # by the number of the flags: they are hashed in Python, and a reader's call locks and unlocks
    int(LockFlags.UNBLOCK): (fcntl.F_OFD_SETLK, fcntl.F_UNLCK),
    int(LockFlags.SHARED): (fcntl.F_OFD_SETLKW, fcntl.F_RDLCK),
    int(NOW): (fcntl.F_OFD_SETLK, fcntl.F_WRLCK),
}
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid


class RangeLocker(PosixLocker):
    """Locks of the open file description (OFD) on ``length`` bytes (0: all from ``start`` on).

    They collide with the POSIX locks of a JVM and with those of every other opening, in this process too, and go when the last
    descriptor of this opening is closed.
    """

    def __init__(self, start: int, length: int) -> None:
        self._start = start
        self._length = length

    @property
    def locker(self) -> Callable[[int | HasFileno, int], Any]:
        """What portalocker calls with descriptor and flags."""
        return self._set

    def _set(self, fd: int | HasFileno, flags: int) -> None:
        command, kind = _CALLS[int(flags)]
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, self._start, self._length, 0))


def wait_until_free(fd: int, start: int, length: int) -> None:
    """Sleep in the kernel until no other opening has a lock on these bytes. The descriptor need only be open for reading."""
    locker = RangeLocker(start, length)
    locker.lock(fd, LockFlags.SHARED)  # for a moment, in which others that do not wait find it taken
    locker.unlock(fd)


def lock_on(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """Where a lock begins that another opening has on some of these bytes, and the process that has it: -1 for an OFD lock.

    portalocker cannot ask this.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    kind, _, found, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else (found, pid)
