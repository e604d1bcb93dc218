"""Stopped after any call of the file system, a queue opens again with exactly what was committed.

A workload runs once on a disk that writes down its calls. Then, for each number of calls, the disk is built as a kill
or a power cut leaves it, and opened. The model is what the workload had been told when that call was made: every
operation that had returned has happened, the one in flight has happened or not, and nothing else.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk import JournalDisk, image

import qewqew_core.journal
import qewqew_core.queue
import qewqew_core.session
import qewqew_core.state
import qewqew_core.writing
from qewqew_core import Empty, Queue, Session

View = tuple[list[bytes], dict[str, tuple[str, int, tuple[bytes, ...]]]]


def view(q: Queue) -> View:
    """Everything that a user can see of a queue: its records, and its batches with state, attempt and records."""
    found = {one.id: (one.state, one.attempt, tuple(one)) for one in (*q.batches(), *q.dead())}
    return list(q), found


def committed(q: Queue) -> View:
    """The same, but with what open sessions hold: after a crash it is there again."""
    chunks = list(q._state.chain.values())
    held = [one.busy for one in chunks]
    for one in chunks:
        one.busy = [(span.start, span.end) for span in one.gone]
    try:
        return view(q)
    finally:
        for one, busy in zip(chunks, held, strict=True):
            one.busy = busy


@dataclass
class Workload:
    """Runs operations, and remembers after how many calls each had returned, and what the queue was then."""

    disk: JournalDisk
    path: str
    sync: str
    chunk_size: int
    steps: list[tuple[int, View]] = field(default_factory=list)
    q: Queue | None = None
    serial: int = 0
    sessions: list[Session] = field(default_factory=list)

    def open(self) -> None:
        self.q = Queue(self.path, chunk_size=self.chunk_size, sync=self.sync, max_attempts=3, _files=self.disk)  # type: ignore[arg-type]

    def close(self) -> None:
        self.sessions.clear()
        self.q.close()

    def session(self, number: int) -> Session:
        if len(self.sessions) < 3:
            self.sessions.append(self.q.session())
        return self.sessions[number % len(self.sessions)]

    def do(self, operation: Callable[[Queue], object]) -> None:
        operation(self.q)
        calls = len(self.disk.calls)
        seen = committed(self.q)
        self.steps.append((calls, seen))

    def records(self, count: int, size: int = 9) -> list[bytes]:
        result = []
        for _ in range(count):
            self.serial += 1
            result.append(b"%d:" % self.serial + b"x" * ((self.serial * 7) % size))
        return result


def script(work: Workload, luck: random.Random, length: int, first: View | None = ([], {})) -> None:
    """A random sequence of all operations, with reopenings. ``first``: what is there before it."""
    work.open()
    if first is not None:
        work.steps.append((0, first))
    work.do(lambda q: None)
    keys = work.serial
    for _ in range(length):
        # All that is random is drawn here, not in the operation: a test may repeat it.
        pick, number, count = luck.random(), luck.randrange(1 << 16), luck.randrange(1, 25)
        records = work.records(count)
        if pick < 0.15:
            work.do(lambda q, record=records[0]: q.put(record))
        elif pick < 0.25:
            work.do(lambda q, records=records, key=f"put{number % 50}": q.put_many(records, key=key))
        elif pick < 0.35:
            work.do(_get)
        elif pick < 0.4:
            work.do(lambda q, count=count: q.get_many(count))
        elif pick < 0.68:
            session = work.session(number)
            work.do(lambda q, session=session, number=number, records=records: _in_session(session, number // 3, records))
        elif pick < 0.8:
            keys += 1
            limits = [{}, {"max_records": count}, {"max_bytes": 3 * count, "lease_timeout": 1000}][number % 3]
            work.do(lambda q, key=f"run{keys}", limits=limits: q.lease(key, **limits))
        elif pick < 0.93:
            end = ["ack", "nack", "nack", "put_back", "to_dead_letters", "drop", "return_to_queue", "extend"][count % 8]
            work.do(lambda q, end=end, number=number: _end(q, end, number))
        elif pick < 0.95:
            work.do(lambda q: q.clear())
        else:
            work.close()
            work.open()
            work.do(lambda q: None)
    work.close()


def _get(q: Queue) -> None:
    try:
        q.get()
    except Empty:
        assert len(q) == 0


def _end(q: Queue, end: str, number: int) -> None:
    dead = end in ("drop", "return_to_queue")
    candidates = q.dead() if dead else [one for one in q.batches() if one.state == "leased"]
    if candidates:
        getattr(candidates[number % len(candidates)], end)(*([500] if end == "extend" else []))


def _in_session(session: Session, number: int, records: list[bytes]) -> None:
    pick = number % 10
    if pick < 3:
        session.get_many(len(records))
    elif pick < 5:
        session.put_many(records)
    elif pick < 8:
        session.commit(key=f"put{number % 50}" if pick == 7 else None)
    else:
        session.rollback()


@pytest.fixture(params=["log carries", "chunks carry"])
def small_limits(request, monkeypatch):
    """Limits so small that a short workload meets each of them."""
    monkeypatch.setattr(qewqew_core.queue, "LOG_BYTES", 3000)
    monkeypatch.setattr(qewqew_core.journal, "BYTES_AT_CLOSE", 1500)
    monkeypatch.setattr(qewqew_core.queue, "PENDING_BYTES", 60)
    monkeypatch.setattr(qewqew_core.session, "SPILL_BYTES", 100)
    monkeypatch.setattr(qewqew_core.writing, "PIECE_BYTES", 40)
    monkeypatch.setattr(qewqew_core.state, "PIECE_BYTES", 40)
    limit = 10_000 if request.param == "log carries" else 30
    monkeypatch.setattr(qewqew_core.queue, "INLINE_BYTES", {"commit": limit, "never": limit})


def check(folder: Path, allowed: list[View], work: Workload, what: str) -> None:
    path, disk = folder / "q", JournalDisk(str(folder))
    with Queue(path, chunk_size=work.chunk_size, sync=work.sync, max_attempts=3, _files=disk) as q:  # type: ignore[arg-type]
        seen = view(q)
        assert seen in allowed, f"{what}: found {seen}, not one of {allowed}"
        report = q.verify()
        assert (report.problems, report.orphans) == ([], []), what
        q.put(b"after")
    with Queue(path, chunk_size=work.chunk_size, _files=disk) as q:
        assert view(q) == ([*seen[0], b"after"], seen[1]), f"{what}: opened a second time"


def allowed_at(work: Workload, calls: int) -> list[View]:
    done = max(number for number, (when, _) in enumerate(work.steps) if when <= calls)
    return [seen for _, seen in work.steps[done : done + 2]]


def crash_everywhere(tmp_path: Path, seed: int, sync: str, power: bool, length: int, every: int = 1) -> int:
    luck = random.Random(seed)
    root = tmp_path / "work"
    root.mkdir()
    work = Workload(JournalDisk(str(root)), str(root / "q"), sync, chunk_size=luck.choice([40, 64, 150, 400]))
    script(work, luck, length)
    calls = work.disk.calls
    crashes = 0
    for stop in range(luck.randrange(every), len(calls) + 1, every):
        for chance in range(3):
            what = f"seed {seed}, sync {sync}, stopped after call {stop} of {len(calls)}, chance {chance}"
            fate = random.Random(f"{seed}.{stop}.{chance}") if power else None
            folder = tmp_path / "image"
            folder.mkdir()
            image(calls[:stop], str(root), folder, fate)
            if chance == 2:
                stop_recovery_too(folder, work, random.Random(f"{seed}.{stop}"), power)
            check(folder, allowed_at(work, stop), work, what)
            crashes += 1
            shutil.rmtree(folder)
    shutil.rmtree(root)
    return crashes


def stop_recovery_too(folder: Path, work: Workload, luck: random.Random, power: bool) -> None:
    """Open the queue, and stop the opening itself after some call: recovery begins again from what that left."""
    disk = JournalDisk(str(folder))
    Queue(folder / "q", chunk_size=work.chunk_size, max_attempts=3, _files=disk).close()
    copy = folder.with_name("copy")
    image(disk.calls[: luck.randrange(disk.begin, len(disk.calls) + 1)], str(folder), copy, luck if power else None)
    shutil.rmtree(folder)
    copy.rename(folder)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_after_any_call_loses_and_repeats_nothing(tmp_path, small_limits, seed):
    assert crash_everywhere(tmp_path, seed, "never" if seed % 2 else "commit", power=False, length=40, every=3) > 100


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_after_any_call_loses_and_repeats_nothing(tmp_path, small_limits, seed):
    assert crash_everywhere(tmp_path, 100 + seed, "commit", power=True, length=40, every=3) > 100


@pytest.mark.soak
def test_a_million_crashes_lose_and_repeat_nothing(tmp_path, small_limits):
    crashes, seed = 0, 1000
    while crashes < 500_000:  # and as many with the other limits
        crashes += crash_everywhere(tmp_path, seed, "commit", power=seed % 4 != 0, length=40)
        seed += 1


def test_a_power_cut_while_a_killed_queue_recovers_loses_nothing(tmp_path, small_limits):
    """After a kill the newest commits may be in the page cache only; recovery must not let files run ahead of the log."""
    root = tmp_path / "work"
    root.mkdir()
    work = Workload(JournalDisk(str(root)), str(root / "q"), "commit", chunk_size=64)
    script(work, random.Random(11), 40)
    calls, checked = work.disk.calls, 0
    for stop in range(5, len(calls), 7):
        folder = tmp_path / "image"
        image(calls[:stop], str(root), folder, None)
        disk = JournalDisk(str(folder), follows=(calls[:stop], str(root)))
        Queue(folder / "q", chunk_size=64, max_attempts=3, _files=disk).close()
        for chance in range(4):
            luck = random.Random(f"{stop}.{chance}")
            cut = tmp_path / "cut"
            image(disk.calls[: luck.randrange(stop, len(disk.calls) + 1)], str(folder), cut, luck)
            check(cut, allowed_at(work, stop), work, f"killed after call {stop}, recovery cut off, chance {chance}")
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    assert checked > 100


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_after_a_killed_queue_went_on_loses_nothing(tmp_path, small_limits, seed):
    """What the killed process had not synced, the next one must not take for durable."""
    root = tmp_path / "work"
    root.mkdir()
    work = Workload(JournalDisk(str(root)), str(root / "q"), ["commit", "never"][seed], chunk_size=64)
    script(work, random.Random(50 + seed), 40)
    calls, checked = work.disk.calls, 0
    for stop in range(5 + seed, len(calls), 11):
        folder = tmp_path / "image"
        image(calls[:stop], str(root), folder, None)
        disk = JournalDisk(str(folder), follows=(calls[:stop], str(root)))
        after = Workload(disk, str(folder / "q"), "commit", chunk_size=64, serial=10_000)
        script(after, random.Random(stop), 6, first=None)
        for chance in range(6):
            luck = random.Random(f"{stop}.{chance}")
            cut, end = tmp_path / "cut", luck.randrange(after.steps[0][0], len(disk.calls) + 1)
            image(disk.calls[:end], str(folder), cut, luck)
            check(cut, allowed_at(after, end), after, f"killed after call {stop}, cut after call {end}, chance {chance}")
            shutil.rmtree(cut)
            checked += 1
        shutil.rmtree(folder)
    assert checked > 100


@pytest.mark.parametrize("end", ["killed", "closed", "cut back"])
def test_what_a_session_spilled_without_syncing_is_durable_once_something_builds_on_it(tmp_path, small_limits, end):
    """Its chunk files were moved into the queue from another directory, and neither directory was synced then."""
    root, killed = tmp_path / "0", tmp_path / "1"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", chunk_size=64, sync="never", _files=disk) as q:
        with q.session() as session:
            session.put_many([bytes([number]) * 40 for number in range(5)])
            session.put(b"last")
        expected, calls = list(q), disk.calls.copy()
        if end == "cut back":
            with q._lock:
                q._rotate()
            calls = disk.calls.copy()
    assert any("q.spill" in call.path and call.kind == "rename" for call in calls)
    if end == "killed":
        image(calls, str(root), killed, None)
        disk = JournalDisk(str(killed), follows=(calls, str(root)))
        with Queue(killed / "q", _files=disk) as q:
            assert list(q) == expected
            calls, root = disk.calls.copy(), killed
    elif end == "closed":
        calls = disk.calls
    for chance in range(50):
        image(calls, str(root), tmp_path / "image", random.Random(chance))
        with Queue(tmp_path / "image" / "q") as q:
            assert list(q) == expected
        shutil.rmtree(tmp_path / "image")


@pytest.mark.parametrize("power", [False, True])
def test_a_close_that_is_stopped_while_it_copies_a_chunk_leaves_no_orphan(tmp_path, power):
    """The half copied file would be offered as records that were lost, though all are still in the queue."""
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    q = Queue(root / "q", chunk_size=300, _files=disk)
    q.put_many([b"%d" % number * 20 for number in range(20)])
    ahead, behind = q.session(), q.session()
    ahead.get_many(2)
    behind.get_many(6)
    behind.commit()  # a gap behind what the other holds
    begin, expected = len(disk.calls), [b"%d" % number * 20 for number in (0, 1, *range(8, 20))]
    q.close()
    assert any(call.kind == "link" for call in disk.calls[begin:])
    for stop in range(begin, len(disk.calls) + 1):
        for chance in range(20 if power else 1):
            image(disk.calls[:stop], str(root), tmp_path / "image", random.Random(f"{stop}.{chance}") if power else None)
            with Queue(tmp_path / "image" / "q") as opened:
                assert list(opened) == expected
                assert (opened.recover(), opened.verify().orphans) == ([], []), f"stopped after call {stop}, chance {chance}"
            shutil.rmtree(tmp_path / "image")


def test_what_is_put_into_a_chunk_that_was_emptied_is_durable_after_close(tmp_path):
    """The pointers come out the same as before, so storing them is not what syncs the record."""
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", chunk_size=64, _files=disk) as q:
        q.put(b"old")
    with Queue(root / "q", chunk_size=64, _files=disk) as q:
        assert q.get() == b"old"
        q.put(b"new")
    for chance in range(50):
        image(disk.calls, str(root), tmp_path / "image", random.Random(chance))
        with Queue(tmp_path / "image" / "q") as q:
            assert list(q) == [b"new"]
        shutil.rmtree(tmp_path / "image")


def test_a_lease_whose_copy_empties_its_chunk_leaves_no_file_behind(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put_many([b"a" * 28, b"b" * 28])
    with Queue(tmp_path / "q", chunk_size=40) as q:
        assert list(q.lease("run", max_bytes=1)) == [b"a" * 28]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "q.2", "q.batches", "q.log"]
