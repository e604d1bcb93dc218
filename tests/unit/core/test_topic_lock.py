"""Who shares a reader with a process that was stopped in the middle of a call is not stopped with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from qewqew_core import Locked, Topic


def test_a_reader_gives_up_after_lock_timeout_if_another_process_is_stuck_in_a_call(tmp_path: Path) -> None:
    with Topic(tmp_path / "events", lock_timeout=0.1) as topic:
        topic.append(b"one")
        told, tell = os.pipe()
        if (pid := os.fork()) == 0:
            stuck = Topic(tmp_path / "events").reader("r")
            with stuck._engine.exclusive():
                os.write(tell, b"x")
                signal.pause()
        try:
            assert os.read(told, 1) == b"x"
            with pytest.raises(Locked, match="another process is using the reader"):
                topic.reader("r")
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(told)
            os.close(tell)
        with topic.reader("r") as reader:
            assert reader.read().body == b"one"
