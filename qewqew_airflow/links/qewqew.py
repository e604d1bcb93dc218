"""Links from a task to its batch on the page, and to Spark's UI while its job runs.

The first is relative, so that it also works behind a proxy's prefix. Airflow shows the page in its own frame.
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
    """The page of a task's queue or topic, at the batch that the task works or has worked on."""

    name = "QewQew"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        task: Any = operator
        place = {"queue": task.queue_name} if task.queue_name else {"topic": task.topic}
        # Operators that end a lease name another task's batch. For all others, the key of the task instance finds it.
        batch = getattr(task, "batch", None)
        if isinstance(batch, Mapping):
            batch = batch.get("batch_id")
        if batch is not None:
            sought = {"batch": batch}
        else:
            sought = {"key": make_key(ti_key.dag_id, ti_key.run_id, ti_key.task_id, ti_key.map_index)}
        return "plugin/qewqew?" + urlencode({"connection": task.qewqew_conn_id, **place, **sought})


class SparkLink(BaseOperatorLink):
    """The UI of the Spark job while it runs. The task stores its address (`tell`) when spark-submit prints it."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        return ""  # the task has ended, and the UI with it

    def tell(self, task_instance: Any, url: str) -> None:
        """Show the link from now on."""
        task_instance.xcom_push(key=self.xcom_key, value=url)
