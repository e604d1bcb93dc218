"""The transaction log `NAME.log`: the bytes of commits and snapshots, and nothing else knows them.

The chunk files alone cannot say what is committed; the log does. It is a snapshot of the queue's state
followed by one frame for each commit since. A commit *is* its frame: it happened if and only if the
whole frame is in the log. All integers are big-endian::

     0        8           12      16          each frame:   0        4       8         12     13
    ┌────────┬───────────┬───────┬────────┬──             ┌────────┬───────┬─────────┬──────┬────────┐
    │QEWQLOG1│generation │ crc32 │ frame  │ frame …       │ length │ crc32 │ durable │ kind │ body   │
    │        │    u32    │       │        │               │  u32   │  u32  │   u32   │  u8  │ length │
    └────────┴───────────┴───────┴────────┴──             └────────┴───────┴─────────┴──────┴────────┘

A frame's crc is that of all behind it, begun with the generation, which is new for each snapshot: bytes of an
older log are never taken for frames. ``durable`` is the offset up to which the log was on disk when the frame
was written. A kind of zero (unwritten space) is no frame.

=============== ==============================================================================================================
kind            body
=============== ==============================================================================================================
1 chunk         a chunk of the chain (``_CHUNK``, then its pieces)
2 batch         u32 length, JSON, then its chunks
3 put keys      (16-byte hash, u64 time, u64 records) for each
4 expired keys  (16-byte hash, u64 time, u64 number of the batch id) for each
5 end           u32 number of frames before it: the snapshot is whole; it is replaced by rename, never torn
6 commit        u64 milliseconds since the epoch, then operations, each begun by a letter (below)
7 checkpoint    u64 inode of the log, u64 inode and u64 time of the header; header and pointers say the same as the log
=============== ==============================================================================================================

What is no whole frame ends the log: a commit that was torn never happened, and is cut off. But if a good frame
further on says that the place was durable, then it was not torn but damaged: `CorruptQueue`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn

from qewqew_core.checksum import crc_of_front
from qewqew_core.errors import CorruptQueue, DiskFull, QueueBroken
from qewqew_core.files import Files, write_new
from qewqew_core.state import BatchState, Chunk, Cut, Piece, Span, State

MAGIC = b"QEWQLOG1"
_HEAD = struct.Struct(">8sII")
_FRAME = struct.Struct(">IIIB")
_CHECKED = 8  # the crc covers the frame from here on
_CHUNK_KIND, _BATCH, _PUT_KEYS, _EXPIRED_KEYS, _END, COMMIT, CHECKPOINT = range(1, 8)
_MAX_FRAME = 1 << 31

_CHUNK = struct.Struct(">HIIIIIII")  # id size base head tail taken total crc; then numbers of pieces and gone spans, and these
_COUNT = struct.Struct(">I")
_COUNTS = struct.Struct(">II")
_PIECE = struct.Struct(">IIIQ")
_SPAN = struct.Struct(">III")  # start end records
_KEY = struct.Struct(">16sQQ")
_TIME = struct.Struct(">Q")
_SEAL = struct.Struct(">QQQ")

# Operations of a commit
_INLINE = struct.Struct(">cHII")  # A chunk, records, bytes; then the frames themselves, at the chunk's tail
_EXTENT = struct.Struct(">cHIII")  # X chunk, records, bytes, crc from base to the new tail; the bytes are in the chunk file
_TAKE = struct.Struct(">cHIII")  # G chunk, start, end, records: from the head on, or behind what sessions hold
_NEW = struct.Struct(">cHI")  # N chunk, size
_PUT_KEY = struct.Struct(">c16sQ")  # K hash of the key, records put under it
_JSON = struct.Struct(">cI")  # J length; then what happens rarely, as JSON: {"op": name of a method of State, …}


def inline(chunk_id: int, records: int, frames: bytes) -> bytes:
    return _INLINE.pack(b"A", chunk_id, records, len(frames)) + frames


def extent(chunk_id: int, records: int, size: int, crc: int) -> bytes:
    return _EXTENT.pack(b"X", chunk_id, records, size, crc)


def take(chunk_id: int, start: int, end: int, records: int) -> bytes:
    return _TAKE.pack(b"G", chunk_id, start, end, records)


def new_chunk(chunk_id: int, size: int) -> bytes:
    return _NEW.pack(b"N", chunk_id, size)


def put_key(key: bytes, records: int) -> bytes:
    return _PUT_KEY.pack(b"K", key, records)


def checkpoint(log_inode: int, header_inode: int, header_time: int) -> bytes:
    return _SEAL.pack(log_inode, header_inode, header_time)


def rare(op: str, **arguments: Any) -> bytes:
    body = json.dumps({"op": op, **arguments}).encode()
    return _JSON.pack(b"J", len(body)) + body


@dataclass
class Replayed:
    """What a log says, and what recovery needs to know about how it got there."""

    state: State
    generation: int
    end: int  # offset just past the last whole frame
    snapshot_end: int
    clean: bool  # the last frame is a checkpoint, or the snapshot alone is there
    redo: dict[int, list[tuple[int, bytes]]]  # chunk id: (offset, frames) that may not have reached its file yet
    firsts: set[int]  # every first chunk since the last checkpoint: what the header may say
    gone: set[int]  # chunks dropped since the last checkpoint: their files may still be there
    made: set[int]  # chunks made since then: their files may not be on disk as they were made
    seal: tuple[int, ...]  # of the last checkpoint: inode of the log, inode and time of the header
    last_rare: dict[str, Any] | None  # the last commit's rare operation: its file moves may be unfinished
    keep_redo: bool = False  # a checkpoint does not clear it: it is all payload that the log has


# What a body that is not as it was written raises while it is read and applied.
NONSENSE = (ValueError, KeyError, IndexError, struct.error, TypeError, AttributeError, RecursionError)


def replay(data: bytes, path: str, keep_redo: bool = False) -> Replayed:
    """Rebuild the state from the bytes of a log; raises `CorruptQueue` with path and offset."""
    if len(data) < _HEAD.size:
        raise CorruptQueue("the transaction log is cut short", path=path, offset=len(data))
    magic, generation, crc = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptQueue("this is not a transaction log of version 1", path=path, offset=0)
    if crc != zlib.crc32(data[: _HEAD.size - 4]):
        raise CorruptQueue("the head of the transaction log is damaged", path=path, offset=0)
    state = State()
    result = Replayed(state, generation, 0, 0, True, {}, {0}, set(), set(), (), None, keep_redo)
    at = _HEAD.size
    snapshot = True
    for number, (kind, body, end) in enumerate(_frames(data, generation, at)):
        try:
            if kind == COMMIT:
                if snapshot:
                    raise ValueError("a commit inside the snapshot")
                result.clean = False
                _apply(body, result)
            elif kind == CHECKPOINT:
                _checkpoint(result)
                result.seal = _SEAL.unpack(body)
            elif kind == _END:
                if _COUNT.unpack(body)[0] != number or not snapshot:
                    raise ValueError("the snapshot is not whole")
                snapshot, result.snapshot_end = False, end
                _checkpoint(result)
            else:
                _load(kind, body, state)
        except NONSENSE as error:
            # The checksum is right, so this was written so: better no queue than a wrong one.
            raise CorruptQueue(f"a frame of the log contradicts what came before it: {error!r}", path=path, offset=at) from error
        at = end
    if snapshot or _was_durable(data, generation, at):
        raise CorruptQueue("a frame of the transaction log is damaged", path=path, offset=at)
    result.end = at
    return result


def _frames(data: bytes, generation: int, at: int) -> Iterator[tuple[int, bytes, int]]:
    while (end := _frame_end(data, generation, at)) is not None:
        yield data[at + _FRAME.size - 1], data[at + _FRAME.size : end], end
        at = end


def _frame_end(data: bytes, generation: int, at: int) -> int | None:
    """Where the frame at ``at`` ends, if there is a whole one."""
    if at + _FRAME.size > len(data):
        return None
    length, crc, _, kind = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + int(length)
    if not kind or end > len(data) or zlib.crc32(memoryview(data)[at + _CHECKED : end], generation) != crc:
        return None
    return end


def _was_durable(data: bytes, generation: int, at: int) -> bool:
    """Whether a good frame behind ``at`` says that ``at`` was on disk before it was written itself."""
    written = len(data.rstrip(b"\0"))  # behind that is allocated space
    for start in range(at + 1, min(written, len(data) - _FRAME.size + 1)):
        length, _, durable, kind = _FRAME.unpack_from(data, start)  # tells most places apart before a checksum is computed
        plausible = at < durable <= start and kind in (COMMIT, CHECKPOINT) and start + _FRAME.size + length <= len(data)
        if plausible and _frame_end(data, generation, start):
            return True
    return False


def _checkpoint(result: Replayed) -> None:
    result.clean = True
    if not result.keep_redo:
        result.redo.clear()
    result.gone.clear()
    result.made.clear()
    result.last_rare = None
    result.firsts = {result.state.first}
    for one, pointers in result.state.pointers():
        one.stored = pointers


def _apply(body: bytes, result: Replayed) -> None:
    result.last_rare = None
    state = result.state
    for letter, chunk_id, offset, data in apply(body, state):
        if letter == b"A":
            result.redo.setdefault(chunk_id, []).append((offset, data))
        elif letter == b"N":
            result.gone.discard(chunk_id)
            result.made.add(chunk_id)
        elif letter == b"J":
            result.last_rare = rare = json.loads(data)
            if rare["op"] == "put_back":
                result.gone.difference_update(rare["chunks"])
                result.made.update(rare["chunks"])
            elif rare["op"] == "lease":  # what a lease moves was written out before it
                for moved, cut in rare["parts"]:
                    if cut is None:
                        result.redo.pop(moved, None)
            elif rare["op"] == "replace":
                result.gone.discard(rare["new"])
                result.made.add(rare["new"])
        # To redo stale content would overwrite what was written to the chunk file since.
        for emptied in state.emptied:
            result.redo.pop(emptied, None)
        result.gone.update(state.dropped)
        state.emptied.clear()
        state.dropped.clear()
    result.firsts.add(result.state.first)


def apply(body: bytes, state: State) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Apply the operations of one commit, and tell each: letter, chunk, offset before it, bytes."""
    (time,) = _TIME.unpack_from(body)
    at = _TIME.size
    while at < len(body):
        letter = body[at : at + 1]
        if letter == b"A":
            _, chunk_id, records, size = _INLINE.unpack_from(body, at)
            at += _INLINE.size + size
            one, frames = state.chain[chunk_id], body[at - size : at]
            offset = one.tail
            state.append(chunk_id, size, records, zlib.crc32(frames, one.crc), time)
            yield letter, chunk_id, offset, frames
        elif letter == b"X":
            _, chunk_id, records, size, crc = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size
            offset = state.chain[chunk_id].tail
            state.append(chunk_id, size, records, crc, time)
            yield letter, chunk_id, offset, b""
        elif letter == b"G":
            _, chunk_id, start, end, records = _TAKE.unpack_from(body, at)
            at += _TAKE.size
            state.take(chunk_id, start, end, records)
            yield letter, chunk_id, start, b""
        elif letter == b"N":
            _, chunk_id, size = _NEW.unpack_from(body, at)
            at += _NEW.size
            state.new_chunk(chunk_id, size)
            yield letter, chunk_id, 0, b""
        elif letter == b"K":
            _, key, records = _PUT_KEY.unpack_from(body, at)
            at += _PUT_KEY.size
            state.put_keys[key] = (time, records)
        elif letter == b"J":
            _, size = _JSON.unpack_from(body, at)
            at += _JSON.size + size
            operation = json.loads(body[at - size : at])
            _RARE[operation["op"]](state, time, operation)
            yield letter, 0, 0, body[at - size : at]
        else:
            raise ValueError(f"unknown operation {letter!r}")


def _cut(values: list[Any]) -> Cut:
    spans, crc, pieces = values
    return Cut([Span(*span) for span in spans], crc, [Piece(*piece) for piece in pieces])


def _lease(state: State, time: int, op: dict[str, Any]) -> None:
    batch = BatchState(op["id"], [op["key"]], "leased", 1, op["records"], op["bytes"], time, time)
    batch.lease_timeout, batch.extended = op["lease_timeout"], time
    state.lease(batch, [(chunk_id, _cut(cut) if cut else None) for chunk_id, cut in op["parts"]])


_RARE: dict[str, Callable[[State, int, dict[str, Any]], None]] = {
    "clear": lambda state, time, op: state.clear(),
    "lease": _lease,
    "lease_again": lambda state, time, op: state.lease_again(op["id"], op["key"], op["attempt"], op["lease_timeout"], time),
    "extend": lambda state, time, op: state.extend(op["id"], op["lease_timeout"], time),
    "release": lambda state, time, op: state.release(op["id"], op["state"], op["reason"], time),
    "put_back": lambda state, time, op: state.put_back(op["id"], op["chunks"]),
    "forget": lambda state, time, op: state.forget(op["ids"]),
    "replace": lambda state, time, op: state.replace(op["chunk"], _cut(op["cut"]), op["new"], op["size"]),
    "repair": lambda state, time, op: None,  # the last of its log until the repair is finished
}


# A damaged log


class Salvaged(NamedTuple):
    """What can be had of a log that does not replay."""

    prefix: Replayed | None  # what came before the damage; None if that is no whole snapshot
    damaged: int  # offset of the damage …
    end: int  # … and of the next whole frame, or of the end of the log
    frames: list[tuple[int, int, bytes]]  # whole frames behind the damage (without a prefix: all): offset, kind, body


def salvage(data: bytes, path: str, keep_redo: bool = False) -> Salvaged:
    """Take apart a log for which `replay` has raised. Raises nothing."""
    generation = _generation(data)
    if generation is None:
        return Salvaged(None, 0, len(data), [])
    data = _head(generation) + data[_HEAD.size :]
    try:
        return Salvaged(replay(data, path, keep_redo), 0, _HEAD.size, [])
    except CorruptQueue as error:
        damaged = error.offset or 0
    prefix = None
    with contextlib.suppress(CorruptQueue):
        prefix = replay(data[:damaged], path, keep_redo)
    frames = []
    start = damaged if prefix else _HEAD.size
    written = len(data.rstrip(b"\0"))
    while start < min(written, len(data) - _FRAME.size + 1):
        _, _, durable, kind = _FRAME.unpack_from(data, start)
        plausible = durable <= start and kind <= CHECKPOINT
        end = _frame_end(data, generation, start) if plausible else None
        if end is not None:
            frames.append((start, kind, data[start + _FRAME.size : end]))
        start = end or start + 1
    behind = [start for start, _, _ in frames if start > damaged]
    return Salvaged(prefix, damaged, behind[0] if behind else written, frames)


def _generation(data: bytes) -> int | None:
    """As the head says or, if that is damaged, as the checksum of the first frame was begun with."""
    if len(data) < _HEAD.size + _FRAME.size:
        return None
    generation: int = _HEAD.unpack_from(data)[1]
    if data[: _HEAD.size] == _head(generation):
        return generation
    length, crc, _, kind = _FRAME.unpack_from(data, _HEAD.size)
    first = data[_HEAD.size + _CHECKED : _HEAD.size + _FRAME.size + length]
    if kind not in (_CHUNK_KIND, _BATCH, _PUT_KEYS, _EXPIRED_KEYS, _END) or len(first) < length + _FRAME.size - _CHECKED:
        return None
    return crc_of_front(crc, zlib.crc32(first), len(first))


def load_batch_or_keys(kind: int, body: bytes, state: State) -> None:
    """Take over a frame of a damaged snapshot, unless it is of a chunk. Raises ValueError and the like."""
    if kind in (_BATCH, _PUT_KEYS, _EXPIRED_KEYS):
        _load(kind, body, state)


# The snapshot


def _head(generation: int) -> bytes:
    head = _HEAD.pack(MAGIC, generation, 0)[:-4]
    return head + _COUNT.pack(zlib.crc32(head))


def snapshot(state: State, generation: int) -> bytes:
    """A whole log that says nothing but this state. It counts as a checkpoint."""
    parts = [_head(generation)]
    parts += [frame(_CHUNK_KIND, _pack_chunk(one), generation) for one in state.chain.values()]
    for batch in state.batches.values():
        fields = {name: getattr(batch, name) for name in _BATCH_FIELDS}
        body = json.dumps(fields).encode()
        body = _COUNT.pack(len(body)) + body + b"".join(map(_pack_chunk, batch.chunks))
        parts.append(frame(_BATCH, body, generation))
    for kind, keys in ((_PUT_KEYS, state.put_keys), (_EXPIRED_KEYS, state.expired_keys)):
        if keys:
            parts.append(frame(kind, b"".join(_KEY.pack(key, *value) for key, value in keys.items()), generation))
    parts.append(frame(_END, _COUNT.pack(len(parts) - 1), generation))
    return b"".join(parts)


_BATCH_FIELDS = [one.name for one in fields(BatchState) if one.name != "chunks"]


def _load(kind: int, body: bytes, state: State) -> None:
    if kind == _CHUNK_KIND:
        (one,) = _unpack_chunks(body)
        state.chain[one.id] = one
        state.records += one.records
        state.bytes += one.bytes
    elif kind == _BATCH:
        (size,) = _COUNT.unpack_from(body)
        batch = BatchState(**json.loads(body[4 : 4 + size]), chunks=_unpack_chunks(body[4 + size :]))
        state.batches[batch.id] = batch
    elif kind in (_PUT_KEYS, _EXPIRED_KEYS):
        keys = state.put_keys if kind == _PUT_KEYS else state.expired_keys
        keys.update((key, (time, value)) for key, time, value in _KEY.iter_unpack(body))
    else:
        raise ValueError(f"unknown frame kind {kind}")


def _pack_chunk(one: Chunk) -> bytes:
    head = _CHUNK.pack(one.id, one.size, one.base, one.head, one.tail, one.taken, one.total, one.crc)
    pieces = [_PIECE.pack(*piece) for piece in one.pieces]
    return head + _COUNTS.pack(len(one.pieces), len(one.gone)) + b"".join(pieces + [_SPAN.pack(*span) for span in one.gone])


def _unpack_chunks(body: bytes) -> list[Chunk]:
    chunks, at = [], 0
    while at < len(body):
        chunk_id, size, base, head, tail, taken, total, crc = _CHUNK.unpack_from(body, at)
        count, spans = _COUNTS.unpack_from(body, at + _CHUNK.size)
        at += _CHUNK.size + _COUNTS.size
        middle, end = at + count * _PIECE.size, at + count * _PIECE.size + spans * _SPAN.size
        pieces = [Piece(*piece) for piece in _PIECE.iter_unpack(body[at:middle])]
        gone = [Span(*span) for span in _SPAN.iter_unpack(body[middle:end])]
        busy = [(span.start, span.end) for span in gone]
        at = end
        chunks.append(Chunk(chunk_id, size, base, head, tail, taken, total, crc, pieces, gone, busy))
    return chunks


def new_generation() -> int:
    """Random, so that no record can hold bytes that pass for a frame of the log it is in."""
    return int.from_bytes(os.urandom(4))


def frame(kind: int, body: bytes, generation: int, durable: int = 0) -> bytes:
    head = _FRAME.pack(len(body), 0, durable, kind)
    crc = zlib.crc32(body, zlib.crc32(head[_CHECKED:], generation))
    return head[:4] + _COUNT.pack(crc) + head[_CHECKED:] + body


class Prepared(NamedTuple):
    """A snapshot that is to become the log."""

    fd: int
    generation: int
    size: int


class Log:
    """The open log of a queue, for appending. Positions count bytes over all generations and never go back."""

    def __init__(self, files: Files, path: str, fd: int, generation: int, end: int, snapshot_end: int) -> None:
        self._files = files
        self.path = path
        self._fd = fd
        self.generation = generation
        self.end = end  # offset in the file: where the next frame goes
        self.snapshot_end = snapshot_end
        self._base = 0  # position of offset 0
        self._failed: OSError | None = None  # of a sync
        self._returned = end  # commits up to here have returned to their callers, durable or not
        self._sync_lock = threading.Lock()  # held while the descriptor is synced, so that `replace` does not close it
        self._allocated = end  # size of the file; what lies behind the end is zeros
        self.synced = snapshot_end  # what was appended before this process opened the log may not be on disk

    @property
    def position(self) -> int:
        return self._base + self.end

    def append(self, kind: int, body: bytes) -> int:
        """Write one frame; returns the position that `sync` takes. On an error nothing of it is left.

        Raises `DiskFull`; any other error, or one while taking a torn frame back, is `QueueBroken`.
        """
        data = frame(kind, body, self.generation, self.synced)
        try:
            self._files.write(self._fd, data, self.end)
        except OSError as error:
            self._cut(self.end, error)
            self._full_or_broken(error, len(data))
        self.end += len(data)
        self._allocated = max(self._allocated, self.end)
        return self._base + self.end

    @property
    def spare(self) -> int:
        """Bytes behind the end that are sure to be there when the disk is full."""
        return self._allocated - self.end

    def reserve(self, size: int) -> None:
        """Make sure that ``size`` bytes can be appended and `RESERVE` is left; raises `DiskFull`."""
        wanted = self.end + size + RESERVE
        if wanted > self._allocated:
            try:
                self._files.allocate(self._fd, wanted + RESERVE)
            except OSError as error:
                self._full_or_broken(error, size)
            self._allocated = wanted + RESERVE

    def give_back(self) -> bool:
        """Give the space behind the end back to the file system; whether there was any."""
        spare = self.spare
        if spare:
            self._cut(self.end, None)
        return spare > 0

    def sync(self, position: int, refuse: bool) -> None:
        """Everything up to ``position`` is durable. Threads that wait here together share one fsync.

        Raises `QueueBroken`, after which nothing is sure. ``refuse``: commits that are not durable have not returned to
        their callers, and must not come back when the queue is opened again.
        """
        with self._sync_lock:
            if self._base + self.synced >= position:
                return
            if self._failed is not None:
                self.broken(self._failed)  # tried again, the kernel would report success; and the log was cut
            end = self.end
            try:
                self._files.sync(self._fd)
            except OSError as error:
                self._failed = error
                if refuse:
                    self._cut(max(self.synced, self._returned), error)
                self.broken(error)
            self.synced = max(self.synced, end)

    def prepare(self, state: State) -> Prepared:
        """Write a snapshot of ``state`` beside this log, durably. Raises OSError; then nothing has changed."""
        generation = new_generation()
        data = snapshot(state, generation)
        return Prepared(write_new(self._files, self.path + ".tmp", data), generation, len(data))

    def replace(self, new: Prepared) -> None:
        """Go on in the prepared log. Header and pointers say by now what it says; raises `QueueBroken`."""
        try:
            self._files.rename(self.path + ".tmp", self.path)
            self._files.sync_directory(parent(self.path))
        except OSError as error:
            self.broken(error)
        with self._sync_lock:
            self._files.close(self._fd)
            self._base += self.end - new.size
            self._fd, self.generation = new.fd, new.generation
            self.end = self.snapshot_end = self.synced = self._returned = self._allocated = new.size

    def close(self) -> None:
        with self._sync_lock:
            self._files.close(self._fd)

    def _cut(self, end: int, cause: OSError | None) -> None:
        try:
            self._files.truncate(self._fd, end)
        except OSError as error:
            self.broken(cause or error)
        self._allocated = end

    def _full_or_broken(self, error: OSError, size: int) -> NoReturn:
        if error.errno not in FULL:
            self.broken(error)
        raise DiskFull(f"no room for a commit of {size:,} bytes: {error.strerror}. Nothing was stored", path=self.path) from error

    def broken(self, error: OSError) -> NoReturn:
        raise QueueBroken(
            f"writing failed: {error.strerror}. This queue object refuses every further call; check the disk, then open "
            "the queue again: that recovers all that was committed",
            path=self.path,
        ) from error


RESERVE = 256 << 10  # kept behind the end of the log, so that records can be taken, and make room, on a full disk
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parent(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
