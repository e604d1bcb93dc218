"""What a zbus server leaves, also one that was killed, and ours goes on with: the files of a topic, and none of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import zbus_cases
from disk import NoSync

from qewqew_core import Corrupt, Empty, Topic
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD, LENGTH_AT, NUMBER_AT, TAG_AT

DIALECTS = ["B", "C"]
Dialect = Literal["A", "B", "C"]


def topic_at(path: Path, **more: Any) -> Topic:
    return Topic(path, **{"block_size": 500, "_files": NoSync(), **more})


def left_by_a_server(path: Path, dialect: Dialect = "B", count: int = 5, **more: Any) -> Path:
    """Its bodies are 0, 1, 2 …; messages of 205 bytes, three to a block."""
    with topic_at(path, dialect=dialect, **more) as topic:
        for number in range(count):
            topic.append(b"%d" % number, tag="abc"[number % 3])
    zbus_cases.forget_log(path)
    for ours in path.glob("data/*.sums"):
        ours.unlink()
    return path


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def index_of(path: Path) -> zbus.Index:
    return zbus.unpack_index((path / "t.idx").read_bytes(), "")


def last_entry(path: Path) -> zbus.Entry:
    index = index_of(path)
    return zbus.unpack_entry((path / "t.idx").read_bytes(), zbus.entry_at(index.start + index.blocks - 1))


def block_file(path: Path, base: int) -> Path:
    return path / "data" / zbus.block_name(base)


def numbers(messages: object) -> list[int]:
    return [message.number for message in messages]


def bodies(messages: object) -> list[bytes]:
    return [message.body for message in messages]


# Killed between two of its writes


@pytest.mark.req("Z11", "ZD5")
@pytest.mark.parametrize("wrong", [0, 3, 4, 99])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_number_of_messages_is_counted_anew_where_it_disagrees_and_none_is_given_twice(tmp_path, dialect, wrong):
    path = left_by_a_server(tmp_path / "t", dialect)
    patch(path / "t.idx", 16, wrong.to_bytes(8))
    with topic_at(path, dialect=dialect) as topic, topic.reader("r") as one:
        assert topic.stats().next == index_of(path).number == 5
        assert topic.append(b"5") == 5
        assert numbers(one) == [0, 1, 2, 3, 4, 5]


@pytest.mark.req("ZD5")
def test_where_a_server_has_given_a_number_twice_all_are_read(tmp_path):
    path = left_by_a_server(tmp_path / "t", count=3, block_size=1 << 20)
    patch(block_file(path, 0), 2 * 205 + NUMBER_AT, (1).to_bytes(8))
    patch(path / "t.idx", 16, (2).to_bytes(8))
    with topic_at(path) as topic, topic.reader("r") as one:
        assert bodies(one) == [b"0", b"1", b"2"]
        assert one.commit() == 3
        assert topic.append(b"3") == 2
        assert one.read().body == b"3"


@pytest.mark.req("Z11")
def test_a_block_that_is_shorter_than_its_entry_is_an_error_and_not_filled_with_zeros(tmp_path):
    path = left_by_a_server(tmp_path / "t")
    block = block_file(path, last_entry(path).base)
    good = block.read_bytes()
    block.write_bytes(good[:-1])
    with pytest.raises(Corrupt) as caught:
        topic_at(path)
    assert caught.value.path == str(block)
    assert block.read_bytes() == good[:-1]


@pytest.mark.req("Z12", "ZD6")
@pytest.mark.parametrize("stale", [zbus.Entry(0, 0, 0, 0), zbus.Entry(5, 0, 0, 6)], ids=["zeros", "of 10,240 blocks ago"])
def test_a_number_of_blocks_without_its_entry_has_no_block_overwritten(tmp_path, stale):
    """The slot has what was there before: its base offset says block 0."""
    path = left_by_a_server(tmp_path / "t")
    first = block_file(path, 0).read_bytes()
    index, last = index_of(path), last_entry(path)
    patch(path / "t.idx", 4, (index.blocks + 1).to_bytes(4))
    patch(path / "t.idx", zbus.entry_at(index.blocks), zbus.pack_entry(stale))
    with topic_at(path, block_size=1) as topic:
        assert bodies(topic) == [b"0", b"1", b"2", b"3", b"4"]
        assert topic.append(b"5") == 5
        assert last_entry(path).base == last.base + last.end
        for number in range(6, 8):
            topic.append(b"%d" % number)
        assert bodies(topic) == [b"%d" % number for number in range(8)]
        assert topic.verify().ok
    assert block_file(path, 0).read_bytes() == first


@pytest.mark.req("Z14")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_bytes_behind_the_end_of_a_block_are_not_messages_and_are_cut_off(tmp_path, dialect):
    path = left_by_a_server(tmp_path / "t", dialect)
    last = last_entry(path)
    block = block_file(path, last.base)
    with block.open("ab") as file:
        file.write(block.read_bytes()[:HEAD] + b"not committed")
    with topic_at(path, dialect=dialect) as topic:
        assert block.stat().st_size == last.end
        assert len(list(topic)) == 5
        topic.append(b"5")
        assert bodies(topic)[-1] == b"5"


# What it wrote is checked


@pytest.mark.req("Z15")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_number_length_and_the_checksum_of_c_are_checked_when_a_message_is_read(tmp_path, dialect):
    """Of what a server wrote, the log has no checksums."""
    path = left_by_a_server(tmp_path / "t", dialect, count=6, block_size=1 << 20)
    block = block_file(path, 0)
    good = block.read_bytes()
    wrong = [(NUMBER_AT, number.to_bytes(8)) for number in (3, 5, 6, 1 << 40)]
    wrong += [(LENGTH_AT, (1 << 20).to_bytes(4)), (LENGTH_AT, b"\xff\xff\xff\xfe")]
    if dialect == "C":
        wrong.append((TAG_AT, b"\1z"))
    topic_at(path, dialect=dialect).close()
    for at, data in wrong:
        patch(block, 205 + at, data)
        with topic_at(path) as topic, topic.reader("r", auto_commit=True) as one:
            one.seek(number=0)
            assert one.read().number == 0
            with pytest.raises(Corrupt) as caught:
                one.read()
            assert (caught.value.path, caught.value.offset) == (str(block), 205)
            with pytest.raises(Corrupt):
                one.read_many(10)
            assert one.position().number == 1
        block.write_bytes(good)


# Its readers


@pytest.mark.req("ZD1")
@pytest.mark.parametrize("dialect", ["A", *DIALECTS])
def test_an_exactly_full_last_block_is_the_end(tmp_path, dialect):
    with topic_at(tmp_path / "t", dialect=dialect, block_size=410) as topic, topic.reader("end") as end:
        topic.append_many([b"0", b"1"])
        assert len(end.read_many(5)) == end.commit() == 2
    for _ in range(3):
        with topic_at(tmp_path / "t", block_size=410) as topic, topic.reader("end") as end, topic.reader("new") as new:
            assert numbers(end) == []
            assert numbers(new) == [0, 1]


@pytest.mark.req("ZD1")
@pytest.mark.parametrize("dialect", ["A", *DIALECTS])
def test_an_empty_block_behind_an_exactly_full_one_is_the_end_and_filled_by_the_next_append(tmp_path, dialect):
    """A server makes one when it opens a writer."""
    path = left_by_a_server(tmp_path / "t", dialect, count=2, block_size=410)
    patch(path / "t.idx", zbus.entry_at(1), zbus.pack_entry(zbus.Entry(1, 410, 0, 1)))
    patch(path / "t.idx", 0, zbus.pack_index(index_of(path)._replace(blocks=2)))
    block_file(path, 410).touch()
    (path / "reader" / "end.rdx").write_bytes(zbus.new_reader(0, 0, 410))
    with topic_at(path, dialect=dialect, block_size=410) as topic, topic.reader("end") as end, topic.reader("new") as new:
        with pytest.raises(Empty):
            end.read()
        assert (end.read_many(5), end.lag(), numbers(new)) == ([], 0, [0, 1])
        assert new.read_many(5) == []
        topic.append(b"2")
        assert (end.read().number, new.read().number) == (2, 2)
        assert topic.stats().blocks == 2


@pytest.mark.req("ZD11")
def test_messages_in_a_nak_file_of_dialect_c_are_delivered_again(tmp_path):
    """The original forgets them all."""
    path = left_by_a_server(tmp_path / "t", "C")
    nak = bytearray(zbus_cases.new_nak(5, "C"))
    for number, (offset, tries) in enumerate([(205, 3), (0, 1)]):
        entry = zbus_cases.pack_nak(zbus.Nak(offset, None, tries, 5), "C")
        at = zbus.nak_entry_at(number, "C")
        nak[at : at + len(entry)] = entry
    (path / "reader" / "r.nak").write_bytes(nak)
    (path / "reader" / "r.rdx").write_bytes(zbus.new_reader(5, 1, 0))
    with topic_at(path, dialect="C") as topic, topic.reader("r") as one:
        assert [(message.number, message.attempt) for message in one] == [(0, 2), (1, 4), (3, 1), (4, 1)]
