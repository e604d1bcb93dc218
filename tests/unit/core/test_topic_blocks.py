"""Which messages are in which block; and in which order blocks, log and index are written, so that a kill leaves them whole."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import Topic
from qewqew_core.formats import zbus


class Recording(NoSync):
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

    def sync_directory(self, path: str) -> None:
        self.calls.append(("sync", os.path.basename(path)))

    def open(self, path: str, *, new: bool = False) -> int:
        if new:
            self.calls.append(("make", os.path.basename(path)))
        return super().open(path, new=new)

    def unlink(self, path: str) -> None:
        self.calls.append(("remove", os.path.basename(path)))
        super().unlink(path)

    def places(self, what: str, name: str) -> list[int]:
        return [place for place, call in enumerate(self.calls) if call[0].startswith(what) and call[1] == name]

    def to_the_index(self) -> list[str]:
        return [what for what, name in self.calls if name == "t.idx"]


def index_of(path: Path) -> zbus.Index:
    return zbus.unpack_index((path / "t.idx").read_bytes(), "")


@pytest.mark.req("Z4")
def test_a_block_is_left_by_the_write_that_finds_it_full_and_never_in_the_middle_of_one(tmp_path: Path) -> None:
    luck = random.Random(4)
    batches = [[luck.randbytes(luck.randrange(150)) for _ in range(luck.choice([0, 1, 1, 2, 9]))] for _ in range(60)]
    with Topic(tmp_path / "t", block_size=900, _files=NoSync()) as topic:
        for batch in batches:
            assert topic.append_many(batch) == len(batch)
    blocks: list[list[bytes]] = [[]]
    for batch in filter(None, batches):
        if sum(zbus.HEAD + len(body) for body in blocks[-1]) >= 900:
            blocks.append([])
        blocks[-1] += batch
    index, data = index_of(tmp_path / "t"), (tmp_path / "t" / "t.idx").read_bytes()
    number = base = 0
    for block, expected in enumerate(blocks):
        entry, at = zbus.unpack_entry(data, zbus.entry_at(block)), 0
        stored = (tmp_path / "t" / "data" / f"{base:020d}.zbus").read_bytes()
        for body in expected:
            message = zbus.unpack_message(stored, at, base, "B")
            assert (message.number, message.body) == (number, body)
            number, at = number + 1, at + zbus.HEAD + len(body)
        assert (entry.base, entry.end, len(stored)) == (base, at, at)
        base += at
    assert index == (1, len(blocks), 0, number)


@pytest.mark.req("Z11")
@pytest.mark.parametrize("size", [10, 400_000])
def test_messages_are_durable_and_then_the_index_says_so(tmp_path: Path, size: int) -> None:
    files = Recording()
    with Topic(tmp_path / "t", _files=files) as topic:
        topic.append(b"first")
        files.calls.clear()
        topic.append(b"x" * size)
        block = zbus.block_name(0)
        durable = files.places("sync", "t.wal")[-1]
        if size > 256 << 10:  # of a commit that is not too large the log has the messages
            assert files.places("write", block)[-1] < files.places("sync", block)[-1] < files.places("write", "t.wal")[0]
        assert files.places("write", "t.wal")[-1] < durable < files.places("", "t.idx")[0]
        assert files.to_the_index() == ["write", "write 0"]  # endOffset and updatedTs, then MessageNumber


@pytest.mark.req("Z12", "ZD6")
def test_a_new_block_is_there_before_its_entry_and_that_before_the_number_of_blocks(tmp_path: Path) -> None:
    files = Recording()
    with Topic(tmp_path / "t", block_size=1, _files=files) as topic:
        topic.append(b"first")
        files.calls.clear()
        topic.append(b"second")
        order = [
            files.places(*call)[0]
            for call in [("make", zbus.block_name(209)), ("sync", "data"), ("write", "t.wal"), ("sync", "t.wal"), ("", "t.idx")]
        ]
        assert order == sorted(order)
        to_the_index = files.to_the_index()
        assert to_the_index.index("write 0") == len(to_the_index) - 1 > 0


@pytest.mark.req("Z10")
@pytest.mark.parametrize(("bound", "left"), [("max_bytes", 4), ("max_records", 2)])
def test_blocks_are_removed_from_the_log_durably_then_from_the_index_and_then_their_files(
    tmp_path: Path, bound: str, left: int
) -> None:
    files = Recording()
    with Topic(tmp_path / "t", block_size=500, _files=files) as topic:
        for _ in range(10):
            topic.append(b"x" * 46)  # 250 bytes: two fill a block
        setattr(topic, bound, {"max_bytes": 2000, "max_records": 4}[bound])
        files.calls.clear()
        topic.trim()
        assert index_of(tmp_path / "t")[1:3] == (left, 5 - left)
        gone = min(place for place, call in enumerate(files.calls) if call[0] == "remove")
        first = files.places("sync", "t.wal")[0]
        assert first < files.places("write 0", "t.idx")[-1] < files.places("sync", "t.idx")[-1] < gone
        kept = [zbus.block_name(500 * block) for block in range(5 - left, 5)]
        assert sorted(os.listdir(tmp_path / "t" / "data"))[-left:] == kept
