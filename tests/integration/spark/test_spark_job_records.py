"""What the batch job makes of a batch's records: codecs, transforms, and passes over the batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from spark_batches import make_batch, make_topic_batch

from qewqew_core.errors import BadArgument
from qewqew_core.formats.zbus import Message
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs.batch import TransformFailed, run
from qewqew_spark.jobs.output import Output
from qewqew_spark.jobs.records import Records


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


# Codecs


def test_the_codec_text_has_a_column_of_texts_and_what_is_not_utf_8_is_bad(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"one", b"", "zwei ü".encode(), b"\xff\xfe"], [b"[3]"])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], codec="text")
    assert (result["codec"], result["good"], result["reasons"]) == ("text", 4, {"not valid UTF-8": 1})
    table = spark.read.parquet(str(tmp_path / "out"))
    assert table.columns == ["value", "batch"]
    assert sorted(row.value for row in table.collect()) == ["", "[3]", "one", "zwei ü"]
    [bad] = spark.read.parquet(result["quarantine"]).collect()
    assert (bytes(bad.value), bad.offset, bad.segment, bad.reason) == (b"\xff\xfe", 3, "orders.qew.17", "not valid UTF-8")


def test_the_codec_bytes_has_the_columns_of_the_source_and_nothing_is_bad(spark, tmp_path):
    messages = [Message(b"\xff", "eu", "id-1", timestamp=1_763_683_200_123, number=0), Message(b"", "us", "id-2", number=1)]
    make_topic_batch(tmp_path / "b", messages)
    output = Output(str(tmp_path / "out"), sql="SELECT tag, id, number, value FROM batch")
    result = run(spark, str(tmp_path / "b"), [output], codec="bytes", max_bad_records=0)
    assert (result["read"], result["good"], result["bad"], result["quarantine"]) == (2, 2, 0, None)
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("number").drop("batch").collect()
    assert [(row.tag, row.id, row.number, bytes(row.value)) for row in found] == [
        ("eu", "id-1", 0, b"\xff"),
        ("us", "id-2", 1, b""),
    ]


def test_columns_of_the_source_are_in_the_view_where_the_schema_asks_for_them(spark, tmp_path):
    make_topic_batch(tmp_path / "b", [Message(b'{"id":7}', "eu", number=0), Message(b"x", "us", number=1)])
    schema = "id INT, _metadata STRUCT<tag: STRING, number: BIGINT>"
    output = Output(str(tmp_path / "out"), sql="SELECT id, _metadata.* FROM batch")
    result = run(spark, str(tmp_path / "b"), [output], schema=schema)
    assert [tuple(row)[:3] for row in spark.read.parquet(str(tmp_path / "out")).collect()] == [(7, "eu", 0)]
    [bad] = spark.read.parquet(result["quarantine"]).collect()
    assert (bytes(bad.value), bad.tag, bad.topic) == (b"x", "us", "orders")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": "id INT, _corrupt_reason STRING"}, "the records have a field '_corrupt_reason', a name of the job's own"),
        ({"schema": "id INT", "read_options": {"colour": "red"}}, "no option 'colour'"),
    ],
)
def test_what_the_source_refuses_is_refused_before_anything_is_written(spark, tmp_path, arguments, message):
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


# Transforms

SHOP = """
from pyspark.sql import functions as F

def doubled(batch):
    return batch.select((F.col("id") * 2).alias("twice"))

def described(batch, manifest):
    return batch.withColumn("queue", F.lit(manifest.queue)).withColumn("attempt", F.lit(manifest.attempt))

class Steps:
    @staticmethod
    def counted(batch):
        return batch.groupBy().count()

constant = 5

def nothing(batch):
    pass

def broken(batch):
    raise KeyError("no such thing")

def misspelt(batch):
    return batch.select("idd")
"""


@pytest.fixture
def shop(tmp_path, monkeypatch) -> str:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "shop_transforms.py").write_text(SHOP)
    (tmp_path / "modules" / "half_written.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "shop_transforms", raising=False)
    return "shop_transforms"


def test_a_function_makes_the_rows_of_an_output(spark, tmp_path, shop):
    batch = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2}))
    names = "doubled", "described", "Steps.counted"
    outputs = [Output(f"{tmp_path}/{name}", transform=f"{shop}:{name}") for name in names]
    result = run(spark, str(batch), outputs)
    assert [output["written"] for output in result["outputs"]] == [2, 2, 1]
    found = [sorted(map(tuple, spark.read.parquet(f"{tmp_path}/{name}/batch=orders-1a2b").collect())) for name in names]
    assert found == [[(2,), (4,)], [(1, "orders", 1), (2, "orders", 1)], [(2,)]]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_module:f", BadArgument, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("half_written:f", BadArgument, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("shop_transforms:no", BadArgument, "cannot be imported: AttributeError: module 'shop_transforms' has no attribute 'no'"),
        ("shop_transforms:constant", BadArgument, "cannot be imported: TypeError: 5 is not a callable object"),
        ("shop_transforms:nothing", BadArgument, "must return a DataFrame, not NoneType"),
        ("shop_transforms:broken", TransformFailed, "failed: KeyError: 'no such thing'"),
        ("shop_transforms:misspelt", TransformFailed, "failed: AnalysisException: [UNRESOLVED_COLUMN"),
    ],
)
def test_a_transform_that_is_none_is_refused_before_anything_is_written(spark, tmp_path, shop, name, error, message):
    batch = make_batch(tmp_path / "b", lines({"id": 1}), [b"x"])
    outputs = [Output(str(tmp_path / "first")), Output(str(tmp_path / "out"), transform=name)]
    with pytest.raises(error) as caught:
        run(spark, str(batch), outputs)
    assert f"the transform {name!r} {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"b", "modules"}


# Passes over the batch


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The quarantines that were looked for with a pass over all records."""
    done: list[str] = []
    set_aside = Records.set_aside

    def noted(self, spark, quarantine):
        done.append(quarantine)
        return set_aside(self, spark, quarantine)

    monkeypatch.setattr(Records, "set_aside", noted)
    return done


def test_one_pass_is_enough_for_one_new_table_of_good_records(spark, tmp_path, passes):
    batch = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2}))
    stale = tmp_path / "out-quarantine" / "batch=orders-1a2b"
    stale.mkdir(parents=True)
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT")
    assert (result["good"], result["bad"], result["outputs"][0]["written"]) == (2, 0, 2)
    assert passes == []
    assert not stale.exists()


@pytest.mark.parametrize("bad", [[b"x"], []])
def test_what_would_be_overwritten_stays_when_the_batch_was_damaged_since(spark, tmp_path, passes, bad):
    records = lines({"id": 1}, {"id": 2}) + bad
    batch = make_batch(tmp_path / "b", records)
    run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT")
    assert len(passes) == len(bad)
    segment = Path(batch) / "orders.qew.17"
    data = bytearray(segment.read_bytes())
    data[-2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Exception, match="Corrupt") as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT")
    assert job.explain(caught.value).startswith(f"{segment}, offset 10: the checksum of the bytes up to")
    assert spark.read.parquet(str(tmp_path / "out")).count() == 2
