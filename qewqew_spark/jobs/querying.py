"""What an output makes of the view: nothing, a query over it, or a function of the user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.jobs.explaining import blamed, explain
from qewqew_spark.jobs.output import BATCH, Output
from qewqew_spark.jobs.records import check_names
from qewqew_spark.tables.session import folding


class TransformFailed(BadArgument):
    """The function of a transform raised, which is its ``__cause__``. Nothing was written."""


def table_of(spark: SparkSession, output: Output, good: DataFrame, batches: Sequence[Manifest]) -> DataFrame:
    """What the output writes, analysed but not computed; raises `BadArgument`."""
    if output.transform is not None:
        table = _transformed(spark, output.transform, batches)
    elif output.sql is not None:
        with blamed(f"the query {excerpt(output.sql, 200)}"):
            # spark.sql would execute a command (INSERT, DROP ...) at once: only a query may pass.
            spark._jsparkSession.sessionState().sqlParser().parseQuery(output.sql)
            table = spark.sql(output.sql)
    else:
        table = good
    check_names(spark, table.columns, "an output has columns", "rename or drop one with 'sql'")
    fold = folding(spark)
    names = set(map(fold, table.columns))
    if output.place is not None and not output.appends and BATCH in names:
        # It would be hidden by the one that has the batch's id.
        raise BadArgument(
            "output: the column 'batch' collides with the column for the batch's id; rename it with 'sql': "
            "SELECT * EXCEPT (batch), batch AS other FROM batch"
        )
    columns = output.partition_columns
    check_names(spark, columns, "an output has columns in 'partition_by'", "name each once")
    for column in columns:
        if fold(column) not in names:
            raise BadArgument(f"output: no column {column!r} to partition by; the columns are {', '.join(table.columns)}")
    if output.format.lower() != "iceberg" and columns and len(columns) >= len(table.columns):
        raise BadArgument("output: 'partition_by' names every column, so none is left to write")
    return table


def has_rows(output: Output, table: DataFrame) -> bool:
    """Has the output a column left, beside those that are names of directories?"""
    return bool(table.columns if output.format.lower() == "iceberg" else set(table.columns) - set(output.partition_by))


def _transformed(spark: SparkSession, name: str, batches: Sequence[Manifest]) -> DataFrame:
    """What the function ``name``, `module:function`, makes of the view; raises `BadArgument` and `TransformFailed`."""
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function)
    except Exception as error:  # the module is the user's, and may raise whatever it likes
        raise TransformFailed(f"the transform {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    view, described = spark.table(BATCH), batches if len(batches) == 1 else []  # of several it is given the rows alone
    arguments = [view, *described]
    with suppress(TypeError):
        parameters.bind(view)
        arguments = [view]
    try:
        table = function(*arguments)
    except Exception as error:
        raise TransformFailed(f"the transform {name!r} failed: {type(error).__name__}: {explain(error)}") from error
    if not isinstance(table, DataFrame):
        raise BadArgument(f"the transform {name!r} must return a DataFrame, not {type(table).__name__}")
    return table
