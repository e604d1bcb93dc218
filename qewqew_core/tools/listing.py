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
from qewqew_core.errors import QewQewError
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


@dataclass
class Listing:
    """Names relative to the directory, with slashes for queues and topics further down."""

    queues: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    unreadable: dict[str, QewQewError] = field(default_factory=dict)  # directories below, in which there may be more
    complete: bool = True  # False: there may be more, see `find`


def find(directory: str, most: int = 1000) -> Listing:
    """The queues and topics in a directory and below, those in the directory itself first. Links are not followed.

    Finds at most this many, and looks into at most this many directories. Raises `BadPath` if it cannot read the directory
    itself.
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
        except FileNotFoundError:
            continue  # it was removed since
        except QewQewError as error:
            if not prefix:
                raise
            if not _is_of_the_system(here):
                found.unreadable[prefix.removesuffix("/")] = error
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


def _is_of_the_system(directory: str) -> bool:
    """Whether it is what each file system has at its top for its own repair, which root alone may read."""
    return os.path.basename(directory.rstrip("/")) == "lost+found" and DISK.status(directory, follow=False).st_uid == 0


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
    with contextlib.suppress(OSError):  # what vanishes, or may not be read: the other files may tell
        is_header = name in names and (status := os.stat(path)).st_size == chunk.FIRST.size and stat.S_ISREG(status.st_mode)
        if is_header and (name + paths.LOG in names or paths.chunk_ids(path, list(names))):
            return True
    for suffix, magic in ((paths.LOG, logs.MAGIC), (paths.STAMP, stamp.MAGIC)):
        if name + suffix in names:
            with contextlib.suppress(OSError), Descriptors([DISK.open_to_read(path + suffix)]) as (fd,):
                if DISK.read(fd, len(magic), 0) == magic:
                    return True
    for home in sorted(names & {name + places.BATCHES, name + places.DEAD}):
        with contextlib.suppress(OSError):
            home = os.path.join(directory, home)
            if DISK.is_directory(home) and any(
                os.path.exists(os.path.join(home, batch, manifest.MANIFEST)) for batch in os.listdir(home)
            ):
                return True
    return False
