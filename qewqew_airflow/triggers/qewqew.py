"""Triggers: one starts DAG runs when a queue or reader is ready, the other is what the deferrable sensor waits with.

Both run in the triggerer, which must have the connection's directory. They look at the queue without its lock, when its
files change and every few seconds in any case.
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
except ImportError:  # before Airflow 3.3: Airflow calls `run`, and each trigger looks for itself
    SharedStreamProducer = object  # type: ignore[assignment,misc]

from qewqew_airflow.arguments import check_rendered, seconds, whole
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.readiness import Thresholds, announcement
from qewqew_airflow.shared.source import Source, Start
from qewqew_airflow.triggers.watching import Watch
from qewqew_core import BadArgument, QueueStats

PAUSE = 0.2  # seconds between two looks at least, and ten times what a look takes: a busy queue costs a tenth of a processor
LONGEST_RETRY = 60.0  # seconds
LONGEST_REMIND = 3600.0  # seconds
_logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What was seen, the queue's settings, and how to ask for the next look after at most so many seconds."""

    stats: QueueStats
    settings: Mapping[str, Any]
    again_in: Callable[[float], None]


async def looks(conn_id: str, source: Source, poll_interval: float) -> AsyncGenerator[Look, None]:
    """Look now, and whenever something may have changed, for as long as this is iterated; raises what looking raises."""
    hook = QewQewHook(conn_id)
    hook.connection = await hook.aget_connection(conn_id)
    settings = hook.settings() if source.topic is None else {}
    await asyncio.to_thread(source.prepare, hook)
    clock = asyncio.get_running_loop().time
    async with Watch(await asyncio.to_thread(source.files, hook)) as watch:
        while True:
            begun = clock()
            stats = await asyncio.to_thread(source.inspect, hook)
            done = clock()
            metrics.gauge(hook, source, stats)
            due = [done + poll_interval]
            yield Look(stats, settings, lambda wait, due=due: due.append(clock() + wait))  # type: ignore[misc]
            await asyncio.sleep(max(PAUSE, 10 * (done - begun)))
            await watch.wait(max(0.0, min(due) - clock()))


class QewQewReadyTrigger(BaseTrigger):
    """Fires once, when a queue or reader is ready: for `QewQewSensor`, which has looked (and made the reader) before.

    The event is what was seen; or, if looking fails, error (the name of its class) and message.

    :param source: the arguments of `Source`
    :param thresholds: those of `Thresholds`
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
        except Exception as error:  # to fail the task is the task's part
            event = {"error": type(error).__name__, "message": str(error)}
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
    last_lease: datetime | None  # as it was then
    remind_in: float
    remind_at: float


class Announcer:
    """When to announce that a queue is ready: once for each batch, and again where nobody seems to have heard.

    An announcement is a hint that Airflow may coalesce with another, or drop (the DAG is paused), and the run that it
    starts may fail before it leases anything. So one holds until something was leased: if the queue is ready then, that is
    the next batch, and announced at once. And until the time for a reminder; each time the wait for that is doubled.
    """

    def __init__(self, thresholds: Thresholds, remind: float) -> None:
        self._thresholds, self._remind = thresholds, remind
        self._last: Announced | None = None

    def reason(self, stats: QueueStats, now: float) -> str | None:
        """Why to announce it now; None: not now."""
        reason = self._thresholds.reason(stats)
        if reason is None:
            self._last = None
            return None
        if self._last is None or _is_later(stats.last_lease, self._last.last_lease):
            remind_in = self._remind
        elif now >= self._last.remind_at:
            remind_in = max(self._remind, min(2 * self._last.remind_in, LONGEST_REMIND))
        else:
            return None
        self._last = Announced(stats.last_lease, remind_in, now + remind_in)
        return reason

    def seconds_left(self, stats: QueueStats, now: float) -> float | None:
        """Until the answer may be another although nothing changes."""
        return self._thresholds.seconds_left(stats) if self._last is None else max(0.0, self._last.remind_at - now)


def _is_later(moment: datetime | None, than: datetime | None) -> bool:
    return moment is not None and (than is None or moment > than)


class QewQewEventTrigger(BaseEventTrigger):
    """Starts a run for each batch that is ready, as the trigger of an `AssetWatcher`; never defer a task to it.

    When it is ready is said as for `QewQewSensor`. The run must lease, not count on what the event says: by then there may
    be more, or another run has taken it. Announced is once for each batch: again after a lease if the queue is ready then,
    and as a reminder when nobody leases. All triggers of a queue or reader share the looks at it.

    The payload of the event is what `QewQewSensor` returns, and max_records.

    :param queue_name: file name of the queue in the connection's directory
    :param topic: instead of queue_name: name of the topic there
    :param reader: whose messages of the topic
    :param filter: which tags these have; see `QewQewSensor`
    :param start: where a reader begins that does not exist yet, and that the trigger then makes
    :param min_records: number of records, from 1
    :param min_bytes: bytes of records, from 1
    :param max_age: timedelta or seconds, from 0.001 s to ten years
    :param max_records: what the run is to lease at most, from min_records: for the event's payload, nothing else
    :param qewqew_conn_id: the connection
    :param remind: seconds after which it is announced again that nobody has leased; doubled each time, up to an hour
    :param poll_interval: seconds between two looks at most; default: ``[qewqew] poll_interval`` of Airflow's configuration, 10

    Raises `BadArgument` and `BadPath` for arguments that cannot be meant. What is wrong only in the triggerer (no such
    connection, a directory that cannot be read) is an error in its log, and tried again, at last every minute.
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
            raise BadArgument(f"max_records is {max_records:,}: a batch of that is less than min_records, {min_records:,}")
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
                except BadArgument as error:  # a trigger that fails is started again at once, for ever
                    self.log.error("%s will not start runs: %s", self.source, error)
            reason = announcer.reason(look.stats, clock())
            if (left := announcer.seconds_left(look.stats, clock())) is not None:
                look.again_in(left)
            if reason is not None:
                self.log.info("%s is ready: %s; announced", self.source, reason)
                yield TriggerEvent({**announcement(self.source, look.stats, reason), "max_records": self.max_records})

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Without sharing; Airflow calls this where it has no shared streams."""
        async with contextlib.aclosing(_Producer(self).open_stream()) as stream:
            async for event in self.filter_shared_stream(look async for look, _ in stream):
                yield event


class _Producer(SharedStreamProducer):
    """Looks for all triggers of one queue or reader.

    It has nothing to acknowledge: records stay where they are until a task leases them. But because there is a producer,
    Airflow confirms to each trigger that its announcement was stored, and starts it anew if that fails; it has no memory
    then, and announces again.
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
                # A stream that ended would be started again every second.
                what = f"{source} of connection {conn_id!r}"
                _logger.error("Cannot look at %s, again in %.0f s: %s: %s", what, retry_in, type(error).__name__, error)
            await asyncio.sleep(retry_in)
            retry_in = min(2 * retry_in, LONGEST_RETRY)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        pass
