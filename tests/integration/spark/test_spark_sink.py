"""Writing DataFrames and streams to queues and topics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from object_store import CREDENTIALS, object_store, s3_client
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from spark_batches import make_topic_batch
from spark_version import WRITES_STREAMS

from qewqew_core import Corrupt, Message, Queue, Topic
from qewqew_core.errors import BadPath
from qewqew_spark.options import Options
from qewqew_spark.sink import writers

FIRST = 1_763_683_200_123  # 2025-11-21T00:00:00.123Z


def write(frame, path: Path, **options: object) -> None:
    frame.write.format("qewqew").mode("append").options(**options).save(str(path))


def stream(frame, path: Path, checkpoint: Path, mode: str = "append", **options: object) -> None:
    """Write all that is there, then stop."""
    writing = frame.writeStream.format("qewqew").outputMode(mode).options(**options).trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(checkpoint)).start(str(path))
    try:
        query.awaitTermination()
    finally:
        query.stop()


def records(path: Path) -> list[bytes]:
    with Queue(path) as queue:
        return list(queue)


def messages(path: Path) -> list[Message]:
    with Topic(path) as topic:
        return list(topic)


def failure(act: Callable[..., object], *arguments: object, **options: object) -> str:
    """The line of Spark's message that is ours."""
    with pytest.raises(PySparkException) as caught:
        act(*arguments, **options)
    lines = [line.strip() for line in str(caught.value).split("\n")]
    return next((line for line in lines if line.startswith("qewqew_core.errors.")), str(caught.value))


def values(spark, *given: bytes | str | None):
    return spark.createDataFrame([(one,) for one in given], "value binary" if isinstance(given[0], bytes) else "value string")


# Jobs


@pytest.mark.quick("Spark writes into a queue: a job arrives whole and in order")
def test_a_job_arrives_whole_and_in_the_order_of_its_partitions(spark, tmp_path):
    rows = spark.range(200_000, numPartitions=5)
    write(rows.selectExpr("cast(id as string) as value"), tmp_path / "orders.qew")
    assert records(tmp_path / "orders.qew") == [b"%d" % number for number in range(200_000)]
    assert os.listdir(tmp_path) == ["orders.qew", "orders.qew.30001", "orders.qew.wal"] or not list(tmp_path.glob("*staging*"))


def test_what_is_there_stays(spark, tmp_path):
    with Queue(tmp_path / "orders.qew") as queue:
        queue.put(b"first")
    with Topic(tmp_path / "events") as topic:
        topic.append(b"first")
    write(values(spark, b"second", b"\x00\xff"), tmp_path / "orders.qew")
    write(values(spark, "zweite ü"), tmp_path / "events")  # a topic that is there is found without `kind`
    assert records(tmp_path / "orders.qew") == [b"first", b"second", b"\x00\xff"]
    assert [one.body for one in messages(tmp_path / "events")] == [b"first", "zweite ü".encode()]


def test_messages_of_a_topic_have_what_their_columns_say(spark, tmp_path):
    written = [
        Message(b"a", "eu.created", "7", -1, FIRST),
        Message(b"", None, None, 0, None),
        Message(b"\x00\xff", "t" * 127, "ü" * 19, 1 << 62, 0),
    ]
    rows = [(one.body, one.tag, one.id, one.corr_offset or None, one.timestamp) for one in written]
    frame = spark.createDataFrame(rows, "value binary, tag string, id string, corr_offset long, millis long").coalesce(1)
    before = time.time_ns() // 1_000_000
    # A fraction of a millisecond is dropped, as it is of the time now.
    frame = frame.selectExpr("value", "tag", "id", "corr_offset", "timestamp_micros(millis * 1000 + 999) as timestamp")
    write(frame, tmp_path / "events", kind="topic", blockSize=100, dialect="B")
    found = messages(tmp_path / "events")
    assert [one[:4] for one in found] == [one[:4] for one in written]
    assert [one.timestamp for one in found if one.body] == [FIRST, 0]
    assert before <= found[1].timestamp <= time.time_ns() // 1_000_000


def test_messages_that_were_read_can_be_written_back(spark, tmp_path):
    given = [Message(b"%d" % n, ("a", None)[n % 2], (None, f"id {n}")[n % 2], n, FIRST + n, number=n) for n in range(1000)]
    make_topic_batch(tmp_path / "batch", given)
    read = spark.read.format("qewqew").load(str(tmp_path / "batch")).orderBy("number")
    write(read.where("corr_offset % 10 = 0"), tmp_path / "copy", kind="topic")
    # All but the place, which the new topic gives.
    assert [one[:5] for one in messages(tmp_path / "copy")] == [one[:5] for one in given[::10]]


@pytest.mark.quick("Spark writes a job under one key once")
def test_a_job_under_a_key_that_was_used_writes_nothing(spark, tmp_path):
    for kind, stored in ("queue", records), ("topic", messages):
        path = tmp_path / kind
        for key in "run 1", "run 1", "run 2":
            write(values(spark, b"a", b"b"), path, kind=kind, key=key)
        write(values(spark, b"a", b"b"), path)
        assert len(stored(path)) == 6


@pytest.mark.quick("Spark's failed attempts and jobs leave nothing in a queue")
def test_a_failed_attempt_leaves_nothing_and_a_failed_job_neither(tmp_path):
    # A session of its own: in `local[2]` a task has one attempt.
    script = """
import sys
from pyspark import TaskContext
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")

def fail_once(batches):
    for batch in batches:
        yield batch  # some of it is staged already
    if TaskContext.get().partitionId() == 1 and TaskContext.get().attemptNumber() < attempts:
        raise RuntimeError("provoked")

rows = spark.range(100_000, numPartitions=3).selectExpr("cast(id as string) as value")
for name, attempts in ("retried", 1), ("failed", 4):
    try:
        rows.mapInArrow(fail_once, "value string").write.format("qewqew").mode("append").save(f"{sys.argv[1]}/{name}.qew")
        print(name, "is written")
    except Exception as error:
        print(name, "is not written", "provoked" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["retried is written", "failed is not written True"]
    assert records(tmp_path / "retried.qew") == [b"%d" % number for number in range(100_000)]
    assert not [name for name in os.listdir(tmp_path) if "failed" in name or "staging" in name]


def test_rows_that_cannot_be_records_are_named_and_nothing_is_written(spark, tmp_path):
    def bad(kind: str, **columns: str) -> str:
        # Other partitions are fine.
        said = [f"if(id = 60012, {bad}, {good}) as {name}" for name, (good, bad) in columns.items()]
        rows = spark.range(90_000, numPartitions=3).selectExpr(*said)
        message = failure(write, rows, tmp_path / kind, kind=kind)
        assert not list(tmp_path.glob("*")), message
        return message

    value = ("'ok'", "'ok'")
    assert "BadRecord: row 12 of partition 2 has no value (null)" in bad("queue", value=("'ok'", "null"))
    too_long = bad("queue", value=("repeat('x', 65535 * int(id % 10000 = 7))", "repeat('x', 65536)"))
    assert "RecordTooLarge: row 12 of partition 2 has over 65,535 bytes; split it, or write to a topic" in too_long
    assert "BadArgument: row 12 of partition 2 has a tag of over 127 bytes" in bad(
        "topic", value=value, tag=("null", "repeat('ü', 64)")
    )
    assert "row 12 of partition 2 has an id of over 39 bytes" in bad(
        "topic", value=value, id=("repeat('x', 39)", "repeat('x', 40)")
    )
    timestamp = "timestamp'1970-01-01 00:00:00Z'", "timestamp'1969-12-31 23:59:59.999999Z'"
    assert "row 12 of partition 2 has a timestamp before 1970" in bad("topic", value=value, timestamp=timestamp)


def test_a_topic_takes_what_is_too_large_for_a_queue(spark, tmp_path):
    write(spark.range(3).selectExpr("repeat('x', 5000000) as value"), tmp_path / "large", kind="topic")
    assert [one.body for one in messages(tmp_path / "large")] == [b"x" * 5_000_000] * 3


def test_a_write_only_appends(spark, tmp_path):
    rows = values(spark, b"a").write.format("qewqew")
    assert "only appends; use .mode('append')" in failure(rows.mode("overwrite").save, str(tmp_path / "q"))
    for mode in "error", "ignore":  # Spark itself refuses these, of every source like this
        assert "use either" in failure(rows.mode(mode).save, str(tmp_path / "q"))
    assert not os.listdir(tmp_path)


def test_a_queue_that_somebody_has_is_waited_for_then_nothing_is_written(spark, tmp_path):
    with Queue(tmp_path / "orders.qew") as queue:
        message = failure(write, values(spark, b"a"), tmp_path / "orders.qew", lockTimeout=0)
        assert "Locked" in message
        assert str(os.getpid()) in message
        assert len(queue) == 0
    write(values(spark, b"a"), tmp_path / "orders.qew")
    assert records(tmp_path / "orders.qew") == [b"a"]
    assert not list(tmp_path.glob("*staging*"))


def test_whole_rows_are_written_as_json_in_the_way_that_the_errors_name(spark, tmp_path):
    df = spark.sql("select 7 id, 'ü' name, timestamp'2025-11-21 00:00:00Z' at, cast(null as int) nothing")
    for options in {}, {"codec": "json"}:
        message = failure(write, df, tmp_path / "orders.qew", **options)
        assert 'df.select(F.to_json(F.struct("*")).alias("value"))' in message
    assert not os.listdir(tmp_path)
    write(df.select(F.to_json(F.struct("*")).alias("value")), tmp_path / "orders.qew")
    (record,) = map(json.loads, records(tmp_path / "orders.qew"))
    assert (record["id"], record["name"], list(record)) == (7, "ü", ["id", "name", "at"])


# Staging


def stage(spark, path: Path, **options: object) -> tuple[writers.Writer, list[writers.Staged]]:
    """What Spark does until all tasks are done; three records in each of two partitions."""
    given = {name: str(value) for name, value in options.items()}
    rows = spark.range(6, numPartitions=2).selectExpr("cast(id as string) as value")
    writer = writers.writer(Options({"path": str(path), **given}), rows.schema, False)

    def write(batches):
        import pickle

        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(writer.write(batches))]})

    import pickle

    staged = [pickle.loads(row[0]) for row in rows.mapInArrow(write, "message binary").collect()]  # noqa: S301  # our own
    return writer, staged


def test_staged_files_are_private_and_go_with_the_commit(spark, tmp_path):
    writer, staged = stage(spark, tmp_path / "orders.qew")
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(directory.iterdir()) == sorted(directory / one.file for one in staged)
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    writer.commit(staged)
    assert not directory.exists()
    assert records(tmp_path / "orders.qew") == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.quick("only the attempts that Spark counts are written")
def test_only_the_attempts_that_spark_counts_are_written(spark, tmp_path):
    writer, staged = stage(spark, tmp_path / "orders.qew")
    writer.commit([staged[1], None])  # of a speculative attempt, the file lies there too
    assert records(tmp_path / "orders.qew") == [b"3", b"4", b"5"]
    assert not list(tmp_path.glob("*staging*"))


def test_staged_files_that_are_damaged_or_not_there_stop_the_commit(spark, tmp_path):
    for kind, stored in ("queue", records), ("topic", messages):
        path = tmp_path / kind
        writer, staged = stage(spark, path, kind=kind)
        file = next(tmp_path.glob(f"{kind}.staging-*")) / staged[1].file
        whole = file.read_bytes()
        for damaged in whole[:-1], bytes([*whole[:40], whole[40] ^ 1, *whole[41:]]), b"":
            file.write_bytes(damaged)
            with pytest.raises(Corrupt, match="not the bytes that a task staged") as caught:
                writer.commit(staged)
            assert (caught.value.path, caught.value.offset) == (str(file), 0)
        file.unlink()
        with pytest.raises(BadPath, match="the option stagingPath to a directory, or a URL"):
            writer.commit(staged)
        assert stored(path) == []  # not even the records of the first file
        writer.abort([*staged, None])
        assert not list(tmp_path.glob("*staging*"))


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])  # the last one is fsspec's, with a store's code
def test_records_are_staged_where_staging_path_says(spark, tmp_path, scheme):
    shared = tmp_path / "shared"
    shared.mkdir()
    options = {"stagingPath": f"{scheme}{shared}"}
    if scheme == "local://":
        options["fs.auto_mkdir"] = "true"  # of fsspec's file system
    writer, staged = stage(spark, tmp_path / "orders.qew", **options)
    assert len(list(shared.glob("orders.qew.staging-*/*"))) == 2
    writer.commit(staged)
    assert records(tmp_path / "orders.qew") == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert not list(shared.iterdir())
    writer, _ = stage(spark, tmp_path / "orders.qew", **options)
    writer.abort([None, None])
    assert not list(shared.iterdir())


def test_records_are_staged_in_an_object_store(spark, tmp_path):
    key, secret, _ = CREDENTIALS.values()
    with object_store() as endpoint:
        client = s3_client(endpoint)
        client.create_bucket(Bucket="bucket")
        options = {"stagingPath": "s3://bucket/staging", "fs.key": key, "fs.secret": secret, "fs.endpoint_url": endpoint}
        writer, staged = stage(spark, tmp_path / "orders.qew", **options)
        assert len(client.list_objects_v2(Bucket="bucket")["Contents"]) == 2
        assert secret not in repr(writer.sink)
        writer.commit(staged)
        write(spark.range(30_000).selectExpr("cast(id as string) as value"), tmp_path / "orders.qew", **options)
        client.put_object(Bucket="bucket", Key="staging/other", Body=b"")
        assert records(tmp_path / "orders.qew")[6:] == [b"%d" % number for number in range(30_000)]
        assert [one["Key"] for one in client.list_objects_v2(Bucket="bucket")["Contents"]] == ["staging/other"]
        assert "BadRecord" in failure(write, values(spark, None).coalesce(1), tmp_path / "orders.qew", **options)
        assert len(client.list_objects_v2(Bucket="bucket")["Contents"]) == 1


def test_a_task_that_does_not_see_the_staging_directory_says_what_to_do(spark, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    writer = writers.writer(Options({"path": str(tmp_path / "q"), "stagingPath": str(shared)}), rows.schema, False)
    for one in shared.iterdir():
        one.rmdir()
    shared.rmdir()  # as on another host

    def write(batches):
        writer.write(batches)
        yield from ()

    for home in "host", "job":
        if home == "job":
            shared.mkdir()  # another host has such a directory, too, but not the driver's in it
        assert "set the option stagingPath" in failure(rows.mapInArrow(write, "value string").collect)
    assert not list(shared.iterdir())


def test_what_killed_jobs_have_staged_is_removed_after_a_week(spark, tmp_path):
    def left(name: str, age: float, file_age: float) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        staged = directory / f"0-{'ab' * 16}"
        staged.write_bytes(b"x")
        os.utime(staged, (time.time() - file_age,) * 2)
        os.utime(directory, (time.time() - age,) * 2)
        return directory

    day = 86_400
    old = left("orders.qew.staging-1", 8 * day, 8 * day)
    recent = left("orders.qew.staging-2", 6 * day, 6 * day)
    growing = left("orders.qew.staging-3", 8 * day, 6 * day)
    other = left("orders.qew.1.staging-4", 8 * day, 8 * day)
    write(values(spark, b"a"), tmp_path / "orders.qew")
    assert [one.exists() for one in (old, recent, growing, other)] == [False, True, True, True]


# Streams


def lines(spark, directory: Path, *files: list[str]):
    """A stream of lines of text, a file for each micro-batch."""
    directory.mkdir(exist_ok=True)
    there = len(list(directory.iterdir()))
    for number, content in enumerate(files, there):
        path = directory / f"{number}.txt"
        path.write_text("\n".join(content))
        os.utime(path, (1_700_000_000 + number,) * 2)  # Spark takes the oldest first
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory))


writes_streams = pytest.mark.skipif(not WRITES_STREAMS, reason="Spark 4.0 does not write streams with Arrow")


@pytest.mark.skipif(WRITES_STREAMS, reason="Spark writes streams with Arrow since 4.1")
def test_a_stream_is_refused_with_what_to_do_instead(spark, tmp_path):
    message = failure(stream, lines(spark, tmp_path / "in", ["a"]), tmp_path / "out", tmp_path / "checkpoint")
    assert "writing a stream needs pyspark 4.1 or newer; with 4.0, write in foreachBatch" in message


@writes_streams
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_stream_goes_on_from_its_checkpoint_and_a_replayed_batch_is_not_written_again(spark, tmp_path, kind):
    def bodies() -> list[bytes]:
        return records(tmp_path / "out") if kind == "queue" else [one.body for one in messages(tmp_path / "out")]

    given = [[f"{file} {line}" for line in range(3)] for file in range(3)]
    frame = lines(spark, tmp_path / "in", *given[:2])
    stream(frame, tmp_path / "out", tmp_path / "checkpoint", kind=kind)
    first = [line.encode() for file in given[:2] for line in file]
    assert bodies() == first
    # As if Spark had been killed after our commit and before its own.
    os.remove(tmp_path / "checkpoint" / "commits" / "1")
    (tmp_path / "checkpoint" / "commits" / ".1.crc").unlink(missing_ok=True)
    stream(frame, tmp_path / "out", tmp_path / "checkpoint", kind=kind)
    assert (tmp_path / "checkpoint" / "commits" / "1").exists()
    assert bodies() == first
    stream(lines(spark, tmp_path / "in", given[2]), tmp_path / "out", tmp_path / "checkpoint", kind=kind)
    assert bodies() == first + [line.encode() for line in given[2]]
    # Another query is not taken for this one.
    stream(frame, tmp_path / "out", tmp_path / "another checkpoint", kind=kind)
    assert bodies()[9:] == bodies()[:9]
    assert not list(tmp_path.glob("*staging*"))


@writes_streams
def test_a_micro_batch_with_a_bad_row_writes_nothing_and_is_written_once_it_is_right(spark, tmp_path):
    frame = lines(spark, tmp_path / "in", ["good"], ["one", "bad", "two"])
    for attempt in range(2):
        bad = frame.selectExpr("if(value = 'bad', null, value) as value")
        message = failure(stream, bad, tmp_path / "out", tmp_path / "checkpoint", queryName="mine")
        assert "row 1 of partition 0 has no value (null)" in message, attempt
        assert records(tmp_path / "out") == [b"good"]
    stream(frame, tmp_path / "out", tmp_path / "checkpoint")
    assert records(tmp_path / "out") == [b"good", b"one", b"bad", b"two"]
    assert not list(tmp_path.glob("*staging*"))


@writes_streams
def test_a_stream_only_appends(spark, tmp_path):
    counts = lines(spark, tmp_path / "in", ["a", "a", "b"], ["a"]).groupBy("value").count()
    counts = counts.select(F.to_json(F.struct("*")).alias("value"))
    message = failure(stream, counts, tmp_path / "out", tmp_path / "checkpoint", mode="complete")
    assert "the output mode must be 'append'" in message
    message = failure(stream, counts, tmp_path / "out", tmp_path / "checkpoint", mode="update")
    assert "qewqew does not support Update mode" in message  # Spark itself refuses it, of every sink like this
    assert not (tmp_path / "out").exists()


@writes_streams
def test_a_stream_takes_no_key(spark, tmp_path):
    # Under a key of the user's, a query with a new checkpoint would count from 0 again, and be taken for a replay.
    message = failure(stream, lines(spark, tmp_path / "in", ["a"]), tmp_path / "out", tmp_path / "checkpoint", key="mine")
    assert "a stream to a queue has no option 'key'" in message


def test_a_stream_may_write_several_targets_in_foreach_batch(spark, tmp_path):
    def both(frame, batch: int) -> None:
        write(frame, tmp_path / "all.qew", key=f"lines {batch}")
        write(frame.where("value like 'e%'"), tmp_path / "errors", kind="topic", key=f"lines {batch}")

    frame = lines(spark, tmp_path / "in", ["a", "e1"], ["e2"])
    query = frame.writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert records(tmp_path / "all.qew") == [b"a", b"e1", b"e2"]
    assert [one.body for one in messages(tmp_path / "errors")] == [b"e1", b"e2"]
