"""What the stage operator reads: files, objects of a store, queries, frames, and what asynchronous functions give."""

from __future__ import annotations

import asyncio
import glob
import inspect
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO, cast

from qewqew_core import BadArgument
from qewqew_core.secrecy import hide
from qewqew_core.tools.reading import Reading, records_of
from qewqew_core.tools.rows import Row, plain, rows_of_arrow

FETCHED = 1000  # rows that are in memory at once
_logger = logging.getLogger(__name__)


def read_files(path: Any, conn_id: str | None, reading: Reading) -> Iterator[bytes | Row]:
    """The records of a file, or of several in the order of their names; see `records_of`.

    ``path``: a path on this machine, the URL of an object store, or an ObjectStoragePath. ``*`` in it stands for any characters
    but ``/``, and ``/`` at its end for all files there. Raises `FileNotFoundError` if there is none.
    """
    for each in _files(path, conn_id):
        name = str(each)
        reading.format_of(name)
        with _open(each) as file:
            yield from records_of(file, name, reading, lambda said, name=name: _logger.info("%s: %s", hide(name), said))  # type: ignore[misc]


def _files(path: Any, conn_id: str | None) -> list[Any]:
    name = str(path)
    pattern = f"{name}*" if name.endswith("/") else name
    found: Any = path
    if not isinstance(path, str) or "://" in name:
        from airflow.sdk import ObjectStoragePath  # with all of fsspec

        def at(url: str) -> Any:
            return ObjectStoragePath(url) if conn_id is None else ObjectStoragePath(url, conn_id=conn_id)

        if "*" not in pattern:
            return [at(name) if isinstance(path, str) else path]
        base, slash, _ = pattern[: pattern.index("*")].rpartition("/")
        above = at(base + slash) if isinstance(path, str) else type(path)(base + slash, conn_id=path.conn_id)
        found = [each for each in above.glob(pattern[len(base + slash) :]) if each.is_file()]
    elif "*" not in pattern or os.path.isfile(pattern):
        return [pattern]
    else:
        found = [each for each in glob.glob(glob.escape(pattern).replace("[*]", "*"), recursive=True) if os.path.isfile(each)]
    if name.endswith("/"):  # Spark's _SUCCESS, and what is hidden
        found = [each for each in found if not os.path.basename(str(each)).startswith(("_", "."))]
    if not found:
        raise FileNotFoundError(2, "No file is there. Nothing was stored", name)
    return sorted(found, key=str)


def _open(path: Any) -> BinaryIO:
    return cast(BinaryIO, open(path, "rb") if isinstance(path, str) else path.open("rb"))


def is_frame(value: Any) -> bool:
    """Whether it is a frame of pandas, polars, Arrow, DuckDB or Spark, or another thing that has columns."""
    return any(hasattr(value, name) for name in ("columns", "schema", "collect_schema"))


def rows_of_frame(frame: Any) -> Iterator[Row]:
    """The rows of a frame, with values as JSON has them. An index of pandas is a column if it has a name.

    Raises `BadArgument` if it cannot give its rows, `BadRecord` for values that JSON cannot have.
    """
    if hasattr(frame, "toLocalIterator"):  # Spark
        return (plain(row.asDict(recursive=True)) for row in frame.toLocalIterator())
    if hasattr(frame, "reset_index") and any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    if not hasattr(frame, "__arrow_c_stream__"):
        what = f"a {type(frame).__module__}.{type(frame).__name__} is not an iterable of records, and gives no stream of Arrow"
        raise BadArgument(f"{what}; collect it, or give its rows")
    import pyarrow as pa

    if hasattr(frame, "reset_index"):
        return rows_of_arrow(pa.Table.from_pandas(frame, preserve_index=False).to_batches())
    return rows_of_arrow(pa.RecordBatchReader.from_stream(frame))


def awaited(found: Any) -> Any:
    """What an asynchronous function returns or yields; anything else as it is."""
    if inspect.iscoroutine(found):
        return asyncio.run(found)
    return _yielded(found) if isinstance(found, AsyncIterator) else found


def _yielded(found: AsyncIterator[Any]) -> Iterator[Any]:
    async def following() -> Any:
        return await anext(found)

    with asyncio.Runner() as runner:
        while True:
            try:
                record = runner.run(following())
            except StopAsyncIteration:
                return
            yield record


def query(conn_id: str, sql: str, parameters: Any) -> Iterator[Row]:
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
