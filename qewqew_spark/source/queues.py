"""Batch reads of a queue: a snapshot of the waiting records, made without its lock.

Nothing keeps the records for the reader. Others may take them, and their chunk files may then be removed, moved by a lease,
or used again. A run of records is delivered only if it has the checksums that the log had at the time of the snapshot.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qewqew_core.batch.manifest import Segment, checksums
from qewqew_core.batch.store import Local, Read
from qewqew_core.errors import Corrupt, RecordsTaken
from qewqew_core.formats.chunk import chunk_path
from qewqew_core.formats.chunk_state import Chunk, Region
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.queue import inspection
from qewqew_spark.options import ROW_OPTIONS, Options
from qewqew_spark.source import batches
from qewqew_spark.source.batches import Bundle
from qewqew_spark.source.rows import SCHEMA, Rows, schema_of
from qewqew_spark.source.splitting import SPLIT_OPTIONS, Piece, Split

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS = {"path", "maxRecords", "failOnDataLoss", *SPLIT_OPTIONS, *ROW_OPTIONS}


def schema(path: str, options: Options) -> StructType:
    """The columns of a queue. Raises `BadArgument`."""
    found = schema_of(SCHEMA, options)
    reader(path, options, found)
    return found


def reader(path: str, options: Options, schema: StructType) -> QueueReader:
    """Raises `BadArgument`."""
    options.check("a queue", OPTIONS)
    return QueueReader(path, options, Rows(SCHEMA, schema, options))


@dataclass(frozen=True)
class ChunkFiles(Local):
    """The directory of a queue, with bytes of one chunk file that only the log has."""

    pending: Sequence[tuple[int, bytes]] = field(default=(), repr=False)  # offset, and what belongs there

    @contextmanager
    def open(self, name: str) -> Iterator[Read]:
        with super().open(name) as read:
            yield lambda start, end: inspection.with_pending(read(start, end), start, end, self.pending)


@dataclass(frozen=True)
class QueuePart:
    """Records of one chunk: those of a segment that do not lie in ``skip``, up to number ``stop``."""

    files: ChunkFiles
    segment: Segment  # begins at a boundary of the log's index, and has its checksums
    first: int  # number in the snapshot of the first record
    stop: int
    skip: tuple[Region, ...]  # of the file: what was taken before the snapshot
    chunk_id: int
    sign: IndexEntry  # tells the chunk from a later one in the same file


class QueueReader(DataSourceReader):
    """Reads a snapshot of the queue at ``path``."""

    def __init__(self, path: str, options: Options, rows: Rows) -> None:
        self.path = path
        self.rows = rows
        self.split = Split.of(options)
        self.most = options.whole("maxRecords")
        self.strict = options.flag("failOnDataLoss", True)

    def partitions(self) -> list[Bundle[QueuePart]]:
        """The snapshot; raises `BadPath`, `Corrupt`."""
        chunks, pending = inspection.snapshot(self.path)
        read: list[tuple[Chunk, Segment, int]] = []  # and how many records of the segment were taken
        left = self.most
        for chunk in chunks:
            if left is not None and left <= 0:
                break
            segment = _segment(self.path, chunk)
            taken = segment.records - chunk.records
            if left is not None:
                segment = segment if chunk.consumed else _front(segment, taken + left)
                left -= chunk.records
            read.append((chunk, segment, taken))
        # Of what was taken in the middle of a chunk nobody knows how many records lay between which boundaries.
        pieces = [
            Piece(number, segment.start, segment.end, () if chunk.consumed else segment.cuts)
            for number, (chunk, segment, _) in enumerate(read)
        ]
        result: list[Bundle[QueuePart]] = []
        stop = 0
        for task in self.split(pieces):
            parts: list[QueuePart] = []
            for number, start, end, _ in task:
                chunk, segment, taken = read[number]
                part = segment.part(start, end)
                first, stop = stop, stop + part.records
                if start == segment.start:  # the head is in the first part
                    stop -= taken
                if self.most is not None:
                    stop = min(stop, self.most)
                files = ChunkFiles(os.path.dirname(self.path), pending.get(chunk.id, ()))
                front = [(segment.start, chunk.head)] if segment.start < chunk.head else []
                skip = (*front, *((gone.start, gone.end) for gone in chunk.consumed))
                parts.append(QueuePart(files, part, first, stop, skip, chunk.id, chunk.pieces[chunk.piece_of(chunk.head)]))
            result.append(Bundle(tuple(parts)))
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, of about 4 MiB at a time; raises `Corrupt`, `RecordsTaken`."""
        if isinstance(partition, Bundle):  # else it is the one that Spark makes if there are none: an empty queue
            for part in partition.parts:
                yield from self._read(part)

    def _read(self, part: QueuePart) -> Iterator[pa.RecordBatch]:
        path, number = part.files.locate(part.segment.file), part.first
        found = batches.records(part.files, part.segment, number, self.rows.needs, skip=part.skip, stop=part.stop)
        while True:
            try:
                number, raw, place = next(found)
            except StopIteration:
                return
            except Corrupt as error:
                if inspection.is_damaged(self.path, part.chunk_id, part.sign):
                    raise
                lost = f"{part.stop - number} records were taken from the queue after this read began, and are gone"
                if not self.strict:
                    print(f"qewqew: {path}: {lost}; they are left out", file=sys.stderr)
                    return
                raise RecordsTaken(
                    f"{lost}; lease a batch and read that, load the queue again for what it has now, or set the option "
                    "failOnDataLoss to false to read what is left",
                    path=path,
                    offset=error.offset,
                ) from None
            yield self.rows.batch(raw, path, place)


def _segment(path: str, chunk: Chunk) -> Segment:
    """The chunk, from the boundary in front of its head."""
    first, *inside = chunk.pieces[chunk.piece_of(chunk.head) :]
    seed, *inner, last = checksums([first.crc, *(piece.crc for piece in inside), chunk.crc])
    boundaries = tuple((piece.offset, piece.records - first.records) for piece in inside)
    name = os.path.basename(chunk_path(path, chunk.id))
    return Segment(name, first.offset, chunk.tail, chunk.total - first.records, last, boundaries, tuple(inner), seed)


def _front(segment: Segment, records: int) -> Segment:
    """As little of the segment as has its first ``records``."""
    at = bisect_left(segment.boundaries, records, key=itemgetter(1))
    return segment if at == len(segment.boundaries) else segment.part(segment.start, segment.boundaries[at][0])
