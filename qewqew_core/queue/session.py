"""`Session`: a transaction on a queue. The idea is that of Rhino.Queues' disk storage, by Oren Eini.

What a session takes stays where it is, *held*: nobody else sees it, and a rollback only lets go of it. What it puts is in
memory and, past a bound, in files that the commit moves into the queue. The commit itself is one frame of the transaction
log, like every other change (`log`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from qewqew_core.batch import places
from qewqew_core.disk.engine import Engine, Transaction
from qewqew_core.disk.opening import refusing
from qewqew_core.errors import Closed
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk import Record
from qewqew_core.limits import LIMITS
from qewqew_core.queue import paths
from qewqew_core.queue.chain import Chain
from qewqew_core.queue.holds import Holds
from qewqew_core.queue.records import Records
from qewqew_core.queue.state import State, Step
from qewqew_core.queue.writing import Spill

OBJECT_BYTES = 48  # that a record takes in memory beside its own


class Session(Transaction):
    """Puts and gets that happen together, or not at all; from `Queue.session`.

    In a ``with`` statement it commits at the end of the block, and rolls back if the block raises. Otherwise call `commit`
    and finally `close`. It may commit several times: each commit is a transaction of its own.

    Nobody else sees the records that it has taken. After a rollback they are in their places again. The records that it has
    put become visible, to the session too, when it commits. Several sessions of a queue may be open, one for each thread; do
    not use one session in two threads at once. Whatever is not committed is rolled back when the queue is closed or the
    process dies.
    """

    def __init__(self, queue: object, engine: Engine[State], chain: Chain, holds: Holds, records: Records) -> None:
        self._queue = queue  # which stays open as long as the session is there
        self._engine = engine
        self._chain = chain
        self._holds = holds
        self._records = records
        self._number, self._taken = holds.open()
        self._puts: list[bytes] = []
        self._put_bytes = 0
        self._spill: Spill | None = None
        self._closed = False

    def put(self, record: Record) -> None:
        """Add one record to the next commit. Raises `BadRecord`, `RecordTooLarge`, `DiskFull`: it was not added."""
        self._add(chunk.checked((record,), self._chain.chunk_size))

    def put_many(self, records: Iterable[Record]) -> int:
        """Add all records, or none if it raises; returns how many. Raises as `put`."""
        return self._add(chunk.checked_all(records, self._chain.chunk_size))

    def _add(self, records: list[bytes]) -> int:
        size = sum(map(len, records)) + OBJECT_BYTES * len(records)
        with self._engine.exclusive():
            self._check_open()
            if self._put_bytes + size > LIMITS.spill_bytes and self._puts:
                self._spill_puts()
            self._puts += records
            self._put_bytes += size
        return len(records)

    def _spill_puts(self) -> None:
        chain = self._chain
        chain.check_place()
        with refusing(chain.path, "queue"):
            if self._spill is None:
                home = places.make_home(chain.files, chain.path, paths.SPILL)
                self._spill = Spill(chain.files, home, f"{self._number}.", chain.chunk_size, chain.check_free)
            self._spill.add(self._puts)
        self._puts = []
        self._put_bytes = 0

    def get(self, timeout: float | None = 0) -> bytes:
        """Take the first record that nobody holds. Waits up to ``timeout`` seconds (None: forever), then raises `Empty`.

        The record is gone for good when the session commits. Raises `Corrupt` if it is not what was committed.
        """
        with self._engine.exclusive():
            self._check_open()
            record, step = self._records.first(timeout)
            self._hold([step])
        return record

    def get_many(self, max_records: int, max_bytes: int | None = None) -> list[bytes]:
        """Take up to ``max_records`` records with up to ``max_bytes`` of payload in all, at least one; [] if there are none."""
        with self._engine.exclusive():
            self._check_open()
            records, steps = self._records.pick(max_records, max_bytes)
            self._hold(steps)
        return records

    def _hold(self, steps: list[Step]) -> None:
        # Noted first: if this is interrupted, the session holds what it has noted.
        for chunk_state, start, end, records in steps:
            before = self._taken[-1] if self._taken else None
            if before is not None and before[0] is chunk_state and before[2] == start:
                self._taken[-1] = (chunk_state, before[1], end, before[3] + records)
            else:
                self._taken.append((chunk_state, start, end, records))
        self._holds.hold(steps)

    def commit(self, key: str | None = None, timeout: float | None = 0) -> int:
        """Make all puts and gets since the last commit happen, as one; returns how many records were put.

        Durable when it returns, as `Queue.put_many` is. If the ``key`` was committed before (within thirty days, and among the
        last 65,536), nothing happens: the session is rolled back, and the number that the first commit returned is returned
        again. If the queue is at its bound, this waits for room up to ``timeout`` seconds (None: forever).

        Raises `Full`, `DiskFull`, `BadKey`: nothing has happened, and the session may commit again or roll back.
        """
        with self._engine.exclusive():
            self._check_open()
            if self._spill is not None and self._spill.chunks and self._puts:
                self._spill_puts()
            position, count = self._records.transact(self._puts, self._spill, self._taken, key, timeout)
            self._forget()
        self._engine.durable(position)
        return count

    def rollback(self) -> None:
        """Undo all puts and gets since the last commit: records that were taken are in their places again, in order."""
        with self._engine.exclusive():
            self._check_open()
            self._holds.release(self._taken)
            self._engine.notify()
            self._forget()

    def _forget(self) -> None:
        self._taken.clear()
        self._puts, self._put_bytes = [], 0
        if self._spill is not None:
            self._spill.remove()

    def close(self) -> None:
        """Roll back what is not committed. Does nothing if the session or the queue is closed already."""
        if not self._closed and self._engine.is_open:
            self.rollback()
        self._holds.close(self._number)
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the session is closed; open another one with Queue.session()", path=self._engine.path)

    def __del__(self) -> None:
        if not self._closed and self._engine.is_open:
            self._holds.abandon(self._number)
            if self._taken or self._puts or self._spill:
                warnings.warn(f"a session of queue {self._engine.path} was not closed", ResourceWarning, stacklevel=2)
