"""What the filters of a query let a read leave out: whole partitions, or messages at the ends of a topic."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceReader

from qewqew_spark.rows import Rows

# Spark has a worker of its own for asking a reader what it makes of filters, and starts it only if the configuration
# spark.sql.python.filterPushdown.enabled is on. Where that is off, which is the default, it refuses a reader that as much as has
# `pushFilters`. So ours have it in that worker alone. Should a later Spark name the worker otherwise, nothing is pushed, and
# nothing breaks.
ASKED = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules


class Range(NamedTuple):
    """The values that a column may have, both ends included; None: no end."""

    least: Any = None
    most: Any = None

    def meets(self, least: Any, most: Any) -> bool:
        """Whether some of the values ``least`` .. ``most`` (None: nothing known) are among them."""
        return (self.least is None or most is None or most >= self.least) and (
            self.most is None or least is None or least <= self.most
        )

    def and_(self, other: Range) -> Range:
        least = [end for end in (self.least, other.least) if end is not None]
        most = [end for end in (self.most, other.most) if end is not None]
        return Range(max(least, default=None), min(most, default=None))


ANY = Range()
Bounds = Mapping[str, Range]  # by column of the source


class PrunedReader(DataSourceReader):
    """A reader whose `partitions` need not have what lies outside of ``bounds``: Spark filters all rows again."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.bounds: Bounds = {}

    def may_hold(self, **columns: tuple[Any, Any]) -> bool:
        """Whether a row may be wanted whose columns are in these ranges (both ends included, None: nothing known)."""
        return all(self.bounds.get(name, ANY).meets(*ends) for name, ends in columns.items())

    if ASKED:

        def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
            self.bounds = bounds_of(filters, self.rows)
            return filters  # none is applied exactly


def bounds_of(filters: Iterable[Any], rows: Rows) -> dict[str, Range]:
    """The ranges that Spark's filters, all of which a row must pass, set to columns of the source."""
    bounds: dict[str, Range] = {}
    for one in filters:
        column = rows.source_column(getattr(one, "attribute", ()))
        found = range_of(type(one).__name__, getattr(one, "value", None))
        if column is not None and found is not None:
            bounds[column] = bounds.get(column, ANY).and_(found)
    return bounds


def range_of(kind: str, value: Any) -> Range | None:
    """The range of one filter, which may be too wide; None: no filter that has one."""
    if value is None or (kind == "In" and (not value or None in value)):
        return None
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return Range(value, value)
        case "GreaterThan" | "GreaterThanOrEqual":
            return Range(value, None)
        case "LessThan" | "LessThanOrEqual":
            return Range(None, value)
        case "In":
            return Range(min(value), max(value))
    return None
