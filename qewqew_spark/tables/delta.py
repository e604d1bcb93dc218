"""A batch once in a Delta table, by delta-rs: the commit that has it sets the application transaction `qewqew:<batch>`.

Delta's log keeps application transactions in its checkpoints, so an old one is found as well. Of two commits that set the same
one at the same time, the log takes the first.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import PyFileSystem
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, DateType, DecimalType, IntegralType, StringType, StructType

from qewqew_core.errors import BadArgument
from qewqew_core.limits import now_ms
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.append import StagedAppend
from qewqew_spark.tables.evolution import relaxed
from qewqew_spark.tables.marks import Found, marks_in, named
from qewqew_spark.tables.merging import Merge, Range, copy_rows
from qewqew_spark.tables.statistics import statistics

INDEXED = 32  # columns with minima and maxima in the log, if the table does not say how many
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # the directory that Spark makes for a null
_PLAIN = "!$&'()+,-./:;=@_~"  # what delta-rs does not encode in the log
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
        self._merging: Merge[AddAction] | None = None
        self._merged: list[AddAction | RemoveAction] | None = None  # which add and remove instead

    def _load(self) -> DeltaTable | None:
        self._table = DeltaTable(self.table) if DeltaTable.is_deltatable(self.table) else None
        return self._table

    def _loaded(self) -> DeltaTable:
        table = self._table or self._load()
        if table is None:
            raise FileNotFoundError(f"there is no Delta table at {self.table}")
        return table

    def committed(self) -> dict[str, Found]:
        table = self._load()
        if table is None:
            return {}
        # Without a version: committed long ago.
        found = {batch: Found("") for batch in self.batches if table.transaction_version(_application(batch)) is not None}
        for commit in table.history(1000) if found else ():
            marks = marks_in(commit.get("userMetadata"))
            for batch in found.keys() & named(marks):
                found[batch] = self.found(str(commit["version"]), marks)
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
        settings, wanted = table.metadata().configuration, self._features()
        if settings.get("delta.columnMapping.mode", "none") != "none":
            wanted.add("columnMapping.mode")
        wanted |= {name for name in settings if name.startswith("delta.constraints.")}
        wanted |= {
            f"{name} of column {field.name}"
            for field in columns
            for name in ("delta.invariants", "delta.generationExpression", "delta.identity.start")
            if name in field.metadata
        }
        if self.upsert is not None:
            wanted |= {name for name in ("delta.appendOnly", "delta.enableChangeDataFeed") if settings.get(name) == "true"}
        if unknown := sorted(wanted - KNOWN):
            raise BadArgument(f"Delta table {self.table} asks its writers for {', '.join(unknown)}, which the driver cannot do")

    def _features(self) -> set[str]:
        return set(self._loaded().protocol().writer_features or ())

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

    def parts(self) -> dict[str, int | None]:
        return dict.fromkeys(self.partition_by if self.there() is None else self._parts())

    def _parts(self) -> list[str]:
        return list(self._loaded().metadata().partition_columns)

    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        return rows, self._parts()

    def _widen(self, goal: StructType) -> None:
        fields = Schema.from_json(self.changed(goal).json()).fields
        with suppress(CommitFailedError):  # somebody else was faster
            self._loaded().alter.add_columns(list(fields))

    def _add(self, files: Sequence[tuple[str, int]]) -> bool:
        table, parts = self._loaded(), self._parts()
        properties = CommitProperties(
            custom_metadata={"userMetadata": json.dumps(self.marks)},
            app_transactions=[Transaction(_application(batch), 1) for batch in self.batches],
            # What replaces files of this version must be the next one: whatever comes between may have keys of the batch.
            max_commit_retries=None if self.upsert is None else 0,
        )
        actions = self._added(files) if self._merged is None else self._merged
        try:
            table.create_write_transaction(actions, "append", table.schema(), parts or None, commit_properties=properties)
        except CommitFailedError:
            return False
        return True

    def _added(self, files: Sequence[tuple[str, int]]) -> list[AddAction | RemoveAction]:
        """What adds the files that have rows, by their footers."""
        if self._actions is None:
            parts, system = self._parts(), self._system()
            self._actions = []
            for name, size in files:
                with system.open_input_file(name) as file:
                    footer = pq.read_metadata(file)
                if footer.num_rows:
                    self._actions.append(self._action(name, size, footer, _values(name, parts)))
        return self._actions

    def _action(self, name: str, size: int, footer: pq.FileMetaData, parts: Mapping[str, str | None]) -> AddAction:
        most = int(self._loaded().metadata().configuration.get("delta.dataSkippingNumIndexedCols", INDEXED))
        found = statistics(footer, self.there() or StructType(), most)
        return AddAction(name, size, parts, now_ms(), True, json.dumps(found, ensure_ascii=False))

    def _system(self) -> PyFileSystem:
        return PyFileSystem(DeltaStorageHandler(self._location()))

    def _merge(self, files: Sequence[tuple[str, int]], deleted: Sequence[str]) -> None:
        if self._merging is None:
            keys = 0 if self.upsert is None else len(self.upsert.keys)
            written = [action for action in self._added(files) if isinstance(action, AddAction)]
            tables = [pq.read_table(self._system().open_input_file(name), partitioning=None) for name in deleted]
            self._merging = Merge(self, keys, written, [table.columns for table in tables])
        removed, added = self._merging()
        gone = [RemoveAction(file.path, True, now_ms(), file.size, dict(file.partition_values)) for file in removed]
        self._merged = [*gone, *added]

    def kinds(self) -> list[pa.DataType]:
        """See `merging.Files`, also of what follows."""
        return [self._arrow().field(field.name).type for field in self.named_fields()]

    def _arrow(self) -> pa.Schema:
        return pa.schema(self._loaded().schema().to_arrow())

    def may_have(self, ranges: Sequence[Range | None]) -> list[tuple[str, AddAction]]:
        table = self._loaded()
        found = pa.table(table.get_add_actions())
        masked = pa.table(table.deletion_vectors())["filepath"].to_pylist() if "deletionVectors" in self._features() else []
        known = {field.name: at for field, at in zip(self.named_fields(), ranges, strict=False) if at is not None}
        rows = [row for row in found.to_pylist() if all(_may_be(row, *each) for each in known.items())]
        for row in rows:
            if any(unquote(place).endswith(unquote(f"/{row['path']}")) for place in masked):
                raise BadArgument(f"{self.what} has a deletion vector in a file that may have keys of the batch; purge it first")
        return [(row["path"], self._file(row)) for row in rows]

    def _file(self, row: Mapping[str, Any]) -> AddAction:
        """A file of the table."""
        path = unquote(row["path"])
        if quote(path, safe=_PLAIN) != row["path"]:  # as delta-rs will write it: else the file would stay
            raise BadArgument(f"{self.what} has a file with a name that delta-rs writes in another way: {excerpt(path, 200)}")
        parts = {name: _text(value) for name, value in (row.get("partition") or {}).items()}
        return AddAction(path, row["size_bytes"], parts, row["modification_time"], True, "")

    @contextmanager
    def _opened(self, file: AddAction) -> Iterator[pq.ParquetFile]:
        with (
            self._system().open_input_file(file.path) as opened,
            pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as source,
        ):
            yield source

    def named_in(self, file: AddAction) -> list[pa.ChunkedArray]:
        names = [field.name for field in self.named_fields()]
        with self._opened(file) as source:
            rows = source.read([name for name in names if name in source.schema_arrow.names])
            count = source.metadata.num_rows

        def column(name: str, kind: pa.DataType) -> pa.ChunkedArray:
            if name in rows.column_names:
                return rows[name]
            value = pa.scalar(file.partition_values.get(name), pa.string())
            return pa.chunked_array([pa.repeat(value, count).cast(kind)])

        return [column(*each) for each in zip(names, self.kinds(), strict=True)]

    def copy(self, file: AddAction, keep: pa.ChunkedArray) -> AddAction:
        name = f"{self.directory}/{uuid.uuid4().hex}.parquet"
        times = {field.name: field.type for field in self._arrow()}
        with self._opened(file) as source, self._system().open_output_stream(name) as sink:
            footer = copy_rows(source, sink, keep, f"a file of {self.what}", times)
            size = sink.tell()
        return self._action(name, size, footer, file.partition_values)


def _application(batch: str) -> str:
    return f"qewqew:{batch}"


def _values(name: str, parts: Sequence[str]) -> dict[str, str | None]:
    """The values of the partition that a file is in, by the directories that Spark made."""
    if not parts:
        return {}
    found = dict(level.partition("=")[::2] for level in name.split("/")[-1 - len(parts) : -1])
    return {unquote(key): None if value == NO_PARTITION else unquote(value) for key, value in found.items()}


def _text(value: object) -> str | None:
    """A value of a partition, as the log has it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | date | Decimal) and not isinstance(value, datetime):
        return str(value)
    raise BadArgument(f"keys: a Delta table that is partitioned by a {type(value).__name__} is not known")


def _may_be(row: Mapping[str, Any], name: str, range: Range) -> bool:
    """May a file have a value of the key, by its partition, or by its bounds?"""
    if name in (parts := row.get("partition") or {}):
        return range.values is None or parts[name] in range.values
    least, greatest = ((row.get(bound) or {}).get(name) for bound in ("min", "max"))
    return (least is None or least <= range.greatest) and (greatest is None or greatest >= range.least)
