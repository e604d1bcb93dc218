"""Lease a batch in one task, work on it with any engine in others, and acknowledge or return it in a last one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException
from airflow.sdk import BaseOperator, TriggerRule, XComArg

from qewqew_airflow.arguments import LIMITS, is_rendered_later, read_arguments
from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.errors import fails_at_once, no_retry_for_the_hopeless
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import make_key, task_key
from qewqew_airflow.links.qewqew import QewQewLink
from qewqew_airflow.operators.batch import lease, numbers, still_ours
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.masking import masked
from qewqew_airflow.shared.source import Source, Start
from qewqew_core import BadArgument, Batch, BatchConflict, BatchExpired, BatchNotFound, Queue, Reader

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


_AFTER_WORK = TriggerRule.ALL_SUCCESS, TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS
_UNDONE = "it would acknowledge a batch on which the work has failed or was skipped, and its records would be lost"


class LeasingOperator(BaseOperator):
    """What operators have in common that lease one batch: from where, and how much."""

    template_fields: Sequence[str] = ("queue_name", "topic", "reader", "filter", "start", *LIMITS, "qewqew_conn_id")
    operator_extra_links = (QewQewLink(),)

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        reader: str | None = None,
        filter: str | None = None,
        start: Start = "oldest",
        max_records: int | str | None = None,
        max_bytes: int | str | None = None,
        lease_timeout: timedelta | float | str | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.topic = topic
        self.reader = reader
        self.filter = filter
        self.start = start
        self.max_records: Any = max_records
        self.max_bytes: Any = max_bytes
        self.lease_timeout: Any = lease_timeout
        self.qewqew_conn_id = qewqew_conn_id
        self._source()
        read_arguments(self, LIMITS)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, of_queue

        return lineage(inputs=[of_queue(self.qewqew_conn_id, str(self.queue_name or self.topic))])

    def _source(self) -> Source:
        return Source(self.queue_name, self.topic, self.reader, self.filter, self.start)


class QewQewLeaseOperator(LeasingOperator):
    """Leases one batch of a queue, or of a reader of a topic, under the task's key (`task_key`), for the tasks that follow.

    Follow it with the tasks that work on the batch, then with `QewQewAckOperator` and `QewQewNackOperator`. Give both this
    task's output. Every try of this task, and the cleared task, leases the same batch again. That includes a batch that was
    acknowledged, which is then processed again, and one that was returned, unless another run has it by now
    (`BatchConflict`). If there is nothing to lease, the task and those that follow are skipped. Each mapped task and each
    run has its own batch.

    Nothing extends the lease after this task has ended, so ``lease_timeout`` must cover all the work, with retries and
    waiting. When it is over, the next lease in any run gets the batch, and the acknowledgement fails. Without it the lease
    lasts until the batch is acknowledged or returned.

    Returns (XCom) connection, queue (or topic and reader), batch_id, key, attempt, records, bytes, and manifest: the path
    on this worker of the batch's manifest, which `qewqew_core.batch.manifest.load` and Spark's format ``qewqew`` read.

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param reader: whose messages of the topic are leased (templated)
    :param filter: which tags these have (templated); without it the reader keeps its filter
    :param start: where a new reader begins: "oldest", "latest", the number of a message, or a datetime
    :param max_records: at most this many records in the batch (templated)
    :param max_bytes: at most this many bytes in the batch (templated)
    :param lease_timeout: timedelta or seconds, from 1 s
    :param qewqew_conn_id: the connection (templated)

    Raises `BadArgument`, `BadPath`, `Locked`, `BatchConflict`; fails without retries if the batch has expired.
    """

    ui_color = "#fff2cc"

    @no_retry_for_the_hopeless()
    def execute(self, context: Context) -> dict[str, Any]:
        hook, source = QewQewHook(self.qewqew_conn_id), self._source()
        read_arguments(self, LIMITS)
        leased = lease(hook, source, task_key(context), self.max_records, self.max_bytes, self.lease_timeout)
        batch = leased.batch
        names = {"connection": self.qewqew_conn_id, **source.names()}
        return {**names, **numbers(batch), **leased.oldest, "key": batch.key, "manifest": batch.manifest_path}


class _EndLeaseOperator(BaseOperator):
    """What Ack and Nack share."""

    template_fields: Sequence[str] = ("batch", "queue_name", "topic", "reader", "qewqew_conn_id")
    template_fields_renderers = {"batch": "json"}  # noqa: RUF012  (as Airflow declares it)
    operator_extra_links = (QewQewLink(),)
    ui_color = "#d9d2e9"

    def __init__(
        self,
        *,
        batch: Mapping[str, Any] | str | XComArg,
        queue_name: str | None = None,
        topic: str | None = None,
        reader: str | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.batch = batch
        self.queue_name = queue_name
        self.topic = topic
        self.reader = reader
        self.qewqew_conn_id = qewqew_conn_id
        if (queue_name, topic, reader) != (None, None, None):
            self._source()
        elif isinstance(batch, str) and not is_rendered_later(batch):
            raise BadArgument("batch is an id: give its queue_name, or topic and reader, or give the lease task's output instead")

    @no_retry_for_the_hopeless()
    def execute(self, context: Context) -> dict[str, Any]:
        self._take_output()
        if self.batch is None:
            raise AirflowSkipException("the lease task has no batch: there is nothing to do")
        hook, source = QewQewHook(self.qewqew_conn_id), self._source()
        try:
            with self._open(hook, source) as opened:
                batch = self._find(opened, context)
                changed = self._end(batch)
        except (BatchConflict, BatchExpired, BatchNotFound) as error:
            raise fails_at_once(error, "A retry cannot help; clear the lease task to lease what is there now") from error
        if changed:
            metrics.ended(batch, connection=self.qewqew_conn_id, **source.names())
        metrics.gauge(hook, source)
        result = {**source.names(), **numbers(batch), "state": batch.state}
        write_counts(context, self.outlets, result)
        return result

    def _end(self, batch: Batch) -> bool:
        """End the lease of this batch, which is ours. False if that was done before."""
        raise NotImplementedError

    def _take_output(self) -> None:
        """If batch is a lease task's output, take the queue from it."""
        if isinstance(self.batch, str) and self.batch.lstrip().startswith("{"):  # {{ … | tojson }}, or params
            self.batch = json.loads(self.batch)
        if not isinstance(self.batch, Mapping):
            return
        if missing := {"connection", "batch_id", "key", "attempt"} - set(self.batch):
            raise BadArgument(f"batch is not the output of a lease task: it lacks {', '.join(sorted(missing))}")
        self.qewqew_conn_id = self.batch["connection"]
        self.queue_name, self.topic, self.reader = (self.batch.get(name) for name in ("queue", "topic", "reader"))

    def _source(self) -> Source:
        return Source(self.queue_name, self.topic, self.reader)

    def _open(self, hook: QewQewHook, source: Source) -> AbstractContextManager[Queue | Reader]:
        if source.topic is not None and not source.may_have_leases(hook):  # opening it would create it
            raise BatchNotFound(f"there is no {source}", path=source.path(hook))
        return source.open(hook)

    def _find(self, opened: Queue | Reader, context: Context) -> Batch:
        if isinstance(self.batch, Mapping):
            return still_ours(opened, self.batch["batch_id"], self.batch["key"], self.batch["attempt"])
        batch = opened.batch(str(self.batch))
        ti = context["ti"]
        run = make_key(ti.dag_id, ti.run_id, "")[:-1]
        if not batch.key.startswith(run):
            raise BatchConflict(
                f"batch {batch.id} was leased by {batch.key}, not by a task of this run; give the lease task's output"
            )
        return batch


class QewQewAckOperator(_EndLeaseOperator):
    """Acknowledges a batch that `QewQewLeaseOperator` leased: the work on it is done, and nobody gets it again.

    Runs if all tasks before it succeeded; with the ``trigger_rule`` "none_failed_min_one_success" also if some were skipped, for
    branches. Other rules, and a teardown, raise `BadArgument` when the DAG is parsed. If it is retried or cleared, it finds the
    batch acknowledged and does nothing. It fails without retries, with the name of the error, if the batch was returned, expired,
    is unknown, or was leased by another task. In that case the work may be there twice, unless it is written by the batch's id.

    Returns (XCom) queue (or topic and reader), batch_id, attempt, records, bytes and state ("acked"). The ``extra`` of the
    events of the assets among its ``outlets`` has the same.

    :param batch: ``lease.output`` of the task that leased it, or the id of a batch that a task of this run leased (templated)
    :param queue_name: file name of the queue (templated); only with an id, like topic, reader and qewqew_conn_id
    :param topic: instead of queue_name: name of the topic (templated)
    :param reader: the reader of the topic (templated)
    :param qewqew_conn_id: the connection (templated)
    """

    def __init__(self, *, trigger_rule: str = TriggerRule.ALL_SUCCESS, **kwargs: Any) -> None:
        if trigger_rule not in _AFTER_WORK:
            raise BadArgument(f"trigger_rule {trigger_rule!r}: {_UNDONE}; use {' or '.join(map(repr, map(str, _AFTER_WORK)))}")
        super().__init__(trigger_rule=trigger_rule, **kwargs)

    def as_teardown(self, **kwargs: Any) -> Any:
        """Raise `BadArgument`: a teardown runs also after work that failed."""
        raise BadArgument(f"a teardown: {_UNDONE}. Put QewQewAckOperator after the work, and QewQewNackOperator beside it")

    def execute(self, context: Context) -> dict[str, Any]:
        if self.is_teardown or self.trigger_rule not in _AFTER_WORK:  # of a mapped task, or set later
            raise AirflowFailException(f"trigger_rule {str(self.trigger_rule)!r}: {_UNDONE}. Nothing was acknowledged")
        return super().execute(context)

    def _end(self, batch: Batch) -> bool:
        before = batch.state
        batch.ack()
        self.log.info("Batch %s: %s", batch.id, "acknowledged" if before == "leased" else "had been acknowledged before")
        return before == "leased"


class QewQewNackOperator(_EndLeaseOperator):
    """Returns a batch that `QewQewLeaseOperator` leased: the work on it failed, and the next lease, in any run, gets it first.

    But not before it is due: the connection's ``retry_delay`` after the first failure, doubled each time.

    Runs if a task directly before it failed: its ``trigger_rule`` is "one_failed". Put it after all tasks that work on the
    batch, because it does not wait for those that still run. After ``max_attempts`` leases the batch becomes a dead letter
    instead. A batch that was returned before, or acknowledged (the task succeeded once and was cleared), stays as it is. It
    fails without retries if the batch is unknown, has expired, or was leased by another task.

    Returns (XCom) what `QewQewAckOperator` returns, with the state "returned", "dead" or "acked". Parameters as there, and:

    :param reason: why; it stays with the batch and is shown with dead letters (templated)
    """

    template_fields: Sequence[str] = (*_EndLeaseOperator.template_fields, "reason")

    def __init__(
        self,
        *,
        reason: str = "a task failed in run {{ run_id }} of {{ dag.dag_id }}",
        trigger_rule: str = TriggerRule.ONE_FAILED,
        **kwargs: Any,
    ) -> None:
        super().__init__(trigger_rule=trigger_rule, **kwargs)
        self.reason = reason

    def _end(self, batch: Batch) -> bool:
        if batch.state != "leased":
            self.log.info("Batch %s is already %s and stays so", batch.id, batch.state)
            return False
        batch.nack(masked(self.reason))
        end = "now a dead letter" if batch.state == "dead" else f"returned, the next lease from {batch.due} on gets it first"
        self.log.info("Batch %s: %s (%s)", batch.id, end, batch.reason)
        return True
