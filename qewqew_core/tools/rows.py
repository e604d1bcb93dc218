"""Rows as records: of Parquet and Arrow, with values as JSON has them."""

from __future__ import annotations

import base64
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any, BinaryIO, cast
from uuid import UUID

from qewqew_core.errors import BadArgument, BadRecord

Row = dict[str, Any]  # by the names of the columns
_ROWS = 1000  # that are in memory at once


def encode(record: Any, number: int) -> bytes:
    """One record as bytes: bytes as they are, text as UTF-8, anything else as compact JSON.

    Raises `BadRecord`, which gives the record's ``number`` (from 0), for values that JSON does not have: dates, sets, NaN,
    keys that are not text.
    """
    try:
        if isinstance(record, (bytes, bytearray, memoryview)):
            return bytes(record)
        if isinstance(record, str):
            return record.encode()
        return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(
            f"record {number} ({type(record).__name__}) cannot be written as JSON: {error}; give bytes, text, "
            "or values that JSON has. Nothing was stored"
        ) from error


def needs(package: str, name: str) -> BadArgument:
    """What to raise if a package is missing that reads the file."""
    return BadArgument(f"to read this file, {package} is needed; install qewqew[files]", path=name)


def rows_of_parquet(file: BinaryIO, name: str) -> Iterator[Row]:
    """The rows of an open file. Raises `BadRecord`, `BadArgument` if pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise needs("pyarrow", name) from error
    try:
        source = file
        if not file.seekable():
            source = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  (it is gone when nobody has it)
            shutil.copyfileobj(file, source)
        for batch in pq.ParquetFile(source, coerce_int96_timestamp_unit="us").iter_batches(_ROWS):
            yield from rows_of_arrow([batch])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:  # it is the disk, or the store
            raise
        raise BadRecord(f"not Parquet that can be read: {_said(error)}. Nothing was stored", path=name) from error


def _said(error: Exception) -> str:
    return str(error).rstrip(".")


def rows_of_arrow(batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow's record batches. Raises `BadRecord` for values that JSON cannot have."""
    import pyarrow as pa

    for batch in batches:
        for at in range(0, len(batch), _ROWS):
            part = pa.Table.from_batches([batch.slice(at, _ROWS)])
            names = part.schema.names
            if len(set(names)) < len(names):
                raise BadRecord("two columns have one name. Nothing was stored")
            micros = pa.schema([field.with_type(_micros(field.type)) for field in part.schema])
            try:
                part = part.cast(micros)
            except pa.ArrowInvalid as error:
                raise BadRecord(f"a time has more digits than microseconds: {_said(error)}. Nothing was stored") from error
            try:
                values = part.to_pylist(maps_as_pydicts="strict")
            except (ArithmeticError, LookupError, ValueError) as error:  # a year that Python does not have, an unknown zone …
                raise BadRecord(f"a value cannot be read: {_said(error)}. Nothing was stored") from error
            for row in values:
                yield plain(row)


def _micros(kind: Any) -> Any:
    """Python's times have no nanoseconds."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_struct(kind):
        return pa.struct([field.with_type(_micros(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, _micros(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_micros(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_micros(kind.value_type))
    return pa.list_(_micros(kind.value_type)) if types.is_list(kind) else kind


def plain(value: Any) -> Any:
    """A value as JSON has it, so that Spark reads it back with its type: see docs/airflow/stage.md."""
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"  # as Spark reads and writes them
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(plain(name)): plain(each) for name, each in value.items()}
    return value
