"""`commit="spark"`, as far as it goes without the jars of Iceberg and Delta: what is told, and what Delta's connector is given.

Iceberg's connector itself: see docs/spark/tables.md, "What was tested".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage
from spark_batches import make_batch

from qewqew_core import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once

pytestmark = pytest.mark.xdist_group("spark")


def job_with(session: Any, output: Output, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "batch", [b'{"id": 1}'])
    run(session, str(batch), [Output(str(tmp_path / "first")), output], quarantine=str(tmp_path / "aside"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"--conf spark\.sql\.catalog\.lake=.*SparkCatalog.*Iceberg's jar"),
        ({"": "org.apache.iceberg.spark.SparkCatalog"}, r"cannot make the catalog 'lake'.*Iceberg's jar for Spark 4"),
        ({"": "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"}, "'lake' is not Iceberg's"),
    ],
)
def test_what_iceberg_lacks_is_told(spark: Any, settings: dict[str, str], says: str, tmp_path: Path) -> None:
    session = spark.newSession()
    for name, value in settings.items():
        session.conf.set(f"spark.sql.catalog.lake{name}", value)
    with pytest.raises(BadArgument, match=says):
        append_once(session.range(3), "lake.shop.orders", "b-1", commit="spark")
    with pytest.raises(BadArgument, match=says):
        job_with(session, Output(table="lake.shop.orders", format="iceberg", commit="spark"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]  # nothing was written


def test_what_delta_lacks_is_told(spark: Any, tmp_path: Path) -> None:
    says = "needs Delta's connector, which this Spark does not have"
    with pytest.raises(BadArgument, match=says):
        append_once(spark.range(3), str(tmp_path / "orders"), "b-1", format="delta", commit="spark")
    with pytest.raises(BadArgument, match=says):
        job_with(spark, Output(str(tmp_path / "orders"), format="delta", commit="spark"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]  # nothing was written


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": "/lake/orders", "commit": "spark"}, "'commit' is for the formats delta and iceberg, not 'parquet'"),
        ({"table": "lake.shop.orders", "format": "iceberg", "commit": "jar"}, "'commit' must be one of driver, spark, not 'jar'"),
        ({"path": "/lake/orders", "format": "delta", "commit": None}, "'commit' must be one of driver, spark, not None"),
    ],
)
def test_an_output_says_who_commits(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        Output.from_fields(fields)


def test_a_commit_by_nobody_known_is_refused(spark: Any) -> None:
    with pytest.raises(BadArgument, match="commit must be one of driver, spark, not 'jar'"):
        append_once(spark.range(3), "lake.shop.orders", "b-1", commit="jar")


def stand_in() -> type[DataSource]:
    """A connector of Delta's name, which keeps what it is given."""

    class StandIn(DataSource):
        @classmethod
        def name(cls) -> str:
            return "delta"

        def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
            return Writer({**self.options, "overwrite": overwrite, "columns": schema.names})

    class Writer(DataSourceWriter):
        def __init__(self, given: dict[str, Any]) -> None:
            self.given = given

        def write(self, iterator: Any) -> WriterCommitMessage:
            return WriterCommitMessage()

        def commit(self, messages: Any) -> None:
            Path(self.given["path"]).write_text(json.dumps(self.given))

    return StandIn


def test_delta_is_given_a_transaction_for_each_batch(spark: Any, tmp_path: Path) -> None:
    session = spark.newSession()
    session.dataSource.register(stand_in())
    rows = session.createDataFrame([(1,)], "id BIGINT")  # which makes the session the active one, where writers look formats up
    for batch in "b-1", "b-2":
        properties = {"delta.appendOnly": "true"}
        append_once(rows, str(tmp_path / "orders"), batch, format="delta", commit="spark", properties=properties)
        given = {name.lower(): value for name, value in json.loads((tmp_path / "orders").read_text()).items()}
        assert (given["txnappid"], given["txnversion"], given["overwrite"]) == (f"qewqew:{batch}", "1", False)
        assert json.loads(given["usermetadata"])["qewqew.batch-id"] == batch
        assert (given["delta.appendonly"], given["columns"]) == ("true", ["id"])
    spark.createDataFrame([(1,)], "id BIGINT")
