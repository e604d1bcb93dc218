"""Batches: the records that one consumer has leased under a key, and the files they lie in.

The transaction log says what a batch is: its records, its owner, its state. Its files follow: after the commit they are moved to
where the log says (`places.roll_forward_place` …), and recovery does the same again after a crash.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from qewqew_core import arguments
from qewqew_core.batch import manifest, segments
from qewqew_core.batch.arrow import table_of
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest
from qewqew_core.batch.publishing import publish
from qewqew_core.clock import Clock
from qewqew_core.disk.descriptors import NotCopied
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import refused
from qewqew_core.errors import BadArgument, BadManifest, BadPath, BatchExpired, Corrupt, QewQewError
from qewqew_core.formats.zbus import Message

if TYPE_CHECKING:
    import pyarrow as pa


class Endings(Protocol):
    """What the owner of a batch can do with it; `Leases` does it."""

    def end(self, batch: Batch, to: str, reason: str) -> None: ...

    def extend(self, batch: Batch, lease_timeout: float | None) -> None: ...

    def revive(self, batch: Batch) -> None: ...

    def retry(self, batch: Batch) -> None: ...

    def put_back(self, batch: Batch) -> None: ...

    def drop(self, batch: Batch) -> None: ...

    def check_ours(self, directory: str) -> None: ...

    def is_kept(self, batch: Batch, directory: str) -> bool | None: ...

    def files_missing(self, batch: Batch, path: str) -> Corrupt: ...


class Batch(NotCopied):
    """A batch as it was when it was looked up. Its records are read from its own files, also while others have the queue.

    ``state`` is "leased", "returned" (it waits, whole, for the next lease), "dead" or "acked". The methods that end a batch need
    an open queue, or an open reader of a topic: the one that it came from. They are durable when they return, also with
    ``sync="never"``.
    """

    def __init__(self, owner: object, leases: Endings, state: BatchState, directory: str, clock: Clock) -> None:
        self._owner = owner  # which stays open as long as the batch is there
        self._leases = leases
        self.show(state, directory, clock)

    def show(self, state: BatchState, directory: str, clock: Clock) -> None:
        """The batch as it is now."""
        self.id = state.id
        self.key = state.keys[-1]
        self.made = state.created  # a later batch of the same key has the same id
        self.state = state.state
        self.attempt = state.attempt
        self.records = state.records
        self.bytes = state.bytes  # payload
        self.reason = state.reason  # why it was returned or is dead
        self.created = arguments.moment(state.created)
        expires = state.expires  # when anyone may return the batch
        self.expires = None if expires is None else arguments.moment(clock.wall_at(expires))
        # When the next lease may take it, if it is returned: later after each failure, see ``retry_delay`` of a `Queue`.
        self.due = arguments.moment(clock.wall_at(state.due)) if state.state == "returned" and state.due is not None else None
        self.manifest_path = os.path.join(directory, manifest.MANIFEST)

    def __iter__(self) -> Iterator[bytes]:
        """The records in order (for a topic: bodies), about 1 MiB at a time, each verified before it is given out.

        Raises `BatchExpired` if somebody has ended the batch and its files are gone, also while they are read; `Corrupt` or
        `BadManifest` if they are damaged, or gone although nobody has ended it; `BadPath` if they may not be read;
        `OutOfResources`.
        """
        for record in self._records():
            yield record.body if isinstance(record, Message) else record

    def messages(self) -> Iterator[Message]:
        """The messages of a topic's batch; iterating gives only their bodies. Raises `BadArgument` for a queue's batch."""
        for record in self._records():
            if not isinstance(record, Message):
                raise BadArgument(f"batch {self.id} belongs to a queue: it has records, not messages; iterate over it")
            yield record

    def _records(self) -> Iterator[bytes | Message]:
        with self._reading() as directory:
            body = self._manifest(directory)
            for segment in body.segments:
                for records in segments.read_records(directory, body, segment):
                    yield from records

    def _manifest(self, directory: str) -> Manifest:
        return manifest.load_of(directory, self.id, self.records, self.bytes, self.made)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[str]:
        """The directory of the batch. Says why it cannot be read: its files go at any moment, when somebody ends the batch."""
        directory = os.path.dirname(self.manifest_path)
        self._leases.check_ours(directory)
        try:
            yield directory
        except (BadManifest, Corrupt, OSError) as error:
            place = error.path if isinstance(error, QewQewError) else error.filename
            if not str(place).startswith(directory):  # it is the place to which the batch is published
                raise
            system = error.__cause__ if isinstance(error, QewQewError) else error
            if isinstance(system, PermissionError):
                who = f"no permission to read the files of batch {self.id}; ask their owner for it, or read them as that user"
                raise BadPath(who, path=system.filename or directory) from error
            if isinstance(system, OSError) and (refusal := refused(system, directory, "batch")) is not None:
                raise refusal from error
            is_kept = self._leases.is_kept(self, directory)
            if is_kept is False or (is_kept is None and self._is_gone(directory)):
                gone = f"the files of batch {self.id} are gone: somebody ended the batch"
                raise BatchExpired(gone if is_kept is False else f"{gone}, or removed them", path=directory) from error
            if self._is_gone(directory):
                raise self._leases.files_missing(self, directory) from error
            if isinstance(system, FileNotFoundError) and system.filename and not DISK.exists(system.filename):
                raise self._leases.files_missing(self, system.filename) from error
            raise

    def _is_gone(self, directory: str) -> bool:
        """Whether the files of records were removed; in a moment, if somebody is just doing it."""
        for _ in range(5):
            if not DISK.is_directory(directory, follow=True) or not set(DISK.list(directory)) - {manifest.MANIFEST}:
                return self.records > 0 or not DISK.exists(self.manifest_path)
            time.sleep(0.01)
        return False

    def to_arrow(self, schema: pa.Schema) -> pa.Table:
        """The records, each one JSON object, as a table of Arrow with these columns, in order; see `arrow.table_of`.

        Raises `BadRecord`, `BadArgument`, and as iterating.
        """
        return table_of(self, schema)

    def check(self) -> None:
        """Raise `Corrupt` if its directory has the manifest of another batch, and as reading its records if that is damaged or
        gone. Who gives ``manifest_path`` to another program looks before.
        """
        with self._reading() as directory:
            self._manifest(directory)

    def publish(
        self,
        url: str | os.PathLike[str],
        *,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> str:
        """Copy the batch to ``url``/ID, for readers on other machines; returns that path or URL. See `publishing.publish`.

        The batch itself does not change: acknowledge it when the work on the copy is done. Raises `BatchExpired` too.
        """
        with self._reading() as directory:
            self._manifest(directory)
            return publish(directory, url, name=name, options=options, progress=progress)

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"<Batch {self.id} {self.state}, attempt {self.attempt}, {self.records:,} records>"

    def ack(self) -> None:
        """The work on the batch is done: it will not be leased again. It may be acknowledged twice.

        Raises `BatchConflict` if it is not leased any more, or if somebody else has leased it since, and `BatchNotFound`.
        """
        self._leases.end(self, "acked", "")

    def nack(self, reason: str = "") -> None:
        """The work failed: the batch waits, whole, and once it is ``due`` the next lease gets it first, with one more attempt.

        After ``max_attempts`` (of the queue or reader) it goes to the dead letters instead. Raises as `ack`.
        """
        self._leases.end(self, "returned", reason)

    def extend(self, lease_timeout: float | None = None) -> None:
        """The owner still works on it: the lease lasts ``lease_timeout`` seconds from now on (None: as many as it was given).

        Raises `BatchConflict` if the lease is over and somebody has returned the batch, `BatchNotFound`, and `BadArgument` if the
        batch was leased without a time-out and none is given.
        """
        self._leases.extend(self, lease_timeout)

    def to_dead_letters(self, reason: str = "") -> None:
        """Set the batch aside for a person to look at. Raises as `ack`."""
        self._leases.end(self, "dead", reason)

    def return_to_queue(self) -> None:
        """Return a dead batch, whole: the next lease gets it first. Raises `BatchConflict` if it is not dead."""
        self._leases.revive(self)

    def retry(self) -> None:
        """Make a returned batch due now: the next lease gets it first. Raises `BatchConflict` if it is not returned."""
        self._leases.retry(self)

    def put_back(self) -> None:
        """Put the records back to the front of the queue or reader, in their order. The batch is gone after that.

        Only for a consumer that knows that it wrote nothing: the records will come in another batch, under another id, so
        nothing can find and replace what this one may have left. For a leased, returned or dead batch; raises as `ack`.
        """
        self._leases.put_back(self)

    def drop(self) -> None:
        """Delete a dead batch and its records. Raises `BatchConflict` if it is not dead."""
        self._leases.drop(self)
