"""The columns of earlier batches are kept beside their files: looking at them costs the same however many there are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from spark_batches import make_batch

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs import kept, writing
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.kept import KeptColumns
from qewqew_spark.jobs.output import Output


class Killed(BaseException):
    pass


class Orders:
    """Batches into the files below one path."""

    def __init__(self, spark: Any, place: Path, format: str = "parquet") -> None:
        self.spark = spark
        self.place = place
        self.path = place / "out"
        self.output = Output(str(self.path), format=format)

    def write(self, number: int, record: dict[str, object], schema: str, policy: str = "merge") -> None:
        name = f"orders-{number}"
        batch = make_batch(self.place / "batches" / name, [json.dumps(record).encode()], batch_id=name)
        run(self.spark, str(batch), [self.output], schema=schema, schema_evolution=policy)

    def rows(self) -> list[dict[str, object]]:
        rows = self.spark.read.format(self.output.format).load(str(self.path), mergeSchema=True).orderBy("batch").collect()
        return [row.asDict(recursive=True) for row in rows]

    @property
    def kept(self) -> list[Path]:
        return sorted((self.path / ".qewqew").glob("columns-*.json"))

    @property
    def columns(self) -> list[str]:
        (file,) = self.kept
        return [field["name"] for field in json.loads(file.read_text())["fields"]]


@pytest.fixture
def orders(spark: Any, tmp_path: Path) -> Orders:
    return Orders(spark, tmp_path)


@contextmanager
def killed_at_the_rename(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writing, "rename", killed)
        patch.setattr(writing.Files, "abort", lambda _: None)
        with pytest.raises(Killed):
            yield


def test_the_calls_to_the_file_system_are_as_many_beside_1000_batches_as_beside_one(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = orders.spark.sparkContext._gateway._gateway_client
    real, calls = client.send_command, 0

    def count(command: str, *more: Any, **named: Any) -> Any:
        nonlocal calls
        calls += not command.startswith("m\n")  # Python has collected an object
        return real(command, *more, **named)

    def counted(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(client, "send_command", count)
                return method(*arguments)

        return call

    for name in "check", "write", "commit":
        monkeypatch.setattr(writing.Files, name, counted(getattr(writing.Files, name)))
    orders.write(0, {"id": 0}, "id INT, name STRING")
    orders.write(1, {"id": 1}, "id INT, name STRING")
    told = {}
    for there in 1, 100, 1000:
        for number in range(there):
            directory = orders.path / f"batch=earlier-{number}"
            directory.mkdir(exist_ok=True)
            (directory / "part.parquet").write_bytes(b"to read it would fail")
        calls = 0
        orders.write(2 + there, {"id": there}, "id INT, name STRING")
        told[there] = calls
    assert told[1] == told[100] == told[1000] > 10, told


@pytest.mark.parametrize("format", ["parquet", "orc"])
def test_a_field_of_a_struct_in_another_case_is_refused_and_the_files_stay_readable(
    spark: Any, tmp_path: Path, format: str
) -> None:
    orders = Orders(spark, tmp_path, format)
    orders.write(0, {"x": {"a": 1}}, "x STRUCT<a: INT>, l ARRAY<STRUCT<b: INT>>")
    for schema, told in [
        ("x STRUCT<A: INT>", r"the column 'x' is struct<a:int> there and struct<A:int> in this batch"),
        ("l ARRAY<STRUCT<B: INT>>", r"the column 'l.element' is struct<b:int> there and struct<B:int> in this batch"),
    ]:
        with pytest.raises(BadArgument, match=told):
            orders.write(1, {"x": {"A": 2}}, schema)
    orders.write(2, {"x": {"a": 3}}, "x STRUCT<a: INT, more: INT>")
    assert [row["x"] for row in orders.rows()] == [{"a": 1, "more": None}, {"a": 3, "more": None}]


def test_what_a_killed_job_kept_hinders_no_other_one(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.write(0, {"id": 0}, "id INT")
    with killed_at_the_rename(monkeypatch):
        orders.write(1, {"id": 1, "more": 5}, "id INT, more INT")
    assert orders.columns == ["id", "more"]
    orders.write(2, {"id": 2, "more": "text"}, "id INT, more STRING")
    orders.write(1, {"id": 1, "more": "now text"}, "id INT, more STRING")
    assert [row["more"] for row in orders.rows()] == [None, "now text", "text"]
    with pytest.raises(BadArgument, match="'more' is string there and int in this batch"):
        orders.write(3, {"id": 3, "more": 5}, "id INT, more INT")
    with pytest.raises(BadArgument, match="schema_evolution is 'fail': 'more' is missing"):
        orders.write(3, {"id": 3}, "id INT", "fail")


def test_what_is_missing_is_made_from_the_newest_batches(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, schema in enumerate(["old INT", "id INT", "id INT, new INT"]):
        orders.write(number, {"id": 1, "old": 1}, schema)
    for content in None, b"no columns":
        for file in orders.kept:
            file.unlink()
            if content:
                file.write_bytes(content)
        with pytest.raises(BadArgument, match="'id' is int there and string in this batch"):
            orders.write(3, {"id": "x"}, "id STRING")
        orders.write(3, {"id": 2}, "id INT")
        assert {"old", "id", "new"} <= {
            field["name"]
            for file in orders.kept
            if b"fields" in file.read_bytes()
            for field in json.loads(file.read_text())["fields"]
        }
    monkeypatch.setattr(kept, "NEWEST", 2)
    for file in orders.kept:
        file.unlink()
    os.utime(orders.path / "batch=orders-2", (0, 0))
    orders.write(3, {"id": 3}, "id INT")
    assert orders.columns == ["id"]  # of batches 1 and 3


def test_when_the_batches_are_gone_what_was_kept_of_them_does_not_bind(orders: Orders) -> None:
    orders.write(0, {"id": 0}, "id INT, other INT")
    for file in orders.path.glob("batch=*/*"):
        file.unlink()
    orders.write(1, {"id": "text"}, "id STRING")
    assert orders.columns == ["id"]
    orders.write(2, {"id": "text"}, "id STRING", "fail")


def test_jobs_beside_each_other_lose_no_columns(orders: Orders) -> None:
    orders.write(0, {"id": 0}, "id INT")
    path = str(orders.path)
    one, two = (KeptColumns(orders.spark, path, f"{path}/batch=orders-{number}", "parquet") for number in (1, 2))
    for job in one, two:
        assert job.there() is not None
    for job, more in (one, "a INT"), (two, "b INT"):
        job.add(orders.spark.createDataFrame([], f"id INT, {more}").schema)
    for policy in "ignore", "merge":
        orders.write(3, {"id": 3}, "id INT, c INT", policy)
    assert set(orders.columns) == {"id", "a", "b", "c"}
    orders.write(4, {"id": "text"}, "id STRING", "ignore")  # now they contradict each other, as files may under this policy
    with pytest.raises(BadArgument, match="contradict each other"):
        orders.write(5, {"id": 5}, "id INT")
