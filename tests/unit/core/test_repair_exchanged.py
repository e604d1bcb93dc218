"""Chunk files of a queue that somebody has exchanged, or copied over one another: no record comes twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qewqew_core import Corrupt, Queue, repair
from qewqew_core.formats import chunk

RECORDS = [b"%04d" % number * 20 for number in range(100)]


def killed(path: Path, *records: bytes) -> None:
    pid = os.fork()
    if not pid:
        queue = Queue(path, chunk_size=4096)
        queue.put_many(records)
        os._exit(9)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("what", ["exchanged", "copied"])
@pytest.mark.parametrize("which", [0, 1])
def test_what_another_chunk_holds_is_not_kept_twice(tmp_path: Path, what: str, which: int) -> None:
    path = tmp_path / "q"
    with Queue(path, chunk_size=4096) as queue:
        queue.put_many(RECORDS)
    killed(path, b"last")
    files = sorted(tmp_path.glob("q.3*"), key=lambda file: int(file.suffix[1:]))
    other, last = files[which], files[-1]
    if what == "exchanged":
        other.rename(tmp_path / "x")
        last.rename(other)
        (tmp_path / "x").rename(last)
    else:
        shutil.copy2(other, last)
    assert repair(path).damage
    with Queue(path) as queue:
        assert queue.verify().ok
        found = list(queue)
    assert len(set(found)) == len(found)
    assert set(found) <= {*RECORDS, b"last"}
    assert b"last" in found, "the log has it"


def test_what_another_program_has_put_is_kept_although_all_records_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with Queue(path, chunk_size=4096) as queue:
        queue.put_many([b"ping" * 20] * 98)  # two chunks with the same bytes
    if not (pid := os.fork()):
        Queue(path).get()
        os._exit(9)
    os.waitpid(pid, 0)
    last = max(tmp_path.glob("q.3*"), key=lambda file: int(file.suffix[1:]))
    data = bytearray(last.read_bytes())
    head, tail, following = chunk.POINTERS.unpack_from(data)
    frame = chunk.frame([b"of a Java program"])
    data[tail : tail + len(frame)] = frame
    chunk.POINTERS.pack_into(data, 0, head, tail + len(frame), following)
    last.write_bytes(data)
    with pytest.raises(Corrupt, match="another program"):
        Queue(path)
    repair(path)
    with Queue(path) as queue:
        assert [record for record in queue if record != b"ping" * 20] == [b"of a Java program"]
