"""A batch once in a table by the connector of Iceberg or Delta that this Spark has, and by no Python library.

A connector writes and commits in one step. So where others are faster, the rows are computed and written again.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.append import Append, Commit
from qewqew_spark.tables.evolution import relaxed
from qewqew_spark.tables.limits import misfit_in
from qewqew_spark.tables.marks import BATCH_ID, BATCH_IDS, Found, marks_in, named
from qewqew_spark.tables.session import columns_ddl, exists, folding, missing_format, quoted


class BySpark(Append):
    """`Append` by a connector: `write` commits, and `commit` tells what it has done."""

    staged = False
    faster: str  # what an error says when somebody else was faster

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        self._commit: Commit | None = None

    @abstractmethod
    def _try(self, rows: DataFrame, new: list[StructField]) -> None:
        """Append the rows, and add missing columns to the table. Raises if the table has changed since `committed`."""

    def write(self, rows: DataFrame) -> None:
        self.check(rows.schema)
        rows = rows.drop(*self.left_out)

        def add() -> bool:
            try:
                self._try(self.cast(rows), self.columns_to_add(rows.schema))
            except (PySparkException, Py4JJavaError) as error:
                if re.search(self.faster, str(error)):
                    return False
                if misfit := misfit_in(error):
                    raise BadArgument(f"{self.what}: {misfit}") from error
                raise
            return True

        self._commit = self.commit_once(add)

    def commit(self) -> Commit:
        if self._commit is None:
            raise BadArgument("nothing was written: call `write` first")
        return self._commit

    def abort(self) -> None:
        """Nothing to do: a connector removes what it has not committed."""

    def _held(self, columns: StructType) -> StructType:
        return relaxed(columns)


class IcebergBySpark(BySpark):
    """By Iceberg's connector: a compare-and-swap. The snapshot that has the batch says so in its summary."""

    kind = "iceberg"
    faster = r"CommitFailedException|ValidationException: (Found conflicting files|Cannot determine history)"

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        catalog, *names = table.split(".")
        if len(names) < 2 or not all((catalog, *names)):
            raise BadArgument(f"an Iceberg table has a name like catalog.namespace.table, not {excerpt(table, 200)}")
        _check_catalog(spark, catalog)
        self._namespace = ".".join(map(quoted, (catalog, *names[:-1])))
        self._name = f"{self._namespace}.{quoted(names[-1])}"
        self._start: str | None = None  # the snapshot that was current before the last look

    def there(self) -> StructType | None:
        return self.spark.table(self._name).schema if self.spark.catalog.tableExists(self._name) else None

    def committed(self) -> dict[str, Found]:
        self._start = None
        if not self.spark.catalog.tableExists(self._name):
            return {}
        self.spark.catalog.refreshTable(self._name)  # the catalog keeps what it has seen
        # In this order: what is committed in between is either found, or is a conflict.
        for row in self.spark.sql(f"SELECT snapshot_id FROM {self._name}.refs WHERE name = 'main'").collect():  # noqa: S608
            self._start = str(row.snapshot_id)
        snapshots = self.spark.table(f"{self._name}.snapshots")
        wanted, found = set(self.batches), dict[str, Found]()
        summary = F.col("summary")
        marked = summary.getItem(BATCH_IDS).isNotNull() | summary.getItem(BATCH_ID).isin(*wanted)
        for row in snapshots.where(marked).select("snapshot_id", "summary").collect():
            for batch in wanted.intersection(named(row.summary)):
                found[batch] = self.found(str(row.snapshot_id), row.summary)
        if len(found) < len(wanted):
            oldest = snapshots.orderBy("committed_at").select(F.unix_millis("committed_at").alias("at"), "parent_id").first()
            if oldest is not None and oldest.parent_id is not None:
                self.warn_of_forgotten(oldest.at / 1000)
        return found

    def _try(self, rows: DataFrame, new: list[StructField]) -> None:
        there = self.there()
        if there is None:
            self._make(rows.schema)
            return  # and look again: somebody else may have made it
        if new:
            self.spark.sql(f"ALTER TABLE {self._name} ADD COLUMNS ({columns_ddl(new)})")
            there = self.there() or there
        fold = folding(self.spark)
        names = set(map(fold, rows.columns))
        for field in there:
            if fold(field.name) not in names:
                rows = rows.withColumn(field.name, F.lit(None).cast(field.dataType))
        options = {f"snapshot-property.{name}": value for name, value in self.marks.items()}
        options["isolation-level"] = "serializable"
        if self._start is not None:
            options["validate-from-snapshot-id"] = self._start
        # It overwrites nothing. But unlike an append it is refused if rows were added since the snapshot.
        rows.writeTo(self._name).options(**options).overwrite(F.lit(False))

    def _make(self, columns: StructType) -> None:
        parts = ", ".join(text if "(" in text else quoted(text) for text in self.partition_by)
        properties = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in self.properties.items())
        try:
            self.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self._namespace}")
            self.spark.sql(
                f"CREATE TABLE IF NOT EXISTS {self._name} ({columns_ddl(columns)}) USING iceberg"
                + (f" PARTITIONED BY ({parts})" if parts else "")
                + (f" TBLPROPERTIES ({properties})" if properties else "")
            )
        except (PySparkException, Py4JJavaError) as error:
            if re.search("AlreadyExists|ALREADY_EXISTS", str(error)) or self.spark.catalog.tableExists(self._name):
                return  # somebody else was faster
            if isinstance(error, PySparkException):
                raise BadArgument(f"{self.what} cannot be made: {_said(error)}") from error
            raise


class DeltaBySpark(BySpark):
    """By Delta's connector: the log takes a transaction of the application `qewqew:<batch>` once."""

    kind = "delta"
    faster = r"(Concurrent\w+|MetadataChanged|ProtocolChanged)Exception"

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        if missing_format(spark, "delta"):
            raise BadArgument(
                "commit 'spark' needs Delta's connector, which this Spark does not have: give its jar with --packages or --jars, "
                "or leave 'commit' out"
            )
        if len(self.batches) > 1:
            raise BadArgument("Delta's connector commits one batch at a time; leave 'commit' out to commit several at once")
        self._done = False

    def there(self) -> StructType | None:
        return self.spark.read.format("delta").load(self.table).schema if self._is_there() else None

    def _is_there(self) -> bool:
        return exists(self.spark, f"{self.table.rstrip('/')}/_delta_log")

    def committed(self) -> dict[str, Found]:
        (batch,) = self.batches
        if self._is_there():
            try:
                history = self.spark.sql(f"DESCRIBE HISTORY delta.{quoted(self.table)}").select("version", "userMetadata")
            except ParseException as error:
                raise BadArgument(
                    "commit 'spark' looks into the history of a Delta table, which needs "
                    "--conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension"
                ) from error
            for version, text in history.where(F.col("userMetadata").contains(BATCH_ID)).collect():
                marks = marks_in(text)
                if batch in named(marks):
                    return {batch: self.found(str(version), marks)}
        # Committed, but not in the history: the log has had the transaction for longer than that.
        return {batch: Found("")} if self._done else {}

    def _try(self, rows: DataFrame, new: list[StructField]) -> None:
        writer = rows.write.format("delta").mode("append")
        if not self._is_there():
            writer = writer.partitionBy(*self.partition_by).options(**self.properties)
        self._marked(writer).option("mergeSchema", bool(new)).save(self.table)
        self._done = True

    def _marked(self, writer: DataFrameWriter) -> DataFrameWriter:
        marks = json.dumps(self.marks)
        return writer.options(txnAppId=f"qewqew:{self.batches[0]}", txnVersion=1, userMetadata=marks)


def _check_catalog(spark: SparkSession, name: str) -> None:
    """Raise `BadArgument` if Spark has no such catalog of Iceberg's."""
    setting = f"spark.sql.catalog.{name}"
    made = spark.conf.get(setting, None)
    if made is None:
        raise BadArgument(
            f"commit 'spark' needs the catalog {name!r} in Spark's settings, --conf {setting}=… (of Iceberg: "
            "org.apache.iceberg.spark.SparkCatalog), and Iceberg's jar with --packages or --jars"
        )
    if "iceberg" not in made.lower():
        raise BadArgument(f"commit 'spark': the catalog {name!r} is not Iceberg's, but {made}")
    session: Any = spark._jsparkSession
    try:
        session.sessionState().catalogManager().catalog(name)
    except (PySparkException, Py4JJavaError) as error:
        raise BadArgument(
            f"commit 'spark': Spark cannot make the catalog {name!r} ({_said(error)}); did you give it Iceberg's jar for Spark "
            f"{spark.version} with --packages or --jars?"
        ) from error


def _said(error: Exception) -> str:
    text = str(error.java_exception.toString()) if isinstance(error, Py4JJavaError) else str(error)
    return text.partition("\n")[0][:300]


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
