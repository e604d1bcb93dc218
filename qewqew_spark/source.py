"""The Spark data source `qewqew`: a batch as a DataFrame.

``spark.read.format("qewqew").load(PATH)`` reads a batch; PATH is its directory or its manifest. One
row per record, one input partition per segment:

| column    | type   |                                                              |
|-----------|--------|--------------------------------------------------------------|
| `value`   | BINARY | the record                                                   |
| `offset`  | LONG   | number of the record in the batch, from 0, over all segments |
| `segment` | STRING | name of the segment file                                     |

A batch of a topic has a row per message:

| column        | type      |                                         |
|---------------|-----------|-----------------------------------------|
| `value`       | BINARY    | the body                                |
| `tag`, `id`   | STRING    | null where there is none                |
| `offset`      | LONG      | where the message begins in the topic   |
| `number`      | LONG      | of the message in the topic, from 0     |
| `corr_offset` | LONG      | the application's                       |
| `timestamp`   | TIMESTAMP | when it was appended, to a millisecond  |
| `topic`       | STRING    | name of the topic                       |

The checksum of a segment is verified before any record of it is delivered.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from qewqew_core import manifest
from qewqew_core.errors import BadArgument

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no types

SCHEMA = StructType(
    [
        StructField("value", BinaryType()),
        StructField("offset", LongType()),
        StructField("segment", StringType()),
    ]
)
TOPIC_SCHEMA = StructType(
    [
        StructField("value", BinaryType()),
        StructField("tag", StringType()),
        StructField("id", StringType()),
        StructField("offset", LongType()),
        StructField("number", LongType()),
        StructField("corr_offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("topic", StringType()),
    ]
)


def local_path(path: str) -> str:
    """The absolute path of a file that is given by path or `file:` URI, as spark-submit's users write it.

    Raises `BadArgument` for any other scheme.
    """
    scheme, colon, rest = path.partition(":")
    if not colon or os.path.exists(path) or not scheme.isalnum() or len(scheme) < 2:
        return os.path.abspath(path)
    host = ""
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
    if scheme.lower() != "file" or host not in ("", "localhost") or not rest.startswith("/"):
        raise BadArgument(
            f"the path {path!r} is not on a local file system; copy the batch directory to one that this Spark's driver and "
            "executors mount, and give its absolute path or a file: URI"
        )
    # Hadoop takes what follows file: literally, a proper URI escapes it.
    return rest if os.path.exists(rest) else unquote(rest)


@dataclass(frozen=True)
class SegmentPartition(InputPartition):
    """All that reading one segment needs; it travels from the driver to an executor."""

    directory: str
    batch: manifest.Manifest  # without segments
    segment: manifest.Segment
    first: int  # number in the batch of the segment's first record


class BatchReader(DataSourceReader):
    """Reads the batch whose manifest is at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def partitions(self) -> list[InputPartition]:
        """One per segment; raises `BadManifest`."""
        directory = os.path.dirname(manifest.manifest_path(self.path))
        result: list[InputPartition] = []
        first = 0
        loaded = manifest.load(self.path)
        batch = replace(loaded, segments=())
        for segment in loaded.segments:
            result.append(SegmentPartition(directory, batch, segment, first))
            first += segment.records
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one segment; raises `CorruptQueue`, which names file and offset."""
        # Spark makes one empty partition of its own where there are none: a batch without segments.
        if isinstance(partition, SegmentPartition):
            yield from read_messages(partition) if partition.batch.layout == manifest.BLOCK else read_segment(partition)


def read_segment(partition: SegmentPartition) -> Iterator[pa.RecordBatch]:
    """The records of a segment as Arrow batches of about 1 MiB; raises `CorruptQueue`."""
    import pyarrow as pa  # late: the driver plans reads without it

    from qewqew_spark.frames import payloads

    segment, number = partition.segment, partition.first
    path = os.path.join(partition.directory, segment.file)
    name = pa.scalar(segment.file, pa.string())
    at = segment.start
    for records, run in manifest.read_segment(partition.directory, segment):
        for values in payloads(run, records, path=path, offset=at):
            rows = len(values)
            numbers = pa.py_buffer(array("q", range(number, number + rows)))
            offsets = pa.Array.from_buffers(pa.int64(), rows, [None, numbers])
            yield pa.RecordBatch.from_arrays([values, offsets, pa.repeat(name, rows)], names=SCHEMA.names)
            number += rows
        at += len(run)


def read_messages(partition: SegmentPartition) -> Iterator[pa.RecordBatch]:
    """The messages of a segment as Arrow batches of at most 1 MiB or one message; raises `CorruptQueue`, `BadManifest`."""
    import pyarrow as pa  # late: the driver plans reads without it

    from qewqew_spark.frames import columns

    batch = partition.batch
    topic = pa.scalar(batch.queue, pa.string())
    for run in manifest.read_messages(partition.directory, batch, partition.segment):
        found = columns(run, str(batch.dialect))
        yield pa.RecordBatch.from_arrays([*found, pa.repeat(topic, len(found[0]))], names=TOPIC_SCHEMA.names)


class QewqewDataSource(DataSource):
    """The format `qewqew`; see the module."""

    @classmethod
    def name(cls) -> str:
        return "qewqew"

    def schema(self) -> StructType:
        """The columns; looks at the manifest, so that a wrong path fails in `load` and not in the first action."""
        return TOPIC_SCHEMA if manifest.load(_path(self.options)).layout == manifest.BLOCK else SCHEMA

    def reader(self, schema: StructType) -> BatchReader:
        ours = self.schema()
        if [(field.name, field.dataType) for field in schema] != [(field.name, field.dataType) for field in ours]:
            raise BadArgument(
                f"the format 'qewqew' has the columns {_ddl(ours)}, not {_ddl(schema)}; leave .schema(...) out, "
                "and decode the column value"
            )
        return BatchReader(_path(self.options))


def _path(options: Mapping[str, str]) -> str:
    unknown = sorted(set(options) - {"path"})
    if unknown == ["paths"]:
        raise BadArgument("the format 'qewqew' reads one batch at a time; load each and unite them with unionAll")
    if unknown:
        raise BadArgument(f"the format 'qewqew' has no option {', '.join(map(repr, unknown))}; the only one is 'path'")
    path = options.get("path", "")
    if not path:
        raise BadArgument("no path; give load() the directory of a batch or its manifest.json")
    return local_path(path)


def _ddl(schema: StructType) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema) or "none"
