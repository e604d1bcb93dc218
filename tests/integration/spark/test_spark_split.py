"""How a batch becomes partitions, and that nothing is lost or counted twice at their borders."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from spark_batches import make_topic_batch, write_manifest, write_segment

from qewqew_core import Queue
from qewqew_core.formats.zbus import Message

RECORDS = [b"%d" % n * (n % 40) for n in range(20_000)]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """A batch of one segment with a checksum for each of many boundaries."""
    path = tmp_path_factory.mktemp("large")
    write_manifest(path, [write_segment(path, "orders.qew.3", RECORDS, every=300)])
    return str(path)


def test_a_large_segment_is_divided_and_records_keep_their_numbers(spark, large):
    reader = spark.read.format("qewqew")
    assert reader.load(large).rdd.getNumPartitions() == 1
    frame = reader.option("maxPartitionBytes", 300_000).load(large)
    assert frame.rdd.getNumPartitions() == 6
    found = frame.orderBy("offset").collect()
    assert [bytes(row.value) for row in found] == RECORDS
    assert [row.offset for row in found] == list(range(len(RECORDS)))


def test_a_damaged_byte_fails_in_its_part_alone(spark, tmp_path):
    segment = write_segment(tmp_path, "orders.qew.3", RECORDS, every=300)
    write_manifest(tmp_path, [segment])
    at = segment.boundaries[40][0] + 100
    data = bytearray((tmp_path / "orders.qew.3").read_bytes())
    data[at] ^= 1
    (tmp_path / "orders.qew.3").write_bytes(data)
    frame = spark.read.format("qewqew").option("minPartitions", 8).load(str(tmp_path))
    with pytest.raises(PySparkException, match=r"Corrupt: .*orders\.qew\.3, offset \d+: the checksum"):
        frame.count()
    assert len(frame.take(1000)) == 1000  # Spark reads the first partition first


def test_a_leased_batch_of_a_large_chunk_is_divided(spark, tmp_path):
    with Queue(tmp_path / "orders.qew") as queue:
        queue.put_many(RECORDS)
        batch = queue.lease("key")
        frame = spark.read.format("qewqew").option("minPartitions", 4).load(batch.manifest_path)
        assert frame.rdd.getNumPartitions() >= 4
        assert [bytes(row.value) for row in frame.orderBy("offset").collect()] == RECORDS


def test_a_segment_of_a_topic_is_divided(spark, tmp_path):
    messages = [Message(b"%d" % n * (n % 40), f"a.{n % 30}", timestamp=n, number=n) for n in range(5_000)]
    matching = make_topic_batch(tmp_path, messages, filter="a.10;a.20")
    frame = spark.read.format("qewqew").option("minPartitions", 8).load(str(tmp_path))
    assert frame.rdd.getNumPartitions() >= 8
    assert [row.number for row in frame.orderBy("number").collect()] == [one.number for one in matching]


def test_a_read_that_needs_no_value_has_the_columns_it_asks_for_in_its_order(spark, large):
    reader = spark.read.format("qewqew")
    frame = reader.schema("segment STRING, offset LONG").load(large)
    assert frame.columns == ["segment", "offset"]
    assert frame.where("offset = 19999").collect() == [("orders.qew.3", 19999)]
    assert reader.schema("offset LONG NOT NULL").load(large).count() == len(RECORDS)
    for schema, message in [
        ("offset INT", "has the columns value binary, offset bigint, segment string, or some of them, not offset int"),
        ("offset LONG, number LONG", "or some of them, not offset bigint, number bigint"),
    ]:
        with pytest.raises(PySparkException, match=message):
            reader.schema(schema).load(large).count()
