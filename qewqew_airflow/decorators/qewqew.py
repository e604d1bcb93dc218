"""``@task.qewqew`` stages the records of a TaskFlow function in one commit under the task's key; ``@task.qewqew_batch`` calls one
with a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from qewqew_airflow.operators.process import BATCH, QewQewProcessOperator
from qewqew_airflow.operators.stage import QewQewStageOperator

if TYPE_CHECKING:
    from airflow.sdk.bases.decorator import TaskDecorator


class _StagingOperator(DecoratedOperator, QewQewStageOperator):  # type: ignore[misc]  # op_args may be None here
    template_fields: Sequence[str] = QewQewStageOperator.template_fields
    template_fields_renderers = QewQewStageOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = (*QewQewStageOperator.shallow_copy_attrs, "python_callable")
    custom_operator_name = "@task.qewqew"

    def __init__(self, *, python_callable: Callable[..., Any], op_args: Any = None, op_kwargs: Any = None, **kwargs: Any) -> None:
        given = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        staged = {"records": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        super().__init__(**given, kwargs_to_upstream=staged, **kwargs)


def qewqew_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Stages what the function returns or yields, as `QewQewStageOperator` does with ``records``.

    ``kwargs`` are those of this operator (queue_name or topic, tag, qewqew_conn_id …) and those of every task. In the
    DAG, call the function with values or with outputs of other tasks. The task returns (XCom) what the operator returns,
    not the records.
    """
    kwargs["multiple_outputs"] = False  # of the dict that the operator returns
    return task_decorator_factory(python_callable=python_callable, decorated_operator_class=_StagingOperator, **kwargs)


class _ProcessingOperator(DecoratedOperator, QewQewProcessOperator):  # type: ignore[misc]  # op_args may be None here
    template_fields: Sequence[str] = QewQewProcessOperator.template_fields
    template_fields_renderers = QewQewProcessOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = QewQewProcessOperator.shallow_copy_attrs
    custom_operator_name = "@task.qewqew_batch"

    def __init__(self, *, python_callable: Callable[..., Any], op_args: Any = None, op_kwargs: Any = None, **kwargs: Any) -> None:
        # Airflow looks whether the arguments are all that the function needs. The batch comes when the task runs.
        given = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": {**(op_kwargs or {}), BATCH: None}}
        super().__init__(**given, kwargs_to_upstream=given, **kwargs)


def batch_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Calls the function with a batch, as `QewQewProcessOperator` does: its parameter ``batch`` gets it.

    ``kwargs`` are those of this operator (queue_name or topic and reader, max_records, lease_timeout …) and those of every task.
    In the DAG, call the function without the batch. The task returns (XCom) what the operator returns.
    """
    kwargs["multiple_outputs"] = False  # of the dict that the operator returns
    return task_decorator_factory(python_callable=python_callable, decorated_operator_class=_ProcessingOperator, **kwargs)
