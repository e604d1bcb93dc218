import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from qewqew_core import reader

sys.path.insert(0, str(Path(__file__).parent))  # the simulated disk is shared by several tests


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Stops the clock of readers for a while, so that on a busy machine, too, nothing is due before its turn."""

    @contextmanager
    def stopped() -> Iterator[None]:
        now = reader.now_ms()
        with monkeypatch.context() as patches:
            patches.setattr(reader, "now_ms", lambda: now)
            yield

    return stopped
