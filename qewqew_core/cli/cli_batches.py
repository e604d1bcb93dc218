"""The commands for the batches of a queue or of a reader of a topic: batches, ack, nack, replay … See docs/cli.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Annotated, Any

import typer

from qewqew_core.batch.batch import Batch
from qewqew_core.batch.causes import cause_of
from qewqew_core.batch.leases import HasBatches
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import (
    MOST,
    BatchId,
    BatchIds,
    Json,
    JsonLines,
    LockTimeout,
    Null,
    Path,
    QueuePath,
    ReaderName,
    StoreOptions,
    Yes,
    existing_queue,
    leasing,
    store_options,
)
from qewqew_core.cli.texts import age, counted, iso, short, sized
from qewqew_core.errors import BatchConflict
from qewqew_core.limits import now_ms
from qewqew_core.secrecy import excerpt
from qewqew_core.tools.replaying import find
from qewqew_core.tools.replaying import replay as replay_batch

# How long acknowledged records are kept is a setting of the program that owns the queue: no command must shorten it.
_KEEP: dict[str, Any] = {"retention": timedelta.max, "retention_bytes": sys.maxsize}

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Only those with this text in their reason.")]
app = typer.Typer()
dead_app = typer.Typer(no_args_is_help=True, help="Batches that failed too often: look at them, return or drop them.")
app.add_typer(dead_app, name="dead", rich_help_panel="Batches")


@app.command("batches", rich_help_panel="Batches")
def batches_command(
    path: Path,
    acked: Annotated[bool, typer.Option("--acked", help="List acknowledged batches whose records are still kept.")] = False,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the batches that are leased or returned, oldest first."""
    with leasing(path, reader, lock_timeout) as queue:
        found = queue.acknowledged() if acked else queue.batches()
        none = "no acknowledged batch is kept" if acked else "no batch is leased or returned"
        terminal.answer_list(as_json, found, _batch_json, _print_batches, none)


@app.command(rich_help_panel="Batches")
def replay(
    path: QueuePath,
    keys: Annotated[list[str], typer.Argument(metavar="KEY|ID", help="Keys or ids of acknowledged batches.", show_default=False)],
    name: Annotated[str, typer.Option(help="A batch is replayed once under each name.")] = "",
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put the records of acknowledged batches into the queue again, at its end, while they are kept.

    Each batch is one commit and is put once: after an interruption, repeat the command. For a topic, move or copy a reader
    instead.
    """
    repeated: dict[str, bool] = {}
    with existing_queue(
        path, "messages stay in a topic; move a reader back with `qewqew topic readers seek`", lock_timeout, **_KEEP
    ) as queue:

        def put_again(batch: Batch) -> None:
            before = len(queue)
            replay_batch(queue, batch, name)
            repeated[batch.id] = len(queue) == before

        def row(batch: Batch) -> dict[str, Any]:
            return {"id": batch.id, "key": batch.key, "records": batch.records, "repeated": repeated[batch.id]}

        def line(batch: Batch) -> str:
            done = f"{counted(batch.records, 'record')} put again"
            return f"{batch.id}: nothing to do, {done} before" if repeated[batch.id] else f"{batch.id}: {done}"

        batches = {batch.id: batch for batch in (find(queue, key) for key in keys)}  # all are there, or nothing is done
        terminal.do_each(batches.values(), put_again, as_json, row, line)


@app.command(rich_help_panel="Batches")
def ack(
    path: Path, batch_ids: BatchIds, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Acknowledge leased batches: the work on them is done.

    Their records are kept. Older ones are removed when the program that owns the queue next acknowledges a batch.
    """
    with leasing(path, reader, lock_timeout, **_KEEP) as queue:
        _end(queue, batch_ids, Batch.ack, as_json)


@app.command(rich_help_panel="Batches")
def nack(
    path: Path,
    batch_ids: BatchIds,
    reason: Annotated[str, typer.Option(help="Why it failed; it is shown with the batch.")] = "",
    max_attempts: Annotated[int, typer.Option(min=1, help="After this many leases the batch becomes a dead letter.")] = 5,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Return leased batches: the work on them failed, and the next lease gets them first, once they are due.

    Do this only when nobody works on them any more; otherwise two jobs will.
    """
    with leasing(path, reader, lock_timeout, max_attempts=max_attempts) as queue:
        _end(queue, batch_ids, lambda batch: batch.nack(reason), as_json)


@app.command(rich_help_panel="Batches")
def retry(
    path: Path, batch_ids: BatchIds, reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Make returned batches due now: the next lease gets them first."""
    with leasing(path, reader, lock_timeout) as queue:
        _end(queue, batch_ids, Batch.retry, as_json)


@app.command(rich_help_panel="Batches")
def publish(
    path: Path,
    batch_id: BatchId,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A directory, or a URL such as s3://bucket/batches.", show_default=False)
    ],
    option: StoreOptions = None,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Copy a batch to URL/ID, where Spark on other machines can read it. After an interruption, repeat it: it continues.

    The batch keeps its state. The queue is not locked while files are copied, so nobody else may end the batch.
    """
    options = store_options(option)
    with leasing(path, reader, lock_timeout) as queue:
        batch = queue.batch(batch_id)
    with terminal.progress_bar("publishing") as progress:
        target = batch.publish(url, options=options, progress=progress)
    found = {"id": batch.id, "url": target, "records": batch.records}
    terminal.answer(as_json, found, f"{target} has {counted(batch.records, 'record')}")


def _end(queue: HasBatches, batch_ids: list[str], act: Callable[[Batch], None], as_json: bool) -> None:
    found = [queue.batch(batch_id) for batch_id in dict.fromkeys(batch_ids)]  # all are there, or nothing is done
    terminal.do_each(found, act, as_json, _batch_json, lambda batch: f"{batch.id} is {batch.state}{_due(batch)}")


def _due(batch: Batch) -> str:
    return f", due in {age(batch.due)}" if batch.due and round(batch.due.timestamp() * 1000) > now_ms() else ""


@dead_app.command("list")
def dead_list(
    path: Path, reason: Reason = "", reader: ReaderName = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """List the dead letters, oldest first."""
    with leasing(path, reader, lock_timeout) as queue:
        terminal.answer_list(as_json, _dead_of(queue, reason), _batch_json, _print_batches, _none_of(reason))


@dead_app.command("show")
def dead_show(
    path: Path,
    batch_id: BatchId,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print at most this many records.")] = 10,
    null: Null = False,
    as_json: JsonLines = False,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a dead batch."""
    with leasing(path, reader, lock_timeout) as queue:
        batch = _dead(queue, batch_id)
    terminal.print_records(islice(batch, number), null, as_json)


@dead_app.command("return")
def dead_return(
    path: Path,
    batch_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="The ids of the batches.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Return all of them, or all with --reason.")] = False,
    reason: Reason = "",
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Return dead batches: the next lease gets them first, with all their records."""
    if every == bool(batch_ids) or (reason and not every):
        raise typer.BadParameter("give the ids of the batches, or --all, to which --reason may be added")
    with leasing(path, reader, lock_timeout) as queue:
        found = [batch.id for batch in _dead_of(queue, reason)] if every else batch_ids or []
        _end(queue, found, Batch.return_to_queue, as_json)
        if not found and not as_json:
            terminal.say(_none_of(reason))


@dead_app.command("drop")
def dead_drop(
    path: Path,
    batch_id: BatchId,
    yes: Yes = False,
    reader: ReaderName = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Permanently delete a dead batch and its records."""
    if not yes:
        with leasing(path, reader, lock_timeout) as queue:
            batch = _dead(queue, batch_id)
        terminal.ask(f"Permanently delete {counted(batch.records, 'record')} of batch {batch.id}?")
    with leasing(path, reader, lock_timeout) as queue:
        batch = _dead(queue, batch_id)
        with terminal.uninterrupted():
            batch.drop()
    found = {"id": batch.id, "records": batch.records}
    terminal.answer(as_json, found, f"{batch.id} is deleted, with {counted(batch.records, 'record')}")


def _dead_of(queue: HasBatches, reason: str) -> list[Batch]:
    """Those with this text in their reason, or in their cause, as the page shows it for all that have it."""
    return [batch for batch in queue.dead() if reason in batch.reason or reason in cause_of(batch.reason)]


def _none_of(reason: str) -> str:
    return f"no dead letter has {excerpt(reason, 80)} in its reason" if reason else "no dead letters"


def _dead(queue: HasBatches, batch_id: str) -> Batch:
    batch = queue.batch(batch_id)
    if batch.state != "dead":
        raise BatchConflict(f"batch {batch.id} is {batch.state}, not dead", path=queue.path)
    return batch


def _print_batches(batches: list[Batch]) -> None:
    columns = ["id", "key", "state", "attempt", "records", "bytes", "created", "expires", "reason"]
    terminal.print_table(columns, [_batch_row(batch) for batch in batches], numbers=("attempt", "records", "bytes"))


def _batch_json(batch: Batch) -> dict[str, Any]:
    plain = {name: getattr(batch, name) for name in ("id", "key", "state", "attempt", "records", "bytes", "reason")}
    times = {name: iso(getattr(batch, name)) for name in ("created", "expires", "due")}
    return plain | times | {"manifest": batch.manifest_path}


def _batch_row(batch: Batch) -> list[str]:
    sizes = [f"{batch.attempt:,}", f"{batch.records:,}", sized(batch.bytes)]
    times = [short(batch.created), short(batch.expires) if batch.expires else ""]
    return [batch.id, batch.key, batch.state + _due(batch), *sizes, *times, batch.reason]
