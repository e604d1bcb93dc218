"""What the page does to batches. Each action is in the log of the API server, and in Airflow's audit log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from airflow.models.connection import Connection
from airflow.models.log import Log
from airflow.utils.session import create_session
from sqlalchemy.exc import SQLAlchemyError

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_of
from qewqew_airflow.page.asked import Act, ActOnAll, Shown
from qewqew_airflow.page.contents import batch_row, explained, find_batch, hook_of, state_of
from qewqew_airflow.page.owners import alone, check_abandoned
from qewqew_airflow.shared.source import Source
from qewqew_core import BadArgument, BadPath, Batch, BatchConflict, BatchNotFound, QewQewError
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.places import directory_of

LOCK_TIMEOUT = 2.0  # seconds that an action waits for another owner of the queue
ACTIONS: dict[str, Callable[[Batch], None]] = {
    "return": Batch.return_to_queue,
    "put-back": Batch.put_back,
    "drop": Batch.drop,
    "retry": Batch.retry,
}

_logger = logging.getLogger(__name__)


def act_on(connection: Connection, action: str, asked: Act, user: Any) -> dict[str, Any]:
    """Do it to a batch that is as it was shown. Raises `BatchConflict`, `BatchNotFound`."""
    hook = hook_of(connection)
    path = asked.path(hook)
    found, clock = find_batch(path, asked.reader, asked.batch)  # opening a queue creates it
    directory = _check_owner(hook, asked.stem(path), found)
    source = Source(asked.queue, asked.topic, asked.reader)
    with contextlib.ExitStack() as stack:
        if asked.state == "leased":
            if action != "return":
                raise BadArgument(f"{action}: a leased batch can only be returned, as an attempt may have written some of it")
            check_abandoned(row := batch_row("leased", found, clock))
            stack.enter_context(alone(directory, found.id))
        elif (asked.state == "returned") != (action == "retry"):
            raise BadArgument(f"{action}: a returned batch can be retried now, a dead one returned, put back or dropped")
        opened = stack.enter_context(source.open(hook, lock_timeout=LOCK_TIMEOUT))
        if action == "retry":
            opened.return_expired()  # the page shows leases whose time is over as returned
        batch = opened.batch(asked.batch)
        if not _is_unchanged(batch, asked, asked.state, found):
            raise BatchConflict(f"batch {batch.id} has changed since you looked: it is {batch.state}, attempt {batch.attempt}")
        if asked.state == "leased":
            batch.nack(f"{user.get_name()} returned it on the page: its owner was {row['owner']['life']}")
            if batch.state == "returned":
                batch.retry()
        else:
            ACTIONS[action](batch)
    _log(action, [batch], asked.state, source, connection, user)
    return {"batch": batch.id, "records": batch.records}


def act_on_all(connection: Connection, action: str, asked: ActOnAll, user: Any) -> dict[str, Any]:
    """Do it to each of these dead batches that is as it was shown. One that fails keeps no other from it.

    Returns how many batches and records it was done to, how many had changed, and why others failed.
    """
    hook = hook_of(connection)
    path, stem = asked.path(hook), asked.stem(asked.path(hook))
    state = state_of(path, asked.reader)  # opening a queue creates it
    wanted = {shown.batch: shown for shown in asked.batches}
    present = {batch_id: found for batch_id in wanted if (found := state.find(batch_id)) is not None}
    source, done, failed = Source(asked.queue, asked.topic, asked.reader), list[Batch](), list[str]()
    for found in present.values():
        _check_owner(hook, stem, found)
    with contextlib.ExitStack() as stack:
        stack.callback(_log, action, done, "dead", source, connection, user)  # also if the rest is not done
        if present:
            opened = stack.enter_context(source.open(hook, lock_timeout=LOCK_TIMEOUT))
        for batch_id, found in present.items():
            try:
                batch = opened.batch(batch_id)
                if _is_unchanged(batch, wanted[batch_id], "dead", found):
                    ACTIONS[action](batch)
                    done.append(batch)
            except (BatchNotFound, BatchConflict):  # changed just now, by another consumer of this reader
                continue
            except QewQewError as error:
                failed.append(explained(error))
    records = sum(batch.records for batch in done)
    return {"done": len(done), "records": records, "changed": len(wanted) - len(done) - len(failed), "failed": failed}


def _is_unchanged(batch: Batch, shown: Shown, state: str, found: BatchState) -> bool:
    return (batch.state, batch.attempt, batch.made, batch.key) == (state, shown.attempt, shown.made, found.keys[-1])


def _log(action: str, done: list[Batch], was: str, source: Source, connection: Connection, user: Any) -> None:
    entries = []
    for batch in done:
        _logger.info(
            "%s: %s of %s batch %s (%s records) of %s, connection %s",
            user.get_name(), action, was, batch.id, f"{batch.records:,}", source, connection.conn_id,
        )  # fmt: skip
        told = {"batch": batch.id, "was": was, "records": batch.records}
        entries.append((task_of(batch.key), {"connection_id": connection.conn_id, **source.names(), **told}))
    _write_audit_log(f"qewqew_{action.replace('-', '_')}", entries, user)


def _write_audit_log(event: str, entries: list[tuple[dict[str, Any] | None, dict[str, Any]]], user: Any) -> None:
    """For Browse -> Audit Log, and that of the batch's task. If it cannot be written, the action stands."""
    try:
        with create_session() as session:
            for task, told in entries:
                about = {} if task is None else {"dag_id": task["dag"], "run_id": task["run"], "task_id": task["task"]}
                name = user.get_name()
                session.add(Log(event=event, owner=name, owner_display_name=name, extra=json.dumps(told), **about))
    except SQLAlchemyError:
        _logger.exception("The action above could not be written to Airflow's audit log")


def _check_owner(hook: QewQewHook, stem: str, batch: BatchState) -> str:
    """The batch's directory. Raises `BadPath` if the files are another user's: those of this user would lock the workers out."""
    directory = directory_of(stem, batch)
    if hook.settings().get("group") is None and os.path.exists(directory):  # else the action says what is missing
        owner, me = os.stat(directory).st_uid, os.geteuid()
        if owner != me:
            raise BadPath(
                f"belongs to user {owner}, but the API server runs as user {me}: the workers could not use the files that it "
                "writes. Run both as one user, or use the command `qewqew dead` as the user of the workers",
                path=directory,
            )
    return directory
