"""The marker of a directory of queues: a file with an id, which an empty directory does not have.

Where a mount is missing, its directory is there all the same, and empty. A queue that is created in it hides the records of the
real one, and goes with the pod. So what opens queues by a name in a directory (Airflow's connection) wants the marker first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import uuid

from qewqew_core.arguments import check_group, check_path_text
from qewqew_core.disk.directories import FOR_GROUP
from qewqew_core.disk.files import SMALL, files_of, look_into, read_whole, write_new
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadPath, Corrupt
from qewqew_core.secrecy import excerpt

NAME = ".qewqew-directory"
_WHAT = "marker of this directory"
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


def check_id(name: str, value: object) -> str:
    """The id. Raises `BadArgument`."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise BadArgument(f"{name} must be 1 to 100 letters, digits, '_', '.' and '-', not {excerpt(value, 120)}")
    return value


def init(directory: str, id: str | None = None, group: str | None = None) -> tuple[str, bool]:
    """Create the directory, but none above it, if it is missing, and mark it; returns its id, and whether the marker is new.

    The marker is durable then. A directory keeps the id that it has. ``id``: the one to give it; None: a random one. ``group``:
    the Unix group whose members share what is in it. Raises `BadArgument` if it has another id already, and `BadPath`.
    """
    if id is not None:
        check_id("the id", id)
    members = None if group is None else check_group(group)
    given = check_path_text("directory", directory).rstrip("/") or "/"
    directory = os.path.realpath(given)
    file = os.path.join(directory, NAME)
    with opening(directory, "directory"):
        if os.path.islink(given) and (os.lstat(given).st_uid not in (0, os.geteuid()) or not os.path.exists(given)):
            raise BadPath(
                "is a link to nothing, or one of another user. Nothing was changed; give the directory itself", path=given
            )
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            if members is not None:
                os.chown(directory, -1, members)
                os.chmod(directory, FOR_GROUP[True])
        files = files_of(None, directory, file, group=members)
        with files.entered():
            made = False
            while (there := id_of(directory)) is None:
                new = f"{file}.{uuid.uuid4().hex[:8]}"
                write_new(files, new, json.dumps({"id": id or uuid.uuid4().hex}).encode() + b"\n")
                try:
                    with contextlib.suppress(FileExistsError):  # another process was faster
                        files.link(new, file)
                        made = True
                finally:
                    files.unlink(new)
                files.sync_directory(directory)
    if id not in (None, there):
        raise BadArgument(f"{directory} has the id {there!r} already, and not {id!r}. Nothing was changed")
    return there, made


def id_of(directory: str) -> str | None:
    """The id of the directory; None if it has no marker. Raises `BadPath` if that cannot be read, or is another file."""
    directory = os.path.realpath(directory)
    file = os.path.join(directory, NAME)
    with opening(directory, _WHAT):
        try:
            text = read_whole(look_into(directory, file), file, most=SMALL)
        except FileNotFoundError:
            return None
        except Corrupt:  # too large
            text = b""
    try:
        return check_id("id", json.loads(text)["id"])
    except (ValueError, TypeError, KeyError, RecursionError):
        said = f"another file has the name of the marker of QewQew. Move it away, then run `qewqew init {directory}`"
        raise BadPath(said, path=file) from None


def check(directory: str, id: str | None = None) -> None:
    """Raise `BadPath` unless the directory is marked, and has this id, if one is given.

    The error has the ``errno`` ENOENT: a mount may be away for a minute.
    """
    there = id_of(directory)
    if there is None:
        said = (
            f"this directory has no marker ({NAME}), so a mount may be missing. If it is the right one, and new, run "
            f"`qewqew init {directory}` once"
        )
    elif id not in (None, there):
        said = f"this directory has the id {there!r}, and not {id!r}: another one may be mounted here"
    else:
        return
    error = BadPath(said, path=directory)
    error.errno = errno.ENOENT
    raise error
