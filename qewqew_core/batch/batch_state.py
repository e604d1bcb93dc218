"""The batches of a queue, or of a reader of a topic, at one moment, and what happens to them: see `batch_operations`. No files.

Both logs have these operations as JSON, with the names and fields of `BATCH_OPERATIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from qewqew_core.batch.batch_operations import BatchOperation, EndLease, Extend, Forget, LeaseAgain
from qewqew_core.keys import key_hash, prune

if TYPE_CHECKING:
    from qewqew_core.formats.chunk_state import Chunk

STATES = ("leased", "returned", "dead", "acked")


@dataclass(slots=True, eq=False)
class BatchState:
    """A batch that is not forgotten: leased, returned, dead, or acknowledged with its files still there."""

    id: str
    keys: list[str]  # of all who leased it, the present or last owner at the end
    state: str  # "leased", "returned", "dead", "acked"
    attempt: int
    records: int
    bytes: int
    created: int  # milliseconds since the epoch, as are all times here
    changed: int
    reason: str = ""
    lease_timeout: int | None = None  # milliseconds after which anyone may return the batch; None: never
    extended: int = 0  # when its owner leased or extended it
    chunks: list[Chunk] = field(default_factory=list)  # of a queue's batch; empty once acknowledged: then the manifest has them

    @property
    def expires(self) -> int | None:
        return None if self.state != "leased" or self.lease_timeout is None else self.extended + self.lease_timeout

    def expired(self, now: int) -> bool:
        return self.expires is not None and self.expires <= now


BATCH_ID = re.compile("[A-Za-z0-9_-]+-[0-9a-f]{16}")  # see `places.numbered_id`


def checked(batch: BatchState) -> BatchState:
    """A batch that a log tells of; raises ValueError for what nothing of ours has written. Its id names a directory."""
    numbers = batch.attempt, batch.records, batch.bytes, batch.created, batch.changed, batch.extended
    if (
        type(batch.id) is not str
        or not BATCH_ID.fullmatch(batch.id)
        or type(batch.keys) is not list
        or not batch.keys
        or any(type(text) is not str for text in (*batch.keys, batch.reason))
        or batch.state not in STATES
        or any(type(number) is not int for number in numbers)
        or type(batch.lease_timeout) not in (int, type(None))
    ):
        raise ValueError(f"this is no batch: {batch.id!r:.120}")
    return batch


_FIELDS = [attribute.name for attribute in fields(BatchState) if attribute.name != "chunks"]


def batch_fields(batch: BatchState) -> dict[str, Any]:
    """As logs write it, in JSON; chunks they write otherwise."""
    return {name: getattr(batch, name) for name in _FIELDS}


@dataclass(slots=True, eq=False)
class LeaseState:
    """The batches of a queue, or of a reader of a topic, and the keys of those whose records are no longer kept."""

    batches: dict[str, BatchState] = field(default_factory=dict)  # oldest first
    expired_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (time, number of the batch id)

    def unfinished(self) -> list[BatchState]:
        """The batches that are leased, returned or dead."""
        return [batch for batch in self.batches.values() if batch.state != "acked"]

    def forget(self, batch_ids: list[str]) -> None:
        """The batches' files are dropped. Keys of acknowledged ones are remembered as expired."""
        for batch_id in batch_ids:
            batch = self.batches.pop(batch_id)
            if batch.state == "acked":
                for key in batch.keys:
                    self.expired_keys[key_hash(key)] = (batch.changed, int(batch_id[-16:], 16))

    def prune_expired(self, now: int) -> set[int]:
        """Forget keys past their retention; the numbers of the batches whose last key went."""
        return set(prune(self.expired_keys, now)) - {number for _, number in self.expired_keys.values()}

    def apply_to_batch(self, operation: BatchOperation, time: int) -> None:
        """Raises KeyError if there is no such batch."""
        match operation:
            case LeaseAgain(batch_id, key, attempt, lease_timeout):
                batch = self.batches[batch_id]
                batch.keys = [other for other in batch.keys if other != key] + [key]
                batch.state, batch.attempt, batch.changed, batch.reason = "leased", attempt, time, ""
                batch.lease_timeout, batch.extended = lease_timeout, time
            case Extend(batch_id, lease_timeout):
                batch = self.batches[batch_id]
                batch.lease_timeout, batch.extended = lease_timeout, time
            case EndLease(batch_id, state, reason):
                batch = self.batches[batch_id]
                batch.state, batch.reason, batch.changed = state, reason, time
                if state == "acked":
                    batch.chunks.clear()
            case Forget(batch_ids):
                self.forget(batch_ids)


# Operations as JSON. It can say anything, and names of directories are made of ids.

BATCH_OPERATIONS: dict[str, type[BatchOperation]] = {
    "lease_again": LeaseAgain,
    "extend": Extend,
    "release": EndLease,
    "forget": Forget,
}
BATCH_NAMES = {kind: name for name, kind in BATCH_OPERATIONS.items()}


def batch_operation(name: str, values: dict[str, Any]) -> BatchOperation:
    """Raises ValueError and the like for what nothing of ours has written."""
    return BATCH_OPERATIONS[name](**{name: BATCH_CHECKS[name](value) for name, value in values.items()})


def _of(is_right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"nothing of ours has written {value!r:.120} there")
        return value

    return check


def _is_id(value: Any) -> bool:
    return type(value) is str and BATCH_ID.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return type(value) is str


BATCH_CHECKS: dict[str, Callable[[Any], Any]] = {
    "id": _of(_is_id),
    "ids": _of(lambda value: type(value) is list and all(map(_is_id, value))),
    "key": _of(_is_text),
    "reason": _of(_is_text),
    "state": _of(lambda value: value in STATES),
    "attempt": _of(lambda value: type(value) is int),
    "lease_timeout": _of(lambda value: type(value) in (int, type(None))),
    "keep_manifest": _of(lambda value: type(value) is bool),
}
