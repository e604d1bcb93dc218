"""``qewqew bench``: how fast queues are on a disk, beside a plain file on the same disk. See docs/cli.md."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from qewqew_core import chunk
from qewqew_core.errors import BadPath
from qewqew_core.queue import Queue
from qewqew_core.terminal import Json, print_json, print_table, sized

TURNS = 4  # of the queue and of the plain file: a disk is not as fast at one moment as at another
MOST_BYTES = 64 << 20  # that one work writes
LENGTH = 4  # bytes before each record of the plain file

app = typer.Typer()


class Work(NamedTuple):
    name: str
    records: int  # of each commit
    sync: Literal["commit", "never"]


PUTS = (Work("put", 1, "commit"), Work("put", 1000, "commit"), Work("put", 1, "never"), Work("put", 1000, "never"))
GET = Work("get", 1000, "never")


class Measured(NamedTuple):
    records: int
    seconds: float

    def rate(self) -> float:
        return self.records / self.seconds


@app.command(rich_help_panel="Looking")
def bench(
    directory: Annotated[str, typer.Argument(help="Where queues would lie; what is written there is removed again.")] = ".",
    size: Annotated[int, typer.Option(min=1, max=chunk.MAX_RECORD, help="Bytes of a record.")] = 100,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=600, help="How long each work goes on, or until it has done 64 MiB.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Measure how fast a queue is on the disk of a directory, beside a plain file that is written and read in the same way."""
    if not os.path.isdir(directory):
        raise BadPath("is no directory", path=directory)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="qewqew-bench-", dir=directory) as home:
        works = _measured(home, os.urandom(size), seconds)
        unseen = not sys.stderr.isatty()
        for work, ours, plain in track(
            works, "measuring", len(PUTS) + 1, console=Console(stderr=True), transient=True, disable=unseen
        ):
            row = {"work": work.name, "records": work.records, "sync": work.sync, "size": size}
            rows.append(row | {"per_second": ours.rate(), "plain_per_second": plain.rate(), "ratio": plain.rate() / ours.rate()})
    if as_json:
        print_json(rows)
    else:
        columns = ["work", "records", "sync", "records/s", "bytes/s", "plain file, records/s", "times as long"]
        print_table(columns, [_row(one) for one in rows], numbers=("records", *columns[3:]))


def _row(row: dict[str, Any]) -> list[str]:
    rates = [f"{row['per_second']:,.0f}", sized(row["per_second"] * row["size"]), f"{row['plain_per_second']:,.0f}"]
    return [row["work"], f"{row['records']:,}", row["sync"], *rates, f"{row['ratio']:.1f}"]


def _measured(home: str, record: bytes, seconds: float) -> Iterator[tuple[Work, Measured, Measured]]:
    """Each work as the queue does it, and as the plain file does it."""
    with ExitStack() as closing:
        for number, work in enumerate(PUTS):
            queue = closing.enter_context(Queue(os.path.join(home, f"{number}.qew"), sync=work.sync))
            plain = closing.enter_context(open(os.path.join(home, f"{number}.plain"), "w+b", buffering=0))
            records = [record] * work.records

            def put(queue: Queue = queue, records: list[bytes] = records) -> int:
                return queue.put_many(records)

            def write(plain: Any = plain, records: list[bytes] = records, sync: str = work.sync) -> int:
                plain.write(b"".join([len(one).to_bytes(LENGTH) + one for one in records]))
                if sync == "commit":
                    os.fsync(plain.fileno())
                return len(records)

            yield work, *_in_turn(put, write, work.records * len(record), seconds)
        plain.seek(0)

        def read() -> int:
            data, at, found = plain.read(GET.records * (LENGTH + len(record))), 0, []
            while at < len(data):
                end = at + LENGTH + int.from_bytes(data[at : at + LENGTH])
                found.append(data[at + LENGTH : end])
                at = end
            return len(found)

        yield GET, *_in_turn(lambda: len(queue.get_many(GET.records)), read, GET.records * len(record), seconds)


def _in_turn(ours: Callable[[], int], plain: Callable[[], int], size: int, seconds: float) -> tuple[Measured, Measured]:
    found = [Measured(0, 0.0), Measured(0, 0.0)]
    for _ in range(TURNS):
        for number, act in enumerate((ours, plain)):
            records, before = found[number]
            start = time.perf_counter()
            for _ in range(max(1, MOST_BYTES // size // TURNS)):
                records += (some := act())
                if not some or time.perf_counter() - start > seconds / TURNS:
                    break
            found[number] = Measured(records, before + time.perf_counter() - start)
    return found[0], found[1]
