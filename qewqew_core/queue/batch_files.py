"""The files of a queue's batches: chunk files, moved into the batch's directory and back.

Each `roll_forward_…` makes the files agree with what was committed, from any point at which a crash may have stopped it. After a
crash `check_moves` looks first: something may be missing that only damage takes away, and then nothing is to be moved.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_operations import LeaseAgain
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.places import directory_of, make_home, remove_ours, write_manifest
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files
from qewqew_core.errors import BadManifest, Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Cut
from qewqew_core.queue import paths
from qewqew_core.queue.operations import JsonOperation, Lease, PutBack
from qewqew_core.queue.state import State

_logger = logging.getLogger(__name__)


def segment_file(path: str, chunk_id: int) -> str:
    """The name of a segment's file: that of the chunk it was."""
    return os.path.basename(chunk.chunk_path(path, chunk_id))


def manifest_of(path: str, batch: BatchState) -> Manifest:
    """The manifest of a batch. No file is read: what its chunks know begins at their heads."""
    segments = []
    for part in batch.chunks:
        assert part.base == part.head, part
        *inside, whole = manifest.checksums([*(entry.crc for entry in part.pieces[1:]), part.crc])
        boundaries = tuple((entry.offset, entry.records) for entry in part.pieces[1:])
        name = segment_file(path, part.id)
        segments.append(Segment(name, part.head, part.tail, part.records, whole, boundaries, tuple(inside)))
    return manifest.describing(batch, places.queue_name(path), segments)


def check_moves(files: Files, path: str, state: State, last: JsonOperation | None) -> None:
    """Raise `Corrupt` if a file is missing, or too short, that the last commit moves, or that its moves need."""
    match last:
        case Lease(batch_id) if not is_moved(files, path, batch_id):
            for chunk_state, (chunk_id, cut) in zip(state.batches[batch_id].chunks, last.parts, strict=True):
                made = [os.path.join(path + paths.LEASE, segment_file(path, chunk_id))]
                if isinstance(cut, int):
                    made.append(chunk.chunk_path(path, chunk_id))
                _check_one_of(files, made, chunk_state.tail)
            _check_one_of(files, [os.path.join(path + paths.LEASE, manifest.MANIFEST)], 1)
        case LeaseAgain(batch_id):
            directory = directory_of(path, state.batches[batch_id])
            if not files.is_directory(directory):
                raise _missing(directory)
        case PutBack(batch_id, chunks, names):
            homes = [os.path.join(path + suffix, batch_id) for suffix in (places.BATCHES, places.DEAD)]
            for name, chunk_id in zip(names, chunks, strict=True):
                sources = [os.path.join(home, name) for home in homes]
                _check_one_of(files, [chunk.chunk_path(path, chunk_id), *sources], state.chain[chunk_id].tail)


def _check_one_of(files: Files, candidates: list[str], end: int) -> None:
    """The first of these that is there must have as many bytes."""
    found = next(filter(files.is_regular, candidates), None)
    if found is None:
        raise _missing(*candidates)
    if (size := files.status(found).st_size) < end:
        raise Corrupt(f"has {size:,} bytes; the last commit in the transaction log says {end:,}. Nothing was changed", path=found)


def _missing(path: str, *others: str) -> Corrupt:
    what = "is missing, here" + "".join(f" and at {other}" for other in others) if others else "is missing"
    return Corrupt(f"{what}; the last commit in the transaction log moves it, or needs it. Nothing was changed", path=path)


def is_moved(files: Files, path: str, batch_id: str) -> bool:
    """Whether all moves of the lease that made this batch are done. Then NAME.lease is the beginning of the next batch."""
    return files.is_directory(os.path.join(path + places.BATCHES, batch_id))


def roll_forward_lease(files: Files, path: str, lease: Lease, batch: BatchState) -> None:
    """Move the chunks of a new batch into its directory, which was prepared as NAME.lease with the copies."""
    making, home = path + paths.LEASE, make_home(files, path, places.BATCHES)
    if not is_moved(files, path, batch.id):
        for chunk_state, (chunk_id, cut) in zip(batch.chunks, lease.parts, strict=True):
            if isinstance(cut, Cut):  # the chunk of that name beside the queue has more records
                continue
            source, target = chunk.chunk_path(path, chunk_id), os.path.join(making, segment_file(path, chunk_id))
            if not files.exists(target):
                files.rename(source, target)
            with Descriptors([files.open(target)]) as (fd,):
                if files.size(fd) > chunk_state.size:
                    files.truncate(fd, chunk_state.size)
        # The queue's directory must have lost the names before its ids are used again.
        files.sync_directory(making)
        files.sync_directory(os.path.dirname(path))
        files.rename(making, os.path.join(home, batch.id))
    # Also when a kill came after that rename: it may not be on disk yet.
    files.sync_directory(home)
    files.sync_directory(os.path.dirname(path))


def settle_lease(files: Files, path: str, state: State) -> None:
    """Remove the beginning of a lease that was never committed. If the log knows the batch, somebody has moved it there: it goes
    home.
    """
    making = path + paths.LEASE
    if not files.is_directory(making):
        return
    batch = None
    with contextlib.suppress(BadManifest, OSError):
        batch = state.batches.get(manifest.load(making).id)
    if batch is None or files.is_directory(home := directory_of(path, batch)):
        remove_ours(files, making)
        return
    _logger.warning("%s: the files of batch %s were in %s; they were moved back", path, batch.id, making)
    make_home(files, path, places.DEAD if batch.state == "dead" else places.BATCHES)
    files.rename(making, home)
    files.sync_directory(os.path.dirname(home))
    files.sync_directory(os.path.dirname(path))


def segment_paths(path: str, batch: BatchState) -> list[str]:
    """The paths of the segments of a batch that is in its directory."""
    directory = directory_of(path, batch)
    return [os.path.join(directory, segment_file(path, chunk_state.id)) for chunk_state in batch.chunks]


def missing_segment(files: Files, path: str, batch: BatchState) -> str | None:
    """The first file of a batch that is not in its directory, or too short: somebody else removed it, or cut it."""
    for chunk_state, where in zip(batch.chunks, segment_paths(path, batch), strict=True):
        if not files.is_regular(where) or files.status(where).st_size < chunk_state.tail:
            return where
    return None


def batch_directories(files: Files, path: str) -> Iterator[str]:
    """The directories that have the name of a batch."""
    prefix = places.numbered_id(path, 0)[:-16]
    for home in (path + places.BATCHES, path + places.DEAD):
        if files.is_directory(home):
            for name in sorted(files.list(home)):
                directory = os.path.join(home, name)
                if name.startswith(prefix) and files.is_directory(directory):
                    yield directory


def has_records(files: Files, directory: str) -> bool:
    """Whether a batch has more than its manifest, which is kept of an acknowledged one, for people."""
    return any(not name.startswith(manifest.MANIFEST) for name in files.list(directory))


def unknown_batches(files: Files, path: str, state: State) -> Iterator[str]:
    """Those that the log does not know, not even as expired."""
    known = {*state.batches, *state.history.ids()}
    known |= {places.numbered_id(path, number) for _, number in state.expired_keys.values()}
    return (directory for directory in batch_directories(files, path) if os.path.basename(directory) not in known)


def roll_forward_manifest(files: Files, path: str, batch: BatchState) -> None:
    """Rewrite the manifest: owner and attempt have changed."""
    write_manifest(files, directory_of(path, batch), manifest_of(path, batch))


def roll_forward_put_back(files: Files, path: str, batch_id: str, moves: list[tuple[str, int]]) -> None:
    """Move segment files back beside the queue, under their new ids."""
    for home in (path + places.BATCHES, path + places.DEAD):
        directory = os.path.join(home, batch_id)
        if files.is_directory(directory):
            for name, new_id in moves:
                if files.exists(os.path.join(directory, name)):
                    files.rename(os.path.join(directory, name), chunk.chunk_path(path, new_id))
            files.sync_directory(os.path.dirname(path))
            files.sync_directory(directory)
            remove_ours(files, directory)
