"""Reading a topic as it is when the query is planned, while its writer goes on: no lock is taken, nothing is changed.

The driver looks at the index and cuts what is asked for into ranges of blocks; the executors read the blocks. A block is cut
where one of the checksums that the topic keeps of it ends (about each 64 KiB), and what such a checksum covers is verified
before the first message of it is given out. Blocks that a zbus server wrote have none, and stay whole.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qewqew_core.crc import crc32
from qewqew_core.disk.files import Files
from qewqew_core.errors import BadArgument, Corrupt, MessagesLost
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Entry
from qewqew_core.topic.block_sums import damaged, pieces_of
from qewqew_core.topic.view import SCAN, Found, Position, View
from qewqew_spark.source.batches import SPLIT_OPTIONS, partition_bytes
from qewqew_spark.source.rows import TOPIC_SCHEMA, Rows, row_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from qewqew_core.batch.segments import RawMessages
    from qewqew_spark.options import Options

T = TypeVar("T")
STARTING = {"path", "startingOffsets", "startingTimestamp", "filter", "failOnDataLoss", *SPLIT_OPTIONS}
OPTIONS = STARTING | {"endingOffsets", "endingTimestamp", "maxRecords"}


class Bound(NamedTuple):
    """Where a read begins or ends, as an option says it; ``value``: a message's number, or milliseconds since the epoch."""

    kind: Literal["earliest", "latest", "number", "time"]
    value: int = 0

    @classmethod
    def of(cls, options: Options, which: str, default: Literal["earliest", "latest"]) -> Bound:
        """That of the options ``startingOffsets`` and ``startingTimestamp``, or of those that end. Raises `BadArgument`."""
        name = which + "Offsets"
        time = options.text(which + "Timestamp")
        if time is not None:
            if name in options:
                raise BadArgument(f"the options {name!r} and {which + 'Timestamp'!r} say the same thing; give one of them")
            return cls("time", _milliseconds(time, which + "Timestamp"))
        text = options.text(name, default)
        if text is not None and text.isascii() and text.isdecimal():
            return cls("number", int(text))
        try:
            return cls(options.choice(name, ("earliest", "latest"), default))  # type: ignore[arg-type]  # it is one of them
        except BadArgument:
            raise BadArgument(
                f"the option {name!r} must be earliest, latest or the number of a message, not {text!r:.80}"
            ) from None


def _milliseconds(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadArgument(
            f"the option {option!r} must be milliseconds since the epoch, or a time with its zone as 2026-11-20T15:00:00Z, "
            f"not {text!r:.80}"
        )
    return int(moment.timestamp() * 1000)


class TopicRange(NamedTuple):
    """Messages that lie side by side in a block."""

    block: int
    base: int
    start: int  # in the block's file …
    end: int
    number: int  # of the first message


@dataclass(frozen=True)
class TopicPartition(InputPartition):
    """All that a task needs to read some ranges; it travels from the driver to an executor."""

    topic: TopicRead
    ranges: tuple[TopicRange, ...]


@dataclass(frozen=True)
class TopicRead:
    """A topic, and what is asked of every read of it."""

    path: str
    filter: str | None
    fail_on_data_loss: bool
    least: int  # partitions
    size: int | None  # bytes of a partition, about, if that was asked for
    dialect: str
    created: int  # the topic of this name that was made then, milliseconds since the epoch

    @classmethod
    def of(cls, path: str, options: Options) -> TopicRead:
        """Raises `BadArgument`, `BadPath` if there is no topic."""
        text = options.text("filter")
        Filter(text)
        least, size = options.whole("minPartitions") or 1, options.whole("maxPartitionBytes")
        with closing(View.of(Files(), path)) as view:
            return cls(path, text, options.flag("failOnDataLoss", True), least, size, view.dialect, view.common().created)

    def view(self) -> View:
        """To be closed. Raises `BadPath`, and `MessagesLost` if another topic has taken the place of this one."""
        view = View(Files(), self.path, self.dialect)
        if (found := view.common().created) != self.created:
            view.close()
            raise MessagesLost(
                f"this is another topic than the one that the query began with: it was made at {found}, that one at "
                f"{self.created} (milliseconds since the epoch). Begin a new query, a stream with a new checkpoint",
                path=self.path,
            )
        return view

    # Places

    def place(self, view: View, bound: Bound) -> Position:
        """Raises `BadArgument` if the message will come much later, and `MessagesLost` if it was removed."""
        if bound.kind == "earliest":
            return view.oldest()
        if bound.kind == "latest":
            return view.latest()
        if bound.kind == "time":
            return view.by_time(bound.value)
        found = view.by_number(bound.value, partial(marks, view))
        if found is not None:
            return found
        oldest, latest = view.oldest(), view.latest()
        if bound.value < oldest.number:
            self.lost(f"message {bound.value} has been removed from the topic, the oldest one is {oldest.number}", self.path)
            return oldest
        raise BadArgument(
            f"there is no message {bound.value} in the topic {self.path} yet: the last one is {latest.number - 1}, the next one "
            f"will be {latest.number}"
        )

    def kept(self, view: View, place: Position) -> Position:
        """The place, or the oldest message if what was there has been removed; raises `MessagesLost`."""
        if place.block >= view.index().start:
            return place
        oldest = view.oldest()
        if oldest.number > place.number:  # else it was the end of a block
            self.lost(f"messages {place.number} to {oldest.number - 1} have been removed from the topic", self.path)
        return oldest

    def lost(self, what: str, path: str, offset: int | None = None) -> None:
        """Messages were removed: raises `MessagesLost`, or says so on stderr."""
        if self.fail_on_data_loss:
            raise MessagesLost(
                f"{what}, by its retention, before the query has read them. Keep more (max_age, max_bytes …), or begin where "
                "there still is something; with the option failOnDataLoss=false the query goes on without it",
                path=path,
                offset=offset,
            )
        print(f"qewqew: {path}: {what}, and are missing from the result (failOnDataLoss=false)", file=sys.stderr)

    # Planning

    def plan(self, view: View, start: Position, stop: Position) -> list[InputPartition]:
        """The messages between two places as partitions of about the size that is asked for."""
        start = self.kept(view, start)
        whole: list[TopicRange] = []
        for block in range(start.block, stop.block + 1):
            entry = view.entry(block)
            begin = start.offset if block == start.block else 0
            end = stop.offset if block == stop.block else entry.end
            if begin < end:
                number = view.begin(start).number if begin else view.number_of(entry)
                whole.append(TopicRange(block, entry.base, begin, end, number))
        total = sum(one.end - one.start for one in whole)
        size = min(partition_bytes(self.size, total), -(-total // self.least))
        partitions: list[InputPartition] = []
        ranges: list[TopicRange] = []
        room = size
        for part in (part for one in whole for part in _split(view, one, size)):
            if ranges and part.end - part.start > room:
                partitions.append(TopicPartition(self, tuple(ranges)))
                ranges, room = [], size
            ranges.append(part)
            room -= part.end - part.start
        if ranges:
            partitions.append(TopicPartition(self, tuple(ranges)))
        return partitions


def marks(view: View, entry: Entry) -> list[int]:
    """Where messages are known to begin in a block."""
    return [piece.offset for piece in pieces_of(Files(), view.directory, entry.base)]


def steady(view: View, act: Callable[[], T]) -> T:
    """What ``act`` finds in a topic, also if the oldest blocks are removed while it looks."""
    while True:
        start = view.index().start
        try:
            return act()
        except Corrupt:
            if view.index().start == start:
                raise


def _split(view: View, one: TopicRange, size: int) -> list[TopicRange]:
    """Parts of about ``size`` bytes, as equal as checksums allow."""
    whole = one.end - one.start
    if whole <= size:
        return [one]
    entry = view.entry(one.block)
    inside = [at for at in marks(view, entry) if one.start < at < one.end]
    count = min(-(-whole // size), len(inside) + 1)
    cuts = {_nearest(inside, one.start + whole * part // count) for part in range(1, count)}
    parts: list[TopicRange] = []
    for start, end in pairwise([one.start, *sorted(cuts), one.end]):
        parts.append(one._replace(start=start, end=end, number=view.number_of(entry, start) if parts else one.number))
    return parts


def _nearest(places: list[int], goal: int) -> int:
    at = bisect_left(places, goal)
    return min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - goal))


# Reading


def read_partition(part: TopicPartition, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Arrow batches of at most 1 MiB or one message; raises `Corrupt`, `MessagesLost`, which name file and offset."""
    from qewqew_spark.source.frames import messages  # late: the driver plans reads without Arrow

    topic = part.topic
    with closing(topic.view()) as view:
        for one in part.ranges:
            path = view.block_path(one.base)
            for run in _runs(topic, view, one):
                raw = messages(run, topic.dialect, os.path.basename(topic.path), rows.needs)
                yield rows.batch(raw, path, partial(_place, run, one.base))


def _place(run: RawMessages, base: int, row: int) -> int:
    return run.offset - base + run.bounds[2 * row]


def _runs(topic: TopicRead, view: View, one: TopicRange) -> Iterator[RawMessages]:
    try:
        view.read(one.base, one.start, 0)  # from now on the file is open, and removing it does no harm
        pieces = pieces_of(Files(), view.directory, one.base)
        there = one.block >= view.index().start  # else its checksums may have been removed before that look at them
    except Corrupt:
        if one.block >= view.index().start:
            raise
        there = False
    if there:
        chosen = Filter(topic.filter)
        yield from view.runs(one.base, one.start, one.number, _verified(view, one, pieces), chosen if chosen else None)
    else:
        what = f"the messages of this block up to {one.end} have been removed from the topic"
        topic.lost(what, view.block_path(one.base), one.start)


def _verified(view: View, one: TopicRange, pieces: list[IndexEntry]) -> Iterator[int]:
    """Up to where the bytes of a range are what was committed, each time that this is 1 MiB further at least.

    Raises `Corrupt`. The bytes are read again afterwards: a piece may be as large as a block.
    """
    end = one.start
    for piece, following in pairwise(pieces):
        if following.offset <= one.start or piece.offset >= one.end:
            continue
        crc = piece.crc
        for at in range(piece.offset, following.offset, SCAN):
            crc = crc32(view.read(one.base, at, min(SCAN, following.offset - at)), crc)
        if crc != following.crc:
            raise damaged(view.block_path(one.base), piece, following)
        if following.offset - end >= SCAN and following.offset < one.end:
            end = following.offset
            yield end
    yield one.end


# The batch read


class TopicReader(DataSourceReader):
    """Reads a topic once; see the module."""

    def __init__(self, topic: TopicRead, options: Options, rows: Rows) -> None:
        self.topic = topic
        self.rows = rows
        self.start, self.stop = Bound.of(options, "starting", "earliest"), Bound.of(options, "ending", "latest")
        self.most = options.whole("maxRecords")
        if self.start.kind == "latest" or self.stop.kind == "earliest":
            raise BadArgument("a read ends: it cannot begin with startingOffsets=latest, or end with endingOffsets=earliest")
        if self.start.kind == self.stop.kind and self.start.value > self.stop.value:
            raise BadArgument(f"the read begins at {self.start.value}, and ends before that, at {self.stop.value}")

    def partitions(self) -> list[InputPartition]:
        """Raises `BadArgument`, `MessagesLost`, `Corrupt`."""
        with closing(self.topic.view()) as view:
            return steady(view, lambda: self._plan(view))

    def _plan(self, view: View) -> list[InputPartition]:
        start = view.begin(self.topic.place(view, self.start))
        stop = self.topic.place(view, self.stop)
        if stop[:2] < start[:2] and "number" in (self.start.kind, self.stop.kind):
            raise BadArgument(f"the read begins at message {start.number}, and ends before that, at {stop.number}")
        if self.most is not None:
            stop = self._first(view, start, stop, self.most)
        return self.topic.plan(view, start, stop)

    def _first(self, view: View, start: Position, stop: Position, most: int) -> Position:
        """Where the first ``most`` messages that match end."""
        chosen = Filter(self.topic.filter)
        if not chosen:
            found = view.by_number(start.number + most, partial(marks, view))
            return stop if found is None else min(found, stop)
        matching = (one for one in view.messages(start, stop, chosen, SCAN) if isinstance(one, Found))
        last = next(islice(matching, most - 1, None), None)
        return stop if last is None else last.after

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one empty partition of its own where there are none.
        if isinstance(partition, TopicPartition):
            yield from read_partition(partition, self.rows)


def reader(path: str, options: Options, schema: StructType) -> TopicReader:
    """Raises `BadArgument`, `BadPath`."""
    options.check("a read of a topic", OPTIONS | row_options())
    return TopicReader(TopicRead.of(path, options), options, Rows(TOPIC_SCHEMA, schema, options))
