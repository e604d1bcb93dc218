"""The commands that read and write files: export, import. See docs/cli.md."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Annotated

import typer

from qewqew_core import arguments
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import AsTopic, Json, LockTimeout, Path, existing, group, to_fill
from qewqew_core.cli.texts import counted
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument
from qewqew_core.formats.zbus import Message
from qewqew_core.tools import diskqueue, exchange, marker
from qewqew_core.tools.exchange import few
from qewqew_core.tools.listing import Kind, names_in
from qewqew_core.tools.putting import into

app = typer.Typer()


@app.command(rich_help_panel="Files")
def init(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="A directory of queues; created if it is missing.")],
    id: Annotated[str | None, typer.Option(metavar="ID", help="Its id; by default a random one.")] = None,
    as_json: Json = False,
) -> None:
    """Mark a directory of queues, once, so that Airflow knows it from an empty one where a mount is missing.

    The marker is the file .qewqew-directory, with an id that a connection may name (directory_id). A directory keeps the id that
    it has.
    """
    known, made = marker.init(directory, id, group())
    told = "is marked now" if made else "was marked already"
    terminal.answer(as_json, {"path": directory, "id": known, "created": made}, f"{directory} {told}, with the id {known}")


@app.command(rich_help_panel="Files")
def export(
    path: Path,
    to: Annotated[str | None, typer.Option(metavar="FILE", help="A new file; standard output by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON; needs --to.")] = False,
) -> None:
    """Write the records that wait in a queue, or the messages of a topic, to a file as JSON lines. They stay.

    It writes what waits when it starts, without a lock, and leaves out records in batches. The file appears when it is complete
    and on disk.
    """
    if as_json and to is None:
        raise typer.BadParameter("--json needs --to: the records go to standard output")
    _no_parquet(to or "", 'spark.read.format("qewqew").load(PATH).write.parquet(FILE)')
    kind = existing(path)
    with terminal.progress_bar("exporting") as progress:
        rows = exchange.waiting(path, kind, progress)
        if to is None:
            sys.stdout.flush()
            exchange.write_json_lines(sys.stdout.buffer, rows, kind is Kind.TOPIC)
            sys.stdout.buffer.flush()
            return
        with opening(to, "file", "try again"):
            count = _new_file(to, lambda file: exchange.write_json_lines(file, rows, kind is Kind.TOPIC))
    found = {"path": path, "kind": kind, "records": count, "file": to}
    terminal.answer(as_json, found, f"{counted(count, 'record')} exported to {to}")


def _no_parquet(file: str, instead: str) -> None:
    if file.rstrip("/").endswith(".parquet"):  # Spark makes directories
        raise BadArgument(f"this looks like Parquet; use Spark: {instead}", path=file)


def _new_file(path: str, store: Callable[[IO[bytes]], int]) -> int:
    """A file that is there with all its content, on disk, or not at all."""
    if os.path.lexists(path):
        raise BadArgument("the file exists already; remove it, or choose another name", path=path)
    part = f"{path}.{os.getpid()}.part"
    try:
        return _linked(part, path, store)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error  # the name that the user knows


def _linked(part: str, path: str, store: Callable[[IO[bytes]], int]) -> int:
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            count = store(file)
            file.flush()
            DISK.sync(file.fileno())
        os.link(part, path)  # unlike a rename it replaces nothing
        DISK.sync_directory(os.path.dirname(os.path.abspath(path)))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return count


@app.command("import", rich_help_panel="Files")
def import_command(
    path: Path,
    source: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines, or a directory of DiskQueue; - is standard input.")],
    as_topic: AsTopic = False,
    key: Annotated[
        str | None,
        typer.Option(help="Import only if this key is new; by default the key is computed from the records."),
    ] = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put the records of a file into a queue or topic, all in one commit or none. The lock is held only for the commit.

    The same records are imported once, so repeat the command after an interruption.
    """
    _no_parquet(source, 'spark.read.parquet(FILE).write.format("qewqew").mode("append").save(PATH)')
    kind = to_fill(path, as_topic)
    if key is not None:
        arguments.check_key(key)
    digest = exchange.Digest()
    more = False
    with contextlib.ExitStack() as stack:
        rows = _rows(stack, source)
        target = stack.enter_context(contextlib.closing(into(path, kind, lock_timeout=lock_timeout, group=group())))
        for some in few(rows):  # nothing is made before the file is known to be one
            for message in some:
                digest.add(message)
                more = more or message[1:5] != Message(b"")[1:5]
            target.add(some)
        with terminal.uninterrupted():
            stored, repeated = target.commit(key or digest.key)
    if more and kind is Kind.QUEUE:
        terminal.say("a queue stores only records: tags, ids and timestamps are left out")
    count = counted(stored, "record")
    found = {"path": path, "kind": kind, "records": stored, "repeated": repeated}
    terminal.answer(as_json, found, f"nothing to do: {count} imported before" if repeated else f"{count} imported")


def _rows(stack: contextlib.ExitStack, source: str) -> Iterator[Message]:
    progress = stack.enter_context(terminal.progress_bar("importing"))
    if source == "-":
        return exchange.read_json_lines(sys.stdin.buffer, source, progress)
    directory, name = os.path.split(os.path.abspath(source))
    if name in names_in(directory):
        raise BadArgument(
            "is a queue or topic already: use it as it is, or copy its records with "
            f"`qewqew export {source} | qewqew import PATH -`",
            path=source,
        )
    if os.path.isdir(source):
        found = diskqueue.find(source)
        if found.torn:
            what = f"{counted(found.torn, 'byte')} of the log"
            terminal.say(f"{source}: the last transaction was not finished and is left out: {what}")
        return map(Message, diskqueue.read(source, found.items, progress))
    return exchange.read_json_lines(stack.enter_context(open(source, "rb")), source, progress)
