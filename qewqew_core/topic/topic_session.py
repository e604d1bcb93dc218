"""`TopicSession`: a transaction on a topic: its appends, and what its readers read, happen together or not at all.

What a session has read is in flight (`reader`) until it commits. To commit appends and reads together, the readers first note
durably which messages they are. Then the topic's log gets the appends and the session's id, durably: that is the commit. Then
the readers note that it has happened. If a process dies after the first note, the next one looks into the topic's log. Both are
durable with ``sync="never"``, too: nothing else would order two logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterable

from qewqew_core import arguments
from qewqew_core.disk.engine import Transaction
from qewqew_core.errors import BadArgument, Broken, Closed, QewQewError
from qewqew_core.formats.zbus import Message
from qewqew_core.keys import key_hash
from qewqew_core.topic.open_topic import OpenTopic
from qewqew_core.topic.outgoing import Appends
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic_state import Operation, PutKey, Session
from qewqew_core.topic.writer import Writer

_logger = logging.getLogger(__name__)


class TopicSession(Transaction):
    """Appends and reads that happen together or not at all; from `Topic.session`.

    In a ``with`` statement it commits at the end of the block, and rolls back on an exception. Otherwise call `commit`, and
    `close` at the end. It may commit several times. A topic may have several sessions, but two threads must not use one session
    at once. Messages that a process has not committed when it dies are delivered again at once.
    """

    def __init__(self, topic: OpenTopic, number: int) -> None:
        self._topic = topic
        self._appends = Appends(topic.files, os.path.join(topic.path, "state", f"{os.getpid()}-{number}.spill"))
        self._read: dict[Reader, list[Message]] = {}
        self._position: int | None = None  # in the log, of the commit that is under way, once it has happened
        self._closed = False

    def append(
        self,
        body: bytes,
        *,
        tag: str | None = None,
        id: str | None = None,
        corr_offset: int = 0,
        timestamp: int | None = None,
    ) -> None:
        """Add a message to the next commit. Raises as `Topic.append`: it was not added."""
        self.append_many([Message(body, tag, id, corr_offset, timestamp)])

    def append_many(self, messages: Iterable[bytes | Message]) -> int:
        """Add all messages, or none if it raises; returns how many."""
        self._usable()
        ready = self._topic.checked(messages)
        self._appends.add(ready)
        return ready.messages

    def read(self, reader: Reader, timeout: float | None = 0) -> Message:
        """The next message of a reader of this topic; the session commits it. Waits and raises as `Reader.read`."""
        self._check(reader)
        message = reader.read(timeout)
        self._read.setdefault(reader, []).append(message)
        return message

    def read_many(
        self, reader: Reader, max_records: int, max_bytes: int | None = None, timeout: float | None = 0
    ) -> list[Message]:
        """As `Reader.read_many`; the session commits the messages."""
        self._check(reader)
        messages = reader.read_many(max_records, max_bytes, timeout)
        self._read.setdefault(reader, []).extend(messages)
        return messages

    def _check(self, reader: Reader) -> None:
        self._usable()
        if getattr(reader, "topic", None) is not self._topic:
            raise BadArgument("a session uses only readers of its own Topic object: two topics cannot commit together")
        if reader.auto_commit:
            raise BadArgument("the reader has auto_commit: what it delivers is committed already")

    def commit(self, key: str | None = None) -> int:
        """Make all appends and reads since the last commit happen together; returns how many messages were appended.

        Durable when it returns, as `Topic.append_many` is; whatever ``sync`` is, if it commits reads with appends, with a key, or
        of several readers. With a ``key`` that was used before, what was read is given back.
        Raises `CommitConflict` if a message that was read was delivered to somebody else in the meantime, `DiskFull`, `BadKey`,
        `Locked`: nothing has happened, and the session may commit again or roll back.
        """
        self._usable()
        topic = self._topic
        hashed = None if key is None else key_hash(arguments.check_key(key))
        read = {reader: messages for reader, messages in self._read.items() if messages}
        if not self._appends and hashed is None and len(read) <= 1:
            for reader, messages in read.items():
                reader.commit(*messages)
            self._forget()
            return 0
        writer = topic.writer()
        session = os.urandom(16).hex()
        operations: list[Operation] = [] if hashed is None else [PutKey(hashed, len(self._appends))]
        if read:
            operations.append(Session(session, [reader.name for reader in read]))
        self._position = None
        try:
            with writer.engine.exclusive():
                blocks = writer.engine.state.last.block
                if hashed is not None and hashed in writer.engine.state.idempotency_keys:
                    known, before = writer.engine.state.idempotency_keys[hashed][1], writer.engine.log.position
                    self.rollback()
                else:
                    self._commit(writer, session, read, operations)
            if self._position is None:
                writer.durable(before, always=bool(read))  # another thread may still be waiting for that commit
                return known
            count = self._finish(writer, session, read)
        except BaseException as error:
            if self._position is not None:  # else it has not happened, or `_commit` has seen to it
                self._settle(writer, session, read, error)
            raise
        if writer.engine.state.last.block != blocks:
            topic.trim_quietly()
        return count

    def _finish(self, writer: Writer, session: str, read: Collection[Reader]) -> int:
        """Let everybody see what was committed, and forget it; returns how many messages were appended. A second call goes on."""
        assert self._position is not None
        writer.durable(self._position, always=bool(read))
        noted = True
        for reader in read:
            noted &= _note(reader, session)
        if noted:
            writer.noted(session)
        count = len(self._appends)
        self._forget()
        return count

    def _settle(self, writer: Writer, session: str, read: Collection[Reader], error: BaseException) -> None:
        """It was interrupted after its commit, or the disk has failed."""
        try:
            writer.settle(error)
            if writer.engine.is_open and not isinstance(error, QewQewError):
                self._finish(writer, session, read)
        finally:
            self._leave_open(session)

    def _commit(self, writer: Writer, session: str, read: dict[Reader, list[Message]], operations: list[Operation]) -> None:
        """Have the readers note what this is about, then commit; ``_position`` is that in the topic's log."""
        try:
            for reader, messages in read.items():
                reader.participant.prepare(session, messages)
            self._position = writer.append(self._appends, self._appends.size, operations)
        except BaseException as error:
            if not writer.engine.committed or (isinstance(error, QewQewError) and not isinstance(error, Broken)):
                for reader in read:
                    with contextlib.suppress(QewQewError):  # what follows, a commit or a rollback, makes up for it
                        reader.participant.unprepare(session)
            else:
                self._leave_open(session)
            raise

    def _leave_open(self, session: str) -> None:
        """It has happened, or not: the log decides when it is opened again."""
        for reader in self._read:
            reader.participant.leave_open(session)
        self._forget()

    def rollback(self) -> None:
        """Drop what was appended since the last commit, and give back what was read: it is delivered again, first."""
        self._usable()
        self._requeue()
        self._forget()

    def _requeue(self) -> None:
        for reader, messages in self._read.items():
            if messages and reader.participant.engine.is_open:
                reader.participant.requeue(messages)

    def _forget(self) -> None:
        self._appends.clear()
        self._read = {}

    def close(self) -> None:
        """Roll back what is not committed, even if the topic was closed.

        You may call it twice; a second call finishes an interrupted first one.
        """
        self._closed = True
        try:
            self._requeue()
            self._read = {}
        except QewQewError:
            self._read = {}
            raise
        finally:
            self._appends.close()

    def _usable(self) -> None:
        if self._closed or self._topic.is_closed:
            raise Closed("the session or its topic is closed; open another one with Topic.session()", path=self._topic.path)

    def __del__(self) -> None:
        if not self._closed and (self._appends or any(self._read.values())):
            warnings.warn(f"a session of topic {self._topic.path} was not closed", ResourceWarning, stacklevel=2)


def _note(reader: Reader, session: str) -> bool:
    """Have the reader note that the session was committed; whether it has. Else the next opening of a writer does it."""
    try:
        return reader.participant.resolve(session)
    except QewQewError as error:
        _logger.warning("the session was committed, but reader %s could not note it: %s", reader.name, error)
        reader.participant.leave_open(session)
        return False
