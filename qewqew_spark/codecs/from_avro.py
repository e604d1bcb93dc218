"""Records that are one Avro datum each, without a header: the option ``avroSchema`` has the schema of their writer."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

from pyspark.sql import types

from qewqew_core.errors import BadArgument
from qewqew_spark.codecs import objects
from qewqew_spark.codecs.objects import Fit, ObjectCodec, Unreadable
from qewqew_spark.options import Options

try:
    import fastavro
except ImportError:
    fastavro = None  # type: ignore[assignment]

Avro = Any  # a schema as JSON: a name, a list (a union), or an object

_WHOLE = (types.ByteType, types.ShortType, types.IntegerType, types.LongType, types.DoubleType, types.DecimalType)
# Of each type: what fastavro makes of it, by which the branch of a union is known, and the types as which it can be read.
_TYPES: dict[str, tuple[type, tuple[type[types.DataType], ...]]] = {
    "boolean": (bool, (types.BooleanType,)),
    "int": (int, _WHOLE),
    "long": (int, _WHOLE),
    "float": (float, (types.FloatType, types.DoubleType)),
    "double": (float, (types.DoubleType,)),
    "bytes": (bytes, (types.BinaryType,)),
    "fixed": (bytes, (types.BinaryType,)),
    "string": (str, (types.StringType,)),
    "enum": (str, (types.StringType,)),
    "array": (list, (types.ArrayType,)),
    "map": (dict, (types.MapType,)),
    "record": (dict, (types.StructType,)),
}
_UNITS = {"timestamp-millis": 1000, "timestamp-micros": 1}  # microseconds in them; the local ones have no zone


class AvroCodec(ObjectCodec):
    """See `Codec`. Fields are found by name; a type that can never fit its field is refused."""

    def __init__(self, fields: types.StructType, options: Options) -> None:
        if fastavro is None:
            raise BadArgument("the codec avro needs the package fastavro, on the driver and the executors: install qewqew[avro]")
        text = options.text("avroSchema")
        if text is None:
            raise BadArgument(
                "the codec avro needs the option 'avroSchema': the schema with which the records were written, as JSON"
            )
        try:
            schema = json.loads(text)
            expanded = fastavro.schema.expand_schema(schema)
            self._schema = fastavro.parse_schema(_physical(schema))
        except (ValueError, LookupError, TypeError, AttributeError, fastavro.schema.SchemaParseException) as error:
            raise BadArgument(f"the option 'avroSchema' is not an Avro schema: {error!r}") from error
        _check(expanded)
        if _name(expanded) != "record":
            raise BadArgument("the option 'avroSchema' must be the schema of a record, whose fields become the columns")
        super().__init__(fields, self._datum, _fits(expanded, fields, ""))

    def _datum(self, data: bytes) -> dict[str, Any]:
        stream = io.BytesIO(data)
        try:
            value = fastavro.schemaless_reader(stream, self._schema, None)
        except (ValueError, LookupError, EOFError, TypeError, OverflowError) as error:
            raise Unreadable("malformed Avro") from error
        if stream.tell() != len(data):
            raise Unreadable("bytes behind the Avro datum")
        assert isinstance(value, dict)
        return value


def _name(avro: Avro) -> str:
    """The name of the type, however it is wrapped."""
    while isinstance(avro, dict):
        avro = avro["type"]
    return "union" if isinstance(avro, list) else str(avro)


def _physical(avro: Avro) -> Avro:
    """The schema without logical types: what they mean is known here, and Python's dates end with the year 9999."""
    if isinstance(avro, list):
        return [_physical(branch) for branch in avro]
    if not isinstance(avro, dict):
        return avro
    inner = {key: _physical(avro[key]) for key in ("type", "items", "values") if key in avro}
    if "fields" in avro:
        inner["fields"] = [{**field, "type": _physical(field["type"])} for field in avro["fields"]]
    return {**{key: value for key, value in avro.items() if key != "logicalType"}, **inner}


def _check(avro: Avro) -> int:
    """The least bytes that a value takes. Refuses what a hostile record could exhaust the stack or the memory with."""
    if isinstance(avro, list):
        return 1 + min(_check(branch) for branch in avro)
    name = _name(avro)
    if name not in _TYPES and name != "null":
        raise BadArgument(f"the option 'avroSchema': the type {name!r} contains itself, which cannot be read")
    if name == "record":
        return sum(_check(field["type"]) for field in avro["fields"])
    if name in ("array", "map"):
        least = _check(avro["items"] if name == "array" else avro["values"])
        if name == "array" and not least:
            raise BadArgument("the option 'avroSchema' has an array of values without bytes, so nothing bounds its length")
        return 1
    return int(avro["size"]) if name == "fixed" else name != "null"


def _fits(record: Avro, fields: types.StructType, where: str) -> list[Fit]:
    there = {field["name"]: field["type"] for field in record["fields"]}
    for field in fields:
        if field.name not in there:
            raise BadArgument(f"the records have no field {where}{field.name}; there are {', '.join(there) or 'none'}")
    return [_fit(there[field.name], field.dataType, where + field.name) for field in fields]


def _fit(avro: Avro, kind: types.DataType, where: str) -> Fit:
    """For the values of a type or a union, null apart; raises `BadArgument` if none of them can be of the type ``kind``."""
    branches = [branch for branch in (avro if isinstance(avro, list) else [avro]) if _name(branch) != "null"]
    if len(branches) == 1:
        return _fit_branch(branches[0], kind, where)
    fits: dict[type, Fit] = {}
    refused = None
    seen = [_TYPES[_name(branch)][0] for branch in branches]
    for branch, python in zip(branches, seen, strict=True):
        if seen.count(python) > 1 and branch not in ("int", "long", "float", "double", "string", "bytes"):
            raise BadArgument(f"the field {where} is a union of types that cannot be told apart: {json.dumps(avro)}")
        try:
            fits[python] = _fit_branch(branch, kind, where)
        except BadArgument as error:
            refused = error
    if not fits and refused is not None:
        raise refused

    def fit(value: Any) -> Any:
        return fits[type(value)](value) if type(value) in fits else objects.refuse(value)

    return fit


def _fit_branch(avro: Avro, kind: types.DataType, where: str) -> Fit:
    while isinstance(avro, dict) and isinstance(avro["type"], dict):
        avro = avro["type"]
    name = _name(avro)
    logical = avro.get("logicalType", "") if isinstance(avro, dict) else ""
    if isinstance(kind, types.StructType) and name == "record":
        return objects.struct(kind, _fits(avro, kind, f"{where}."))
    if isinstance(kind, types.ArrayType) and name == "array":
        return objects.array(kind, _fit(avro["items"], kind.elementType, f"{where}[]"))
    if isinstance(kind, types.MapType) and name == "map":
        return objects.mapping(kind, _fit(avro["values"], kind.valueType, f"{where}{{}}"))
    if isinstance(kind, types.DateType) and logical == "date":
        return objects.whole(32)
    if isinstance(kind, types.TimestampType | types.TimestampNTZType):
        local = "local-" if isinstance(kind, types.TimestampNTZType) else ""
        unit = next((micros for form, micros in _UNITS.items() if logical == local + form), None)
        if unit is not None:
            return lambda value: objects.whole(64)(objects.whole(64)(value) * unit)
    if isinstance(kind, types.DecimalType) and logical == "decimal" and name in ("bytes", "fixed"):
        scale, fit = -int(avro.get("scale", 0)), objects.decimal(kind.precision, kind.scale)
        return lambda value: fit(Decimal(int.from_bytes(value, "big", signed=True)).scaleb(scale))
    if isinstance(kind, _TYPES[name][1]) and name not in ("record", "array", "map"):
        return objects.decimal(kind.precision, kind.scale) if isinstance(kind, types.DecimalType) else objects.SCALARS[type(kind)]
    written = f"{name} ({logical})" if logical else name
    raise BadArgument(f"the field {where} is written as {written} in Avro, which is never a {kind.simpleString().upper()}")
