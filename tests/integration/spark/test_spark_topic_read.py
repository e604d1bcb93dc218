"""`spark.read` of a topic: what only a real Spark shows. What is planned and refused: tests/unit/spark/test_spark_topics.py."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from qewqew_core import Message, Topic

FIRST = 1_763_683_200_123  # 2025-11-21T00:00:00.123Z


@pytest.fixture
def topic(tmp_path: Path):
    with Topic(tmp_path / "orders", block_size=100_000) as topic:
        for first in range(0, 1000, 50):
            numbers = range(first, first + 50)
            topic.append_many([Message(b'{"n": %89d}' % n, "abb"[n % 3], f"id-{n}", n, FIRST + n) for n in numbers])
        yield topic


def load(spark, topic: Topic, **options):
    return spark.read.format("qewqew").options(**options).load(topic.path)


def failure(frame) -> str:
    with pytest.raises(PySparkException) as caught:
        frame.collect()
    return [line for line in str(caught.value).split("\n") if line.strip() and "SQLSTATE" not in line][-1]


@pytest.mark.quick("Spark reads a topic")
def test_a_topic_is_read_in_parallel_and_as_it_is(spark, topic):
    frame = load(spark, topic, minPartitions=4)
    assert frame.rdd.getNumPartitions() >= 4
    rows = frame.selectExpr("*", "unix_millis(timestamp) AS ms").orderBy("number").collect()
    found = [Message(bytes(row.value), row.tag, row.id, row.corr_offset, row.ms, row.number, row.offset) for row in rows]
    assert found == list(topic)
    assert {row.topic for row in rows} == {"orders"}


def test_options_choose_the_messages(spark, topic):
    frame = load(spark, topic, startingOffsets=100, endingOffsets=900, filter="a", maxRecords=5)
    assert sorted(row.number for row in frame.collect()) == [102, 105, 108, 111, 114]
    assert load(spark, topic, startingOffsets=1000).count() == 0


def test_columns_that_are_not_wanted_may_be_left_out(spark, topic):
    frame = spark.read.format("qewqew").schema("number BIGINT, tag STRING").load(topic.path)
    assert frame.where("tag = 'a'").count() == 334


def test_errors_say_what_and_where(spark, topic, tmp_path):
    assert "there is no message 1001 in the topic" in failure(load(spark, topic, startingOffsets=1001))
    block = Path(topic.path, "data", f"{0:020d}.zbus")
    data = bytearray(block.read_bytes())
    data[100_000] ^= 1
    block.write_bytes(data)
    line = failure(load(spark, topic, maxPartitionBytes=20_000))
    assert line.startswith(f"qewqew_core.errors.Corrupt: {block}, offset 75000: the messages up to 105000 do not match")
    with pytest.raises(PySparkException, match="a read of a topic has no option 'startingofset'; did you mean 'startingOffsets'"):
        load(spark, topic, startingOfset=7).collect()


def test_reading_needs_no_lock_and_disturbs_no_writer(spark, topic):
    done = threading.Event()

    def write() -> None:
        number = 1000
        while not done.is_set():
            topic.append_many([b"%06d" % (number + one) for one in range(20)])
            number += 20

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            numbers = sorted(row.number for row in load(spark, topic, minPartitions=4).select("number").collect())
            assert numbers == list(range(len(numbers)))  # a prefix, at any moment
            assert len(numbers) >= 1000
    finally:
        done.set()
        writer.join()


def test_a_large_body_is_read_whole(spark, tmp_path):
    body = b"x" * (32 << 20)
    with Topic(tmp_path / "pages") as topic:
        topic.append_many([b"before", body, b"behind"])
        rows = load(spark, topic).selectExpr("length(value) AS size", "md5(value) AS md5").collect()
    assert [row.size for row in rows] == [6, 32 << 20, 6]


def test_records_are_typed(spark, topic):
    topic.append(b"not JSON", tag="b")
    schema = "n BIGINT, _corrupt_record STRING, _metadata STRUCT<number: BIGINT, tag: STRING>"
    frame = spark.read.format("qewqew").schema(schema).options(codec="json", startingOffsets=990).load(topic.path)
    rows = sorted(frame.selectExpr("n", "_corrupt_record", "_metadata.number", "_metadata.tag").collect(), key=lambda row: row[2])
    assert [tuple(row) for row in rows[-2:]] == [(999, None, 999, "a"), (None, "not JSON", 1000, "b")]
