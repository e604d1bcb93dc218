"""Columns of many values of JSON at once, where all of them are plainly of the type of their field."""

from __future__ import annotations

from collections.abc import Callable
from datetime import tzinfo
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from qewqew_spark.codecs.moments import dates, timestamps
from qewqew_spark.codecs.objects import Fit

# The values that Arrow is to store, with numbers as bytes. Raises ValueError or TypeError if that takes a closer look, and
# what the `Fit` of a type raises.
Many = Callable[[list[Any]], pa.Array]


def many_of(
    kind: types.DataType, arrow: pa.DataType, fit_of: Callable[[types.DataType], Fit], zone: tzinfo, from_texts: bool
) -> Many:
    """That for a type; ``fit_of``: what a value alone becomes; ``from_texts``: numbers and booleans may be texts."""
    if isinstance(kind, types.StructType) and len(kind):
        fields = [many_of(field.dataType, arrow.field(at).type, fit_of, zone, from_texts) for at, field in enumerate(kind)]
        return lambda values: _structs(values, arrow, kind.names, fields)
    if isinstance(kind, types.ArrayType):
        elements = many_of(kind.elementType, arrow.value_type, fit_of, zone, from_texts)
        return lambda values: _lists(values, arrow, elements)
    if isinstance(kind, types.MapType):
        items = many_of(kind.valueType, arrow.item_type, fit_of, zone, from_texts)
        return lambda values: _maps(values, arrow, items)
    if isinstance(kind, types.StringType) or (isinstance(kind, types.BooleanType) and not from_texts):
        return lambda values: pa.array(values, arrow)  # takes numbers, as bytes, for texts
    if isinstance(kind, types.IntegralType) and not from_texts:
        return lambda values: _numbers(values, arrow)
    if isinstance(kind, types.FloatType | types.DoubleType) and not from_texts:
        return lambda values: _floats(values, arrow)
    fit = fit_of(kind)
    if isinstance(kind, types.DateType | types.TimestampType | types.TimestampNTZType):
        return lambda values: _moments(values, arrow, fit, zone)
    return lambda values: pa.array([None if value is None else fit(value) for value in values], arrow)


def _require(values: list[Any], kind: type[Any]) -> None:
    if not set(map(type, values)) <= {kind, type(None)}:
        raise TypeError


def _structs(values: list[Any], arrow: pa.StructType, names: list[str], fields: list[Many]) -> pa.Array:
    _require(values, dict)
    columns = [
        field([None if value is None else value.get(name) for value in values]) for name, field in zip(names, fields, strict=True)
    ]
    return pa.StructArray.from_arrays(columns, fields=list(arrow), mask=pa.array([value is None for value in values], pa.bool_()))


def _lists(values: list[Any], arrow: pa.ListType, elements: Many) -> pa.Array:
    _require(values, list)
    inside = elements([*chain.from_iterable(value for value in values if value is not None)])
    return pa.ListArray.from_arrays(_bounds(values), inside, type=arrow)


def _maps(values: list[Any], arrow: pa.MapType, items: Many) -> pa.Array:
    _require(values, dict)
    there = [value for value in values if value is not None]
    keys = pa.array([*chain.from_iterable(there)], arrow.key_type)
    inside = items([*chain.from_iterable(map(dict.values, there))])
    return pa.MapArray.from_arrays(_bounds(values), keys, inside, type=arrow)


def _bounds(values: list[Any]) -> pa.Array:
    """Where the elements of each value start, and where the last one ends; null if there is no value."""
    begins = accumulate([0 if value is None else len(value) for value in values], initial=0)
    mask = np.array([*[value is None for value in values], False]) if None in values else None
    return pa.array(np.fromiter(begins, np.int32), mask=mask)


def _numbers(values: list[Any], arrow: pa.DataType) -> pa.Array:
    _require(values, bytes)
    return pa.array(values, pa.string()).cast(arrow)


def _floats(values: list[Any], arrow: pa.DataType) -> pa.Array:
    column = _numbers(values, arrow)
    numbers = np.asarray(column.fill_null(1))
    if not np.isfinite(numbers).all() or ((numbers == 0) & np.signbit(numbers)).any():
        raise ValueError  # as an integer, 0 has no sign
    return column


def _moments(values: list[Any], arrow: pa.DataType, fit: Fit, zone: tzinfo) -> pa.Array:
    """In plain ISO forms; the others each alone."""
    is_date = pa.types.is_date(arrow)
    plain = pa.array([value if type(value) is str else None for value in values], pa.string())
    column, _ = dates(plain) if is_date else timestamps(plain, zone if arrow.tz else None)
    if column.null_count == values.count(None):
        return column
    numbers = column.view(pa.int32() if is_date else pa.int64()).to_pylist()
    return pa.array(
        [fit(value) if number is None and value is not None else number for number, value in zip(numbers, values, strict=True)],
        arrow,
    )
