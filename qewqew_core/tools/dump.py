"""What one file says: its heads, records, messages and frames, decoded, each with its offset.

The modules that own the formats decode. A line is marked as damaged if the file contradicts itself: a frame with a wrong
checksum, a record that runs past the end. `verify` also checks what other files say, above all the checksums of records.
Nothing is locked or changed; a file in use may look torn.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from qewqew_core import clock as clocks
from qewqew_core.batch.batch_state import batch_fields
from qewqew_core.clock import Clock
from qewqew_core.disk import journal
from qewqew_core.disk.files import look_into
from qewqew_core.errors import Corrupt, QewQewError
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths, stamp
from qewqew_core.queue.state import State
from qewqew_core.topic import reader_log, topic_log
from qewqew_core.topic.reader_state import Change, Lease
from qewqew_core.topic.view import View


class FileKind(enum.StrEnum):
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


class Line(NamedTuple):
    """What is at an offset of the file; values are text, numbers, bytes, and lists and dictionaries of them."""

    offset: int
    what: str
    fields: dict[str, Any]
    damage: str | None = None


@dataclass(frozen=True)
class File:
    """The file, for reading."""

    path: str
    size: int
    read: Callable[[int, int], bytes]  # offset, size; less where the file ends
    whole: Callable[[], bytes]  # as `read_all`
    most: int  # bytes of a record or body that are shown


def kind_by_name(path: str) -> FileKind | None:
    """What kind of file this is, by its name; None if the name does not say."""
    name = os.path.basename(path)
    for kind, (pattern, _) in _FORMATS.items():
        if re.fullmatch(pattern, name):
            return kind
    if os.path.exists(path + paths.LOG) or (os.path.isfile(path) and os.path.getsize(path) == chunk.FIRST.size):
        return FileKind.HEADER
    return None


def lines(file: File, kind: FileKind) -> Iterator[Line]:
    """What the file says, in order. The last line marks damage if nothing after it can be read."""
    try:
        _, decode = _FORMATS[kind]
        yield from decode(file)
    except Corrupt as error:
        yield Line(error.offset or 0, kind, {}, error.what)
    except journal.NONSENSE:
        yield Line(file.size, kind, {}, "the file ends too early")


# Queues


def _header(file: File) -> Iterator[Line]:
    (first,) = chunk.FIRST.unpack_from(file.whole())
    yield Line(0, "header", {"first": first})


def _chunk(file: File) -> Iterator[Line]:
    head, tail, following = chunk.POINTERS.unpack_from(file.read(0, chunk.BEGIN))
    right = (head, tail) == (0, 0) or chunk.BEGIN <= head <= tail <= file.size
    what = None if right else f"no records lie from {head} to {tail} in a file of {file.size} bytes"
    yield Line(0, "pointers", {"head": head, "tail": tail, "next": following}, what)
    if not right:
        return
    number, at = 0, head
    while at < tail:
        end = at + 2 + int.from_bytes(file.read(at, chunk.LENGTH.size))
        if end > tail:
            yield Line(at, "record", {"number": number}, f"no record begins here: it would run past {tail}")
            return
        size = end - at - chunk.LENGTH.size
        shown = file.read(at + chunk.LENGTH.size, min(size, file.most))
        yield Line(at, "record", {"number": number, "bytes": size, "data": shown})
        number, at = number + 1, end


# Logs


@dataclass(frozen=True)
class _Log:
    """One of the three kinds of logs."""

    magic: bytes
    names: dict[int, str]  # of the kinds of frames
    snapshot: tuple[int, ...]  # those that it begins with
    replay: Callable[[bytes, str], object]  # raises `Corrupt`
    decode: Callable[[journal.Frame], dict[str, Any]]


def _log(file: File) -> Iterator[Line]:
    data = file.whole()
    form = next((form for form in _LOGS if form.magic == data[:8]), _LOGS[0])
    wrong: Corrupt | None = None
    try:
        form.replay(data, file.path)
    except Corrupt as error:
        wrong = error
    generation = journal.find_generation(data, form.magic, form.snapshot)
    what = wrong.what if wrong and (wrong.offset or 0) < journal.BEGIN else None
    yield Line(0, "head", {"magic": data[:8].decode(errors="replace"), "generation": generation}, what)
    if generation is None:
        return
    at = journal.BEGIN
    whole = list(journal.frames(data, generation))
    behind = journal.find_frames(data, generation, whole[-1].end if whole else at, form.names.keys() - {*form.snapshot})
    for frame in chain(whole, behind):
        if frame.start > at:
            yield Line(at, "frame", {"bytes": frame.start - at}, "a frame of the log is damaged")
        what = wrong.what if wrong and wrong.offset == frame.start else None
        try:
            fields = form.decode(frame)
        except journal.NONSENSE as error:
            fields, what = {}, what or f"the frame cannot be read: {error!r}"
        yield Line(frame.start, form.names.get(frame.kind, f"kind {frame.kind}"), fields, what)
        at = frame.end
    if wrong is not None and (wrong.offset or 0) >= at:
        yield Line(at, "frame", {}, wrong.what)
    elif (torn := len(data.rstrip(b"\0")) - at) > 0:  # a whole frame may end in zeros
        yield Line(at, "torn", {"bytes": torn})  # the end of a commit that has not happened


def _operation(operation: Any) -> dict[str, Any]:
    """Its name and fields; payload is told by its size."""
    name = re.sub("(?<!^)([A-Z])", r" \1", type(operation).__name__).lower()
    fields = operation._asdict()
    if isinstance(operation, Change):
        fields["operation"] = _operation(operation.operation)
    if isinstance(operation, Lease):
        fields["batch"] = batch_fields(operation.batch)
    for payload in {"frames", "data"} & fields.keys():
        fields["bytes"] = len(fields.pop(payload))
    return {"op": name, **fields}


def _queue_frame(frame: journal.Frame) -> dict[str, Any]:
    if frame.kind == logs.COMMIT:
        return {"time": logs.time_of(frame.body), "operations": [*map(_operation, logs.unpack(frame.body))]}
    if frame.kind == logs.CHECKPOINT:
        return dict(zip(("log_inode", "header_inode", "header_changed"), logs.unpack_checkpoint(frame.body), strict=True))
    if frame.kind == logs.END:
        return dict(zip(("frames", "changes", "last_lease"), logs.unpack_end(frame.body), strict=True))
    if frame.kind == clocks.FRAME:
        return dict(zip(Clock._fields[:5], clocks.unpack(frame.body), strict=False))
    logs.load(frame.kind, frame.body, state := State())
    for chunk_state in state.chain.values():
        return _chunk_fields(chunk_state)
    for batch in state.batches.values():
        return {**batch_fields(batch), "chunks": [*map(_chunk_fields, batch.chunks)]}
    if state.history:
        return {"batches": [batch_fields(batch) for batch in state.history], "on_disk": state.history.on_disk}
    return {"keys": _keys(state.idempotency_keys or state.expired_keys)}


def _chunk_fields(chunk_state: Chunk) -> dict[str, Any]:
    names = ("id", "size", "base", "head", "tail", "taken", "total", "crc", "pieces", "consumed")
    return {name: getattr(chunk_state, name) for name in names}


def _keys(keys: dict[bytes, tuple[int, int]]) -> list[Any]:
    return [[key, *value] for key, value in keys.items()]


def _topic_frame(frame: journal.Frame) -> dict[str, Any]:
    if frame.kind == topic_log.COMMIT:
        return {"time": topic_log.time_of(frame.body), "operations": [*map(_operation, topic_log.unpack(frame.body))]}
    if frame.kind == topic_log.SNAPSHOT:
        return journal.json_fields(frame.body)
    if frame.kind == topic_log.PUT_KEYS:
        return {"keys": _keys(topic_log.unpack_keys(frame.body))}
    if frame.kind == topic_log.PIECES:
        return {"pieces": topic_log.unpack_pieces(frame.body)}
    if frame.kind == clocks.FRAME:
        return dict(zip(Clock._fields[:5], clocks.unpack(frame.body), strict=False))
    return {"boot": frame.body.decode()} if frame.kind == topic_log.UNSYNCED else {}


def _reader_frame(frame: journal.Frame) -> dict[str, Any]:
    if frame.kind == reader_log.COMMIT:
        return {"operations": [_operation(reader_log.unpack(frame.body))]}
    if frame.kind == clocks.FRAME:
        return dict(zip(Clock._fields[:5], clocks.unpack(frame.body), strict=False))
    return journal.json_fields(frame.body) if frame.kind == reader_log.SNAPSHOT else {}


_LOGS = (
    _Log(logs.MAGIC, logs.KIND_NAMES, logs.OF_SNAPSHOT, logs.replay, _queue_frame),
    _Log(topic_log.MAGIC, topic_log.KIND_NAMES, (topic_log.SNAPSHOT,), topic_log.replay, _topic_frame),
    _Log(reader_log.MAGIC, reader_log.KIND_NAMES, (reader_log.SNAPSHOT,), reader_log.replay, _reader_frame),
)


# Topics


def _block(file: File) -> Iterator[Line]:
    end, dialect = _of_topic(file)
    at, number = 0, None
    while at < min(end, file.size):
        head = file.read(at, zbus.HEAD)
        if not any(head):
            return  # nobody says where the messages end, and here they do
        try:
            after, number = zbus.check_head(head, at, at, min(end, file.size), number, dialect, file.path)
        except Corrupt as error:
            yield Line(at, "message", {}, error.what)
            return
        size = after - at - zbus.HEAD
        shown = file.read(at + zbus.HEAD, min(size, file.most))
        (message,) = zbus.messages_of(zbus.unpack_heads(dialect, head, [0]), [shown], [at])
        fields = {name: getattr(message, name) for name in ("number", "tag", "id", "timestamp", "corr_offset")}
        yield Line(at, "message", {**fields, "bytes": size, "data": shown})
        at, number = after, number + 1
    if end > file.size:
        yield Line(file.size, "message", {}, f"the file ends before the messages do, which end at {end}")


def _of_topic(file: File) -> tuple[int, str]:
    """Where the messages of the block end, and in which dialect they are, as far as the topic says it."""
    base = int(os.path.basename(file.path)[:20])
    try:
        topic = os.path.dirname(os.path.dirname(file.path))
        with closing(View.of(look_into(topic, topic), topic)) as view:
            entry = next((entry for entry in view.entries(view.index()) if entry.base == base), None)
            return entry.end if entry else file.size, view.dialect
    except (QewQewError, OSError):
        return file.size, "C" if zbus.crc_is_right(file.read(0, zbus.HEAD).ljust(zbus.HEAD), 0) else "B"


def _index(file: File) -> Iterator[Line]:
    data = file.whole()
    index = zbus.unpack_index(data, file.path)
    yield Line(0, "index", {**index._asdict(), **zbus.unpack_common(data)._asdict()})
    for block in range(index.start, index.start + index.blocks):
        at = zbus.entry_at(block)
        yield Line(at, "block", {"block": block, **zbus.unpack_entry(data, at)._asdict()})


def _reader(file: File) -> Iterator[Line]:
    data = file.whole()
    block, offset = zbus.unpack_position(data)
    said = {"block": block, "offset": offset, "filter": zbus.unpack_filter(data)}
    yield Line(0, "reader", {**said, **zbus.unpack_common(data)._asdict()})


def _nak(file: File) -> Iterator[Line]:
    data = file.whole()
    window, timeout = zbus.unpack_nak_head(data)
    yield Line(0, "nak", {"window": window, "timeout": timeout, **zbus.unpack_common(data)._asdict()})
    dialect = "C" if file.size == zbus.nak_size("C") else "B"
    for number, entry in zbus.unpack_naks(data, dialect).items():
        yield Line(zbus.nak_entry_at(number, dialect), "message", entry._asdict())


def _sums(file: File) -> Iterator[Line]:
    for number, piece in enumerate(topic_log.unpack_sums(file.whole(), file.path)):
        yield Line(topic_log.sums_at(number), "piece", piece._asdict())


def _stamp(file: File) -> Iterator[Line]:
    changes = stamp.unpack(file.whole())
    yield Line(0, "stamp", {"changes": changes}, "it cannot be read" if changes is None else None)


# What the names of these files are, and what decodes them. A header has the name of its queue, which may be any.
_FORMATS: dict[FileKind, tuple[str, Callable[[File], Iterable[Line]]]] = {
    FileKind.LOG: (r".+\.wal(\.tmp)?", _log),
    FileKind.BLOCK: (r"\d{20}\.zbus", _block),
    FileKind.SUMS: (r"\d{20}\.sums", _sums),
    FileKind.STAMP: (r".+\.stamp", _stamp),
    FileKind.INDEX: (r".+\.idx", _index),
    FileKind.READER: (r".+\.rdx", _reader),
    FileKind.NAK: (r".+\.nak", _nak),
    FileKind.CHUNK: (r".+\.[1-9]\d{0,4}", _chunk),
    FileKind.HEADER: ("", _header),
}
