"""The history of the queues: a small SQLite file with what waited, was put and was drained, for the plots of the page.

Each process of the API server has a thread that looks once a minute; the first in each minute writes for all. The size of the
file is bounded. A damaged file is replaced by a new one, because only plots depend on it.
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
FINE_MINUTES = 48 * 60  # a sample of each minute for this many minutes, …
COARSE = 15  # … before that one sample of this many minutes together, …
COARSE_MINUTES = 14 * 24 * 60  # … and nothing before that
MOST_SAMPLES = 500_000  # of all queues together (some 20 MB); beyond that the oldest are removed
MOST_PAGES = 16_384  # of 4 KiB; the file never grows beyond that
LONGEST_GAP = 5  # minutes; after a longer gap between samples, what was put and drained is not known

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
    """The file. Every method opens it, so that threads and processes share nothing else. Raises sqlite3.Error."""

    def __init__(self, path: str) -> None:
        self.path = path

    def has(self, directory: str, minute: int) -> bool:
        """Has this minute been written already?"""
        with self._opened() as file:
            asked = "SELECT 1 FROM series JOIN samples ON series = id WHERE directory = ? AND minute = ? LIMIT 1"
            return file.execute(asked, (directory, minute)).fetchone() is not None

    def add(self, directory: str, minute: int, at: int, seen: Iterable[Seen]) -> None:
        """Add what was seen in a directory. Existing samples of this minute stay."""
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
        """Merge old samples, and remove those that are too old or too many."""
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
        """(milliseconds since the epoch, what waited) of each queue and topic since a minute, the oldest first."""
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
        except sqlite3.OperationalError:  # in use or not writable: try again later
            raise
        except sqlite3.DatabaseError as error:
            _logger.warning("%s is damaged (%s): the plots of the page begin again", self.path, error)
            self._remove()
            file = self._connect()
        with closing(file):
            try:
                yield file
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # the next call makes a new file
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
    """What was put and drained since the sample at the time ``before``.

    For a topic both are counted. For a queue, put is what was put under a key, or what follows from the depth and the leases
    since then, whichever is more. Records that were put without a key and taken without a lease between two samples are missed.
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
    """Looks once a minute, in a thread. ``each`` calls a function with each directory, and a function that looks there."""

    def __init__(self, samples: Samples, each: Callable[[Callable[[str, Callable[[], list[Seen]]], None]], None]) -> None:
        self._samples, self._each = samples, each
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
            thread.join(5)  # it may wait for a directory that hangs

    def _work(self) -> None:
        while True:
            try:
                self.sample()
            except Exception as error:  # the database may be gone, or the disk full; the next sample may succeed
                _logger.warning("The queues could not be sampled for the plots: %s: %s", type(error).__name__, error)
            if self._stop.wait(MINUTE - time.time() % MINUTE):
                return

    def sample(self) -> None:
        """Write this minute, where no other process has yet."""
        minute = int(time.time()) // MINUTE
        if minute % 60 == 0:
            self._samples.thin(minute)

        def add(directory: str, look: Callable[[], list[Seen]]) -> None:
            if not self._samples.has(directory, minute):
                self._samples.add(directory, minute, int(time.time() * 1000), look())

        self._each(add)
