"""How the queues were: a small SQLite file with what waited, was put and was drained, for the plots of the page.

Each process of the API server has a thread that looks once a minute; who is first in a minute writes it, for all. The file has a
bounded size, and one that is damaged is replaced by a new one: nothing but plots depends on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

MINUTE = 60
FINE_MINUTES = 48 * 60  # of so many minutes there is a sample of each, …
COARSE = 15  # … before that one of so many minutes together, …
COARSE_MINUTES = 14 * 24 * 60  # … and none before that
MOST_SAMPLES = 500_000  # of all queues together: beyond that the oldest go. Some 20 MB
MOST_PAGES = 16_384  # of 4 KiB: the file never grows beyond that, whatever happens
LONGEST_GAP = 5  # minutes: what was put and drained while nobody looked for longer belongs to no minute

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, directory TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (directory, name));
CREATE TABLE IF NOT EXISTS samples (
    series INTEGER NOT NULL,
    minute INTEGER NOT NULL, -- since the epoch
    at INTEGER NOT NULL,     -- milliseconds since the epoch
    depth INTEGER NOT NULL,  -- what waited then; of several minutes together, the most
    total INTEGER,           -- of a topic: how many messages it ever had
    put INTEGER,             -- since the sample before, with what was drained; NULL: not known
    drained INTEGER,
    minutes INTEGER NOT NULL, -- in which this was put and drained
    PRIMARY KEY (series, minute)
) WITHOUT ROWID;
"""
_MERGE = """
CREATE TEMP TABLE merged AS
    SELECT series, minute / :coarse * :coarse AS minute, max(at), max(depth), max(total), sum(put), sum(drained), sum(minutes)
    FROM samples WHERE minute < :before GROUP BY 1, 2 HAVING count(*) > 1;
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """A queue or topic at one moment. Times are milliseconds since the epoch."""

    name: str  # "queue NAME" or "topic NAME"
    depth: int
    total: int | None = None  # messages that a topic ever had
    leased: tuple[tuple[int, int], ...] = ()  # (time, records) of the batches that are known
    staged: tuple[tuple[int, int], ...] = ()  # (time, records) of what was put under a key


class Samples:
    """The file. Every method opens it anew: threads and processes share nothing else. Raises sqlite3.Error."""

    def __init__(self, path: str) -> None:
        self.path = path

    def has(self, directory: str, minute: int) -> bool:
        """Has somebody written this minute already?"""
        with self._opened() as file:
            asked = "SELECT 1 FROM series JOIN samples ON series = id WHERE directory = ? AND minute = ? LIMIT 1"
            return file.execute(asked, (directory, minute)).fetchone() is not None

    def add(self, directory: str, minute: int, at: int, seen: Iterable[Seen]) -> None:
        """What was seen in a directory; what is there of this minute stays."""
        with self._opened() as file, file:
            file.execute("BEGIN IMMEDIATE")
            for queue in seen:
                name = directory, queue.name
                file.execute("INSERT OR IGNORE INTO series (directory, name) VALUES (?, ?)", name)
                (series,) = file.execute("SELECT id FROM series WHERE directory = ? AND name = ?", name).fetchone()
                newest = (
                    "SELECT minute, at, depth, total FROM samples WHERE series = ? AND minute < ? ORDER BY minute DESC LIMIT 1"
                )
                before = file.execute(newest, (series, minute)).fetchone()
                put, drained, minutes = None, None, 0
                if before is not None and minute - before[0] <= LONGEST_GAP:
                    put, drained = moved(queue, at, *before[1:])
                    minutes = minute - before[0]
                row = series, minute, at, queue.depth, queue.total, put, drained, minutes
                file.execute("INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def thin(self, minute: int) -> None:
        """Join what is old, and remove what is too old, or too much."""
        with self._opened() as file, file:
            file.execute("BEGIN IMMEDIATE")
            limits = {"coarse": COARSE, "before": (minute - FINE_MINUTES) // COARSE * COARSE}
            file.execute(_MERGE, limits)
            file.execute(
                "DELETE FROM samples WHERE minute < :before "
                "AND (series, minute / :coarse * :coarse) IN (SELECT series, minute FROM merged)",
                limits,
            )
            file.execute("INSERT INTO samples SELECT * FROM merged")
            file.execute("DROP TABLE merged")
            file.execute("DELETE FROM samples WHERE minute < ?", (minute - COARSE_MINUTES,))
            newest = file.execute("SELECT minute FROM samples ORDER BY minute DESC LIMIT 1 OFFSET ?", (MOST_SAMPLES,)).fetchone()
            if newest is not None:
                file.execute("DELETE FROM samples WHERE minute <= ?", newest)
            file.execute("DELETE FROM series WHERE NOT EXISTS (SELECT 1 FROM samples WHERE series = id)")

    def depths(self, directory: str, since: int) -> dict[str, list[tuple[int, int]]]:
        """(milliseconds since the epoch, what waited) of each queue and topic from a minute on, the oldest first."""
        asked = (
            "SELECT name, at, depth FROM series JOIN samples ON series = id WHERE directory = ? AND minute >= ? ORDER BY minute"
        )
        found: dict[str, list[tuple[int, int]]] = {}
        with self._opened() as file:
            for name, at, depth in file.execute(asked, (directory, since)):
                found.setdefault(name, []).append((at, depth))
        return found

    def of(self, directory: str, name: str, since: int) -> list[tuple[Any, ...]]:
        """(milliseconds since the epoch, depth, put, drained, minutes in which) of one queue or topic, the oldest first."""
        asked = (
            "SELECT at, depth, put, drained, minutes FROM series JOIN samples ON series = id "
            "WHERE directory = ? AND name = ? AND minute >= ? ORDER BY minute"
        )
        with self._opened() as file:
            return file.execute(asked, (directory, name, since)).fetchall()

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            file = self._connect()
        except sqlite3.OperationalError:  # it is in use, or may not be written: another time
            raise
        except sqlite3.DatabaseError as error:
            _logger.warning("%s is damaged (%s): the plots of the page begin anew", self.path, error)
            self._remove()
            file = self._connect()
        with closing(file):
            try:
                yield file
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # the next call finds none
                self._remove()
                raise

    def _connect(self) -> sqlite3.Connection:
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        file = sqlite3.connect(self.path, timeout=5, isolation_level=None)
        try:
            file.execute(f"PRAGMA max_page_count = {MOST_PAGES}")
            file.execute("PRAGMA synchronous = NORMAL")
            file.executescript(_SCHEMA)
        except BaseException:
            file.close()
            raise
        return file

    def _remove(self) -> None:
        for suffix in ("", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + suffix)


def moved(now: Seen, at: int, before: int, depth: int, total: int | None) -> tuple[int, int]:
    """What was put and drained since the sample of the time ``before``.

    Of a topic both are counted. Of a queue, what is put is what was put under a key, or what the leases since then and the
    depth say, whichever is more; records that were put without a key and taken without a lease between two samples are not seen.
    """
    change = now.depth - depth
    if now.total is not None and total is not None:
        put = max(0, now.total - total)
    else:
        leased, staged = (sum(records for when, records in some if before < when <= at) for some in (now.leased, now.staged))
        put = max(0, staged, leased + change)
    put = max(put, change)
    return put, put - change


class Sampler:
    """Looks once a minute, in a thread. ``find`` gives by directory a function that says what is to be seen there."""

    def __init__(self, samples: Samples, find: Callable[[], dict[str, Callable[[], list[Seen]]]]) -> None:
        self._samples, self._find = samples, find
        self._stop = threading.Event()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample until the block ends."""
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
            except Exception as error:  # the database may be away, or the disk full; the next sample may succeed
                _logger.warning("The depths of the queues could not be sampled: %s: %s", type(error).__name__, error)
            if self._stop.wait(MINUTE - time.time() % MINUTE):
                return

    def sample(self) -> None:
        """Write down this minute, where nobody has yet."""
        minute = int(time.time()) // MINUTE
        if minute % 60 == 0:
            self._samples.thin(minute)
        for directory, look in self._find().items():
            if not self._samples.has(directory, minute):
                self._samples.add(directory, minute, int(time.time() * 1000), look())
