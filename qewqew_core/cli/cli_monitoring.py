"""The commands for monitors: check, for Nagios and others, and metrics, for Prometheus; and preflight. See docs/operations.md."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from datetime import timedelta
from functools import partial
from typing import Annotated

import typer

from qewqew_core.batch.stats import LONGEST_LEASE
from qewqew_core.batch.store import is_url
from qewqew_core.cli import terminal
from qewqew_core.cli.targets import Json, StoreOptions, group, store_options
from qewqew_core.cli.texts import counted
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadPath, Corrupt, QewQewError
from qewqew_core.secrecy import excerpt
from qewqew_core.tools import preflight
from qewqew_core.tools.monitoring import Watched, age, exposition, file_systems, holdings, long_leases, watch

app = typer.Typer()

# What monitors know an exit code by: https://www.monitoring-plugins.org/doc/guidelines.html
OK, WARNING, CRITICAL, UNKNOWN = range(4)
_NAMES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_WORST = (OK, UNKNOWN, WARNING, CRITICAL)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> timedelta:
    """``90``, ``90s``, ``5m``, ``2h`` or ``1.5d``."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a time: write it as 90s, 5m, 2h or 1d")
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])


Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH", help="Queues, topics, and directories with everything below them.", show_default="."),
]
Age = Annotated[
    timedelta | None, typer.Option(parser=duration, metavar="TIME", help="How long a record may stay unacknowledged.")
]
Count = Annotated[int | None, typer.Option(min=0, help="How many records may wait.")]


@app.command(rich_help_panel="Looking")
def check(
    paths: Paths = None,
    max_age: Age = None,
    warn_age: Age = None,
    max_records: Count = None,
    warn_records: Count = None,
    max_lease_age: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="How long a batch may be leased.", show_default="1d")
    ] = None,
    max_lock_age: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="How long a process may have a queue open.")
    ] = None,
    expect: Annotated[int, typer.Option(min=0, help="How many queues and readers there are at least.")] = 1,
    min_free_bytes: Annotated[int, typer.Option(min=0, help="How many bytes must be free on their file systems.")] = 0,
    min_free_inodes: Annotated[int, typer.Option(min=0, help="How many inodes must be free there.")] = 0,
    max_dead: Annotated[int, typer.Option(min=0, help="How many batches may be dead.")] = 0,
    as_json: Json = False,
) -> None:
    """Say whether anything is late, stuck, dead or broken, for Nagios, Icinga, Sensu and others.

    It uses their exit codes: 0 OK, 1 warning (--warn-…), 2 critical (the other limits; damage), 3 unknown (something cannot be
    read). Times are 90s, 5m, 2h or 1d. Nothing is locked.
    """
    try:
        found = list(watch(paths or ["."]))
    except BadPath as error:
        terminal.print_line(f"QEWQEW UNKNOWN: {error}")
        raise typer.Exit(UNKNOWN) from None
    problems: list[tuple[int, str]] = []

    def bound(watched: Watched, what: str, value: timedelta | int, limits: dict[int, timedelta | int | None]) -> None:
        for severity, limit in limits.items():
            if limit is not None and value > limit:  # type: ignore[operator]  # of one type, both
                problems.append((severity, f"{watched.name}: {what.format(_told(value))}, more than {_told(limit)}"))
                return

    for watched in found:
        if watched.damage is not None:
            remedy = f"run `qewqew verify {watched.path}`, then `qewqew repair {watched.path}`"
            problems.append((CRITICAL, f"{watched.name}: a task has met damage: {watched.damage}; {remedy}"))
        if watched.stats is None:
            severity = CRITICAL if isinstance(watched.error, Corrupt) else UNKNOWN
            problems.append((severity, f"{watched.name}: {type(watched.error).__name__}: {watched.error}"))
            continue
        stats = watched.stats
        unacknowledged = age(stats.oldest_unacknowledged)
        bound(watched, "a record has not been acknowledged for {}", unacknowledged, {CRITICAL: max_age, WARNING: warn_age})
        bound(watched, "{} records wait", stats.records, {CRITICAL: max_records, WARNING: warn_records})
        problems += _long_leases(watched, LONGEST_LEASE if max_lease_age is None else max_lease_age)
        bound(watched, "{} dead", stats.dead, {CRITICAL: max_dead})
        if stats.missing:
            lack = counted(stats.missing, "batch lacks its files", "batches lack their files")
            problems.append((CRITICAL, f"{watched.name}: {lack}: somebody has removed them. `qewqew verify` names them"))
    for watched, held in holdings(found):
        if held is not None and held.seconds is not None:
            who = "another program" if held.pid is None else f"process {held.pid}"
            waits = f" ({counted(held.waiters, 'other waits', 'others wait')})" if held.waiters else ""
            has = f"{who}{waits} has had it open for {{}}"
            bound(watched, has, timedelta(seconds=held.seconds), {CRITICAL: max_lock_age})
    for room in file_systems(paths or ["."], found):
        if room.free_bytes < min_free_bytes:
            problems.append((CRITICAL, f"{room.directory}: {room.free_bytes:,} bytes are free, fewer than {min_free_bytes:,}"))
        if room.free_inodes is not None and room.free_inodes < min_free_inodes:
            problems.append((CRITICAL, f"{room.directory}: {room.free_inodes:,} inodes are free, fewer than {min_free_inodes:,}"))
    if len(found) < expect:
        there = counted(len(found), "queue or reader is", "queues and readers are") + " there"
        problems.append((CRITICAL, f"{there}, fewer than {expect:,} (--expect): is the disk mounted?"))
    problems.sort(key=lambda problem: -_WORST.index(problem[0]))
    worst = problems[0][0] if problems else OK
    numbers = {
        "watched": len(found),
        "records": sum(watched.stats.records for watched in found if watched.stats),
        "oldest": max(
            (int(age(watched.stats.oldest_unacknowledged).total_seconds()) for watched in found if watched.stats), default=0
        ),
        "dead": sum(watched.stats.dead for watched in found if watched.stats),
    }
    if as_json:
        told = [{"state": _NAMES[severity], "text": text} for severity, text in problems]
        terminal.print_json({"state": _NAMES[worst], "problems": told, **numbers})
        raise typer.Exit(worst)
    said = problems[0][1] if problems else f"{counted(len(found), 'queue or reader', 'queues and readers')}, none late"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    figures = f"records={numbers['records']} oldest={numbers['oldest']}s dead={numbers['dead']}"
    terminal.print_line(f"QEWQEW {_NAMES[worst]}: {said}{more} | {figures}")
    for severity, text in problems[1:]:
        terminal.print_line(f"{_NAMES[severity]}: {text}")
    raise typer.Exit(worst)


def _long_leases(watched: Watched, limit: timedelta) -> list[tuple[int, str]]:
    reader = "" if watched.reader is None else f" --reader {watched.reader}"
    try:
        found = long_leases(watched, limit)
    except QewQewError as error:  # it was read a moment ago
        return [(UNKNOWN, f"{watched.name}: {type(error).__name__}: {error}")]
    return [
        (
            CRITICAL,
            f"{watched.name}: batch {batch.id} has been leased for {_told(lasted)}, more than {_told(limit)}, by "
            f"{excerpt(batch.keys[-1], 300)}; if nobody works on it any more, clear the task that leased it, or run "
            f"`qewqew nack {watched.path} {batch.id}{reader}`",
        )
        for batch, lasted in found
    ]


def _told(value: timedelta | int) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    seconds = value.total_seconds()
    unit = next((unit for unit in "dhm" if seconds >= 2 * _UNITS[unit]), "s")
    return f"{seconds / _UNITS[unit]:,.3g} {unit}"


@app.command("preflight", rich_help_panel="Looking")
def preflight_command(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|URL", help="A directory of queues, or a place such as s3://lake/staged.", show_default=False
        ),
    ],
    id: Annotated[str | None, typer.Option(metavar="ID", help="The id that the directory must have.")] = None,
    min_free_bytes: Annotated[int, typer.Option(min=0, help="How many bytes must be free on its file system.")] = 0,
    option: StoreOptions = None,
    spark: Annotated[bool, typer.Option("--spark", help="Also look for spark-submit and Java.")] = False,
    as_json: Json = False,
) -> None:
    """Say whether this user on this host can use a directory of queues, or a place in an object store, and if not, what to do.

    In a directory it makes a queue and removes it. In a store it leaves the file that the first commit leaves.
    """
    if is_url(place):
        if id is not None or min_free_bytes:
            raise BadArgument(
                "a place in a store has no id, and nobody runs out of room there: leave out --id and --min-free-bytes"
            )
        answers = preflight.of_url(place, store_options(option))
    else:
        if option:
            raise BadArgument("--option is for the URL of a store")
        settings = {"group": group(), "min_free_bytes": min_free_bytes}
        answers = preflight.of_directory(partial(preflight.find, place, id), settings)
    answers += preflight.of_spark() if spark else []
    if as_json:
        terminal.print_json([answer._asdict() for answer in answers])
    else:
        terminal.print_table([], [["ok" if answer.ok else "WRONG", answer.what, answer.text] for answer in answers])
    raise typer.Exit(0 if all(answer.ok for answer in answers) else terminal.FAILED)


@app.command(rich_help_panel="Looking")
def metrics(
    paths: Paths = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Replace this file as a whole instead of printing.")] = None,
    every: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="Repeat at this interval (1s or more) until Ctrl-C.")
    ] = None,
) -> None:
    """Tell Prometheus what waits and what is leased, returned or dead, even while no DAG runs.

    A path that is not there is said to have nothing; the exit code is 1 then.

    --output is for the textfile collector of node_exporter: name a file in the collector's directory that ends in .prom. Nothing
    is locked.
    """
    while True:
        began = time.monotonic()
        said: list[str] = []
        text = exposition(paths or ["."], said.append)
        for line in said:
            terminal.say(line)
        if output is None:
            terminal.write(text.encode())
        else:
            with opening(output, "file", "try again"):
                _replace(output, text.encode())
        if every is None:
            raise typer.Exit(1 if said else 0)
        try:
            time.sleep(max(0.0, max(1.0, every.total_seconds()) - (time.monotonic() - began)))
        except KeyboardInterrupt:
            raise typer.Exit(terminal.INTERRUPTED) from None


def _replace(path: str, data: bytes) -> None:
    """The collector reads it at any time, and is another user."""
    directory, name = os.path.split(path)
    try:
        if os.path.lexists(path) and not stat.S_ISREG(kind := os.lstat(path).st_mode) and not stat.S_ISLNK(kind):
            raise OSError(errno.EISDIR if stat.S_ISDIR(kind) else errno.ENOTDIR, "not a regular file", path)
        descriptor, temporary = tempfile.mkstemp(".tmp", f"{name}.", directory or ".")  # a name that nobody can have taken
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error  # the name that the user knows
