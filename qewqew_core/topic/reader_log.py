"""The log ``state/R.wal`` of a topic's reader: the bytes of its frames.

The processes that share the reader append to it in turn, under its lock. A frame is JSON: kind 1, first, the whole state;
kind 6 a list, the name of an operation (`_NAMES`) and its fields (where these are numbers at even distances, as offsets
of messages of one size are, ``{"range": [start, stop, step]}`` stands for them); kind 7, empty, says that ``reader/R.rdx``, which
follows the log for zbus servers, is durable and says the same: if it says something else then, such a server has changed it;
kind 10 is a `Clock`.

Behind its `witness`, ``state/R.lock`` has the *seal*: which log there is, and up to where it was on disk when that was written
last. A log that has another generation, or ends before that, was cut, put back or exchanged::

     0            4         8       12
    ┌────────────┬─────────┬───────┐
    │ generation │ end u32 │ crc32 │   anything else is not a seal, and vouches for nothing
    └────────────┴─────────┴───────┘
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import reduce
from typing import Any, NamedTuple

from qewqew_core import clock as clocks
from qewqew_core.batch.batch_operations import BATCH_NAMES, batch_operation
from qewqew_core.batch.batch_state import BatchState, batch_fields, checked
from qewqew_core.batch.history import Block
from qewqew_core.clock import NO_CLOCK, Clock
from qewqew_core.crc import crc32
from qewqew_core.disk import journal
from qewqew_core.errors import Corrupt
from qewqew_core.secrecy import excerpt
from qewqew_core.topic.in_flight import LONGEST_RANGE, Delivered, Flight, Flights
from qewqew_core.topic.reader_state import (
    Change,
    Commit,
    Deliver,
    Lease,
    Lose,
    Move,
    Operation,
    Prepare,
    PutBack,
    Range,
    ReaderState,
    Requeue,
    Resolve,
    SetFilter,
    Unprepare,
)
from qewqew_core.topic.view import Position

MAGIC = b"QEWQRDR1"
SNAPSHOT, COMMIT, CHECKPOINT, CLOCK = 1, 6, 7, clocks.FRAME
KIND_NAMES = {SNAPSHOT: "snapshot", COMMIT: "operation", CHECKPOINT: "checkpoint", CLOCK: "clock"}
_SEAL = struct.Struct(">III")
SEAL = _SEAL.size


def _from_range(offsets: range) -> dict[str, Any]:
    return {"range": [offsets.start, offsets.stop, offsets.step]}


def _to_range(body: dict[str, Any]) -> Any:
    if "range" not in body:
        return body
    result = range(*body["range"])
    if len(result) > LONGEST_RANGE:
        raise ValueError("a range is too long")
    return result


def _ranges(body: Any) -> list[Range]:
    return [Range(Position(*start), None if stop is None else Position(*stop)) for start, stop in body]


def _delivered(body: Any) -> list[Delivered]:
    return [(base, block, attempt, number, places) for base, block, attempt, number, places in body]


def _as_it_is(body: Any) -> Any:
    return body


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_from_range).encode
_decode = json.JSONDecoder(object_hook=_to_range).decode


_NAMES: dict[type[Operation], str] = {
    Deliver: "hand_out",
    Commit: "commit",
    Requeue: "give_back",
    Move: "move",
    Lose: "lose",
    SetFilter: "set_filter",
    Prepare: "prepare",
    Unprepare: "unprepare",
    Resolve: "resolve",
    Lease: "lease",
    PutBack: "put_back",
    Change: "change",
}
_BY_NAME = {name: kind for kind, name in _NAMES.items()}
# What JSON has otherwise than the operations.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "pending": lambda body: None if body is None else _ranges(body),
    "ranges": _ranges,
    "delivered": _delivered,
}


def pack(operation: Operation) -> bytes:
    """The body of a frame of kind `COMMIT`."""
    match operation:
        case Lease():
            body: list[Any] = [batch_fields(operation.batch), *operation[1:]]
        case Change(change, time):
            body = [BATCH_NAMES[type(change)], time, change._asdict()]
        case _:
            body = [*operation]
    return _encode([_NAMES[type(operation)], *body]).encode()


def commit(time: int, operations: Sequence[Operation]) -> bytes:
    """The same for the one operation of a reader's commit. Operations that happen often have their own format."""
    (operation,) = operations
    return pack(operation)


def unpack(body: bytes) -> Operation:
    """Raises `journal.NONSENSE` for bytes that QewQew never writes."""
    name, *values = _decode(body.decode())
    kind = _BY_NAME[name]
    if kind is Change:
        change, time, fields = values
        if type(time) is not int:
            raise ValueError(f"this is not a time: {excerpt(time, 120)}")
        return Change(batch_operation(change, fields), time)
    if kind is Lease:
        values[0] = checked(BatchState(**values[0]))
    return kind(*(_FIELDS.get(field, _as_it_is)(value) for field, value in zip(kind._fields, values, strict=True)))


def snapshot(state: ReaderState, generation: int) -> bytes:
    body = {
        "todo": state.pending,
        "flight": [[offset, *flight] for offset, flight in state.in_flight.items()],
        "filter": state.filter,
        "lost": state.lost,
        "batches": [batch_fields(batch) for batch in state.batches.values()],
        "history": [[*astuple(block)[:-1], block.lines.decode()] for block in state.history.blocks],
        "last_lease": state.last_lease,
        "ranges": state.ranges,
        "expired_keys": [[key.hex(), *value] for key, value in state.expired_keys.items()],
        "passed": state.passed,
        **({"temporary": True} if state.temporary else {}),
        "clocks": [[each.run.decode(), *each[1:5]] for each in state.clock.each()],
    }
    return journal.head(MAGIC, generation) + journal.frame(SNAPSHOT, json.dumps(body).encode(), generation)


def _load(body: bytes) -> ReaderState:
    data = journal.json_fields(body)
    state = ReaderState(
        pending=_ranges(data["todo"]),
        in_flight=Flights({offset: Flight(Position(*at), *rest) for offset, at, *rest in data["flight"]}),
        filter=data["filter"],
        lost=data["lost"],
        batches={fields["id"]: checked(BatchState(**fields)) for fields in data["batches"]},
        ranges={batch_id: _ranges(ranges) for batch_id, ranges in data["ranges"].items()},
        last_lease=data["last_lease"],
        expired_keys={bytes.fromhex(key): (time, number) for key, time, number in data["expired_keys"]},
        passed=_pair(data["passed"]),
        temporary=data.get("temporary", False) is True,
        clock=reduce(Clock.then, (clocks.checked(run.encode(), *numbers) for run, *numbers in data["clocks"]), NO_CLOCK),
    )
    state.history.blocks.extend(map(_block, data["history"]))
    state.began = state.committed_position().block
    return state


def _block(fields: Sequence[Any]) -> Block:
    count, records, size, on_disk, lines = fields
    if any(type(number) is not int for number in (count, records, size, on_disk)):
        raise ValueError(f"these are not checksums: {excerpt(fields[:4], 120)}")
    return Block.logged(count, records, size, on_disk, lines.encode())


def _pair(body: Sequence[int]) -> tuple[int, int]:
    block, offset = body
    return block, offset


class Replayed(NamedTuple):
    state: ReaderState
    generation: int
    snapshot_end: int
    end: int
    durable: int  # how much of the log was on disk when its last frame was written


def replay(data: bytes, path: str) -> Replayed:
    """What a log says; raises `Corrupt` with path and offset."""
    generation = journal.generation_of(data, MAGIC, path)
    state: ReaderState | None = None
    snapshot_end = end = journal.BEGIN
    for frame in journal.frames(data, generation):
        end = frame.end
        if state is not None:
            replay_frame(frame, state, path, 0)
            continue
        try:
            if frame.kind != SNAPSHOT:
                raise ValueError("no snapshot comes first")
            state, snapshot_end = _load(frame.body), end
        except journal.NONSENSE as error:
            raise Corrupt(f"the snapshot of the log cannot be read: {error!r}", path=path, offset=frame.start) from error
    if state is None or journal.was_durable(data, generation, end, (COMMIT, CHECKPOINT, CLOCK)):
        raise Corrupt("a frame of the reader's log is damaged", path=path, offset=end)
    try:
        state.check()
    except journal.NONSENSE as error:
        raise Corrupt(f"the log contradicts itself: {error!r}", path=path, offset=end) from error
    return Replayed(state, generation, snapshot_end, end, journal.durable_at(data, frame.start))


def replay_frame(frame: journal.Frame, state: ReaderState, path: str, base: int) -> Operation | None:
    """Apply one frame, which begins at ``base`` + its start in the file; returns its operation, or None for other frames."""
    try:
        if frame.kind == CHECKPOINT:
            state.clean, state.passed, state.began = True, (0, 0), state.committed_position().block
            return None
        if frame.kind == CLOCK:
            state.clock = state.clock.then(clocks.unpack(frame.body))
            return None
        if frame.kind != COMMIT:
            raise ValueError(f"unknown frame kind {frame.kind}")
        operation = unpack(frame.body)
        state.apply(operation)
        return operation
    except journal.NONSENSE as error:
        raise journal.contradiction(error, path, base + frame.start) from error


# The seal


class Seal(NamedTuple):
    generation: int
    end: int


def pack_seal(seal: Seal) -> bytes:
    data = _SEAL.pack(*seal, 0)[:-4]
    return data + crc32(data).to_bytes(4)


def unpack_seal(data: bytes) -> Seal | None:
    if len(data) < SEAL:
        return None
    generation, end, crc = _SEAL.unpack_from(data)
    return Seal(generation, end) if crc == crc32(data[: SEAL - 4]) else None


_WAY_OUT = "or let `qewqew repair` (repair_topic) put the reader where its .rdx says: at the first uncommitted message"


def missing(path: str) -> Corrupt:
    return Corrupt(f"the log of the reader is missing. Restore it, {_WAY_OUT}", path=path)


def check_whole(found: Replayed, seal: Seal | None, rdx: tuple[int, int] | None, path: str) -> None:
    """Raise `Corrupt` if this is not the latest log of the reader, or its end is missing.

    ``rdx``: the position that the .rdx names; it never says more than is durable in the log, unless that ends with a
    checkpoint. A power cut may tear it, and leave a new block with the offset in the one before.
    """
    reached = found.state.reached()
    if seal is not None:
        if found.generation != seal.generation:
            raise Corrupt(f"this is not the latest log of the reader. Restore that, {_WAY_OUT}", path=path, offset=0)
        if found.end < seal.end:
            raise Corrupt(
                f"the end of the reader's log is missing: {seal.end:,} bytes of it were on disk. Restore it, {_WAY_OUT}",
                path=path,
                offset=found.end,
            )
    elif not found.state.clean and rdx is not None and (rdx[0] > reached[0] or (rdx > reached and rdx[0] == found.state.began)):
        raise Corrupt(
            f"the end of the reader's log is missing: its .rdx says that everything before offset {rdx[1]} of block {rdx[0]} is "
            f"committed, but the log does not. Restore the log, {_WAY_OUT}",
            path=path,
            offset=found.end,
        )
