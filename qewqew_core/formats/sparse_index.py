"""`IndexEntry`: the sparse index of a file of records: boundaries, with what lies before them and its checksum."""

from __future__ import annotations

from typing import NamedTuple


class IndexEntry(NamedTuple):
    """A boundary of the sparse index: a record begins at ``offset``."""

    offset: int
    records: int  # records of the chunk before it, from `Chunk.base` on
    crc: int  # crc32 of the bytes from `Chunk.base` to offset
    time: int  # when that record was committed, milliseconds since the epoch …
    elapsed: int  # … and in elapsed time: see `Clock`
