"""Real processes that work on one queue by sessions: killed at any moment, each record is taken exactly once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qewqew_core import Locked, Queue


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


HOLD = """
import os, sys
from qewqew_core import Queue
with Queue(sys.argv[1]) as q:
    q.put_many([b"0", b"1", b"2"])
    session = q.session()
    session.get()
    session.put(b"lost")
    print(os.getpid())
    sys.stdin.read()
"""


@pytest.mark.req("S19")
def test_the_kernel_gives_the_lock_back_at_the_death_of_its_owner(tmp_path):
    """No process id decides, so it holds across containers on one file system too."""
    path = tmp_path / "q"
    with python(HOLD, path) as owner:
        owner.stdout.readline()
        with pytest.raises(Locked):
            Queue(path, lock_timeout=0)
        owner.kill()
    with Queue(path, lock_timeout=0) as q:
        assert list(q) == [b"0", b"1", b"2"], "what its session held is there, what it had put is not"


PRODUCE = """
import sys, time
from qewqew_core import Queue
path, cycle = sys.argv[1:]
number = 0
while True:
    time.sleep(0.01)  # as if it did something else too: the lock is not handed over, who waits must find it free
    with Queue(path, chunk_size=1 << 12, lock_timeout=60) as q:
        for _ in range(4):
            with q.session() as session:
                for index in range(5):
                    session.put(f"{cycle}.{number}.{index}".encode())
                print("puts", f"{cycle}.{number}")
            print("put", f"{cycle}.{number}")
            number += 1
            with q.session() as session:  # and one that takes it all back
                session.get_many(9)
                session.put(b"never")
                session.rollback()
"""


CONSUME = """
import sys, time
from qewqew_core import Queue
path, cycle, size = sys.argv[1:]
number = 0
while True:
    time.sleep(0.01)
    with Queue(path, chunk_size=1 << 12, lock_timeout=60) as q:
        while True:
            with q.session() as session:
                records = session.get_many(int(size))
                if not records and cycle == "end":
                    print("empty")
                    sys.exit()
                if not records:
                    break
                key = f"take {cycle}.{number}"
                print("takes", key, *(record.decode() for record in records), sep="|")
                session.commit(key=key)
                print("took", key, sep="|")
                number += 1
                if number % 5 == 0:
                    break
"""


def whole(process: subprocess.Popen[str]) -> list[str]:
    """The lines that it has printed (and that were not read yet), but for one that was cut off."""
    with process:
        return [line[:-1] for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.req("T14")
@pytest.mark.quick("sessions are killed at random: nothing is lost or repeated")
def test_a_producer_and_a_consumer_killed_at_random_lose_and_repeat_nothing(tmp_path):
    """What they print is the oracle. Of the commit in flight at a kill, the queue tells by its key whether it happened."""
    luck, path = random.Random(14), tmp_path / "q"
    announced: set[str] = set()  # commits of puts that may have happened …
    stored: set[str] = set()  # … and those that returned
    taken: list[str] = []  # records
    doubtful: dict[str, list[str]] = {}  # by the key of the commit that was to take them
    kills = 10
    for cycle in [*map(str, range(kills)), "end"]:
        producer = python(PRODUCE, path, cycle) if cycle != "end" else None
        consumer = python(CONSUME, path, cycle, luck.choice([3, 7, 50]) if producer else 5000)
        if producer:
            started = [process.stdout.readline() for process in (producer, consumer)]
            assert all(started)
            time.sleep(luck.uniform(0.05, 0.3))
            for process in luck.sample([producer, consumer], 2):
                process.send_signal(signal.SIGKILL)
                process.wait()
            for line in [started[0].strip(), *whole(producer)]:
                what, commit = line.split()
                (announced if what == "puts" else stored).add(commit)
        else:
            started = ["", ""]
        for line in filter(None, [started[1].strip(), *whole(consumer)]):
            what, *rest = line.split("|")
            if what == "takes":
                doubtful[rest[0]] = rest[1:]
            elif what == "took":
                taken += doubtful.pop(rest[0])
        for key in list(doubtful):
            with Queue(path, lock_timeout=60) as q, q.session() as session:
                session.put(b"probe")
                happened = session.commit(key=key) == 0  # what the first one returned: it had put nothing
                records = doubtful.pop(key)
                if happened:
                    taken += records
                else:
                    assert b"probe" in q
                    batch = q.get_many(1 << 30)
                    q.put_many([record for record in batch if record != b"probe"])
    with Queue(path) as q:
        assert len(q) == 0
        assert q.verify().problems == []
    assert "never" not in taken
    assert len(taken) == len(set(taken)), "a record was taken twice"
    expected = {f"{commit}.{index}" for commit in stored for index in range(5)}
    assert expected <= set(taken), "a record that was committed is lost"
    extra = {record.rpartition(".")[0] for record in set(taken) - expected}
    assert extra <= announced - stored
    assert set(taken) - expected == {f"{commit}.{index}" for commit in extra for index in range(5)}, "half a commit"
    assert len(extra) <= kills
    assert len(stored) > 100
    order = [tuple(map(int, record.split("."))) for record in taken]
    assert order == sorted(order), "first in, first out, kills or not"


@pytest.mark.req("T15")
def test_a_lock_that_a_dead_process_has_left_is_none_whoever_has_its_id_now(tmp_path):
    """A crash image made by this very process: an id in the files, if there were one, would be that of a living process."""
    home, image = tmp_path / "home", tmp_path / "image"
    home.mkdir()
    with Queue(home / "q") as q:
        q.put(b"0")
        shutil.copytree(home, image)
        with Queue(image / "q", lock_timeout=0) as dead:
            assert dead.get() == b"0"
            numbers = {str(os.getpid()).encode(), os.getpid().to_bytes(4), os.getpid().to_bytes(4, "little")}
            assert Path(image / "q").read_bytes() not in numbers
        with pytest.raises(Locked):
            Queue(home / "q", lock_timeout=0)
