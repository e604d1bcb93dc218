"""The state of a topic's reader, and its log ``state/R.log``: the bytes of its frames.

The processes that share the reader append to it in turn, under its lock. A frame is JSON: kind 1, first, the whole state;
kind 6 a list, the name of a method of `ReaderState` and its arguments; kind 7, empty, says that ``reader/R.rdx``, which
follows the log for zbus servers, is durable and says the same: if it says something else then, such a server has changed it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from qewqew_core import journal
from qewqew_core.errors import CorruptQueue
from qewqew_core.state import CHANGES, BatchState, Leases
from qewqew_core.view import Position

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_tuple = tuple.__new__  # half the time of the constructor of a NamedTuple
MAGIC = b"QEWQRDR1"
_SNAPSHOT, OPERATION, CHECKPOINT = 1, 6, 7


class Range(NamedTuple):
    """Messages from ``start`` to before ``stop``, or all that follow."""

    start: Position
    stop: Position | None


class Flight(NamedTuple):
    """A message that was delivered and is not committed."""

    at: Position
    owner: int  # the `Reader` object that has it; 0: nobody any more
    due: int | None  # when it is delivered again, milliseconds since the epoch; None: when its owner is gone
    attempt: int
    session: str | None = None  # its fate is that of this session, which is about to be committed


@dataclass(slots=True, eq=False)
class ReaderState(Leases):
    """What a reader has still to deliver (in order), what it has delivered, and its batches."""

    todo: list[Range] = field(default_factory=list)  # the last one has no stop
    flight: dict[int, Flight] = field(default_factory=dict)  # by the offset of the message in the topic
    filter: str | None = None
    lost: int = 0  # messages that were removed from the topic before they were delivered
    ranges: dict[str, list[Range]] = field(default_factory=dict)  # of batches that are not acknowledged
    clean: bool = False  # a checkpoint was the last that was written
    prepared: set[str] = field(default_factory=set)  # sessions that are about to be committed
    _first: list[tuple[Position, int]] = field(default_factory=list)  # heap of places and offsets, also of those committed since

    def __post_init__(self) -> None:
        self._first = [(one.at, offset) for offset, one in self.flight.items()]
        heapq.heapify(self._first)
        self.prepared = {one.session for one in self.flight.values() if one.session is not None}

    def floor(self) -> Position:
        """The first message that is not committed, or where the next one will be. Batches that are dead are over."""
        places = [self.todo[0].start]
        while self._first and self._first[0][1] not in self.flight:
            heapq.heappop(self._first)
        if self._first:
            places.append(self._first[0][0])
        for batch_id, ranges in self.ranges.items():
            if self.batches[batch_id].state in ("leased", "returned"):
                places.append(min(ranges).start)
        return min(places)

    def furthest(self) -> Position:
        """Where the messages begin that were never delivered, or the last one that was."""
        return max((self.todo[-1].start, *(one.at for one in self.flight.values())))

    # Operations

    def deliver(self, owner: int, due: int | None, entries: list[Any], todo: list[Any]) -> None:
        """``entries``: (offset, block, place, number, attempt) of each message."""
        flight, first = self.flight, self._first
        for offset, block, place, number, attempt in entries:
            at = _tuple(Position, (block, place, number))
            if offset not in flight:
                heapq.heappush(first, (at, offset))
            flight[offset] = _tuple(Flight, (at, owner, due, attempt, None))
        if len(first) > 1000 + 4 * len(flight):  # one that stays must not keep all that were committed since
            self._first = [(one.at, offset) for offset, one in flight.items()]
            heapq.heapify(self._first)
        self.todo = _ranges(todo)

    def commit(self, offsets: list[int], todo: list[Any] | None) -> None:
        for offset in offsets:
            del self.flight[offset]
        if not self.flight:
            self._first.clear()  # at once, not one by one
        if todo is not None:
            self.todo = _ranges(todo)

    def give_back(self, offsets: list[int], due: int) -> None:
        """To be delivered again, from ``due`` on."""
        for offset in offsets:
            self.flight[offset] = self.flight[offset]._replace(owner=0, due=due, session=None)

    def move(self, todo: list[Any], lost: int) -> None:
        """Go on elsewhere: what was delivered is nobody's business any more."""
        self.flight.clear()
        self.prepared.clear()
        self.todo = _ranges(todo)
        self.lost += lost

    def lose(self, todo: list[Any], offsets: list[int], lost: int) -> None:
        """The oldest messages are no more."""
        for offset in offsets:
            del self.flight[offset]
        self.todo = _ranges(todo)
        self.lost += lost

    def set_filter(self, text: str | None) -> None:
        self.filter = text

    def prepare(self, session: str, offsets: list[int]) -> None:
        """The topic's log is about to say whether these are committed."""
        self.prepared.add(session)
        for offset in offsets:
            self.flight[offset] = self.flight[offset]._replace(session=session)

    def unprepare(self, session: str) -> None:
        """It was not committed, and its owner still has them."""
        self.prepared.discard(session)
        for offset, one in self.flight.items():
            if one.session == session:
                self.flight[offset] = one._replace(session=None)

    def resolve(self, session: str, committed: bool, due: int) -> None:
        """The topic's log has said it."""
        self.prepared.discard(session)
        for offset, one in list(self.flight.items()):
            if one.session == session:
                if committed:
                    del self.flight[offset]
                else:
                    self.give_back([offset], due)

    def lease(self, batch: dict[str, Any], ranges: list[Any], offsets: list[int], todo: list[Any]) -> None:
        state = BatchState(**batch)
        self.batches[state.id] = state
        self.ranges[state.id] = _ranges(ranges)
        self.commit(offsets, todo)

    def put_back(self, batch_id: str, todo: list[Any]) -> None:
        del self.batches[batch_id]
        del self.ranges[batch_id]
        self.todo = _ranges(todo)

    def change(self, op: str, time: int, arguments: dict[str, Any]) -> None:
        """One of `state.CHANGES`."""
        CHANGES[op](self, time, arguments)
        for batch_id in list(self.ranges):
            if batch_id not in self.batches or self.batches[batch_id].state == "acked":
                del self.ranges[batch_id]


BATCH_OPERATIONS = ("lease", "put_back", "change")  # what files follow
_OPERATIONS = {
    name: getattr(ReaderState, name)
    for name in (
        *("deliver", "commit", "give_back", "move", "lose", "set_filter", "prepare", "unprepare", "resolve"),
        *BATCH_OPERATIONS,
    )
}


def _ranges(body: Iterable[Any]) -> list[Range]:
    return [Range(Position(*start), None if stop is None else Position(*stop)) for start, stop in body]


def operation(name: str, *arguments: Any) -> bytes:
    return _encode([name, *arguments]).encode()


def apply(state: ReaderState, name: str, *arguments: Any) -> None:
    _OPERATIONS[name](state, *arguments)
    state.clean = False


_BATCH_FIELDS = [one.name for one in fields(BatchState) if one.name != "chunks"]


def batch_fields(batch: BatchState) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in _BATCH_FIELDS}


def snapshot(state: ReaderState, generation: int) -> bytes:
    body = {
        "todo": state.todo,
        "flight": [[offset, *one] for offset, one in state.flight.items()],
        "filter": state.filter,
        "lost": state.lost,
        "batches": [batch_fields(batch) for batch in state.batches.values()],
        "ranges": state.ranges,
        "expired_keys": [[key.hex(), *value] for key, value in state.expired_keys.items()],
    }
    return journal.head(MAGIC, generation) + journal.frame(_SNAPSHOT, json.dumps(body).encode(), generation)


def _load(body: bytes) -> ReaderState:
    data = json.loads(body)
    return ReaderState(
        todo=_ranges(data["todo"]),
        flight={offset: Flight(Position(*at), *rest) for offset, at, *rest in data["flight"]},
        filter=data["filter"],
        lost=data["lost"],
        batches={one["id"]: BatchState(**one) for one in data["batches"]},
        ranges={batch_id: _ranges(ranges) for batch_id, ranges in data["ranges"].items()},
        expired_keys={bytes.fromhex(key): (time, number) for key, time, number in data["expired_keys"]},
    )


class Replayed(NamedTuple):
    state: ReaderState
    generation: int
    snapshot_end: int
    end: int


def replay(data: bytes, path: str) -> Replayed:
    """What a log says; raises `CorruptQueue` with path and offset."""
    generation = journal.generation_of(data, MAGIC, path)
    state: ReaderState | None = None
    snapshot_end = end = journal.BEGIN
    for frame in journal.frames(data, generation):
        end = frame.end
        if state is not None:
            replay_frame(frame, state, path, 0)
            continue
        try:
            if frame.kind != _SNAPSHOT:
                raise ValueError("no snapshot comes first")
            state, snapshot_end = _load(frame.body), end
        except NONSENSE as error:
            raise CorruptQueue(f"the snapshot of the log cannot be read: {error!r}", path=path, offset=frame.start) from error
    if state is None or journal.was_durable(data, generation, end, (OPERATION, CHECKPOINT)):
        raise CorruptQueue("a frame of the reader's log is damaged", path=path, offset=end)
    try:
        _check(state)
    except NONSENSE as error:
        raise CorruptQueue(f"the log as a whole makes no sense: {error!r}", path=path, offset=end) from error
    return Replayed(state, generation, snapshot_end, end)


def _check(state: ReaderState) -> None:
    """Raises ValueError and the like for what no `Reader` could go on with: nothing of ours has written that."""
    if state.todo[-1].stop is not None or not state.ranges.keys() <= state.batches.keys():
        raise ValueError("there is no end to it, or no batch")
    ends = [end for ranges in (state.todo, *state.ranges.values()) for one in ranges for end in one if end is not None]
    places = ends + [one.at for one in state.flight.values()]
    if any(type(number) is not int for numbers in (*places, state.flight, (state.lost,)) for number in numbers):
        raise ValueError("a place is no number")
    if any(type(one) is not str for one in (*state.batches, "" if state.filter is None else state.filter)):
        raise ValueError("the filter, or the id of a batch, is no text")
    state.floor()


NONSENSE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


def replay_frame(frame: journal.Frame, state: ReaderState, path: str, base: int) -> str:
    """Apply one frame, which begins at ``base`` + its start in the file; returns the operation's name, "" for a checkpoint."""
    try:
        if frame.kind == CHECKPOINT:
            state.clean = True
            return ""
        if frame.kind != OPERATION:
            raise ValueError(f"unknown frame kind {frame.kind}")
        name, *arguments = json.loads(frame.body)
        apply(state, name, *arguments)
        return str(name)
    except NONSENSE as error:
        # The checksum is right, so this was written so: better no reader than a wrong one.
        raise CorruptQueue(
            f"a frame of the log contradicts what came before it: {error!r}", path=path, offset=base + frame.start
        ) from error
