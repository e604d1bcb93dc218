"""What a typed read and Spark's own reader make of the same records, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StructType

from qewqew_core.errors import Corrupt
from qewqew_spark.codecs.texts import java_text
from qewqew_spark.options import Options
from qewqew_spark.source.decoding import Decoding


def plain(column: pa.Array | pa.ChunkedArray) -> list:
    """Values that can be compared: temporal ones as numbers, floats as text (NaN is not equal to NaN), texts as Java has them."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in plain(chunk)]
    kind, valid = column.type, column.is_valid().to_pylist()
    if pa.types.is_struct(kind):
        fields = [plain(column.field(at)) for at in range(kind.num_fields)]
        rows = [dict(zip([field.name for field in kind], values, strict=True)) for values in zip(*fields, strict=True)]
        return [row if good else None for row, good in zip(rows or [{}] * len(column), valid, strict=True)]
    if pa.types.is_map(kind):
        keys, items = plain(column.keys), plain(column.items)
        bounds = column.offsets.to_pylist()
        base = bounds[0]
        pairs = list(zip(keys, items, strict=True))
        pairs = pairs if len(pairs) == bounds[-1] - base else pairs[base : bounds[-1]]
        return [pairs[b - base : e - base] if good else None for b, e, good in zip(bounds, bounds[1:], valid, strict=False)]
    if pa.types.is_list(kind):
        values = plain(column.values)
        bounds = column.offsets.to_pylist()
        return [values[b:e] if good else None for b, e, good in zip(bounds, bounds[1:], valid, strict=False)]
    if pa.types.is_string(kind):
        return [None if each is None else java_text(each) for each in column.view(pa.binary()).to_pylist()]
    if pa.types.is_temporal(kind):
        return column.view(pa.int32() if pa.types.is_date(kind) else pa.int64()).to_pylist()
    if pa.types.is_floating(kind):
        return [None if each is None else repr(each) for each in column.to_pylist()]
    return column.to_pylist()


def table_rows(table: pa.Table | pa.RecordBatch) -> list[tuple]:
    columns = [plain(column) for column in table.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * len(table)


def spark_rows(spark, path: Path, format: str, records: Sequence[bytes], schema: StructType, **options: str) -> list[tuple]:
    """What Spark's reader makes of lines of a file."""
    path.write_bytes(b"".join(record + b"\n" for record in records))
    return table_rows(spark.read.schema(schema).format(format).options(**options).load(str(path)).toArrow())


def our_rows(records: Sequence[bytes], schema: StructType, *, size: int = 1000, **options: str) -> list[tuple]:
    """What the codec makes of the same, in batches of ``size`` records."""
    decoding = Decoding(schema, Options(options))
    rows = []
    for at in range(0, len(records), size):
        raw = pa.record_batch([pa.array(records[at : at + size], pa.binary())], names=["value"])
        batch = decoding.batch(raw, "records", lambda row, at=at: at + row)
        assert batch.schema == decoding.schema
        batch.validate(full=True)
        rows += table_rows(batch)
    return rows


def fails_fast(record: bytes, schema: StructType, **options: str) -> bool:
    try:
        our_rows([record], schema, mode="FAILFAST", **options)
    except Corrupt:
        return True
    return False
