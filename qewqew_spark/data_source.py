"""The Spark data source `qewqew`: batches, queues and topics as DataFrames and streams, and both ways.

``spark.read.format("qewqew").load(PATH)`` reads what PATH is:

* a batch, which is its directory, its `manifest.json`, or the URL of either on an object store; or several: see
  `source.batches`;
* a queue, which is its header file (`/data/orders.qew`): see `source.queues`;
* a topic, which is its directory: see `source.topics`.

``spark.readStream`` reads a topic (`source.stream`), ``df.write`` and ``df.writeStream`` append to a queue or topic
(`sink.writers`). `source.rows` has the columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from qewqew_core.batch import manifest, store
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadManifest
from qewqew_core.queue import paths
from qewqew_spark.options import Options, local_path
from qewqew_spark.source import batches
from qewqew_spark.source.rows import TOPIC_SCHEMA, schema_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter


def kind_of(path: str) -> str:
    """Whether ``path``, from `local_path`, is a "batch", a "queue" or a "topic"; raises `BadManifest` if it is nothing."""
    if store.local_path(path) is None:
        return "batch"
    with opening(path, "directory"):  # what does not answer does not pass for nothing
        DISK.exists(path)
    if os.path.isfile(os.path.join(path, manifest.MANIFEST)) or path.endswith(".json"):
        return "batch"
    directory, name = os.path.split(path)
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, name + ".idx")):
            return "topic"
        what = f"this directory has neither a {manifest.MANIFEST}, as a batch has, nor a {name}.idx, as a topic of that name has"
    elif os.path.isfile(path):
        # The header of a queue has two bytes; no name is asked for.
        if os.path.getsize(path) <= 2 or os.path.exists(path + paths.LOG) or paths.chunk_ids(path, os.listdir(directory)):
            return "queue"
        what = "this file is neither a manifest.json nor the header file of a queue"
    elif path.endswith(".qew") and os.path.isdir(directory):
        return "queue"  # an empty one, when it is closed, leaves no files
    else:
        what = "there is nothing here"
    raise BadManifest(
        f"{what}; give the directory of a batch or its manifest.json, the header file of a queue (/data/orders.qew), or the "
        "directory of a topic",
        path=path,
    )


class QewqewDataSource(DataSource):
    """The format `qewqew`; see the module."""

    @classmethod
    def name(cls) -> str:
        return "qewqew"

    def schema(self) -> StructType:
        """The columns; looks at what the path is, so that a wrong one fails in `load` and not in the first action."""
        if "provider" in self.options:
            raise BadArgument(f"a table of Spark's catalog cannot be read: {_TABLE}")
        options = Options(self.options)
        match _what(self.options):
            case "batch", paths:
                return batches.schema(paths, options)
            case "queue", [path]:
                from qewqew_spark.source import queues

                return queues.schema(path, options)
            case _:  # its options are those of a read or those of a stream, as will turn out
                return schema_of(TOPIC_SCHEMA, options)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = Options(self.options)
        match _what(self.options):
            case "batch", paths:
                return batches.reader(paths, options, schema)
            case "queue", [path]:
                from qewqew_spark.source import queues

                return queues.reader(path, options, schema)
            case _, paths:
                from qewqew_spark.source import topics

                return topics.reader(paths[0], options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        kind, paths = _what(self.options)
        if kind != "topic":
            raise BadArgument(f"{paths[0]} is a {kind}, but only topics can be streamed; read a {kind} with spark.read")
        from qewqew_spark.source import stream

        return stream.stream_reader(Options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from qewqew_spark.sink import writers

        return writers.writer(Options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from qewqew_spark.sink import writers

        return writers.stream_writer(Options(self.options), schema, overwrite)


def register(spark: SparkSession) -> None:
    """Make the format known to this Spark, which does not find by itself what came with ``--py-files``."""
    try:
        spark.dataSource.register(QewqewDataSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":  # Spark 4.0 has found it and takes no other
            raise


# Of OPTIONS and LOCATION, a source in Python sees nothing when the table is read, and nothing at all if columns are given.
_TABLE = (
    "Spark does not pass its path and options to a Python data source; use "
    "CREATE TEMPORARY VIEW … USING qewqew OPTIONS (path '…')"
)


def _what(options: Mapping[str, str]) -> tuple[str, list[str]]:
    """What to read: the kind and the paths. Only batches may have several. Raises `BadArgument`, `BadManifest`."""
    given = json.loads(options["paths"]) if "paths" in options else [options.get("path", "")]
    if not given or not all(given):
        raise BadArgument(f"no path; give load() a batch, a queue or a topic. If this is a table of Spark's catalog: {_TABLE}")
    paths = [found for path in given for found in batches.matching(local_path(path), Options(options))]
    kinds = [kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != "batch" and len(paths) > 1:
            raise BadArgument(
                f"{path} is a {kind}, but only batches can be read together; load each and combine them with unionAll"
            )
    return kinds[0], paths
