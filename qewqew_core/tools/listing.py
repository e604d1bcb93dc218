"""Which queues and topics lie in a directory, told by their files; nothing is locked or changed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from dataclasses import dataclass, field

from qewqew_core.batch import manifest, places
from qewqew_core.formats import chunk
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths

REMAINS = (paths.LOG, places.BATCHES, places.DEAD)  # what may be there of a queue without a header
_OWN = (places.BATCHES, places.DEAD, paths.LEASE, paths.SPILL, paths.STAGED, places.DAMAGED)  # directories of a queue


@dataclass
class Listing:
    """Names relative to the directory, with slashes where a queue or topic lies further down."""

    queues: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    complete: bool = True  # False: there may be more, see `find`


def find(directory: str, most: int = 1000) -> Listing:
    """The queues and topics in a directory and below it, those in the directory itself first; links are not followed.

    At most so many of both, and so many directories are looked into. What cannot be read below the directory is left
    out; of the directory itself the error (OSError) is raised.
    """
    found = Listing()
    ahead, seen = deque([""]), 0
    while ahead:
        prefix = ahead.popleft()
        here = os.path.join(directory, prefix)
        seen += 1
        try:
            queues = queues_in(here)
            below = sorted(one.name for one in os.scandir(here) if one.is_dir(follow_symlinks=False))
        except OSError:
            if not prefix:
                raise
            continue
        own = {queue + suffix for queue in queues for suffix in _OWN}
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
    """The names of the queues in this directory alone, sorted. Raises OSError."""
    names = set(os.listdir(directory))
    candidates = {name.removesuffix(suffix) for name in names for suffix in ("", *REMAINS)} - {""}
    return [name for name in sorted(candidates) if _is_queue(directory, name, names)]


def is_topic(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, os.path.basename(directory) + ".idx"))


def _is_queue(directory: str, name: str, names: set[str]) -> bool:
    """A header with a log or chunk files beside it; or a log, or batches, of an empty closed queue that remembers them."""
    path = os.path.join(directory, name)
    with contextlib.suppress(OSError):  # what vanishes, or may not be read
        if name in names:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return False
            if status.st_size == chunk.FIRST.size and (name + paths.LOG in names or paths.chunk_ids(path, list(names))):
                return True
        if name + paths.LOG in names:
            with open(path + paths.LOG, "rb") as file:
                if file.read(len(logs.MAGIC)) == logs.MAGIC:
                    return True
        homes = [os.path.join(directory, home) for home in names & {name + places.BATCHES, name + places.DEAD}]
        return any(os.path.exists(os.path.join(home, one, manifest.MANIFEST)) for home in homes for one in os.listdir(home))
    return False
