"""The bytes of one file as a ruler: every field in order, each byte in one of them, and where the file is damaged.

The modules that own the formats say where their fields lie (their ``Struct``) and what is damage (what they raise). Here
stand only the names of the fields. Nothing is locked or changed; a file that is in use may look torn.
"""

from __future__ import annotations

import enum
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from qewqew_core import block_sums, chunk, inspection, journal, layout, manifest, reader_log, stamp, topic_log, zbus
from qewqew_core import log as logs
from qewqew_core.errors import CorruptQueue, QewQewError
from qewqew_core.files import Files
from qewqew_core.view import View

_MEMBER = re.compile(r'[\s{,]*(?=")')  # what stands in front of one of a JSON object
_STEP = 1 << 20
_BIGGEST_VALUE = 1 << 12  # of a record or body: more of it is not decoded


class Kind(enum.StrEnum):
    """What a file is."""

    HEADER = "header"
    CHUNK = "chunk"
    LOG = "log"
    BLOCK = "block"
    INDEX = "index"
    READER = "reader"
    NAK = "nak"
    SUMS = "sums"
    STAMP = "stamp"
    MANIFEST = "manifest"


class Field(NamedTuple):
    """Some bytes of the file; ``length`` 0: something that is to be said at this place."""

    offset: int
    length: int
    name: str
    value: Any = None  # int or str; None: only the bytes say it
    part: str = ""  # of what it is a field: "record 3", "frame 7, commit" …
    damage: str | None = None


@dataclass(frozen=True)
class Source:
    """The file, for reading."""

    path: str
    size: int
    read: Callable[[int, int], bytes]  # offset, size; less where the file ends


def kind_of(path: str) -> Kind | None:
    """What the file is, by its name; None where that does not say it."""
    name = os.path.basename(path)
    for kind, pattern in (
        (Kind.MANIFEST, r"manifest\.json"),
        (Kind.LOG, r".+\.log(\.tmp)?"),
        (Kind.BLOCK, r"\d{20}\.zbus"),
        (Kind.SUMS, r"\d{20}\.sums"),
        (Kind.STAMP, r".+\.stamp"),
        (Kind.INDEX, r".+\.idx"),
        (Kind.READER, r".+\.rdx"),
        (Kind.NAK, r".+\.nak"),
        (Kind.CHUNK, r".+\.[1-9]\d{0,4}"),
    ):
        if re.fullmatch(pattern, name):
            return kind
    if os.path.exists(path + layout.LOG) or (os.path.isfile(path) and os.path.getsize(path) == chunk.FIRST.size):
        return Kind.HEADER
    return None


def fields(source: Source, kind: Kind) -> Iterator[Field]:
    """All fields of the file, in order."""
    if kind is Kind.MANIFEST:  # between the members of JSON lies punctuation
        yield from _manifest(source)
        return
    at = 0
    for one in _FORMATS[kind](source):
        if one.length and one.offset > at:
            yield _unused(source, at, one.offset)
        yield one
        at = max(at, one.offset + one.length)
    if at < source.size:
        yield _unused(source, at, source.size)


def _unused(source: Source, start: int, end: int) -> Field:
    zeros = all(not source.read(at, min(_STEP, end - at)).strip(b"\0") for at in range(start, end, _STEP))
    return Field(start, end - start, "unused", "zeros" if zeros else "what was here before")


# Structs


def _struct(one: struct.Struct, names: str, data: bytes, at: int = 0, base: int = 0, part: str = "") -> Iterator[Field]:
    """The fields of ``one`` at ``data[at:]``, which is at ``base + at`` in the file."""
    if at + one.size > len(data):
        yield Field(base + at, len(data) - at, names.split()[0], None, part, f"the file ends in the middle of: {names}")
        return
    sizes = [struct.calcsize(">" + item) for item in re.findall(r"\d*[a-zA-Z?]", one.format)]
    for size, name, value in zip(sizes, names.split(), one.unpack_from(data, at), strict=True):
        yield Field(base + at, size, name, _value(name, value), part)
        at += size


def _value(name: str, value: Any) -> Any:
    if name in ("id", "tag", "filter", "creator", "extension"):
        return zbus.slot_text(value, 0, len(value))
    if name in ("crc32", "generation"):
        return f"{value:08x}"
    if name == "key":
        return value.hex()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _what(error: CorruptQueue, source: Source) -> str:
    """What the error says, without the place."""
    return str(error).removeprefix(f"{source.path}, offset {error.offset}: ")


def _text(data: bytes) -> str | None:
    """What a record says, if it is text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode() if len(data) == _BIGGEST_VALUE and error.start > len(data) - 4 else None


# Queues


def _header(source: Source) -> Iterator[Field]:
    yield from _struct(chunk.FIRST, "first", source.read(0, chunk.FIRST.size))


class _Content(NamedTuple):
    """What somebody else says of a chunk file or block: where its records lie, and checksums."""

    start: int
    end: int
    checked: list[_Piece]
    pending: list[tuple[int, bytes]]  # what is not in the file yet


class _Piece(NamedTuple):
    """Whole records, and the crc32 with which their checksum goes on from what lies before them."""

    start: int
    end: int
    crc_before: int
    crc: int


def _pieces(marks: Iterable[tuple[int, int]]) -> list[_Piece]:
    """``marks``: offsets at which records begin or end, each with the crc32 of what lies before it."""
    return [_Piece(start, end, before, crc) for (start, before), (end, crc) in pairwise(marks) if start < end]


def _chunk(source: Source) -> Iterator[Field]:
    yield from _struct(chunk.POINTERS, "head tail next", data := source.read(0, chunk.BEGIN))
    if len(data) < chunk.BEGIN:
        return
    head, tail, _ = chunk.POINTERS.unpack(data)
    if tail == 0:  # never initialised
        return
    if not chunk.BEGIN <= head <= tail <= source.size:
        yield Field(0, 0, "pointers", damage=f"no records lie from {head} to {tail} in a file of {source.size} bytes")
    content = _segment(source) or _of_queue(source) or _Content(head, tail, [], [])
    if (content.start, content.end) != (head, tail) and content.checked:
        yield Field(0, 0, "records", f"from {content.start} to {content.end}: the pointers are stored later than the log")
    if content.start > chunk.BEGIN:
        yield Field(chunk.BEGIN, content.start - chunk.BEGIN, "taken", "records that are taken")
    yield from _records(source, content)


def _of_queue(source: Source) -> _Content | None:
    """What the log of the queue says of this chunk file, if there is one, and it does."""
    queue, _, number = source.path.rpartition(".")
    if not number.isdecimal() or not os.path.exists(queue + layout.LOG):
        return None
    try:
        found = inspection.snapshot(queue)
    except (QewQewError, OSError):
        return None  # see the log's own dump
    for one in found.chunks:
        if one.id == int(number):
            marks = [*((piece.offset, piece.crc) for piece in one.pieces), (one.tail, one.crc)]
            return _Content(one.head, one.tail, _pieces(marks), found.pending.get(one.id, []))
    return None


def _segment(source: Source) -> _Content | None:
    """What the manifest beside a file of a batch says of it."""
    directory, name = os.path.split(source.path)
    if not os.path.exists(os.path.join(directory, manifest.MANIFEST)):
        return None
    try:
        segments = [one for one in manifest.load(directory).segments if one.file == name]
    except (QewQewError, OSError):
        return None
    checked: list[_Piece] = []
    for one in segments:
        inner = zip(one.boundaries, one.checksums, strict=True) if one.splittable else ()
        marks = [(one.start, one.seed), *((offset, crc) for (offset, _), crc in inner), (one.end, one.crc32)]
        checked += _pieces((offset, int(crc, 16)) for offset, crc in marks)
    return _Content(segments[0].start, segments[-1].end, checked, []) if segments else None


def _records(source: Source, content: _Content) -> Iterator[Field]:
    number, at = 0, content.start
    end = min(content.end, *(offset for offset, _ in content.pending), source.size)
    if content.end > source.size:
        yield Field(source.size, 0, "records", damage=f"the file ends before its last record, which ends at {content.end}")
    wrong = _wrong(source, content)
    while at < end:
        yield from _reached(wrong, at)
        part = f"record {number}"
        length = source.read(at, chunk.LENGTH.size)
        after = at + 2 + int.from_bytes(length)
        if len(length) < 2 or after > end:
            after = _next_piece(content, at, end)
            yield Field(at, after - at, "record", None, part, f"no record begins here: it would run past {end}")
        else:
            yield from _struct(chunk.LENGTH, "length", length, base=at, part=part)
            payload = source.read(at + 2, min(after - at - 2, _BIGGEST_VALUE))
            yield Field(at + 2, after - at - 2, "payload", _text(payload), part)
        at, number = after, number + 1
    yield from _reached(wrong, max(at, content.end))
    if at < content.end:
        yield Field(at, 0, "records", f"{content.end - at} more bytes of records are in the transaction log only")


def _wrong(source: Source, content: _Content) -> list[Field]:
    """Where the bytes do not have the checksum with which they were committed."""
    found = []
    for start, end, crc, right in content.checked:
        if end <= content.start or (end > source.size and not content.pending):
            continue
        for at in range(start, end, _STEP):
            stop = min(at + _STEP, end)
            crc = zlib.crc32(inspection.with_pending(source.read(at, stop - at), at, stop, content.pending), crc)
        if crc != right:
            text = f"the bytes {start} to {end} do not have the checksum with which they were committed"
            found.append(Field(start, 0, "checksum", f"{crc:08x}, not {right:08x}", "", text))
    return found


def _next_piece(content: _Content, at: int, end: int) -> int:
    """Where records can be found again behind ``at``."""
    return min((one.start for one in content.checked if at < one.start < end), default=end)


def _reached(wrong: list[Field], at: int) -> Iterator[Field]:
    while wrong and wrong[0].offset <= at:
        yield wrong.pop(0)


# Logs: their frames


@dataclass(frozen=True)
class _Log:
    """One of the three kinds of logs."""

    magic: bytes
    kinds: dict[int, str]
    first: tuple[int, ...]  # kinds that the snapshot begins with
    appended: tuple[int, ...]
    replay: Callable[[bytes, str], object]  # raises `CorruptQueue`
    body: Callable[[str, bytes, int, int], Iterator[Field]]  # kind, data, begin and end of a frame's body


def _log(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    one = next((one for one in _LOGS if one.magic == data[:8]), _LOGS[0])
    problem: CorruptQueue | None = None
    try:
        one.replay(data, source.path)
    except CorruptQueue as error:
        problem = error
    told = problem is None
    where, what = (problem.offset or 0, _what(problem, source)) if problem else (-1, "")
    if not told and where < journal.BEGIN:
        told = True
        yield Field(0, 0, "head", damage=what)
    yield from _struct(journal._HEAD, "magic generation crc32", data)
    generation = journal.find_generation(data, one.magic, one.first)
    if generation is None:
        if len(data) > journal.BEGIN:
            yield Field(journal.BEGIN, len(data) - journal.BEGIN, "frames", "unknown: the head is damaged")
        return
    at = journal.BEGIN
    whole = list(journal.frames(data, generation))
    behind = journal.find_frames(data, generation, whole[-1].end if whole else at, one.appended)
    for number, frame in enumerate(chain(whole, behind)):
        if frame.start > at:
            told = True
            yield Field(at, frame.start - at, "frame", None, "damage", "a frame of the log is damaged")
        part = f"frame {number}, {one.kinds.get(frame.kind, f'kind {frame.kind}')}"
        if not told and where == frame.start:
            told = True
            yield Field(frame.start, 0, "frame", None, part, what)
        yield from _struct(journal._FRAME, "length crc32 durable kind", data, frame.start, part=part)
        yield from _body(one, frame, part)
        at = frame.end
    if not told:
        yield Field(at, 0, "frame", damage=what)
    written = len(data.rstrip(b"\0"))
    if written > at:
        yield Field(at, written - at, "torn", "the end of a commit that has not happened" if problem is None else None)


def _body(one: _Log, frame: journal.Frame, part: str) -> Iterator[Field]:
    """The fields of a frame's body; what does not look like one is one field."""
    base = at = frame.end - len(frame.body)
    try:
        for field in one.body(one.kinds.get(frame.kind, ""), frame.body, 0, len(frame.body)):
            yield field._replace(offset=base + field.offset, part=part)
            at = base + field.offset + field.length
    except logs.NONSENSE:
        pass
    if at < frame.end:
        yield Field(at, frame.end - at, "body", None, part)


def _json(data: bytes, at: int, end: int) -> Iterator[Field]:
    if at < end:
        yield Field(at, end - at, "json", data[at:end].decode())


def _list(one: struct.Struct, names: str, data: bytes, at: int, count: int) -> Iterator[Field]:
    for place in range(at, at + one.size * count, one.size):
        yield from _struct(one, names, data, place)


_Operations = dict[bytes, tuple[struct.Struct, str]]


def _commit(operations: _Operations, texts: bytes, data: bytes, at: int, end: int) -> Iterator[Field]:
    """The time, then operations; behind those of ``texts`` JSON, behind an ``A`` what was appended, as long as they say."""
    yield from _struct(logs._TIME, "time", data, at)
    at += logs._TIME.size
    while at < end:
        letter = data[at : at + 1]
        one, names = operations[letter]
        yield from _struct(one, names, data, at)
        size = one.unpack_from(data, at)[-1]
        at += one.size
        if letter == b"A":
            yield Field(at, size, "appended")
        elif letter in texts:
            yield from _json(data, at, at + size)
        at += size if letter in b"A" + texts else 0


_QUEUE_OPERATIONS: _Operations = {
    b"A": (logs._INLINE, "operation chunk records bytes"),
    b"X": (logs._EXTENT, "operation chunk records bytes crc32"),
    b"G": (logs._TAKE, "operation chunk start end records"),
    b"N": (logs._NEW, "operation chunk size"),
    b"K": (logs._PUT_KEY, "operation key records"),
    b"J": (logs._JSON, "operation length"),
}
_TOPIC_OPERATIONS: _Operations = {
    b"A": (topic_log._INLINE, "operation messages bytes"),
    b"X": (topic_log._EXTENT, "operation messages bytes crc32 synced"),
    b"B": (topic_log._BLOCK, "operation created"),
    b"K": (topic_log._PUT_KEY, "operation key messages"),
    b"T": (topic_log._TRIM, "operation blocks"),
    b"S": (topic_log._SESSION, "operation length"),
}


def _queue_body(kind: str, data: bytes, at: int, end: int) -> Iterator[Field]:
    if kind == "commit":
        yield from _commit(_QUEUE_OPERATIONS, b"J", data, at, end)
    elif kind == "checkpoint":
        yield from _struct(logs._SEAL, "log_inode header_inode header_changed", data, at)
    elif kind == "end":
        yield from _struct(logs._SNAPSHOT_END, "frames changes", data, at)
    elif kind == "put keys":
        yield from _list(logs._KEY, "key time records", data, at, (end - at) // logs._KEY.size)
    elif kind == "expired keys":
        yield from _list(logs._KEY, "key time number", data, at, (end - at) // logs._KEY.size)
    elif kind == "batch":
        yield from _struct(logs._COUNT, "length", data, at)
        (size,) = logs._COUNT.unpack_from(data, at)
        at += logs._COUNT.size
        yield from _json(data, at, at + size)
        yield from _chunks(data, at + size, end)
    else:
        yield from _chunks(data, at, end)


def _chunks(data: bytes, at: int, end: int) -> Iterator[Field]:
    while at < end:
        yield from _struct(logs._CHUNK, "chunk size base head tail taken records crc32", data, at)
        at += logs._CHUNK.size
        yield from _struct(logs._COUNTS, "pieces gaps", data, at)
        pieces, gaps = logs._COUNTS.unpack_from(data, at)
        at += logs._COUNTS.size
        yield from _list(logs._PIECE, "offset records crc32 time", data, at, pieces)
        at += logs._PIECE.size * pieces
        yield from _list(logs._SPAN, "start end records", data, at, gaps)
        at += logs._SPAN.size * gaps


def _topic_body(kind: str, data: bytes, at: int, end: int) -> Iterator[Field]:
    if kind == "commit":
        yield from _commit(_TOPIC_OPERATIONS, b"S", data, at, end)
    elif kind == "put keys":
        yield from _list(topic_log._KEY, "key time messages", data, at, (end - at) // topic_log._KEY.size)
    elif kind == "unsynced":
        yield Field(at, end - at, "boot", data[at:end].decode())
    else:
        yield from _json(data, at, end)


def _reader_body(kind: str, data: bytes, at: int, end: int) -> Iterator[Field]:
    yield from _json(data, at, end)


_LOGS = (
    _Log(
        logs.MAGIC,
        dict(zip(logs._KINDS, ("chunk", "batch", "put keys", "expired keys", "end", "commit", "checkpoint"), strict=True)),
        logs._OF_SNAPSHOT,
        logs._APPENDED,
        logs.replay,
        _queue_body,
    ),
    _Log(
        topic_log.MAGIC,
        {
            topic_log._SNAPSHOT: "snapshot",
            topic_log._PUT_KEYS: "put keys",
            topic_log._END: "end",
            topic_log.COMMIT: "commit",
            topic_log.CHECKPOINT: "checkpoint",
            topic_log.UNSYNCED: "unsynced",
        },
        (topic_log._SNAPSHOT,),
        (topic_log.COMMIT, topic_log.CHECKPOINT, topic_log.UNSYNCED),
        topic_log.replay,
        _topic_body,
    ),
    _Log(
        reader_log.MAGIC,
        {reader_log._SNAPSHOT: "snapshot", reader_log.OPERATION: "operation", reader_log.CHECKPOINT: "checkpoint"},
        (reader_log._SNAPSHOT,),
        (reader_log.OPERATION, reader_log.CHECKPOINT),
        reader_log.replay,
        _reader_body,
    ),
)


# Topics


def _block(source: Source) -> Iterator[Field]:
    content, dialect = _of_topic(source)
    if content.end > source.size:
        yield Field(source.size, 0, "messages", damage=f"the file ends before the messages do, which end at {content.end}")
    end = min(content.end, source.size)
    wrong = _wrong(source, content)
    at, number = min(content.start, end), None
    if at:
        yield Field(0, at, "others", "messages that do not belong to the batch")
    head, names = (
        (zbus._HEAD_C, "offset crc32 id timestamp number tag length")
        if dialect == "C"
        else (zbus._HEAD_B, "offset timestamp id corr_offset number tag length")
    )
    while at < end:
        yield from _reached(wrong, at)
        data = source.read(at, min(zbus.HEAD, end - at))
        try:
            after, number = zbus.check_head(data, at, at, end, number, dialect, source.path)
        except CorruptQueue as error:
            after = _next_piece(content, at, end)
            what = _what(error, source)
            yield Field(at, after - at, "message", None, "damage", what)
            at, number = after, None
            continue
        part = f"message {number}"
        yield from _struct(head, names, data, base=at, part=part)
        body = after - at - zbus.HEAD
        yield Field(at + zbus.HEAD, body, "body", _text(source.read(at + zbus.HEAD, min(body, _BIGGEST_VALUE))), part)
        at, number = after, number + 1
    yield from _reached(wrong, max(at, content.end))


def _of_topic(source: Source) -> tuple[_Content, str]:
    """What the topic, or the manifest of a batch, says of a block: messages, and the dialect."""
    if segment := _segment(source):
        return segment, manifest.load(os.path.dirname(source.path)).dialect or "B"
    dialect = "C" if source.size >= zbus.HEAD and zbus.crc_is_right(source.read(0, zbus.HEAD), 0) else "B"
    files, topic, base = Files(), os.path.dirname(os.path.dirname(source.path)), int(os.path.basename(source.path)[:20])
    try:
        view = View.of(files, topic)
    except (QewQewError, OSError):
        return _Content(0, source.size, [], []), dialect  # nobody says where the messages end
    try:
        entry = next((one for one in view.entries(view.index()) if one.base == base), None)
        pieces = block_sums.pieces_of(files, topic, base) if entry else []
        checked = _pieces((one.offset, one.crc) for one in pieces)
        return _Content(0, entry.end if entry else source.size, checked, []), view.dialect
    except (QewQewError, OSError):
        return _Content(0, source.size, [], []), dialect
    finally:
        view.close()


def _common(data: bytes) -> Iterator[Field]:
    yield from _struct(zbus._COMMON, "mask updated created", data, zbus._COMMON_AT)
    slot = struct.Struct(f">{zbus.SLOT}s")
    yield from _struct(slot, "creator", data, zbus.CREATOR_AT)
    for number in range(4):
        yield from _struct(slot, "extension", data, zbus._EXT_AT + number * zbus.SLOT)


def _index(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    yield from _struct(zbus._INDEX, "version blocks start number", data)
    yield from _common(data)
    try:
        index = zbus.unpack_index(data, source.path)
    except CorruptQueue as error:
        yield Field(0, 0, "index", damage=_what(error, source))
        return
    for block in sorted(range(index.start, index.start + index.blocks), key=zbus.entry_at):
        yield from _struct(zbus._ENTRY, "created base end updated", data, zbus.entry_at(block), part=f"block {block}")


def _reader(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    yield from _struct(zbus._READER, "block offset", data)
    yield from _struct(struct.Struct(f">{zbus.SLOT}s"), "filter", data, zbus.FILTER_AT)
    yield from _common(data)


def _nak(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    yield from _struct(zbus._NAK, "window timeout", data)
    yield from _common(data)
    dialect = "C" if source.size == zbus.nak_size("C") else "B"
    names = "used offset tries updated" if dialect == "C" else "used offset id tries updated"
    for number in zbus.unpack_naks(data, dialect):
        yield from _struct(zbus._NAK_ENTRIES[dialect], names, data, zbus.nak_entry_at(number, dialect), part=f"entry {number}")


def _sums(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    try:
        topic_log.unpack_sums(data, source.path)
    except CorruptQueue as error:
        yield Field(0, 0, "checksums", damage=_what(error, source))
    yield Field(0, len(data[:8]), "magic", data[:8].decode(errors="replace"))
    pieces = (len(data) - 8 - topic_log._CRC.size) // topic_log._PIECE.size
    yield from _list(topic_log._PIECE, "offset messages crc32 time", data, 8, max(pieces, 0))
    yield from _struct(topic_log._CRC, "crc32", data, max(8, 8 + pieces * topic_log._PIECE.size))


def _stamp(source: Source) -> Iterator[Field]:
    data = source.read(0, source.size)
    if not stamp.unpack(data):
        yield Field(0, 0, "stamp", damage="it cannot be read: it says nothing")
    yield from _struct(stamp.BODY, "magic changes", data)
    yield from _struct(stamp.CRC, "crc32", data, min(len(data), stamp.BODY.size))


# Manifests


def _manifest(source: Source) -> Iterator[Field]:
    """The members of the JSON object, each up to the next."""
    data = source.read(0, source.size)
    text = data.decode("latin-1")  # in which places are those in the file
    decode, at, end = json.JSONDecoder(strict=False).raw_decode, 0, 0
    members = []
    problem: str | None = None
    try:
        manifest.load(source.path)
    except (QewQewError, OSError) as error:
        problem = str(error).removeprefix(f"{source.path}: ")
    try:
        while start := _MEMBER.match(text, end):
            name, colon = decode(text, at := start.end())
            begin = colon + len(text[colon:]) - len(text[colon:].lstrip(" \t\r\n:"))
            _, end = decode(text, begin)
            members.append(Field(at, end - at, name, data[begin:end].decode(errors="replace")))
    except ValueError as error:
        problem = problem or f"this is no JSON object: {error}"
    if problem:
        yield Field(0 if members and text[end:].strip() == "}" else end, 0, "manifest", damage=problem)
    yield from members


_FORMATS: dict[Kind, Callable[[Source], Iterable[Field]]] = {
    Kind.HEADER: _header,
    Kind.CHUNK: _chunk,
    Kind.LOG: _log,
    Kind.BLOCK: _block,
    Kind.INDEX: _index,
    Kind.READER: _reader,
    Kind.NAK: _nak,
    Kind.SUMS: _sums,
    Kind.STAMP: _stamp,
}
