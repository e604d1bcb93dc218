"""`SharedLog`: the log of a reader, which several processes append to in turn, and the two files that follow it.

Each call takes byte 0 of the lock file for a moment, catches up with what the others have appended, and appends to it itself. A
living consumer has another byte of that file, so the others see whether its messages in flight must be delivered again. The
.rdx and the seal say what is durable, and are not synced.
"""

from __future__ import annotations

import contextlib
import os
import random
import time as clock
from collections.abc import Iterable
from typing import Any

from qewqew_core.batch import places
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors, close_first
from qewqew_core.disk.engine import Engine, Gate
from qewqew_core.disk.files import check_regular, read_all
from qewqew_core.disk.journal import Journal
from qewqew_core.disk.opening import moved, opening
from qewqew_core.disk.reserve import Reserve
from qewqew_core.errors import Broken, Closed, DiskFull, Locked
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.limits import LIMITS
from qewqew_core.topic import reader_files, reader_log, witness
from qewqew_core.topic.open_topic import OpenTopic
from qewqew_core.topic.reader_inspection import seal_of
from qewqew_core.topic.reader_state import Change, Lease, Move, Operation, PutBack, ReaderState, Resolve, SetFilter
from qewqew_core.topic.topic_paths import LOCK, LOG, batch_name, log_of, rdx_of, stem_of
from qewqew_core.topic.view import Position

CALLS_IN_TURN = 128  # so often a consumer takes the lock before those who wait for it
_OPEN_AGAIN = 20  # so often others may delete the reader while it is opened


class Consumer:
    """What one `Reader` object has of a reader that others share."""

    def __init__(self) -> None:
        self.owner = random.SystemRandom().randrange(1, 1 << 62)  # the byte of the lock file that it has
        self.mine: dict[int, int] = {}  # offset: attempt, of what it has delivered and is not committed
        self.passed: dict[int, int] = {}  # the same of what counts as read by a change of the filter; until the reader is moved
        self.due = 0  # no message in flight is to be delivered again before this time (but those of dead owners)
        self.filter = Filter(None)

    def refresh(self, state: ReaderState) -> None:
        """Forget what others have by now."""
        flight = state.in_flight
        for offset in [offset for offset in self.mine if offset not in flight or flight[offset].owner != self.owner]:
            del self.mine[offset]

    def pass_over(self, offsets: Iterable[int]) -> None:
        """The filter that was set does not match these."""
        self.passed |= {offset: self.mine.pop(offset) for offset in offsets if offset in self.mine}

    def has_passed(self, messages: Iterable[Message]) -> list[int]:
        """The offsets of those of these that it has, and that count as read since."""
        return [message.offset for message in messages if self.passed.get(message.offset) == message.attempt]

    def catch_up(self, state: ReaderState) -> None:
        """Others may have changed anything."""
        if self.filter.text != state.filter:
            self.filter = Filter(state.filter)
        self.due = 0
        self.refresh(state)


class SharedLog(Gate):
    """The log of the reader ``name``. Call it with the engine's lock, except `durable`."""

    def __init__(self, topic: OpenTopic, name: str, consumer: Consumer, lock_timeout: float) -> None:
        self._files = topic.files
        self._rdx, self._stem = rdx_of(topic.path, name), stem_of(topic.path, name)
        self._name = batch_name(topic.path, name)
        self._consumer = consumer
        self._lock_timeout = lock_timeout
        self.engine: Engine[ReaderState] = Engine(
            self._rdx,
            "reader",
            reader_log,
            sync=topic.sync == "commit",
            log_bytes=LIMITS.reader_log_bytes,
            gate=self,
            shares_log=True,
        )
        self.files_are_behind = False  # whether files of batches may not be where the log says
        self.decided: list[str] = []  # sessions that were committed, when there was no room to note it
        self._depth = 0
        self._calls = 0
        self._untold: list[tuple[int, Position]] = []  # (position in the log, what was committed there) that the .rdx is to say …
        self._sealed = 0  # … once durable; and up to where the seal says that the log is on disk
        self._inode = 0, 0  # of the log, and its device
        self._looked = 0.0  # when owners were last looked at …
        self._dead: set[int] = set()  # … and which of them had died
        self._lock_fds = Descriptors()
        self.room = Reserve(topic.files, log_of(topic.path))  # of the topic
        self._rdx_fds = Descriptors()
        self._reopened = 0  # how often another process has deleted the lock file before we had it
        self._process = os.getpid()

    # The lock, and who has a part of it

    def open_lock(self) -> None:
        with opening(self._stem + LOCK, "reader"):
            reader_files.open_lock(self._files, self._lock_fds, self._stem)
        lock.take(self._lock_fd, self._consumer.owner, 1)

    @property
    def _lock_fd(self) -> int:
        return self._lock_fds[-1]

    def _take_lock(self) -> bool | None:
        return lock.take(self._lock_fds[-1], 0, 1) or None

    def lives(self, owner: int) -> bool:
        """Whether the consumer with this byte lives."""
        return lock.first_locked(self._lock_fd, owner, 1) is not None

    def dead_owners(self) -> set[int]:
        """Consumers that have messages in flight and whose process has ended."""
        if clock.monotonic() >= self._looked + LIMITS.look_at_owners:
            self._looked = clock.monotonic()
            owners = {flight.owner for flight in self.engine.state.in_flight.values()} - {0, self._consumer.owner}
            self._dead = {owner for owner in owners if not self.lives(owner)}
        return self._dead  # also between two looks: what they had comes before what is new

    def leave_for_good(self) -> bool:
        """Release our byte; returns whether we were the last. Of two that leave one after the other, the second is."""
        lock.drop(self._lock_fd, self._consumer.owner, 1)
        return lock.first_locked(self._lock_fd, 1, 0) is None

    # The border of each call

    def enter(self, engine: Engine[Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._calls += 1
        # Mostly without a look at who waits: to hand the lock on takes longer than a call. But not forever.
        if (self._calls % CALLS_IN_TURN == 0 or not self._take_lock()) and not lock.in_turn(
            self._lock_fd, self._lock_timeout, self._take_lock, length=1
        ):
            raise Locked(
                f"another process is using the reader; gave up after {self._lock_timeout:g} s. It may be "
                "stopped, or lease a lot: check it, or wait longer with the topic's lock_timeout",
                path=self._rdx,
            )
        if not engine.has_log:
            if not reader_files.is_lock_of(self._files, self._lock_fd, self._stem):
                if self._reopened == _OPEN_AGAIN:
                    raise moved(self._stem + LOCK, "reader")
                self._reopened += 1
                self.open_lock()
                close_first(self._lock_fds)
                self._depth -= 1
                self.enter(engine)
            return
        self._catch_up(engine.log)
        if self.files_are_behind:
            self.roll_forward()
        for session in list(self.decided):
            with contextlib.suppress(DiskFull):
                self.note(session)

    def leave(self) -> None:
        self._depth = max(0, self._depth - 1)  # `enter` may have been interrupted before it counted
        if self._depth == 0 and self._lock_fds:  # else `close` was faster than what an interrupt has left
            lock.drop(self._lock_fds[-1], 0, 1)

    def _catch_up(self, log: Journal) -> None:
        try:
            inode, size = self._files.inode_and_size(log.path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._is_gone() from None
        if inode != self._inode:  # another process has cut the log back, or has deleted the reader and made another
            if not reader_files.is_lock_of(self._files, self._lock_fd, self._stem):
                raise self._is_gone()
            self.load()
            log.replaced()
            return
        if size == log.end:
            return
        data = self._files.read(log.fd, size - log.end, log.end)
        base, end, run = log.end, log.end, self.engine.state.clock.run
        for frame in journal.frames(data, log.generation, 0):
            end = base + frame.end
            operation = reader_log.replay_frame(frame, self.engine.state, log.path, base)
            self.files_are_behind |= isinstance(operation, (Lease, PutBack, Change))  # which files follow
            if isinstance(operation, SetFilter):
                self._consumer.pass_over(operation.offsets)
            elif isinstance(operation, Move):
                self._consumer.passed.clear()
        log.follow(end)
        if end < size:  # who appended this was killed while it did
            self._files.truncate(log.fd, end)
        if self.engine.state.clock.run != run:  # another machine has the reader, too
            self.engine.go_on_in_this_run()
        self._consumer.catch_up(self.engine.state)

    def _is_gone(self) -> Closed | Broken:
        """What to raise if log and lock are not those that are open: who deletes a reader withdraws its witness first."""
        if self.has_witness:
            return self.engine.poison(moved(self.engine.log.path, "reader"))
        self.engine.closed_reason = Closed("the reader was deleted", path=self._rdx)
        return self.engine.closed_reason

    def roll_forward(self) -> None:
        """Make the files of batches agree with what is committed; later, if the disk is full."""
        try:
            reader_files.roll_forward_batches(self._files, self._stem, self.engine.state)
            self.files_are_behind = False
        except OSError as error:
            if self.engine.refused(error) is None:
                raise
            self.files_are_behind = True

    def note(self, session: str) -> None:
        """The session was committed."""
        if self.engine.state.of_session(session):
            self.commit(Resolve(session, True))
            self._consumer.due = 0
            self._consumer.refresh(self.engine.state)
        self.decided.remove(session)

    # The log

    def load(self, rdx: tuple[int, int] | None = None) -> None:
        """Replay the whole log; ``rdx``: the position that the .rdx names. Raises `Corrupt`."""
        files, path = self._files, self._stem + LOG
        fds = Descriptors()
        fds.append(files.open(path))
        check_regular(files.status(fds[0]), path)
        data = read_all(files, fds[0], path)
        found = reader_log.replay(data, path)
        reader_log.check_whole(found, seal_of(files, self._stem), rdx, path)
        if found.end < len(data):
            files.truncate(fds[0], found.end)
        # Who was killed after putting this log, or a directory of batches, into place may not have done it.
        files.sync_directory(os.path.dirname(path))
        ends = found.end, found.snapshot_end
        self._attach(
            Journal(files, path, fds, found.generation, *ends, "reader", durable=found.durable, room=self.room), found.state
        )
        self.files_are_behind = True

    def begin(self, state: ReaderState) -> None:
        """Replace the log by a new one with this state."""
        state.clock = state.clock.now(self._files.boot())
        self.break_seal()
        path = self._stem + LOG
        self._attach(
            journal.create(self._files, path, lambda generation: reader_log.snapshot(state, generation), "reader", self.room),
            state,
        )
        if self._rdx_fds:  # else it is a new reader, and a seal without an .rdx is damage
            self.tell_all()

    def _attach(self, log: Journal, state: ReaderState) -> None:
        self.engine.attach(log, state, self._files.boot())
        self._inode, _ = self._files.inode_and_size(log.path)
        self._untold = []
        self._sealed = 0
        self._consumer.catch_up(state)

    def commit(self, operation: Operation) -> int:
        """Append an operation to the log and apply it; returns the position for `durable`."""
        engine = self.engine
        before = engine.state.committed_position()
        position = engine.commit([operation])
        committed = engine.state.committed_position()
        if committed[:2] != before[:2]:
            # The oldest one may be durable soon, and the newest one says the most.
            self._untold = [*self._untold[:1], (position, committed)]
        if engine.log.end > engine.rotate_at:
            self.rotate()
            position = engine.log.position
        if not engine.log.has_reserve:
            engine.log.restore_reserve()
        return position

    def durable(self, position: int, always: bool = False) -> None:
        """As `Engine.durable`. Then the .rdx says so, too."""
        if self.engine.sync or always:
            self.engine.durable(position, always)
            self._tell()

    def rotate(self) -> None:
        """Replace the log by a snapshot. If there is no room for it, the old log goes on."""
        expired = self.engine.state.prune_expired(self.engine.clock().elapsed)
        if self.engine.rotate(self._checkpoint):
            self._inode, _ = self._files.inode_and_size(self.engine.log.path)
            self._tell_durable()
            places.remove_expired(self._files, self._stem, self._name, expired)

    def set_temporary(self, temporary: bool) -> None:
        """Have the log say whether the reader ends with its last consumer. The .rdx alone, which has no checksum, ends none."""
        if self.engine.state.temporary != temporary:
            self.engine.state.temporary = temporary
            self.rotate()

    def _checkpoint(self) -> None:
        self.engine.log.sync(self.engine.log.position, refuse=False)
        self.tell_all()
        self._files.sync(self.rdx_fd)
        self.break_seal()

    def checkpoint(self) -> None:
        """Make the .rdx agree with the log, durably, for zbus servers, and note that in the log."""
        log, state = self.engine.log, self.engine.state
        if state.clean or any(flight.session is not None for flight in state.in_flight.values()):
            return  # an undecided session is not to be overlooked by who opens the topic
        if log.end - log.snapshot_end > LIMITS.reader_log_bytes_at_close:
            self.rotate()
        log.sync(log.position, refuse=False)
        self.tell_all()
        self.write_rdx(*zbus.filter_patch(state.filter))
        self._files.sync(self.rdx_fd)
        log.append(reader_log.CHECKPOINT, b"")

    # The .rdx and the seal

    def open_rdx(self) -> bytes:
        """Open the .rdx; returns what it says."""
        self._rdx_fds.append(self._files.open(self._rdx))
        check_regular(self._files.status(self.rdx_fd), self._rdx)
        return self._files.read(self.rdx_fd, zbus.READER_SIZE, 0)

    @property
    def rdx_fd(self) -> int:
        return self._rdx_fds[0]

    def write_rdx(self, at: int, data: bytes) -> None:
        self._files.write(self._rdx_fds[0], data, at)

    def patch_rdx(self, at: int, data: bytes) -> None:
        """Write into the .rdx, durably."""
        self.write_rdx(at, data)
        self._files.sync(self.rdx_fd)

    def common(self) -> zbus.Common:
        """The head that all mapped files of zbus have."""
        return zbus.unpack_common(self._files.read(self.rdx_fd, zbus.READER_SIZE, 0))

    def _tell(self) -> None:
        """Have the .rdx and the seal say what is durable by now. A commit has happened: nothing here may pass for its failure."""
        engine = self.engine
        with engine.lock:
            if not engine.is_open or not (self._depth or self._take_lock()):
                return  # another process is in a call; who commits next tells it
            self._depth += 1
            try:
                if self._depth == 1:
                    self._catch_up(engine.log)
                self._tell_durable()
            except Closed:
                pass  # the reader was deleted meanwhile
            except BaseException as error:
                engine.poison_after(error)
                raise
            finally:
                self.leave()

    def _tell_durable(self) -> None:
        log = self.engine.log
        durable = [committed for position, committed in self._untold if position <= log.durable]
        if durable:
            committed = min(durable[-1], self.engine.state.committed_position())  # somebody may have moved it back since
            self.write_rdx(0, zbus.pack_position(committed.block, committed.offset))
            del self._untold[: len(durable)]
        if log.synced > self._sealed:
            seal = reader_log.pack_seal(reader_log.Seal(log.generation, log.synced))
            try:
                self._files.write(self._lock_fds[-1], seal, witness.SIZE)
            except OSError as error:
                if self.engine.refused(error) is None:
                    raise
            self._sealed = log.synced

    def tell_all(self) -> None:
        """Bring the .rdx and the seal up to the log, all of which is durable."""
        self._untold = [(self.engine.log.durable, self.engine.state.committed_position())]
        self._tell_durable()

    def break_seal(self) -> None:
        """Invalidate the seal before the log is replaced."""
        if self._files.size(self._lock_fd) > witness.SIZE:
            self._files.truncate(self._lock_fd, witness.SIZE)
            self._files.sync(self._lock_fd)
        self._sealed = 0

    @property
    def has_witness(self) -> bool:
        """Whether the lock file says that there is a log."""
        return witness.is_in(self._files, self._lock_fd)

    def testify(self) -> None:
        """Have it say so, durably: log and .rdx are in place."""
        if not self.has_witness:
            witness.write(self._files, self._lock_fd, self.engine.log.path)

    # The end

    def release(self) -> None:
        """Release everything. A second call finishes an interrupted first one."""
        if self._process == os.getpid():
            lock.unlock(*self._lock_fds)
        self._lock_fds.close()
        self.engine.release()
        self._rdx_fds.close()
