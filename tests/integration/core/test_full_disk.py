"""A full disk, really full: what was refused is not there, what was acknowledged is, and taking makes room."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qewqew_core import DiskFull, Queue


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system of 4 MiB")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let a tmpfs be mounted: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def fill(disk: Path) -> None:
    """What other programs leave of the disk: nothing."""
    with (disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(4096))


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("size", [100, 2_000, 60_000])
def test_nothing_acknowledged_is_lost_nothing_refused_delivered_and_the_queue_can_be_emptied(small_disk, sync, size):
    path = small_disk / "q"
    stored, refused = [], 0
    with Queue(path, chunk_size=1 << 18, sync=sync) as q:
        while refused < 20:
            record = b"%d " % (len(stored) + refused) + os.urandom(size)
            try:
                q.put(record)
                stored.append(record)
            except DiskFull:
                refused += 1
        fill(small_disk)
        with pytest.raises(DiskFull, match="Nothing was stored") as refusal:
            q.put_many([os.urandom(60_000)] * 10)
        assert refusal.value.path
        assert [q.get() for _ in range(5)] == stored[:5]
        with q.session() as s:
            s.put_many([os.urandom(60_000)] * 20)
            with pytest.raises(DiskFull):
                s.put(b"")  # what is there already must be spilled first
            with pytest.raises(DiskFull):
                s.commit()
            s.rollback()
            assert s.get_many(5) == stored[5:10]
        batch = q.lease("run", max_records=10)
        assert list(batch) == stored[10:20]
        batch.nack("no room to write its result")
        q.lease("next run").put_back()
        assert q.get_many(1 << 30) == stored[10:]
        q.put(b"there is room again")
    with Queue(path) as q:
        assert list(q) == [b"there is room again"]
        assert q.verify().ok


def test_an_error_of_the_disk_is_no_full_disk(tmp_path, monkeypatch):
    """Only what says that there is no room may be taken for it: after anything else the queue must refuse to go on."""
    from qewqew_core import Broken
    from qewqew_core.disk.files import Files

    class Failing(Files):
        def write(self, fd, data, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    q = Queue(tmp_path / "q")
    q._files.__class__ = Failing
    with pytest.raises(Broken, match="Input/output error"):
        q.put(b"x")
    with pytest.raises(Broken):
        q.put(b"y")
    q.close()
