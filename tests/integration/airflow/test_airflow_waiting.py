"""The sensor in a real Airflow: both modes, its result, and what it does not wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow_version import needs_state_store
from holding import Held

from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_core import Message, Queue, Topic


@pytest.mark.quick("the sensor waits until enough was staged")
@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_the_sensor_waits_until_enough_was_staged_by_others(run: Any, held: Held, mode: str) -> None:
    def produce() -> None:
        for _ in range(3):
            time.sleep(0.3)
            held.put("x")

    with DAG(f"wait_{held.kind}_{mode}", schedule=None) as dag:
        QewQewSensor(task_id="wait", **held.names, min_records=3, mode=mode, poke_interval=0.2, timeout=300)
    producer = threading.Thread(target=produce)
    producer.start()
    ran = run(dag)
    producer.join()
    assert ran.states() == {"wait": "success"}
    seen = ran.result("wait")
    assert (seen[held.kind], seen["ready"], seen["records"], seen["bytes"]) == ("orders", "at least 3 records", 3, 3)


def test_the_sensor_does_not_take_the_lock(run: Any, held: Held) -> None:
    with DAG(f"wait_{held.kind}_locked", schedule=None) as dag:
        QewQewSensor(task_id="wait", **held.names, timeout=300)
    opened = Queue(held.path) if held.kind == "queue" else Topic(held.path)
    with opened:
        put = opened.put if isinstance(opened, Queue) else opened.append
        put(b"x")  # who appends to a topic has its lock from then on
        assert run(dag).states() == {"wait": "success"}
        put(b"y")


def test_a_threshold_may_be_the_result_of_another_task(run: Any, held: Held) -> None:
    with DAG(f"wait_{held.kind}_xcom", schedule=None) as dag:

        @task
        def expected() -> int:
            return 2

        stage = QewQewStageOperator.partial(task_id="stage", **held.into).expand(records=[["a"], ["b"]])
        wait = QewQewSensor(task_id="wait", **held.names, min_records=expected(), timeout=300)
        template = QewQewSensor(
            task_id="template",
            **held.names,
            min_records="{{ ti.xcom_pull(task_ids='stage', map_indexes=[0, 1]) | sum(attribute='records') }}",
            timeout=10,
        )
        stage >> [wait, template]
    ran = run(dag)
    assert set(ran.states().values()) == {"success"}
    assert ran.result("template")["ready"] == "at least 2 records"


@needs_state_store
def test_a_sensor_that_was_ready_does_not_wait_again_when_the_run_is_cleared(run: Any, held: Held) -> None:
    """Its records are in the run's batch by then, and not in the queue."""
    with DAG(f"wait_{held.kind}_cleared", schedule=None) as dag:

        @task
        def consume() -> None:
            held.taken()

        (
            QewQewStageOperator(task_id="stage", **held.into, records=["a", "b"])
            >> QewQewSensor(task_id="wait", **held.names, min_records=2, poke_interval=0.1, timeout=2)
            >> consume()
        )
    first = run(dag)
    cleared = run.again(dag, first)
    assert cleared.states() == {"stage": "success", "wait": "success", "consume": "success"}
    assert cleared.result("wait") == first.result("wait")
    # Another run has records of its own to wait for, and gets them.
    assert run(dag).states()["wait"] == "success"


def test_a_queue_that_stays_empty_times_out(run: Any, held: Held) -> None:
    with DAG(f"wait_{held.kind}_timeout", schedule=None) as dag:
        QewQewSensor(task_id="wait", **held.names, poke_interval=0.1, timeout=0.3)
    assert run(dag).states() == {"wait": "failed"}


@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_a_directory_that_does_not_exist_fails_the_task_at_once(
    run: Any, held: Held, connect: Any, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    connect("qewqew_default", "qewqew", str(held.directory / "missing"))
    with DAG(f"wait_{held.kind}_missing_{mode}", schedule=None) as dag:
        QewQewSensor(task_id="wait", **held.names, mode=mode, poke_interval=600, timeout=6000)
    start = time.monotonic()
    assert run(dag).states() == {"wait": "failed"}
    assert time.monotonic() - start < 120
    assert "does not exist on this worker" in capfd.readouterr().out


def test_the_sensor_waits_for_what_its_reader_is_to_get_and_for_nothing_else(run: Any, directory: Path) -> None:
    """The reader begins where the sensor found the topic: what comes while it waits is not left out by the Spark task."""
    with Topic(directory / "events") as topic:
        topic.append(b"before", tag="eu")
    names = {"topic": "events", "reader": "eu", "filter": "{{ params.of }}", "start": "latest"}
    with DAG("wait_reader", schedule=None, params={"of": "eu"}) as dag:
        QewQewSensor(task_id="wait", **names, min_records=2, poke_interval=0.1, timeout=300)

    def produce() -> None:
        while not (directory / "events" / "reader" / "eu.rdx").exists():
            time.sleep(0.01)
        with Topic(directory / "events") as topic:
            topic.append_many([Message(b"1", "us"), Message(b"2", "eu"), Message(b"3", "us")])
            topic.append(b"4", tag="eu")

    producer = threading.Thread(target=produce)
    producer.start()
    ran = run(dag)
    producer.join()
    seen = ran.result("wait")
    assert {name: seen[name] for name in ("topic", "reader", "ready", "records", "bytes")} == {
        "topic": "events",
        "reader": "eu",
        "ready": "at least 2 records",
        "records": 2,
        "bytes": 2,
    }
    with Topic(directory / "events") as topic, topic.reader("eu") as reader:
        assert [message.body for message in reader] == [b"2", b"4"]
