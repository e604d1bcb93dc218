"""`Reserve`: on a full disk what frees room works, in an object that was just opened too, and no put takes that room."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync
from test_room import SmallDisk

from qewqew_core import BadPath, Broken, Corrupt, DiskFull, Queue, Reader, Topic, repair, repair_topic
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.journal import SPARE
from qewqew_core.disk.reserve import BYTES, FILES, SHARE, Reserve, means_full, with_room
from qewqew_core.limits import LIMITS
from qewqew_core.queue.chain import Chain

RECORDS = [b"record %d" % number for number in range(12)]


@contextlib.contextmanager
def a_queue(home: Path, disk: NoSync) -> Iterator[Queue]:
    with Queue(home / "s", _files=disk) as queue:
        yield queue


@contextlib.contextmanager
def a_reader(home: Path, disk: NoSync) -> Iterator[Reader]:
    with Topic(home / "s", _files=disk) as topic, topic.reader("r") as reader:
        yield reader


Opened = Callable[[Path, NoSync], Any]
each = pytest.mark.parametrize("opened", [a_queue, a_reader])


def reserve_of(home: Path, opened: Opened) -> Path:
    return home / "s.reserve" if opened is a_queue else home / "s" / "s.reserve"


def fill(home: Path, opened: Opened) -> None:
    with Queue(home / "s") if opened is a_queue else Topic(home / "s") as store:
        (store.put_many if isinstance(store, Queue) else store.append_many)(RECORDS)
        if isinstance(store, Topic):
            store.reader("r").close()


@each
def test_it_is_there_from_the_first_commit_on_and_goes_with_what_it_was_for(tmp_path: Path, opened: Opened) -> None:
    with Queue(tmp_path / "s") if opened is a_queue else Topic(tmp_path / "s"):
        assert not reserve_of(tmp_path, opened).exists()
    fill(tmp_path, opened)
    files = [*reserve_of(tmp_path, opened).iterdir()]
    assert len(files) == FILES
    assert all(file.stat().st_blocks * 512 >= min(BYTES, file.stat().st_size) > 0 for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    with opened(tmp_path, NoSync()) as source:
        batch = source.lease("all")
        assert list(batch) == RECORDS
        batch.put_back()
        if isinstance(source, Queue):
            assert source.get_many(100) == RECORDS
    assert reserve_of(tmp_path, opened).exists() == (opened is a_reader), "an empty queue leaves nothing"


@each
def test_with_no_byte_left_an_opened_store_leases_acknowledges_and_returns(tmp_path: Path, opened: Opened) -> None:
    fill(tmp_path, opened)
    disk, done = SmallDisk(), list[bytes]()
    disk.room = 0
    for number in range(30):  # each call in its own opening, as tasks do it
        with opened(tmp_path, disk) as source:
            batch = source.lease(f"key {number}", max_records=2)
            if batch is None:
                break
            if number == 1:
                batch.nack("again")
            elif number == 3:
                batch.to_dead_letters("bad")
            else:
                done += list(batch)
                batch.ack()
    with opened(tmp_path, disk) as source:
        (dead,) = source.dead()
        assert sorted([*done, *dead]) == sorted(RECORDS)


@each
@pytest.mark.parametrize("how", ["opened", "repaired"])
def test_what_has_no_records_left_but_in_batches_is_opened_too(tmp_path: Path, opened: Opened, how: str) -> None:
    """Such a queue has no header file."""
    fill(tmp_path, opened)
    with opened(tmp_path, NoSync()) as source:
        source.lease("all")
    disk = SmallDisk()
    disk.room = 0
    if how == "repaired":
        assert (repair if opened is a_queue else repair_topic)(tmp_path / "s", _files=disk).ok
    with opened(tmp_path, disk) as source:
        batch = source.find_batch("all")
        assert list(batch) == RECORDS
        batch.ack()


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_lease_whose_copy_leaves_no_room_for_its_commit_has_whole_chunks_or_a_few_records(tmp_path: Path, chunks: int) -> None:
    """Whatever room there is, with the same limit. Whole chunks take none."""
    in_chunk, got = 9, set[int]()
    for room in range(0, 50_000, 2_000):
        disk = SmallDisk()
        disk.capacity = lambda path: SHARE * FILES * 5_376  # type: ignore[method-assign]
        with Queue(tmp_path / f"{room}", chunk_size=40_000, _files=disk) as queue:
            queue.put_many([b"x" * 4_000] * in_chunk * 4)
        disk.room = room
        with Queue(tmp_path / f"{room}", chunk_size=40_000, _files=disk) as queue:
            batch = queue.lease("key", max_records=chunks * in_chunk + 7)
            assert batch is not None
            assert len([*batch]) == batch.records
            got.add(batch.records)
            batch.ack()
        disk.room = None
    assert got == {chunks * in_chunk or 4, chunks * in_chunk + 7}


@each
def test_puts_are_refused_while_it_cannot_be_made(tmp_path: Path, opened: Opened) -> None:
    fill(tmp_path, opened)
    assert Reserve(NoSync(), str(reserve_of(tmp_path, opened).with_suffix(".wal"))).release()
    disk = SmallDisk()
    disk.room = 100_000
    with Queue(tmp_path / "s", _files=disk) if opened is a_queue else Topic(tmp_path / "s", _files=disk) as store:
        put = store.put if isinstance(store, Queue) else store.append
        with pytest.raises(DiskFull, match="Nothing was stored"):
            put(b"x")
        disk.room = None
        put(b"y")
    assert len([*reserve_of(tmp_path, opened).iterdir()]) == FILES


@each
def test_a_lease_that_finds_no_room_drops_the_oldest_acknowledged_batches_and_no_other(tmp_path: Path, opened: Opened) -> None:
    fill(tmp_path, opened)
    disk = SmallDisk()
    with opened(tmp_path, disk) as source:
        for name in ("first", "second", "third"):
            source.lease(name, max_records=1).ack()
        source.lease("in flight", max_records=1)
        source.lease("bad", max_records=1).to_dead_letters("bad")
        source._engine.log.release()
        disk.room = 900 + (Reserve(disk, source._engine.log.path).for_moves if opened is a_queue else 0)
        assert list(source.lease("next", max_records=1)) == RECORDS[5:6]
        left = [batch.key for batch in source.acknowledged()]
        assert left == ["first", "second", "third"][3 - len(left) :]
        assert len(left) < 3
        assert [batch.key for batch in source.batches()] == ["in flight", "next"]
        assert [batch.key for batch in source.dead()] == ["bad"]
        disk.room = None


@pytest.mark.parametrize("in_use", [False, True], ids=["idle", "in use"])
def test_a_lease_that_finds_no_room_drops_acknowledged_batches_of_other_readers(tmp_path: Path, in_use: bool) -> None:
    """They kept the room that all share, for ever. A reader that somebody is using just now is passed over."""
    disk = SmallDisk()
    with Topic(tmp_path / "s", _files=disk, lock_timeout=30) as topic:
        topic.append_many(RECORDS)
        topic.reader("b").close()
        with topic.reader("a") as first, topic.reader("c") as second:
            for name in ("one", "two", "three", "four"):
                batch = first.lease(name, max_records=1)
                assert batch is not None
                batch.ack()
            assert first.lease("in flight", max_records=1)
            assert Reserve(disk, str(tmp_path / "s" / "s.wal")).release()
            disk.room = 900
            with first._engine.exclusive() if in_use else contextlib.nullcontext():
                began = time.monotonic()
                if in_use:
                    with pytest.raises(DiskFull):
                        second.lease("next", max_records=1)
                    assert time.monotonic() - began < 10
                else:
                    leased = second.lease("next", max_records=1)
                    assert leased is not None
                    assert [message.body for message in leased.messages()] == RECORDS[:1]
            left = [batch.key for batch in first.acknowledged()]
            assert left == ["one", "two", "three", "four"][4 - len(left) :]
            assert (len(left) == 4) == in_use
            assert [batch.key for batch in first.batches()] == ["in flight"]
            disk.room = None
        assert topic.verify().ok


@pytest.mark.parametrize("free", [0, -(1 << 30)], ids=["its reserve is left", "nothing can be written"])
@pytest.mark.parametrize("kind", ["queue", "topic", "reader"])
def test_a_full_disk_does_not_keep_a_store_from_being_closed(
    tmp_path: Path, kind: str, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic writes the checksums of full blocks then."""
    disk, records = SmallDisk(), [b"%d" % number * 300 for number in range(40)]
    stores: list[Queue | Topic | Reader] = []
    if kind == "queue":
        queue = Queue(tmp_path / "s", chunk_size=4096, _files=disk)
        queue.put_many(records)
        stores.append(queue)
    else:
        topic = Topic(tmp_path / "s", block_size=4096, _files=disk)
        topic.append_many(records)
        stores.append(topic)
        if kind == "reader":
            stores.insert(0, topic.reader("r"))
        topic.append_many(records)
    disk.room = free
    for store in stores:
        store.close()
    disk.room = None
    if free == 0:
        assert "closed without a checkpoint" not in caplog.text
    if kind == "queue":
        with Queue(tmp_path / "s") as queue:
            assert [*queue] == records
    else:
        with Topic(tmp_path / "s") as topic, topic.reader("r") as reader:
            assert [message.body for message in reader.read_many(100)] == records * 2
            assert [message.body for message in topic] == records * 2
            assert topic.verify().ok


@each
def test_a_file_of_somebody_in_its_place_is_refused_by_name_and_left(tmp_path: Path, opened: Opened) -> None:
    where = reserve_of(tmp_path, opened)
    where.parent.mkdir(exist_ok=True)
    if opened is a_reader:
        Topic(tmp_path / "s").close()
    where.write_bytes(b"mine")
    store = Queue(tmp_path / "s") if opened is a_queue else Topic(tmp_path / "s")
    with store, pytest.raises(BadPath, match="reserve: is in the way"):
        (store.put if isinstance(store, Queue) else store.append)(b"x")
    assert where.read_bytes() == b"mine"


def test_what_is_in_its_directory_besides_stays(tmp_path: Path) -> None:
    reserve = Reserve(NoSync(), str(tmp_path / "s.wal"))
    reserve.make()
    (tmp_path / "s.reserve" / "mine").write_bytes(b"x")
    assert reserve.release()
    assert [path.name for path in (tmp_path / "s.reserve").iterdir()] == ["mine"]


def test_only_a_full_disk_releases_it(tmp_path: Path) -> None:
    reserve = Reserve(NoSync(), str(tmp_path / "s.wal"))
    reserve.make()

    def failing(error: Exception) -> Callable[[], None]:
        def act() -> None:
            raise error

        return act

    sync = Broken("an fsync failed")
    sync.__cause__ = OSError(28, "No space left on device")
    for error in (OSError(5, "Input/output error"), sync, DiskFull("min_free_bytes"), BadPath("elsewhere")):
        assert not means_full(error)
        with pytest.raises(type(error)):
            with_room(reserve, failing(error))
        assert reserve.is_whole()
    with pytest.raises(OSError, match="No space"):
        with_room(reserve, failing(OSError(28, "No space left on device")))
    assert not reserve.is_whole()


def test_what_of_it_cannot_be_removed_gives_no_room_and_is_in_the_way_of_the_next_put(tmp_path: Path) -> None:
    with Queue(tmp_path / "s") as queue:
        (tmp_path / "s.reserve" / "3").mkdir(parents=True)
        with pytest.raises(BadPath, match="a directory is in the way"):
            queue.put(b"x")
        reserve = Reserve(NoSync(), str(tmp_path / "s.wal"))
        assert reserve.release(), "the files before it"
        assert not reserve.release()
        (tmp_path / "s.reserve" / "3").rmdir()
        queue.put(b"x")


def test_a_put_that_finds_the_disk_full_says_so(tmp_path: Path) -> None:
    disk = SmallDisk()
    with Queue(tmp_path / "s", _files=disk) as queue:
        queue.put(b"x")
        queue._engine.log.release_spare()
        disk.room = 10
        with pytest.raises(DiskFull, match=r"s.wal: no room on the file system: .*\. Nothing was stored$"):
            queue.put_many([b"y"] * 2)


class NoSnapshot(NoSync):
    """There is never room for the next log."""

    def open(self, path: str, *, new: bool = False) -> int:
        if path.endswith(".wal.tmp") and new and self.exists(path.removesuffix(".tmp")):
            raise OSError(28, "No space left on device", path)
        return super().open(path, new=new)


@each
@pytest.mark.parametrize("end", ["killed", "closed"])
@pytest.mark.parametrize("mended", ["opened", "repaired"])
def test_a_log_that_cannot_be_cut_back_goes_on_and_knows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened, end: str, mended: str
) -> None:
    """What other files say by then, the old log must know: else it would be another program's doing."""
    monkeypatch.setattr(LIMITS, "reader_log_bytes", 500)
    home, left, disk = tmp_path / "home", tmp_path / "left", NoSnapshot()
    home.mkdir()
    records = [b"record %d" % number for number in range(300)]
    store: Queue | Topic = (Queue if opened is a_queue else Topic)(home / "s", log_bytes=500, _files=disk)
    source = store if isinstance(store, Queue) else store.reader("r")
    for record in records:
        (store.put if isinstance(store, Queue) else store.append)(record)
    for record in records[:100]:
        assert (source.get() if isinstance(source, Queue) else source.read().body) == record
        if isinstance(source, Reader):
            source.commit()
    for taken in range(100, 106) if end == "killed" else ():  # wherever it was tried to cut the log back last
        shutil.copytree(home, left)
        check_whole(left, opened, mended, records[taken:])
        shutil.rmtree(left)
        assert (source.get() if isinstance(source, Queue) else source.read().body) == records[taken]
        if isinstance(source, Reader):
            source.commit()
    source.close()
    store.close()
    if end == "closed":
        check_whole(home, opened, mended, records[100:])


def check_whole(home: Path, opened: Opened, mended: str, records: list[bytes]) -> None:
    if mended == "repaired":
        assert (repair if opened is a_queue else repair_topic)(home / "s").damage == []
    with opened(home, NoSync()) as again:
        assert (again.get_many(500) if opened is a_queue else [one.body for one in again]) == records


def test_repair_gives_nothing_twice_that_the_log_carries_and_a_file_has_too(tmp_path: Path) -> None:
    """Pointers were stored in the middle of the log. Another program can have done that, but these records are the log's."""
    (home := tmp_path / "home").mkdir()
    with Queue(home / "q") as queue:
        queue.put(b"first")
    queue = Queue(home / "q")
    for number in range(5):
        queue.put(b"a%d" % number)
    queue._chain.store()
    for number in range(5):
        queue.put(b"b%d" % number)
    shutil.copytree(home, tmp_path / "left")
    records = list(queue)
    queue.close()
    with pytest.raises(Corrupt, match="another program"):
        Queue(tmp_path / "left" / "q")
    repair(tmp_path / "left" / "q")
    with Queue(tmp_path / "left" / "q") as queue:
        assert list(queue) == records


def test_a_lease_of_which_a_copy_finds_no_room_takes_fewer_records(tmp_path: Path) -> None:
    disk = SmallDisk()
    with Queue(tmp_path / "s", _files=disk) as queue:
        queue.put_many([b"x" * 1000] * 1000)
        queue._engine.log.release()
        disk.room = 50_000 + Reserve(disk, queue._engine.log.path).for_moves
        batch = queue.lease("key", max_records=900)
        assert batch is not None
        assert 0 < len(batch) <= 16
        disk.room = None
        assert queue.get_many(2000) == [b"x" * 1000] * (1000 - len(batch))


def test_a_commit_of_moved_files_reserves_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an operation for each file, and in it a run for each piece: 12 bytes each."""
    monkeypatch.setattr(LIMITS, "piece_bytes", 64)
    monkeypatch.setattr(LIMITS, "spill_bytes", 1000)
    spare, after_commit = list[int](), Chain.after_commit

    def noted(self: Chain, position: int) -> None:
        spare.append(self._engine.log.spare)
        after_commit(self, position)

    monkeypatch.setattr(Chain, "after_commit", noted)
    with Queue(tmp_path / "s") as queue, queue.session() as session:
        for _ in range(100):
            session.put_many([b"x" * 62] * 100)
        session.commit()
    assert len(spare) >= 1
    assert min(spare) >= SPARE


def test_only_what_a_file_lacks_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """xfs wants free room for all that it is asked for."""
    asked, really = list[tuple[int, int]](), os.posix_fallocate

    def noted(fd: int, offset: int, size: int) -> None:
        asked.append((offset, size))
        really(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    files = NoSync()
    with Descriptors([files.open(str(tmp_path / "file"), new=True)]) as (fd,):
        for size in (1 << 16, 1 << 17, 1 << 17):
            files.allocate(fd, size)
            assert os.fstat(fd).st_size == size
        files.truncate(fd, 1 << 18)  # a hole is not allocated
        files.allocate(fd, 1 << 18)
        assert os.fstat(fd).st_blocks * 512 >= 1 << 18
    assert asked == [(0, 1 << 16), (1 << 16, 1 << 16), (0, 1 << 18)]
