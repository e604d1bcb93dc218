"""`Engine`: what makes a store transactional, written once for queues, topics and readers: a log, a state, and a lock.

A commit becomes true in `Engine.happen`: one frame is appended to the log, and then the state in memory follows. `durable`
waits until it is on disk. The files that follow the log are the business of the engine's owner: it brings them up to
where the log is before that is cut back (`rotate`).

A call that fails in the middle of a change leaves the disk unknown. Then the engine is poisoned: every further call raises
the same error, and opening the store again recovers all that was committed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time as clock
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, TypeVarTuple

from qewqew_core import clock as clocks
from qewqew_core.clock import STEP, Clock
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import NotCopied
from qewqew_core.disk.journal import Journal
from qewqew_core.disk.opening import place_of, refused, remedy
from qewqew_core.disk.reserve import means_full, with_room
from qewqew_core.errors import BadPath, Broken, Closed, DiskFull, Full, OutOfResources, QewQewError
from qewqew_core.limits import LIMITS, now_ms

_logger = logging.getLogger(__name__)


class State(Protocol):
    """What is committed. It has no files: a commit and the replay of the log change it by the same method."""

    clock: Clock

    def apply(self, operation: Any, time: int, /) -> object: ...


S = TypeVar("S", bound=State)
S_contra = TypeVar("S_contra", contravariant=True)
A = TypeVarTuple("A")
T = TypeVar("T")


class Format(Protocol[S_contra]):
    """A log format, which is a module: `log`, `topic_log` and `reader_log`."""

    COMMIT: int  # the kind of its frames that are commits

    def commit(self, time: int, operations: Sequence[Any]) -> bytes:
        """The body of such a frame."""

    def snapshot(self, state: S_contra, generation: int) -> bytes:
        """A whole log that says nothing but this state."""


class Gate(NotCopied):
    """What is to be done whenever a call begins and ends, with the lock held. This one does nothing."""

    is_needed = True  # else a call neither enters nor leaves: a put does not wait for the answer that there is nothing to do

    def enter(self, engine: Engine[Any]) -> None:
        """A call has got the lock. It may come inside another one."""

    def leave(self) -> None:
        """It gives the lock back; also after an `enter` that raised."""

    def failed(self) -> None:
        """It raised something else than one of our errors: it may have been interrupted anywhere."""


class Transaction(NotCopied):
    """What a queue's and a topic's session and a stage are to their ``with`` statement: committed at its end, else forgotten."""

    _closed = True  # as one is that was interrupted while it was made

    def commit(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.close()


class Engine(NotCopied, Generic[S]):
    """A store at ``path``, which messages call a ``what``: a queue, a topic, a reader. Closed until `open`.

    ``sync``: a commit is durable when the call returns that made it. ``log_bytes``: the log is cut back to a snapshot
    when it has grown by this many bytes, or has doubled if that is more. ``locks_log``: nobody else may have it open;
    ``shares_log``: other processes append to it, so that what could not be made durable cannot be cut off.
    """

    log: Journal
    state: S

    def __init__(
        self,
        path: str,
        what: str,
        form: Format[S],
        *,
        sync: bool,
        log_bytes: int,
        gate: Gate | None = None,
        locks_log: bool = False,
        shares_log: bool = False,
    ) -> None:
        self.path = path
        self.sync = sync
        self.lock = threading.RLock()  # of the state, and of all that follows it
        self.closed_reason: QewQewError | None = Closed("it was never opened")  # every call raises it; None: it is open
        self.committed = False  # whether the call that has the lock has begun a commit
        self.waiting = 0  # threads in `wait`
        self.rotate_at = 0  # end of the log from which on it is to be cut back
        self._run = b""  # of the machine
        self._looked_from = self._looked_until = 0  # between these times of the wall clock, nobody looks whether it was set
        self.what = what
        self._interrupted = Broken(
            f"a call was interrupted, and then what follows that, too. This {what} object refuses every further call; open the "
            f"{what} again: that recovers all that was committed",
            path=path,
        )
        self._format = form
        self._log_bytes = log_bytes
        self._gate = gate or Gate()
        self._locks_log = locks_log
        self._refuses = sync and not shares_log
        self._changed = threading.Condition(self.lock)

    # Opening and closing

    def attach(self, log: Journal, state: S, run: bytes) -> None:
        """Take over a log, and the state that it describes. ``run``: `Files.boot`."""
        self.log, self.state = log, state
        self._run = run or self._run or os.urandom(16).hex().encode()  # unknown: of this process, it cannot be another's
        self.rotate_at = log.snapshot_end + max(self._log_bytes, log.snapshot_end)
        if (behind := state.clock.wall - now_ms()) >= STEP:
            _logger.warning(
                "the newest commit of the %s %s is %.0f s in the future: the clock was ahead then, or is behind now. Nothing is "
                "forgotten because of that, but times that people see are wrong; check the clock of this machine (timedatectl)",
                self.what,
                self.path,
                behind / 1000,
            )
        self.go_on_in_this_run()

    def go_on_in_this_run(self) -> None:
        """Note the clock if the log has that of another run of the machine: else no time would pass for who only looks."""
        self._looked_from = self._looked_until = 0
        with contextlib.suppress(DiskFull):  # then before the next commit
            self.now()

    @property
    def has_log(self) -> bool:
        return hasattr(self, "log")

    def detach(self) -> None:
        """Give the log up; another one will be attached."""
        log = self.log
        del self.log
        log.close()

    def open(self) -> None:
        """Let calls in."""
        self.closed_reason = None

    @property
    def is_open(self) -> bool:
        """Neither closed nor poisoned."""
        return self.closed_reason is None

    @property
    def is_closed(self) -> bool:
        return isinstance(self.closed_reason, Closed)

    def check_open(self) -> None:
        """Raise the reason for which every call is refused, if there is one."""
        if self.closed_reason is not None:
            raise self.closed_reason.with_traceback(None)

    def close(self, checkpoint: Callable[[], None], release: Callable[[], None]) -> None:
        """Refuse all calls from now on, bring the files up to the log, and release everything.

        A second call does nothing, or releases what a first one that was interrupted did not. If the store is poisoned, nothing
        is written.
        """
        with self.lock:
            if self.is_closed:
                release()
                return
            was_open = self.is_open
            self.closed_reason = Closed(f"the {self.what} is closed", path=self.path)
            try:
                self.notify()
                if was_open:
                    checkpoint()
            except (OSError, Full) as error:
                if isinstance(error, (DiskFull, Full)) or means_full(error):
                    _logger.warning("%s: closed without a checkpoint; the next opening makes one: %s", self.path, error)
                elif isinstance(error, QewQewError):
                    raise
                else:
                    raise Broken(
                        f"closing failed: {error.strerror}; {remedy(error)}, then open the {self.what} again: that recovers it",
                        path=self.path,
                    ) from error
            finally:
                release()

    def release(self) -> None:
        """Close the log. It may be called again, and goes on where it was interrupted."""
        if self.has_log:
            self.log.close(unlock=self._locks_log)

    def forked(self) -> None:
        """In a forked child: the store stays the parent's."""
        self.closed_reason = Closed(
            f"the {self.what} was opened before this process was forked; open it again here", path=self.path
        )
        self.lock = threading.RLock()  # the thread that held it does not exist here
        self._changed = threading.Condition(self.lock)
        if self.has_log:
            self.log.forked()
            self.log.close()

    # One call at a time

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One call has the store to itself; it may come inside another one. Raises what a closed or poisoned store does."""
        # A generator, and not a class with `__exit__`: Python looks for signals where a function begins, so a Ctrl-C in the first
        # instruction of an `__exit__` would leave the lock held. A generator that is dropped there ends its own `with`.
        with self.lock:
            self.check_open()
            outer, self.committed = self.committed, False
            try:
                self._gate.enter(self)
                yield
            except BaseException as error:
                if self.closed_reason is None:
                    self.closed_reason = self._interrupted  # it stays if what follows is interrupted, too
                self.poison_after(error)
                raise
            finally:
                self.committed = outer or self.committed
                self._gate.leave()

    def run(self, act: Callable[[*A], T], *arguments: *A) -> T:
        """``act`` in `exclusive`, for the calls made most often: a generator would cost a fifth of a put."""
        with self.lock:
            if self.closed_reason is not None:
                self.check_open()
            outer, self.committed = self.committed, False
            gate = self._gate if self._gate.is_needed else None
            try:
                if gate is not None:
                    gate.enter(self)
                return act(*arguments)
            except BaseException as error:
                if self.closed_reason is None:
                    self.closed_reason = self._interrupted  # it stays if what follows is interrupted, too
                self.poison_after(error)
                raise
            finally:
                self.committed = outer or self.committed
                if gate is not None:
                    gate.leave()

    def poison_after(self, error: BaseException) -> None:
        """Poison the store after a call that has raised, if it is not known any more what is on disk."""
        refusal: DiskFull | BadPath | OutOfResources | None = None
        if isinstance(error, Broken):
            self.poison(error)
        elif not isinstance(error, QewQewError):
            self._gate.failed()
            if isinstance(error, OSError):
                refusal = None if self.committed else self.refused(error)
                if not isinstance(refusal, (BadPath, OutOfResources)):
                    raise self.poison(error) from error
            elif self.committed:
                # Most of all KeyboardInterrupt: between a commit and what follows it, state and files do not agree.
                self.poison(InterruptedError(0, f"interrupted by {type(error).__name__}"))
        if self.closed_reason is self._interrupted:
            self.closed_reason = None
        if refusal is not None:
            raise refusal from error

    def poison(self, error: OSError) -> Broken:
        """Refuse all calls: the file system failed in the middle of a change, so what is on disk is not known any more."""
        broken = (
            error
            if isinstance(error, Broken)
            else Broken(
                f"a file-system call failed: {error.strerror or error}. This {self.what} object refuses every further call; "
                f"{remedy(error)}, then open the {self.what} again: that recovers all that was committed",
                path=place_of(error, self.path),
            )
        )
        with self.lock:  # also for a thread that waited for the disk
            if not self.is_closed:  # else it happened in `close`, which goes on to release everything
                self.closed_reason = broken
            self._changed.notify_all()
        return broken

    def refused(self, error: OSError) -> DiskFull | BadPath | OutOfResources | None:
        """The error to raise for one of the system before a commit, if the store may go on; see `opening`."""
        return refused(error, self.path, self.what)

    def with_room(self, act: Callable[[], T]) -> T:
        """As `reserve.with_room`, with what the log keeps."""
        return with_room(self.log, act)

    # Waiting

    def wait(self, deadline: float | None) -> bool:
        """Let others in until one of them changes something; False if the time is over first."""
        rest = None if deadline is None else deadline - clock.monotonic()
        if rest is not None and rest <= 0:
            return False
        self.waiting += 1
        try:
            self._changed.wait(LIMITS.look_again if rest is None else min(rest, LIMITS.look_again))
        finally:
            self.waiting -= 1
            self.committed = False  # others have had the lock
        self.check_open()
        self._gate.enter(self)
        return True

    def notify(self) -> None:
        """Wake the threads in `wait`: something has changed."""
        if self.waiting:
            self._changed.notify_all()

    # Commits

    def clock(self) -> Clock:
        """This moment. Whether something is too old is decided by its `elapsed` time."""
        return self.state.clock.now(self._run)

    def now(self) -> int:
        """The time of a commit. If the wall clock was set, the log says so before that."""
        now = LIMITS.clock() // 1_000_000
        if not self._looked_from <= now < self._looked_until:
            found, known = self.clock(), self.state.clock
            if (found.run, found.wall - found.elapsed) != (known.run, known.wall - known.elapsed):
                self.log.append(clocks.FRAME, clocks.pack(found))
                self.state.clock = found
            self._looked_from, self._looked_until = now, now + STEP
        return now

    def commit(self, operations: Sequence[Any], now: int | None = None, *, reserve: bool = False) -> int:
        """Make the operations happen: all of them, or none if this raises. Returns the position that `durable` takes.

        Raises `DiskFull` (nothing has changed) or `Broken`. ``now``: milliseconds since the epoch; ``reserve``: keep room in the
        log for commits that free room on a full disk.
        """
        now = self.now() if now is None else now
        body = self._format.commit(now, operations)
        if reserve:
            self.log.reserve(len(body))
        position = self.happen(body)
        for operation in operations:
            self.state.apply(operation, now)
        return position

    def happen(self, body: bytes) -> int:
        """Append a commit, which makes it true; returns its position. The caller lets the state follow. Raises as `commit`."""
        self.committed = True
        return self.log.append(self._format.COMMIT, body)

    def durable(self, position: int, always: bool = False) -> None:
        """Wait until the log is on disk up to ``position``, if ``sync`` or ``always`` says so. Threads that wait together
        share one fsync.
        """
        if self.sync or always:
            try:
                self.log.sync(position, refuse=self._refuses)
            except Broken as error:
                self.poison(error)
                raise

    def rotate(self, before: Callable[[], None] = lambda: None, behind: Callable[[], None] = lambda: None) -> bool:
        """Cut the log back to a snapshot, once all other files are where the log is, durably. That is done by ``before``, or by
        ``behind``, which is called only when there is room for the snapshot: what the old log does not know may follow it
        only there.

        If there is no room for the new log, the old one goes on, and this returns False.
        """
        try:
            before()
            now = self.now()  # first: it notes a clock that was set
            self.state.clock = self.state.clock.until(now)
            new = self.with_room(partial(self.log.prepare, partial(self._format.snapshot, self.state)))
            if self._locks_log:
                lock.whole(new.fd)
            behind()
            self.log.replace(new)
        except OSError as error:
            if self.refused(error) is None:
                raise
            self.rotate_at = self.log.end + self._log_bytes // 4
            return False
        self.rotate_at = self.log.end + max(self._log_bytes, self.log.end)
        return True
