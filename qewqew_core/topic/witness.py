"""The witness that a log of ours is there: what the lock file beside it begins with, ``NAME.lock`` or ``state/R.lock``.

Without it, files whose log somebody has removed would pass for those of a zbus server. It is on disk before the first commit
returns, and is withdrawn before a log is removed on purpose. If only the log is there, the next opening writes it again.
"""

from __future__ import annotations

import os

from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files
from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.topic.topic_paths import LOCK, LOG, lock_of, log_of

_WITNESS = b"has log\n"
SIZE = len(_WITNESS)


def is_in(files: Files, fd: int) -> bool:
    """Whether this open lock file has it."""
    return files.read(fd, SIZE, 0) == _WITNESS


def is_beside(files: Files, log: str) -> bool:
    """Whether the lock file beside the log with this path has it."""
    try:
        with Descriptors([files.open_to_read(log.removesuffix(LOG) + LOCK)]) as (fd,):
            return is_in(files, fd)
    except OSError:  # there is none, or nothing that could be locked: who opens the store is told
        return False


def check_no_other(files: Files, fd: int, path: str, status: os.stat_result) -> None:
    """Raise `BadPath` if this open lock file is another name of a file with something else in it, which would be written over."""
    if status.st_nlink > 1 and not is_in(files, fd) and any(files.read(fd, SIZE, 0)):
        said = "a hard link to a file with other contents is in the way of a lock file. Nothing was changed; remove this name"
        raise BadPath(said, path=path)


def write(files: Files, fd: int, log: str) -> None:
    """Have the lock file say so, durably. ``log``: the path of the log, which is in place."""
    files.write(fd, _WITNESS, 0)
    files.sync(fd)
    files.sync_directory(os.path.dirname(log))


def withdraw(files: Files, fd: int) -> None:
    """Have the lock file say nothing, durably."""
    if files.size(fd):
        files.truncate(fd, 0)
        files.sync(fd)


def check_topic(files: Files, directory: str) -> None:
    """Raise `Corrupt` if the log of the topic is missing: no zbus server had it last, whatever its other files are like."""
    log = log_of(directory)
    # Asked again: somebody may have made the topic in between.
    if not files.exists(log) and is_beside(files, log) and not files.exists(log):
        raise Corrupt(
            f"the log of the topic is missing, though {os.path.basename(lock_of(directory))} says that there was one. Nothing "
            "was changed; restore it, or let `qewqew repair` (repair_topic) begin another one, without the keys of appends",
            path=log,
        )
