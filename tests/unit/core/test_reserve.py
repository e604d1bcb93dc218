"""`Reserve`: on a full disk what frees room works, in an object that was just opened too, and no put takes that room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync
from test_room import SmallDisk

from qewqew_core import BadPath, Broken, DiskFull, Queue, Reader, Topic
from qewqew_core.disk.reserve import BYTES, FILES, Reserve, means_full, with_room

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
