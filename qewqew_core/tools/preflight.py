"""Whether a directory of queues, or a place in an object store, can be used from here: asked before the first task finds out.

It tries what a task does, so the errors and what they tell to do are those of the tasks.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from qewqew_core.arguments import user_name
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadPath
from qewqew_core.queue.chunk_files import check_free
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.store_stage import StoreStage
from qewqew_core.secrecy import hide
from qewqew_core.tools import marker
from qewqew_core.tools.monitoring import file_systems, watch
from qewqew_core.tools.spark import check_java, find_spark_submit
from qewqew_core.topic.topic_paths import is_topic


class Answer(NamedTuple):
    """``text``: what was found or, if it is not ``ok``, the error, which says what to do."""

    what: str
    ok: bool
    text: str


def ask(what: str, question: Callable[[], str]) -> Answer:
    """Never raises: any error is an answer."""
    try:
        return Answer(what, True, question())
    except Exception as error:
        return Answer(what, False, hide(f"{type(error).__name__}: {error}"))


def of_directory(find: Callable[[], str], settings: Mapping[str, Any]) -> list[Answer]:
    """Whether this user can keep queues in a directory: its marker, room, locks, and what is there. Changes nothing that stays.

    ``find`` gives its path, or raises. ``settings``: arguments of `Queue`.
    """
    where = ask("directory", find)
    if not where.ok:
        return [where]
    return [
        where,
        ask("marker", lambda: f"its id is {marker.id_of(where.text)}"),
        ask("free room", partial(_room, where.text, settings.get("min_free_bytes", 0))),
        ask("a new queue", partial(_make_queue, where.text, {**settings, "min_free_bytes": 0})),
        ask("what is there", partial(_look, where.text)),
    ]


def find(directory: str, id: str | None = None) -> str:
    """The path of the directory. Raises `BadPath` unless it can be read and has the marker, with this id if one is given."""
    if os.path.isfile(directory) or is_topic(directory):
        what = "topic" if os.path.isdir(directory) else "file"
        raise BadPath(f"this is a {what}; give the directory of the queues, not one of them", path=directory)
    with opening(directory, "directory", "try again"):
        os.listdir(directory)
    marker.check(directory, id)
    return os.path.realpath(directory)


def _room(directory: str, min_free_bytes: int) -> str:
    check_free(DISK, directory, min_free_bytes, 0)
    (room,) = file_systems([directory], [])
    inodes = "" if room.free_inodes is None else f" and {room.free_inodes:,} inodes"
    return f"{room.free_bytes:,} bytes{inodes}"


def _make_queue(directory: str, settings: Mapping[str, Any]) -> str:
    with Queue(os.path.join(directory, f".qewqew-preflight.{uuid.uuid4().hex[:8]}"), **settings) as queue:
        queue.put(b"x")
        queue.get()  # an empty closed queue leaves no files
    return f"user {user_name(os.geteuid())} can make it, lock it, put into it and remove it"


def _look(directory: str) -> str:
    found = list(watch([directory]))
    for error in [store.error for store in found if store.error is not None]:
        raise error
    return f"queues and readers that can be read: {len(found):,}"


def of_url(url: str, options: Mapping[str, str] | None = None, patience: float = 10.0) -> list[Answer]:
    """Whether tasks can stage into this place. It then has the file that the first commit leaves there."""

    def stage() -> str:
        with StoreStage(url, options=options, lock_timeout=patience) as place:
            place.check()
        return f"{url} can be written to and read, and creates a file only if there is none"

    return [ask("place", stage)]


def of_spark() -> list[Answer]:
    """Whether this user can submit jobs to Spark here."""

    def java() -> str:
        check_java(os.environ)
        return os.environ.get("JAVA_HOME") or shutil.which("java") or "where spark-env.sh says"

    return [ask("spark-submit", lambda: find_spark_submit("spark-submit", os.environ)), ask("Java", java)]
