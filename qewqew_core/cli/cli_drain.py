"""The command that starts the drain: drain. See docs/spark/drain.md. It imports nothing of Spark, which runs in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from typing import Annotated, Any

import typer

from qewqew_core.batch.store import store_of
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import Json, pairs
from qewqew_core.cli.texts import counted
from qewqew_core.references import refuse_in_clear
from qewqew_core.secrecy import hide
from qewqew_core.tools.spark import check_java, find_spark_submit, ready_made_job

PASSED_ON = (terminal.USAGE, 3)  # of the job's exit codes; 3: batches are damaged
RESULT, ERROR, SAID = "qewqew result: ", "qewqew: error: ", "qewqew: "  # what the job's lines begin with
LAST = 20  # lines of Spark that are shown if it fails and the job does not say why

app = typer.Typer()


@app.command(rich_help_panel="Batches")
def drain(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="The directory or URL under which batches are published.", show_default=False)
    ],
    output: Annotated[str, typer.Option(metavar="JSON", help='The table: {"table" or "path": …, "format": …, …}.')],
    schema: Annotated[str | None, typer.Option(metavar="DDL", help="Of the records; by default inferred from JSON.")] = None,
    codec: Annotated[str | None, typer.Option(help="What the records are; JSON by default.")] = None,
    read_option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of codec or store.")] = None,
    quarantine: Annotated[str | None, typer.Option(metavar="PATH", help="Where records go that do not decode.")] = None,
    max_bad_records: Annotated[int | None, typer.Option(min=0, help="Fail if more do not decode.")] = None,
    schema_evolution: Annotated[
        str | None, typer.Option(metavar="POLICY", help="When columns are new or missing: merge, fail, ignore or rescue.")
    ] = None,
    rescued: Annotated[str | None, typer.Option(metavar="COLUMN", help="For what the schema does not name, as JSON.")] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help='A setting of Spark. Others can see it: give a secret as {"env": "NAME"} or {"file": "PATH"}.',
        ),
    ] = None,
    spark: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of spark-submit, such as --master.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Append all batches under PREFIX to a table of Iceberg or Delta, in one commit, and remove them; for cron.

    It needs Java and a spark-submit, on PATH or beside this Python. The exit code is 3 if some batches are damaged: these stay,
    and all others are committed.
    """
    store_of(prefix)
    refuse_in_clear("--conf", pairs("--conf", conf))
    refuse_in_clear("--", {f"argument {number}": text for number, text in enumerate(spark or (), 1)}, "name a file that has it")
    if spark and not spark[0].startswith("-"):
        raise typer.BadParameter(f"unexpected argument {spark[0]!r}; options of spark-submit come after --")
    job = ready_made_job("drain.py")
    submit = find_spark_submit("spark-submit", os.environ)
    check_java(os.environ)
    options = {
        "--output": output,
        "--schema": schema,
        "--codec": codec,
        "--quarantine": quarantine,
        "--max-bad-records": max_bad_records,
        "--schema-evolution": schema_evolution,
        "--rescued": rescued,
    }
    command = [submit, *_each("--conf", conf), *(spark or ()), job, prefix, *_each("--read-option", read_option)]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    status, result = _run(command)
    if result is not None:
        terminal.answer(as_json, result, _told(result))
    elif not status and not as_json:
        terminal.say("done; the driver has the result")
    if status:
        raise typer.Exit(status if status in PASSED_ON else terminal.FAILED)


def _each(option: str, values: list[str] | None) -> list[str]:
    return [word for value in values or () for word in (option, value)]


def _run(command: list[str]) -> tuple[int, dict[str, Any] | None]:
    """Run spark-submit; returns its exit status, and the job's result if it has one. What the job says for people is passed on at
    once; what Spark says, only if it fails and the job does not say why.
    """
    result, explained, last = None, False, deque[str](maxlen=LAST)
    process = subprocess.Popen(  # noqa: S603 - what the user asks for
        command,
        env={"PYSPARK_PYTHON": sys.executable, **os.environ},
        umask=0o077,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            if line.startswith(RESULT):
                result = json.loads(line.removeprefix(RESULT))
            elif line.startswith(SAID):
                explained |= line.startswith(ERROR)
                terminal.say(line.removeprefix(SAID))
            else:
                last.append(line)
    if process.returncode and not explained:
        for line in last:
            terminal.say(hide(line))
        terminal.say(f"spark-submit failed, with exit status {process.returncode}")
    return process.returncode, result


def _told(result: dict[str, Any]) -> str:
    batches = counted(len(result["batches"]), "batch", "batches")
    left = f"; {result['left']:,} wait for the next drain" if result["left"] else ""
    return f"{batches} with {counted(result['read'], 'record')} committed{left}"
