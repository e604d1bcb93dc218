"""Who waits for a lock sleeps in the kernel until it is dropped, keeps the time-out, and knows who has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, MutableSequence
from pathlib import Path

import pytest
from stopping import stop

from qewqew_core import Locked, Queue
from qewqew_core.disk import lock
from qewqew_core.disk.files import DISK, Files

HOLD = """
import sys
from qewqew_core import Queue
with Queue(sys.argv[1]) as queue:
    queue.put(b"first")
    print(flush=True)
    sys.stdin.readline()
"""

AS_JAVA = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(flush=True)
    sys.stdin.readline()
"""

PUT = """
import sys
from qewqew_core import Queue
with Queue(sys.argv[1], lock_timeout=120) as queue:
    queue.put(sys.argv[2].encode())
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """It has printed a line, and ends when it reads one."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def wakers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qewqew-waker"]


@pytest.fixture
def header(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two openings of a file: the first has the lock on all of it."""
    path = tmp_path / "header"
    path.touch()
    ours, theirs = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert lock.whole(theirs)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_who_waits_looks_a_few_times_however_long_it_takes(header: tuple[int, int]) -> None:
    ours, theirs = header
    looks: list[float] = []

    def act() -> bool | None:
        looks.append(time.monotonic())
        return lock.whole(ours) or None

    waiting = threading.Thread(target=lock.in_turn, args=(ours, 120, act))
    waiting.start()
    while not wakers():
        time.sleep(0.01)
    before = len(looks)
    time.sleep(0.5)
    assert len(looks) <= before + 2  # one a second, in case that who is before us was stopped
    lock.unlock(theirs)
    waiting.join(120)
    assert not waiting.is_alive()
    assert lock.first_locked(theirs, 0, 1) == 0


def test_whose_time_is_over_leaves_one_thread_that_sleeps_for_the_next(header: tuple[int, int]) -> None:
    ours, theirs = header
    for _ in range(20):
        assert lock.in_turn(ours, 0.02, lambda: lock.whole(ours) or None) is None
    assert len(wakers()) <= 1
    lock.unlock(theirs)
    for thread in wakers():
        thread.join(120)
    assert not wakers()
    assert lock.first_locked(ours, 0, 0) is None


def test_a_process_that_was_forked_while_its_parent_waits_waits_by_itself(header: tuple[int, int]) -> None:
    ours, theirs = header
    assert lock.in_turn(ours, 0.02, lambda: lock.whole(ours) or None) is None
    if not (child := os.fork()):
        fd = os.open(f"/proc/self/fd/{ours}", os.O_RDWR)
        os._exit(0 if lock.in_turn(fd, 120, lambda: lock.whole(fd) or None) else 1)
    while lock.first_locked(ours, lock._LINE, lock._OWNERS - lock._LINE) is None:
        time.sleep(0.01)
    lock.unlock(theirs)
    assert os.waitpid(child, 0)[1] == 0
    assert lock.first_locked(theirs, 0, 0) is None


def test_many_who_come_at_once_get_through_although_one_in_the_line_is_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "q")
    holder = started(HOLD, path)
    stopped = subprocess.Popen([sys.executable, "-c", PUT, path, "0"])
    fd, until = os.open(path, os.O_RDWR), time.monotonic() + 120
    while lock.first_locked(fd, lock._LINE, 1) is None:  # it does not stand in the line yet
        assert time.monotonic() < until
        time.sleep(0.01)
    os.close(fd)
    stop(stopped.pid)
    putters = [subprocess.Popen([sys.executable, "-c", PUT, path, str(number)]) for number in range(1, 12)]
    holder.communicate("\n", timeout=120)
    for process in putters:
        assert process.wait(120) == 0
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(120) == 0
    with Queue(path) as queue:
        assert sorted(queue.get_many(100)) == sorted([b"first", *(str(number).encode() for number in range(12))])


@pytest.mark.parametrize("program", [HOLD, AS_JAVA])
def test_who_is_locked_out_is_told_by_whom(tmp_path: Path, program: str) -> None:
    path = tmp_path / "q"
    path.write_bytes(bytes(2))
    assert lock.holder(str(path)) is None
    holder = started(program, str(path))
    assert lock.holder(str(path)) == holder.pid
    with pytest.raises(Locked, match=f"process {holder.pid} has the queue open; gave up after 0 s") as caught:
        Queue(path, lock_timeout=0)
    assert caught.value.pid == holder.pid
    holder.communicate("\n", timeout=120)
    assert lock.holder(str(path)) is None
    with Queue(path), pytest.raises(Locked, match="this process has the queue open"):
        Queue(path, lock_timeout=0)


def test_nobody_is_named_where_the_number_is_that_of_a_process_without_the_file(tmp_path: Path) -> None:
    """As of an owner in another container: its process id is somebody else's here."""
    path = tmp_path / "q"
    path.write_bytes(bytes(2))
    fd = os.open(path, os.O_RDWR)
    assert lock.whole(fd)
    assert lock.take(fd, lock._OWNERS + os.getppid(), 1)
    assert lock.holder(str(path)) is None
    lock.drop(fd, lock._OWNERS, 0)
    assert lock.take(fd, lock._OWNERS + os.getpid(), 1)
    assert lock.holder(str(path)) == os.getpid()
    os.close(fd)


def test_who_comes_before_there_is_a_header_stands_in_line_once_there_is_one(tmp_path: Path) -> None:
    """Otherwise those who come back at once would always be faster."""
    path, owners, through = str(tmp_path / "q"), list[lock.HeaderLock](), list[lock.HeaderLock]()

    class Late(Files):
        """Somebody else makes the header just before us."""

        def open_into(self, descriptors: MutableSequence[int], path: str, *, new: bool = False, follow: bool = False) -> None:  # type: ignore[override]
            if new and not owners:
                owners.append(lock.acquire(DISK, path, 0)[0])
            super().open_into(descriptors, path, new=new, follow=follow)

    waiting = threading.Thread(target=lambda: through.append(lock.acquire(Late(), path, 60)[0]))
    waiting.start()
    until = time.monotonic() + 60
    while not (owners and lock.is_awaited(owners[0].fd)):
        assert time.monotonic() < until
        time.sleep(0.01)
    owners[0].release()
    waiting.join(60)
    through[0].release()
