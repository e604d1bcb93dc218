"""A CSV that is staged row by row has, when it is read with a schema, the values that `spark.read.csv` gives."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from typed_reads import our_rows, table_rows

from qewqew_core import Queue, Stage
from qewqew_core.tools.reading import Reading, records_of
from qewqew_core.tools.rows import encode
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output

NUMBERS = ["1", "-1", "+5", "007", "127", "128", "-129", "32768", "2147483648", "9223372036854775807", "9223372036854775808"]
NUMBERS += ["1.0", "1.5", ".5", "5.", "1e3", "1E-3", "-0", "0", "NaN", "Inf", "-Inf", "Infinity", "-Infinity", "nan", "inf"]
NUMBERS += ["1.5f", "1d", "1L", " 1", "1 ", "1,234.5", "0x10", "1_000", "--1", "1e400", "1e-400", "3.4028236e38", "12abc", ""]
NUMBERS += ["null", "١"]
BOOLEANS = ["true", "false", "TRUE", "False", "t", "1", "0", "yes", "", " true"]
MOMENTS = ["2026-11-24", "2026-11-24 10:00:00", "2026-11-24T10:00:00.123456Z", "2026-11-24T10:00:00+02:00", "2026", "2026-11"]
MOMENTS += [
    "1764000000",
    "24.11.2026",
    "20261124",
    "0001-01-01",
    "9999-12-31",
    "",
    "now",
    "2026-02-30",
    "2026-11-24T10:00",
    "10:00",
]
TEXTS = ["a", "", " b ", 'say "x"', "a\tb", "ü", "null", "\\", "a\\nb"]
TYPES = {
    **dict.fromkeys(["TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL(10,2)", "DECIMAL(38,18)"], NUMBERS),
    **dict.fromkeys(["DATE", "TIMESTAMP", "TIMESTAMP_NTZ"], MOMENTS),
    "BOOLEAN": BOOLEANS,
    "STRING": [*NUMBERS, *BOOLEANS, *MOMENTS, *TEXTS],
}


def as_csv(rows: list[list[str]], **style: Any) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", **style).writerows(rows)
    return out.getvalue()


def theirs(spark: SparkSession, path: Path, schema: StructType, **options: Any) -> list[tuple[Any, ...]]:
    return table_rows(spark.read.schema(schema).options(header=True, **options).csv(str(path)).toArrow())


def ours(path: Path, schema: StructType, **options: Any) -> list[tuple[Any, ...]]:
    with path.open("rb") as file:
        records = [encode(row, 0) for row in records_of(file, path.name, Reading.of(options), lambda said: None)]
    return our_rows(records, schema, codec="json", fromTexts="true")


@pytest.mark.parametrize("kind", TYPES)
def test_a_staged_text_has_the_value_that_spark_reads(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.csv"
    values = TYPES[kind]
    path.write_text(
        as_csv([["number", "value"], *([str(number), value] for number, value in enumerate(values))], escapechar="\\")
    )
    schema = StructType.fromDDL(f"number INT, value {kind}, _corrupt_record STRING")
    found = [(*row[:2], row[2] is None) for row in theirs(spark, path, schema, escape='"')]
    read = [(*row[:2], row[2] is None) for row in ours(path, schema)]
    different = [(values[at], a, b) for at, (a, b) in enumerate(zip(found, read, strict=True)) if repr(a) != repr(b)]
    assert different == []


DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # How it is written, what Spark is told, what the reader here is told, and the encoding
    "comma": ({}, {}, {}, "utf-8"),
    "semicolon": ({"delimiter": ";"}, {"sep": ";"}, {}, "utf-8"),
    "tab": ({"delimiter": "\t"}, {"sep": "\t"}, {}, "utf-8"),
    "pipe": ({"delimiter": "|"}, {"sep": "|"}, {}, "utf-8"),
    "caret": ({"delimiter": "^"}, {"sep": "^"}, {"delimiter": "^"}, "utf-8"),
    "all quoted": ({"quoting": csv.QUOTE_ALL}, {}, {}, "utf-8"),
    "single quotes": ({"quotechar": "'"}, {"quote": "'", "escape": "'"}, {"quote": "'"}, "utf-8"),
    "byte order mark": ({}, {}, {}, "utf-8-sig"),
    "latin-1": ({"delimiter": ";"}, {"sep": ";", "encoding": "ISO-8859-1"}, {"encoding": "latin-1"}, "latin-1"),
    "utf-16": ({}, {"encoding": "UTF-16", "multiLine": True}, {}, "utf-16"),
    "null": ({}, {"nullValue": "-"}, {"null": "-"}, "utf-8"),
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dozen_dialects(spark: SparkSession, tmp_path: Path, dialect: str, end: str) -> None:
    style, of_spark, of_reader, encoding = DIALECTS[dialect]
    rows = [["id", "name", "price", "at"]]
    rows += [[str(n), f"größe, {n}; 'x'", f"{n}.5", "2026-11-24 10:00:00"] for n in range(30)] + [["x", "-", "", "-"]]
    path = tmp_path / "x.csv"
    path.write_bytes(as_csv(rows, **style).replace("\n", end).encode(encoding))
    schema = StructType.fromDDL("id BIGINT, name STRING, price DECIMAL(10,2), at TIMESTAMP, _corrupt_record STRING")
    found = [(*row[:4], row[4] is None) for row in theirs(spark, path, schema, **{"escape": '"', **of_spark})]
    assert [(*row[:4], row[4] is None) for row in ours(path, schema, **of_reader)] == found
    assert len(found) == 31


def test_the_ready_made_job_reads_a_staged_csv_with_its_schema(spark: SparkSession, tmp_path: Path) -> None:
    path, queue = tmp_path / "orders.csv", tmp_path / "orders.qew"
    path.write_text("id;price;paid;day\n1;1.50;true;2026-11-24\n2;;FALSE;\nx;2;true;2026-11-24\n")
    with path.open("rb") as file, Stage(queue) as stage:
        for number, row in enumerate(records_of(file, path.name, Reading(), lambda said: None)):
            stage.put(encode(row, number))
        stage.put(b'{"id": 4, "price": "2", "paid": true, "day": "2026-11-25"}')
        stage.commit("one")
    with Queue(queue) as opened:
        batch = opened.lease("run")
        assert batch is not None
    output = Output(path=str(tmp_path / "out"))
    schema = "id BIGINT, price DECIMAL(10,2), paid BOOLEAN, day DATE"
    result = run(spark, str(Path(batch.manifest_path).parent), outputs=[output], schema=schema, quarantine=str(tmp_path / "bad"))
    assert (result["good"], result["bad"]) == (3, 1)
    rows = [json.loads(row) for row in spark.read.parquet(str(tmp_path / "out")).orderBy("id").toJSON().collect()]
    assert [{name: row.get(name) for name in ("id", "price", "paid", "day")} for row in rows] == [
        {"id": 1, "price": 1.5, "paid": True, "day": "2026-11-24"},
        {"id": 2, "price": None, "paid": False, "day": None},
        {"id": 4, "price": 2.0, "paid": True, "day": "2026-11-25"},
    ]
    strict = {"fromTexts": "false"}
    again = run(spark, str(Path(batch.manifest_path).parent), outputs=[Output(path=str(tmp_path / "strict"))], schema=schema,
                quarantine=str(tmp_path / "strictly"), read_options=strict)  # fmt: skip
    assert (again["good"], again["bad"]) == (1, 3)


def test_texts_within_others_are_read_too_and_records_of_both_kinds_side_by_side(spark: SparkSession) -> None:
    kinds = "BIGINT", "TINYINT", "DOUBLE", "FLOAT", "DECIMAL(5,1)", "BOOLEAN", "DATE"
    inner = ", ".join(f"f{at}: {kind}" for at, kind in enumerate(kinds))
    schema = StructType.fromDDL(
        f"one STRUCT<{inner}>, many ARRAY<STRUCT<{inner}>>, by MAP<STRING, BIGINT>, _corrupt_reason STRING"
    )
    numbers = [1, -2, 0.5, 0.25, 12.5, True, "2026-11-24"]
    texts = ["1", "-2", "0.5", "0.25", "12.5", "true", "2026-11-24"]
    odd = ["+1", "-02", "5e-1", ".25", "12.50", "TRUE", "2026-11-24 "]
    records, empty = [], {f"f{at}": "" for at in range(len(kinds))}
    for values in [numbers, texts, odd] * 100:
        each = {f"f{at}": value for at, value in enumerate(values)}
        records.append(json.dumps({"one": each, "many": [each, empty, None], "by": {"a": values[0], "b": None}}).encode())
    rows = our_rows(records, schema, codec="json", fromTexts="true")
    assert {repr(row) for row in rows} == {repr(rows[0])}
    assert rows[0][3] is None
    one, many, by = rows[0][:3]
    assert one == many[0]
    assert [one[f"f{at}"] for at in range(6)] == [1, -2, "0.5", "0.25", Decimal("12.5"), True]
    assert many[1:] == [dict.fromkeys(one), None]
    assert by == [("a", 1), ("b", None)]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "STRING"])
def test_many_texts_at_once_have_the_values_that_each_has_alone(spark: SparkSession, kind: str) -> None:
    schema = StructType.fromDDL(f"value {kind}, _corrupt_record STRING")
    records = [json.dumps({"value": value}).encode() for value in TYPES[kind] * 20]
    alone = our_rows(records, schema, codec="json", fromTexts="true", size=1)
    assert list(map(repr, our_rows(records, schema, codec="json", fromTexts="true"))) == list(map(repr, alone))


def test_a_frame_of_spark_stands_for_its_rows(spark: SparkSession) -> None:
    from qewqew_airflow.shared.records import is_frame, rows_of_frame

    frame = spark.sql("SELECT id, date'2026-11-24' AS day, named_struct('a', 1.50BD) AS of FROM range(3) ORDER BY id")
    assert is_frame(frame)
    assert list(rows_of_frame(frame)) == [{"id": number, "day": "2026-11-24", "of": {"a": "1.50"}} for number in range(3)]
