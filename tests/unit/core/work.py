"""Random work on a queue or a topic, what either has to be after each operation, and how that is held against what is there.

`Work` is what both have; `QueueWork`, `HandedOverWork`, `SessionWork` (three sessions on a queue), `TopicWork` and
`TopicSessionWork` say what they do and how often.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from unittest.mock import patch

import pytest
from disk import JournalDisk, NoSync
from plain import plain
from views import EMPTY, View, bases, differences, is_between, of_queue, view

import qewqew_core.disk.journal
import qewqew_core.disk.reserve
import qewqew_core.formats.zbus
import qewqew_core.topic.block_sums
import qewqew_core.topic.deliveries
import qewqew_core.topic.outgoing
import qewqew_core.topic.view
from qewqew_core import BatchConflict, Closed, CommitConflict, Empty, Full, Message, Queue, Topic
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.reader_inspection import look

Action = Callable[[], object]
LOG_BYTES = 5000  # so few that a short workload on a topic has its logs cut back


def set_small_limits(patch: pytest.MonkeyPatch, inline: int) -> None:
    """Of topics. Limits so small that a short workload meets each of them; and a small ring, so that it goes round."""
    for module, name, value in (
        (LIMITS, "log_bytes_at_close", 2500),
        (LIMITS, "log_frames_at_close", 12),
        (LIMITS, "write_bytes", 100),
        (LIMITS, "inline_bytes", {"commit": inline, "never": inline}),
        (LIMITS, "piece_bytes", 500),
        (LIMITS, "reader_log_bytes", 2500),
        (LIMITS, "look_at_owners", 0),
        (LIMITS, "topic_spill_bytes", 600),
        (qewqew_core.topic.block_sums, "SCAN", 600),
        (qewqew_core.topic.deliveries, "SCAN", 600),
        (qewqew_core.topic.view, "SCAN", 600),
        (qewqew_core.topic.view, "WINDOW", 300),
        (qewqew_core.topic.outgoing, "READ_BYTES", 200),
        (qewqew_core.disk.journal, "SPARE", 2000),
        (qewqew_core.disk.reserve, "BYTES", 300),
        (qewqew_core.formats.zbus, "RING", 24),
        (qewqew_core.formats.zbus, "INDEX_SIZE", qewqew_core.formats.zbus.HEADER + 24 * qewqew_core.formats.zbus.ENTRY),
    ):
        patch.setattr(module, name, value)


NAMES = ["r1", "r2", "r3"]
ENDS = ["ack", "nack", "retry", "put_back", "to_dead_letters", "drop", "return_to_queue", "extend"]


class Drawn(NamedTuple):
    """All that is random in an operation: a disk that is full has it done twice."""

    number: int
    records: list[Any]
    key: str | None

    @property
    def count(self) -> int:
        return len(self.records) or 1


@dataclass
class Work:
    """Does random operations, and remembers after how many calls of the disk each had returned, and what was there then."""

    disk: JournalDisk
    sync: str
    options: dict[str, Any]
    known: list[View] | None = None  # what the same work came to elsewhere; then nobody looks meanwhile
    serial: int = 0
    steps: list[tuple[int, View]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # the steps before which it was closed
    store: Any = None
    sessions: list[Any] = field(default_factory=list)

    name: ClassVar[str]  # of the file or directory
    operations: ClassVar[dict[str, int]]  # names of methods that are called in turn, and how often that is done, in percent
    length: ClassVar = 40  # operations
    most_sessions: ClassVar = 3
    most_records: ClassVar = 25  # of an operation
    empty: ClassVar[View]  # what is there at first
    stride: ClassVar[tuple[int, int]]  # of the stops of a quick run and of a full one
    chances: ClassVar = 3  # what is tried at each stop, of three
    conflicts: ClassVar[tuple[type[Exception], ...]] = ()  # with which a session may fail to commit

    @classmethod
    def options_of(cls, luck: random.Random) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def begun(cls, root: Path, sync: str, luck: random.Random) -> Self:
        root.mkdir()
        return cls(JournalDisk(str(root)), sync, cls.options_of(luck))

    @classmethod
    def done(cls, root: Path, sync: str, seed: int) -> Self:
        """The work of this seed, done on a disk of its own."""
        luck = random.Random(seed)
        work = cls.begun(root, sync, luck)
        work.script(luck)
        return work

    # Opening and closing

    def opened(self, folder: Path, files: Files) -> Any:
        """What is in this directory, with the settings of this work."""
        raise NotImplementedError

    def open(self) -> None:
        self.store = self.opened(Path(self.disk.root), self.disk)

    def close(self) -> None:
        self.sessions.clear()
        self.store.close()

    def settle(self, store: Any) -> None:
        """Have what others have left put right, as far as opening it has not done that."""

    def recover(self, folder: Path, disk: JournalDisk) -> None:
        with self.opened(folder, disk) as store:
            self.settle(store)

    def take_over(self) -> None:
        """Have what others have left put right, and be durable."""
        self.settle(self.store)

    @classmethod
    def small_limits(cls, patch: pytest.MonkeyPatch, inline: int) -> None:
        """So small that a short workload meets each of them; ``inline``: bytes of a commit that the log carries."""
        raise NotImplementedError

    # Working

    def script(self, luck: random.Random, length: int | None = None, *, goes_on: bool = False) -> None:
        """A random sequence of all operations. ``goes_on``: others were here before."""
        self.open()
        if goes_on:
            self.take_over()
        else:
            self.steps.append((0, self.empty))
        self.do(lambda: None)
        for _ in range(self.length if length is None else length):
            names, drawn = self.chosen(luck), self.drawn(luck)
            for name in names.split(", "):
                if name == "reopen":
                    self.close()
                    self.open()
                    self.closed.append(len(self.steps))
                self.do(partial(getattr(self, name), drawn))
        self.close()

    def chosen(self, luck: random.Random) -> str:
        return luck.choices([*self.operations], [*self.operations.values()])[0]

    def do(self, action: Action) -> None:
        action()
        self.note()

    def note(self) -> None:
        calls = len(self.disk.calls)  # looking makes more of them
        self.steps.append((calls, view(self.store) if self.known is None else self.known[len(self.steps)]))

    def allowed_at(self, calls: int) -> list[View]:
        """What may be there when the disk is stopped after so many calls."""
        done = max(number for number, (when, _) in enumerate(self.steps) if when <= calls)
        return [seen for _, seen in self.steps[done : done + 2]]

    def drawn(self, luck: random.Random) -> Drawn:
        records = [self.record(luck) for _ in range(luck.randrange(1, self.most_records))]
        return Drawn(luck.randrange(1 << 16), records, luck.choice([None, f"put{luck.randrange(20)}"]))

    def record(self, luck: random.Random) -> Any:
        self.serial += 1
        return b"%d:" % self.serial + b"x" * (self.serial * 7 % 9)

    def reopen(self, drawn: Drawn) -> None:
        """Nothing is to be seen of that."""

    # Sessions

    def session(self, number: int) -> Any:
        if len(self.sessions) < self.most_sessions:
            self.sessions.append(self.store.session())
        return self.sessions[number % len(self.sessions)]

    def session_get(self, drawn: Drawn) -> None:
        self.session(drawn.number).get_many(drawn.count)

    def session_put(self, drawn: Drawn) -> None:
        self.session(drawn.number).put_many(drawn.records)

    def session_commit(self, drawn: Drawn) -> None:
        session = self.session(drawn.number)
        try:
            session.commit(key=drawn.key)
        except self.conflicts:
            session.rollback()

    def session_rollback(self, drawn: Drawn) -> None:
        self.session(drawn.number).rollback()

    # Batches

    def leasing(self, number: int) -> Any:
        return self.store

    def lease(self, drawn: Drawn) -> None:
        limits = [{}, {"max_records": drawn.count}, {"max_bytes": 20 * drawn.count, "lease_timeout": 1e6}][drawn.number % 3]
        self.leasing(drawn.number // 8).lease(f"run{self.serial}", **limits)

    def end(self, drawn: Drawn) -> None:
        end, leasing = ENDS[drawn.number % 8], self.leasing(drawn.number // 8)
        dead = end in ("drop", "return_to_queue")
        wanted = "returned" if end == "retry" else "leased"
        candidates = leasing.dead() if dead else [batch for batch in leasing.batches() if batch.state == wanted]
        if candidates:
            try:
                getattr(candidates[drawn.number // 64 % len(candidates)], end)(*([500] if end == "extend" else []))
            except BatchConflict:  # its messages were removed from the topic: it cannot be put back
                assert (end, self.name) == ("put_back", "t")

    # What is checked of what is left

    def check(self, folder: Path, allowed: list[View], what: str) -> None:
        """It opens, is one of these or between them, nothing is wrong with it, and it goes on."""
        with self.opened(folder, NoSync()) as store:
            self.settle(store)
            seen = view(store)
            assert is_between(seen, allowed[0], allowed[-1]), f"{what}: {differences(seen, allowed)}"
            assert store.verify().problems == [], what
            expected = self.goes_on(store, seen, what)
        self.is_closed(folder, expected, what)
        with self.opened(folder, NoSync()) as store:
            again = view(store)
            assert again == expected, f"{what}: opened a second time: {differences(again, [expected])}"
            self.use_up(store)

    def goes_on(self, store: Any, seen: View, what: str) -> View:
        """Use it; returns what it is then."""
        raise NotImplementedError

    def is_closed(self, folder: Path, expected: View, what: str) -> None:
        """Check the files that nobody has open."""

    def use_up(self, store: Any) -> None:
        raise NotImplementedError


@dataclass
class QueueWork(Work):
    name = "q"
    operations: ClassVar = {
        **{"put": 15, "put_many": 10, "get": 10, "get_many": 5, "clear": 2, "lease": 12, "end": 13, "reopen": 5},
        **{"session_get": 8, "session_put": 6, "session_commit": 8, "session_rollback": 6},
    }
    stride = 24, 6
    empty = of_queue([], {}, {})
    log_bytes: ClassVar = 3000  # so few that a short workload has its log cut back

    @classmethod
    def options_of(cls, luck: random.Random) -> dict[str, Any]:
        return {"chunk_size": luck.choice([40, 64, 150, 400])}

    def opened(self, folder: Path, files: Files) -> Queue:
        return Queue(folder / "q", sync=self.sync, max_attempts=3, log_bytes=self.log_bytes, _files=files, **self.options)

    @classmethod
    def small_limits(cls, patch: pytest.MonkeyPatch, inline: int) -> None:
        patch.setattr(LIMITS, "log_bytes_at_close", 1500)
        patch.setattr(LIMITS, "pending_bytes", 60)
        patch.setattr(LIMITS, "spill_bytes", 100)
        patch.setattr(LIMITS, "piece_bytes", 40)
        patch.setattr(LIMITS, "inline_bytes", {"commit": inline, "never": inline})

    def put(self, drawn: Drawn) -> None:
        self.store.put(drawn.records[0])

    def put_many(self, drawn: Drawn) -> None:
        self.store.put_many(drawn.records, key=drawn.key)

    def get(self, drawn: Drawn) -> None:
        try:
            self.store.get()
        except Empty:
            assert len(self.store) == 0

    def get_many(self, drawn: Drawn) -> None:
        self.store.get_many(drawn.count)

    def clear(self, drawn: Drawn) -> None:
        self.store.clear()

    def goes_on(self, store: Queue, seen: View, what: str) -> View:
        assert store.verify().orphans == [], what
        store.put(b"after")
        return of_queue([*seen.records, b"after"], seen.keys, seen.readers[""].batches)

    def is_closed(self, folder: Path, expected: View, what: str) -> None:
        assert plain(folder / "q") == expected.records, f"{what}: as the original reads it"
        assert not {"q.spill", "q.wal.tmp"} & {file.name for file in folder.iterdir()}, what

    def use_up(self, store: Queue) -> None:
        store.get_many(10_000)
        with pytest.raises(Empty):
            store.get()


@dataclass
class HandedOverWork(QueueWork):
    """Whenever it is closed, somebody waits for the queue: it is handed over, and the files follow the log without fsyncs.

    What they say is lost with the page cache, in the same run of the machine too.
    """

    operations: ClassVar = QueueWork.operations | {"put": 20, "put_many": 15, "clear": 0, "lease": 6, "end": 6, "reopen": 30}

    def close(self) -> None:
        with patch.object(lock, "is_awaited", lambda fd: True):
            super().close()


@dataclass
class SessionWork(QueueWork):
    """Three sessions, whose commits cross each other. The queue is asked nothing meanwhile: what only the log has stays there."""

    operations: ClassVar = {
        **{"put_many": 15, "get_many": 5},
        **{"session_get": 20, ", ".join(["session_put_one"] * 3): 30, "session_commit": 20, "session_rollback": 10},
    }
    length = 120
    most_records = 6
    stride = 32, 8
    chances = 2
    log_bytes = 400

    @classmethod
    def options_of(cls, luck: random.Random) -> dict[str, Any]:
        return {"chunk_size": luck.choice([40, 64, 400])}

    @classmethod
    def done(cls, root: Path, sync: str, seed: int) -> Self:
        looking = super().done(root.with_name("looking"), sync, seed)
        shutil.rmtree(root.with_name("looking"))  # a soak runs many seeds in one place
        luck = random.Random(seed)
        work = cls.begun(root, sync, luck)
        work.known = [seen for _, seen in looking.steps]
        work.script(luck)
        return work

    @classmethod
    def small_limits(cls, patch: pytest.MonkeyPatch, inline: int) -> None:
        super().small_limits(patch, inline)
        patch.setattr(LIMITS, "log_bytes_at_close", 300)
        patch.setattr(LIMITS, "spill_bytes", 60)

    def session_put_one(self, drawn: Drawn) -> None:
        if drawn.records:
            self.session(drawn.number).put(drawn.records[0])
            del drawn.records[0]


@dataclass
class TopicWork(Work):
    """Up to three readers, whose names may be open more than once, and two sessions."""

    readers: list[Reader] = field(default_factory=list)
    found: tuple[Reader, list[Message]] | None = None

    name = "t"
    operations: ClassVar = {
        **{"put": 8, "put_many": 10, "open_reader": 8, "read": 7, "read, commit_some": 5, "commit": 3, "nack": 3, "seek": 4},
        **{"session_get": 10, "session_put": 4, "session_commit": 9, "session_rollback": 1, "lease": 5, "end": 8},
        **{"set_filter": 3, "trim": 2, "set_creator": 1, "copy_reader": 1, "delete_reader": 1, "close_reader": 2, "reopen": 5},
    }
    most_sessions = 2
    most_records = 8
    stride = 10, 5
    chances = 1
    empty = EMPTY
    conflicts = CommitConflict, Full, Closed

    @classmethod
    def options_of(cls, luck: random.Random) -> dict[str, Any]:
        options: dict[str, Any] = {"block_size": luck.choice([250, 700, 1500, 4000])}
        return options | luck.choice(
            [
                {},
                {"max_bytes": 6000},
                {"max_bytes": 3000, "slow_readers": "move"},
                {"delete_committed": True},
                {"max_records": 20},
            ]
        )

    def opened(self, folder: Path, files: Files) -> Topic:
        options = self.options if files is self.disk else {"block_size": 700}
        return Topic(folder / "t", sync=self.sync, max_attempts=3, log_bytes=LOG_BYTES, _files=files, **options)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for reader in self.readers:
            reader.close()
        self.readers.clear()
        super().close()

    def settle(self, store: Topic) -> None:
        """What a kill has left of batches and sessions is put right by the next reader."""
        for name in store.readers():
            store.reader(name).close()

    def take_over(self) -> None:
        super().take_over()
        self.store.set_creator("after")

    @classmethod
    def small_limits(cls, patch: pytest.MonkeyPatch, inline: int) -> None:
        set_small_limits(patch, inline)

    def script(self, luck: random.Random, length: int | None = None, *, goes_on: bool = False) -> None:
        super().script(luck, length, goes_on=goes_on)
        self.note()

    def chosen(self, luck: random.Random) -> str:
        name = super().chosen(luck)
        return name if self.readers or name in ("put", "put_many", "reopen") else "open_reader"

    def reader(self, number: int) -> Reader:
        return self.readers[number % len(self.readers)]

    leasing = reader

    def record(self, luck: random.Random) -> Message:
        self.serial += 1
        body = b"%d:" % self.serial + b"x" * (self.serial * 7 % luck.choice([3, 40, 120]))
        return Message(body, luck.choice([None, "a", "a.b", "c"]), timestamp=luck.choice([None, self.serial]))

    def put(self, drawn: Drawn) -> None:
        record = drawn.records[0]
        with contextlib.suppress(Full):  # the ring has few places here, and slow readers hold blocks
            self.store.append(record.body, tag=record.tag, timestamp=record.timestamp)

    def put_many(self, drawn: Drawn) -> None:
        with contextlib.suppress(Full):
            self.store.append_many(drawn.records, key=drawn.key)

    def session_get(self, drawn: Drawn) -> None:
        readers = [reader for reader in self.readers if reader._engine.closed_reason is None]
        if readers:
            self.session(drawn.number).read_many(readers[drawn.number // 8 % len(readers)], drawn.count)

    def session_put(self, drawn: Drawn) -> None:
        self.session(drawn.number).append_many(drawn.records)

    def open_reader(self, drawn: Drawn) -> None:
        name, start = NAMES[drawn.number % 3], ["oldest", "latest"][drawn.number // 8 % 2]
        self.readers.append(self.store.reader(name, start=start))

    def close_reader(self, drawn: Drawn) -> None:
        self.readers.pop(drawn.number % len(self.readers)).close()

    def read(self, drawn: Drawn) -> None:
        reader = self.reader(drawn.number)
        self.found = reader, reader.read_many(drawn.count)

    def commit_some(self, drawn: Drawn) -> None:
        """Of what was read last, out of order."""
        assert self.found is not None
        reader, messages = self.found
        if messages:
            reader.commit(*messages[drawn.number // 8 % len(messages) :])

    def commit(self, drawn: Drawn) -> None:
        self.reader(drawn.number).commit()

    def nack(self, drawn: Drawn) -> None:
        self.reader(drawn.number).nack()

    def seek(self, drawn: Drawn) -> None:
        stats = self.store.stats()
        self.reader(drawn.number).seek(number=stats.first + drawn.number // 8 % (stats.messages + 1))

    def set_filter(self, drawn: Drawn) -> None:
        self.reader(drawn.number).set_filter([None, "a.#", "c;a", "zz"][drawn.number // 8 % 4])

    def trim(self, drawn: Drawn) -> None:
        self.store.trim()

    def set_creator(self, drawn: Drawn) -> None:
        self.store.set_creator(f"creator {drawn.number}")

    def copy_reader(self, drawn: Drawn) -> None:
        if names := self.store.readers():
            self.store.copy_reader(names[drawn.number % len(names)], NAMES[drawn.number // 8 % 3])

    def delete_reader(self, drawn: Drawn) -> None:
        names = self.store.readers()
        if len(names) > 1:
            name = names[drawn.number % len(names)]
            for session in self.sessions:
                session.rollback()
            for reader in [reader for reader in self.readers if reader.name == name]:
                reader.close()
                self.readers.remove(reader)
            self.store.delete_reader(name)

    def goes_on(self, store: Topic, seen: View, what: str) -> View:
        """Read everything: each message comes to each reader once."""
        folder = Path(store.path)
        for name in seen.readers:
            assert not any(flight.session for flight in look(Files(), store.path, name).in_flight.values()), (
                f"{what}: a session is undecided"
            )
        report = store.verify()
        assert (report.unchecked, report.records) == (0, len(seen.messages)), what
        files_of_blocks = {int(file.name.partition(".")[0]) for file in (folder / "data").iterdir()}
        assert files_of_blocks == bases(store), f"{what}: blocks are there that the index does not know, or the other way round"
        store.append(b"after")
        readers = {}
        for name, known in seen.readers.items():
            with store.reader(name) as reader:
                reader.set_filter(known.filter)
                found = [message.number for message in reader]
                expected = known.pending | ({seen.next} if not known.filter else set())
                assert sorted(found) == sorted(expected), f"{what}: reader {name} delivered {found}, not {sorted(expected)}"
                readers[name] = known._replace(pending=frozenset(found))
        return seen._replace(next=seen.next + 1, messages={**seen.messages, seen.next: (b"after", None)}, readers=readers)

    def use_up(self, store: Topic) -> None:
        for name in store.readers():
            with store.reader(name) as reader:
                reader.commit(*reader.read_many(10_000))
                with pytest.raises(Empty):
                    reader.read()


@dataclass
class TopicSessionWork(TopicWork):
    """Two sessions, which read by several readers and append."""

    operations: ClassVar = {
        **{"put_many": 15, "open_reader": 10, "read": 5, "reopen": 3},
        **{"session_get": 30, "session_put": 12, "session_commit": 20, "session_rollback": 5},
    }


# What works, and how many bytes of a commit the log carries
KINDS: dict[str, tuple[type[Work], int]] = {
    "queue, log carries": (QueueWork, 10_000),
    "queue, chunks carry": (QueueWork, 30),
    "queue, handed over": (HandedOverWork, 10_000),
    "sessions": (SessionWork, 70),
    "sessions of a topic": (TopicSessionWork, 300),
    "topic, log carries": (TopicWork, 100_000),
    "topic, blocks carry": (TopicWork, 300),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Work]:
    """Each of them, with small limits."""
    found, inline = KINDS[request.param]
    found.small_limits(monkeypatch, inline)
    return found
