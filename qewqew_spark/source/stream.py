"""Reading a topic as a stream: micro-batches from the place in the checkpoint.

An offset of the stream, which Spark keeps in the checkpoint, is a place between two messages: ``{"topic": 1763683200123,
"reader": "spark-3f9c…", "began": {…}, "block": 7, "offset": 469762048, "number": 1234567}``. It says when the topic was made,
which reader the stream has, where the query started, and the place: the block, the offset in the topic in bytes, and the
number of the message that starts there. So planning a batch takes a look at the index, however far the stream has come.

Retention must not remove what the stream has still to read, also if the query is killed and reads it again. So the stream has
a reader of the topic. It stands where the first batch starts that Spark has not reported as committed, and holds everything
from there on.
"""

from __future__ import annotations

import math
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qewqew_core.errors import BadArgument, BadPath, MessagesLost
from qewqew_core.formats.zbus import HEAD, length_at
from qewqew_core.topic import topic_paths
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.view import Position, View
from qewqew_spark.options import local_path
from qewqew_spark.source.rows import TOPIC_SCHEMA, Rows
from qewqew_spark.source.topics import STARTING, Bound, TopicPartition, TopicRead, marks, read_partition, steady

try:
    from pyspark.sql.streaming import datasource as limits
except ImportError:  # before pyspark 4.2
    limits = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from qewqew_spark.options import Options

OPTIONS = STARTING | {"minOffsetsPerTrigger", "maxTriggerDelay", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "reader", "group"}
Offset = dict[str, Any]

if limits is None:
    _Base = DataSourceStreamReader
else:

    class _Base(DataSourceStreamReader, limits.SupportsTriggerAvailableNow):  # type: ignore[no-redef]
        pass


class TopicStream(_Base):
    """Reads a topic as a stream; see the module.

    Spark keeps one of these in a process next to the driver, for everything but `read`.
    """

    def __init__(self, topic: TopicRead, options: Options, rows: Rows) -> None:
        self.topic = topic
        self.rows = rows
        self.start = Bound.of(options, "starting", "latest")
        self.max_records = options.whole("maxOffsetsPerTrigger")
        self.max_bytes = options.size("maxBytesPerTrigger")
        self.min_records = options.whole("minOffsetsPerTrigger")
        self.delay = options.seconds("maxTriggerDelay", 15 * 60)
        if "maxTriggerDelay" in options and self.min_records is None:
            raise BadArgument("the option 'maxTriggerDelay' goes with 'minOffsetsPerTrigger': it says how long to wait")
        if self.min_records and self.max_records and self.min_records > self.max_records:
            raise BadArgument(f"minOffsetsPerTrigger={self.min_records} is more than maxOffsetsPerTrigger={self.max_records}")
        self.name = options.text("reader")
        self.group = options.text("group")
        if self.name:
            topic_paths.check_reader_name(self.name)
        if limits is None and (self.max_records or self.max_bytes or self.min_records or self.name is None):
            raise BadArgument(
                "before pyspark 4.2 a stream has no limits and does not find its reader after a restart: upgrade pyspark, or "
                "leave out minOffsetsPerTrigger, maxOffsetsPerTrigger and maxBytesPerTrigger, and name a reader with 'reader'"
            )
        self._planned = -math.inf  # when a batch was planned, by time.monotonic: the first one waits for nothing
        self._target: Offset | None = None  # of Trigger.AvailableNow
        self._last: Offset | None = None  # the last one that this object gave or got
        self._reader: Reader | None = None  # opened when it is first needed, for what is sent to executors has none …
        self._held: Position | None = None  # … and where it was left

    # Offsets

    def initialOffset(self) -> Offset:
        """Where a new query starts. Spark asks again if the query is killed before its first batch is committed."""
        with closing(self.topic.view()) as view:
            place = _place_of(view, steady(view, lambda: self.topic.place(view, self.start)))
        name = f"spark-{secrets.token_hex(8)}" if self.name is None else self.name
        self._last = {"topic": self.topic.created, "reader": name, "began": place, **place}
        return self._last

    def prepareForTriggerAvailableNow(self) -> None:
        with closing(self.topic.view()) as view:
            self._target = _place_of(view, view.latest())

    def getDefaultReadLimit(self) -> Any:
        """Spark knows one kind of limit at a time; if there are several, `latestOffset` applies all."""
        if self.max_records is not None:
            return limits.ReadMaxRows(self.max_records)
        if self.max_bytes is not None:
            return limits.ReadMaxBytes(self.max_bytes)
        return limits.ReadAllAvailable() if self.min_records is None else limits.ReadMinRows(self.min_records)

    def reportLatestOffset(self) -> Offset:
        """Where the topic ends, and how far before that the last planned batch ends. Spark shows it in the query's progress."""
        with closing(self.topic.view()) as view:
            latest = _place_of(view, view.latest())
        done = self._last or latest
        records, bytes = (latest[name] - done[name] for name in ("number", "offset"))
        return {"topic": self.topic.created, **latest, "recordsBehindLatest": records, "bytesBehindLatest": bytes}

    def latestOffset(self, start: Offset | None = None, limit: Any = None) -> Offset:
        """Where the next batch ends. Before pyspark 4.2 Spark says neither where it starts nor what limits it."""
        with closing(self.topic.view()) as view:
            if start is not None:
                begin = self._position(view, start)
                self._hold(start, begin)
                self._last = start
                limited = not isinstance(limit, limits.ReadAllAvailable)
                end = steady(view, lambda: self._end(view, begin, limited))
            else:
                start = self._last or {"topic": self.topic.created, "reader": self.name, "offset": -1}
                end = _place_of(view, view.latest())
        if end["offset"] > start["offset"]:
            self._last = {**start, **end}
            return self._last
        return start

    def _end(self, view: View, begin: Position, limited: bool) -> Offset:
        end = _place_of(view, view.latest())
        if self._target is not None and self._target["offset"] < end["offset"]:
            end = self._target
        here = _place_of(view, begin)
        if not limited or end["offset"] <= here["offset"]:
            return end
        if self._waits(end["number"] - begin.number):
            return here
        if self.max_records is not None:
            found = view.by_number(begin.number + self.max_records, partial(marks, view))
            if found is not None:
                end = min(end, _place_of(view, found), key=_offset)
        if self.max_bytes is not None and end["offset"] - here["offset"] > self.max_bytes:
            end = _place_of(view, _within(view, begin, here["offset"] + self.max_bytes))
        return end

    def _waits(self, records: int) -> bool:
        """Does a batch of this many records wait, until there are more or it has waited long enough?"""
        now = time.monotonic()
        if self.min_records is not None and self._target is None:
            if records < self.min_records and now - self._planned < self.delay:
                return True
            self._planned = now
        return False

    def _position(self, view: View, at: Offset) -> Position:
        """The place of an offset in the topic as it is now; raises `MessagesLost`."""
        if at["topic"] != self.topic.created:
            raise MessagesLost(
                f"the checkpoint belongs to a topic that was made at {at['topic']}, but this one was made at "
                f"{self.topic.created} (milliseconds since the epoch): start a new checkpoint, with startingOffsets="
                f"{at['number']} if the messages are the same",
                path=self.topic.path,
            )
        index = view.index()
        block, end = max(at["block"], index.start), index.start + index.blocks
        while block + 1 < end and view.entry(block + 1).base <= at["offset"]:
            block += 1  # the end of a block is the beginning of the next one
        entry = view.entry(block)
        if entry.base > at["offset"] and block > at["block"]:
            return self.topic.kept(view, Position(at["block"], 0, at["number"]))
        if block >= max(end, index.start + 1) or not entry.base <= at["offset"] <= entry.base + entry.end:
            raise MessagesLost(
                f"the checkpoint is at message {at['number']}, but the topic ends before it: a power cut took its last messages "
                "(sync=never), or an older copy was restored. Start a new checkpoint",
                path=self.topic.path,
                offset=at["offset"],
            )
        return view.begin(Position(block, at["offset"] - entry.base, at["number"]))

    # Batches

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Raises `MessagesLost`, `Corrupt`."""
        if end.get("began") not in (None, start.get("began")):
            # Killed in its first batch: the checkpoint has the batch, but not its start, which was determined again.
            start = {**end, **end["began"]}
        self._last = end
        with closing(self.topic.view()) as view:
            begin = self._position(view, start)
            self._hold(end, begin)
            if self._reader is not None:
                self._reader.keep()
            return steady(view, lambda: self.topic.plan(view, begin, self._position(view, end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TopicPartition)
        return read_partition(partition, self.rows)

    def commit(self, end: Offset) -> None:
        """Everything before ``end`` is done, and may be removed from the topic."""
        if self._reader is None:
            return
        with closing(self.topic.view()) as view:
            place = self._position(view, end)
        self._reader.move_to(place, self._held)
        self._held = place

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _hold(self, at: Offset, place: Position) -> None:
        """Put the stream's reader where the first batch starts, once per query, whether it is new or goes on."""
        name = self.name if self.name is not None else at["reader"]
        if self._reader is not None or not name:
            return
        try:
            topic = Topic(self.topic.path, group=self.group)
            # Until a batch is in the checkpoint nobody would ever use such a reader again, should the query be killed.
            temporary = self.name is None and name not in topic.readers()
            reader = topic.reader(name, start=place, temporary=temporary)
            reader.move_to(place)
        except BadPath as error:
            raise BadPath(
                f"the stream cannot make or use its reader {name!r}: {error}. Let this user write to the topic, or set the "
                "option reader='' to stream without a reader; then retention may remove messages before the stream has read them",
                path=self.topic.path,
            ) from error
        self._reader, self._held = reader, place


def _offset(place: Offset) -> int:
    return int(place["offset"])


def _place_of(view: View, place: Position) -> Offset:
    return {"block": place.block, "offset": view.entry(place.block).base + place.offset, "number": place.number}


def _within(view: View, begin: Position, most: int) -> Position:
    """The last place that is not after the offset ``most`` in the topic, but at least one message after ``begin``."""
    index = view.index()
    entries = view.entries(index)
    place = bisect_right(entries, most, key=lambda entry: entry.base) - 1
    block, entry = index.start + place, entries[place]
    at = begin if block == begin.block else Position(block, 0, view.number_of(entry))
    known = [mark for mark in marks(view, entry) if at.offset < mark <= most - entry.base]
    if known:
        at = Position(block, known[-1], view.number_of(entry, known[-1]))
    for offset, number in view.heads(entry, at.number, at.offset):
        if entry.base + offset > most:
            break
        at = Position(block, offset, number)
    if at[:2] > begin[:2]:
        return at
    size = HEAD + length_at(view.read(entry.base, begin.offset, HEAD), 0)
    return Position(block, begin.offset + size, begin.number + 1)


def stream_reader(options: Options, schema: StructType) -> TopicStream:
    """Raises `BadArgument`, `BadPath`."""
    options.check("a stream of a topic", OPTIONS)
    path = local_path(options.text("path") or "")
    return TopicStream(TopicRead.of(path, options), options, Rows(TOPIC_SCHEMA, schema, options))
