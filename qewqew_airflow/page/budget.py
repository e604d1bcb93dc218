"""The page's budget: work on directories has a few threads of its own, and nobody waits longer than `DEADLINE` for it.

What a disk or mount does not answer cannot be interrupted. So each directory has one thread at a time: one that hangs keeps one,
and requests for it are refused meanwhile, at once. Other directories and the API server do not notice.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from airflow.models.connection import Connection

from qewqew_core import QewQewError

DEADLINE = 10.0  # seconds
THREADS = 16  # directories that are worked on at the same time

Value = TypeVar("Value")
_Line = dict["Future[Any]", Callable[[], Any]]


class Slow(QewQewError):
    """A directory has not answered in time. ``begun``: the work goes on, and may still be done.

    The text names nothing but the connection, so everybody may read it.
    """

    def __init__(self, message: str, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class Budget:
    """Work on the directories of connections, in the order in which it was asked for."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._lines: dict[str, _Line] = {}  # by directory: what waits for its turn; the next directory first
        self._busy: dict[str, float] = {}  # directories that are worked on, and since when

    async def do(self, connection: Connection, work: Callable[[], Value]) -> Value:
        """What ``work`` returns or raises, in a thread of the page. Raises `Slow`."""
        directory, future = connection.host or "", Future[Value]()
        with self._guard:
            since = self._busy.get(directory)
            if since is not None and time.monotonic() - since > DEADLINE:
                raise self._late(connection)
            self._lines.setdefault(directory, {})[future] = partial(copy_context().run, work)
            self._begin()
        answer = asyncio.wrap_future(future)
        await asyncio.wait([answer], timeout=DEADLINE)
        if answer.done():
            return answer.result()
        with self._guard:
            begun = self._lines.get(directory, {}).pop(future, None) is None
            answer.cancel()
            raise self._late(connection, begun)

    def _begin(self) -> None:
        """Start what may be started. The guard is held."""
        for directory in list(self._lines):
            if directory in self._busy or len(self._busy) == THREADS:
                continue
            line = self._lines.pop(directory)
            if len(line) > 1:
                self._lines[directory] = line  # behind the others
            if line:
                future = next(iter(line))
                job = directory, future, line.pop(future)
                future.set_running_or_notify_cancel()
                threading.Thread(target=self._do, args=job, name="qewqew page", daemon=True).start()
                self._busy[directory] = time.monotonic()

    def _do(self, directory: str, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        with self._guard:
            del self._busy[directory]
            self._begin()

    def _late(self, connection: Connection, begun: bool = False) -> Slow:
        who = f"the directory of connection {connection.conn_id!r}"
        if (connection.host or "") not in self._busy:
            return Slow(f"{who} has to wait: the page looks at {THREADS} others, and they do not answer")
        return Slow(f"{who} has not answered for {DEADLINE:g} seconds: its disk or mount hangs, or there is much to do", begun)
