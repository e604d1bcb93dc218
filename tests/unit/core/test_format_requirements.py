"""The requirements of the chunk format (REQ-n) and the defects of the original that ours must not have (DEF-n), one test each.

A compact proof on real files for every number; the depth is in the other files of this directory. docs/requirements.md lists
them all, with the reason for each that does not apply.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pytest
from disk import Call, JournalDisk, image
from test_golden import plain_read

from qewqew_core import (
    BadArgument,
    BadPath,
    CorruptQueue,
    Queue,
    QueueClosed,
    QueueFull,
    QueueLocked,
    RecordTooLarge,
    inspect,
    lock,
)
from qewqew_core.chunk import POINTERS
from qewqew_core.files import Files

ONE, TWO, THREE, FOUR, FIVE = (bytes([number]) * 3 for number in range(1, 6))  # five bytes each in a chunk
H0, H1, H2 = b"\0\0", b"\0\1", b"\0\2"


def c(size: int, head: int, tail: int, following: int, *records: bytes) -> bytes:
    """A chunk file: pointers, then these records from offset 10 on (whatever the pointers say), zeros to its size."""
    frames = b"".join(len(record).to_bytes(2) + record for record in records)
    return (POINTERS.pack(head, tail, following) + frames).ljust(size, b"\0")


FULL = c(22, 10, 20, 2, ONE, TWO)  # with a successor


def left(folder: Path, header: bytes | None, chunks: dict[int, bytes]) -> Path:
    """The queue that the original has left in this state."""
    folder.mkdir(exist_ok=True)
    if header is not None:
        (folder / "q").write_bytes(header)
    for number, data in chunks.items():
        (folder / f"q.{number}").write_bytes(data)
    return folder / "q"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def delivers(path: Path, *records: bytes, chunk_size: int = 22) -> bool:
    """Whether the queue has these records, takes another, and hands out all of them when it is opened again."""
    with Queue(path, chunk_size=chunk_size) as q:
        found = list(q)
        q.put(b"new")
    with Queue(path, chunk_size=chunk_size) as q:
        return found == list(records) and q.get_many(100) == [*records, b"new"]


def refuses(path: Path) -> CorruptQueue:
    """The error that opening and looking give; nothing has changed."""
    before = content(path.parent)
    for opening in (inspect, Queue):
        with pytest.raises(CorruptQueue) as caught:
            opening(path)
        assert content(path.parent) == before
    return caught.value


# The lock of a Java program: a POSIX lock on the whole file

JAVA = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def locked_by_java(path: Path) -> Iterator[None]:
    run = [sys.executable, "-c", JAVA, str(path)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        yield


def is_locked(path: Path) -> bool:
    """Whether a Java program would find it so."""
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def is_locked_for_others(path: Path) -> bool:
    """The same, asked by another process: a POSIX lock does not collide with others of its own process."""
    done = subprocess.run([sys.executable, "-c", JAVA, str(path)], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return b"BlockingIOError" in done.stderr


# Every call of the file system, and what a kill after each leaves


def journal(tmp_path: Path, work: Callable[[Path, JournalDisk], object]) -> list[Call]:
    folder = tmp_path / "live"
    folder.mkdir(exist_ok=True)
    disk = JournalDisk(str(folder))
    work(folder / "q", disk)
    return disk.calls[disk.begin :]


def after_each_kill(tmp_path: Path, work: Callable[[Path, JournalDisk], object]) -> Iterator[Path]:
    """What is left of a queue when the process is killed after any call of this work."""
    folder = tmp_path / "live"
    folder.mkdir(exist_ok=True)
    disk = JournalDisk(str(folder))
    work(folder / "q", disk)
    for stop in range(disk.begin, len(disk.calls) + 1):
        copy = tmp_path / "killed"
        image(disk.calls[:stop], str(folder), copy, None)
        yield copy / "q"
        shutil.rmtree(copy)


def workload(path: Path, disk: Files) -> None:
    """All that changes header and pointers: first put, roll-over, drop of a chunk, last get, clear, close."""
    with Queue(path, chunk_size=22, _files=disk) as q:
        q.put(ONE)
        for record in (TWO, THREE, FOUR, FIVE):
            q.put(record)
    with Queue(path, chunk_size=22, _files=disk) as q:
        q.get_many(3)
        q.put(ONE)
    with Queue(path, chunk_size=22, _files=disk) as q:
        q.get_many(9)
        q.put(TWO)
    with Queue(path, chunk_size=22, _files=disk) as q:
        q.clear()
        q.put_many([ONE, TWO, THREE])
        q.get()
    with Queue(path, chunk_size=22, _files=disk) as q:
        q.get_many(9)


def chain_on_disk(path: Path) -> Iterator[tuple[int, int, int]]:
    """The pointers of each chunk that header and chunks refer to; all of them must be there, and initialised."""
    current = int.from_bytes(path.read_bytes()) if path.exists() else 0
    while current:
        data = path.with_name(f"q.{current}").read_bytes()
        head, tail, current = POINTERS.unpack_from(data)
        assert 10 <= head <= tail <= len(data)
        yield head, tail, current


# REQ: the chunk format


def test_req_01_a_new_chunk_gets_the_next_id_that_no_file_has_and_without_one_nothing_is_written(tmp_path):
    """All 65,534 ids, but for four of them, are files of somebody else."""
    stranger = c(16, 10, 13, 0, b"s")
    for number in range(1, 65535):
        if number in (1, 20_000):
            (tmp_path / f"q.{number}").write_bytes(stranger)  # a file can have 65,000 names at most
        elif number not in (5, 6, 65533, 65534):
            os.link(tmp_path / ("q.1" if number < 20_000 else "q.20000"), tmp_path / f"q.{number}")
    (tmp_path / "q").write_bytes((65533).to_bytes(2))
    (tmp_path / "q.65533").write_bytes(c(16, 10, 16, 0, b"zero"))
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"one!", b"two!"])
        q.put(b"six!")
        names = os.listdir(tmp_path)
        with pytest.raises(QueueFull, match="Nothing was stored"):
            q.put(b"more")
        assert sorted(os.listdir(tmp_path)) == sorted(names)
        assert q.get_many(9) == [b"zero", b"one!", b"two!", b"six!"]
    assert (tmp_path / "q.1").read_bytes() == (tmp_path / "q.20000").read_bytes() == stranger
    shutil.rmtree(tmp_path)  # pytest would keep it


@pytest.mark.parametrize("size", [-1, 0, 11, 2**31, "16", 16.0, None], ids=str)
def test_req_02_the_chunk_size_is_validated_when_the_queue_is_opened(tmp_path, size):
    with pytest.raises(BadArgument, match="chunk_size"):
        Queue(tmp_path / "q", chunk_size=size)
    assert list(tmp_path.iterdir()) == []
    for usable in (12, 2**31 - 1):
        Queue(tmp_path / "q", chunk_size=usable).close()


@pytest.mark.parametrize("chunk_size", [12, 18, 4096])
def test_req_03_reading_uses_the_length_of_each_file_and_not_the_chunk_size(tmp_path, chunk_size):
    path = left(tmp_path, H1, {1: c(40, 10, 30, 2, ONE, TWO, THREE, FOUR), 2: c(22, 10, 15, 0, FIVE)})
    with Queue(path, chunk_size=chunk_size) as q:
        assert list(q) == [ONE, TWO, THREE, FOUR, FIVE]
    assert [path.with_name(f"q.{number}").stat().st_size for number in (1, 2)] == [40, 22]


@pytest.mark.parametrize(("chunk_size", "sizes"), [(24, [40, 24]), (30, [40]), (4096, [40])])
def test_req_04_a_new_chunk_is_begun_by_the_chunk_size_and_by_the_real_length_of_the_last_file(tmp_path, chunk_size, sizes):
    path = left(tmp_path, H1, {1: c(40, 10, 20, 0, ONE, TWO)})
    with Queue(path, chunk_size=chunk_size) as q:
        q.put(THREE)  # would end at 25
        assert [path.with_name(f"q.{number + 1}").stat().st_size for number in range(q.stats().chunks)] == sizes
        if chunk_size == 4096:
            q.put(bytes(30))  # does not fit into the file, whatever the chunk size is
            assert path.with_name("q.1").stat().st_size == 40
            assert path.with_name("q.2").stat().st_size == 4096


@pytest.mark.parametrize(("chunk_size", "largest"), [(12, 0), (100, 88), (1 << 20, 65535)])
def test_req_05_a_record_that_is_too_large_is_refused_before_anything_is_touched(tmp_path, chunk_size, largest):
    with Queue(tmp_path / "q", chunk_size=chunk_size) as q:
        q.put(bytes(largest))
        before = content(tmp_path)
        for call in (q.put, lambda record: q.put_many([b"", record])):
            with pytest.raises(RecordTooLarge, match="Nothing was stored"):
                call(bytes(largest + 1))
        assert content(tmp_path) == before
        assert list(q) == [bytes(largest)]


def test_req_06_the_header_is_locked_before_any_chunk_is_looked_at(tmp_path):
    path = left(tmp_path, H1, {1: c(40, 4, 99, 0)})
    with locked_by_java(path), pytest.raises(QueueLocked):  # not CorruptQueue, and at once
        Queue(path, lock_timeout=0)
    with pytest.raises(CorruptQueue):
        Queue(path, lock_timeout=0)


def test_req_07_the_lock_excludes_the_original_in_both_directions(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(ONE)
        assert is_locked_for_others(tmp_path / "q")
    with locked_by_java(tmp_path / "q"), pytest.raises(QueueLocked):
        Queue(tmp_path / "q", lock_timeout=0)
    assert not is_locked_for_others(tmp_path / "q")


@pytest.mark.parametrize("kind", ["OFD", "POSIX"])
def test_req_08_a_second_opening_is_refused_without_a_descriptor_by_any_name_in_any_thread(tmp_path, kind, monkeypatch):
    """A POSIX lock goes as soon as any descriptor of the file is closed: that it stays shows that none was opened."""
    if kind == "POSIX":
        monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    (tmp_path / "link").symlink_to("q")
    (tmp_path / "hard").hardlink_to(left(tmp_path, H0, {}))
    with Queue(tmp_path / "q"), ThreadPoolExecutor(1) as pool:
        for name in ("q", "link", "hard"):
            for refusal in (pool.submit(Queue, tmp_path / name, lock_timeout=0).exception(), None):
                if refusal is None:
                    with pytest.raises(QueueLocked):
                        Queue(tmp_path / name, lock_timeout=0)
                else:
                    assert isinstance(refusal, QueueLocked)
        assert is_locked_for_others(tmp_path / "q")


def test_req_09_other_descriptors_of_the_files_do_not_cost_the_lock(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(ONE)
        for name in ("q", "q.1", "q.log"):
            (tmp_path / name).read_bytes()
        assert inspect(tmp_path / "q").records == 1
        assert is_locked_for_others(tmp_path / "q")


def test_req_10_a_header_that_its_last_owner_removed_before_it_was_locked_is_not_the_one_that_is_locked(tmp_path, monkeypatch):
    path, real, removed = left(tmp_path, H0, {}), lock._set, []

    def lock_late(fd: int, kind: int) -> bool:
        if kind == fcntl.F_WRLCK and not removed:
            removed.append(path.unlink())  # the last owner closes: its queue is empty
            left(tmp_path, H0, {})  # the next one makes it anew
        return real(fd, kind)

    monkeypatch.setattr(lock, "_set", lock_late)
    with Queue(path) as q:
        assert removed
        assert is_locked(path)
        q.put(ONE)
    assert delivers(path, ONE)


class Watched(Files):
    """The real disk; ``unlocked`` lists the files that were removed while the header was not locked."""

    def __init__(self, header: Path) -> None:
        self.header = header
        self.removed: list[str] = []
        self.unlocked: list[str] = []

    def unlink(self, path: str) -> None:
        self.removed.append(os.path.basename(path))
        if not is_locked(self.header):
            self.unlocked.append(path)
        super().unlink(path)


def test_req_12_files_are_removed_while_the_lock_is_held(tmp_path):
    disk = Watched(tmp_path / "q")
    with Queue(tmp_path / "q", chunk_size=22, _files=disk) as q:
        q.put_many([ONE, TWO, THREE])
        q.get_many(3)
    assert disk.removed[-1] == "q", "the header is the last to go"
    assert {"q.1", "q.2", "q.log"} <= set(disk.removed)
    assert disk.unlocked == []
    assert list(tmp_path.iterdir()) == []


def test_req_13_a_forked_child_is_refused_and_no_descriptor_is_inherited_by_a_program(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with Queue(tmp_path / "q") as q:
        q.put(ONE)
        assert not any(os.get_inheritable(int(fd)) for fd in set(os.listdir("/proc/self/fd")) - before if _open(int(fd)))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(QueueClosed):
                q.get()
                os._exit(1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert q.get() == ONE
        assert is_locked(tmp_path / "q")


def _open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # that of the listing itself
        return False
    return True


def test_req_14_size_and_ids_are_checked_before_the_first_call_of_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr("qewqew_core.chunk.MAX_ID", 1)  # REQ-1 shows it with 65,534

    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=16, _files=disk) as q:
            q.put(b"1234")
            list(q)  # writes what only the log has
            calls = len(disk.calls)
            with pytest.raises(RecordTooLarge):
                q.put(b"12345")
            with pytest.raises(QueueFull):
                q.put(b"1234")
            assert len(disk.calls) == calls

    journal(tmp_path, work)


def test_req_15_a_new_chunk_is_made_exclusively_whole_and_durable_and_a_stale_file_is_never_used(tmp_path):
    left(tmp_path / "live", None, {1: c(40, 10, 15, 0, ONE)})

    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.put(TWO)
            disk.calls.append(Call("put returned"))
            assert list(q) == [TWO]

    calls = journal(tmp_path, work)
    link = next(number for number, call in enumerate(calls) if call.path.endswith("/q.2"))
    made = [call.kind for call in calls[link:] if call.node in (calls[link].node, -1)]
    assert made[:5] == ["link", "allocate", "write", "sync", "sync_directory"]
    pointers = next(call for call in calls[link:] if call.kind == "write")
    assert (pointers.data, pointers.offset) == (POINTERS.pack(10, 10, 0), 0)
    assert (tmp_path / "live" / "q.1").read_bytes() == c(40, 10, 15, 0, ONE)


def test_req_16_nothing_is_referred_to_before_it_is_there_and_initialised(tmp_path):
    """At every kill: each reference in header and chunks leads to an initialised chunk, and one more store is one commit."""
    longest = max(len(list(chain_on_disk(path))) for path in after_each_kill(tmp_path, workload))
    assert longest == 3


def test_req_17_payload_is_durable_before_its_commit_and_without_fsyncs_only_where_that_was_asked_for(tmp_path):
    large = [bytes(60_000)] * 10  # not carried by the log

    def put(sync: str) -> list[tuple[str, str]]:
        def work(path: Path, disk: JournalDisk) -> None:
            with Queue(path, chunk_size=1 << 20, sync=sync, _files=disk) as q:
                q.put(ONE)
                disk.calls.append(Call("put"))
                q.put_many(large)
                disk.calls.append(Call("done"))

        calls = journal(tmp_path / sync, work)
        names = {call.node: call.path.rpartition("/")[2].removesuffix(".tmp") for call in calls if call.kind == "link"}
        during = calls[calls.index(Call("put")) + 1 : calls.index(Call("done"))]
        return [(call.kind, names[call.node]) for call in during if call.kind in ("write", "sync")]

    for sync in ("commit", "never"):
        (tmp_path / sync).mkdir()
    strict = [step for step, _ in groupby(put("commit"))]
    assert strict[-4:] == [("write", "q.1"), ("sync", "q.1"), ("write", "q.log"), ("sync", "q.log")]
    weak = [kind for kind, _ in put("never")]
    assert "sync" not in weak
    assert "write" in weak


def test_req_18_a_read_chunk_is_removed_after_the_header_has_moved_on_durably(tmp_path):
    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.put_many([ONE, TWO, THREE])
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.get_many(2)

    calls = journal(tmp_path, work)
    unlinked = next(number for number, call in enumerate(calls) if call.kind == "unlink" and call.path.endswith("/q.1"))
    stored = next(number for number, call in enumerate(calls) if call.kind == "write" and call.data == H2)
    assert stored < unlinked
    assert any(call.kind == "sync" and call.node == calls[stored].node for call in calls[stored:unlinked])


def test_req_19_pointers_are_stored_at_once_and_never_pass_each_other(tmp_path):
    """Each store is of head, tail and next together; the states that the original mistakes (S4', S4x) are never on disk."""
    calls = journal(tmp_path, workload)
    header = {call.node for call in calls if call.kind == "write" and len(call.data) == 2}
    chunks = {call.node for call in calls if call.kind == "link" and call.path.rpartition(".")[2].isdecimal()} - header
    stores = [call for call in calls if call.kind == "write" and call.node in chunks and call.offset < 10]
    assert {(call.offset, len(call.data)) for call in stores} == {(0, 10)}
    for call in stores:
        head, tail, _ = POINTERS.unpack(call.data)
        assert head < tail or head == tail == 10


def test_req_20_an_empty_chunk_with_a_next_is_never_at_the_front(tmp_path):
    for path in after_each_kill(tmp_path, workload):
        for head, tail, following in chain_on_disk(path):
            assert head < tail or not following


def test_req_21_clear_zeroes_the_header_then_removes_the_chunks_and_the_next_put_begins_anew(tmp_path):
    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.put_many([ONE, TWO, THREE])
        with Queue(path, chunk_size=22, _files=disk) as q:
            assert q.clear() == 3
            assert q.clear() == 0
            assert path.read_bytes() == H0
            assert not list(path.parent.glob("q.[0-9]"))
            q.put(FOUR)

    calls = journal(tmp_path, work)
    zeroed = max(number for number, call in enumerate(calls) if call.kind == "write" and call.data == H0)
    assert [call.path[-3:] for call in calls[:zeroed] if call.kind == "unlink" and call.path[-1].isdecimal()] == []
    assert delivers(tmp_path / "live" / "q", FOUR)


def test_req_22_closing_an_empty_queue_leaves_no_file_and_at_no_moment_a_header_without_its_chunk(tmp_path):
    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.put(ONE)
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.get()

    for path in after_each_kill(tmp_path, work):
        assert len(list(chain_on_disk(path))) <= 1
    assert list((tmp_path / "live").iterdir()) == []
    assert journal(tmp_path, work)[-1].kind == "sync_directory"


def test_req_23_after_a_kill_at_any_point_what_was_acknowledged_is_delivered_and_at_most_one_change_more(tmp_path):
    seen: list[tuple[int, list[bytes]]] = []  # calls so far, and the records

    def work(path: Path, disk: JournalDisk) -> None:
        seen.append((0, []))
        for steps in ([ONE, TWO, THREE, FOUR, None, None], [None, FIVE], ["clear", ONE, TWO, None], [None]):
            with Queue(path, chunk_size=22, _files=disk) as q:
                for step in steps:
                    q.get() if step is None else q.clear() if step == "clear" else q.put(step)
                    seen.append((len(disk.calls), list(q)))

    for stop, path in enumerate(after_each_kill(tmp_path, work), start=1):  # the first call stands for the empty directory
        done = max(number for number, (calls, _) in enumerate(seen) if calls <= stop)
        allowed = [records for _, records in seen[done : done + 2]]
        with Queue(path, chunk_size=22) as q:
            assert list(q) in allowed, f"killed after call {stop}"
        assert plain_read(path) in allowed, "as the original reads it, once ours has been opened"


# REQ: states that the original has left


@pytest.mark.parametrize("chunk_size", [22, 4096])
def test_req_24_loading_makes_and_extends_no_file(tmp_path, chunk_size):
    path = left(tmp_path, H1, {1: c(22, 10, 20, 2, ONE, TWO)})
    before = content(tmp_path)
    assert inspect(path).records == 2
    assert content(tmp_path) == before
    Queue(path, chunk_size=chunk_size).close()
    assert sorted(content(tmp_path)) == ["q", "q.1", "q.log"]
    assert path.with_name("q.1").stat().st_size == 22


def test_req_25_a_missing_first_chunk_is_skipped_if_its_successor_is_there_and_else_the_queue_is_empty(tmp_path):
    path = left(tmp_path / "D1", H1, {2: c(22, 10, 20, 3, THREE, FOUR), 3: c(22, 10, 15, 0, FIVE)})
    with Queue(path) as q:
        assert path.read_bytes() == H2
    assert delivers(path, THREE, FOUR, FIVE)
    wrapped = left(tmp_path / "wrap", b"\xff\xfe", {1: c(22, 10, 15, 0, ONE)})
    assert delivers(wrapped, ONE)
    path = left(tmp_path / "X1", H1, {})
    with Queue(path) as q:
        assert path.read_bytes() == H0
        assert not q
    assert delivers(path)


def test_req_26_a_missing_next_chunk_ends_the_chain(tmp_path):
    path = left(tmp_path, H1, {1: FULL})
    Queue(path).close()
    assert POINTERS.unpack_from(path.with_name("q.1").read_bytes()) == (10, 20, 0)
    assert delivers(path, ONE, TWO)


@pytest.mark.parametrize(
    "uninitialised", [c(22, 0, 0, 0, FIVE), c(22, 10, 0, 0, FIVE), b"", bytes(9)], ids=["0/0", "10/0", "0", "9"]
)
def test_req_27_an_uninitialised_chunk_is_empty_and_initialised_before_it_is_used(tmp_path, uninitialised):
    assert delivers(left(tmp_path / "first", H1, {1: uninitialised}))
    assert delivers(left(tmp_path / "last", H1, {1: FULL, 2: uninitialised}), ONE, TWO)
    if len(uninitialised) > 10:
        middle = uninitialised[:8] + b"\0\2" + uninitialised[10:]
        assert delivers(left(tmp_path / "middle", H1, {1: middle, 2: c(22, 10, 15, 0, ONE)}), ONE)


@pytest.mark.parametrize("at", [10, 20])
def test_req_28_an_empty_chunk_with_a_next_is_skipped_and_dropped(tmp_path, at):
    path = left(tmp_path, H1, {1: c(22, at, at, 2, ONE, TWO), 2: c(22, 10, 15, 0, THREE)})
    Queue(path).close()
    assert (path.read_bytes(), path.with_name("q.1").exists()) == (H2, False)
    assert delivers(path, THREE)


def test_req_29_a_head_behind_the_tail_is_an_empty_chunk(tmp_path):
    path = left(tmp_path, H1, {1: c(64, 20, 10, 0, ONE, TWO)})
    with Queue(path) as q:
        assert not q
        q.put(THREE)
    assert [POINTERS.unpack_from(file.read_bytes()) for file in tmp_path.glob("q.[0-9]")] == [(10, 15, 0)]
    assert delivers(path, THREE)


@pytest.mark.parametrize(
    ("head", "tail", "offset"), [(-5, 20, 0), (4, 20, 0), (50, 50, 0), (10, 41, 4), (10, 18, 15), (10, -1, 4), (12, 20, 12)]
)
def test_req_30_pointers_and_records_that_do_not_fit_are_an_error_with_file_and_offset(tmp_path, head, tail, offset):
    error = refuses(left(tmp_path, H1, {1: c(40, head, tail, 0, ONE, TWO)}))
    assert (error.path, error.offset) == (str(tmp_path / "q.1"), offset)


@pytest.mark.parametrize(
    ("header", "chunks", "where", "offset"),
    [
        (H1, {1: c(22, 10, 15, 1, ONE)}, "q.1", 8),
        (H1, {1: FULL, 2: c(22, 10, 15, 1, THREE)}, "q.1", 8),
        (H1, {1: c(22, 10, 10, 2), 2: c(22, 0, 0, 1)}, "q.1", 8),
        (H1, {1: c(22, 10, 15, 65535, ONE), 65535: c(22, 10, 15, 0, TWO)}, "q.1", 8),
        (b"\xff\xff", {65535: c(22, 10, 15, 0, ONE), 0: c(22, 10, 15, 0, ONE)}, "q", 0),
    ],
    ids=["itself", "two", "empty chunks", "next 65535", "header 65535"],
)
def test_req_31_a_cycle_and_a_reference_of_65535_are_errors(tmp_path, header, chunks, where, offset):
    error = refuses(left(tmp_path, header, chunks))
    assert (error.path, error.offset) == (str(tmp_path / where), offset)


def test_req_32_a_header_has_two_bytes_one_is_damage_none_is_zero_and_more_are_cut(tmp_path):
    chunks = {1: c(22, 10, 15, 0, ONE)}
    assert refuses(left(tmp_path / "one", b"\1", chunks)).path == str(tmp_path / "one" / "q")
    assert delivers(left(tmp_path / "none", b"", {}))
    path = left(tmp_path / "three", H1 + b"x", chunks)
    Queue(path).close()
    assert path.read_bytes() == H1
    assert delivers(path, ONE)


@pytest.mark.parametrize("header", [H0, None])
def test_req_33_chunks_that_nothing_refers_to_are_not_delivered_not_overwritten_and_can_be_found(tmp_path, header):
    orphans = {1: c(22, 15, 20, 2, ONE, TWO), 2: c(22, 10, 15, 0, THREE)}
    path = left(tmp_path, header, orphans)
    assert delivers(path)
    with Queue(path) as q:
        q.put(FOUR)
        assert q.verify().orphans == [f"{path}.1", f"{path}.2"]
    assert {number: path.with_name(f"q.{number}").read_bytes() for number in orphans} == orphans


def test_req_34_what_cannot_be_told_from_valid_data_is_delivered_again(tmp_path):
    """E1: head reset before the tail. F2: stale chunks referred to again. Lossless, hence at least once."""
    assert delivers(left(tmp_path / "E1", H1, {1: c(64, 10, 25, 0, ONE, TWO, THREE)}), ONE, TWO, THREE, chunk_size=64)
    assert delivers(left(tmp_path / "F2", H1, {1: FULL, 2: c(22, 10, 15, 0, THREE)}), ONE, TWO, THREE)


def test_req_35_a_file_shorter_than_the_chunk_size_but_long_enough_for_its_tail_is_valid(tmp_path):
    assert delivers(left(tmp_path / "cut", H1, {1: c(64, 10, 20, 0, ONE, TWO)[:20]}), ONE, TWO, chunk_size=64)
    refuses(left(tmp_path / "too short", H1, {1: c(64, 10, 20, 0, ONE, TWO)[:19]}))


@pytest.mark.parametrize("name", ["q.1", "q.2", "q.77"])
def test_req_36_the_path_of_a_chunk_file_is_refused_before_anything_is_written(tmp_path, name):
    left(tmp_path, H1, {1: FULL, 2: c(22, 10, 15, 0, THREE)})
    before = content(tmp_path)
    for opening in (Queue, inspect):
        with pytest.raises(BadPath, match="is a file of the queue"):
            opening(tmp_path / name)
    assert content(tmp_path) == before


# DEF: defects of the original


def test_def_01_no_kill_leaves_a_header_that_refers_to_a_chunk_that_was_removed(tmp_path):
    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=22, _files=disk) as q:
            q.put_many([ONE, TWO, THREE, FOUR, FIVE])
        with Queue(path, chunk_size=22, _files=disk) as q:
            for _ in range(5):
                q.get()

    for path in after_each_kill(tmp_path, work):
        assert len(list(chain_on_disk(path))) <= 3  # a missing file is an error
    assert delivers(left(tmp_path / "D1", H1, {2: c(22, 10, 15, 0, THREE)}), THREE)  # and that of the original is read


@pytest.mark.parametrize(
    ("header", "chunks", "records"),
    [(H1, {1: c(22, 0, 0, 0)}, []), (H1, {1: FULL, 2: c(22, 0, 0, 0)}, [ONE, TWO]), (H1, {1: FULL}, [ONE, TWO]), (H1, {}, [])],
    ids=["F1", "R1 zeros", "R1 missing", "X1"],
)
def test_def_02_a_record_is_never_written_over_the_pointers_of_a_chunk(tmp_path, header, chunks, records):
    path = left(tmp_path, header, chunks)
    with Queue(path, chunk_size=22) as q:
        q.put(FIVE)
        assert list(q) == [*records, FIVE]
    assert plain_read(path) == [*records, FIVE]


def test_def_03_cleared_records_do_not_rise_from_stale_chunks(tmp_path):
    path = left(tmp_path, H0, {1: FULL, 2: c(22, 10, 15, 0, THREE)})
    with Queue(path, chunk_size=22) as q:
        q.put_many([FOUR, FIVE, ONE])
    with Queue(path, chunk_size=22) as q:
        assert q.get_many(9) == [FOUR, FIVE, ONE]


def test_def_04_no_kill_during_the_last_get_redelivers_what_was_taken_before(tmp_path):
    with Queue(left(tmp_path / "live", None, {}), chunk_size=64) as q:
        q.put_many([ONE, TWO, THREE])
        q.get_many(2)

    def work(path: Path, disk: JournalDisk) -> None:
        with Queue(path, chunk_size=64, _files=disk) as q:
            q.get()

    for path in after_each_kill(tmp_path, work):
        with Queue(path, chunk_size=64) as q:
            assert list(q) in ([THREE], [])


def test_def_05_a_record_put_after_clear_in_the_same_session_is_there_after_reopening(tmp_path):
    with Queue(tmp_path / "q", chunk_size=22) as q:
        q.put(ONE)
        q.clear()
        q.put(TWO)
    assert (tmp_path / "q").read_bytes() != H0
    assert delivers(tmp_path / "q", TWO)


def test_def_06_clear_works_after_the_first_chunk_was_filled_in_the_same_session(tmp_path):
    with Queue(tmp_path / "q", chunk_size=22) as q:
        for record in (ONE, TWO, THREE, FOUR, FIVE):
            q.put(record)
        assert q.clear() == 5
        assert not q
    assert list(tmp_path.iterdir()) == []


def test_def_07_clear_forgets_the_length_of_the_record_that_was_peeked_at(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put(b"a long record")
        assert q.peek() == b"a long record"
        q.clear()
        q.put_many([b"short", b"next"])
        assert q.peek() == b"short"
        assert q.get_many(9) == [b"short", b"next"]


def test_def_08_the_first_chunk_can_be_read_after_it_was_filled_in_the_same_session(tmp_path):
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put(b"one!")
        q.put(b"two!")
        assert q.peek() == q.get() == b"one!"
        assert q.get() == b"two!"


def test_def_09_a_record_has_65535_bytes_at_most_and_comes_back_whole(tmp_path):
    largest = os.urandom(65535)
    with Queue(tmp_path / "q", chunk_size=1 << 18) as q:
        q.put(largest)
        for size in (65536, 65537, 131072):
            with pytest.raises(RecordTooLarge):
                q.put(bytes(size))
    with Queue(tmp_path / "q") as q:
        assert q.get_many(9) == [largest]


def test_def_10_a_refused_record_damages_nothing(tmp_path):
    with Queue(tmp_path / "q", chunk_size=22) as q:
        for _ in range(3):
            with pytest.raises(RecordTooLarge):
                q.put(bytes(11))
            assert (len(q), list(tmp_path.glob("q.[0-9]"))) == (0, [])
        q.put(ONE)
    assert delivers(tmp_path / "q", ONE)


def test_def_11_a_slice_put_into_a_new_queue_is_that_slice(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put(memoryview(b"xxabxxxxxxxx")[2:4])
        q.put(b"next")
        assert (q.peek(), q.get()) == (b"ab", b"ab")
        assert q.get() == b"next"


def test_def_12_ids_that_wrap_around_never_take_the_first_chunk(tmp_path):
    """The id after the last one, 1, is that of the first, 2."""
    chunks = {2: c(15, 10, 15, 65534, ONE), 65534: c(15, 10, 15, 1, TWO), 1: c(15, 10, 15, 0, THREE)}
    path = left(tmp_path, H2, chunks)
    with Queue(path, chunk_size=15) as q:
        q.put(FOUR)
        assert sorted(path.name for path in tmp_path.glob("q.[0-9]*")) == ["q.1", "q.2", "q.3", "q.65534"]
    assert delivers(path, ONE, TWO, THREE, FOUR, chunk_size=15)


def test_def_13_a_refused_second_opening_does_not_cost_the_lock_later(tmp_path):
    with Queue(tmp_path / "q"):
        for _ in range(3):
            with pytest.raises(QueueLocked):
                Queue(tmp_path / "q", lock_timeout=0)
        gc.collect()
        assert is_locked_for_others(tmp_path / "q")


def test_def_14_close_gives_the_lock_back_only_after_it_has_removed_the_files(tmp_path):
    disk = Watched(tmp_path / "q")
    Queue(tmp_path / "q", _files=disk).close()
    assert "q" in disk.removed
    assert disk.unlocked == []


def test_def_15_with_a_smaller_chunk_size_no_record_is_skipped(tmp_path):
    path = left(tmp_path, H1, {1: c(40, 10, 30, 0, ONE, TWO, THREE, FOUR)})
    assert delivers(path, ONE, TWO, THREE, FOUR, chunk_size=18)


def test_def_16_a_larger_chunk_size_changes_no_file_that_is_there(tmp_path):
    path = left(tmp_path, H1, {1: FULL, 2: c(22, 10, 20, 0, THREE, FOUR)})
    with Queue(path, chunk_size=4096) as q:
        q.put(FIVE)
        assert [path.with_name(f"q.{number}").stat().st_size for number in (1, 2, 3)] == [22, 22, 4096]
        assert q.get_many(9) == [ONE, TWO, THREE, FOUR, FIVE]


@pytest.mark.parametrize("records", [[], [ONE]], ids=["never a chunk", "one record"])
def test_def_17_a_second_close_does_nothing_and_other_calls_are_refused_and_make_no_file(tmp_path, records):
    q = Queue(tmp_path / "q")
    q.put_many(records)
    q.close()
    before = content(tmp_path)
    q.close()
    for call in (q.peek, q.get, q.clear, q.stats, lambda: q.put(TWO), lambda: q.put_many([TWO]), lambda: len(q)):
        with pytest.raises(QueueClosed, match="closed"):
            call()
    assert content(tmp_path) == before


def test_def_18_a_failed_opening_leaves_no_lock_and_no_descriptor(tmp_path):
    path = left(tmp_path, H1, {1: c(22, 10, 15, 1, ONE)})
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptQueue) as kept:  # with its traceback
        Queue(path)
    assert not is_locked_for_others(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert kept.value.path == f"{path}.1"


def test_def_19_a_lock_on_a_chunk_cannot_make_the_opening_hang(tmp_path):
    path = left(tmp_path, H1, {1: FULL, 2: c(22, 10, 15, 0, THREE)})
    with locked_by_java(tmp_path / "q.1"), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: Queue(path, lock_timeout=0).close()).result(timeout=60)
    assert delivers(path, ONE, TWO, THREE)


def test_def_20_no_chunk_size_is_accepted_that_cannot_be_used(tmp_path):
    for size in (0, 1, 11, 2**31, 2**32 - 1):
        with pytest.raises(BadArgument):
            Queue(tmp_path / "q", chunk_size=size)
    with Queue(tmp_path / "q", chunk_size=12) as q:
        q.put_many([b"", b""])
        assert q.get_many(9) == [b"", b""]


def test_def_21_directories_are_synced_and_pointers_follow_the_log(tmp_path):
    """No name that matters is left to luck, and no pointer is stored before what it says is durable."""
    log, durable, pointers = -1, True, 0
    calls = journal(tmp_path, workload)
    for call in calls:
        if call.kind == "link" and call.path.endswith(".log.tmp"):
            log = call.node
        elif call.kind in ("write", "sync") and call.node == log:
            durable = call.kind == "sync"
        elif call.kind == "write" and (call.offset, len(call.data)) == (0, 10) and call.data != POINTERS.pack(10, 10, 0):
            assert durable
            pointers += 1
    assert pointers > 3
    changes = [call.kind for call in calls if call.kind in ("link", "unlink", "rename", "sync_directory")]
    assert changes[-1] == "sync_directory"


def test_def_22_get_and_clear_say_what_they_did(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([ONE, TWO, THREE])
        assert q.get() == ONE
        assert q.get_if(lambda record: record == TWO) == TWO
        assert (q.clear(), q.clear()) == (1, 0)


def waiting(q: Queue, calls: int) -> bool:
    """Wait until so many calls wait for a record."""
    turn = threading.Event()
    return any(len(q._changed._waiters) >= calls or turn.wait(0.001) for _ in range(10_000))


def test_def_23_a_put_wakes_all_that_wait_and_not_only_one_that_looks(tmp_path):
    with Queue(tmp_path / "q") as q, ThreadPoolExecutor(2) as pool:
        looking = pool.submit(q.peek, 30)
        assert waiting(q, 1)
        taking = pool.submit(q.get, 30)  # behind the one that looks
        assert waiting(q, 2)
        q.put(ONE)
        assert taking.result(timeout=60) == ONE
        q.put(TWO)  # if the first was taken before it could be looked at
        assert looking.result(timeout=60) in (ONE, TWO)


def test_def_24_close_wakes_all_that_wait(tmp_path):
    q = Queue(tmp_path / "q")
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call, timeout=60) for call in (q.get, q.peek)]
        calls.append(pool.submit(q.get_if, lambda record: True, timeout=60))
        assert waiting(q, 3)
        q.close()
        assert [type(call.exception(timeout=60)) for call in calls] == [QueueClosed] * 3


def test_def_25_a_condition_that_takes_a_record_itself_is_refused_and_nothing_is_lost(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([ONE, TWO])
        with pytest.raises(QueueClosed, match="predicate"):
            q.get_if(lambda record: q.get() == record)
        assert q.get_many(9) == [ONE, TWO]


def test_def_26_a_long_chain_needs_few_descriptors_and_threads_may_share_the_queue(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with Queue(tmp_path / "q", chunk_size=16, sync="never") as q, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: q.put(b"%d" % number), range(200)))
        assert q.stats().chunks > 50
        assert len(os.listdir("/proc/self/fd")) - before < 8
        taken = list(pool.map(lambda _: q.get(), range(200)))
        assert sorted(map(int, taken)) == list(range(200))
