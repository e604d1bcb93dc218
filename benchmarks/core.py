"""The core against one plain file with length-prefixed frames, in one run: python benchmarks/core.py [--json]

Figures are ratios of time per record to the plain file's, medians of interleaved repeats. The plain file is written
through Python's buffer, with one fsync at the end, or (for sync="commit") after each 1,000 records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from qewqew_core import Queue

BATCH = 1_000


@contextmanager
def timed(results: dict[str, list[float]], name: str, per: int) -> Iterator[None]:
    began = time.perf_counter()
    yield
    results.setdefault(name, []).append((time.perf_counter() - began) / per)


def plain_file(folder: Path, records: list[bytes], batches: int, results: dict[str, list[float]]) -> None:
    total = batches * len(records)
    for name, each in (("file write", False), ("file write, fsync per 1,000", True)):
        path = folder / name
        with timed(results, name, total), path.open("wb") as file:
            for _ in range(batches):
                for record in records:
                    file.write(len(record).to_bytes(2))
                    file.write(record)
                if each:
                    file.flush()
                    os.fsync(file.fileno())
            file.flush()
            os.fsync(file.fileno())
    with timed(results, "file read", total), (folder / "file write").open("rb") as file:
        while head := file.read(2):
            file.read(int.from_bytes(head))


def queue(folder: Path, records: list[bytes], batches: int, results: dict[str, list[float]]) -> None:
    total = batches * len(records)
    for sync in ("never", "commit"):
        path = folder / sync
        with timed(results, f"put_many, sync={sync}", total), Queue(path, sync=sync) as q:
            for _ in range(batches):
                q.put_many(records)
        with timed(results, f"get_many, sync={sync}", total), Queue(path, sync=sync) as q:
            while q.get_many(BATCH):
                pass


def lease(folder: Path, size: int, gib: int, results: dict[str, list[float]]) -> None:
    record = bytes(size)
    records = [record] * (16 * 2**20 // (size + 2))
    path = folder / "lease"
    with Queue(path, sync="never") as q:
        while q.stats().chunks < 64 * gib:
            q.put_many(records)
    with Queue(path) as q:
        with timed(results, f"lease of {gib} GiB, {size} B records", 1):
            batch = q.lease("benchmark")
        assert batch is not None
        results.setdefault(f"records in {gib} GiB of {size} B", []).append(batch.records)
    shutil.rmtree(f"{path}.batches")
    os.unlink(f"{path}.log")


def commits(folder: Path, results: dict[str, list[float]]) -> None:
    """One record for each commit, against one fdatasync for each record of a plain file."""
    record, count = os.urandom(100), 400
    with (folder / "synced").open("wb", buffering=0) as file, timed(results, "file write, fdatasync each", count):
        for _ in range(count):
            file.write(record)
            os.fdatasync(file.fileno())
    for threads in (1, 8):
        with Queue(folder / f"{threads} threads") as q, timed(results, f"put, {threads} threads", count * threads):
            together(threads, lambda q=q: [q.put(record) for _ in range(count)])
        with Queue(folder / f"{threads} sessions") as q:
            q.put_many([record] * count * threads)
            with timed(results, f"session: get, put, commit, {threads} threads", count * threads):
                together(threads, lambda q=q: sessions(q, count))


def sessions(q: Queue, count: int) -> None:
    s = q.session()
    for _ in range(count):
        s.put(s.get())
        s.commit()
    s.close()


def together(threads: int, work: Callable[[], object]) -> None:
    running = [Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print every sample as JSON")
    parser.add_argument("--directory", default=None, help="where to write (default: the system's directory for temporary files)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, list[float]] = {}
    records = [os.urandom(100) for _ in range(BATCH)]
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            plain_file(Path(folder), records, 200, results)
            queue(Path(folder), records, 200, results)
            commits(Path(folder), results)
    for size in (100, 10_000):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            lease(Path(folder), size, 1, results)
    if arguments.json:
        print(json.dumps(results))
        return
    median = {name: statistics.median(samples) for name, samples in results.items()}
    base = {
        "put_many, sync=never": "file write",
        "put_many, sync=commit": "file write, fsync per 1,000",
        "get_many, sync=never": "file read",
        "get_many, sync=commit": "file read",
    }
    print(f"100 B records, batches of {BATCH:,}; median of {arguments.repeats}")
    for name, floor in base.items():
        print(f"  {name:24} {median[name] * 1e6:7.2f} µs per record = {median[name] / median[floor]:5.2f} × {floor}")
    print("commits per second, one record of 100 B each, and times the disk's own rate of fdatasync")
    floor = median["file write, fdatasync each"]
    for name in ("file write, fdatasync each", *(name for name in median if "threads" in name)):
        print(f"  {name:38} {1 / median[name]:8,.0f} /s = {floor / median[name]:5.2f} ×")
    for size in (100, 10_000):
        seconds, count = median[f"lease of 1 GiB, {size} B records"], median[f"records in 1 GiB of {size} B"]
        print(f"  lease of 1 GiB: {count:12,.0f} records of {size:6,} B in {seconds * 1e3:7.1f} ms")


if __name__ == "__main__":
    main()
