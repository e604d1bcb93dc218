"""Stopped after any call of the file system, a topic opens again with exactly what was committed.

As for queues (test_crash.py): a workload runs once on a disk that writes down its calls. Then, for each number of calls, the
disk is built as a kill or a power cut leaves it, and opened. Every operation that had returned has happened, the one in flight
has happened or not; a session's appends and reads together. Readers in the image find the locks of those before them gone.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disk import JournalDisk, NoSync, image

import qewqew_core.appending
import qewqew_core.block_segments
import qewqew_core.block_sums
import qewqew_core.journal
import qewqew_core.outgoing
import qewqew_core.reader
import qewqew_core.state
import qewqew_core.topic_log
import qewqew_core.topic_session
import qewqew_core.view
import qewqew_core.zbus
from qewqew_core import CorruptQueue, Empty, Message, QueueFull, Topic, manifest, topic_log
from qewqew_core import batch as batches
from qewqew_core.files import Files
from qewqew_core.reader import Reader
from qewqew_core.reader_inspection import look
from qewqew_core.tags import Filter
from qewqew_core.topic_session import TopicSession
from qewqew_core.view import Found
from qewqew_core.view import View as TopicView


class ReaderView(NamedTuple):
    """What a reader has still to deliver or to see committed, by number, and its batches."""

    filter: str | None
    pending: frozenset[int]
    batches: dict[str, tuple[str, int, str, tuple[bytes, ...]]]


class View(NamedTuple):
    """Everything that a user can see of a topic."""

    next: int
    first: int
    messages: dict[int, tuple[bytes, str | None]]
    keys: dict[bytes, int]
    creator: str
    readers: dict[str, ReaderView]


def view(topic: Topic) -> View:
    """As the files say it, without a lock and without a change."""
    files, look_at = Files(), TopicView(Files(), topic.path, topic.dialect)
    try:
        oldest, latest = look_at.oldest(), look_at.latest()
        found = [one.message for one in look_at.messages(oldest) if isinstance(one, Found)]
        assert [one.number for one in found] == list(range(oldest.number, latest.number))
        messages = {one.number: (one.body, one.tag) for one in found}
        readers = {}
        path = f"{topic.path}/{topic.name}.log"
        log = topic_log.replay(Path(path).read_bytes(), path).state
        committed = log.sessions.keys()  # their readers may not have been able to note it
        for name in sorted(path.stem for path in Path(topic.path, "reader").glob("*.rdx")):
            state = look(files, topic.path, name)
            assert state is not None
            flight = [one for one in state.flight.values() if one.session not in committed]
            pending = {one.at.number for one in flight if one.at >= oldest}
            for start, stop in state.todo:
                for one in look_at.messages(max(start, oldest), stop, Filter(state.filter) if state.filter else None):
                    if isinstance(one, Found):
                        assert one.message.number not in pending, "a message is to be delivered twice"
                        pending.add(one.message.number)
            stem = f"{topic.path}/state/{name}"
            kept = {}
            for one in state.batches.values():
                directory = batches.directory_of(stem, one)
                body = manifest.load(directory)
                records = [part for segment in body.segments for part in manifest.read_records(directory, body, segment)]
                bodies = tuple(message.body for part in records for message in part)
                kept[one.id] = (one.state, one.attempt, one.keys[-1], bodies)
            readers[name] = ReaderView(state.filter, frozenset(pending), kept)
        counts = {key: count for key, (_, count) in log.put_keys.items()}
        return View(latest.number, oldest.number, messages, counts, look_at.common().creator, readers)
    finally:
        look_at.close()


def bases(topic: Topic) -> set[int]:
    """The base offsets of the blocks that the index knows, by which files are called."""
    look_at = TopicView(Files(), topic.path, topic.dialect)
    try:
        return {entry.base for entry in look_at.entries(look_at.index())}
    finally:
        look_at.close()


def is_between(seen: View, before: View, after: View) -> bool:
    """Whether the operation has happened, or not; old blocks, which are removed behind it, may still be there."""
    if before.creator != after.creator:  # it has no checksum; that a disk writes it whole is what a zbus server relies on too
        before, seen = before._replace(creator=after.creator), seen._replace(creator=after.creator)
    if seen in (before, after):
        return True
    if not before.first <= seen.first <= after.first or seen._replace(first=0, messages={}, readers={}) != after._replace(
        first=0, messages={}, readers={}
    ):
        return False
    newer = {number: one for number, one in seen.messages.items() if number >= after.first}
    if newer != after.messages or not (seen.messages.keys() - newer.keys()) <= before.messages.keys():
        return False
    if seen.readers.keys() != after.readers.keys():
        return False
    return all(
        one._replace(pending=frozenset(number for number in one.pending if number >= after.first)) == after.readers[name]
        and {number for number in one.pending if number < after.first} <= before.readers[name].pending
        for name, one in seen.readers.items()
    )


def differences(seen: View, allowed: list[View]) -> str:
    """What is not as it should be, for the message of a failed test."""
    lines = []
    for number, right in enumerate(allowed):
        for name in View._fields:
            found, wanted = getattr(seen, name), getattr(right, name)
            if isinstance(wanted, dict):
                for key in sorted({*found, *wanted}, key=str):
                    if found.get(key) != wanted.get(key):
                        lines.append(f"step {number}: {name}[{key}] is {found.get(key)}, not {wanted.get(key)}")
            elif found != wanted:
                lines.append(f"step {number}: {name} is {found}, not {wanted}")
    return "; ".join(lines)


@dataclass
class Workload:
    """Runs operations, and remembers after how many calls each had returned, and what the topic was then."""

    disk: JournalDisk
    path: str
    sync: str
    options: dict[str, Any]
    steps: list[tuple[int, View]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # the steps before which the topic was closed
    serial: int = 0
    topic: Topic | None = None
    readers: list[Reader] = field(default_factory=list)
    sessions: list[TopicSession] = field(default_factory=list)
    found: tuple[Reader, list[Message]] | None = None

    def open(self) -> None:
        self.topic = Topic(self.path, sync=self.sync, max_attempts=3, **self.options, _files=self.disk)  # type: ignore[arg-type]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        for reader in self.readers:
            reader.close()
        self.readers.clear()
        self.topic.close()

    def session(self, number: int) -> TopicSession:
        if len(self.sessions) < 2:
            self.sessions.append(self.topic.session())
        return self.sessions[number % len(self.sessions)]

    def reader(self, number: int) -> Reader | None:
        """One of those that are open: a name may be open more than once."""
        return self.readers[number % len(self.readers)] if self.readers else None

    def read(self, number: int, count: int) -> None:
        self.found = self.reader(number), self.reader(number).read_many(count)

    def commit(self, number: int) -> None:
        """Some of what was read last, out of order."""
        reader, messages = self.found
        if messages:
            reader.commit(*messages[number % len(messages) :])

    def do(self, operation: Callable[[Workload], object]) -> None:
        operation(self)
        self.steps.append((len(self.disk.calls), view(self.topic)))

    def messages(self, count: int, luck: random.Random) -> list[Message]:
        result = []
        for _ in range(count):
            self.serial += 1
            body = b"%d:" % self.serial + b"x" * (self.serial * 7 % luck.choice([3, 40, 120]))
            result.append(Message(body, luck.choice([None, "a", "a.b", "c"]), timestamp=luck.choice([None, self.serial])))
        return result


NAMES = ["r1", "r2", "r3"]


def script(work: Workload, luck: random.Random, length: int, first: View | None = None) -> None:
    """A random sequence of all operations, with reopenings. ``first``: what is there before it, if anything."""
    work.open()
    if first is not None:
        work.steps.append((0, first))
    else:  # what those before have left is put right, and durable
        for name in work.topic.readers():
            work.topic.reader(name).close()
        work.topic.set_creator("after")
    work.do(lambda w: None)
    keys = work.serial
    for _ in range(length):
        # All that is random is drawn here, not in the operation: a test may repeat it.
        pick, number, count = luck.random(), luck.randrange(1 << 16), luck.randrange(1, 8)
        messages = work.messages(count, luck)
        if pick < 0.12:
            work.do(lambda w, one=messages[0]: _append(w, [one], None))
        elif pick < 0.25:
            key = luck.choice([None, f"put{number % 9}"])
            work.do(lambda w, messages=messages, key=key: _append(w, messages, key))
        elif pick < 0.35 or not work.readers:
            start = luck.choice(["oldest", "latest"])
            work.do(lambda w, name=NAMES[number % 3], start=start: w.readers.append(w.topic.reader(name, start=start)))
        elif pick < 0.42:
            work.do(lambda w, number=number, count=count: w.read(number, count))
        elif pick < 0.5:
            if number % 3:
                work.do(lambda w, number=number, count=count: w.read(number, count))
                work.do(lambda w, number=number: w.commit(number // 3))
            else:
                work.do(lambda w, number=number: w.reader(number).commit())
        elif pick < 0.53:
            work.do(lambda w, number=number: w.reader(number).nack())
        elif pick < 0.57:
            work.do(lambda w, number=number: _seek(w, number))
        elif pick < 0.6:
            text = luck.choice([None, "a.#", "c;a", "zz"])
            work.do(lambda w, number=number, text=text: w.reader(number).set_filter(text))
        elif pick < 0.75:
            session = work.session(number)
            work.do(lambda w, session=session, number=number, messages=messages: _in_session(w, session, number, messages))
        elif pick < 0.8:
            keys += 1
            limits = [{}, {"max_records": count}, {"max_bytes": 30 * count, "lease_timeout": 1000}][number % 3]
            work.do(lambda w, key=f"run{keys}", number=number, limits=limits: w.reader(number).lease(key, **limits))
        elif pick < 0.88:
            end = ["ack", "ack", "nack", "nack", "put_back", "to_dead_letters", "drop", "return_to_queue", "extend"][number % 9]
            work.do(lambda w, end=end, number=number: _end(w.reader(number), end, number // 9))
        elif pick < 0.9:
            work.do(lambda w: w.topic.trim())
        elif pick < 0.91:
            work.do(lambda w, number=number: w.topic.set_creator(f"creator {number}"))
        elif pick < 0.92:
            work.do(lambda w, number=number: _copy(w, number))
        elif pick < 0.93:
            work.do(lambda w, number=number: _delete(w, number))
        elif pick < 0.95:
            work.do(lambda w, number=number: w.readers.pop(number % len(w.readers)).close())
        else:
            work.close()
            work.open()
            work.do(lambda w: None)
            work.closed.append(len(work.steps) - 1)
    work.close()
    work.steps.append((len(work.disk.calls), view(work.topic)))


def _append(work: Workload, messages: list[Message], key: str | None) -> None:
    try:
        if key is None and len(messages) == 1:
            work.topic.append(messages[0].body, tag=messages[0].tag, timestamp=messages[0].timestamp)
        else:
            work.topic.append_many(messages, key=key)
    except QueueFull:  # the ring has few places here, and slow readers hold blocks
        pass


def _seek(work: Workload, number: int) -> None:
    stats = work.topic.stats()
    work.reader(number).seek(number=stats.first + number % (stats.messages + 1))


def _in_session(work: Workload, session: TopicSession, number: int, messages: list[Message]) -> None:
    pick, number = number % 10, number // 10
    readers = [one for one in work.readers if one._refusal is None]
    if pick < 4:
        if readers:
            session.read_many(readers[number % len(readers)], len(messages))
    elif pick < 6:
        session.append_many(messages)
    elif pick < 9:
        try:
            session.commit(key=f"put{number % 9}" if pick == 8 else None)
        except (qewqew_core.CommitConflict, QueueFull, qewqew_core.QueueClosed):
            session.rollback()
    else:
        session.rollback()


def _end(reader: Reader, end: str, number: int) -> None:
    dead = end in ("drop", "return_to_queue")
    candidates = reader.dead() if dead else [one for one in reader.batches() if one.state == "leased"]
    if candidates:
        try:
            getattr(candidates[number % len(candidates)], end)(*([500] if end == "extend" else []))
        except qewqew_core.BatchConflict:  # its messages were removed from the topic: it cannot be put back
            assert end == "put_back"


def _copy(work: Workload, number: int) -> None:
    names = work.topic.readers()
    if names:
        work.topic.copy_reader(names[number % len(names)], NAMES[number // 3 % 3])


def _delete(work: Workload, number: int) -> None:
    names = work.topic.readers()
    if len(names) > 1:
        name = names[number % len(names)]
        for session in work.sessions:
            session.rollback()
        for reader in [one for one in work.readers if one.name == name]:
            reader.close()
            work.readers.remove(reader)
        work.topic.delete_reader(name)


def set_small_limits(patch: pytest.MonkeyPatch, inline: int) -> None:
    """Limits so small that a short workload meets each of them; and a small ring, so that it goes round."""
    for module, name, value in (
        (qewqew_core.appending, "LOG_BYTES", 5000),
        (qewqew_core.journal, "BYTES_AT_CLOSE", 2500),
        (qewqew_core.journal, "FRAMES_AT_CLOSE", 12),
        (qewqew_core.appending, "WRITE_BYTES", 100),
        (qewqew_core.appending, "INLINE_BYTES", {"commit": inline, "never": inline}),
        (qewqew_core.topic_log, "PIECE_BYTES", 500),
        (qewqew_core.block_segments, "PIECE_BYTES", 500),
        (qewqew_core.reader, "LOG_BYTES", 2500),
        (qewqew_core.reader, "LOOK_AT_OWNERS", 0),
        (qewqew_core.block_sums, "SCAN", 600),
        (qewqew_core.reader, "SCAN", 600),
        (qewqew_core.view, "SCAN", 600),
        (qewqew_core.view, "WINDOW", 300),
        (qewqew_core.outgoing, "SPILL_BYTES", 600),
        (qewqew_core.outgoing, "READ_BYTES", 200),
        (qewqew_core.outgoing, "WRITE_BYTES", 100),
        (qewqew_core.outgoing, "PIECE_BYTES", 500),
        (qewqew_core.journal, "RESERVE", 2000),
        (qewqew_core.zbus, "RING", 24),
        (qewqew_core.zbus, "INDEX_SIZE", qewqew_core.zbus.HEADER + 24 * qewqew_core.zbus.ENTRY),
    ):
        patch.setattr(module, name, value)


@pytest.fixture(params=["log carries", "blocks carry"])
def small_limits(request, monkeypatch):
    set_small_limits(monkeypatch, 100_000 if request.param == "log carries" else 300)


def options_of(luck: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"block_size": luck.choice([250, 700, 1500, 4000])}
    return options | luck.choice(
        [{}, {"max_bytes": 6000}, {"max_bytes": 3000, "slow_readers": "move"}, {"delete_committed": True}, {"max_records": 20}]
    )


# What is checked of an image


def check(folder: Path, allowed: list[View], work: Workload, what: str) -> View:
    """Open it, compare, and read everything: each message comes to each reader once."""
    path, files = str(folder / "t"), NoSync()
    with Topic(path, sync=work.sync, max_attempts=3, block_size=700, _files=files) as topic:  # type: ignore[arg-type]
        for name in topic.readers():  # what a kill has left of batches is put right by the next reader
            topic.reader(name).close()
            assert not any(one.session for one in look(files, path, name).flight.values()), f"{what}: a session is undecided"
        seen = view(topic)
        if len(allowed) < 3:
            assert is_between(seen, allowed[0], allowed[-1]), f"{what}: {differences(seen, allowed)}"
        report = topic.verify()
        assert report.problems == [], what
        assert report.messages == len(seen.messages), what
        blocks = bases(topic)
        files_of_blocks = {int(one.name.partition(".")[0]) for one in (folder / "t" / "data").iterdir()}
        assert files_of_blocks == blocks, f"{what}: blocks are there that the index does not know, or the other way round"
        topic.append(b"after")
        delivered = {}
        for name, one in seen.readers.items():
            with topic.reader(name) as reader:
                reader.set_filter(one.filter)
                found = [message.number for message in reader]
                delivered[name] = {*found}
                expected = one.pending | ({seen.next} if not one.filter else set())
                assert sorted(found) == sorted(expected), f"{what}: reader {name} delivered {found}, not {sorted(expected)}"
    with Topic(path, sync=work.sync, max_attempts=3, _files=files) as topic:  # type: ignore[arg-type]
        again = view(topic)
        assert again.messages == {**seen.messages, seen.next: (b"after", None)}, f"{what}: opened a second time"
        assert {name: one.pending for name, one in again.readers.items()} == delivered, what
        for name in again.readers:
            with topic.reader(name) as reader:
                reader.commit(*reader.read_many(10_000))
                with pytest.raises(Empty):
                    reader.read()
    return seen


EMPTY = View(0, 0, {}, {}, "", {})


def allowed_at(work: Workload, calls: int) -> list[View]:
    done = max(number for number, (when, _) in enumerate(work.steps) if when <= calls)
    return [seen for _, seen in work.steps[done : done + 2]]


def begun(root: Path, sync: str, luck: random.Random) -> Workload:
    root.mkdir()
    return Workload(JournalDisk(str(root)), str(root / "t"), sync, options_of(luck))


def crash_everywhere(tmp_path: Path, seed: int, sync: str, power: bool, length: int, every: int = 1) -> int:
    luck = random.Random(seed)
    root = tmp_path / "work"
    work = begun(root, sync, luck)
    script(work, luck, length, EMPTY)
    calls, crashes = work.disk.calls, 0
    for stop in range(luck.randrange(every), len(calls) + 1, every):
        chance = random.Random(f"{seed}.{stop}").randrange(3)
        what = f"seed {seed}, sync {sync}, {work.options}, stopped after call {stop} of {len(calls)}, power {power}"
        fate = random.Random(f"{seed}.{stop}.{chance}") if power else None
        folder = tmp_path / "image"
        image(calls[:stop], str(root), folder, fate)
        if chance == 2:
            stop_recovery_too(folder, work, random.Random(f"{seed}.{stop}"), power)
        check(folder, allowed_at(work, stop), work, what)
        crashes += 1
        shutil.rmtree(folder)
    shutil.rmtree(root)
    return crashes


def stop_recovery_too(folder: Path, work: Workload, luck: random.Random, power: bool) -> None:
    """Open the topic and its readers, and stop that after some call: recovery begins again from what that left."""
    disk = JournalDisk(str(folder))
    recover(folder / "t", work, disk)
    stop = luck.randrange(disk.begin, len(disk.calls) + 1)
    again = folder.with_name("again")
    image(disk.calls[:stop], str(folder), again, luck if power else None)
    shutil.rmtree(folder)
    again.rename(folder)


def recover(path: Path, work: Workload, disk: JournalDisk) -> None:
    with Topic(path, sync=work.sync, max_attempts=3, _files=disk) as topic:  # type: ignore[arg-type]
        for name in topic.readers():
            topic.reader(name).close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sync", ["commit", "never"])
def test_a_killed_process_loses_and_repeats_nothing(tmp_path, small_limits, sync, seed):
    assert crash_everywhere(tmp_path, seed, sync, power=False, length=40, every=3) > 50


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_loses_and_repeats_nothing(tmp_path, small_limits, seed):
    assert crash_everywhere(tmp_path, 100 + seed, "commit", power=True, length=40, every=3) > 50


def test_a_power_cut_while_a_killed_topic_recovers_loses_nothing(tmp_path, small_limits):
    """After a kill the newest commits may be in the page cache only; blocks and index must not run ahead of the log."""
    work = begun(tmp_path / "work", "commit", random.Random(21))
    script(work, random.Random(21), 40, EMPTY)
    calls, root, checked = work.disk.calls, work.disk.root, 0
    for stop in range(3, len(calls), 7):
        folder = tmp_path / "image"
        image(calls[:stop], root, folder, None)
        disk = JournalDisk(str(folder), follows=(calls[:stop], root))
        recover(folder / "t", work, disk)
        for chance in range(3):
            luck = random.Random(f"{stop}.{chance}")
            cut = tmp_path / "cut"
            image(disk.calls[: luck.randrange(stop, len(disk.calls) + 1)], str(folder), cut, luck)
            check(cut, allowed_at(work, stop), work, f"killed after call {stop}, recovery cut off, chance {chance}")
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    assert checked > 50


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_after_a_killed_topic_went_on_loses_nothing(tmp_path, small_limits, seed):
    """What the killed process had not synced, the next one must not take for durable."""
    assert go_on_and_cut(tmp_path, 60 + seed, every=11) > 50


def go_on_and_cut(tmp_path: Path, seed: int, every: int) -> int:
    luck = random.Random(seed)
    work = begun(tmp_path / "work", luck.choice(["commit", "never"]), luck)
    script(work, luck, 40, EMPTY)
    calls, root, checked = work.disk.calls, work.disk.root, 0
    for stop in range(3 + luck.randrange(every), len(calls), every):
        folder = tmp_path / "image"
        image(calls[:stop], root, folder, None)
        disk = JournalDisk(str(folder), follows=(calls[:stop], root))
        after = Workload(disk, str(folder / "t"), "commit", work.options, serial=10_000)
        script(after, random.Random(stop), 6)
        for chance in range(3):
            fate = random.Random(f"{seed}.{stop}.{chance}")
            cut, end = tmp_path / "cut", fate.randrange(after.steps[0][0], len(disk.calls) + 1)
            image(disk.calls[:end], str(folder), cut, fate)
            what = f"seed {seed}, killed after call {stop}, cut after call {end}, chance {chance}"
            check(cut, allowed_at(after, end), after, what)
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    shutil.rmtree(root)
    return checked


# Without fsyncs


def check_prefix(folder: Path, work: Workload, stop: int, what: str) -> None:
    """After a power cut: what is there was stored so, up to the end of some commit; nothing that was not committed is skipped."""
    done = max(number for number, (when, _) in enumerate(work.steps) if when <= stop)
    durable = max((number for number in work.closed if number <= done), default=0)
    past, files = [seen for _, seen in work.steps[: done + 2]], NoSync()
    stored = {number: one for seen in past for number, one in seen.messages.items()}
    with Topic(folder / "t", sync="never", max_attempts=3, block_size=700, _files=files) as topic:
        for name in topic.readers():
            topic.reader(name).close()
        seen = view(topic)
        assert seen.next in {one.next for one in past}, what
        assert seen.next >= past[durable].next, f"{what}: what was there when the topic was closed is gone"
        assert seen.messages == {number: stored[number] for number in range(seen.first, seen.next)}, what
        assert topic.verify().problems == [], f"{what}: {topic.verify().problems}"
        for name, one in seen.readers.items():
            always = {
                number
                for number in seen.messages
                if all(number in then.readers[name].pending for then in past if name in then.readers and number < then.next)
            }
            if any(name not in then.readers for then in past):
                always = set()  # it may have been made at the end of the topic
            assert one.pending >= always, f"{what}: reader {name} passes over {always - one.pending}"
            assert one.pending <= seen.messages.keys()
        assert topic.append(b"new") == seen.next
        for name, one in seen.readers.items():
            with topic.reader(name) as reader:
                reader.set_filter(None)
                found = [message.number for message in reader]
                assert sorted(found) == sorted({*one.pending, seen.next} | ({*found} if one.filter else set())), what


@pytest.mark.parametrize("seed", range(2))
def test_without_fsyncs_a_power_cut_leaves_a_prefix(tmp_path, small_limits, seed):
    assert cut_without_fsyncs(tmp_path, 200 + seed, every=3) > 20


def cut_without_fsyncs(tmp_path: Path, seed: int, every: int) -> int:
    luck = random.Random(seed)
    work = begun(tmp_path / "work", "never", luck)
    script(work, luck, 40, EMPTY)
    calls, root, checked = work.disk.calls, work.disk.root, 0
    for stop in range(luck.randrange(every), len(calls) + 1, every):
        fate, folder = random.Random(f"{seed}.{stop}"), tmp_path / "image"
        image(calls[:stop], root, folder, fate)
        what = f"seed {seed}, {work.options}, cut after call {stop} of {len(calls)}"
        try:
            check_prefix(folder, work, stop, what)
        except CorruptQueue as error:
            raise AssertionError(what) from error
        shutil.rmtree(folder)
        checked += 1
    shutil.rmtree(root)
    return checked


@pytest.mark.soak
def test_a_hundred_thousand_crashes_lose_and_repeat_nothing(tmp_path, small_limits):
    crashes, seed = 0, 1000
    while crashes < 50_000:  # and as many with the other limits
        kind = seed % 6
        if kind < 4:
            sync = "never" if kind == 0 else "commit"
            crashes += crash_everywhere(tmp_path, seed, sync, power=kind > 1, length=50, every=2)
        else:
            crashes += (go_on_and_cut if kind == 4 else cut_without_fsyncs)(tmp_path, seed, every=3)
        seed += 1


# Several processes: here they are several objects, which share no memory but by the files


def test_half_a_frame_of_a_killed_process_is_cut_off_by_one_that_has_the_reader_open(tmp_path):
    """It must not stay between the frames: whoever opens the reader next would end there, and forget what came behind it."""
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        topic.append_many([b"%d" % number for number in range(6)])
        with topic.reader("r") as one, topic.reader("r") as other:
            taken = one.read_many(2)
            log = tmp_path / "t" / "state" / "r.log"
            frame = log.read_bytes()[-60:]
            with log.open("ab") as file:
                file.write(frame[:40])
            assert other.read().body == b"2"
            one.commit(*taken)
            assert [message.body for message in other.read_many(10)] == [b"3", b"4", b"5"]
            other.commit()
        with topic.reader("r") as again, pytest.raises(Empty):
            again.read()


def test_processes_that_cut_the_log_of_their_reader_back_in_turn_give_each_message_once(tmp_path, small_limits):
    topics = [Topic(tmp_path / "t", _files=NoSync()) for _ in range(3)]
    topics[0].append_many([b"%d" % number for number in range(300)])
    readers = [topic.reader("r") for topic in topics]
    inodes, found = set(), []
    while len(found) < 300:
        reader = readers[len(found) % 3]
        messages = reader.read_many(2)
        found += [message.number for message in messages]
        reader.commit(*messages)
        inodes.add((tmp_path / "t" / "state" / "r.log").stat().st_ino)
    assert found == list(range(300))
    assert len(inodes) > 1
    for reader in readers:
        with pytest.raises(Empty):
            reader.read()
        reader.close()
    for topic in topics:
        topic.close()


@pytest.mark.parametrize("committed", [True, False])
def test_a_session_of_a_killed_process_is_decided_by_the_next_writer_though_the_log_is_clean(tmp_path, committed):
    """Before, only a log that said that it had crashed was asked: what the session had read came never again, or twice."""
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        topic.append_many([b"read", b"left"])
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        reader = topic.reader("r")
        message = reader.read()
        writer = topic._write()
        reader._prepare("0" * 32, [message])
        if committed:
            writer._rotate_at = 0  # a new log is begun by this very commit
            with writer._exclusive():
                position = writer._append([], 0, topic_log.session({"id": "0" * 32, "readers": ["r"]}))
            writer.durable(position)
        shutil.copytree(tmp_path / "t", tmp_path / "killed" / "t")
        reader._leave_open("0" * 32)
        reader.close()
    with Topic(tmp_path / "killed" / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        assert [one.body for one in reader.read_many(5)] == ([] if committed else [b"read"]) + [b"left"]


def test_what_a_session_read_comes_again_if_a_power_cut_took_what_it_appended(tmp_path, monkeypatch):
    """With "never" the commit may be on disk and its messages not: then it has not happened, for its readers neither."""
    options: dict[str, Any] = {"sync": "never", "_files": NoSync()}
    with Topic(tmp_path / "t", **options) as topic:
        topic.append(b"read")
    note = qewqew_core.topic_session._note

    def note_later(reader, session):
        shutil.copytree(tmp_path / "t", tmp_path / "cut" / "t")
        return note(reader, session)

    monkeypatch.setattr(qewqew_core.topic_session, "_note", note_later)
    with Topic(tmp_path / "t", **options) as topic, topic.reader("r") as reader, topic.session() as session:
        session.read(reader)
        session.append(b"x" * 5000)  # too large for the log to carry it
    (block,) = (tmp_path / "cut" / "t" / "data").glob("*.zbus")
    block.write_bytes(block.read_bytes()[:-5000] + bytes(5000))
    with Topic(tmp_path / "cut" / "t", **options) as topic, topic.reader("r") as reader:
        assert [one.body for one in topic] == [b"read"]
        assert [one.body for one in reader.read_many(5)] == [b"read"]
