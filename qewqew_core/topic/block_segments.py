"""Messages of a topic as segments of a batch: parts of its blocks, with the checksums needed to read each part alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qewqew_core.batch import manifest
from qewqew_core.batch.manifest import Segment
from qewqew_core.formats import zbus
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD, Entry
from qewqew_core.limits import LIMITS
from qewqew_core.topic import block_sums
from qewqew_core.topic.reader_state import Range
from qewqew_core.topic.view import Position, View


class Part(NamedTuple):
    """The first messages of a range that match, as far as they are in one block and within limits."""

    segment: Segment | None  # None: none matches
    size: int  # payload bytes
    behind: Position  # where the last of them ends
    after: Position  # where to look for the next one
    full: bool  # whether the limits ended it


def first_segment(
    view: View,
    chosen: Filter,
    pieces: Callable[[Entry], list[IndexEntry]],
    wanted: Range,
    max_records: int,
    max_bytes: int,
    more: bool,
) -> Part:
    """Cut the first part of a range. The first message is taken whatever its size, unless ``more`` come before it. ``pieces``
    returns the checksums of a block. Raises `Corrupt` if the bytes are not what was committed.
    """
    block, begin, number = wanted.start
    index = view.index()
    entry = view.entry(block)
    stop = wanted.stop
    end = stop.offset if stop is not None and stop.block == block else entry.end
    if begin >= end:
        if block + 1 >= index.start + index.blocks or (stop is not None and stop.block == block):
            return Part(None, 0, wanted.start, wanted.start, False)
        return Part(None, 0, wanted.start, Position(block + 1, 0, number), False)
    at, records, size, boundary = begin, 0, 0, begin
    boundaries: list[tuple[int, int]] = []
    last = wanted.start  # where the last message that matches ends
    full = False
    head = view.read(entry.base, begin, min(HEAD, end - begin)).ljust(HEAD, b"\0")
    number = view.first_number(number, head, begin, entry.base, begin, end)
    for place, found, data, first in view.record_heads(entry, number, begin, end):
        length = zbus.length_at(data, place - first)
        # Also at messages that a filter holds back: else what must be read to verify one that it lets through has no bound.
        if place - boundary >= LIMITS.piece_bytes:
            boundaries.append((place, records))
            boundary = place
        if not chosen or chosen.matches_slot(data[place - first + zbus.TAG_AT : place - first + zbus.LENGTH_AT]):
            if full := size + length > max_bytes and (records > 0 or more):
                break
            records, size = records + 1, size + length
            last = Position(block, place + HEAD + length, found + 1)
            if full := records >= max_records or size >= max_bytes:
                break
        at, number = place + HEAD + length, found + 1
    after = last if full else Position(block, at, number)
    if after.offset == begin:
        return Part(None, 0, last, after, full)
    kept = tuple((offset, count) for offset, count in boundaries if offset < last.offset)
    # Also what the filter holds back behind the last one that it lets through: a damaged tag must not hide a message.
    ends = [*(offset for offset, _ in kept), last.offset, after.offset]
    *inside, whole, _ = manifest.checksums(block_sums.crcs(view, pieces(entry), entry, begin, ends))
    if not records:
        return Part(None, 0, last, after, full)
    segment = Segment(zbus.block_name(entry.base), begin, last.offset, records, whole, kept, tuple(inside))
    return Part(segment, size, last, after, full)
