"""A small pipeline, once with plain files and once with QewQew, whose processes are killed at the same places (SIGKILL).

Twelve tasks store a page of records each, and a job of Spark loads what is there. One task is killed after it has stored its
page, and the job after it has written the table. Both are run again, as Airflow does: the job at once, the task later. Then the
job runs once more. What is in the two tables is counted without QewQew and Spark.

The plain pipeline is a careful one: a task that runs again replaces its own file, which gets its name when it is whole, and the
job moves the files away when it has written them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset
from rich.console import Console
from rich.table import Table

PAGES, RECORDS = 12, 500
LATE = 3  # the page whose task is killed
STOP_AT = "QEWQEW_DEMO_STOP_AT"  # where a process waits to be killed
STORED, WRITTEN = "has stored its page", "has written the table"
SCHEMA = "id BIGINT, page INT"


# ------------------------------------------------------------------------------- the two pipelines, each step a process


def at(place: str) -> None:
    if os.environ.get(STOP_AT) == place:
        print(place, flush=True)
        signal.pause()


def page(number: int) -> list[bytes]:
    return [json.dumps({"id": number * RECORDS + each, "page": number}).encode() for each in range(RECORDS)]


def store_as_file(home: Path, number: int) -> None:
    landing = home / "landing"
    (landing / f".{number}").write_bytes(b"".join(record + b"\n" for record in page(number)))
    (landing / f".{number}").rename(landing / f"page-{number:02}.jsonl")
    at(STORED)


def store_in_queue(home: Path, number: int) -> None:
    from qewqew_core import Stage

    with Stage(home / "queue") as stage:
        stage.put_many(page(number))
        stage.commit(f"page {number}")
    at(STORED)


def load_files(home: Path, _: int) -> None:
    files = sorted((home / "landing").glob("*.jsonl"))
    if files:
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        spark.read.schema(SCHEMA).json([*map(str, files)]).write.mode("append").parquet(str(home / "table"))
        at(WRITTEN)
        for file in files:
            file.rename(home / "loaded" / file.name)


def load_queue(home: Path, run: int) -> None:
    from qewqew_core import Queue

    with Queue(home / "queue") as queue:
        batch = queue.lease(f"run {run}")
    if batch is not None:
        from pyspark.sql import SparkSession

        from qewqew_spark.jobs import batch as job
        from qewqew_spark.jobs.output import Output

        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        job.run(spark, batch.manifest_path, [Output(str(home / "table"))], schema=SCHEMA)
        at(WRITTEN)
        with Queue(home / "queue") as queue:
            queue.batch(batch.id).ack()


STEPS = {step.__name__: step for step in (store_as_file, store_in_queue, load_files, load_queue)}


# --------------------------------------------------------------------------------------------------- who runs and kills


def run(step: str, home: Path, number: int, kill_at: str | None = None) -> None:
    """Run a step in a process of its own, which is killed there."""
    command = [sys.executable, "-m", "demo.kills", "--step", step, str(home), str(number)]
    environment = os.environ | {STOP_AT: kill_at or ""}
    with (home / "log").open("ab") as log:
        with subprocess.Popen(  # noqa: S603  (ourselves)
            command, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
        ) as process:
            assert process.stdout is not None
            if any(line.strip() == kill_at for line in process.stdout):
                os.killpg(process.pid, signal.SIGKILL)  # with Spark's JVM and its Python
        if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
            raise SystemExit(f"{step} ended with {process.returncode}: {(home / 'log').read_text()[-2000:]}")


def pipeline(home: Path, store: str, load: str, console: Console) -> dict[str, int]:
    """Run all of it; returns what is in the table."""
    for name in ("landing", "loaded"):
        (home / name).mkdir(parents=True)

    def tell(what: str) -> None:
        console.print(f"  {what}", highlight=False, soft_wrap=True)

    for number in range(PAGES):
        run(store, home, number, STORED if number == LATE else None)
    tell(f"{PAGES} tasks store {RECORDS} records each; that of page {LATE} [red]is killed[/red] after it {STORED}")
    run(load, home, 1, WRITTEN)
    tell(f"the job of Spark [red]is killed[/red] after it {WRITTEN}")
    run(load, home, 1)
    tell("the job runs again")
    run(store, home, LATE)
    tell(f"the task of page {LATE} runs again")
    run(load, home, 2)
    tell("the next run of the job")
    ids = pyarrow.dataset.dataset(home / "table", partitioning="hive").to_table(columns=["id"])["id"]
    return {"produced": PAGES * RECORDS, "rows": len(ids), "ids": len(ids.unique())}


def table_of(found: dict[str, dict[str, int]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in found:
        table.add_column(title, justify="right")
    for name, what in (("produced", "records that the tasks produced"), ("rows", "count(*)"), ("ids", "count(DISTINCT id)")):
        table.add_row(what, *(f"{each[name]:,}" for each in found.values()))
    table.add_row("too many, or lost", *(f"{each['rows'] - each['produced']:+,}" for each in found.values()))
    return table


def moving(picture: str) -> str:
    """The picture of a terminal with lines that appear one after the other."""
    lines = sorted({float(y) for y in re.findall(r'<text [^>]*? y="([0-9.]+)"', picture)})[1:]  # the first is the title

    def later(text: re.Match[str]) -> str:
        if (y := float(text[1])) not in lines:
            return text[0]
        return text[0] + f' style="animation: appear 1ms {lines.index(y):.0f}s both"'

    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)  # nothing is loaded from the network
    picture = re.sub(r'<text [^>]*? y="([0-9.]+)"', later, picture)
    return picture.replace("<style>", "<style>@keyframes appear { from { opacity: 0 } }\n", 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run demo --kill", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, everything else on stderr")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write what was printed as a picture, a line after the other")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.umask(0o077)
    if options.step:
        step, home, number = options.step
        STEPS[step](Path(home), int(number))
        return 0
    console = Console(stderr=options.json, record=options.svg is not None)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="qewqew-demo-") as name:
        for title, store, load in (("plain files", "store_as_file", "load_files"), ("QewQew", "store_in_queue", "load_queue")):
            console.print(f"[bold]{title}[/bold]", highlight=False)
            found[title] = pipeline(Path(name, store), store, load, console)
    console.print()
    console.print(table_of(found))
    if options.svg is not None:
        options.svg.write_text(moving(console.export_svg(title="./run demo --kill")))
    if options.json:
        print(json.dumps(found))
    return 0 if found["QewQew"] == {"produced": PAGES * RECORDS, "rows": PAGES * RECORDS, "ids": PAGES * RECORDS} else 1


if __name__ == "__main__":
    sys.exit(main())
