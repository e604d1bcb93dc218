"""The commands that read and write files: dump, export, import. See docs/cli.md."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import IO, Annotated, Any

import typer

from qewqew_core import arguments
from qewqew_core.cli.terminal import (
    DAMAGED,
    MOST,
    Json,
    LockTimeout,
    counted,
    exists,
    few,
    iso,
    nothing,
    print_json,
    print_line,
    progress_bar,
    say,
    uninterrupted,
    visible,
    write,
)
from qewqew_core.disk.files import Files
from qewqew_core.errors import BadArgument, BadPath
from qewqew_core.formats.zbus import Message
from qewqew_core.queue import paths
from qewqew_core.queue.queue import Queue
from qewqew_core.tools import diskqueue, exchange
from qewqew_core.tools import dump as dumping
from qewqew_core.tools.listing import is_topic, queues_in
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_session import TopicSession

app = typer.Typer()


_TIMES = ("time", "created", "updated", "timestamp")
_LINES = 1000  # that are written at once


@app.command(rich_help_panel="Damage")
def dump(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A file of a queue, topic or batch.", show_default=False)],
    offset: Annotated[int, typer.Option(min=0, help="Show what begins at this offset of the file or behind it …")] = 0,
    length: Annotated[int | None, typer.Option(min=1, help="… and before so many bytes of it.")] = None,
    number: Annotated[int, typer.Option("--bytes", min=1, max=MOST, help="How many bytes of each record are shown.")] = 40,
    kind: Annotated[dumping.Kind | None, typer.Option("--as", help="What the file is, where its name does not say it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each line.")] = False,
) -> None:
    """Show what a header, chunk, transaction log, block, index … says: each record, message and frame, with its offset.

    Nothing is locked or changed. The exit code is 5 if what is shown is damaged; then the place is marked.
    """
    if os.path.isdir(path):
        raise BadPath("is a directory; dump shows one file, such as QUEUE.1, QUEUE.log or TOPIC/data/….zbus", path=path)
    files = Files()
    path = os.path.abspath(path)
    fd = files.open_to_read(path, follow=True)
    try:
        what = kind or dumping.kind_of(path)
        if what is None:
            raise BadArgument("its name does not say what this file is: say it with --as (a manifest is JSON itself)", path=path)
        source = dumping.Source(path, files.size(fd), lambda at, size: files.read(fd, size, at), number)
        if offset and offset >= source.size:
            raise BadArgument(f"the file has only {source.size:,} bytes", path=path)
        end = source.size if length is None else offset + length - 1
        damaged = 0
        shown: list[str] = []
        for line in dumping.lines(source, what):
            if offset <= line.offset <= end:
                damaged += line.damage is not None
                shown += [json.dumps(_line_json(line), ensure_ascii=False)] if as_json else map(visible, _line_text(line))
                if len(shown) >= _LINES:
                    _print_lines(shown)
        _print_lines(shown)
    finally:
        files.close(fd)
    if damaged:
        say(f"{counted(damaged, 'damaged place')}; `qewqew repair` and `qewqew topic repair` rescue what is whole")
        raise typer.Exit(DAMAGED)


def _print_lines(lines: list[str]) -> None:
    write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
    lines.clear()


def _plain(value: Any) -> Any:
    """As JSON can say it; bytes are hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _line_json(line: dumping.Line) -> dict[str, Any]:
    fields = {**line.fields}
    if "data" in fields:
        fields |= _data(fields.pop("data"), fields["bytes"])
    return {"offset": line.offset, "what": line.what, **_plain(fields), "damage": line.damage}


def _data(data: bytes, size: int) -> dict[str, str]:
    """The beginning of a record: as text, if it is some."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError as error:
        if len(data) < size and error.start > len(data) - 4:  # cut within a character
            return {"text": data[: error.start].decode()}
        return {"hex": data.hex()}


def _line_text(line: dumping.Line) -> list[str]:
    fields = {**line.fields}
    operations = fields.pop("operations", [])
    more = ""
    if "data" in fields:
        ((_, text),) = _data(data := fields.pop("data"), fields["bytes"]).items()
        more = f"  {text}{' …' if len(data) < fields['bytes'] else ''}"
    said = _said(fields) + more + (f"  damage: {line.damage}" if line.damage else "")
    behind = [f"{'':>12}  {one['op']:<12}  {_said({name: one[name] for name in one if name != 'op'})}" for one in operations]
    return [f"{line.offset:>10}  {line.what:<12}  {said}".rstrip(), *map(str.rstrip, behind)]


def _said(fields: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_value(name, value)}" for name, value in fields.items() if value not in (None, "", [], {}))


def _value(name: str, value: Any) -> str:
    if name in _TIMES and isinstance(value, int):
        with contextlib.suppress(ValueError, OverflowError):
            return iso(arguments.moment(value)) or ""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


# Export and import


Where = Annotated[str, typer.Argument(metavar="QUEUE|TOPIC", help="The path of the queue, or of the topic.", show_default=False)]


@app.command(rich_help_panel="Files")
def export(
    path: Where,
    to: Annotated[str | None, typer.Option(metavar="FILE", help="A new file; standard output by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON; needs --to.")] = False,
) -> None:
    """Write the records that wait in a queue, or the messages of a topic, to a file, as JSON lines. They stay.

    As of now, without a lock; records of batches are not written. The file is there when it is complete and on disk.
    """
    if as_json and to is None:
        raise typer.BadParameter("--json needs --to: the records go to standard output")
    _no_parquet(to or "", 'spark.read.format("qewqew").load(PATH).write.parquet(FILE)')
    topic = os.path.isdir(path)
    if not topic and not exists(path):
        raise nothing(path)
    with progress_bar("exporting") as progress:
        rows = exchange.messages(path, progress) if topic else exchange.records(path, progress)
        if to is None:
            sys.stdout.flush()
            exchange.write_json_lines(sys.stdout.buffer, rows, topic)
            sys.stdout.buffer.flush()
            return
        count = _new_file(to, lambda file: exchange.write_json_lines(file, rows, topic))
    if as_json:
        print_json(_target_json(path, topic, count) | {"file": to})
    else:
        print_line(f"{_counted(count, topic)} exported to {to}")


def _no_parquet(file: str, instead: str) -> None:
    if file.rstrip("/").endswith(".parquet"):  # Spark makes directories
        raise BadArgument(f"by its name this is Parquet, which is for Spark: {instead}; see docs/spark.md", path=file)


def _target_json(path: str, topic: bool, count: int) -> dict[str, Any]:
    return {"topic": path, "messages": count} if topic else {"queue": path, "records": count}


def _counted(count: int, topic: bool) -> str:
    return counted(count, "message" if topic else "record")


def _new_file(path: str, store: Callable[[IO[bytes]], int]) -> int:
    """A file that is there with all its content, on disk, or not at all."""
    if os.path.lexists(path):
        raise BadArgument("there is a file already; remove it, or choose another name", path=path)
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            count = store(file)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename it replaces nothing
        Files().sync_directory(os.path.dirname(os.path.abspath(path)))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return count


@app.command("import", rich_help_panel="Files")
def import_command(
    path: Where,
    source: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines, or a directory of DiskQueue; - is standard input.")],
    as_topic: Annotated[bool, typer.Option("--topic", help="Make a topic if nothing is there, not a queue.")] = False,
    key: Annotated[
        str | None, typer.Option(help="Import only if this key was not used before; by default it is made of the records.")
    ] = None,
    lock_timeout: LockTimeout = 10.0,
    as_json: Json = False,
) -> None:
    """Put the records of a file into a queue, or append its messages to a topic: all of them, in one commit, or none.

    The same records are imported once: after an interruption, do it again.
    """
    _no_parquet(source, 'spark.read.parquet(FILE).write.format("qewqew").mode("append").save(PATH)')
    topic = as_topic or os.path.isdir(path)
    (topic_paths.check_topic_path if topic else paths.check_path)(path)
    if key is not None:
        arguments.check_key(key)
    digest = exchange.Digest()
    more = False
    with contextlib.ExitStack() as stack:
        rows = _rows(stack, source)
        first = list(next(few(rows), []))  # nothing is locked or made before the file is known to be one
        opened: Topic | Queue = Topic(path, lock_timeout=lock_timeout) if topic else Queue(path, lock_timeout=lock_timeout)
        stack.enter_context(opened)
        session = stack.enter_context(contextlib.closing(opened.session()))
        for group in chain([first], few(rows)):
            for one in group:
                digest.add(one)
                more = more or one[1:5] != Message(b"")[1:5]
            if isinstance(session, TopicSession):
                session.append_many(group)
            else:
                session.put_many([one.body for one in group])
        before = len(opened)
        with uninterrupted():
            stored = session.commit(key or digest.key)
        repeated = len(opened) == before and stored > 0
    if more and not topic:
        say("a queue keeps records only: tags, ids and timestamps are left out")
    if as_json:
        print_json(_target_json(path, topic, stored) | {"repeated": repeated})
    elif repeated:
        print_line(f"nothing to do: {_counted(stored, topic)} imported before")
    else:
        print_line(f"{_counted(stored, topic)} imported")


def _rows(stack: contextlib.ExitStack, source: str) -> Iterator[Message]:
    progress = stack.enter_context(progress_bar("importing"))
    if source == "-":
        return exchange.read_json_lines(sys.stdin.buffer, source, progress)
    if os.path.isdir(source) and not is_topic(os.path.abspath(source)):
        found = diskqueue.find(source)
        if found.torn:
            say(
                f"{source}: the last transaction was not finished, and has not happened: {counted(found.torn, 'byte')} of the log"
            )
        return map(Message, diskqueue.read(source, found.items, progress))
    if os.path.isdir(source) or os.path.basename(source) in queues_in(os.path.dirname(source) or "."):
        raise BadArgument(
            "is a queue or topic in the format that QewQew reads and writes: use it as it is, or copy what it holds with "
            f"`qewqew export {source} | qewqew import PATH -`",
            path=source,
        )
    return exchange.read_json_lines(stack.enter_context(open(source, "rb")), source, progress)
