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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qewqew_core import BadManifest, BadPath, Batch, CorruptQueue, Queue, journal, manifest
from qewqew_core import log as logs
from qewqew_core.chunk import BEGIN, MAX_ID, POINTERS, frame, split, successor
from qewqew_core.files import Files
from qewqew_core.state import BatchState, State

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
            with contextlib.suppress(CorruptQueue, BadPath):
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
                assert left[number] == content, "a file that nothing refers to was changed"
        with Queue(path, chunk_size=chunk_size, _files=NoSync()) as q:
            assert q.get_many(1 << 20) == [*expected, b"n"]


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The transaction log: bytes of a log or (if it does not begin as one) four bytes for each operation of one. They are replayed
# as they are; with all checksums made right, so that what the fuzzer writes gets behind them; and so with one byte damaged.


def repaired(data: bytes) -> bytes:
    """The log with its head, its checksums, the count of the end frame and lengths that run past the end made right."""
    head = journal._HEAD
    generation = head.unpack_from(data.ljust(head.size, b"\0"))[1]
    begin = head.pack(logs.MAGIC, generation, 0)[:-4]
    result, at, frames = [begin + zlib.crc32(begin).to_bytes(4)], head.size, 0
    while at + journal._FRAME.size <= len(data):
        length, _, durable, kind = journal._FRAME.unpack_from(data, at)
        at += journal._FRAME.size
        body = data[at : at + length]
        if kind == logs._END:
            body = frames.to_bytes(4)
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
    "chunks": [65534, 65533],
    "files": ["q.1", "q.2"],
}
_ARGUMENTS |= {"ids": ["q-0123456789abcdef"], "keep_manifest": True, "chunk": 1, "cut": _PART[1], "new": 3, "size": 64}
_PARTS: list[Any] = [[[1, None]], [[2, None]], [], [[1, _PART[1]]], [[1]], [[7, None]]]
_ODD: list[Any] = [None, -1, 1 << 40, 1.5, True, [], [[]], {}, "", "q-1", [1], [1, 2], ["q-1"], [None], *_PARTS]


def scripted(data: bytes) -> bytes:
    """A log with right checksums whose operations are right, or nearly so."""
    parts, operations = [logs.snapshot(State(), 7)], b""
    for kind, one, two, three in zip(data[1::4], data[2::4], data[3::4], data[4::4], strict=False):
        chunk_id, offset = one % 4, BEGIN + two % 64
        if kind % 8 == 0:
            operations += logs.inline(chunk_id, two % 4, frame([b"x"] * (two % 4)))
        elif kind % 8 == 1:
            operations += logs.extent(chunk_id, two % 4, three, 0)
        elif kind % 8 == 2:
            operations += logs.take(chunk_id, offset, BEGIN + three % 64, one // 4)
        elif kind % 8 == 3:
            operations += logs.new_chunk(chunk_id, offset)
        elif kind % 8 == 4:
            operations += logs.put_key(bytes([one]) * 16, two)
        elif kind % 8 == 5:
            arguments = dict(_ARGUMENTS, state=("acked", "returned", "dead")[one % 3])
            if two < 128:  # a key is a str, even in nonsense
                name = list(arguments)[two % len(arguments)]
                arguments[name] = str(three) if name == "key" else _ODD[three % len(_ODD)]
            operations += logs.rare(sorted(logs._RARE)[one % len(logs._RARE)], **arguments)
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
    except CorruptQueue as caught:
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
        offsets = [one.start for one in salvaged.frames]
        assert offsets == sorted(set(offsets))


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
        segments.append({**segment, "crc32": f"{zlib.crc32(data[BEGIN:]):08x}"})
    body = {"version": 1, "id": "q-1", "key": "k", "queue": "q", "layout": "chunk", "created": "2026-11-20T15:00:00Z"}
    payload = sum(len(record) for records in _SEGMENTS.values() for record in records)
    return {**body, "attempt": 1, "records": 5, "bytes": payload, "segments": segments}


_FIELDS: list[tuple[str | int, ...]] = [
    *((name,) for name in good_manifest()),
    ("segments", 0),
    *(("segments", number, name) for number in (0, 1) for name in ("file", "start", "end", "records", "crc32", "boundaries")),
    *(("segments", number, "boundaries", 0, place) for number in (0, 1) for place in (0, 1)),
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
        batch = Batch(None, BatchState(body.id, [body.key], "leased", 1, body.records, body.bytes, 0, 0), folder)  # type: ignore[arg-type]
        found = None
        with contextlib.suppress(BadManifest, CorruptQueue):
            found = list(batch)
        assert found == plain_segments(folder, body)
        assert found is None or (len(found), sum(map(len, found))) == (body.records, body.bytes)
        # The boundaries matter only to who reads in small runs.
        for segment in body.segments:
            with contextlib.suppress(CorruptQueue, ValueError):
                runs = [(count, split(data)[0]) for count, data in manifest.read_segment(folder, segment, 1)]
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


TARGETS: dict[str, Callable[[bytes], None]] = {
    "split": target_split,
    "chain": target_chain,
    "log": target_log,
    "manifest": target_manifest,
}
CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 4096  # of a file of the corpus


def use_private_directory() -> None:
    """For this process: the temporary directories that targets make go with it, also those of an input that failed."""
    tempfile.tempdir = tempfile.mkdtemp(prefix="fuzz")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
