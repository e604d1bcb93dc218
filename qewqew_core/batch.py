"""Batches: the records that one consumer has leased under a key, and the files they lie in.

What a batch is (its records, its owner, its state) stands in the transaction log. Its files follow: after
the commit, `settle` moves them to where the log says, and recovery does the same again after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qewqew_core import chunk, layout, manifest
from qewqew_core.batch_state import BatchState
from qewqew_core.errors import BadArgument, BadPath, BatchExpired
from qewqew_core.files import Files, write_new
from qewqew_core.manifest import Manifest, Segment
from qewqew_core.publishing import publish
from qewqew_core.reading import crcs_of_unread
from qewqew_core.zbus import Message

if TYPE_CHECKING:
    from qewqew_core.leases import Leases


class Batch:
    """A batch as it was when it was looked up. Its records are read from its own files, whoever has the queue.

    ``state`` is "leased", "returned" (waits, whole, for the next lease), "dead" or "acked". The methods that
    end it need the queue, or the reader of a topic, that it came from to be open. They are durable when they return,
    whatever ``sync`` is.
    """

    def __init__(self, owner: object, leases: Leases, state: BatchState, directory: str) -> None:
        self._owner = owner  # which stays open as long as the batch is there
        self._leases = leases
        self.show(state, directory)

    def show(self, state: BatchState, directory: str) -> None:
        """The batch as it is now."""
        self.id = state.id
        self.key = state.keys[-1]
        self.made = state.created  # a later batch of the same key has the same id
        self.state = state.state
        self.attempt = state.attempt
        self.records = state.records
        self.bytes = state.bytes  # payload
        self.reason = state.reason  # why it was returned or is dead
        self.created = layout.moment(state.created)
        self.expires = None if state.expires is None else layout.moment(state.expires)  # when anyone may return the batch
        self.manifest_path = os.path.join(directory, manifest.MANIFEST)

    def __iter__(self) -> Iterator[bytes]:
        """The records in order (of a topic: the bodies), some 1 MiB at a time: none is given out before its checksum is verified.

        Raises `CorruptQueue`, `BadManifest`, or `BatchExpired` when the files are gone.
        """
        for one in self._records():
            yield one.body if isinstance(one, Message) else one

    def messages(self) -> Iterator[Message]:
        """The messages of a topic's batch, as iterating gives their bodies; raises `BadArgument` for a queue's batch."""
        for one in self._records():
            if not isinstance(one, Message):
                raise BadArgument(f"batch {self.id} is of a queue: it has records, and no messages")
            yield one

    def _records(self) -> Iterator[bytes | Message]:
        directory = self._directory()
        body = manifest.load(self.manifest_path)
        for segment in body.segments:
            for records in manifest.read_records(directory, body, segment):
                yield from records

    def _directory(self) -> str:
        directory = os.path.dirname(self.manifest_path)
        if not os.path.isdir(directory) or (self.records and os.listdir(directory) == [manifest.MANIFEST]):
            raise BatchExpired(f"the files of batch {self.id} are no longer here: it was ended since", path=directory)
        return directory

    def publish(
        self, url: str, *, options: Mapping[str, Any] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> str:
        """Copy the batch to ``url``/ID, for readers on other machines; returns that path or URL. See `publishing.publish`.

        The batch stays where it is, in its state: acknowledge it when the work on the copy is done. Raises `BatchExpired` too.
        """
        return publish(self._directory(), url, options=options, progress=progress)

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"<Batch {self.id} {self.state}, attempt {self.attempt}, {self.records:,} records>"

    def ack(self) -> None:
        """The work on the batch is done: it will not be leased again. Acknowledging it twice is no error.

        Raises `BatchConflict` if it is not leased any more, or somebody else has leased it since, and `BatchNotFound`.
        """
        self._leases.end(self, "acked", "")

    def nack(self, reason: str = "") -> None:
        """The work failed: the batch waits, whole, and the next lease gets it first, with one more attempt.

        After the ``max_attempts`` of what it came from it goes to the dead letters instead. Raises as `ack`.
        """
        self._leases.end(self, "returned", reason)

    def extend(self, lease_timeout: float | None = None) -> None:
        """The owner still works on it: the lease lasts ``lease_timeout`` seconds from now on (None: as long as it was given).

        Raises `BatchConflict` if the lease is over and somebody has returned the batch, `BatchNotFound`, and `BadArgument`
        if it was leased without a time-out and none is given.
        """
        self._leases.extend(self, lease_timeout)

    def to_dead_letters(self, reason: str = "") -> None:
        """Set the batch aside, to be looked at by a person. Raises as `ack`."""
        self._leases.end(self, "dead", reason)

    def return_to_queue(self) -> None:
        """A dead batch is returned, whole: the next lease gets it first. Raises `BatchConflict` if it is not dead."""
        self._leases.revive(self)

    def put_back(self) -> None:
        """The records go back to the front of what they were leased from, in their order, and the batch is no more.

        Only for a consumer that knows that it wrote nothing: the records will come in another batch, under another
        id, so nothing can find and replace what this one may have left. For a leased, returned or dead batch;
        raises as `ack`.
        """
        self._leases.put_back(self)

    def drop(self) -> None:
        """Delete a dead batch and its records for ever. Raises `BatchConflict` if it is not dead."""
        self._leases.drop(self)


def directory_of(path: str, batch: BatchState) -> str:
    return os.path.join(path + (layout.DEAD if batch.state == "dead" else layout.BATCHES), batch.id)


def segment_file(path: str, chunk_id: int) -> str:
    """The name of a segment's file: that of the chunk it was."""
    return os.path.basename(chunk.chunk_path(path, chunk_id))


def manifest_of(files: Files, path: str, batch: BatchState, segment_paths: list[str]) -> Manifest:
    """The manifest of a batch whose segments lie at these paths now; raises `CorruptQueue` as a reader does."""
    segments = []
    for one, where in zip(batch.chunks, segment_paths, strict=True):
        *inside, whole = manifest.checksums(crcs_of_unread(files, where, one))
        boundaries = tuple((piece.offset, piece.records - one.taken) for piece in one.pieces if piece.offset > one.head)
        name = segment_file(path, one.id)
        segments.append(Segment(name, one.head, one.tail, one.records, whole, boundaries, tuple(inside)))
    return Manifest(
        batch.id,
        batch.keys[-1],
        layout.queue_name(path),
        layout.moment(batch.created).to_rfc3339_string().replace("+00:00", "Z"),
        batch.attempt,
        batch.records,
        batch.bytes,
        tuple(segments),
    )


def write_manifest(files: Files, directory: str, body: Manifest) -> None:
    """Put the manifest into place, whole or not at all, and durably."""
    prepare_manifest(files, directory, body)
    place_manifest(files, directory)


def prepare_manifest(files: Files, directory: str, body: Manifest) -> None:
    """Write it durably, but not yet into place: all that needs room."""
    write_new(files, os.path.join(directory, manifest.MANIFEST + ".tmp"), body.to_json())


def discard_manifest(files: Files, directory: str) -> None:
    files.unlink(os.path.join(directory, manifest.MANIFEST + ".tmp"))


def place_manifest(files: Files, directory: str) -> None:
    target = os.path.join(directory, manifest.MANIFEST)
    files.rename(target + ".tmp", target)
    files.sync_directory(directory)


def remove_tree(files: Files, directory: str) -> None:
    """Remove a batch's directory; its files lie flat."""
    if files.is_directory(directory):
        for name in files.list(directory):
            _remove(files, os.path.join(directory, name))
        files.remove_directory(directory)
        files.sync_directory(os.path.dirname(directory))


def _remove(files: Files, path: str) -> None:
    if files.is_directory(path):  # not ours; but what is left of it must not pass for a batch
        remove_tree(files, path)
    else:
        files.unlink(path)


def remove_expired(files: Files, stem: str, name: str, numbers: Iterable[int]) -> None:
    """Remove what is left of batches whose last key is forgotten; see `LeaseState.prune_expired`."""
    for number in numbers:
        remove_tree(files, os.path.join(stem + layout.BATCHES, layout.numbered_id(name, number)))


def make_home(files: Files, path: str, suffix: str) -> str:
    """The directory that holds batches, made durably if it is not there."""
    home = path + suffix
    if not files.is_directory(home):
        if files.exists(home):
            raise BadPath("is in the way: the batches of the queue belong there. Nothing was changed; move it away", path=home)
        files.make_directory(home)
        files.sync_directory(os.path.dirname(home))
    return home


# Each of these makes the files agree with what was committed, from any point at which a crash stopped it.


def settle_lease(files: Files, path: str, batch: BatchState) -> None:
    """Move the chunks of a new batch into its directory, which was prepared as NAME.lease."""
    making, home = path + layout.LEASE, make_home(files, path, layout.BATCHES)
    if not files.is_directory(os.path.join(home, batch.id)):  # else NAME.lease is the beginning of the next batch
        for one in batch.chunks:
            source, target = chunk.chunk_path(path, one.id), os.path.join(making, segment_file(path, one.id))
            if not files.exists(target):  # the copy of a cut chunk was made there
                files.rename(source, target)
                fd = files.open(target)
                try:
                    if files.size(fd) > one.size:
                        files.truncate(fd, one.size)
                finally:
                    files.close(fd)
        # The queue's directory must have lost the names before its ids are used again.
        files.sync_directory(making)
        files.sync_directory(os.path.dirname(path))
        files.rename(making, os.path.join(home, batch.id))
    # Also when a kill came after that rename: it may not be on disk yet.
    files.sync_directory(home)
    files.sync_directory(os.path.dirname(path))


def manifest_in_place(files: Files, path: str, batch: BatchState) -> Manifest:
    """The manifest of a batch that lies in its directory."""
    directory = directory_of(path, batch)
    return manifest_of(files, path, batch, [os.path.join(directory, segment_file(path, one.id)) for one in batch.chunks])


def settle_manifest(files: Files, path: str, batch: BatchState) -> None:
    """Write the manifest anew: owner or attempt have changed."""
    write_manifest(files, directory_of(path, batch), manifest_in_place(files, path, batch))


def settle_place(files: Files, path: str, batch: BatchState) -> None:
    """Move the batch's directory between the batches and the dead letters."""
    dead, alive = os.path.join(path + layout.DEAD, batch.id), os.path.join(path + layout.BATCHES, batch.id)
    source, target = (alive, dead) if batch.state == "dead" else (dead, alive)
    if files.is_directory(source):
        make_home(files, path, layout.DEAD)
        files.rename(source, target)
    for home in (os.path.dirname(target), os.path.dirname(source)):
        if files.is_directory(home):  # also when a kill came after that rename: it may not be on disk yet
            files.sync_directory(home)


def settle_put_back(files: Files, path: str, batch_id: str, moves: list[tuple[str, int]]) -> None:
    """Move segment files back beside the queue, under their new ids."""
    for home in (path + layout.BATCHES, path + layout.DEAD):
        directory = os.path.join(home, batch_id)
        if files.is_directory(directory):
            for name, new_id in moves:
                if files.exists(os.path.join(directory, name)):
                    files.rename(os.path.join(directory, name), chunk.chunk_path(path, new_id))
            files.sync_directory(os.path.dirname(path))
            files.sync_directory(directory)
            remove_tree(files, directory)


def settle_forget(files: Files, path: str, batch_ids: list[str], keep_manifest: bool) -> None:
    """Delete the files of batches. The manifest of an acknowledged one stays as long as its keys are remembered."""
    for batch_id in batch_ids:
        remove_tree(files, os.path.join(path + layout.DEAD, batch_id))
        directory = os.path.join(path + layout.BATCHES, batch_id)
        if not keep_manifest:
            remove_tree(files, directory)
        elif files.is_directory(directory):
            for name in files.list(directory):
                if name != manifest.MANIFEST:
                    _remove(files, os.path.join(directory, name))
