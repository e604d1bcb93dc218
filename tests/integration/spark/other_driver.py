"""A driver in a process of its own, which appends to tables as it is told, and says what it did.

It has the JVM of the tests' Spark, whose start would take longer than all the rest. What looks, commits and is killed is Python:
a fork of a process that has imported everything and does nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from deltalake import DeltaTable
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from spark_lake import Lake

from qewqew_core.batch.store import Local
from qewqew_spark.jobs import drain as drain_module
from qewqew_spark.jobs.drain import drain
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once
from qewqew_spark.tables.append import StagedAppend
from qewqew_spark.tables.merging import Merge

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["qewqew_spark.jobs.drain", "qewqew_spark.tables.delta", "qewqew_spark.tables.iceberg"])


class OtherDriver:
    """The process, as the tests have it. `append` gives an order, `result` waits for what it did."""

    def __init__(self, spark: Any) -> None:
        gateway = spark.sparkContext._gateway.gateway_parameters
        place = {"PYSPARK_GATEWAY_PORT": str(gateway.port), "PYSPARK_GATEWAY_SECRET": gateway.auth_token}
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=main, args=(theirs, place), daemon=True)
        self.process.start()
        theirs.close()

    def append(self, lake: Lake, kind: str, batch: str, numbers: range, die: str = "") -> None:
        """``die``: kill -9 when the files are "staged", or "before" or "after" their commit."""
        self._order(lake, kind, die, {"batch": batch, "numbers": [numbers.start, numbers.stop]})

    def upsert(self, lake: Lake, kind: str, batch: str, rows: list[tuple[int, str, int]], die: str = "") -> None:
        """``rows``: `id BIGINT, name STRING, ts INT`. ``die``: as in `append`, or when the files of the table are "copied"."""
        self._order(lake, kind, die, {"batch": batch, "rows": rows})

    def drain(self, lake: Lake, kind: str, prefix: str, die: str = "") -> None:
        """``die``: as in `append`, when the first batch is "removed", or when damaged ones are "looked" for."""
        self._order(lake, kind, die, {"prefix": prefix, "quarantine": f"{lake.place}/bad"})

    def _order(self, lake: Lake, kind: str, die: str, what: dict[str, Any]) -> None:
        place = {"table": lake.name(kind), "settings": lake.settings, "environment": lake.environment}
        self.pipe.send({"kind": kind, "die": die, **place, **what})

    def result(self) -> dict[str, Any] | None:
        """The `Commit`, or the result of a drain, or what was raised as ``error``; None if the process ended."""
        try:
            found: dict[str, Any] = self.pipe.recv()
        except EOFError:
            return None
        return found

    def end(self) -> int | None:
        self.pipe.close()
        self.process.join(60)
        return self.process.exitcode


def results(drivers: Sequence[OtherDriver]) -> list[dict[str, Any]]:
    found = [driver.result() for driver in drivers]
    assert all(each is not None and "error" not in each for each in found), found
    return [each for each in found if each is not None]


def session() -> SparkSession:
    gateway = launch_gateway()
    first = gateway.jvm.org.apache.spark.sql.classic.SparkSession.getDefaultSession().get()
    context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(first.sparkContext())
    conf = SparkConf(_jvm=gateway.jvm, _jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf), first.newSession())


def die_at(point: str, kind: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if point == "removed":
        remove = Local.remove
        Local.remove = lambda store, ours: (remove(store, ours), die())  # type: ignore[assignment,method-assign]
        return
    if point == "looked":
        drain_module.damaged_of = die  # type: ignore[assignment]
        return
    if point == "staged":
        StagedAppend.commit = die  # type: ignore[assignment,method-assign]
        return
    if point == "copied":
        merge = Merge.__call__
        Merge.__call__ = lambda self: (merge(self), die())  # type: ignore[assignment,method-assign]
        return
    commits: list[tuple[Any, str]] = [(DeltaTable, "create_write_transaction")]
    if kind == "iceberg":
        commits = [(catalog, "commit_table") for catalog in (SqlCatalog, RestCatalog)]
    for where, name in commits:
        commit = getattr(where, name)
        setattr(where, name, lambda *a, commit=commit, **o: (commit(*a, **o) if point == "after" else None, die()))


def main(pipe: Connection, place: dict[str, str]) -> None:
    os.environ |= place
    spark = session()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        os.environ |= order["environment"]
        for name, value in order["settings"].items():
            spark.conf.set(f"spark.sql.catalog.lake.{name}", value)
        if order["die"]:
            die_at(order["die"], order["kind"])
        try:
            pipe.send(carried_out(spark, order))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"})


def carried_out(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    kind, table = order["kind"], order["table"]
    if "prefix" in order:
        output = Output(format=kind, **{"table" if kind == "iceberg" else "path": table})
        return drain(lambda: spark, order["prefix"], [output], schema="id BIGINT", quarantine=order["quarantine"])
    if "rows" in order:
        changed = spark.createDataFrame(order["rows"], "id BIGINT, name STRING, ts INT")
        found = append_once(changed, table, order["batch"], format=kind, keys=["id"], order_by="ts")
        return {"snapshot": found.snapshot, "again": found.again}
    rows = spark.range(*order["numbers"], 1, 1)
    found = append_once(rows, table, order["batch"], format=kind)
    return {"snapshot": found.snapshot, "again": found.again}
