"""Mask, times, creator and extensions of a topic and of its readers: zbus's `Index` and `QueueReader` share them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zbus_cases
from disk import JournalDisk, NoSync, image

from qewqew_core import BadArgument, Closed, Topic
from qewqew_core.formats import zbus
from qewqew_core.topic.reader import Reader

PATCHES: list[tuple[str, tuple[Any, ...]]] = [
    ("set_mask", (zbus.PAUSE | zbus.ACK_REQUIRED,)),
    ("set_creator", ("Ü" * 63,)),
    ("set_extension", (0, "a")),
    ("set_extension", (3, "x" * 127)),
    ("set_extension", (0, None)),
]


@pytest.mark.req("ZD9")
def test_a_reader_has_the_header_that_a_topic_has(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("r") as reader, topic.reader("r") as other:
        topic.append_many([b"0", b"1"])
        for owner in (topic, reader):
            for name, arguments in PATCHES:
                getattr(owner, name)(*arguments)
            found = owner.header()
            assert (found.mask, found.creator, found.ext) == (72, "Ü" * 63, ("", "", "", "x" * 127))
            assert found.updated == found.created > 1_600_000_000_000
        assert other.header() == reader.header(), "whoever shares the reader sees it at once"
        reader.commit(reader.read())
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        assert reader.header() == found, "committing and closing leave it alone"
        assert reader.read().number == 1
    with pytest.raises(Closed):
        reader.header()


@pytest.mark.parametrize(
    "patch",
    [
        lambda one: one.set_mask(1 << 31),
        lambda one: one.set_mask("1"),
        lambda one: one.set_creator("x" * 128),
        lambda one: one.set_creator(b"x"),
        lambda one: one.set_extension(4, "x"),
        lambda one: one.set_extension(-1, "x"),
        lambda one: one.set_extension(0, "\ud800"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, patch: Callable[[Any], None]) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        before = (tmp_path / "t" / "reader" / "r.rdx").read_bytes()
        with pytest.raises(BadArgument):
            patch(reader)
        assert (tmp_path / "t" / "reader" / "r.rdx").read_bytes() == before


@pytest.mark.parametrize(("name", "arguments"), PATCHES)
def test_it_is_durable_when_the_call_returns(tmp_path: Path, name: str, arguments: tuple[Any, ...]) -> None:
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Topic(root / "t", _files=disk) as topic, topic.reader("r") as reader:
        topic.append(b"0")
        reader.set_extension(0, "before")
        getattr(reader, name)(*arguments)
        wanted, calls = reader.header(), list(disk.calls)
    for fate in range(20):
        image(calls, str(root), tmp_path / "cut", random.Random(fate))
        with Topic(tmp_path / "cut" / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
            assert reader.header() == wanted
        shutil.rmtree(tmp_path / "cut")


def test_the_mask_says_whether_a_reader_is_temporary(tmp_path: Path) -> None:
    """As on a server; the other bits are the application's, and stay."""
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        topic.append(b"0")
        with topic.reader("r") as reader:
            reader.set_mask(zbus.PAUSE | zbus.DELETE_ON_EXIT)
            reader.keep()
            assert reader.header().mask == zbus.PAUSE
        with topic.reader("r", temporary=True) as reader:
            assert reader.header().mask == zbus.PAUSE | zbus.DELETE_ON_EXIT
            reader.set_mask(zbus.EXCLUSIVE)
        assert topic.readers() == ["r"]
        with topic.reader("r") as reader:
            reader.set_mask(zbus.DELETE_ON_EXIT)
        assert topic.readers() == []


def test_the_header_of_a_reader_of_the_original_is_read_and_written_as_it_does(tmp_path: Path) -> None:
    queue, body = zbus_cases.case("header-fields", tmp_path)
    stored = body["reader_files"]["r"]
    with Topic(queue, _files=NoSync()) as topic, topic.reader("r") as reader:
        header = reader.header()
        assert (header.mask, header.creator) == (stored["mask"], stored["creator"])
        assert header.updated == header.created == body["clock_start"] + 500, "it has written since, and touched neither"
        reader.set_mask(0)
        reader.set_creator("hong")
        data = bytearray((queue / "reader" / "r.rdx").read_bytes())
        assert data[364:368] == bytes(4)
        assert data[384:392] == b"\4hongone", "the end of a longer one stays behind a shorter one"


def order_of_entries(queue: Path, body: dict[str, Any]) -> None:
    index = (queue / "queue.idx").read_bytes()
    for block in body["index"]["blocks"]:
        at = 1024 + 28 * (block["number"] % 10_240)
        fields = [int.from_bytes(index[at + begin : at + end]) for begin, end in ((0, 8), (8, 16), (16, 20), (20, 28))]
        assert fields == [block["created"], block["base_offset"], block["end_offset"], block["updated"]]


@pytest.mark.parametrize("name", zbus_cases.cases())
def test_an_entry_is_created_base_end_updated_and_the_head_is_never_touched_again(tmp_path: Path, name: str) -> None:
    """As `docs/format/topics.md` says of zbus, by files of the original; then ours have gone on in them."""
    queue, body = zbus_cases.case(name, tmp_path)
    order_of_entries(queue, body)
    head = zbus.unpack_common((queue / "queue.idx").read_bytes())
    assert head.updated == head.created == body["clock_start"]
    if body["dialect"] == "C":
        return
    with Topic(queue, _files=NoSync()) as topic:
        before = topic.stats().next
        topic.append(b"more")
        topic.set_creator("me")
        index = (queue / "queue.idx").read_bytes()
        last = zbus.unpack_index(index, "")
        entry = zbus.unpack_entry(index, zbus.entry_at(last.start + last.blocks - 1))
        assert entry.updated > body["clock_start"] + 10**9
        assert topic.header().updated == topic.header().created == body["clock_start"]
        assert topic.stats().next == before + 1


def test_only_the_consumers_of_a_deleted_reader_are_told(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        reader: Reader = topic.reader("r")
        topic.delete_reader("r")
        with pytest.raises(Closed):
            reader.set_mask(1)
        reader.close()
        assert topic.readers() == []
