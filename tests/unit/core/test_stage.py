"""`Stage`: records that are written while others use the queue, and put into it by one short commit."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from functools import partial
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from plain import crashed, is_plain, numbers
from stride import Every
from test_failing_calls import NEVER, FailingDisk

from qewqew_core import BadArgument, Broken, Closed, DiskFull, Full, Locked, Queue, RecordTooLarge, Stage
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS

KILLED = """
import os, signal, sys
from qewqew_core import Stage
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
LIMITS.spill_bytes = 50
stage = Stage(sys.argv[1], chunk_size=64)
stage.put_many([b"never committed %d" % number for number in range(20)])
print(flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def small_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 500)


def staged(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("q.staged/*"))


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("chunk_size", [40, 100, 4096])
def test_what_is_staged_is_in_the_queue_after_the_commit_and_not_before(tmp_path: Path, chunk_size: int, sync: str) -> None:
    path = tmp_path / "q"
    with Queue(path, chunk_size=chunk_size, sync=sync) as q:
        q.put_many(numbers(0, 5))
        with Stage(path, chunk_size=chunk_size, sync=sync, lock_timeout=0) as stage:
            for number in range(100, 400):
                stage.put(b"%d" % number)
            assert stage.records == 300
            inodes = {file.stat().st_ino for file in tmp_path.glob("q.staged/*.*")}
            assert inodes
            assert list(q) == numbers(0, 5)
            with pytest.raises(Locked):
                stage.commit()
            q.put(b"5")
            q.close()
            assert stage.commit() == stage.stored == 300
            assert stage.records == 0
    assert inodes <= {file.stat().st_ino for file in tmp_path.glob("q.*")}, "moved, not written again"
    assert not (tmp_path / "q.staged").exists()
    is_plain(path, [*numbers(0, 6), *numbers(100, 400)])


def test_a_stage_that_stays_small_makes_no_file_of_its_own(tmp_path: Path) -> None:
    with Stage(tmp_path / "q") as stage:
        stage.put_many([b"1", b"2"])
        stage.put(b"3")
        assert list(tmp_path.iterdir()) == []
    is_plain(tmp_path / "q", numbers(1, 4))


@pytest.mark.parametrize("size", [1, 200])
def test_under_one_key_records_are_stored_once(tmp_path: Path, size: int) -> None:
    with Stage(tmp_path / "q", chunk_size=100) as stage:
        for stored in (size, 0):
            stage.put_many(numbers(0, size))
            assert stage.commit("page 7") == size
            assert stage.stored == stored
        assert [name for name in staged(tmp_path) if "." in name] == []
    with Queue(tmp_path / "q") as q:
        assert list(q) == numbers(0, size)


def test_what_does_not_fit_stays_staged_until_it_does(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put_many(numbers(0, 50))
    with Stage(path, chunk_size=100, max_records=120) as stage:
        stage.put_many(numbers(100, 200))
        with pytest.raises(Full):
            stage.commit()
        with Queue(path) as q:
            assert q.get_many(40) == numbers(0, 40)
        stage.put(b"last")
        assert stage.commit() == 101
    is_plain(path, [*numbers(40, 50), *numbers(100, 200), b"last"])


@pytest.mark.parametrize("end", ["rollback", "close", "raise", "forget"])
def test_what_is_not_committed_leaves_nothing(tmp_path: Path, end: str) -> None:
    with Queue(tmp_path / "q") as q:
        q.put(b"first")
    before = sorted(tmp_path.rglob("*"))
    if end == "raise":
        with contextlib.suppress(ZeroDivisionError), Stage(tmp_path / "q", chunk_size=64) as stage:
            stage.put_many(numbers(0, 100))
            assert 1 / 0
    elif end == "forget":
        with pytest.warns(ResourceWarning, match="was not closed"):
            Stage(tmp_path / "q", chunk_size=64).put_many(numbers(0, 100))
    else:
        stage = Stage(tmp_path / "q", chunk_size=64)
        stage.put_many(numbers(0, 100))
        assert staged(tmp_path)
        getattr(stage, end)()
        assert [name for name in staged(tmp_path) if "." in name] == []
        if end == "rollback":
            assert stage.commit() == 0
        stage.close()
        with pytest.raises(Closed):
            stage.put(b"late")
    assert sorted(tmp_path.rglob("*")) == before
    is_plain(tmp_path / "q", [b"first"])


def test_of_a_process_that_was_killed_the_next_opening_removes_what_it_has_staged_and_of_one_that_lives_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q"
    process = subprocess.Popen([sys.executable, "-c", KILLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    files = staged(tmp_path)
    assert len(files) > 2
    with Queue(path) as q:
        q.put(b"first")
    assert staged(tmp_path) == files
    process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    (tmp_path / "q.staged" / "0123456789abcdef.1").write_bytes(b"of one that died while it removed them")
    with Queue(path) as q:
        assert not (tmp_path / "q.staged").exists()
        assert list(q) == [b"first"]


@pytest.mark.parametrize("records", [1, 200_000], ids=["in memory", "spilled"])
@pytest.mark.parametrize("others", [True, False], ids=["another queue is there", "nothing is there"])
def test_a_stage_commits_where_it_was_opened_or_not_at_all(tmp_path: Path, records: int, others: bool) -> None:
    """As on a mount point that is empty since somebody has unmounted the disk."""
    place, moved = tmp_path / "place", tmp_path / "moved"
    place.mkdir()
    with Queue(place / "q") as queue:
        queue.put(b"first")
    with Stage(place / "q") as unhurt:
        unhurt.put(b"second")
    with contextlib.closing(Stage(place / "q")) as stage:
        stage.put_many([b"x" * 200] * records)
        place.rename(moved)
        place.mkdir()
        if others:
            with Queue(place / "q") as queue:
                queue.put(b"of others")
        for _ in range(2):
            with pytest.raises(Broken, match=r"moved, removed or unmounted\. Nothing was stored"):
                stage.commit(key="k")
    with Queue(place / "q") as here, Queue(moved / "q") as there:
        assert ([*here], [*there]) == ([b"of others"] * others, [b"first", b"second"])


@pytest.mark.parametrize("removed", ["the directory", "a file"])
def test_what_somebody_else_has_removed_is_told_and_never_half_stored(tmp_path: Path, removed: str) -> None:
    path, home = tmp_path / "q", tmp_path / "q.staged"
    with contextlib.closing(Stage(path, chunk_size=200)) as stage:
        stage.put_many(numbers(0, 100))
        if removed == "the directory":
            shutil.rmtree(home)
        else:
            max(home.iterdir()).unlink()
        for call in (stage.commit, stage.commit, stage.rollback, partial(stage.put, b"more")):
            with pytest.raises(Broken, match=r"q\.staged/.*somebody else removed them\. Nothing was stored; stage them again"):
                call()
    with Stage(path, chunk_size=200) as again, Queue(path) as queue:
        assert len(queue) == 0
        queue.close()
        again.put_many(numbers(0, 100))
        assert again.commit() == 100


def test_a_forked_child_leaves_its_parents_stage_alone(tmp_path: Path) -> None:
    with Stage(tmp_path / "q", chunk_size=64) as stage:
        stage.put_many(numbers(0, 100))
        if not (child := os.fork()):
            try:
                stage.put(b"of the child")
            except Closed:
                stage.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        with Queue(tmp_path / "q") as q:
            q.put(b"first")
    is_plain(tmp_path / "q", [b"first", *numbers(0, 100)])


def test_eight_stages_at_once_each_find_their_records_together_and_in_order(tmp_path: Path) -> None:
    program = """
import sys
from qewqew_core import Stage
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
LIMITS.spill_bytes = 500
for turn in range(5):
    with Stage(sys.argv[1], chunk_size=400) as stage:
        stage.put_many([f"{sys.argv[2]} {turn} {number}".encode() for number in range(100)])
"""
    path = tmp_path / "q"
    running = [subprocess.Popen([sys.executable, "-c", program, path, str(number)]) for number in range(8)]
    assert [process.wait(300) for process in running] == [0] * 8
    with Queue(path) as q:
        found = [record.decode().split() for record in q]
        assert q.verify().problems == q.verify().orphans == []
    groups = [found[at : at + 100] for at in range(0, len(found), 100)]
    assert all(group == [[*group[0][:2], str(number)] for number in range(100)] for group in groups)
    assert sorted((who, turn) for ((who, turn, _), *_) in groups) == [
        (str(who), str(turn)) for who in range(8) for turn in range(5)
    ]


class Held(Files):
    """Counts the calls that are made while somebody has the queue, and the bytes that are written then."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def counts(self, name: str, arguments: tuple[object, ...]) -> None:
        if lock.holder(self.path) is not None:
            self.calls[name] += 1
            self.bytes += len(arguments[1]) if name == "write" else 0  # type: ignore[arg-type]


def _counting(name: str) -> Callable[..., object]:
    def call(self: Held, *arguments: object, **named: object) -> object:
        self.counts(name, arguments)
        return getattr(super(Held, self), name)(*arguments, **named)

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Held, _name, _counting(_name))


def held(path: Path, records: int, chunk_size: int) -> Held:
    """What a commit of so many records of ten bytes does with the lock."""
    path.parent.mkdir()
    with Queue(path) as queue:
        queue.put(b"first")
    files = Held(path)
    with Stage(path, chunk_size=chunk_size, _files=files) as stage:
        for start in range(0, records, 10_000):
            stage.put_many([b"%010d" % number for number in range(start, start + 10_000)])
        assert not files.calls, "nobody has it yet"
    with Queue(path) as queue:
        assert len(queue) == 1 + records
    return files


def test_the_queue_is_locked_for_as_many_calls_whatever_the_number_of_records(tmp_path: Path) -> None:
    few = held(tmp_path / "few" / "q", 10_000, 16 << 20)
    many = held(tmp_path / "many" / "q", 1_000_000, 16 << 20)  # in one chunk, too
    assert few.calls["rename"] == 1
    assert many.calls == few.calls
    assert many.bytes - few.bytes < 12_000_000 / 1_000, "the log has the checksums, and no record"
    chunks = held(tmp_path / "chunks" / "q", 1_000_000, 1 << 20)
    more = chunks.calls - few.calls
    assert not few.calls - chunks.calls
    assert chunks.calls["rename"] == 12
    assert max(more.values()) <= 11, "each chunk is renamed once, and its pointers are stored once"


def test_wrong_settings_and_records_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="chunksize"):
        Stage(tmp_path / "q", chunksize=100)
    with pytest.raises(BadArgument, match="sync"):
        Stage(tmp_path / "q", sync="always")
    stage = Stage(tmp_path / "q", chunk_size=100)
    with pytest.raises(RecordTooLarge):
        stage.put_many([b"1", b"x" * 100])
    with pytest.raises(BadArgument):
        stage.commit(key="")
    assert stage.records == 0
    stage.close()
    assert list(tmp_path.iterdir()) == []


# Crashes


@pytest.fixture(params=["commit", "never"])
def done(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[JournalDisk, int]]:
    """A commit of a stage, call by call, and where it had returned."""
    root = tmp_path / "0"
    root.mkdir()
    with Queue(root / "q", chunk_size=64, _files=NoSync()) as q:
        q.put_many(numbers(0, 9))
    disk = JournalDisk(str(root))
    stage = Stage(root / "q", chunk_size=64, sync=request.param, _files=disk)
    stage.put_many(numbers(100, 150))
    stage.put_many(numbers(150, 200))
    assert stage.commit() == 100
    returned = len(disk.calls)
    stage.close()
    yield disk, returned
    shutil.rmtree(root)


def opened(folder: Path) -> list[bytes]:
    with Queue(folder / "q", _files=NoSync()) as q:
        assert q.verify().problems == []
        assert q.verify().orphans == []
        return list(q)


OLD, NEW = numbers(0, 9), [*numbers(0, 9), *numbers(100, 200)]


def test_killed_after_any_call_all_of_it_is_there_or_nothing(tmp_path: Path, done: tuple[JournalDisk, int]) -> None:
    disk, returned = done
    seen = []
    for stop in range(disk.begin, len(disk.calls) + 1):
        image(disk.calls[:stop], disk.root, tmp_path / "image", None)
        found = opened(tmp_path / "image")
        assert found == NEW if stop >= returned else found in (OLD, NEW), stop
        seen.append(found)
        shutil.rmtree(tmp_path / "image")
    assert seen == sorted(seen, key=len)
    assert OLD in seen


def test_a_power_cut_after_any_call_loses_and_tears_nothing(tmp_path: Path, done: tuple[JournalDisk, int]) -> None:
    disk, returned = done
    for stop in range(disk.begin, len(disk.calls) + 1):
        for chance in range(3):
            image(disk.calls[:stop], disk.root, tmp_path / "image", random.Random(f"{stop}.{chance}"))
            found = opened(tmp_path / "image")
            assert not list((tmp_path / "image").glob("q.staged/*.*"))
            assert found == NEW if stop >= returned else found in (OLD, NEW), (stop, chance)
            shutil.rmtree(tmp_path / "image")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_any_call_may_fail_and_all_of_it_is_there_or_nothing(tmp_path: Path, every: Every, error: int) -> None:
    root = tmp_path / "0"
    root.mkdir()
    with Queue(root / "q", chunk_size=64) as q:
        q.put_many(OLD)
    disk = FailingDisk(str(root), NEVER, error, False, False)
    with Stage(root / "q", chunk_size=64, _files=disk) as stage:
        stage.put_many(numbers(100, 200))
    for number in every(range(1, NEVER - disk.left + 1), quick=3):
        shutil.rmtree(root)
        root.mkdir()
        with Queue(root / "q", chunk_size=64) as q:
            q.put_many(OLD)
        failing = FailingDisk(str(root), number, error, False, False)
        stage = Stage(root / "q", chunk_size=64, _files=failing)
        raised: OSError | None = None
        try:
            stage.put_many(numbers(100, 200))
            stage.commit()
        except OSError as found:
            raised = found
        assert raised is None or error == errno.EIO or isinstance(raised, (DiskFull, Broken)), number
        with Queue(crashed(root), _files=NoSync()) as q:
            assert list(q) == NEW if raised is None else list(q) in (OLD, NEW), number
        if isinstance(raised, DiskFull):  # there is room again
            if not stage.records:
                stage.put_many(numbers(100, 200))
            assert stage.commit() == 100, number
            assert opened(crashed(root).parent) == NEW, number
        stage.close()
        assert opened(root) in (OLD, NEW), number


@pytest.mark.parametrize("vanishes", ["home", "claim"])
def test_a_stage_begins_again_where_what_it_makes_is_removed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vanishes: str
) -> None:
    """An owner that opens the queue removes an empty directory, and a claim that nobody has locked."""
    monkeypatch.setattr(LIMITS, "spill_bytes", 10)

    class Removing(Files):
        removed = 0

        def open_into(self, descriptors: MutableSequence[int], path: str, **how: bool) -> None:
            is_claim = how.get("new") and "." not in os.path.basename(path) and "staged" in path
            if is_claim and not self.removed and vanishes == "home":
                self.removed += 1
                os.rmdir(os.path.dirname(path))
            super().open_into(descriptors, path, **how)
            if is_claim and not self.removed:
                self.removed += 1
                os.unlink(path)

    files = Removing()
    with Stage(tmp_path / "q", _files=files) as stage:
        stage.put(b"more than ten bytes")
    assert files.removed == 1
    with Queue(tmp_path / "q") as queue:
        assert queue.get_many(10) == [b"more than ten bytes"]
    assert not (tmp_path / "q.staged").exists()


@pytest.mark.parametrize("question", [1, 2, 3])
def test_another_stage_makes_the_directory_at_the_same_moment(tmp_path: Path, question: int) -> None:
    """Just before this one asks for the ``question``-th time what is there, or before it makes the directory."""

    class Racing(Files):
        questions = 0

        def race(self, path: str) -> None:
            if path.endswith(".staged"):
                self.questions += 1
                if self.questions == question:
                    os.mkdir(path)

        def exists(self, path: str) -> bool:
            self.race(path)
            return super().exists(path)

        def is_directory(self, path: str) -> bool:
            if self.questions:
                self.race(path)
            there = super().is_directory(path)
            if not self.questions:
                self.race(path)
            return there

        def make_directory(self, path: str) -> None:
            self.race(path)
            super().make_directory(path)

    with Stage(tmp_path / "q", chunk_size=64, _files=Racing()) as stage:
        stage.put_many(numbers(0, 50))
    with Queue(tmp_path / "q") as queue:
        assert queue.get_many(99) == numbers(0, 50)


def test_a_stage_that_ends_removes_the_directory_while_another_process_closes_the_queue(tmp_path: Path) -> None:
    class Removing(Files):
        removed = 0

        def sync_directory(self, path: str) -> None:
            if path.endswith(".staged"):
                self.removed += 1
                os.rmdir(path)
            super().sync_directory(path)

    files = Removing()
    queue = Queue(tmp_path / "q", sync="never", _files=files)
    queue.put(b"x")
    (tmp_path / "q.staged").mkdir()
    queue.close()
    assert files.removed == 1
    with Queue(tmp_path / "q") as queue:
        assert queue.get_many(10) == [b"x"]


def test_a_commit_whose_closing_fails_has_happened_and_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Queue) -> None:
        closed(self)
        raise OSError(errno.EIO, "the disk failed")

    closed = Queue.close
    stage = Stage(tmp_path / "q")
    stage.put(b"once")
    with monkeypatch.context() as patched:
        patched.setattr(Queue, "close", failing)
        with pytest.raises(OSError, match="the disk failed"):
            stage.commit()
    assert stage.commit() == 0
    stage.close()
    with Queue(tmp_path / "q") as queue:
        assert queue.get_many(10) == [b"once"]


def test_an_error_of_the_disk_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 60)  # a record takes 48 beside its bytes

    class Failing(Files):
        fails = True

        def write(self, fd: int, data: bytes, offset: int) -> None:
            if self.fails:
                raise OSError(errno.EIO, "the disk failed")
            super().write(fd, data, offset)

    files = Failing()
    with Stage(tmp_path / "q", _files=files) as stage:
        stage.put(b"first")
        with pytest.raises(OSError, match="the disk failed"):
            stage.put(b"more than ten bytes")
        assert stage.records == 1
        files.fails = False
    with Queue(tmp_path / "q") as queue:
        assert queue.get_many(10) == [b"first"]


def test_a_claim_that_an_interrupt_left_unlocked_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next opening would take it for that of a dead stage."""
    whole, path = lock.whole, tmp_path / "q"

    def interrupted(fd: int) -> bool:
        monkeypatch.setattr(lock, "whole", whole)
        raise KeyboardInterrupt

    with Stage(path, chunk_size=64) as stage:
        monkeypatch.setattr(lock, "whole", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.put_many(numbers(0, 100))
        stage.rollback()
        stage.put_many(numbers(0, 100))
        with Queue(path) as q:
            q.put(b"first")
        assert stage.commit() == 100
    is_plain(path, [b"first", *numbers(0, 100)])
