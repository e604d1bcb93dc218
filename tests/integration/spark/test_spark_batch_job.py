"""The batch job: records in, tables and quarantine out."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from spark_batches import make_batch, make_topic_batch

from qewqew_core.errors import BadArgument, BadManifest
from qewqew_core.formats.zbus import Message
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs.batch import TooManyBadRecords, run
from qewqew_spark.jobs.output import Output

ROOT = Path(__file__).parents[3]


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


def table(spark, path, *columns: str) -> list[tuple]:
    frame = spark.read.parquet(str(path))
    return sorted(map(tuple, frame.select(*columns or frame.columns).collect()), key=repr)


def quarantine(spark, path) -> dict[bytes, str]:
    """Each record there, and of its reason the kind, before the first colon."""
    return {bytes(row.value): row.reason.partition(": ")[0] for row in spark.read.parquet(str(path)).collect()}


def nothing_written(tmp_path: Path) -> bool:
    return {path.name for path in tmp_path.iterdir()} == {"b"}


# What is written


def test_a_batch_becomes_a_table_under_its_id(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"id": 1, "name": "ü"}, {"id": 2}), lines({"id": 3, "name": None}))
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id BIGINT, name STRING")
    assert table(spark, tmp_path / "out", "id", "name", "batch") == [
        (1, "ü", "orders-1a2b"),
        (2, None, "orders-1a2b"),
        (3, None, "orders-1a2b"),
    ]
    assert result.pop("seconds") > 0
    assert result == {
        "batch": "orders-1a2b",
        "attempt": 1,
        "codec": "json",
        "read": 3,
        "bytes": 59,
        "good": 3,
        "bad": 0,
        "reasons": {},
        "unnamed": {"records": 0, "fields": {}},
        "outputs": [
            {"path": f"{tmp_path}/out/batch=orders-1a2b", "table": None, "format": "parquet", "written": 3, "left_out": []}
        ],
        "quarantine": None,
        "note": None,
    }
    assert not (tmp_path / "out-quarantine").exists()
    assert "batch" not in [each.name for each in spark.catalog.listTables()]


def test_not_null_in_a_schema_is_not_enforced(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [*lines({"id": 1, "tags": ["a", None]}, {"tags": None}), b"x"])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id BIGINT NOT NULL, tags ARRAY<STRING>")
    assert table(spark, tmp_path / "out", "id", "tags") == [(1, ["a", None]), (None, None)]
    assert (result["good"], result["bad"]) == (2, 1)


def test_several_outputs_each_with_query_format_partitions_and_options(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines(*({"id": n, "month": n % 3, "delay": n / 2} for n in range(30))))
    result = run(
        spark,
        f"file:{batch}/manifest.json",
        [
            Output(str(tmp_path / "all"), partition_by=["month"]),
            Output(
                f"{tmp_path}/means/",
                sql="SELECT month, avg(delay) AS mean FROM batch GROUP BY month",
                format="csv",
                options={"header": True},
            ),
            Output(sql="SELECT id FROM batch WHERE id < 0", format="noop"),
        ],
    )
    assert [output["written"] for output in result["outputs"]] == [30, 3, 0]
    assert [output["path"] for output in result["outputs"]] == [
        f"{tmp_path}/all/batch=orders-1a2b",
        f"{tmp_path}/means/batch=orders-1a2b",
        None,
    ]
    assert sorted(path.name for path in (tmp_path / "all" / "batch=orders-1a2b").glob("month=*")) == [
        "month=0",
        "month=1",
        "month=2",
    ]
    assert table(spark, tmp_path / "all", "id", "month") == sorted(((n, n % 3) for n in range(30)), key=repr)
    means = spark.read.csv(str(tmp_path / "means"), header=True, inferSchema=True).collect()
    assert {row.month: row["mean"] for row in means} == {0: 6.75, 1: 7.25, 2: 7.75}


@pytest.mark.quick("the batch job: a batch that is processed twice leaves one result")
def test_the_same_batch_twice_leaves_one_result_and_another_batch_adds(spark, tmp_path):
    first = make_batch(tmp_path / "b1", lines({"id": 1, "m": 1}, {"id": 2, "m": 2}))
    second = make_batch(tmp_path / "b2", lines({"id": 3, "m": 1}), batch_id="orders-ffff")
    out = [Output(str(tmp_path / "out"), partition_by=["m"])]
    run(spark, str(first), out)
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:  # the second run has no rows for m=2: in this mode Spark alone would leave those of the first
        run(spark, str(first), [Output(str(tmp_path / "out"), sql="SELECT * FROM batch WHERE m = 1", partition_by=["m"])])
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert table(spark, tmp_path / "out", "id") == [(1,)]
    run(spark, str(first), out)
    run(spark, str(second), out)
    assert table(spark, tmp_path / "out", "id", "batch") == [(1, "orders-1a2b"), (2, "orders-1a2b"), (3, "orders-ffff")]


# What decodes

BAD = {
    b"": "empty record",
    b"  ": "not a JSON object",
    b"{": "malformed JSON",
    b'{"a":1,}': "malformed JSON",
    b'{"a":1} x': "malformed JSON",
    b'{"a":1}{"a":2}': "malformed JSON",
    b'{"a":1}\n{"a":2}': "malformed JSON",
    b'{"a":1},"x":2': "malformed JSON",
    b'{"a":1}}': "malformed JSON",
    b'{"a":1},{"a":2}': "malformed JSON",
    b"{'a':4}": "malformed JSON",
    b"[]": "not a JSON object",
    b'[{"a":1}]': "not a JSON object",
    b"null": "not a JSON object",
    b"17": "not a JSON object",
    b'"text"': "not a JSON object",
    b"\xef\xbb\xbf{}": "not a JSON object",
    b"\x00\x01": "not a JSON object",
    b'{"b":"\xff"}': "not valid UTF-8",
    b'\xff{"b":1}': "not valid UTF-8",
}
MISFITS = {
    b'{"a":"x"}': "a value does not fit the schema",
    b'{"a":1.5}': "a value does not fit the schema",
    b'{"a":99999999999999999999}': "a value does not fit the schema",
    b'{"a":1,"c":{"d":"x"}}': "a value does not fit the schema",
    b'{"c":5}': "a value does not fit the schema",
    b'{"l":[1,"x"]}': "a value does not fit the schema",
    b'{"t":"2020-13-45"}': "a value does not fit the schema",
}
GOOD = [
    b'{"a":1,"b":"x"}',
    b' \n{"a":2}\t ',
    b"{}",
    b'{"a":null,"more":[1,{"x":2}]}',
    b'{"a":1,"a":3}',
    b'{"a":9223372036854775807,"b":"\\u00fc\\ud83d\\ude00 \xf0\x9f\x98\x80 \\"\\\\ \\u0000"}',
    b'{"b":{"z":[1,2.5]}}',
    b'{"b":1.5,"c":{"d":-1}}',
    b'{"c":{},"l":[],"t":"2020-02-29"}',
    b'{"a":4}',
    b'{"_corrupt_record":"mine","record":1,"behind":null,"corrupt":"x","bad":7,"reason":"r","value":"v","offset":1,"segment":"s"}',
]
SCHEMA = "a BIGINT, b STRING, c STRUCT<d: INT>, l ARRAY<INT>, t DATE"


@pytest.mark.quick("the batch job: each record is in the table, or in quarantine with its reason")
def test_with_a_schema_every_record_is_either_in_the_table_or_in_quarantine_with_its_reason(spark, tmp_path):
    bad = BAD | MISFITS
    mixed = [
        record
        for number in range(max(len(bad), len(GOOD)))
        for record in [*list(bad)[number : number + 1], *GOOD[number : number + 1]]
    ]
    batch = make_batch(tmp_path / "b", mixed[:20], mixed[20:])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=SCHEMA)
    assert (result["read"], result["good"], result["bad"]) == (len(GOOD) + len(bad), len(GOOD), len(bad))
    assert result["quarantine"] == f"{tmp_path}/out-quarantine/batch=orders-1a2b"
    assert quarantine(spark, tmp_path / "out-quarantine") == bad
    for row in spark.read.parquet(str(tmp_path / "out-quarantine")).collect():
        assert mixed[row.offset] == bytes(row.value)
        assert row.segment == ("orders.qew.17" if row.offset < 20 else "orders.qew.18")
    # The good ones are what Spark's own reader makes of the same texts.
    texts = spark.sparkContext.parallelize([record.decode() for record in GOOD])
    expected = sorted(map(tuple, spark.read.schema(SCHEMA).json(texts).collect()), key=repr)
    assert table(spark, tmp_path / "out", "a", "b", "c", "l", "t") == expected
    assert {3, 4, 9223372036854775807} <= {row[0] for row in expected}


def test_without_a_schema_it_is_what_spark_infers_from_the_good_records(spark, tmp_path):
    good = [record for record in GOOD if record.count(b'"a"') < 2]
    batch = make_batch(tmp_path / "b", good, list(BAD))
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))])
    assert (result["good"], result["bad"]) == (len(good), len(BAD))
    assert quarantine(spark, tmp_path / "out-quarantine") == BAD
    texts = spark.sparkContext.parallelize([record.decode() for record in good])
    expected = spark.read.json(texts, columnNameOfCorruptRecord="unused", dropFieldIfAllNull=True)
    assert result["outputs"][0]["left_out"] == ["behind", "l"]  # null, and an empty array
    written = spark.read.parquet(str(tmp_path / "out" / "batch=orders-1a2b"))
    assert written.schema == expected.schema
    assert "_corrupt_record" in written.columns
    assert table(spark, tmp_path / "out" / "batch=orders-1a2b") == sorted(map(tuple, expected.collect()), key=repr)


@pytest.mark.parametrize("records", [[b'{"a":1,"a":2}'], [b'{"a":1}', b'{"A":1}'], [b'{"x":[{"a":1}]}', b'{"x":[{"A":1}]}']])
def test_fields_that_spark_cannot_tell_apart_need_a_schema(spark, tmp_path, records):
    batch = make_batch(tmp_path / "b", records)
    with pytest.raises(BadArgument, match=r"the records have fields that Spark takes for one: '[aA]' and 'a'; give a schema"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))])
    assert nothing_written(tmp_path)
    assert run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="a INT", rescued="more")["good"] == len(records)


def test_fields_named_like_anything_of_ours_are_kept(spark, tmp_path):
    record = {
        "_corrupt_record": "a",
        "bad": "b",
        "BAD_": "c",
        "value": "d",
        "offset": "e",
        "segment": "f",
        "reason": "g",
        "a.b": "h",
        "`": "i",
    }
    batch = make_batch(tmp_path / "b", lines(record), [b"x"])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))])
    assert (result["good"], result["bad"]) == (1, 1)
    row = spark.read.parquet(str(tmp_path / "out" / "batch=orders-1a2b")).first()
    assert row.asDict() == record


def test_the_largest_records_decode(spark, tmp_path):
    records = lines({"a": "x" * 65_000}, {"a": "ü" * 10_000})
    batch = make_batch(tmp_path / "b", records, [b"{" + b" " * 65_534])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))])
    assert (result["good"], result["bad"]) == (2, 1)
    assert {len(row[0]) for row in table(spark, tmp_path / "out", "a")} == {65_000, 10_000}


# The quarantine


def test_a_quarantine_of_an_earlier_run_is_replaced_or_removed(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"a": 1}, {"a": "x"}, {"a": "y"}))
    where = {"quarantine": f"{tmp_path}/aside/"}
    out = [Output(str(tmp_path / "out"))]
    assert run(spark, str(batch), out, schema="a INT", **where)["bad"] == 2
    assert run(spark, str(batch), out, schema="a INT", **where)["quarantine"] == f"{tmp_path}/aside/batch=orders-1a2b"
    assert len(quarantine(spark, tmp_path / "aside")) == 2
    assert run(spark, str(batch), out, schema="a STRING", **where)["quarantine"] is None
    assert not (tmp_path / "aside" / "batch=orders-1a2b").exists()
    assert table(spark, tmp_path / "out", "a") == [("1",), ("x",), ("y",)]


def test_more_bad_records_than_allowed_fail_before_any_output_and_can_be_looked_at(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"x", b"", *lines({"a": 1})])
    out = [Output(str(tmp_path / "out"))]
    with pytest.raises(TooManyBadRecords) as caught:
        run(spark, str(batch), out, max_bad_records=1)
    aside = f"{tmp_path}/out-quarantine/batch=orders-1a2b"
    assert str(caught.value).startswith(
        "2 of 3 records do not decode (1 empty record, 1 not a JSON object), max_bad_records is 1; "
        f"they are in {aside}, no output was written; offset "
    )
    assert quarantine(spark, aside) == {b"x": "not a JSON object", b"": "empty record"}
    assert not (tmp_path / "out").exists()
    assert run(spark, str(batch), out, max_bad_records=2)["good"] == 1


# Batches without anything to write


def messages(*bodies: bytes) -> list[Message]:
    return [Message(body, ("eu", "us")[n % 2], f"id-{n}", timestamp=1_763_683_200_123, number=n) for n, body in enumerate(bodies)]


def test_bad_messages_of_a_topic_are_in_quarantine_with_all_that_is_known_of_them(spark, tmp_path):
    bodies = lines({"id": 1}, {"id": 2}, {"id": 3}, {"id": 4})
    matching = make_topic_batch(tmp_path / "b", messages(*bodies[:2], b"", b"", *bodies[2:], b"x", b"x"), filter="us")
    result = run(spark, str(tmp_path / "b"), [Output(str(tmp_path / "out"))], schema="id INT, tag STRING")
    assert (result["read"], result["good"], result["bad"]) == (4, 2, 2)
    # Columns are the fields of the records, and none of the messages.
    assert table(spark, tmp_path / "out", "id", "tag") == [(2, None), (4, None)]
    columns = "value", "tag", "id", "offset", "number", "corr_offset", "unix_millis(timestamp)", "topic", "reason"
    found = spark.read.parquet(result["quarantine"]).orderBy("number").selectExpr(*columns).collect()
    assert [(bytes(value), *rest) for value, *rest in found] == [
        (b"", "us", "id-3", matching[1].offset, 3, 0, 1_763_683_200_123, "orders", "empty record"),
        (b"x", "us", "id-7", matching[3].offset, 7, 0, 1_763_683_200_123, "orders", "not a JSON object"),
    ]


def test_an_empty_batch_with_a_schema_is_an_empty_table(spark, tmp_path):
    batch = make_batch(tmp_path / "b")
    outputs = [Output(str(tmp_path / "out")), Output(str(tmp_path / "n"), sql="SELECT count(*) AS n FROM batch")]
    result = run(spark, str(batch), outputs, schema="id INT")
    assert (result["read"], result["good"], result["bad"]) == (0, 0, 0)
    assert [output["written"] for output in result["outputs"]] == [0, 1]
    assert spark.read.parquet(str(tmp_path / "out")).columns == ["id", "batch"]
    assert table(spark, tmp_path / "n", "n") == [(0,)]


@pytest.mark.parametrize(("records", "good", "bad"), [([], 0, 0), ([b"x", b""], 0, 2), ([b"{}"], 1, 0)])
def test_without_a_schema_and_without_a_field_nothing_is_written_and_the_result_says_so(spark, tmp_path, records, good, bad):
    batch = make_batch(tmp_path / "b", records)
    stale = tmp_path / "out" / "batch=orders-1a2b"
    stale.mkdir(parents=True)
    result = run(spark, str(batch), [Output(str(tmp_path / "out"), sql="SELECT id FROM batch")], max_bad_records=2)
    assert (result["good"], result["bad"]) == (good, bad)
    assert result["outputs"][0]["written"] == 0
    assert result["note"].startswith("no schema was given and no record has a field")
    assert not stale.exists()


# Mistakes


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("a foo", "the schema 'a foo' is wrong at 'a foo': a column and one of"),
        ("a INT b", "the schema 'a INT b' is wrong at 'b': a column and"),
        ("", "the schema '' is wrong at the end: a column"),
        ("int", "the schema 'int' is wrong at 'int': a column"),
        ("a INT, A STRING", "the records have fields that Spark takes for one: 'a' and 'A'"),
        ("a MAP<INT, INT>", "the field a: keys of a map must be"),
    ],
)
def test_a_schema_that_is_none_is_refused_before_anything_is_written(spark, tmp_path, schema, message):
    batch = make_batch(tmp_path / "b", [b"x", b'{"a": 1}'])
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=schema)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"sql": "SELECT nope FROM batch"}, "the query 'SELECT nope FROM batch': [UNRESOLVED_COLUMN"),
        ({"sql": "SELECT * FROM orders"}, "[TABLE_OR_VIEW_NOT_FOUND]"),
        ({"sql": "SELEKT 1"}, "[PARSE_SYNTAX_ERROR]"),
        ({"sql": "CREATE TABLE t(a INT) USING parquet"}, "[PARSE_SYNTAX_ERROR]"),
        ({"sql": "SELECT id, month AS ID FROM batch"}, "an output has columns that Spark takes for one: 'id' and 'ID'"),
        ({"sql": "SELECT id AS batch FROM batch"}, "the column 'batch' collides with the column for the batch's id"),
        ({"partition_by": ["day"]}, "no column 'day' to partition by; the columns are id, month"),
        ({"partition_by": ["id", "month"]}, "names every column"),
        ({"partition_by": ["id", "id"]}, "name each once"),
        ({"format": "parqet"}, "format 'parqet': "),
        ({"format": "avro"}, "Failed to find data source: avro"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_written(spark, tmp_path, output, message):
    batch = make_batch(tmp_path / "b", [b"x"], lines({"id": 1, "month": 2}))
    outputs = [Output(str(tmp_path / "first")), Output(str(tmp_path / "out"), **output)]
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), outputs, schema="id INT, month INT")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            {"options": {"compression": "nonsense"}},
            "{out}: [CODEC_NOT_AVAILABLE.WITH_AVAILABLE_CODECS_SUGGESTION] The codec nonsense",
        ),
        ({"format": "orc", "options": {"compression": "nonsense"}}, "{out}: [CODEC_NOT_AVAILABLE"),
        ({"format": "csv", "options": {"compression": "nonsense"}}, "{out}: [CODEC_NOT_AVAILABLE"),
        ({"format": "csv", "options": {"quote": "long"}}, "{out}: [OPTION_VALUE_EXCEEDS_ONE_CHARACTER]"),
        ({"format": "csv", "options": {"dateFormat": "nonsense"}}, "{out}: [INCONSISTENT_BEHAVIOR_CROSS_VERSION"),
        ({"format": "json", "options": {"encoding": "nonsense"}}, "{out}: [INVALID_PARAMETER_VALUE.CHARSET]"),
        ({"options": {"parquet.block.size": "nonsense"}}, '{out}: For input string: "nonsense"'),
        ({"format": "text"}, "{out}: [UNSUPPORTED_DATA_TYPE_FOR_DATASOURCE] The Text datasource doesn't support the column `id`"),
        ({"format": "csv", "sql": "SELECT array(id) AS ids FROM batch"}, "{out}: [UNSUPPORTED_DATA_TYPE_FOR_DATASOURCE]"),
        ({"path": "{file}"}, "{file}: Parent path is not a directory"),
        ({"path": "{file}/out"}, "{file}/out: Parent path is not a directory"),
        ({"path": "nonsense://lake/out"}, 'nonsense://lake/out: No FileSystem for scheme "nonsense"'),
    ],
)
def test_what_a_writer_does_not_take_is_a_bad_argument_and_leaves_nothing(spark, tmp_path, output, message):
    batch = make_batch(tmp_path / "b", lines({"id": 1, "month": 2}))
    (tmp_path / "file").write_bytes(b"")
    places = {"out": tmp_path / "out", "file": tmp_path / "file"}
    given = {"path": "{out}", **output}
    given = {name: value.format(**places) if name == "path" and value else value for name, value in given.items()}
    outputs = [Output(str(tmp_path / "first")), Output(**given)]
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), outputs, schema="id INT, month INT")
    assert str(caught.value).startswith(f"output: {message.format(**places)}")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"b", "file"}


def test_a_quarantine_that_cannot_be_is_a_bad_argument(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"x"])
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadArgument, match=r"^the quarantine .*/file/q: Parent path is not a directory"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT", quarantine=f"{tmp_path}/file/q")
    assert {path.name for path in tmp_path.iterdir()} == {"b", "file"}


def test_a_manifest_that_lies_or_has_an_id_that_leads_out_is_refused(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"a": 1}), batch_id="../../x")
    with pytest.raises(BadArgument, match=r"the id '\.\./\.\./x' cannot be the name of a directory"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))])
    (batch / "manifest.json").write_text("{}")
    with pytest.raises(BadManifest, match="'version' must be int"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))])
    assert nothing_written(tmp_path)


def test_damage_found_while_reading_fails_the_job_with_file_and_offset(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"a": 1}))
    data = bytearray((batch / "orders.qew.17").read_bytes())
    data[-2] ^= 1
    (batch / "orders.qew.17").write_bytes(data)
    for schema in (None, "a INT"):
        with pytest.raises(Exception, match="Corrupt") as caught:
            run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=schema)
        assert job.explain(caught.value).startswith(f"{batch}/orders.qew.17, offset 10: the checksum of the bytes up to")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {batch / "manifest.json", batch / "orders.qew.17"}


def test_a_write_that_fails_says_what_and_where(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"a": 1}))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Exception, match="file") as caught:
        run(spark, str(batch), [Output(str(tmp_path / "file" / "out"))])
    assert f"Parent path is not a directory: file:{tmp_path}/file" in job.explain(caught.value)
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO") as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"), sql="SELECT 1 / (a - 1) AS x FROM batch")])
    assert job.explain(caught.value).startswith("[DIVIDE_BY_ZERO] Division by zero.")


# spark-submit


def submit(*arguments: str | Path, cwd: Path, **environment: str) -> tuple[int, list[str]]:
    """Exit status and output lines of the real spark-submit on the job's file."""
    found = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        ["spark-submit", "--master", "local[2]", "--conf", "spark.ui.enabled=false", *map(str, arguments)],
        env=found,
        cwd=cwd,  # Spark makes its warehouse there
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


JOB = ROOT / "qewqew_spark" / "jobs" / "batch.py"


def test_spark_submit_runs_the_job_by_its_path_and_ends_with_the_result(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2}), [b"x"])
    output = json.dumps({"path": str(tmp_path / "out")})
    status, printed = submit(
        JOB, batch, "--output", output, "--schema", "id INT", "--result", tmp_path / "result.json", cwd=tmp_path
    )
    assert status == 0, printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert printed[-1] == f"qewqew result: {json.dumps(result)}"
    assert (result["good"], result["bad"], result["outputs"][0]["written"]) == (2, 1, 2)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o600
    assert table(spark, tmp_path / "out", "id") == [(1,), (2,)]


@pytest.mark.soak  # half a minute; test_spark_job_records.py shows it without spark-submit
def test_spark_submit_runs_the_job_on_a_batch_of_a_topic(spark, tmp_path):
    make_topic_batch(tmp_path / "b", messages(*lines({"id": 1}, {"id": 2}, {"id": 3}), b"x"), dialect="C")
    output = json.dumps({"path": str(tmp_path / "out")})
    status, printed = submit(JOB, tmp_path / "b", "--output", output, cwd=tmp_path)
    assert status == 0, printed
    result = json.loads(printed[-1].removeprefix("qewqew result: "))
    assert (result["good"], result["bad"], result["outputs"][0]["written"]) == (3, 1, 3)
    assert table(spark, tmp_path / "out", "id") == [(1,), (2,), (3,)]


def test_spark_submit_ends_with_the_reason_of_a_failure(tmp_path):
    # With the packages as --py-files, and nothing else of ours on the path.
    with zipfile.ZipFile(tmp_path / "qewqew.zip", "w") as archive:
        for package in ("qewqew_core", "qewqew_spark", "pyspark_qewqew"):
            for file in (ROOT / package).rglob("*.py"):
                archive.write(file, file.relative_to(ROOT))
    batch = make_batch(tmp_path / "b", [b"x", b"y"])
    (tmp_path / "result.json").write_text("earlier")
    status, printed = submit(
        *("--py-files", tmp_path / "qewqew.zip", JOB, batch, "--output", json.dumps({"path": str(tmp_path / "out")})),
        *("--max-bad-records", "1", "--result", tmp_path / "result.json"),
        cwd=tmp_path,
        PYTHONPATH="",
    )
    assert status == 1, printed
    assert printed[-1].startswith(
        "qewqew: error: 2 of 2 records do not decode (2 not a JSON object), max_bad_records is 1; they are in"
    )
    assert not any("Traceback" in line for line in printed)
    assert (tmp_path / "result.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{batch}"], 2, "the following arguments are required: --output"),
        (["{batch}", "--output", "{{"], 2, "output: not JSON"),
        (
            ["{batch}", "--output", '{{"path": "x", "mode": "append"}}'],
            2,
            "output: unknown field 'mode'; the fields are path, table, sql, transform, format",
        ),
        (["{batch}", "--output", '{{"path": "x", "options": {{"Mode": "append"}}}}'], 2, "output: 'mode' is not an option"),
        (
            ["{batch}", "--output", '{{"path": "x", "options": {{"partitionBy": "m"}}}}'],
            2,
            "output: 'partitionBy' is not an option; give 'partition_by' next to 'options'",
        ),
        (["{batch}", "--output", '{{"path": "x"}}', "--max-bad-records", "few"], 2, "invalid int value: 'few'"),
        (["{batch}", "--output", '{{"path": "x"}}', "--result", "{batch}/none/r"], 2, "the directory of the result file"),
        (["{batch}", "--output", '{{"path": "x"}}', "--outptu", "y"], 2, "unrecognized arguments: --outptu y"),
        (["{batch}/no", "--output", '{{"path": "x"}}'], 1, "/no: there is no manifest; give the directory"),
        (["file://h/b", "--output", '{{"path": "x"}}'], 2, "'file://h/b' is on host 'h'"),
        (["{batch}", "--output", '{{"path": "x"}}', "--codec", "xml"], 2, "codec must be one of json, csv, avro"),
        (["{batch}", "--output", '{{"path": "x"}}', "--read-option", "sep"], 2, "--read-option: write it like NAME=VALUE"),
        (
            ["{batch}", "--output", '{{"path": "x", "options": {{"password": "pst"}}}}'],
            2,
            "password or another secret in clear text",
        ),
    ],
)
def test_mistakes_in_the_arguments_are_one_line_and_need_no_spark(tmp_path, capsys, arguments, status, message):
    batch = make_batch(tmp_path / "b", lines({"a": 1}))
    assert job.main([argument.format(batch=batch) for argument in arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("qewqew: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
