"""A topic with ``sync="never"``: what is durable all the same, and what that relies on, which then must be durable too."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from disk import JournalDisk, NoSync, image
from stride import Every

from qewqew_core import Message, Reader, Topic
from qewqew_core.topic.view import View

RAWS = [b"raw %d" % number for number in range(10)]


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Topic, Reader]]:
    with Topic(folder / "t", _files=NoSync()) as topic, topic.reader("r", "raw") as reader:
        yield topic, reader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A topic that was closed, and all of it is durable."""
    root = tmp_path / "work"
    root.mkdir()
    with opened(root) as (topic, _):
        topic.append_many([Message(body, "raw") for body in RAWS])
    return root


def power_cuts(disk: JournalDisk, stops: Iterable[int], tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The number of calls, and what is left after the power was cut behind them."""
    for stop in stops:
        for luck in range(6):
            image(disk.calls[:stop], disk.root, tmp_path / "image", random.Random(f"{stop}.{luck}"))
            yield stop, tmp_path / "image"
            shutil.rmtree(tmp_path / "image")


def close_both(topic: Topic, reader: Reader) -> None:
    reader.close()
    topic.close()


AFTER: dict[str, Callable[[Topic, Reader], object]] = {
    "nothing": lambda topic, reader: None,
    "the reader's log is synced": lambda topic, reader: reader.set_filter("raw;more"),
    "the topic's log is synced": lambda topic, reader: topic.writer().engine.durable(
        topic.writer().engine.log.position, always=True
    ),
    "both": close_both,
}


@pytest.mark.parametrize("more", [b"", b"x" * 70_000], ids=["carried by the log", "large"])
@pytest.mark.parametrize("block_size", [1000, 1 << 20])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("key", [None, "key"])
def test_a_session_that_reads_and_appends_is_durable_when_it_returns_and_never_torn(
    root: Path, tmp_path: Path, every: Every, more: bytes, block_size: int, after: str, key: str | None
) -> None:
    disk = JournalDisk(str(root))
    topic = Topic(root / "t", sync="never", block_size=block_size, _files=disk)
    reader = topic.reader("r", redeliver_after=None)
    topic.append_many([Message(b"before" + more)])
    session = topic.session()
    raws = session.read_many(reader, 5)
    session.append_many([Message(one.body + more, "out") for one in raws])
    begin = len(disk.calls)
    session.commit(key)
    returned = len(disk.calls)
    AFTER[after](topic, reader)
    end = len(disk.calls)
    session.close()
    reader.close()
    topic.close()
    for stop, folder in power_cuts(disk, [*every(range(begin, end), quick=16, full=4), end], tmp_path):
        with opened(folder) as (found, again):
            outs = [one.body.rstrip(b"x") for one in found if one.tag == "out"]
            left = [one.body for one in again.read_many(100)]
            assert (outs, left) in (([], RAWS), (RAWS[:5], RAWS[5:])), f"after call {stop}"
            if stop >= returned:
                assert outs, f"lost after call {stop}, though commit had returned at {returned}"
                assert b"before" in [one.body.rstrip(b"x") for one in found]
                if key is not None:
                    assert found.append_many([b"again"], key=key) == 5
                    assert b"again" not in [one.body for one in found]
            assert found.verify().ok


def test_a_session_of_several_readers_alone_is_durable_too(root: Path, tmp_path: Path, every: Every) -> None:
    with opened(root) as (topic, _):
        topic.reader("second", "raw").close()
    disk = JournalDisk(str(root))
    topic = Topic(root / "t", sync="never", _files=disk)
    both = [topic.reader(name, redeliver_after=None) for name in ("r", "second")]
    session = topic.session()
    for reader in both:
        session.read_many(reader, 4)
    begin = len(disk.calls)
    session.commit()
    end = len(disk.calls)
    for stop, folder in power_cuts(disk, [*every(range(begin, end), quick=16, full=4), end], tmp_path):
        with Topic(folder / "t", _files=NoSync()) as found, found.reader("r") as r, found.reader("second") as second:
            left = len(r.read_many(100)), len(second.read_many(100))
            assert left in ([(6, 6)] if stop == end else [(6, 6), (10, 10)]), f"after call {stop}"
    session.close()
    for reader in both:
        reader.close()
    topic.close()


MOVED: dict[str, Callable[[Topic, Reader, Reader], object]] = {
    "move_to": lambda topic, reader, other: reader.move_to(other.position()),
    "move_to, forced": lambda topic, reader, other: reader.move_to(other.position(), force=True),
    "copy_reader onto one": lambda topic, reader, other: topic.copy_reader("other", "r"),
    "set_filter": lambda topic, reader, other: reader.set_filter("new"),
}


@pytest.mark.parametrize("call", MOVED)
def test_what_says_that_it_is_durable_is(root: Path, tmp_path: Path, call: str) -> None:
    with opened(root) as (topic, reader):
        topic.append(b"new", tag="new")
        topic.reader("other", start=4).close()
    disk = JournalDisk(str(root))
    with Topic(root / "t", sync="never", _files=disk) as topic, topic.reader("r") as reader, topic.reader("other") as other:
        MOVED[call](topic, reader, other)
        stop = len(disk.calls)
    for _, folder in power_cuts(disk, [stop], tmp_path):
        with Topic(folder / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
            expected = [b"new"] if call == "set_filter" else RAWS[4:]
            assert [message.body for message in reader.read_many(100)] == expected


# What another process, with its own ``sync``, leases from it


@pytest.mark.parametrize("more", [b"", b"x" * 5000], ids=["carried by the log", "large"])
@pytest.mark.parametrize("block_size", [1000, 1 << 20])
@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("end", ["leased", "returned"])
def test_what_was_leased_is_there_whatever_the_sync_of_who_has_appended_it(
    root: Path, tmp_path: Path, every: Every, more: bytes, block_size: int, sync: Literal["commit", "never"], end: str
) -> None:
    """Also what lies before it: where a block lacks something, the log is not believed any more."""
    disk = JournalDisk(str(root))
    writer = Topic(root / "t", sync="never", block_size=block_size, _files=disk)
    for number in range(10):
        writer.append(b"new %d" % number + more, tag="raw" if number > 3 else "other")
    with Topic(root / "t", sync=sync, _files=disk) as topic, topic.reader("r") as reader:
        begin = len(disk.calls)
        batch = reader.lease("key", max_records=13)
        assert batch is not None
        expected = [*batch]
        assert len(expected) == 13
        leased = len(disk.calls)
        if end == "returned":
            batch.nack()
        stop = len(disk.calls)
    for at, folder in power_cuts(disk, [*every(range(begin, stop), quick=16, full=4), stop], tmp_path):
        with opened(folder) as (found, again):
            found.append_many([Message(b"later", "raw")] * 20)
            assert found.verify().ok
            if at < leased and not again.batches():
                continue
            held = again.lease("another" if end == "returned" and at == stop else "key")
            assert held is not None
            assert [*held] == expected
            if at >= leased:
                assert [one.body for one in found][10 : 10 + 7 + 3][:4] == [b"new %d" % number + more for number in range(4)]
    writer.close()


def test_the_mark_of_an_unsynced_topic_is_there_until_all_is_on_disk(tmp_path: Path) -> None:
    """Before, it went before the blocks were synced, and a new block could be seen before it came."""
    unsynced: list[str] = []

    class Watched(NoSync):
        """Looks before each call that writes."""

        def sync(self, fd: int) -> None:
            self.look(f"before the sync of {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")

        def write(self, fd: int, data: bytes, offset: int) -> None:
            super().write(fd, data, offset)
            self.look("after a write")

        def look(self, when: str) -> None:
            if view is not None and not view.is_unsynced() and blocks.unsynced and view.latest().number > durable:
                unsynced.append(when)

    view: View | None = None
    durable = 0
    files = Watched()
    with Topic(tmp_path / "t", sync="never", block_size=1000, _files=files) as topic:
        topic.append(b"first")
        blocks = topic.writer()._blocks
        durable = 1
        view = View(NoSync(), str(tmp_path / "t"), "B")
        assert view.is_unsynced()
        topic.append_many([b"x" * 900] * 3)
        topic.append(b"x" * 6000)
        with topic.writer().engine.exclusive():
            topic.writer().rotate()
        assert not view.is_unsynced()
        durable = view.latest().number
        topic.append(b"y" * 6000)
        assert view.is_unsynced()
    assert not view.is_unsynced()
    view.close()
    assert unsynced == []
