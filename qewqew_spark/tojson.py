"""Rows as JSON, in the same characters as Spark's `to_json`: fields that are null are left out."""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Any

import numpy as np
from pyspark.sql import types

from qewqew_core.errors import BadArgument

Encoder = Callable[[Any], str]

_WHOLE = types.ByteType, types.ShortType, types.IntegerType, types.LongType
_ESCAPES = {number: f"\\u{number:04X}" for number in range(32)} | {
    ord(char): "\\" + escape for char, escape in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}


def encoder(data_type: types.DataType, column: str = "the row") -> Encoder:
    """What makes JSON of a value of this type, as Arrow hands it over, that is not null.

    Raises `BadArgument`, which names the column, for a type that has no JSON of its own.
    """
    match data_type:
        case types.StringType():
            return _text
        case types.NullType():
            return str  # never called
        case types.BooleanType():
            return lambda value: "true" if value else "false"
        case types.DecimalType():
            return str  # which Java's BigDecimal.toString agrees with: both are those of the decimal arithmetic specification
        case types.DoubleType():
            return _double
        case types.FloatType():
            return lambda value: _number(str(np.float32(value))) if isfinite(value) else _double(value)
        case types.DateType():
            return lambda value: f'"{value.isoformat()}"'
        case types.TimestampType() | types.TimestampNTZType():
            return _timestamp
        case types.BinaryType():
            return lambda value: f'"{base64.b64encode(value).decode()}"'
        case types.StructType():
            return _struct(data_type, column)
        case types.ArrayType():
            item = encoder(data_type.elementType, f"{column}[]")
            return lambda value: f"[{','.join('null' if one is None else item(one) for one in value)}]"
        case types.MapType(keyType=types.StringType()):
            item = encoder(data_type.valueType, f"{column}{{}}")
            return lambda value: (
                f"{{{','.join(f'{_text(key)}:' + ('null' if one is None else item(one)) for key, one in value)}}}"
            )
    if isinstance(data_type, _WHOLE):
        return str
    raise BadArgument(
        f"{column} has the type {data_type.simpleString()}, which the codec 'json' does not write; cast it, or make the column "
        "value yourself, for example with to_json(struct('*'))"
    )


def _struct(struct: types.StructType, column: str) -> Encoder:
    if doubled := {name for name in struct.names if struct.names.count(name) > 1}:
        raise BadArgument(f"{column} has more than one field {min(doubled)!r}; rename one")
    prefix = "" if column == "the row" else f"{column}."
    fields = [(field.name, _text(field.name) + ":", encoder(field.dataType, prefix + field.name)) for field in struct]

    def encode(value: dict[str, Any]) -> str:
        return f"{{{','.join([name + item(one) for key, name, item in fields if (one := value[key]) is not None])}}}"

    return encode


def _text(value: str) -> str:
    return f'"{value.translate(_ESCAPES)}"'


def _double(value: float) -> str:
    if value != value:
        return '"NaN"'
    if not isfinite(value):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    return repr(value) if 1e-3 <= abs(value) < 1e7 else _number(repr(value))


def _number(text: str) -> str:
    """A number as Java spells it: plain from 0.001 on and below ten million, else with an exponent; always with a fraction."""
    number = Decimal(text).normalize()
    if not number or Decimal("0.001") <= abs(number) < 10_000_000:
        plain = f"{number:f}"
        return plain if "." in plain else plain + ".0"
    digits, _, exponent = f"{number:E}".partition("E")
    return f"{digits if '.' in digits else digits + '.0'}E{int(exponent)}"


def _timestamp(value: datetime) -> str:
    text = value.isoformat(timespec="milliseconds")
    return f'"{text.removesuffix("+00:00")}Z"' if text.endswith("+00:00") else f'"{text}"'
