"""Reading chunk files: pointers, pieces whose checksum is verified, and files that no log describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qewqew_core.clock import NO_CLOCK, Clock
from qewqew_core.crc import crc32
from qewqew_core.disk.descriptors import Descriptors, data_in
from qewqew_core.disk.files import Files
from qewqew_core.errors import Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.limits import LIMITS

BLOCK = 1 << 20


class OnDisk(NamedTuple):
    """A chunk file as it is: its size, and its pointers (zeros if it is too short to have them)."""

    size: int
    head: int
    tail: int
    next: int


def read_pointers(files: Files, path: str) -> OnDisk:
    with Descriptors([files.open_to_read(path)]) as (fd,):
        data = files.read(fd, chunk.BEGIN, 0)
        return OnDisk(files.size(fd), *(chunk.POINTERS.unpack(data) if len(data) == chunk.BEGIN else (0, 0, 0)))


def is_too_large(found: OnDisk) -> bool:
    """Whether no program has made this as a chunk: it has too many bytes, and no pointers."""
    return found.size > chunk.MAX_CHUNK_SIZE and not chunk.BEGIN <= found.head <= found.tail


def is_blank(files: Files, fd: int) -> bool:
    """Whether a chunk file has only zeros behind its pointers. Holes are not read."""
    for begin, end in data_in(fd):
        for at in range(max(begin, chunk.BEGIN), end, BLOCK):
            if files.read(fd, min(BLOCK, end - at), at).strip(b"\0"):
                return False
    return True


class Piece(NamedTuple):
    """Whole records of a chunk, their checksum verified."""

    start: int
    data: bytes
    records_before: int  # of the chunk, from its base on
    crc: int  # from the base of the chunk to the end of the run
    records_end: int


def read_piece(files: Files, fd: int, path: str, chunk_state: Chunk, index: int, after: Piece | None = None) -> Piece:
    """Piece ``index`` of the chunk, or only what was committed to it since the run ``after`` was read.

    Raises `Corrupt` if the bytes are not those that were committed.
    """
    entry = chunk_state.pieces[index]
    start, before, crc = entry.offset, entry.records, entry.crc
    if after is not None and after.start + len(after.data) > start:
        start, before, crc = after.start + len(after.data), after.records_end, after.crc
    end, records, end_crc = chunk_state.piece_end(index)
    data = files.read(fd, end - start, start)
    if len(data) < end - start:
        raise Corrupt(f"the file ends before its last record, which ends at {end}", path=path, offset=start + len(data))
    if crc32(data, crc) != end_crc:
        raise Corrupt(
            f"the bytes up to {end} do not match their checksum: the file was damaged, "
            "or another program wrote to it. Nothing was changed",
            path=path,
            offset=start,
        )
    return Piece(start, data, before, end_crc, records)


def unread(files: Files, fd: int, path: str, chunk_state: Chunk) -> Iterator[tuple[IndexEntry, bytes]]:
    """The records from head to tail, as verified runs, each with the boundary that it begins at."""
    if chunk_state.head == chunk_state.tail:
        return
    for index in range(chunk_state.piece_of(chunk_state.head), len(chunk_state.pieces)):
        piece = read_piece(files, fd, path, chunk_state, index)
        skip = max(0, chunk_state.head - piece.start)
        before = chunk_state.taken if skip else piece.records_before
        yield IndexEntry(piece.start + skip, before, 0, *chunk_state.pieces[index][3:]), piece.data[skip:]


def crc_of_taken(files: Files, path: str, chunk_state: Chunk) -> int:
    """The crc32 of the bytes from base to head. Reads at most one piece, and that only if some records were taken.

    Raises `Corrupt` if the bytes of that piece are not those that were committed.
    """
    if chunk_state.head == chunk_state.base:
        return 0
    with Descriptors([files.open_to_read(path)]) as (fd,):
        index = chunk_state.piece_of(chunk_state.head)
        piece = read_piece(files, fd, path, chunk_state, index)
    return crc32(piece.data[: chunk_state.head - piece.start], chunk_state.pieces[index].crc)


def scan(files: Files, path: str, chunk_id: int, found: OnDisk, clock: Clock = NO_CLOCK) -> Chunk:
    """Describe a chunk file that no log describes, by stepping over all its records. ``clock``: of the log, if there is one.

    Raises `Corrupt` with the offset of the first record that does not fit.
    """
    time = files.modified(path)  # nobody wrote down when: the file's last change is the best that is known
    chunk_state = Chunk(chunk_id, found.size, found.head, found.head, found.head, stored=(found.head, found.tail, found.next))
    for frames, records in step_over(files, path, found.head, found.tail):
        chunk_state.append(len(frames), records, crc32(frames, chunk_state.crc), time, clock)
    return chunk_state


def step_over(files: Files, path: str, start: int, tail: int) -> Iterator[tuple[bytes, int]]:
    """The records from ``start`` to ``tail``, which no checksum covers: runs of whole frames, and the number of records in each.

    Raises `Corrupt` with the offset of the first record that does not fit.
    """
    with Descriptors([files.open_to_read(path)]) as (fd,):
        rest, at = b"", start
        while at < tail:
            block = files.read(fd, min(BLOCK, tail - at), at)
            at += len(block)
            data = rest + block
            cut = start = records = 0
            while cut + 2 <= len(data) and (end := chunk.record_end(data, cut)) <= len(data):
                cut, records = end, records + 1
                if cut - start >= LIMITS.piece_bytes:
                    yield data[start:cut], records
                    start, records = cut, 0
            if cut > start:
                yield data[start:cut], records
            rest = data[cut:]
            if not block:
                break
        if rest or at < tail:
            raise Corrupt(
                f"the record here runs past the tail of the chunk at {tail}. Nothing was changed",
                path=path,
                offset=at - len(rest),
            )


def records_before(files: Files, path: str, chunk_state: Chunk, offset: int) -> int:
    """How many records lie between the base of a chunk and ``offset``. Raises `Corrupt` if no record begins there."""
    with Descriptors([files.open_to_read(path)]) as (fd,):
        piece = read_piece(files, fd, path, chunk_state, chunk_state.piece_of(offset))
    at, count = 0, piece.records_before
    while piece.start + at < offset:
        at, count = chunk.record_end(piece.data, at), count + 1
    if piece.start + at != offset:
        raise Corrupt(f"the head, {offset}, lies inside a record. Nothing was changed", path=path, offset=0)
    return count
