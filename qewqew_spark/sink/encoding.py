"""What rows become when they are written: records of a queue, messages of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType, TimestampType

from qewqew_core.errors import BadArgument, BadRecord, QewQewError, RecordTooLarge
from qewqew_core.formats import zbus
from qewqew_spark.source.rows import ddl

if TYPE_CHECKING:
    import pyarrow as pa

# Columns of rows. Those that were read also have their old place, which the target replaces by its own.
COLUMNS: dict[str, dict[str, tuple[type[DataType], ...]]] = {
    "queue": {"value": (BinaryType, StringType)},
    "topic": {
        "value": (BinaryType, StringType),
        "tag": (StringType,),
        "id": (StringType,),
        "corr_offset": (LongType, IntegerType),
        "timestamp": (TimestampType,),
    },
}
PLACE = {"offset", "segment", "number", "topic"}
AS_JSON = 'whole rows become JSON with df.select(F.to_json(F.struct("*")).alias("value"))'


def check_columns(schema: StructType, kind: str) -> None:
    """``kind``: of the target, "queue" or "topic". Raises `BadArgument` if it does not take such rows."""
    ours, names = COLUMNS[kind], schema.names
    rest = [field for field in schema if field.name not in PLACE]
    fits = all(isinstance(field.dataType, ours.get(field.name, ())) for field in rest)
    if not fits or "value" not in names or len(set(names)) < len(names):
        there = ", ".join(f"{name} {types[0]().simpleString()}" for name, types in ours.items())
        raise BadArgument(
            f"a {kind} takes the columns {there} (only 'value' is required), not {ddl(schema)}. Select these; {AS_JSON}"
        )


def records_schema(kind: str) -> pa.Schema:
    """The columns that `encode` returns: for a topic in the order of a `Message`, the timestamp in milliseconds."""
    import pyarrow as pa  # late: the driver plans writes without it

    if kind == "queue":
        return pa.schema({"value": pa.binary()})
    texts = {"tag": pa.string(), "id": pa.string()}
    return pa.schema({"value": pa.binary(), **texts, "corr_offset": pa.int64(), "timestamp": pa.int64()})


def encode(rows: pa.RecordBatch, kind: str, largest: int, partition: int, number: int) -> pa.RecordBatch:
    """A record of at most ``largest`` bytes for each row.

    Raises `BadRecord`, `RecordTooLarge` or `BadArgument`, which name the row: ``number`` is that of the first one in its
    ``partition``.
    """
    import pyarrow as pa  # late: the driver plans writes without it
    import pyarrow.compute as pc

    def refuse(bad: pa.Array, error: type[QewQewError], what: str) -> None:
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise error(f"row {number + row:,} of partition {partition:,} has {what}. Nothing was stored")

    def column(name: str, type: pa.DataType) -> pa.Array:
        return rows.column(name).cast(type) if name in rows.schema.names else pa.nulls(rows.num_rows, type)

    value = column("value", pa.binary())
    refuse(value.is_null(), BadRecord, "no value (null); filter such rows out")
    instead = "split it, or write to a topic" if kind == "queue" else "split it"
    refuse(pc.greater(pc.binary_length(value), largest), RecordTooLarge, f"over {largest:,} bytes; {instead}")
    if kind == "queue":
        return pa.RecordBatch.from_arrays([value], schema=records_schema(kind))
    tag, id = column("tag", pa.string()), column("id", pa.string())
    refuse(pc.greater(pc.binary_length(tag), zbus.TAG_BYTES), BadArgument, f"a tag of over {zbus.TAG_BYTES} bytes")
    refuse(pc.greater(pc.binary_length(id), zbus.ID_BYTES), BadArgument, f"an id of over {zbus.ID_BYTES} bytes")
    micros = column("timestamp", pa.timestamp("us", "UTC")).cast(pa.int64())
    refuse(pc.less(micros, 0), BadArgument, "a timestamp before 1970")
    corr_offset = column("corr_offset", pa.int64()).fill_null(0)
    return pa.RecordBatch.from_arrays([value, tag, id, corr_offset, pc.divide(micros, 1000)], schema=records_schema(kind))
