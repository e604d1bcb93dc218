"""What the page lists: the queues and topics of all connections of type `qewqew`, read without a lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from airflow.models.connection import Connection
from airflow.secrets.environment_variables import CONN_ENV_PREFIX, EnvironmentVariablesBackend
from airflow.utils.session import create_session
from sqlalchemy import select

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_of
from qewqew_airflow.page.budget import Budget, Slow
from qewqew_airflow.page.owners import STUCK, add_owners
from qewqew_airflow.page.samples import LONGEST_GAP, Seen
from qewqew_core import BatchNotFound, QewQewError, arguments
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.causes import cause_of
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.clock import Clock
from qewqew_core.disk.files import DISK
from qewqew_core.limits import now_ms
from qewqew_core.queue import inspection
from qewqew_core.secrecy import excerpt
from qewqew_core.tools import listing
from qewqew_core.tools.printing import visible
from qewqew_core.topic import topic_inspection

FRESH = 2.0  # seconds: a directory is read at most once in this time, however many people look
MOST_BATCHES = 100  # of one queue in each state, the oldest first; the page says how many there are

_logger = logging.getLogger(__name__)


def connections() -> dict[str, Connection]:
    """Those of type qewqew in Airflow's database, and in the environment, which overrides it. Not those in secrets backends."""
    with create_session() as session:
        found = {
            connection.conn_id: connection
            for connection in session.scalars(select(Connection).where(Connection.conn_type == QewQewHook.conn_type))
        }
        session.expunge_all()
    environment = EnvironmentVariablesBackend()
    for name in os.environ:
        # A team's connections begin with another underscore. The page lists only those in the database.
        if name.startswith(CONN_ENV_PREFIX) and not name.startswith(CONN_ENV_PREFIX + "_"):
            conn_id = name.removeprefix(CONN_ENV_PREFIX).lower()
            try:
                connection = environment.get_connection(conn_id)
            except Exception:  # it cannot be read, so it may not be one of ours
                _logger.debug("The connection %s in the environment cannot be read", conn_id)
                continue
            if connection is not None and connection.conn_type == QewQewHook.conn_type:
                found[conn_id] = connection
            else:
                found.pop(conn_id, None)
    return dict(sorted(found.items()))


def hook_of(connection: Connection) -> QewQewHook:
    hook = QewQewHook(connection.conn_id)
    hook.connection = connection  # of the server's class; tasks have another
    return hook


@dataclass(frozen=True)
class Contents:
    """The contents of a connection's directory. Queues and topics are dicts, as the page gets them (see `page.js`)."""

    directory: str
    queues: list[dict[str, Any]] = field(default_factory=list)
    topics: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True
    error: str | None = None


def contents_of(connection: Connection) -> Contents:
    """Never raises: errors of the directory, or of one queue, are among what is shown."""
    hook = hook_of(connection)
    try:
        directory = hook.directory()
        found = listing.find(directory)
    except (QewQewError, OSError) as error:
        return Contents(connection.host or "", error=explained(error))
    queues = [_row(hook, name, queue_row) for name in found.queues]
    topics = [_row(hook, name, topic_row) for name in found.topics]
    topics += [{"name": visible(name), "error": explained(error)} for name, error in found.unreadable.items()]
    _find_stuck([*queues, *topics, *(reader for topic in topics for reader in topic.get("readers", ()))])
    return Contents(directory, queues, topics, found.complete)


def _find_stuck(rows: list[dict[str, Any]]) -> None:
    """Add to each row how many batches are leased by those who will not come back."""
    add_owners([batch for row in rows for batch in row.get("batches", ())])
    for row in rows:
        if "batches" in row:
            row["stuck"] = sum(batch["owner"] is not None and batch["owner"]["life"] in STUCK for batch in row["batches"])


def each_directory(budget: Budget, use: Callable[[str, Callable[[], list[Seen]]], None]) -> None:
    """Call ``use`` with the directory of each connection and a function that looks at its queues and topics."""

    def sample(hook: QewQewHook) -> None:
        use(hook.directory(), partial(_seen, hook))

    for connection in connections().values():
        with contextlib.suppress(QewQewError, OSError):  # the page says what is wrong
            asyncio.run(budget.do(connection, partial(sample, hook_of(connection))))


def _seen(hook: QewQewHook) -> list[Seen]:
    listed, rows = listing.find(hook.directory()), []
    for names, look in ((listed.queues, _seen_queue), (listed.topics, _seen_topic)):
        for name in names:
            with contextlib.suppress(QewQewError, OSError):
                rows.append(look(name, hook.path(name)))
    return rows


def _seen_queue(name: str, path: str) -> Seen:
    stats, state = inspection.inspect_state(path)
    lately = now_ms() - (LONGEST_GAP + 1) * 60_000
    leased = tuple((batch.created, batch.records) for batch in state.with_history() if batch.created >= lately)
    staged = tuple(put for put in state.puts().values() if put[0] >= lately)
    return Seen(f"queue {name}", stats.records, None, leased, staged)


def _seen_topic(name: str, path: str) -> Seen:
    stats, _ = topic_inspection.inspect_topic(path)
    return Seen(f"topic {name}", max(stats.readers.values(), default=0), stats.next)


def _row(hook: QewQewHook, name: str, describe: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"name": name, **describe(hook.path(name))}
    except (QewQewError, OSError) as error:
        said = explained(error)
    except Exception as error:  # whatever is in it, it hides no other store
        _logger.exception("%r cannot be shown", name)
        said = f"{type(error).__name__}: see the log of the API server"
    return {"name": visible(name), "error": said}


def queue_row(path: str) -> dict[str, Any]:
    stats, state = inspection.inspect_state(path, closely=True)
    return {
        "waiting": stats.records,
        "bytes": stats.bytes,
        "on_disk": stats.on_disk,
        "oldest": iso(stats.oldest),
        **batch_rows(state),
    }


def topic_row(path: str) -> dict[str, Any]:
    stats, states = topic_inspection.inspect_topic(path, closely=True)
    readers = [
        {
            "name": name,
            "lag": stats.readers[name],
            "filter": state.filter,
            "in_flight": len(state.in_flight),
            "lost": state.lost,
            **batch_rows(state),
        }
        for name, state in states.items()
    ]
    readers += [{"name": visible(name), "error": explained(error)} for name, error in stats.strange.items()]
    return {
        "messages": stats.messages,
        "waiting": max(stats.readers.values(), default=0),  # for the slowest reader
        "next": stats.next,
        "bytes": stats.bytes,
        "on_disk": stats.on_disk,
        "oldest": iso(stats.oldest),
        "newest": iso(stats.newest),
        "readers": readers,
    }


def batch_rows(state: LeaseState) -> dict[str, Any]:
    """The number of batches of each state, and the batches. Dead batches come first, because they wait for a person."""
    clock = state.clock.now(DISK.boot())
    kinds: dict[str, list[BatchState]] = {"dead": [], "leased": [], "returned": []}
    for batch in state.batches.values():
        kinds["returned" if batch.expired(clock.elapsed) else batch.state].append(batch)
    rows = [batch_row(kind, batch, clock) for kind, some in kinds.items() for batch in some[:MOST_BATCHES]]
    return {**{kind: len(some) for kind, some in kinds.items()}, "stuck": 0, "batches": rows}


def batch_row(kind: str, batch: BatchState, clock: Clock) -> dict[str, Any]:
    return {
        "id": batch.id,
        "state": kind,
        "key": batch.keys[-1],
        "task": task_of(batch.keys[-1]),
        "records": batch.records,
        "bytes": batch.bytes,
        "attempt": batch.attempt,
        "made": batch.created,  # distinguishes batches of one id
        "leased": iso(arguments.moment(batch.created)),  # for the first time
        "since": iso(arguments.moment(clock.shown(batch.changed, batch.since))),
        "expires": iso(arguments.moment(clock.wall_at(batch.expires))) if batch.expires is not None else None,
        "due": iso(arguments.moment(clock.wall_at(batch.due or 0))) if batch.is_delayed(clock.elapsed) else None,
        "reason": visible(batch.reason, besides="\n\t"),
        "cause": visible(cause_of(batch.reason)) if kind == "dead" else "",
        "owner": None,  # of a leased batch, see `owners`
    }


def state_of(path: str, reader: str | None) -> LeaseState:
    """The batches and keys of a queue, or of a reader of a topic, without a lock."""
    if reader is None:
        return inspection.inspect_state(path)[1]
    return topic_inspection.inspect_topic(path)[1].get(reader) or LeaseState()


def find_batch(path: str, reader: str | None, batch_id: str) -> tuple[BatchState, Clock]:
    """A batch of a queue, or of a reader of a topic, without a lock, and the time there. Raises `BatchNotFound`."""
    state = state_of(path, reader)
    if (found := state.find(batch_id)) is None:
        raise BatchNotFound(
            f"batch {excerpt(batch_id, 120)} no longer exists: it was put back, dropped, or acknowledged long ago"
        )
    return found, state.clock.now(DISK.boot())


class RecentContents:
    """The contents of each connection, kept for `FRESH` seconds and as long as it took to read them."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._kept: dict[tuple[str, str | None], tuple[float, Contents]] = {}  # until when

    async def __call__(self, connection: Connection) -> Contents:
        """Never raises, as `contents_of`."""
        if (fresh := self._fresh(connection)) is not None:
            return fresh
        try:
            return await self._budget.do(connection, partial(self._look, self._kept, connection))
        except Slow as error:
            return Contents(connection.host or "", error=explained(error))

    def _fresh(self, connection: Connection) -> Contents | None:
        until, contents = self._kept.get((connection.conn_id, connection.host), (0.0, None))
        return contents if time.monotonic() < until else None

    def _look(self, kept: dict[tuple[str, str | None], tuple[float, Contents]], connection: Connection) -> Contents:
        if (fresh := self._fresh(connection)) is not None:  # somebody before us in the line has looked
            return fresh
        begun = time.monotonic()
        contents = contents_of(connection)
        now = time.monotonic()
        kept[connection.conn_id, connection.host] = now + FRESH + (now - begun), contents
        return contents

    def forget(self) -> None:
        """Look again at each connection when it is next asked for."""
        self._kept = {}


def explained(error: Exception) -> str:
    """The text for people who may read the connection, see `permissions.told`."""
    text = str(error) if isinstance(error, QewQewError) else getattr(error, "strerror", None) or str(error)
    return visible(f"{type(error).__name__}: {text}", besides="\n\t")


def iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
