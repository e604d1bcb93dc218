"""A batch once in an Iceberg table, by PyIceberg: the snapshot that has it says so in its summary.

The catalog is that of Spark's settings `spark.sql.catalog.<name>.*` if there are any, else of PyIceberg's own configuration
(`.pyiceberg.yaml`, `PYICEBERG_CATALOG__<NAME>__…`).
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import expressions
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.reader import DoubleReader
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import SNAPSHOT_LOADING_MODE
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table, TableProperties
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.transforms import TruncateTransform
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from qewqew_core.errors import BadArgument, Corrupt
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.append import StagedAppend, TooManyConflicts
from qewqew_spark.tables.data_files import Written, copied, path_to, with_ids
from qewqew_spark.tables.evolution import fits, relaxed
from qewqew_spark.tables.marks import Found, named
from qewqew_spark.tables.merging import Merge, Range, copy_rows
from qewqew_spark.tables.partitions import PARTITION, parted, transform_of
from qewqew_spark.tables.session import quoted

# The fast decoder of PyIceberg (up to 0.12) reads a DOUBLE as a FLOAT. A commit that merges manifests, or replaces files, would
# write partitions that way, and filters by the values would no longer find the rows.
if new_decoder(struct.pack("<d", 0.1)).read_double() != 0.1:
    setattr(DoubleReader, "read", lambda _, decoder: struct.unpack("<d", decoder.read(8))[0])  # noqa: B010

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
# Of a table that is made here. Without them each commit adds a manifest and a metadata file, for good.
_PROPERTIES = {
    TableProperties.MANIFEST_MERGE_ENABLED: "true",  # a hundred become one
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "100",
}


class IcebergAppend(StagedAppend):
    """`StagedAppend` for Iceberg."""

    kind = "iceberg"
    names_fields = True

    def __init__(self, spark: SparkSession, table: str, batches: str | Sequence[str], **options: Any) -> None:
        super().__init__(spark, table, batches, **options)
        catalog, *self._identifier = table.split(".")
        if len(self._identifier) < 2 or not all((catalog, *self._identifier)):
            raise BadArgument(f"an Iceberg table has a name like catalog.namespace.table, not {excerpt(table, 200)}")
        self._catalog = _catalog(spark, catalog)
        self._table: Table | None = None  # as it was at the last look
        self._written: Written | None = None
        self._files: list[DataFile] | None = None  # of what was written
        self._uuid: object = None  # of the table that it was written for
        self._merging: Merge[DataFile] | None = None
        self._merged: tuple[list[DataFile], list[DataFile]] | None = None  # which go from the table, and which come instead

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

    def committed(self) -> dict[str, Found]:
        table = self._load()
        snapshots = [] if table is None else table.metadata.snapshots
        wanted, found = set(self.batches), dict[str, Found]()
        for snapshot in snapshots:
            marks = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            for batch in filter(wanted.__contains__, named(marks)):
                found[batch] = self.found(str(snapshot.snapshot_id), marks)
        oldest = min(snapshots, key=lambda snapshot: snapshot.timestamp_ms, default=None)
        # There were others before it.
        forgotten = oldest is not None and (oldest.parent_snapshot_id is not None or (oldest.sequence_number or 0) > 1)
        if oldest is not None and forgotten and len(found) < len(wanted):
            self.warn_of_forgotten(oldest.timestamp_ms / 1000)
        return found

    def check(self, columns: types.StructType) -> None:
        super().check(columns)
        table = self._table or self._load()
        if self.branch is not None and (table is None or self.branch not in _branches(table)):
            known = "does not exist" if table is None else f"has the branches {', '.join(_branches(table)) or 'none'}"
            raise BadArgument(f"{self.what} {known}; create the branch {excerpt(self.branch, 80)} first, from one that is there")

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
                    tuple(self._identifier), schema, properties={**_PROPERTIES, **self.properties}
                ) as transaction,
                transaction.update_spec() as spec,
            ):
                for number, (name, transform) in enumerate(map(transform_of, self.partition_by)):
                    # PyIceberg takes é for a letter of Avro's names, and readers stop at such a manifest.
                    ascii = None if name.isascii() else "".join(each if each.isascii() else f"_x{ord(each):X}" for each in name)
                    spec.add_field(name, transform, ascii and f"{ascii}_{number}")
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
        return _columns(pa.schema(_arrow(relaxed(columns)).fields))

    def parts(self) -> dict[str, int | None]:
        table = self._table or self._load()
        if table is None:
            found = [transform_of(text) for text in self.partition_by]
        else:
            paths = [(path_to(table.schema(), part.source_id), part.transform) for part in table.spec().fields]
            found = [(path[0], transform) for path, transform in paths if len(path) == 1]
        return {name: transform.width for name, transform in found if isinstance(transform, TruncateTransform)}

    def _parts(self) -> list[str]:
        table = self._loaded()
        return [path_to(table.schema(), field.source_id)[0] for field in table.spec().fields]

    def _partitioned(self, rows: DataFrame) -> tuple[DataFrame, list[str]]:
        table = self._loaded()
        schema, spec = table.schema(), table.spec()
        self._written = written = Written.of(schema, spec, table.properties, rows.columns)
        self._files = None
        self._uuid = table.metadata.table_uuid
        identified = with_ids(rows.schema, None if written.by_names else schema.as_struct())
        rows = rows.select(
            [F.col(quoted(each.name)).cast(each.dataType).alias(each.name, metadata=each.metadata) for each in identified]
        )
        if not spec.fields:
            return rows, []
        return parted(rows, [(path_to(schema, part.source_id), part.transform) for part in spec.fields], self.what), [PARTITION]

    @staticmethod
    def _widens(there: types.DataType, batch: types.DataType) -> bool:
        return fits(batch, there)

    def _widen(self, goal: types.StructType) -> None:
        with suppress(CommitFailedException), self._loaded().update_schema() as update:
            update.union_by_name(pa.schema(_arrow(self.changed(goal)).fields))
        self._load()

    def _prepared(self, files: Sequence[tuple[str, int]]) -> tuple[Table, Written, list[DataFile]]:
        table, written = self._loaded(), self._written
        if written is None or (table.metadata.table_uuid, table.spec()) != (self._uuid, written.spec):
            raise TooManyConflicts(
                f"{self.what}: its partitions were changed, or it was made again, while the batch was written. Nothing was "
                "added; you can make the same call again"
            )
        if self._files is None:
            # Under the name that the table has for its place, whatever Hadoop calls it.
            top = table.location().rstrip("/")
            self._files = written.data_files(table.io, [(f"{top}/{name}", size) for name, size in files])
        return table, written, self._files

    def _add(self, files: Sequence[tuple[str, int]]) -> bool:
        table, written, new = self._prepared(files)
        removed, added = self._merged or ([], new)
        try:
            with table.transaction() as transaction:
                if written.by_names and table.name_mapping() is None:
                    mapping = table.schema().name_mapping.model_dump_json()
                    transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
                update = transaction.update_snapshot(self.marks, self.branch or MAIN_BRANCH)
                merging = table.properties.get(TableProperties.MANIFEST_MERGE_ENABLED, "").lower() == "true"
                appending = update.merge_append if merging else update.fast_append
                with update.overwrite() if removed else appending() as producer:
                    for file in removed:
                        producer.delete_data_file(file)
                    for file in added:
                        producer.append_data_file(file)
        except CommitFailedException:
            return False
        return True

    def _merge(self, files: Sequence[tuple[str, int]], deleted: Sequence[str]) -> None:
        table, _, written = self._prepared(files)
        if self._merging is None:
            keys = 0 if self.upsert is None else len(self.upsert.keys)
            tables = [self._read(f"{table.location().rstrip('/')}/{name}") for name in deleted]
            self._merging = Merge(self, keys, written, [each.columns for each in tables])
        self._merged = self._merging()

    def _read(self, place: str) -> pa.Table:
        with self._loaded().io.new_input(place).open() as opened:
            return pq.read_table(opened)

    def _selected(self) -> Schema:
        schema = self._loaded().schema()
        known = {field.name: field for field in schema.fields}
        return Schema(*(known[field.name] for field in self.named_fields()))

    def kinds(self) -> list[pa.DataType]:
        """See `merging.Files`, also of what follows."""
        return [field.type for field in _arrow(_columns(schema_to_pyarrow(self._selected())))]

    def may_have(self, ranges: Sequence[Range | None]) -> list[tuple[str, DataFile]]:
        table = self._loaded()
        wanted: Any = expressions.AlwaysTrue()
        make: Any = expressions  # whose classes take other arguments than they say
        for field, range in zip(self._selected().fields, ranges, strict=False):
            if range is not None and "." not in field.name:
                if range.values is not None:
                    wanted = make.And(wanted, make.In(field.name, range.values))
                else:
                    bounds = make.GreaterThanOrEqual(field.name, range.least), make.LessThanOrEqual(field.name, range.greatest)
                    wanted = make.And(wanted, *bounds)
        try:
            scan = table.scan(row_filter=wanted)
            tasks = [*(scan if self.branch is None else scan.use_ref(self.branch)).plan_files()]
        except (ValueError, NotImplementedError) as error:
            raise BadArgument(f"{self.what} cannot be read by PyIceberg: {error}") from error
        for task in tasks:
            if task.delete_files or task.file.file_format != FileFormat.PARQUET:
                raise BadArgument(
                    f"{self.what} has a file that may have keys of the batch, and delete files for it, or is not Parquet; run "
                    "rewrite_data_files first"
                )
        return [(task.file.file_path, task.file) for task in tasks]

    def named_in(self, file: DataFile) -> list[pa.ChunkedArray]:
        table, selected = self._loaded(), self._selected()
        metadata = table.metadata
        if table.name_mapping() is None:  # it comes with the commit, see `_add`
            mapping = {TableProperties.DEFAULT_NAME_MAPPING: table.schema().name_mapping.model_dump_json()}
            metadata = metadata.model_copy(update={"properties": {**metadata.properties, **mapping}})
        rows = ArrowScan(metadata, table.io, selected, expressions.AlwaysTrue()).to_table([FileScanTask(file)])
        if len(rows) != file.record_count:
            raise Corrupt(f"{file.record_count} rows are in the manifest, and {len(rows)} in the file", path=file.file_path)
        return [rows[field.name] for field in selected.fields]

    def copy(self, file: DataFile, keep: pa.ChunkedArray) -> DataFile:
        table = self._loaded()
        if file.spec_id != table.spec().spec_id:
            raise BadArgument(f"{self.what} has keys of the batch in a file of earlier partitions; run rewrite_data_files first")
        place = f"{table.location().rstrip('/')}/{self.directory}/{uuid.uuid4().hex}.parquet"
        with (
            table.io.new_input(file.file_path).open() as opened,
            pq.ParquetFile(opened) as source,
            table.io.new_output(place).create() as sink,
        ):
            footer = copy_rows(source, sink, keep, f"a file of {self.what}", {})
            size = sink.tell()
        return copied(file, place, size, footer)


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


def _branches(table: Table) -> list[str]:
    return sorted(name for name, ref in table.refs().items() if ref.snapshot_ref_type == SnapshotRefType.BRANCH)


def _columns(schema: pa.Schema) -> types.StructType:
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def _arrow(kind: types.DataType) -> pa.DataType:
    """The type that a table has for it: small integers are INT there. Raises `BadArgument`."""
    match kind:
        case types.StructType():
            return pa.struct([pa.field(field.name, _arrow(field.dataType), field.nullable) for field in kind])
        case types.ArrayType():
            return pa.list_(pa.field("element", _arrow(kind.elementType), kind.containsNull))
        case types.MapType():
            return pa.map_(_arrow(kind.keyType), pa.field("value", _arrow(kind.valueType), kind.valueContainsNull))
        case types.DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
    if (found := _PLAIN.get(type(kind))) is None:
        raise BadArgument(f"Iceberg has no type for {kind.simpleString()}; cast the column")
    return found
