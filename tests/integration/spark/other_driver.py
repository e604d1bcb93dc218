"""A driver in a process of its own, which appends to tables as it is told, one order a line, and says what it did.

It has the JVM of the tests' Spark, whose start would take longer than all the rest. What looks, commits and is killed is Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


class OtherDriver:
    """The process, as the tests have it. `append` gives an order, `result` waits for what it did."""

    def __init__(self, spark: Any) -> None:
        gateway = spark.sparkContext._gateway.gateway_parameters
        place = {"PYSPARK_GATEWAY_PORT": str(gateway.port), "PYSPARK_GATEWAY_SECRET": gateway.auth_token}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env={**os.environ, **place}, **pipes)

    def append(self, settings: dict[str, str], kind: str, table: str, batch: str, numbers: range, die: str = "") -> None:
        """``die``: kill -9 when the files are "staged", or "before" or "after" their commit."""
        order = {"settings": settings, "kind": kind, "table": table, "batch": batch}
        order |= {"numbers": [numbers.start, numbers.stop], "die": die}
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def drain(self, settings: dict[str, str], kind: str, table: str, prefix: str, quarantine: str, die: str = "") -> None:
        """``die``: as in `append`, or when the first batch is "removed"."""
        order = {"settings": settings, "kind": kind, "table": table, "prefix": prefix, "quarantine": quarantine, "die": die}
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def result(self) -> dict[str, Any] | None:
        """The `Commit`, or the result of a drain, or what was raised as ``error``; None if the process ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


def results(drivers: Sequence[OtherDriver]) -> list[dict[str, Any]]:
    found = [driver.result() for driver in drivers]
    assert all(each is not None and "error" not in each for each in found), found
    return [each for each in found if each is not None]


def session() -> Any:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway = launch_gateway()
    first = gateway.jvm.org.apache.spark.sql.classic.SparkSession.getDefaultSession().get()
    context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(first.sparkContext())
    conf = SparkConf(_jvm=gateway.jvm, _jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf), first.newSession())


def die_at(point: str, kind: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    from deltalake import DeltaTable
    from pyiceberg.catalog.rest import RestCatalog
    from pyiceberg.catalog.sql import SqlCatalog

    from qewqew_core.batch.store import Local
    from qewqew_spark.tables.append import StagedAppend

    if point == "removed":
        remove = Local.remove
        Local.remove = lambda store: (remove(store), die())  # type: ignore[assignment,method-assign]
        return
    if point == "staged":
        StagedAppend.commit = die  # type: ignore[assignment,method-assign]
        return
    commits: list[tuple[Any, str]] = [(DeltaTable, "create_write_transaction")]
    if kind == "iceberg":
        commits = [(catalog, "commit_table") for catalog in (SqlCatalog, RestCatalog)]
    for where, name in commits:
        commit = getattr(where, name)
        setattr(where, name, lambda *a, commit=commit, **o: (commit(*a, **o) if point == "after" else None, die()))


def main() -> None:
    spark = session()

    from qewqew_spark.jobs.drain import drain
    from qewqew_spark.jobs.output import Output
    from qewqew_spark.tables import append_once

    for line in sys.stdin:
        order = json.loads(line)
        for name, value in order["settings"].items():
            spark.conf.set(f"spark.sql.catalog.lake.{name}", value)
        if order["die"]:
            die_at(order["die"], order["kind"])
        try:
            if "prefix" in order:
                place = {"table" if order["kind"] == "iceberg" else "path": order["table"]}
                output = Output(format=order["kind"], **place)
                said = drain(lambda: spark, order["prefix"], [output], schema="id BIGINT", quarantine=order["quarantine"])
                print(json.dumps(said), flush=True)
                continue
            found = append_once(spark.range(*order["numbers"]), order["table"], order["batch"], format=order["kind"])
            said = {"snapshot": found.snapshot, "again": found.again}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
