"""Records as a person reads them, and where they are read from: without a lock, and nothing is taken."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from qewqew_airflow.page.looking import iso, visible
from qewqew_core import BadArgument, Message, inspection, layout, manifest
from qewqew_core.exchange import chunk_records
from qewqew_core.files import Files
from qewqew_core.reader_inspection import foresee
from qewqew_core.state import Chunk
from qewqew_core.tags import Filter
from qewqew_core.view import Found, View

SHOWN = 4096  # bytes of a record, or as hex …
SHOWN_HEX = 512
LARGEST_PIECE = 64 << 20  # what is read, at most, to see one record
MOST_NESTED = 16
MOST_SKIPPED = 500  # windows of 64 KiB


def queue_records(path: str, number: int) -> list[dict[str, Any]]:
    """The first records of a queue; again, if somebody took them while they were read. Raises `BadPath`, `CorruptQueue`."""
    found = inspection.steady(path, lambda: list(islice(_records(path), number)))
    return [{"number": place, **described(record)} for place, record in enumerate(found)]


def _records(path: str) -> Iterator[bytes]:
    found = inspection.snapshot(path)
    for one in found.chunks:
        # Each piece is measured before it is read.
        for _, some in zip(_small_pieces(one), chunk_records(path, one, found.pending.get(one.id, [])), strict=False):
            yield from some


def _small_pieces(one: Chunk) -> Iterator[int]:
    for index in range(one.piece_of(one.head), len(one.pieces)):
        size = one.piece_end(index)[0] - one.pieces[index].offset
        if size > LARGEST_PIECE:
            raise BadArgument(f"{size:,} bytes must be read to see the next record; `qewqew peek` does that")
        yield index


def batch_records(directory: str, number: int) -> list[dict[str, Any]]:
    """The first records of a batch. Raises `BadManifest`, `CorruptQueue`."""
    body = manifest.load(os.path.join(directory, manifest.MANIFEST))
    records = (one for segment in body.segments for some in manifest.read_records(directory, body, segment) for one in some)
    return [
        described_message(one) if isinstance(one, Message) else {"number": place, **described(one)}
        for place, one in enumerate(islice(records, number))
    ]


def topic_messages(path: str, number: int, start: int | None, reader: str | None) -> list[dict[str, Any]]:
    """Messages of a topic: what a reader gets next, or from number ``start`` on, or from the oldest.

    A reader's filter may let nothing pass for long: after `MOST_SKIPPED` windows this gives up. Raises `BadPath`,
    `CorruptQueue`, and `BadArgument` where there is no such reader.
    """
    view = View.of(Files(), path)
    try:
        state = None if reader is None else foresee(Files(), view, reader)
        if reader is not None and state is None:
            raise BadArgument(f"the topic has no reader {reader!r}")
        place = view.by_number(start) if start is not None else None
        found: list[dict[str, Any]] = []
        skipped = 0
        for one in view.messages(
            state.floor() if state else place or view.oldest(), None, Filter(state.filter) if state else None
        ):
            if isinstance(one, Found):
                found.append(described_message(one.message))
            else:
                skipped += 1
            if len(found) == number or skipped == MOST_SKIPPED:
                break
        return found
    finally:
        view.close()


def described_message(message: Message) -> dict[str, Any]:
    time = None if message.timestamp is None else iso(layout.moment(message.timestamp))
    head = {"number": message.number, "tag": visible(message.tag or ""), "id": visible(message.id or ""), "time": time}
    return {**head, **described(message.body)}


def described(body: bytes) -> dict[str, Any]:
    """A record as JSON, text or hex, and cut."""
    shown, text = SHOWN, _text(body)
    if text is None:
        kind, shown, text = "hex", SHOWN_HEX, _hex(body[:SHOWN_HEX])
    elif len(body) <= SHOWN and (indented := _indented(text)) is not None:
        kind, text = "json", visible(indented)
    else:
        kind, text = "text", visible(text)
    return {"bytes": len(body), "kind": kind, "text": text, "cut": len(body) > shown}


def _text(body: bytes) -> str | None:
    """The beginning of the body; None if it is no text."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body[:SHOWN], final=len(body) <= SHOWN)
    except UnicodeDecodeError:
        return None
    strange = sum(not letter.isprintable() and letter not in "\n\r\t" for letter in text)
    return None if "\0" in text or strange * 10 > len(text) else text


def _indented(text: str) -> str | None:
    """JSON with a value on each line and every token as it was, which reading and writing it again would not leave
    (numbers, the order and repetition of names); None if it is not an object or an array.
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
