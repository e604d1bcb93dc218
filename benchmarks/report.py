"""Tables and charts of what was measured, between the markers of docs/benchmarks.md."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.peers import OURS, PEERS, PlainFile, QewQew, QewQewTopic, SqliteWal, ZbusJava
from benchmarks.works import scaled

COLUMNS = {
    "put": "put one by one",
    "put_many": "put by 1,000",
    "get": "get one by one",
    "get_many": "get by 1,000",
    "put_commit": "put one by one, durable",
    "put_many_commit": "put by 1,000, durable",
    "threads_commit": "put by 8 threads, durable",
}
GROWTH = {work: COLUMNS[work] for work in ("put_many", "get", "get_many")} | {"open_first": "open, and the first record"}
FLOOR = PlainFile.name

Results = dict[str, Any]
Sample = dict[str, Any]


class Figures:
    """Medians over the rounds; None of what was not measured."""

    def __init__(self, results: Results) -> None:
        self.samples: list[Sample] = [
            one | ({"ratio": one["seconds"] / one["floor"]} if "floor" in one and "seconds" in one else {})
            for one in results["samples"]
        ]
        self.samples_of: dict[tuple[str, str], list[Sample]] = {}
        for one in self.samples:
            self.samples_of.setdefault((one["peer"], one["work"]), []).append(one)
        self.records: int = results["plan"]["records"]
        self.sizes = sorted({one["size"] for one in self.samples if one["work"] in COLUMNS})
        self.peers = [name for name in PEERS if any(one["peer"] == name for one in self.samples)]

    def of(self, what: str, scale: float = 1, *, peer: str, work: str, **wanted: Any) -> float | None:
        samples = self.samples_of.get((peer, work), [])
        values = [one[what] * scale for one in samples if what in one and wanted.items() <= one.items()]
        return statistics.median(values) if values else None

    def queues(self, work: str, size: int) -> list[int]:
        return sorted({one["queue"] for one in self.samples if one["work"] == work and one["size"] == size})

    def cut(self, peer: str, size: int, queue: int) -> bool:
        """Whether it could not be filled in the time given."""
        filled = self.of("records", peer=peer, work="put_many", size=size, queue=queue)
        return filled is not None and filled < queue


def number(value: float | None, unit: str = "") -> str:
    """Two digits that count; an en dash where there is none."""
    if value is None:
        return "–"
    value = value if value >= 100 else float(f"{value:.2g}")
    return f"{value:,.{0 if value >= 10 else 1 if value >= 1 else 2}f}{unit}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    if not lines[1:]:
        return ""  # nothing of it was measured
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---", *["--:"] * (len(lines[0]) - 1)], *lines[1:]))


def sized(size: int) -> str:
    return f"{size // 1024} KiB" if size % 1024 == 0 else f"{size:,} B"


def named(peer: str) -> str:
    return f"**{peer}**" if peer in OURS else peer


def marks(figures: Figures, peer: str, work: str, size: int, queue: int) -> str:
    if work.endswith("_commit"):
        return ""
    filled = work == "put" or not figures.cut(peer, size, queue)
    return "†" * PEERS[peer].always + "‡" * (not PEERS[peer].killed) + "§" * (not filled)


def ratios(figures: Figures, size: int) -> str:
    queue = scaled(figures.records, size)
    rows = {peer: [named(peer)] for peer in figures.peers}
    for work in COLUMNS:
        wanted: dict[str, Any] = {"work": work, "size": size, "queue": queue}
        column = {peer: figures.of("ratio", peer=peer, **wanted) for peer in figures.peers}
        best = min((value for peer, value in column.items() if value and peer != FLOOR), default=None)
        for peer, value in column.items():
            text = number(value)
            if value and peer == FLOOR:
                text = f"1 = {number(figures.of('seconds', 1e6, peer=FLOOR, **wanted), ' µs')}"
            elif value:
                text = (f"**{text}**" if value == best else text) + marks(figures, peer, work, size, queue)
            rows[peer].append(text)
    return f"### {sized(size)}, {queue:,} records\n\n{table(['', *COLUMNS.values()], rows.values())}"


def opening(figures: Figures, size: int) -> str:
    queues = figures.queues("open_first", size)
    rows = []
    for peer in figures.peers if queues else ():
        row = [named(peer)]
        for what, scale in ("seconds", 1e3), ("memory", 2**-20):
            for queue in queues:
                value = figures.of(what, scale, peer=peer, work="open_first", size=size, queue=queue)
                row.append(number(value) + "§" * (value is not None and figures.cut(peer, size, queue)))
        rows.append(row)
    head = [f"open, {queue:,} (ms)" for queue in queues] + [f"memory, {queue:,} (MiB)" for queue in queues]
    return table(["", *head], rows)


def leases(figures: Figures, size: int) -> str:
    rows = []
    for queue in figures.queues("lease", size):
        wanted: dict[str, Any] = {"peer": QewQew.name, "work": "lease", "size": size, "queue": queue}
        payload, leasing = figures.of("bytes", 2**-20, **wanted), figures.of("seconds", 1e3, **wanted)
        reading = figures.of("seconds", 1e3 * queue, peer=FLOOR, work="get_many", size=size, queue=queue)
        rows.append([f"{queue:,}", number(payload, " MiB"), number(leasing, " ms"), number(reading, " ms")])
    return table(["records", "payload", "lease of all", "the plain file only read"], rows)


def races(figures: Figures) -> dict[str, dict[str, Any]]:
    """Their titles, and what chooses their samples. That of many tasks is apart."""
    titles = {"race_whole": "one commit each", "race_by_1000": "1,000 records a commit"}
    found = {(one["work"], one["processes"]): one["queue"] for one in figures.samples if "processes" in one}
    return {
        f"{count} processes, {title}": {"work": work, "processes": count, "queue": queue}
        for work, title in titles.items()
        for (raced, count), queue in sorted(found.items(), reverse=True)
        if raced == work
    }


def race(figures: Figures) -> str:
    columns = races(figures)
    most = next((wanted for wanted in columns.values() if wanted["work"] == "race_by_1000"), None)
    rows = []
    for peer in figures.peers:
        row = ["plain files, one for each process" if peer == FLOOR else named(peer)]
        for wanted in columns.values():
            seconds, ratio = (figures.of(what, peer=peer, **wanted) for what in ("seconds", "ratio"))
            row.append(f"1 = {1 / seconds:,.0f} records/s" if seconds and peer == FLOOR else number(ratio))
        if most:
            ours, theirs = (figures.of("seconds", peer=name, **most) for name in (peer, SqliteWal.name))
            row.append(number(theirs / ours if ours and theirs else None, " ×"))
            row.append(number(figures.of("longest", 1e3, peer=peer, **most), " ms"))
        if set(row[1:]) - {"–"}:
            rows.append(row)
    more = [f"{most['processes']}: speed beside {SqliteWal.name}", f"{most['processes']}: longest commit"] if most else []
    return table(["", *columns, *more], rows)


def tasks(figures: Figures) -> str:
    rows = []
    for peer in figures.peers:
        wanted: dict[str, Any] = {"peer": peer, "work": "race_tasks"}
        if whole := figures.of("whole", **wanted):
            out = "–" if peer == FLOOR else f"{max(one['locked_out'] for one in figures.samples_of[peer, 'race_tasks']):,}"
            name = "plain files, one for each task" if peer == FLOOR else named(peer)
            rows.append([name, number(whole, " s"), number(figures.of("ratio", **wanted)), out])
    return table(["", "until the last has finished", "beside files", "tasks locked out"], rows)


def topics(figures: Figures) -> str:
    titles = {"put_many": "append by 1,000", "get_many": "read by 1,000", "filter_all": "all match", "filter_none": "none match"}
    rows = []
    for size in figures.sizes:
        queue = scaled(figures.records, size)
        for peer in (QewQewTopic.name, ZbusJava.name, QewQew.name):
            values = [figures.of("seconds", peer=peer, work=work, size=size, queue=queue) for work in titles]
            if any(values):
                rows.append([f"{peer}, {sized(size)}", *(f"{1 / value:,.0f}" if value else "–" for value in values)])
    return table(["records/s", *titles.values()], rows)


def machine(results: Results) -> str:
    found = results["machine"]
    system = "; ".join(found[key] for key in ("processor", "memory", "system", "file system"))
    versions = ", ".join(f"{key} {value}" for key, value in list(found.items())[4:])
    plan = results["plan"]
    lines = [
        f"Measured on {results['date']} in {results['minutes']:.0f} minutes, {plan['repeats']} rounds, "
        f"up to {plan['limit']:g} s for a work: {system}. {versions}."
    ]
    failed = {f"{one['peer']}, {one['work']}: {one['failed']}" for one in results["samples"] if "failed" in one}
    lines += [f"Left out: {name}, {why}." for name, why in results["left_out"].items()]
    return "\n\n".join(lines + [f"Failed: {one}." for one in sorted(failed)])


def peers(figures: Figures) -> str:
    rows = [[named(peer), PEERS[peer].never, PEERS[peer].commit or "cannot"] for peer in figures.peers]
    return table(["", "not durable", "durable"], rows).replace("--:", "---")


def sections(results: Results) -> dict[str, str]:
    figures = Figures(results)
    first = results["plan"]["sizes"][0]
    found = {"race": race(figures), "tasks": tasks(figures)}
    found |= {"machine": machine(results), "peers": peers(figures)}
    found["ratios"] = "\n\n".join(ratios(figures, size) for size in figures.sizes)
    found |= {"opening": opening(figures, first), "leases": leases(figures, first)}
    return found | {"topics": topics(figures)}


def tables(results: Results) -> str:
    return "\n\n".join(filter(None, sections(results).values()))


def pictures(results: Results) -> dict[str, str]:
    """File names and SVG."""
    figures = Figures(results)
    found = {}
    if racing := races(figures):
        panels = {
            title: {peer: value for peer in figures.peers if (value := figures.of("ratio", peer=peer, **wanted))}
            for title, wanted in racing.items()
        }
        title = "Staging into one queue at once: time as a multiple of plain files', one for each process (shorter is better)"
        found["bench-race.svg"] = charts.bars(title, panels, number, OURS)
    for size in figures.sizes:
        queue = scaled(figures.records, size)
        panels = {}
        for work, title in COLUMNS.items():
            ratio = {peer: figures.of("ratio", peer=peer, work=work, size=size, queue=queue) for peer in figures.peers}
            panels[title] = {peer: value for peer, value in ratio.items() if value is not None}
        title = f"Time for a record of {sized(size)}, as a multiple of the plain file's (shorter is better)"
        found[f"bench-{size}.svg"] = charts.bars(title, panels, number, OURS)
    first = results["plan"]["sizes"][0]
    lines: dict[str, charts.Lines] = {}
    for work, title in GROWTH.items():
        unit, factor = ("ms", 1e3) if work == "open_first" else ("µs for a record", 1e6)
        panel = lines.setdefault(f"{title}, {unit}", {})
        for peer in figures.peers:
            filled = [queue for queue in figures.queues(work, first) if not figures.cut(peer, first, queue)]
            points = {queue: figures.of("seconds", factor, peer=peer, work=work, size=first, queue=queue) for queue in filled}
            known = {queue: value for queue, value in points.items() if value}
            if len(known) > 1:
                panel[peer] = known
    found["bench-growth.svg"] = charts.lines(f"Queues of more and more records of {sized(first)}", lines, number, OURS)
    return found


def insert(path: Path, sections: dict[str, str], source: str) -> None:
    """Put what was made of the file ``source`` between its markers in the document; raises `ValueError` if there are none."""
    text = path.read_text()
    for name, section in sections.items():
        marked = re.compile(rf"(<!-- {name}: from {re.escape(source)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = marked.subn(lambda match, section=section: f"{match[1]}\n{section}\n\n{match[2]}", text)  # type: ignore[misc]
        if not found:
            raise ValueError(f"{path} has no place for {name}")
    path.write_text(text)


def keep(file: Path, machine: dict[str, Any], plan: dict[str, int], samples: dict[str, Any]) -> None:
    """Write what was measured, and on what, as `publish` reads it."""
    found = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "plan": plan, "samples": samples}
    file.write_text(json.dumps(found, indent=1) + "\n")


def publish(file: Path, docs: Path | None, part: str, told: Callable[[dict[str, Any]], str]) -> None:
    """Print what is told of the file, and put it into the document, if one is given."""
    text = told(json.loads(file.read_text()))
    print(text)
    if docs is not None:
        insert(docs, {part: text}, file.name)


def write(results: Results, docs: Path) -> None:
    insert(docs / "benchmarks.md", sections(results), "benchmarks.json")
    for name, picture in pictures(results).items():
        (docs / "images" / name).write_text(picture)
