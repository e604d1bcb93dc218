"""How a batch becomes partitions, and that nothing is lost or counted twice at their borders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pyspark.errors import PySparkException
from spark_batches import make_topic_batch, write_manifest, write_segment
from spark_version import PLANS_BATCHES

from qewqew_core import Queue
from qewqew_core.formats.zbus import Message
from qewqew_spark.source.splitting import OPENING

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
        (
            "offset INT",
            "has the columns value binary, offset bigint, segment string, batch string, or some of them, not offset int",
        ),
        ("offset LONG, number LONG", "or some of them, not offset bigint, number bigint"),
    ]:
        with pytest.raises(PySparkException, match=message):
            reader.schema(schema).load(large).count()


def test_partitions_are_as_many_as_asked_for_and_even_whatever_the_files_are(spark, tmp_path):
    records = [b"%d" % n * (n % 40) for n in range(20_000)]
    borders = [0, 100, 150, 9_000, 9_001, 20_000]
    segments = [
        write_segment(tmp_path, f"orders.qew.{at}", records[start:end], every=20)
        for at, (start, end) in enumerate(pairwise(borders))
    ]
    write_manifest(tmp_path, segments)
    total = sum(segment.end - segment.start for segment in segments)

    def load(option: str, value: int | str):
        return spark.read.format("qewqew").option(option, value).load(str(tmp_path))

    for count in 1, 2, 64:
        frame = load("minPartitions", count)
        assert frame.rdd.getNumPartitions() == count
        begins = ", ".join(map(str, borders[1:-1]))  # the first of a file, which costs something to open
        cost = f"length(value) + 2 + IF(offset IN ({begins}), {OPENING}, 0) AS cost"
        found = frame.selectExpr("spark_partition_id() AS task", cost).groupBy("task").sum("cost").collect()
        whole = total + OPENING * (len(segments) - 1)
        assert max(abs(row["sum(cost)"] - whole / count) for row in found) < 20 * 250 + OPENING
        assert [bytes(row.value) for row in frame.sort("offset").collect()] == records
    assert load("maxPartitionBytes", "100k").rdd.getNumPartitions() == -(-total // 102_400)


def test_a_limit_does_not_read_on(spark, tmp_path):
    """What lies far behind is damaged, so who reads that fails."""
    records = [b'{"a": %d, "b": "%s"}' % (n, b"x" * 180) for n in range(200_000)]
    write_manifest(tmp_path, [write_segment(tmp_path, "orders.qew.3", records, every=300)])
    data = bytearray((tmp_path / "orders.qew.3").read_bytes())
    data[36 << 20] ^= 1
    (tmp_path / "orders.qew.3").write_bytes(data)
    reader = spark.read.format("qewqew").option("maxPartitionBytes", "1g")
    for frame in reader.load(str(tmp_path)), reader.schema("a INT, b STRING").option("codec", "json").load(str(tmp_path)):
        assert frame.rdd.getNumPartitions() == 1
        assert len(frame.limit(10).collect()) == frame.limit(1000).count() / 100 == 10
        with pytest.raises(PySparkException, match="Corrupt: "):
            frame.count()


def test_what_spark_tells_a_source_in_python_and_asks_it(spark):
    """When this fails, it can do more than docs/spark/read.md says: prune columns, take a limit, tell its size and metrics."""
    package = "org.apache.spark.sql.execution.datasources.v2.python"

    def interfaces(name: str) -> set[str]:
        found = spark._jvm.java.lang.Class.forName(f"{package}.{name}")
        names: set[str] = set()
        while found is not None:
            names |= {each.getSimpleName() for each in found.getInterfaces()}
            found = found.getSuperclass()
        return names

    if PLANS_BATCHES:
        assert interfaces("PythonScanBuilder") == {"SupportsPushDownFilters"}
        assert interfaces("PythonScan") == {"Scan", "SupportsMetadata"}
        stream = interfaces("PythonMicroBatchStreamWithTriggerAvailableNow")
        assert stream == {"MicroBatchStream", "Logging", "SupportsAdmissionControl", "SupportsTriggerAvailableNow"}
