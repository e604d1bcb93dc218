"""What a Delta log says of a Parquet file, so that queries can skip it: rows, and of columns minima, maxima and nulls.

By the file's footer, without a look at its rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql.types import StructType

TEXT = 32  # characters of a bound
LAST = "\U0010ffff"  # no character is greater
Path = tuple[str, ...]


def statistics(footer: pq.FileMetaData, columns: StructType, most: int) -> dict[str, Any]:
    """As the ``stats`` of an `add` of the log. ``most``: of this many columns, in the order of the table; negative: of all."""
    paths = list(_leaves(columns))[: None if most < 0 else most]
    count = Counter(".".join(path) for path in paths)
    known = {name: path for path in paths if count[name := ".".join(path)] == 1}  # names may have dots
    found: dict[str, Any] = {"numRecords": footer.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for number in range(footer.num_columns):
        name = footer.schema.column(number).path
        if name not in known or footer.schema.column(number).max_repetition_level:  # of elements of lists there are no bounds
            continue
        groups = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        if not all(group is not None and group.has_null_count for group in groups):
            continue
        _put(found["nullCount"], known[name], sum(group.null_count for group in groups))
        groups = [group for group in groups if group.num_values]  # of a group of nulls there are no bounds
        if groups and all(group.has_min_max for group in groups):
            try:
                least, greatest = [group.min for group in groups], [group.max for group in groups]
            except (OverflowError, ValueError):  # a time that Python does not have
                continue
            bounds = {
                "minValues": _lower(min(least)),
                "maxValues": _upper(next((value for value in greatest if value != value), max(greatest))),  # NaN is the greatest
            }
            for kind, bound in bounds.items():
                if bound is not None:
                    _put(found[kind], known[name], bound)
    return found


def _leaves(columns: StructType, at: Path = ()) -> Iterator[Path]:
    for field in columns:
        if isinstance(field.dataType, StructType):
            yield from _leaves(field.dataType, (*at, field.name))
        else:
            yield *at, field.name


def _put(tree: dict[str, Any], path: Path, value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _lower(value: object) -> object:
    if value == 0 and isinstance(value, float):
        return -0.0  # equal to 0.0, but less if bits are compared
    return value[:TEXT] if isinstance(value, str) else _bound(value, timedelta(0))


def _upper(value: object) -> object:
    """A bound that no value of the file exceeds: a cut text gets a last character, moments are whole milliseconds."""
    if value == 0 and isinstance(value, float):
        return 0.0
    if isinstance(value, str) and len(value) > TEXT:
        return value[:TEXT] + LAST if value[TEXT] != LAST else None
    return value if isinstance(value, str) else _bound(value, timedelta(microseconds=999))


def _bound(value: object, more: timedelta) -> object:
    """As JSON has it; None where JSON has no such value."""
    match value:
        case datetime():
            try:
                text = (value + more).isoformat(" ", "milliseconds")
            except OverflowError:
                return None
            return text.replace(" ", "T").replace("+00:00", "Z") if value.tzinfo else text
        case date():
            return value.isoformat()
        case Decimal():
            return float(value) if Decimal(repr(float(value))) == value else None
        case float():
            return value if math.isfinite(value) else None
        case bool() | int():
            return value
    return None
