"""Records that a library decodes to Python objects, as columns.

A value fits its field or it does not. If it does not fit, it becomes null, the rest of the record stays, and the record is
corrupt. No value is converted to another kind, unless a codec brings its own functions: an integer out of range does not fit,
nor does an integer fit a string, or a number with a fraction an integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from qewqew_spark.codecs import EMPTY, MISFIT, Decoded, texts
from qewqew_spark.codecs.columns import arrow_fields
from qewqew_spark.codecs.repeated import Object, Several
from qewqew_spark.codecs.unnamed import beyond, names_of, of_object

# Of a value that is not null, what Arrow is to store: dates are days, timestamps microseconds, structs dictionaries, maps pairs.
# Raises ValueError or TypeError for what does not fit, which is `Misfit` for what is nested.
Fit = Callable[[Any], Any]
SHOWN = 40  # characters of a value in a reason


class Misfit(ValueError):
    """A value does not fit. ``left``: what remains of the value that contains it; None: nothing."""

    def __init__(self, value: Any, kind: types.DataType, where: str = "", left: Any = None) -> None:
        self.value, self.kind, self.where, self.left = value, kind, where, left

    def within(self, where: str, left: Any) -> Misfit:
        return Misfit(self.value, self.kind, where + self.where, left)

    def __str__(self) -> str:
        nested = isinstance(self.kind, types.StructType | types.ArrayType | types.MapType)
        kind = self.kind.typeName() if nested else self.kind.simpleString()
        return f"{MISFIT}: {self.where}: {shown(self.value)} does not fit {kind.upper()}"


def shown(value: Any) -> str:
    """A value in few characters; ``bytes`` are, of JSON, the digits of a number."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = (
        repr(value[: SHOWN + 1])
        if isinstance(value, str)
        else value.decode("latin-1")
        if isinstance(value, bytes)
        else str(value)
    )
    return text if len(text) <= SHOWN + 2 else f"{text[:SHOWN]}…"


class Unreadable(ValueError):
    """The codec cannot decode the bytes of a record; the text is the reason."""


@dataclass(frozen=True)
class Column:
    """A field of the records."""

    name: str
    kind: types.DataType
    type: pa.DataType
    fit: Fit


def columns_of(fields: types.StructType, fits: Iterable[Fit]) -> list[Column]:
    """Raises `BadArgument` for fields that are not decoded."""
    listed = zip(fields, arrow_fields(fields), fits, strict=True)
    return [Column(field.name, field.dataType, arrow.type, fit) for field, arrow, fit in listed]


class ObjectCodec:
    """See `Codec`. ``load`` makes a dictionary of a record, or raises `Unreadable`; ``fits``: one for each field."""

    def __init__(self, fields: types.StructType, load: Callable[[bytes], dict[str, Any]], fits: Sequence[Fit]) -> None:
        self._columns = columns_of(fields, fits)
        self._load = load
        self._names = names_of(fields)

    def decode(self, values: pa.Array, unnamed: int | None = None) -> Decoded:
        rows: list[dict[str, Any]] = []
        reasons: dict[int, str] = {}
        for number, data in enumerate(values.to_pylist()):
            try:
                if not data:
                    raise Unreadable(EMPTY)
                rows.append(self._load(data))
            except Unreadable as error:
                rows.append({})
                reasons[number] = str(error)
        columns = []
        for column in self._columns:
            fitted, misfits = fit_all(column, [row.get(column.name) for row in rows])
            columns.append(pa.array(fitted, column.type))
            for number, misfit in misfits.items():
                reasons.setdefault(number, str(misfit))
        return Decoded(columns, np.arange(len(values)), reasons, *beyond(rows, self._names, reasons, unnamed, of_object))


def fit_all(column: Column, values: list[Any]) -> tuple[list[Any], dict[int, Misfit]]:
    """The values of a field as Arrow is to store them, and which of them did not fit."""
    fit = column.fit
    try:  # nearly always
        return [None if value is None else fit(value) for value in values], {}
    except (ValueError, TypeError):
        pass
    found: list[Any] = []
    misfits = {}
    for number, value in enumerate(values):
        left, misfit = fit_one(column.kind, fit, value, column.name)
        found.append(left)
        if misfit is not None:
            misfits[number] = misfit
    return found, misfits


def fit_one(kind: types.DataType, fit: Fit, value: Any, where: str) -> tuple[Any, Misfit | None]:
    """What Arrow is to store of a value, and why that is not all of it (None: it is)."""
    if value is None:
        return None, None
    try:
        return fit(value), None
    except Misfit as nested:
        return nested.left, nested.within(where, None)
    except (ValueError, TypeError):
        if not isinstance(value, Several):
            return None, Misfit(value, kind, where)
    left = first = None
    for each in value.values:
        found, misfit = fit_one(kind, fit, each, where)
        if misfit is None or found is not None:
            left = found
        first = first or misfit
    return left, first


def refuse(value: Any) -> Any:
    raise TypeError(value)


def fit_of(kind: types.DataType, where: str, leaf: Callable[[types.DataType, str], Fit]) -> Fit:
    """For the values of a type, with the codec's own ``leaf`` for those that hold no others; ``where`` names the field."""
    if isinstance(kind, types.StructType):
        return struct(kind, [fit_of(field.dataType, f"{where}.{field.name}", leaf) for field in kind])
    if isinstance(kind, types.ArrayType):
        return array(kind, fit_of(kind.elementType, f"{where}[]", leaf))
    if isinstance(kind, types.MapType):
        return mapping(kind, fit_of(kind.valueType, f"{where}{{}}", leaf))
    return leaf(kind, where)


def struct(kind: types.StructType, fits: Sequence[Fit]) -> Fit:
    """Of dictionaries: the named entries; one that is not there is null."""
    fields = [(field.name, field.dataType, fit) for field, fit in zip(kind, fits, strict=True)]

    def fit(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(value)
        found, first = {}, None
        for name, inner, fit_field in fields:
            found[name], misfit = fit_one(inner, fit_field, value.get(name), f".{name}")
            first = first or misfit
        if first is not None:
            raise first.within("", found)
        return found

    return fit


def array(kind: types.ArrayType, fit_element: Fit) -> Fit:
    """Of lists. If nothing is left of an element, nothing is left of the array."""

    def fit(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(value)
        return _each(kind.elementType, fit_element, value, "[{}]".format)

    return fit


def mapping(kind: types.MapType, fit_value: Fit) -> Fit:
    """For dictionaries with strings as keys; otherwise as `array`."""

    def fit(value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise TypeError(value)
        pairs = value.pairs if isinstance(value, Object) else value.items()
        keys = [key if type(key) is str else refuse(key) for key, _ in pairs]
        try:
            values = _each(kind.valueType, fit_value, [entry for _, entry in pairs], lambda at: f"[{keys[at]!r}]")
        except Misfit as misfit:
            left = None if misfit.left is None else list(zip(keys, misfit.left, strict=True))
            raise misfit.within("", left) from None
        return list(zip(keys, values, strict=True))

    return fit


def _each(kind: types.DataType, fit: Fit, values: list[Any], name: Callable[[int], str]) -> list[Any]:
    try:
        return [None if value is None else fit(value) for value in values]
    except (ValueError, TypeError):
        pass
    found, first = [], None
    for at, value in enumerate(values):
        left, misfit = fit_one(kind, fit, value, name(at))
        if misfit is not None and left is None:
            raise misfit
        found.append(left)
        first = first or misfit
    assert first is not None
    raise first.within("", found)


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
    value.encode()  # fails for half of a surrogate pair
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
