"""How much waits and how much is leased. Queues and readers of topics have the same numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qewqew_core import arguments
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.limits import now_ms

if TYPE_CHECKING:
    import pendulum


@dataclass(frozen=True)
class QueueStats:
    """Records, payload bytes and chunks of the queue (also those that open sessions hold), numbers of batches, and disk space."""

    records: int
    bytes: int
    chunks: int
    oldest: pendulum.DateTime | None  # when the oldest record was put; at most 64 KiB of records too early
    leased: int
    returned: int  # wait for the next lease: what was returned, and leases whose time is over
    dead: int
    on_disk: int  # bytes of disk of all files of the queue, those of its batches included
    last_lease: pendulum.DateTime | None = None  # when a batch was leased last
    oldest_lease: pendulum.DateTime | None = None  # when the batch was leased that has been leased for longest


STATES = ("leased", "returned", "dead")


def counts(batches: Collection[BatchState]) -> dict[str, int]:
    """How many are leased, returned and dead; see `QueueStats`."""
    now = now_ms()
    states = ["returned" if batch.expired(now) else batch.state for batch in batches]
    return {state: states.count(state) for state in STATES}


def of_batches(batches: Collection[BatchState], last_lease: int) -> dict[str, Any]:
    """What `QueueStats` says of batches. ``last_lease``: see `LeaseState`."""
    now = now_ms()
    leases = [batch.changed for batch in batches if batch.state == "leased" and not batch.expired(now)]
    return {
        **counts(batches),
        "last_lease": arguments.moment(last_lease) if last_lease else None,
        "oldest_lease": arguments.moment(min(leases)) if leases else None,
    }
