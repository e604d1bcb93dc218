"""A queue, and a topic with one reader whose committed messages are deleted, by the same names: tests run over both."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from qewqew_core import Queue, Topic, inspect, inspect_reader

SETTINGS: dict[str, Any] = {"lock_timeout": 0, "max_attempts": 3, "retention": timedelta(days=1)}


class QueueStore:
    """A queue, by the names that both have."""

    def __init__(self, path: Path, size: int, sync: str, **settings: Any) -> None:
        settings = {**SETTINGS, **settings}
        self.queue = self.leasing = Queue(path, chunk_size=size, sync=sync, **settings)
        for name in ("put", "put_many", "get", "get_many", "peek", "session", "stats", "close", "verify"):
            setattr(self, name, getattr(self.queue, name))
        self.inspect = lambda: inspect(path)


class TopicStore:
    """A topic as the queue for records of any size."""

    def __init__(self, path: Path, size: int, sync: str, **settings: Any) -> None:
        settings = {**SETTINGS, **settings}
        self.topic = Topic(path, block_size=size, sync=sync, delete_committed=True, **settings)
        self.reader = self.leasing = self.topic.reader("the one", redeliver_after=None)
        self.put, self.put_many, self.verify = self.topic.append, self.topic.append_many, self.topic.verify
        self.stats = self.reader.stats
        self.inspect = lambda: inspect_reader(path, "the one")

    def get(self, timeout: float | None = 0) -> bytes:
        message = self.reader.read(timeout)
        self.reader.commit(message)
        return message.body

    def get_many(self, max_records: int, max_bytes: int | None = None) -> list[bytes]:
        messages = self.reader.read_many(max_records, max_bytes)
        if messages:
            self.reader.commit(*messages)
        return [message.body for message in messages]

    def peek(self, timeout: float | None = 0) -> bytes:
        return self.reader.peek(timeout).body

    def session(self) -> TopicStoreSession:
        return TopicStoreSession(self)

    def close(self) -> None:
        self.reader.close()
        self.topic.close()


class TopicStoreSession:
    def __init__(self, store: TopicStore) -> None:
        self.session, self.reader = store.topic.session(), store.reader
        self.put, self.put_many = self.session.append, self.session.append_many
        self.commit, self.rollback, self.close = self.session.commit, self.session.rollback, self.session.close

    def get(self, timeout: float | None = 0) -> bytes:
        return self.session.read(self.reader, timeout).body

    def get_many(self, max_records: int, max_bytes: int | None = None) -> list[bytes]:
        return [message.body for message in self.session.read_many(self.reader, max_records, max_bytes)]

    def __enter__(self) -> TopicStoreSession:
        self.session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.__exit__(*exception)


# By name: the class, and a small size and a large one of its files
STORES: dict[str, tuple[type[QueueStore | TopicStore], tuple[int, int]]] = {
    "queue": (QueueStore, (64, 1 << 14)),
    "topic": (TopicStore, (500, 1 << 20)),
}
