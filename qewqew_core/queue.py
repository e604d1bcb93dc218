"""`Queue`: a durable FIFO of records in chunk files, with one owner at a time.

What happens to a put: its frames become one commit in the transaction log (large ones are first written to
the chunk files, past the tail, where no reader looks); with ``sync="commit"`` the call returns when that is on
disk. Frames that the log carries go into the chunk file later, many at once; until then the log has them.
Everything else (pointers, header, removed files) follows the log and is redone from it after a crash (`recovery`).

The order that is kept everywhere: payload, then the commit, both durable, then the files that follow it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time as clock
import warnings
import weakref
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate, count
from typing import Literal, Self, TypeVar

from qewqew_core import batch as batches
from qewqew_core import chunk, java, journal, layout, lock, orphans, recovery, stamp, writing
from qewqew_core import log as logs
from qewqew_core.batch_state import BatchState
from qewqew_core.chunk import Record
from qewqew_core.errors import (
    BadPath,
    CorruptQueue,
    DiskFull,
    Empty,
    QewQewError,
    QueueBroken,
    QueueClosed,
    QueueFull,
    QueueLocked,
)
from qewqew_core.files import Files, close_each
from qewqew_core.guard import Guard
from qewqew_core.inspection import QueueStats, stats_of
from qewqew_core.keys import key_hash
from qewqew_core.leasing import Leasing, bound
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.manifest import Manifest
from qewqew_core.operations import Append, Clear, Extent, Lease, NewChunk, Operation, PutBack, PutKey, Rare, Replace, Take
from qewqew_core.orphans import Orphan
from qewqew_core.reading import Run, read_run
from qewqew_core.session import Session
from qewqew_core.state import Chunk, Cut, Span, State, Step
from qewqew_core.verification import Report, verify
from qewqew_core.writing import Spill

VANISHING = 0.2  # seconds to wait for a Java program that is closing the queue
MOVING_BYTES = 16 << 10  # what moving files after a commit may need, together with its frame …
NAME_BYTES = 256  # … for each name

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_open_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


class Queue(Guard, Leasing):
    """A queue at ``path``, opened for exclusive use; made if it is not there. Safe to share between threads.

    ``chunk_size``: bytes of each new chunk file, 12 to 2**31 - 1, really allocated; a record may have
    ``chunk_size - 12`` bytes, at most 65,535. ``sync``: with "commit" (default) a call that changes the queue is
    durable when it returns, also through a power cut; with "never" it survives the death of the process, and a
    power cut only from `close`, `lease` or the end of a batch on. ``lock_timeout``: seconds to wait for another owner.
    ``max_records``, ``max_bytes``: how many records, and bytes of payload, may wait in the queue (those of batches not
    counted); more are refused with `QueueFull`, or wait for room. ``min_free_bytes``: what puts leave free on the file
    system; below that they raise `DiskFull`, while taking and leasing go on.
    ``log_bytes``: the log is cut back to a snapshot when it has grown by so many bytes, or has doubled if that is more.
    ``max_attempts``: how often a batch may be leased before `Batch.nack` sends it to the dead letters.
    ``retention``, ``retention_bytes``: how long, and up to how many bytes together, the records of acknowledged
    batches are kept; after that their keys raise `BatchExpired`, for thirty days or 65,536 keys.

    Raises `BadPath`, `BadArgument`, `QueueLocked`, `CorruptQueue`, `DiskFull`; then nothing was changed. After
    `QueueBroken` from any call the object refuses all others. Close it, or use it in a ``with`` statement.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        chunk_size: int = 16 << 20,
        sync: Literal["commit", "never"] = "commit",
        lock_timeout: float = 10.0,
        max_records: int | None = None,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
        log_bytes: int = 4 << 20,
        max_attempts: int = 5,
        retention: timedelta = timedelta(days=1),
        retention_bytes: int = 1 << 30,
        _files: Files | None = None,
    ) -> None:
        Guard.__init__(self, layout.check_path(path))
        self._stem = self._name = self.path
        self.chunk_size = layout.check_whole("chunk_size", chunk_size, chunk.MIN_CHUNK_SIZE, chunk.MAX_CHUNK_SIZE)
        self.max_records = bound("max_records", max_records)
        self.max_bytes = bound("max_bytes", max_bytes)
        self.min_free_bytes = layout.check_whole("min_free_bytes", min_free_bytes, 0, sys.maxsize)
        self.log_bytes = layout.check_whole("log_bytes", log_bytes, 1, journal.MOST_LOG_BYTES)
        Leasing.__init__(self, max_attempts, retention, retention_bytes)
        self.sync = layout.check_choice("sync", sync, ("commit", "never"))
        layout.check_timeout("lock_timeout", lock_timeout)
        self.largest_record = chunk.largest_record(self.chunk_size)
        self._inline_bytes = LIMITS.inline_bytes[sync]
        self._files = _files or Files()
        self._descriptors: dict[int, int] = {}  # chunk id: descriptor; of the first and the last chunk
        self._pending = bytearray()  # frames that are in the log, not yet in the last chunk's file …
        self._pending_in = chunk.NONE  # … that chunk …
        self._pending_at = 0  # … and where they begin there
        self._unsynced: set[int] = set()  # chunks with such frames in their file, but perhaps not on disk
        self._run: tuple[Chunk, Run] | None = None  # the piece of the first chunk that is being read
        self._holds: dict[int, list[Step]] = {}  # what each open session has taken, by its number; the rest follows from it:
        self._held = 0  # how many records, and `Chunk.busy`
        self._held_is_unsure = False  # because a call was interrupted: it must be counted again
        self._abandoned: deque[int] = deque()  # sessions that nobody has closed
        self._sessions = 0  # how many there were
        self._removals = 0  # counts what disturbs an iteration
        self._waiting = 0  # threads in `_wait_until`
        self._in_predicate = False
        self._released = False
        self._open(lock_timeout)

    # Opening and closing

    def _open(self, lock_timeout: float) -> None:
        for other in list(_open_queues):  # one of this process whose closing was interrupted
            if other.path == self.path and isinstance(other._refusal, QueueClosed):
                other.close()
        deadline = clock.monotonic() + lock_timeout
        for attempt in count():
            try:
                self._header, created = lock.acquire(self.path, max(0.0, deadline - clock.monotonic()))
            except PermissionError as error:
                raise BadPath(f"no permission to open the queue: {error.strerror}", path=self.path) from error
            except OSError as error:
                if isinstance(error, QewQewError):
                    raise
                raise self._full(error) or BadPath(f"cannot be opened: {error.strerror}", path=self.path) from error
            try:
                found = recovery.recover(self._files, self.path, self._header.fd, self._descriptors)
                self._state, self._log, self._taken, self._begin = found.state, found.log, found.taken, found.begin
                self._close_others()
                recovery.store_header(self._files, self._header.fd, self._state.first)
                if self._header.is_still_at(self.path):
                    break
                self._release()
            except BaseException as error:
                if self._another_is_here(error, deadline, attempt):
                    continue
                if created and self._header.is_still_at(self.path):
                    with contextlib.suppress(OSError):
                        self._files.unlink(self.path)
                self._release()
                if isinstance(error, CorruptQueue):
                    error.args = (f"{error}. `qewqew repair {self.path}` rescues what can be read",)
                if isinstance(error, OSError) and not isinstance(error, QewQewError):
                    raise self._full(error) or BadPath(
                        f"cannot be opened: {error.strerror}", path=error.filename or self.path
                    ) from error
                raise
        for note in found.notes:
            _logger.warning("%s", note)
        self._opened_at = self._log.position
        self._rotate_at = self._log.snapshot_end + self.log_bytes
        self._refusal = None
        _open_queues.add(self)

    def _another_is_here(self, error: BaseException, deadline: float, attempt: int) -> bool:
        """Whether to look again, with everything released: a Java program that has closed the queue removes files just now, or
        somebody has a chunk or the log open, though not the header that is there.
        """
        if isinstance(error, java.Vanishing):  # it has removed its last chunk, and then removes the header
            until = clock.monotonic() + VANISHING
            while (here := self._header.is_still_at(self.path)) and clock.monotonic() < until:
                clock.sleep(0.005)
            again = not here
        elif isinstance(error, FileNotFoundError):
            again = attempt < 5
        else:
            again = isinstance(error, QueueLocked) and clock.monotonic() < deadline
        if again:
            self._release()
            clock.sleep(0.005)
        return again

    def close(self) -> None:
        """Leave the files as the Java library would, and give the lock back. A second call does nothing, unless the first one was
        interrupted: then it gives back what that did not.

        An empty queue leaves no header and no chunks, and no log either unless it remembers batches or keys. Open
        sessions are rolled back. Callers that wait in other threads get `QueueClosed`.
        """
        with self._lock:
            if isinstance(self._refusal, QueueClosed):
                self._release()
                return
            if self._in_predicate:
                raise QueueClosed("the predicate of get_if must not use the queue", path=self.path)
            broken, self._refusal = self._refusal, QueueClosed("the queue is closed", path=self.path)
            try:
                self._notify()
                if broken is None:
                    self._settle()
            finally:
                self._release()

    def _settle(self) -> None:
        """Make header and chunk files agree with the log, durably, and remove what an empty queue does not need."""
        files, state = self._files, self._state
        home_directory = os.path.dirname(self.path)  # synced before the log forgets which chunks were removed
        try:
            recovery.sync_spill(files, self.path)
            batches.remove_tree(files, self.path + layout.SPILL)
            if not state.records and state.chain:
                self._clear()
            if not (state.chain or state.batches or state.put_keys or state.expired_keys):
                stamp.remove(files, self.path)  # the next log counts anew
                for home in (self.path + layout.BATCHES, self.path + layout.DEAD):
                    if files.is_directory(home) and not files.list(home):
                        files.remove_directory(home)
                if self._log.position > self._opened_at:
                    files.sync_directory(home_directory)
                files.unlink(self._log.path)
            else:
                if state.chain:
                    self._compact()
                if self._log.slow_to_open:
                    self._rotate()
                if self._log.position > self._opened_at:
                    self._store()
                    recovery.restore_header(files, self.path, state.first)
                    files.sync_directory(home_directory)
                    # If it is lost, the next opening does all this again.
                    self._log.append(logs.CHECKPOINT, java.seal(files, self.path))
                self._log.give_back()
            if not state.chain and self._header.is_still_at(self.path):
                files.unlink(self.path)
                files.sync_directory(home_directory)
        except (DiskFull, QueueFull) as error:
            _logger.warning("closed without a checkpoint, the next opening makes up for it: %s", error)
        except OSError as error:
            if isinstance(error, QewQewError):
                raise
            raise QueueBroken(f"closing failed: {error.strerror}; opening the queue again recovers it", path=self.path) from error

    def _compact(self) -> None:
        """Write chunks with gaps anew: the original knows no gaps. What open sessions held is there again.

        Ids count back from the first chunk, as in `_put_back`, but for the last: the original takes the id after that.
        """
        *others, last = self._state.chain.values()
        for one in others:
            if one.gone:
                self._replace(one, self._free_ids(1, self._state.first, chunk.predecessor)[0])
        following = chunk.successor(last.id)
        if last.gone or following in self._state.chain:
            for _ in range(chunk.MAX_ID):
                if following not in self._taken and chunk.successor(following) not in self._state.chain:
                    break
                (following,) = self._free_ids(1, following, chunk.successor)
            else:
                raise QueueFull("no two chunk ids in a row are free", path=self.path)
            self._replace(last, following)

    def _replace(self, one: Chunk, new_id: int) -> None:
        one.busy = [(span.start, span.end) for span in one.gone]
        self._flush()
        path = chunk.chunk_path(self.path, new_id)
        try:
            cut, size = self._copy(one, path, sys.maxsize, sys.maxsize)
            self._files.sync_directory(os.path.dirname(self.path))
            position = self._commit([Replace(one.id, cut, new_id, size)])
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
            if (full := self._full(error)) is None:
                raise
            raise full from error
        self._taken.add(new_id)
        self._follow(position)

    def _release(self) -> None:
        """Give everything back. It may be called again, and goes on where it was interrupted: each step is one line."""
        lock.release_each(self._descriptors)
        if hasattr(self, "_log"):
            self._log.close(unlock=True)
        if hasattr(self, "_header"):
            self._header.release()
        _open_queues.discard(self)
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_refusal", True) is None:
            warnings.warn(f"queue {self.path} was not closed", ResourceWarning, stacklevel=2)
        if not self._released:
            self._release()

    def _forked(self) -> None:
        """In a forked child: the queue stays the parent's. Descriptors are closed, which drops no lock of the parent."""
        self._refusal = QueueClosed("the queue was opened before this process was forked; open it again here", path=self.path)
        self._lock = threading.RLock()  # whoever held it does not exist here
        self._changed = threading.Condition(self._lock)
        close_each(self._descriptors)
        self._header.forked()
        self._log.forked()
        self._log.close()

    def _usable(self) -> None:
        if self._refusal is not None:
            super()._usable()
        if self._in_predicate:
            raise QueueClosed("the predicate of get_if must not use the queue", path=self.path)

    def _enter(self) -> None:
        if self._held_is_unsure:
            self._count_held()
        while self._abandoned:
            self._let_go(self._holds.get(self._abandoned[0], []))
            self._holds.pop(self._abandoned[0], None)
            self._abandoned.popleft()

    def _judge(self, error: BaseException) -> None:
        if not isinstance(error, QewQewError):
            self._held_is_unsure = True
        super()._judge(error)

    def _count_held(self) -> None:
        """What sessions hold, by what they have noted."""
        for one in self._state.chain.values():
            one.busy = [(span.start, span.end) for span in one.gone]
        self._held = 0
        for steps in self._holds.values():
            self._hold(steps)
        self._held_is_unsure = False

    # Commits

    def _commit(self, operations: Sequence[Operation], now: int | None = None, reserve: bool = False) -> int:
        """Append one commit to the log and apply it. Raises `DiskFull` (nothing changed) or `QueueBroken`."""
        now = now_ms() if now is None else now
        body = logs.commit(now, operations)
        if reserve:
            self._log.reserve(len(body))
        self._committed = True
        position = self._log.append(logs.COMMIT, body)
        for operation in operations:
            self._state.apply(operation, now)
        if self._state.emptied:
            self._forget_emptied()
        return position

    def _forget_emptied(self) -> None:
        """What is kept of the records of chunks that the commit has emptied is stale."""
        emptied = self._state.emptied
        if self._run is not None and self._run[0].id in emptied:
            self._run = None
        if self._pending_in in emptied:  # what was still to be written to its file is not needed
            self._pending.clear()
        emptied.clear()

    def _durable(self, position: int, always: bool = False) -> None:
        """Wait until the log is on disk up to ``position``. Threads that wait together share one fsync."""
        if self.sync == "commit" or always:
            try:
                self._log.sync(position, refuse=self.sync == "commit")
            except QueueBroken as error:
                with self._lock:
                    self._break(error)
                raise

    def _flush(self) -> None:
        """Write the frames that only the log has into the last chunk's file."""
        if self._pending:
            self._durable(self._log.position)  # where they go may be what an earlier commit has freed
            self._files.write(self._descriptor(self._pending_in), self._pending, self._pending_at)
            self._unsynced.add(self._pending_in)
            self._pending.clear()

    def _store(self) -> None:
        """Bring the files up to what the log says. The log is durable first: files never run ahead of it."""
        self._flush()
        self._durable(self._log.position, always=True)
        assert self._log.durable >= self._log.position
        for one, pointers in self._state.pointers():
            if one.id in self._unsynced and one.stored == pointers:  # else storing the pointers syncs it
                self._files.sync(self._descriptor(one.id))
        recovery.store_pointers(self._files, self.path, self._state)
        self._unsynced.clear()
        recovery.store_header(self._files, self._header.fd, self._state.first)

    def _rotate(self) -> None:
        """Cut the log back to a snapshot. Where there is no room for it, the old log goes on."""
        expired = self._state.prune_keys(now_ms())
        try:
            new = self._log.prepare(partial(logs.snapshot, self._state))
        except OSError as error:
            if self._full(error) is None:
                raise
            self._rotate_at = self._log.end + self.log_bytes // 4
            return
        lock.whole(new.fd)
        self._store()
        recovery.sync_spill(self._files, self.path)
        self._files.sync_directory(os.path.dirname(self.path))  # chunks that were removed must not come back unknown
        self._log.replace(new)
        self._rotate_at = self._log.snapshot_end + max(self.log_bytes, self._log.snapshot_end)
        self._remove_expired(expired)

    def _descriptor(self, chunk_id: int) -> int:
        fd = self._descriptors.get(chunk_id)
        if fd is None:
            self._close_others()
            fd = self._descriptors[chunk_id] = self._files.open(chunk.chunk_path(self.path, chunk_id))
            recovery.own_chunk(self._files, self.path, self._descriptors, chunk_id)
        return fd

    def _own_ends(self) -> None:
        """The first chunk and the last have changed: from now on these are the ones that are locked."""
        self._close_others()
        with contextlib.suppress(QueueLocked):  # who needs the chunk is told
            for one in (next(iter(self._state.chain.values()), None), self._state.last):
                if one is not None:
                    recovery.own_chunk(self._files, self.path, self._descriptors, one.id)

    def _close_others(self) -> None:
        """Only the first chunk and the last stay open."""
        last = self._state.last
        for other in self._descriptors.keys() - {self._state.first, last.id if last else chunk.NONE}:
            lock.release_each(self._descriptors, other)

    def _forget_chunk(self, chunk_id: int) -> None:
        """The file at this id is no longer a chunk of the queue."""
        if chunk_id in self._descriptors:
            lock.release_each(self._descriptors, chunk_id)
        self._unsynced.discard(chunk_id)
        self._taken.discard(chunk_id)
        if self._run is not None and self._run[0].id == chunk_id:
            self._run = None

    # Putting

    def put(self, record: Record, timeout: float | None = 0) -> None:
        """Append one record, as one commit.

        If the queue is at its bound, waits for room up to ``timeout`` seconds (None: for ever). Raises `BadRecord`,
        `RecordTooLarge`, `QueueFull`, `DiskFull`: nothing was stored.
        """
        if type(record) is not bytes or len(record) > self.largest_record:
            (record,) = chunk.checked((record,), self.chunk_size)
        with self._lock:  # this is `_exclusive`, without the generator, which costs a fifth of a put
            self._committed = False
            try:
                self._usable()
                self._enter()
                self._wait_for_room(1, len(record), timeout)
                position = self._append_one(record)
            except BaseException as error:
                self._judge(error)
                raise
        self._durable(position)

    def put_many(self, records: Iterable[Record], key: str | None = None, timeout: float | None = 0) -> int:
        """Append all records or, if anything is wrong, none; returns how many. One commit, whatever the number of chunks.

        With a ``key`` that was used before (within thirty days, and among the last 65,536), nothing is stored, and what
        the first call returned is returned again. Waits and raises as `put`; also `BadKey`.
        """
        ready = chunk.checked_all(records, self.chunk_size)
        with self._exclusive():
            position, count = self._transact(ready, None, [], key, timeout)
        self._durable(position)
        return count

    def _transact(
        self, records: list[bytes], spill: Spill | None, taken: list[Step], key: str | None, timeout: float | None
    ) -> tuple[int, int]:
        """Commit puts and takes together; returns the position in the log, and how many records were put, now or under the
        same key before.
        """
        hashed = None if key is None else key_hash(layout.check_key(key))
        spill = spill if spill and spill.chunks else None
        count, payload = len(records), sum(map(len, records))
        if spill:
            count, payload = count + spill.records, payload + spill.payload
        leaving = sum(step[3] for step in taken)
        if hashed not in self._state.put_keys:
            self._wait_for_room(count, payload, timeout, leaving, sum(end - start for _, start, end, _ in taken) - 2 * leaving)
        if hashed is not None and hashed in self._state.put_keys:
            self._let_go(taken)
            return self._log.position, self._state.put_keys[hashed][1]  # another thread may still be waiting for that commit
        operations: list[Operation] = [] if hashed is None else [PutKey(hashed, count)]
        # Takes come last: they may empty the chunk that the puts were planned for.
        operations += [Take(one.id, *span) for one, *span in taken]
        if spill:
            position = self._adopt(spill, operations)
        elif count or (hashed is not None and not taken):
            position = self._append(records, operations)
        elif taken:  # which works on a full disk, too
            position = self._take(operations)
        else:
            return 0, 0
        self._held -= leaving
        return position, count

    def session(self) -> Session:
        """A transaction: what it puts and takes happens together, when it commits, or not at all. See `Session`."""
        with self._exclusive():
            self._sessions += 1
            return Session(self, self._sessions)

    def _wait_for_room(
        self, records: int, payload: int, timeout: float | None, leaving: int = 0, leaving_payload: int = 0
    ) -> None:
        """Wait until so many records fit, in the place of others that leave with the same commit."""
        if self.max_records is None and self.max_bytes is None:
            return
        most_records, most_bytes = self.max_records or sys.maxsize, self.max_bytes or sys.maxsize
        bound = f"max_records={self.max_records}, max_bytes={self.max_bytes}"
        if records > most_records or payload > most_bytes:
            raise QueueFull(f"{records:,} records of {payload:,} bytes never fit: {bound}", path=self.path)
        deadline = layout.deadline(timeout)
        records, payload = records - leaving, payload - leaving_payload
        while (records > 0 and self._state.records + records > most_records) or (
            payload > 0 and self._state.bytes + payload > most_bytes
        ):
            if not self._wait_until(deadline):
                raise QueueFull(
                    f"{self._state.records:,} records of {self._state.bytes:,} bytes wait already ({bound}). "
                    "Nothing was stored; take or lease records, or wait for others to do so (timeout)",
                    path=self.path,
                )

    def _check_free(self, size: int) -> None:
        """Raise `DiskFull` if puts that take ``size`` more bytes of disk would leave less than ``min_free_bytes``."""
        free = self._files.free(os.path.dirname(self.path))
        if free - size < self.min_free_bytes:
            raise DiskFull(
                f"the file system has {free:,} bytes free, and min_free_bytes={self.min_free_bytes:,} are to stay free. Nothing "
                "was stored; make room, or take records",
                path=self.path,
            )

    def _append_one(self, record: bytes) -> int:
        """As `_append`, for what is put most often: a record that the log carries and the last chunk takes."""
        last, size = self._state.last, len(record) + 2
        if last is None or (at := last.tail) + size > last.size or at + size > self.chunk_size or size > self._inline_bytes:
            return self._append([record], [])
        if self.min_free_bytes:
            self._check_free(0)
        frames, now = chunk.LENGTH.pack(len(record)) + record, now_ms()
        operation = logs.pack_append(last.id, 1, frames)
        self._log.reserve(len(operation))
        self._committed = True
        position = self._log.append(logs.COMMIT, now.to_bytes(8) + operation)
        self._state.append(last.id, size, 1, zlib.crc32(frames, last.crc), now)  # as `State.apply` does
        self._pend(last.id, at, frames)
        self._notify()
        self._follow(position)
        return position

    def _append(self, records: list[bytes], operations_behind: list[Operation]) -> int:
        """Commit records, then other operations; returns the position in the log."""
        last = self._state.last
        # A file made with another chunk size keeps its own; a new chunk is begun when the frame does not fit whole.
        room = min(self.chunk_size, last.size) - last.tail if last else 0
        plan = into_last, *into_new = writing.place(records, room, self.chunk_size - chunk.BEGIN)
        if self.min_free_bytes:
            self._check_free(len(into_new) * self.chunk_size)
        inline = sum(size for runs in plan for _, size in runs) <= self._inline_bytes
        if not inline or into_new:
            self._flush()  # these frames lie before what is written now
            self._durable(self._log.position)  # where the others go may be what an earlier commit has freed
        new_ids = self._free_ids(len(into_new), last.id if last else chunk.NONE, chunk.successor)
        targets = [(last.id, last.tail, last.crc)] if last else []
        targets += [(chunk_id, chunk.BEGIN, 0) for chunk_id in new_ids]
        operations: list[Operation] = []
        made: list[int] = []
        writes: list[tuple[int, int, bytes]] = []  # chunk, offset, frames
        try:
            for (chunk_id, at, crc), runs in zip(targets, [into_last, *into_new][not last :], strict=True):
                if chunk_id in new_ids:
                    self._make_chunk(chunk_id)
                    made.append(chunk_id)
                    operations.append(NewChunk(chunk_id, self.chunk_size))
                for run, size in runs:
                    frames = chunk.frame(run)
                    if inline:
                        operations.append(Append(chunk_id, len(run), frames))
                    else:
                        crc = zlib.crc32(frames, crc)
                        operations.append(Extent(chunk_id, len(run), size, crc))
                    writes.append((chunk_id, at, frames))
                    at += size
                if writes and not inline:
                    self._write_extent(chunk_id, writes)
                    writes.clear()
            if made and self.sync == "commit":
                self._files.sync_directory(os.path.dirname(self.path))
            position = self._commit(operations + operations_behind, reserve=True)
        except OSError as error:
            full = error if isinstance(error, DiskFull) else self._full(error)
            if full is None and not isinstance(error, FileExistsError):
                raise
            for chunk_id in made:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(chunk.chunk_path(self.path, chunk_id))
                self._forget_chunk(chunk_id)
            if full is None:  # a Java program has made a file there, for a header that was removed: other ids
                self._taken.update(new_ids)
                return self._append(records, operations_behind)
            raise full from error
        for chunk_id, at, frames in writes:
            if chunk_id == targets[-1][0]:
                self._pend(chunk_id, at, frames)
            else:
                self._files.write(self._descriptor(chunk_id), frames, at)
                self._unsynced.add(chunk_id)
        if records:
            self._notify()
        if made:
            self._own_ends()
        self._follow(position)
        return position

    def _adopt(self, spill: Spill, operations_behind: list[Operation]) -> int:
        """Commit what a session has spilled, by moving its files into the chain, then other operations."""
        last = self._state.last
        ids = self._free_ids(len(spill.chunks), last.id if last else chunk.NONE, chunk.successor)
        moves = [(one.path, chunk.chunk_path(self.path, chunk_id)) for one, chunk_id in zip(spill.chunks, ids, strict=True)]
        operations: list[Operation] = []
        for one, chunk_id in zip(spill.chunks, ids, strict=True):
            operations.append(NewChunk(chunk_id, self.chunk_size))
            operations += [Extent(chunk_id, *run) for run in one.runs]
        operations += operations_behind
        moved: list[tuple[str, str]] = []
        try:
            self._log.reserve(len(operations))
            if self.sync == "commit":
                spill.sync()
            self._flush()
            for source, target in moves:
                self._files.rename(source, target)
                moved.append((source, target))
            if self.sync == "commit":
                recovery.sync_spill(self._files, self.path)
            position = self._commit(operations, now_ms())
        except OSError as error:
            full = error if isinstance(error, DiskFull) else self._full(error)
            if full is None:
                raise
            for source, target in moved:
                self._files.rename(target, source)
            raise full from error
        spill.chunks.clear()
        self._taken.update(ids)
        if self.sync != "commit":
            self._unsynced.update(ids)
        self._own_ends()
        self._notify()
        self._follow(position)
        return position

    def _follow(self, position: int) -> None:
        """What follows a commit: remove the files of chunks that it dropped, cut the log back when it has grown.

        Log first, then the header, then the files: the original loses the whole queue when a crash finds them otherwise.
        """
        if dropped := self._state.dropped:
            self._durable(position, always=True)
            recovery.store_header(self._files, self._header.fd, self._state.first)
            for chunk_id in dropped:
                self._files.unlink(chunk.chunk_path(self.path, chunk_id))
                self._forget_chunk(chunk_id)
            dropped.clear()
            self._own_ends()
        if self._log.end > self._rotate_at:
            self._rotate()
        elif self._log.spare < journal.RESERVE // 2:
            try:
                self._log.reserve(0)
            except DiskFull:  # a short log needs less room than the reserve that is left
                self._log.give_back()
                self._rotate()

    def _free_ids(self, count: int, start: int, step: Callable[[int], int]) -> list[int]:
        """Ids for ``count`` new chunks: the next ones that no file has, be it of the chain or left by somebody else."""
        ids: list[int] = []
        start = start or self._begin - 1
        for _ in range(chunk.MAX_ID):
            if len(ids) == count:
                return ids
            start = step(start)
            if start not in self._taken and start != chunk.JAVA_FIRST:
                ids.append(start)
        if len(ids) == count:
            return ids
        raise QueueFull(
            f"all chunk ids, {chunk.MAX_ID - 1:,}, are in use. Nothing was stored; take or lease records, or use a larger "
            f"chunk_size than {self.chunk_size:,}",
            path=self.path,
        )

    def _make_chunk(self, chunk_id: int) -> None:
        self._close_others()
        path = chunk.chunk_path(self.path, chunk_id)
        writing.make_chunk(self._files, path, self.chunk_size, self.sync == "commit", self._descriptors, chunk_id)
        self._taken.add(chunk_id)
        if self.sync != "commit":
            self._unsynced.add(chunk_id)

    def _write_extent(self, chunk_id: int, writes: list[tuple[int, int, bytes]]) -> None:
        """Write frames past the tail, where no reader looks before the commit."""
        fd = self._descriptor(chunk_id)
        for _, at, frames in writes:
            self._files.write(fd, frames, at)
        if self.sync == "commit":
            self._files.sync(fd)
        else:
            self._unsynced.add(chunk_id)

    def _pend(self, chunk_id: int, at: int, frames: bytes) -> None:
        """Keep frames that the log carries, until they are written to the last chunk's file together with others."""
        if not self._pending:
            self._pending_in, self._pending_at = chunk_id, at
        self._pending += frames
        if len(self._pending) > LIMITS.pending_bytes:
            self._flush()

    # Taking

    def peek(self, timeout: float | None = 0) -> bytes:
        """The first record, which stays. Waits up to ``timeout`` seconds (None: for ever), then raises `Empty`.

        Raises `CorruptQueue` if the record is not what was committed.
        """
        with self._exclusive():
            self._wait(timeout)
            return self._front()[0]

    def get(self, timeout: float | None = 0) -> bytes:
        """Take the first record. Waits as `peek`; with ``sync="commit"`` it will not be delivered again after a power cut."""
        with self._lock:  # see `put`
            self._committed = False
            try:
                self._usable()
                self._enter()
                self._wait(timeout)
                record, step = self._front()
                position = self._take_one(step)
            except BaseException as error:
                self._judge(error)
                raise
        self._durable(position)
        return record

    def get_if(self, predicate: Callable[[bytes], bool], timeout: float | None = 0) -> bytes | None:
        """Take the first record if ``predicate(record)`` is true, else leave it and return None; also None after ``timeout``.

        The queue is locked meanwhile: the predicate must not use it (`QueueClosed`). What it raises passes through, and
        the record stays.
        """
        with self._lock:
            try:
                with self._exclusive():
                    self._wait(timeout)
                    record, step = self._front()
            except Empty:
                return None
            self._in_predicate = True
            try:
                if not predicate(record):
                    return None
            finally:
                self._in_predicate = False
            with self._exclusive():
                position = self._take_one(step)
        self._durable(position)
        return record

    def get_many(self, max_records: int, max_bytes: int | None = None) -> list[bytes]:
        """Take up to ``max_records`` records of together up to ``max_bytes`` payload bytes, as one commit; maybe [].

        The first record is taken even if it alone is larger than ``max_bytes``.
        """
        with self._exclusive():
            taken, steps = self._pick(max_records, max_bytes)
            if not taken:
                return []
            position = self._take([Take(one.id, *span) for one, *span in steps])
        self._durable(position)
        return taken

    def _pick(self, max_records: int, max_bytes: int | None) -> tuple[list[bytes], list[Step]]:
        """The first records that nobody holds, and where they are."""
        layout.check_whole("max_records", max_records, 1, sys.maxsize)
        room = layout.check_whole("max_bytes", max_bytes, 1, sys.maxsize) if max_bytes is not None else sys.maxsize
        taken: list[bytes] = []
        steps: list[Step] = []
        for one, start, end in self._free():
            at, before = start, len(taken)
            while at < end and len(taken) < max_records and room > 0:
                run = self._load(one, at)
                records, used = chunk.split(run.data[at - run.start : end - run.start], max_records - len(taken))
                sizes = list(accumulate(map(len, records)))
                fit = len(records) if sizes[-1] <= room else max(bisect_right(sizes, room), int(not taken))
                if fit < len(records):
                    used, room = sizes[fit - 1] + 2 * fit if fit else 0, 0
                else:
                    room -= sizes[-1]
                taken += records[:fit]
                at += used
            if len(taken) > before:
                steps.append((one, start, at, len(taken) - before))
            if at < end:
                break
        return taken, steps

    def _free(self) -> Iterator[tuple[Chunk, int, int]]:
        """Where the records are that can be taken, in order."""
        for one in self._state.chain.values():
            region = one.free(one.head)
            while region is not None:
                yield one, *region
                region = one.free(region[1])

    def _wait(self, timeout: float | None) -> None:
        if self._state.records > self._held:
            return
        deadline = layout.deadline(timeout)
        while self._state.records == self._held:
            if not self._wait_until(deadline):
                what = f"the {self._held:,} records in it are held by sessions" if self._held else "the queue is empty"
                raise Empty(what, path=self.path)

    def _wait_until(self, deadline: float | None) -> bool:
        """Wait for a change; False when the time is over."""
        rest = None if deadline is None else deadline - clock.monotonic()
        if rest is not None and rest <= 0:
            return False
        self._waiting += 1
        try:
            self._changed.wait(LIMITS.look_again if rest is None else min(rest, LIMITS.look_again))
        finally:
            self._waiting -= 1
            self._committed = False  # others have had the lock
        self._usable()
        self._enter()
        return True

    def _front(self) -> tuple[bytes, Step]:
        """The first record that nobody holds, and where it is."""
        one = next(iter(self._state.chain.values()))
        start = one.head
        if one.busy:  # else its first record is the one
            one, start, _ = next(self._free())
        run = self._load(one, start)
        at = start - run.start
        end = chunk.record_end(run.data, at)
        return run.data[at + 2 : end], (one, start, run.start + end, 1)

    def _load(self, one: Chunk, offset: int) -> Run:
        """Verified records around ``offset`` (head <= offset < tail); keeps the last ones read."""
        after = None
        if self._run is not None and self._run[0] is one:
            run = self._run[1]
            if run.start <= offset < run.start + len(run.data):
                return run
            if offset == run.start + len(run.data):
                after = run
        if one.id == self._pending_in:
            self._flush()
        path = chunk.chunk_path(self.path, one.id)
        run = read_run(self._files, self._descriptor(one.id), path, one, one.piece_of(offset), after)
        self._run = (one, run)
        return run

    def _take_one(self, step: Step) -> int:
        """As `_take`, for what is taken most often."""
        one, start, end, records = step
        self._committed = True
        position = self._log.append(logs.COMMIT, now_ms().to_bytes(8) + logs.pack_take(one.id, start, end, records))
        self._state.take(one.id, start, end, records)  # as `State.apply` does
        if self._state.emptied:
            self._forget_emptied()
        self._removals += 1
        self._notify()
        self._follow(position)
        return position

    def _take(self, operations: Sequence[Operation]) -> int:
        """Commit that records are gone. Chunks read to the end are removed."""
        position = self._commit(operations)
        self._removals += 1
        self._notify()
        self._follow(position)
        return position

    def _hold(self, steps: list[Step]) -> None:
        """A session has these records now."""
        for one, start, end, records in steps:
            one.hold(start, end)
            self._held += records
        self._removals += 1

    def _let_go(self, steps: list[Step]) -> None:
        """A session has rolled back: the records are where they were. Empties the list."""
        held = steps.copy()
        steps.clear()
        for one, start, end, records in held:
            one.release(start, end)
            self._held -= records
            self._removals += 1
        self._notify()

    def clear(self) -> int:
        """Drop all records of the queue, but for those that sessions hold or batches have; returns how many.

        Durable when it returns. While sessions hold records it must read the others, and may raise `CorruptQueue`.
        """
        with self._exclusive():
            records = self._state.records - self._held
            if self._held:
                with self.session() as everything:
                    while everything.get_many(1 << 14, 1 << 20):
                        pass
                self._durable(self._log.position, always=True)
            elif self._state.chain:
                self._clear()
            return records

    def _clear(self) -> None:
        position = self._commit([Clear()])
        self._removals += 1
        self._notify()
        self._follow(position)
        self._durable(position, always=True)

    # Looking

    def __len__(self) -> int:
        """How many records can be taken; what sessions hold is not counted."""
        with self._exclusive():
            return self._state.records - self._held

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[bytes]:
        """The records in order, but for those that sessions hold; they stay.

        Raises RuntimeError if records are taken, held or rolled back meanwhile.
        """
        with self._exclusive():
            regions, removals = list(self._free()), self._removals
        for one, at, end in regions:
            while at < end:
                with self._exclusive():
                    if self._removals != removals:
                        raise RuntimeError("records were taken from the queue during the iteration")
                    self._flush()
                    path = chunk.chunk_path(self.path, one.id)
                    run = read_run(self._files, self._descriptor(one.id), path, one, one.piece_of(at))
                    data = run.data[at - run.start : end - run.start]
                at += len(data)
                yield from chunk.split(data)[0]

    def stats(self) -> QueueStats:
        """Counts and sizes, as `inspect` gives them."""
        with self._exclusive():
            return stats_of(self.path, self._state)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Read everything (log, chunks, batches), compare it with its checksums and counts, and change nothing.

        ``progress`` is called with the bytes of records that were read, and how many there are. It must not use the queue.
        """
        with self._exclusive():
            self._flush()
            return verify(self._files, self.path, self._state, progress)

    def recover(self) -> list[Orphan]:
        """Chunk files with records beside the queue that nothing refers to, by their ids; see `Orphan`. Changes nothing."""
        with self._exclusive():
            return orphans.find(self, self._files.list(os.path.dirname(self.path)))

    # Batches: what `Leasing` leaves to its owner

    @property
    def _leases(self) -> State:
        return self._state

    def _notify(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _occupied(self, batch: BatchState) -> int:
        return batch.bytes + 2 * batch.records

    def _manifest_of(self, batch: BatchState) -> Manifest:
        return batches.manifest_in_place(self._files, self.path, batch)

    def _lease_new(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None) -> BatchState | None:
        if self._state.records <= self._held:
            return None
        return self._commit_batch(*self._beforehand(partial(self._prepare_batch, key, max_records, max_bytes, lease_timeout)))

    def _beforehand(self, act: Callable[[], T]) -> T:
        try:
            return self._with_room(act)
        except OSError as error:
            if isinstance(error, QewQewError) or not (full := self._full(error)):
                raise
            raise full from error

    def _keep_room(self, names: int, size: int = 0) -> None:
        self._log.keep(MOVING_BYTES + names * NAME_BYTES + size)

    def _move(self, act: Callable[[], None]) -> None:
        self._with_room(act)

    def _with_room(self, act: Callable[[], T]) -> T:
        """Do it, and if the disk is full once more with the log's reserve given back."""
        try:
            return act()
        except OSError as error:
            if not (isinstance(error, DiskFull) or self._full(error)) or not self._log.give_back():
                raise
            return act()

    def _prepare_batch(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None) -> tuple[Lease, int]:
        """Make NAME.lease, which is the new batch but for the chunks that it will take whole, and the operation that takes
        them, and when. Nothing has changed yet.
        """
        self._flush()
        batch = self._new_batch(key)
        making = self.path + layout.LEASE
        parts: list[tuple[int, Cut | None]] = []
        paths: list[str] = []
        try:
            batches.remove_tree(self._files, making)
            batches.remove_tree(self._files, batches.directory_of(self.path, batch))  # a manifest, kept for people
            self._files.make_directory(making)
            batches.make_home(self._files, self.path, layout.BATCHES)
            for one in self._state.chain.values():
                if max_records <= 0 or max_bytes <= 0:
                    break
                path, cut, available = chunk.chunk_path(self.path, one.id), None, one
                if one.busy or one.records > max_records or one.bytes > max_bytes:
                    if one.free(one.head) is None:
                        continue
                    path = os.path.join(making, batches.segment_file(self.path, one.id))
                    cut, _ = self._copy(one, path, max_records, max_bytes, at_least=int(not parts), finished=True)
                    if not cut.spans:
                        self._files.unlink(path)
                        break
                    available = cut.chunk(one.id)
                elif not one.records:
                    continue
                elif one.id in self._unsynced:
                    self._files.sync(self._descriptor(one.id))
                    self._unsynced.discard(one.id)
                parts.append((one.id, cut))
                paths.append(path)
                batch.chunks.append(available)
                max_records -= available.records
                max_bytes -= available.bytes
                if cut and one.free(cut.spans[-1].end) is not None:
                    break
            batch.records = sum(one.records for one in batch.chunks)
            batch.bytes = sum(one.bytes for one in batch.chunks)
            batches.write_manifest(self._files, making, batches.manifest_of(self._files, self.path, batch, paths))
            self._files.sync_directory(os.path.dirname(self.path))
            return Lease(batch.id, key, batch.records, batch.bytes, parts, lease_timeout), batch.created
        except (OSError, CorruptQueue) as error:
            batches.remove_tree(self._files, making)
            if isinstance(error, QewQewError):
                raise
            raise self._full(error) or self._break(error) from error

    def _commit_batch(self, lease: Lease, now: int) -> BatchState:
        whole = [chunk_id for chunk_id, cut in lease.parts if cut is None]
        try:
            self._keep_room(len(whole) + 1, len(logs.pack(lease)))
            position = self._commit([lease], now)
        except DiskFull:
            batches.remove_tree(self._files, self.path + layout.LEASE)
            raise
        self._durable(position, always=True)
        stamp.write(self._files, self.path, self._state.changes)
        self._removals += 1
        for chunk_id in whole:
            self._forget_chunk(chunk_id)
        self._run = None
        recovery.store_header(self._files, self._header.fd, self._state.first)
        state = self._state.batches[lease.id]
        self._move(partial(batches.settle_lease, self._files, self.path, state))
        self._own_ends()
        self._notify()
        self._follow(position)  # the copy may have emptied its chunk; the log may be cut back only now that all is moved
        return state

    def _copy(
        self, one: Chunk, path: str, max_records: int, max_bytes: int, at_least: int = 0, finished: bool = False
    ) -> tuple[Cut, int]:
        """Copy the first records of a chunk that nobody holds, as many as fit, into a new chunk file, durably.

        Returns what was copied, and the size of the file. Its pointers say so if it is ``finished``, else that it is empty.
        """
        copy, spans = Chunk(one.id, 0), []
        fd = self._files.open(path, new=True)
        try:
            if not finished:  # first: recovery removes an empty chunk, but not records without pointers
                self._files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN, chunk.NONE), 0)
                self._files.sync(fd)
            region = one.free(one.head)
            while region is not None:
                (start, end), before = region, copy.total
                at = start
                while at < end:
                    index = one.piece_of(at)
                    run = read_run(self._files, self._descriptor(one.id), chunk.chunk_path(self.path, one.id), one, index)
                    data = run.data[at - run.start : end - run.start]
                    records, used = chunk.split(data, max_records - copy.total)
                    sizes = list(accumulate(map(len, records)))
                    fit = max(bisect_right(sizes, max_bytes - copy.bytes), min(at_least - copy.total, len(records)))
                    if fit < len(records):
                        used = sizes[fit - 1] + 2 * fit if fit else 0
                    if fit:
                        self._files.write(fd, data[:used], copy.tail)
                        copy.append(used, fit, zlib.crc32(data[:used], copy.crc), one.pieces[index].time)
                    at += used
                    if used < len(data):
                        break
                if copy.total > before:
                    spans.append(Span(start, at, copy.total - before))
                region = one.free(end) if at == end else None
            if finished:
                self._files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, copy.tail, chunk.NONE), 0)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        return Cut(spans, copy.crc, copy.pieces), copy.tail

    def _change(self, operation: Rare) -> None:
        self._durable(self._commit([operation]), always=True)
        stamp.write(self._files, self.path, self._state.changes)

    def _take_back(self, state: BatchState) -> None:
        # Counted back from the first chunk: the original takes the id after the last one for its next chunk, and does
        # not look whether it is free.
        ids = self._free_ids(len(state.chunks), self._state.first, chunk.predecessor)[::-1]
        files = [batches.segment_file(self.path, one.id) for one in state.chunks]
        # Files that bore these ids must be gone for good: after a power cut they would be taken for those that come.
        self._files.sync_directory(os.path.dirname(self.path))
        self._keep_room(len(ids))
        self._change(PutBack(state.id, ids, files))
        self._taken.update(ids)
        self._removals += 1
        self._run = None
        moves = list(zip(files, ids, strict=True))
        self._move(partial(batches.settle_put_back, self._files, self.path, state.id, moves))
        self._own_ends()
        self._notify()
        self._follow(self._log.position)


def _after_fork() -> None:
    for queue in list(_open_queues):
        queue._forked()
    _open_queues.clear()


os.register_at_fork(after_in_child=_after_fork)
