"""Stopping a process of a test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """Stop the process, and return when each of its threads is stopped: on a busy machine that is some time after the signal, and
    until then it may still get a lock that it waits for, and be stopped as its owner.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until, "it does not stop"
        time.sleep(0.01)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
