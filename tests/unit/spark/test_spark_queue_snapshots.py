"""Snapshots of queues, planned and read without Spark, so that something can happen in between."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
import time
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stride import examples

from qewqew_core import Queue
from qewqew_core.errors import Corrupt, RecordsTaken
from qewqew_core.limits import LIMITS
from qewqew_core.queue import inspection
from qewqew_core.queue.inspection import Snapshot
from qewqew_spark.options import Options
from qewqew_spark.source import batches, queues
from qewqew_spark.source.rows import SCHEMA


class Read:
    """What Spark does, in two steps: plan, and then read the partitions somewhere else."""

    def __init__(self, path, **options) -> None:
        reader = queues.reader(str(path), Options(options), SCHEMA)
        self.partitions = pickle.loads(pickle.dumps(reader.partitions()))  # noqa: S301 - our own
        self.reader = pickle.loads(pickle.dumps(reader))  # noqa: S301

    def rows(self) -> list[tuple[bytes, int]]:
        found = chain.from_iterable(map(self.reader.read, self.partitions))
        return [(row["value"], row["offset"]) for batch in found for row in batch.to_pylist()]

    def values(self) -> list[bytes]:
        return [value for value, _ in self.rows()]


CASES = sorted((Path(__file__).parents[2] / "data" / "qewqew").glob("*/case.json"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_what_the_java_program_left_is_read_as_it_is(case):
    body = json.loads(case.read_text())
    path = case.parent / body["queue"]
    if body["expect_error"]:
        with pytest.raises(Corrupt):
            Read(path)
    else:
        assert Read(path).values() == [bytes.fromhex(record) for record in body["expected"]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.binary(max_size=300), max_size=30)),
        st.tuples(st.just("get"), st.integers(1, 40)),
        st.tuples(st.just("lease"), st.integers(1, 40)),
        st.tuples(st.just("session"), st.integers(1, 20)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


@given(STEPS, st.integers(1, 5), st.sampled_from([100, 10_000]))
@settings(max_examples=examples(quick=10, full=60, soak=500))
def test_a_snapshot_has_what_the_queue_has_after_whatever_was_done_to_it(tmp_path_factory, steps, least, size):
    path = tmp_path_factory.mktemp("q") / "q.qew"
    queue = Queue(path, chunk_size=2000)
    try:
        for number, (what, value) in enumerate(steps):
            if what == "put":
                queue.put_many(value)
            elif what == "get":
                queue.get_many(value)
            elif what == "lease":
                queue.lease(f"{number}", max_records=value)
            elif what == "session":
                holding, taking = queue.session(), queue.session()
                holding.get_many(value)
                taking.get_many(value)
                taking.commit()
                holding.rollback()
            else:
                queue.close()
                queue = Queue(path, chunk_size=2000)
        expected = list(queue)
        found = Read(path, minPartitions=str(least), maxPartitionBytes=str(size)).rows()
        assert found == [(value, number) for number, value in enumerate(expected)]
    finally:
        queue.close()


def test_at_most_so_many_records_are_read(tmp_path):
    with Queue(tmp_path / "q.qew", chunk_size=1000) as queue:
        queue.put_many(b"%04d" % n for n in range(500))
        queue.get_many(10)
        for most in (1, 154, 155, 156, 489, 490, 1000):  # the first chunk has 155 left
            assert Read(tmp_path / "q.qew", maxRecords=str(most)).values() == [b"%04d" % n for n in range(10, 500)][:most]


def test_the_snapshot_stays_as_it_was_while_the_files_are_there(tmp_path):
    with Queue(tmp_path / "q.qew") as queue:
        queue.put_many(b"%d" % n for n in range(100))
        read = Read(tmp_path / "q.qew")
        queue.get_many(50)
        queue.put_many([b"later"] * 1000)
        assert read.values() == [b"%d" % n for n in range(100)]


def test_what_was_taken_is_told_and_never_replaced_by_what_came_after(tmp_path, capsys):
    with Queue(tmp_path / "q.qew") as queue:
        queue.put_many([b"old" * 100] * 1000)
        strict, lenient = Read(tmp_path / "q.qew"), Read(tmp_path / "q.qew", failOnDataLoss="false")
        assert len(queue.get_many(1000)) == 1000
        queue.put_many([b"new" * 100] * 1000)
        with pytest.raises(
            RecordsTaken, match=r"q\.qew\.30001, offset 10: 1000 records were taken .* lease a batch and read that"
        ):
            strict.rows()
        assert lenient.rows() == []
        assert "1000 records were taken" in capsys.readouterr().err
        assert Read(tmp_path / "q.qew").values() == [b"new" * 100] * 1000


def test_a_read_that_loses_its_chunk_half_way_says_how_many_records_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batches, "RUN_BYTES", 1)  # each piece of the log's index is read by itself
    with Queue(tmp_path / "q.qew") as queue:
        queue.put_many([b"old" * 100] * 1000)
        read = Read(tmp_path / "q.qew", failOnDataLoss="false")
        (partition,) = read.partitions
        found = read.reader.read(partition)
        first = next(found)
        queue.get_many(1000)
        queue.put_many([b"new" * 100] * 1000)
        assert set(first.column("value").to_pylist()) == {b"old" * 100}
        assert list(found) == []
        assert f"{1000 - len(first)} records were taken" in capsys.readouterr().err


def test_a_chunk_that_began_in_the_same_millisecond_does_not_pass_for_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(LIMITS, "clock", lambda: 1_800_000_000_000_000_000)
    monkeypatch.setattr(LIMITS, "boot_clock", lambda: 1_000_000_000)
    with Queue(tmp_path / "q.qew") as queue:
        queue._records.inline_bytes = 0  # all of it is in the file
        queue.put(b"old")
        read, (found, left) = Read(tmp_path / "q.qew"), inspection.snapshot(str(tmp_path / "q.qew"))
        queue.get()
        queue.put_many([b"new"] * 7)
        with pytest.raises(RecordsTaken):
            read.rows()
        with pytest.raises(RecordsTaken):
            list(inspection.chunk_records(str(tmp_path / "q.qew"), Snapshot(found, left), found[0]))


def test_damage_is_damage_whatever_the_option_says(tmp_path):
    with Queue(tmp_path / "q.qew") as queue:
        queue.put_many([b"x" * 300] * 1000)
    data = bytearray((tmp_path / "q.qew.30001").read_bytes())
    data[100_000] ^= 1
    (tmp_path / "q.qew.30001").write_bytes(data)
    for flag in ("true", "false"):
        with pytest.raises(Corrupt, match=r"q\.qew\.30001, offset \d+: the checksum"):
            Read(tmp_path / "q.qew", failOnDataLoss=flag).rows()


def test_a_chunk_that_is_used_again_at_each_look_but_the_last_is_not_damaged(tmp_path, monkeypatch):
    """A look at a queue in use may find a file between two uses: only what is wrong at each look is damage."""
    path, real, looks = tmp_path / "q.qew", inspection._pieces, 0

    def pieces(*arguments):
        nonlocal looks
        looks += 1
        if looks < 5:
            raise Corrupt("the file was used again", path=str(path))
        return real(*arguments)

    with Queue(path) as queue:
        queue.put_many([b"a"] * 10)
        (now,) = inspection.snapshot(str(path)).chunks
        monkeypatch.setattr(inspection, "_pieces", pieces)
        assert not inspection.is_damaged(str(path), now.id, now.pieces[0])
        assert looks == 5
        looks = -10
        assert inspection.is_damaged(str(path), now.id, now.pieces[0])


WRITER = """
    import itertools, sys
    from qewqew_core import Queue
    put = 0
    with Queue(sys.argv[1], chunk_size=int(sys.argv[2]), sync="never") as queue:
        print("ready", flush=True)
        for step in itertools.count():
            size = (1, 7, 300)[step % 3]
            queue.put_many(b"%08d" % n * (1 + n % 40) for n in range(put, put + size))
            put += size
            queue.get_many((1, 5, 250, 60)[step % 4])
            if len(queue) > 2000:
                queue.get_many(1500)
            if step % 50 == 49:
                queue.lease(f"{step}", max_records=100).ack()
            if step % 500 == 499:
                queue.get_many(10**6)  # the file of the last chunk begins anew
"""


@pytest.mark.parametrize("chunk_size", [1 << 13, 1 << 18])
def test_each_read_of_a_queue_in_use_is_a_snapshot_without_gaps_or_an_error(tmp_path, monkeypatch, chunk_size):
    monkeypatch.setattr(batches, "RUN_BYTES", 1)
    path = tmp_path / "q.qew"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(chunk_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            whole, newest = 0, -1
            reads = examples(quick=5, full=12, soak=1000)
            tried, until = 0, time.monotonic() + 60
            while tried < reads or (not whole and time.monotonic() < until):  # beside load, more may be taken under its eyes
                tried += 1
                try:
                    found = Read(path, maxPartitionBytes="50000").values()
                except RecordsTaken:
                    continue
                whole += 1
                numbers = [int(value[:8]) for value in found]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)) if numbers else [])
                assert found == [b"%08d" % n * (1 + n % 40) for n in numbers]
                assert not numbers or numbers[-1] >= newest
                newest = numbers[-1] if numbers else newest
            assert writer.poll() is None
        finally:
            writer.kill()
    assert whole
