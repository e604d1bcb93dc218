"""Frames behind what is no whole frame of a log: they are found in a time that grows as the log does, whatever it is made of."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from qewqew_core import Corrupt, Queue, Topic, checksum, repair
from qewqew_core.disk import journal
from qewqew_core.disk.journal import BEGIN, Frame
from qewqew_core.queue import log
from qewqew_core.topic import reader_log, topic_log
from qewqew_core.topic.reader_state import Deliver, Range
from qewqew_core.topic.view import Position

FRAME = struct.Struct(">IIIB")  # docs/format/index.md: length, crc32, durable, kind
KINDS = (6, 7)


def whole_frame(data: bytes, generation: int, at: int) -> int | None:
    """Where the frame ends; the checksum is computed from its bytes."""
    length, crc, _, kind = FRAME.unpack_from(data, at)
    end = at + FRAME.size + length
    return end if kind and end <= len(data) and zlib.crc32(data[at + 8 : end], generation) == crc else None


def plainly_was_durable(data: bytes, generation: int, at: int, kinds: Collection[int]) -> bool:
    """Place after place."""
    for start in range(at + 1, len(data) - FRAME.size + 1):
        _, _, durable, kind = FRAME.unpack_from(data, start)
        if at < durable <= start and kind in kinds and whole_frame(data, generation, start):
            return True
    return False


def plainly_found(data: bytes, generation: int, at: int, kinds: Collection[int]) -> Iterator[Frame]:
    while at < len(data) - FRAME.size + 1:
        _, _, durable, kind = FRAME.unpack_from(data, at)
        end = whole_frame(data, generation, at) if durable <= at and kind in kinds else None
        if end is not None:
            yield Frame(at, kind, data[at + FRAME.size : end], end)
        at = end or at + 1


def some_log(some: random.Random, generation: int) -> tuple[bytes, list[int]]:
    """A head, a snapshot, commits, and where each frame begins; bodies may be logs themselves."""
    data, starts, durable = bytearray(journal.head(b"SOMELOG1", generation)), [], 0
    for number in range(some.randint(1, 12)):
        starts.append(len(data))
        body = some.randbytes(some.choice((0, 3, 40, 40, 400)))
        if some.random() < 0.3:
            body = some_log(some, some.choice((generation + 1, generation)))[0] if some.random() < 0.3 else b"\6" * len(body)
        data += journal.frame(5 if number == 0 else some.choice(KINDS), body, generation, durable)
        if some.random() < 0.5:
            durable = len(data)
    return bytes(data), starts


def damaged(some: random.Random, data: bytes, starts: list[int]) -> bytes:
    """As a kill, a power cut, or a bad disk leaves it."""
    bad = bytearray(data)
    for _ in range(some.randint(0, 2)):
        at = some.choice((some.randrange(BEGIN, len(bad)), some.choice(starts)))
        how = some.choice(("torn", "zeros", "bit", "moved"))
        if how == "torn":
            del bad[at:]
        elif how == "zeros":  # a page that did not get there
            bad[at : at + 64] = bytes(len(bad[at : at + 64]))
        elif how == "bit" and at < len(bad):
            bad[at] ^= 1 << some.randrange(8)
        elif how == "moved":
            bad[at:at] = b"\0\0\0"
        if len(bad) <= BEGIN:
            return bytes(bad) + bytes(20)
    return bytes(bad) + bytes(some.choice((0, 5, 500)))


def test_what_is_found_is_what_a_look_at_every_place_finds() -> None:
    some = random.Random(15)
    was, found = 0, 0
    for _ in range(2_500):
        generation = some.getrandbits(32)
        data, starts = some_log(some, generation)
        data = damaged(some, data, starts)
        end = max((one.end for one in journal.frames(data, generation)), default=BEGIN)
        for at in (end, BEGIN, some.choice(starts)):
            assert journal.was_durable(data, generation, at, KINDS) == plainly_was_durable(data, generation, at, KINDS)
            was += plainly_was_durable(data, generation, at, KINDS)
            behind = list(journal.find_frames(data, generation, at, range(1, 8)))
            assert behind == list(plainly_found(data, generation, at, range(1, 8)))
            found += len(behind)
    assert was > 500, was
    assert found > 5_000, found


def frames_everywhere(size: int, durable: int, kind: int) -> bytes:
    """Each thirteen bytes begin a frame that reaches to the end, and none is whole."""
    out = bytearray()
    while len(out) + FRAME.size < size:
        out += FRAME.pack(size - len(out) - FRAME.size, 12345, durable, kind)
    return bytes(out).ljust(size, b"\1")


def dense(size: int, durable: int, kind: int) -> bytes:
    """Two of eight places begin a frame."""
    return (bytes(4) + bytes([kind] * 4)) * (size // 8)


class Counted:
    """How many bytes checksums were computed of, in how many calls."""

    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def crc32(self, data: bytes, value: int = 0) -> int:
        self.bytes += len(data)
        self.calls += 1
        return zlib.crc32(data, value)


def checksummed(monkeypatch: pytest.MonkeyPatch, act: object) -> tuple[int, int]:
    counted = Counted()
    with monkeypatch.context() as patch:
        for module in (journal, checksum):
            patch.setattr(module, "crc32", counted.crc32)
        act()  # type: ignore[operator]
    assert counted.calls
    return counted.bytes, counted.calls


@pytest.mark.parametrize("hostile", [frames_everywhere, dense])
@pytest.mark.parametrize("kind_of_log", ["queue", "topic", "reader", "repair"])
def test_bytes_made_to_be_searched_cost_in_proportion_to_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind_of_log: str, hostile: object
) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put(b"x")
    with Topic(tmp_path / "t") as topic, topic.reader("r") as reader:
        topic.append(b"x")
        reader.commit(reader.read())
    path, replay, kind = {
        "queue": (tmp_path / "q.wal", log.replay, log.COMMIT),
        "repair": (tmp_path / "q.wal", log.salvage, log.COMMIT),
        "topic": (tmp_path / "t" / "t.wal", topic_log.replay, topic_log.COMMIT),
        "reader": (tmp_path / "t" / "state" / "r.wal", reader_log.replay, reader_log.COMMIT),
    }[kind_of_log]
    good = path.read_bytes().rstrip(b"\0")
    costs = {}
    for size in (30_000, 120_000):
        data = good + bytes(20) + hostile(size, len(good) + 1, kind)  # type: ignore[operator]
        bad = bytearray(data)
        if kind_of_log == "repair":
            bad[BEGIN + 10] ^= 1

        def read(data: bytes = bytes(bad)) -> None:
            try:
                replay(data, str(path))
            except Corrupt:
                assert kind_of_log == "repair"

        costs[size] = checksummed(monkeypatch, read)
    for size, (count, calls) in costs.items():  # the plain search: 1,100 times the bytes of the smaller one, 4,600 of the larger
        assert count < 200 * size
        assert calls < size


def test_a_queue_with_such_a_log_opens_and_one_that_is_damaged_before_it_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with Queue(path) as queue:
        queue.put_many([b"one", b"two"])
    name = tmp_path / "q.wal"
    good = name.read_bytes().rstrip(b"\0")
    name.write_bytes(good + bytes(13) + frames_everywhere(1 << 20, len(good) + 1, log.COMMIT))
    with Queue(path) as queue:
        assert list(queue) == [b"one", b"two"]
    good = name.read_bytes().rstrip(b"\0")
    end = max(one.start for one in journal.frames(good, journal.generation_of(good, log.MAGIC, "")))
    torn = bytearray(good)
    torn[end + 14] ^= 1
    name.write_bytes(bytes(torn) + frames_everywhere(1 << 20, len(good) + 1, log.COMMIT))
    repair(path)
    with Queue(path) as queue:
        assert list(queue) == [b"one", b"two"]


def test_however_many_checkpoints_a_log_has_the_chunks_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each used to set the pointers of every chunk: a log of 10 MiB took more than an hour."""
    with Queue(tmp_path / "q", chunk_size=22) as queue:
        queue.put_many([b"%08d" % number for number in range(500)])
    path = tmp_path / "q.wal"
    data = path.read_bytes().rstrip(b"\0")
    generation = journal.generation_of(data, log.MAGIC, str(path))
    data += journal.frame(log.CHECKPOINT, log.checkpoint(0, 0, 0), generation) * 500
    looks = []
    monkeypatch.setattr(log.State, "pointers", lambda state, real=log.State.pointers: (looks.append(1), real(state))[1])
    assert len(log.replay(data, str(path)).state.chain) == 500
    assert len(looks) == 1
    assert all(one.stored == pointers for one, pointers in log.replay(data, str(path)).state.pointers())


def test_no_more_messages_are_in_flight_than_a_window_can_have(tmp_path: Path) -> None:
    """A few bytes say that a million messages were handed out; a log may not say so again and again."""
    with Topic(tmp_path / "t") as topic:
        topic.reader("r").close()
    path = tmp_path / "t" / "state" / "r.wal"
    data = path.read_bytes().rstrip(b"\0")
    generation = journal.generation_of(data, reader_log.MAGIC, str(path))
    pending = [Range(Position(0, 0, 0), None)]
    for number in range(4):
        run = (number << 21, 0, 0, 0, range(1 << 20))
        data += journal.frame(reader_log.COMMIT, reader_log.pack(Deliver(1, None, [run], pending)), generation)
    with pytest.raises(Corrupt, match="more messages are in flight"):
        reader_log.replay(data, str(path))
