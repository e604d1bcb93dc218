"""Batch reads of batches: their segments, divided into the partitions of a DataFrame."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StringType, StructField, StructType

from qewqew_core.batch import manifest, segments
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.store import Local, Read, Store, local_path, store_of
from qewqew_core.errors import BadArgument, BadManifest, Corrupt
from qewqew_spark.options import ROW_OPTIONS, Options
from qewqew_spark.source.rows import SCHEMA, TOPIC_SCHEMA, Rows, schema_of
from qewqew_spark.source.splitting import SPLIT_OPTIONS, Piece, Split

if TYPE_CHECKING:
    import pyarrow as pa

RUN_BYTES = 8 << 20  # a task holds about three times as much; frames of much less are not found as fast (see `frames`)
AT_ONCE = 16  # parts that a task reads ahead, each with at most
AHEAD_BYTES = 1 << 20  # bytes

OPTIONS = {"path", "paths", *SPLIT_OPTIONS, *ROW_OPTIONS}
BATCH = StructField("batch", StringType())  # the id of the row's batch, if the schema names this column


def matching(path: str, options: Options) -> list[str]:
    """The batches that a path stands for: itself, or if it contains ``*``, ``?`` or ``[…]``, those with a manifest.

    Raises `BadManifest` if there are none, `BadArgument`, and `StoreError`.
    """
    if re.search(r"[*?\[]", path) is None or (local_path(path) is not None and os.path.exists(path)):
        return [path]
    directory, name = os.path.split(path if path.endswith(".json") else f"{path.rstrip('/')}/{manifest.MANIFEST}")
    found = store_of(directory, options.under("fs.")).glob(name)
    if not found:
        raise BadManifest("no batch matches this pattern: it must match directories that have a manifest.json", path=path)
    return sorted(found)


def schema(paths: Sequence[str], options: Options) -> StructType:
    """The columns of some batches. Raises `BadManifest`, `BadArgument`, and `StoreError`."""
    options.check("a batch", OPTIONS, ["fs."])
    Split.of(options)
    batches = _manifests(paths, options)
    _check_alike(paths, batches)
    return schema_of(_columns(batches[0]), options)


def reader(paths: Sequence[str], options: Options, schema: StructType, batches: Sequence[Manifest] | None = None) -> BatchReader:
    """``batches``: the manifests, if they are at hand. Raises `BadManifest`, `BadArgument`, and `StoreError`."""
    options.check("a batch", OPTIONS, ["fs."])
    batches = batches or _manifests(paths, options)
    stores = [store_of(os.path.dirname(manifest.manifest_path(path)), options.under("fs.")) for path in paths]
    _check_alike(paths, batches)
    rows = Rows(columns_of(batches[0]), schema, options)
    return BatchReader(list(zip(stores, batches, strict=True)), Split.of(options), rows)


def _manifests(paths: Sequence[str], options: Options) -> list[Manifest]:
    return manifest.load_all(paths, options.under("fs."))


def _check_alike(paths: Sequence[str], batches: Sequence[Manifest]) -> None:
    for path, batch in zip(paths, batches, strict=True):
        if batch.layout != batches[0].layout:
            raise BadArgument(
                f"of the batches {paths[0]} and {path}, one is from a queue and one from a topic; their columns differ, so load "
                "each on its own"
            )


def _columns(batch: Manifest) -> StructType:
    return TOPIC_SCHEMA if batch.layout == manifest.BLOCK else SCHEMA


def columns_of(batch: Manifest) -> StructType:
    """All columns that a read of the batch can have."""
    return StructType([*_columns(batch), BATCH])


Part = TypeVar("Part")


@dataclass(frozen=True)
class Bundle(InputPartition, Generic[Part]):
    """What one task reads, one after the other. It travels from the driver to an executor."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class BatchPart:
    """All that reading a part of a segment of a batch needs."""

    store: Store
    batch: Manifest  # without segments
    segment: Segment
    first: int  # number in the batch of its first record


@dataclass(frozen=True)
class Ahead(Local):
    """A part that is read before it is asked for. Errors come when it is."""

    store: Store
    start: int
    data: Callable[[], bytes]

    def locate(self, name: str) -> str:
        return self.store.locate(name)

    @contextmanager
    def open(self, name: str) -> Iterator[Read]:
        data = self.data()
        yield lambda start, end: data[start - self.start : end - self.start]


def _ahead(parts: Sequence[BatchPart]) -> Generator[BatchPart, None, None]:
    """The parts. Small ones are read some ahead, so that answers of a store are awaited together."""

    def read(part: BatchPart) -> bytes:
        with part.store.open(part.segment.file) as read:
            return read(part.segment.start, part.segment.end)

    waiting: deque[BatchPart] = deque()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for part in parts:
            if len(parts) > 1 and part.segment.end - part.segment.start <= AHEAD_BYTES:
                data = pool.submit(read, part).result
                part = replace(part, store=Ahead(part.store.path, part.store, part.segment.start, data))
            waiting.append(part)
            if len(waiting) == AT_ONCE:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


class BatchReader(DataSourceReader):
    """Reads batches, each from its directory or URL, one after the other."""

    def __init__(self, batches: Sequence[tuple[Store, Manifest]], split: Split, rows: Rows) -> None:
        self.batches = batches
        self.split = split
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}  # what `read` needs; all else is in the partitions

    def partitions(self) -> list[Bundle[BatchPart]]:
        whole: list[BatchPart] = []
        for store, batch in self.batches:
            first, without = 0, replace(batch, segments=())
            for segment in batch.segments:
                whole.append(BatchPart(store, without, segment, first))
                first += segment.records
        segments = [part.segment for part in whole]
        pieces = [Piece(number, segment.start, segment.end, segment.cuts) for number, segment in enumerate(segments)]
        result: list[Bundle[BatchPart]] = []
        first = 0
        for task in self.split(pieces):
            parts: list[BatchPart] = []
            for number, start, end, _ in task:
                if start == segments[number].start:
                    first = whole[number].first
                part = segments[number].part(start, end)
                parts.append(replace(whole[number], segment=part, first=first))
                first += part.records
            result.append(Bundle(tuple(parts)))
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, of about 4 MiB at a time; raises `Corrupt`, which names file and offset."""
        if isinstance(partition, Bundle):  # else it is the one that Spark makes if there are none: a batch without segments
            with closing(_ahead(partition.parts)) as parts:
                for part in parts:
                    yield from self._read(part)

    def damage(self, bundle: Bundle[BatchPart]) -> Iterator[tuple[str, str]]:
        """Of each part that cannot be read because it is damaged: the id of its batch, and why."""
        with closing(_ahead(bundle.parts)) as parts:
            for part in parts:
                try:
                    for _ in self._read(part):
                        pass
                except (Corrupt, BadManifest) as error:
                    yield part.batch.id, str(error)

    def _read(self, part: BatchPart) -> Iterator[pa.RecordBatch]:
        store, batch, segment = part.store, part.batch, part.segment
        path = store.locate(segment.file)
        # Of another column it is known how many rows there are.
        needs = self.rows.needs - {BATCH.name} or {"offset"}

        def named(raw: pa.RecordBatch) -> pa.RecordBatch:
            if BATCH.name not in self.rows.needs:
                return raw
            import pyarrow as pa

            return raw.append_column(BATCH.name, pa.repeat(pa.scalar(batch.id, pa.string()), raw.num_rows))

        if batch.layout == manifest.BLOCK:
            from qewqew_spark.source.frames import messages

            for run in segments.read_messages(store, batch, segment):
                raw = named(messages(run, str(batch.dialect), batch.queue, needs))
                at, bounds = run.offset - segment.base, run.bounds
                yield self.rows.batch(raw, path, lambda row, at=at, bounds=bounds: at + bounds[2 * row])  # type: ignore[misc]
        else:
            for _, raw, place in records(store, segment, part.first, needs):
                yield self.rows.batch(named(raw), path, place)


def import_all() -> None:
    """Import what a read needs, which else it does at its first record."""
    import pyarrow as pa

    from qewqew_spark.codecs import from_json  # noqa: F401
    from qewqew_spark.source import decoding, frames  # noqa: F401

    pa.array([])  # for this, Arrow imports pandas


def records(
    store: Store,
    segment: Segment,
    number: int,
    needs: Collection[str],
    *,
    skip: Sequence[tuple[int, int]] = (),
    stop: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch, Callable[[int], int]]]:
    """The records of a segment in batches of about 4 MiB, with their columns ``needs``.

    Each batch comes with the number of the record after it, and with a function that returns the offset in the file of its
    i-th record. ``number`` is the number of the first record. Records in the regions ``skip`` of the file have no number and
    are left out, as are those from number ``stop`` on. Raises `Corrupt`.
    """
    import numpy as np  # late, as Arrow: the driver plans reads without them
    import pyarrow as pa

    from qewqew_spark.source.frames import payloads, spare_collector

    spare_collector()
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


def unnamed_text(fields: StructType, text: str | None) -> str | None:
    """What the fields do not name in a JSON object, as JSON; None: nothing, or it is not an object."""
    from qewqew_spark.codecs.from_json import parse
    from qewqew_spark.codecs.objects import Unreadable
    from qewqew_spark.codecs.unnamed import beyond, names_of, of_json, written

    try:
        value = parse((text or "").encode())
    except Unreadable:
        return None
    found, _ = beyond([value], names_of(fields), (), 1, of_json) if isinstance(value, dict) else ({}, 0)
    return written(found[0]) if found else None
