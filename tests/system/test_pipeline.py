"""The example DAG in a real Airflow with a real Spark: every flight of a year goes through the queue once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killing import nothing_left

from demo import flights
from demo.local_airflow import LocalAirflow, Run
from qewqew_core import Topic

FLIGHTS = 336_776


@pytest.fixture(scope="module")
def finished(airflow: LocalAirflow) -> Run:
    """A run that succeeded; each test leaves it so."""
    run = airflow.trigger(flights.DAG_ID)
    assert airflow.wait(run) == "success", flights.what_failed(airflow, run, {"any": airflow.task_instances(run)})
    return run


def compare_with_csv(output: Path) -> None:
    """Every row of the CSV file is in the table, each once, and the table of delays is what the CSV gives."""
    expected = flights.input_table()
    assert len(expected) == FLIGHTS
    flights.compare_rows(expected, flights.parquet_table(output / "flights", expected.column_names))
    flights.compare_delays(expected, flights.parquet_table(output / "delays", ["carrier", "flights", "mean_dep_delay"]))


def batch_ids(output: Path) -> list[list[str]]:
    """The names of what the job left in each of its two tables."""
    return [sorted(each.name for each in (output / table).glob("batch=*")) for table in ("flights", "delays")]


@pytest.mark.quick("a whole Airflow stages a year of flights, and Spark writes each of them once")
def test_every_flight_of_the_csv_is_in_the_parquet_once(airflow: LocalAirflow, finished: Run, queues: Path, output: Path) -> None:
    compare_with_csv(output)
    batch = airflow.xcom(finished, "to_parquet")
    assert (batch["records"], batch["read"], batch["good"], batch["bad"], batch["attempt"]) == (FLIGHTS, FLIGHTS, FLIGHTS, 0, 1)
    assert [each["written"] for each in batch["outputs"]] == [FLIGHTS, 16]
    assert airflow.xcom(finished, "check")["flights"] == FLIGHTS
    assert batch_ids(output) == [[f"batch={batch['batch_id']}"]] * 2
    nothing_left(queues / "flights", batch["batch_id"])


@pytest.mark.quick("twelve tasks of an Airflow stage into one queue at the same time")
def test_the_twelve_months_are_staged_at_the_same_time(airflow: LocalAirflow, finished: Run) -> None:
    stages = [each for each in airflow.task_instances(finished) if each.task_id == "stage"]
    assert [(each.state, each.try_number) for each in stages] == [("success", 1)] * 12
    assert sum(airflow.xcom(finished, "stage", map_index=month)["records"] for month in range(12)) == FLIGHTS
    times = [(each.start, 1) for each in stages if each.start] + [(each.end, -1) for each in stages if each.end]
    at_once, most = 0, 0
    for _, change in sorted(times):
        at_once += change
        most = max(most, at_once)
    assert most > 1  # how many at one moment, a busy machine decides


@pytest.mark.soak  # a minute; tests/integration/airflow/test_airflow_lease_and_submit.py shows it without a scheduler
def test_clearing_the_spark_task_processes_the_same_batch_again(
    airflow: LocalAirflow, finished: Run, queues: Path, output: Path
) -> None:
    before = airflow.xcom(finished, "to_parquet")
    airflow.clear(finished, "to_parquet", downstream=True)
    assert airflow.wait(finished) == "success"
    after = airflow.xcom(finished, "to_parquet")
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    assert "acknowledged before, now processed again" in airflow.task_log(finished, "to_parquet", 2)
    assert batch_ids(output) == [[f"batch={before['batch_id']}"]] * 2
    compare_with_csv(output)
    nothing_left(queues / "flights", before["batch_id"])


def test_clearing_a_stage_task_stages_nothing_more(airflow: LocalAirflow, finished: Run, queues: Path) -> None:
    before = airflow.xcom(finished, "stage", map_index=3)
    airflow.clear(finished, "stage", map_index=3)
    assert airflow.wait(finished) == "success"
    assert airflow.xcom(finished, "stage", map_index=3) == before | {"repeated": True, "stored": 0}
    assert "Stored nothing: an earlier try staged" in airflow.task_log(finished, "stage", 2, map_index=3)
    nothing_left(queues / "flights", airflow.xcom(finished, "to_parquet")["batch_id"])


@pytest.mark.soak  # a minute; test_topic_processes.py has the writers, test_events.py the runs
def test_a_topic_is_staged_by_three_tasks_at_once_and_consumed_by_two_dags_at_once(
    airflow: LocalAirflow, queues: Path, output: Path
) -> None:
    """Their sensors make the readers, and wait, before there is anything; the checks of the DAGs compare with the CSV file."""
    consumers = [airflow.trigger("flights_archive"), airflow.trigger("flights_from_jfk")]
    staging = airflow.trigger("flights_topic")
    for run in (staging, *consumers):
        assert airflow.wait(run) == "success", flights.what_failed(airflow, run, {"any": airflow.task_instances(run)})
    archive, jfk = consumers
    assert airflow.xcom(archive, "check") == {"flights": 80_090}
    assert sum(airflow.xcom(jfk, "check").values()) == 26_728
    with Topic(queues / "flights_topic") as topic:
        assert len(topic) == 80_090
        assert topic.stats().readers == {"archive": 0, "jfk": 0}
        assert topic.verify().ok


@pytest.mark.soak  # two minutes: an Airflow of its own
def test_the_demo_writes_an_iceberg_table_as_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.flights", "--dir", str(tmp_path / "demo"), "--table", "iceberg", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["figures"]["rows in the table"] == FLIGHTS
