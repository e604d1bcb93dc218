"""What a commit of a queue says: a list of these operations. Their bytes are in `log`; they touch no file.

A call and the replay of a log apply them by the same `State.apply`, so a crash leaves the state that was there. They are tuples
and not dataclasses, which take three times as long to make: a commit may have thousands of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qewqew_core.batch.batch_operations import BatchOperation
from qewqew_core.disk.journal import Body

if TYPE_CHECKING:
    from qewqew_core.formats.chunk_state import Cut


class Append(NamedTuple):
    """Records at the tail of a chunk. The log itself carries their frames, and the chunk's file gets them later."""

    chunk: int
    records: int
    frames: Body


class Extent(NamedTuple):
    """Records at the tail of a chunk. Their frames are in its file."""

    chunk: int
    runs: Sequence[tuple[int, int, int]]  # records, bytes, crc of the bytes from the chunk's base to the end of the run
    synced: bool  # they were on disk before the commit


class Take(NamedTuple):
    """Records are gone: from the head on, or from behind records that sessions hold."""

    chunk: int
    start: int
    end: int
    records: int


class NewChunk(NamedTuple):
    """A new last chunk."""

    chunk: int
    size: int


class PutKey(NamedTuple):
    """The records of this commit were put under an idempotency key."""

    key: bytes  # hash of it
    records: int


class Served(NamedTuple):
    """The records of this commit are also those of these requests; see `group_commit`."""

    requests: Sequence[bytes]


# These happen rarely and move files, as the operations on batches do


class Lease(NamedTuple):
    """A new batch of whole chunks, and of copies of records that leave their chunk."""

    id: str
    key: str
    records: int
    bytes: int
    # Chunk, and what of it: a copy; or its file, then the crc of the bytes base..head, which are not read any more.
    parts: list[tuple[int, Cut | int]]
    lease_timeout: int | None
    retry_delay: int = 0


class PutBack(NamedTuple):
    """The records of a batch are at the front of the queue again, in files with new ids."""

    id: str
    chunks: list[int]  # the new ids …
    files: list[str]  # … of these files of the batch


class Replace(NamedTuple):
    """A copy without gaps, in a new file, takes the place of a chunk."""

    chunk: int
    cut: Cut
    new: int
    size: int


class Clear(NamedTuple):
    """All chunks are gone."""


class Believe(NamedTuple):
    """What a Java program had left in header and pointers. The snapshot before this was made from it."""

    header: int
    stored: list[tuple[int, int, int, int]]  # chunk, and its head, tail and next
    empty: list[int]  # chunks without records, whose files go


class Repair(NamedTuple):
    """A repair, which is the last operation of its log until it is finished."""

    moves: list[list[str]]  # files that are set aside: from, to
    report: dict[str, Any]


JsonOperation = Lease | PutBack | Replace | Clear | Believe | Repair | BatchOperation
Operation = Append | Extent | Take | NewChunk | PutKey | Served | JsonOperation
