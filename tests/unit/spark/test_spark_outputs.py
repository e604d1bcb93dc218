"""What the batch job can tell about its arguments without Spark."""

from __future__ import annotations

import json
import os

import pytest

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import explain, write_result
from qewqew_spark.output import Output
from qewqew_spark.source import local_path


def test_an_output_is_a_json_object_with_defaults():
    assert Output.from_json('{"path": "/data/x"}') == Output("/data/x", None, "parquet", (), {})
    text = '{"path": "x", "sql": "SELECT 1", "format": "csv", "partition_by": ["a"], "options": {"header": true}}'
    assert Output.from_json(text) == Output("x", "SELECT 1", "csv", ["a"], {"header": True})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "not an object with fields"),
        ({"path": 1}, "'path' must be a path"),
        ({"path": " "}, "'path' must be a path"),
        ({"path": "/"}, "'path' is the root directory"),
        ({"path": "x", "sql": ""}, "'sql' must be a query"),
        ({"path": "x", "format": None}, "'format' must be the name"),
        ({"path": "x", "partition_by": "month"}, "'partition_by' must be a list"),
        ({"path": "x", "partition_by": [1]}, "'partition_by' must be a list"),
        ({"path": "x", "options": [1]}, "'options' must be an object"),
        ({"path": "x", "options": {"a": None}}, "'options' must be an object"),
        ({"path": "x", "options": {"Path": "y"}}, "give 'path' beside 'options'"),
        (
            {"path": "x", "mode": "append", "foo": 1},
            "unknown field 'foo', 'mode'; there are path, sql, format, partition_by, options",
        ),
        ({}, "the format 'parquet' needs a 'path'"),
        ({"path": "x", "format": "jdbc"}, "the format 'jdbc' takes no 'path'"),
    ],
)
def test_an_output_with_anything_else_is_refused(body, message):
    with pytest.raises(BadArgument, match=message):
        Output.from_json(json.dumps(body))


def test_the_path_of_a_batch_may_be_a_file_uri(tmp_path):
    (tmp_path / "a%20b").mkdir()
    assert local_path("file:/x/y") == local_path("file:///x/y") == local_path("FILE://localhost/x/y") == "/x/y"
    assert local_path("file:///x/a%20b") == "/x/a b"
    assert local_path(f"file:{tmp_path}/a%20b") == f"{tmp_path}/a%20b"  # as Hadoop takes it, where it exists
    assert local_path("x/y") == os.path.abspath("x/y")
    for path in ("s3a://bucket/x", "hdfs:/x", "file://host/x", "file:x"):
        with pytest.raises(BadArgument, match="is not on a local file system"):
            local_path(path)


def test_the_result_is_replaced_whole_and_private(tmp_path):
    target = tmp_path / "result.json"
    target.write_text("an earlier and longer one")
    write_result(str(target), {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError):
        write_result(str(target), {"a": object()})
    assert os.listdir(tmp_path) == ["result.json"]


def test_an_error_is_explained_in_one_line():
    assert explain(BadArgument("one\ntwo")) == "one two"
    assert explain(RuntimeError()) == "RuntimeError()"
    worker = (
        "[PYTHON_EXCEPTION] from the Python worker: Traceback (most recent call last):\n"
        '  File "x.py", line 1\nqewqew_core.errors.CorruptQueue: /b/q.1, offset 10: damaged\n\n\tat org.apache.spark\n'
    )
    assert explain(RuntimeError(worker)) == "/b/q.1, offset 10: damaged"
    other = (
        "Failed to plan: Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'x'\n SQLSTATE: 38000"
    )
    assert explain(RuntimeError(other)) == "Failed to plan: ModuleNotFoundError: No module named 'x'"
    java = (
        "org.apache.spark.SparkException: Job aborted.\n\tat a.b\nCaused by: java.io.IOException: No space left on device\n\tat c"
    )
    assert explain(RuntimeError(java)) == (
        "org.apache.spark.SparkException: Job aborted. (caused by java.io.IOException: No space left on device)"
    )
