"""The data source `qewqew` on batches made by hand."""

from __future__ import annotations

import json
import shutil
import zlib

import pytest
from pyspark.errors import PySparkException
from spark_batches import make_batch, make_topic_batch, write_manifest, write_segment

from qewqew_core import Queue
from qewqew_core.batch.manifest import Segment
from qewqew_core.formats import chunk
from qewqew_core.formats.zbus import Message


def rows(spark, path) -> list[tuple[bytes, int, str]]:
    found = spark.read.format("qewqew").load(str(path)).orderBy("offset").collect()
    return [(bytes(row.value), row.offset, row.segment) for row in found]


def failure(spark, path) -> str:
    """The last line that says something of what a user sees."""
    with pytest.raises(PySparkException) as caught:
        spark.read.format("qewqew").load(str(path)).collect()
    return [line for line in str(caught.value).split("\n") if line.strip() and "SQLSTATE" not in line][-1]


def damage_manifest(batch, change) -> None:
    body = json.loads((batch / "manifest.json").read_bytes())
    change(body)
    (batch / "manifest.json").write_text(json.dumps(body))


@pytest.mark.quick("Spark reads a batch")
def test_records_come_with_their_number_in_the_batch_and_their_segment(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"a", b"b"], [b"c"])
    frame = spark.read.format("qewqew").load(str(batch))
    assert frame.dtypes == [("value", "binary"), ("offset", "bigint"), ("segment", "string")]
    assert rows(spark, batch) == [(b"a", 0, "orders.qew.17"), (b"b", 1, "orders.qew.17"), (b"c", 2, "orders.qew.18")]


@pytest.mark.parametrize(("options", "partitions"), [({}, 1), ({"maxPartitionBytes": 6}, 3), ({"minPartitions": 5}, 5)])
def test_small_segments_share_a_partition_as_far_as_options_allow(spark, tmp_path, options, partitions):
    batch = make_batch(tmp_path / "b", *([b"%d" % n] for n in range(5)))
    frame = spark.read.format("qewqew").options(**options).load(str(batch))
    assert frame.rdd.getNumPartitions() == partitions
    assert [(bytes(row.value), row.offset, row.segment) for row in frame.collect()] == [
        (b"%d" % n, n, f"orders.qew.{17 + n}") for n in range(5)
    ]


def test_a_batch_is_given_by_directory_manifest_or_file_uri(spark, tmp_path):
    batch = make_batch(tmp_path / "a batch", [b"a"])
    manifest = batch / "manifest.json"
    for path in (batch, f"{batch}/", manifest, f"file:{batch}", f"file://{manifest}", batch.as_uri()):
        assert [value for value, *_ in rows(spark, path)] == [b"a"]


def test_a_batch_without_segments_is_an_empty_frame(spark, tmp_path):
    assert rows(spark, make_batch(tmp_path / "b")) == []


def test_an_empty_segment_between_others_is_skipped(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"a"], [], [b"b"])
    assert [(value, number) for value, number, _ in rows(spark, batch)] == [(b"a", 0), (b"b", 1)]


def test_empty_largest_and_binary_records_arrive_as_they_are(spark, tmp_path):
    records = [b"", b"\x00\xff" * 32767 + b"\x00", b"", bytes(range(256)), b"", b"x" * chunk.MAX_RECORD, b""]
    batch = make_batch(tmp_path / "b", records, records[::-1])
    assert [value for value, *_ in rows(spark, batch)] == records + records[::-1]


def test_only_the_bytes_from_start_to_end_are_read(spark, tmp_path):
    first = write_segment(tmp_path, "orders.qew.3", [b"a", b"b"], start=4711, tail=b"\x00\x05later")
    write_manifest(tmp_path, [first, write_segment(tmp_path, "orders.qew.4", [b"c"])])
    assert [value for value, *_ in rows(spark, tmp_path)] == [b"a", b"b", b"c"]


def test_a_segment_read_in_many_runs_and_arrays_is_complete_and_in_order(spark, tmp_path):
    records = [b"%d" % n * (n % 40) for n in range(60_000)]
    segment = write_segment(tmp_path, "orders.qew.3", records, every=700)
    write_manifest(tmp_path, [segment])
    assert len(segment.boundaries) > 80
    found = rows(spark, tmp_path)
    assert [value for value, *_ in found] == records
    assert [number for _, number, _ in found] == list(range(60_000))


def test_the_columns_may_be_given_but_no_others(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"a"])
    reader = spark.read.format("qewqew")
    assert reader.schema("value BINARY, offset LONG, segment STRING").load(str(batch)).count() == 1
    with pytest.raises(
        PySparkException, match=r"has the columns value binary, .* segment string, batch string, or some of them, not id int"
    ):
        reader.schema("id INT").load(str(batch)).count()


@pytest.mark.quick("Spark refuses a batch with a flipped bit, with file and offset")
def test_a_flipped_bit_fails_with_file_and_offset_whatever_the_action(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"good"], [b"hello", b"world"])
    file = batch / "orders.qew.18"
    data = bytearray(file.read_bytes())
    data[14] ^= 1
    file.write_bytes(data)
    line = failure(spark, batch)
    assert line.startswith(f"qewqew_core.errors.Corrupt: {file}, offset 10: the checksum")
    with pytest.raises(PySparkException, match=f"Corrupt: {file}, offset 10: the checksum"):
        spark.read.format("qewqew").load(str(batch)).write.mode("overwrite").parquet(str(tmp_path / "out"))


def test_a_truncated_file_fails_before_any_record_is_read(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"hello", b"world"])
    file = batch / "orders.qew.17"
    file.write_bytes(file.read_bytes()[:-3])
    assert "segment file 'orders.qew.17' has 21 bytes, the segment ends at 24" in failure(spark, batch)


def test_a_segment_that_vanishes_after_planning_fails_with_its_name(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"hello"])
    frame = spark.read.format("qewqew").load(str(batch))
    frame.count()
    (batch / "orders.qew.17").unlink()
    with pytest.raises(PySparkException, match=r"orders\.qew\.17.* cannot be read"):
        frame.collect()


@pytest.mark.parametrize(
    ("frames", "offset"),
    [
        (b"\x00\x02ab\x00\x09abc", 14),  # a record longer than the segment
        (b"\x00\x06abcdef\x00", 18),  # half a length at the end
        (b"\x00\x02ab\x00\x03abc", 10),  # whole records, but more than announced
    ],
)
def test_frames_that_contradict_the_manifest_fail_although_the_checksum_is_right(spark, tmp_path, frames, offset):
    (tmp_path / "orders.qew.3").write_bytes(chunk.POINTERS.pack(10, 19, 0) + frames)
    write_manifest(tmp_path, [Segment("orders.qew.3", 10, 19, 1, f"{zlib.crc32(frames):08x}", ())])
    assert failure(spark, tmp_path).startswith(f"qewqew_core.errors.Corrupt: {tmp_path}/orders.qew.3, offset {offset}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(records=3), "it says 3 records of 10 bytes, its segments hold 2 of 10"),
        (lambda body: body.update(bytes=9), "it says 2 records of 9 bytes"),
        (lambda body: body.update(version=2), "this program reads version 1"),
        (lambda body: body.pop("segments"), "'segments' must be list"),
        (lambda body: body["segments"][0].update(file="../x"), "not a plain name"),
        (lambda body: body["segments"][0].update(file="\ud800"), "cannot be read"),
        (lambda body: body["segments"][0].update(end=9), "are not a range"),
        (lambda body: body["segments"][0].update(boundaries=[[9, 1]]), "boundaries must"),
        (lambda body: body["segments"][0].update(crc32="0"), "not eight hex digits"),
    ],
)
def test_a_manifest_that_lies_is_refused_with_its_path(spark, tmp_path, change, message):
    batch = make_batch(tmp_path / "b", [b"hello", b"world"])
    damage_manifest(batch, change)
    line = failure(spark, batch)
    assert line.startswith(f"qewqew_core.errors.BadManifest: {batch}/manifest.json: ")
    assert message in line


def test_a_checksum_that_the_manifest_has_wrong_fails(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"hello"])
    damage_manifest(batch, lambda body: body["segments"][0].update(crc32="00000000"))
    assert "but 00000000 was recorded" in failure(spark, batch)


def test_a_wrong_path_fails_in_load_and_is_told_what_could_be_given(spark, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"nothing of the kind")
    (tmp_path / "manifest.json").write_bytes(b"\x00\x01")
    (tmp_path / "empty").mkdir()
    what = "; give the directory of a batch or its manifest.json, the header file of a queue .*, or the directory of a topic"
    for path, message in [
        (tmp_path / "nothing", f"there is nothing here{what}"),
        (tmp_path / "empty", f"this directory has neither a manifest.json.* nor a empty.idx.*{what}"),
        (tmp_path / "text.txt", f"this file is neither a manifest.json nor the header file of a queue{what}"),
        (tmp_path / "manifest.json", "not JSON"),
        (tmp_path / "text.txt" / "manifest.json", "text.txt is in the way of a file of the batch .Not a directory"),
        ("file://elsewhere/batch", "is on host 'elsewhere'"),
        ("memory://nothing/here", "memory://nothing/here/manifest.json: there is no manifest"),
        ("nosuchscheme://x/y", "nosuchscheme"),
    ]:
        with pytest.raises(PySparkException, match=message):
            spark.read.format("qewqew").load(str(path))


def test_unknown_options_and_no_path_are_refused_in_load(spark, tmp_path):
    batch = str(make_batch(tmp_path / "b", [b"a"]))
    reader = spark.read.format("qewqew")
    for options, message in [
        (
            {"startingOffsets": "earliest"},
            "a batch has no option 'startingoffsets'; 'startingOffsets' is an option of a read or a stream of a topic",
        ),
        ({"minPartition": "2"}, "a batch has no option 'minpartition'; did you mean 'minPartitions'"),
        ({"minPartitions": "many"}, "'minPartitions' must be a whole number, 1 or more, not 'many'"),
        ({"codec": "json"}, "the option 'codec' needs the fields of the records: call .schema"),
    ]:
        with pytest.raises(PySparkException, match=message):
            spark.read.format("qewqew").options(**options).load(batch)
    with pytest.raises(PySparkException, match="'mode' needs the option 'codec'"):
        spark.read.format("qewqew").option("mode", "FAILFAST").load(batch).collect()
    with pytest.raises(PySparkException, match="no path"):
        reader.load()


def test_a_stream_of_what_is_no_topic_is_refused(spark, tmp_path):
    batch = str(make_batch(tmp_path / "b", [b"a"]))
    with pytest.raises(PySparkException, match="is a batch, but only topics can be streamed"):
        spark.readStream.format("qewqew").load(batch).writeStream.format("noop").start().processAllAvailable()


def test_a_copied_batch_directory_is_read_where_it_lies(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"a"], [b"b"])
    shutil.copytree(batch, tmp_path / "copy")
    shutil.rmtree(batch)
    assert [value for value, *_ in rows(spark, tmp_path / "copy")] == [b"a", b"b"]


def test_a_batch_is_read_through_the_file_system_of_its_url(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"a"], [b"b"])  # local: is fsspec's name for what needs no server
    for path in (f"local://{batch}", f"local://{batch}/manifest.json"):
        assert rows(spark, path) == [(b"a", 0, "orders.qew.17"), (b"b", 1, "orders.qew.18")]
    assert spark.read.format("qewqew").option("fs.auto_mkdir", "false").load(f"local://{batch}").count() == 2
    (batch / "orders.qew.18").write_bytes(b"\x00" * 100)
    assert f"Corrupt: local://{batch}/orders.qew.18, offset 10: the checksum" in failure(spark, f"local://{batch}")


def test_several_batches_are_read_one_after_the_other(spark, tmp_path):
    batches = [make_batch(tmp_path / "q" / f"orders-{n}", [b"%d" % n] * 3, [b"x"], batch_id=f"orders-{n}") for n in range(3)]
    (tmp_path / "q" / "orders-9").mkdir()  # as that of a lease that has not written its manifest yet
    reader = spark.read.format("qewqew")
    expected = [(b"%d" % n, at) for n in range(3) for at in range(3)]
    for given in (
        list(map(str, batches)),
        f"{tmp_path}/q/*",
        [f"{tmp_path}/q/orders-[01]/", f"file:{batches[2]}/manifest.json"],
        f"{tmp_path}/*/orders-?/manifest.json",
        f"local://{tmp_path}/q/orders-[0-2]",
    ):
        found = [(bytes(row.value), row.offset) for row in reader.load(given).collect()]
        assert [row for row in found if row[0] != b"x"] == expected
        assert found.count((b"x", 3)) == 3
    frame = reader.option("minPartitions", 4).load(f"{tmp_path}/q/*")
    assert frame.rdd.getNumPartitions() == 4
    assert frame.count() == 12
    typed = spark.read.format("qewqew").schema("id INT").option("codec", "json").load(str(tmp_path / "q" / "*"))
    assert typed.count() == 12


def test_a_directory_whose_name_looks_like_a_pattern_is_itself(spark, tmp_path):
    batch = make_batch(tmp_path / "a[1]{b,c}*", [b"x"])
    assert spark.read.format("qewqew").load(str(batch)).count() == 1


def test_what_cannot_be_read_together_is_refused_in_load(spark, tmp_path):
    batch = str(make_batch(tmp_path / "b", [b"a"]))
    make_topic_batch(tmp_path / "t", [Message(b"x", number=n, timestamp=n) for n in range(2)])
    with Queue(tmp_path / "orders.qew") as queue:
        queue.put(b"x")
    reader = spark.read.format("qewqew")
    for paths, message in [
        ([batch, str(tmp_path / "t")], "one is from a queue and one from a topic; their columns differ, so load each on its own"),
        ([batch, str(tmp_path / "orders.qew")], "orders.qew is a queue, but only batches can be read together"),
        ([batch, str(tmp_path / "nothing")], "nothing: there is nothing here"),
        (f"{tmp_path}/x*", r"x\*: no batch matches this pattern: it must match directories that have a manifest.json"),
        ([], "no path; give load"),
    ]:
        with pytest.raises(PySparkException, match=message):
            reader.load(paths)


def test_a_view_reads_in_sql_and_a_table_is_refused(spark, tmp_path):
    """Spark does not ask the source when a table is created with its columns; it is refused when it is read."""
    batch = make_batch(tmp_path / "b", [b'{"id":1}', b'{"id":2}'])
    options = f"OPTIONS (path '{batch}', codec 'json')"
    try:
        spark.sql(f"CREATE TEMPORARY VIEW typed_batch (id BIGINT) USING qewqew {options}")
        assert spark.sql("SELECT sum(id) FROM typed_batch").collect() == [(3,)]
        message = "Spark does not pass its path and options to a Python data source; use CREATE TEMPORARY VIEW … USING qewqew"
        for what in (f"OPTIONS (path '{batch}')", f"LOCATION '{batch}'", ""):
            with pytest.raises(PySparkException, match=f"a table of Spark's catalog cannot be read: {message}"):
                spark.sql(f"CREATE TABLE batch_table USING qewqew {what}")
        spark.sql(f"CREATE TABLE batch_table (id BIGINT) USING qewqew {options}")
        with pytest.raises(PySparkException, match=message):
            spark.sql("SELECT * FROM batch_table").collect()
    finally:
        spark.sql("DROP VIEW IF EXISTS typed_batch")
        spark.sql("DROP TABLE IF EXISTS batch_table")
    assert (batch / "manifest.json").is_file()
