"""What a reader of a topic has still to deliver, has delivered, and has leased, at one moment; and the operations on that.

Calls and the replay of the log change it with the same `ReaderState.apply`. No files, no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qewqew_core.batch.batch_operations import BatchOperation
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.topic.in_flight import Delivered, Flights
from qewqew_core.topic.view import Position


class Range(NamedTuple):
    """Messages from ``start`` up to ``stop``, or all that follow."""

    start: Position
    stop: Position | None


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
    """They will be delivered again, from ``due`` on, in elapsed time; 0: at once."""

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
    """Another filter; messages in flight that do not match it count as read from now on."""

    text: str | None
    offsets: Sequence[int]


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
    temporary: bool = False  # whether the reader is to end with its last consumer; its .rdx must say so, too

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
            case SetFilter(text, offsets):
                self.filter = text
                flights.remove(offsets)
                self.prepared &= {str(flight.session) for flight in flights.values()}
            case Prepare(session, offsets):
                self.prepared.add(session)
                for offset in offsets:
                    flights[offset] = flights[offset]._replace(session=session)
            case Unprepare(session):
                self.prepared.discard(session)
                for offset in self.of_session(session):
                    flights[offset] = flights[offset]._replace(session=None)
            case Resolve(session, committed):
                self.prepared.discard(session)
                if committed:
                    flights.remove(self.of_session(session))
                else:
                    self._requeue(self.of_session(session), 0)
            case Lease(batch, ranges, offsets, pending):
                self.batches[batch.id], self.ranges[batch.id] = batch, list(ranges)
                self.last_lease = batch.created
                self.clock = self.clock.until(batch.created)
                flights.remove(offsets)
                self.pending = list(pending)
            case PutBack(batch_id, pending):
                self.passed = self.reached()
                del self.batches[batch_id], self.ranges[batch_id]
                self.pending = list(pending)
            case Change(change, when):
                self.passed = self.reached()
                self.apply_to_batch(change, when)
                self.clock = self.clock.until(when)
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
