"""What a queue is at one moment: its chain of chunks, its batches, its keys. No files, no bytes.

A running queue and the replay of its log change it by the same `State.apply`, so that what a crash leaves is what was there. Who
calls has checked that the change is possible.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from qewqew_core import chunk
from qewqew_core.batch_state import BatchState, LeaseState
from qewqew_core.keys import prune
from qewqew_core.limits import LIMITS
from qewqew_core.operations import (
    Append,
    Believe,
    Clear,
    Extent,
    Lease,
    NewChunk,
    Operation,
    PutBack,
    PutKey,
    Rare,
    Repair,
    Replace,
    Take,
)


class Piece(NamedTuple):
    """A boundary of the sparse index: a record begins at ``offset``."""

    offset: int
    records: int  # records of the chunk before it, from `Chunk.base` on
    crc: int  # crc32 of the bytes from `Chunk.base` to offset
    time: int  # when that record was committed, milliseconds since the epoch


class Span(NamedTuple):
    """Whole records of a chunk, from ``start`` to ``end``."""

    start: int
    end: int
    records: int


Region = tuple[int, int]  # start, end of whole records in a chunk


def add_region(regions: list[Region], start: int, end: int) -> None:
    """Make a sorted list of regions that do not touch cover start..end too."""
    first = bisect_left(regions, start, key=lambda region: region[1])
    behind = bisect_right(regions, end, key=lambda region: region[0])
    if first < behind:
        start, end = min(start, regions[first][0]), max(end, regions[behind - 1][1])
    regions[first:behind] = [(start, end)]


def remove_region(regions: list[Region], start: int, end: int) -> None:
    """Make it cover nothing of start..end."""
    first = bisect_right(regions, start, key=lambda region: region[1])
    behind = bisect_left(regions, end, key=lambda region: region[0])
    if first < behind:
        rest = [(regions[first][0], start), (end, regions[behind - 1][1])]
        regions[first:behind] = [region for region in rest if region[0] < region[1]]


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk file. Checksums and counts begin at ``base``, where the first record stood that we know of."""

    id: int
    size: int  # of the file, in bytes: records end at or before it
    base: int = chunk.BEGIN
    head: int = chunk.BEGIN
    tail: int = chunk.BEGIN
    taken: int = 0  # records in base..head
    total: int = 0  # records in base..tail
    crc: int = 0  # of the bytes base..tail
    index: list[Piece] | Callable[[], list[Piece]] = field(default_factory=list)  # see `pieces`
    gone: list[Span] = field(default_factory=list)  # taken behind the head, while sessions hold what lies before
    busy: list[Region] = field(default_factory=list)  # what is gone, and what sessions hold: nobody else may take it
    stored: tuple[int, int, int] | None = None  # head, tail, next as they stand in the file, where known

    @property
    def pieces(self) -> list[Piece]:
        """The sparse index. Of a chunk from a snapshot it is unpacked here: most are never looked at."""
        if callable(self.index):
            self.index = self.index()
        return self.index

    @property
    def records(self) -> int:
        return self.total - self.taken - sum(span.records for span in self.gone)

    @property
    def bytes(self) -> int:
        """Payload bytes that are still to be taken."""
        return self.tail - self.head - sum(span.end - span.start for span in self.gone) - 2 * self.records

    def check(self) -> None:
        """The invariants of a chunk."""
        assert chunk.BEGIN <= self.base <= self.head <= self.tail <= self.size, self
        assert 0 <= self.taken <= self.total, self
        ends = [self.head, *(offset for span in self.gone for offset in span[:2])]
        assert all(one < other for one, other in pairwise(ends)), f"what is taken behind the head overlaps, or touches: {self}"
        assert ends[-1] <= self.tail, self
        assert all(one.offset < other.offset <= self.tail for one, other in pairwise(self.pieces)), self

    def free(self, at: int) -> Region | None:
        """The first region at or behind ``at`` (head <= at <= tail) that can be taken."""
        if not self.busy:
            return (at, self.tail) if at < self.tail else None
        number = bisect_right(self.busy, at, key=lambda region: region[0])
        if number and self.busy[number - 1][1] > at:
            at = self.busy[number - 1][1]
        if at >= self.tail:
            return None
        return at, self.busy[number][0] if number < len(self.busy) else self.tail

    def take(self, start: int, end: int, records: int) -> None:
        """These records are gone. Raises ValueError if they cannot be there."""
        if not self.head <= start < end <= self.tail:
            raise ValueError(f"{start}..{end} of chunk {self.id} is taken, which has {self.head}..{self.tail}")
        if start == self.head:
            self.head, self.taken = end, self.taken + records
            while self.gone and self.gone[0].start == self.head:
                self.head, self.taken = self.gone[0].end, self.taken + self.gone[0].records
                del self.gone[0]
            if self.busy:
                self._forget_taken()
            return
        number = bisect_left(self.gone, start, key=lambda span: span.start)
        self.gone.insert(number, Span(start, end, records))
        for left in (number, number - 1):
            if 0 <= left < len(self.gone) - 1 and self.gone[left].end == self.gone[left + 1].start:
                one, other = self.gone[left : left + 2]
                self.gone[left : left + 2] = [Span(one.start, other.end, one.records + other.records)]
        add_region(self.busy, start, end)

    def hold(self, start: int, end: int) -> None:
        """A session has these records: they are there, and not to be taken by others."""
        add_region(self.busy, start, end)

    def release(self, start: int, end: int) -> None:
        """A session has rolled back."""
        remove_region(self.busy, start, end)
        self._forget_taken()

    def _forget_taken(self) -> None:
        while self.busy and self.busy[0][1] <= self.head:
            del self.busy[0]

    def append(self, size: int, records: int, crc: int, time: int) -> None:
        """``size`` bytes of frames were committed at the tail; ``crc`` is that of the bytes base..new tail."""
        pieces = self.pieces
        if not pieces or self.tail - pieces[-1].offset >= LIMITS.piece_bytes:
            pieces.append(Piece(self.tail, self.total, self.crc, time))
        self.tail += size
        self.total += records
        self.crc = crc

    def reset(self) -> None:
        """An empty chunk begins anew, as in the original: the bytes behind the tail are stale."""
        self.base = self.head = self.tail = chunk.BEGIN
        self.taken = self.total = self.crc = 0
        self.index = []
        self.gone.clear()
        self.busy.clear()

    def piece_of(self, offset: int) -> int:
        """The index of the piece that ``offset`` lies in (base <= offset < tail)."""
        return bisect_right(self.pieces, offset, key=lambda piece: piece.offset) - 1

    def piece_end(self, index: int) -> tuple[int, int, int]:
        """Where piece ``index`` ends: offset, records before, crc up to there."""
        if index + 1 < len(self.pieces):
            return self.pieces[index + 1][:3]
        return self.tail, self.total, self.crc

    def time(self) -> int:
        """When the oldest record was committed: exact at a boundary, else at most one piece too early."""
        return self.pieces[self.piece_of(self.head)].time


Step = tuple[Chunk, int, int, int]  # records that are taken together: chunk, start, end, how many


class Cut(NamedTuple):
    """The copy of some records of a chunk, made by a lease that ends inside it, or while sessions hold others of it."""

    spans: list[Span]  # of the chunk: what was copied, and is gone
    crc: int
    pieces: list[Piece]  # of the copy

    def chunk(self, chunk_id: int) -> Chunk:
        """The copy."""
        tail = chunk.BEGIN + sum(span.end - span.start for span in self.spans)
        total = sum(span.records for span in self.spans)
        return Chunk(chunk_id, tail, tail=tail, total=total, crc=self.crc, index=self.pieces)


@dataclass(slots=True, eq=False)
class State(LeaseState):
    """The whole of a queue."""

    chain: dict[int, Chunk] = field(default_factory=dict)  # first to last, in insertion order
    put_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (time, records put under it)
    records: int = 0  # in the chain
    bytes: int = 0  # payload in the chain
    changes: int = 0  # how often batches, or the chain as a whole, have changed: see `stamp`
    dropped: list[int] = field(default_factory=list)  # chunks that left the chain: their files are to be removed
    emptied: list[int] = field(default_factory=list)  # chunks whose content so far is stale: dropped, or begun anew

    @classmethod
    def of(cls, chain: dict[int, Chunk]) -> State:
        """Nothing but these chunks."""
        chunks = chain.values()
        return cls(chain=chain, records=sum(one.records for one in chunks), bytes=sum(one.bytes for one in chunks))

    def with_batches_of(self, other: State) -> State:
        """The same chunks, with the batches and keys of another state."""
        self.batches, self.put_keys, self.expired_keys = other.batches, other.put_keys, other.expired_keys
        self.changes = other.changes
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
        return [(one, (one.head, one.tail, following)) for one, following in zip(chunks, nexts[: len(chunks)], strict=True)]

    def apply(self, operation: Operation, time: int) -> None:
        """What a commit of that time says. Raises ValueError, KeyError or IndexError for what cannot be."""
        match operation:
            case Append():  # taken apart like this, it takes half the time
                chunk_id, records, frames = operation
                self.append(chunk_id, len(frames), records, zlib.crc32(frames, self.chain[chunk_id].crc), time)
            case Extent():
                chunk_id, records, size, crc = operation
                self.append(chunk_id, size, records, crc, time)
            case Take():
                self.take(*operation)
            case NewChunk():
                self.new_chunk(*operation)
            case PutKey(key, records):
                self.put_keys[key] = (time, records)
            case Lease(batch_id, key, records, size, parts, lease_timeout):
                batch = BatchState(batch_id, [key], "leased", 1, records, size, time, time, "", lease_timeout, time)
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
        if isinstance(operation, Rare):
            self.changes += 1

    def check(self) -> None:
        """The invariants between any two commits. It looks at everything: for tests."""
        for chunk_id, one in self.chain.items():
            assert chunk_id == one.id, one
            one.check()
            assert one.head < one.tail or len(self.chain) == 1, f"a chunk of several is empty: {one}"
        assert self.records == sum(one.records for one in self.chain.values())
        assert self.bytes == sum(one.bytes for one in self.chain.values())
        for batch in self.batches.values():
            for one in batch.chunks:
                one.check()
            assert not (batch.chunks and batch.state == "acked"), batch
            assert batch.state == "acked" or batch.records == sum(one.records for one in batch.chunks), batch
            assert batch.state == "acked" or batch.bytes == sum(one.bytes for one in batch.chunks), batch

    # Changes of the chain

    def new_chunk(self, chunk_id: int, size: int) -> None:
        """A new last chunk. An empty one before it goes: the chain never begins with an empty chunk that has a next."""
        last = self.last
        self.chain[chunk_id] = Chunk(chunk_id, size, stored=(chunk.BEGIN, chunk.BEGIN, chunk.NONE))
        if last is not None and last.head == last.tail:
            self._drop(last)

    def append(self, chunk_id: int, size: int, records: int, crc: int, time: int) -> None:
        one = self.chain[chunk_id]
        one.append(size, records, crc, time)
        assert one.tail <= one.size, "records end at the end of the file, or before it"
        self.records += records
        self.bytes += size - 2 * records

    def take(self, chunk_id: int, start: int, end: int, records: int) -> None:
        """Records of a chunk are gone: its first ones, or others while sessions hold what lies before them."""
        one = self.chain[chunk_id]
        one.take(start, end, records)
        self.records -= records
        self.bytes -= end - start - 2 * records
        if one.head == one.tail:
            self._drop(one)

    def replace(self, chunk_id: int, cut: Cut, new_id: int, size: int) -> None:
        """A copy without the gaps, in a new file, takes the place of a chunk."""
        copy = cut.chunk(new_id)
        copy.size, copy.stored = size, (chunk.BEGIN, chunk.BEGIN, chunk.NONE)
        self.chain = {one.id: one for one in (copy if one.id == chunk_id else one for one in self.chain.values())}
        self.dropped.append(chunk_id)
        self.emptied.append(chunk_id)

    def _drop(self, one: Chunk) -> None:
        """It is read to its end."""
        self.emptied.append(one.id)
        if len(self.chain) > 1:
            del self.chain[one.id]
            self.dropped.append(one.id)
        else:
            one.reset()

    def clear(self) -> None:
        self.dropped += self.chain
        self.emptied += self.chain
        self.chain.clear()
        self.records = self.bytes = 0

    # Changes of batches that move records; for the others see `LeaseState`

    def lease(self, batch: BatchState, parts: list[tuple[int, Cut | None]]) -> None:
        """Make a new batch of whole chunks, and of copies of records that are taken out of their chunk."""
        for chunk_id, cut in parts:
            if cut is None:
                one = self.chain.pop(chunk_id)
                one.size = one.tail  # the unused rest of the file is given back
                self.records -= one.records
                self.bytes -= one.bytes
                batch.chunks.append(one)
            else:
                batch.chunks.append(cut.chunk(chunk_id))
                for span in cut.spans:
                    self.take(chunk_id, *span)
        self.batches[batch.id] = batch

    def put_back(self, batch_id: str, new_ids: list[int]) -> None:
        """The records of the batch are at the front of the queue again, in files with new ids."""
        chunks = self.batches.pop(batch_id).chunks
        last = self.last
        if last is not None and last.head == last.tail:  # the chain never ends with an empty chunk behind others
            del self.chain[last.id]
            self.dropped.append(last.id)
            self.emptied.append(last.id)
        for one, new_id in zip(chunks, new_ids, strict=True):
            one.id, one.stored = new_id, None
        self.chain = {one.id: one for one in (*chunks, *self.chain.values())}
        self.records += sum(one.records for one in chunks)
        self.bytes += sum(one.bytes for one in chunks)

    # Keys

    def prune_keys(self, now: int) -> set[int]:
        """Forget keys past their retention; the numbers of the batches whose last key went."""
        prune(self.put_keys, now)
        return self.prune_expired(now)
