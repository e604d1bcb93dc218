"""Wait until enough has gathered in a queue, or for a reader of a topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.providers.common.compat.sdk import AirflowException, AirflowSensorTimeout, AirflowSkipException
from airflow.sdk import BaseSensorOperator, PokeReturnValue

from qewqew_airflow import errors
from qewqew_airflow.errors import no_retry_for_the_hopeless
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.links.qewqew import QewQewLink
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.readiness import Thresholds, announcement
from qewqew_airflow.shared.source import Source, Start
from qewqew_core import errors as core_errors

if TYPE_CHECKING:
    from airflow.sdk import Context

READY = "ready"  # the key of what was seen, in the task's state store, which lives as long as the run


class QewQewSensor(BaseSensorOperator):
    """Waits until a queue or a reader has enough for a batch. It reads without the queue's lock, so nobody waits for it.

    A queue (or a reader) is ready when it reaches any of the thresholds: ``min_records`` records, ``min_bytes`` bytes, or
    an oldest record older than ``max_age`` (a record of unknown age, from a Java program, counts as older). Without a
    threshold, one record is enough. A batch that was returned (its task failed), or whose lease has ended (its task was
    killed), always makes it ready once it is due (``retry_delay`` of the connection).

    A sensor that was ready once in a DAG run is ready at once when it is cleared (from Airflow 3.3), because the run has
    its batch already, whatever is in the queue now.

    Returns (XCom) what it saw: queue (or topic and reader), ready (the reason), records, bytes, oldest (ISO 8601 or None),
    and numbers of batches: returned (including those whose lease has ended) and leased.

    With ``deferrable`` it looks once and then waits in the triggerer, which must have the directory too. It needs no
    worker, and is ready within a second or two. ``mode`` then has no effect, and ``poke_interval`` is the longest pause
    between two looks where the file system does not report changes (NFS).

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated); messages are its records
    :param reader: whose messages of the topic are waited for (templated)
    :param filter: which tags these have (templated); without it the reader keeps its filter. Give the sensor and the
        Spark operator the same. To count with a filter, the sensor reads the messages that wait
    :param start: where a new reader begins: "oldest", "latest", the number of a message, or a datetime
    :param min_records: number of records, from 1 (templated)
    :param min_bytes: bytes of records, from 1 (templated)
    :param max_age: timedelta or seconds, from 0.001 s to ten years (templated)
    :param qewqew_conn_id: the connection (templated)
    :param deferrable: wait in the triggerer; default: Airflow's ``[operators] default_deferrable``

    Fails at once and without retries for `BadArgument` (thresholds out of range, or above what the connection lets a queue
    hold) and `BadPath` (a name or connection that is wrong). It fails, and may be retried, if the directory is not there, or this
    user may not read or write there. With ``soft_fail``, only a time-out skips the task.
    """

    template_fields: Sequence[str] = (
        *("queue_name", "topic", "reader", "filter", "start"),
        *("min_records", "min_bytes", "max_age", "qewqew_conn_id"),
    )
    operator_extra_links = (QewQewLink(),)
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
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
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
        self.deferrable = deferrable
        self._prepared = False
        self._source()
        self._thresholds()  # so a wrong number is an import error of the DAG file

    @no_retry_for_the_hopeless()
    def execute(self, context: Context) -> Any:
        store = context.get("task_state_store")
        before: Any = store.get(READY) if store is not None else None
        if before:
            self.log.info("Not waiting again: %s was already ready in this run (%s)", self._source(), before["ready"])
            return before
        return self._remember(context, super().execute(context))

    @no_retry_for_the_hopeless()
    def resume_execution(self, *args: Any, **kwargs: Any) -> Any:
        """With soft_fail, Airflow would skip the task whatever has happened. That is for time-outs only, as in other modes."""
        try:
            return super().resume_execution(*args, **kwargs)
        except AirflowSensorTimeout as late:
            if self.soft_fail:  # some versions of Airflow do not look at it
                raise AirflowSkipException(str(late)) from late
            raise
        except AirflowSkipException as skipped:
            if not self.soft_fail or isinstance(skipped.__cause__, AirflowSensorTimeout | None):
                raise
            raise skipped.__cause__ from None

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Called when the trigger has fired."""
        if "error" in event:
            if self.never_fail:
                raise AirflowSkipException(f"never_fail: {event['message']}")
            raise self._error(event)
        self.log.info("Ready, %s: %s", event["ready"], event)
        return self._remember(context, event)

    def _error(self, event: dict[str, Any]) -> Exception:
        """The error of the triggerer, as the task itself would raise it."""
        name, said = event["error"], f"in the triggerer: {event['message']}"
        kind = getattr(errors, name, None) or getattr(core_errors, name, None)
        if kind is None:
            return AirflowException(f"{name} {said}")
        error: Exception = kind(said)
        if isinstance(error, OSError):
            error.errno = event.get("errno")
        return error

    def _remember(self, context: Context, ready: Any) -> Any:
        store = context.get("task_state_store")
        if store is not None and ready:
            store.set(READY, ready)
        return ready

    def poke(self, context: Context) -> PokeReturnValue:
        hook, source, thresholds = QewQewHook(self.qewqew_conn_id), self._source(), self._thresholds()
        if not self._prepared:
            if source.topic is None:
                thresholds.check_bounds(hook.settings())
            source.prepare(hook)
            self._prepared = True
        stats = source.look(hook)
        metrics.gauge(hook, source, stats)
        reason = thresholds.reason(stats)
        self.log.info(
            "In %s: %s records, %s bytes, oldest %s, %d batches returned (%d of them not due yet), %d leased: %s",
            source,
            f"{stats.records:,}",
            f"{stats.bytes:,}",
            stats.oldest or "-",
            stats.returned,
            stats.delayed,
            stats.leased,
            f"ready, {reason}" if reason else "not ready",
        )
        if reason:
            return PokeReturnValue(True, announcement(source, stats, reason))
        if self.deferrable:
            self._defer(source, thresholds)
        return PokeReturnValue(False)

    def _defer(self, source: Source, thresholds: Thresholds) -> None:
        from qewqew_airflow.triggers.qewqew import QewQewReadyTrigger  # late, because DAG files do not need it

        # The reader exists by now and has this filter.
        names = Source(source.queue_name, source.topic, source.reader)
        self.defer(
            trigger=QewQewReadyTrigger(
                qewqew_conn_id=self.qewqew_conn_id,
                source=asdict(names),
                thresholds=asdict(thresholds),
                poll_interval=max(self.poke_interval, 0.1),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def _source(self) -> Source:
        return Source(self.queue_name, self.topic, self.reader, self.filter, self.start)

    def _thresholds(self) -> Thresholds:
        return Thresholds.of({name: getattr(self, name) for name in ("min_records", "min_bytes", "max_age")})
