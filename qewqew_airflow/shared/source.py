"""Where batches come from: a queue, or a reader of a topic."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from qewqew_airflow.arguments import is_rendered_later
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared import locks
from qewqew_core import BadArgument, Queue, QueueStats, Reader
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.formats.tags import Filter
from qewqew_core.secrecy import excerpt
from qewqew_core.topic.topic_paths import check_reader_name, rdx_of, stem_of

Start = Literal["oldest", "latest"] | int | datetime


def check_either(queue_name: str | None, topic: str | None) -> None:
    """Raise `BadArgument` unless exactly one is given."""
    if (queue_name is None) == (topic is None):
        raise BadArgument("give either queue_name or topic")


def _start(value: Any) -> Start:
    """Where a new reader begins; numbers and times also as text, because templates give text."""
    start: Any = value
    if isinstance(value, str) and value not in ("oldest", "latest"):
        with contextlib.suppress(ValueError):
            start = int(value) if value.isdecimal() else datetime.fromisoformat(value)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise BadArgument(f"start needs a time zone: {start}")
    elif start not in ("oldest", "latest") and (type(start) is not int or start < 0):
        raise BadArgument(f"start must be 'oldest', 'latest', the number of a message or a time, not {excerpt(value, 80)}")
    return cast(Start, start)


@dataclass(frozen=True)
class Source:
    """A queue, or a reader of a topic, from the arguments of an operator. Raises `BadArgument`, `BadPath` if they are wrong.

    Templates are checked when they are rendered.
    """

    queue_name: str | None = None
    topic: str | None = None
    reader: str | None = None
    filter: str | None = None
    start: Start = "oldest"

    def __post_init__(self) -> None:
        check_either(self.queue_name, self.topic)
        if self.topic is None:
            for name, default in (("reader", None), ("filter", None), ("start", "oldest")):
                if getattr(self, name) != default:
                    raise BadArgument(f"{name} is for a topic")
            return
        if self.reader is None:
            raise BadArgument("a topic needs the name of one of its readers: give reader")
        if not is_rendered_later(self.reader):
            check_reader_name(self.reader)
        if self.filter is not None and not is_rendered_later(self.filter):
            Filter(self.filter)
        if not is_rendered_later(self.start):
            object.__setattr__(self, "start", _start(self.start))

    def __str__(self) -> str:
        return f"queue {self.queue_name}" if self.topic is None else f"reader {self.reader} of topic {self.topic}"

    @property
    def name(self) -> str:
        """The name of the queue or topic."""
        return str(self.queue_name if self.topic is None else self.topic)

    def names(self) -> dict[str, Any]:
        """For the result of a task."""
        return {"queue": self.queue_name} if self.topic is None else {"topic": self.topic, "reader": self.reader}

    def path(self, hook: QewQewHook) -> str:
        """The path of the queue or topic. Raises `BadPath`, and touches nothing."""
        return hook.path(self.name)

    @contextlib.contextmanager
    def open(self, hook: QewQewHook, **settings: Any) -> Iterator[Queue | Reader]:
        """Open what has `lease`, `batches` and `batch`. Creates a missing reader. The reader has the filter from now on."""
        with contextlib.ExitStack() as opened:
            with locks.lock_wait(connection=hook.qewqew_conn_id, **self.names()):
                if self.topic is None:
                    found: Queue | Reader = opened.enter_context(hook.queue(self.name, **settings))
                else:
                    assert self.reader is not None
                    topic = opened.enter_context(hook.topic(self.topic, **settings))
                    found = opened.enter_context(topic.reader(self.reader, self.filter, self.start))
            yield found

    def prepare(self, hook: QewQewHook) -> None:
        """Create the reader, or set its filter, so that `inspect` counts what a lease will get."""
        if self.topic is not None and (self.filter is not None or not self._has_reader(hook)):
            with self.open(hook):
                pass

    def look(self, hook: QewQewHook) -> QueueStats:
        """`inspect`, for one who waits until there is enough. Raises `BadPath` where this user could never lease it."""
        path = self.path(hook)
        is_topic = self.topic is not None and DISK.exists(path)
        home = os.path.dirname(stem_of(path, str(self.reader)) if is_topic else path)
        with opening(path, "queue" if self.topic is None else "topic"):
            try:
                DISK.check_writable(home)
            except OSError as error:
                if error.errno != errno.EROFS:  # a host that only looks may have mounted it read-only
                    raise
        return self.inspect(hook)

    def inspect(self, hook: QewQewHook) -> QueueStats:
        """How much waits, without a lock."""
        if self.topic is None:
            return hook.inspect(self.name)
        assert self.reader is not None
        return hook.inspect_reader(self.topic, self.reader)

    def files(self, hook: QewQewHook) -> list[str]:
        """The beginnings of the absolute paths of the files that change when the counts of `inspect` change."""
        path = self.path(hook)
        if self.topic is None:
            return [path]
        return [os.path.join(path, os.path.basename(path) + "."), stem_of(path, f"{self.reader}.")]

    def may_have_leases(self, hook: QewQewHook) -> bool:
        """False if there cannot be a batch to return. Creates nothing."""
        return self._has_reader(hook) if self.topic is not None else bool(self.inspect(hook).leased)

    def _has_reader(self, hook: QewQewHook) -> bool:
        path = self.path(hook)
        with opening(path, "topic"):
            return DISK.exists(rdx_of(path, str(self.reader)))
