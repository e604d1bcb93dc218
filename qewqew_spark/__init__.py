"""QewQew for Spark. `data_source` has the format `qewqew`, which joins `source` (reads) and `sink` (writes); `jobs.batch` is the
application that makes tables of a batch; `options`, which imports nothing of this package, is for all of them.

Importing this package costs nothing: Spark and Arrow are imported where they are used.
"""

import os
import shutil
import sys
import warnings


def _warn_of_another_python() -> None:
    """Spark's Python processes are the first ``python3`` on PATH, if nobody says otherwise, and not that of this environment.

    They would not find the format, and Spark would say DATA_SOURCE_NOT_FOUND.
    """
    found, main = shutil.which("python3") or "", getattr(sys.modules.get("__main__"), "__spec__", None)
    if (
        sys.prefix == sys.base_prefix
        or os.path.dirname(found) == os.path.dirname(sys.executable)
        or "PYSPARK_PYTHON" in os.environ
        or "airflow" in sys.modules  # its operator sets it
        or (main is not None and main.name.startswith("pyspark."))  # one of Spark's processes, which has found it
    ):
        return
    warnings.warn(
        f"PYSPARK_PYTHON is not set: Spark will run {found or 'no Python'} and not this one, {sys.executable}, and say "
        "DATA_SOURCE_NOT_FOUND if qewqew is not installed there. Before you make the session, set "
        "os.environ['PYSPARK_PYTHON'] = sys.executable",
        RuntimeWarning,
        stacklevel=3,
    )


_warn_of_another_python()
