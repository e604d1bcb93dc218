"""Stages that wait for the queue at once share one commit: each is in the queue once, or has stored nothing and says so."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from plain import crashed, is_plain, numbers
from test_failing_calls import NEVER, FailingDisk

from qewqew_core import Broken, DiskFull, Locked, Queue, Stage
from qewqew_core.crc import crc32
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files
from qewqew_core.keys import key_hash
from qewqew_core.limits import LIMITS
from qewqew_core.queue import group_commit
from qewqew_core.queue import log as logs
from qewqew_core.queue.group_commit import Request, Terms

SIZE = 16 << 20


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def requests(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder / "q.staged") if name.endswith((".put", ".taken", ".done")))
    except FileNotFoundError:  # the last of them removes it, perhaps just now: pathlib's glob of Python 3.11 minds that
        return []


@contextlib.contextmanager
def led(path: Path) -> Iterator[None]:
    """Somebody else leads, so that every stage asks."""
    with lock.Lead(Files(), str(path)) as lead:
        assert lead.take()
        yield


class Waiting(threading.Thread):
    """A stage that commits while somebody else has the queue."""

    def __init__(self, path: Path, records: list[bytes], key: str | None = None, **settings: object) -> None:
        super().__init__()
        self.stage = Stage(path, **settings)
        self.stage.put_many(records)
        self.key, self.count, self.error = key, -1, None
        self.start()

    error: BaseException | None

    def run(self) -> None:
        try:
            self.count = self.stage.commit(self.key)
        except BaseException as error:
            self.error = error
        finally:
            self.stage.close()

    def done(self) -> tuple[int, int]:
        self.join(60)
        assert self.error is None
        return self.count, self.stage.stored


def commits(path: Path) -> int:
    """How many commits the log has."""
    data = path.with_name("q.wal").read_bytes()
    generation = journal.generation_of(data, logs.MAGIC, "")
    return sum(found.kind == logs.COMMIT for found in journal.frames(data, generation))


def by_stage(records: list[bytes]) -> list[list[bytes]]:
    """The records of each stage, which lie together."""
    groups: list[list[bytes]] = []
    for record in records:
        if not groups or groups[-1][0].split()[0] != record.split()[0]:
            groups.append([])
        groups[-1].append(record)
    return groups


@pytest.mark.parametrize(("chunk_size", "log_bytes"), [(SIZE, 4 << 20), (500, 4 << 20), (SIZE, 1)])
def test_all_that_wait_are_one_commit(tmp_path: Path, chunk_size: int, log_bytes: int) -> None:
    path, settings = tmp_path / "q", {"chunk_size": chunk_size, "log_bytes": log_bytes}
    mine = {who: [b"%d %d" % (who, number) for number in range(100)] for who in range(6)}
    with Queue(path, chunk_size=chunk_size) as q:
        q.put(b"first")
        waiting = [Waiting(path, records, f"task {who}" if who % 2 else None, **settings) for who, records in mine.items()]
        until(lambda: len(requests(tmp_path)) == 5)  # and one leads
        before = commits(path)
    assert [each.done() for each in waiting] == [(100, 100)] * 6
    assert requests(tmp_path) == []
    if log_bytes > 1:
        assert commits(path) == before + 1
    with Queue(path) as q:
        first, *found = q
        assert first == b"first"
        assert sorted(by_stage(found)) == sorted(mine.values())
        assert q.verify().problems == q.verify().orphans == []
        assert [q.put_many([b"again"], f"task {who}") for who in range(1, 6, 2)] == [100] * 3, "their keys are known"
    assert not (tmp_path / "q.staged").exists()
    is_plain(path, [b"first", *found])


def test_what_waits_under_one_key_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put_many(numbers(0, 5), "old")
        waiting = [Waiting(path, [b"x %d" % number for number in range(10)], key) for key in ("new", "new", "old", "new")]
        until(lambda: len(requests(tmp_path)) == 3)
    found = [each.done() for each in waiting]
    assert requests(tmp_path) == []
    assert sorted(found[:2] + found[3:]) == [(10, 0), (10, 0), (10, 10)]
    assert found[2] == (5, 0)
    is_plain(path, [*numbers(0, 5), *(b"x %d" % number for number in range(10))])


def test_stages_on_other_terms_put_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put(b"0 0")
        waiting = [
            Waiting(path, [b"1 1"]),
            Waiting(path, [b"2 2"], chunk_size=100),
            Waiting(path, [b"3 3"], min_free_bytes=1),
            Waiting(path, [b"4 4"], max_records=100),
            Waiting(path, [b"5 5"], sync="never"),
        ]
        until(lambda: len(requests(tmp_path)) == 2)  # one leads; those that are bounded, or not durable, ask nobody
        time.sleep(0.05)
    assert [each.done() for each in waiting] == [(1, 1)] * 5
    with Queue(path) as q:
        assert sorted(q) == [b"%d %d" % (who, who) for who in range(6)]
    assert not (tmp_path / "q.staged").exists()


def test_what_is_too_much_for_one_commit_waits_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "group_bytes", 4_000)
    path, records = tmp_path / "q", [bytes(100)] * 10
    with Queue(path):
        waiting = [Waiting(path, records) for _ in range(8)]
        until(lambda: len(requests(tmp_path)) == 7)
    assert [each.done() for each in waiting] == [(10, 10)] * 8
    assert commits(path) in (2, 3)
    is_plain(path, records * 8)


@pytest.mark.parametrize("leads", [True, False])
def test_a_stage_whose_time_is_over_has_stored_nothing_and_may_commit_again(tmp_path: Path, leads: bool) -> None:
    path = tmp_path / "q"
    with Stage(path, lock_timeout=0.05) as stage:
        with Queue(path) as q:
            q.put(b"first")
            stage.put_many(numbers(0, 5))
            with contextlib.nullcontext() if leads else led(path), pytest.raises(Locked, match=r"gave up after 0\.05 s"):
                stage.commit()
            assert requests(tmp_path) == []
        assert commits(path) == 1
        assert stage.records == 5
        assert stage.commit() == stage.stored == 5
    is_plain(path, [b"first", *numbers(0, 5)])


@pytest.mark.parametrize("when", ["asking", "before", "taken", "served", "given up"])
def test_an_interrupted_stage_has_stored_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Ctrl-C while it waits: before anybody has taken its request along, after, when that was done, and when it failed."""
    path, acquire, interrupted = tmp_path / "q", lock.acquire, list[bool]()

    def interrupting(files: Files, name: str, *arguments: object, **named: object) -> object:
        if not interrupted and named.get("unless"):
            interrupted.append(True)
            (file,) = tmp_path.glob("q.staged/*.put")
            if when != "before":
                file = file.rename(file.with_suffix(".taken"))
            if when == "served":
                q.put_many(numbers(0, 5))
                file.rename(file.with_suffix(".done"))
            elif when == "taken":
                q.put_many(numbers(0, 5))
                threading.Timer(0.2, file.rename, [file.with_suffix(".done")]).start()
            if when in ("given up", "served"):
                q.close()
            elif when == "taken":
                threading.Timer(0.4, q.close).start()
            raise KeyboardInterrupt
        return acquire(files, name, *arguments, **named)  # type: ignore[arg-type]

    class Interrupting(Files):
        def rename(self, source: str, target: str) -> None:
            if when == "asking" and target.endswith(".put"):
                raise KeyboardInterrupt
            super().rename(source, target)

    monkeypatch.setattr(lock, "acquire", interrupting)
    monkeypatch.setattr(lock, "PATIENCE", 0.05)
    q = Queue(path)
    with led(path), Stage(path, _files=Interrupting()) as stage:
        stage.put_many(numbers(0, 5))
        with pytest.raises(KeyboardInterrupt):
            stage.commit()
        q.close()
        assert requests(tmp_path) == []
        stored = when in ("taken", "served")
        assert stage.records == (0 if stored else 5)
        stage.rollback()
    is_plain(path, numbers(0, 5) if stored else [])


def test_what_a_killed_stage_has_asked_for_is_not_stored(tmp_path: Path) -> None:
    program = "import sys; from qewqew_core import Stage; s = Stage(sys.argv[1]); s.put(b'never committed'); s.commit()"
    with Queue(tmp_path / "q") as q:
        q.put(b"first")
        with led(tmp_path / "q"):
            process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "q"])
            until(lambda: len(requests(tmp_path)) == 1)
            process.kill()
            process.wait()
            waiting = Waiting(tmp_path / "q", [b"second"])
            until(lambda: len(requests(tmp_path)) == 2)
    assert waiting.done() == (1, 1)
    assert not (tmp_path / "q.staged").exists()
    is_plain(tmp_path / "q", [b"first", b"second"])


class Asking(Files):
    """The disk of a leader. While it finishes a round, the next stage asks."""

    def __init__(self, path: Path, stages: int) -> None:
        self.path, self.stages, self.waiting = path, stages, list[Waiting]()

    def sync(self, fd: int) -> None:
        super().sync(fd)
        asked = [name for name in requests(self.path.parent) if name.endswith(".put")]
        if len(self.waiting) < self.stages and not asked:
            for before in self.waiting[:-1]:  # the last one is being served
                before.done()  # although the leader has the queue still open
            self.waiting.append(Waiting(self.path, [b"%d %d" % (len(self.waiting) + 1, number) for number in range(5)]))
            until(lambda: any(name.endswith(".put") for name in requests(self.path.parent)))


def test_a_leader_serves_those_that_ask_meanwhile_and_then_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, acquire, owners = tmp_path / "q", lock.acquire, list[int]()

    def acquiring(*arguments: object, **named: object) -> object:
        owners.append(threading.get_ident())
        return acquire(*arguments, **named)  # type: ignore[arg-type]

    with Queue(path) as q:
        q.put(b"0 0")
    monkeypatch.setattr(lock, "acquire", acquiring)
    disk = Asking(path, 4)
    with Stage(path, _files=disk) as stage:
        stage.put_many([b"9 %d" % number for number in range(5)])
        assert stage.commit() == 5
    assert [each.done() for each in disk.waiting] == [(5, 5)] * 4
    assert len(owners) == 1
    assert commits(path) == 6
    monkeypatch.setattr(LIMITS, "group_rounds", 1)
    disk = Asking(path, 4)
    with Stage(path, _files=disk) as stage:
        stage.put(b"8 0")
        assert stage.commit() == 1
    assert [each.done() for each in disk.waiting] == [(5, 5)] * len(disk.waiting)
    assert 2 <= len(disk.waiting) < 4
    assert len(owners) == 3, "the last one put its own"
    with Queue(path) as q:
        assert len(by_stage(list(q))) == 7 + len(disk.waiting)


def test_a_leader_goes_on_no_longer_than_until_somebody_wants_the_queue_itself(tmp_path: Path) -> None:
    path, opened = tmp_path / "q", list[int]()

    class Wanted(Asking):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            if not opening.is_alive() and not opened:
                opening.start()
                with open(path, "rb") as header:
                    until(lambda: lock.is_awaited(header.fileno()))

    def take() -> None:
        with Queue(path) as q:
            opened.append(len(q))

    with Queue(path) as q:
        q.put(b"0 0")
    opening, disk = threading.Thread(target=take), Wanted(path, 3)
    with Stage(path, _files=disk) as stage:
        stage.put(b"9 0")
        assert stage.commit() == 1
    opening.join(60)
    assert opened == [2], "the first record, and that of the leader"
    assert [each.done() for each in disk.waiting] == [(5, 5)] * len(disk.waiting)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_nobody_waits_for_a_leader_that_was_stopped_or_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    if end is signal.SIGSTOP:
        monkeypatch.setattr(lock, "PATIENCE", 0.1)
    program = "import sys; from qewqew_core import Stage; s = Stage(sys.argv[1]); s.put(b'0 0'); s.commit(); s.close()"
    with Queue(tmp_path / "q") as q:
        q.put(b"first")
        leader = subprocess.Popen([sys.executable, "-c", program, tmp_path / "q"])
        with open(tmp_path / "q", "rb") as header:
            until(lambda: lock.is_awaited(header.fileno()))
        waiting = [Waiting(tmp_path / "q", [b"%d 0" % who]) for who in (1, 2, 3)]
        until(lambda: len(requests(tmp_path)) == 3)
        leader.send_signal(end)
        if end is signal.SIGKILL:
            leader.wait()
        else:  # all of its threads: else it might be stopped when it has the queue
            threads = [Path(f"/proc/{leader.pid}/task/{task}/stat") for task in os.listdir(f"/proc/{leader.pid}/task")]
            until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads))
    assert [each.done() for each in waiting] == [(1, 1)] * 3
    leader.send_signal(signal.SIGCONT)
    assert leader.wait(60) == (0 if end is signal.SIGSTOP else -signal.SIGKILL)
    with Queue(tmp_path / "q") as q:
        assert sorted(q) == [b"0 0"] * (end is signal.SIGSTOP) + [b"1 0", b"2 0", b"3 0", b"first"]


# The leader dies, or fails


OTHERS = {f"{who:016x}": [b"%d %d" % (who, number) for number in range(30)] for who in range(1, 4)}
OWN = [b"0 %d" % number for number in range(10)]
Asked = dict[str, Request]


@contextlib.contextmanager
def claims(home: Path) -> Iterator[None]:
    """The stages live: their claims are locked."""
    with contextlib.ExitStack() as opened:
        for claim in OTHERS:
            file = opened.enter_context(open(home / claim, "a+b"))
            assert lock.whole(file.fileno())
        yield


def ask(root: Path, chunk_size: int) -> Asked:
    home = root / "q.staged"
    home.mkdir(parents=True)
    asked = {}
    for claim, records in OTHERS.items():
        (home / claim).touch()
        key = key_hash(claim) if claim.endswith("2") else None
        asked[claim] = Request(Files())
        asked[claim].ask(str(home / claim), records, key, Terms(chunk_size, 0))
        asked[claim]._bell.close()  # nobody waits at it, and it cannot be copied
    return asked


def at(request: Request, root: Path) -> Request:
    """The same request, in a copy."""
    copy = object.__new__(Request)
    copy._files, copy._fds, copy._bell = Files(), Descriptors(), None
    copy._mine, copy._asked = (str(root / "q.staged" / os.path.basename(path)) for path in (request._mine, request._asked))
    return copy


def check(root: Path, asked: Asked, what: object) -> int:
    """Each stage's turn comes: what it has asked for is in the queue, or is left to it. How many are in the queue."""
    with claims(root / "q.staged"):
        with Queue(root / "q", _files=NoSync()) as q:
            assert q.verify().problems == q.verify().orphans == [], what
            found = by_stage(list(q))
        served = [at(request, root).is_served() for request in asked.values()]
        for claim, request in asked.items():
            assert at(request, root).withdraw() == (OTHERS[claim] not in found), what
    assert all(group in (OWN, *OTHERS.values()) for group in found), what
    assert len(found) == len({group[0] for group in found}), what
    assert len(found) in (0, 1, 4), what  # all in one commit; or the leader for itself, where the disk was full
    assert sum(served) == max(0, len(found) - 1), what
    return len(found)


@pytest.mark.parametrize("chunk_size", [SIZE, 200])
@pytest.mark.parametrize("log_bytes", [4 << 20, 1])
def test_killed_after_any_call_a_leader_leaves_each_request_stored_or_to_its_stage(
    tmp_path: Path, chunk_size: int, log_bytes: int
) -> None:
    root = tmp_path / "0"
    asked = ask(root, chunk_size)
    disk = JournalDisk(str(root))
    stage = Stage(root / "q", chunk_size=chunk_size, log_bytes=log_bytes, _files=disk)
    stage.put_many(OWN)
    with claims(root / "q.staged"):
        assert stage.commit() == 10
    seen = []
    for stop in range(disk.begin, len(disk.calls) + 1):
        image(disk.calls[:stop], disk.root, tmp_path / "image", None)
        seen.append(check(tmp_path / "image", asked, stop))
        shutil.rmtree(tmp_path / "image")
    assert seen == sorted(seen)
    assert set(seen) == {0, 4}
    for stop in range(disk.begin, len(disk.calls) + 1):  # the power is cut: the stages are gone too
        image(disk.calls[:stop], disk.root, tmp_path / "image", random.Random(stop))
        with Queue(tmp_path / "image" / "q", _files=NoSync()) as q:
            assert q.verify().problems == q.verify().orphans == []
            assert len(by_stage(list(q))) in (0, 4)
        assert not (tmp_path / "image" / "q.staged").exists()
        shutil.rmtree(tmp_path / "image")
    stage.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("for_ever", [False, True])
def test_any_call_of_a_leader_may_fail(tmp_path: Path, error: int, for_ever: bool) -> None:
    number, seen = 1, set()
    while True:
        root = tmp_path / str(number)
        asked = ask(root, 200)
        disk = FailingDisk(str(root), number, error, False, for_ever)
        stage = Stage(root / "q", chunk_size=200, _files=disk)
        stage.put_many(OWN)
        with claims(root / "q.staged"), contextlib.suppress(OSError):
            stage.commit()
        raised = bool(stage.records)
        groups = check(crashed(root).parent, asked, number)  # as its death would leave it
        groups = max(groups, check(root, asked, number))
        assert groups or raised, "a commit that returned has stored"
        seen.add(groups)
        with contextlib.suppress(OSError):
            stage.close()
        if disk.failed is None:
            break
        number += 1
    assert seen >= {0, 4}
    assert number < NEVER


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("for_ever", [False, True])
def test_any_call_of_a_stage_that_asks_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, for_ever: bool
) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.02)
    monkeypatch.setattr(LIMITS, "look_at_leader", 0.005)
    number, ended = 1, set()
    while True:
        root = tmp_path / str(number)
        root.mkdir()
        disk = FailingDisk(str(root), number, error, False, for_ever)
        with Queue(root / "q") as q:
            q.put(b"first")
        with led(root / "q"):
            waiting = Waiting(root / "q", OWN, _files=disk)
            until(
                partial(lambda root, waiting, disk: requests(root) or disk.failed or not waiting.is_alive(), root, waiting, disk)
            )
            with Stage(root / "q") as leader:
                leader.put(b"1 0")  # it does not lead, but puts for all when its turn comes
        waiting.join(60)
        assert not waiting.is_alive()
        with Queue(root / "q") as q:
            assert q.verify().problems == q.verify().orphans == []
            stored = OWN[0] in (found := list(q))
        assert sorted(found) == sorted([b"first", b"1 0", *OWN] if stored else [b"first", b"1 0"]), number
        assert not (root / "q.staged").exists(), number
        if waiting.error is None:
            assert stored, number
        elif not isinstance(waiting.error, Broken):
            assert not stored, (number, disk.failed, repr(waiting.error))
        ended.add(waiting.error is None)
        if disk.failed is None:
            break
        number += 1
    assert ended == {True, False}
    assert number < NEVER


def test_where_the_disk_is_too_full_for_all_the_leader_puts_its_own(tmp_path: Path) -> None:
    class Full(Files):
        def allocate(self, fd: int, size: int) -> None:
            if size > 1 << 20:
                raise OSError(errno.ENOSPC, "made to fail")
            super().allocate(fd, size)

    records = [bytes(60_000)] * 10
    with Queue(tmp_path / "q") as q:
        waiting = [Waiting(tmp_path / "q", records, _files=Full(), lock_timeout=60) for _ in range(4)]
        until(lambda: len(requests(tmp_path)) == 3)
        q.close()
    for each in waiting:
        each.join(60)
    stored = [each for each in waiting if each.error is None]
    assert stored
    assert all(isinstance(each.error, DiskFull) for each in waiting if each not in stored)
    assert [each.count for each in stored] == [10] * len(stored)
    assert requests(tmp_path) == []
    is_plain(tmp_path / "q", records * len(stored))


KILLED = """
import os, random, sys
from qewqew_core import Stage
who = int(sys.argv[2])
for turn in range(10**6):
    with Stage(sys.argv[1]) as stage:
        stage.put_many([b"%d.%d %d" % (who, turn, number) for number in range(50)])
        stage.commit()
    print(turn, flush=True)
"""


@pytest.mark.parametrize("kills", [8, pytest.param(1_000, marks=pytest.mark.soak)])
def test_processes_that_stage_at_once_and_are_killed_lose_and_repeat_nothing(tmp_path: Path, kills: int) -> None:
    luck, path, acknowledged, numbered = random.Random(kills), tmp_path / "q", dict[int, int](), 0

    def begin() -> tuple[int, subprocess.Popen[str]]:
        nonlocal numbered
        numbered += 1
        return numbered, subprocess.Popen([sys.executable, "-c", KILLED, path, str(numbered)], stdout=subprocess.PIPE, text=True)

    def end(who: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(luck.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        acknowledged[who] = max([0, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.wait()
        process.stdout.close()

    running = [begin() for _ in range(6)]
    try:
        for _ in range(kills):
            at = luck.randrange(len(running))
            end(*running[at])
            running[at] = begin()
    finally:
        for each in running:
            end(*each)
    with Queue(path) as q:
        assert q.verify().problems == q.verify().orphans == []
        groups = by_stage(list(q))
    assert all([record.split()[1] for record in group] == numbers(0, 50) for group in groups), "each commit is whole, once"
    found = dict[int, list[int]]()
    for group in groups:
        who, turn = map(int, group[0].split()[0].split(b"."))
        found.setdefault(who, []).append(turn)
    for who, last in acknowledged.items():
        turns = found.get(who, [])
        assert turns in (list(range(last + 1)), list(range(last + 2))), "the last one may have been cut off before it said so"
    assert len(found) == len(acknowledged)
    assert not (tmp_path / "q.staged").exists()


def test_a_request_that_is_not_whole_is_left_alone(tmp_path: Path) -> None:
    """It is damaged, or something else."""
    home = tmp_path / "q.staged"
    asked = ask(tmp_path, SIZE)
    files = sorted(home.glob("*.put"))
    whole = files[0].read_bytes()
    cases = [
        b"",
        whole[:3],
        whole[:40],
        whole[:-1],
        b"\0" * 100,
        crc32(b"").to_bytes(4),
        crc32(b"x" * 60).to_bytes(4) + b"x" * 60,
    ]
    for cut in cases:
        files[0].write_bytes(cut)
        with claims(home), Stage(tmp_path / "q") as stage:
            stage.put(b"0 0")
            assert stage.commit() == stage.stored == 1
        assert files[0].read_bytes() == cut
    assert asked


def test_a_stage_that_cannot_ask_waits_and_puts_by_itself(tmp_path: Path) -> None:
    class NoRoom(Files):
        def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".mine"):  # a request before it is asked
                raise OSError(errno.ENOSPC, "made to fail")
            super().write(fd, data, offset)

    with Queue(tmp_path / "q") as q:
        waiting = Waiting(tmp_path / "q", numbers(0, 5), _files=NoRoom())
        with open(tmp_path / "q", "rb") as header:
            until(lambda: lock.is_awaited(header.fileno()))
        assert requests(tmp_path) == []
        q.put(b"first")
    assert waiting.done() == (5, 5)
    is_plain(tmp_path / "q", [b"first", *numbers(0, 5)])


def test_a_request_that_somebody_else_has_removed_is_never_taken_for_stored(tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as q, led(tmp_path / "q"):
        waiting = Waiting(tmp_path / "q", numbers(0, 5))
        until(lambda: len(requests(tmp_path)) == 1)
        shutil.rmtree(tmp_path / "q.staged")
        q.put(b"first")
    waiting.join(60)
    assert isinstance(waiting.error, Broken)
    is_plain(tmp_path / "q", [b"first"])


FRAME = b"\0\5forge"
FORGED = {  # runs as they are counted, frames, number of runs, name
    "more records than there are": ([(3, 7)], FRAME, 1, "0123456789abcdef"),
    "records in no bytes": ([(5, 0)], b"", 1, "0123456789abcdef"),
    "no records": ([(0, 0)], b"", 1, "0123456789abcdef"),
    "more bytes than there are": ([(1, 100)], FRAME, 1, "0123456789abcdef"),
    "more runs than there are": ([(1, 7)], FRAME, 1 << 31, "0123456789abcdef"),
    "a record that is cut": ([(1, 7)], b"\1\xf4forge", 1, "0123456789abcdef"),
    "a byte too many": ([(1, 8)], FRAME + b"x", 1, "0123456789abcdef"),
    "bytes that nobody counts": ([(1, 7)], FRAME + b"xyz", 1, "0123456789abcdef"),
    "a record that no chunk takes": ([(1, 502)], b"\1\xf4" + b"f" * 500, 1, "0123456789abcdef"),
    "a name without an id": ([(1, 7)], FRAME, 1, "nothing"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_request_that_no_stage_has_written_is_named_and_keeps_nobody_from_a_commit(
    forged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, frames, count, name = FORGED[forged]
    path, size = tmp_path / "q", 300
    (tmp_path / "q.staged").mkdir()
    body = group_commit._HEAD.pack(group_commit._MAGIC, size, 0, bytes(16), count)
    body += b"".join(group_commit._RUN.pack(*run) for run in runs) + frames
    request = tmp_path / "q.staged" / f"feed.{name}{group_commit.PUT}"
    request.write_bytes(group_commit._CRC.pack(crc32(body)) + body)
    (tmp_path / "q.staged" / "feed").touch()
    with Descriptors([os.open(tmp_path / "q.staged" / "feed", os.O_RDWR)]) as (claim,):
        assert lock.whole(claim), "as a stage that lives"
        for number in range(3):
            with Stage(path, chunk_size=size) as stage:
                stage.put(b"%d" % number)
        refused = request.with_suffix(group_commit.REFUSED)
        assert [file.name for file in (tmp_path / "q.staged").glob("feed.*")] == [refused.name]
        assert caplog.text.count(f"{request}: no stage has written this request") == 1
    is_plain(path, [b"0", b"1", b"2"])
