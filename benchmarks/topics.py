"""Topics against one plain file with length-prefixed frames, and against the queue, in one run: python benchmarks/topics.py

Options: --json (every sample), --directory, --repeats, --records and --large (how many), --large-repeats.

Figures are medians of interleaved repeats; ratios are those of time for each record to the plain file's. The plain file is
written through Python's buffer with one fdatasync at the end or, beside ``sync="commit"``, with one after each commit; it is
read through the buffer too. Small records are in the cache of the file system when they are read; large ones are read from
the disk, and then once more from the cache. What each record is made of is made anew by who writes it, also for the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qewqew_core import Message, Queue, Topic
from qewqew_core.formats import zbus
from qewqew_core.topic.view import View

BATCH = 1_000
SIZES = (100, 1_024)
SYNCED = 400  # records of which each has a commit of its own that is on disk
SINGLE = 5_000  # … and that is not
SESSION = 20  # large records in one session
LARGE = (512 << 10, 1 << 20)
SEED = 1

Results = dict[str, list[float]]


@contextmanager
def timed(results: Results, name: str, per: int) -> Iterator[None]:
    began = time.perf_counter()
    yield
    results.setdefault(name, []).append((time.perf_counter() - began) / per)


def repeat(act: Callable[[], object], times: int) -> None:
    for _ in range(times):
        act()


# Small records


def plain_file(folder: Path, body: bytes, batches: int, results: Results) -> None:
    size = f"{len(body)} B: "
    for name, count, each in (
        ("file write", batches * BATCH, 0),
        ("file write, fdatasync per 1,000", batches * BATCH, BATCH),
        ("file write, fdatasync each", SYNCED, 1),
    ):
        with timed(results, size + name, count), (folder / name).open("wb") as file:
            for number in range(1, count + 1):
                file.write(len(body).to_bytes(4))
                file.write(body)
                if each and number % each == 0:
                    file.flush()
                    os.fdatasync(file.fileno())
            file.flush()
            os.fdatasync(file.fileno())
    with timed(results, size + "file read", batches * BATCH), (folder / "file write").open("rb") as file:
        while head := file.read(4):
            file.read(int.from_bytes(head))


def queue(folder: Path, body: bytes, batches: int, results: Results) -> None:
    size, records = f"{len(body)} B: queue ", [body] * BATCH
    for sync, single in (("never", SINGLE), ("commit", SYNCED)):
        path = folder / f"queue {sync}"
        with timed(results, f"{size}put_many(1,000), {sync}", batches * BATCH), Queue(path, sync=sync) as q:
            for _ in range(batches):
                q.put_many(records)
        with timed(results, f"{size}get_many(1,000), {sync}", batches * BATCH), Queue(path, sync=sync) as q:
            while q.get_many(BATCH):
                pass
        with timed(results, f"{size}put, {sync}", single), Queue(path, sync=sync) as q:
            for _ in range(single):
                q.put(body)
        with timed(results, f"{size}get, {sync}", single), Queue(path, sync=sync) as q:
            for _ in range(single):
                q.get()


def topic(folder: Path, body: bytes, batches: int, results: Results) -> None:
    size, total = f"{len(body)} B: topic ", batches * BATCH
    records = [Message(body, "order.new.eu")] * BATCH
    for sync, single in (("never", SINGLE), ("commit", SYNCED)):
        path = folder / f"topic-{sync}"
        with timed(results, f"{size}append_many(1,000), {sync}", total), Topic(path, sync=sync) as t:
            for _ in range(batches):
                t.append_many(records)
        with Topic(folder / f"single-{sync}", sync=sync) as t:
            t.append(b"")  # takes the writer's lock
            with timed(results, f"{size}append, {sync}", single):
                for _ in range(single):
                    t.append(body, tag="order.new.eu")
        with Topic(path, sync=sync) as t:
            with t.reader("many") as r, timed(results, f"{size}read_many(1,000), commit, {sync}", total):
                while r.read_many(BATCH):
                    r.commit()
            with t.reader("one") as r, timed(results, f"{size}read, commit, {sync}", single):
                for _ in range(single):
                    r.read()
                    r.commit()
    with Topic(folder / "topic-never", sync="never") as t:
        with t.reader("some", window=total) as r, timed(results, f"{size}read, one commit at the end", SINGLE):
            for _ in range(SINGLE):
                r.read()
            r.commit()
        with t.reader("auto", auto_commit=True) as r, timed(results, f"{size}read_many(1,000), auto_commit", total):
            while r.read_many(BATCH):
                pass
        for name, text in (("all match", "order.*.eu;x"), ("none match", "order.*.us;x")):
            with t.reader(name, filter=text) as r, timed(results, f"{size}read_many(1,000), filter, {name}", total):
                while r.read_many(BATCH):
                    r.commit()
        with timed(results, f"{size}iterate", total):
            for _ in t:
                pass
        with t.reader("batches") as r, timed(results, f"{size}lease of all", total):
            r.lease("benchmark")
        with timed(results, f"{size}verify", total):
            t.verify()


# The index


def index(folder: Path, results: Results) -> None:
    """What each operation on the index costs, beside the same bytes packed into memory and unpacked from it."""
    count = 20_000
    memory, head, entry = bytearray(zbus.INDEX_SIZE), struct.Struct(">iiqq"), struct.Struct(">qqiq")
    with Topic(folder / "index", sync="never") as t:
        t.append(b"x")
        view, writer = View(t.files, t.path, t.dialect), t.writer()
        at = zbus.entry_at(0)

        def pack() -> None:
            head.pack_into(memory, 0, 1, 1, 0, 1)
            entry.pack_into(memory, at, 1, 2, 3, 4)

        def unpack() -> None:
            head.unpack_from(memory, 0)
            entry.unpack_from(memory, at)

        def look() -> None:
            view.index()
            view.entry(0)

        def publish() -> None:
            writer._publications.append((0, writer._blocks.index_patch(writer.engine.state, writer.engine.state.last)))
            writer._publish()

        data = bytes(zbus.INDEX_HEAD)

        def write() -> None:
            os.pwrite(fd, data, 0)
            os.pwrite(fd, data, at)

        fd = os.open(folder / "same bytes", os.O_RDWR | os.O_CREAT)
        for name, act in (
            ("write to memory (struct)", pack),
            ("read from memory (struct)", unpack),
            ("write to a file (two pwrite)", write),
            ("topic: write (head and entry)", publish),
            ("topic: read (head and entry)", look),
        ):
            with writer.engine.exclusive(), timed(results, f"index, {name}", count):
                repeat(act, count)
        os.close(fd)
        view.close()


# Large records


def sizes(count: int) -> list[int]:
    chosen = random.Random(SEED)  # noqa: S311 - the same for whoever writes and reads
    return [chosen.randint(*LARGE) for _ in range(count)]


def large(folder: Path, count: int, results: Results) -> None:
    """Each in a process of its own, so that its peak memory is its own."""
    for name in ("file", "topic"):
        path = folder / f"large-{name}"
        for act in ("write", "read", "read again"):
            if act == "read":
                forget(path)
            command = [sys.executable, __file__, "--child", act, name, str(path), str(count)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)  # noqa: S603
            for key, value in json.loads(told.stdout).items():
                results.setdefault(f"large {name} {act}, {key}", []).append(value)
        if name == "file":
            path.unlink()
        else:
            shutil.rmtree(path)


def forget(path: Path) -> None:
    """Have the kernel drop what it holds of these files, so that the disk is read."""
    for one in [path] if path.is_file() else path.rglob("*.zbus"):
        fd = os.open(one, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def child(act: str, name: str, path: str, count: int) -> None:
    noise = random.Random(SEED).randbytes(LARGE[1])  # noqa: S311
    before = peak()
    began = time.perf_counter()
    if name == "file":
        total = write_file(path, count, noise) if act == "write" else read_file(path, count)
    else:
        total = write_topic(path, count, noise) if act == "write" else read_topic(path, count, act)
    seconds = time.perf_counter() - began
    print(json.dumps({"MB/s": total / seconds / 1e6, "peak MiB": peak(), "MiB above the start": peak() - before}))


def peak() -> float:
    """The most memory that this process has had, in MiB. (That of getrusage is inherited from the parent.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def write_file(path: str, count: int, noise: bytes) -> int:
    todo = sizes(count)
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, count, SESSION):
            for body in [noise[:size] for size in todo[begin : begin + SESSION]]:
                file.write(len(body).to_bytes(4))
                file.write(body)
            os.fdatasync(file.fileno())
    return sum(todo)


def read_file(path: str, count: int) -> int:
    todo = sizes(count)
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, count, SESSION):
            bodies = [file.read(int.from_bytes(file.read(4))) for _ in todo[begin : begin + SESSION]]
            assert [len(one) for one in bodies] == todo[begin : begin + SESSION]
    return sum(todo)


def write_topic(path: str, count: int, noise: bytes) -> int:
    todo = sizes(count)
    with Topic(path) as t:
        for begin in range(0, count, SESSION):
            with t.session() as s:
                for size in todo[begin : begin + SESSION]:
                    s.append(noise[:size])
    return sum(todo)


def read_topic(path: str, count: int, reader: str) -> int:
    todo = sizes(count)
    with Topic(path) as t, t.reader(reader) as r:
        for begin in range(0, count, SESSION):
            with t.session() as s:
                for size in todo[begin : begin + SESSION]:
                    assert len(s.read(r).body) == size
        assert r.lag() == 0
    return sum(todo)


# What is printed

FLOORS = {
    "append, never": "file write",
    "append_many(1,000), never": "file write",
    "append, commit": "file write, fdatasync each",
    "append_many(1,000), commit": "file write, fdatasync per 1,000",
    "put, never": "file write",
    "put_many(1,000), never": "file write",
    "put, commit": "file write, fdatasync each",
    "put_many(1,000), commit": "file write, fdatasync per 1,000",
    "get, commit": "file write, fdatasync each",
    "read, commit, commit": "file write, fdatasync each",
    "lease of all": None,
    "verify": None,
}


def show(results: Results, repeats: int, records: int, large_records: int) -> None:
    median = {name: statistics.median(samples) for name, samples in results.items()}
    for size in SIZES:
        print(f"{size:,} B, {records:,} records (one by one {SINGLE:,}; on disk each {SYNCED}); median of {repeats}")
        for name, value in median.items():
            if not name.startswith(f"{size} B: "):
                continue
            name = name.partition(": ")[2]
            kind, _, what = name.partition(" ")
            floor = None if kind == "file" else FLOORS.get(what, "file read")
            ratio = f" = {value / median[f'{size} B: {floor}']:7.2f} × {floor}" if floor else ""
            print(f"  {name:48} {value * 1e6:9.2f} µs, {1 / value:11,.0f} /s{ratio}")
    print("the index: one write of head and entry, and one look at them")
    for name, value in median.items():
        if name.startswith("index, "):
            print(f"  {name:48} {value * 1e6:9.2f} µs")
    if large_records:
        print(f"{large_records:,} records of 512 KiB to 1 MiB, sync=commit, {SESSION} in a session")
        for name in ("file write", "topic write", "file read", "topic read", "file read again", "topic read again"):
            rate, most, above = (median[f"large {name}, {what}"] for what in ("MB/s", "peak MiB", "MiB above the start"))
            print(f"  {name:16} {rate:8.1f} MB/s, peak memory {most:6.1f} MiB ({above:.1f} above the start)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print every sample as JSON")
    parser.add_argument("--directory", default=None, help="where to write (default: the system's directory for temporary files)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=100_000, help="small records of each size, at least 5,000")
    parser.add_argument("--large", type=int, default=5_000, help="large records; 0: none")
    parser.add_argument("--large-repeats", type=int, default=1)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        act, name, path, count = arguments.child
        child(act, name, path, int(count))
        return
    results: Results = {}
    batches = max(SINGLE, arguments.records) // BATCH
    for _ in range(arguments.repeats):
        for size in SIZES:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
                body = os.urandom(size)
                plain_file(Path(folder), body, batches, results)
                queue(Path(folder), body, batches, results)
                topic(Path(folder), body, batches, results)
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            index(Path(folder), results)
    for _ in range(arguments.large_repeats if arguments.large else 0):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            large(Path(folder), arguments.large, results)
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results, arguments.repeats, batches * BATCH, arguments.large)


if __name__ == "__main__":
    main()
