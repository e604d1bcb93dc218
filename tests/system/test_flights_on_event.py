"""The example of event-driven runs, with a real Spark: a run for each batch; what is too little for one is old enough soon."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from killing import counts, rows, until

from demo.local_airflow import LocalAirflow


@pytest.mark.soak  # a minute and a half; test_events.py shows such runs without Spark
def test_the_flights_of_a_month_start_two_runs(airflow: LocalAirflow, queues: Path, output: Path) -> None:
    by_hand = airflow.trigger("flights_on_event")
    assert airflow.wait(by_hand) == "success"
    assert [each.state for each in airflow.task_instances(by_hand)] == ["skipped"]  # nothing was there
    staging = airflow.trigger("flights_of_a_month", {"month": 1})
    assert airflow.wait(staging) == "success"
    assert airflow.xcom(staging, "stage")["records"] == 27_004

    table = output / "flights_on_event"
    until(lambda: len(list(table.glob("batch=*/_SUCCESS"))) == 2, "two batches are written", 150)
    until(lambda: counts(queues / "flights_on_event") == (0, 0, 0, 0), "both are acknowledged", 60)
    found = rows(table, "batch", "month")
    assert sorted(found.values()) == [7_004, 20_000]
    assert Counter(month for _, month in found) == {"1": 2}
