"""The directory of a store, opened once, and how everything in it is reached: from that descriptor, and through no link.

Others may write in the directory too, and may put anything at a name at any moment, also a link in the place of a directory that
was looked at just before. So nothing is looked up by its whole path twice. What they have put there is refused, never used.

A store belongs to one user or, if who opens it says so, to all members of one group (``group``). Then everything in it has that
group and just the mode for that, and so has its directory: where others may write, everybody makes files of a set-group-id.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from qewqew_core.arguments import is_outsider
from qewqew_core.disk.descriptors import Closes, Descriptors, close_each

T = TypeVar("T")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = 0o022
_BEING_MADE = 1.0  # seconds for which a directory of a group may lack rights that its maker is about to give it
FOR_USER = 0o600, 0o700  # modes of files and directories
FOR_GROUP = 0o660, 0o2770  # … of a group: what is made in the directory is the group's, too


class Foreign(PermissionError):
    """Something in the place of ours belongs to somebody else, who may read what we write, or change what we read: it is not of
    the ``group`` that has the store or, without one, of the user.
    """

    def __init__(self, path: str, group: int | None) -> None:
        super().__init__(errno.EPERM, "it belongs to another user or group", path)
        self.group = group


class _Open(dict[str, int], Closes):
    """The descriptors of directories, by their paths, which this ``group`` has. ``passing``: they are closed after one call."""

    def __init__(self, group: int | None, passing: bool = False) -> None:
        self._group, self._passing = group, passing

    def open(self, path: str, name: str, flags: int, above: int | None) -> None:
        """An interrupt finds it opened and in the dictionary, or neither."""
        while True:
            try:
                self.update(zip((path,), map(partial(os.open, dir_fd=above), (name,), (_DIRECTORY | flags,)), strict=True))
                if self._group is None or is_for_group(os.fstat(self[path]), self._group):
                    return
                raise Foreign(path, self._group)
            except OSError as error:
                error.filename = path
                if name == path and isinstance(error, NotADirectoryError):
                    name = led_to(path)
                    continue
                if self._group is None or not isinstance(error, PermissionError) or not is_being_made(name, above):
                    raise
            self.close_below(path)
            time.sleep(0.001)

    def close_below(self, path: str) -> None:
        """What is at the path now, or below it, is another directory."""
        if gone := [each for each in self if each == path or each.startswith(path + "/")]:
            close_each(self, *gone)

    def pass_on(self) -> None:
        if self._passing:
            self.close()

    def close(self) -> None:
        close_each(self)

    def __del__(self) -> None:
        if self:
            self.close()


class Directories:
    """What `Files` reaches files with. Before `reach_from`, and outside of the directory, every path is one of the user's."""

    _base = ""  # the directory of the store …
    _below = ""  # … with what the paths in it begin …
    _to_base = 0  # … and how it is opened: what is a store by itself, as a topic is, may be a link only if that is ours …
    _owned_as: tuple[str, ...] = ()  # … and whose it is: that of the first of these that is there …
    group: int | None = None  # … or of all members of this group
    _modes = FOR_USER  # of files and directories that are made
    _kept: _Open | None = None  # it, and directories in it, from `enter` to `leave`
    _is_shared = False  # others may write in it, so that we look whose each file is
    _is_of: int | None = None  # the group whose directory it is, whether or not the store is
    _looks = False  # at whatever of ours is there, so that a store of that group is one, too
    _entered: dict[int, _Open]  # by thread

    @property
    def may_be_foreign(self) -> bool:
        """Whether others may write in the directory of the store, so that the kind of a file does not say that it is ours."""
        return self._is_shared

    def reach_from(self, base: str, owned_as: tuple[str, ...], group: int | None, looks: bool = False) -> None:
        """Files of the store in the directory ``base`` come next. ``looks``: see `look_into`."""
        self._base = base.rstrip("/") or "/"
        self._below, self._owned_as, self.group = os.path.join(self._base, ""), owned_as, group
        self._to_base = os.O_NOFOLLOW if self._base in owned_as else 0
        self._modes, self._looks = FOR_USER if group is None else FOR_GROUP, looks
        self._kept, self._is_shared, self._is_of, self._entered = None, looks, None, {}

    def enter(self) -> None:
        """Open the directory, and keep it until `leave`."""
        kept = _Open(self.group)
        kept.open(self._base, self._base, self._to_base, None)
        status = os.fstat(kept[self._base])
        self._kept, me = kept, os.geteuid()
        if self.group is not None:
            self._is_shared = True
            self._check_home_of(self.group, kept[self._base], status)
            self._check_store()
            return
        is_others = me != 0 and status.st_uid not in (me, 0)
        is_users = me == 0 and status.st_uid != 0  # who can put hard links to root's files here
        self._is_shared = is_others or is_users or bool(status.st_mode & _OTHERS_WRITE)
        if self._is_shared and is_for_group(status, status.st_gid):
            self._is_of = status.st_gid
        if self._base in self._owned_as:
            is_foreign = not self._is_ours(status) if is_others else me == 0 and _is_foreign_here(self._base, status)
            if is_foreign:
                raise Foreign(self._base, None)
        if self._is_of is not None:
            self._check_home_of(self._is_of, kept[self._base], status)
            self._check_store()

    def _check_home_of(self, group: int, fd: int, status: os.stat_result) -> None:
        """Whose the directory of a group is may make files of that group in it, and so may those in its access list, which its
        mode does not show.
        """
        if is_outsider(status.st_uid, group) or has_access_list(fd):
            raise Foreign(self._base, group)

    def _check_store(self) -> None:
        """Before anything is made that would lock the others out, or us."""
        for path in self._owned_as if self._base not in self._owned_as else ():
            with contextlib.suppress(FileNotFoundError):
                if not self._is_ours(self._at(path, os.stat, follow_symlinks=False)):
                    raise Foreign(path, self.group)

    def keep(self, path: str) -> None:
        """Keep one in it, too: nobody removes it."""
        assert self._kept is not None
        self._step(self._kept, path, os.path.basename(path), self._kept[self._base])

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """The block opens a store: if it raises, `leave`."""
        try:
            yield
        except BaseException:
            if (kept := self._kept) is not None:  # no other thread has it, and the error may be kept for long
                self._kept = None
                kept.close()
            raise

    def leave(self) -> None:
        """Close them, once the calls that are under way in other threads have ended."""
        self._kept = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """In the block, this thread opens each directory below once."""
        if not self._base or get_ident() in self._entered:
            yield
            return
        entered = self._entered
        entered[get_ident()] = _Open(self.group)
        try:
            yield
        finally:
            entered.pop(get_ident()).close()

    def _owners(self) -> set[int]:
        """Whose the files of the store may be: ours, or root's, who may read everything anyway. Root works for others, too, in
        their directories.
        """
        me = os.geteuid()
        return {me, 0} if me else {0, self._owner_of(self._base)}

    def _owner_of(self, directory: str) -> int:
        return self._in(directory, os.stat).st_uid

    def _check_owner(self, fd: int, path: str) -> None:
        if self._is_shared and not self._is_ours(os.fstat(fd)):
            raise Foreign(path, self.group)

    def _is_ours(self, status: os.stat_result) -> bool:
        if self.group is not None:
            return is_for_group(status, self.group)
        if self._is_of is not None and is_for_group(status, self._is_of):
            return self._looks  # else what we make would be for us alone
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and status.st_uid == 0 and self._owner_of(self._base) != 0:
            return False  # another name of root's file: what root makes in a user's directory is given to that user
        return status.st_uid in self._owners()

    def _step(self, found: _Open, path: str, name: str, above: int) -> None:
        """Open a directory in one that is open."""
        if name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "no name of a file", path)
        found.open(path, name, os.O_NOFOLLOW, above)
        self._check_owner(found[path], path)

    def _holding(self, directory: str) -> _Open | None:
        """Open directories, with this one among them; None if it is one of the user's."""
        if (kept := self._kept) is not None and directory in kept:
            return kept
        if not self._base or not f"{directory}/".startswith(self._below):
            return None
        kept = kept or _Open(self.group)
        entered = self._entered.get(get_ident())
        if entered is not None and directory in entered:
            return entered
        found = _Open(self.group, passing=True) if entered is None else entered
        try:
            if (above := kept.get(self._base)) is None:
                if self._base not in found:
                    found.open(self._base, self._base, self._to_base, None)
                above = found[self._base]
            path = self._base
            for name in directory[len(self._below) :].split("/") if directory != self._base else ():
                path = os.path.join(path, name)
                if path not in kept and path not in found:
                    self._step(found, path, name, above)
                above = kept[path] if path in kept else found[path]
        except OSError as error:
            error.__traceback__ = None
            del kept, entered, found  # who keeps an error keeps its frames: none of ours keeps a directory open, behind `leave`
            raise
        return found

    def _at(self, path: str, act: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``act`` on the name, in the open directory that it is in."""
        home, name = os.path.split(path)
        try:
            found = self._holding(home)
        except FileNotFoundError as error:
            error.filename = path
            raise
        if found is None:
            return act(path, *arguments, **named)
        try:
            return act(name, *arguments, dir_fd=found[home], **named)
        except OSError as error:
            error.filename = path
            raise
        finally:
            found.pass_on()
            found = None

    def _from_to(self, source: str, target: str, act: Callable[..., None], **named: Any) -> None:
        """The same with two names."""
        (home, name), (other_home, other) = os.path.split(source), os.path.split(target)
        found = others = each = None
        try:
            found, others = self._holding(home), self._holding(other_home)
            try:
                act(
                    source if found is None else name,
                    target if others is None else other,
                    src_dir_fd=None if found is None else found[home],
                    dst_dir_fd=None if others is None else others[other_home],
                    **named,
                )
            except OSError as error:
                error.filename, error.filename2 = source, target
                raise
        finally:
            for each in (found, others):
                if each is not None:
                    each.pass_on()
            found = others = each = None

    def _in(self, directory: str, act: Callable[[str | int], T]) -> T:
        """``act`` on the open directory, or on its path if it is one of the user's."""
        found = self._holding(directory)
        if found is None:
            return act(directory)
        try:
            return act(found[directory])
        except OSError as error:
            if error.errno is not None:  # one of the system's, and not a `Broken`
                error.filename = directory
            raise
        finally:
            found.pass_on()
            found = None

    def _gone(self, path: str) -> None:
        """A directory was renamed or removed."""
        if (entered := self._entered.get(get_ident()) if self._base else None) is not None:
            entered.close_below(path)


def _is_foreign_here(path: str, status: os.stat_result) -> bool:
    """Whether a user has made this in a directory that many may write to, and that is not the user's."""
    above = os.stat(os.path.dirname(path))
    return bool(above.st_mode & _OTHERS_WRITE) and status.st_uid not in (0, above.st_uid)


def led_to(path: str) -> str:
    """What the link at a path of the user leads to. Where others may make links, it must be ours or root's or, for root, of the
    owner of the directory. See also `check_led`.
    """
    me, home = os.geteuid(), os.path.dirname(path)
    with Descriptors([os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)]) as (fd,):
        above, link = os.stat(home), os.fstat(fd)
        if not stat.S_ISLNK(link.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        owners = {0, me or above.st_uid}
        if link.st_uid not in owners and (above.st_mode & _OTHERS_WRITE or above.st_uid not in owners):
            raise Foreign(path, None)
        target = os.path.realpath(os.path.join(home, os.readlink("", dir_fd=fd)), strict=True)
    with Descriptors([os.open(target, os.O_PATH | os.O_CLOEXEC)]) as found:
        check_led(found, path, link.st_uid)
    return target


def check_led(opened: Descriptors, path: str, owner: int) -> None:
    """Close it and raise `Foreign`, for root, if a link of this owner led to what is not the owner's: a user may make links to
    files of root's.
    """
    if os.geteuid() == 0 and owner not in (0, os.fstat(opened[0]).st_uid):
        opened.close()
        raise Foreign(path, None)


def is_for_group(status: os.stat_result, group: int) -> bool:
    """Whether all members of the group may use this file or directory, and nobody else."""
    return status.st_gid == group and stat.S_IMODE(status.st_mode) == FOR_GROUP[stat.S_ISDIR(status.st_mode)]


def has_access_list(directory: int | str) -> bool:
    """Whether a directory says by a POSIX ACL who may use it, or what is made in it (acl(5))."""
    try:
        names = os.listxattr(directory)
    except OSError:  # a file system that has none
        return False
    return any(name.startswith("system.posix_acl_") for name in names)


def is_being_made(name: str, above: int | None = None) -> bool:
    """Whether another member of a group has made the directory just now, and gives it its mode next: the umask took rights."""
    status = os.stat(name, dir_fd=above, follow_symlinks=False)
    is_groups = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISGID and not status.st_mode & 0o7777 & ~FOR_GROUP[True]
    return bool(is_groups) and abs(time.time() - status.st_ctime) < _BEING_MADE


def listed(act: Callable[[Any], T], directory: str | int) -> T:
    """``act`` on a directory that it may list. One that is open it opens again: two who list one descriptor miss names."""
    if isinstance(directory, str):
        return act(directory)
    try:
        return act(f"/proc/self/fd/{directory}")  # takes fewer calls
    except FileNotFoundError:  # no /proc
        with Descriptors([os.open(".", _DIRECTORY, dir_fd=directory)]) as (fd,):
            return act(fd)
