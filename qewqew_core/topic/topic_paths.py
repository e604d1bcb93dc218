"""Where the files of a topic lie, which paths can be a topic, and which names a reader.

::

    NAME/NAME.idx   index                  NAME/reader/R.rdx   makes the reader R exist
    NAME/NAME.wal   transaction log        NAME/reader/R.nak   what a zbus server has delivered to it
    NAME/NAME.lock  lock, and `witness`    NAME/state/R.wal, R.lock, R.batches/ID/, R.dead/ID/
    NAME/data/      blocks, BASE.zbus,     NAME/state/topic.damaged/N/   set aside by a repair
                    and their BASE.sums    NAME/NAME.reserve/            room for a full disk, see `Reserve`
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator

from qewqew_core import arguments
from qewqew_core.batch import names, places
from qewqew_core.disk.directories import is_being_made, led_to
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import RESERVE, names_in
from qewqew_core.errors import BadPath
from qewqew_core.formats import zbus
from qewqew_core.secrecy import excerpt

LOG = ".wal"  # of logs: a name that no cleaner and no rotation of logs matches
LOCK = ".lock"
DIRECTORIES = "data", "reader", "state"
# What the names of a topic's files and directories end with, and whether it is a directory: behind its own name, in its
# directory; in state/; and behind the name of a reader, in reader/ and state/
OWN = {".idx": False, ".idx.tmp": False, LOG: False, LOG + ".tmp": False, LOCK: False, RESERVE: True}
IN_STATE = {".spill": False, places.DAMAGED: True}
OF_READER = {
    "reader": {".rdx": False, ".rdx.tmp": False, ".nak": False},
    "state": {LOG: False, LOG + ".tmp": False, LOCK: False, places.BATCHES: True, places.DEAD: True},
}


def check_topic_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a topic's directory; raises `BadPath` for an impossible one before anything is touched."""
    given = arguments.check_path_text("topic", path)
    with opening(given, "topic"):
        return _checked(given)


def _checked(given: str) -> str:
    full = os.path.abspath(given)
    parent, name = os.path.split(full)
    if not name or len(os.fsencode(name)) > 200 or not name.isprintable():
        raise BadPath("cannot be the name of a topic (printable, at most 200 bytes)", path=given)
    names.check(full, "topic")
    if not DISK.is_directory(parent, follow=True):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    try:
        is_link = stat.S_ISLNK(DISK.status(full, follow=False).st_mode)
    except FileNotFoundError:
        return full
    if is_link:
        with contextlib.suppress(FileNotFoundError):
            led_to(full)  # raises what the opening would
    if not DISK.is_directory(full, follow=True):
        raise BadPath("is not a directory, but a topic is one", path=full)
    try:
        is_another = not DISK.exists(index_of(full)) and _others(full)
    except PermissionError:
        if not is_being_made(full):
            raise
        is_another = set()
    if is_another:
        raise BadPath(f"this is a directory with other files, not a topic: it has no {name}.idx", path=full)
    return full


def index_of(directory: str) -> str:
    return _own(directory, ".idx")


def log_of(directory: str) -> str:
    return _own(directory, LOG)


def lock_of(directory: str) -> str:
    return _own(directory, LOCK)


def _own(directory: str, suffix: str) -> str:
    return os.path.join(directory, os.path.basename(directory) + suffix)


def data_of(directory: str) -> str:
    """The directory of the blocks."""
    return os.path.join(directory, "data")


def block_of(directory: str, base: int) -> str:
    return os.path.join(data_of(directory), zbus.block_name(base))


def rdx_of(directory: str, reader: str) -> str:
    """The file that makes a reader exist."""
    return os.path.join(directory, "reader", reader + ".rdx")


def stem_of(directory: str, reader: str) -> str:
    """How the paths of a reader's other files begin: its log, its lock and its batches."""
    return os.path.join(directory, "state", reader)


def names_of(directory: str, in_state: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The paths of a topic's own files and directories, and whether each is a directory. ``in_state``: the names in state/."""
    for name in DIRECTORIES:
        yield os.path.join(directory, name), True
    for suffix, is_directory in OWN.items():
        yield _own(directory, suffix), is_directory
    yield from names_in(_own(directory, RESERVE))
    for name in in_state:
        for suffix, is_directory in IN_STATE.items():
            if name.endswith(suffix):
                yield os.path.join(directory, "state", name), is_directory


def names_of_reader(directory: str, reader: str) -> Iterator[tuple[str, bool]]:
    """The same of a reader."""
    for home, suffixes in OF_READER.items():
        for suffix, is_directory in suffixes.items():
            yield os.path.join(directory, home, reader + suffix), is_directory


def batch_name(directory: str, reader: str) -> str:
    """What ids of a reader's batches are made of; see `places.batch_id`."""
    return f"{os.path.basename(directory)}-{reader}"


def is_topic(directory: str) -> bool:
    """Whether a directory is a topic: it has an index or, if that was lost, blocks and no other files."""
    try:
        if DISK.exists(index_of(directory)):
            return True
        blocks = any(name.endswith(".zbus") for name in DISK.list(data_of(directory)))
        return blocks and not _others(directory)
    except OSError:
        return False


def _others(directory: str) -> set[str]:
    """The names in a directory that are not those of a topic: one that is being made, or damaged, may have no index."""
    own = (os.path.basename(directory) + suffix for suffix in OWN)
    return set(DISK.list(directory)) - {*DIRECTORIES, *own}


def check_reader_name(name: object) -> str:
    """The name of a reader, or `BadPath`: it is part of file names."""
    if not isinstance(name, str):
        raise BadPath(f"a reader's name is a str, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadPath(f"the reader's name {excerpt(name, 100)} is not valid text: {error.reason}") from error
    if not 0 < size <= 100 or not name.isprintable() or "/" in name or name.startswith("."):
        raise BadPath(
            f"{excerpt(name, 120)} cannot be a reader's name: at most 100 bytes, printable, without a slash, and no dot in front"
        )
    return name
