"""Filters that Spark hands to the source, where the session says that it may."""

from __future__ import annotations

import pytest
from spark_batches import make_batch, make_topic_batch
from spark_version import PUSHES_FILTERS

from qewqew_core import Queue, zbus
from qewqew_core.zbus import Message


@pytest.fixture(params=["on", "off"])
def pushing(spark, request) -> bool:
    """Both ways: the source must read with it off, which is the default, and may leave partitions out with it on."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true" if request.param == "on" else "false")
    yield request.param == "on" and PUSHES_FILTERS
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_filter_leaves_out_the_partitions_of_a_batch_that_it_excludes(spark, tmp_path, pushing):
    batch = make_batch(tmp_path / "b", *([b"%d" % n] * 10 for n in range(10)))
    frame = spark.read.format("qewqew").option("maxPartitionBytes", 1).load(str(batch))
    for where, offsets, partitions in [
        ("offset >= 20 AND offset < 30 AND segment = 'orders.qew.19'", range(20, 30), 1),
        ("offset IN (1, 12) AND NOT offset = 1", [12], 2),
        ("(offset = 5 OR offset = 95) AND value IS NOT NULL", [5, 95], 10),
        ("offset < 0", [], 1),  # Spark makes one where there are none
    ][: 4 if pushing else 1]:
        found = frame.where(where)
        assert found.rdd.getNumPartitions() == (partitions if pushing else 10), where
        assert sorted(row.offset for row in found.collect()) == list(offsets), where


def test_a_read_without_a_filter_works_too(spark, tmp_path, pushing):
    batch = make_batch(tmp_path / "b", [b"a"], [b"b"])
    assert spark.read.format("qewqew").load(str(batch)).count() == 2


def test_filters_are_pushed_to_queues(spark, tmp_path, pushing):
    with Queue(tmp_path / "orders.qew", chunk_size=1000) as queue:
        queue.put_many(b"%04d" % n for n in range(500))
    frame = spark.read.format("qewqew").option("maxPartitionBytes", 1000).load(str(tmp_path / "orders.qew"))
    found = frame.where("offset >= 165 AND offset <= 329")
    assert [bytes(row.value) for row in found.orderBy("offset").collect()] == [b"%04d" % n for n in range(165, 330)]
    assert found.rdd.getNumPartitions() == (1 if pushing else 4)


def test_filters_are_pushed_to_batches_of_topics(spark, tmp_path, pushing):
    messages = [Message(b"x", "a", timestamp=n * 1000, number=n) for n in range(100)]
    make_topic_batch(tmp_path, messages, cuts=[10, 20])
    frame = spark.read.format("qewqew").option("maxPartitionBytes", 30 * (zbus.HEAD + 1)).load(str(tmp_path))
    start = 7_000_000_000 + 50 * (zbus.HEAD + 1)
    found = frame.where(
        f"offset >= {start} AND timestamp >= TIMESTAMP '1970-01-01 00:01:39 UTC' AND tag = 'a' AND topic = 'orders'"
    )
    assert [row.number for row in found.collect()] == [99]
    assert found.rdd.getNumPartitions() == (2 if pushing else 4)


def test_a_column_of_the_schema_that_only_has_the_name_is_not_taken_for_the_sources(spark, tmp_path, pushing):
    batch = make_batch(tmp_path / "b", [b'{"offset": 100}'], [b'{"offset": 0}'])
    frame = spark.read.format("qewqew").option("codec", "json").schema("offset LONG, _metadata STRUCT<offset LONG>")
    assert frame.load(str(batch)).where("offset = 100").count() == 1
    assert frame.load(str(batch)).where("_metadata.offset = 1").select("offset").collect() == [(0,)]
