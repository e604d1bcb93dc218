"""JSON objects through Python's own parser: some times faster than `jackson`, for records in which nothing is odd."""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable
from datetime import tzinfo
from typing import Any

from pyspark.sql import types

from qewqew_spark.codecs import jackson, texts

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a pair; Jackson does not take all of them
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")

Convert = Callable[[Any], Any]


class Odd(ValueError):
    """Nothing to be decided here."""


class _Whole(str):
    """The digits of an integer, as they stand."""


class _Fraction(str):
    """The digits of any other number."""


def _odd(_: object) -> Any:
    raise Odd


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _odd(pairs)


def _short(kind: type[str]) -> Callable[[str], str]:
    return lambda text: kind(text) if len(text) <= jackson.MAX_DIGITS else _odd(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_int=_short(_Whole), parse_float=_short(_Fraction), parse_constant=_odd
)


class PlainRecords:
    """Reads records for which Spark would give the same values, and no other."""

    def __init__(self, fields: types.StructType, zone: tzinfo) -> None:
        self._zone = zone
        self._fields = [(field.name, self._converter(field.dataType)) for field in fields]

    def read(self, data: bytes) -> list[Any] | None:
        """The values of the fields; None: the record has to be read more carefully."""
        if len(data) > jackson.MAX_NAME or data.count(b"[") + data.count(b"{") > jackson.MAX_DEPTH or _HALF.search(data):
            return None
        try:
            found = _DECODER.decode(data.decode())
            if type(found) is dict:
                return [convert(found.get(name)) for name, convert in self._fields]
        except (ValueError, RecursionError):  # a value that does not fit is one, too
            pass
        return None

    def _converter(self, kind: types.DataType) -> Convert:
        convert = self._of(kind)
        return lambda value: None if value is None else convert(value)

    def _of(self, kind: types.DataType) -> Convert:
        if isinstance(kind, types.StructType):
            return _struct([(field.name, self._converter(field.dataType)) for field in kind])
        if isinstance(kind, types.ArrayType):
            element = self._converter(kind.elementType)
            return lambda value: [element(each) for each in _a(list, value)]
        if isinstance(kind, types.MapType):
            item = self._converter(kind.valueType)
            return lambda value: [(key, item(each)) for key, each in _a(dict, value).items()]
        if isinstance(kind, types.DecimalType):
            return lambda value: texts.fit_decimal(texts.to_decimal(_number(value)), kind.precision, kind.scale)
        if isinstance(kind, types.TimestampType):
            return lambda value: texts.timestamp_micros(_a(str, value), self._zone)
        return _SCALARS[type(kind)]


def _a(kind: type, value: Any) -> Any:
    return value if type(value) is kind else _odd(value)


def _struct(fields: list[tuple[str, Convert]]) -> Convert:
    def convert(value: Any) -> dict[str, Any]:
        entries = _a(dict, value)
        return {name: convert_field(entries.get(name)) for name, convert_field in fields}

    return convert


def _number(value: Any) -> str:
    return value if isinstance(value, _Whole | _Fraction) else str(_odd(value))


def _whole(bits: int) -> Convert:
    least, beyond = -(1 << bits - 1), 1 << bits - 1

    def convert(value: Any) -> int:
        number = int(_a(_Whole, value))
        return number if least <= number < beyond else int(_odd(value))

    return convert


def _double(value: Any) -> float:
    # Of integers, -0 is 0.
    return float(int(value)) if type(value) is _Whole and len(value) < 20 else float(_a(_Fraction, value))


def _single(value: Any) -> float:
    return texts.to_float32(str(int(value)) if type(value) is _Whole and len(value) < 20 else _a(_Fraction, value))


def _string(value: Any) -> str:
    if type(value) is bool:
        return "true" if value else "false"
    return value if isinstance(value, str) else str(_odd(value))  # of an object or an array, the very text is wanted


def _binary(value: Any) -> bytes:
    return binascii.a2b_base64(value) if _BASE64.fullmatch(_a(str, value)) else bytes(_odd(value))


_SCALARS: dict[type[types.DataType], Convert] = {
    types.BooleanType: lambda value: _a(bool, value),
    types.ByteType: _whole(8),
    types.ShortType: _whole(16),
    types.IntegerType: _whole(32),
    types.LongType: _whole(64),
    types.FloatType: _single,
    types.DoubleType: _double,
    types.StringType: _string,
    types.BinaryType: _binary,
    types.DateType: lambda value: texts.date_days(_a(str, value)),
    types.TimestampNTZType: lambda value: texts.local_micros(_a(str, value)),
}
