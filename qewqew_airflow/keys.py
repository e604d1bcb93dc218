"""The key of a task instance. What a task stages or leases is stored under it, so all tries stage and lease once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from airflow.sdk import Context

LONGEST_KEY = 512  # bytes; what the core takes


def task_key(context: Context, reprocess: str = "") -> str:
    """The key of a task instance: ``dag_id|run_id|task_id|map_index``, the same for every try of it.

    ``reprocess``: one more part, unless it is empty: what the task does with another one it does once more, on purpose.
    """
    ti = context["ti"]
    return make_key(ti.dag_id, ti.run_id, ti.task_id, ti.map_index, *([reprocess] if reprocess else []))


def make_key(*parts: object) -> str:
    """A key whose parts can be told apart, so that different parts never make the same key.

    All characters except letters, digits and ``_.-~:+`` are percent-encoded. A key over 512 bytes is cut and ends in the
    SHA-256 of the whole.
    """
    key = "|".join(quote(str(part), safe=":+") for part in parts)
    if len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{key[: LONGEST_KEY - len(digest) - 1]}|{digest}"


def task_of(key: str) -> dict[str, Any] | None:
    """The task instance whose key this is (see `task_key`). None if the key is not of a task, or was cut."""
    dag, run, task, index = (*map(unquote, key.split("|")), *[""] * 4)[:4]
    is_of_task = key.count("|") in (3, 4) and {dag, run, task}.isdisjoint({"", ".", ".."}) and len(key) < LONGEST_KEY
    if not is_of_task or not index.removeprefix("-").isdecimal():
        return None
    return {"dag": dag, "run": run, "task": task, "index": int(index)}
