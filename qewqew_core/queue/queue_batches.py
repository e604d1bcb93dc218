"""`QueueBatches`: how batches are cut off the front of a queue, and put back there.

A lease moves whole chunk files out of the chain, so its cost depends on the number of files and not of records. A chunk is
copied only if a part of it stays: the batch ends in it, or open sessions hold some of its records.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from qewqew_core.batch import places
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest
from qewqew_core.batch.source import Source
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.engine import Engine
from qewqew_core.errors import Corrupt, DiskFull, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Cut
from qewqew_core.queue import batch_files, paths, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.chain import Chain
from qewqew_core.queue.holds import Holds
from qewqew_core.queue.operations import JsonOperation, Lease, PutBack
from qewqew_core.queue.reading import crc_of_taken
from qewqew_core.queue.state import State

NAME_BYTES = 256  # what a directory, and the frame of a commit, may need for each name
LEAST_BYTES = 16 << 10  # what a batch copies of a chunk, or one record, if there is no room for more

T = TypeVar("T")


class QueueBatches(Source):
    """The records of the queue that nobody holds."""

    engine: Engine[State]

    def __init__(self, engine: Engine[State], chain: Chain, holds: Holds) -> None:
        super().__init__(chain.files, chain.path, chain.path, engine)
        self._chain = chain
        self._holds = holds

    def commit(self, operation: JsonOperation, now: int | None = None) -> int:
        self._chain.check_place()
        position = self._chain.commit([operation], now)
        self._chain.durable(position)
        stamp.write(self.files, self.stem, self.engine.state.changes)
        return position

    def occupied(self, records: int, size: int) -> int:
        return size + 2 * records

    def on_disk(self, batch: BatchState) -> int:
        return places.on_disk(self.files, places.directory_of(self.stem, batch))

    def manifest_of(self, batch: BatchState) -> Manifest:
        self._check_files(batch)
        return batch_files.manifest_of(self.stem, batch)

    @property
    def rescue(self) -> str:
        return f"let `qewqew repair {self.stem}` restore what the log still has"

    def _check_files(self, batch: BatchState) -> None:
        if (missing := batch_files.missing_segment(self.files, self.stem, batch)) is not None:
            self._chain.check_place()  # if the whole queue was moved away, no batch lacks anything
            raise self.files_missing(batch, missing)

    # Room on the disk: the log keeps a reserve, which can be given back

    def prepare(self, act: Callable[[], T]) -> T:
        self._chain.check_place()
        return super().prepare(act)

    def keep_room(self, names: int, size: int = 0) -> None:
        self.engine.with_room(partial(self.engine.log.keep, names * NAME_BYTES + size))

    def move(self, act: Callable[[], None]) -> None:
        self.engine.with_room(act)

    def make_room_elsewhere(self) -> bool:
        return False

    # Cutting

    def cut(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None, retry_delay: int) -> BatchState | None:
        if self.engine.state.records <= self._holds.records:
            return None
        try:
            lease, position = self._commit_batch(key, max_records, max_bytes, lease_timeout, retry_delay, sys.maxsize)
        except DiskFull:  # whole chunks need no copy, and one of the first records takes little
            lease, position = self._commit_batch(key, max_records, max_bytes, lease_timeout, retry_delay, LEAST_BYTES)
        return self._move_chunks(lease, position)

    def _commit_batch(
        self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None, retry_delay: int, most_copied: int
    ) -> tuple[Lease, int]:
        """Prepare a batch and commit it; returns the operation and its position. Raises `DiskFull`: nothing has changed."""
        lease, made = self.prepare(
            partial(self._prepare_batch, key, max_records, max_bytes, lease_timeout, retry_delay, most_copied)
        )
        try:
            self.keep_room(sum(isinstance(cut, int) for _, cut in lease.parts) + 1, len(logs.pack(lease)))
            return lease, self.commit(lease, made)
        except DiskFull:
            places.remove_ours(self.files, self.stem + paths.LEASE)
            raise

    def _prepare_batch(
        self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None, retry_delay: int, most_copied: int
    ) -> tuple[Lease, int]:
        """Make NAME.lease: the new batch without the chunks that it will take whole. Returns the operation that takes them, and
        its time. Nothing has changed yet.
        """
        self._chain.flush()
        batch = self.new_batch(key)
        making = self.stem + paths.LEASE
        try:
            places.remove_ours(self.files, making)
            places.make_way(self.files, places.directory_of(self.stem, batch))  # a manifest, kept for people
            places.make_new(self.files, making)
            places.make_home(self.files, self.stem, places.BATCHES)
            parts = self._take_chunks(batch, making, max_records, max_bytes, most_copied)
            batch.records = sum(part.records for part in batch.chunks)
            batch.bytes = sum(part.bytes for part in batch.chunks)
            places.write_manifest(self.files, making, batch_files.manifest_of(self.stem, batch))
            self._chain.sync_names()
            return Lease(batch.id, key, batch.records, batch.bytes, parts, lease_timeout, retry_delay), batch.created
        except (OSError, Corrupt) as error:
            places.remove_ours(self.files, making)
            if isinstance(error, QewQewError):
                raise
            raise self.engine.refused(error) or self.engine.poison(error) from error

    def _take_chunks(
        self, batch: BatchState, making: str, max_records: int, max_bytes: int, most_copied: int
    ) -> list[tuple[int, Cut | int]]:
        """Give the batch its chunks. Those that it does not take whole are copied into the directory ``making``, if they are the
        first; a later one only if ``most_copied`` does not bound it: else the batch ends before it.

        Returns them as `Lease` has them.
        """
        parts: list[tuple[int, Cut | int]] = []
        for source in self.engine.state.chain.values():
            if max_records <= 0 or max_bytes <= 0:
                break
            path = self._chain.path_of(source.id)
            if source.unavailable or source.records > max_records or source.bytes > max_bytes:
                if source.free(source.head) is None:
                    continue
                if parts and most_copied < max_bytes:
                    break
                path = os.path.join(making, batch_files.segment_file(self.stem, source.id))
                most = min(max_bytes, most_copied)
                cut, _ = self._chain.copy(source, path, max_records, most, at_least=int(not parts), finished=True)
                if not cut.spans:
                    self.files.unlink(path)
                    break
                parts.append((source.id, cut))
                batch.chunks.append(cut.chunk(source.id))
                if source.free(cut.spans[-1].end) is not None:
                    break
            elif not source.records:
                continue
            else:
                Descriptors([self.files.open(path)]).close()  # as after the commit, when it is too late to be denied
                self._chain.sync_chunk(source.id)
                crc = crc_of_taken(self.files, path, source)
                parts.append((source.id, crc))
                batch.chunks.append(source.leased(crc))
            max_records -= batch.chunks[-1].records
            max_bytes -= batch.chunks[-1].bytes
        return parts

    def _move_chunks(self, lease: Lease, position: int) -> BatchState:
        """Let the files of a batch follow its commit."""
        self._holds.disturbed += 1
        for chunk_id, cut in lease.parts:
            if isinstance(cut, int):
                self._chain.forget(chunk_id)
        self._chain.store_header()
        state = self.engine.state.batches[lease.id]
        self.move(partial(batch_files.roll_forward_lease, self.files, self.stem, lease, state))
        self._chain.own_ends()
        self.engine.notify()
        # The copy may have emptied its chunk; the log may be cut back only now that all is moved.
        self._chain.after_commit(position)
        return state

    def put_back(self, batch: BatchState) -> None:
        self._check_files(batch)
        # Counted back from the first chunk: the original takes the id after the last one for its next chunk, and does
        # not look whether it is free.
        ids = self._chain.free_ids(len(batch.chunks), self.engine.state.first, chunk.predecessor)[::-1]
        names = [batch_files.segment_file(self.stem, part.id) for part in batch.chunks]
        # Files that bore these ids must be gone for good: after a power cut they would be taken for those that come.
        self._chain.sync_names()
        self.keep_room(len(ids))
        self.commit(PutBack(batch.id, ids, names))
        self._chain.taken.update(ids)
        self._holds.disturbed += 1
        moves = list(zip(names, ids, strict=True))
        self.move(partial(batch_files.roll_forward_put_back, self.files, self.stem, batch.id, moves))
        self._chain.own_ends()
        self.engine.notify()
        self._chain.after_commit(self.engine.log.position)
