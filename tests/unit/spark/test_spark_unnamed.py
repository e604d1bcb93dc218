"""What records have that the schema does not name: where it is, how it is written, and what is counted."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from qewqew_core.errors import BadArgument
from qewqew_spark.codecs.from_json import JsonCodec
from qewqew_spark.codecs.unnamed import names_of, unnamed
from qewqew_spark.options import Options
from qewqew_spark.source.decoding import LOOKED, UNNAMED, Decoding

PERSON = t.StructType().add("x", "integer").add("y", "string").add("z", t.ArrayType(t.StructType().add("q", "string")))
FIELDS = t.StructType().add("a", "long").add("s", "string").add("t", "timestamp").add("o", PERSON)
FIELDS = FIELDS.add("l", t.ArrayType(t.StringType())).add("d", "double")
TEXTS = ["", "a:b", ":null", "n:n", "x: null", ":", "::n", 'q":1,"', "\\", "é:", "null", " : n"]


def record(odds: random.Random) -> dict[str, object]:
    def text() -> str:
        return odds.choice(TEXTS)

    def maybe(value: object) -> object:
        return odds.choice([value, value, None])

    element = {odds.choice(["q", "q", "w"]): maybe(text())}
    inner = {"x": maybe(3), "y": maybe(text()), "z": maybe([maybe(element)]), "k": maybe(text())}
    values = {
        "a": maybe(1),
        "s": maybe(text()),
        "t": maybe("2026-01-01T00:00:00Z"),
        "o": maybe({name: value for name, value in inner.items() if odds.random() < (0.1 if name == "k" else 0.6)}),
        "l": maybe([maybe(text()), text()]),
        "u": odds.choice([None, 1, text(), [], {}, {"a": None}, [text()], {text(): text()}]),
        text(): text(),
    }
    return {name: value for name, value in values.items() if odds.random() < (0.1 if name in ("u", *TEXTS) else 0.7)}


def test_all_that_the_schema_does_not_name_is_found_however_the_record_is_written():
    odds, codec, names = random.Random(7), JsonCodec(FIELDS, Options({"strict": "true"})), names_of(FIELDS)
    records = [record(odds) for _ in range(4000)]
    texts = [
        json.dumps(each, ensure_ascii=odds.random() < 0.5, separators=odds.choice([(",", ":"), (", ", ": "), (" ,", " :  ")]))
        for each in records
    ]
    values = pa.array([text.replace("é:", odds.choice(["é:", "é\\u003A"])).encode() for text in texts], pa.binary())
    found = codec.decode(values, len(values))
    wanted = {number: places for number, each in enumerate(records) if (places := [*unnamed(each, names)])}
    told = {row: [(place, json.loads(text)) for place, text in places] for row, places in found.unnamed.items()}
    assert (told, found.unseen, found.reasons) == (wanted, 0, {})
    few = codec.decode(values, 9)
    assert len(few.unnamed) + few.unseen == len(wanted)
    assert few.unnamed.items() <= found.unnamed.items()


def test_numbers_stay_as_they_are_written_and_places_name_elements_and_keys():
    fields = t.StructType().add("m", t.MapType(t.StringType(), t.StructType().add("a", "integer"))).add("o", PERSON)
    record = b'{"m":{"k":{"a":1,"b":1.50}},"o":{"z":[{"q":"x"},{"w":[1e400,"\xc3\xbc"]}]},"n":null,"big":123456789012345678901}'
    found = JsonCodec(fields, Options({})).decode(pa.array([record]), 1)
    assert found.unnamed == {0: [("m{k}.b", "1.50"), ("o.z[1].w", '[1e400,"ü"]'), ("big", "123456789012345678901")]}


def test_no_value_is_lost_to_another_whose_place_is_spelled_alike():
    fields = t.StructType().add("m", t.MapType(t.StringType(), t.StructType().add("a", "integer"))).add("o", PERSON)
    record = rb"""{"o.k":1,"o":{"k":2,"z":[{"w":3}],"z[0].w":4,"":5},"":6,"m{k}.b":7,"m":{"k":{"b":8},"\u006b":{"b":9},
        "k}.b{\"":{"b":10}},"n":11,"n":12,"n":null,"l":null,"l":null}"""
    found = JsonCodec(fields, Options({})).decode(pa.array([record]), 1)
    assert dict(found.unnamed[0]) == {
        '"o.k"': "1",
        "o.k": "2",
        "o.z[0].w": "3",
        'o."z[0].w"': "4",
        'o.""': "5",
        '""': "6",
        '"m{k}.b"': "7",
        "m{k}.b": "9",
        'm{"k}.b{\\""}.b': "10",
        "n": "12",  # the last of a name that is not null
    }
    assert [text for place, text in found.unnamed[0] if place == "m{k}.b"] == ["8", "9"]  # the map has both
    schema = t.StructType(fields.fields).add(UNNAMED, "string").add("more", "string")
    rows = decoded(schema, [record], rescued="more")
    assert json.loads(rows.column("more")[0].as_py()) == {place: int(text) for place, text in found.unnamed[0]}
    told = json.loads(rows.column(UNNAMED)[0].as_py())["fields"]
    assert sorted(told) == sorted(['"o.k"', "o.k", "o.z[].w", 'o."z[0].w"', 'o.""', '""', '"m{k}.b"', "m{}.b", "n"])


@pytest.mark.parametrize("most", [LOOKED, 10**6])
def test_records_that_are_read_one_by_one_may_have_used_up_the_looks(most):
    schema = t.StructType().add("id", "long").add("sku", "string")
    records = [json.dumps({"id": at, "sku": at if at % 20 == 0 else f"S{at}", "colour": "red"}).encode() for at in range(1000)]
    found = JsonCodec(schema, Options({"strict": "true"})).decode(pa.array(records), most)
    assert len(found.records) == len(found.unnamed) + found.unseen == 1000
    assert len(found.unnamed) == min(most, 50 if most == LOOKED else 1000)


def decoded(schema: t.StructType, records: list[bytes], **options: str) -> pa.RecordBatch:
    raw = pa.RecordBatch.from_pydict({"value": pa.array(records, pa.binary())})
    return Decoding(schema, Options(options)).batch(raw, "p", lambda row: row)


def test_a_column_has_it_as_json_and_one_row_of_an_array_says_how_much_there_is():
    schema = t.StructType().add("a", "integer").add("_rescued", "string").add(UNNAMED, "string")
    records = [b'{"a":1}', b'{"a":2,"b":{"c":[true]}}', b'{"a":"x","b":1}', b'{"a":3,"b":1,"d.e":"\\""}']
    rows = decoded(schema, records, rescued="_rescued", strict="true")
    texts = [None, '{"b": {"c":[true]}}', None, '{"b": 1, "\\"d.e\\"": "\\""}']  # the third is corrupt
    assert rows.column("_rescued").to_pylist() == texts
    assert json.loads(rows.column(UNNAMED)[0].as_py()) == {"records": 2, "fields": {"b": 2, '"d.e"': 1}}
    assert rows.column(UNNAMED).null_count == 3
    counted = decoded(t.StructType().add("a", "integer").add(UNNAMED, "string"), [b'{"a":1,"b":2}'] * 3 * LOOKED)
    assert json.loads(counted.column(UNNAMED)[0].as_py()) == {"records": 3 * LOOKED, "fields": {"b": LOOKED}}


def test_msgpack_has_bytes_in_base64():
    msgpack = pytest.importorskip("msgpack")
    schema = t.StructType().add("a", "integer").add("more", "string")
    rows = decoded(schema, [msgpack.packb({"a": 1, "b": b"\xff", "c": float("nan")})], codec="msgpack", rescued="more")
    assert rows.column("more").to_pylist() == ['{"b": "/w==", "c": "nan"}']


def test_the_column_must_be_in_the_schema():
    with pytest.raises(BadArgument, match="the option 'rescued' names no column of the schema: 'more'"):
        decoded(t.StructType().add("a", "integer"), [], rescued="more")
