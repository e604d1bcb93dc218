"""What monitors want to know about all queues and readers below a directory, without a lock: is anything late, stuck or
broken?
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from qewqew_core.batch.stats import QueueStats
from qewqew_core.errors import QewQewError
from qewqew_core.limits import now_ms
from qewqew_core.queue.inspection import inspect
from qewqew_core.tools import listing
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.printing import visible
from qewqew_core.topic.topic_inspection import inspect_reader, inspect_topic, readers_of

if TYPE_CHECKING:
    import pendulum

MOST = 100_000  # queues and topics below one directory


@dataclass(frozen=True)
class Watched:
    """A queue, or a reader of a topic: what waits there, or why that cannot be read."""

    path: str
    kind: Kind
    reader: str | None  # None also for a topic that has no reader
    stats: QueueStats | None
    error: QewQewError | None = None

    @property
    def name(self) -> str:
        return self.path if self.reader is None else f"{self.path}, reader {self.reader}"


def watch(paths: Iterable[str]) -> Iterator[Watched]:
    """The queues and readers at these paths, and in and below these directories.

    Paths are made absolute, because a monitor has many hosts and directories. In a topic without readers everything waits. Raises
    `BadPath` for a path with nothing there and a directory that cannot be read; further down, each has its own error.
    """
    for path in map(os.path.abspath, paths):
        kind = listing.kind_of(path)
        if kind is not None:
            yield from _in(path, kind)
            continue
        found = listing.find(path, MOST)
        for kind, names in ((Kind.QUEUE, found.queues), (Kind.TOPIC, found.topics)):
            for name in names:
                yield from _in(os.path.join(path, name), kind)


def _in(path: str, kind: Kind) -> Iterator[Watched]:
    if kind is Kind.QUEUE:
        yield _look(path, kind, None, partial(inspect, path))
        return
    try:
        readers = readers_of(path)
    except QewQewError as error:
        yield Watched(path, kind, None, None, error)
        return
    if not readers:
        yield _look(path, kind, None, partial(_unread, path))
    for reader in readers:
        yield _look(path, kind, reader, partial(inspect_reader, path, reader))


def _look(path: str, kind: Kind, reader: str | None, look: Callable[[], QueueStats]) -> Watched:
    try:
        return Watched(path, kind, reader, look())
    except QewQewError as error:
        return Watched(path, kind, reader, None, error)


def _unread(path: str) -> QueueStats:
    """What waits in a topic that nobody reads."""
    stats, _ = inspect_topic(path)
    return QueueStats(
        *(stats.messages, stats.bytes, stats.blocks, stats.oldest), 0, 0, 0, stats.on_disk, oldest_unacknowledged=stats.oldest
    )


def age(moment: pendulum.DateTime | None) -> timedelta:
    """How long ago that was; zero for None and for the future (after a change of the clock)."""
    return timedelta(milliseconds=max(0, now_ms() - round(moment.timestamp() * 1000))) if moment else timedelta(0)


# Prometheus

_GAUGES: dict[str, tuple[str, Callable[[QueueStats], float]]] = {
    "records": ("Records that wait.", lambda stats: stats.records),
    "bytes": ("Bytes of the records that wait.", lambda stats: stats.bytes),
    "oldest_age_seconds": ("How long the oldest record has waited.", lambda stats: _seconds(stats.oldest)),
    "oldest_unacknowledged_seconds": (
        "How long the oldest record has not been acknowledged: waiting, leased, returned or dead.",
        lambda stats: _seconds(stats.oldest_unacknowledged),
    ),
    "leased": ("Batches that are leased.", lambda stats: stats.leased),
    "oldest_lease_age_seconds": ("How long the oldest lease has lasted.", lambda stats: _seconds(stats.oldest_lease)),
    "returned": ("Batches that wait for another lease.", lambda stats: stats.returned),
    "dead": ("Batches in the dead letters.", lambda stats: stats.dead),
    "missing": ("Batches whose files somebody has removed.", lambda stats: stats.missing),
    "on_disk_bytes": ("Bytes of disk.", lambda stats: stats.on_disk),
}


def exposition(found: Iterable[Watched]) -> str:
    """The gauges ``qewqew_…`` in Prometheus' text format, with the labels ``path`` and ``reader``.

    ``qewqew_readable`` is 0 for something that cannot be read, which has no other gauges then.
    """
    labelled = [(_labels(watched), watched.stats) for watched in found]
    lines = _family("readable", "1 if it can be read, else 0.", [(labels, int(stats is not None)) for labels, stats in labelled])
    for name, (text, value) in _GAUGES.items():
        lines += _family(name, text, [(labels, value(stats)) for labels, stats in labelled if stats is not None])
    return "\n".join(lines) + "\n"


def _family(name: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP qewqew_{name} {text}", f"# TYPE qewqew_{name} gauge"]
    return head + [f"qewqew_{name}{{{labels}}} {value}" for labels, value in samples]


def _seconds(moment: pendulum.DateTime | None) -> float:
    return round(age(moment).total_seconds(), 3)


def _labels(watched: Watched) -> str:
    def quoted(text: str) -> str:
        return visible(text).replace("\\", r"\\").replace('"', r"\"")

    return f'path="{quoted(watched.path)}",kind="{watched.kind}",reader="{quoted(watched.reader or "")}"'
