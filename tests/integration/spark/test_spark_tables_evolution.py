"""Columns of tables that change inside structs, arrays and maps, and that become wider."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from spark_lake import Lake

from qewqew_core import BadArgument
from qewqew_spark.tables import append_once

KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])


class Orders:
    def __init__(self, lake: Lake, kind: str) -> None:
        self.lake = lake
        self.kind = kind
        self.number = 0

    def append(self, schema: str, *rows: tuple[Any, ...], **options: Any) -> None:
        self.number += 1
        made = self.lake.session.createDataFrame(rows, schema)
        append_once(made, self.lake.name(self.kind), f"b{self.number}", format=self.kind, **options)

    def rows(self, columns: str) -> list[tuple[Any, ...]]:
        return self.lake.rows(self.kind, columns)

    def columns(self) -> list[str]:
        with self.lake.database() as database:
            return [*database.execute(f"DESCRIBE SELECT * FROM {self._scan()}").fetchall()]  # noqa: S608

    def _scan(self) -> str:
        if self.kind == "iceberg":
            return f"iceberg_scan('{self.lake.catalog.load_table('shop.orders').metadata_location}')"
        return f"delta_scan('{self.lake.name(self.kind)}')"


@pytest.fixture
def orders(lake: Lake, kind: str) -> Orders:
    return Orders(lake, kind)


@KINDS
def test_fields_of_structs_are_added_and_may_be_missing(orders: Orders) -> None:
    orders.append("id INT, s STRUCT<a: INT>", (1, (10,)), (2, None))
    orders.append("id INT, s STRUCT<b: STRING, A: INT, c: STRUCT<d: DATE, e: INT>>", (3, ("x", 30, (None, 7))), (4, None))
    orders.append("id INT, s STRUCT<c: STRUCT<e: INT>>", (5, ((9,),)), (6, (None,)), (7, None))
    orders.append("id INT", (8,))
    assert orders.rows("id, s.a, s.b, s.c.e, s IS NULL, s.c IS NULL") == [
        (1, 10, None, None, False, True),
        (2, None, None, None, True, True),
        (3, 30, "x", 7, False, False),
        (4, None, None, None, True, True),
        (5, None, None, 9, False, False),
        (6, None, None, None, False, True),
        (7, None, None, None, True, True),
        (8, None, None, None, True, True),
    ]
    assert [each[0] for each in orders.columns()] == ["id", "s"]


@KINDS
def test_fields_in_arrays_and_maps_are_added_and_may_be_missing(orders: Orders) -> None:
    orders.append(
        "id INT, l ARRAY<STRUCT<a: INT>>, m MAP<STRING, STRUCT<a: INT>>", (1, [(1,), None], {"k": (1,)}), (2, None, None)
    )
    more = "id INT, l ARRAY<STRUCT<b: STRING, a: INT>>, m MAP<STRING, STRUCT<a: INT, b: STRING>>"
    orders.append(more, (3, [("x", 2)], {"k": (2, "y"), "n": None}), (4, [], {}))
    orders.append("id INT, l ARRAY<STRUCT<b: STRING>>, m MAP<STRING, STRUCT<b: STRING>>", (5, [("z",)], {"k": ("z",)}))
    assert orders.rows("id, l[1].a, l[1].b, m['k'].a, m['k'].b, len(l)") == [
        (1, 1, None, 1, None, 2),
        (2, None, None, None, None, None),
        (3, 2, "x", 2, "y", 1),
        (4, None, None, None, None, 0),
        (5, None, "z", None, "z", 1),
    ]


@KINDS
def test_policies_hold_inside_structs(orders: Orders) -> None:
    orders.append("id INT, s STRUCT<a: INT>, `s.b` INT", (1, (1,), 1))
    more = "id INT, s STRUCT<a: INT, b: INT>, `s.b` INT"
    with pytest.raises(BadArgument, match=r"schema_evolution is 'fail': 's\.b' is new"):
        orders.append(more, (2, (2, 2), 2), schema_evolution="fail")
    with pytest.raises(BadArgument, match=r"schema_evolution is 'fail': 's\.a' is missing, 's\.b' is new"):
        orders.append("id INT, s STRUCT<b: INT>, `s.b` INT", (2, (2,), 2), schema_evolution="fail")
    orders.append(more, (2, (2, 2), 2), schema_evolution="ignore")
    assert orders.rows('id, s, "s.b"') == [(1, {"a": 1}, 1), (2, {"a": 2}, 2)]
    for wrong in "s STRUCT<a: STRING>", "s INT", "s ARRAY<INT>", "id STRING":
        row = {"STRUCT<a: STRING>": ("x",), "INT": 1, "ARRAY<INT>": [1], "STRING": "x"}[wrong.split(" ", 1)[1]]
        with pytest.raises(BadArgument, match=r"is (int|struct<a:int>) there and .* in this batch"):
            orders.append(wrong, (row,))


@pytest.mark.parametrize("kind", ["iceberg"])
def test_iceberg_makes_types_wider(orders: Orders) -> None:
    narrow = "id SMALLINT, f FLOAT, d DECIMAL(10, 2), s STRUCT<n: INT>, l ARRAY<FLOAT>, m MAP<STRING, INT>"
    wide = "id BIGINT, f DOUBLE, d DECIMAL(20, 2), s STRUCT<n: BIGINT>, l ARRAY<DOUBLE>, m MAP<STRING, BIGINT>"
    orders.append(narrow, (1, 0.5, Decimal("1.25"), (1,), [0.5], {"k": 1}), partition_by=["id"])
    big, amount = 2**40, Decimal("123456789012345678.25")
    orders.append(wide, (big, 1e300, amount, (big,), [1e300], {"k": big}))
    orders.append(narrow, (3, 0.25, Decimal("3.25"), (3,), [0.25], {"k": 3}))
    expected = [
        (1, 0.5, Decimal("1.25"), 1, [0.5], 1),
        (3, 0.25, Decimal("3.25"), 3, [0.25], 3),
        (big, 1e300, amount, big, [1e300], big),
    ]
    assert sorted(orders.rows("id, f, d, s.n, l, m['k']")) == expected
    table = orders.lake.catalog.load_table("shop.orders")
    for id, *_ in expected:
        assert table.scan(f"id == {id}").to_arrow()["s"].to_pylist() == [{"n": id}]
    with pytest.raises(BadArgument, match=r"'d' is decimal\(20,2\) there and decimal\(20,3\) in this batch"):
        orders.append("id INT, d DECIMAL(20, 3)", (4, Decimal("1.125")))
    with pytest.raises(BadArgument, match="'id' is bigint there and double in this batch"):
        orders.append("id DOUBLE", (4.0,))
    orders.append("id INT, s STRUCT<k: INT>", (5, (5,)))
    for policy in "fail", "ignore":
        with pytest.raises(BadArgument, match=r"'s\.k' is int there and bigint in this batch"):
            orders.append("id INT, s STRUCT<k: BIGINT>", (6, (6,)), schema_evolution=policy)


@pytest.mark.parametrize("kind", ["delta"])
def test_delta_holds_narrower_values_and_refuses_wider_ones(orders: Orders) -> None:
    orders.append("id BIGINT, s STRUCT<n: DOUBLE>", (1, (0.5,)))
    orders.append("id INT, s STRUCT<n: FLOAT>", (2, (0.25,)))
    assert orders.rows("id, s.n") == [(1, 0.5), (2, 0.25)]
    orders.append("id INT, k INT, s STRUCT<n: FLOAT>", (3, 3, (0.25,)))
    with pytest.raises(BadArgument, match="'k' is int there and bigint in this batch"):
        orders.append("id INT, k BIGINT", (4, 2**40))
    assert len(orders.rows("id")) == 3


@KINDS
def test_what_is_required_stays_so(orders: Orders) -> None:
    orders.append("id INT, s STRUCT<a: INT>", (1, (1,)))
    if orders.kind == "iceberg":
        with orders.lake.catalog.load_table("shop.orders").update_schema(allow_incompatible_changes=True) as change:
            change.update_column("id", required=True)
            change.update_column("s", doc="what is known")
        orders.append("id INT, s STRUCT<a: INT, b: INT>", (2, (2, 2)))
        table = orders.lake.catalog.load_table("shop.orders")
        assert table.schema().find_field("id").required
        assert table.schema().find_field("s").doc == "what is known"
        assert [field.name for field in table.schema().find_field("s").field_type.fields] == ["a", "b"]  # type: ignore[union-attr]


@KINDS
def test_rows_with_new_fields_replace_others(orders: Orders) -> None:
    orders.append("id INT, s STRUCT<a: INT>", (1, (1,)), (2, (2,)), keys=["id"])
    orders.append("id INT, s STRUCT<a: INT, b: STRING>", (2, (20, "x")), (3, (30, "y")), keys=["id"])
    assert orders.rows("id, s.a, s.b") == [(1, 1, None), (2, 20, "x"), (3, 30, "y")]
