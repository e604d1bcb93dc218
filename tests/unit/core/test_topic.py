"""`Topic`, `TopicSession` and `Reader`: what each call promises."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from disk import NoSync
from zbus_cases import forget_log

from qewqew_core import (
    BadArgument,
    BadKey,
    BadRecord,
    Closed,
    CommitConflict,
    Corrupt,
    DiskFull,
    Empty,
    Full,
    Locked,
    Message,
    Reader,
    RecordTooLarge,
    Topic,
    inspect_reader,
)
from qewqew_core.disk.journal import SPARE
from qewqew_core.formats import zbus

Make = Callable[..., Topic]


@pytest.fixture(params=itertools.product([500, 1 << 20], ["commit", "never"]), ids=lambda param: "{}-{}".format(*param))
def make(request, tmp_path) -> Iterator[Make]:
    """Opens the one topic of the test, each time with the same block size (two small messages, or all) and sync mode."""
    block_size, sync = request.param
    opened: list[Topic] = []

    def one(**more: object) -> Topic:
        opened.append(Topic(tmp_path / "t", **{"block_size": block_size, "sync": sync, "_files": NoSync(), **more}))
        return opened[-1]

    yield one
    for topic in opened:
        topic.close()


@pytest.fixture
def topic(tmp_path) -> Iterator[Topic]:
    """For what does not depend on blocks and sync mode."""
    with Topic(tmp_path / "t", block_size=500, _files=NoSync()) as topic:
        yield topic


def filled(topic: Topic, count: int) -> Topic:
    topic.append_many(b"%d" % number for number in range(count))
    return topic


def numbers(messages: object) -> list[int]:
    return [message.number for message in messages]


def bodies(messages: object) -> list[bytes]:
    return [message.body for message in messages]


def of_zbus(path: Path) -> dict[str, bytes]:
    found = [one for one in path.rglob("*") if one.suffix in (".idx", ".zbus", ".rdx")]
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in found}


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process; it answers on its output and listens on its input."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


# Appending


def test_messages_come_back_with_all_that_was_appended_also_after_reopening(make):
    with make() as topic:
        assert topic.append(b"plain") == 0
        assert topic.append(b"full", tag="a.b", id="id-1", corr_offset=-(1 << 63), timestamp=1_500_000_000_123) == 1
        assert topic.append(b"", tag="only.tag", timestamp=0) == 2
    with make() as topic:
        first, second, third = topic
        assert (first.body, first.tag, first.id, first.corr_offset, first.number, first.offset) == (b"plain", None, None, 0, 0, 0)
        assert abs(first.timestamp / 1000 - time.time()) < 60
        assert second == Message(b"full", "a.b", "id-1", -(1 << 63), 1_500_000_000_123, 1, 209)
        assert third == Message(b"", "only.tag", None, 0, 0, 2, 417)
        assert topic.append(b"next") == 3


def test_append_many_takes_bodies_and_messages_of_all_kinds(make):
    topic = make()
    assert (
        topic.append_many([b"b", bytearray(b"ba"), memoryview(b"mvx")[:2], Message(b"m", tag="t"), Message(memoryview(b"mm"))])
        == 5
    )
    assert bodies(topic) == [b"b", b"ba", b"mv", b"m", b"mm"]
    words = memoryview(bytes(range(8))).cast("I")  # its length is not its size
    assert topic.append_many([words]) == 1
    assert bodies(topic)[-1] == bytes(range(8))
    assert topic.append_many([memoryview(b"abcdef")[::2]]) == 1  # nor are its bytes side by side
    assert bodies(topic)[-1] == b"ace"


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_messages_stand_in_the_blocks_the_same_whether_appended_together_or_one_by_one(tmp_path, dialect):
    corr_offset = 0 if dialect == "C" else -5
    plain = [Message(b"%d" % number * 30, "a.b", timestamp=1) for number in range(400)]  # several runs
    varied = [
        Message(b"", timestamp=2),
        Message(b"x" * (2 << 20), "large", timestamp=3),
        Message(b"x", "t" * 127, "i" * 39, corr_offset, timestamp=4),
        Message(bytearray(b"y"), None, "\u00e9", timestamp=5),
    ]
    blocks = []
    for name, groups in {
        "together": [plain, varied, varied[2:] * 3],
        "one by one": [[one] for one in plain + varied + varied[2:] * 3],
    }.items():
        with Topic(tmp_path / name, dialect=dialect, _files=NoSync()) as topic:
            for group in groups:
                topic.append_many(group)
        blocks.append([path.read_bytes() for path in sorted((tmp_path / name / "data").glob("*.zbus"))])
    assert blocks[0] == blocks[1]


def test_a_message_that_was_read_can_be_appended_as_it_is_to_another_topic(make, tmp_path):
    """Forwarding keeps tag, id, corr_offset and timestamp; number and offset are given anew."""
    topic = make()
    topic.append(b"before")
    topic.append(b"it", tag="a", id="i", corr_offset=7, timestamp=5)
    with topic.reader("r", start=1) as one, Topic(tmp_path / "other") as other:
        other.append_many([one.read()])
        assert list(other) == [Message(b"it", "a", "i", 7, 5, 0, 0)]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("text", BadRecord),
        (None, BadRecord),
        (5, BadRecord),
        ((b"a", "tag"), BadRecord),
        (Message("text"), BadRecord),
        (Message(b"x", tag="t" * 128), BadArgument),
        (Message(b"x", id="é" * 20), BadArgument),
        (Message(b"x", tag=b"bytes"), BadArgument),
        (Message(b"x", corr_offset=1 << 63), BadArgument),
        (Message(b"x", corr_offset=1.0), BadArgument),
        (Message(b"x", timestamp=-1), BadArgument),
        (Message(b"x", timestamp=float("nan")), BadArgument),
        (Message(b"x", tag="\ud800"), BadArgument),
    ],
    ids=repr,
)
def test_a_bad_item_in_the_middle_of_append_many_leaves_nothing(topic, bad, error):
    filled(topic, 3)
    before = of_zbus(Path(topic.path))
    with pytest.raises(error):
        topic.append_many([b"good", bad, b"good"], key="k")
    assert of_zbus(Path(topic.path)) == before
    assert topic.append_many([b"4", b"5"], key="k") == 2  # the key is not used up
    assert numbers(topic) == [0, 1, 2, 3, 4]


def test_a_body_that_no_block_can_hold_is_refused_before_anything_is_stored(topic, monkeypatch):
    monkeypatch.setattr(zbus, "LARGEST_BODY", 1000)
    with pytest.raises(RecordTooLarge, match="Nothing was stored"):
        topic.append_many([b"small", bytes(1001)])
    assert list(topic) == []
    topic.append(bytes(1000))


def test_a_generator_that_raises_leaves_nothing_and_its_error_comes_through(make):
    topic = filled(make(), 2)

    def failing() -> Iterator[bytes]:
        yield b"good"
        raise LookupError("mine")

    before = of_zbus(Path(topic.path))
    with pytest.raises(LookupError, match="mine"):
        topic.append_many(failing(), key="k")
    assert of_zbus(Path(topic.path)) == before
    assert topic.append_many([b"2"], key="k") == 1
    assert numbers(topic) == [0, 1, 2]


def test_a_generator_may_use_the_topic_itself(make):
    """What it appends comes before the rest: that is one commit at the end."""
    topic = make()

    def working() -> Iterator[bytes]:
        topic.append(b"inner")
        yield b"outer"

    assert topic.append_many(working()) == 1
    assert bodies(topic) == [b"inner", b"outer"]


def test_a_key_that_was_used_stores_nothing_and_returns_what_the_first_call_returned(make):
    with make() as topic:
        assert topic.append_many([b"a", b"b"], key="once") == 2
        assert topic.append_many([b"c"], key="once") == 2
        assert topic.append_many([b"d"], key="another") == 1
        assert topic.append_many([b"e"]) == 1
        assert topic.append_many([b"f"]) == 1
    with make() as topic:
        assert topic.append_many([b"x", b"y", b"z"], key="once") == 2
        assert bodies(topic) == [b"a", b"b", b"d", b"e", b"f"]


def test_nothing_to_append_changes_nothing_without_a_key_and_uses_the_key_up_with_one(make):
    with make() as topic:
        topic.append(b"first")
        before = of_zbus(Path(topic.path))
        assert topic.append_many([]) == 0
        assert topic.append_many([], key="empty") == 0
        assert topic.append_many([b"late"], key="empty") == 0
        assert of_zbus(Path(topic.path)) == before
    with make() as topic:
        assert topic.append_many([b"later"], key="empty") == 0
        assert len(topic) == 1


@pytest.mark.parametrize("key", ["", " ", "a/b", "\n", "x" * 513, 5, "\ud800"])
def test_a_bad_key_is_refused_by_appends_and_sessions(topic, key):
    with pytest.raises(BadKey):
        topic.append_many([b"x"], key=key)
    with topic.session() as session:
        session.append(b"x")
        with pytest.raises(BadKey):
            session.commit(key=key)
        assert len(topic) == 0
        session.rollback()
    assert len(topic) == 0


def test_keys_are_forgotten_after_thirty_days_and_not_before(topic, clock):
    topic.append_many([b"1"], key="k")
    clock.advance(29 * 86_400)
    assert topic.append_many([b"2"], key="k") == 1
    topic.close()
    assert len(Topic(topic.path)) == 1


def test_what_is_appended_together_lies_in_one_block_however_large(topic):
    """As the original: a reader of one block gets all of a commit or nothing."""
    topic.append(b"x")
    topic.append_many([bytes(100)] * 20)
    topic.append_many([b"y", b"z"])
    assert topic.stats().blocks == 2
    assert [path.stat().st_size for path in sorted(Path(topic.path, "data").glob("*.zbus"))] == [205 + 20 * 304, 410]


@pytest.mark.req("Z13", "ZD7")
def test_only_one_topic_object_appends_at_a_time_and_others_may_read(make):
    one, other = make(), make(lock_timeout=0)
    one.append(b"mine")
    with pytest.raises(Locked) as caught:
        other.append(b"no")
    assert caught.value.pid == os.getpid()
    with pytest.raises(Locked):
        other.set_mask(1)
    with other.reader("r") as reader:
        assert reader.read().body == b"mine"
        reader.commit()
    one.close()
    assert other.append(b"now") == 1
    assert bodies(other) == [b"mine", b"now"]


def test_a_second_writer_waits_as_long_as_it_was_told_to(make):
    one, other = make(), make(lock_timeout=300)
    one.append(b"first")
    closing = threading.Timer(0.05, one.close)
    closing.start()
    assert other.append(b"second") == 1
    closing.join()


@pytest.mark.req("ZD8")
def test_threads_that_append_to_one_topic_get_numbers_of_their_own_and_commits_stay_together(make):
    topic = make()
    found: dict[int, bytes] = {}

    def work(name: int) -> None:
        for count in range(50):
            body = b"%d-%d" % (name, count)
            found[topic.append(body)] = body
            topic.append_many([body + b" %d" % part for part in range(3)])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = bodies(topic)
    assert len(stored) == 4 * 200
    assert {number: stored[number] for number in found} == found
    together = [stored[number : number + 3] for number, body in enumerate(stored) if body.endswith(b" 0")]
    assert len(together) == 200
    assert all(group == [group[0][:-1] + b"%d" % part for part in range(3)] for group in together)
    blocks = sorted(Path(topic.path, "data").glob("*.zbus"))
    ends = itertools.accumulate(path.stat().st_size for path in blocks)
    assert [int(path.stem) for path in blocks] == [0, *ends][:-1]
    assert topic.verify().ok


def test_appends_leave_the_room_that_was_asked_for(make):
    with make(min_free_bytes=sys.maxsize) as topic:
        before = of_zbus(Path(topic.path))
        with pytest.raises(DiskFull, match="min_free_bytes"):
            topic.append(b"x")
        assert of_zbus(Path(topic.path)) == before
    with make() as topic:
        assert topic.append(b"x") == 0


def test_a_closed_topic_refuses_all_calls_and_a_second_close_does_nothing(make):
    topic = make()
    session = topic.session()
    topic.append(b"x")
    topic.close()
    topic.close()
    calls: list[Callable[[], object]] = [
        lambda: topic.append(b"x"),
        lambda: topic.append_many([]),
        lambda: topic.append_many([b"x"]),
        lambda: topic.reader("r"),
        lambda: topic.session(),
        lambda: session.append(b"x"),
        lambda: session.commit(),
        lambda: topic.set_mask(1),
        lambda: topic.trim(),
        lambda: topic.header(),
        lambda: topic.stats(),
        lambda: len(topic),
        lambda: list(topic),
        lambda: topic.readers(),
        lambda: topic.verify(),
        lambda: topic.copy_reader("a", "b"),
        lambda: topic.delete_reader("a"),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()
    session.close()


def test_readers_stay_open_when_their_topic_is_closed(make):
    topic = filled(make(), 3)
    with topic.reader("r") as one:
        assert one.read().number == 0
        topic.close()
        assert numbers(one) == [1, 2]
        assert one.commit() == 3


# Sessions


def test_what_a_session_appends_is_there_from_the_commit_on_as_one(make):
    topic = make()
    with topic.reader("r") as one, topic.session() as session:
        session.append(b"1", tag="a", id="i", corr_offset=3, timestamp=9)
        assert session.append_many([b"2", Message(b"3")]) == 2
        assert list(topic) == list(one) == []
        assert session.commit() == 3
        assert next(iter(topic)) == Message(b"1", "a", "i", 3, 9, 0, 0)
        assert bodies(one) == [b"1", b"2", b"3"]
    assert len(topic) == 3


def test_a_session_commits_at_the_end_of_its_block_and_not_when_that_raises(make):
    topic = filled(make(), 3)
    with topic.reader("r") as one:
        with topic.session() as session:
            session.append(b"kept")
            assert session.read(one).number == 0
        assert one.position().number == 1

        def fail() -> None:
            with topic.session() as session:
                session.append(b"dropped")
                assert session.read(one).number == 1
                raise LookupError

        with pytest.raises(LookupError):
            fail()
        assert [(message.number, message.attempt) for message in one] == [(1, 2), (2, 1), (3, 1)]
    assert bodies(topic) == [b"0", b"1", b"2", b"kept"]


def test_a_session_commits_reads_of_several_readers_with_its_appends(make):
    with make() as topic:
        filled(topic, 6)
        with topic.reader("a") as a, topic.reader("b", start=3) as b, topic.session() as session:
            assert [session.read(a).number, session.read(a).number, session.read(b).number] == [0, 1, 3]
            assert numbers(session.read_many(b, 10)) == [4, 5]
            session.append(b"result")
            assert (a.position().number, b.position().number) == (0, 3)
            assert session.commit() == 1
            assert (a.position().number, b.position().number) == (2, 6)
            assert b.read().body == b"result"
    with make() as topic, topic.reader("a") as a, topic.reader("b") as b:
        assert (a.read().number, b.read().number) == (2, 6)


def test_a_session_may_commit_many_times_and_each_commit_is_its_own(make):
    topic = filled(make(), 4)
    with topic.reader("r") as one, topic.session() as session:
        assert session.commit() == 0
        for number in range(3):
            message = session.read(one)
            session.append(b"from %d" % message.number)
            assert session.commit() == 1
            assert one.position().number == number + 1
        session.read(one)
        assert session.commit() == 0  # reads alone are committed as well
        assert one.position().number == 4
        session.append(b"lost")
        session.rollback()
        assert session.commit() == 0
    assert bodies(topic)[4:] == [b"from 0", b"from 1", b"from 2"]


def test_a_session_that_is_closed_without_a_commit_leaves_nothing(make):
    topic = filled(make(), 2)
    with topic.reader("r") as one:
        session = topic.session()
        session.append(b"x")
        assert session.read(one).number == 0
        session.close()
        session.close()
        assert numbers(one) == [0, 1]
        for call in (lambda: session.append(b"x"), session.commit, session.rollback, lambda: session.read(one)):
            with pytest.raises(Closed):
                call()
    assert len(topic) == 2


def test_a_session_whose_topic_was_closed_gives_back_what_it_has_read(make):
    topic = filled(make(), 3)
    with topic.reader("r", redeliver_after=None) as one, make() as other, other.reader("r") as same:
        session = topic.session()
        session.append(b"x")
        session.read_many(one, 2)
        topic.close()
        with pytest.raises(Closed):
            session.commit()
        session.close()
        assert numbers(same.read_many(2)) == [0, 1]
        assert len(other) == 3


def test_a_session_that_was_forgotten_is_warned_about(topic):
    session = topic.session()
    session.append(b"x")
    held = [session]
    del session
    with pytest.warns(ResourceWarning, match="was not closed"):
        held.clear()
    gc.collect()
    assert len(topic) == 0


def test_a_session_key_that_was_used_stores_nothing_and_gives_back_what_was_read(make):
    """A retry of a task reads the messages again that it had not committed, and finds its appends done: it must not lose them."""
    topic = filled(make(), 3)
    with topic.reader("r") as one:
        with topic.session() as session:
            session.append_many([b"x", b"y"])
            session.read(one)
            assert session.commit(key="run") == 2
        assert topic.append_many([b"no"], key="run") == 2  # keys are the topic's, whoever used them
        with topic.session() as session:
            session.append(b"again")
            assert session.read(one).number == 1
            assert session.commit(key="run") == 2
            assert one.read().number == 1
            session.append(b"more")
            assert session.commit(key="run 2") == 1
    assert bodies(topic)[3:] == [b"x", b"y", b"more"]


def test_a_session_with_a_key_and_nothing_to_append_uses_it_up(make):
    topic = filled(make(), 2)
    with topic.reader("r") as one, topic.session() as session:
        assert session.read(one).number == 0
        assert session.commit(key="k") == 0
        assert session.read(one).number == 1
        assert session.commit(key="k") == 0
        assert one.read().number == 1
    assert topic.append_many([b"x"], key="k") == 0


def test_a_bad_append_to_a_session_adds_nothing_and_the_session_goes_on(make):
    topic = make()
    with topic.session() as session:
        session.append(b"first")
        with pytest.raises(BadRecord):
            session.append_many([b"x", "text"])
        with pytest.raises(BadArgument):
            session.append(b"x", tag="t" * 128)
        assert session.commit() == 1
    assert bodies(topic) == [b"first"]


def test_what_is_appended_is_a_copy(make):
    topic = make()
    body = bytearray(b"as it was")
    with topic.session() as session:
        session.append(body)
        body[:] = b"changed!!"
    assert bodies(topic) == [b"as it was"]


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_a_session_of_large_bodies_keeps_them_on_disk_and_stores_them_right(tmp_path, sync):
    """Over 16 MiB, bodies go to a file without a name; memory does not grow with them."""
    with Topic(tmp_path / "t", sync=sync, block_size=30 << 20, _files=NoSync()) as topic, topic.session() as session:
        for run in (1, 2):
            tracemalloc.start()
            digests = []
            for number in range(60):
                body = os.urandom(1 << 20 if number % 3 else 700)
                digests.append(hashlib.sha256(body).digest())
                session.append(body, tag=f"n.{number}")
            del body
            assert sorted(os.listdir(tmp_path / "t" / "state")) == []
            assert session.commit() == 60
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 30 << 20
            found = [message for message in topic if message.number >= (run - 1) * 60]
            assert [hashlib.sha256(message.body).digest() for message in found] == digests
            assert [message.tag for message in found] == [f"n.{number}" for number in range(60)]
            del found
        assert topic.verify().ok


def test_a_session_whose_message_was_delivered_to_somebody_else_commits_nothing(make):
    topic = filled(make(), 3)
    with topic.reader("r", redeliver_after=0) as one, topic.reader("r") as other, topic.reader("s") as third:
        with topic.session() as session:
            session.append(b"x")
            assert session.read(one).number == 0
            assert session.read(third).number == 0
            assert other.read().number == 0  # its time is over at once
            for _ in range(2):
                with pytest.raises(CommitConflict, match="Nothing was changed"):
                    session.commit()
                assert len(topic) == 3
                assert third.position().number == 0
            session.rollback()
            session.append(b"y")
            assert session.commit() == 1
        assert other.commit() == 1
        assert third.read().number == 0
    assert bodies(topic)[3:] == [b"y"]


def test_a_session_whose_message_was_committed_otherwise_commits_nothing(make):
    topic = filled(make(), 3)
    with topic.reader("r") as one, topic.session() as session:
        message = session.read(one)
        one.commit(message)
        session.append(b"x")
        with pytest.raises(CommitConflict, match="committed already"):
            session.commit()
        assert len(topic) == 3
        session.rollback()
        assert one.read().number == 1


def test_a_session_that_cannot_get_the_writers_lock_has_changed_nothing_and_may_commit_later(make):
    one, other = make(), make(lock_timeout=0)
    one.append(b"mine")
    with other.reader("r") as reader, other.session() as session:
        session.append(b"theirs")
        session.read(reader)
        with pytest.raises(Locked):
            session.commit()
        assert reader.position().number == 0
        one.close()
        assert session.commit() == 1
        assert reader.position().number == 1
    assert bodies(other) == [b"mine", b"theirs"]


def test_a_session_that_only_reads_by_one_reader_needs_no_lock_of_the_topic(make):
    one, other = filled(make(), 2), make(lock_timeout=0)
    with other.reader("r") as reader, other.session() as session:
        session.read(reader)
        assert session.commit() == 0
        assert reader.position().number == 1
    assert len(one) == 2


def test_a_session_reads_only_by_readers_of_its_own_topic_object_that_do_not_commit_themselves(make):
    topic, same = filled(make(), 1), make()
    with topic.session() as session:
        with same.reader("r") as foreign, pytest.raises(BadArgument, match="own Topic object"):
            session.read(foreign)
        with topic.reader("r", auto_commit=True) as auto, pytest.raises(BadArgument, match="auto_commit"):
            session.read_many(auto, 1)
        one = topic.reader("r")
        assert session.read(one).number == 0
        with pytest.raises(Empty):
            session.read(one)
        session.append(b"x")
        one.close()  # what it had is given back
        with pytest.raises(Closed):
            session.commit()
        assert len(topic) == 1
        session.rollback()


def test_several_sessions_are_open_and_each_commits_its_own(make):
    topic = filled(make(), 4)
    with topic.reader("r") as one, topic.session() as first, topic.session() as second:
        assert [first.read(one).number, second.read(one).number, first.read(one).number] == [0, 1, 2]
        first.append(b"of first")
        second.append(b"of second")
        assert second.commit() == 1
        assert one.position().number == 0
        first.rollback()
        assert numbers(one) == [0, 2, 3, 4]
    assert bodies(topic)[4:] == [b"of second"]


# Reading


def test_messages_are_delivered_in_order_over_all_blocks_one_by_one_and_many(make):
    with make() as topic:
        filled(topic, 10)
        for number in range(10, 15):
            topic.append(b"%d" % number)
        with topic.reader("one") as one:
            assert [one.read().number for _ in range(15)] == list(range(15))
            with pytest.raises(Empty):
                one.read()
            assert one.read_many(5) == []
        with topic.reader("many") as many:
            assert numbers(many.read_many(4)) == [0, 1, 2, 3]
            assert numbers(many.read_many(100)) == list(range(4, 15))
            assert many.commit() == 15
    with make() as topic, topic.reader("many") as many:
        assert list(many) == []


def test_read_many_stops_at_bytes_of_bodies_but_gives_one_message_at_least(topic):
    topic.append_many([b"x" * size for size in (10, 10, 50, 0, 0, 30)])
    with topic.reader("r") as one:
        assert numbers(one.read_many(10, max_bytes=25)) == [0, 1]
        assert numbers(one.read_many(10, max_bytes=25)) == [2]
        assert numbers(one.read_many(2, max_bytes=25)) == [3, 4]
        one.nack()
        assert numbers(one.read_many(10, max_bytes=20)) == [0, 1]
        assert numbers(one.read_many(10, max_bytes=80)) == [2, 3, 4, 5]


def test_a_reader_that_waits_gets_what_another_thread_appends(make):
    topic = make()
    with topic.reader("r") as one:
        begin = time.monotonic()
        with pytest.raises(Empty):
            one.read(timeout=0.05)
        assert one.read_many(3, timeout=0.05) == []
        assert time.monotonic() - begin >= 0.1
        for wait in (lambda: one.read(timeout=300), lambda: one.read(timeout=None), lambda: one.read_many(3, timeout=300)[0]):
            later = threading.Timer(0.05, topic.append, (b"late",))
            later.start()
            assert wait().body == b"late"
            later.join()
        later = threading.Timer(0.05, topic.append, (b"seen",))
        later.start()
        assert one.peek(timeout=300).body == b"seen"
        later.join()


def test_peek_delivers_nothing_and_shows_what_read_would_deliver(make):
    topic = filled(make(), 2)
    with topic.reader("r") as one:
        assert one.peek() == one.peek() == one.read()
        assert one.peek().number == 1
        one.nack()
        assert (one.peek().number, one.peek().attempt) == (0, 2)
        assert [(message.number, message.attempt) for message in one] == [(0, 2), (1, 1)]
        with pytest.raises(Empty):
            one.peek()


def test_commits_of_all_of_some_and_out_of_order_move_the_reader_to_the_first_that_is_not(make):
    with make() as topic:
        filled(topic, 8)
        with topic.reader("r") as one:
            messages = one.read_many(6)
            assert one.commit(messages[1], messages[3]) == 2
            assert one.position().number == 0
            assert one.commit(messages[0]) == 1
            assert one.position().number == 2
            assert one.commit(messages[0], messages[0], messages[2]) == 1  # twice is no error
            assert one.position().number == 4
            assert one.lag() == 4
            assert one.commit() == 2
            assert one.commit() == 0
            assert one.position().number == 6
            assert one.read().number == 6
    with make() as topic, topic.reader("r") as one:
        assert numbers(one) == [6, 7]


def test_a_message_named_twice_in_one_call_is_committed_or_given_back_once(make):
    topic = filled(make(), 2)
    with topic.reader("r") as one:
        first = one.read()
        assert one.nack(first, first) == 1
        first = one.read()
        assert one.commit(first, first) == 1
        assert numbers(one) == [1]


def test_what_was_committed_out_of_order_stays_committed_after_reopening(make):
    with make() as topic:
        filled(topic, 6)
        with topic.reader("r") as one:
            messages = one.read_many(5)
            one.commit(messages[1], messages[2], messages[4])
    with make() as topic, topic.reader("r") as one:
        assert [(message.number, message.attempt) for message in one] == [(0, 2), (3, 2), (5, 1)]


def test_what_was_given_back_comes_again_first_with_one_more_attempt(make):
    topic = filled(make(), 5)
    with topic.reader("r") as one:
        messages = one.read_many(3)
        assert one.nack(messages[2], messages[0]) == 2
        assert [(message.number, message.attempt) for message in one.read_many(3)] == [(0, 2), (2, 2), (3, 1)]
        with pytest.raises(CommitConflict):
            one.commit(messages[0])  # attempt 1 of it is over
        assert one.nack() == 4
        assert [(message.number, message.attempt) for message in one] == [(0, 3), (1, 2), (2, 3), (3, 2), (4, 1)]
        assert one.commit() == 5
        assert one.nack() == 0


def test_a_message_that_was_given_back_for_later_comes_again_then_and_others_before_it(topic, stopped_clock):
    filled(topic, 3)
    with topic.reader("r") as one:
        first = one.read()
        begin = time.monotonic()
        with stopped_clock():
            assert one.nack(first, delay=0.15) == 1
            assert one.position().number == 0
            assert [one.read().number, one.read().number] == [1, 2]
            with pytest.raises(Empty):
                one.read()
        again = one.read(timeout=300)
        assert (again.number, again.attempt) == (0, 2)
        assert time.monotonic() - begin > 0.1


@pytest.mark.req("Z9")
def test_a_message_is_delivered_again_when_its_time_is_over_and_the_first_consumer_cannot_commit_it(make, stopped_clock):
    topic = filled(make(), 2)
    with topic.reader("r", redeliver_after=0.05) as slow, topic.reader("r") as other:
        with stopped_clock():
            late = slow.read()
            assert other.read(timeout=300).number == 1
        again = other.read(timeout=300)
        assert (again.number, again.attempt) == (0, 2)
        for call in (slow.commit, slow.nack):
            with pytest.raises(CommitConflict, match="Nothing was changed"):
                call(late)
        assert slow.commit() == 0
        assert other.commit() == 2
        assert slow.commit(late) == 0  # it is done with, and that is all that was asked for
    assert Reader is type(slow)


def test_the_same_consumer_may_get_it_again_and_then_only_the_new_attempt_counts(topic):
    filled(topic, 1)
    with topic.reader("r", redeliver_after=0) as one:
        first, second = one.read(), one.read()
        assert (first.attempt, second.attempt) == (1, 2)
        with pytest.raises(CommitConflict):
            one.commit(first)
        assert one.commit(second) == 1
        assert one.lag() == 0


def test_without_a_time_out_a_message_stays_with_its_consumer_as_long_as_that_is_open(topic):
    filled(topic, 2)
    with topic.reader("r", redeliver_after=None) as one, topic.reader("r", redeliver_after=None) as other:
        first = one.read()
        assert other.read().number == 1
        with pytest.raises(Empty):
            other.read(timeout=0.4)
        one.close()
        again = other.read()
        assert (again.number, again.attempt) == (first.number, 2)


@pytest.mark.req("Z9")
def test_no_more_messages_are_in_flight_than_window_allows(make):
    topic = filled(make(), 8)
    with topic.reader("r", window=3) as one, topic.reader("r", window=3) as other:
        assert numbers(one.read_many(10)) == [0, 1, 2]
        for reader in (one, other):
            with pytest.raises(Full, match="window"):
                reader.read()
        assert one.peek().number == 3
        messages = one.nack()
        assert messages == 3
        assert numbers(other.read_many(10)) == [0, 1, 2]  # deliveries again are not more
        other.commit()
        assert numbers(other.read_many(2)) == [3, 4]
        assert numbers(one.read_many(2)) == [5]
        with topic.reader("wide", window=3, auto_commit=True) as auto:
            assert numbers(auto.read_many(100)) == list(range(8))  # nothing is in flight


def test_two_consumers_of_one_reader_share_its_messages(make):
    topic = filled(make(), 6)
    with topic.reader("r") as one, topic.reader("r") as other:
        assert [one.read().number, other.read().number, one.read().number, other.read().number] == [0, 1, 2, 3]
        assert one.commit() == 2
        assert other.position().number == 1
        one.seek(number=1)
        assert other.commit() == 0
        assert [other.read().number, one.read().number] == [1, 2]


def test_a_consumer_that_closes_gives_its_messages_to_the_others(make):
    topic = filled(make(), 6)
    with topic.reader("r") as third:
        one, other = topic.reader("r"), topic.reader("r")
        assert (numbers(one.read_many(2)), numbers(other.read_many(2))) == ([0, 1], [2, 3])
        one.close()
        one.close()
        with pytest.raises(Closed):
            one.read()
        assert [(message.number, message.attempt) for message in third.read_many(3)] == [(0, 2), (1, 2), (4, 1)]
        del other  # without a close: its lock is gone with it
        gc.collect()
        until(lambda: third.peek().number == 2)
        assert numbers(third) == [2, 3, 5]


@pytest.mark.req("Z7", "Z9", "ZD12")
@pytest.mark.parametrize("dialect", ["B", "C"])
def test_what_a_process_had_comes_again_soon_after_it_was_killed(make, dialect):
    topic = filled(make(dialect=dialect), 4)
    consumer = program(
        """
        import sys
        from qewqew_core import Topic
        reader = Topic(sys.argv[1]).reader("r", redeliver_after=None, window=3)
        messages = reader.read_many(9)
        reader.commit(messages[1])
        print([message.number for message in messages], flush=True)
        sys.stdin.read()
        """,
        topic.path,
    )
    try:
        assert consumer.stdout.readline() == "[0, 1, 2]\n"
        with topic.reader("r", redeliver_after=None) as one:
            assert one.read().number == 3
            with pytest.raises(Empty):
                one.read(timeout=0.4)  # it lives
            consumer.kill()
            consumer.wait()
            messages = [one.read(timeout=300), one.read(timeout=300)]
            assert [(message.number, message.attempt) for message in messages] == [(0, 2), (2, 2)]
            assert one.commit() == 3
            assert one.lag() == 0
    finally:
        consumer.kill()
        consumer.communicate()


@pytest.mark.req("Z13", "ZD7")
def test_a_reader_of_another_process_sees_new_messages_blocks_and_counts_while_the_writer_goes_on(topic):
    topic.set_mask(0)  # takes the writer's lock
    consumer = program(
        """
        import sys
        from qewqew_core import Locked, Topic
        with Topic(sys.argv[1], lock_timeout=0) as topic, topic.reader("r", filter="yes") as reader:
            try:
                topic.append(b"no")
            except Locked as error:
                print("refused", error.pid, flush=True)
            while (message := reader.read(timeout=300)).body != b"end":
                stats, lag = topic.stats(), reader.lag()
                print(message.number, stats.blocks, stats.next, len(topic), lag, reader.commit(), reader.lag(), flush=True)
        """,
        topic.path,
    )
    try:
        assert consumer.stdout.readline() == f"refused {os.getpid()}\n"
        for number in range(30):
            topic.append(b"x" * 100, tag="yes" if number % 3 == 0 else "no")
            if number % 3 == 0:
                expected = number, topic.stats().blocks, number + 1, number + 1, 1, 1, 0
                assert tuple(map(int, consumer.stdout.readline().split())) == expected
        assert topic.stats().blocks > 10
        topic.append(b"end", tag="yes")
        assert consumer.wait(300) == 0
    finally:
        consumer.kill()
        consumer.communicate()


def test_iterating_over_a_topic_moves_no_reader_and_takes_no_lock(make):
    topic, other = filled(make(), 5), make()
    with other.reader("r") as one:
        found = iter(other)
        assert next(found).number == 0
        topic.append(b"5")
        assert numbers(found) == [1, 2, 3, 4, 5]  # to the end as it is then
        assert one.position().number == 0


@pytest.mark.req("Z7")
def test_with_auto_commit_a_message_is_committed_before_it_is_handed_out(make):
    topic = filled(make(), 4)
    with topic.reader("r", auto_commit=True) as one:
        assert one.read().number == 0
        assert one.position().number == 1
        assert one.commit() == one.nack() == 0
        with make() as again, again.reader("r") as other:
            assert other.read().number == 1
        assert numbers(one.read_many(2)) == [1, 2]  # also what somebody else gave back
        assert one.position().number == 3


def test_one_reader_object_may_be_shared_by_threads(topic):
    filled(topic, 400)
    found: list[int] = []
    with topic.reader("r") as one:

        def work() -> None:
            while messages := one.read_many(7):
                found.extend(numbers(messages))
                one.commit(*messages)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(400))
        assert one.lag() == 0


# Where a reader starts, and is moved to


def test_a_new_reader_starts_where_it_is_told_to_and_an_old_one_stays(make):
    topic = make()
    for number in range(6):
        topic.append(b"%d" % number, timestamp=1000 * number)
    when = datetime.now(UTC) + timedelta(days=1)
    cases = [("oldest", 0), ("latest", 6), (0, 0), (3, 3), (5, 5), (6, 6), (when, 6)]
    for place, (start, number) in enumerate(cases):
        with topic.reader(f"r{place}", start=start) as one:
            assert one.position().number == number
            assert one.lag() == 6 - number
        with topic.reader(f"r{place}", start="oldest") as one:
            assert one.position().number == number
    topic.append(b"6")
    with topic.reader("r1") as one:
        assert one.read().number == 6


@pytest.mark.parametrize("start", [-1, 4, 1 << 70, "newest", None, 1.0, True, datetime(2020, 1, 1), b"oldest"])
def test_a_start_that_is_none_makes_no_reader(topic, start):
    filled(topic, 3)
    with pytest.raises(BadArgument):
        topic.reader("r", start=start)
    assert topic.readers() == []
    with topic.reader("r") as one:
        assert one.read().number == 0


@pytest.mark.req("Z6", "ZD11")
def test_seek_by_number_goes_to_any_message_forth_and_back(make):
    with make() as topic:
        for number in range(9):
            topic.append(b"%d" % number)
        with topic.reader("r") as one:
            for number in (8, 0, 4, 3, 5, 2, 7):
                one.seek(number=number)
                assert one.position().number == number
                assert (one.peek().number, one.lag()) == (number, 9 - number)
            one.seek(number=9)  # the next one to come
            assert list(one) == []
            for bad in (10, -1, 1 << 80, 2.0, "3", True):
                with pytest.raises(BadArgument):
                    one.seek(number=bad)
            assert one.position().number == 9
            one.seek(number=6)
    with make() as topic, topic.reader("r") as one:
        assert numbers(one) == [6, 7, 8]


@pytest.mark.req("Z6", "ZD11")
def test_seek_by_offset_goes_to_each_message_and_to_no_place_between(make):
    topic = make()
    for number in range(7):
        topic.append(bytes(number * 10))
    messages = list(topic)
    end = messages[-1].offset + 204 + 60
    with topic.reader("r") as one:
        for message in reversed(messages):
            one.seek(offset=message.offset)
            assert one.read() == message
        one.seek(offset=end)
        assert one.position().number == 7
        topic.append(b"more")
        assert one.read().offset == end
        for bad in (1, 203, messages[3].offset - 1, messages[3].offset + 1, end + 1, end + 204 + 5, 1 << 62, -1):
            with pytest.raises(BadArgument):
                one.seek(offset=bad)
        with pytest.raises(BadArgument, match="one of"):
            one.seek(offset=0, number=0)
        with pytest.raises(BadArgument, match="one of"):
            one.seek()


def at(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


@pytest.mark.req("Z6")
def test_seek_by_time_finds_the_first_message_since_then_in_the_first_block_that_was_written_since_then(tmp_path, clock):
    """What the original meant: blocks by the time of their last write, messages by their own time."""
    clock.ms = 1_000_000
    with Topic(tmp_path / "t", block_size=408, _files=NoSync()) as topic, topic.reader("r") as one:
        for _ in range(6):  # blocks of two messages: 1,001,000 and 1,002,000; 1,003,000 …
            clock.advance(1)
            topic.append(b"")
        for time_, number in [(0, 0), (1_001_000, 0), (1_001_001, 1), (1_002_000, 1), (1_002_001, 2), (1_003_000, 2)]:
            one.seek(time=at(time_))
            assert one.position().number == number
        for time_, number in [(1_004_500, 4), (1_006_000, 5), (1_006_001, 6), (2_000_000, 6)]:
            one.seek(time=at(time_))
            assert one.position().number == number
        clock.advance(1)
        topic.append(b"", timestamp=5)  # from elsewhere: older than the block says
        topic.append(b"")
        one.seek(time=at(1_006_500))
        assert one.position().number == 7
        for bad in ("2020-01-01", datetime(2020, 1, 1), 5, None):
            with pytest.raises(BadArgument):
                one.seek(time=bad)
        assert one.position().number == 7
    assert one.name == "r"


def test_seek_forgets_what_was_delivered_to_anybody(make):
    topic = filled(make(), 5)
    with topic.reader("r") as one, topic.reader("r") as other:
        mine, theirs = one.read_many(2), other.read_many(2)
        one.seek(number=1)
        with pytest.raises(CommitConflict):
            other.commit(*theirs)
        with pytest.raises(CommitConflict):
            one.commit(mine[1])
        assert one.commit(mine[0]) == 0  # it lies before the new place
        assert one.nack() == other.nack() == 0
        assert [(message.number, message.attempt) for message in other] == [(1, 1), (2, 1), (3, 1), (4, 1)]


# Counts


def test_lag_stats_and_position_say_what_waits(make):
    topic = make()
    for number in range(5):
        topic.append(b"x" * number, tag="odd" if number % 2 else "even", timestamp=1000 * number)
    with topic.reader("r") as one, topic.reader("odd", filter="odd") as odd:
        stats = one.stats()
        assert (stats.records, stats.bytes, stats.oldest) == (5, 10, at(0))
        assert (odd.stats().records, odd.stats().bytes, odd.stats().oldest) == (2, 4, at(1000))
        assert one.lag() == odd.lag() == 5  # lag does not look at tags
        messages = one.read_many(3)
        one.commit(messages[1])
        stats = one.stats()
        assert (stats.records, stats.bytes) == (4, 9)  # with what is delivered and not committed
        assert inspect_reader(topic.path, "r") == stats
        one.commit()
        assert (one.stats().records, one.stats().oldest, one.lag()) == (2, at(3000), 2)
        list(one)
        one.commit()
        stats = one.stats()
        assert (stats.records, stats.bytes, stats.oldest, stats.chunks, stats.on_disk) == (0, 0, None, 0, 0)
        assert one.lost == 0
    assert topic.stats().readers == {"r": 0, "odd": 5}


def test_what_a_reader_holds_can_be_looked_at_without_it(make, tmp_path):
    with make() as topic:
        filled(topic, 4)
        with topic.reader("r") as one:
            one.read_many(2)
            one.commit()
            assert inspect_reader(topic.path, "r").records == 2
            assert inspect_reader(topic.path, "unknown").records == 4
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("*")}
    assert inspect_reader(tmp_path / "t", "r").records == 2
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("*")} == before
    assert inspect_reader(tmp_path / "none", "r").records == 0
    assert not (tmp_path / "none").exists()


def test_the_counts_of_a_topic_are_those_of_its_messages(make):
    topic = make()
    stats = topic.stats()
    assert (stats.messages, stats.bytes, stats.blocks, stats.first, stats.next) == (0, 0, 1, 0, 0)
    assert (stats.oldest, stats.newest, stats.readers) == (None, None, {})
    assert not list(topic)
    assert len(topic) == 0
    assert topic  # an empty topic is one
    topic.append(b"12345", timestamp=77)
    topic.append_many([b"", b"678"])
    stats = topic.stats()
    assert (stats.messages, stats.bytes, stats.first, stats.next, len(topic)) == (3, 8, 0, 3, 3)
    assert stats.oldest == at(77)
    assert abs((stats.newest - datetime.now(UTC)).total_seconds()) < 60
    assert stats.on_disk > 0


# Readers as a whole


@pytest.mark.req("Z9", "ZD14")
def test_readers_are_listed_copied_and_deleted(make):
    topic = filled(make(), 5)
    assert topic.readers() == []
    with topic.reader("b", filter="x") as b, topic.reader("a"), topic.reader("ü ñ.1") as one:
        assert topic.readers() == ["a", "b", "ü ñ.1"]
        one.read_many(3)
        one.commit()
        assert one.read().number == 3  # delivered is not committed
        topic.copy_reader("ü ñ.1", "copy")
        topic.copy_reader("ü ñ.1", "b")  # moves one that is there; its filter stays
        assert b.filter == "x"
        assert b.position() == one.position()
        assert b.position().number == 3
        with topic.reader("copy") as copy:
            assert numbers(copy) == [3, 4]
        topic.delete_reader("ü ñ.1")
        for call in (one.read, one.commit, one.lag, lambda: one.seek(number=0), lambda: one.filter):
            with pytest.raises(Closed, match="deleted"):
                call()
        one.close()
        assert topic.readers() == ["a", "b", "copy"]
        for call in (topic.delete_reader, lambda name: topic.copy_reader(name, "z")):
            with pytest.raises(BadArgument, match="has no reader 'nobody'; it has a, b, copy"):
                call("nobody")
    with topic.reader("ü ñ.1") as one:
        assert one.read().number == 0
    assert not list(Path(topic.path).rglob("*.nak"))


def test_a_reader_that_was_deleted_and_made_anew_is_another_one_for_who_had_it(make):
    topic = filled(make(), 3)
    old = topic.reader("r")
    message = old.read()
    topic.delete_reader("r")
    with topic.reader("r", start=2) as new:
        with pytest.raises(Closed):
            old.commit(message)
        old.close()
        assert numbers(new) == [2]


def test_deleting_a_reader_leaves_none_of_its_files(make):
    topic = filled(make(), 6)
    before = sorted(path for path in Path(topic.path).rglob("*"))
    with topic.reader("r", start=2) as one:
        one.read()
        one.lease("k", max_records=2)
        one.lease("k2", max_records=1).to_dead_letters("bad")
    topic.delete_reader("r")
    assert sorted(path for path in Path(topic.path).rglob("*")) == before


def test_a_temporary_reader_is_deleted_when_its_last_consumer_closes(make):
    topic = filled(make(), 2)
    one = topic.reader("r", temporary=True)
    other = topic.reader("r")
    assert one.read().number == 0
    one.close()
    assert topic.readers() == ["r"]
    assert numbers(other) == [0, 1]
    other.close()
    assert topic.readers() == []
    with topic.reader("r", temporary=True) as one:
        assert one.read().number == 0


def test_a_temporary_reader_whose_process_was_killed_is_deleted_by_the_next_who_appends_or_trims(make):
    topic = filled(make(delete_committed=True), 4)
    consumer = program(
        """
        import sys
        from qewqew_core import Topic
        reader = Topic(sys.argv[1]).reader("gone", temporary=True)
        print(reader.read().number, flush=True)
        sys.stdin.read()
        """,
        topic.path,
    )
    try:
        assert consumer.stdout.readline() == "0\n"
        topic.trim()
        assert topic.readers() == ["gone"]
    finally:
        consumer.kill()
        consumer.communicate()
    topic.trim()
    assert topic.readers() == []


# Filters


@pytest.mark.req("Z8", "ZD10")
def test_a_filter_change_acts_on_the_next_message_also_when_somebody_else_makes_it(make):
    topic = make()
    topic.append_many(Message(b"%d" % number, tag="abc"[number % 3]) for number in range(30))
    with topic.reader("r", filter="a") as one, topic.reader("r") as other:
        assert other.filter == "a"
        assert [one.read().tag for _ in range(2)] == ["a", "a"]
        other.set_filter("b")
        assert (one.filter, one.read().number) == ("b", 4)
        one.set_filter("c;b")
        assert numbers(other.read_many(2)) == [5, 7]
        changing = """
        import sys
        from qewqew_core import Topic
        with Topic(sys.argv[1]) as topic, topic.reader("r") as reader:
            reader.set_filter("*" if sys.argv[2:] else None)
        """
        assert program(changing, topic.path).wait() == 0
        assert (one.filter, numbers(one.read_many(2))) == (None, [8, 9])
        topic.append(b"untagged")
        assert program(changing, topic.path, 1).wait() == 0
        assert numbers(one) == list(range(10, 30))


def test_messages_that_a_filter_passed_over_come_again_only_by_seek(make):
    topic = make()
    topic.append_many(Message(b"", tag="ab"[number % 2]) for number in range(6))
    with topic.reader("r", filter="a") as one:
        assert numbers(one.read_many(2)) == [0, 2]
        one.commit()
        one.set_filter("b")
        assert numbers(one) == [3, 5]
        one.commit()
        one.seek(number=0)
        assert numbers(one) == [1, 3, 5]


@pytest.mark.req("Z8", "ZD9")
def test_a_filter_is_kept_until_it_is_changed_or_cleared(make):
    with make() as topic:
        topic.append_many([Message(b"", tag="a"), b"untagged", Message(b"", tag="ä.b")])
        topic.reader("r", filter="ä.*").close()
    with make() as topic:
        with topic.reader("r") as one:
            assert one.filter == "ä.*"
            assert one.read().number == 2
        with topic.reader("r", filter="a") as one:  # also where the reader is there already
            assert one.filter == "a"
        with topic.reader("r", filter="  ") as one:
            assert one.filter is None
            one.seek(number=0)
            assert numbers(one) == [0, 1, 2]
    with make() as topic, topic.reader("r") as one:
        assert one.filter is None
        one.set_filter("é" * 63 + "x")
    with make() as topic, topic.reader("r") as one:
        assert one.filter == "é" * 63 + "x"
        one.set_filter("")
    with make() as topic, topic.reader("r") as one:
        assert one.filter is None


@pytest.mark.req("Z8", "ZD10")
@pytest.mark.parametrize("text", ["x" * 128, "é" * 64, 5, b"a", "\ud800"])
def test_a_filter_that_cannot_be_one_changes_nothing(topic, text):
    filled(topic, 1)
    with topic.reader("r", filter="a") as one:
        with pytest.raises(BadArgument):
            one.set_filter(text)
        assert one.filter == "a"
    with pytest.raises(BadArgument):
        topic.reader("new", filter=text)
    assert topic.readers() == ["r"]


def test_a_filter_that_lets_nothing_through_moves_the_reader_past_what_it_holds_back(make):
    """Or it would be read again by each call, and blocks would be held back for ever."""
    topic = make()
    topic.append_many(Message(b"x" * 50, tag="no") for _ in range(50))
    with topic.reader("r", filter="yes") as one:
        with pytest.raises(Empty):
            one.read()
        assert one.lag() == 0
        topic.append(b"", tag="yes")
        assert one.read().number == 50


# Bodies, ids and tags


def test_empty_and_binary_bodies_are_told_apart_and_come_back_whole(make):
    every = [b"", b"\0", b"\0" * 204, bytes(range(256)), os.urandom(70_000), b"\xff" * 300_000, b""]
    with make() as topic:
        topic.append_many(every)
        for body in every:
            topic.append(body)
    with make() as topic, topic.reader("r") as one:
        assert bodies(one) == every * 2
        assert topic.verify().ok


@pytest.mark.req("Z5", "ZD9")
@pytest.mark.parametrize("letter", ["a", "é", "日", "🐘", "\0"])
def test_ids_and_tags_are_text_of_any_kind_up_to_their_limit_in_bytes(make, letter):
    topic = make()
    size = len(letter.encode())
    id, tag = letter * (39 // size), letter * (127 // size)
    topic.append(b"x", id=id, tag=tag)
    with topic.reader("r", filter=tag) as one:
        message = one.read()
        assert (message.id, message.tag) == (id, tag)
    for more in ({"id": id + letter}, {"tag": tag + letter}):
        with pytest.raises(BadArgument, match="bytes of UTF-8"):
            topic.append(b"x", **more)
    topic.append(b"y", id="", tag="")
    assert [(message.id, message.tag) for message in topic] == [(id, tag), (None, None)]


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_a_body_of_a_hundred_megabytes(tmp_path, sync):
    body = os.urandom(1 << 20) * 100
    with Topic(tmp_path / "t", sync=sync, _files=NoSync()) as topic:
        topic.append(b"before")
        topic.append(body, tag="big")
        topic.append(b"after")
        assert topic.stats().blocks == 2
        with topic.reader("r") as one:
            assert one.read().body == b"before"
            assert one.read().body == body
            assert one.read().body == b"after"
        with topic.reader("small", filter="none") as one:
            assert list(one) == []
        assert topic.verify().ok


@pytest.mark.req("ZD11")
@pytest.mark.soak
def test_bodies_up_to_two_gibibytes_and_blocks_that_end_there(tmp_path):
    """The largest body, which fills a block by itself; and a commit of more than a block can hold, which goes to several."""
    largest = zbus.LARGEST_BODY
    with Topic(tmp_path / "t", sync="never") as topic:
        topic.append(b"before")
        body = bytearray(largest)
        body[:8], body[-8:] = b"begins..", b"....ends"
        assert topic.append(body) == 1
        with pytest.raises(RecordTooLarge):
            topic.append(body + b"x")
        del body
        topic.append(b"after")
        assert topic.stats().blocks == 3
        with topic.reader("r") as one:
            assert one.read().body == b"before"
            found = one.read().body
            assert (len(found), found[:8], found[-8:], found.count(0)) == (largest, b"begins..", b"....ends", largest - 16)
            del found
            assert one.read().body == b"after"
        with topic.session() as session:
            for number in range(3):
                session.append(bytes([number]) * (1 << 30))
        assert topic.stats().blocks == 5  # the first of them goes to the block of "after"; two do not fit into one
        assert [(len(message.body), message.body[:1]) for message in topic if message.number > 2] == [
            (1 << 30, bytes([number])) for number in range(3)
        ]
        assert topic.verify().ok


@pytest.mark.req("ZD11")
def test_what_does_not_fit_into_one_block_goes_to_several_and_is_still_one_commit(tmp_path, monkeypatch):
    """The limit of 2 GiB, made small."""
    monkeypatch.setattr(zbus, "LARGEST_BLOCK", 1000)
    with Topic(tmp_path / "t", block_size=700, _files=NoSync()) as topic:
        topic.append(b"first")
        assert topic.append_many([bytes([number]) * 100 for number in range(9)], key="k") == 9
        assert topic.append_many([], key="k") == 9
        assert numbers(topic) == list(range(10))
        with topic.reader("r") as one:
            assert bodies(one) == [b"first", *(bytes([number]) * 100 for number in range(9))]
        sizes = [path.stat().st_size for path in sorted((tmp_path / "t" / "data").glob("*.zbus"))]
        assert sizes == [209 + 2 * 304, 3 * 304, 3 * 304, 304]
    with Topic(tmp_path / "t", block_size=700) as topic:
        assert len(topic) == 10
        assert topic.verify().ok


# Dialects


@pytest.mark.req("Z3")
def test_dialect_c_is_written_and_read_with_its_checksums_and_without_corr_offset(make):
    with make(dialect="C") as topic:
        topic.append(b"body", tag="a.b", id="i", timestamp=123)
        topic.append_many([b"", b"x" * 400])
        with pytest.raises(BadArgument, match="corr_offset"):
            topic.append(b"x", corr_offset=1)
    with make() as topic:  # a topic keeps its dialect
        assert topic.dialect == "C"
        topic.append(b"more")
        assert next(iter(topic)) == Message(b"body", "a.b", "i", 0, 123, 0, 0)
        with topic.reader("r") as one:
            assert bodies(one) == [b"body", b"", b"x" * 400, b"more"]
        assert topic.verify().ok
    data = b"".join(path.read_bytes() for path in sorted(Path(topic.path, "data").glob("*.zbus")))
    at = 0
    for _ in range(4):
        assert zbus.crc_is_right(data, at)
        at += 204 + zbus.length_at(data, at)
    assert at == len(data)


@pytest.mark.req("Z1")
@pytest.mark.parametrize("wanted", ["A", None])
def test_dialect_b_is_the_default_and_what_a_is_read_and_written_as(make, wanted):
    with make(dialect=wanted) as topic:
        topic.append(b"x", corr_offset=5)
        assert topic.dialect == "B"
    with make(dialect="B") as topic:
        assert next(iter(topic)).corr_offset == 5


@pytest.mark.parametrize(("written", "wanted"), [("C", "B"), ("C", "A"), ("B", "C"), ("A", "C")])
def test_a_topic_is_not_opened_in_another_dialect_than_its_own(make, written, wanted):
    """The files do not say which one they are in; our log does."""
    with make(dialect=written) as topic:
        topic.append(b"x")
        for _ in range(2):
            with pytest.raises(BadArgument, match=f"is in dialect {topic.dialect}, not {'B' if wanted == 'A' else wanted}"):
                make(dialect=wanted)
            topic.close()
    before = of_zbus(Path(topic.path))
    with pytest.raises(BadArgument):
        make(dialect=wanted)
    assert of_zbus(Path(topic.path)) == before
    with make() as topic:
        assert bodies(topic) == [b"x"]


@pytest.mark.req("Z3")
@pytest.mark.parametrize("wanted", [None, "A", "B"])
def test_messages_of_dialect_c_are_not_taken_for_those_of_another(make, wanted):
    """Where a server wrote them, and there is no log of ours: the checksum of a message's head tells."""
    with make(dialect="C") as topic:
        topic.append(b"x")
    forget_log(Path(topic.path))
    with pytest.raises(BadArgument, match='written in dialect C; open it with dialect="C"'):
        make(dialect=wanted)
    with make(dialect="C") as topic:
        assert bodies(topic) == [b"x"]


def test_messages_of_dialect_b_are_not_taken_for_those_of_c(make):
    with make() as topic:
        topic.append(b"x")
    forget_log(Path(topic.path))
    with pytest.raises((BadArgument, Corrupt), match="dialect C"):
        make(dialect="C")
    with make() as topic:
        assert bodies(topic) == [b"x"]


# The header


@pytest.mark.req("Z9", "ZD9")
def test_mask_creator_and_extensions_are_kept(make):
    with make() as topic:
        header = topic.header()
        assert (header.mask, header.creator, header.ext) == (0, "", ("", "", "", ""))
        assert abs(header.created / 1000 - time.time()) < 60
        topic.set_mask(zbus.PAUSE | zbus.ACK_REQUIRED)
        topic.set_creator("größe 日本")
        for number in range(4):
            topic.set_extension(number, f"ext {number}" + "x" * 100)
        topic.set_extension(1, "short")
        topic.set_extension(2, None)
        topic.set_extension(3, "🐘" * 31 + "abc")
        topic.append(b"x")
    with make() as topic:
        header = topic.header()
        assert (header.mask, header.creator) == (72, "größe 日本")
        assert header.ext == ("ext 0" + "x" * 100, "short", "", "🐘" * 31 + "abc")
        topic.set_creator(None)
        assert topic.header().creator == ""


@pytest.mark.req("Z5", "ZD9", "ZD10")
@pytest.mark.parametrize(
    "call",
    [
        lambda topic: topic.set_mask(1 << 31),
        lambda topic: topic.set_mask("1"),
        lambda topic: topic.set_mask(True),
        lambda topic: topic.set_creator("x" * 128),
        lambda topic: topic.set_creator("é" * 64),
        lambda topic: topic.set_creator("x" * 259),
        lambda topic: topic.set_creator("x" * (1 << 20)),
        lambda topic: topic.set_creator(b"x"),
        lambda topic: topic.set_extension(4, "x"),
        lambda topic: topic.set_extension(-1, "x"),
        lambda topic: topic.set_extension(0, "x" * 128),
        lambda topic: topic.set_extension(0, "é" * 129),
        lambda topic: topic.set_extension(0, "x" * (1 << 20)),
        lambda topic: topic.set_extension("0", "x"),
    ],
)
def test_what_does_not_fit_into_the_header_changes_nothing(topic, call):
    topic.set_creator("before")
    topic.set_extension(0, "before")
    before, header = of_zbus(Path(topic.path)), topic.header()
    with pytest.raises(BadArgument):
        call(topic)
    assert of_zbus(Path(topic.path)) == before
    assert topic.header() == header


# Checking


@pytest.mark.req("Z15", "ZD4")
@pytest.mark.parametrize("dialect", ["B", "C"])
def test_verify_and_leases_find_flipped_bits_in_heads_and_bodies_with_path_and_offset(make, dialect):
    with make(dialect=dialect) as topic:
        for number in range(5):
            topic.append(b"body %d" % number)
        seen: list[tuple[int, int]] = []
        report = topic.verify(lambda done, total: seen.append((done, total)))
        assert report.ok
        assert (report.records, report.bytes, report.unchecked) == (5, 30, 0)
        assert seen[-1] == (5 * 210, 5 * 210)
    block = sorted(Path(topic.path, "data").glob("*.zbus"))[0]
    good = block.read_bytes()
    for at_ in (0, 20, 100, 204, 209):
        block.write_bytes(good[:at_] + bytes([good[at_] ^ 1]) + good[at_ + 1 :])
        with make() as topic, topic.reader("r") as one:
            report = topic.verify()
            assert len(report.problems) == 1
            assert str(block) in report.problems[0]
            assert "offset" in report.problems[0]
            with pytest.raises(Corrupt):
                one.lease("k")
    block.write_bytes(good)
    with make() as topic:
        assert topic.verify().ok


def test_verify_and_stats_find_nothing_wrong_while_a_writer_appends_and_removes(tmp_path):
    """They take no lock: what changes between two looks must not pass for damage."""
    with Topic(tmp_path / "t", block_size=2000, sync="never", max_records=50, slow_readers="move") as topic, topic.reader("r"):
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                topic.append_many([b"x" * 50] * 3)

        writer = threading.Thread(target=work)
        writer.start()
        try:
            with Topic(tmp_path / "t", sync="never") as other:
                rounds, stats, until = 0, other.stats(), time.monotonic() + 60
                while rounds < 30 or stats.first <= 100:  # the writer's first commit waits for the disk
                    assert time.monotonic() < until
                    rounds += 1
                    report = other.verify()
                    assert report.problems == []
                    stats = other.stats()
                    assert 0 <= stats.messages <= 200
                    assert stats.bytes >= 50 * stats.messages
                    assert stats.readers["r"] <= stats.messages
                    assert 0 <= len(other) <= 200
        finally:
            done.set()
            writer.join()


@pytest.mark.req("ZD4")
@pytest.mark.parametrize("dialect", ["B", "C"])
def test_a_block_file_that_is_empty_or_short_is_an_error_and_never_zeros(make, dialect):
    with make(dialect=dialect) as topic:
        for number in range(5):
            topic.append(b"body %d" % number)
    block = sorted(Path(topic.path, "data").glob("*.zbus"))[0]
    good = block.read_bytes()
    for size in (0, len(good) - 20, len(good) - 6, len(good) - 1):
        block.write_bytes(good[:size])
        with pytest.raises(Corrupt) as caught, make() as topic, topic.reader("r") as one:
            one.read_many(10)
        assert caught.value.path == str(block)
        with contextlib.suppress(Corrupt), make() as topic:  # of the last block, opening says it
            assert not topic.verify().ok
    block.write_bytes(good)
    with make() as topic, topic.reader("r") as one:
        assert len(list(one)) == 5


@pytest.mark.parametrize("log_bytes", [1, 64 << 10, 1 << 20])
def test_the_log_grows_by_as_much_as_it_may_and_is_cut_back(tmp_path, log_bytes):
    sizes = []
    with Topic(tmp_path / "t", sync="never", log_bytes=log_bytes) as topic:
        for _ in range(1500):
            topic.append(b"x" * 1000)
            sizes.append((tmp_path / "t" / "t.wal").stat().st_size)
    assert log_bytes < max(sizes) <= log_bytes + 4000 + 2 * SPARE  # a snapshot, a commit, and what is kept free


# Processes


def test_a_forked_child_is_refused_and_costs_the_parent_nothing(make):
    topic = filled(make(), 3)
    with topic.reader("r") as one, topic.session() as session:
        assert one.read().number == 0
        session.append(b"parent")
        child = os.fork()
        if not child:
            code = 1
            try:
                refused = 0
                for call in (lambda: topic.append(b"x"), one.read, lambda: session.append(b"x"), session.commit, topic.stats):
                    try:
                        call()
                    except Closed:
                        refused += 1
                topic.close()
                one.close()
                code = 0 if refused == 5 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.commit() == 1
        assert one.commit() == 1
        assert numbers(one) == [1, 2, 3]
        with pytest.raises(Locked):
            Topic(topic.path, lock_timeout=0).append(b"x")
