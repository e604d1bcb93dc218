"""The lock of a queue: what opens and what releases it can be interrupted anywhere, and portalocker does the locking."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import portalocker
import pytest
from portalocker.portalocker import PosixLocker

from qewqew_core import Closed, Locked, Queue, Topic, inspect
from qewqew_core.disk import lock
from qewqew_core.disk.files import DISK, Files

LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a Java program does
    except BlockingIOError:
        print("locked")
"""


def is_locked(path: Path) -> bool:
    return subprocess.run([sys.executable, "-c", LOCK, path], capture_output=True, text=True, check=True).stdout == "locked\n"


def descriptors() -> set[str]:
    return {f"{name} {os.readlink(f'/proc/self/fd/{name}')}" for name in os.listdir("/proc/self/fd") if is_open(name)}


def is_open(name: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{name}") and "/proc/" not in os.readlink(f"/proc/self/fd/{name}")


def interrupted(line: int, act: Callable[[], object]) -> bool:
    """Call it with a KeyboardInterrupt at the n-th line that `lock` runs; False if it runs fewer."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != lock.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.parametrize("there", [True, False])
def test_opening_that_is_interrupted_at_any_line_leaves_no_descriptor_and_no_lock(tmp_path: Path, there: bool) -> None:
    path, line, before = tmp_path / "q", 0, descriptors()
    taken: list[lock.HeaderLock] = []
    while True:
        line += 1
        path.unlink(missing_ok=True)
        if there:
            path.touch()
        if not interrupted(line, lambda: taken.append(lock.acquire(DISK, str(path), 0)[0])):
            break
        assert descriptors() == before, line
    assert line > 30
    taken.pop().release()
    assert descriptors() == before


def test_a_release_that_is_interrupted_at_any_line_is_finished_by_the_next(tmp_path: Path) -> None:
    path, line, before = tmp_path / "q", 0, descriptors()
    while True:
        line += 1
        held, _ = lock.acquire(DISK, str(path), 0)
        ended = not interrupted(line, held.release)
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]  # one of them has the number of the header's descriptor
        held.release()
        for fd in others:
            os.fstat(fd)  # nobody has closed it
            os.close(fd)
        assert descriptors() == before
        lock.acquire(DISK, str(path), 0)[0].release()  # and the lock is free
        if ended:
            break
    assert line > 3


def test_a_lock_that_nobody_keeps_is_dropped(tmp_path: Path) -> None:
    before = descriptors()
    lock.acquire(DISK, str(tmp_path / "q"), 0)
    assert descriptors() == before
    assert not is_locked(tmp_path / "q")


def test_a_wait_that_is_interrupted_leaves_the_line(tmp_path: Path) -> None:
    """Also one with a descriptor that stays open, as that of a reader."""
    path, line = tmp_path / "header", 0
    path.touch()
    fd, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    while True:
        line += 1
        interrupted_here = interrupted(line, lambda: lock.in_turn(fd, 0, lambda: True))
        assert lock.first_locked(other, 0, 0) is None, line
        if not interrupted_here:
            break
    assert line > 20
    os.close(fd)
    os.close(other)


def test_a_lock_says_whether_its_file_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / "q"
    held, created = lock.acquire(DISK, str(path), 0)
    assert created
    assert held.is_still_at(str(path))
    path.rename(tmp_path / "other")
    assert held.is_still_at(str(tmp_path / "other"))
    assert not held.is_still_at(str(path))
    path.touch()
    assert not held.is_still_at(str(path))
    held.release()


@pytest.mark.req("REQ-7", "REQ-8", "REQ-9", "DEF-13")
def test_an_open_queue_stays_locked_whatever_its_process_opens_and_closes(tmp_path: Path) -> None:
    """A POSIX lock would be lost with any other descriptor of its file, and be none to other threads."""
    path = tmp_path / "q"
    (tmp_path / "link").symlink_to("q")
    path.write_bytes(bytes(2))
    (tmp_path / "hard").hardlink_to(path)

    def refused(name: str) -> int | None:
        with pytest.raises(Locked) as caught:
            Queue(tmp_path / name, lock_timeout=0)
        return caught.value.pid

    with Queue(path) as queue, ThreadPoolExecutor(1) as pool:
        queue.put(b"one")
        for name in ("q", "link", "hard"):
            assert [refused(name), pool.submit(refused, name).result()] == [os.getpid()] * 2
        for file in filter(Path.is_file, tmp_path.iterdir()):
            file.read_bytes()
        assert inspect(path).records == 1
        gc.collect()
        assert is_locked(path)
        queue.put(b"two")
    assert not is_locked(path)


@pytest.mark.req("REQ-13")
def test_a_forked_child_is_refused_and_costs_no_lock_and_a_program_inherits_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    with Queue(tmp_path / "q") as queue:
        queue.put(b"one")
        opened = [int(name.split()[0]) for name in descriptors() - before]
        assert opened
        assert not any(map(os.get_inheritable, opened))
        child = os.fork()
        if child == 0:
            try:
                queue.get()
            except Closed:
                queue.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert is_locked(tmp_path / "q")
        assert queue.get() == b"one"


@pytest.mark.req("REQ-10")
def test_a_header_that_its_last_owner_removed_before_it_was_locked_is_not_the_one_that_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, removed = tmp_path / "q", lock.whole, []
    path.write_bytes(bytes(2))

    def lock_late(fd: int) -> bool:
        if not removed:
            removed.append(path.unlink())  # the last owner closes: its queue is empty
            path.write_bytes(bytes(2))  # the next one makes it anew
        return real(fd)

    monkeypatch.setattr(lock, "whole", lock_late)
    with Queue(path) as queue:
        assert removed
        assert is_locked(path)
        queue.put(b"one")
    with Queue(path) as queue:
        assert list(queue) == [b"one"]


@pytest.mark.req("REQ-12", "DEF-14")
@pytest.mark.parametrize("records", [[], [b"one", b"two", b"three"]])
def test_files_are_removed_while_the_queue_is_locked_and_the_header_is_the_last(tmp_path: Path, records: list[bytes]) -> None:
    removed: list[tuple[str, bool]] = []

    class Watched(Files):
        def unlink(self, path: str) -> None:
            removed.append((os.path.basename(path), is_locked(tmp_path / "q")))
            super().unlink(path)

    with Queue(tmp_path / "q", chunk_size=22, _files=Watched()) as queue:
        queue.put_many(records)
        queue.get_many(3)
    assert removed[-1][0] == "q"
    assert all(locked for _, locked in removed)
    assert not records or {"q.30001", "q.30002", "q.wal"} <= {name for name, _ in removed}
    assert list(tmp_path.iterdir()) == []


def test_any_file_can_be_locked_against_a_java_program_and_is_free_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "q.1"
    path.write_bytes(b"chunk")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert lock.whole(first)
    assert lock.whole(first)
    assert is_locked(path)
    assert not lock.whole(second)
    os.close(os.open(path, os.O_RDWR))  # would drop a POSIX lock
    assert is_locked(path)
    os.close(first)
    assert not is_locked(path)
    assert lock.whole(second)
    os.close(second)


def test_portalocker_takes_and_releases_every_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our locker, and without a change of its global one, which others in the process may use."""
    calls: list[str] = []
    take, drop, theirs = PosixLocker.lock, PosixLocker.unlock, portalocker.portalocker.LOCKER

    def note_lock(self: PosixLocker, file: Any, flags: Any) -> None:
        calls.append("lock")
        take(self, file, flags)

    def note_unlock(self: PosixLocker, file: Any) -> None:
        calls.append("unlock")
        drop(self, file)

    monkeypatch.setattr(PosixLocker, "lock", note_lock)
    monkeypatch.setattr(PosixLocker, "unlock", note_unlock)
    (tmp_path / "q").touch()
    with Queue(tmp_path / "q"):
        assert calls.count("lock") == 4  # its place among those who wait, the header, whose it is, and the log
    assert calls.count("unlock") == 3
    calls.clear()
    with Topic(tmp_path / "t") as topic, topic.reader("r") as reader:
        calls.clear()
        reader.position()
        assert calls == ["lock", "unlock"]
    assert portalocker.portalocker.LOCKER is theirs


WITHOUT = """
import fcntl, os, sys
for name in [name for name in dir(fcntl) if "OFD" in name]:
    delattr(fcntl, name)
from qewqew_core import BadPath, Queue, Topic, inspect, repair, repair_topic
os.chdir(sys.argv[1])
before = sorted(os.walk("."))
for call in (lambda: Queue("new"), lambda: Queue("q"), lambda: Topic("new"), lambda: Topic("t"), lambda: repair("q"),
             lambda: repair_topic("t")):
    try:
        call()
    except BadPath as error:
        print(error)
assert sorted(os.walk(".")) == before
assert inspect("q").records == 1
"""


def test_without_the_locks_of_linux_nothing_is_opened_and_nothing_is_made(tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put(b"one")
    with Topic(tmp_path / "t") as topic:
        topic.append(b"one")
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 6
    for line in done.stdout.splitlines():
        assert re.search("no open file description locks.*Use Linux 3.15 or newer. Nothing was changed", line)


@pytest.mark.parametrize("records", [[], [b"%d" % number * 9 for number in range(30)]])
def test_a_child_that_was_just_forked_and_has_closed_nothing_yet_keeps_no_lock(tmp_path, records):
    q = Queue(tmp_path / "q", chunk_size=64)
    q.put_many(records)
    fds = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    # Open file descriptions are shared with a child as they are with copies.
    of_the_child = [os.dup(fd) for fd, path in fds.items() if path.startswith(f"{tmp_path}/")]
    assert len(of_the_child) >= 2
    try:
        assert q.get_many(10) == records[:10]  # which leaves chunks, and goes on in others
        q.close()
        with Queue(tmp_path / "q", lock_timeout=0) as again:
            assert again.get_many(30) == records[10:]
    finally:
        for fd in of_the_child:
            os.close(fd)


FORGETS = """
import gc, sys
from qewqew_core import Queue, Topic
gc.disable()
kept = [Queue(sys.argv[1] + "/q"), Topic(sys.argv[1] + "/t").reader("r")]
kept[0].put(b"x")
kept.append(kept)  # until nothing can be imported any more
"""


def test_a_program_that_ends_without_closing_says_nothing_of_ours(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FORGETS, tmp_path], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    with Queue(tmp_path / "q", lock_timeout=0) as queue:
        assert queue.get() == b"x"


def test_how_long_this_process_waits_for_locks_is_counted(tmp_path: Path) -> None:
    before = replace(lock.WAITS)
    with Queue(tmp_path / "q"):
        assert lock.WAITS.refused == before.refused
        with pytest.raises(Locked):
            Queue(tmp_path / "q", lock_timeout=0.3)
    assert lock.WAITS.refused == before.refused + 1
    assert lock.WAITS.seconds >= before.seconds + 0.3


@pytest.mark.parametrize("locked", ["q.wal", "q.[0-9]*", "t.wal"])
def test_the_next_owner_waits_until_a_dying_one_has_dropped_all_of_its_locks(tmp_path: Path, locked: str) -> None:
    """The kernel closes the files of a process that was killed one after the other."""
    store: type[Queue] | type[Topic] = Topic if locked.startswith("t") else Queue
    path = tmp_path / locked[0]
    with store(path) as made:
        (made.put if isinstance(made, Queue) else made.append)(b"x")
    (file,) = tmp_path.rglob(locked)
    fd = os.open(file, os.O_RDWR)
    try:
        assert lock.whole(fd)
        timer = threading.Timer(0.05, lock.unlock, [fd])
        timer.start()
        with store(path, lock_timeout=0) as opened:
            assert opened.verify().ok
        timer.join()
    finally:
        os.close(fd)
