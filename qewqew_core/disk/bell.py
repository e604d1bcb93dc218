"""A bell: a socket beside a file, by which another process wakes the one that waits at it.

Waiting at a bell takes a thirtieth of the processor time of waiting for a lock, which needs a thread (`waker`). A ring that comes
before the wait is kept. Nobody rings for a process that was killed, so look by yourself now and then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from qewqew_core.disk.files import Closes, Descriptors


class Bell(Closes):
    """Make a bell at ``path``. Errors of the system pass through; some file systems have no sockets."""

    def __init__(self, path: str) -> None:
        import socket  # late, as portalocker: a program that only reads needs none

        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # the mode of what `bind` makes
            home, name = os.path.split(path)
            with Descriptors([_open(home)]) as (fd,):
                self._socket.bind(_short(fd, name))
        except BaseException:
            self._socket.close()
            raise

    def wait(self, seconds: float) -> None:
        """Sleep until it rings, for up to ``seconds``; at once if it has rung since the last wait."""
        self._socket.settimeout(max(seconds, 0.001))  # 0 would not wait at all, and raise another error
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._socket.close()

    def forked(self) -> None:
        """In a forked child: the bell stays the parent's."""
        self._socket.close()


def ring(home: str, names: Iterable[str]) -> None:
    """Ring these bells in a directory, as far as they are there."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringing, Descriptors([_open(home)]) as (fd,):
        ringing.setblocking(False)  # a bell that nobody has heard ten times need not ring again
        for name in names:
            with contextlib.suppress(OSError):
                ringing.sendto(b"\0", _short(fd, name))


def _open(home: str) -> int:
    return os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _short(home: int, name: str) -> str:
    """The path of a socket has at most 107 bytes."""
    return f"/proc/self/fd/{home}/{name}"
