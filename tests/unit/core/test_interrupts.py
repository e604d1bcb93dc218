"""Ctrl-C at any moment: what had returned is there, what was interrupted has happened or not, and nothing is damaged.

KeyboardInterrupt may be raised between any two steps of a call. Before the commit nothing has changed; after it the
queue object refuses to go on, because what follows the commit may be missing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupting import Interrupt, interrupts
from stride import LEVEL

from qewqew_core import Broken, Queue
from qewqew_core.limits import LIMITS

# A `__del__` that meets an object which an interrupt has left half made.
pytestmark = pytest.mark.filterwarnings(r"error:[\s\S]*AttributeError:pytest.PytestUnraisableExceptionWarning")

MODULES = (
    "queue/queue",
    "disk/engine",
    "queue/chain",
    "queue/records",
    "queue/holds",
    "queue/queue_batches",
    "batch/leases",
    "queue/state",
    "queue/log",
    "disk/journal",
    "queue/session",
    "batch/batch",
)
PASSING = ("poison", "__init__")
WHOLE = Interrupt(1 << 30, MODULES, PASSING)


def put(q: Queue) -> None:
    q.put(b"new")


def put_many_over_chunks(q: Queue) -> None:
    q.put_many([b"%d" % number * 9 for number in range(9)])


def get(q: Queue) -> None:
    q.get()


def get_many(q: Queue) -> None:
    q.get_many(9)


def session(q: Queue) -> None:
    with q.session() as s:
        s.get()
        s.put(b"moved")
        s.put_many([b"spilled" * 3] * 4)


def lease(q: Queue) -> None:
    q.lease("key", max_records=7)


def nack(q: Queue) -> None:
    q.batches()[0].nack("reason")


def put_back(q: Queue) -> None:
    q.batches()[0].put_back()


View = tuple[list[bytes], list[tuple[str, list[bytes]]]]


def view(q: Queue) -> View:
    return list(q), [(one.state, list(one)) for one in q.batches()]


@pytest.mark.parametrize("operation", [put, put_many_over_chunks, get, get_many, session, lease, nack, put_back])
def test_a_call_that_was_interrupted_anywhere_has_happened_or_not(tmp_path, monkeypatch, every, operation):
    monkeypatch.setattr(LIMITS, "spill_bytes", 50)
    monkeypatch.setattr(LIMITS, "pending_bytes", 10)
    before, after, _ = run(tmp_path / "whole", operation, WHOLE)
    refused = 0
    for interrupt in interrupts(every, MODULES, quick=12, full=4, passing=PASSING):
        folder = tmp_path / str(interrupt.point)
        later = run(folder, operation, interrupt)[2]
        with Queue(folder / "q") as q:
            assert q.verify().problems == []
            assert view(q) in [(before[0] + later, before[1]), (after[0] + later, after[1])]
        refused += not later
    assert refused > 0 or LEVEL in ("quick", "rest"), "the commit was never interrupted"


def run(folder: Path, operation: Callable[[Queue], None], interrupt: Interrupt) -> tuple[View, View, list[bytes]]:
    """The queue before and after, and what could be put after the interruption."""
    folder.mkdir()
    with Queue(folder / "q", chunk_size=64, sync="never") as q:
        q.put_many([b"old %d" % number for number in range(20)])
        if operation in (nack, put_back):
            q.lease("key", max_records=5)
    with Queue(folder / "q", chunk_size=64, sync="never") as q:
        before, after = view(q), ([], [])
        try:
            with interrupt:
                operation(q)
            after = view(q)
        except (KeyboardInterrupt, Broken):  # Broken: a commit was interrupted, and a second call refused
            pass
        later = []
        with contextlib.suppress(Broken):
            q.put(b"later")
            later.append(b"later")
        return before, after, later


def test_a_wait_that_is_interrupted_leaves_the_queue_open_to_others(tmp_path):
    """Even if other threads have committed meanwhile: those commits are whole."""

    def interrupt(q: Queue, waiting: int) -> None:
        end = time.monotonic() + 30
        while not q._engine.waiting and time.monotonic() < end:
            time.sleep(0.001)
        with q._engine.lock:  # so that it wakes up when all that has happened
            q.put(b"new")
            q.get()
            signal.pthread_kill(waiting, signal.SIGINT)

    with Queue(tmp_path / "q", sync="never") as q:
        other = threading.Thread(target=interrupt, args=(q, threading.get_ident()))
        other.start()
        with pytest.raises(KeyboardInterrupt):
            q.get(timeout=None)
        other.join()
        q.put(b"later")
        assert q.get() == b"later"
