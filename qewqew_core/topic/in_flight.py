"""`Flights`: the messages that a reader has delivered and that are not committed. They come and go by the thousand."""

from __future__ import annotations

import heapq
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from itertools import chain, count, repeat
from typing import NamedTuple

from qewqew_core.topic.view import Position

LONGEST_RANGE = 1 << 20  # the largest window
_tuple = tuple.__new__  # half the time of the constructor of a NamedTuple


class Flight(NamedTuple):
    """A message that was delivered and is not committed."""

    at: Position
    owner: int  # the `Reader` object that has it; 0: nobody any more
    due: int | None  # when it is delivered again, in elapsed time (0: at once); None: when its owner is gone
    attempt: int
    session: str | None = None  # its fate is that of this session, which is about to be committed


# Messages of a block that are delivered together, and whose numbers follow each other: the offset of the block, the block,
# which time they are delivered, the number of the first, and where in the block each begins.
Delivered = tuple[int, int, int, int, Sequence[int]]


def _offsets(base: int, places: Sequence[int]) -> Sequence[int]:
    if isinstance(places, range):
        return range(base + places.start, base + places.stop, places.step)
    return [base + place for place in places]


class Flights(MutableMapping[int, Flight]):
    """Messages in flight, by their offset in the topic.

    The latest delivery stays as it came until somebody asks for one of its messages, which a commit of all of them never does.
    """

    def __init__(self, flights: Mapping[int, Flight] | None = None) -> None:
        self._entered = dict(flights or {})
        self._heap = sorted(self._entered)  # offsets, also of some that were committed since
        self._highest = max(self._entered, default=-1)  # that ever was in the heap
        self._last: Sequence[int] = []  # offsets of what was handed out last, and is not entered yet …
        self._how: tuple[int, int | None, list[Delivered]] = (0, None, [])  # … and how

    def deliver(self, owner: int, due: int | None, delivered: list[Delivered]) -> None:
        self._enter()
        if not all(together[4] for together in delivered):
            raise ValueError("messages are delivered, and there are none")
        if len(self._entered) > LONGEST_RANGE:
            raise ValueError("more messages are in flight than fit into a window")
        each = [_offsets(base, places) for base, _, _, _, places in delivered]
        self._last = each[0] if len(each) == 1 else evenly([*chain.from_iterable(each)])
        self._how = owner, due, delivered
        if self._entered and not self._entered.keys().isdisjoint(self._last):  # it was in flight before
            self._enter()

    def remove(self, offsets: Sequence[int]) -> None:
        if offsets == self._last:
            self._last = []
            return
        entered = self._enter()
        for offset in offsets:
            del entered[offset]
        if not entered:
            self._heap.clear()  # at once, not one by one

    def first(self) -> Position | None:
        """Where the first of them is."""
        while self._heap and self._heap[0] not in self._entered:
            heapq.heappop(self._heap)
        place = self._entered[self._heap[0]].at if self._heap else None
        for _, block, _, number, places in self._how[2] if self._last else ():
            if place is None or (block, places[0]) < place[:2]:
                place = Position(block, places[0], number)
        return place

    def _enter(self) -> dict[int, Flight]:
        if self._last:
            owner, due, delivered = self._how
            for base, block, attempt, number, places in delivered:
                offsets = _offsets(base, places)
                self._expect(offsets)
                # Whole columns at a time: messages are delivered by the thousand.
                ats = map(_tuple, repeat(Position), zip(repeat(block), places, count(number), strict=False))
                flights = zip(ats, repeat(owner), repeat(due), repeat(attempt), repeat(None), strict=False)
                self._entered.update(zip(offsets, map(_tuple, repeat(Flight), flights), strict=False))
            self._last = []
        return self._entered

    def _expect(self, offsets: Sequence[int]) -> None:
        """These, which rise, are about to be entered."""
        if offsets[0] > self._highest:
            self._heap += offsets  # which are higher than all others, so it stays a heap
        else:
            for offset in offsets:
                if offset not in self._entered:
                    heapq.heappush(self._heap, offset)
        self._highest = max(self._highest, offsets[-1])
        if len(self._heap) > 1000 + 4 * (len(self._entered) + len(offsets)):
            self._heap = sorted({*self._entered, *offsets})  # one that stays must not keep all that were committed since

    def __repr__(self) -> str:
        return repr(self._enter())

    def __getitem__(self, offset: int) -> Flight:
        return self._enter()[offset]

    def __setitem__(self, offset: int, flight: Flight) -> None:
        self._enter()[offset] = flight  # which was there before

    def __delitem__(self, offset: int) -> None:
        self.remove([offset])

    def __iter__(self) -> Iterator[int]:
        return iter(self._enter())

    def __len__(self) -> int:
        return len(self._entered) + len(self._last)

    def items(self) -> ItemsView[int, Flight]:
        return self._enter().items()

    def values(self) -> ValuesView[Flight]:
        return self._enter().values()


def evenly(numbers: list[int]) -> Sequence[int]:
    """The same numbers, as a range if their distances are all the same: that takes almost no room in the log."""
    if len(numbers) < 3 or (step := numbers[1] - numbers[0]) <= 0:
        return numbers
    even = range(numbers[0], numbers[-1] + 1, step)
    return even if len(even) == len(numbers) <= LONGEST_RANGE and [*even] == numbers else numbers
