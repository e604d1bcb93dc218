"""What tables cannot hold: in Iceberg and Delta times outside the years 1 to 9999, which most of their readers do not have.

Parquet holds them, and so Spark writes and reads them. Python, delta-rs and others fail at the whole table then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from qewqew_spark.tables.session import quoted

MISFIT = "a value does not fit a table"
_BOUNDS: dict[type[DataType], tuple[str, str]] = {
    DateType: ("DATE'0001-01-01'", "DATE'9999-12-31'"),
    TimestampType: ("timestamp_micros(-62135596800000000)", "timestamp_micros(253402300799999999)"),  # in UTC
    TimestampNTZType: ("TIMESTAMP_NTZ'0001-01-01 00:00:00'", "TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'"),
}


def beyond_years(value: Column, kind: DataType, at: str) -> Column | None:
    """Which time in the value is outside the years 1 to 9999, as a reason; null if none is. None: a type without times.

    ``at``: the name of the column.
    """
    match kind:
        case StructType():
            fields = (beyond_years(value[field.name], field.dataType, f"{at}.{field.name}") for field in kind)
            return first_of(fields)
        case ArrayType():
            return _of_elements(value, kind.elementType, f"{at}[]")
        case MapType():
            keys = _of_elements(F.map_keys(value), kind.keyType, f"{at}{{}}")
            return first_of([keys, _of_elements(F.map_values(value), kind.valueType, f"{at}{{}}")])
    if type(kind) not in _BOUNDS:
        return None
    least, greatest = map(F.expr, _BOUNDS[type(kind)])
    found = F.concat(F.lit(f"{MISFIT}: {at}: '"), value.cast("string"), F.lit("' is not in the years 1 to 9999"))
    return F.when((value < least) | (value > greatest), found)


def _of_elements(values: Column, kind: DataType, at: str) -> Column | None:
    if beyond_years(F.lit(None), kind, at) is None:
        return None

    def found(value: Column) -> Column:
        reason = beyond_years(value, kind, at)
        return F.lit(None) if reason is None else reason

    return F.get(F.filter(F.transform(values, found), lambda reason: reason.isNotNull()), F.lit(0))


def first_of(reasons: Iterable[Column | None]) -> Column | None:
    """The first reason that is not null; None if there can be none."""
    known = [reason for reason in reasons if reason is not None]
    return F.coalesce(*known) if known else None


def checked(name: str, kind: DataType) -> Column:
    """The column, or an error of Spark for a row that has a time outside the years 1 to 9999; see `misfit_in`."""
    value = F.col(quoted(name))
    reason = beyond_years(value, kind, name)
    return value if reason is None else F.when(reason.isNull(), value).otherwise(F.raise_error(reason))


def misfit_in(error: Exception) -> str | None:
    """The reason, if Spark failed at a value that is `checked`."""
    found = re.search(rf"{MISFIT}: (.*? is not in the years 1 to 9999)", str(error), re.DOTALL)
    return f"the column {found[1]}; leave such rows out. Nothing was added" if found else None
