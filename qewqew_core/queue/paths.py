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
from collections.abc import Iterable

from qewqew_core import arguments
from qewqew_core.batch.places import BATCHES, DAMAGED, DEAD
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import RESERVE
from qewqew_core.errors import BadPath
from qewqew_core.formats import chunk

LOG, LEASE, SPILL, STAGED, STAMP = ".wal", ".lease", ".spill", ".staged", ".stamp"


def chunk_ids(queue: str, names: Iterable[str]) -> set[int]:
    """The ids of the chunk files of a queue, among the names in its directory."""
    prefix = os.path.basename(queue) + "."
    ids = set()
    for name in names:
        suffix = name[len(prefix) :]
        if name.startswith(prefix) and suffix.isdecimal() and suffix.isascii() and suffix[0] != "0" and len(suffix) < 6:
            ids.add(int(suffix))
    return {chunk_id for chunk_id in ids if chunk_id <= chunk.MAX_ID}


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
    if not DISK.is_directory(parent, follow=True):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    try:
        kind = DISK.status(full).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    if not stat.S_ISREG(kind):
        raise BadPath("is not a regular file", path=full)
    base, dot, suffix = full.rpartition(".")
    reserved = suffix.isdecimal() or "." + suffix in (LOG, BATCHES, DEAD, LEASE, SPILL, STAGED, DAMAGED, STAMP, RESERVE)
    if dot and reserved and os.path.basename(base) and (DISK.exists(base) or DISK.exists(base + LOG)):
        raise BadPath(f"is a file of the queue {base}; open that, or choose another name", path=full)
    return full
