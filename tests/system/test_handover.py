"""Lease, work and acknowledge as tasks of their own, in a real Airflow: a backfill, of which one task is killed, then a clear."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from postgres_airflow import MISSING, PostgresAirflow

from demo.local_airflow import LocalAirflow, Run
from qewqew_core import Queue, inspect

DAYS = 4
DAG = """
import os, signal, time
from datetime import datetime, timedelta, timezone
from airflow.sdk import DAG, task
from qewqew_airflow.operators.leases import QewQewAckOperator, QewQewLeaseOperator, QewQewNackOperator
from qewqew_core import inspect
from qewqew_core.batch import manifest, segments

START = datetime(2020, 11, 1, tzinfo=timezone.utc)
dates = {"start_date": START, "end_date": START + timedelta(days=3), "catchup": False}  # no runs but those of the backfill
with DAG("handover", schedule="@daily", **dates, is_paused_upon_creation=False, default_args={"retry_delay": timedelta(0)}):

    @task.qewqew(queue_name="handover")
    def stage(ds=None):
        return [f"{ds} {number}" for number in range(50)]

    lease = QewQewLeaseOperator(task_id="lease", queue_name="handover", max_records=50)

    @task(retries=2)
    def work(batch, ds=None, ti=None):
        queue = batch["manifest"].partition(".batches")[0]
        end = time.monotonic() + 60
        while inspect(queue).leased < 2 and ti.try_number == 1 and not os.path.exists(queue + "-seen"):
            if time.monotonic() > end:
                raise TimeoutError("no other run has leased")
            time.sleep(0.1)
        open(queue + "-seen", "w").close()
        if ds == "2020-11-02" and ti.try_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        body = manifest.load(batch["manifest"])
        directory = os.path.dirname(batch["manifest"])
        parts = (part for segment in body.segments for part in segments.read_records(directory, body, segment))
        return sorted(record.decode() for part in parts for record in part)

    worked = work(lease.output)
    stage() >> lease
    worked >> [QewQewAckOperator(task_id="ack", batch=lease.output), QewQewNackOperator(task_id="nack", batch=lease.output)]
"""


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queues")


@pytest.fixture(scope="module")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, queues: Path, settings: Callable[..., dict[str, str]]
) -> Iterator[PostgresAirflow]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; apt-get install postgresql")
    env = {**settings(queues, queues, "local[1]"), "AIRFLOW__CORE__EXECUTOR": "LocalExecutor"}
    with PostgresAirflow(tmp_path_factory.mktemp("airflow"), tmp_path_factory.mktemp("dags"), env) as running:
        yield running


def test_runs_of_a_backfill_have_each_their_batch_though_one_is_killed_and_clearing_takes_nothing_new(
    airflow: LocalAirflow, queues: Path
) -> None:
    (airflow.dags / "handover.py").write_text(DAG)
    runs = backfill(airflow, {"from_date": "2020-11-01T00:00:00Z", "to_date": f"2020-11-0{DAYS}T00:00:00Z"})
    assert [airflow.wait(run) for run in runs] == ["success"] * DAYS

    staged = sorted(f"2020-11-0{day} {number}" for day in range(1, DAYS + 1) for number in range(50))
    assert sorted(record for run in runs for record in airflow.xcom(run, "work")) == staged
    assert len({airflow.xcom(run, "lease")["batch_id"] for run in runs}) == DAYS
    tries = sorted(each.try_number for run in runs for each in airflow.task_instances(run) if each.task_id == "work")
    assert tries == [1, 1, 1, 2]
    assert counts(queues) == (0, 0, 0)

    with Queue(queues / "handover") as queue:
        queue.put_many([b"later"])
    before = airflow.xcom(runs[0], "work")
    airflow.clear(runs[0], "lease", downstream=True)
    assert airflow.wait(runs[0]) == "success"
    assert airflow.xcom(runs[0], "work") == before
    assert counts(queues) == (1, 0, 0)


def counts(queues: Path) -> tuple[int, int, int]:
    stats = inspect(queues / "handover")
    return stats.records, stats.leased, stats.returned


def backfill(airflow: LocalAirflow, dates: dict[str, str]) -> list[Run]:
    """The runs of a backfill, all at the same time, as soon as the DAG file was read."""
    deadline = time.monotonic() + 300
    while True:
        try:
            made = airflow._call("POST", "/api/v2/backfills", {"dag_id": "handover", "max_active_runs": DAYS, **dates})
            break
        except FileNotFoundError:
            airflow._check_imports()
            assert time.monotonic() < deadline
            time.sleep(0.5)
    found = airflow._call("GET", "/api/v2/dags/handover/dagRuns")["dag_runs"]
    runs = sorted(each["dag_run_id"] for each in found)
    assert len(runs) == DAYS, (made, runs)
    return [Run("handover", run) for run in runs]
