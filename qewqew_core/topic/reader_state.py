"""What a reader of a topic has still to deliver, has delivered, and has leased, at one moment; and the operations on that.

Calls and the replay of the log change it with the same `ReaderState.apply`. No files, no bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, field
from itertools import chain, count, repeat
from typing import NamedTuple

from qewqew_core.batch.batch_operations import BatchOperation
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.topic.view import Position

LONGEST_RANGE = 1 << 20  # the largest window
_tuple = tuple.__new__  # half the time of the constructor of a NamedTuple


class Range(NamedTuple):
    """Messages from ``start`` up to ``stop``, or all that follow."""

    start: Position
    stop: Position | None


class Flight(NamedTuple):
    """A message that was delivered and is not committed."""

    at: Position
    owner: int  # the `Reader` object that has it; 0: nobody any more
    due: int | None  # when it is delivered again, milliseconds since the epoch; None: when its owner is gone
    attempt: int
    session: str | None = None  # its fate is that of this session, which is about to be committed


# Messages of a block that are delivered together, and whose numbers follow each other: the offset of the block, the block,
# which time they are delivered, the number of the first, and where in the block each begins.
Delivered = tuple[int, int, int, int, Sequence[int]]


def _offsets(base: int, places: Sequence[int]) -> Sequence[int]:
    if isinstance(places, range):
        return range(base + places.start, base + places.stop, places.step)
    return [base + place for place in places]


# Operations


class Deliver(NamedTuple):
    """Messages are delivered."""

    owner: int
    due: int | None
    delivered: list[Delivered]
    pending: list[Range]


class Commit(NamedTuple):
    """Delivered messages are committed."""

    offsets: Sequence[int]
    pending: list[Range] | None  # None: as it was


class Requeue(NamedTuple):
    """They will be delivered again, from ``due`` on."""

    offsets: Sequence[int]
    due: int


class Move(NamedTuple):
    """The reader goes on elsewhere."""

    pending: list[Range]
    lost: int


class Lose(NamedTuple):
    """Messages are gone: the oldest ones, or those that a power cut took."""

    pending: list[Range]
    offsets: Sequence[int]
    lost: int


class SetFilter(NamedTuple):
    text: str | None


class Prepare(NamedTuple):
    """The topic's log will decide whether these are committed."""

    session: str
    offsets: Sequence[int]


class Unprepare(NamedTuple):
    """It was not, and the owner of the session still has them."""

    session: str


class Resolve(NamedTuple):
    """The topic's log has decided."""

    session: str
    committed: bool
    due: int


class Lease(NamedTuple):
    """A new batch."""

    batch: BatchState
    ranges: list[Range]  # its messages, and others that its filter passes over
    offsets: Sequence[int]  # of messages that were in flight, for nobody
    pending: list[Range]


class PutBack(NamedTuple):
    """Messages of a batch will be delivered again."""

    batch: str
    pending: list[Range]


class Change(NamedTuple):
    """Something else happens to a batch."""

    operation: BatchOperation
    time: int


Operation = Deliver | Commit | Requeue | Move | Lose | SetFilter | Prepare | Unprepare | Resolve | Lease | PutBack | Change


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


@dataclass(slots=True, eq=False)
class ReaderState(LeaseState):
    """What a reader has still to deliver (in order), what it has delivered, and its batches."""

    pending: list[Range] = field(default_factory=list)  # the last one has no stop
    in_flight: Flights = field(default_factory=Flights)
    filter: str | None = None
    lost: int = 0  # messages that were removed from the topic before they were delivered
    ranges: dict[str, list[Range]] = field(default_factory=dict)  # of batches that are not acknowledged
    clean: bool = False  # a checkpoint was the last that was written
    prepared: set[str] = field(default_factory=set)  # sessions that are about to be committed
    passed: tuple[int, int] = (0, 0)  # before the reader was moved back, since the checkpoint: its furthest `committed_position`
    # The block of its `committed_position` at the checkpoint or in the snapshot, when the .rdx on disk said the same.
    began: int = 0

    def __post_init__(self) -> None:
        self.prepared = {flight.session for flight in self.in_flight.values() if flight.session is not None}

    def committed_position(self) -> Position:
        """The first uncommitted message, or the next one to come. Dead batches count as done."""
        place = min(self.pending[0].start, self.in_flight.first() or self.pending[0].start)
        for batch_id, ranges in self.ranges.items():
            if self.batches[batch_id].state in ("leased", "returned"):
                place = min(place, min(ranges).start)
        return place

    def reached(self) -> tuple[int, int]:
        """The furthest `committed_position` since the checkpoint: this log never knew an .rdx that lies behind it."""
        return max(self.passed, self.committed_position()[:2])

    def furthest(self) -> Position:
        """Where the undelivered messages begin, or the last message that was delivered."""
        return max((self.pending[-1].start, *(flight.at for flight in self.in_flight.values())))

    def apply(self, operation: Operation, time: int = 0) -> None:
        """Raises ValueError, KeyError and the like for impossible operations. Frequent operations have their own method."""
        flights = self.in_flight
        match operation:
            case Deliver(owner, due, delivered, pending):
                flights.deliver(owner, due, delivered)
                self.pending = list(pending)
            case Commit(offsets, left):
                flights.remove(offsets)
                if left is not None:
                    self.pending = list(left)
            case Requeue(offsets, due):
                self._requeue(offsets, due)
            case Move(pending, lost):
                self._go_elsewhere(pending, [*flights], lost)
                self.prepared.clear()
            case Lose(pending, offsets, lost):
                self._go_elsewhere(pending, offsets, lost)
            case SetFilter(text):
                self.filter = text
            case Prepare(session, offsets):
                self.prepared.add(session)
                for offset in offsets:
                    flights[offset] = flights[offset]._replace(session=session)
            case Unprepare(session):
                self.prepared.discard(session)
                for offset in self.of_session(session):
                    flights[offset] = flights[offset]._replace(session=None)
            case Resolve(session, committed, due):
                self.prepared.discard(session)
                if committed:
                    flights.remove(self.of_session(session))
                else:
                    self._requeue(self.of_session(session), due)
            case Lease(batch, ranges, offsets, pending):
                self.batches[batch.id], self.ranges[batch.id] = batch, list(ranges)
                self.last_lease = batch.created
                flights.remove(offsets)
                self.pending = list(pending)
            case PutBack(batch_id, pending):
                self.passed = self.reached()
                del self.batches[batch_id], self.ranges[batch_id]
                self.pending = list(pending)
            case Change(change, when):
                self.passed = self.reached()
                self.apply_to_batch(change, when)
                for batch_id in list(self.ranges):
                    if batch_id not in self.batches:
                        del self.ranges[batch_id]
        self.clean = False

    def _go_elsewhere(self, pending: list[Range], offsets: Sequence[int], lost: int) -> None:
        self.passed = self.reached()
        self.in_flight.remove(offsets)
        self.pending = list(pending)
        self.lost += lost

    def _requeue(self, offsets: Sequence[int], due: int) -> None:
        for offset in offsets:
            self.in_flight[offset] = self.in_flight[offset]._replace(owner=0, due=due, session=None)

    def of_session(self, session: str) -> list[int]:
        """The offsets of messages in flight that this session is about to commit."""
        return [offset for offset, flight in self.in_flight.items() if flight.session == session]

    def check(self) -> None:
        """Raises ValueError and the like for a state that no `Reader` could use and QewQew never writes."""
        if self.pending[-1].stop is not None or not self.ranges.keys() <= self.batches.keys():
            raise ValueError("there is no end to it, or no batch")
        ends = [end for ranges in (self.pending, *self.ranges.values()) for part in ranges for end in part if end is not None]
        places = ends + [flight.at for flight in self.in_flight.values()]
        if any(type(number) is not int for numbers in (*places, self.in_flight, (self.lost,), self.passed) for number in numbers):
            raise ValueError("a position is not a number")
        if any(type(text) is not str for text in (*self.batches, "" if self.filter is None else self.filter)):
            raise ValueError("the filter, or the id of a batch, is not text")
        self.committed_position()


def evenly(numbers: list[int]) -> Sequence[int]:
    """The same numbers, as a range if their distances are all the same: that takes almost no room in the log."""
    if len(numbers) < 3 or (step := numbers[1] - numbers[0]) <= 0:
        return numbers
    even = range(numbers[0], numbers[-1] + 1, step)
    return even if len(even) == len(numbers) <= LONGEST_RANGE and [*even] == numbers else numbers
