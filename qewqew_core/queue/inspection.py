"""`inspect`: what a queue holds, read without its lock, for sensors, pages and people."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import MANIFEST
from qewqew_core.batch.stats import QueueStats, earliest, of_batches
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import SMALL, Files, look_into, read_whole
from qewqew_core.disk.journal import Body
from qewqew_core.disk.looking import look_again
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadPath, Corrupt, RecordsTaken
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.keys import KeyStatus, key_hash
from qewqew_core.queue import batch_files, group_commit, paths
from qewqew_core.queue import log as logs
from qewqew_core.queue.found import chain_of, look
from qewqew_core.queue.reading import unread
from qewqew_core.queue.recovery import believe
from qewqew_core.queue.state import State
from qewqew_core.queue.strangers import strange_chunks, strangers

_T = TypeVar("_T")


def inspect(path: str | os.PathLike[str]) -> QueueStats:
    """Counts and sizes of a queue at its last commit. Takes no lock, waits for nobody, changes nothing.

    Gives zeros for a queue that does not exist (an empty closed queue leaves no files) in a directory that does. It reads the
    transaction log and, if the queue is closed, the pointers of the chunks. Only after a Java program has used the queue must
    it count the records. Raises `BadPath`, `Corrupt`.
    """
    return inspect_state(path)[0]


def inspect_state(path: str | os.PathLike[str], *, closely: bool = False) -> tuple[QueueStats, State]:
    """The same, and the state: batches, acknowledged ones too, and keys. Do not change it. ``closely``: as of `strangers`."""
    full = paths.check_path(path)

    def with_stats() -> tuple[QueueStats, State]:
        state, _ = _look(full)
        files = _files_beside(full)
        for error in strangers(files, full, closely):
            raise error
        with files.entered():
            stats = stats_of(files, full, state)
            if stats.missing:  # or the batch was just ended
                gone = without_files(files, full, state) & without_files(files, full, _look(full)[0])
                stats = replace(stats, missing=len(gone))
            return stats, state

    return steady(full, with_stats)


def strange_at_chunks(path: str) -> list[BadPath]:
    """What is at names of chunk files of a queue, and is not such a file, nor a topic."""
    full = paths.check_path(path)
    return steady(full, lambda: list(strange_chunks(_files_beside(full), full)))


def key_status(path: str, key: str) -> KeyStatus:
    """See `Stage.key_status`."""
    full, hashed = paths.check_path(path), key_hash(arguments.check_key(key))

    def look() -> KeyStatus:
        files = _files_beside(full)
        asked = group_commit.keys_asked(files, full)  # first: a request goes when the log has it
        if hashed in _look(full)[0].idempotency_keys:
            return "not yet" if group_commit.keys_asked(files, full).get(hashed) else "stored"  # perhaps it is not durable yet
        return "not yet" if hashed in asked else "not stored"

    return steady(full, look)


def durable_under(path: str, key: str) -> int | None:
    """How many records were put under a key, if that is on disk for sure: the newest commits of an open queue may not be."""
    hashed, log = key_hash(key), path + paths.LOG

    def look() -> int | None:
        data = read_whole(_files_beside(path), log)
        found = logs.replay(data, log)
        keys = logs.replay(data[: max(found.durable, found.snapshot_end)], log).state.idempotency_keys
        return keys[hashed][1] if hashed in keys else None

    return steady(path, look)


class Snapshot(NamedTuple):
    """The records of a queue at a commit: where they are in its chunk files, and those that only the log has."""

    chunks: list[Chunk]  # those with records, first to last
    pending: dict[int, list[tuple[int, bytes]]]  # by chunk: offset, and the frames that belong there


def snapshot(path: str) -> Snapshot:
    """The records of a queue at its last commit, with those that open sessions hold.

    Takes no lock, waits for nobody, changes nothing. While the snapshot is read, records may be taken and their files removed or
    used again; the checksums of the pieces show that. Empty for a queue that does not exist in a directory that does. Raises
    `BadPath`, `Corrupt`.
    """
    full = paths.check_path(path)
    return steady(full, lambda: _snapshot(full))


def _snapshot(path: str) -> Snapshot:
    state, redo = _look(path)
    files = _files_beside(path)
    chunks = [chunk_state for chunk_state in state.chain.values() if chunk_state.records]
    return Snapshot(
        chunks,
        {
            chunk_state.id: _missing(files, chunk.chunk_path(path, chunk_state.id), redo[chunk_state.id])
            for chunk_state in chunks
            if chunk_state.id in redo
        },
    )


def with_pending(data: bytes, start: int, end: int, pending: Iterable[tuple[int, Body]]) -> bytes:
    """Bytes ``start`` to ``end`` of a chunk file: ``data``, as it was read, with the frames that only the log has."""
    over = [(offset, frames) for offset, frames in pending if start < offset + len(frames) and offset < end]
    if not over:
        return data
    whole = bytearray(data.ljust(end - start, b"\0"))
    for offset, frames in over:
        piece = frames[max(0, start - offset) : end - offset]
        at = max(0, offset - start)
        whole[at : at + len(piece)] = piece
    return bytes(whole)


class WithPending(Files):
    """Reads one chunk file, with the frames that only the log has (see `Snapshot`)."""

    def __init__(self, pending: list[tuple[int, bytes]]) -> None:
        self._pending = pending

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return with_pending(super().read(fd, size, offset), offset, offset + size, self._pending)


def _missing(files: Files, path: str, runs: list[tuple[int, Body]]) -> list[tuple[int, bytes]]:
    """Those of these frames that are not in the file: an open queue writes small commits there some time later."""
    copies = [(offset, bytes(frames)) for offset, frames in runs]
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open_to_read(path)]) as (fd,):
        return [(offset, frames) for offset, frames in copies if files.read(fd, len(frames), offset) != frames]
    return copies


def chunk_records(path: str, found: Snapshot, chunk_state: Chunk) -> Iterator[list[bytes]]:
    """The records of a chunk of this snapshot. Raises `Corrupt`, `RecordsTaken`."""
    full = paths.check_path(path)
    try:
        for piece, data in _pieces(full, found, chunk_state):
            yield chunk.split(_without(chunk_state, data, piece.offset))[0]
    except Corrupt:
        if is_damaged(full, chunk_state.id, chunk_state.pieces[chunk_state.piece_of(chunk_state.head)]):
            raise
        raise _taken(chunk.chunk_path(full, chunk_state.id)) from None


def is_damaged(path: str, chunk_id: int, sign: IndexEntry) -> bool:
    """Whether a chunk of a snapshot that could not be read is damaged; else its records were taken, and its file was used again.

    ``sign``: the boundary at its head, by which it is known. Two chunks that began in the same file within a millisecond have the
    same, so the file must also not be what the log says of it, at one look after the other: a queue in use may have used it again
    since the last one.
    """

    def look() -> None:
        found = snapshot(path)
        now = next((each for each in found.chunks if each.id == chunk_id and sign in each.pieces), None)
        for _ in _pieces(paths.check_path(path), found, now) if now is not None else ():
            pass  # it is read in order to be verified

    try:
        look_again(look, (Corrupt, RecordsTaken))
    except (Corrupt, RecordsTaken):  # it is wrong, or its file is gone though the log has it
        return True
    return False


def _pieces(path: str, found: Snapshot, chunk_state: Chunk) -> Iterator[tuple[IndexEntry, bytes]]:
    """What is unread of a chunk of this snapshot, verified."""
    file, pending = chunk.chunk_path(path, chunk_state.id), WithPending(found.pending.get(chunk_state.id, []))
    with opening(file, "queue"), Descriptors([_open(files := _files_beside(path, pending), file)]) as (fd,):
        yield from unread(files, fd, file, chunk_state)


def _open(files: Files, path: str) -> int:
    try:
        return files.open_to_read(path)
    except FileNotFoundError:
        raise _taken(path) from None


def _without(chunk_state: Chunk, data: bytes, start: int) -> bytes:
    """What of these records, which begin at ``start``, was not taken behind the head."""
    for span in reversed(chunk_state.consumed):
        if start <= span.start < start + len(data) or start < span.end <= start + len(data):
            data = data[: max(0, span.start - start)] + data[max(0, span.end - start) :]
    return data


def _taken(path: str) -> RecordsTaken:
    return RecordsTaken("records were taken from the queue while they were read, and are gone; try again", path=path)


def steady(path: str, look: Callable[[], _T]) -> _T:
    """What ``look`` finds in a queue. It looks again if the queue changed meanwhile. Raises `BadPath`, `Corrupt`."""
    with opening(path, "queue"):
        return look_again(look, (Corrupt, RecordsTaken, FileNotFoundError))


def _look(path: str) -> tuple[State, Mapping[int, list[tuple[int, Body]]]]:
    """The state, and frames that may not have reached the chunk files yet."""
    files = _files_beside(path)
    header = _header(files, path)
    log = path + paths.LOG
    found = look(files, path, header, read_whole(files, log) if files.exists(log) else None)
    if found.log is None:
        return State.of(chain_of(files, found)[0]), {}
    if not found.is_closed:
        return found.log.state, found.log.redo
    redo = found.log.redo
    believed, _ = believe(files, found)
    if believed is None:
        return found.log.state, redo
    generation, end = found.log.generation, found.log.end
    if _header(files, path) != header or _changed_since(files, path, generation, end):
        raise Corrupt("the queue changed while it was read", path=path)
    return believed.state, {}


def _files_beside(path: str, files: Files | None = None) -> Files:
    return look_into(os.path.dirname(path), path, path + paths.LOG, files=files)


def _header(files: Files, path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return read_whole(files, path, follow=True, most=SMALL)
    return b""


def _changed_since(files: Files, path: str, generation: int, end: int) -> bool:
    log_path = path + paths.LOG
    now = logs.replay(read_whole(files, log_path), log_path)
    return (now.generation, now.end) != (generation, end)


def stats_of(files: Files, path: str, state: State) -> QueueStats:
    chunks = [chunk_state for chunk_state in state.chain.values() if chunk_state.records]
    clock = state.clock.now(files.boot())

    def put(chunks: list[Chunk]) -> int | None:
        if not chunks or not chunks[0].pieces:
            return None
        oldest = chunks[0].oldest()
        return clock.shown(oldest.time, oldest.elapsed)

    return QueueStats(
        records=state.records,
        bytes=state.bytes,
        chunks=len(chunks),
        oldest=earliest(put(chunks)),
        oldest_unacknowledged=earliest(
            put(chunks),
            *(put(batch.chunks) or clock.shown(batch.created, batch.since) for batch in state.batches.values()),
        ),
        on_disk=_on_disk(files, path, state),
        missing=len(without_files(files, path, state)),
        **of_batches([state], files.boot()),
    )


def without_files(files: Files, path: str, state: State) -> set[str]:
    """The ids of batches whose files somebody has removed."""

    def is_whole(batch: BatchState, names: set[str]) -> bool:
        return names.issuperset((MANIFEST, *(batch_files.segment_file(path, part.id) for part in batch.chunks)))

    found = places.without_files(files, path, state.batches.values(), is_whole)
    if found and files.is_directory(path + paths.LEASE):
        found.discard(next(reversed(state.batches)))  # its files may be there: the next opening moves them
    return found


def _on_disk(files: Files, path: str, state: State) -> int:
    total = state.history.on_disk
    with contextlib.suppress(FileNotFoundError):
        files.check_ours(path)  # which may be a link
        total += files.status(path).st_blocks * 512
    for file in (path + paths.LOG, *(chunk.chunk_path(path, chunk_id) for chunk_id in state.chain)):
        status = files.check_kind(file)
        total += 0 if status is None else status.st_blocks * 512
    return total + sum(places.on_disk(files, places.directory_of(path, batch)) for batch in state.batches.values())
