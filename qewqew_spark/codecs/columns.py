"""From Spark's types to Arrow's."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types

from qewqew_core.errors import BadArgument
from qewqew_spark.options import use_spark

_SIMPLE: dict[type[types.DataType], pa.DataType] = {
    types.BooleanType: pa.bool_(),
    types.ByteType: pa.int8(),
    types.ShortType: pa.int16(),
    types.IntegerType: pa.int32(),
    types.LongType: pa.int64(),
    types.FloatType: pa.float32(),
    types.DoubleType: pa.float64(),
    types.StringType: pa.string(),
    types.BinaryType: pa.binary(),
    types.DateType: pa.date32(),
    types.TimestampType: pa.timestamp("us", "UTC"),
    types.TimestampNTZType: pa.timestamp("us"),
}


def arrow_type(kind: types.DataType, where: str) -> pa.DataType:
    """The Arrow type in which Spark takes a column; ``where`` names the field. Raises `BadArgument` if nothing decodes to it."""
    if type(kind) in _SIMPLE:
        return _SIMPLE[type(kind)]
    if isinstance(kind, types.DecimalType) and kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, types.ArrayType):
        return pa.list_(pa.field("element", arrow_type(kind.elementType, f"{where}[]"), kind.containsNull))
    if isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            raise BadArgument(f"the field {where}: keys of a map must be STRING, not {kind.keyType.simpleString().upper()}")
        return pa.map_(pa.string(), pa.field("value", arrow_type(kind.valueType, f"{where}{{}}"), kind.valueContainsNull))
    if isinstance(kind, types.StructType):
        return pa.struct(arrow_fields(kind, where))
    raise BadArgument(
        f"the field {where} has the type {kind.simpleString().upper()}, which the typed read does not know; "
        f"for Spark's from_json, {use_spark('from_json')}"
    )


def arrow_fields(struct: types.StructType, where: str = "") -> list[pa.Field]:
    """The fields of a struct; raises `BadArgument` for what cannot be decoded."""
    fields: dict[str, pa.Field] = {}
    for field in struct:
        name = f"{where}.{field.name}" if where else field.name
        if field.name in fields:
            raise BadArgument(f"the schema has two fields {name!r}; name each once")
        fields[field.name] = pa.field(field.name, arrow_type(field.dataType, name), field.nullable)
    return list(fields.values())
