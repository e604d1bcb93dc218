"""A bell: a socket by which another process wakes the one that waits at it.

Waiting at a bell takes a thirtieth of the processor time of waiting for a lock, which needs a thread (`waker`). A ring that comes
before the wait is kept. Nobody rings for a process that was killed, nor from a container with a network of its own, so look by
yourself now and then.

The socket has an abstract name, and no file: a file would be in the way of those who copy the directory, since most programs
cannot copy a socket. So any process may ring, which wakes somebody who looks and sleeps again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from qewqew_core.disk.descriptors import Closes


class Bell(Closes):
    """Make a bell with a name that nobody else has. Errors of the system pass through; some systems have no such sockets."""

    def __init__(self, name: str) -> None:
        import socket  # late, as portalocker: a program that only reads needs none

        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(_address(name))
        except BaseException:
            self._socket.close()
            raise

    def wait(self, seconds: float) -> None:
        """Sleep until it rings, for up to ``seconds``; at once if it has rung since the last wait."""
        self._socket.settimeout(max(seconds, 0.001))  # 0 would not wait at all, and raise another error
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


def ring(names: Iterable[str]) -> None:
    """Ring these bells, as far as they are there."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringing:
        ringing.setblocking(False)  # a bell that nobody has heard ten times need not ring again
        for name in names:
            with contextlib.suppress(OSError):
                ringing.sendto(b"\0", _address(name))


def _address(name: str) -> bytes:
    return b"\0qewqew-" + name.encode()
