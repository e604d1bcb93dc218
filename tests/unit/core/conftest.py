import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.queue.records import Records

sys.path.insert(0, str(Path(__file__).parent))  # the simulated disk is shared by several tests


@pytest.fixture(autouse=True)
def collect_what_this_test_has_made() -> Iterator[None]:
    """``gc.collect()`` looks at nothing that is older: beside Airflow and Spark it would take a tenth of a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes puts and takes of one record go the way of those of many."""

    def put_one(records: Records, record: bytes, timeout: float | None) -> int:
        return records.transact([record], None, [], None, timeout)[0]

    def take() -> None:
        monkeypatch.setattr(Records, "put_one", put_one)
        monkeypatch.setattr(Records, "take_one", lambda records, step: records.take([step]))

    return take


class Clock:
    """The clock of the core, which stands still until it is moved."""

    def __init__(self, ms: int) -> None:
        self.ms = ms  # since the epoch

    def advance(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock(1_800_000_000_000)
    monkeypatch.setattr(LIMITS, "clock", lambda: stopped.ms * 1_000_000)
    return stopped


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Stops the clock for a while, so that on a busy machine, too, nothing is due before its turn."""

    @contextmanager
    def stopped() -> Iterator[None]:
        now = now_ms()
        with monkeypatch.context() as patches:
            patches.setattr(LIMITS, "clock", lambda: now * 1_000_000)
            yield

    return stopped
