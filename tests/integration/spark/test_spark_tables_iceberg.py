"""What Iceberg tables say of their files, read back by DuckDB and PyIceberg with filters: partitions, field ids, costs."""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import And, EqualTo, IsNaN, IsNull
from pyiceberg.io.pyarrow import PyArrowFile
from pyiceberg.types import LongType, TimeType
from spark_batches import make_batch
from spark_lake import Lake

from qewqew_core import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once, append_to
from qewqew_spark.tables.append import TooManyConflicts

pytestmark = pytest.mark.xdist_group("spark")
NAN = float("nan")
COLUMNS = "id BIGINT, `a.b` STRING, x DOUBLE, d DECIMAL(10, 2), big DECIMAL(38, 4), b BINARY, n INT, day DATE, at TIMESTAMP_NTZ"
ROWS: list[tuple[Any, ...]] = [
    (
        0,
        "eu",
        1.5,
        Decimal("10.65"),
        Decimal("9" * 34 + ".0000"),
        b"abc",
        1,
        date(2026, 1, 31),
        datetime(2026, 1, 31, 23, 59, 59, 999999),
    ),
    (1, "", NAN, Decimal("-0.01"), Decimal("-0.0001"), b"", -1, date(1969, 12, 31), datetime(1969, 12, 31, 23)),
    (2, None, None, None, None, None, None, None, None),
    (
        3,
        "q" * 5000,
        float("-inf"),
        Decimal("0.00"),
        Decimal("0.0000"),
        b"\xff" * 5000,
        0,
        date(1, 1, 1),
        datetime(2, 3, 29, 2, 30),
    ),
    (
        4,
        "../ %2F\n=",
        0.5,
        Decimal("99999999.99"),
        Decimal("1.5000"),
        b"\x00",
        8 - 2**31,
        date(9999, 12, 31),
        datetime(2026, 3, 29, 2, 30),
    ),
]
NAMES = [column.split()[0].strip("`") for column in COLUMNS.replace("(10, 2)", "").replace("(38, 4)", "").split(",")]
IDENTITY = [name for name in NAMES if name != "id"]
TRANSFORMS = [
    *("truncate(3, a.b)", "truncate(50, d)", "truncate(7, big)", "truncate(2, b)", "truncate(10, n)", "month(day)", "hour(at)"),
    *("bucket(4, a.b)", "bucket(5, d)", "bucket(6, b)", "bucket(7, n)", "bucket(8, day)", "bucket(9, at)"),
]


@pytest.mark.parametrize("parts", [IDENTITY, TRANSFORMS], ids=["identity", "transforms"])
def test_a_filter_on_any_value_finds_its_rows(lake: Lake, parts: list[str]) -> None:
    lake.session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")  # 02:30 does not exist there on 2026-03-29
    lake.session.conf.set("spark.sql.parquet.writeLegacyFormat", "true")
    rows = lake.session.createDataFrame(ROWS, COLUMNS).coalesce(1)
    append_once(rows, "lake.shop.orders", "b", partition_by=parts, properties={"write.metadata.metrics.default": "none"})
    table = lake.catalog.load_table("shop.orders")
    assert table.inspect.files().num_rows == len(ROWS)
    for row in ROWS:
        for name, value in zip(NAMES, row, strict=True):
            if "." not in name:  # which PyIceberg takes for a field of a struct
                same = IsNull(name) if value is None else IsNaN(name) if value != value else EqualTo(name, literal(value))
                assert table.scan(same, ("id",)).to_arrow()["id"].to_pylist() == [row[0]], (name, value)
            with lake.database() as database:
                found = database.execute(
                    f"SELECT id FROM iceberg_scan('{table.metadata_location}') WHERE \"{name}\" IS NOT DISTINCT FROM ?",  # noqa: S608
                    [value],
                ).fetchall()
            assert found == [(row[0],)], (name, value)


def test_partitions_of_double_keep_their_values_when_later_commits_write_them_again(lake: Lake) -> None:
    """PyIceberg's decoder, see tables/iceberg.py."""
    values = [0.1, 0.3, 1.7976931348623157e308, 5e-324, -1.5]
    rows = lake.session.createDataFrame(list(enumerate(values)), "id BIGINT, c DOUBLE").coalesce(1)
    often = {"commit.manifest.min-count-to-merge": "2", "commit.manifest-merge.enabled": "true"}
    append_once(rows, "lake.shop.orders", "b0", partition_by=["c"], properties=often)
    for number in range(3):  # the manifests are merged
        append_once(lake.session.sql(f"SELECT {9 + number}L AS id, 2d AS c"), "lake.shop.orders", f"b{1 + number}")
    append_once(lake.session.sql("SELECT 0L AS id, 7d AS c"), "lake.shop.orders", "b9", keys=["id"])  # a file is replaced
    place = lake.catalog.load_table("shop.orders").metadata_location
    for id, value in [*enumerate([7.0, *values[1:]]), (9, 2.0)]:
        with lake.database() as database:
            found = database.execute(f"SELECT min(id) FROM iceberg_scan('{place}') WHERE c = ?", [value]).fetchall()  # noqa: S608
        assert found == [(id,)], value


def test_partitions_that_python_computes_beside_another_output(lake: Lake, tmp_path: Path) -> None:
    """Where Spark 4.2.0 hangs if the function takes Arrow's arrays, since the rows are persisted."""
    batch = make_batch(tmp_path / "b", [b'{"id":%d,"d":%d.5}' % (number, number) for number in range(20)])
    parts = ["bucket(4, id)", "truncate(50, d)"]
    outputs = [Output(table="lake.shop.orders", format="iceberg", partition_by=parts), Output(str(tmp_path / "out"))]
    result = run(lake.session, str(batch), outputs, schema="id LONG, d DECIMAL(10, 2)")
    assert [output["written"] for output in result["outputs"]] == [20, 20]
    assert sorted(lake.rows("iceberg", "id")) == [(number,) for number in range(20)]


def test_names_of_partitions_can_be_read_by_others_whatever_the_columns_are_called(lake: Lake) -> None:
    rows = lake.session.sql("SELECT 1L AS id, 'a' AS `é`, 2 AS `größe`, 3 AS `年`, 'b' AS `a b`")
    parts = ["é", "truncate(2, größe)", "年", "bucket(4, é)", "a b"]
    append_once(rows, "lake.shop.orders", "b", partition_by=parts)
    append_once(rows, "lake.shop.orders", "b2")
    assert lake.rows("iceberg", 'id, "é", "größe", "年", "a b"') == [(1, "a", 2, 3, "b")] * 2
    names = [field.name for field in lake.catalog.load_table("shop.orders").spec().fields]
    assert len({*names}) == 5
    assert all(map(str.isascii, names)), names


def literal(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


def test_a_file_has_rows_of_one_partition_however_many_rows(lake: Lake) -> None:
    parts = ["truncate(7, n)", "bucket(3, text)", "day(at)"]
    rows = lake.session.range(0, 300, 1, 2).selectExpr(
        "id - 50 AS n", "CAST(id % 9 AS STRING) AS text", "TIMESTAMP_SECONDS(8e9 + id * 7200) AS at"
    )
    append_once(rows, "lake.shop.orders", "b", partition_by=parts)
    table = lake.catalog.load_table("shop.orders")
    schema, seen = table.schema(), 0
    for task in table.scan().plan_files():
        for row in pq.read_table(task.file.file_path.removeprefix("file://"), partitioning=None).to_pylist():
            seen += 1
            for number, field in enumerate(table.spec().fields):
                value = row[schema.find_field(field.source_id).name]
                value = round(value.timestamp()) * 1_000_000 if isinstance(value, datetime) else value
                kind = schema.find_type(field.source_id)
                assert field.transform.transform(kind)(value) == task.file.partition[number]
    assert seen == 300


def test_rows_keep_their_values_when_an_owner_renames_drops_and_adds_columns(lake: Lake) -> None:
    batch = "SELECT {0}L AS id, {0}L AS x, {0}L AS `a.b`, NAMED_STRUCT('x', {0}L, 'y', {0}L) AS s"
    append_once(lake.session.sql(batch.format(1)), "lake.shop.orders", "b-1")
    with lake.catalog.load_table("shop.orders").update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("x", "y").rename_column("s.x", "z").delete_column("a.b")
    with lake.catalog.load_table("shop.orders").update_schema() as update:
        update.add_column("x", LongType()).add_column(("s", "x"), LongType())
    append_once(
        lake.session.sql("SELECT 2L AS id, 20L AS x, 21L AS y, 22L AS `a.b`, NAMED_STRUCT('z', 1L, 'y', 2L, 'x', 3L) AS s"),
        "lake.shop.orders",
        "b-2",
    )
    expected = [
        {"id": 1, "y": 1, "s": {"z": 1, "y": 1, "x": None}, "x": None, "a.b": None},
        {"id": 2, "y": 21, "s": {"z": 1, "y": 2, "x": 3}, "x": 20, "a.b": 22},
    ]
    table = lake.catalog.load_table("shop.orders")
    assert "schema.name-mapping.default" not in table.properties
    assert sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["id"]) == expected
    names = list(expected[0])
    found = lake.rows("iceberg", ", ".join(f'"{name}"' for name in names))
    assert [dict(zip(names, row, strict=True)) for row in found] == expected
    assert table.scan(row_filter=And(EqualTo("y", 1), IsNull("x"))).to_arrow().num_rows == 1


def test_files_with_lists_go_by_names(lake: Lake) -> None:
    append_once(lake.session.sql("SELECT 1L AS id"), "lake.shop.orders", "b-1")
    append_once(
        lake.session.sql("SELECT 2L AS id, ARRAY(1, NULL) AS l, MAP('k', NAMED_STRUCT('x', 1)) AS m"), "lake.shop.orders", "b-2"
    )
    with lake.catalog.load_table("shop.orders").update_schema() as update:
        update.rename_column("l", "list")
    append_once(lake.session.sql("SELECT 3L AS id, ARRAY(3) AS list"), "lake.shop.orders", "b-3")
    expected = [(1, None, None), (2, [1, None], {"k": {"x": 1}}), (3, [3], None)]
    assert lake.rows("iceberg", "id, list, m") == expected
    read = lake.catalog.load_table("shop.orders").scan().to_arrow().to_pylist()
    assert sorted((row["id"], row["list"], row["m"] and dict(row["m"])) for row in read) == expected


def test_what_cannot_be_written_is_refused_before_it_is(lake: Lake) -> None:
    append_once(lake.session.range(0), "lake.shop.orders", "b-1")
    with lake.catalog.load_table("shop.orders").update_schema() as update:
        update.add_column("t", TimeType())
    table = lake.catalog.load_table("shop.orders")
    with pytest.raises(BadArgument):
        append_once(lake.session.sql("SELECT 1L AS id, '12:00:00' AS t"), "lake.shop.orders", "b-2")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("t")
    with table.transaction() as transaction:
        transaction.set_properties({"write.metadata.metrics.default": "some"})
    with pytest.raises(BadArgument, match=r"write\.metadata\.metrics"):
        append_once(lake.session.range(1), "lake.shop.orders", "b-2")
    assert not list(lake.place.rglob("b-2*/*.parquet"))


def test_files_for_partitions_of_before_are_not_added(lake: Lake) -> None:
    append_once(lake.session.range(1), "lake.shop.orders", "b-1")
    append = append_to(lake.session, "lake.shop.orders", "b-2")
    append.write(lake.session.range(1, 9))
    with lake.catalog.load_table("shop.orders").update_spec() as spec:
        spec.add_field("id", "bucket[4]")
    with pytest.raises(TooManyConflicts, match="can make the same call again"):
        append.commit()
    append_once(lake.session.range(1, 9), "lake.shop.orders", "b-2")
    assert lake.rows("iceberg") == [(number,) for number in range(9)]


def test_a_commit_to_a_branch_is_seen_when_it_is_published(lake: Lake) -> None:
    def write(batch: str, *rows: tuple[int, str], **options: Any) -> Any:
        return append_once(lake.session.createDataFrame(rows, "id INT, n STRING"), "lake.shop.orders", batch, **options)

    def ids(**of: str) -> list[tuple[Any, ...]]:
        scan = lake.catalog.load_table("shop.orders").scan()
        table = (scan.use_ref(of["branch"]) if of else scan).to_arrow()
        return sorted(zip(table["id"].to_pylist(), table["n"].to_pylist(), strict=True))

    audit = {"branch": "audit"}
    with pytest.raises(BadArgument, match="does not exist; create the branch 'audit' first"):
        write("b1", (1, "a"), (2, "a"), **audit)
    write("b1", (1, "a"), (2, "a"))
    with pytest.raises(BadArgument, match="has the branches main; create the branch 'audit' first"):
        write("b2", (3, "a"), **audit)
    table = lake.catalog.load_table("shop.orders")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    with table.manage_snapshots() as change:
        change.create_branch(snapshot.snapshot_id, "audit").create_tag(snapshot.snapshot_id, "a-tag")
    with pytest.raises(BadArgument, match="has the branches audit, main; create the branch 'a-tag' first"):
        write("b2", (3, "a"), branch="a-tag")
    for again in False, True:
        assert write("b2", (3, "a"), **audit).again == again
    write("b3", (1, "b"), **audit, keys=["id"])  # of the branch's rows
    write("b4", (4, "a"), **audit, keys=["id"])
    assert lake.rows("iceberg") == ids() == [(1, "a"), (2, "a")]
    assert ids(**audit) == [(1, "b"), (2, "a"), (3, "a"), (4, "a")]
    with lake.catalog.load_table("shop.orders").manage_snapshots() as change:
        change.set_current_snapshot(ref_name="audit")
    assert lake.rows("iceberg") == ids() == ids(**audit)
    assert write("b2", (3, "a")).again
    for options in {"format": "delta"}, {"commit": "spark"}:
        with pytest.raises(BadArgument, match="'branch' is for Iceberg, where the driver commits"):
            write("b5", (5, "a"), **audit, **options)


def test_a_commit_opens_as_many_files_whatever_the_table_has(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    opening = PyArrowFile.open

    def counting(self: PyArrowFile, *options: Any, **named: Any) -> Any:
        name = self.location.rpartition("/")[2]
        opened["data" if name.endswith("parquet") else "list" if name.startswith("snap-") else name.rpartition(".")[2]] += 1
        return opening(self, *options, **named)

    append_once(lake.session.range(1), "lake.shop.orders", "b")
    table = lake.catalog.load_table("shop.orders")
    assert {name: value for name, value in table.properties.items() if name.startswith(("commit.", "write.metadata."))} == {
        "commit.manifest-merge.enabled": "true",
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "100",
    }
    costs = []
    for number in 1, 12:
        for _ in range(number):
            table.append(table.schema().as_arrow().empty_table().slice(0, 0))
            table.append(lake.session.range(1).toArrow())
        append = append_to(lake.session, "lake.shop.orders", f"b-{number}")
        append.write(lake.session.range(1).coalesce(1))
        monkeypatch.setattr(PyArrowFile, "open", counting)
        opened.clear()
        append.commit()
        monkeypatch.undo()
        costs.append(dict(opened))
    assert costs[0] == costs[1]
    assert costs[0]["data"] == 1
    assert "avro" not in costs[0]  # no manifest
