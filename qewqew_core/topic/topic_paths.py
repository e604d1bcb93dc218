"""Which paths can be a topic, and which names a reader. `docs/format.md` has the files in it."""

from __future__ import annotations

import os

from qewqew_core.disk.files import DISK
from qewqew_core.errors import BadPath


def check_topic_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a topic's directory; raises `BadPath` before anything is touched if it cannot be one."""
    try:
        given = os.fspath(path)
        os.fsencode(given)
    except (TypeError, UnicodeEncodeError) as error:
        raise BadPath(f"a topic's path is a str or a Path, not {path!r:.100}") from error
    if not isinstance(given, str) or not given or "\0" in given:
        raise BadPath(f"a topic's path is a non-empty str without NUL, not {given!r:.100}")
    full = os.path.abspath(given)
    parent, name = os.path.split(full)
    if not name or len(os.fsencode(name)) > 200 or not name.isprintable():
        raise BadPath("cannot be the name of a topic (printable, at most 200 bytes)", path=given)
    if not DISK.is_directory(parent, follow=True):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    if not DISK.exists(full):
        return full
    if not DISK.is_directory(full, follow=True):
        raise BadPath("is no directory; a topic is one", path=full)
    if not DISK.exists(os.path.join(full, name + ".idx")) and set(DISK.list(full)) - {
        *("data", "reader", "state"),  # of a topic that is being made, or damaged; in the meantime it may have been
        *(name + suffix for suffix in (".lock", ".log", ".log.tmp", ".idx", ".idx.tmp")),
    }:
        raise BadPath(f"is a directory with other files, and not a topic: there is no {name}.idx in it", path=full)
    return full


def check_reader_name(name: object) -> str:
    """The name of a reader, or `BadPath`: it is part of file names."""
    if not isinstance(name, str):
        raise BadPath(f"a reader's name is a str, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadPath(f"the reader's name {name!r:.100} is not valid text: {error.reason}") from error
    if not 0 < size <= 100 or not name.isprintable() or "/" in name or name.startswith("."):
        raise BadPath(f"{name!r:.120} cannot be a reader's name: printable, no slash, no dot in front, at most 100 bytes")
    return name
