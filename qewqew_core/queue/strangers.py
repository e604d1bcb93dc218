"""What is in the place of a file or directory that a queue has or may have, and is not the queue's: links, pipes, devices, what
belongs to somebody else. Every look, `verify` and `repair` name the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from itertools import chain

from qewqew_core.batch import damage_met, places
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import DISK, Files
from qewqew_core.disk.opening import opening, strange, unwritable
from qewqew_core.errors import BadPath
from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.queue.reading import is_too_large, read_pointers

_MANY = 1000  # names in a directory
_listed: dict[str, tuple[float, dict[str, dict[str, bool]]]] = {}  # by directory: until when that is good, and what it has


def strangers(files: Files, path: str, closely: bool = True) -> Iterator[BadPath]:
    """Those at the queue with this path. Not ``closely``: only those at names that each queue has. Then the time does not
    depend on the number of batches that are kept, or of other queues; and what is in nobody's way stops nobody.
    """
    if not closely:
        yield from strange(files, paths.names_of(path), "queue")
        return
    flat = places.names_in(files, *(path + suffix for suffix in (paths.LEASE, paths.SPILL, paths.STAGED)), are_batches=False)
    batches = places.names_in(files, path + places.BATCHES, path + places.DEAD)
    yield from unwritable(files, os.path.dirname(path), "queue")
    yield from _strange_header(files, path)
    names = chain(paths.names_of(path), damage_met.names_of(path), flat, batches)
    yield from strange(files, names, "queue")
    yield from strange_chunks(files, path)


def _strange_header(files: Files, path: str) -> Iterator[BadPath]:
    """A link there is followed, as an opening follows it."""
    try:
        with opening(path, "queue"):
            if files.is_link(path):
                try:
                    Descriptors([files.open_to_read(path, follow=True)]).close()
                except FileNotFoundError:
                    raise OSError(errno.ELOOP, "it leads to nothing", path) from None
            else:
                files.check_kind(path)
    except BadPath as error:
        yield error


def strange_chunks(files: Files, path: str) -> Iterator[BadPath]:
    """Those at names of chunk files, and files that are too large for one."""
    for file, is_directory in _chunks(files, path):
        found = list(strange(files, [(file, is_directory)], "queue"))
        yield from found
        with contextlib.suppress(OSError):  # gone meanwhile
            if not found and is_too_large(on_disk := read_pointers(files, file)):
                said = f"a file of {on_disk.size:,} bytes is in the way of a file of the queue, which has at most"
                yield BadPath(f"{said} {chunk.MAX_CHUNK_SIZE:,}. Nothing was changed; move it away", path=file)


def _chunks(files: Files, path: str) -> Iterator[tuple[str, bool]]:
    home, name = os.path.split(path)
    found = _chunks_in(files, home).get(name, {})
    for chunk_id in sorted(paths.chunk_ids(path, found)):
        file = chunk.chunk_path(path, chunk_id)
        if found[os.path.basename(file)] or not _is_topic(files, file):
            yield file, False


def _is_topic(files: Files, path: str) -> bool:
    """Whether a topic has the name of a chunk file, which it may."""
    with contextlib.suppress(OSError):  # somebody else's, who lets nobody look
        if files.is_directory(path):
            return any(DISK.exists(os.path.join(path, name)) for name in (os.path.basename(path) + ".idx", "data"))
    return False


def _chunks_in(files: Files, home: str) -> dict[str, dict[str, bool]]:
    """The names in a directory that chunk files may have, by the queue's, and whether each is a regular file. Who looks at
    thousands of queues in it, one after the other, does not list them all each time.
    """
    began = time.monotonic()
    until, found = _listed.get(home, (began, {}))
    if began < until:
        return found
    names, found = files.kinds(home), {}
    for name, is_regular in names.items():
        queue, _, number = name.rpartition(".")
        if number.isdecimal():
            found.setdefault(queue, {})[name] = is_regular
    now = time.monotonic()
    for other in [other for other, (end, _) in list(_listed.items()) if end < now]:
        _listed.pop(other, None)
    if len(names) > _MANY:
        _listed[home] = now + 10 * (now - began), found
    return found
