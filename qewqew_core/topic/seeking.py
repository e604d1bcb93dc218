"""Finding the position in a topic at which a reader begins or goes on."""

from __future__ import annotations

import sys
from datetime import datetime

from qewqew_core import arguments
from qewqew_core.errors import BadArgument, Corrupt
from qewqew_core.secrecy import excerpt
from qewqew_core.topic.view import Position, View


def check_start(start: object) -> None:
    """Raise `BadArgument` if no reader can begin there, whatever the topic has."""
    if isinstance(start, datetime):
        _milliseconds(start)
    elif type(start) is int:
        arguments.check_whole("start", start, 0, sys.maxsize)
    elif not isinstance(start, Position) and start not in ("oldest", "latest"):
        raise BadArgument(f'start must be "oldest", "latest", the number of a message or a datetime, not {excerpt(start, 60)}')


def first_place(view: View, start: str | int | datetime | Position) -> Position:
    """Where a new reader begins; ``start`` as of `Topic.reader`."""
    if isinstance(start, Position):
        return start
    if start == "oldest":
        # As the original: the first block, even if its first message is not there yet.
        index = view.index()
        oldest = view.oldest()
        return oldest if oldest.offset or oldest.block == index.start else Position(index.start, 0, oldest.number)
    if start == "latest":
        return view.latest()
    if type(start) is int:
        return place_of(view, number=start)
    assert isinstance(start, datetime)
    return place_of(view, time=start)


def place_of(view: View, number: int | None = None, offset: int | None = None, time: datetime | None = None) -> Position:
    """The position of the message with this number or offset, or of the first since a time. Raises `BadArgument`."""
    start = view.index().start
    try:
        return _find(view, number, offset, time)
    except Corrupt:
        if view.index().start == start:
            raise
        return place_of(view, number, offset, time)  # blocks were removed meanwhile


def _find(view: View, number: int | None, offset: int | None, time: datetime | None) -> Position:
    if (number is not None) + (offset is not None) + (time is not None) != 1:
        raise BadArgument("give one of number, offset and time")
    if time is not None:
        return view.by_time(_milliseconds(time))
    if number is not None:
        place = view.by_number(arguments.check_whole("number", number, 0, sys.maxsize))
        what = f"message {number}"
    else:
        assert offset is not None
        place = view.by_offset(arguments.check_whole("offset", offset, 0, sys.maxsize))
        what = f"message at offset {offset}"
    if place is None:
        oldest, latest = view.oldest(), view.latest()
        raise BadArgument(f"there is no {what}: the topic {view.directory} has messages {oldest.number} to {latest.number - 1}")
    return place


def _milliseconds(time: object) -> int:
    """A moment in milliseconds since the epoch."""
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise BadArgument(f"time must be a datetime with a time zone, not {excerpt(time, 60)}")
    return int(time.timestamp() * 1000)
