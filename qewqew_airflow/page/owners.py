"""Whether the tasks that leased batches still work on them, according to Airflow's database."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import State
from sqlalchemy import select, tuple_

from qewqew_airflow.keys import task_of
from qewqew_core import BatchConflict
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.secrecy import excerpt

AT_ONCE = 200  # task instances that one query asks for

Task = dict[str, Any]  # dag, run, task, index: see `keys.task_of`
Identity = tuple[str, str, str, int]  # the same, in this order


class Owner(NamedTuple):
    """``alive``: works on the batch, or will. ``gone``: will not any more. ``unknown``: not of a DAG of this Airflow."""

    life: Literal["alive", "gone", "unknown"]
    why: str


def identity(task: Task) -> Identity:
    return task["dag"], task["run"], task["task"], task["index"]


def owners_of(tasks: Iterable[Task]) -> dict[Identity, Owner]:
    """What became of each of these task instances."""
    wanted = sorted({identity(task) for task in tasks})
    if not wanted:
        return {}
    states: dict[Identity, tuple[str | None, str | None]] = {}
    columns = TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index
    with create_session() as session:
        for start in range(0, len(wanted), AT_ONCE):
            found = (
                select(*columns, TaskInstance.state, DagRun.state)
                .join(DagRun, (DagRun.dag_id == TaskInstance.dag_id) & (DagRun.run_id == TaskInstance.run_id))
                .where(tuple_(*columns).in_(wanted[start : start + AT_ONCE]))
            )
            for dag, run, task, index, state, run_state in session.execute(found):
                states[dag, run, task, index] = state, run_state
        missing = {dag for dag, *rest in wanted if (dag, *rest) not in states}
        known = set(session.scalars(select(DagModel.dag_id).where(DagModel.dag_id.in_(missing)))) if missing else set()
    return {name: _judged(*states[name]) if name in states else _without_instance(name[0] in known) for name in wanted}


def _judged(state: str | None, run_state: str | None) -> Owner:
    over = run_state in State.finished_dr_states
    if state == "success" and not over:  # its batch is for the tasks after it
        return Owner("alive", f"its task succeeded, and its run is {run_state}: a task that follows may work on the batch")
    if state in State.finished or (state is None and over):
        return Owner("gone", f"its task is {state or 'without a state'}, its run {run_state}")
    return Owner("alive", f"its task is {state or 'about to be scheduled'}, its run {run_state}")


def _without_instance(known: bool) -> Owner:
    if known:
        return Owner("gone", "Airflow no longer has its task instance")
    return Owner("unknown", "its task is not of a DAG of this Airflow")


def check_abandoned(batch: BatchState) -> None:
    """Raise `BatchConflict` unless Airflow says that no task works, or will work, on this leased batch."""
    task = task_of(batch.keys[-1])
    if task is None:
        raise BatchConflict(
            f"batch {batch.id} was leased by {excerpt(batch.keys[-1], 120)}, which is not a task of Airflow, so the page cannot "
            "see whether it still works on the batch. If it does not, return the batch with `qewqew nack`"
        )
    (owner,) = owners_of([task]).values()
    if owner.life != "gone":
        raise BatchConflict(f"batch {batch.id} stays with its owner: {owner.why}. A batch that is worked on cannot be returned")


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
