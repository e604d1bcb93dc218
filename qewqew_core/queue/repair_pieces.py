"""`Pieces`: step 2 of a repair. It reads everything piece by piece, and writes files with bad pieces again without them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator

from qewqew_core.batch import manifest, places, segments
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.crc import crc32
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.errors import BadManifest, Corrupt, Full
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk, Cut
from qewqew_core.queue import batch_files, paths
from qewqew_core.queue.inspection import with_pending
from qewqew_core.queue.repair_plan import Plan
from qewqew_core.queue.state import State

NEW_CHUNK_BYTES = 16 << 20  # about the size of the files that rescued commits go to


class Pieces:
    """The pieces of the queue of this plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._files, self._path = plan.files, plan.path

    def read_chain(self, state: State) -> list[Chunk]:
        """The new chain. Chunks with damage are written again; nothing refers to the new files yet."""
        old = list(state.chain.values())
        # All are checked before any is written: without damage nothing is changed.
        keep = [
            self._check(chunk_state, self._plan.chunk_path(chunk_state.id)) and chunk_state.id not in self._plan.rewrite
            for chunk_state in old
        ]
        chain: list[Chunk] = []
        # Ids before the first chunk for those inside the chain: the original takes the id after the last for its next.
        last = old[-1].id if old else chunk.NONE
        first = old[0].id if old else 1
        for number, chunk_state in enumerate(old):
            if keep[number]:
                chain.append(chunk_state)
                continue
            path = self._plan.chunk_path(chunk_state.id)
            if any(keep[number + 1 :]):
                new = first = self._free_id(first, chunk.predecessor)
            else:
                new = last = self._free_id(last, chunk.successor)
            copy = self._write(self._plan.chunk_path(new), new, self.good_runs(chunk_state, path))
            if copy is not None:
                chain.append(copy)
            if chunk_state.id in self._plan.ids:
                self._plan.moves.append(path)
        runs = iter([(commit.frames, commit.records, commit.time) for commit in self._plan.rescued])
        while (first_run := next(runs, None)) is not None:
            last = self._free_id(last, chunk.successor)
            copy = self._write(self._plan.chunk_path(last), last, _limited(first_run, runs))
            if copy is not None:
                chain.append(copy)
        return chain

    def _free_id(self, start: int, step: Callable[[int], int]) -> int:
        if len(self._plan.taken) == chunk.MAX_ID:
            raise Full("all chunk ids are in use; move chunk files that nothing refers to away", path=self._path)
        start = step(start)
        while start in self._plan.taken:
            start = step(start)
        self._plan.taken.add(start)
        return start

    def _check(self, chunk_state: Chunk, path: str) -> bool:
        """Whether the file has everything that was committed; notes what it lacks."""
        there = self._files.exists(path)
        good, left = True, 0
        ranges: list[tuple[int, int, bool]] = []  # first piece, piece behind, whether the log has them
        with self._reading(path) as fd:
            for index in range(chunk_state.piece_of(chunk_state.head) if chunk_state.records else 0, len(chunk_state.pieces)):
                data, from_log = self._piece(chunk_state, fd, index)
                left += sum(records for _, records in _untaken(chunk_state, chunk_state.pieces[index].offset, data or b""))
                if from_log is False:
                    continue
                good, from_log = False, bool(from_log)
                if ranges and ranges[-1][1] == index and ranges[-1][2] == from_log:
                    ranges[-1] = (ranges[-1][0], index + 1, from_log)
                else:
                    ranges.append((index, index + 1, from_log))
            size = self._files.size(fd) if fd is not None else 0
        if good and (not there or size < chunk_state.tail):
            good = False
            self._plan.damaged(path, size, chunk_state.tail - size, 0, "the file is missing or ends too early; it has no records")
        counts = [0 if from_log else _count(chunk_state, begin, end) for begin, end, from_log in ranges]
        if counts.count(None) == 1:
            counts[counts.index(None)] = chunk_state.records - left - sum(count or 0 for count in counts)
        for (begin, end, from_log), records in zip(ranges, counts, strict=True):
            start, stop = max(chunk_state.pieces[begin].offset, chunk_state.head), chunk_state.piece_end(end - 1)[0]
            what = "the file is missing" if not there else "the file ends too early" if size < stop else "the checksum is wrong"
            if from_log:
                what += "; restored from the log"
            self._plan.damaged(path, start, stop - start, records, what)
        return good

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[int | None]:
        """A descriptor of the file; None if it is not there."""
        with Descriptors([self._files.open_to_read(path)] if self._files.exists(path) else []) as fds:
            yield next(iter(fds), None)

    def _piece(self, chunk_state: Chunk, fd: int | None, index: int) -> tuple[bytes | None, bool | None]:
        """The bytes of a piece if they can be had, and whether only with the help of the log (None: not at all)."""
        start, before, crc = chunk_state.pieces[index][:3]
        end, records, end_crc = chunk_state.piece_end(index)
        data = b""
        if fd is not None:
            try:
                data = self._files.read(fd, end - start, start)
            except OSError as error:
                if error.errno != errno.EIO:  # a bad sector
                    raise
        for from_log in (False, True):
            if from_log:
                data = with_pending(data.ljust(end - start, b"\0"), start, end, self._plan.payload.get(chunk_state.id, ()))
            if len(data) == end - start and crc32(data, crc) == end_crc and _records(data) == records - before:
                return data, from_log
        return None, None

    def good_runs(self, chunk_state: Chunk, path: str) -> Iterator[tuple[bytes, int, int]]:
        """Frames, how many, and when they were committed: all of a chunk that is there and right."""
        with self._reading(path) as fd:
            for index in range(chunk_state.piece_of(chunk_state.head) if chunk_state.records else 0, len(chunk_state.pieces)):
                data, _ = self._piece(chunk_state, fd, index)
                for frames, records in _untaken(chunk_state, chunk_state.pieces[index].offset, data or b""):
                    yield frames, records, chunk_state.pieces[index].time

    def uncut(self, cut: Cut, chunk_id: int) -> bytes:
        """The records that were copied from a chunk, as far as its file and the log have them; nothing was verified."""
        found, payload = list[bytes](), self._plan.payload.get(chunk_id, ())
        with self._reading(self._plan.chunk_path(chunk_id)) as fd:
            for start, end, _ in cut.spans:
                data = b"" if fd is None else self._files.read(fd, end - start, start)
                found.append(with_pending(data.ljust(end - start, b"\0"), start, end, payload))
        return b"".join(found)

    def _write(self, path: str, chunk_id: int, runs: Iterable[tuple[bytes, int, int]], segment: bool = False) -> Chunk | None:
        """A new durable chunk file, empty by its pointers unless it is a segment; None if there is nothing to write."""
        files, chunk_state = self._files, Chunk(chunk_id, chunk.BEGIN)
        with Descriptors() as fds:
            for frames, records, when in runs:
                if not fds:
                    fds.append(files.open(path, new=True))
                    self._plan.made.append(path)
                    files.write(fds[0], chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN, chunk.NONE), 0)
                files.write(fds[0], frames, chunk_state.tail)
                chunk_state.append(len(frames), records, crc32(frames, chunk_state.crc), when, self._plan.clock)
            if not fds:
                return None
            if segment:
                files.write(fds[0], chunk.POINTERS.pack(chunk.BEGIN, chunk_state.tail, chunk.NONE), 0)
            files.sync(fds[0])
        files.sync_directory(os.path.dirname(path))
        chunk_state.size = chunk_state.tail
        return chunk_state

    def read_batch(self, batch: BatchState, state: State) -> None:
        """Check a batch; segments with damage are written again, without what is wrong."""
        files, directory = self._files, places.directory_of(self._path, batch)
        if batch.state == "acked":
            self._read_acked(batch, directory, state)
            return
        if (away := places.away_at(files, self._path, batch)) is not None:
            places.roll_forward_place(files, self._path, batch)
            self._plan.damaged(directory, 0, 0, 0, f"files of the batch were in {away}; they were moved back")
        if not files.is_directory(directory):
            self._plan.damaged(directory, 0, 0, 0, "the directory of the batch is missing; it was made again")
            places.make_home(files, self._path, places.DEAD if batch.state == "dead" else places.BATCHES)
            files.make_directory(directory)
            files.sync_directory(os.path.dirname(directory))
        old, segment_paths = batch.chunks, batch_files.segment_paths(self._path, batch)
        good = [self._check(chunk_state, path) for chunk_state, path in zip(old, segment_paths, strict=True)]
        if all(good):
            if not self.has_manifest(batch):
                what = "the manifest is missing or not that of the batch; it was written again"
                self._plan.damaged(os.path.join(directory, manifest.MANIFEST), 0, 0, 0, what)
                self._plan.copies.append(os.path.join(directory, manifest.MANIFEST))
            return
        self._plan.copies.append(os.path.join(directory, manifest.MANIFEST))
        batch.chunks = []
        taken = {chunk_state.id for chunk_state in old} | paths.chunk_ids(self._path, files.list(directory))
        new = 0
        for chunk_state, path, whole in zip(old, segment_paths, good, strict=True):
            if whole:
                batch.chunks.append(chunk_state)
                continue
            new = next(number for number in range(new + 1, chunk.MAX_ID) if number not in taken)
            target = os.path.join(directory, batch_files.segment_file(self._path, new))
            copy = self._write(target, new, self.good_runs(chunk_state, path), segment=True)
            if copy is not None:
                batch.chunks.append(copy)
            if files.exists(path):
                self._plan.moves.append(path)
        batch.records = sum(chunk_state.records for chunk_state in batch.chunks)
        batch.bytes = sum(chunk_state.bytes for chunk_state in batch.chunks)

    def has_manifest(self, batch: BatchState) -> bool:
        """Whether its manifest is that of the batch."""
        try:
            found = manifest.load(places.directory_of(self._path, batch))
        except BadManifest:
            return False
        return found == batch_files.manifest_of(self._path, batch)

    def _read_acked(self, batch: BatchState, directory: str, state: State) -> None:
        """Check an acknowledged batch. Its records were processed, and are only kept for a while: all of them, or none."""
        try:
            body = manifest.load_of(directory, batch.id, batch.records, batch.bytes, batch.created)
            for segment in body.segments:
                for _ in segments.read_segment(directory, segment):
                    pass
        except (BadManifest, Corrupt) as error:
            what = f"{error}. The batch was acknowledged; its {batch.records} records are no longer kept"
            self._plan.damaged(directory, 0, 0, 0, what)
            state.forget([batch.id])
            if self._files.is_directory(directory):
                self._plan.moves.append(directory)


def _limited(first: tuple[bytes, int, int], rest: Iterator[tuple[bytes, int, int]]) -> Iterator[tuple[bytes, int, int]]:
    """The runs that go into one file; one more than fits is smaller than any chunk."""
    yield first
    size = len(first[0])
    while size < NEW_CHUNK_BYTES and (run := next(rest, None)) is not None:
        yield run
        size += len(run[0])


def _records(frames: bytes) -> int:
    """How many records these are; -1 if they are not a run of whole frames."""
    try:
        return len(chunk.split(frames)[0])
    except ValueError:
        return -1


def _untaken(chunk_state: Chunk, start: int, data: bytes) -> Iterator[tuple[bytes, int]]:
    """The runs in a piece that nobody has taken, and how many records each has."""
    at, end = max(start, chunk_state.head), start + len(data)
    for span in (*((span.start, span.end) for span in chunk_state.consumed), (end, end)):
        stop = min(span[0], end)
        if at < stop:
            frames = data[at - start : stop - start]
            yield frames, _records(frames)
        at = max(at, span[1])


def _count(chunk_state: Chunk, begin: int, end: int) -> int | None:
    """The records of some pieces that nobody has taken; None if what is taken begins or ends outside."""
    start, (stop, records, _) = chunk_state.pieces[begin].offset, chunk_state.piece_end(end - 1)
    records -= max(chunk_state.pieces[begin].records, chunk_state.taken)
    for span in chunk_state.consumed:
        if span.start < stop and span.end > start:
            if not start <= span.start <= span.end <= stop:
                return None
            records -= span.records
    return records
