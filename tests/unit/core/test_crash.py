"""Stopped after any call of the file system, a queue or a topic opens again with exactly what was committed.

Random work runs once on a disk that writes down its calls. Then, for each number of calls, the disk is built as a kill or a power
cut leaves it, and opened. Every operation that had returned has happened, the one in flight has happened or not, and nothing
else; a session's puts and takes together. Readers of a topic find the locks of those before them gone.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from disk import JournalDisk, NoSync, image
from stride import Every, swept
from views import view
from work import TopicWork, Work
from work import kind as kind  # a fixture

import qewqew_core.topic.topic_session
from qewqew_core import Corrupt, Empty, Queue, Topic
from qewqew_core.topic import topic_state

QUEUES = "queue, log carries", "queue, chunks carry"
TOPICS = "topic, log carries", "topic, blocks carry"


def crash_everywhere(tmp_path: Path, every: Every, kind: type[Work], seed: int, sync: str, power: bool) -> int:
    root, folder = tmp_path / "work", tmp_path / "image"
    work, crashes = kind.done(root, sync, seed), 0
    calls = work.disk.calls
    for stop in every(range(len(calls) + 1), quick=kind.stride[0], full=kind.stride[1]):
        for chance in random.Random(f"{seed}.{stop}").sample(range(3), kind.chances):
            what = f"seed {seed}, sync {sync}, {work.options}, stopped after call {stop} of {len(calls)}, chance {chance}"
            image(calls[:stop], str(root), folder, random.Random(f"{seed}.{stop}.{chance}") if power else None)
            if chance == 2:
                stop_recovery_too(folder, work, random.Random(f"{seed}.{stop}"), power)
            work.check(folder, work.allowed_at(stop), what)
            crashes += 1
            shutil.rmtree(folder)
    shutil.rmtree(root)
    shutil.rmtree(tmp_path / "looking", ignore_errors=True)
    return crashes


def stop_recovery_too(folder: Path, work: Work, luck: random.Random, power: bool) -> None:
    """Open it, and stop the opening itself after some call: recovery begins again from what that left."""
    disk = JournalDisk(str(folder))
    work.recover(folder, disk)
    copy = folder.with_name("copy")
    image(disk.calls[: luck.randrange(disk.begin, len(disk.calls) + 1)], str(folder), copy, luck if power else None)
    shutil.rmtree(folder)
    copy.rename(folder)


@pytest.mark.req("S1", "T3", "ZD12")
@pytest.mark.parametrize("seed", swept(range(6), quick=6, full=3))
def test_a_kill_after_any_call_loses_and_repeats_nothing(tmp_path, kind, every, seed):
    assert crash_everywhere(tmp_path, every, kind, seed, "never" if seed % 2 else "commit", power=False) > 10


@pytest.mark.req("S1", "S4", "ZD3")
@pytest.mark.parametrize("seed", swept(range(6), quick=6, full=3))
def test_a_power_cut_after_any_call_loses_and_repeats_nothing(tmp_path, kind, every, seed):
    assert crash_everywhere(tmp_path, every, kind, 100 + seed, "commit", power=True) > 10


def test_a_power_cut_while_what_was_killed_recovers_loses_nothing(tmp_path, kind, every):
    """After a kill the newest commits may be in the page cache only; recovery must not let files run ahead of the log."""
    root, folder, cut = tmp_path / "work", tmp_path / "image", tmp_path / "cut"
    work, checked = kind.done(root, "commit", 11), 0
    calls = work.disk.calls
    for stop in every(range(5, len(calls)), quick=28, full=14):
        image(calls[:stop], str(root), folder, None)
        disk = JournalDisk(str(folder), follows=(calls[:stop], str(root)))
        work.recover(folder, disk)
        for chance in range(4):
            luck = random.Random(f"{stop}.{chance}")
            image(disk.calls[: luck.randrange(stop, len(disk.calls) + 1)], str(folder), cut, luck)
            work.check(cut, work.allowed_at(stop), f"killed after call {stop}, recovery cut off, chance {chance}")
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    assert checked > 10


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_after_what_was_killed_went_on_loses_nothing(tmp_path, kind, every, seed):
    """What the killed process had not synced, the next one must not take for durable."""
    assert go_on_and_cut(tmp_path, every, kind, 50 + seed, ["commit", "never"][seed]) > 10


def go_on_and_cut(tmp_path: Path, every: Every, kind: type[Work], seed: int, sync: str) -> int:
    root, folder, cut = tmp_path / "work", tmp_path / "image", tmp_path / "cut"
    work, checked = kind.done(root, sync, seed), 0
    calls = work.disk.calls
    for stop in every(range(5, len(calls)), quick=66, full=22):
        image(calls[:stop], str(root), folder, None)
        after = kind(JournalDisk(str(folder), follows=(calls[:stop], str(root))), "commit", work.options, serial=10_000)
        after.script(random.Random(stop), 6, goes_on=True)
        for chance in range(3 + kind.chances):
            luck = random.Random(f"{seed}.{stop}.{chance}")
            end = luck.randrange(after.steps[0][0], len(after.disk.calls) + 1)
            image(after.disk.calls[:end], str(folder), cut, luck)
            after.check(cut, after.allowed_at(end), f"seed {seed}, killed after call {stop}, cut after {end}, chance {chance}")
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    shutil.rmtree(root)
    return checked


@pytest.mark.soak
def test_a_million_crashes_lose_and_repeat_nothing(tmp_path, kind, every):
    crashes, seed = 0, 1000
    while crashes < (50_000 if issubclass(kind, TopicWork) else 500_000):  # and as many with the other limits
        if issubclass(kind, TopicWork) and seed % 6 == 5:
            crashes += cut_without_fsyncs(tmp_path, every, seed)
        elif seed % 6 == 4:
            crashes += go_on_and_cut(tmp_path, every, kind, seed, ["commit", "never"][seed // 6 % 2])
        else:
            crashes += crash_everywhere(tmp_path, every, kind, seed, "never" if seed % 6 == 0 else "commit", power=seed % 6 > 1)
        seed += 1


# Topics without fsyncs


def check_prefix(folder: Path, work: Work, stop: int, what: str) -> None:
    """After a power cut: what is there was stored so, up to the end of some commit; nothing that was not committed is skipped."""
    done = max(number for number, (when, _) in enumerate(work.steps) if when <= stop)
    durable = max((number for number in work.closed if number <= done), default=0)
    past = [seen for _, seen in work.steps[: done + 2]]
    stored = {number: one for seen in past for number, one in seen.messages.items()}
    with work.opened(folder, NoSync()) as topic:
        work.settle(topic)
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


@pytest.mark.parametrize("kind", TOPICS, indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_without_fsyncs_a_power_cut_leaves_a_prefix(tmp_path, kind, every, seed):
    assert cut_without_fsyncs(tmp_path, every, 200 + seed) > 5


def cut_without_fsyncs(tmp_path: Path, every: Every, seed: int) -> int:
    root, folder, checked = tmp_path / "work", tmp_path / "image", 0
    work = TopicWork.done(root, "never", seed)
    calls = work.disk.calls
    for stop in every(range(len(calls) + 1), quick=20, full=10):
        image(calls[:stop], str(root), folder, random.Random(f"{seed}.{stop}"))
        what = f"seed {seed}, {work.options}, cut after call {stop} of {len(calls)}"
        try:
            check_prefix(folder, work, stop, what)
        except Corrupt as error:
            raise AssertionError(what) from error
        shutil.rmtree(folder)
        checked += 1
    shutil.rmtree(root)
    return checked


def test_a_power_cut_may_take_the_messages_before_a_reader_that_is_made(tmp_path):
    """The reader is durable at once, and the messages are not: it is there, at the end of what is left, or it is not there."""
    root, folder = tmp_path / "work", tmp_path / "image"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Topic(root / "t", sync="never", _files=disk) as topic:
        topic.append_many([b"lost"] * 10)
        begin = len(disk.calls)
        topic.reader("r", start="latest")
        end = len(disk.calls)
    found = set()
    for stop in range(begin, end + 1):
        for luck in range(10):
            image(disk.calls[:stop], str(root), folder, random.Random(luck))
            with Topic(folder / "t", sync="never", _files=NoSync()) as topic:
                left = topic.stats().messages
                found.add((left, tuple(topic.readers())))
                reader = topic.reader("r", start="latest")
                assert reader.read_many(20) == []
                topic.append(b"new")
                assert [message.body for message in reader.read_many(20)] == [b"new"]
                assert topic.verify().problems == []
            shutil.rmtree(folder)
    assert {(0, ("r",)), (0, ()), (10, ("r",))} <= found


# Queues: where what was not synced hides


@pytest.mark.parametrize("kind", QUEUES, indirect=True)
@pytest.mark.parametrize("end", ["killed", "closed", "cut back"])
def test_what_a_session_spilled_without_syncing_is_durable_once_something_builds_on_it(tmp_path, kind, end):
    """Its chunk files were moved into the queue from another directory, and neither directory was synced then."""
    root, killed = tmp_path / "0", tmp_path / "1"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", chunk_size=64, sync="never", _files=disk) as q:
        with q.session() as session:
            session.put_many([bytes([number]) * 40 for number in range(5)])
            session.put(b"last")
        expected, calls = list(q), disk.calls.copy()
        if end == "cut back":
            with q._engine.lock:
                q._chain.rotate()
            calls = disk.calls.copy()
    assert any("q.spill" in call.path and call.kind == "rename" for call in calls)
    if end == "killed":
        image(calls, str(root), killed, None)
        disk = JournalDisk(str(killed), follows=(calls, str(root)))
        with Queue(killed / "q", _files=disk) as q:
            assert list(q) == expected
            calls, root = disk.calls.copy(), killed
    elif end == "closed":
        calls = disk.calls
    for chance in range(50):
        image(calls, str(root), tmp_path / "image", random.Random(chance))
        with Queue(tmp_path / "image" / "q", _files=NoSync()) as q:
            assert list(q) == expected
        shutil.rmtree(tmp_path / "image")


@pytest.mark.parametrize("power", [False, True])
def test_a_close_that_is_stopped_while_it_copies_a_chunk_leaves_no_orphan(tmp_path, every, power):
    """The half copied file would be offered as records that were lost, though all are still in the queue."""
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    q = Queue(root / "q", chunk_size=300, _files=disk)
    q.put_many([b"%d" % number * 20 for number in range(20)])
    ahead, behind = q.session(), q.session()
    ahead.get_many(2)
    behind.get_many(6)
    behind.commit()  # a gap behind what the other holds
    begin, expected = len(disk.calls), [b"%d" % number * 20 for number in (0, 1, *range(8, 20))]
    q.close()
    assert any(call.kind == "link" for call in disk.calls[begin:])
    for stop in every(range(begin, len(disk.calls) + 1), quick=4, full=2):
        for chance in range(20 if power else 1):
            image(disk.calls[:stop], str(root), tmp_path / "image", random.Random(f"{stop}.{chance}") if power else None)
            with Queue(tmp_path / "image" / "q", _files=NoSync()) as opened:
                assert list(opened) == expected
                assert (opened.orphans(), opened.verify().orphans) == ([], []), f"stopped after call {stop}, chance {chance}"
            shutil.rmtree(tmp_path / "image")


def test_what_is_put_into_a_chunk_that_was_emptied_is_durable_after_close(tmp_path):
    """The pointers come out the same as before, so storing them is not what syncs the record."""
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", chunk_size=64, _files=disk) as q:
        q.put(b"old")
    with Queue(root / "q", chunk_size=64, _files=disk) as q:
        assert q.get() == b"old"
        q.put(b"new")
    for chance in range(50):
        image(disk.calls, str(root), tmp_path / "image", random.Random(chance))
        with Queue(tmp_path / "image" / "q", _files=NoSync()) as q:
            assert list(q) == [b"new"]
        shutil.rmtree(tmp_path / "image")


def test_a_lease_whose_copy_empties_its_chunk_leaves_no_file_behind(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put_many([b"a" * 28, b"b" * 28])
    with Queue(tmp_path / "q", chunk_size=40) as q:
        assert list(q.lease("run", max_bytes=1)) == [b"a" * 28]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "q.30002", "q.batches", "q.reserve", "q.stamp", "q.wal"]


# Several processes at a topic: here they are several objects, which share no memory but by the files


def test_half_a_frame_of_a_killed_process_is_cut_off_by_one_that_has_the_reader_open(tmp_path):
    """It must not stay between the frames: whoever opens the reader next would end there, and forget what came behind it."""
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        topic.append_many([b"%d" % number for number in range(6)])
        with topic.reader("r") as one, topic.reader("r") as other:
            taken = one.read_many(2)
            log = tmp_path / "t" / "state" / "r.wal"
            frame = log.read_bytes()[-60:]
            with log.open("ab") as file:
                file.write(frame[:40])
            assert other.read().body == b"2"
            one.commit(*taken)
            assert [message.body for message in other.read_many(10)] == [b"3", b"4", b"5"]
            other.commit()
        with topic.reader("r") as again, pytest.raises(Empty):
            again.read()


@pytest.mark.parametrize("kind", TOPICS, indirect=True)
def test_processes_that_cut_the_log_of_their_reader_back_in_turn_give_each_message_once(tmp_path, kind):
    topics = [Topic(tmp_path / "t", _files=NoSync()) for _ in range(3)]
    topics[0].append_many([b"%d" % number for number in range(300)])
    readers = [topic.reader("r") for topic in topics]
    inodes, found = set(), []
    while len(found) < 300:
        reader = readers[len(found) % 3]
        messages = reader.read_many(2)
        found += [message.number for message in messages]
        reader.commit(*messages)
        inodes.add((tmp_path / "t" / "state" / "r.wal").stat().st_ino)
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
        writer = topic.writer()
        reader.participant.prepare("0" * 32, [message])
        if committed:
            writer.engine.rotate_at = 0  # a new log is begun by this very commit
            with writer.engine.exclusive():
                position = writer.append([], 0, [topic_state.Session("0" * 32, ["r"])])
            writer.durable(position)
        shutil.copytree(tmp_path / "t", tmp_path / "killed" / "t")
        reader.participant.leave_open("0" * 32)
        reader.close()
    with Topic(tmp_path / "killed" / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        assert [one.body for one in reader.read_many(5)] == ([] if committed else [b"read"]) + [b"left"]


def test_what_a_session_read_comes_again_if_a_power_cut_took_what_it_appended(tmp_path, monkeypatch):
    """With "never" the commit may be on disk and its messages not: then it has not happened, for its readers neither."""
    options: dict[str, Any] = {"sync": "never", "_files": NoSync()}
    with Topic(tmp_path / "t", **options) as topic:
        topic.append(b"read")
    note = qewqew_core.topic.topic_session._note

    def note_later(reader, session):
        shutil.copytree(tmp_path / "t", tmp_path / "cut" / "t")
        return note(reader, session)

    monkeypatch.setattr(qewqew_core.topic.topic_session, "_note", note_later)
    with Topic(tmp_path / "t", **options) as topic, topic.reader("r") as reader, topic.session() as session:
        session.read(reader)
        session.append(b"x" * 5000)  # too large for the log to carry it
    (block,) = (tmp_path / "cut" / "t" / "data").glob("*.zbus")
    block.write_bytes(block.read_bytes()[:-5000] + bytes(5000))
    with Topic(tmp_path / "cut" / "t", **options) as topic, topic.reader("r") as reader:
        assert [one.body for one in topic] == [b"read"]
        assert [one.body for one in reader.read_many(5)] == [b"read"]
