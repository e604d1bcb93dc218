"""Sessions: what a session puts and takes happens together, at its commit, or not at all; and nobody sees it before."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from damage import tree
from disk import NoSync
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain import crashed, forget_log, is_plain, numbers, plain
from stride import examples

from qewqew_core import (
    BadArgument,
    BadKey,
    BadRecord,
    Batch,
    BatchConflict,
    Broken,
    Closed,
    DiskFull,
    Empty,
    Full,
    Queue,
    RecordTooLarge,
    inspect,
)
from qewqew_core.disk.files import Files, failed_sync
from qewqew_core.limits import LIMITS

Make = Callable[..., Queue]


@pytest.fixture(params=itertools.product([16, 40, 4096], ["commit", "never"]), ids=lambda param: "{}-{}".format(*param))
def make(request, tmp_path) -> Make:
    """Opens the one queue of the test, each time with the same chunk size and sync mode unless told otherwise."""
    chunk_size, sync = request.param
    return lambda **more: Queue(tmp_path / "q", **{"chunk_size": chunk_size, "sync": sync, "_files": NoSync(), **more})


# Committing


@pytest.mark.req("S1", "T1")
def test_puts_and_gets_over_many_chunks_happen_together_at_the_commit_and_not_before(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 40))
        session = q.session()
        assert session.get() == b"0"
        assert session.get_many(14) == numbers(1, 15)
        session.put(b"new")
        assert session.put_many(record for record in numbers(100, 130)) == 30
        with Queue(crashed(tmp_path), _files=NoSync()) as image:
            assert list(image) == numbers(0, 40), "nothing has happened yet"
        assert session.commit() == 31
        expected = [*numbers(15, 40), b"new", *numbers(100, 130)]
        assert list(q) == expected
        with Queue(crashed(tmp_path), _files=NoSync()) as image:
            assert list(image) == expected, "all of it has"
    is_plain(tmp_path / "q", expected)


def test_a_session_commits_several_times_and_each_is_a_transaction_of_its_own(make, tmp_path):
    with make() as q, q.session() as session:
        for turn in range(1, 7):
            assert session.put_many(numbers(3 * turn - 3, 3 * turn)) == 3
            assert session.commit() == 3
            assert session.get() == b"%d" % (2 * turn - 2)
            assert session.get() == b"%d" % (2 * turn - 1)
            assert session.commit() == 0
            session.put(b"lost")
            assert session.get() == b"%d" % (2 * turn)
            session.rollback()
            with Queue(crashed(tmp_path), _files=NoSync()) as image:
                assert list(image) == list(q) == numbers(2 * turn, 3 * turn)


@pytest.mark.req("S3")
def test_a_with_block_commits_at_its_end_and_rolls_back_what_raises(make):
    with make() as q:
        with q.session() as session:
            session.put_many(numbers(0, 3))
        assert list(q) == numbers(0, 3)
        with pytest.raises(ZeroDivisionError), q.session() as session:
            session.put(b"%d" % (len(session.get_many(2)) // 0))
        assert list(q) == numbers(0, 3)
        with q.session() as session:
            session.get()
            session.commit()
            session.get()
        assert list(q) == numbers(2, 3)


def test_close_without_a_commit_rolls_back_and_a_second_close_is_none(make):
    with make() as q:
        q.put_many(numbers(0, 3))
        session = q.session()
        session.put(b"lost")
        assert session.get_many(9) == numbers(0, 3)
        session.close()
        session.close()
        assert list(q) == numbers(0, 3)
        for call in (session.get, session.commit, session.rollback, lambda: session.put(b"x"), lambda: session.get_many(1)):
            with pytest.raises(Closed, match=r"the session is closed; open another one with Queue.session\(\)"):
                call()


def test_a_commit_of_nothing_writes_nothing(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        before = (tmp_path / "q.wal").read_bytes()
        with q.session() as session:
            assert session.commit() == 0
            session.get()
            session.rollback()
            session.rollback()
        assert (tmp_path / "q.wal").read_bytes() == before


@pytest.mark.req("T18")
@pytest.mark.parametrize(("chunk_size", "largest"), [(64, 52), (1 << 20, 65_535)])
def test_a_put_that_is_refused_adds_nothing_and_the_session_goes_on(tmp_path, chunk_size, largest):
    with Queue(tmp_path / "q", chunk_size=chunk_size) as q, q.session() as session:
        before = tree(tmp_path)
        for size in (largest + 1, 1 << 31):
            with pytest.raises(RecordTooLarge, match=f"{size:,} bytes; .*at most {largest:,}"):
                session.put(bytes(size))
        assert session.commit() == 0
        assert tree(tmp_path) == before
        session.put(b"a")
        with pytest.raises(BadRecord):
            session.put_many([b"b", None])
        with pytest.raises(BadArgument, match="use put"):
            session.put_many(b"abc")
        with pytest.raises(ValueError, match="of the generator"):
            session.put_many(records_that_raise())
        for wrong in (0, -1, True, 1.5):
            with pytest.raises(BadArgument):
                session.get_many(wrong)
        session.put_many([b"b", b"", bytearray(b"c"), memoryview(b"xdx")[1:2]])
        assert session.commit() == 5
        assert list(q) == [b"a", b"b", b"", b"c", b"d"]


def records_that_raise():
    yield b"first"
    raise ValueError("of the generator")


@pytest.mark.parametrize(
    ("sizes", "max_records", "max_bytes", "expected"),
    [([5, 5, 5], 2, None, 2), ([5, 5, 5], 3, 10, 2), ([5, 5, 5], 3, 9, 1), ([5, 5, 5], 3, 1, 1), ([5] * 50, 1000, 249, 49)],
)
def test_get_many_of_a_session_stops_at_the_same_limits_and_passes_over_what_others_hold(
    tmp_path, sizes, max_records, max_bytes, expected
):
    records = [bytes([number]) * size for number, size in enumerate(sizes)]
    held = [b"held"] * 3
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many([*records[:1], *held, *records[1:]])
        other, mine = q.session(), q.session()
        assert mine.get() == records[0]
        assert other.get_many(3) == held
        mine.rollback()
        assert mine.get_many(max_records, max_bytes) == records[:expected]
        mine.rollback()
        assert mine.get_many(len(records)) == records


@pytest.mark.req("S5")
def test_get_of_a_session_says_whether_the_queue_is_empty_or_all_is_held(tmp_path):
    with Queue(tmp_path / "q") as q, q.session() as one, q.session() as other:
        with pytest.raises(Empty, match="the queue is empty"):
            one.get()
        q.put_many([b"", b"None", b"0"])
        assert [one.get() for _ in range(3)] == [b"", b"None", b"0"], "records that look like nothing"
        for take in (other.get, one.get, q.get, q.peek):
            with pytest.raises(Empty, match="the 3 records in it are held by sessions"):
                take(timeout=0.01)
        assert other.get_many(2) == []


# Isolation


@pytest.mark.req("S2")
def test_what_is_put_is_invisible_to_all_until_it_is_committed_also_to_its_session(make, tmp_path):
    with make() as q, ThreadPoolExecutor(1) as thread:
        session = q.session()
        session.put_many(numbers(0, 50))

        def nobody_sees_it() -> None:
            assert (len(q), bool(q), list(q), q.get_many(9)) == (0, False, [], [])
            assert (q.lease("key"), q.clear(), q.get_if(bool), q.stats().records) == (None, 0, None, 0)
            assert inspect(tmp_path / "q").records == 0
            for take in (q.get, q.peek):
                with pytest.raises(Empty):
                    take()

        nobody_sees_it()
        thread.submit(nobody_sees_it).result()
        with pytest.raises(Empty):
            session.get()
        assert session.get_many(9) == []
        session.commit()
        assert thread.submit(session.get).result() == b"0"
        assert list(q) == numbers(1, 50)
        session.close()


@pytest.mark.req("S2")
def test_what_is_held_is_invisible_to_everybody_and_only_what_lies_behind_it_is_taken(make, tmp_path):
    with make() as q, ThreadPoolExecutor(1) as thread:
        q.put_many(numbers(0, 20))
        session, other = q.session(), q.session()
        assert session.get_many(7) == numbers(0, 7)
        assert (len(q), list(q), q.peek()) == (13, numbers(7, 20), b"7")
        assert (q.stats().records, inspect(tmp_path / "q").records) == (20, 20), "they are still there"
        assert thread.submit(q.get).result() == b"7"
        assert thread.submit(q.get_if, lambda record: record == b"8").result() == b"8"
        assert thread.submit(q.get_many, 2).result() == numbers(9, 11)
        assert thread.submit(other.get).result() == b"11"
        batch = thread.submit(q.lease, "key", 3).result()
        assert list(batch) == numbers(12, 15)
        assert thread.submit(q.clear).result() == 5
        assert (len(q), list(q), q.get_many(9), q.lease("other")) == (0, [], [], None)
        session.rollback()
        assert list(q) == numbers(0, 7)
        other.close()
        assert list(q) == [*numbers(0, 7), b"11"]
        assert q.verify().ok
    is_plain_besides_batches(tmp_path / "q", [*numbers(0, 7), b"11"])


def is_plain_besides_batches(path: Path, expected: list[bytes]) -> None:
    assert plain(path) == expected
    with Queue(path, _files=NoSync()) as q:
        assert list(q) == expected
        assert q.verify().ok


# Rolling back


@pytest.mark.req("S3", "T21")
def test_rolled_back_records_are_at_the_front_in_their_order_round_after_round(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 30))
        with q.session() as session:
            for count in (1, 5, 12, 30, 3):
                assert [session.get() for _ in range(count)] == numbers(0, count)
                session.rollback()
                assert list(q) == numbers(0, 30)
        one, two, three = (q.session() for _ in range(3))
        for _ in range(4):
            taken = {one: [], two: [], three: []}
            for session, number in zip([one, two, three, two, one, three, three, one] * 2, range(16), strict=False):
                assert session.get() == b"%d" % number
                taken[session].append(number)
            two.rollback()
            assert list(q) == [b"%d" % number for number in [*taken[two], *range(16, 30)]]
            one.rollback()
            assert list(q) == [b"%d" % number for number in [*sorted(taken[one] + taken[two]), *range(16, 30)]]
            three.close()
            three = q.session()
            assert list(q) == numbers(0, 30)
    is_plain(tmp_path / "q", numbers(0, 30))


def test_records_put_while_others_are_held_stay_behind_them(make):
    with make() as q:
        q.put_many(numbers(0, 3))
        session = q.session()
        session.get_many(3)
        q.put_many(numbers(3, 6))
        assert q.get() == b"3"
        session.rollback()
        assert list(q) == [*numbers(0, 3), *numbers(4, 6)]


def test_a_session_that_is_forgotten_rolls_back_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(LIMITS, "spill_bytes", 4)
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 5))
        session = q.session()
        session.get_many(3)
        session.put_many(numbers(0, 9))
        session.put(b"lost")
        sessions = [session]
        del session
        with pytest.warns(ResourceWarning, match="a session of queue .* was not closed"):
            sessions.clear()
        assert q.get() == b"0"
        assert list(q) == numbers(1, 5)
    is_plain(tmp_path / "q", numbers(1, 5))


def test_a_session_that_has_nothing_open_may_be_forgotten(tmp_path, recwarn):
    with Queue(tmp_path / "q") as q:
        session = q.session()
        session.put(b"0")
        session.commit()
        del session
        gc.collect()
        q.session()
    assert [warning for warning in recwarn if warning.category is ResourceWarning] == []


# Out of order

ENDS = [
    (order, outcome)
    for order in itertools.permutations(range(3))
    for outcome in itertools.product(["commit", "rollback"], repeat=3)
]


@pytest.mark.req("S3", "S13", "T2")
@pytest.mark.parametrize("chunk_size", [16, 4096])
def test_sessions_end_in_any_order_with_any_outcome_and_after_a_crash_and_a_close_it_is_the_same(tmp_path, chunk_size):
    """Two in a chunk of 16, all in one of 4096: gaps within chunks, chunks that go from the middle, a first chunk that stays."""
    for number, (order, outcome) in enumerate(ENDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        q = Queue(folder / "q", chunk_size=chunk_size, _files=NoSync())
        q.put_many(numbers(0, 11))
        sessions = [q.session() for _ in range(3)]
        left = dict.fromkeys(range(11))
        held = [[], [], []]
        for record, (session, taken) in enumerate([*zip(sessions, held, strict=True)] * 3):
            assert session.get() == b"%d" % record
            taken.append(record)
        for end, (which, what) in enumerate(zip(order, outcome, strict=True)):
            sessions[which].put(b"p%d" % which)
            getattr(sessions[which], what)()
            if what == "commit":
                for record in held[which]:
                    del left[record]
                left[b"p%d" % which] = None
            held[which].clear()
            expected = [record if type(record) is bytes else b"%d" % record for record in left]
            visible = [
                record if type(record) is bytes else b"%d" % record for record in left if record not in itertools.chain(*held)
            ]
            assert list(q) == visible, (order, outcome, end)
            assert len(q) == len(visible)
            assert q.verify().problems == []
            with Queue(crashed(folder), _files=NoSync()) as image:
                assert list(image) == expected, (order, outcome, end)
                assert image.verify().problems == image.verify().orphans == []
            assert plain(tmp_path / f"{number}.image" / "q") == expected
        q.close()
        is_plain(folder / "q", expected)


def test_gaps_are_still_there_when_a_crash_and_another_one_follow(tmp_path):
    """Each opening finds them in the log, also in a snapshot; none delivers a record again."""
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many(numbers(0, 10))
        one, two, three = (q.session() for _ in range(3))
        for session in (one, two, three, one, two):
            session.get()
        two.commit()  # 1 and 4
        path = crashed(tmp_path)
    left = [b"0", b"2", b"3", *numbers(5, 10)]
    for turn in range(3):
        q = Queue(path, chunk_size=4096)
        assert list(q) == left
        with q.session() as front, q.session() as behind:
            front.get()
            left.remove(behind.get())
            behind.commit()
            front.rollback()
        if turn == 1:
            q._chain.rotate()
        path = crashed(path.parent, str(turn))
        q.close()
    with Queue(path) as q:
        assert list(q) == left
        assert q.get_many(2) == left[:2]
    is_plain(path, left[2:])


@pytest.mark.req("T10")
def test_many_empty_records_are_counted_exactly(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64, _files=NoSync()) as q:
        q.put_many([b""] * 300)
        one, two = q.session(), q.session()
        for _ in range(4):
            assert (one.get_many(70), two.get_many(55), one.get()) == ([b""] * 70, [b""] * 55, b"")
            assert len(q) == 174
            two.rollback()
            assert (len(q), len(list(q))) == (229, 229)
            q._chain.rotate()
            one.rollback()
            assert len(q) == 300
        one.get_many(10)
        two.get_many(20)
        two.commit()
        q._chain.rotate()
        path = crashed(tmp_path)
    for where in (path, tmp_path / "q"):
        with Queue(where, _files=NoSync()) as q:
            assert (len(q), q.stats().records, len(q.get_many(1000))) == (280, 280, 280)


def test_a_full_disk_at_close_leaves_the_gaps_in_the_log_and_the_next_close_removes_them(tmp_path):
    class Filling(Files):
        full = False

        def open(self, path: str, *, new: bool = False) -> int:
            if self.full and new:
                raise OSError(errno.ENOSPC, "made to fail", path)
            return super().open(path, new=new)

    disk = Filling()
    with Queue(tmp_path / "q", _files=disk) as q:
        q.put_many(numbers(0, 6))
        front, behind = q.session(), q.session()
        front.get()
        behind.get_many(2)
        behind.commit()
        disk.full = True
    left = [b"0", *numbers(3, 6)]
    with Queue(tmp_path / "q") as q:
        assert list(q) == left
    is_plain(tmp_path / "q", left)


# Closing


@pytest.mark.req("S8")
def test_closing_the_queue_rolls_open_sessions_back_and_they_are_refused_from_then_on(make, tmp_path):
    q = make()
    q.put_many(numbers(0, 30))
    one, two = q.session(), q.session()
    one.get_many(10)
    two.get_many(5)
    one.put(b"lost")
    q.close()
    calls = [one.get, one.commit, one.rollback, lambda: one.put(b"x"), lambda: one.put_many([b"x"]), lambda: two.get_many(1)]
    for call in [*calls, q.session]:
        with pytest.raises(Closed, match="the queue is closed"):
            call()
    one.close()
    with pytest.raises(Closed), two:
        pass
    is_plain(tmp_path / "q", numbers(0, 30))


def test_closing_the_queue_ends_a_session_that_waits(tmp_path):
    q = Queue(tmp_path / "q", max_records=1)
    q.put(b"0")
    holding, taking, putting = q.session(), q.session(), q.session()
    assert holding.get() == b"0"
    putting.put(b"1")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(taking.get, None), pool.submit(putting.commit, None, None)]
        q.close()
        for one in waiting:
            with pytest.raises(Closed):
                one.result(300)


@pytest.mark.req("T2", "T17")
def test_after_everything_was_taken_by_sessions_no_file_is_left(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 100))
        one, two = q.session(), q.session()
        one.get_many(30)
        two.get_many(1000)
        two.commit()
        assert list(q) == []
        one.commit()
        assert len(list(tmp_path.glob("q.[0-9]*"))) == 1, "chunks of which all was taken are removed at once"
        with Queue(crashed(tmp_path), _files=NoSync()) as image:
            assert list(image) == []
            image.put(b"new")
            assert image.get_many(9) == [b"new"]
    assert list(tmp_path.iterdir()) == []


# Leases

HELD = {"the front": (0, 5), "the middle": (6, 4), "over chunks": (3, 14), "all but the first": (1, 19), "the end": (15, 5)}


@pytest.mark.parametrize("limits", [{}, {"max_records": 1}, {"max_records": 8}, {"max_bytes": 9}], ids=str)
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("chunk_size", [16, 4096])
def test_a_lease_takes_what_nobody_holds_and_ends_like_any_other(tmp_path, chunk_size, held, limits):
    """After each of: acknowledged, put back, returned and leased again, crashed; with the session committed or rolled back."""
    start, count = held
    for end, outcome in itertools.product(["ack", "put_back", "nack"], ["commit", "rollback"]):
        folder = tmp_path / f"{end} {outcome}"
        folder.mkdir()
        with Queue(folder / "q", chunk_size=chunk_size, _files=NoSync()) as q:
            q.put_many(numbers(10, 30))
            before, session = q.session(), q.session()
            if start:
                before.get_many(start)
            holds = session.get_many(count)
            before.close()
            free = [record for record in numbers(10, 30) if record not in holds]
            batch = q.lease("key", **limits)
            size = min(len(free), limits.get("max_records") or (4 if limits else 20))
            taken = free[:size]
            assert list(batch) == taken
            assert (batch.records, batch.bytes) == (size, sum(map(len, taken)))
            assert list(q) == free[size:]
            manifest_is_right(batch, taken)
            again = q.lease("key", max_records=3)
            assert (again.id, again.attempt, list(again)) == (batch.id, 1, taken)
            there = sorted(holds + free[size:], key=int)
            with Queue(crashed(folder), _files=NoSync()) as image:
                assert (list(image), list(image.batch(batch.id))) == (there, taken)
                assert image.verify().problems == image.verify().orphans == []
            getattr(session, outcome)()
            left = free[size:] if outcome == "commit" else there
            if end == "nack":
                batch.nack("try again")
                batch = q.lease("key", max_records=1)
                assert (list(batch), batch.attempt) == (taken, 2)
            else:
                getattr(batch, end)()
                left = taken + left if end == "put_back" else left
            assert list(q) == left
            assert q.verify().problems == q.verify().orphans == []
        assert plain(folder / "q") == left
        with Queue(folder / "q", chunk_size=chunk_size, _files=NoSync()) as q:
            assert list(q) == left
            if end == "nack":
                assert list(q.batch(batch.id)) == taken
            assert q.verify().problems == q.verify().orphans == []
        shutil.rmtree(folder)


def manifest_is_right(batch: Batch, records: list[bytes]) -> None:
    """The segments that it names hold the records, read with nothing but the format."""
    body = json.loads(Path(batch.manifest_path).read_text())
    found = []
    for segment in body["segments"]:
        data = Path(batch.manifest_path).with_name(segment["file"]).read_bytes()
        (head,) = struct.unpack_from(">i", data)
        assert head <= segment["start"] < segment["end"] <= len(data)
        at, before = segment["start"], len(found)
        while at < segment["end"]:
            (length,) = struct.unpack_from(">H", data, at)
            found.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        assert len(found) - before == segment["records"]
    assert found == records
    assert (body["records"], body["bytes"]) == (len(records), sum(map(len, records)))


def test_a_lease_of_whole_chunks_leaves_those_that_a_session_holds(tmp_path):
    with Queue(tmp_path / "q", chunk_size=16) as q:  # two records in each chunk
        q.put_many(numbers(0, 8))
        before, session = q.session(), q.session()
        before.get_many(2)
        assert session.get_many(2) == numbers(2, 4)
        before.close()
        batch = q.lease("key")
        assert list(batch) == [*numbers(0, 2), *numbers(4, 8)]
        assert len(json.loads(Path(batch.manifest_path).read_text())["segments"]) == 3
        assert q.lease("other") is None
        q.put(b"8")
        session.rollback()
        assert list(q) == [b"2", b"3", b"8"]
        batch.put_back()
        assert list(q) == [*numbers(0, 2), *numbers(4, 8), b"2", b"3", b"8"]
    is_plain(tmp_path / "q", [*numbers(0, 2), *numbers(4, 8), b"2", b"3", b"8"])


# Clearing, iterating, roll-over


@pytest.mark.req("T22")
def test_clear_leaves_what_sessions_hold_and_those_are_there_after_a_rollback(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 30))
        before, session = q.session(), q.session()
        before.get_many(10)
        assert session.get_many(7) == numbers(10, 17)
        before.rollback()
        assert q.clear() == 23
        assert q.clear() == 0
        q.put(b"new")
        assert list(q) == [b"new"]
        with Queue(crashed(tmp_path), _files=NoSync()) as image:
            assert list(image) == [*numbers(10, 17), b"new"]
        session.rollback()
        assert list(q) == [*numbers(10, 17), b"new"]
        session.get_many(8)
        session.commit()
        assert (q.clear(), q.stats().records) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_iterating_ends_with_an_error_when_sessions_take_let_go_or_commit_meanwhile(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        q.put_many(numbers(0, 100))
        session, other = q.session(), q.session()
        other.get()
        for disturb in (session.get, lambda: session.get_many(3), session.commit, other.rollback, q.clear):
            records = iter(q)
            next(records)
            disturb()
            with pytest.raises(RuntimeError, match="during the iteration"):
                list(records)


def test_puts_of_others_and_uncommitted_ones_do_not_disturb_an_iteration(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q, q.session() as session:
        q.put_many(numbers(0, 100))
        records = iter(q)
        next(records)
        session.put(b"new")
        session.commit()
        q.put(b"newer")
        assert list(records)[:99] == numbers(1, 100)


def test_records_that_are_held_outlast_chunks_that_come_and_go_around_them(make, tmp_path):
    """Puts begin new chunks, takes remove those behind the held ones: the held chunk stays, first of the chain."""
    with make() as q:
        q.put_many(numbers(0, 2))
        session = q.session()
        assert session.get_many(2) == numbers(0, 2)
        for number in range(100, 140):
            q.put(b"%d" % number)
            assert q.get() == b"%d" % number
        with q.session() as other:
            for number in range(140, 180):
                other.put(b"%d" % number)
                other.commit()
                assert other.get() == b"%d" % number
                other.commit()
        assert (len(q), q.stats().records) == (0, 2)
        with Queue(crashed(tmp_path), _files=NoSync()) as image:
            assert list(image) == numbers(0, 2)
        session.rollback()
        q.put(b"2")
        assert list(q) == numbers(0, 3)
    is_plain(tmp_path / "q", numbers(0, 3))


@pytest.mark.req("S16", "T4")
@pytest.mark.parametrize("spill", [50, 1 << 20])
def test_two_sessions_that_put_over_the_end_of_a_chunk_do_not_mix_their_records(make, tmp_path, monkeypatch, spill):
    """What is too much for memory goes to files of each; the commit gives them their place in the chain."""
    monkeypatch.setattr(LIMITS, "spill_bytes", spill)
    with make() as q:
        one, two = q.session(), q.session()
        for number in range(20):
            one.put(b"1%02d" % number)
            two.put(b"2%02d" % number)
            q.put(b"0%02d" % number)
        assert {name.split(".")[0] for name in spilled(tmp_path)} == ({"1", "2"} if spill == 50 else set())
        two.commit()
        one.commit()
        expected = [b"%d%02d" % (who, number) for who in (0, 2, 1) for number in range(20)]
        assert list(q) == expected
        assert q.verify().problems == []
    is_plain(tmp_path / "q", expected)


# Keys


def test_a_commit_under_a_known_key_does_nothing_and_what_it_took_is_there_again(make, tmp_path):
    with make() as q:
        q.put_many(numbers(0, 4))
        with q.session() as session:
            session.get()
            session.put_many([b"a", b"b"])
            assert session.commit(key="step 1") == 2
            assert session.get_many(2) == numbers(1, 3)
            session.put_many([b"c"] * 5)
            assert session.commit(key="step 1") == 2, "what the first commit returned"
            assert list(q) == [*numbers(1, 4), b"a", b"b"]
            assert session.commit() == 0, "nothing of it is left to commit"
        assert q.put_many([b"x"] * 7, key="step 1") == 2, "put_many knows the key too"
        assert q.put_many([b"p"] * 3, key="step 2") == 3
        path = crashed(tmp_path)
    for queue in (make(), Queue(path)):
        with queue as q, q.session() as session:
            session.get_many(3)
            session.put(b"y")
            assert session.commit(key="step 2") == 3, "and the session knows those of put_many"
            assert session.commit(key="step 1") == 2
            assert list(q) == [*numbers(1, 4), b"a", b"b", b"p", b"p", b"p"]


def test_a_key_is_remembered_for_a_commit_that_only_takes_and_for_an_empty_one(make):
    with make() as q:
        q.put_many(numbers(0, 3))
        with q.session() as session:
            session.get()
            assert session.commit(key="takes") == 0
            assert session.commit(key="nothing") == 0
    with make() as q, q.session() as session:
        session.get()
        assert session.commit(key="takes") == 0
        session.put(b"x")
        assert session.commit(key="nothing") == 0
        assert list(q) == numbers(1, 3)


@pytest.mark.parametrize("key", ["", "a/b", "a\nb", "x" * 513, 7])
def test_a_hostile_key_is_refused_and_the_session_may_commit_without_it(tmp_path, key):
    with Queue(tmp_path / "q") as q, q.session() as session:
        session.put(b"0")
        with pytest.raises(BadKey):
            session.commit(key=key)
        assert not q
        assert session.commit() == 1


def test_the_key_of_a_commit_that_was_refused_is_free(tmp_path):
    with Queue(tmp_path / "q", max_records=1) as q, q.session() as session:
        session.put_many([b"a", b"b"])
        with pytest.raises(Full):
            session.commit(key="k")
        session.rollback()
        session.put(b"c")
        assert session.commit(key="k") == 1
        assert list(q) == [b"c"]


# Puts that are too much for memory


@pytest.fixture
def small_spill(monkeypatch):
    monkeypatch.setattr(LIMITS, "spill_bytes", 50)


def spilled(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("q.spill/*"))


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("chunk_size", [40, 100, 4096])
def test_what_is_too_much_for_memory_goes_to_files_that_the_commit_moves_into_the_queue(tmp_path, small_spill, chunk_size, sync):
    with Queue(tmp_path / "q", chunk_size=chunk_size, sync=sync, _files=NoSync()) as q:
        q.put_many(numbers(0, 5))
        with q.session() as session:
            session.get_many(2)
            for number in range(100, 400):
                session.put(b"%d" % number)
            files = spilled(tmp_path)
            assert len(files) > (5 if chunk_size < 4096 else 0)
            inodes = {(tmp_path / "q.spill" / name).stat().st_ino for name in files}
            assert list(q) == numbers(2, 5)
            with Queue(crashed(tmp_path), _files=NoSync()) as image:
                assert list(image) == numbers(0, 5)
            assert not (tmp_path.with_name(f"{tmp_path.name}.image") / "q.spill").exists()
            assert session.commit() == 300
            assert spilled(tmp_path) == []
            assert inodes <= {path.stat().st_ino for path in tmp_path.glob("q.*")}, "moved, not written again"
            assert list(q) == [*numbers(2, 5), *numbers(100, 400)]
            with Queue(crashed(tmp_path), _files=NoSync()) as image:
                assert list(image) == [*numbers(2, 5), *numbers(100, 400)]
                assert image.verify().problems == []
        q.put(b"last")
        assert q.get_many(200) == [*numbers(2, 5), *numbers(100, 297)]
        assert q.verify().problems == q.verify().orphans == []
    is_plain(tmp_path / "q", [*numbers(297, 400), b"last"])


@pytest.mark.req("T17")
def test_a_rollback_removes_the_files_and_close_the_directory(tmp_path, small_spill):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        one, two = q.session(), q.session()
        for session in (one, two):
            for number in range(100):
                session.put(b"%d" % number)
        files = spilled(tmp_path)
        assert {name.split(".")[0] for name in files} == {"1", "2"}
        one.rollback()
        assert spilled(tmp_path) == [name for name in files if name.startswith("2.")]
        one.put_many(numbers(100, 150))
        one.put(b"150")
        one.put(b"151")
        assert one.commit() == 52
        assert list(q) == numbers(100, 152)
        assert spilled(tmp_path) != []
    is_plain(tmp_path / "q", numbers(100, 152))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.suffix[1:].isdecimal()) == [
        "q",
        "q.reserve",
        "q.stamp",
        "q.wal",
    ]


def test_a_known_key_drops_the_files_too(tmp_path, small_spill):
    with Queue(tmp_path / "q", chunk_size=64) as q, q.session() as session:
        q.put_many([b"first"], key="k")
        for number in range(100):
            session.put(b"%d" % number)
        assert session.commit(key="k") == 1
        assert spilled(tmp_path) == []
        session.put(b"second")
        assert session.commit() == 1
        assert list(q) == [b"first", b"second"]


@pytest.mark.req("T17")
def test_what_a_crash_leaves_of_files_that_were_being_moved_is_removed_by_the_next_opening(tmp_path, small_spill):
    """Stopped before the commit that refers to them, they are chunk files outside the chain that say that they are empty."""

    class Stopping(Files):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if source.endswith("1.3"):
                shutil.copytree(tmp_path, tmp_path.with_name("crashed"))

    with Queue(tmp_path / "q", chunk_size=40, _files=Stopping()) as q, q.session() as session:
        q.put(b"0")
        for number in range(100):
            session.put(b"%d" % number)
        session.commit()
    image = tmp_path.with_name("crashed")
    assert len(list(image.glob("q.[0-9]*"))) == 4
    assert len(list(image.glob("q.spill/*"))) > 1
    (image / "q.lease").mkdir()
    shutil.copy(image / "q.30002", image / "q.lease" / "q.30003")  # of a lease that did not come
    (image / "q.wal.tmp").write_bytes(b"half a log")
    with Queue(image / "q", chunk_size=40) as q:
        assert sorted(path.name for path in image.iterdir()) == ["q", "q.30001", "q.reserve", "q.stamp", "q.wal"]
        assert list(q) == [b"0"]
        assert q.verify().orphans == []
    is_plain(image / "q", [b"0"])
    shutil.rmtree(image)


def test_a_strange_file_where_the_directory_belongs_is_named_and_kept(tmp_path, small_spill):
    with Queue(tmp_path / "q") as q, q.session() as session:
        (tmp_path / "q.spill").write_bytes(b"not ours")
        session.put_many([b"x" * 40])
        with pytest.raises(OSError, match="is in the way"):
            session.put_many([b"y" * 40])
        assert session.commit() == 1, "what was put before is still there"
        assert list(q) == [b"x" * 40]
        session.put(b"z")
    assert (tmp_path / "q.spill").read_bytes() == b"not ours"


def test_a_full_disk_while_spilling_adds_nothing_and_the_session_goes_on(tmp_path, small_spill):
    class Filling(Files):
        left = 1 << 60

        def allocate(self, fd: int, size: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "made to fail")
            super().allocate(fd, size)

    disk = Filling()
    with Queue(tmp_path / "q", chunk_size=64, _files=disk) as q:
        q.put_many(numbers(0, 3))
        session = q.session()
        session.get()
        for number in range(100, 110):
            session.put(b"%d" % number)
        session.put(b"x" * 50)
        files, disk.left = spilled(tmp_path), 0
        with pytest.raises(DiskFull):
            session.put(b"y" * 50)
        assert spilled(tmp_path) == files
        assert q.get() == b"1", "taking goes on"
        with pytest.raises(DiskFull):
            session.commit()
        assert list(q) == [b"2"]
        disk.left = 1 << 60
        assert session.commit() == 11
        assert list(q) == [b"2", *numbers(100, 110), b"x" * 50]
    is_plain(tmp_path / "q", [b"2", *numbers(100, 110), b"x" * 50])


MEMORY = """
import sys
from pathlib import Path
from qewqew_core import Queue

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

with Queue(sys.argv[1], sync="never") as q, q.session() as session:
    session.put_many([bytes(10_000)] * 300)
    session.put_many([bytes(10_000)] * 300)
    session.rollback()
    before = peak()
    for number in range(10_500):
        session.put(number.to_bytes(4) * 2_500)
    uncommitted = peak() - before
    assert session.commit() == 10_500
    print(len(q), q.stats().bytes, uncommitted, peak() - before)
    q.clear()
"""


def test_a_session_that_puts_a_hundred_megabytes_keeps_little_of_it_in_memory(tmp_path):
    command = [sys.executable, "-c", MEMORY, tmp_path / "q"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    records, size, uncommitted, committed = map(int, result.stdout.split())
    assert (records, size) == (10_500, 105_000_000)
    assert uncommitted < 20
    assert committed < 20


# Bounds


def test_a_commit_beyond_the_bound_is_refused_and_nothing_has_happened(tmp_path):
    with Queue(tmp_path / "q", max_records=5, max_bytes=20) as q:
        q.put_many(numbers(0, 4))
        with q.session() as session:
            session.put_many([b"a", b"b"])
            with pytest.raises(Full, match=r"4 records of 4 bytes wait already \(max_records=5, max_bytes=20\)"):
                session.commit()
            assert list(q) == numbers(0, 4)
            session.rollback()
            session.put(b"x" * 17)
            with pytest.raises(Full):
                session.commit()
            session.rollback()
            session.put(b"x" * 16)
            assert session.commit() == 1, "exactly at both bounds"
            with pytest.raises(Full):
                q.put(b"")
            session.get_many(2)
            with pytest.raises(Full):
                q.put(b"")  # what is held is still in the queue
            session.put_many([b"c", b"d"])
            assert session.commit() == 2, "it makes its own room"
        assert list(q) == [b"2", b"3", b"x" * 16, b"c", b"d"]


@pytest.mark.req("T18")
@pytest.mark.parametrize("spill", [1, 1 << 20])
def test_a_commit_for_which_no_chunk_id_is_free_is_refused_and_can_be_made_when_there_are_some(tmp_path, monkeypatch, spill):
    """Twenty ids: 65,533 files take a minute."""
    monkeypatch.setattr("qewqew_core.formats.chunk.MAX_ID", 21)
    monkeypatch.setattr("qewqew_core.formats.chunk.OUR_FIRST", 2)
    monkeypatch.setattr(LIMITS, "spill_bytes", spill)
    with Queue(tmp_path / "q", chunk_size=13) as q, q.session() as session:  # one record fills a chunk
        q.put_many(numbers(0, 9) + [b"x"] * 10)
        for _ in range(2):
            session.put(b"y")
        with pytest.raises(Full, match="all chunk ids, 20, are in use"):
            session.commit()
        assert len(q) == 19
        assert q.get() == b"0"
        assert session.commit() == 2
        assert q.get_many(99) == [*numbers(1, 9), *[b"x"] * 10, b"y", b"y"]


def test_what_never_fits_is_refused_at_once_whatever_the_timeout(tmp_path):
    with Queue(tmp_path / "q", max_records=3, max_bytes=10) as q:
        for records in ([b""] * 4, [b"x" * 11]):
            with pytest.raises(Full, match="never fit"):
                q.put_many(records, timeout=None)
            session = q.session()
            session.put_many(records)
            with pytest.raises(Full, match="never fit"):
                session.commit(timeout=None)
            session.close()
        with pytest.raises(Full, match="never fit"):
            q.put(b"x" * 11, timeout=None)
        assert not q


@pytest.mark.parametrize("make_room", ["get", "get_many", "lease", "clear", "session"])
def test_who_waits_for_room_gets_it_from_whoever_takes(tmp_path, make_room):
    with Queue(tmp_path / "q", max_records=4, chunk_size=16) as q, ThreadPoolExecutor(3) as pool:
        q.put_many(numbers(0, 4))
        with pytest.raises(Full):
            q.put(b"late", timeout=0.05)
        session, taker = q.session(), q.session()
        session.put(b"a")
        calls = [(session.commit, None, None), (q.put, b"b", 60), (q.put_many, [b"c"], None, 60)]
        waiting = [pool.submit(*call) for call in calls]
        for turn in range(3):
            if make_room == "session":
                taker.get()
                taker.commit()
            elif make_room == "lease":
                q.lease(f"run {turn}", max_records=1)
            elif make_room == "clear":
                q.clear()
            else:
                assert q.get_many(1) if make_room == "get_many" else q.get()
        assert [one.result(300) for one in waiting] == [1, None, 1]
        assert {b"a", b"b", b"c"} >= set(q) if make_room == "clear" else sorted(q) == [b"3", b"a", b"b", b"c"]


def test_a_rolled_back_session_makes_no_room_and_a_put_back_batch_may_pass_the_bound(tmp_path):
    """Nothing that was stored is refused on its way back."""
    with Queue(tmp_path / "q", max_records=2) as q:
        q.put_many(numbers(0, 2))
        with q.session() as session:
            session.get()
            session.rollback()
        with pytest.raises(Full):
            q.put(b"2")
        batch = q.lease("key")
        q.put_many(numbers(2, 4))
        batch.put_back()
        assert list(q) == numbers(0, 4)
        with pytest.raises(Full):
            q.put(b"4")
        q.get_many(3)
        q.put(b"4")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "5"])
def test_a_bound_that_is_none_is_refused(tmp_path, wrong):
    for name in ("max_records", "max_bytes"):
        with pytest.raises(BadArgument, match=name):
            Queue(tmp_path / "q", **{name: wrong})
    assert list(tmp_path.iterdir()) == []


class Shrinking(Files):
    """A file system that says how much is free."""

    room = 1 << 40

    def free(self, path: str) -> int:
        return self.room


def test_below_the_free_space_that_must_stay_puts_are_refused_while_taking_and_leasing_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(LIMITS, "spill_bytes", 100)
    disk = Shrinking()
    with Queue(tmp_path / "q", chunk_size=64, min_free_bytes=1000, _files=disk) as q:
        q.put_many(numbers(0, 30))
        session = q.session()
        session.put(b"s")
        disk.room = 999
        puts = [lambda: q.put(b"x"), lambda: q.put_many([b"x"], key="k"), session.commit]
        puts += [lambda: [session.put(b"x" * 50) for _ in range(9)]]
        for put in puts:
            with pytest.raises(DiskFull, match=r"min_free_bytes=1,000 must stay free. Nothing was stored"):
                put()
        session.rollback()
        assert q.get() == b"0"
        assert q.get_many(2) == numbers(1, 3)
        assert session.get() == b"3"
        session.commit()
        batch = q.lease("key", max_records=4)
        assert list(batch) == numbers(4, 8)
        batch.nack()
        q.lease("key").put_back()
        q.lease("other", max_records=4).ack()
        assert list(q) == numbers(8, 30)
        disk.room = 1000
        with pytest.raises(DiskFull):
            q.put_many([b"x" * 50] * 2)  # needs new chunks, and they would go below the bound
        disk.room = 5000
        q.put_many([b"x" * 50] * 2)
    is_plain_besides_batches(tmp_path / "q", [*numbers(8, 30), b"x" * 50, b"x" * 50])


# Leases that end


def test_a_lease_ends_at_its_time_and_never_before_it(tmp_path, clock):
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 6))
        timed = q.lease("timed", max_records=2, lease_timeout=10)
        forever = q.lease("forever", max_records=2)
        assert (timed.expires.timestamp(), forever.expires) == (clock.ms / 1e3 + 10, None)
        clock.advance(9.999)
        assert q.return_expired() == []
        assert q.lease("other", max_records=1).records == 1
        assert (q.stats().leased, q.stats().returned, inspect(tmp_path / "q").returned) == (3, 0, 0)
        clock.advance(0.001)
        assert (q.stats().leased, q.stats().returned) == (2, 1), "who looks sees that anyone may return it"
        assert inspect(tmp_path / "q") == q.stats()
        (returned,) = q.return_expired()
        assert (returned.id, returned.state, returned.attempt, returned.expires) == (timed.id, "returned", 1, None)
        assert returned.reason == "the lease of 'timed' ended at 2027-01-15 08:00:10 UTC and was not extended"
        assert q.return_expired() == []
        clock.advance(1e9)
        assert q.return_expired() == [], "without lease_timeout it never ends"
        again = q.lease("next")
        assert (again.id, again.attempt, list(again)) == (timed.id, 2, numbers(0, 2))


def test_an_ended_lease_is_returned_by_a_lease_under_another_key_and_the_old_owner_is_refused(tmp_path, clock):
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 4))
        old = q.lease("old", max_records=2, lease_timeout=10)
        clock.advance(10)
        new = q.lease("new", lease_timeout=10)
        assert (new.id, new.key, new.attempt, list(new)) == (old.id, "new", 2, numbers(0, 2))
        for call in (old.ack, old.extend, old.nack, old.put_back):
            with pytest.raises(BatchConflict, match="was returned and is now leased under 'new', attempt 2"):
                call()
        with pytest.raises(BatchConflict, match="wait until that lease ends"):
            q.lease("old")
        new.ack()
        assert list(q) == numbers(2, 4)


def test_after_its_time_a_lease_that_nobody_has_returned_still_belongs_to_its_owner(tmp_path, clock):
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 4))
        one = q.lease("one", max_records=1, lease_timeout=10)
        clock.advance(60)
        one.extend()
        assert one.expires.timestamp() == clock.ms / 1e3 + 10
        clock.advance(10)
        two = q.lease("one")  # the same owner, after a crash: renewed instead of taken away
        assert (two.id, two.attempt, two.expires) == (one.id, 1, None)
        clock.advance(1000)
        assert q.return_expired() == []
        two = q.lease("one", lease_timeout=5)
        assert two.expires.timestamp() == clock.ms / 1e3 + 5
        clock.advance(5)
        one.ack()
        assert q.return_expired() == []


def test_an_owner_that_extends_keeps_its_batch_as_long_as_it_does(tmp_path, clock):
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 4))
        batch = q.lease("key", lease_timeout=10)
        for _ in range(5):
            clock.advance(9.5)
            batch.extend()
            assert q.return_expired() == []
            assert q.lease("other") is None
        batch.extend(100)
        assert batch.expires.timestamp() == clock.ms / 1e3 + 100
        clock.advance(99)
        assert q.return_expired() == []
        assert batch.attempt == 1
        for wrong in (0, -1, True, "10", float("nan"), 1e11):
            with pytest.raises(BadArgument, match="lease_timeout must be a number of seconds above 0"):
                batch.extend(wrong)
            with pytest.raises(BadArgument, match="lease_timeout"):
                q.lease("third", lease_timeout=wrong)
        clock.advance(1)
        q.return_expired()
        with pytest.raises(BatchConflict):
            batch.extend()


def test_a_lease_without_a_timeout_is_extended_only_with_one(tmp_path, clock):
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        batch = q.lease("key")
        with pytest.raises(BadArgument, match="its lease never ends"):
            batch.extend()
        batch.extend(5)
        clock.advance(5)
        assert [one.id for one in q.return_expired()] == [batch.id]


def test_leases_that_end_again_and_again_go_to_the_dead_letters(tmp_path, clock):
    with Queue(tmp_path / "q", max_attempts=3) as q:
        q.put_many(numbers(0, 4))
        for attempt in (1, 2, 3):
            batch = q.lease(f"run {attempt}", max_records=2, lease_timeout=10)
            assert (batch.attempt, list(batch)) == (attempt, numbers(0, 2))
            clock.advance(10)
        assert list(q.lease("run 4", max_records=2)) == numbers(2, 4), "the one that ended three times is out of the way"
        (dead,) = q.dead()
        assert dead.id == batch.id
        assert dead.reason.startswith("attempt 3 of 3: the lease of 'run 3' ended at ")
        assert list(dead) == numbers(0, 2)
        assert q.stats().dead == 1
        assert Path(dead.manifest_path).parent.parent.name == "q.dead"


@pytest.mark.parametrize("how", ["closed", "crashed", "snapshot"])
def test_the_time_of_a_lease_and_its_extension_survive_reopening(tmp_path, clock, how):
    with Queue(tmp_path / "q") as q:
        q.put_many(numbers(0, 4))
        q.lease("one", max_records=1, lease_timeout=10)
        two = q.lease("two", max_records=1, lease_timeout=10)
        clock.advance(5)
        two.extend(20)
        if how == "snapshot":
            q._chain.rotate()
        path = crashed(tmp_path) if how == "crashed" else tmp_path / "q"
    clock.advance(5)
    assert (inspect(path).leased, inspect(path).returned) == (1, 1)
    with Queue(path) as q:
        assert [(one.key, one.expires.timestamp()) for one in q.batches()] == [
            ("one", clock.ms / 1e3),
            ("two", clock.ms / 1e3 + 15),
        ]
        assert [one.key for one in q.return_expired()] == ["one"]
        clock.advance(15)
        assert [one.key for one in q.return_expired()] == ["two"]
        assert q.verify().ok


# Any sequence


class SessionMachine(RuleBasedStateMachine):
    """Three sessions, the queue and its batches against a list of records, each with its holder.

    Limits are so small that log rotation, spilling, pieces and new chunks happen within a few operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(LIMITS, "pending_bytes", 60)
        self.patch.setattr(LIMITS, "log_bytes_at_close", 800)
        self.patch.setattr(LIMITS, "piece_bytes", 40)
        self.patch.setattr(LIMITS, "inline_bytes", {"commit": 70, "never": 70})
        self.patch.setattr(LIMITS, "spill_bytes", 60)
        self.home = Path(tempfile.mkdtemp())
        self.folder = self.home / "0"
        self.folder.mkdir()
        self.made = 0
        self.records: list[list] = []  # [record, who holds it]
        self.puts: list[list[bytes]] = [[], [], []]
        self.keys: dict[str, int] = {}
        self.batches: dict[str, list[bytes]] = {}  # leased
        self.acknowledged = 0  # records of batches that are done, and kept for a while
        self.q: Queue | None = None

    def teardown(self) -> None:
        if self.q is not None:
            self.reopen()
            self.q.close()
            assert plain(self.folder / "q") == self.all()
        self.patch.undo()
        shutil.rmtree(self.home)

    @initialize(chunk_size=st.sampled_from([30, 64, 150, 1000]), sync=st.sampled_from(["commit", "never"]), looks=st.booleans())
    def begin(self, chunk_size, sync, looks):
        self.settings = {"chunk_size": chunk_size, "sync": sync, "log_bytes": 2000, "_files": NoSync()}
        self.looks = looks  # looking makes the queue write out what only the log has
        self.open()

    def open(self) -> None:
        self.q = Queue(self.folder / "q", **self.settings)
        self.sessions = [self.q.session() for _ in range(3)]
        self.puts = [[], [], []]
        for entry in self.records:
            entry[1] = None

    def all(self) -> list[bytes]:
        return [record for record, _ in self.records]

    def free(self) -> list[list]:
        return [entry for entry in self.records if entry[1] is None]

    @invariant()
    def agrees(self):
        if self.q is None:
            return
        free = [record for record, _ in self.free()]
        assert len(self.q) == len(free)
        stats = self.q.stats()
        assert (stats.records, stats.bytes) == (len(self.records), sum(map(len, self.all())))
        if self.looks:
            assert list(self.q) == free

    @rule()
    def look(self):
        assert list(self.q) == [record for record, _ in self.free()]
        report = self.q.verify()
        assert (report.problems, report.orphans) == ([], [])
        assert report.records == len(self.records) + sum(map(len, self.batches.values())) + self.acknowledged
        assert {one.id: list(one) for one in self.q.batches()} == self.batches

    # The end of everything

    @rule()
    def reopen(self):
        self.q.close()
        assert plain(self.folder / "q") == self.all()
        if not (self.records or self.batches or self.keys or self.acknowledged):
            assert list(self.folder.iterdir()) == []
        self.open()
        self.look()

    @rule()
    def crash(self):
        self.made += 1
        image = self.home / str(self.made)
        shutil.copytree(self.folder, image)
        self.q.close()
        shutil.rmtree(self.folder)
        self.folder = image
        self.open()
        assert not (image / "q.spill").exists()
        self.look()

    @rule()
    def forget_the_log(self):
        """In a copy: the chunk files alone hold the same records."""
        image = self.home / "nolog"
        shutil.copytree(self.folder, image)
        with Queue(image / "q", **self.settings):
            pass
        for path in image.glob("q.*"):
            if path.is_dir():
                shutil.rmtree(path)
        forget_log(image / "q")
        with Queue(image / "q", **self.settings) as q:
            assert list(q) == self.all()
        shutil.rmtree(image)

    # Without a session

    @rule(records=st.lists(st.binary(max_size=18), max_size=12))
    def put_many(self, records):
        self.q.put_many(records)
        self.records += [[record, None] for record in records]

    @rule(count=st.integers(1, 8), one=st.booleans())
    def get(self, count, one):
        free = self.free()
        if one and free:
            assert self.q.peek() == free[0][0]
            assert self.q.get() == free[0][0]
            count = 1
        else:
            assert self.q.get_many(count) == [record for record, _ in free[:count]]
        self.remove(free[:count])

    def remove(self, entries: list[list]) -> None:
        gone = set(map(id, entries))
        self.records = [entry for entry in self.records if id(entry) not in gone]

    @rule()
    def clear(self):
        free = self.free()
        assert self.q.clear() == len(free)
        self.remove(free)

    @rule(max_records=st.sampled_from([None, 1, 2, 5, 9]), max_bytes=st.sampled_from([None, None, 1, 10, 50]))
    def lease(self, max_records, max_bytes):
        self.made += 1
        free = self.free()
        batch = self.q.lease(f"run {self.made}", max_records, max_bytes)
        if batch is None:
            assert free == []
            return
        taken = list(batch)
        self.is_what_fits(taken, free, max_records, max_bytes)
        self.batches[batch.id] = taken
        self.remove(free[: len(taken)])

    @staticmethod
    def is_what_fits(taken: list[bytes], free: list[list], max_records: int | None, max_bytes: int | None) -> None:
        """The first, as many as the limits allow. Empty ones behind the last that fits may come or wait."""
        count, size = len(taken), sum(map(len, taken))
        assert taken == [record for record, _ in free[:count]]
        most = min(max_records or len(free), len(free))
        assert count == most or (max_bytes is not None and 0 < count < most)
        assert max_bytes is None or size <= max_bytes or count == 1
        if count < most:
            following = free[count][0]
            assert size + len(following) > max_bytes or (size >= max_bytes and not following)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), end=st.sampled_from(["put_back", "ack"]))
    def end_batch(self, data, end):
        batch_id = data.draw(st.sampled_from(sorted(self.batches)))
        getattr(self.q.batch(batch_id), end)()
        records = self.batches.pop(batch_id)
        if end == "put_back":
            self.records[:0] = [[record, None] for record in records]
        else:
            self.acknowledged += len(records)

    # Sessions

    @rule(who=st.integers(0, 2), records=st.lists(st.binary(max_size=18), max_size=12), one=st.booleans())
    def session_puts(self, who, records, one):
        if one:
            for record in records:
                self.sessions[who].put(record)
        else:
            assert self.sessions[who].put_many(records) == len(records)
        self.puts[who] += records

    @rule(who=st.integers(0, 2), count=st.integers(1, 9), max_bytes=st.sampled_from([None, None, 1, 10, 50]))
    def session_gets(self, who, count, max_bytes):
        free = self.free()
        taken = self.sessions[who].get_many(count, max_bytes)
        self.is_what_fits(taken, free, count, max_bytes)
        for entry in free[: len(taken)]:
            entry[1] = who

    @rule(who=st.integers(0, 2))
    def session_gets_one(self, who):
        free = self.free()
        if free:
            assert self.sessions[who].get() == free[0][0]
            free[0][1] = who
        else:
            with pytest.raises(Empty):
                self.sessions[who].get()

    @rule(who=st.integers(0, 2), key=st.sampled_from([None, None, None, "a", "b", "c"]))
    def session_commits(self, who, key):
        held = [entry for entry in self.records if entry[1] == who]
        if key in self.keys:
            assert self.sessions[who].commit(key=key) == self.keys[key]
            for entry in held:
                entry[1] = None
        else:
            assert self.sessions[who].commit(key=key) == len(self.puts[who])
            if key:
                self.keys[key] = len(self.puts[who])
            self.remove(held)
            self.records += [[record, None] for record in self.puts[who]]
        self.puts[who] = []

    @rule(who=st.integers(0, 2), close=st.booleans())
    def session_rolls_back(self, who, close):
        if close:
            self.sessions[who].close()
            self.sessions[who] = self.q.session()
        else:
            self.sessions[who].rollback()
        self.puts[who] = []
        for entry in self.records:
            if entry[1] == who:
                entry[1] = None


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(
    max_examples=examples(quick=10, full=50, soak=5_000),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_closing_leaves_the_id_after_the_last_chunk_free_for_the_original(tmp_path):
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"a", b"b", b"c", b"d", b"e"])  # two to a chunk
        first, second = q.session(), q.session()
        first.get()
        assert second.get_many(2) == [b"b", b"c"]
        second.commit()  # the first two chunks have gaps now
    assert plain(tmp_path / "q") == [b"a", b"d", b"e"]
    with Queue(tmp_path / "q", chunk_size=16) as q:
        first, second = q.session(), q.session()
        first.get_many(2)
        second.get()
        second.commit()  # what is last now bears an id from before the first
    assert plain(tmp_path / "q") == [b"a", b"d"]
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put_many([b"f", b"g", b"h"])
        first, second = q.session(), q.session()
        first.get_many(4)
        second.get()
        second.commit()  # a gap in the last one
    assert plain(tmp_path / "q") == [b"a", b"d", b"f", b"g"]


def test_a_second_close_after_one_that_failed_closes_no_descriptor_of_others(tmp_path):
    class Failing(NoSync):
        fails = False

        def sync(self, fd: int) -> None:
            if self.fails:
                raise failed_sync(OSError(errno.EIO, "made to fail"), None)

    files = Failing()
    q = Queue(tmp_path / "q", sync="never", _files=files)
    q.put(b"x")
    files.fails = True
    with pytest.raises(Broken):
        q.close()
    others = [(tmp_path / f"other{number}").open("wb") for number in range(6)]
    q.close()
    for other in others:
        other.write(b"still open")
        other.close()


def test_a_batch_put_back_in_front_of_an_emptied_chunk_leaves_no_empty_chunk(tmp_path):
    with Queue(tmp_path / "q", chunk_size=16) as q:
        q.put(b"a")
        batch = q.lease("key")
        q.put(b"b")
        q.get()
        batch.put_back()
        q.put(b"c")
        q.put(b"d")
        assert q.get() == b"a"
    assert plain(tmp_path / "q") == [b"c", b"d"]


def test_a_commit_that_can_never_fit_does_not_wait_for_room(tmp_path):
    with Queue(tmp_path / "q", max_records=3) as q, q.session() as s:
        q.put_many([b"1", b"2"])
        s.get_many(2)
        s.put_many([b"x"] * 4)
        with pytest.raises(Full, match="never fit"):
            s.commit(timeout=None)
        s.rollback()


class Filling(Shrinking):
    def allocate(self, fd: int, size: int) -> None:
        super().allocate(fd, size)
        self.room -= size


def test_a_commit_that_only_takes_works_with_no_room_at_all_under_a_key_too(tmp_path):
    files = Filling()
    with Queue(tmp_path / "q", min_free_bytes=1000, _files=files) as q:
        q.put_many([b"1", b"2"])
        files.room = 10
        with q.session() as s:
            assert s.get() == b"1"
            assert s.commit(key="key") == 0
        assert list(q) == [b"2"]


def test_spilling_leaves_what_is_to_stay_free(tmp_path):
    files = Filling()
    with Queue(tmp_path / "q", min_free_bytes=1_000_000, _files=files) as q:
        q.put(b"first")
        files.room = 4_000_000
        with q.session() as s:
            s.put_many([bytes(60_000)] * 18)
            with pytest.raises(DiskFull, match="min_free_bytes"):
                s.put(b"")
            assert files.room == 4_000_000
            s.rollback()


def test_who_asks_how_much_there_is_sees_what_a_collected_session_held(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
        held = [q.session()]
        held[0].get()
        with pytest.warns(ResourceWarning):
            held.clear()
        assert len(q) == 1


def test_many_small_records_are_spilled_too(tmp_path, monkeypatch):
    monkeypatch.setattr(LIMITS, "spill_bytes", 10_000)
    with Queue(tmp_path / "q") as q, q.session() as s:
        for _ in range(1000):
            s.put(b"")
        assert len(s._puts) < 300
        s.commit()
        assert len(q) == 1000


def test_no_room_even_for_the_directory_of_spilled_records_is_a_full_disk(tmp_path, monkeypatch):
    class FullDisk(NoSync):
        full = True

        def make_directory(self, path: str) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "made to fail", path)
            super().make_directory(path)

    monkeypatch.setattr(LIMITS, "spill_bytes", 100)
    files = FullDisk()
    with Queue(tmp_path / "q", _files=files) as q, q.session() as s:
        s.put(b"first" * 20)
        with pytest.raises(DiskFull) as caught:
            s.put(b"second" * 20)
        assert caught.value.__cause__ is not caught.value
        files.full = False
        s.put(b"third" * 20)
        s.commit()
        assert list(q) == [b"first" * 20, b"third" * 20]
