"""What tables cannot hold: nulls and long texts that a column does not take, and times outside the years 1 to 9999.

These are for Iceberg and Delta. Parquet holds such times, so Spark writes and reads them; Python, delta-rs and others then fail
at the whole table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Context, Decimal
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from qewqew_spark.tables.session import quoted

MISFIT = "a value does not fit a table"
NULL_KEY, NO_ORDER = "null, and it is one of the keys", "and no order_by says which is the last"
_REQUIRES = " requires a value"
_ENDS = (
    " is not in the years 1 to 9999",
    NULL_KEY,
    NO_ORDER,
    _REQUIRES,
    r" is too small for truncate\(\d+, …\)",
    "as Spark writes it",
)
_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"  # where Spark, for which it is a STRING, keeps the type of a table's column
_LEAST: dict[type[DataType], int] = {
    **dict.fromkeys((ByteType, ShortType, IntegerType), -(2**31)),  # which are INT there
    LongType: -(2**63),
}
_ESCAPED = r"""[\x00-\x1f"#%'*/:=?\\\x7f{\[\]^]"""  # what Spark writes as %XX in the name of a directory
_LONGEST_NAME = 255  # bytes; object stores take longer ones, most file systems do not
_NULL = "__HIVE_DEFAULT_PARTITION__"  # NULL as Spark writes it
_IN_NAME = f"of a directory: it is {_NULL}, has a zero byte, or more than {_LONGEST_NAME} bytes as Spark writes it"
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


def beyond_column(value: Column, name: str, column: StructField, table: str) -> Column | None:
    """Why the column of the table cannot hold a value of its type: it is null, or a text that is too long. None: it can."""
    reasons: list[Column | None] = []
    if not column.nullable:
        reasons.append(F.when(value.isNull(), F.lit(f"{MISFIT}: {name}: null, and {table}{_REQUIRES}")))
    # As Spark does, without spaces at the end.
    if found := re.fullmatch(r"(?:var)?char\((\d+)\)", column.metadata.get(_LENGTH, "")):
        text = F.concat(F.lit(f"{MISFIT}: {name}: '"), F.left(value, F.lit(80)), F.lit(f"' is longer than {found[0].upper()}"))
        reasons.append(F.when(F.char_length(F.rtrim(value)) > int(found[1]), text))
    return first_of(reasons)


def beyond_part(value: Column, kind: DataType, name: str, width: int | None) -> Column | None:
    """Why no partition can have the value: what `truncate` makes of it may be less than the type has, or it cannot be the name of
    a directory. None: one can.

    ``width``: of Iceberg's `truncate`; None: the directory of the partition is named by the value, `name=value`.
    """
    reason: Column | None = None
    if width is None:
        if isinstance(kind, StringType):
            escaped = F.octet_length(F.regexp_replace(value, _ESCAPED, "%00")) + len(name.encode()) + 1
            said = F.concat(F.lit(f"{MISFIT}: {name}: '"), F.left(value, F.lit(80)), F.lit(f"' cannot be the name {_IN_NAME}"))
            reason = F.when((escaped > _LONGEST_NAME) | F.contains(value, F.lit("\0")) | (value == _NULL), said)
    elif type(kind) in _LEAST or isinstance(kind, DecimalType):
        digits, scale = (kind.precision, kind.scale) if isinstance(kind, DecimalType) else (0, 0)
        most = -_LEAST.get(type(kind), 1 - 10**digits) // width  # what `truncate` makes is a multiple of the width
        least = Decimal(-most * width).scaleb(-scale, Context(prec=40))
        shown = F.concat(F.lit(f"{MISFIT}: {name}: "), value.cast("string"), F.lit(f" is too small for truncate({width}, …)"))
        reason = F.when(value < F.lit(str(least)).cast(f"decimal(38, {scale})"), shown)
    return reason


def first_of(reasons: Iterable[Column | None]) -> Column | None:
    """The first reason that is not null; None if there can be none."""
    known = [reason for reason in reasons if reason is not None]
    return F.coalesce(*known) if known else None


def checked(name: str, kind: DataType, parts: Mapping[str, int | None]) -> Column:
    """The column, or an error of Spark for a row with a time outside the years 1 to 9999, or no partition; see `misfit_in`.

    ``parts``: the columns by whose values rows are parted, and the widths of `beyond_part`.
    """
    value = F.col(quoted(name))
    reasons = [beyond_years(value, kind, name), beyond_part(value, kind, name, parts[name]) if name in parts else None]
    reason = first_of(reasons)
    return value if reason is None else F.when(reason.isNull(), value).otherwise(F.raise_error(reason))


def present(spark: SparkSession, value: Column, name: str, table: str) -> Column:
    """The value as one that Spark knows is not null: at a null it fails, see `misfit_in`."""
    jvm: Any = spark.sparkContext._jvm
    found: Any = F.when(value.isNull(), refusal(F.lit(f"{name}: null, and {table}{_REQUIRES}"))).otherwise(value)
    expressions, known = jvm.org.apache.spark.sql.classic.ExpressionUtils, jvm.org.apache.spark.sql.catalyst.expressions.objects
    nowhere = jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.ArrayList()).toSeq()
    made: Column = type(found)(expressions.column(known.AssertNotNull(expressions.expression(found._jc), nowhere)))
    return made


def refusal(reason: Column) -> Column:
    """An error of Spark with the reason, which begins with the column's name and ends as one in `_ENDS`; see `misfit_in`."""
    return F.raise_error(F.concat(F.lit(f"{MISFIT}: "), reason))


def misfit_in(error: Exception) -> str | None:
    """The reason, if Spark failed at a value that is `checked`, or with a `refusal`."""
    found = re.search(rf"{MISFIT}: (.*?(?:{'|'.join(_ENDS)}))", str(error), re.DOTALL)
    return f"the column {found[1]}; leave such rows out. Nothing was added" if found else None
