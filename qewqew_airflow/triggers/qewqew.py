"""Triggers: one starts DAG runs when a queue or reader is ready, the other waits for the deferrable sensor.

Both run in the triggerer, which must have the connection's directory. They look at the queue without its lock, when its
files change and at least every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from airflow.configuration import conf
from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

try:
    from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer
except ImportError:  # before 3.3, Airflow calls `run`, and each trigger looks for itself
    SharedStreamProducer = object  # type: ignore[assignment,misc]

from qewqew_airflow.arguments import check_rendered, seconds, whole
from qewqew_airflow.errors import errno_of
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.readiness import Thresholds, announcement
from qewqew_airflow.shared.source import Source, Start
from qewqew_airflow.triggers.watching import Watch
from qewqew_core import BadArgument, QueueStats

PAUSE = 0.2  # seconds between two looks at least; also ten times what a look takes, so that it costs a tenth of a processor
LONGEST_RETRY = 60.0  # seconds
LONGEST_REMIND = 3600.0  # seconds
_logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What was seen, the queue's settings, and a function to ask for the next look within some seconds."""

    stats: QueueStats
    settings: Mapping[str, Any]
    again_in: Callable[[float], None]


async def looks(conn_id: str, source: Source, poll_interval: float) -> AsyncGenerator[Look, None]:
    """Look now and whenever something may have changed, as long as this is iterated. Raises what looking raises."""
    hook = QewQewHook(conn_id, in_triggerer=True)
    await hook.aload()
    settings = hook.settings() if source.topic is None else {}
    await asyncio.to_thread(source.prepare, hook)
    clock = asyncio.get_running_loop().time
    async with Watch(await asyncio.to_thread(source.files, hook)) as watch:
        while True:
            begun = clock()
            stats = await asyncio.to_thread(source.look, hook)
            done = clock()
            metrics.gauge(hook, source, stats)
            due = [done + poll_interval]
            yield Look(stats, settings, lambda wait, due=due: due.append(clock() + wait))  # type: ignore[misc]
            await asyncio.sleep(max(PAUSE, 10 * (done - begun)))
            await watch.wait(max(0.0, min(due) - clock()))


class QewQewReadyTrigger(BaseTrigger):
    """Fires once, when a queue or reader is ready. `QewQewSensor` has looked, and has created the reader, before.

    The event is what was seen. If looking fails, it has error (the name of the class), message, and errno, if there is one.

    :param source: the arguments of `Source`
    :param thresholds: the arguments of `Thresholds`
    :param poll_interval: seconds
    """

    def __init__(
        self, *, qewqew_conn_id: str, source: Mapping[str, Any], thresholds: Mapping[str, Any], poll_interval: float
    ) -> None:
        super().__init__()
        self.qewqew_conn_id = qewqew_conn_id
        self.source = Source(**source)
        self.thresholds = Thresholds.of(thresholds)
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "qewqew_conn_id": self.qewqew_conn_id,
            "source": asdict(self.source),
            "thresholds": asdict(self.thresholds),
            "poll_interval": self.poll_interval,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            event = await self._ready()
        except Exception as error:  # the task fails, not the trigger
            event = {"error": type(error).__name__, "message": str(error), "errno": errno_of(error)}
        yield TriggerEvent(event)

    async def _ready(self) -> dict[str, Any]:
        async with contextlib.aclosing(looks(self.qewqew_conn_id, self.source, self.poll_interval)) as found:
            async for look in found:
                if reason := self.thresholds.reason(look.stats):
                    return announcement(self.source, look.stats, reason)
                if (left := self.thresholds.seconds_left(look.stats)) is not None:
                    look.again_in(left)
        raise AssertionError


class Announced(NamedTuple):
    last_lease: datetime | None  # at that time
    remind_in: float
    remind_at: float


class Announcer:
    """When to announce that a queue is ready: once for each batch, and again if nobody seems to have heard.

    An announcement is a hint. Airflow may merge it with another, or drop it (the DAG is paused), and the run that it starts
    may fail before it leases. So an announcement holds until something is leased. If the queue is ready then, that is the
    next batch, which is announced at once. If nothing is leased, a reminder follows, each time after twice the time.
    """

    def __init__(self, thresholds: Thresholds, remind: float) -> None:
        self._thresholds, self._remind = thresholds, remind
        self._last: Announced | None = None

    def reason(self, stats: QueueStats, now: float) -> str | None:
        """Why to announce it now. None if not now."""
        reason = self._thresholds.reason(stats)
        if reason is None:
            self._last = None
            return None
        if self._last is None or stats.last_lease not in (None, self._last.last_lease):  # another one; the clock may go back
            remind_in = self._remind
        elif now >= self._last.remind_at:
            remind_in = max(self._remind, min(2 * self._last.remind_in, LONGEST_REMIND))
        else:
            return None
        self._last = Announced(stats.last_lease, remind_in, now + remind_in)
        return reason

    def seconds_left(self, stats: QueueStats, now: float) -> float | None:
        """Seconds until the reason may change although the queue does not."""
        return self._thresholds.seconds_left(stats) if self._last is None else max(0.0, self._last.remind_at - now)


class QewQewEventTrigger(BaseEventTrigger):
    """Starts a run for each batch that is ready, as the trigger of an `AssetWatcher`. Never defer a task to it.

    The thresholds are those of `QewQewSensor`. The run must lease, and must not rely on the numbers in the event: there may
    be more by then, or another run may have the batch. There is one event for each batch: another one after a lease if the
    queue is ready then, and reminders if nobody leases. All triggers of a queue or reader share the looks at it.

    The payload of the event is what `QewQewSensor` returns, with max_records.

    :param queue_name: file name of the queue in the connection's directory
    :param topic: instead of queue_name: name of the topic there
    :param reader: whose messages of the topic
    :param filter: which tags these have; see `QewQewSensor`
    :param start: where a new reader begins
    :param min_records: number of records, from 1
    :param min_bytes: bytes of records, from 1
    :param max_age: timedelta or seconds, from 0.001 s to ten years
    :param max_records: how many records the run should lease at most, not below min_records; only put into the payload
    :param qewqew_conn_id: the connection
    :param remind: seconds until the event is repeated if nobody leases; doubled each time, up to an hour
    :param poll_interval: longest pause in seconds between two looks; default: ``[qewqew] poll_interval`` of Airflow's
        configuration, 10

    Raises `BadArgument` and `BadPath` for wrong arguments. Errors that only the triggerer can see (a missing connection, a
    directory that cannot be read) go to its log, and it tries again, in the end every minute.
    """

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        reader: str | None = None,
        filter: str | None = None,
        start: Start = "oldest",
        min_records: int | None = None,
        min_bytes: int | None = None,
        max_age: timedelta | float | None = None,
        max_records: int | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        remind: timedelta | float = 300.0,
        poll_interval: timedelta | float | None = None,
    ) -> None:
        super().__init__()
        names = {"queue_name": queue_name, "topic": topic, "reader": reader, "filter": filter}
        thresholds = {"min_records": min_records, "min_bytes": min_bytes, "max_age": max_age}
        for name, value in {**names, **thresholds, "qewqew_conn_id": qewqew_conn_id}.items():
            check_rendered(name, value)
        self.source = Source(queue_name, topic, reader, filter, start)
        self.thresholds = Thresholds.of(thresholds)
        self.max_records = None if max_records is None else whole("max_records", max_records)
        if self.max_records is not None and self.max_records < (self.thresholds.min_records or 0):
            raise BadArgument(f"max_records is {max_records:,}, less than min_records, which is {min_records:,}")
        self.qewqew_conn_id = qewqew_conn_id
        self.remind = seconds("remind", remind, low=1).total_seconds()
        given = conf.get("qewqew", "poll_interval", fallback="10") if poll_interval is None else poll_interval
        self.poll_interval = seconds("poll_interval", given, low=0.1).total_seconds()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            **asdict(self.source),
            **asdict(self.thresholds),
            "max_records": self.max_records,
            "qewqew_conn_id": self.qewqew_conn_id,
            "remind": self.remind,
            "poll_interval": self.poll_interval,
        }

    def shared_stream_key(self) -> Hashable:
        return (self.qewqew_conn_id, self.source, self.poll_interval)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return _Producer(cls(**kwargs))

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Look]) -> AsyncIterator[TriggerEvent]:
        clock = asyncio.get_running_loop().time
        announcer, settings = Announcer(self.thresholds, self.remind), None
        async for look in shared_stream:
            if settings != look.settings:
                settings = look.settings
                try:
                    self.thresholds.check_bounds(settings)
                except BadArgument as error:  # a trigger that fails would be started again and again
                    self.log.error("%s will not start any runs: %s", self.source, error)
            reason = announcer.reason(look.stats, clock())
            if (left := announcer.seconds_left(look.stats, clock())) is not None:
                look.again_in(left)
            if reason is not None:
                self.log.info("%s is ready (%s): sent an event", self.source, reason)
                yield TriggerEvent({**announcement(self.source, look.stats, reason), "max_records": self.max_records})

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """The same without sharing. Airflow before 3.3 calls this."""
        async with contextlib.aclosing(_Producer(self).open_stream()) as stream:
            async for event in self.filter_shared_stream(look async for look, _ in stream):
                yield event


class _Producer(SharedStreamProducer):
    """Looks for all triggers of one queue or reader.

    It has nothing to acknowledge, because records stay in the queue until a task leases them. But because there is a
    producer, Airflow confirms to each trigger that its event was stored. If that fails, Airflow restarts the trigger, which
    has forgotten the event and sends it again.
    """

    def __init__(self, trigger: QewQewEventTrigger) -> None:
        self._of = (trigger.qewqew_conn_id, trigger.source, trigger.poll_interval)

    async def open_stream(self) -> AsyncGenerator[tuple[Look, None], None]:
        conn_id, source, _ = self._of
        retry_in = 1.0
        while True:
            try:
                async with contextlib.aclosing(looks(*self._of)) as found:
                    async for look in found:
                        retry_in = 1.0
                        yield look, None
            except Exception as error:
                # If the stream ended, Airflow would restart it every second.
                what = f"{source} of connection {conn_id!r}"
                _logger.error("Cannot look at %s, trying again in %.0f s: %s: %s", what, retry_in, type(error).__name__, error)
            await asyncio.sleep(retry_in)
            retry_in = min(2 * retry_in, LONGEST_RETRY)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        pass
