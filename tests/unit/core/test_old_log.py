"""An old copy of the log beside newer files, as a partial restore leaves them: an error, or right.

docs/format/recovery.md names what is not noticed: a queue that crashed, with nothing changed since the copy but records put and
taken, of which only its log knew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core import Corrupt, Queue, repair

RECORDS = [b"%d" % number + b"x" * 20 for number in range(30)]


def put(q: Queue) -> None:
    q.put_many([b"new %d" % number for number in range(9)])


def batch(q: Queue, key: str):
    (one,) = (one for one in q.batches() if one.key == key)
    return one


CHANGES: dict[str, Callable[[Queue], object]] = {
    "put": put,
    "get": lambda q: q.get_many(6),
    "ack": lambda q: batch(q, "a").ack(),
    "nack": lambda q: batch(q, "a").nack(),
    "put back": lambda q: batch(q, "b").put_back(),
    "dead": lambda q: batch(q, "a").to_dead_letters(),
    "lease": lambda q: q.lease("c", max_records=4),
    "clear": lambda q: q.clear(),
    "ack and put": lambda q: (batch(q, "a").ack(), put(q)),
    "put back and get": lambda q: (batch(q, "b").put_back(), q.get_many(6)),
}
View = tuple[list[bytes], dict[str, tuple[str, list[bytes]]]]


def view(q: Queue) -> View:
    return list(q), {one.key: (one.state, list(one)) for one in (*q.batches(), *q.dead())}


def run(path: Path, work: Callable[[Queue], object], crash: bool) -> None:
    """A process that works on the queue, and closes it or is killed."""
    child = os.fork()
    if not child:
        try:
            q = Queue(path, chunk_size=128)
            work(q)
            if not crash:
                q.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def restored(path: Path, change: str, first: str, second: str) -> View:
    """Make a queue, keep its log, change it, put the old log back; returns what the queue was."""

    def begin(q: Queue) -> None:
        q.put_many(RECORDS)
        q.get_many(3)
        q.lease("a", max_records=5)
        q.lease("b", max_records=5)

    run(path, begin, first == "crashed")
    shutil.copy(f"{path}.wal", f"{path}-old")
    run(path, CHANGES[change], second == "crashed")
    copy = shutil.copytree(path.parent, path.parent.with_name("right"))
    with Queue(copy / "q", chunk_size=128) as q:
        right = view(q)
    Path(f"{path}-old").replace(f"{path}.wal")
    return right


NOTICED_BY_NOTHING = {("closed", "put"), ("closed", "get"), ("crashed", "put")}  # if the second one crashed


@pytest.mark.parametrize("second", ["closed", "crashed"])
@pytest.mark.parametrize("first", ["closed", "crashed"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused_or_makes_no_difference_and_a_repair_loses_nothing(tmp_path, change, first, second):
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "q"
    right = restored(path, change, first, second)
    if second == "crashed" and (first, change) in NOTICED_BY_NOTHING:
        return
    refused = ""
    try:
        with Queue(path, chunk_size=128) as q:
            assert view(q) == right
    except Corrupt as error:
        refused = str(error)
    if not refused:
        return
    assert "Nothing was changed" in refused
    report = repair(path)
    assert not report.ok
    with Queue(path, chunk_size=128) as q:
        records, batches = view(q)
        kept = {*records, *(record for _, content in batches.values() for record in content)}
        kept |= {record for orphan in q.orphans() for record in orphan}
        assert q.verify().ok
    aside = b"".join(file.read_bytes() for file in Path(report.set_aside).rglob("*") if file.is_file())
    for record in {*right[0], *(record for _, content in right[1].values() for record in content)}:
        only_in_the_lost_log = second == "crashed" and record.startswith(b"new")
        assert record in kept or record in aside or only_in_the_lost_log


def test_a_stamp_that_is_damaged_older_or_missing_says_nothing(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many(RECORDS)
        q.lease("a", max_records=5)
        stamp = tmp_path / "q.stamp"
        older = stamp.read_bytes()
        q.lease("b", max_records=5)
    newest = stamp.read_bytes()
    assert older < newest
    for content in (older, b"", newest[:-1], bytes([newest[0] ^ 1]) + newest[1:], None):
        stamp.unlink(missing_ok=True)
        if content is not None:
            stamp.write_bytes(content)
        with Queue(tmp_path / "q") as q:
            assert [one.key for one in q.batches()] == ["a", "b"]


def test_a_queue_without_batches_leaves_no_stamp(tmp_path):
    """Or its next log, which counts anew, would seem to be old."""
    for _ in range(2):
        with Queue(tmp_path / "q") as q:
            q.put_many(RECORDS)
            q.lease("a", max_records=5).put_back()
            q.get_many(100)
        assert list(tmp_path.iterdir()) == []
