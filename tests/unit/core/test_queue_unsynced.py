"""A queue with ``sync="never"``, whose disk may lose what was not synced, and what was durable before, which it may not lose."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from stride import LEVEL, Every

from qewqew_core import Corrupt, Queue, inspect, repair
from qewqew_core.limits import LIMITS

DURABLE = [b"durable %d" % number for number in range(10)]
NEVER = [[b"never %d.%d" % (commit, number) for number in range(4)] for commit in range(6)]


def first(commits: int) -> list[bytes]:
    return [record for records in NEVER[:commits] for record in records]


@pytest.fixture(autouse=True)
def chunks_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "inline_bytes", {"commit": 1 << 20, "never": 0})


def killed(home: Path, chunk_size: int = 1 << 20) -> Path:
    """What a killed process with ``sync="never"`` leaves, of which the disk lacks the fourth commit."""
    with Queue(home / "q", chunk_size=chunk_size) as q:
        q.put_many(DURABLE)
    q = Queue(home / "q", sync="never", chunk_size=chunk_size)
    for commit, records in enumerate(NEVER):
        q.put_many(records, key=f"commit {commit}")
    shutil.copytree(home, left := home.with_name("left"))
    q.close()
    for path in left.glob("q.[0-9]*"):
        data = path.read_bytes()
        if (at := data.find(NEVER[3][0])) >= 0:
            path.write_bytes(data[:at] + bytes(len(NEVER[3][0])) + data[at + len(NEVER[3][0]) :])
    return left / "q"


@pytest.mark.parametrize("chunk_size", [1 << 20, 80])
@pytest.mark.parametrize("how", ["opened", "repaired"])
def test_a_commit_that_the_disk_has_lost_and_all_behind_it_have_not_happened(
    tmp_path: Path, how: str, chunk_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "made").mkdir()
    path = killed(tmp_path / "made", chunk_size)
    if how == "repaired":
        assert repair(path).damage == []
    with Queue(path, chunk_size=chunk_size) as q:
        assert ("did not reach the disk" in caplog.text) or how == "repaired"
        assert q.put_many(NEVER[3], key="commit 3") == len(NEVER[3]), "its key is free again"
        assert q.put_many([b"again"], key="commit 0") == len(NEVER[0])
        assert q.verify().ok
        assert q.get_many(100) == [*DURABLE, *first(4)]
    assert inspect(path).records == 0


def test_what_is_whole_stays(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    path = killed(tmp_path / "made")
    (chunk,) = path.parent.glob("q.[0-9]*")
    made = tmp_path / "made" / chunk.name
    chunk.write_bytes(made.read_bytes())
    with Queue(path) as q:
        assert list(q) == [*DURABLE, *first(6)]


@pytest.mark.parametrize("before", ["closed", "handed over"])
def test_nothing_of_the_log_behind_a_lost_commit_comes_back(tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit is as long as the lost one, and ends where those behind that began, whose records the log carries."""
    (home := tmp_path / "home").mkdir()
    with monkeypatch.context() as patch:
        if before == "handed over":
            patch.setattr(Queue, "_is_to_hand_over", lambda self: True)
        with Queue(home / "q") as q:
            q.put_many(DURABLE)
    q = Queue(home / "q", sync="never")
    q.put_many(NEVER[0])
    q._records.inline_bytes = 1 << 20
    q.put_many(NEVER[1])
    q.put_many(NEVER[2])
    shutil.copytree(home, lost := tmp_path / "lost")
    q.close()
    (path,) = lost.glob("q.[0-9]*")
    path.write_bytes(path.read_bytes().replace(NEVER[0][0], bytes(len(NEVER[0][0]))))
    q = Queue(lost / "q", sync="never")
    q.put_many(NEVER[5])
    shutil.copytree(lost, again := tmp_path / "again")
    q.close()
    with Queue(again / "q") as q:
        assert list(q) == [*DURABLE, *NEVER[5]]


def leased(q: Queue) -> None:
    batch = q.lease("key", max_records=18)
    assert batch is not None
    batch.ack()


def taken(q: Queue) -> None:
    q.get_many(18)


STEPS: dict[str, Callable[[Queue], object]] = {"leased": leased, "taken": taken, "cleared": Queue.clear}


@pytest.mark.parametrize("carried", ["chunks carry", "log carries"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(3))
def test_wherever_the_power_is_cut_what_was_durable_is_there(
    tmp_path: Path, step: str, seed: int, carried: str, every: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a step moves or removes are needed by no commit that the disk may lack. Where it lacks a whole file of records
    that the log carries, the queue is `Corrupt`, and repair keeps the rest.
    """
    if carried == "log carries":
        monkeypatch.setitem(LIMITS.inline_bytes, "never", 1 << 20)
    root, folder = tmp_path / "work", tmp_path / "image"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", chunk_size=100, _files=disk) as q:
        q.put_many(DURABLE)
    begin = len(disk.calls)
    with Queue(root / "q", chunk_size=100, sync="never", _files=disk) as q:
        for records in NEVER[:3]:
            q.put_many(records)
        put = len(disk.calls)
        STEPS[step](q)
        done = len(disk.calls)
        for records in NEVER[3:]:
            q.put_many(records)
    checked = opened = 0
    for stop in every(range(begin, len(disk.calls) + 1), quick=9, full=3):
        image(disk.calls[:stop], str(root), folder, random.Random(f"{seed}.{stop}"))
        what = f"cut after call {stop} of {len(disk.calls)}, of {begin}, {put}, {done}"
        path = folder / "q"
        with contextlib.suppress(Corrupt) if carried == "log carries" else contextlib.nullcontext():
            Queue(path, chunk_size=100, _files=NoSync()).close()
            opened += 1
        repair(path, _files=NoSync())
        with Queue(path, chunk_size=100, _files=NoSync()) as q:
            found = [record for batch in (*q.acknowledged(), *q.batches(), *q.dead()) for record in batch] + list(q)
        if stop <= put or step == "leased":
            assert found[: len(DURABLE)] == DURABLE, what
        assert sorted(found) == sorted({*found}), what
        assert {*found} <= {*DURABLE, *first(6)}, what
        checked += 1
        shutil.rmtree(folder)
    assert checked > 5
    assert opened > (0 if LEVEL == "quick" else 5)  # a thinned sweep may meet many that are `Corrupt`
