"""Batches from a topic's reader: which messages `lease` takes, what the manifest says, and what becomes of a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import (
    BadArgument,
    BadKey,
    Batch,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    Closed,
    Corrupt,
    Message,
    Reader,
    Topic,
    inspect_reader,
)
from qewqew_core.batch import manifest
from qewqew_core.formats.tags import Filter

Make = Callable[..., Topic]


@pytest.fixture(
    params=[(500, "commit", "B"), (1 << 20, "never", "B"), (1, "never", "C")], ids=lambda param: "{}-{}-{}".format(*param)
)
def make(request, tmp_path) -> Iterator[Make]:
    """Opens the one topic of the test: a few messages to a block, all in one, or one to each."""
    block_size, sync, dialect = request.param
    opened: list[Topic] = []

    def one(**more: object) -> Topic:
        named = {"block_size": block_size, "sync": sync, "dialect": dialect, "_files": NoSync()}
        opened.append(Topic(tmp_path / "orders", **{**named, **more}))
        return opened[-1]

    yield one
    for topic in opened:
        topic.close()


def filled(topic: Topic, count: int, tags: str = "") -> Topic:
    begin = topic.stats().next
    for number in range(begin, begin + count):
        topic.append(b"%d" % number, tag=tags[number % len(tags)] if tags else None, timestamp=1000 + number)
    return topic


def numbers(messages: object) -> list[int]:
    return [message.number for message in messages]


def check_manifest(batch: Batch, topic: Topic, expected: list[int], filter: str | None = None) -> None:
    """Read the batch with nothing but json, zlib and the format: heads of 204 bytes, with the body's length at 200."""
    path = Path(batch.manifest_path)
    body = json.loads(path.read_bytes())
    created = body.pop("created")
    segments = body.pop("segments")
    assert body == {
        "version": 1,
        "layout": "block",
        "dialect": topic.dialect,
        "filter": filter,
        "queue": "orders",
        "reader": "r",
        "id": batch.id,
        "key": batch.key,
        "attempt": batch.attempt,
        "records": batch.records,
        "bytes": batch.bytes,
    }
    assert created.endswith("Z")
    assert abs(datetime.fromisoformat(created) - datetime.now(UTC)) < timedelta(minutes=5)
    found: list[tuple[int, bytes]] = []
    for segment in segments:
        data = path.with_name(segment["file"]).read_bytes()
        at, starts = segment["start"], {}
        assert segment["crc32"] == f"{zlib.crc32(data[at : segment['end']]):08x}"
        first = len(found)
        while at < segment["end"]:
            starts[at] = len(found) - first
            length = int.from_bytes(data[at + 200 : at + 204])
            if Filter(filter).matches_slot(data[at + 72 : at + 200]):
                found.append((int.from_bytes(data[at + 64 : at + 72]), data[at + 204 : at + 204 + length]))
            at += 204 + length
        assert (at, len(found) - first) == (segment["end"], segment["records"])
        assert all(starts[offset] == records for offset, records in segment["boundaries"])
        assert sorted(segment["boundaries"]) == segment["boundaries"]
        # No copy: the block file itself, under a second name.
        assert path.with_name(segment["file"]).stat().st_nlink >= 2 or not Path(topic.path, "data", segment["file"]).exists()
    assert [number for number, _ in found] == expected
    messages = list(batch.messages())
    assert [(message.number, message.body) for message in messages] == found
    assert list(batch) == [data for _, data in found]
    assert (batch.records, len(batch), batch.bytes) == (len(found), len(found), sum(len(data) for _, data in found))
    assert {entry.name for entry in path.parent.iterdir()} == {"manifest.json", *(one["file"] for one in segments)}


# What is taken


def test_a_lease_without_limits_takes_all_that_waits_over_all_blocks(make):
    with make() as topic, filled(topic, 12).reader("r") as one:
        one.read_many(3)
        one.commit()
        batch = one.lease("key")
        assert (batch.state, batch.attempt, batch.key, batch.reason, batch.expires) == ("leased", 1, "key", "", None)
        check_manifest(batch, topic, list(range(3, 12)))
        assert one.lease("another") is None
        assert list(one) == []  # a leased message is not delivered
        filled(topic, 1)
        check_manifest(one.lease("another"), topic, [12])
    with make() as topic, topic.reader("r") as one:
        check_manifest(one.batch(batch.id), topic, list(range(3, 12)))
        assert topic.verify().ok
        assert topic.verify().batches == 2


def test_the_messages_of_a_batch_have_all_their_fields(make):
    with make() as topic, topic.reader("r") as one:
        topic.append_many([Message(b"", "a", "i", 0, 5), Message(bytes(range(256)), "ü.x"), b"plain"])
        batch = one.lease("key")
        assert list(batch.messages()) == list(topic)
        batch.nack()
        again = one.lease("again")
        assert [message.attempt for message in again.messages()] == [2, 2, 2]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 1 << 40])
def test_max_records_is_exact_wherever_it_cuts(make, limit):
    topic = filled(make(), 8)
    with topic.reader("r") as one:
        taken = min(limit, 8)
        check_manifest(one.lease("key", max_records=limit), topic, list(range(taken)))
        assert numbers(one) == list(range(taken, 8))


@pytest.mark.parametrize(("limit", "taken"), [(1, 1), (10, 1), (11, 1), (20, 2), (29, 2), (30, 3), (80, 8), (81, 8)])
def test_max_bytes_is_exact_but_takes_one_message_at_least(make, limit, taken):
    topic = make()
    topic.append_many([b"x" * 10] * 4)
    topic.append_many([b"x" * 10] * 4)
    with topic.reader("r") as one:
        check_manifest(one.lease("key", max_bytes=limit), topic, list(range(taken)))
        assert numbers(one) == list(range(taken, 8))


def test_a_first_message_larger_than_max_bytes_comes_alone(make):
    topic = make()
    topic.append_many([b"x" * 28, b"y" * 28, b"", b"z"])
    with topic.reader("r") as one:
        check_manifest(one.lease("a", max_bytes=5), topic, [0])
        check_manifest(one.lease("b", max_bytes=27, max_records=9), topic, [1])
        check_manifest(one.lease("c", max_bytes=1), topic, [2, 3])
        assert one.lease("d") is None


@pytest.mark.parametrize("pattern", ["a", "a;c", "*", "nothing"])
def test_a_filtered_reader_leases_what_matches_and_passes_the_rest(make, pattern):
    topic = filled(make(), 12, tags="abc")
    with topic.reader("r", filter=pattern) as one:
        matching = [message.number for message in topic if Filter(pattern).matches(message.tag)]
        taken, rest = matching[:3], matching[3:]
        batch = one.lease("k", max_records=3)
        if not taken:
            assert batch is None
            assert one.lag() == 0  # passed for good
            return
        check_manifest(batch, topic, taken, pattern)
        one.set_filter(None)  # a batch keeps the filter that it was cut with
        check_manifest(one.batch(batch.id), topic, taken, pattern)
        one.set_filter(pattern)
        if rest:
            check_manifest(one.lease("l"), topic, rest, pattern)
        assert one.lease("m") is None
        for each in one.batches():
            each.ack()
        assert one.lag() == 0


def test_messages_that_are_to_be_delivered_again_are_leased_first(make):
    """What a consumer gave back, or had when it died, must not be forgotten because a batch job comes next."""
    topic = filled(make(), 8)
    with topic.reader("r", redeliver_after=None) as one, topic.reader("r", redeliver_after=None) as other:
        messages = one.read_many(5)
        one.commit(messages[3])
        one.nack(messages[1], messages[4])
        check_manifest(other.lease("k", max_records=4), topic, [1, 4, 5, 6])
        one.close()
        check_manifest(other.lease("l", max_records=2), topic, [0, 2])
        check_manifest(other.lease("m"), topic, [7])
        assert other.stats().records == 0


def test_what_a_consumer_has_in_flight_is_not_leased(make):
    topic = filled(make(), 4)
    with topic.reader("r") as one, topic.reader("r") as other:
        assert numbers(one.read_many(2)) == [0, 1]
        check_manifest(other.lease("k"), topic, [2, 3])
        assert one.commit() == 2
        assert one.position().number == 2


def test_a_large_batch_has_boundaries_for_those_who_read_it_in_parts(tmp_path):
    with Topic(tmp_path / "orders", _files=NoSync()) as topic, topic.reader("r") as one:
        topic.append_many(Message(bytes(500), tag="ab"[number % 2]) for number in range(2000))
        batch = one.lease("k", max_records=1500)
        check_manifest(batch, topic, list(range(1500)))
        assert len(manifest.load(batch.manifest_path).segments[0].boundaries) >= 10
        one.set_filter("b")
        batch = one.lease("l")
        check_manifest(batch, topic, list(range(1501, 2000, 2)), "b")
        assert len(manifest.load(batch.manifest_path).segments[0].boundaries) >= 3


@pytest.mark.parametrize(
    "limits",
    [
        {"max_records": 0},
        {"max_bytes": -1},
        {"max_records": 1.5},
        {"max_bytes": True},
        {"lease_timeout": 0},
        {"lease_timeout": float("nan")},
    ],
)
def test_absurd_limits_are_refused_before_anything_changes(make, limits):
    topic = filled(make(), 2)
    with topic.reader("r") as one:
        with pytest.raises(BadArgument):
            one.lease("k", **limits)
        for key in ("", "a/b", None, "x" * 513):
            with pytest.raises(BadKey):
                one.lease(key)
        assert one.batches() == []
        assert numbers(one) == [0, 1]


# Keys


def test_the_same_key_gives_the_same_batch_whatever_its_limits_and_state(make):
    with make() as topic, filled(topic, 8).reader("r") as one:
        first = one.lease("key", max_records=3)
        again = one.lease("key", max_records=1)
        assert (again.id, again.attempt, again.state) == (first.id, 1, "leased")
        check_manifest(again, topic, [0, 1, 2])
    with make() as topic, topic.reader("r") as one:
        again = one.lease("key")
        check_manifest(again, topic, [0, 1, 2])
        again.ack()
        acked = one.lease("key")
        assert (acked.id, acked.state, numbers(acked.messages())) == (first.id, "acked", [0, 1, 2])
        acked.ack()  # once more is no error
        assert numbers(one) == [3, 4, 5, 6, 7]


def test_readers_have_batches_of_their_own(make):
    topic = filled(make(), 4)
    with topic.reader("r") as one, topic.reader("s") as other:
        a, b = one.lease("k"), other.lease("k")
        assert a.id != b.id
        a.ack()
        assert (one.lag(), other.lag()) == (0, 4)
        with pytest.raises(BatchNotFound):
            other.batch(a.id)


def test_two_keys_get_two_batches_that_are_listed_in_order(make):
    topic = filled(make(), 6)
    with topic.reader("r") as one:
        a, b = one.lease("a", max_records=2), one.lease("b", max_records=2)
        assert [each.id for each in one.batches()] == [a.id, b.id]
        b.ack()
        assert [each.id for each in one.batches()] == [a.id]
        assert one.batch(b.id).state == "acked"


# How it ends


def test_ack_moves_the_reader_and_nack_does_not(make):
    with make() as topic, filled(topic, 6).reader("r") as one:
        first, second = one.lease("a", max_records=2), one.lease("b", max_records=2)
        assert (one.position().number, one.lag()) == (0, 6)
        second.ack()
        assert one.position().number == 0  # the first is not done with
        first.nack("failed")
        assert (one.position().number, first.state, first.reason) == (0, "returned", "failed")
        assert inspect_reader(topic.path, "r").returned == 1
    with make() as topic, topic.reader("r") as one:
        assert one.position().number == 0
        again = one.lease("c", max_records=1)
        assert (again.id, again.attempt) == (first.id, 2)
        check_manifest(again, topic, [0, 1])
        again.ack()
        assert (one.position().number, one.lag()) == (4, 2)
        rdx = Path(topic.path, "reader", "r.rdx").read_bytes()
        assert int.from_bytes(rdx[:8]) == one.position().block  # what a zbus server would go on from
        assert numbers(one) == [4, 5]


def test_a_returned_batch_comes_first_and_whole_and_its_old_owner_is_refused(make):
    topic = filled(make(), 6)
    with topic.reader("r") as one:
        first = one.lease("a", max_records=3)
        first.nack()
        again = one.lease("b", max_records=1, max_bytes=1)
        assert (again.id, again.attempt, again.key) == (first.id, 2, "b")
        check_manifest(again, topic, [0, 1, 2])
        for call in (first.ack, first.extend):
            with pytest.raises(BatchConflict):
                call()
        with pytest.raises(BatchConflict, match="once leased under 'a'"):
            one.lease("a")
        again.ack()
        assert one.lease("a").state == "acked"


def test_after_max_attempts_a_batch_is_dead_and_a_person_decides(make):
    topic = filled(make(max_attempts=2), 6)
    with topic.reader("r") as one:
        one.lease("a", max_records=2).nack("first")
        batch = one.lease("b")
        batch.nack("second")
        assert batch.state == "dead"
        assert "attempt 2 of 2: second" in batch.reason
        assert one.position().number == 2  # nobody waits for a dead batch
        assert [each.id for each in one.dead()] == [batch.id]
        assert one.batches() == []
        check_manifest(one.dead()[0], topic, [0, 1])
        with pytest.raises(BatchConflict, match="dead letters"):
            one.lease("a")
        assert one.stats().dead == 1
        one.dead()[0].return_to_queue()
        check_manifest(one.lease("c"), topic, [0, 1])
        assert one.position().number == 0
        one.batches()[0].to_dead_letters("by hand")
        folder = Path(one.dead()[0].manifest_path).parent
        one.dead()[0].drop()
        assert not folder.exists()
        assert one.dead() == []
        assert numbers(one) == [2, 3, 4, 5]


@pytest.mark.parametrize("state", ["leased", "returned", "dead"])
def test_a_batch_that_was_put_back_is_delivered_again_in_its_order(make, state):
    topic = filled(make(), 8)
    with topic.reader("r") as one:
        one.commit(one.read())
        first, second = one.lease("a", max_records=2), one.lease("b", max_records=2)
        if state != "leased":
            first.nack() if state == "returned" else first.to_dead_letters("x")
        first.put_back()
        assert not Path(first.manifest_path).parent.exists()
        with pytest.raises(BatchNotFound):
            first.ack()
        assert one.position().number == 1
        check_manifest(one.lease("c", max_records=3), topic, [1, 2, 5])
        second.put_back()
        assert numbers(one.read_many(2)) == [3, 4]
        check_manifest(one.lease("a"), topic, [6, 7])  # its key is free again


@pytest.mark.parametrize("now", [None, "#", "b"])
def test_a_batch_that_is_put_back_under_another_filter_brings_back_its_own_messages_alone(make, now):
    """What the filter had passed over when the batch was leased comes again only where the reader is moved."""
    topic = make()
    for number in range(12):
        topic.append(b"%d" % number * 30, tag=[None, "a", "b", "a"][number % 4])
    reader = topic.reader("r", "a")
    batch = reader.lease("run")
    assert [message.number for message in batch.messages()] == [1, 3, 5, 7, 9, 11]
    reader.set_filter(now)
    batch.put_back()
    assert [message.number for message in reader.read_many(20)] == ([] if now == "b" else [1, 3, 5, 7, 9, 11])


def test_a_put_back_batch_and_a_reader_that_was_moved_deliver_each_message_once(make):
    topic = filled(make(), 6)
    with topic.reader("r") as one:
        batch = one.lease("a", max_records=3)
        one.seek(number=1)
        assert one.read().number == 1
        batch.put_back()
        assert numbers(one) == [0, 2, 3, 4, 5]
        assert one.commit() == 6
        assert one.lag() == 0


def test_seek_leaves_batches_alone(make):
    topic = filled(make(), 6)
    with topic.reader("r") as one:
        batch = one.lease("a", max_records=3)
        one.seek(number=0)
        assert numbers(one.read_many(2)) == [0, 1]
        one.seek(number=6)
        check_manifest(one.batch(batch.id), topic, [0, 1, 2])
        batch.ack()
        assert one.lag() == 0


def test_a_lease_ends_when_its_time_is_over_unless_it_is_extended(make, clock):
    topic = filled(make(), 4)
    with topic.reader("r") as one:
        batch = one.lease("a", max_records=2, lease_timeout=10)
        clock.advance(9)
        assert one.return_expired() == []
        batch.extend()
        clock.advance(9)
        assert one.return_expired() == []
        batch.extend(100)
        clock.advance(99)
        assert one.lease("a", lease_timeout=1).id == batch.id  # which is as good as extend
        clock.advance(2)
        assert one.stats().returned == 1
        assert [(each.id, each.state) for each in one.return_expired()] == [(batch.id, "returned")]
        with pytest.raises(BatchConflict):
            batch.extend()
        again = one.lease("b", lease_timeout=5)
        assert (again.id, again.attempt) == (batch.id, 2)
        clock.advance(6)
        third = one.lease("c")  # takes what has expired
        assert (third.id, third.attempt) == (batch.id, 3)
        with pytest.raises(BadArgument, match="without lease_timeout"):
            third.extend()


def test_acknowledged_batches_are_kept_for_a_while_and_then_their_key_is_expired(make):
    with make(retention=timedelta(0)) as topic, filled(topic, 6).reader("r") as one:
        batch = one.lease("a", max_records=2)
        batch.ack()
        with pytest.raises(BatchExpired):
            one.lease("a")
        with pytest.raises(BatchExpired):
            one.batch(batch.id)
        with pytest.raises(BatchExpired):
            list(batch)
        assert os.listdir(os.path.dirname(batch.manifest_path)) == ["manifest.json"]
    with make(retention_bytes=450) as topic, topic.reader("r") as one:
        first, second = one.lease("b", max_records=2), one.lease("c", max_records=2)
        first.ack()
        assert numbers(one.lease("b").messages()) == [2, 3]
        second.ack()  # 410 bytes each
        with pytest.raises(BatchExpired):
            one.lease("b")
        assert numbers(one.lease("c").messages()) == [4, 5]


def test_a_batch_of_a_reader_that_was_closed_or_deleted_cannot_be_ended(make):
    topic = filled(make(), 4)
    one = topic.reader("r")
    batch = one.lease("a", max_records=2)
    one.close()
    with pytest.raises(Closed):
        batch.ack()
    assert numbers(batch.messages()) == [0, 1]  # its files are there
    with topic.reader("r") as again:
        again.batch(batch.id).ack()
    topic.delete_reader("r")
    with pytest.raises(BatchExpired):
        list(batch)


def test_messages_are_for_batches_of_topics(tmp_path):
    from qewqew_core import Queue

    with Queue(tmp_path / "q") as q:
        q.put(b"x")
        with pytest.raises(BadArgument, match="belongs to a queue"):
            list(q.lease("k").messages())


# Damage


def damage(topic: Topic, block: int, at: int) -> Path:
    path = sorted(Path(topic.path, "data").glob("*.zbus"))[block]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)  # in place: batches have the same file
    return path


@pytest.mark.req("ZD4")
def test_a_lease_of_damaged_messages_is_refused_and_takes_nothing(tmp_path):
    """Bodies have no checksum in the format; ours stands in the topic's log."""
    with Topic(tmp_path / "orders", block_size=500, _files=NoSync()) as topic:
        filled(topic, 6).close()
    for at in (0, 100, 204):
        path = damage(topic, 1, at)
        with Topic(tmp_path / "orders") as again, again.reader("r") as one:
            with pytest.raises(Corrupt) as caught:
                one.lease("k")
            assert caught.value.path == str(path)
            assert caught.value.offset is not None
            assert one.batches() == []
            assert one.position().number == 0
            good = one.lease(f"good {at}", max_records=2)  # what lies before the damage can be taken
            assert numbers(good.messages()) in ([0, 1], [0, 1, 2])
            good.put_back()
        damage(topic, 1, at)
    with Topic(tmp_path / "orders") as again, again.reader("r") as one:
        check_manifest(one.lease("k"), again, list(range(6)))


def test_damage_behind_what_is_leased_is_found_too_if_it_is_in_the_same_piece(tmp_path):
    """A piece of about 64 KiB has one checksum: better no batch than one from a file that is known to be damaged."""
    with Topic(tmp_path / "orders", _files=NoSync()) as topic:
        topic.append_many([bytes(1000)] * 200)
    damage(topic, 0, 150_000)
    with Topic(tmp_path / "orders") as again, again.reader("r") as one:
        check_manifest(one.lease("k", max_records=50), again, list(range(50)))
        with pytest.raises(Corrupt):
            one.lease("l", max_records=100)
        assert again.verify().problems


def test_damage_that_comes_after_the_lease_is_found_by_reading_and_by_verify(tmp_path):
    with Topic(tmp_path / "orders", block_size=500, _files=NoSync()) as topic, filled(topic, 6).reader("r") as one:
        batch = one.lease("k")
        path = damage(topic, 1, 204)
        found: list[Message] = []
        with pytest.raises(Corrupt, match="checksum") as caught:
            found.extend(batch.messages())
        assert numbers(found) in ([0, 1], [0, 1, 2])  # the first block, which is whole
        assert os.path.basename(caught.value.path) == path.name
        report = topic.verify()
        assert any("orders-r" in problem and path.name in problem for problem in report.problems)
        assert report.batches == 1
        batch.nack("damaged")
        assert one.lease("l").attempt == 2


def test_a_manifest_that_does_not_fit_its_batch_is_found_by_verify(tmp_path):
    with Topic(tmp_path / "orders", _files=NoSync()) as topic, filled(topic, 4).reader("r") as one:
        batch = one.lease("k")
        path = Path(batch.manifest_path)
        body = json.loads(path.read_bytes())
        path.write_bytes(json.dumps({**body, "id": "another"}).encode())
        assert any(batch.id in problem for problem in topic.verify().problems)
        path.unlink()
        assert any(f"the files of batch {batch.id} are missing" in problem for problem in topic.verify().problems)


# Several at once


def test_readers_in_two_processes_lease_different_batches_until_nothing_is_left(tmp_path):
    with Topic(tmp_path / "orders", block_size=2000, _files=NoSync()) as topic:
        filled(topic, 300)
        work = """
        import sys
        from qewqew_core import Topic
        with Topic(sys.argv[1]) as topic, topic.reader("r") as reader:
            place = 0
            while (batch := reader.lease(f"{sys.argv[2]} {place}", max_records=7)) is not None:
                print(*[message.number for message in batch.messages()])
                batch.ack() if place % 3 else batch.nack("again")
                place += 1
        """
        command = [sys.executable, "-c", textwrap.dedent(work), str(tmp_path / "orders")]
        consumers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
        found = [output.split("\n")[:-1] for output, _ in (consumer.communicate(timeout=300) for consumer in consumers)]
        assert [consumer.returncode for consumer in consumers] == [0, 0]
        batches = [tuple(map(int, line.split())) for lines in found for line in lines]
        assert sorted(number for batch in set(batches) for number in batch) == list(range(300))  # whole, however often
        with topic.reader("r") as one:
            assert one.lag() == 0
            assert one.batches() == one.dead() == []


def test_threads_that_share_a_reader_lease_different_batches(make):
    topic = filled(make(), 40)
    found: list[int] = []
    with topic.reader("r") as one:

        def work(name: int) -> None:
            place = 0
            while (batch := one.lease(f"{name}-{place}", max_records=3)) is not None:
                found.extend(numbers(batch.messages()))
                batch.ack()
                place += 1

        threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(40))
        assert one.lag() == 0


def test_what_another_process_does_with_batches_is_seen_at_once(make):
    topic = filled(make(), 4)
    with topic.reader("r") as one, topic.reader("r") as other:
        batch = one.lease("k", max_records=2)
        assert [each.id for each in other.batches()] == [batch.id]
        theirs = other.batch(batch.id)
        theirs.ack()
        assert one.batch(batch.id).state == "acked"
        assert isinstance(one, Reader)
        with pytest.raises(BatchConflict):
            batch.nack()
        assert one.lag() == 2


def test_a_batch_that_was_prepared_by_a_process_that_was_killed_leaves_nothing(make):
    """Its directory and links are made before it is committed: the next who opens the reader clears them away."""
    topic = filled(make(), 4)
    folder = Path(topic.path, "state", "r.batches")
    with topic.reader("r") as one:
        batch = one.lease("k", max_records=2)
        left = folder / "orders-r-0123456789abcdef"
        left.mkdir()
        block = next(Path(topic.path, "data").glob("*.zbus"))
        os.link(block, left / block.name)
    with topic.reader("r") as one:
        check_manifest(one.batch(batch.id), topic, [0, 1])
        assert sorted(os.listdir(folder)) == [batch.id]
