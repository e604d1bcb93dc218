"""Wait until enough has gathered in a queue, or for a reader of a topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue

from qewqew_airflow.arguments import is_rendered_later, seconds, whole
from qewqew_airflow.hooks import QewQewHook
from qewqew_airflow.source import Source, Start
from qewqew_core import QueueStats

if TYPE_CHECKING:
    from airflow.sdk import Context

READY = "ready"  # the key in the task's state store, which lives as long as the run: what was seen
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "min_records": whole,
    "min_bytes": whole,
    "max_age": lambda name, value: seconds(name, value, low=0.001),
}


class QewQewSensor(BaseSensorOperator):
    """Waits until a queue or a reader is worth a batch; reads it without its lock, so nobody waits for the sensor.

    Ready is a queue (or reader, of which all that follows is true too) that reached any of the thresholds
    that are given: at least ``min_records`` records, at least ``min_bytes`` bytes, or an oldest record older
    than ``max_age`` (a record of unknown age, as a Java program leaves it, counts as older). With no threshold
    given, one record is enough. A batch that was returned (by the last failure of a task), or of which the
    lease time is over (its task was killed), is always ready.

    A sensor that was ready once in a DAG run is ready at once when it is cleared: the run's batch is
    the one it leased then, whatever is in the queue now.

    Returns (XCom) what it saw: queue (or topic and reader), ready (the reason), records, bytes, oldest
    (ISO 8601 or None), returned (leases whose time is over included) and leased (numbers of batches).

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated); messages are its records
    :param reader: whose messages of the topic are waited for (templated)
    :param filter: which tags these have (templated); without it what the reader was given before. Give sensor
        and Spark operator the same. The messages that wait must be read to count those that match
    :param start: where a reader begins that does not exist yet, and that the sensor then makes: "oldest",
        "latest", the number of a message, or a datetime
    :param min_records: number of records, from 1 (templated)
    :param min_bytes: bytes of records, from 1 (templated)
    :param max_age: timedelta or seconds, from 0.001 s to ten years (templated)
    :param qewqew_conn_id: the connection (templated)

    Raises `BadArgument` for thresholds out of range, and `BadPath` when the directory does not exist or
    cannot be read: the task fails at once, it does not wait.
    """

    template_fields: Sequence[str] = (
        *("queue_name", "topic", "reader", "filter"),
        *("min_records", "min_bytes", "max_age", "qewqew_conn_id"),
    )
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        reader: str | None = None,
        filter: str | None = None,
        start: Start = "oldest",
        min_records: int | str | None = None,
        min_bytes: int | str | None = None,
        max_age: timedelta | float | str | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.topic = topic
        self.reader = reader
        self.filter = filter
        self.start = start
        self.min_records = min_records
        self.min_bytes = min_bytes
        self.max_age = max_age
        self.qewqew_conn_id = qewqew_conn_id
        self._prepared = False
        self._source()
        self._thresholds()  # a wrong number is an error of the DAG file, shown before any run

    def execute(self, context: Context) -> Any:
        store = context.get("task_state_store")
        before: Any = store.get(READY) if store is not None else None
        if before:
            self.log.info("Not waiting again: %s was ready in this run before (%s)", self._source(), before["ready"])
            return before
        seen = super().execute(context)
        if store is not None and seen:
            store.set(READY, seen)
        return seen

    def poke(self, context: Context) -> PokeReturnValue:
        hook, source = QewQewHook(self.qewqew_conn_id), self._source()
        if not self._prepared:
            source.prepare(hook)
            self._prepared = True
        stats = source.inspect(hook)
        reason = self._reason(stats)
        self.log.info(
            "In %s: %s records, %s bytes, oldest %s, %d batches returned, %d leased: %s",
            source,
            f"{stats.records:,}",
            f"{stats.bytes:,}",
            stats.oldest or "-",
            stats.returned,
            stats.leased,
            f"ready, {reason}" if reason else "not ready",
        )
        if not reason:
            return PokeReturnValue(False)
        seen = {
            **source.names(),
            "ready": reason,
            "records": stats.records,
            "bytes": stats.bytes,
            "oldest": stats.oldest and stats.oldest.isoformat(),
            "returned": stats.returned,
            "leased": stats.leased,
        }
        return PokeReturnValue(True, seen)

    def _source(self) -> Source:
        return Source(self.queue_name, self.topic, self.reader, self.filter, self.start)

    def _thresholds(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in CHECKS if getattr(self, name) is not None}
        return {name: CHECKS[name](name, value) for name, value in given.items() if not is_rendered_later(value)}

    def _reason(self, stats: QueueStats) -> str | None:
        """Which condition the queue meets, as text; None: none of them."""
        if stats.returned:
            return "a batch waits that was returned, or of which the lease time is over"
        if not stats.records:
            return None
        thresholds = self._thresholds() or {"min_records": 1}
        if stats.records >= thresholds.get("min_records", stats.records + 1):
            return f"at least {thresholds['min_records']:,} records"
        if stats.bytes >= thresholds.get("min_bytes", stats.bytes + 1):
            return f"at least {thresholds['min_bytes']:,} bytes"
        if "max_age" in thresholds and (stats.oldest is None or datetime.now(UTC) - stats.oldest > thresholds["max_age"]):
            return f"a record older than {thresholds['max_age']}"
        return None
