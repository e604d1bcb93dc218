"""What monitors want to know about all queues and readers below a directory, without a lock: is anything late, stuck or
broken?
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from qewqew_core import arguments
from qewqew_core.batch import damage_met
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.batch.stats import QueueStats
from qewqew_core.disk import lock
from qewqew_core.disk.files import DISK, look_into
from qewqew_core.disk.lock import Holding
from qewqew_core.errors import QewQewError
from qewqew_core.limits import now_ms
from qewqew_core.queue.inspection import inspect_state
from qewqew_core.tools import listing
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.printing import visible
from qewqew_core.topic import reader_files
from qewqew_core.topic.topic_inspection import inspect_reader, inspect_topic, readers_of
from qewqew_core.topic.topic_paths import lock_of, stem_of

if TYPE_CHECKING:
    import pendulum

MOST = 100_000  # queues and topics below one directory


@dataclass(frozen=True)
class Watched:
    """A queue, or a reader of a topic: what waits there, or why that cannot be read."""

    path: str
    kind: Kind | None  # None: a directory that cannot be read
    reader: str | None  # None also for a topic that has no reader
    stats: QueueStats | None
    error: QewQewError | None = None
    damage: str | None = None  # that a task has met, and that nobody has repaired since
    given: str = ""  # the absolute path that was asked for

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
            places, unreadable = [(path, kind)], {}
        else:
            found = listing.find(path, MOST)
            places = [(os.path.join(path, name), Kind.QUEUE) for name in found.queues]
            places += [(os.path.join(path, name), Kind.TOPIC) for name in found.topics]
            unreadable = found.unreadable
        for place, kind in places:
            met = damage_met.noted(listing.stem_of_damage(place, kind))
            for watched in _in(place, kind):
                yield replace(watched, given=path, damage=met)
        for name, error in unreadable.items():
            yield Watched(os.path.join(path, name), None, None, None, error, given=path)


def _in(path: str, kind: Kind) -> Iterator[Watched]:
    if kind is Kind.QUEUE:
        yield _look(path, kind, None, lambda: inspect_state(path, closely=True)[0])
        return
    try:
        readers = readers_of(path)
    except QewQewError as error:
        yield Watched(path, kind, None, None, error)
        return
    if not readers:
        yield _look(path, kind, None, partial(_unread, path))
    for reader in readers:
        yield _look(path, kind, reader, partial(inspect_reader, path, reader, closely=True))


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


def long_leases(watched: Watched, limit: timedelta) -> list[tuple[BatchState, timedelta]]:
    """The batches that have been leased for longer than this, now, and for how long; the oldest lease first."""
    if watched.stats is None or age(watched.stats.oldest_lease) <= limit:
        return []
    if watched.reader is None:
        state: LeaseState = inspect_state(watched.path)[1]
    else:
        state = inspect_topic(watched.path)[1].get(watched.reader) or LeaseState()
    clock = state.clock.now(DISK.boot())
    leased = [batch for batch in state.batches.values() if batch.state == "leased" and not batch.expired(clock.elapsed)]
    found = [(batch, age(arguments.moment(clock.shown(batch.changed, batch.since)))) for batch in leased]
    return sorted((each for each in found if each[1] > limit), key=lambda each: -each[1])


@dataclass(frozen=True)
class FileSystem:
    """Free room for ordinary users, where the queues are."""

    directory: str
    free_bytes: int
    free_inodes: int | None  # None: their number is not limited


def file_systems(paths: Iterable[str], found: Iterable[Watched]) -> list[FileSystem]:
    """Those of these paths, and of what was found below them; of each the first directory that is on it."""
    homes = [*map(os.path.abspath, paths), *(watched.path for watched in found)]
    rooms: dict[int, FileSystem] = {}
    for home in homes:
        directory = home if os.path.isdir(home) else os.path.dirname(home)
        with contextlib.suppress(OSError):  # it vanishes, or does not answer: who looks at the queue is told
            if (device := os.stat(directory).st_dev) not in rooms:
                room = os.statvfs(directory)
                rooms[device] = FileSystem(directory, room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None)
    return list(rooms.values())


def holdings(found: Iterable[Watched]) -> list[tuple[Watched, Holding | None]]:
    """Who has each queue open, and who appends to each topic."""
    first = {watched.path: replace(watched, reader=None) for watched in found if watched.kind is not None}
    return [(watched, lock.holding(lock_of(path) if watched.kind is Kind.TOPIC else path)) for path, watched in first.items()]


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
    "delayed": ("Batches of these that no lease may take yet.", lambda stats: stats.delayed),
    "dead": ("Batches in the dead letters.", lambda stats: stats.dead),
    "missing": ("Batches whose files somebody has removed.", lambda stats: stats.missing),
    "on_disk_bytes": ("Bytes of disk.", lambda stats: stats.on_disk),
    "clock_step_seconds": ("By how much the wall clock was set, when that was last noticed.", lambda stats: stats.clock_step),
}


def exposition(paths: Iterable[str], say: Callable[[str], None]) -> str:
    """The gauges ``qewqew_…`` in Prometheus' text format, with the labels ``path`` and ``reader``.

    ``qewqew_readable`` is 0 for something that cannot be read, which has no other gauges then. ``qewqew_watched`` is how many
    queues and readers are at and below each of the ``paths``: 0 also for one that is not there, about which ``say`` is called.
    """
    paths = list(map(os.path.abspath, paths))
    found: list[Watched] = []
    for path in paths:
        try:
            found += watch([path])
        except QewQewError as error:  # the other paths are watched nevertheless
            say(str(error))
    watched = [(_path(path), sum(each.given == path for each in found)) for path in paths]
    lines = _family("watched", "Queues and readers at and below this path.", watched)
    labelled = [(_labels(watched), watched.stats) for watched in found]
    lines += _family("readable", "1 if it can be read, else 0.", [(labels, int(stats is not None)) for labels, stats in labelled])
    for name, (text, value) in _GAUGES.items():
        lines += _family(name, text, [(labels, value(stats)) for labels, stats in labelled if stats is not None])
    met = [(_labels(each), int(each.damage is not None)) for each in found]
    lines += _family("damage_met", "1 if a task has met damage that nobody has repaired since, else 0.", met)
    readers = [(_labels(each), int(_is_in_use(each.path, each.reader))) for each in found if each.reader is not None]
    lines += _family("reader_in_use", "1 if a consumer has the reader open, else 0.", readers)
    locks = [(_labels(each), holding) for each, holding in holdings(found)]
    for name, (text, of_lock) in _OF_LOCKS.items():
        lines += _family(name, text, [(labels, of_lock(holding) if holding else 0) for labels, holding in locks])
    rooms = file_systems(paths, found)
    lines += _family("free_bytes", "Free bytes of the file system.", [(_path(room.directory), room.free_bytes) for room in rooms])
    inodes = [(_path(room.directory), room.free_inodes) for room in rooms if room.free_inodes is not None]
    lines += _family("free_inodes", "Free inodes of the file system.", inodes)
    return "\n".join(lines) + "\n"


_OF_LOCKS: dict[str, tuple[str, Callable[[Holding], float]]] = {
    "lock_owner": (
        "The process that has the queue open, or appends to the topic; 0: none that is known.",
        lambda has: has.pid or 0,
    ),
    "lock_held_seconds": ("For how long it has; 0 also for a Java program.", lambda has: has.seconds or 0),
    "lock_waiters": ("How many wait for it, at least.", lambda has: has.waiters),
}


def _is_in_use(path: str, reader: str) -> bool:
    try:
        return reader_files.is_in_use(look_into(path, path), stem_of(path, reader))
    except (OSError, QewQewError):  # ``readable`` says so
        return False


def _family(name: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP qewqew_{name} {text}", f"# TYPE qewqew_{name} gauge"]
    return head + [f"qewqew_{name}{{{labels}}} {value}" for labels, value in samples]


def _seconds(moment: pendulum.DateTime | None) -> float:
    return round(age(moment).total_seconds(), 3)


def _labels(watched: Watched) -> str:
    return f'{_path(watched.path)},kind="{watched.kind or "directory"}",reader="{_quoted(watched.reader or "")}"'


def _path(path: str) -> str:
    return f'path="{_quoted(path)}"'


def _quoted(text: str) -> str:
    return visible(text).replace("\\", r"\\").replace('"', r"\"")
