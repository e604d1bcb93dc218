"""Values that a table of Iceberg or Delta cannot hold: bad records of a job, an error of `append_once`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spark_batches import make_batch
from test_spark_batch_job import lines

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables.append import append_once

KINDS = "iceberg", "delta"
MILLISECONDS = 1763683200123  # of 2025, read as seconds: the year 57858
FIRST, LAST = "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"


def output(lake: Any, kind: str, **fields: Any) -> Output:
    where = {"table": lake.name(kind)} if kind == "iceberg" else {"path": lake.name(kind)}
    return Output(**where, format=kind, **fields)


def set_aside(lake: Any, batch: str = "orders-1a2b") -> dict[bytes, str]:
    rows = lake.session.read.parquet(str(lake.place / "aside" / f"batch={batch}")).collect()
    return {bytes(row.value): row.reason for row in rows}


def job(lake: Any, kind: str, records: list[bytes], batch_id: str = "orders-1a2b", **options: Any) -> dict[str, Any]:
    batch = make_batch(lake.place / batch_id, records, batch_id=batch_id)
    return run(lake.session, str(batch), [output(lake, kind)], quarantine=str(lake.place / "aside"), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_that_a_table_cannot_hold_is_a_bad_record(lake, kind):
    far = [{"at": MILLISECONDS}, {"at": -62135596801}, {"day": "10000-01-01"}, {"day": "0000-12-31"}, {"local": "-0001-01-01"}]
    nested = [{"more": {"days": ["2026-01-01", None, "+10000-01-01"]}}, {"more": {"by": {"a": {"at": MILLISECONDS}}}}]
    good = [{"at": FIRST, "day": FIRST}, {"at": LAST, "day": LAST, "more": {"days": [LAST], "by": {"b": {"at": FIRST}}}}, {}]
    schema = "at TIMESTAMP, day DATE, local TIMESTAMP_NTZ, more STRUCT<days: ARRAY<DATE>, by: MAP<STRING, STRUCT<at: TIMESTAMP>>>"
    result = job(lake, kind, [*lines(*good, *far, *nested), b"{"], schema=schema)
    assert result["reasons"] == {"a value does not fit a table": 7, "malformed JSON": 1}
    assert (result["good"], result["outputs"][0]["written"]) == (3, 3)
    assert [tuple(map(str, row)) for row in lake.rows(kind, '"at"::VARCHAR, day::VARCHAR, more.days[1]::VARCHAR')] == [
        ("0001-01-01 00:00:00+00", "0001-01-01", "None"),
        ("9999-12-31 23:59:59.999999+00", "9999-12-31", "9999-12-31"),
        ("None", "None", "None"),
    ]
    reasons = set_aside(lake)
    assert reasons.pop(b"{").startswith("malformed JSON")
    assert reasons == dict(
        zip(
            lines(*far, *nested),
            [
                f"a value does not fit a table: {what} is not in the years 1 to 9999"
                for what in (
                    "at: '+57858-11-24 00:02:03'",
                    "at: '0000-12-31 23:59:59'",
                    "day: '+10000-01-01'",
                    "day: '0000-12-31'",
                    "local: '-0001-01-01 00:00:00'",
                    "more.days[]: '+10000-01-01'",
                    "more.by{}.at: '+57858-11-24 00:02:03'",
                )
            ],
            strict=True,
        )
    )


def test_the_same_of_csv_and_of_spark_s_json_and_files_hold_such_times(lake):
    schema = "id INT, at TIMESTAMP"
    for codec, options, far in (
        ("csv", {}, b"1,+57858-11-24 00:02:03"),
        ("json", {"allowComments": "true"}, b'{"at":1763683200123}'),
    ):
        fine = b"2,2026-01-01" if codec == "csv" else b'{"id":2,/**/"at":"2026-01-01"}'
        result = job(lake, "delta", [far, fine], codec, schema=schema, codec=codec, read_options=options)
        assert (result["good"], result["reasons"]) == (1, {"a value does not fit a table": 1}), codec
        assert set_aside(lake, codec) == {
            far: "a value does not fit a table: at: '+57858-11-24 00:02:03' is not in the years 1 to 9999"
        }, codec
    assert lake.rows("delta", "id") == [(2,), (2,)]
    batch = make_batch(lake.place / "b", [far])
    assert run(lake.session, str(batch), [Output(str(lake.place / "files"))], schema=schema)["good"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_such_a_time_of_a_query_is_an_error_and_nothing_is_added(lake, kind):
    append_once(lake.session.sql("SELECT 1L AS id, TIMESTAMP'2026-01-01' AS at"), lake.name(kind), "b1", format=kind)
    far = lake.session.range(2).selectExpr("id", f"timestamp_seconds({MILLISECONDS}) AS at")
    with pytest.raises(BadArgument, match=r"the column at: '\+57858-11-24 00:02:03' is not in the years 1 to 9999; leave"):
        append_once(far, lake.name(kind), "b2", format=kind)
    batch = make_batch(lake.place / "b", lines({"id": 1}))
    made = output(lake, kind, sql="SELECT id, timestamp_seconds(1763683200123) AS at FROM batch")
    with pytest.raises(BadArgument, match=r"the column at: '\+57858"):
        run(lake.session, str(batch), [made], schema="id BIGINT", quarantine=str(lake.place / "aside"))
    assert lake.rows(kind, "id") == [(1,)]


def test_a_null_where_the_table_requires_a_value_is_a_bad_record(lake):
    import pyarrow as pa

    lake.catalog.create_namespace("shop")
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    lake.catalog.create_table("shop.orders", columns)
    null = json.dumps({"id": None, "name": "a"}).encode()
    result = job(lake, "iceberg", [null, *lines({"id": 1}, {"name": "b"})], schema="id BIGINT, name STRING")
    assert result["reasons"] == {"a value does not fit a table": 2}
    assert lake.rows("iceberg") == [(1, None)]
    assert "id: null" in set_aside(lake)[null]


def test_a_text_that_is_too_long_for_the_column_is_a_bad_record(spark, tmp_path):
    url = f"jdbc:derby:{tmp_path}/database;create=true"
    connection = spark.sparkContext._jvm.java.sql.DriverManager.getConnection(url)
    connection.createStatement().execute("CREATE TABLE orders (id BIGINT, name VARCHAR(3), batch VARCHAR(99))")
    connection.close()
    spark.sql("CREATE TABLE short (id BIGINT, name CHAR(3), batch STRING) USING parquet PARTITIONED BY (batch)")
    batch = make_batch(tmp_path / "b", lines({"id": 1, "name": "abc"}, {"id": 2, "name": "abcd"}, {"id": 3}))
    outputs = [Output(format="jdbc", options={"url": url, "dbtable": "orders"}), Output(table="short")]
    try:
        for output, what in zip(outputs, ("VARCHAR(3)", "CHAR(3)"), strict=True):
            result = run(spark, str(batch), [output], schema="id BIGINT, name STRING", quarantine=str(tmp_path / "aside"))
            assert (result["good"], result["outputs"][0]["written"]) == (2, 2)
            (bad,) = spark.read.parquet(result["quarantine"]).collect()
            assert bad.reason == f"a value does not fit a table: name: 'abcd' is longer than {what}"
        assert sorted(row.id for row in spark.table("short").collect()) == [1, 3]
    finally:
        spark.sql("DROP TABLE short")


@pytest.mark.parametrize("kind", KINDS)
def test_days_before_the_calendar_changed_are_the_same_days_whatever_spark_is_set_to(lake, kind):
    lake.session.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    rows = lake.session.sql("SELECT DATE'1500-01-01' AS day, TIMESTAMP'1582-10-04 12:00:00' AS at")
    append_once(rows, lake.name(kind), "b1", format=kind)
    assert lake.rows(kind, 'day::VARCHAR, "at"::VARCHAR') == [("1500-01-01", "1582-10-04 12:00:00+00")]


def test_a_value_without_a_partition_is_a_bad_record(lake, tmp_path):
    def run_with(kind: str, schema: str, parts: list[str], records: list[dict[str, Any]], again: bool = False) -> dict[str, int]:
        name = f"t{len(parts[0])}{kind}"
        place = {"table": f"lake.shop.{name}"} if kind == "iceberg" else {"path": f"{tmp_path}/{name}"}
        batch = make_batch(tmp_path / f"b-{name}-{again}", lines(*records), batch_id=f"{name}-{again}")
        out = Output(**place, format=kind, partition_by=parts)
        result = run(lake.session, str(batch), [out], schema=schema, quarantine=f"{tmp_path}/aside")
        assert result["outputs"][0]["written"] == result["good"] == len(records) - result["bad"]
        return result["reasons"]

    numbers = "i INT, b BIGINT, d DECIMAL(20, 4)"
    least = [{"i": -(2**31)}, {"b": -(2**63)}, {"d": "-9999999999999999.9999"}]
    most = [{"i": 6 - 2**31, "b": 6 - 2**63, "d": "-9999999999999999.9993"}, {"i": 2**31 - 1, "b": 2**63 - 1}, {}]
    parts = ["truncate(7, i)", "truncate(7, b)", "truncate(7, d)"]
    for again in False, True:  # the table is made, and is there
        assert run_with("iceberg", numbers, parts, [*least, *most], again) == {"a value does not fit a table": 3}
    table = lake.catalog.load_table("shop.t14iceberg")
    assert table.scan(f"i == {6 - 2**31}").to_arrow()["b"].to_pylist() == [6 - 2**63] * 2

    wrong = "a\0b", "x" * 254, "ä" * 127, "=" * 85, "__HIVE_DEFAULT_PARTITION__"
    texts = [{"k": text, "v": 1} for text in ("x" * 253, "ä" * 126, "=" * 84, *wrong, None)]
    for kind in "delta", "parquet":
        for again in False, True:
            assert run_with(kind, "k STRING, v INT", ["k"], texts, again) == {"a value does not fit a table": 5}
    for kind, part, row, message in (
        ("iceberg", "truncate(7, i)", {"i": -(2**31)}, "i: -2147483648 is too small for truncate(7, …); leave such rows out"),
        ("delta", "i", {"i": "x" * 300}, "xxx' cannot be the name of a directory: .* as Spark writes it; leave such rows out"),
    ):
        rows = lake.session.createDataFrame([(*row.values(), 1)], f"i {'INT' if kind == 'iceberg' else 'STRING'}, v INT")
        with pytest.raises(BadArgument, match=message.replace("(", "\\(").replace(")", "\\)")):
            append_once(rows, lake.name(kind, "own"), "b", format=kind, partition_by=[part])
    reasons = {row.reason for row in lake.session.read.parquet(f"{tmp_path}/aside").collect()}
    assert any("i: -2147483648 is too small for truncate(7, …)" in reason for reason in reasons)
    assert any("k: 'xxx" in reason and "cannot be the name of a directory" in reason for reason in reasons)
