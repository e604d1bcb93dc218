"""After a failed fsync the kernel takes for written what it could not write. Who opens the store again reads it, from memory.
It must be written again: an fsync alone would write nothing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disk import Call, JournalDisk, NoSync, image
from plain import numbers

from qewqew_core import Broken, Queue, Topic
from qewqew_core.disk.files import failed_sync

LOST = "lost"
Act = Callable[[Any], None]


class LosingDisk(JournalDisk):
    """The n-th sync of a file fails, once. What was written to the file since the one before is readable, and never written."""

    left = 0

    def sync(self, fd: int) -> None:
        self.left -= 1
        if self.left:
            super().sync(fd)
            return
        self.calls.append(Call(LOST, self._node(fd)))
        raise failed_sync(OSError(5, "made to fail"), None)

    def written(self) -> list[Call]:
        """The calls without what was lost."""
        lost: set[int] = set()
        since: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            if call.kind in ("write", "allocate", "truncate"):
                since.setdefault(call.node, []).append(number)
            elif call.kind in ("sync", LOST):
                lost.update(since.pop(call.node, []) if call.kind == LOST else [])
                since.pop(call.node, None)
        return [call for number, call in enumerate(self.calls) if number not in lost and call.kind != LOST]


def opened(act: Act, path: Path, files: Any, sync: Any) -> Any:
    return Queue(path, chunk_size=1000, sync=sync, _files=files) if act is put else Topic(path, sync=sync, _files=files)


def put(queue: Queue) -> None:
    for record in numbers(0, 5):
        queue.put(record)
    queue.get()


def append(topic: Topic) -> None:
    for record in numbers(0, 5):
        topic.append(record)


def read(topic: Topic) -> None:
    append(topic)
    with topic.reader("one") as reader:
        reader.read_many(3)
        reader.commit()


def seen(path: Path) -> object:
    if path.is_file():
        with Queue(path, _files=NoSync()) as queue:
            assert queue.verify().ok
            return list(queue)
    with Topic(path, _files=NoSync()) as topic:
        assert topic.verify().ok
        found = [message.body for message in topic]
        if not topic.readers():
            return found
        with topic.reader("one") as reader:
            return found, [message.number for message in reader.read_many(1000)]


@pytest.mark.parametrize("act", [put, append, read], ids=["put", "append", "read"])
@pytest.mark.parametrize("before", ["commit", "never"])
@pytest.mark.parametrize("after", ["commit", "never"])
def test_what_a_failed_fsync_has_lost_is_written_again_by_who_opens_the_store(
    tmp_path: Path, act: Act, before: str, after: str
) -> None:
    """Whichever fsync fails after a kill, of the opening, of what follows, or of the close: what is closed then is on disk."""
    (tmp_path / "first").mkdir()
    first = JournalDisk(str(tmp_path / "first"))
    killed = opened(act, tmp_path / "first" / "store", first, before)
    act(killed)
    for number in range(1, 100):
        folder = tmp_path / str(number)
        image(first.calls, first.root, folder, None)
        disk = LosingDisk(str(folder), follows=(first.calls, first.root))
        disk.left = number
        failed = True
        for _ in range(2):
            with suppress(Broken):
                with opened(act, folder / "store", disk, after) as store:
                    act(store)
                failed = False
                break
        assert not failed
        image(disk.calls, disk.root, tmp_path / "now", None)
        wanted = seen(tmp_path / "now" / "store")
        shutil.rmtree(tmp_path / "now")
        for luck in range(3):
            image(disk.written(), disk.root, end := tmp_path / f"{number} {luck}", random.Random(luck))
            assert seen(end / "store") == wanted, f"fsync {number}"
        if disk.left > 0:
            assert number > 3
            break
    killed.close()
