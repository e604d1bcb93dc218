"""`Guard`: what every open thing on disk needs: one thread at a time, and no call after one that left the disk unknown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from qewqew_core.errors import DiskFull, QewQewError, QueueBroken, QueueClosed
from qewqew_core.journal import FULL


class Guard:
    """The base of `Queue`, `Reader` and a topic's `Writer`. ``_what`` is how messages call it."""

    _what = "queue"
    _refusal: QewQewError | None = QueueClosed("it was never opened")  # what every call raises; None while it is open
    _released = True  # whether no lock and no descriptor is left to be given back

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._committed = False  # whether the call that has the lock has begun a commit

    def _usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def _full(self, error: OSError) -> DiskFull | None:
        if error.errno not in FULL:
            return None
        return DiskFull(f"no room on the file system: {error.strerror}. Nothing was stored", path=error.filename or self.path)

    def _break(self, error: OSError) -> QueueBroken:
        """A call of the file system failed in the middle of a change: what is on disk is no longer known here."""
        broken = (
            error
            if isinstance(error, QueueBroken)
            else QueueBroken(
                f"a file-system call failed: {error.strerror or error}. This {self._what} object refuses every further call; "
                f"check the disk, then open the {self._what} again: that recovers all that was committed",
                path=error.filename or self.path,
            )
        )
        if not isinstance(self._refusal, QueueClosed):  # else it happened in `close`, which goes on to give all back
            self._refusal = broken
        self._changed.notify_all()
        return broken

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            self._usable()
            outer, self._committed = self._committed, False
            try:
                self._enter()
                yield
            except BaseException as error:
                self._judge(error)
                raise
            finally:
                self._committed = outer or self._committed
                self._leave()

    def _judge(self, error: BaseException) -> None:
        """Something was raised while the lock was held: refuse further calls if it has left the disk unknown."""
        if isinstance(error, OSError) and (isinstance(error, QueueBroken) or not isinstance(error, QewQewError)):
            broken = self._break(error)
            if broken is not error:
                raise broken from error
        elif self._committed and not isinstance(error, QewQewError):
            # Most of all KeyboardInterrupt: between a commit and what follows it, state and files do not agree.
            self._break(InterruptedError(0, f"interrupted by {type(error).__name__}"))

    def _enter(self) -> None:
        """Called when a call has got the lock …"""

    def _leave(self) -> None:
        """… and when it gives it back."""
