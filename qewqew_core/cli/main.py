"""The command ``qewqew``: put, get and look at queues, find and mend damage. Other commands: cli_*.py; see docs/cli.md."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    sys.exit(f"qewqew: the command line needs {missing.name}, which is not installed: pip install 'qewqew[cli]'")

from qewqew_core.batch import places
from qewqew_core.batch.reports import Damage, RepairReport, Report
from qewqew_core.batch.stats import QueueStats
from qewqew_core.cli import cli_batches, cli_files, cli_live, cli_readers, cli_topic
from qewqew_core.cli.terminal import (
    COMMIT_BYTES,
    COMMIT_RECORDS,
    DAMAGED,
    EPILOG,
    MOST,
    POLL_SECONDS,
    Commands,
    File,
    Json,
    JsonLines,
    Lines,
    LockTimeout,
    Null,
    NullIn,
    OrphanFiles,
    QueuePath,
    Sync,
    Timeout,
    Whole,
    Yes,
    age,
    ask,
    check_input,
    counted,
    do_each,
    existing_queue,
    exists,
    groups,
    iso,
    looked_at,
    nothing,
    print_json,
    print_line,
    print_records,
    print_table,
    progress_bar,
    records_of,
    say,
    sized,
    sync_output,
    uninterrupted,
)
from qewqew_core.disk import lock
from qewqew_core.errors import BadManifest, Corrupt, Empty
from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.queue.inspection import inspect
from qewqew_core.queue.orphans import Orphan
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.repairing import repair as repair_queue
from qewqew_core.tools.listing import queues_in

app = typer.Typer(
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
orphans_app = typer.Typer(
    no_args_is_help=True,
    help="Chunk files beside a queue that nothing refers to: look at their records, and adopt them or set them aside.",
)
app.add_typer(orphans_app, name="orphans", rich_help_panel="Damage")
app.add_typer(cli_batches.app)
app.add_typer(cli_files.app)
app.add_typer(cli_live.app)
cli_topic.app.add_typer(cli_readers.app, name="readers")
app.add_typer(cli_topic.app, name="topic", rich_help_panel="Topics")


def main() -> None:
    """The entry point of ``qewqew``."""
    # Python has None for a stream whose descriptor is closed.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the process is
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit("qewqew: standard output is closed")
    app(prog_name="qewqew")


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"qewqew {importlib.metadata.version('qewqew')}")
        raise typer.Exit


@app.callback(help="Durable local queues in chunk files. QUEUE is the path of a queue, for example data/orders.qew.")
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# Records


@app.command(rich_help_panel="Records")
def put(
    path: QueuePath,
    records: Annotated[
        list[str] | None, typer.Argument(metavar="RECORD", help="The records; without any, they are read from --file.")
    ] = None,
    file: File = None,
    lines: Lines = False,
    null: NullIn = False,
    whole: Whole = False,
    key: Annotated[
        str | None, typer.Option(help="Put all records in ONE commit, and only if this key was not used before.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=MOST, help="Records in one commit, which happens whole or not at all.")
    ] = 1000,
    chunk_size: Annotated[int, typer.Option(help="Bytes of each new chunk file.")] = 16 << 20,
    sync: Annotated[Sync, typer.Option(help="Durable with each commit, or only when the queue is closed.")] = Sync.commit,
    max_records: Annotated[int | None, typer.Option(help="Exit with 6 rather than have more records wait in the queue.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Exit with 6 rather than have more bytes of records wait in the queue.")
    ] = None,
    min_free_bytes: Annotated[int, typer.Option(help="Exit with 6 rather than leave less free on the file system.")] = 0,
    log_bytes: Annotated[int, typer.Option(help="Bytes by which the log grows before it is cut back.")] = 4 << 20,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put records into a queue, which is made if it is not there.

    When it returns, they are durable. Standard input is read as it comes, and the queue is locked from the first commit
    to the end of the input.
    """
    check_input(records, file, lines, null, whole)
    paths.check_path(path)
    stored, repeated = 0, False
    with contextlib.ExitStack() as stack:
        source = records_of(stack, records, file, null, whole, "putting", chunk.MAX_RECORD)
        commits = groups(source, sys.maxsize if key is not None else batch_size)
        first = next(commits, [])  # the queue is locked only once there is something to put
        queue = stack.enter_context(
            Queue(
                path,
                chunk_size=chunk_size,
                sync=sync.value,
                lock_timeout=lock_timeout,
                max_records=max_records,
                max_bytes=max_bytes,
                min_free_bytes=min_free_bytes,
                log_bytes=log_bytes,
            )
        )
        before = len(queue)
        try:
            for commit in chain([first], commits):
                with uninterrupted():
                    stored += queue.put_many(commit, key)
        except BaseException:
            if stored:
                say(f"{counted(stored, 'record')} had been put before this, and stay")
            raise
        repeated = len(queue) == before and stored > 0
    if as_json:
        print_json({"queue": path, "records": stored, "repeated": repeated})
    elif repeated:
        print_line(f"nothing to do: {counted(stored, 'record')} put under this key before")
    else:
        print_line(f"{counted(stored, 'record')} put")


@app.command(rich_help_panel="Records")
def get(
    path: QueuePath,
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, max=MOST, help="Take up to so many records; 1 by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Take all records.")] = False,
    timeout: Timeout = 0,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Take records off the front of a queue and print them.

    They are taken after they were written: when the output cannot be written, or get is killed, they stay. What it had
    printed of the last commit (up to 1,000 records) is then printed again by the next get.
    """
    if everything and number is not None:
        raise typer.BadParameter("--all and --number exclude each other")
    most = sys.maxsize if everything else number or 1
    deadline = time.monotonic() + timeout
    taken = 0
    while not taken:
        # The queue has one owner at a time: whoever waits for records must leave it to those who put them.
        while not inspect(path).records:
            if not time.monotonic() < deadline:
                raise nothing(path)
            time.sleep(POLL_SECONDS)
        with Queue(path, lock_timeout=lock_timeout) as queue, queue.session() as session:
            while taken < most and (records := session.get_many(min(most - taken, COMMIT_RECORDS), COMMIT_BYTES)):
                print_records(records, null, as_json)
                sync_output()
                with uninterrupted():
                    session.commit()
                taken += len(records)


@app.command(rich_help_panel="Records")
def peek(
    path: QueuePath,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print up to so many records.")] = 1,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a queue, which stay."""
    with existing_queue(path, lock_timeout) as queue:
        records = list(islice(queue, number))  # and give the queue back before somebody reads them in a pager
    if not records:
        raise nothing(path)
    print_records(records, null, as_json)


# Looking


@app.command(rich_help_panel="Looking")
def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="DIRECTORY", help="Directories, or single queues.", show_default=".")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the queues in directories, without locking them.

    A queue that cannot be read has its error in the list, and the exit code is that of the error.
    """

    def look(path: str) -> dict[str, Any]:
        if path in (paths or ()) and not exists(path):
            raise nothing(path)
        return _stats_json(path, inspect(path))

    found = chain.from_iterable(_queues_in(one) if os.path.isdir(one) else [one] for one in paths or ["."])
    rows, worst = looked_at("queue", found, look)
    if as_json:
        print_json(rows)
    elif rows:
        columns = ["queue", "records", "bytes", "oldest", "leased", "returned", "dead", "on disk", *["error"] * bool(worst)]
        print_table(
            columns, [_ls_row(row) for row in rows], numbers=("records", "bytes", "leased", "returned", "dead", "on disk")
        )
    else:
        say("no queues here (an empty closed queue leaves no files)")
    raise typer.Exit(worst)


def _ls_row(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["queue"], *["?"] * 7, row["error"]]
    oldest = "" if row["oldest"] is None else age(datetime.fromisoformat(row["oldest"]))
    counts = [f"{row[name]:,}" for name in ("leased", "returned", "dead")]
    return [row["queue"], f"{row['records']:,}", sized(row["bytes"]), oldest, *counts, sized(row["on_disk"])]


def _queues_in(directory: str) -> list[str]:
    found = queues_in(directory)
    return found if directory == "." else [os.path.join(directory, name) for name in found]


@app.command("stat", rich_help_panel="Looking")
def stat_command(path: QueuePath, as_json: Json = False) -> None:
    """Show what a queue holds, without locking it."""
    stats = inspect(path)
    if not exists(path):
        raise nothing(path)
    owner = lock.holder(paths.check_path(path))
    if as_json:
        print_json(_stats_json(path, stats) | {"owner": owner})
        return
    rows = [
        ("queue", path),
        ("records", f"{stats.records:,}"),
        ("bytes", f"{stats.bytes:,} ({sized(stats.bytes)})"),
        ("chunks", f"{stats.chunks:,}"),
        ("oldest", f"{iso(stats.oldest)} ({age(stats.oldest)})" if stats.oldest else "none"),
        ("leased", f"{counted(stats.leased, 'batch', 'batches')}"),
        ("returned", f"{counted(stats.returned, 'batch', 'batches')}"),
        ("dead", f"{counted(stats.dead, 'batch', 'batches')}"),
        ("on disk", f"{stats.on_disk:,} ({sized(stats.on_disk)})"),
        ("open in", f"process {owner}" if owner else "no process that can be seen"),
    ]
    print_table([], [list(row) for row in rows])


def _stats_json(path: str, stats: QueueStats) -> dict[str, Any]:
    return {"queue": path} | dataclasses.asdict(stats) | {"oldest": iso(stats.oldest), "last_lease": iso(stats.last_lease)}


@app.command(rich_help_panel="Damage")
def verify(path: QueuePath, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Read everything that a queue and its batches hold, and compare it with its checksums. Changes nothing.

    The queue is locked meanwhile. The exit code is 5 if there are problems.
    """
    with progress_bar("verifying") as progress:
        try:
            with existing_queue(path, lock_timeout) as queue:
                report = queue.verify(progress)
        except (Corrupt, BadManifest) as error:  # so bad that it cannot even be opened
            report = Report(problems=[str(error)])
    if as_json:
        print_json({"queue": path, "ok": report.ok} | dataclasses.asdict(report))
    else:
        for problem in report.problems:
            print_line(f"damage: {problem}")
        for orphan in report.orphans:
            print_line(f"nothing refers to it, see `qewqew orphans`: {orphan}")
        sums = [counted(report.files, "chunk"), counted(report.batches, "batch", "batches"), sized(report.bytes)]
        found = "no problems" if report.ok else counted(len(report.problems), "problem")
        print_line(f"{found}: {counted(report.records, 'record')} read and found right ({', '.join(sums)})")
    if not report.ok:
        say(f"`qewqew repair {path}` rescues what is whole")
        raise typer.Exit(DAMAGED)


@app.command(rich_help_panel="Damage")
def repair(path: QueuePath, yes: Yes = False, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Make a damaged queue one that opens, with every record that can be read and none that is wrong.

    What was damaged is moved to QUEUE.damaged, never deleted. Where nothing is wrong, nothing is changed. The exit code is 5
    if there was damage, also when it is mended now.
    """
    if not exists(path):
        raise nothing(path)
    if not yes:
        ask(f"Repair {path}? What is damaged is moved to {path}{places.DAMAGED}.")
    with Console(stderr=True).status("repairing") if sys.stderr.isatty() else contextlib.nullcontext():
        report = repair_queue(path, lock_timeout=lock_timeout)
    if as_json:
        print_json({"queue": path, "ok": report.ok} | dataclasses.asdict(report))
    else:
        _print_repair(report)
    if not report.ok:
        raise typer.Exit(DAMAGED)


def _print_repair(report: RepairReport) -> None:
    for one in report.damage:
        print_line(f"damage: {one.path}, offset {one.offset}, {counted(one.bytes or 0, 'byte')}: {one.what} ({_lost(one)})")
    for note in report.notes:
        print_line(f"note: {note}")
    if report.set_aside:
        print_line(f"set aside: {report.set_aside}")
    found = "mended" if report.damage else "nothing to repair"
    print_line(f"{found}: the queue holds {counted(report.records, 'record')}, and {counted(report.batches, 'batch', 'batches')}")


def _lost(damage: Damage) -> str:
    return "nobody can say how many records are lost" if damage.records is None else f"{counted(damage.records, 'record')} lost"


@orphans_app.command("list")
def orphans_list(path: QueuePath, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """List the chunk files that hold records, and that nothing refers to.

    They are never delivered. Nobody can say whether their records were taken long ago: look at them.
    """
    with existing_queue(path, lock_timeout) as queue:
        found = queue.orphans()
    if as_json:
        print_json([_orphan_json(one) for one in found])
    elif found:
        rows = [[os.path.basename(one.path), f"{one.records:,}", sized(one.bytes), one.problem or ""] for one in found]
        print_table(["file", "records", "bytes", "problem"], rows, numbers=("records", "bytes"))
    else:
        say("no orphans")


@orphans_app.command("show")
def orphans_show(
    path: QueuePath,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The chunk file, as listed.", show_default=False)],
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print up to so many records.")] = 10,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a chunk file that nothing refers to."""
    with existing_queue(path, lock_timeout) as queue:
        (orphan,) = _orphans(queue, [file])
    for records in groups(islice(orphan, number), COMMIT_RECORDS):
        print_records(records, null, as_json)


@orphans_app.command("adopt")
def orphans_adopt(path: QueuePath, files: OrphanFiles, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Append the records of such chunk files to the queue, and remove the files."""
    _end_orphans(path, files, lock_timeout, as_json, Queue.adopt, "appended to the queue")


@orphans_app.command("aside")
def orphans_aside(path: QueuePath, files: OrphanFiles, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Move such chunk files to QUEUE.damaged."""
    _end_orphans(path, files, lock_timeout, as_json, Queue.set_aside, "set aside")


def _end_orphans(
    path: str, names: list[str], lock_timeout: float, as_json: bool, act: Callable[[Queue, Orphan], object], done: str
) -> None:
    with existing_queue(path, lock_timeout) as queue:
        do_each(
            _orphans(queue, names),
            partial(act, queue),
            as_json,
            _orphan_json,
            lambda one: f"{os.path.basename(one.path)}: {counted(one.records, 'record')} {done}",
        )


def _orphans(queue: Queue, names: list[str]) -> list[Orphan]:
    """Those with these names: all are there, or nothing is done."""
    found = {os.path.basename(one.path): one for one in queue.orphans()}
    wanted = dict.fromkeys(map(os.path.basename, names))
    if missing := [name for name in wanted if name not in found]:
        raise Empty(f"no orphan is called {missing[0]!r}; `qewqew orphans list` names them", path=queue.path)
    return [found[name] for name in wanted]


def _orphan_json(orphan: Orphan) -> dict[str, Any]:
    return {"file": orphan.path, "records": orphan.records, "bytes": orphan.bytes, "problem": orphan.problem}
