"""Records as text for people. Reading them takes no lock and no records.

The memory of the API server does not grow with the records. Of a large message only what is shown is read. In a queue, where a
checksum is that of a whole commit, records that need more than `LARGEST_PIECE` bytes at once are not read.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

from qewqew_airflow.page.contents import iso
from qewqew_core import BadArgument, Message, arguments
from qewqew_core.batch import manifest, segments
from qewqew_core.batch.store import Local
from qewqew_core.disk.files import look_into
from qewqew_core.disk.opening import opening
from qewqew_core.formats import zbus
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.formats.tags import Filter
from qewqew_core.queue import inspection
from qewqew_core.tools.printing import visible
from qewqew_core.topic.reader_inspection import effective_state, waiting
from qewqew_core.topic.view import WINDOW, View

SHOWN = 4096  # bytes of a record; as hex, …
SHOWN_HEX = 512
LARGEST_PIECE = 64 << 20  # bytes read at most to see one record
MOST_NESTED = 16
MOST_SKIPPED = 500  # windows of 64 KiB


def queue_records(path: str, most: int) -> list[dict[str, Any]]:
    """The first records of a queue, read again if somebody took them meanwhile. Raises `BadPath`, `Corrupt`."""
    found = inspection.steady(path, lambda: list(islice(_records(path), most)))
    return [{"number": number, **described(record)} for number, record in enumerate(found)]


def _records(path: str) -> Iterator[bytes]:
    found = inspection.snapshot(path)
    for chunk in found.chunks:
        # Each piece is measured before it is read.
        for _, some in zip(_small_pieces(chunk), inspection.chunk_records(path, found, chunk), strict=False):
            yield from some


def _small_pieces(chunk: Chunk) -> Iterator[int]:
    for index in range(chunk.piece_of(chunk.head), len(chunk.pieces)):
        size = chunk.piece_end(index)[0] - chunk.pieces[index].offset
        _check_piece(size)
        yield index


def _check_piece(size: int) -> None:
    if size > LARGEST_PIECE:
        raise BadArgument(f"to see the next record, {size:,} bytes must be read, more than the page reads at once")


def batch_records(directory: str, most: int) -> list[dict[str, Any]]:
    """The first records of a batch. Raises `BadManifest`, `Corrupt`, `BadPath`, `BadArgument`."""
    path = os.path.join(directory, manifest.MANIFEST)
    with opening(path, "batch"), contextlib.suppress(FileNotFoundError):
        look_into(os.path.dirname(os.path.dirname(directory))).check_ours(path)
    body = manifest.load(path)
    if body.layout == manifest.BLOCK:
        messages = chain.from_iterable(_messages_of_batch(directory, body, segment) for segment in body.segments)
        return [described_message(message, size) for message, size in islice(messages, most)]
    records = chain.from_iterable(_records_of_batch(directory, body, segment) for segment in body.segments)
    return [{"number": number, **described(record)} for number, record in enumerate(islice(records, most))]


def _records_of_batch(directory: str, body: manifest.Manifest, segment: manifest.Segment) -> Iterator[Any]:
    places = (segment.start, *(offset for offset, _ in segment.boundaries), segment.end)
    _check_piece(max(end - start for start, end in pairwise(places)))
    yield from chain.from_iterable(segments.read_records(directory, body, segment))


def _messages_of_batch(directory: str, body: manifest.Manifest, segment: manifest.Segment) -> Iterator[tuple[Message, int]]:
    """The messages, with their bodies cut, and the bodies' lengths. Does not check the checksum of the whole segment."""
    dialect, chosen = str(body.dialect), Filter(body.filter)
    at = start = segment.start
    number, data = None, b""
    with segments.open_file(Local(directory), segment.file) as file:
        while at < segment.end:
            if start + len(data) < min(at + zbus.HEAD + SHOWN, segment.end):
                start, data = at, file.read(at, min(at + WINDOW, segment.end))
            after, number = zbus.check_head(data, start, at, segment.end, number, dialect, file.path)
            heads = zbus.unpack_heads(dialect, data, [at - start])
            if chosen.matches_slot(heads.tags[0]):
                text = data[at + zbus.HEAD - start : after - start]
                yield zbus.messages_of(heads, [text], [segment.base + at])[0], heads.lengths[0]
            at, number = after, number + 1


def topic_messages(path: str, most: int, start: int | None, reader: str | None) -> list[dict[str, Any]]:
    """Messages of a topic: those that a reader gets next, or those from number ``start`` on, or the oldest.

    Gives up after `MOST_SKIPPED` windows in which nothing passes the reader's filter. Raises `BadPath`, `Corrupt`, and
    `BadArgument` if the reader does not exist.
    """
    with opening(path, "topic"), contextlib.closing(View.of(files := look_into(path, path), path)) as view:
        state = None if reader is None else effective_state(files, view, reader)
        if reader is not None and state is None:
            raise BadArgument(f"the topic does not have a reader {reader!r}")
        place = view.by_number(start) if start is not None else None
        stretches = waiting(state, view, most, SHOWN) if state else view.stretches(place or view.oldest(), most=most, cut=SHOWN)
        found: list[dict[str, Any]] = []
        for stretch in islice(stretches, MOST_SKIPPED):
            found += map(described_message, stretch.messages(), stretch.heads.lengths)
            if len(found) >= most:
                break
        return found[:most]


def described_message(message: Message, size: int) -> dict[str, Any]:
    """``size`` is that of the whole body. The message may have only its beginning."""
    time = None if message.timestamp is None else iso(arguments.moment(message.timestamp))
    head = {"number": message.number, "tag": visible(message.tag or ""), "id": visible(message.id or ""), "time": time}
    return {**head, **described(message.body, size)}


def described(body: bytes, size: int | None = None) -> dict[str, Any]:
    """A record as JSON, text or hex, cut. ``size`` is that of the whole record, if ``body`` is only its beginning."""
    size = len(body) if size is None else size
    shown, text = SHOWN, _text(body, size)
    if text is None:
        kind, shown, text = "hex", SHOWN_HEX, _hex(body[:SHOWN_HEX])
    elif size <= SHOWN and (indented := _indented(text)) is not None:
        kind, text = "json", visible(indented, besides="\n\t")
    else:
        kind, text = "text", visible(text, besides="\n\t")
    return {"bytes": size, "kind": kind, "text": text, "cut": size > shown}


def _text(body: bytes, size: int) -> str | None:
    """The beginning of the body, or None if it is not text."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body[:SHOWN], final=size <= SHOWN)
    except UnicodeDecodeError:
        return None
    strange = sum(not letter.isprintable() and letter not in "\n\r\t" for letter in text)
    return None if "\0" in text or strange * 10 > len(text) else text


def _indented(text: str) -> str | None:
    """JSON with a value on each line and every token as it was. (Parsing and writing it again would change numbers, and the
    order and repetition of names.) None if it is not an object or an array.
    """
    try:
        if not isinstance(json.loads(text), (dict, list)):
            return None
    except (ValueError, RecursionError):
        return None
    parts: list[str] = []
    depth = deepest = 0
    for part in re.findall(r'"(?:[^"\\]|\\.)*"|[][{},:]|[^][{},:"\s]+', text):
        if part in ("}", "]"):
            depth -= 1
            parts += [part] if parts[-1] in ("{", "[") else ["\n" + "  " * depth, part]
            continue
        if parts and (parts[-1] in ("{", "[", ",")):
            parts.append("\n" + "  " * depth)
        parts.append(": " if part == ":" else part)
        depth += part in ("{", "[")
        deepest = max(deepest, depth)
        if deepest > MOST_NESTED:
            return text
    return "".join(parts)


def _hex(data: bytes) -> str:
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{at:04x}  {row.hex(' '):47}  {letters}")
    return "\n".join(lines)
