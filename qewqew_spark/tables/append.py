"""`append_once`: rows of a batch become files of a table in one commit, which names the batch.

Spark's executors write Parquet files into a directory of this attempt, below the table, where nobody looks. The driver then
looks whether a commit of the table names the batch; if none does, it commits the files and the name together. The table refuses
the commit if somebody else was faster: then it looks again. So one of all attempts, whenever they run, is in the table.
`by_spark` does the same with Spark's connectors, which write and commit in one step.

The same idea: Flink's `max-committed-checkpoint-id`, the offsets that Kafka Connect keeps in a snapshot's summary, Spark's own
`txnAppId` of Delta.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_spark.tables.evolution import fits, new_columns
from qewqew_spark.tables.session import delete, files_below, folding, quoted, setting

FORMATS = {"iceberg": "Iceberg", "delta": "Delta"}
COMMITS = "driver", "spark"
BATCH_ID = "qewqew.batch-id"  # in what a commit says of itself
ATTEMPT = "qewqew.attempt"  # which of the runs of the batch
TRIES = 100  # of a commit that others are faster with
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """The commit of a table that has the batch: ``snapshot`` is its id in Iceberg, its version in Delta.

    ``again``: it was there already, and nothing was added.
    """

    table: str
    snapshot: str
    again: bool


class TooManyConflicts(OSError):
    """Other commits came first each time. Nothing was added; you can make the same call again."""


def marked(text: str | None, batch: str) -> str | None:
    """The attempt in `Append.marks` as JSON, if they are of this batch."""
    try:
        found = json.loads(text or "null")
    except ValueError:  # somebody else's
        return None
    return found.get(ATTEMPT) if isinstance(found, dict) and found.get(BATCH_ID) == batch else None


class Append(ABC):
    """One batch that is to be in one table once. `write`, then `commit` or `abort`.

    ``table``: Iceberg's `catalog.namespace.table`, or the path or URL of a Delta table; it is made if it is not there, with
    ``partition_by`` and ``properties``. ``batch``: names the batch, and nothing else ever. ``schema_evolution``: "merge",
    "fail" or "ignore", as of the job. ``since``: when the batch was made. Where the table has forgotten
    commits since then, a warning is logged.
    """

    kind: str
    staged: bool  # does nobody see what was written before `commit`?

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
        self.attempt = uuid.uuid4().hex

    @property
    def what(self) -> str:
        return f"{FORMATS[self.kind]} table {self.table}"

    @property
    def marks(self) -> dict[str, str]:
        """What the commit says of itself."""
        return {BATCH_ID: self.batch, ATTEMPT: self.attempt}

    @abstractmethod
    def there(self) -> StructType | None:
        """The columns of the table; None if there is no table."""

    @abstractmethod
    def write(self, rows: DataFrame) -> None:
        """Have Spark write the rows, and unless `staged` commit them too. A missing table is made.

        Raises `BadArgument`, and unless `staged` what `commit` raises.
        """

    @abstractmethod
    def commit(self) -> Commit:
        """What was written is in the table when this returns, or another attempt is. Raises `TooManyConflicts`."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written and not committed."""

    @abstractmethod
    def _find(self) -> tuple[str, bool] | None:
        """The snapshot that has the batch, looked up now, and whether what this attempt wrote is in it."""

    def committed(self) -> str | None:
        """The snapshot that has the batch, looked up now."""
        found = self._find()
        return None if found is None else found[0]

    def check(self, columns: StructType) -> None:
        """Raises `BadArgument` if they do not fit to those of the table."""
        new = self.columns_to_add(columns)
        self.left_out = [field.name for field in new] if self.schema_evolution == "ignore" else []

    def _held(self, columns: StructType) -> StructType:
        """The types that the table has for these."""
        return columns

    def columns_to_add(self, columns: StructType) -> list[StructField]:
        """Those that the table lacks. Raises as `check`."""
        there = self.there()
        return (
            []
            if there is None
            else new_columns(there, self._held(columns), self.schema_evolution, self.what, folding(self.spark), fits)
        )

    def cast(self, rows: DataFrame) -> DataFrame:
        """The columns under the names and with the types that the table has for them. Raises as `check`."""
        fold = folding(self.spark)
        there = {fold(field.name): field for field in self.there() or ()}
        held = {fold(field.name): field for field in self._held(rows.schema)}
        for key, field in there.items():
            if not field.nullable and key not in held:
                raise BadArgument(f"{self.what} requires the column {field.name!r}, which the batch lacks")
        return rows.select(
            [
                F.col(quoted(name)).cast(field.dataType).alias(field.name)
                for name in rows.columns
                for field in (there.get(fold(name)) or held[fold(name)],)
            ]
        )

    def commit_once(self, add: Callable[[], bool]) -> tuple[str, bool]:
        """`_find`, and where nothing is found, ``add``, by turns. ``add`` says False if others were faster."""
        for number in range(TRIES):
            if (found := self._find()) is not None:
                return found
            if not add():
                time.sleep(random.uniform(0, min(0.05 * 2**number, 2)))  # noqa: S311
        raise TooManyConflicts(f"{self.what}: gave up after {TRIES} tries, because others committed first each time")

    def warn_of_forgotten(self, oldest: float) -> None:
        """``oldest``: when the oldest commit was made that the table still knows, although there were earlier ones."""
        if self.since is not None and oldest > self.since.timestamp():
            _logger.warning(
                "%s: its snapshots from before %s have expired, and the batch %s is older. If an earlier run committed the "
                "batch, it is now appended twice. Keep snapshots longer than a batch may be tried again",
                self.table,
                self.since,
                self.batch,
            )


class StagedAppend(Append):
    """Executors write files where nobody sees them, and the driver commits these."""

    staged = True

    def __init__(self, spark: SparkSession, table: str, batch: str, **options: Any) -> None:
        super().__init__(spark, table, batch, **options)
        readable = re.sub(r"[^\w.-]", "_", batch, flags=re.ASCII)[:100]
        self.directory = f"data/qewqew/{readable}-{self.attempt}"  # below the table
        self._staged: str | None = None  # the directory of this attempt
        self._columns = StructType()  # of what was written

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

    def write(self, rows: DataFrame) -> None:
        self.check(rows.schema)
        rows = rows.drop(*self.left_out)
        self._columns = rows.schema
        if self.there() is None:
            self._make(self._held(rows.schema))
        rows, parts = self._partitioned(self._required(self.cast(rows)))
        self._staged = f"{self._location().rstrip('/')}/{self.directory}"
        options = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}
        with setting(self.spark, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"):  # not INT96
            rows.write.options(**options).partitionBy(*parts).parquet(self._staged)

    def commit(self) -> Commit:
        staged = self._staged
        if staged is None:
            raise BadArgument("nothing was written: call `write` first")
        files = [(f"{self.directory}/{name}", size) for name, size in files_below(self.spark, staged, ".parquet")]

        def add() -> bool:
            if new := self.columns_to_add(self._columns):
                self._widen(new)
                return True  # the table is another one now: look again, or a commit in between would not be seen
            # While nobody knows whether the files are the table's, `abort` must not remove them: they stay as orphans.
            self._staged = None
            done = self._add(files)
            self._staged = staged
            return done

        snapshot, ours = self.commit_once(add)
        if not ours:
            self.abort()
        self._staged = None
        return Commit(self.table, snapshot, not ours)

    def abort(self) -> None:
        if self._staged is not None:
            delete(self.spark, self._staged)
            self._staged = None

    def _required(self, rows: DataFrame) -> DataFrame:
        """The rows, with each value of a column looked at that the table requires."""
        required = {field.name for field in self.there() or () if not field.nullable}
        if any(field.nullable and field.name in required for field in rows.schema):
            session: Any = self.spark._jsparkSession
            columns = StructType(
                [StructField(field.name, field.dataType, field.nullable and field.name not in required) for field in rows.schema]
            )
            made = session.createDataFrame(rows._jdf.toJavaRDD(), session.parseDataType(columns.json()))
            rows = DataFrame(made, self.spark)  # raises in the executor that meets a null
        return rows


def append_to(
    spark: SparkSession, table: str, batch: str, format: str = "iceberg", commit: str = "driver", **options: Any
) -> Append:
    """An `Append`; raises `BadArgument`, also if the extra or the connector that the format needs is missing.

    ``commit``: "driver", by a Python library, or "spark", by this Spark's connector for the format.
    """
    kind = format.lower()
    if kind not in FORMATS:
        raise BadArgument(f"format must be one of {', '.join(FORMATS)}, not {format!r:.80}")
    if commit not in COMMITS:
        raise BadArgument(f"commit must be one of {', '.join(COMMITS)}, not {commit!r:.80}")
    module, name = ("by_spark", f"{FORMATS[kind]}BySpark") if commit == "spark" else (kind, f"{FORMATS[kind]}Append")
    try:
        made: Append = getattr(importlib.import_module(f"qewqew_spark.tables.{module}"), name)(spark, table, batch, **options)
    except ModuleNotFoundError as error:
        raise BadArgument(
            f"the format {kind!r} needs a library that is missing ({error}): install qewqew with its extra {kind!r} "
            f"where the driver runs, pip install 'qewqew[{kind}]'"
        ) from error
    return made


def append_once(
    rows: DataFrame, table: str, batch_id: str, *, format: str = "iceberg", commit: str = "driver", **options: Any
) -> Commit:
    """Append the rows to the table, unless a commit of it names this batch already; durable when it returns.

    ``commit``: see `append_to`. ``table`` and ``options``: see `Append`. Rows are computed where the batch is not there yet. In
    `foreachBatch`, where each query numbers its batches from 0, let the id name the query too:
    ``f"{query}-{number}"``. Raises `BadArgument` before anything is written, `TooManyConflicts`, and what Spark and the
    table's library raise.
    """
    append = append_to(rows.sparkSession, table, batch_id, format, commit, **options)
    if (snapshot := append.committed()) is not None:
        return Commit(table, snapshot, True)
    try:
        append.write(rows)
        return append.commit()
    except BaseException:
        with suppress(Exception):  # what went wrong is what to report
            append.abort()
        raise
