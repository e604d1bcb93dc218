"""Batches: what `lease` takes, under which key, in which order, and what becomes of it in every state and after reopening."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from qewqew_core import (
    BadArgument,
    BadKey,
    Batch,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    Corrupt,
    Queue,
    RecordTooLarge,
)
from qewqew_core.batch import manifest, segments
from qewqew_core.disk.files import Files

Make = Callable[..., Queue]


@pytest.fixture(params=itertools.product([16, 64, 4096], ["commit", "never"]), ids=lambda param: "{}-{}".format(*param))
def make(request, tmp_path) -> Make:
    chunk_size, sync = request.param
    return lambda **more: Queue(tmp_path / "q", **{"chunk_size": chunk_size, "sync": sync, **more})


def numbers(begin: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(begin, end)]


def check_manifest(batch: Batch, expected: list[bytes]) -> None:
    """Read the batch with nothing but json, zlib and the format: header of ten bytes, records of u16 length and payload."""
    path = Path(batch.manifest_path)
    body = json.loads(path.read_bytes())
    assert {name: body[name] for name in ("version", "layout", "id", "key", "attempt", "records", "bytes")} == {
        "version": 1,
        "layout": "chunk",
        "id": batch.id,
        "key": batch.key,
        "attempt": batch.attempt,
        "records": batch.records,
        "bytes": batch.bytes,
    }
    assert body["queue"] == "q"
    assert body["created"].endswith("Z")
    assert abs(datetime.fromisoformat(body["created"]) - datetime.now(UTC)) < timedelta(minutes=5)
    found: list[bytes] = []
    for segment in body["segments"]:
        assert "/" not in segment["file"]
        data = path.with_name(segment["file"]).read_bytes()
        at, starts = segment["start"], {}
        assert segment["crc32"] == f"{zlib.crc32(data[at : segment['end']]):08x}"
        first = len(found)
        while at < segment["end"]:
            starts[at] = len(found) - first
            length = int.from_bytes(data[at : at + 2])
            found.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        assert (at, len(found) - first) == (segment["end"], segment["records"])
        assert all(starts[offset] == records for offset, records in segment["boundaries"])
        assert sorted(segment["boundaries"]) == segment["boundaries"]
        assert len(data) == segment["end"], "the unused rest of a chunk file is given back"
    assert found == expected == list(batch)
    assert (batch.records, len(batch), batch.bytes) == (len(found), len(found), sum(map(len, found)))
    assert {entry.name for entry in path.parent.iterdir()} == {"manifest.json", *(one["file"] for one in body["segments"])}


# What is taken


def test_a_lease_without_limits_takes_everything(make):
    with make() as q:
        q.put_many(numbers(0, 50))
        q.get_many(3)
        batch = q.lease("key")
        assert (batch.state, batch.attempt, batch.key, batch.reason) == ("leased", 1, "key", "")
        assert abs(batch.created - datetime.now(UTC)) < timedelta(minutes=1)
        assert len(q) == 0
        check_manifest(batch, numbers(3, 50))
        assert q.lease("another") is None
        q.put(b"new")
        check_manifest(q.lease("another"), [b"new"])
    with make() as q:
        check_manifest(q.batch(batch.id), numbers(3, 50))
        assert q.verify().problems == []


@pytest.mark.parametrize("limit", [1, 2, 3, 9, 10, 11, 29, 30, 31, 1 << 40])
def test_max_records_is_exact_wherever_it_cuts(make, limit):
    with make() as q:
        q.put_many(numbers(0, 30))
        taken = min(limit, 30)
        check_manifest(q.lease("key", max_records=limit), numbers(0, taken))
        assert list(q) == numbers(taken, 30)
        q.put(b"new")
    with make() as q:
        assert q.get_many(100) == [*numbers(taken, 30), b"new"]


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 11, 12, 89, 90, 91])
def test_max_bytes_is_exact_wherever_it_cuts_but_takes_at_least_one_record(make, limit):
    with make() as q:
        q.put_many([b"%03d" % number for number in range(30)])
        taken = min(max(limit // 3, 1), 30)
        check_manifest(q.lease("key", max_bytes=limit), [b"%03d" % number for number in range(taken)])
        assert list(q) == [b"%03d" % number for number in range(taken, 30)]


def test_both_limits_hold(make):
    with make() as q:
        q.put_many(numbers(0, 10))
        check_manifest(q.lease("a", max_records=3, max_bytes=100), numbers(0, 3))
        check_manifest(q.lease("b", max_records=100, max_bytes=3), numbers(3, 6))


@pytest.mark.parametrize("chunk_size", [40, 1000])
def test_a_first_record_larger_than_max_bytes_comes_alone(tmp_path, chunk_size):
    with Queue(tmp_path / "q", chunk_size=chunk_size) as q:
        q.put_many([b"x" * 28, b"y" * 28, b"z"])
        check_manifest(q.lease("a", max_bytes=5), [b"x" * 28])
        check_manifest(q.lease("b", max_bytes=28), [b"y" * 28])
        check_manifest(q.lease("c", max_bytes=28), [b"z"])
        assert q.lease("d") is None


def test_a_chunk_of_which_a_lease_has_copied_the_last_record_is_removed(tmp_path):
    """Else its file stays for ever, and a later scan would find the records a second time."""
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put_many([b"x" * 28, b"y" * 28])
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.lease("key", max_bytes=1)
    assert not (tmp_path / "q.30001").exists()
    with Queue(tmp_path / "q", chunk_size=40) as q:
        assert q.verify().orphans == []
        assert list(q) == [b"y" * 28]


def test_a_partly_read_chunk_is_cut_at_both_ends(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many(numbers(0, 100))
        q.get_many(10)
        check_manifest(q.lease("a", max_records=20), numbers(10, 30))
        check_manifest(q.lease("b", max_records=20), numbers(30, 50))
        assert q.get() == b"50"
        check_manifest(q.lease("c"), numbers(51, 100))
        assert q.verify().problems == []


def test_a_large_batch_has_boundaries_and_a_cut_one_too(tmp_path):
    luck = random.Random(4)
    records = [luck.randbytes(luck.randrange(500)) for _ in range(4000)]  # 1 MB
    with Queue(tmp_path / "q", chunk_size=400_000) as q:
        q.put_many(records[:2500])
        for record in records[2500:2600]:
            q.put(record)
        q.put_many(records[2600:])
        q.get_many(150)
        check_manifest(first := q.lease("a", max_records=2000), records[150:2150])
        check_manifest(q.lease("b", max_bytes=100_000), records[2150 : 2150 + fitting(records[2150:], 100_000)])
        check_manifest(q.lease("c"), records[2150 + fitting(records[2150:], 100_000) :])
        boundaries = [segment.boundaries for segment in manifest.load(first.manifest_path).segments]
        assert sum(map(len, boundaries)) >= 5, "about every 64 KiB"


def fitting(records: list[bytes], limit: int) -> int:
    return sum(total <= limit for total in itertools.accumulate(map(len, records)))


@pytest.mark.parametrize(
    "limits",
    [{"max_records": 0}, {"max_records": -1}, {"max_bytes": 0}, {"max_records": 1.5}, {"max_bytes": True}, {"max_bytes": "1"}],
)
def test_absurd_limits_are_refused_before_anything_changes(tmp_path, limits):
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        with pytest.raises(BadArgument, match="must be a whole number from 1"):
            q.lease("key", **limits)
        assert len(q) == 1
        assert q.batches() == []


def test_a_lease_moves_files_and_copies_only_what_it_cuts(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(100, 150))
        inodes = {f"q.{number}": (tmp_path / f"q.{number}").stat().st_ino for number in range(30001, 30005)}
        folder = Path(q.lease("a", max_records=22 + 10).manifest_path).parent  # ten in each chunk, and a bit
        assert {path.name: path.stat().st_ino for path in folder.glob("q.[0-9]*")} == {
            **{name: inodes[name] for name in ("q.30001", "q.30002", "q.30003")},
            "q.30004": (folder / "q.30004").stat().st_ino,
        }
        assert (folder / "q.30004").stat().st_ino != inodes["q.30004"] == (tmp_path / "q.30004").stat().st_ino
        assert (folder / "q.30004").stat().st_size == 10 + 2 * 5
        q.batches()[0].put_back()
        assert inodes["q.30001"] in {path.stat().st_ino for path in tmp_path.glob("q.*")}, "putting back moves them too"


def test_the_time_of_a_lease_does_not_grow_with_the_number_of_records(tmp_path):
    """Counted in bytes read and written, which no busy machine changes: 200,000 records and 20 differ by their index only."""

    class Counting(Files):
        moved = 0

        def read(self, fd: int, size: int, offset: int) -> bytes:
            self.moved += size
            return super().read(fd, size, offset)

        def write(self, fd: int, data: bytes, offset: int) -> None:
            self.moved += len(data)
            super().write(fd, data, offset)

    moved = []
    for name, records in (("many", [b"0123456789"] * 200_000), ("few", [b"x" * 60_000] * 40)):
        files = Counting()
        with Queue(tmp_path / name, chunk_size=1 << 20, _files=files) as q:
            q.put_many(records)
            files.moved = 0
            q.lease("key")
            moved.append(files.moved)
    assert moved[0] < 2 * moved[1] < 50_000


# Keys


def test_the_same_key_gives_the_same_batch_whatever_its_limits_and_state(make):
    with make() as q:
        q.put_many(numbers(0, 30))
        first = q.lease("key", max_records=10)
        again = q.lease("key", max_records=3)
        assert (again.id, again.attempt, again.state) == (first.id, 1, "leased")
        check_manifest(again, numbers(0, 10))
    with make() as q:
        again = q.lease("key")
        assert (again.id, again.attempt, list(again)) == (first.id, 1, numbers(0, 10))
        again.ack()
        assert (q.lease("key").id, q.lease("key").state) == (first.id, "acked")
    with make() as q:
        acked = q.lease("key")
        assert (acked.id, acked.state, list(acked)) == (first.id, "acked", numbers(0, 10))
        acked.ack()  # once more is no error
        assert list(q) == numbers(10, 30)


def test_two_keys_get_two_batches(make):
    with make() as q:
        q.put_many(numbers(0, 30))
        a, b = q.lease("a", max_records=4), q.lease("b", max_records=5)
        assert a.id != b.id
        assert [one.id for one in q.batches()] == [a.id, b.id]
        b.ack()
        assert (q.batch(a.id).state, q.batch(b.id).state) == ("leased", "acked")
        assert [one.id for one in q.batches()] == [a.id]
        check_manifest(a, numbers(0, 4))
        check_manifest(q.batch(b.id), numbers(4, 9))
        assert len(q) == 21


@pytest.mark.parametrize(
    "key", ["dag:run:2026-01-01T00:00:00+00:00.task.-1", "ключ 🙂", "a b", "'; drop", "x" * 512, "~", "%2e%2e", "CON", "a:b*?<>|"]
)
def test_any_key_that_is_text_makes_an_id_that_is_safe_in_every_file_system(tmp_path, key):
    with Queue(tmp_path / "orders.qew") as q:
        q.put(b"0")
        batch = q.lease(key)
        assert batch.key == key
        assert batch.id.startswith("orders-")
        assert batch.id.replace("-", "").isalnum()
        assert batch.id.isascii()
        assert len(batch.id) < 100
        assert list(q.batch(batch.id)) == [b"0"]
        assert json.loads(Path(batch.manifest_path).read_bytes())["key"] == key
    with Queue(tmp_path / "orders.qew") as q:
        assert q.lease(key).id == batch.id


def test_no_two_names_have_the_same_ids(tmp_path):
    """What writes by id into one table would take the second batch for the first one, and leave it out."""
    names = ["a-b", "a.b", "a b", "-a-b", "ä-b", "ö-b", "x" * 80, "x" * 81, "x" * 82, "-", "_", "batch"]
    names += [os.fsdecode(b"\xff"), os.fsdecode(b"\xfe")]
    ids = set()
    for name in names:
        with Queue(tmp_path / name) as q:
            q.put(b"0")
            ids.add(q.lease("2026-11-26").id)
    assert len(ids) == len(names)


@pytest.mark.parametrize("name", ["päck chen.qew", "-x", "_", "a:b", "ü" * 90, "...x"])
def test_a_queue_with_a_strange_name_makes_safe_ids_too(tmp_path, name):
    with Queue(tmp_path / name) as q:
        q.put(b"0")
        batch = q.lease("key")
        assert batch.id.replace("-", "").replace("_", "").isalnum()
        assert batch.id[0].isalnum(), "an id that begins with - or . or _ is an option, or hidden from Hadoop"
        assert batch.id.isascii()
        assert list(batch) == [b"0"]


@pytest.mark.parametrize("key", ["", " ", "a/b", "a\\b", ".", "..", "a\tb", "a\0b", "é" * 257, "\udc80", None, 5, b"key"])
def test_a_hostile_key_is_refused_before_anything_changes(tmp_path, key):
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        with pytest.raises(BadKey, match="key"):
            q.lease(key)
        assert len(q) == 1
        assert not (tmp_path / "q.batches").exists()


# Ends


def test_a_returned_batch_comes_first_and_whole_whatever_the_limits_and_key(make):
    with make() as q:
        q.put_many(numbers(0, 30))
        first, second = q.lease("a", max_records=10), q.lease("b", max_records=5)
        second.nack("spark failed")
        first.nack()
        assert (second.state, second.reason) == ("returned", "spark failed")
        assert [(one.id, one.state) for one in q.batches()] == [(first.id, "returned"), (second.id, "returned")]
        assert len(q) == 15
    with make() as q:
        again = q.lease("c", max_records=1, max_bytes=1)
        assert (again.id, again.attempt, again.key, again.state) == (first.id, 2, "c", "leased")
        check_manifest(again, numbers(0, 10))
        assert q.lease("c").id == first.id
        with pytest.raises(BatchConflict, match=r"once leased under 'a'.* now leased under 'c'"):
            q.lease("a")
        again.ack()
        assert (q.lease("a").state, q.lease("c").state) == ("acked", "acked"), "both keys know it now"
        own = q.lease("b")
        assert (own.id, own.attempt) == (second.id, 2)
        own.ack()
        check_manifest(q.lease("d"), numbers(15, 30))


def test_the_key_of_a_returned_batch_gets_that_batch_and_not_an_older_returned_one(make):
    with make() as q:
        q.put_many(numbers(0, 9))
        a, b = q.lease("a", max_records=3), q.lease("b", max_records=3)
        a.nack()
        b.nack()
        assert q.lease("b").id == b.id
        assert q.lease("x").id == a.id


def test_after_max_attempts_a_batch_goes_to_the_dead_letters(make, tmp_path):
    with make(max_attempts=3) as q:
        q.put_many(numbers(0, 20))
        for attempt in (1, 2, 3):
            batch = q.lease("key", max_records=10)
            assert (batch.attempt, batch.state) == (attempt, "leased")
            batch.nack(f"failure {attempt}")
        assert (batch.state, batch.reason) == ("dead", "attempt 3 of 3: failure 3")
        assert Path(batch.manifest_path).parent.parent == tmp_path / "q.dead"
        assert q.batches() == []
        with pytest.raises(BatchConflict, match=r"dead letters \(attempt 3 of 3: failure 3\); look at it, then return it"):
            q.lease("key")
        check_manifest(q.lease("another"), numbers(10, 20))
    with make(max_attempts=3) as q:
        (dead,) = q.dead()
        assert (dead.id, dead.state, dead.reason) == (batch.id, "dead", "attempt 3 of 3: failure 3")
        check_manifest(dead, numbers(0, 10))
        assert q.stats().dead == 1


def test_dead_letters_can_be_looked_at_returned_put_back_or_dropped(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 30))
        batches = [q.lease(key, max_records=10) for key in "abc"]
        for batch in batches:
            batch.to_dead_letters("by hand")
            assert (batch.state, batch.reason) == ("dead", "by hand")
        a, b, c = q.dead()
        assert [list(one) for one in (a, b, c)] == [numbers(0, 10), numbers(10, 20), numbers(20, 30)]
        a.return_to_queue()
        assert (a.state, list(a)) == ("returned", numbers(0, 10))
        b.put_back()
        c.drop()
        assert q.dead() == []
        for call in (a.drop, a.return_to_queue, a.ack, a.nack, a.to_dead_letters):
            with pytest.raises(BatchConflict, match="is returned, not"):
                call()
        for gone in (b, c):
            with pytest.raises(BatchNotFound, match="put back, dropped, or has expired"):
                gone.drop()
            with pytest.raises(BatchNotFound, match="batches"):
                q.batch(gone.id)
            with pytest.raises(BatchExpired, match="are gone"):
                list(gone)
    with make() as q:
        assert list(q) == numbers(10, 20)
        again = q.lease("d")
        assert (again.id, again.attempt) == (a.id, 2)
        check_manifest(again, numbers(0, 10))
        check_manifest(q.lease("c"), numbers(10, 20))  # the key of a dropped batch is free
        assert list((tmp_path / "q.dead").iterdir()) == []


def test_putting_back_restores_the_order(make):
    with make() as q:
        q.put_many(numbers(0, 40))
        q.get_many(3)
        batches = [q.lease(str(number), max_records=number) for number in (1, 9, 10)]
        q.put_many(numbers(40, 50))
        for batch in reversed(batches):
            batch.put_back()
        assert (len(q), q.peek()) == (47, b"3")
        assert list(q) == numbers(3, 50)
        assert q.verify().problems == []
        assert q.batches() == []
    with make() as q:
        assert list(q) == numbers(3, 50)
        assert q.get_many(5) == numbers(3, 8)
        check_manifest(q.lease("again", max_records=20), numbers(8, 28))  # over the seams
        q.lease("again").put_back()
        assert q.get_many(100) == numbers(8, 50)
    with make() as q:
        assert list(q) == []


def test_a_batch_put_back_again_and_again_keeps_its_records(make):
    with make() as q:
        q.put_many(numbers(0, 30))
        for turn in range(8):
            batch = q.lease("key", max_records=7)
            assert (batch.attempt, list(batch)) == (1, numbers(0, 7))
            batch.put_back()
            q.put(b"%d" % (30 + turn))
        assert list(q) == numbers(0, 38)
    with make() as q:
        assert q.get_many(100) == numbers(0, 38)


def test_putting_back_into_an_empty_queue_and_putting_behind_it(make):
    with make() as q:
        q.put_many(numbers(0, 5))
        batch = q.lease("key")
        q.put(b"x")
        q.get()  # leaves an empty chunk
        batch.put_back()
        q.put_many(numbers(5, 9))
        assert list(q) == numbers(0, 9)
    with make() as q:
        assert q.get_many(3) == numbers(0, 3)
        q.lease("key").put_back()
        q.put(b"9")
    with make() as q:
        assert q.get_many(9) == numbers(3, 10)


def test_a_returned_batch_can_be_put_back_by_whoever_finds_it(make):
    with make() as q:
        q.put_many(numbers(0, 5))
        q.lease("key").nack()
        q.batches()[0].put_back()
        assert list(q) == numbers(0, 5)


# Stale objects


def test_an_owner_of_an_older_attempt_cannot_end_the_batch(make):
    """A task that was thought dead comes back after its retry has begun: only one of them may acknowledge."""
    with make() as q:
        q.put_many(numbers(0, 5))
        stale = q.lease("key")
        q.batch(stale.id).nack("worker lost")
        for call in (stale.ack, stale.nack, stale.to_dead_letters):
            with pytest.raises(BatchConflict, match="is returned, not leased"):
                call()
        current = q.lease("key")
        for call in (stale.ack, stale.nack, stale.to_dead_letters, stale.put_back):
            with pytest.raises(BatchConflict, match=r"now leased under 'key', attempt 2; this is attempt 1 under 'key'"):
                call()
        assert q.batch(current.id).state == "leased"
        current.ack()
        for call in (current.nack, current.put_back, current.to_dead_letters, stale.nack):
            with pytest.raises(BatchConflict, match="is acked, not"):
                call()


def test_an_owner_of_a_batch_that_was_put_back_cannot_end_the_next_one_of_its_key(tmp_path):
    """The next batch of the key may hold more records than its old owner has seen: acknowledging would lose them."""
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        stale = q.lease("key")
        q.batch(stale.id).put_back()
        q.put(b"1")
        current = q.lease("key")
        with pytest.raises((BatchConflict, BatchNotFound)):
            stale.ack()
        assert q.batch(current.id).state == "leased"


def test_an_unknown_id_is_not_found(tmp_path):
    with Queue(tmp_path / "q") as q:
        for unknown in ("", "q-0000000000000000", "../q", None):
            with pytest.raises(BatchNotFound, match="no batch has the id"):
                q.batch(unknown)
        with pytest.raises(KeyError):
            q.batch("x")


# Retention


@pytest.mark.parametrize("retention", [{"retention": timedelta(0)}, {"retention_bytes": 0}], ids=["age", "bytes"])
def test_after_their_retention_records_are_gone_and_the_key_says_so(make, tmp_path, retention):
    """Never silently other records under the same key: Airflow's "Clear task" must process the same ones or fail."""
    with make(**retention) as q:
        q.put_many(numbers(0, 20))
        batch = q.lease("key", max_records=10)
        time.sleep(0.005)
        batch.ack()
        time.sleep(0.005)
        other = q.lease("other", max_records=5)
        other.ack()  # what is too old goes when a batch is acknowledged
        folder = tmp_path / "q.batches" / batch.id
        assert [path.name for path in folder.iterdir()] == ["manifest.json"], "the manifest stays, for people"
        assert json.loads((folder / "manifest.json").read_bytes())["records"] == 10
        for _ in range(2):
            with pytest.raises(BatchExpired, match="A new batch needs a new key"):
                q.lease("key")
            with pytest.raises(BatchExpired, match="no longer kept"):
                q.batch(batch.id)
        assert list(q) == numbers(15, 20)
    with make(**retention) as q:
        with pytest.raises(BatchExpired):
            q.lease("key")
        with pytest.raises(BatchExpired):
            q.batch(batch.id)
        assert q.verify().problems == []


def test_with_no_retention_the_records_go_with_the_acknowledgement(tmp_path):
    """Also when it falls into the same millisecond."""
    with Queue(tmp_path / "q", retention=timedelta(0), sync="never") as q:
        for number in range(30):
            q.put(b"0")
            q.lease(f"key {number}").ack()
            with pytest.raises(BatchExpired):
                q.lease(f"key {number}")


def test_reading_a_batch_whose_records_were_dropped_says_that(tmp_path):
    with Queue(tmp_path / "q", retention_bytes=0) as q:
        q.put(b"0")
        batch = q.lease("key")
        batch.ack()
        with pytest.raises(BatchExpired, match="are gone"):
            list(batch)


def test_the_oldest_acknowledged_batches_go_first_when_they_are_too_many_bytes(make):
    with make(retention_bytes=25) as q:
        q.put_many(numbers(100, 140))
        batches = [q.lease(key, max_records=2) for key in "abcd"]  # ten bytes each, with the lengths of the records
        for batch in (batches[1], batches[0], batches[2], batches[3]):
            batch.ack()
            time.sleep(0.003)
        for key in "ba":
            with pytest.raises(BatchExpired):
                q.lease(key)
        assert [q.lease(key).state for key in "cd"] == ["acked", "acked"]
        check_manifest(batches[3], numbers(106, 108))


def test_returned_leased_and_dead_batches_are_never_dropped_by_retention(make):
    with make(retention=timedelta(0), retention_bytes=0) as q:
        q.put_many(numbers(0, 20))
        leased, returned, dead, done = (q.lease(key, max_records=2) for key in "abcd")
        returned.nack()
        dead.to_dead_letters()
        done.ack()
        for number, batch in enumerate((leased, returned, dead)):
            assert list(q.batch(batch.id)) == numbers(2 * number, 2 * number + 2)


# The batch as files


def test_a_batch_is_read_without_the_queue(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(0, 50))
        batch = q.lease("key", max_records=33)
    assert list(batch) == numbers(0, 33)  # closed
    os.remove(tmp_path / "q.wal")
    assert list(batch) == numbers(0, 33)


def test_a_batch_directory_copied_elsewhere_is_read_by_the_manifest_module_alone(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(0, 50))
        folder = Path(q.lease("key", max_records=33).manifest_path).parent
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(folder)
    program = (
        "import sys\nfrom qewqew_core.batch import manifest, segments\nfrom qewqew_core.formats.chunk import split\n"
        "for segment in manifest.load(sys.argv[1]).segments:\n"
        "    for _, data in segments.read_segment(sys.argv[1], segment):\n"
        "        print(b' '.join(split(data)[0]).decode())\n"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "elsewhere" / "copy")]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.split() == [str(number) for number in range(33)]


def test_a_damaged_segment_is_found_before_any_of_its_records_is_given_out(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(0, 50))
        batch = q.lease("key")
        second = Path(batch.manifest_path).with_name("q.30002")
        data = bytearray(second.read_bytes())
        data[-1] ^= 1
        second.write_bytes(data)
        in_first = manifest.load(batch.manifest_path).segments[0].records
        records = iter(batch)
        assert [next(records) for _ in range(in_first)] == numbers(0, in_first)
        with pytest.raises(Corrupt, match=r"q\.30002, offset 10: the checksum"):
            next(records)
        assert len(q.verify().problems) == 1
        second.unlink()
        with pytest.raises(Exception, match=r"q\.30002"):
            list(batch)


def test_damage_is_named_by_the_piece_of_64_kib_also_if_much_is_read_at_once(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([bytes(1000)] * 1000)
        batch = q.lease("key")
    (segment,) = manifest.load(batch.manifest_path).segments
    ends = [offset for offset, _ in segment.boundaries]
    assert len(ends) > 5
    path = Path(batch.manifest_path).with_name(segment.file)
    data = bytearray(path.read_bytes())
    data[ends[4] - 1] ^= 1
    data[ends[5] + 1] ^= 1
    path.write_bytes(data)
    for size in 1, 100_000, 8 << 20:
        with pytest.raises(Corrupt, match=f"offset {ends[3]}: the checksum of the bytes up to {ends[4]} is"):
            list(segments.read_segment(path.parent, segment, size))


def test_every_state_survives_reopening_with_its_files_where_they_belong(make, tmp_path):
    with make(max_attempts=2) as q:
        q.put_many(numbers(0, 60))
        leased, returned, dead, acked, again = (q.lease(key, max_records=7) for key in "abcde")
        returned.nack("r")
        dead.to_dead_letters("d")
        acked.ack()
        q.lease("f").nack()  # the returned one, once more: dead now
        again.nack()
        again = q.lease("g")
        expected = [(one.id, one.state, one.attempt, one.key, one.reason, list(one)) for one in (*q.batches(), *q.dead())]
    for _ in range(2):
        with make(max_attempts=2) as q:
            assert [
                (one.id, one.state, one.attempt, one.key, one.reason, list(one)) for one in (*q.batches(), *q.dead())
            ] == expected
            assert sorted(path.name for path in (tmp_path / "q.dead").iterdir()) == sorted([returned.id, dead.id])
            assert sorted(path.name for path in (tmp_path / "q.batches").iterdir()) == sorted([leased.id, acked.id, again.id])
            assert list(q) == numbers(35, 60)
            assert q.verify().problems == []


def test_a_batch_shows_what_it_is(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"0"] * 1200)
        batch = q.lease("key")
        assert repr(batch) == f"<Batch {batch.id} leased, attempt 1, 1,200 records>"


def test_a_stray_directory_beside_the_segments_does_not_break_the_queue(tmp_path):
    """Whoever looks at a batch may leave something there: a notebook its checkpoints, a file manager its thumbnails."""
    q = Queue(tmp_path / "q", retention_bytes=0)
    q.put(b"0")
    batch = q.lease("key")
    Path(batch.manifest_path).with_name(".ipynb_checkpoints").mkdir()
    batch.ack()
    q.close()
    with Queue(tmp_path / "q") as q, pytest.raises(BatchExpired):
        q.lease("key")


def test_something_else_where_the_batches_belong_is_refused_before_the_lease_is_committed(tmp_path):
    (tmp_path / "q.batches").write_text("not a directory")
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        with pytest.raises(Exception, match=r"q\.batches"):
            q.lease("key")
    with Queue(tmp_path / "q") as q:
        assert list(q) == [b"0"]


def test_a_record_too_large_for_put_many_leaves_batches_alone(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put(b"0")
        batch = q.lease("key")
        with pytest.raises(RecordTooLarge):
            q.put(b"x" * 53)
        assert list(batch) == [b"0"]
