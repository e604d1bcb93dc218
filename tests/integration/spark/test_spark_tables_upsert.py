"""Batches whose rows replace and remove others, by keys: in real tables, read by DuckDB and by the tables' libraries."""

from __future__ import annotations

import json
import signal
import string
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction
from other_driver import OtherDriver, results
from pyarrow import dataset
from pyiceberg.expressions import EqualTo
from pyiceberg.types import LongType, StringType
from spark_batches import make_batch
from spark_lake import Lake

from qewqew_core import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once, append_to

pytestmark = pytest.mark.xdist_group("spark")
KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])
OPERATION = {"column": "op", "delete": ["D", "gone"]}


class Orders:
    """A table `id BIGINT, name STRING, ts INT`, and rows for it."""

    def __init__(self, lake: Lake, kind: str, **options: Any) -> None:
        self.lake, self.kind = lake, kind
        self.options: dict[str, Any] = {"keys": ["id"], "order_by": "ts", **options}
        self.batches = 0

    def put(self, *rows: Any, columns: str = "id BIGINT, name STRING, ts INT", batch: str = "", **options: Any) -> Any:
        self.batches += 1
        frame = self.lake.session.createDataFrame([*rows], columns)
        name = batch or f"orders-{self.batches}"
        return append_once(frame, self.lake.name(self.kind), name, format=self.kind, **{**self.options, **options})

    def change(self, *rows: Any, **options: Any) -> Any:
        return self.put(*rows, columns="id BIGINT, name STRING, ts INT, op STRING", operation=OPERATION, **options)

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        return self.lake.rows(self.kind, columns)

    def where(self, name: str, value: Any) -> int:
        """How many rows the table's library finds by this value, by statistics and partitions too."""
        if self.kind == "iceberg":
            return len(self.lake.catalog.load_table("shop.orders").scan(EqualTo(name, value)).to_arrow())
        return int(DeltaTable(self.lake.name(self.kind)).to_pyarrow_dataset().count_rows(filter=dataset.field(name) == value))


@pytest.mark.quick("a batch replaces and removes rows of Iceberg or Delta by their keys, once")
@KINDS
def test_rows_replace_and_remove_those_with_the_same_key_once(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind)
    orders.put((1, "one", 1), (2, "two", 1), (3, "three", 1))
    done = orders.change((2, "zwei", 2, "U"), (3, None, 2, "D"), (4, "four", 2, None), (9, None, 2, "gone"))
    assert not done.again
    expected = [(1, "one", 1), (2, "zwei", 2), (4, "four", 2)]
    assert orders.rows() == expected
    assert [orders.where("id", number) for number in range(1, 5)] == [1, 1, 0, 1]
    assert [orders.where("name", name) for name in ("two", "zwei", "three")] == [0, 1, 0]
    orders.batches = 1
    again = orders.change((1, None, 9, "D"))
    assert (again.again, again.snapshot) == (True, done.snapshot)
    assert orders.rows() == expected
    orders.change((1, None, 3, "D"), (2, None, 3, "D"), (4, None, 3, "D"))
    assert orders.rows() == []


@KINDS
def test_of_one_key_the_greatest_order_stays_in_the_batch_and_in_the_table(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind)
    orders.put((1, "b", 5), (1, "a", 4), (2, "x", None), (2, "y", 1), (3, "same", 7), (3, "same", 7))
    assert orders.rows() == [(1, "b", 5), (2, "y", 1), (3, "same", 7)]
    # A batch that comes late does not touch newer rows; one of equal order does, and null is the oldest.
    orders.change((1, "late", 4, "U"), (2, None, None, "D"), (3, "as new", 7, "U"), (4, "new", 0, "U"))
    assert orders.rows() == [(1, "b", 5), (2, "y", 1), (3, "as new", 7), (4, "new", 0)]
    orders.change((1, "x", 6, "U"), (1, None, 6, "D"), (4, None, 9, "D"), (4, "back", 10, "U"))
    assert orders.rows() == [(2, "y", 1), (3, "as new", 7), (4, "back", 10)]
    orders.put((2, "all late", 0), (3, "all late", 0))
    assert orders.rows() == [(2, "y", 1), (3, "as new", 7), (4, "back", 10)]


@KINDS
def test_without_an_order_the_batch_wins_and_may_not_contradict_itself(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind, order_by=None)
    orders.put((1, "a", 5), (1, "a", 5))
    orders.put((1, "b", 1))
    assert orders.rows() == [(1, "b", 1)]
    with pytest.raises(BadArgument, match=r'different rows of the batch have the same keys, \{"id":1\}, and no order_by'):
        orders.put((1, "c", 1), (1, "d", 1))
    with pytest.raises(BadArgument, match="the column id: null, and it is one of the keys"):
        orders.put((1, "c", 1), (None, "d", 1))
    assert orders.rows() == [(1, "b", 1)]


@KINDS
def test_several_batches_in_one_commit_have_one_last_row_of_a_key(lake: Lake, kind: str) -> None:
    made = {"b-1": (1, "new", 5), "b-2": (1, "old", 4), "b-3": (2, "two", 1)}

    def put(*ids: str) -> None:
        append = append_to(lake.session, lake.name(kind), ids, kind, keys=["id"], order_by="ts")
        append.write(lake.session.createDataFrame([made[each] for each in ids], "id BIGINT, name STRING, ts INT"))
        assert append.commit().batches == ids
        assert [*append_to(lake.session, lake.name(kind), ids, kind).committed()] == [*ids]

    put("b-1", "b-2")
    assert lake.rows(kind) == [(1, "new", 5)]
    put("b-3")
    assert lake.rows(kind) == [(1, "new", 5), (2, "two", 1)]


TYPES = {
    "STRING": ["", "x" * 100, "\U0010ffff"],
    "DECIMAL(20, 2)": [Decimal("0.00"), Decimal("-1.50"), Decimal("999999999999999999.99")],
    "DATE": [date(1, 1, 1), date(2026, 2, 28), date(9999, 12, 31)],
    "TIMESTAMP": [datetime(2026, 1, 1, 0, 0, 0, at, UTC) for at in (0, 1, 999)],
    "BINARY": [b"", b"\x00", b"\xff" * 100],
    "BOOLEAN": [True, False, True],
    "TINYINT": [-128, 0, 127],
}


@KINDS
def test_keys_may_be_of_many_types(lake: Lake, kind: str) -> None:
    columns = ", ".join(f"k{at} {type_}" for at, type_ in enumerate(TYPES))
    rows = [tuple(values[at] for values in TYPES.values()) for at in range(3)]

    def put(batch: str, word: str, keys: list[Any]) -> None:
        frame = lake.session.createDataFrame([(*key, word) for key in keys], f"{columns}, v STRING")
        append_once(frame, lake.name(kind), batch, format=kind, keys=[f"K{at}" for at in range(len(TYPES))])

    put("1", "old", rows)
    put("2", "new", [rows[0], (*rows[1][:-1], 1), rows[2]])  # one that differs in its last column
    assert lake.rows(kind, "k6, v") == [(-128, "new"), (0, "old"), (1, "new"), (127, "new")]


@KINDS
def test_keys_may_be_partitions_and_partitions_may_change(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind, partition_by=["shop"], columns="")
    columns = "id BIGINT, shop STRING, ts INT"
    del orders.options["columns"]
    orders.put((1, "a/b é", 1), (2, "us", 1), (3, None, 1), (4, "us", 1), columns=columns)
    orders.put((1, "us", 2), (3, "eu", 2), columns=columns)  # rows move to another partition
    assert orders.rows("id, shop, ts") == [(1, "us", 2), (2, "us", 1), (3, "eu", 2), (4, "us", 1)]
    assert [orders.where("shop", shop) for shop in ("us", "eu", "a/b é")] == [3, 1, 0]
    orders.put((2, "us", 3), (4, "eu", 3), columns=columns, keys=["SHOP", "ID"])
    assert orders.rows("id, shop, ts") == [(1, "us", 2), (2, "us", 3), (3, "eu", 2), (4, "eu", 3), (4, "us", 1)]


@KINDS
def test_new_columns_come_with_the_rows_that_have_them(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind)
    orders.put((1, "one"), (2, "two"), columns="id INT, name STRING", order_by=None)
    orders.put((2, "zwei", 1, 0.5), columns="id INT, name STRING, ts INT, more DOUBLE")
    orders.put((3, 1), columns="id INT, ts INT")
    assert orders.rows("id, name, ts, more") == [(1, "one", None, None), (2, "zwei", 1, 0.5), (3, None, 1, None)]


@KINDS
@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("id BIGINT, ts INT", {"keys": ["nr"]}, "the batch has no column 'nr'"),
        ("id BIGINT, nr INT, ts INT", {"keys": ["id", "nr"]}, "has no column 'nr', which is one of the keys"),
        ("id BIGINT, name STRING", {}, "the batch has no column 'ts'"),
        ("id BIGINT, ts INT", {"operation": OPERATION}, "the batch has no column 'op'"),
        ("id BIGINT, ts INT", {"order_by": "ID"}, "must be different columns"),
        ("id BIGINT, ts DOUBLE", {}, "the column 'ts' is double, which keys and order_by cannot be"),
        ("id FLOAT, ts INT", {}, "the column 'id' is float"),
        ("id BIGINT, ts INT", {"commit": "spark"}, "commit 'spark' only appends"),
        ("id BIGINT, ts INT", {"keys": "id"}, "keys must be a list"),
        ("id BIGINT, ts INT", {"keys": []}, "keys must be a list"),
        ("id BIGINT, ts INT", {"operation": {"column": "op"}}, "operation must be like"),
        ("id BIGINT, at INT", {"order_by": "at", "schema_evolution": "ignore"}, "to keep order_by in"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    lake: Lake, kind: str, columns: str, options: dict[str, Any], message: str
) -> None:
    orders = Orders(lake, kind)
    orders.put((1, "one", 1))
    files = {*lake.place.rglob("*")}
    with pytest.raises(BadArgument, match=message):
        orders.put(columns=columns, **options)
    assert {*lake.place.rglob("*")} == files


@KINDS
def test_an_owner_may_change_rows_files_and_columns(lake: Lake, kind: str) -> None:
    """Compacted files, duplicates of a key, null keys, missing columns, other writers' files."""
    orders = Orders(lake, kind)
    orders.put((1, "one", 1), (2, "two", 1))
    owner = pa.table({"id": pa.array([2, 2, None, 5], pa.int64()), "name": ["dup", "newer", "null", "five"]})
    owner = owner.append_column("ts", pa.array([0, 9, 1, None], pa.int32()))
    if kind == "iceberg":
        lake.catalog.load_table("shop.orders").append(owner)
    else:
        write_deltalake(lake.name(kind), owner, mode="append")
    orders.change((2, "zwei", 5, "U"), (5, None, 1, "D"))
    assert orders.rows() == [(1, "one", 1), (2, "newer", 9), (None, "null", 1)]
    if kind == "iceberg":  # as compaction does: other files, the same rows
        loaded = lake.catalog.load_table("shop.orders")
        loaded.overwrite(loaded.scan().to_arrow())
    else:
        DeltaTable(lake.name(kind)).optimize.compact()
    orders.put((2, "zehn", 10))
    assert orders.rows() == [(1, "one", 1), (2, "zehn", 10), (None, "null", 1)]


@KINDS
def test_of_eight_drivers_each_is_in_and_the_newest_stays(lake: Lake, kind: str, drivers: list[OtherDriver]) -> None:
    Orders(lake, kind).put((0, "zero", 0), (8, "eight", 0))
    for number, driver in enumerate(drivers):
        driver.upsert(lake, kind, f"b-{number}", [(0, f"from {number}", number), (number, "own", 1)])
    assert not any(commit["again"] for commit in results(drivers))
    expected = [(0, "from 7", 7), *((number, "own", 1) for number in range(1, 8)), (8, "eight", 0)]
    assert lake.rows(kind) == sorted(expected, key=repr)


@KINDS
def test_of_eight_drivers_with_one_batch_one_is_in_the_table(lake: Lake, kind: str, drivers: list[OtherDriver]) -> None:
    Orders(lake, kind).put((1, "one", 1))
    for number, driver in enumerate(drivers):
        driver.upsert(lake, kind, "b", [(1, f"from {number}", 1), (2, "two", 2)])
    done = results(drivers)
    assert sorted(commit["again"] for commit in done) == [False] + [True] * 7
    (_, name, _), other = lake.rows(kind)
    assert name.startswith("from ")
    assert other == (2, "two", 2)


@KINDS
def test_a_driver_that_is_killed_leaves_nothing_or_all(lake: Lake, drivers: list[OtherDriver], kind: str) -> None:
    """And what comes after it is not undone when it is tried again."""
    orders = Orders(lake, kind)
    points = ["staged", "copied", "before", "after"]
    orders.put(*((at, "old", 0) for at in range(4)), (9, "old", 0))
    for at, point in enumerate(points):
        driver = drivers.pop()
        driver.upsert(lake, kind, point, [(at, point, 1)], die=point)
        assert driver.result() is None
        assert driver.end() == -signal.SIGKILL
    assert orders.rows() == [(0, "old", 0), (1, "old", 0), (2, "old", 0), (3, "after", 1), (9, "old", 0)]
    orders.change((3, "newer", 2, "U"), (2, "newer", 2, "U"))
    for tried in False, True:
        for at, point in enumerate(points):
            assert orders.put((at, point, 1), batch=point).again == (tried or point == "after"), point
    assert orders.rows() == [(0, "staged", 1), (1, "copied", 1), (2, "newer", 2), (3, "newer", 2), (9, "old", 0)]


@KINDS
def test_the_job_upserts_and_null_keys_are_bad_records(lake: Lake, kind: str) -> None:
    def do(batch: str, *records: Any, **fields: Any) -> Any:
        made = make_batch(lake.place / batch, [json.dumps(record).encode() for record in records], batch_id=batch)
        place = {"table" if kind == "iceberg" else "path": lake.name(kind)}
        output = Output(format=kind, keys=["id"], order_by="ts", operation=OPERATION, **place, **fields)
        schema = "id BIGINT, name STRING, ts INT, op STRING"
        return run(lake.session, str(made), [output], schema=schema, quarantine=str(lake.place / "bad"))

    do("b-1", {"id": 1, "name": "one", "ts": 1}, {"id": 2, "name": "two", "ts": 1, "op": "I"})
    found = do("b-2", {"id": 1, "op": "D", "ts": 2}, {"name": "no key", "ts": 3}, {"id": 2, "name": "zwei", "ts": 2})
    assert (found["good"], found["bad"]) == (2, 1)
    (bad,) = lake.session.read.parquet(f"{lake.place}/bad/batch=b-2").collect()
    assert bad.reason.endswith(
        f"id: null, and {lake.name(kind) if kind == 'delta' else 'table ' + lake.name(kind)} requires a value"
    )
    assert lake.rows(kind) == [(2, "zwei", 2)]
    do("b-3", {"id": 2, "name": "x", "ts": 3, "op": "U"}, sql="SELECT id, upper(name) AS name, ts, op FROM batch")
    do("b-3", {"id": 2, "name": "again", "ts": 9})  # it is there
    assert lake.rows(kind) == [(2, "X", 3)]


def data_files(lake: Lake, kind: str) -> set[str]:
    if kind == "iceberg":
        return {task.file.file_path for task in lake.catalog.load_table("shop.orders").scan().plan_files()}
    return {*DeltaTable(lake.name(kind)).file_uris()}


@KINDS
def test_files_without_keys_of_the_batch_stay_and_others_keep_the_rest(lake: Lake, kind: str) -> None:
    orders = Orders(lake, kind)
    for start in 0, 1000, 2000:
        frame = lake.session.range(start, start + 1000, 1, 1).selectExpr("id", "CAST(id % 7 AS STRING) AS name", "1 AS ts")
        append_once(frame, lake.name(kind), f"b-{start}", format=kind, **orders.options)
    before = data_files(lake, kind)
    orders.put((1500, "new", 2), (1501, None, 2))
    assert len(before & data_files(lake, kind)) == 2
    assert len(data_files(lake, kind)) == 4
    orders.put((1502, "all of these are in a file or in none", 2), *((number, "x", 2) for number in range(5000, 5200)))
    assert len(before & data_files(lake, kind)) == 2  # bounds do not tell that the third has none, its keys do
    assert [orders.where("id", number) for number in (1499, 1500, 2999, 5100)] == [1, 1, 1, 1]
    assert orders.where("name", "3") == len([number for number in range(3000) if number % 7 == 3 and number not in (1501, 1502)])
    rows = dict(row[:2] for row in orders.rows())
    assert len(rows) == 3200
    assert all(rows[number] == str(number % 7) for number in range(3000) if number not in (1500, 1501, 1502))
    assert (rows[1500], rows[1501]) == ("new", None)


def test_an_owner_of_an_iceberg_table_may_rename_and_widen_columns(lake: Lake) -> None:
    """Files keep their ids, and those with lists and maps their names; partitions are those of the files."""
    old = "SELECT CAST({0} AS INT) AS id, NAMED_STRUCT('x', {0}) AS s, 'old' AS v, 1 AS ts"
    parts = ["bucket(2, id)"]
    for numbers in (1, 2), (3, 4):
        rows = lake.session.sql(" UNION ALL ".join(map(old.format, numbers)))
        append_once(rows, "lake.shop.orders", f"b-{numbers}", partition_by=parts)
    with lake.catalog.load_table("shop.orders").update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("id", "nr").rename_column("s.x", "y").delete_column("v")
    with lake.catalog.load_table("shop.orders").update_schema() as update:
        update.add_column("v", StringType()).update_column("nr", LongType())
    new = "SELECT {0}L AS nr, NAMED_STRUCT('y', {0}0) AS s, 'new' AS v, {1} AS ts, ARRAY({0}, NULL) AS l, MAP('k', {0}) AS m"
    for batch, (numbers, ts) in {"b-5": ((1, 3, 5), 2), "b-6": ((5, 6), 3)}.items():
        rows = lake.session.sql(" UNION ALL ".join(new.format(number, ts) for number in numbers))
        append_once(rows, "lake.shop.orders", batch, keys=["nr"], order_by="ts")
    expected = [
        *((nr, {"y": nr * 10}, "new", ts, [nr, None], {"k": nr}) for nr, ts in ((1, 2), (3, 2), (5, 3), (6, 3))),
        *((nr, {"y": nr}, None, 1, None, None) for nr in (2, 4)),
    ]
    assert lake.rows("iceberg", "nr, s, v, ts, l, m") == sorted(expected, key=repr)
    table = lake.catalog.load_table("shop.orders")
    found = [(*row.values(),) for row in table.scan().to_arrow().select(["nr", "s", "v", "ts", "l"]).to_pylist()]
    assert sorted(found, key=repr) == sorted([row[:5] for row in expected], key=repr)
    assert all(len(table.scan(EqualTo("nr", nr)).to_arrow()) == 1 for nr in range(1, 7))


def test_an_iceberg_table_that_cannot_be_merged_says_why(lake: Lake) -> None:
    orders = Orders(lake, "iceberg")
    orders.put((1, "one", 1), (2, "two", 1))
    with lake.catalog.load_table("shop.orders").update_spec() as spec:
        spec.add_identity("name")
    orders.put((3, "three", 1))
    with pytest.raises(BadArgument, match="in a file of earlier partitions; run rewrite_data_files"):
        orders.put((1, "x", 2))
    orders.put((1, "one", 2), (2, "two", 2), (3, "drei", 2))  # none of the rows of that file stays
    assert orders.rows() == [(1, "one", 2), (2, "two", 2), (3, "drei", 2)]


def test_a_delta_table_of_another_writer(lake: Lake) -> None:
    """With INT96, as Spark writes times by default, dots and percents in names, and what its writers must do."""
    place = lake.name("delta")
    lake.session.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    times = "TIMESTAMP'1600-01-01 00:00:00.000001 UTC' AS t, TIMESTAMP'9999-12-31 23:59:59.999999 UTC' AS last"
    lake.session.sql(f"SELECT id, {times}, 'a' AS `x.y` FROM RANGE(3)").coalesce(1).write.parquet(place)  # noqa: S608
    lake.session.conf.unset("spark.sql.parquet.outputTimestampType")
    (file,) = Path(place).glob("*.parquet")
    columns = {"id": "long", "t": "timestamp", "last": "timestamp", "x.y": "string"}
    DeltaTable.create(place, Schema([Field(name, PrimitiveType(kind)) for name, kind in columns.items()]))
    added = AddAction(file.name, file.stat().st_size, {}, 0, True, '{"numRecords": 3}')
    DeltaTable(place).create_write_transaction([added], "append", DeltaTable(place).schema())
    moved = lake.session.sql("SELECT id, TIMESTAMP'2026-01-01 00:00:00 UTC' AS t, 'b' AS `x.y` FROM RANGE(1, 2)")
    append_once(moved, place, "b-1", format="delta", keys=["id"])
    shown = "id, (t AT TIME ZONE 'UTC')::TEXT, (last AT TIME ZONE 'UTC')::TEXT, \"x.y\""
    old = "1600-01-01 00:00:00.000001", "9999-12-31 23:59:59.999999", "a"
    assert lake.rows("delta", shown) == [(0, *old), (1, "2026-01-01 00:00:00", None, "b"), (2, *old)]
    for name in "delta.enableChangeDataFeed", "delta.appendOnly":
        DeltaTable(place).alter.set_table_properties({name: "true"})
        with pytest.raises(BadArgument, match=f"asks its writers for {name}"):
            append_once(moved, place, "b-2", format="delta", keys=["id"])
        DeltaTable(place).alter.set_table_properties({name: "false"})
    append_once(moved, place, "b-2", format="delta", keys=["id", "t"])
    assert len(lake.rows("delta")) == 3


def test_a_delta_file_with_a_deletion_vector_is_left_alone_or_refused(lake: Lake) -> None:
    place = lake.name("delta")
    orders = Orders(lake, "delta")
    orders.put((1, "one", 1), (2, "two", 1))
    (file,) = pa.table(DeltaTable(place).get_add_actions()).to_pylist()
    numbers = struct.pack("<iqiiiHHIH", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 1) + b"\0" * 2  # a bitmap of the row 1
    digits = string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
    words = [word for (word,) in struct.iter_unpack(">I", numbers)]
    text = "".join(digits[word // 85**power % 85] for word in words for power in range(4, -1, -1))
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(numbers), "cardinality": 1}
    entry = {"path": file["path"], "partitionValues": {}, "size": file["size_bytes"], "dataChange": True}
    needs = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **needs}}
    actions = (
        protocol,
        {"remove": {**entry, "deletionTimestamp": 1}},
        {"add": {**entry, "modificationTime": 1, "stats": '{"numRecords": 2}', "deletionVector": vector}},
    )
    log = Path(place, "_delta_log", f"{DeltaTable(place).version() + 1:020}.json")
    log.write_text("\n".join(json.dumps({"commitInfo": {}} | action) for action in actions))
    (row,) = orders.rows()
    with pytest.raises(BadArgument, match="deletion vector"):
        orders.put((1, "x", 2), (2, "x", 2))
    assert orders.rows() == [row]
