"""A batch once in a Delta table, by delta-rs: the commit that has it sets the application transaction `qewqew:<batch>`.

Delta's log keeps application transactions in its checkpoints, so an old one is found as well. Of two commits that set the same
one at the same time, the log takes the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import PyFileSystem
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, DateType, DecimalType, IntegralType, StringType, StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_core.limits import now_ms
from qewqew_spark.tables.append import ATTEMPT, StagedAppend, marks_in, named
from qewqew_spark.tables.evolution import relaxed
from qewqew_spark.tables.statistics import statistics

INDEXED = 32  # columns with minima and maxima in the log, if the table does not say how many
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # the directory that Spark makes for a null
# What a table may ask of its writers and that an append of whole files does.
KNOWN = {"appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors", "domainMetadata"}
KNOWN |= {"generatedColumns", "invariants", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}


class DeltaAppend(StagedAppend):
    """`StagedAppend` for Delta."""

    kind = "delta"

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        self._table: DeltaTable | None = None  # as it was at the last look
        self._actions: list[AddAction | RemoveAction] | None = None  # which add the files of this attempt

    def _load(self) -> DeltaTable | None:
        self._table = DeltaTable(self.table) if DeltaTable.is_deltatable(self.table) else None
        return self._table

    def _loaded(self) -> DeltaTable:
        table = self._table or self._load()
        if table is None:
            raise FileNotFoundError(f"there is no Delta table at {self.table}")
        return table

    def _find(self) -> dict[str, tuple[str, bool]]:
        table = self._load()
        if table is None:
            return {}
        # Without a version: committed long ago.
        found = {batch: ("", False) for batch in self.batches if table.transaction_version(_application(batch)) is not None}
        for commit in table.history(1000) if found else ():
            marks = marks_in(commit.get("userMetadata"))
            for batch in found.keys() & named(marks):
                found[batch] = str(commit["version"]), marks.get(ATTEMPT) == self.attempt
        return found

    def there(self) -> StructType | None:
        table = self._table or self._load()
        if table is None:
            return None
        columns = StructType.fromJson(json.loads(table.schema().to_json()))
        self._check(table, columns)
        return columns

    def _check(self, table: DeltaTable, columns: StructType) -> None:
        """Raise `BadArgument` if the table asks more of its writers than is done here."""
        settings, wanted = table.metadata().configuration, set(table.protocol().writer_features or ())
        if settings.get("delta.columnMapping.mode", "none") != "none":
            wanted.add("columnMapping.mode")
        wanted |= {name for name in settings if name.startswith("delta.constraints.")}
        wanted |= {
            f"{name} of column {field.name}"
            for field in columns
            for name in ("delta.invariants", "delta.generationExpression", "delta.identity.start")
            if name in field.metadata
        }
        if unknown := sorted(wanted - KNOWN):
            raise BadArgument(f"Delta table {self.table} asks its writers for {', '.join(unknown)}, which the driver cannot do")

    def _make(self, columns: StructType) -> None:
        for name in self.partition_by:
            kind = columns[name].dataType
            if not isinstance(kind, (StringType, IntegralType, DateType, BooleanType, DecimalType)):
                raise BadArgument(f"a Delta table cannot be partitioned by {name!r}, a {kind.simpleString()}; cast it to DATE")
        try:
            made = Schema.from_json(columns.json())
            DeltaTable.create(
                self.table, made, mode="ignore", partition_by=list(self.partition_by), configuration=self.properties
            )
        except CommitFailedError:
            pass  # somebody else was faster
        except (DeltaError, ValueError) as error:
            raise BadArgument(f"Delta table {self.table} cannot be made: {error}") from error
        self._load()

    def _location(self) -> str:
        return self.table

    def _held(self, columns: StructType) -> StructType:
        return relaxed(columns)

    def _parts(self) -> list[str]:
        return list(self._loaded().metadata().partition_columns)

    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        return rows, self._parts()

    def _widen(self, columns: Sequence[StructField]) -> None:
        fields = Schema.from_json(relaxed(StructType(list(columns))).json()).fields
        with suppress(CommitFailedError):  # somebody else was faster
            self._loaded().alter.add_columns(list(fields))

    def _add(self, files: Sequence[tuple[str, int]]) -> bool:
        table, parts = self._loaded(), self._parts()
        if self._actions is None:
            self._actions = list(self._added(files))
        properties = CommitProperties(
            custom_metadata={"userMetadata": json.dumps(self.marks)},
            app_transactions=[Transaction(_application(batch), 1) for batch in self.batches],
        )
        try:
            table.create_write_transaction(self._actions, "append", table.schema(), parts or None, commit_properties=properties)
        except CommitFailedError:
            return False
        return True

    def _added(self, files: Sequence[tuple[str, int]]) -> Iterator[AddAction]:
        """What adds the files that have rows, by their footers."""
        columns, parts = self.there() or StructType(), self._parts()
        most = int(self._loaded().metadata().configuration.get("delta.dataSkippingNumIndexedCols", INDEXED))
        system = PyFileSystem(DeltaStorageHandler(self._location()))
        for name, size in files:
            with system.open_input_file(name) as file:
                found = statistics(pq.read_metadata(file), columns, most)
            if found["numRecords"]:
                yield AddAction(name, size, _values(name, parts), now_ms(), True, json.dumps(found, ensure_ascii=False))


def _application(batch: str) -> str:
    return f"qewqew:{batch}"


def _values(name: str, parts: Sequence[str]) -> dict[str, str | None]:
    """The values of the partition that a file is in, by the directories that Spark made."""
    if not parts:
        return {}
    found = dict(level.partition("=")[::2] for level in name.split("/")[-1 - len(parts) : -1])
    return {unquote(key): None if value == NO_PARTITION else unquote(value) for key, value in found.items()}
