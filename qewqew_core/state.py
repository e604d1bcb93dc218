"""What a queue is at one moment: its chain of chunks, its batches, its keys. No files, no bytes.

A running queue and the replay of its log change the state by the same methods, so that what a crash
leaves is what was there. Who calls has checked that the change is possible.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from qewqew_core import chunk

PIECE_BYTES = 1 << 16  # about how far the boundaries of the sparse index lie apart
KEYS_KEPT = 1 << 16
KEYS_KEPT_MS = 30 * 86_400_000


class Piece(NamedTuple):
    """A boundary of the sparse index: a record begins at ``offset``."""

    offset: int
    records: int  # records of the chunk before it, from `Chunk.base` on
    crc: int  # crc32 of the bytes from `Chunk.base` to offset
    time: int  # when that record was committed, milliseconds since the epoch


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
    pieces: list[Piece] = field(default_factory=list)
    stored: tuple[int, int, int] | None = None  # head, tail, next as they stand in the file, where known

    @property
    def records(self) -> int:
        return self.total - self.taken

    @property
    def bytes(self) -> int:
        """Payload bytes that are still to be taken."""
        return self.tail - self.head - 2 * self.records

    def append(self, size: int, records: int, crc: int, time: int) -> None:
        """``size`` bytes of frames were committed at the tail; ``crc`` is that of the bytes base..new tail."""
        if not self.pieces or self.tail - self.pieces[-1].offset >= PIECE_BYTES:
            self.pieces.append(Piece(self.tail, self.total, self.crc, time))
        self.tail += size
        self.total += records
        self.crc = crc

    def reset(self) -> None:
        """An empty chunk begins anew, as in the original: the bytes behind the tail are stale."""
        self.base = self.head = self.tail = chunk.BEGIN
        self.taken = self.total = self.crc = 0
        self.pieces.clear()

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


class Cut(NamedTuple):
    """The copy of the first records of a chunk, which a lease made because it ends inside that chunk."""

    offset: int  # in the chunk: where the rest begins
    records: int
    crc: int
    pieces: list[Piece]  # of the copy


@dataclass(slots=True, eq=False)
class BatchState:
    """A batch that is not forgotten: leased, returned, dead, or acknowledged with its files still there."""

    id: str
    keys: list[str]  # of all who leased it, the present or last owner at the end
    state: str  # "leased", "returned", "dead", "acked"
    attempt: int
    records: int
    bytes: int
    created: int  # milliseconds since the epoch, as are all times here
    changed: int
    reason: str = ""
    chunks: list[Chunk] = field(default_factory=list)  # empty once acknowledged: then the manifest has them


def key_hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class State:
    """The whole of a queue."""

    chain: dict[int, Chunk] = field(default_factory=dict)  # first to last, in insertion order
    batches: dict[str, BatchState] = field(default_factory=dict)  # oldest first
    put_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (time, records put under it)
    expired_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (time, number of the batch id)
    records: int = 0  # in the chain
    dropped: list[int] = field(default_factory=list)  # chunks that left the chain: their files are to be removed
    emptied: list[int] = field(default_factory=list)  # chunks whose content so far is stale: dropped, or begun anew

    @property
    def first(self) -> int:
        return next(iter(self.chain), chunk.NONE)

    @property
    def last(self) -> Chunk | None:
        return self.chain[next(reversed(self.chain))] if self.chain else None

    def pointers(self) -> list[tuple[Chunk, tuple[int, int, int]]]:
        """Each chunk of the chain with what its file must say: head, tail, next."""
        chunks = list(self.chain.values())
        nexts = [following.id for following in chunks[1:]] + [chunk.NONE]
        return [(one, (one.head, one.tail, following)) for one, following in zip(chunks, nexts[: len(chunks)], strict=True)]

    # Changes of the chain

    def new_chunk(self, chunk_id: int, size: int) -> None:
        """A new last chunk. An empty one before it goes: the chain never begins with an empty chunk that has a next."""
        last = self.last
        self.chain[chunk_id] = Chunk(chunk_id, size, stored=(chunk.BEGIN, chunk.BEGIN, chunk.NONE))
        if last is not None:
            self._drop_if_read(last)

    def append(self, chunk_id: int, size: int, records: int, crc: int, time: int) -> None:
        self.chain[chunk_id].append(size, records, crc, time)
        self.records += records

    def take(self, chunk_id: int, head: int, records: int) -> None:
        """The first ``records`` records of the first chunk, up to ``head``, are gone."""
        one = self.chain[chunk_id]
        one.head = head
        one.taken += records
        self.records -= records
        self._drop_if_read(one)

    def _drop_if_read(self, one: Chunk) -> None:
        if one.head == one.tail:
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
        self.records = 0

    # Changes of batches

    def lease(self, batch: BatchState, chunk_ids: list[int], cut: Cut | None) -> None:
        """Cut a new batch off the front: whole chunks, then perhaps a copy of the first records of the next."""
        for chunk_id in chunk_ids:
            one = self.chain.pop(chunk_id)
            one.size = one.tail  # the unused rest of the file is given back
            self.records -= one.records
            batch.chunks.append(one)
        if cut is not None:
            front = self.chain[self.first]
            tail = chunk.BEGIN + cut.offset - front.head
            copy = Chunk(front.id, tail, tail=tail, total=cut.records, crc=cut.crc, pieces=cut.pieces)
            batch.chunks.append(copy)
            self.take(front.id, cut.offset, cut.records)
        self.batches[batch.id] = batch

    def lease_again(self, batch_id: str, key: str, attempt: int, now: int) -> None:
        """A returned batch goes to the owner of ``key``."""
        batch = self.batches[batch_id]
        batch.keys = [other for other in batch.keys if other != key] + [key]
        batch.state, batch.attempt, batch.changed, batch.reason = "leased", attempt, now, ""

    def release(self, batch_id: str, state: str, reason: str, now: int) -> None:
        """The batch is returned, dead or acknowledged."""
        batch = self.batches[batch_id]
        batch.state, batch.reason, batch.changed = state, reason, now
        if state == "acked":
            batch.chunks.clear()

    def put_back(self, batch_id: str, new_ids: list[int]) -> None:
        """The records of the batch are at the front of the queue again, in files with new ids."""
        chunks = self.batches.pop(batch_id).chunks
        for one, new_id in zip(chunks, new_ids, strict=True):
            one.id, one.stored = new_id, None
        self.chain = {one.id: one for one in (*chunks, *self.chain.values())}
        self.records += sum(one.records for one in chunks)

    def forget(self, batch_ids: list[str]) -> None:
        """The batches' files are dropped. Keys of acknowledged ones are remembered as expired."""
        for batch_id in batch_ids:
            batch = self.batches.pop(batch_id)
            if batch.state == "acked":
                for key in batch.keys:
                    self.expired_keys[key_hash(key)] = (batch.changed, int(batch_id[-16:], 16))

    # Keys

    def prune_keys(self, now: int) -> set[int]:
        """Forget keys past their retention; the numbers of the batches whose last key went."""
        gone: set[int] = set()
        for keys in (self.put_keys, self.expired_keys):
            excess = len(keys) - KEYS_KEPT
            for number, (key, (time, value)) in enumerate(list(keys.items())):  # oldest first
                if number >= excess and time > now - KEYS_KEPT_MS:
                    break
                del keys[key]
                if keys is self.expired_keys:
                    gone.add(value)
        return gone - {value for _, value in self.expired_keys.values()}
