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
    wanted = {number: places for number, each in enumerate(records) if (places := dict(unnamed(each, names)))}
    told = {row: {place: json.loads(text) for place, text in places.items()} for row, places in found.unnamed.items()}
    assert (told, found.unseen, found.reasons) == (wanted, 0, {})
    few = codec.decode(values, 9)
    assert len(few.unnamed) + few.unseen == len(wanted)
    assert few.unnamed.items() <= found.unnamed.items()


def test_numbers_stay_as_they_are_written_and_places_name_elements_and_keys():
    fields = t.StructType().add("m", t.MapType(t.StringType(), t.StructType().add("a", "integer"))).add("o", PERSON)
    record = b'{"m":{"k":{"a":1,"b":1.50}},"o":{"z":[{"q":"x"},{"w":[1e400,"\xc3\xbc"]}]},"n":null,"big":123456789012345678901}'
    found = JsonCodec(fields, Options({})).decode(pa.array([record]), 1)
    assert found.unnamed == {0: {"m{k}.b": "1.50", "o.z[1].w": '[1e400,"ü"]', "big": "123456789012345678901"}}


def decoded(schema: t.StructType, records: list[bytes], **options: str) -> pa.RecordBatch:
    raw = pa.RecordBatch.from_pydict({"value": pa.array(records, pa.binary())})
    return Decoding(schema, Options(options)).batch(raw, "p", lambda row: row)


def test_a_column_has_it_as_json_and_one_row_of_an_array_says_how_much_there_is():
    schema = t.StructType().add("a", "integer").add("_rescued", "string").add(UNNAMED, "string")
    records = [b'{"a":1}', b'{"a":2,"b":{"c":[true]}}', b'{"a":"x","b":1}', b'{"a":3,"b":1,"d.e":"\\""}']
    rows = decoded(schema, records, rescued="_rescued", strict="true")
    texts = [None, '{"b": {"c":[true]}}', None, '{"b": 1, "d.e": "\\""}']  # the third is corrupt
    assert rows.column("_rescued").to_pylist() == texts
    assert json.loads(rows.column(UNNAMED)[0].as_py()) == {"records": 2, "fields": {"b": 2, "d.e": 1}}
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
