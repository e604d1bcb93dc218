"""Where the files of a queue lie, and which paths can be a queue.

::

    NAME               header file            NAME.batches/ID/   batches: leased, returned, acknowledged
    NAME.1, NAME.2 …   chunk files            NAME.dead/ID/      dead letters
    NAME.log           transaction log        NAME.lease/        the batch that is being made
    NAME.damaged/N/    set aside by a repair  NAME.spill/        what open sessions have put
    NAME.stamp         how often batches changed
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING

from qewqew_core import chunk
from qewqew_core.errors import BadArgument, BadKey, BadPath
from qewqew_core.keys import key_hash

if TYPE_CHECKING:
    import pendulum

LOG, BATCHES, DEAD, LEASE, SPILL, DAMAGED, STAMP = ".log", ".batches", ".dead", ".lease", ".spill", ".damaged", ".stamp"


def chunk_ids(queue: str, names: list[str]) -> set[int]:
    """The ids of the chunk files of a queue, among the names in its directory."""
    prefix = os.path.basename(queue) + "."
    ids = set()
    for name in names:
        suffix = name[len(prefix) :]
        if name.startswith(prefix) and suffix.isdecimal() and suffix.isascii() and suffix[0] != "0" and len(suffix) < 6:
            ids.add(int(suffix))
    return {one for one in ids if one <= chunk.MAX_ID}


def queue_name(path: str) -> str:
    """What a queue is called in manifests and batch ids: its file name without ``.qew``."""
    return os.path.basename(path).removesuffix(".qew")


def batch_id(path: str, key: str) -> str:
    """A readable prefix and a hash of the key: safe in every file system and in Hadoop paths."""
    return numbered_id(path, int.from_bytes(key_hash(key)[:8]))


def numbered_id(path: str, number: int) -> str:
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in queue_name(path))
    return f"{name[:80].strip('-_') or 'batch'}-{number:016x}"


def check_key(key: object) -> str:
    """The key, or `BadKey`: it stands in manifests, logs and messages, and callers make paths of it."""
    if not isinstance(key, str):
        raise BadKey(f"a key is a str, not {type(key).__name__}")
    if not key.strip():
        raise BadKey("a key must not be empty: it is what makes a retry get the same batch")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise BadKey(f"the key {key!r:.100} is not valid text: {error.reason}") from error
    if size > 512 or not key.isprintable() or set(key) & set("/\\") or key in (".", ".."):
        raise BadKey(f"the key {key!r:.100} is hostile: at most 512 bytes, no control characters, no slashes")
    return key


def check_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a queue; raises `BadPath` before anything is touched if it cannot be one."""
    try:
        given = os.fspath(path)
        os.fsencode(given)
    except (TypeError, UnicodeEncodeError) as error:
        raise BadPath(f"a queue's path is a str or a Path, not {path!r:.100}") from error
    if not isinstance(given, str) or not given or "\0" in given:
        raise BadPath(f"a queue's path is a non-empty str without NUL, not {given!r:.100}")
    if given.endswith("/") or os.path.isdir(given):
        raise BadPath(
            "is a directory; a queue is a file in a directory, for example " + os.path.join(given, "orders.qew"), path=given
        )
    full = os.path.join(os.path.abspath(os.path.dirname(given)), os.path.basename(given))
    parent = os.path.dirname(full)
    if os.path.basename(full) in (".", "..") or len(os.fsencode(os.path.basename(full))) > 200:
        raise BadPath("cannot be the name of a queue (at most 200 bytes)", path=given)
    if not os.path.isdir(parent):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    try:
        kind = os.stat(full).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        raise BadPath(f"cannot be looked at: {error.strerror}", path=full) from error
    if not stat.S_ISREG(kind):
        raise BadPath("is not a regular file", path=full)
    base, dot, suffix = full.rpartition(".")
    reserved = suffix.isdecimal() or "." + suffix in (LOG, BATCHES, DEAD, LEASE, SPILL, DAMAGED, STAMP)
    if dot and reserved and os.path.basename(base) and (os.path.exists(base) or os.path.exists(base + LOG)):
        raise BadPath(f"is a file of the queue {base}; open that, or choose another name", path=full)
    return full


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
    if not os.path.isdir(parent):
        raise BadPath(f"there is no directory {parent}; make it first (mkdir -p {parent}), or correct the path", path=full)
    if not os.path.lexists(full):
        return full
    if not os.path.isdir(full):
        raise BadPath("is no directory; a topic is one", path=full)
    if not os.path.exists(os.path.join(full, name + ".idx")) and set(os.listdir(full)) - {
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


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """An argument that must be one of a few words, or `BadArgument`."""
    if value not in choices:
        words = " or ".join(f'"{one}"' for one in choices)
        raise BadArgument(f"{name} must be {words}, not {value!r:.60}")
    return str(value)


def check_timeout(name: str, value: object) -> float:
    """A number of seconds that a thread can wait, or `BadArgument`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < threading.TIMEOUT_MAX:
        raise BadArgument(f"{name} must be a number of seconds, 0 or more, not {value!r:.60}")
    return float(value)


def deadline(timeout: float | None) -> float | None:
    """Until when to wait, by the monotonic clock; None: for ever. Raises `BadArgument`."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout:  # NaN
        raise BadArgument(f"timeout must be a number of seconds, or None to wait for ever, not {timeout!r:.60}")
    return None if timeout > threading.TIMEOUT_MAX / 2 else time.monotonic() + timeout


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """An argument that must be a whole number in a range, or `BadArgument`."""
    if type(value) is not int or not low <= value <= high:
        raise BadArgument(f"{name} must be a whole number from {low:,} to {high:,}, not {value!r:.60}")
    return value


def check_bound(name: str, value: int | None) -> int | None:
    """The most that there may be of something, or None: any number."""
    return None if value is None else check_whole(name, value, 1, sys.maxsize)


def moment(milliseconds: int) -> pendulum.DateTime:
    """A time of the log, as an aware datetime in UTC."""
    import pendulum  # late: Spark executors import this package to read batches, and need not have it

    # Messages of topics may have any time of 64 bits; years have four digits.
    return pendulum.from_timestamp(min(max(milliseconds, -62_135_596_800_000), 253_402_300_799_999) / 1000)
