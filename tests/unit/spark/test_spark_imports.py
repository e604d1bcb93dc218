"""What may be imported where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_importing_the_package_is_cheap():
    assert python("import sys, qewqew_spark; print([m for m in ('pyspark', 'pyarrow', 'pandas') if m in sys.modules])") == "[]"


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="not in a virtual environment")
@pytest.mark.parametrize(
    ("code", "environment", "warned"),
    [
        ("import qewqew_spark", {"PATH": os.defpath}, True),
        ("import qewqew_spark.data_source", {"PATH": os.defpath}, True),
        ("import qewqew_spark", {"PATH": os.path.dirname(sys.executable)}, False),  # the environment is active
        ("import qewqew_spark", {"PATH": os.defpath, "PYSPARK_PYTHON": "python3"}, False),
    ],
)
def test_importing_the_package_warns_where_spark_would_run_another_python(code, environment, warned):
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"} | environment
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert ("DATA_SOURCE_NOT_FOUND" in done.stderr) == warned


def test_importing_the_source_needs_neither_arrow_nor_numpy():
    """Spark imports it whenever any data source is looked up. pyspark 4.0 itself imports numpy."""
    code = "import sys, pyspark; theirs = {*sys.modules}; import qewqew_spark.data_source; print(*{*sys.modules} - theirs)"
    assert not {"pyarrow", "numpy"} & set(python(code).split())


def test_neither_the_source_nor_the_job_imports_airflow_or_pandas():
    code = "import sys, qewqew_spark.jobs.batch; print([m for m in ('airflow', 'pandas') if m in sys.modules])"
    assert python(code) == "[]"


def test_spark_finds_the_source_by_its_module():
    assert python("import pyspark_qewqew as m; print(m.DefaultSource.name())") == "qewqew"


def test_the_module_that_spark_looks_for_never_raises():
    code = (
        "import sys; sys.modules['pyspark.sql.datasource'] = None; import pyspark_qewqew as m; print(hasattr(m, 'DefaultSource'))"
    )
    assert python(code) == "False"
