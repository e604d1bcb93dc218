"""`Reader`: a named place in a topic, from which messages are delivered, committed, and leased as batches.

Processes that open the same reader share it. Each call takes the lock of the reader for a moment, catches up with what the
others have appended to its log, and appends to it itself (`reader_log`). The topic's writer is never waited for, nor does
it wait. A message that was delivered is in flight until it is committed or given back; it is delivered again when its time
is over, or when the process that had it has died: as long as that lives, it has a byte of the lock file locked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import stat
import sys
import time as clock
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Self, TypeVar

from qewqew_core import batch as batches
from qewqew_core import journal, layout, lock, manifest, reader_log, zbus
from qewqew_core.batch_state import BatchState
from qewqew_core.block_segments import first_segment
from qewqew_core.block_sums import pieces_of
from qewqew_core.errors import (
    BadArgument,
    BadPath,
    BatchConflict,
    CommitConflict,
    CorruptQueue,
    DiskFull,
    Empty,
    QewQewError,
    QueueBroken,
    QueueClosed,
    QueueFull,
    QueueLocked,
)
from qewqew_core.files import Descriptors, Files, close_first, read_all, remove_if_there, write_new
from qewqew_core.guard import Guard
from qewqew_core.inspection import QueueStats
from qewqew_core.journal import Log
from qewqew_core.leasing import Leasing
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.manifest import Manifest, Segment
from qewqew_core.operations import BatchOperation
from qewqew_core.reader_inspection import add_naks, check_rdx, lost_of, missing_rdx, place_of_rdx, seal_of, stats_of
from qewqew_core.reader_log import OPERATION
from qewqew_core.reader_state import (
    Change,
    Commit,
    GiveBack,
    HandedOut,
    HandOut,
    Lease,
    Lose,
    Move,
    Operation,
    Prepare,
    PutBack,
    Range,
    ReaderState,
    Resolve,
    SetFilter,
    Unprepare,
    evenly,
)
from qewqew_core.state import Piece
from qewqew_core.tags import Filter
from qewqew_core.view import SCAN, WINDOW, Found, Position, Stretch, View, behind
from qewqew_core.zbus import HEAD, Common, Entry, Message

if TYPE_CHECKING:
    from qewqew_core.topic import Topic

T = TypeVar("T")
_logger = logging.getLogger(__name__)
CALLS_IN_TURN = 128  # so often a consumer takes the lock before those who wait for it
_open_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


class Reader(Guard, Leasing):
    """A reader of a topic; from `Topic.reader`. Safe to share between threads, and between processes by opening it in each.

    `read` and `read_many` deliver messages, each to one consumer, in order; `commit` says that they are done with, durably.
    What is neither committed nor given back (`nack`, `close`) is delivered again after ``redeliver_after`` seconds, and at
    once when its consumer's process has died. At most ``window`` messages are in flight, of all consumers together.
    With ``auto_commit`` a message is committed before it is handed out: no message comes twice, but one may be lost with its
    consumer. `lease` takes batches, as from a queue: a reader that is leased from is a queue.
    """

    _what = "reader"
    _log: Log | None = None
    _rdx_fd = -1

    def __init__(
        self,
        topic: Topic,
        name: str,
        *,
        filter: str | None,
        start: str | int | datetime | Position,
        window: int,
        redeliver_after: float | None,
        auto_commit: bool,
        temporary: bool,
    ) -> None:
        self.name = layout.check_reader_name(name)
        self.window = layout.check_whole("window", window, 1, 1 << 20)
        if redeliver_after is not None and (
            isinstance(redeliver_after, bool) or not isinstance(redeliver_after, (int, float)) or not 0 <= redeliver_after < 1e9
        ):
            raise BadArgument(f"redeliver_after must be a number of seconds, or None, not {redeliver_after!r:.60}")
        self.redeliver_after = redeliver_after
        chosen = None if filter is None else Filter(filter)
        self.auto_commit = auto_commit
        self._topic = topic
        self._files: Files = topic._files
        directory = topic.path
        Guard.__init__(self, os.path.join(directory, "reader", name + ".rdx"))
        Leasing.__init__(self, topic.max_attempts, topic.retention, topic.retention_bytes)
        self._stem = os.path.join(directory, "state", name)
        self._name = f"{topic.name}-{name}"
        self._pieces_of: dict[int, list[Piece]] = {}  # base offset: checksums of a full block, once read
        self._mine: dict[int, int] = {}  # offset: attempt, of what this object has delivered and is not committed
        self._owner = random.SystemRandom().randrange(1, 1 << 62)
        self._filter = Filter(None)
        self._due = 0  # no message in flight is to be delivered again before this time (but those of dead owners)
        self._looked = 0.0  # when owners were last looked at …
        self._gone: set[int] = set()  # … and which of them had died
        self._depth = 0
        self._calls = 0
        self._unsettled = False
        self._untold: list[
            tuple[int, Position]
        ] = []  # (position in the log, the floor there) that the .rdx is to say once durable
        self._sealed = 0  # up to where the seal says that the log is on disk
        self._decided: list[str] = []  # sessions that were committed, when there was no room to note it
        self._lock_fds = Descriptors()
        self._leaving = Descriptors()  # descriptors that have no owner yet, or none any more
        self._process = os.getpid()
        self._view = View(self._files, directory, topic.dialect)
        self._released = False  # from now on there is something to be released
        try:
            self._open_lock()
            self._refusal = None
            with self._exclusive():
                self._open(start, chosen, temporary)
                if chosen is not None and chosen.text != self._state.filter:
                    self.set_filter(chosen.text)
                if temporary and not self._is_temporary():
                    self._patch(*zbus.mask_patch(self._common().mask | zbus.DELETE_ON_EXIT))
            _open_readers.add(self)
        except BaseException as error:
            self._refusal = QueueClosed("the reader was never opened")
            self._release()
            cause = error.__cause__
            if isinstance(error, QueueBroken) and isinstance(cause, OSError) and (full := self._full(cause)):
                raise full from cause
            raise

    # The lock, and what others did

    def _open_lock(self) -> None:
        try:
            open_lock(self._lock_fds, self._stem)
        except OSError as error:
            raise BadPath(f"cannot be opened: {error.strerror}", path=self._stem + ".lock") from error
        lock.take(self._lock_fd, self._owner, 1)

    @property
    def _lock_fd(self) -> int:
        return self._lock_fds[-1]

    def _has_lock_file(self) -> bool:
        """False if the reader was deleted, with its lock file, since that was opened: the lock of another file is none."""
        try:
            return os.stat(self._stem + ".lock").st_ino == os.fstat(self._lock_fd).st_ino
        except FileNotFoundError:
            return False

    def _take_lock(self) -> bool | None:
        return lock.take(self._lock_fd, 0, 1) or None

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._calls += 1
        # Mostly without a look at who waits: to hand the lock on takes longer than a call. But not for ever.
        if (self._calls % CALLS_IN_TURN == 0 or not self._take_lock()) and not lock.in_turn(
            self._lock_fd, self._topic.lock_timeout, self._take_lock
        ):
            raise QueueLocked(
                f"another process is in a call of the reader; gave up after {self._topic.lock_timeout:g} s. It was stopped, or "
                "leases very much: look there, or wait longer with the topic's lock_timeout",
                path=self.path,
            )
        if self._log is None:
            if not self._has_lock_file():
                self._open_lock()
                close_first(self._lock_fds)
                self._depth -= 1
                self._enter()
            return
        self._catch_up(self._log)
        if self._unsettled:
            self._move(self._settle)
        for session in list(self._decided):
            with contextlib.suppress(DiskFull):
                self._note(session)

    def _leave(self) -> None:
        self._depth = max(0, self._depth - 1)  # `_enter` may have been interrupted before it counted
        if self._depth == 0 and self._lock_fds:  # else `close` was faster than what an interrupt has left
            lock.drop(self._lock_fd, 0, 1)

    def _catch_up(self, log: Log) -> None:
        try:
            inode, _ = self._files.identity(log.path)
        except FileNotFoundError:
            self._refusal = QueueClosed("the reader was deleted", path=self.path)
            raise self._refusal from None
        if inode != self._inode:  # another process has cut the log back, or has deleted the reader and made another
            if self._has_lock_file():
                self._load()
                log.replaced()
                return
            self._refusal = QueueClosed("the reader was deleted", path=self.path)
            raise self._refusal
        size = self._files.size(self._log_fd)
        if size == log.end:
            return
        data = self._files.read(self._log_fd, size - log.end, log.end)
        base, end = log.end, log.end
        for frame in journal.frames(data, log.generation, 0):
            end = base + frame.end
            operation = reader_log.replay_frame(frame, self._state, log.path, base)
            self._unsettled |= isinstance(operation, (Lease, PutBack, Change))  # which files follow
        log.follow(end)
        if end < size:  # who appended this was killed while it did
            self._files.truncate(self._log_fd, end)
        if self._filter.text != self._state.filter:
            self._filter = Filter(self._state.filter)
        self._due = 0
        self._refresh_mine()

    def _refresh_mine(self) -> None:
        flight = self._state.flight
        for offset in [offset for offset in self._mine if offset not in flight or flight[offset].owner != self._owner]:
            del self._mine[offset]

    def _load(self, rdx: tuple[int, int] | None = None) -> None:
        """Replay the whole log; ``rdx``: the place that the .rdx names."""
        path = self._stem + ".log"
        self._leaving.append(fd := self._files.open(path))
        try:
            data = read_all(self._files, fd, path)
            found = reader_log.replay(data, path)
            reader_log.check_whole(found, seal_of(self._files, self._stem), rdx, path)
            if found.end < len(data):
                self._files.truncate(fd, found.end)
            # Who was killed after putting this log, or a directory of batches, into place may not have done it.
            self._files.sync_directory(os.path.dirname(path))
        except BaseException:
            self._leaving.close()
            raise
        self._attach(found.generation, found.snapshot_end, found.end, found.state)
        self._unsettled = True
        self._refresh_mine()

    def _attach(self, generation: int, snapshot_end: int, end: int, state: ReaderState) -> None:
        """The descriptor that was opened last is that of the log."""
        self._state = state
        path, self._log_fd, fds = self._stem + ".log", self._leaving[-1], Descriptors()
        self._leaving.hand_over(fds)
        self._log = Log(self._files, path, fds, generation, end, snapshot_end, "reader")
        self._inode, _ = self._files.identity(self._stem + ".log")
        self._rotate_at = snapshot_end + max(LIMITS.reader_log_bytes, snapshot_end)
        self._filter = Filter(state.filter)
        self._due = 0
        self._untold = []
        self._sealed = 0

    # Opening

    def _open(self, start: str | int | datetime | Position, chosen: Filter | None, temporary: bool) -> None:
        files = self._files
        if not files.exists(self.path):
            if files.exists(self._stem + ".log"):  # of a reader that was deleted
                if seal_of(files, self._stem) is not None:
                    raise missing_rdx(self.path)
                files.unlink(self._stem + ".log")
            self._break_seal()
            files.sync_directory(os.path.dirname(self._stem))  # a power cut must not bring it back beside the new .rdx
            place = self._begin(start)
            text = None if chosen is None else chosen.text
            self._make_rdx(place, text, temporary)
            self._new_log(ReaderState(todo=[Range(place, None)], filter=text))
            self._settle()  # of a reader that was deleted, batches may be there
        for path in (self.path, self._stem + ".log"):
            remove_if_there(files, path + ".tmp")  # of who was killed while making it
        self._rdx_fd = files.open(self.path)
        data = files.read(self._rdx_fd, zbus.READER_SIZE, 0)
        whole, data = len(data) == zbus.READER_SIZE, data.ljust(zbus.READER_SIZE, b"\0")
        block, offset = zbus.unpack_position(data)
        if files.exists(self._stem + ".log"):
            if self._log is None:
                self._load((block, offset))
            check_rdx(self._state, whole, self.path)
            self._extend_rdx(whole)
            floor = self._state.floor()
            if not self._state.clean or (floor.block, floor.offset, self._state.filter) == (
                block,
                offset,
                zbus.unpack_filter(data),
            ):
                self._come_back()
                return
            # A zbus server has used the reader since.
        elif seal_of(files, self._stem) is not None:
            raise reader_log.missing(self._stem + ".log")
        else:
            self._extend_rdx(whole)
            files.sync_directory(os.path.dirname(self.path))  # who made the .rdx may have been killed before doing it
        files.sync(self._rdx_fd)
        place = place_of_rdx(self._view, block, offset, self.path)
        state = ReaderState(todo=[Range(place, None)], filter=zbus.unpack_filter(data), passed=(block, offset))
        if self._log is not None:
            state.batches, state.ranges, state.expired_keys = self._state.batches, self._state.ranges, self._state.expired_keys
            self._log.close()
            self._log = None  # else, should what follows fail, it would be closed twice
        handed_out = add_naks(self._files, self._view, self._nak_path, state)
        self._new_log(state)
        self._clear_naks(handed_out)

    def _extend_rdx(self, whole: bool) -> None:
        """As the original does. Durably: cut short beside a log it is damaged."""
        if not whole:
            self._files.truncate(self._rdx_fd, zbus.READER_SIZE)
            self._files.sync(self._rdx_fd)

    def _come_back(self) -> None:
        """If a power cut took messages from the topic (``sync="never"``) that were read already: those to come are new ones."""
        index = self._view.index()
        last = index.start + index.blocks - 1
        end = (last, self._view.entry(last).end)
        state = self._state
        if state.furthest()[:2] > end:
            _logger.warning("reader %s: messages that it had read are no longer in the topic", self.name)
            latest = self._view.latest()
            offsets = [offset for offset, one in state.flight.items() if one.at[:2] >= end]
            kept = [Range(one.start, one.stop and min(one.stop, latest)) for one in state.todo if one.start < latest]
            if not kept or kept[-1].stop is not None:
                kept.append(Range(latest, None))
            self._append(Lose(kept, offsets, 0))

    def _begin(self, start: str | int | datetime | Position) -> Position:
        if isinstance(start, Position):
            return start
        if start == "oldest":
            # As the original: the first block, even if its first message is not there yet.
            index = self._view.index()
            oldest = self._view.oldest()
            return oldest if oldest.offset or oldest.block == index.start else Position(index.start, 0, oldest.number)
        if start == "latest":
            return self._view.latest()
        if type(start) is int:
            return self._seek(start, None, None)
        if isinstance(start, datetime):
            return self._seek(None, None, start)
        raise BadArgument(f'start must be "oldest", "latest", the number of a message or a datetime, not {start!r:.60}')

    def _make_rdx(self, place: Position, filter: str | None, temporary: bool) -> None:
        """The reader is there when its .rdx is: with its filter, and temporary, for who makes it may be killed now."""
        directory = os.path.dirname(self.path)
        data = bytearray(zbus.new_reader(now_ms(), place.block, place.offset))
        for at, patch in (zbus.filter_patch(filter), zbus.mask_patch(zbus.DELETE_ON_EXIT if temporary else 0)):
            data[at : at + len(patch)] = patch
        write_new(self._files, self.path + ".tmp", bytes(data))
        self._files.rename(self.path + ".tmp", self.path)
        self._files.sync_directory(directory)

    def _new_log(self, state: ReaderState) -> None:
        generation = journal.new_generation()
        data = reader_log.snapshot(state, generation)
        path = self._stem + ".log"
        self._break_seal()
        write_new(self._files, path + ".tmp", data, self._leaving)
        self._files.rename(path + ".tmp", path)
        self._files.sync_directory(os.path.dirname(path))
        self._attach(generation, len(data), len(data), state)
        self._tell_floor()

    @property
    def _nak_path(self) -> str:
        return self.path.removesuffix(".rdx") + ".nak"

    def _clear_naks(self, places: list[int]) -> None:
        if places:
            with Descriptors() as fds:
                fds.append(self._files.open(self._nak_path))
                for at in places:
                    self._files.write(fds[0], b"\0", at)

    # Committing

    def _append(self, operation: Operation) -> int:
        """Append it to the log and apply it; returns the position that `_durable` takes."""
        assert self._log is not None
        before = self._state.floor()
        self._committed = True
        position = self._log.append(OPERATION, reader_log.pack(operation))
        self._state.apply(operation)
        floor = self._state.floor()
        if floor[:2] != before[:2]:
            # The oldest one may be durable soon, and the newest one says the most.
            self._untold = [*self._untold[:1], (position, floor)]
        if self._log.end > self._rotate_at:
            self._rotate()
            position = self._log.position
        return position

    def _durable(self, position: int, always: bool = False) -> None:
        if self._topic.sync == "commit" or always:
            assert self._log is not None
            try:
                self._log.sync(position, refuse=False)
            except QueueBroken as error:
                with self._lock:
                    self._break(error)
                raise
            self._tell()

    def _tell(self) -> None:
        """Have the .rdx and the seal say what is durable by now. A commit has happened: nothing here may pass for its failure."""
        with self._lock:
            if self._refusal is not None or not (self._depth or self._take_lock()):
                return  # another process is in a call; who commits next tells it
            self._depth += 1
            try:
                assert self._log is not None
                if self._depth == 1:
                    self._catch_up(self._log)
                self._tell_durable()
            except QueueClosed:
                pass  # the reader was deleted meanwhile
            except BaseException as error:
                self._judge(error)
                raise
            finally:
                self._leave()

    def _tell_durable(self) -> None:
        log = self._log
        assert log is not None
        durable = [floor for position, floor in self._untold if position <= log.durable]
        if durable:
            floor = min(durable[-1], self._state.floor())  # somebody may have moved it back since
            self._write_rdx(0, zbus.pack_position(floor.block, floor.offset))
            del self._untold[: len(durable)]
        if log.synced > self._sealed:
            seal = reader_log.pack_seal(reader_log.Seal(log.generation, log.synced))
            try:
                self._files.write(self._lock_fd, seal, 0)
            except OSError as error:
                if self._full(error) is None:
                    raise
            self._sealed = log.synced

    def _tell_floor(self) -> None:
        """All of the log is durable."""
        assert self._log is not None
        if self._rdx_fd >= 0:
            self._untold = [(self._log.durable, self._state.floor())]
        self._tell_durable()

    def _break_seal(self) -> None:
        """The log is about to be exchanged."""
        if self._files.size(self._lock_fd):
            self._files.truncate(self._lock_fd, 0)
            self._files.sync(self._lock_fd)
        self._sealed = 0

    def _rotate(self) -> None:
        """Cut the log back to a snapshot. Where there is no room for it, the old log goes on."""
        assert self._log is not None
        state = self._state
        try:
            expired = state.prune_expired(now_ms())
            self._log.sync(self._log.position, refuse=False)
            self._tell_floor()
            self._files.sync(self._rdx_fd)
            self._break_seal()
            self._log.replace(self._log.prepare(partial(reader_log.snapshot, state)))
        except OSError as error:
            if isinstance(error, QueueBroken) or self._full(error) is None:
                raise
            self._rotate_at = self._log.end + LIMITS.reader_log_bytes // 4
            return
        self._log_fd = self._log._fd
        self._inode, _ = self._files.identity(self._log.path)
        self._rotate_at = self._log.end + max(LIMITS.reader_log_bytes, self._log.end)
        self._tell_durable()
        self._remove_expired(expired)

    # Reading

    def read(self, timeout: float | None = 0) -> Message:
        """The next message. Waits up to ``timeout`` seconds (None: for ever), then raises `Empty`.

        It is in flight until it is committed. Raises `QueueFull` if ``window`` messages are, and `CorruptQueue`.
        """
        return self._wait(lambda: self._deliver(1, None), timeout)[0]

    def read_many(self, max_records: int, max_bytes: int | None = None, timeout: float | None = 0) -> list[Message]:
        """Up to ``max_records`` messages with bodies of together up to ``max_bytes``, at least one; maybe [] after ``timeout``.

        Fewer than there are, if ``window`` leaves room for fewer. Raises as `read`.
        """
        layout.check_whole("max_records", max_records, 1, sys.maxsize)
        if max_bytes is not None:
            layout.check_whole("max_bytes", max_bytes, 1, sys.maxsize)
        try:
            return self._wait(lambda: self._deliver(max_records, max_bytes), timeout)
        except Empty:
            return []

    def peek(self, timeout: float | None = 0) -> Message:
        """The message that `read` would deliver; it is not delivered. Waits and raises as that."""
        return self._wait(self._look, timeout)[0]

    def __iter__(self) -> Iterator[Message]:
        """The messages that wait, as `read` delivers them, until there is none."""
        with contextlib.suppress(Empty):
            while True:
                yield self.read()

    def _wait(self, act: Callable[[], list[Message]], timeout: float | None) -> list[Message]:
        deadline = layout.deadline(timeout)
        pause = 0.001
        while True:
            if found := act():
                return found
            if self._state.prepared:  # what a session had that died while it committed may be ours
                self._decide_sessions()
                if found := act():
                    return found
            rest = None if deadline is None else deadline - clock.monotonic()
            if rest is not None and rest <= 0:
                raise Empty("there is no message that this reader has not delivered", path=self.path)
            clock.sleep(pause if rest is None else min(pause, rest))
            pause = min(pause * 1.5, 0.02)

    def _look(self) -> list[Message]:
        with self._exclusive():
            self._drop_lost()
            for message, _ in self._again(1):
                return [message]
            chosen = self._filter if self._filter else None
            for start, stop in self._state.todo:
                for one in self._view.stretches(start, stop, chosen, most=1):
                    if one.places:
                        return one.messages()
            return []

    def _deliver(self, max_records: int, max_bytes: int | None) -> list[Message]:
        with self._exclusive():
            self._drop_lost()
            messages, runs, todo = self._pick(max_records, max_bytes)
            if not messages and todo == self._state.todo:
                return []
            if self.auto_commit:
                again = list({one.offset: None for one in messages if one.offset in self._state.flight})
                position = self._append(Commit(again, todo))
            else:
                due = None if self.redeliver_after is None else now_ms() + int(self.redeliver_after * 1000)
                position = self._append(HandOut(self._owner, due, runs, todo))
                self._due = self._due if due is None else min(self._due, due)
                self._mine.update(zip((one.offset for one in messages), (one.attempt for one in messages), strict=True))
        if self.auto_commit:
            self._durable(position)
        return messages

    def _pick(self, max_records: int, max_bytes: int | None) -> tuple[list[Message], list[HandedOut], list[Range]]:
        """The next messages, the runs that they are, and what is to be delivered after them."""
        messages: list[Message] = []
        runs: list[HandedOut] = []
        todo = list(self._state.todo)
        room = sys.maxsize if max_bytes is None else max_bytes

        for message, at in self._again(max_records):
            if messages and len(message.body) > room:
                return messages, runs, todo
            messages.append(message)
            runs.append((message.offset - at.offset, at.block, message.attempt, at.number, [at.offset]))
            room -= len(message.body)
        free = max_records if self.auto_commit else min(max_records, self.window - len(self._state.flight) + len(messages))
        if messages and (len(messages) >= free or room <= 0):
            return messages, runs, todo
        chosen = self._filter if self._filter else None
        window = WINDOW if max_records == 1 and chosen is None else SCAN
        while todo:
            start, stop = todo[0]
            reached = start
            full = False
            for one in self._view.stretches(start, stop, chosen, window, max(1, free - len(messages))):
                if one.places:
                    if free <= 0:
                        raise QueueFull(
                            f"{len(self._state.flight):,} messages are delivered and not committed, as many as window allows: "
                            "commit them, or give them back (nack)",
                            path=self.path,
                        )
                    count, room = _fitting(one.bodies, room, not messages)
                    if not count:
                        full = True
                        break
                    one = one.first(count)
                    messages += one.messages()
                    runs += _runs(one)
                reached = one.reached
                if len(messages) >= free or room <= 0:
                    full = True
                    break
            todo[0] = Range(reached, stop)
            if full or stop is None:
                break
            todo.pop(0)
        return messages, runs, todo

    def _again(self, most: int) -> Iterator[tuple[Message, Position]]:
        """Messages in flight that are to be delivered again, the first first, and where they are; read one by one."""
        flight, now, gone = self._state.flight, now_ms(), self._dead_owners()
        if not flight or (now < self._due and not gone):
            return
        free = {offset: one for offset, one in flight.items() if one.session is None}
        due = sorted(offset for offset, one in free.items() if (one.due is not None and one.due <= now) or one.owner in gone)
        self._due = 0 if due else min((one.due for one in free.values() if one.due is not None), default=sys.maxsize)
        for offset in due[:most]:
            one = flight[offset]
            message = self._view.message(one.at)
            if message is None:
                break  # it was removed from the topic since `_drop_lost`
            yield message._replace(attempt=one.attempt + 1), one.at

    def _dead_owners(self) -> set[int]:
        """Those who have messages in flight and whose process has ended."""
        if clock.monotonic() >= self._looked + LIMITS.look_at_owners:
            self._looked = clock.monotonic()
            owners = {one.owner for one in self._state.flight.values()} - {0, self._owner}
            self._gone = {owner for owner in owners if lock.first_locked(self._lock_fd, owner, 1) is None}
        return self._gone  # also between two looks: what they had comes before what is new

    def _drop_lost(self) -> None:
        """Move on where the oldest messages were removed from the topic before they were committed."""
        found = lost_of(self._state, self._view)
        if found is not None:
            if lost := found[2]:  # else it has committed all that is gone
                _logger.warning("reader %s: %d messages were removed from the topic before they were committed", self.name, lost)
            self._append(Lose(*found))
            self._refresh_mine()

    # Committing

    def commit(self, *messages: Message) -> int:
        """These messages are done with; without any: all that this object has delivered. Returns how many.

        Durable when it returns, as `Queue.put` is. Committing a message twice is no error. Raises `CommitConflict` if a message
        is with somebody else, because its time was over, or is yet to be delivered; then none was committed.
        """
        with self._exclusive():
            offsets = self._check_mine(messages)
            if not offsets:
                return 0
            position = self._append(Commit(evenly(offsets), None))
            for offset in offsets:
                del self._mine[offset]
        self._durable(position)
        return len(offsets)

    def _check_mine(self, messages: tuple[Message, ...]) -> list[int]:
        """The offsets of messages that are with this object, and not committed yet."""
        if not messages:
            if not self._state.prepared:
                return list(self._mine)
            return [offset for offset in self._mine if self._state.flight[offset].session is None]
        offsets: dict[int, None] = {}  # a message may be given twice
        for message in messages:
            if not isinstance(message, Message) or message.offset < 0:
                what = "one that was made" if isinstance(message, Message) else type(message).__name__
                raise BadArgument(f"commit and nack take messages that were read, not {what}")
            mine = self._mine.get(message.offset)
            if mine == message.attempt:
                offsets[message.offset] = None
            elif message.offset in self._state.flight or self._is_ahead(message):
                raise CommitConflict(
                    f"message {message.number} is not with this consumer: it was delivered again since (redeliver_after), given "
                    "back, or the reader was moved. Nothing was changed",
                    path=self.path,
                )
        return list(offsets)

    def _is_ahead(self, message: Message) -> bool:
        return any(
            one.start.number <= message.number and (one.stop is None or message.number < one.stop.number)
            for one in self._state.todo
        )

    def nack(self, *messages: Message, delay: float = 0.0) -> int:
        """Give messages back, to be delivered again, first, after ``delay`` seconds; without any: all that this object has.

        Returns how many. Raises `CommitConflict` as `commit`.
        """
        if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < 1e9:
            raise BadArgument(f"delay must be a number of seconds, 0 or more, not {delay!r:.60}")
        with self._exclusive():
            offsets = self._check_mine(messages)
            if offsets:
                due = now_ms() + int(delay * 1000)
                self._append(GiveBack(offsets, due))
                self._due = min(self._due, due)
                self._refresh_mine()
            return len(offsets)

    # Sessions; the log of the topic decides

    def _prepare(self, session: str, messages: list[Message]) -> None:
        with self._exclusive():
            offsets = self._check_mine(tuple(messages)) if messages else []
            if len(offsets) < len(messages):
                raise CommitConflict("a message of the session was committed already. Nothing was changed", path=self.path)
            position = self._append(Prepare(session, offsets))
        self._durable(position)

    def _resolve(self, session: str) -> bool:
        """The session was committed; whether that could be noted. If not, because the disk is full, it is as soon as possible."""
        self._decided.append(session)
        with self._exclusive():
            return session not in self._decided

    def _note(self, session: str) -> None:
        if any(one.session == session for one in self._state.flight.values()):
            self._append(Resolve(session, True, now_ms()))
            self._due = 0
            self._refresh_mine()
        self._decided.remove(session)

    def _leave_open(self, session: str) -> None:
        """Nobody knows whether the session was committed: nothing that it has read may be given back or committed."""
        with self._lock:
            for offset, one in self._state.flight.items():
                if one.session == session:
                    self._mine.pop(offset, None)

    def _unprepare(self, session: str) -> None:
        """The session was not committed, and goes on."""
        with self._exclusive():
            if any(one.session == session for one in self._state.flight.values()):
                self._append(Unprepare(session))
                self._due = 0

    def _return(self, messages: list[Message]) -> None:
        """Give back those that are still with this object."""
        with self._exclusive():
            offsets = [one.offset for one in messages if self._mine.get(one.offset) == one.attempt]
            if offsets:
                self._append(GiveBack(offsets, now_ms()))
                self._due = 0
                self._refresh_mine()

    def _resolve_all(self, committed: set[str]) -> None:
        """Of those who died in `Session.commit`; who calls has the lock of the topic's writer."""
        with self._exclusive():
            for session in {one.session for one in self._state.flight.values() if one.session is not None}:
                self._append(Resolve(session, session in committed, now_ms()))
            assert self._log is not None
            self._durable(self._log.position, always=True)

    def _decide_sessions(self) -> None:
        """If a process died while it committed a session: have the topic's log say how that ended."""
        with self._exclusive():
            undecided = {one.owner for one in self._state.flight.values() if one.session is not None} - {self._owner}
            if all(lock.first_locked(self._lock_fd, owner, 1) is not None for owner in undecided):
                return
        self._topic._recover()

    # Moving

    def seek(self, *, number: int | None = None, offset: int | None = None, time: datetime | None = None) -> None:
        """Go on at the message with this number, with this offset in the topic, or the first since a time; durable.

        What was delivered to anybody and is not committed is forgotten: it comes again if it lies behind the new place.
        Raises `BadArgument` if there is no such message; the place of the next message to come is one.
        """
        with self._exclusive():
            place = self._seek(number, offset, time)
            position = self._append(Move([Range(place, None)], 0))
            self._refresh_mine()
        self._durable(position)

    def move_to(self, place: Position, expected: Position | None = None) -> None:
        """Go on at a place that `position` or a `View` has given: what lies before it counts as committed. Durable.

        For who keeps account of messages elsewhere, and has the reader hold them back from removal. Raises `CommitConflict`,
        and changes nothing, if the reader is used otherwise: if messages are in flight or leased, or if it does not stand at
        ``expected`` (unless what was there has been removed).
        """
        with self._exclusive():
            state, found = self._state, self._state.floor()
            living = [one.id for one in state.batches.values() if one.state in ("leased", "returned")]
            if state.flight or living:
                raise CommitConflict(
                    f"the reader is in use: {len(state.flight)} of its messages are in flight, and {len(living)} batches leased",
                    path=self.path,
                )
            if expected is not None and found[:2] != expected[:2] and expected.block >= self._view.index().start:
                raise CommitConflict(
                    f"the reader was moved by somebody else: it stands at message {found.number}, not at {expected.number}",
                    path=self.path,
                )
            position = self._append(Move([Range(place, None)], 0))
        self._durable(position)

    def keep(self) -> None:
        """Let the reader stay when its last consumer has gone, although it was made as a temporary one. Durable."""
        with self._exclusive():
            if self._is_temporary():
                self._patch(*zbus.mask_patch(self._common().mask & ~zbus.DELETE_ON_EXIT))

    def _seek(self, number: int | None, offset: int | None, time: datetime | None) -> Position:
        start = self._view.index().start
        try:
            return self._find(number, offset, time)
        except CorruptQueue:
            if self._view.index().start == start:
                raise
            return self._seek(number, offset, time)  # blocks were removed meanwhile

    def _find(self, number: int | None, offset: int | None, time: datetime | None) -> Position:
        if (number is not None) + (offset is not None) + (time is not None) != 1:
            raise BadArgument("give one of number, offset and time")
        if time is not None:
            if not isinstance(time, datetime) or time.tzinfo is None:
                raise BadArgument(f"time must be a datetime with a time zone, not {time!r:.60}")
            return self._view.by_time(int(time.timestamp() * 1000))
        if number is not None:
            place = self._view.by_number(layout.check_whole("number", number, 0, sys.maxsize))
            what = f"message {number}"
        else:
            assert offset is not None
            place = self._view.by_offset(layout.check_whole("offset", offset, 0, sys.maxsize))
            what = f"message at offset {offset}"
        if place is None:
            oldest, latest = self._view.oldest(), self._view.latest()
            raise BadArgument(
                f"there is no {what}: the topic {self._topic.path} has messages {oldest.number} to {latest.number - 1}"
            )
        return place

    @property
    def filter(self) -> str | None:
        """Which tags the reader delivers; see `tags`."""
        with self._exclusive():
            return self._state.filter

    def set_filter(self, text: str | None) -> None:
        """Deliver only messages whose tags match, from the next one on; None or "": all. Durable; raises `BadArgument`.

        Messages that an earlier filter has passed over do not come again, but with `seek`.
        """
        chosen = Filter(text)
        with self._exclusive():
            position = self._append(SetFilter(chosen.text))
            self._filter = chosen
            self._durable(position, always=True)
            self._write_rdx(*zbus.filter_patch(chosen.text))

    # What the reader says of itself, as a topic does

    def header(self) -> Common:
        """Mask, times (milliseconds since the epoch), creator and the four extension texts; see `Topic.header`."""
        with self._exclusive():
            return self._common()

    def set_mask(self, mask: int) -> None:
        """The 32 bits that zbus servers keep there: see `zbus`. Durable, as are the other fields of the header.

        With `zbus.DELETE_ON_EXIT` the reader is a temporary one from now on: it is deleted with its last consumer.
        """
        self._set(*zbus.mask_patch(mask))

    def set_creator(self, text: str | None) -> None:
        """At most 127 bytes of UTF-8, or `BadArgument`."""
        self._set(*zbus.creator_patch(text))

    def set_extension(self, number: int, text: str | None) -> None:
        """One of four texts (``number`` 0 to 3) for the application; at most 127 bytes of UTF-8, or `BadArgument`."""
        self._set(*zbus.ext_patch(number, text))

    def _set(self, at: int, data: bytes) -> None:
        with self._exclusive():
            self._patch(at, data)

    def _write_rdx(self, at: int, data: bytes) -> None:
        self._files.write(self._rdx_fd, data, at)

    def _patch(self, at: int, data: bytes) -> None:
        self._write_rdx(at, data)
        self._files.sync(self._rdx_fd)

    def _common(self) -> Common:
        return zbus.unpack_common(self._files.read(self._rdx_fd, zbus.READER_SIZE, 0))

    # Looking

    def lag(self) -> int:
        """How many messages lie behind the first that is not committed, whatever the filter; those of batches included."""
        with self._exclusive():
            self._drop_lost()
            return self._view.latest().number - self._state.floor().number

    @property
    def lost(self) -> int:
        """How many messages were removed from the topic before this reader had committed them."""
        with self._exclusive():
            self._drop_lost()
            return self._state.lost

    def position(self) -> Position:
        """The first message that is not committed."""
        with self._exclusive():
            self._drop_lost()
            return self._state.floor()

    def stats(self) -> QueueStats:
        """Counts and sizes of what is still to be leased or committed. With a filter the messages must be read to count them."""
        with self._exclusive():
            self._drop_lost()
            return stats_of(self._state, self._view, self._stem)

    # Batches: what `Leasing` leaves to its owner

    @property
    def _leases(self) -> ReaderState:
        return self._state

    def _notify(self) -> None:
        pass  # who waits looks again

    def _change(self, operation: BatchOperation) -> None:
        self._durable(self._append(Change(operation, now_ms())), always=True)

    def _beforehand(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            if isinstance(error, QewQewError) or not (full := self._full(error)):
                raise
            raise full from error

    def _keep_room(self, names: int, size: int = 0) -> None:
        pass  # where the files are is found out anew by every call after one that could not move them

    def _move(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if self._full(error) is None:
                raise
            self._unsettled = True

    def _occupied(self, batch: BatchState) -> int:
        return batch.bytes + HEAD * batch.records

    def _manifest_of(self, batch: BatchState) -> Manifest:
        body = manifest.load(batches.directory_of(self._stem, batch))
        return Manifest(**{**vars(body), "key": batch.keys[-1], "attempt": batch.attempt})

    def _take_back(self, batch: BatchState) -> None:
        whole = ranges = self._state.ranges[batch.id]
        if sum(stop.number - start.number for start, stop in whole if stop is not None) != batch.records:
            leased_with = Filter(manifest.load(batches.directory_of(self._stem, batch)).filter)
            if leased_with.text != self._filter.text:
                ranges = [part for one in whole for part in self._matching(one, leased_with)]
        if min(whole).start.block < self._view.index().start:  # asked last: messages may be removed while they are looked at
            raise BatchConflict(
                f"the messages of batch {batch.id} are no longer in the topic, only in the batch; with return_to_queue() it "
                "is leased again",
                path=self.path,
            )
        todo = self._without_flight(_merged([*ranges, *self._state.todo]))
        self._durable(self._append(PutBack(batch.id, todo)), always=True)
        batches.settle_forget(self._files, self._stem, [batch.id], keep_manifest=False)

    def _matching(self, whole: Range, chosen: Filter) -> list[Range]:
        """The parts of a range that match: what that filter has passed over must not come because there is another one since."""
        return _merged([Range(one.at, one.after) for one in self._view.messages(*whole, chosen) if isinstance(one, Found)])

    def _without_flight(self, ranges: list[Range]) -> list[Range]:
        """The reader was moved back, and has delivered messages of the batch again: they must not come once more."""
        for at in sorted(one.at for one in self._state.flight.values()):
            for place, one in enumerate(ranges):
                if one.start <= at and (one.stop is None or at < one.stop):
                    message = self._view.message(at)
                    assert message is not None
                    parts = [Range(one.start, at), Range(behind(message, at), one.stop)]
                    ranges[place : place + 1] = [part for part in parts if part.stop is None or part.start < part.stop]
                    break
        return ranges

    def _lease_new(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None) -> BatchState | None:
        self._drop_lost()
        try:
            segments, ranges, offsets, todo = self._cut(max_records, max_bytes)
        except CorruptQueue:
            if not self._was_trimmed():
                raise
            return self._lease_new(key, max_records, max_bytes, lease_timeout)
        if not segments:
            if todo != self._state.todo:
                self._append(Commit([], todo))
            return None
        batch = self._new_batch(key)
        batch.records = sum(one.records for one, _ in segments)
        batch.bytes = sum(size for _, size in segments)
        batch.lease_timeout, batch.extended = lease_timeout, batch.created
        directory = batches.directory_of(self._stem, batch)
        try:
            batches.remove_tree(self._files, directory)
            batches.make_home(self._files, self._stem, layout.BATCHES)
            self._files.make_directory(directory)
            for name in {one.file for one, _ in segments}:
                self._files.link(os.path.join(self._topic.path, "data", name), os.path.join(directory, name))
            if self._topic.sync != "commit":  # the batch is durable, so its messages must be
                self._sync_topic([os.path.join(directory, name) for name in {one.file for one, _ in segments}])
            batches.write_manifest(self._files, directory, self._manifest(batch, [one for one, _ in segments]))
            self._files.sync_directory(os.path.dirname(directory))
            position = self._append(Lease(batch, ranges, offsets, todo))
        except OSError as error:
            batches.remove_tree(self._files, directory)
            if isinstance(error, QewQewError):
                raise
            if isinstance(error, FileNotFoundError) and self._was_trimmed():
                return self._lease_new(key, max_records, max_bytes, lease_timeout)
            raise self._full(error) or self._break(error) from error
        self._durable(position, always=True)
        self._refresh_mine()
        return self._state.batches[batch.id]

    def _was_trimmed(self) -> bool:
        """Whether messages of this reader were removed since `_drop_lost`."""
        return self._state.floor().block < self._view.index().start

    def _sync_topic(self, blocks: list[str]) -> None:
        """Make durable what the topic has committed into these blocks."""
        for path in (*blocks, os.path.join(self._topic.path, self._topic.name + ".log")):
            with Descriptors() as fds:
                fds.append(self._files.open_to_read(path))
                self._files.sync(fds[0])
        self._files.sync_directory(os.path.join(self._topic.path, "data"))
        self._files.sync_directory(self._topic.path)

    def _manifest(self, batch: BatchState, segments: list[Segment]) -> Manifest:
        created = layout.moment(batch.created).to_rfc3339_string().replace("+00:00", "Z")
        return Manifest(
            batch.id,
            batch.keys[-1],
            self._topic.name,
            created,
            batch.attempt,
            batch.records,
            batch.bytes,
            tuple(segments),
            manifest.BLOCK,
            self.name,
            self._topic.dialect,
            self._state.filter,
        )

    def _cut(self, max_records: int, max_bytes: int) -> tuple[list[tuple[Segment, int]], list[Range], list[int], list[Range]]:
        """The next messages as segments with their payload bytes, the ranges they come from, which of them were in flight, and
        what is left to deliver.
        """
        segment = partial(first_segment, self._view, self._filter, self._pieces)
        segments: list[tuple[Segment, int]] = []
        ranges: list[Range] = []
        offsets: list[int] = []
        todo = list(self._state.todo)
        runs: list[tuple[Position, Position, list[int]]] = []  # messages side by side, from where to where, and their offsets
        for message, at in self._again(max_records):
            if not self._filter.matches(message.tag):
                continue  # the filter was changed since: `read` delivers it
            after = behind(message, at)
            if runs and runs[-1][1] == at:
                start, _, those = runs.pop()
                those.append(message.offset)
                runs.append((start, after, those))
            else:
                runs.append((at, after, [message.offset]))
        for at, after, those in runs:
            one, size, end = segment(Range(at, after), max_records, max_bytes, bool(segments))
            if one is not None:
                segments.append((one, size))
                ranges.append(Range(at, end))
                offsets += those[: one.records]
                max_records, max_bytes = max_records - one.records, max_bytes - size
            if end != after:
                return segments, ranges, offsets, todo
        while todo and max_records > 0 and max_bytes > 0:
            start, stop = todo[0]
            if stop is not None and start[:2] >= stop[:2]:
                todo.pop(0)  # `read` has come to its end
                continue
            one, size, end = segment(todo[0], max_records, max_bytes, bool(segments))
            if one is not None:
                segments.append((one, size))
                ranges.append(Range(start, end))
                max_records, max_bytes = max_records - one.records, max_bytes - size
            if end == start:
                break
            if stop is not None and (end.block, end.offset) >= (stop.block, stop.offset):
                todo.pop(0)
            else:
                todo[0] = Range(end, stop)
        return segments, ranges, offsets, todo

    def _pieces(self, entry: Entry) -> list[Piece]:
        pieces = self._pieces_of.get(entry.base)
        if pieces is None or (pieces and pieces[-1].offset < entry.end):
            pieces = pieces_of(self._files, self._topic.path, entry.base)
            self._pieces_of = {entry.base: pieces}
        return pieces

    def _settle(self) -> None:
        """Make the files of batches agree with what is committed, wherever a process was killed."""
        files, state = self._files, self._state
        for batch in state.batches.values():
            if batch.state in ("dead", "returned", "leased"):
                batches.settle_place(files, self._stem, batch)
            if batch.state == "leased" and batch.attempt > 1:
                batches.write_manifest(self._files, batches.directory_of(self._stem, batch), self._manifest_of(batch))
        for home in (layout.BATCHES, layout.DEAD):
            if files.is_directory(self._stem + home):
                for name in files.list(self._stem + home):
                    directory = os.path.join(self._stem + home, name)
                    if name not in state.batches and files.list(directory) != [manifest.MANIFEST]:
                        batches.remove_tree(files, directory)
                    else:
                        remove_if_there(files, os.path.join(directory, manifest.MANIFEST + ".tmp"))
        self._unsettled = False

    # The end

    def close(self) -> None:
        """Give back what is not committed, and let go. A second call does nothing, but for what an interrupted one has not done.

        A temporary reader is deleted with its last consumer.
        """
        with self._lock:
            if self._released:
                return
            try:
                if self._refusal is None:
                    with self._exclusive():
                        self._leave_to_others()
            except (QueueClosed, DiskFull):
                pass  # it was deleted; or, without room: who finds its lock gone takes what it had
            finally:
                self._refusal = QueueClosed("the reader is closed", path=self.path)
                self._release()
                _open_readers.discard(self)

    def _leave_to_others(self) -> None:
        assert self._log is not None
        if self._mine:
            self._append(GiveBack(self._check_mine(()), now_ms()))
        # Now, so that of two that leave one after the other the second is alone.
        lock.drop(self._lock_fd, self._owner, 1)
        if lock.first_locked(self._lock_fd, 1, 0) is not None:
            return  # by another consumer
        if self._is_temporary():
            delete_files(self._files, self._topic.path, self.name)
        elif not self._state.clean:
            if self._log.end - self._log.snapshot_end > LIMITS.reader_log_bytes_at_close:
                self._rotate()
            self._log.sync(self._log.position, refuse=False)
            self._tell_floor()
            self._write_rdx(*zbus.filter_patch(self._state.filter))
            self._files.sync(self._rdx_fd)
            self._log.append(reader_log.CHECKPOINT, b"")

    def _is_temporary(self) -> bool:
        return bool(self._common().mask & zbus.DELETE_ON_EXIT)

    def _release(self) -> None:
        """Called again after an interrupt, it does what is left."""
        if self._process == os.getpid():
            lock.unlock(*self._lock_fds)
        self._lock_fds.close()
        self._view.close()
        if self._log is not None:
            self._log.close()
        if self._rdx_fd >= 0:
            self._leaving[len(self._leaving) :], self._rdx_fd = [self._rdx_fd], -1
        self._leaving.close()
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._released:
            self._refusal = QueueClosed("the reader is closed", path=self.path)
            with contextlib.suppress(OSError):
                self._release()

    def _forked(self) -> None:
        """In a forked child: the reader stays the parent's. Closing a descriptor drops no lock: the parent has it too."""
        self._refusal = QueueClosed("the reader was opened before this process was forked; open it again here", path=self.path)
        self._lock = type(self._lock)()  # whoever held it does not exist here
        if self._log is not None:
            self._log.forked()
        self._release()


def open_lock(fds: list[int], stem: str) -> None:
    """Open ``state/R.lock``, made if it is not there. In one step: no interrupt comes before the list has the descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fds.extend(map(os.open, (stem + ".lock",), (flags,), (0o600,)))
    if not stat.S_ISREG(os.fstat(fds[-1]).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", stem + ".lock")


def _fitting(bodies: list[bytes], room: int, first: bool) -> tuple[int, int]:
    """How many of these have ``room`` together, and what is left of it; the ``first`` is taken whatever its size."""
    if (size := sum(map(len, bodies))) < room:
        return len(bodies), room - size
    for count, body in enumerate(bodies):
        if len(body) > room and not (first and count == 0):
            return count, room
        room -= len(body)
        if room <= 0:
            return count + 1, room
    raise AssertionError


def _runs(one: Stretch) -> list[HandedOut]:
    """The messages of a stretch, parted where a filter holds others back between them."""
    numbers = [head[zbus.NUMBER] for head in one.heads]
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return [(one.base, one.block, 1, numbers[0], evenly(one.places))]
    ends = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    parts = pairwise((0, *ends, len(numbers)))
    return [(one.base, one.block, 1, numbers[begin], one.places[begin:end]) for begin, end in parts]


def _merged(ranges: list[Range]) -> list[Range]:
    """In order. They overlap where the reader was moved back since."""
    merged: list[Range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        last = merged[-1] if merged else None
        if last is None or (last.stop is not None and last.stop < one.start):
            merged.append(one)
        elif last.stop is not None and (one.stop is None or one.stop > last.stop):
            merged[-1] = Range(last.start, one.stop)
    return merged


def delete_files(files: Files, directory: str, name: str) -> None:
    """Remove a reader: first its .rdx, without which it is not there, then all else."""
    stem = os.path.join(directory, "state", name)
    break_seal(files, stem)  # it is what tells an .rdx that is missing from one that was deleted
    for path in (
        os.path.join(directory, "reader", name + ".rdx"),
        os.path.join(directory, "reader", name + ".nak"),
        stem + ".log",
    ):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        if path.endswith(".rdx"):
            files.sync_directory(os.path.dirname(path))
    for home in (layout.BATCHES, layout.DEAD):
        if files.is_directory(stem + home):
            for batch_id in files.list(stem + home):
                batches.remove_tree(files, os.path.join(stem + home, batch_id))
            files.remove_directory(stem + home)
    with contextlib.suppress(FileNotFoundError):
        files.unlink(stem + ".lock")
    files.sync_directory(os.path.join(directory, "reader"))


def break_seal(files: Files, stem: str) -> None:
    with contextlib.suppress(FileNotFoundError), Descriptors() as fds:
        fds.append(files.open(stem + ".lock"))
        if files.size(fds[0]):
            files.truncate(fds[0], 0)
            files.sync(fds[0])


def remove_leftovers(files: Files, directory: str) -> None:
    """What consumers have left that were killed while they made a reader, or deleted it; not what living ones are making."""
    homes = {home: files.list(os.path.join(directory, home)) for home in ("reader", "state")}

    def names(home: str, *suffixes: str) -> set[str]:
        return {name.removesuffix(suffix) for suffix in suffixes for name in homes[home] if name.endswith(suffix)} - {""}

    making = names("reader", ".rdx.tmp") | names("state", ".log.tmp")
    deleted = names("state", ".log", ".lock", layout.BATCHES, layout.DEAD) - names("reader", ".rdx")
    for name in making | deleted:
        rdx, stem = os.path.join(directory, "reader", name + ".rdx"), os.path.join(directory, "state", name)
        fds = Descriptors()
        try:
            open_lock(fds, stem)
            # Whoever makes or deletes the reader has this byte.
            if lock.take(fds[0], 0, 1) and os.stat(stem + ".lock").st_ino == os.fstat(fds[0]).st_ino:
                for path in (rdx + ".tmp", stem + ".log.tmp"):
                    remove_if_there(files, path)
                if not files.exists(rdx) and seal_of(files, stem) is None:  # else it is missing: who opens the reader is told
                    delete_files(files, directory, name)
        except FileNotFoundError:
            pass  # somebody else has deleted it
        except OSError as error:  # a reader that cannot be opened is told to who opens it
            _logger.warning("what is left of reader %s could not be removed: %s", name, error)
        finally:
            fds.close()


def _after_fork() -> None:
    for reader in list(_open_readers):
        reader._forked()
    _open_readers.clear()


os.register_at_fork(after_in_child=_after_fork)
