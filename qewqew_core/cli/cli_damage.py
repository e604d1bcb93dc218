"""The commands that find and repair damage: verify, repair, orphans, dump. See docs/cli.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from qewqew_core import arguments
from qewqew_core.batch.reports import Damage, Report
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import (
    MOST,
    Dialect,
    Json,
    JsonLines,
    LockTimeout,
    Null,
    Path,
    QueuePath,
    WhichDialect,
    Yes,
    existing,
    existing_queue,
    group,
    only_for,
)
from qewqew_core.cli.texts import counted, iso, sized
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, read_all
from qewqew_core.errors import BadArgument, BadManifest, BadPath, Corrupt, Empty
from qewqew_core.queue.inspection import strange_at_chunks
from qewqew_core.queue.orphans import Orphan
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.repairing import repair as repair_queue
from qewqew_core.tools import dump as dumping
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.printing import json_text, visible
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_repairing import repair_topic

app = typer.Typer()
orphans_app = typer.Typer(
    no_args_is_help=True,
    help="Chunk files next to a queue that nothing refers to: look at their records, then adopt them or set them aside.",
)
app.add_typer(orphans_app, name="orphans", rich_help_panel="Damage")

OrphanFiles = Annotated[list[str], typer.Argument(metavar="FILE", help="The chunk files, as listed.", show_default=False)]

_NO_ORPHANS = "only queues have orphans"
_TIMES = ("time", "created", "updated", "timestamp")  # the names of fields that are times
_LINES = 1000  # that are written at once


@app.command(rich_help_panel="Damage")
def verify(path: Path, dialect: WhichDialect = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """Read everything that a queue or topic and its batches hold, and compare it with its checksums. Changes nothing.

    A queue is locked while this runs. The exit code is 5 if there is damage, else 1 if something strange is at a name of the
    store: a link, a pipe, a file of another user.
    """
    kind = existing(path)
    only_for(Kind.TOPIC, kind, path, dialect=dialect)
    with terminal.progress_bar("verifying") as progress:
        try:
            with _open(path, kind, dialect, lock_timeout) as store:
                report = store.verify(progress)
        except (Corrupt, BadManifest) as error:  # so bad that it cannot even be opened
            report = Report(problems=[str(error)])
    if as_json:
        terminal.print_json({"path": path, "kind": kind, "ok": report.ok} | dataclasses.asdict(report))
    else:
        for problem in report.problems:
            terminal.print_line(f"damage: {problem}")
        _print_strange(report.strange)
        for orphan in report.orphans:
            terminal.print_line(f"nothing refers to it, see `qewqew orphans list {path}`: {orphan}")
        sums = [counted(report.files, "file"), counted(report.batches, "batch", "batches"), sized(report.bytes)]
        found = "no problems" if report.ok else counted(len(report.problems) + len(report.strange), "problem")
        terminal.print_line(f"{found}: {counted(report.records, 'correct record')} ({', '.join(sums)})")
        if report.unchecked:
            terminal.print_line(
                f"{sized(report.unchecked)} have no checksum: a zbus server wrote them, or the log with the checksum was lost"
            )
    if report.problems:
        terminal.say(f"`qewqew repair {path}` rescues what can be read")
    _end(path, report.strange, bool(report.problems))


def _print_strange(strange: dict[str, str]) -> None:
    for place, said in strange.items():
        terminal.print_line(f"strange: {place}: {said}")


def _end(path: str, strange: dict[str, str], damaged: bool) -> None:
    if strange:
        terminal.say(f"what is strange stays: do what its line says; then `qewqew verify {path}` tells whether all is well")
    if damaged or strange:
        raise typer.Exit(terminal.DAMAGED if damaged else terminal.FAILED)


def _open(path: str, kind: Kind, dialect: Dialect | None, lock_timeout: float) -> Queue | Topic:
    if kind is Kind.QUEUE:
        return Queue(path, lock_timeout=lock_timeout, group=group())
    return Topic(path, dialect=cast(Any, dialect), lock_timeout=lock_timeout, group=group())


@app.command(rich_help_panel="Damage")
def repair(
    path: Path, yes: Yes = False, dialect: WhichDialect = None, lock_timeout: LockTimeout = 10.0, as_json: Json = False
) -> None:
    """Make a damaged queue or topic usable again, with every record that can be read and no wrong one.

    Damaged files are moved aside, never deleted. If nothing is wrong, nothing changes. What is strange, as verify says, stays.
    The exit code is 5 if there was damage, even if it is repaired now, else 1 if something is strange.
    """
    kind = existing(path)
    only_for(Kind.TOPIC, kind, path, dialect=dialect)
    if not yes:
        terminal.ask(f"Repair {path}? Damaged files are moved aside.")
    with Console(stderr=True).status("repairing") if sys.stderr.isatty() else contextlib.nullcontext():
        if kind is Kind.QUEUE:
            report = repair_queue(path, lock_timeout=lock_timeout, group=group())
        else:
            report = repair_topic(path, dialect=cast(Any, dialect), lock_timeout=lock_timeout, group=group())
    if as_json:
        terminal.print_json({"path": path, "kind": kind, "ok": report.ok} | dataclasses.asdict(report))
    else:
        for damage in report.damage:
            terminal.print_line(f"damage: {damage} ({_lost(damage)})")
        for note in report.notes:
            terminal.print_line(f"note: {note}")
        if report.set_aside:
            terminal.print_line(f"set aside: {report.set_aside}")
        _print_strange(report.strange)
        holds = f"the {kind} holds {counted(report.records, 'record')} and {counted(report.batches, 'batch', 'batches')}"
        terminal.print_line(f"{'repaired' if report.damage else 'nothing to repair'}: {holds}")
    _end(path, report.strange, bool(report.damage))


def _lost(damage: Damage) -> str:
    records = "an unknown number of records" if damage.records is None else counted(damage.records, "record")
    return f"{'' if damage.bytes is None else counted(damage.bytes, 'byte') + ', '}{records} lost"


@orphans_app.command("list")
def orphans_list(path: QueuePath, lock_timeout: LockTimeout = 10.0, as_json: Json = False) -> None:
    """List chunk files that have records and that nothing refers to.

    They are never delivered. Nobody can say whether their records were taken long ago, so look at them. What is
    strange at the name of such a file, as verify says, is listed with what to do about it, and the exit code is 1.
    """
    with existing_queue(path, _NO_ORPHANS, lock_timeout) as queue:
        found: list[Orphan | BadPath] = [*queue.orphans(), *strange_at_chunks(path)]
    terminal.answer_list(as_json, found, _orphan_json, _print_orphans, "no orphans")
    if any(isinstance(each, BadPath) for each in found):
        raise typer.Exit(terminal.FAILED)


def _print_orphans(found: list[Orphan | BadPath]) -> None:
    rows = [
        [os.path.basename(each.path or ""), "?", "?", each.what]
        if isinstance(each, BadPath)
        else [os.path.basename(each.path), f"{each.records:,}", sized(each.bytes), each.problem or ""]
        for each in found
    ]
    terminal.print_table(["file", "records", "bytes", "problem"], rows, numbers=("records", "bytes"))


@orphans_app.command("show")
def orphans_show(
    path: QueuePath,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The chunk file, as listed.", show_default=False)],
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MOST, help="Print at most this many records.")] = 10,
    null: Null = False,
    as_json: JsonLines = False,
    lock_timeout: LockTimeout = 10.0,
) -> None:
    """Print the first records of a chunk file that nothing refers to."""
    with existing_queue(path, _NO_ORPHANS, lock_timeout) as queue:
        (orphan,) = _orphans(queue, [file])
    terminal.print_records(islice(orphan, number), null, as_json)


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
    with existing_queue(path, _NO_ORPHANS, lock_timeout) as queue:
        terminal.do_each(
            _orphans(queue, names),
            partial(act, queue),
            as_json,
            _orphan_json,
            lambda orphan: f"{os.path.basename(orphan.path)}: {counted(orphan.records, 'record')} {done}",
        )


def _orphans(queue: Queue, names: list[str]) -> list[Orphan]:
    """Those with these names: all are there, or nothing is done."""
    found = {os.path.basename(orphan.path): orphan for orphan in queue.orphans()}
    wanted = dict.fromkeys(map(os.path.basename, names))
    if missing := [name for name in wanted if name not in found]:
        for error in strange_at_chunks(queue.path):
            if os.path.basename(error.path or "") in missing:
                raise error
        raise Empty(f"no orphan is called {missing[0]!r}; `qewqew orphans list` names them", path=queue.path)
    return [found[name] for name in wanted]


def _orphan_json(orphan: Orphan | BadPath) -> dict[str, Any]:
    if isinstance(orphan, BadPath):
        return {"file": orphan.path, "records": None, "bytes": None, "problem": orphan.what}
    return {"file": orphan.path, "records": orphan.records, "bytes": orphan.bytes, "problem": orphan.problem}


@app.command(rich_help_panel="Damage")
def dump(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A file of a queue, topic or batch.", show_default=False)],
    offset: Annotated[int, typer.Option(min=0, help="Show what begins at or after this offset …")] = 0,
    length: Annotated[int | None, typer.Option(min=1, help="… and within this many bytes.")] = None,
    number: Annotated[int, typer.Option("--bytes", min=1, max=MOST, help="How many bytes of each record to show.")] = 40,
    kind: Annotated[dumping.FileKind | None, typer.Option("--as", help="The kind of file, if its name does not say it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each line.")] = False,
) -> None:
    """Show what a header, chunk, transaction log, block, index … says: each record, message and frame, with its offset.

    Locks and changes nothing. Damaged places are marked, and the exit code is 5.
    """
    if os.path.isdir(path):
        raise BadPath("is a directory; dump shows one file, such as QUEUE.1, QUEUE.wal or TOPIC/data/….zbus", path=path)
    files = Files()
    path = os.path.abspath(path)
    with Descriptors([files.open_to_read(path, follow=True)]) as (fd,):
        what = kind or dumping.kind_by_name(path)
        if what is None:
            raise BadArgument("the name does not say what kind of file this is: use --as (a manifest is plain JSON)", path=path)
        size, whole = files.size(fd), partial(read_all, files, fd, path)
        file = dumping.File(path, size, lambda at, size: files.read(fd, size, at), whole, number)
        if offset and offset >= file.size:
            raise BadArgument(f"the file has only {file.size:,} bytes", path=path)
        end = file.size if length is None else offset + length - 1
        damaged = 0
        shown: list[str] = []
        for line in dumping.lines(file, what):
            if offset <= line.offset <= end:
                damaged += line.damage is not None
                shown += [json_text(_line_json(line))] if as_json else map(visible, _line_text(line))
                if len(shown) >= _LINES:
                    _print_lines(shown)
        _print_lines(shown)
    if damaged:
        terminal.say(f"{counted(damaged, 'damaged place')}; `qewqew repair` rescues what can be read")
        raise typer.Exit(terminal.DAMAGED)


def _print_lines(lines: list[str]) -> None:
    terminal.write("".join(f"{line}\n" for line in lines).encode())
    lines.clear()


def _plain(value: Any) -> Any:
    """As JSON can say it; bytes are hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
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
    behind = [f"{'':>12}  {operation.pop('op'):<12}  {_said(operation)}" for operation in map(dict, operations)]
    return [f"{line.offset:>10}  {line.what:<12}  {said}".rstrip(), *map(str.rstrip, behind)]


def _said(fields: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_value(name, value)}" for name, value in fields.items() if value not in (None, "", [], {}))


def _value(name: str, value: Any) -> str:
    if name in _TIMES and isinstance(value, int):
        with contextlib.suppress(ValueError, OverflowError):
            return iso(arguments.moment(value)) or ""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)
