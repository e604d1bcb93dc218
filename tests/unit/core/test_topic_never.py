"""A topic with ``sync="never"``: what is durable all the same, and what that relies on, which then must be durable too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from stride import Every

from qewqew_core import Message, Reader, Topic

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
    for stop, folder in power_cuts(disk, [*every(range(begin, end), quick=8), end], tmp_path):
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
    for stop, folder in power_cuts(disk, [*every(range(begin, end), quick=8), end], tmp_path):
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
