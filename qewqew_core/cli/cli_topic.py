"""``qewqew topic``: append to topics, read them, look after their readers, find and mend damage. See docs/cli.md."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import sys
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Annotated, Any, cast

import typer
import typer.core
from rich.console import Console

from qewqew_core import arguments
from qewqew_core.batch.reports import Report
from qewqew_core.cli.terminal import (
    COMMIT_BYTES,
    COMMIT_RECORDS,
    DAMAGED,
    MOST,
    File,
    Json,
    Lines,
    LockTimeout,
    Null,
    NullIn,
    Sync,
    Timeout,
    Whole,
    Yes,
    age,
    ask,
    check_input,
    check_topic,
    counted,
    existing_topic,
    few,
    groups,
    iso,
    looked_at,
    print_json,
    print_line,
    print_records,
    print_table,
    progress_bar,
    records_of,
    say,
    sized,
    sync_output,
    topic_hint,
    uninterrupted,
    write,
)
from qewqew_core.disk import lock
from qewqew_core.errors import BadManifest, Corrupt, Empty
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.tools.exchange import json_line
from qewqew_core.tools.listing import is_topic
from qewqew_core.topic import topic_paths
from qewqew_core.topic.reader_inspection import look
from qewqew_core.topic.reader_state import ReaderState
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_inspection import inspect_topic
from qewqew_core.topic.topic_repairing import repair_topic


class TopicCommands(typer.core.TyperGroup):
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with topic_hint():
            return super().invoke(ctx)


app = typer.Typer(
    cls=TopicCommands, no_args_is_help=True, help="Topics: retained messages with tags, and readers, each at its place."
)


class Dialect(enum.StrEnum):
    A = "A"
    B = "B"
    C = "C"


class SlowReaders(enum.StrEnum):
    hold = "hold"
    move = "move"


TopicPath = Annotated[str, typer.Argument(metavar="TOPIC", help="The directory of the topic.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="READER", help="The name of the reader.", show_default=False)]
WhichDialect = Annotated[
    Dialect | None, typer.Option(help="Of zbus's format; needed once for a topic in C that a zbus server has made.")
]
FilterText = Annotated[str | None, typer.Option("--filter", metavar="FILTER", help="Tags, as 'order.*;invoice.#'.")]
Start = Annotated[
    str, typer.Option(metavar="WHERE", help="Where a new reader begins: oldest, latest, the number of a message, or a time.")
]
JsonMessages = Annotated[
    bool,
    typer.Option("--json", help='Print one JSON object for each message: number, tag, …, and {"record": …} or {"base64": …}.'),
]


# Messages


@app.command()
def append(
    path: TopicPath,
    records: Annotated[
        list[str] | None, typer.Argument(metavar="RECORD", help="The bodies; without any, they are read from --file.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="The tag of all of them: what readers filter by.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="The application's id, of all of them.")] = None,
    file: File = None,
    lines: Lines = False,
    null: NullIn = False,
    whole: Whole = False,
    key: Annotated[str | None, typer.Option(help="Append all in ONE commit, and only if this key was not used before.")] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=MOST, help="Messages in one commit, which happens whole or not at all.")
    ] = 1000,
    block_size: Annotated[int, typer.Option(help="Bytes after which a block file is left for the next.")] = zbus.BLOCK_SIZE,
    sync: Annotated[Sync, typer.Option(help="Durable with each commit, or only when the topic is closed.")] = Sync.commit,
    dialect: WhichDialect = None,
    min_free_bytes: Annotated[int, typer.Option(help="Exit with 6 rather than leave less free on the file system.")] = 0,
    log_bytes: Annotated[int, typer.Option(help="Bytes by which the log grows before it is cut back.")] = 4 << 20,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Append messages to a topic, which is made if it is not there.

    When it returns, they are durable. Nobody else can append from the first commit to the end of the input; readers go on.
    """
    check_input(records, file, lines, null, whole)
    topic_paths.check_topic_path(path)
    if key is not None:
        arguments.check_key(key)
    stored, repeated = 0, False
    with contextlib.ExitStack() as stack:
        source = records_of(stack, records, file, null, whole, "appending", zbus.LARGEST_BODY)
        commits = groups(source, sys.maxsize if key is not None else batch_size)
        first = next(commits, [])  # the topic is locked only once there is something to append
        topic = stack.enter_context(
            Topic(
                path,
                block_size=block_size,
                sync=cast(Any, sync.value),
                dialect=cast(Any, dialect and dialect.value),
                lock_timeout=lock_timeout,
                min_free_bytes=min_free_bytes,
                log_bytes=log_bytes,
            )
        )
        before = len(topic)
        try:
            for commit in chain([first], commits):
                with uninterrupted():
                    stored += topic.append_many([Message(body, tag, message_id) for body in commit], key)
        except BaseException:
            if stored:
                say(f"{counted(stored, 'message')} had been appended before this, and stay")
            raise
        repeated = len(topic) == before and stored > 0
    if as_json:
        print_json({"topic": path, "messages": stored, "repeated": repeated})
    elif repeated:
        print_line(f"nothing to do: {counted(stored, 'message')} appended under this key before")
    else:
        print_line(f"{counted(stored, 'message')} appended")


@app.command()
def read(
    path: TopicPath,
    name: Annotated[str, typer.Option("--reader", "-r", metavar="READER", help="Made if it is not there.", show_default=False)],
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, max=MOST, help="Up to so many messages; 1 by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All messages.")] = False,
    text: FilterText = None,
    start: Start = "oldest",
    commit: Annotated[bool, typer.Option(help="Pass the messages once they are printed, or leave them to the reader.")] = True,
    timeout: Timeout = 0,
    null: Null = False,
    as_json: JsonMessages = False,
) -> None:
    """Print the messages that a reader is to get next, and pass them.

    They are committed after they were written: when the output cannot be written, or read is killed, the reader gets them
    again. --filter sets the filter of the reader, for good.
    """
    if everything and number is not None:
        raise typer.BadParameter("--all and --number exclude each other")
    most = sys.maxsize if everything else number or 1
    begin = place_to_start(start)
    taken = 0
    with (
        existing_topic(path) as topic,
        topic.reader(name, text, begin, window=10_000 if commit else 1 << 20) as one,
    ):
        while taken < most:
            messages = one.read_many(min(most - taken, COMMIT_RECORDS), COMMIT_BYTES, timeout=0 if taken else timeout)
            if not messages:
                break
            print_messages(messages, null, as_json)
            sync_output()
            if commit:
                with uninterrupted():
                    one.commit()
            taken += len(messages)
    if not taken:
        raise Empty("no message waits for this reader", path=one.path)


@app.command()
def peek(
    path: TopicPath,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print up to so many messages.")] = 1,
    text: FilterText = None,
    null: Null = False,
    as_json: JsonMessages = False,
) -> None:
    """Print the oldest messages of a topic. No reader is moved."""
    chosen = Filter(text)
    with existing_topic(path) as topic:
        found = islice((one for one in topic if chosen.matches(one.tag)), number)
        messages = next(found, None)
        if messages is None:
            raise Empty("no message matches" if chosen else "the topic is empty", path=path)
        for group in few(chain([messages], found)):
            print_messages(group, null, as_json)


def print_messages(messages: list[Message], null: bool, as_json: bool) -> None:
    if as_json:
        write(b"".join(json_line(one, topic=True, attempt=one.attempt) for one in messages))
    else:
        print_records([one.body for one in messages], null, as_json=False)


def place_to_start(text: str) -> Any:
    if text in ("oldest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    return time_of(text, "--start must be oldest, latest, the number of a message or a time (2025-01-31T12:00:00)")


def time_of(text: str, otherwise: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(otherwise) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


# Looking


@app.command()
def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="DIRECTORY", help="Directories, or single topics.", show_default=".")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the topics in directories, without locking them.

    A topic that cannot be read has its error in the list, and the exit code is that of the error.
    """
    rows, worst = looked_at("topic", chain.from_iterable(_topics_in(one) for one in paths or ["."]), _ls_json)
    columns = ["topic", "messages", "bytes", "oldest", "newest", "readers", "lag", "on disk", *["error"] * bool(worst)]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(columns, [_ls_row(row) for row in rows], numbers=("messages", "bytes", "readers", "lag", "on disk"))
    else:
        say("no topics here")
    raise typer.Exit(worst)


def _ls_json(path: str) -> dict[str, Any]:
    check_topic(path)
    stats, _ = inspect_topic(path)
    numbers = {"messages": stats.messages, "bytes": stats.bytes, "oldest": iso(stats.oldest), "newest": iso(stats.newest)}
    return numbers | {"readers": stats.readers, "on_disk": stats.on_disk}


def _ls_row(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["topic"], *["?"] * 7, row["error"]]
    times = ["" if row[name] is None else age(datetime.fromisoformat(row[name])) for name in ("oldest", "newest")]
    lag = f"{max(row['readers'].values()):,}" if row["readers"] else ""
    return [
        row["topic"],
        f"{row['messages']:,}",
        sized(row["bytes"]),
        *times,
        f"{len(row['readers'])}",
        lag,
        sized(row["on_disk"]),
    ]


def _topics_in(directory: str) -> list[str]:
    """The topics in a directory; what is none itself, for its error."""
    if is_topic(os.path.abspath(directory)) or not os.path.isdir(directory):
        return [directory]
    found = sorted(one.name for one in os.scandir(directory) if one.is_dir() and is_topic(one.path))
    return found if directory == "." else [os.path.join(directory, name) for name in found]


@app.command("stat")
def stat_command(path: TopicPath, dialect: WhichDialect = None, as_json: Json = False) -> None:
    """Show what a topic holds, and how far its readers are."""
    with existing_topic(path, dialect=dialect and dialect.value) as topic:
        stats = topic.stats()
        states = [(name, lag, look(topic.files, topic.path, name)) for name, lag in stats.readers.items()]
    owner = lock.holder(os.path.join(topic.path, topic.name + ".lock"))
    if as_json:
        print_json(
            {"topic": path}
            | {key: getattr(stats, key) for key in ("messages", "bytes", "blocks", "first", "next")}
            | {"oldest": iso(stats.oldest), "newest": iso(stats.newest), "on_disk": stats.on_disk, "owner": owner}
            | {"readers": [reader_json(*one) for one in states]}
        )
        return
    rows = [
        ("topic", path),
        ("messages", f"{stats.messages:,}" + (f" ({stats.first:,} to {stats.next - 1:,})" if stats.messages else "")),
        ("bytes", f"{stats.bytes:,} ({sized(stats.bytes)})"),
        ("blocks", f"{stats.blocks:,}"),
        ("oldest", f"{iso(stats.oldest)} ({age(stats.oldest)})" if stats.oldest else "none"),
        ("newest", f"{iso(stats.newest)} ({age(stats.newest)})" if stats.newest else "none"),
        ("on disk", f"{stats.on_disk:,} ({sized(stats.on_disk)})"),
        ("written by", f"process {owner}" if owner else "no process that can be seen"),
        ("readers", f"{len(states)}"),
    ]
    print_table([], [list(row) for row in rows])
    if states:
        print_readers([reader_json(*one) for one in states])


def reader_json(name: str, lag: int, state: ReaderState | None) -> dict[str, Any]:
    """What can be said without reading messages; a reader that only zbus servers have used has no state of ours."""
    kinds = [one.state for one in state.batches.values()] if state else []
    return {
        "reader": name,
        "filter": state.filter if state else None,
        "lag": lag,
        "in_flight": len(state.in_flight) if state else 0,
        "lost": state.lost if state else 0,
    } | {kind: kinds.count(kind) for kind in ("leased", "returned", "dead")}


def print_readers(rows: list[dict[str, Any]]) -> None:
    columns = ["reader", "filter", "lag", "in flight", "lost", "leased", "returned", "dead"]
    cells = [[row["reader"], row["filter"] or "", *(f"{row[name.replace(' ', '_')]:,}" for name in columns[2:])] for row in rows]
    print_table(columns, cells, numbers=tuple(columns[2:]))


@app.command()
def verify(path: TopicPath, dialect: WhichDialect = None, as_json: Json = False) -> None:
    """Read everything that a topic and its readers' batches hold, and compare it with its checksums. Changes nothing.

    The exit code is 5 if there are problems.
    """
    with progress_bar("verifying") as progress:
        try:
            with existing_topic(path, dialect=dialect and dialect.value) as topic:
                report = topic.verify(progress)
        except (Corrupt, BadManifest) as error:  # so bad that it cannot even be opened
            report = Report(problems=[str(error)])
    if as_json:
        print_json({"topic": path, "ok": report.ok} | vars(report))
    else:
        for problem in report.problems:
            print_line(f"damage: {problem}")
        sums = [counted(report.files, "block"), counted(report.batches, "batch", "batches"), sized(report.bytes)]
        found = "no problems" if report.ok else counted(len(report.problems), "problem")
        print_line(f"{found}: {counted(report.records, 'message')} read and found right ({', '.join(sums)})")
        if report.unchecked:
            print_line(f"{sized(report.unchecked)} of them were written by a zbus server: nobody kept a checksum")
    if not report.ok:
        say(f"`qewqew topic repair {path}` rescues what is whole")
        raise typer.Exit(DAMAGED)


@app.command()
def repair(
    path: TopicPath, yes: Yes = False, dialect: WhichDialect = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Make a damaged topic one that opens, with every message that can be read.

    What was damaged is moved aside, never deleted. Where nothing is wrong, nothing is changed. The exit code is 5 if there
    was damage, also when it is mended now.
    """
    full = topic_paths.check_topic_path(path)
    if not os.path.isdir(os.path.join(full, "data")):
        raise Empty("there is no topic here", path=path)
    if not yes:
        ask(f"Repair {path}? What is damaged is moved aside.")
    with Console(stderr=True).status("repairing") if sys.stderr.isatty() else contextlib.nullcontext():
        report = repair_topic(path, dialect=cast(Any, dialect and dialect.value), lock_timeout=lock_timeout)
    if as_json:
        print_json({"topic": path, "ok": report.ok} | dataclasses.asdict(report))
    else:
        for damage in report.damage:
            print_line(f"damage: {damage}")
        if report.set_aside:
            print_line(f"set aside: {report.set_aside}")
        print_line("nothing to repair" if report.ok else f"mended: the topic holds {counted(report.records, 'message')}")
    if not report.ok:
        raise typer.Exit(DAMAGED)


@app.command()
def trim(
    path: TopicPath,
    max_age: Annotated[float | None, typer.Option(metavar="SECONDS", help="Remove blocks that are older.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Remove the oldest blocks while more bytes than these are left.")] = None,
    max_records: Annotated[int | None, typer.Option(help="Remove the oldest blocks while more messages are left.")] = None,
    delete_committed: Annotated[
        bool, typer.Option("--delete-committed", help="Remove blocks of which every reader has committed all.")
    ] = False,
    slow_readers: Annotated[
        SlowReaders, typer.Option(help="Keep what a reader has not committed, or move it on and count what it lost.")
    ] = SlowReaders.hold,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Remove the oldest blocks of a topic, as far as these options allow, and never the last one."""
    if max_age is None and max_bytes is None and max_records is None and not delete_committed:
        raise typer.BadParameter("say what may go: --max-age, --max-bytes, --max-records or --delete-committed")
    if max_age is not None and not 0 < max_age < 1e9:
        raise typer.BadParameter("--max-age is a number of seconds above 0")
    with existing_topic(
        path,
        max_age=None if max_age is None else timedelta(seconds=max_age),
        max_bytes=max_bytes,
        max_records=max_records,
        delete_committed=delete_committed,
        slow_readers=slow_readers.value,
        lock_timeout=lock_timeout,
    ) as topic:
        with uninterrupted():
            removed = topic.trim()
        left = len(topic)
    if as_json:
        print_json({"topic": path, "removed": removed, "messages": left})
    else:
        print_line(f"{counted(removed, 'message')} removed, {left:,} left")
