"""The wall clock is set ahead and back, and the machine starts again: nothing is forgotten, hidden or taken because of it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import Clock

from qewqew_core import BatchConflict, Empty, Message, Queue, QueueStats, Reader, Stage, Topic, inspect, inspect_reader, repair
from qewqew_core.clock import NO_CLOCK, RUNS, STEP
from qewqew_core.clock import Clock as StoreClock
from qewqew_core.disk.files import Files
from qewqew_core.keys import KEYS_KEPT_MS
from qewqew_core.limits import LIMITS
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths
from qewqew_core.tools import monitoring
from qewqew_core.topic.topic_inspection import inspect_topic

MINUTE, HOUR, DAY = 60, 3600, 86_400
Put = Callable[[bytes], object]
Kind = Callable[..., "contextmanager[tuple[Queue | Reader, Put]]"]


@contextmanager
def queue(folder: Path, **settings: object) -> Iterator[tuple[Queue | Reader, Put]]:
    with Queue(folder / "q", **settings) as opened:  # type: ignore[arg-type]
        yield opened, opened.put


@contextmanager
def reader(folder: Path, **settings: object) -> Iterator[tuple[Queue | Reader, Put]]:
    with Topic(folder / "t", **settings) as topic, topic.reader("r") as opened:  # type: ignore[arg-type]
        yield opened, topic.append


KINDS = pytest.mark.parametrize("kind", [queue, reader])
STEPS = pytest.mark.parametrize("ahead", [40 * DAY, -40 * DAY], ids=("ahead", "back"))


def looked(kind: Kind, folder: Path) -> QueueStats:
    """Without a lock."""
    return inspect(folder / "q") if kind is queue else inspect_reader(folder / "t", "r")


def put_in_queue(folder: Path, key: str) -> int:
    with Queue(folder / "q") as opened:
        opened.put_many([b"x"], key=key)
        return len(opened)


def put_by_session(folder: Path, key: str) -> int:
    with Queue(folder / "q") as opened:
        with opened.session() as session:
            session.put(b"x")
            session.commit(key=key)
        return len(opened)


def put_by_stage(folder: Path, key: str) -> int:
    with Stage(folder / "q") as stage:
        stage.put(b"x")
        stage.commit(key=key)
    return inspect(folder / "q").records


def append_to_topic(folder: Path, key: str) -> int:
    with Topic(folder / "t") as topic:
        topic.append_many([b"x"], key=key)
        return len(topic)


def append_by_session(folder: Path, key: str) -> int:
    with Topic(folder / "t") as topic:
        with topic.session() as session:
            session.append(b"x")
            session.commit(key=key)
        return len(topic)


@STEPS
@pytest.mark.parametrize("put", [put_in_queue, put_by_session, put_by_stage, append_to_topic, append_by_session])
def test_a_key_is_remembered_whatever_the_clock_says_at_other_commits(
    put: Callable[[Path, str], int], ahead: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "log_frames_at_close", 1)  # each close forgets what it may
    assert put(tmp_path, "one") == 1
    clock.step(ahead)
    assert put(tmp_path, "two") == 2
    clock.step(-ahead)
    assert put(tmp_path, "three") == 3
    assert [put(tmp_path, key) for key in ("one", "two", "three")] == [3, 3, 3]
    clock.advance(KEYS_KEPT_MS / 1000 + 1)
    put(tmp_path, "four")
    assert put(tmp_path, "two") == 5  # after thirty days that have passed, as ever


@KINDS
@STEPS
def test_acknowledged_batches_are_kept_and_their_keys_too(kind: Kind, ahead: float, tmp_path: Path, clock: Clock) -> None:
    with kind(tmp_path) as (store, put):
        for key in "abc":
            put(b"x")
            batch = store.lease(key)
            assert batch is not None
            batch.ack()
            clock.step(ahead if key != "c" else -2 * ahead)
        assert [batch.key for batch in store.acknowledged()] == ["a", "b", "c"]
        clock.advance(DAY + 1)
        put(b"x")
        last = store.lease("d")
        assert last is not None
        last.ack()
        assert [batch.key for batch in store.acknowledged()] == ["d"]


@KINDS
@STEPS
@pytest.mark.parametrize("opened_again", [False, True])
def test_a_lease_ends_after_its_time_and_no_step_takes_it(
    kind: Kind, ahead: float, opened_again: bool, tmp_path: Path, clock: Clock
) -> None:
    with kind(tmp_path) as (store, put):
        put(b"x")
        batch = store.lease("mine", lease_timeout=MINUTE)
        assert batch is not None
        clock.step(ahead)
        if not opened_again:
            assert store.lease("other") is None
            batch.extend()
    with kind(tmp_path) as (store, put):
        assert store.lease("other") is None
        clock.advance(MINUTE - 1)
        assert store.return_expired() == []
        assert looked(kind, tmp_path).leased == store.stats().leased == 1
        clock.step(-ahead)
        assert looked(kind, tmp_path).leased == store.stats().leased == 1
        clock.advance(1)
        assert looked(kind, tmp_path).returned == store.stats().returned == 1
        [returned] = store.return_expired()
        assert returned.state == "returned"
        other = store.lease("other")
        assert other is not None
        with pytest.raises(BatchConflict):
            store.lease("mine")


def nack(topic: Topic, one: Reader) -> None:
    one.nack(*one.read_many(2))


def close(topic: Topic, one: Reader) -> None:
    with topic.reader("r") as other:
        other.read_many(2)


def roll_back(topic: Topic, one: Reader) -> None:
    with topic.session() as session:
        session.read_many(one, 2)
        session.rollback()


@pytest.mark.parametrize("give_back", [nack, close, roll_back])
@pytest.mark.parametrize("take", ["read", "lease"])
@STEPS
def test_what_is_given_back_without_a_delay_is_due_at_once(
    give_back: Callable[[Topic, Reader], None], take: str, ahead: float, tmp_path: Path, clock: Clock
) -> None:
    with Topic(tmp_path / "t") as topic, topic.reader("r") as one:
        topic.append_many([b"0", b"1", b"2"])
        clock.step(ahead)
        give_back(topic, one)
        clock.step(-ahead)
        assert one.peek().body == b"0"
        if take == "read":
            assert [message.body for message in one.read_many(5)] == [b"0", b"1", b"2"]
        else:
            batch = one.lease("key")
            assert batch is not None
            assert list(batch) == [b"0", b"1", b"2"]


@STEPS
def test_a_delay_and_a_delivery_last_as_long_as_they_do(ahead: float, tmp_path: Path, clock: Clock) -> None:
    with Topic(tmp_path / "t") as topic, topic.reader("r", redeliver_after=MINUTE) as one, topic.reader("r") as other:
        topic.append_many([b"0", b"1"])
        delayed = one.read()
        one.nack(delayed, delay=MINUTE)
        in_flight = one.read()
        for seconds in (ahead, -2 * ahead):
            clock.step(seconds)
            with pytest.raises(Empty):
                other.read()
        clock.advance(MINUTE)
        assert [message.body for message in other.read_many(5)] == [delayed.body, in_flight.body]


@STEPS
def test_blocks_stay_for_their_age_whatever_the_clock_says_meanwhile(ahead: float, tmp_path: Path, clock: Clock) -> None:
    def numbers() -> list[int]:
        return [message.number for message in topic]

    with Topic(tmp_path / "t", block_size=300, max_age=timedelta(hours=1)) as topic:
        for number in range(6):
            if number == 2:
                clock.step(ahead)
            if number == 4:
                clock.step(-ahead)
            topic.append(bytes(250))
    with Topic(tmp_path / "t", block_size=300, max_age=timedelta(hours=1)) as topic:
        topic.trim()
        assert numbers() == [0, 1, 2, 3, 4, 5]
        clock.advance(HOUR)
        topic.append(bytes(250))
        assert numbers() == [0, 1, 2, 3, 4, 5, 6]
        clock.advance(1)
        topic.trim()
        assert numbers() == [6]


@KINDS
@pytest.mark.parametrize("opened_again", [False, True])
def test_what_was_made_while_the_clock_was_ahead_grows_old(kind: Kind, opened_again: bool, tmp_path: Path, clock: Clock) -> None:
    with kind(tmp_path) as (store, put):
        clock.step(DAY)
        put(b"leased")
        assert store.lease("key")
        put(b"waits")
        clock.step(-DAY)
        if not opened_again:
            put(b"later")
        for hours in (0, 3, 6):
            seen = looked(kind, tmp_path)
            assert seen == store.stats()
            assert [monitoring.age(moment) for moment in (seen.oldest, seen.oldest_lease)] == [timedelta(hours=hours)] * 2
            assert seen.clock_step == -DAY
            clock.advance(3 * HOUR)
    with kind(tmp_path) as (store, put):
        assert monitoring.age(looked(kind, tmp_path).oldest) == monitoring.age(store.stats().oldest) == timedelta(hours=9)


def test_the_oldest_message_of_a_topic_grows_old_in_a_full_block_too(tmp_path: Path, clock: Clock) -> None:
    """Also one whose timestamp, which its producer gave it, is in the future."""
    with Topic(tmp_path / "t", block_size=300) as topic:
        for _ in range(3):
            topic.append_many([Message(bytes(250), timestamp=clock.ms + DAY * 1000)])
        topic.append(b"")
        for _ in range(2):
            assert monitoring.age(topic.stats().oldest) == monitoring.age(inspect_topic(tmp_path / "t")[0].oldest)
            clock.advance(HOUR)
        assert monitoring.age(topic.stats().oldest) == timedelta(hours=2)


@KINDS
@pytest.mark.parametrize("off", [-HOUR, MINUTE, 400 * DAY])
def test_after_a_restart_of_the_machine_time_goes_on_where_the_log_ends(
    kind: Kind, off: float, tmp_path: Path, clock: Clock
) -> None:
    """Nobody knows how long it was off, whatever the wall clock says."""
    with kind(tmp_path, max_attempts=1) as (store, put):
        put(b"acknowledged")
        batch = store.lease("done")
        assert batch is not None
        batch.ack()
        put(b"leased")
        assert store.lease("key", lease_timeout=MINUTE)
    for _ in range(4):  # whoever looks now and then changes nothing, and time passes for the store all the same
        clock.restart(off) if clock.runs == 0 else clock.advance(MINUTE / 4)
        assert looked(kind, tmp_path).leased == 1
        with kind(tmp_path, max_attempts=1) as (store, put):
            assert store.return_expired() == []
            assert looked(kind, tmp_path) == store.stats()
    clock.advance(MINUTE / 4)
    with kind(tmp_path, max_attempts=1) as (store, put):
        assert [batch.key for batch in store.return_expired()] == ["key"]
        put(b"new")
        batch = store.lease("new")
        assert batch is not None
        batch.ack()
        assert [batch.key for batch in store.acknowledged()] == ["done", "new"]


@pytest.mark.parametrize("put", [put_in_queue, append_to_topic])
def test_keys_are_remembered_over_restarts_whatever_the_clock_says(
    put: Callable[[Path, str], int], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "log_frames_at_close", 1)
    for number in range(3):
        assert put(tmp_path, f"key {number}") == number + 1
        clock.restart(400 * DAY if number == 1 else -300 * DAY)
    assert [put(tmp_path, f"key {number}") for number in range(3)] == [3, 3, 3]


@KINDS
def test_hosts_that_use_a_store_in_turn_count_the_time_of_each(kind: Kind, tmp_path: Path, clock: Clock) -> None:
    """They share a file system. However briefly each has the store, a lease ends; and no uptime passes for time."""
    started = {0: clock.started, 1: clock.started - 1000 * DAY * 1000}
    with kind(tmp_path) as (store, put):
        put(b"x")
        assert store.lease("key", lease_timeout=MINUTE)
    ended = []
    for turn in range(13):
        clock.runs, clock.started = turn % 2, started[turn % 2]
        with kind(tmp_path) as (store, put):
            ended.append(len(store.return_expired()))
        clock.advance(10)
    assert 6 <= ended.index(1) <= 8


@KINDS
def test_an_opening_says_once_that_the_clock_is_behind_what_the_log_says(
    kind: Kind, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with kind(tmp_path) as (store, put):
        put(b"x")
        assert store.lease("key")
        clock.advance(MINUTE)
        assert not caplog.records
    clock.step(-HOUR)
    with caplog.at_level(logging.WARNING), kind(tmp_path) as (store, put):
        put(b"y")
        assert store.lease("other")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if kind is queue else 2), said  # a topic and its reader
    assert all(" s in the future" in text and "timedatectl" in text for text in said)
    caplog.clear()
    with caplog.at_level(logging.WARNING), kind(tmp_path) as (store, put):
        put(b"z")
    assert not caplog.records


@pytest.mark.parametrize("name", ["q", "t"])
def test_a_kill_leaves_the_same_ages(name: str, tmp_path: Path, clock: Clock) -> None:
    kind: Kind = queue if name == "q" else reader
    with kind(tmp_path) as (store, put):
        for number, seconds in enumerate((DAY, -2 * DAY, 30, 40 * DAY)):
            put(b"x")
            assert store.lease(f"key {number}", lease_timeout=MINUTE)
            clock.step(seconds)
            clock.advance(10)
        shutil.copytree(tmp_path, killed := tmp_path.with_name(f"killed {name}"))
        clock.advance(15)
        open_one = [batch.expires for batch in store.batches()]
        with kind(killed) as (other, _):
            assert [batch.expires for batch in other.batches()] == open_one
        clock.advance(10)
        expired = [batch.key for batch in store.return_expired()]
        with kind(killed) as (other, _):
            assert [batch.key for batch in other.return_expired()] == expired == ["key 0"]


def test_a_repair_keeps_what_is_known_of_time(tmp_path: Path, clock: Clock) -> None:
    with Queue(tmp_path / "q") as store:
        clock.advance(100 * DAY)
        store.put_many([b"x", b"y"], key="key")
        assert store.lease("mine", max_records=1, lease_timeout=MINUTE)
        shutil.copytree(tmp_path, damaged := tmp_path.with_name("damaged"))
    log = damaged / f"q{paths.LOG}"
    data = bytearray(log.read_bytes())
    data[logs.replay(bytes(data), str(log)).end - 1] ^= 1  # the lease is torn
    data[20] ^= 1  # and the first frame damaged, which has the clock
    log.write_bytes(data)
    assert not repair(damaged / "q").ok
    with Queue(damaged / "q") as store:
        clock.advance(MINUTE)
        assert {batch.state for batch in (*store.return_expired(), *store.batches())} <= {"returned", "dead"}
        assert store.put_many([b"x", b"y"], key="key") == 2
        clock.advance(KEYS_KEPT_MS / 1000)
        assert monitoring.age(store.stats().oldest) <= timedelta(days=130, minutes=2)


def test_a_step_of_less_than_a_second_is_no_step(tmp_path: Path, clock: Clock) -> None:
    with Queue(tmp_path / "q") as store:
        store.put(b"x")
        clock.step(0.9)
        store.put(b"x")
        assert store.stats().clock_step == 0
        clock.step(0.1)
        clock.advance(STEP / 1000)
        store.put(b"x")
        assert store.stats().clock_step == 1


def test_a_machine_that_does_not_name_its_runs_counts_while_a_store_is_open(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "boot", lambda self: b"")
    with Queue(tmp_path / "q") as store:
        store.put(b"x")
        assert store.lease("key", lease_timeout=MINUTE)
    clock.advance(DAY)
    with Queue(tmp_path / "q") as store:
        assert store.return_expired() == []
        clock.advance(MINUTE)
        assert len(store.return_expired()) == 1


def test_so_many_runs_are_remembered() -> None:
    found = NO_CLOCK
    for number in range(3 * RUNS):
        found = found.then(StoreClock(b"run %d" % (number % (RUNS + 5)), number, number, number))
    assert [each.elapsed for each in found.each()] == [*range(2 * RUNS - 1, 3 * RUNS)]
    assert all(each.others == () for each in found.others)


@KINDS
@STEPS
def test_a_clock_that_is_wrong_only_while_a_store_is_closed_ends_nothing(
    kind: Kind, ahead: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit is made by the wrong clock, and the log is cut back by it."""
    monkeypatch.setattr(LIMITS, "log_frames_at_close", 1)
    monkeypatch.setattr(LIMITS, "reader_log_bytes_at_close", 1)
    opening = kind(tmp_path)
    store, put = opening.__enter__()
    for _ in range(3):
        put(b"x")
    store.lease("acked", max_records=1).ack()
    store.lease("leased", max_records=1, lease_timeout=HOUR)
    clock.step(ahead)
    opening.__exit__(None, None, None)
    clock.step(-ahead)
    with kind(tmp_path) as (store, put):
        put(b"x")
        assert store.return_expired() == []
        assert [batch.key for batch in store.acknowledged()] == ["acked"]
        assert store.find_batch("acked").records == 1
    with kind(tmp_path) as (store, put):
        clock.advance(HOUR + 1)
        put(b"x")
        assert [batch.key for batch in store.return_expired()] == ["leased"]


@STEPS
def test_blocks_and_keys_of_a_topic_outlast_a_clock_that_is_wrong_at_its_close(
    ahead: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "log_frames_at_close", 1)

    def opened() -> Topic:
        return Topic(tmp_path / "t", max_age=timedelta(days=1), block_size=1000, slow_readers="move")

    topic = opened()
    topic.append_many([b"x" * 300] * 6, key="one")
    for _ in range(4):
        topic.append(b"x" * 300)
    clock.step(ahead)
    topic.close()
    clock.step(-ahead)
    for _ in range(3):
        with opened() as topic:
            topic.trim()
            assert topic.append_many([b"y"], key="one") == 6
            assert len(topic) == 10
