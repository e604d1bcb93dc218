"""Where the files of a queue lie, and which paths can be a queue.

::

    NAME               header file            NAME.batches/ID/   batches: leased, returned, acknowledged
    NAME.1, NAME.2 …   chunk files            NAME.dead/ID/      dead letters
    NAME.wal           transaction log        NAME.lease/        the batch that is being made
    NAME.damaged/N/    set aside by a repair  NAME.spill/        what open sessions have put
    NAME.stamp         says that there is a log, and how often batches changed
    NAME.staged/       what stages have put, and not committed yet
    NAME.reserve/      room for a full disk, see `Reserve`
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from qewqew_core import arguments
from qewqew_core.batch import names
from qewqew_core.batch.names import LEASE, LOG, NEW_LOG, SPILL, STAGED, STAMP, chunk_ids
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadPath

__all__ = ["LEASE", "LOG", "NEW_LOG", "SPILL", "STAGED", "STAMP", "check_path", "chunk_ids", "names_of"]


def names_of(path: str) -> Iterator[tuple[str, bool]]:
    """The paths of a queue's files and directories beside its header and chunks, and whether each is a directory."""
    for suffixes, is_directory in ((names.FILES, False), (names.DIRECTORIES, True)):
        for suffix in suffixes:
            yield path + suffix, is_directory


def check_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a queue; raises `BadPath` before anything is touched if it cannot be one."""
    given = arguments.check_path_text("queue", path)
    with opening(given, "queue"):
        return _checked(given)


def _checked(given: str) -> str:
    if given.endswith("/") or DISK.is_directory(given, follow=True):
        raise BadPath(
            "this is a directory; a queue is a file in a directory, for example " + os.path.join(given, "orders.qew"), path=given
        )
    full = os.path.join(os.path.abspath(os.path.dirname(given)), os.path.basename(given))
    parent = os.path.dirname(full)
    if os.path.basename(full) in (".", "..") or len(os.fsencode(os.path.basename(full))) > 200:
        raise BadPath("cannot be the name of a queue (at most 200 bytes)", path=given)
    names.check(full, "queue")
    if not DISK.is_directory(parent, follow=True):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    try:
        kind = DISK.status(full).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    if not stat.S_ISREG(kind):
        raise BadPath("is not a regular file", path=full)
    return full
