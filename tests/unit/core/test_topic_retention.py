"""Retention: which blocks of a topic are removed, which never are, and what readers see of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import BatchConflict, Full, Locked, Message, Topic, inspect_reader
from qewqew_core.formats import zbus

Make = Callable[..., Topic]
BODY = b"x" * 46  # a message of 250 bytes: two fill a block


@pytest.fixture(params=["commit", "never"])
def make(request, tmp_path) -> Iterator[Make]:
    """Opens the one topic of the test, with two messages to a block."""
    opened: list[Topic] = []

    def one(**more: object) -> Topic:
        opened.append(Topic(tmp_path / "t", **{"block_size": 500, "sync": request.param, "_files": NoSync(), **more}))
        return opened[-1]

    yield one
    for one_ in opened:
        one_.close()


def filled(one: Topic, count: int) -> Topic:
    for _ in range(count):
        one.append(BODY)
    return one


def numbers(messages: object) -> list[int]:
    return [message.number for message in messages]


def files(one: Topic) -> list[str]:
    return sorted(path.name for path in Path(one.path, "data").iterdir())


def blocks(*numbers: int) -> list[str]:
    return [zbus.block_name(500 * number) for number in numbers]


# What is removed


def test_without_a_bound_nothing_is_ever_removed(make):
    with filled(make(), 20) as one:
        assert one.trim() == 0
    with make() as one:
        assert numbers(one) == list(range(20))


@pytest.mark.req("ZD11")
def test_blocks_beyond_max_records_are_removed_oldest_first_as_blocks_fill(make):
    """At least so many are kept: a block goes when those behind it are enough."""
    with make(max_records=5) as one:
        for number in range(40):
            assert one.append(BODY) == number
            assert min(number + 1, 5) <= len(one) <= 7
            assert numbers(one) == list(range(one.stats().first, number + 1))
    with make() as one:
        assert numbers(one) == [34, 35, 36, 37, 38, 39]
        assert [name for name in files(one) if name.endswith(".zbus")] == blocks(17, 18, 19)
        index = zbus.unpack_index(Path(one.path, "t.idx").read_bytes(), "t.idx")
        assert index == (1, 3, 17, 40)


@pytest.mark.req("Z10")
def test_blocks_beyond_max_bytes_are_removed(make):
    with make(max_bytes=1200) as one:
        for number in range(20):
            one.append(BODY)
            size = sum(path.stat().st_size for path in Path(one.path, "data").glob("*.zbus"))
            assert min(250 * (number + 1), 1200) <= size <= 1750
    with make(max_bytes=1) as one:
        assert one.trim() == 4
        assert numbers(one) == [18, 19]  # the last block stays


@pytest.mark.req("Z10")
def test_blocks_that_are_older_than_max_age_are_removed(make, clock):
    start = clock.ms
    hour = 3_600_000
    with make(max_age=timedelta(hours=1)) as one:
        for number in range(6):
            clock.ms = start + 600_000 * number
            one.append(BODY, timestamp=5)  # what counts is when it was appended
        for block, written in enumerate([600_000, 1_800_000]):
            clock.ms = start + written + hour
            assert one.trim() == 0  # an hour old, to the millisecond
            clock.ms += 1
            assert one.trim() == 2
            assert numbers(one)[0] == 2 * block + 2
        clock.ms += 100 * hour
        assert one.trim() == 0
        assert numbers(one) == [4, 5]  # the last block stays, however old
        assert one.append(BODY) == 6
        assert numbers(one) == [6]  # and goes once there is another


def test_each_bound_alone_removes(make):
    """More than one bound: a block goes as soon as one of them says so."""
    with make(max_age=timedelta(days=1), max_bytes=1 << 30, max_records=2) as one:
        filled(one, 9)
        assert numbers(one) == [6, 7, 8]


@pytest.mark.req("ZD11")
def test_trim_says_how_many_messages_are_gone_and_close_removes_as_well(make):
    filled(make(), 11).close()
    with make(max_records=3) as one:
        assert len(one) == 11
        assert one.trim() == 8
        assert one.trim() == 0
        assert numbers(one) == [8, 9, 10]
    with make() as one:
        filled(one, 3)
    with make(max_records=1) as one:
        one.append(BODY)
        assert len(one) == 1
    filled(make(), 3).close()
    one = make(max_records=2)
    one.set_mask(1)  # takes the writer's lock, and appends nothing
    one.close()
    with make() as one:
        assert len(one) == 2


@pytest.mark.req("Z15")
def test_checksums_of_blocks_go_with_them(make):
    for _ in range(3):  # each opening that finds full blocks stores the sums of those
        filled(make(), 4).close()
    with make(max_records=1) as one:
        assert any(name.endswith(".sums") for name in files(one))
        one.trim()
        assert files(one) == blocks(5)
        assert one.verify().ok


def test_only_who_appends_may_remove(make):
    one, other = filled(make(), 8), make(max_records=1, lock_timeout=0)
    with pytest.raises(Locked):
        other.trim()
    assert len(one) == 8
    one.close()
    assert other.trim() == 6


# Readers


def test_a_slow_reader_holds_blocks_back_until_it_has_committed(make):
    with make(max_records=2) as one, one.reader("r") as slow, one.reader("fast", auto_commit=True) as fast:
        filled(one, 10)
        list(fast)
        assert one.trim() == 0
        messages = slow.read_many(5)
        assert one.trim() == 0  # delivered is not committed
        slow.commit(*messages[1:])
        assert one.trim() == 0
        slow.commit(messages[0])
        assert one.trim() == 4
        assert numbers(slow) == [5, 6, 7, 8, 9]
        assert slow.lost == fast.lost == 0
        slow.commit()
        assert one.trim() == 4
        assert numbers(one) == [8, 9]


def test_a_reader_at_the_end_of_a_block_does_not_hold_that_block(make):
    with make(max_records=1) as one, one.reader("r") as reader:
        filled(one, 5)
        reader.read_many(2)
        reader.commit()
        assert reader.position()[:2] == (0, 500)
        assert one.trim() == 2
        assert reader.lost == 0
        assert numbers(reader) == [2, 3, 4]


def test_a_reader_that_was_never_opened_here_holds_blocks_back_too(make):
    """One that only a zbus server has used: its place stands in its .rdx."""
    with make() as one:
        filled(one, 10)
        Path(one.path, "reader", "r.rdx").write_bytes(zbus.new_reader(0, 2, 250))
    with make(max_records=1) as one:
        assert one.trim() == 4
        with one.reader("r") as reader:
            assert numbers(reader) == [5, 6, 7, 8, 9]


@pytest.mark.req("Z10")
def test_slow_readers_are_moved_on_and_what_they_lost_is_counted(make):
    with make(max_records=4, slow_readers="move") as one:
        filled(one, 4)
        with one.reader("slow") as slow, one.reader("other") as other:
            had = slow.read_many(3)
            slow.commit(had[1])
            filled(one, 8)
            assert one.trim() == 2
            assert numbers(one) == [8, 9, 10, 11]
            assert inspect_reader(one.path, "slow").records == 4
            assert one.stats().readers == {"slow": 4, "other": 4}
            assert (slow.position().number, slow.lag(), slow.lost) == (8, 4, 7)  # 0, 2 and 3 … 7
            assert (other.lost, other.stats().records) == (8, 4)
            assert slow.commit(*had) == 0  # they are no more, and that is no error
            assert slow.nack() == 0
            assert numbers(slow.read_many(2)) == [8, 9]
            filled(one, 2)
            assert slow.commit() == 2
            assert (slow.lost, slow.position().number) == (7, 10)
            assert slow.read().number == 10
            filled(one, 4)
            assert numbers(one) == [12, 13, 14, 15, 16, 17]
            assert slow.commit() == 1  # it had 10, and has worked on it; 11 is lost
            assert numbers(slow) == [12, 13, 14, 15, 16, 17]
        with one.reader("slow") as slow:
            assert slow.lost == 8


def test_a_reader_in_another_topic_object_is_moved_while_it_reads(make):
    """Blocks vanish under it: it goes on with the oldest message that is there, and no error comes up."""
    one, other = make(max_records=20, slow_readers="move"), make()
    done = threading.Event()
    seen: list[int] = []

    def work() -> None:
        while not done.is_set():
            one.append_many([BODY] * 2)

    filled(one, 4)
    with other.reader("r", auto_commit=True) as reader:
        writer = threading.Thread(target=work)
        writer.start()
        try:
            for _ in range(300):
                seen += numbers(reader.read_many(3))
        finally:
            done.set()
            writer.join()
        seen += numbers(reader)
        assert seen == sorted(set(seen))
        assert len(seen) + reader.lost == seen[-1] + 1 == one.stats().next


def test_filters_do_not_hold_blocks_back_once_they_were_passed(make):
    with make(max_records=1) as one, one.reader("r", filter="yes") as reader:
        filled(one, 6)
        assert one.trim() == 0
        assert reader.read_many(1) == []
        assert one.trim() == 4
        one.append_many([Message(BODY, tag="yes")])
        assert numbers(reader) == [6]
        assert reader.lost == 0


# What every reader has committed


@pytest.mark.req("Z10")
def test_what_all_readers_have_committed_is_removed(make):
    """A topic with one reader and this is a queue for records of any size."""
    with make(delete_committed=True) as one:
        filled(one, 6)
        assert len(one) == 6  # without a reader everything stays
        with one.reader("a") as a, one.reader("b") as b:
            a.read_many(6)
            a.commit()
            assert one.trim() == 0
            b.commit(*b.read_many(3))
            assert one.trim() == 2
            b.commit(*b.read_many(3))
            assert one.trim() == 2
            assert numbers(one) == [4, 5]  # the last block stays
            filled(one, 2)
            assert numbers(one) == [6, 7]
        one.delete_reader("b")
        with one.reader("a") as a:
            a.commit(*a.read_many(1))
            assert one.trim() == 0
            a.commit(*a.read_many(1))
    with make(delete_committed=True) as one:
        filled(one, 1)
        assert numbers(one) == [8]


def test_without_readers_delete_committed_removes_nothing(make):
    with make(delete_committed=True) as one:
        filled(one, 6)
        assert one.trim() == 0
        with one.reader("r"):
            pass
        one.delete_reader("r")
        assert one.trim() == 0
        assert len(one) == 6


@pytest.mark.parametrize("slow_readers", ["hold", "move"])
def test_delete_committed_never_costs_a_reader_anything(make, slow_readers):
    with make(delete_committed=True, slow_readers=slow_readers) as one, one.reader("r") as reader:
        found = []
        for _ in range(30):
            filled(one, 3)
            messages = reader.read_many(2)
            found += numbers(messages)
            reader.commit(*messages)
        found += numbers(reader)
        reader.commit()
        assert found == list(range(90))
        assert reader.lost == 0
        one.trim()
        assert one.stats().blocks == 1


# Batches


@pytest.mark.parametrize("slow_readers", ["hold", "move"])
@pytest.mark.parametrize("returned", [False, True])
def test_no_block_of_a_batch_that_is_leased_or_returned_is_removed(make, slow_readers, returned):
    with make(slow_readers=slow_readers) as one, one.reader("r") as reader:
        filled(one, 10)
        one.max_records = 1
        first = reader.lease("first", max_records=1)
        second = reader.lease("second", max_records=2)
        reader.commit(*reader.read_many(100))
        if returned:
            first.nack("not now")
            second.nack()
        assert one.trim() == 0
        if returned:
            first, second = reader.lease("again"), reader.lease("again too")
        assert numbers(first.messages()) == [0]
        first.ack()
        assert one.trim() == 0  # the second begins in the same block
        second.ack()
        assert one.trim() == 8
        assert reader.lost == 0


def test_the_oldest_batch_of_several_holds_wherever_its_ranges_lie(make):
    """A batch that begins with a redelivery has older messages than the place where the next one was cut."""
    with make(slow_readers="move") as one, one.reader("r") as reader:
        filled(one, 8)
        one.max_records = 1
        messages = reader.read_many(6)
        reader.commit(*messages[:2], *messages[3:])
        reader.nack(messages[2])
        batch = reader.lease("k", max_records=2)
        assert numbers(batch.messages()) == [2, 6]
        assert one.trim() == 2
        assert numbers(one) == [2, 3, 4, 5, 6, 7]
        batch.ack()
        assert one.trim() == 4


@pytest.mark.parametrize("end", ["acked", "dead"])
def test_the_messages_of_a_batch_stay_readable_when_their_blocks_are_removed(make, end):
    """Its files are hard links to the blocks."""
    with make(max_records=1) as one, one.reader("r") as reader:
        filled(one, 6)
        batch = reader.lease("k", max_records=3)
        if end == "dead":
            batch.to_dead_letters("bad")
        else:
            batch.ack()
        reader.commit(*reader.read_many(10))
        assert one.trim() == 4
        assert numbers(one) == [4, 5]
        assert numbers(batch.messages()) == [0, 1, 2]
        assert one.verify().ok
        if end == "dead":
            with pytest.raises(BatchConflict, match="only in the batch"):
                batch.put_back()
            batch.return_to_queue()
            again = reader.lease("k2")
            assert numbers(again.messages()) == [0, 1, 2]
            assert again.attempt == 2
            again.ack()
    with make() as one, one.reader("r") as reader:
        assert numbers(reader.lease("k").messages()) == [0, 1, 2]


def test_a_reader_that_lost_messages_leases_what_is_there(make):
    with make(max_records=3, slow_readers="move") as one, one.reader("r") as reader:
        filled(one, 4)
        reader.read_many(2)
        filled(one, 6)
        batch = reader.lease("k")
        assert numbers(batch.messages()) == [6, 7, 8, 9]
        assert reader.lost == 6


# The ring of the index


@pytest.fixture
def full(tmp_path) -> Iterator[Topic]:
    """A topic with as many blocks as the index can name."""
    with Topic(tmp_path / "t", block_size=1, sync="never", _files=NoSync()) as one:
        for number in range(zbus.RING):
            one.append(b"%d" % number)
        yield one


def test_a_topic_with_all_blocks_in_use_is_full_says_how_to_go_on_and_goes_on_when_some_are_removed(full):
    ways_out = r"max_age, max_bytes, max_records, trim\(\).*larger block_size"
    before = files(full)
    with pytest.raises(Full, match=ways_out):
        full.append(b"one too many")
    with pytest.raises(Full, match=ways_out):
        full.append_many([b"a", b"b"], key="k")
    with full.reader("r") as reader, full.session() as session:
        session.append(b"no")
        session.read(reader)
        with pytest.raises(Full, match=ways_out):
            session.commit()
        assert reader.position().number == 0
        session.rollback()
        assert files(full) == before
        assert (len(full), full.stats().blocks) == (zbus.RING, zbus.RING)
        full.max_records = 10_000
        reader.seek(number=200)
        assert full.trim() == 200
        session.append(b"session")
        assert session.commit() == 1
        assert full.append_many([b"a", b"b"], key="k") == 2  # a key that was refused is not used up
    full.close()
    with Topic(full.path, block_size=1 << 20) as one:
        assert one.append(b"c") == zbus.RING + 3
        assert [message.body for message in one][-5:] == [b"10239", b"session", b"a", b"b", b"c"]
        assert one.stats().blocks == zbus.RING - 200 + 2
        assert one.verify().ok


def test_entries_of_the_index_are_used_again_past_the_ring(full):
    """Block n + 10,240 takes the place of block n: readers, seeks and reopening must not notice."""
    ring, more = zbus.RING, 700
    full.max_records, full.slow_readers = 300, "move"
    assert full.trim() == ring - 300
    behind = full.reader("behind")
    for number in range(ring, ring + more):
        full.append(b"%d" % number, timestamp=1000 * number)
    data = Path(full.path, "t.idx").read_bytes()
    index = zbus.unpack_index(data, "t.idx")
    assert (index.start + index.blocks, index.number) == (ring + more, ring + more)
    *_, last = full
    assert zbus.unpack_entry(data, zbus.HEADER + 28 * (more - 1)).base == last.offset
    first = full.stats().first
    assert behind.lost == first - (ring - 300)
    assert first == ring + more - 300
    assert numbers(full) == list(range(first, ring + more))
    assert numbers(behind) == list(range(first, ring + more))
    behind.close()
    full.close()
    with Topic(full.path, block_size=1, sync="never", _files=NoSync()) as one, one.reader("r") as reader:
        assert [message.body for message in reader] == [b"%d" % number for number in range(first, ring + more)]
        for number in (first, ring + more - 1, ring + 500):
            reader.seek(number=number)
            message = reader.peek()
            assert message.number == number
            reader.seek(number=first)
            reader.seek(offset=message.offset)
            assert reader.peek() == message
        reader.seek(time=datetime.fromtimestamp(ring + 600, UTC))
        assert reader.peek().number == ring + 600
        assert one.append(b"next") == ring + more
        assert one.verify().ok


def test_with_a_bound_a_topic_is_never_full(tmp_path):
    with Topic(tmp_path / "t", block_size=1, sync="never", max_records=50, _files=NoSync()) as one:
        for number in range(zbus.RING + 200):
            assert one.append(b"") == number
        assert len(one) == 50
        assert one.stats().blocks == 50
