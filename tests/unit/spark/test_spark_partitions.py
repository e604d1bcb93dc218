"""How a read is divided between tasks."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from qewqew_core.errors import BadArgument
from qewqew_spark.options import Options
from qewqew_spark.source.splitting import Piece, Split

MIB = 1 << 20


def piece(size: int, every: int = 1 << 16, start: int = 10) -> Piece:
    return Piece(0, start, start + size, range(start + every, start + size, every))


def sizes(split: Split, *pieces: Piece) -> list[list[int]]:
    """Of each task, the bytes of what it reads."""
    return [[part.end - part.start for part in task] for task in split(pieces)]


def asked(**options: object) -> Split:
    return Split.of(Options({name: str(value) for name, value in options.items()}))


@pytest.mark.parametrize(
    ("options", "total", "processors", "tasks"),
    [
        ({}, 100, 4, 1),
        ({}, 64 * MIB, 4, 4),
        ({}, 64 * MIB + 1, 4, 4),
        ({}, 256 * MIB, None, 2),
        ({}, 1280 * MIB, 2, 10),
        ({}, 1300 * MIB, 4, 12),
        ({}, 1282 * MIB, 3, 12),
        ({}, 12 * MIB, 8, 2),
        ({"maxPartitionBytes": 5}, 64, 64, 13),
        ({"maxPartitionBytes": "8m", "minPartitions": 3}, 64 * MIB, 1, 8),
        ({"maxPartitionBytes": "8m", "minPartitions": 9}, 64 * MIB, 1, 9),
    ],
)
def test_each_processor_gets_some_and_none_too_much(options, total, processors, tasks, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert asked(**options).count(total) == tasks


@pytest.mark.parametrize("text", ["64m", "64M", "64mb", " 64MB ", "65536k", "65536kb", "67108864", "67108864b"])
def test_sizes_are_written_as_in_spark(text: str) -> None:
    assert Options({"maxPartitionBytes": text}).size("maxPartitionBytes") == 64 * MIB


@pytest.mark.parametrize("text", ["", "m", "1.5m", "-1", "0", "0k", "64 m", "64mib", "64x", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match=r"'maxPartitionBytes' must be a number of bytes, 1 or more, like .* 64m or 1g, not "):
        asked(maxPartitionBytes=text)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_a_large_piece_is_divided_and_small_ones_share_a_task() -> None:
    assert sizes(asked(), piece(16 * MIB)) == [[8 * MIB], [8 * MIB]]
    assert sizes(asked(), *[piece(MIB)] * 20) == [[MIB] * 10, [MIB] * 10]
    assert sizes(asked(maxPartitionBytes=3 * MIB), *[piece(MIB, MIB)] * 7) == [[MIB] * 2, [MIB] * 3, [MIB] * 2]


def test_small_files_count_too() -> None:
    """As many bytes, and each file needs an answer of its store."""
    for files, tasks in (100, 1), (1_000, 2), (10_000, 6):
        divided = sizes(asked(), *[piece(100)] * files)
        assert [sum(task) for task in divided] == pytest.approx([100 * files / tasks] * tasks, abs=100)
    assert len(sizes(asked(maxPartitionBytes="1m"), *[piece(100)] * 10_000)) == 1, "whoever gives a size means bytes"


def test_there_are_as_many_tasks_as_were_asked_for_where_there_are_cuts() -> None:
    each = MIB // 8
    assert sizes(asked(minPartitions=5), piece(8 * each, each)) == [[2 * each], [each], [2 * each], [each], [2 * each]]
    assert sizes(asked(minPartitions=5), *[piece(1)] * 7) == [[1, 1], [1], [1, 1], [1], [1]]
    assert sizes(asked(minPartitions=9), *[piece(1)] * 7) == [[1]] * 7
    assert sizes(asked(minPartitions=5), piece(MIB, MIB)) == [[MIB]]
    assert sizes(asked(minPartitions=5)) == []
    assert sizes(asked(minPartitions=5), piece(0)) == [[0]]


@pytest.mark.parametrize("seed", range(50))
def test_tasks_are_even_and_have_everything_once_and_in_order(seed: int) -> None:
    random_ = random.Random(seed)
    pieces, number = [], 0
    for number in range(random_.randint(1, 30)):
        start, size = random_.randrange(1000), random_.choice([0, 1, 5000, 100_000, 5_000_000])
        pieces.append(Piece(number, start, start + size, sorted(random_.sample(range(start + 1, start + size), size // 1000))))
    total = sum(one.end - one.start for one in pieces)
    count = random_.choice([1, 2, 7, 64, 1000])
    tasks = Split(count, 1 << 40)(pieces)
    cuts = sum(len(one.cuts) for one in pieces) + sum(1 for one in pieces if one.end > one.start) - 1
    assert len(tasks) == max(1, min(count, cuts + 1))
    parts = [part for task in tasks for part in task]
    for one in pieces:
        ends = [(part.start, part.end) for part in parts if part.number == one.number]
        assert (ends[0][0], ends[-1][1]) == (one.start, one.end)
        assert all(before[1] == after[0] and before[1] in one.cuts for before, after in pairwise(ends))
    assert [part.number for part in parts] == sorted(part.number for part in parts)
    largest = max([end - start for one in pieces for start, end in pairwise([one.start, *one.cuts, one.end])])
    for task in tasks:
        if len(tasks) == count and largest < total / count:
            assert abs(sum(part.end - part.start for part in task) - total / count) <= largest
