"""The triggers on real queues and topics, driven as the triggerer drives them, through Airflow's own shared streams."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.models.trigger import Trigger
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.triggers.base import BaseEventTrigger
from airflow_version import SHARES_STREAMS, encode_trigger, needs_shared_streams

from qewqew_airflow.queues.qewqew import QewQewMessageQueueProvider
from qewqew_airflow.shared.readiness import RETURNED, Thresholds
from qewqew_airflow.shared.source import Source
from qewqew_airflow.triggers import watching
from qewqew_airflow.triggers.qewqew import Announcer, QewQewEventTrigger, QewQewReadyTrigger
from qewqew_core import BadArgument, BadPath, Queue, QueueStats, Topic
from qewqew_core.tools import marker

if SHARES_STREAMS:
    from airflow.triggers.shared_stream import SharedStreamManager

Names = dict[str, str]
QUEUE: Names = {"queue_name": "orders"}
READER: Names = {"topic": "events", "reader": "load"}
both = pytest.mark.parametrize("names", [QUEUE, READER], ids=["queue", "reader"])
NEVER = 1000.0  # seconds: what happens in spite of it was not polled for


class Looks:
    """The looks at a queue by those who wait for it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._begun, inspect = directory, [0.0], Source.inspect

        def noted(source: Source, hook: Any) -> QueueStats:
            begun = time.monotonic()
            found = inspect(source, hook)
            self._begun.append(begun)
            return found

        monkeypatch.setattr(Source, "inspect", noted)

    @property
    def count(self) -> int:
        return len(self._begun) - 1

    async def again(self) -> None:
        """Has somebody look, and waits until what was seen has had its effect."""
        for _ in range(2):  # when there is a second look, the first has been dealt with
            now = time.monotonic()
            for path in (self._directory / "orders.touched", self._directory / "events" / "events.touched"):
                if path.parent.exists():
                    path.touch()
            while self._begun[-1] < now:
                await asyncio.sleep(0.01)


@pytest.fixture
def looks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(directory, monkeypatch)


class Triggerer:
    """Runs event triggers as this Airflow does. ``stored``: whether what they announce gets into its database, if it tells."""

    def __init__(self, ack_timeout: float = 300.0) -> None:
        self.manager = SharedStreamManager(ack_timeout=ack_timeout) if SHARES_STREAMS else None
        self.stored = True
        self.failures: list[Exception] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, trigger: QewQewEventTrigger) -> asyncio.Queue[dict[str, Any]]:
        """What it announces."""
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._tasks.append(asyncio.create_task(self._again_and_again(len(self._tasks), trigger, events)))
        return events

    async def _again_and_again(self, number: int, trigger: QewQewEventTrigger, events: asyncio.Queue[dict[str, Any]]) -> None:
        while True:
            try:
                await self._run(number, trigger, events)
            except Exception as error:
                self.failures.append(error)

    async def _run(self, number: int, trigger: QewQewEventTrigger, events: asyncio.Queue[dict[str, Any]]) -> None:
        if self.manager is None:
            async for event in trigger.run():
                json.dumps(event.payload)
                events.put_nowait(event.payload)
            return
        key = trigger.shared_stream_key()
        stream = self.manager.subscribe(trigger_id=number, trigger=trigger, key=key)
        try:
            async for event in trigger.filter_shared_stream(stream):
                seq = self.manager.bind_pending_event(trigger_id=number, key=key)
                assert seq is not None
                json.dumps(event.payload)
                if self.stored:
                    self.manager.confirm_persisted([seq])
                events.put_nowait(event.payload)
        finally:
            await self.manager.unsubscribe(number, key)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def triggerer(**arguments: Any) -> AsyncIterator[Triggerer]:
    running = Triggerer(**arguments)
    try:
        yield running
    finally:
        await running.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def put(directory: Path, names: Names, *records: bytes) -> None:
    if names is QUEUE:
        with Queue(directory / "orders") as queue:
            queue.put_many(records)
    else:
        with Topic(directory / "events") as topic:
            topic.append_many(records)


def lease(
    directory: Path, names: Names, key: str, max_records: int | None = None, end: str = "leased", retry_delay: float = 0.0
) -> int:
    """How many records the batch has, which is then acknowledged or returned."""
    if names is QUEUE:
        with Queue(directory / "orders", retry_delay=retry_delay) as queue:
            return ended(queue.lease(key, max_records), end)
    with Topic(directory / "events", retry_delay=retry_delay) as topic, topic.reader("load") as reader:
        return ended(reader.lease(key, max_records), end)


def ended(batch: Any, end: str) -> int:
    if end == "acked":
        batch.ack()
    elif end == "returned":
        batch.nack("for a test")
    return int(batch.records)


def trigger(names: Names, **arguments: Any) -> QewQewEventTrigger:
    return QewQewEventTrigger(**{**names, "poll_interval": NEVER, **arguments})


# ------------------------------------------------------------------------------------------------ the event trigger


@both
def test_a_queue_that_is_ready_is_announced_at_once_and_once(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a", b"bc")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, max_records=7))
            seen = await events.get()
            shown = {"queue": "orders"} if names is QUEUE else READER
            assert seen | {"oldest": ""} == {
                **shown,
                "ready": "at least 1 record",
                "records": 2,
                "bytes": 3,
                "oldest": "",
                "returned": 0,
                "leased": 0,
                "max_records": 7,
            }
            assert datetime.fromisoformat(seen["oldest"]).tzinfo is not None
            put(directory, names, b"d")
            await looks.again()
            assert events.empty()

    run(test)


@both
def test_a_queue_becomes_ready_when_enough_was_put(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, min_records=3))
            await looks.again()
            await asyncio.to_thread(put, directory, names, b"b")
            await looks.again()
            assert events.empty()
            await asyncio.to_thread(put, directory, names, b"c")
            assert (await events.get())["records"] == 3

    run(test)


def test_a_queue_that_does_not_exist_yet_is_waited_for(directory: Path, looks: Looks) -> None:
    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(QUEUE))
            await looks.again()
            await asyncio.to_thread(put, directory, QUEUE, b"a")
            assert (await events.get())["records"] == 1

    run(test)


@both
def test_a_queue_becomes_ready_by_age_although_nothing_happens(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, min_records=3, max_age=1.5))
            assert (await events.get())["ready"] == "a record older than 0:00:01.500000"
            assert looks.count < 8  # nobody polls for it

    run(test)


@both
def test_a_returned_batch_is_announced(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a")
    lease(directory, names, "first")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, min_records=3))
            await looks.again()
            assert events.empty()
            await asyncio.to_thread(lease, directory, names, "first", end="returned")
            seen = await events.get()
            assert (seen["records"], seen["returned"]) == (0, 1)

    run(test)


@both
def test_a_batch_that_is_not_due_is_announced_when_it_is(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a")
    lease(directory, names, "first", retry_delay=1.5, end="returned")
    due = datetime.now(UTC) + timedelta(seconds=1)

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names))
            assert (await events.get())["returned"] == 1
            assert datetime.now(UTC) > due
            assert looks.count < 8  # nobody polls for it

    run(test)
    assert lease(directory, names, "second") == 1


def test_what_is_not_due_makes_nothing_ready_and_is_waited_for_to_the_second() -> None:
    later = datetime.now(UTC) + timedelta(seconds=100)
    stats = QueueStats(0, 0, 0, None, 0, 2, 0, 0, delayed=2, next_due=later)  # type: ignore[arg-type]
    thresholds = Thresholds(min_records=5, max_age=timedelta(hours=1))
    assert thresholds.reason(stats) is None
    assert 99 < (thresholds.seconds_left(stats) or 0) <= 100
    waiting = replace(stats, records=1, oldest=datetime.now(UTC) - timedelta(seconds=3590))  # type: ignore[arg-type]
    assert 9 < (thresholds.seconds_left(waiting) or 0) <= 10
    assert thresholds.reason(replace(stats, delayed=1)) == RETURNED
    announcer = Announcer(thresholds, 300)
    assert announcer.reason(stats, 0) is None
    assert 99 < (announcer.seconds_left(stats, 0) or 0) <= 100
    assert announcer.reason(replace(stats, delayed=0, next_due=None), 100) == RETURNED


def test_a_lease_whose_time_is_over_is_announced(directory: Path) -> None:
    with Queue(directory / "orders") as queue:
        queue.put(b"a")
        queue.lease("killed", lease_timeout=0.5)

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(QUEUE, poll_interval=0.3))
            assert (await events.get())["returned"] == 1

    run(test)


@both
@pytest.mark.parametrize("end", ["leased", "acked"])
def test_a_backlog_is_announced_batch_by_batch_and_after_each_lease_once(
    directory: Path, names: Names, looks: Looks, end: str
) -> None:
    put(directory, names, *[b"x"] * 5)

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, max_records=2))
            left = []
            for number in range(3):
                left.append((await events.get())["records"])
                await asyncio.to_thread(lease, directory, names, f"run {number}", 2, end)
            assert left == [5, 3, 1]
            await looks.again()
            assert events.empty()
            await asyncio.to_thread(put, directory, names, b"y")
            assert (await events.get())["records"] == 1

    run(test)


def test_to_acknowledge_or_extend_a_lease_is_no_new_lease(directory: Path, looks: Looks) -> None:
    """It would start a run beside the one that was announced and waits for its turn."""
    put(directory, QUEUE, *[b"x"] * 5)

    def extend() -> None:
        with Queue(directory / "orders") as queue:
            queue.lease("first", lease_timeout=3600)

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(QUEUE))
            await events.get()
            await asyncio.to_thread(lease, directory, QUEUE, "first", 2)
            await events.get()
            for step in (extend, lambda: lease(directory, QUEUE, "first", end="acked")):
                await asyncio.to_thread(step)
                await looks.again()
            assert events.empty()

    run(test)


@both
def test_what_nobody_leases_is_announced_again_after_a_while(directory: Path, names: Names) -> None:
    put(directory, names, b"a")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(names, remind=1))
            assert (await events.get())["records"] == (await events.get())["records"] == 1

    run(test)


def test_reminders_come_less_and_less_often() -> None:
    stats = QueueStats(1, 1, 1, None, 0, 0, 0, 0)
    announcer = Announcer(Thresholds(), 300)
    times = [now for now in range(0, 20_000, 50) if announcer.reason(stats, now)]
    assert times == [0, 300, 900, 2100, 4500, 8100, 11_700, 15_300, 18_900]
    lazy = Announcer(Thresholds(), 7200)
    assert [now for now in range(0, 20_000, 50) if lazy.reason(stats, now)] == [0, 7200, 14_400]
    leased = replace(stats, last_lease=datetime.now(UTC))
    assert announcer.reason(leased, 20_000)
    assert announcer.seconds_left(leased, 20_000) == 300
    empty = replace(leased, records=0)
    assert (announcer.reason(empty, 20_001), announcer.seconds_left(empty, 20_001)) == (None, None)
    assert announcer.reason(leased, 20_002)
    clock_set_back = replace(stats, last_lease=datetime.now(UTC) - timedelta(days=1))
    assert announcer.reason(clock_set_back, 20_003)  # it is another lease all the same


@needs_shared_streams
def test_an_announcement_that_is_not_stored_is_made_again(directory: Path) -> None:
    put(directory, QUEUE, b"a")

    async def test() -> None:
        async with triggerer(ack_timeout=2) as running:
            running.stored = False
            events = running.start(trigger(QUEUE, poll_interval=0.3))
            other = running.start(trigger(QUEUE, poll_interval=0.3, min_records=2))
            await events.get()
            await events.get()
            running.stored = True
            await events.get()
            assert [type(error).__name__ for error in running.failures] == ["AckTimeout"] * 2
            await asyncio.to_thread(put, directory, QUEUE, b"b")  # the others go on
            assert (await other.get())["records"] == 2

    run(test)


@needs_shared_streams
@both
def test_all_triggers_of_a_queue_share_the_looks_at_it_whatever_their_thresholds(
    directory: Path, names: Names, looks: Looks
) -> None:
    put(directory, names, b"a")

    async def test() -> None:
        async with triggerer() as running:
            events = [running.start(trigger(names, min_records=number)) for number in range(1, 6)]
            assert (await events[0].get())["records"] == 1
            await looks.again()
            assert looks.count < 5
            await asyncio.to_thread(put, directory, names, b"b", b"c", b"d", b"e")
            assert [(await each.get())["records"] for each in events[1:]] == [5] * 4
            assert events[0].empty()

    run(test)


def test_a_topic_is_read_by_filter_from_where_the_reader_was_made(directory: Path) -> None:
    put(directory, READER, b"before")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger({"topic": "events", "reader": "eu"}, filter="eu", start="latest"))
            while not (directory / "events" / "reader" / "eu.rdx").exists():
                await asyncio.sleep(0.01)
            with Topic(directory / "events") as topic:
                topic.append(b"1", tag="us")
                topic.append(b"2", tag="eu")
            assert (await events.get())["records"] == 1

    run(test)


@pytest.mark.parametrize("problem", ["no directory", "no connection"])
def test_what_cannot_be_looked_at_is_logged_and_tried_again(
    directory: Path,
    connect: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: str,
) -> None:
    put(directory, QUEUE, b"a")
    if problem == "no directory":
        shutil.move(directory, f"{directory}-away")
    else:
        monkeypatch.delenv("AIRFLOW_CONN_QEWQEW_DEFAULT")

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(QUEUE))
            while not caplog.records:
                await asyncio.sleep(0.01)
            if problem == "no directory":
                shutil.move(f"{directory}-away", directory)
            else:
                connect("qewqew_default", "qewqew", str(directory))
            assert (await events.get())["records"] == 1
            assert not running.failures

    with caplog.at_level(logging.ERROR, "qewqew_airflow.triggers.qewqew"):
        run(test)
    said = caplog.records[0].getMessage()
    assert said.startswith("Cannot look at queue orders of connection 'qewqew_default', trying again in 1 s: ")
    assert ("does not exist" if problem == "no directory" else "isn't defined") in said


def test_a_threshold_that_is_never_met_is_said(
    directory: Path, connect: Callable[..., None], capfd: pytest.CaptureFixture[str], looks: Looks
) -> None:
    connect("qewqew_default", "qewqew", str(directory), max_records=10)

    async def test() -> None:
        async with triggerer() as running:
            running.start(trigger(QUEUE, min_records=11))
            await looks.again()

    run(test)
    assert capfd.readouterr().out.count("queue orders will not start any runs: min_records is 11 and could never be reached") == 1


def test_a_directory_that_was_replaced_is_watched(directory: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_UP", 0.5)

    async def test() -> None:
        async with triggerer() as running:
            events = running.start(trigger(QUEUE, min_records=2))
            await looks.again()
            shutil.move(directory, f"{directory}-away")
            marker.init(str(directory))
            await asyncio.to_thread(put, directory, QUEUE, b"a")
            await looks.again()
            assert events.empty()
            await asyncio.to_thread(put, directory, QUEUE, b"b")
            assert (await events.get())["records"] == 2

    run(test)


def test_many_queues_are_watched_by_one_thread(directory: Path, looks: Looks) -> None:
    """`watchfiles` alone would take one of anyio's forty for each, and let the others wait for seconds."""
    count = 50

    def put_all() -> None:
        for number in range(count):
            with Queue(directory / f"orders-{number}", sync="never") as queue:
                queue.put(b"x")

    async def test() -> None:
        async with triggerer() as running:
            events = [running.start(trigger({"queue_name": f"orders-{number}"})) for number in range(count)]
            while looks.count < count:
                await asyncio.sleep(0.01)
            threads = threading.active_count()
            await asyncio.to_thread(put_all)
            assert [(await each.get())["records"] for each in events] == [1] * count
            assert threads < 40

    run(test)


def test_without_shared_streams_it_announces_too(directory: Path) -> None:
    put(directory, QUEUE, b"a")

    async def test() -> None:
        async with aclosing(trigger(QUEUE).run()) as events:  # type: ignore[type-var]
            event = await anext(events)
            assert event.payload["records"] == 1

    run(test)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, BadArgument, "either queue_name or topic"),
        ({"topic": "events"}, BadArgument, "reader"),
        ({"topic": "events", "reader": "../x"}, BadPath, "reader"),
        ({**QUEUE, "reader": "load"}, BadArgument, "reader is for a topic"),
        ({**QUEUE, "min_records": 0}, BadArgument, "min_records"),
        ({**QUEUE, "max_age": -1}, BadArgument, "max_age"),
        ({**QUEUE, "max_records": 0}, BadArgument, "max_records"),
        ({**QUEUE, "min_records": 10, "max_records": 9}, BadArgument, "less than min_records"),
        ({**QUEUE, "remind": 0}, BadArgument, "remind"),
        ({**QUEUE, "poll_interval": 0}, BadArgument, "poll_interval"),
        ({"queue_name": "{{ params.name }}"}, BadArgument, "cannot render templates"),
        ({**QUEUE, "min_records": "{{ params.n }}"}, BadArgument, "cannot render templates"),
    ],
)
def test_arguments_that_cannot_be_meant_are_an_error_of_the_dag_file(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QewQewEventTrigger(**arguments)


def test_how_often_it_looks_is_a_setting_of_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert QewQewEventTrigger(**QUEUE).poll_interval == 10
    monkeypatch.setenv("AIRFLOW__QEWQEW__POLL_INTERVAL", "2.5")
    assert QewQewEventTrigger(**QUEUE).poll_interval == 2.5
    assert QewQewEventTrigger(**QUEUE, poll_interval=timedelta(minutes=1)).poll_interval == 60
    monkeypatch.setenv("AIRFLOW__QEWQEW__POLL_INTERVAL", "often")
    with pytest.raises(BadArgument, match=r"poll_interval.*often"):
        QewQewEventTrigger(**QUEUE)


@pytest.mark.parametrize(
    "arguments",
    [
        {**QUEUE, "min_records": 5, "min_bytes": "6", "max_age": timedelta(hours=1), "max_records": 7, "remind": 9},
        {**READER, "filter": "eu", "start": datetime(2026, 1, 1, tzinfo=UTC), "max_age": 5, "qewqew_conn_id": "other"},
    ],
)
def test_it_is_the_same_trigger_after_the_way_through_the_dag_file_and_the_database(arguments: dict[str, Any]) -> None:
    """Else the DAG processor would replace it each time that it reads the file."""
    encoded = encode_trigger(MessageQueueTrigger(scheme="qewqew", **arguments))
    assert encoded == encode_trigger(QewQewEventTrigger(**arguments))
    stored = Trigger(encoded["classpath"], encoded["kwargs"])
    assert BaseEventTrigger.hash(stored.classpath, stored.kwargs) == BaseEventTrigger.hash(**encoded)


def test_the_scheme_is_found() -> None:
    assert QewQewMessageQueueProvider().trigger_class() is QewQewEventTrigger
    assert QewQewMessageQueueProvider().scheme_matches("qewqew")
    assert not QewQewMessageQueueProvider().scheme_matches("kafka")


@pytest.mark.filterwarnings("ignore:The `queue` parameter is deprecated")
@pytest.mark.parametrize("names", [{"queue": "orders"}, {"queue": "qewqew://orders"}, {"queue": "orders", "scheme": "qewqew"}])
def test_who_writes_queue_is_told_what_to_write(names: dict[str, str]) -> None:
    """As the DAG processor calls it; the provider alone would say that nobody knows this queue."""
    with pytest.raises(BadArgument, match=r"write MessageQueueTrigger\(scheme='qewqew', queue_name='orders'\)"):
        encode_trigger(MessageQueueTrigger(**names, min_records=5))


# ----------------------------------------------------------------------------------------- the trigger of the sensor


async def fired(names: Names, **thresholds: Any) -> dict[str, Any]:
    made = QewQewReadyTrigger(qewqew_conn_id="qewqew_default", source=names, thresholds=thresholds, poll_interval=NEVER)
    again = QewQewReadyTrigger(**made.serialize()[1])  # as it comes to the triggerer
    assert again.serialize() == made.serialize()
    events = [event.payload async for event in again.run()]
    assert len(events) == 1
    return dict(events[0])


@both
def test_the_sensors_trigger_fires_once_when_it_is_ready(directory: Path, names: Names, looks: Looks) -> None:
    put(directory, names, b"a")

    async def test() -> None:
        waiting = asyncio.create_task(fired(names, min_records=2))
        await looks.again()
        await asyncio.to_thread(put, directory, names, b"b")
        assert (await waiting)["ready"] == "at least 2 records"
        assert (await fired(names, min_records=9, max_age=timedelta(seconds=1)))["ready"] == "a record older than 0:00:01"

    run(test)


def test_the_sensors_trigger_says_what_is_wrong_at_once(directory: Path) -> None:
    async def test() -> None:
        shutil.rmtree(directory)
        event = await fired(QUEUE)
        assert event["error"] == "BadPath"
        assert "does not exist" in event["message"]

    run(test)
