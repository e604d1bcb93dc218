"""One Spark for all tests of this directory: starting it takes longer than most of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

os.environ["PYSPARK_PYTHON"] = sys.executable  # else the workers take python3 from PATH
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture(scope="session")
def spark(tmp_path_factory) -> Iterator:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.python.authenticate.socketTimeout", "2m")  # Spark's 15 s are short for a busy machine
        # Else in the working directory, as is the log of the database that the sinks are tried with.
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.driver.extraJavaOptions", f"-Dderby.system.home={tmp_path_factory.mktemp('derby')}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")  # failures are provoked on purpose
    yield session
    session.stop()


@pytest.fixture(scope="session")
def _drivers(spark: Any) -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for driver in started:
        driver.end()


@pytest.fixture
def drivers(spark: Any, _drivers: list[Any]) -> list[Any]:
    """Eight. A test that kills one takes it out."""
    from other_driver import OtherDriver

    _drivers += [OtherDriver(spark) for _ in range(8 - len(_drivers))]
    return _drivers


@pytest.fixture
def lake(spark: Any, tmp_path: Path) -> Any:
    from spark_lake import Lake  # late: not every version of Spark is tried with tables

    return Lake(spark.newSession(), tmp_path)
