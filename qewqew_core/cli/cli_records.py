"""The commands that put records, take them and show them: put, get, peek, tail. See docs/cli.md."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Annotated, BinaryIO

import typer

from qewqew_core import arguments
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import (
    MOST,
    AsTopic,
    FilterText,
    Json,
    JsonLines,
    LockTimeout,
    Null,
    Path,
    QueuePath,
    Timeout,
    WhichDialect,
    existing,
    group,
    nothing,
    only_for,
    pairs,
    to_fill,
)
from qewqew_core.cli.texts import counted
from qewqew_core.errors import Empty
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.queue.inspection import inspect, steady
from qewqew_core.queue.queue import Queue
from qewqew_core.tools import exchange, tailing
from qewqew_core.tools.exchange import GROUP_BYTES, GROUP_RECORDS, few
from qewqew_core.tools.listing import Kind, kind_of
from qewqew_core.tools.putting import into
from qewqew_core.tools.reading import Reading, records_of, tells_format
from qewqew_core.tools.rows import encode

app = typer.Typer()


@app.command(rich_help_panel="Records")
def put(
    path: Path,
    records: Annotated[
        list[str] | None, typer.Argument(metavar="RECORD", help="The records; if none are given, they are read from --file.")
    ] = None,
    as_topic: AsTopic = False,
    tag: Annotated[str | None, typer.Option(help="For a topic: the tag of all messages, which readers filter by.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="For a topic: the application's id of all messages.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Read records from FILE; - is standard input, the default.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a record, without its newline, whatever FILE is.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Each record ends with a NUL byte.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="The whole file is one record.")] = False,
    format: Annotated[
        str | None, typer.Option(help="Read records, not lines: csv, json, jsonl, parquet or text. FILE's name may say it.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Of the format, repeatable: delimiter, encoding, quote, names, null, decimal_comma."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Put all in ONE commit, and only if this key was not used before.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=MOST, help="How many records to put in one commit, all or none.")] = 1000,
    chunk_size: Annotated[int | None, typer.Option(help="For a queue: the size of new chunk files in bytes.")] = None,
    max_records: Annotated[int | None, typer.Option(help="For a queue: exit with 6 if more records would wait.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="For a queue: exit with 6 if more bytes would wait.")] = None,
    block_size: Annotated[int | None, typer.Option(help="For a topic: the size in bytes at which a new block begins.")] = None,
    dialect: WhichDialect = None,
    min_free_bytes: Annotated[int, typer.Option(help="Exit with 6 instead of leaving less free space on the file system.")] = 0,
    log_bytes: Annotated[int, typer.Option(help="How many bytes the log may grow before it is cut back.")] = 4 << 20,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put records into a queue or topic. If nothing is there, it creates a queue, or with --topic a topic.

    The records are durable when it returns. It reads its input as it comes, and locks the queue or topic only for each commit.
    A file of a format, such as CSV or Parquet, is put in one commit.
    """
    if lines + null + whole > 1:
        raise typer.BadParameter("--lines, --null and --whole cannot be combined")
    if records and (file is not None or lines or null or whole or format or option):
        raise typer.BadParameter("records come from the arguments or from a file, not both")
    reading = None if records or lines or null or whole else _reading(file, format, option)
    if reading is None and (format or option):
        raise typer.BadParameter("--format and --option read records; they cannot be combined with --lines, --null and --whole")
    if key is not None:
        arguments.check_key(key)
    kind = to_fill(path, as_topic)
    of_queue = {"chunk_size": chunk_size, "max_records": max_records, "max_bytes": max_bytes}
    of_topic = {"block_size": block_size, "dialect": dialect}
    only_for(Kind.QUEUE, kind, path, **of_queue)
    only_for(Kind.TOPIC, kind, path, **of_topic, tag=tag, id=message_id)
    chosen = {name: value for name, value in (of_queue | of_topic).items() if value is not None}
    settings = chosen | {"min_free_bytes": min_free_bytes, "log_bytes": log_bytes, "lock_timeout": lock_timeout}
    stored, repeated = 0, False
    with contextlib.ExitStack() as stack:
        bodies = _bodies(
            stack, records, file, null, whole, reading, chunk.MAX_RECORD if kind is Kind.QUEUE else zbus.LARGEST_BODY
        )
        target = stack.enter_context(contextlib.closing(into(path, kind, group=group(), **settings)))
        try:
            for commit in _commits(bodies, batch_size if key is None and reading is None else sys.maxsize):
                for some in few(Message(body, tag, message_id) for body in commit):
                    target.add(some)
                with terminal.uninterrupted():
                    committed = target.commit(key)
                stored, repeated = stored + committed.records, committed.repeated
        except BaseException:
            if stored:
                terminal.say(f"{counted(stored, 'record')} put before that; they stay")
            raise
    put_before = f"nothing to do: {counted(stored, 'record')} put under this key before"
    done = put_before if repeated else f"{counted(stored, 'record')} put"
    terminal.answer(as_json, {"path": path, "kind": kind, "records": stored, "repeated": repeated}, done)


def _commits(bodies: Iterator[bytes], size: int) -> Iterator[Iterator[bytes]]:
    """What belongs into each commit, to be read before the next; there is one at least, which may be empty."""
    yield islice(bodies, size)
    for body in bodies:
        yield chain([body], islice(bodies, size - 1))


def _reading(file: str | None, format: str | None, option: list[str] | None) -> Reading | None:
    """How records are read; None: as lines, which is what a file is whose name does not say anything else."""
    options = pairs("--option", option)
    reading = Reading.of(options | ({} if format is None else {"format": format}))
    if options or format is not None or (file is not None and tells_format(file)):
        reading.format_of(file or "-")
        return reading
    return None


def _bodies(
    stack: contextlib.ExitStack,
    records: list[str] | None,
    file: str | None,
    null: bool,
    whole: bool,
    reading: Reading | None,
    largest: int,
) -> Iterator[bytes]:
    """The records that are to be stored. One that is larger than the ``largest`` that will be taken ends them, maybe cut."""
    if records:
        return map(os.fsencode, records)
    opened = sys.stdin.buffer if file in (None, "-") else stack.enter_context(open(str(file), "rb"))  # noqa: SIM115
    progress = stack.enter_context(terminal.progress_bar("putting"))
    if reading is not None:
        return _read(opened, str(file or "-"), reading, progress)
    return iter([opened.read()]) if whole else _split(opened, b"\0" if null else b"\n", progress, largest)


def _read(file: BinaryIO, name: str, reading: Reading, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    total = _size(file)
    for number, record in enumerate(records_of(file, name, reading, lambda said: terminal.say(f"{name}: {said}"))):
        yield encode(record, number)
        if total and number % GROUP_RECORDS == 0:
            progress(file.tell(), total)


def _size(file: BinaryIO) -> int:
    """In bytes; 0 if it is a pipe, for example."""
    with contextlib.suppress(OSError):
        return os.fstat(file.fileno()).st_size
    return 0


def _split(file: BinaryIO, end: bytes, progress: Callable[[int, int], None], largest: int) -> Iterator[bytes]:
    """The records of a file: each ends with ``end``, the last one maybe with the file."""
    total, done, size = _size(file), 0, 0
    parts: list[bytes] = []  # of the record that has not ended: one that is long takes time in proportion to its length
    while block := file.read1(1 << 20):  # type: ignore[attr-defined]
        first, *others = block.split(end)
        parts.append(first)
        size += len(first)
        if others:
            yield b"".join(parts)
            yield from others[:-1]
            parts, size = others[-1:], len(others[-1])
        if size > largest:
            break  # it will be refused: no need to read on
        done += len(block)
        progress(done, total)
    if size:
        yield b"".join(parts)


@app.command(rich_help_panel="Records")
def get(
    path: QueuePath,
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, max=MOST, help="Take at most this many records; 1 by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Take all records.")] = False,
    timeout: Timeout = 0,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Take records off the front of a queue and print them. (For a topic: `qewqew topic read`.)

    Records are taken after they are printed, so they stay if the output fails or get is killed. The next get then prints the
    last of them (up to 1,000) again.
    """
    if everything and number is not None:
        raise typer.BadParameter("--all and --number cannot be combined")
    if kind_of(path) is not None:
        existing(path, Kind.QUEUE, "use `qewqew topic read` for a topic")
    most = sys.maxsize if everything else number or 1
    deadline = time.monotonic() + timeout
    taken = 0
    while not taken:
        # The queue has one owner at a time: a waiting reader must leave it to those who put records.
        while not inspect(path).records:
            if not time.monotonic() < deadline:
                raise _empty(path)
            time.sleep(tailing.POLL_SECONDS)
        with Queue(path, lock_timeout=lock_timeout, group=group()) as queue, queue.session() as session:
            while taken < most and (records := session.get_many(min(most - taken, GROUP_RECORDS), GROUP_BYTES)):
                terminal.print_records(records, null, as_json)
                terminal.sync_output()
                with terminal.uninterrupted():
                    session.commit()
                taken += len(records)


def _empty(path: str) -> Empty:
    kind = kind_of(path)
    return nothing(path, Kind.QUEUE) if kind is None else Empty(f"the {kind} is empty", path=path)


@app.command(rich_help_panel="Records")
def peek(
    path: Path,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print at most this many.")] = 1,
    text: FilterText = None,
    null: Null = False,
    as_json: JsonLines = False,
) -> None:
    """Print the oldest records of a queue or topic. They stay; nothing is locked, and no reader moves."""
    kind = existing(path)
    only_for(Kind.TOPIC, kind, path, filter=text)
    chosen = Filter(text)

    def begin() -> tuple[Message | None, Iterator[Message]]:
        waiting = exchange.waiting(path, kind, lambda done, total: None)
        found = (message for message in waiting if chosen.matches(message.tag))
        return next(found, None), found

    first, others = steady(path, begin)
    if first is None:
        raise Empty("no message matches", path=path) if chosen else _empty(path)
    terminal.print_messages(chain([first], islice(others, number - 1)), null, as_json, kind is Kind.TOPIC)


@app.command(rich_help_panel="Records")
def tail(
    path: Path,
    number: Annotated[int, typer.Option("--number", "-n", min=0, max=MOST, help="How many of the newest to print.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then print new records until Ctrl-C.")] = False,
    text: FilterText = None,
    null: Null = False,
    as_json: JsonLines = False,
) -> None:
    """Print the newest records of a queue or topic, and with --follow new ones. They stay; nothing is locked, and no reader
    moves.

    Records of a queue that are put and taken within a tenth of a second may be missed.
    """
    kind = Kind.QUEUE if follow and kind_of(path) is None and not os.path.isdir(path) else existing(path)
    only_for(Kind.TOPIC, kind, path, filter=text)

    def lost(number: int) -> None:
        terminal.say(f"the messages from {number:,} on were removed from the topic before they could be read")

    try:
        if kind is Kind.QUEUE:
            found = tailing.records(path, number, follow)
        else:
            found = tailing.messages(path, number, Filter(text), follow, lost)
        for messages in found:
            terminal.print_messages(messages, null, as_json, kind is Kind.TOPIC)
    except KeyboardInterrupt:
        raise typer.Exit(terminal.INTERRUPTED) from None
