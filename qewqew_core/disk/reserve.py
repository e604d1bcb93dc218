"""`Reserve`: room that a store keeps for what frees room.

On a full disk records can still be taken, leased and acknowledged, and a store that was killed can be opened. That needs
room itself: a lease makes a directory with a manifest, and perhaps a copy of some records; an opening makes a new log. So from
its first commit on, each store has `FILES` files of `BYTES` bytes in the directory ``NAME.reserve``, beside its log. What
finds the disk full removes them, which gives back bytes and inodes, and does it again. They are made again as soon as there is
room, and no record is put without them.

They hold nothing, so nobody waits until they are durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TypeVar

from qewqew_core.disk.files import Descriptors, Files
from qewqew_core.errors import BadPath, Broken

T = TypeVar("T")

RESERVE = ".reserve"  # what the name of the directory ends with
FILES, BYTES = 4, 32 << 10
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def means_full(error: BaseException) -> bool:
    """Whether an error says that there was no room: one of the system's, or a `DiskFull` made from one. No failed fsync is."""
    while error.__cause__ is not None and not isinstance(error, Broken):
        error = error.__cause__
    return isinstance(error, OSError) and not isinstance(error, Broken) and error.errno in FULL


class Reserve:
    """The reserve of the store whose log is at ``log``."""

    def __init__(self, files: Files, log: str) -> None:
        self._files = files
        self._path = os.path.splitext(log)[0] + RESERVE
        self._paths = [os.path.join(self._path, str(number)) for number in range(FILES)]

    def is_whole(self) -> bool:
        """Whether it is there. The last file is made last."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._files.status(self._paths[-1], follow=False).st_blocks * 512 >= BYTES
        return False

    def make(self) -> None:
        """Make what is missing of it. If there is no room for all, this raises OSError, and what there was room for stays."""
        if self.is_whole():
            return
        if not self._files.is_directory(self._path):
            if self._files.exists(self._path):
                raise BadPath("is in the way of the room for a full disk. Nothing was stored; move it away", path=self._path)
            self._files.make_directory(self._path)
        for path in self._paths:
            with Descriptors([self._files.open(path, new=not self._files.exists(path))]) as (fd,):
                self._files.allocate(fd, BYTES)

    def release(self) -> bool:
        """Give the room back; whether there was any."""
        if not self._files.is_directory(self._path):
            return False
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
        with contextlib.suppress(OSError):  # somebody has put something there
            self._files.remove_directory(self._path)
        return True


def with_room(files: Files, log: str, act: Callable[[], T]) -> T:
    """What ``act`` returns. If the disk is full, it is called again with the room that the reserve of the store has given."""
    try:
        return act()
    except OSError as error:
        if not means_full(error) or not Reserve(files, log).release():
            raise
        return act()
