"""When a queue, or a reader of a topic, is worth a batch: what the sensor and the triggers wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from qewqew_airflow.arguments import is_rendered_later, seconds, whole
from qewqew_airflow.shared.source import Source
from qewqew_core import BadArgument, QueueStats

RETURNED = "a batch waits that was returned, or of which the lease time is over"
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "min_records": whole,
    "min_bytes": whole,
    "max_age": lambda name, value: seconds(name, value, low=0.001),
}


@dataclass(frozen=True)
class Thresholds:
    """Any of those that are given is enough; with none, one record is. A returned batch is always enough."""

    min_records: int | None = None
    min_bytes: int | None = None
    max_age: timedelta | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From arguments of a task or trigger; raises `BadArgument`. What is a template still is left out."""
        return cls(
            **{
                name: CHECKS[name](name, value)
                for name, value in given.items()
                if value is not None and not is_rendered_later(value)
            }
        )

    def check_bounds(self, settings: Mapping[str, Any]) -> None:
        """Raise `BadArgument` for a threshold that a queue with these settings can never reach."""
        for name, bound in (("min_records", "max_records"), ("min_bytes", "max_bytes")):
            wanted, most = getattr(self, name), settings.get(bound)
            if wanted is not None and most is not None and wanted > most:
                raise BadArgument(
                    f"{name} is {wanted:,}, and never reached: by its connection's {bound}, the queue never holds more than "
                    f"{most:,}; give at most that"
                )

    def reason(self, stats: QueueStats) -> str | None:
        """Which condition is met, as text; None: none of them."""
        if stats.returned:
            return RETURNED
        if not stats.records:
            return None
        if self == Thresholds():
            return "at least 1 records"
        if self.min_records is not None and stats.records >= self.min_records:
            return f"at least {self.min_records:,} records"
        if self.min_bytes is not None and stats.bytes >= self.min_bytes:
            return f"at least {self.min_bytes:,} bytes"
        if self.max_age is not None and (stats.oldest is None or datetime.now(UTC) - stats.oldest > self.max_age):
            return f"a record older than {self.max_age}"
        return None

    def seconds_left(self, stats: QueueStats) -> float | None:
        """Until the oldest record is old enough; None: age alone will not do it."""
        if self.max_age is None or not stats.records or stats.oldest is None:
            return None
        return max(0.0, (self.max_age - (datetime.now(UTC) - stats.oldest)).total_seconds())


def announcement(source: Source, stats: QueueStats, reason: str) -> dict[str, Any]:
    """What a sensor returns, and a trigger announces: JSON."""
    return {
        **source.names(),
        "ready": reason,
        "records": stats.records,
        "bytes": stats.bytes,
        "oldest": stats.oldest and stats.oldest.isoformat(),
        "returned": stats.returned,
        "leased": stats.leased,
    }
