"""The codec json against `spark.read.json` on the same records."""

from __future__ import annotations

import codecs
import json
import sys

import pytest
from odd_json import MIXED, TYPES, VALUES, random_records, records_with
from pyspark.sql.types import StructType
from spark_batches import make_batch, make_topic_batch
from spark_version import read_alike
from typed_reads import fails_fast, our_rows, spark_rows, table_rows

from qewqew_core.formats.zbus import Message
from qewqew_spark.codecs.texts import java_text

FIRST = b'{"first":1}'  # Spark's reader of lines would drop a byte order mark from the first one


def well_formed(record: bytes) -> bool:
    """Whether it is JSON as RFC 8259 has it, and within the limits of Spark's reader; or blank."""

    def number(text: str) -> None:
        if "N" in text or "I" in text or sum(map(str.isdigit, text)) > 1000:
            raise ValueError(text)

    def members(pairs: list) -> list:
        if any(len(name.encode("utf-8", "replace")) > 50_000 for name, _ in pairs):
            raise ValueError
        return [value for _, value in pairs]

    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    numbers = dict.fromkeys(["parse_int", "parse_float", "parse_constant"], number)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        text = record.removeprefix(codecs.BOM_UTF8).decode()
        blank = record != codecs.BOM_UTF8 and not text.strip(" \t")
        return blank or depth(json.loads(text, object_pairs_hook=members, **numbers)) <= 1000
    except ValueError:
        return False
    finally:
        sys.setrecursionlimit(limit)


def assert_same(spark, tmp_path, records, schema, sizes=(1000,), **options):
    """Well-formed records are what Spark makes of them; others are corrupt as a whole."""
    schema, records = StructType.fromDDL(schema), read_alike(records)
    good = [record for record in records if well_formed(record)]
    theirs = spark_rows(spark, tmp_path / "lines", "json", good, schema, **options)
    for size in sizes:
        ours = our_rows(good, schema, codec="json", size=size, **options)
        # repr: 0.0 is not -0.0 here, nor 1 True.
        different = [(repr(a), repr(b)) for a, b in zip(theirs, ours, strict=False) if repr(a) != repr(b)]
        assert (different[:3], len(ours)) == ([], len(theirs))
    bad = [record for record in records if not well_formed(record)]
    if "_corrupt_record" in schema.names and bad:
        at = schema.names.index("_corrupt_record")
        for row, record in zip(our_rows(bad, schema, codec="json", **options), bad, strict=True):
            assert (row, record) == ((*(None,) * at, java_text(record), *(None,) * (len(row) - at - 1)), record)


@pytest.mark.parametrize("kind", TYPES)
def test_odd_values_become_what_spark_makes_of_them(spark, tmp_path, kind):
    records = [FIRST, *(record for value in VALUES for record in records_with(value))]
    assert len(records) > 3000
    assert_same(spark, tmp_path, records, f"v {kind}, w INT, c STRUCT<d: {kind}, e: STRING>, _corrupt_record STRING")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schema", [MIXED, f"{MIXED}, m MAP<STRING, INT>, b BINARY"], ids=["fast", "slow"])
def test_random_records_good_and_damaged_become_what_spark_makes_of_them(spark, tmp_path, schema, seed):
    # Of each size, other runs of records go through Arrow's reader.
    assert_same(spark, tmp_path, [FIRST, *random_records(seed, 4000)], schema, sizes=(50, 4000))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_more_random_records(spark, tmp_path, seed):
    for schema in MIXED, f"{MIXED}, m MAP<STRING, INT>, b BINARY":
        assert_same(spark, tmp_path, [FIRST, *random_records(seed, 20_000)], schema)


@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED"])
def test_modes_leave_the_rows_that_spark_leaves(spark, tmp_path, mode):
    assert_same(spark, tmp_path, [FIRST, *random_records(7, 5000)], MIXED.replace(", _corrupt_record STRING", ""), mode=mode)


def test_fail_fast_fails_where_spark_does(spark, tmp_path):
    """Spark says so of a record at a time; that it is corrupt in the other modes says the same of many."""
    schema = StructType.fromDDL(MIXED)
    for record in [
        b"{}",
        b" ",
        b"",
        b"[]",
        b'[{"a":1}]',
        b"null",
        b"x",
        b'{"a":"x"}',
        b'[{"a":1},{"a":"x"}]',
        b'{"a":1',
    ]:
        if fails_fast(record, schema, codec="json"):
            with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING"):
                spark_rows(spark, tmp_path / "lines", "json", [record], schema, mode="FAILFAST")
        else:
            theirs = spark_rows(spark, tmp_path / "lines", "json", [record], schema, mode="FAILFAST")
            assert our_rows([record], schema, codec="json", mode="FAILFAST") == theirs


@pytest.mark.parametrize("zone", ["Europe/Paris", "America/St_Johns", "+05:30", "UTC"])
def test_timestamps_without_a_zone_are_of_the_option_time_zone(spark, tmp_path, zone):
    values = [value for value in VALUES if value[:3] in (b'"20', b'"18', b'"00', b'"99', b'"12', b'"-0')]
    assert len(values) > 60
    records = [FIRST, *(b'{"t":%b}' % value for value in values)]
    assert_same(spark, tmp_path, records, "t TIMESTAMP, _corrupt_record STRING", timeZone=zone)


def test_wrong_base64_in_an_array_of_objects(spark, tmp_path):
    values = b'"e"', b'"eA="', b'"eHh4"', b'"="', b"5", b'"eA"'
    records = [FIRST, *(b'[{"b":%b},{"b":%b,"w":7},{"w":%b}]' % (one, two, two) for one in values for two in values)]
    assert_same(spark, tmp_path, records, "b BINARY, w INT, _corrupt_record STRING", sizes=(1000, 1))


def test_names_of_any_kind_and_case(spark, tmp_path):
    records = [
        FIRST,
        '{"a.b":1,"":2,"ü":3,"A":4,"😀":5,"`":6,"a b":7}'.encode(),
        b'{"a":1,"\\u00fc":2,"\\ud83d\\ude00":3,"\\u0061.b":4}',
        b'{"_corrupt_record":"mine"}',
    ]
    assert_same(
        spark, tmp_path, records, "`a.b` INT, `` INT, `ü` INT, A INT, `😀` INT, ```` INT, `a b` INT, _corrupt_record STRING"
    )
    assert_same(spark, tmp_path, records, "A INT, _corrupt_record STRING, `a.b` STRING")
    assert_same(spark, tmp_path, records, "a INT, broken STRING", columnNameOfCorruptRecord="broken")
    assert_same(spark, tmp_path, records, "_corrupt_record INT", columnNameOfCorruptRecord="broken")


def test_byte_order_marks(spark, tmp_path):
    mark = codecs.BOM_UTF8
    records = [FIRST, mark, mark + b'{"a":1}', mark + b" ", b" " + mark, mark + mark, mark + b'[{"a":2}]', b'{"a":3}' + mark]
    records += [mark + b"null", mark + mark + b"{}", b'{"a":4}']
    for schema in "a INT, _corrupt_record STRING", "a INT, m MAP<STRING, INT>, _corrupt_record STRING":
        assert_same(spark, tmp_path, records, schema)


def test_large_records(spark, tmp_path):
    records = [
        FIRST,
        json.dumps({"s": "x" * 65_000, "l": ["y"] * 5000}).encode(),
        json.dumps({"s": "ü" * 10_000, "more": {"k" * 49_000: 1}}).encode(),
        json.dumps({"s": "1" * 2000, "l": ["[" * 2000]}).encode(),
        b'{"s":%b}' % (b"[" * 1500 + b"]" * 1500),
        b'{"more":%b}' % (b"1" * 1001),
        b'{"more":[%b]}' % b",".join([b"12345"] * 1000),
    ]
    assert_same(spark, tmp_path, records, "s STRING, l ARRAY<STRING>, _corrupt_record STRING")


# Through the data source

SCHEMA = "id BIGINT, name STRING, at TIMESTAMP, price DECIMAL(10,2), tags ARRAY<STRING>"


@pytest.mark.quick("Spark reads typed JSON")
def test_a_typed_read_of_a_batch(spark, tmp_path):
    good = [
        json.dumps({"id": n, "name": f"ü{n}", "at": f"2026-01-01T00:00:{n % 60:02}.5Z", "price": n / 4, "tags": ["a"] * (n % 3)})
        for n in range(1000)
    ]
    records = [line.encode() for line in good] + [b"x", b'{"id":"y","name":"z"}', b"[]", b'[{"id":-1},{"id":-2}]', b""]
    batch = make_batch(tmp_path / "b", records[:500], records[500:])
    columns = f"{SCHEMA}, _corrupt_record STRING, _corrupt_reason STRING, _metadata STRUCT<offset: BIGINT, segment: STRING>"
    frame = spark.read.format("qewqew").schema(columns).option("codec", "json").load(str(batch))
    rows = frame.collect()
    assert len(rows) == 1000 + 4  # an array of two is two rows, one of none is none, and so is an empty record
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(records))
    expected = spark.read.schema(f"{SCHEMA}, _corrupt_record STRING").json(str(path)).collect()
    assert sorted(map(repr, (row[:6] for row in rows))) == sorted(map(repr, map(tuple, expected)))
    beside = {
        row._metadata.offset: (row.id, row._corrupt_reason, row._metadata.segment) for row in rows if row._metadata.offset >= 999
    }
    assert beside == {
        999: (999, None, "orders.qew.18"),
        1000: (None, "malformed JSON: at byte 0: Expecting value", "orders.qew.18"),
        1001: (None, "a value does not fit the schema: id: 'y' does not fit BIGINT", "orders.qew.18"),
        1003: (-2, None, "orders.qew.18"),
    }
    assert [row._metadata.offset for row in rows if row.id in (-1, -2)] == [1003, 1003]
    assert frame.where("name = 'ü7'").select("price").collect()[0][0] == 1.75


def test_options_of_sparks_parser_are_refused_with_the_way_to_it(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b'{"id":1}'])
    known = spark.sparkContext._jvm.org.apache.spark.sql.catalyst.json.JSONOptions.getAllOptions().mkString(" ").split()
    ours = {"timeZone", "mode", "columnNameOfCorruptRecord", "singleVariantColumn"}  # the last one Spark itself checks
    assert "allowBackslashEscapingAnyCharacter" in known
    for name in {*known} - ours:
        frame = spark.read.format("qewqew").schema("id INT").options(codec="json", **{name: "true"})
        with pytest.raises(Exception, match=f"has no option '{name.lower()}'") as caught:
            frame.load(str(batch)).collect()
        assert "select(from_json(col('value').cast('string'), schema, options).alias('record'))" in str(caught.value), name
    with pytest.raises(Exception, match=r"no option 'sep'; .*If Spark's from_csv has it: read without the option 'codec'"):
        spark.read.format("qewqew").schema("id INT").options(codec="csv", sep=";").load(str(batch)).collect()
    with pytest.raises(Exception, match=r"the field v has the type VARIANT, which the typed read does not know; .*from_json"):
        spark.read.format("qewqew").schema("v VARIANT").options(codec="json").load(str(batch)).collect()


def test_messages_of_a_topic_with_what_is_known_of_them(spark, tmp_path):
    bodies = [b'{"id":1}', b"x", b'{"id":3}']
    sent = [Message(body, "eu", f"id-{n}", timestamp=1_763_683_200_123, number=n) for n, body in enumerate(bodies)]
    make_topic_batch(tmp_path / "b", sent)
    schema = "_metadata STRUCT<tag: STRING, number: BIGINT, topic: STRING>, id INT, _corrupt_record BINARY"
    rows = spark.read.format("qewqew").schema(schema).option("codec", "json").load(str(tmp_path / "b")).collect()
    assert sorted((tuple(row._metadata), row.id, row._corrupt_record and bytes(row._corrupt_record)) for row in rows) == [
        (("eu", 0, "orders"), 1, None),
        (("eu", 1, "orders"), None, b"x"),
        (("eu", 2, "orders"), 3, None),
    ]


def test_fail_fast_names_the_file_and_the_record(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b'{"id":1}', b'{"id":"x"}'])
    frame = spark.read.format("qewqew").schema("id INT").option("codec", "json").option("mode", "failfast").load(str(batch))
    with pytest.raises(
        Exception, match=r"orders\.qew\.17, offset \d+: this record does not decode: a value does not fit the schema"
    ):
        frame.collect()


def test_dropmalformed_through_the_source(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b'{"id":1}', b'{"id":"x"}', b"x"])
    frame = spark.read.format("qewqew").schema("id INT").options(codec="json", mode="DROPMALFORMED").load(str(batch))
    assert table_rows(frame.toArrow()) == [(1,)]


def test_the_schema_of_another_dataframe_with_its_not_null(spark, tmp_path):
    other = spark.range(100).selectExpr(
        "id",
        "cast(id AS STRING) AS name",
        "array(id, id + 1) AS some",
        "map('k', id) AS by",
        "named_struct('x', id) AS s",
    )
    assert not any(field.nullable for field in other.schema)
    lines = [row[0] for row in other.selectExpr("to_json(struct(*))").collect()]
    batch = make_batch(tmp_path / "b", [line.encode() for line in lines])
    reader = spark.read.format("qewqew").schema(other.schema).option("codec", "json")
    frame = reader.load(str(batch))
    assert frame.schema == other.schema
    assert sorted(map(tuple, frame.collect())) == sorted(map(tuple, other.collect()))
    assert frame.where("id IS NULL OR some[1] IS NULL").count() == 0
    assert frame.selectExpr("sum(id)", "sum(some[1])", "sum(by['k'])", "sum(s.x)").collect() == [(4950, 5050, 4950, 4950)]
    frame.write.parquet(str(tmp_path / "out"))
    assert spark.read.parquet(str(tmp_path / "out")).count() == 100

    lacking = str(make_batch(tmp_path / "lacking", [line.encode() for line in [*lines, '{"name":"x"}', *lines]]))
    with pytest.raises(Exception, match=r"orders\.qew\.17, offset \d+: this record has a null in the column 'id' where"):
        reader.load(lacking).count()
    assert reader.option("mode", "DROPMALFORMED").load(lacking).count() == 200


def test_a_column_of_the_source_that_may_be_null_and_is_said_not_to_be(spark, tmp_path):
    messages = [Message(b"%d" % n, "a" if n else None, timestamp=n, number=n) for n in range(3)]
    make_topic_batch(tmp_path / "t", messages)
    reader = spark.read.format("qewqew")
    assert reader.schema("number BIGINT NOT NULL, tag STRING").load(str(tmp_path / "t")).count() == 3
    with pytest.raises(Exception, match=r"\.zbus, offset 0: this record has a null in the column 'tag' where the schema says"):
        reader.schema("number BIGINT, tag STRING NOT NULL").load(str(tmp_path / "t")).count()
