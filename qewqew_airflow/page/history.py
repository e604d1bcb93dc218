"""The sparklines of the page: how much waited in each queue and topic during the last hour."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from qewqew_airflow.page.contents import RecentContents, connections

SAMPLE_SECONDS, SAMPLES = 60.0, 61
MOST_HISTORIES = 5000  # of one connection: more queues than that have no sparkline

_logger = logging.getLogger(__name__)


class History:
    """How much waited in each queue and topic during the last hour, in this process, one sample a minute."""

    def __init__(self, recent: RecentContents) -> None:
        self._recent = recent
        self._samples: dict[str, dict[str, deque[tuple[float, int]]]] = {}  # by connection, and "queue NAME" or "topic NAME"
        self._stop = threading.Event()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample in a thread until the block ends."""
        self._stop.clear()
        thread = threading.Thread(target=self._work, name="qewqew samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(5)  # a directory that hangs must not keep the server from stopping

    def _work(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # the database may be away; the next sample may succeed
                _logger.warning("The depths of the queues could not be sampled", exc_info=True)
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def sample(self) -> None:
        found = connections()
        self._recent.forget(lambda conn_id: conn_id not in found)
        for deleted in self._samples.keys() - found.keys():
            self._samples.pop(deleted, None)
        for conn_id, connection in found.items():
            contents, now = self._recent(connection), time.time()
            before = self._samples.get(conn_id, {})
            after: dict[str, deque[tuple[float, int]]] = {}
            for kind, rows in (("queue", contents.queues), ("topic", contents.topics)):
                for row in rows:
                    key = f"{kind} {row['name']}"
                    if "error" not in row and len(after) < MOST_HISTORIES:
                        after[key] = before.get(key) or deque(maxlen=SAMPLES)
                        after[key].append((now, row["waiting"]))
            self._samples[conn_id] = after

    def of(self, conn_id: str) -> dict[str, list[tuple[int, int]]]:
        """(seconds ago, how many waited) of each queue and topic, the oldest first."""
        now = time.time()
        samples = self._samples.get(conn_id, {})
        return {key: [(round(now - when), count) for when, count in list(some)] for key, some in samples.items()}
