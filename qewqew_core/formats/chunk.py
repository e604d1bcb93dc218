"""The bytes of a queue's header file and of its chunk files. Nothing else knows these offsets.

The format is that of the Java library QewQew (pschichtel/QewQew, MIT), to the byte. All integers
are big-endian::

    header file NAME              chunk file NAME.ID (ID decimal, 1..65534)
     0   2                         0       4       8    10            head          tail     size
    ┌─────┐                       ┌───────┬───────┬─────┬──────────────┬─────────────┬────────┐
    │first│ id of the first       │ head  │ tail  │next │ consumed     │ records     │ unused │
    │ u16 │ chunk, 0: none        │  i32  │  i32  │ u16 │              │             │        │
    └─────┘                       └───────┴───────┴─────┴──────────────┴─────────────┴────────┘
                                   head: offset of the first unread record
    record:  0        2            tail: offset just past the last record
            ┌────────┬─────────┐   next: id of the next chunk, 0: none
            │ length │ payload │
            │  u16   │ length  │   Chunks are chained header → first → next → …; reading happens in
            └────────┴─────────┘   the first, writing in the last.

A record has no checksum here: checksums, counts and times are in the transaction log (`log`).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import cast

from qewqew_core.errors import BadArgument, BadRecord, RecordTooLarge

FIRST = struct.Struct(">H")
POINTERS = struct.Struct(">iiH")
LENGTH = struct.Struct(">H")

BEGIN = POINTERS.size  # 10: where the records of a chunk begin
NONE = 0  # "no chunk" in the header and in next
MAX_ID = 65534  # 65535 is never allocated: the original would open the file of id 0 for it
JAVA_FIRST = 1  # where the original begins, over whatever has that name, even where it has locked a header that was removed …
OUR_FIRST = 30_001  # … so no chunk of ours has that id, and a new queue begins far from it
MAX_RECORD = 65535
MIN_CHUNK_SIZE = BEGIN + LENGTH.size  # room for one empty record
MAX_CHUNK_SIZE = 2**31 - 1

Record = bytes | bytearray | memoryview


def chunk_path(queue: str, chunk_id: int) -> str:
    return f"{queue}.{chunk_id}"


def successor(chunk_id: int) -> int:
    """The id after this one; ids run from 1 to 65534 and wrap."""
    return chunk_id % MAX_ID + 1


def predecessor(chunk_id: int) -> int:
    return (chunk_id - 2) % MAX_ID + 1


def largest_record(chunk_size: int) -> int:
    """Bytes of the largest record that a chunk of this size takes."""
    return min(chunk_size - MIN_CHUNK_SIZE, MAX_RECORD)


def checked(records: Iterable[Record], chunk_size: int) -> list[bytes]:
    """The records as bytes, all of them fit to be stored; else `BadRecord` or `RecordTooLarge`."""
    limit = largest_record(chunk_size)
    result = list(records)
    if set(map(type, result)) <= {bytes} and max(map(len, result), default=0) <= limit:
        return cast(list[bytes], result)  # as nearly always
    for number, record in enumerate(result):
        if type(record) is not bytes:
            if not isinstance(record, (bytes, bytearray, memoryview)):
                raise BadRecord(
                    f"record {number} is {type(record).__name__}, not bytes; encode it first, "
                    "for example with json.dumps(...).encode(). Nothing was stored"
                )
            result[number] = record = bytes(record)
        if len(record) > limit:
            place = "record of a queue" if limit == MAX_RECORD else f"record of a queue with chunks of {chunk_size:,} bytes"
            raise RecordTooLarge(
                f"record {number} has {len(record):,} bytes; a {place} has at most {limit:,}. Nothing was stored; split it, "
                "store it in a file and queue its path, or use a topic, which takes bodies up to 2 GiB"
            )
    return cast(list[bytes], result)


def checked_all(records: Iterable[Record], chunk_size: int) -> list[bytes]:
    """The same for what a caller gave as many records."""
    if isinstance(records, (bytes, bytearray, memoryview, str)):
        raise BadArgument("put_many takes an iterable of records; for a single one use put")
    if not hasattr(records, "__iter__"):
        raise BadArgument(f"put_many takes an iterable of records, not {type(records).__name__}")
    return checked(records, chunk_size)


def frame(records: Sequence[bytes]) -> bytes:
    """The records as they stand in a chunk."""
    return b"".join(parts(records))


def parts(records: Sequence[bytes]) -> list[bytes]:
    """The same, not joined: length, payload, length, payload, …"""
    found = [b""] * (2 * len(records))
    found[::2] = map(LENGTH.pack, map(len, records))
    found[1::2] = records
    return found


def split(frames: bytes, max_records: int | None = None) -> tuple[list[bytes], int]:
    """The records in a run of whole frames, and how many bytes of the run they take.

    Raises ValueError with the offset in the run where a frame does not fit.
    """
    read = io.BytesIO(frames).read
    lengths = map(int.from_bytes, iter(partial(read, 2), b""))
    records = list(map(read, islice(lengths, max_records)))
    used = sum(map(len, records)) + 2 * len(records)
    # BytesIO.read returns less at the end of the run instead of failing: only the last frame can be cut.
    if records:
        last = used - len(records[-1]) - 2
        if used > len(frames) or FIRST.unpack_from(frames, last)[0] != len(records[-1]):
            raise ValueError(last)
    return records, used


def record_end(frames: bytes, at: int) -> int:
    """Where the frame that begins at ``at`` ends."""
    return at + 2 + (frames[at] << 8 | frames[at + 1])
