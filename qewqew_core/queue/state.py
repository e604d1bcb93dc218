"""What a queue is at one moment: its chain of chunks, its batches, its keys. No files, no bytes.

A running queue and the replay of its log change it by the same `State.apply`, so a crash leaves the state that was there. The
caller has checked that the change is possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.crc import crc32
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk, Cut
from qewqew_core.keys import prune
from qewqew_core.queue.operations import (
    Append,
    Believe,
    Clear,
    Extent,
    JsonOperation,
    Lease,
    NewChunk,
    Operation,
    PutBack,
    PutKey,
    Repair,
    Replace,
    Served,
    Take,
)

_Bytes = bytes  # the state has a field of that name
Step = tuple[Chunk, int, int, int]  # records that are taken together: chunk, start, end, how many


@dataclass(slots=True, eq=False)
class State(LeaseState):
    """The whole of a queue."""

    chain: dict[int, Chunk] = field(default_factory=dict)  # first to last, in insertion order
    idempotency_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (elapsed time, records put under it)
    records: int = 0  # in the chain
    bytes: int = 0  # payload in the chain
    changes: int = 0  # how often batches, or the chain as a whole, have changed: see `stamp`
    served: set[_Bytes] = field(default_factory=set)  # requests whose files may still be there; no snapshot has them
    dropped: list[int] = field(default_factory=list)  # chunks that left the chain: their files are to be removed
    emptied: list[int] = field(default_factory=list)  # chunks whose content so far is stale: dropped, or started over

    @classmethod
    def of(cls, chain: dict[int, Chunk]) -> State:
        """Nothing but these chunks."""
        chunks = chain.values()
        return cls(
            chain=chain,
            records=sum(chunk_state.records for chunk_state in chunks),
            bytes=sum(chunk_state.bytes for chunk_state in chunks),
        )

    def with_batches_of(self, other: State) -> State:
        """The same chunks, with the batches, keys and served requests of another state."""
        self.batches, self.history, self.last_lease = other.batches, other.history, other.last_lease
        self.idempotency_keys, self.expired_keys = other.idempotency_keys, other.expired_keys
        self.changes, self.clock, self.served = other.changes, other.clock, other.served
        return self

    @property
    def first(self) -> int:
        return next(iter(self.chain), chunk.NONE)

    @property
    def last(self) -> Chunk | None:
        return next(reversed(self.chain.values()), None)

    def pointers(self) -> list[tuple[Chunk, tuple[int, int, int]]]:
        """Each chunk of the chain with what its file must say: head, tail, next."""
        chunks = list(self.chain.values())
        nexts = [following.id for following in chunks[1:]] + [chunk.NONE]
        return [
            (chunk_state, (chunk_state.head, chunk_state.tail, following))
            for chunk_state, following in zip(chunks, nexts[: len(chunks)], strict=True)
        ]

    def apply(self, operation: Operation, time: int) -> None:
        """Apply an operation of a commit of that time. Raises ValueError, KeyError or IndexError if it is impossible."""
        match operation:
            case Append():  # taken apart like this, it takes half the time
                chunk_id, records, frames = operation
                self.append(chunk_id, len(frames), records, crc32(frames, self.chain[chunk_id].crc), time)
            case Extent(chunk_id, runs, _):
                for records, size, crc in runs:
                    self.append(chunk_id, size, records, crc, time)
            case Take():
                self.take(*operation)
            case NewChunk():
                self.new_chunk(*operation)
            case PutKey(key, records):
                self.idempotency_keys[key] = (self.clock.at(time), records)
            case Served(requests):
                self.served.update(requests)
            case Lease(batch_id, key, records, size, parts, lease_timeout, retry_delay):
                elapsed = self.clock.at(time)
                batch = BatchState(batch_id, [key], "leased", 1, records, size, time, time, "", lease_timeout, elapsed, elapsed)
                batch.retry_delay = retry_delay
                self.lease(batch, parts)
            case PutBack(batch_id, chunks):
                self.put_back(batch_id, chunks)
            case Replace():
                self.replace(*operation)
            case Clear():
                self.clear()
            case Believe() | Repair():
                pass  # they tell of files
            case _:
                self.apply_to_batch(operation, time)
        if isinstance(operation, JsonOperation):
            self.changes += 1

    def check(self) -> None:
        """Assert the invariants between any two commits. For tests: it looks at everything."""
        for chunk_id, chunk_state in self.chain.items():
            assert chunk_id == chunk_state.id, chunk_state
            chunk_state.check()
            assert chunk_state.head < chunk_state.tail or len(self.chain) == 1, f"a chunk of several is empty: {chunk_state}"
        assert self.records == sum(chunk_state.records for chunk_state in self.chain.values())
        assert self.bytes == sum(chunk_state.bytes for chunk_state in self.chain.values())
        for batch in self.batches.values():
            for chunk_state in batch.chunks:
                chunk_state.check()
            assert batch.state != "acked", batch
            assert batch.records == sum(chunk_state.records for chunk_state in batch.chunks), batch
            assert batch.bytes == sum(chunk_state.bytes for chunk_state in batch.chunks), batch
        acked = list(self.history)
        assert len(acked) == len(self.history)
        assert not self.batches.keys() & {batch.id for batch in acked}
        assert self.history.records == sum(batch.records for batch in acked)
        assert self.history.size == sum(batch.bytes for batch in acked)

    # Changes of the chain

    def new_chunk(self, chunk_id: int, size: int) -> None:
        """A new last chunk. An empty one before it goes: the chain never begins with an empty chunk that has a next."""
        last = self.last
        self.chain[chunk_id] = Chunk(chunk_id, size, stored=(chunk.BEGIN, chunk.BEGIN, chunk.NONE))
        if last is not None and last.head == last.tail:
            self._drop(last)

    def append(self, chunk_id: int, size: int, records: int, crc: int, time: int) -> None:
        chunk_state = self.chain[chunk_id]
        chunk_state.append(size, records, crc, time, self.clock)
        assert chunk_state.tail <= chunk_state.size, "records end at the end of the file, or before it"
        self.records += records
        self.bytes += size - 2 * records

    def take(self, chunk_id: int, start: int, end: int, records: int) -> None:
        """Records of a chunk are gone: its first ones, or others while sessions hold what lies before them."""
        chunk_state = self.chain[chunk_id]
        chunk_state.take(start, end, records)
        self.records -= records
        self.bytes -= end - start - 2 * records
        if chunk_state.head == chunk_state.tail:
            self._drop(chunk_state)

    def replace(self, chunk_id: int, cut: Cut, new_id: int, size: int) -> None:
        """A copy without the gaps, in a new file, takes the place of a chunk."""
        copy = cut.chunk(new_id)
        copy.size, copy.stored = size, (chunk.BEGIN, chunk.BEGIN, chunk.NONE)
        chunks = (copy if chunk_state.id == chunk_id else chunk_state for chunk_state in self.chain.values())
        self.chain = {chunk_state.id: chunk_state for chunk_state in chunks}
        self.dropped.append(chunk_id)
        self.emptied.append(chunk_id)

    def _drop(self, chunk_state: Chunk) -> None:
        """It is read to its end."""
        self.emptied.append(chunk_state.id)
        if len(self.chain) > 1:
            del self.chain[chunk_state.id]
            self.dropped.append(chunk_state.id)
        else:
            chunk_state.reset()

    def clear(self) -> None:
        self.dropped += self.chain
        self.emptied += self.chain
        self.chain.clear()
        self.records = self.bytes = 0

    # Changes of batches that move records; for the others see `LeaseState`

    def lease(self, batch: BatchState, parts: list[tuple[int, Cut | int]]) -> None:
        """Make a new batch of whole chunks, and of copies of records that are taken out of their chunk."""
        for chunk_id, cut in parts:
            if isinstance(cut, int):
                chunk_state = self.chain.pop(chunk_id)
                self.records -= chunk_state.records
                self.bytes -= chunk_state.bytes
                batch.chunks.append(chunk_state.leased(cut))
            else:
                batch.chunks.append(cut.chunk(chunk_id))
                for span in cut.spans:
                    self.take(chunk_id, *span)
        self.batches[batch.id] = batch
        self.last_lease = batch.changed

    def put_back(self, batch_id: str, new_ids: list[int]) -> None:
        """The records of the batch are at the front of the queue again, in files with new ids."""
        chunks = self.batches.pop(batch_id).chunks
        last = self.last
        if last is not None and last.head == last.tail:  # the chain never ends with an empty chunk behind others
            del self.chain[last.id]
            self.dropped.append(last.id)
            self.emptied.append(last.id)
        for chunk_state, new_id in zip(chunks, new_ids, strict=True):
            chunk_state.id, chunk_state.stored = new_id, None
        self.chain = {chunk_state.id: chunk_state for chunk_state in (*chunks, *self.chain.values())}
        self.records += sum(chunk_state.records for chunk_state in chunks)
        self.bytes += sum(chunk_state.bytes for chunk_state in chunks)

    # Keys, and when they were used

    def puts(self) -> dict[_Bytes, tuple[int, int]]:
        """When, by the wall clock, and how many records were put under each key that is known; by the key's hash."""
        return {key: (self.clock.wall_at(elapsed), records) for key, (elapsed, records) in self.idempotency_keys.items()}

    def times(self) -> Iterator[int]:
        yield from LeaseState.times(self)
        yield from (elapsed for elapsed, _ in self.idempotency_keys.values())

    def prune_keys(self, now: int) -> set[int]:
        """Forget keys past their retention; returns the numbers of batches whose last key is gone."""
        prune(self.idempotency_keys, now)
        return self.prune_expired(now)
