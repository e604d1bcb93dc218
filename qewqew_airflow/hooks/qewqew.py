"""The hook. A connection is a directory of queues and topics, with the settings to open them."""

from __future__ import annotations

import errno
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
from qewqew_core.disk.files import DISK
from qewqew_core.disk.journal import MOST_LOG_BYTES
from qewqew_core.disk.opening import opening
from qewqew_core.formats.chunk import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE
from qewqew_core.formats.zbus import LARGEST_BLOCK
from qewqew_core.secrecy import excerpt
from qewqew_core.tools import marker
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.preflight import Answer, ask, of_directory
from qewqew_core.tools.putting import IntoQueue, IntoTopic, into
from qewqew_core.topic.topic_paths import is_topic

LONGEST_NAME = 200  # bytes of one part of a queue's name: the core appends suffixes, and a file name has at most 255
EVERY_HOST = "*"
RETRY_DELAY = 300.0  # seconds: with five attempts, an outage of an hour makes no dead letters
Checks = dict[str, Callable[[str, Any], Any]]


def _group(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise BadArgument(f"{name} must be the name or number of a Unix group, as text, not {excerpt(value, 80)}")
    return value


# The settings in the extra of a connection, and how each value becomes an argument of Queue.
SETTINGS: Checks = {
    "chunk_size": lambda name, value: whole(name, value, MIN_CHUNK_SIZE, MAX_CHUNK_SIZE),
    "sync": lambda name, value: choice(name, value, "commit", "never"),
    "lock_timeout": lambda name, value: seconds(name, value).total_seconds(),
    "max_records": whole,
    "max_bytes": whole,
    "min_free_bytes": lambda name, value: whole(name, value, 0),
    "log_bytes": lambda name, value: whole(name, value, 1, MOST_LOG_BYTES),
    "max_attempts": whole,
    "retry_delay": lambda name, value: seconds(name, value).total_seconds(),
    "retention": seconds,
    "retention_bytes": lambda name, value: whole(name, value, 0),
    "group": _group,
}
# A topic has other settings of these names, or none. The others are the same for queues and topics.
QUEUE_ONLY = ("chunk_size", "max_records", "max_bytes")
# The settings in the object "topic" in the extra. max_records and max_bytes say what a queue refuses, but what a topic keeps,
# so they must not be in one place.
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
        raise BadArgument(f"{name} must be the name of a host or {EVERY_HOST!r}, not {excerpt(value, 80)}")
    return value


def check_settings(where: str, each: str, given: Any, checks: Checks) -> dict[str, Any]:
    """The settings as arguments. Raises `BadArgument` if one is wrong or unknown.

    In messages, ``where`` stands for all settings, and ``each`` is put before the name of one.
    """
    if not isinstance(given, Mapping):
        raise BadArgument(f"{where} must be an object with settings, not {excerpt(given, 80)}")
    unknown = sorted(map(str, set(given) - set(checks)))
    if unknown:
        raise BadArgument(f"{where} has {', '.join(map(repr, unknown))}; it may have {', '.join(checks)}")
    # The form saves empty fields as null or "".
    return {name: check(f"{each} {name}", given[name]) for name, check in checks.items() if given.get(name) not in (None, "")}


EXTRA: Checks = {
    "hostname": _hostname,
    "directory_id": marker.check_id,
    **SETTINGS,
    "topic": lambda name, value: check_settings(name, name, value, TOPIC_SETTINGS),
}


class QewQewHook(BaseHook):
    """Opens the queues and topics of one connection.

    The connection's host is the absolute path of a directory on this machine that `qewqew init` has marked. Its extra may hold
    hostname (the worker that has this directory, or "*" if every worker has it), directory_id (the id in the marker), and the
    settings of `Queue`: chunk_size (bytes), sync ("commit" or "never"), lock_timeout (seconds), max_records, max_bytes,
    min_free_bytes, log_bytes, max_attempts, retry_delay (seconds, here 300 by default), retention (seconds), retention_bytes,
    group. Topics use them too, except chunk_size, max_records and max_bytes. Their own settings are in an object "topic":
    block_size (bytes), max_age (seconds), max_records, max_bytes, delete_committed (true or false), slow_readers ("hold" or
    "move"). Names of queues and topics are relative to the directory and cannot leave it.

    :param qewqew_conn_id: the connection
    """

    conn_name_attr = "qewqew_conn_id"
    default_conn_name = "qewqew_default"
    conn_type = "qewqew"
    hook_name = "QewQew"

    def __init__(self, qewqew_conn_id: str = default_conn_name, *, in_triggerer: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.qewqew_conn_id = qewqew_conn_id
        self._in_triggerer = in_triggerer  # else a task, or the API server: for the advice of errors

    @cached_property
    def connection(self) -> Connection:
        """The connection. Raises `WrongConnection` if it is of another type."""
        return self._checked(self.get_connection(self.qewqew_conn_id))

    async def aload(self) -> None:
        """Get the connection now, in an event loop. Raises `WrongConnection` if it is of another type."""
        self.connection = self._checked(await self.aget_connection(self.qewqew_conn_id))

    def _checked(self, connection: Connection) -> Connection:
        if connection.conn_type != self.conn_type:
            raise WrongConnection(
                f"connection {self.qewqew_conn_id!r} is of type {connection.conn_type!r}; it must be of type {self.conn_type!r}, "
                "with the directory of the queues as its host"
            )
        return connection

    def directory(self) -> str:
        """The connection's directory, with links resolved. Raises `BadPath` unless it is a directory that can be read and has the
        marker of `qewqew init`, `Broken` if its file system does not answer, and `WrongHost` if it is on another host.

        It is never created. A missing directory, or one without the marker, is usually a missing mount, and a new queue beside
        the real one would split the records.
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
        with opening(directory, f"directory of connection {self.qewqew_conn_id!r}", "try again"):
            marker.check(directory, self._extra().get("directory_id"))
        return directory

    def path(self, name: str) -> str:
        """The absolute path of a queue or topic, with links resolved. Touches nothing.

        ``name`` is a file name in the connection's directory, or ``sub/name`` below it. Raises `BadPath` if it is empty,
        absolute, has ``.``, ``..`` or unprintable characters in it, leaves the directory by a link, or leads into a topic.
        """
        parts = name.split("/") if isinstance(name, str) else []
        if (
            not parts
            or any(part in ("", ".", "..") for part in parts)
            or not name.isprintable()
            or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts)
        ):
            raise BadPath(
                f"{excerpt(name, 300)} is not the name of a queue or topic; give a file name relative to the directory of "
                f"connection {self.qewqew_conn_id!r}, such as 'orders' or 'shop/orders': printable, no '.' or '..' between the "
                f"slashes, and at most {LONGEST_NAME} bytes each"
            )
        directory = self.directory()
        parent = os.path.realpath(os.path.join(directory, *parts[:-1]))
        path = os.path.realpath(os.path.join(parent, parts[-1]))
        inside = os.path.join(directory, "")
        if not (os.path.join(parent, "").startswith(inside) and path.startswith(inside)):
            raise BadPath(
                f"a symbolic link in {name!r} leads out of {directory}, the directory of connection {self.qewqew_conn_id!r}; "
                "move the queue there, or make a connection for its directory",
                path=path,
            )
        self._check_directory(os.path.dirname(path))
        above = os.path.dirname(path)
        while above.startswith(inside):
            if is_topic(above):
                raise BadPath(f"{name!r} leads into the topic {above}; only the topic's own files may be there", path=path)
            above = os.path.dirname(above)
        return path

    def _check_host(self, directory: str) -> None:
        where = self._extra().get("hostname", EVERY_HOST)
        if where != EVERY_HOST and where != (here := get_hostname()):
            remedy = f"give the task a queue= that only the worker on {where!r} serves"
            if self._in_triggerer:
                remedy = (
                    f"for deferred sensors, run 'airflow triggerer --queues LANE' on {where!r}, with the queue= of the task and "
                    "[triggerer] queues_enabled; for asset watchers, run the only triggerer without --queues there"
                )
            raise WrongHost(
                f"connection {self.qewqew_conn_id!r} has this directory on host {where!r}, but this runs on {here!r}; {remedy}, "
                f"or correct hostname in the connection's extra ({EVERY_HOST!r}: every worker sees the same directory)",
                path=directory,
            )

    def _check_directory(self, directory: str) -> None:
        with opening(directory, f"directory of connection {self.qewqew_conn_id!r}", "try again"):
            is_there, is_directory = DISK.exists(directory), DISK.is_directory(directory, follow=True)
        if is_there and not is_directory:
            raise BadPath(
                f"connection {self.qewqew_conn_id!r} needs a directory, but this is a file; give the directory of the "
                "queues, not one of them",
                path=directory,
            )
        if not is_directory:
            here = "for this triggerer" if self._in_triggerer else "on this worker"
            missing = BadPath(
                f"connection {self.qewqew_conn_id!r} needs this directory, but it does not exist {here}; "
                f"mount it, or create it for the user of the workers: qewqew init {directory}",
                path=directory,
            )
            missing.errno = errno.ENOENT
            raise missing
        if not os.access(directory, os.R_OK | os.X_OK):
            denied = BadPath(
                f"connection {self.qewqew_conn_id!r} needs this directory, but user {os.geteuid()} cannot read it; "
                "give the user of the workers access to it (chown, chmod)",
                path=directory,
            )
            denied.errno = errno.EACCES
            raise denied

    def settings(self) -> dict[str, Any]:
        """The arguments of `Queue` in the connection's extra. Raises `BadArgument` if one is wrong or unknown."""
        return {name: value for name, value in self._extra().items() if name in SETTINGS}

    def topic_settings(self) -> dict[str, Any]:
        """The arguments of `Topic` in the connection's extra. Raises what `settings` raises."""
        general = {name: value for name, value in self.settings().items() if name not in QUEUE_ONLY}
        return {**general, **self._extra().get("topic", {})}

    def _extra(self) -> dict[str, Any]:
        """The whole extra, checked."""
        where = f"connection {self.qewqew_conn_id!r}: extra"
        return check_settings(where, where, self.connection.extra_dejson, EXTRA)

    def queue(self, queue_name: str, **settings: Any) -> Queue:
        """Open a queue for this process alone. Close it soon, because others wait for it.

        ``settings`` are arguments of `Queue` and override those of the connection. Raises `BadPath`, `BadArgument`, `Locked`
        (after lock_timeout seconds), and what `Queue` raises.
        """
        return Queue(self._path_to_open(queue_name), **{"retry_delay": RETRY_DELAY, **self.settings(), **settings})

    def into(self, kind: Kind, name: str, **settings: Any) -> IntoQueue | IntoTopic:
        """Put records into a queue or topic while others use it. Only the commit waits for them: for a queue a minute, unless the
        connection or ``settings`` have another ``lock_timeout``.

        ``settings`` are arguments of `Queue` or `Topic` and override those of the connection. Raises `BadPath`, `BadArgument`.
        """
        of_connection = self.settings() if kind is Kind.QUEUE else self.topic_settings()
        return into(self._path_to_open(name), kind, **{**of_connection, **settings})

    def _path_to_open(self, name: str) -> str:
        """`path`, for a caller that creates a missing queue. Without a hostname, that could happen unnoticed on a wrong host."""
        path = self.path(name)
        if "hostname" not in self._extra() and conf.get("core", "executor") != "LocalExecutor":
            self.log.warning(
                "Connection %r does not say which host has %s; set hostname in its extra to its name (this is %r), or to %r if "
                "every worker sees the same directory",
                self.qewqew_conn_id,
                self.connection.host,
                get_hostname(),
                EVERY_HOST,
            )
        return path

    def inspect(self, queue_name: str) -> QueueStats:
        """How much is in a queue, without its lock. Zeros if the queue does not exist yet. Raises `BadPath`."""
        return inspect(self.path(queue_name))

    def topic(self, topic: str, **settings: Any) -> Topic:
        """Open a topic. The first append makes this process its only writer until the topic is closed. Readers never wait.

        ``settings`` are arguments of `Topic` and override those of the connection. Raises `BadPath`, `BadArgument`, and what
        `Topic` raises.
        """
        return Topic(self._path_to_open(topic), **{"retry_delay": RETRY_DELAY, **self.topic_settings(), **settings})

    def inspect_reader(self, topic: str, reader: str) -> QueueStats:
        """How much waits for a reader of a topic, without a lock. All messages if it does not exist yet. Raises `BadPath`."""
        return inspect_reader(self.path(topic), reader)

    def preflight(self) -> list[Answer]:
        """Whether this user on this host can use the connection: settings, host, directory, marker, room, locks. Never raises."""
        settings = ask("settings", lambda: ", ".join(self._extra()) or "those by default")
        return [settings, *(of_directory(self.directory, self.settings()) if settings.ok else ())]

    def test_connection(self) -> tuple[bool, str]:
        """What is wrong with it on this host (the API server's), or what was found."""
        answers = self.preflight()
        wrong = [answer.text for answer in answers if not answer.ok]
        return not wrong, "\n".join(wrong or [f"{answer.what}: {answer.text}" for answer in answers])
