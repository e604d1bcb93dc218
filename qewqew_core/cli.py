"""The command ``qewqew``: put, get and look at queues, end batches, find and mend damage. See docs/cli.md."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import importlib.metadata
import json
import os
import signal
import stat as modes
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import IO, Annotated, Any

try:
    import typer
    import typer.core
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(f"qewqew: the command line needs {missing.name}, which is not installed: pip install 'qewqew[cli]'")

from qewqew_core import chunk, layout, lock
from qewqew_core.batch import Batch
from qewqew_core.errors import (
    BadArgument,
    BadManifest,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    CorruptQueue,
    DiskFull,
    Empty,
    QewQewError,
    QueueFull,
    QueueLocked,
)
from qewqew_core.inspection import QueueStats, inspect
from qewqew_core.leasing import Leasing
from qewqew_core.listing import REMAINS, queues_in
from qewqew_core.orphans import Orphan
from qewqew_core.queue import Queue
from qewqew_core.reader import Reader
from qewqew_core.repairing import Damage, RepairReport
from qewqew_core.repairing import repair as repair_queue
from qewqew_core.topic import Topic
from qewqew_core.verification import Report

FAILED, USAGE, NOTHING, LOCKED, DAMAGED, FULL, INTERRUPTED, CLOSED_PIPE = 1, 2, 3, 4, 5, 6, 130, 141
EXIT_CODES: list[tuple[type[QewQewError], int]] = [
    (BadArgument, USAGE),
    (Empty, NOTHING),
    (BatchNotFound, NOTHING),
    (BatchExpired, NOTHING),
    (QueueLocked, LOCKED),
    (CorruptQueue, DAMAGED),
    (BadManifest, DAMAGED),
    (QueueFull, FULL),
    (DiskFull, FULL),
]
EPILOG = (
    "Exit codes: 0 done; 1 another error; 2 wrong usage; 3 nothing there (empty, or no such batch); 4 somebody else has the "
    "queue open; 5 damage; 6 queue or disk full; 130 interrupted; 141 the reader of the output went away."
)
HINT = "`{0} verify` looks for all damage, `{0} repair` rescues what is whole"
COMMIT_RECORDS, COMMIT_BYTES = 1000, 1 << 20  # what `get` takes in one commit
POLL_SECONDS = 0.1
BAR_BYTES = 4 << 20  # what is shorter needs no progress bar


class Commands(typer.core.TyperGroup):
    """Turns the errors that a user may meet into one message and an exit code. Others are bugs, and keep their traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Python would try to write the rest again when it exits, and complain.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(CLOSED_PIPE) from None
        except KeyboardInterrupt:
            _say("interrupted; what was not committed has not happened")
            raise typer.Exit(INTERRUPTED) from None
        except QewQewError as error:
            _say(f"{type(error).__name__}: {error}")
            if isinstance(error, (CorruptQueue, BadManifest)) and "qewqew repair" not in str(error):
                _say(" ".join(getattr(error, "__notes__", ())) or HINT.format("qewqew"))
            raise typer.Exit(_exit_code(error)) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _say(f"{type(error).__name__}: {where}{error.strerror or error}")
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
dead_app = typer.Typer(no_args_is_help=True, help="Batches that failed too often: look at them, return or drop them.")
orphans_app = typer.Typer(
    no_args_is_help=True,
    help="Chunk files beside a queue that nothing refers to: look at their records, and adopt them or set them aside.",
)
app.add_typer(dead_app, name="dead")
app.add_typer(orphans_app, name="orphans")


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
        _print(f"qewqew {importlib.metadata.version('qewqew')}")
        raise typer.Exit


@app.callback(help="Durable local queues in chunk files. QUEUE is the path of a queue, for example data/orders.qew.")
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class Sync(enum.StrEnum):
    commit = "commit"
    never = "never"


QueuePath = Annotated[str, typer.Argument(metavar="QUEUE", help="The path of the queue.", show_default=False)]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The id of the batch.", show_default=False)]
OrphanFiles = Annotated[list[str], typer.Argument(metavar="FILE", help="The chunk files, as listed.", show_default=False)]
BatchIds = Annotated[list[str], typer.Argument(metavar="ID", help="The ids of the batches.", show_default=False)]
LockTimeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for another owner of the queue.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
File = Annotated[
    str | None, typer.Option("--file", "-f", metavar="FILE", help="Read records from FILE; - is standard input, the default.")
]
Lines = Annotated[bool, typer.Option("--lines", help="Each line of the file is a record, without its newline (default).")]
NullIn = Annotated[bool, typer.Option("--null", "-0", help="Records of the file end with a NUL byte.")]
Whole = Annotated[bool, typer.Option("--whole", help="The whole file is one record.")]
ReaderName = Annotated[
    str | None, typer.Option("--reader", metavar="READER", help="QUEUE is a topic, and this its reader that has the batches.")
]
JsonLines = Annotated[bool, typer.Option("--json", help='Print one JSON object for each record: {"record": …} or {"base64": …}.')]
Null = Annotated[bool, typer.Option("--null", "-0", help="End each record with a NUL byte instead of a newline.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


# Records


@app.command()
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
    batch_size: Annotated[int, typer.Option(min=1, help="Records in one commit, which happens whole or not at all.")] = 1000,
    chunk_size: Annotated[int, typer.Option(help="Bytes of each new chunk file.")] = 16 << 20,
    sync: Annotated[Sync, typer.Option(help="Durable with each commit, or only when the queue is closed.")] = Sync.commit,
    max_records: Annotated[int | None, typer.Option(help="Exit with 6 rather than have more records wait in the queue.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Exit with 6 rather than have more bytes of records wait in the queue.")
    ] = None,
    min_free_bytes: Annotated[int, typer.Option(help="Exit with 6 rather than leave less free on the file system.")] = 0,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put records into a queue, which is made if it is not there.

    When it returns, they are durable. Standard input is read as it comes, and the queue is locked from the first commit
    to the end of the input.
    """
    _check_input(records, file, lines, null, whole)
    layout.check_path(path)
    stored, repeated = 0, False
    with contextlib.ExitStack() as stack:
        source = _input(stack, records, file, null, whole, "putting", chunk.MAX_RECORD)
        commits = _groups(source, sys.maxsize if key is not None else batch_size)
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
            )
        )
        before = len(queue)
        try:
            for commit in chain([first], commits):
                with _uninterrupted():
                    stored += queue.put_many(commit, key)
        except BaseException:
            if stored:
                _say(f"{_count(stored, 'record')} had been put before this, and stay")
            raise
        repeated = len(queue) == before and stored > 0
    if as_json:
        _print_json({"queue": path, "records": stored, "repeated": repeated})
    elif repeated:
        _print(f"nothing to do: {_count(stored, 'record')} put under this key before")
    else:
        _print(f"{_count(stored, 'record')} put")


@app.command()
def get(
    path: QueuePath,
    number: Annotated[int | None, typer.Option("--number", "-n", min=1, help="Take up to so many records; 1 by default.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Take all records.")] = False,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the first record.")] = 0,
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
                raise _nothing(path)
            time.sleep(POLL_SECONDS)
        with Queue(path, lock_timeout=lock_timeout) as queue, queue.session() as session:
            while taken < most and (records := session.get_many(min(most - taken, COMMIT_RECORDS), COMMIT_BYTES)):
                _print_records(records, null, as_json)
                _sync_output()
                with _uninterrupted():
                    session.commit()
                taken += len(records)


@app.command()
def peek(
    path: QueuePath,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Print up to so many records.")] = 1,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a queue, which stay."""
    with _existing(path, lock_timeout) as queue:
        records = list(islice(queue, number))  # and give the queue back before somebody reads them in a pager
    if not records:
        raise _nothing(path)
    _print_records(records, null, as_json)


# Looking


@app.command()
def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="DIRECTORY", help="Directories, or single queues.", show_default=".")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the queues in directories, without locking them.

    A queue that cannot be read has its error in the list, and the exit code is that of the error.
    """
    rows: list[dict[str, Any]] = []
    worst = 0
    for path in chain.from_iterable(_queues_in(one) if os.path.isdir(one) else [one] for one in paths or ["."]):
        try:
            if path in (paths or ()) and not _exists(path):
                raise _nothing(path)
            rows.append(_stats_json(path, inspect(path)))
        except (QewQewError, OSError) as error:
            rows.append({"queue": path, "error": f"{type(error).__name__}: {error}"})
            worst = max(worst, _exit_code(error))
    if as_json:
        _print_json(rows)
    elif rows:
        columns = ["queue", "records", "bytes", "oldest", "leased", "returned", "dead", "on disk", *["error"] * bool(worst)]
        _print_table(
            columns, [_ls_row(row) for row in rows], numbers=("records", "bytes", "leased", "returned", "dead", "on disk")
        )
    else:
        _say("no queues here (an empty closed queue leaves no files)")
    raise typer.Exit(worst)


def _ls_row(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["queue"], *["?"] * 7, row["error"]]
    oldest = "" if row["oldest"] is None else _age(datetime.fromisoformat(row["oldest"]))
    counts = [f"{row[name]:,}" for name in ("leased", "returned", "dead")]
    return [row["queue"], f"{row['records']:,}", _size(row["bytes"]), oldest, *counts, _size(row["on_disk"])]


def _queues_in(directory: str) -> list[str]:
    found = queues_in(directory)
    return found if directory == "." else [os.path.join(directory, name) for name in found]


@app.command("stat")
def stat_command(path: QueuePath, as_json: Json = False) -> None:
    """Show what a queue holds, without locking it."""
    stats = inspect(path)
    if not _exists(path):
        raise _nothing(path)
    owner = lock.holder(layout.check_path(path))
    if as_json:
        _print_json(_stats_json(path, stats) | {"owner": owner})
        return
    rows = [
        ("queue", path),
        ("records", f"{stats.records:,}"),
        ("bytes", f"{stats.bytes:,} ({_size(stats.bytes)})"),
        ("chunks", f"{stats.chunks:,}"),
        ("oldest", f"{_iso(stats.oldest)} ({_age(stats.oldest)})" if stats.oldest else "none"),
        ("leased", f"{_count(stats.leased, 'batch', 'batches')}"),
        ("returned", f"{_count(stats.returned, 'batch', 'batches')}"),
        ("dead", f"{_count(stats.dead, 'batch', 'batches')}"),
        ("on disk", f"{stats.on_disk:,} ({_size(stats.on_disk)})"),
        ("open in", f"process {owner}" if owner else "no process that can be seen"),
    ]
    _print_table([], [list(row) for row in rows])


def _stats_json(path: str, stats: QueueStats) -> dict[str, Any]:
    return {"queue": path} | dataclasses.asdict(stats) | {"oldest": _iso(stats.oldest), "last_lease": _iso(stats.last_lease)}


@app.command()
def verify(path: QueuePath, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Read everything that a queue and its batches hold, and compare it with its checksums. Changes nothing.

    The queue is locked meanwhile. The exit code is 5 if there are problems.
    """
    with _progress("verifying") as progress:
        try:
            with _existing(path, lock_timeout) as queue:
                report = queue.verify(progress)
        except (CorruptQueue, BadManifest) as error:  # so bad that it cannot even be opened
            report = Report(problems=[str(error)])
    if as_json:
        _print_json({"queue": path, "ok": report.ok} | dataclasses.asdict(report))
    else:
        for problem in report.problems:
            _print(f"damage: {problem}")
        for orphan in report.orphans:
            _print(f"nothing refers to it, see `qewqew orphans`: {orphan}")
        sums = [_count(report.chunks, "chunk"), _count(report.batches, "batch", "batches"), _size(report.bytes)]
        found = "no problems" if report.ok else _count(len(report.problems), "problem")
        _print(f"{found}: {_count(report.records, 'record')} read and found right ({', '.join(sums)})")
    if not report.ok:
        _say(f"`qewqew repair {path}` rescues what is whole")
        raise typer.Exit(DAMAGED)


@app.command()
def repair(path: QueuePath, yes: Yes = False, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Make a damaged queue one that opens, with every record that can be read and none that is wrong.

    What was damaged is moved to QUEUE.damaged, never deleted. Where nothing is wrong, nothing is changed. The exit code is 5
    if there was damage, also when it is mended now.
    """
    if not _exists(path):
        raise _nothing(path)
    if not yes:
        _ask(f"Repair {path}? What is damaged is moved to {path}{layout.DAMAGED}.")
    with Console(stderr=True).status("repairing") if sys.stderr.isatty() else contextlib.nullcontext():
        report = repair_queue(path, lock_timeout=lock_timeout)
    if as_json:
        _print_json({"queue": path, "ok": report.ok} | dataclasses.asdict(report))
    else:
        _print_repair(report)
    if not report.ok:
        raise typer.Exit(DAMAGED)


def _print_repair(report: RepairReport) -> None:
    for one in report.damage:
        _print(f"damage: {one.path}, offset {one.offset}, {_count(one.bytes, 'byte')}: {one.what} ({_lost(one)})")
    for note in report.notes:
        _print(f"note: {note}")
    if report.set_aside:
        _print(f"set aside: {report.set_aside}")
    found = "mended" if report.damage else "nothing to repair"
    _print(f"{found}: the queue holds {_count(report.records, 'record')}, and {_count(report.batches, 'batch', 'batches')}")


def _lost(damage: Damage) -> str:
    return "nobody can say how many records are lost" if damage.records is None else f"{_count(damage.records, 'record')} lost"


@orphans_app.command("list")
def orphans_list(path: QueuePath, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """List the chunk files that hold records, and that nothing refers to.

    They are never delivered. Nobody can say whether their records were taken long ago: look at them.
    """
    with _existing(path, lock_timeout) as queue:
        found = queue.recover()
    if as_json:
        _print_json([_orphan_json(one) for one in found])
    elif found:
        rows = [[os.path.basename(one.path), f"{one.records:,}", _size(one.bytes), one.problem or ""] for one in found]
        _print_table(["file", "records", "bytes", "problem"], rows, numbers=("records", "bytes"))
    else:
        _say("no orphans")


@orphans_app.command("show")
def orphans_show(
    path: QueuePath,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The chunk file, as listed.", show_default=False)],
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Print up to so many records.")] = 10,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a chunk file that nothing refers to."""
    with _existing(path, lock_timeout) as queue:
        (orphan,) = _orphans(queue, [file])
    for records in _groups(islice(orphan, number), COMMIT_RECORDS):
        _print_records(records, null, as_json)


@orphans_app.command("adopt")
def orphans_adopt(path: QueuePath, files: OrphanFiles, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Append the records of such chunk files to the queue, and remove the files."""
    _end_orphans(path, files, lock_timeout, as_json, Orphan.adopt, "appended to the queue")


@orphans_app.command("aside")
def orphans_aside(path: QueuePath, files: OrphanFiles, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Move such chunk files to QUEUE.damaged."""
    _end_orphans(path, files, lock_timeout, as_json, Orphan.set_aside, "set aside")


def _end_orphans(
    path: str, names: list[str], lock_timeout: float, as_json: bool, act: Callable[[Orphan], object], done: str
) -> None:
    ended: list[Orphan] = []
    with _existing(path, lock_timeout) as queue:
        try:
            for orphan in _orphans(queue, names):
                with _uninterrupted():
                    act(orphan)
                    ended.append(orphan)
        finally:
            if as_json:
                _print_json([_orphan_json(one) for one in ended])
            else:
                for one in ended:
                    _print(f"{os.path.basename(one.path)}: {_count(one.records, 'record')} {done}")


def _orphans(queue: Queue, names: list[str]) -> list[Orphan]:
    """Those with these names: all are there, or nothing is done."""
    found = {os.path.basename(one.path): one for one in queue.recover()}
    wanted = dict.fromkeys(map(os.path.basename, names))
    if missing := [name for name in wanted if name not in found]:
        raise Empty(f"no orphan is called {missing[0]!r}; `qewqew orphans list` names them", path=queue.path)
    return [found[name] for name in wanted]


def _orphan_json(orphan: Orphan) -> dict[str, Any]:
    return {"file": orphan.path, "records": orphan.records, "bytes": orphan.bytes, "problem": orphan.problem}


# Batches


@app.command("batches")
def batches_command(path: QueuePath, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """List the batches that are leased or returned, oldest first."""
    with _leasing(path, reader, lock_timeout) as queue:
        _print_batches(queue.batches(), as_json, "no batch is leased or returned")


@app.command()
def ack(
    path: QueuePath, batch_ids: BatchIds, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Acknowledge leased batches: the work on them is done.

    Their records are kept; those of older ones are dropped only when the program that owns the queue next acknowledges one.
    """
    # How long records are kept is a setting of that program: this command must not shorten it.
    with _leasing(path, reader, lock_timeout, retention=timedelta.max, retention_bytes=sys.maxsize) as queue:
        _end(queue, batch_ids, Batch.ack, as_json)


@app.command()
def nack(
    path: QueuePath,
    batch_ids: BatchIds,
    reason: Annotated[str, typer.Option(help="Why it failed; it is shown with the batch.")] = "",
    max_attempts: Annotated[int, typer.Option(min=1, help="After so many leases it goes to the dead letters.")] = 5,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Return leased batches: the work on them failed, and the next lease gets them first.

    Only when nobody works on them any more: otherwise two jobs would.
    """
    with _leasing(path, reader, lock_timeout, max_attempts=max_attempts) as queue:
        _end(queue, batch_ids, lambda batch: batch.nack(reason), as_json)


@app.command()
def publish(
    path: QueuePath,
    batch_id: BatchId,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A directory, or a URL such as s3://bucket/batches.", show_default=False)
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the store. Others see it in the list of processes: no secrets."),
    ] = None,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Copy a batch to URL/ID, where Spark on other machines reads it; again after an interruption, and it goes on.

    The batch stays, in its state. The queue is not locked meanwhile: nobody else may end the batch.
    """
    options = dict(_option(one) for one in option or ())
    with _leasing(path, reader, lock_timeout) as queue:
        batch = queue.batch(batch_id)
    with _topic_hint() if reader else contextlib.nullcontext(), _progress("publishing") as progress:
        target = batch.publish(url, options=options, progress=progress)
    if as_json:
        _print_json({"id": batch.id, "url": target, "records": batch.records})
    else:
        _print(f"{target} has {_count(batch.records, 'record')}")


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter("an option is NAME=VALUE")
    return name, value


def _end(queue: Leasing, batch_ids: list[str], act: Callable[[Batch], None], as_json: bool) -> None:
    found = [queue.batch(one) for one in dict.fromkeys(batch_ids)]  # all are there, or nothing is done
    ended: list[Batch] = []
    try:
        for batch in found:
            with _uninterrupted():
                act(batch)
                ended.append(batch)
    finally:
        if as_json:
            _print_json([_batch_json(batch) for batch in ended])
        else:
            for batch in ended:
                _print(f"{batch.id} is {batch.state}")


@dead_app.command("list")
def dead_list(path: QueuePath, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """List the dead letters, oldest first."""
    with _leasing(path, reader, lock_timeout) as queue:
        _print_batches(queue.dead(), as_json, "no dead letters")


@dead_app.command("show")
def dead_show(
    path: QueuePath,
    batch_id: BatchId,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Print up to so many records.")] = 10,
    null: Null = False,
    as_json: JsonLines = False,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a dead batch."""
    with _leasing(path, reader, lock_timeout) as queue:
        batch = _dead(queue, batch_id)
    with _topic_hint() if reader else contextlib.nullcontext():
        for records in _groups(islice(batch, number), COMMIT_RECORDS):
            _print_records(records, null, as_json)


@dead_app.command("return")
def dead_return(
    path: QueuePath, batch_ids: BatchIds, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Return dead batches, whole: the next lease gets them first."""
    with _leasing(path, reader, lock_timeout) as queue:
        _end(queue, batch_ids, Batch.return_to_queue, as_json)


@dead_app.command("drop")
def dead_drop(
    path: QueuePath,
    batch_id: BatchId,
    yes: Yes = False,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Delete a dead batch and its records for ever."""
    if not yes:
        with _leasing(path, reader, lock_timeout) as queue:
            batch = _dead(queue, batch_id)
        _ask(f"Delete {_count(batch.records, 'record')} of batch {batch.id} for ever?")
    with _leasing(path, reader, lock_timeout) as queue:
        batch = _dead(queue, batch_id)
        with _uninterrupted():
            batch.drop()
    if as_json:
        _print_json({"id": batch.id, "records": batch.records})
    else:
        _print(f"{batch.id} is deleted, with {_count(batch.records, 'record')}")


def _dead(queue: Leasing, batch_id: str) -> Batch:
    batch = queue.batch(batch_id)
    if batch.state != "dead":
        raise BatchConflict(f"batch {batch.id} is {batch.state}, not dead", path=queue.path)
    return batch


def _print_batches(batches: list[Batch], as_json: bool, none: str) -> None:
    if as_json:
        _print_json([_batch_json(batch) for batch in batches])
    elif batches:
        columns = ["id", "key", "state", "attempt", "records", "bytes", "created", "expires", "reason"]
        _print_table(columns, [_batch_row(batch) for batch in batches], numbers=("attempt", "records", "bytes"))
    else:
        _say(none)


def _batch_json(batch: Batch) -> dict[str, Any]:
    plain = {name: getattr(batch, name) for name in ("id", "key", "state", "attempt", "records", "bytes", "reason")}
    return plain | {"created": _iso(batch.created), "expires": _iso(batch.expires), "manifest": batch.manifest_path}


def _batch_row(batch: Batch) -> list[str]:
    sizes = [f"{batch.attempt:,}", f"{batch.records:,}", _size(batch.bytes)]
    times = [_short(batch.created), _short(batch.expires) if batch.expires else ""]
    return [batch.id, batch.key, batch.state, *sizes, *times, batch.reason]


# What the commands share


def _existing(path: str, lock_timeout: float, **settings: Any) -> Queue:
    """The queue, opened; raises `Empty` where there is none: opening it would make one."""
    if not _exists(path):
        raise _nothing(path)
    return Queue(path, lock_timeout=lock_timeout, **settings)


@contextlib.contextmanager
def _leasing(path: str, reader: str | None, lock_timeout: float, **settings: Any) -> Iterator[Leasing]:
    """What has batches: a queue, or a reader of a topic."""
    if reader is None:
        with _existing(path, lock_timeout, **settings) as queue:
            yield queue
    else:
        with (
            _topic_hint(),
            _existing_topic(path, lock_timeout=lock_timeout, **settings) as topic,
            _existing_reader(topic, reader) as one,
        ):
            yield one


@contextlib.contextmanager
def _topic_hint() -> Iterator[None]:
    """What `Commands` says of damage is to name the commands for topics."""
    try:
        yield
    except (CorruptQueue, BadManifest) as error:
        error.add_note(HINT.format("qewqew topic"))
        raise


def _existing_topic(path: str, **settings: Any) -> Topic:
    """The topic, opened; raises `Empty` where there is none: opening it would make one."""
    full = layout.check_topic_path(path)
    if not os.path.lexists(os.path.join(full, os.path.basename(full) + ".idx")):
        raise Empty("there is no topic here", path=path)
    return Topic(path, **settings)


def _existing_reader(topic: Topic, name: str, **settings: Any) -> Reader:
    layout.check_reader_name(name)
    if name not in (names := topic.readers()):
        raise Empty(f"the topic has no reader {name!r}; it has {', '.join(names) or 'none'}", path=topic.path)
    return topic.reader(name, **settings)


def _exists(path: str) -> bool:
    full = layout.check_path(path)
    if any(os.path.lexists(full + suffix) for suffix in ("", *REMAINS)):
        return True
    return bool(layout.chunk_ids(full, os.listdir(os.path.dirname(full))))


def _nothing(path: str) -> Empty:
    there = _exists(path)
    return Empty("the queue is empty" if there else "there is no queue here (an empty closed queue leaves no files)", path=path)


def _exit_code(error: Exception) -> int:
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: a commit that it cut in two would leave the queue object in an unknown state."""
    caught: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # it is ignored, by nohup for example
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: say --yes, or run it in one")
    typer.confirm(question, abort=True, err=True)


def _check_input(records: list[str] | None, file: str | None, lines: bool, null: bool, whole: bool) -> None:
    if lines + null + whole > 1:
        raise typer.BadParameter("--lines, --null and --whole exclude each other")
    if records and (file is not None or lines or null or whole):
        raise typer.BadParameter("records come from the arguments or from a file, not both")


def _input(
    stack: contextlib.ExitStack, records: list[str] | None, file: str | None, null: bool, whole: bool, doing: str, largest: int
) -> Iterator[bytes]:
    """The records that are to be stored. One that is larger than the ``largest`` that will be taken ends them, maybe cut."""
    if records:
        return map(os.fsencode, records)
    opened = sys.stdin.buffer if file in (None, "-") else stack.enter_context(open(str(file), "rb"))  # noqa: SIM115
    progress = stack.enter_context(_progress(doing))
    return iter([opened.read()]) if whole else _split(opened, b"\0" if null else b"\n", progress, largest)


def _split(file: IO[bytes], end: bytes, progress: Callable[[int, int], None], largest: int) -> Iterator[bytes]:
    """The records of a file: each ends with ``end``, the last one maybe with the file."""
    total = 0
    with contextlib.suppress(OSError):
        total = os.fstat(file.fileno()).st_size
    rest, done = b"", 0
    while block := file.read1(1 << 20):  # type: ignore[attr-defined]
        *records, rest = (rest + block).split(end)
        yield from records
        if len(rest) > largest:
            break  # the queue will refuse it: no need to read on
        done += len(block)
        progress(done, total)
    if rest:
        yield rest


def _groups(records: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    records = iter(records)
    while group := list(islice(records, size)):
        yield group


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal and the work is long; call it with bytes done and total."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not sys.stderr.isatty()
    ) as bar:

        def progress(done: int, total: int) -> None:
            if total >= BAR_BYTES:
                task = bar.task_ids[0] if bar.task_ids else bar.add_task(what)
                bar.update(task, completed=done, total=total)

        yield progress


# Output


def _say(message: str) -> None:
    """Something for people: not part of what the command prints."""
    print(f"qewqew: {message}", file=sys.stderr)


def _write(data: bytes) -> None:
    """Straight to standard output: records are bytes, and an error of writing must show before they are taken."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _sync_output() -> None:
    """What was written to a file is on disk before the queue forgets it."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # a caller's stand-in, not a file of the system
        return
    if modes.S_ISREG(os.fstat(descriptor).st_mode):
        os.fsync(descriptor)


def _print(text: str) -> None:
    _write(f"{text}\n".encode(errors="backslashreplace"))


def _print_json(value: object) -> None:
    # What is no valid text (in a path) becomes \udcXX, which is JSON.
    _write(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def _print_records(records: list[bytes], null: bool, as_json: bool) -> None:
    if as_json:
        _write(b"".join(_record_json(record) + b"\n" for record in records))
    else:
        end = b"\0" if null else b"\n"
        _write(end.join(records) + end)


def _record_json(record: bytes) -> bytes:
    try:
        body = {"record": record.decode()}
    except UnicodeDecodeError:
        body = {"base64": base64.b64encode(record).decode()}
    return json.dumps(body, ensure_ascii=False).encode()


def _print_table(columns: list[str], rows: list[list[str]], numbers: tuple[str, ...] = ()) -> None:
    """A table as wide as the terminal; in a pipe as wide as it needs to be."""
    table = Table(box=None, pad_edge=False, show_header=bool(columns))
    for name in columns:
        number = name in numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_visible(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 1 << 16)
    with console.capture() as capture:
        console.print(table)
    _print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _visible(text: str) -> str:
    """Without control characters, which a reason or a path may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _size(number: float) -> str:
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def _age(moment: datetime) -> str:
    import pendulum

    return pendulum.instance(moment).diff_for_humans(absolute=True)


def _short(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _iso(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else None


import qewqew_core.cli_topic  # noqa: E402, F401 - `qewqew topic`, made of what is above
