"""Chunk files beside a queue that hold records, and that nothing refers to. They are never delivered or overwritten, but offered.

The original leaves them when it is killed in the middle of `clear`, or puts after it in one session. A repair leaves files whose
place in the queue nobody knows. They look like files whose records were taken long ago, so a person must decide.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from qewqew_core.batch import places
from qewqew_core.disk.descriptors import Descriptors, data_in
from qewqew_core.disk.files import Files, write_new
from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.queue import paths
from qewqew_core.queue.reading import OnDisk, is_too_large, read_pointers, scan, unread
from qewqew_core.queue.state import State

REPORT = "report.json"


class Orphan:
    """A chunk file as it was when `Queue.orphans` looked. Iterating over it gives the records that can be read.

    ``records`` and ``bytes`` (payload) count these. ``problem`` says why the file cannot be read to its end, or is None. The
    original wrote no checksums, so records that step from one to the next are believed. `Queue.adopt` appends the records to the
    queue, `Queue.set_aside` moves the file away.
    """

    def __init__(self, files: Files, path: str, content: Chunk, problem: str | None) -> None:
        self._files = files
        self._content = content
        self.path = path
        self.id = content.id  # of the chunk
        self.records = content.records
        self.bytes = content.bytes
        self.problem = problem

    def __iter__(self) -> Iterator[bytes]:
        """Raises `Corrupt` if the file has changed since, and `BadPath` if it is gone."""
        try:
            fd = self._files.open_to_read(self.path)
        except FileNotFoundError as error:
            raise BadPath("was adopted or set aside by somebody else", path=self.path) from error
        with Descriptors([fd]):
            for _, data in unread(self._files, fd, self.path, self._content):
                yield from chunk.split(data)[0]

    def key(self) -> str:
        """The idempotency key under which its records are put: the identity of the file. Raises `BadPath` if it is gone."""
        try:
            inode, modified = self._files.identity(self.path)
        except FileNotFoundError as error:
            raise BadPath("was adopted or set aside by somebody else", path=self.path) from error
        return f"orphan-{inode}-{modified}-{self._content.crc:08x}"

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"<Orphan {self.path}, {self.records:,} records{f', {self.problem}' if self.problem else ''}>"


def find(files: Files, path: str, state: State) -> list[Orphan]:
    """The orphans beside the queue at ``path``. Files without records do not count."""
    found = []
    for chunk_id in sorted(paths.chunk_ids(path, files.list(os.path.dirname(path))) - state.chain.keys()):
        chunk_path = chunk.chunk_path(path, chunk_id)
        with contextlib.suppress(OSError):  # gone meanwhile, or no file at all: it is not ours
            content, problem = readable(files, chunk_path, chunk_id)
            if content.records or problem:
                found.append(Orphan(files, chunk_path, content, problem))
    return found


def set_aside(files: Files, path: str, orphan: Orphan) -> str:
    """Move the file of an orphan into a directory of NAME.damaged, durably; returns where it is."""
    if not files.exists(orphan.path):
        raise BadPath("was adopted or set aside by somebody else", path=orphan.path)
    directory, name = make_aside(files, path), os.path.basename(orphan.path)
    target = place_in(files, directory, name)
    files.rename(orphan.path, target)
    files.sync_directory(directory)
    files.sync_directory(os.path.dirname(orphan.path))
    what = {"set_aside": {os.path.basename(target): "nothing referred to it"}, "records": orphan.records}
    write_report(files, directory, what | {"problem": orphan.problem})
    return target


def readable(files: Files, path: str, chunk_id: int) -> tuple[Chunk, str | None]:
    """The records of a chunk file as far as they go, and what is wrong with it. Raises OSError.

    If the pointers cannot be right, reading begins at the first record that the file ever had (records may come again), and
    zeros at the end are not taken for records.
    """
    size, head, tail, following = on_disk = read_pointers(files, path)
    problem = None
    if is_too_large(on_disk):
        return Chunk(chunk_id, size), None
    if size < chunk.BEGIN or (head in (0, chunk.BEGIN) and tail == 0) or chunk.BEGIN <= tail <= head <= size:
        return Chunk(chunk_id, size), None
    if not chunk.BEGIN <= head <= tail <= size:
        problem = f"head {head} and tail {tail} do not lie in the file, which has {size} bytes"
        head = head if chunk.BEGIN <= head < min(tail, size) else chunk.BEGIN
        tail = _end_of_records(files, path, head, min(tail, size) if tail > head else size)
    try:
        return scan(files, path, chunk_id, OnDisk(size, head, tail, following)), problem
    except Corrupt as error:
        return scan(files, path, chunk_id, OnDisk(size, head, error.offset or head, following)), str(error)


def _end_of_records(files: Files, path: str, head: int, end: int) -> int:
    with Descriptors([files.open_to_read(path)]) as (fd,):
        written = max((last for _, last in data_in(fd)), default=0)
        data = files.read(fd, max(0, min(end, written) - head), head)
    at, written = 0, len(data.rstrip(b"\0"))
    while at < written and at + 2 <= len(data) and (following := chunk.record_end(data, at)) <= len(data):
        at = following
    return head + at


# NAME.damaged


def make_aside(files: Files, path: str) -> str:
    """A directory in NAME.damaged for what is set aside now, made durably. One without a report is used again."""
    home = places.make_home(files, path, places.DAMAGED)
    files.sync_directory(os.path.dirname(home))
    last = max((int(name) for name in files.list(home) if name.isdecimal() and name.isascii()), default=0)
    directory = os.path.join(home, str(last))
    if not last or files.exists(os.path.join(directory, REPORT)):
        directory = os.path.join(home, str(last + 1))
        places.make_new(files, directory)
    files.sync_directory(home)
    return directory


def place_in(files: Files, directory: str, name: str) -> str:
    """A path in the directory that no file has."""
    number, target = 1, os.path.join(directory, name)
    while files.exists(target):
        number += 1
        target = os.path.join(directory, f"{name}-{number}")
    return target


def write_report(files: Files, directory: str, body: dict[str, object]) -> None:
    """Write the report, durably. A directory with a report is finished."""
    target = os.path.join(directory, REPORT)
    write_new(files, target + ".tmp", json.dumps(body, indent=1).encode())
    files.rename(target + ".tmp", target)
    files.sync_directory(directory)
