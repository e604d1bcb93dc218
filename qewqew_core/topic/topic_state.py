"""What is committed in a topic at one moment, and the operations in a commit. No files, no bytes.

Calls and the replay of the log change it with the same `TopicState.apply`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qewqew_core.clock import NO_CLOCK, Clock
from qewqew_core.crc import crc32
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.limits import LIMITS


class Append(NamedTuple):
    """Messages at the end of the last block, carried by the log itself."""

    messages: int
    data: bytes


class Extent(NamedTuple):
    """Messages at the end of the last block, written to its file."""

    runs: list[tuple[int, int, int]]  # messages, bytes, crc of the block up to their end
    synced: bool  # whether they were on disk before


class NewBlock(NamedTuple):
    """A new last block."""

    created: int


class PutKey(NamedTuple):
    """The messages of this commit were appended under an idempotency key."""

    key: bytes  # hash of it
    messages: int


class Trim(NamedTuple):
    """The oldest blocks are gone."""

    blocks: int


class Session(NamedTuple):
    """These readers have read messages in the same transaction."""

    id: str
    readers: list[str]


Operation = Append | Extent | NewBlock | PutKey | Trim | Session


@dataclass(slots=True, eq=False)
class Block:
    """A block, and its checksums; unknown before its first piece, because a zbus server wrote that part."""

    block: int  # 0, 1, 2 …
    base: int
    created: int
    end: int = 0
    messages: int = 0
    crc: int = 0
    updated: int = 0
    elapsed: int = 0  # when it was updated, in elapsed time: see `Clock`
    pieces: list[IndexEntry] = field(default_factory=list)  # see the module

    def append(self, messages: int, size: int, crc: int, time: int, elapsed: int) -> None:
        if not self.pieces or self.end - self.pieces[-1].offset >= LIMITS.piece_bytes:
            self.pieces.append(IndexEntry(self.end, self.messages, self.crc, time, elapsed))
        self.end += size
        self.messages += messages
        self.crc, self.updated, self.elapsed = crc, time, elapsed

    def sums(self) -> list[IndexEntry]:
        """The pieces, and one that says where the last one ends."""
        end = IndexEntry(self.end, self.messages, self.crc, self.updated, self.elapsed)
        return [*self.pieces, end] if self.pieces else []


class Redo(NamedTuple):
    """What a commit put into a block, and may be missing there: its bytes, or (None) only their checksum before and after."""

    block: Block
    offset: int
    size: int
    data: bytes | None
    crc_before: int
    crc: int
    synced: bool  # it was on disk before the commit


@dataclass(slots=True, eq=False)
class TopicState:
    """What is committed."""

    dialect: str
    start: int  # the first block
    number: int  # of the next message
    last: Block
    full: list[Block] = field(default_factory=list)  # before the last, made since the snapshot and not trimmed
    idempotency_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    clock: Clock = NO_CLOCK
    sessions: dict[str, list[str]] = field(default_factory=dict)  # readers of sessions that they may not have noted durably

    @property
    def count(self) -> int:
        return self.last.block - self.start + 1

    def apply(self, operation: Operation, time: int) -> Redo | None:
        """Apply one operation; returns what it puts into a block. Raises ValueError for impossible operations."""
        last = self.last
        match operation:
            case Append():  # taken apart like this, it takes half the time
                messages, data = operation
                return self._append([(messages, len(data), crc32(data, last.crc))], data, False, time)
            case Extent(runs, synced):
                return self._append(runs, None, synced, time)
            case NewBlock(created):
                self.full.append(last)
                self.last = Block(last.block + 1, last.base + last.end, created, updated=created, elapsed=self.clock.at(time))
            case PutKey(key, messages):
                self.idempotency_keys[key] = (self.clock.at(time), messages)
            case Trim(blocks):
                if blocks > last.block - self.start:
                    raise ValueError("more blocks are trimmed than there are")
                self.start += blocks
                self.full = [block for block in self.full if block.block >= self.start]
            case Session(session_id, readers):
                self.sessions[session_id] = readers
        return None

    def _append(self, runs: list[tuple[int, int, int]], data: bytes | None, synced: bool, time: int) -> Redo:
        last = self.last
        begin, crc_before, elapsed = last.end, last.crc, self.clock.at(time)
        for messages, size, crc in runs:
            last.append(messages, size, crc, time, elapsed)
            self.number += messages
        return Redo(last, begin, last.end - begin, data, crc_before, last.crc, synced)

    def check(self) -> None:
        """Raises `ValueError` for a state that index, blocks and .sums cannot have and QewQew never writes."""
        small, large, positive = [], [self.start, self.number], [self.start, self.number]
        for block in (*self.full, self.last):
            small += [block.end, block.messages, block.crc]
            large += [block.block, block.base, block.created, block.updated, block.elapsed]
            positive += [block.base, block.elapsed, *((block.updated, block.pieces[-1].time) if block.pieces else ())]
        if (
            any(type(number) is not int or not 0 <= number < 1 << 32 for number in small)
            or any(type(number) is not int or not -(1 << 63) <= number < 1 << 63 for number in large + positive)
            or min(positive) < 0
            or not 0 <= self.last.block - self.start < (1 << 31) - 1  # the index counts blocks, and the next one
            or self.dialect not in ("B", "C")
            or any(type(key) is not str or any(type(name) is not str for name in names) for key, names in self.sessions.items())
        ):
            raise ValueError("a value is out of range")
