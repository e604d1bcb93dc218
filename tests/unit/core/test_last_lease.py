"""`QueueStats.last_lease`: what tells those who do not hold the lock that somebody has taken a batch since they looked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qewqew_core import Queue, QueueStats, Reader, Topic, inspect, inspect_reader

Held = tuple[Callable[[], QueueStats], Queue | Reader]


@contextmanager
def queue(path: Path) -> Iterator[Held]:
    with Queue(path / "q") as opened:
        opened.put_many([b"x"] * 4)
        yield lambda: inspect(path / "q"), opened


@contextmanager
def reader(path: Path) -> Iterator[Held]:
    with Topic(path / "t") as topic, topic.reader("r") as opened:
        topic.append_many([b"x"] * 4)
        yield lambda: inspect_reader(path / "t", "r"), opened


@pytest.mark.parametrize("kind", [queue, reader])
def test_it_is_later_after_each_lease_and_after_nothing_else(tmp_path: Path, kind: Callable[[Path], Iterator[Held]]) -> None:
    with kind(tmp_path) as (look, held):  # type: ignore[attr-defined]
        assert look().last_lease is None
        last = None
        for step, leases in (
            (lambda: held.lease("a", max_records=1, lease_timeout=60), True),
            (lambda: held.lease("a", lease_timeout=60), False),  # the same lease, extended
            (lambda: held.batches()[0].extend(), False),
            (lambda: held.lease("b", max_records=1), True),
            (lambda: held.batches()[0].nack(), False),
            (lambda: held.lease("c"), True),  # the same batch, again
            (lambda: held.batches()[1].ack(), False),
        ):
            time.sleep(0.002)  # times are milliseconds
            step()
            now = look().last_lease
            assert now is not None
            assert now == held.stats().last_lease
            assert (last is None or now > last) == leases
            last = now


def test_it_is_known_after_the_queue_was_closed(tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as opened:
        opened.put_many([b"x"] * 2)
        opened.lease("a", max_records=1)
        before = opened.stats().last_lease
    assert before is not None
    assert inspect(tmp_path / "q").last_lease == before
