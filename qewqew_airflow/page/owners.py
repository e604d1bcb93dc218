"""Whether those who leased batches still work on them, according to Airflow's database, and to the time if it does not know."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.log import Log
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import State
from sqlalchemy import select, tuple_

from qewqew_core import BatchConflict
from qewqew_core.batch.stats import LONGEST_LEASE
from qewqew_core.limits import now_ms
from qewqew_core.secrecy import excerpt

AT_ONCE = 200  # task instances that one query asks for

Task = dict[str, Any]  # dag, run, task, index: see `keys.task_of`
Identity = tuple[str, str, str, int]  # the same, in this order


class Owner(NamedTuple):
    """``alive``: works on the batch, or will. ``gone``: will not any more. ``unknown``: not of a DAG of this Airflow.
    ``overdue``: the same, and has had the batch for longer than `LONGEST_LEASE`.
    """

    life: Literal["alive", "gone", "unknown", "overdue"]
    why: str


STUCK = ("gone", "overdue")  # owners whose batch a person may return
# Of a DAG that Airflow does not find, it schedules no task and no retry. What runs already, runs on.
_TO_BE_SCHEDULED = (None, "success", "up_for_retry", "up_for_reschedule")


def identity(task: Task) -> Identity:
    return task["dag"], task["run"], task["task"], task["index"]


def owners_of(tasks: Iterable[Task]) -> dict[Identity, Owner]:
    """What became of each of these task instances."""
    wanted = sorted({identity(task) for task in tasks})
    if not wanted:
        return {}
    judged: dict[Identity, Owner] = {}
    columns = TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index
    logged = Log.dag_id, Log.run_id, Log.task_id, Log.map_index  # Airflow keeps this when the DAG or the run is deleted
    with create_session() as session:
        for some in _parts(wanted):
            found = (
                select(*columns, TaskInstance.state, DagRun.state, DagModel.is_stale)
                .join(DagRun, (DagRun.dag_id == TaskInstance.dag_id) & (DagRun.run_id == TaskInstance.run_id))
                .outerjoin(DagModel, DagModel.dag_id == TaskInstance.dag_id)
                .where(tuple_(*columns).in_(some))
            )
            for dag, run, task, index, *states in session.execute(found):
                judged[dag, run, task, index] = _judged(*states)
        for some in _parts([name for name in wanted if name not in judged]):
            dags = set(session.scalars(select(DagModel.dag_id).where(DagModel.dag_id.in_({dag for dag, *_ in some}))))
            ran = {tuple(row) for row in session.execute(select(*logged).where(tuple_(*logged).in_(some)).distinct())}
            judged |= {name: _without_instance(name[0] in dags or name in ran) for name in some}
    return judged


def _parts(names: Sequence[Identity]) -> Iterator[Sequence[Identity]]:
    return (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))


def _judged(state: str | None, run_state: str | None, dag_is_missing: bool | None) -> Owner:
    over = run_state in State.finished_dr_states
    if dag_is_missing and not over and state in _TO_BE_SCHEDULED:
        return Owner("gone", "Airflow does not find its DAG any more: it was renamed or removed, or its file has an error")
    if state == "success" and not over:  # its batch is for the tasks after it
        return Owner("alive", f"its task succeeded, and its run is {run_state}: a task that follows may work on the batch")
    if state in State.finished or (state is None and over):
        return Owner("gone", f"its task is {state or 'without a state'}, its run {run_state}")
    return Owner("alive", f"its task is {state or 'about to be scheduled'}, its run {run_state}")


def _without_instance(known: bool) -> Owner:
    if known:
        return Owner("gone", "Airflow no longer has its task instance")
    return Owner("unknown", "its task is not of a DAG of this Airflow")


def add_owners(batches: Iterable[dict[str, Any]]) -> None:
    """Add to each leased batch, as the page shows it, what became of its owner."""
    leased = [batch for batch in batches if batch["state"] == "leased"]
    found = owners_of(batch["task"] for batch in leased if batch["task"] is not None)
    for batch in leased:
        if batch["task"] is not None:
            owner = found[identity(batch["task"])]
        else:
            owner = Owner("unknown", f"it was leased by {excerpt(batch['key'], 120)}, which is not a task of Airflow")
        since = datetime.fromisoformat(batch["since"])
        if owner.life == "unknown" and now_ms() / 1000 - since.timestamp() > LONGEST_LEASE.total_seconds():
            owner = owner._replace(life="overdue")
        batch["owner"] = {"life": owner.life, "why": owner.why}


def check_abandoned(batch: dict[str, Any]) -> None:
    """Raise `BatchConflict` for a leased batch, as the page shows it, unless its owner is among the `STUCK`."""
    add_owners([batch])
    life, why = batch["owner"]["life"], batch["owner"]["why"]
    if life == "unknown":
        raise BatchConflict(
            f"batch {batch['id']} stays with its owner: {why}, so the page cannot see whether it still works on the batch. If it "
            f"does not, return the batch with `qewqew nack`, or here after {LONGEST_LEASE.total_seconds() / 3600:.0f} hours"
        )
    if life not in STUCK:
        raise BatchConflict(f"batch {batch['id']} stays with its owner: {why}. A batch that is worked on cannot be returned")


@contextlib.contextmanager
def alone(directory: str, batch_id: str) -> Iterator[None]:
    """The lock that a task holds while it works on a batch. Raises `BatchConflict` if a task has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchConflict(
                f"batch {batch_id} stays with its owner: a process on this host still works on it, whatever Airflow says about "
                "its task"
            ) from None
        yield
    finally:
        os.close(fd)
