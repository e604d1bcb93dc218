"""The state of a topic's reader, and its log ``state/R.log``: the bytes of its frames.

The processes that share the reader append to it in turn, under its lock. A frame is JSON: kind 1, first, the whole state;
kind 6 a list, the name of a method of `ReaderState` and its arguments (where these are numbers at even distances, as offsets
of messages of one size are, ``{"range": [start, stop, step]}`` stands for them); kind 7, empty, says that ``reader/R.rdx``, which
follows the log for zbus servers, is durable and says the same: if it says something else then, such a server has changed it.

``state/R.lock`` begins with the *seal*: which log there is, and up to where it was on disk when that was written last. A log that
has another generation, or ends before that, was cut, put back or exchanged::

     0            4         8       12
    ┌────────────┬─────────┬───────┐
    │ generation │ end u32 │ crc32 │   anything else is no seal, and vouches for nothing
    └────────────┴─────────┴───────┘
"""

from __future__ import annotations

import heapq
import json
import struct
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from itertools import chain, count, repeat
from typing import Any, NamedTuple

from qewqew_core import journal
from qewqew_core.errors import CorruptQueue
from qewqew_core.state import CHANGES, BatchState, Leases, checked
from qewqew_core.view import Position

_LONGEST_RANGE = 1 << 20  # the largest window
_tuple = tuple.__new__  # half the time of the constructor of a NamedTuple
MAGIC = b"QEWQRDR1"
_SNAPSHOT, OPERATION, CHECKPOINT = 1, 6, 7
_SEAL = struct.Struct(">III")
SEAL = _SEAL.size


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


# Messages of a block that are delivered together, and whose numbers follow each other: the offset of the block, the block,
# which time they are delivered, the number of the first, and where in the block each begins.
HandedOut = tuple[int, int, int, int, Sequence[int]]


def _offsets(base: int, places: Sequence[int]) -> Sequence[int]:
    if isinstance(places, range):
        return range(base + places.start, base + places.stop, places.step)
    return [base + place for place in places]


class Flights(MutableMapping[int, Flight]):
    """Messages in flight, by their offset in the topic.

    What was handed out last stays as it came, in runs, until somebody asks for one of them: who commits all of it never does.
    """

    def __init__(self, flights: Mapping[int, Flight] | None = None) -> None:
        self._entered = dict(flights or {})
        self._heap = sorted(self._entered)  # offsets, also of some that were committed since
        self._highest = max(self._entered, default=-1)  # that ever was in the heap
        self._last: Sequence[int] = []  # offsets of what was handed out last, and is not entered yet …
        self._how: tuple[int, int | None, list[HandedOut]] = (0, None, [])  # … and how

    def hand_out(self, owner: int, due: int | None, runs: list[HandedOut]) -> None:
        self._enter()
        if not all(run[4] for run in runs):
            raise ValueError("a run has no message")
        if len(self._entered) > _LONGEST_RANGE:
            raise ValueError("more messages are in flight than fit into a window")
        each = [_offsets(base, places) for base, _, _, _, places in runs]
        self._last = each[0] if len(each) == 1 else evenly([*chain.from_iterable(each)])
        self._how = owner, due, runs
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
            owner, due, runs = self._how
            for base, block, attempt, number, places in runs:
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

    def __setitem__(self, offset: int, one: Flight) -> None:
        self._enter()[offset] = one  # which was there before

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

    def clear(self) -> None:
        self.remove([*self])


@dataclass(slots=True, eq=False)
class ReaderState(Leases):
    """What a reader has still to deliver (in order), what it has delivered, and its batches."""

    todo: list[Range] = field(default_factory=list)  # the last one has no stop
    flight: Flights = field(default_factory=Flights)
    filter: str | None = None
    lost: int = 0  # messages that were removed from the topic before they were delivered
    ranges: dict[str, list[Range]] = field(default_factory=dict)  # of batches that are not acknowledged
    clean: bool = False  # a checkpoint was the last that was written
    prepared: set[str] = field(default_factory=set)  # sessions that are about to be committed
    passed: tuple[int, int] = (0, 0)  # before the reader was moved back, since the checkpoint: its furthest `floor`
    began: int = 0  # the block of its floor at the checkpoint or in the snapshot, when the .rdx on disk said the same

    def __post_init__(self) -> None:
        self.prepared = {one.session for one in self.flight.values() if one.session is not None}

    def floor(self) -> Position:
        """The first message that is not committed, or where the next one will be. Batches that are dead are over."""
        place = min(self.todo[0].start, self.flight.first() or self.todo[0].start)
        for batch_id, ranges in self.ranges.items():
            if self.batches[batch_id].state in ("leased", "returned"):
                place = min(place, min(ranges).start)
        return place

    def reached(self) -> tuple[int, int]:
        """The furthest `floor` since the checkpoint: what an .rdx says that lies behind it, this log has never known."""
        return max(self.passed, self.floor()[:2])

    def furthest(self) -> Position:
        """Where the messages begin that were never delivered, or the last one that was."""
        return max((self.todo[-1].start, *(one.at for one in self.flight.values())))

    # Operations

    def hand_out(self, owner: int, due: int | None, runs: list[HandedOut], todo: list[Any]) -> None:
        self.flight.hand_out(owner, due, runs)
        self.todo = _ranges(todo)

    def deliver(self, owner: int, due: int | None, entries: list[Any], todo: list[Any]) -> None:
        """The same in logs of before November 2026; ``entries``: (offset, block, place, number, attempt) of each message."""
        self.hand_out(
            owner, due, [(offset - at, block, attempt, number, [at]) for offset, block, at, number, attempt in entries], todo
        )

    def commit(self, offsets: Sequence[int], todo: list[Any] | None) -> None:
        self.flight.remove(offsets)
        if todo is not None:
            self.todo = _ranges(todo)

    def give_back(self, offsets: list[int], due: int) -> None:
        """To be delivered again, from ``due`` on."""
        for offset in offsets:
            self.flight[offset] = self.flight[offset]._replace(owner=0, due=due, session=None)

    def move(self, todo: list[Any], lost: int) -> None:
        """Go on elsewhere: what was delivered is nobody's business any more."""
        self.passed = self.reached()
        self.flight.clear()
        self.prepared.clear()
        self.todo = _ranges(todo)
        self.lost += lost

    def lose(self, todo: list[Any], offsets: list[int], lost: int) -> None:
        """Messages are no more: the oldest ones, or those that a power cut took."""
        self.passed = self.reached()
        self.flight.remove(offsets)
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
        state = checked(BatchState(**batch))
        self.batches[state.id] = state
        self.ranges[state.id] = _ranges(ranges)
        self.commit(offsets, todo)

    def put_back(self, batch_id: str, todo: list[Any]) -> None:
        self.passed = self.reached()
        del self.batches[batch_id]
        del self.ranges[batch_id]
        self.todo = _ranges(todo)

    def change(self, op: str, time: int, arguments: dict[str, Any]) -> None:
        """One of `state.CHANGES`."""
        self.passed = self.reached()
        CHANGES[op](self, time, arguments)
        for batch_id in list(self.ranges):
            if batch_id not in self.batches or self.batches[batch_id].state == "acked":
                del self.ranges[batch_id]


BATCH_OPERATIONS = ("lease", "put_back", "change")  # what files follow
_OPERATIONS = {
    name: getattr(ReaderState, name)
    for name in (
        *("hand_out", "deliver", "commit", "give_back", "move", "lose", "set_filter", "prepare", "unprepare", "resolve"),
        *BATCH_OPERATIONS,
    )
}


def _ranges(body: Iterable[Any]) -> list[Range]:
    return [Range(Position(*start), None if stop is None else Position(*stop)) for start, stop in body]


def evenly(numbers: list[int]) -> Sequence[int]:
    """The same, as a range if the distances between them are all the same: that takes next to no room in the log."""
    if len(numbers) < 3 or (step := numbers[1] - numbers[0]) <= 0:
        return numbers
    even = range(numbers[0], numbers[-1] + 1, step)
    return even if len(even) == len(numbers) <= _LONGEST_RANGE and [*even] == numbers else numbers


def _from_range(one: range) -> dict[str, Any]:
    return {"range": [one.start, one.stop, one.step]}


def _to_range(one: dict[str, Any]) -> Any:
    if "range" not in one:
        return one
    result = range(*one["range"])
    if len(result) > _LONGEST_RANGE:
        raise ValueError("a range is too long")
    return result


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_from_range).encode
_decode = json.JSONDecoder(object_hook=_to_range).decode


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
        "passed": state.passed,
    }
    return journal.head(MAGIC, generation) + journal.frame(_SNAPSHOT, json.dumps(body).encode(), generation)


def _load(body: bytes) -> ReaderState:
    data = json.loads(body)
    state = ReaderState(
        todo=_ranges(data["todo"]),
        flight=Flights({offset: Flight(Position(*at), *rest) for offset, at, *rest in data["flight"]}),
        filter=data["filter"],
        lost=data["lost"],
        batches={one["id"]: checked(BatchState(**one)) for one in data["batches"]},
        ranges={batch_id: _ranges(ranges) for batch_id, ranges in data["ranges"].items()},
        expired_keys={bytes.fromhex(key): (time, number) for key, time, number in data["expired_keys"]},
        passed=_pair(data.get("passed", (0, 0))),
    )
    state.began = state.floor().block
    return state


def _pair(body: Sequence[int]) -> tuple[int, int]:
    block, offset = body
    return block, offset


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
    if any(type(number) is not int for numbers in (*places, state.flight, (state.lost,), state.passed) for number in numbers):
        raise ValueError("a place is no number")
    if any(type(one) is not str for one in (*state.batches, "" if state.filter is None else state.filter)):
        raise ValueError("the filter, or the id of a batch, is no text")
    state.floor()


NONSENSE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


def replay_frame(frame: journal.Frame, state: ReaderState, path: str, base: int) -> str:
    """Apply one frame, which begins at ``base`` + its start in the file; returns the operation's name, "" for a checkpoint."""
    try:
        if frame.kind == CHECKPOINT:
            state.clean, state.passed, state.began = True, (0, 0), state.floor().block
            return ""
        if frame.kind != OPERATION:
            raise ValueError(f"unknown frame kind {frame.kind}")
        name, *arguments = _decode(frame.body.decode())
        apply(state, name, *arguments)
        return str(name)
    except NONSENSE as error:
        # The checksum is right, so this was written so: better no reader than a wrong one.
        raise CorruptQueue(
            f"a frame of the log contradicts what came before it: {error!r}", path=path, offset=base + frame.start
        ) from error


# The seal


class Seal(NamedTuple):
    generation: int
    end: int


def pack_seal(seal: Seal) -> bytes:
    data = _SEAL.pack(*seal, 0)[:-4]
    return data + zlib.crc32(data).to_bytes(4)


def unpack_seal(data: bytes) -> Seal | None:
    if len(data) < SEAL:
        return None
    generation, end, crc = _SEAL.unpack_from(data)
    return Seal(generation, end) if crc == zlib.crc32(data[: SEAL - 4]) else None


_WAY_OUT = "or `qewqew topic repair` (repair_topic) lets the reader go on at what its .rdx says: the first message not committed"


def missing(path: str) -> CorruptQueue:
    return CorruptQueue(f"the log of the reader is missing. Bring it back; {_WAY_OUT}", path=path)


def check_whole(found: Replayed, seal: Seal | None, rdx: tuple[int, int] | None, path: str) -> None:
    """Raises `CorruptQueue` if the log is another one than was here last, or its end is missing.

    ``rdx``: the place that the .rdx names; it never says more than is durable in the log, unless that ends with a checkpoint. A
    power cut may tear it, and leave a new block with the offset in the one before.
    """
    reached = found.state.reached()
    if seal is not None:
        if found.generation != seal.generation:
            raise CorruptQueue(f"this is not the log that the reader had last. Bring that back; {_WAY_OUT}", path=path, offset=0)
        if found.end < seal.end:
            raise CorruptQueue(
                f"the end of the reader's log is missing: {seal.end:,} bytes of it were on disk. Bring it back; {_WAY_OUT}",
                path=path,
                offset=found.end,
            )
    elif not found.state.clean and rdx is not None and (rdx[0] > reached[0] or (rdx > reached and rdx[0] == found.state.began)):
        raise CorruptQueue(
            f"the end of the reader's log is missing: by its .rdx all before offset {rdx[1]} of block {rdx[0]} is committed, and "
            f"not by the log. Bring it back; {_WAY_OUT}",
            path=path,
            offset=found.end,
        )
