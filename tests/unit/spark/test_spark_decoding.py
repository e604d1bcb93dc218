"""Decoding without Spark: what is beside the fields, the strict mode, the codecs avro and msgpack, and what is refused."""

from __future__ import annotations

import io
import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal

import fastavro
import msgpack
import pyarrow as pa
import pytest
from pyspark.sql import types
from pyspark.sql.types import StructField, StructType

from qewqew_core.errors import BadArgument, Corrupt
from qewqew_spark.codecs import arrow_json, from_json
from qewqew_spark.options import Options
from qewqew_spark.source.decoding import Decoding


def schema(**fields: types.DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


INT, LONG, DOUBLE, STRING, BINARY = (
    types.IntegerType(),
    types.LongType(),
    types.DoubleType(),
    types.StringType(),
    types.BinaryType(),
)
REASON = {"_corrupt_reason": STRING}


def decode(records: list[bytes], fields: StructType, **options: str) -> list[dict]:
    decoding = pickle.loads(pickle.dumps(Decoding(fields, Options({"codec": "json", **options}))))  # noqa: S301
    raw = pa.record_batch(
        [pa.array(records, pa.binary()), pa.array(range(100, 100 + len(records)), pa.int64())], names=["value", "offset"]
    )
    batch = decoding.batch(raw, "somewhere", lambda row: 1000 + row)
    batch.validate(full=True)
    assert batch.schema == decoding.schema
    return batch.to_pylist()


# What the schema says NOT NULL of

PROMISES = StructType(
    [
        StructField("a", INT, False),
        StructField("b", types.ArrayType(INT, False)),
        StructField("c", types.MapType(STRING, INT, False)),
        StructField("d", types.ArrayType(StructType([StructField("e", LONG, False), StructField("f", STRING)]), False)),
    ]
)
FULL = [{"a": 1, "b": [2, 3], "c": [("k", 4)], "d": [{"e": 5, "f": "g"}]}, {"a": 1, "b": None, "c": None, "d": None}]
FULL += [{"a": 1, "b": [], "c": [], "d": [{"e": 1, "f": None}, {"e": 2, "f": None}]}]


def as_json(row: dict) -> bytes:
    return json.dumps({**row, "c": row["c"] if row["c"] is None else dict(row["c"])}).encode()


def test_not_null_in_the_schema_is_the_schema_of_the_rows():
    assert decode([as_json(row) for row in FULL] * 3, PROMISES) == FULL * 3


@pytest.mark.parametrize(
    "lacking", [{"a": None}, {"b": [1, None]}, {"c": [("k", None)]}, {"d": [{"e": 1, "f": "x"}, {"f": "y"}]}]
)
def test_a_record_with_a_null_where_the_schema_says_not_null_is_an_error_or_left_out(lacking):
    (name,) = lacking
    records = [as_json(row) for row in [*FULL, FULL[0] | lacking, *FULL]]
    for mode in "PERMISSIVE", "FAILFAST":
        with pytest.raises(Corrupt, match=f"somewhere, offset 1003: .* null in the column '{name}' where .* NOT NULL"):
            decode(records, PROMISES, mode=mode)
    assert decode(records, PROMISES, mode="DROPMALFORMED") == FULL * 2


def test_rows_of_an_array_of_objects_are_counted_as_one_record():
    fields = StructType([StructField("a", INT, False)])
    with pytest.raises(Corrupt, match="offset 1001: this record has a null in the column 'a'"):
        decode([b'[{"a":1},{"a":2}]', b"{}"], fields)
    assert decode([b'[{"a":1},{}]', b"x", b'{"a":3}'], fields, mode="DROPMALFORMED") == [{"a": 1}, {"a": 3}]


# What is beside the fields


def test_a_record_of_several_rows_repeats_what_is_known_of_it():
    fields = schema(a=INT, _metadata=schema(offset=LONG), _corrupt_record=STRING, **REASON)
    rows = decode([b'{"a":1}', b" ", b'[{"a":2},{"a":"x"}]', b"x", b'{"a":3}'], fields)
    both, misfit = '[{"a":2},{"a":"x"}]', "a value does not fit the schema: a: 'x' does not fit INT"
    assert [tuple(row.values()) for row in rows] == [
        (1, {"offset": 100}, None, None),
        (2, {"offset": 102}, both, misfit),
        (None, {"offset": 102}, both, misfit),
        (None, {"offset": 103}, "x", "malformed JSON: at byte 0: Expecting value"),
        (3, {"offset": 104}, None, None),
    ]


@pytest.mark.parametrize("records", [[], [b""], [b"x"], [b"{}"], [b"{}", b"x", b"{}"]])
def test_a_schema_without_fields_of_the_records(records):
    rows = decode(records, schema(_corrupt_record=BINARY))
    assert rows == [{"_corrupt_record": record if record == b"x" else None} for record in records if record]
    assert len(decode(records, schema(_metadata=schema(offset=LONG)))) == len(rows)
    found = decode([b'[{"a":1},{"a":2}]', b" "], schema(a=INT, _metadata=schema(offset=LONG)))
    assert [(row["a"], row["_metadata"]["offset"]) for row in found] == [(1, 100), (2, 100)]
    assert len(decode(records, StructType())) == len(rows)


def test_the_corrupt_record_as_bytes_keeps_what_is_no_utf8():
    assert decode([b'{"a":"\xff"}'], schema(_corrupt_record=BINARY)) == [{"_corrupt_record": b'{"a":"\xff"}'}]
    assert decode([b'{"a":"\xff"}'], schema(_corrupt_record=STRING)) == [{"_corrupt_record": '{"a":"�"}'}]


def test_fail_fast_names_the_first_corrupt_record():
    with pytest.raises(Corrupt, match=r"^somewhere, offset 1002: this record does not decode: malformed JSON: at byte 0: .*; "):
        decode([b'{"a":1}', b"[]", b"x", b'{"a":"x"}'], schema(a=INT), mode="FAILFAST")
    assert decode([b'{"a":1}', b"[]", b""], schema(a=INT), mode="failfast") == [{"a": 1}]


def test_a_column_of_another_name_holds_the_corrupt_record():
    assert decode([b"x", b'{"_corrupt_record":5}'], schema(bad=STRING, _corrupt_record=INT), columnNameOfCorruptRecord="bad") == [
        {"bad": "x", "_corrupt_record": None},
        {"bad": None, "_corrupt_record": 5},
    ]


# JSON

STRICT = {
    b"": "empty record",
    b"  ": "not a JSON object",
    b"{": "malformed JSON",
    b'{"a":1,}': "malformed JSON",
    b'{"a":1} x': "malformed JSON",
    b'{"a":1}{"a":2}': "malformed JSON",
    b'{"a":1}\n{"a":2}': "malformed JSON",
    b'{"a":1} null': "malformed JSON",
    b'{"a":1}}': "malformed JSON",
    b'{"a":"x"} x': "malformed JSON",
    b'{"c":{"d":tru},"a":1}': "malformed JSON",
    b'{"a":1},{"a":2}': "malformed JSON",
    b"[]": "not a JSON object",
    b'[{"a":1}]': "not a JSON object",
    b"null": "not a JSON object",
    b'"text"': "not a JSON object",
    b"\xef\xbb\xbf{}": "not a JSON object",
    b"\x00\x01": "not a JSON object",
    b'{"b":"\xff"}': "not valid UTF-8",
    b'{"b":"\xed\xa0\x80"}': "not valid UTF-8",
    b'{"a":"x"}': "a value does not fit the schema",
    b'{"a":1.5}': "a value does not fit the schema",
    b'{"a":99999999999999999999}': "a value does not fit the schema",
    b'{"c":5}': "a value does not fit the schema",
    b'{"c":{"d":"x"}}': "a value does not fit the schema",
}
GOOD = [b'{"a":1}', b' \n{"a":2}\t ', b"{}", b'{"a":1,"a":3}', b'{"\\u0061":4}', b'{"a":null,"more":[1,{"x":2}]}']


@pytest.mark.parametrize("repeated", [1, 100])
def test_strict_has_one_row_for_each_record_and_says_why_it_is_corrupt(repeated):
    records = [*STRICT, *GOOD] * repeated
    rows = decode(records, schema(a=INT, c=schema(d=INT), **REASON), strict="true")
    kinds = [row["_corrupt_reason"] and row["_corrupt_reason"].partition(": ")[0] for row in rows]
    assert kinds == [STRICT.get(record) for record in records]
    assert [row["a"] for row in rows][len(STRICT) : len(STRICT) + len(GOOD)] == [1, 2, None, 3, 4, None]


@pytest.mark.parametrize(
    "odd",
    [b'{"a":1} null', b'{"a":1}null{"a":1}', b'{"a":1}[]{}', b'{"a":1}{"a":2}', b'{"b":Inf}', b"{}\x00{}", b'{"a":1} 5 {"a":1}'],
)
@pytest.mark.parametrize("at", [0, 1, 500, 999])
def test_one_odd_record_changes_no_other(odd, at):
    # Some of these crash Arrow's reader, or make a row more of it.
    records = [b'{"a":%d}' % number for number in range(1000)]
    records[at] = odd
    rows = decode(records, schema(a=INT))
    assert [row["a"] for row in rows] == [*range(at), None, *range(at + 1, 1000)]


# What Arrow's reader must not see, and what it stops at. With a field b of the type STRUCT<>, whatever is within is skipped.
DEEP, LONG_NAME = b"[" * 999 + b"{}" + b"]" * 999, b'"%b"' % (b"n" * 50_001)
SUSPECT = [
    b"", b"x", b" {}", b"{} ", b'{"a":1', b'"a":1}', b"{}{}", b"{} {}", b"{}x{}", b'{"b":{} x}', b'{"b":"\xff"}', b'{"b":Inf}',
    b'{"b":[ -Inf ]}', b'{"b":%b}' % (b"1" * 1001), b'{"b":[%b]}' % DEEP, b"{%b:1}" % LONG_NAME,
    b'{"x\\"y":1,%b:1}' % (b'"%b\\"%b"' % (b"n" * 30_000, b"n" * 30_000)),
]  # fmt: skip
STOPPING = [b'{"a":"1"}', b'{"a":1,}', b'{"a":[}', b'{"b":"\x00"}', b'{"b":}']
PLAIN = [
    b"{}", b'{"a":1}', b'{"b":{"c":{} , "d":[{} ]}}', b'{"b":"Infinity"}', '{"b":"\u00e4\u20ac"}'.encode(),
    b'{"b":%b}' % (b"1" * 999), b'{"b":%b}' % DEEP[1:-1], b'{"b":"%b"}' % (b"text " * 9_000),
    b'{"b":[%b]}' % b",".join([b"[1.5,{}]"] * 4_000),
]  # fmt: skip


def test_only_the_odd_records_are_kept_from_arrow():
    records = [*PLAIN, *SUSPECT] * 2
    found = arrow_json.odd(pa.array([b"cut off", *records, b"}"], pa.binary()).slice(1, len(records)))
    assert [record for record, odd in zip(records, found, strict=True) if odd] == SUSPECT * 2
    assert arrow_json.odd(pa.array([], pa.binary())).tolist() == []
    assert arrow_json.odd(pa.array([b"", b""], pa.binary())).tolist() == [True, True]


@pytest.mark.parametrize("stopping", [*SUSPECT, *STOPPING])
def test_the_neighbours_of_an_odd_record_stay_with_arrow(stopping):
    codec = from_json.JsonCodec(schema(a=INT), Options({}))
    records = [b'{"a":%d}' % number for number in range(1000)]
    records[300] = records[301] = records[999] = stopping
    values = pa.array(records, pa.binary())
    runs = arrow_json.Runs(values, arrow_json.odd(values), codec._readers)
    assert runs.left.tolist() == [300, 301, 999]
    assert [(piece[0].to_pylist(), there.tolist()) for piece, there in zip(runs.pieces, runs.numbers, strict=True)] == [
        ([*range(300), *range(302, 999)],) * 2
    ]


@pytest.mark.parametrize("exponent", [b"e-77", b"e-2147483600", b"E-0000000077", b"e2147483600", b"e+99", b"e-4294967290"])
def test_numbers_whose_exponent_makes_arrow_crash(exponent):
    records = [b'{"d":%d.5}' % number for number in range(100)]
    records[7] = b'{"d":0%b}' % exponent
    records[9] = b'{"s":[{"d":[5%b]}]}' % exponent
    decimal = types.DecimalType(5, 2)
    rows = decode(records, schema(d=decimal, s=types.ArrayType(schema(d=types.ArrayType(decimal)))))
    found = [row["d"] for number, row in enumerate(rows) if number not in (7, 9)]
    assert found == [Decimal(number) + Decimal("0.5") for number in range(100) if number not in (7, 9)]
    assert rows[7]["d"] in (0, None)


MAP = types.MapType(STRING, INT)


@pytest.mark.parametrize("at", [0, 1, 500, 997])
@pytest.mark.parametrize(
    "odd",
    [
        # Cut ones that would complete each other, and those that would be two, so that their number is right.
        [b'{"a":[{}', b"{}]}", b'{"a":1},{"a":2}'],
        [b'{"b":"x}', b'{"x":"}', b'{"a":1},{"a":2}'],
        [b'{"a":{}', b'{"a":{}', b'{"a":{}'],
        [b"{}}", b'{"b":{}', b"{}"],
        [b'{"a":1,}', b'{"a"}', b'{"a":1,"a":}'],
        [b'{"a":[}', b'{"a":NaN}', b'{"b":"\\ud800"}'],
    ],
)
def test_odd_records_change_no_other_where_arrow_reads_none(odd, at):
    records = [b'{"a":%d,"m":{"x":1,"y":null}}' % number for number in range(1000)]
    records[at : at + 3] = odd
    rows = decode(records, schema(a=INT, m=MAP, **REASON))
    expected = [{"a": number, "m": [("x", 1), ("y", None)], "_corrupt_reason": None} for number in range(1000)]
    assert rows[:at] + rows[at + 3 :] == expected[:at] + expected[at + 3 :]
    alone = [decode([record], schema(a=INT, m=MAP, **REASON))[0] for record in odd]
    assert rows[at : at + 3] == alone


@pytest.mark.parametrize("space", [b"", b" ", b"\n\t"])
def test_names_that_are_there_twice_are_noticed_among_many_records(space):
    colon = space + b":" + space
    records = [b'{"a"%b%d,"m"%b{"x"%b1}}' % (colon, number, colon, colon) for number in range(100)]
    records[3] = b'{"a"%b3,"m"%b{"x"%b1,"x"%b2}}' % (colon, colon, colon, colon)
    records[50] = b'{"a"%b5,"a"%b"x","m"%b{}}' % (colon, colon, colon)
    records[70] = b'{"o"%b[[{"x"%b1},{"x"%b1}]],"m"%b{"a\\":b"%b1}}' % (colon, colon, colon, colon, colon)
    rows = decode(records, schema(a=INT, m=MAP))
    assert [rows[at]["m"] for at in (2, 3, 4, 50, 70)] == [[("x", 1)], [("x", 1), ("x", 2)], [("x", 1)], [], [('a":b', 1)]]
    assert [row["a"] for row in rows] == [*range(50), 5, *range(51, 70), None, *range(71, 100)]


def test_texts_of_objects_in_fields_of_texts_are_what_is_written():
    written = ['{"x": [1, {}] }', '["]", "\\"}", 1.50]', "{ }", "1.50", "-0", "true", '"a\\u00e4"']
    records = [f'{{"o":[{{}}, 5], "b":{text} ,"c" : {{"b":{text}}}, "m":{{}}}}'.encode() for text in written]
    rows = decode(records, schema(b=STRING, c=schema(b=STRING), m=MAP))
    texts = [*written[:-1], "aä"]
    assert [(row["b"], row["c"]["b"]) for row in rows] == [(text, text) for text in texts]


def test_where_most_records_stop_arrow_the_others_are_still_right():
    records = [b'{"a":%d}' % number if number % 3 == 0 else b'{"a":"x"}' for number in range(5000)]
    assert [row["a"] for row in decode(records, schema(a=INT))] == [n if n % 3 == 0 else None for n in range(5000)]


def test_a_batch_of_empty_records_and_pairs_is_not_shifted():
    records = [b'{"a":1}{"a":2}', b"", b'{"a":3}', b'{"a":4} {"a":5}', b" "]
    assert [row["a"] for row in decode(records, schema(a=INT))] == [None, 3, None]


# Avro

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "seen", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["new", "done"]}},
        {"name": "key", "type": {"type": "fixed", "name": "Key", "size": 2}},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "part", "type": {"type": "record", "name": "Part", "fields": [{"name": "x", "type": "double"}]}},
        {"name": "other", "type": ["null", "Part"]},
        {"name": "any", "type": ["null", "int", "string"]},
        {"name": "uuid", "type": {"type": "string", "logicalType": "uuid"}},
    ],
}
ORDER = {
    "id": 1 << 40,
    "name": None,
    "at": datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
    "seen": datetime(2026, 1, 2, 3, 4, 5, 678901),
    "day": date(1969, 12, 31),
    "price": Decimal("-12.34"),
    "state": "done",
    "key": b"\x00\xff",
    "tags": ["a", None],
    "counts": {"x": 1},
    "part": {"x": 0.5},
    "other": None,
    "any": "text",
    "uuid": "6f2ab7b1-6a0f-4c5e-9b68-2d4a1a0f7c11",
}
PART = schema(x=DOUBLE)
ORDERS = schema(
    uuid=STRING, any=STRING, other=PART, part=PART, counts=types.MapType(STRING, LONG), tags=types.ArrayType(STRING), key=BINARY,
    state=STRING, price=types.DecimalType(9, 2), day=types.DateType(), seen=types.TimestampNTZType(), at=types.TimestampType(),
    name=STRING, id=LONG, **REASON,
)  # fmt: skip


def avro(**changes: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(AVRO), {**ORDER, **changes})
    return stream.getvalue()


def test_avro_records_by_name():
    (row,) = decode([avro()], ORDERS, codec="avro", avroSchema=json.dumps(AVRO))
    assert row == {**ORDER, "counts": [("x", 1)], "_corrupt_reason": None}


def test_avro_records_that_do_not_decode_or_fit():
    good = avro()
    records = [b"", good[:-1], good + b"\0", b"\xff" * 20, avro(any=5), avro(name="ü")]
    rows = decode(records, schema(id=LONG, any=STRING, name=STRING, **REASON), codec="avro", avroSchema=json.dumps(AVRO))
    assert [tuple(row.values()) for row in rows] == [
        (None, None, None, "empty record"),
        (None, None, None, "malformed Avro"),
        (None, None, None, "bytes behind the Avro datum"),
        (None, None, None, "malformed Avro"),
        (1 << 40, None, None, "a value does not fit the schema: any: 5 does not fit STRING"),
        (1 << 40, "text", "ü", None),
    ]
    narrow = decode(
        [good, avro(id=5)], schema(id=INT, price=types.DecimalType(3, 2), **REASON), codec="avro", avroSchema=json.dumps(AVRO)
    )
    assert [(row["id"], row["price"]) for row in narrow] == [(None, None), (5, None)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (schema(missing=INT), "the records have no field missing; there are id, name"),
        (schema(id=STRING), "the field id is written as long in Avro, which is never a STRING"),
        (schema(at=types.TimestampNTZType()), r"the field at is written as long \(timestamp-millis\) in Avro, which is never a"),
        (schema(part=schema(x=INT)), r"the field part\.x is written as double"),
        (schema(tags=types.ArrayType(INT)), r"the field tags\[\] is written as string"),
        (schema(name=BINARY), "the field name is written as string"),
        (schema(any=BINARY), "the field any is written as"),
    ],
)
def test_avro_types_that_can_never_fit_are_refused(fields, text):
    with pytest.raises(BadArgument, match=text):
        decode([], fields, codec="avro", avroSchema=json.dumps(AVRO))


@pytest.mark.parametrize(
    ("avro_schema", "text"),
    [
        ("{", "is not an Avro schema"),
        ('"nonsense"', "is not an Avro schema"),
        ("5", "is not an Avro schema"),
        ('"long"', "must be the schema of a record"),
        # Reading it takes a frame of the stack for each level, and nothing bounds them.
        ('{"type":"record","name":"N","fields":[{"name":"a","type":["null","N"]}]}', "contains itself"),
        # A few bytes could be a billion of these.
        ('{"type":"record","name":"N","fields":[{"name":"a","type":{"type":"array","items":"null"}}]}', "values without bytes"),
    ],
)
def test_avro_schemas_that_are_none_or_could_do_harm_are_refused(avro_schema, text):
    with pytest.raises(BadArgument, match=text):
        decode([], schema(a=INT), codec="avro", avroSchema=avro_schema)


def test_avro_needs_its_schema():
    with pytest.raises(BadArgument, match="'avroSchema'"):
        decode([], schema(a=INT), codec="avro")


# msgpack


def test_msgpack_maps():
    fields = schema(
        a=LONG, d=DOUBLE, f=types.FloatType(), s=STRING, b=BINARY, o=types.BooleanType(), t=types.TimestampType(),
        p=types.DecimalType(5, 2), l=types.ArrayType(INT), m=types.MapType(STRING, LONG), c=schema(x=INT), **REASON,
    )  # fmt: skip
    at = datetime(1960, 1, 2, 3, 4, 5, 678901, UTC)
    value = {
        "a": -1,
        "d": 2,
        "f": 0.1,
        "s": "ü",
        "b": b"\xff",
        "o": True,
        "t": at,
        "p": 5,
        "l": [1, None],
        "m": {"k": None},
        "c": {},
    }
    (row,) = decode([msgpack.packb({**value, "more": [1]}, datetime=True)], fields, codec="msgpack")
    assert row == {
        **value,
        "f": pytest.approx(0.1),
        "p": Decimal("5.00"),
        "m": [("k", None)],
        "c": {"x": None},
        "_corrupt_reason": None,
    }
    odd = {"a": 1.0, "d": "1", "s": 5, "b": "text", "o": 1, "t": 5, "p": 1000, "l": [1.5], "m": [], "c": {"x": 1 << 31}}
    (row,) = decode([msgpack.packb(odd)], fields, codec="msgpack")
    assert {name for name, value in row.items() if value is not None} == {"c", "_corrupt_reason"}
    assert row["_corrupt_reason"] == "a value does not fit the schema: a: 1.0 does not fit BIGINT"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "empty record"),
        (b"\x80\x80", "more than one msgpack value"),
        (b"\xc1", "malformed msgpack"),
        (b"\x05", "not a msgpack map"),
        (b"\x81\xa1\xff\x01", "malformed msgpack"),  # not UTF-8
        (b"\x81\x01\x02", "malformed msgpack"),  # a key that is a number
        (b"\xdf\xff\xff\xff\xff", "malformed msgpack"),  # lengths that nothing follows
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "malformed msgpack"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "malformed msgpack"),
        (b"\x81\xa1a" + b"\x91" * 100_000, "malformed msgpack"),
        (b"\x81\xa1a\xd4\x05\x00", "a value does not fit the schema"),  # an extension
        (b"\x81\xa1a\xcf\xff\xff\xff\xff\xff\xff\xff\xff", "a value does not fit the schema"),
    ],
)
def test_msgpack_that_is_none_or_does_not_fit(record, reason):
    (row,) = decode([record], schema(a=LONG, **REASON), codec="msgpack")
    assert (row["a"], row["_corrupt_reason"].partition(": ")[0]) == (None, reason)


# What is refused


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        (schema(a=INT), {"codec": "xml"}, "'codec' must be one of json, avro, msgpack"),
        (schema(a=INT), {"mode": "lax"}, "'mode' must be one of PERMISSIVE, DROPMALFORMED, FAILFAST"),
        (schema(a=INT), {"timeZone": "Mars"}, "'timeZone' must be a zone"),
        (schema(a=INT), {"avroSchema": "{}"}, "the codec json has no option 'avroSchema'"),
        (schema(a=INT), {"codec": "csv"}, r"no codec csv; .*select\(from_csv\(col\('value'\)"),
        (schema(a=types.DateType()), {"codec": "msgpack"}, "the field a: msgpack has no DATE"),
        (schema(a=types.NullType()), {}, "the field a has the type VOID, which the typed read does not know; .*from_json"),
        (schema(a=types.ArrayType(types.CalendarIntervalType())), {}, r"the field a\[\] has the type INTERVAL"),
        (schema(a=schema(b=types.DayTimeIntervalType())), {}, r"the field a\.b has the type INTERVAL"),
        (schema(a=types.MapType(INT, INT)), {}, "the field a: keys of a map must be STRING, not INT"),
        (StructType([StructField("a", INT), StructField("a", INT)]), {}, "two fields 'a'"),
        (schema(_corrupt_record=INT), {}, "the column '_corrupt_record' must be STRING or BINARY, not INT"),
        (schema(_corrupt_reason=BINARY), {}, "the column '_corrupt_reason' must be STRING, not BINARY"),
        (schema(_metadata=STRING), {}, "the column '_metadata' must be STRUCT, not STRING"),
    ],
)
def test_what_cannot_be_decoded_is_refused_when_the_read_is_planned(fields, options, text):
    with pytest.raises(BadArgument, match=text):
        Decoding(fields, Options({"codec": "json", **options}))
