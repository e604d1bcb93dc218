"""What the batch job makes of a batch's records: codecs, transforms, and passes over the batch."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from spark_batches import make_batch, make_topic_batch
from spark_version import VERSION

from qewqew_core.batch import manifest
from qewqew_core.errors import BadArgument
from qewqew_core.formats.zbus import Message
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs import writing
from qewqew_spark.jobs.batch import TooManyBadRecords, TransformFailed, run
from qewqew_spark.jobs.output import Output
from qewqew_spark.jobs.records import Records, start_workers
from qewqew_spark.tables.session import setting


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


# What is no mistake in a record, but in the job


def test_a_batch_whose_records_are_all_bad_fails_before_any_output_and_names_the_first(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b"id;amount", b"7;1.5", b"", b"9;2"])
    out = [Output(str(tmp_path / "out"))]
    with pytest.raises(TooManyBadRecords) as caught:
        run(spark, str(batch), out, schema="id BIGINT, amount DOUBLE")
    said = "4 of 4 records do not decode (1 empty record, 3 not a JSON object), which is all of them; they are in "
    assert str(caught.value).startswith(f"{said}{tmp_path}/out-quarantine/batch=orders-1a2b, no output was written; ")
    assert str(caught.value).count(", segment orders.qew.17, batch orders-1a2b: ") == 3
    assert not (tmp_path / "out").exists()
    assert spark.read.parquet(f"{tmp_path}/out-quarantine").count() == 4
    assert run(spark, str(batch), out, schema="id BIGINT", max_bad_records=4)["bad"] == 4, "if that is what somebody wants"


TABLE = {"format": "parquet", "table": "unnamed"}


@pytest.mark.parametrize("output", [{"path": "out"}, TABLE, {"path": "out", "sql": "SELECT * FROM batch LIMIT 1"}])
def test_a_schema_that_fits_no_record_fails_before_any_output(spark, tmp_path, output):
    batch = make_batch(tmp_path / "b", lines({"Id": 1, "who": {"x": 1}}, {"Id": 2}), lines({"Id": None, "ID": 3}))
    outputs = [Output(**{**output, "path": f"{tmp_path}/out"} if "path" in output else output)]
    quarantine = str(tmp_path / "aside")
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), outputs, schema="id BIGINT, amount DOUBLE", quarantine=quarantine)
    assert str(caught.value) == (
        "the schema: no record has a value in a field of the schema (id, amount); they have Id, who, ID. "
        "No output was written; names must be equal, letter by letter"
    )
    assert not (tmp_path / "out").exists()
    assert not spark.catalog.tableExists("unnamed")


def test_the_same_where_spark_parses_the_records(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"z": "24.11.2026"}, {"Day": "24.11.2026"}))
    out = [Output(str(tmp_path / "out"))]
    options = {"dateFormat": "dd.MM.yyyy"}
    with pytest.raises(BadArgument, match=r"no record has a value in a field of the schema \(day\); they have others"):
        run(spark, str(batch), out, schema="day DATE", read_options=options)
    assert not (tmp_path / "out").exists()
    for number, records in enumerate([lines({"z": 1}, {"day": "24.11.2026"}), lines({}, {})]):
        batch = make_batch(tmp_path / f"b{number}", records)
        assert run(spark, str(batch), out, schema="day DATE", read_options=options)["good"] == 2


def test_one_value_in_one_field_of_the_schema_is_enough_and_no_value_at_all_is_none(spark, tmp_path):
    for number, records in enumerate([lines({"Id": 1}, {"id": 7}), lines({"id": None}, {})]):
        batch = make_batch(tmp_path / f"b{number}", records)
        found = run(spark, str(batch), [Output(str(tmp_path / f"out{number}"))], schema="id BIGINT")
        assert (found["good"], found["outputs"][0]["written"]) == (2, 2)
    batch = make_batch(tmp_path / "b", lines({"Id": 1}))
    run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id BIGINT", rescued="more")
    [row] = spark.read.parquet(str(tmp_path / "out")).collect()
    assert (row.id, row.more) == (None, '{"Id": 1}'), "nothing is lost"


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


@pytest.mark.parametrize("codec", ["avro", "msgpack"])
def test_records_that_are_no_texts(spark, tmp_path, codec):
    package = pytest.importorskip("fastavro" if codec == "avro" else "msgpack")
    written = {"type": "record", "name": "order", "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]}

    def encoded(record: dict[str, object]) -> bytes:
        if codec == "msgpack":
            return bytes(package.packb(record))
        stream = io.BytesIO()
        package.schemaless_writer(stream, written, record)
        return stream.getvalue()

    batch = make_batch(tmp_path / "b", [encoded({"id": 7, "name": "ü"}), b"\xc1", encoded({"id": 8, "name": ""})])
    options = {"avroSchema": json.dumps(written)} if codec == "avro" else {}
    outputs = [Output(str(tmp_path / "out"))]
    result = run(spark, str(batch), outputs, codec=codec, schema="id BIGINT, name STRING", read_options=options)
    assert (result["good"], result["bad"], list(result["reasons"].values())) == (2, 1, [1])
    assert sorted(tuple(row)[:2] for row in spark.read.parquet(str(tmp_path / "out")).collect()) == [(7, "ü"), (8, "")]
    [bad] = spark.read.parquet(result["quarantine"]).collect()
    assert (bytes(bad.value), bad.offset) == (b"\xc1", 1)


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
        ({"schema": "id INT, _corrupt_reason STRING"}, "a field '_corrupt_reason', a name that the job itself uses"),
        ({"schema": "id INT", "read_options": {"colour": "red"}}, "no option 'colour'"),
        ({"schema": "id DECIMAL(99)"}, "Decimal precision 99 exceeds max precision 38"),
        ({"schema": "id CHAR(99999999999)"}, 'the schema: For input string: "99999999999"'),
        ({"schema": "id STRING COLLATE NONSENSE"}, "the schema: "),
        ({"read_options": {"samplingRatio": "x"}}, 'a read option: For input string: "x"'),
        ({"read_options": {"allowComments": "perhaps"}}, 'a read option: For input string: "perhaps"'),
        ({"read_options": {"timeZone": "Nowhere/X"}}, "a read option: "),
        ({"read_options": {"timestampFormat": "bbbb"}}, "a read option: "),
    ],
)
def test_what_the_source_refuses_is_refused_before_anything_is_written(spark, tmp_path, arguments, message):
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


# CSV is Spark's

CSV = [
    *(
        b"1,a,1.25",
        b"2,,",
        b'3,"x,y",2',
        b'"",",1',
        b'"",",1",3',
        b"x,a,1",
        b"1,a",
        b"1",
        b"1,a,1,b",
        b"1,a,1,",
        b",,",
        b'4,"a""b",1',
    ),
    *(
        b'5,"a\\"b",1',
        b'6,"open,1',
        b"7,'a,b',1",
        b" 8 , z ,1 ",
        b"9,NA,NA",
        b"#1,a,1",
        "10,ü,1".encode(),
        b"11,a,1e2",
        b"12,a,123456789",
    ),
    *(b'13,"a"b,1', b"14|a|1", b"15,a\tb,1", b"16\ta\t1", b"99999999999,a,1", b"", b"   "),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"escape": ""},
        {"quote": ""},
        {"quote": "'", "nullValue": "NA"},
        {"sep": "|"},
        {"delimiter": "\\t", "emptyValue": "none"},
        {"comment": "#", "ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true"},
        {"unescapedQuoteHandling": "STOP_AT_CLOSING_QUOTE", "maxCharsPerColumn": "100"},
    ],
)
def test_csv_records_are_the_rows_that_spark_makes_of_the_same_lines(spark, tmp_path, options):
    schema = "id INT, name STRING, price DECIMAL(6,2)"
    (tmp_path / "lines").write_bytes(b"".join(line + b"\n" for line in CSV))
    reader = spark.read.schema(f"{schema}, bad STRING").options(columnNameOfCorruptRecord="bad", **options)
    rows = reader.csv(str(tmp_path / "lines")).collect()
    good = [tuple(row)[:3] for row in rows if row.bad is None]
    assert good
    batch = make_batch(tmp_path / "b", CSV[:9], CSV[9:])
    output = Output(str(tmp_path / "out"))
    result = run(spark, str(batch), [output], codec="csv", schema=schema, read_options=options)
    table = spark.read.parquet(str(tmp_path / "out")).drop("batch")
    assert sorted(map(tuple, table.collect()), key=repr) == sorted(good, key=repr)
    assert (result["read"], result["good"], result["bad"]) == (len(CSV), len(good), len(CSV) - len(good))


def test_the_options_of_spark_for_moments_hold_for_csv(spark, tmp_path):
    records = [b"24.12.2026,24/12/2026 18.30", b"2026-12-24,x"]
    options = {"dateFormat": "dd.MM.yyyy", "timestampFormat": "dd/MM/yyyy HH.mm"}
    batch = make_batch(tmp_path / "b", records)
    result = run(
        spark, str(batch), [Output(str(tmp_path / "out"))], codec="csv", schema="day DATE, at TIMESTAMP", read_options=options
    )
    assert (result["good"], result["bad"]) == (1, 1)
    [row] = spark.read.parquet(str(tmp_path / "out")).selectExpr("string(day)", "string(at)").collect()
    assert tuple(row) == ("2026-12-24", "2026-12-24 18:30:00")


def test_a_bad_csv_record_says_why(spark, tmp_path):
    why = {
        b"1": "too few fields: 1 of 3",
        b"1,a,2,b": "too many fields: more than 3",
        b"1,a,x": 'a value does not fit the schema: column price, value "x", type DECIMAL(6,2)',
        b'"7,5",a,1': 'a value does not fit the schema: column id, value "7,5", type INT',
        b"": "empty record",
        b"\n": "empty record",
        b"#1,a,2": "a comment",
        b"1,a,2\n3,b,4": "too many fields: more than 3",
        b"1,\xff,2": "not valid UTF-8",
        "#,\u00fc,2".encode("latin-1"): "not valid UTF-8",
        "1,\u00fc,2".encode("utf-16"): "not valid UTF-8",
    }
    batch = make_batch(tmp_path / "b", [*why, "2,\u00fc,1\r\n".encode(), b'3,"a\nb",1\n'])
    schema, options = "id INT, name STRING, price DECIMAL(6,2)", {"comment": "#"}
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], codec="csv", schema=schema, read_options=options)
    found = {bytes(row.value): row.reason for row in spark.read.parquet(result["quarantine"]).collect()}
    assert found == why
    assert result["reasons"] == {
        "a comment": 1,
        "a value does not fit the schema": 2,
        "empty record": 2,
        "not valid UTF-8": 3,
        "too few fields": 1,
        "too many fields": 2,
    }
    assert sorted(row.name for row in spark.read.parquet(str(tmp_path / "out")).collect()) == ["a\nb", "\u00fc"]


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("a INT", {"header": "true"}, "the read option 'header' is for files"),
        ("a INT", {"delimeter": ";"}, "no option 'delimeter'"),
        ("a INT", {"quote": "ab"}, "Spark's from_csv does not take"),
        ("a ARRAY<INT>", {}, "Spark's from_csv does not take"),
    ],
)
def test_what_from_csv_does_not_take_is_refused_before_anything_is_written(spark, tmp_path, schema, options, message):
    batch = make_batch(tmp_path / "b", [b"1"])
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], codec="csv", schema=schema, read_options=options)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


# JSON of which the typed read does not know a type or an option is Spark's

JSON = [
    *(b'{"a":1,"t":"24.12.2026","s":"x","f":1.5}', b"{'a':2}", b"{a:3}", b'{"a":04}', b'/* no */ {"a":5} // end', b'{"a":NaN}'),
    *(b'{"a":6,"s":7}', b'{"a":"x"}', b'{"a":8,"s":{"b":[1,2]}}', b'{"a":9,"t":"2026-12-24"}', b'{"s":"NA","f":"NaN"}', b"{}"),
    *(b'{"a":10,"s":"\t"}', b'{"a":11,"s":"\\q"}', b'{"a":12,"f":1e400}', b'{"a":13,"f":Infinity}', b'{"a":1.0}', b' {"a":14} '),
    *(b'{"a":15,"a":16}', b'{"a":17,"l":[1,null,"x"]}', b'{"a":18,"m":{"x":1,"x":2}}', b'{"a":19,"c":{"d":"24.12.2026"}}'),
    *(b'{"a":20,"c":{"d":"x"}}', b'{"a":21', b"null", b"[]", b'[{"a":22}]', b"5", b'"x"', b"x", b"", b"  ", b'{"a":23,}'),
    *('{"a":24,"s":"ü€😀"}'.encode(), b'{"a":25,"v":{"x":[1,"y",null]},"i":"1-2"}', b'{"a":26,"v":null}'),
]
# Spark reads the first value of these, and the job takes them for bad.
MORE = [
    b'{"a":1} x',
    b'{"a":1}{"a":2}',
    b'{"a":1},{"a":2}',
    b'{"a":1}],"end":""}',
    b'{"a":1}]',
    b'{"a":1}\n{"a":2}',
    b'{"a":"\xff"}',
]
COLUMNS = "a INT, t DATE, s STRING, f DOUBLE, l ARRAY<INT>, m MAP<STRING, INT>, c STRUCT<d: DATE>"


@pytest.mark.parametrize(
    ("schema", "options"),
    [
        (COLUMNS, {"dateFormat": "dd.MM.yyyy"}),
        (COLUMNS, {"DATEFORMAT": "dd.MM.yyyy", "allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}),
        (COLUMNS, {"allowComments": "true", "allowUnquotedFieldNames": "true", "allowNumericLeadingZeros": "true"}),
        (COLUMNS, {"allowBackslashEscapingAnyCharacter": "true", "allowUnquotedControlChars": "true"}),
        (COLUMNS, {"primitivesAsString": "true", "locale": "de-DE"}),
        ("a INT, v VARIANT, i INTERVAL YEAR TO MONTH", {}),
        ("a INT NOT NULL, n VOID, `a.b``c` INT", {}),
    ],
)
def test_json_of_other_types_and_options_is_the_rows_that_spark_makes_of_the_same_lines(spark, tmp_path, schema, options):
    lines = [line for line in JSON if b"\n" not in line]
    (tmp_path / "lines").write_bytes(b'{"a":0}\n' + b"".join(line + b"\n" for line in lines))
    reader = spark.read.schema(f"{schema}, bad STRING").options(columnNameOfCorruptRecord="bad", **options)
    rows = reader.json(str(tmp_path / "lines")).cache()  # else Spark looks at those fields alone that are asked for
    # An array of objects is rows for Spark, and no record for the job; none of the other good ones begins with a bracket.
    good = rows.where("bad IS NULL AND a IS DISTINCT FROM 22").drop("bad")
    batch = make_batch(tmp_path / "b", [b'{"a":0}', *lines[:9]], lines[9:] + MORE)
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=schema, read_options=options)
    written = spark.read.parquet(str(tmp_path / "out")).drop("batch")
    names = [f"`{name.replace('`', '``')}`" for name in good.columns if name != "n"]
    shown = [f"string({name}) AS {name}" if name in ("`v`", "`i`") else name for name in names]
    ours, theirs = (sorted(map(repr, frame.selectExpr(*shown).collect())) for frame in (written, good))
    assert ours == theirs
    assert len(ours) > 8
    assert (result["read"], result["good"]) == (1 + len(lines) + len(MORE), len(theirs))
    assert sum(result["reasons"].values()) == result["bad"] == result["read"] - result["good"]


@pytest.mark.skipif(VERSION < (4, 2), reason="it has no TIME")
def test_times_of_a_day_which_spark_reads_from_no_file(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"at": "12:30:00.5"}, {"at": "x"}))
    output = Output(str(tmp_path / "out"), sql="SELECT string(at) FROM batch")
    result = run(spark, str(batch), [output], schema="at TIME(3)")
    assert [tuple(row)[:1] for row in spark.read.parquet(str(tmp_path / "out")).collect()] == [("12:30:00.5",)]
    assert result["reasons"] == {"a value does not fit the schema": 1}


def test_a_json_record_that_spark_does_not_read_says_why(spark, tmp_path):
    why = {
        b'{"id":"x"}': "a value does not fit the schema: id: 'x' does not fit INT",
        b'{"id":1,"day":"2026-12-24"}': "a value does not fit the schema: day: '2026-12-24' does not fit DATE",
        b'{"parts":[{"day":5}]}': "a value does not fit the schema: parts: '[{\"day\":5}]' does not fit ARRAY",
        b'{"id":': "malformed JSON: at byte 6: Expecting value",
        b'{"id":1} {"id":2}': "malformed JSON: at byte 9: Extra data",
        '{"id":"äöü" 1}'.encode(): "malformed JSON: at byte 15: Expecting ',' delimiter",
        b'{"parts":' + b"[" * 5000: "malformed JSON: nested too deep",
        b'{"id":"\xff"}': "not valid UTF-8",
        b"": "empty record",
        b"  ": "not a JSON object",
        b"[]": "not a JSON object",
        b"null": "not a JSON object",
        b'\xef\xbb\xbf{"id":1}': "not a JSON object",
    }
    good = [b'{"id":1,"day":"24.12.2026"}', b'{"parts":[{"day":"24.12.2026"}]}', b"{}"]
    batch = make_batch(tmp_path / "b", [*why, *good])
    schema, options = "id INT, day DATE, parts ARRAY<STRUCT<day: DATE>>", {"dateFormat": "dd.MM.yyyy"}
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=schema, read_options=options)
    found = {bytes(row.value): row.reason for row in spark.read.parquet(result["quarantine"]).collect()}
    assert found == why
    assert (result["good"], result["reasons"]["malformed JSON"], result["reasons"]["a value does not fit the schema"]) == (
        3,
        4,
        3,
    )


def test_options_of_spark_hold_for_an_inferred_schema_and_its_metadata(spark, tmp_path):
    make_topic_batch(tmp_path / "b", [Message(b"{'id':7}", "eu", number=0), Message(b"x", "us", number=1)])
    schema = "id INT, _metadata STRUCT<tag: STRING, number: BIGINT>"
    options = {"allowSingleQuotes": "true", "primitivesAsString": "true"}
    for number, given in enumerate((None, schema)):
        result = run(spark, str(tmp_path / "b"), [Output(f"{tmp_path}/{number}")], schema=given, read_options=options)
        assert (result["good"], result["reasons"]) == (1, {"not a JSON object": 1})
    assert [tuple(row)[:1] for row in spark.read.parquet(f"{tmp_path}/0").collect()] == [("7",)]
    assert [tuple(row)[:2] for row in spark.read.parquet(f"{tmp_path}/1").collect()] == [(7, ("eu", 0))]


def test_not_null_in_a_schema_is_not_enforced(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"a": 1}, {"c": {}}))
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="a INT NOT NULL, c STRUCT<d: DATE NOT NULL> NOT NULL")
    assert (result["good"], result["bad"]) == (2, 0)


@pytest.mark.parametrize("options", [{}, {"timestampFormat": "yyyy-MM-dd HH:mm"}])
def test_timestamps_without_a_zone_are_of_the_sessions(spark, tmp_path, options):
    batch = make_batch(tmp_path / "b", lines({"at": "2026-07-01 12:00"}))
    with setting(spark, "spark.sql.session.timeZone", "Europe/Paris"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="at TIMESTAMP", read_options=options)
        run(
            spark, str(batch), [Output(str(tmp_path / "utc"))], schema="at TIMESTAMP", read_options={"timezone": "UTC", **options}
        )
    texts = [
        spark.read.parquet(f"{tmp_path}/{name}").select(F.col("at").cast("string")).collect()[0][0] for name in ("out", "utc")
    ]
    assert texts == ["2026-07-01 10:00:00", "2026-07-01 12:00:00"]


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("a INT", {"lineSep": ";"}, "the read option 'lineSep' is for files"),
        ("a INT", {"dateFormt": "y"}, "no option 'dateformt'"),
        ("a MAP<INT, INT>", {"locale": "de-DE"}, "Spark's from_json does not take"),
        ("a INT", {"timeZone": "Mars"}, "'timeZone' must be a zone"),
    ],
)
def test_what_from_json_does_not_take_is_refused_before_anything_is_written(spark, tmp_path, schema, options, message):
    batch = make_batch(tmp_path / "b", [b'{"a":1}'])
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=schema, read_options=options)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


# Transforms

SHOP = """
from pyspark.sql import functions as F

def doubled(batch):
    return batch.select((F.col("id") * 2).alias("twice"))

def described(batch, manifest):
    return batch.withColumn("queue", F.lit(manifest.queue)).withColumn("attempt", F.lit(manifest.attempt))

def lengthened(batch):
    return batch.select(F.udf(lambda id: "x" * id, "string")("id").alias("text"))

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
    names = "doubled", "described", "Steps.counted", "lengthened"
    outputs = [Output(f"{tmp_path}/{name}", transform=f"{shop}:{name}") for name in names]
    result = run(spark, str(batch), outputs)
    assert [output["written"] for output in result["outputs"]] == [2, 2, 1, 2]
    found = [sorted(map(tuple, spark.read.parquet(f"{tmp_path}/{name}/batch=orders-1a2b").collect())) for name in names]
    assert found == [[(2,), (4,)], [(1, "orders", 1), (2, "orders", 1)], [(2,)], [("x",), ("xx",)]]


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

    def noted(self, quarantine, *rest):
        done.append(quarantine.path)
        return set_aside(self, quarantine, *rest)

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


@pytest.mark.parametrize(
    ("outputs", "arguments", "runs"),
    [
        ([{}], {}, 1),
        ([{"partition_by": ["m"]}], {"max_bad_records": 0}, 1),
        ([{"sql": "SELECT id FROM batch WHERE id > 1"}], {"codec": "json"}, 1),
        ([{}, {"sql": "SELECT id FROM batch"}, {"format": "json"}], {}, 3),
    ],
)
def test_a_run_and_its_repetition_have_one_job_of_spark_for_each_output(spark, tmp_path, monkeypatch, outputs, arguments, runs):
    batch = make_batch(tmp_path / "b", lines({"id": 1, "m": 1}, {"id": 2, "m": 2}))
    loads: list[str] = []
    load = manifest.load
    monkeypatch.setattr(manifest, "load", lambda path, *more: loads.append(path) or load(path, *more))
    tables = [Output(f"{tmp_path}/out{number}", **output) for number, output in enumerate(outputs)]
    context = spark.sparkContext
    for group in "first", "second":
        loads.clear()
        context.setJobGroup(f"{tmp_path} {group}", "")
        try:
            # The columns of the other batches, which are compared, are read by jobs of their own.
            result = run(spark, str(batch), tables, schema="id INT, m INT", schema_evolution="ignore", **arguments)
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)
        assert (result["good"], result["bad"]) == (2, 0)
        assert len(context.statusTracker().getJobIdsForGroup(f"{tmp_path} {group}")) == runs
        assert len(loads) == 1


def test_the_processes_that_are_started_early_are_those_that_read(spark, tmp_path, monkeypatch):
    context = spark.sparkContext
    monkeypatch.setattr(context, "environment", {**context.environment})
    start_workers(spark, job.batch_at(str(make_batch(tmp_path / "b", [b"{}"])), {}))
    early = context.parallelize([0], 1).map(lambda _: os.getppid()).first()

    def parent(rows):
        yield from (pa.RecordBatch.from_pydict({"pid": [os.getppid()] * row.num_rows}) for row in rows)

    assert spark.range(1).mapInArrow(parent, "pid BIGINT").first().pid == early


@pytest.mark.parametrize("query", ["SELECT * FROM batch LIMIT 1", "SELECT * FROM batch WHERE false"])
def test_records_that_a_query_does_not_read_are_counted_all_the_same(spark, tmp_path, query):
    batch = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2}), [b"x"])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"), sql=query)], schema="id INT")
    assert (result["read"], result["good"], result["bad"]) == (3, 2, 1)
    assert result["outputs"][0]["written"] == ("LIMIT" in query)


class Killed(BaseException):
    pass


def test_a_run_that_is_killed_before_its_files_get_their_name_leaves_those_of_the_earlier_run(spark, tmp_path, monkeypatch):
    old, new = make_batch(tmp_path / "b", lines({"id": 1})), make_batch(tmp_path / "c", lines({"id": 2}, {"id": 3}))
    outputs = [Output(str(tmp_path / "out"))]

    def ids() -> list[int]:
        return sorted(row.id for row in spark.read.parquet(str(tmp_path / "out")).collect())

    def killed(*_: object) -> None:
        raise Killed

    run(spark, str(old), outputs, schema="id INT")
    with monkeypatch.context() as patch:
        patch.setattr(writing, "rename", killed)
        with pytest.raises(Killed):
            run(spark, str(new), outputs, schema="id INT")
    assert ids() == [1]
    assert len(list((tmp_path / "out").glob(".qewqew/batch=*"))) == 1
    run(spark, str(new), outputs, schema="id INT")
    assert ids() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".qewqew", "batch=orders-1a2b"]
    assert not list((tmp_path / "out").glob(".qewqew/batch=*"))
