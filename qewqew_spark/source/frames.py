"""Runs of frames, `[u16 big-endian length][payload]`, and runs of messages of a topic, as Arrow arrays. No Spark in here."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from qewqew_core.batch.segments import RawMessages
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.chunk import LENGTH, MAX_RECORD

BATCH_BYTES = 4 << 20  # of frames in one array, unless a single record is larger
BATCH_RECORDS = 32_768
WORTH_IT = 48  # one step of numpy's costs as much as this many of the plain walk

Places = NDArray[np.int32]


@cache
def spare_collector() -> None:
    """Make the garbage collector skip what is loaded by now. Spark's workers run it after each task, which else takes 40 ms."""
    gc.freeze()


def frame_positions(run: bytes) -> Places:
    """Where the frames of a run start, and where the last whole one ends."""
    at = 0
    positions = array("i", [0])
    with suppress(IndexError, OverflowError):  # how the end of the run is found: comparing each time costs more
        positions.extend(at := at + 2 + (run[at] << 8 | run[at + 1]) for _ in repeat(None))
    while positions[-1] > len(run):  # a torn frame must never reach Arrow: it would read past the buffer
        positions.pop()
    return np.frombuffer(positions, np.int32)


def positions_between(run: bytes, records: int, boundaries: Sequence[tuple[int, int]]) -> Places | None:
    """The same for a run of ``records`` frames with known ``boundaries``: where a frame starts, and how many come before it.

    Walks all pieces between boundaries at once, frame by frame. None if that does not pay, or if the pieces do not hold what
    they should.
    """
    begins, before = np.array([(0, 0), *boundaries], np.int64).T
    counts = np.diff(before, append=records)
    steps = int(counts.max())
    possible = counts.min() >= 0 and LENGTH.size * records <= len(run)
    if not possible or records < max(WORTH_IT * steps, steps * len(counts) // 4):  # the latter bounds the memory
        return None
    lengths = _numbers_in(run, ">u2")
    found = np.empty((steps + 1, len(counts)), np.int64)
    found[0] = begins
    for at, behind in pairwise(found):
        # A piece that is through, or a length that is wrong, leads anywhere, but nothing is read from outside of the run.
        np.add(at, lengths[np.minimum(at, len(lengths) - 1)], out=behind)
        behind += LENGTH.size
    if not np.array_equal(found[counts, np.arange(len(counts))], [*begins[1:], len(run)]):
        return None
    inside = np.arange(steps) < counts[:, np.newaxis]
    return np.append(found[:-1].T[inside], len(run)).astype(np.int32)


def payloads(
    run: bytes, records: int, *, path: str, offset: int, boundaries: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[pa.Array, Places]]:
    """The payloads of a run of exactly ``records`` whole frames, as binary arrays of bounded size, each with the places of
    its frames in the run.

    ``path`` and ``offset`` say where the run comes from, ``boundaries`` what is known about it (see `positions_between`).
    Raises `Corrupt`, before the first array, if the frames do not end with the run or their number is wrong.
    """
    positions = positions_between(run, records, boundaries)
    if positions is None:
        positions = frame_positions(run)
    if positions[-1] != len(run):
        raise Corrupt(
            f"the record that begins here does not end within the {len(run)} bytes from {offset}, which should be whole records",
            path=path,
            offset=offset + int(positions[-1]),
        )
    if len(positions) - 1 != records:
        raise Corrupt(
            f"the {len(run)} bytes from here hold {len(positions) - 1} records, not {records}", path=path, offset=offset
        )
    frames = pa.Array.from_buffers(pa.binary(), records, [None, pa.py_buffer(positions), pa.py_buffer(run)])
    at = 0
    while at < records:
        fits = int(np.searchsorted(positions, int(positions[at]) + BATCH_BYTES, "right")) - 1
        end = min(max(fits, at + 1), at + BATCH_RECORDS, records)
        # The stop is needed: without one, binary_slice fails on Arrow's side.
        yield pc.binary_slice(frames.slice(at, end - at), LENGTH.size, LENGTH.size + MAX_RECORD), positions[at:end]
        at = end


def messages(run: RawMessages, dialect: str, topic: str, needs: Collection[str]) -> pa.RecordBatch:
    """The columns of the messages of a run that are in ``needs``, at least one; see `rows.TOPIC_SCHEMA`.

    A tag or an id that is empty is null, and so is a timestamp that Spark cannot hold: its microseconds need over 64 bits.
    """
    rows = len(run.bounds) // 2
    begins, ends = np.frombuffer(run.bounds, np.int32).reshape(rows, 2).T
    data, bytes_at, longs_at = pa.py_buffer(run.data), _numbers_in(run.data, ">u1"), _numbers_in(run.data, ">i8")

    def pieces(starts: Places, stops: Places, nulls: NDArray[np.bool_] | None = None) -> pa.Array:
        bounds = np.column_stack((starts, stops)).astype(np.int32)
        found = pa.Array.from_buffers(pa.binary(), 2 * rows - 1, [None, pa.py_buffer(bounds), data])
        if rows == 1 and nulls is None:
            return found  # not copied: it may have 2 GiB
        # Every other piece is what lies between two.
        return found.take(pa.array(np.arange(0, 2 * rows, 2, dtype=np.int32), mask=nulls))

    def longs(at: int) -> pa.Array:
        return pa.array(longs_at[begins + at].astype(np.int64))

    def texts(at: int, end: int) -> pa.Array:
        sizes = np.minimum(bytes_at[begins + at], end - at - 1)
        starts = begins + (at + 1)
        try:
            return pieces(starts, starts + sizes, sizes == 0).cast(pa.string())
        except pa.ArrowInvalid:  # not UTF-8
            return pa.array([zbus.slot_text(run.data, at + int(begin), end - at) or None for begin in begins], pa.string())

    def times() -> pa.Array:
        time = longs(zbus.TIMESTAMP_AT[dialect])
        micros = pc.multiply(time, 1000)  # wraps
        fits = pc.equal(pc.divide(micros, 1000), time)
        return pc.if_else(fits, micros, pa.scalar(None, pa.int64())).cast(pa.timestamp("us", "UTC"))

    columns: dict[str, Callable[[], pa.Array]] = {
        "value": lambda: pieces(begins + zbus.HEAD, ends),
        "tag": lambda: texts(zbus.TAG_AT, zbus.LENGTH_AT),
        "id": lambda: texts(zbus.ID_AT, zbus.ID_AT + zbus.ID_SLOT),
        "offset": lambda: pa.array(begins + np.int64(run.offset)),
        "number": lambda: longs(zbus.NUMBER_AT),
        "corr_offset": lambda: pa.array(np.zeros(rows, np.int64)) if dialect == "C" else longs(zbus.CORR_OFFSET_AT),
        "timestamp": times,
        "topic": lambda: pa.repeat(pa.scalar(topic, pa.string()), rows),
    }
    return pa.RecordBatch.from_pydict({name: make() for name, make in columns.items() if name in needs})


def _numbers_in(data: bytes, kind: str) -> NDArray[Any]:
    """The number that starts at each byte, without a copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray((max(len(data) - size + 1, 0),), kind, data, strides=(1,))
