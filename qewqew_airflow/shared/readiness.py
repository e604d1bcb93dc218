"""When a queue, or a reader of a topic, has enough for a batch. Sensor and triggers wait for this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from qewqew_airflow.arguments import is_rendered_later, seconds, whole
from qewqew_airflow.shared.source import Source
from qewqew_core import BadArgument, QueueStats

RETURNED = "a batch was returned, or its lease has ended"
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "min_records": whole,
    "min_bytes": whole,
    "max_age": lambda name, value: seconds(name, value, low=0.001),
}


@dataclass(frozen=True)
class Thresholds:
    """Reaching any of those given is enough. Without any, one record is enough. A returned batch that is due always is."""

    min_records: int | None = None
    min_bytes: int | None = None
    max_age: timedelta | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From the arguments of a task or trigger. Leaves out templates that are not rendered yet. Raises `BadArgument`."""
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
                    f"{name} is {wanted:,} and could never be reached, because {bound} of the connection limits the queue to "
                    f"{most:,}; give at most that"
                )

    def reason(self, stats: QueueStats) -> str | None:
        """Which condition is met, as text. None if no condition is."""
        if stats.returned > stats.delayed:
            return RETURNED
        if not stats.records:
            return None
        if self == Thresholds():
            return "at least 1 record"
        if self.min_records is not None and stats.records >= self.min_records:
            return f"at least {self.min_records:,} records"
        if self.min_bytes is not None and stats.bytes >= self.min_bytes:
            return f"at least {self.min_bytes:,} bytes"
        if self.max_age is not None and (stats.oldest is None or datetime.now(UTC) - stats.oldest > self.max_age):
            return f"a record older than {self.max_age}"
        return None

    def seconds_left(self, stats: QueueStats) -> float | None:
        """Seconds until the oldest record is old enough, or a returned batch is due. None if time alone will never be enough."""
        moments: list[datetime] = [] if stats.next_due is None else [stats.next_due]
        if self.max_age is not None and stats.records and stats.oldest is not None:
            moments.append(stats.oldest + self.max_age)
        return max(0.0, (min(moments) - datetime.now(UTC)).total_seconds()) if moments else None


def announcement(source: Source, stats: QueueStats, reason: str) -> dict[str, Any]:
    """What a sensor returns and a trigger sends, as JSON."""
    return {
        **source.names(),
        "ready": reason,
        "records": stats.records,
        "bytes": stats.bytes,
        "oldest": stats.oldest and stats.oldest.isoformat(),
        "returned": stats.returned,
        "leased": stats.leased,
    }
