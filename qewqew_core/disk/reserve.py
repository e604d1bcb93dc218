"""`Reserve`: room that a store keeps for what frees room.

On a full disk records can still be taken, leased and acknowledged, and a store that was killed can be opened. That needs
room itself: a lease makes a directory with a manifest, and perhaps a copy of some records; an opening makes a new log. So from
its first commit on, each queue and topic has `FILES` files of `BYTES` bytes in the directory ``NAME.reserve``, beside its log.
What finds the disk full removes them, which gives back bytes and inodes, and does it again. They are made again as soon as
there is room, and no record is put without them. (But while the writer of a topic is open and its readers have removed
them, it goes on until its log has used up its `journal.SPARE`.)

They hold nothing, so nobody waits until they are durable. A lease makes up to five files and directories. xfs makes none
while less than some 60 blocks are free, and renames none into a directory that must grow while less than 90 are, though
it takes one or two. So the files are as large as that, on a small file system `SHARE` of it at the most.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol, TypeVar

from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, check_regular
from qewqew_core.errors import BadPath, Broken

T = TypeVar("T")

RESERVE = ".reserve"  # what the name of the directory ends with
FILES, BYTES = 8, 128 << 10
SHARE = 8  # together they are an eighth of the file system at the most
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def names_in(reserve: str) -> Iterator[tuple[str, bool]]:
    """The directory with this path and the files in it, and whether each is a directory."""
    yield reserve, True
    for number in range(FILES):
        yield os.path.join(reserve, str(number)), False


def means_full(error: BaseException) -> bool:
    """Whether an error says that there was no room: one of the system's, or a `DiskFull` made from one. No failed fsync is."""
    while error.__cause__ is not None and not isinstance(error, Broken):
        error = error.__cause__
    return isinstance(error, OSError) and not isinstance(error, Broken) and error.errno in FULL


class Releases(Protocol):
    """Something that has kept room."""

    def release(self) -> bool: ...


class Reserve:
    """The reserve of the store whose log is at ``log``."""

    def __init__(self, files: Files, log: str) -> None:
        self._files = files
        self._log = log

    @cached_property
    def _path(self) -> str:
        return os.path.splitext(self._log)[0] + RESERVE

    @cached_property
    def _paths(self) -> list[str]:
        return [path for path, is_directory in names_in(self._path) if not is_directory]

    @cached_property
    def _bytes(self) -> int:
        """Of each file."""
        capacity = self._files.capacity(os.path.dirname(self._path))
        return min(BYTES, capacity // SHARE // FILES) if capacity else BYTES

    @property
    def for_moves(self) -> int:
        """The part of it, in bytes, that is to be left when a commit is done that files must be renamed after."""
        return FILES * self._bytes * 3 // 8

    def is_whole(self) -> bool:
        """Whether it is there. The last file is made last."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._files.status(self._paths[-1], follow=False).st_blocks * 512 >= self._bytes
        return False

    def make(self) -> None:
        """Make what is missing of it. If there is no room for all, this raises OSError, and what there was room for stays."""
        if self.is_whole():
            return
        if not self._files.is_directory(self._path):
            if self._files.exists(self._path):
                raise BadPath("is in the way of the room for a full disk. Nothing was stored; move it away", path=self._path)
            with contextlib.suppress(FileExistsError):  # another process makes it too
                self._files.make_directory(self._path)
        with self._files.entered():
            for path in self._paths:
                with Descriptors() as fds:
                    self._files.open_into(fds, path, make=True)
                    check_regular(self._files.status(fds[0]), path)
                    if not self._is_empty(fds[0]):
                        raise BadPath("is in the way of the room for a full disk. Nothing was stored; move it away", path=path)
                    self._files.allocate(fds[0], self._bytes)

    def release(self) -> bool:
        """Give the room back; whether there was any."""
        if not self._files.is_directory(self._path):
            return False
        released = False
        with self._files.entered():
            for path in self._paths:
                with contextlib.suppress(OSError):  # it is not there, or cannot be removed: then it gives no room
                    with Descriptors([self._files.open_to_read(path)]) as (fd,):
                        is_ours = self._is_empty(fd)
                    if is_ours:
                        self._files.unlink(path)
                        released = True
        with contextlib.suppress(OSError):  # somebody has put something there
            self._files.remove_directory(self._path)
            released = True
        return released

    def _is_empty(self, fd: int) -> bool:
        """Nothing of ours is ever written there; what was moved here may be a user's."""
        return not any(self._files.read(fd, 512, 0))


def with_room(room: Releases, act: Callable[[], T]) -> T:
    """What ``act`` returns. If the disk is full, it is called again with the room that has been kept for that."""
    try:
        return act()
    except OSError as error:
        if not means_full(error) or not room.release():
            raise
        return act()
