"""What the sensor looks at, and arguments that cannot be meant."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.exceptions import TaskDeferralError
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from airflow.triggers.base import TriggerEvent

from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.triggers.qewqew import QewQewReadyTrigger
from qewqew_core import BadArgument, BadPath, Message, Queue, Topic


@pytest.mark.parametrize("names", [{"queue_name": "orders"}, {"topic": "orders", "reader": "load"}], ids=["queue", "topic"])
def test_a_lease_whose_time_is_over_is_ready(directory: Path, names: dict[str, str]) -> None:
    if "topic" in names:
        with Topic(directory / "orders") as topic, topic.reader("load") as reader:
            topic.append_many([b"a", b"b"])
            reader.lease("killed", lease_timeout=0.001)
    else:
        with Queue(directory / "orders") as queue:
            queue.put_many([b"a", b"b"])
            queue.lease("killed", lease_timeout=0.001)
    time.sleep(0.002)
    seen = QewQewSensor(task_id="wait", **names, min_records=2).poke({}).xcom_value
    assert "its lease has ended" in seen["ready"]
    assert (seen["records"], seen["returned"], seen["leased"]) == (0, 1, 0)


def test_what_was_seen_is_the_result(directory: Path) -> None:
    with Queue(directory / "orders") as queue:
        queue.put_many([b"x" * 10] * 7)
        queue.lease("somebody", max_records=2)
        oldest = queue.stats().oldest
    assert oldest is not None
    assert QewQewSensor(task_id="wait", queue_name="orders", min_records=5).poke({}).xcom_value == {
        "queue": "orders",
        "ready": "at least 5 records",
        "records": 5,
        "bytes": 50,
        "oldest": oldest.isoformat(),
        "returned": 0,
        "leased": 1,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("min_records", "min_bytes") for value in (0, -1, 2**63, 1.5, True, "many", "", [3])],
        *[("max_age", value) for value in (0, -1, timedelta(0), timedelta(days=-1), timedelta(days=9999))],
        *[("max_age", value) for value in (float("nan"), float("inf"), True, "old", [1])],
    ],
)
def test_a_threshold_that_cannot_be_meant_is_an_error_of_the_dag_file(name: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=name):
        QewQewSensor(task_id="wait", queue_name="orders", **{name: value})


def test_a_template_is_checked_when_it_is_rendered(directory: Path) -> None:
    with Queue(directory / "orders") as queue:
        queue.put_many([b"x"] * 5)
    sensor = QewQewSensor(task_id="wait", queue_name="orders", min_records="{{ params.n }}")
    sensor.render_template_fields({"params": {"n": -5}})
    with pytest.raises(BadArgument, match="min_records is -5"):
        sensor.poke({})
    sensor.min_records = "5"
    assert sensor.poke({})


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("names", [{"queue_name": "orders"}, {"topic": "orders", "reader": "load"}], ids=["queue", "topic"])
def test_who_could_never_lease_is_told_at_once_instead_of_waiting(
    directory: Path, names: dict[str, str], exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could stage there either. Also one whose directory has lost its permission since it began to wait."""
    if exists and "topic" in names:
        with Topic(directory / "orders") as topic, topic.reader("load"):
            pass
    elif exists:
        with Queue(directory / "orders") as queue:
            queue.put(b"x")
    sensor = QewQewSensor(task_id="wait", **names, min_records=2)
    sensor.poke({})
    trigger = QewQewReadyTrigger(qewqew_conn_id="qewqew_default", source=names, thresholds={"min_records": 2}, poll_interval=1)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)
    with pytest.raises(BadPath, match=r"no permission to use the (queue|topic): Permission denied\. This is user"):
        sensor.poke({})

    async def first() -> TriggerEvent:
        return await anext(trigger.run())

    assert asyncio.run(first()).payload["error"] == "BadPath"
    # The triggerer may have mounted the directory read-only.
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert not sensor.poke({})


def test_a_directory_that_does_not_exist_fails_the_task_instead_of_waiting(directory: Path) -> None:
    sensor = QewQewSensor(task_id="wait", queue_name="shop/orders")
    with pytest.raises(BadPath, match="does not exist on this worker"):
        sensor.poke({})
    with pytest.raises(BadPath, match="does not exist on this worker"):
        QewQewSensor(task_id="wait", topic="shop/orders", reader="load").poke({})


@pytest.mark.parametrize("soft", [False, True], ids=["plain", "soft_fail"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("another host", r"WrongHost.*run 'airflow triggerer --queues LANE' on 'elsewhere', with the queue= of the task"),
        ("another type", "WrongConnection.*it must be of type 'qewqew'"),
        ("no connection", "AirflowNotFoundException in the triggerer: .*qewqew_default.* isn't defined"),
        ("no directory", "it does not exist for this triggerer; mount it"),
    ],
)
def test_what_is_wrong_in_the_triggerer_fails_the_task_as_it_would_fail_itself(
    directory: Path, connect: Any, monkeypatch: pytest.MonkeyPatch, fault: str, said: str, soft: bool
) -> None:
    """A time-out alone is soft."""
    match fault:
        case "another host":
            connect("qewqew_default", "qewqew", str(directory), hostname="elsewhere")
        case "another type":
            connect("qewqew_default", "fs", str(directory))
        case "no connection":
            monkeypatch.delenv("AIRFLOW_CONN_QEWQEW_DEFAULT")
        case "no directory":
            shutil.rmtree(directory)
    trigger = QewQewReadyTrigger(
        qewqew_conn_id="qewqew_default", source={"queue_name": "orders"}, thresholds={}, poll_interval=60
    )

    async def first() -> TriggerEvent:
        return await anext(trigger.run())

    event = json.loads(json.dumps(asyncio.run(first()).payload))
    sensor = QewQewSensor(task_id="wait", queue_name="orders", deferrable=True, soft_fail=soft)
    is_retried = fault in ("no connection", "no directory")  # somebody may make one
    with pytest.raises((AirflowException, BadPath), match=said) as caught:
        sensor.resume_execution("execute_complete", {"event": event}, {})
    assert not isinstance(caught.value, AirflowSkipException)
    assert isinstance(caught.value, AirflowFailException) != is_retried


@pytest.mark.parametrize(
    ("reason", "soft", "error"),
    [
        ("Trigger timeout", False, AirflowSensorTimeout),
        ("Trigger timeout", True, AirflowSkipException),
        ("Trigger failure", False, TaskDeferralError),
        ("Trigger failure", True, TaskDeferralError),
    ],
)
def test_with_soft_fail_a_time_out_skips_and_a_trigger_that_died_does_not(
    reason: str, soft: bool, error: type[BaseException]
) -> None:
    sensor = QewQewSensor(task_id="wait", queue_name="orders", deferrable=True, soft_fail=soft)
    with pytest.raises(error):
        sensor.resume_execution("__fail__", {"error": reason}, {})


# Readers.


def looked_at(**arguments: Any) -> tuple[int, int] | None:
    """(records, bytes) that the sensor saw; None if it was not ready."""
    seen = QewQewSensor(task_id="wait", topic="events", **arguments).poke({}).xcom_value
    return seen and (seen["records"], seen["bytes"])


@pytest.fixture
def events(directory: Path) -> Path:
    with Topic(directory / "events") as topic:
        topic.append_many([Message(b"a", "eu.de"), Message(b"bb", "us"), Message(b"ccc")])
    return directory / "events"


def test_each_reader_is_ready_by_what_waits_for_it(events: Path) -> None:
    with Topic(events) as topic, topic.reader("first") as reader:
        reader.read_many(2)
        reader.commit()
        assert (looked_at(reader="first"), looked_at(reader="second")) == ((1, 3), (3, 6))
        reader.read()
        reader.commit()
    assert (looked_at(reader="first"), looked_at(reader="second")) == (None, (3, 6))


def test_a_reader_that_is_not_there_begins_where_the_sensor_is_told_to_and_stays_there(events: Path) -> None:
    assert looked_at(reader="all") == (3, 6)
    assert looked_at(reader="late", start="latest") is None
    assert looked_at(reader="last", start=2) == (1, 3)
    assert looked_at(reader="since", start=datetime(2000, 1, 1, tzinfo=UTC)) == (3, 6)
    with Topic(events) as topic:
        assert topic.readers() == ["all", "last", "late", "since"]
        topic.append(b"dddd")
    assert looked_at(reader="late") == (1, 4)
    assert looked_at(reader="late", start="oldest") == (1, 4)  # it exists


def test_a_filter_holds_from_the_first_look_on_and_until_another_is_given(events: Path) -> None:
    """The sensor must not be ready by messages that the Spark task will not get, nor wait for those it has passed over."""
    assert looked_at(reader="eu", filter="eu.#") == (1, 1)
    assert looked_at(reader="eu") == (1, 1)
    assert looked_at(reader="eu", filter="us") == (1, 2)
    assert looked_at(reader="eu", filter="") == (3, 6)
    assert looked_at(reader="eu", filter="nobody") is None


def test_a_topic_that_is_not_there_yet_is_empty(directory: Path) -> None:
    assert looked_at(reader="load", start="latest") is None
    with Topic(directory / "events") as topic:
        topic.append(b"a")
    assert looked_at(reader="load") == (1, 1)


def test_messages_that_were_removed_before_the_reader_got_them_are_not_waited_for(directory: Path) -> None:
    """They would make the sensor ready for ever, or with a filter never again."""
    settings = {"block_size": 1, "max_records": 2, "slow_readers": "move"}
    with Topic(directory / "events", **settings) as topic, topic.reader("slow"), topic.reader("eu", "eu"):
        for number in range(5):
            topic.append(str(number).encode(), tag="eu")
    assert (looked_at(reader="slow"), looked_at(reader="eu")) == ((2, 2), (2, 2))
    assert looked_at(reader="slow", min_records=3) is None
    assert looked_at(reader="slow", max_age=3600) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either queue_name or topic"),
        ({"queue_name": "orders", "topic": "events", "reader": "load"}, "either queue_name or topic"),
        ({"topic": "events"}, "needs the name of one of its readers"),
        ({"queue_name": "orders", "reader": "load"}, "reader is for a topic"),
        ({"queue_name": "orders", "filter": "eu"}, "filter is for a topic"),
        ({"queue_name": "orders", "start": "latest"}, "start is for a topic"),
        *[
            ({"topic": "events", "reader": "load", "start": value}, "start")
            for value in ("newest", -1, 1.5, True, datetime(2026, 1, 1))
        ],
        ({"topic": "events", "reader": "load", "filter": "x" * 128}, "filter"),
    ],
)
def test_names_that_contradict_each_other_are_an_error_of_the_dag_file(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        QewQewSensor(task_id="wait", **arguments)


@pytest.mark.parametrize("reader", ["", "../load", "a/b", ".hidden", "x" * 101, 7])
def test_a_reader_that_cannot_be_one_is_an_error_of_the_dag_file_or_of_the_template(events: Path, reader: Any) -> None:
    with pytest.raises(BadPath, match="reader"):
        QewQewSensor(task_id="wait", topic="events", reader=reader)
    sensor = QewQewSensor(task_id="wait", topic="events", reader="{{ params.reader }}")
    sensor.reader = reader
    with pytest.raises(BadPath, match="reader"):
        sensor.poke({})
    assert not list((events / "reader").iterdir())
