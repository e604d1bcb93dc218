"""`History`: the acknowledged batches whose records are still kept. There may be tens of thousands, and hardly anybody asks.

So each stays as the logs have it until somebody asks: a line break, then JSON, ``[id, keys, attempt, records, bytes, created,
changed, since, on disk]``, the last one in bytes. Opening a queue and `inspect` read the lines without parsing them. Line breaks
are nowhere else, because JSON escapes them in texts.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from qewqew_core.batch.batch_state import BatchState, checked
from qewqew_core.disk import journal
from qewqew_core.errors import Corrupt
from qewqew_core.secrecy import excerpt

BLOCK_BYTES = 32 << 10  # about how many lines lie together; if a block is damaged in a log, they are lost together
_ID = re.compile(rb'\n\["([^"]*)"')


@dataclass(slots=True)
class Block:
    """Lines, and sums over their batches."""

    count: int = 0
    records: int = 0
    size: int = 0  # bytes of payload
    on_disk: int = 0  # bytes that their files took when they were acknowledged
    lines: bytes = b""

    @classmethod
    def logged(cls, count: int, records: int, size: int, on_disk: int, lines: bytes) -> Block:
        """As a log has it. Raises `ValueError` if it says that there are more batches, or fewer."""
        if count != (found := lines.count(b"\n")):
            raise ValueError(f"{found} acknowledged batches are said to be {count}")
        return cls(count, records, size, on_disk, lines)

    def each(self) -> list[bytes]:
        return self.lines.split(b"\n")[1:]

    def add_up(self, batch: BatchState, on_disk: int, sign: int) -> None:
        self.count += sign
        self.records += sign * batch.records
        self.size += sign * batch.bytes
        self.on_disk += sign * on_disk


@dataclass(slots=True, eq=False)
class History:
    """Oldest acknowledgement first. Methods that parse a line raise `Corrupt` if QewQew cannot have written it."""

    blocks: deque[Block] = field(default_factory=deque)

    def __len__(self) -> int:
        return sum(block.count for block in self.blocks)

    def __iter__(self) -> Iterator[BatchState]:
        return (_unpack(line)[0] for block in self.blocks for line in block.each())

    def newest(self, most: int) -> list[BatchState]:
        """The last ``most`` acknowledged batches, in order."""
        lines: list[bytes] = []
        for block in reversed(self.blocks):
            if len(lines) >= most:
                break
            lines[:0] = block.each()
        return [_unpack(line)[0] for line in lines[-most:]]

    @property
    def records(self) -> int:
        return sum(block.records for block in self.blocks)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def on_disk(self) -> int:
        return sum(block.on_disk for block in self.blocks)

    def ids(self) -> Iterator[str]:
        return (batch_id.decode() for block in self.blocks for batch_id in _ID.findall(block.lines))

    def of_id(self, batch_id: str) -> BatchState | None:
        found = self._find(batch_id)
        return None if found is None else _unpack(found[2])[0]

    def _find(self, batch_id: str) -> tuple[Block, int, bytes] | None:
        """The block, where in it the line of the batch begins, and that line."""
        begin = f'\n["{batch_id}",'.encode(errors="surrogateescape")  # an argument may be anything
        for block in self.blocks:  # the oldest go first
            if (at := block.lines.find(begin)) >= 0:
                return block, at, _line(block.lines, at)
        return None

    def of_key(self, key: str) -> BatchState | None:
        """The batch that was leased under this key."""
        text = json.dumps(key).encode()
        for block in self.blocks:
            at = block.lines.find(text)
            while at >= 0:
                batch, _ = _unpack(_line(block.lines, block.lines.rfind(b"\n", 0, at)))
                if key in batch.keys:
                    return batch
                at = block.lines.find(text, at + 1)
        return None

    def add(self, batch: BatchState, on_disk: int) -> None:
        """Add a batch that was acknowledged."""
        if not self.blocks or len(self.blocks[-1].lines) >= BLOCK_BYTES:
            self.blocks.append(Block())
        block = self.blocks[-1]
        fields = [batch.id, batch.keys, batch.attempt, batch.records, batch.bytes, batch.created, batch.changed, batch.since]
        block.lines += b"\n" + json.dumps([*fields, on_disk]).encode()
        block.add_up(batch, on_disk, 1)

    def remove(self, batch_id: str) -> BatchState:
        """Remove a batch whose records are no longer kept. Raises KeyError."""
        if (found := self._find(batch_id)) is None:
            raise KeyError(batch_id)
        block, at, line = found
        batch, on_disk = _unpack(line)
        block.lines = block.lines[:at] + block.lines[at + 1 + len(line) :]
        block.add_up(batch, on_disk, -1)
        if not block.lines:
            self.blocks.remove(block)
        return batch

    def drop_nonsense(self) -> int:
        """Forget blocks with a wrong line or sum; returns how many batches they said to have."""
        wrong = [block for block in self.blocks if not _makes_sense(block)]
        self.blocks = deque(block for block in self.blocks if block not in wrong)
        return sum(block.count for block in wrong)


def _makes_sense(block: Block) -> bool:
    found = Block(lines=block.lines)
    try:
        for line in block.each():
            found.add_up(*_unpack(line), 1)
    except Corrupt:
        return False
    return found == block


def _line(lines: bytes, at: int) -> bytes:
    """The line that begins with the line break at ``at``."""
    end = lines.find(b"\n", at + 1)
    return lines[at + 1 : end if end >= 0 else len(lines)]


def _unpack(line: bytes) -> tuple[BatchState, int]:
    """The batch, and the bytes that its files take on disk."""
    try:
        batch_id, keys, attempt, records, size, created, changed, since, on_disk = json.loads(line)
        if type(on_disk) is not int:
            raise ValueError(f"this is not a number of bytes: {excerpt(on_disk, 120)}")
        batch = BatchState(batch_id, keys, "acked", attempt, records, size, created, changed, since=since)
        return checked(batch), on_disk
    except journal.NONSENSE as error:
        raise Corrupt(f"the log describes an impossible acknowledged batch: {error}; run `qewqew repair`") from error
