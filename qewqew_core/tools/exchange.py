"""Records and messages as JSON lines: what ``qewqew export`` writes, and ``qewqew import`` reads.

A record is any bytes: ``{"record": "text"}`` or, if it is not UTF-8, ``{"base64": "…"}``. Messages of topics have number, tag,
id, timestamp and (unless it is 0) corr_offset beside it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import IO, Any

from qewqew_core.disk.files import look_into
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, MessagesLost
from qewqew_core.formats.zbus import HEAD, Message
from qewqew_core.queue import inspection
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.printing import json_text
from qewqew_core.topic import topic_paths
from qewqew_core.topic.view import SCAN, View

GROUP_RECORDS, GROUP_BYTES = 1000, 1 << 20  # that are held in memory, or taken in one commit
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_LONG = 1 << 20  # bytes of a line
_MESSAGE = ("tag", "id", "timestamp", "corr_offset")  # what of a message is imported beside its body
_GIVEN = ("number", "offset", "attempt")  # what the topic assigns again

Progress = Callable[[int, int], None]


# What is there, without a lock


def waiting(path: str, kind: Kind, progress: Progress) -> Iterator[Message]:
    """The records that wait in a queue, or all messages of a topic; see `records` and `messages`."""
    return records(path, progress) if kind is Kind.QUEUE else messages(path, progress)


def records(path: str, progress: Progress) -> Iterator[Message]:
    """The records that wait in a queue as of its last commit. Includes those that open sessions hold, but not those in batches.

    Takes no lock, waits for nobody, changes nothing. Raises `BadPath`, `Corrupt`, `RecordsTaken`.
    """
    found = inspection.snapshot(path)
    total, done = sum(chunk_state.tail - chunk_state.head for chunk_state in found.chunks), 0
    for chunk_state in found.chunks:
        for some in inspection.chunk_records(path, found, chunk_state):
            yield from map(Message, some)
            done += sum(map(len, some)) + 2 * len(some)
            progress(done, total)


def messages(path: str, progress: Progress) -> Iterator[Message]:
    """The messages of a topic up to the newest one now. Takes no lock, waits for nobody, changes nothing.

    Raises `BadPath`, `Corrupt`, `MessagesLost` if retention removed some while they were read.
    """
    directory = topic_paths.check_topic_path(path)
    with opening(directory, "topic"), closing(View.of(look_into(directory, directory), directory)) as view:
        at, stop = view.oldest(), view.latest()
        total, done = sum(entry.end for entry in view.entries(view.index())), 0
        for found in view.messages(at, stop, window=SCAN):
            yield found.message
            at = found.after
            done += HEAD + len(found.message.body)
            progress(done, total)
        if (at.block, at.offset) != (stop.block, stop.offset) and view.index().start > at.block:
            raise MessagesLost("messages were removed from the topic while they were read; try again", path=path)


def few(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Groups of messages, small enough for memory."""
    group: list[Message] = []
    size = 0
    for message in messages:
        group.append(message)
        size += len(message.body)
        if size >= GROUP_BYTES or len(group) >= GROUP_RECORDS:
            yield group
            group, size = [], 0
    if group:
        yield group


# JSON lines


def as_text(record: bytes) -> dict[str, str]:
    """The member of a JSON object for the record."""
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
    """The message of a topic, or only its record; ``more``: other members, such as how often it was delivered."""
    head: dict[str, Any] = {}
    if topic:
        head = {"number": message.number, "tag": message.tag, "id": message.id, "timestamp": _time_text(message.timestamp or 0)}
        if message.corr_offset:
            head["corr_offset"] = message.corr_offset
    return f"{json_text(head | more | as_text(message.body))}\n".encode()


def write_json_lines(file: IO[bytes], rows: Iterable[Message], topic: bool) -> int:
    """Write all of them; returns how many."""
    count = 0
    for row in rows:
        file.write(json_line(row, topic))
        count += 1
    return count


def read_json_lines(file: IO[bytes], path: str, progress: Progress) -> Iterator[Message]:
    """Raises `BadArgument` with the line number."""
    total = 0 if path == "-" else os.fstat(file.fileno()).st_size
    done = 0
    for number, line in enumerate(_lines(file), 1):
        try:
            yield _of_json(line)
        except (ValueError, RecursionError) as error:
            raise BadArgument(f"line {number}: {error}. Nothing was imported", path=path) from error
        done += len(line)
        if number % 1000 == 0:
            progress(done, total)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. One that is long and does not begin as a JSON object is cut: it may have no end."""
    while line := file.readline(_LONG):
        if not line.endswith(b"\n") and line.lstrip().startswith(b"{"):
            line += file.readline()
        yield line


def _of_json(line: bytes) -> Message:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is not JSON ({error}); use `qewqew put -f` for plain lines") from error
    if not isinstance(found, dict) or ("record" in found) == ("base64" in found):
        raise ValueError('this is not a JSON object with "record" or "base64"; use `qewqew put -f` for plain lines')
    body: Any = found.pop("record", None)
    coded: Any = found.pop("base64", None)
    if not isinstance(coded if body is None else body, str):
        raise ValueError("the record is not text")
    try:
        record = body.encode() if coded is None else base64.b64decode(coded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"this is not base64: {error}") from error
    if unknown := found.keys() - {*_MESSAGE, *_GIVEN}:
        raise ValueError(f"{min(unknown)!r} is not a member of a record; these are: {', '.join(_MESSAGE)}")
    time = found.get("timestamp")
    if isinstance(time, str):
        moment = datetime.fromisoformat(time)
        time = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        time //= _MILLISECOND
    # The topic checks what they are.
    return Message(record, found.get("tag"), found.get("id"), found.get("corr_offset") or 0, time)


# What makes an import happen once


class Digest:
    """Identifies the imported records, so that the same ones are imported once."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, message: Message) -> None:
        head = json.dumps([len(message.body), *message[1:5]]).encode()
        self._hash.update(head + message.body)

    @property
    def key(self) -> str:
        return f"import {self._hash.hexdigest()}"
