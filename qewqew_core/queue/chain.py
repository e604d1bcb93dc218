"""`Chain`: the chunk files of an open queue, which follow its log.

Frames of small commits are in the log first and go into the last chunk's file later, many at once. Large commits write
their frames past the tail, where no reader looks, before they happen. Chunks that a commit has emptied are removed after it.

Only the first chunk and the last stay open, and locked as a Java program locks them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from qewqew_core.batch import places
from qewqew_core.clock import Clock
from qewqew_core.crc import crc32
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors, NotCopied, close_each
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.files import Files
from qewqew_core.disk.lock import HeaderLock
from qewqew_core.disk.opening import moved
from qewqew_core.errors import DiskFull, Full, Locked, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk, Cut, Region, Span
from qewqew_core.limits import LIMITS
from qewqew_core.queue import chunk_files, java, writing
from qewqew_core.queue import log as logs
from qewqew_core.queue.operations import Extent, Operation, Replace
from qewqew_core.queue.reading import Piece, read_piece
from qewqew_core.queue.state import State
from qewqew_core.queue.writing import Frames, Runs

BLOCK = 4096  # bytes, of most file systems


class Chain(NotCopied):
    """The chunk files of the queue at ``path``. All calls are made with the engine's lock."""

    header: HeaderLock  # the header file, locked
    taken: set[int]  # ids that must not be given to new chunks
    begin: int  # the id of the first chunk of an empty queue

    def __init__(self, files: Files, path: str, engine: Engine[State], chunk_size: int, min_free_bytes: int) -> None:
        self.files = files
        self.path = path
        self.chunk_size = chunk_size
        self._rotate_at_changes = 0
        self.unsynced: set[int] = set()  # chunks whose files have frames that are in the log, and perhaps not on disk
        self.descriptors: dict[int, int] = {}  # chunk id: descriptor; of the first and the last chunk
        self.min_free_bytes = min_free_bytes
        self._engine = engine
        self._pending: list[Frames] = []  # frames that are in the log, not yet in the last chunk's file …
        self._pending_bytes = 0  # … of that size …
        self._pending_in = chunk.NONE  # … that chunk …
        self._pending_at = 0  # … and where they begin there
        self._piece: tuple[Chunk, Piece] | None = None  # the piece of the first chunk that is being read

    def path_of(self, chunk_id: int) -> str:
        return chunk.chunk_path(self.path, chunk_id)

    def check_place(self) -> None:
        """Raise `Broken` if what stands at the path of the log is not what is open here: somebody has moved the queue away, and
        what is there now is another's. Call it before a step that works by path.
        """
        log = self._engine.log
        if not self.files.is_at(log.fd, log.path):
            raise self._engine.poison(moved(log.path, "queue"))

    def sync_names(self) -> None:
        """Chunk files that were made, removed or renamed are so after a power cut too."""
        self.files.sync_directory(os.path.dirname(self.path))

    def check_free(self, size: int) -> None:
        """As `chunk_files.check_free`."""
        if self.min_free_bytes:
            chunk_files.check_free(self.files, self.path, self.min_free_bytes, size)

    # Commits, and what follows them

    def commit(self, operations: Sequence[Operation], now: int | None = None, *, reserve: bool = False) -> int:
        """As `Engine.commit`. Call `after_commit` when all that belongs to the commit is done."""
        position = self._engine.commit(operations, now, reserve=reserve)
        if self._engine.state.emptied:
            self.forget_emptied()
        return position

    def after_commit(self, position: int) -> None:
        """Remove the files of chunks that the commit has dropped, and cut the log back if it has grown.

        First the log, then the header, then the files. After a crash in another order the original would lose the whole queue.
        """
        engine = self._engine
        if dropped := engine.state.dropped:
            self.check_place()
            self.durable(position)
            self.store_header()
            for chunk_id in dropped:
                self.files.unlink(self.path_of(chunk_id))
                self.forget(chunk_id)
            dropped.clear()
            self.own_ends()
        if engine.log.end > engine.rotate_at or engine.state.changes > self._rotate_at_changes:
            self.rotate()
        elif engine.log.spare < journal.SPARE // 2:
            try:
                engine.log.reserve(0)
            except DiskFull:
                if engine.log.end - engine.log.snapshot_end > BLOCK:  # a short log leaves more room for the reserve
                    self.rotate()
                    with contextlib.suppress(DiskFull):
                        engine.log.reserve(0)

    def expect_changes(self) -> None:
        """Count the changes of batches from now on: after this many the log is cut back."""
        self._rotate_at_changes = self._engine.state.changes + LIMITS.log_changes

    def rotate(self) -> None:
        """Cut the log back to a snapshot. If there is no room for one, the old log goes on."""
        self.expect_changes()
        expired = self._engine.state.prune_keys(self._engine.clock().elapsed)
        # Else the old log would go on beside pointers that it does not know, like those of another program.
        if self._engine.rotate(behind=self._checkpoint):
            places.remove_expired(self.files, self.path, self.path, expired)

    def _checkpoint(self) -> None:
        try:
            self.store()
            chunk_files.sync_moved(self.files, self.path)
            self.sync_names()  # chunks that were removed must not come back unknown
        except OSError as error:
            if isinstance(error, QewQewError):
                raise
            raise self._engine.poison(error) from error  # a full disk too: nobody knows what is on it now

    def forget_emptied(self) -> None:
        """Forget cached and pending records of chunks that the commit has emptied."""
        emptied = self._engine.state.emptied
        if self._piece is not None and self._piece[0].id in emptied:
            self._piece = None
        if self._pending_in in emptied:  # what was still to be written to its file is not needed
            self._pending.clear()
        emptied.clear()

    def durable(self, position: int) -> None:
        """Wait until commits up to there are durable, whatever ``sync`` says: files are moved or removed after them. First the
        chunk files: a commit whose records are not on disk has not happened, and none behind it.
        """
        if not self._engine.sync and self.unsynced:
            for chunk_id in self.unsynced & self._engine.state.chain.keys():
                self.sync_chunk(chunk_id)
            self.sync_names()
        self._engine.durable(position, always=True)

    # Bringing the files to where the log is

    def pend(self, chunk_id: int, at: int, frames: Frames) -> None:
        """Keep frames that the log carries, until they are written to the last chunk's file together with others."""
        if not self._pending:
            self._pending_in, self._pending_at, self._pending_bytes = chunk_id, at, 0
        self._pending.append(frames)
        self._pending_bytes += len(frames)
        if self._pending_bytes > LIMITS.pending_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the frames that only the log has into the last chunk's file."""
        if self._pending:
            self._engine.durable(self._engine.log.position)  # where they go may be what an earlier commit has freed
            self.files.write(self.descriptor(self._pending_in), b"".join(self._pending), self._pending_at)
            self.unsynced.add(self._pending_in)
            self._pending.clear()

    def write(self, chunk_id: int, frames: Frames, at: int) -> None:
        """Write frames that the log has, too."""
        self.files.write(self.descriptor(chunk_id), frames, at)
        self.unsynced.add(chunk_id)

    def write_ahead(self, chunk_id: int, runs: Runs, at: int, crc: int) -> Extent:
        """Write past the tail, where no reader looks before the commit; see `write_runs`."""
        fd = self.descriptor(chunk_id)
        extent = Extent(chunk_id, writing.write_runs(self.files, fd, runs, at, crc), self._engine.sync)
        if self._engine.sync:
            self.files.sync(fd)
        else:
            self.unsynced.add(chunk_id)
        return extent

    def store(self) -> None:
        """Bring the files up to what the log says. The log is durable first: files never run ahead of it."""
        engine = self._engine
        self.check_place()
        self.flush()
        self.durable(engine.log.position)
        assert engine.log.durable >= engine.log.position
        for chunk_state, pointers in engine.state.pointers():
            if chunk_state.id in self.unsynced and chunk_state.stored == pointers:  # else storing the pointers syncs it
                self.files.sync(self.descriptor(chunk_state.id))
        chunk_files.store_pointers(self.files, self.path, engine.state)
        self.unsynced.clear()
        self.store_header()

    def hand_over(self) -> None:
        """As `store`, but nothing except the log is synced: another process of ours waits, and the last owner syncs.

        A power cut loses nothing, because the log is durable: the next opening redoes from it what this has written.
        """
        engine, files = self._engine, self.files
        engine.durable(engine.log.position, always=True)
        self.flush()
        self.unsynced.update(chunk_files.store_pointers(files, self.path, engine.state, durable=False))
        self.store_header()
        chunks = engine.state.chain.values()
        stored = [(each.id, *each.stored) for each in chunks if each.id in self.unsynced and each.stored is not None]
        engine.log.append(logs.HANDOVER, logs.handover(java.checkpoint_identity(files, self.path), stored))

    def store_header(self) -> None:
        """Make the header say which chunk is the first, durably."""
        chunk_files.store_header(self.files, self.header.fd, self._engine.state.first)

    def sync_chunk(self, chunk_id: int) -> None:
        """The frames in the file of a chunk are durable."""
        if chunk_id in self.unsynced:
            self.files.sync(self.descriptor(chunk_id))
            self.unsynced.discard(chunk_id)

    # Which files are open, and locked

    def descriptor(self, chunk_id: int) -> int:
        fd = self.descriptors.get(chunk_id)
        if fd is None:
            self.close_others()
            fd = self.descriptors[chunk_id] = self.files.open(self.path_of(chunk_id))
            chunk_files.own_chunk(self.files, self.path, self.descriptors, chunk_id)
        return fd

    def own_ends(self) -> None:
        """The first chunk and the last have changed: from now on these are the ones that are locked."""
        self.close_others()
        state = self._engine.state
        with contextlib.suppress(Locked):  # a call that needs the chunk raises it
            for end in (next(iter(state.chain.values()), None), state.last):
                if end is not None:
                    chunk_files.own_chunk(self.files, self.path, self.descriptors, end.id)

    def close_others(self) -> None:
        """Only the first chunk and the last stay open."""
        state = self._engine.state
        last = state.last
        for other in self.descriptors.keys() - {state.first, last.id if last else chunk.NONE}:
            lock.release_each(self.descriptors, other)

    def forget(self, chunk_id: int) -> None:
        """The file at this id is no longer a chunk of the queue."""
        if chunk_id in self.descriptors:
            lock.release_each(self.descriptors, chunk_id)
        self.unsynced.discard(chunk_id)
        self.taken.discard(chunk_id)
        if self._piece is not None and self._piece[0].id == chunk_id:
            self._piece = None

    # New chunks

    def free_ids(self, count: int, start: int, step: Callable[[int], int]) -> list[int]:
        """Ids for ``count`` new chunks: the next ones that no file has, in the chain or beside it."""
        ids: list[int] = []
        start = start or self.begin - 1
        for _ in range(chunk.MAX_ID):
            if len(ids) == count:
                return ids
            start = step(start)
            if start not in self.taken and start != chunk.JAVA_FIRST:
                ids.append(start)
        if len(ids) == count:
            return ids
        raise Full(
            f"all chunk ids, {chunk.MAX_ID - 1:,}, are in use. Nothing was stored; take or lease records, or use a larger "
            f"chunk_size than {self.chunk_size:,}",
            path=self.path,
        )

    def size_for(self, size: int) -> int:
        """The size of the next chunk file, which is to hold ``size`` bytes of frames at once. An almost empty queue takes little
        room, and one that grows comes to whole chunks soon.
        """
        last = self._engine.state.last
        found, least = LIMITS.first_chunk_bytes, max(chunk.BEGIN + size, last.size + 1 if last else 0)
        while found < least:
            found *= 2
        return min(found, self.chunk_size)

    def make(self, chunk_id: int, size: int) -> None:
        """A new chunk file, which nothing refers to yet."""
        self.check_place()
        self.close_others()
        path = self.path_of(chunk_id)
        writing.make_chunk(self.files, path, size, self._engine.sync, self.descriptors, chunk_id)
        self.taken.add(chunk_id)
        if not self._engine.sync:
            self.unsynced.add(chunk_id)

    def unmake(self, made: list[int]) -> None:
        """The commit that these files were made for has not happened."""
        for chunk_id in made:
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(self.path_of(chunk_id))
            self.forget(chunk_id)

    # Reading

    def free(self) -> Iterator[tuple[Chunk, int, int]]:
        """Where the records are that can be taken, in order."""
        for chunk_state in self._engine.state.chain.values():
            region = chunk_state.free(chunk_state.head)
            while region is not None:
                yield chunk_state, *region
                region = chunk_state.free(region[1])

    def load(self, chunk_state: Chunk, offset: int) -> Piece:
        """Verified records around ``offset`` (head <= offset < tail); keeps the last ones read."""
        after = None
        if self._piece is not None and self._piece[0] is chunk_state:
            piece = self._piece[1]
            if piece.start <= offset < piece.start + len(piece.data):
                return piece
            if offset == piece.start + len(piece.data):
                after = piece
        if chunk_state.id == self._pending_in:
            self.flush()
        piece = self.read(chunk_state, chunk_state.piece_of(offset), after)
        self._piece = (chunk_state, piece)
        return piece

    def read(self, chunk_state: Chunk, index: int, after: Piece | None = None) -> Piece:
        """A piece of the chunk's file, verified; see `read_piece`."""
        path = self.path_of(chunk_state.id)
        return read_piece(self.files, self.descriptor(chunk_state.id), path, chunk_state, index, after)

    # Copies of what can be taken from a chunk

    def copy(
        self,
        source: Chunk,
        path: str,
        max_records: int = sys.maxsize,
        max_bytes: int = sys.maxsize,
        *,
        at_least: int = 0,
        finished: bool = False,
    ) -> tuple[Cut, int]:
        """Copy the first records of a chunk that nobody holds, as many as fit, into a new chunk file, durably.

        Returns what was copied, and the size of the file. The file's pointers say so if it is ``finished``; otherwise they say
        that it is empty.
        """
        copy, spans = Chunk(source.id, 0), []
        with Descriptors([self.files.open(path, new=True)]) as (fd,):
            if not finished:  # first: recovery removes an empty chunk, but not records without pointers
                self.files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN, chunk.NONE), 0)
                self.files.sync(fd)
            region = source.free(source.head)
            while region is not None:
                before = copy.total
                at = self._copy_region(source, region, copy, fd, max_records, max_bytes, at_least)
                if copy.total > before:
                    spans.append(Span(region[0], at, copy.total - before))
                region = source.free(region[1]) if at == region[1] else None
            if finished:
                self.files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, copy.tail, chunk.NONE), 0)
            self.files.sync(fd)
        return Cut(spans, copy.crc, copy.pieces), copy.tail

    def _copy_region(
        self, source: Chunk, region: Region, copy: Chunk, fd: int, max_records: int, max_bytes: int, at_least: int
    ) -> int:
        """Append records of the region to the copy, as many as fit; returns where the rest begins."""
        at, end = region
        while at < end:
            index = source.piece_of(at)
            piece = self.read(source, index)
            data = piece.data[at - piece.start : end - piece.start]
            records, used = chunk.split(data, max_records - copy.total)
            sizes = list(accumulate(map(len, records)))
            fit = max(bisect_right(sizes, max_bytes - copy.bytes), min(at_least - copy.total, len(records)))
            if fit < len(records):
                used = sizes[fit - 1] + 2 * fit if fit else 0
            if fit:
                self.files.write(fd, data[:used], copy.tail)
                _, _, _, time, elapsed = source.pieces[index]
                copy.append(used, fit, crc32(data[:used], copy.crc), time, Clock(wall=time, elapsed=elapsed))
            at += used
            if used < len(data):
                break
        return at

    def compact(self) -> None:
        """Rewrite chunks with gaps, because the original knows no gaps. What open sessions held is there again.

        Ids count back from the first chunk, as in a put-back. The last chunk gets a higher id, with the id after it free: the
        original gives that to its next chunk.
        """
        state = self._engine.state
        *others, last = state.chain.values()
        for other in others:
            if other.consumed:
                self._replace(other, self.free_ids(1, state.first, chunk.predecessor)[0])
        following = chunk.successor(last.id)
        if last.consumed or following in state.chain:
            for _ in range(chunk.MAX_ID):
                if following not in self.taken and chunk.successor(following) not in state.chain:
                    break
                (following,) = self.free_ids(1, following, chunk.successor)
            else:
                raise Full("no two chunk ids in a row are free", path=self.path)
            self._replace(last, following)

    def _replace(self, old: Chunk, new_id: int) -> None:
        old.unavailable = [(span.start, span.end) for span in old.consumed]
        self.flush()
        path = self.path_of(new_id)
        try:
            cut, size = self.copy(old, path)
            self.sync_names()
            position = self.commit([Replace(old.id, cut, new_id, size)])
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(path)
            if (refusal := self._engine.refused(error)) is None:
                raise
            raise refusal from error
        self.taken.add(new_id)
        self.after_commit(position)

    # The end

    def release(self) -> None:
        """Close and unlock all files. It may be called again, and goes on where it was interrupted."""
        lock.release_each(self.descriptors)

    def forked(self) -> None:
        """In a forked child: the locks stay the parent's."""
        close_each(self.descriptors)
        self.header.forked()
