"""`Queue`: a durable FIFO of records in chunk files, with one owner at a time.

What happens to a put: its frames become one commit in the transaction log (large ones are first written to
the chunk files, past the tail, where no reader looks); with ``sync="commit"`` the call returns when that is on
disk. Frames that the log carries go into the chunk file later, many at once; until then the log has them.
Everything else (pointers, header, removed files) follows the log and is redone from it after a crash (`recovery`).

The order that is kept everywhere: payload, then the commit, both durable, then the files that follow it.

`Engine` has the commits, `Chain` the chunk files, `Records` the puts and takes, `Leases` the batches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time as clock
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Literal

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.batch.leases import HasBatches, Leases
from qewqew_core.batch.reports import Report
from qewqew_core.batch.stats import QueueStats
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Closes
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.files import Files, files_of
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import Reserve, with_room
from qewqew_core.errors import Closed, Corrupt, Empty, Locked
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk import Record
from qewqew_core.keys import KeyStatus, key_hash
from qewqew_core.limits import LIMITS
from qewqew_core.queue import chunk_files, group_commit, java, orphans, paths, recovery, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.chain import Chain
from qewqew_core.queue.holds import Holds
from qewqew_core.queue.inspection import stats_of
from qewqew_core.queue.orphans import Orphan
from qewqew_core.queue.queue_batches import QueueBatches
from qewqew_core.queue.records import Records
from qewqew_core.queue.recovery import Recovered
from qewqew_core.queue.session import Session
from qewqew_core.queue.state import State
from qewqew_core.queue.verification import verify
from qewqew_core.queue.writing import Spill

VANISHING = 0.2  # seconds to wait for a Java program that is closing the queue

_logger = logging.getLogger(__name__)
_open_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


class Queue(HasBatches, Closes):
    """A queue at ``path``, opened for exclusive use; created if missing. Threads may share it. It cannot be copied or pickled.

    ``chunk_size``: bytes of a new chunk file, 12 to 2**31 - 1, allocated on disk; the first ones are smaller, from 256 KiB on.
    A record has at most ``chunk_size - 12`` and 65,535 bytes. ``sync``: with "commit" (default), a call that changes the queue
    survives a power cut once it has returned; with "never" it survives the death of the process, and a power cut only after the
    next `close`, `lease` or end of a batch. ``lock_timeout``: seconds to wait for another owner. ``max_records``,
    ``max_bytes``: how many records, and bytes of them, may wait in the queue, batches not counted; a put beyond that waits for
    room or raises `Full`. ``min_free_bytes``: free space that puts leave on the file system; below it they raise `DiskFull`,
    but you can still take and lease. ``log_bytes``: when the log has grown by this much, or has doubled if that is more, a
    snapshot replaces it. ``max_attempts``: how often a batch may be leased before `Batch.nack` makes it a dead letter.
    ``retry_delay``: seconds until a batch that failed may be leased under another key, doubled each time up to an hour.
    ``retention``, ``retention_bytes``: how long, and up to how many bytes in total, the records of acknowledged batches are
    kept. After that their keys raise `BatchExpired`, for thirty days or 65,536 keys. ``group``: the Unix group, by name or
    number, whose members share the queue; each of them names it. Else the queue is for this user alone.

    Raises `BadPath`, `BadArgument`, `Locked`, `Corrupt`, `DiskFull`; then nothing was changed. Also `Broken`, if the disk fails.
    After `Broken` from any call the object refuses all others. Close it, or use it in a ``with`` statement.
    """

    _released = True  # whether no lock and no descriptor is left to be released

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
        retry_delay: float = 0.0,
        retention: timedelta = timedelta(days=1),
        retention_bytes: int = 1 << 30,
        group: str | None = None,
        _files: Files | None = None,
        _until: float | None = None,
        _unless: Callable[[], bool] | None = None,
    ) -> None:
        members = None if group is None else arguments.check_group(group)
        self.path = paths.check_path(path)
        self.chunk_size = arguments.check_whole("chunk_size", chunk_size, chunk.MIN_CHUNK_SIZE, chunk.MAX_CHUNK_SIZE)
        self.min_free_bytes = arguments.check_whole("min_free_bytes", min_free_bytes, 0, sys.maxsize)
        self.log_bytes = arguments.check_whole("log_bytes", log_bytes, 1, journal.MOST_LOG_BYTES)
        self.sync = arguments.check_choice("sync", sync, ("commit", "never"))
        arguments.check_timeout("lock_timeout", lock_timeout)
        self._files = files_of(_files, os.path.dirname(self.path), self.path, self.path + paths.LOG, group=members)
        self._holds = Holds()
        self._engine: Engine[State] = Engine(
            self.path, "queue", logs, sync=sync == "commit", log_bytes=self.log_bytes, gate=self._holds, locks_log=True
        )
        self._chain = Chain(self._files, self.path, self._engine, self.chunk_size, self.min_free_bytes)
        self._records = Records(self._engine, self._chain, self._holds, max_records, max_bytes)
        source = QueueBatches(self._engine, self._chain, self._holds)
        self._leases = Leases(source, max_attempts, retry_delay, retention, retention_bytes)
        self.max_records, self.max_bytes, self.largest_record = max_records, max_bytes, self._records.largest
        self._released = False
        self._open(lock_timeout, clock.monotonic() + lock_timeout if _until is None else _until, _unless)

    # Opening and closing

    def _open(self, lock_timeout: float, deadline: float, unless: Callable[[], bool] | None) -> None:
        for other in list(_open_queues):  # one of this process whose closing was interrupted
            if other.path == self.path and other._engine.is_closed:
                other.close()
        with opening(self.path, "queue"):
            found = self._recovered(lock_timeout, deadline, unless)
        for note in found.notes:
            _logger.warning("%s", note)
        self._opened_at, self._changes_at_opening = self._engine.log.position, self._engine.state.changes
        self._chain.expect_changes()
        self._engine.open()
        _open_queues.add(self)

    def _recovered(self, lock_timeout: float, deadline: float, unless: Callable[[], bool] | None) -> Recovered:
        """Lock the queue, and recover it."""
        for attempt in count():
            acquire = partial(lock.acquire, self._files, self.path, lock_timeout, until=deadline, unless=unless)
            with self._files.entering():
                self._files.enter()
                self._files.check_writable(os.path.dirname(self.path))
                header, created = with_room(Reserve(self._files, self.path + paths.LOG), acquire)  # an empty queue has no header
            self._chain.header = header
            try:
                with self._files.entered():
                    found = recovery.recover(self._files, self.path, header.fd, self._chain.descriptors)
                self._engine.attach(found.log, found.state, self._files.boot())
                self._chain.taken, self._chain.begin, self._chain.unsynced = found.taken, found.begin, found.unsynced
                self._is_handed_over = found.handed_over
                self._chain.close_others()
                self._engine.with_room(self._chain.store_header)
                if header.is_still_at(self.path) and self._files.is_at(found.log.fd, found.log.path):
                    return found  # else a Java program had removed the header, and another process has made the queue again
                self._release()
            except BaseException as error:
                if self._another_is_here(error, deadline, attempt):
                    continue
                if created and header.is_still_at(self.path):
                    with contextlib.suppress(OSError):
                        self._files.unlink(self.path)
                self._release()
                if isinstance(error, Corrupt):
                    said = f"{error.what}. `qewqew repair {self.path}` rescues what can be read"
                    raise Corrupt(said, path=error.path, offset=error.offset) from error
                raise
        raise AssertionError

    def _another_is_here(self, error: BaseException, deadline: float, attempt: int) -> bool:
        """Whether to look again, with everything released: a Java program that has closed the queue removes files just now, or
        somebody has a chunk or the log open, though not the header that is there.
        """
        if isinstance(error, java.Vanishing):  # it has removed its last chunk, and then removes the header
            until = clock.monotonic() + VANISHING
            while (here := self._chain.header.is_still_at(self.path)) and clock.monotonic() < until:
                clock.sleep(0.005)
            again = not here
        elif isinstance(error, (FileNotFoundError, FileExistsError)):  # or two of ours make its log, one of them beside it
            again = attempt < 5
        else:
            again = isinstance(error, Locked) and clock.monotonic() < deadline
        if again:
            self._release()
            clock.sleep(0.005)
        return again

    def close(self) -> None:
        """Leave the files as the Java library would, and give the lock back. A second call does nothing, or finishes a first one
        that was interrupted.

        A queue that is empty, or has all its records in batches, leaves neither header nor chunks, and no log either unless it
        remembers batches or keys. Open sessions are rolled back. Callers that wait in other threads get `Closed`.
        """
        with self._engine.lock:
            if self._holds.is_asked:
                raise Closed("the predicate of get_if must not use the queue", path=self.path)
            with self._files.entered():
                self._engine.close(self._checkpoint, self._release)

    def _checkpoint(self) -> None:
        """Make header and chunk files agree with the log, durably, and remove what an empty queue does not need."""
        files, state, log, chain = self._files, self._engine.state, self._engine.log, self._chain
        chain.check_place()
        if not self._engine.sync:  # else each commit that moved some has done it
            chunk_files.sync_moved(files, self.path)
        places.remove_ours(files, self.path + paths.SPILL)
        if self._is_to_hand_over():
            chain.hand_over()
            return
        if not state.records and state.chain:
            self._records.clear()
        if not (state.chain or state.batches or state.history or state.idempotency_keys or state.expired_keys):
            stamp.remove(files, self.path)
            for home in (self.path + places.BATCHES, self.path + places.DEAD):
                if files.is_directory(home) and not files.list(home):
                    files.remove_directory(home)
            Reserve(files, log.path).release()
            chain.sync_names()  # the log goes last: it knows which chunks were removed, and the stamp says that it is there
            files.unlink(log.path)
        else:
            if state.chain:
                chain.compact()
            if log.slow_to_open:
                chain.rotate()
            if log.position > self._opened_at or self._is_handed_over:
                chain.store()
                chunk_files.restore_header(files, self.path, state.first)
                chain.sync_names()
                # If it is lost, the next opening does all this again.
                log.append(logs.CHECKPOINT, java.checkpoint_identity(files, self.path))
            log.release_spare()
        if not state.chain and chain.header.is_still_at(self.path):
            files.unlink(self.path)
            chain.sync_names()

    def _is_to_hand_over(self) -> bool:
        """Whether closing leaves what it costs to another process of ours, which waits for the queue."""
        engine, chain = self._engine, self._chain
        state, log = engine.state, engine.log
        return (
            engine.sync
            and state.records > 0
            and state.changes == self._changes_at_opening
            and not any(each.consumed for each in state.chain.values())  # a Java program knows no gaps
            and log.end - log.snapshot_end < LIMITS.log_bytes_at_handover
            and log.frames < LIMITS.log_frames_at_handover
            and chain.header.is_still_at(self.path)
            and (lock.is_awaited(chain.header.fd) or group_commit.is_asked(self._files, self.path))
        )

    def _release(self) -> None:
        """Release everything. It may be called again, and goes on where it was interrupted: each step is one line."""
        self._chain.release()
        self._engine.release()
        if hasattr(self._chain, "header"):
            self._chain.header.release()
        self._files.leave()
        _open_queues.discard(self)
        self._released = True

    def __del__(self) -> None:
        if self._released:
            return
        if self._engine.is_open:
            warnings.warn(f"queue {self.path} was not closed", ResourceWarning, stacklevel=2)
        self._release()

    def _forked(self) -> None:
        """In a forked child: the queue stays the parent's. Descriptors are closed, which drops no lock of the parent."""
        self._engine.forked()
        self._chain.forked()

    # Putting

    def put(self, record: Record, timeout: float | None = 0) -> None:
        """Append one record, as one commit.

        If the queue is at its bound, waits for room up to ``timeout`` seconds (None: forever). Raises `BadRecord`,
        `RecordTooLarge`, `Full`, `DiskFull`: nothing was stored.
        """
        if type(record) is not bytes or len(record) > self.largest_record:
            (record,) = chunk.checked((record,), self.chunk_size)
        position = self._engine.run(self._records.put_one, record, timeout)
        if self._engine.sync:
            self._engine.durable(position)

    def put_many(self, records: Iterable[Record], key: str | None = None, timeout: float | None = 0) -> int:
        """Append all records or, if anything is wrong, none; returns how many. This is one commit, however many chunks it takes.

        If the ``key`` was used before (within thirty days, and among the last 65,536), nothing is stored, and the number that
        the first call returned is returned again. Waits and raises as `put`; also `BadKey`.
        """
        ready = chunk.checked_all(records, self.chunk_size)
        with self._engine.exclusive():
            position, count = self._records.transact(ready, None, [], key, timeout)
        self._engine.durable(position)
        return count

    def put_group(self, records: list[bytes], key: str | None = None, timeout: float | None = 0) -> tuple[int, int]:
        """As `put_many`, of records that were checked, with those that other stages wait to put (`group_commit`).

        Returns how many were put, now or under the same key before, and how many of them now.
        """
        with self._engine.exclusive():
            position, count, stored = self._records.put_group(records, key, timeout)
        self._engine.durable(position)
        return count, stored

    def serve(self) -> int:
        """Put what stages wait to put, unless somebody waits for the queue itself; returns for how many stages. Durable when it
        returns.
        """
        if lock.is_awaited(self._chain.header.fd):
            return 0
        with self._engine.exclusive():
            position, served = self._records.serve()
        self._engine.durable(position)
        return served

    def put_staged(self, spill: Spill, key: str | None = None, timeout: float | None = 0) -> int:
        """As `put_many`, for records in chunk files that a `Stage` wrote. The files become the queue's."""
        with self._engine.exclusive():
            position, count = self._records.transact([], spill, [], key, timeout)
        self._engine.durable(position)
        return count

    def session(self) -> Session:
        """A transaction: what it puts and takes happens together when it commits, or not at all. See `Session`."""
        with self._engine.exclusive():
            return Session(self, self._engine, self._chain, self._holds, self._records)

    # Taking

    def peek(self, timeout: float | None = 0) -> bytes:
        """The first record, which stays. Waits up to ``timeout`` seconds (None: forever), then raises `Empty`.

        Raises `Corrupt` if the record is not what was committed.
        """
        with self._engine.exclusive():
            return self._records.first(timeout)[0]

    def get(self, timeout: float | None = 0) -> bytes:
        """Take the first record. Waits as `peek`. With ``sync="commit"`` it does not come again after a power cut."""
        record, position = self._engine.run(self._records.get_one, timeout)
        if self._engine.sync:
            self._engine.durable(position)
        return record

    def get_if(self, predicate: Callable[[bytes], bool], timeout: float | None = 0) -> bytes | None:
        """Take the first record if ``predicate(record)`` is true; otherwise leave it and return None. Also None after
        ``timeout``.

        The queue is locked during the call, so the predicate must not use it (`Closed`). If the predicate raises, the record
        stays.
        """
        with self._engine.lock:
            try:
                with self._engine.exclusive():
                    record, step = self._records.first(timeout)
            except Empty:
                return None
            if not self._holds.ask(predicate, record):
                return None
            with self._engine.exclusive():
                position = self._records.take_one(step)
        self._engine.durable(position)
        return record

    def get_many(self, max_records: int, max_bytes: int | None = None) -> list[bytes]:
        """Take up to ``max_records`` records with up to ``max_bytes`` of payload in all, as one commit; [] if there are none.

        The first record is taken even if it alone is larger than ``max_bytes``.
        """
        with self._engine.exclusive():
            records, steps = self._records.pick(max_records, max_bytes)
            if not records:
                return []
            position = self._records.take(steps)
        self._engine.durable(position)
        return records

    def clear(self) -> int:
        """Drop all records of the queue, except those that sessions hold or batches have; returns how many.

        Durable when it returns. While sessions hold records it must read the others, so it may raise `Corrupt`.
        """
        with self._engine.exclusive():
            records = len(self._records)
            if self._holds.records:
                with self.session() as everything:
                    while everything.get_many(1 << 14, 1 << 20):
                        pass
                self._chain.durable(self._engine.log.position)
            elif self._engine.state.chain:
                self._records.clear()
            return records

    # Looking

    def __len__(self) -> int:
        """How many records can be taken. Records that sessions hold are not counted."""
        with self._engine.exclusive():
            return len(self._records)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[bytes]:
        """The records in order, except those that sessions hold. They stay in the queue.

        Raises RuntimeError if records are taken, held or rolled back meanwhile.
        """
        with self._engine.exclusive():
            regions, before = list(self._chain.free()), self._holds.disturbed
        for chunk_state, at, end in regions:
            while at < end:
                with self._engine.exclusive():
                    if self._holds.disturbed != before:
                        raise RuntimeError("records were taken from the queue during the iteration")
                    self._chain.flush()
                    piece = self._chain.read(chunk_state, chunk_state.piece_of(at))
                    data = piece.data[at - piece.start : end - piece.start]
                at += len(data)
                yield from chunk.split(data)[0]

    def key_status(self, key: str) -> KeyStatus:
        """Whether a commit under this key is stored: "stored", "not stored" or "not yet". See `Stage.key_status`."""
        hashed = key_hash(arguments.check_key(key))
        with self._engine.exclusive():
            position, is_stored = self._engine.log.position, hashed in self._engine.state.idempotency_keys
            is_asked = hashed in group_commit.keys_asked(self._files, self.path)
        if is_stored:
            self._engine.durable(position)
            return "stored"
        return "not yet" if is_asked else "not stored"

    def stats(self) -> QueueStats:
        """Counts and sizes, as from `inspect`."""
        with self._engine.exclusive():
            return stats_of(self._files, self.path, self._engine.state)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Read everything (log, chunks, batches), compare it with its checksums and counts, and change nothing.

        ``progress`` is called with the bytes of records read so far, and with how many there are. It must not use the queue.
        """
        with self._engine.exclusive():
            self._chain.flush()
            return verify(self._files, self.path, self._engine.state, progress)

    def orphans(self) -> list[Orphan]:
        """Chunk files with records that nothing refers to, by id; see `Orphan`. Changes nothing."""
        with self._engine.exclusive():
            return orphans.find(self._files, self.path, self._engine.state)

    def adopt(self, orphan: Orphan) -> int:
        """Append the records of an orphan to the end of the queue, as one commit, and remove its file; returns how many.

        Durable when it returns. If it is interrupted, `orphans` may offer the file again, but adopting it again stores nothing
        twice: the commit has a key made of the file's identity. A file with a ``problem`` is set aside instead of removed.
        Raises what iterating over the orphan raises, and what `put_many` raises; then nothing was stored.
        """
        with self._engine.exclusive():
            self._chain.check_place()
            stored = self.put_many(orphan, key=orphan.key())
            self._chain.durable(self._engine.log.position)
            if orphan.problem:
                self.set_aside(orphan)
            else:
                self._files.unlink(orphan.path)
                self._chain.sync_names()
                self._chain.forget(orphan.id)
            return stored

    def set_aside(self, orphan: Orphan) -> str:
        """Move the file of an orphan into a directory of NAME.damaged; returns its new path. Durable when it returns.

        Raises `BadPath` if the file is gone.
        """
        with self._engine.exclusive():
            self._chain.check_place()
            target = orphans.set_aside(self._files, self.path, orphan)
            self._chain.forget(orphan.id)
            return target


def _after_fork() -> None:
    for queue in list(_open_queues):
        queue._forked()
    _open_queues.clear()


os.register_at_fork(after_in_child=_after_fork)
