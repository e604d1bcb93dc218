"""Columns of strings as dates and timestamps, many at once; strings that are not in a plain ISO form are left to `texts`."""

from __future__ import annotations

from datetime import UTC, tzinfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qewqew_spark.codecs.texts import utc_micros

Mask = npt.NDArray[np.bool_]
_DAY = "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"[ T](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
_DATE, _LOCAL = f"{_DAY}$", f"{_DAY}(?:{_TIME})?$"
_ZONED = f"{_DAY}{_TIME}(?:Z|[+-](?:0[0-9]|1[0-7]):[0-5][0-9])$"


def dates(column: pa.Array) -> tuple[pa.Array, Mask]:
    """Strings as dates, and which of them are left undone."""
    return _with_undone(column, _cast(column, _DATE, pa.date32()))


def timestamps(column: pa.Array, zone: tzinfo | None) -> tuple[pa.Array, Mask]:
    """Strings as timestamps, those without a zone in ``zone``, and which are left undone; None: timestamps without a zone."""
    if zone is None:
        return _with_undone(column, _cast(column, _LOCAL, pa.timestamp("us")))
    found = _cast(column, _ZONED, pa.timestamp("us", "UTC"))
    if found.null_count > column.null_count:
        local = _cast(column, _LOCAL, pa.timestamp("us")).view(pa.int64())
        if zone is not UTC:
            local = pa.array([None if micros is None else utc_micros(micros, zone) for micros in local.to_pylist()], pa.int64())
        found = pc.coalesce(found, local.view(found.type))
    return _with_undone(column, found)


def _cast(column: pa.Array, pattern: str, kind: pa.DataType) -> pa.Array:
    """What matches the pattern, as Arrow parses it; none if a month lacks a day."""
    fits = pc.match_substring_regex(column, pattern)
    texts = pc.if_else(fits, column, pa.scalar(None, column.type))
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        try:  # digits of a second behind the sixth are cut off
            return pc.replace_substring_regex(texts, r"(\.[0-9]{6})[0-9]+", r"\1").cast(kind)
        except pa.ArrowInvalid:
            return pa.nulls(len(column), kind)


def _with_undone(column: pa.Array, found: pa.Array) -> tuple[pa.Array, Mask]:
    return found, np.asarray(column.is_valid()) & np.asarray(found.is_null())
