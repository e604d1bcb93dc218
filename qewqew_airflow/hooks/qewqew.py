"""The hook: a connection is a directory of queues and topics, with the settings that they are opened with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseHook, Connection
from airflow.utils.net import get_hostname

from qewqew_airflow.arguments import choice, seconds, whole
from qewqew_airflow.errors import WrongConnection, WrongHost
from qewqew_core import BadArgument, BadPath, Queue, QueueStats, Topic, inspect, inspect_reader
from qewqew_core.disk.journal import MOST_LOG_BYTES
from qewqew_core.formats.chunk import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE
from qewqew_core.formats.zbus import LARGEST_BLOCK
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.putting import IntoQueue, IntoTopic, into
from qewqew_core.topic.topic_paths import is_topic

LONGEST_NAME = 200  # bytes of one part of a queue's name; the core appends suffixes, a file name holds 255
EVERY_HOST = "*"
Checks = dict[str, Callable[[str, Any], Any]]

# What the extra of a connection may hold, and how each value becomes an argument of Queue.
SETTINGS: Checks = {
    "chunk_size": lambda name, value: whole(name, value, MIN_CHUNK_SIZE, MAX_CHUNK_SIZE),
    "sync": lambda name, value: choice(name, value, "commit", "never"),
    "lock_timeout": lambda name, value: seconds(name, value).total_seconds(),
    "max_records": whole,
    "max_bytes": whole,
    "min_free_bytes": lambda name, value: whole(name, value, 0),
    "log_bytes": lambda name, value: whole(name, value, 1, MOST_LOG_BYTES),
    "max_attempts": whole,
    "retention": seconds,
    "retention_bytes": lambda name, value: whole(name, value, 0),
}
# Of these a topic has others of its own, or none; it has the rest as a queue has it.
QUEUE_ONLY = ("chunk_size", "max_records", "max_bytes")
# What "topic" in the extra may hold, an object. To a queue max_records and max_bytes are what it refuses to exceed, to a
# topic what it keeps: one name must not be both.
TOPIC_SETTINGS: Checks = {
    "block_size": lambda name, value: whole(name, value, 1, LARGEST_BLOCK),
    "max_age": lambda name, value: seconds(name, value, low=0.001),
    "max_records": whole,
    "max_bytes": whole,
    "delete_committed": lambda name, value: choice(name, value, True, False),
    "slow_readers": lambda name, value: choice(name, value, "hold", "move"),
}


def _hostname(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or " " in value:
        raise BadArgument(f"{name} must be the name of a host, or {EVERY_HOST!r}, not {value!r:.80}")
    return value


def check_settings(where: str, each: str, given: Any, checks: Checks) -> dict[str, Any]:
    """The settings that are given, as arguments; raises `BadArgument` for one that is wrong or unknown.

    ``where`` and ``each`` are how a message calls all of them, and one, whose name follows.
    """
    if not isinstance(given, Mapping):
        raise BadArgument(f"{where} must be an object with settings, not {given!r:.80}")
    unknown = sorted(map(str, set(given) - set(checks)))
    if unknown:
        raise BadArgument(f"{where} has {', '.join(map(repr, unknown))}; it may have {', '.join(checks)}")
    # The form saves a field that was left empty as null or "".
    return {name: check(f"{each} {name}", given[name]) for name, check in checks.items() if given.get(name) not in (None, "")}


EXTRA: Checks = {
    "hostname": _hostname,
    **SETTINGS,
    "topic": lambda name, value: check_settings(name, name, value, TOPIC_SETTINGS),
}


class QewQewHook(BaseHook):
    """Opens the queues and topics of one connection.

    The connection's host is a directory on this machine (absolute, existing). Its extra may hold the hostname of
    the worker that has this directory, or "*" if every worker has this very one, and the settings of `Queue`:
    chunk_size (bytes), sync ("commit" or "never"), lock_timeout (seconds), max_records, max_bytes,
    min_free_bytes, log_bytes, max_attempts, retention (seconds), retention_bytes. Topics have them too, but for the first
    and the two bounds; what else they have is in an object "topic": block_size (bytes), max_age (seconds),
    max_records, max_bytes, delete_committed (true or false), slow_readers ("hold" or "move"). Names of queues
    and topics are relative to the directory and cannot leave it.

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
        """Raises `WrongConnection` if it is of another type."""
        connection = self.get_connection(self.qewqew_conn_id)
        if connection.conn_type != self.conn_type:
            raise WrongConnection(
                f"connection {self.qewqew_conn_id!r} is of type {connection.conn_type!r}; it must be of type {self.conn_type!r}, "
                "and its host the directory of the queues"
            )
        return connection

    def directory(self) -> str:
        """The connection's directory, links resolved. Raises `BadPath` unless it is one that can be read, and
        `WrongHost` if it is on another host.

        It is never created: a directory that is missing is more often a mount that is missing, and a
        new queue beside the real one would split the records.
        """
        host = self.connection.host
        if not host or not os.path.isabs(host) or "\0" in host:
            raise BadPath(
                f"connection {self.qewqew_conn_id!r}: the host must be the absolute path of the directory "
                f"that holds the queues, not {host!r}"
            )
        self._check_host(host)
        directory = os.path.realpath(host)
        self._check_directory(directory)
        return directory

    def path(self, name: str) -> str:
        """The absolute path of a queue or topic, links resolved; touches nothing.

        ``name`` is a file name in the connection's directory, or ``sub/name`` in a directory
        below it. Raises `BadPath` for a name that is empty, absolute, has ``.`` or ``..`` in it or
        unprintable characters, that leaves the directory by a link, or leads into a topic.
        """
        parts = name.split("/") if isinstance(name, str) else []
        if (
            not parts
            or any(part in ("", ".", "..") for part in parts)
            or not name.isprintable()
            or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts)
        ):
            raise BadPath(
                f"{name!r:.300} is not the name of a queue or topic; give a file name relative to the directory of connection "
                f"{self.qewqew_conn_id!r}, such as 'orders' or 'shop/orders': printable, no '.' or '..' between the "
                f"slashes, and at most {LONGEST_NAME} bytes each"
            )
        directory = self.directory()
        parent = os.path.realpath(os.path.join(directory, *parts[:-1]))
        path = os.path.realpath(os.path.join(parent, parts[-1]))
        inside = os.path.join(directory, "")
        if not (os.path.join(parent, "").startswith(inside) and path.startswith(inside)):
            raise BadPath(
                f"{name!r} leads out of {directory}, the directory of connection {self.qewqew_conn_id!r}, "
                "by a symbolic link; move the queue into it, or make a connection for where it lies",
                path=path,
            )
        self._check_directory(os.path.dirname(path))
        above = os.path.dirname(path)
        while above.startswith(inside):
            if is_topic(above):
                raise BadPath(f"{name!r} leads into the topic {above}, where only its own files may be", path=path)
            above = os.path.dirname(above)
        return path

    def _check_host(self, directory: str) -> None:
        where = self._extra().get("hostname", EVERY_HOST)
        if where != EVERY_HOST and where != (here := get_hostname()):
            raise WrongHost(
                f"connection {self.qewqew_conn_id!r} has this directory on host {where!r}, and this runs on {here!r}; give the "
                f"task a queue= that only the worker on {where!r} serves, or correct hostname in the connection's extra "
                f"({EVERY_HOST!r}: every worker has this very directory)",
                path=directory,
            )

    def _check_directory(self, directory: str) -> None:
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise BadPath(
                f"connection {self.qewqew_conn_id!r} needs a directory, and this is a file; give the directory that holds the "
                "queues, not one of them",
                path=directory,
            )
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
        return {name: value for name, value in self._extra().items() if name in SETTINGS}

    def topic_settings(self) -> dict[str, Any]:
        """The arguments of `Topic` in the connection's extra; raises as `settings`."""
        general = {name: value for name, value in self.settings().items() if name not in QUEUE_ONLY}
        return {**general, **self._extra().get("topic", {})}

    def _extra(self) -> dict[str, Any]:
        """All that is in the extra, checked."""
        where = f"connection {self.qewqew_conn_id!r}: extra"
        return check_settings(where, where, self.connection.extra_dejson, EXTRA)

    def queue(self, queue_name: str, **settings: Any) -> Queue:
        """Open a queue for this process alone; close it soon, others wait for it.

        ``settings`` are arguments of `Queue` and win over those of the connection. Raises `BadPath`,
        `BadArgument`, `Locked` (after lock_timeout seconds) and whatever `Queue` raises.
        """
        return Queue(self._path_to_open(queue_name), **{**self.settings(), **settings})

    def into(self, kind: Kind, name: str, **settings: Any) -> IntoQueue | IntoTopic:
        """What puts records into a queue or topic while others use it; the commit alone waits for it, for a queue a minute
        unless the connection or ``settings`` say otherwise (``lock_timeout``).

        ``settings`` are arguments of `Queue` or `Topic`, and win over those of the connection. Raises `BadPath`, `BadArgument`.
        """
        of_connection = self.settings() if kind is Kind.QUEUE else self.topic_settings()
        return into(self._path_to_open(name), kind, **{**of_connection, **settings})

    def _path_to_open(self, name: str) -> str:
        """`path`, for somebody who makes what is missing: on another host he would not notice."""
        path = self.path(name)
        if "hostname" not in self._extra() and conf.get("core", "executor") != "LocalExecutor":
            self.log.warning(
                "Connection %r does not say which host has %s; set hostname in its extra to its name (this is %r), or to %r if "
                "every worker has this very directory",
                self.qewqew_conn_id,
                self.connection.host,
                get_hostname(),
                EVERY_HOST,
            )
        return path

    def inspect(self, queue_name: str) -> QueueStats:
        """How much is in a queue, without its lock; zeros for a queue that does not exist yet. Raises `BadPath`."""
        return inspect(self.path(queue_name))

    def topic(self, topic: str, **settings: Any) -> Topic:
        """Open a topic. Whoever appends to it has it alone from then on until it is closed; readers wait for nobody.

        ``settings`` are arguments of `Topic` and win over those of the connection. Raises `BadPath`, `BadArgument`, and
        whatever `Topic` raises.
        """
        return Topic(self._path_to_open(topic), **{**self.topic_settings(), **settings})

    def inspect_reader(self, topic: str, reader: str) -> QueueStats:
        """How much waits in a reader of a topic, without a lock; of one that does not exist yet: all. Raises `BadPath`."""
        return inspect_reader(self.path(topic), reader)

    def test_connection(self) -> tuple[bool, str]:
        """Can the directory be read and written where this runs (the API server), and are the settings right?"""
        try:
            self._extra()
            directory = self.directory()
        except Exception as error:  # whatever is wrong is the answer
            return False, f"{type(error).__name__}: {error}"
        if not os.access(directory, os.W_OK):
            return False, f"{directory} can be read but not written by user {os.geteuid()}"
        return True, f"{directory} can be read and written"
