"""The transaction log `NAME.wal` of a queue: what its frames say. No other module knows their bytes; `journal` has the framing.

The chunk files alone cannot say what is committed; the log does. It is a snapshot of the queue's state (kinds 1 to 5, and 9)
followed by one frame for each commit since. All integers are big-endian. docs/format/index.md has the whole grammar.

=============== ==============================================================================================================
kind            body
=============== ==============================================================================================================
1 chunk         a chunk of the chain (``_CHUNK``, then its pieces)
2 batch         u32 length, JSON, then its chunks
3 put keys      (16-byte hash, u64 elapsed time, u64 records) for each
4 expired keys  (16-byte hash, u64 elapsed time, u64 number of the batch id) for each
5 end           u32 number of frames before it, u64 number of operations J so far, u64 when a batch was leased last, or 0: the
                snapshot is whole; never torn
6 commit        u64 milliseconds since the epoch, then operations, each begun by a letter (below)
7 checkpoint    u64 inode of the log, u64 inode and u64 time of the header; header and pointers say the same as the log
9 history       u64 number of acknowledged batches, u64 their records, u64 their bytes, u64 their bytes on disk; their lines, as
                `history` has them. Of the snapshot; oldest acknowledgement first
8 handover      as a checkpoint; then id, head, tail, next of each chunk that was written to and not synced: header and pointers
                say the same as the log, if the page cache has lived
10 clock        a `Clock`. In the snapshot, too, one for each run of a machine
=============== ==============================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from qewqew_core import clock as clocks
from qewqew_core.batch.batch_state import (
    BatchState,
    batch_fields,
    checked,
)
from qewqew_core.batch.history import Block
from qewqew_core.disk import journal
from qewqew_core.disk.journal import Body, Frame, frame
from qewqew_core.errors import Corrupt
from qewqew_core.formats.chunk_state import Chunk, Span
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.queue import json_operations
from qewqew_core.queue.operations import (
    Append,
    Believe,
    Extent,
    JsonOperation,
    Lease,
    NewChunk,
    Operation,
    PutBack,
    PutKey,
    Replace,
    Served,
    Take,
)
from qewqew_core.queue.state import State

Pointers = tuple[int, int, int]  # head, tail, next
Stored = tuple[int, int, int, int]  # the chunk, and these

MAGIC = b"QEWQLOG1"
_CHUNK_KIND, _BATCH, _IDEMPOTENCY_KEYS, _EXPIRED_KEYS, END, COMMIT, CHECKPOINT, HANDOVER, _HISTORY, CLOCK = range(1, 11)
KIND_NAMES = dict(
    enumerate(("chunk", "batch", "put keys", "expired keys", "end", "commit", "checkpoint", "handover", "history", "clock"), 1)
)
_APPENDED = (COMMIT, CHECKPOINT, HANDOVER, CLOCK)
OF_SNAPSHOT = (_CHUNK_KIND, _BATCH, _IDEMPOTENCY_KEYS, _EXPIRED_KEYS, END, _HISTORY, CLOCK)

# id size base head tail taken total crc; then numbers of pieces and consumed spans, and these
_CHUNK = struct.Struct(">HIIIIIII")
_COUNT = struct.Struct(">I")
_SNAPSHOT_END = struct.Struct(">IQQ")
_HISTORY_SUMS = struct.Struct(">QQQQ")
_COUNTS = struct.Struct(">II")
_PIECE = struct.Struct(">IIIQQ")
_SPAN = struct.Struct(">III")  # start end records
_KEY = struct.Struct(">16sQQ")
_TIME = struct.Struct(">Q")
_CHECKPOINT_IDENTITY = struct.Struct(">QQQ")
_STORED = struct.Struct(">HIIH")  # chunk, head, tail, next

# Operations of a commit
_INLINE = struct.Struct(">cHII")  # A chunk, records, bytes; then the frames themselves, at the chunk's tail
_EXTENT = struct.Struct(">c?HI")  # X whether it was on disk before, chunk, number of runs; then these
_RUN = struct.Struct(">III")  # records, bytes, crc from base to its end; the bytes are in the chunk file
_SERVED = struct.Struct(">cI")  # R how many; then the numbers of the requests
_REQUEST = struct.Struct(">8s")
_JSON = struct.Struct(">cI")  # J length; then {"op": name, …}: see `json_operations`
_OF_ONE_SIZE: dict[int, tuple[type[Operation], struct.Struct]] = {
    ord("G"): (Take, struct.Struct(">cHIII")),  # chunk, start, end, records: from the head on, or behind what sessions hold
    ord("N"): (NewChunk, struct.Struct(">cHI")),  # chunk, size
    ord("K"): (PutKey, struct.Struct(">c16sQ")),  # hash of the key, records put under it
}
_LETTERS = {kind: (bytes((letter,)), form) for letter, (kind, form) in _OF_ONE_SIZE.items()}
_COMMIT_INLINE, _COMMIT_TAKE = struct.Struct(">QcHII"), struct.Struct(">QcHIII")  # with the time before it


def commit_append(time: int, chunk_id: int, records: int, frames: bytes) -> bytes:
    """`commit` of one `Append`."""
    return _COMMIT_INLINE.pack(time, b"A", chunk_id, records, len(frames)) + frames


def commit_take(time: int, chunk_id: int, start: int, end: int, records: int) -> bytes:
    """`commit` of one `Take`."""
    return _COMMIT_TAKE.pack(time, b"G", chunk_id, start, end, records)


def pack(operation: Operation) -> bytes:
    return b"".join(_parts(operation))


def commit(time: int, operations: Iterable[Operation]) -> bytes:
    """The body of a frame of kind `COMMIT`."""
    return b"".join((_TIME.pack(time), *chain.from_iterable(map(_parts, operations))))


def _parts(operation: Operation) -> tuple[Body, ...]:
    match operation:
        case Append():
            chunk_id, records, frames = operation
            return _INLINE.pack(b"A", chunk_id, records, len(frames)), frames
        case Extent(chunk_id, runs, synced):
            return _EXTENT.pack(b"X", synced, chunk_id, len(runs)), *(_RUN.pack(*run) for run in runs)
        case Served(requests):
            return _SERVED.pack(b"R", len(requests)), *requests
        case Take() | NewChunk() | PutKey():
            letter, form = _LETTERS[type(operation)]
            return (form.pack(letter, *operation),)
        case _:
            body = json_operations.pack(operation)
            return _JSON.pack(b"J", len(body)), body


def checkpoint(log_inode: int, header_inode: int, header_time: int) -> bytes:
    return _CHECKPOINT_IDENTITY.pack(log_inode, header_inode, header_time)


unpack_checkpoint = _CHECKPOINT_IDENTITY.unpack  # inode of the log, inode and time of the header


def handover(identity: bytes, stored: Iterable[Stored]) -> bytes:
    """``identity``: the body of a checkpoint; ``stored``: pointers that were written, and not synced."""
    return identity + b"".join(_STORED.pack(*each) for each in stored)


def unpack_handover(body: Body) -> tuple[tuple[int, ...], list[Stored]]:
    """``identity`` as `unpack_checkpoint` gives it, and ``stored``."""
    rest = body[_CHECKPOINT_IDENTITY.size :]
    stored = [(chunk_id, head, tail, following) for chunk_id, head, tail, following in _STORED.iter_unpack(rest)]
    return _CHECKPOINT_IDENTITY.unpack_from(body), stored


unpack_end = _SNAPSHOT_END.unpack  # how many frames are before it, how often batches had changed, when one was leased last


def time_of(body: Body) -> int:
    """When a commit was made."""
    (time,) = _TIME.unpack_from(body)
    return int(time)


def unpack(body: Body) -> Iterator[Operation]:
    """The operations of a commit, one by one. Raises `journal.NONSENSE` at one that QewQew cannot have written."""
    at = _TIME.size
    while at < len(body):
        letter = body[at]
        if letter == ord("A"):
            _, chunk_id, records, size = _INLINE.unpack_from(body, at)
            at += _INLINE.size + size
            yield Append(chunk_id, records, _part(body, at - size, at))
        elif letter == ord("X"):
            _, synced, chunk_id, count = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size + count * _RUN.size
            yield Extent(chunk_id, list(_RUN.iter_unpack(_part(body, at - count * _RUN.size, at))), synced)
        elif letter == ord("R"):
            _, count = _SERVED.unpack_from(body, at)
            at += _SERVED.size + count * _REQUEST.size
            yield Served([request for (request,) in _REQUEST.iter_unpack(_part(body, at - count * _REQUEST.size, at))])
        elif letter in _OF_ONE_SIZE:
            kind, form = _OF_ONE_SIZE[letter]
            yield kind(*form.unpack_from(body, at)[1:])
            at += form.size
        elif letter == ord("J"):
            _, size = _JSON.unpack_from(body, at)
            at += _JSON.size + size
            yield json_operations.unpack(body[at - size : at])
        else:
            raise ValueError(f"unknown operation {letter:c}")


def _part(body: Body, start: int, end: int) -> Body:
    if end > len(body):
        raise ValueError("a commit is shorter than an operation of it")
    return body[start:end]


class Unsynced(NamedTuple):
    """An extent that was not synced, of the commit whose frame begins at ``frame``."""

    frame: int
    begin: int
    end: int
    crc_before: int
    crc: int


@dataclass
class Replayed:
    """What a log says, and what recovery needs to know about how it got there."""

    state: State
    generation: int
    end: int  # offset just past the last whole frame
    snapshot_end: int
    frames: int  # behind the snapshot
    clean: bool  # the last frame is a checkpoint, or the snapshot alone is there
    handed_over: bool  # the last frame is a handover
    handed: dict[int, list[Pointers]]  # chunk id: what handovers since the last checkpoint have stored in its file, unsynced
    redo: dict[int, list[tuple[int, Body]]]  # chunk id: (offset, frames) that may not have reached its file yet
    firsts: set[int]  # every first chunk since the last checkpoint: what the header may say
    dropped: set[int]  # chunks dropped since the last checkpoint: their files may still be there
    made: set[int]  # chunks made since then: their files may not be on disk as they were made
    unsynced: dict[int, list[Unsynced]]  # chunk id: what is in its file, and perhaps not on disk
    durable: int  # how much of the log was on disk when its last frame was written
    checkpoint_identity: tuple[int, ...]  # of the last checkpoint: inode of the log, inode and time of the header
    last_json_operation: JsonOperation | None  # of the last commit: the file moves that it asks for may be unfinished
    keep_redo: bool = False  # a checkpoint does not clear it: it is all payload that the log has
    torn: bool = False  # there is something other than zeros behind the last whole frame

    @property
    def unsure(self) -> set[int]:
        """Chunks of the chain whose files may not be on disk as the log says."""
        return self.state.chain.keys() & (self.made | self.handed.keys() | self.redo.keys() | self.unsynced.keys())

    def may_be_ours(self, found: Chunk, pointers: Pointers, on_disk: Pointers) -> bool:
        """Whether a crash may have left these pointers in the file of a chunk whose pointers are to be ``pointers``: each of the
        three has been stored at some time since the last checkpoint.
        """
        if found.stored is None:
            return True
        ours = found.stored, pointers, *self.handed.get(found.id, ())
        return all(now in those for now, *those in zip(on_disk, *ours, strict=True))


def replay(data: bytes, path: str, keep_redo: bool = False) -> Replayed:
    """Rebuild the state from the bytes of a log; raises `Corrupt` with path and offset."""
    generation = journal.generation_of(data, MAGIC, path)
    state = State()
    result = Replayed(state, generation, journal.BEGIN, 0, 0, True, False, {}, {}, {0}, set(), set(), {}, 0, (), None, keep_redo)
    snapshot, time = True, 0  # of the newest commit
    whole, view = list(journal.places(data, generation)), memoryview(data)
    marks = [each.start for each in whole if each.kind in (END, CHECKPOINT)]
    for number, (at, kind, begin, end) in enumerate(whole):
        body: Body = view[begin:end]
        result.frames += not snapshot
        try:
            if kind == COMMIT:
                if snapshot:
                    raise ValueError("a commit inside the snapshot")
                result.clean = result.handed_over = False
                _apply(body, result, at)
                time = time_of(body)
            elif kind == CHECKPOINT:
                _checkpoint(result, at == marks[-1])
                result.checkpoint_identity = unpack_checkpoint(body)
            elif kind == HANDOVER and not snapshot:
                result.clean, result.handed_over = False, True
                result.checkpoint_identity, stored = unpack_handover(body)
                result.last_json_operation = None
                for chunk_id, head, tail, following in stored:
                    result.handed.setdefault(chunk_id, []).append((head, tail, following))
            elif kind == END:
                before, state.changes, state.last_lease = unpack_end(body)
                if before != number or not snapshot:
                    raise ValueError("the snapshot is not whole")
                snapshot, result.snapshot_end = False, end
                _checkpoint(result, at == marks[-1])
            else:
                load(kind, body, state)  # or a clock, at any time
                time = 0 if kind == CLOCK else time
        except journal.NONSENSE as error:
            raise journal.contradiction(error, path, at) from error
        result.end = end
    result.torn = not journal.ends_in_zeros(data, result.end)
    if snapshot or (result.torn and journal.was_durable(data, generation, result.end, _APPENDED)):
        raise Corrupt("a frame of the transaction log is damaged", path=path, offset=result.end)
    state.clock = state.clock.until(time)
    result.durable = journal.durable_at(data, whole[-1].start)
    return result


def _checkpoint(result: Replayed, last: bool) -> None:
    result.clean, result.handed_over = True, False
    result.handed.clear()
    if not result.keep_redo:
        result.redo.clear()
    result.dropped.clear()
    result.made.clear()
    result.unsynced.clear()
    result.last_json_operation = None
    result.firsts = {result.state.first}
    if last:  # there may be as many checkpoints as chunks
        for chunk_state, pointers in result.state.pointers():
            chunk_state.stored = pointers


def _apply(body: Body, result: Replayed, frame: int) -> None:
    state, time = result.state, time_of(body)
    result.last_json_operation = None
    for operation in unpack(body):
        match operation:
            case Append(chunk_id, _, frames):
                result.redo.setdefault(chunk_id, []).append((state.chain[chunk_id].tail, frames))
            case Extent(chunk_id, runs, False):
                last = state.chain[chunk_id]
                unsynced = Unsynced(frame, last.tail, last.tail + sum(size for _, size, _ in runs), last.crc, runs[-1][2])
                result.unsynced.setdefault(chunk_id, []).append(unsynced)
            case NewChunk(chunk_id) | Replace(new=chunk_id):
                result.dropped.discard(chunk_id)
                result.made.add(chunk_id)
            case PutBack(chunks=chunks):
                result.dropped.difference_update(chunks)
                result.made.update(chunks)
            case Lease(parts=parts):  # what a lease moves was written out before it
                for chunk_id, cut in parts:
                    if isinstance(cut, int):
                        result.redo.pop(chunk_id, None)
                        result.unsynced.pop(chunk_id, None)
            case Believe(header, stored, empty):
                result.firsts.add(header)
                result.dropped.update(empty)
                for chunk_id, head, tail, following in stored:
                    state.chain[chunk_id].stored = head, tail, following
        state.apply(operation, time)
        if isinstance(operation, JsonOperation):
            result.last_json_operation = operation
        if state.emptied:  # and perhaps dropped. To redo stale content would overwrite what was written to the file since
            for emptied in state.emptied:
                result.redo.pop(emptied, None)
                result.unsynced.pop(emptied, None)
            result.dropped.update(state.dropped)
            state.emptied.clear()
            state.dropped.clear()
    result.firsts.add(state.first)


# A damaged log


class Salvaged(NamedTuple):
    """What can be had of a log that does not replay."""

    prefix: Replayed | None  # what came before the damage; None if that is not even a whole snapshot
    damaged: int  # offset of the damage …
    end: int  # … and of the next whole frame, or of the end of the log
    frames: list[Frame]  # whole ones behind the damage (without a prefix: all)


def salvage(data: bytes, path: str, keep_redo: bool = False) -> Salvaged:
    """Take apart a log on which `replay` has raised. Raises nothing itself."""
    generation = journal.find_generation(data, MAGIC, OF_SNAPSHOT)
    if generation is None:
        return Salvaged(None, 0, len(data), [])
    data = journal.head(MAGIC, generation) + data[journal.BEGIN :]
    try:
        return Salvaged(replay(data, path, keep_redo), 0, journal.BEGIN, [])
    except Corrupt as error:
        damaged = error.offset or 0
    prefix = None
    with contextlib.suppress(Corrupt):
        prefix = replay(data[:damaged], path, keep_redo)
    frames = list(journal.find_frames(data, generation, damaged if prefix else journal.BEGIN, KIND_NAMES))
    behind = [found.start for found in frames if found.start > damaged]
    return Salvaged(prefix, damaged, behind[0] if behind else len(data.rstrip(b"\0")), frames)


# The snapshot


def snapshot(state: State, generation: int) -> bytes:
    """A whole log that says this state and nothing else. It counts as a checkpoint."""
    parts = [journal.head(MAGIC, generation)]
    parts += [frame(_CHUNK_KIND, _pack_chunk(chunk_state), generation) for chunk_state in state.chain.values()]
    for batch in state.batches.values():
        body = json.dumps(batch_fields(batch)).encode()
        body = _COUNT.pack(len(body)) + body + b"".join(map(_pack_chunk, batch.chunks))
        parts.append(frame(_BATCH, body, generation))
    for block in state.history.blocks:
        sums = _HISTORY_SUMS.pack(block.count, block.records, block.size, block.on_disk)
        parts.append(frame(_HISTORY, sums + block.lines, generation))
    for kind, keys in ((_IDEMPOTENCY_KEYS, state.idempotency_keys), (_EXPIRED_KEYS, state.expired_keys)):
        if keys:
            parts.append(frame(kind, b"".join(_KEY.pack(key, *value) for key, value in keys.items()), generation))
    parts += [frame(CLOCK, clocks.pack(each), generation) for each in state.clock.each()]
    parts.append(frame(END, _SNAPSHOT_END.pack(len(parts) - 1, state.changes, state.last_lease), generation))
    return b"".join(parts)


def load(kind: int, body: Body, state: State) -> None:
    """Take over what a frame of the snapshot says. Raises `journal.NONSENSE`."""
    if kind == _CHUNK_KIND:
        (chunk_state,) = _unpack_chunks(body)
        state.chain[chunk_state.id] = chunk_state
        state.records += chunk_state.records
        state.bytes += chunk_state.bytes
    elif kind == _BATCH:
        (size,) = _COUNT.unpack_from(body)
        batch = checked(BatchState(**json.loads(bytes(body[4 : 4 + size])), chunks=_unpack_chunks(body[4 + size :])))
        if any(part.base != part.head for part in batch.chunks):
            raise ValueError(f"a segment of batch {batch.id} begins before its records")
        state.batches[batch.id] = batch
    elif kind == _HISTORY:
        count, records, size, on_disk = _HISTORY_SUMS.unpack_from(body)
        state.history.blocks.append(Block.logged(count, records, size, on_disk, bytes(body[_HISTORY_SUMS.size :])))
    elif kind in (_IDEMPOTENCY_KEYS, _EXPIRED_KEYS):
        keys = state.idempotency_keys if kind == _IDEMPOTENCY_KEYS else state.expired_keys
        keys.update((key, (time, value)) for key, time, value in _KEY.iter_unpack(body))
    elif kind == CLOCK:
        state.clock = state.clock.then(clocks.unpack(body))
    else:
        raise ValueError(f"unknown frame kind {kind}")


def _pack_chunk(chunk_state: Chunk) -> bytes:
    head = _CHUNK.pack(
        chunk_state.id,
        chunk_state.size,
        chunk_state.base,
        chunk_state.head,
        chunk_state.tail,
        chunk_state.taken,
        chunk_state.total,
        chunk_state.crc,
    )
    index = chunk_state.index
    pieces = index.packed if isinstance(index, _PackedIndex) else b"".join(_PIECE.pack(*piece) for piece in chunk_state.pieces)
    counts = _COUNTS.pack(len(pieces) // _PIECE.size, len(chunk_state.consumed))
    return b"".join((head, counts, pieces, *(_SPAN.pack(*span) for span in chunk_state.consumed)))


@dataclass
class _PackedIndex:
    """The sparse index of a chunk, as the snapshot has it: unpacked when it is called, until then ready for the next one."""

    packed: bytes

    def __call__(self) -> list[IndexEntry]:
        return list(map(_index_entry, _PIECE.iter_unpack(self.packed)))


_index_entry = partial(tuple.__new__, IndexEntry)  # as `IndexEntry._make`, in a third of the time: there may be many


def _unpack_chunks(body: Body) -> list[Chunk]:
    chunks, at = [], 0
    while at < len(body):
        chunk_id, size, base, head, tail, taken, total, crc = _CHUNK.unpack_from(body, at)
        count, spans = _COUNTS.unpack_from(body, at + _CHUNK.size)
        at += _CHUNK.size + _COUNTS.size
        middle, end = at + count * _PIECE.size, at + count * _PIECE.size + spans * _SPAN.size
        if end > len(body) or not base <= head <= tail <= size:
            raise ValueError("this is not a chunk")
        pieces = _PackedIndex(bytes(body[at:middle]))
        consumed = [Span(*span) for span in _SPAN.iter_unpack(body[middle:end])]
        if not all(head < start < stop <= tail for start, stop, _ in consumed):
            raise ValueError("this is not a chunk")
        unavailable = [(span.start, span.end) for span in consumed]
        at = end
        chunks.append(Chunk(chunk_id, size, base, head, tail, taken, total, crc, pieces, consumed, unavailable))
    return chunks
