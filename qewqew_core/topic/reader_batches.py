"""`ReaderBatches`: how batches are cut from the next messages of a reader, and put back there.

A batch links the blocks of its messages, and its manifest says where they are: nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_operations import BatchOperation
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.source import Source
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.looking import replay_live
from qewqew_core.disk.opening import moved
from qewqew_core.errors import BadManifest, BatchConflict, Corrupt, QewQewError
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD, Entry
from qewqew_core.topic import reader_files, topic_log, topic_paths
from qewqew_core.topic.block_segments import first_segment
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.deliveries import Deliveries
from qewqew_core.topic.open_topic import OpenTopic
from qewqew_core.topic.reader_state import Change, Commit, Lease, PutBack, Range, ReaderState
from qewqew_core.topic.shared_log import Consumer, SharedLog
from qewqew_core.topic.view import Position, View, behind

Cut = tuple[list[tuple[Segment, int]], list[Range], list[int], list[Range]]


class ReaderBatches(Source):
    """The messages of the topic that the reader ``name`` has not delivered yet."""

    engine: Engine[ReaderState]

    def __init__(
        self,
        topic: OpenTopic,
        name: str,
        shared: SharedLog,
        consumer: Consumer,
        deliveries: Deliveries,
        view: View,
        make_room_elsewhere: Callable[[], bool],
    ) -> None:
        stem = topic_paths.stem_of(topic.path, name)
        super().__init__(topic.files, stem, topic_paths.batch_name(topic.path, name), shared.engine)
        self._directory = topic.path
        self._topic = topic
        self._reader = name
        self._shared = shared
        self._consumer = consumer
        self._deliveries = deliveries
        self._view = view
        self._make_room_elsewhere = make_room_elsewhere
        self._pieces_of: dict[int, list[IndexEntry]] = {}  # base offset: checksums of a full block, once read

    def commit(self, operation: BatchOperation) -> int:
        position = self._shared.commit(Change(operation, self.engine.now()))
        self._shared.durable(position, always=True)
        return position

    def occupied(self, records: int, size: int) -> int:
        return size + HEAD * records

    def on_disk(self, batch: BatchState) -> int:
        return 0  # they are links to the topic's blocks

    def manifest_of(self, batch: BatchState) -> Manifest:
        try:
            return reader_files.manifest_of(self.stem, batch)
        except BadManifest as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise self.files_missing(batch, error.__cause__.filename) from error

    @property
    def rescue(self) -> str:
        return f"put_back() it and its messages come again, or let `qewqew repair {self._directory}` link them again"

    # Room on the disk: where the files are is found out again by every call after one that could not move them

    def keep_room(self, names: int, size: int = 0) -> None:
        pass

    def move(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if self.engine.refused(error) is None:
                raise
            self._shared.files_are_behind = True

    def make_room_elsewhere(self) -> bool:
        return self._make_room_elsewhere()

    # Cutting

    def cut(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None, retry_delay: int) -> BatchState | None:
        start = self._deliveries.drop_lost().start
        try:
            segments, ranges, offsets, pending = self._cut(max_records, max_bytes)
        except Corrupt:
            if self._view.blocks().start == start:  # else blocks were removed meanwhile
                raise
            return self.cut(key, max_records, max_bytes, lease_timeout, retry_delay)
        if not segments:
            if pending != self.engine.state.pending:
                self._shared.commit(Commit([], pending))
            return None
        batch = self.new_batch(key)
        batch.records = sum(segment.records for segment, _ in segments)
        batch.bytes = sum(size for _, size in segments)
        batch.lease_timeout, batch.extended, batch.retry_delay = lease_timeout, batch.since, retry_delay
        directory = places.directory_of(self.stem, batch)
        try:
            self.engine.with_room(partial(self._make, directory, batch, [segment for segment, _ in segments]))
            position = self._shared.commit(Lease(batch, ranges, offsets, pending))
        except OSError as error:
            places.remove_ours(self.files, directory)
            if isinstance(error, QewQewError):
                raise
            if isinstance(error, FileNotFoundError) and self._view.blocks().start != start:
                return self.cut(key, max_records, max_bytes, lease_timeout, retry_delay)
            raise self.engine.refused(error) or self.engine.poison(error) from error
        self._shared.durable(position, always=True)
        self._consumer.refresh(self.engine.state)
        return self.engine.state.batches[batch.id]

    def _make(self, directory: str, batch: BatchState, segments: list[Segment]) -> None:
        """The batch's directory, durably. Nobody knows of it yet."""
        files, bases = self.files, {segment.file: segment.base for segment in segments}
        places.remove_ours(files, directory)
        places.make_home(files, self.stem, places.BATCHES)
        places.make_new(files, directory)
        for name, base in bases.items():
            block, link = os.path.join(topic_paths.data_of(self._directory), name), os.path.join(directory, name)
            files.link(block, link)
            is_gone = not self._view.is_block_at(base, block) and not files.exists(block)  # retention has removed it just now
            if not (self._view.is_block_at(base, link) and (is_gone or self._view.is_block_at(base, block))):
                raise moved(block, "reader")
        if self._view.is_unsynced():  # the batch is durable, so its messages must be
            self._sync_topic()
        body = manifest.describing(
            batch, self._topic.name, segments, manifest.BLOCK, self._reader, self._topic.dialect, self.engine.state.filter
        )
        places.write_manifest(files, directory, body)
        files.sync_directory(os.path.dirname(directory))

    def _sync_topic(self) -> None:
        """Make all durable that the topic has committed: where a block lacks something, the log is not believed any more."""
        log = topic_paths.log_of(self._directory)
        for base in sorted({redo.block.base for _, redo in replay_live(self.files, log, topic_log.replay).redo}):
            with contextlib.suppress(FileNotFoundError):  # it was removed, and that was durable
                self._sync_file(topic_paths.block_of(self._directory, base))
        self.files.sync_directory(topic_paths.data_of(self._directory))
        self._sync_file(log)
        self.files.sync_directory(self._directory)

    def _sync_file(self, path: str) -> None:
        with Descriptors([self.files.open_to_read(path)]) as (fd,):
            self.files.sync(fd)

    def _cut(self, max_records: int, max_bytes: int) -> Cut:
        """The next messages as segments with their payload bytes, the ranges they come from, which of them were in flight, and
        what is left to deliver.
        """
        segment_of = partial(first_segment, self._view, self._consumer.filter, self._pieces)
        segments: list[tuple[Segment, int]] = []
        ranges: list[Range] = []
        offsets: list[int] = []
        pending = list(self.engine.state.pending)
        for at, after, those in self._flights_again(max_records):
            segment, size, behind, _, full = segment_of(Range(at, after), max_records, max_bytes, bool(segments))
            if segment is not None:
                segments.append((segment, size))
                ranges.append(Range(at, behind))
                offsets += those[: segment.records]
                max_records, max_bytes = max_records - segment.records, max_bytes - size
            if full:
                return segments, ranges, offsets, pending
        rest = list(pending)  # if the limits end it here, see `Deliveries`
        while pending:
            start, stop = pending[0]
            if stop is not None and start[:2] >= stop[:2]:
                pending.pop(0)  # `read` has come to its end
                continue
            segment, size, behind, end, full = segment_of(pending[0], max_records, max_bytes, bool(segments))
            if segment is not None:
                segments.append((segment, size))
                ranges.append(Range(start, behind))
                rest = [Range(behind, stop), *pending[1:]]
                max_records, max_bytes = max_records - segment.records, max_bytes - size
            if full:
                return segments, ranges, offsets, rest
            if end == start:
                break
            if stop is not None and (end.block, end.offset) >= (stop.block, stop.offset):
                pending.pop(0)
            else:
                pending[0] = Range(end, stop)
        return segments, ranges, offsets, pending

    def _flights_again(self, max_records: int) -> list[tuple[Position, Position, list[int]]]:
        """Messages that are to be delivered again: those side by side, from where to where, and their offsets."""
        parts: list[tuple[Position, Position, list[int]]] = []
        for message, at in self._deliveries.again(max_records):
            after = behind(message, at)
            if parts and parts[-1][1] == at:
                start, _, those = parts.pop()
                those.append(message.offset)
                parts.append((start, after, those))
            else:
                parts.append((at, after, [message.offset]))
        return parts

    def _pieces(self, entry: Entry) -> list[IndexEntry]:
        pieces = self._pieces_of.get(entry.base)
        if pieces is None or (pieces and pieces[-1].offset < entry.end):
            pieces = pieces_of(self.files, self._directory, entry.base)
            self._pieces_of = {entry.base: pieces}
        return pieces

    # Putting back

    def put_back(self, batch: BatchState) -> None:
        whole = ranges = self.engine.state.ranges[batch.id]
        if sum(stop.number - start.number for start, stop in whole if stop is not None) != batch.records:
            leased_with = Filter(self.manifest_of(batch).filter)
            if leased_with.text != self._consumer.filter.text:
                ranges = [part for full in whole for part in self._matching(full, leased_with)]
        if min(whole).start.block < self._view.index().start:  # asked last: messages may be removed while they are looked at
            raise BatchConflict(
                f"the messages of batch {batch.id} are no longer in the topic, only in the batch; with return_to_queue() it "
                "is leased again",
                path=self.engine.path,
            )
        pending = self._without_flight(merged([*ranges, *self.engine.state.pending]))
        self._shared.durable(self._shared.commit(PutBack(batch.id, pending)), always=True)
        places.roll_forward_forget(self.files, self.stem, [batch.id], keep_manifest=False)

    def _matching(self, whole: Range, chosen: Filter) -> list[Range]:
        """The parts of a range that match: what that filter has passed over must not come because there is another one since."""
        found = self._view.messages(*whole, chosen)
        return merged([Range(message.at, message.after) for message in found])

    def _without_flight(self, ranges: list[Range]) -> list[Range]:
        """The reader was moved back, and has delivered messages of the batch again: they must not come once more."""
        for at in sorted(flight.at for flight in self.engine.state.in_flight.values()):
            for place, (start, stop) in enumerate(ranges):
                if start <= at and (stop is None or at < stop):
                    message = self._view.message(at)
                    assert message is not None
                    parts = [Range(start, at), Range(behind(message, at), stop)]
                    ranges[place : place + 1] = [part for part in parts if part.stop is None or part.start < part.stop]
                    break
        return ranges


def merged(ranges: list[Range]) -> list[Range]:
    """In order. They overlap where the reader was moved back since."""
    merged: list[Range] = []
    for part in sorted(ranges, key=lambda part: part.start):
        last = merged[-1] if merged else None
        if last is None or (last.stop is not None and last.stop < part.start):
            merged.append(part)
        elif last.stop is not None and (part.stop is None or part.stop > last.stop):
            merged[-1] = Range(last.start, part.stop)
    return merged
