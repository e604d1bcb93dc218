"""A bell wakes the process that waits at it, rings for nobody else, and leaves nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from qewqew_core import DiskFull, Queue, Stage
from qewqew_core.disk import lock
from qewqew_core.disk.bell import Bell, ring
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.queue import group_commit


def waited(bell: Bell, seconds: float) -> float:
    began = time.monotonic()
    bell.wait(seconds)
    return time.monotonic() - began


def test_it_wakes_the_one_that_waits_and_a_ring_before_that_is_kept() -> None:
    mine = f"{os.getpid()} of test_bell"  # such names are the whole machine's, and at most 107 bytes
    with Bell(f"{mine}/one") as one, Bell(f"{mine}/two") as two:
        waiting = threading.Thread(target=one.wait, args=(600,))
        waiting.start()
        ring([f"{mine}/nobody", f"{mine}/one"])
        waiting.join(60)
        assert not waiting.is_alive()
        assert waited(two, 0.05) >= 0.05
        ring([f"{mine}/two"] * 1_000)  # never waits for the one that hears it
        assert waited(two, 600) < 60


def test_it_is_no_file_and_a_forked_child_may_close_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Bell("bell") as bell:
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match="in use"):
            Bell("bell")
        if not (child := os.fork()):
            bell.close()
            os._exit(0)
        os.waitpid(child, 0)
        ring(["bell"])
        assert waited(bell, 600) < 60
    ring(["bell"])


def committing(path: Path, records: list[bytes]) -> threading.Thread:
    def commit() -> None:
        with Stage(path) as stage:
            stage.put_many(records)

    thread = threading.Thread(target=commit)
    thread.start()
    return thread


def test_those_that_a_leader_has_served_and_the_next_leader_are_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself here: without a bell this would hang."""
    monkeypatch.setattr(LIMITS, "look_at_leader", 10_000)
    monkeypatch.setattr(lock, "PATIENCE", 10_000)
    monkeypatch.setattr(LIMITS, "group_bytes", 4_000)
    monkeypatch.setattr(LIMITS, "group_rounds", 1)
    records = [bytes(100)] * 10
    with Queue(tmp_path / "q"):
        waiting = [committing(tmp_path / "q", records) for _ in range(12)]
        while len([*tmp_path.glob("q.staged/*.put")]) < 11:
            time.sleep(0.01)
    for thread in waiting:
        thread.join(60)
        assert not thread.is_alive()
    with Queue(tmp_path / "q") as q:
        assert [*q] == records * 12
    assert not (tmp_path / "q.staged").exists()


def test_a_leader_that_fails_wakes_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself here, either."""
    monkeypatch.setattr(LIMITS, "look_at_leader", 10_000)
    monkeypatch.setattr(lock, "PATIENCE", 10_000)
    failed = list[DiskFull]()

    def fail() -> None:
        with Stage(tmp_path / "q", min_free_bytes=1 << 60) as stage:
            stage.put(b"never stored")
            try:
                stage.commit()
            except DiskFull as error:
                failed.append(error)
                stage.rollback()

    with Queue(tmp_path / "q") as q:
        q.put(b"first")
        leader = threading.Thread(target=fail)
        leader.start()
        with open(tmp_path / "q", "rb") as header:
            while not lock.is_awaited(header.fileno()):
                time.sleep(0.01)
        waiting = [committing(tmp_path / "q", [b"second"]) for _ in range(3)]
        while len([*tmp_path.glob("q.staged/*.put")]) < 3:
            time.sleep(0.01)
    for thread in (leader, *waiting):
        thread.join(60)
        assert not thread.is_alive()
    assert len(failed) == 1
    with Queue(tmp_path / "q") as q:
        assert [*q] == [b"first", *[b"second"] * 3]


def test_where_there_can_be_no_bell_a_stage_waits_for_the_queue_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bell(path: str) -> Bell:
        raise OSError(95, "Operation not supported", path)

    monkeypatch.setattr(group_commit, "Bell", no_bell)
    with Queue(tmp_path / "q") as q, lock.Lead(Files(), q.path) as lead:
        assert lead.take()
        waiting = committing(tmp_path / "q", [b"second"])
        with open(tmp_path / "q", "rb") as header:
            while not lock.is_awaited(header.fileno()):
                time.sleep(0.01)
        q.put(b"first")
    waiting.join(60)
    assert not waiting.is_alive()
    with Queue(tmp_path / "q") as q:
        assert [*q] == [b"first", b"second"]
