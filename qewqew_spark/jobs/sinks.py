"""Which sink an output has."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.explaining import explain
from qewqew_spark.jobs.jdbc import Jdbc
from qewqew_spark.jobs.output import FILE_FORMATS, SHOWN_FORMATS, Output
from qewqew_spark.jobs.writing import Appended, Files, Once, Sink, Table
from qewqew_spark.tables.session import missing_format


def sink_of(spark: SparkSession, output: Output, batches: Sequence[Manifest], schema_evolution: str) -> Sink:
    """The place of an output; raises `BadArgument`, also if this Spark does not know the format."""
    kind = output.format.lower()
    if output.appends:
        return Once(spark, output, batches, schema_evolution)
    if len(batches) > 1:
        raise BadArgument(f"output: several batches go into a table of Iceberg or Delta, and not into {output.format!r}")
    if kind not in SHOWN_FORMATS | FILE_FORMATS | {"jdbc"} and (error := missing_format(spark, output.format)):
        # It would be found out only after other outputs were written.
        raise BadArgument(f"output: format {output.format!r}: {explain(error)}") from error
    if output.table is not None:
        made: type[Sink] = Table
    elif kind == "jdbc":
        made = Jdbc
    elif output.path is None:
        made = Appended
    else:
        made = Files
    return made(spark, output, batches[0].id, schema_evolution)
