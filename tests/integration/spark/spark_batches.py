"""Batches made by hand: the queue itself is not needed to test what reads its batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from qewqew_core import chunk
from qewqew_core.manifest import MANIFEST, Manifest, Segment


def write_segment(
    directory: Path, name: str, records: Sequence[bytes], *, start: int = chunk.BEGIN, every: int = 0, tail: bytes = b""
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
    return Segment(name, start, end, len(records), f"{zlib.crc32(frames):08x}", tuple(boundaries))


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
