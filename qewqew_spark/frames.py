"""Runs of frames, `[u16 big-endian length][payload]`, and runs of messages of a topic, as Arrow arrays. No Spark in here."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from qewqew_core import zbus
from qewqew_core.chunk import LENGTH, MAX_RECORD
from qewqew_core.errors import CorruptQueue
from qewqew_core.manifest import Run

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


def columns(run: Run, dialect: str) -> list[pa.Array]:
    """value, tag, id, offset, number, corr_offset and timestamp of the messages of a run.

    A tag or an id that is empty is null, and so is a timestamp that Spark cannot hold: its microseconds need over 64 bits.
    """
    rows = len(run.bounds) // 2
    begins, data = run.bounds[::2], pa.py_buffer(run.data)
    bodies, heads = run.bounds[:], run.bounds[:]
    bodies[::2] = heads[1::2] = array("i", [at + zbus.HEAD for at in begins])

    def pieces(bounds: array[int]) -> pa.Array:
        found = pa.Array.from_buffers(pa.binary(), 2 * rows - 1, [None, pa.py_buffer(bounds), data])
        # Every other piece is what lies between two. A single one is not copied: it may have 2 GiB.
        return found if rows == 1 else found.take(pa.array(range(0, 2 * rows, 2), pa.int32()))

    head = pieces(heads)

    def longs(at: int) -> pa.Array:
        numbers = array("q", pc.binary_slice(head, at, at + 8).buffers()[2][: 8 * rows].to_pybytes())
        if sys.byteorder == "little":
            numbers.byteswap()
        return pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(numbers)])

    def texts(at: int, end: int) -> pa.Array:
        slots = pc.binary_slice(head, at, end).dictionary_encode()
        found = [zbus.slot_text(slot, 0, end - at) or None for slot in slots.dictionary.to_pylist()]
        return pa.array(found, pa.string()).take(slots.indices)

    places = pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(begins)]).cast(pa.int64())
    time = longs(zbus.TIMESTAMP_AT[dialect])
    micros = pc.multiply(time, 1000)  # wraps
    fits = pc.equal(pc.divide(micros, 1000), time)
    return [
        pieces(bodies),
        texts(zbus.TAG_AT, zbus.LENGTH_AT),
        texts(zbus.ID_AT, zbus.ID_AT + zbus.ID_SLOT),
        pc.add(places, run.offset),
        longs(zbus.NUMBER_AT),
        pa.repeat(pa.scalar(0, pa.int64()), rows) if dialect == "C" else longs(zbus.CORR_OFFSET_AT),
        pc.if_else(fits, micros, pa.scalar(None, pa.int64())).cast(pa.timestamp("us", "UTC")),
    ]
