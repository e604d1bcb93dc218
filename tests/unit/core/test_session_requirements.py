"""The requirements on sessions (S-n), and the defects of the disk queues in the tradition of Rhino.Queues (T-n), one test each.

A compact proof for every number, in order; the depth is in test_sessions.py. S19, T14 and T15 need real processes:
tests/integration/core/test_session_processes.py. docs/requirements.md lists them all. A "crash image" is a copy of the
directory of an open queue: what a kill leaves.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from disk import JournalDisk, NoSync, image
from test_failing_calls import NEVER, FailingDisk
from test_sessions import crashed, is_plain, numbers, plain

from qewqew_core import (
    BadArgument,
    CorruptQueue,
    DiskFull,
    Empty,
    QewQewError,
    Queue,
    QueueBroken,
    QueueClosed,
    QueueFull,
    QueueLocked,
    RecordTooLarge,
    Session,
    repair,
)
from qewqew_core.files import Files

ROOT = Path(__file__).parents[3]

T = TypeVar("T")


@pytest.fixture
def small_limits(monkeypatch):
    """Limits so small that a short script meets each of them."""
    for name, value in (("LOG_BYTES", 600), ("PENDING_BYTES", 60)):
        monkeypatch.setattr(f"qewqew_core.queue.{name}", value)
    monkeypatch.setattr("qewqew_core.journal.BYTES_AT_CLOSE", 300)
    for module in ("state", "reading", "writing"):
        monkeypatch.setattr(f"qewqew_core.{module}.PIECE_BYTES", 40)
    monkeypatch.setattr("qewqew_core.queue.INLINE_BYTES", {"commit": 70, "never": 70})
    monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", 60)


class Script:
    """Random work of three sessions on one queue, on a disk that writes down its calls; and what is committed when.

    A call that meets a full disk is made again, as a user would when there is room; any other failure ends the script.
    """

    def __init__(self, folder: Path, seed: int, length: int = 120, chunk_size: int = 64, disk: FailingDisk | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.root, self.chunk_size = str(folder), chunk_size
        self.disk = disk or FailingDisk(self.root, NEVER, 0, short=False, for_ever=False)
        self.committed: list[bytes] = []
        self.may_be: list[list[bytes]] = [[]]  # what may be committed at the end
        self.steps: list[tuple[int, list[bytes]]] = [(0, [])]
        try:
            q = Queue(folder / "q", chunk_size=chunk_size, _files=self.disk)
        except QewQewError:
            self.disk.left = NEVER
            return
        try:
            self._work(q, random.Random(seed), length)
        except QueueBroken:
            self.disk.left = NEVER
            q.close()
            return
        try:
            q.close()
        except QueueBroken:
            self.disk.left = NEVER
        self.steps.append((len(self.disk.calls), self.committed))

    def _work(self, q: Queue, luck: random.Random, length: int) -> None:
        held: list[list[bytes]] = [[], [], []]
        puts: list[list[bytes]] = [[], [], []]
        sessions = [q.session() for _ in range(3)]
        for serial in range(length):
            who, what, count = luck.randrange(3), luck.random(), luck.randrange(1, 6)
            session, new = sessions[who], [b"%d.%d" % (serial, number) for number in range(count)]
            free = [record for record in self.committed if record not in itertools.chain(*held)][:count]
            if what < 0.15:
                self._do(partial(q.put_many, new), self.committed + new)
            elif what < 0.2:
                self._do(partial(q.get_many, count), [record for record in self.committed if record not in free])
            elif what < 0.5:
                for record in new:
                    self._do(partial(session.put, record), self.committed)
                puts[who] += new
            elif what < 0.7:
                assert self._do(partial(session.get_many, count), self.committed) == free
                held[who] += free
            elif what < 0.9:
                after = [record for record in self.committed if record not in held[who]] + puts[who]
                self._do(partial(session.commit, key=f"step {serial}" if count == 1 else None), after)
                held[who], puts[who] = [], []
            else:
                self._do(session.rollback, self.committed)
                held[who], puts[who] = [], []

    def _do(self, operation: Callable[[], T], after: list[bytes]) -> T:
        self.may_be = [self.committed, after]
        try:
            result = operation()
        except DiskFull:
            self.disk.left = NEVER
            result = operation()
        self.committed, self.may_be = after, [after]
        self.steps.append((len(self.disk.calls), after))
        return result

    def is_right(self, stop: int, target: Path, luck: random.Random | None) -> None:
        """What the first ``stop`` calls leave opens with what was committed by then, or with what was being committed too."""
        image(self.disk.calls[:stop], self.root, target, luck)
        done = max(number for number, (when, _) in enumerate(self.steps) if when <= stop)
        allowed = [records for _, records in self.steps[done : done + 2]]
        with Queue(target / "q", chunk_size=self.chunk_size, _files=NoSync()) as q:
            assert list(q) in allowed, f"stopped after call {stop}"
            assert q.verify().problems == []
            seen = list(q)
        assert plain(target / "q") == seen
        shutil.rmtree(target)


def open_queue(tmp_path: Path, records: list[bytes], **more) -> tuple[Queue, Session]:
    q = Queue(tmp_path / "q", **{"chunk_size": 64, "_files": NoSync(), **more})
    q.put_many(records)
    return q, q.session()


def held_by(session: Session, count: int) -> list[bytes]:
    return [session.get() for _ in range(count)]


# Requirements on sessions


@pytest.mark.parametrize("seed", range(3))
def test_s01_all_of_a_commit_or_nothing_survives_a_kill_after_any_call(tmp_path, small_limits, seed):
    script = Script(tmp_path / "work", seed, chunk_size=[40, 64, 400][seed])
    assert len(script.disk.calls) > 150
    for stop in range(seed, len(script.disk.calls) + 1, 3):
        script.is_right(stop, tmp_path / "image", None)


def test_s02_what_is_put_is_visible_from_the_commit_on_and_a_record_has_one_holder(tmp_path):
    q, one = open_queue(tmp_path, numbers(0, 4))
    with q, one, q.session() as two:
        one.put(b"new")
        assert held_by(one, 2) == numbers(0, 2)
        assert held_by(two, 2) == numbers(2, 4)
        for take in (one.get, two.get, q.get):
            with pytest.raises(Empty):
                take()
        one.commit()
        assert two.get() == b"new"


def test_s03_rollback_leaving_and_death_return_what_was_held_to_the_front_in_order(tmp_path):
    q, one = open_queue(tmp_path, numbers(0, 9))
    with q:
        for end in (one.rollback, one.close):
            with q.session() as two:
                assert (held_by(one, 2), held_by(two, 1), held_by(one, 1)) == (numbers(0, 2), [b"2"], [b"3"])
                two.rollback()
                assert list(q) == [b"2", *numbers(4, 9)]
                end()
            assert list(q) == numbers(0, 9)
        with pytest.raises(ZeroDivisionError), q.session() as three:
            assert 1 // len(three.get_many(5)[5:])
        assert list(q) == numbers(0, 9)
        held_by(q.session(), 3)
        dead = crashed(tmp_path)
    with Queue(dead, _files=NoSync()) as q:
        assert list(q) == numbers(0, 9)


@pytest.mark.parametrize("seed", range(3))
def test_s04_puts_and_gets_of_a_commit_that_returned_survive_a_power_cut(tmp_path, small_limits, seed):
    script = Script(tmp_path / "work", 10 + seed, chunk_size=[40, 64, 400][seed])
    for stop in range(seed, len(script.disk.calls) + 1, 4):
        for chance in range(2):
            script.is_right(stop, tmp_path / "image", random.Random(f"{seed}.{stop}.{chance}"))


def test_s05_empty_is_an_error_of_its_own_and_no_record_looks_like_it(tmp_path):
    q, session = open_queue(tmp_path, [b"", b"None", b"0"])
    with q, session:
        assert held_by(session, 3) == [b"", b"None", b"0"]
        with pytest.raises(Empty):
            session.get()


def test_s06_waiting_for_the_lock_ends_at_once_at_any_other_error(tmp_path):
    """With a time-out of an hour: if it waited, this test would not end."""
    q, _ = open_queue(tmp_path, [b"0"])
    with q:
        with pytest.raises(QueueLocked):
            Queue(tmp_path / "q", lock_timeout=0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Queue, tmp_path / "q", lock_timeout=3600)
            q.close()
            waiting.result().close()
    (tmp_path / "q.log").write_bytes(b"no log at all")
    with pytest.raises(CorruptQueue):
        Queue(tmp_path / "q", lock_timeout=3600)


def test_s07_sessions_in_many_threads_over_many_chunks_mix_nothing_up(tmp_path):
    """Each commit is a run of its records in one piece, whatever the others do."""
    with Queue(tmp_path / "q", chunk_size=64, _files=NoSync()) as q, ThreadPoolExecutor(6) as pool:

        def work(me: int) -> None:
            with q.session() as session:
                for turn in range(30):
                    for number in range(5):
                        session.put(b"%d %d %d" % (me, turn, number))
                    session.commit()

        list(pool.map(work, range(6)))
        records = [tuple(map(int, record.split())) for record in q]
        assert q.stats().chunks > 100
    runs = [records[at : at + 5] for at in range(0, len(records), 5)]
    assert all(run == [(*run[0][:2], number) for number in range(5)] for run in runs)
    assert sorted(run[0][:2] for run in runs) == [(me, turn) for me in range(6) for turn in range(30)]


def test_s08_closing_the_queue_rolls_open_sessions_back(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 9))
    session.put(b"lost")
    held_by(session, 4)
    q.close()
    assert plain(tmp_path / "q") == numbers(0, 9)
    with pytest.raises(QueueClosed):
        session.commit()
    is_plain(tmp_path / "q", numbers(0, 9))


class Failing(JournalDisk):
    """Full, or broken, while it says so."""

    error = 0

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._fail()
        super().write(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._fail()
        super().allocate(fd, size)

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, "made to fail")


def test_s09_a_failed_write_surfaces_at_the_commit_and_the_queue_goes_on(tmp_path):
    """A full disk: roll back and go on at once. A broken one: whatever it was, opening again decides it, whole."""
    disk = Failing(str(tmp_path))
    q, session = open_queue(tmp_path, numbers(0, 9), _files=disk)
    with q:
        session.put_many([b"x" * 50] * 3)
        held_by(session, 2)
        disk.error = errno.ENOSPC
        with pytest.raises(DiskFull, match="Nothing was stored"):
            session.commit()
        session.rollback()
        disk.error = 0
        assert list(q) == numbers(0, 9)
        held_by(session, 2)
        session.put(b"new")
        session.commit()
        disk.error = errno.EIO
        held_by(session, 2)
        with pytest.raises(QueueBroken, match="open the queue again"):
            session.commit()
    disk.error = 0
    with Queue(tmp_path / "q") as q:
        assert list(q) in ([*numbers(2, 9), b"new"], [*numbers(4, 9), b"new"])


@pytest.mark.parametrize(
    ("error", "short", "for_ever"),
    [(errno.EIO, False, False), (errno.ENOSPC, False, False), (errno.ENOSPC, True, True)],
    ids=["EIO", "full disk once", "full disk until there is room, short writes"],
)
def test_s09_any_call_may_fail_and_what_is_left_is_whole(tmp_path, small_limits, error, short, for_ever):
    number, kinds, folder = 1, set(), tmp_path / "work"
    while True:
        folder.mkdir()
        disk = FailingDisk(str(folder), number, error, short, for_ever)
        script = Script(folder, 7, length=60, disk=disk)
        if disk.failed is None:
            break
        what = f"{disk.failed}, change number {number}"
        with Queue(folder / "q", chunk_size=64, _files=NoSync()) as q:
            assert list(q) in script.may_be, what
            assert (q.verify().problems, q.verify().orphans) == ([], []), what
            seen = list(q)
        assert plain(folder / "q") == seen
        assert not {"q.spill", "q.log.tmp"} & {file.name for file in folder.iterdir()}
        shutil.rmtree(folder)
        kinds.add(disk.failed)
        number += 3
    assert number > 60
    assert {"open", "write", "allocate", "rename"} <= kinds


def test_s10_a_cancelled_get_loses_nothing_and_a_cancelled_commit_is_applied_once_when_it_is_made_again(tmp_path):
    """Asynchronous use is use from a thread. The call goes on when nobody waits for it any more; the session has what it got."""
    q, session = open_queue(tmp_path, [])
    committing = q.session()
    committing.put_many(numbers(1, 3))

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(session.get, 60), 0.05)
        q.put(b"0")  # the thread still waits, and takes it
        task = asyncio.ensure_future(asyncio.to_thread(committing.commit, "key"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with q:
        asyncio.run(cancelled())  # its end waits for the threads
        session.close()
        assert list(q) in (numbers(0, 1), numbers(0, 3)), "the get took nothing; the commit has happened, or not"
        with q.session() as again:
            again.put_many(numbers(1, 3))
            assert again.commit(key="key") == 2, "under its key it can be made again"
        assert list(q) == numbers(0, 3)


def test_s11_a_torn_tail_is_cut_at_any_length_and_appends_go_on_behind_the_cut(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 5), chunk_size=4096)
    with q:
        before = (tmp_path / "q.log").read_bytes().rstrip(b"\0")
        held_by(session, 2)
        session.put_many(numbers(5, 8))
        session.commit()
        path = crashed(tmp_path)
    whole = (path.parent / "q.log").read_bytes().rstrip(b"\0")
    assert 40 < len(whole) - len(before) < 200
    content = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for end in range(len(before), len(whole) + 1):
        for name, data in content.items():
            (path.parent / name).write_bytes(data)
        (path.parent / "q.log").write_bytes(whole[:end])
        expected = numbers(2, 8) if end == len(whole) else numbers(0, 5)
        for _ in range(2):
            with Queue(path, chunk_size=4096, _files=NoSync()) as q, q.session() as session:
                assert list(q) == expected
                session.put(b"new")
            expected.append(b"new")


def test_s12_where_to_write_follows_from_the_log_and_the_records_alone(tmp_path):
    """In a crash image the pointers of the chunk files still say that they are empty, and there is no other file."""
    q, session = open_queue(tmp_path, numbers(0, 30))
    with q:
        held_by(session, 12)
        session.commit()
        path = crashed(tmp_path)
    names = {file.name for file in path.parent.iterdir()}
    assert {"q", "q.log"} <= names
    assert all(name.removeprefix("q.").isdecimal() for name in names - {"q", "q.log"})
    assert {file.read_bytes()[:10] for file in path.parent.glob("q.[0-9]*")} == {b"\0\0\0\x0a\0\0\0\x0a\0\0"}
    with Queue(path, chunk_size=64) as q:
        q.put_many(numbers(30, 60))
        assert list(q) == numbers(12, 60)
    is_plain(path, numbers(12, 60))


def test_s13_gets_are_replayed_whatever_the_order_of_their_commits(tmp_path):
    for number, order in enumerate(itertools.permutations(range(3))):
        folder = tmp_path / str(number)
        folder.mkdir()
        q, _ = open_queue(folder, numbers(0, 7), _files=NoSync())
        with q:
            sessions = [q.session() for _ in range(3)]
            for session in sessions * 2:
                session.get()
            for which in order[:2]:
                sessions[which].commit()
            path = crashed(folder)
        with Queue(path, _files=NoSync()) as q:
            assert list(q) == [b"%d" % record for record in (order[2], order[2] + 3, 6)]


def test_s14_the_log_is_cut_back_while_sessions_hold_records_and_what_that_writes_depends_on_no_backlog(tmp_path, monkeypatch):
    monkeypatch.setattr("qewqew_core.queue.LOG_BYTES", 2000)
    largest = []
    for backlog in (10, 20_000):
        folder = tmp_path / str(backlog)
        folder.mkdir()
        disk = JournalDisk(str(folder))
        q, session = open_queue(folder, numbers(0, backlog), chunk_size=1 << 20, _files=disk)
        with q, q.session() as other:
            held_by(session, 3)
            start = len(disk.calls)
            for _ in range(200):
                other.put(b"new")
                other.commit()
                other.get()
                other.rollback()
            calls = disk.calls[start:]
            assert [call.kind for call in calls].count("rename") > 2
            largest.append(max(len(call.data) for call in calls))
            assert list(q) == [*numbers(3, backlog), *[b"new"] * 200]
            with Queue(crashed(folder), _files=NoSync()) as dead:
                assert list(dead) == [*numbers(0, backlog), *[b"new"] * 200], "what is held comes first"
    assert largest[1] <= largest[0] + 200


def test_s15_the_log_is_replaced_by_a_rename_of_a_file_that_is_on_disk(tmp_path, small_limits):
    script = Script(tmp_path / "work", 20)
    calls, new = script.disk.calls, str(tmp_path / "work" / "q.log.tmp")
    replaced = [number for number, call in enumerate(calls) if call.kind == "rename" and call.path == new]
    assert len(replaced) > 2
    for number in replaced:
        made = max(at for at in range(number) if calls[at].kind == "link" and calls[at].path == new)
        node = calls[made].node
        assert [call.kind for call in calls[made:number] if call.node == node] == ["link", "write", "sync"]
        assert calls[number].target == str(tmp_path / "work" / "q.log")
        assert (calls[number + 1].kind, calls[number + 1].path) == ("sync_directory", str(tmp_path / "work"))
        for stop in range(made, number + 3):
            for chance in range(3):
                script.is_right(stop, tmp_path / "image", random.Random(f"{stop}.{chance}") if chance else None)


def test_s16_a_session_never_writes_to_a_chunk_that_is_not_its_own(tmp_path, monkeypatch):
    """What sessions put beyond their memory goes to files of each; the commit gives them their place in the chain."""
    monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", 40)
    q, one = open_queue(tmp_path, numbers(0, 3))
    with q, q.session() as two:
        for number in range(100, 130):
            one.put(b"1 %d" % number)
            two.put(b"2 %d" % number)
            q.put(b"0 %d" % number)
        assert {file.name.split(".")[0] for file in tmp_path.glob("q.spill/*")} == {"1", "2"}
        two.commit()
        one.commit()
        assert list(q) == numbers(0, 3) + [b"%d %d" % (who, number) for who in (0, 2, 1) for number in range(100, 130)]
        assert q.verify().problems == []


def test_s17_reading_makes_no_file_and_a_missing_or_short_one_is_named(tmp_path):
    q, session = open_queue(tmp_path, numbers(100, 140))
    with q:
        path = crashed(tmp_path)
        data = (tmp_path / "q.2").read_bytes()
        os.truncate(tmp_path / "q.2", 30)
        held_by(session, 10)
        with pytest.raises(CorruptQueue, match="the file ends before its last record") as caught:
            session.get()
        assert (caught.value.path, caught.value.offset) == (str(tmp_path / "q.2"), 30)
        (tmp_path / "q.2").write_bytes(data)
        assert session.get() == b"110"
    for damage in (lambda: os.truncate(path.parent / "q.2", 30), (path.parent / "q.2").unlink):
        damage()
        before = sorted(path.parent.iterdir())
        with pytest.raises(CorruptQueue, match="chunk file") as caught:
            Queue(path)
        assert caught.value.path == str(path.parent / "q.2")
        assert sorted(path.parent.iterdir()) == before
    q, session = open_queue(tmp_path, [])
    (tmp_path / "q.3").unlink()
    held_by(session, 20)
    with pytest.raises(QueueBroken, match="No such file or directory") as caught:
        session.get()
    assert caught.value.path == str(tmp_path / "q.3")
    q.close()
    assert not (tmp_path / "q.3").exists()


def damaged_at(tmp_path: Path, chunk_id: int, offset: int, count: int) -> Path:
    """A closed queue of 40 records in chunks of 64 bytes (ten in each), with a bit flipped in so many bytes of a chunk."""
    q, _ = open_queue(tmp_path, numbers(100, 140), _files=NoSync())
    q._rotate()  # else the log has a copy of the records, from which they can be repaired
    q.close()
    data = bytearray((tmp_path / f"q.{chunk_id}").read_bytes())
    for at in range(offset, offset + count):
        data[at] ^= 4
    (tmp_path / f"q.{chunk_id}").write_bytes(data)
    return tmp_path / "q"


def test_s18_a_bad_record_never_looks_like_an_empty_queue_and_can_be_set_aside(tmp_path):
    path = damaged_at(tmp_path, 1, 14, count=40)
    with Queue(path, _files=NoSync()) as q, q.session() as session:
        for take in [session.get, lambda: session.get_many(3), q.get, q.peek, lambda: q.get_many(1)] * 2:
            with pytest.raises(CorruptQueue, match="do not have the checksum") as caught:
                take()
            assert (caught.value.path, caught.value.offset) == (f"{path}.1", 10)
        assert len(q) == 40
        session.put(b"new")
    report = repair(path)
    assert [(one.path, one.records) for one in report.damage] == [(f"{path}.1", 10)]
    assert Path(report.set_aside).is_dir()
    with Queue(path, _files=NoSync()) as q, q.session() as session:
        assert session.get_many(100) == [*numbers(110, 140), b"new"]


# S19: tests/integration/core/test_session_processes.py


MEASURE = """
import os, sys
from pathlib import Path
from qewqew_core import Queue
from qewqew_core.files import Files

class Counting(Files):
    read_from_chunks = 0

    def read(self, fd, size, offset):
        data = super().read(fd, size, offset)
        if os.readlink(f"/proc/self/fd/{fd}").rpartition(".")[2].isdecimal():
            self.read_from_chunks += len(data)
        return data

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

disk = Counting()
with Queue(sys.argv[1], sync="never", _files=disk) as q:
    opened = disk.read_from_chunks
    with q.session() as session:
        session.put_many([b"new"] * 1000)
        session.get_many(1000)
        session.rollback()
    print(len(q), opened, disk.read_from_chunks, peak(), os.stat(sys.argv[1] + ".log").st_size)
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("million") / "q"
    with Queue(path, sync="never") as q, q.session() as session:
        for start in range(0, 1_000_000, 100_000):
            session.put_many([b"%016d" % number for number in range(start, start + 100_000)])
            session.commit()
    return path


def measured(path: Path) -> list[int]:
    command = [sys.executable, "-c", MEASURE, path]
    return [int(word) for word in subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout.split()]


def test_s20_memory_and_start_do_not_grow_with_the_number_of_records(million, tmp_path):
    records, opened, read, full, log = measured(million)
    _, _, _, empty, _ = measured(tmp_path / "q")
    assert records == 1_000_000
    assert opened < 100, "the pointers of the chunks"
    assert read < 200_000, "a thousand records were taken"
    assert log < 20_000
    assert full - empty < 10_000, "KiB"


# S21 (import of directories of DiskQueue) is no part of sessions; see docs/requirements.md


# Defects of others, which ours must not have


def test_t01_what_was_taken_and_committed_does_not_come_back_after_a_crash(tmp_path):
    q, session = open_queue(tmp_path, numbers(1, 6), chunk_size=4096)
    with q:
        assert held_by(session, 3) == numbers(1, 4)
        session.commit()
        path = crashed(tmp_path)
    with Queue(path, _files=NoSync()) as q:
        assert (len(q), list(q)) == (2, [b"4", b"5"])


def test_t02_nor_when_the_files_of_what_was_taken_are_gone(tmp_path):
    for count in (3, 5):
        folder = tmp_path / str(count)
        folder.mkdir()
        q, session = open_queue(folder, numbers(1, 6), chunk_size=13)
        with q:
            held_by(session, count)
            session.commit()
            assert not (folder / "q.1").exists()
            path = crashed(folder)
        with Queue(path, chunk_size=13) as q:
            assert list(q) == numbers(1, 6)[count:]
            q.put(b"6")
            assert q.get_many(9) == numbers(1, 7)[count:]


def test_t03_a_crash_before_the_pointers_are_stored_overwrites_nothing(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 3), chunk_size=4096)
    with q:
        session.put_many(numbers(3, 6))
        session.commit()
        path = crashed(tmp_path)
    with Queue(path, chunk_size=4096) as q, q.session() as session:
        session.put(b"6")
        session.commit()
        assert [session.get() for _ in range(7)] == numbers(0, 7)


def test_t03b_with_the_header_or_the_pointers_unreadable_live_records_are_not_overwritten(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 3), chunk_size=4096)
    with q:
        session.put(b"3")
        session.commit()
        path = crashed(tmp_path)
    content = {file: file.read_bytes() for file in path.parent.iterdir()}
    for name, damage in itertools.product(["q", "q.1"], ["missing", b"", b"\0", b"\xff" * 10, b"\0" * 10]):
        for file, data in content.items():
            file.write_bytes(data)
        file = path.parent / name
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(damage + (content[file][10:] if len(damage) == 10 else b""))
        try:
            with Queue(path, chunk_size=4096, _files=NoSync()) as q:
                q.put(b"4")
                assert list(q) == numbers(0, 5)
        except CorruptQueue as error:
            assert error.path == str(file)  # noqa: PT017 - either is right
            assert (path.parent / "q.1").exists() == ((name, damage) != ("q.1", "missing"))


def test_t04_an_older_session_does_not_write_to_the_file_that_another_has_begun_since(tmp_path):
    with Queue(tmp_path / "q", chunk_size=26) as q:
        one, two = q.session(), q.session()
        two.put(b"first-0123456")
        two.commit()
        one.put(b"SECOND")
        one.commit()
        assert list(q) == [b"first-0123456", b"SECOND"]
    is_plain(tmp_path / "q", [b"first-0123456", b"SECOND"])


@pytest.mark.parametrize("leftover", ["empty", "half", "garbage", "an older one"])
def test_t05_a_crash_inside_the_replacement_of_the_log_loses_nothing(tmp_path, leftover):
    """Each step of it: test_s15. Here what another program's crash, or an old one, may have left beside the log."""
    q, session = open_queue(tmp_path, numbers(0, 3))
    with q:
        older = (tmp_path / "q.log").read_bytes()
        session.put_many(numbers(3, 30))
        session.commit()
        path = crashed(tmp_path)
    log = (path.parent / "q.log").read_bytes()
    data = {"empty": b"", "half": log[: len(log) // 2], "garbage": b"\xff" * 500, "an older one": older}[leftover]
    (path.parent / "q.log.tmp").write_bytes(data)
    with Queue(path, _files=NoSync()) as q:
        assert list(q) == numbers(0, 30)
        assert not (path.parent / "q.log.tmp").exists()


def test_t06_a_torn_beginning_at_the_end_of_the_log_is_cut_and_the_next_commits_stay(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 3))
    with q:
        log = (tmp_path / "q.log").read_bytes().rstrip(b"\0")
        session.put(b"3")
        session.commit()
        path = crashed(tmp_path)
    whole = (path.parent / "q.log").read_bytes().rstrip(b"\0")
    frame = whole[len(log) :]
    content = {file: file.read_bytes() for file in path.parent.iterdir()}
    for size in range(1, 16):
        for file, data in content.items():
            file.write_bytes(data)
        (path.parent / "q.log").write_bytes(whole + frame[:size])
        with Queue(path, _files=NoSync()) as q:
            q.put(b"4")
        with Queue(path, _files=NoSync()) as q:
            assert list(q) == numbers(0, 5)


def test_t07_a_flipped_bit_and_zeros_in_the_log_are_reported_and_the_rest_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("qewqew_core.journal.FRAMES_AT_CLOSE", 1000)
    for number, (chunk_id, offset) in enumerate(itertools.product([1, 2, 4], [10, 11, 12, 14, 33])):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = damaged_at(folder, chunk_id, offset, count=1)
        with Queue(path, _files=NoSync()) as q, q.session() as session:
            assert len(q.verify().problems) == 1
            good = session.get_many(10 * chunk_id - 10) if chunk_id > 1 else []
            assert good == numbers(100, 90 + 10 * chunk_id)
            with pytest.raises(CorruptQueue):
                session.get()
            session.rollback()
        repair(path)
        with Queue(path, _files=NoSync()) as q:
            others = [record for record in numbers(100, 140) if (int(record) - 90) // 10 != chunk_id]
            assert list(q) in (others, numbers(100, 140)), "repair may find the bit"
    for number, damage in enumerate(["bit at the front", "bit in the middle", "zeros"]):
        folder = tmp_path / f"log {number}"
        folder.mkdir()
        q, session = open_queue(folder, numbers(100, 110), _files=NoSync())
        with q:
            for record in numbers(200, 400):
                session.put(record)
                session.commit()
        log = bytearray((folder / "q.log").read_bytes())
        assert len(log) > 7000
        if damage == "zeros":
            log[-4096:] = bytes(4096)
        else:
            log[5000 if damage == "bit in the middle" else 30] ^= 1
        (folder / "q.log").write_bytes(log)
        with pytest.raises(CorruptQueue):
            Queue(folder / "q")
        assert not repair(folder / "q").ok
        with Queue(folder / "q") as q:
            assert sorted(set(q)) == [*numbers(100, 110), *numbers(200, 400)]


def test_t08_replay_stops_at_a_damaged_frame_and_applies_nothing_twice(tmp_path):
    """Any byte of the log, so any count, length and kind: the commits up to some point, or an error that names the log."""
    q, session = open_queue(tmp_path, [], chunk_size=4096)
    states = [[]]
    with q:
        for turn in range(6):
            session.put_many(numbers(10 * turn, 10 * turn + 2))
            if turn % 2:
                session.get()
            session.commit()
            states.append(list(q))
        path = crashed(tmp_path)
    log = (path.parent / "q.log").read_bytes().rstrip(b"\0")
    content = {file: file.read_bytes() for file in path.parent.iterdir()}
    seen = set()
    for offset in range(len(log)):
        for file, data in content.items():
            file.write_bytes(data)
        damaged = bytearray(log)
        damaged[offset] ^= 0xFF
        (path.parent / "q.log").write_bytes(damaged)
        try:
            with Queue(path, chunk_size=4096, _files=NoSync()) as q:
                assert list(q) in states
                seen.add("a prefix")
        except CorruptQueue as error:
            seen.add(error.path)
    assert seen == {"a prefix", str(path) + ".log"}


def test_t09_after_each_cut_of_the_log_amid_sessions_exactly_what_was_committed_is_there(tmp_path, small_limits):
    script = Script(tmp_path / "work", 30, length=150)
    calls = enumerate(script.disk.calls, 1)
    cuts = [number for number, call in calls if call.kind == "rename" and call.path.endswith(".log.tmp")]
    assert len(cuts) > 5
    for stop in cuts:
        script.is_right(stop, tmp_path / "image", None)


def test_t10_many_empty_records_are_counted_exactly(tmp_path):
    q, one = open_queue(tmp_path, [b""] * 300)
    with q:
        two = q.session()
        for _ in range(4):
            assert (one.get_many(70), two.get_many(55), one.get()) == ([b""] * 70, [b""] * 55, b"")
            assert len(q) == 174
            two.rollback()
            assert (len(q), len(list(q))) == (229, 229)
            q._rotate()
            one.rollback()
            assert len(q) == 300
        one.get_many(10)
        two.get_many(20)
        two.commit()
        q._rotate()
        path = crashed(tmp_path)
    for where in (path, tmp_path / "q"):
        with Queue(where, _files=NoSync()) as q:
            assert (len(q), q.stats().records, len(q.get_many(1000))) == (280, 280, 280)


def test_t11_a_million_records_take_no_memory_while_a_session_works_at_both_ends(million, tmp_path):
    program = MEASURE.replace("session.rollback()", "session.commit(); session.put_many(session.get_many(1000))")
    command = [sys.executable, "-c", program]
    found = [subprocess.run([*command, path], capture_output=True, check=True, cwd=ROOT) for path in (million, tmp_path / "q")]
    (count, _, read, full, _), (_, _, _, empty, _) = ([int(word) for word in one.stdout.split()] for one in found)
    assert count == 1_000_000
    assert read < 300_000
    assert full - empty < 10_000, "KiB"


def test_t12_opening_reads_the_log_since_its_last_snapshot_not_all_that_ever_happened(tmp_path, monkeypatch):
    class Counting(NoSync):
        count = 0

        def read(self, fd: int, size: int, offset: int) -> bytes:
            data = super().read(fd, size, offset)
            self.count += len(data.rstrip(b"\0"))
            return data

    monkeypatch.setattr("qewqew_core.queue.LOG_BYTES", 8000)
    q, session = open_queue(tmp_path, numbers(0, 50), chunk_size=4096, _files=NoSync())
    with q:
        for number in range(2000):
            session.put(b"%d" % number)
            session.get()
            session.commit()
        path = crashed(tmp_path)
    for where in (path, tmp_path / "q"):
        disk = Counting()
        with Queue(where, chunk_size=4096, _files=disk) as q:
            assert disk.count < 10_000
            assert len(q) == 50


def test_t13_what_a_commit_of_one_record_does_on_disk_does_not_depend_on_the_backlog(tmp_path):
    """No time is measured: the calls, and their bytes, are the same ones."""
    costs = []
    for backlog in (1, 10_000, 100_000):
        folder = tmp_path / str(backlog)
        folder.mkdir()
        disk = JournalDisk(str(folder))
        q, session = open_queue(folder, numbers(0, backlog), chunk_size=1 << 20, _files=disk)
        with q:
            cost = []
            for _ in range(10):
                session.put(b"new")
                start = len(disk.calls)
                session.commit()
                cost.append([(call.kind, len(call.data)) for call in disk.calls[start:]])
            for _ in range(10):
                session.get()
                start = len(disk.calls)
                session.commit()
                cost.append([(call.kind, len(call.data)) for call in disk.calls[start:]])
        costs.append(cost)
    assert costs[0] == costs[1] == costs[2]
    assert [kind for call in costs[0] for kind, _ in call] == ["write", "sync"] * 20
    assert max(size for call in costs[0] for _, size in call) < 60


# T14, T15: tests/integration/core/test_session_processes.py


def test_t16_an_unreadable_record_at_the_head_is_an_error_each_time_until_it_is_set_aside(tmp_path):
    path = damaged_at(tmp_path, 1, 12, count=40)
    for _ in range(2):
        with Queue(path, _files=NoSync()) as q:
            for _ in range(3):
                with pytest.raises(CorruptQueue) as caught:
                    q.get(timeout=0)
                assert (caught.value.path, caught.value.offset) == (f"{path}.1", 10)
            assert (len(q), bool(q)) == (40, True)
    repair(path)
    with Queue(path, _files=NoSync()) as q:
        assert q.get() == b"110"


def test_t17_files_without_a_live_record_are_collected(tmp_path, monkeypatch):
    """Of what was taken: at once. Of a rollback: at once. Of a crash: when the queue is opened."""
    monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", 40)
    q, session = open_queue(tmp_path, numbers(100, 140))
    with q:
        held_by(session, 25)
        session.commit()
        assert sorted(file.name for file in tmp_path.glob("q.[0-9]*")) == ["q.3", "q.4"]
        for number in range(100):
            session.put(b"%d" % number)
        assert len(list(tmp_path.glob("q.spill/*"))) > 5
        session.rollback()
        assert list(tmp_path.glob("q.spill/*")) == []
        for number in range(100):
            session.put(b"%d" % number)
        path = crashed(tmp_path)
    files = path.parent
    new = b"\0\0\0\x0a\0\0\0\x0a\0\0".ljust(64, b"\0")
    (files / "q.5").write_bytes(new)  # made for a commit that did not come
    (files / "q.6").write_bytes(new)
    (files / "q.lease").mkdir()
    (files / "q.lease" / "q.3").write_bytes(new)
    (files / "q.log.tmp").write_bytes(b"half a log")
    Queue(path).close()
    assert sorted(file.name for file in files.iterdir()) == ["q", "q.3", "q.4", "q.log"]


def test_t18_limits_are_checked_before_anything_is_written(tmp_path, monkeypatch):
    q, session = open_queue(tmp_path, [], chunk_size=1 << 20)
    with q:
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        with pytest.raises(RecordTooLarge, match="65,536 bytes, the largest that fits is 65,535"):
            session.put(bytes(65536))
        with pytest.raises(RecordTooLarge):
            session.put(bytes(1 << 31))
        assert session.commit() == 0
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(BadArgument, match="chunk_size must be a whole number from 12 to 2,147,483,647"):
        Queue(tmp_path / "q", chunk_size=1 << 31)
    monkeypatch.setattr("qewqew_core.chunk.MAX_ID", 20)
    for spill in (1 << 20, 1):
        monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", spill)
        with Queue(tmp_path / "q", chunk_size=13) as q, q.session() as session:
            q.put_many(numbers(0, 9) + [b"x"] * 10)
            for _ in range(2):
                session.put(b"y")
            with pytest.raises(QueueFull, match="all 20 chunk ids are in use"):
                session.commit()
            assert len(q) == 19
            assert q.get() == b"0"
            assert session.commit() == 2
            assert q.get_many(99) == [*numbers(1, 9), *[b"x"] * 10, b"y", b"y"]


def test_t19_two_queues_in_one_process_do_not_wait_for_each_other(tmp_path):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Files):
        armed = False

        def sync(self, fd: int) -> None:
            if self.armed:
                entered.set()
                assert go_on.wait(60)

    disk = Slow()
    with (
        Queue(tmp_path / "slow", _files=disk) as slow,
        Queue(tmp_path / "q") as q,
        ThreadPoolExecutor(1) as pool,
        slow.session() as waiting,
    ):
        waiting.put(b"0")
        disk.armed = True
        future = pool.submit(waiting.commit)
        assert entered.wait(60)
        with q.session() as session:
            for number in range(20):
                session.put(b"%d" % number)
                session.commit()
                assert session.get() == b"%d" % number
            session.commit()
        assert not q
        assert not future.done()
        go_on.set()
        assert future.result() == 1


def test_t20_a_commit_syncs_data_then_log_and_the_directory_after_what_was_made_or_renamed(tmp_path, monkeypatch):
    """From the journal of calls; what a power cut then leaves: test_s04."""
    monkeypatch.setattr("qewqew_core.queue.INLINE_BYTES", {"commit": 70, "never": 70})
    for name, spill in (("memory", 1 << 20), ("spilled", 60)):
        monkeypatch.setattr("qewqew_core.session.SPILL_BYTES", spill)
        folder = tmp_path / name
        folder.mkdir()
        disk = JournalDisk(str(folder))
        q, session = open_queue(folder, numbers(0, 5), _files=disk)
        with q:
            log = next(call.node for call in disk.calls if call.kind == "link" and call.path == str(folder / "q.log.tmp"))
            begin = len(disk.calls)
            for number in range(100, 140):
                session.put(b"%d" % number)
            session.get()
            start = len(disk.calls)
            session.commit()
            calls = disk.calls[start:]
        made = {call.node for call in disk.calls[begin:] if call.kind == "link"}
        assert len(made) > 3
        frame = next(number for number, call in enumerate(calls) if (call.kind, call.node) == ("write", log))
        assert [call.kind for call in calls[frame:] if call.node == log] == ["write", "sync"]
        journal = [*enumerate(disk.calls[: start + frame])]
        for node in made:
            writes = [number for number, call in journal if call.node == node and call.kind in ("write", "allocate")]
            syncs = [number for number, call in journal if call.node == node and call.kind == "sync"]
            assert not writes or max(syncs) > max(writes), "payload is on disk before the commit that refers to it"
        names = [number for number, call in journal if call.kind in ("link", "rename") and call.node != log]
        directories = [number for number, call in journal if (call.kind, call.path) == ("sync_directory", str(folder))]
        assert max(directories) > max(names)
        assert any(call.kind == "rename" for call in calls) == (name == "spilled")


def test_t21_rollbacks_in_rounds_amid_other_sessions_keep_the_order(tmp_path):
    q, one = open_queue(tmp_path, numbers(0, 20))
    with q:
        two, luck, order = q.session(), random.Random(3), numbers(0, 20)
        held = {one: [], two: []}
        for turn in range(200):
            session = luck.choice([one, two])
            if luck.random() < 0.6 and len(q):
                held[session].append(session.get())
            else:
                session.rollback()
                held[session].clear()
            assert list(q) == [record for record in order if record not in held[one] + held[two]], turn
    is_plain(tmp_path / "q", order)


def test_t22_a_cleared_queue_delivers_nothing_old_and_a_deleted_one_stays_away(tmp_path):
    q, session = open_queue(tmp_path, numbers(0, 50))
    with q:
        held_by(session, 5)
        session.put(b"lost")
        session.rollback()
        assert q.clear() == 50
        assert (len(q), list(q)) == (0, [])
        q.put(b"new")
        assert list(q) == [b"new"]
        assert q.clear() == 1
    session.close()
    q.close()
    assert list(tmp_path.iterdir()) == []
    with Queue(tmp_path / "q") as q:
        assert not q


@pytest.mark.parametrize("size", [2, 9, 10, 12, 40])
def test_t23_a_truncated_chunk_is_reported_and_what_is_put_later_is_right(tmp_path, size):
    q, session = open_queue(tmp_path, numbers(100, 140))
    with q:
        path = crashed(tmp_path)
        os.truncate(tmp_path / "q.1", size)
        session.put(b"new")
        session.commit()
        with pytest.raises(CorruptQueue) as caught:
            session.get()
        assert (caught.value.path, caught.value.offset) == (str(tmp_path / "q.1"), max(size, 10))
    os.truncate(path.parent / "q.1", size)
    with pytest.raises(CorruptQueue) as caught:
        Queue(path)
    assert caught.value.path == f"{path}.1"
    repair(path)
    with Queue(path, chunk_size=64) as q, q.session() as session:
        session.put(b"new")
        session.commit()
        assert session.get_many(100)[-31:] == [*numbers(110, 140), b"new"]


@pytest.mark.parametrize("size", [0, 2, 9, 12])
def test_t23_and_of_a_closed_queue_too(tmp_path, size):
    q, _ = open_queue(tmp_path, numbers(100, 140))
    q.close()
    os.truncate(tmp_path / "q.1", size)
    with pytest.raises(CorruptQueue):
        Queue(tmp_path / "q")


def test_t24_waiting_for_the_lock_of_a_corrupt_queue_raises_what_it_is_at_once(tmp_path):
    """With a time-out of an hour: if it waited, this test would not end."""
    q, session = open_queue(tmp_path, numbers(0, 3))
    with q:
        session.put(b"3")
        session.commit()
        path = crashed(tmp_path)
    for damage in (b"", b"QEWQLOG1", b"QEWQLOG2" + bytes(100)):
        (path.parent / "q.log").write_bytes(damage)
        with pytest.raises(CorruptQueue) as caught:
            Queue(path, lock_timeout=3600)
        assert caught.value.path == f"{path}.log"


def test_t25_a_disk_that_is_full_three_times_leaves_nothing_half_committed(tmp_path):
    disk = Failing(str(tmp_path))
    q, session = open_queue(tmp_path, numbers(0, 9), _files=disk)
    with q:
        session.put_many(numbers(100, 200))
        assert session.get() == b"0"
        disk.error = errno.ENOSPC
        for _ in range(3):
            with pytest.raises(DiskFull):
                session.commit()
            disk.error = 0
            with Queue(crashed(tmp_path), _files=NoSync()) as dead:
                assert list(dead) == numbers(0, 9)
            disk.error = errno.ENOSPC
        assert q.peek() == b"1"
        disk.error = 0
        assert session.commit() == 100
    is_plain(tmp_path / "q", [*numbers(1, 9), *numbers(100, 200)])


# The list of them


IDS = [f"S{number}" for number in range(1, 21)] + ["T1", "T2", "T3", "T3b", *(f"T{number}" for number in range(4, 26))]


def test_each_number_has_its_test_and_the_list_of_requirements_names_it():
    named: dict[str, list[str]] = {}
    for file in (Path(__file__), ROOT / "tests" / "integration" / "core" / "test_session_processes.py"):
        for letter, number, part, rest in re.findall(r"^def test_([st])(\d\d)(b?)_(\w+)", file.read_text(), re.MULTILINE):
            named.setdefault(f"{letter.upper()}{int(number)}{part}", []).append(f"`test_{letter}{number}{part}_{rest}`")
    rows = re.findall(r"^\| ([ST]\d+b?) \| (.+) \|$", (ROOT / "docs" / "requirements.md").read_text(), re.MULTILINE)
    assert [one for one, _ in rows] == [*IDS[:20], "S21", *IDS[20:]]
    assert {one: text for one, text in rows if one != "S21"} == {one: ", ".join(named[one]) for one in IDS}
    assert dict(rows)["S21"].startswith("does not apply: ")
