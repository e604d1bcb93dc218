"""Hand one batch of a queue or topic to one Spark job, and acknowledge it when the job has succeeded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import AirflowSkipException

from qewqew_airflow import errors
from qewqew_airflow.arguments import LIMITS
from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_key
from qewqew_airflow.links.qewqew import QewQewLink, SparkLink
from qewqew_airflow.operators import spark_job
from qewqew_airflow.operators.batch import is_last_try, lease, numbers, return_leased
from qewqew_airflow.operators.spark_operator import SparkJobOperator
from qewqew_airflow.operators.spark_worker import end_with_supervisor
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.source import Source, Start
from qewqew_core import BadArgument, Batch
from qewqew_core.batch import published
from qewqew_core.batch.store import store_of
from qewqew_core.tools.listing import Kind

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


class QewQewSparkSubmitOperator(SparkJobOperator):
    """Leases one batch under the task's key, submits a Spark job on it, and acknowledges it after success.

    The queue is open only to lease, to extend the lease, and to acknowledge. While Spark runs, others can use it. A topic
    is used through a reader: what is said of a queue here holds for a reader.

    What happens when (all tries of a task, and the cleared task, have the same key, see `task_key`):

    - success: the batch is acknowledged.
    - a failure with retries left: the lease stays, and the next try works on the same batch.
    - the last failure (no retries left, `AirflowFailException`, or by a retry policy): the batch is returned with the
      reason, and the next lease, in any run, gets it first once it is due. After max_attempts it goes to the dead letters.
    - killed, or marked by a user: the lease stays, and the next try or the cleared task works on the same batch. Spark's
      driver on this worker dies with the task, and the task with its supervisor. If an earlier try still works on the
      batch, the next one waits for its end.
    - killed in cluster mode (kill -9, lost worker): the driver goes on elsewhere. The next try waits for it instead of
      submitting again (``durable`` of SparkSubmitOperator, from Airflow 3.3), then acknowledges.
    - killed with lease_timeout, and not retried: the lease ends lease_timeout after it was last extended, and the next
      lease, in any run, gets the batch first.
    - the lease could not be extended in time (`LeaseLost`): Spark's driver is killed and the task fails. The next try gets
      the batch unless another task has it.
    - cleared after success: the same batch is processed again. The second acknowledgement does nothing.
    - cleared after the batch's retention: fails without retries (`BatchExpired`).
    - nothing to lease: the task is skipped.

    So a batch may be processed more than once, but is never partly acknowledged. The job must write by batch id, as the
    ready-made job does.

    Returns (XCom) batch_id, attempt, records, bytes, and what the job reports. The ready-made job reports codec, read,
    good, bad, reasons, outputs (for each: written, and for an Iceberg or Delta table the snapshot), quarantine, note and
    seconds, but not in cluster mode, where the driver's files are elsewhere. The numbers and snapshots are also in the
    ``extra`` of the events of the assets among its ``outlets``.

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param reader: whose messages of the topic are leased (templated); each reader gets all of them
    :param filter: which tags these have (templated); without it the reader keeps its filter
    :param start: where a new reader begins: "oldest", "latest", the number of a message, or a datetime
    :param qewqew_conn_id: the connection of the queue or topic (templated)
    :param max_records: at most this many records in the batch
    :param max_bytes: at most this many bytes in the batch
    :param lease_timeout: timedelta or seconds, from 1 s: how long the lease lasts. While the task lives, it extends the
        lease every third of that. Without it a lease lasts until the batch is returned or acknowledged. Choose at least
        twice the pause before a retry, or another run may get the batch first; 1800 suits most DAGs
    :param publish_to: URL of an object store, or a directory, to which the batch is copied before the job is submitted
        (templated). The job then reads ``URL/ID/manifest.json``, and needs nothing of this worker's disk. The store's
        client takes its credentials from the environment. The copy is removed after the acknowledgement; until then
        another try sends only what is missing
    :param outputs: what the ready-made job writes: a list of dicts with ``path`` or ``table`` and, as needed,
        ``sql`` (over the view ``batch``) or ``transform`` (``module:function``), ``format`` (default parquet),
        ``partition_by`` (list of columns), ``options`` (dict of the format's options; a password as
        ``{"env": NAME}`` or ``{"file": PATH}``), ``commit`` (templated). Each is overwritten under the batch's id. An
        Iceberg or Delta table gets the batch appended once, with ``commit`` "spark" through Spark's own connector; with
        ``keys`` (list of columns), ``order_by`` and ``operation`` its rows replace or remove those with the same keys
    :param codec: what the records are: json (default), csv, avro, msgpack, text or bytes (templated)
    :param schema: of the records, as Spark DDL (templated); without it Spark infers it from JSON records
    :param read_options: dict of options of the data source or codec (templated)
    :param quarantine: path for records that do not decode (templated); default: the path of the first output with
        ``-quarantine`` appended
    :param max_bad_records: the job fails when more records do not decode
    :param schema_evolution: when a batch has other columns than the table: "merge" (default), "fail", "ignore" or "rescue"
    :param rescued: name of a column for what the schema does not name, as JSON (templated); by default it is only counted
    :param application: your own job instead of the ready-made one (templated). Its ``application_args`` must hold
        ``{manifest}`` (path or URL of the batch's manifest), and may hold ``{batch_id}`` and ``{result}`` (a file on this
        worker into which it may write a JSON object for the XCom). By default the manifest is its only argument

    All other parameters are those of SparkSubmitOperator. ``PYSPARK_PYTHON`` is this Python unless ``env_vars`` or the
    environment set it. A spark-submit that is not on PATH is looked for beside this Python.

    `BadArgument` and `BadPath` fail the task without retries, before anything is leased. If the ready-made job raises
    `BadArgument` (a schema that Spark does not take, a table of another kind), there are no retries either, and the batch
    is returned. Raises `SparkConnectionMissing`, `SparkSubmitNotFound`, `JavaNotFound` before anything is leased,
    `SparkJobFailed`, and `LeaseLost`.
    """

    template_fields: Sequence[str] = (
        *SparkJobOperator.template_fields,
        *("queue_name", "topic", "reader", "filter", "start", "qewqew_conn_id", "publish_to", *LIMITS),
    )
    operator_extra_links = (QewQewLink(), SparkLink())
    checks: ClassVar = {**SparkJobOperator.checks, **LIMITS}

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        reader: str | None = None,
        filter: str | None = None,
        start: Start = "oldest",
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        max_records: int | str | None = None,
        max_bytes: int | str | None = None,
        lease_timeout: timedelta | float | str | None = None,
        publish_to: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.topic = topic
        self.reader = reader
        self.filter = filter
        self.start = start
        self.qewqew_conn_id = qewqew_conn_id
        self.max_records: Any = max_records
        self.max_bytes: Any = max_bytes
        self.lease_timeout: Any = lease_timeout
        self.publish_to = publish_to
        self._source()
        self._check_job()

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]  # the provider returns nothing
        hook = QewQewHook(self.qewqew_conn_id)
        key = task_key(context)
        end_with_supervisor()
        try:
            with errors.no_retry_for_the_hopeless():
                self._check_job()
                self._source().path(hook)
                self._check_worker()
                leased = lease(hook, self._source(), key, self.max_records, self.max_bytes, self.lease_timeout)
            batch = leased.batch
            with leased.alone(self._kill_driver):
                with leased.extended(self._kill_driver):
                    with errors.no_retry_for_the_hopeless():
                        manifest = batch.manifest_path if self.publish_to is None else self._publish(batch)
                    report = self._submit(context, batch, manifest)
                leased.acknowledge()
            self._clean_up(context, manifest)
        except AirflowSkipException:
            raise
        except BaseException as error:  # AirflowTaskTimeout is a BaseException
            self._after_failure(context, hook, key, error)
            raise
        self._result = {**numbers(batch), **leased.oldest, **report}
        self._tell(context, batch, report)
        return self._result

    def _tell(self, context: Context, batch: Batch, report: dict[str, Any]) -> None:
        """The numbers and snapshots for the events of assets, and the metric of bad records."""
        names = self._source().names()
        figures: dict[str, Any] = {name: report[name] for name in ("read", "good", "bad") if name in report}
        if self._ready_made:
            metrics.count("bad", report.get("bad", 0), connection=self.qewqew_conn_id, **names)
            figures |= spark_job.snapshots(report)
        write_counts(context, self.outlets, {**names, **numbers(batch), **figures})

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, of_queue, written_output

        queue = of_queue(self.qewqew_conn_id, str(self.queue_name or self.topic))
        return lineage([queue], [written_output(output, self._conn_id) for output in self._written()])

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, of_queue

        return lineage([of_queue(self.qewqew_conn_id, str(self.queue_name or self.topic))])

    def _source(self) -> Source:
        return Source(self.queue_name, self.topic, self.reader, self.filter, self.start)

    # Before the lease: check what can be checked, so that a wrong argument or worker leases nothing.

    def _check_job(self) -> None:
        super()._check_job()
        if not self._ready_made:
            for name in ("outputs", *spark_job.JOB_ARGUMENTS):
                if getattr(self, name) is not None:
                    raise BadArgument(f"{name} is for the ready-made job; pass it to your own application in application_args")
            if not any("{manifest}" in str(argument) for argument in self.application_args or ["{manifest}"]):
                raise BadArgument("application_args must hold {manifest}, or the application cannot find its batch")
        elif self.application_args is not None:
            raise BadArgument("application_args are for an application of your own; the ready-made job takes outputs instead")

    # Submit.

    def _publish(self, batch: Batch) -> str:
        """Copy the batch to ``publish_to``. Returns the URL of its manifest."""
        begun = time.monotonic()
        url = batch.publish(str(self.publish_to))
        self.log.info("Published batch %s at %s in %.1f s", batch.id, url, time.monotonic() - begun)
        return f"{url}/manifest.json"

    def _submit(self, context: Context, batch: Batch, manifest: str) -> dict[str, Any]:
        # A driver's id is for tries on this same batch: a batch that was put back may leave its id to another.
        self.external_id_key = f"spark_job_id.{batch.id}.{batch.made}"
        self._K8S_DRIVER_STATUS_KEY = f"k8s_driver_status.{batch.id}.{batch.made}"
        given = self.application_args or ["{manifest}"]

        def arguments(result: str) -> list[str]:
            if self._ready_made:
                return self._arguments(manifest, result)
            return spark_job.fill_in(given, manifest=manifest, batch_id=batch.id, result=result)

        report = self._run(context, f"batch {batch.id}", arguments)
        report.pop("batch", None)  # it is the batch_id
        return report

    def _advice(self, reason: str) -> str:
        if self.publish_to is None and re.search(r"\b(Corrupt|BadManifest): ", reason):
            source, hook = self._source(), QewQewHook(self.qewqew_conn_id)
            kind = Kind.QUEUE if source.topic is None else Kind.TOPIC
            return f". {errors.remedy_of(source.path(hook), kind, reason)}"
        return ""

    def _clean_up(self, context: Context, manifest: str) -> None:
        """After the acknowledgement: forget the driver, remove the copy. A failure here does not undo the acknowledgement."""
        try:
            self._forget_driver(context)
            if self.publish_to is not None:
                store_of(os.path.dirname(manifest)).remove(published.FILES)
        except Exception as error:
            self.log.warning("Something of the acknowledged batch could not be removed: %s", error)

    # After a failure.

    def _after_failure(self, context: Context, hook: QewQewHook, key: str, error: BaseException) -> None:
        stays = "stays" if self.lease_timeout is None else f"stays for at most {self.lease_timeout:g} s"
        if self._killed:
            self.log.info("Killed: a lease under %s %s, for the next try or the cleared task", key, stays)
            return
        lost = isinstance(error, errors.LeaseLost)
        if not lost and not is_last_try(self, context, error):
            ti = context["ti"]
            self.log.info(
                "Try %d of %d failed: a lease under %s %s, for the next try", ti.try_number, ti.max_tries + 1, key, stays
            )
            return
        self._kill_driver()  # a time-out leaves Spark running, and nobody may lease the batch while Spark writes
        if not lost:  # else a lease under the key is now another try's
            return_leased(hook, self._source(), key, error)
