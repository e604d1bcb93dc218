"""`repair_topic` where index, log and blocks are lost: readers go on where they stood, and nothing is passed over in silence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip

from qewqew_core import Corrupt, Empty, Topic, inspect_reader, repair_topic
from qewqew_core.formats import zbus
from qewqew_core.topic.block_numbers import Run, bases_between, number_runs

PER_BLOCK = 8  # messages; the topic has 60 in eight blocks


def fill(path: Path, *, committed: int = 20, acked: int = 20, trim: int | None = None, several: bool = False) -> list[Path]:
    """A closed topic with a snapshot as its log; returns its blocks."""
    numbers = iter(range(60))
    for _ in range(6 if several else 1):
        with Topic(path, block_size=2000, log_bytes=4000, max_records=trim, slow_readers="move") as topic:
            for _ in range(10 if several else 60):
                topic.append(b"m%02d " % next(numbers) * 20)
    with Topic(path) as topic, topic.reader("reads") as reader, topic.reader("leases") as leases:
        reader.commit(*reader.read_many(committed))
        batch = leases.lease("run 1", max_records=acked)
        assert batch is not None
        batch.ack()
    return sorted((path / "data").glob("*.zbus"))


def zero(path: Path, at: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(size))


def read_all(path: Path, reader: str = "reads") -> list[int]:
    """The numbers of what the reader gets until there is no more."""
    with Topic(path) as topic, topic.reader(reader) as one:
        got = []
        try:
            while True:
                got.append(one.read().number)
        except Empty:
            assert one.lost == 0
        return got


INDEX: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut in its head": lambda index: os.truncate(index, 400),
    "cut in its entries": lambda index: os.truncate(index, 1100),
    "an entry is zeroed": lambda index: zero(index, zbus.entry_at(3), zbus.ENTRY),
    "a base is zeroed": lambda index: zero(index, zbus.entry_at(5) + 8, 8),
    "a sector is zeroed": lambda index: zero(index, 1024, 512),
    "its head is zeroed": lambda index: zero(index, 0, 24),
}


@pytest.mark.parametrize("how", INDEX)
@pytest.mark.parametrize("lost", [(), (5,), (4, 5)])
@pytest.mark.parametrize("several", [False, True])
def test_readers_stay_whatever_is_left_of_the_index(tmp_path: Path, how: str, lost: tuple[int, ...], several: bool) -> None:
    """Also where a block is lost with it, though the log knows only the last one."""
    path = tmp_path / "t"
    blocks = fill(path, several=several)
    for number in lost:
        blocks[number].unlink()
    INDEX[how](path / "t.idx")
    report = repair_topic(path)
    assert not report.ok
    if not lost:
        assert read_all(path) == read_all(path, "leases") == list(range(20, 60))
        return
    assert any(blocks[lost[0]].name in str(one) and one.records == PER_BLOCK * len(lost) for one in report.damage)
    with Topic(path) as topic:
        for name in ("reads", "leases"):
            with topic.reader(name) as reader:
                assert reader.read().number == 20
                reader.seek(number=PER_BLOCK * (lost[-1] + 1))
                assert [one.number for one in reader.read_many(99)] == list(range(PER_BLOCK * (lost[-1] + 1), 60))


@pytest.mark.parametrize("lost", [(1,), (3,), (6,), (1, 2), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("committed", [12, 30, 36, 50])
def test_without_index_and_log_readers_are_placed_by_the_numbers_of_messages(
    tmp_path: Path, lost: tuple[int, ...], committed: int
) -> None:
    path = tmp_path / "t"
    blocks = fill(path, committed=committed)
    left = [number for number in range(committed, 60) if number // PER_BLOCK not in lost]
    for gone in (*(blocks[number] for number in lost), path / "t.idx", path / "t.wal"):
        gone.unlink()
    report = repair_topic(path)
    assert sum(one.records or 0 for one in report.damage) == PER_BLOCK * len(lost)
    got: list[int] = []
    with Topic(path) as topic, topic.reader("reads") as reader:
        assert reader.lag() == 60 - committed or committed // PER_BLOCK in lost
        while len(got) < len(left):
            if left[len(got)] != (got[-1] + 1 if got else committed):  # a block that is lost comes first
                reader.seek(number=left[len(got)])
            got.append(reader.read().number)
        assert got == left
        assert topic.append(b"more") == 60


def test_a_reader_that_has_no_log_goes_back_to_where_numbers_of_blocks_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "t"
    blocks = fill(path, committed=50)
    for gone in (
        blocks[3],
        blocks[4],
        path / "t.idx",
        path / "t.wal",
        path / "state" / "reads.wal",
        path / "state" / "reads.lock",
    ):
        gone.unlink()
    assert any("goes back" in one.what for one in repair_topic(path).damage)
    assert read_all(path) == list(range(40, 60))


@pytest.mark.parametrize("lock", ["lock", "no lock"])
@pytest.mark.parametrize("committed", [3, 5, 20])
def test_index_and_log_of_a_topic_whose_oldest_blocks_were_removed(tmp_path: Path, lock: str, committed: int) -> None:
    path = tmp_path / "t"
    fill(path, committed=committed, acked=committed, trim=30)
    with Topic(path) as topic:
        first = topic.stats().first
    assert first == 24
    for suffix in (".idx", ".wal", *([".lock"] if lock == "no lock" else [])):
        (path / f"t{suffix}").unlink()
    assert not repair_topic(path).ok
    assert read_all(path) == read_all(path, "leases") == list(range(first + committed, 60))
    assert read_all(path, "new") == list(range(first, 60))


def test_a_repair_that_is_stopped_places_readers_when_it_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    blocks = fill(path, committed=50)
    for gone in (blocks[3], blocks[4], path / "t.idx", path / "t.wal"):
        gone.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("qewqew_core.topic.topic_repairing._Repair.place_readers", lambda repair: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            repair_topic(path)
    repair_topic(path)
    assert read_all(path) == list(range(50, 60))


@pytest.mark.parametrize("how", ["missing", "zeros", "head", "ones", "number"])
@pytest.mark.parametrize("which", [1, 4, 6])
def test_seek_passes_over_a_block_that_is_damaged_where_it_begins(tmp_path: Path, how: str, which: int) -> None:
    path = tmp_path / "t"
    block = fill(path)[which]
    if how == "missing":
        block.unlink()
        repair_topic(path)
    elif how == "number":
        zero(block, zbus.NUMBER_AT, 8)
    else:
        size = block.stat().st_size if how == "zeros" else zbus.HEAD
        block.write_bytes((b"\xff" if how == "ones" else b"\0") * size + block.read_bytes()[size:])
    with Topic(path) as topic, topic.reader("reads") as reader:
        for number in range(60):
            if number // PER_BLOCK != which:
                reader.seek(number=number)
                message = reader.read()
                assert (message.number, message.body) == (number, b"m%02d " % number * 20)


@pytest.mark.parametrize("which", range(1, 8))
@pytest.mark.parametrize("how", ["zeros", "ones", "number"])
def test_retention_removes_no_block_that_only_a_damaged_head_says_is_not_needed(tmp_path: Path, which: int, how: str) -> None:
    path = tmp_path / "t"
    block = fill(path)[which]
    if how == "number":
        zero(block, zbus.NUMBER_AT, 8)
    else:
        block.write_bytes((b"\xff" if how == "ones" else b"\0") * zbus.HEAD + block.read_bytes()[zbus.HEAD :])
    with Topic(path, max_records=50, slow_readers="move") as topic:
        assert topic.trim() == (PER_BLOCK if which > 1 else 0), "of the first block, unless the next one does not say its number"
        assert topic.stats().blocks == (7 if which > 1 else 8)


def test_a_lease_meets_a_damaged_block_while_a_batch_is_out_whose_block_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "t"
    blocks = fill(path)
    with Topic(path) as topic, topic.reader("new") as reader:
        assert reader.lease("first", max_records=3)
    blocks[0].unlink()
    flip(blocks[3], 300)
    repair_topic(path)
    with Topic(path) as topic, topic.reader("new") as reader:
        for key, numbers in (("a", range(8, 16)), ("b", range(16, 24))):
            batch = reader.lease(key, max_records=8)
            assert batch is not None
            assert [message.number for message in batch.messages()] == list(numbers)
        with pytest.raises(Corrupt, match=blocks[3].name):
            reader.lease("c", max_records=8)


@pytest.mark.parametrize("size", [0, 100, 300, "zeros"])
def test_a_first_block_that_is_cut_short_keeps_nobody_from_looking(tmp_path: Path, size: int | str) -> None:
    path = tmp_path / "t"
    first = fill(path)[0]
    if isinstance(size, int):
        os.truncate(first, size)
    else:
        zero(first, 0, first.stat().st_size)
    repair_topic(path)
    assert inspect_reader(path, "nobody").records == 60
    with Topic(path) as topic:
        assert topic.stats().messages == 60
        assert topic.stats().readers["reads"] == 40
        with topic.reader("new", start="oldest") as reader:
            assert reader.stats().records == reader.lag() == 60
            with pytest.raises(Corrupt, match=first.name):
                reader.read_many(99)
            if size == 300:
                assert reader.read().number == 0, "it is whole"
            reader.seek(number=8)
            assert reader.read().number == 8


@pytest.mark.parametrize("how", ["zeros", "cut", "first missing", "missing"])
def test_repair_reports_what_is_lost_and_what_stays_damaged(tmp_path: Path, how: str) -> None:
    path = tmp_path / "t"
    blocks = fill(path)
    block = blocks[0 if how == "first missing" else 3]
    if how == "zeros":
        zero(block, 0, block.stat().st_size)
    elif how == "cut":
        os.truncate(block, 0)
    else:
        block.unlink()
    report = repair_topic(path)
    assert [one.records for one in report.damage if block.name in one.path] == [PER_BLOCK if "missing" in how else None]
    assert repair_topic(path).ok == (how == "first missing"), "else it is still damaged"


@pytest.mark.parametrize("how", ["bit", "cut", "empty", "zeros"])
def test_checksums_that_are_damaged_themselves_are_set_aside(tmp_path: Path, how: str) -> None:
    path = tmp_path / "t"
    sums = fill(path)[2].with_suffix(".sums")
    acts: dict[str, Callable[[], object]] = {
        "bit": lambda: flip(sums, 10),
        "cut": lambda: os.truncate(sums, 20),
        "empty": lambda: os.truncate(sums, 0),
        "zeros": lambda: zero(sums, 0, sums.stat().st_size),
    }
    acts[how]()
    report = repair_topic(path)
    assert [(one.path, one.records) for one in report.damage] == [(str(sums), 0)]
    assert report.set_aside is not None
    assert (Path(report.set_aside) / sums.name).is_file()
    assert repair_topic(path).ok
    with Topic(path) as topic, topic.reader("new") as reader:
        assert topic.verify().ok
        batch = reader.lease("all", max_records=60)
        assert batch is not None
        assert batch.records == 60


def test_numbers_of_blocks_are_those_that_can_be_right_together() -> None:
    whole, cut = [Run([0, 10, 20], 30, 0, 0)], Run([0, 10], 20, 1, 5)
    assert number_runs(whole, {}).firsts == [0]
    assert number_runs([Run([10, 20], 30, 0, 0)], {}) == ([1], 0)
    assert number_runs(whole, {(0, 0): 5, (10, 7): 2, (20, 8): 2}).firsts == [0]
    assert number_runs([cut, Run([90], 99, 0, 0)], {(0, 0): 1, (90, 4): 1}) == ([0, 4], 2)
    assert number_runs([cut, Run([90], 99, 0, 0)], {(0, 0): 1}) == ([0, 3], 1)
    assert number_runs([cut, Run([90], 99, 0, 0)], {(0, 0): 3, (90, 1): 2}) == ([0, 3], 1), "there is no room for it"
    assert number_runs([cut, Run([90], 100, 1, 2), Run([150], 160, 0, 0)], {(0, 0): 1, (150, 7): 1}) == ([0, 5, 7], 3)
    assert bases_between(2, 1, 20, 90, {}) == [20]
    assert bases_between(2, 3, 20, 80, {}) == [20, 40, 60]
    assert bases_between(2, 3, 20, 80, {3: 50, 4: 0}) == [20, 50, 65]
