"""In which order a queue writes its files: a kill between any two calls leaves header and chunks whole, and loses nothing."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from plain import plain_read

from qewqew_core import Queue
from qewqew_core.formats.chunk import POINTERS

ONE, TWO, THREE, FOUR, FIVE = (bytes([number]) * 3 for number in range(1, 6))  # two in a chunk

# All that changes header and pointers: first put, roll-over, drop of a chunk, last get, clear, close. Each list is one opening:
# a record is put, a list of them put at once, None is a get, a number a get_many.
STEPS: list[list[bytes | list[bytes] | int | str | None]] = [
    *([ONE, TWO, THREE, FOUR, FIVE], [3, ONE], [9, TWO], ["clear", [ONE, TWO, THREE], None], [9]),
    *([ONE, TWO, THREE, FOUR, None, None], [None, FIVE], ["clear", ONE, TWO, None], [None]),
    *([[ONE, TWO, THREE, FOUR, FIVE]], [None] * 5, [ONE], [None]),
]


def work(disk: JournalDisk, sync: str, looking: bool) -> list[tuple[int, list[bytes]]]:
    """How many calls there were after each step, and the records that the queue then had."""
    records: list[bytes] = []
    seen = [(0, records)]
    for steps in STEPS:
        with Queue(Path(disk.root) / "q", chunk_size=22, sync=sync, _files=disk) as q:
            for step in steps:
                if isinstance(step, bytes):
                    q.put(step)
                    records = [*records, step]
                elif isinstance(step, list):
                    q.put_many(step)
                    records = records + step
                elif step == "clear":
                    assert q.clear() == len(records)
                    records = []
                else:
                    assert (q.get_many(step) if step else [q.get()]) == records[: step or 1]
                    records = records[step or 1 :]
                seen.append((len(disk.calls), records))
                if looking:  # writes what only the log has
                    assert list(q) == records
    return seen


@pytest.fixture(params=[("commit", False), ("commit", True), ("never", False)], ids=["", "looking", "without fsyncs"])
def done(request, tmp_path) -> tuple[JournalDisk, list[tuple[int, list[bytes]]]]:
    (tmp_path / "live").mkdir()
    disk = JournalDisk(str(tmp_path / "live"))
    return disk, work(disk, *request.param)


def chain_on_disk(path: Path) -> list[tuple[int, int, int]]:
    """The pointers of each chunk that header and chunks refer to; all of them must be there, and initialised."""
    found, current = [], int.from_bytes(path.read_bytes()) if path.exists() else 0
    while current:
        data = path.with_name(f"q.{current}").read_bytes()
        head, tail, current = POINTERS.unpack_from(data)
        assert 10 <= head <= tail <= len(data)
        found.append((head, tail, current))
    return found


@pytest.mark.req("REQ-16", "REQ-20", "REQ-21", "REQ-22", "REQ-23", "DEF-1", "DEF-4")
def test_a_kill_at_any_point_leaves_a_whole_chain_and_what_was_acknowledged_and_at_most_one_change_more(done, tmp_path, every):
    disk, seen = done
    longest = 0
    for stop in every(range(disk.begin, len(disk.calls) + 1), quick=3):
        path = tmp_path / "killed" / "q"
        image(disk.calls[:stop], disk.root, path.parent, None)
        chain = chain_on_disk(path)
        assert all(head < tail or not following for head, tail, following in chain), "no empty chunk with a next"
        longest = max(longest, len(chain))
        last = max(number for number, (calls, _) in enumerate(seen) if calls <= stop)
        allowed = [records for _, records in seen[last : last + 2]]
        with Queue(path, chunk_size=22, _files=NoSync()) as q:
            found = list(q)
            assert found in allowed, f"killed after call {stop}"
        assert plain_read(path) == found, "as the original reads it, once ours has been opened"
        shutil.rmtree(path.parent)
    assert longest == 3


@pytest.mark.req("REQ-18", "REQ-19", "REQ-21", "REQ-22", "DEF-21")
def test_pointers_are_stored_whole_behind_the_log_and_chunks_go_behind_the_header(done, tmp_path):
    """The states of pointers that the original mistakes are never on disk, and no name that matters is left to luck."""
    disk, _ = done
    names: dict[int, str] = {}
    durable: dict[str, bool] = {}
    header, stored, removed = 0, 0, 0
    for call in disk.calls[disk.begin :]:
        if call.kind == "link":
            names[call.node] = Path(call.path).name.removesuffix(".tmp")
        name = names.get(call.node, "")
        if call.kind in ("write", "sync"):
            durable[name] = call.kind == "sync"
        if call.kind == "write" and name == "q":
            assert (call.offset, len(call.data)) == (0, 2)
            header = int.from_bytes(call.data)
        elif call.kind == "write" and name[2:].isdecimal() and call.offset < POINTERS.size:
            assert (call.offset, len(call.data)) == (0, POINTERS.size)
            head, tail, following = POINTERS.unpack(call.data)
            assert head < tail or head == tail == 10
            if (head, tail, following) != (10, 10, 0):
                assert durable["q.wal"]
                stored += 1
        elif call.kind == "unlink" and call.path[-5:].isdecimal():
            assert durable["q"]
            assert not call.path.endswith(f".{header}"), "the header has moved on"
            removed += 1
    assert stored > 3
    assert removed > 3
    changes = [call.kind for call in disk.calls if call.kind in ("link", "unlink", "rename", "sync_directory")]
    assert changes[-1] == "sync_directory"
    assert list((tmp_path / "live").iterdir()) == []


@pytest.mark.req("REQ-15")
def test_a_new_chunk_is_whole_and_durable_before_it_is_used_and_a_stale_file_is_never_used(tmp_path):
    stale = POINTERS.pack(10, 15, 0) + b"\0\3" + ONE + bytes(25)
    (tmp_path / "q.30001").write_bytes(stale)
    disk = JournalDisk(str(tmp_path))
    with Queue(tmp_path / "q", chunk_size=22, _files=disk) as q:
        q.put(TWO)
        assert list(q) == [TWO]
    link = next(number for number, call in enumerate(disk.calls) if call.path.endswith("/q.30002"))
    made = [call for call in disk.calls[link:] if call.node in (disk.calls[link].node, -1)]
    assert [call.kind for call in made[:5]] == ["link", "allocate", "write", "sync", "sync_directory"]
    assert (made[1].offset, made[2].data, made[2].offset) == (22, POINTERS.pack(10, 10, 0), 0)
    assert (tmp_path / "q.30001").read_bytes() == stale


@pytest.mark.req("REQ-17")
@pytest.mark.parametrize("sync", ["commit", "never"])
def test_payload_is_durable_before_its_commit_and_nothing_is_synced_where_that_was_not_asked_for(tmp_path, sync):
    disk = JournalDisk(str(tmp_path))
    with Queue(tmp_path / "q", chunk_size=1 << 20, sync=sync, _files=disk) as q:
        q.put_many([bytes(60_000)] * 10)
        begin = len(disk.calls)
        q.put_many([bytes(60_000)] * 5)  # too much for the log
        calls = disk.calls[begin:]
    names = {call.node: Path(call.path).name.removesuffix(".tmp") for call in disk.calls if call.kind == "link"}
    steps = [step for step, _ in groupby((call.kind, names[call.node]) for call in calls if call.kind in ("write", "sync"))]
    if sync == "commit":
        assert steps[-4:] == [("write", "q.30001"), ("sync", "q.30001"), ("write", "q.wal"), ("sync", "q.wal")]
    else:
        assert steps
        assert {kind for kind, _ in steps} == {"write"}
