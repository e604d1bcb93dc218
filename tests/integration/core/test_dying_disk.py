"""A disk dies and comes back while the machine lives on, or is copied under a running program: what returned is there, once.

The page cache of the machine is not what the disk has then, though the machine was not started anew: nothing may be believed
for that reason. Only what returned *before* the disk died counts (see `test_power_cut.py`).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from dying_disk import KINDS, LOG_FLUSHED, NOTHING_FLUSHED, Crowd, Disk, Said, Say, Work, crowd, disk, same, wait
from stride import OFFSET

from qewqew_core import BadPath, Broken, Closed, DiskFull, Locked, Queue, Stage, Topic
from qewqew_core.disk import lock
from qewqew_core.queue import paths

WAITS = 60.0  # seconds for which those in the crowd stand in line
Sync = Literal["commit", "never"]
NAMED = tuple(each.__name__ for each in (BadPath, Broken, Closed, DiskFull, Locked))  # what a dead disk may be called


# The crowd of a queue


def commits(say: Say, luck: random.Random, name: str) -> Iterator[tuple[str, list[bytes]]]:
    """What to put under which key; each is said before, and again when the caller comes back for the next."""
    number = 0
    while True:
        number += 1
        key = f"{name}.{number}"
        records = [f"{key}.{index} {'x' * luck.choice((10, 300))}" for index in range(luck.choice((1, 5, 60)))]
        say("try", key, [record.split()[0] for record in records])
        yield key, [record.encode() for record in records]
        say("put", key)


def stage(path: Path) -> Work:
    def work(say: Say, luck: random.Random, name: str) -> None:
        for key, records in commits(say, luck, name):
            with Stage(path, lock_timeout=WAITS) as one:
                one.put_many(records)
                one.commit(key)

    return work


def own(path: Path) -> Work:
    """An owner who comes and goes, and hands the queue to the next; now and then one that only looks."""

    def work(say: Say, luck: random.Random, name: str) -> None:
        for key, records in commits(say, luck, name):
            with Queue(path, lock_timeout=WAITS) as queue:
                len(queue)
            with Queue(path, lock_timeout=WAITS) as queue:
                queue.put_many(records, key=key)
                if luck.randrange(3) == 0:  # to the end, in one commit
                    with queue.session() as session:
                        session.put_many(session.get_many(20))

    return work


def consume(path: Path) -> Work:
    def work(say: Say, luck: random.Random, name: str) -> None:
        number = 0
        while True:
            number += 1
            with Queue(path, lock_timeout=WAITS) as queue:
                batch = queue.lease(f"{name}.{number}", max_records=50)
                if batch is not None:
                    end(batch, say, luck)

    return work


def end(batch, say: Say, luck: random.Random) -> None:
    match luck.randrange(4):
        case 0:
            batch.nack("again")
        case 1:
            batch.put_back()
        case _:
            say("trying", [batch.id])
            batch.ack()
            say("done", [batch.id])


def check_queue(path: Path, said: Said, before: Said) -> None:
    """What returned is there; and when what was begun is done again, under its keys, everything is there once."""
    with Queue(path) as queue:
        assert queue.verify().problems == []
        same(in_queue(queue), said, before)
        acknowledged = {batch.id for batch in queue.acknowledged()}
        assert before.done - said.all <= acknowledged, "an acknowledgement is lost"
        assert acknowledged <= said.trying, "a batch is acknowledged, and nobody did it"
        for key in said.tried.keys() - before.put:
            queue.put_many([record.encode() for record in said.tried[key]], key=key)
        same(in_queue(queue), said, said)
        assert in_queue(queue).keys() == said.all


def in_queue(queue: Queue) -> Counter[str]:
    return names(queue, *queue.batches(), *queue.dead(), *queue.acknowledged())


def names(*places: Iterable[bytes]) -> Counter[str]:
    return Counter(record.split()[0].decode() for place in places for record in place)


# The crowd of a topic


def append(path: Path, sync: Sync) -> Work:
    def work(say: Say, luck: random.Random, name: str) -> None:
        for key, records in commits(say, luck, name):
            with Topic(path, sync=sync, lock_timeout=WAITS) as topic:
                topic.append_many(records, key=key)

    return work


def read(path: Path, sync: Sync) -> Work:
    def work(say: Say, luck: random.Random, name: str) -> None:
        while True:
            with Topic(path, sync=sync, lock_timeout=WAITS) as topic, topic.reader("read", redeliver_after=None) as reader:
                for _ in range(luck.randrange(1, 20)):
                    if messages := reader.read_many(luck.choice((1, 20)), timeout=0.1):
                        bodies = [*names([message.body for message in messages])]
                        say("trying", bodies)
                        reader.commit(*messages)
                        say("done", bodies)

    return work


def lease(path: Path, sync: Sync) -> Work:
    def work(say: Say, luck: random.Random, name: str) -> None:
        number = 0
        while True:
            with Topic(path, sync=sync, lock_timeout=WAITS) as topic, topic.reader("lease") as reader:
                for _ in range(luck.randrange(1, 10)):
                    number += 1
                    if (batch := reader.lease(f"{name}.{number}", max_records=50)) is not None:
                        end(batch, say, luck)

    return work


def check_topic(path: Path, said: Said, before: Said) -> None:
    with Topic(path) as topic:
        assert topic.verify().problems == []
        found = names(message.body for message in topic)
        same(found, said, before)
        with topic.reader("read") as reader:
            left = names(message.body for message in reader.read_many(1 << 30))
            assert not (back := left.keys() & before.done), f"{len(back):,} committed messages come again: {sorted(back)[:5]}"
            assert not (passed := found.keys() - left.keys() - said.trying), f"nobody got {len(passed):,}: {sorted(passed)[:5]}"
            assert max(left.values(), default=1) == 1
        with topic.reader("lease") as reader:
            acknowledged = reader.acknowledged()
            assert before.done - said.all <= {batch.id for batch in acknowledged} <= said.trying
            all_batches = [*reader.batches(), *reader.dead(), *acknowledged]
            leased = names(message.body for batch in all_batches for message in batch.messages())
            left = names(message.body for message in reader.read_many(1 << 30))
            assert leased + left == found
        for key in said.tried.keys() - before.put:
            topic.append_many([record.encode() for record in said.tried[key]], key=key)
        with topic.reader("read") as reader:  # what was lost of its commits comes again; now nothing does
            reader.commit(*reader.read_many(1 << 30))
        assert names(message.body for message in topic) == Counter(said.all)


# What becomes of their disk


@dataclass(frozen=True)
class Store:
    make: Callable[[Path], object]
    crowd: Callable[[Path], list[Work]]
    check: Callable[[Path, Said, Said], None]
    durable: bool = True  # what returned


def make_queue(path: Path) -> None:
    Queue(path).close()


def make_topic(path: Path) -> None:
    with Topic(path) as topic, topic.reader("read"), topic.reader("lease"):
        topic.recover()


def queue_crowd(path: Path) -> list[Work]:
    return [stage(path), stage(path), stage(path), own(path), own(path), consume(path)]


def topic_crowd(sync: Sync) -> Callable[[Path], list[Work]]:
    return lambda path: [append(path, sync), append(path, sync), read(path, sync), read(path, sync), lease(path, sync)]


STORES = {
    "queue": Store(make_queue, queue_crowd, check_queue),
    "topic": Store(make_topic, topic_crowd("commit"), check_topic),
    "topic, never": Store(make_topic, topic_crowd("never"), check_topic, durable=False),
}


@contextlib.contextmanager
def at_work(one: Disk, store: Store, seed: int) -> Iterator[Crowd]:
    store.make(one.root / "store")
    with crowd(one.home / "crowd", seed) as people:
        yield people


def after_some_work(people: Crowd, luck: random.Random) -> None:
    """All stand still somewhere, when so much is done that a death matters."""
    put = len(people.said().put)
    wait(lambda: len(people.said().put) >= put + 12, "nothing gets done")
    time.sleep(luck.random() * 0.1)
    people.stop()


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_journal_is_aborted_and_the_disk_is_mounted_again(tmp_path, kind, name):
    run_aborts(tmp_path, kind, STORES[name], rounds=4, seed=OFFSET)


def run_aborts(tmp_path: Path, kind: str, store: Store, rounds: int, seed: int) -> None:
    luck = random.Random(seed)
    with disk(tmp_path, kind) as one, at_work(one, store, seed) as people:
        before = began = people.said()
        for _ in range(rounds):
            people.start(*store.crowd(one.root / "store"))
            after_some_work(people, luck)
            assert people.said().errors == began.errors, "while the disk was well"
            one.write_back(luck)
            if store.durable:
                before = people.said()
            one.abort(luck.choice((LOG_FLUSHED, NOTHING_FLUSHED)))
            people.go_on()
            people.ended()
            said = people.said()
            assert {error for error in said.errors if not error.startswith(NAMED)} == set()
            one.remount()
            store.check(one.root / "store", said, before)
            people.finished(said)
            before = began = people.said()


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_the_blocks_is_restored_on_the_same_machine(tmp_path, kind, name):
    run_snapshots(tmp_path, kind, STORES[name], rounds=5, seed=OFFSET)


def run_snapshots(tmp_path: Path, kind: str, store: Store, rounds: int, seed: int) -> None:
    luck = random.Random(seed)
    with disk(tmp_path, kind) as one, at_work(one, store, seed) as people:
        before = people.said()
        people.start(*store.crowd(one.root / "store"))
        (one.home / "restored").mkdir()
        for _ in range(rounds):
            after_some_work(people, luck)
            one.write_back(luck)
            if store.durable:
                before = people.said()
            copy = one.snapshot(one.home / "restored")
            said = people.said()
            assert said.errors == set()
            copy.mount()
            store.check(copy.root / "store", said, before)
            copy.unmount()
            people.go_on()


LOG = f"store{paths.LOG}"
WRITTEN = {"the log": [LOG], "the chunks": ["store.[0-9]*"], "both": [LOG, "store.[0-9]*"], "nothing": []}


@pytest.mark.quick("a disk dies, or is copied, after a queue was handed over: what returned is there")
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("end", ["aborted", "snapshot"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_was_handed_over_and_only_some_of_its_files_are_on_the_disk(tmp_path, kind, end, written):
    """What an owner has handed over to one who waits is on the disk by its log alone."""
    with disk(tmp_path, kind) as one, crowd(one.home / "crowd", 0) as people:
        path = one.root / "store"

        def put(queue: Queue, key: str, count: int) -> None:
            people.say("try", key, [f"{key}.{index}" for index in range(count)])
            queue.put_many([b"%s.%d" % (key.encode(), index) for index in range(count)], key=key)
            people.say("put", key)

        with Queue(path) as queue:
            put(queue, "first", 10)
        one.remount()
        with Queue(path) as queue:
            put(queue, "handed-over", 40)
            people.start(own(path))
            header = os.open(path, os.O_RDWR)
            wait(lambda: lock.is_awaited(header), "it does not stand in line")
            os.close(header)
            people.stop()
        for pattern in WRITTEN[written]:
            for file in sorted(one.root.glob(pattern)):
                one.write_back_file(file)
        before = people.said()
        if end == "aborted":
            one.abort(NOTHING_FLUSHED)
            people.kill()
            one.remount()
            check_queue(path, people.said(), before)
        else:
            (one.home / "restored").mkdir()
            copy = one.snapshot(one.home / "restored")
            people.kill()
            copy.mount()
            check_queue(copy.root / "store", people.said(), before)
            copy.unmount()
