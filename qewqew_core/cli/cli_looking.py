"""The commands that look at what is there: ls, stat, top. See docs/cli.md."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import datetime
from itertools import chain
from typing import Annotated, Any

import typer
from rich.live import Live

from qewqew_core import arguments
from qewqew_core.batch.stats import STATES, QueueStats, counts, of_batches
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import Json, Path, QueuePath, existing
from qewqew_core.cli.texts import age, counted, iso, said, sized
from qewqew_core.disk import lock
from qewqew_core.disk.files import DISK, look_into
from qewqew_core.disk.opening import opening
from qewqew_core.errors import QewQewError
from qewqew_core.limits import now_ms
from qewqew_core.queue.inspection import inspect_state, key_status
from qewqew_core.secrecy import hide
from qewqew_core.tools import listing
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.monitoring import MOST
from qewqew_core.topic import reader_files, topic_paths
from qewqew_core.topic.reader_state import ReaderState
from qewqew_core.topic.topic_inspection import TopicStats, inspect_topic

app = typer.Typer()


def _look(path: str, kind: Kind) -> dict[str, Any]:
    """What a queue or topic holds as of its last commit; nothing is locked."""
    more: dict[str, Any] = {}
    if kind is Kind.QUEUE:
        held, _ = inspect_state(path, closely=True)
    else:
        stats, readers = inspect_topic(path, closely=True)
        sizes = stats.messages, stats.bytes, stats.blocks, stats.oldest
        full = os.path.abspath(path)
        with opening(full, "topic"):
            files = look_into(full, full)
            gone = [reader_files.without_files(files, topic_paths.stem_of(full, name), state) for name, state in readers.items()]
        batches = of_batches(readers.values(), DISK.boot())
        held = QueueStats(*sizes, on_disk=stats.on_disk, missing=sum(map(len, gone)), **batches)
        lag = max(stats.readers.values(), default=None)
        more = {"newest": stats.newest, "first": stats.first, "next": stats.next, "lag": lag}
        more["readers"] = readers_json(stats, readers)
        if stats.strange:
            more["error"] = hide("; ".join(f"reader {name}: {said(error)}" for name, error in stats.strange.items()))
    found = dataclasses.asdict(held)
    found |= {"files": found.pop("chunks"), **more}
    del found["oldest_unacknowledged"]  # of a topic, each reader has its own: `check` and `metrics` have it
    return {name: iso(value) if isinstance(value, datetime) else value for name, value in found.items()}


def readers_json(stats: TopicStats, readers: dict[str, ReaderState]) -> list[dict[str, Any]]:
    """The readers of a topic, as `inspect_topic` has found them; of one that cannot be read, what is wrong."""
    rows: list[dict[str, Any]] = [{"reader": name, "error": hide(said(error))} for name, error in stats.strange.items()]
    for name, state in readers.items():
        row = {"reader": name, "filter": state.filter, "lag": stats.readers[name]}
        rows.append({**row, "in_flight": len(state.in_flight), "lost": state.lost, **counts(state, DISK.boot())})
    return rows


def print_readers(rows: list[dict[str, Any]]) -> None:
    columns = ["reader", "filter", "lag", "in flight", "lost", *STATES]
    cells = [
        [row["reader"], row["filter"] or "", *(f"{row[name.replace(' ', '_')]:,}" for name in columns[2:])]
        for row in rows
        if "error" not in row
    ]
    cells += [[row["reader"], row["error"], *["?"] * len(columns[2:])] for row in rows if "error" in row]
    terminal.print_table(columns, cells, numbers=tuple(columns[2:]))


def _rows(found: Iterable[tuple[str, str]]) -> tuple[list[dict[str, Any]], int]:
    """What is there, given what it is to be called and its path: each with its error; and the exit code of the worst one."""
    rows: list[dict[str, Any]] = []
    worst = 0
    for name, path in found:
        row: dict[str, Any] = {"path": hide(name), "kind": None}
        try:
            row["kind"] = existing(path)
            row |= _look(path, row["kind"])
        except (QewQewError, OSError) as error:
            row["error"] = hide(said(error))
            worst = max(worst, terminal.exit_code(error))
        else:
            worst = max(worst, terminal.FAILED if "error" in row else 0)
        rows.append(row)
    return rows, worst


def _table(rows: list[dict[str, Any]], *more: str) -> tuple[list[str], list[list[str]], tuple[str, ...]]:
    """Columns, cells, and which of the columns are numbers. ``more``: other columns, of numbers."""
    columns = ["path", "kind", "records", "bytes", "oldest", "lag", *STATES, "on disk", *more]
    if any("error" in row for row in rows):
        columns.append("error")
    return (
        columns,
        [[_cell(row, name) for name in columns] for row in rows],
        ("records", "bytes", "lag", *STATES, "on disk", *more),
    )


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name.replace(" ", "_"))
    if "error" in row and name.replace(" ", "_") not in row:
        return "?"
    if value is None or isinstance(value, str):
        return age(datetime.fromisoformat(value)) if value and name == "oldest" else value or ""
    return sized(value) if name in ("bytes", "on disk") else f"{value:+,.1f}" if name == "per second" else f"{value:,}"


@app.command(rich_help_panel="Looking")
def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="DIRECTORY", help="Directories, or single queues and topics.", show_default=".")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the queues and topics in directories and below, without locking them.

    Something that cannot be read has its error in the list, which sets the exit code.
    """
    rows, worst = _rows((path, path) for path in chain.from_iterable(map(_in, paths or ["."])))
    none = "no queues or topics here (an empty closed queue leaves no files)"
    terminal.answer_list(as_json, rows, dict, lambda rows: terminal.print_table(*_table(rows)), none)
    raise typer.Exit(worst)


def _in(path: str) -> list[str]:
    """The queues and topics in a directory and below it; any other path as it is."""
    if not os.path.isdir(path) or listing.kind_of(path) is not None:
        return [path]
    found = listing.find(path, MOST)
    if not found.complete:
        terminal.say(f"not everything below {path} is shown")
    names = sorted([*found.queues, *found.topics, *found.unreadable])
    return [name if path == "." else os.path.join(path, name) for name in names]


@app.command("stat", rich_help_panel="Looking")
def stat_command(path: Path, as_json: Json = False) -> None:
    """Show what a queue or topic holds, and the readers of a topic, without locking it."""
    kind = existing(path)
    found = _look(path, kind)
    full = os.path.abspath(path)
    owner = lock.holder(full if kind is Kind.QUEUE else topic_paths.lock_of(full))
    code = terminal.FAILED if "error" in found else 0
    if as_json:
        terminal.print_json({"path": path, "kind": kind} | found | {"owner": owner})
        raise typer.Exit(code)
    numbers = f" ({found['first']:,} to {found['next'] - 1:,})" if kind is Kind.TOPIC and found["records"] else ""
    rows = {
        kind.value: path,
        "records": f"{found['records']:,}{numbers}",
        "bytes": f"{found['bytes']:,} ({sized(found['bytes'])})",
    }
    rows["files"] = f"{found['files']:,}"
    for name in ("oldest", "newest") if kind is Kind.TOPIC else ("oldest",):
        rows[name] = f"{found[name]} ({age(datetime.fromisoformat(found[name]))})" if found[name] else "none"
    rows |= {name: counted(found[name], "batch", "batches") for name in STATES}
    if found["delayed"]:
        rows["returned"] += f", {found['delayed']:,} not due yet: the first in {age(datetime.fromisoformat(found['next_due']))}"
    rows["on disk"] = f"{found['on_disk']:,} ({sized(found['on_disk'])})"
    rows["locked by"] = f"process {owner}" if owner else "no process that you can see"
    terminal.print_table([], [[name, text] for name, text in rows.items()])
    if found.get("readers"):
        print_readers(found["readers"])
    raise typer.Exit(code)


@app.command("key-status", rich_help_panel="Looking")
def key_status_command(
    path: QueuePath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of the commit.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Tell whether what was put under a key is stored, without locking the queue: "stored", "not stored" or "not yet".

    "not yet": a stage still waits to store the records of the key, or another process has taken them along, to store them with
    its own, and has not said whether it has. That process may have been stopped or killed: put the records again under the same
    key, and they are stored once.
    """
    existing(path, Kind.QUEUE, "append to the topic again under the same key, and the messages are stored once")
    status = key_status(path, key)
    terminal.answer(as_json, {"path": path, "key": key, "status": status}, status)


@app.command(rich_help_panel="Looking")
def top(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Watch this directory and its subdirectories.")] = ".",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, then exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each update.")] = False,
) -> None:
    """Watch the queues and topics below a directory until Ctrl-C, without locking them.

    "per second" is how fast the records of a queue grow or shrink, and how many messages are appended to a topic.
    """
    before: dict[str, int] = {}
    began = 0.0
    live = Live(auto_refresh=False, screen=True)
    table = live.console.is_terminal and not as_json and not once
    try:
        with live if table else nullcontext():
            while True:
                now = time.monotonic()
                found = listing.find(directory)
                names = (*found.queues, *found.topics, *found.unreadable)
                rows, _ = _rows((name, os.path.join(directory, name)) for name in names)
                for row in rows:
                    count, old = row.get("next", row.get("records")), before.get(row["path"])
                    row["per_second"] = None if count is None or old is None else round((count - old) / (now - began), 1)
                    if count is not None:
                        before[row["path"]] = count
                began = now
                if as_json:
                    terminal.print_json({"time": iso(arguments.moment(now_ms())), "complete": found.complete, "found": rows})
                elif table:
                    live.update(terminal.table_of(*_table(rows, "per second")), refresh=True)
                else:
                    terminal.print_table(*_table(rows, "per second"))
                if once:
                    break
                time.sleep(max(0.0, interval - (time.monotonic() - now)))
    except KeyboardInterrupt:
        raise typer.Exit(terminal.INTERRUPTED) from None
    if not found.complete:
        terminal.say(f"not everything below {directory} is shown")
