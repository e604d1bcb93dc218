"""Records that a library decodes to Python objects, as rows: nothing is converted to another kind of value.

A value fits a field or it does not: an integer is none of another range, and no text; a number with a fraction is no integer.
What does not fit is null, the rest of the record stays, and the record is corrupt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types

from qewqew_spark.codecs import EMPTY, MISFIT, Decoded, texts
from qewqew_spark.codecs.columns import arrays, arrow_fields

Fit = Callable[[Any], Any]  # raises ValueError or TypeError for what does not fit, `Partial` if something in it does not


class Partial(Exception):
    """Something in a value does not fit; ``value`` is what is left of it."""

    def __init__(self, value: Any) -> None:
        super().__init__(MISFIT)
        self.value = value


class Unreadable(ValueError):
    """The bytes of a record are not what the codec decodes; the text is the reason."""


class ObjectCodec:
    """See `Codec`. ``load`` makes a dictionary of a record, or raises `Unreadable`; ``fits``: one for each field."""

    def __init__(self, fields: types.StructType, load: Callable[[bytes], dict[str, Any]], fits: Sequence[Fit]) -> None:
        self._fields = arrow_fields(fields)
        self._load = load
        self._fit = struct(fields.names, fits)

    def decode(self, values: pa.Array) -> Decoded:
        nothing: dict[str, Any] = dict.fromkeys(field.name for field in self._fields)
        rows, reasons = [], {}
        for number, data in enumerate(values.to_pylist()):
            row = nothing
            try:
                if not data:
                    raise Unreadable(EMPTY)
                row = self._fit(self._load(data))
            except Partial as partial:
                row, reasons[number] = partial.value, MISFIT
            except Unreadable as error:
                reasons[number] = str(error)
            rows.append(tuple(row.values()))
        return Decoded(arrays(rows, self._fields), None, reasons)


def refuse(value: Any) -> Any:
    raise TypeError(value)


def struct(names: Sequence[str], fits: Sequence[Fit]) -> Fit:
    """Of dictionaries: the named entries; one that is not there is null."""
    fields = list(zip(names, fits, strict=True))

    def fit(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(value)
        found, partly = dict.fromkeys(names), False
        for name, inner in fields:
            entry = value.get(name)
            if entry is not None:
                try:
                    found[name] = inner(entry)
                except Partial as partial:
                    found[name], partly = partial.value, True
                except (ValueError, TypeError):
                    partly = True
        if partly:
            raise Partial(found)
        return found

    return fit


def _all(fit: Fit, values: Sequence[Any]) -> tuple[list[Any], bool]:
    found, partly = [], False
    for value in values:
        try:
            found.append(None if value is None else fit(value))
        except Partial as partial:
            found.append(partial.value)
            partly = True
    return found, partly


def array(fit_element: Fit) -> Fit:
    def fit(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(value)
        found, partly = _all(fit_element, value)
        if partly:
            raise Partial(found)
        return found

    return fit


def mapping(fit_value: Fit) -> Fit:
    def fit(value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise TypeError(value)
        found, partly = _all(fit_value, list(value.values()))
        entries = list(zip(map(text, value), found, strict=True))
        if partly:
            raise Partial(entries)
        return entries

    return fit


def whole(bits: int) -> Fit:
    least, beyond = -(1 << bits - 1), 1 << bits - 1

    def fit(value: Any) -> int:
        if type(value) is not int:
            raise TypeError(value)
        if not least <= value < beyond:
            raise ValueError(value)
        return value

    return fit


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def double(value: Any) -> float:
    """A float, or an integer that a float holds exactly."""
    if type(value) is int and int(float(value)) == value:
        return float(value)
    if not isinstance(value, float):
        raise TypeError(value)
    return value


def single(value: Any) -> float:
    """As `double`; the nearest 32-bit float."""
    rounded = texts.to_float32(repr(double(value)))
    if math.isinf(rounded) and not math.isinf(value):
        raise ValueError(value)
    return rounded


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()  # halves of pairs are none
    return value


def binary(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(value)
    return value


def decimal(precision: int, scale: int) -> Fit:
    def fit(value: Any) -> Decimal:
        """An integer or a decimal number, which is not rounded."""
        if type(value) is not int and not isinstance(value, Decimal):
            raise TypeError(value)
        found = texts.fit_decimal(Decimal(value), precision, scale)
        if found != value:
            raise ValueError(value)
        return found

    return fit


SCALARS: dict[type[types.DataType], Fit] = {
    types.BooleanType: boolean,
    types.ByteType: whole(8),
    types.ShortType: whole(16),
    types.IntegerType: whole(32),
    types.LongType: whole(64),
    types.FloatType: single,
    types.DoubleType: double,
    types.StringType: text,
    types.BinaryType: binary,
}
