"""What an exchange of directories with the Java classes has brought to light, without Java."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest

from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Message
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_inspection import inspect_reader


def filled(path: Path, count: int = 10, **settings: Any) -> Topic:
    topic = Topic(path / "queue", **settings)
    topic.append_many([Message(b"%d" % number, tag="a" if number < 5 else "b") for number in range(count)])
    return topic


def moved(path: Path, name: str, block: int, offset: int) -> None:
    """As a zbus server does it."""
    with open(path / "queue" / "reader" / f"{name}.rdx", "r+b") as file:
        file.write(zbus.pack_position(block, offset))


def test_a_message_may_be_given_twice_to_commit(tmp_path: Path) -> None:
    with filled(tmp_path) as topic:
        with topic.reader("r") as reader:
            one, two = reader.read_many(2)
            assert reader.commit(one, one) == 1
            assert reader.nack(two, two) == 1
        with topic.reader("r") as reader:  # its log must be readable: it once said the commit twice
            assert reader.read().number == 1


def test_redeliveries_that_a_new_filter_does_not_match_count_as_read(tmp_path: Path) -> None:
    with filled(tmp_path) as topic, topic.reader("r") as reader:
        reader.read_many(2)
        reader.nack()
        reader.set_filter("b")
        batch = reader.lease("k")  # it once said for ever that there is nothing
        assert batch is not None
        assert len(batch) == 5
        assert (reader.read_many(9), reader.stats().records) == ([], 0)


def test_a_batch_that_is_put_back_where_the_reader_was_moved_back_since_comes_once(tmp_path: Path) -> None:
    with filled(tmp_path) as topic:
        with topic.reader("r") as reader:
            batch = reader.lease("k", 5)
            batch.to_dead_letters()
            reader.seek(number=3)
            batch.put_back()
            found = reader.read_many(20)
            assert [one.number for one in found] == list(range(10))
            assert reader.commit(*found) == 10
        assert topic.stats().readers == {"r": 0}


def test_what_a_killed_consumer_had_comes_before_what_is_new_also_one_by_one(tmp_path: Path) -> None:
    with filled(tmp_path) as topic:
        if (pid := os.fork()) == 0:
            Topic(topic.path).reader("r").read_many(4)
            os._exit(0)
        os.waitpid(pid, 0)
        with topic.reader("r") as reader:
            assert [reader.read().number for _ in range(10)] == list(range(10))


@pytest.mark.parametrize("time", [(1 << 63) - 1, 0])
def test_statistics_of_messages_with_any_timestamp(tmp_path: Path, time: int) -> None:
    with Topic(tmp_path / "queue") as topic:
        topic.append(b"", timestamp=time)
        assert topic.stats().messages == 1
        assert topic.stats().oldest.year in (1970, 9999)
        assert topic.reader("r").stats().records == 1
        assert inspect_reader(topic.path, "r").records == 1


@pytest.mark.parametrize(("slot", "text"), [(bytes([127]) + b"a" * 126 + b"\xc3", "a" * 126), (bytes([200]) + b"a" * 200, None)])
def test_a_filter_that_java_wrote_over_the_end_of_its_slot(tmp_path: Path, slot: bytes, text: str | None) -> None:
    with filled(tmp_path) as topic:
        topic.reader("r").close()
        with open(tmp_path / "queue" / "reader" / "r.rdx", "r+b") as file:
            file.seek(zbus.FILTER_AT)
            file.write(slot)
        with topic.reader("r") as reader:
            assert reader.filter == text
        with topic.reader("r") as reader:
            assert reader.filter == text


def test_statistics_and_trim_know_where_a_zbus_server_has_put_a_reader(tmp_path: Path) -> None:
    with filled(tmp_path, block_size=600) as topic:
        for _ in range(9):
            topic.append(bytes(400))
        with topic.reader("r", auto_commit=True) as reader:
            reader.read_many(100)
    moved(tmp_path, "r", 0, 205)
    with Topic(tmp_path / "queue", block_size=600, max_records=1, slow_readers="hold") as topic:
        assert topic.stats().readers == {"r": 18}
        assert inspect_reader(topic.path, "r").records == 18
        assert topic.trim() == 0  # it once removed what the reader was to read
        with topic.reader("r") as reader:
            assert reader.read().number == 1
            assert reader.lost == 0


def test_a_position_is_never_one_that_was_removed(tmp_path: Path) -> None:
    with filled(tmp_path, block_size=600, max_records=1, slow_readers="move") as topic, topic.reader("r") as reader:
        for _ in range(3):
            topic.append(bytes(600))
        first = topic.stats().first
        assert first > 0
        assert reader.position().number == first
        topic.copy_reader("r", "s")
        with topic.reader("s") as other:
            assert other.position().number == first
            assert other.lost == 0


def append_as_a_server(path: Path, bodies: list[bytes]) -> None:
    """To the first block, as the index has it."""
    index_path, block_path = path / "queue" / "queue.idx", path / "queue" / "data" / zbus.block_name(0)
    image = bytearray(index_path.read_bytes())
    index, entry = zbus.unpack_index(bytes(image), ""), zbus.unpack_entry(bytes(image), zbus.entry_at(0))
    data, end, number = bytearray(block_path.read_bytes()[: entry.end]), entry.end, index.number
    for body in bodies:
        data += zbus.pack_head("B", end, 1, b"", 0, number, b"", len(body)) + body
        end, number = len(data), number + 1
    block_path.write_bytes(data)
    image[: zbus.INDEX_HEAD] = zbus.pack_index(index._replace(number=number))
    image[zbus.entry_at(0) : zbus.entry_at(0) + zbus.ENTRY] = zbus.pack_entry(entry._replace(end=end))
    index_path.write_bytes(image)


def test_a_server_that_appends_between_two_of_our_openings_is_believed(tmp_path: Path) -> None:
    filled(tmp_path).close()
    append_as_a_server(tmp_path, [b"theirs", b"too"])
    with Topic(tmp_path / "queue") as topic:
        assert [one.body for one in topic][9:] == [b"9", b"theirs", b"too"]
        assert topic.append(b"ours") == 12
        report = topic.verify()
    assert report.ok
    assert report.unchecked > 0  # nobody kept a checksum of what was there when the server came


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_a_server_that_appends_after_a_kill_of_ours_is_believed(tmp_path: Path, sync: Literal["commit", "never"]) -> None:
    filled(tmp_path).close()
    if (pid := os.fork()) == 0:
        killed = Topic(tmp_path / "queue", sync=sync)
        killed.append(b"ours")
        os._exit(0)
    os.waitpid(pid, 0)
    append_as_a_server(tmp_path, [b"theirs", b"too"])
    with Topic(tmp_path / "queue") as topic:  # with "never" it once took their messages for what a power cut leaves
        assert [one.body for one in topic][10:] == [b"ours", b"theirs", b"too"]
        assert topic.verify().ok


def test_a_key_is_forgotten_if_a_server_wrote_over_its_messages(tmp_path: Path) -> None:
    filled(tmp_path).close()
    index_path = tmp_path / "queue" / "queue.idx"
    before = index_path.read_bytes()
    if (pid := os.fork()) == 0:
        killed = Topic(tmp_path / "queue")
        killed.append_many([b"lost"], key="k")
        os._exit(0)
    os.waitpid(pid, 0)
    index_path.write_bytes(before)  # as if it had been killed when the commit was in the log, and not yet in the index
    append_as_a_server(tmp_path, [b"theirs", b"too"])
    with Topic(tmp_path / "queue") as topic:
        assert topic.append_many([b"lost"], key="k") == 1  # the retry; that it was done already would be a lie
        assert [one.body for one in topic][10:] == [b"theirs", b"too", b"lost"]


def test_a_block_that_a_server_left_and_its_index_does_not_know_is_kept_aside(tmp_path: Path) -> None:
    filled(tmp_path, block_size=600).close()
    data = tmp_path / "queue" / "data"
    for ours in ("queue.log", "queue.lock"):
        (tmp_path / "queue" / ours).unlink()  # the topic is a server's, and a power cut has taken the index back
    unknown = data / zbus.block_name(10_000)
    unknown.write_bytes(b"messages")
    with Topic(tmp_path / "queue") as topic:
        assert len(topic) == 10
    assert not unknown.exists()
    assert (data / (unknown.name + ".unknown")).read_bytes() == b"messages"
