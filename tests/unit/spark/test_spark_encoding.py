"""What a write to a queue or a topic refuses before Spark does anything."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from pyspark.sql import types

from qewqew_core import BadArgument, BadPath, Queue, Topic
from qewqew_core.errors import BadKey, QewQewError
from qewqew_spark.options import Options
from qewqew_spark.sink import writers

AS_JSON = 'df.select(F.to_json(F.struct("*")).alias("value"))'
VALUE = types.StructType([types.StructField("value", types.BinaryType())])


def columns(ddl: str) -> types.StructType:
    """`value binary, tag string` without a Spark to parse it."""
    names = {"binary": types.BinaryType(), "string": types.StringType(), "long": types.LongType(), "int": types.IntegerType()}
    names |= {"timestamp": types.TimestampType(), "double": types.DoubleType()}
    fields = [one.split() for one in ddl.split(", ")]
    return types.StructType([types.StructField(name, names[kind]) for name, kind in fields])


def writer(path: Path, schema: types.StructType = VALUE, **options: str) -> writers.Writer:
    return writers.writer(Options({"path": str(path), **options}), schema, False)


def test_nothing_but_the_staging_directory_is_made_before_the_commit(tmp_path):
    made = pickle.loads(pickle.dumps(writer(tmp_path / "orders.qew")))  # noqa: S301  # as Spark sends it
    (directory,) = tmp_path.iterdir()
    assert directory.name == f"orders.qew.staging-{made.job}"
    made.abort([])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "topc"}, "'kind' must be one of queue, topic, not 'topc'"),
        ({"codec": "json"}, f"a record is the content of the column 'value'; whole rows become JSON with {AS_JSON}"),
        ({"Codec": "bytes", "kind": "topic"}, "a write to a topic has no option 'codec'"),
        ({"sync": "always"}, "'sync' must be one of commit, never"),
        ({"lockTimeout": "-1"}, "'lockTimeout' must be a whole number, 0 or more"),
        ({"chunkSize": "11"}, "chunkSize must be a whole number from 12 to"),
        ({"kind": "topic", "blockSize": "4000000000"}, "blockSize must be a whole number from 1 to"),
        ({"kind": "topic", "dialect": "D"}, "'dialect' must be one of A, B, C"),
        ({"kind": "topic", "chunkSize": "1000"}, "a write to a topic has no option 'chunksize'"),
        ({"blockSize": "1000"}, "a write to a queue has no option 'blocksize'"),
        ({"stagingpaht": "/x"}, "did you mean 'stagingPath'"),
        ({"checkpointLocation": "/x"}, "a write to a queue has no option"),
        ({"stagingPath": "/nowhere/x"}, "/nowhere/x: the directory to stage records in does not exist"),
        ({"stagingPath": "nothing://x/y"}, "nothing"),
        ({"key": ""}, "a key must not be empty"),
        ({"key": "a/b"}, "cannot be used"),
    ],
)
def test_an_option_that_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises((BadArgument, BadPath, BadKey)) as caught:
        writer(tmp_path / "orders", **options)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_target_that_cannot_be_is_refused(tmp_path):
    with Queue(tmp_path / "queue") as queue, Topic(tmp_path / "topic") as topic:
        queue.put(b"a")
        topic.append(b"a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for path, options, message in [
        ("queue", {"kind": "topic"}, "is a queue, not a topic"),
        ("topic", {"kind": "queue"}, "is a topic, not a queue"),
        ("other", {}, "is a directory with other files"),
        ("nowhere/queue", {}, "there is no directory"),
        ("queue.1", {}, "is a file of the queue"),
    ]:
        with pytest.raises(QewQewError, match=message):
            writer(tmp_path / path, **options)
    with pytest.raises(BadArgument, match="on a file system of the driver's"):
        writers.writer(Options({"path": "s3://bucket/orders.qew"}), VALUE, False)
    with pytest.raises(BadArgument, match="no path"):
        writers.writer(Options({}), VALUE, False)


@pytest.mark.parametrize(
    ("kind", "schema", "fits"),
    [
        ("queue", "value string", True),
        ("queue", "value binary, offset long, segment string", True),  # as they were read
        ("queue", "value binary, offset long, number long, topic string", True),
        ("queue", "value binary, tag string", False),  # a queue would lose it
        ("queue", "value double", False),
        ("queue", "Value binary", False),
        ("queue", "id long", False),
        ("queue", "value binary, value binary", False),
        ("topic", "value binary, tag string, id string, offset long, number long, corr_offset long, timestamp timestamp", True),
        ("topic", "value binary, corr_offset int", True),
        ("topic", "value binary, timestamp long", False),
        ("topic", "tag string", False),
    ],
)
def test_columns_must_be_those_of_the_target(tmp_path, kind, schema, fits):
    if fits:
        writer(tmp_path / "orders", columns(schema), kind=kind).abort([])
        return
    with pytest.raises(BadArgument, match=f"a {kind} takes the columns value binary.*{re.escape(AS_JSON)}"):
        writer(tmp_path / "orders", columns(schema), kind=kind)
