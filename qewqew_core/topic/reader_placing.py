"""Where a reader stands in a topic whose blocks were numbered again: its log says the numbers of messages too."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from functools import cached_property
from operator import itemgetter

from qewqew_core.disk import journal
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files
from qewqew_core.disk.reserve import Reserve
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD
from qewqew_core.topic import reader_log, witness
from qewqew_core.topic.in_flight import Flights
from qewqew_core.topic.reader_state import Range, ReaderState
from qewqew_core.topic.topic_paths import LOCK, LOG
from qewqew_core.topic.view import Position, View


class Places:
    """Finds the place of a message by its number."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._index = view.index()

    def correct(self, state: ReaderState) -> bool:
        """Let all places of a reader be those of the messages with their numbers. Returns whether any was another."""

        def of(part: Range) -> Range:
            return Range(self._of(part.start), None if part.stop is None else self._of(part.stop))

        pending = [of(part) for part in state.pending]
        ranges = {batch_id: [of(part) for part in parts] for batch_id, parts in state.ranges.items()}
        flights = {offset: flight._replace(at=self._of(flight.at)) for offset, flight in state.in_flight.items()}
        if (pending, ranges, flights) == (state.pending, state.ranges, dict(state.in_flight)):
            return False
        state.pending, state.ranges, state.in_flight, state.passed = pending, ranges, Flights(flights), (0, 0)
        return True

    @cached_property
    def _known(self) -> list[tuple[int, int]]:
        """(number of its first message, block) of each block whose beginning is not damaged."""
        blocks = range(self._index.start, self._index.start + self._index.blocks)
        numbers = [(self._view.sure_number(self._view.entry(block)), block) for block in blocks]
        return [(number, block) for number, block in numbers if number is not None]

    def _of(self, at: Position) -> Position:
        """The place of the message with this number; if that is lost, behind the last one before it that can be read."""
        if self._is_right(at):
            return at
        if at.number == self._index.number:
            return self._view.latest()
        with contextlib.suppress(Corrupt):  # it is lost
            if (place := self._view.by_number(at.number)) is not None:
                return place
        if self._may_be_right(at):
            return at
        known = bisect_right(self._known, at.number, key=itemgetter(0)) - 1
        if known < 0:  # it was removed, or is in a first block that is damaged
            return at._replace(block=min(at.block, self._index.start - 1 if self._index.start else 0), offset=0)
        number, block = self._known[known]
        place = Position(block, 0, number)
        with contextlib.suppress(Corrupt):
            for begin, found, data, start in self._view.record_heads(self._view.entry(block), number):
                if found >= at.number:
                    break
                place = Position(block, begin + HEAD + zbus.length_at(data, begin - start), found + 1)
        return place

    def _is_right(self, at: Position) -> bool:
        """Whether the message with that number begins there, or behind the end of the block there."""
        view, index = self._view, self._index
        behind = index.start + index.blocks
        if at.block < index.start:
            return not self._known or at.number <= self._known[0][0]
        if at.number > index.number and at[:2] > view.latest()[:2]:
            return True  # who opens the reader moves it
        if at.block >= behind:
            return False
        entry = view.entry(at.block)
        if at.offset > entry.end:
            return False
        try:
            if at.offset < entry.end:
                return view.number_of(entry, at.offset) == at.number
            return (index.number if at.block + 1 == behind else view.number_of(view.entry(at.block + 1))) == at.number
        except Corrupt:
            return False

    def _may_be_right(self, at: Position) -> bool:
        """Whether it is in a damaged part of a block, and the blocks around it fit."""
        if not self._index.start <= at.block < self._index.start + self._index.blocks:
            return False
        fit = all((number <= at.number) == (block <= at.block) for number, block in self._known if block != at.block)
        return fit and at.offset < self._view.entry(at.block).end


def store(files: Files, stem: str, rdx: str, state: ReaderState, room: Reserve) -> None:
    """Have the .rdx and a new log say so, durably. Who is killed in between leaves a log that is corrected by the next repair."""
    state.clock = state.clock.now(files.boot())
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open(stem + LOCK)]) as (fd,):
        if files.size(fd) > witness.SIZE:  # there is a seal
            files.truncate(fd, witness.SIZE)
            files.sync(fd)
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open(rdx)]) as (fd,):
        files.write(fd, zbus.pack_position(*state.committed_position()[:2]), 0)
        files.sync(fd)
    journal.create(files, stem + LOG, lambda generation: reader_log.snapshot(state, generation), "reader", room).close()
