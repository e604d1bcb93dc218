"""A queue that is closed while another process waits for it is handed over: all is written, and the one that goes on syncs it.

What crashes leave of it is in `test_crash.py`, by the work "queue, handed over".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk import NoSync
from plain import numbers, plain
from stopping import stop

from qewqew_core import Queue, inspect, repair
from qewqew_core.disk import lock
from qewqew_core.limits import LIMITS
from qewqew_core.queue import log as logs

OPEN = """
import sys
from qewqew_core import Queue
with Queue(sys.argv[1], lock_timeout=300) as queue:
    print(len(queue), flush=True)
    queue.put_many([b"theirs"] * int(sys.argv[2]))
"""


@contextmanager
def a_process_waits(path: Path, puts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that stands in line for the queue and is stopped there; at the end it goes on, and puts so many records."""
    waiting = subprocess.Popen([sys.executable, "-c", OPEN, path, str(puts)], stdout=subprocess.PIPE, text=True)
    header = os.open(path, os.O_RDWR)
    until = time.monotonic() + 300
    while not lock.is_awaited(header):
        assert time.monotonic() < until, "it does not stand in line"
        time.sleep(0.01)
    os.close(header)
    stop(waiting.pid)
    try:
        yield waiting
    finally:
        os.kill(waiting.pid, signal.SIGCONT)
        waiting.wait(300)


class Syncs(NoSync):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def sync(self, fd: int) -> None:
        self.counts["sync"] += 1

    def sync_directory(self, path: str) -> None:
        self.counts["sync_directory"] += 1


def opened(path: Path, files: Syncs | None = None) -> Queue:
    return Queue(path, chunk_size=1000, _files=files or Syncs())


def test_the_one_who_waits_finds_everything_and_leaves_it_as_the_original_would(tmp_path: Path) -> None:
    path, records = tmp_path / "q", numbers(0, 500)
    with opened(path) as queue:
        queue.put_many(records[:200])
    with opened(path) as queue:
        with a_process_waits(path, puts=3) as waiting:
            queue.put_many(records[200:])
            queue.close()
            assert plain(path) == records  # files that were written follow the log, for whoever reads them
            assert inspect(path).records == 500
        assert waiting.communicate()[0] == "500\n"
    assert plain(path) == [*records, *[b"theirs"] * 3]
    with opened(path) as queue:
        assert list(queue) == [*records, *[b"theirs"] * 3]
        assert queue.verify().ok


def test_a_waiting_process_saves_the_one_that_closes_all_fsyncs_but_that_of_its_commit(tmp_path: Path) -> None:
    path, files = tmp_path / "q", Syncs()
    with opened(path) as queue:
        queue.put(b"first")
    with opened(path, files) as queue, a_process_waits(path):
        queue.put_many(numbers(0, 20))
        queue.close()
    assert files.counts == {"sync": 1}


def test_who_waited_in_vain_leaves_the_files_for_the_next_one(tmp_path: Path) -> None:
    path, files = tmp_path / "q", Syncs()
    with opened(path) as queue:
        queue.put(b"first")
    with opened(path) as queue, a_process_waits(path) as waiting:
        queue.put(b"second")
        queue.close()
        waiting.kill()
    with opened(path, files) as queue:
        assert list(queue) == [b"first", b"second"]
    assert files.counts["sync"] > 0  # nobody waits: what was handed over is durable, though this one changed nothing
    assert plain(path) == [b"first", b"second"]


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "is_awaited", lambda fd: True)


@pytest.mark.usefixtures("awaited")
def test_a_java_program_may_use_a_queue_that_was_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "q"
    for begin in (0, 10, 20):
        with opened(path) as queue:
            queue.put_many(numbers(begin, begin + 10))
    last = tmp_path / "q.30001"  # it appends one record, as the original does: bytes, then the tail
    data = bytearray(last.read_bytes())
    tail = int.from_bytes(data[4:8])
    data[tail : tail + 6] = b"\0\4java"
    data[4:8] = (tail + 6).to_bytes(4)
    last.write_bytes(data)
    assert inspect(path).records == 31
    with opened(path) as queue:
        assert list(queue) == [*numbers(0, 30), b"java"]


@pytest.mark.usefixtures("awaited")
def test_a_log_that_is_handed_over_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "log_bytes_at_handover", 3000)
    monkeypatch.setattr(LIMITS, "log_bytes_at_close", 3000)
    path, sizes = tmp_path / "q", set[int]()
    for number in range(50):
        with opened(path) as queue:
            queue.put_many([b"%d" % number * 50] * 5)
        sizes.add(inspect_log(path))
    assert max(sizes) < 10_000
    with opened(path) as queue:
        assert len(queue) == 250


def inspect_log(path: Path) -> int:
    """Bytes of the log, without the room that it keeps."""
    return len(path.with_name(f"{path.name}.wal").read_bytes().rstrip(b"\0"))


@pytest.mark.usefixtures("awaited")
def test_damage_to_a_queue_that_was_handed_over_is_repaired_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "q"
    for begin in (0, 200):
        with opened(path) as queue:
            queue.put_many(numbers(begin, begin + 200))
    path.write_bytes(b"\x11\x22")  # a header that leads nowhere
    repair(path)
    with opened(path) as queue:
        assert list(queue) == numbers(0, 400)


@pytest.mark.usefixtures("awaited")
@pytest.mark.parametrize("at", [0, 500, (64 << 10) - 1, 64 << 10, 200_000, -4])  # behind the handover; -4: at the end of the file
def test_what_a_crash_tore_behind_a_handover_is_not_left_behind_the_next_frames(at: int, tmp_path: Path) -> None:
    path, log = tmp_path / "q", tmp_path / "q.wal"
    with opened(path) as queue:
        queue.put(b"first")
    end = inspect_log(path)
    with log.open("r+b") as file:
        file.seek(end + at if at >= 0 else log.stat().st_size + at)
        file.write(b"torn")
    with opened(path) as queue:
        queue.put(b"second")
        assert b"torn" not in log.read_bytes()
    with opened(path) as queue:
        assert list(queue) == [b"first", b"second"]


def test_a_snapshot_of_chunks_that_were_not_looked_at_is_as_one_of_those_that_were(tmp_path: Path) -> None:
    with Queue(tmp_path / "q", chunk_size=1 << 20, sync="never") as queue:
        for _ in range(50):
            queue.put_many([bytes(1000)] * 100)  # five chunks
    state = logs.replay((tmp_path / "q.wal").read_bytes(), "").state
    before = logs.snapshot(state, 7)
    assert sum(len(chunk_state.pieces) for chunk_state in state.chain.values()) > 50
    assert logs.snapshot(state, 7) == before
    assert logs.snapshot(logs.replay(before, "").state, 7) == before
