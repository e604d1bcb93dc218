"""The deferrable sensor in a real Airflow; its trigger runs in this process. Time-outs need a triggerer: see the system tests."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow_version import needs_state_store
from holding import Held

from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_core import Topic

WAIT = {"task_id": "wait", "deferrable": True, "poke_interval": 600, "timeout": 600}


class Deferring(QewQewSensor):
    """Tells when it is about to defer."""

    def __init__(self, *, then: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._then = then

    def defer(self, **kwargs: Any) -> Any:
        self._then()
        super().defer(**kwargs)


@pytest.mark.quick("the sensor defers, and returns the same")
@pytest.mark.parametrize("deferred", [True, False], ids=["comes later", "is there"])
def test_what_it_returns_is_the_same_whether_it_deferred_or_not(run: Any, held: Held, deferred: bool) -> None:
    held.put("x")
    with DAG(f"defer_{held.kind}_{deferred}", schedule=None) as dag:
        Deferring(**WAIT, **held.names, min_records=2, then=threading.Timer(0.5, held.put, ["y"]).start)
    if not deferred:
        held.put("y")
    ran = run(dag)
    assert ran.states() == {"wait": "success"}
    seen = ran.result("wait")
    assert (seen[held.kind], seen["ready"], seen["records"], seen["bytes"]) == ("orders", "at least 2 records", 2, 2)
    assert seen.keys() == {*held.names, "ready", "records", "bytes", "oldest", "returned", "leased"} - {"queue_name"} | {
        held.kind
    }


def test_the_filter_and_the_start_of_a_reader_hold(run: Any, directory: Path) -> None:
    with Topic(directory / "events") as topic:
        topic.append(b"before", tag="eu")

    def produce() -> None:
        with Topic(directory / "events") as topic:
            topic.append(b"1", tag="us")
            topic.append(b"2", tag="eu")

    with DAG("defer_filter", schedule=None) as dag:
        Deferring(**WAIT, topic="events", reader="eu", filter="eu", start="latest", then=threading.Timer(0.5, produce).start)
    assert run(dag).result("wait")["records"] == 1


@needs_state_store
def test_a_sensor_that_was_ready_does_not_wait_again_when_the_run_is_cleared(run: Any, held: Held) -> None:
    with DAG(f"defer_{held.kind}_cleared", schedule=None) as dag:

        @task
        def consume() -> None:
            held.taken()

        first = QewQewStageOperator(task_id="stage", **held.into, records=["a"])
        later = threading.Timer(0.5, held.put, ["b"])
        first >> Deferring(**WAIT, **held.names, min_records=2, then=later.start) >> consume()
    before = run(dag)
    cleared = run.again(dag, before)
    assert set(cleared.states().values()) == {"success"}
    assert cleared.result("wait") == before.result("wait")


@pytest.mark.parametrize(
    ("settings", "state"), [({}, "failed"), ({"soft_fail": True}, "failed"), ({"never_fail": True}, "skipped")]
)
@pytest.mark.parametrize("when", ["before", "deferred"])
def test_a_directory_that_is_gone_fails_the_task_at_once_and_by_name(
    run: Any, directory: Path, capfd: pytest.CaptureFixture[str], settings: dict[str, bool], state: str, when: str
) -> None:
    """As in the other modes, soft_fail is for time-outs."""
    with DAG(f"defer_{when}_{'_'.join(settings) or 'plain'}", schedule=None) as dag:
        Deferring(**WAIT, **settings, queue_name="sub/orders", then=(directory / "sub").rmdir)
    if when == "deferred":
        (directory / "sub").mkdir()
    assert run(dag).states() == {"wait": state}
    if state == "failed":
        said = capfd.readouterr().out
        assert "BadPath" in said
        assert "does not exist" in said


@pytest.mark.parametrize("soft", [False, True], ids=["plain", "soft_fail"])
def test_a_connection_that_goes_while_a_sensor_waits_fails_the_task_with_what_is_wrong(
    run: Any, directory: Path, connect: Any, capfd: pytest.CaptureFixture[str], soft: bool
) -> None:
    with DAG(f"defer_other_{soft}", schedule=None) as dag:
        other = partial(connect, "qewqew_default", "fs", str(directory))
        Deferring(**WAIT, soft_fail=soft, queue_name="orders", then=other)
    assert run(dag).states() == {"wait": "failed"}
    assert "is of type 'fs'; it must be of type 'qewqew'" in capfd.readouterr().out


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_threshold_above_the_queues_bound_fails_the_task_at_once(
    run: Any, directory: Path, connect: Any, capfd: pytest.CaptureFixture[str], deferrable: bool
) -> None:
    connect("qewqew_default", "qewqew", str(directory), max_records=10)
    with DAG(f"defer_never_{deferrable}", schedule=None) as dag:
        QewQewSensor(**{**WAIT, "deferrable": deferrable}, queue_name="orders", min_records=11)
    assert run(dag).states() == {"wait": "failed"}
    assert "min_records is 11 and could never be reached" in capfd.readouterr().out
