"""How many bytes a partition reads, and which segments share a task."""

from __future__ import annotations

import os

import pytest

from qewqew_core.batch.manifest import Segment
from qewqew_spark.options import Options
from qewqew_spark.source.batches import BatchPart, Split, partition_bytes

MIB = 1 << 20


def segment(size: int, every: int = 1 << 16) -> Segment:
    places = range(every, size, every)
    return Segment("orders.qew.1", 0, size, size, "0" * 8, tuple((at, at) for at in places), ("0" * 8,) * len(places))


def sizes(split: Split, *segments: Segment) -> list[list[int]]:
    """Of each task, the bytes of what it reads."""
    parts = [BatchPart(None, None, part, 0) for some in split(segments) for part in some]  # type: ignore[arg-type]
    return [[part.segment.end - part.segment.start for part in bundle.parts] for bundle in split.bundles(parts)]


@pytest.mark.parametrize(
    ("given", "total", "processors", "size"),
    [
        (None, 100, 4, 8 * MIB),
        (None, 64 * MIB, 4, 16 * MIB),
        (None, 64 * MIB, None, 32 * MIB),
        (None, 1 << 40, 64, 32 * MIB),
        (5, 1 << 40, 64, 5),
    ],
)
def test_each_processor_gets_some_and_none_too_much(
    given: int | None, total: int, processors: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert partition_bytes(given, total) == size


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_a_large_segment_is_divided_and_small_ones_share_a_task() -> None:
    assert sizes(Split(Options({})), segment(16 * MIB)) == [[8 * MIB], [8 * MIB]]
    assert sizes(Split(Options({})), *[segment(MIB)] * 20) == [[MIB] * 10, [MIB] * 10]
    assert sizes(Split(Options({"maxPartitionBytes": str(3 * MIB)})), *[segment(MIB)] * 7) == [[MIB] * 3, [MIB] * 3, [MIB]]


def test_there_are_as_many_tasks_as_were_asked_for_where_boundaries_allow_it() -> None:
    asked = Split(Options({"minPartitions": "5"}))
    assert len(sizes(asked, segment(MIB, MIB // 8))) >= 5
    assert len(sizes(asked, *[segment(1)] * 7)) >= 5
    assert sizes(asked, segment(MIB, MIB)) == [[MIB]]
    assert sizes(asked) == []
