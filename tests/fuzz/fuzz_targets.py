"""What must hold for any bytes on disk, as functions of bytes: a named error or the right result, and nothing else.

`fuzz.py` feeds them from a coverage-guided fuzzer, `tests/unit/core/test_fuzz_corpus.py` from the files that it found. A target
returns if all is well. Each knows the right result by a second, plain reading of the same bytes, or by a law that must hold.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from qewqew_core import BadManifest, BadPath, Batch, Corrupt, Empty, QewQewError, Queue, Topic
from qewqew_core.batch import manifest, segments
from qewqew_core.batch.batch_operations import BATCH_OPERATIONS
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.clock import NO_CLOCK
from qewqew_core.disk import journal
from qewqew_core.disk.files import Files
from qewqew_core.formats import zbus
from qewqew_core.formats.chunk import BEGIN, MAX_ID, POINTERS, frame, split, successor
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.queue import group_commit, json_operations
from qewqew_core.queue import log as logs
from qewqew_core.queue.operations import Append, Extent, NewChunk, PutKey, Take
from qewqew_core.queue.state import State
from qewqew_core.topic import reader_log as readers
from qewqew_core.topic import topic_log as topics
from qewqew_core.topic.in_flight import Flight, Flights
from qewqew_core.topic.reader_state import Range, ReaderState
from qewqew_core.topic.topic_state import Append as TopicAppend
from qewqew_core.topic.topic_state import Block, NewBlock, TopicState, Trim
from qewqew_core.topic.topic_state import Extent as TopicExtent
from qewqew_core.topic.topic_state import PutKey as TopicPutKey
from qewqew_core.topic.view import Position

# Frames: the first byte says how many records to split off at most (0: all), the rest are the frames.


def plain_split(frames: bytes, limit: int | None) -> tuple[list[bytes], int, bool]:
    """The records, where they end, and whether the next one, if it was wanted, is whole or not there."""
    records, at = [], 0
    while at < len(frames) and (limit is None or len(records) < limit):
        end = at + 2 + int.from_bytes(frames[at : at + 2])
        if at + 2 > len(frames) or end > len(frames):
            return records, at, False
        records.append(frames[at + 2 : end])
        at = end
    return records, at, True


def target_split(data: bytes) -> None:
    limit, frames = (data[0] or None) if data else None, data[1:]
    records, end, whole = plain_split(frames, limit)
    found: object
    try:
        found = split(frames, limit)
    except ValueError as error:
        found = error.args
    assert found == ((records, end) if whole else (end,))


# Header and chunk files without a log: chunk size - 13, length of the header (255: no header), header, and then for each chunk
# file its id (u16), its length (u8) and its bytes.


class NoSync(Files):
    """The real disk, without waiting for it."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class Watched(NoSync):
    """Also knows which descriptors are open."""

    def __init__(self) -> None:
        self.opened: set[int] = set()

    def open(self, path: str, *, new: bool = False) -> int:
        fd = super().open(path, new=new)
        self.opened.add(fd)
        return fd

    def open_to_read(self, path: str, *, follow: bool = False) -> int:
        fd = super().open_to_read(path, follow=follow)
        self.opened.add(fd)
        return fd

    def check(self) -> None:
        assert not any(map(is_open, self.opened)), "descriptors are left open"


def pack_chain(chunk_size: int, header: bytes | None, chunks: dict[int, bytes]) -> bytes:
    data = bytes([chunk_size - 13]) + (b"\xff" if header is None else bytes([len(header)]) + header)
    return data + b"".join(number.to_bytes(2) + bytes([len(content)]) + content for number, content in chunks.items())


def unpack_chain(data: bytes) -> tuple[int, bytes | None, dict[int, bytes]]:
    data = data.ljust(2, b"\0")
    chunk_size, size = data[0] + 13, data[1]
    header = None if size == 255 else data[2 : 2 + size % 4]
    at = 2 + len(header or b"")
    chunks: dict[int, bytes] = {}
    while at + 3 <= len(data) and len(chunks) < 8:
        end = at + 3 + data[at + 2]
        chunks[int.from_bytes(data[at : at + 2])] = data[at + 3 : end]
        at = end
    return chunk_size, header, chunks


class Refused(Exception):
    """The files contradict themselves."""


def plain_chain(header: bytes | None, chunks: dict[int, bytes]) -> tuple[list[bytes], list[int]]:
    """The records, and the chunks of the chain, by the requirements REQ-24 to REQ-32 alone."""
    if header and len(header) == 1:
        raise Refused
    chunks = {number: data for number, data in chunks.items() if 1 <= number <= MAX_ID}
    first = int.from_bytes(header[:2]) if header else 0
    if first > MAX_ID or (header and len(header) > 2 and first not in chunks):
        raise Refused
    records: list[bytes] = []
    chain: list[int] = []
    current = first if first in chunks or not first else successor(first)
    while current in chunks:
        if current in chain:
            raise Refused
        chain.append(current)
        data = chunks[current]
        head, tail, following = POINTERS.unpack_from(data) if len(data) >= BEGIN else (0, 0, 0)
        if following > MAX_ID:
            raise Refused
        empty = (head in (0, BEGIN) and tail == 0) or BEGIN <= tail < head <= len(data)
        if not empty:
            if not BEGIN <= head <= tail <= len(data):
                raise Refused
            found, _, whole = plain_split(data[head:tail], None)
            if not whole:
                raise Refused
            records += found
        current = following
    return records, chain


def target_chain(data: bytes) -> None:
    chunk_size, header, chunks = unpack_chain(data)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "q")
        if header is not None:
            path.write_bytes(header)
        for number, content in chunks.items():
            path.with_name(f"q.{number}").write_bytes(content)
        try:
            expected, chain = plain_chain(header, chunks)
        except Refused:
            before = _content(path.parent)
            with contextlib.suppress(Corrupt, BadPath):
                Queue(path, chunk_size=chunk_size, _files=NoSync()).close()
                raise AssertionError("files that contradict themselves were opened") from None
            assert _content(path.parent) == before, "a refused opening has changed something"
            return
        with Queue(path, chunk_size=chunk_size, _files=NoSync()) as q:
            assert list(q) == expected
            assert (len(q), q.stats().bytes) == (len(expected), sum(map(len, expected)))
            assert q.verify().problems == []
            q.put(b"n")
        left = {int(file.name[2:]): file.read_bytes() for file in path.parent.glob("q.[0-9]*")}
        assert plain_chain(path.read_bytes(), left)[0] == [*expected, b"n"], "the original would read something else"
        for number, content in chunks.items():
            torn = content[:BEGIN] == POINTERS.pack(BEGIN, 0, 0)[: len(content)] and not any(content[BEGIN:])
            stillborn = content[:BEGIN] == POINTERS.pack(BEGIN, BEGIN, 0) or not any(content) or torn
            if number not in chain and not stillborn:
                assert content in left.values(), "a file that nothing refers to was changed"  # the first has another id now
        with Queue(path, chunk_size=chunk_size, _files=NoSync()) as q:
            assert q.get_many(1 << 20) == [*expected, b"n"]


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# The transaction log: bytes of a log or (if it does not begin as one) four bytes for each operation of one. They are replayed
# as they are; with all checksums made right, so that what the fuzzer writes gets behind them; and so with one byte damaged.


def repaired(data: bytes, magic: bytes = logs.MAGIC) -> bytes:
    """The log with its head, its checksums, the count of the end frame and lengths that run past the end made right."""
    head = journal._HEAD
    generation = head.unpack_from(data.ljust(head.size, b"\0"))[1]
    begin = head.pack(magic, generation, 0)[:-4]
    result, at, frames = [begin + zlib.crc32(begin).to_bytes(4)], head.size, 0
    while at + journal._FRAME.size <= len(data):
        length, _, durable, kind = journal._FRAME.unpack_from(data, at)
        at += journal._FRAME.size
        body = data[at : at + length]
        if kind == logs.END and magic == logs.MAGIC:
            body = frames.to_bytes(4) + body[4:]
        result.append(journal.frame(kind, body, generation, durable))
        at += len(body)
        frames += 1
    return b"".join(result)


_PART = [2, [[[10, 16, 2]], 0, [[10, 0, 0, 5]]]]
_ARGUMENTS: dict[str, Any] = {"id": "q-0123456789abcdef", "key": "k", "records": 2, "bytes": 2, "parts": [[1, None], _PART]}
_ARGUMENTS |= {
    "attempt": 2,
    "lease_timeout": None,
    "state": "acked",
    "reason": "",
    "on_disk": 8192,
    "chunks": [65534, 65533],
    "files": ["q.1", "q.2"],
}
_ARGUMENTS |= {"ids": ["q-0123456789abcdef"], "keep_manifest": True, "chunk": 1, "cut": _PART[1], "new": 3, "size": 64}
_PARTS: list[Any] = [[[1, None]], [[2, None]], [], [[1, _PART[1]]], [[1]], [[7, None]]]
_ODD: list[Any] = [None, -1, 1 << 40, 1.5, True, [], [[]], {}, "", "q-1", [1], [1, 2], ["q-1"], [None], *_PARTS]


RARE = [(name, kind._fields) for kind, name in sorted(json_operations._NAMES.items(), key=itemgetter(1))]


def json_operation(name: str, fields: tuple[str, ...], arguments: dict[str, Any]) -> bytes:
    body = json.dumps({"op": name, **{field: arguments.get(field) for field in fields}}).encode()
    return b"J" + len(body).to_bytes(4) + body


def scripted(data: bytes) -> bytes:
    """A log with right checksums whose operations are right, or nearly so."""
    parts, operations = [logs.snapshot(State(), 7)], b""
    for kind, one, two, three in zip(data[1::4], data[2::4], data[3::4], data[4::4], strict=False):
        chunk_id, offset = one % 4, BEGIN + two % 64
        if kind % 8 == 0:
            operations += logs.pack(Append(chunk_id, two % 4, frame([b"x"] * (two % 4))))
        elif kind % 8 == 1:
            operations += logs.pack(Extent(chunk_id, [(two % 4, three, 0)], one > 127))
        elif kind % 8 == 2:
            operations += logs.pack(Take(chunk_id, offset, BEGIN + three % 64, one // 4))
        elif kind % 8 == 3:
            operations += logs.pack(NewChunk(chunk_id, offset))
        elif kind % 8 == 4:
            operations += logs.pack(PutKey(bytes([one]) * 16, two))
        elif kind % 8 == 5:
            arguments = dict(_ARGUMENTS, state=("acked", "returned", "dead")[one % 3])
            if two < 128:  # a key is a str, even in nonsense
                name = list(arguments)[two % len(arguments)]
                arguments[name] = str(three) if name == "key" else _ODD[three % len(_ODD)]
            operations += json_operation(*RARE[one % len(RARE)], arguments)
        elif kind % 8 == 6:
            parts.append(journal.frame(logs.COMMIT, one.to_bytes(8) + operations, 7, two))
            operations = b""
        else:
            parts.append(journal.frame(logs.CHECKPOINT, logs.checkpoint(one, two, three), 7))
    return b"".join([*parts, journal.frame(logs.COMMIT, bytes(8) + operations, 7)])


def _replay(data: bytes) -> logs.Replayed | None:
    error, result = None, None
    try:
        result = logs.replay(data, "q.log")
    except Corrupt as caught:
        error = caught
    if result is None:
        assert (error.path, 0 <= error.offset <= len(data)) == ("q.log", True)
        return None
    assert journal.BEGIN <= result.snapshot_end <= result.end <= len(data)
    # What was left out is what a torn commit leaves: without it, the log says the same.
    again = logs.replay(data[: result.end], "q.log")
    assert (repr(again.state), again.end, again.clean) == (repr(result.state), result.end, result.clean)
    return result


def target_log(data: bytes) -> None:
    if not data.startswith(logs.MAGIC[:1]):
        data = scripted(data)
    _replay(data)
    good = repaired(data)
    _replay(good)
    place = zlib.crc32(data) % len(good)
    damaged = bytearray(good)
    damaged[place] ^= 1 << place % 8
    result = _replay(bytes(damaged))
    assert result is None or result.end <= place, "a damaged frame was taken for a whole one"
    for log in (data, good, bytes(damaged)):
        salvaged = logs.salvage(log, "q.log")
        assert 0 <= salvaged.damaged <= len(log)
        offsets = [found.start for found in salvaged.frames]
        assert offsets == sorted(set(offsets))


# The logs of a topic and of its readers, in the same three ways. A script has four bytes for each operation.


def _damaged(good: bytes) -> tuple[bytes, int]:
    """A log with one bit changed, and where."""
    place = zlib.crc32(good) % len(good)
    return good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :], place


def _check_place(error: Corrupt, data: bytes, path: str) -> None:
    assert error.path == path
    assert error.offset is not None
    assert 0 <= error.offset <= len(data)


def scripted_topic(data: bytes) -> bytes:
    """A topic's log with right checksums whose operations are right, or nearly so."""
    state = TopicState(
        "B", 3, 5, Block(4, 1000, 1, 408, 2, 77, 2, 2, [IndexEntry(0, 0, 0, 1, 1)]), idempotency_keys={b"k" * 16: (1, 2)}
    )
    parts, operations = [topics.snapshot(state, 7)], b""
    for kind, one, two, three in zip(data[1::4], data[2::4], data[3::4], data[4::4], strict=False):
        if kind % 10 == 0:
            operations += topics.pack(TopicAppend(one % 4, bytes([two]) * three))
        elif kind % 10 == 1:
            operations += topics.pack(TopicExtent([(one % 4, two << 10, three)], one > 127))
        elif kind % 10 == 2:
            operations += topics.pack(NewBlock(one))
        elif kind % 10 == 3:
            operations += topics.pack(TopicPutKey(bytes([one]) * 16, two))
        elif kind % 10 == 4:
            operations += topics.pack(Trim(one % 4))
        elif kind % 10 == 5:
            session = {"id": str(one), "readers": [str(two)]} if three < 128 else _ODD[one % len(_ODD)]
            body = json.dumps(session if three < 192 else {"id": session, "readers": _ODD[two % len(_ODD)]}).encode()
            operations += b"S" + len(body).to_bytes(4) + body
        elif kind % 10 == 6:
            parts.append(journal.frame(topics.COMMIT, one.to_bytes(8) + operations, 7, two))
            operations = b""
        elif kind % 10 == 7:
            parts.append(journal.frame((topics.CHECKPOINT, topics.UNSYNCED)[one % 2], bytes(two % 4), 7, three))
        elif kind % 10 == 8:  # what belongs into the snapshot, somewhere else
            parts.append(journal.frame(one % 8, topics._KEY.pack(b"s" * 16, two, three)[: 32 - three % 2], 7))
        else:
            last = [4, 1000, 1, 408, 2, 77, 2, 2, [[0, 0, 0, 1, 1]]]
            fields: dict[str, Any] = {"dialect": "B", "start": 3, "number": 5, "sessions": {}, "last": last}
            if one % 2:
                last[two % len(last)] = _ODD[three % len(_ODD)]
            else:
                fields[list(fields)[two % len(fields)]] = _ODD[three % len(_ODD)]
            body = json.dumps(fields).encode()
            parts = [journal.head(topics.MAGIC, 7), journal.frame(1, body, 7), journal.frame(5, b"", 7)]
    return b"".join([*parts, journal.frame(topics.COMMIT, bytes(8) + operations, 7)])


def _replay_topic(data: bytes) -> topics.Replayed | None:
    try:
        result = topics.replay(data, "t.wal")
    except Corrupt as error:
        _check_place(error, data, "t.wal")
        return None
    state = result.state
    assert journal.BEGIN <= result.snapshot_end <= result.end <= len(data)
    # What was put into a block follows what was there, up to the end that the state knows.
    for (_, one), (_, two) in pairwise(result.redo):
        assert one.block is not two.block or (one.offset + one.size, one.crc) == (two.offset, two.crc_before)
    for _, redo in result.redo:
        assert redo.data is None or (len(redo.data), zlib.crc32(redo.data, redo.crc_before)) == (redo.size, redo.crc)
    if result.redo and (redo := result.redo[-1][1]).block is state.last:
        assert (redo.offset + redo.size, redo.crc) == (state.last.end, state.last.crc)
    # The beginning of a log says nothing that all of it does not say.
    again = topics.replay(data[: result.end], "t.wal")
    assert repr(again.state) == repr(state)
    ends = [found.end for found in journal.frames(data, result.generation) if found.end >= result.snapshot_end]
    with contextlib.suppress(Corrupt):  # nonsense may have been trimmed since
        before = topics.replay(data[: ends[zlib.crc32(data) % len(ends)]], "t.wal").state
        assert before.start <= state.start
        assert before.last.block <= state.last.block
        assert before.number <= state.number
        assert before.idempotency_keys.keys() <= state.idempotency_keys.keys()
    # What is to be written into the index fits there.
    full = [block.sums() for block in (*state.full, state.last)]
    assert [topics.unpack_sums(topics.pack_sums(sums), "sums") for sums in full] == full
    state.full.clear()
    assert repr(topics.replay(topics.snapshot(state, 7), "t.wal").state) == repr(state)
    return result


def target_topic_log(data: bytes) -> None:
    if not data.startswith(topics.MAGIC[:1]):
        data = scripted_topic(data)
    _replay_topic(data)
    good = repaired(data, topics.MAGIC)
    _replay_topic(good)
    log, place = _damaged(good)
    result = _replay_topic(log)
    assert result is None or result.end <= place, "a damaged frame was taken for a whole one"


def _at(number: int) -> list[int]:
    return [number // 4, 204 * (number % 4), number]


_BATCH: dict[str, Any] = {"id": "q-0123456789abcdef", "keys": ["k"], "state": "leased", "attempt": 1, "records": 2, "bytes": 2}
_BATCH |= {"created": 1, "changed": 1}


def scripted_reader(data: bytes) -> bytes:
    """A reader's log with right checksums whose operations are right, or nearly so."""
    flight = {204 * number: Flight(Position(*_at(number)), 9, 1, 1) for number in range(3)}
    parts = [readers.snapshot(ReaderState(pending=[Range(Position(*_at(3)), None)], in_flight=Flights(flight)), 7)]
    for kind, one, two, three in zip(data[1::4], data[2::4], data[3::4], data[4::4], strict=False):
        todo: list[Any] = [[_at(three % 16), None]]
        if three % 3 == 0:
            todo = [[_at(two % 16), _at(three % 16)], *todo]
        offsets = [204 * number for number in range(one % 8, one % 8 + two % 4)]
        places: Any = {"range": [204 * (one % 4), 816, 204]} if two % 2 else [204 * at for at in range(one % 4, 4)]
        run = [816 * (two % 4), two % 4, 1 + one // 128, two % 4 * 4 + one % 4, places]
        session = str(three % 2)
        change = {"id": _BATCH["id"], "key": "l", "attempt": 2, "lease_timeout": None, "reason": "", "ids": [_BATCH["id"]]}
        change |= {"keep_manifest": True, "on_disk": 0, "retry_delay": two}
        change["state"] = ("acked", "returned", "dead")[two % 3]
        op = ("lease_again", "extend", "release", "forget")[one % 4]
        operations: list[list[Any]] = [
            ["hand_out", one, two, [run], todo],
            ["commit", offsets, todo if three % 2 else None],
            ["give_back", offsets, three],
            ["move", todo, one],
            ["lose", todo, offsets, one],
            ["set_filter", "a.*" if one % 2 else None],
            ["prepare", session, offsets],
            ["unprepare", session],
            ["resolve", session, one % 2 == 0, two],
            ["lease", _BATCH, todo if one % 2 else [[_at(2), _at(4)]], offsets, todo],
            ["put_back", _BATCH["id"], todo],
            ["change", op, one, {field: change[field] for field in BATCH_OPERATIONS[op]._fields}],
        ]
        if kind == 255:
            parts.append(journal.frame(one, b"", 7, two))
            continue
        operation = operations[kind % 12]
        if kind >= 192:
            operation = copy.deepcopy(operation)
            operation[one % len(operation)] = _ODD[two % len(_ODD)]
        parts.append(journal.frame(readers.COMMIT, json.dumps(operation).encode(), 7, two if kind >= 128 else 0))
    return b"".join(parts)


def _content_of(state: ReaderState) -> str:
    """All that a snapshot holds."""
    delivery = (state.pending, state.in_flight, state.filter, state.lost, state.ranges)
    return repr((delivery, state.batches, state.history, state.last_lease, state.expired_keys))


def _replay_reader(data: bytes) -> readers.Replayed | None:
    try:
        result = readers.replay(data, "r.wal")
    except Corrupt as error:
        _check_place(error, data, "r.wal")
        return None
    state = result.state
    assert journal.BEGIN <= result.snapshot_end <= result.end <= len(data)
    # Who had replayed the beginning, and follows, has the same.
    frames = list(journal.frames(data, result.generation))
    number = 1 + zlib.crc32(data) % len(frames)
    with contextlib.suppress(Corrupt):  # nonsense may have been put right since
        follower = readers.replay(data[: frames[number - 1].end], "r.wal").state
        for one in frames[number:]:
            readers.replay_frame(one, follower, "r.wal", 0)
        assert (_content_of(follower), follower.clean) == (_content_of(state), state.clean)
    # A message that is not committed lies before no place that a zbus server is told.
    floor = state.committed_position()
    assert all(floor <= one.at for one in state.in_flight.values())
    assert all(floor <= one.start for one in state.pending[:1])
    assert _content_of(readers.replay(readers.snapshot(state, 7), "r.wal").state) == _content_of(state)
    return result


def target_reader_log(data: bytes) -> None:
    if not data.startswith(readers.MAGIC[:1]):
        data = scripted_reader(data)
    _replay_reader(data)
    good = repaired(data, readers.MAGIC)
    _replay_reader(good)
    log, place = _damaged(good)
    result = _replay_reader(log)
    assert result is None or result.end <= place, "a damaged frame was taken for a whole one"


# A topic as a zbus server may have left it, and worse: an index, blocks, a reader; without our logs. The first byte says how it
# is opened and how messages are written, then come four bytes for each thing that is done to the files.

_HEAD_OF = {"B": struct.Struct(">qq40sqq128si"), "C": struct.Struct(">qQ40sqq128si")}
_TAGS = [b"", b"a", b"a.b", b"a.b.c", b"b", b"\xff", b"a.", b"."]
_FILTERS = [None, "a", "a.*", "#", "b;a.#", "*.b"]
_NUMBERS = [-1, 0, 1, 2, 3, 203, 204, 205, 10_239, 10_240, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62, (1 << 63) - 1]
_RING = 10_240


def _fit(value: int, size: int) -> int:
    """As a signed number of so many bits."""
    return (value + (1 << size - 1)) % (1 << size) - (1 << size - 1)


class Folder:
    """The files of a topic, as bytes says."""

    def __init__(self, data: bytes) -> None:
        flags = data[0] if data else 0
        self.dialect = (None, "A", "B", "C")[flags % 4]
        self.filter = _FILTERS[flags // 8 % len(_FILTERS)]
        written = "BC"[flags // 4 % 2]
        self.start = 0  # the first block, by which entries have their place
        self.head = [1, 1, 0, 0]  # version, blocks, start, number of the next message
        self.entries: list[list[int]] = [[1, 0, 0, 1]]  # created, base, end, updated
        self.blocks: dict[int, bytearray] = {0: bytearray()}
        self.reader: bytearray | None = None
        places = [0]
        for kind, one, two, three in zip(data[1::4], data[2::4], data[3::4], data[4::4], strict=False):
            entry = self.entries[-1]
            value = _NUMBERS[two % len(_NUMBERS)]
            if kind % 8 == 0:
                self._message(written, one, two, three, places)
            elif kind % 8 == 1 and len(self.entries) < 8:
                base = _fit(entry[1] + entry[2] + (three % 2) * one, 64)
                self.entries.append([two, base, 0, two])
                self.blocks.setdefault(base, bytearray())
                self.head[1] += 1
            elif kind % 8 == 2:
                place = one % 4
                self.head[place] = value if three % 2 else self.head[place] + two - 128
            elif kind % 8 == 3:
                chosen, field = self.entries[one % len(self.entries)], one // 16 % 4
                chosen[field] = value if three % 2 else chosen[field] + two - 128
            elif kind % 8 == 4:
                base = list(self.blocks)[one % len(self.blocks)] if self.blocks else 0
                if three % 4 == 0:
                    self.blocks.pop(base, None)
                elif three % 4 == 1:
                    self.blocks.setdefault(value % (1 << 63), bytearray(two))
                elif three % 4 == 2:
                    self.blocks[base] = self.blocks.get(base, bytearray())[: -two or None]
                else:
                    self.blocks[base] = self.blocks.get(base, bytearray()) + bytes(two)
            elif kind % 8 == 5:
                offset = value if three % 2 else places[two % len(places)]
                tag = _TAGS[three // 2 % len(_TAGS)]
                self.reader = bytearray(
                    struct.pack(">qi128s", self.start + one % 10 - 1, _fit(offset, 32), bytes([len(tag)]) + tag)
                )
            elif kind % 8 == 6:
                target = list(self.blocks.values())[one % len(self.blocks)] if self.blocks else bytearray()
                if one > 192 and self.reader is not None:
                    target = self.reader
                if two * 256 + three < len(target):
                    target[two * 256 + three] ^= 1 << one % 8
            else:
                start = (0, 1, _RING - 1, _RING, 1 << 40)[one % 5]
                self.head[2], self.start = self.head[2] - self.start + start, start
        self.head = [_fit(value, size) for value, size in zip(self.head, (32, 32, 64, 64), strict=True)]
        self.entries = [[_fit(value, size) for value, size in zip(one, (64, 64, 32, 64), strict=True)] for one in self.entries]

    def _message(self, written: str, one: int, two: int, three: int, places: list[int]) -> None:
        entry = self.entries[-1]
        block = self.blocks.setdefault(entry[1], bytearray())
        body, tag, number = bytes([two]) * (one % 32), _TAGS[two % len(_TAGS)], self.head[3]
        length, odd = len(body), three % 8 if three > 127 else 8
        if odd < 3:
            number += (-1, 1, 100)[odd]
        elif odd == 3:
            number = _NUMBERS[one % len(_NUMBERS)]
        elif odd == 4:
            length += (-1, 1, 1 << 30, -1000)[one % 4]
        id_slot, tag_slot = b"\2id" if three % 2 else b"", bytes([len(tag)]) + tag
        middle = (two, number) if written == "B" else (1000 + two, number)
        head = _HEAD_OF[written].pack(
            _fit(entry[1] + len(block), 64),
            1000 + three if written == "B" else 0,
            id_slot,
            middle[0],
            _fit(number, 64),
            tag_slot,
            length,
        )
        if written == "C" and odd != 5:
            head = head[:8] + zlib.crc32(head[16:200]).to_bytes(8) + head[16:]
        block += head + body
        entry[2] = len(block)
        places.append(len(block))
        self.head[3] = number + 1

    def write(self, path: Path) -> None:
        for name in ("data", "reader"):
            (path / name).mkdir(parents=True, exist_ok=True)
        with open(path / f"{path.name}.idx", "wb") as file:
            file.write(struct.pack(">iiqq", *self.head))
            for block, entry in enumerate(self.entries, self.start):
                file.seek(1024 + 28 * (block % _RING))
                file.write(struct.pack(">qqiq", *entry))
            file.truncate(1024 + 28 * _RING)
        for base, content in self.blocks.items():
            if base >= 0:
                (path / "data" / f"{base:020d}.zbus").write_bytes(content)
        if self.reader is not None:
            (path / "reader" / "r.rdx").write_bytes(self.reader.ljust(1024, b"\0"))

    def entry(self, block: int) -> list[int]:
        place = (block - self.start) % _RING
        return self.entries[place] if place < len(self.entries) else [0, 0, 0, 0]


class Plain:
    """What is in such files, read as simply as it can be: raises `Refused` if the topic is not to be opened."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.dialect = "B" if folder.dialect in (None, "A") else "C" if folder.dialect == "C" else "B"
        version, count, self.start, self.number = folder.head
        if version != 1 or not 0 <= count <= _RING or self.start < 0 or self.number < 0:
            raise Refused
        if max(self.start, self.number) > 1 << 62:
            raise Refused  # no program has counted that far
        if count == 0:
            if any(map(len, folder.blocks.values())):
                raise Refused
            self.last = self.start
            return
        self.last = self.start + count - 1
        _, base, end, _ = folder.entry(self.last)
        if count > 1:
            _, base_before, end_before, _ = folder.entry(self.last - 1)
            if not end and base != base_before + end_before:
                self.last -= 1
        # The messages of the last block that has any must be as they should: by them the next one is numbered.
        block = self.last
        while True:
            base, size = self._entry(block)
            if block == self.last and base > 1 << 62:
                raise Refused
            if block == self.last and size > len(folder.blocks.get(base, b"")):
                raise Refused
            if size or block == self.start:
                break
            base_before, size_before = self._entry(block - 1)
            if base_before + size_before != base:
                raise Refused
            block -= 1
        if size:
            if self._read(base, 0, 204)[8:16] == zlib.crc32(self._read(base, 16, 184)).to_bytes(8) and self.dialect != "C":
                raise Refused
            for _, number, _ in self._messages(block, None):
                self.number = number + 1
        if not 0 <= self.number <= 1 << 62:
            raise Refused

    def _entry(self, block: int) -> tuple[int, int]:
        _, base, end, _ = self.folder.entry(block) if self.folder.head[1] else [0] * 4
        if base < 0 or not 0 <= end < 1 << 31:
            raise Refused
        return base, end

    def _read(self, base: int, at: int, size: int) -> bytes:
        data = bytes(self.folder.blocks.get(base, b"")[at : at + size])
        if len(data) < size:
            raise Refused
        return data

    def _messages(self, block: int, number: int | None) -> Iterator[tuple[int, int, Any]]:
        """Place, number and content of each message of a block; ``number``: which one is expected."""
        base, end = self._entry(block)
        at = 0
        while at < end:
            head = self._read(base, at, min(204, end - at))
            if len(head) < 204:
                raise Refused
            _, first, id, second, found, tag, length = _HEAD_OF["B"].unpack(head)
            if length < 0 or at + 204 + length > end or (number is not None and found not in (number - 1, number)):
                raise Refused
            if self.dialect == "C" and head[8:16] != zlib.crc32(head[16:200]).to_bytes(8):
                raise Refused
            corr_offset, timestamp = (second, first) if self.dialect == "B" else (0, second)
            texts = [slot[1 : 1 + min(slot[0], len(slot) - 1)].decode(errors="replace") or None for slot in (tag, id)]
            body = self._read(base, at + 204, length)
            yield at, found, zbus.Message(body, *texts, corr_offset, timestamp, found, base + at)
            number = found + 1
            at += 204 + length

    def messages(self) -> tuple[list[tuple[int, int, Any]], bool]:
        """Block, place and content of all messages up to one that is damaged, and whether there is none."""
        result: list[tuple[int, int, Any]] = []
        number: int | None = None
        with contextlib.suppress(Refused):
            for block in range(self.start, self.last + 1) if self.folder.head[1] else ():
                for at, found, message in self._messages(block, number):
                    if number is None and not 0 <= found <= self.number:
                        raise Refused
                    result.append((block, at, message))
                    number = found + 1
            return result, True
        return result, False

    def contiguous(self) -> bool:
        entries = [self.folder.entry(block) for block in range(self.start, self.last + 1)]
        return all(one[1] + one[2] == two[1] for one, two in pairwise(entries))


def _all_of(topic: Topic) -> tuple[list[Any], bool]:
    result = []
    with contextlib.suppress(Corrupt):
        for one in topic:
            result.append(one)
        return result, True
    return result, False


def _delivered(topic: Topic, name: str, filter: str | None) -> tuple[list[Any], bool]:
    result: list[Any] = []
    try:
        with topic.reader(name, filter) as reader:
            while len(result) < 1000:
                result.append(reader.read())
    except Empty:
        return result, True
    except Corrupt:
        return result, False
    raise AssertionError("the reader does not come to an end")


def _compare(found: tuple[list[Any], bool], expected: list[Any], whole: bool) -> None:
    """What was read before the damage was met may be less than there is: bytes are read a window at a time."""
    assert found[1] == whole
    assert found[0] == (expected if whole else expected[: len(found[0])])


def _tree(path: Path) -> dict[str, bytes]:
    own = (path.name + ".lock",)
    return {str(one): one.read_bytes() for one in path.rglob("*") if one.is_file() and one.name not in own}


def target_topic(data: bytes) -> None:
    folder, files = Folder(data), Watched()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "t")
        folder.write(path)
        before = _tree(path)
        try:
            plain = Plain(folder)
        except Refused:
            with contextlib.suppress(QewQewError):
                Topic(path, dialect=folder.dialect, _files=files).close()
                raise AssertionError("files that contradict themselves were opened") from None
            assert _tree(path) == before, "a refused opening has changed something"
            files.check()
            return
        expected, whole = plain.messages()
        all_of_them = [message for _, _, message in expected]
        with Topic(path, dialect=folder.dialect, _files=files) as t:
            assert t.dialect == plain.dialect
            _compare(_all_of(t), all_of_them, whole)
            t.verify()
            chosen = Filter(folder.filter)
            found, good = _delivered(t, "fresh", folder.filter)
            matching = [one for one in all_of_them if chosen.matches(one.tag)]
            # Where it is called again, a reader takes a message's own number for right: see `View.first_number`.
            _compare((found[: len(matching)], whole and good), matching, whole)
            assert len(found) == len(matching) or not whole
            if folder.reader is not None:
                _check_stored(t, folder, plain, expected, whole)
            if whole:
                assert t.append(b"n") == plain.number
        for base, content in folder.blocks.items():
            for block in range(plain.start, plain.last + 1) if folder.head[1] else ():
                entry = folder.entry(block)
                if entry[1] == base and entry[2] and 0 <= base < plain.folder.entry(plain.last)[1]:
                    assert (path / "data" / f"{base:020d}.zbus").read_bytes()[: entry[2]] == content[: entry[2]], (
                        "messages are gone"
                    )
        with Topic(path, _files=files) as t:
            again, good = _all_of(t)
            if whole:
                assert again.pop().body == b"n"
            _compare((again, good), all_of_them, whole)
        files.check()


def _check_stored(t: Topic, folder: Folder, plain: Plain, expected: list[tuple[int, int, Any]], whole: bool) -> None:
    """The reader that was there goes on where it was, if that is a place."""
    assert folder.reader is not None
    block, offset = struct.unpack_from(">qi", folder.reader)
    size = folder.reader[12]
    text = folder.reader[13 : 13 + size].decode(errors="replace") if size < 128 else None
    chosen = Filter(text or None) if len((text or "").encode()) < 128 else None
    found, good = _delivered(t, "r", None)
    if not whole or chosen is None or not plain.contiguous() or offset < 0:
        return  # there is no telling, but it has come to an end
    rest = [message for place, at, message in expected if (place, at) >= (block, offset) and chosen.matches(message.tag)]
    begins = any((place, at) == (block, offset) for place, at, _ in expected)
    outside = not plain.start <= block <= plain.last or offset >= plain._entry(block)[1]
    if begins:
        assert (found, good) == (rest, True)
    elif outside:  # a place that a server leaves, or an error
        assert (found, good) == (rest, True) or not (found or good)
    else:
        assert (found, good) == ([], False), "the reader stands between two messages"


# A manifest: JSON text, or (if the first byte is no brace) changes to a good one, each of a field and a value.

_SEGMENTS = {"q.1": [b"one", b"", b"three"], "q.2": [b"x" * 100, b"yy"]}


def _file(records: list[bytes]) -> bytes:
    frames = b"".join(struct.pack(">H", len(record)) + record for record in records)
    return POINTERS.pack(BEGIN, BEGIN + len(frames), 0) + frames


def good_manifest() -> dict[str, Any]:
    """The manifest of a batch of these two segments."""
    segments: list[dict[str, Any]] = []
    for name, records in _SEGMENTS.items():
        data = _file(records)
        boundaries = [[BEGIN + 2 + len(records[0]), 1]]
        segment = {"file": name, "start": BEGIN, "end": len(data), "records": len(records), "boundaries": boundaries}
        checksums = [f"{zlib.crc32(data[BEGIN : boundaries[0][0]]):08x}"]
        segments.append({**segment, "crc32": f"{zlib.crc32(data[BEGIN:]):08x}", "checksums": checksums})
    body = {"version": 1, "id": "q-1", "key": "k", "queue": "q", "layout": "chunk", "created": "2026-11-20T15:00:00Z"}
    payload = sum(len(record) for records in _SEGMENTS.values() for record in records)
    return {**body, "attempt": 1, "records": 5, "bytes": payload, "segments": segments}


_FIELDS: list[tuple[str | int, ...]] = [
    *((name,) for name in good_manifest()),
    ("segments", 0),
    *(("segments", number, name) for number in (0, 1) for name in ("file", "start", "end", "records", "crc32", "boundaries")),
    *(("segments", number, "boundaries", 0, place) for number in (0, 1) for place in (0, 1)),
    *(("segments", number, "checksums", *place) for number in (0, 1) for place in ((), (0,))),
]
_VALUES: list[Any] = [None, True, -1, 0, 1, 2, 3, 10, 11, 12, 15, 17, 19, 24, 118, 1 << 31, 1 << 70, 1.5, "", "q.1", "q.2", "q.3"]
_VALUES += [
    "../q.1",
    ".",
    "\ud800",
    "00000000",
    "x" * 300,
    [],
    {},
    [[15, 1], [17, 2]],
    [[15, 1], [15, 2]],
    [[15]],
    [1, 2],
    "chunk",
]


def edited(data: bytes) -> bytes:
    """A good manifest with some fields changed; an odd number in the first byte makes checksums and sums right again."""
    body = good_manifest()
    for place, value in zip(data[1::2], data[2::2], strict=False):
        holder: Any = body
        *path, name = _FIELDS[place % len(_FIELDS)]
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for step in path:
                holder = holder[step]
            if place >= 128 and type(holder[name]) is int:
                holder[name] += value - 128
            else:
                holder[name] = copy.deepcopy(_VALUES[value % len(_VALUES)])
    if data[0] % 2:
        with contextlib.suppress(KeyError, TypeError, AttributeError, IndexError):
            for segment in body["segments"]:
                frames = _file(_SEGMENTS[segment["file"]])[segment["start"] : segment["end"]]
                segment["crc32"] = f"{zlib.crc32(frames):08x}"
            body["records"] = sum(segment["records"] for segment in body["segments"])
            body["bytes"] = sum(segment["end"] - segment["start"] for segment in body["segments"]) - 2 * body["records"]
    return json.dumps(body).encode()


class _Nobody:
    """Leases whose owner is closed."""

    def is_kept(self, batch: Batch, directory: str) -> None:
        return None

    def check_ours(self, manifest_path: str) -> None:
        pass


def target_manifest(data: bytes) -> None:
    text = edited(data) if data and not data.startswith(b"{") else data
    with tempfile.TemporaryDirectory() as folder:
        for name, records in _SEGMENTS.items():
            Path(folder, name).write_bytes(_file(records))
        Path(folder, manifest.MANIFEST).write_bytes(text)
        try:
            body = manifest.load(folder)
        except BadManifest as error:
            if error.path == os.path.join(folder, manifest.MANIFEST):
                return
            raise
        assert manifest.parse(json.loads(body.to_json()), "again") == body
        body = replace(body, created="1970-01-01T00:00:00Z")
        Path(folder, manifest.MANIFEST).write_bytes(body.to_json())
        state = BatchState(body.id, [body.key], "leased", 1, body.records, body.bytes, 0, 0)
        batch = Batch(None, _Nobody(), state, folder, NO_CLOCK)  # type: ignore[arg-type]
        found = None
        with contextlib.suppress(BadManifest, Corrupt):
            found = list(batch)
        assert found == plain_segments(folder, body)
        assert found is None or (len(found), sum(map(len, found))) == (body.records, body.bytes)
        # The boundaries matter only to who reads in small runs.
        for segment in body.segments:
            with contextlib.suppress(Corrupt, ValueError):
                runs = [(count, split(data)[0]) for count, data in segments.read_segment(folder, segment, 1)]
                if all(count == len(records) for count, records in runs):
                    assert [one for _, records in runs for one in records] == plain_segment(folder, segment), "wrong records"


def plain_segments(folder: str, body: manifest.Manifest) -> list[bytes] | None:
    """The records, if all that the manifest says about its segments is true."""
    segments = [plain_segment(folder, segment) for segment in body.segments]
    return None if None in segments else [record for records in segments for record in records or []]


def plain_segment(folder: str, segment: manifest.Segment) -> list[bytes] | None:
    frames = Path(folder, segment.file).read_bytes()[segment.start : segment.end]
    found, _, whole = plain_split(frames, None)
    right = whole and len(found) == segment.records and f"{zlib.crc32(frames):08x}" == segment.crc32
    return found if right else None


# The request of a stage: a byte that says whether the checksum is made right (1) and the sizes of runs are (2), and its bytes
# behind the checksum. A leader puts it as it is, or leaves it to its stage, or sets it aside.

_TERMS = group_commit.Terms(64, 7)
_STORED = b"stored already.."


def plain_request(data: bytes) -> tuple[bytes | None, list[bytes]] | str:
    """Its key and records; else what it becomes."""
    head = data[:40]
    if len(head) < 40 or head[:20] != b"QEWQPUT1" + _TERMS.chunk_size.to_bytes(4) + _TERMS.min_free_bytes.to_bytes(8):
        return ".put"
    key, runs = head[20:36], int.from_bytes(head[36:])
    at, records = 40 + 8 * runs, list[bytes]()
    if at > len(data):
        return ".refused"
    for run in range(40, at, 8):
        count, size = int.from_bytes(data[run : run + 4]), int.from_bytes(data[run + 4 : run + 8])
        found, end, whole = plain_split(data[at : at + size], None)
        most = max(map(len, found), default=MAX_BYTES)  # and no run is empty
        if not whole or (len(found), end) != (count, size) or 2 + most > _TERMS.chunk_size - BEGIN:
            return ".refused"
        records += found
        at += size
    if at != len(data):
        return ".refused"
    return ".put" if key == _STORED else (None if key == bytes(16) else key, records)


def target_request(data: bytes) -> None:
    flags, rest = data[0] if data else 0, data[1:]
    if flags & 2 and len(rest) >= 40:
        runs = min(int.from_bytes(rest[36:40]), (len(rest) - 40) // 8)
        rest = rest[:36] + runs.to_bytes(4) + rest[40:]
    checksum = zlib.crc32(rest) if flags & 1 else 0
    expected = plain_request(rest) if checksum == zlib.crc32(rest) else ".put"
    with tempfile.TemporaryDirectory() as folder:
        staged, name, files = Path(folder, "q.staged"), "1-a.0123456789abcdef", Watched()
        staged.mkdir()
        (staged / f"{name}.put").write_bytes(checksum.to_bytes(4) + rest)
        asked = group_commit.keys_asked(files, f"{folder}/q")
        assert set(asked) <= {rest[20:36]}
        assert not any(asked.values())
        puts = list(group_commit.take_along(files, f"{folder}/q", _TERMS, lambda key: key == _STORED))
        found = [(put.key, [one for run in put.framed for one in plain_split(bytes(run.frames), None)[0]]) for put in puts]
        suffix = expected if isinstance(expected, str) else ".taken"
        assert found == ([] if isinstance(expected, str) else [expected])
        assert os.listdir(staged) == [name + suffix]
        files.check()
        if found:
            group_commit.give_back(files, puts)
            assert os.listdir(staged) == [f"{name}.put"]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "split": target_split,
    "chain": target_chain,
    "log": target_log,
    "manifest": target_manifest,
    "topic_log": target_topic_log,
    "reader_log": target_reader_log,
    "topic": target_topic,
    "request": target_request,
}
CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 4096  # of a file of the corpus


def use_private_directory() -> None:
    """For this process: the temporary directories that targets make go with it, also those of an input that failed."""
    tempfile.tempdir = tempfile.mkdtemp(prefix="fuzz")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
