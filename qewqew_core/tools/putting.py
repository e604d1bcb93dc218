"""Records on their way into a queue or topic. It is locked only for each commit, not while the input is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from qewqew_core.disk.descriptors import NotCopied
from qewqew_core.formats.zbus import Message
from qewqew_core.queue.stage import Stage
from qewqew_core.tools.listing import Kind
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_session import TopicSession


class Committed(NamedTuple):
    records: int  # that this commit has put, or the one before it that had the same key
    repeated: bool  # there was one before: this commit has put nothing


class IntoQueue(NotCopied):
    """Puts records into a queue; of a message, only its body. ``settings`` are those of `Queue`."""

    def __init__(self, path: str, **settings: Any) -> None:
        self._stage = Stage(path, **settings)

    def add(self, messages: list[Message]) -> None:
        """Add to the next commit. Raises as `Stage.put_many`."""
        self._stage.put_many([message.body for message in messages])

    def commit(self, key: str | None = None) -> Committed:
        """Put everything added since the last commit, or nothing if the key was used before. Raises as `Stage.commit`."""
        records = self._stage.commit(key)
        return Committed(records, self._stage.stored < records)

    def close(self) -> None:
        """Drop what is not committed."""
        self._stage.close()


class IntoTopic(NotCopied):
    """Appends messages to a topic. The first message, or an empty commit, makes the topic. ``settings``: `Topic`."""

    def __init__(self, path: str, **settings: Any) -> None:
        self._path = topic_paths.check_topic_path(path)
        self._settings = settings
        self._open: tuple[Topic, TopicSession] | None = None

    def _opened(self) -> tuple[Topic, TopicSession]:
        if self._open is None:
            topic = Topic(self._path, **self._settings)
            self._open = topic, topic.session()
        return self._open

    def add(self, messages: list[Message]) -> None:
        """Add to the next commit. Raises as `TopicSession.append_many`, and as `Topic` when it opens the topic."""
        self._opened()[1].append_many(messages)

    def commit(self, key: str | None = None) -> Committed:
        """Append everything added since the last commit, or nothing if the key was used before. Raises as
        `TopicSession.commit`.
        """
        topic, session = self._opened()
        state = topic.writer().engine.state  # from here on nobody else appends
        before = state.number
        records = session.commit(key)
        repeated = state.number < before + records
        self.close()  # it has the lock
        return Committed(records, repeated)

    def close(self) -> None:
        """Drop what is not committed."""
        if self._open is not None:
            topic, session = self._open
            self._open = None
            try:
                session.close()
            finally:
                topic.close()


def into(path: str, kind: Kind, **settings: Any) -> IntoQueue | IntoTopic:
    """Puts into the queue or topic at a path, which may be missing. Raises `BadPath`, `BadArgument`."""
    return IntoQueue(path, **settings) if kind is Kind.QUEUE else IntoTopic(path, **settings)
