"""What the batch job can tell about its arguments without Spark."""

from __future__ import annotations

import json
import os

import pytest
from secret_forms import IN_TEXT, NAMES, SECRET

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import arguments, explain, write_result
from qewqew_spark.jobs.output import Output, check_arguments
from qewqew_spark.options import local_path


def test_an_output_is_a_json_object_with_defaults():
    assert Output.from_json('{"path": "/data/x"}') == Output("/data/x", None, None, None, "parquet", (), {})
    text = '{"path": "x", "sql": "SELECT 1", "format": "csv", "partition_by": ["a"], "options": {"header": true}}'
    assert Output.from_json(text) == Output("x", None, "SELECT 1", None, "csv", ["a"], {"header": True})
    assert Output.from_json('{"table": "db.x", "transform": "shop.orders:clean"}') == Output(
        table="db.x", transform="shop.orders:clean"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be an object with fields"),
        ({"path": 1}, "'path' must be a path"),
        ({"path": " "}, "'path' must be a path"),
        ({"path": "/"}, "'path' is the root directory"),
        ({"path": "x", "sql": ""}, "'sql' must be a query"),
        ({"path": "x", "format": None}, "'format' must be the name"),
        ({"path": "x", "partition_by": "month"}, "'partition_by' must be a list"),
        ({"path": "x", "partition_by": [1]}, "'partition_by' must be a list"),
        ({"path": "x", "options": [1]}, "'options' must be an object"),
        ({"path": "x", "options": {"a": None}}, "the option 'a' must be a string, a number"),
        ({"path": "x", "options": {"Path": "y"}}, "give 'path' next to 'options'"),
        (
            {"path": "x", "mode": "append", "foo": 1},
            "unknown field 'foo', 'mode'; the fields are path, table, sql, transform, format, partition_by, options",
        ),
        ({}, "the format 'parquet' needs a 'path' or a 'table'"),
        ({"path": "x", "format": "jdbc"}, "the format 'jdbc' takes no 'path'"),
        ({"format": "jdbc", "partition_by": ["a"]}, "the format 'jdbc' takes no 'partition_by'"),
        ({"format": "jdbc", "options": {"url": "x"}}, "the format 'jdbc' needs the option 'dbtable'"),
        ({"path": "x", "format": "Iceberg"}, "the format 'iceberg' needs a 'table'"),
        ({"table": "shop.orders", "format": "iceberg"}, "needs a 'table' with its catalog, like 'lake.db.orders'"),
        ({"table": "shop.orders", "format": "delta"}, "the format 'delta' needs the 'path' of the table"),
        ({"path": "x", "table": "y"}, "give 'path' or 'table', not both"),
        ({"path": "x", "sql": "SELECT 1", "transform": "a:b"}, "give 'sql' or 'transform', not both"),
        ({"path": "x", "transform": "a.b"}, "'transform' must be 'module:function'"),
        ({"path": "x", "transform": "a:b()"}, "'transform' must be 'module:function'"),
        ({"path": "x", "options": {"a": {"env": ""}}}, "the option 'a' must be a string, a number"),
        ({"path": "x", "keys": ["id"]}, "'keys' is for the formats delta and iceberg, not 'parquet'"),
        ({"format": "jdbc", "keys": ["id"]}, "'keys' is for the formats"),
        ({"path": "x", "format": "delta", "keys": "id"}, "'keys' must be a list of column names"),
        ({"path": "x", "format": "delta", "keys": [""]}, "'keys' must be a list of column names"),
        ({"path": "x", "format": "delta", "order_by": "ts"}, "'order_by' and 'operation' need 'keys'"),
        ({"path": "x", "format": "delta", "operation": {"column": "op", "delete": ["D"]}}, "need 'keys'"),
        ({"path": "x", "format": "delta", "keys": ["id"], "order_by": ["ts"]}, "'order_by' must be the name of a column"),
        ({"path": "x", "format": "delta", "keys": ["id"], "commit": "spark"}, "with 'keys' the driver commits"),
        *(
            ({"path": "x", "format": "delta", "keys": ["id"], "operation": wrong}, "'operation' must be like .*delete")
            for wrong in (
                "D",
                {"column": "op"},
                {"column": "op", "delete": "D"},
                {"column": "op", "delete": []},
                {"delete": ["D"]},
            )
        ),
        ({"path": "x", "options": {"a": {"env": "A", "file": "b"}}}, "the option 'a' must be a string, a number"),
    ],
)
def test_an_output_with_anything_else_is_refused(body, message):
    with pytest.raises(BadArgument, match=message):
        Output.from_json(json.dumps(body))


@pytest.mark.parametrize(
    "options", [*({name: SECRET} for name in NAMES), *({"url": text} for text in IN_TEXT), {"password": 424242}]
)
def test_a_password_in_clear_text_is_refused_and_not_repeated(options):
    [value] = options.values()
    text = json.dumps({"format": "jdbc", "options": {"url": "jdbc:x", "dbtable": "t", **options}})
    for refused in text, json.dumps({"path": "x", "format": "parquet", "options": options}):
        with pytest.raises(BadArgument, match="has a password or another secret in clear text") as caught:
            Output.from_json(refused)
        assert SECRET not in str(caught.value)
    with pytest.raises(BadArgument, match="not JSON") as caught:
        Output.from_json(text + "}")
    assert SECRET not in str(caught.value)
    for name in options:
        with pytest.raises(BadArgument, match=r"--read-option: .* in clear text") as caught:
            arguments(["/b", "--output", '{"path": "x"}', "--read-option", f"{name}={value}"])
        assert SECRET not in str(caught.value)
    # From Python it is on no command line, but may come into a log.
    output = Output(format="jdbc", options={"url": "x", "dbtable": "t", **options})
    assert SECRET not in f"{output!r} {output.place}"
    with pytest.raises(BadArgument, match="would overwrite each other") as caught:
        check_arguments([output, output], quarantine="q")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", [text for text in IN_TEXT if "://" in text])
def test_a_place_whose_url_has_a_secret_is_refused_and_not_repeated(url):
    for make in (
        lambda: Output(path=url),
        lambda: check_arguments([Output("x")], quarantine=url),
        lambda: check_arguments([Output(table="t")], quarantine=url),
    ):
        with pytest.raises(BadArgument, match="take it out of the URL") as caught:
            make()
        assert SECRET not in str(caught.value)


def test_an_option_may_be_read_from_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "secret").write_text("hunter3\n")
    references = {"a": {"env": "SECRET"}, "b": {"file": str(tmp_path / "secret")}, "c": 1}
    assert Output("x", options=references).resolved_options() == {"a": "hunter2", "b": "hunter3", "c": 1}
    with pytest.raises(BadArgument, match=r"the option 'a' refers to the environment variable .NONE., which is not set"):
        Output("x", options={"a": {"env": "NONE"}}).resolved_options()
    for reference, why in {str(tmp_path / "none"): "No such file", str(tmp_path): "Is a directory"}.items():
        with pytest.raises(BadArgument, match=f"the option 'a' refers to the file .*, which cannot be read: {why}"):
            Output("x", options={"a": {"file": reference}}).resolved_options()


JDBC = {"url": "jdbc:x", "dbtable": "t"}


@pytest.mark.parametrize(
    ("outputs", "arguments", "message"),
    [
        ([], {}, "no output"),
        ([Output("x")], {"codec": "xml"}, "codec must be one of json, csv, avro, msgpack, text, bytes, not 'xml'"),
        ([Output("x")], {"codec": "csv"}, "the codec 'csv' needs a schema; only that of JSON records can be inferred"),
        ([Output("x")], {"codec": "text", "schema": "a INT"}, "the codec 'text' takes no schema"),
        ([Output("x")], {"schema_evolution": "grow"}, "schema_evolution must be one of merge, fail, ignore, rescue, not 'grow'"),
        ([Output("x")], {"schema_evolution": "rescue"}, "schema_evolution 'rescue' needs 'rescued'"),
        ([Output("x")], {"rescued": " "}, "rescued must be the name of a column, not"),
        ([Output("x")], {"rescued": "r", "codec": "csv", "schema": "a INT"}, "the codec 'csv' takes no 'rescued'"),
        ([Output("x")], {"max_bad_records": -1}, "max_bad_records is negative"),
        ([Output("x")], {"read_options": {"Mode": "FAILFAST"}}, "the read option 'Mode' is set by the job itself"),
        ([Output("x")], {"read_options": {"maxPartitionBytes": 1}}, "read_options must be an object of strings, or of"),
        ([Output("x")], {"quarantine": "/"}, "the quarantine must be a directory"),
        ([Output("x")], {"quarantine": "x/"}, "go to 'x' and would overwrite each other"),
        ([Output("x"), Output("x/")], {}, "go to 'x' and would overwrite each other"),
        ([Output("/x"), Output("file:///x/")], {}, "go to '/x' and would overwrite each other"),
        ([Output("file:/x")], {"quarantine": "file://localhost/x"}, "go to '/x' and would overwrite each other"),
        ([Output(table="a.b"), Output(table="A.b")], {"quarantine": "q"}, "go to 'table a.b' and would overwrite"),
        ([Output(format="jdbc", options=JDBC)] * 2, {"quarantine": "q"}, "go to 'table t of jdbc:x' and would overwrite"),
        ([Output(table="a.b")], {}, "no output has a path .*, so set quarantine"),
        ([Output("x/{a}", route="a")], {}, "no output has a path \\(without a route\\), so set quarantine"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(outputs, arguments, message):
    with pytest.raises(BadArgument, match=message):
        check_arguments(outputs, **arguments)


def test_the_quarantine_is_beside_the_first_path():
    assert check_arguments([Output(table="t"), Output("/lake/x/"), Output("/lake/y")]) == "/lake/x-quarantine"
    assert check_arguments([Output(table="t")], codec="bytes", quarantine="/q/") == "/q"
    assert check_arguments([Output(format="noop"), Output(format="noop")], quarantine="/q") == "/q"


def test_the_path_of_a_batch_may_be_a_file_uri(tmp_path):
    (tmp_path / "a%20b").mkdir()
    assert local_path("file:/x/y") == local_path("file:///x/y") == local_path("FILE://localhost/x/y") == "/x/y"
    assert local_path("file:///x/a%20b") == "/x/a b"
    assert local_path(f"file:{tmp_path}/a%20b") == f"{tmp_path}/a%20b"  # as Hadoop takes it, where it exists
    assert local_path("x/y") == os.path.abspath("x/y")
    assert local_path("s3://bucket/x") == "s3://bucket/x"
    with pytest.raises(BadArgument, match="is on host 'host'"):
        local_path("file://host/x")


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
        '  File "x.py", line 1\nqewqew_core.errors.Corrupt: /b/q.1, offset 10: damaged\n\n\tat org.apache.spark\n'
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
