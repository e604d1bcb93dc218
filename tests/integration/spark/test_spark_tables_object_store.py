"""Batches in tables of an object store: Spark writes there, PyIceberg and delta-rs commit there, each batch once.

Without S3A, Hadoop's own client: see `store_for_spark`.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from object_store import CREDENTIALS, object_store_apart, s3_client
from other_driver import OtherDriver, results
from spark_lake import Lake, in_a_file
from store_for_spark import writes_to

from qewqew_core import BadArgument
from qewqew_spark.tables import append_once, append_to

pytestmark = pytest.mark.xdist_group("spark")
KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])
PAGE = Path(__file__).parents[3] / "docs/spark/tables.md"


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    with object_store_apart() as url, pytest.MonkeyPatch.context() as environment:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}.items():
            environment.setenv(name, value)
        yield s3_client(url)


class StoredLake(Lake):
    """The catalog is a file here, the tables are in the bucket."""

    def __init__(self, session: Any, place: Path, bucket: str, store: Any) -> None:
        self.store, self.bucket, self.top = store, bucket, f"s3://{bucket}/tables"
        more = {"warehouse": f"{self.top}/warehouse", "s3.endpoint": store.meta.endpoint_url}
        super().__init__(session, place, **in_a_file(place) | more)
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.meta.endpoint_url, "AWS_ALLOW_HTTP": "true"}

    def name(self, kind: str, name: str = "orders") -> str:
        return f"lake.shop.{name}" if kind == "iceberg" else f"{self.top}/{name}"

    def rows(self, kind: str, columns: str = "*", name: str = "orders") -> list[tuple[Any, ...]]:
        if kind == "iceberg":
            found = self.catalog.load_table(f"shop.{name}").scan().to_arrow()
        else:
            found = DeltaTable(self.name(kind, name)).to_pyarrow_table()
        return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)

    def files(self) -> set[str]:
        """The Parquet files in the bucket."""
        listed = self.store.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = {each["Key"] for page in listed for each in page.get("Contents", [])}
        assert not any("_temporary" in key for key in keys)
        return {key for key in keys if key.endswith(".parquet")}


@pytest.fixture
def lake(spark: Any, store: Any, tmp_path: Path) -> Iterator[StoredLake]:
    bucket = re.sub("[^a-z0-9]+", "-", tmp_path.name.lower()).strip("-")
    store.create_bucket(Bucket=bucket)
    with writes_to(spark, bucket, store):
        lake = StoredLake(spark.newSession(), tmp_path, bucket, store)
        assert lake.catalog.list_namespaces() == []  # which makes the file
        yield lake


@KINDS
def test_a_batch_is_appended_once_beside_what_others_wrote(lake: StoredLake, kind: str) -> None:
    table = lake.name(kind)
    rows = lake.session.range(3).selectExpr("id", "NULLIF(CONCAT('a/b: ', id % 2), 'a/b: 1') AS odd")
    first = append_once(rows, table, "orders-1", format=kind, partition_by=["odd"])
    files = lake.files()
    again = append_once(lake.session.range(100, 200), table, "orders-1", format=kind)
    assert (again.again, again.snapshot) == (True, first.snapshot)
    assert lake.files() == files
    if kind == "delta":
        write_deltalake(table, pa.table({"id": [7], "odd": ["x"]}), mode="append")
    assert not append_once(rows.selectExpr("id + 10 AS id", "'x' AS more"), table, "orders-2", format=kind).again
    found = [(0, "a/b: 0", None), (1, None, None), (2, "a/b: 0", None), *((number, None, "x") for number in (10, 11, 12))]
    assert lake.rows(kind) == sorted([*found, *([(7, "x", None)] if kind == "delta" else [])], key=repr)


@pytest.mark.parametrize("kind", [pytest.param("iceberg", marks=pytest.mark.soak), "delta"])
def test_of_eight_owners_one_is_in_the_table_and_of_eight_batches_all(
    lake: StoredLake, kind: str, drivers: list[OtherDriver]
) -> None:
    """The store decides what is in Delta's log: it takes a file of a name once. For Iceberg the catalog decides."""
    for number, driver in enumerate(drivers):
        driver.append(lake, kind, f"b-{number}", range(number, number + 1))
    assert not any(commit["again"] for commit in results(drivers))
    for driver in drivers:
        driver.append(lake, kind, "orders-1", range(50, 53))
    assert sorted(commit["again"] for commit in results(drivers)) == [False] + [True] * 7
    assert lake.rows(kind) == sorted([(number,) for number in [*range(8), 50, 51, 52]], key=repr)


@KINDS
def test_files_of_killed_attempts_are_removed_as_the_page_says(lake: StoredLake, drivers: list[OtherDriver], kind: str) -> None:
    table = lake.name(kind)
    append_once(lake.session.range(3), table, "orders-1", format=kind)
    committed = lake.files()
    for point in "after", "before":
        driver = drivers.pop()
        driver.append(lake, kind, f"killed {point}", range(5, 6), die=point)
        assert driver.result() is None
        assert driver.end() == -signal.SIGKILL
        committed |= lake.files() if point == "after" else set()
    assert lake.files() - committed
    assert append_once(lake.session.range(5, 6), table, "killed after", format=kind).again

    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (text for text in examples if ("rm_file" if kind == "iceberg" else "vacuum") in text)
    text = text.replace('load_catalog("lake")', f'load_catalog("lake", **{lake.settings})').replace("/lake/orders", table)
    text = text.replace("days=7", "days=-1").replace("retention_hours=168", "retention_hours=0, enforce_retention_duration=False")
    exec(compile(text, str(PAGE), "exec"), {})  # noqa: S102 - our own page
    assert lake.files() == committed
    assert lake.rows(kind) == [(0,), (1,), (2,), (5,)]


@KINDS
def test_what_an_attempt_that_fails_has_written_is_removed(lake: StoredLake, kind: str) -> None:
    append = append_to(lake.session, lake.name(kind), "orders-1", kind)
    append.write(lake.session.range(3))
    assert lake.files()
    append.abort()
    assert lake.files() == set()
    assert lake.rows(kind) == []


def test_a_spark_that_cannot_write_there_is_told_what_it_lacks(spark: Any, store: Any, tmp_path: Path) -> None:
    store.create_bucket(Bucket="nowhere")
    with pytest.raises(BadArgument, match=r"no file system for s3://.*hadoop-aws.*fs\.s3\.impl="):
        append_once(spark.range(3), "s3://nowhere/orders", "orders-1", format="delta")
    log = store.get_object(Bucket="nowhere", Key="orders/_delta_log/00000000000000000000.json")["Body"].read()
    assert not any("add" in json.loads(line) for line in log.splitlines())
