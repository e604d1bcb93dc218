"""The public contract of `Queue` and `inspect`, over chunk sizes from one record per chunk to all in one, and both sync modes."""

from __future__ import annotations

import itertools
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from qewqew_core import BadArgument, BadKey, BadRecord, Closed, Empty, Queue, QueueStats, RecordTooLarge, inspect
from qewqew_core.disk.journal import SPARE
from qewqew_core.formats.chunk import OUR_FIRST as FIRST
from qewqew_core.limits import LIMITS

Make = Callable[..., Queue]
NOTHING = QueueStats(records=0, bytes=0, chunks=0, oldest=None, leased=0, returned=0, dead=0, on_disk=0)
LARGE = [b"%06d" % number * 30 for number in range(3000)]  # 540 KB: written past the tail, not carried by the log


@pytest.fixture(
    params=[
        *itertools.product([16, 40, 64, 4096, 1 << 20], ["commit", "never"], ["short"]),
        *itertools.product([40, 4096], ["commit", "never"], ["long"]),
    ],
    ids=lambda param: "{}-{}-{} way".format(*param),
)
def make(request, tmp_path, long_way) -> Make:
    """Opens the one queue of the test, each time with the same chunk size and sync mode unless told otherwise."""
    chunk_size, sync, way = request.param
    if way == "long":
        long_way()
    return lambda **more: Queue(tmp_path / "q", **{"chunk_size": chunk_size, "sync": sync, **more})


def numbers(begin: int, end: int) -> list[bytes]:
    """Records of one to four bytes: they fit into every chunk size tested."""
    return [b"%d" % number for number in range(begin, end)]


def chunk_files(folder: Path, name: str = "q") -> dict[int, Path]:
    files = {path.suffix[1:]: path for path in folder.glob(f"{name}.*")}
    return {int(suffix): files[suffix] for suffix in sorted(filter(str.isdigit, files), key=int)}


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of the last change of every file below the folder."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in everything(folder).items()}


# Putting and taking


def test_a_new_queue_is_empty_and_says_so(make):
    with make() as q:
        assert len(q) == 0
        assert not q
        assert list(q) == []
        assert q.get_many(10) == []
        assert q.get_if(lambda record: True) is None
        assert q.clear() == 0
        assert q.lease("key") is None
        assert (q.stats().records, q.stats().chunks, q.stats().oldest) == (0, 0, None)
        for take in (q.get, q.peek):
            with pytest.raises(queue.Empty):
                take()


@pytest.mark.req("DEF-8", "DEF-22")
def test_records_come_out_in_the_order_they_went_in(make):
    with make() as q:
        for record in numbers(0, 20):
            q.put(record)
        assert q.put_many(numbers(20, 60)) == 40
        assert len(q) == 60
        assert q
        assert q.peek() == q.peek() == b"0", "peek takes nothing"
        assert [q.get() for _ in range(30)] == numbers(0, 30)
        assert list(q) == numbers(30, 60)
        assert q.get_many(1000) == numbers(30, 60)
        assert not q


def test_records_are_still_there_after_closing_and_opening_again(make):
    with make() as q:
        q.put_many(numbers(0, 40))
        q.get_many(7)
    with make() as q:
        assert (len(q), q.peek()) == (33, b"7")
        q.put(b"new")
        assert q.get_many(3) == numbers(7, 10)
    with make() as q:
        assert list(q) == [*numbers(10, 40), b"new"]
        assert q.verify().ok


@pytest.mark.req("DEF-8")
def test_putting_and_taking_in_turns_never_delivers_twice_or_stale_bytes(make):
    """An emptied chunk begins anew at its first byte: what was read before must not come again."""
    with make() as q:
        for turn in range(60):
            q.put_many(numbers(turn, turn + turn % 5 + 1))
            assert q.peek() == b"%d" % turn
            assert q.get_many(10) == numbers(turn, turn + turn % 5 + 1)
            assert not q


def test_a_record_put_while_the_chunk_is_being_read_is_read_too(make):
    with make() as q:
        q.put(b"0")
        for number in range(1, 50):
            q.put(b"%d" % number)
            assert q.get() == b"%d" % (number - 1)
        assert list(q) == [b"49"]


def test_empty_records_are_records(make):
    with make() as q:
        q.put(b"")
        q.put_many([b"", b"x", b""])
        assert (len(q), q.stats().bytes) == (4, 1)
    with make() as q:
        assert list(q) == [b"", b"", b"x", b""]
        assert q.get() == b""
        assert q.get_if(lambda record: record == b"") == b""
        assert q.get_many(5) == [b"x", b""]


@pytest.mark.req("DEF-11")
def test_any_buffer_of_bytes_is_a_record_and_is_copied(make):
    changing = bytearray(b"ab")
    with make() as q:
        q.put(memoryview(b"xxabxxxxxxxx")[2:4])
        q.put(changing)
        q.put_many([memoryview(b"xcdx")[1:3], changing])
        changing[:] = b"ZZ"
        q.put(memoryview(b"abcdef")[::2])
        assert q.peek() == b"ab"
        assert list(q) == [b"ab", b"ab", b"cd", b"ab", b"ace"]


@pytest.mark.req("REQ-5", "DEF-9", "DEF-10")
def test_the_largest_record_fits_exactly_and_one_byte_more_stores_nothing_of_its_call(make, tmp_path):
    with make() as q:
        assert q.largest_record == min(q.chunk_size - 12, 65535)  # the original stores longer ones modulo 65536
        large = os.urandom(q.largest_record)
        calls = [lambda: q.put(large + b"x"), lambda: q.put_many([b"c", large, large + b"x"])]
        calls += [lambda: q.put(bytes(65536)), lambda: q.put(bytes(131072))]
        for records in ([], [b"a", large, b"b"]):
            q.put_many(records)
            before = everything(tmp_path)
            for call in calls:  # the original notices after it has damaged the queue
                with pytest.raises(RecordTooLarge, match=r"; .*at most .* Nothing was stored; split it"):
                    call()
            assert everything(tmp_path) == before
            assert len(q) == len(records)
        assert list(q) == [b"a", large, b"b"]
    with make() as q:
        assert q.get_many(9) == [b"a", large, b"b"]


@pytest.mark.parametrize("wrong", ["text", 7, None, [b"x"], 1.5])
def test_what_is_not_bytes_stores_nothing_of_its_call(tmp_path, wrong):
    with Queue(tmp_path / "q") as q:
        with pytest.raises(BadRecord, match=r"record 0 is \w+, not bytes; encode it first"):
            q.put(wrong)
        with pytest.raises(BadRecord, match="record 2 is"):
            q.put_many([b"a", b"b", wrong])
        assert not q


def test_put_many_takes_a_generator_and_stores_nothing_if_it_raises(make):
    def records():
        yield from numbers(0, 30)
        raise ValueError("of the generator")

    with make() as q:
        assert q.put_many(record for record in numbers(0, 30)) == 30
        with pytest.raises(ValueError, match="of the generator"):
            q.put_many(records())
        assert q.put_many(iter([])) == 0
        assert list(q) == numbers(0, 30)


def test_a_single_record_given_to_put_many_is_refused_because_its_bytes_would_be_taken_for_numbers(tmp_path):
    with Queue(tmp_path / "q") as q:
        for record in (b"abc", bytearray(b"abc"), memoryview(b"abc"), "abc"):
            with pytest.raises(BadArgument, match="use put"):
                q.put_many(record)
        assert not q


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("chunk_size", [2000, 70_000, 1 << 20])
def test_a_large_put_many_over_many_chunks_is_one_commit(tmp_path, chunk_size, sync):
    with Queue(tmp_path / "q", chunk_size=chunk_size, sync=sync) as q:
        q.put_many([b"first", b"second"])
        with pytest.raises(RecordTooLarge):
            q.put_many([*LARGE, bytes(chunk_size)])
        assert len(q) == 2
        assert q.put_many(LARGE) == len(LARGE)
        q.put(b"last")
        assert q.get() == b"first"
        assert q.verify().problems == []
    with Queue(tmp_path / "q", chunk_size=chunk_size, sync=sync) as q:
        assert list(q) == [b"second", *LARGE, b"last"]
        assert q.get_many(1 << 20, max_bytes=300_000) == [b"second", *LARGE][: 1 + (300_000 - 6) // 180]
        assert q.verify().problems == []


@pytest.mark.parametrize(
    ("sizes", "max_records", "max_bytes", "expected"),
    [
        ([5, 5, 5], 2, None, 2),
        ([5, 5, 5], 3, 10, 2),  # exactly
        ([5, 5, 5], 3, 9, 1),
        ([5, 5, 5], 3, 1, 1),  # the first one is taken even if it alone is larger
        ([0, 5, 5], 3, 1, 1),
        ([5] * 50, 1000, 5 * 50, 50),  # over chunks
        ([5] * 50, 1000, 5 * 50 - 1, 49),
        ([5] * 50, 49, 5 * 50, 49),
    ],
)
def test_get_many_stops_exactly_at_its_limits(tmp_path, sizes, max_records, max_bytes, expected):
    records = [bytes([number]) * size for number, size in enumerate(sizes)]
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(records)
        assert q.get_many(max_records, max_bytes) == records[:expected]
        assert list(q) == records[expected:]


@pytest.mark.req("REQ-21", "DEF-5", "DEF-6", "DEF-7", "DEF-22", "T22")
def test_clear_drops_all_and_the_queue_goes_on(make, tmp_path):
    with make() as q:
        for record in numbers(1000, 1030):
            q.put(record)
        assert q.peek() == b"1000"
        assert q.clear() == 30
        assert q.clear() == 0
        assert (chunk_files(tmp_path), (tmp_path / "q").read_bytes()) == ({}, b"\0\0")
        q.put(b"new")  # the original loses it, or delivers it with the length of the record peeked at
        q.put(b"x")
        assert q.peek() == b"new"
        assert list(q) == [b"new", b"x"]
    assert (tmp_path / "q").read_bytes() == FIRST.to_bytes(2)
    with make() as q:
        assert q.get_many(9) == [b"new", b"x"]


# Keys of put_many


def test_the_same_key_is_applied_once_also_after_reopening(make):
    with make() as q:
        assert q.put_many(numbers(0, 30), key="month 1") == 30
        assert q.put_many(numbers(500, 510), key="month 1") == 30, "what the first call returned"
        assert q.put_many([], key="month 2") == 0
        assert q.put_many(numbers(0, 1), key="month 2") == 0
    with make() as q:
        assert q.put_many(numbers(0, 30), key="month 1") == 30
        assert list(q) == numbers(0, 30)
        assert q.clear() == 30
    with make() as q:  # nothing but keys is left
        assert q.put_many(numbers(0, 30), key="month 1") == 30
        assert q.put_many(numbers(0, 2), key="month 2") == 0
        assert not q


def test_the_key_of_a_refused_call_is_free(tmp_path):
    with Queue(tmp_path / "q") as q:
        with pytest.raises(BadRecord):
            q.put_many([b"a", None], key="k")
        assert q.put_many([b"a"], key="k") == 1


@pytest.mark.parametrize("key", ["", "  ", "a/b", "..", "a\nb", "a\0b", "x" * 513, "\ud800", 7, b"k"])
def test_a_hostile_key_is_refused_before_anything_is_stored(tmp_path, key):
    with Queue(tmp_path / "q") as q:
        with pytest.raises(BadKey, match="key"):
            q.put_many([b"a"], key=key)
        assert not q


# Waiting


def test_a_timeout_is_waited_for_and_ends(tmp_path):
    with Queue(tmp_path / "q") as q:
        for take in (q.get, q.peek):
            begin = time.monotonic()
            with pytest.raises(Empty, match="empty"):
                take(timeout=0.05)
            assert 0.05 <= time.monotonic() - begin < 30
        begin = time.monotonic()
        assert q.get_if(lambda record: True, timeout=0.05) is None
        assert 0.05 <= time.monotonic() - begin < 30
        with pytest.raises(Empty):
            q.get(timeout=-1)  # as 0: nothing in the past can be waited for


@pytest.mark.req("DEF-23")
def test_a_put_wakes_those_who_wait_whatever_they_wait_in(tmp_path, monkeypatch):
    """The original wakes one of them, perhaps one that only looks, and the others sleep to their time-outs."""
    monkeypatch.setattr(LIMITS, "look_again", 1e6)  # else they wake by themselves, after seconds
    with Queue(tmp_path / "q") as q, ThreadPoolExecutor(6) as pool:
        looking = [pool.submit(q.peek, 100) for _ in range(2)]
        choosing = pool.submit(q.get_if, lambda record: record == b"never", 100)
        time.sleep(0.1)
        begin = time.monotonic()
        q.put(b"0")
        assert [one.result() for one in looking] == [b"0", b"0"]
        assert choosing.result() is None
        q.clear()
        taking = [pool.submit(q.get, None) for _ in range(3)]
        time.sleep(0.1)
        q.put_many([b"1", b"2", b"3"])
        assert sorted(one.result() for one in taking) == [b"1", b"2", b"3"]
        looking = [pool.submit(q.peek, 100)]
        time.sleep(0.1)
        taking = [pool.submit(q.get, 100)]  # behind the one that looks
        time.sleep(0.1)
        q.put(b"4")
        assert taking[0].result() == b"4"
        q.put(b"5")  # if that was taken before it could be looked at
        assert looking[0].result() in (b"4", b"5")
        assert time.monotonic() - begin < 50


@pytest.mark.req("DEF-24")
def test_close_wakes_those_who_wait(tmp_path, monkeypatch):
    """In the original they wait to the end of their time-outs."""
    monkeypatch.setattr(LIMITS, "look_again", 1e6)  # else they wake by themselves, after seconds
    q = Queue(tmp_path / "q")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(call, timeout=None) for call in (q.get, q.peek)]
        waiting.append(pool.submit(q.get_if, lambda record: True, timeout=100))
        time.sleep(0.1)
        q.close()
        for one in waiting:
            with pytest.raises(Closed):
                one.result(timeout=300)


def test_putting_back_and_returning_wake_those_who_wait(tmp_path):
    with Queue(tmp_path / "q") as q, ThreadPoolExecutor(1) as pool:
        q.put(b"0")
        batch = q.lease("key")
        waiting = pool.submit(q.get, 100)
        time.sleep(0.05)
        batch.put_back()
        assert waiting.result(timeout=300) == b"0"


# get_if


@pytest.mark.req("DEF-22")
def test_get_if_takes_the_first_record_or_leaves_it(make):
    seen = []
    with make() as q:
        q.put_many(numbers(0, 9))
        assert q.get_if(lambda record: seen.append(record) or False) is None
        assert q.get_if(lambda record: record == b"0") == b"0"
        assert q.get_if(lambda record: record == b"0") is None
        assert list(q) == numbers(1, 9)
    assert seen == [b"0"]


@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, Closed, Empty, FileNotFoundError, TimeoutError, ConnectionError]
)
def test_what_a_predicate_raises_passes_through_and_the_record_stays(tmp_path, error):
    """Also what the queue itself raises or takes for a failing disk: a predicate may look at files or call a server."""

    def predicate(record):
        raise error("of the predicate")

    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        with pytest.raises(error, match="of the predicate"):
            q.get_if(predicate)
        assert q.get() == b"0", "the queue goes on"


@pytest.mark.req("DEF-25")
def test_a_predicate_must_not_use_the_queue(tmp_path):
    """In the original a condition that takes a record loses a second one."""
    with Queue(tmp_path / "q") as q:
        q.put_many([b"0", b"1"])
        uses = [
            q.get,
            q.peek,
            lambda: q.put(b"2"),
            lambda: q.put_many([b"2"]),
            lambda: q.get_many(1),
            lambda: q.lease("k"),
            q.clear,
        ]
        uses += [lambda: len(q), lambda: list(q), lambda: q.get_if(lambda record: True), q.stats, q.verify, q.batches]
        for use in uses:
            with pytest.raises(Closed, match="predicate"):
                q.get_if(lambda record, use=use: use())
        assert list(q) == [b"0", b"1"]


def test_a_predicate_must_not_close_the_queue(tmp_path):
    """The commit that follows would go to a descriptor that is closed, or by then belongs to another file."""
    opened = []
    with Queue(tmp_path / "q") as q:
        q.put(b"0")

        def predicate(record):
            try:
                q.close()
            finally:
                opened.extend((tmp_path / f"other{number}").open("wb") for number in range(4))
            return True

        with suppress(Closed):
            q.get_if(predicate)
    for file in opened:
        file.close()
    assert [Path(file.name).read_bytes() for file in opened] == [b""] * 4, "a commit was written into another file"
    with Queue(tmp_path / "q") as q:
        assert list(q) == [b"0"]


# Iteration


def test_iterating_sees_what_is_put_before_it_ends_or_not_but_never_out_of_order(make):
    with make() as q:
        q.put_many(numbers(0, 20))
        seen = []
        for record in q:
            seen.append(record)
            if len(seen) < 5:
                q.put(b"%d" % (19 + len(seen)))
        assert seen == numbers(0, len(seen))
        assert len(seen) >= 20


def test_iterating_ends_with_an_error_when_records_are_taken_meanwhile(tmp_path):
    with Queue(tmp_path / "q", chunk_size=40) as q:
        for disturb in (q.get, lambda: q.get_many(3), q.clear, lambda: q.lease("key"), lambda: q.batches()[0].put_back()):
            q.put_many(numbers(0, 100))
            records = iter(q)
            next(records)
            disturb()
            with pytest.raises(RuntimeError, match="during the iteration"):
                list(records)


def test_an_iteration_that_is_left_early_disturbs_nothing(make):
    with make() as q:
        q.put_many(numbers(0, 50))
        assert next(iter(q)) == b"0"
        assert list(itertools.islice(q, 10)) == numbers(0, 10)
        assert q.get_many(50) == numbers(0, 50)


# Threads


@pytest.mark.req("DEF-26")
def test_threads_that_put_and_take_at_once_get_each_record_once_and_in_order(tmp_path):
    producers, each = 4, 150
    with Queue(tmp_path / "q", chunk_size=300) as q, ThreadPoolExecutor(2 * producers) as pool:

        def produce(me: int) -> None:
            for number in range(0, each, 3):
                q.put(b"%d %d" % (me, number))
                q.put_many([b"%d %d" % (me, number + 1), b"%d %d" % (me, number + 2)])

        def consume(me: int) -> list[bytes]:
            taken: list[bytes] = []
            while True:
                last = all(put.done() for put in puts)
                try:
                    taken += [q.get(timeout=0.5)] if me % 2 else (q.get_many(5) or [q.get(timeout=0.5)])
                except Empty:
                    if last:
                        return taken

        puts = [pool.submit(produce, me) for me in range(producers)]
        takes = [pool.submit(consume, me) for me in range(producers)]
        for put in puts:
            put.result()
        taken = [take.result() for take in takes]
        assert not q
    assert sorted(itertools.chain(*taken)) == sorted(b"%d %d" % (me, n) for me in range(producers) for n in range(each))
    for records in taken:
        for me in range(producers):
            order = [int(record.split()[1]) for record in records if int(record.split()[0]) == me]
            assert order == sorted(order)


def test_threads_that_commit_together_share_fsyncs_and_all_is_there(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: q.put(b"%d" % number), range(400)))
        assert sorted(map(int, q)) == list(range(400))
    with Queue(tmp_path / "q") as q:
        assert sorted(map(int, q)) == list(range(400))


# Closing


@pytest.mark.req("DEF-17")
def test_every_call_after_close_is_refused_and_a_second_close_is_none(tmp_path):
    q = Queue(tmp_path / "q")
    q.put_many([b"0", b"1"])
    leased = q.lease("key", max_records=1)
    q.close()
    never_used = Queue(tmp_path / "never used")
    never_used.close()
    before = contents(tmp_path)
    q.close()
    never_used.close()
    calls = [never_used.get, lambda: never_used.put(b"x"), lambda: never_used.put_many([b"x"]), never_used.clear]
    calls += [q.get, q.peek, q.clear, q.stats, q.verify, q.batches, q.dead, lambda: q.put(b"x"), lambda: q.put_many([b"x"])]
    calls += [lambda: q.get_many(1), lambda: q.get_if(bool), lambda: q.lease("key"), lambda: q.batch(leased.id)]
    calls += [lambda: len(q), lambda: bool(q), lambda: list(q), leased.ack, leased.nack, leased.put_back, leased.to_dead_letters]
    for call in calls:
        with pytest.raises(Closed, match="closed"):
            call()
    assert contents(tmp_path) == before
    with Queue(tmp_path / "q") as again:
        assert list(again) == [b"1"]
        assert again.batches()[0].id == leased.id


def test_leaving_the_with_block_closes_also_after_an_error(tmp_path):
    q = Queue(tmp_path / "q")
    q.put(b"0")
    with pytest.raises(ZeroDivisionError), q:
        q.put(b"%d" % (len(q) // 0))
    with pytest.raises(Closed):
        q.get()
    with Queue(tmp_path / "q", lock_timeout=0) as q:
        assert q.get() == b"0"


@pytest.mark.req("REQ-22", "DEF-6")
def test_an_empty_queue_leaves_no_files(make, tmp_path):
    make().close()
    assert list(tmp_path.iterdir()) == []
    with make() as q:
        q.put_many(numbers(0, 100))
        q.get_many(100)
    assert list(tmp_path.iterdir()) == []
    with make() as q:
        q.put_many(numbers(0, 100))
        q.lease("key").put_back()
        q.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("DEF-26")
def test_opening_and_closing_leaks_no_descriptor_and_a_long_chain_keeps_few_open(tmp_path):
    """The original keeps a descriptor and a map for each chunk."""
    before = len(os.listdir("/proc/self/fd"))
    with Queue(tmp_path / "q", chunk_size=16, sync="never") as q, ThreadPoolExecutor(4) as pool:
        list(pool.map(q.put, numbers(0, 200)))
        q.put_many(numbers(200, 1000))
        assert len(list(q)) == 1000
        taken = [*q.get_many(500), *pool.map(lambda _: q.get(), range(200))]
        assert len(set(taken)) == 700
        assert len(os.listdir("/proc/self/fd")) - before < 8
    for _ in range(10):
        Queue(tmp_path / "q", chunk_size=16).close()
    assert len(os.listdir("/proc/self/fd")) == before


# stats and inspect


def comparable(stats: QueueStats) -> QueueStats:
    """Without what changes when the log grows by a checkpoint."""
    return QueueStats(**{**vars(stats), "on_disk": 0})


def test_inspect_agrees_with_the_queue_at_every_moment(make, tmp_path):
    with make() as q:

        def check() -> None:
            assert inspect(tmp_path / "q") == q.stats()

        check()
        q.put_many(numbers(0, 50))
        check()
        q.get_many(7)
        check()
        batch = q.lease("key", max_records=9)
        q.lease("other", max_records=2).to_dead_letters()
        check()
        assert (q.stats().leased, q.stats().returned, q.stats().dead, q.stats().records) == (1, 0, 1, 32)
        assert q.stats().bytes == sum(map(len, numbers(18, 50)))
        batch.nack()
        check()
        assert (q.stats().leased, q.stats().returned) == (0, 1)
        last = q.stats()
    assert comparable(inspect(tmp_path / "q")) == comparable(last)
    with make() as q:
        assert comparable(q.stats()) == comparable(last)


def test_inspect_of_a_queue_that_is_not_there_gives_zeros_and_makes_nothing(tmp_path):
    assert inspect(tmp_path / "q") == NOTHING
    assert list(tmp_path.iterdir()) == []


def test_inspect_changes_no_file_and_takes_no_lock_while_another_process_holds_the_queue(tmp_path):
    program = (
        "import sys\nfrom qewqew_core import Queue\n"
        "with Queue(sys.argv[1], chunk_size=64) as q:\n"
        "    q.put_many([b'%d' % n for n in range(50)]); q.get(); q.lease('key', max_records=20)\n"
        "    print(len(q), flush=True); sys.stdin.readline(); q.put(b'still mine'); print(len(q), flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "q")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as owner:
        assert owner.stdout.readline() == "29\n"
        before = everything(tmp_path)
        for _ in range(3):
            stats = inspect(tmp_path / "q")
            assert (stats.records, stats.leased) == (29, 1)
        assert everything(tmp_path) == before
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "30\n"
    assert owner.returncode == 0
    before = everything(tmp_path)
    assert inspect(tmp_path / "q").records == 30
    assert everything(tmp_path) == before


@pytest.mark.parametrize("log_bytes", [1, 64 << 10, 1 << 20])
def test_the_log_grows_by_as_much_as_it_may_and_is_cut_back(tmp_path, log_bytes):
    sizes = []
    with Queue(tmp_path / "q", chunk_size=1 << 16, sync="never", log_bytes=log_bytes) as q:
        for _ in range(1500):
            q.put(b"x" * 1000)
            q.get()
            sizes.append((tmp_path / "q.wal").stat().st_size)
    assert log_bytes < max(sizes) <= log_bytes + 2000 + 2 * SPARE  # two commits, and what is kept free


def test_inspect_never_fails_beside_a_busy_writer_and_sees_whole_commits(tmp_path):
    """Ten records in each commit, chunks come and go, the log is cut back again and again."""
    done = threading.Event()

    def write() -> None:
        with Queue(tmp_path / "q", chunk_size=64, sync="never", log_bytes=2000) as q:
            while not done.is_set():
                q.put_many([b"12345"] * 10)
                q.put_many([b"12345"] * 10)
                q.get_many(10)
                if len(q) > 60:
                    q.clear()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        end, looks = time.monotonic() + 1.5, 0
        while time.monotonic() < end:
            assert inspect(tmp_path / "q").records % 10 == 0
            looks += 1
    finally:
        done.set()
        writer.join()
    assert looks > 20


def test_oldest_is_when_the_first_record_was_put(tmp_path):
    """Kept for about every 64 KiB of records: never too late, so that a sensor never waits longer than it was told."""
    before, after = [], []
    millisecond = timedelta(milliseconds=1)
    with Queue(tmp_path / "q", chunk_size=1 << 20) as q:
        for number in range(3):
            before.append(datetime.now(UTC) - millisecond)
            q.put_many([b"%d" % number * 60_000] * 2)
            after.append(datetime.now(UTC))
            time.sleep(0.02)
        for number in range(3):
            oldest = q.stats().oldest
            assert oldest.utcoffset() == timedelta(0)
            assert oldest <= after[number], "never too late"
            assert oldest >= before[max(0, number - 1)], "at most one boundary too early"
            assert inspect(tmp_path / "q").oldest == oldest
            q.get_many(2)
        assert q.stats().oldest is None
        q.put(b"new")
        assert q.stats().oldest > after[-1]


def test_the_time_of_a_record_survives_lease_and_put_back_and_reopening(tmp_path):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(0, 30))
        oldest = q.stats().oldest
        time.sleep(0.02)
        q.lease("key", max_records=15).put_back()
        assert q.stats().oldest == oldest
    with Queue(tmp_path / "q", chunk_size=64) as q:
        assert q.stats().oldest == oldest
