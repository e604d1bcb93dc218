"""Upserts into tables of Iceberg and Delta, beside an append of the same rows: python -m benchmarks.upserts

A table of 10 M rows in ten files gets 1 M rows. Of each case are measured: seconds, and the most memory that the driver's Python
had; what it could give back before is given back. The cases take turns in one session, and each finds the table as it was first.
Figures are medians, of ratios within a turn. Everything is in the cache of the file system.

What is found is kept as JSON, and told in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow
from pyspark.sql import DataFrame, SparkSession

from qewqew_spark.tables import append_once

FORMATS = ("iceberg", "delta")
CASES = {
    "append": "appended",
    "new": "upserted, none of them there",
    "last": "upserted, all in one file of ten",
    "all over": "upserted, each tenth row of each file",
}
PEER = "delta-rs"  # merge, which has the rows in memory before it is measured
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs/benchmarks-upserts.json"
PART = "upserts"  # of docs/benchmarks.md
Samples = dict[str, list[tuple[float, float]]]  # of each case: seconds, MiB


class Bench:
    """A place with tables, where ``count`` rows are changed in one of ten times as many."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.catalog.lake.type": "sql",
            "spark.sql.catalog.lake.uri": f"sqlite:///{folder}/catalog.db",
            "spark.sql.catalog.lake.warehouse": f"file://{folder}/warehouse",
            "spark.local.dir": str(folder),
        }
        self.spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")

    def name(self, kind: str, table: str = "big") -> str:
        return f"lake.shop.{table}" if kind == "iceberg" else f"{self.folder}/{table}"

    def rows(self, start: int, stop: int, step: int = 1, files: int = 2) -> DataFrame:
        """Of about 100 bytes that do not compress well."""
        columns = (
            "id",
            "'name ' || id AS name",
            "unix_micros(now()) AS changed",
            "id * 0.5D AS amount",
            "sha2(CAST(id AS STRING), 256) AS note",
        )
        return self.spark.range(start, stop, step, files).selectExpr(*columns)

    def make(self) -> None:
        for kind in FORMATS:
            append_once(self.rows(0, 10 * self.count, files=10), self.name(kind), "first", format=kind)

    def case(self, kind: str, case: str) -> tuple[float, float]:
        batch, count = str(time.time_ns()), self.count
        append_once(self.rows(0, 10), self.name(kind, "warm"), batch, format=kind, keys=["id"], order_by="changed")
        rows = {
            "append": lambda: self.rows(0, count),  # to a table of its own, as the rows would be there twice
            "new": lambda: self.rows(11 * count, 12 * count),
            "last": lambda: self.rows(9 * count, 10 * count),
        }.get(case, lambda: self.rows(0, 10 * count, 10))()
        options: dict[str, Any] = {} if case == "append" else {"keys": ["id"], "order_by": "changed"}
        work: Callable[[], object]
        if case == PEER:
            from deltalake import DeltaTable

            source = rows.toArrow()

            def work() -> object:
                merge = DeltaTable(self.name(kind)).merge(source, "t.id = s.id", source_alias="s", target_alias="t")
                return merge.when_matched_update_all("s.changed >= t.changed").when_not_matched_insert_all().execute()
        else:
            table = self.name(kind, "appended" if case == "append" else "big")

            def work() -> object:
                return append_once(rows, table, f"{batch} measured", format=kind, **options)

        gc.collect()
        pyarrow.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        began = time.perf_counter()
        work()
        found = time.perf_counter() - began, _peak()
        self.restore(kind)
        return found

    def restore(self, kind: str) -> None:
        """The table is as `make` made it."""
        if kind == "iceberg":
            from pyiceberg.catalog import load_catalog

            place = {"type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db"}
            loaded = load_catalog("lake", **place).load_table("shop.big")
            loaded.manage_snapshots().rollback_to_snapshot(loaded.snapshots()[0].snapshot_id).commit()
        else:
            from deltalake import DeltaTable

            if (loaded := DeltaTable(self.name(kind))).version() > 1:
                loaded.restore(1)


def _peak() -> float:
    """MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(folder: Path, count: int, repeats: int) -> Samples:
    bench = Bench(folder, count)
    bench.make()
    samples: Samples = {}
    names = [(kind, case) for kind in FORMATS for case in CASES] + [("delta", PEER)]
    for turn in range(repeats):
        at = 2 * turn % len(names)
        for kind, case in names[at:] + names[:at]:
            seconds, mebibytes = bench.case(kind, case)
            found = samples.setdefault(f"{kind}; {case}", [])
            found.append((round(seconds, 3), round(mebibytes, 1)))
            print(kind, case, *found[-1], file=sys.stderr, flush=True)
    bench.spark.stop()
    return samples


def table(samples: Samples) -> str:
    """Of each case how long it took, how many times as long as the append, and the driver's memory."""
    from benchmarks import report  # late: what a case runs does not need it

    rows = []
    for case, what in {**CASES, PEER: "the same by `merge` of delta-rs, alone"}.items():
        row = [what]
        for kind in FORMATS:
            if f"{kind}; {case}" not in samples:
                row += ["–"] * 3
                continue
            found, appended = samples[f"{kind}; {case}"], samples[f"{kind}; append"]
            ratio = statistics.median(one / other for (one, _), (other, _) in zip(found, appended, strict=True))
            seconds, mebibytes = (statistics.median(each[at] for each in found) for at in (0, 1))
            row += [f"{seconds:.1f} s", "1" if found is appended else f"{ratio:.1f}", f"{mebibytes:,.0f} MiB"]
        rows.append(row)
    return report.table(["", *(text for kind in FORMATS for text in (kind.capitalize(), "beside append", "memory"))], rows)


def told(results: dict[str, Any]) -> str:
    machine, plan = results["machine"], results["plan"]
    return (
        f"{table(results['samples'])}\n\nMeasured on {results['date']}: {plan['rows']:,} rows into {10 * plan['rows']:,}, "
        f"{plan['repeats']} turns, `local[2]` on {machine['processor']}, {machine['memory']}; Spark {machine['pyspark']}, "
        f"PyIceberg {machine['pyiceberg']}, delta-rs {machine['deltalake']}, pyarrow {machine['pyarrow']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the samples; the document is left as it is then")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the table of the samples that are kept")
    parser.add_argument("--directory", help="where to write (default: the system's directory for temporary files)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="that are merged into ten times as many")
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else the workers take python3 from PATH
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from benchmarks import report

    kept: Path = arguments.json or KEPT
    if not arguments.draw:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            from benchmarks.machine import describe

            machine = describe(folder) | {name: version(name) for name in ("pyspark", "pyarrow", "pyiceberg", "deltalake")}
            samples = measure(Path(folder), arguments.rows, arguments.repeats)
        plan = {"rows": arguments.rows, "repeats": arguments.repeats}
        report.keep(kept, machine, plan, samples)
    report.publish(kept, ROOT / "docs/benchmarks.md" if kept == KEPT else None, PART, told)


if __name__ == "__main__":
    main()
