"""QewQew and its peers at the same works, in one run: ./run bench

Each work of each peer is a process of its own. The peers take turns, in another order in each round; where a work waits for the
disk, a plain file is written before and after each of them. What is found is kept as JSON, and told in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.peers import BATCH, PEERS, PlainFile
from benchmarks.works import WORKS, Case, Sample, able, child, fill_limit, scaled

ROOT = Path(__file__).resolve().parent.parent
FILLED = ("put_many", "open_first", "get", "get_many")
DURABLE = ("put_commit", "put_many_commit", "threads_commit")
RACES = ("race_whole", "race_by_1000", "race_tasks")
STAGED = 200  # bytes of a record in a race
SHORTER = 5  # times fewer records where each thousand is a commit, which takes longer
# What a record of another peer's work is compared with, where the plain file does not do the same.
FLOORS = {"threads_commit": "put_commit"}
LARGEST = 65_000
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.works"])


@dataclass(frozen=True)
class Chain:
    """Works one after another in the same directory, on queues of so many records; a race, of so many processes."""

    works: tuple[str, ...]
    size: int
    records: int
    processes: int = 1

    def peers(self, chosen: list[str]) -> list[str]:
        return [name for name in chosen if any(able(PEERS[name], work) for work in self.works if work != "put_many")]

    def is_for(self, works: list[str]) -> bool:
        """Filling a queue only prepares, but in the chain where all peers do it."""
        return bool(set(self.works if self.works == FILLED else self.works[1:] or self.works) & set(works))

    def works_of(self, peer: str) -> list[str]:
        """The plain file, where it only stands beside, does what the others are compared with."""
        return [work for work in self.works if able(PEERS[peer], work)] or [FLOORS[self.works[-1]]]


@dataclass(frozen=True)
class Plan:
    sizes: list[int]
    records: int
    growth: list[int]  # of the first size
    repeats: int
    growth_repeats: int
    limit: float  # seconds for one work
    peers: list[str]
    works: list[str]
    racing: list[int]  # processes; the first number is that of all races …
    staged: int  # … and each process stages so many records
    tasks: int  # processes of the race with many of them …
    staged_by_task: int

    def chains(self) -> Iterator[Chain]:
        first = self.sizes[0]
        for size in self.sizes:
            count = scaled(self.records, size)
            yield from (Chain((work,), size, count) for work in ("put", *DURABLE))
            yield Chain(FILLED, size, count)
        for count in self.growth:
            if count != scaled(self.records, first):
                yield Chain(FILLED, first, count)
        yield from (Chain(("put_many", "lease"), first, count) for count in sorted({*self.growth, scaled(self.records, first)}))
        yield Chain(("put_many", "filter_all", "filter_none"), first, scaled(self.records, first))
        for count in self.racing:
            yield Chain(("race_by_1000",), STAGED, count * self.staged // SHORTER, count)
        yield Chain(("race_whole",), STAGED, self.racing[0] * self.staged, self.racing[0])
        yield Chain(("race_tasks",), STAGED, self.tasks * self.staged_by_task, self.tasks)

    def rounds(self) -> Iterator[tuple[int, Chain, list[str]]]:
        """(round, chain, the peers in their order)"""
        for number in range(self.repeats):
            for chain in self.chains():
                if not chain.is_for(self.works):
                    continue
                grown = chain.records in self.growth and chain.records != scaled(self.records, chain.size)
                if number >= self.growth_repeats and (grown or chain.processes == self.tasks):
                    continue
                durable = chain.works[0] in (*DURABLE, *RACES)
                names = [name for name in chain.peers(self.peers) if not (durable and name == PlainFile.name)]
                turn = number * len(names) // self.repeats
                names = names[turn:] + names[:turn]
                if durable:
                    names = [PlainFile.name, *(one for name in names for one in (name, PlainFile.name))]
                yield number, chain, names

    def steps(self) -> int:
        return sum(len(chain.works_of(name)) for _, chain, names in self.rounds() for name in names)


def measure(plan: Plan, directory: str | None, progress: Progress) -> list[Sample]:
    samples: list[Sample] = []
    turns: dict[tuple[int, int, int], list[Sample]] = {}  # what is compared, in the order of time
    task = progress.add_task("", total=plan.steps())
    for number, chain, names in plan.rounds():
        turn = turns.setdefault((number, chain.size, chain.records), [])
        for name in names:
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                records, taken = chain.records, 0
                for work in chain.works_of(name):
                    what = f"round {number + 1}/{plan.repeats}  {chain.size:,} B x {chain.records:,}  {work}  [bold]{name}"
                    progress.update(task, description=what)
                    sample = run(Case(work, name, folder, chain.size, records, plan.limit, taken, chain.processes))
                    records = sample.get("records", records) if work == "put_many" else records
                    taken += sample.get("taken", 0)
                    turn.append(
                        {"round": number, "work": work, "size": chain.size, "queue": chain.records, "peer": name} | sample
                    )
                    progress.advance(task)
                    if "failed" in sample:
                        progress.console.print(f"[red]{name}, {work}, {chain.size} B: {sample['failed']}", highlight=False)
                        break
    for turn in turns.values():
        with_floors(turn)
        samples += turn
    return samples


def with_floors(turn: list[Sample]) -> None:
    """Give each sample what the plain file took, the nearest before it and after it."""
    floors = [(at, one) for at, one in enumerate(turn) if one["peer"] == PlainFile.name and "seconds" in one]
    for at, sample in enumerate(turn):
        wanted = FLOORS.get(sample["work"], sample["work"])
        same = [(place, one["seconds"]) for place, one in floors if one["work"] == wanted]
        before = [seconds for place, seconds in same if place <= at][-1:]
        after = [seconds for place, seconds in same if place >= at][:1]
        if near := before + after:
            sample["floor"] = statistics.fmean(near)


def run(case: Case) -> Sample:
    """In a process of its own, forked from one that has opened nothing; it ends with all that it has started."""
    receive, send = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=child, args=(case, send))
    process.start()
    group = process.pid
    assert group
    send.close()
    try:
        if not receive.poll(60 + 4 * fill_limit(case)):
            return {"failed": "it took too long"}
        sample: Sample = receive.recv()
        process.join(10)
        return sample
    except EOFError:
        return {"failed": "its process has died"}
    finally:
        receive.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        process.kill()
        process.join()


def store(path: Path, results: dict[str, Any]) -> None:
    """Of the samples one a line, with the digits that count."""
    head = json.dumps({key: value for key, value in results.items() if key != "samples"}, indent=1)
    samples = [
        {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in one.items()}
        for one in results["samples"]
    ]
    lines = ",\n".join(map(json.dumps, samples))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-2]},\n "samples": [\n{lines}\n]}}\n')


def chosen(words: str | None, parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """(peers, works) that the words name; all, where none is named."""
    peers: list[str] = []
    works: list[str] = []
    for word in words.split(",") if words else ():
        named = [name for name in PEERS if word.strip().lower() in name.lower()]
        if word.strip() in WORKS:
            works.append(word.strip())
        elif named:
            peers += named
        else:
            parser.error(f"--only: no {word!r}; there are {', '.join((*PEERS, *WORKS))}")
    return [name for name in PEERS if not peers or name in peers or name == PlainFile.name], works or list(WORKS)


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./run bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three minutes instead of half an hour, and less sure")
    parser.add_argument(
        "--large",
        action="store_true",
        help="also a queue of ten million records (half an hour more, 3 GB of disk, 2 GB of memory)",
    )
    parser.add_argument("--sizes", type=whole_numbers, default=[100, 10_240], help="bytes of a record (default: 100,10240)")
    parser.add_argument("--records", type=int, help="in a queue, of up to 1 KB (default: 200,000; quick: 50,000)")
    parser.add_argument("--repeats", type=int, help="default: 5; quick: 3")
    parser.add_argument("--only", metavar="NAMES", help="peers (or parts of their names) and works, with commas between")
    parser.add_argument("--directory", type=os.path.abspath, help="where to write (default: below the checkout); not in memory")
    parser.add_argument("--json", type=Path, help="where to keep the samples; the document is left as it is then")
    parser.add_argument("--draw", action="store_true", help="measure nothing: tables and charts of the samples that are kept")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    # A part of it, or other records, say something else than the document does.
    told = not (options.only or options.records or options.json) and options.sizes == parser.get_default("sizes")
    kept = options.json or ROOT / ("docs/benchmarks.json" if told else ".cache/benchmarks.json")
    if options.draw:
        if not kept.exists():
            parser.error(f"--draw: there is no {kept}")
    else:
        if not all(1 <= size <= LARGEST for size in options.sizes):
            parser.error(f"--sizes: from 1 to {LARGEST:,}")
        peers, works = chosen(options.only, parser)
        left_out = {name: why for name in peers if (why := PEERS[name].missing())}
        for name, why in left_out.items():
            console.print(f"without {name}: {why}", highlight=False)
        growth = [5_000] if options.quick else [10_000, 1_000_000] + [10_000_000] * options.large
        repeats = max(1, options.repeats or (3 if options.quick else 5))
        plan = Plan(
            options.sizes,
            max(2 * BATCH, options.records or (50_000 if options.quick else 200_000)),
            sorted({scaled(count, options.sizes[0]) for count in growth}),
            repeats,
            min(repeats, 1 if options.quick else 3),
            0.07 if options.quick else 0.7,
            [name for name in peers if name not in left_out],
            works,
            [4] if options.quick else [12, 8],
            20_000 if options.quick else 100_000,
            40 if options.quick else 200,
            10_000 if options.quick else 100_000,
        )
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        began = datetime.now(UTC)
        with tempfile.TemporaryDirectory(dir=options.directory) as folder, Progress(*columns, console=console) as progress:
            machine = describe(folder)
            if machine["file system"] in ("tmpfs", "ramfs"):
                console.print(f"[red]{folder} is in memory: nothing waits for a disk, and the durable works mean nothing")
            samples = measure(plan, folder, progress)
        minutes = (datetime.now(UTC) - began).total_seconds() / 60
        store(
            kept,
            {
                "date": began.date().isoformat(),
                "minutes": round(minutes, 1),
                "machine": machine,
                "plan": asdict(plan),
                "left_out": left_out,
                "samples": samples,
            },
        )
        console.print(f"{len(samples):,} samples in {kept}", highlight=False)
    results = json.loads(kept.read_text())
    print(report.tables(results))
    if told:
        report.write(results, ROOT / "docs")
    return int(any("failed" in sample for sample in results["samples"]))
