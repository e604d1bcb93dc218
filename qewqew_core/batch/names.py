"""Which names beside a queue are those of its own files: another queue, or a topic, of such a name would meet them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from qewqew_core.batch.places import BATCHES, DAMAGED, DEAD
from qewqew_core.disk.reserve import RESERVE
from qewqew_core.errors import BadPath
from qewqew_core.formats import chunk

LOG, STAMP, LEASE, SPILL, STAGED = ".wal", ".stamp", ".lease", ".spill", ".staged"
NEW_LOG = LOG + ".tmp"
FILES = LOG, NEW_LOG, STAMP
DIRECTORIES = BATCHES, DEAD, DAMAGED, LEASE, SPILL, STAGED, RESERVE
_MOST_BYTES = 3_500  # of a path: a file of a batch has twice the name, and that of a reader, behind it
_INSIDE, _OWN = (
    re.compile(f"(.+)[.]({'|'.join(re.escape(suffix[1:]) for suffix in suffixes)}{number})", re.DOTALL)
    for suffixes, number in ((DIRECTORIES, ""), ((*FILES, *DIRECTORIES), "|[1-9][0-9]{0,4}"))
)


def owner_of(path: str) -> str | None:
    """The path of the queue to which a file or directory of this name belongs, if there is one."""
    found = _OWN.fullmatch(path)
    return found and found[1]


def chunk_ids(queue: str, names: Iterable[str]) -> set[int]:
    """The ids of the chunk files of a queue, among the names in its directory."""
    prefix = os.path.basename(queue) + "."
    ids = set()
    for name in names:
        suffix = name[len(prefix) :]
        if name.startswith(prefix) and suffix.isdecimal() and suffix.isascii() and suffix[0] != "0" and len(suffix) < 6:
            ids.add(int(suffix))
    return {chunk_id for chunk_id in ids if chunk_id <= chunk.MAX_ID}


def check(path: str, what: str) -> None:
    """Raise `BadPath` if a queue can have a file or directory of its own at the path of a new ``what``, or around it.

    It does not matter whether there is such a queue: somebody may make it. A topic may be where a chunk file could be, since that
    queue takes another id then.
    """
    if (size := len(path.encode(errors="surrogateescape"))) > _MOST_BYTES:
        raise BadPath(
            f"the path has {size:,} bytes; that of a {what} may have {_MOST_BYTES:,}, for the files of its batches have longer "
            "ones, and the system takes 4,095. Choose a shorter path",
            path=path,
        )
    directory, name = os.path.split(path)
    if (found := _OWN.fullmatch(name)) is not None:
        base, suffix = found.groups()
        if not suffix.isdecimal() or (what == "queue" and int(suffix) <= chunk.MAX_ID):
            raise BadPath(
                f"by its name, this is a file of the queue {base}. If you mean that queue, open {os.path.join(directory, base)}; "
                f"else choose another name, for example {base}-{suffix}",
                path=path,
            )
    if (found := _INSIDE.fullmatch(os.path.basename(directory))) is not None:
        raise BadPath(
            f"by its name, the directory of this {what} is that of the queue {found[1]}, which uses it as its own. "
            "Choose another directory",
            path=path,
        )
