"""A batch as a table of Arrow: what Arrow reads from the records, each a row, or an error with its number."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from qewqew_core import BadArgument, BadRecord, Queue, Topic

ORDERS = pa.schema(
    [
        ("id", pa.int64()),
        ("amount", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("who", pa.struct([("name", pa.string())])),
        ("tags", pa.list_(pa.string())),
    ]
)


def test_records_are_rows_with_the_columns_of_the_schema(tmp_path: Path) -> None:
    records = [
        b'{"id": 7, "amount": "1.50", "at": "2026-11-28T10:00:00Z", "day": "2026-11-28", "who": {"name": "\xc3\xbc", "x": 1}}',
        b' {\n"tags": ["a", null], "colour": "red"}\n',
        b"{}",
    ]
    with Queue(tmp_path / "q") as queue:
        queue.put_many(records)
        batch = queue.lease("run")
        assert batch is not None
        orders = batch.to_arrow(ORDERS)
    assert orders.schema == ORDERS
    nothing = dict.fromkeys(ORDERS.names)
    seven = {"id": 7, "amount": Decimal("1.50"), "at": datetime(2026, 11, 28, 10, tzinfo=UTC), "day": date(2026, 11, 28)}
    assert orders.to_pylist() == [nothing | seven | {"who": {"name": "ü"}}, nothing | {"tags": ["a", None]}, nothing]
    assert duckdb.sql("SELECT sum(amount), count(*) FROM orders").fetchall() == [(Decimal("1.50"), 3)]


def test_many_records_come_in_order_also_long_ones_and_those_of_a_topic(tmp_path: Path) -> None:
    texts = [str(number) * (3_000_000 if number == 11_111 else 1) for number in range(25_000)]
    with Topic(tmp_path / "t") as topic, topic.reader("r") as reader:
        topic.append_many([json.dumps({"text": text}).encode() for text in texts])
        batch = reader.lease("run", max_records=100_000, max_bytes=1 << 30)
        assert batch is not None
        assert batch.to_arrow(pa.schema([("text", pa.string())]))["text"].to_pylist() == texts


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"", "it is not one JSON object"),
        (b"null", "it is not one JSON object"),
        (b"[1]", "it is not one JSON object"),
        (b'{"id": 1}{"id": 2}', "it is not one JSON object"),
        (b'{"id": 1}\n{"id": 2}', "it is not one JSON object"),
        (b'{"id": 1', "it is not one JSON object"),
        (b'{"id": }', "JSON parse error: Invalid value."),
        (b'{"id": "x"}', "JSON parse error: Column(/id) changed from number to string"),
        (b'{"id": 1.5}', "Failed to convert JSON to int64, couldn't parse:1.5"),
        (b'{"who": {"name": "\xff"}}', "Column 4: In chunk 0: Invalid: Struct child array #0 invalid"),
        (b'{"day": "24.11.2026"}', "Failed to parse string: '24.11.2026' as a scalar of type date32[day]"),
    ],
)
def test_a_record_that_does_not_fit_is_named_by_its_number(tmp_path: Path, record: bytes, said: str) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put_many([*[b'{"id": 1}'] * 10_001, record, b"", b'{"id": 1}{"id": 2}'])
        batch = queue.lease("run")
        assert batch is not None
        with pytest.raises(BadRecord) as caught:
            batch.to_arrow(ORDERS)
    assert str(caught.value).startswith(f"record 10001 does not fit the schema: {said}")


def test_a_type_that_arrow_reads_from_no_text_is_a_bad_argument(tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put(b'{"at": 1}')
        batch = queue.lease("run")
        assert batch is not None
        with pytest.raises(BadArgument, match="the schema has a type that Arrow does not read from JSON"):
            batch.to_arrow(pa.schema([("at", pa.month_day_nano_interval())]))
