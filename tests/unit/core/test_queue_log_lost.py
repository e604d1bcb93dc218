"""The log of a queue is removed, by a cleaner or a person: nobody takes the rest for a Java program's queue."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import tree
from disk import JournalDisk, NoSync, image
from plain import crashed, forget_log, numbers
from stride import Every
from test_java_states import Original

from qewqew_core import Corrupt, Queue, Stage, inspect, repair
from qewqew_core.queue import paths
from qewqew_core.tools.listing import find

LOST = "the transaction log is missing: .*q.stamp says that there was one"


def opened(path: Path, **more: object) -> Queue:
    return Queue(path, **{"chunk_size": 1000, "_files": NoSync(), **more})


def crash_after_puts(folder: Path) -> Path:
    with opened(folder / "q") as queue:
        queue.put_many(numbers(0, 20), key="k")
        return crashed(folder, "found")


def crash_of_large_commits(folder: Path) -> Path:
    """Their records are in chunk files, whose pointers say that they are empty."""
    with opened(folder / "q", chunk_size=1 << 20) as queue:
        queue.put_many([bytes(1000)] * 600)
        return crashed(folder, "found")


def closed(folder: Path) -> Path:
    with opened(folder / "q") as queue:
        queue.put_many(numbers(0, 20), key="k")
    return crashed(folder, "found")


def closed_and_empty(folder: Path) -> Path:
    with opened(folder / "q") as queue:
        queue.put_many(numbers(0, 20), key="k")
        queue.clear()
    return crashed(folder, "found")


def closed_with_batches(folder: Path) -> Path:
    with opened(folder / "q") as queue:
        queue.put_many(numbers(0, 20))
        queue.lease("a", max_records=3).ack()
        queue.lease("b", max_records=3)
    return crashed(folder, "found")


STATES = [crash_after_puts, crash_of_large_commits, closed, closed_and_empty, closed_with_batches]
LOOKS: dict[str, Callable[[Path], object]] = {
    "open": opened,
    "inspect": inspect,
    "stage": lambda path: stage(path),
}


def stage(path: Path) -> None:
    with Stage(path, chunk_size=1000) as one:
        one.put(b"x")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("made", STATES)
def test_every_look_says_that_the_log_was_lost_and_keeps_every_byte(
    tmp_path: Path, made: Callable[[Path], Path], look: str
) -> None:
    (tmp_path / "live").mkdir()
    path = made(tmp_path / "live")
    os.unlink(f"{path}{paths.LOG}")
    before = tree(path.parent)
    with pytest.raises(Corrupt, match=LOST):
        LOOKS[look](path)
    after = tree(path.parent)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() <= {"q.staged"}
    assert find(str(path.parent)).queues == ["q"]


@pytest.mark.parametrize("made", STATES)
def test_a_repair_goes_on_without_the_log_and_deletes_no_record(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    (tmp_path / "live").mkdir()
    path = made(tmp_path / "live")
    os.unlink(f"{path}{paths.LOG}")
    chunks = {data for name, data in tree(path.parent).items() if Path(name).suffix[1:].isdecimal() and any(data[10:])}
    report = repair(path, _files=NoSync())
    assert not report.ok
    assert any("log is missing" in damage.what or "no log" in damage.what for damage in report.damage)
    assert chunks <= set(tree(path.parent).values()), "each chunk file with records is there, or set aside"
    with opened(path) as queue:
        assert queue.verify().ok
        queue.put(b"new")


def test_a_stamp_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with opened(path) as queue:
        queue.put_many(numbers(0, 3), key="k")
    path.with_name("q.stamp").unlink()
    with opened(path) as queue:
        assert len(queue) == 3
    path.with_name("q.wal").unlink()
    with pytest.raises(Corrupt, match=LOST):
        opened(path)


def test_a_queue_of_a_java_program_needs_no_log(tmp_path: Path) -> None:
    path = tmp_path / "q"
    original = Original(path, 1000)
    original.enqueue(b"java's")
    original.close()
    with opened(path) as queue:
        assert list(queue) == [b"java's"]
        queue.put(b"ours")
    path.with_name("q.wal").unlink()
    with pytest.raises(Corrupt, match=LOST):
        opened(path)
    forget_log(path)
    with opened(path) as queue:
        assert list(queue) == [b"java's", b"ours"]


@pytest.mark.parametrize("power", [False, True])
def test_the_stamp_never_speaks_of_a_log_that_was_not_lost(tmp_path: Path, every: Every, power: bool) -> None:
    """Killed, or without power, after any call: a new queue, one that is emptied and closed, again and again."""
    (root := tmp_path / "work").mkdir()
    disk, sizes = JournalDisk(str(root)), [(0, 0)]
    for number in range(3):
        with opened(root / "q", _files=disk) as queue:
            queue.put_many(numbers(0, 2), key="k" if number == 2 else None)
            sizes.append((len(disk.calls), 2))
            sizes.append((10**9, 0))
            queue.get_many(5)
            sizes[-1] = (len(disk.calls), 0)
    folder = tmp_path / "image"
    for stop in every(range(len(disk.calls) + 1), quick=3, full=1):
        for chance in range(4 if power else 1):
            image(disk.calls[:stop], str(root), folder, random.Random(f"{stop}.{chance}") if power else None)
            with opened(folder / "q") as queue:
                now = [records for end, records in sizes if end <= stop][-1]
                assert len(queue) in {now, 2 - now}
            shutil.rmtree(folder)
