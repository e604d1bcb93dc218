"""The files of a queue's batches: chunk files, moved into the batch's directory and back.

Each `roll_forward_…` makes the files agree with what was committed, from any point at which a crash may have stopped it.
"""

from __future__ import annotations

import os

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.places import directory_of, make_home, remove_tree, write_manifest
from qewqew_core.disk.files import Files
from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.queue.reading import crcs_of_unread


def segment_file(path: str, chunk_id: int) -> str:
    """The name of a segment's file: that of the chunk it was."""
    return os.path.basename(chunk.chunk_path(path, chunk_id))


def manifest_of(files: Files, path: str, batch: BatchState, segment_paths: list[str]) -> Manifest:
    """The manifest of a batch whose segments are at these paths now; raises `Corrupt` as a reader does."""
    segments = []
    for chunk_state, where in zip(batch.chunks, segment_paths, strict=True):
        *inside, whole = manifest.checksums(crcs_of_unread(files, where, chunk_state))
        boundaries = tuple(
            (entry.offset, entry.records - chunk_state.taken) for entry in chunk_state.pieces if entry.offset > chunk_state.head
        )
        name = segment_file(path, chunk_state.id)
        segments.append(Segment(name, chunk_state.head, chunk_state.tail, chunk_state.records, whole, boundaries, tuple(inside)))
    return manifest.describing(batch, places.queue_name(path), segments)


def roll_forward_lease(files: Files, path: str, batch: BatchState) -> None:
    """Move the chunks of a new batch into its directory, which was prepared as NAME.lease."""
    making, home = path + paths.LEASE, make_home(files, path, places.BATCHES)
    if not files.is_directory(os.path.join(home, batch.id)):  # else NAME.lease is the beginning of the next batch
        for chunk_state in batch.chunks:
            source, target = chunk.chunk_path(path, chunk_state.id), os.path.join(making, segment_file(path, chunk_state.id))
            if not files.exists(target):  # the copy of a cut chunk was made there
                files.rename(source, target)
                fd = files.open(target)
                try:
                    if files.size(fd) > chunk_state.size:
                        files.truncate(fd, chunk_state.size)
                finally:
                    files.close(fd)
        # The queue's directory must have lost the names before its ids are used again.
        files.sync_directory(making)
        files.sync_directory(os.path.dirname(path))
        files.rename(making, os.path.join(home, batch.id))
    # Also when a kill came after that rename: it may not be on disk yet.
    files.sync_directory(home)
    files.sync_directory(os.path.dirname(path))


def segment_paths(path: str, batch: BatchState) -> list[str]:
    """The paths of the segments of a batch that is in its directory."""
    directory = directory_of(path, batch)
    return [os.path.join(directory, segment_file(path, chunk_state.id)) for chunk_state in batch.chunks]


def manifest_in_place(files: Files, path: str, batch: BatchState) -> Manifest:
    """The manifest of a batch whose files are in its directory."""
    return manifest_of(files, path, batch, segment_paths(path, batch))


def roll_forward_manifest(files: Files, path: str, batch: BatchState) -> None:
    """Rewrite the manifest: owner and attempt have changed."""
    write_manifest(files, directory_of(path, batch), manifest_in_place(files, path, batch))


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
            remove_tree(files, directory)
