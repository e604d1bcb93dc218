"""Records and messages as JSON lines and as Parquet: what ``qewqew export`` writes, and ``qewqew import`` reads.

A record is any bytes. In JSON it is ``{"record": "text"}`` or, where it is no UTF-8, ``{"base64": "…"}``; in Parquet the column
``record`` is binary. Messages of topics have number, tag, id, timestamp and (unless it is 0) corr_offset beside it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from qewqew_core import chunk, inspection, layout
from qewqew_core.errors import BadArgument, CorruptQueue, MessagesLost, RecordsTaken
from qewqew_core.files import Files
from qewqew_core.reading import unread
from qewqew_core.state import Chunk
from qewqew_core.view import SCAN, Found, View
from qewqew_core.zbus import HEAD, Message

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_MESSAGE = ("tag", "id", "timestamp", "corr_offset")  # what of a message is imported beside its body
_GIVEN = ("number", "offset", "attempt")  # what the topic gives it anew
_ROWS, _ROW_GROUP_BYTES = 1000, 64 << 20  # that are held in memory

Progress = Callable[[int, int], None]


# What is there, without a lock


def records(path: str, progress: Progress) -> Iterator[Message]:
    """The records that wait in a queue as of its last commit, those included that open sessions hold; not those of batches.

    Takes no lock, waits for nobody, changes nothing. Raises `BadPath`, `CorruptQueue`, `RecordsTaken`.
    """
    found = inspection.snapshot(path)
    total, done = sum(one.tail - one.head for one in found.chunks), 0
    for one in found.chunks:
        for some in chunk_records(path, one, found.pending.get(one.id, [])):
            yield from map(Message, some)
            done += sum(map(len, some)) + 2 * len(some)
            progress(done, total)


def chunk_records(path: str, one: Chunk, pending: list[tuple[int, bytes]]) -> Iterator[list[bytes]]:
    """The records of one chunk of a `inspection.Snapshot`. Raises `CorruptQueue`, `RecordsTaken`."""
    files, file = inspection.WithPending(pending), chunk.chunk_path(layout.check_path(path), one.id)
    try:
        fd = files.open_to_read(file)
    except FileNotFoundError:
        raise _taken(file) from None
    try:
        for piece, data in unread(files, fd, file, one):
            yield chunk.split(_without(one, data, piece.offset))[0]
    except CorruptQueue:
        now = {other.id: other for other in inspection.snapshot(path).chunks}
        if one.id in now and one.pieces[one.piece_of(one.head)] in now[one.id].pieces:
            raise  # the chunk still is what it was
        raise _taken(file) from None
    finally:
        files.close(fd)


def _without(one: Chunk, data: bytes, start: int) -> bytes:
    """What of these records, which begin at ``start``, was not taken behind the head."""
    for gone in reversed(one.gone):
        if start <= gone.start < start + len(data) or start < gone.end <= start + len(data):
            data = data[: max(0, gone.start - start)] + data[max(0, gone.end - start) :]
    return data


def _taken(path: str) -> RecordsTaken:
    return RecordsTaken("records were taken from the queue while they were read, and are gone; try again", path=path)


def messages(path: str, progress: Progress) -> Iterator[Message]:
    """The messages of a topic up to the newest that there is now. Takes no lock, waits for nobody, changes nothing.

    Raises `BadPath`, `CorruptQueue`, `MessagesLost` if retention has removed some while they were read.
    """
    view = View.of(Files(), layout.check_topic_path(path))
    try:
        at, stop = view.oldest(), view.latest()
        total, done = sum(entry.end for entry in view.entries(view.index())), 0
        for found in view.messages(at, stop, window=SCAN):
            assert isinstance(found, Found)  # there is no filter
            yield found.message
            at = found.after
            done += HEAD + len(found.message.body)
            progress(done, total)
        if (at.block, at.offset) != (stop.block, stop.offset) and view.index().start > at.block:
            raise MessagesLost("messages were removed from the topic while they were read; try again", path=path)
    finally:
        view.close()


# JSON lines


def as_text(record: bytes) -> dict[str, str]:
    """The member of a JSON object that says the record."""
    try:
        return {"record": record.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(record).decode()}


def _time_text(milliseconds: int) -> str | int:
    try:
        return (_EPOCH + milliseconds * _MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:  # beyond the year 9999; messages may have any time of 64 bits
        return milliseconds


def json_line(message: Message, topic: bool, **more: object) -> bytes:
    """The message of a topic, or else only its record; ``more``: other members, such as how often it was delivered."""
    head: dict[str, Any] = {}
    if topic:
        head = {"number": message.number, "tag": message.tag, "id": message.id, "timestamp": _time_text(message.timestamp or 0)}
        if message.corr_offset:
            head["corr_offset"] = message.corr_offset
    return json.dumps(head | more | as_text(message.body), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def write_json_lines(file: IO[bytes], rows: Iterable[Message], topic: bool) -> int:
    """Write them all; returns how many."""
    count = 0
    for row in rows:
        file.write(json_line(row, topic))
        count += 1
    return count


def read_json_lines(file: IO[bytes], path: str, progress: Progress) -> Iterator[Message]:
    """Raises `BadArgument` with the number of the line."""
    total = 0 if path == "-" else os.fstat(file.fileno()).st_size
    done = 0
    for number, line in enumerate(file, 1):
        try:
            yield _of_json(line)
        except (ValueError, RecursionError) as error:
            raise BadArgument(f"line {number}: {error}. Nothing was imported", path=path) from error
        done += len(line)
        if number % _ROWS == 0:
            progress(done, total)


def _of_json(line: bytes) -> Message:
    found = json.loads(line)
    if not isinstance(found, dict) or ("record" in found) == ("base64" in found):
        raise ValueError('this is no JSON object with either "record" or "base64"; `qewqew put -f` takes any lines as they are')
    body: Any = found.pop("record", None)
    coded: Any = found.pop("base64", None)
    if not isinstance(coded if body is None else body, str):
        raise ValueError("the record is no text")
    try:
        record = body.encode() if coded is None else base64.b64decode(coded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"this is not base64: {error}") from error
    return _message(record, found)


def _message(record: bytes, found: dict[str, Any]) -> Message:
    """With what else was found; the topic checks it."""
    if unknown := found.keys() - {*_MESSAGE, *_GIVEN}:
        raise ValueError(f"{min(unknown)!r} is not known of a record; what is: {', '.join(_MESSAGE)}")
    time = found.get("timestamp")
    if isinstance(time, str):
        moment = datetime.fromisoformat(time)
        time = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        time //= _MILLISECOND
    return Message(record, found.get("tag"), found.get("id"), found.get("corr_offset") or 0, time)


# Parquet


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # late: only Parquet needs it

        return pyarrow
    except ModuleNotFoundError as error:
        raise BadArgument("Parquet needs pyarrow, which is not installed: pip install pyarrow") from error


def _schema(pa: Any, topic: bool) -> pa.Schema:
    record = [("record", pa.binary())]
    if not topic:
        return pa.schema(record)
    text, whole = pa.string(), pa.int64()
    head = [("number", whole), ("tag", text), ("id", text), ("timestamp", pa.timestamp("ms", "UTC")), ("corr_offset", whole)]
    return pa.schema(head + record)


def write_parquet(file: IO[bytes], rows: Iterable[Message], topic: bool) -> int:
    """Write them all; returns how many. Raises `BadArgument` without pyarrow."""
    pa = _pyarrow()
    schema = _schema(pa, topic)
    count = size = 0
    group: list[Message] = []
    with pa.parquet.ParquetWriter(file, schema) as writer:

        def store() -> None:
            columns = [[one.body if name == "record" else getattr(one, name) for one in group] for name in schema.names]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=len(group) or 1)

        for row in rows:
            group.append(row)
            count, size = count + 1, size + len(row.body) + 100
            if size >= _ROW_GROUP_BYTES:
                store()
                group, size = [], 0
        if group:
            store()
    return count


def read_parquet(path: str, progress: Progress) -> Iterator[Message]:
    """The rows of a file with a column ``record``. Raises `BadArgument`."""
    pa = _pyarrow()
    number = 0
    try:
        with open(path, "rb") as opened, pa.parquet.ParquetFile(opened) as file:
            _check_columns(pa, file.schema_arrow, path)
            # Group by group: a batch would have a thousand rows of several, however large they are.
            groups = (file.iter_batches(_ROWS, row_groups=[group]) for group in range(file.num_row_groups))
            for batch in chain.from_iterable(groups):
                columns = {name: _plain(pa, name, batch.column(name)) for name in batch.schema.names}
                bodies = columns.pop("record")
                for place, body in enumerate(bodies):
                    number += 1
                    if body is None:
                        raise BadArgument(f"row {number} has no record. Nothing was imported", path=path)
                    yield _message(body, {name: values[place] for name, values in columns.items()})
                progress(number, file.metadata.num_rows)
    except pa.ArrowException as error:
        raise BadArgument(f"this cannot be read as Parquet: {error!s:.200}", path=path) from error


def _check_columns(pa: Any, schema: pa.Schema, path: str) -> None:
    if "record" not in schema.names:
        raise BadArgument(f'there is no column "record" in this file; it has {", ".join(schema.names)}', path=path)
    if unknown := set(schema.names) - {"record", *_MESSAGE, *_GIVEN}:
        raise BadArgument(f"the column {min(unknown)!r} is not known; what is: record, {', '.join(_MESSAGE)}", path=path)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
    kinds = {
        "record": (pa.types.is_binary, pa.types.is_large_binary, *texts),
        "tag": texts,
        "id": texts,
        "timestamp": (pa.types.is_timestamp, pa.types.is_integer, pa.types.is_null),
        "corr_offset": (pa.types.is_integer, pa.types.is_null),
    }
    for name, tests in kinds.items():
        if name in schema.names and not any(test(schema.field(name).type) for test in tests):
            raise BadArgument(f"the column {name!r} is of type {schema.field(name).type}", path=path)


def _plain(pa: Any, name: str, column: pa.Array) -> list[Any]:
    if name == "record":
        column = column.cast(pa.binary())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz)).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


# What makes an import happen once


class Digest:
    """Of the records that are imported: the same ones are imported once."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, message: Message) -> None:
        head = json.dumps([len(message.body), *message[1:5]]).encode()
        self._hash.update(head + message.body)

    @property
    def key(self) -> str:
        return f"import {self._hash.hexdigest()}"
