"""The batches of a queue or reader that are remembered, and what Airflow keeps of the work on them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

from airflow.models.xcom import XCOM_RETURN_KEY, XComModel
from airflow.utils.session import create_session
from sqlalchemy import select, tuple_

from qewqew_airflow.keys import make_key, task_of
from qewqew_airflow.page.contents import batch_row, state_of
from qewqew_airflow.page.owners import AT_ONCE, Identity, identity
from qewqew_core import BadManifest
from qewqew_core.batch import manifest, places
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import DISK, Files, list_if_there, look_into, read_all
from qewqew_core.disk.opening import opening
from qewqew_core.keys import key_hash
from qewqew_core.queue import inspection

SHOWN = 100  # batches that are not dead
MOST_DEAD = 500  # batches, shown by their causes
ORDER = "dead", "leased", "returned", "acked"
NAMED = 20  # tasks that staged into a batch
MOST_TASKS = 10_000  # of Airflow, compared with the keys of a queue
LARGEST_MANIFEST = 16 << 20  # bytes; reading more would take too long
# The part of a task's result that says what became of the batch. The rest is the task's own.
TOLD = ("read", "good", "bad", "reasons", "unnamed", "outputs", "quarantine", "note", "seconds", "oldest")


def batches_of(path: str, stem: str, reader: str | None) -> tuple[list[dict[str, Any]], bool]:
    """Rows of the batches, and whether there are more. Dead ones come first, of the others those that wait, then the newest.

    Includes batches whose records are gone, but whose manifest is still there. Raises `BadPath`, `Corrupt`.
    """
    state = state_of(path, reader)
    clock = state.clock.now(DISK.boot())
    kept = [*state.batches.values(), *state.history.newest(SHOWN)]
    rows = [batch_row("returned" if batch.expired(clock.elapsed) else batch.state, batch, clock) for batch in kept]
    rows.sort(key=lambda row: str(row["since"]), reverse=True)
    rows.sort(key=lambda row: ORDER.index(row["state"]))
    with opening(path, "queue" if reader is None else "reader"):
        past, more = _past(stem + places.BATCHES, {*state.batches, *state.history.ids()})
    dead = sum(row["state"] == "dead" for row in rows)
    shown = [*rows[:dead][:MOST_DEAD], *[*rows[dead:], *past][:SHOWN]]
    return shown, more or state.kept + len(past) > len(shown)


def _past(home: str, known: set[str]) -> tuple[list[dict[str, Any]], bool]:
    """Batches with nothing left but their manifest."""
    found: list[tuple[int, str]] = []
    files = look_into(os.path.dirname(home))  # in which another user may have put links, or pipes
    with files.entered():
        for name in list_if_there(files, home):
            directory = os.path.join(home, name)
            with contextlib.suppress(OSError):
                if name not in known and files.list(directory) == [manifest.MANIFEST]:
                    found.append((files.modified(os.path.join(directory, manifest.MANIFEST)), directory))
        found.sort(reverse=True)
        return list(filter(None, (_past_row(files, directory) for _, directory in found[:SHOWN]))), len(found) > SHOWN


def _past_row(files: Files, directory: str) -> dict[str, Any] | None:
    path = os.path.join(directory, manifest.MANIFEST)
    try:
        with Descriptors([files.open_to_read(path)]) as (fd,):
            if files.size(fd) > LARGEST_MANIFEST:
                return None
            body = manifest.parse(json.loads(read_all(files, fd, path)), path)
    except (OSError, ValueError, RecursionError, BadManifest):
        return None
    names = {"id": body.id, "state": "gone", "key": body.key, "task": task_of(body.key)}
    numbers = {"records": body.records, "bytes": body.bytes, "attempt": body.attempt, "made": None}
    unknown = {"since": None, "expires": None, "due": None, "reason": "", "cause": "", "owner": None}
    return {**names, **numbers, "leased": body.created, **unknown}


def results_of(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The row and the result of each batch for which a task has left a result."""
    wanted: dict[Identity, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] is not None:
            wanted.setdefault(identity(row["task"]), []).append(row)
    if not wanted:
        return
    columns = XComModel.dag_id, XComModel.run_id, XComModel.task_id, XComModel.map_index
    asked, tasks = select(*columns, XComModel.value).where(XComModel.key == XCOM_RETURN_KEY), list(wanted)
    with create_session() as session:
        parts = (tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE))
        found = [row for part in parts for row in session.execute(asked.where(tuple_(*columns).in_(part)))]
    for dag, run, task, index, value in found:
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads(value) if isinstance(value, str) else value
            for row in wanted[dag, run, task, index]:
                if isinstance(result, dict) and result.get("batch_id") == row["id"]:
                    yield row, {name: result[name] for name in TOLD if name in result}


def add_stagers(rows: list[dict[str, Any]], path: str, may_see: Callable[[str], bool]) -> None:
    """Add ``staged_by`` to each batch of a queue: the tasks that staged into it, up to `NAMED`, and the count of all.

    The queue remembers the hash of the key of each commit and its time, and the key is made of the task. A commit belongs to
    a batch if it lies between the batch's oldest record (if unknown, the lease before) and its lease.
    """
    puts = inspection.inspect_state(path)[1].puts()
    leased = sorted(((_ms(row["leased"]), row) for row in rows if row["leased"] is not None), key=itemgetter(0))
    if not puts or not leased:
        return
    spans = []
    for (end, row), before in zip(leased, [0, *(end for end, _ in leased)], strict=False):
        spans.append((_ms((row.get("result") or {}).get("oldest")) or before, end, row))
    first = datetime.fromtimestamp(min(begin for begin, _, _ in spans) / 1000, UTC)
    columns = XComModel.dag_id, XComModel.run_id, XComModel.task_id, XComModel.map_index
    until = datetime.fromtimestamp(leased[-1][0] / 1000, UTC) + timedelta(hours=1)  # a task may go on after its commit
    asked = select(*columns).where(XComModel.key == XCOM_RETURN_KEY, XComModel.timestamp.between(first, until))
    with create_session() as session:
        tasks = session.execute(asked.order_by(XComModel.timestamp.desc()).limit(MOST_TASKS)).all()
    for dag, run, task, index in tasks:
        put = puts.get(key_hash(make_key(dag, run, task, index)))
        if put is None or not may_see(dag):
            continue
        time, records = put
        for begin, end, row in spans:
            if begin <= time <= end:
                staged_by = row.setdefault("staged_by", {"tasks": [], "count": 0})
                staged_by["count"] += 1
                if len(staged_by["tasks"]) < NAMED:
                    staged_by["tasks"].append({"dag": dag, "run": run, "task": task, "index": index, "records": records})


def _ms(moment: str | None) -> int:
    return 0 if moment is None else int(datetime.fromisoformat(moment).timestamp() * 1000)
