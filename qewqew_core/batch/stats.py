"""How much waits and how much is leased. Queues and readers of topics have the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from qewqew_core import arguments
from qewqew_core.batch.lease_state import LeaseState

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
    on_disk: int  # bytes of disk of all files of the queue, its batches included, but not what is kept for a full disk
    last_lease: pendulum.DateTime | None = None  # when a batch was leased last
    oldest_lease: pendulum.DateTime | None = None  # when the batch was leased that has been leased for longest
    clock_step: float = 0.0  # seconds by which the wall clock was set, when that was last noticed; < 0: back
    delayed: int = 0  # of the returned ones: those that no lease may take yet, see ``retry_delay`` of a `Queue` …
    next_due: pendulum.DateTime | None = None  # … and when the first of them is due
    missing: int = 0  # leased, returned and dead batches whose files somebody has removed
    # When the oldest record was put that nobody has acknowledged, in whatever state it is: waiting, leased, returned or dead.
    oldest_unacknowledged: pendulum.DateTime | None = None


STATES = ("leased", "returned", "dead")
LONGEST_LEASE = timedelta(days=1)  # who works on a batch for longer has died or forgotten it, for `check` and the page


def counts(state: LeaseState, run: bytes) -> dict[str, int]:
    """How many batches are leased, returned and dead; see `QueueStats`. ``run``: `Files.boot`."""
    now = state.clock.now(run).elapsed
    states = ["returned" if batch.expired(now) else batch.state for batch in state.batches.values()]
    return {state: states.count(state) for state in STATES}


def earliest(*times: int | None) -> pendulum.DateTime | None:
    """The first of these times of the wall clock, in milliseconds; None if there is none."""
    known = [time for time in times if time is not None]
    return arguments.moment(min(known)) if known else None


def of_batches(states: Collection[LeaseState], run: bytes) -> dict[str, Any]:
    """What `QueueStats` says of the batches of a queue or a reader, or of several readers."""
    found, leases, steps, dues = Counter[str](), [], [0], []
    for state in states:
        found.update(counts(state, run))
        clock = state.clock.now(run)
        steps.append(clock.step)
        dues += [clock.wall_at(batch.due or 0) for batch in state.batches.values() if batch.is_delayed(clock.elapsed)]
        leases += [
            clock.shown(batch.changed, batch.since)
            for batch in state.batches.values()
            if batch.state == "leased" and not batch.expired(clock.elapsed)
        ]
    last_lease = max((state.last_lease for state in states), default=0)
    return {
        **{state: found[state] for state in STATES},
        "last_lease": arguments.moment(last_lease) if last_lease else None,
        "oldest_lease": arguments.moment(min(leases)) if leases else None,
        "delayed": len(dues),
        "next_due": earliest(*dues),
        "clock_step": max(steps, key=abs) / 1000,
    }
