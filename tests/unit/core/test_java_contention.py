"""A Java program that contends for a queue of ours destroys none of its records, in whatever order things happen.

Its calls are made by hand, as the library makes them: it opens the header, locks it, and does not look whether that file still
has its name. It closes an empty queue by giving the locks back first, and then removes its chunk and the header. Where the header
says that there is no chunk it begins with chunk 1, over whatever has that name, and waits for the lock on it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import in_time
from disk import OneWrite
from plain import forget_log

from qewqew_core import Corrupt, Locked, Queue, inspect
from qewqew_core.formats.chunk import POINTERS

OURS = [b"ours %d" % number for number in range(9)]


class Java:
    """One Java program at the queue ``path``; each method is one or a few system calls of it, between which others run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = os.open(path, os.O_RDWR | os.O_CREAT)
        self.chunks: dict[int, int] = {}

    def lock(self) -> bool:
        return locks(self.header)

    def chunk(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def put_first(self, record: bytes, size: int = 256) -> bool:
        """The first record of an empty queue; False where it would wait for the lock of the chunk file."""
        fd = self.chunks[1] = os.open(self.chunk(1), os.O_RDWR | os.O_CREAT)
        if not locks(fd):
            return False
        os.ftruncate(fd, size)
        frame = len(record).to_bytes(2) + record
        os.pwrite(fd, POINTERS.pack(10, 10 + len(frame), 0) + frame, 0)
        os.pwrite(self.header, b"\0\1", 0)
        return True

    def load(self) -> None:
        """Open and lock the chunks that the header leads to."""
        following = int.from_bytes(os.pread(self.header, 2, 0))
        while following:
            fd = self.chunks[following] = os.open(self.chunk(following), os.O_RDWR)
            assert locks(fd)
            following = POINTERS.unpack(os.pread(fd, 10, 0))[2]

    def take_all(self) -> None:
        *read, last = self.chunks
        for number in read:
            os.close(self.chunks.pop(number))
            self.chunk(number).unlink()
        os.pwrite(self.header, last.to_bytes(2), 0)
        os.pwrite(self.chunks[last], POINTERS.pack(10, 10, 0), 0)

    def close(self) -> Iterator[None]:
        """Of an empty queue, step by step: the locks, the chunk, the header."""
        for fd in (*self.chunks.values(), self.header):
            os.close(fd)
        yield
        for number in self.chunks:
            self.chunk(number).unlink(missing_ok=True)
        yield
        self.path.unlink(missing_ok=True)
        yield

    def leave(self) -> None:
        for fd in (*self.chunks.values(), self.header):
            os.close(fd)


def locks(fd: int) -> bool:
    """The lock of a whole file, as another process has it; POSIX locks are nothing to the process that has them."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """For a Java program."""
    fd = os.open(path, os.O_RDWR)
    try:
        return not locks(fd)
    finally:
        os.close(fd)


def opened(path: Path, **more: object) -> Queue:
    return Queue(path, **{"chunk_size": 64, "sync": "never", "lock_timeout": 0, **more})


def killed(path: Path, work: Callable[[Queue], object]) -> None:
    """A process that works on the queue, and is killed."""
    child = os.fork()
    if not child:
        try:
            work(opened(path, lock_timeout=5))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def orphans(path: Path) -> list[bytes]:
    with opened(path) as q:
        return [record for orphan in q.orphans() for record in orphan]


def test_a_java_program_that_opened_a_header_that_was_removed_since_overwrites_nothing(tmp_path):
    path = tmp_path / "q"
    with opened(path) as q:
        q.put(b"first")
        java = Java(path)  # and is slow to lock it
        q.get()
    assert java.lock(), "of a file without a name"
    with opened(path) as q:
        q.put_many(OURS)
    assert java.put_first(b"Java's")
    java.leave()
    with opened(path) as q:
        assert list(q) == OURS
        assert q.verify().ok
    assert orphans(path) == [b"Java's"]


@pytest.mark.parametrize("meanwhile", ["open", "closed"])
def test_the_same_while_the_queue_is_open(tmp_path, meanwhile):
    path = tmp_path / "q"
    with opened(path) as q:
        java = Java(path)
    assert java.lock()
    with opened(path) as q:
        q.put_many(OURS)
        if meanwhile == "open":
            assert java.put_first(b"Java's")
            q.put_many(OURS)
    if meanwhile == "closed":
        assert java.put_first(b"Java's")
    java.leave()
    with opened(path) as q:
        assert q.get_many(100) == OURS * (2 if meanwhile == "open" else 1)
    assert orphans(path) == [b"Java's"]


@pytest.mark.parametrize("by", [Queue, "Java"])
@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("last", range(4))
def test_a_java_program_removes_the_files_of_its_empty_queue_while_ours_is_opened_and_used(tmp_path, by, end, first, last):
    """Ours is opened after ``first`` steps of its closing, and closed or killed after ``last``."""
    path = tmp_path / "q"
    if by is Queue:
        with opened(path) as q:
            q.put_many([b"taken by Java"] * 9)
        java = Java(path)
        assert java.lock()
        java.load()
        java.take_all()
    else:
        java = Java(path)
        assert java.lock()
        assert java.put_first(b"taken by Java")
        java.take_all()
    steps = java.close()
    done = 0

    def until(step: int) -> None:
        nonlocal done
        while done < step:
            next(steps)
            done += 1

    until(max(1, first))  # before that it has the lock

    def work(q: Queue) -> None:
        assert list(q) == []
        q.put_many(OURS)
        until(last)
        q.put_many(OURS)

    if end == "closed":
        with opened(path, lock_timeout=5) as q:
            work(q)
    else:
        killed(path, work)
        until(last)
    until(3)
    assert inspect(path).records == 2 * len(OURS)
    with opened(path) as q:
        assert q.get_many(100) == OURS * 2
        assert q.verify().ok


def test_two_of_ours_may_make_the_first_log_at_once(tmp_path):
    """A Java program has removed the header that one of them had locked: it did not keep the other one out."""

    class Files(OneWrite):
        met = 0

        def open(self, path, *, new=False):
            if new and path.endswith(".tmp") and not self.met:
                self.met += 1
                Path(path).touch()
            return super().open(path, new=new)

    with Queue(tmp_path / "q", _files=(files := Files())) as q:
        q.put(b"ours")
        assert list(q) == [b"ours"]
    assert files.met


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_while_the_header_of_an_open_queue_is_removed_others_of_ours_stay_out_and_a_java_program_begins_its_own(tmp_path, end):
    path = tmp_path / "q"

    def work(q: Queue) -> None:
        q.put_many(OURS)
        path.unlink()
        with pytest.raises(Locked, match="another process has the queue open, though a Java program has removed its header"):
            opened(path)
        java = Java(path)
        assert java.lock()
        assert java.put_first(b"Java's")
        q.put_many(OURS)
        java.leave()

    if end == "closed":
        with opened(path) as q:
            work(q)
    else:
        killed(path, work)
    assert path.read_bytes() == b"\0\1", "the other program's queue"
    with opened(path) as q:
        assert q.get_many(100) == OURS * 2
        assert q.verify().ok
        assert [record for orphan in q.orphans() for record in orphan] == [b"Java's"]


@pytest.mark.req("REQ-6", "REQ-7")
def test_a_header_that_a_java_program_has_keeps_ours_out_before_any_chunk_is_looked_at(tmp_path):
    path = tmp_path / "q"
    path.write_bytes(b"\0\1")
    (tmp_path / "q.1").write_bytes(POINTERS.pack(4, 99, 0) + bytes(30))
    java = Java(path)
    assert java.lock()
    with in_time(), pytest.raises(Locked):
        opened(path)
    java.leave()
    with pytest.raises(Corrupt):
        opened(path)


@pytest.fixture(params=["ours", "Java's"])
def closed(request, tmp_path) -> Path:
    """A queue with some chunks, and the log that ours leaves, or none, as a Java program leaves it."""
    with opened(tmp_path / "q") as q:
        q.put_many(OURS)
    if request.param == "Java's":
        forget_log(tmp_path / "q")
    return tmp_path / "q"


@pytest.mark.req("REQ-11")
def test_the_first_chunk_and_the_last_are_locked_as_long_as_the_queue_is_open(tmp_path, closed):
    path = closed
    with opened(path) as q:
        for _ in range(3):
            chunks = sorted(tmp_path.glob("q.[0-9]*"))
            assert len(chunks) > 1
            assert [is_locked(chunks[0]), is_locked(chunks[-1])] == [True, True]
            q.put_many(OURS)
            q.get_many(4)
        assert q.peek()
        chunks = sorted(tmp_path.glob("q.[0-9]*"))
        assert [is_locked(chunks[0]), is_locked(chunks[-1])] == [True, True]
    assert not any(map(is_locked, chunks))


@pytest.mark.req("REQ-11", "DEF-19")
@pytest.mark.parametrize("number", [0, -1])
def test_a_chunk_that_a_java_program_has_keeps_ours_out_until_it_is_closed(tmp_path, closed, number):
    path = closed
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    file = sorted(tmp_path.glob("q.[0-9]*"))[number]
    chunk = os.open(file, os.O_RDWR)
    assert locks(chunk)
    for _ in range(2):
        with in_time(), pytest.raises(Locked, match=f"{file.name}: a Java program has this chunk file open"):
            opened(path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    os.close(chunk)
    with opened(path) as q:
        assert list(q) == OURS


def test_no_chunk_of_ours_has_the_id_with_which_a_java_program_begins(tmp_path):
    (tmp_path / "q").write_bytes((65533).to_bytes(2))
    (tmp_path / "q.65533").write_bytes(POINTERS.pack(10, 16, 0) + b"\0\4zero")
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"0123"] * 9)
        q.lease("key", max_records=3).put_back()
        q.get_many(2)
        q.clear()
        q.put_many([b"0123"] * 9)
        assert not (tmp_path / "q.1").exists()
    assert not (tmp_path / "q.1").exists()
