"""Sessions in several threads: each gets its own, who waits is woken, and nobody waits for what is not his."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk import NoSync
from plain import numbers

from qewqew_core import Queue
from qewqew_core.disk.files import Files


def test_threads_with_sessions_that_often_roll_back_get_each_record_once(tmp_path):
    """Four threads put, four take, and a third of the sessions give back what they have done."""
    threads, each, done = 4, 90, threading.Event()
    with Queue(tmp_path / "q", chunk_size=200, _files=NoSync()) as q, ThreadPoolExecutor(2 * threads) as pool:

        def produce(me: int) -> None:
            with q.session() as session:
                for number in range(0, each, 3):
                    if number % 4 == me:
                        session.put(b"rolled back")
                        session.rollback()
                    session.put_many([b"%d %d" % (me, number + rest) for rest in range(3)])
                    session.commit()

        def consume(me: int) -> list[bytes]:
            taken: list[bytes] = []
            turn = 0
            with q.session() as session:
                while True:
                    finished = done.is_set()
                    records = session.get_many(1 + turn % 5)
                    turn += 1
                    if not records and finished:
                        return taken
                    if turn % 3 == me % 3:
                        session.rollback()
                    else:
                        session.commit()
                        taken += records

        takes = [pool.submit(consume, me) for me in range(threads)]
        for put in [pool.submit(produce, me) for me in range(threads)]:
            put.result()
        done.set()
        taken = [record for take in takes for record in take.result()]
        taken += q.get_many(1000)  # a consumer may have ended just before another one rolled back
        assert not q
    assert sorted(taken) == sorted(b"%d %d" % (me, number) for me in range(threads) for number in range(each))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("release", ["rollback", "close", "put", "commit of another"])
def test_who_waits_for_a_record_gets_it_when_a_session_lets_go_of_one_or_commits_one(tmp_path, release):
    with Queue(tmp_path / "q") as q, ThreadPoolExecutor(2) as pool:
        q.put(b"0")
        session, waiting, other = q.session(), q.session(), q.session()
        assert session.get() == b"0"
        future = pool.submit(waiting.get, 40)
        looking = pool.submit(q.peek, 40)
        expected = b"0" if release in ("rollback", "close") else b"1"
        if release == "put":
            q.put_many([b"1", b"1"])
        elif release == "commit of another":
            other.put_many([b"1", b"1"])
            other.commit()
        else:
            q.put(b"0")  # the one that looks needs one too
            getattr(session, release)()
        assert future.result(300) == looking.result(300) == expected
        waiting.close()


@pytest.mark.req("S7")
def test_each_commit_is_a_run_of_its_records_in_one_piece_whatever_other_threads_do(tmp_path):
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


@pytest.mark.req("S10")
def test_a_cancelled_get_loses_nothing_and_a_cancelled_commit_is_applied_once_when_it_is_made_again(tmp_path):
    """Asynchronous use is use from a thread. The call goes on when nobody waits for it any more; the session has what it got."""
    with Queue(tmp_path / "q", _files=NoSync()) as q:
        session, committing = q.session(), q.session()
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

        asyncio.run(cancelled())  # its end waits for the threads
        session.close()
        assert list(q) in (numbers(0, 1), numbers(0, 3)), "the get took nothing; the commit has happened, or not"
        with q.session() as again:
            again.put_many(numbers(1, 3))
            assert again.commit(key="key") == 2, "under its key it can be made again"
        assert list(q) == numbers(0, 3)


@pytest.mark.req("T19")
def test_two_queues_in_one_process_do_not_wait_for_each_other(tmp_path):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Files):
        armed = False

        def sync(self, fd: int) -> None:
            if self.armed:
                entered.set()
                assert go_on.wait(300)

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
        assert entered.wait(300)
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
