"""What the page lists: the queues and topics of every connection of type `qewqew`, read without a lock."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow.models.connection import Connection
from airflow.secrets.environment_variables import CONN_ENV_PREFIX, EnvironmentVariablesBackend
from airflow.utils.session import create_session
from sqlalchemy import select

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_of
from qewqew_core import QewQewError, inspection, layout, listing, topic
from qewqew_core.batch_state import BatchState, Leases
from qewqew_core.limits import now_ms

FRESH = 2.0  # seconds: however many people look, a directory is read once in this time
MOST_BATCHES = 100  # of one queue, the oldest first; it is said how many there are
SAMPLE_SECONDS, SAMPLES = 60.0, 61  # of the sparklines
MOST_HISTORIES = 5000  # of one connection: more queues than that have no sparkline

_logger = logging.getLogger(__name__)


def connections() -> dict[str, Connection]:
    """Those of type qewqew in Airflow's database and in the environment, which wins; a secrets backend cannot be listed."""
    with create_session() as session:
        found = {
            one.conn_id: one for one in session.scalars(select(Connection).where(Connection.conn_type == QewQewHook.conn_type))
        }
        session.expunge_all()
    environment = EnvironmentVariablesBackend()
    for name in os.environ:
        # A team's connections begin with another underscore; they are in the database if the page is to list them.
        if name.startswith(CONN_ENV_PREFIX) and not name.startswith(CONN_ENV_PREFIX + "_"):
            conn_id = name.removeprefix(CONN_ENV_PREFIX).lower()
            try:
                connection = environment.get_connection(conn_id)
            except Exception:  # it cannot be read, so nobody can say that it is one of ours
                _logger.debug("The environment's connection %s cannot be read", conn_id)
                continue
            if connection is not None and connection.conn_type == QewQewHook.conn_type:
                found[conn_id] = connection
            else:
                found.pop(conn_id, None)
    return dict(sorted(found.items()))


def hook_of(connection: Connection) -> QewQewHook:
    hook = QewQewHook(connection.conn_id)
    hook.connection = connection  # the server's class for what tasks have another one for
    return hook


@dataclass(frozen=True)
class Look:
    """What is in the directory of a connection. Queues and topics are dicts, as the page gets them (see `page.js`)."""

    directory: str
    queues: list[dict[str, Any]] = field(default_factory=list)
    topics: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True
    error: str | None = None


def look(connection: Connection) -> Look:
    """Raises nothing: what is wrong with the directory, or with one queue, is part of what is shown."""
    hook = hook_of(connection)
    try:
        directory = hook.directory()
        found = listing.find(directory)
    except (QewQewError, OSError) as error:
        return Look(str(connection.host or ""), error=explained(error))
    return Look(
        directory,
        [_row(hook, name, queue_row) for name in found.queues],
        [_row(hook, name, topic_row) for name in found.topics],
        found.complete,
    )


def _row(hook: QewQewHook, name: str, describe: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"name": name, **describe(hook.path(name))}
    except (QewQewError, OSError) as error:
        return {"name": visible(name), "error": explained(error)}


def queue_row(path: str) -> dict[str, Any]:
    stats, batches = inspection.inspect_batches(path)
    return {
        "waiting": stats.records,
        "bytes": stats.bytes,
        "on_disk": stats.on_disk,
        "oldest": iso(stats.oldest),
        **batch_rows(batches),
    }


def topic_row(path: str) -> dict[str, Any]:
    stats, states = topic.inspect_topic(path)
    readers = [
        {
            "name": name,
            "lag": stats.readers[name],
            "filter": state.filter,
            "in_flight": len(state.flight),
            "lost": state.lost,
            **batch_rows(state.unfinished()),
        }
        for name, state in states.items()
    ]
    return {
        "messages": stats.messages,
        "waiting": max(stats.readers.values(), default=0),  # for the reader that is farthest behind
        "next": stats.next,
        "bytes": stats.bytes,
        "on_disk": stats.on_disk,
        "oldest": iso(stats.oldest),
        "newest": iso(stats.newest),
        "readers": readers,
    }


def batch_rows(batches: list[BatchState]) -> dict[str, Any]:
    """How many there are of each kind, and the batches themselves. Dead ones come first: they wait for a person."""
    now = now_ms()
    kinds = ["returned" if one.expired(now) else one.state for one in batches]
    ordered = sorted(zip(kinds, batches, strict=True), key=lambda one: ("dead", "leased", "returned").index(one[0]))
    counts = {kind: kinds.count(kind) for kind in ("leased", "returned", "dead")}
    return {**counts, "batches": [_batch_row(*one) for one in ordered[:MOST_BATCHES]]}


def _batch_row(kind: str, one: BatchState) -> dict[str, Any]:
    return {
        "id": one.id,
        "state": kind,
        "key": one.keys[-1],
        "task": task_of(one.keys[-1]),
        "records": one.records,
        "bytes": one.bytes,
        "attempt": one.attempt,
        "made": one.created,  # tells batches of one id apart
        "since": iso(layout.moment(one.changed)),
        "expires": iso(layout.moment(one.expires)) if one.expires is not None else None,
        "reason": visible(one.reason),
    }


def leases_of(path: str, reader: str | None) -> Leases | None:
    """The batches of a queue, or of a reader of a topic, without a lock; None if there is no such reader."""
    if reader is None:
        return Leases({one.id: one for one in inspection.inspect_batches(path)[1]})
    return topic.inspect_topic(path)[1].get(reader)


class Looks:
    """The last look at each connection, for `FRESH` seconds."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[threading.Lock, list[tuple[float, Look]]]] = {}

    def __call__(self, connection: Connection) -> Look:
        with self._guard:
            lock, kept = self._kept.setdefault((connection.conn_id, connection.host or ""), (threading.Lock(), []))
        with lock:  # of this connection alone: a directory that hangs holds up nobody else's
            if not kept or time.monotonic() - kept[0][0] > FRESH:
                kept[:] = [(time.monotonic(), look(connection))]
            return kept[0][1]

    def forget(self, is_old: Callable[[str], bool]) -> None:
        """Look anew at these connections, by their ids, when they are asked for."""
        with self._guard:
            for one in [one for one in self._kept if is_old(one[0])]:
                del self._kept[one]


class History:
    """How much waited in each queue and topic during the last hour, in this process, one sample a minute."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._samples: dict[str, dict[str, deque[tuple[float, int]]]] = {}  # by connection, and "queue NAME" or "topic NAME"
        self._stop = threading.Event()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample in a thread until the block ends."""
        self._stop.clear()
        thread = threading.Thread(target=self._work, name="qewqew samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(5)  # a directory that hangs must not keep the server from stopping

    def _work(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # the database may be away; the next sample may succeed
                _logger.warning("The depths of the queues could not be sampled", exc_info=True)
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def sample(self) -> None:
        found = connections()
        self._looks.forget(lambda conn_id: conn_id not in found)
        for gone in self._samples.keys() - found.keys():
            self._samples.pop(gone, None)
        for conn_id, connection in found.items():
            seen, now = self._looks(connection), time.time()
            before = self._samples.get(conn_id, {})
            after: dict[str, deque[tuple[float, int]]] = {}
            for kind, rows in (("queue", seen.queues), ("topic", seen.topics)):
                for row in rows:
                    key = f"{kind} {row['name']}"
                    if "error" not in row and len(after) < MOST_HISTORIES:
                        after[key] = before.get(key) or deque(maxlen=SAMPLES)
                        after[key].append((now, row["waiting"]))
            self._samples[conn_id] = after

    def of(self, conn_id: str) -> dict[str, list[tuple[int, int]]]:
        """(seconds ago, how many waited) of each queue and topic, the oldest first."""
        now = time.time()
        samples = self._samples.get(conn_id, {})
        return {key: [(round(now - when), count) for when, count in list(some)] for key, some in samples.items()}


def explained(error: Exception) -> str:
    """For people who may read the connection; others get the part before the colon."""
    text = str(error) if isinstance(error, QewQewError) else getattr(error, "strerror", None) or str(error)
    return visible(f"{type(error).__name__}: {text}")


def iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def visible(text: str) -> str:
    """Lines as they are, but no other characters that control how text is shown, or that UTF-8 does not have."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)
