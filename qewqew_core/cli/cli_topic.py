"""``qewqew topic``: what only topics have: named readers, and the removal of old messages. See docs/cli.md."""

from __future__ import annotations

import enum
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, cast

import typer

from qewqew_core.cli import terminal
from qewqew_core.cli.cli_looking import print_readers, readers_json
from qewqew_core.cli.targets import (
    MOST,
    NO_READERS,
    FilterText,
    Json,
    JsonLines,
    LockTimeout,
    Null,
    Timeout,
    TopicPath,
    WhichDialect,
    Yes,
    existing,
    existing_reader,
    existing_topic,
    group,
    to_fill,
)
from qewqew_core.cli.texts import counted
from qewqew_core.errors import Empty
from qewqew_core.tools.exchange import GROUP_BYTES, GROUP_RECORDS
from qewqew_core.tools.listing import Kind
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_inspection import inspect_topic

app = typer.Typer(no_args_is_help=True, help="For topics only: named readers, and the removal of old messages.")
readers_app = typer.Typer(no_args_is_help=True, help="The readers of a topic: list, add, copy, move and delete them.")
app.add_typer(readers_app, name="readers")


class SlowReaders(enum.StrEnum):
    hold = "hold"
    move = "move"


Name = Annotated[str, typer.Argument(metavar="READER", help="The name of the reader.", show_default=False)]
Start = Annotated[
    str, typer.Option(metavar="WHERE", help="Where a new reader begins: oldest, latest, the number of a message, or a time.")
]


@app.command()
def read(
    path: TopicPath,
    name: Annotated[str, typer.Option("--reader", "-r", metavar="READER", help="Created if it is missing.", show_default=False)],
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, max=MOST, help="At most this many messages; 1 by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All messages.")] = False,
    text: FilterText = None,
    start: Start = "oldest",
    commit: Annotated[bool, typer.Option(help="Commit the messages after they are printed, or give them back.")] = True,
    timeout: Timeout = 0,
    null: Null = False,
    as_json: JsonLines = False,
) -> None:
    """Print the next messages of a reader, and commit them.

    They are committed after they are written: if the output fails or read is killed, the reader gets them again. --filter sets
    the filter of the reader permanently.
    """
    if everything and number is not None:
        raise typer.BadParameter("--all and --number cannot be combined")
    most = sys.maxsize if everything else number or 1
    begin = place_to_start(start)
    taken = 0
    with (
        existing_topic(path) as topic,
        topic.reader(name, text, begin, window=10_000 if commit else 1 << 20) as reader,
    ):
        while taken < most:
            messages = reader.read_many(min(most - taken, GROUP_RECORDS), GROUP_BYTES, timeout=0 if taken else timeout)
            if not messages:
                break
            terminal.print_messages(messages, null, as_json, topic=True)
            terminal.sync_output()
            if commit:
                with terminal.uninterrupted():
                    reader.commit()
            taken += len(messages)
    if not taken:
        raise Empty("no message waits for this reader", path=reader.path)


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


@app.command()
def trim(
    path: TopicPath,
    max_age: Annotated[float | None, typer.Option(metavar="SECONDS", help="Remove blocks that are older than this.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Keep the newest blocks with about this many bytes.")] = None,
    max_records: Annotated[int | None, typer.Option(help="Keep the newest blocks with about this many messages.")] = None,
    delete_committed: Annotated[
        bool, typer.Option("--delete-committed", help="Remove blocks that every reader has committed.")
    ] = False,
    slow_readers: Annotated[
        SlowReaders, typer.Option(help="Keep what a reader has not committed, or move the reader on and count what it lost.")
    ] = SlowReaders.hold,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Remove the oldest blocks of a topic, as far as these options allow, but never the last one."""
    if max_age is None and max_bytes is None and max_records is None and not delete_committed:
        raise typer.BadParameter("say what to remove: --max-age, --max-bytes, --max-records or --delete-committed")
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
        with terminal.uninterrupted():
            removed = topic.trim()
        left = len(topic)
    done = f"{counted(removed, 'record')} removed, {left:,} left"
    terminal.answer(as_json, {"path": path, "removed": removed, "records": left}, done)


# Readers


@readers_app.command("list")
def readers_list(path: TopicPath, as_json: Json = False) -> None:
    """List the readers of a topic, and how many messages each has not committed."""
    existing(path, Kind.TOPIC, NO_READERS)
    terminal.answer_list(
        as_json, readers_json(*inspect_topic(path, closely=True)), dict, print_readers, "the topic has no readers"
    )


@readers_app.command("add")
def readers_add(
    path: TopicPath,
    name: Name,
    text: FilterText = None,
    start: Start = "oldest",
    dialect: WhichDialect = None,
    as_json: Json = False,
) -> None:
    """Create a reader, and the topic if it is missing."""
    begin = place_to_start(start)
    to_fill(path, as_topic=True)
    with Topic(path, dialect=cast(Any, dialect), group=group()) as topic:
        if name in topic.readers():
            raise typer.BadParameter(f"there is a reader {name} already; see `readers seek` and `readers filter`")
        with topic.reader(name, text, begin) as reader:
            _print_place(reader, "begins", as_json)


def _print_place(reader: Reader, verb: str, as_json: bool) -> None:
    number = reader.position().number
    terminal.answer(as_json, {"reader": reader.name, "number": number}, f"{reader.name} {verb} at message {number:,}")


@readers_app.command("copy")
def readers_copy(path: TopicPath, source: Name, target: Name, as_json: Json = False) -> None:
    """Create a reader at the position of another one, or move an existing one there. Filter and batches are not copied."""
    with existing_topic(path) as topic:
        existing_reader(topic, source).close()
        topic.copy_reader(source, target)
        with topic.reader(target) as reader:
            _print_place(reader, "is now", as_json)


@readers_app.command("seek")
def readers_seek(
    path: TopicPath,
    name: Name,
    number: Annotated[int | None, typer.Option("--number", min=0, help="The number of the next message.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="The offset of the next message in the topic.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Move to the first message at or after this time (UTC).")
    ] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="Move to the oldest message.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Move to the end: the next message that is appended.")] = False,
    as_json: Json = False,
) -> None:
    """Move a reader. Deliveries that are not committed are forgotten."""
    if (number is not None) + (offset is not None) + (time is not None) + oldest + latest != 1:
        raise typer.BadParameter("say where to move the reader: one of --number, --offset, --time, --oldest and --latest")
    since = None if time is None else time_of(time, "--time must be a time (2025-01-31T12:00:00)")
    with existing_topic(path) as topic, existing_reader(topic, name) as reader:
        if oldest or latest:
            stats = topic.stats()
            number = stats.first if oldest else stats.next
        with terminal.uninterrupted():
            reader.seek(number=number, offset=offset, time=since)
        _print_place(reader, "is now", as_json)


@readers_app.command("filter")
def readers_filter(
    path: TopicPath,
    name: Name,
    text: Annotated[str, typer.Argument(metavar="FILTER", help="Tags, such as 'order.*;invoice.#'; '' for all messages.")],
    as_json: Json = False,
) -> None:
    """Deliver only messages whose tags match, from the next one on."""
    with existing_topic(path) as topic, existing_reader(topic, name) as reader:
        reader.set_filter(text)
        chosen = f"messages that match {reader.filter}" if reader.filter else "all messages"
        terminal.answer(as_json, {"reader": name, "filter": reader.filter}, f"{name} delivers {chosen}")


@readers_app.command("delete")
def readers_delete(path: TopicPath, name: Name, yes: Yes = False, as_json: Json = False) -> None:
    """Delete a reader, with its batches and dead letters. The messages stay."""
    with existing_topic(path) as topic:
        with existing_reader(topic, name) as reader:
            stats = None if yes else reader.stats()
        if stats is not None:
            batches = counted(stats.leased + stats.returned + stats.dead, "batch", "batches")
            terminal.ask(f"Delete reader {name}, with {counted(stats.records, 'waiting message')} and {batches}?")
        with terminal.uninterrupted():
            topic.delete_reader(name)
    terminal.answer(as_json, {"reader": name}, f"{name} is deleted")
