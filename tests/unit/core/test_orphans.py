"""Chunk files that nothing refers to are offered by `Queue.orphans`: adopted exactly once, or set aside, never overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk import JournalDisk, image
from test_golden import CASES

from qewqew_core import BadPath, Corrupt, Queue, RecordTooLarge
from qewqew_core.formats.chunk import POINTERS, frame

GOLDEN = CASES[0].parent.parent
LEFT = [b"one", b"", b"three"]


def orphan(path: Path, records: list[bytes], size: int = 100, tail: int = 0) -> Path:
    """A chunk file beside a queue, as a killed program leaves it."""
    frames = frame(records)
    path.write_bytes((POINTERS.pack(10, tail or 10 + len(frames), 0) + frames).ljust(size, b"\0"))
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    with Queue(tmp_path / "q", chunk_size=100) as q:
        q.put(b"first")
    orphan(tmp_path / "q.7", LEFT)
    return tmp_path / "q"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_a_golden_case_offers_what_lies_only_in_orphans(case, tmp_path):
    body = json.loads(case.read_text())
    for file in case.parent.glob("queue.dat*"):
        shutil.copy(file, tmp_path)
    # These two have an orphan by design, whose records the case does not count: nobody could tell.
    beside = {"orphan-consumed-chunk": ["020202"], "unreachable-next-file": ["aaaaaa"]}
    expected = body.get("recoverable", beside.get(body["name"], []))
    with Queue(tmp_path / "queue.dat", chunk_size=body["chunk_size"]) as q:
        found = [record.hex() for one in q.orphans() for record in one]
        assert found == expected
        assert [one.path for one in q.orphans()] == q.verify().orphans
        assert all(one.problem is None for one in q.orphans())


def test_looking_changes_nothing(path):
    with Queue(path, chunk_size=100) as q:
        before = path.with_name("q.7").read_bytes()
        (one,) = q.orphans()
        assert (one.records, one.bytes, one.problem, len(one)) == (3, 8, None, 3)
        assert list(one) == list(one) == LEFT
        assert list(q) == [b"first"]
        assert path.with_name("q.7").read_bytes() == before


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_adopted_records_come_last_and_the_file_is_gone(path, sync):
    with Queue(path, chunk_size=100, sync=sync) as q:
        (one,) = q.orphans()
        assert q.adopt(one) == 3
        assert q.orphans() == []
        assert not path.with_name("q.7").exists()
        for again in (lambda: q.adopt(one), lambda: q.set_aside(one), lambda: list(one)):
            with pytest.raises(BadPath, match="adopted or set aside by somebody else"):
                again()
    with Queue(path) as q:
        assert list(q) == [b"first", *LEFT]


def test_adopting_is_done_once_wherever_it_is_stopped(path, tmp_path):
    disk = JournalDisk(str(tmp_path))
    q = Queue(path, chunk_size=100, _files=disk)
    before = len(disk.calls)
    q.adopt(q.orphans()[0])
    after = len(disk.calls)
    q.close()
    for stop in range(before, after + 1):
        folder = tmp_path.with_name("image")
        image(disk.calls[:stop], str(tmp_path), folder, None)
        with Queue(folder / "q", chunk_size=100) as q:
            adopted = list(q) != [b"first"]
            left = q.orphans()
            assert adopted or left
            if not adopted:
                q.adopt(left[0])
        shutil.rmtree(folder)


def test_adopting_again_after_a_crash_between_commit_and_unlink_stores_nothing(path):
    class Killed(Exception):
        pass

    class Disk(JournalDisk):
        def unlink(self, name: str) -> None:
            if name.endswith("q.7"):
                raise Killed
            super().unlink(name)

    q = Queue(path, chunk_size=100, _files=Disk(str(path.parent)))
    with pytest.raises(Killed):
        q.adopt(q.orphans()[0])
    q.close()
    with Queue(path, chunk_size=100) as q:
        assert list(q) == [b"first", *LEFT]
        (one,) = q.orphans()
        assert q.adopt(one) == 3
        assert list(q) == [b"first", *LEFT]
        assert q.orphans() == []


def test_what_is_set_aside_can_be_read_there(path):
    with Queue(path, chunk_size=100) as q:
        data = path.with_name("q.7").read_bytes()
        target = Path(q.set_aside(q.orphans()[0]))
        assert target.read_bytes() == data
        assert target.parent.parent == path.with_name("q.damaged")
        assert json.loads((target.parent / "report.json").read_text())["records"] == 3
        assert (target.parent.stat().st_mode & 0o777, target.parent.parent.stat().st_mode & 0o777) == (0o700, 0o700)
        assert q.orphans() == []
        orphan(path.with_name("q.7"), [b"another"])
        assert Path(q.set_aside(q.orphans()[0])).parent != target.parent


@pytest.mark.parametrize(
    ("change", "records", "problem"),
    [
        (lambda data: data[:8] + b"\0\0" + b"\0\3one\xff\xff" + data[17:], [b"one"], "runs past the tail"),
        (lambda data: data[:20], [b"one", b""], "do not lie in the file"),
        (lambda data: POINTERS.pack(10, 99999, 0) + data[10:], LEFT, "do not lie in the file"),
        (lambda data: POINTERS.pack(-5, 24, 0) + data[10:], LEFT, "do not lie in the file"),
    ],
    ids=["length", "cut", "tail", "head"],
)
def test_a_damaged_orphan_is_offered_as_far_as_it_goes_and_kept(path, change, records, problem):
    file = path.with_name("q.7")
    file.write_bytes(change(file.read_bytes()))
    data = file.read_bytes()
    with Queue(path, chunk_size=100) as q:
        (one,) = q.orphans()
        assert problem in one.problem
        assert list(one) == records
        assert q.adopt(one) == len(records)
        assert list(q) == [b"first", *records]
    assert path.with_name("q.damaged").joinpath("1", "q.7").read_bytes() == data


def test_empty_and_foreign_files_are_no_orphans(path):
    orphan(path.with_name("q.8"), [])
    path.with_name("q.9").write_bytes(bytes(100))
    path.with_name("q.10").write_bytes(b"short")
    path.with_name("q.11").mkdir()
    path.with_name("q.012").write_bytes(b"no chunk")
    with Queue(path, chunk_size=100) as q:
        assert [Path(one.path).name for one in q.orphans()] == ["q.7"]


def test_records_that_do_not_fit_are_refused_whole(path):
    orphan(path.with_name("q.7"), [b"short", b"x" * 150], size=200)
    with Queue(path, chunk_size=100) as q:
        (one,) = q.orphans()
        with pytest.raises(RecordTooLarge):
            q.adopt(one)
        assert list(q) == [b"first"]
        assert list(q.orphans()[0]) == [b"short", b"x" * 150]


def test_an_orphan_that_changed_since_is_not_adopted(path):
    with Queue(path, chunk_size=100) as q:
        (one,) = q.orphans()
        orphan(path.with_name("q.7"), [b"two", b"", b"three"])
        with pytest.raises(Corrupt):
            q.adopt(one)
        assert list(q) == [b"first"]
