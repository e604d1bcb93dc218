"""What each operation costs, in what does not depend on the machine: calls of the file system, bytes, calls of functions.

Times are for the benchmarks. Here a change that adds a system call, writes more, or calls more functions for each record is
seen at once, whatever the machine.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Literal

import pytest
from conftest import Clock
from disk import JournalDisk, NoSync
from plain import crashed, numbers

from qewqew_core import Message, Queue, Reader, Topic, inspect
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS

RECORD = bytes(range(100))
CHANGED = (
    "What operations cost has changed. If they cost less, or more for a reason that is worth it, put these figures into COSTS; "
    "`./run bench --only QewQew` shows what that means in time:\n"
)


class Counted(NoSync):
    """Counts the calls, and the bytes that are written."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


def _counting(name: str) -> Callable[..., object]:
    def call(self: Counted, *arguments: object, **named: object) -> object:
        self.counts[name] += 1
        if name == "write":
            self.counts["bytes"] += len(arguments[1])  # type: ignore[arg-type]
        return getattr(super(Counted, self), name)(*arguments, **named)

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Counted, _name, _counting(_name))


@pytest.fixture(autouse=True)
def chunks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in a queue that has grown; the small ones at its beginning would hide what an operation costs."""
    monkeypatch.setattr(LIMITS, "first_chunk_bytes", 16 << 20)


@pytest.fixture(autouse=True)
def the_clocks_stand_still(clock: Clock) -> None:
    """Once in a second, the next commit looks whether the wall clock was set."""


@contextmanager
def counted(files: Counted) -> Iterator[Counter[str]]:
    """Calls of the file system, and of functions of the package. Comprehensions are functions in some versions of Python only,
    and generators are entered once more to be ended: they do not count. Nor do the tables of checksums, which are made once for
    the life of a process.
    """
    found: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counts = "qewqew_core" in code.co_filename and not code.co_name.startswith("<") and not code.co_flags & CO_GENERATOR
        counts = counts and code.co_name not in ("_products", "_multiply")
        if event == "call" and counts:
            found["functions"] += 1

    files.counts.clear()
    gc.collect()
    gc.disable()  # a finalizer is no cost of this operation
    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()
        found.update(files.counts)


# What is counted: the operation as often as said, but of functions those for each. It finds the queue or topic as those
# before it have left it.
QUEUE: dict[str, tuple[int, Callable[[Queue], object]]] = {
    "put": (1_000, lambda q: q.put(RECORD)),
    "put_many": (1, lambda q: q.put_many([RECORD] * 1_000)),
    "get": (1_000, lambda q: q.get()),
    "get_many": (1, lambda q: q.get_many(1_000)),
    "put_many again": (1, lambda q: q.put_many([RECORD] * 1_000)),
    "session: get, put, commit": (100, lambda q: move(q)),
    "lease": (1, lambda q: q.lease("key")),
    "ack": (1, lambda q: q.batches()[0].ack()),
}
TOPIC: dict[str, tuple[int, Callable[[Topic, Reader], object]]] = {
    "append": (1_000, lambda t, r: t.append(RECORD, tag="a.b")),
    "append_many": (1, lambda t, r: t.append_many([Message(RECORD, "a.b")] * 1_000)),
    "read, commit": (1_000, lambda t, r: (r.read(), r.commit())),
    "read_many, commit": (1, lambda t, r: (r.read_many(1_000), r.commit())),
}


VARIED = ("lease", "ack", "read, commit", "read_many, commit")  # have the path, or the number of the process, in what is written


def move(q: Queue) -> None:
    with q.session() as s:
        s.put(s.get())


COSTS = {
    "queue, never": {
        "put": {"allocate": 2, "bytes": 134000, "functions": 14, "status": 2, "write": 1000},
        "put_many": {"bytes": 204155, "functions": 61, "write": 4, "write_all": 2},
        "get": {"bytes": 36000, "functions": 17, "read": 2, "write": 1000},
        "get_many": {"bytes": 36, "functions": 41, "read": 1, "write": 1},
        "put_many again": {"bytes": 102053, "functions": 57, "write": 3, "write_all": 2},
        "session: get, put, commit": {"bytes": 15002, "functions": 81, "read": 1, "write": 101},
        "lease": {
            "allocate": 1,
            "check_writable": 1,
            "exists": 4,
            "functions": 416,
            "is_at": 2,
            "is_directory": 5,
            "make_directory": 2,
            "open": 4,
            "open_to_read": 1,
            "read": 2,
            "rename": 3,
            "size": 1,
            "status": 3,
            "sync": 3,
            "sync_directory": 7,
            "truncate": 1,
            "write": 4,
        },
        "ack": {"exists": 1, "functions": 132, "is_at": 1, "list": 1, "open": 1, "status": 2, "sync": 1, "write": 2},
    },
    "queue, closed": {
        "open, get": {
            "allocate": 1,
            "boot": 1,
            "bytes": 73,
            "capacity": 1,
            "check_writable": 1,
            "exists": 2,
            "functions": 389,
            "identity": 2,
            "inode_and_size": 2,
            "is_at": 1,
            "is_directory": 2,
            "kinds": 1,
            "list": 1,
            "open": 2,
            "open_into": 2,
            "open_to_read": 2,
            "read": 7,
            "size": 3,
            "status": 3,
            "sync": 1,
            "write": 2,
        }
    },
    "queue, handed over": {
        "open, put_many, close": {
            "allocate": 1,
            "boot": 1,
            "bytes": 816173,
            "capacity": 1,
            "check_writable": 1,
            "exists": 2,
            "functions": 617,
            "identity": 3,
            "inode_and_size": 3,
            "is_at": 2,
            "is_directory": 3,
            "kinds": 1,
            "list": 1,
            "open": 4,
            "open_into": 2,
            "open_to_read": 2,
            "read": 7,
            "size": 3,
            "status": 3,
            "sync": 1,
            "write": 13,
        }
    },
    "topic, never": {
        "append": {"allocate": 5, "bytes": 694000, "functions": 50, "status": 5, "write": 4000},
        "append_many": {"bytes": 304143, "functions": 104, "write": 8},
        "read, commit": {"functions": 101, "inode_and_size": 2000, "read": 1006, "write": 2000},
        "read_many, commit": {"functions": 122, "inode_and_size": 2, "read": 3, "write": 2},
    },
    "queue, commit": {
        "put": {"allocate": 2, "bytes": 134000, "functions": 17, "status": 2, "sync": 1000, "write": 1000},
        "put_many": {"allocate": 1, "bytes": 102043, "functions": 65, "status": 1, "sync": 1, "write": 1},
        "get": {"bytes": 240102, "functions": 20, "read": 2, "sync": 1000, "write": 1001},
        "get_many": {"bytes": 36, "functions": 43, "read": 1, "sync": 1, "write": 1},
        "put_many again": {"allocate": 1, "bytes": 102043, "functions": 65, "status": 1, "sync": 1, "write": 1},
        "session: get, put, commit": {"bytes": 117002, "functions": 83, "read": 1, "sync": 100, "write": 101},
        "lease": {
            "allocate": 1,
            "check_writable": 1,
            "exists": 4,
            "functions": 417,
            "is_at": 2,
            "is_directory": 5,
            "make_directory": 2,
            "open": 4,
            "open_to_read": 1,
            "read": 2,
            "rename": 3,
            "size": 1,
            "status": 3,
            "sync": 3,
            "sync_directory": 7,
            "truncate": 1,
            "write": 4,
        },
        "ack": {"exists": 1, "functions": 132, "is_at": 1, "list": 1, "open": 1, "status": 2, "sync": 1, "write": 2},
    },
    "topic, commit": {
        "append": {"allocate": 5, "bytes": 690000, "functions": 56, "status": 5, "sync": 1000, "write": 4000},
        "append_many": {"bytes": 304139, "functions": 112, "sync": 2, "write": 8},
        "read, commit": {"functions": 127, "inode_and_size": 3000, "read": 1006, "sync": 1000, "write": 4000},
        "read_many, commit": {"functions": 148, "inode_and_size": 3, "read": 3, "sync": 1, "write": 4},
    },
}


def costs(files: Counted, name: str, times: int, act: Callable[[], object]) -> dict[str, int]:
    with counted(files) as found:
        for _ in range(times):
            act()
    found["functions"] //= times  # some are called when the clock says so
    return {what: count for what, count in sorted(found.items()) if what != "bytes" or name not in VARIED}


def check(kind: str, found: dict[str, dict[str, int]]) -> None:
    rows = "\n".join(f'"{name}": {json.dumps(counts)},' for name, counts in found.items())
    assert found == COSTS[kind], f"{CHANGED}\n{kind}\n{rows}"


@pytest.mark.parametrize("sync", ["never", "commit"])
def test_each_operation_of_a_queue_costs_what_it_did(sync: Literal["never", "commit"], tmp_path: Path) -> None:
    files = Counted()
    with Queue(tmp_path / "q", sync=sync, _files=files) as q:
        q.put(RECORD)
        q.get()  # what is done once is done
        q.put(RECORD)
        found = {name: costs(files, name, times, partial(act, q)) for name, (times, act) in QUEUE.items()}
    check(f"queue, {sync}", found)


@pytest.mark.parametrize("sync", ["never", "commit"])
def test_each_operation_of_a_topic_costs_what_it_did(
    sync: Literal["never", "commit"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "look_at_owners", 1e9)  # else the clock says when it looks
    files = Counted()
    with Topic(tmp_path / "t", sync=sync, _files=files) as t, t.reader("r") as r:
        t.append(RECORD)
        r.read()
        r.commit()
        found = {name: costs(files, name, times, partial(act, t, r)) for name, (times, act) in TOPIC.items()}
    check(f"topic, {sync}", found)


def test_opening_costs_the_same_however_many_records_there_are(tmp_path: Path) -> None:
    found = []
    for records in (10, 1_000):
        with Queue(tmp_path / "q", sync="never") as q:
            for _ in range(100):
                q.put_many([RECORD] * records)
        files = Counted()
        with ExitStack() as opened:
            found.append(costs(files, "open, get", 1, partial(open_and_get, tmp_path / "q", files, opened)))
    assert found[0] == found[1]
    check("queue, closed", {"open, get": found[0]})


def test_opening_and_looking_cost_the_same_however_many_acknowledged_batches_are_kept(tmp_path: Path) -> None:
    """docs: a long history costs next to nothing until somebody asks for it."""
    found = []
    for batches in (50, 500):  # so many that closing cuts the log back
        path = tmp_path / str(batches) / "q"
        path.parent.mkdir()
        with Queue(path, sync="never", _files=NoSync()) as q:
            for number in range(batches):
                q.put(RECORD)
                q.lease(f"run {number}").ack()  # type: ignore[union-attr]
            q.put(RECORD)
        files = Counted()
        with counted(files) as counts:
            assert inspect(path).records == 1
            Queue(path, sync="never", _files=files).close()
        found.append({what: count for what, count in counts.items() if what != "bytes"})
    functions = [counts.pop("functions") for counts in found]
    assert functions[1] - functions[0] < 20, "some for each 32 KiB of them"
    assert found[0] == found[1]


def test_looking_at_an_open_queue_costs_no_more_however_many_batches_its_owner_has_processed(tmp_path: Path) -> None:
    found = []
    with Queue(tmp_path / "q", sync="never", _files=NoSync()) as q:
        for number in range(1_000):
            q.put(RECORD)
            q.lease(f"run {number}").ack()  # type: ignore[union-attr]
            if number % 50 == 0:
                with counted(Counted()) as counts:
                    inspect(tmp_path / "q")
                found.append(counts["functions"])
    assert max(found) < 5 * found[1]


def test_opening_looks_into_as_many_files_however_many_chunks_there_are(tmp_path: Path) -> None:
    found = []
    for records in (50, 500):
        with Queue(tmp_path / "q", chunk_size=1_000, sync="never") as q:
            q.put_many([RECORD] * records)
        files = Counted()
        Queue(tmp_path / "q", _files=files).close()
        found.append(files.counts.copy())
    assert found[0]["open_to_read"] == 3, "the log, the first chunk and the last"
    assert found[0] == found[1]


def test_a_commit_of_a_process_behind_which_others_wait_costs_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "is_awaited", lambda fd: True)
    files = Counted()
    for _ in range(3):
        found = costs(files, "open, put_many, close", 1, partial(open_and_put, tmp_path / "q", files))
    check("queue, handed over", {"open, put_many, close": found})


def test_closing_syncs_what_has_changed_alone(tmp_path: Path) -> None:
    files = Counted()
    found = []
    for records in (0, 1_000, 0):
        q = Queue(tmp_path / "q", _files=files)
        q.put_many([RECORD] * records)
        files.counts.clear()
        q.close()
        found.append((files.counts["sync"], files.counts["sync_directory"]))
    assert found == [(0, 2), (2, 1), (0, 0)], "stamp, log and header of an empty queue go; the chunk and the header; nothing"


def open_and_put(path: Path, files: Files) -> None:
    with Queue(path, _files=files) as q:
        q.put_many([RECORD] * 2_000)


def open_and_get(path: Path, files: Files, until: ExitStack) -> None:
    until.enter_context(Queue(path, _files=files)).get()


def test_a_record_that_waits_keeps_no_memory(tmp_path: Path) -> None:
    with Queue(tmp_path / "q", sync="never", _files=Counted()) as q:
        q.put_many([RECORD] * 10_000)
        q.get_many(1_000)
        tracemalloc.start()
        try:
            for _ in range(50):
                q.put_many([RECORD] * 1_000)
            q.get_many(1_000)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 128 << 10, f"{kept:,} bytes are kept for 50,000 records of 100 bytes; a piece that was read has 64 KiB"


# Backlogs


@pytest.mark.req("T13")
def test_what_a_commit_of_one_record_does_on_disk_does_not_depend_on_the_backlog(tmp_path: Path) -> None:
    costs = []
    for backlog in (1, 10_000, 100_000):
        (folder := tmp_path / str(backlog)).mkdir()
        disk = JournalDisk(str(folder))
        with Queue(folder / "q", chunk_size=1 << 20, _files=disk) as q, q.session() as session:
            q.put_many(numbers(0, backlog))
            cost = []
            for act in [lambda: session.put(b"new")] * 10 + [session.get] * 10:
                act()
                start = len(disk.calls)
                session.commit()
                cost.append([(call.kind, len(call.data)) for call in disk.calls[start:]])
        costs.append(cost)
    assert costs[0] == costs[1] == costs[2]
    assert [kind for call in costs[0] for kind, _ in call] == ["write", "sync"] * 20
    assert max(size for call in costs[0] for _, size in call) < 60


@pytest.mark.req("S14")
def test_the_log_is_cut_back_while_sessions_hold_records_and_what_that_writes_depends_on_no_backlog(tmp_path: Path) -> None:
    largest = []
    for backlog in (10, 20_000):
        (folder := tmp_path / str(backlog)).mkdir()
        disk = JournalDisk(str(folder))
        with Queue(folder / "q", chunk_size=1 << 20, log_bytes=2000, _files=disk) as q:
            q.put_many(numbers(0, backlog))
            session, other = q.session(), q.session()
            assert session.get_many(3) == numbers(0, 3)
            start = len(disk.calls)
            for _ in range(200):
                other.put(b"new")
                other.commit()
                other.get()
                other.rollback()
            calls = disk.calls[start:]
            assert [call.kind for call in calls].count("rename") > 2
            largest.append(max(len(call.data) for call in calls))
            assert list(q) == [*numbers(3, backlog), *[b"new"] * 200]
            with Queue(crashed(folder), _files=NoSync()) as dead:
                assert list(dead) == [*numbers(0, backlog), *[b"new"] * 200], "what is held comes first"
    assert largest[1] <= largest[0] + 200


@pytest.mark.req("T12")
def test_opening_reads_the_log_since_its_last_snapshot_and_not_all_that_ever_happened(tmp_path: Path) -> None:
    class Reads(NoSync):
        bytes = 0

        def read(self, fd: int, size: int, offset: int) -> bytes:
            data = super().read(fd, size, offset)
            self.bytes += len(data.rstrip(b"\0"))
            return data

    with Queue(tmp_path / "q", chunk_size=4096, log_bytes=8000, _files=NoSync()) as q, q.session() as session:
        q.put_many(numbers(0, 50))
        for number in range(2000):
            session.put(b"%d" % number)
            session.get()
            session.commit()
        path = crashed(tmp_path)
    for where in (path, tmp_path / "q"):
        disk = Reads()
        with Queue(where, chunk_size=4096, _files=disk) as q:
            assert disk.bytes < 10_000
            assert len(q) == 50


MEASURE = """
import os, sys
from pathlib import Path
from qewqew_core import Queue
from qewqew_core.disk.files import Files

class Counting(Files):
    read_from_chunks = 0

    def read(self, fd, size, offset):
        data = super().read(fd, size, offset)
        if os.readlink(f"/proc/self/fd/{fd}").rpartition(".")[2].isdecimal():
            self.read_from_chunks += len(data)
        return data

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

disk = Counting()
with Queue(sys.argv[1], sync="never", _files=disk) as q:
    print(len(q), disk.read_from_chunks)
    with q.session() as session:
        session.put_many([b"new"] * 1000)
        session.get_many(1000)
        session.rollback()
        print(disk.read_from_chunks, os.stat(sys.argv[1] + ".wal").st_size)
        session.put_many([b"new"] * 1000)
        session.get_many(1000)
        session.commit()
        session.put_many(session.get_many(1000))
    print(disk.read_from_chunks, peak())
"""


@pytest.mark.req("S20", "T11")
def test_a_million_records_take_no_memory_or_time_to_open_while_a_session_works_at_both_ends(tmp_path: Path) -> None:
    with Queue(tmp_path / "million", sync="never") as q, q.session() as session:
        for start in range(0, 1_000_000, 100_000):
            session.put_many([b"%016d" % number for number in range(start, start + 100_000)])
            session.commit()

    def measured(name: str) -> list[int]:
        command = [sys.executable, "-c", MEASURE, tmp_path / name]
        done = subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[3])
        return [int(word) for word in done.stdout.split()]

    records, opened, read, log, read_in_all, full = measured("million")
    *_, empty = measured("none")
    assert records == 1_000_000
    assert opened < 100, "the pointers of the chunks"
    assert read < 200_000, "a thousand records were taken"
    assert log < 20_000
    assert read_in_all - read < 300_000, "two thousand more"
    assert full - empty < 10_000, "KiB"
