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
    from qewqew_spark.jobs import batch
    from qewqew_spark.jobs.explaining import is_damage
    from qewqew_spark.jobs.output import Output, check_drained
    from qewqew_spark.jobs.records import Batches, damaged_of
    from qewqew_spark.options import Options, local_path
    from qewqew_spark.tables.append import append_to
except ModuleNotFoundError as error:
    sys.exit(
        f"qewqew: error: {error}; install qewqew (with its extra 'spark') into {sys.executable}, which runs Spark's Python, "
        "or give spark-submit its packages as a zip with --py-files"
    )


MOST = 10_000  # batches of one commit: the driver has all their manifests, and the table keeps all their ids


def drain(start: Callable[[], SparkSession], prefix: str, outputs: Sequence[Output], **options: Any) -> dict[str, Any]:
    """Append the batches that are complete under the prefix to the table, and remove them; returns the result.

    ``start`` gives a session that nobody else uses meanwhile; it is not called if there is no batch. ``outputs``: one, a table
    of Iceberg or Delta. ``options``: those of `batch.run`, which says what is raised. The result is that of `batch.run`, with
    ``batches``; with ``removed``: how many batches are no longer under the prefix, those included that an earlier run had
    committed; with ``left``: how many wait for the next drain, as one commits 10,000 at most; and with ``damaged``: the ids of
    batches that stay as they are, because their bytes are not those that were written, each with the reason.
    """
    check_drained(outputs)
    given = options.get("read_options") or {}
    prefix, store = local_path(prefix), Options(given).under("fs.")
    removed, damaged = 0, dict[str, str]()
    while listed := {each: files for each, files in published.listed(prefix, store).items() if each not in damaged}:
        spark = start()

        def committed(ids: Sequence[str], spark: SparkSession = spark) -> list[str]:
            table = outputs[0]
            return [*append_to(spark, str(table.table or table.path), ids, table.format, table.commit).committed()]

        there = {*committed([*listed])}
        published.remove(prefix, there, store)
        removed += len(there)
        missing = [each for each in listed if each not in there]
        if not missing:
            break
        now = missing[:MOST]
        result, bad = None, dict[str, str]()
        try:
            bodies, bad = published.sound(prefix, {each: listed[each] for each in now}, store)
            found = Batches([published.place(prefix, body.id) for body in bodies], bodies)
            if bodies:
                result = batch.run_in(spark, found, outputs, **options)
        except Exception as error:
            more = damaged_of(spark, found, given) if is_damage(error) else {}
            # Another drain may have been faster with some, and may have removed what was to be read.
            if not more and not committed(now):
                raise
            bad |= more
        if bad:
            stay = {*published.complete(prefix, store)}.difference(committed([*bad]))
            for each in sorted(stay.intersection(bad)):
                damaged[each] = bad[each]
                print(f"qewqew: the batch {each} is damaged and left out: {bad[each]}", file=sys.stderr, flush=True)
        if result is not None:
            published.remove(prefix, found.ids, store)
            counts = {"removed": removed + len(found.ids), "left": len(missing) - len(now), "damaged": damaged}
            return {**result, "batches": found.ids, **counts}
    return {"batches": [], "read": 0, "removed": removed, "left": 0, "damaged": damaged}


if __name__ == "__main__":
    # Spark's Python puts this directory first, where a user's transform module `batch` or `records` would be ours.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(batch.application(None, "drain", drain))
