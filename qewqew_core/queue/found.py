"""What is on disk of a queue, before it is decided what it means, and what the chunk files alone tell."""

from __future__ import annotations

import os
import string
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from qewqew_core.clock import NO_CLOCK
from qewqew_core.disk.files import Files
from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths, stamp
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.reading import read_pointers, scan

_TEXT = frozenset(string.printable.encode())


@dataclass
class Found:
    """Header, names and log of a queue."""

    files: Files
    path: str
    header: int  # id of the first chunk; 0 if there is none, or no header
    log: Replayed | None
    is_stamped: bool = False  # there is a stamp, which says that there is a log

    @cached_property
    def _listed(self) -> tuple[set[int], set[int]]:
        return chunk_files(self.files, self.path)

    @property
    def ids(self) -> set[int]:
        """The ids of the chunk files, as they were at the first question."""
        return self._listed[0]

    @property
    def irregular(self) -> set[int]:
        """The ids among them whose files are links, directories or pipes."""
        return self._listed[1]

    def has_regular(self, ids: Collection[int]) -> bool:
        """Whether all are regular files. For a few no directory is listed: there may be thousands of queues in it."""
        if "_listed" in vars(self) or len(ids) > 8:
            return self.ids.issuperset(ids) and self.irregular.isdisjoint(ids)
        return all(self.files.is_regular(chunk.chunk_path(self.path, chunk_id)) for chunk_id in ids)

    @property
    def is_closed(self) -> bool:
        """Whether header and pointers were made to say what the log says. A Java program may have used the queue since."""
        return self.log is not None and (self.log.clean or self.is_handed_over)

    @property
    def is_handed_over(self) -> bool:
        """Whether a process of ours closed the queue without syncing everything, for the next one; see `Chain.hand_over`."""
        return self.log is not None and self.log.handed_over

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)


def chunk_files(files: Files, path: str) -> tuple[set[int], set[int]]:
    """The ids of the chunk files beside a queue, and the ids among them whose files are not regular ones."""
    kinds = files.kinds(os.path.dirname(path))
    return paths.chunk_ids(path, kinds), paths.chunk_ids(path, (name for name, is_regular in kinds.items() if not is_regular))


def look(files: Files, path: str, header: bytes | None, log: bytes | None) -> Found:
    """``header``, ``log``: the contents of these files. Raises `Corrupt`, also for what contradicts itself in the log."""
    first = chunk.NONE
    if header and len(header) >= chunk.FIRST.size:
        (first,) = chunk.FIRST.unpack_from(header)
    if log is None:
        stamp.check_no_log(files, path)
    replayed = None if log is None else logs.replay(log, path + paths.LOG)
    found = Found(files, path, first, replayed)
    if header and log is None and _is_foreign(header) and not found.ids:
        raise BadPath("is not the header file of a queue, but a file with other contents; choose another path", path=path)
    if header and len(header) < chunk.FIRST.size:
        raise Corrupt("the header file has one byte; it must have two. Nothing was changed", path=path, offset=0)
    check_reference(first, path, 0)
    return found


def _is_foreign(header: bytes) -> bool:
    """Whether it is not the header of a queue, if there are no other files. A Java program that was killed may leave two bytes
    alone; but before they are two letters, it has filled two thousand chunk files.
    """
    return len(header) != chunk.FIRST.size or _TEXT.issuperset(header)


def check_reference(chunk_id: int, path: str, offset: int) -> None:
    if chunk_id > chunk.MAX_ID:
        raise Corrupt(f"refers to chunk {chunk_id}; ids end at {chunk.MAX_ID}. Nothing was changed", path=path, offset=offset)


def chain_of(files: Files, found: Found) -> tuple[dict[int, Chunk], list[int]]:
    """The chunks with records, in order, as the files alone tell, and the ids of empty ones in the chain.

    The rules for states that the original leaves are REQ-24 to REQ-35 of the format: a missing first chunk is
    skipped if its successor is there, a missing next chunk ends the chain, an uninitialised chunk is empty.
    """
    first = found.header
    if first and first not in found.ids:
        first = chunk.successor(first)  # the original unlinks a read chunk before it moves the header on
    return follow(files, found, first)


def follow(files: Files, found: Found, first: int, after: int | None = None) -> tuple[dict[int, Chunk], list[int]]:
    """The same from chunk ``first`` on. ``after``: a Java program has begun them all, one by one, behind this chunk."""
    chain: dict[int, Chunk] = {}
    empty: dict[int, None] = {}
    current = first
    while current in found.ids:
        path = chunk.chunk_path(found.path, current)
        if current in chain or current in empty:
            raise Corrupt(f"the chain of chunks comes back to chunk {current}. Nothing was changed", path=path, offset=8)
        on_disk = read_pointers(files, path)
        size, head, tail, following = on_disk
        check_reference(following, path, 8)
        if after is not None and following not in (chunk.NONE, chunk.successor(current)):
            raise Corrupt(f"refers to chunk {following}, not to the next one. Nothing was changed", path=path, offset=8)
        if size < chunk.BEGIN or (head in (0, chunk.BEGIN) and tail == 0) or (chunk.BEGIN <= tail < head <= size):
            empty[current] = None
        elif not chunk.BEGIN <= head <= tail <= size:
            raise Corrupt(
                f"head {head} and tail {tail} do not lie in the chunk, which has {size} bytes. Nothing was changed",
                path=path,
                offset=0 if not chunk.BEGIN <= head <= size else 4,
            )
        elif head == tail:
            empty[current] = None
        else:
            chain[current] = scan(files, path, current, on_disk, found.log.state.clock if found.log else NO_CLOCK)
        current = following
    return chain, list(empty)
