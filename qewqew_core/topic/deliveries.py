"""`Deliveries`: which messages a reader delivers next, and which of them a consumer has.

A message that was delivered is in flight until it is committed or given back. It is delivered again when its time is over, or
when the process that had it has died.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from qewqew_core.disk.engine import Engine
from qewqew_core.errors import BadArgument, CommitConflict, Full
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message
from qewqew_core.topic.in_flight import Delivered, evenly
from qewqew_core.topic.reader_inspection import lost_of, matches
from qewqew_core.topic.reader_state import Commit, Deliver, Lose, Range, ReaderState, Requeue, SetFilter
from qewqew_core.topic.shared_log import Consumer, SharedLog
from qewqew_core.topic.view import SCAN, WINDOW, Position, Stretch, View

_offset_and_attempt = attrgetter("offset", "attempt")
_logger = logging.getLogger(__name__)


class Deliveries:
    """What one consumer of the reader ``name`` has. Call it with the lock of the shared log's engine.

    ``window``, ``redeliver_after``, ``auto_commit``: as of `Topic.reader`.
    """

    def __init__(
        self,
        name: str,
        shared: SharedLog,
        consumer: Consumer,
        view: View,
        window: int,
        redeliver_after: float | None,
        auto_commit: bool,
    ) -> None:
        self._name = name
        self._shared = shared
        self._engine: Engine[ReaderState] = shared.engine
        self._consumer = consumer
        self._view = view
        self._window = window
        self._redeliver_after = redeliver_after
        self._auto_commit = auto_commit

    # Delivering

    def peek(self) -> list[Message]:
        """The next message, without delivering it; [] if there is none."""
        blocks = self.drop_lost()
        for message, _ in self.again(1):
            return [message]
        for start, stop in self._engine.state.pending:
            for stretch in self._view.stretches(start, stop, self._consumer.filter, most=1, blocks=blocks):
                if stretch.places:
                    return stretch.messages()
        return []

    def deliver(self, max_records: int, max_bytes: int | None) -> tuple[list[Message], int | None]:
        """Deliver the next messages. They are in flight from now on or, with ``auto_commit``, committed: then the position
        of that commit is returned too.
        """
        messages, delivered, pending = self._pick(max_records, max_bytes, self.drop_lost())
        if not messages and pending == self._engine.state.pending:
            return [], None
        if self._auto_commit:
            again = list({message.offset: None for message in messages if message.offset in self._engine.state.in_flight})
            return messages, self._shared.commit(Commit(again, pending))
        due = None if self._redeliver_after is None else self._engine.clock().elapsed + int(self._redeliver_after * 1000)
        self._shared.commit(Deliver(self._consumer.owner, due, delivered, pending))
        if due is not None:
            self._consumer.due = min(self._consumer.due, due)
        self._consumer.mine.update(map(_offset_and_attempt, messages))
        return messages, None

    def _pick(self, max_records: int, max_bytes: int | None, blocks: range) -> tuple[list[Message], list[Delivered], list[Range]]:
        """The next messages, the same as `Deliver` has them, and what is to be delivered after them.

        ``blocks``: those of the topic.
        """
        messages: list[Message] = []
        delivered: list[Delivered] = []
        pending = list(self._engine.state.pending)
        room = sys.maxsize if max_bytes is None else max_bytes

        for message, at in self.again(max_records):
            if messages and len(message.body) > room:
                return messages, delivered, pending
            messages.append(message)
            delivered.append((message.offset - at.offset, at.block, message.attempt, at.number, [at.offset]))
            room -= len(message.body)
        in_flight = len(self._engine.state.in_flight)
        free = max_records if self._auto_commit else min(max_records, self._window - in_flight + len(messages))
        if messages and (len(messages) >= free or room <= 0):
            return messages, delivered, pending
        chosen = self._consumer.filter or None
        window = WINDOW if max_records == 1 and chosen is None else SCAN
        rest = list(pending)  # if the limits end it here: what does not match behind the last message is not passed over
        while pending:
            start, stop = pending[0]
            reached = start
            for stretch in self._view.stretches(start, stop, chosen, window, max(1, free - len(messages)), blocks=blocks):
                if stretch.places:
                    if free <= 0:
                        raise Full(
                            f"{in_flight:,} messages are delivered and not committed, as many as window allows: "
                            "commit them, or give them back (nack)",
                            path=self._engine.path,
                        )
                    count, room = _fitting(stretch.bodies, room, not messages)
                    if count:
                        taken = stretch.first(count)
                        messages += taken.messages()
                        delivered += _delivered(taken)
                        rest = [Range(taken.behind() if chosen else taken.reached, stop), *pending[1:]]
                    if count < len(stretch.places) or len(messages) >= free or room <= 0:
                        return messages, delivered, rest
                reached = stretch.reached
            pending[0] = Range(reached, stop)
            if stop is None:
                break
            pending.pop(0)
        return messages, delivered, pending

    def again(self, most: int) -> Iterator[tuple[Message, Position]]:
        """The messages in flight that are due for another delivery, in order, with their places; read one by one."""
        in_flight, dead = self._engine.state.in_flight, self._shared.dead_owners()
        if not in_flight:
            return
        now = self._engine.clock().elapsed
        if now < self._consumer.due and not dead:
            return
        free = {offset: flight for offset, flight in in_flight.items() if flight.session is None}
        due = sorted(
            offset for offset, flight in free.items() if (flight.due is not None and flight.due <= now) or flight.owner in dead
        )
        next_due = min((flight.due for flight in free.values() if flight.due is not None), default=sys.maxsize)
        self._consumer.due = 0 if due else next_due
        for offset in due[:most]:
            flight = in_flight[offset]
            message = self._view.message(flight.at)
            if message is None:
                break  # it was removed from the topic since `drop_lost`
            yield message._replace(attempt=flight.attempt + 1), flight.at

    def set_filter(self, chosen: Filter) -> int:
        """Deliver only what matches from now on; what is in flight and does not counts as read. Returns the position."""
        self.drop_lost()
        flights = sorted(self._engine.state.in_flight.items())
        offsets = [offset for offset, flight in flights if not matches(self._view, flight.at, chosen)]
        position = self._shared.commit(SetFilter(chosen.text, evenly(offsets)))
        self._consumer.filter = chosen
        self._consumer.pass_over(offsets)
        return position

    def drop_lost(self) -> range:
        """Move on if the oldest messages were removed from the topic before they were committed; returns the blocks."""
        blocks = self._view.blocks()
        found = lost_of(self._engine.state, self._view, blocks.start)
        if found is not None:
            if lost := found[2]:  # else it has committed all that is gone
                _logger.warning("reader %s: %d messages were removed from the topic before they were committed", self._name, lost)
            self._shared.commit(Lose(*found))
            self._consumer.refresh(self._engine.state)
        return blocks

    # What is with this consumer

    def commit(self, messages: tuple[Message, ...]) -> tuple[int, int]:
        """Commit these messages, or without arguments all that this consumer has. Returns the position of the commit, and
        how many.
        """
        offsets = self.check_mine(messages)
        passed = self._take_passed(messages) if self._consumer.passed else 0
        if not offsets:
            return 0, passed
        position = self._shared.commit(Commit(evenly(offsets), None))
        for offset in offsets:
            del self._consumer.mine[offset]
        return position, len(offsets) + passed

    def nack(self, messages: tuple[Message, ...], delay: float) -> int:
        """Give them back for ``delay`` seconds, or without arguments all that this consumer has. Returns how many are delivered
        again.
        """
        offsets = self.check_mine(messages)
        self._take_passed(messages)
        self.requeue(offsets, delay)
        return len(offsets)

    def _take_passed(self, messages: tuple[Message, ...]) -> int:
        """How many of these, or of all that this consumer has, count as read: it has them no longer."""
        passed = self._consumer.passed
        offsets = {*self._consumer.has_passed(messages)} if messages else {*passed}
        for offset in offsets:
            del passed[offset]
        return len(offsets)

    def requeue(self, offsets: list[int], delay: float = 0.0) -> None:
        """Deliver messages again, first, after ``delay`` seconds."""
        if offsets:
            due = self._engine.clock().elapsed + int(delay * 1000) if delay else 0
            self._shared.commit(Requeue(offsets, due))
            self._consumer.due = min(self._consumer.due, due)
            self._consumer.refresh(self._engine.state)

    def check_mine(self, messages: tuple[Message, ...]) -> list[int]:
        """The offsets of messages that this consumer has and has not committed. Raises `CommitConflict`."""
        mine, state = self._consumer.mine, self._engine.state
        if not messages:
            if not state.prepared:
                return list(mine)
            return [offset for offset in mine if state.in_flight[offset].session is None]
        offsets: dict[int, None] = {}  # a message may be given twice
        for message in messages:
            if not isinstance(message, Message) or message.offset < 0:
                what = "one that was made" if isinstance(message, Message) else type(message).__name__
                raise BadArgument(f"commit and nack take messages that were read, not {what}")
            if mine.get(message.offset) == message.attempt:
                offsets[message.offset] = None
            elif message.offset in state.in_flight or self._is_ahead(message):
                raise CommitConflict(
                    f"message {message.number} is not with this consumer: it was delivered again since (redeliver_after), given "
                    "back, or the reader was moved. Nothing was changed",
                    path=self._engine.path,
                )
        return list(offsets)

    def _is_ahead(self, message: Message) -> bool:
        pending, number = self._engine.state.pending, message.number
        return any(start.number <= number and (stop is None or number < stop.number) for start, stop in pending)


def _fitting(bodies: list[bytes], room: int, first: bool) -> tuple[int, int]:
    """How many of these have ``room`` together, and what is left of it; the ``first`` is taken whatever its size."""
    if (size := sum(map(len, bodies))) < room:
        return len(bodies), room - size
    for count, body in enumerate(bodies):
        if len(body) > room and not (first and count == 0):
            return count, room
        room -= len(body)
        if room <= 0:
            return count + 1, room
    raise AssertionError


def _delivered(stretch: Stretch) -> list[Delivered]:
    """The messages of a stretch, parted where a filter holds others back between them."""
    numbers = stretch.heads.numbers
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return [(stretch.base, stretch.block, 1, numbers[0], evenly(stretch.places))]
    ends = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    parts = pairwise((0, *ends, len(numbers)))
    return [(stretch.base, stretch.block, 1, numbers[begin], stretch.places[begin:end]) for begin, end in parts]
