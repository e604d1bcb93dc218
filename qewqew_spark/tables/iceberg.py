"""A batch once in an Iceberg table, by PyIceberg: the snapshot that has it says so in its summary.

The catalog is that of Spark's settings `spark.sql.catalog.<name>.*` if there are any, else of PyIceberg's own configuration
(`.pyiceberg.yaml`, `PYICEBERG_CATALOG__<NAME>__…`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import SNAPSHOT_LOADING_MODE
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import Table, TableProperties
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
    parse_transform,
)
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, types
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.append import ATTEMPT, StagedAppend, named
from qewqew_spark.tables.session import quoted

_PLAIN: dict[type[types.DataType], pa.DataType] = {
    types.BooleanType: pa.bool_(),
    **dict.fromkeys((types.ByteType, types.ShortType, types.IntegerType), pa.int32()),
    types.LongType: pa.int64(),
    types.FloatType: pa.float32(),
    types.DoubleType: pa.float64(),
    **dict.fromkeys((types.StringType, types.CharType, types.VarcharType), pa.string()),
    types.BinaryType: pa.binary(),
    types.DateType: pa.date32(),
    types.TimestampType: pa.timestamp("us", "UTC"),
    types.TimestampNTZType: pa.timestamp("us"),
}


class IcebergAppend(StagedAppend):
    """`StagedAppend` for Iceberg."""

    kind = "iceberg"

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        catalog, *self._identifier = table.split(".")
        if len(self._identifier) < 2 or not all((catalog, *self._identifier)):
            raise BadArgument(f"an Iceberg table has a name like catalog.namespace.table, not {excerpt(table, 200)}")
        self._catalog = _catalog(spark, catalog)
        self._table: Table | None = None  # as it was at the last look

    def _load(self) -> Table | None:
        try:
            self._table = self._catalog.load_table(tuple(self._identifier))
        except NoSuchTableError:
            self._table = None
        else:
            # PyIceberg's own retries would commit again without looking for other commits.
            self._table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        return self._table

    def _loaded(self) -> Table:
        table = self._table or self._load()
        if table is None:
            raise NoSuchTableError(f"Table does not exist: {self.table}")
        return table

    def _find(self) -> dict[str, tuple[str, bool]]:
        table = self._load()
        snapshots = [] if table is None else table.metadata.snapshots
        wanted, found = set(self.batches), dict[str, tuple[str, bool]]()
        for snapshot in snapshots:
            marks = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            for batch in wanted.intersection(named(marks)):
                found[batch] = str(snapshot.snapshot_id), marks.get(ATTEMPT) == self.attempt
        oldest = min(snapshots, key=lambda snapshot: snapshot.timestamp_ms, default=None)
        # There were others before it.
        forgotten = oldest is not None and (oldest.parent_snapshot_id is not None or (oldest.sequence_number or 0) > 1)
        if oldest is not None and forgotten and len(found) < len(wanted):
            self.warn_of_forgotten(oldest.timestamp_ms / 1000)
        return found

    def there(self) -> types.StructType | None:
        table = self._table or self._load()
        if table is None:
            return None
        try:
            return _columns(table.schema().as_arrow())
        except PySparkException as error:
            raise BadArgument(f"{self.what} has a column of a type that Spark does not have: {error}") from error

    def _make(self, columns: types.StructType) -> None:
        # Catalogs tell in many ways that somebody else was faster. What counts is that it is there then.
        namespace = tuple(self._identifier[:-1])
        try:
            self._catalog.create_namespace_if_not_exists(namespace)
        except Exception:
            if not self._catalog.namespace_exists(namespace):
                raise
        try:
            schema = pa.schema(_arrow(columns).fields)
            with (
                self._catalog.create_table_transaction(
                    tuple(self._identifier), schema, properties=self.properties
                ) as transaction,
                transaction.update_spec() as spec,
            ):
                for text in self.partition_by:
                    spec.add_field(*_transform(text))
        except Exception as error:
            if self._load() is not None:
                return
            if isinstance(error, (PySparkException, ValueError, TypeError)):
                raise BadArgument(f"{self.what} cannot be made: {error}") from error
            raise
        self._load()

    def _location(self) -> str:
        return self._loaded().location()

    def _held(self, columns: types.StructType) -> types.StructType:
        return _columns(pa.schema(_arrow(columns).fields))

    def _parts(self) -> list[str]:
        table = self._loaded()
        sources = [str(table.schema().find_column_name(field.source_id)) for field in table.spec().fields]
        return [source.partition(".")[0] for source in sources]

    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        # Copies: Iceberg wants the columns themselves in the files.
        table = self._loaded()
        parts = []
        for number, field in enumerate(table.spec().fields):
            source = str(table.schema().find_column_name(field.source_id))
            part = f"qewqew_part_{number}"
            rows = rows.withColumn(part, _part(rows, source, field.transform, self.table))
            parts.append(part)
        return rows, parts

    def _widen(self, columns: Sequence[types.StructField]) -> None:
        with suppress(CommitFailedException), self._loaded().update_schema() as update:
            update.union_by_name(pa.schema(_arrow(types.StructType(list(columns))).fields))

    def _add(self, files: Sequence[tuple[str, int]]) -> bool:
        table = self._loaded()
        # Under the name that the table has for its place, whatever Hadoop calls it.
        paths = [f"{table.location().rstrip('/')}/{name}" for name, _ in files]
        try:
            if paths:
                table.add_files(paths, snapshot_properties=self.marks)
            else:
                table.append(table.schema().as_arrow().empty_table(), snapshot_properties=self.marks)
        except CommitFailedException:
            return False
        return True


def _catalog(spark: SparkSession, name: str) -> Catalog:
    prefix = f"spark.sql.catalog.{name}."
    settings = {key.removeprefix(prefix): value for key, value in spark.conf.getAll.items() if key.startswith(prefix)}
    if settings.get("type") in ("hadoop", "hive") or "catalog-impl" in settings:
        raise BadArgument(
            f"the catalog {name!r} exists only in Java ({settings.get('type') or settings['catalog-impl']}), and PyIceberg, "
            'which commits batches, cannot use it. Use a REST, SQL or Glue catalog, or "commit": "spark"'
        )
    try:
        catalog = load_catalog(name, **settings)
    except (ValueError, ImportError) as error:
        raise BadArgument(
            f"the Iceberg catalog {name!r} cannot be loaded: {error}. Say where it is with --conf {prefix}uri=… (and type, "
            "warehouse), or in PyIceberg's own configuration, .pyiceberg.yaml"
        ) from error
    # Any snapshot may name the batch. With "refs", as Spark's connector may be set up, a REST server sends only the last one.
    catalog.properties[SNAPSHOT_LOADING_MODE] = "all"
    return catalog


def _transform(text: str) -> tuple[str, Transform[Any, Any]]:
    """The column and the transform of a partition, written as in Spark's DDL: `day`, `month(ts)`, `truncate(4, name)`."""
    found = re.fullmatch(
        r"(?:(year|month|day|hour)s?\(\s*([^(),]+?)\s*\)|truncate\(\s*(\d+)\s*,\s*([^(),]+?)\s*\)|([^()]+))", text
    )
    if found is None:
        raise BadArgument(f"partition_by: write it like day, month(ts) or truncate(4, name), not {excerpt(text, 80)}")
    unit, of_time, width, of_text, column = found.groups()
    if unit:
        return of_time, parse_transform(unit)
    return (of_text, parse_transform(f"truncate[{width}]")) if width else (column, IdentityTransform())


def _part(rows: DataFrame, source: str, transform: Transform[Any, Any], table: str) -> Column:
    """A value that is equal for rows of one partition and different in two, whatever the session's zone."""
    column = F.col(".".join(map(quoted, source.split("."))))
    kind = rows.select(column).schema[0].dataType
    match transform:
        case IdentityTransform():
            return column
        case TruncateTransform():
            width = transform.width
            return F.substring(column, 1, width) if isinstance(kind, types.StringType) else column - F.pmod(column, F.lit(width))
        case HourTransform() if isinstance(kind, types.TimestampType):
            return F.floor(F.unix_micros(column) / 3_600_000_000)
        case HourTransform():
            return F.date_trunc("hour", column)
        case YearTransform() | MonthTransform() | DayTransform():
            # A TIMESTAMP counts in UTC, others as they are written.
            date = F.date_add(F.lit("1970-01-01").cast("date"), F.floor(F.unix_micros(column) / 86_400_000_000).cast("int"))
            date = date if isinstance(kind, types.TimestampType) else column.cast("date")
            unit = {YearTransform: "year", MonthTransform: "month", DayTransform: None}[type(transform)]
            return date if unit is None else F.trunc(date, unit)
    raise BadArgument(
        f"Iceberg table {table} is partitioned by {transform} of {source}. The bounds of a file do not tell its partition, so "
        'the driver cannot add it; use month, day, truncate …, or "commit": "spark"'
    )


def _columns(schema: pa.Schema) -> types.StructType:
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def _arrow(kind: types.DataType) -> pa.DataType:
    """The type that a table has for it: small integers are INT there, and all may be null. Raises `BadArgument`."""
    match kind:
        case types.StructType():
            return pa.struct([pa.field(field.name, _arrow(field.dataType)) for field in kind])
        case types.ArrayType():
            return pa.list_(_arrow(kind.elementType))
        case types.MapType():
            return pa.map_(_arrow(kind.keyType), _arrow(kind.valueType))
        case types.DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
    if (found := _PLAIN.get(type(kind))) is None:
        raise BadArgument(f"Iceberg has no type for {kind.simpleString()}; cast the column")
    return found
