"""Reading a queue that nobody has leased from: a snapshot, while its owner goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from pyspark.errors import PySparkException

from qewqew_core import Queue
from qewqew_core.formats import chunk


def rows(spark, path, **options) -> list[tuple[bytes, int, str]]:
    found = spark.read.format("qewqew").options(**options).load(str(path)).orderBy("offset").collect()
    return [(bytes(row.value), row.offset, row.segment) for row in found]


def values(spark, path, **options) -> list[bytes]:
    return [value for value, *_ in rows(spark, path, **options)]


def failure(frame) -> str:
    with pytest.raises(PySparkException) as caught:
        frame.collect()
    return [line for line in str(caught.value).split("\n") if line.strip() and "SQLSTATE" not in line][-1]


@pytest.mark.quick("Spark reads a queue without taking from it")
def test_a_closed_queue_is_read_from_head_to_tail_over_all_chunks(spark, tmp_path):
    path = tmp_path / "orders.qew"
    with Queue(path, chunk_size=1000) as queue:
        queue.put_many(b"%04d" % n for n in range(500))
        queue.get_many(200)
    found = rows(spark, path)
    assert [value for value, *_ in found] == [b"%04d" % n for n in range(200, 500)]
    assert [number for _, number, _ in found] == list(range(300))
    assert [segment for *_, segment in found][::299] == ["orders.qew.30002", "orders.qew.30004"]


def test_reading_takes_nothing_and_needs_no_lock(spark, tmp_path):
    path = tmp_path / "orders.qew"
    with Queue(path) as queue:
        for n in range(5):
            queue.put(b"%d" % n)  # still in the log alone, as an open queue keeps small commits
        assert values(spark, path) == [b"0", b"1", b"2", b"3", b"4"]
        queue.put(b"5")
        assert queue.get() == b"0"
        assert values(spark, path) == [b"1", b"2", b"3", b"4", b"5"]
        assert list(queue) == [b"1", b"2", b"3", b"4", b"5"]


def test_records_of_all_sizes_in_chunk_and_log_come_in_order(spark, tmp_path):
    path = tmp_path / "orders.qew"
    records = [b"%d" % n * (n % 97) for n in range(20_000)]
    with Queue(path, chunk_size=1 << 20) as queue:
        for at in range(0, len(records), 997):
            queue.put_many(records[at : at + 997])
        queue.get_many(1234)
        frame = spark.read.format("qewqew").options(minPartitions=7).load(str(path))
        assert frame.rdd.getNumPartitions() >= 7
        assert values(spark, path, minPartitions=7) == records[1234:]


def test_records_that_a_session_took_behind_others_are_not_there(spark, tmp_path):
    path = tmp_path / "orders.qew"
    with Queue(path) as queue:
        queue.put_many(b"%d" % n for n in range(10))
        with queue.session() as first:
            assert first.get_many(3) == [b"0", b"1", b"2"]
            with queue.session() as second:
                assert second.get_many(3) == [b"3", b"4", b"5"]
            found = rows(spark, path)
            assert [value for value, *_ in found] == [b"0", b"1", b"2", b"6", b"7", b"8", b"9"]
            assert [number for _, number, _ in found] == list(range(7))
            first.rollback()


def test_a_queue_that_no_log_describes_is_read(spark, tmp_path):
    """As a Java program leaves it."""
    frames = chunk.frame([b"taken", b"a", b"", b"c"])
    (tmp_path / "java.qew").write_bytes(b"\x00\x07")
    (tmp_path / "java.qew.7").write_bytes(chunk.POINTERS.pack(17, 10 + len(frames), 0) + frames + b"\x00" * 100)
    assert rows(spark, tmp_path / "java.qew") == [(b"a", 0, "java.qew.7"), (b"", 1, "java.qew.7"), (b"c", 2, "java.qew.7")]


def test_an_empty_queue_is_an_empty_frame_and_one_that_nobody_made_too(spark, tmp_path):
    with Queue(tmp_path / "orders.qew") as queue:
        assert rows(spark, tmp_path / "orders.qew") == []
        queue.put(b"x")
        queue.get()
    assert rows(spark, tmp_path / "orders.qew") == []
    assert rows(spark, tmp_path / "other.qew") == []


def test_a_killed_writers_commits_are_read_before_anybody_has_recovered_the_queue(spark, tmp_path):
    path = tmp_path / "orders.qew"
    code = f"""
        import os
        from qewqew_core import Queue
        queue = Queue({str(path)!r})
        queue.put_many([b"a"] * 1000)
        queue.put(b"b")
        queue.get()
        os._exit(1)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=300).returncode == 1
    assert values(spark, path) == [b"a"] * 999 + [b"b"]
    with Queue(path) as queue:
        assert len(queue) == 1000


TAKEN = "RecordsTaken: .* records were taken from the queue after this read began, and are gone; lease a batch"


@pytest.mark.parametrize("take", ["get", "lease", "reuse"])
def test_what_is_taken_after_the_snapshot_fails_or_is_left_out(spark, tmp_path, take):
    path = tmp_path / "orders.qew"
    with Queue(path, chunk_size=1 << 16) as queue:
        queue.put_many([b"old" * 100] * 1000)
        strict, lenient = (
            spark.read.format("qewqew").options(failOnDataLoss=flag, maxPartitionBytes=1 << 16).load(str(path))
            for flag in ("true", "false")
        )
        assert strict.rdd.getNumPartitions() == lenient.rdd.getNumPartitions() == 5  # now both have their snapshots
        if take == "lease":
            queue.lease("key", max_records=600)
        else:
            queue.get_many(600)
        if take == "reuse":
            queue.get_many(400)
            queue.put_many([b"new" * 100] * 1000)
        with pytest.raises(PySparkException, match=TAKEN):
            strict.collect()
        left = [bytes(row.value) for row in lenient.collect()]
    assert set(left) <= {b"old" * 100}
    assert (len(left) == 0) if take == "reuse" else (400 - 218 <= len(left) <= 1000 - 218)


def test_damage_is_not_taken_for_records_that_somebody_took(spark, tmp_path):
    path = tmp_path / "orders.qew"
    with Queue(path) as queue:
        queue.put_many([b"x" * 100] * 2000)
    file = tmp_path / "orders.qew.30001"
    data = bytearray(file.read_bytes())
    data[150_000] ^= 1
    file.write_bytes(data)
    for flag in ("true", "false"):
        line = failure(spark.read.format("qewqew").option("failOnDataLoss", flag).load(str(path)))
        assert line.startswith(f"qewqew_core.errors.Corrupt: {file}, offset ")
        assert "checksum" in line


def test_what_is_no_option_of_a_queue_is_refused_in_load(spark, tmp_path):
    with Queue(tmp_path / "orders.qew") as queue:
        queue.put(b"x")
    for options, message in [
        ({"startingOffsets": "earliest"}, "a queue has no option 'startingoffsets'"),
        ({"maxRecords": "0"}, "'maxRecords' must be a whole number, 1 or more, not '0'"),
        ({"failOnDataLoss": "maybe"}, "'failOnDataLoss' must be one of true, false"),
        ({"maxPartitionBytes": "1 GB"}, "'maxPartitionBytes' must be a number of bytes"),
    ]:
        with pytest.raises(PySparkException, match=message):
            spark.read.format("qewqew").options(**options).load(str(tmp_path / "orders.qew"))


WRITER = """
    import itertools, sys, time
    from qewqew_core import Queue
    put = 0
    with Queue(sys.argv[1], chunk_size=1 << 18, sync="never") as queue:
        print("ready", flush=True)
        for step in itertools.count():
            queue.put_many(b"%08d" % n * (1 + n % 40) for n in range(put, put + 50))
            put += 50
            queue.get_many(40)
            if step % 100 == 99:
                queue.lease(f"{step}", max_records=900).ack()
            time.sleep(0.01)
"""


def test_a_queue_in_use_gives_snapshots_or_says_that_it_was_taken_from(spark, tmp_path):
    """Without Spark, and hundreds of times: test_spark_queue_snapshots."""
    path = tmp_path / "orders.qew"
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True)
    snapshots, refused = [], []
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(3):
            try:
                snapshots.append(values(spark, path))
            except PySparkException as error:
                refused.append(str(error))
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()
    assert all("RecordsTaken: " in one or "the queue changed while it was read" in one for one in refused)
    snapshots.append(values(spark, path))  # nobody disturbs this one
    for found in snapshots:
        first = int(found[0][:8])
        assert found == [b"%08d" % n * (1 + n % 40) for n in range(first, first + len(found))]
