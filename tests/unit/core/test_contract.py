"""What a queue promises, and a topic with one reader whose committed messages are deleted: written once, run over both."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from stores import STORES

from qewqew_core import (
    BadKey,
    BadRecord,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    Closed,
    Corrupt,
    Empty,
    Locked,
    Queue,
    Topic,
)


class Bench:
    """Opens the store of a test, closes it and opens it again, or kills it."""

    def __init__(self, folder: Path, layout: str, size: int, sync: str) -> None:
        self.folder, self.store_of, self.size, self.sync = folder / "0", STORES[layout][0], size, sync
        self.folder.mkdir()
        self.opened: list[Any] = []
        self.images = itertools.count(1)

    @property
    def path(self) -> Path:
        return self.folder / "q"

    def open(self, **settings: Any) -> Any:
        self.opened.append(self.store_of(self.path, self.size, self.sync, **settings))
        return self.opened[-1]

    def reopen(self, **settings: Any) -> Any:
        self.opened[-1].close()
        return self.open(**settings)

    def kill(self, **settings: Any) -> Any:
        """As kill -9: what is on disk at this moment, opened elsewhere."""
        image = self.folder.parent / str(next(self.images))
        shutil.copytree(self.folder, image)
        self.opened[-1].close()
        self.folder = image
        return self.open(**settings)


CASES = [(layout, size, sync) for layout, (_, sizes) in STORES.items() for size in sizes for sync in ("commit", "never")]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def bench(request, tmp_path) -> Iterator[Bench]:
    one = Bench(tmp_path, *request.param)
    yield one
    for store in one.opened:
        store.close()


def records(*numbers: int) -> list[bytes]:
    return [b"record %d" % number for number in numbers]


def rest(store: Any) -> list[bytes]:
    return store.get_many(1 << 30)


def test_records_come_out_once_in_the_order_they_went_in_also_after_closing_and_a_kill(bench):
    store = bench.open()
    for record in records(*range(10)):
        store.put(record)
    assert store.put_many(records(*range(10, 20))) == 10
    assert [store.get() for _ in range(3)] == records(0, 1, 2)
    store = bench.reopen()
    assert store.get_many(4) == records(3, 4, 5, 6)
    store = bench.kill()
    assert store.stats().records == 13
    assert rest(store) == records(*range(7, 20))
    assert store.stats().records == 0
    assert store.verify().ok
    assert bench.reopen().stats().records == 0


def test_an_empty_one_says_so_at_once_or_after_the_timeout_and_peek_takes_nothing(bench):
    store = bench.open()
    for act in (store.get, store.peek, lambda: store.get(timeout=0.02), lambda: store.peek(timeout=0.02)):
        with pytest.raises(Empty):
            act()
    assert store.get_many(5) == []
    store.put(b"x")
    assert [store.peek(), store.peek(), store.get()] == [b"x"] * 3
    with pytest.raises(Empty):
        store.peek()


def test_any_bytes_are_a_record_none_included(bench):
    store = bench.open()
    odd = [b"", b"\0", bytes(range(40)), b"", b"\n"]
    store.put_many(odd)
    store.put(bytearray(b"changed"))
    store = bench.kill()
    assert rest(store) == [*odd, b"changed"]


def test_what_is_no_record_stores_nothing_of_its_call(bench):
    store = bench.open()
    for wrong in ("text", None, 7):
        with pytest.raises(BadRecord):
            store.put(wrong)
        with pytest.raises(BadRecord):
            store.put_many([b"a", wrong])

    def broken() -> Iterator[bytes]:
        yield b"a"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_many(broken())
    assert store.stats().records == 0
    assert bench.kill().stats().records == 0


def test_get_many_stops_at_its_limits_and_gives_one_at_least(bench):
    store = bench.open()
    store.put_many([b"1234", b"56", b"789", b"0", b"x" * 20])
    assert store.get_many(10, max_bytes=6) == [b"1234", b"56"]
    assert store.get_many(1, max_bytes=100) == [b"789"]
    assert store.get_many(10, max_bytes=5) == [b"0"]
    assert store.get_many(10, max_bytes=5) == [b"x" * 20]


def test_a_key_stores_once_also_after_closing_and_a_kill_and_answers_the_same(bench):
    store = bench.open()
    assert store.put_many(records(1, 2), key="import 1") == 2
    assert store.put_many(records(1, 2, 3), key="import 1") == 2
    store = bench.reopen()
    assert store.put_many(records(1), key="import 1") == 2
    assert store.put_many([], key="import 2") == 0
    store = bench.kill()
    assert store.put_many(records(5), key="import 2") == 0
    for hostile in ("", " ", "a/b", "x" * 513, "\n", "..", None.__class__):
        with pytest.raises(BadKey):
            store.put_many(records(9), key=hostile)
    with pytest.raises(BadRecord):
        store.put_many([b"a", None], key="free")
    assert store.put_many(records(3), key="free") == 1, "the key of a refused call is free"
    assert rest(store) == records(1, 2, 3)


def test_a_session_happens_as_a_whole_when_it_commits_and_is_seen_by_nobody_before(bench):
    store = bench.open()
    store.put_many(records(0, 1, 2, 3))
    session = store.session()
    assert session.get() == records(0)[0]
    assert session.get_many(2) == records(1, 2)
    session.put(records(10)[0])
    session.put_many(records(11, 12))
    assert store.peek() == records(3)[0], "what it has taken is nobody else's"
    assert session.get() == records(3)[0]
    with pytest.raises(Empty):
        session.get()  # what it has put is not visible to itself either
    assert store.stats().records == 4
    assert session.commit() == 3
    assert store.stats().records == 3
    session.close()
    store = bench.kill()
    assert rest(store) == records(10, 11, 12)


@pytest.mark.parametrize("how", ["rollback", "close", "raise", "kill", "reopen"])
def test_what_a_session_does_not_commit_has_not_happened_and_records_are_at_their_place(bench, how):
    store = bench.open()
    store.put_many(records(0, 1, 2, 3, 4))
    session = store.session()
    session.get_many(3)
    session.put(b"never")
    if how == "raise":
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
    elif how in ("rollback", "close"):
        getattr(session, how)()
    else:
        store = getattr(bench, how)()
    assert store.stats().records == 5
    assert store.get() == records(0)[0]
    assert rest(store) == records(1, 2, 3, 4)
    if how == "rollback":
        session.put(b"then")
        assert session.commit() == 1
        assert rest(store) == [b"then"]


def test_sessions_side_by_side_hold_different_records_and_end_in_any_order(bench):
    store = bench.open()
    store.put_many(records(*range(6)))
    first, second, third = store.session(), store.session(), store.session()
    assert [one.get_many(2) for one in (first, second, third)] == [records(0, 1), records(2, 3), records(4, 5)]
    second.put(b"of the second")
    assert second.commit() == 1
    third.rollback()
    assert store.get() == records(4)[0]
    first.rollback()
    store = bench.kill()
    assert rest(store) == [*records(0, 1, 5), b"of the second"]


def test_a_session_under_a_known_key_does_nothing_and_what_it_took_is_there_again(bench):
    store = first = bench.open()
    store.put_many(records(0, 1))
    with store.session() as session:
        session.put(b"made")
        session.get()
        assert session.commit(key="run 1") == 1
    for again in (lambda: first, bench.reopen, bench.kill):
        store = again()
        with store.session() as session:
            assert session.get() == records(1)[0]
            session.put_many([b"made", b"twice"])
            assert session.commit(key="run 1") == 1
        assert store.stats().records == 2
    assert rest(store) == [*records(1), b"made"]


def test_a_batch_belongs_to_its_key_whatever_happens_until_it_is_acknowledged(bench):
    store = first = bench.open()
    assert store.leasing.lease("nothing there") is None
    store.put_many(records(*range(10)))
    batch = store.leasing.lease("run 1", max_records=4)
    assert (batch.state, batch.attempt, batch.records, batch.bytes) == ("leased", 1, 4, 4 * 8)
    for again in (lambda: first, bench.reopen, bench.kill):
        store = again()
        same = store.leasing.lease("run 1", max_records=9)
        assert (same.id, same.attempt, list(same)) == (batch.id, 1, records(0, 1, 2, 3))
        assert store.stats().records == 6
        assert store.peek() == records(4)[0], "what a batch has is not delivered"
    same.ack()
    same.ack()  # no error
    assert store.leasing.batches() == []
    again = store.leasing.lease("run 1")
    assert (again.id, again.state, list(again)) == (batch.id, "acked", records(0, 1, 2, 3))
    store = bench.kill()
    assert store.leasing.batch(batch.id).state == "acked"
    assert rest(store) == records(4, 5, 6, 7, 8, 9)


def test_a_batch_has_as_many_records_and_bytes_as_asked_for_and_one_at_least(bench):
    store = bench.open()
    store.put_many([b"1234", b"56", b"789", b"x" * 20, b"y"])
    taken = [list(store.leasing.lease(str(number), max_bytes=6)) for number in range(4)]
    assert taken == [[b"1234", b"56"], [b"789"], [b"x" * 20], [b"y"]]
    assert store.leasing.lease("no more") is None
    assert store.stats().records == 0


def test_a_returned_batch_comes_first_and_whole_and_after_its_last_attempt_it_is_a_dead_letter(bench):
    store = bench.open()
    store.put_many(records(*range(6)))
    first = store.leasing.lease("run 1", max_records=3)
    first.nack("no luck")
    assert store.peek() == records(3)[0], "a batch is never cut again"
    for attempt, again in ((2, bench.reopen), (3, bench.kill)):
        store = again()
        batch = store.leasing.lease(f"run {attempt}", max_records=1)
        assert (batch.id, batch.attempt, list(batch)) == (first.id, attempt, records(0, 1, 2))
        with pytest.raises(BatchConflict):
            store.leasing.lease("run 1")  # who once held it, while somebody else does
        batch.nack("no luck again")
    assert store.leasing.batches() == []
    (dead,) = store.leasing.dead()
    assert dead.reason.startswith("attempt 3 of 3")
    assert list(dead) == records(0, 1, 2)
    dead.return_to_queue()
    last = bench.kill().leasing.lease("run 4")
    assert list(last) == records(0, 1, 2)
    last.to_dead_letters("again")
    store = bench.reopen()
    (dead,) = store.leasing.dead()
    dead.drop()
    with pytest.raises(BatchNotFound):
        store.leasing.batch(dead.id)
    store = bench.kill()
    assert store.leasing.dead() == []
    assert rest(store) == records(3, 4, 5)


def test_a_returned_batch_comes_back_later_each_time(bench, clock):
    """Its time is durable, and goes by the time that has passed, whatever the wall clock says."""
    store = bench.open(retry_delay=600)
    store.put_many(records(0, 1))
    batch = store.leasing.lease("run 1", max_records=1)
    clock.advance(1)
    other = store.leasing.lease("run 2")
    batch.nack("the table is away")
    for run, minutes in ((3, 10), (4, 20)):
        store = bench.kill(retry_delay=600)
        for step in (0, 86_400, -86_400):
            clock.step(step)
            assert store.leasing.lease(f"too early {step}") is None
            seen = store.inspect()
            assert (seen.returned, seen.delayed, seen.leased) == (1, 1, 1)
            assert seen.next_due == store.leasing.batch(batch.id).due
            assert seen.next_due.timestamp() == clock.ms / 1000 + minutes * 60
        clock.advance(minutes * 60 - 0.001)
        assert bench.reopen(retry_delay=600).leasing.lease("still too early") is None
        clock.advance(0.001)
        store = bench.kill(retry_delay=600)
        assert (store.inspect().delayed, store.inspect().next_due) == (0, None)
        again = store.leasing.lease(f"run {run}")
        assert (again.id, again.due) == (batch.id, None)
        again.nack("still away")  # after its last attempt there is nothing to wait for
    assert [dead.id for dead in store.leasing.dead()] == [batch.id]
    assert store.leasing.batch(other.id).state == "leased"


def test_who_had_a_batch_gets_it_again_at_once_and_so_does_anybody_once_a_person_says_so(bench, clock):
    store = bench.open(retry_delay=600)
    store.put(records(0)[0])
    batch = store.leasing.lease("run 1")
    batch.nack("no luck")
    store.leasing.lease("run 1").nack("no luck again")
    with pytest.raises(BatchConflict):
        batch.to_dead_letters()
    assert store.leasing.lease("run 2") is None
    (batch,) = store.leasing.batches()
    batch.retry()
    assert batch.due.timestamp() == clock.ms / 1000
    store = bench.kill(retry_delay=600)
    again = store.leasing.lease("run 2")
    assert (again.id, again.attempt) == (batch.id, 3)
    with pytest.raises(BatchConflict):
        again.retry()
    again.to_dead_letters()
    again.return_to_queue()
    assert bench.kill(retry_delay=600).leasing.lease("run 3").id == batch.id, "a person has returned it"


def test_the_delay_after_a_lease_that_is_not_extended_begins_when_it_ends(bench, clock):
    store = bench.open(retry_delay=600)
    store.put(records(0)[0])
    batch = store.leasing.lease("killed", lease_timeout=60)
    clock.advance(60)
    for minute in range(10):
        seen = store.inspect()
        assert (seen.leased, seen.returned, seen.delayed) == (0, 1, 1)
        assert seen.next_due.timestamp() == clock.ms / 1000 + (10 - minute) * 60
        if minute > 5:
            assert store.leasing.lease(f"minute {minute}") is None  # this returns the batch
            store = bench.kill(retry_delay=600)
        clock.advance(60)
    assert store.leasing.lease("then").id == batch.id


def test_the_longest_delay_is_an_hour_or_the_first_one(tmp_path, clock):
    for first, longest in ((1000, 3600), (7200, 7200)):
        with Queue(tmp_path / str(first), retry_delay=first, max_attempts=1 << 31) as queue:
            queue.put(b"x")
            for attempt in range(1, 200):
                batch = queue.lease(f"run {attempt}")
                batch.nack()
                delay = batch.due.timestamp() - clock.ms / 1000
                assert delay == min(longest, first * 2 ** (attempt - 1))
                clock.advance(delay)


def test_an_owner_of_an_earlier_attempt_cannot_end_the_batch(bench):
    store = bench.open()
    store.put_many(records(0, 1))
    old = store.leasing.lease("run 1")
    store.leasing.batch(old.id).nack()
    new = store.leasing.lease("run 2")
    for act in (old.ack, old.nack, old.to_dead_letters, old.put_back):
        with pytest.raises(BatchConflict):
            act()
    new.ack()
    assert bench.kill().leasing.batch(new.id).state == "acked"


def test_records_of_a_batch_that_is_put_back_are_at_the_front_and_are_leased_as_others(bench):
    store = bench.open()
    store.put_many(records(*range(6)))
    batch = store.leasing.lease("run 1", max_records=3)
    batch.put_back()
    assert store.leasing.batches() == []
    assert store.stats().records == 6
    store = bench.kill()
    assert store.get() == records(0)[0]
    assert list(store.leasing.lease("run 1", max_records=2)) == records(1, 2)
    assert rest(bench.reopen()) == records(3, 4, 5)


def test_a_lease_takes_what_no_session_holds(bench):
    store = bench.open()
    store.put_many(records(*range(5)))
    session = store.session()
    session.get_many(2)
    assert list(store.leasing.lease("run 1", max_records=2)) == records(2, 3)
    session.rollback()
    assert list(store.leasing.lease("run 2")) == records(0, 1, 4)


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_lease_goes_on_behind_what_was_put_back_and_taken_by_a_session(bench, outcome):
    store = bench.open()
    store.put_many(records(*range(5)))
    store.leasing.lease("run 1", max_records=2).put_back()
    with store.session() as session:
        assert session.get_many(2) == records(0, 1)
        getattr(session, outcome)()
    assert list(store.leasing.lease("run 2")) == records(*range(5) if outcome == "rollback" else range(2, 5))


def test_a_lease_whose_time_is_over_is_returned_by_anyone(bench, clock):
    store = bench.open()
    store.put_many(records(0, 1))
    batch = store.leasing.lease("run 1", lease_timeout=10)
    clock.advance(9)
    batch.extend()
    clock.advance(9)
    assert store.leasing.return_expired() == []
    clock.advance(1)
    store = bench.kill()
    assert [one.id for one in store.leasing.return_expired()] == [batch.id]
    again = store.leasing.lease("run 2")
    assert (again.id, again.attempt) == (batch.id, 2)
    with pytest.raises(BatchConflict):
        store.leasing.lease("run 1")


def test_acknowledged_records_are_kept_for_a_while_and_their_key_is_remembered(bench):
    store = bench.open()
    store.put_many(records(0, 1))
    batch = store.leasing.lease("run 1")
    store.leasing._leases.retention = timedelta(0)
    batch.ack()
    with pytest.raises(BatchExpired):
        store.leasing.lease("run 1")
    store = bench.kill()
    with pytest.raises(BatchExpired):
        store.leasing.batch(batch.id)
    with pytest.raises(BatchExpired):
        list(batch)


def test_looking_without_a_lock_sees_the_last_commit(bench):
    store = bench.open()
    store.put_many(records(*range(8)))
    store.get_many(2)
    store.leasing.lease("run 1", max_records=1).nack()
    store.leasing.lease("run 2")
    store.leasing.lease("run 3", max_records=2)
    found, known = store.inspect(), store.stats()
    assert (found.records, found.bytes, found.leased, found.returned, found.dead) == (3, 24, 2, 0, 0)
    assert (known.records, known.bytes, known.leased, known.returned, known.dead) == (3, 24, 2, 0, 0)
    assert found.oldest is not None
    rest(store)
    assert (store.inspect().records, store.inspect().oldest) == (0, None)


def test_who_has_stored_keeps_others_from_storing_until_it_closes_or_dies(bench):
    store = bench.open()
    store.put(b"mine")
    with pytest.raises(Locked) as caught:
        bench.open().put(b"of another")
    assert caught.value.pid == os.getpid()
    store.close()
    other = bench.open()
    other.put(b"then")
    assert rest(other) == [b"mine", b"then"]


DIES = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stores import STORES
store = STORES[sys.argv[2]][0](Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
store.put_many([b"a", b"b", b"c"])
session = store.session()
session.get()
session.put(b"never")
os.kill(os.getpid(), 9)
"""


def test_what_was_stored_outlives_a_process_that_is_killed_and_its_lock_does_not(bench):
    name = next(name for name, (kind, _) in STORES.items() if kind is bench.store_of)
    arguments = (Path(__file__).parent, name, bench.path, bench.size, bench.sync)
    done = subprocess.run([sys.executable, "-c", DIES, *map(str, arguments)], check=False, timeout=300)
    assert done.returncode == -9
    store = bench.open()
    store.put(b"d")
    assert rest(store) == [b"a", b"b", b"c", b"d"]


def test_after_close_every_call_is_refused_and_a_second_close_is_none(bench):
    store = bench.open()
    store.put(b"x")
    batch = store.leasing.lease("run 1")
    session = store.session()
    store.close()
    store.close()
    acts = [store.get, store.peek, store.stats, store.session, lambda: store.get_many(1), lambda: store.put(b"y"), batch.ack]
    for act in [*acts, lambda: store.put_many([b"y"]), lambda: store.leasing.lease("run 2"), store.leasing.batches]:
        with pytest.raises(Closed):
            act()
    with pytest.raises(Closed):
        session.commit()


def test_space_of_what_was_taken_is_given_back(bench):
    """A chunk, or a block, is there as long as something in it is wanted."""
    store = bench.open()

    def used() -> int:
        return sum(one.stat().st_size for one in bench.folder.rglob("*") if one.suffix == ".zbus" or one.suffix[1:].isdecimal())

    for number in range(40):
        store.put_many([b"%d" % number + b"x" * 40] * 20)
        assert len(rest(store)) == 20
    store = bench.reopen()
    assert used() < max(6000, 2 * bench.size), "of 32,000 bytes, and a head for each message"


class Model:
    """What waits, what sessions hold and what batches have, as lists."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.batches: dict[str, tuple[str, list[int], int, str]] = {}  # by id: state, records, attempt, key
        self.rolled_back: set[int] = set()  # what a session may have had and given back

    def in_state(self, *states: str) -> list[str]:
        return [batch_id for batch_id, one in self.batches.items() if one[0] in states]


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_calls_does_what_lists_would_do(bench, seed):
    """Both layouts against one model; closed, killed and opened again in between."""
    luck, model, store = random.Random(seed), Model(), bench.open()
    numbers = itertools.count()

    def some(most: int = 5) -> list[int]:
        return [next(numbers) for _ in range(luck.randint(1, most))]

    def as_records(found: list[int]) -> list[bytes]:
        return [b"%d" % number + b"x" * (number * 7 % 60 % 40) for number in found]

    for step in range(70):
        act = luck.choice(
            ["put", "put", "get", "get_many", "session", "session", "lease", "lease", "ack", "nack", "put_back", "dead"]
            + ["reopen", "kill"] * (step % 3 == 0)
        )
        if act == "put":
            new = some()
            assert store.put_many(as_records(new)) == len(new)
            model.waiting += new
        elif act == "get" and model.waiting:
            assert [store.get()] == as_records([model.waiting.pop(0)])
        elif act == "get_many":
            count = luck.randint(1, 6)
            assert store.get_many(count) == as_records(model.waiting[:count])
            del model.waiting[:count]
        elif act == "session":
            count, new = luck.randint(1, 6), some(3)
            session = store.session()
            session.put_many(as_records(new))
            assert session.get_many(count) == as_records(model.waiting[:count])
            if luck.random() < 0.5:
                session.commit()
                model.waiting = model.waiting[count:] + new
            elif luck.random() < 0.5:
                session.rollback()
            else:
                store = bench.kill()
            model.rolled_back.update(model.waiting[:count])
        elif act == "lease":
            key, count = f"run {step}", luck.randint(1, 6)
            batch = store.leasing.lease(key, max_records=count)
            if returned := model.in_state("returned"):
                _, had, attempt, _ = model.batches[returned[0]]
                assert (batch.id, list(batch), batch.attempt) == (returned[0], as_records(had), attempt + 1)
                model.batches[batch.id] = ("leased", had, attempt + 1, key)
            elif model.waiting:
                assert list(batch) == as_records(model.waiting[:count])
                model.batches[batch.id] = ("leased", model.waiting[:count], 1, key)
                del model.waiting[:count]
            else:
                assert batch is None
        elif act in ("ack", "nack", "put_back") and (leased := model.in_state("leased")):
            batch_id = luck.choice(leased)
            _, had, attempt, key = model.batches[batch_id]
            batch = store.leasing.lease(key)
            assert (batch.id, list(batch)) == (batch_id, as_records(had))
            if act == "put_back":
                if model.waiting and model.waiting[0] < had[-1]:
                    continue  # a topic puts them behind what comes before them in the topic, a queue in front of all
                if model.rolled_back & set(model.waiting):
                    continue  # a topic delivers that first
                batch.put_back()
                model.waiting = had + model.waiting
                del model.batches[batch_id]
            elif act == "ack":
                batch.ack()
                del model.batches[batch_id]
            else:
                batch.nack()
                model.batches[batch_id] = ("returned" if attempt < 3 else "dead", had, attempt, key)
        elif act == "dead" and (dead := model.in_state("dead")):
            batch = store.leasing.batch(dead[0])
            if luck.random() < 0.5:
                batch.drop()
                del model.batches[dead[0]]
            else:
                batch.return_to_queue()
                model.batches[dead[0]] = ("returned", *model.batches[dead[0]][1:])
        elif act in ("reopen", "kill"):
            store = getattr(bench, act)()
        assert store.stats().records == len(model.waiting)
        assert {one.id: one.state for one in (*store.leasing.batches(), *store.leasing.dead())} == {
            batch_id: one[0] for batch_id, one in model.batches.items()
        }
    assert store.verify().problems == []
    assert rest(store) == as_records(model.waiting)


def test_a_reader_whose_log_is_damaged_does_not_make_appends_fail_that_have_happened(tmp_path):
    """Only trimming needs to know where readers are; what raises has stored nothing, so it must not raise afterwards."""
    with Topic(tmp_path / "t", block_size=300, max_records=1) as topic:
        topic.reader("r").close()
        log = tmp_path / "t" / "state" / "r.wal"
        log.write_bytes(b"damaged" + log.read_bytes()[7:])
        assert [topic.append(b"x" * 200) for _ in range(5)] == list(range(5))
        with pytest.raises(Corrupt):
            topic.trim()
        assert len(topic) == 5, "and nothing is removed that the reader may need"
