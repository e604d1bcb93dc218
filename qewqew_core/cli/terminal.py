"""What the commands of ``qewqew`` share: exit codes, arguments, input, output, and what is said of errors."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import stat as modes
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import IO, Annotated, Any, TypeVar

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from qewqew_core import arguments
from qewqew_core.batch.leases import HasBatches
from qewqew_core.errors import (
    BadArgument,
    BadManifest,
    BatchExpired,
    BatchNotFound,
    Corrupt,
    DiskFull,
    Empty,
    Full,
    Locked,
    QewQewError,
)
from qewqew_core.formats.zbus import Message
from qewqew_core.queue import paths
from qewqew_core.queue.queue import Queue
from qewqew_core.tools.exchange import as_text
from qewqew_core.tools.listing import REMAINS
from qewqew_core.topic import topic_paths
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic import Topic

T = TypeVar("T")
FAILED, USAGE, NOTHING, LOCKED, DAMAGED, FULL, INTERRUPTED, CLOSED_PIPE = 1, 2, 3, 4, 5, 6, 130, 141
EXIT_CODES: list[tuple[type[QewQewError], int]] = [
    (BadArgument, USAGE),
    (Empty, NOTHING),
    (BatchNotFound, NOTHING),
    (BatchExpired, NOTHING),
    (Locked, LOCKED),
    (Corrupt, DAMAGED),
    (BadManifest, DAMAGED),
    (Full, FULL),
    (DiskFull, FULL),
]
EPILOG = (
    "Exit codes: 0 done; 1 another error; 2 wrong usage; 3 nothing there (empty, or no such batch); 4 somebody else has the "
    "queue open; 5 damage; 6 queue or disk full; 130 interrupted; 141 the reader of the output went away."
)
HINT = "`{0} verify` looks for all damage, `{0} repair` rescues what is whole"
COMMIT_RECORDS, COMMIT_BYTES = 1000, 1 << 20  # what `get` takes in one commit
POLL_SECONDS = 0.1
MOST = 1_000_000_000  # that can be asked for
BAR_BYTES = 4 << 20  # what is shorter needs no progress bar


class Commands(typer.core.TyperGroup):
    """Turns the errors that a user may meet into one message and an exit code. Others are bugs, and keep their traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            drop_output()
            raise typer.Exit(CLOSED_PIPE) from None
        except KeyboardInterrupt:
            say("interrupted; what was not committed has not happened")
            raise typer.Exit(INTERRUPTED) from None
        except QewQewError as error:
            say(visible(f"{type(error).__name__}: {error}"))
            if isinstance(error, (Corrupt, BadManifest)) and "qewqew repair" not in str(error):
                say(" ".join(getattr(error, "__notes__", ())) or HINT.format("qewqew"))
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            say(visible(f"{type(error).__name__}: {where}{error.strerror or error}"))
            drop_output()
            raise typer.Exit(FAILED) from None


class Sync(enum.StrEnum):
    commit = "commit"
    never = "never"


QueuePath = Annotated[str, typer.Argument(metavar="QUEUE", help="The path of the queue.", show_default=False)]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The id of the batch.", show_default=False)]
OrphanFiles = Annotated[list[str], typer.Argument(metavar="FILE", help="The chunk files, as listed.", show_default=False)]
BatchIds = Annotated[list[str], typer.Argument(metavar="ID", help="The ids of the batches.", show_default=False)]


def _seconds(value: float) -> float:
    return arguments.check_timeout("a time to wait", value)


LockTimeout = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for another owner of the queue.", callback=_seconds)
]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the first one.", callback=_seconds)]
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


def existing_queue(path: str, lock_timeout: float, **settings: Any) -> Queue:
    """The queue, opened; raises `Empty` where there is none: opening it would make one."""
    if not exists(path):
        raise nothing(path)
    return Queue(path, lock_timeout=lock_timeout, **settings)


@contextlib.contextmanager
def leasing(path: str, reader: str | None, lock_timeout: float, **settings: Any) -> Iterator[HasBatches]:
    """What has batches: a queue, or a reader of a topic."""
    if reader is None:
        with existing_queue(path, lock_timeout, **settings) as queue:
            yield queue
    else:
        with (
            topic_hint(),
            existing_topic(path, lock_timeout=lock_timeout, **settings) as topic,
            existing_reader(topic, reader) as one,
        ):
            yield one


@contextlib.contextmanager
def topic_hint() -> Iterator[None]:
    """What `Commands` says of damage is to name the commands for topics."""
    try:
        yield
    except (Corrupt, BadManifest) as error:
        error.add_note(HINT.format("qewqew topic"))
        raise


def existing_topic(path: str, **settings: Any) -> Topic:
    """The topic, opened; raises `Empty` where there is none: opening it would make one."""
    check_topic(path)
    return Topic(path, **settings)


def check_topic(path: str) -> None:
    """Raises `Empty` where there is no topic, and `BadPath` where none can be."""
    full = topic_paths.check_topic_path(path)
    if not os.path.lexists(os.path.join(full, os.path.basename(full) + ".idx")):
        raise Empty("there is no topic here", path=path)


def existing_reader(topic: Topic, name: str, **settings: Any) -> Reader:
    topic_paths.check_reader_name(name)
    if name not in (names := topic.readers()):
        raise Empty(f"the topic has no reader {name!r}; it has {', '.join(names) or 'none'}", path=topic.path)
    return topic.reader(name, **settings)


def exists(path: str) -> bool:
    full = paths.check_path(path)
    if any(os.path.lexists(full + suffix) for suffix in ("", *REMAINS)):
        return True
    return bool(paths.chunk_ids(full, os.listdir(os.path.dirname(full))))


def nothing(path: str) -> Empty:
    there = exists(path)
    return Empty("the queue is empty" if there else "there is no queue here (an empty closed queue leaves no files)", path=path)


def exit_code(error: Exception) -> int:
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED)


def looked_at(what: str, paths: Iterable[str], look: Callable[[str], dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The paths, each with what ``look`` finds there, or the error; and the exit code of the worst error."""
    rows: list[dict[str, Any]] = []
    worst = 0
    for path in paths:
        try:
            rows.append({what: path} | look(path))
        except (QewQewError, OSError) as error:
            rows.append({what: path, "error": f"{type(error).__name__}: {error}"})
            worst = max(worst, exit_code(error))
    return rows, worst


def do_each(
    ones: Iterable[T],
    act: Callable[[T], object],
    as_json: bool,
    as_dict: Callable[[T], dict[str, Any]],
    as_line: Callable[[T], str],
) -> None:
    """``act`` on each, and print those that it is done to, also if one of them fails. Ctrl-C waits for the one that is begun."""
    done: list[T] = []
    try:
        for one in ones:
            with uninterrupted():
                act(one)
                done.append(one)
    finally:
        if as_json:
            print_json([as_dict(one) for one in done])
        else:
            for one in done:
                print_line(as_line(one))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
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


def ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: say --yes, or run it in one")
    typer.confirm(question, abort=True, err=True)


def check_input(records: list[str] | None, file: str | None, lines: bool, null: bool, whole: bool) -> None:
    if lines + null + whole > 1:
        raise typer.BadParameter("--lines, --null and --whole exclude each other")
    if records and (file is not None or lines or null or whole):
        raise typer.BadParameter("records come from the arguments or from a file, not both")


def records_of(
    stack: contextlib.ExitStack, records: list[str] | None, file: str | None, null: bool, whole: bool, doing: str, largest: int
) -> Iterator[bytes]:
    """The records that are to be stored. One that is larger than the ``largest`` that will be taken ends them, maybe cut."""
    if records:
        return map(os.fsencode, records)
    opened = sys.stdin.buffer if file in (None, "-") else stack.enter_context(open(str(file), "rb"))  # noqa: SIM115
    progress = stack.enter_context(progress_bar(doing))
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


def groups(records: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    records = iter(records)
    while group := list(islice(records, size)):
        yield group


def few(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Groups of messages that are small enough to be held in memory."""
    group: list[Message] = []
    size = 0
    for one in messages:
        group.append(one)
        size += len(one.body)
        if size >= COMMIT_BYTES or len(group) >= COMMIT_RECORDS:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
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


def say(message: str) -> None:
    """Something for people: not part of what the command prints."""
    print(f"qewqew: {message}", file=sys.stderr)


def write(data: bytes) -> None:
    """Straight to standard output: records are bytes, and an error of writing must show before they are taken."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def drop_output() -> None:
    """What cannot be written is not tried again when Python exits: it would complain, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sync_output() -> None:
    """What was written to a file is on disk before the queue forgets it."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # a caller's stand-in, not a file of the system
        return
    if modes.S_ISREG(os.fstat(descriptor).st_mode):
        os.fsync(descriptor)


def print_line(text: str) -> None:
    write(f"{text}\n".encode(errors="backslashreplace"))


def print_json(value: object) -> None:
    # What is no valid text (in a path) becomes \udcXX, which is JSON.
    write(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def print_records(records: list[bytes], null: bool, as_json: bool) -> None:
    if as_json:
        write(b"".join(record_json(record) + b"\n" for record in records))
    else:
        end = b"\0" if null else b"\n"
        write(end.join(records) + end)


def record_json(record: bytes) -> bytes:
    return json.dumps(as_text(record), ensure_ascii=False).encode()


def table_of(columns: list[str], rows: list[list[str]], numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, show_header=bool(columns))
    for name in columns:
        number = name in numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def print_table(columns: list[str], rows: list[list[str]], numbers: tuple[str, ...] = ()) -> None:
    """A table as wide as the terminal; in a pipe as wide as it needs to be."""
    console = Console(width=None if sys.stdout.isatty() else 1 << 16)
    with console.capture() as capture:
        console.print(table_of(columns, rows, numbers))
    print_line("\n".join(line.rstrip() for line in capture.get().splitlines()))


def visible(text: str) -> str:
    """Without control characters, which a reason or a path may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def sized(number: float) -> str:
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def age(moment: datetime) -> str:
    import pendulum

    return pendulum.instance(moment).diff_for_humans(absolute=True)


def short(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else None
