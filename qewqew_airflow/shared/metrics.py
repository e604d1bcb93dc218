"""The metrics. They go where Airflow sends its own (StatsD, OpenTelemetry).

Counters, in records: ``qewqew.staged``, ``qewqew.leased``, ``qewqew.acknowledged``, ``qewqew.nacked`` and ``qewqew.bad``.
A timer: ``qewqew.batch_duration``. Gauges of what waits: ``qewqew.depth`` (records), ``qewqew.oldest_age`` (seconds) and
``qewqew.dead`` (batches in the dead letters). `locks` has two more. Their tags are ``connection`` and ``queue``, or
``connection``, ``topic`` and ``reader``.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

from airflow.providers.common.compat.sdk import Stats as stats

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared.source import Source
from qewqew_core import Batch, QueueStats

_logger = logging.getLogger(__name__)


def count(what: Literal["staged", "leased", "acknowledged", "nacked", "bad"], records: int, **tags: str) -> None:
    """``tags``: connection, and queue or topic (and reader)."""
    stats.incr(f"qewqew.{what}", records, tags=tags)


def ended(batch: Batch, **tags: str) -> None:
    """A batch was acknowledged or returned. ``tags`` as for `count`."""
    count("acknowledged" if batch.state == "acked" else "nacked", batch.records, **tags)
    if batch.state == "acked":
        stats.timing("qewqew.batch_duration", datetime.now(UTC) - batch.created, tags=tags)


def gauge(hook: QewQewHook, source: Source, seen: QueueStats | None = None) -> None:
    """Send how much waits. For a reader only if it was ``seen``, because counting may read all messages. Never raises."""
    if seen is None and source.topic is not None:
        return
    try:
        seen = seen or source.inspect(hook)
    except Exception as error:
        _logger.warning("The metrics of %s could not be sent: %s", source, error)
        return
    tags = {"connection": hook.qewqew_conn_id, **source.names()}
    stats.gauge("qewqew.depth", seen.records, tags=tags)
    stats.gauge("qewqew.oldest_age", (datetime.now(UTC) - seen.oldest).total_seconds() if seen.oldest else 0, tags=tags)
    stats.gauge("qewqew.dead", seen.dead, tags=tags)
