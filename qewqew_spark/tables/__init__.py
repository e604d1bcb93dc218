"""Each batch once in a table of Iceberg or Delta: `append_once`. The job and code of one's own (`foreachBatch`) use the same.

May import nothing of this package. `iceberg` and `delta` need the extra of that name where the driver runs; executors need none.
"""

from qewqew_spark.tables.append import Append, Commit, append_once, append_to

__all__ = ["Append", "Commit", "append_once", "append_to"]
