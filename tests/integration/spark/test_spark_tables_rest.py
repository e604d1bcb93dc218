"""Batches in Iceberg tables of a REST catalog: each is there once, whoever commits, and whatever is killed or lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from other_driver import OtherDriver, results
from pyiceberg.exceptions import CommitStateUnknownException
from rest_catalog import RestCatalog, rest_catalog
from spark_lake import Lake, in_a_file

from qewqew_spark.tables import append_once

pytestmark = pytest.mark.xdist_group("spark")
TABLE = "lake.shop.orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalog]:
    with rest_catalog(in_a_file(tmp_path)) as server:
        yield server


@pytest.fixture
def lake(spark: Any, server: RestCatalog, tmp_path: Path) -> Lake:
    return Lake(spark.newSession(), tmp_path, type="rest", uri=server.url)


def test_a_batch_is_appended_once_beside_what_others_wrote(lake: Lake) -> None:
    first = append_once(lake.session.range(3), TABLE, "orders-1", partition_by=["id"])
    lake.catalog.load_table("shop.orders").append(pa.table({"id": [7]}))
    assert not append_once(lake.session.sql("SELECT 4 AS id, 'x' AS more"), TABLE, "orders-2").again
    again = append_once(lake.session.range(100, 200), TABLE, "orders-1")
    assert (again.again, again.snapshot) == (True, first.snapshot)
    assert lake.rows("iceberg") == [(0, None), (1, None), (2, None), (4, "x"), (7, None)]


def test_of_eight_owners_one_is_in_the_table_and_of_eight_batches_all(
    lake: Lake, server: RestCatalog, drivers: list[OtherDriver]
) -> None:
    for number, driver in enumerate(drivers):  # of a table that is not there yet
        driver.append(lake, "iceberg", f"b-{number}", range(number, number + 1))
    assert not any(commit["again"] for commit in results(drivers))
    for driver in drivers:
        driver.append(lake, "iceberg", "orders-1", range(50, 53))
    done = results(drivers)
    assert sorted(commit["again"] for commit in done) == [False] + [True] * 7
    assert len({commit["snapshot"] for commit in done}) == 1
    assert lake.rows("iceberg") == sorted([(number,) for number in [*range(8), 50, 51, 52]], key=repr)
    assert server.refused


@pytest.mark.parametrize("point", ["before", "in", "after"])
def test_a_driver_that_is_killed_leaves_nothing_or_all(
    lake: Lake, server: RestCatalog, drivers: list[OtherDriver], point: str
) -> None:
    append_once(lake.session.range(0), TABLE, "before")
    driver = drivers.pop()
    if point == "in":  # its request is there, and it does not get the answer
        server.before_commit = lambda: os.kill(driver.process.pid, signal.SIGKILL)
    driver.append(lake, "iceberg", "orders-1", range(5), die="" if point == "in" else point)
    assert driver.result() is None
    assert driver.end() == -signal.SIGKILL
    server.before_commit = lambda: None
    assert append_once(lake.session.range(5), TABLE, "orders-1").again == (point != "before")
    assert lake.rows("iceberg") == [(number,) for number in range(5)]


def test_a_commit_that_the_server_takes_and_answers_with_an_error_is_kept(lake: Lake, server: RestCatalog) -> None:
    append_once(lake.session.range(0), TABLE, "before")

    def fail() -> None:
        server.after_commit = lambda: None
        raise ConnectionError("what is behind the server does not answer")

    server.after_commit = fail
    with pytest.raises(CommitStateUnknownException):
        append_once(lake.session.range(3), TABLE, "orders-1")
    assert lake.rows("iceberg") == [(0,), (1,), (2,)]
    assert append_once(lake.session.range(3), TABLE, "orders-1").again


def test_snapshots_that_the_settings_leave_out_are_looked_at(lake: Lake) -> None:
    """Spark's own connector fetches the others when it needs them."""
    lake.session.conf.set("spark.sql.catalog.lake.snapshot-loading-mode", "refs")
    for batch in "orders-1", "orders-2":
        append_once(lake.session.range(1), TABLE, batch)
    assert append_once(lake.session.range(9), TABLE, "orders-1").again
    assert lake.rows("iceberg") == [(0,), (0,)]
