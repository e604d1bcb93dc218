"""Records that are large enough to be written as they are, beside small ones that are joined before."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from disk import NoSync
from plain import plain

from qewqew_core import Queue, Stage
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS

LARGE = LIMITS.joined_bytes


def mixed(seed: int) -> list[bytes]:
    """Some 12 MB: of each size many in a row, so that a run has only large ones, only small ones, or both."""
    draw = random.Random(seed)
    sizes = [0, 1, 100, LARGE - 2, LARGE - 1, LARGE, 3 * LARGE, 60_000, 65_535]
    return [draw.randbytes(size) for size in draw.choices(sizes, k=30) for _ in range(draw.choice([1, 3, 30]))]


class InParts(Files):
    """A system that writes a part of what it is given, and counts how often it was asked."""

    calls = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write, write_all = os.pwrite, os.pwritev

        def part(fd: int, data: bytes, offset: int) -> int:
            self.calls += 1
            return write(fd, data[: max(1, len(data) // 2)], offset)

        def part_of_all(fd: int, buffers: Sequence[bytes], offset: int) -> int:
            assert 1 < len(buffers) <= 1024, "a system takes no more"
            self.calls += 1
            whole = buffers[: len(buffers) // 2]
            return write_all(fd, [*whole, buffers[len(whole)][:1]], offset)

        monkeypatch.setattr(os, "pwrite", part)
        monkeypatch.setattr(os, "pwritev", part_of_all)


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 3000])
def test_all_buffers_are_written_though_the_system_writes_parts_of_them(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(count)
    buffers = [draw.randbytes(draw.randrange(50)) for _ in range(count)]
    path = tmp_path / "file"
    path.write_bytes(b"before")
    files = InParts(monkeypatch)
    fd = os.open(path, os.O_RDWR)
    files.write_all(fd, buffers, 6)
    os.close(fd)
    assert path.read_bytes() == b"before" + b"".join(buffers)
    assert files.calls > 1


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("by", ["put_many", "session", "stage"])
def test_records_of_all_sizes_stand_in_the_chunks_as_the_original_would_write_them(
    by: str, sync: Literal["commit", "never"], tmp_path: Path
) -> None:
    path, records = tmp_path / "q", mixed(1)
    with Queue(path, chunk_size=2 << 20, sync=sync, _files=NoSync()) as queue:
        queue.put(b"first")
    if by == "stage":
        with Stage(path, chunk_size=2 << 20, sync=sync) as stage:
            stage.put_many(records)
    else:
        with Queue(path, chunk_size=2 << 20, sync=sync) as queue:
            if by == "put_many":
                queue.put_many(records)
            else:
                with queue.session() as session:
                    session.put_many(records)
    assert plain(path) == [b"first", *records]
    with Queue(path) as queue:
        assert queue.verify().ok
        assert queue.get_many(len(records) + 1) == [b"first", *records]


@pytest.mark.parametrize("size", [300, 10_240])
def test_what_a_put_of_many_records_needs_in_memory_is_little_beside_them(size: int, tmp_path: Path) -> None:
    records = [bytes(size)] * (30_000_000 // size)
    with Queue(tmp_path / "q", sync="never", _files=NoSync()) as queue:
        tracemalloc.start()
        queue.put_many(records)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 12_000_000
