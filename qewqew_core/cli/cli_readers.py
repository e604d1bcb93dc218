"""``qewqew topic readers``: list, add, copy, move and delete the readers of a topic. See docs/cli.md."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
import typer.core

from qewqew_core.cli.cli_topic import (
    FilterText,
    Name,
    Start,
    TopicPath,
    WhichDialect,
    place_to_start,
    print_readers,
    reader_json,
    time_of,
)
from qewqew_core.cli.terminal import (
    Json,
    Yes,
    ask,
    counted,
    existing_reader,
    existing_topic,
    print_json,
    print_line,
    say,
    uninterrupted,
)
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.reader_inspection import look
from qewqew_core.topic.topic import Topic

app = typer.Typer(no_args_is_help=True, help="The readers of a topic: list, add, copy, move and delete them.")


@app.command("list")
def readers_list(path: TopicPath, as_json: Json = False) -> None:
    """List the readers of a topic, and how many messages lie behind what each has committed."""
    with existing_topic(path) as topic:
        lags = topic.stats().readers
        rows = [reader_json(name, lag, look(topic.files, topic.path, name)) for name, lag in lags.items()]
    if as_json:
        print_json(rows)
    elif rows:
        print_readers(rows)
    else:
        say("the topic has no readers")


@app.command("add")
def readers_add(
    path: TopicPath,
    name: Name,
    text: FilterText = None,
    start: Start = "oldest",
    dialect: WhichDialect = None,
    as_json: Json = False,
) -> None:
    """Make a reader; the topic too if it is not there."""
    begin = place_to_start(start)
    with Topic(path, dialect=cast(Any, dialect and dialect.value)) as topic:
        if name in topic.readers():
            raise typer.BadParameter(f"there is a reader {name} already; see `readers seek` and `readers filter`")
        with topic.reader(name, text, begin) as one:
            _print_place(one, "begins", as_json)


def _print_place(one: Reader, verb: str, as_json: bool) -> None:
    number = one.position().number
    if as_json:
        print_json({"reader": one.name, "number": number})
    else:
        print_line(f"{one.name} {verb} at message {number:,}")


@app.command("copy")
def readers_copy(path: TopicPath, source: Name, target: Name, as_json: Json = False) -> None:
    """Make a reader that stands where another one does; one that is there is moved. Filter and batches are not copied."""
    with existing_topic(path) as topic:
        existing_reader(topic, source).close()
        topic.copy_reader(source, target)
        with topic.reader(target) as one:
            _print_place(one, "stands", as_json)


@app.command("seek")
def readers_seek(
    path: TopicPath,
    name: Name,
    number: Annotated[int | None, typer.Option("--number", min=0, help="Of the message to go on at.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="In the topic, of the message to go on at.")] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="TIME", help="Go on at the first message since; UTC.")] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="Go on at the oldest message.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Go on at the next message to come.")] = False,
    as_json: Json = False,
) -> None:
    """Move a reader. What was delivered to anybody and is not committed is forgotten."""
    if (number is not None) + (offset is not None) + (time is not None) + oldest + latest != 1:
        raise typer.BadParameter("say where to: one of --number, --offset, --time, --oldest and --latest")
    since = None if time is None else time_of(time, "--time must be a time (2025-01-31T12:00:00)")
    with existing_topic(path) as topic, existing_reader(topic, name) as one:
        if oldest or latest:
            stats = topic.stats()
            number = stats.first if oldest else stats.next
        with uninterrupted():
            one.seek(number=number, offset=offset, time=since)
        _print_place(one, "stands", as_json)


@app.command("filter")
def readers_filter(
    path: TopicPath,
    name: Name,
    text: Annotated[str, typer.Argument(metavar="FILTER", help="Tags, as 'order.*;invoice.#'; '' for all messages.")],
    as_json: Json = False,
) -> None:
    """Have a reader deliver only messages whose tags match, from the next one on."""
    with existing_topic(path) as topic, existing_reader(topic, name) as one:
        one.set_filter(text)
        if as_json:
            print_json({"reader": name, "filter": one.filter})
        else:
            print_line(f"{name} delivers {f'messages that match {one.filter}' if one.filter else 'all messages'}")


@app.command("delete")
def readers_delete(path: TopicPath, name: Name, yes: Yes = False, as_json: Json = False) -> None:
    """Delete a reader, with its batches and dead letters. The messages stay."""
    with existing_topic(path) as topic:
        with existing_reader(topic, name) as one:
            stats = None if yes else one.stats()
        if stats is not None:
            batches = counted(stats.leased + stats.returned + stats.dead, "batch", "batches")
            ask(f"Delete reader {name}, for which {counted(stats.records, 'message')} wait, and {batches}?")
        with uninterrupted():
            topic.delete_reader(name)
    if as_json:
        print_json({"reader": name})
    else:
        print_line(f"{name} is deleted")
