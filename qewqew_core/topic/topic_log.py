"""The transaction log ``NAME.wal`` of a topic, and the checksums ``data/BASE.sums`` of its full blocks: their bytes.

A commit *is* a frame of the log (`journal`). The log is a snapshot of what the index does not hold, and what was committed
since; index and blocks follow it, and are redone from it after a crash.

=============== ==============================================================================================================
kind            body
=============== ==============================================================================================================
1 snapshot      JSON: `TopicState`
2 put keys      (16-byte hash, u64 elapsed time, u64 messages) for each
3 pieces        the checksums of the last block (below) without its end
5 end           nothing: the snapshot is whole
6 commit        u64 milliseconds since the epoch, then operations, each begun by a letter (below)
7 checkpoint    nothing: index and blocks say the same as the log
8 unsynced      `Files.boot`: from here on, the log may be on disk later than the index (``sync="never"``), see `Blocks.is_marked`
10 clock        a `Clock`. In the snapshot, too, one for each run of a machine
=============== ==============================================================================================================

A block's checksums are pieces of about 64 KiB: (offset u32, messages of the block before it u32, crc32 of the block up to
there u32, time u64, elapsed time u64). The .sums file has all of a block, the last for its end, between a magic and a crc32 of
the whole.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap

from qewqew_core import clock as clocks
from qewqew_core.crc import crc32
from qewqew_core.disk import journal
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.topic.topic_state import Append, Block, Extent, NewBlock, Operation, PutKey, Redo, Session, TopicState, Trim

MAGIC = b"QEWQTOP1"
SUMS_MAGIC = b"QEWQSUM1"
SNAPSHOT, PUT_KEYS, PIECES, _END, COMMIT, CHECKPOINT, UNSYNCED, CLOCK = 1, 2, 3, 5, 6, 7, 8, clocks.FRAME
KIND_NAMES = {
    SNAPSHOT: "snapshot",
    PUT_KEYS: "put keys",
    PIECES: "pieces",
    _END: "end",
    COMMIT: "commit",
    CHECKPOINT: "checkpoint",
    UNSYNCED: "unsynced",
    CLOCK: "clock",
}

MARK = 4  # bytes of the mark, behind the head of the index: see `Blocks.index_patch` (zeros: no mark)

_TIME = struct.Struct(">Q")
_KEY = struct.Struct(">16sQQ")
_PIECE = struct.Struct(">IIIQQ")
_CRC = struct.Struct(">I")
# Operations of a commit
_INLINE = struct.Struct(">cII")  # A messages, bytes; then these themselves, at the end of the last block
_EXTENT = struct.Struct(">c?I")  # X whether it was on disk before, number of runs; then these
_RUN = struct.Struct(">III")  # messages, bytes, crc of the block up to their end
_SESSION = struct.Struct(">cI")  # S length; then JSON: {"id": …, "readers": […]}, what was read in the same transaction
_OF_ONE_SIZE: dict[bytes, tuple[type[Operation], struct.Struct]] = {
    b"B": (NewBlock, struct.Struct(">cQ")),  # created: a new last block
    b"K": (PutKey, struct.Struct(">c16sQ")),  # hash of the key, messages appended under it
    b"T": (Trim, struct.Struct(">cI")),  # number of blocks: these, the oldest, are gone
}
_LETTERS = {kind: (letter, form) for letter, (kind, form) in _OF_ONE_SIZE.items()}


@dataclass
class Replayed:
    state: TopicState
    generation: int
    end: int
    snapshot_end: int
    clean: bool  # the last frame is a checkpoint, or the snapshot alone is there
    redo: list[tuple[int, Redo]]  # since the last checkpoint, with the place of their frame
    frames: int = 0  # behind the snapshot
    durable: int = 0  # how much of the log was on disk when the last of them was written
    torn: bool = False  # something follows that is not a whole frame
    unsynced: bytes | None = None  # the run of the machine whose end may have left the index ahead of the log


def pack(operation: Operation) -> bytes:
    match operation:
        case Append():
            messages, data = operation
            return _INLINE.pack(b"A", messages, len(data)) + data
        case Extent(runs, synced):
            return _EXTENT.pack(b"X", synced, len(runs)) + b"".join(_RUN.pack(*run) for run in runs)
        case Session():
            body = json.dumps(operation._asdict()).encode()
            return _SESSION.pack(b"S", len(body)) + body
        case _:
            letter, form = _LETTERS[type(operation)]
            return form.pack(letter, *operation)


def commit(time: int, operations: Iterable[Operation]) -> bytes:
    """The body of a frame of kind `COMMIT`."""
    return _TIME.pack(time) + b"".join(map(pack, operations))


def time_of(body: bytes) -> int:
    """When a commit was made."""
    (time,) = _TIME.unpack_from(body)
    return int(time)


def unpack(body: bytes) -> Iterator[Operation]:
    """The operations of a commit, in turn. Raises `journal.NONSENSE` at the first one that QewQew never writes."""
    at = _TIME.size
    while at < len(body):
        letter = body[at : at + 1]
        if letter == b"A":
            _, messages, size = _INLINE.unpack_from(body, at)
            at += _INLINE.size + size
            if at > len(body):
                raise ValueError("a commit is shorter than its messages")
            yield Append(messages, body[at - size : at])
        elif letter == b"X":
            _, synced, count = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size + count * _RUN.size
            if at > len(body):
                raise ValueError("a commit is shorter than its runs")
            yield Extent(list(_RUN.iter_unpack(body[at - count * _RUN.size : at])), synced)
        elif letter in _OF_ONE_SIZE:
            kind, form = _OF_ONE_SIZE[letter]
            yield kind(*form.unpack_from(body, at)[1:])
            at += form.size
        elif letter == b"S":
            _, size = _SESSION.unpack_from(body, at)
            at += _SESSION.size + size
            fields = json.loads(body[at - size : at])
            yield Session(fields["id"], list(fields["readers"]))
        else:
            raise ValueError(f"unknown operation {letter!r}")


def snapshot(state: TopicState, generation: int) -> bytes:
    last = state.last
    body = {
        "dialect": state.dialect,
        "start": state.start,
        "number": state.number,
        "sessions": state.sessions,
        "last": [last.block, last.base, last.created, last.end, last.messages, last.crc, last.updated, last.elapsed],
    }
    parts = [journal.head(MAGIC, generation), journal.frame(SNAPSHOT, json.dumps(body).encode(), generation)]
    if state.idempotency_keys:
        keys = b"".join(_KEY.pack(key, *value) for key, value in state.idempotency_keys.items())
        parts.append(journal.frame(PUT_KEYS, keys, generation))
    if last.pieces:
        parts.append(journal.frame(PIECES, b"".join(starmap(_PIECE.pack, last.pieces)), generation))
    parts += [journal.frame(CLOCK, clocks.pack(each), generation) for each in state.clock.each()]
    parts.append(journal.frame(_END, b"", generation))
    return b"".join(parts)


def unpack_pieces(body: bytes) -> list[IndexEntry]:
    return [*starmap(IndexEntry, _PIECE.iter_unpack(body))]


def unpack_keys(body: bytes) -> dict[bytes, tuple[int, int]]:
    return {key: (time, messages) for key, time, messages in _KEY.iter_unpack(body)}


def dialect_of(data: bytes, path: str) -> str:
    """The dialect alone, which is in the first frame. Raises `Corrupt`."""
    for frame in journal.frames(data, journal.generation_of(data, MAGIC, path)):
        with contextlib.suppress(*journal.NONSENSE):
            return zbus.check_dialect(journal.json_fields(frame.body)["dialect"])
        break
    raise Corrupt("the transaction log does not begin with a snapshot", path=path, offset=journal.BEGIN)


def replay(data: bytes, path: str) -> Replayed:
    """What a log says; raises `Corrupt` with path and offset."""
    generation = journal.generation_of(data, MAGIC, path)
    state: TopicState | None = None
    result: Replayed | None = None
    at, time = journal.BEGIN, 0  # of the newest commit
    for start, kind, body, end in journal.frames(data, generation):
        try:
            if kind == SNAPSHOT:
                if state is not None:
                    raise ValueError("there is a second snapshot")
                fields = journal.json_fields(body)
                state = TopicState(**{**fields, "last": Block(*fields["last"])})
                state.check()
            elif state is None:
                raise ValueError("no snapshot comes first")
            elif kind == PUT_KEYS and result is None:
                state.idempotency_keys |= unpack_keys(body)
            elif kind == PIECES and result is None:
                state.last.pieces += unpack_pieces(body)
            elif kind == CLOCK:
                state.clock, time = state.clock.then(clocks.unpack(body)), 0
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
                time = time_of(body)
                applied = [state.apply(operation, time) for operation in unpack(body)]
                result.redo += [(start, redo) for redo in applied if redo is not None]
            else:
                raise ValueError(f"unknown frame kind {kind}")
            if result is not None and kind != _END:
                result.frames += 1
        except journal.NONSENSE as error:
            raise journal.contradiction(error, path, start) from error
        at = end
    torn = not journal.ends_in_zeros(data, at)
    if result is None or (torn and journal.was_durable(data, generation, at, (COMMIT, CHECKPOINT, UNSYNCED, CLOCK))):
        raise Corrupt("a frame of the transaction log is damaged", path=path, offset=at)
    try:
        result.state.check()
    except ValueError as error:
        raise Corrupt(f"the log contradicts itself: {error}", path=path, offset=at) from error
    result.state.clock = result.state.clock.until(time)
    result.end, result.torn, result.durable = at, torn, journal.durable_at(data, start)
    return result


# Checksums of full blocks


def sums_name(base: int) -> str:
    return f"{base:020d}.sums"


def sums_at(number: int) -> int:
    """Where a piece is in the file."""
    return len(SUMS_MAGIC) + number * _PIECE.size


def pack_sums(pieces: list[IndexEntry]) -> bytes:
    data = SUMS_MAGIC + b"".join(starmap(_PIECE.pack, pieces))
    return data + _CRC.pack(crc32(data))


def unpack_sums(data: bytes, path: str) -> list[IndexEntry]:
    """Raises `Corrupt`."""
    middle = data[len(SUMS_MAGIC) : -_CRC.size]
    if data[: len(SUMS_MAGIC)] != SUMS_MAGIC or len(middle) % _PIECE.size or _CRC.pack(crc32(data[:-4])) != data[-4:]:
        raise Corrupt("the checksums of a block are damaged themselves", path=path, offset=0)
    return unpack_pieces(middle)
