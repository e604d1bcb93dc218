"""Batches in Spark against what Spark reads by itself: python -m benchmarks.spark

From staged records to typed Parquet: 1 M records of about 200 B, from a queue (lease, read, put back) with 12 and with 1,000
commits, and from landing directories with as many files, whose schema is given, or inferred by Spark. Each case runs in one warm
session, and as a process of its own that starts Spark. The cases take turns, each turn begins with another one, the first one in
the warm session is thrown away; figures are medians, of ratios within a turn. Everything is in the cache of the file system.

What is found is kept as JSON, and told in docs/benchmarks.md. With --reading instead: the same JSON records of about 100 B and
1 KiB as a batch, as two files of lines, and as Parquet with typed columns, counted, read into the `noop` sink, and written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from qewqew_core import Queue
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs.output import Output

SCHEMA = "id BIGINT, at TIMESTAMP, carrier STRING, origin STRING, delay DOUBLE, seats INT, note STRING"
SIZES = {"100 B": 0, "1 KiB": 920}  # of a record, and of its note
COMMITS = (12, 1_000)
FILES = (12, 1_000, 10_000)
SEED = 1
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs/benchmarks-spark.json"
PART = "from-json-to-parquet"  # of docs/benchmarks.md

Results = dict[str, list[float]]


def records(count: int, note: int) -> Iterator[bytes]:
    chance = random.Random(SEED)  # noqa: S311
    letters = "abcdefghij klmnopqrstuvwxyz"
    notes = ["".join(chance.choices(letters, k=max(0, note + chance.randrange(-note // 4, note // 4 + 1)))) for _ in range(499)]
    for number in range(count):
        delay = chance.randrange(-200, 3_000) / 10
        text = f'{{"id":{number},"at":"2026-11-20T{number % 24:02}:{number % 60:02}:07.123Z","carrier":"AA"'
        text += f',"delay":{delay}' + (f',"origin":"JFK","seats":180,"note":"{notes[number % 499]}"' if note else "") + "}"
        yield text.encode()


def stage(path: Path, lines: list[bytes], commits: int) -> Queue:
    queue = Queue(path, sync="never")
    step = -(-len(lines) // commits)
    for at in range(0, len(lines), step):
        queue.put_many(lines[at : at + step])
    return queue


def write_lines(directory: Path, lines: list[bytes], files: int) -> None:
    directory.mkdir()
    for number in range(files):
        with (directory / f"{number:05}.json").open("wb") as file:
            file.writelines(line + b"\n" for line in lines[number::files])


class Timer:
    def __init__(self, results: Results, repeats: int) -> None:
        self.results, self.repeats = results, repeats

    def rotate(self, cases: dict[str, Callable[[], object]]) -> None:
        """Each case once in each turn, the first turn for warming up."""
        for turn in range(self.repeats + 1):
            names = list(cases)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.perf_counter()
                cases[name]()
                if turn:
                    self.results.setdefault(name, []).append(time.perf_counter() - began)


def reading(spark: SparkSession, folder: Path, mebibytes: int, timer: Timer) -> None:
    for size, note in SIZES.items():
        lines = list(records((mebibytes << 20) // (note + 100), note))
        lines_at, parquet, out = folder / "lines", folder / "parquet", folder / "out"
        write_lines(lines_at, lines, 2)
        with stage(folder / "q", lines, 1_000) as queue:
            leased = queue.lease("benchmark")
        assert leased is not None
        leased_at = os.path.dirname(leased.manifest_path)
        spark.read.schema(SCHEMA).json(str(lines_at)).write.parquet(str(parquet))
        frames: dict[str, Callable[[], DataFrame]] = {
            "qewqew, value": lambda at=leased_at: spark.read.format("qewqew").load(at),
            "text": lambda at=str(lines_at): spark.read.text(at),
            "qewqew, codec json": lambda at=leased_at: (
                spark.read.format("qewqew").option("codec", "json").schema(SCHEMA).load(at)
            ),
            "json with a schema": lambda at=str(lines_at): spark.read.schema(SCHEMA).json(at),
            "parquet": lambda at=str(parquet): spark.read.parquet(at),
        }
        actions: dict[str, Callable[[DataFrame], object]] = {
            "count": lambda frame: frame.count(),
            "noop": lambda frame: frame.write.format("noop").mode("overwrite").save(),
            "write Parquet": lambda frame, at=str(out): frame.write.mode("overwrite").parquet(at),
        }
        for action, act in actions.items():
            timer.rotate(
                {f"{size}; {action}; {name}": lambda act=act, frame=frame: act(frame()) for name, frame in frames.items()}
            )
        count = spark.read.format("qewqew").load(leased_at).count()
        assert count == len(lines), f"{count} of {len(lines)} records were read"
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def hand_overs(folder: Path, whole: bool = False) -> dict[str, Callable[[SparkSession], object]]:
    """The cases; what they read is in the folder. ``whole``: each is all that its process does."""
    out = str(folder / "out")

    def save(frame: DataFrame) -> None:
        frame.write.mode("overwrite").parquet(out)

    def leased(commits: int, process: Callable[[SparkSession, str], object], spark: SparkSession) -> None:
        """The batch is put back each time: a record is staged once and handed over often."""
        with Queue(folder / f"q-{commits}", sync="never") as queue:
            batch = queue.lease("benchmark")
            assert batch is not None
            process(spark, os.path.dirname(batch.manifest_path))
            batch.put_back()

    def typed(spark: SparkSession, at: str) -> None:
        save(spark.read.format("qewqew").option("codec", "json").schema(SCHEMA).load(at))

    def from_json(spark: SparkSession, at: str) -> None:
        record = F.from_json(F.col("value").cast("string"), SCHEMA).alias("record")
        save(spark.read.format("qewqew").load(at).select(record).select("record.*"))

    def ready_made(spark: SparkSession, at: str) -> None:
        output = Output(out + "-job")
        if not whole:
            job.run(spark, at, [output], schema=SCHEMA)
        elif job.main([at, "--schema", SCHEMA, "--output", json.dumps({"path": output.path})]):  # which stops Spark, too
            raise SystemExit(1)

    def landed(files: int, inferred: bool, spark: SparkSession) -> None:
        read = spark.read if inferred else spark.read.schema(SCHEMA)
        save(read.json(str(folder / f"landing-{files}")))

    found: dict[str, Callable[[SparkSession], object]] = {
        f"queue, {commits:,} commits, typed read": partial(leased, commits, typed) for commits in COMMITS
    }
    found[f"queue, {COMMITS[-1]:,} commits, `value` and `from_json`"] = partial(leased, COMMITS[-1], from_json)
    found[f"queue, {COMMITS[-1]:,} commits, the job"] = partial(leased, COMMITS[-1], ready_made)
    found |= {f"{files:,} files, the schema given": partial(landed, files, False) for files in FILES}
    return found | {f"{files:,} files, the schema inferred": partial(landed, files, True) for files in FILES[:2]}


def measure(folder: Path, count: int, repeats: int, tell: Callable[[str], object]) -> Results:
    lines = list(records(count, 90))
    for files in FILES:
        write_lines(folder / f"landing-{files}", lines, files)
    for commits in COMMITS:
        stage(folder / f"q-{commits}", lines, commits).close()
    results: Results = {}
    cases = hand_overs(folder)
    spark = session()
    Timer(results, repeats).rotate({f"warm; {name}": partial(act, spark) for name, act in cases.items()})
    rows = spark.read.parquet(str(folder / "out-job")).count()
    assert rows == count, f"{rows} of {count} records arrived"
    spark.stop()
    tell("warm: done")
    for turn in range(repeats):
        names = list(cases)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.spark", "--case", name, "--directory", str(folder)]
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)  # noqa: S603
            results.setdefault(f"whole; {name}", []).append(time.perf_counter() - began)
        tell(f"whole processes: {turn + 1} of {repeats}")
    return results


def session() -> SparkSession:
    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def table(results: dict[str, Any]) -> str:
    """Of each case how long it took, and how many times as long as the typed read with as many commits as it has files."""
    samples: Results = results["samples"]
    rows = []
    for name in hand_overs(Path()):
        row = [f"**{name}**" if "typed" in name else name]
        commits = next((count for count in COMMITS if re.search(rf"(?<![\d,]){count:,} ", name)), COMMITS[-1])
        for how in "warm", "whole":
            seconds, ours = samples[f"{how}; {name}"], samples[f"{how}; queue, {commits:,} commits, typed read"]
            ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, ours, strict=True))
            row += [f"{statistics.median(seconds):.1f} s", "1" if seconds is ours else f"{ratio:.2f}"]
        rows.append(row)
    from benchmarks import report  # late: what a case runs in a process of its own does not need it

    return report.table(["", "warm session", "beside ours", "whole process", "beside ours"], rows)


def told(results: dict[str, Any]) -> str:
    machine, plan = results["machine"], results["plan"]
    return (
        f"{table(results)}\n\nMeasured on {results['date']}: {plan['records']:,} records, {plan['repeats']} turns, `local[2]` on "
        f"{machine['processor']}, {machine['memory']}; Spark {machine['pyspark']}, pyarrow {machine['pyarrow']}, "
        f"Python {machine['Python']}."
    )


def show(results: Results, repeats: int) -> None:
    median = {name: statistics.median(samples) for name, samples in results.items()}
    groups: dict[str, dict[str, float]] = {}
    for name, value in median.items():
        group, _, case = name.rpartition("; ")
        groups.setdefault(group, {})[case] = value
    for group, cases in groups.items():
        ours = [name for name in cases if name.startswith("q")]
        print(f"{group}; median of {repeats}, and how many times longer it took than ours")
        for name, value in cases.items():
            ratios = ", ".join(f"{value / cases[mine]:5.2f} × {mine}" for mine in ours if mine != name)
            print(f"  {name:36} {value:7.3f} s   {'' if name in ours else ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the samples; the document is left as it is then")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the table of the samples that are kept")
    parser.add_argument("--directory", help="where to write (default: the system's directory for temporary files)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=1_000_000, help="that are handed over")
    parser.add_argument("--reading", action="store_true", help="measure reads alone, and keep nothing")
    parser.add_argument("--mebibytes", type=int, default=128, help="of JSON for each size of record, with --reading")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else the workers take python3 from PATH
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if arguments.case:
        spark = session()
        hand_overs(Path(arguments.directory), whole=True)[arguments.case](spark)
        spark.stop()
        return
    from benchmarks import report

    kept: Path = arguments.json or KEPT
    if not arguments.draw:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            # The modules of a package that pip has installed are compiled; those of a checkout shall be, too.
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
            if arguments.reading:
                results: Results = {}
                reading(session(), Path(folder), arguments.mebibytes, Timer(results, arguments.repeats))
                show(results, arguments.repeats)
                return
            from benchmarks.machine import describe

            machine = describe(folder) | {name: version(name) for name in ("pyspark", "pyarrow")}
            samples = measure(Path(folder), arguments.records, arguments.repeats, partial(print, file=sys.stderr, flush=True))
        plan = {"records": arguments.records, "repeats": arguments.repeats}
        samples = {name: [round(seconds, 3) for seconds in found] for name, found in samples.items()}
        report.keep(kept, machine, plan, samples)
    report.publish(kept, ROOT / "docs/benchmarks.md" if kept == KEPT else None, PART, told)


if __name__ == "__main__":
    main()
