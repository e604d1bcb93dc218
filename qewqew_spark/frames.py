"""Runs of frames, `[u16 big-endian length][payload]`, as Arrow arrays. No Spark in here."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from qewqew_core.chunk import LENGTH, MAX_RECORD
from qewqew_core.errors import CorruptQueue

BATCH_BYTES = 1 << 20  # of frames in one array, unless a single record is larger
BATCH_RECORDS = 16_384


def frame_positions(run: bytes) -> array[int]:
    """Where the frames of a run begin, and where the last whole one ends."""
    at = 0
    positions = array("i", [0])
    with suppress(IndexError, OverflowError):  # how the end of the run is found: comparing each time costs more
        positions.extend(at := at + 2 + (run[at] << 8 | run[at + 1]) for _ in repeat(None))
    while positions[-1] > len(run):  # a torn frame must never reach Arrow: it would read past the buffer
        positions.pop()
    return positions


def payloads(run: bytes, records: int, *, path: str, offset: int) -> Iterator[pa.Array]:
    """The payloads of a run of exactly ``records`` whole frames, as binary arrays of bounded size.

    ``path`` and ``offset`` say where the run comes from. Raises `CorruptQueue`, before the first
    array, if the frames do not end with the run or are not as many as announced.
    """
    positions = frame_positions(run)
    if positions[-1] != len(run):
        raise CorruptQueue(
            f"the record that begins here does not end within the {len(run)} bytes from {offset}, of which the "
            "manifest says that they hold whole records",
            path=path,
            offset=offset + positions[-1],
        )
    if len(positions) - 1 != records:
        raise CorruptQueue(
            f"the {len(run)} bytes from here hold {len(positions) - 1} records, the manifest says {records}",
            path=path,
            offset=offset,
        )
    frames = pa.Array.from_buffers(pa.binary(), records, [None, pa.py_buffer(positions), pa.py_buffer(run)])
    at = 0
    while at < records:
        end = min(bisect_right(positions, positions[at] + BATCH_BYTES, at + 2) - 1, at + BATCH_RECORDS, records)
        # The stop is needed: without one, binary_slice fails on Arrow's side.
        yield pc.binary_slice(frames.slice(at, end - at), LENGTH.size, LENGTH.size + MAX_RECORD)
        at = end
