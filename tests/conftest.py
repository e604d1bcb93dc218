"""In several processes (``./run test``: ``-n 3``) tests run file by file: the integration tests, then in one of them the system
tests, beside which the others run the unit tests, with what they leave of the processors.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

_lock = os.open(HERE, os.O_RDONLY)

if WORKER and "AIRFLOW_HOME" in os.environ:  # each has a database of its own
    os.environ["AIRFLOW_HOME"] = os.path.join(os.environ["AIRFLOW_HOME"], WORKER)


def pytest_configure() -> None:
    # It logs when the process ends, to a stream that pytest has closed: an error after pytest's summary.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # A shell starts what runs in its background with SIGINT ignored, and that is inherited: what the tests start, and
    # interrupt, would not notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # xdist need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return "tests/system" if path.startswith("tests/system/") else path

    config.option.loadscopereorder = False  # in the order of testpaths
    return Scheduling(config, log)


def kind(item: pytest.Item) -> str:
    return item.nodeid.split("/")[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
    """The system tests wait until no process has integration tests left, and run when none does: they kill parts of an Airflow,
    and the others must notice in time.
    """
    if not WORKER:
        return (yield)
    if kind(item) == "unit":
        os.nice(max(0, 10 - os.nice(0)))  # from now on: the process that runs the system tests does so before unit tests
        return (yield)
    fcntl.flock(_lock, fcntl.LOCK_EX if kind(item) == "system" else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if nextitem is None or kind(nextitem) != kind(item):
            fcntl.flock(_lock, fcntl.LOCK_UN)  # explicitly, also for a child that a test forked and left
