"""Batch reads of a batch: its segments, divided into the partitions of a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qewqew_core.batch import manifest, segments
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.store import Store, store_of
from qewqew_spark.options import Options
from qewqew_spark.source.rows import SCHEMA, TOPIC_SCHEMA, Rows, row_options, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT_OPTIONS = {"minPartitions", "maxPartitionBytes"}
LEAST_PARTITION, LARGEST_PARTITION = 8 << 20, 32 << 20  # starting a task of Python's costs as much as decoding several MiB
RUN_BYTES = 8 << 20  # a task holds about three times as much; frames of much less are not found as fast (see `frames`)


def schema(path: str, options: Options) -> StructType:
    """The columns of a batch. Raises `BadManifest`, `BadArgument`, and `StoreError`."""
    options.check("a batch", {"path", *SPLIT_OPTIONS, *row_options()}, ["fs."])
    Split(options)
    return schema_of(_source(manifest.load(path, options.under("fs."))), options)


def reader(path: str, options: Options, schema: StructType, batch: Manifest | None = None) -> BatchReader:
    """``batch``: the manifest, if it is at hand. Raises `BadManifest`, `BadArgument`, and `StoreError`."""
    options.check("a batch", {"path", *SPLIT_OPTIONS, *row_options()}, ["fs."])
    batch = batch or manifest.load(path, options.under("fs."))
    store = store_of(os.path.dirname(manifest.manifest_path(path)), options.under("fs."))
    return BatchReader(store, batch, Split(options), Rows(_source(batch), schema, options))


def _source(batch: Manifest) -> StructType:
    return TOPIC_SCHEMA if batch.layout == manifest.BLOCK else SCHEMA


class SegmentPart(Protocol):
    """One segment, or a part of one, and what else reading it needs."""

    @property
    def segment(self) -> Segment: ...


Part = TypeVar("Part", bound=SegmentPart)


@dataclass(frozen=True)
class Bundle(InputPartition, Generic[Part]):
    """What one task reads, one after the other. It travels from the driver to an executor."""

    parts: tuple[Part, ...]


def partition_bytes(given: int | None, total: int) -> int:
    """About how many bytes of ``total`` one partition reads: as ``given``, or such that each processor gets some.

    Spark does not tell a Python source how many processors there are, so those of the driver's host are counted.
    """
    return given or min(LARGEST_PARTITION, max(LEAST_PARTITION, total // (os.cpu_count() or 1)))


class Split:
    """How a read divides segments between tasks: of about ``maxPartitionBytes``, and into ``minPartitions`` at least if
    boundaries allow it. Raises `BadArgument`.
    """

    def __init__(self, options: Options) -> None:
        self.least = options.whole("minPartitions") or 1
        self.size = options.whole("maxPartitionBytes")

    def __call__(self, segments: Sequence[Segment], may: Sequence[bool] | None = None) -> list[list[Segment]]:
        """The parts of each segment; of those that ``may`` not be divided, themselves."""
        total = sum(segment.end - segment.start for segment in segments)
        size = min(partition_bytes(self.size, total), max(1, total // self.least))
        while True:
            parts = [segment.split(size) if may is None or may[at] else [segment] for at, segment in enumerate(segments)]
            if sum(map(len, parts)) >= self.least or size == 1:
                return parts
            size //= 2

    def bundles(self, parts: Sequence[Part]) -> list[Bundle[Part]]:
        """The parts, in their order, several together where they are small."""
        size = partition_bytes(self.size, sum(part.segment.end - part.segment.start for part in parts))
        while True:
            found: list[list[Part]] = []
            room = 0
            for part in parts:
                length = part.segment.end - part.segment.start
                if not found or length > room:
                    found.append([])
                    room = size
                found[-1].append(part)
                room -= length
            if len(found) >= min(self.least, len(parts)):
                return [Bundle(tuple(some)) for some in found]
            size //= 2


@dataclass(frozen=True)
class BatchPart:
    """All that reading a part of a segment of a batch needs."""

    store: Store
    batch: Manifest  # without segments
    segment: Segment
    first: int  # number in the batch of its first record


class BatchReader(DataSourceReader):
    """Reads a batch, from its directory or URL ``store``."""

    def __init__(self, store: Store, batch: Manifest, split: Split, rows: Rows) -> None:
        self.store = store
        self.batch = batch
        self.split = split
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}  # what `read` needs; all else is in the partitions

    def partitions(self) -> list[Bundle[BatchPart]]:
        batch = replace(self.batch, segments=())
        result: list[BatchPart] = []
        first = 0
        for parts in self.split(self.batch.segments):
            for part in parts:
                result.append(BatchPart(self.store, batch, part, first))
                first += part.records
        return self.split.bundles(result)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, of about 1 MiB at a time; raises `Corrupt`, which names file and offset."""
        if isinstance(partition, Bundle):  # else it is the one that Spark makes where there are none: a batch without segments
            for part in partition.parts:
                yield from self._read(part)

    def _read(self, part: BatchPart) -> Iterator[pa.RecordBatch]:
        store, batch, segment = part.store, part.batch, part.segment
        path = store.locate(segment.file)
        if batch.layout == manifest.BLOCK:
            from qewqew_spark.source.frames import messages

            for run in segments.read_messages(store, batch, segment):
                raw = messages(run, str(batch.dialect), batch.queue, self.rows.needs)
                at, bounds = run.offset - segment.base, run.bounds
                yield self.rows.batch(raw, path, lambda row, at=at, bounds=bounds: at + bounds[2 * row])  # type: ignore[misc]
        else:
            for _, raw, place in records(store, segment, part.first, self.rows.needs):
                yield self.rows.batch(raw, path, place)


def records(
    store: Store,
    segment: Segment,
    number: int,
    needs: Collection[str],
    *,
    skip: Sequence[tuple[int, int]] = (),
    stop: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch, Callable[[int], int]]]:
    """The records of a segment in batches of about 1 MiB, with their columns ``needs``.

    With each batch come the number of the record behind it, and what tells where in the file its i-th record begins.
    ``number`` is that of the first record; those in the regions ``skip`` of the file have none and are left out, as are those
    from number ``stop`` on. Raises `Corrupt`.
    """
    import numpy as np  # late, as Arrow: the driver plans reads without them
    import pyarrow as pa

    from qewqew_spark.source.frames import payloads

    path = store.locate(segment.file)
    at, before = segment.start, 0
    for count, run in segments.read_segment(store, segment, RUN_BYTES):
        end = at + len(run)
        inside = [(offset - at, known - before) for offset, known in segment.boundaries if at < offset < end]
        for values, places in payloads(run, count, path=path, offset=at, boundaries=inside):
            for gone, back in skip:
                there = (places < gone - at) | (places >= back - at)
                if not there.all():
                    values, places = values.filter(pa.array(there)), places[there]
            if stop is not None:
                values = values[: stop - number]
            first, number = number, number + len(values)
            if len(values):
                columns = {
                    "value": values,
                    "offset": np.arange(first, number),
                    "segment": pa.repeat(pa.scalar(segment.file, pa.string()), len(values)),
                }
                raw = pa.RecordBatch.from_pydict({name: columns[name] for name in needs})
                yield number, raw, lambda row, at=at, places=places: at + int(places[row])  # type: ignore[misc]
            if number == stop:
                return
        at, before = end, before + count
