"""Batches in tables of Iceberg and Delta, on real ones: written by Spark, committed by PyIceberg and delta-rs, read by DuckDB."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, convert_to_deltalake
from other_driver import OtherDriver, results
from spark_batches import make_batch
from spark_lake import Lake

from qewqew_core import BadArgument, BatchConflict, Corrupt, Topic
from qewqew_spark.data_source import register
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs import quarantine
from qewqew_spark.jobs.batch import TooManyBadRecords, run
from qewqew_spark.jobs.output import Output
from qewqew_spark.jobs.quarantine import Quarantine
from qewqew_spark.jobs.writing import Once
from qewqew_spark.tables import append_once, append_to

pytestmark = pytest.mark.xdist_group("spark")
ROOT = Path(__file__).parents[3]
KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])


@pytest.mark.quick("a batch is in a table of Iceberg or Delta once")
@KINDS
def test_a_batch_is_appended_once_beside_what_others_wrote(lake: Lake, kind: str) -> None:
    table = lake.name(kind)
    first = append_once(lake.session.range(3), table, "orders-1", format=kind)
    assert not first.again
    again = append_once(lake.session.range(100, 200), table, "orders-1", format=kind)
    assert (again.again, again.snapshot) == (True, first.snapshot)
    if kind == "iceberg":
        lake.catalog.load_table("shop.orders").append(lake.session.range(7, 8).toArrow())
    else:
        from deltalake import write_deltalake

        write_deltalake(table, lake.session.range(7, 8).toArrow(), mode="append")
    assert not append_once(lake.session.range(3, 5), table, "orders-2", format=kind).again
    assert append_once(lake.session.range(9), table, "orders-1", format=kind).again
    assert lake.rows(kind) == [(0,), (1,), (2,), (3,), (4,), (7,)]


ALL_TYPES = """
    id, CAST(id AS TINYINT) AS byte, CAST(id AS SMALLINT) AS short, CAST(id AS INT) AS whole, CAST(id AS FLOAT) AS single,
    CAST(id AS DOUBLE) AS double, CAST(id AS DECIMAL(12, 2)) AS dec, CAST(id AS STRING) AS text, id = 1 AS bool,
    ENCODE(CAST(id AS STRING), 'utf-8') AS bin, DATE_ADD(DATE'2026-01-30', CAST(id AS INT)) AS day,
    TIMESTAMP'2026-01-31 23:30:00.123456 UTC' + MAKE_INTERVAL(0, 0, 0, 0, CAST(id AS INT)) AS moment,
    TIMESTAMP_NTZ'2026-01-31 23:30:00.5' AS local, ARRAY(id, NULL) AS list, MAP('k', id) AS map,
    NAMED_STRUCT('x', id, 'y', 'y') AS struct, CAST(NULL AS STRING) AS nothing
"""


@pytest.mark.parametrize("zone", [pytest.param("UTC", marks=pytest.mark.soak), "Asia/Kolkata"])
@KINDS
def test_every_type_arrives_as_it_was(lake: Lake, kind: str, zone: str) -> None:
    lake.session.conf.set("spark.sql.session.timeZone", zone)
    lake.session.range(2).createOrReplaceTempView("numbers")
    append_once(lake.session.sql(f"SELECT {ALL_TYPES} FROM numbers"), lake.name(kind), "orders-1", format=kind)  # noqa: S608
    times = "(moment AT TIME ZONE 'UTC')::TEXT, day::TEXT, local::TEXT"
    for number, row in enumerate(lake.rows(kind, f"* EXCLUDE (moment, day, local), {times}")):
        assert row == (
            *(number, number, number, number, float(number), float(number), Decimal(f"{number}.00"), str(number), number == 1),
            *(str(number).encode(), [number, None], {"k": number}, {"x": number, "y": "y"}, None),
            *(["2026-01-31 23:30:00.123456", "2026-02-01 00:30:00.123456"][number],),
            *(f"2026-01-{30 + number}", "2026-01-31 23:30:00.5"),
        )
    assert len(lake.rows(kind)) == 2


@KINDS
def test_of_eight_drivers_with_one_batch_one_is_in_the_table(lake: Lake, kind: str, drivers: list[OtherDriver]) -> None:
    append_once(lake.session.range(1), lake.name(kind), "before", format=kind)
    for driver in drivers:
        driver.append(lake, kind, "orders-1", range(5, 8))
    done = results(drivers)
    assert sorted(commit["again"] for commit in done) == [False] + [True] * 7
    assert len({commit["snapshot"] for commit in done}) == 1
    assert lake.rows(kind) == [(0,), (5,), (6,), (7,)]


@KINDS
def test_eight_first_batches_of_a_table_all_go_in(lake: Lake, kind: str, drivers: list[OtherDriver]) -> None:
    assert lake.catalog.list_namespaces() == []  # which makes the file: eight that make it at once fail
    for number, driver in enumerate(drivers):
        driver.append(lake, kind, f"b-{number}", range(number, number + 1))
    assert not any(commit["again"] for commit in results(drivers))
    assert lake.rows(kind) == [(number,) for number in range(8)]


@KINDS
def test_a_driver_that_is_killed_leaves_nothing_or_all(lake: Lake, drivers: list[OtherDriver], kind: str) -> None:
    table = lake.name(kind)
    append_once(lake.session.range(0), table, "first", format=kind)
    numbers = {"staged": range(10), "before": range(10, 20), "after": range(20, 30)}
    killed = {point: drivers.pop() for point in numbers}
    for point, driver in killed.items():
        driver.append(lake, kind, f"killed {point}", numbers[point], die=point)
    for driver in killed.values():
        assert driver.result() is None
        assert driver.end() == -signal.SIGKILL
    assert lake.rows(kind) == [(number,) for number in numbers["after"]]
    for tried in False, True:
        for point, those in numbers.items():
            rows = lake.session.range(those.start, those.stop)
            again = append_once(rows, table, f"killed {point}", format=kind).again
            assert again == (tried or point == "after"), point
    assert lake.rows(kind) == sorted([(number,) for number in range(30)], key=repr)


@KINDS
def test_files_of_a_commit_of_which_nobody_knows_are_kept(lake: Lake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog was reached, and its answer was not: to remove the files then could take them from the table."""
    append = append_to(lake.session, lake.name(kind), "orders-1", kind)
    add = append._add

    def lost(files: Any) -> bool:
        add(files)
        raise ConnectionError("the answer was lost")

    monkeypatch.setattr(append, "_add", lost)
    append.write(lake.session.range(3))
    with pytest.raises(ConnectionError):
        append.commit()
    append.abort()
    assert lake.rows(kind) == [(0,), (1,), (2,)]
    assert append_once(lake.session.range(3), lake.name(kind), "orders-1", format=kind).again


@KINDS
def test_files_of_a_commit_stay_when_the_look_after_it_fails(lake: Lake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append = append_to(lake.session, lake.name(kind), "orders-1", kind)
    append.write(lake.session.range(3))
    find, looks = append.committed, iter([True, False])

    def failing() -> Any:
        if next(looks):
            return find()
        raise ConnectionError("the catalog is gone")

    monkeypatch.setattr(append, "committed", failing)
    with pytest.raises(ConnectionError):
        append.commit()
    append.abort()
    assert lake.rows(kind) == [(0,), (1,), (2,)]


@KINDS
def test_an_owner_that_is_faster_while_columns_are_added_is_seen(lake: Lake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append_once(lake.session.range(1), lake.name(kind), "before", format=kind)
    slow, fast = (append_to(lake.session, lake.name(kind), "orders-1", kind) for _ in range(2))
    rows = lake.session.sql("SELECT 5L AS id, 'x' AS more")
    widen = slow._widen

    def late(columns: Any) -> None:
        fast.write(rows)
        assert not fast.commit().again
        widen(columns)

    monkeypatch.setattr(slow, "_widen", late)
    slow.write(rows)  # widens an Iceberg table, whose files have the ids of columns
    assert slow.commit().again
    assert lake.rows(kind) == [(0, None), (5, "x")]


@KINDS
def test_a_table_may_be_rewritten_in_between(lake: Lake, kind: str) -> None:
    table = lake.name(kind)
    for number in range(3):
        append_once(lake.session.range(number, number + 1), table, f"orders-{number}", format=kind)
    if kind == "iceberg":  # as compaction does: other files, the same rows
        loaded = lake.catalog.load_table("shop.orders")
        loaded.overwrite(loaded.scan().to_arrow())
    else:
        DeltaTable(table).optimize.compact()
        DeltaTable(table).create_checkpoint()
    assert append_once(lake.session.range(50), table, "orders-1", format=kind).again
    assert not append_once(lake.session.range(3, 4), table, "orders-3", format=kind).again
    assert lake.rows(kind) == [(0,), (1,), (2,), (3,)]


@KINDS
def test_a_batch_may_have_any_name(lake: Lake, kind: str) -> None:
    names = ["a b/../ü%20é'\"c,= ", "x" * 500, "."]
    for again in False, True:
        assert [append_once(lake.session.range(1), lake.name(kind), name, format=kind).again for name in names] == [again] * 3
    assert lake.rows(kind) == [(0,)] * 3


@KINDS
def test_files_of_killed_attempts_are_removed_as_the_page_says(lake: Lake, kind: str) -> None:
    table = lake.name(kind)
    append_once(lake.session.range(3), table, "orders-1", format=kind)
    files = [set(lake.place.rglob("*.parquet"))]
    for _ in range(2):
        append_to(lake.session, table, "orders-2", kind).write(lake.session.range(9))  # and is killed
        files.append(set(lake.place.rglob("*.parquet")))
    committed, old, young = files[0], files[1] - files[0], files[2] - files[1]
    for file in committed | old:
        os.utime(file, (0, 0))
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/spark/tables.md").read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (text for text in examples if ("rm_file" if kind == "iceberg" else "vacuum") in text)
    text = text.replace('load_catalog("lake")', f'load_catalog("lake", **{lake.settings})').replace("/lake/orders", table)
    exec(compile(text, "docs/spark/tables.md", "exec"), {})  # noqa: S102 - our own page
    assert set(lake.place.rglob("*.parquet")) == committed | young
    assert lake.rows(kind) == [(0,), (1,), (2,)]


@KINDS
def test_a_batch_without_rows_is_there_as_well(lake: Lake, kind: str) -> None:
    table = lake.name(kind)
    assert not append_once(lake.session.range(0), table, "none", format=kind).again
    assert append_once(lake.session.range(5), table, "none", format=kind).again
    assert lake.rows(kind) == []


@KINDS
def test_partitions_are_those_of_the_table(lake: Lake, kind: str) -> None:
    lake.session.range(40).createOrReplaceTempView("numbers")
    rows = lake.session.sql(
        "SELECT id, DATE_ADD(DATE'2026-01-20', CAST(id AS INT)) AS day, NULLIF(CONCAT('a/b:% ', id % 3), 'a/b:% 2') AS odd "
        "FROM numbers"
    )
    parts = ["month(day)", "odd"] if kind == "iceberg" else ["odd"]
    for number in range(2):
        append_once(rows.where(f"id % 2 = {number}"), lake.name(kind), f"b-{number}", format=kind, partition_by=parts)
    append_once(lake.session.range(50, 51), lake.name(kind), "without", format=kind)
    found = [(row.id, str(row.day), row.odd) for row in rows.collect()]
    assert lake.rows(kind, "id, day::TEXT, odd") == sorted([*found, (50, None, None)], key=repr)
    if kind == "iceberg":
        files = lake.catalog.load_table("shop.orders").inspect.files().num_rows
        assert files >= 2 * 3 * 2  # each has rows of one partition
        assert lake.catalog.load_table("shop.orders").scan(row_filter="day < '2026-02-01'").to_arrow().num_rows == 12


@pytest.mark.parametrize("transform", ["year(at)", "month(at)", "day(at)", "hours(at)", "truncate(2, text)", "truncate(7, id)"])
def test_a_transform_of_iceberg_parts_files_whatever_the_zone(lake: Lake, transform: str) -> None:
    lake.session.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    rows = lake.session.range(0, 12, 1, 1).selectExpr(
        "id",
        "CAST(100 + id AS STRING) AS text",
        "TIMESTAMP'2025-12-31 21:30:00 UTC' + MAKE_INTERVAL(0, 0, 0, 0, 0, 30 * CAST(id AS INT)) AS at",
    )
    append_once(rows, lake.name("iceberg"), "b", partition_by=[transform])
    assert [row[0] for row in lake.rows("iceberg", "id")] == sorted(range(12), key=lambda number: repr((number,)))


@KINDS
def test_columns_may_be_new_missing_or_narrower(lake: Lake, kind: str) -> None:
    table, session = lake.name(kind), lake.session
    append_once(session.sql("SELECT 1L AS id, 'a' AS name"), table, "b-1", format=kind)
    append_once(session.sql("SELECT 2 AS id, 3 AS more"), table, "b-2", format=kind)
    with pytest.raises(BadArgument, match=r"the column 'more' is int there and string in this batch"):
        append_once(session.sql("SELECT 3L AS id, 'x' AS more"), table, "b-3", format=kind)
    with pytest.raises(BadArgument, match=r"schema_evolution is 'fail': 'name' is missing"):
        append_once(session.sql("SELECT 3L AS id, 1 AS more"), table, "b-3", format=kind, schema_evolution="fail")
    append_once(session.sql("SELECT 4L AS ID, 1 AS other"), table, "b-4", format=kind, schema_evolution="ignore")
    assert lake.rows(kind) == [(1, "a", None), (2, None, 3), (4, None, None)]


def statistics(table: str) -> list[dict[str, Any]]:
    """Of each file of a Delta table, as the log has them."""
    logs = sorted(Path(table, "_delta_log").glob("*.json"))
    actions = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    found = [json.loads(action["add"]["stats"]) for action in actions if "add" in action]
    return sorted(found, key=lambda each: json.dumps(each, sort_keys=True))


def test_a_delta_log_says_of_files_what_delta_rs_says_of_the_same(lake: Lake, tmp_path: Path) -> None:
    lake.session.range(6).createOrReplaceTempView("numbers")
    rows = lake.session.sql(f"SELECT {ALL_TYPES}, NULLIF(id, 4) AS some, 1.0 + id AS `a.b` FROM numbers")  # noqa: S608
    append_once(rows.repartition(2), lake.name("delta"), "b", format="delta")
    (tmp_path / "same").mkdir()
    for file in Path(lake.name("delta"), "data").rglob("*.parquet"):
        shutil.copy(file, tmp_path / "same")
    convert_to_deltalake(tmp_path / "same")
    ours, theirs = statistics(lake.name("delta")), statistics(str(tmp_path / "same"))
    assert len(ours) == 2
    for mine, other in zip(ours, theirs, strict=True):
        for bound in "minValues", "maxValues":
            assert mine[bound].keys() >= {"id", "day", "moment", "local", "struct", "dec", "text", "some"}
            for name in "moment", "local":  # which delta-rs cuts to milliseconds
                assert mine[bound].pop(name)[:22] == other[bound].pop(name)[:22]
        assert mine["nullCount"].pop("bin") == 0  # delta-rs does not count them
        assert mine == other


def test_an_engine_skips_files_of_a_delta_table(lake: Lake) -> None:
    append_once(lake.session.range(0, 40, 1, 4), lake.name("delta"), "b", format="delta")
    with lake.database() as database:
        plan = database.execute(f"EXPLAIN ANALYZE SELECT * FROM delta_scan('{lake.name('delta')}') WHERE id = 25").fetchall()  # noqa: S608
    assert "Scanning Files: 1/4" in str(plan)


# A value, and the same for DuckDB.
BOUNDS = [
    ("REPEAT('z', 40)", "'" + "z" * 40 + "'"),
    ("CONCAT(REPEAT('\U0010ffff', 33), 'x')", "'" + "\U0010ffff" * 33 + "x'"),
    ("REPEAT('x', 5000)", "'" + "x" * 5000 + "'"),
    ("TIMESTAMP'2026-01-31 23:30:00.123456 UTC'", "TIMESTAMPTZ '2026-01-31 23:30:00.123456 UTC'"),
    ("TIMESTAMP_NTZ'2026-01-31 23:30:00.999999'", "TIMESTAMP '2026-01-31 23:30:00.999999'"),
    ("DATE'0001-01-01'", "DATE '0001-01-01'"),
    ("DATE'9999-12-31'", "DATE '9999-12-31'"),
    ("12345678901234567890.12BD", "12345678901234567890.12::DECIMAL(22,2)"),
    ("DOUBLE('NaN')", "'NaN'::DOUBLE"),
    ("DOUBLE('Infinity')", "'Infinity'::DOUBLE"),
    ("-0.0D", "0.0::DOUBLE"),
    ("FLOAT(0.1)", "0.1::FLOAT"),
    ("X'ff'", "'\\xff'::BLOB"),
    ("true", "true"),
]


def test_no_row_is_missed_for_what_a_delta_log_says(lake: Lake) -> None:
    """Beside smaller values and nulls, so that it is one of the bounds of its file."""
    values, nulls = ", ".join(value for value, _ in BOUNDS), ", ".join(["NULL"] * len(BOUNDS))
    rows = lake.session.sql(f"SELECT * FROM VALUES ({values}), ({nulls})")  # noqa: S608
    append_once(rows.coalesce(1), lake.name("delta"), "b", format="delta")
    with lake.database() as database:
        for column, (text, value) in zip(rows.columns, BOUNDS, strict=True):
            query = f"SELECT count(*) FROM delta_scan('{lake.name('delta')}') WHERE {column} = {value}"  # noqa: S608
            assert database.execute(query).fetchone() == (1,), text


def test_a_delta_log_tells_of_as_many_columns_as_the_table_wants(lake: Lake) -> None:
    many = lake.session.range(3).selectExpr(*[f"id AS c{number}" for number in range(40)], "ARRAY(id) AS list")
    for name, properties, columns in ("default", {}, 32), ("two", {"delta.dataSkippingNumIndexedCols": "2"}, 2):
        append_once(many.coalesce(1), lake.name("delta", name), "b", format="delta", properties=properties)
        (found,) = statistics(lake.name("delta", name))
        assert [len(found[kind]) for kind in ("minValues", "maxValues", "nullCount")] == [columns] * 3


def test_a_column_that_a_table_requires_is_there_in_each_row(lake: Lake, tmp_path: Path) -> None:
    from pyiceberg.schema import Schema
    from pyiceberg.types import LongType, NestedField, StringType

    lake.catalog.create_namespace("shop")
    fields = NestedField(1, "id", LongType(), required=True), NestedField(2, "name", StringType())
    lake.catalog.create_table("shop.orders", Schema(*fields))
    with pytest.raises(BadArgument, match=r"requires the column 'id', which the batch lacks"):
        append_once(lake.session.sql("SELECT 'a' AS name"), "lake.shop.orders", "b-1")
    with pytest.raises(BadArgument, match=r"the column id: null, and Iceberg table .*orders requires a value; leave such"):
        append_once(
            lake.session.sql("SELECT * FROM VALUES (CAST(NULL AS BIGINT), 'a')  AS t(id, name)"), "lake.shop.orders", "b-1"
        )
    append_once(
        lake.session.sql("SELECT * FROM VALUES (1L, 'a'), (2L, NULL) AS t(id, name) WHERE id < 9"), "lake.shop.orders", "b-1"
    )
    assert lake.rows("iceberg") == [(1, "a"), (2, None)]
    batch = make_batch(tmp_path / "b", lines({"id": 3}, {"name": "x"}, {"id": 4}))
    result = run(lake.session, str(batch), [output_of(lake, "iceberg")], schema="id LONG", quarantine=str(tmp_path / "aside"))
    assert (result["good"], result["outputs"][0]["written"]) == (2, 2)
    assert lake.rows("iceberg", "id") == [(1,), (2,), (3,), (4,)]


def test_a_warning_tells_of_commits_that_the_table_has_forgotten(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    made = datetime.now(UTC)
    for number in range(3):
        append_once(lake.session.range(1), "lake.shop.orders", f"b-{number}", since=made)
    assert not caplog.records
    table = lake.catalog.load_table("shop.orders")
    table.maintenance.expire_snapshots().by_ids([snapshot.snapshot_id for snapshot in table.snapshots()[:2]]).commit()
    append_once(lake.session.range(1), "lake.shop.orders", "b-3", since=made)
    assert "may be tried again" in caplog.text


@pytest.mark.parametrize(
    ("table", "settings", "says"),
    [
        ("orders", {}, "a name like catalog.namespace.table"),
        ("lake..orders", {}, "a name like catalog.namespace.table"),
        ("nowhere.shop.orders", {}, r"--conf spark\.sql\.catalog\.nowhere\.uri="),
        ("java.shop.orders", {"type": "hadoop", "warehouse": "/x"}, "exists only in Java"),
    ],
)
def test_a_catalog_that_cannot_be_reached_is_told(lake: Lake, table: str, settings: dict[str, str], says: str) -> None:
    for name, value in settings.items():
        lake.session.conf.set(f"spark.sql.catalog.java.{name}", value)
    with pytest.raises(BadArgument, match=says):
        append_once(lake.session.range(1), table, "b")


@KINDS
def test_a_library_that_is_missing_is_named(lake: Lake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog" if kind == "iceberg" else "deltalake", None)
    monkeypatch.delitem(sys.modules, f"qewqew_spark.tables.{kind}", raising=False)
    with pytest.raises(BadArgument, match=rf"pip install 'qewqew\[{kind}\]'"):
        append_once(lake.session.range(1), lake.name(kind), "b", format=kind)


# The job


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


def output_of(lake: Lake, kind: str, **more: Any) -> Output:
    table = {"table": lake.name(kind)} if kind == "iceberg" else {"path": lake.name(kind)}
    return Output(format=kind, **table, **more)


@pytest.mark.quick("the batch job appends a batch to a table of Iceberg or Delta once")
@KINDS
def test_the_job_appends_each_batch_once(lake: Lake, kind: str, tmp_path: Path) -> None:
    first = make_batch(tmp_path / "b1", [*lines({"id": 1}, {"id": 2}), b"{"])
    second = make_batch(tmp_path / "b2", lines({"id": 3, "batch": "x"}), batch_id="orders-ffff")
    results = [
        run(lake.session, str(batch), [output_of(lake, kind)], quarantine=str(tmp_path / "aside"))
        for batch in (first, second, first)
    ]
    assert lake.rows(kind, "id, batch") == [(1, None), (2, None), (3, "x")]  # a column of the user's, whatever its name
    assert [(result["good"], result["bad"], result["outputs"][0]["written"]) for result in results] == [
        (2, 1, 2),
        (1, 0, 1),
        (2, 1, 2),
    ]
    snapshots = [result["outputs"][0]["snapshot"] for result in results]
    assert snapshots[0] == snapshots[2] != snapshots[1]


@KINDS
def test_a_run_in_which_other_records_are_bad_loses_none_of_them(lake: Lake, kind: str, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1, "a": 5}, {"id": 2, "a": "five"}, {"id": 3, "a": 6}))
    files, aside = str(tmp_path / "files"), str(tmp_path / "aside")
    outputs = [output_of(lake, kind), Output(files, format="json")]

    def job(schema: str | None) -> dict[str, Any]:
        return run(lake.session, str(batch), outputs, schema=schema, quarantine=aside)

    def there() -> list[Any]:
        bad = lake.session.read.parquet(f"{aside}/batch=orders-1a2b").select("value").collect()
        return [sorted(bad), lake.rows(kind), sorted(lake.session.read.json(files).collect())]

    first = job("id BIGINT, a BIGINT")
    before = there()
    for mended, bad in ("id BIGINT, a STRING", 0), ("id BIGINT, a DATE", 3):
        with pytest.raises(BatchConflict, match=rf"has the batch orders-1a2b since an earlier run .* 1 then, {bad} now"):
            job(mended)
        assert there() == before
    for again in job("id BIGINT, a BIGINT"), job(None):  # the table's types are kept
        assert [result["outputs"][0]["again"] for result in (first, again)] == [False, True]
        assert there() == before
    assert "again" not in first["outputs"][1]


@KINDS
def test_a_run_that_is_killed_before_its_bad_records_are_in_the_quarantine_is_completed_by_the_next(
    lake: Lake, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, aside = make_batch(tmp_path / "b1", [*lines({"id": 1}), b"{"]), tmp_path / "aside"

    def job() -> dict[str, Any]:
        return run(lake.session, str(batch), [output_of(lake, kind)], schema="id LONG", quarantine=str(aside))

    def killed(quarantine: Quarantine) -> None:
        raise SystemExit

    with monkeypatch.context() as during:
        during.setattr(Quarantine, "commit", killed)
        during.setattr(Quarantine, "abort", killed)
        with pytest.raises(SystemExit):
            job()
    assert (lake.rows(kind), [path.name[:12] for path in aside.iterdir()]) == ([(1,)], [".batch=order"])
    result = job()
    assert (result["outputs"][0]["again"], result["bad"]) == (True, 1)
    assert [path.name for path in aside.iterdir()] == ["batch=orders-1a2b"]
    assert lake.session.read.parquet(result["quarantine"]).count() == 1
    assert lake.rows(kind) == [(1,)]


@pytest.mark.parametrize("schema", ["id INT, a INT", "id INT, a STRING", "id INT, a DATE"])
def test_a_run_that_is_killed_while_it_replaces_the_quarantine_loses_nothing_of_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    """1, 0 or 2 of them are bad in the run that is killed."""
    batch = make_batch(tmp_path / "b1", lines({"id": 1, "a": 5}, {"id": 2, "a": "five"}))
    files, other = [Output(str(tmp_path / name), format="json") for name in ("files", "other")]
    real = {name: getattr(quarantine, name) for name in ("rename", "delete")}

    def job(outputs: list[Output], schema: str) -> None:
        run(spark, str(batch), outputs, schema=schema, quarantine=str(tmp_path / "aside"))

    def dying(calls: Iterator[int], last: int, name: str) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            if next(calls) == last:
                raise SystemExit
            real[name](*arguments)

        return act

    for last in count():
        shutil.rmtree(tmp_path / "aside", ignore_errors=True)
        job([files], "id INT, a INT")
        calls = count()
        with monkeypatch.context() as during:
            for name in real:
                during.setattr(quarantine, name, dying(calls, last, name))
            during.setattr(Quarantine, "abort", lambda _: None)
            try:
                job([files, other], schema)
            except SystemExit:
                is_whole = False
            else:
                is_whole = True
        if is_whole:
            assert last >= 2
            break
        aside = Quarantine(spark, str(tmp_path / "aside"), ["orders-1a2b"])
        aside.recover()
        kept = [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/aside/batch=orders-1a2b").collect()]
        assert b'{"id": 2, "a": "five"}' in kept, last
        assert aside.binds([]), last  # it knows that outputs lack it
        job([files, other], schema)
        assert [path.name for path in (tmp_path / "aside").iterdir()] == (["batch=orders-1a2b"] if "STRING" not in schema else [])


def test_a_run_whose_bad_records_another_one_removes_before_they_are_counted(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, aside = make_batch(tmp_path / "b1", [*lines({"id": 1}), b"{"]), tmp_path / "aside"

    def job() -> dict[str, Any]:
        return run(lake.session, str(batch), [output_of(lake, "iceberg")], schema="id LONG", quarantine=str(aside))

    def late(records: Any) -> Any:
        monkeypatch.setattr(quarantine, "_counted", counted)
        assert job()["bad"] == 1
        return counted(records)

    counted = quarantine._counted
    monkeypatch.setattr(quarantine, "_counted", late)
    with pytest.raises(BatchConflict, match="another run of the batch is at work, and removed what this one had staged"):
        job()
    assert lake.rows("iceberg") == [(1,)]
    assert [path.name for path in aside.iterdir()] == ["batch=orders-1a2b"]


@KINDS
def test_what_a_batch_has_come_to_stays_when_other_records_would_be_bad_by_now(lake: Lake, kind: str, tmp_path: Path) -> None:
    first = make_batch(tmp_path / "b1", lines({"id": 1, "x": []}, {"id": 2, "y": "a"}), batch_id="b1")
    second = make_batch(tmp_path / "b2", lines({"id": 3, "x": 5}, {"id": "four"}), batch_id="b2")
    aside = tmp_path / "aside"

    def job(batch: Path, schema: str | None = None) -> dict[str, Any]:
        return run(lake.session, str(batch), [output_of(lake, kind)], schema=schema, quarantine=str(aside))

    job(first)
    assert job(second)["bad"] == 1  # and x is a BIGINT now
    before = lake.rows(kind, "id, x, y")
    for batch, schema, bad in (first, None, 0), (second, "id STRING, x LONG", 1), (second, "id DATE", 1):
        result = job(batch, schema)
        assert (result["read"], result["bad"], result["outputs"][0]["again"]) == (2, bad, True)
        assert "by now, others would be bad" in result["note"]
        assert result["quarantine"] == (f"{aside}/batch=b2" if bad else None)
        assert [row.value for row in lake.session.read.parquet(str(aside)).collect()] == [b'{"id": "four"}']
    assert lake.rows(kind, "id, x, y") == before
    assert job(second)["note"] is None
    shutil.rmtree(aside / "batch=b2")  # without it nothing says what was bad
    with pytest.raises(BatchConflict, match="1 then, 2 now"):
        job(second, "id DATE")
    assert job(second)["quarantine"] == f"{aside}/batch=b2"


@pytest.mark.parametrize("kind", ["iceberg", "delta", "parquet"])
def test_a_run_for_another_output_loses_no_record_that_the_first_one_lacks(lake: Lake, kind: str, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1, "a": 5}, {"id": 2, "a": "five"}))
    one, two = output_of(lake, kind), Output(str(tmp_path / "two"), format="json")
    bad = "/batch=orders-1a2b"

    def job(outputs: list[Output], schema: str, aside: str = "aside") -> int:
        done = run(lake.session, str(batch), outputs, schema=f"id INT, a {schema}", quarantine=str(tmp_path / aside))
        return int(done["bad"])

    assert job([one], "INT") == 1
    for schema in "STRING", "DATE":
        with pytest.raises(BatchConflict, match=r"They are not in .*orders, to which this run does not write"):
            job([two], schema)
    assert job([two], "INT") == 1  # the same records
    with pytest.raises(BatchConflict, match=r"They are not in .*orders"):
        job([two], "STRING")
    assert lake.session.read.parquet(str(tmp_path / "aside") + bad).count() == 1
    assert not (tmp_path / "two").exists() or lake.session.read.json(two.path).count() == 1
    assert job([two], "STRING", "other") == 0
    if kind == "parquet":  # which is replaced
        assert job([two, Output(str(one.path), format="json")], "STRING") == 0
        assert not (tmp_path / "aside" / bad[1:]).exists()
    else:
        (Path(tmp_path / "aside" / bad[1:]) / "_outputs.json").write_text("{")
        with pytest.raises(Corrupt, match="it does not say any more which outputs lack the records here"):
            job([one], "INT")


@KINDS
@pytest.mark.parametrize("fast", ["TINYINT", "BIGINT"])
def test_of_two_runs_at_once_in_which_other_records_are_bad_the_slower_one_fails_and_changes_nothing(
    lake: Lake, kind: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1}, {"id": 300}))
    commit, aside = Once.commit, tmp_path / "aside"

    def job(kind_of_id: str) -> None:
        run(lake.session, str(batch), [output_of(lake, kind)], schema=f"id {kind_of_id}", quarantine=str(aside))

    def late(sink: Once) -> None:
        monkeypatch.setattr(Once, "commit", commit)
        job(fast)
        commit(sink)

    append_once(lake.session.range(0), lake.name(kind), "made", format=kind)
    monkeypatch.setattr(Once, "commit", late)
    with pytest.raises(BatchConflict, match="1 then, 0 now" if fast == "TINYINT" else "0 then, 1 now"):
        job({"TINYINT": "BIGINT", "BIGINT": "TINYINT"}[fast])
    assert lake.rows(kind, "id") == ([(1,)] if fast == "TINYINT" else [(1,), (300,)])
    assert [path.name for path in aside.glob("*")] == (["batch=orders-1a2b"] if fast == "TINYINT" else [])


def test_a_run_that_fails_changes_no_quarantine_that_an_output_needs(lake: Lake, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1, "a": 5}, {"id": 2, "a": "x"}, {"id": "three", "a": 7}))
    files, aside = [Output(str(tmp_path / "files"))], tmp_path / "aside"

    def job(outputs: list[Output], schema: str, **more: Any) -> Any:
        return run(lake.session, str(batch), outputs, schema=schema, quarantine=str(aside), **more)

    def bad() -> list[bytes]:
        return sorted(bytes(row.value) for row in lake.session.read.parquet(str(aside)).collect())

    with pytest.raises(TooManyBadRecords, match=r"they are in .*batch=orders-1a2b, no output was written"):
        job(files, "id STRING, a DATE", max_bad_records=1)
    assert len(bad()) == 3
    assert job(files, "id STRING, a BIGINT")["bad"] == 1  # no output lacked those of the run that failed
    before = bad()
    with pytest.raises(TooManyBadRecords, match=r"batch=orders-1a2b stays, as outputs lack what is there"):
        job(files, "id BIGINT, a STRING", max_bad_records=0)
    assert bad() == before
    table = Output(table="quarantined", format="parquet")
    lake.session.sql("CREATE TABLE quarantined (id STRING, a STRING, batch STRING) USING parquet PARTITIONED BY (batch)")
    with pytest.raises(BatchConflict, match=r"They are not in .*files, to which this run does not write"):
        job([table], "id STRING, a STRING")  # whose write is its commit
    assert lake.session.table("quarantined").isEmpty()
    lake.session.sql("DROP TABLE quarantined")
    with pytest.raises(BatchConflict, match=r"They are not in .*files, to which this run does not write"):
        job([output_of(lake, "iceberg")], "id STRING, a STRING")
    assert not lake.catalog.namespace_exists("shop")  # nor is a table made
    (aside / "batch=orders-1a2b" / "_outputs.json").unlink()
    with pytest.raises(Corrupt, match="it does not say any more which outputs lack the records here"):
        job([Output(str(tmp_path / "other"))], "id STRING, a STRING")
    assert bad() == before


@KINDS
def test_a_job_that_fails_its_checks_appends_nothing(lake: Lake, kind: str, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", [*lines({"id": 1}), b"{"])
    with pytest.raises(TooManyBadRecords):
        run(lake.session, str(batch), [output_of(lake, kind)], quarantine=str(tmp_path / "aside"), max_bad_records=0)
    assert not list(lake.place.rglob("data/qewqew/*/*.parquet"))
    assert not lake.catalog.namespace_exists("shop") if kind == "iceberg" else not Path(lake.name(kind)).exists()
    assert lake.session.read.parquet(str(tmp_path / "aside")).count() == 1
    run(lake.session, str(batch), [output_of(lake, kind)], quarantine=str(tmp_path / "aside"))
    assert lake.rows(kind) == [(1,)]


@KINDS
def test_columns_that_are_left_out_are_told(lake: Lake, kind: str, tmp_path: Path) -> None:
    first, second = (
        make_batch(tmp_path / name, lines(record), batch_id=name)
        for name, record in (("b-1", {"id": 1}), ("b-2", {"id": 2, "more": "x"}))
    )
    for batch, left_out in (first, []), (second, ["more"]):
        result = run(
            lake.session, str(batch), [output_of(lake, kind)], quarantine=str(tmp_path / "aside"), schema_evolution="ignore"
        )
        assert result["outputs"][0]["left_out"] == left_out
    assert lake.rows(kind) == [(1,), (2,)]


@KINDS
def test_a_table_may_lie_anywhere(spark: Any, tmp_path: Path, kind: str) -> None:
    name = "größe a+b,c=d"
    (tmp_path / name).mkdir()
    lake = Lake(spark.newSession(), tmp_path / name)
    if kind == "iceberg":
        lake.settings["warehouse"] = f"{tmp_path}/{name}/warehouse"  # no URL: its letters stand for themselves
        lake.session.conf.set("spark.sql.catalog.lake.warehouse", lake.settings["warehouse"])
    for number in range(2):
        append_once(lake.session.range(number, number + 1), lake.name(kind), f"b-{number}", format=kind)
    assert lake.rows(kind) == [(0,), (1,)]


def test_a_table_is_made_with_its_partitions_and_properties(lake: Lake, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1, "day": "2026-01-31"}, {"id": 2, "day": "2026-02-01"}))
    output = output_of(
        lake,
        "iceberg",
        sql="SELECT id, CAST(day AS DATE) AS day FROM batch",
        partition_by=["month(day)"],
        options={"write.metadata.previous-versions-max": 7},
    )
    run(lake.session, str(batch), [output], quarantine=str(tmp_path / "aside"))
    table = lake.catalog.load_table("shop.orders")
    assert table.properties["write.metadata.previous-versions-max"] == "7"
    assert [str(field.transform) for field in table.spec().fields] == ["month"]
    assert lake.rows("iceberg", "id, day::TEXT") == [(1, "2026-01-31"), (2, "2026-02-01")]


@pytest.mark.soak  # half a minute; test_airflow_with_spark.py shows it with the operator
def test_spark_submit_commits_to_a_catalog_of_its_settings(lake: Lake, tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "b1", lines({"id": 1}))
    settings = [f"--conf=spark.sql.catalog.lake.{name}={value}" for name, value in lake.settings.items()]
    output = json.dumps({"table": "lake.shop.orders", "format": "iceberg"})
    done = subprocess.run(
        [
            *("spark-submit", "--master=local[2]", "--conf=spark.ui.enabled=false", *settings),
            *(str(job.__file__), str(batch), "--output", output, "--quarantine", str(tmp_path / "aside")),
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert lake.rows("iceberg") == [(1,)]


# Streams


def test_a_stream_appends_each_of_its_batches_once(lake: Lake, tmp_path: Path) -> None:
    """It goes on from a checkpoint that a kill has left behind: the last batch is processed again."""
    checkpoint = tmp_path / "checkpoint"
    with Topic(tmp_path / "orders") as topic:
        topic.append_many([b"1", b"2"])

    def append(rows: Any, number: int) -> None:
        for kind in "iceberg", "delta":
            append_once(rows, lake.name(kind), f"orders-{number}", format=kind)

    def stream() -> None:
        reading = lake.session.readStream.format("qewqew").option("startingOffsets", "earliest").load(str(tmp_path / "orders"))
        numbers = reading.selectExpr("CAST(CAST(value AS STRING) AS INT) AS n")
        writing = numbers.writeStream.foreachBatch(append).option("checkpointLocation", str(checkpoint))
        writing.trigger(availableNow=True).start().awaitTermination()

    register(lake.session)
    stream()
    for file in (checkpoint / "commits").glob("*0*"):
        file.unlink()
    stream()
    assert lake.rows("iceberg") == lake.rows("delta") == [(1,), (2,)]
