"""What each operation costs, in what does not depend on the machine: calls of the file system, bytes, calls of functions.

Times are for the benchmarks. Here a change that adds a system call, writes more, or calls more functions for each record is
seen at once, whatever the machine.
"""

from __future__ import annotations

import gc
import json
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
from disk import NoSync

from qewqew_core import Message, Queue, Reader, Topic
from qewqew_core.files import Files

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
        return getattr(NoSync, name)(self, *arguments, **named)

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Counted, _name, _counting(_name))


@contextmanager
def counted(files: Counted) -> Iterator[Counter[str]]:
    """Calls of the file system, and of functions of the package. Comprehensions are functions in some versions of Python only,
    and generators are entered once more to be ended: they do not count.
    """
    found: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counts = "qewqew_core" in code.co_filename and not code.co_name.startswith("<") and not code.co_flags & CO_GENERATOR
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
        "put": {"bytes": 134000, "functions": 21, "write": 1000},
        "put_many": {"bytes": 204153, "functions": 46, "write": 4},
        "get": {"bytes": 36000, "functions": 20, "read": 2, "write": 1000},
        "get_many": {"bytes": 36, "functions": 36, "read": 1, "write": 1},
        "put_many again": {"bytes": 102051, "functions": 42, "write": 3},
        "session: get, put, commit": {"bytes": 15002, "functions": 72, "read": 1, "write": 101},
        "lease": {
            "close": 4,
            "exists": 3,
            "functions": 148,
            "is_directory": 5,
            "make_directory": 2,
            "open": 2,
            "open_to_read": 1,
            "read": 2,
            "rename": 3,
            "size": 1,
            "sync": 3,
            "sync_directory": 7,
            "truncate": 1,
            "write": 3,
        },
        "ack": {"functions": 43, "sync": 1, "write": 1},
    },
    "queue, closed": {
        "open, get": {
            "allocate": 1,
            "bytes": 36,
            "close": 2,
            "exists": 2,
            "functions": 132,
            "identity": 3,
            "irregular": 1,
            "is_directory": 2,
            "list": 2,
            "open": 2,
            "open_to_read": 2,
            "read": 5,
            "size": 3,
            "sync": 1,
            "write": 1,
        }
    },
    "topic, never": {
        "append": {"allocate": 1, "bytes": 690000, "functions": 41, "write": 4000},
        "append_many": {"bytes": 304143, "functions": 1062, "write": 8},
        "read, commit": {"functions": 91, "identity": 2000, "read": 3006, "size": 2000, "write": 3000},
        "read_many, commit": {"functions": 115, "identity": 2, "read": 6, "size": 2, "write": 3},
    },
    "queue, commit": {
        "put": {"bytes": 134000, "functions": 23, "sync": 1000, "write": 1000},
        "put_many": {"bytes": 102043, "functions": 39, "sync": 1, "write": 1},
        "get": {"bytes": 240102, "functions": 22, "read": 2, "sync": 1000, "write": 1001},
        "get_many": {"bytes": 36, "functions": 38, "read": 1, "sync": 1, "write": 1},
        "put_many again": {"allocate": 1, "bytes": 102043, "functions": 40, "sync": 1, "write": 1},
        "session: get, put, commit": {"bytes": 117002, "functions": 74, "read": 1, "sync": 100, "write": 101},
        "lease": {
            "close": 4,
            "exists": 3,
            "functions": 133,
            "is_directory": 5,
            "make_directory": 2,
            "open": 2,
            "open_to_read": 1,
            "read": 2,
            "rename": 3,
            "size": 1,
            "sync": 3,
            "sync_directory": 7,
            "truncate": 1,
            "write": 3,
        },
        "ack": {"functions": 43, "sync": 1, "write": 1},
    },
    "topic, commit": {
        "append": {"allocate": 1, "bytes": 690000, "functions": 49, "sync": 1000, "write": 4000},
        "append_many": {"bytes": 304143, "functions": 1072, "sync": 2, "write": 8},
        "read, commit": {"functions": 93, "identity": 2000, "read": 3006, "size": 2000, "sync": 1000, "write": 3000},
        "read_many, commit": {"functions": 117, "identity": 2, "read": 6, "size": 2, "sync": 1, "write": 3},
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
    monkeypatch.setattr("qewqew_core.reader.LOOK_AT_OWNERS", 1e9)  # else the clock says when it looks
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


def test_closing_syncs_what_has_changed_alone(tmp_path: Path) -> None:
    files = Counted()
    found = []
    for records in (0, 1_000, 0):
        q = Queue(tmp_path / "q", _files=files)
        q.put_many([RECORD] * records)
        files.counts.clear()
        q.close()
        found.append((files.counts["sync"], files.counts["sync_directory"]))
    assert found == [(0, 1), (2, 1), (0, 0)], "the header of an empty queue goes; the chunk and the header; nothing"


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
