"""Event-driven runs and the deferrable sensor in a real Airflow with two triggerers, on PostgreSQL, of which parts are killed.

What is asserted of the runs: each record is in the batch of exactly one, and there is one for each batch. More are allowed
only where two triggerers have announced the same, because the one was killed. Such a run finds nothing, and is skipped.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import until
from postgres_airflow import MISSING, PostgresAirflow

from demo.local_airflow import COMPONENTS, Run
from qewqew_core import Queue, Topic, inspect, inspect_reader

DAGS = """
import json
import os
import time
from datetime import timedelta
from pathlib import Path

from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import DAG, Asset, AssetWatcher, task
from airflow.sdk.exceptions import AirflowSkipException
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_key
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.shared.source import Source
from qewqew_airflow.triggers.qewqew import QewQewEventTrigger

GATES = Path(os.environ["QEWQEW_TEST_GATES"])
OUTPUT = Path(os.environ["QEWQEW_DEMO_OUTPUT"])
RETRY = {"retries": 9, "retry_delay": timedelta(seconds=1)}

for name, source, trigger in (
    ("orders", {"queue_name": "orders"}, lambda **arguments: MessageQueueTrigger(scheme="qewqew", **arguments)),
    ("load", {"topic": "events", "reader": "load"}, QewQewEventTrigger),
    ("twice", {"queue_name": "twice"}, QewQewEventTrigger),
):
    watched = Asset(name, watchers=[AssetWatcher(name=name, trigger=trigger(**source, max_records=50))])
    with DAG(name, schedule=[watched], catchup=False, max_active_runs=1, default_args=RETRY):

        @task
        def consume(name=name, source=source, **context):
            key, opened = task_key(context), Source(**source).open
            with opened(QewQewHook()) as it:
                batch = it.lease(key, max_records=50)
            if batch is None:
                raise AirflowSkipException("another run has taken it")
            (GATES / f"{name}.reached").touch()
            while (GATES / f"{name}.closed").exists():
                time.sleep(0.05)
            (OUTPUT / name).mkdir(exist_ok=True)
            (OUTPUT / name / batch.id).write_text(json.dumps([int(record) for record in batch]))
            with opened(QewQewHook()) as it:
                it.batch(batch.id).ack()

        consume()

with DAG("sensing", schedule=None, default_args=RETRY):
    QewQewSensor(task_id="ready", queue_name="sensed", min_records=2, timeout=300)
    QewQewSensor(task_id="late", queue_name="empty", timeout=2, retries=0)
    QewQewSensor(task_id="soft", queue_name="empty", timeout=2, soft_fail=True)
    QewQewSensor(task_id="never", queue_name="empty", timeout=2, never_fail=True)
"""


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queues")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


class TwoTriggerers(PostgresAirflow):
    components = {**COMPONENTS, "triggerer-2": ["triggerer", "--skip-serve-logs"]}  # noqa: RUF012

    def runs(self, dag_id: str) -> dict[str, str]:
        """The states of all runs."""
        found = self._call("GET", f"/api/v2/dags/{dag_id}/dagRuns?limit=100")["dag_runs"]
        return {each["dag_run_id"]: each["state"] for each in found}

    def events(self, asset: str) -> list[dict[str, Any]]:
        """All events of an asset, oldest first."""
        found = self._call("GET", "/api/v2/assets/events?limit=100&order_by=timestamp")["asset_events"]
        return [each for each in found if each["name"] == asset]

    def events_of(self, dag_id: str, run_id: str) -> list[int]:
        found = self._call("GET", f"{Run(dag_id, run_id).path}/upstreamAssetEvents")["asset_events"]
        return [each["id"] for each in found]


@pytest.fixture(scope="module")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, queues: Path, output: Path, settings: Callable[..., dict[str, str]]
) -> Iterator[TwoTriggerers]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; apt-get install postgresql")
    dags = tmp_path_factory.mktemp("dags")
    (dags / "events.py").write_text(DAGS)
    env = {
        **settings(queues, output, "local[1]"),
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "5",  # seconds until the other one takes over
        "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True",
    }
    with TwoTriggerers(tmp_path_factory.mktemp("airflow"), dags, env) as running:
        yield running


class Consumed:
    """A queue or reader, and what the runs of the DAG of that name have made of it."""

    def __init__(self, name: str, queues: Path, output: Path) -> None:
        self.name, self.queues, self.output = name, queues, output / name
        self.last = 0

    def put(self, count: int) -> None:
        records = [b"%d" % number for number in range(self.last, self.last + count)]
        self.last += count
        if self.name == "load":
            with Topic(self.queues / "events") as topic:
                topic.append_many(records)
        else:
            with Queue(self.queues / self.name, lock_timeout=60) as queue:
                queue.put_many(records)

    def batches(self) -> list[list[int]]:
        return [json.loads(each.read_text()) for each in self.output.iterdir()] if self.output.exists() else []

    def drained(self) -> None:
        """Waits until nothing waits, and every batch is acknowledged."""

        def look() -> bool:
            stats = inspect_reader(self.queues / "events", "load") if self.name == "load" else inspect(self.queues / self.name)
            return (stats.records, stats.leased, stats.returned, stats.dead) == (0, 0, 0, 0)

        until(look, f"{self.name} is empty", 120)

    def each_once(self, taken: int = 0) -> None:
        """``taken``: how many were taken by the test."""
        found = sorted(number for batch in self.batches() for number in batch)
        assert found == list(range(taken, self.last))


def test_each_record_is_in_the_batch_of_one_run_whatever_is_killed(airflow: TwoTriggerers, queues: Path, output: Path) -> None:
    both = [Consumed(name, queues, output) for name in ("orders", "load")]
    sensing = airflow.trigger("sensing")
    for each in both:
        each.put(120)
        airflow.unpause(each.name)
    for each in both:
        each.drained()
        assert sorted(map(len, each.batches())) == [20, 50, 50]

    def deferred() -> bool:
        return airflow.instance(sensing, "ready").get("state") == "deferred"

    until(deferred, "the sensor is deferred")
    # One of them had the triggers; the other takes over. What is put meanwhile is not lost, and nothing comes twice.
    for killed in ("triggerer", "triggerer-2"):
        for each in both:
            each.put(35)
        airflow.kill(killed)
        for each in both:
            each.put(35)
        for each in both:
            each.drained()
        airflow.start_again(killed)
    # The API server, while runs have leased.
    gates = [airflow.gate(each.name) for each in both]
    for gate in gates:
        gate.close()
    for each, gate in zip(both, gates, strict=True):
        each.put(60)
        gate.reached()
    airflow.kill("api-server")
    for each, gate in zip(both, gates, strict=True):
        each.put(30)
        gate.open()
    with Queue(queues / "sensed") as queue:
        queue.put_many([b"a", b"b"])
    airflow.start_again("api-server")
    airflow.wait_until_healthy()
    for each in both:
        each.drained()
        each.each_once()

        def over(each: Consumed = each) -> bool:
            return set(airflow.runs(each.name).values()) == {"success"}

        until(over, "all runs have ended")
        empty = len(airflow.runs(each.name)) - len(each.batches())
        assert 0 <= empty <= 3  # two kills, and a triggerer that was thought dead because it had to wait for the processor
    until(lambda: airflow.state(sensing) in ("success", "failed"), "the sensors have ended")
    states = {each.task_id: each.state for each in airflow.task_instances(sensing)}
    assert states == {"ready": "success", "late": "failed", "soft": "skipped", "never": "skipped"}
    seen = airflow.xcom(sensing, "ready")
    assert (seen["ready"], seen["records"]) == ("at least 2 records", 2)
    assert "AirflowSensorTimeout" in airflow.told(sensing, "late")


def test_events_that_coalesce_leave_no_record_waiting(airflow: TwoTriggerers, queues: Path, output: Path) -> None:
    """Airflow makes one run of two events, and the run has only the first: the second waits for a third."""
    twice = Consumed("twice", queues, output)
    airflow.kill("triggerer-2")  # so that each event is announced by one
    airflow.unpause("twice")
    scheduler = airflow._components["scheduler"].pid
    os.kill(scheduler, signal.SIGSTOP)
    try:
        twice.put(10)
        until(lambda: len(airflow.events("twice")) == 1, "the first event")
        with Queue(queues / "twice") as queue:  # somebody else takes a part, so that the rest is announced anew
            batch = queue.lease("somebody else", max_records=3)
            assert batch is not None
            batch.ack()
        twice.put(100)
        until(lambda: len(airflow.events("twice")) == 2, "the second event")
    finally:
        os.kill(scheduler, signal.SIGCONT)
    twice.drained()
    twice.each_once(taken=3)
    first, second, *others = airflow.events("twice")
    runs = list(airflow.runs("twice"))
    of_runs = [airflow.events_of("twice", run_id) for run_id in runs]
    # 107 records are three batches. The second event was coalesced: it is not that of a run of its own.
    assert [first["id"]] in of_runs
    assert [second["id"]] not in of_runs
    assert len(twice.batches()) == len(runs) == 3
    assert len(others) == 2
    assert first["extra"]["payload"]["records"] == 10
    assert second["extra"]["payload"]["records"] in (7, 107)
