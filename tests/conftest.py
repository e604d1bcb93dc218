"""In several processes (``./run test``: ``-n 3``) tests run file by file: the integration tests, then in one of them the system
tests, beside which the others run the unit tests, with what they leave of the processors.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from stride import LEVEL, OFFSET, SHARE, every, is_wanted, shared

HERE = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

_lock = os.open(HERE, os.O_RDONLY)

if WORKER and "AIRFLOW_HOME" in os.environ:  # each has a database of its own
    os.environ["AIRFLOW_HOME"] = os.path.join(os.environ["AIRFLOW_HOME"], WORKER)


__all__ = ["every"]  # a fixture


def pytest_runtest_setup() -> None:
    from qewqew_core import secrecy

    secrecy._read.clear()  # what references of other tests gave is in no error of this one


def pytest_configure(config: pytest.Config) -> None:
    with suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("quick", max_examples=20, deadline=None, database=None)  # a busy machine may stop for longer
        settings.register_profile("full", max_examples=100, deadline=None, database=None)
        settings.register_profile("soak", max_examples=2_000, deadline=None, database=None)
        settings.load_profile({"rest": "full"}.get(LEVEL, LEVEL))
        if config.getoption("--hypothesis-seed") is None:
            config.option.hypothesis_seed = OFFSET + (LEVEL == "rest")  # what was quick has been tried
    # It logs whenever Python collects garbage, with tracebacks, and partly under no name of its own: when the process ends, to
    # a stream that pytest has closed; and while Python 3.11 parses a test's source, which fails then (python/cpython#106905).
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger().addFilter(lambda record: record.levelno >= logging.WARNING or "/py4j/" not in record.pathname)
    # A shell starts what runs in its background with SIGINT ignored, and that is inherited: what the tests start, and
    # interrupt, would not notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)


APART = {
    "test_airflow_page_browser",
    "test_airflow_page_fab",
    "test_airflow_page_hangs",
    "test_celery",
    "test_docker",
    "test_setup",
}


@pytest.hookimpl(optionalhook=True)  # xdist need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            """What one process runs: a file, or the system tests that share an Airflow, or those that do not."""
            path = nodeid.split("::")[0]
            if not path.startswith("tests/system/"):
                return path
            return "tests/system, apart" if Path(path).stem in APART else "tests/system"

    config.option.loadscopereorder = False  # in the order of testpaths
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = shared([item for item in items if is_wanted(item)])
    chosen = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = wanted
    for item in items:
        for mark in item.iter_markers("quick"):
            item.user_properties.append(("shows", mark.args[0]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In words what a quick run has shown, and what the full suite adds."""
    if LEVEL not in ("quick", "rest") or terminalreporter.config.option.collectonly:
        return
    line = terminalreporter.write_line
    options = (" --rest" if LEVEL == "rest" else "") + (f" --share {SHARE}" if SHARE > 1 else "")
    repeat = f"./run test{options} --offset {OFFSET}"
    line("")
    if LEVEL == "quick":
        shown: dict[str, str] = {}
        for outcome in ("passed", "skipped", "failed", "error"):  # the worst is said
            for report in terminalreporter.stats.get(outcome, []):
                shown |= {text: outcome for name, text in getattr(report, "user_properties", []) if name == "shows"}
        line("Beside the unit tests, on the real things:")
        for text, outcome in sorted(shown.items()):
            line(f"  {outcome:8} {text}")
        line("The full suite (./run test --full, an hour) adds: many more positions of the sweeps, kills at many more moments,")
        line("the other power cuts, all reads, writes and jobs of Spark, all operators, triggers and pages of Airflow.")
    line(f"Sweeps took every k-th position; the same ones again: {repeat}")


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
