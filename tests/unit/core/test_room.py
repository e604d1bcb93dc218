"""A disk with room for so many bytes, for many numbers of them: a call of a batch has happened, or `DiskFull` says it has not.

Afterwards the same object works on, and the same call works when there is room (docs/durability.md).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync
from stride import Every

from qewqew_core import DiskFull, Queue, Reader, Topic

NAME = 256  # bytes that a file takes besides its content, and a name that is entered into a directory
ROOMS = [*range(60, 3_000, 60), *range(3_000, 40_000, 990)]


class SmallDisk(NoSync):
    """The real disk, of which ``room`` bytes are free; None: enough."""

    room: int | None = None

    def _spend(self, size: int) -> None:
        if self.room is not None:
            if size > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= size

    def _spent(self, before: int, fd: int) -> None:
        if self.room is not None:
            self.room -= self.size(fd) - before

    def open(self, path: str, *, new: bool = False) -> int:
        if new:
            self._spend(NAME)
        return super().open(path, new=new)

    def open_into(
        self, descriptors: MutableSequence[int], path: str, *, make: bool = False, new: bool = False, follow: bool = False
    ) -> None:
        if (make or new) and not self.exists(path):
            self._spend(NAME)
        super().open_into(descriptors, path, make=make, new=new, follow=follow)

    def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        growth = max(0, offset + len(data) - self.size(fd))
        if self.room is not None and growth > self.room:  # as far as there is room
            super().write(fd, data[: len(data) - growth + self.room], offset)
            self.room = 0
        self._spend(growth)
        super().write(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._spend(max(0, size - self.size(fd)))
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        before = self.size(fd)
        super().truncate(fd, size)
        self._spent(before, fd)

    def rename(self, source: str, target: str) -> None:
        if os.path.dirname(source) != os.path.dirname(target):
            self._spend(NAME)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._spend(NAME)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        size = os.stat(path).st_size if os.stat(path).st_nlink == 1 else 0
        super().unlink(path)
        if self.room is not None:
            self.room += NAME + size

    def make_directory(self, path: str) -> None:
        self._spend(NAME)
        super().make_directory(path)


Owner = Queue | Reader


def returned(owner: Owner) -> None:
    batch = owner.lease("first", max_records=3)
    assert batch is not None
    batch.nack("once")


def leased(owner: Owner) -> None:
    owner.lease("first", max_records=3)


def dead(owner: Owner) -> None:
    leased(owner)
    owner.batches()[0].to_dead_letters("bad")


def nothing(owner: Owner) -> None:
    pass


def first(owner: Owner) -> Any:
    return owner.batches()[0]


CALLS: dict[str, tuple[Callable[[Owner], None], Callable[[Owner], object]]] = {
    "lease": (nothing, lambda owner: owner.lease("key", max_records=5)),
    "lease of all": (nothing, lambda owner: owner.lease("key")),
    "lease of what was returned": (returned, lambda owner: owner.lease("key")),
    "extend": (leased, lambda owner: first(owner).extend(60)),
    "ack": (leased, lambda owner: first(owner).ack()),
    "nack": (leased, lambda owner: first(owner).nack("x" * 1_000)),
    "dead letters": (leased, lambda owner: first(owner).to_dead_letters("\N{SNOWMAN}" * 1_000)),
    "return of a dead one": (dead, lambda owner: owner.dead()[0].return_to_queue()),
    "put back": (leased, lambda owner: first(owner).put_back()),
    "put back of a dead one": (dead, lambda owner: owner.dead()[0].put_back()),
    "drop": (dead, lambda owner: owner.dead()[0].drop()),
}
View = list[tuple[str, str, int, list[bytes]]]


def view(owner: Owner) -> tuple[View, int]:
    every = [*owner.batches(), *owner.dead(), *owner.acknowledged()]
    return [(one.key, one.state, one.attempt, list(one)) for one in every], owner.stats().records


@contextlib.contextmanager
def a_queue(path: Path, disk: SmallDisk):  # type: ignore[no-untyped-def]
    with Queue(path / "q", chunk_size=64, _files=disk) as queue:
        queue.put_many([b"record %d" % number for number in range(12)])
        yield queue


@contextlib.contextmanager
def a_reader(path: Path, disk: SmallDisk):  # type: ignore[no-untyped-def]
    with Topic(path / "t", block_size=1_000, _files=disk) as topic:
        topic.append_many([b"record %d" % number for number in range(12)])
        with topic.reader("r") as reader:
            yield reader


@pytest.mark.parametrize("make", [a_queue, a_reader])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_on_a_full_disk_has_happened_or_not_and_works_when_there_is_room(
    tmp_path: Path, make: Any, call: str, every: Every
) -> None:
    prepare, act = CALLS[call]
    full = 0
    for room in [0, *every(ROOMS, quick=8, full=2)]:
        disk, place = SmallDisk(), tmp_path / str(room)
        place.mkdir()
        with make(place, disk) as owner:
            prepare(owner)
            before = view(owner)
            owner._engine.log.release()  # an earlier call has needed what the log kept
            disk.room = room
            try:
                act(owner)
            except DiskFull:
                full += 1
                assert view(owner) == before, room
                disk.room = None
                assert view(owner) == before, room
                act(owner)
            disk.room = None
            after = view(owner)
            assert after != before or call in ("extend",)
        with reopened(make, place) as again:
            assert view(again) == after, room
    assert full, "it needs no room at all"


def reopened(make: Any, place: Path) -> Any:
    @contextlib.contextmanager
    def reader():  # type: ignore[no-untyped-def]
        with Topic(place / "t") as topic, topic.reader("r") as one:
            yield one

    return Queue(place / "q", chunk_size=64) if make is a_queue else reader()
