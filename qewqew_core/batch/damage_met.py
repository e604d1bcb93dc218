"""Damage that a task has met, remembered beside the store until a repair: a look without reading all records does not see it.

It is text in the file ``met`` of NAME.damaged (of a topic: ``state/topic.damaged``). ``stem``: what that name begins with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from qewqew_core.batch import names, places
from qewqew_core.disk.directories import is_for_group
from qewqew_core.disk.files import DISK, SMALL, Files, files_of, look_into, read_whole, write_new
from qewqew_core.errors import QewQewError

_MET = "met"
_MOST = 2000  # characters of it


def names_of(stem: str) -> Iterator[tuple[str, bool]]:
    """The paths of its files; none is a directory."""
    for name in (_MET, _MET + ".tmp"):
        yield os.path.join(stem + places.DAMAGED, name), False


def note(stem: str, text: str) -> None:
    """Remember it durably, in place of what was there. Without permission, or room, it is not remembered: the task says it."""
    directory = os.path.dirname(stem)
    with contextlib.suppress(OSError, QewQewError):
        log = stem + names.LOG
        status = DISK.status(log if DISK.exists(log) else directory, follow=False)  # whose the store is
        files = files_of(None, directory, log, group=status.st_gid if is_for_group(status, status.st_gid) else None)
        with files.entered():
            home = places.make_home(files, stem, places.DAMAGED)
            write_new(files, os.path.join(home, _MET + ".tmp"), text[:_MOST].encode(errors="replace"))
            files.rename(os.path.join(home, _MET + ".tmp"), os.path.join(home, _MET))
            files.sync_directory(home)


def noted(stem: str) -> str | None:
    """What was met, without a lock; None if nothing was, or it was repaired."""
    with contextlib.suppress(OSError, QewQewError):
        files = look_into(os.path.dirname(stem), os.path.dirname(stem))
        return read_whole(files, os.path.join(stem + places.DAMAGED, _MET), most=SMALL).decode(errors="replace")
    return None


def forget(files: Files, stem: str) -> None:
    """It was repaired. Something else in its place stays."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if files.is_regular(place := os.path.join(stem + places.DAMAGED, _MET)):
            files.unlink(place)
