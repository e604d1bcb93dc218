"""`Leases`: the life cycle of batches. Queues and readers of topics have one each; it is the same for both.

A batch is leased under a key, and its lease may be extended. Then it is acknowledged (and its records are kept for a while), or
it is returned, by its owner or because its time is over. After too many attempts it becomes a dead letter. A change is committed
first, as one of `operations.BatchOperation`, and the files follow. The room that they need on the disk is taken before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.batch.batch import Batch
from qewqew_core.batch.batch_operations import EndLease, Extend, Forget, LeaseAgain
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.lease_state import LeaseState
from qewqew_core.batch.source import Source
from qewqew_core.errors import BadArgument, BadManifest, BadPath, BatchConflict, BatchExpired, BatchNotFound, Corrupt, DiskFull
from qewqew_core.keys import key_hash
from qewqew_core.secrecy import excerpt, hide

_logger = logging.getLogger(__name__)
LONGEST_RETRY_DELAY = 3600.0  # seconds, unless the first one is longer


class Leases:
    """The batches of a source. Callers have the engine's lock, except in calls that end or extend a `Batch`.

    ``max_attempts``, ``retry_delay``, ``retention``, ``retention_bytes``: see `Queue`. Raises `BadArgument`.
    """

    def __init__(self, source: Source, max_attempts: int, retry_delay: float, retention: timedelta, retention_bytes: int) -> None:
        check_limits(max_attempts, retry_delay, retention, retention_bytes)
        self.max_attempts, self.retry_delay = max_attempts, retry_delay
        self.retention, self.retention_bytes = retention, retention_bytes
        self.engine = source.engine
        self._source = source
        self._files = source.files
        self._stem = source.stem

    @property
    def _state(self) -> LeaseState:
        state: LeaseState = self.engine.state
        return state

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """As `Engine.exclusive`; the call opens each directory once."""
        with self.engine.exclusive(), self._files.entered():
            yield

    def directory_of(self, state: BatchState) -> str:
        return places.directory_of(self._stem, state)

    def present(self, owner: object, state: BatchState) -> Batch:
        return Batch(owner, self, state, self.directory_of(state), self.engine.clock())

    def _show(self, batch: Batch, state: BatchState) -> None:
        batch.show(state, self.directory_of(state), self.engine.clock())

    def lease(self, key: str, max_records: int | None, max_bytes: int | None, lease_timeout: float | None) -> BatchState | None:
        """See `HasBatches.lease`."""
        arguments.check_key(key)
        while True:
            try:
                return self._lease(key, max_records, max_bytes, lease_timeout)
            except DiskFull:
                if not self.make_room() and not self._source.make_room_elsewhere():
                    raise

    def make_room(self) -> bool:
        """Forget the oldest acknowledged batches, half of them; whether there are any. Their time is not over, but on a full disk
        they would keep those from being leased that nobody has processed. Manifests of older ones, kept for people, go first.
        """
        numbers = [number for _, number in self._state.expired_keys.values()]
        if places.remove_expired(self._files, self._stem, self._source.name, numbers):
            return True
        acked = list(self._state.history)
        oldest = acked[: (len(acked) + 1) // 2]
        if oldest:
            _logger.warning("%s: the disk is full: %d acknowledged batches go before their time", self._stem, len(oldest))
            return self._expire(oldest, keep_manifest=False)
        return False

    def _lease(self, key: str, max_records: int | None, max_bytes: int | None, lease_timeout: float | None) -> BatchState | None:
        most_records = arguments.check_bound("max_records", max_records) or sys.maxsize
        most_bytes = arguments.check_bound("max_bytes", max_bytes) or sys.maxsize
        lasts = arguments.lease_time(lease_timeout)
        self.return_expired(except_for=key)
        while True:
            state = self.of_key(key)
            if state is None:
                now = self.engine.clock().elapsed
                returned = (batch for batch in self._state.batches.values() if batch.state == "returned")
                state = next((batch for batch in returned if not batch.is_delayed(now)), None)
            if state is None:
                return self._source.cut(key, most_records, most_bytes, lasts, self._delay_after(1))
            if state.state != "returned" or self._lease_again(state, key, lasts):
                break
        if state.state == "leased" and (lasts, state.lease_timeout) != (None, None):
            self._source.commit(Extend(state.id, lasts))
        return state

    def _delay_after(self, attempt: int) -> int:
        """How long a batch waits if this attempt fails, in milliseconds. The last one leaves nothing to wait for."""
        if attempt >= self.max_attempts:
            return 0
        doubled = self.retry_delay * 2 ** min(attempt - 1, 64)
        return int(1000 * min(doubled, max(self.retry_delay, LONGEST_RETRY_DELAY)))

    def _lease_again(self, state: BatchState, key: str, lease_timeout: int | None) -> bool:
        """Lease a returned batch. False: its files are missing or damaged, so it is a dead letter now, and the next one comes.

        Raises `BadPath` if something else is in the place of a file or directory of it.
        """
        directory, attempt = self.directory_of(state), state.attempt + 1
        self._check_places(state, places.BATCHES)  # something else is moved away again: only what is not there is missing
        self._bring_home(state)
        try:
            coming = self._source.manifest_of(replace(state, keys=[*state.keys, key], attempt=attempt))
            self._source.prepare(partial(places.prepare_manifest, self._files, directory, coming))
        except (Corrupt, BadManifest, FileNotFoundError) as error:
            if self._files.is_directory(places.directory_of(self._stem, replace(state, state="dead"))):
                raise  # it could not be moved here yet, on a full disk
            _logger.error("batch %s cannot be leased again, and is a dead letter now: %s", state.id, error)
            self._end(state, "dead", f"it could not be leased again: {error}")
            return False
        try:
            self._source.commit(LeaseAgain(state.id, key, attempt, lease_timeout, self._delay_after(attempt)))
        except DiskFull:
            places.discard_manifest(self._files, directory)
            raise
        places.place_manifest(self._files, directory)
        return True

    def _check_places(self, state: BatchState, *homes: str) -> None:
        """Raise `BadPath` if something else is where the batch belongs in these, or in the place of one of its files."""
        places.check(self._files, self.directory_of(state), self.engine.what, *(self._stem + home for home in homes))

    def _bring_home(self, state: BatchState) -> None:
        """Move the batch's directory to where the log has it: it was away, or at its other place, when the log came to say so."""
        if not self._files.is_directory(self.directory_of(state)):
            places.roll_forward_place(self._files, self._stem, state)

    def _prepare_move(self, state: BatchState, home: str) -> None:
        """Before it is known in the log that the batch is there."""
        self._check_places(state, places.BATCHES, places.DEAD)
        self._source.prepare(partial(places.make_home, self._files, self._stem, home))
        self._source.keep_room(1)

    def files_missing(self, batch: Batch, path: str) -> Corrupt:
        return self._source.files_missing(batch, path)

    def return_expired(self, except_for: str | None = None) -> list[BatchState]:
        """Return the batches whose lease time is over."""
        clock = self.engine.clock()
        now = clock.elapsed
        expired = [batch for batch in self._state.batches.values() if batch.expired(now) and batch.keys[-1] != except_for]
        for batch in expired:
            assert batch.expires is not None
            when = arguments.moment(clock.wall_at(batch.expires)).to_datetime_string()
            self._end(batch, "returned", f"the lease of {batch.keys[-1]!r} ended at {when} UTC and was not extended")
        return expired

    def in_states(self, *states: str) -> list[BatchState]:
        """Oldest first."""
        if states == ("acked",):
            return list(self._state.history)
        return [batch for batch in self._state.batches.values() if batch.state in states]

    def of_key(self, key: str) -> BatchState | None:
        """The batch that was leased under this key; None if there never was one. Raises `BatchConflict`, `BatchExpired`."""
        path = self.engine.path
        for state in self._state.batches.values():
            if key in state.keys:
                if state.state == "leased" and key != state.keys[-1]:
                    raise BatchConflict(
                        f"batch {state.id}, once leased under {key!r}, was returned and is now leased under {state.keys[-1]!r}; "
                        "wait until that lease ends",
                        path=path,
                    )
                if state.state == "dead":
                    raise BatchConflict(
                        f"batch {state.id} of key {key!r} is in the dead letters ({state.reason or 'no reason given'}); "
                        "look at it, then return it to the queue or drop it",
                        path=path,
                    )
                return state
        if (acked := self._state.history.of_key(key)) is not None:
            return acked
        if key_hash(key) in self._state.expired_keys:
            raise BatchExpired(
                f"the batch of key {key!r} was acknowledged, and its records are no longer kept (retention {self.retention}, "
                f"{self.retention_bytes:,} bytes). A new batch needs a new key, for example a new run",
                path=path,
            )
        return None

    def of_id(self, batch_id: str) -> BatchState:
        """Raises `BatchNotFound`, `BatchExpired`."""
        state, path = self._state.find(batch_id) if isinstance(batch_id, str) else None, self.engine.path
        if state is None:
            expired = self._state.expired_keys.values()
            if any(places.numbered_id(self._source.name, number) == batch_id for _, number in expired):
                raise BatchExpired(f"batch {batch_id} was acknowledged, and its records are no longer kept", path=path)
            wrong = excerpt(batch_id, 120)
            raise BatchNotFound(f"no batch has the id {wrong}; batches(), or `qewqew batches`, lists them", path=path)
        return state

    # What a `Batch` calls

    def end(self, batch: Batch, to: str, reason: str) -> None:
        if not isinstance(reason, str):
            raise BadArgument(f"a reason is a str, not {type(reason).__name__}")
        with self.exclusive():
            state = self._current(batch, "leased", *(["acked"] if to == "acked" else []))
            if state.state == "leased":
                self._end(state, to, reason and hide(reason))
            self._show(batch, state)
            if to == "acked":
                self.remove_old()

    def extend(self, batch: Batch, lease_timeout: float | None) -> None:
        with self.exclusive():
            state = self._current(batch, "leased")
            lasts = arguments.lease_time(lease_timeout) or state.lease_timeout
            if lasts is None:
                raise BadArgument(f"batch {state.id} was leased without lease_timeout: its lease never ends")
            self._source.commit(Extend(state.id, lasts))
            self._show(batch, state)

    def revive(self, batch: Batch) -> None:
        with self.exclusive():
            state = self._current(batch, "dead")
            self._prepare_move(state, places.BATCHES)
            self._bring_home(state)
            self._source.manifest_of(state)  # it raises if its files are missing: the next lease would only set it aside again
            self._source.commit(EndLease(state.id, "returned", state.reason, 0))
            self._source.move(partial(places.roll_forward_place, self._files, self._stem, state))
            self._show(batch, state)

    def retry(self, batch: Batch) -> None:
        with self.exclusive():
            state = self._current(batch, "returned")
            self._source.commit(EndLease(state.id, "returned", state.reason, 0))
            self._show(batch, state)
            self.engine.notify()

    def put_back(self, batch: Batch) -> None:
        with self.exclusive():
            state = self._current(batch, "leased", "returned", "dead")
            self._check_places(state, places.BATCHES, places.DEAD)
            self._bring_home(state)
            self._source.put_back(state)

    def drop(self, batch: Batch) -> None:
        with self.exclusive():
            self._forget([self._current(batch, "dead")], keep_manifest=False)

    def check_ours(self, directory: str) -> None:
        """Raise `BadPath` if something else is in the place of the batch's directory or of a file in it: others forge records."""
        places.check(self._files, directory, self.engine.what, os.path.dirname(directory))

    def is_kept(self, batch: Batch, directory: str) -> bool | None:
        """Whether the files of the batch should be in this directory; None if nobody can say, as the store is closed."""
        if not self.engine.is_open:
            return None
        with self.exclusive():
            state = self._state.find(batch.id)
            if state is None or state.created != batch.made:
                return False
            return self.directory_of(state) == directory

    def _current(self, batch: Batch, *states: str) -> BatchState:
        """The present state of the batch. It must be in one of ``states`` and, if leased, have the same owner and attempt."""
        state, path = self._state.find(batch.id), self.engine.path
        if state is None:
            raise BatchNotFound(f"batch {batch.id} no longer exists: it was put back, dropped, or has expired", path=path)
        if state.state not in states:
            raise BatchConflict(f"batch {batch.id} is {state.state}, not {' or '.join(states)}", path=path)
        if state.created != batch.made:
            raise BatchNotFound(f"batch {batch.id} was put back, and its key has leased another batch since then", path=path)
        if state.state == "leased" and (state.attempt, state.keys[-1]) != (batch.attempt, batch.key):
            raise BatchConflict(
                f"batch {batch.id} was returned and is now leased under {state.keys[-1]!r}, attempt {state.attempt}; "
                f"this is attempt {batch.attempt} under {batch.key!r}",
                path=path,
            )
        return state

    def _end(self, state: BatchState, to: str, reason: str) -> None:
        if to == "returned" and state.attempt >= self.max_attempts:
            to, reason = "dead", f"attempt {state.attempt} of {self.max_attempts}: {reason or 'no reason given'}"
        if to == "dead":
            self._prepare_move(state, places.DEAD)
        self._source.commit(EndLease(state.id, to, reason[:1000], self._source.on_disk(state) if to == "acked" else 0))
        if to == "dead":
            self._source.move(partial(places.roll_forward_place, self._files, self._stem, state))
        self.engine.notify()

    def remove_old(self) -> None:
        """Drop the records of acknowledged batches that are too old, and of the oldest ones while all take too many bytes. If the
        disk is too full for that, this only logs it.
        """
        history, occupied = self._state.history, self._source.occupied
        kept = occupied(history.records, history.size)
        oldest = self.engine.clock().elapsed - self.retention // timedelta(milliseconds=1)
        expired = []
        for batch in history:
            if batch.since > oldest and kept <= self.retention_bytes:
                break
            expired.append(batch)
            kept -= occupied(batch.records, batch.bytes)
        if expired:
            self._expire(expired, keep_manifest=True)

    def _expire(self, batches: list[BatchState], keep_manifest: bool) -> bool:
        """Forget them, if nothing is in the way."""
        try:
            self._forget(batches, keep_manifest)
        except (DiskFull, BadPath) as error:
            _logger.warning("expired batches could not be removed: %s", error)
            return False
        return True

    def _forget(self, batches: list[BatchState], keep_manifest: bool) -> None:
        for batch in batches:
            self._check_places(batch, places.BATCHES, places.DEAD)
        batch_ids = [batch.id for batch in batches]
        self._source.commit(Forget(batch_ids, keep_manifest))
        places.roll_forward_forget(self._files, self._stem, batch_ids, keep_manifest)


class HasBatches:
    """The methods of queues and readers for their batches."""

    path: str  # what errors name
    _leases: Leases

    @property
    def max_attempts(self) -> int:
        """How often a batch may be leased before `Batch.nack` makes it a dead letter."""
        return self._leases.max_attempts

    @property
    def retry_delay(self) -> float:
        """Seconds that a batch waits after its first failure until another key may lease it, see `Queue`."""
        return self._leases.retry_delay

    @property
    def retention(self) -> timedelta:
        """How long the records of acknowledged batches are kept, up to `retention_bytes` in total."""
        return self._leases.retention

    @property
    def retention_bytes(self) -> int:
        return self._leases.retention_bytes

    def lease(
        self,
        key: str,
        max_records: int | None = None,
        max_bytes: int | None = None,
        lease_timeout: float | None = None,
    ) -> Batch | None:
        """Take a batch for the owner of ``key``; None if there is nothing to lease. Durable when it returns.

        The same key gives the same batch again, also after it was acknowledged: its ``state`` says so, and it may be processed
        and acknowledged once more. Otherwise a returned batch that is due comes first, whole, without regard to the limits (one
        whose files are missing or damaged becomes a dead letter instead, which is logged). Otherwise a new one is cut off what
        waits: up to ``max_records`` records with up to ``max_bytes`` of payload in all, but at least one record. In a queue the
        cost depends on the number of chunk files and not of records (a chunk is copied if open sessions hold some of its
        records).

        ``lease_timeout``: seconds after which anyone may return the batch if its owner has neither ended nor extended it
        (`Batch.extend`); None: never. The next `lease` under another key returns a batch whose time is over.

        Raises `BadKey`, `BadArgument`, `BatchExpired` (it was acknowledged, and its records are no longer kept),
        `BatchConflict` (somebody else has this key's batch now, or it is dead), `Corrupt`, `DiskFull`.
        """
        with self._leases.exclusive():
            state = self._leases.lease(key, max_records, max_bytes, lease_timeout)
            if state is None:
                self._leases.remove_old()
                return None
            return self._present(state)

    def return_expired(self) -> list[Batch]:
        """Return the batches whose lease time is over, or send them to the dead letters after ``max_attempts``. Anyone may call
        this. A lease without ``lease_timeout`` never ends in this way.

        It also removes acknowledged batches that are kept no longer (`retention`), as each `Batch.ack` does, and each `lease`
        that finds nothing.
        """
        with self._leases.exclusive():
            returned = [self._present(state) for state in self._leases.return_expired()]
            self._leases.remove_old()
            return returned

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
        with self._leases.engine.exclusive():
            return [self._present(state) for state in self._leases.in_states(*states)]

    def batch(self, batch_id: str) -> Batch:
        """The batch with this id, in any state. Raises `BatchNotFound`, or `BatchExpired` if its records were dropped."""
        with self._leases.engine.exclusive():
            return self._present(self._leases.of_id(batch_id))

    def find_batch(self, key: str) -> Batch:
        """The batch with this id, or the batch that was leased under this key. Raises as `batch`, and `BatchConflict` if somebody
        else has the key's batch now, or it is dead.
        """
        with self._leases.engine.exclusive():
            try:
                return self.batch(key)
            except BatchNotFound:
                if (state := self._leases.of_key(key)) is None:
                    raise BatchNotFound(f"no batch has key or id {excerpt(key, 120)}", path=self._leases.engine.path) from None
                return self._present(state)

    def _present(self, state: BatchState) -> Batch:
        return self._leases.present(self, state)


def check_limits(max_attempts: int, retry_delay: float, retention: timedelta, retention_bytes: int) -> None:
    arguments.check_whole("max_attempts", max_attempts, 1, 1 << 31)
    arguments.check_timeout("retry_delay", retry_delay)
    arguments.check_whole("retention_bytes", retention_bytes, 0, sys.maxsize)
    if not isinstance(retention, timedelta) or retention < timedelta(0):
        raise BadArgument(f"retention must be a timedelta of zero or more, not {excerpt(retention, 60)}")
