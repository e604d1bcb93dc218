"""The metrics of locks: the timer ``qewqew.lock_wait``, and the counter ``qewqew.refused`` of openings that gave up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from airflow.providers.common.compat.sdk import Stats as stats

from qewqew_core.disk.lock import WAITS


@contextmanager
def lock_wait(**tags: str) -> Iterator[None]:
    """Send how long this process waits for locks meanwhile, and whether it gave up.

    ``tags``: connection, and queue or topic (and reader).
    """
    seconds, refused = WAITS.seconds, WAITS.refused
    try:
        yield
    finally:
        stats.timing("qewqew.lock_wait", timedelta(seconds=WAITS.seconds - seconds), tags=tags)
        if WAITS.refused > refused:
            stats.incr("qewqew.refused", WAITS.refused - refused, tags=tags)
