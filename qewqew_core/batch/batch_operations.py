"""What happens to batches. The logs of queues and of readers have the same operations; see `operations`."""

from __future__ import annotations

from typing import NamedTuple


class LeaseAgain(NamedTuple):
    """A returned batch goes to the owner of ``key``."""

    id: str
    key: str
    attempt: int
    lease_timeout: int | None  # milliseconds


class Extend(NamedTuple):
    """The owner of a batch is alive."""

    id: str
    lease_timeout: int | None


class EndLease(NamedTuple):
    """A batch is returned, dead or acknowledged."""

    id: str
    state: str
    reason: str
    on_disk: int  # bytes that the files of an acknowledged one take


class Forget(NamedTuple):
    """The files of batches are dropped. Keys of acknowledged ones are remembered as expired."""

    ids: list[str]
    keep_manifest: bool


BatchOperation = LeaseAgain | Extend | EndLease | Forget
