"""Files that Spark wrote, as Iceberg's manifests have them: with field ids, the partition and metrics.

What is said of a file comes from its footer, and its partition from its first row: all of its rows are of one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import MetricModeTypes, MetricsMode, compute_statistics_plan
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)
from pyspark.sql import types

from qewqew_core.errors import BadArgument

FIELD_ID = "parquet.field.id"  # in the metadata of a column: Spark writes it into the file
# How Iceberg has a bound; other types have none here.
_PACKED: dict[type[PrimitiveType], str] = {
    BooleanType: "<?",
    **dict.fromkeys((IntegerType, DateType), "<i"),
    **dict.fromkeys((LongType, TimestampType, TimestamptzType), "<q"),
    FloatType: "<f",
    DoubleType: "<d",
}
_WRITTEN: tuple[type[PrimitiveType], ...] = (*_PACKED, DecimalType, StringType, BinaryType)  # what Spark writes as Iceberg has it
_READERS = 8  # files that are read at once


@dataclass(frozen=True)
class Leaf:
    """A column of a Parquet file. ``path``: the names from the table's column down."""

    path: tuple[str, ...]
    field_id: int
    type: PrimitiveType
    repeated: bool  # in a list or map?


@dataclass(frozen=True)
class Written:
    """What the table was when the files were written, and the columns that they have, in order."""

    schema: Schema
    spec: PartitionSpec
    modes: dict[int, MetricsMode]
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, schema: Schema, spec: PartitionSpec, properties: dict[str, str], columns: Iterable[str]) -> Written:
        """Raises `BadArgument` for what Spark cannot write as the table has it, and for metrics that Iceberg does not have."""
        known = {field.name: field for field in schema.fields}
        found = tuple(leaf for name in columns for leaf in _leaves(known[name]))
        for leaf in found:
            if not isinstance(leaf.type, _WRITTEN):
                raise BadArgument(f"the column {'.'.join(leaf.path)!r} is {leaf.type}, which Spark cannot write; cast or drop it")
        try:
            plan = compute_statistics_plan(schema, properties)
        except ValueError as error:
            raise BadArgument(f"a property of the table, write.metadata.metrics.…, is wrong: {error}") from error
        return cls(schema, spec, {field_id: column.mode for field_id, column in plan.items()}, found)

    @property
    def by_names(self) -> bool:
        """Are there lists or maps? Spark gives no ids to their elements, and readers take a file with some ids for wrong."""
        return any(leaf.repeated for leaf in self.leaves)

    def data_files(self, io: FileIO, files: Sequence[tuple[str, int]]) -> list[DataFile]:
        """Those of the files (place, bytes) that have rows."""
        with ThreadPoolExecutor(_READERS) as readers:
            found = readers.map(partial(self._data_file, io), *zip(*files, strict=True)) if files else ()
            return [file for file in found if file is not None]

    def _data_file(self, io: FileIO, place: str, size: int) -> DataFile | None:
        with io.new_input(place).open() as opened, pq.ParquetFile(opened) as file:
            if not file.metadata.num_rows:
                return None
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            made: DataFile = DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=place,
                file_format=FileFormat.PARQUET,
                partition=self._partition(file),
                record_count=file.metadata.num_rows,
                file_size_in_bytes=size,
                split_offsets=[_start(group.column(0)) for group in groups],
                **self._metrics(groups),
            )
            made.spec_id = self.spec.spec_id
            return made

    def _partition(self, file: pq.ParquetFile) -> Record:
        found = []
        for field in self.spec.fields:
            number = next(number for number, leaf in enumerate(self.leaves) if leaf.field_id == field.source_id)
            leaf = self.leaves[number]
            rows = file.iter_batches(1, row_groups=[0], columns=[file.metadata.schema.column(number).path])
            value = next(rows).column(leaf.path[0])[0]
            for name in leaf.path[1:]:
                value = value[name] if value.is_valid else value
            found.append(field.transform.transform(leaf.type)(_plain(value)))
        return Record(*found)

    def _metrics(self, groups: Sequence[pq.RowGroupMetaData]) -> dict[str, Any]:
        found: dict[str, dict[int, Any]] = {
            name: {}
            for name in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
        }
        for number, leaf in enumerate(self.leaves):
            chunks = [group.column(number) for group in groups]
            found["column_sizes"][leaf.field_id] = sum(chunk.total_compressed_size for chunk in chunks)
            mode = self.modes[leaf.field_id]
            if mode.type == MetricModeTypes.NONE:
                continue
            found["value_counts"][leaf.field_id] = sum(chunk.num_values for chunk in chunks)
            known = [chunk.statistics for chunk in chunks]
            if not all(each is not None and each.has_null_count for each in known):
                continue
            found["null_value_counts"][leaf.field_id] = sum(each.null_count for each in known)
            known = [each for each in known if each.num_values]  # nulls have no bounds
            floating = isinstance(leaf.type, FloatType | DoubleType)
            if not all(each.has_min_max for each in known):
                continue
            if floating and all(each.max_raw == each.max_raw for each in known):  # Parquet's NaN is the greatest
                found["nan_value_counts"][leaf.field_id] = 0
            if known and mode.type != MetricModeTypes.COUNTS:
                lower = _lower(leaf.type, [each.min_raw for each in known], mode.length)
                upper = _upper(leaf.type, [each.max_raw for each in known], mode.length)
                if lower is not None:
                    found["lower_bounds"][leaf.field_id] = lower
                if upper is not None:
                    found["upper_bounds"][leaf.field_id] = upper
        return found


def copied(file: DataFile, place: str, size: int, footer: pq.FileMetaData) -> DataFile:
    """A file with some of another's rows: of its partition, and within its bounds."""
    none = [
        {key: 0 for key, count in (counts or {}).items() if not count}
        for counts in (file.null_value_counts, file.nan_value_counts)
    ]
    made: DataFile = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=place,
        file_format=FileFormat.PARQUET,
        partition=file.partition,
        record_count=footer.num_rows,
        file_size_in_bytes=size,
        split_offsets=[_start(footer.row_group(number).column(0)) for number in range(footer.num_row_groups)],
        null_value_counts=none[0],
        nan_value_counts=none[1],
        lower_bounds=file.lower_bounds,
        upper_bounds=file.upper_bounds,
    )
    made.spec_id = file.spec_id
    return made


def with_ids(columns: types.StructType, held: StructType | None) -> types.StructType:
    """The columns, and fields of structs, with the ids that they have in the table; with ``held`` None, without ids."""
    known = {field.name: field for field in held.fields} if held is not None else {}
    found = []
    for field in columns:
        metadata = {key: value for key, value in field.metadata.items() if key != FIELD_ID}
        within = None
        if field.name in known:
            metadata[FIELD_ID] = known[field.name].field_id
            within = known[field.name].field_type
        found.append(types.StructField(field.name, _with_ids(field.dataType, within), field.nullable, metadata))
    return types.StructType(found)


def _with_ids(kind: types.DataType, held: IcebergType | None) -> types.DataType:
    match kind:
        case types.StructType():
            return with_ids(kind, held if isinstance(held, StructType) else None)
        case types.ArrayType():
            return types.ArrayType(_with_ids(kind.elementType, None), kind.containsNull)
        case types.MapType():
            return types.MapType(_with_ids(kind.keyType, None), _with_ids(kind.valueType, None), kind.valueContainsNull)
    return kind


def path_to(schema: Schema, field_id: int) -> tuple[str, ...]:
    """The names from the column down to the field; any of them may have dots."""
    return next(leaf.path for field in schema.fields for leaf in _leaves(field) if leaf.field_id == field_id)


def _leaves(field: NestedField, at: tuple[str, ...] = (), repeated: bool = False) -> Iterator[Leaf]:
    path = *at, field.name
    match field.field_type:
        case StructType() as kind:
            parts: tuple[NestedField, ...] = kind.fields
        case ListType() as kind:
            parts, repeated = (kind.element_field,), True
        case MapType() as kind:
            parts, repeated = (kind.key_field, kind.value_field), True
        case PrimitiveType() as kind:
            yield Leaf(path, field.field_id, kind, repeated)
            return
    for part in parts:
        yield from _leaves(part, path, repeated)


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    offsets = [chunk.data_page_offset, *([chunk.dictionary_page_offset] if chunk.has_dictionary_page else [])]
    return int(min(offsets))


def _plain(value: Any) -> object:
    """As Iceberg's transforms take it: moments and dates as numbers, which have no last year."""
    return value.value if isinstance(value, pa.TimestampScalar | pa.Date32Scalar) else value.as_py()


def _lower(kind: PrimitiveType, least: list[Any], length: int | None) -> bytes | None:
    value = min(_comparable(kind, each) for each in least)
    if value == 0 and isinstance(value, float):
        value = -0.0  # equal to 0.0, but less if bits are compared
    if isinstance(kind, StringType) and (text := _text(value)) is not None:
        return text[:length].encode()
    return value[:length] if isinstance(kind, BinaryType) else _packed(kind, value)


def _upper(kind: PrimitiveType, greatest: list[Any], length: int | None) -> bytes | None:
    if any(each != each for each in greatest):
        return None  # the greatest beside NaN is not known
    value = max(_comparable(kind, each) for each in greatest)
    if value == 0 and isinstance(value, float):
        value = 0.0
    if isinstance(kind, StringType):
        text = _text(value)
        return None if text is None else _rounded_up(text, length)
    if isinstance(kind, BinaryType) and length is not None and len(value) > length:
        cut = value[:length].rstrip(b"\xff")
        return cut[:-1] + bytes([cut[-1] + 1]) if cut else None
    return bytes(value) if isinstance(kind, BinaryType) else _packed(kind, value)


def _rounded_up(text: str, length: int | None) -> bytes | None:
    if length is None or len(text) <= length:
        return text.encode()
    cut = text[:length].rstrip("\U0010ffff")
    if not cut:
        return None
    following = ord(cut[-1]) + 1
    return (cut[:-1] + chr(0xE000 if following == 0xD800 else following)).encode()  # no characters are in between


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _comparable(kind: PrimitiveType, value: Any) -> Any:
    """DECIMAL as a number, as which short ones are there already."""
    return int.from_bytes(value, "big", signed=True) if isinstance(kind, DecimalType) and isinstance(value, bytes) else value


def _packed(kind: PrimitiveType, value: Any) -> bytes | None:
    if isinstance(kind, DecimalType):
        return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "big", signed=True)  # type: ignore[no-any-return]
    if value != value or type(kind) not in _PACKED:
        return None
    return struct.pack(_PACKED[type(kind)], value)
