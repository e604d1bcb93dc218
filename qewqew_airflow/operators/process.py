"""Process one batch in the task itself: lease, work, acknowledge. Here a Python function does the work."""

from __future__ import annotations

import _thread
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowSkipException

try:
    from airflow.sdk.bases.decorator import determine_kwargs
except ImportError:  # Airflow 3.1
    from airflow.utils.operator_helpers import determine_kwargs  # type: ignore[attr-defined]
try:
    from airflow.sdk.serde import serialize
except ImportError:  # Airflow 3.1
    from airflow.serialization.serde import serialize  # type: ignore[import-not-found, no-redef]

from qewqew_airflow.arguments import LIMITS, read_arguments
from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.errors import LeaseLost, no_retry_for_the_hopeless
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_key
from qewqew_airflow.operators.batch import is_last_try, lease, numbers, return_leased
from qewqew_airflow.operators.leases import LeasingOperator
from qewqew_airflow.shared.records import awaited
from qewqew_airflow.shared.source import Source
from qewqew_core import BadArgument, Batch

if TYPE_CHECKING:
    from airflow.sdk import Context

_LAZY = "which nobody would run, and the batch would be acknowledged; do the work, and return when it is done"
BATCH = "batch"  # the parameter of the function that gets it


class WorkingOperator(LeasingOperator):
    """What operators have in common that work on a batch in the task itself: lease, work, acknowledge, or return it."""

    def execute(self, context: Context) -> dict[str, Any]:
        hook, source, key = QewQewHook(self.qewqew_conn_id), self._source(), task_key(context)
        leased = None
        try:
            with no_retry_for_the_hopeless():
                self._check()
                leased = lease(hook, source, key, self.max_records, self.max_bytes, self.lease_timeout)
            # The work is done in this thread: an interrupt ends it if the batch becomes somebody else's.
            with leased.alone(_thread.interrupt_main):
                with leased.extended(_thread.interrupt_main):
                    more = self._work(leased.batch, context)
                leased.acknowledge()
        except AirflowSkipException as error:
            if leased is not None:  # no other try follows
                return_leased(hook, source, key, error)
            raise
        except BaseException as error:  # AirflowTaskTimeout is a BaseException
            self._after_failure(context, hook, source, key, error)
            raise
        result = {**source.names(), **numbers(leased.batch)}
        write_counts(context, self.outlets, result)
        return {**result, **leased.oldest, **more}

    def _check(self) -> None:
        """Raise `BadArgument` if what was rendered is wrong, before anything is leased."""
        read_arguments(self, LIMITS)

    def _work(self, batch: Batch, context: Context) -> dict[str, Any]:
        """Do the work; returns what it adds to the result."""
        raise NotImplementedError

    def _after_failure(self, context: Context, hook: QewQewHook, source: Source, key: str, error: BaseException) -> None:
        if isinstance(error, LeaseLost):  # a lease under the key is now another try's
            return
        if is_last_try(self, context, error):
            return_leased(hook, source, key, error)
        else:
            ti = context["ti"]
            said = "Try %d of %d failed: a lease under %s stays for the next try"
            self.log.info(said, ti.try_number, ti.max_tries + 1, key)


class QewQewProcessOperator(WorkingOperator):
    """Leases one batch, calls a function with it, and acknowledges it when the function has returned.

    The function has a parameter ``batch``, a `Batch`: iterate over it for the records (of a topic: over ``batch.messages()``).
    While it works, the lease is extended. If it raises, the lease stays for the next try, which gets the same batch; after the
    last try the batch is returned. A task that is killed after the function's work, and before the acknowledgement, calls it
    once more with the same batch: let it write by ``batch.id``, or in one transaction. If there is nothing to lease, the task is
    skipped.

    Returns (XCom) queue (or topic and reader), batch_id, attempt, records and bytes, ``oldest`` if it is known, and ``returned``:
    what the function returned, if that is not None.

    :param python_callable: the function, maybe an asynchronous one. It is called as PythonOperator calls its own: with
        ``op_args``, ``op_kwargs``, ``batch``, and the keys of the context that it has parameters for
    :param op_args: for the function (templated)
    :param op_kwargs: for the function (templated)
    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param reader: whose messages of the topic are leased (templated)
    :param filter: which tags these have (templated); without it the reader keeps its filter
    :param start: where a new reader begins: "oldest", "latest", the number of a message, or a datetime
    :param max_records: at most this many records in the batch (templated)
    :param max_bytes: at most this many bytes in the batch (templated)
    :param lease_timeout: timedelta or seconds, from 1 s: if the task is killed and not tried again, others get the batch then
    :param qewqew_conn_id: the connection (templated)

    Raises `BadArgument`, `BadPath`, `Locked`, `BatchConflict`, `LeaseLost`, and what the function raises.
    """

    template_fields: Sequence[str] = (*LeasingOperator.template_fields, "op_args", "op_kwargs")
    template_fields_renderers = {"op_args": "py", "op_kwargs": "py"}  # noqa: RUF012  (as Airflow declares it)
    shallow_copy_attrs: Sequence[str] = ("python_callable", "op_args", "op_kwargs")
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Sequence[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.python_callable = python_callable
        self.op_args = op_args
        self.op_kwargs = op_kwargs
        parameters, name = inspect.signature(python_callable).parameters, getattr(python_callable, "__name__", python_callable)
        if inspect.isgeneratorfunction(python_callable) or inspect.isasyncgenfunction(python_callable):
            raise BadArgument(f"the function {name} yields, so it returns a generator, {_LAZY}")
        if BATCH not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            raise BadArgument(f"the function {name} has no parameter {BATCH!r}, which gets the batch: def {name}({BATCH}): …")

    def _work(self, batch: Batch, context: Context) -> dict[str, Any]:
        args, given = self.op_args or (), {**context, **(self.op_kwargs or {}), BATCH: batch}
        returned = awaited(self.python_callable(*args, **determine_kwargs(self.python_callable, args, given)))
        if isinstance(returned, Iterator):
            raise BadArgument(f"the function has returned a {type(returned).__name__}, {_LAZY}")
        try:
            serialize(returned)
        except Exception as error:  # as different as what is returned
            said = f"the function has returned a {type(returned).__name__}, which XCom cannot store: {error}"
            raise BadArgument(f"{said}. The batch is not acknowledged; return None, or what XCom can store") from error
        return {} if returned is None else {"returned": returned}
