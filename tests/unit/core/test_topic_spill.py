"""What a session of a topic appends is in a file once it is too much for memory, and is stored as if it had never been there."""

from __future__ import annotations

import errno
import random
import tracemalloc
from pathlib import Path
from typing import Literal

import pytest
from conftest import Clock
from disk import NoSync

from qewqew_core import DiskFull, Message, Topic
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD
from qewqew_core.limits import LIMITS
from qewqew_core.topic import outgoing

ODD = Message(b"", "ü" * 63, "i" * 39, 0, 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is needed soon, and read in parts that the largest bodies do not fit in."""
    monkeypatch.setattr(outgoing, "READ_BYTES", 400)
    for name, value in {"topic_spill_bytes": 2000, "write_bytes": 300, "piece_bytes": 1500}.items():
        monkeypatch.setattr(LIMITS, name, value)


def messages(dialect: str) -> list[Message]:
    draw = random.Random(dialect)
    sizes = [draw.choice([0, 1, 50, 190, 399, 400, 401, 1000, 5000]) for _ in range(120)]
    others = [
        Message(draw.randbytes(size), draw.choice([None, "a.b"]), draw.choice([None, "id"]), 0 if dialect == "C" else -size, size)
        for size in sizes
    ]
    return [*others[:60], ODD, *others[60:]]


def blocks(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in (path / "data").glob("*.zbus")}


@pytest.mark.parametrize("dialect", ["B", "C"])
@pytest.mark.parametrize("inline", [0, 1 << 30])
@pytest.mark.parametrize("largest", [30_000, zbus.LARGEST_BLOCK])
def test_the_blocks_are_those_of_one_append(
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Literal["B", "C"],
    inline: int,
    largest: int,
) -> None:
    monkeypatch.setattr(LIMITS, "inline_bytes", {"commit": inline, "never": inline})
    monkeypatch.setattr(zbus, "LARGEST_BLOCK", largest)
    ready = messages(dialect)
    with Topic(tmp_path / "one", dialect=dialect, block_size=20_000, _files=NoSync()) as topic:
        assert topic.append_many(ready, "key") == len(ready)
    with Topic(tmp_path / "session", dialect=dialect, block_size=20_000, _files=NoSync()) as topic, topic.session() as session:
        for at in range(0, len(ready), 7):
            session.append_many(ready[at : at + 7])
        assert not blocks(tmp_path / "session")[zbus.block_name(0)]
        assert session.commit("key") == len(ready)
        session.append(b"forgotten")
        assert session.commit("key") == len(ready)
        assert topic.verify().problems == []
    assert blocks(tmp_path / "session") == blocks(tmp_path / "one")
    assert len(blocks(tmp_path / "one")) == (5 if largest == 30_000 else 1)
    with Topic(tmp_path / "session", block_size=1) as topic:  # the log says the same
        assert [one.body for one in topic] == [one.body for one in ready]


def test_messages_without_a_timestamp_get_that_of_the_commit(tmp_path: Path, small: None, clock: Clock) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.session() as session:
        for number in range(20):
            session.append(b"x" * 300, timestamp=number if number % 2 else None)
        clock.ms = 1_900_000_000_000
        session.commit()
        assert [one.timestamp for one in topic] == [number if number % 2 else 1_900_000_000_000 for number in range(20)]


def test_memory_does_not_grow_with_what_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "topic_spill_bytes", 1 << 20)

    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.session() as session:
        tracemalloc.start()
        try:
            for _ in range(100):
                session.append_many([Message(bytes(100), "tag")] * 500)
            assert session.commit() == 50_000
            assert tracemalloc.get_traced_memory()[1] < 3 << 20
        finally:
            tracemalloc.stop()
        assert topic.stats().bytes == 5_000_000


def test_a_large_body_that_was_spilled_is_not_in_memory_again(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(24 << 20)
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.session() as session:
        session.append_many([body, b"behind it"])
        session.append(b"")
        tracemalloc.start()
        try:
            session.commit()
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        assert [one.body for one in topic] == [body, b"behind it", b""]


def test_what_was_rolled_back_leaves_nothing_in_what_comes_next(tmp_path: Path, small: None) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.session() as session:
        for _ in range(20):
            session.append(b"gone" * 100)
        session.rollback()
        for number in range(20):
            session.append(b"%02d" % number * 100)
        assert session.commit() == 20
        assert [one.body for one in topic] == [b"%02d" % number * 100 for number in range(20)]
        assert session.commit() == 0


def test_a_commit_for_which_there_was_no_room_is_repeated_from_the_file(tmp_path: Path, small: None) -> None:
    class FullDisk(NoSync):
        left = 1 << 30

        def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(fd, data, offset)

    files = FullDisk()
    with Topic(tmp_path / "t", _files=files) as topic, topic.session() as session:
        bodies = [b"%03d" % number * 500 for number in range(400)]
        session.append_many(bodies[:300])
        session.append_many(bodies[300:])
        files.left = 300_000
        with pytest.raises(DiskFull):
            session.commit()
        assert len(topic) == 0
        files.left = 1 << 30
        assert session.commit() == 400
        assert [one.body for one in topic] == bodies
        assert sum(map(len, blocks(tmp_path / "t").values())) == sum(HEAD + len(one) for one in bodies)
