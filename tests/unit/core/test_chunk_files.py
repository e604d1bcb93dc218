"""Chunk files: how large they are, which ids they have, when a new one is begun and when one goes."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
from disk import JournalDisk
from test_queue import chunk_files, contents, numbers

from qewqew_core import BadPath, Full, Queue, RecordTooLarge, repair
from qewqew_core.disk.files import Files
from qewqew_core.formats.chunk import MAX_CHUNK_SIZE, POINTERS
from qewqew_core.formats.chunk import OUR_FIRST as FIRST
from qewqew_core.queue.inspection import inspect_state


@pytest.mark.req("REQ-4")
@pytest.mark.parametrize(("second", "chunks"), [(25, 1), (26, 2)])
def test_a_new_chunk_is_begun_when_a_record_does_not_fit_and_an_equal_one_still_fits(tmp_path, second, chunks):
    """Roll-over when tail + 2 + length > chunk size: here 10 + (2 + 25) + (2 + 25) = 64."""
    for name, put in (
        ("one", lambda q: [q.put(b"a" * 25), q.put(b"b" * second)]),
        ("many", lambda q: q.put_many([b"a" * 25, b"b" * second])),
    ):
        with Queue(tmp_path / name, chunk_size=64) as q:
            put(q)
            assert q.stats().chunks == chunks
        files = chunk_files(tmp_path, name)
        assert list(files) == [FIRST + number for number in range(chunks)]
        assert [path.stat().st_size for path in files.values()] == [64] * chunks
        assert POINTERS.unpack_from(files[FIRST].read_bytes()) == ((10, 64, 0) if chunks == 1 else (10, 37, FIRST + 1))


def test_a_chunk_that_was_read_is_removed_and_the_last_one_is_used_again(tmp_path):
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many(numbers(0, 6))  # two in each chunk
        assert list(chunk_files(tmp_path)) == [FIRST, FIRST + 1, FIRST + 2]
        assert q.get() == b"0"
        assert list(chunk_files(tmp_path)) == [FIRST, FIRST + 1, FIRST + 2]
        assert q.get() == b"1"
        assert list(chunk_files(tmp_path)) == [FIRST + 1, FIRST + 2]
        assert (tmp_path / "q").read_bytes() == (FIRST + 1).to_bytes(2)
        q.get_many(9)
        assert list(chunk_files(tmp_path)) == [FIRST + 2]
        q.put_many(numbers(6, 9))
        assert list(chunk_files(tmp_path)) == [FIRST + 2, FIRST + 3]


def test_the_space_of_a_chunk_is_really_allocated(tmp_path):
    """A sparse file would let a full disk appear at some later write."""
    with Queue(tmp_path / "q", chunk_size=100_000) as q:
        q.put(b"0")
        status = chunk_files(tmp_path)[FIRST].stat()
        assert status.st_size == 100_000
        assert status.st_blocks * 512 >= 100_000
        assert q.stats().on_disk >= 100_000


def test_the_first_chunks_are_small_and_each_is_twice_as_large_as_the_one_before(tmp_path):
    """docs: an almost empty queue takes little room."""
    with Queue(tmp_path / "q", chunk_size=3 << 20) as q:
        q.put(b"0")
        assert q.stats().on_disk < 1 << 20
        while len(chunk_files(tmp_path)) < 6:
            q.put_many([bytes(60_000)] * 3)
        sizes = [path.stat().st_size for path in chunk_files(tmp_path).values()]
        assert sizes == [256 << 10, 512 << 10, 1 << 20, 2 << 20, 3 << 20, 3 << 20]
        assert q.verify().ok


def test_a_new_chunk_has_room_for_what_is_put(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([bytes(60_000)] * 25)
        assert [path.stat().st_size for path in chunk_files(tmp_path).values()] == [2 << 20]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_files_belong_to_their_owner_alone_whatever_the_umask(tmp_path, umask):
    old = os.umask(umask)
    try:
        with Queue(tmp_path / "q", chunk_size=64) as q:
            q.put_many(numbers(0, 60))
            q.lease("key", max_records=30)
            q.lease("other", max_records=1).to_dead_letters()
            found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
            kinds = {path.name: path.is_dir() for path in tmp_path.rglob("*")}
    finally:
        os.umask(old)
    assert {"q", "q.wal", "q.batches", "q.dead", "manifest.json"} <= found.keys()
    assert found == {name: 0o700 if is_directory else 0o600 for name, is_directory in kinds.items()}


@pytest.mark.req("REQ-4")
@pytest.mark.parametrize(("chunk_size", "sizes"), [(24, [40, 24]), (25, [40]), (4096, [40])])
def test_a_new_chunk_is_begun_by_the_chunk_size_and_by_the_real_length_of_the_last_file(tmp_path, chunk_size, sizes):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put_many([b"one", b"two"])
    with Queue(tmp_path / "q", chunk_size=chunk_size) as q:
        q.put(b"new")  # ends at 25
        assert [path.stat().st_size for path in chunk_files(tmp_path).values()] == sizes


@pytest.mark.req("REQ-2", "REQ-5", "DEF-20")
def test_the_smallest_chunk_has_room_for_an_empty_record_alone_and_the_largest_can_be_asked_for(tmp_path):
    with Queue(tmp_path / "q", chunk_size=12) as q:
        q.put_many([b"", b""])
        before = contents(tmp_path)
        for call in (q.put, lambda record: q.put_many([b"", record])):
            with pytest.raises(RecordTooLarge, match="Nothing was stored"):
                call(b"x")
        assert contents(tmp_path) == before
        assert q.get_many(9) == [b"", b""]
    Queue(tmp_path / "q", chunk_size=2**31 - 1).close()


@pytest.mark.req("REQ-3", "DEF-15", "DEF-16")
@pytest.mark.parametrize("other", [20, 200])
def test_a_queue_opens_with_another_chunk_size_and_old_files_stay_as_they_are(tmp_path, other):
    """With a smaller size the original loses what it cannot map, with a larger it extends every file."""
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(100, 130))
    before = {path: path.stat().st_size for path in chunk_files(tmp_path).values()}
    with Queue(tmp_path / "q", chunk_size=other) as q:
        assert list(q) == numbers(100, 130)
        q.put_many(numbers(130, 200))
        sizes = {path: path.stat().st_size for path in chunk_files(tmp_path).values()}
        assert {path: sizes.pop(path) for path in before} == before
        assert set(sizes.values()) == {other}
        assert q.get_many(5) == numbers(100, 105)
    with Queue(tmp_path / "q", chunk_size=64) as q:
        assert q.verify().problems == []
        assert q.get_many(1000) == numbers(105, 200)


@pytest.mark.req("REQ-4")
def test_a_large_record_finds_its_place_when_the_last_file_was_made_for_small_ones(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put(b"0")
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put(b"x" * 4084)
        assert [path.stat().st_size for path in chunk_files(tmp_path).values()] == [40, 4096]
        assert q.get_many(2) == [b"0", b"x" * 4084]
    with Queue(tmp_path / "r", chunk_size=40) as q:
        q.put_many([b"0", b"1"])
    with Queue(tmp_path / "r", chunk_size=4096) as q:
        q.get_many(2)  # the small file is the only chunk, and empty
        q.put(b"x" * 4084)
        assert q.get() == b"x" * 4084


@pytest.mark.req("REQ-1")
def test_ids_wrap_after_65534_and_leave_out_1_where_the_original_begins(tmp_path):
    (tmp_path / "q").write_bytes((65533).to_bytes(2))
    (tmp_path / "q.65533").write_bytes(POINTERS.pack(10, 16, 0) + b"\0\4zero")
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"one!", b"two!", b"six!"])
        assert list(chunk_files(tmp_path)) == [2, 3, 65533, 65534]
        assert list(q) == [b"zero", b"one!", b"two!", b"six!"]
    assert POINTERS.unpack_from((tmp_path / "q.65534").read_bytes()) == (10, 16, 2)
    with Queue(tmp_path / "q", chunk_size=16) as q:
        assert q.get_many(9) == [b"zero", b"one!", b"two!", b"six!"]


@pytest.mark.req("REQ-1", "REQ-14", "DEF-12")
def test_when_all_ids_are_in_use_nothing_is_stored_and_no_live_chunk_is_touched(tmp_path, monkeypatch):
    """In the original the next record overwrites the first chunk. Twenty ids: 65,533 files take a minute."""
    monkeypatch.setattr("qewqew_core.formats.chunk.MAX_ID", 21)
    monkeypatch.setattr("qewqew_core.formats.chunk.OUR_FIRST", 2)
    disk = JournalDisk(str(tmp_path))
    with Queue(tmp_path / "q", chunk_size=12, _files=disk) as q:  # an empty record fills a chunk
        q.put_many([b""] * 16)
        list(q)  # writes what only the log has
        before, calls = contents(tmp_path), len(disk.calls)
        with pytest.raises(RecordTooLarge):
            q.put(b"x")
        with pytest.raises(Full, match="Nothing was stored; take or lease records, or use a larger chunk_size"):
            q.put_many([b""] * 5, key="k")
        assert (contents(tmp_path), len(disk.calls)) == (before, calls)
        assert q.put_many([b""] * 4, key="k") == 4
        with pytest.raises(Full):
            q.put(b"")
        assert q.put_many([], key="needs no chunk") == 0
        assert len(q.get_many(3)) == 3
        assert list(chunk_files(tmp_path)) == list(range(5, 22))
        q.put_many([b""] * 2)
        q.put(b"")
        with pytest.raises(Full):
            q.put(b"")
        batch = q.lease("key", max_records=10)  # frees its ids
        q.put_many([b""] * 7)
        with pytest.raises(Full):
            batch.put_back()  # and needs them again
        assert batch.state == q.batch(batch.id).state == "leased"
        assert q.clear() == 17
        batch.put_back()
        assert len(q) == 10
    with Queue(tmp_path / "q", chunk_size=12) as q:
        assert q.verify().problems == []
        assert q.get_many(100) == [b""] * 10


@pytest.mark.req("REQ-1", "REQ-33", "DEF-3")
def test_an_id_is_not_given_to_a_new_chunk_while_a_stranger_lies_there(tmp_path):
    """A file with records that nothing refers to is neither delivered nor overwritten."""
    stranger = POINTERS.pack(10, 13, 0) + b"\0\1s" + bytes(3)
    for number in (FIRST + 1, FIRST + 2):
        (tmp_path / f"q.{number}").write_bytes(stranger)
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many(numbers(0, 6))
        assert list(chunk_files(tmp_path)) == [FIRST + number for number in range(5)]
        assert list(q) == numbers(0, 6)
        assert q.verify().orphans == [str(tmp_path / f"q.{FIRST + 1}"), str(tmp_path / f"q.{FIRST + 2}")]
    with Queue(tmp_path / "q", chunk_size=16) as q:
        assert q.get_many(9) == numbers(0, 6)
    assert (tmp_path / f"q.{FIRST + 1}").read_bytes() == (tmp_path / f"q.{FIRST + 2}").read_bytes() == stranger


@pytest.mark.req("REQ-1")
def test_when_strangers_have_all_ids_but_a_few_those_are_used_and_then_nothing_is_stored(tmp_path):
    stranger = POINTERS.pack(10, 13, 0) + b"\0\1s" + bytes(3)
    for number in range(1, 65535):
        if number in (1, 20_000):
            (tmp_path / f"q.{number}").write_bytes(stranger)  # a file can have 65,000 names at most
        elif number not in (5, 6, 7, 65533, 65534):  # the first stranger gets the last of them
            os.link(tmp_path / ("q.1" if number < 20_000 else "q.20000"), tmp_path / f"q.{number}")
    (tmp_path / "q").write_bytes((65533).to_bytes(2))
    (tmp_path / "q.65533").write_bytes(POINTERS.pack(10, 16, 0) + b"\0\4zero")
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"one!", b"two!"])
        q.put(b"six!")
        names = set(os.listdir(tmp_path))
        with pytest.raises(Full, match="Nothing was stored"):
            q.put(b"more")
        assert set(os.listdir(tmp_path)) == names
        assert q.get_many(9) == [b"zero", b"one!", b"two!", b"six!"]
    assert (tmp_path / "q.65534").read_bytes() == (tmp_path / "q.20000").read_bytes() == stranger
    shutil.rmtree(tmp_path)  # pytest would keep it


@pytest.mark.parametrize("last", [b"", b"x"])
def test_a_sparse_file_at_the_name_of_a_chunk_is_not_read_but_named_and_left(tmp_path, last):
    """Reading this much would take an hour."""
    with Queue(tmp_path / "q") as q:
        q.put(b"1")
    (other := tmp_path / "q.9").touch()
    os.truncate(other, 1 << 40)
    with other.open("r+b") as opened:
        opened.seek(0, os.SEEK_END)
        opened.write(last)
    with Queue(tmp_path / "q") as q:
        q.put(b"2")
        report, orphans = q.verify(), q.orphans()
    assert (list(report.strange), report.problems, orphans) == ([str(other)], [], [])
    assert f"{other.stat().st_size:,} bytes" in report.strange[str(other)]
    with pytest.raises(BadPath, match=r"q\.9: a file of .* move it away"):
        inspect_state(str(tmp_path / "q"), closely=True)
    assert list(repair(tmp_path / "q").strange) == [str(other)]
    assert other.stat().st_size == (1 << 40) + len(last)


@pytest.mark.parametrize("last", [b"", b"x"])
def test_of_a_sparse_file_that_a_chunk_may_be_only_what_is_no_hole_is_read(tmp_path, last):
    Queue(tmp_path / "q").close()
    read = []

    class Counting(Files):
        def read(self, fd, size, offset):
            data = super().read(fd, size, offset)
            read.append(len(data))
            return data

    (other := tmp_path / "q.9").touch()
    os.truncate(other, MAX_CHUNK_SIZE - 1)
    with other.open("r+b") as opened:
        opened.seek(0, os.SEEK_END)
        opened.write(last)
    Queue(tmp_path / "q", _files=Counting()).close()
    assert other.exists() == bool(last)
    assert sum(read) < 1 << 20
