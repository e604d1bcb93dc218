"""The codec csv against `spark.read.csv` on the same records; the codecs avro and msgpack through the data source."""

from __future__ import annotations

import io
import json
import random

import fastavro
import msgpack
import pytest
from odd_json import SCALARS, VALUES
from pyspark.sql.types import StructType
from spark_batches import make_batch
from typed_reads import our_rows, spark_rows

NUMBERS = (
    b"0x1p3|1f|1D| 1.5 |+NaN|-NaN|+Infinity|0x1.8p1d|0x.8p1|1.e5|1e5f|Inf|TRUE|True|99.999|007|11111111111111111.5|-0.0".split(
        b"|"
    )
)
TEXTS = [value.strip(b'"') for value in VALUES if b"\n" not in value and len(value) < 5000] + NUMBERS
FIRST = b"first,1"  # Spark's reader of lines would drop a byte order mark from the first one


def assert_same(spark, tmp_path, records, schema, **options):
    parsed = StructType.fromDDL(schema)
    theirs = spark_rows(spark, tmp_path / "lines", "csv", records, parsed, **options)
    for size in 1000, 1:
        ours = our_rows(records[: 20 * 1000 if size > 1 else 300], parsed, codec="csv", size=size, **options)
        different = [(repr(a), repr(b)) for a, b in zip(theirs, ours, strict=False) if repr(a) != repr(b)]
        assert different[:3] == []
        assert size == 1 or len(ours) == len(theirs)


@pytest.mark.parametrize("kind", SCALARS)
def test_odd_values_become_what_spark_makes_of_them(spark, tmp_path, kind):
    records = [FIRST]
    for text in TEXTS:
        records += [b"k," + text, b'k,"%b"' % text, text + b",k", b",%b,x" % text]
    assert_same(spark, tmp_path, records, f"a {kind}, b {kind}, _corrupt_record STRING")


@pytest.mark.parametrize("kind", SCALARS)
def test_plain_values_become_what_spark_makes_of_them(spark, tmp_path, kind):
    """These go through Arrow's reader, thousands at a time."""
    plain = {
        "BOOLEAN": ["true", "false"],
        "STRING": ["x", "ü", '"a,b"', '""', " "],
        "BINARY": ["x", "ü", '"a,b"'],
        "DATE": ["2020-02-29", '"1969-12-31"', "0001-01-01", "2020-2-3"],
        "TIMESTAMP": [
            "2020-02-29T12:34:56.789Z",
            "2020-02-29 12:34:56",
            "2020-02-29",
            "2020-02-29T12:34:56+01:30",
            "2020-02-29T1:2:3",
        ],
        "TIMESTAMP_NTZ": ["2020-02-29T12:34:56.789", "2020-02-29 12:34:56", "2020-02-29", "2020-02-29T12:34:56Z"],
    }.get(kind, ["0", "-1", "5", "127", "12.5", "999.99", "-0.25", "32767", "x"])
    chance = random.Random(1)
    values = [*plain, *plain, *plain, ""]
    records = [f"{chance.choice(values)},{chance.choice(values)}".encode() for _ in range(5000)]
    assert_same(spark, tmp_path, records, f"a {kind}, b {kind}, _corrupt_record STRING")


OPTIONS = [{}, {"sep": ";"}, {"sep": "\t"}, {"quote": "'"}, {"quote": ""}, {"escape": '"'}, {"escape": "'"}, {"nullValue": "a"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_quotes_escapes_and_separators_are_split_as_spark_splits_them(spark, tmp_path, options):
    chance = random.Random(str(options))
    pieces = [
        b'"',
        b'"',
        b'"',
        b",",
        b",",
        b"\\",
        b"\\",
        b" ",
        b"a",
        b"b",
        b"1",
        b"'",
        b"\t",
        b"\xc3\xbc",
        b'""',
        b'\\"',
        b'","',
        b"\xff",
    ]
    sep = options.get("sep", ",").encode()
    records = [b"".join(chance.choice(pieces) for _ in range(chance.randrange(1, 14))).replace(b",", sep) for _ in range(10_000)]
    assert_same(spark, tmp_path, [FIRST, *records], "a STRING, b STRING, c STRING, _corrupt_record STRING", **options)


@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED"])
def test_modes_leave_the_rows_that_spark_leaves(spark, tmp_path, mode):
    records = [FIRST, b"", b" ", b"1", b"x,2", b"3,4,5", b'"6","7"', b",", b"8,9"]
    assert_same(spark, tmp_path, records, "a INT, b INT", mode=mode)


def test_one_field_and_null_values(spark, tmp_path):
    assert_same(spark, tmp_path, [FIRST, b"x", b'""', b" ", b'"a', b"1,2", b"NA"], "a STRING, _corrupt_record STRING")
    records = [FIRST, b'"",""', b",", b'x,""', b'NA,"NA"', b"1,2", b"1,NA"] * 3
    assert_same(spark, tmp_path, records, "a INT, b STRING, _corrupt_record STRING", nullValue="NA")


# Through the data source


def read(spark, tmp_path, records, schema, **options):
    batch = make_batch(tmp_path / "b", records)
    frame = spark.read.format("qewqew").schema(f"{schema}, _corrupt_reason STRING").options(**options).load(str(batch))
    return sorted(map(tuple, frame.collect()), key=repr)


def test_csv_through_the_source(spark, tmp_path):
    rows = read(spark, tmp_path, [b"1;x", b'2;"a;b\nc"', b"3", b"y;z"], "id INT, name STRING", codec="csv", sep=";")
    assert rows == [
        (1, "x", None),
        (2, "a;b\nc", None),
        (3, None, "too few fields"),
        (None, "z", "a value does not fit the schema"),
    ]


def test_avro_and_msgpack_through_the_source(spark, tmp_path):
    written = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "long"}, {"name": "l", "type": {"type": "map", "values": "int"}}],
    }
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(written), {"id": 1, "l": {"x": 2}})
    expected = [(1, {"x": 2}, None), (None, None, "malformed {}")]
    for codec, record, options in [
        ("avro", stream.getvalue(), {"avroSchema": json.dumps(written)}),
        ("msgpack", msgpack.packb({"id": 1, "l": {"x": 2}}), {}),
    ]:
        rows = read(spark, tmp_path / codec, [record, b"\xc1"], "id BIGINT, l MAP<STRING, INT>", codec=codec, **options)
        assert rows == [expected[0], (None, None, f"malformed {codec.replace('avro', 'Avro')}")]
