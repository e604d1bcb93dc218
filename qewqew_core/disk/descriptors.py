"""Open descriptors: who has them, and that none is lost, wherever an interrupt or a fork comes."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableSequence
from functools import partial
from typing import NoReturn, Self, SupportsIndex, TypeVar

from qewqew_core.errors import Corrupt

K = TypeVar("K")
MOST_HOLES = 64 << 20  # bytes of a file of ours that may be holes before its last data; logs are allocated ahead by fewer


def open_again(descriptors: list[int], fd: int) -> None:
    """Open the same file again for reading, into a list. For locks this is another opening than the first one."""
    descriptors.extend(map(os.open, (f"/proc/self/fd/{fd}",), (os.O_RDONLY | os.O_CLOEXEC,)))


def has_open(pid: int, fd: int) -> bool:
    """Whether that process has the file open too. If we may not look, because it is another user's, this is True."""
    mine = os.fstat(fd)
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)
    except PermissionError:
        return True
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{directory}/{name}"), mine):
                return True
    return False


# All that are open for writing: through these this process has locks, or will. Only the functions below open and close them.
_writable = set[int]()
_opening = threading.RLock()  # of the next one that is opened: nobody forks meanwhile


def _forked() -> None:
    """In a forked child: the locks are the parent's. A child that shared them would keep them when the parent is killed. So the
    descriptors lead to nothing, until those that have them close them.
    """
    global _opening
    _opening = threading.RLock()
    with Descriptors([os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]) as (nothing,):
        for fd in _writable:
            os.dup2(nothing, fd, inheritable=False)
    _writable.clear()


os.register_at_fork(before=lambda: _opening.acquire(), after_in_parent=lambda: _opening.release(), after_in_child=_forked)


# Descriptors in a list, which an interrupt finds opened and in the list or neither: what runs in C is not interrupted


def open_into(name: str, descriptors: MutableSequence[int], flags: int, dir_fd: int | None = None) -> None:
    """Open a file, into a list, in the directory that is open already."""
    descriptors.extend(map(partial(os.open, dir_fd=dir_fd), (name,), (os.O_CLOEXEC | flags,), (0o600,)))


def open_to_write(name: str, descriptors: MutableSequence[int], flags: int, dir_fd: int | None = None) -> None:
    """The same for reading and writing."""
    with _opening:
        open_into(name, descriptors, os.O_RDWR | flags, dir_fd)
        _writable.add(descriptors[-1])


def close_all(descriptors: list[int]) -> None:
    """Close each of them once, however often this is interrupted and called again."""
    while descriptors:
        _writable.discard(descriptors[-1])
        any(map(os.close, map(descriptors.pop, (-1,))))


def close_first(descriptors: list[int]) -> None:
    _writable.discard(descriptors[0])
    any(map(os.close, map(descriptors.pop, (0,))))


def close_each(descriptors: dict[K, int], *which: K) -> None:
    """The same for a dictionary of descriptors: all of them, or those with these keys."""
    which = which or tuple(descriptors)
    _writable.difference_update(map(descriptors.__getitem__, which))
    any(map(os.close, map(descriptors.pop, which)))


class NotCopied:
    """Owns descriptors, locks, or what they protect. A copy would close them under the original, so there is none."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:  # what copy, deepcopy and pickle call
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it has open files and locks. Open another one by its path "
            "where you need it; threads may share a queue, topic or reader"
        )


class Closes(NotCopied, ABC):
    """Closes itself at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """You may call it twice; a second call finishes an interrupted first one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Descriptors(list[int], Closes):
    """Open descriptors that are closed with the list: wherever an interrupt comes, none of them stays open."""

    def close(self) -> None:
        """Close and forget them. Called again after an interrupt, it goes on where it was interrupted."""
        close_all(self)

    def hand_over(self, fds: MutableSequence[int]) -> None:
        """Move the last one to the other list."""
        fds.extend(map(self.pop, (-1,)))

    def __del__(self) -> None:
        if self:  # when the interpreter ends there is nothing left to call
            self.close()


def data_in(fd: int) -> Iterator[tuple[int, int]]:
    """Where an open file has no hole, which takes no room and reads as zeros: from where to where, in turn."""
    end = 0
    while True:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, end


def end_of_data(fd: int, path: str) -> int:
    """Where an open file has only a hole. Raises `Corrupt` for many holes before that."""
    holes = end = 0
    for begin, following in data_in(fd):
        holes += begin - end
        if holes > MOST_HOLES:
            said = f"has holes of more than {MOST_HOLES:,} bytes, as no such file of QewQew; move it away, then repair"
            raise Corrupt(said, path=path, offset=end)
        end = following
    return end
