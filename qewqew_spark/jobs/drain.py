"""The application that `spark-submit` runs: all batches under a prefix in, one commit of a table out.

::

    spark-submit .../qewqew_spark/jobs/drain.py PREFIX --output '{"table": "lake.shop.orders", "format": "iceberg"}' ...

The options are those of `batch.py`. Many hosts publish their batches under the prefix. What the table has is removed from there,
and nothing else is; so a batch is under the prefix, or in the table, or for a moment both. See docs/spark/drain.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import SparkSession

try:
    from qewqew_core.batch import published
    from qewqew_core.errors import BadArgument
    from qewqew_spark.jobs import batch
    from qewqew_spark.jobs.output import Output
    from qewqew_spark.jobs.records import Batches
    from qewqew_spark.options import Options, local_path
    from qewqew_spark.tables.append import append_to
except ModuleNotFoundError as error:
    sys.exit(
        f"qewqew: error: {error}; install qewqew (with its extra 'spark') into {sys.executable}, which runs Spark's Python, "
        "or give spark-submit its packages as a zip with --py-files"
    )


def drain(start: Callable[[], SparkSession], prefix: str, outputs: Sequence[Output], **options: Any) -> dict[str, Any]:
    """Append the batches that are complete under the prefix to the table, and remove them; returns the result.

    ``start`` gives a session that nobody else uses meanwhile; it is not called if there is no batch. ``outputs``: one, a table
    of Iceberg or Delta. ``options``: those of `batch.run`, which says what is raised. The result is that of `batch.run`, with
    ``batches``, and ``removed``: how many batches are no longer under the prefix, those included that an earlier run had
    committed.
    """
    if len(outputs) != 1 or not outputs[0].appends or outputs[0].route:
        raise BadArgument("a drain writes one output, a table of Iceberg or Delta, where one commit has all batches")
    prefix, store = local_path(prefix), Options(options.get("read_options") or {}).under("fs.")
    removed = 0
    while ids := published.complete(prefix, store):
        spark = start()

        def committed(ids: Sequence[str], spark: SparkSession = spark) -> list[str]:
            table = outputs[0]
            return [*append_to(spark, str(table.table or table.path), ids, table.format, table.commit).committed()]

        there = committed(ids)
        published.remove(prefix, there, store)
        removed += len(there)
        missing = sorted({*ids} - {*there})
        if not missing:
            break
        try:
            found = Batches([published.place(prefix, each) for each in missing], published.load(prefix, missing, store))
            result = batch.run_in(spark, found, outputs, **options)
        except Exception:
            if committed(missing):  # another drain was faster with some, and may have removed what was to be read
                continue
            raise
        published.remove(prefix, missing, store)
        return {**result, "batches": missing, "removed": removed + len(missing)}
    return {"batches": [], "read": 0, "removed": removed}


if __name__ == "__main__":
    # Spark's Python puts this directory first, where a user's transform module `batch` or `records` would be ours.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(batch.application(None, "drain", drain))
