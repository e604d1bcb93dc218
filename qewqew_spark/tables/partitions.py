"""How rows are parted so that a file has those of one partition of an Iceberg table, and partitions as Spark's DDL has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
    parse_transform,
)
from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as F

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.keys import bucket, truncated
from qewqew_spark.tables.session import quoted

PARTITION = "qewqew_partition"  # the column whose values are the directories
_HOUR, _DAY = 3_600_000_000, 86_400_000_000  # microseconds


def transform_of(text: str) -> tuple[str, Transform[Any, Any]]:
    """The column and the transform of a partition, written as in Spark's DDL: `day`, `month(ts)`, `truncate(4, name)`."""
    found = re.fullmatch(
        r"(?:(year|month|day|hour)s?\(\s*([^(),]+?)\s*\)|(truncate|bucket)\(\s*(\d+)\s*,\s*([^(),]+?)\s*\)|([^()]+))", text
    )
    if found is None:
        raise BadArgument(
            f"partition_by: write it like day, month(ts), truncate(4, name) or bucket(16, id), not {excerpt(text, 80)}"
        )
    unit, of_time, name, number, of_value, column = found.groups()
    if unit:
        return of_time, parse_transform(unit)
    if name and not int(number):
        raise BadArgument(f"partition_by: the number of {name} must be 1 or more, not 0")
    return (of_value, parse_transform(f"{name}[{number}]")) if name else (column, IdentityTransform())


def parted(rows: DataFrame, parts: Sequence[tuple[tuple[str, ...], Transform[Any, Any]]], what: str) -> DataFrame:
    """The rows with `PARTITION`: of equal text in rows of one partition, and short whatever the values are.

    ``parts``: the path to a column, and the transform. Raises `BadArgument` for one that is not known here.
    """
    keys = []
    for path, transform in parts:
        if not isinstance(transform, VoidTransform):  # which makes one partition of all
            key = F.hex(_key(rows, path, transform, what).cast("string").cast("binary"))
            keys.append(F.coalesce(F.concat(F.lit("="), key), F.lit("null")))
    return rows.withColumn(PARTITION, F.substring(F.sha2(F.concat_ws(",", *keys), 256), 1, 32))


def _key(rows: DataFrame, path: tuple[str, ...], transform: Transform[Any, Any], what: str) -> Column:
    """A value that is equal in rows of one partition and different in two, whatever the session's zone."""
    column = F.col(".".join(map(quoted, path)))
    kind = rows.select(column).schema[0].dataType
    moment = F.unix_micros(column) if isinstance(kind, types.TimestampType) else None
    match transform:
        case IdentityTransform():
            return moment if moment is not None else F.hex(column) if isinstance(kind, types.BinaryType) else column
        case TruncateTransform() if isinstance(kind, types.StringType):
            return F.substring(column, 1, transform.width)
        case TruncateTransform() if isinstance(kind, types.BinaryType):
            return F.hex(F.substring(column, 1, transform.width))
        case TruncateTransform() if isinstance(kind, types.DecimalType):
            return F.udf(truncated(transform.width), "string", useArrow=False)(column)
        case TruncateTransform():
            number = column.cast("decimal(20, 0)")
            return number - F.pmod(number, F.lit(transform.width))
        case BucketTransform():
            return F.udf(bucket(transform.num_buckets), "int", useArrow=False)(_hashed(column, kind))
        case HourTransform():
            # Others than a TIMESTAMP have no zone: 2026-01-31 23
            text = F.substring_index(column.cast("string"), ":", 1)
            return text if moment is None else moment - F.pmod(moment, F.lit(_HOUR))
        case YearTransform() | MonthTransform() | DayTransform():
            # A TIMESTAMP counts in UTC, others as they are written.
            date = column.cast("date")
            if moment is not None:
                days = ((moment - F.pmod(moment, F.lit(_DAY))) / _DAY).cast("int")
                date = F.date_add(F.lit("1970-01-01").cast("date"), days)
            unit = {YearTransform: "year", MonthTransform: "month", DayTransform: None}[type(transform)]
            return date if unit is None else F.trunc(date, unit)
    raise BadArgument(
        f"{what} is partitioned by {transform} of {'.'.join(path)}, which the driver cannot do; use month, day, truncate …, or "
        '"commit": "spark"'
    )


def _hashed(column: Column, kind: types.DataType) -> Column:
    """What `bucket` takes."""
    match kind:
        case types.DateType():
            return F.unix_date(column).cast("long")
        case types.TimestampType():
            return F.unix_micros(column)
        case types.TimestampNTZType():
            return F.unix_micros(F.concat(column.cast("string"), F.lit(" UTC")).cast("timestamp"))
    return column.cast("long") if isinstance(kind, types.IntegralType) else column
