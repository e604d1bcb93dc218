"""A notifier that stages what became of a task or DAG run, so that other DAGs can wait for it and Spark can read it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseNotifier

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import make_key
from qewqew_airflow.shared.masking import masked
from qewqew_airflow.shared.source import check_either
from qewqew_core import BadArgument
from qewqew_core.tools.rows import encode

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context


class QewQewNotifier(BaseNotifier):
    """Stages one record, a JSON object, each time that a callback is called: ``on_failure_callback=QewQewNotifier(…)``, or
    ``DeadlineAlert(…, callback=AsyncCallback(QewQewNotifier, {"queue_name": …}))``.

    It has dag_id, run_id, state and at (ISO 8601); of a DAG run also reason, of a missed deadline deadline (ISO 8601), and of a
    task task_id, map_index, try_number and exception (type and text, or None). If a callback is called twice for the same, it
    stages once. In templates, the callback of a deadline has no more than ``dag_run`` and ``deadline``.

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param extra: a dict with more fields for the record (templated)
    :param qewqew_conn_id: the connection (templated)
    """

    template_fields: Sequence[str] = ("queue_name", "topic", "extra", "qewqew_conn_id")

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        extra: Mapping[str, Any] | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.topic = topic
        self.extra = extra
        self.qewqew_conn_id = qewqew_conn_id
        check_either(queue_name, topic)
        if extra is not None and not isinstance(extra, Mapping):
            raise BadArgument(f"extra must be a dict, not {type(extra).__name__}")
        self._templates = {name: getattr(self, name) for name in self.template_fields}

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        """Render what was given: one process calls the callbacks of several DAGs, which may share a notifier."""
        for name, value in self._templates.items():
            setattr(self, name, value)
        super().render_template_fields(context, jinja_env)

    def notify(self, context: Context) -> None:
        self._stage(QewQewHook(self.qewqew_conn_id), context)

    async def async_notify(self, context: Context) -> None:
        hook = QewQewHook(self.qewqew_conn_id)
        await hook.aload()
        await asyncio.to_thread(self._stage, hook, context)

    def _stage(self, hook: QewQewHook, context: Context) -> None:
        event = event_of(context)
        record = encode({**event, "at": datetime.now(UTC).isoformat(), **masked(self.extra or {})}, 0)
        key = make_key("notice", *event.values())
        if self.topic is not None:
            with hook.topic(self.topic) as topic:
                topic.append_many([record], key=key)
        else:
            assert self.queue_name is not None
            with hook.queue(self.queue_name) as queue:
                queue.put_many([record], key=key)
        self.log.info("Staged a notice of %s into %s", "|".join(map(str, event.values())), self.queue_name or self.topic)


def event_of(context: Context) -> dict[str, Any]:
    """What happened: to the DAG run if this is its callback, to a deadline of it, or else to the task."""
    found: Mapping[str, Any] = context  # that of a deadline, and of a DAG whose tasks are gone, has other things than it says
    if "deadline" in found:
        run, deadline = found["dag_run"], found["deadline"]["deadline_time"]
        missed = deadline if isinstance(deadline, str) else deadline.isoformat()
        return {"dag_id": run["dag_id"], "run_id": run["dag_run_id"], "state": run["state"], "deadline": missed}
    if "reason" in found:  # only in callbacks of DAGs, which have the last task, too
        reason = found["reason"]
        state = "success" if reason == "success" else "failed"
        return {"dag_id": found["dag"].dag_id, "run_id": found["run_id"], "state": state, "reason": reason}
    if (ti := found.get("ti")) is None:
        raise BadArgument("the notifier is for callbacks of tasks, DAGs and deadlines, and this context is of none of them")
    exception = found.get("exception")
    told = exception if exception is None or isinstance(exception, str) else f"{type(exception).__name__}: {exception}"
    return {
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "state": _text(ti.state),
        "task_id": ti.task_id,
        "map_index": ti.map_index,
        "try_number": ti.try_number,
        "exception": masked(told),
    }


def _text(state: Any) -> str:
    """Airflow's states are texts, or members of an enumeration whose ``str`` is the member's name."""
    return str(getattr(state, "value", state))
