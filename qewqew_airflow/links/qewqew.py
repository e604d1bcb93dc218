"""From a task to its queue on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


class QewQewLink(BaseOperatorLink):
    """The queue or topic of an operator or sensor. Relative, so that it holds behind a proxy's prefix too."""

    name = "QewQew"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        task: Any = operator
        return "qewqew/page?" + urlencode({"connection": task.qewqew_conn_id, "name": task.queue_name or task.topic})
