"""Writing records into chunk files: which records go where, new files, and files that a session or stage fills beforehand."""

from __future__ import annotations

import contextlib
import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from qewqew_core.crc import crc32
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors, close_each
from qewqew_core.disk.files import Files
from qewqew_core.formats import chunk
from qewqew_core.limits import LIMITS

Frames = bytes | memoryview  # records as they stand in a chunk


class Framed(NamedTuple):
    """Records that are framed already, and how many they are."""

    records: int
    frames: Frames


class Run(NamedTuple):
    """Records that are written at once: one entry of the sparse index."""

    content: list[bytes] | Framed
    size: int  # bytes of their frames

    @property
    def records(self) -> int:
        return self.content.records if isinstance(self.content, Framed) else len(self.content)

    def frames(self) -> Frames:
        return self.content.frames if isinstance(self.content, Framed) else chunk.frame(self.content)

    @property
    def is_small(self) -> bool:
        """Whether it is small records, which are joined before they are written."""
        return not isinstance(self.content, Framed) and self.size < LIMITS.joined_bytes * len(self.content)

    def buffers(self) -> Sequence[Frames]:
        """The same as `frames`; large records are not joined."""
        return [self.frames()] if self.is_small or isinstance(self.content, Framed) else chunk.parts(self.content)


Runs = list[Run]


def place(records: list[bytes], room: int, new_room: int) -> list[Runs]:
    """Which records go into the chunk with ``room`` bytes left, and which into new ones with ``new_room`` bytes each.

    The first item is for the former and may be empty. Each has runs of about `Limits.piece_bytes`. A frame is never divided.
    """
    plan: list[Runs] = [[]]
    ends = list(accumulate([len(record) + 2 for record in records]))
    start = used = 0
    while True:
        stop = bisect_right(ends, used + room, start)
        while start < stop:
            middle = min(bisect_left(ends, used + LIMITS.piece_bytes, start) + 1, stop)
            plan[-1].append(Run(records[start:middle], ends[middle - 1] - used))
            start, used = middle, ends[middle - 1]
        if start == len(records):
            return plan
        plan.append([])
        room = new_room


def place_framed(plan: list[Runs], framed: list[Framed], room: int, new_room: int) -> None:
    """Add these to a plan of `place`: as they are if all of them fit into its last chunk, else divided between chunks."""
    room = (room if len(plan) == 1 else new_room) - sum(run.size for run in plan[-1])
    if sum(len(each.frames) for each in framed) <= room:
        plan[-1] += [Run(each, len(each.frames)) for each in framed]
    else:
        into_last, *into_new = place(chunk.split(b"".join(each.frames for each in framed))[0], room, new_room)
        plan[-1] += into_last
        plan += into_new


def make_chunk(files: Files, path: str, size: int, durable: bool, owned: dict[int, int], chunk_id: int) -> None:
    """Make a chunk file, really allocated, that nothing refers to yet. Its name is not durable. ``owned`` gets its descriptor,
    which has the lock on it.

    Raises FileExistsError if the file exists, or if a Java program has opened it meanwhile; other errors leave no file.
    """
    fd = owned[chunk_id] = files.open(path, new=True)
    mine = False
    try:
        mine = lock.whole(fd)
        if not mine:
            raise FileExistsError(errno.EEXIST, "a Java program has it", path)
        files.allocate(fd, size)
        files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN, chunk.NONE), 0)
        if durable:
            files.sync(fd)
    except BaseException:
        if mine:
            with contextlib.suppress(OSError):
                files.unlink(path)
        close_each(owned, chunk_id)
        raise


def write_runs(files: Files, fd: int, runs: Runs, at: int, crc: int) -> list[tuple[int, int, int]]:
    """Write runs at ``at`` of a chunk file; ``crc`` is that of what lies before them. Returns of each: records, bytes, crc32 up
    to its end.

    Small records are written as soon as they are joined: memory for all of them would cost more than writing does.
    """
    described = []
    waiting: list[Frames] = []
    size = 0
    for run in runs:
        buffers = run.buffers()
        for buffer in buffers:
            crc = crc32(buffer, crc)
        described.append((run.records, run.size, crc))
        waiting += buffers
        size += run.size
        if run.is_small or size >= LIMITS.write_bytes or run is runs[-1]:
            files.write_all(fd, waiting, at)
            at, size, waiting = at + size, 0, []
    return described


class Spilled:
    """A chunk file that is not in the chain yet: where it is, and what it holds."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.runs: list[tuple[int, int, int]] = []  # records, bytes, crc32 from the first record on
        self.tail = chunk.BEGIN
        self.size = size  # of the file
        self.is_durable = False  # but for its name

    @property
    def crc(self) -> int:
        return self.runs[-1][2] if self.runs else 0


class Spill:
    """What a session or stage has put, once it is too much for memory: chunk files, which the commit moves into the chain.

    So the commit writes no record a second time. Nothing refers to the files before it, and recovery removes them.
    """

    def __init__(self, files: Files, directory: str, prefix: str, chunk_size: int, check_free: Callable[[int], None]) -> None:
        self._files = files
        self._check_free = check_free  # raises if this many more bytes of disk are too many
        self._directory = directory
        self._prefix = prefix
        self._chunk_size = chunk_size
        self._made = 0
        self.chunks: list[Spilled] = []

    @property
    def records(self) -> int:
        return sum(run[0] for spilled in self.chunks for run in spilled.runs)

    @property
    def payload(self) -> int:
        """Bytes of the records, without their lengths."""
        return sum(spilled.tail - chunk.BEGIN for spilled in self.chunks) - 2 * self.records

    def add(self, records: list[bytes]) -> None:
        """Append records: all of them or, if this raises OSError, none."""
        target = self.chunks[-1] if self.chunks else None
        first, *others = place(records, self._chunk_size - target.tail if target else 0, self._chunk_size - chunk.BEGIN)
        self._check_free(len(others) * self._chunk_size)
        new: list[Spilled] = []
        made: dict[int, int] = {}
        try:
            written = [(target, self._write(target, first))] if target else []
            for runs in others:
                self._made += 1
                new.append(Spilled(os.path.join(self._directory, f"{self._prefix}{self._made}"), self._chunk_size))
                try:
                    make_chunk(self._files, new[-1].path, self._chunk_size, durable=False, owned=made, chunk_id=self._made)
                finally:
                    close_each(made)
                written.append((new[-1], self._write(new[-1], runs)))
        except OSError:
            for spilled in new:
                self._remove(spilled)
            raise
        self.chunks += new
        for spilled, described in written:
            spilled.runs += described
            spilled.tail += sum(size for _, size, _ in described)
            spilled.size, spilled.is_durable = max(spilled.size, spilled.tail), False

    def _write(self, target: Spilled, runs: Runs) -> list[tuple[int, int, int]]:
        with Descriptors([self._files.open(target.path)]) as (fd,):
            return write_runs(self._files, fd, runs, target.tail, target.crc)

    def finish(self, durable: bool) -> None:
        """Make the files as they will be in the chain: not longer than their content, and ``durable`` but for their names."""
        for spilled in self.chunks:
            is_too_long = spilled is self.chunks[-1] and spilled.size > spilled.tail
            if not is_too_long and (spilled.is_durable or not durable):
                continue
            with Descriptors([self._files.open(spilled.path)]) as (fd,):
                if is_too_long:
                    self._files.truncate(fd, spilled.tail)
                    spilled.size = spilled.tail
                if durable:
                    self._files.sync(fd)
                    spilled.is_durable = True

    def remove(self) -> None:
        for spilled in self.chunks:
            self._remove(spilled)
        self.chunks.clear()

    def _remove(self, spilled: Spilled) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(spilled.path)
