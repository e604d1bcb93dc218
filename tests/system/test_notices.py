"""The notifier in a real Airflow: what became of runs, and deadlines that were missed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core import Queue, inspect

DAGS = """
import time
from datetime import timedelta
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference, SyncCallback, task
from qewqew_airflow.notifications.qewqew import QewQewNotifier

tell = QewQewNotifier(queue_name="notices", extra={"of": "{{ dag.dag_id }}"})
late = {"reference": DeadlineReference.DAGRUN_QUEUED_AT, "interval": timedelta(seconds=1)}
told = {"queue_name": "notices", "extra": {"of": "{{ dag_run['dag_id'] }}"}}

for name, callback in ("in_the_triggerer", AsyncCallback), ("in_an_executor", SyncCallback):
    with DAG(name, schedule=None, is_paused_upon_creation=False, on_success_callback=tell,
             deadline=DeadlineAlert(**late, callback=callback(QewQewNotifier, told))):

        @task
        def slow():
            time.sleep(20)

        slow()

with DAG("breaks", schedule=None, is_paused_upon_creation=False, on_failure_callback=tell):

    @task
    def breaks():
        raise RuntimeError("no disk")

    breaks()
"""


@pytest.fixture
def airflow(
    tmp_path: Path, queues: Path, new_airflow: Callable[..., LocalAirflow], settings: Callable[..., dict[str, str]]
) -> Iterator[LocalAirflow]:
    (dags := tmp_path / "dags").mkdir()
    (dags / "notices.py").write_text(DAGS)
    with new_airflow(dags, **settings(queues, queues, "local[1]")) as running:
        yield running


def test_runs_and_missed_deadlines_are_told_once_each(airflow: LocalAirflow, queues: Path) -> None:
    runs = {name: airflow.trigger(name) for name in ("breaks", "in_the_triggerer", "in_an_executor")}
    assert {name: airflow.wait(run) for name, run in runs.items()} == {
        "breaks": "failed",
        "in_the_triggerer": "success",
        "in_an_executor": "success",
    }
    end = time.monotonic() + 120
    while inspect(queues / "notices").records < 5 and time.monotonic() < end:
        time.sleep(0.5)  # callbacks come after the run
    with Queue(queues / "notices") as queue:
        found = sorted((json.loads(record) for record in queue), key=lambda each: (each["dag_id"], "deadline" in each))
    for each in found:
        assert each.pop("at")
        assert each.pop("run_id") == runs[each["dag_id"]].run_id
        assert each.pop("of") == each["dag_id"]
    missed = [each.pop("deadline") for each in found if "deadline" in each]
    assert len(missed) == 2
    assert found == [
        {"dag_id": "breaks", "state": "failed", "reason": "task_failure"},
        {"dag_id": "in_an_executor", "state": "success", "reason": "success"},
        {"dag_id": "in_an_executor", "state": "running"},
        {"dag_id": "in_the_triggerer", "state": "success", "reason": "success"},
        {"dag_id": "in_the_triggerer", "state": "running"},
    ]
