"""When a queue is ready, as a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from qewqew_airflow.shared.readiness import Thresholds
from qewqew_core import BadArgument

HOUR = timedelta(hours=1)


def stats(records: int = 0, size: int = 0, age: timedelta | None = None, returned: int = 0, leased: int = 0) -> SimpleNamespace:
    oldest = None if age is None else datetime.now(UTC) - age
    return SimpleNamespace(records=records, bytes=size, oldest=oldest, returned=returned, leased=leased, delayed=0, next_due=None)


@pytest.mark.parametrize(
    ("thresholds", "seen", "ready"),
    [
        # none given: not empty
        ({}, stats(), None),
        ({}, stats(1, 0, timedelta(0)), "at least 1 record"),
        # each alone, below and at the threshold
        ({"min_records": 3}, stats(2, 999, HOUR), None),
        ({"min_records": 3}, stats(3, 0, timedelta(0)), "at least 3 records"),
        ({"min_bytes": 100}, stats(999, 99, HOUR), None),
        ({"min_bytes": 100}, stats(1, 100, timedelta(0)), "at least 100 bytes"),
        ({"max_age": HOUR}, stats(999, 999, HOUR / 2), None),  # far off: the ages are as of the collection of the tests
        ({"max_age": HOUR}, stats(1, 0, HOUR + timedelta(seconds=1)), "a record older than 1:00:00"),
        # seconds, and values as templates render them
        ({"max_age": 3600}, stats(1, 0, 2 * HOUR), "a record older than 1:00:00"),
        ({"max_age": "0.5"}, stats(1, 0, HOUR), "a record older than 0:00:00.500000"),
        ({"min_records": "3"}, stats(3), "at least 3 records"),
        # any of those given is enough
        ({"min_records": 3, "min_bytes": 100, "max_age": HOUR}, stats(2, 99, timedelta(0)), None),
        ({"min_records": 3, "min_bytes": 100, "max_age": HOUR}, stats(2, 100, timedelta(0)), "at least 100 bytes"),
        ({"min_records": 3, "max_age": HOUR}, stats(1, 0, 2 * HOUR), "a record older than 1:00:00"),
        # the age of an empty queue does not exist; records of unknown age must not wait for ever
        ({"max_age": HOUR}, stats(0), None),
        ({"max_age": HOUR}, stats(1, 1, None), "a record older than 1:00:00"),
        # a returned batch is always ready, a leased one never
        ({"min_records": 3}, stats(returned=1), "a batch was returned, or its lease has ended"),
        ({"min_records": 3}, stats(leased=1), None),
    ],
)
def test_when_a_queue_is_ready(thresholds: dict[str, Any], seen: Any, ready: str | None) -> None:
    assert Thresholds.of(thresholds).reason(seen) == ready


@pytest.mark.parametrize(
    ("records", "age", "low", "high"),
    [
        (1, timedelta(minutes=10), 2900, 3000),
        (1, 2 * HOUR, 0, 0),
        (0, None, None, None),
        (1, None, None, None),  # of unknown age: it is ready
    ],
)
def test_when_it_will_be_ready_by_age_alone(records: int, age: timedelta | None, low: float | None, high: float | None) -> None:
    seen = stats(records, records, age)
    left = Thresholds.of({"min_records": 5, "max_age": 3600}).seconds_left(seen)
    assert left == low if low is None or high is None else low <= (left or 0) <= high
    assert Thresholds.of({"min_records": 5}).seconds_left(seen) is None


@pytest.mark.parametrize(
    ("thresholds", "settings", "ok"),
    [
        ({"min_records": 100}, {"max_records": 100}, True),
        ({"min_records": 101}, {"max_records": 100}, False),
        ({"min_bytes": 101}, {"max_bytes": 100}, False),
        ({"min_bytes": 101, "max_age": 5}, {"max_bytes": 100}, False),  # it is a mistake, though one of them can be met
        ({"min_records": 101}, {"max_bytes": 100}, True),
        ({"min_records": 101}, {}, True),
        ({}, {"max_records": 1}, True),
    ],
)
def test_a_threshold_above_the_bound_of_the_queue_is_never_met(
    thresholds: dict[str, Any], settings: dict[str, int], ok: bool
) -> None:
    if ok:
        Thresholds.of(thresholds).check_bounds(settings)
    else:
        with pytest.raises(BadArgument, match="could never be reached"):
            Thresholds.of(thresholds).check_bounds(settings)
