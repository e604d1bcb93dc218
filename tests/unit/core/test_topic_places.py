"""Places in a topic, for who keeps account of messages outside of it, as a stream of Spark's does in its checkpoint."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import Clock
from disk import NoSync

from qewqew_core import Closed, CommitConflict, Corrupt, Message, Topic
from qewqew_core.disk.files import Files
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD, NUMBER_AT, Entry
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.view import Position, View


@pytest.fixture
def path(tmp_path: Path) -> str:
    """1,000 messages of 300 bytes in blocks of some 100 kB, with checksums each 64 KiB."""
    with Topic(tmp_path / "t", block_size=100_000) as topic:
        for first in range(0, 1000, 50):
            topic.append_many([Message(b"%096d" % number, "ab"[number % 2]) for number in range(first, first + 50)])
    return str(tmp_path / "t")


def marks(path: str) -> dict[int, list[int]]:
    with Topic(path) as topic, topic._look() as view:
        return {one.base: [piece.offset for piece in pieces_of(Files(), path, one.base)] for one in view.entries(view.index())}


def test_a_message_is_found_from_a_mark_before_it(path: str) -> None:
    view, known, asked = View.of(Files(), path), marks(path), []
    assert min(map(len, known.values())) > 1

    def marks_of(entry: Entry) -> list[int]:
        asked.append(entry.base)
        return known[entry.base]

    for number in range(1000):
        assert view.by_number(number, marks_of) == view.by_number(number)
    assert len(set(asked)) == len(known) == 3
    assert view.by_number(1000, marks_of) == view.latest()
    assert view.by_number(1001, marks_of) is None
    view.close()


def test_of_a_number_that_was_given_twice_the_first_message_is_found_though_the_second_has_a_mark(path: str) -> None:
    # A zbus server that was killed had not stored the next number.
    with open(os.path.join(path, "data", f"{0:020d}.zbus"), "r+b") as block:
        for place in range(10, 350):
            block.seek(300 * place + NUMBER_AT)
            block.write((place - 1).to_bytes(8))
    view = View.of(Files(), path)
    assert view.by_number(9, lambda entry: [3000]) == Position(0, 2700, 9)
    view.close()


@pytest.mark.parametrize("filter", [None, "b"])
def test_runs_hold_the_messages_of_a_block_as_they_stand_there(tmp_path: Path, filter: str | None) -> None:
    sizes = [0, 10, 3 << 20, 1, 1 << 20, 700_000, 400_000, 5]
    with Topic(tmp_path / "t") as topic:
        topic.append_many([Message(b"%d" % place * size, "ab"[place % 2]) for place, size in enumerate(sizes)])
        expected = [one for one in topic if Filter(filter).matches(one.tag)]
        with topic._look() as view:
            end = view.latest().offset
            middle = 3 * HEAD + 10 + (3 << 20)
            runs = list(view.runs(0, 0, 0, [middle, end], Filter(filter)))
    found = [run.data[at + HEAD : end] for run in runs for at, end in zip(run.bounds[::2], run.bounds[1::2], strict=True)]
    assert found == [one.body for one in expected]
    assert [run.offset + at for run in runs for at in run.bounds[::2]] == [one.offset for one in expected]
    assert all(len(run.data) <= 1 << 20 or len(run.bounds) == 2 for run in runs)


def test_runs_end_where_they_may_and_are_checked(path: str) -> None:
    view = View.of(Files(), path)
    assert [len(run.bounds) // 2 for run in view.runs(0, 300, 1, [600, 1500])] == [1, 3]
    with pytest.raises(Corrupt, match="offset 300: no message 3 begins here"):
        list(view.runs(0, 300, 3, [600]))
    with pytest.raises(Corrupt, match="offset 300: the block ends inside the head of a message"):
        list(view.runs(0, 300, 1, [400]))
    view.close()


def test_a_reader_is_moved_by_who_knows_where_it_stands(path: str) -> None:
    with Topic(path) as topic, topic._look() as view:
        begin, end, other = (view.by_number(number) for number in (100, 500, 700))
        assert begin is not None
        assert end is not None
        assert other is not None
        with topic.reader("r", start=begin) as reader:
            assert (reader.position(), reader.lag()) == (begin, 900)
            reader.move_to(end, begin)
            assert reader.read().number == 500
            with pytest.raises(CommitConflict, match="1 of its messages are in flight, and 0 batches leased"):
                reader.move_to(other, end)
            reader.nack()
            with pytest.raises(CommitConflict, match="in flight"):  # given back: somebody is to have it
                reader.move_to(other, end)
            reader.seek(number=600)
            with pytest.raises(CommitConflict, match="moved by somebody else: it stands at message 600, not at 500"):
                reader.move_to(other, end)
            reader.move_to(other)
        with topic.reader("r") as reader:
            assert reader.position() == other
            batch = reader.lease("k", max_records=5)
            assert batch is not None
            with pytest.raises(CommitConflict, match="0 of its messages are in flight, and 1 batches leased"):
                reader.move_to(end)
            batch.ack()
            reader.move_to(end)


@pytest.mark.req("Z6", "ZD11")
@pytest.mark.parametrize(
    ("place", "number"),
    [
        ({"number": 5}, 5),
        ({"number": 0}, 0),
        ({"offset": 3 * 205}, 3),
        *(({"time": datetime.fromtimestamp(11 + number, UTC)}, number) for number in range(8)),
        ({"time": datetime.fromtimestamp(12.5, UTC)}, 2),
    ],
    ids=str,
)
def test_where_a_reader_was_moved_to_is_kept_and_stands_in_its_rdx(
    tmp_path: Path, clock: Clock, place: dict[str, Any], number: int
) -> None:
    """Wherever it stood: the original searched for a time from there."""
    with Topic(tmp_path / "t", block_size=410, _files=NoSync()) as topic, topic.reader("r") as reader:
        for second in range(8):
            clock.ms = 11_000 + 1000 * second
            topic.append(b"%d" % second)
        assert reader.commit(*reader.read_many(9)) == 8
        reader.seek(**place)
    block, offset = zbus.unpack_position((tmp_path / "t" / "reader" / "r.rdx").read_bytes())
    entry = zbus.unpack_entry((tmp_path / "t" / "t.idx").read_bytes(), zbus.entry_at(block))
    assert entry.base + offset == 205 * number, "a server goes on there"
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        assert reader.read().number == number


def test_a_reader_whose_place_was_removed_is_no_longer_expected_there(path: str) -> None:
    with Topic(path, max_records=1, slow_readers="move") as topic, topic.reader("r") as reader:
        begin, end = reader.position(), Position(2, 0, 700)
        topic.append(b"more")
        assert topic.trim() == 700
        assert reader.lost == 700  # it has moved on
        reader.move_to(end._replace(offset=300, number=701), begin)
        assert reader.read().number == 701


def test_a_temporary_reader_may_be_kept(path: str) -> None:
    with Topic(path) as topic:
        for name in "ab":
            with topic.reader(name, temporary=True) as reader:
                if name == "a":
                    reader.keep()
                    reader.keep()
        assert topic.readers() == ["a"]
        with topic.reader("a") as reader:
            assert reader.position().number == 0
        with pytest.raises(Closed):
            reader.keep()


class Killed(Files):
    """Dies while it makes the reader r: when its .rdx is there, just now."""

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if target.endswith("/r.rdx"):
            raise KeyboardInterrupt


def test_a_temporary_reader_goes_although_its_maker_was_killed(path: str) -> None:
    with Topic(path, _files=Killed()) as topic, pytest.raises(KeyboardInterrupt):
        topic.reader("r", temporary=True)
    with Topic(path) as topic:
        assert topic.readers() == ["r"]
        topic.trim()
        assert topic.readers() == []
