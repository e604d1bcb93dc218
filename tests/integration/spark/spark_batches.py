"""Batches made by hand: the queue itself is not needed to test what reads its batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from qewqew_core.batch.manifest import MANIFEST, Manifest, Segment
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message


def write_segment(
    directory: Path,
    name: str,
    records: Sequence[bytes],
    *,
    start: int = chunk.BEGIN,
    every: int = 0,
    tail: bytes = b"",
) -> Segment:
    """Write a chunk file and describe it: records from ``start`` on, a boundary each ``every`` records, then ``tail``."""
    frames = chunk.frame(records)
    filler = b"\xff" * (start - chunk.BEGIN)  # records consumed before the lease: no frames as far as the reader knows
    end = start + len(frames)
    (directory / name).write_bytes(chunk.POINTERS.pack(start, end, 0) + filler + frames + tail)
    boundaries, at = [], start
    for number, record in enumerate(records):
        if every and number and number % every == 0:
            boundaries.append((at, number))
        at += 2 + len(record)
    known = _checksums(frames, [offset - start for offset, _ in boundaries])
    return Segment(name, start, end, len(records), f"{zlib.crc32(frames):08x}", tuple(boundaries), known)


def _checksums(data: bytes, ends: Sequence[int]) -> tuple[str, ...]:
    crcs = accumulate(pairwise([0, *ends]), lambda crc, piece: zlib.crc32(data[slice(*piece)], crc), initial=0)
    return tuple(f"{crc:08x}" for crc in crcs)[1:]


def write_manifest(directory: Path, segments: Sequence[Segment], batch_id: str = "orders-1a2b") -> Path:
    records = sum(segment.records for segment in segments)
    payload = sum(segment.end - segment.start for segment in segments) - 2 * records
    manifest = Manifest(batch_id, "the key", "orders", "2026-11-20T15:00:00Z", 1, records, payload, tuple(segments))
    (directory / MANIFEST).write_bytes(manifest.to_json())
    return directory / MANIFEST


def make_batch(directory: Path, *segments: Sequence[bytes], batch_id: str = "orders-1a2b") -> Path:
    """A batch directory with one segment file for each sequence of records; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    described = [write_segment(directory, f"orders.qew.{n}", records) for n, records in enumerate(segments, 17)]
    write_manifest(directory, described, batch_id)
    return directory


def write_block(
    directory: Path,
    base: int,
    messages: Sequence[Message],
    *,
    cuts: Sequence[int] = (),
    dialect: str = "B",
    filter: str | None = None,
) -> list[Segment]:
    """Write a block and describe it: segments that are cut in front of the messages ``cuts``, a boundary at each other one."""
    chosen, data, described = Filter(filter), b"", []
    places: list[tuple[int, int]] = []  # of each message: offset, and how many before it match
    matched = 0
    for message in messages:
        places.append((len(data), matched))
        tag, id = (message.tag or "").encode(), (message.id or "").encode()
        fields = (message.timestamp or 0, id, message.corr_offset, message.number, tag, len(message.body))
        data += zbus.pack_head(dialect, base + len(data), *fields) + message.body
        matched += chosen.matches(message.tag)
    places.append((len(data), matched))
    (directory / zbus.block_name(base)).write_bytes(data)
    for first, last in pairwise([0, *cuts, len(messages)]):
        (start, before), (end, until) = places[first], places[last]
        boundaries = tuple((at, count - before) for at, count in places[first + 1 : last])
        crc32 = f"{zlib.crc32(data[start:end]):08x}"
        known = _checksums(data[start:end], [at - start for at, _ in boundaries])
        described.append(Segment(zbus.block_name(base), start, end, until - before, crc32, boundaries, known))
    return described


def write_topic_manifest(
    directory: Path, segments: Sequence[Segment], messages: Sequence[Message], *, dialect: str = "B", filter: str | None = None
) -> None:
    """``messages``: those that belong to the batch."""
    what = "orders-1a2b", "the key", "orders", "2026-11-20T15:00:00Z", 1
    sizes = len(messages), sum(len(message.body) for message in messages)
    manifest = Manifest(*what, *sizes, tuple(segments), "block", "loader", dialect, filter)
    (directory / MANIFEST).write_bytes(manifest.to_json())


def make_topic_batch(
    directory: Path, messages: Sequence[Message], *, cuts: Sequence[int] = (), dialect: str = "B", filter: str | None = None
) -> list[Message]:
    """A batch of two blocks, as `write_block`; returns the messages with the offsets that they have, those that match."""
    directory.mkdir(parents=True, exist_ok=True)
    half, base, segments, placed = len(messages) // 2, 7_000_000_000, [], []
    for part in messages[:half], messages[half:]:
        segments += write_block(
            directory, base, part, cuts=[cut for cut in cuts if cut < len(part)], dialect=dialect, filter=filter
        )
        for message in part:
            placed.append(message._replace(offset=base))
            base += zbus.HEAD + len(message.body)
    matching = [message for message in placed if Filter(filter).matches(message.tag)]
    write_topic_manifest(directory, segments, matching, dialect=dialect, filter=filter)
    return matching
