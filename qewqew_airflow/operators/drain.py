"""Append what many tasks and hosts have published under one prefix to one table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qewqew_airflow import errors
from qewqew_airflow.arguments import is_rendered_later, place
from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.links.qewqew import SparkLink
from qewqew_airflow.operators import spark_job
from qewqew_airflow.operators.spark_operator import SparkJobOperator
from qewqew_airflow.operators.spark_worker import end_with_supervisor
from qewqew_airflow.shared.masking import masked
from qewqew_core import BadArgument

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


class QewQewDrainOperator(SparkJobOperator):
    """Submits the drain: all batches that are complete under a prefix become one commit of a table, and leave the prefix.

    Nothing is leased, and any worker may run it. A batch is under the prefix, or in the table, or for a moment both. So a
    retry, a cleared task, or a second drain at once appends each batch once. What happens when:

    - nothing is under the prefix: it succeeds, with no ``batches``.
    - it is killed: its driver dies with it (in cluster mode the next try waits for it). The next drain goes on.
    - some batches are damaged: all others are committed, the result is in XCom, and then the task fails without retries
      (`DamagedBatches`), so that somebody looks after them. The next run tries them again.

    Returns (XCom) what the job reports: batches (the ids that it has committed), removed, left, damaged, codec, read, good,
    bad, reasons, outputs (with the snapshot), quarantine, note and seconds; nothing in cluster mode, where the driver's files
    are elsewhere. The numbers and the snapshot are also in the ``extra`` of the events of the assets among its ``outlets``.

    :param prefix: directory or URL under which batches are published or staged, and nothing else is (templated). The store's
        client takes its credentials from the environment, and other options from read_options, as ``fs.NAME``
    :param outputs: one dict, with ``table`` or ``path``, ``format`` "iceberg" or "delta", and as needed ``sql``, ``transform``,
        ``partition_by``, ``options``, ``commit``, ``keys`` … (templated)

    ``codec``, ``schema``, ``read_options``, ``quarantine`` (of the job: required unless the output has a path),
    ``max_bad_records``, ``schema_evolution`` and ``rescued`` are those of `QewQewSparkSubmitOperator`; all other parameters
    are those of SparkSubmitOperator. `BadArgument` fails the task without retries. Raises `SparkConnectionMissing`,
    `SparkSubmitNotFound`, `JavaNotFound`, and `SparkJobFailed`.
    """

    job = "drain.py"
    template_fields: Sequence[str] = (*SparkJobOperator.template_fields, "prefix")
    operator_extra_links = (SparkLink(),)

    def __init__(self, *, prefix: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prefix = prefix
        if self.application or self.application_args is not None:
            raise BadArgument("the application of a drain is drain.py; for one of your own, use SparkSubmitOperator")
        self._check_job()

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]  # the provider returns nothing
        end_with_supervisor()
        try:
            with errors.no_retry_for_the_hopeless():
                self._check_job()
                self._check_worker()
            self._result = self._run(context, self.prefix, partial(self._arguments, self.prefix))
        except BaseException:  # AirflowTaskTimeout is a BaseException, and leaves Spark running
            self._kill_driver()
            raise
        self._forget_driver(context)
        self._tell(context, self._result)
        return self._result

    def _check_job(self) -> None:
        super()._check_job()
        self.prefix = place("prefix", self.prefix)
        if isinstance(self.outputs, (list, tuple)) and not is_rendered_later(self.outputs):
            spark_job.check_drain(self.outputs)

    def _tell(self, context: Context, report: dict[str, Any]) -> None:
        """The numbers and snapshots for the events of assets."""
        figures: dict[str, Any] = {name: report[name] for name in ("read", "good", "bad") if name in report}
        figures |= {name: len(report[name]) for name in ("batches", "damaged") if name in report}
        write_counts(context, self.outlets, {"prefix": self.prefix, **figures, **spark_job.snapshots(report)})

    def _after_all(self, context: Context, result: str, reason: str) -> None:
        report = masked(spark_job.read_result(result))
        if not report.get("damaged"):
            return
        self._result = report
        self._forget_driver(context)
        context["ti"].xcom_push(key="return_value", value=report)
        for batch, why in report["damaged"].items():
            self.log.error("The batch %s is damaged and left out: %s", batch, why)
        advice = "Publish them again, or move them away; the next run tries them again"
        raise errors.fails_at_once(errors.DamagedBatches(reason, path=self.prefix), advice)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, written_output

        return lineage(outputs=[written_output(output, self._conn_id) for output in self._written()])
