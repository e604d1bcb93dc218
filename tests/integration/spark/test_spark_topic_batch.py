"""The data source `qewqew` on batches of a topic, made by hand."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime

import pytest
from pyspark.errors import PySparkException
from spark_batches import make_topic_batch, write_block, write_topic_manifest

from qewqew_core.batch import manifest
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Message

FIRST = 1_763_683_200_123  # 2025-11-21T00:00:00.123Z
MESSAGES = [
    Message(
        b"%d\x00\xff" % number * (number % 4),  # each fourth is empty
        tag=(None, "orders.eu", "orders.ü😀", "t" * 127)[number % 4],
        id=(None, f"id-{number}", "ü" * 19)[number % 3],
        corr_offset=(0, -1, 1 << 62)[number % 3],
        timestamp=FIRST + number,
        number=100 + number,
    )
    for number in range(200)
]
PLAIN = [one._replace(corr_offset=0) for one in MESSAGES]  # as dialect C has them


def rows(spark, path) -> list[tuple]:
    """Value, tag, id, corr_offset, timestamp in milliseconds, number, offset, topic; in the order of the topic."""
    found = spark.read.format("qewqew").load(str(path)).orderBy("offset")
    columns = "tag", "id", "corr_offset", "unix_millis(timestamp)", "number", "offset", "topic"
    return [(bytes(value), *rest) for value, *rest in found.selectExpr("value", *columns).collect()]


def expected(messages: list[Message]) -> list[tuple]:
    return [(*one[:7], "orders") for one in messages]


def failure(spark, path) -> str:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("qewqew").load(str(path)).collect()
    return [line for line in str(caught.value).split("\n") if line.strip() and "SQLSTATE" not in line][-1]


def test_a_batch_of_a_topic_has_the_columns_of_its_messages(spark, tmp_path):
    make_topic_batch(tmp_path, MESSAGES)
    frame = spark.read.format("qewqew").option("minPartitions", 2).load(str(tmp_path))
    assert frame.dtypes == [
        ("value", "binary"),
        ("tag", "string"),
        ("id", "string"),
        ("offset", "bigint"),
        ("number", "bigint"),
        ("corr_offset", "bigint"),
        ("timestamp", "timestamp"),
        ("topic", "string"),
    ]
    assert frame.rdd.getNumPartitions() == 2
    (row,) = frame.where("number = 101").collect()
    assert (bytes(row.value), row.tag, row.id, row.corr_offset, row.topic) == (b"1\x00\xff", "orders.eu", "id-1", -1, "orders")
    assert row.offset == 7_000_000_000 + zbus.HEAD
    assert row.timestamp.astimezone(UTC) == datetime(2025, 11, 21, 0, 0, 0, 124_000, UTC)


@pytest.mark.parametrize("filter", [None, "orders.*", "nothing;" + "t" * 118])
@pytest.mark.parametrize("dialect", ["B", "C"])
def test_messages_arrive_as_they_are(spark, tmp_path, dialect, filter):
    matching = make_topic_batch(tmp_path, MESSAGES if dialect == "B" else PLAIN, cuts=[1, 50], dialect=dialect, filter=filter)
    assert len(manifest.load(str(tmp_path)).segments) == 6
    assert len(matching) == {None: 200, "orders.*": 100}.get(filter, 0)
    assert rows(spark, tmp_path) == expected(matching)


def test_a_long_segment_is_read_in_many_runs(spark, tmp_path):
    messages = [Message(b"%d" % n * (n % 40), f"a.{n % 30}", timestamp=n, number=n) for n in range(20_000)]
    messages[70] = messages[70]._replace(body=b"x" * 3_000_000)
    matching = make_topic_batch(tmp_path, messages, filter="a.10;a.20")
    assert len(matching) == 1333
    assert rows(spark, tmp_path) == expected(matching)


def test_a_batch_without_messages_is_an_empty_frame(spark, tmp_path):
    write_topic_manifest(tmp_path, [], [])
    assert rows(spark, tmp_path) == []


def test_the_columns_may_be_given_but_no_others(spark, tmp_path):
    make_topic_batch(tmp_path, MESSAGES)
    reader = spark.read.format("qewqew")
    assert reader.schema(spark.read.format("qewqew").load(str(tmp_path)).schema).load(str(tmp_path)).count() == 200
    with pytest.raises(
        PySparkException,
        match=r"value binary, tag string, .* topic string, batch string, or some of them, not value binary, offset",
    ):
        reader.schema("value BINARY, offset LONG, segment STRING").load(str(tmp_path)).count()


def test_a_damaged_byte_fails_with_file_and_offset(spark, tmp_path):
    make_topic_batch(tmp_path, MESSAGES, cuts=[50])
    segment = manifest.load(str(tmp_path)).segments[1]
    file = tmp_path / segment.file
    data = bytearray(file.read_bytes())
    data[segment.end - 1] ^= 1
    file.write_bytes(data)
    line = failure(spark, tmp_path)
    piece = [segment.start, *segment.cuts][-1]
    assert line.startswith(f"qewqew_core.errors.Corrupt: {file}, offset {piece}: the checksum of the bytes up to")


def test_a_message_that_does_not_fit_fails_with_its_place_although_the_checksum_is_right(spark, tmp_path):
    messages = [Message(b"abc", timestamp=0, number=n) for n in range(3)]
    (segment,) = write_block(tmp_path, 0, messages)
    file = tmp_path / segment.file
    data = bytearray(file.read_bytes())
    data[207 + zbus.LENGTH_AT] = 0x40
    file.write_bytes(data)
    damaged = manifest.Segment(segment.file, 0, segment.end, 3, f"{zlib.crc32(data):08x}", ())
    write_topic_manifest(tmp_path, [damaged], messages)
    line = failure(spark, tmp_path)
    assert line.startswith(f"qewqew_core.errors.Corrupt: {file}, offset 207: no message 1 begins here")


def test_another_number_of_messages_than_the_manifest_says_fails(spark, tmp_path):
    make_topic_batch(tmp_path, MESSAGES, filter="orders.*")
    file = tmp_path / "manifest.json"
    body = json.loads(file.read_bytes())
    body["filter"] = "orders.eu"
    file.write_text(json.dumps(body))
    assert failure(spark, tmp_path).startswith(f"qewqew_core.errors.BadManifest: {file}: the boundaries or the number of records")
