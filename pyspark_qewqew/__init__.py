"""How Spark finds the format `qewqew`: it imports every top-level module named `pyspark_*` and takes its `DefaultSource`.

Spark imports *all* such modules when *any* Python data source is looked up, so this one must never
raise: where the source cannot be imported (a Spark before 4.0, say), the format is just not there.
`python -c "import qewqew_spark.data_source"` shows why.
"""

from contextlib import suppress

with suppress(Exception):
    from qewqew_spark.data_source import QewqewDataSource as DefaultSource  # noqa: F401
