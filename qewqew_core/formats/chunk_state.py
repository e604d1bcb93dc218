"""What is known of one chunk file: which records are there, which of them are gone or held, and its sparse index. No bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from qewqew_core.checksum import crcs_of_rest
from qewqew_core.clock import Clock
from qewqew_core.formats import chunk
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.limits import LIMITS


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
    index: list[IndexEntry] | Callable[[], list[IndexEntry]] = field(default_factory=list)  # see `pieces`
    consumed: list[Span] = field(default_factory=list)  # taken behind the head, while sessions hold what lies before
    unavailable: list[Region] = field(default_factory=list)  # what is gone, and what sessions hold: nobody else may take it
    stored: tuple[int, int, int] | None = None  # head, tail, next as they stand in the file, where known

    @property
    def pieces(self) -> list[IndexEntry]:
        """The sparse index. Of a chunk from a snapshot it is unpacked here: most are never looked at."""
        if callable(self.index):
            self.index = self.index()
        return self.index

    @property
    def records(self) -> int:
        return self.total - self.taken - sum(span.records for span in self.consumed)

    @property
    def bytes(self) -> int:
        """Payload bytes that are still to be taken."""
        return self.tail - self.head - sum(span.end - span.start for span in self.consumed) - 2 * self.records

    def check(self) -> None:
        """The invariants of a chunk."""
        assert chunk.BEGIN <= self.base <= self.head <= self.tail <= self.size, self
        assert 0 <= self.taken <= self.total, self
        ends = [self.head, *(offset for span in self.consumed for offset in span[:2])]
        assert all(before < after for before, after in pairwise(ends)), (
            f"what is taken behind the head overlaps, or touches: {self}"
        )
        assert ends[-1] <= self.tail, self
        assert all(before.offset < after.offset <= self.tail for before, after in pairwise(self.pieces)), self

    def free(self, at: int) -> Region | None:
        """The first region at or behind ``at`` (head <= at <= tail) that can be taken."""
        if not self.unavailable:
            return (at, self.tail) if at < self.tail else None
        number = bisect_right(self.unavailable, at, key=lambda region: region[0])
        if number and self.unavailable[number - 1][1] > at:
            at = self.unavailable[number - 1][1]
        if at >= self.tail:
            return None
        return at, self.unavailable[number][0] if number < len(self.unavailable) else self.tail

    def take(self, start: int, end: int, records: int) -> None:
        """These records are gone. Raises ValueError if they cannot be there."""
        if not self.head <= start < end <= self.tail:
            raise ValueError(f"{start}..{end} of chunk {self.id} is taken, which has {self.head}..{self.tail}")
        if start == self.head:
            self.head, self.taken = end, self.taken + records
            while self.consumed and self.consumed[0].start == self.head:
                self.head, self.taken = self.consumed[0].end, self.taken + self.consumed[0].records
                del self.consumed[0]
            if self.unavailable:
                self._forget_taken()
            return
        number = bisect_left(self.consumed, start, key=lambda span: span.start)
        self.consumed.insert(number, Span(start, end, records))
        for left in (number, number - 1):
            if 0 <= left < len(self.consumed) - 1 and self.consumed[left].end == self.consumed[left + 1].start:
                left_span, right_span = self.consumed[left : left + 2]
                self.consumed[left : left + 2] = [Span(left_span.start, right_span.end, left_span.records + right_span.records)]
        add_region(self.unavailable, start, end)

    def hold(self, start: int, end: int) -> None:
        """A session has these records: they are there, and not to be taken by others."""
        add_region(self.unavailable, start, end)

    def release(self, start: int, end: int) -> None:
        """A session has rolled back."""
        remove_region(self.unavailable, start, end)
        self._forget_taken()

    def _forget_taken(self) -> None:
        while self.unavailable and self.unavailable[0][1] <= self.head:
            del self.unavailable[0]

    def append(self, size: int, records: int, crc: int, time: int, clock: Clock) -> None:
        """``size`` bytes of frames were committed at the tail; ``crc`` is that of the bytes base..new tail.

        ``clock`` says how much time had passed at ``time``.
        """
        pieces = self.index if type(self.index) is list else self.pieces
        if not pieces or self.tail - pieces[-1].offset >= LIMITS.piece_bytes:
            pieces.append(IndexEntry(self.tail, self.total, self.crc, time, clock.at(time)))
        self.tail += size
        self.total += records
        self.crc = crc

    def reset(self) -> None:
        """An empty chunk starts over, as in the original: the bytes behind the tail are stale."""
        self.base = self.head = self.tail = chunk.BEGIN
        self.taken = self.total = self.crc = 0
        self.index = []
        self.consumed.clear()
        self.unavailable.clear()

    def leased(self, crc_of_taken: int) -> Chunk:
        """The chunk as a whole segment of a batch: its base is the head, so nobody needs the bytes before that any more.

        ``crc_of_taken``: of the bytes base..head. Raises ValueError if records behind the head are taken.
        """
        if self.consumed:
            raise ValueError(f"chunk {self.id} is leased whole, but records are taken behind its head")
        if self.head == self.base:
            return replace(self, size=self.tail)  # the unused rest of the file is given back
        behind = [entry for entry in self.pieces if entry.offset > self.head]
        ends = [*((entry.offset, entry.crc) for entry in behind), (self.tail, self.crc)]
        *inside, crc = crcs_of_rest(crc_of_taken, self.head, ends)
        index = [self.oldest()._replace(offset=self.head, records=0, crc=0)]
        for entry, before in zip(behind, inside, strict=True):
            index.append(entry._replace(records=entry.records - self.taken, crc=before))
        total = self.total - self.taken
        return replace(self, size=self.tail, base=self.head, taken=0, total=total, crc=crc, index=index)

    def piece_of(self, offset: int) -> int:
        """The index of the piece that ``offset`` lies in (base <= offset < tail)."""
        return bisect_right(self.pieces, offset, key=lambda piece: piece.offset) - 1

    def piece_end(self, index: int) -> tuple[int, int, int]:
        """Where piece ``index`` ends: offset, records before, crc up to there."""
        if index + 1 < len(self.pieces):
            return self.pieces[index + 1][:3]
        return self.tail, self.total, self.crc

    def oldest(self) -> IndexEntry:
        """Says when the oldest record was committed: exact at a boundary, else at most one piece too early."""
        return self.pieces[self.piece_of(self.head)]


class Cut(NamedTuple):
    """The copy of some records of a chunk, made by a lease that ends inside it, or while sessions hold others of it."""

    spans: list[Span]  # of the chunk: what was copied, and is gone
    crc: int
    pieces: list[IndexEntry]  # of the copy

    def chunk(self, chunk_id: int) -> Chunk:
        """The copy."""
        tail = chunk.BEGIN + sum(span.end - span.start for span in self.spans)
        total = sum(span.records for span in self.spans)
        return Chunk(chunk_id, tail, tail=tail, total=total, crc=self.crc, index=self.pieces)
