"""Which paths are queues and topics, by the files at a path or in a directory. Nothing is locked or changed."""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from collections import deque
from dataclasses import dataclass, field

from qewqew_core.batch import manifest, names, places
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.formats import chunk
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths, stamp
from qewqew_core.topic.topic_paths import is_topic

_REMAINS = (paths.LOG, paths.STAMP, places.BATCHES, places.DEAD)  # what may be there of a queue without a header


class Kind(enum.StrEnum):
    """What is at a path."""

    QUEUE = "queue"
    TOPIC = "topic"


def kind_of(path: str) -> Kind | None:
    """What is at a path, whole or damaged; None for nothing, or a directory that is not a topic.

    Any other file counts as a queue; opening it says what is wrong with it. Raises `BadPath` without permission to look, and
    `Broken` if the file system does not answer.
    """
    full = os.path.abspath(path)
    with opening(full, "directory"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if DISK.is_directory(full, follow=True):
            return Kind.TOPIC if is_topic(full) else None
        if any(DISK.exists(full + suffix) for suffix in ("", *_REMAINS)):
            return Kind.QUEUE
        if paths.chunk_ids(full, os.listdir(os.path.dirname(full))):
            return Kind.QUEUE
    return None


def store_of(path: str) -> tuple[str, Kind] | None:
    """The queue or topic to which a file belongs, as errors name it."""
    place = os.path.abspath(path)
    with contextlib.suppress(OSError):
        while place != os.path.dirname(place):
            if is_topic(place):
                return place, Kind.TOPIC
            parent = os.path.dirname(place)
            for store in (names.owner_of(place), place):
                if store is not None and os.path.isdir(parent) and os.path.basename(store) in queues_in(parent):
                    return store, Kind.QUEUE
            place = parent
    return None


def stem_of_damage(path: str, kind: Kind) -> str:
    """What the name of the directory begins with in which a store keeps what was damaged."""
    return path if kind is Kind.QUEUE else os.path.join(path, "state", "topic")


@dataclass
class Listing:
    """Names relative to the directory, with slashes for queues and topics further down."""

    queues: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    complete: bool = True  # False: there may be more, see `find`


def find(directory: str, most: int = 1000) -> Listing:
    """The queues and topics in a directory and below, those in the directory itself first. Links are not followed.

    Finds at most this many, and looks into at most this many directories. It leaves out what it cannot read below the directory,
    and raises `BadPath` if it cannot read the directory itself.
    """
    found = Listing()
    ahead, seen = deque([""]), 0
    while ahead:
        prefix = ahead.popleft()
        here = os.path.join(directory, prefix)
        seen += 1
        try:
            queues = queues_in(here)
            with opening(here, "directory"):
                below = sorted(entry.name for entry in os.scandir(here) if entry.is_dir(follow_symlinks=False))
        except OSError:
            if not prefix:
                raise
            continue
        own = {queue + suffix for queue in queues for suffix in names.DIRECTORIES}
        found.queues += [prefix + name for name in queues]
        for name in below:
            if is_topic(os.path.join(here, name)):
                found.topics.append(prefix + name)
            elif name not in own:
                ahead.append(f"{prefix}{name}/")
        if len(found.queues) + len(found.topics) > most or (ahead and seen == most):
            found.complete = False
            break
    del found.queues[most:], found.topics[max(0, most - len(found.queues)) :]
    return found


def queues_in(directory: str) -> list[str]:
    """The names of the queues directly in this directory, sorted. Raises `BadPath`."""
    with opening(directory, "directory"):
        names = set(os.listdir(directory))
    candidates = {name.removesuffix(suffix) for name in names for suffix in ("", *_REMAINS)} - {""}
    return [name for name in sorted(candidates) if _is_queue(directory, name, names)]


def names_in(directory: str) -> list[str]:
    """The names of the queues and topics directly in this directory, sorted. Raises `BadPath`."""
    with opening(directory, "directory"):
        topics = [entry.name for entry in os.scandir(directory) if entry.is_dir() and is_topic(entry.path)]
    return sorted([*queues_in(directory), *topics])


def _is_queue(directory: str, name: str, names: set[str]) -> bool:
    """A header with a log or chunk files beside it; or a log, batches, or the stamp of a lost log, without a header. Log and
    stamp need not be readable: who looks at the queue is told.
    """
    path = os.path.join(directory, name)
    if {name + paths.LOG, name + paths.STAMP} <= names and not os.access(path + paths.LOG, os.R_OK):
        return True
    with contextlib.suppress(OSError):  # what vanishes, or may not be read
        if name in names:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return False
            if status.st_size == chunk.FIRST.size and (name + paths.LOG in names or paths.chunk_ids(path, list(names))):
                return True
        for suffix, magic in ((paths.LOG, logs.MAGIC), (paths.STAMP, stamp.MAGIC)):
            if name + suffix in names:
                with Descriptors([DISK.open_to_read(path + suffix)]) as (fd,):
                    if DISK.read(fd, len(magic), 0) == magic:
                        return True
        homes = [os.path.join(directory, home) for home in names & {name + places.BATCHES, name + places.DEAD}]
        homes = [*filter(DISK.is_directory, homes)]
        return any(os.path.exists(os.path.join(home, batch, manifest.MANIFEST)) for home in homes for batch in os.listdir(home))
    return False
