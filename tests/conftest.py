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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """A system test waits until no integration test runs: it kills parts of an Airflow, and the others must notice in time."""
    if not WORKER:
        return (yield)
    kind = item.nodeid.split("/")[1]
    if kind == "unit":
        os.nice(max(0, 10 - os.nice(0)))  # from now on: the process that runs the system tests does so before unit tests
        return (yield)
    lock = os.open(HERE, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX if kind == "system" else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for a child that a test forked and left
        os.close(lock)
