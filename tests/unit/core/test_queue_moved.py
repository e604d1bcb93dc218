"""A queue that is moved, removed or replaced while it is open: what stands at its path by then is another's, and stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import tree
from disk import NoSync

from qewqew_core import Broken, Queue
from qewqew_core.limits import LIMITS

MOVED = "moved, removed or replaced"


def move_away(path: Path) -> None:
    (archive := path.parents[1] / "archive").mkdir()
    for file in path.parent.iterdir():
        file.rename(archive / file.name)


def remove(path: Path) -> None:
    for file in path.parent.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def switch(path: Path) -> None:
    """The directory is a link, and leads elsewhere now."""
    (path.parents[1] / "other").mkdir()
    path.parent.unlink()
    path.parent.symlink_to(path.parents[1] / "other")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "first").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "first")
    return tmp_path / "current" / "q"


def opened(path: Path, **more: Any) -> Queue:
    return Queue(path, **{"chunk_size": 2000, "_files": NoSync(), **more})


def new_chunk(queue: Queue) -> None:
    queue.put_many([b"x" * 100] * 100)


def cut_log_back(queue: Queue) -> None:
    for _ in range(100):
        queue.put(b"x" * 100)


def spilled(queue: Queue) -> None:
    with queue.session() as session:
        for _ in range(40):
            session.put(b"x" * 100)


STEPS: dict[str, Callable[[Queue], object]] = {
    "close": Queue.close,
    "close after a put": lambda queue: (queue.put(b"more"), queue.close()),
    "close, emptied": lambda queue: (queue.get_many(1000), queue.close()),
    "new chunk": new_chunk,
    "cut the log back": cut_log_back,
    "spilled": spilled,
    "lease": lambda queue: queue.lease("another"),
    "lease a part": lambda queue: queue.lease("another", max_records=1),
    "ack": lambda queue: queue.find_batch("key").ack(),
    "nack": lambda queue: queue.find_batch("key").nack("why"),
    "dead letter": lambda queue: queue.find_batch("key").to_dead_letters("why"),
    "put back": lambda queue: queue.find_batch("key").put_back(),
    "clear": lambda queue: queue.clear(),
}


@pytest.mark.parametrize("away", [move_away, remove, switch])
@pytest.mark.parametrize("step", STEPS)
def test_no_step_touches_what_stands_at_the_path_of_an_open_queue_by_now(
    path: Path, away: Callable[[Path], None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 1000)
    monkeypatch.setattr(LIMITS, "log_bytes_at_close", 100)
    queue = opened(path, log_bytes=5000)
    queue.put_many([b"ours"] * 10)
    queue.lease("key", max_records=3)
    away(path)
    with opened(path) as other:
        other.put_many([b"theirs"] * 100)
    before = tree(path.parent.resolve())
    with pytest.raises(Broken, match=MOVED) as error:
        STEPS[step](queue)
    assert str(path.parent) in str(error.value)
    if not step.startswith("close"):
        with pytest.raises(Broken, match=MOVED):
            queue.put(b"more")
        queue.close()
    assert tree(path.parent.resolve()) == before
    with opened(path) as other:
        assert list(other) == [b"theirs"] * 100
        assert other.verify().ok


def test_what_was_moved_away_is_recovered_where_it_is(path: Path) -> None:
    queue = opened(path)
    queue.put_many([b"ours"] * 10)
    move_away(path)
    queue.put(b"later")  # into the log, which moved with the queue
    with pytest.raises(Broken, match=MOVED):
        queue.close()
    with opened(path.parents[1] / "archive" / "q") as found:
        assert list(found) == [*[b"ours"] * 10, b"later"]
        assert found.verify().ok
