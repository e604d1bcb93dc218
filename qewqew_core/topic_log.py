"""The transaction log ``NAME.log`` of a topic, and the checksums ``data/BASE.sums`` of its full blocks: their bytes.

A commit *is* a frame of the log (`journal`). The log is a snapshot of what the index does not hold, and what was committed
since; index and blocks follow it, and are redone from it after a crash.

=============== ==============================================================================================================
kind            body
=============== ==============================================================================================================
1 snapshot      JSON: `TopicState`
2 put keys      (16-byte hash, u64 time, u64 messages) for each
5 end           nothing: the snapshot is whole
6 commit        u64 milliseconds since the epoch, then operations, each begun by a letter (below)
7 checkpoint    nothing: index and blocks say the same as the log
8 unsynced      `Files.boot`: until this run of the machine ends, the log may be on disk later than the index (``sync="never"``)
=============== ==============================================================================================================

A block's checksums are pieces of about 64 KiB: (offset u32, messages of the block before it u32, crc32 of the block up to
there u32, time u64). The .sums file has all of a block, the last for its end, between a magic and a crc32 of the whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qewqew_core import journal
from qewqew_core.errors import CorruptQueue
from qewqew_core.limits import LIMITS
from qewqew_core.state import KEYS_KEPT, KEYS_KEPT_MS, Piece

MAGIC = b"QEWQTOP1"
SUMS_MAGIC = b"QEWQSUM1"
_SNAPSHOT, _PUT_KEYS, _END, COMMIT, CHECKPOINT, UNSYNCED = 1, 2, 5, 6, 7, 8

_TIME = struct.Struct(">Q")
_KEY = struct.Struct(">16sQQ")
_PIECE = struct.Struct(">IIIQ")
_CRC = struct.Struct(">I")
# Operations of a commit
_INLINE = struct.Struct(">cII")  # A messages, bytes; then these themselves, at the end of the last block
_EXTENT = struct.Struct(">cIII?")  # X messages, bytes, crc of the block up to their end, whether they were on disk before
_BLOCK = struct.Struct(">cQ")  # B created: a new last block
_PUT_KEY = struct.Struct(">c16sQ")  # K hash of the key, messages appended under it
_TRIM = struct.Struct(">cI")  # T number of blocks: these, the oldest, are no more
_SESSION = struct.Struct(">cI")  # S length; then JSON: {"id": …, "readers": […]}, what was read in the same transaction


@dataclass(slots=True, eq=False)
class Block:
    """A block, and its checksums; those of messages before its first piece are not known: a zbus server wrote them."""

    block: int  # 0, 1, 2 …
    base: int
    created: int
    end: int = 0
    messages: int = 0
    crc: int = 0
    updated: int = 0
    pieces: list[Piece] = field(default_factory=list)  # see the module

    def append(self, messages: int, size: int, crc: int, time: int) -> None:
        if not self.pieces or self.end - self.pieces[-1].offset >= LIMITS.piece_bytes:
            self.pieces.append(Piece(self.end, self.messages, self.crc, time))
        self.end += size
        self.messages += messages
        self.crc, self.updated = crc, time

    def sums(self) -> list[Piece]:
        """The pieces, and one that says where the last one ends."""
        return [*self.pieces, Piece(self.end, self.messages, self.crc, self.updated)] if self.pieces else []


@dataclass(slots=True, eq=False)
class TopicState:
    """What is committed."""

    dialect: str
    start: int  # the first block
    number: int  # of the next message
    last: Block
    full: list[Block] = field(default_factory=list)  # before the last, made since the snapshot and not trimmed
    put_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    sessions: dict[str, list[str]] = field(default_factory=dict)  # readers of sessions that they may not have noted durably

    @property
    def count(self) -> int:
        return self.last.block - self.start + 1

    def prune_keys(self, now: int) -> None:
        for key, (time, _) in list(self.put_keys.items()):  # oldest first
            if len(self.put_keys) <= KEYS_KEPT and time > now - KEYS_KEPT_MS:
                break
            del self.put_keys[key]


class Redo(NamedTuple):
    """What a commit has put into a block, and may not be there: its bytes, or (None) only their checksum before and after."""

    block: Block
    offset: int
    size: int
    data: bytes | None
    crc_before: int
    crc: int
    synced: bool  # it was on disk before the commit


@dataclass
class Replayed:
    state: TopicState
    generation: int
    end: int
    snapshot_end: int
    clean: bool  # the last frame is a checkpoint, or the snapshot alone is there
    redo: list[tuple[int, Redo]]  # since the last checkpoint, with the place of their frame
    frames: int = 0  # behind the snapshot
    unsynced: bytes | None = None  # the run of the machine whose end may have left the index ahead of the log


def inline(messages: int, data: bytes) -> bytes:
    return _INLINE.pack(b"A", messages, len(data)) + data


def extent(messages: int, size: int, crc: int, synced: bool) -> bytes:
    return _EXTENT.pack(b"X", messages, size, crc, synced)


def new_block(created: int) -> bytes:
    return _BLOCK.pack(b"B", created)


def put_key(key: bytes, messages: int) -> bytes:
    return _PUT_KEY.pack(b"K", key, messages)


def trim(blocks: int) -> bytes:
    return _TRIM.pack(b"T", blocks)


def session(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return _SESSION.pack(b"S", len(data)) + data


def commit(now: int, operations: bytes) -> bytes:
    return _TIME.pack(now) + operations


def apply(body: bytes, state: TopicState) -> Iterator[Redo]:
    """Apply the operations of a commit; tells what it did to blocks."""
    (time,) = _TIME.unpack_from(body)
    at = _TIME.size
    while at < len(body):
        letter, last = body[at : at + 1], state.last
        if letter == b"A":
            _, messages, size = _INLINE.unpack_from(body, at)
            at += _INLINE.size + size
            data = body[at - size : at]
            if len(data) < size:
                raise ValueError("a commit is shorter than its messages")
            redo = Redo(last, last.end, size, data, last.crc, zlib.crc32(data, last.crc), False)
            last.append(messages, size, redo.crc, time)
            state.number += messages
            yield redo
        elif letter == b"X":
            _, messages, size, crc, synced = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size
            redo = Redo(last, last.end, size, None, last.crc, crc, synced)
            last.append(messages, size, crc, time)
            state.number += messages
            yield redo
        elif letter == b"B":
            _, created = _BLOCK.unpack_from(body, at)
            at += _BLOCK.size
            state.full.append(last)
            state.last = Block(last.block + 1, last.base + last.end, created, updated=created)
        elif letter == b"K":
            _, key, messages = _PUT_KEY.unpack_from(body, at)
            at += _PUT_KEY.size
            state.put_keys[key] = (time, messages)
        elif letter == b"T":
            _, blocks = _TRIM.unpack_from(body, at)
            at += _TRIM.size
            if blocks > last.block - state.start:
                raise ValueError("more blocks are trimmed than there are")
            state.start += blocks
            state.full = [one for one in state.full if one.block >= state.start]
        elif letter == b"S":
            _, size = _SESSION.unpack_from(body, at)
            at += _SESSION.size + size
            one = json.loads(body[at - size : at])
            state.sessions[one["id"]] = list(one["readers"])
        else:
            raise ValueError(f"unknown operation {letter!r}")


def snapshot(state: TopicState, generation: int) -> bytes:
    last = state.last
    body = {
        "dialect": state.dialect,
        "start": state.start,
        "number": state.number,
        "sessions": state.sessions,
        "last": [last.block, last.base, last.created, last.end, last.messages, last.crc, last.updated, last.pieces],
    }
    parts = [journal.head(MAGIC, generation), journal.frame(_SNAPSHOT, json.dumps(body).encode(), generation)]
    if state.put_keys:
        keys = b"".join(_KEY.pack(key, *value) for key, value in state.put_keys.items())
        parts.append(journal.frame(_PUT_KEYS, keys, generation))
    parts.append(journal.frame(_END, b"", generation))
    return b"".join(parts)


def _check(state: TopicState) -> None:
    """Raises `ValueError` for what has no place in index, blocks and .sums: nothing of ours has written that."""
    small, large, positive = [], [state.start, state.number], [state.start, state.number]
    for block in (*state.full, state.last):
        small += [block.end, block.messages, block.crc]
        large += [block.block, block.base, block.created, block.updated]
        positive += [block.base, block.updated if block.pieces else 0]
        for piece in block.pieces:
            small += piece[:3]
            positive.append(piece.time)
    if (
        any(type(one) is not int or not 0 <= one < 1 << 32 for one in small)
        or any(type(one) is not int or not -(1 << 63) <= one < 1 << 63 for one in large + positive)
        or min(positive) < 0
        or state.start > state.last.block
        or state.dialect not in ("B", "C")
        or any(type(key) is not str or any(type(one) is not str for one in names) for key, names in state.sessions.items())
    ):
        raise ValueError("a value is out of range")


def replay(data: bytes, path: str) -> Replayed:
    """What a log says; raises `CorruptQueue` with path and offset."""
    generation = journal.generation_of(data, MAGIC, path)
    state: TopicState | None = None
    result: Replayed | None = None
    at = journal.BEGIN
    for start, kind, body, end in journal.frames(data, generation):
        try:
            if kind == _SNAPSHOT:
                if state is not None:
                    raise ValueError("there is a second snapshot")
                fields = json.loads(body)
                *numbers, pieces = fields.pop("last")
                state = TopicState(**fields, last=Block(*numbers))
                state.last.pieces = [Piece(*piece) for piece in pieces]
                _check(state)
            elif state is None:
                raise ValueError("no snapshot comes first")
            elif kind == _PUT_KEYS and result is None:
                state.put_keys.update((key, (time, value)) for key, time, value in _KEY.iter_unpack(body))
            elif kind == _END and result is None:
                result = Replayed(state, generation, end, end, True, [])
            elif result is None:
                raise ValueError("the snapshot is not whole")
            elif kind == CHECKPOINT:
                result.clean, result.unsynced = True, None
                result.redo.clear()
            elif kind == UNSYNCED:
                result.clean, result.unsynced = False, body
            elif kind == COMMIT:
                result.clean = False
                result.redo += [(start, redo) for redo in apply(body, state)]
            else:
                raise ValueError(f"unknown frame kind {kind}")
            if result is not None and kind != _END:
                result.frames += 1
        except (ValueError, KeyError, IndexError, struct.error, TypeError, AttributeError, RecursionError) as error:
            # The checksum is right, so this was written so: better no topic than a wrong one.
            raise CorruptQueue(
                f"a frame of the log contradicts what came before it: {error!r}", path=path, offset=start
            ) from error
        at = end
    if result is None or journal.was_durable(data, generation, at, (COMMIT, CHECKPOINT, UNSYNCED)):
        raise CorruptQueue("a frame of the transaction log is damaged", path=path, offset=at)
    try:
        _check(result.state)
    except ValueError as error:
        raise CorruptQueue(f"the log as a whole makes no sense: {error}", path=path, offset=at) from error
    result.end = at
    return result


# Checksums of full blocks


def sums_name(base: int) -> str:
    return f"{base:020d}.sums"


def pack_sums(pieces: list[Piece]) -> bytes:
    data = SUMS_MAGIC + b"".join(_PIECE.pack(*piece) for piece in pieces)
    return data + _CRC.pack(zlib.crc32(data))


def unpack_sums(data: bytes, path: str) -> list[Piece]:
    """Raises `CorruptQueue`."""
    middle = data[len(SUMS_MAGIC) : -_CRC.size]
    if data[: len(SUMS_MAGIC)] != SUMS_MAGIC or len(middle) % _PIECE.size or _CRC.pack(zlib.crc32(data[:-4])) != data[-4:]:
        raise CorruptQueue("the checksums of a block are damaged themselves", path=path, offset=0)
    return [Piece(*piece) for piece in _PIECE.iter_unpack(middle)]
