"""The requirements Z1 to Z15 on topics, and the defects ZD1 to ZD15 of the original that ours must not have.

A compact proof for every number, on real files; the depth is in the other files of this directory. docs/requirements.md
lists them all. What "a zbus server has left" is made by hand: the files of a topic, and none of ours.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import zbus_cases
from disk import JournalDisk, NoSync, image

from qewqew_core import (
    BadArgument,
    CorruptQueue,
    DiskFull,
    Empty,
    Message,
    QueueFull,
    QueueLocked,
    Topic,
    appending,
    zbus,
)
from qewqew_core.files import Files

ROOT = Path(__file__).parents[3]
HEAD = 204
DIALECTS = ["B", "C"]


class Recording(Files):
    """Writes down what is done to which file, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def _note(self, what: str, fd: int) -> None:
        self.calls.append((what, os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._note(f"write {offset}" if offset < zbus.HEADER else "write", fd)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._note("sync", fd)
        super().sync(fd)

    def sync_directory(self, path: str) -> None:
        self.calls.append(("sync", os.path.basename(path)))
        super().sync_directory(path)

    def open(self, path: str, *, new: bool = False) -> int:
        if new:
            self.calls.append(("make", os.path.basename(path)))
        return super().open(path, new=new)

    def unlink(self, path: str) -> None:
        self.calls.append(("remove", os.path.basename(path)))
        super().unlink(path)

    def first(self, what: str, name: str) -> int:
        return next(place for place, call in enumerate(self.calls) if call[0].startswith(what) and call[1] == name)

    def last(self, what: str, name: str) -> int:
        return max(place for place, call in enumerate(self.calls) if call[0].startswith(what) and call[1] == name)


def topic_at(path: Path, **more: object) -> Topic:
    return Topic(path, **{"block_size": 500, "_files": NoSync(), **more})


def numbers(messages: object) -> list[int]:
    return [message.number for message in messages]


def bodies(messages: object) -> list[bytes]:
    return [message.body for message in messages]


def index_of(path: Path) -> zbus.Index:
    return zbus.unpack_index((path / f"{path.name}.idx").read_bytes(), "")


def entries_of(path: Path) -> list[zbus.Entry]:
    data, index = (path / f"{path.name}.idx").read_bytes(), index_of(path)
    return [zbus.unpack_entry(data, zbus.entry_at(block)) for block in range(index.start, index.start + index.blocks)]


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def server(path: Path, dialect: str = "B", count: int = 5, **more: object) -> Path:
    """The files of a topic as a zbus server leaves them: bodies 0, 1, 2 …"""
    with topic_at(path, dialect=dialect, **more) as topic:
        for number in range(count):
            topic.append(b"%d" % number, tag="abc"[number % 3])
    for left in (f"{path.name}.log", f"{path.name}.lock"):
        (path / left).unlink()
    for left in path.glob("data/*.sums"):
        left.unlink()
    return path


def messages_of(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(place, head, body) of each message of a block, by nothing but the format."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at + 200)
        yield at, data[at : at + HEAD], data[at + HEAD : at + HEAD + length]
        at += HEAD + length
    assert at == len(data)


def python(text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


# Z1 to Z15


def test_z01_dialect_b_is_written_by_default_which_software_for_a_reads_as_well(tmp_path):
    """It differs from A in one field, the offset, by which such software never goes."""
    with topic_at(tmp_path / "t") as topic:
        assert topic.dialect == "B"
        topic.append(b"one", tag="t", id="i", corr_offset=7, timestamp=9)
        topic.append_many([b"x" * 300, b"last"])
        topic.append(b"next block")
    offset = 0
    for entry in entries_of(tmp_path / "t"):
        for at, head, _ in messages_of((tmp_path / "t" / "data" / zbus.block_name(entry.base)).read_bytes()):
            assert struct.unpack_from(">q", head) == (entry.base + at,)  # A would have had `at`
            offset = entry.base + at
    assert offset > 500
    first = (tmp_path / "t" / "data" / zbus.block_name(0)).read_bytes()[:HEAD]
    offset_, timestamp, id, corr, number, tag, length = struct.unpack(">qq40sqq128si", first)
    assert (offset_, timestamp, id[:2], corr, number, tag[:2], length) == (0, 9, b"\1i", 7, 0, b"\1t", 3)


def test_z02_the_stored_offset_of_a_and_b_is_ignored(tmp_path):
    queue, body = zbus_cases.case("dialect-a", tmp_path)
    luck = random.Random(2)
    for path in (queue / "data").iterdir():
        for at, _, _ in messages_of(path.read_bytes()):
            patch(path, at, luck.randbytes(8))
    with Topic(queue, dialect="A") as topic, topic.reader("ours") as one:
        assert [message.offset for message in one] == [message["offset"] for message in body["messages"]]
        for message in body["messages"]:
            one.seek(offset=message["offset"])
            assert one.read().number == message["number"]


def test_z03_dialect_c_is_written_and_read_when_asked_for_and_never_guessed(tmp_path):
    with topic_at(tmp_path / "t", dialect="C") as topic:
        topic.append(b"one", tag="t", id="i", timestamp=9)
    (_, head, body), *_ = messages_of((tmp_path / "t" / "data" / zbus.block_name(0)).read_bytes())
    offset, crc, id, timestamp, number, tag, length = struct.unpack(">qQ40sqq128si", head)
    assert (offset, timestamp, number, length, id[:2], tag[:2], body) == (0, 9, 0, 3, b"\1i", b"\1t", b"one")
    assert crc == zlib.crc32(head[16:200])
    server(tmp_path / "c", "C")
    for wanted in (None, "A", "B"):
        with pytest.raises(BadArgument, match='written in dialect C; open it with dialect="C"'):
            Topic(tmp_path / "c", dialect=wanted)
    with Topic(tmp_path / "c", dialect="C") as topic:
        assert len(list(topic)) == 5


def test_z04_batches_roll_over_and_numbers_are_as_in_the_original(tmp_path):
    """The rules, on random batches; whole files of the original are compared in test_topic_golden.py."""
    luck = random.Random(4)
    batches = [[luck.randbytes(luck.randrange(150)) for _ in range(luck.choice([0, 1, 1, 2, 9]))] for _ in range(60)]
    with topic_at(tmp_path / "t", block_size=900) as topic:
        for batch in batches:
            assert topic.append_many(batch) == len(batch)
    blocks: list[list[list[bytes]]] = [[]]
    size = 0
    for batch in filter(None, batches):
        if size >= 900:  # a block is left by the write that finds it full, and never in the middle of one
            blocks.append([])
            size = 0
        blocks[-1].append(batch)
        size += sum(HEAD + len(body) for body in batch)
    number = base = 0
    for entry, expected in zip(entries_of(tmp_path / "t"), blocks, strict=True):
        data = (tmp_path / "t" / "data" / f"{base:020d}.zbus").read_bytes()
        assert (entry.base, entry.end) == (base, len(data))
        found = list(messages_of(data))
        assert [body for _, _, body in found] == [body for batch in expected for body in batch]
        for _, head, _ in found:
            assert struct.unpack_from(">q", head, 64) == (number,)
            number += 1
        base += len(data)
    assert index_of(tmp_path / "t") == (1, len(blocks), 0, number)


@pytest.mark.parametrize("size", [40, 64, 128, 129, 255, 256, 258, 259, 1000, 1 << 20])
def test_z05_length_bytes_count_bytes_and_what_is_too_long_is_refused_at_any_length(tmp_path, size):
    with topic_at(tmp_path / "t") as topic:
        topic.append(b"x", id="é" * 19, tag="é" * 63)
        data = (tmp_path / "t" / "data" / zbus.block_name(0)).read_bytes()
        assert (data[16], data[17:55].decode(), data[72], data[73:199].decode()) == (38, "é" * 19, 126, "é" * 63)
        before = zbus_cases.content(tmp_path / "t")
        for text in ("x" * size, "é" * (size // 2)):
            for limit, refused in (
                (39, lambda text: topic.append(b"y", id=text)),
                (127, lambda text: topic.append(b"y", tag=text)),
                (127, lambda text: topic.set_creator(text)),
                (127, lambda text: topic.set_extension(0, text)),
            ):
                if size > limit:
                    with pytest.raises(BadArgument, match="bytes of UTF-8"):
                        refused(text)
        assert zbus_cases.content(tmp_path / "t") == before


def test_z06_seek_by_offset_by_time_and_by_number_works_and_is_kept(tmp_path, monkeypatch):
    clock = 10_000
    monkeypatch.setattr(appending, "now_ms", lambda: clock)
    with topic_at(tmp_path / "t") as topic:
        for number in range(8):
            clock += 1000
            topic.append(b"%d" % number)
        offsets = [message.offset for message in topic]
    for how, number in [
        ({"number": 5}, 5),
        ({"offset": offsets[3]}, 3),
        ({"time": datetime.fromtimestamp(16, UTC)}, 5),
        ({"time": datetime.fromtimestamp(12.5, UTC)}, 2),
        ({"number": 0}, 0),
    ]:
        with topic_at(tmp_path / "t") as topic, topic.reader("r") as one:
            one.seek(**how)
        block, offset = zbus.unpack_position((tmp_path / "t" / "reader" / "r.rdx").read_bytes())
        assert entries_of(tmp_path / "t")[block].base + offset == offsets[number]  # for a server, too
        with topic_at(tmp_path / "t") as topic, topic.reader("r") as one:
            assert one.read().number == number


@pytest.mark.parametrize(("auto_commit", "next_number"), [(True, 1), (False, 0)])
def test_z07_the_position_is_stored_before_a_message_is_handed_out_or_after_it_was_committed(tmp_path, auto_commit, next_number):
    with topic_at(tmp_path / "t") as topic:
        topic.append_many([b"0", b"1"])
        crashing = """
        import os, sys
        from qewqew_core import Topic
        reader = Topic(sys.argv[1]).reader("r", auto_commit=sys.argv[2] == "True")
        print(reader.read().number, flush=True)
        os._exit(1)
        """
        assert python(crashing, topic.path, auto_commit).communicate()[0] == "0\n"
        with topic.reader("r") as one:
            assert one.read(timeout=30).number == next_number


TABLE = [  # filter, tag, whether they match
    *[("abc", "abc", 1), ("abc", "abc.def", 0), ("abc.*", "abc.def", 1), ("abc.*", "abc", 0), ("abc.*", "abc.d.e", 0)],
    *[("abc.#", "abc", 1), ("abc.#", "abc.d.e", 1), ("#", "abc", 1), ("#", None, 0), ("*", "abc", 1), ("*", None, 0)],
    *[("*", "a.b", 0), ("", "abc", 1), ("", None, 1), (";", "abc", 1), ("a;b", "b", 1), (" a", "a", 0), ("a. b", "a.b", 0)],
    *[("abc.#.def", "abc.x", 1), ("*.def", "abc.def", 1), ("#.def", "xyz", 1), ("abc.", "abc", 1), ("abc", "abc.", 1)],
    *[("abc..def", "abc..def", 1), ("abc.*.def", "abc..def", 1), (".abc", ".abc", 1), ("*.abc", ".abc", 1), (".", ".", 1)],
    *[(".", "abc", 0), (".", "..", 1), ("+", "abc", 0), ("abc.+", "abc.def", 0), ("ABC", "abc", 0), ("#", ".", 1)],
    *[("a.#.#", "a", 1), ("a.*", "a.", 0), ("a.*.#", "a", 0), ("a.#.c", "a", 1), ("   ", "abc", 1), ("#;", None, 0)],
]


def test_z08_filters_match_as_the_table_says_and_take_effect_at_once_and_for_good(tmp_path):
    assert len(TABLE) == 40
    with topic_at(tmp_path / "t", block_size=2000) as topic, topic.reader("r") as one, topic.reader("other") as other:
        topic.append_many(Message(b"", tag=tag) for _, tag, _ in TABLE)
        for number, (text, _, match) in enumerate(TABLE):
            one.set_filter(text)
            one.seek(number=number)
            assert (numbers(one)[:1] == [number]) == bool(match), TABLE[number]
        with pytest.raises(BadArgument):
            one.set_filter("x" * 128)
        other.set_filter("abc.*")
        matching = [number for number, (_, tag, _) in enumerate(TABLE) if zbus_cases.reference_matches("abc.*", tag)]
        assert numbers(other.read_many(2)) == matching[:2]
        other.set_filter(None)
        assert other.read().number == matching[1] + 1
        other.set_filter("x" * 127)
    with topic_at(tmp_path / "t") as topic, topic.reader("other") as other:
        assert other.filter == "x" * 127
        other.set_filter("")
    with topic_at(tmp_path / "t") as topic, topic.reader("other") as other:
        assert other.filter is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_z09_groups_masks_and_redelivery_with_window_time_out_and_count(tmp_path, stopped_clock, dialect):
    path = tmp_path / "t"
    with topic_at(path, dialect=dialect) as topic:
        topic.set_mask(zbus.ACK_REQUIRED | zbus.PAUSE)
        assert topic.header().mask == 72
        topic.append_many(b"%d" % number for number in range(10))
        with topic.reader("group", window=4, redeliver_after=0.1) as one, topic.reader("group", window=4) as member:
            with stopped_clock():
                assert numbers(one.read_many(10)) == [0, 1, 2, 3]  # exactly as many as the window has
                for consumer in (one, member):
                    with pytest.raises(QueueFull):
                        consumer.read()
            deadline = time.monotonic() + 30
            while member.peek().attempt == 1:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            again = member.read()
            assert (again.number, again.attempt) == (0, 2)
            member.commit(again)
            topic.copy_reader("group", "copy")
            with topic.reader("copy") as copy:
                assert copy.position().number == 1
        crashing = """
        import os, sys
        from qewqew_core import Topic
        reader = Topic(sys.argv[1]).reader("killed", window=2, redeliver_after=None)
        reader.read_many(9)
        os._exit(1)
        """
        assert python(crashing, path).wait() == 1
    with topic_at(path) as topic, topic.reader("killed", window=2) as one:  # they survive, whatever the dialect
        assert [(message.number, message.attempt) for message in one.read_many(9)] == [(0, 2), (1, 2)]
        assert one.commit() == 2


def test_z10_blocks_are_removed_by_age_by_size_and_when_all_have_read_them_first_from_the_index(tmp_path):
    files = Recording()
    with topic_at(tmp_path / "t", _files=files) as topic:
        for _ in range(10):
            topic.append(b"x" * 46)
        names = [zbus.block_name(500 * block) for block in range(5)]
        with topic.reader("behind") as behind, topic.reader("ahead", start="latest"):
            topic.slow_readers = "move"
            for bound, value, removed in [("max_bytes", 2000, 1), ("max_age", timedelta(milliseconds=1), 4)]:
                setattr(topic, bound, value)
                time.sleep(0.003)  # so that all are older than max_age
                files.calls.clear()
                left = 5 - removed
                topic.trim()
                assert index_of(tmp_path / "t")[1:3] == (left, removed)
                # The log says it, durably; then the index; then the files go.
                gone = min(place for place, call in enumerate(files.calls) if call[0] == "remove")
                assert files.first("sync", "t.log") < files.last("write 0", "t.idx") < files.last("sync", "t.idx") < gone
                assert sorted(os.listdir(tmp_path / "t" / "data"))[-left:] == names[removed:]
            assert behind.position() == (4, 0, 8)
            assert behind.lost == 8
        topic.max_age = topic.max_bytes = None
        topic.delete_committed = True
        for _ in range(2):
            topic.append(b"x" * 46)
        assert topic.stats().blocks == 2
        for name in topic.readers():
            with topic.reader(name) as one:
                list(one)
                one.commit()
        topic.trim()
        assert topic.stats().blocks == 1


@pytest.mark.parametrize("size", [10, 400_000])
def test_z11_messages_are_durable_then_the_index_says_so(tmp_path, size):
    files = Recording()
    with topic_at(tmp_path / "t", block_size=1 << 30, _files=files) as topic:
        topic.append(b"first")
        files.calls.clear()
        topic.append(b"x" * size)
        block = zbus.block_name(0)
        durable = files.last("sync", "t.log")  # a commit that is not too large has its messages in the log
        if size > 256 << 10:
            assert files.last("write", block) < files.last("sync", block) < files.first("write", "t.log")
        assert files.last("write", "t.log") < durable
        index = [place for place, call in enumerate(files.calls) if call[1] == "t.idx"]
        assert durable < min(index)
        assert [files.calls[place][0] for place in index] == ["write", "write 0"]  # endOffset and updatedTs, then MessageNumber


def test_z11_the_number_is_counted_anew_where_it_disagrees_and_a_short_block_is_no_zeros(tmp_path):
    path = server(tmp_path / "t")
    for wrong in (0, 3, 99):
        patch(path / "t.idx", 16, wrong.to_bytes(8))
        with topic_at(path) as topic:
            assert topic.stats().next == 5
            assert index_of(path).number == 5
        (path / "t.log").unlink()
    block = path / "data" / zbus.block_name(entries_of(path)[-1].base)
    good = block.read_bytes()
    block.write_bytes(good[:-1])
    with pytest.raises(CorruptQueue) as caught:
        topic_at(path)
    assert caught.value.path == str(block)
    assert block.read_bytes() == good[:-1]


def test_z12_a_new_block_is_there_before_its_entry_and_that_before_the_number_of_blocks(tmp_path):
    files = Recording()
    with topic_at(tmp_path / "t", block_size=1, _files=files) as topic:
        topic.append(b"first")
        files.calls.clear()
        topic.append(b"second")
        new = zbus.block_name(209)
        order = [
            files.first("make", new),
            files.first("sync", "data"),
            files.first("write", "t.log"),
            files.first("sync", "t.log"),
            files.first("write", "t.idx"),
            files.first("write 0", "t.idx"),
        ]
        assert order == sorted(order)
        assert not files.calls[order[4]][0].startswith("write 0")


def test_z12_stale_bytes_of_an_old_slot_are_not_taken_for_an_entry(tmp_path):
    """A server that was killed between the number of blocks and the entry: the slot has what was there 10,240 blocks ago."""
    for name, stale in (("zeros", zbus.Entry(0, 0, 0, 0)), ("old", zbus.Entry(5, 0, 0, 6))):
        path = server(tmp_path / name)
        index, last = index_of(path), entries_of(path)[-1]
        patch(path / f"{name}.idx", 4, (index.blocks + 1).to_bytes(4))
        patch(path / f"{name}.idx", zbus.entry_at(index.blocks), zbus.pack_entry(stale))
        with topic_at(path, block_size=1) as topic:
            assert bodies(topic) == [b"0", b"1", b"2", b"3", b"4"]
            assert topic.append(b"5") == 5
            assert bodies(topic)[-1] == b"5"
            assert topic.verify().ok
        assert entries_of(path)[-1].base == last.base + last.end


def test_z13_one_writer_and_readers_in_other_processes_that_see_new_blocks_without_reopening(tmp_path):
    with topic_at(tmp_path / "t", block_size=1) as topic:
        topic.append(b"0")
        other = python(
            """
            import sys
            from qewqew_core import QueueLocked, Topic
            with Topic(sys.argv[1], lock_timeout=0) as topic, topic.reader("r") as reader:
                try:
                    topic.append(b"no")
                except QueueLocked as error:
                    print("refused", error.pid, flush=True)
                while True:
                    message = reader.read(timeout=60)
                    print(message.number, reader.lag(), topic.stats().blocks, len(topic), flush=True)
                    sys.stdin.readline()
            """,
            topic.path,
        )
        try:
            assert other.stdout.readline() == f"refused {os.getpid()}\n"
            for number in range(5):
                if number:
                    topic.append(b"%d" % number)
                    other.stdin.write("\n")
                assert other.stdout.readline() == f"{number} {number + 1} {number + 1} {number + 1}\n"
        finally:
            other.kill()
            other.communicate()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_z14_bytes_behind_the_end_of_a_block_are_not_messages_and_are_cut_off(tmp_path, dialect):
    path = server(tmp_path / "t", dialect)
    last = entries_of(path)[-1]
    block = path / "data" / zbus.block_name(last.base)
    with block.open("ab") as file:
        file.write(block.read_bytes()[:HEAD] + b"not committed")
    with topic_at(path, dialect=dialect) as topic:
        assert block.stat().st_size == last.end
        assert len(list(topic)) == 5
        topic.append(b"5")
        assert bodies(topic)[-1] == b"5"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_z15_number_length_and_checksum_are_checked_when_a_message_is_read(tmp_path, dialect):
    path = server(tmp_path / "t", dialect, count=6, block_size=1 << 20)
    block = path / "data" / zbus.block_name(0)
    good = block.read_bytes()
    wrong = [(205 + 64, number.to_bytes(8)) for number in (3, 5, 6, 1 << 40)]
    wrong += [(205 + 200, (1 << 20).to_bytes(4)), (205 + 200, b"\xff\xff\xff\xfe")]
    with topic_at(path, dialect=dialect):
        pass  # the log knows of no checksums of what a server wrote
    for at, data in [*wrong, (205 + 72, b"\1z")] if dialect == "C" else wrong:
        patch(block, at, data)
        with topic_at(path) as topic, topic.reader("r", auto_commit=True) as one:
            one.seek(number=0)
            assert one.read().number == 0
            with pytest.raises(CorruptQueue) as caught:
                one.read()
            assert (caught.value.path, caught.value.offset) == (str(block), 205)
            with pytest.raises(CorruptQueue):
                one.read_many(10)
            assert one.position().number == 1
        block.write_bytes(good)


def test_z15_bodies_have_checksums_beside_the_blocks_in_files_that_a_server_does_not_know(tmp_path):
    with topic_at(tmp_path / "t") as topic:
        for number in range(6):
            topic.append(b"body %d" % number)
        assert topic.verify().unchecked == 0
    with topic_at(tmp_path / "t") as topic:
        assert topic.verify().unchecked == 0
    block = tmp_path / "t" / "data" / zbus.block_name(0)
    patch(block, HEAD + 3, b"?")
    with topic_at(tmp_path / "t") as topic:
        assert str(block) in topic.verify().problems[0]


# ZD1 to ZD15


@pytest.mark.parametrize("dialect", ["A", *DIALECTS])
def test_zd01_an_exactly_full_last_block_and_an_empty_one_behind_it_are_the_end(tmp_path, dialect):
    path = tmp_path / "t"
    with topic_at(path, dialect=dialect, block_size=410) as topic, topic.reader("end") as end:
        topic.append_many([b"0", b"1"])
        assert len(end.read_many(5)) == end.commit() == 2
    for _ in range(3):
        with topic_at(path, block_size=410) as topic, topic.reader("end") as end, topic.reader("new") as new:
            assert numbers(end) == []
            assert numbers(new) == [0, 1]
    # As a server leaves it, which makes an empty block when it opens a writer:
    server_ = server(tmp_path / "server", "B" if dialect == "A" else dialect, count=2, block_size=410)
    index = index_of(server_)
    patch(server_ / "server.idx", zbus.entry_at(1), zbus.pack_entry(zbus.Entry(1, 410, 0, 1)))
    patch(server_ / "server.idx", 0, zbus.pack_index(index._replace(blocks=2)))
    (server_ / "data" / zbus.block_name(410)).touch()
    (server_ / "reader" / "end.rdx").write_bytes(zbus.new_reader(0, 0, 410))
    with topic_at(server_, dialect=dialect, block_size=410) as topic, topic.reader("end") as end, topic.reader("new") as new:
        with pytest.raises(Empty):
            end.read()
        assert (end.read_many(5), end.lag(), numbers(new)) == ([], 0, [0, 1])
        assert new.read_many(5) == []
        topic.append(b"2")
        assert (end.read().number, new.read().number) == (2, 2)
        assert topic.stats().blocks == 2


def test_zd02_a_reader_that_races_with_the_writer_loses_nothing(tmp_path):
    """The original lost up to 158 of 25,000 messages in blocks of 600 bytes: it asked for the next block too late."""
    with topic_at(tmp_path / "t", block_size=600, sync="never") as topic:
        count = 25_000

        def work() -> None:
            for number in range(count):
                topic.append(b"%d" % number)

        found: list[bytes] = []
        with topic.reader("r", auto_commit=True) as one:
            writer = threading.Thread(target=work)
            writer.start()
            while len(found) < count:
                message = one.read(timeout=60)
                found.append(message.body)
                found += bodies(one.read_many(20))
            writer.join()
            assert found == [b"%d" % number for number in range(count)]
            assert one.lost == 0


@pytest.mark.parametrize("seed", range(3))
def test_zd02_nor_when_the_writer_goes_on_between_any_two_looks_at_the_index(tmp_path, seed):
    """The same race without luck: each time that the reader looks at the index, the writer may append in front of it."""
    luck = random.Random(seed)
    count = 3000
    found: list[bytes] = []

    class Racing(NoSync):
        appended = 0
        busy = True

        def read(self, fd: int, size: int, offset: int) -> bytes:
            if not self.busy and os.readlink(f"/proc/self/fd/{fd}").endswith(".idx"):
                self.busy = True
                for _ in range(luck.choice([0, 0, 0, 1, 2, 4])):
                    if self.appended < min(count, len(found) + 5):  # the reader must come to the end, again and again
                        writer.append(b"%d" % self.appended)
                        self.appended += 1
                self.busy = False
            return super().read(fd, size, offset)

    racing = Racing()
    with (
        topic_at(tmp_path / "t", block_size=600, sync="never") as writer,
        topic_at(tmp_path / "t", _files=racing) as topic,
        topic.reader("r", auto_commit=True) as one,
    ):
        racing.busy = False
        while len(found) < count:
            found += bodies(one.read_many(luck.choice([1, 1, 5])))
            assert found == [b"%d" % number for number in range(len(found))]
        racing.busy = True


@pytest.mark.parametrize("seed", range(8))
def test_zd03_what_was_appended_and_committed_is_there_after_a_power_cut(tmp_path, seed):
    """The original called no fsync: then the end of a block could cover zeros."""
    root = tmp_path / "live"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Topic(root / "t", block_size=700, _files=disk) as topic, topic.reader("r") as one:
        for number in range(6):
            topic.append(b"%d" % number * 50)
        one.read_many(3)
        one.commit()
        topic.append_many([b"x" * 150_000] * 2)  # larger than what the log carries
        calls = len(disk.calls)
        image(disk.calls[:calls], str(root), tmp_path / "cut", random.Random(seed))
    with Topic(tmp_path / "cut" / "t") as topic, topic.reader("r") as one:
        assert bodies(topic) == [b"%d" % number * 50 for number in range(6)] + [b"x" * 150_000] * 2
        assert one.read().number == 3
        assert topic.verify().ok
        assert topic.verify().unchecked == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_zd04_a_torn_or_flipped_body_is_an_error_and_never_delivered_as_zeros(tmp_path, dialect):
    path = tmp_path / "t"
    with topic_at(path, dialect=dialect) as topic:
        for number in range(4):
            topic.append(b"body %d" % number)
    block = path / "data" / zbus.block_name(0)
    good = block.read_bytes()
    for torn in (good[:-1], good[:-6], good[:-20], b""):
        block.write_bytes(torn)
        with topic_at(path) as topic, topic.reader("r") as one:
            with pytest.raises(CorruptQueue) as caught:
                one.read_many(10)
            assert caught.value.path == str(block)
            assert not topic.verify().ok
    for at in (HEAD, len(good) - 1):  # no field of the format covers it
        block.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with topic_at(path) as topic, topic.reader("r") as one:
            assert len(topic.verify().problems) == 1
            with pytest.raises(CorruptQueue):
                one.lease("k")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_zd05_a_server_killed_between_end_and_number_causes_no_number_to_be_given_twice(tmp_path, dialect):
    path = server(tmp_path / "t", dialect)
    patch(path / "t.idx", 16, (4).to_bytes(8))  # the last message is in its block, and not counted
    with topic_at(path, dialect=dialect) as topic, topic.reader("r") as one:
        assert topic.append(b"5") == 5
        assert numbers(one) == [0, 1, 2, 3, 4, 5]
    # And where a server has gone on by itself, and given a number twice, all are read.
    path = server(tmp_path / "twice", "B", count=3, block_size=1 << 20)
    patch(path / "data" / zbus.block_name(0), 2 * 205 + 64, (1).to_bytes(8))
    patch(path / "twice.idx", 16, (2).to_bytes(8))
    with topic_at(path) as topic, topic.reader("r") as one:
        assert bodies(one) == [b"0", b"1", b"2"]
        assert one.commit() == 3
        assert topic.append(b"3") == 2
        assert one.read().body == b"3"


def test_zd06_a_number_of_blocks_without_its_entry_does_not_have_block_0_overwritten(tmp_path):
    path = server(tmp_path / "t")
    first = (path / "data" / zbus.block_name(0)).read_bytes()
    index = index_of(path)
    patch(path / "t.idx", 4, (index.blocks + 1).to_bytes(4))  # and the entry is zeros: base offset 0
    with topic_at(path, block_size=1) as topic:
        for number in range(5, 8):
            topic.append(b"%d" % number)
        assert bodies(topic) == [b"%d" % number for number in range(8)]
    assert (path / "data" / zbus.block_name(0)).read_bytes() == first
    # Ours writes the entry first: at no moment is there a number of blocks without it.
    calls = Recording()
    with topic_at(tmp_path / "ours", block_size=1, _files=calls) as topic:
        topic.append(b"0")
        calls.calls.clear()
        topic.append(b"1")
    index_writes = [what for what, name in calls.calls if name == "ours.idx" and what.startswith("write")]
    assert index_writes.index("write 0") == len(index_writes) - 1


def test_zd07_a_second_writer_is_refused_and_counts_of_other_processes_are_never_stale(tmp_path):
    with (
        topic_at(tmp_path / "t", block_size=1) as topic,
        topic_at(tmp_path / "t", lock_timeout=0) as other,
        other.reader("r") as one,
    ):
        for number in range(20):
            topic.append(b"%d" % number)
            with pytest.raises(QueueLocked):
                other.append(b"no")
            assert one.lag() == 1
            assert one.read().number == number
            assert one.commit() == 1
            assert one.lag() == 0
        assert other.stats().next == 20


def test_zd08_threads_that_write_to_one_topic_do_not_interleave(tmp_path):
    with topic_at(tmp_path / "t", block_size=700) as topic:

        def work(name: int) -> None:
            for count in range(40):
                topic.append_many([b"%d %d %d" % (name, count, part) for part in range(3)])

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = bodies(topic)
        groups = [found[place : place + 3] for place in range(0, len(found), 3)]
        assert len(groups) == 160
        assert all([body.rsplit(b" ", 1)[1] for body in group] == [b"0", b"1", b"2"] for group in groups)
        assert all(len({body.rsplit(b" ", 1)[0] for body in group}) == 1 for group in groups)
        base = 0
        for entry in entries_of(tmp_path / "t"):
            assert entry.base == base
            assert (tmp_path / "t" / "data" / zbus.block_name(base)).stat().st_size == entry.end
            base += entry.end
        assert topic.verify().ok


def test_zd09_text_that_is_not_ascii_comes_back_and_stays_in_its_slot(tmp_path):
    with topic_at(tmp_path / "t") as topic:
        topic.append(b"x", id="é" * 19, tag="日.ü")
        topic.set_creator("ü" * 63)
        topic.set_extension(0, "é" * 63)
        topic.set_extension(1, "next")
        with topic.reader("r", filter="日.*") as one:
            message = one.read()
            assert (message.id, message.tag) == ("é" * 19, "日.ü")
            one.set_filter("é" * 63)
        for refused in (lambda: topic.set_creator("ü" * 64), lambda: topic.set_extension(0, "é" * 64)):
            with pytest.raises(BadArgument):
                refused()
    with topic_at(tmp_path / "t") as topic, topic.reader("r") as one:
        assert (topic.header().creator, topic.header().ext) == ("ü" * 63, ("é" * 63, "next", "", ""))
        assert one.filter == "é" * 63
    rdx = (tmp_path / "t" / "reader" / "r.rdx").read_bytes()
    assert (rdx[12], rdx[13:139].decode(), rdx[140:364]) == (126, "é" * 63, bytes(224))


def test_zd10_a_cleared_filter_is_cleared_at_once_and_a_refused_text_changes_nothing_in_memory(tmp_path):
    with topic_at(tmp_path / "t") as topic, topic.reader("r", filter="a") as one, topic.reader("r") as other:
        topic.append_many(Message(b"", tag=tag) for tag in "abab")
        assert one.read().number == 0
        one.set_filter(None)
        assert [one.read().number, other.read().number] == [1, 2]
        assert (one.filter, other.filter) == (None, None)
        with pytest.raises(BadArgument):
            one.set_filter("x" * 128)
        assert (one.filter, one.read().number) == (None, 3)
        topic.set_extension(2, "before")
        with pytest.raises(BadArgument):
            topic.set_extension(2, "x" * 128)
        assert topic.header().ext[2] == "before"


def test_zd11_seek_is_stored_time_finds_its_message_and_places_out_of_bounds_are_refused(tmp_path, monkeypatch):
    clock = 0
    monkeypatch.setattr(appending, "now_ms", lambda: clock)
    with topic_at(tmp_path / "t", block_size=410) as topic, topic.reader("r") as one:
        for number in range(6):
            clock += 1000
            topic.append(b"%d" % number)
        list(one)  # the original searched by where the reader stood
        one.commit()
        for wanted in range(6):
            one.seek(time=datetime.fromtimestamp(wanted + 1, UTC))
            assert one.read().number == wanted
        for bad in ({"offset": 1}, {"offset": 1 << 40}, {"number": 7}, {"number": -1}, {"offset": -1}):
            with pytest.raises(BadArgument):
                one.seek(**bad)
        one.seek(number=2)
    with topic_at(tmp_path / "t") as topic, topic.reader("r") as one:
        assert one.read().number == 2


def test_zd11_removing_drops_the_oldest_blocks_with_their_files_and_the_topic_goes_on(tmp_path):
    with topic_at(tmp_path / "t", block_size=410) as topic:
        for number in range(10):
            topic.append(b"%d" % number)
        topic.max_records = 3
        assert topic.trim() == 6
        assert numbers(topic) == [6, 7, 8, 9]
        assert topic.append(b"+") == 10
        assert numbers(topic) == [8, 9, 10]
    assert len(list((tmp_path / "t" / "data").glob("*.zbus"))) == 2


def test_zd11_messages_in_a_nak_file_of_dialect_c_are_not_lost(tmp_path):
    path = server(tmp_path / "t", "C")
    nak = zbus.new_nak(5, "C")[: zbus.HEADER] + b"".join(
        zbus.pack_nak(zbus.Nak(offset, None, tries, 5), "C") for offset, tries in ((205, 3), (0, 1))
    )
    (path / "reader" / "r.nak").write_bytes(nak.ljust(zbus.nak_size("C"), b"\0"))
    (path / "reader" / "r.rdx").write_bytes(zbus.new_reader(5, 1, 0))
    with topic_at(path, dialect="C") as topic, topic.reader("r") as one:
        found = [(message.number, message.attempt) for message in one]
        first = next(number for number, attempt in found if attempt == 1)
        assert found == [(0, 2), (1, 4), *((number, 1) for number in range(first, 5))]


def test_zd11_a_block_does_not_grow_over_two_gibibytes(tmp_path, monkeypatch):
    monkeypatch.setattr(zbus, "LARGEST_BLOCK", 1000)
    with topic_at(tmp_path / "t", block_size=1000) as topic:
        topic.append(bytes(700))
        topic.append(bytes(200))
        assert [entry.end for entry in entries_of(tmp_path / "t")] == [904, 404]


def test_zd12_a_consumer_that_crashes_loses_no_message(tmp_path):
    with topic_at(tmp_path / "t") as topic:
        topic.append_many(b"%d" % number for number in range(30))
        crashing = """
        import os, sys
        from qewqew_core import Topic
        reader = Topic(sys.argv[1]).reader("r", redeliver_after=None)
        for message in reader.read_many(4):
            reader.commit(message)
            if message.number % 5 == 4:
                break
            print(message.number, flush=True)
        os._exit(1)
        """
        done: set[int] = set()
        for _ in range(8):
            done |= {int(line) for line in python(crashing, topic.path).communicate()[0].split()}
        with topic.reader("r") as one:
            rest = set(numbers(one))
            assert not done & rest
            assert done | rest | {4, 9, 14, 19, 24, 29} == set(range(30))


def test_zd13_nothing_is_mapped_and_no_descriptor_stays_open(tmp_path):
    def open_files() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [name for name in found if name.startswith(str(tmp_path))]

    with topic_at(tmp_path / "t") as topic, topic.reader("r") as one, topic.session() as session:
        for _ in range(50):
            topic.append(b"x" * 200)
        list(one)
        one.lease("k")
        session.append(bytes(17 << 20))
        session.commit()
        topic.stats()
        topic.verify()
        next(iter(topic))
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert len(open_files()) < 30
        topic.delete_reader("r")
        assert (tmp_path / "t" / "reader").is_dir()
    assert open_files() == []
    with pytest.raises(BadArgument):
        topic_at(tmp_path / "t", dialect="C")
    assert open_files() == []


def test_zd14_a_failed_write_leaves_no_gap_in_the_numbers_and_a_copied_reader_has_the_offset(tmp_path):
    class Failing(NoSync):
        full = False

        def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
            if self.full and len(data) > 50:
                raise OSError(28, "No space left on device")
            super().write(fd, data, offset)

    files = Failing()
    with topic_at(tmp_path / "t", _files=files) as topic:
        topic.append_many([b"0", b"1"])
        files.full = True
        with pytest.raises(DiskFull):
            topic.append_many([b"x", b"y"])
        files.full = False
        assert topic.append(b"2") == 2
        assert numbers(topic) == [0, 1, 2]
        with topic.reader("r") as one:
            one.commit(one.read())
        topic.copy_reader("r", "copy")
        with topic.reader("copy") as copy:
            assert copy.position() == (0, 205, 1)


def test_zd15_a_reader_that_cannot_be_opened_leaves_no_file_and_lengths_do_not_wrap(tmp_path):
    with topic_at(tmp_path / "t") as topic:
        before = sorted((tmp_path / "t").rglob("*"))
        for bad in ({"start": 5}, {"start": "newest"}, {"filter": "x" * 128}, {"window": 0}, {"redeliver_after": -1}):
            with pytest.raises(BadArgument):
                topic.reader("r", **bad)
            assert topic.readers() == []
        left = set((tmp_path / "t").rglob("*")) - set(before)
        assert not [path for path in left if path.suffix in (".rdx", ".log", ".tmp")]
        for size in (256, 257, 258, 259, 512, 1 << 16):
            with pytest.raises(BadArgument):
                topic.append(b"x", id="i" * size)
            with pytest.raises(BadArgument):
                topic.append(b"x", tag="t" * size)
        assert len(topic) == 0


# The list

IDS = [*(f"Z{number}" for number in range(1, 16)), *(f"ZD{number}" for number in range(1, 16))]


def test_each_number_has_its_test_and_the_list_of_requirements_names_it():
    named: dict[str, list[str]] = {}
    for letters, number, rest in re.findall(r"^def test_(zd?)(\d\d)_(\w+)", Path(__file__).read_text(), re.MULTILINE):
        named.setdefault(f"{letters.upper()}{int(number)}", []).append(f"`test_{letters}{number}_{rest}`")
    rows = re.findall(r"^\| (ZD?\d+) \| (.+) \|$", (ROOT / "docs" / "requirements.md").read_text(), re.MULTILINE)
    assert [one for one, _ in rows] == IDS
    assert list(named) == IDS
    assert dict(rows) == {one: ", ".join(named[one]) for one in IDS}
