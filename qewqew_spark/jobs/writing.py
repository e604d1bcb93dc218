"""Where the job's tables go, and how each place is overwritten under the batch's id: a job that runs twice leaves one result.

| sink       | the rows of a batch are              | and are replaced by                                                |
|------------|--------------------------------------|--------------------------------------------------------------------|
| `Files`    | in the directory `<path>/batch=<id>` | a directory next to it, which gets its name                        |
| `Table`    | in the partition `batch=<id>`        | Spark's overwrite of a partition, as atomic as the table's format  |
| `Once`     | in one commit, which names the batch | nothing: if there is such a commit, no second one is made          |
| `Jdbc`     | those with `batch = <id>`            | one transaction: delete, insert from a staging table               |
| `Appended` | not known: the format is not ours    | nothing: a second run writes again                                 |
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument, BatchConflict
from qewqew_spark.jobs.explaining import blamed
from qewqew_spark.jobs.kept import OWN, KeptColumns
from qewqew_spark.jobs.output import BATCH, FILE_FORMATS, Output
from qewqew_spark.jobs.untyped import has_untyped, settle
from qewqew_spark.tables.append import Commit, append_to
from qewqew_spark.tables.evolution import Fold, Same, differences, holds, new_columns
from qewqew_spark.tables.marks import Found
from qewqew_spark.tables.session import columns_ddl, delete, exists, folding, listed, quoted, rename, setting

TYPED_FILES = {"parquet", "orc"}  # tell the types of their columns


class Sink(ABC):
    """Where one output goes. ``left_out``: columns that are not written, because the table lacks them."""

    staged = False  # does nobody see what was written before `commit`?
    limits = True  # may a column require a value, or have a greatest length?
    typed = True  # do columns have a type there that stays?
    agrees = True  # do the records take the types of the columns there?
    of_files = False  # are columns files', which have fields of structs each alone, and those of partitions without a type?
    same: Same = staticmethod(DataType.__eq__)

    def __init__(self, spark: SparkSession, output: Output, batch: str, schema_evolution: str) -> None:
        self.spark = spark
        self.output = output
        self.batch = batch
        self.schema_evolution = schema_evolution
        self.options = output.resolved_options()
        self.existing: StructType | None = None
        self.new: list[StructField] = []
        self.untyped: list[str] = []  # fields that are not written, because neither a record nor the table has their type

    @property
    def place(self) -> dict[str, Any]:
        """Where the rows are, for the result."""
        return {"path": self.output.path, "table": self.output.table}

    @abstractmethod
    def there(self) -> StructType | None:
        """The columns of the table; None if there is no table, or if its columns are not known."""

    @abstractmethod
    def write(self, rows: DataFrame) -> None:
        """Write the rows: if `staged`, next to those of an earlier run of the batch, else in their place."""

    def commit(self) -> None:  # noqa: B027
        """Replace what an earlier run of the batch wrote by what was written; does nothing if `write` has done so."""

    def abort(self) -> None:  # noqa: B027
        """Remove what was written and not committed."""

    @property
    def stays(self) -> Found | None:
        """The commit of an earlier run of the batch, whose rows stay."""
        return None

    def early(self) -> bool:
        """May `write` come before it is known which records are bad? The run may fail for these, and has then changed nothing."""
        return self.staged

    def judged(self, bad: str) -> None:  # noqa: B027
        """Know which records of the batch are `Append.bad`, before `commit`, and before the quarantine has them.

        Raises `BatchConflict` if the rows of an earlier run stay, and other records were bad then.
        """

    def clear(self) -> None:
        """Remove what an earlier run of the batch wrote: this one has no columns to write."""
        self.existing = self.there()
        if self.existing is not None:
            self.write(self.nothing(self.existing).drop(BATCH))
            self.commit()

    def settled(self, table: DataFrame) -> DataFrame:
        """The table with types from the place for fields without one, which are else left out; maybe without columns."""
        if not has_untyped(table.schema):
            return table
        texts = None if self.typed else StringType()
        made, self.untyped = settle(table, self.there(), self.output.partition_columns, texts, self.fold)
        return made

    def limited(self) -> list[StructField]:
        """The columns that take the fields of the records as they are, and may not hold each value; raises `BadArgument`."""
        return [*(self.there() or ())] if self.output.is_plain and self.limits else []

    def parts(self) -> dict[str, int | None]:
        """The columns of the records as they are by whose values rows are parted, see `limits.beyond_part`."""
        return dict.fromkeys(self.output.partition_by if self.output.is_plain else ())

    def known(self, record: StructType, inferred: bool) -> StructType | None:
        return self.there()  # for a schema of the records that is still to be chosen

    def check(self, table: DataFrame) -> None:
        """Raise `BadArgument` if the columns do not fit to those that are there."""
        self.existing = self.there()
        if self.existing is not None:
            what = f"output: {self.output.place}"
            ours = {self.fold(name) for name in (BATCH, *(self.output.partition_by if self.of_files else ()))}
            there, batch = (
                StructType([field for field in each if self.fold(field.name) not in ours])
                for each in (self.existing, table.schema)
            )
            self.new = new_columns(there, batch, self.schema_evolution, what, self.fold, self.same, into_structs=self.of_files)

    @property
    def left_out(self) -> list[str]:
        return [field.name for field in self.new] if self.schema_evolution == "ignore" else []

    @property
    def fold(self) -> Fold:
        return folding(self.spark)

    def nothing(self, columns: StructType) -> DataFrame:
        return self.spark.createDataFrame([], columns)

    def writer(self, rows: DataFrame) -> DataFrameWriter:
        return rows.write.format(self.output.format).options(**self.options)

    def with_batch(self, rows: DataFrame) -> DataFrame:
        return rows.drop(*self.left_out).withColumn(BATCH, F.lit(self.batch))


class Files(Sink):
    """A directory of files per batch. They are written below `OWN`, where Spark does not look, and then get the name."""

    staged = True
    limits = False
    of_files = True

    def __init__(self, spark: SparkSession, output: Output, batch: str, schema_evolution: str) -> None:
        super().__init__(spark, output, batch, schema_evolution)
        self.typed = output.format.lower() not in FILE_FORMATS - TYPED_FILES
        self._path = str(output.path).rstrip("/")
        self._directory = f"{self._path}/{BATCH}={batch}"
        self._staging = f"{self._path}/{OWN}/{BATCH}={batch}~{uuid.uuid4().hex[:12]}"
        self._made = False
        self._typed = output.format.lower() in TYPED_FILES
        self._kept = KeptColumns(spark, self._path, self._directory, output.format)
        self._columns: StructType | None = None

    @property
    def place(self) -> dict[str, str | None]:
        return {"path": self._directory, "table": None}

    def there(self) -> StructType | None:
        return None if not self._typed or self.schema_evolution == "ignore" else self._kept.there()

    def known(self, record: StructType, inferred: bool) -> StructType | None:
        there = self.there()
        if inferred and there is not None:
            found = differences(there, record, self.fold, holds, into_structs=True)
            if any(old is not None and now is not None for _, old, now in found) and self._kept.doubt():
                return self.there()
        return there

    def check(self, table: DataFrame) -> None:
        try:
            super().check(table)
        except BadArgument:
            if not self._kept.doubt():
                raise
            super().check(table)

    def write(self, rows: DataFrame) -> None:
        self._made = not exists(self.spark, self._path)
        for name in listed(self.spark, f"{self._path}/{OWN}"):
            if name.startswith(f"{BATCH}={self.batch}~"):  # of a run that was killed, or one that goes on: it must not commit
                delete(self.spark, f"{self._path}/{OWN}/{name}")
        partitions = set(map(self.fold, self.output.partition_by))
        self._columns = StructType([field for field in rows.schema if self.fold(field.name) not in partitions])
        self.writer(rows).mode("overwrite").partitionBy(*self.output.partition_by).save(self._staging)

    def commit(self) -> None:
        if self._typed and self._columns is not None:
            self._kept.add(self._columns)  # first: no batch must be there whose columns are not kept
        rename(self.spark, self._staging, self._directory)

    def abort(self) -> None:
        delete(self.spark, self._staging)
        if self._made and not {*listed(self.spark, self._path), *listed(self.spark, f"{self._path}/{OWN}")} - {OWN}:
            for place in f"{self._path}/{OWN}", self._path:
                delete(self.spark, place, empty=True)  # or another batch has come meanwhile

    def clear(self) -> None:
        delete(self.spark, self._directory)


class Once(Sink):
    """An Iceberg or Delta table, to which the batch is appended unless it is there. With keys it replaces and removes rows there.

    Several batches go into one commit: all of them, or `BatchConflict` is raised if some are there.
    """

    def __init__(self, spark: SparkSession, output: Output, batches: Sequence[Manifest], schema_evolution: str) -> None:
        super().__init__(spark, output, batches[0].id, schema_evolution)
        self._append = append_to(
            spark,
            str(output.table or output.path),
            [batch.id for batch in batches],
            output.format,
            output.commit,
            partition_by=output.partition_by,
            keys=output.keys,
            order_by=output.order_by,
            operation=output.operation,
            branch=output.branch,
            properties={name: str(value) for name, value in self.options.items()},
            schema_evolution=schema_evolution,
            since=min(datetime.fromisoformat(batch.created) for batch in batches),
        )
        self.staged = self._append.staged
        self._found: Found | None = None

    @property
    def place(self) -> dict[str, Any]:
        found = self._found
        return {**super().place, "snapshot": found and found.snapshot, "again": self.stays is not None}

    @property
    def stays(self) -> Found | None:
        return None if self._found is None or self._found.ours else self._found

    @property
    def left_out(self) -> list[str]:
        return self._append.left_out

    def there(self) -> StructType | None:
        return self._append.there()

    def parts(self) -> dict[str, int | None]:
        return self._append.parts() if self.output.is_plain else {}

    def limited(self) -> list[StructField]:
        """Keys are required. A record that removes a row may have no more than these."""
        if not (self.output.keys and self.output.is_plain):
            return super().limited()
        rest = [] if self.output.operation else super().limited()
        return [*rest, *(StructField(name, StringType(), False) for name in self.output.keys)]  # the last of a name counts

    def check(self, table: DataFrame) -> None:
        found = self._append.committed()
        self._alone(found)
        self._found = found.get(self.batch)
        if self._found is None:
            self._append.check(table.schema)

    def _alone(self, found: Collection[str]) -> None:
        if found and len(self._append.batches) > 1:
            raise BatchConflict(f"{self._append.what} has {len(found)} of these batches already; nothing was added")

    def early(self) -> bool:
        return self.staged and not (self._found is None and self.there() is None)  # then it makes the table, which others see

    def judged(self, bad: str) -> None:
        self._append.bad = bad
        if self._found is not None:
            self._agrees(self._found)

    def _agrees(self, there: Found | Commit) -> None:
        """The rows of the commit are those of this run."""
        if there.bad not in (None, self._append.bad):
            raise BatchConflict(
                f"{self._append.what} has the batch {self.batch} since an earlier run (commit {there.snapshot}), in which other "
                f"records were bad: {there.bad.split()[0]} then, {str(self._append.bad).split()[0]} now. The rows of that run "
                "stay, so this one would lose records. Run the batch with the schema and options of then, and stage the records "
                "of its quarantine for a batch with the new ones"
            )

    def write(self, rows: DataFrame) -> None:
        if self._found is None:
            self._append.write(rows)
        else:  # but for its rows, which are counted
            rows.write.format("noop").mode("overwrite").save()

    def commit(self) -> None:
        if self._found is None:
            commit = self._append.commit()
            if commit.again:
                self._alone(commit.batches)
                self._agrees(commit)
            self._found = Found(commit.snapshot, ours=not commit.again)

    def abort(self) -> None:
        self._append.abort()

    def clear(self) -> None:
        """There is nothing to append."""


class Table(Sink):
    """A table of Spark's catalog that is partitioned by `batch`; it is made if it does not exist."""

    def there(self) -> StructType | None:
        with blamed(f"output: table {self.output.table}"):
            if not self.spark.catalog.tableExists(str(self.output.table)):
                return None
            columns = self._table().schema
        if BATCH not in map(self.fold, self._partitions()):
            raise BadArgument(f"output: table {self.output.table} must be partitioned by a column {BATCH!r} of the type STRING")
        return columns

    def write(self, rows: DataFrame) -> None:
        name, rows = str(self.output.table), self.with_batch(rows)
        if self.existing is None:
            made = self.writer(self.nothing(rows.schema)).partitionBy(BATCH, *self.output.partition_by)
            made.mode("ignore").saveAsTable(name)
        elif self.new and self.schema_evolution == "merge":
            self.spark.sql(f"ALTER TABLE {name} ADD COLUMNS ({columns_ddl(self.new)})")
        names = {self.fold(column): column for column in rows.columns}
        columns = [
            (F.col(quoted(names[key])) if (key := self.fold(each.name)) in names else F.lit(None))
            .cast(each.dataType)
            .alias(each.name)
            for each in self._table().schema.fields
        ]
        rows = rows.select(columns)
        spec = ", ".join(
            f"{quoted(each)} = '{self.batch}'" if self.fold(each) == BATCH else quoted(each) for each in self._partitions()
        )
        with setting(self.spark, "spark.sql.sources.partitionOverwriteMode", "static"):
            # Names that the catalog or `quoted` vouches for, and an id that can be the name of a directory.
            insert = f"INSERT OVERWRITE TABLE {name} PARTITION ({spec}) SELECT * FROM {{rows}}"  # noqa: S608
            self.spark.sql(insert, rows=rows.drop(BATCH))

    def _table(self) -> DataFrame:
        self.spark.catalog.refreshTable(str(self.output.table))
        return self.spark.table(str(self.output.table))

    def _partitions(self) -> list[str]:
        return [column.name for column in self.spark.catalog.listColumns(str(self.output.table)) if column.isPartition]


class Appended(Sink):
    """A format that QewQew does not know and that has no path: its rows are added to those that are there."""

    typed = limits = agrees = False

    def there(self) -> StructType | None:
        return None

    def write(self, rows: DataFrame) -> None:
        self.writer(rows).mode("append").save()
