"""What happens to batches, and how it is written as JSON: in the logs of queues and of readers alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from qewqew_core.batch.batch_state import BATCH_ID, STATES
from qewqew_core.secrecy import excerpt


class LeaseAgain(NamedTuple):
    """A returned batch goes to the owner of ``key``."""

    id: str
    key: str
    attempt: int
    lease_timeout: int | None  # milliseconds
    retry_delay: int = 0  # milliseconds


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


# Operations as JSON. It can say anything, and names of directories are made of ids.

BATCH_OPERATIONS: dict[str, type[BatchOperation]] = {
    "lease_again": LeaseAgain,
    "extend": Extend,
    "release": EndLease,
    "forget": Forget,
}
BATCH_NAMES = {kind: name for name, kind in BATCH_OPERATIONS.items()}


def batch_operation(name: str, values: dict[str, Any]) -> BatchOperation:
    """Raises ValueError and the like for values that QewQew cannot have written."""
    return BATCH_OPERATIONS[name](**{name: BATCH_CHECKS[name](value) for name, value in values.items()})


def _of(is_right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"QewQew never writes {excerpt(value, 120)} here")
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
    "on_disk": _of(lambda value: type(value) is int),
    "retry_delay": _of(lambda value: type(value) is int),
    "lease_timeout": _of(lambda value: type(value) in (int, type(None))),
    "keep_manifest": _of(lambda value: type(value) is bool),
}
