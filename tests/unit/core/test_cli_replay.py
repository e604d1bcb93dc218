"""``qewqew replay``: records of acknowledged batches are put again, once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from commands import done, refused, run

from qewqew_core import Queue, inspect
from qewqew_core.disk import lock

RECORDS = [b"first", b"", b"\xff\x00", b"last"]


def content(path: Path) -> list[bytes]:
    with Queue(path) as q:
        return list(q)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "orders.qew"


@pytest.fixture
def acked(path):
    """The ids of batches "run 0" and "run 1", each of two records, acknowledged."""
    ids = []
    with Queue(path, retention=timedelta(days=1)) as q:
        q.put_many(RECORDS)
        for number in range(2):
            batch = q.lease(f"run {number}", max_records=2)
            batch.ack()
            ids.append(batch.id)
    return ids


def test_acknowledged_batches_are_listed(path, acked):
    found = json.loads(done("batches", path, "--acked", "--json"))
    assert [(one["id"], one["key"], one["state"]) for one in found] == [
        (acked[0], "run 0", "acked"),
        (acked[1], "run 1", "acked"),
    ]
    assert "no batch is leased or returned" in run("batches", path).stderr


def test_a_batch_is_put_again_at_the_end_by_its_key_or_its_id_and_once(path, acked):
    done("put", path, "new")
    assert done("replay", path, "run 1").decode() == f"{acked[1]}: 2 records put again\n"
    assert done("replay", path, acked[1]).decode() == f"{acked[1]}: nothing to do, 2 records put again before\n"
    assert content(path) == [b"new", *RECORDS[2:]]
    assert json.loads(done("replay", path, "run 1", acked[0], "run 0", "--json")) == [
        {"id": acked[1], "key": "run 1", "records": 2, "repeated": True},
        {"id": acked[0], "key": "run 0", "records": 2, "repeated": False},
    ]
    assert content(path) == [b"new", *RECORDS[2:], *RECORDS[:2]]
    done("replay", path, "run 1", "--name", "after the fix")
    assert content(path) == [b"new", *RECORDS[2:], *RECORDS[:2], *RECORDS[2:]]
    with Queue(path) as q:
        batch = q.lease("a new run", max_records=3)
        assert list(batch) == [b"new", *RECORDS[2:]]
        assert q.lease("run 1").state == "acked"


def test_a_batch_that_cannot_be_replayed_is_told_and_nothing_is_done(path, acked):
    done("put", path, "x")
    with Queue(path) as q:
        q.lease("run 2")
    refused(1, "replay", path, "run 0", "run 2", match="is leased, not acknowledged")
    refused(3, "replay", path, "run 0", "run 3", match="no batch has key or id 'run 3'")
    refused(3, "replay", path.parent / "no", "run 0", match="there is no queue here")
    refused(2, "replay", path, "run 0", "--name", "a/b", match="BadKey")
    assert inspect(path).records == 0
    with Queue(path, retention_bytes=0) as q:
        q.lease("run 2").ack()
    for key in ("run 0", acked[0]):
        refused(3, "replay", path, key, match="BatchExpired")
    assert inspect(path).records == 0


def test_a_damaged_batch_is_not_replayed(path, acked):
    (file,) = (one for one in Path(f"{path}.batches").glob(f"{acked[0]}/*") if one.name != "manifest.json")
    data = bytearray(file.read_bytes())
    data[12] ^= 1
    file.write_bytes(data)
    refused(5, "replay", path, "run 0", match="Corrupt")
    assert inspect(path).records == 0


def test_replay_keeps_what_was_acknowledged(path, acked):
    done("replay", path, "run 0")
    with Queue(path, retention=timedelta(days=1)) as q:
        assert [list(q.batch(one)) for one in acked] == [RECORDS[:2], RECORDS[2:]]


def test_a_replay_that_is_killed_has_happened_or_not_and_is_done_by_the_next(path):
    records = [b"%06d" % number for number in range(5_000)]
    with Queue(path, retention=timedelta(days=1)) as q:
        q.put_many(records)
        q.lease("run").ack()
    expected = 0
    for delay in (0.0, 0.1):  # since it has the queue
        arguments = ["replay", str(path), "run", "--name", f"killed after {delay}"]
        process = subprocess.Popen([sys.executable, "-m", "qewqew_core", *arguments], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while process.poll() is None and lock.holder(str(path)) != process.pid:
            assert time.monotonic() < end
        time.sleep(delay)
        process.kill()
        process.wait()
        assert inspect(path).records - expected in (0, len(records))
        expected += len(records)
        for _ in range(2):
            done(*arguments)
            assert inspect(path).records == expected
    with Queue(path) as q:
        assert q.verify().ok
        assert list(q) == records * 2
