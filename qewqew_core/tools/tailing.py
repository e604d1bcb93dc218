"""The newest records of a queue, or messages of a topic, and new ones as they come: without a lock, and without moving a
reader.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice

from qewqew_core.disk.files import look_into
from qewqew_core.disk.opening import opening
from qewqew_core.errors import RecordsTaken
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.queue import inspection, paths
from qewqew_core.tools.exchange import few
from qewqew_core.topic import topic_paths
from qewqew_core.topic.view import Position, View

POLL_SECONDS = 0.1


def messages(path: str, number: int, chosen: Filter, follow: bool, lost: Callable[[int], None]) -> Iterator[list[Message]]:
    """The newest messages of a topic that match and, with ``follow``, new ones, forever.

    ``lost`` is called with the number of the next message if that was removed before it could be read. Raises `BadPath`,
    `Corrupt`.
    """
    directory = topic_paths.check_topic_path(path)
    with opening(directory, "topic"), closing(View.of(look_into(directory, directory), directory)) as view:
        place = _newest(view, number, chosen)

        def come() -> Iterator[Message]:
            nonlocal place
            for stretch in view.stretches(place, filter=chosen):
                place = stretch.reached
                yield from stretch.messages()

        yield from few(come())
        while follow:
            time.sleep(POLL_SECONDS)
            if place.block < view.index().start:
                lost(place.number)
                place = view.oldest()
            yield from few(come())


def _newest(view: View, number: int, chosen: Filter) -> Position:
    """Where the newest messages that match begin, this many of them."""
    oldest, latest = view.oldest(), view.latest()
    back = number
    while number:
        first = max(oldest.number, latest.number - back)
        begin = view.by_number(first) or oldest
        if not chosen:
            return begin
        places = deque((found.at for found in view.messages(begin, latest, chosen)), maxlen=number)
        if len(places) == number or begin.number <= oldest.number:
            return places[0] if places else latest
        back *= 8  # so all that is read costs little more than the last time
    return latest


def records(path: str, number: int, follow: bool) -> Iterator[list[Message]]:
    """The newest records of a queue and, with ``follow``, new ones, forever.

    It misses records that are put and taken between two looks. Raises `BadPath`, `Corrupt`.
    """
    full = paths.check_path(path)
    stamp = _stamp(full)
    found = inspection.snapshot(full)
    skip = sum(chunk_state.records for chunk_state in found.chunks) - number
    for chunk_state in found.chunks:
        if skip < chunk_state.records:
            yield from few(islice(_of_chunk(full, found, chunk_state), max(0, skip), None))
        skip -= chunk_state.records
    seen = _end(found)
    settled = False
    while follow:
        time.sleep(POLL_SECONDS)
        if (now := _stamp(full)) == stamp and settled:
            continue
        # Once more when it has not changed: two commits in one tick of the file system's clock leave the same time.
        began, settled, stamp = time.monotonic(), now == stamp, now
        found = inspection.snapshot(full)
        for chunk_state in _behind(found.chunks, seen):
            yield from few(_of_chunk(full, found, chunk_state))
        seen = _end(found) or seen
        time.sleep(time.monotonic() - began)  # not more than half of the time is spent on looking


def _of_chunk(path: str, found: inspection.Snapshot, chunk_state: Chunk) -> Iterator[Message]:
    with suppress(RecordsTaken):  # they are no longer the newest
        for records in inspection.chunk_records(path, found, chunk_state):
            yield from map(Message, records)


def _stamp(path: str) -> tuple[tuple[int, int], ...]:
    """Changes with each commit."""
    stamps = []
    for name in (path, path + paths.LOG):
        with opening(path, "queue"), suppress(FileNotFoundError):
            status = os.stat(name)
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


_End = tuple[int, IndexEntry, int]  # chunk, its last piece, tail


def _end(found: inspection.Snapshot) -> _End | None:
    for last in found.chunks[-1:]:
        return last.id, last.pieces[-1], last.tail
    return None


def _behind(chunks: list[Chunk], seen: _End | None) -> list[Chunk]:
    """The chunks with records that were put after what was seen."""
    for number, chunk_state in enumerate(chunks, 1):
        if seen is not None and chunk_state.id == seen[0] and seen[1] in chunk_state.pieces:
            rest = [] if chunk_state.tail == seen[2] else [replace(chunk_state, head=max(chunk_state.head, seen[2]))]
            return rest + chunks[number:]
    return chunks  # what was seen is taken, and all that is there is newer
