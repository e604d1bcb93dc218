"""What the stage operator reads (files, object stores, queries), and how a record becomes bytes."""

from __future__ import annotations

import base64
import csv
import io
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any, BinaryIO
from uuid import UUID

from qewqew_core import BadArgument, BadRecord
from qewqew_core.secrecy import hide

FETCHED = 1000  # rows that are in memory at once
_logger = logging.getLogger(__name__)


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


def open_file(path: Any, conn_id: str | None) -> BinaryIO:
    """Open a file: a path on this machine, the URL of an object store, or an ObjectStoragePath."""
    if isinstance(path, str) and "://" not in path:
        return open(path, "rb")
    from airflow.sdk import ObjectStoragePath  # with all of fsspec

    url: Any = ObjectStoragePath(path) if conn_id is None else ObjectStoragePath(path, conn_id=conn_id)
    opened: BinaryIO = url.open("rb")
    return opened


def lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The lines of a file as they are, without their line ends. Blank lines are left out."""
    blank = 0
    for number, line in enumerate(file):
        record = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        record = record.removesuffix(b"\n").removesuffix(b"\r")
        if record.strip():
            yield record
        else:
            blank += 1
    _say_blank(path, blank)


def rows(file: BinaryIO, path: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV file in UTF-8, by the names in its first line. Raises `BadRecord` if a row does not fit."""
    blank = 0
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    found = csv.reader(text, strict=True)
    try:
        names = next(found, [])
        if len(set(names)) < len(names):
            raise BadRecord("the first line has a column twice", path=path)
        for row in found:
            if len(row) == len(names):
                yield dict(zip(names, row, strict=True))
            elif row:
                raise BadRecord(
                    f"line {found.line_num} has {len(row)} fields, but the first line has {len(names)}. Nothing was stored",
                    path=path,
                )
            else:
                blank += 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadRecord(f"near line {found.line_num}: not CSV in UTF-8: {error}. Nothing was stored", path=path) from error
    _say_blank(path, blank)


def _say_blank(path: str, blank: int) -> None:
    if blank:
        _logger.warning("%s: %s blank lines were left out", hide(path), f"{blank:,}")


def query(conn_id: str, sql: str, parameters: Any) -> Iterator[dict[str, Any]]:
    """The rows of a query by the names of its columns, read through a cursor on the server where the database has one.

    Raises `BadArgument` if the connection is not a database, the statement returns no rows, or two columns have one name.
    """
    from airflow.sdk import BaseHook

    hook = BaseHook.get_hook(conn_id)
    if not hasattr(hook, "get_sqlalchemy_engine"):
        raise BadArgument(f"sql_conn_id {conn_id!r} is not a database: its hook, {type(hook).__name__}, is not a DbApiHook")
    engine = hook.get_sqlalchemy_engine()
    try:
        with engine.connect() as connection:
            result = connection.execution_options(yield_per=FETCHED).exec_driver_sql(sql, parameters)
            if not result.returns_rows:
                raise BadArgument("the sql returns no rows; give a query. Nothing was stored, or changed in the database")
            names = list(result.keys())
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise BadArgument(f"the query has two columns {twice[0]!r}; name one of them with AS")
            for row in result:
                yield dict(zip(names, map(plain, row), strict=True))
    finally:
        engine.dispose()


def plain(value: Any) -> Any:
    """A value of a database as JSON has it, so that Spark reads it back with its type: see docs/airflow/stage.md."""
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value
