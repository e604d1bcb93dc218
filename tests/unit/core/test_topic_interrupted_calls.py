"""Ctrl-C at any moment of a call on a topic, a reader or a session: it has happened or not, at once, and nothing is half done."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import NoSync
from interrupting import Interrupt, interrupts
from views import View, differences, is_between, view
from work import LOG_BYTES
from work import kind as kind  # a fixture

from qewqew_core import Broken, Closed, Topic
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic_session import TopicSession

# A `__del__` that meets an object which an interrupt has left half made.
pytestmark = pytest.mark.filterwarnings(r"error:[\s\S]*AttributeError:pytest.PytestUnraisableExceptionWarning")

MODULES = (
    "topic/topic",
    "topic/writer",
    "topic/blocks",
    "topic/outgoing",
    "topic/topic_log",
    "topic/topic_session",
    "topic/reader",
    "disk/engine",
    "topic/shared_log",
    "topic/deliveries",
    "topic/participant",
    "topic/reader_batches",
    "topic/reader_files",
    "topic/reader_log",
    "disk/journal",
    "batch/leases",
    "batch/batch",
)
# Not while an error is handled, or locks are given back: that is what would be interrupted a second time.
PASSING = ("poison", "__init__", "enter", "leave", "_release", "release")
WHOLE = Interrupt(1 << 30, MODULES, PASSING)


def append(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.append(b"new", tag="a")


def append_many_with_a_new_block(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.append_many([b"%d" % number * 90 for number in range(9)], key="key")


def commit(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.commit()


def nack(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.nack()


def seek(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.seek(number=5)


def set_filter(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.set_filter("a")


def lease(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.lease("key", max_records=4)


def end_leases(topic: Topic, reader: Reader, session: TopicSession) -> None:
    reader.batches()[0].to_dead_letters("why")


def commit_session(topic: Topic, reader: Reader, session: TopicSession) -> None:
    session.commit(key="key")


def trim(topic: Topic, reader: Reader, session: TopicSession) -> None:
    topic.trim()


@pytest.mark.parametrize("kind", ["topic, log carries", "topic, blocks carry"], indirect=True)
@pytest.mark.parametrize(
    "operation", [append, append_many_with_a_new_block, commit, nack, lease, end_leases, commit_session, trim]
)
def test_a_call_that_was_interrupted_anywhere_has_happened_or_not(tmp_path, kind, every, operation):
    before, after = interrupted(tmp_path / "whole", operation, WHOLE)
    assert (before == after) is (operation is nack)
    for interrupt in interrupts(every, MODULES, quick=30, full=10, passing=PASSING):
        assert interrupted(tmp_path / "t", operation, interrupt)[0] == before
        with Topic(tmp_path / "t" / "t", _files=NoSync()) as topic:
            for name in topic.readers():
                topic.reader(name).close()
            seen = view(topic)
            assert is_between(seen, before, after), f"{interrupt.where}: {differences(seen, [before, after])}"
            assert topic.verify().problems == []
            with topic.reader("r") as reader:
                assert sorted(one.number for one in reader) == sorted(seen.readers["r"].pending)
        shutil.rmtree(tmp_path / "t")


@pytest.mark.parametrize("kind", ["topic, log carries", "topic, blocks carry"], indirect=True)
@pytest.mark.parametrize(
    "operation", [append, append_many_with_a_new_block, commit, nack, seek, set_filter, lease, end_leases, commit_session, trim]
)
def test_what_is_seen_after_an_interrupt_stays_true(tmp_path, kind, every, operation):
    """Whoever looks sees at once what a new opening finds; and what is appended then makes nothing appear but itself."""
    going_on = 0

    def use(topic: Topic, reader: Reader, session: TopicSession) -> None:
        nonlocal going_on, seen
        try:
            if operation is commit_session:
                session.commit(key="key")  # it has not returned, has it? so again
                assert [one.body for one in topic].count(b"in session") == 1
            records = reader.stats().records
            seen = view(topic)
            assert (topic.append(b"later"), len(topic)) == (seen.next, seen.next + 1 - seen.first)
        except Broken:
            seen = None
            return
        going_on += 1
        numbers = seen.readers["r"].pending | ({seen.next} if seen.readers["r"].filter is None else set())
        readers = {
            name: one if one.filter else one._replace(pending=one.pending | {seen.next}) for name, one in seen.readers.items()
        }
        messages = seen.messages | {seen.next: (b"later", None)}
        assert (records, reader.stats().records) == (len(seen.readers["r"].pending), len(numbers))
        seen = seen._replace(next=seen.next + 1, messages=messages, readers=readers)

    for interrupt in interrupts(every, MODULES, quick=30, full=10, passing=PASSING):
        seen: View | None = None
        interrupted(tmp_path / "t", operation, interrupt, use)
        with Topic(tmp_path / "t" / "t", _files=NoSync()) as topic:
            for name in topic.readers():
                topic.reader(name).close()
            if seen is not None:  # else it was broken: it has happened or not
                found = view(topic)
                assert found == seen, f"{interrupt.where}: {differences(found, [seen])}"
        shutil.rmtree(tmp_path / "t")
    assert going_on > 0


def interrupted(
    folder: Path, operation: Callable[..., None], interrupt: Interrupt, then: Callable[..., None] = lambda *_: None
) -> tuple[View, View]:
    """The topic before and after the operation; ``then`` uses it once more."""
    folder.mkdir()
    topic = Topic(folder / "t", block_size=600, max_records=4, slow_readers="move", log_bytes=LOG_BYTES, _files=NoSync())
    topic.max_records = None
    topic.append_many([b"old %d" % number for number in range(6)])
    topic.append(b"last")
    reader, other, session = topic.reader("r"), topic.reader("s"), topic.session()
    if operation is not trim:  # a leased batch keeps its blocks
        reader.lease("first", max_records=1)
    reader.read_many(2)
    session.read_many(reader, 1)
    session.read_many(other, 2)
    session.append_many([b"in session", b"spilled" * 30])
    before = view(topic)
    if operation is trim:
        topic.max_records = 1
        reader.seek(number=6)
        before = view(topic)
    try:
        with interrupt:
            operation(topic, reader, session)
    except (KeyboardInterrupt, Broken):
        pass
    topic.max_records = None
    after = view(topic) if interrupt.left > 0 else before
    then(topic, reader, session)
    for one in (session, reader, other, topic):
        with contextlib.suppress(Broken, Closed):
            one.close()
    return before, after
