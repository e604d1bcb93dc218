"""`spark.readStream` of a topic: what only a real Spark shows. Kills: test_spark_stream_kills.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from spark_version import PLANS_BATCHES, READER

from qewqew_core import Message, Topic

SIZE = 300  # bytes of a message in its block

limited = pytest.mark.skipif(not PLANS_BATCHES, reason="Spark has no limits for such a stream before 4.2")


@pytest.fixture
def topic(tmp_path: Path):
    """Three blocks with 350, 350 and 300 messages."""
    with Topic(tmp_path / "orders", block_size=100_000) as topic:
        fill(topic, range(1000))
        yield topic


def fill(topic: Topic, numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, 50):
        those = range(first, min(first + 50, numbers.stop))
        topic.append_many([Message(b'{"n": %89d}' % n, "abb"[n % 3]) for n in those])


class Run:
    """A stream into Parquet files at ``to``, until all is read that is there."""

    def __init__(self, spark, topic: Topic, to: Path, schema: str | None = None, **options) -> None:
        reader = spark.readStream.format("qewqew").options(**options)
        frame = (reader.schema(schema) if schema else reader).load(topic.path)
        self.spark, self.to = spark, to
        self.query = (
            frame.writeStream.format("parquet")
            .option("path", str(to / "out"))
            .option("checkpointLocation", str(to / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    def sizes(self) -> list[int]:
        """How many rows each batch had."""
        assert self.query.awaitTermination(120)
        return [one["numInputRows"] for one in self.query.recentProgress if one["numInputRows"]]

    def numbers(self) -> list[int]:
        return sorted(row.number for row in self.spark.read.parquet(str(self.to / "out")).select("number").collect())


def failure(query) -> str:
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    return str(caught.value)


@pytest.mark.quick("a Spark stream goes on where it stopped")
@limited
def test_a_stream_goes_on_where_it_stopped(spark, topic, tmp_path):
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 400, "minPartitions": 2}
    run = Run(spark, topic, tmp_path, **options)
    assert run.sizes() == [400, 400, 200]
    (reader,) = topic.readers()
    assert topic.stats().readers == {reader: 200}  # the last batch is committed when the next one is planned
    progress = [one["sources"][0] for one in run.query.recentProgress if one["numInputRows"]]
    places = [(json.loads(one["endOffset"])["number"], json.loads(one["latestOffset"])) for one in progress]
    assert [(end, latest["number"]) for end, latest in places] == [(400, 1000), (800, 1000), (1000, 1000)]
    assert [latest["recordsBehindLatest"] for _, latest in places] == [600, 200, 0]
    assert [latest["bytesBehindLatest"] for _, latest in places] == [600 * SIZE, 200 * SIZE, 0]
    assert not any(one["metrics"] for one in progress)  # to which a source in Python can add nothing

    fill(topic, range(1000, 1500))
    topic.max_records = 1
    assert topic.trim() == 700  # all but the block in which the last batch lies
    again = Run(spark, topic, tmp_path, **options | {"startingOffsets": "latest"})  # of a new query only
    assert again.sizes() == [400, 100]
    assert again.numbers() == list(range(1500))
    assert topic.readers() == [reader]
    assert topic.stats().readers == {reader: 100}


def test_a_stream_without_limits_takes_all_and_goes_on_where_it_stopped(spark, topic, tmp_path):
    options = {"startingOffsets": "earliest", "reader": "lake"}
    assert Run(spark, topic, tmp_path, **options).sizes() == [1000]
    fill(topic, range(1000, 1500))
    again = Run(spark, topic, tmp_path, **options)
    assert again.sizes() == [500]
    assert again.numbers() == list(range(1500))
    assert topic.stats().readers == {"lake": 500}  # the last batch is committed when the next one is planned


@pytest.mark.skipif(PLANS_BATCHES, reason="Spark has limits for such a stream since 4.2")
@pytest.mark.parametrize("options", [{}, {"reader": "lake", "maxOffsetsPerTrigger": 1}, {"reader": "", "maxBytesPerTrigger": 1}])
def test_before_spark_4_2_a_stream_with_limits_or_without_the_name_of_its_reader_is_refused(spark, topic, tmp_path, options):
    assert "before pyspark 4.2" in failure(Run(spark, topic, tmp_path, **options).query)


@limited
def test_a_stream_holds_blocks_until_it_has_committed_them(spark, topic, tmp_path):
    topic.delete_committed = True
    seen = []

    def look(frame, batch_id: int) -> None:
        topic.trim()
        seen.append((topic.stats().first, sorted(row.number for row in frame.select("number").collect())))

    query = (
        spark.readStream.format("qewqew")
        .options(startingOffsets="earliest", maxOffsetsPerTrigger=350, reader="lake", filter="a")
        .load(topic.path)
        .writeStream.foreachBatch(look)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    # When a batch runs, the blocks are gone whose batch was committed before.
    assert [first for first, _ in seen] == [0, 350, 700]
    assert [numbers for _, numbers in seen] == [[*range(0, 350, 3)], [*range(351, 700, 3)], [*range(702, 1000, 3)]]
    assert topic.readers() == ["lake"]


@limited
def test_a_stream_runs_through_many_blocks_while_they_are_written(spark, tmp_path):
    with Topic(tmp_path / "orders", block_size=2 * SIZE, delete_committed=True) as topic:
        fill(topic, range(1))
        query = (
            spark.readStream.format("qewqew")
            .options(startingOffsets="earliest", maxBytesPerTrigger=50 * SIZE)
            .load(topic.path)
            .writeStream.format("memory")
            .queryName("many_blocks")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            for _ in range(100):
                topic.append_many([b"x"] * 3)
            query.processAllAvailable()
        finally:
            query.stop()
        found = [row.number for row in spark.sql("SELECT number FROM many_blocks").collect()]
        assert sorted(found) == list(range(301))
        topic.trim()
        assert topic.stats().first > 200  # all but what the last batch had


@limited
def test_a_batch_waits_for_enough_messages(spark, topic, tmp_path):
    """As Kafka's source does: all that is there at first, then so many at least, or what there is after the delay."""
    query = (
        spark.readStream.format("qewqew")
        .options(startingOffsets="earliest", minOffsetsPerTrigger=150, maxTriggerDelay="20s")
        .load(topic.path)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )

    def sizes() -> list[int]:
        return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]

    def wait(expected: list[int]) -> None:
        end = time.monotonic() + 120
        while sizes() != expected and time.monotonic() < end:
            time.sleep(0.2)
        assert sizes() == expected

    try:
        wait([1000])
        fill(topic, range(1000, 1150))
        wait([1000, 150])
        began = time.monotonic()
        fill(topic, range(1150, 1160))
        time.sleep(5)
        assert sizes() == [1000, 150]
        wait([1000, 150, 10])
        assert time.monotonic() - began > 10
    finally:
        query.stop()


def test_a_start_that_was_removed_fails_or_is_passed_over(spark, topic, tmp_path):
    topic.max_records = 1
    topic.trim()
    line = failure(Run(spark, topic, tmp_path / "strict", startingOffsets=300, **READER).query)
    assert "MessagesLost" in line
    assert "message 300 has been removed from the topic; the oldest one is 700" in line
    lax = Run(spark, topic, tmp_path / "lax", startingOffsets=300, failOnDataLoss="false", **READER)
    assert lax.sizes() == [300]


def test_a_stream_is_typed(spark, topic, tmp_path):
    run = Run(
        spark,
        topic,
        tmp_path,
        schema="n BIGINT, _metadata STRUCT<number: BIGINT>",
        startingOffsets=900,
        codec="json",
        **READER,
    )
    assert run.sizes() == [100]
    rows = spark.read.parquet(str(tmp_path / "out")).selectExpr("n", "_metadata.number").collect()
    assert sorted(map(tuple, rows)) == [(n, n) for n in range(900, 1000)]
