"""What the commands of ``qewqew`` share: exit codes, error messages, questions, output."""

from __future__ import annotations

import contextlib
import os
import signal
import stat as modes
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from qewqew_core import errors
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.formats.zbus import Message
from qewqew_core.secrecy import hide
from qewqew_core.tools.exchange import few, json_line
from qewqew_core.tools.printing import json_text, visible

T = TypeVar("T")
FAILED, USAGE, NOTHING, LOCKED, DAMAGED, FULL, INTERRUPTED, CLOSED_PIPE = 1, 2, 3, 4, 5, 6, 130, 141
EXIT_CODES: list[tuple[type[errors.QewQewError], int]] = [
    (errors.BadArgument, USAGE),
    (errors.Empty, NOTHING),
    (errors.BatchNotFound, NOTHING),
    (errors.BatchExpired, NOTHING),
    (errors.Locked, LOCKED),
    (errors.Corrupt, DAMAGED),
    (errors.BadManifest, DAMAGED),
    (errors.Full, FULL),
    (errors.DiskFull, FULL),
]
EPILOG = (
    "Exit codes: 0 done; 1 another error; 2 wrong usage; 3 nothing there (empty, or no such batch); 4 another process has "
    "the queue open; 5 damage; 6 queue or disk full; 130 interrupted; 141 the output pipe was closed."
)
_UsageError = cast(type[Exception], typer.BadParameter.__base__)  # of the click that this typer brings, or needs
BAR_BYTES = 4 << 20  # what is shorter needs no progress bar


class Commands(typer.core.TyperGroup):
    """Turns errors that a user may meet into one message and an exit code. Others are bugs, and keep their traceback."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if any("\0" in arg for arg in args):
            ctx.fail("an argument has a NUL character, which no path and no name may have")
        with _visible_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            with _visible_usage():
                return super().invoke(ctx)
        except BrokenPipeError:
            drop_output()
            raise typer.Exit(CLOSED_PIPE) from None
        except KeyboardInterrupt:
            say("interrupted; what was not yet committed has no effect")
            raise typer.Exit(INTERRUPTED) from None
        except errors.QewQewError as error:
            say(f"{type(error).__name__}: {error}")
            if isinstance(error, (errors.Corrupt, errors.BadManifest)) and "qewqew repair" not in str(error):
                say("`qewqew verify` lists all damage, `qewqew repair` rescues what can be read")
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:  # of a file that the user has named, or of standard output
            named = of_file(error) if isinstance(error.filename, str) else None
            say(hide(f"{type(named or error).__name__}: {named or error.strerror or error}"))
            drop_output()
            raise typer.Exit(FAILED if named is None else exit_code(named)) from None


@contextlib.contextmanager
def _visible_usage() -> Iterator[None]:
    """What a usage error repeats of the arguments may be a secret, act on a terminal, or turn the order of its letters."""
    try:
        yield
    except _UsageError as error:
        said: Any = error
        said.message = visible(hide(said.message))
        raise


def of_file(error: OSError) -> errors.QewQewError:
    """What is wrong with the file that an error of the system names, and what to do."""
    try:
        with opening(error.filename, "file", "try again"):
            raise error
    except errors.QewQewError as named:
        return named


def exit_code(error: Exception) -> int:
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED)


def do_each(
    items: Iterable[T],
    act: Callable[[T], object],
    as_json: bool,
    as_dict: Callable[[T], dict[str, Any]],
    as_line: Callable[[T], str],
) -> None:
    """Call ``act`` on each, and print those that are done, even if one of them fails. Ctrl-C waits for the one that has
    begun.
    """
    done: list[T] = []
    try:
        for item in items:
            with uninterrupted():
                act(item)
                done.append(item)
    finally:
        if as_json:
            print_json([*map(as_dict, done)])
        else:
            for line in map(as_line, done):
                print_line(line)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: interrupting a commit would leave the queue object in an unknown state."""
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
        raise typer.BadParameter("there is no terminal to ask on: add --yes, or run this in a terminal")
    typer.confirm(question, abort=True, err=True)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal and the work is long; call it with the bytes done and in
    total.
    """
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
    """Print a message for people, which is not part of the output."""
    print(f"qewqew: {visible(message)}", file=sys.stderr)


def write(data: bytes) -> None:
    """Write to standard output at once: records are bytes, and a write error must show before they are taken."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def drop_output() -> None:
    """Do not retry a failed write when Python exits: it would complain, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sync_output() -> None:
    """Sync the output file before the queue forgets the records."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # a caller's stand-in, not a file of the system
        return
    if modes.S_ISREG(os.fstat(descriptor).st_mode):
        DISK.sync(descriptor)


def print_line(text: str) -> None:
    """Print a line; what is not printable in it is shown as an escape."""
    write(f"{visible(text)}\n".encode())


def print_json(value: object) -> None:
    """Print a line of JSON. Invalid text (in a path) becomes \\udcXX."""
    write(f"{json_text(value)}\n".encode())


def answer_list(
    as_json: bool, found: list[T], as_dict: Callable[[T], object], show: Callable[[list[T]], None], none: str
) -> None:
    """Everything that was found: for a program, or as a table for people, who also see if there is nothing."""
    if as_json:
        print_json([*map(as_dict, found)])
    elif found:
        show(found)
    else:
        say(none)


def answer(as_json: bool, value: object, text: str) -> None:
    """What a command has done: for a program, or for people."""
    if as_json:
        print_json(value)
    else:
        print_line(text)


def print_messages(messages: Iterable[Message], null: bool, as_json: bool, topic: bool = False) -> None:
    """Records of a queue or messages of a topic, as they come."""
    end = b"\0" if null else b"\n"
    for group in few(messages):
        if as_json:
            write(b"".join(json_line(message, topic, **{"attempt": message.attempt} if topic else {}) for message in group))
        else:
            write(b"".join(message.body + end for message in group))


def print_records(records: Iterable[bytes], null: bool, as_json: bool) -> None:
    print_messages(map(Message, records), null, as_json)


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
    write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()).encode())  # with the terminal's own escapes
