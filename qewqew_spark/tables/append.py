"""`append_once`: rows of a batch, or of several, become files of a table in one commit, which names the batches.

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType
from pyspark.storagelevel import StorageLevel

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.evolution import evolved, fits, new_columns
from qewqew_spark.tables.limits import checked, misfit_in, present
from qewqew_spark.tables.marks import ATTEMPT, BAD, BATCH_ID, BATCH_IDS, Found
from qewqew_spark.tables.session import conformed, delete, files_below, folding, quoted, setting
from qewqew_spark.tables.upsert import DELETED, Upsert

FORMATS = {"iceberg": "Iceberg", "delta": "Delta"}
COMMITS = "driver", "spark"
TRIES = 100  # of a commit that others are faster with
# What a Parquet file must be like for other readers: no INT96, no lists and decimals of old, dates and times as they are.
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.parquet.fieldId.write.enabled": "true",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """The commit of a table that has the batch: ``snapshot`` is its id in Iceberg, its version in Delta.

    ``again``: it was there already, and nothing was added. ``batches``: those of the call that this commit has. Others, of
    several, were in the table before. ``bad``: see `Append`.
    """

    table: str
    snapshot: str
    again: bool
    batches: tuple[str, ...]
    bad: str | None = None


class TooManyConflicts(OSError):
    """Other commits came first each time. Nothing was added; you can make the same call again."""


class Append(ABC):
    """One batch, or several in one commit, that are to be in one table once. `write`, then `commit` or `abort`.

    ``table``: Iceberg's `catalog.namespace.table`, or the path or URL of a Delta table; it is made if it is not there, with
    ``partition_by`` and ``properties``. ``batches``: each names a batch, and nothing else ever. ``schema_evolution``: "merge",
    "fail" or "ignore", as of the job. ``since``: when the oldest of the batches was made. Where the table has forgotten
    commits since then, a warning is logged. ``branch``: of an Iceberg table, which has it already; None: its main one.

    ``bad``: may be set before the commit, which then says it: which records of the batches are not in the rows.
    """

    kind: str
    staged: bool  # does nobody see what was written before `commit`?

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        batches: str | Sequence[str],
        *,
        partition_by: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        schema_evolution: str = "merge",
        since: datetime | None = None,
        branch: str | None = None,
    ) -> None:
        self.spark = spark
        self.table = table
        self.batches = (batches,) if isinstance(batches, str) else tuple(batches)
        self.partition_by = partition_by
        self.properties = {name: str(value) for name, value in (properties or {}).items()}
        self.schema_evolution = schema_evolution
        self.since = since
        self.branch = branch
        self.left_out: list[str] = []  # columns that are not written, because the table lacks them
        self.attempt = uuid.uuid4().hex
        self.bad: str | None = None

    @property
    def what(self) -> str:
        return f"{FORMATS[self.kind]} table {self.table}"

    @property
    def marks(self) -> dict[str, str]:
        """What the commit says of itself."""
        batches = {BATCH_ID: self.batches[0]} if len(self.batches) == 1 else {BATCH_IDS: json.dumps(self.batches)}
        return {**batches, ATTEMPT: self.attempt, **({} if self.bad is None else {BAD: self.bad})}

    @abstractmethod
    def there(self) -> StructType | None:
        """The columns of the table; None if there is no table."""

    @abstractmethod
    def write(self, rows: DataFrame) -> None:
        """Have Spark write the rows, and unless `staged` commit them too. A missing table is made.

        Raises `BadArgument`, also for a value that the table cannot hold, and unless `staged` what `commit` raises.
        """

    @abstractmethod
    def commit(self) -> Commit:
        """What was written is in the table when this returns, or another attempt has some of the batches.

        Then nothing is added (`Commit.again`), and those that are still missing must be written again. Raises `TooManyConflicts`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written and not committed."""

    @abstractmethod
    def committed(self) -> dict[str, Found]:
        """Those of the batches that the table has, looked up now."""

    def found(self, snapshot: str, marks: Mapping[str, str]) -> Found:
        """What the marks of a commit say."""
        return Found(snapshot, marks.get(ATTEMPT) == self.attempt, marks.get(BAD))

    def check(self, columns: StructType) -> None:
        """Raises `BadArgument` if they do not fit to those of the table."""
        new = self.columns_to_add(columns)
        self.left_out = [field.name for field in new] if self.schema_evolution == "ignore" else []

    def parts(self) -> dict[str, int | None]:
        """The columns by whose values rows are parted, see `limits.beyond_part`; none that only the connector knows."""
        return {}

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
        """The columns under the names and with the types that the table has for them. Raises as `check`.

        Spark fails at a row with a value that the table cannot hold, see `limits`.
        """
        fold = folding(self.spark)
        there = {fold(field.name): field for field in self.there() or ()}
        held = {fold(field.name): field for field in self._held(rows.schema)}
        for key, field in there.items():
            if not field.nullable and key not in held:
                raise BadArgument(f"{self.what} requires the column {field.name!r}, which the batch lacks")
        return rows.select(
            [
                checked(column.name, column.dataType, {}).cast(field.dataType).alias(field.name)
                for column in rows.schema
                for field in (there.get(fold(column.name)) or held[fold(column.name)],)
            ]
        )

    def commit_once(self, add: Callable[[], bool]) -> Commit:
        """`committed`, and where nothing is found, ``add``, by turns. ``add`` says False if others were faster."""
        for number in range(TRIES):
            if found := self.committed():
                first = next(iter(found.values()))
                batches = tuple(batch for batch in self.batches if batch in found)
                return Commit(self.table, first.snapshot, not first.ours, batches, first.bad)
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
                ", ".join(self.batches)[:200],
            )


class StagedAppend(Append):
    """Executors write files where nobody sees them, and the driver commits these."""

    staged = True
    names_fields = False  # do files name the table's fields by ids? Then columns are added before anything is written

    def __init__(
        self, spark: SparkSession, table: str, batches: str | Sequence[str], *, upsert: Upsert | None = None, **options: Any
    ) -> None:
        super().__init__(spark, table, batches, **options)
        self.upsert = upsert
        readable = re.sub(r"[^\w.-]", "_", self.batches[0], flags=re.ASCII)[:100]
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
        """Commit these files (place below the table, bytes) in the batch's name. False: the table has changed since the look."""

    @abstractmethod
    def _merge(self, files: Sequence[tuple[str, int]], keys: Sequence[str]) -> None:
        """Copy the files of the table, as it is, that have keys of ``files`` or ``keys``; `_add` then replaces them too."""

    @staticmethod
    def _widens(there: DataType, batch: DataType) -> bool:
        """Can the format make the type of a column, or of a field of one, wider like this?"""
        return False

    @abstractmethod
    def _widen(self, goal: StructType) -> None:
        """Let these be the table's columns, unless somebody else just changed it."""

    def changed(self, goal: StructType) -> StructType:
        """Those columns of the goal that are not the table's."""
        there = {field.name: field for field in self.there() or ()}
        return StructType([field for field in goal if there.get(field.name) != field])

    @abstractmethod
    def _parts(self) -> list[str]:
        """The columns that the table is partitioned by."""

    @abstractmethod
    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        """The rows, and the columns by whose values Spark is to part the files."""

    def _filled(self, rows: DataFrame) -> DataFrame:
        """The rows, with nulls in columns that the table is partitioned by and the batch lacks."""
        fold = folding(self.spark)
        there = {fold(field.name): field for field in self.there() or ()}
        lacking = {fold(name) for name in self._parts()} - {fold(name) for name in rows.columns}
        return rows.withColumns({there[key].name: F.lit(None).cast(there[key].dataType) for key in sorted(lacking)})

    def check(self, columns: StructType) -> None:
        fold = folding(self.spark)
        _, self.left_out = self._evolved(columns if self.upsert is None else self.upsert.stored(columns, fold))
        if self.upsert is None:
            return
        self.named_fields()
        if self.upsert.order_by is not None and fold(self.upsert.order_by) in map(fold, self.left_out):
            raise BadArgument(f"{self.what} has no column {self.upsert.order_by!r} to keep order_by in: add it first")

    def _evolved(self, columns: StructType) -> tuple[StructType, list[str]]:
        """What the table's columns become, so that it holds these, and what is left out. Raises as `check`."""
        there, held = self.there(), self._held(columns)
        if there is None:
            return held, []
        return evolved(there, held, self.schema_evolution, self.what, folding(self.spark), self._widens)

    def cast(self, rows: DataFrame) -> DataFrame:
        """As `Append.cast`, with the types that the table will have, also inside structs."""
        fold = folding(self.spark)
        known = {fold(field.name): field for field in self._evolved(rows.schema)[0]}
        held = {fold(name): name for name in rows.columns}
        parts = {held[fold(name)]: width for name, width in self.parts().items() if fold(name) in held}
        for key, field in known.items():
            if not field.nullable and key not in held:
                raise BadArgument(f"{self.what} requires the column {field.name!r}, which the batch lacks")
        return rows.select(
            [
                conformed(checked(column.name, column.dataType, parts), column.dataType, to.dataType, fold).alias(to.name)
                for column in rows.schema
                if (to := known.get(fold(column.name))) is not None  # else it is left out
            ]
        )

    def named_fields(self) -> list[StructField]:
        """The columns of `Upsert.named` that the table has; raises `BadArgument` if it lacks a key."""
        fold, there = folding(self.spark), self.there()
        if self.upsert is None or there is None:
            return []
        known = {fold(field.name): field for field in there}
        for key in self.upsert.keys:
            if fold(key) not in known:
                raise BadArgument(f"{self.what} has no column {key!r}, which is one of the keys: its columns are {there.names}")
        return [known[fold(name)] for name in self.upsert.named if fold(name) in known]

    def write(self, rows: DataFrame) -> None:
        self.check(rows.schema)
        deleted, fold = None, folding(self.spark)
        with ExitStack() as during:
            if self.upsert is not None:
                rows = self.upsert.latest(rows, fold)
                if self.upsert.operation:  # written apart: of these rows only the keys are known
                    rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
                    during.callback(rows.unpersist)
                    deleted = rows.where(DELETED)
                rows = rows.where(~F.col(DELETED)).drop(DELETED)
            if self.there() is None:
                self._make(self._held(rows.schema))
            for _ in range(TRIES if self.names_fields else 0):
                if (goal := self._evolved(rows.schema)[0]) == self.there():
                    break
                self._widen(goal)
            rows = self.cast(rows)
            self._columns = rows.schema
            rows, parts = self._partitioned(self._filled(self._required(rows)))
            self._staged = f"{self._location().rstrip('/')}/{self.directory}"
            options = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}
            for name, value in _SETTINGS.items():
                during.enter_context(setting(self.spark, name, value))
            try:
                rows.write.options(**options).partitionBy(*parts).parquet(self._staged)
                if deleted is not None and self.upsert is not None:
                    held = {fold(field.name): field.dataType for field in (*self._columns, *(self.there() or ()))}
                    columns = [F.col(quoted(name)).cast(held[fold(name)]).alias(name) for name in self.upsert.named]
                    deleted.select(columns).write.options(**options).parquet(f"{self._staged}/{DELETED}")
            except (PySparkException, Py4JJavaError) as error:
                if misfit := misfit_in(error):
                    raise BadArgument(f"{self.what}: {misfit}") from error
                if found := re.search('No FileSystem for scheme "([^"]+)"', str(error)):
                    raise BadArgument(
                        f"Spark cannot write to {self._location()}: it has no file system for {found[1]}://. Give it one, for S3 "
                        f"--packages org.apache.hadoop:hadoop-aws:… and --conf spark.hadoop.fs.{found[1]}.impl="
                        "org.apache.hadoop.fs.s3a.S3AFileSystem"
                    ) from error
                raise

    def commit(self) -> Commit:
        staged = self._staged
        if staged is None:
            raise BadArgument("nothing was written: call `write` first")
        files = [(f"{self.directory}/{name}", size) for name, size in files_below(self.spark, staged, ".parquet")]
        deleted = [file for file, _ in files if file.startswith(f"{self.directory}/{DELETED}/")]
        files = [file for file in files if file[0] not in deleted]

        def add() -> bool:
            if not self.names_fields and (goal := self._evolved(self._columns)[0]) != self.there():
                self._widen(goal)
                return True  # the table is another one now: look again, or a commit in between would not be seen
            if self.upsert is not None:
                self._merge(files, deleted)
            # Once they may be the table's, `abort` must not remove the files: if they are not, they stay as orphans.
            self._staged = None
            done = self._add(files)
            self._staged = None if done else staged
            return done

        commit = self.commit_once(add)
        if commit.again:
            self.abort()
        elif deleted:
            delete(self.spark, f"{staged}/{DELETED}")
        self._staged = None
        return commit

    def abort(self) -> None:
        if self._staged is not None:
            delete(self.spark, self._staged)
            self._staged = None

    def _required(self, rows: DataFrame) -> DataFrame:
        """The rows, with each value of a column looked at that the table requires."""
        there = {field.name for field in self.there() or () if not field.nullable}
        required = {field.name: field for field in rows.schema if field.nullable and field.name in there}
        return rows.withColumns(
            {
                name: present(self.spark, F.col(quoted(name)), name, self.what).alias(name, metadata=field.metadata)
                for name, field in required.items()
            }
        )


def append_to(
    spark: SparkSession,
    table: str,
    batches: str | Sequence[str],
    format: str = "iceberg",
    commit: str = "driver",
    *,
    keys: Sequence[str] = (),
    order_by: str | None = None,
    operation: Mapping[str, Any] | None = None,
    **options: Any,
) -> Append:
    """An `Append`; raises `BadArgument`, also if the extra or the connector that the format needs is missing.

    ``commit``: "driver", by a Python library, or "spark", by this Spark's connector for the format. ``keys``, ``order_by``,
    ``operation``: the rows replace or remove others, see `Upsert`; for "driver" only.
    """
    kind = format.lower()
    if kind not in FORMATS:
        raise BadArgument(f"format must be one of {', '.join(FORMATS)}, not {excerpt(format, 80)}")
    if commit not in COMMITS:
        raise BadArgument(f"commit must be one of {', '.join(COMMITS)}, not {excerpt(commit, 80)}")
    if keys or order_by is not None or operation:
        options["upsert"] = Upsert(keys, order_by, operation or {})
        if commit == "spark":
            raise BadArgument("commit 'spark' only appends: for keys leave commit out, or run a MERGE INTO of your own")
    if options.get("branch") is not None and (kind, commit) != ("iceberg", "driver"):
        raise BadArgument("'branch' is for Iceberg, where the driver commits")
    module, name = ("by_spark", f"{FORMATS[kind]}BySpark") if commit == "spark" else (kind, f"{FORMATS[kind]}Append")
    try:
        made: Append = getattr(importlib.import_module(f"qewqew_spark.tables.{module}"), name)(spark, table, batches, **options)
    except ModuleNotFoundError as error:
        raise BadArgument(
            f"the format {kind!r} needs a library that is missing ({error}): install qewqew with its extra {kind!r} "
            f"where the driver runs, pip install 'qewqew[{kind}]'"
        ) from error
    return made


def append_once(
    rows: DataFrame | Callable[[Sequence[str]], DataFrame],
    table: str,
    batch_id: str | Sequence[str],
    *,
    format: str = "iceberg",
    commit: str = "driver",
    **options: Any,
) -> Commit:
    """Append the rows to the table, unless a commit of it names this batch already; durable when it returns.

    Several batches, a list of ids, are one commit. ``rows`` is then a function: given the ids of those batches that the table
    does not have, it returns their rows, from the active session. It is called again if somebody else commits some of these
    meanwhile.

    ``commit``, ``keys``, ``order_by``, ``operation``: see `append_to`. ``table`` and ``options``: see `Append`. Rows are computed
    where the batch is not there yet. In `foreachBatch`, where each query numbers its batches from 0, let the id name the query
    too: ``f"{query}-{number}"``. Raises `BadArgument` before anything is written, `TooManyConflicts`, and what Spark and the
    table's library raise.
    """
    batches = [batch_id] if isinstance(batch_id, str) else list(dict.fromkeys(batch_id))
    if not batches or (len(batches) > 1 and isinstance(rows, DataFrame)):
        raise BadArgument("give one batch id and its rows, or several ids and a function that makes the rows of some of them")
    spark = rows.sparkSession if isinstance(rows, DataFrame) else SparkSession.active()
    while True:
        append = append_to(spark, table, batches, format, commit, **options)
        there = append.committed()
        missing = [batch for batch in batches if batch not in there]
        if not missing:
            return Commit(table, there[batches[0]].snapshot, True, tuple(batches))
        if there:
            append = append_to(spark, table, missing, format, commit, **options)
        try:
            append.write(rows if isinstance(rows, DataFrame) else rows(missing))
            done = append.commit()
        except BaseException:
            with suppress(Exception):  # what went wrong is what to report
                append.abort()
            raise
        if not done.again or len(missing) == 1:
            return done
        batches = missing
