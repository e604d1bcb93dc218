"""A disk that dies while its machine lives, and a crowd of processes that say what returned before it died.

The file system is real. It lies in a sparse file on a small tmpfs, the *pool*: `Disk.abort` makes it stop as if the disk was
gone, `Disk.snapshot` copies its blocks under it, and whoever fills the pool makes it a thin disk that cannot keep its word.
Needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qewqew_core import QewQewError

KINDS = ("ext4", "xfs")
PATIENCE = 120.0  # seconds after which something hangs
GOING_DOWN = 0x8004587D  # _IOR('X', 125, __u32), of ext4 and xfs
LOG_FLUSHED, NOTHING_FLUSHED = 1, 2  # whether the journal is written first

_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=1,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-K"],
}
_SIZE = {"ext4": 256 << 20, "xfs": 320 << 20}  # the least that mkfs.xfs makes is 300 MB
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}  # a snapshot has the name of what it was taken from


def wait(until: Callable[[], object], what: str) -> None:
    """Until this is so. Fails with ``what`` is not."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Disk:
    """A file system in ``home/image``, mounted at `root`."""

    def __init__(self, home: Path, kind: str) -> None:
        self.home, self.kind = home, kind
        self.image, self.root = home / "image", home / "root"
        self.root.mkdir(exist_ok=True)

    def make(self, *options: str) -> None:
        with self.image.open("wb") as image:
            image.truncate(_SIZE[self.kind])
        subprocess.run([*_MAKE[self.kind], *options, self.image], check=True, capture_output=True)

    def mount(self) -> None:
        subprocess.run(["mount", "-o", _OPTIONS[self.kind], self.image, self.root], check=True, capture_output=True, text=True)

    def unmount(self) -> None:
        def is_unmounted() -> bool:
            self.left = subprocess.run(["umount", self.root], capture_output=True, text=True).stderr
            return not os.path.ismount(self.root)

        wait(is_unmounted, "somebody has files of the disk open")

    def remount(self) -> None:
        self.unmount()
        self.mount()

    def write_back(self, luck: random.Random) -> None:
        """What the kernel may do at any time: some of the files, in some order, are on the disk now."""
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        for path in luck.sample(files, luck.randrange(len(files) + 1)):
            self.write_back_file(path)

    def write_back_all(self) -> None:
        subprocess.run(["sync", "-f", self.root], check=True)

    def write_back_file(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it meanwhile
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def abort(self, flag: int) -> None:
        """From now on every call fails, and what was not written by now is gone."""
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOING_DOWN, struct.pack("I", flag))
        finally:
            os.close(fd)

    def snapshot(self, home: Path) -> Disk:
        """The blocks as they are at one moment. Who works on the disk should be stopped: nothing may be written meanwhile."""
        copy = Disk(home, self.kind)

        def is_copied() -> bool:
            before = self._written()
            subprocess.run(["cp", "--sparse=always", self.image, copy.image], check=True)
            return before == self._written()

        wait(is_copied, "the disk is written to all the time")
        return copy

    def _written(self) -> tuple[list[str], list[str]]:
        """Counters of the device, by which a write is noticed."""
        device = os.stat(self.root).st_dev
        of = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        flying = (of / "inflight").read_text().split()
        wait(lambda: (of / "inflight").read_text().split() == ["0", "0"], f"{flying} requests do not end")
        return (of / "stat").read_text().split()[4:7], flying

    @property
    def pool_file(self) -> Path:
        """What others have in the pool."""
        return self.home / "others"

    def fill_pool(self, leave: int = 0) -> None:
        """Others write to the same pool: the disk has no blocks for what is new to it, whatever the file system says."""
        room = os.statvfs(self.home)
        with self.pool_file.open("wb") as others:
            os.posix_fallocate(others.fileno(), 0, room.f_bavail * room.f_frsize - leave)

    def empty_pool(self) -> None:
        self.pool_file.unlink(missing_ok=True)


@contextlib.contextmanager
def pool(tmp_path: Path, kind: str, size: str = "400m") -> Iterator[Path]:
    """A tmpfs for images, in which nothing is left mounted at the end."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and a loop device, to mount a file system that can die")
    if kind in KINDS and not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"needs mkfs.{kind} (Debian: {'e2fsprogs' if kind == 'ext4' else 'xfsprogs'})")
    home = tmp_path / "pool"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", home], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let a tmpfs be mounted: {mounted.stderr.strip()}")
    try:
        yield home
    finally:
        inside = [
            line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1].startswith(f"{home}/")
        ]
        for mount in reversed(inside):  # which a failed test has left
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        subprocess.run(["umount", "-l", home], check=True, capture_output=True)


@contextlib.contextmanager
def disk(tmp_path: Path, kind: str, *options: str, size: str = "400m") -> Iterator[Disk]:
    """A mounted disk. It is empty."""
    with pool(tmp_path, kind, size) as home:
        one = Disk(home, kind)
        one.make(*options)
        try:
            one.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not let {kind} be mounted: {error.stderr.strip()}")
        yield one


# Who works on it


class Say:
    """What a process says of its work, line by line, to a place that does not die."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, *words: object) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(words).encode() + b"\n")


@dataclass
class Said:
    """What a crowd has said by a moment."""

    tried: dict[str, list[str]] = field(default_factory=dict)  # by key: what was to be put
    put: set[str] = field(default_factory=set)  # keys whose commit returned
    trying: set[str] = field(default_factory=set)  # batches, or messages, of which somebody began to say that they are done
    done: set[str] = field(default_factory=set)  # for which that returned
    errors: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        return {record for records in self.tried.values() for record in records}

    @property
    def acknowledged(self) -> set[str]:
        return {record for key in self.put for record in self.tried[key]}


Work = Callable[[Say, random.Random, str], None]


class Crowd:
    """Processes that work until something fails. Each says what it does and what returned."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home, self._seed, self._started = home, seed, 0
        self._running: set[int] = set()
        self._home.mkdir()
        self.say = Say(home / "0")  # for the test itself

    def start(self, *works: Work) -> None:
        for work in works:
            self._started += 1
            name = f"{self._started}"
            child = os.fork()
            if child:
                self._running.add(child)
                continue
            say = Say(self._home / name)
            try:
                work(say, random.Random(f"{self._seed}.{name}"), name)
            except QewQewError as error:
                say("error", f"{type(error).__name__}: {error}")
            except BaseException:
                say("error", f"unnamed: {traceback.format_exc()}")
            finally:
                os._exit(0)

    def signal(self, number: int) -> None:
        for child in self._running:
            os.kill(child, number)

    def stop(self) -> None:
        """All stand still, wherever they are, but no longer within a call of the kernel."""
        self.signal(signal.SIGSTOP)
        states = [Path(f"/proc/{child}/stat") for child in self._running]
        wait(lambda: all(state.read_text().rpartition(")")[2].split()[0] in "TZ" for state in states), "they do not stop")

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def ended(self) -> None:
        """Wait until the last one has given up."""

        def nobody_runs() -> bool:
            for child in list(self._running):
                if os.waitpid(child, os.WNOHANG)[0]:
                    self._running.discard(child)
            return not self._running

        wait(nobody_runs, f"{len(self._running)} go on, or wait for ever")

    def kill(self) -> None:
        while self._running:
            child = self._running.pop()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def finished(self, said: Said) -> None:
        """The test has put what was tried, and has read all of it."""
        for key in said.tried.keys() - said.put:
            self.say("put", key)
        self.say("trying", sorted(said.all))
        self.say("done", sorted(said.all))

    def said(self) -> Said:
        """By now. What was begun later than what another has read is not in it."""
        said = Said()
        for file in self._home.iterdir():
            for line in file.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    continue  # it was killed, or stopped, while it spoke
                what, *words = json.loads(line)
                match what:
                    case "try":
                        said.tried[words[0]] = words[1]
                    case "put":
                        said.put.add(words[0])
                    case "trying":
                        said.trying.update(words[0])
                    case "done":
                        said.done.update(words[0])
                    case "error":
                        said.errors.add(words[0])
        return said


@contextlib.contextmanager
def crowd(home: Path, seed: int) -> Iterator[Crowd]:
    """A crowd that does not outlive the test. Its seed is printed if the test fails."""
    print(f"seed {seed}", file=sys.stderr)
    one = Crowd(home, seed)
    try:
        yield one
    finally:
        one.kill()


def same(found: Counter[str], said: Said, before: Said) -> None:
    """``found`` is what returned ``before`` the disk died, all of it, each once, and nothing that nobody tried."""
    lost = before.acknowledged - found.keys()
    twice = [record for record, count in found.items() if count > 1]
    invented = found.keys() - said.all
    assert not lost, f"{len(lost):,} of {len(before.acknowledged):,} records are lost whose commit returned: {sorted(lost)[:5]}"
    assert not twice, f"{len(twice):,} records are there twice: {sorted(twice)[:5]}"
    assert not invented, f"{len(invented):,} records that nobody has put: {sorted(invented)[:5]}"
    halves = [key for key, records in said.tried.items() if 0 < len(found.keys() & set(records)) < len(records)]
    assert not halves, f"commits of which only a part is there: {halves[:5]}"
