"""What another try would meet again fails a task at its first try, whatever its retries; what may pass is tried again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from qewqew_airflow.operators.leases import QewQewLeaseOperator
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_core import Queue

TRIED_AGAIN = {"retries": 2, "retry_delay": timedelta(0)}
OUTPUTS = [{"path": "/nowhere/orders"}]
TASKS: dict[str, Callable[..., Any]] = {
    "stage": lambda **names: QewQewStageOperator(task_id="t", records=["a"], **names),
    "lease": lambda **names: QewQewLeaseOperator(task_id="t", **names),
    "wait": lambda **names: QewQewSensor(task_id="t", mode="poke", **names),
    "submit": lambda **names: QewQewSparkSubmitOperator(task_id="t", outputs=OUTPUTS, **names),
}


def tries(run: Any, dag_id: str, make: Callable[..., Any], **names: str) -> int:
    with DAG(f"hopeless_{dag_id}", schedule=None, default_args=TRIED_AGAIN) as dag:
        make(**names or {"queue_name": "orders"})
    ran = run(dag)
    assert ran.states() == {"t": "failed"}
    return int(ran.tries("t"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("fault", ["another host", "another type", "a name that leads out", "an unknown extra"])
def test_a_task_that_cannot_succeed_is_tried_once(run: Any, directory: Path, connect: Any, task: str, fault: str) -> None:
    connect("spark_default", "spark", "local[1]")
    match fault:
        case "another host":
            connect("qewqew_default", "qewqew", str(directory), hostname="elsewhere")
        case "another type":
            connect("qewqew_default", "fs", str(directory))
        case "an unknown extra":
            connect("qewqew_default", "qewqew", str(directory), snyc="never")
    name = "{{ '../evil' }}" if fault == "a name that leads out" else "orders"
    assert tries(run, f"{task}_{fault.replace(' ', '_')}", TASKS[task], queue_name=name) == 1


def test_a_record_that_is_too_large_is_tried_once(run: Any, directory: Path) -> None:
    assert tries(run, "large", lambda **names: QewQewStageOperator(task_id="t", records=["x" * 70_000], **names)) == 1


def test_a_threshold_that_a_queue_cannot_reach_is_tried_once(run: Any, directory: Path, connect: Any) -> None:
    connect("qewqew_default", "qewqew", str(directory), max_records=5)
    assert tries(run, "threshold", lambda **names: QewQewSensor(task_id="t", min_records=10, **names)) == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_directory_that_is_missing_is_looked_for_again(run: Any, directory: Path, connect: Any, task: str) -> None:
    """Its mount may be away for a minute."""
    connect("spark_default", "spark", "local[1]")
    connect("qewqew_default", "qewqew", str(directory / "missing"))
    assert tries(run, f"missing_{task}", TASKS[task]) == 3


def test_a_full_queue_is_tried_again(run: Any, directory: Path, connect: Any) -> None:
    """Somebody may lease what is there meanwhile."""
    connect("qewqew_default", "qewqew", str(directory), max_records=1)
    with Queue(directory / "orders") as queue:
        queue.put(b"x")
    assert tries(run, "full", TASKS["stage"]) == 3


def test_a_schema_with_a_typing_error_is_an_error_of_the_dag_file() -> None:
    from qewqew_core import BadArgument

    with pytest.raises(BadArgument, match="at 'NOT A TYPE': a column and one of"):
        QewQewSparkSubmitOperator(task_id="t", queue_name="orders", outputs=OUTPUTS, schema="a STRING NOT A TYPE")
    QewQewSparkSubmitOperator(task_id="t", queue_name="orders", outputs=OUTPUTS, schema="id BIGINT NOT NULL")
