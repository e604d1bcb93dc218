"""From a task to its batch on the page, and to Spark's UI while its job runs.

The first is relative, so that it holds behind a proxy's prefix too: Airflow shows it in its own frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from airflow.sdk import BaseOperatorLink

from qewqew_airflow.keys import make_key

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


class QewQewLink(BaseOperatorLink):
    """The queue or topic of an operator or sensor, and there the batch that the task works, or has worked, on."""

    name = "QewQew"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        task: Any = operator
        place = {"queue": task.queue_name} if task.queue_name else {"topic": task.topic}
        # Of what ends a lease, the batch is another task's. All else has the key of its task instance.
        batch = getattr(task, "batch", None)
        if isinstance(batch, Mapping):
            batch = batch.get("batch_id")
        if batch is not None:
            sought = {"batch": batch}
        else:
            sought = {"key": make_key(ti_key.dag_id, ti_key.run_id, ti_key.task_id, ti_key.map_index)}
        return "plugin/qewqew?" + urlencode({"connection": task.qewqew_conn_id, **place, **sought})


class SparkLink(BaseOperatorLink):
    """The UI of the Spark job while it runs: the task tells its address when spark-submit does, see `tell`."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        return ""  # the task has ended, and the UI with it

    def tell(self, task_instance: Any, url: str) -> None:
        """Show the link from now on."""
        task_instance.xcom_push(key=self.xcom_key, value=url)
