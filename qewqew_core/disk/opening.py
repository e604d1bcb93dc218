"""What the system says while a store is opened or looked at becomes, here and nowhere else, an error with a name.

Each says what is wrong, where, and what to do: `BadPath` if somebody must change something at the path, `DiskFull`,
`OutOfResources`, or `Broken` if the disk fails. A ``what`` is what the message calls the store: a queue, a topic, a reader, a
stage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator

from qewqew_core.arguments import group_name, is_outsider, user_name
from qewqew_core.disk.directories import FOR_GROUP, Foreign, has_access_list, is_for_group
from qewqew_core.disk.files import DISK, Files
from qewqew_core.disk.reserve import FULL
from qewqew_core.errors import BadPath, Broken, DiskFull, OutOfResources, QewQewError

_DENIED = (errno.EACCES, errno.EPERM)
# Something else than what belongs there: the paths tell what. EINVAL and ENXIO are what opening a pipe or a socket says.
_NOT_OURS = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_IN_THE_WAY = (*_NOT_OURS, errno.EEXIST, errno.EINVAL)
_OF_THE_PATH = {
    errno.EROFS: "Mount it for writing; if the system has made it read-only by itself, check the disk first",
    errno.ENOENT: "Restore what is missing, or correct the path",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ENOLCK: "Mount the file system with locks, or choose a local one",
    errno.EOPNOTSUPP: "Choose another file system, best a local one",
    errno.ENOSYS: "Choose another file system, best a local one",
}
# The mount is gone, or what it leads to. EIO may also be the disk.
_NO_ANSWER = (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV)
_OF_THE_PROCESS = {
    errno.EMFILE: "close files that are open, or raise the limit (ulimit -n)",
    errno.ENFILE: "close files that are open, or raise the limit of the machine (fs.file-max)",
    errno.ENOMEM: "free some memory",
}
_MOVE_IT = "Nothing was changed; move it away"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@contextlib.contextmanager
def opening(path: str, what: str, again: str = "open it again") -> Iterator[None]:
    """Give errors of the system in the block a name. ``again``: what to do once the disk works."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QewQewError):
            raise
        raise _named(error, path, what, again) from error


def refused(error: OSError, path: str, what: str, again: str = "try again") -> DiskFull | BadPath | OutOfResources | None:
    """The error to raise for what the system said before anything was changed: no room, permission or descriptor, or something
    that is not ours in the way, and the store may go on. None: the disk may have failed. ``again``: what to do then.
    """
    where = place_of(error, path)
    if (step := _OF_THE_PROCESS.get(error.errno or 0)) is not None:
        said = f"the {what} cannot be used just now: {error.strerror}. Nothing was changed; {step}, then {again}"
        scarce = OutOfResources(said, path=where)
        scarce.errno = error.errno
        return scarce
    if error.errno in FULL:
        return DiskFull(f"no room on the file system: {error.strerror}. Nothing was stored", path=where)
    if isinstance(error, BadPath):
        return error
    if isinstance(error, Foreign) or (error.errno == errno.EPERM and _is_foreign(where)):
        refusal = BadPath(_whose(where, what, error.group if isinstance(error, Foreign) else None), path=where)
    elif error.errno in _DENIED:
        refusal = BadPath(f"no permission to use the {what}: {error.strerror}. {_who_may(where)}", path=path)
    elif error.errno in _NOT_OURS and error.filename:
        refusal = _is_in_the_way(error, where, what)
    elif error.errno == errno.ENAMETOOLONG:
        refusal = BadPath(f"the {what} cannot be used: {error.strerror}. {_OF_THE_PATH[error.errno]}", path=where)
    else:
        return None
    refusal.errno = error.errno
    return refusal


def check_kinds(files: Files, names: Iterable[tuple[str, bool]], what: str) -> None:
    """Raise `BadPath` if something else is at one of these paths than a file of ours or, where that says True, a directory."""
    for error in strange(files, names, what):
        raise error


def strange(files: Files, names: Iterable[tuple[str, bool]], what: str) -> Iterator[BadPath]:
    """For each of these paths at which that is so, what is there, and what to do."""
    found, path = iter(names), ""
    while True:
        with opening(path, what):
            if (entry := next(found, None)) is None:
                return
        path, is_directory = entry
        try:
            with opening(path, what):
                try:
                    files.check_kind(path, is_directory)
                except Foreign:  # or somebody of the group makes it just now, and it is not the group's yet
                    time.sleep(0.01)
                    files.check_kind(path, is_directory)
        except BadPath as error:
            yield error


def unwritable(files: Files, directory: str, what: str) -> Iterator[BadPath]:
    """What an opening says if this user may not create files in the directory; nothing where all is mounted read-only."""
    try:
        with opening(directory, what):
            try:
                files.check_writable(directory)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
    except BadPath as error:
        yield error


def moved(path: str, what: str) -> Broken:
    """What to raise if an open file is not the one at its path any more: what stands there is another's."""
    return Broken(
        f"this is not the file any more that the {what} has open: it, or a directory above it, was moved, removed or replaced. "
        f"What is here now was left as it is, and this {what} object refuses every further call; open the {what} again where "
        "it is",
        path=path,
    )


def place_of(error: OSError, path: str) -> str:
    """The file that an error of the system is about; ``path`` if it does not name one, or only a descriptor of ours."""
    name = error.filename
    return name if isinstance(name, str) and name and not name.startswith("/proc/self/") else path


def remedy(error: OSError) -> str:
    """What to do about what the system said in the middle of a change: it may not be the disk."""
    return _OF_THE_PROCESS.get(error.errno or 0, "check the disk")


@contextlib.contextmanager
def refusing(path: str, what: str) -> Iterator[None]:
    """Raise `refused` errors for those of the system in the block, if they are that."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QewQewError) or (refusal := refused(error, path, what)) is None:
            raise
        raise refusal from error


@contextlib.contextmanager
def adding(path: str, what: str) -> Iterator[None]:
    """Raise `refused` errors, and `BadPath` for any other of the system's but a missing file: something is added to what is not
    committed, so nothing has changed.
    """
    try:
        with refusing(path, what):
            yield
    except OSError as error:
        if isinstance(error, (QewQewError, FileNotFoundError)):
            raise
        if error.errno in _IN_THE_WAY and error.filename:
            raise _is_in_the_way(error, place_of(error, path), what) from error
        said = f"cannot be written: {error.strerror}. Nothing was added; check the disk, then try again"
        named = BadPath(said, path=place_of(error, path))
        named.errno = error.errno
        raise named from error


def _named(error: OSError, path: str, what: str, again: str) -> QewQewError:
    where, said = place_of(error, path), error.strerror or str(error)
    if error.errno in FULL:
        return DiskFull(f"no room on the file system: {said}. Nothing was stored; make room, then {again}", path=where)
    if (refusal := refused(error, path, what, again)) is not None:
        return refusal
    if error.errno in _IN_THE_WAY and error.filename:
        return _is_in_the_way(error, where, what)
    if error.errno in _OF_THE_PATH:
        return BadPath(f"the {what} cannot be used: {said}. {_OF_THE_PATH[error.errno]}", path=where)
    advice = f"check the disk and the system's log, then {again}"
    if error.errno in _NO_ANSWER:
        said, advice = f"its file system does not answer ({said})", f"mount it again, or {advice}"
    return Broken(f"the {what} cannot be used: {said}. Nothing was stored; {advice}", path=where)


def _is_in_the_way(error: OSError, where: str, what: str) -> BadPath:
    of = "this file" if what == "file" else f"a file of the {what}"
    return BadPath(f"{_in_the_way(where)} is in the way of {of} ({error.strerror}). {_MOVE_IT}", path=where)


def _in_the_way(path: str) -> str:
    """What is at the path, or on the way to it."""
    for place in _upwards(path):
        with contextlib.suppress(OSError):
            kind = _KINDS.get(stat.S_IFMT(DISK.status(place, follow=False).st_mode), "a device")
            return kind if place == path else f"{kind} at {place}"
    return "something"


def _is_foreign(path: str) -> bool:
    with contextlib.suppress(OSError):
        return DISK.status(path, follow=False).st_uid not in (0, os.geteuid())
    return False


def _whose(path: str, what: str, group: int | None) -> str:
    """What is at the path, whose it is instead of this user's, or the ``group``'s, and what to do."""
    try:
        status = DISK.status(path, follow=False)
    except OSError:
        return f"something that belonged to another user was in the way of a file of the {what}. Nothing was changed; try again"
    owner, mode, me = user_name(status.st_uid), f"mode {status.st_mode & 0o7777:04o}", user_name(os.geteuid())
    has, found = group_name(status.st_gid), _in_the_way(path)
    if group is not None and is_for_group(status, group) and is_outsider(status.st_uid, group):
        return (
            f"{found} that belongs to {owner}, who is not in the group {has} (getent group) and could make files of it here, "
            f"cannot be the home of a {what} that this group shares. Nothing was changed; if it is right here, let root have it "
            f"(chown root {path}), or add the user (gpasswd -a USER GROUP); else move it away"
        )
    if group is not None and is_for_group(status, group) and has_access_list(path):
        return (
            f"{found} with an access list (getfacl {path}), by which users who are not in the group {has} may get in, cannot be "
            f"the home of a {what} that this group shares. Nothing was changed; remove the list (setfacl -b -k {path})"
        )
    if group is not None:
        wanted, kind = group_name(group), stat.S_IFMT(status.st_mode)
        change = f"chgrp {wanted} {path}; chmod {FOR_GROUP[kind == stat.S_IFDIR]:o} {path}"
        trust = f"if it is right here, have its owner do this: {change}; else " if kind in (stat.S_IFREG, stat.S_IFDIR) else ""
        return (
            f"{found} that belongs to {owner} and the group {has}, {mode}, cannot be part of a {what} that the group {wanted} "
            f"shares: there, files have mode {FOR_GROUP[0]:04o} and directories {FOR_GROUP[1]:o}. Nothing was changed; {trust}"
            "move it away"
        )
    if is_for_group(status, status.st_gid):
        return (
            f"{found} that belongs to {owner}, {mode}, is shared by the group {has}, while this is user {me}, whose new files "
            f"would be for this user alone. Nothing was changed; if the {what} is one of that group, open it with group={has!r} "
            f"(qewqew --group {has}); else move it away"
        )
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and not status.st_uid:
        return (
            f"a hard link to a file of {owner}, {mode}, is in the way of a file of the {what}: it would be written to under its "
            f"other name, too (find / -xdev -samefile {path}). Nothing was changed; remove this name"
        )
    trust = "" if os.geteuid() else f"if it is right here, become its owner (su, setpriv), who may use the {what}; else "
    return (
        f"{found} that belongs to {owner}, {mode}, while this is user {me}, is in the way of a file of the {what}. "
        f"Nothing was changed; {trust}move it away"
    )


def _who_may(path: str) -> str:
    """Who is denied what, whose it is, and what to do."""
    for place in _upwards(path):
        try:
            status = DISK.status(place)
        except OSError:
            continue
        if place == path and DISK.may_use(place):
            continue  # so the directory does not let it be made, renamed or removed
        me, owner, mode = os.geteuid(), status.st_uid, f"{status.st_mode & 0o7777:04o}"
        kind, rights = ("directory", "rwx") if stat.S_ISDIR(status.st_mode) else ("file", "rw")
        if DISK.may_use(place):
            remedy = "an attribute (lsattr), a security module or the mount does not allow it"
        elif owner == me:
            remedy = f"let its owner use it (chmod u+{rights})"
        else:
            remedy = "run this as its owner, or let this user use it (chown, chmod)"
        return f"This is user {user_name(me)}, and the {kind} {place} belongs to {user_name(owner)}, mode {mode}: {remedy}"
    return f"This is user {user_name(os.geteuid())}: ask who has the files"


def _upwards(path: str) -> Iterator[str]:
    """The path, and each directory above it."""
    place = os.path.abspath(path)
    while True:
        yield place
        if place == os.path.dirname(place):
            return
        place = os.path.dirname(place)
