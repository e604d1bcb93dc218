"""The commands that go on looking: tail, top. See docs/cli.md."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain, islice
from typing import Annotated, Any

import typer
from rich.live import Live

from qewqew_core import arguments
from qewqew_core.cli.cli_topic import FilterText, print_messages
from qewqew_core.cli.terminal import (
    COMMIT_RECORDS,
    INTERRUPTED,
    MOST,
    POLL_SECONDS,
    JsonLines,
    Null,
    age,
    exists,
    few,
    groups,
    iso,
    nothing,
    print_json,
    print_records,
    print_table,
    say,
    sized,
    table_of,
)
from qewqew_core.disk.files import Files
from qewqew_core.errors import QewQewError, RecordsTaken
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.limits import now_ms
from qewqew_core.queue import inspection, paths
from qewqew_core.tools import listing
from qewqew_core.tools.exchange import chunk_records
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic_inspection import inspect_topic
from qewqew_core.topic.view import Found, Position, View

app = typer.Typer()


# Tail


@app.command(rich_help_panel="Looking")
def tail(
    path: Annotated[
        str, typer.Argument(metavar="QUEUE|TOPIC", help="The path of the queue, or of the topic.", show_default=False)
    ],
    number: Annotated[int, typer.Option("--number", "-n", min=0, max=MOST, help="Print so many of the newest.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then print what comes, until Ctrl-C.")] = False,
    text: FilterText = None,
    null: Null = False,
    as_json: JsonLines = False,
) -> None:
    """Print the newest records of a queue, or messages of a topic, and go on. They stay, nothing is locked, no reader is moved.

    Of a queue, what is put and taken again within a tenth of a second may not be seen.
    """
    topic = os.path.isdir(path)
    if not topic and text is not None:
        raise typer.BadParameter("--filter is for topics: records of a queue have no tags")
    if not topic and not exists(path) and not follow:
        raise nothing(path)
    try:
        if topic:
            for messages in _messages(path, number, Filter(text), follow):
                print_messages(messages, null, as_json)
        else:
            for records in _records(path, number, follow):
                print_records(records, null, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _messages(path: str, number: int, chosen: Filter, follow: bool) -> Iterator[list[Message]]:
    with closing(View.of(Files(), topic_paths.check_topic_path(path))) as view:
        place = _newest(view, number, chosen)
        filter = chosen if chosen else None

        def come() -> Iterator[Message]:
            nonlocal place
            for found in view.messages(place, filter=filter):
                place = found.after if isinstance(found, Found) else found
                if isinstance(found, Found):
                    yield found.message

        yield from few(come())
        while follow:
            time.sleep(POLL_SECONDS)
            if place.block < view.index().start:
                say(f"the messages from {place.number:,} on were removed from the topic before they could be read")
                place = view.oldest()
            yield from few(come())


def _newest(view: View, number: int, chosen: Filter) -> Position:
    """Where the last so many messages that match begin."""
    oldest, latest = view.oldest(), view.latest()
    back = number
    while number:
        first = max(oldest.number, latest.number - back)
        begin = view.by_number(first) or oldest
        if not chosen:
            return begin
        found = deque((one.at for one in view.messages(begin, latest, chosen) if isinstance(one, Found)), maxlen=number)
        if len(found) == number or begin.number <= oldest.number:
            return found[0] if found else latest
        back *= 8  # so all that is read costs little more than the last time
    return latest


def _records(path: str, number: int, follow: bool) -> Iterator[list[bytes]]:
    full = paths.check_path(path)
    stamp = _stamp(full)
    found = inspection.snapshot(full)
    skip = sum(one.records for one in found.chunks) - number
    for one in found.chunks:
        if skip < one.records:
            records = islice(chain.from_iterable(_of_chunk(full, found, one)), max(0, skip), None)
            yield from groups(records, COMMIT_RECORDS)
        skip -= one.records
    seen = _end(found)
    settled = False
    while follow:
        time.sleep(POLL_SECONDS)
        if (now := _stamp(full)) == stamp and settled:
            continue
        # Once more when it has not changed: two commits in one tick of the file system's clock leave the same time.
        began, settled, stamp = time.monotonic(), now == stamp, now
        found = inspection.snapshot(full)
        for one in _behind(found.chunks, seen):
            yield from _of_chunk(full, found, one)
        seen = _end(found) or seen
        time.sleep(time.monotonic() - began)  # not more than half of the time is spent on looking


def _of_chunk(path: str, found: inspection.Snapshot, one: Chunk) -> Iterator[list[bytes]]:
    with suppress(RecordsTaken):  # they are no longer the newest
        yield from chunk_records(path, one, found.pending.get(one.id, []))


def _stamp(path: str) -> tuple[tuple[int, int], ...]:
    """Changes with each commit."""
    stamps = []
    for name in (path, path + paths.LOG):
        with suppress(FileNotFoundError):
            status = os.stat(name)
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


_End = tuple[int, IndexEntry, int]  # chunk, its last piece, tail


def _end(found: inspection.Snapshot) -> _End | None:
    for last in found.chunks[-1:]:
        return last.id, last.pieces[-1], last.tail
    return None


def _behind(chunks: list[Chunk], seen: _End | None) -> list[Chunk]:
    """The chunks with records that were put after what was seen."""
    for number, one in enumerate(chunks):
        if seen is not None and one.id == seen[0] and seen[1] in one.pieces:
            if one.tail == seen[2]:
                return chunks[number + 1 :]
            return [replace(one, head=max(one.head, seen[2])), *chunks[number + 1 :]]
    return chunks  # what was seen is taken, and all that is there is newer


# Top


@app.command(rich_help_panel="Looking")
def top(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Looked through with all below it.")] = ".",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="From one look to the next.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each look.")] = False,
) -> None:
    """Watch the queues and topics below a directory, until Ctrl-C, without locking them.

    "per second" is how much the records of a queue have become more or less, and how many messages were appended to a topic.
    """
    before: dict[str, int] = {}
    began = 0.0
    live = Live(auto_refresh=False, screen=True)
    table = live.console.is_terminal and not as_json and not once
    try:
        with live if table else nullcontext():
            while True:
                now = time.monotonic()
                rows, complete = _look(directory)
                for row in rows:
                    counter = row.pop("counter", None)
                    old = before.get(row["path"])
                    row["per_second"] = None if None in (counter, old) else round((counter - old) / (now - began), 1)
                    if counter is not None:
                        before[row["path"]] = counter
                began = now
                if as_json:
                    print_json({"time": iso(arguments.moment(now_ms())), "complete": complete, "found": rows})
                elif table:
                    live.update(table_of(_COLUMNS, [_cells(row) for row in rows], _NUMBERS), refresh=True)
                else:
                    print_table(_COLUMNS, [_cells(row) for row in rows], _NUMBERS)
                if once:
                    break
                time.sleep(max(0.0, interval - (time.monotonic() - now)))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not complete:
        say(f"there are more below {directory} than are shown")


_NUMBERS = ("records", "bytes", "lag", "leased", "returned", "dead", "per second")
_COLUMNS = ["name", "records", "bytes", "oldest", "lag", "leased", "returned", "dead", "per second"]


def _look(directory: str) -> tuple[list[dict[str, Any]], bool]:
    found = listing.find(directory)
    rows = []
    for name in found.queues:
        rows.append({"path": name, "kind": "queue"} | _careful(_queue, os.path.join(directory, name)))
    for name in found.topics:
        rows.append({"path": name, "kind": "topic"} | _careful(_topic, os.path.join(directory, name)))
    return rows, found.complete


def _careful(look: Callable[[str], dict[str, Any]], path: str) -> dict[str, Any]:
    try:
        return look(path)
    except (QewQewError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _queue(path: str) -> dict[str, Any]:
    stats = inspection.inspect(path)
    batches = {name: getattr(stats, name) for name in ("leased", "returned", "dead")}
    head = {"records": stats.records, "bytes": stats.bytes, "oldest": iso(stats.oldest), "lag": None}
    return head | batches | {"counter": stats.records}


def _topic(path: str) -> dict[str, Any]:
    stats, readers = inspect_topic(path)
    states = [batch.state for reader in readers.values() for batch in reader.batches.values()]
    batches = {name: states.count(name) for name in ("leased", "returned", "dead")}
    lag = max(stats.readers.values(), default=None)
    head = {"records": stats.messages, "bytes": stats.bytes, "oldest": iso(stats.oldest), "lag": lag}
    return head | batches | {"counter": stats.next}


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["path"], *["?"] * (len(_COLUMNS) - 2), row["error"]]
    oldest = "" if row["oldest"] is None else age(datetime.fromisoformat(row["oldest"]))
    lag = "" if row["lag"] is None else f"{row['lag']:,}"
    rate = "" if row["per_second"] is None else f"{row['per_second']:+,.1f}"
    counts = [f"{row[name]:,}" for name in ("leased", "returned", "dead")]
    return [row["path"], f"{row['records']:,}", sized(row["bytes"]), oldest, lag, *counts, rate]
