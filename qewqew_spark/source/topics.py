"""Reading a topic as it is when the query is planned, while its writer goes on: takes no lock and changes nothing.

The driver looks at the index and cuts the messages to read into ranges of blocks; the executors read the blocks. A block is
cut where one of the topic's checksums of it ends (about every 64 KiB), and the bytes of such a checksum are verified before
their first message is delivered. Blocks that a zbus server wrote have none, and stay whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qewqew_core.crc import crc32
from qewqew_core.disk.files import look_into
from qewqew_core.errors import BadArgument, Corrupt, MessagesLost
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Entry
from qewqew_core.secrecy import excerpt
from qewqew_core.topic.block_sums import damaged, pieces_of
from qewqew_core.topic.view import SCAN, Position, View
from qewqew_spark.options import ROW_OPTIONS
from qewqew_spark.source.rows import TOPIC_SCHEMA, Rows
from qewqew_spark.source.splitting import SPLIT_OPTIONS, Piece, Split

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from qewqew_core.batch.segments import RawMessages
    from qewqew_spark.options import Options

T = TypeVar("T")
STARTING = {"path", "startingOffsets", "startingTimestamp", "filter", "failOnDataLoss", *SPLIT_OPTIONS, *ROW_OPTIONS}
OPTIONS = STARTING | {"endingOffsets", "endingTimestamp", "maxRecords"}


class Bound(NamedTuple):
    """Where a read starts or ends, as an option says; ``value``: a message's number, or milliseconds since the epoch."""

    kind: Literal["earliest", "latest", "number", "time"]
    value: int = 0

    @classmethod
    def of(cls, options: Options, which: str, default: Literal["earliest", "latest"]) -> Bound:
        """That of the options ``startingOffsets`` and ``startingTimestamp``, or of those that end. Raises `BadArgument`."""
        name = which + "Offsets"
        time = options.text(which + "Timestamp")
        if time is not None:
            if name in options:
                raise BadArgument(f"the options {name!r} and {which + 'Timestamp'!r} contradict each other; give one of them")
            return cls("time", _milliseconds(time, which + "Timestamp"))
        text = options.text(name, default)
        if text is not None and text.isascii() and text.isdecimal():
            return cls("number", int(text))
        try:
            return cls(options.choice(name, ("earliest", "latest"), default))  # type: ignore[arg-type]  # it is one of them
        except BadArgument:
            raise BadArgument(
                f"the option {name!r} must be earliest, latest or the number of a message, not {excerpt(text, 80)}"
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
            f"the option {option!r} must be milliseconds since the epoch, or a time with a zone, like 2026-11-20T15:00:00Z, "
            f"not {excerpt(text, 80)}"
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
    """A topic, and the options that every read of it has."""

    path: str
    filter: str | None
    fail_on_data_loss: bool
    split: Split
    dialect: str
    created: int  # the topic of this name that was made then, milliseconds since the epoch

    @classmethod
    def of(cls, path: str, options: Options) -> TopicRead:
        """Raises `BadArgument`, or `BadPath` if there is no topic."""
        text = options.text("filter")
        Filter(text)
        split = Split.of(options)
        with closing(View.of(look_into(path, path), path)) as view:
            return cls(path, text, options.flag("failOnDataLoss", True), split, view.dialect, view.common().created)

    def view(self) -> View:
        """To be closed. Raises `BadPath`, and `MessagesLost` if another topic has taken the place of this one."""
        view = View(look_into(self.path, self.path), self.path, self.dialect)
        if (found := view.common().created) != self.created:
            view.close()
            raise MessagesLost(
                f"another topic has replaced the one that the query started with: this one was made at {found}, that one at "
                f"{self.created} (milliseconds since the epoch). Start a new query; a stream also needs a new checkpoint",
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
            self.lost(f"message {bound.value} has been removed from the topic; the oldest one is {oldest.number}", self.path)
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
                f"{what}: retention was faster than the query. Keep more (max_age, max_bytes …), or start at a message that is "
                "still there; with the option failOnDataLoss=false the query goes on without the missing ones",
                path=path,
                offset=offset,
            )
        print(f"qewqew: {path}: {what}. They are missing from the result (failOnDataLoss=false)", file=sys.stderr)

    # Planning

    def plan(self, view: View, start: Position, stop: Position) -> list[InputPartition]:
        """The messages between two places as partitions of about the same size, as many as are asked for."""
        start = self.kept(view, start)
        ranges: list[TopicRange] = []
        for block in range(start.block, stop.block + 1):
            entry = view.entry(block)
            begin = start.offset if block == start.block else 0
            end = stop.offset if block == stop.block else entry.end
            if begin < end:
                number = view.begin(start).number if begin else view.number_of(entry)
                ranges.append(TopicRange(block, entry.base, begin, end, number))
        total = sum(part.end - part.start for part in ranges)
        small = total // self.split.count(total) // 8  # such a block is not divided, and its checksums are not looked at
        pieces: list[Piece] = []
        for at, (block, _, begin, end, _) in enumerate(ranges):
            known = marks(view, view.entry(block)) if end - begin > small else []
            pieces.append(Piece(at, begin, end, [mark for mark in known if begin < mark < end]))
        return [
            TopicPartition(self, tuple(_part(view, ranges[piece.number], piece) for piece in task)) for task in self.split(pieces)
        ]


def _part(view: View, whole: TopicRange, piece: Piece) -> TopicRange:
    number = view.number_of(view.entry(whole.block), piece.start) if piece.start > whole.start else whole.number
    return whole._replace(start=piece.start, end=piece.end, number=number)


def marks(view: View, entry: Entry) -> list[int]:
    """The known starts of messages in a block."""
    return [piece.offset for piece in pieces_of(look_into(view.directory, view.directory), view.directory, entry.base)]


def steady(view: View, act: Callable[[], T]) -> T:
    """The result of ``act`` on a topic, even if its oldest blocks are removed meanwhile."""
    while True:
        start = view.index().start
        try:
            return act()
        except Corrupt:
            if view.index().start == start:
                raise


# Reading


def read_partition(part: TopicPartition, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Arrow batches of at most 1 MiB or one message; raises `Corrupt`, `MessagesLost`, which name file and offset."""
    from qewqew_spark.source.frames import messages, spare_collector  # late: the driver plans reads without Arrow

    spare_collector()
    topic = part.topic
    with closing(topic.view()) as view:
        for wanted in part.ranges:
            path = view.block_path(wanted.base)
            for run in _runs(topic, view, wanted):
                raw = messages(run, topic.dialect, os.path.basename(topic.path), rows.needs)
                yield rows.batch(raw, path, partial(_place, run, wanted.base))


def _place(run: RawMessages, base: int, row: int) -> int:
    return run.offset - base + run.bounds[2 * row]


def _runs(topic: TopicRead, view: View, wanted: TopicRange) -> Iterator[RawMessages]:
    try:
        view.read(wanted.base, wanted.start, 0)  # from now on the file is open, and removing it does no harm
        pieces = pieces_of(look_into(view.directory, view.directory), view.directory, wanted.base)
        there = wanted.block >= view.index().start  # else its checksums may have been removed before that look at them
    except Corrupt:
        if wanted.block >= view.index().start:
            raise
        there = False
    if there:
        chosen = Filter(topic.filter) or None
        yield from view.runs(wanted.base, wanted.start, wanted.number, _verified(view, wanted, pieces), chosen)
    else:
        what = f"the messages of this block up to {wanted.end} have been removed from the topic"
        topic.lost(what, view.block_path(wanted.base), wanted.start)


def _verified(view: View, wanted: TopicRange, pieces: list[IndexEntry]) -> Iterator[int]:
    """The places up to which a range is verified, at least 1 MiB apart.

    Raises `Corrupt`. The bytes are read again afterwards, because a piece may be as large as a block.
    """
    end = wanted.start
    for piece, following in pairwise(pieces):
        if following.offset <= wanted.start or piece.offset >= wanted.end:
            continue
        crc = piece.crc
        for at in range(piece.offset, following.offset, SCAN):
            crc = crc32(view.read(wanted.base, at, min(SCAN, following.offset - at)), crc)
        if crc != following.crc:
            raise damaged(view.block_path(wanted.base), piece, following)
        if following.offset - end >= SCAN and following.offset < wanted.end:
            end = following.offset
            yield end
    yield wanted.end


# The batch read


class TopicReader(DataSourceReader):
    """Reads a topic once; see the module."""

    def __init__(self, topic: TopicRead, options: Options, rows: Rows) -> None:
        self.topic = topic
        self.rows = rows
        self.start, self.stop = Bound.of(options, "starting", "earliest"), Bound.of(options, "ending", "latest")
        self.most = options.whole("maxRecords")
        if self.start.kind == "latest" or self.stop.kind == "earliest":
            raise BadArgument("a batch read cannot start at startingOffsets=latest or end at endingOffsets=earliest")
        if self.start.kind == self.stop.kind and self.start.value > self.stop.value:
            raise BadArgument(f"the read ends at {self.stop.value}, before its start at {self.start.value}")

    def partitions(self) -> list[InputPartition]:
        """Raises `BadArgument`, `MessagesLost`, `Corrupt`."""
        with closing(self.topic.view()) as view:
            return steady(view, lambda: self._plan(view))

    def _plan(self, view: View) -> list[InputPartition]:
        start = view.begin(self.topic.place(view, self.start))
        stop = self.topic.place(view, self.stop)
        if stop[:2] < start[:2] and "number" in (self.start.kind, self.stop.kind):
            raise BadArgument(f"the read ends at message {stop.number}, before its start at message {start.number}")
        if self.most is not None:
            stop = self._first(view, start, stop, self.most)
        return self.topic.plan(view, start, stop)

    def _first(self, view: View, start: Position, stop: Position, most: int) -> Position:
        """Where the first ``most`` messages that match end."""
        chosen = Filter(self.topic.filter)
        if not chosen:
            found = view.by_number(start.number + most, partial(marks, view))
            return stop if found is None else min(found, stop)
        last = next(islice(view.messages(start, stop, chosen, SCAN), most - 1, None), None)
        return stop if last is None else last.after

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one empty partition of its own if there are none.
        if isinstance(partition, TopicPartition):
            yield from read_partition(partition, self.rows)


def reader(path: str, options: Options, schema: StructType) -> TopicReader:
    """Raises `BadArgument`, `BadPath`."""
    options.check("a read of a topic", OPTIONS)
    return TopicReader(TopicRead.of(path, options), options, Rows(TOPIC_SCHEMA, schema, options))
