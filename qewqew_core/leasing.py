"""`Leasing`: the life cycle of batches, the same for a queue and for a reader of a topic.

A batch is leased under a key, and its lease may be extended. Then it is acknowledged (and its records are kept for a
while), or returned, also when its time is over, or after too many attempts set aside as a dead letter. What changes
is committed first, as one of `operations.BatchOperation`; the files follow. What that needs of room on the disk is taken before.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

from qewqew_core import batch as batches
from qewqew_core import layout
from qewqew_core.batch import Batch
from qewqew_core.batch_state import BatchState, Leases
from qewqew_core.errors import BadArgument, BatchConflict, BatchExpired, BatchNotFound, DiskFull
from qewqew_core.files import Files
from qewqew_core.keys import key_hash
from qewqew_core.limits import now_ms
from qewqew_core.manifest import Manifest
from qewqew_core.operations import BatchOperation, EndLease, Extend, Forget, LeaseAgain

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Leasing(ABC):
    """What batches can be leased from. Whoever derives from it sets the attributes, and says what the hooks do."""

    path: str  # what errors name
    _stem: str  # the batches lie in _stem.batches/ID, dead letters in _stem.dead/ID
    _name: str  # path or name that their ids are made from, see `layout.batch_id`
    _files: Files
    _last_made = 0  # when the newest batch was made

    def __init__(self, max_attempts: int, retention: timedelta, retention_bytes: int) -> None:
        check_limits(max_attempts, retention, retention_bytes)
        self.max_attempts, self.retention, self.retention_bytes = max_attempts, retention, retention_bytes

    # Hooks. All but the first are called while that one's lock is held.

    @abstractmethod
    def _exclusive(self) -> AbstractContextManager[None]:
        """Take the lock, which may be held already; raises what a closed or broken object refuses calls with."""

    @property
    @abstractmethod
    def _leases(self) -> Leases:
        """The batches and expired keys as committed."""

    @abstractmethod
    def _change(self, operation: BatchOperation) -> None:
        """Commit it, and apply it; durable when it returns, as the files follow."""

    @abstractmethod
    def _lease_new(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None) -> BatchState | None:
        """Cut a batch off the front, durably, with its files; None if no records wait. Times in milliseconds."""

    @abstractmethod
    def _take_back(self, batch: BatchState) -> None:
        """Put the records of a batch back to the front; the batch is no more. Durable when it returns."""

    @abstractmethod
    def _manifest_of(self, batch: BatchState) -> Manifest:
        """The manifest that a batch with this owner and attempt has in its directory."""

    @abstractmethod
    def _occupied(self, batch: BatchState) -> int:
        """Bytes that keeping the records of an acknowledged batch takes, as ``retention_bytes`` counts them."""

    @abstractmethod
    def _beforehand(self, act: Callable[[], T]) -> T:
        """Do before a commit what needs room; raises `DiskFull`, and nothing has changed."""

    @abstractmethod
    def _keep_room(self, names: int, size: int = 0) -> None:
        """See to it that so many files can be moved after the next commit (``size``: its bytes, if they may be many).

        Raises `DiskFull`; then nothing has changed.
        """

    @abstractmethod
    def _move(self, act: Callable[[], None]) -> None:
        """Move files after a commit, also on a full disk: to enter a name into a directory may need room."""

    @abstractmethod
    def _notify(self) -> None:
        """Wake threads that wait for a change."""

    # The life cycle

    def lease(
        self,
        key: str,
        max_records: int | None = None,
        max_bytes: int | None = None,
        lease_timeout: float | None = None,
    ) -> Batch | None:
        """Take a batch for the owner of ``key``; None if there is nothing to lease. Durable when it returns.

        The same key gives the same batch again, also after it was acknowledged (``state`` says so: process it again or
        not, acknowledging it once more is no error). Otherwise a returned batch comes first, whole, whatever the limits;
        otherwise a new one is cut off the front of what waits: up to ``max_records`` records of together up to
        ``max_bytes`` payload bytes, at least one. In a queue, the cost depends on the number of chunk files, not of records
        (a chunk that holds records of open sessions is copied).

        ``lease_timeout``: seconds after which anyone may return the batch if its owner has neither ended nor extended it
        (`Batch.extend`); None: never. A lease whose time is over is returned by the next `lease` under another key.

        Raises `BadKey`, `BadArgument`, `BatchExpired` (acknowledged, and its records are no longer kept),
        `BatchConflict` (somebody else has this key's batch now, or it is dead), `CorruptQueue`, `DiskFull`.
        """
        layout.check_key(key)
        most_records = bound("max_records", max_records) or sys.maxsize
        most_bytes = bound("max_bytes", max_bytes) or sys.maxsize
        lasts = _milliseconds("lease_timeout", lease_timeout)
        with self._exclusive():
            self._return_expired(except_for=key)
            state = self._batch_of(key)
            if state is None:
                state = next((one for one in self._leases.batches.values() if one.state == "returned"), None)
            if state is None:
                state = self._lease_new(key, most_records, most_bytes, lasts)
            elif state.state == "returned":
                self._lease_again(state, key, lasts)
            elif state.state == "leased" and (lasts, state.lease_timeout) != (None, None):
                self._change(Extend(state.id, lasts))
            return self._present(state) if state else None

    def _lease_again(self, state: BatchState, key: str, lease_timeout: int | None) -> None:
        directory, attempt = batches.directory_of(self._stem, state), state.attempt + 1
        coming = self._manifest_of(replace(state, keys=[*state.keys, key], attempt=attempt))
        self._beforehand(partial(batches.prepare_manifest, self._files, directory, coming))
        try:
            self._change(LeaseAgain(state.id, key, attempt, lease_timeout))
        except DiskFull:
            batches.discard_manifest(self._files, directory)
            raise
        batches.place_manifest(self._files, directory)

    def return_expired(self) -> list[Batch]:
        """Return the batches whose lease time is over: their owners have not extended them (or, after ``max_attempts``,
        send them to the dead letters). Anyone may; a lease without ``lease_timeout`` never ends so.
        """
        with self._exclusive():
            return [self._present(state) for state in self._return_expired()]

    def _return_expired(self, except_for: str | None = None) -> list[BatchState]:
        now = now_ms()
        expired = [one for one in self._leases.batches.values() if one.expired(now) and one.keys[-1] != except_for]
        for one in expired:
            assert one.expires is not None
            when = layout.moment(one.expires).to_datetime_string()
            self._end(one, "returned", f"the lease of {one.keys[-1]!r} ended at {when} UTC and was not extended")
        return expired

    def _batch_of(self, key: str) -> BatchState | None:
        for state in self._leases.batches.values():
            if key in state.keys:
                if state.state == "leased" and key != state.keys[-1]:
                    raise BatchConflict(
                        f"batch {state.id}, once leased under {key!r}, was returned and is now leased under {state.keys[-1]!r}; "
                        "wait for that to end",
                        path=self.path,
                    )
                if state.state == "dead":
                    raise BatchConflict(
                        f"batch {state.id} of key {key!r} is in the dead letters ({state.reason or 'no reason given'}); "
                        "look at it, then return it to the queue or drop it",
                        path=self.path,
                    )
                return state
        if key_hash(key) in self._leases.expired_keys:
            raise BatchExpired(
                f"the batch of key {key!r} was acknowledged, and its records are no longer kept (retention {self.retention}, "
                f"{self.retention_bytes:,} bytes). A new batch needs a new key, for example a new run",
                path=self.path,
            )
        return None

    def batches(self) -> list[Batch]:
        """The batches that are leased or returned, oldest first."""
        return self._list("leased", "returned")

    def dead(self) -> list[Batch]:
        """The dead letters, oldest first."""
        return self._list("dead")

    def acknowledged(self) -> list[Batch]:
        """The acknowledged batches whose records are still kept, oldest first."""
        return self._list("acked")

    def _list(self, *states: str) -> list[Batch]:
        with self._exclusive():
            return [self._present(one) for one in self._leases.batches.values() if one.state in states]

    def batch(self, batch_id: str) -> Batch:
        """The batch with this id, in any state. Raises `BatchNotFound`, or `BatchExpired` if its records were dropped."""
        with self._exclusive():
            state = self._leases.batches.get(batch_id) if isinstance(batch_id, str) else None
            if state is None:
                if any(layout.numbered_id(self._name, number) == batch_id for _, number in self._leases.expired_keys.values()):
                    raise BatchExpired(f"batch {batch_id} was acknowledged, and its records are no longer kept", path=self.path)
                raise BatchNotFound(f"no batch has the id {batch_id!r:.120}; batches() lists them", path=self.path)
            return self._present(state)

    def _present(self, state: BatchState) -> Batch:
        return Batch(self, state, batches.directory_of(self._stem, state))

    def _new_batch(self, key: str) -> BatchState:
        """A batch for the owner of ``key``, as yet without records."""
        now = self._last_made = max(now_ms(), self._last_made + 1)  # tells batches of one key apart
        return BatchState(layout.batch_id(self._name, key), [key], "leased", 1, 0, 0, now, now)

    def _current(self, batch: Batch, *states: str) -> BatchState:
        """The state of the batch now, if it is in one of ``states`` and, if leased, by the same owner and attempt."""
        state = self._leases.batches.get(batch.id)
        if state is None:
            raise BatchNotFound(f"batch {batch.id} is no more: it was put back, dropped, or has expired", path=self.path)
        if state.state not in states:
            raise BatchConflict(f"batch {batch.id} is {state.state}, not {' or '.join(states)}", path=self.path)
        if state.created != batch.made:
            raise BatchNotFound(f"batch {batch.id} was put back, and its key has leased another since", path=self.path)
        if state.state == "leased" and (state.attempt, state.keys[-1]) != (batch.attempt, batch.key):
            raise BatchConflict(
                f"batch {batch.id} was returned and is now leased under {state.keys[-1]!r}, attempt {state.attempt}; "
                f"this is attempt {batch.attempt} under {batch.key!r}",
                path=self.path,
            )
        return state

    def _refresh(self, batch: Batch, state: BatchState) -> None:
        batch.__init__(self, state, batches.directory_of(self._stem, state))  # type: ignore[misc]

    def _end_lease(self, batch: Batch, to: str, reason: str) -> None:
        if not isinstance(reason, str):
            raise BadArgument(f"a reason is a str, not {type(reason).__name__}")
        with self._exclusive():
            state = self._current(batch, "leased", *(["acked"] if to == "acked" else []))
            if state.state == "leased":
                self._end(state, to, reason)
            self._refresh(batch, state)
            if to == "acked":
                try:
                    self._expire()
                except DiskFull as error:
                    _logger.warning("acknowledged, but what has expired is still there: %s", error)

    def _end(self, state: BatchState, to: str, reason: str) -> None:
        if to == "returned" and state.attempt >= self.max_attempts:
            to, reason = "dead", f"attempt {state.attempt} of {self.max_attempts}: {reason or 'no reason given'}"
        if to == "dead":
            self._beforehand(partial(batches.make_home, self._files, self._stem, layout.DEAD))
            self._keep_room(1)
        self._change(EndLease(state.id, to, reason[:1000]))
        if to == "dead":
            self._move(partial(batches.settle_place, self._files, self._stem, state))
        self._notify()

    def _extend(self, batch: Batch, lease_timeout: float | None) -> None:
        with self._exclusive():
            state = self._current(batch, "leased")
            lasts = _milliseconds("lease_timeout", lease_timeout) or state.lease_timeout
            if lasts is None:
                raise BadArgument(f"batch {state.id} was leased without lease_timeout: it never ends; or give one now")
            self._change(Extend(state.id, lasts))
            self._refresh(batch, state)

    def _expire(self) -> None:
        """Drop the records of acknowledged batches that are too old, then of the oldest while they are too many bytes."""
        acked = [one for one in self._leases.batches.values() if one.state == "acked"]
        acked.sort(key=lambda one: one.changed)
        kept = sum(self._occupied(one) for one in acked)
        oldest = now_ms() - self.retention // timedelta(milliseconds=1)
        gone = []
        for one in acked:
            if one.changed > oldest and kept <= self.retention_bytes:
                break
            gone.append(one.id)
            kept -= self._occupied(one)
        if gone:
            self._forget(gone, keep_manifest=True)

    def _forget(self, batch_ids: list[str], keep_manifest: bool) -> None:
        self._change(Forget(batch_ids, keep_manifest))
        batches.settle_forget(self._files, self._stem, batch_ids, keep_manifest)

    def _remove_expired(self, numbers: Iterable[int]) -> None:
        """Remove what is left of batches whose last key is forgotten; see `Leases.prune_expired`."""
        for number in numbers:
            directory = os.path.join(self._stem + layout.BATCHES, layout.numbered_id(self._name, number))
            batches.remove_tree(self._files, directory)

    def _revive(self, batch: Batch) -> None:
        with self._exclusive():
            state = self._current(batch, "dead")
            self._keep_room(1)
            self._change(EndLease(state.id, "returned", state.reason))
            self._move(partial(batches.settle_place, self._files, self._stem, state))
            self._refresh(batch, state)

    def _put_back(self, batch: Batch) -> None:
        with self._exclusive():
            self._take_back(self._current(batch, "leased", "returned", "dead"))

    def _drop(self, batch: Batch) -> None:
        with self._exclusive():
            self._forget([self._current(batch, "dead").id], keep_manifest=False)


def check_limits(max_attempts: int, retention: timedelta, retention_bytes: int) -> None:
    layout.check_whole("max_attempts", max_attempts, 1, 1 << 31)
    layout.check_whole("retention_bytes", retention_bytes, 0, sys.maxsize)
    if not isinstance(retention, timedelta) or retention < timedelta(0):
        raise BadArgument(f"retention must be a timedelta that is not negative, not {retention!r:.60}")


def bound(name: str, value: int | None) -> int | None:
    return None if value is None else layout.check_whole(name, value, 1, sys.maxsize)


def _milliseconds(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e10:
        raise BadArgument(f"{name} must be a number of seconds above 0, or None, not {seconds!r:.60}")
    return max(1, int(seconds * 1000))
