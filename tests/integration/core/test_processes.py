"""Real processes on one queue: one owner at a time, none starved, and killed ones lose nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from stopping import stop

from qewqew_core import Locked, Queue, inspect


def python(code: str, *arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options)


HOLD = """
import sys
from qewqew_core import Queue
with Queue(sys.argv[1]) as q:
    q.put(b"held")
    print("open")
    sys.stdin.read()
"""


OPEN = """
import sys
from qewqew_core import Queue
Queue(sys.argv[1], lock_timeout=0)
"""


@pytest.mark.req("S6")
def test_a_second_process_is_refused_and_told_who_holds_the_queue(tmp_path):
    path = tmp_path / "q"
    other = python(HOLD, path)
    assert other.stdout.readline() == "open\n"
    began = time.monotonic()
    with pytest.raises(Locked, match=f"process {other.pid} has the queue open") as caught:
        Queue(path, lock_timeout=0.3)
    assert caught.value.pid == other.pid
    assert caught.value.path == str(path)
    assert time.monotonic() - began >= 0.3
    assert inspect(path).records == 1  # looking needs no lock
    other.communicate("")
    with Queue(path, lock_timeout=0) as q:
        assert q.get() == b"held"


@pytest.mark.req("S6")
def test_waiting_for_the_lock_ends_when_the_owner_closes(tmp_path):
    path = tmp_path / "q"
    other = python(HOLD, path)
    other.stdout.readline()
    threading.Timer(0.3, other.stdin.close).start()
    with Queue(path, lock_timeout=10) as q:
        assert q.get() == b"held"
    other.wait()


def test_the_kernel_gives_the_lock_of_a_killed_owner_back_at_once(tmp_path):
    path = tmp_path / "q"
    other = python(HOLD, path)
    other.stdout.readline()
    other.kill()
    other.wait()
    with Queue(path, lock_timeout=0) as q:
        assert q.get() == b"held"


@pytest.mark.req("S6")
def test_a_second_opening_in_the_same_process_waits(tmp_path):
    with Queue(tmp_path / "q") as q, ThreadPoolExecutor(1) as pool:
        q.put(b"still mine")
        waiting = pool.submit(Queue, tmp_path / "q", lock_timeout=3600)
        q.close()
        with waiting.result(300) as mine:
            assert mine.get() == b"still mine"


LOCK_LIKE_JAVA = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # FileChannel.tryLock() of the JVM is this POSIX lock
print("locked")
sys.stdin.read()
"""


@pytest.mark.req("REQ-7")
@pytest.mark.quick("a process that locks as the Java library does is an owner too")
def test_a_java_process_that_holds_the_header_is_an_owner_too(tmp_path):
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put(b"x")
    java = python(LOCK_LIKE_JAVA, path)
    assert java.stdout.readline() == "locked\n"
    with pytest.raises(Locked) as caught:
        Queue(path, lock_timeout=0)
    assert caught.value.pid == java.pid
    java.communicate("")
    Queue(path, lock_timeout=1).close()


def test_a_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "q"
    q = Queue(path)
    q.put(b"x")
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        q.close()
        with Queue(path, lock_timeout=0) as again:
            assert again.get() == b"x"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


STAGE = """
import sys
from qewqew_core import Queue
path, name, commits, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
for commit in range(commits):
    with Queue(path, chunk_size=1 << 14, lock_timeout=60) as q:
        q.put_many([f"{name} {commit} {number}".encode() for number in range(size)], key=f"{name} {commit}")
    print(f"ack {commit}")  # one write: a kill does not cut it
"""


@pytest.mark.quick("eight processes stage at once, and none is starved")
def test_eight_processes_stage_at_once_each_finds_its_records_in_its_order_and_none_is_starved(tmp_path):
    path, commits, size = tmp_path / "q", 40, 25
    stagers = [python(STAGE, path, f"p{number}", commits, size) for number in range(8)]
    for stager in stagers:
        stager.communicate()
        assert stager.returncode == 0
    with Queue(path) as q:
        assert q.verify().ok
        records = [tuple(record.decode().split()) for record in q.get_many(1 << 30)]
    for number in range(8):
        mine = [(int(commit), int(index)) for name, commit, index in records if name == f"p{number}"]
        assert mine == [(commit, index) for commit in range(commits) for index in range(size)]
    assert len(records) == 8 * commits * size
    # While all of them want the queue, each has its turn: seven others come before it, and some more if it is late once.
    order = [name for name, _, index in records if index == "0"]
    last_begins = max(order.index(f"p{number}") for number in range(8))
    first_ends = min(len(order) - order[::-1].index(f"p{number}") for number in range(8))
    contended = order[last_begins:first_ends]
    for number in range(8):
        turns = [-1, *(at for at, name in enumerate(contended) if name == f"p{number}"), len(contended)]
        assert max(after - before for before, after in pairwise(turns)) <= 3 * 8


def waits(process: subprocess.Popen[str], path: Path) -> bool:
    """Whether the process stands in line for the queue."""
    for info in Path(f"/proc/{process.pid}/fdinfo").iterdir():
        try:
            if "OFDLCK" in info.read_text():
                return os.readlink(f"/proc/{process.pid}/fd/{info.name}") == str(path)
        except FileNotFoundError:  # closed meanwhile
            continue
    return False


def test_one_that_was_stopped_first_in_line_holds_nobody_up_and_comes_later(tmp_path):
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put(b"so that the header stays")
        code = STAGE.replace("lock_timeout=60", "lock_timeout=120")
        stagers = []
        for name in ("first", "second"):
            stagers.append(python(code, path, name, 1, 1))
            while not waits(stagers[-1], path):
                assert stagers[-1].poll() is None
                time.sleep(0.01)
        with pytest.raises(Locked, match="this process"):  # not one of those who wait
            Queue(path, lock_timeout=0)
        stop(stagers[0].pid)
    assert stagers[1].communicate()[0] == "ack 0\n"
    stagers[0].send_signal(signal.SIGCONT)
    assert stagers[0].communicate()[0] == "ack 0\n"
    with Queue(path) as q:
        assert [record.split()[0] for record in q.get_many(9)] == [b"so", b"second", b"first"]


CONSUME = """
import sys
from qewqew_core import Queue
path, out, run = sys.argv[1:]
while True:
    run = str(int(run) + 1)
    with Queue(path, chunk_size=1 << 12, lock_timeout=60) as q:
        # A retry finds the batch that is still leased, as an Airflow task does by its key.
        batch = next((one for one in q.batches() if one.state == "leased"), None) or q.lease("run " + run, max_records=50)
    if batch is None:
        print("idle")
        continue
    with open(f"{out}/{batch.id}", "wb") as sink:  # overwritten by batch id, as the Spark job does
        for record in batch:
            sink.write(record + b"\\n")
    with Queue(path, chunk_size=1 << 12, lock_timeout=60) as q:
        q.batch(batch.id).ack()
    print("acked", run)
"""


@pytest.mark.quick("stagers and consumers are killed at random: each record is in one acknowledged batch")
def test_stagers_and_consumers_killed_at_random_leave_each_record_in_one_acknowledged_batch(tmp_path):
    """What returned is there, what was in flight is there once or not at all, and nothing is in two batches."""
    luck = random.Random(5)
    path, out = tmp_path / "q", tmp_path / "out"
    out.mkdir()
    code = STAGE.replace("1 << 14", "1 << 12")
    acknowledged: set[str] = set()
    for cycle in range(8):
        stagers = [python(code, path, f"c{cycle}s{number}", 400, 5) for number in range(2)]
        consumer = python(CONSUME, path, out, 1000 * cycle)
        first = stagers[cycle % 2].stdout.readline()  # however slow the machine: one of them has begun
        time.sleep(luck.uniform(0, 0.5))
        for process in (*stagers, consumer):
            process.send_signal(signal.SIGKILL)
        for number, process in enumerate(stagers):
            lines = [first] * (number == cycle % 2) + process.stdout.read().splitlines()
            process.wait()
            acknowledged |= {f"c{cycle}s{number} {line.split()[1]} {index}" for line in lines for index in range(5)}
        consumer.communicate()
    finish = python(CONSUME, path, out, 99000)
    for line in finish.stdout:
        if line == "idle\n":
            break
    finish.kill()
    finish.communicate()
    with Queue(path) as q:
        assert not q
        assert q.batches() == []
        assert q.verify().ok
    delivered = [line for file in Path(out).iterdir() for line in file.read_text().splitlines()]
    assert len(delivered) == len(set(delivered)), "a record is in two batches"
    assert acknowledged <= set(delivered), "a record that was acknowledged is lost"
    # What was in flight when its process was killed is there whole or not at all.
    extra = set(delivered) - acknowledged
    assert len({line.rsplit(" ", 1)[0] for line in extra}) * 5 == len(extra) <= 8 * 2 * 5
    assert len(acknowledged) >= 8 * 5
