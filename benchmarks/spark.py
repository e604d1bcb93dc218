"""Batches in Spark against what Spark reads by itself, in one warm session: python benchmarks/spark.py

Options: --json (every sample), --directory, --repeats, --mebibytes (of JSON for the first part), --records (for the second).

First, reading: the same JSON records of about 100 B and 1 KiB as a batch, as two files of lines, and as Parquet with typed
columns; each is counted, read into the `noop` sink, and written as Parquet. Then a hand-over from end to end: records of about
200 B that were staged become typed Parquet, from a queue (lease, read, acknowledge), by the ready-made job, and from landing
directories with one file for each producer. The cases take turns, the first turn is thrown away, figures are medians; a ratio
above 1 says how many times longer the other one took. Everything is in the cache of the file system.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from qewqew_core import Queue
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs.output import Output

SCHEMA = "id BIGINT, at TIMESTAMP, carrier STRING, origin STRING, delay DOUBLE, seats INT, note STRING"
SIZES = {"100 B": 0, "1 KiB": 920}  # of a record, and of its note
FILES = (12, 1_000, 10_000)
SEED = 1

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


def stage(path: Path, lines: list[bytes]) -> Queue:
    queue = Queue(path, sync="never")
    for at in range(0, len(lines), 1_000):
        queue.put_many(lines[at : at + 1_000])
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
        with stage(folder / "q", lines) as queue:
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


def hand_over(spark: SparkSession, folder: Path, count: int, timer: Timer) -> None:
    lines = list(records(count, 90))
    landing = {files: folder / f"landing-{files}" for files in FILES}
    for files, directory in landing.items():
        write_lines(directory, lines, files)
    queue = stage(folder / "q", lines)
    out = str(folder / "out")

    def leased(process: Callable[[str], object]) -> None:
        """The batch is put back each time: a record is staged once and handed over often."""
        batch = queue.lease("benchmark")
        assert batch is not None
        process(os.path.dirname(batch.manifest_path))
        batch.put_back()

    def source(at: str) -> None:
        frame = spark.read.format("qewqew").option("codec", "json").schema(SCHEMA).load(at)
        frame.write.mode("overwrite").parquet(out)

    def ready_made(at: str) -> None:
        job.run(spark, at, [Output(out + "-job")], schema=SCHEMA)

    with queue:
        timer.rotate(
            {
                "hand-over; queue, data source": lambda: leased(source),
                "hand-over; queue, batch job": lambda: leased(ready_made),
                **{
                    f"hand-over; landing directory, {files:,} files": lambda at=str(at): (
                        spark.read.schema(SCHEMA).json(at).write.mode("overwrite").parquet(out)
                    )
                    for files, at in landing.items()
                },
            }
        )
    rows = spark.read.parquet(out + "-job").count()
    assert rows == count, f"{rows} of {count} records arrived"


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
            ratios = ", ".join(f"{value / cases[one]:5.2f} × {one}" for one in ours if one != name)
            print(f"  {name:36} {value:7.3f} s   {'' if name in ours else ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print every sample as JSON")
    parser.add_argument("--directory", default=None, help="where to write (default: the system's directory for temporary files)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=128, help="of JSON for each size of record")
    parser.add_argument("--records", type=int, default=1_000_000, help="that are handed over")
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else the workers take python3 from PATH
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    results: Results = {}
    timer = Timer(results, arguments.repeats)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        reading(spark, Path(folder), arguments.mebibytes, timer)
        hand_over(spark, Path(folder), arguments.records, timer)
    spark.stop()
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results, arguments.repeats)


if __name__ == "__main__":
    main()
