"""An inferred schema, from batch to batch: fields that no record gives a type."""

from __future__ import annotations

from typing import Any

import pytest
from spark_batches import make_batch
from test_spark_batch_job import lines

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output

NULLS = [{"id": None, "a": None, "xs": [], "o": {"b": None, "c": None}, "os": [{"d": None}, {}]}, {"xs": [None], "a": None}]
FULL = {"id": 1, "a": {"k": 1.5}, "xs": [7], "o": {"b": True, "c": "2026"}, "os": [{"d": 1}]}


def results(spark: Any, tmp_path: Any, out: Output, *batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for number, records in enumerate(batches):
        batch = make_batch(tmp_path / f"b{number}", lines(*records), batch_id=f"b{number}")
        found.append(run(spark, str(batch), [out], quarantine=str(tmp_path / "aside"))["outputs"][0])
    return found


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_fields_without_a_type_take_that_of_the_table_or_are_left_out(lake, kind):
    where = {"table": lake.name(kind)} if kind == "iceberg" else {"path": lake.name(kind)}
    spark, out = lake.session, Output(**where, format=kind)
    left_out = ["a", "id", "o.b", "o.c", "os[].d", "xs"]
    none, partly, full, later = results(spark, lake.place, out, NULLS, [{"id": 0}, *NULLS], [FULL], [{"id": 2}, *NULLS])
    assert (none["written"], none["left_out"]) == (0, left_out)
    assert (partly["written"], partly["left_out"]) == (3, [each for each in left_out if each != "id"])
    assert (full["written"], full["left_out"]) == (1, [])
    assert (later["written"], later["left_out"]) == (3, [])
    if kind == "parquet":
        rows = spark.read.option("mergeSchema", True).parquet(out.path).select("id", "a.k", "xs", "o.b", "os.d")
        assert sorted(map(str, map(tuple, rows.collect()))) == sorted(
            [
                "(0, None, None, None, None)",
                *["(None, None, None, None, None)"] * 2,
                "(1, 1.5, [7], True, [1])",
                "(2, None, None, None, None)",
                "(None, None, [], None, [None, None])",
                "(None, None, [None], None, None)",
            ]
        )
    else:
        assert sorted(map(str, lake.rows(kind, "id, xs, len(os)"))) == sorted(
            [
                "(0, None, None)",
                *["(None, None, None)"] * 2,
                "(1, [7], 1)",
                "(2, None, None)",
                "(None, [], 2)",
                "(None, [None], None)",
            ]
        )


def test_a_query_may_name_a_field_that_is_null_in_each_record(spark, tmp_path):
    out = Output(str(tmp_path / "out"), sql="SELECT id, a, coalesce(b, 'none') AS b, xs FROM batch", partition_by=["a"])
    records = [[{"id": 1, "a": None, "b": None, "xs": []}], [{"id": 2, "a": "x", "b": "y", "xs": [1]}]]
    first, second = results(spark, tmp_path, out, *records)
    assert (first["left_out"], second["left_out"]) == (["xs"], [])
    frame = spark.read.option("mergeSchema", True).parquet(out.path).select("id", "a", "b", "xs")
    assert sorted(map(tuple, frame.collect())) == [(1, None, "none", None), (2, "x", "y", [1])]


def test_files_without_types_have_all_columns_and_an_option_of_spark_is_done(spark, tmp_path):
    records = [{"id": 1, "a": None}]
    (csv,) = results(spark, tmp_path, Output(str(tmp_path / "csv"), format="csv", options={"header": True}), records)
    assert csv["left_out"] == []
    assert spark.read.csv(csv["path"], header=True).columns == ["a", "id"]
    batch = make_batch(tmp_path / "b", lines(*records))
    for value, columns in ("true", ["batch", "id"]), ("false", ["a", "batch", "id"]):
        run(spark, str(batch), [Output(str(tmp_path / value))], read_options={"dropFieldIfAllNull": value})
        assert sorted(spark.read.parquet(str(tmp_path / value)).columns) == columns


@pytest.mark.parametrize("kind", ["VARCHAR(3)", "ARRAY<CHAR(3)>", "MAP<STRING, STRUCT<s: VARCHAR(3)>>"])
def test_a_text_with_a_length_is_refused_with_what_to_write_instead(spark, tmp_path, kind):
    batch = make_batch(tmp_path / "b", lines({"s": "abcd"}))
    with pytest.raises(BadArgument, match=r"the field 's' is (VAR)?CHAR\(3\), and .*: make it STRING, and .*, like left\(s, 3\)"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=f"s {kind}")
    out = Output(str(tmp_path / "out"), sql="SELECT left(s, 3) AS s FROM batch")
    assert run(spark, str(batch), [out], schema="s STRING")["good"] == 1


@pytest.mark.parametrize("name", ["a[1]", "a{b}", "a\\b", "a*b", "a?b"])
def test_a_path_is_no_pattern(spark, tmp_path, name):
    for number in "1", "2", "1":
        batch = make_batch(tmp_path / f"b{number}", [*lines({"id": int(number)}), b"bad"], batch_id=number)
        result = run(spark, str(batch), [Output(str(tmp_path / name))])
        assert (result["good"], result["reasons"]) == (1, {"not a JSON object": 1})
    for path in tmp_path / name, tmp_path / f"{name}-quarantine":
        assert sorted(each.name for each in path.glob("batch=*")) == ["batch=1", "batch=2"]
