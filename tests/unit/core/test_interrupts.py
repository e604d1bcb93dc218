"""Ctrl-C at any line: what had returned is there, what was interrupted has happened or not, and nothing is damaged.

KeyboardInterrupt may be raised between any two steps of a call. Before the commit nothing has changed; after it the
queue object refuses to go on, because what follows the commit may be missing.
"""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import qewqew_core.queue
from qewqew_core import Queue, QueueBroken

WATCHED = {
    str(Path(qewqew_core.queue.__file__).with_name(f"{name}.py"))
    for name in ("queue", "leasing", "state", "log", "journal", "session", "batch")
}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the queue's code runs."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in WATCHED or frame.f_code.co_name in ("_break", "__init__", "__del__"):
            return None
        # No signal is handled at these lines, and the lock that a `with` has taken would not be released.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            ("with ", "try:")
        ):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)


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
def test_a_call_that_was_interrupted_anywhere_has_happened_or_not(tmp_path, monkeypatch, operation):
    monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", 50)
    monkeypatch.setattr("qewqew_core.queue.PENDING_BYTES", 10)
    before, after = run(tmp_path / "whole", operation)[1:3]
    refused = 0
    for line in range(1, 5000, 2):
        left, _, _, later = run(tmp_path / str(line), operation, line)
        with Queue(tmp_path / str(line) / "q") as q:
            assert q.verify().problems == []
            assert view(q) in [(before[0] + later, before[1]), (after[0] + later, after[1])]
        if left > 0:
            break
        refused += not later
    assert left > 0, "it was interrupted each time"
    assert refused > 0, "the commit was never interrupted"


def run(folder: Path, operation: Callable[[Queue], None], line: int = 1 << 30) -> tuple[int, View, View, list[bytes]]:
    """The lines that were left, the queue before and after, and what could be put after the interruption."""
    folder.mkdir()
    with Queue(folder / "q", chunk_size=64, sync="never") as q:
        q.put_many([b"old %d" % number for number in range(20)])
        if operation in (nack, put_back):
            q.lease("key", max_records=5)
    with Queue(folder / "q", chunk_size=64, sync="never") as q:
        before, after, interrupt = view(q), ([], []), Interrupt(line)
        try:
            with interrupt:
                operation(q)
            after = view(q)
        except (KeyboardInterrupt, QueueBroken):  # QueueBroken: a commit was interrupted, and a second call refused
            pass
        later = []
        with contextlib.suppress(QueueBroken):
            q.put(b"later")
            later.append(b"later")
        return interrupt.left, before, after, later


def test_a_wait_that_is_interrupted_leaves_the_queue_open_to_others(tmp_path):
    """Even if other threads have committed meanwhile: those commits are whole."""

    def interrupt(q: Queue, waiting: int) -> None:
        end = time.monotonic() + 30
        while not q._waiting and time.monotonic() < end:
            time.sleep(0.001)
        with q._lock:  # so that it wakes up when all that has happened
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
