"""The batches of a queue, or of a reader of a topic, at one moment, and what happens to them. No files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from qewqew_core.batch.batch_operations import BatchOperation, EndLease, Extend, Forget, LeaseAgain
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.history import History
from qewqew_core.clock import NO_CLOCK, Clock
from qewqew_core.keys import key_hash, prune


@dataclass(slots=True, eq=False)
class LeaseState:
    """The batches of a queue, or of a reader of a topic, and the keys of those whose records are no longer kept."""

    batches: dict[str, BatchState] = field(default_factory=dict)  # leased, returned and dead ones, oldest first
    history: History = field(default_factory=History)  # the acknowledged ones
    last_lease: int = 0  # when a batch was leased last, milliseconds since the epoch; 0: none ever was
    expired_keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key hash: (elapsed time, number of the batch id)
    clock: Clock = NO_CLOCK

    def with_history(self) -> list[BatchState]:
        """All batches whose records are kept, the acknowledged ones first."""
        return [*self.history, *self.batches.values()]

    def find(self, batch_id: str) -> BatchState | None:
        return self.batches.get(batch_id) or self.history.of_id(batch_id)

    @property
    def kept(self) -> int:
        """How many these are."""
        return len(self.history) + len(self.batches)

    def forget(self, batch_ids: list[str]) -> None:
        """The batches' files are dropped. Keys of acknowledged ones are remembered as expired."""
        for batch_id in batch_ids:
            if self.batches.pop(batch_id, None) is None:
                batch = self.history.remove(batch_id)
                for key in batch.keys:
                    self.expired_keys[key_hash(key)] = (batch.since, int(batch_id[-16:], 16))

    def prune_expired(self, now: int) -> set[int]:
        """Forget keys past their retention; the numbers of the batches whose last key went."""
        return set(prune(self.expired_keys, now)) - {number for _, number in self.expired_keys.values()}

    def times(self) -> Iterator[int]:
        """The elapsed times that it says, all in the past."""
        for batch in self.with_history():
            yield from (batch.since, batch.extended)
        yield from (elapsed for elapsed, _ in self.expired_keys.values())

    def apply_to_batch(self, operation: BatchOperation, time: int) -> None:
        """Raises KeyError if there is no such batch."""
        elapsed = self.clock.at(time)
        match operation:
            case LeaseAgain(batch_id, key, attempt, lease_timeout, retry_delay):
                batch = self.batches[batch_id]
                batch.keys = [other for other in batch.keys if other != key] + [key]
                batch.state, batch.attempt, batch.changed, batch.reason = "leased", attempt, time, ""
                batch.lease_timeout, batch.since, batch.extended, batch.retry_delay = lease_timeout, elapsed, elapsed, retry_delay
                self.last_lease = time
            case Extend(batch_id, lease_timeout):
                batch = self.batches[batch_id]
                batch.lease_timeout, batch.extended = lease_timeout, elapsed
            case EndLease(batch_id, state, reason, on_disk):
                batch = self.batches[batch_id]
                due = batch.due if batch.state == "leased" and batch.expired(elapsed) else None
                if due is not None:  # the delay has begun when the lease ended
                    batch.retry_delay = max(0, due - elapsed)
                elif batch.state != "leased":  # somebody wants it back: at once
                    batch.retry_delay = 0
                batch.state, batch.reason, batch.changed, batch.since = state, reason, time, elapsed
                if state == "acked":
                    batch.chunks.clear()
                    self.history.add(self.batches.pop(batch_id), on_disk)
            case Forget(batch_ids):
                self.forget(batch_ids)
