"""One batch goes to several tables by a field: each record once, in the table that it names, or in the quarantine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import functions as F
from spark_batches import make_batch
from spark_lake import Lake

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs import routing
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.jobs.writing import Once

EVENTS: list[dict[str, Any]] = [
    {"type": "click", "id": 1, "seen": {"page": "/a"}},
    {"type": "Click", "id": 2, "seen": {"page": "/b"}},
    {"type": "order", "id": 3, "total": 9.5, "seen": {"shop": "us"}},
    {"type": "error", "id": 4},
]
LOST: list[dict[str, Any]] = [
    {"id": 5},
    {"type": None, "id": 6},
    {"type": "", "id": 7},
    {"type": "../click", "id": 8},
    {"type": ".hidden", "id": 9},
    {"type": "a.b", "id": 10},
    {"type": "click\n", "id": 11},
    {"type": "x" * 101, "id": 12},
    {"type": "clic\u212a", "id": 13},  # the sign of kelvin is a k in small letters
]


def batch_of(place: Path, records: Sequence[Any], number: int = 1) -> str:
    lines = [json.dumps(each).encode() if isinstance(each, dict) else each for each in records]
    return str(make_batch(place / f"orders-{number}", lines, batch_id=f"orders-{number}"))


def ids(path: Path) -> list[int]:
    """As pyarrow reads the files."""
    return sorted(pyarrow.dataset.dataset(path, partitioning="hive").to_table(columns=["id"])["id"].to_pylist())


def test_each_record_is_in_the_place_that_it_names_or_in_the_quarantine(spark: Any, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [*EVENTS, *LOST, b"no JSON"])
    output = Output(f"{tmp_path}/lake/{{type}}", route="type")
    for _ in range(2):  # the second run replaces what the first one wrote
        result = run(spark, batch, [output], quarantine=f"{tmp_path}/bad")
        assert {path.name for path in (tmp_path / "lake").iterdir()} == {"click", "order", "error"}
        assert [ids(tmp_path / "lake" / name) for name in ("click", "order", "error")] == [[1, 2], [3], [4]]
        assert (result["read"], result["good"], result["bad"], result["note"]) == (14, 4, 10, None)
        assert result["reasons"]["no route"] == len(LOST)
        assert {Path(each["path"]).parent.name: each["written"] for each in result["outputs"]} == {
            "click": 2,
            "error": 1,
            "order": 1,
        }
    bad = spark.read.parquet(f"{tmp_path}/bad").collect()
    assert len(bad) == 10
    reasons = {json.loads(row.value)["id"]: row.reason for row in bad if row.reason.startswith("no route")}
    assert reasons[5] == reasons[6] == f"no route: type is null, and {routing._WHAT}"
    assert reasons[8].startswith("no route: type is '../click', and ")


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_tables_have_the_columns_that_their_records_have(lake: Lake, kind: str, tmp_path: Path) -> None:
    place = {"table": "lake.shop.{type}"} if kind == "iceberg" else {"path": f"{tmp_path}/{{type}}"}
    output = Output(**place, route="type", format=kind)
    for _ in range(2):
        result = run(lake.session, batch_of(tmp_path, EVENTS), [output], quarantine=f"{tmp_path}/bad")
    assert lake.rows(kind, "id, seen.page", "click") == [(1, "/a"), (2, "/b")]
    assert lake.rows(kind, "id, total, seen.shop", "order") == [(3, 9.5, "us")]
    assert lake.rows(kind, "*", "error") == [(4, "error")]
    left_out = {
        (each["table"] or each["path"]).rpartition("." if kind == "iceberg" else "/")[2]: each for each in result["outputs"]
    }
    assert left_out["click"]["left_out"] == ["seen.shop", "total"]

    more = [{"type": "click", "id": 20}, {"type": "error", "id": 21, "seen": {"page": "/c"}}]
    run(lake.session, batch_of(tmp_path, more, 2), [output], quarantine=f"{tmp_path}/bad")
    assert lake.rows(kind, "id, seen.page", "click") == [(1, "/a"), (2, "/b"), (20, None)]
    assert lake.rows(kind, "id, seen.page", "error") == [(21, "/c"), (4, None)]


def test_a_run_that_fails_between_two_tables_is_completed_by_the_next(lake: Lake, tmp_path: Path, monkeypatch: Any) -> None:
    batch, real, done = batch_of(tmp_path, EVENTS), Once.commit, []

    def fails_at_the_second(sink: Once) -> None:
        if done:
            raise KeyboardInterrupt
        real(sink)
        done.append(sink)

    output = Output(table="lake.shop.{type}", route="type", format="iceberg")
    with monkeypatch.context() as patch:
        patch.setattr(Once, "commit", fails_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            run(lake.session, batch, [output], quarantine=f"{tmp_path}/bad")
    assert len(done) == 1
    run(lake.session, batch, [output], quarantine=f"{tmp_path}/bad")
    assert [lake.rows("iceberg", "id", name) for name in ("click", "order", "error")] == [[(1,), (2,)], [(3,)], [(4,)]]


def test_what_one_table_cannot_hold_another_can(lake: Lake, tmp_path: Path) -> None:
    output = Output(table="lake.shop.{type}", route="type", format="iceberg")
    run(
        lake.session,
        batch_of(tmp_path, [{"type": "click", "id": 1}, {"type": "order", "id": 1}]),
        [output],
        quarantine=f"{tmp_path}/bad",
    )
    with lake.catalog.load_table("shop.click").update_schema(allow_incompatible_changes=True) as change:
        change.make_column_optional("id")
    with lake.catalog.load_table("shop.order").update_schema(allow_incompatible_changes=True) as change:
        change.update_column("id", required=True)
    more = [{"type": "click", "id": None}, {"type": "order", "id": None}, {"type": "order", "id": 2}]
    result = run(lake.session, batch_of(tmp_path, more, 2), [output], quarantine=f"{tmp_path}/bad")
    assert result["reasons"] == {"a value does not fit a table": 1}
    assert lake.rows("iceberg", "id", "click") == [(1,), (None,)]
    assert lake.rows("iceberg", "id", "order") == [(1,), (2,)]


def test_a_query_routes_what_it_makes_and_another_output_has_all(spark: Any, tmp_path: Path) -> None:
    query = "SELECT type AS kind, count(*) AS id FROM batch GROUP BY type"
    outputs = [Output(f"{tmp_path}/all"), Output(f"{tmp_path}/lake/by-{{KIND}}", sql=query, route="KIND")]
    result = run(spark, batch_of(tmp_path, EVENTS), outputs)
    assert ids(tmp_path / "all") == [1, 2, 3, 4]
    assert ids(tmp_path / "lake/by-click") == [1, 1]  # of 'click' and 'Click'
    assert ids(tmp_path / "lake/by-order") == [1]
    assert [each["written"] for each in result["outputs"]] == [4, 2, 1, 1]


def test_nothing_is_written_where_routes_are_wrong(spark: Any, tmp_path: Path) -> None:
    def refused(message: str, records: Sequence[Any], *outputs: Output, **options: Any) -> None:
        with pytest.raises(BadArgument, match=message):
            run(spark, batch_of(tmp_path / "batches", records), outputs, quarantine=f"{tmp_path}/out/bad", **options)
        assert not (tmp_path / "out").exists()

    place = f"{tmp_path}/out/{{type}}"
    a_query = Output(place, sql="SELECT * FROM batch", route="type")
    refused("a row has type = '../click', and a route is", [*EVENTS, LOST[3]], a_query)
    refused("a row has type = null, and", [*EVENTS, LOST[0]], a_query)
    refused("no column 'type' to route by; the columns are id", EVENTS, a_query, schema="id INT")
    refused("no column 'type' to route by; the columns are id", EVENTS, Output(place, route="type"), schema="id INT")
    refused("more than 100 routes", [{"type": number} for number in range(101)], Output(place, route="type"))
    refused("go to '.*/out/click'", EVENTS, Output(place, route="type"), Output(f"{tmp_path}/out/click"))


def test_a_batch_without_a_route_has_no_table(spark: Any, tmp_path: Path) -> None:
    output = Output(f"{tmp_path}/lake/{{type}}", route="type")
    result = run(spark, batch_of(tmp_path, LOST), [output], quarantine=f"{tmp_path}/bad", max_bad_records=9)
    assert (result["good"], result["bad"], result["outputs"], result["note"]) == (0, len(LOST), [], None)
    result = run(spark, batch_of(tmp_path, [b"no JSON"]), [output], quarantine=f"{tmp_path}/bad", max_bad_records=9)
    assert (result["bad"], result["outputs"]) == (1, [])
    assert not (tmp_path / "lake").exists()


def test_a_batch_with_routes_is_decoded_once(spark: Any, tmp_path: Path) -> None:
    def clicks(sink: Any) -> Any:
        plan = sink._jdf.queryExecution().executedPlan().toString()
        assert "InMemoryTableScan" in plan
        return sink

    made: list[Any] = []
    real = routing.Routed.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing.Routed, "rows", lambda self, table: made.append(clicks(real(self, table))) or made[-1])
        run(spark, batch_of(tmp_path, EVENTS), [Output(f"{tmp_path}/lake/{{type}}", route="type")], quarantine=f"{tmp_path}/bad")
    assert len(made) == 3
    assert made[0].agg(F.count("*")).collect()[0][0] == 2  # kept by nobody now, and readable


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_routed_rows_replace_those_of_their_table(lake: Lake, kind: str, tmp_path: Path) -> None:
    place = {"table": "lake.shop.{type}"} if kind == "iceberg" else {"path": f"{tmp_path}/{{type}}"}
    output = Output(
        **place, route="type", format=kind, keys=["id"], order_by="changed", operation={"column": "op", "delete": ["D"]}
    )

    def change(number: int, *records: dict[str, Any]) -> None:
        batch = batch_of(tmp_path, records, number)
        run(
            lake.session,
            batch,
            [output],
            quarantine=f"{tmp_path}/bad",
            schema="type STRING, id INT, changed INT, op STRING, n INT",
        )

    change(1, *({"type": name, "id": number, "n": 0} for name in ("a", "b") for number in (1, 2)))
    change(2, {"type": "a", "id": 1, "changed": 5, "n": 1}, {"type": "b", "id": 2, "changed": 5, "op": "D"})
    change(3, {"type": "a", "id": 1, "changed": 4, "n": 2}, {"type": "b", "id": 1, "changed": 4, "n": 2})
    assert lake.rows(kind, "id, changed, n", "a") == [(1, 5, 1), (2, None, 0)]
    assert lake.rows(kind, "id, changed, n", "b") == [(1, 4, 2)]
