"""`append_once`: rows of a batch become files of a table in one commit, which names the batch.

Spark's executors write Parquet files into a directory of this attempt, below the table, where nobody looks. The driver then
looks whether a commit of the table names the batch; if none does, it commits the files and the name together. The table refuses
the commit if somebody else was faster: then it looks again. So one of all attempts, whenever they run, is in the table.

The same idea: Flink's `max-committed-checkpoint-id`, the offsets that Kafka Connect keeps in a snapshot's summary, Spark's own
`txnAppId` of Delta.
"""

from __future__ import annotations

import importlib
import random
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_spark.tables.evolution import fits, new_columns
from qewqew_spark.tables.session import delete, files_below, folding, quoted, setting

FORMATS = {"iceberg": "Iceberg", "delta": "Delta"}
BATCH_ID = "qewqew.batch-id"  # in what a commit says of itself
ATTEMPT = "qewqew.attempt"  # which of the runs of the batch
TRIES = 100  # of a commit that others are faster with


@dataclass(frozen=True)
class Commit:
    """The commit of a table that has the batch: ``snapshot`` is its id in Iceberg, its version in Delta.

    ``again``: it was there already, and nothing was added.
    """

    table: str
    snapshot: str
    again: bool


class TooManyConflicts(OSError):
    """Others committed to the table each time in between. Nothing was added; the same call may be made again."""


class Append(ABC):
    """One batch that is to be in one table once. `write`, then `commit` or `abort`.

    ``table``: Iceberg's `catalog.namespace.table`, or the path or URL of a Delta table; it is made if it is not there, with
    ``partition_by`` and ``properties``. ``batch``: names the batch, and nothing else ever. ``schema_evolution``: "merge",
    "fail" or "ignore", as of the job. ``since``: when the batch was made. Where the table has forgotten
    commits since then, a warning is logged.
    """

    kind: str

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        batch: str,
        *,
        partition_by: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        schema_evolution: str = "merge",
        since: datetime | None = None,
    ) -> None:
        self.spark = spark
        self.table = table
        self.batch = batch
        self.partition_by = partition_by
        self.properties = {name: str(value) for name, value in (properties or {}).items()}
        self.schema_evolution = schema_evolution
        self.since = since
        self.left_out: list[str] = []  # columns that are not written, because the table lacks them
        self._columns = StructType()  # of what was written
        self.attempt = uuid.uuid4().hex
        readable = re.sub(r"[^\w.-]", "_", batch, flags=re.ASCII)[:100]
        self.directory = f"data/qewqew/{readable}-{self.attempt}"  # below the table
        self._staged: str | None = None  # the directory of this attempt

    # What a kind of table knows

    @abstractmethod
    def _find(self) -> tuple[str, bool] | None:
        """The snapshot that has the batch, looked up now, and whether the files of this attempt are in it."""

    @abstractmethod
    def there(self) -> StructType | None:
        """The columns of the table; None if there is none."""

    @abstractmethod
    def _make(self, columns: StructType) -> None:
        """Make the table, unless somebody else just did."""

    @abstractmethod
    def _location(self) -> str:
        """Where the table is."""

    @abstractmethod
    def _add(self, files: Sequence[tuple[str, int]]) -> bool:
        """Commit these files (place below the table, bytes) in the batch's name. False: the table has changed since `_find`."""

    @abstractmethod
    def _widen(self, columns: Sequence[StructField]) -> None:
        """Add these columns to the table."""

    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        """The rows, and the columns by whose values Spark is to part the files."""
        return rows, list(self.partition_by)

    def _held(self, columns: StructType) -> StructType:
        """The types that the table has for these."""
        return columns

    # The same for all

    def committed(self) -> str | None:
        """The snapshot that has the batch, looked up now."""
        found = self._find()
        return None if found is None else found[0]

    def check(self, columns: StructType) -> None:
        """Raises `BadArgument` if they do not fit to those of the table."""
        new = self._new(columns)
        self.left_out = [field.name for field in new] if self.schema_evolution == "ignore" else []

    def _new(self, columns: StructType) -> list[StructField]:
        """Those that the table lacks. Raises as `check`."""
        there = self.there()
        what = f"{FORMATS[self.kind]} table {self.table}"
        return (
            []
            if there is None
            else new_columns(there, self._held(columns), self.schema_evolution, what, folding(self.spark), fits)
        )

    def write(self, rows: DataFrame) -> None:
        """Have Spark write the rows where nobody sees them. The table is made if it is not there; raises `BadArgument`."""
        self.check(rows.schema)
        rows = rows.drop(*self.left_out)
        self._columns = rows.schema
        if self.there() is None:
            self._make(self._held(rows.schema))
        rows = self._cast(rows)
        rows, parts = self._partitioned(rows)
        self._staged = f"{self._location().rstrip('/')}/{self.directory}"
        options = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}
        with setting(self.spark, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"):  # not INT96
            rows.write.options(**options).partitionBy(*parts).parquet(self._staged)

    def commit(self) -> Commit:
        """What was written is in the table when this returns, or another attempt is. Raises `TooManyConflicts`."""
        staged = self._staged
        if staged is None:
            raise BadArgument("nothing was written: call `write` first")
        files = [(f"{self.directory}/{name}", size) for name, size in files_below(self.spark, staged, ".parquet")]
        for number in range(TRIES):
            if (found := self._find()) is not None:
                snapshot, ours = found
                if not ours:
                    self.abort()
                self._staged = None
                return Commit(self.table, snapshot, not ours)
            if new := self._new(self._columns):
                self._widen(new)
                continue  # the table is another one now: look again, or a commit in between would not be seen
            # While nobody knows whether the files are the table's, `abort` must not remove them: they stay as orphans.
            self._staged = None
            done = self._add(files)
            self._staged = staged
            if not done:
                time.sleep(random.uniform(0, min(0.05 * 2**number, 2)))  # noqa: S311
        raise TooManyConflicts(f"{FORMATS[self.kind]} table {self.table}: {TRIES} times others were faster with their commits")

    def abort(self) -> None:
        """Remove what was written and not committed."""
        if self._staged is not None:
            delete(self.spark, self._staged)
            self._staged = None

    def _cast(self, rows: DataFrame) -> DataFrame:
        """The columns with the types that the table has for them. What it requires must be there: Spark looks at each value."""
        there = self.there()
        fold = folding(self.spark)
        types: dict[str, StructField] = {} if there is None else {fold(field.name): field for field in there}
        held = {field.name: field.dataType for field in self._held(rows.schema)}

        def kind(name: str) -> DataType:
            return types[fold(name)].dataType if fold(name) in types else held[name]

        rows = rows.select(
            [
                F.col(quoted(name)).cast(kind(name)).alias(types[fold(name)].name if fold(name) in types else name)
                for name in rows.columns
            ]
        )
        required = {field.name for field in types.values() if not field.nullable}
        if missing := sorted(required - set(rows.columns)):
            raise BadArgument(
                f"{FORMATS[self.kind]} table {self.table} requires the column {missing[0]!r}, and the batch has none"
            )
        if any(field.nullable and field.name in required for field in rows.schema):
            session: Any = self.spark._jsparkSession
            columns = StructType(
                [StructField(field.name, field.dataType, field.nullable and field.name not in required) for field in rows.schema]
            )
            made = session.createDataFrame(rows._jdf.toJavaRDD(), session.parseDataType(columns.json()))
            rows = DataFrame(made, self.spark)  # raises in the executor that meets a null
        return rows


def append_to(spark: SparkSession, table: str, batch: str, format: str = "iceberg", **options: Any) -> Append:
    """An `Append`; raises `BadArgument`, also if the extra is not installed that the format needs."""
    kind = format.lower()
    if kind not in FORMATS:
        raise BadArgument(f"format must be one of {', '.join(FORMATS)}, not {format!r:.80}")
    try:
        module = importlib.import_module(f"qewqew_spark.tables.{kind}")
    except ModuleNotFoundError as error:
        raise BadArgument(
            f"the format {kind!r} needs a library that is not there ({error}): install qewqew with its extra {kind!r} "
            f"where the driver runs, pip install 'qewqew[{kind}]'"
        ) from error
    made: Append = getattr(module, f"{FORMATS[kind]}Append")(spark, table, batch, **options)
    return made


def append_once(rows: DataFrame, table: str, batch_id: str, *, format: str = "iceberg", **options: Any) -> Commit:
    """Append the rows to the table, unless a commit of it names this batch already; durable when it returns.

    ``table`` and ``options``: see `Append`. Rows are computed where the batch is not there yet. In `foreachBatch`, where the
    number of a batch begins anew with each query, let the id name the query too: ``f"{query}-{number}"``. Raises `BadArgument`
    before anything is written, `TooManyConflicts`, and what Spark and the table's library raise.
    """
    append = append_to(rows.sparkSession, table, batch_id, format, **options)
    if (snapshot := append.committed()) is not None:
        return Commit(table, snapshot, True)
    try:
        append.write(rows)
        return append.commit()
    except BaseException:
        with suppress(Exception):  # what went wrong is what to report
            append.abort()
        raise
