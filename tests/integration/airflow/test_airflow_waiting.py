"""The sensor in a real Airflow: both modes, its result, and what it does not wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task

from qewqew_airflow.operators import QewQewStageOperator
from qewqew_airflow.sensors import QewQewSensor
from qewqew_core import Queue


@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_the_sensor_waits_until_enough_was_staged_by_others(run: Any, directory: Path, mode: str) -> None:
    def produce() -> None:
        for _ in range(3):
            time.sleep(0.3)
            with Queue(directory / "orders") as queue:
                queue.put(b"x")

    with DAG(f"wait_{mode}", schedule=None) as dag:
        QewQewSensor(task_id="wait", queue_name="orders", min_records=3, mode=mode, poke_interval=0.2, timeout=60)
    producer = threading.Thread(target=produce)
    producer.start()
    ran = run(dag)
    producer.join()
    assert ran.states() == {"wait": "success"}
    seen = ran.result("wait")
    assert (seen["queue"], seen["ready"], seen["records"], seen["bytes"]) == ("orders", "at least 3 records", 3, 3)


def test_the_sensor_does_not_take_the_lock(run: Any, directory: Path) -> None:
    with DAG("wait_locked", schedule=None) as dag:
        QewQewSensor(task_id="wait", queue_name="orders", timeout=10)
    with Queue(directory / "orders") as queue:
        queue.put(b"x")
        assert run(dag).states() == {"wait": "success"}
        queue.put(b"y")


def test_a_threshold_may_be_the_result_of_another_task(run: Any, directory: Path) -> None:
    with DAG("wait_xcom", schedule=None) as dag:

        @task
        def expected() -> int:
            return 2

        stage = QewQewStageOperator.partial(task_id="stage", queue_name="orders").expand(records=[["a"], ["b"]])
        wait = QewQewSensor(task_id="wait", queue_name="orders", min_records=expected(), timeout=10)
        template = QewQewSensor(
            task_id="template",
            queue_name="orders",
            min_records="{{ ti.xcom_pull(task_ids='stage', map_indexes=[0, 1]) | sum(attribute='records') }}",
            timeout=10,
        )
        stage >> [wait, template]
    ran = run(dag)
    assert set(ran.states().values()) == {"success"}
    assert ran.result("template")["ready"] == "at least 2 records"


def test_a_sensor_that_was_ready_does_not_wait_again_when_the_run_is_cleared(run: Any, directory: Path) -> None:
    """Its records are in the run's batch by then, and not in the queue."""
    with DAG("wait_cleared", schedule=None) as dag:

        @task
        def consume() -> None:
            with Queue(directory / "orders") as queue:
                queue.get_many(10)

        (
            QewQewStageOperator(task_id="stage", queue_name="orders", records=["a", "b"])
            >> QewQewSensor(task_id="wait", queue_name="orders", min_records=2, poke_interval=0.1, timeout=2)
            >> consume()
        )
    first = run(dag)
    cleared = run.again(dag, first)
    assert cleared.states() == {"stage": "success", "wait": "success", "consume": "success"}
    assert cleared.result("wait") == first.result("wait")
    # Another run has records of its own to wait for, and gets them.
    assert run(dag).states()["wait"] == "success"


def test_a_queue_that_stays_empty_times_out(run: Any, directory: Path) -> None:
    with DAG("wait_timeout", schedule=None) as dag:
        QewQewSensor(task_id="wait", queue_name="orders", poke_interval=0.1, timeout=0.3)
    assert run(dag).states() == {"wait": "failed"}


@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_a_directory_that_does_not_exist_fails_the_task_at_once(
    run: Any, directory: Path, connect: Any, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    connect("qewqew_default", "qewqew", str(directory / "missing"))
    with DAG(f"wait_missing_{mode}", schedule=None) as dag:
        QewQewSensor(task_id="wait", queue_name="orders", mode=mode, poke_interval=60, timeout=600)
    start = time.monotonic()
    assert run(dag).states() == {"wait": "failed"}
    assert time.monotonic() - start < 20
    assert "does not exist on this worker" in capfd.readouterr().out
