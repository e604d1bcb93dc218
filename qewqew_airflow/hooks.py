"""The hook: a connection is a directory of queues, with the settings that its queues are opened with."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from airflow.sdk import BaseHook, Connection

from qewqew_airflow.arguments import seconds, whole
from qewqew_core import BadArgument, BadPath, Queue, QueueStats, inspect
from qewqew_core.chunk import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE

LONGEST_NAME = 200  # bytes of one part of a queue's name; the core appends suffixes, a file name holds 255


def _sync(name: str, value: Any) -> str:
    if value not in ("commit", "never"):
        raise BadArgument(f"{name} must be 'commit' or 'never', not {value!r:.80}")
    return str(value)


# What the extra of a connection may hold, and how each value becomes an argument of Queue.
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "chunk_size": lambda name, value: whole(name, value, MIN_CHUNK_SIZE, MAX_CHUNK_SIZE),
    "sync": _sync,
    "lock_timeout": lambda name, value: seconds(name, value).total_seconds(),
    "max_records": whole,
    "max_bytes": whole,
    "min_free_bytes": lambda name, value: whole(name, value, 0),
    "max_attempts": whole,
    "retention": seconds,
    "retention_bytes": lambda name, value: whole(name, value, 0),
}


class QewQewHook(BaseHook):
    """Opens the queues of one connection.

    The connection's host is a directory on this machine (absolute, existing), its extra may hold the
    settings of `Queue`: chunk_size (bytes), sync ("commit" or "never"), lock_timeout (seconds),
    max_records, max_bytes, min_free_bytes, max_attempts, retention (seconds), retention_bytes. Names of
    queues are relative to the directory and cannot leave it.

    :param qewqew_conn_id: the connection
    """

    conn_name_attr = "qewqew_conn_id"
    default_conn_name = "qewqew_default"
    conn_type = "qewqew"
    hook_name = "QewQew"

    def __init__(self, qewqew_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.qewqew_conn_id = qewqew_conn_id

    @cached_property
    def connection(self) -> Connection:
        return self.get_connection(self.qewqew_conn_id)

    def directory(self) -> str:
        """The connection's directory, links resolved. Raises `BadPath` unless it is one that can be read.

        It is never created: a directory that is missing is more often a mount that is missing, and a
        new queue beside the real one would split the records.
        """
        host = self.connection.host
        if not host or not os.path.isabs(host) or "\0" in host:
            raise BadPath(
                f"connection {self.qewqew_conn_id!r}: the host must be the absolute path of the directory "
                f"that holds the queues, not {host!r}"
            )
        directory = os.path.realpath(host)
        self._check_directory(directory)
        return directory

    def path(self, queue_name: str) -> str:
        """The absolute path of a queue, links resolved; touches nothing.

        ``queue_name`` is a file name in the connection's directory, or ``sub/name`` in a directory
        below it. Raises `BadPath` for a name that is empty, absolute, has ``.`` or ``..`` in it or
        unprintable characters, or that leaves the directory by a link.
        """
        parts = queue_name.split("/") if isinstance(queue_name, str) else []
        if (
            not parts
            or any(part in ("", ".", "..") for part in parts)
            or not queue_name.isprintable()
            or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts)
        ):
            raise BadPath(
                f"{queue_name!r:.300} is not the name of a queue; give a file name relative to the directory of connection "
                f"{self.qewqew_conn_id!r}, such as 'orders' or 'shop/orders': printable, no '.' or '..' between the "
                f"slashes, and at most {LONGEST_NAME} bytes each"
            )
        directory = self.directory()
        parent = os.path.realpath(os.path.join(directory, *parts[:-1]))
        path = os.path.realpath(os.path.join(parent, parts[-1]))
        inside = os.path.join(directory, "")
        if not (os.path.join(parent, "").startswith(inside) and path.startswith(inside)):
            raise BadPath(
                f"queue {queue_name!r} leads out of {directory}, the directory of connection {self.qewqew_conn_id!r}, "
                "by a symbolic link; move the queue into it, or make a connection for where it lies",
                path=path,
            )
        self._check_directory(os.path.dirname(path))
        return path

    def _check_directory(self, directory: str) -> None:
        if not os.path.isdir(directory):
            raise BadPath(
                f"connection {self.qewqew_conn_id!r} needs this directory, and it does not exist on this worker; "
                f"mount it, or create it for the user of the workers: mkdir -p -m 700 {directory}",
                path=directory,
            )
        if not os.access(directory, os.R_OK | os.X_OK):
            raise BadPath(
                f"connection {self.qewqew_conn_id!r} needs this directory, and user {os.geteuid()} cannot read it; "
                "give the user of the workers access to it (chown, chmod)",
                path=directory,
            )

    def settings(self) -> dict[str, Any]:
        """The arguments of `Queue` in the connection's extra; raises `BadArgument` for one that is wrong or unknown."""
        extra = self.connection.extra_dejson
        unknown = sorted(set(extra) - set(SETTINGS))
        if unknown:
            raise BadArgument(
                f"connection {self.qewqew_conn_id!r}: the extra has {', '.join(map(repr, unknown))}; "
                f"it may have {', '.join(SETTINGS)}"
            )
        # The form saves a field that was left empty as null or "".
        return {
            name: check(f"connection {self.qewqew_conn_id!r}: extra {name}", extra[name])
            for name, check in SETTINGS.items()
            if extra.get(name) not in (None, "")
        }

    def queue(self, queue_name: str, **settings: Any) -> Queue:
        """Open a queue for this process alone; close it soon, others wait for it.

        ``settings`` are arguments of `Queue` and win over those of the connection. Raises `BadPath`,
        `BadArgument`, `QueueLocked` (after lock_timeout seconds) and whatever `Queue` raises.
        """
        return Queue(self.path(queue_name), **{**self.settings(), **settings})

    def inspect(self, queue_name: str) -> QueueStats:
        """How much is in a queue, without its lock; zeros for a queue that does not exist yet. Raises `BadPath`."""
        return inspect(self.path(queue_name))

    def test_connection(self) -> tuple[bool, str]:
        """Can the directory be read and written where this runs (the API server), and are the settings right?"""
        try:
            self.settings()
            directory = self.directory()
        except Exception as error:  # whatever is wrong is the answer
            return False, f"{type(error).__name__}: {error}"
        if not os.access(directory, os.W_OK):
            return False, f"{directory} can be read but not written by user {os.geteuid()}"
        return True, f"{directory} can be read and written"
