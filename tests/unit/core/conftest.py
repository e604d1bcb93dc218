import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
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
    """The clocks of the core, which stand still until they are moved."""

    def __init__(self, ms: int) -> None:
        self.ms = ms  # since the epoch
        self.stepped = 0  # milliseconds by which the wall clock was set
        self.started = 0  # when the machine was, by a clock that nobody sets
        self.runs = 0

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.ms += round(seconds * 1000)

    def step(self, seconds: float) -> None:
        """The wall clock is set, and no time passes."""
        self.stepped += round(seconds * 1000)
        self.ms += round(seconds * 1000)

    @property
    def uptime(self) -> int:
        return self.ms - self.stepped - self.started

    def restart(self, off: float = 0) -> None:
        """The machine is off for so many seconds, and starts again."""
        self.advance(off)
        self.started, self.runs = self.ms - self.stepped, self.runs + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock(1_800_000_000_000)
    monkeypatch.setattr(LIMITS, "clock", lambda: stopped.ms * 1_000_000)
    monkeypatch.setattr(LIMITS, "boot_clock", lambda: stopped.uptime * 1_000_000)
    monkeypatch.setattr(Files, "boot", lambda self: b"run %d" % stopped.runs)
    return stopped


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Stops the clock for a while, so that on a busy machine, too, nothing is due before its turn."""

    @contextmanager
    def stopped() -> Iterator[None]:
        now, uptime = LIMITS.clock(), LIMITS.boot_clock()
        with monkeypatch.context() as patches:
            patches.setattr(LIMITS, "clock", lambda: now)
            patches.setattr(LIMITS, "boot_clock", lambda: uptime)
            yield

    return stopped
