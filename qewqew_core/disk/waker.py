"""Asleep in the kernel until a lock on a file is dropped, for up to a given time.

The kernel's call that waits for a lock has no time-out and cannot be cancelled. So a thread makes it, with an opening of its own,
gives the lock back at once, and wakes all waiters in this process for the same bytes. A waiter whose time is over goes on; the
thread sleeps on for the next waiter, and ends when the lock is dropped.
"""

from __future__ import annotations

import os
import threading

from qewqew_core.disk.descriptors import Descriptors, NotCopied, close_all, open_again
from qewqew_core.disk.files import DISK

_guard = threading.Lock()  # of these
_wakers: dict[tuple[int, int, int, int], _Waker] = {}  # by device, inode, and bytes


class _Waker(NotCopied, threading.Thread):
    def __init__(self, fd: int, key: tuple[int, int, int, int]) -> None:
        super().__init__(name="qewqew-waker", daemon=True)
        self.fds = Descriptors()
        self.is_free = threading.Event()
        self._key = key
        open_again(self.fds, fd)

    def run(self) -> None:
        from qewqew_core.disk import ofd

        try:
            ofd.wait_until_free(self.fds[0], *self._key[2:])
        except ofd.LockException:
            pass  # the waiter looks by itself
        finally:
            with _guard:
                _wakers.pop(self._key, None)
            close_all(self.fds)
            self.is_free.set()


def sleep_until_free(fd: int, start: int, length: int, timeout: float) -> bool:
    """Sleep until no other opening of the file has a lock on these bytes, for up to ``timeout`` seconds.

    Returns False at once if nobody has one, or if the kernel cannot be asked: then the waiter must look by itself.
    """
    from qewqew_core.disk import ofd

    status = DISK.status(fd)
    key = status.st_dev, status.st_ino, start, length
    try:
        if ofd.lock_on(fd, start, length) is None:
            return False
        with _guard:
            waker = _wakers.get(key)
            if waker is None:
                waker = _Waker(fd, key)
                waker.start()
                _wakers[key] = waker  # it cannot end before: it needs the guard for that
    except (OSError, RuntimeError):  # no /proc, no thread any more, no descriptor left
        return False
    waker.is_free.wait(timeout)
    return True


def _forked() -> None:
    """In a forked child: the threads are the parent's, and so are the locks that they wait for."""
    global _guard
    for waker in _wakers.values():
        close_all(waker.fds)
    _guard = threading.Lock()
    _wakers.clear()


os.register_at_fork(after_in_child=_forked)
