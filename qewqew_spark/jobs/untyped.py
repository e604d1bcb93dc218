"""Fields of an inferred schema whose type no record tells: null wherever they are, or always an empty array.

In the view they are NULL, and arrays of NULL. Each output gives them the type that its table has, or leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StringType, StructField, StructType

from qewqew_spark.tables.evolution import Fold
from qewqew_spark.tables.session import conformed, quoted


def untyped(inferred: DataType, filled: DataType | None) -> DataType:
    """What Spark inferred, with `NullType` in place of the texts that no record has.

    ``filled``: what Spark infers of the fields that some record has (its option ``dropFieldIfAllNull``).
    """
    match inferred:
        case StructType():
            there = {field.name: field.dataType for field in filled} if isinstance(filled, StructType) else {}
            return StructType([StructField(each.name, untyped(each.dataType, there.get(each.name))) for each in inferred])
        case ArrayType():
            return ArrayType(untyped(inferred.elementType, filled.elementType if isinstance(filled, ArrayType) else None))
        case StringType() if filled is None:
            return NullType()
    return inferred


def settle(
    table: DataFrame, there: StructType | None, parts: Sequence[str], otherwise: DataType | None, fold: Fold
) -> tuple[DataFrame, list[str]]:
    """The table with the types of the columns ``there`` for what has none, and the fields that are left out.

    ``otherwise``: the type of what is not there; None: it is left out, unless the rows are parted by it.
    """
    kind, known = table.schema, {fold(field.name): field.dataType for field in there or ()}
    texts = {fold(name): StringType() for name in parts}
    columns = {
        field.name: settled(field.dataType, known.get(fold(field.name)), texts.get(fold(field.name), otherwise), fold)
        for field in kind
    }
    kept = StructType([StructField(name, each) for name, each in columns.items() if each is not None])
    made = [conformed(F.col(quoted(each.name)), kind[each.name].dataType, each.dataType, str).alias(each.name) for each in kept]
    return table.select(made), left_out(kind, kept)


def settled(kind: DataType, there: DataType | None, otherwise: DataType | None, fold: Fold) -> DataType | None:
    """The type with those of the table, ``there``, in place of `NullType`; else ``otherwise``. None: nothing is left."""
    match kind:
        case NullType():
            return there or otherwise
        case StructType():
            known = {fold(field.name): field.dataType for field in there} if isinstance(there, StructType) else {}
            found = ((each.name, settled(each.dataType, known.get(fold(each.name)), otherwise, fold)) for each in kind)
            fields = [StructField(name, each) for name, each in found if each is not None]
            return StructType(fields) if fields or not kind.fields else None
        case ArrayType():
            element = settled(kind.elementType, there.elementType if isinstance(there, ArrayType) else None, otherwise, fold)
            return None if element is None else ArrayType(element)
        case MapType():
            value = settled(kind.valueType, there.valueType if isinstance(there, MapType) else None, otherwise, fold)
            return None if value is None or isinstance(kind.keyType, NullType) else MapType(kind.keyType, value)
    return kind


def has_untyped(kind: DataType) -> bool:
    return any(isinstance(each, NullType) for _, each in _leaves(kind))


def left_out(kind: DataType, kept: DataType) -> list[str]:
    """The fields without a type that are not in ``kept``, like `a.b` and, in an array, `c[].d`."""
    known = dict(_leaves(kept))
    lost = [name for name, each in _leaves(kind) if isinstance(each, NullType) and not _under(name, known)]
    return [re.sub(r"(\[\])+$", "", name) for name in lost]


def _under(name: str, known: dict[str, DataType]) -> bool:
    """Is there the field, or what the table has in its place?"""
    return any(each == name or each.startswith((f"{name}.", f"{name}[", f"{name}{{")) for each in known)


def _leaves(kind: DataType, at: str = "") -> Iterator[tuple[str, DataType]]:
    match kind:
        case StructType():
            for field in kind:
                yield from _leaves(field.dataType, f"{at}.{field.name}" if at else field.name)
        case ArrayType():
            yield from _leaves(kind.elementType, f"{at}[]")
        case MapType():
            yield from _leaves(kind.keyType, f"{at}{{key}}")
            yield from _leaves(kind.valueType, f"{at}{{}}")
        case _:
            yield at, kind
