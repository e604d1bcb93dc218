"""A topic in use: messages come, blocks and readers go away, between two looks of somebody who has no lock; and a fork."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import Corrupt, Topic, inspect_reader
from qewqew_core.disk.files import Files
from qewqew_core.formats.zbus import Index
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.view import View


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic of five messages, each in a block of its own."""
    with Topic(tmp_path / "events", block_size=1) as topic:
        for number in range(5):
            topic.append(str(number).encode(), tag="eu")
    return tmp_path / "events"


def remove_all_but(path: Path, records: int) -> None:
    with Topic(path, max_records=records, slow_readers="move") as topic:
        topic.trim()


@pytest.fixture
def after_stale_looks(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it, and the next so many looks at the index are from before three blocks were removed; but none that comes after a
    block was missing, since the index said so before that was removed.
    """

    def prepare(looks: int) -> None:
        view = View(Topic(path).files, str(path), "B")
        stale, look, look_at_blocks = [view.index()] * looks, View.index, View.blocks
        view.close()
        remove_all_but(path, 2)

        def index(self: View) -> Index:
            return stale.pop() if stale else look(self)

        def blocks(self: View) -> range:
            if not stale:
                return look_at_blocks(self)
            before = stale.pop()
            return range(before.start, before.start + before.blocks)

        open_to_read = Files.open_to_read

        def opened(self: Files, path: str, **how: bool) -> int:
            try:
                return open_to_read(self, path, **how)
            except FileNotFoundError:
                if path.endswith(".zbus"):
                    stale.clear()
                raise

        monkeypatch.setattr(Files, "open_to_read", opened)
        monkeypatch.setattr(View, "index", index)
        monkeypatch.setattr(View, "blocks", blocks)

    return prepare


@pytest.mark.parametrize("looks", range(1, 9))
def test_a_block_that_is_removed_while_a_reader_is_inspected_is_no_damage(
    path: Path, after_stale_looks: Callable[[int], None], looks: int
) -> None:
    after_stale_looks(looks)
    seen = inspect_reader(path, "any")
    assert seen.records == 2
    assert seen.oldest is not None


@pytest.mark.parametrize("looks", [1, 2])
def test_a_block_that_is_removed_while_a_reader_is_made_is_no_damage(
    path: Path, after_stale_looks: Callable[[int], None], looks: int
) -> None:
    with Topic(path) as topic:
        after_stale_looks(looks)
        with topic.reader("new") as reader:
            assert [message.body for message in reader] == [b"3", b"4"]


@pytest.mark.parametrize("filter", [None, "eu"])
def test_a_reader_that_was_overtaken_is_inspected_as_it_will_go_on(path: Path, filter: str | None) -> None:
    """By what it said before, a sensor would be ready for what is not there, or with a filter never again."""
    with Topic(path) as topic, topic.reader("slow", filter):
        pass
    remove_all_but(path, 2)
    before = inspect_reader(path, "slow")
    assert (before.records, before.bytes) == (2, 2)
    with Topic(path) as topic, topic.reader("slow") as reader:
        assert (reader.stats(), reader.lost) == (before, 3)


def test_a_reader_that_is_deleted_meanwhile_is_not_counted_and_holds_nothing_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Topic, "readers", lambda self: ["gone"])
    with Topic(path, max_records=2) as topic:
        assert topic.stats().readers == {}
        assert topic.trim() == 3


def test_a_fork_leaves_the_descriptors_alone_that_a_closed_topic_once_had(path: Path) -> None:
    """The numbers are those of other files by then."""
    with Topic(path) as topic:
        topic.append(b"5")
    others = [os.open(path, os.O_RDONLY) for _ in range(20)]
    child = os.fork()
    if child == 0:
        try:
            for fd in others:
                os.fstat(fd)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for fd in others:
        os.close(fd)
    assert topic.path == str(path)  # it was there all the time


@pytest.mark.req("ZD2")
def test_a_reader_that_races_with_the_writer_loses_nothing(tmp_path: Path) -> None:
    """The original lost up to 158 of 25,000 messages in blocks of 600 bytes: it asked for the next block too late."""
    count = 25_000
    with Topic(tmp_path / "t", block_size=600, sync="never", _files=NoSync()) as topic:

        def work() -> None:
            for number in range(count):
                topic.append(b"%d" % number)

        found: list[bytes] = []
        with topic.reader("r", auto_commit=True) as reader:
            writer = threading.Thread(target=work)
            writer.start()
            while len(found) < count:
                found.append(reader.read(timeout=300).body)
                found += [message.body for message in reader.read_many(20)]
            writer.join()
            assert found == [b"%d" % number for number in range(count)]
            assert reader.lost == 0


@pytest.mark.req("ZD2")
@pytest.mark.parametrize("seed", range(3))
def test_nor_does_one_when_the_writer_goes_on_between_any_two_looks_at_the_index(tmp_path: Path, seed: int) -> None:
    """The same race without luck: each time that the reader looks at the index, the writer may append in front of it."""
    luck, count = random.Random(seed), 3000
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
        Topic(tmp_path / "t", block_size=600, sync="never", _files=NoSync()) as writer,
        Topic(tmp_path / "t", block_size=500, _files=racing) as topic,
        topic.reader("r", auto_commit=True) as reader,
    ):
        racing.busy = False
        while len(found) < count:
            found += [message.body for message in reader.read_many(luck.choice([1, 1, 5]))]
            assert found == [b"%d" % number for number in range(len(found))]
        racing.busy = True


class Late(Files):
    """The first look at a log passes a place before the frame comes there that is to stand there, and finds those behind it."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.frame, self.looks = begin, size, 0

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
            self.looks += 1
            if self.looks == 1:
                data = data[: self.begin - offset] + bytes(self.frame) + data[self.begin + self.frame - offset :]
        return data


@pytest.mark.parametrize("look", [lambda path, files: View.of(files, path), lambda path, files: pieces_of(files, path, 0)])
def test_a_frame_that_comes_while_the_log_is_read_is_no_damage_and_one_that_is_missing_still_then_is(
    tmp_path: Path, look: Callable[[str, Files], object]
) -> None:
    path = tmp_path / "events"
    log = path / "events.wal"
    with Topic(path) as topic:
        topic.append(b"first")
        begin = topic.writer().engine.log.end
        topic.append(b"second")
        size = topic.writer().engine.log.end - begin
        topic.append_many([b"third", b"fourth"])
        look(str(path), late := Late(begin, size))
        assert late.looks > 1
        data = log.read_bytes()
        log.write_bytes(data[:begin] + bytes(size) + data[begin + size :])
        with pytest.raises(Corrupt, match=f"offset {begin}"):
            look(str(path), Files())
        log.write_bytes(data)
