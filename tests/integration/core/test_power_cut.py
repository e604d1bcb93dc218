"""The power is cut on a real file system, again and again: what was acknowledged is there.

The file system lies in a file and is told to stop as if the power had failed (FS_IOC_SHUTDOWN): what it had not
written by then is gone, and from then on every call fails. Needs root and a loop device.

Only what was acknowledged *before* the cut counts. A process that dies with the power cannot see an fsync return after
it; here it lives on, and ext4 lets such an fsync of preallocated space succeed although its data is gone (a bare loop of
pwrite and fdatasync shows the same).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qewqew_core import Queue

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NOT_EVEN_THE_JOURNAL = 2

WORK = """
import sys
from qewqew_core import Queue
path, cycle = sys.argv[1:]
done = lambda *what: print(*what, flush=True)
with Queue(path, chunk_size=1 << 15) as q:
    holding = q.session()
    for number in range(1_000_000):
        if number % 7 == 3:  # what a session holds comes back, and others commit behind it meanwhile
            holding.rollback()
            holding.get_many(30)
        if number % 7 == 5:  # take and put in one commit: each of them is there once, before and after
            with q.session() as s:
                s.put_many(s.get_many(150))
            done("moved", number)
        if number % 3 == 0:
            q.put(f"{cycle}.{number}.0 {'x' * 50}".encode())
            done("put", number, 1)
        elif number % 3 == 1:
            q.put_many([f"{cycle}.{number}.{index} {'y' * 50}".encode() for index in range(200)])
            done("put", number, 200)
        elif len(q) > 900:
            batch = q.lease(f"{cycle}.{number}", max_records=700, lease_timeout=60)
            done("lease", batch.id)
            batch.extend()
            if number % 4 == 1:
                batch.nack("again")
                done("nack", batch.id)
            else:
                batch.ack()
                done("ack", batch.id)
"""


@pytest.fixture(params=["ext4", "xfs"])
def mounted(request, tmp_path) -> Iterator[Path]:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and a loop device, to mount a file system whose power can be cut")
    if not shutil.which(f"mkfs.{request.param}"):
        pytest.skip(f"needs mkfs.{request.param} (Debian: {'e2fsprogs' if request.param == 'ext4' else 'xfsprogs'})")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["truncate", "-s", "512M", image], check=True)
    subprocess.run([f"mkfs.{request.param}", "-q", image], check=True)
    try:
        subprocess.run(["mount", "-o", "loop", image, mount], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine does not let {request.param} be mounted: {error.stderr.strip()}")
    try:
        yield mount
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", mount], check=True, capture_output=True)


def cut_power(mount: Path) -> None:
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NOT_EVEN_THE_JOURNAL))
    finally:
        os.close(fd)


def remount(mount: Path) -> None:
    subprocess.run(["umount", mount], check=True)
    subprocess.run(["mount", "-o", "loop", mount.with_name("image"), mount], check=True)


def run_cycles(mounted: Path, cycles: int) -> None:
    luck = random.Random(7)
    path = mounted / "q"
    acknowledged: set[str] = set()  # records whose put returned
    ended: dict[str, str] = {}  # record: the acknowledged batch it was in
    for cycle in range(cycles):
        work = subprocess.Popen([sys.executable, "-c", WORK, path, str(cycle)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        told = [work.stdout.readline() for _ in range(luck.randrange(1, 60))]
        time.sleep(luck.random() * 0.02)
        os.set_blocking(work.stdout.fileno(), False)
        told += (work.stdout.read() or b"").splitlines(keepends=True)
        cut_power(mounted)
        work.kill()
        work.wait()
        remount(mounted)
        acked = set()
        for line in told:
            if not line.endswith(b"\n"):
                break
            what, *rest = line.decode().split()
            if what == "put":
                acknowledged |= {f"{cycle}.{rest[0]}.{index}" for index in range(int(rest[1]))}
            elif what == "ack":
                acked.add(rest[0])
        with Queue(path, chunk_size=1 << 15) as q:
            report = q.verify()
            assert report.problems == []
            here = [record.split()[0].decode() for one in q.batches() for record in one]
            here += [record.split()[0].decode() for record in q]
            for batch in map(q.batch, {entry.name for entry in mounted.glob("q.batches/*")} - set(ended.values())):
                assert batch.state == "acked" or batch.id not in acked, "an acknowledgement is lost"
                for record in batch if batch.state == "acked" else ():
                    name = record.split()[0].decode()
                    assert name not in ended, "a record is in two acknowledged batches"
                    ended[name] = batch.id
        assert len(here) == len(set(here)), "a record is there twice"
        assert not set(here) & set(ended), "a record of an acknowledged batch came back"
        assert acknowledged <= set(here) | set(ended), f"cycle {cycle}: acknowledged records are lost"
    assert len(acknowledged) > 100 * cycles
    assert len(set(ended.values())) > cycles / 4


@pytest.mark.quick("the power of a real file system is cut: what was acknowledged is there")
def test_what_was_acknowledged_survives_power_cuts(mounted):
    run_cycles(mounted, 12)


@pytest.mark.soak
def test_what_was_acknowledged_survives_a_thousand_power_cuts(mounted):
    run_cycles(mounted, 1000)
