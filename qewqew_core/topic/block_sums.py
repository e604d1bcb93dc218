"""The checksums of a topic's blocks, one for about each 64 KiB: where they are, and how bytes are compared with them."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from qewqew_core.crc import crc32
from qewqew_core.disk.files import Files, read_whole
from qewqew_core.disk.looking import look_again, replay_live
from qewqew_core.errors import Corrupt
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.zbus import Entry
from qewqew_core.limits import now_ms
from qewqew_core.topic import topic_log, witness
from qewqew_core.topic.topic_paths import data_of, log_of
from qewqew_core.topic.view import SCAN, View


def path_of(directory: str, base: int) -> str:
    """The file with the checksums of a full block."""
    return os.path.join(data_of(directory), topic_log.sums_name(base))


def pieces_of(files: Files, directory: str, base: int) -> list[IndexEntry]:
    """The known checksums of a block, the last one for its end; [] if a zbus server wrote all of it."""
    return look_again(lambda: _pieces_of(files, directory, base))


def _pieces_of(files: Files, directory: str, base: int) -> list[IndexEntry]:
    log, sums = log_of(directory), path_of(directory, base)
    for _ in range(2):  # they may be stored between the look at the one file and that at the other
        with contextlib.suppress(FileNotFoundError):
            return topic_log.unpack_sums(read_whole(files, sums), sums)
        with contextlib.suppress(FileNotFoundError):  # there is no log: a zbus server made the topic
            state = replay_live(files, log, topic_log.replay).state
            for block in (*state.full, state.last):
                if block.base == base:
                    return block.sums()
    witness.check_topic(files, directory)
    return []


def waits_since(view: View, files: Files, block: int, place: int, timestamp: int) -> int:
    """When a message was appended, for people, as far as its timestamp says so: if that is in the future, since when it is sure
    to be there. ``place``: where it begins in its block.
    """
    if timestamp <= now_ms():
        return timestamp
    pieces = pieces_of(files, view.directory, view.entry(block).base)
    if not pieces:
        return timestamp
    clock = replay_live(files, log_of(view.directory), topic_log.replay).state.clock.now(files.boot())
    piece = pieces[max(0, bisect_right(pieces, place, key=attrgetter("offset")) - 1)]
    return clock.shown(timestamp, piece.elapsed)


def crc_of(view: View, base: int, at: int, end: int, crc: int) -> int:
    for place in range(at, end, SCAN):
        crc = crc32(view.read(base, place, min(SCAN, end - place)), crc)
    return crc


def damaged(path: str, piece: IndexEntry, following: IndexEntry) -> Corrupt:
    return Corrupt(
        f"the messages up to {following.offset} do not match their checksum: the file was "
        "damaged, or another program wrote to it",
        path=path,
        offset=piece.offset,
    )


def crcs(view: View, pieces: list[IndexEntry], entry: Entry, begin: int, ends: list[int]) -> list[int]:
    """The crc32 of the bytes of a block from ``begin`` to each of the rising ends. Raises `Corrupt` if the bytes are not
    what was committed.
    """
    result: list[int] = []
    crc, at = 0, begin
    for data in checked(view, pieces, entry, begin, ends[-1]):
        done = 0
        while len(result) < len(ends) and ends[len(result)] <= at + len(data):
            stop = ends[len(result)] - at
            crc, done = crc32(data[done:stop], crc), stop
            result.append(crc)
        crc, at = crc32(data[done:], crc), at + len(data)
    return result


def checked(view: View, pieces: list[IndexEntry], entry: Entry, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes begin..end of a block, in turn, verified where their checksum is known. Raises `Corrupt` if they are not
    what was committed, at the latest after the last of them.
    """
    at = begin
    for piece, following in pairwise(pieces):
        if following.offset <= begin or piece.offset >= end:
            continue
        if at < piece.offset:
            yield from _bytes(view, entry.base, at, piece.offset)
        crc = piece.crc
        for place in range(piece.offset, following.offset, SCAN):
            data = view.read(entry.base, place, min(SCAN, following.offset - place))
            crc = crc32(data, crc)
            yield memoryview(data)[max(0, begin - place) : max(0, end - place)]
        at = min(end, following.offset)
        if crc != following.crc:
            raise damaged(view.block_path(entry.base), piece, following)
    yield from _bytes(view, entry.base, at, end)


def _bytes(view: View, base: int, start: int, end: int) -> Iterator[memoryview]:
    for place in range(start, end, SCAN):
        yield memoryview(view.read(base, place, min(SCAN, end - place)))
