"""The batches of a queue or of a reader of a topic while they are remembered, and what Airflow keeps of the work on them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from airflow.models.xcom import XCOM_RETURN_KEY, XComModel
from airflow.utils.session import create_session
from sqlalchemy import select, tuple_

from qewqew_airflow.keys import task_of
from qewqew_airflow.page.contents import batch_row, state_of
from qewqew_airflow.page.owners import Identity, identity
from qewqew_core import BadManifest
from qewqew_core.batch import manifest, places
from qewqew_core.limits import now_ms

SHOWN = 100  # batches
ORDER = "dead", "leased", "returned", "acked"
LARGEST_MANIFEST = 16 << 20  # bytes; nobody waits for the page to read more
# Of a task's result: what became of the batch. Anything else in it is the task's own.
TOLD = ("read", "good", "bad", "reasons", "outputs", "quarantine", "note", "seconds", "oldest")


def batches_of(path: str, stem: str, reader: str | None) -> tuple[list[dict[str, Any]], bool]:
    """Rows of the batches, those first that wait for somebody, then the newest, and whether there are more.

    Those whose records are gone have their manifest still. Raises `BadPath`, `Corrupt`.
    """
    now, state = now_ms(), state_of(path, reader)
    kept = [*state.batches.values(), *state.history.newest(SHOWN)]
    rows = [batch_row("returned" if batch.expired(now) else batch.state, batch) for batch in kept]
    rows.sort(key=lambda row: str(row["since"]), reverse=True)
    rows.sort(key=lambda row: ORDER.index(row["state"]))
    past, more = _past(stem + places.BATCHES, {*state.batches, *state.history.ids()})
    return [*rows, *past][:SHOWN], more or state.kept + len(past) > SHOWN


def _past(home: str, known: set[str]) -> tuple[list[dict[str, Any]], bool]:
    """Batches of which the manifest alone is left."""
    found: list[tuple[float, str]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(home) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name not in known and os.listdir(entry.path) == [manifest.MANIFEST]:
                    found.append((os.stat(os.path.join(entry.path, manifest.MANIFEST)).st_mtime, entry.path))
    found.sort(reverse=True)
    return list(filter(None, (_past_row(directory) for _, directory in found[:SHOWN]))), len(found) > SHOWN


def _past_row(directory: str) -> dict[str, Any] | None:
    path = os.path.join(directory, manifest.MANIFEST)
    try:
        if os.stat(path).st_size > LARGEST_MANIFEST:
            return None
        with open(path, "rb") as file:
            body = manifest.parse(json.load(file), path)
    except (OSError, ValueError, RecursionError, BadManifest):
        return None
    names = {"id": body.id, "state": "gone", "key": body.key, "task": task_of(body.key)}
    numbers = {"records": body.records, "bytes": body.bytes, "attempt": body.attempt, "made": None}
    return {**names, **numbers, "leased": body.created, "since": None, "expires": None, "reason": "", "owner": None}


def results_of(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each batch that a task of ours has a result of: its row, and the result."""
    wanted: dict[Identity, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] is not None:
            wanted.setdefault(identity(row["task"]), []).append(row)
    if not wanted:
        return
    columns = XComModel.dag_id, XComModel.run_id, XComModel.task_id, XComModel.map_index
    asked = select(*columns, XComModel.value).where(XComModel.key == XCOM_RETURN_KEY, tuple_(*columns).in_(list(wanted)))
    with create_session() as session:
        found = session.execute(asked).all()
    for dag, run, task, index, value in found:
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads(value) if isinstance(value, str) else value
            for row in wanted[dag, run, task, index]:
                if isinstance(result, dict) and result.get("batch_id") == row["id"]:
                    yield row, {name: result[name] for name in TOLD if name in result}
