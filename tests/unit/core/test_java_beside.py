"""Our records are safe from a Java program that still has its part of a queue that is gone. See `test_java_contention.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_java_contention import OURS, Java, killed, locks, opened, orphans

from qewqew_core.formats.chunk import POINTERS


@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("removed", ["the chunk", "chunk and header"])
def test_what_a_java_program_removes_of_its_empty_queue_has_no_name_of_ours(tmp_path: Path, end: str, removed: str) -> None:
    """Two of them close a queue that they have emptied, one behind the other: the second has our first chunk's name by heart."""
    path = tmp_path / "q"
    with opened(path) as q:
        q.put(b"first")
    quick, slow = Java(path), Java(path)
    assert quick.lock()
    quick.load()
    quick.take_all()
    of_quick = quick.close()
    next(of_quick)  # its locks
    assert slow.lock()
    slow.load()
    for _ in of_quick:
        pass
    assert [file.name for file in tmp_path.iterdir() if file.name in ("q", "q.30001")] == []
    if end == "closed":
        with opened(path) as q:
            q.put_many(OURS)
    else:
        killed(path, lambda q: q.put_many(OURS))
    of_slow = slow.close()
    for _ in range(2 if removed == "the chunk" else 3):
        next(of_slow)
    with opened(path) as q:
        assert list(q) == OURS
        assert q.verify().ok


@pytest.mark.parametrize("made", [0, 256], ids=["an empty file", "a file of zeros"])
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_chunk_file_that_a_java_program_is_making_is_not_removed(tmp_path: Path, end: str, made: int) -> None:
    """It has the header of a queue that is gone. What it puts into the file, it has acknowledged: an orphan, not lost."""
    path = tmp_path / "q"
    with opened(path) as q:
        q.put(b"first")
        java = Java(path)
        q.get()
    assert java.lock(), "of a file without a name"
    fd = java.chunks[1] = os.open(java.chunk(1), os.O_RDWR | os.O_CREAT)
    assert locks(fd)
    os.ftruncate(fd, made)
    if end == "closed":
        with opened(path) as q:
            q.put_many(OURS)
    else:
        killed(path, lambda q: q.put_many(OURS))
    with opened(path) as q:
        assert list(q) == OURS
    frame = (6).to_bytes(2) + b"Java's"
    os.pwrite(fd, POINTERS.pack(10, 10 + len(frame), 0) + frame, 0)
    os.pwrite(java.header, b"\0\1", 0)
    java.leave()
    assert orphans(path) == [b"Java's"]
    with opened(path) as q:
        assert list(q) == OURS
