"""A batch at one moment, and how the logs of queues and readers write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from qewqew_core.secrecy import excerpt

if TYPE_CHECKING:
    from qewqew_core.formats.chunk_state import Chunk

STATES = ("leased", "returned", "dead", "acked")


@dataclass(slots=True, eq=False)
class BatchState:
    """A batch that is leased, returned or dead; or acknowledged, with its files still there."""

    id: str
    keys: list[str]  # of all its owners; the present or last one is at the end
    state: str  # "leased", "returned", "dead", "acked"
    attempt: int
    records: int
    bytes: int
    created: int  # milliseconds since the epoch, for people
    changed: int
    reason: str = ""
    lease_timeout: int | None = None  # milliseconds after which anyone may return the batch; None: never
    since: int = 0  # when it was changed, in elapsed time: see `Clock`
    extended: int = 0  # when its owner leased or extended it, in elapsed time
    retry_delay: int = 0  # milliseconds that the batch, once it is returned, waits for another lease
    chunks: list[Chunk] = field(default_factory=list)  # of a queue's batch; empty once acknowledged: then the manifest has them

    @property
    def expires(self) -> int | None:
        """In elapsed time."""
        return None if self.state != "leased" or self.lease_timeout is None else self.extended + self.lease_timeout

    def expired(self, now: int) -> bool:
        return self.expires is not None and self.expires <= now

    @property
    def due(self) -> int | None:
        """From when on any lease may take it, in elapsed time; None: not until somebody ends it."""
        ended = self.since if self.state == "returned" else self.expires
        return None if ended is None else ended + self.retry_delay

    def is_delayed(self, now: int) -> bool:
        """Whether it waits for its time: it is returned, or its lease has ended, and no lease may take it yet."""
        return self.due is not None and now < self.due and (self.state == "returned" or self.expired(now))


BATCH_ID = re.compile("[A-Za-z0-9_-]+-[0-9a-f]{16}")  # see `places.numbered_id`


def checked(batch: BatchState) -> BatchState:
    """Check a batch from a log; raises ValueError for one that QewQew cannot have written. Its id names a directory."""
    numbers = (
        batch.attempt,
        batch.records,
        batch.bytes,
        batch.created,
        batch.changed,
        batch.since,
        batch.extended,
        batch.retry_delay,
    )
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
        raise ValueError(f"this is not a batch: {excerpt(batch.id, 120)}")
    return batch


_FIELDS = [attribute.name for attribute in fields(BatchState) if attribute.name != "chunks"]


def batch_fields(batch: BatchState) -> dict[str, Any]:
    """A batch as logs write it, in JSON. They write its chunks in another way."""
    return {name: getattr(batch, name) for name in _FIELDS}
