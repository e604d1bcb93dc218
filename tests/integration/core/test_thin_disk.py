"""A disk that has no blocks left, under the file system or in it: what returned is there, and work goes on once there is room.

Under a thin disk others can use the blocks that the file system believes to have: an fsync fails, and the kernel forgets what
it could not write. Whoever tries again finds nothing left to do, and the next opening finds the data in the page cache. So only
what is on the disk, mounted again, tells what was kept.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dying_disk import KINDS, Disk, disk, pool

from qewqew_core import BadPath, Broken, Closed, DiskFull, Queue, Reader, Stage, Topic

NAMED = (BadPath, Broken, Closed, DiskFull)
KEY = "the whole"


def records(name: str, count: int, size: int) -> list[bytes]:
    return [b"%s.%d " % (name.encode(), number) + os.urandom(size) for number in range(count)]


SMALL = records("small", 100, 20_000)  # each durable by the log alone when it has returned
LARGE = records("large", 300, 20_000)  # too many for it


class OfQueue:
    """A queue, and the objects by which something is put into it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Queue:
        return Queue(self.path)

    def small(self, queue: Queue) -> None:
        for record in SMALL:
            queue.put(record)

    def put(self, queue: Queue) -> None:
        queue.put_many(LARGE, key=KEY)

    def session(self, queue: Queue) -> None:
        if not hasattr(self, "work"):
            self.work = queue.session()
            self.work.put_many(LARGE)
        self.work.commit(KEY)

    def lease(self, queue: Queue) -> None:
        if (batch := queue.lease(KEY, max_records=50)) is not None:
            batch.ack()

    def content(self) -> Counter[bytes]:
        with Queue(self.path) as queue:
            assert queue.verify().problems == []
            batches = [*queue.batches(), *queue.dead(), *queue.acknowledged()]
            return Counter(record for each in (queue, *batches) for record in each)


class OfTopic:
    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Topic:
        return Topic(self.path)

    def small(self, topic: Topic) -> None:
        for record in SMALL:
            topic.append(record)

    def put(self, topic: Topic) -> None:
        topic.append_many(LARGE, key=KEY)

    def session(self, topic: Topic) -> None:
        if not hasattr(self, "work"):
            self.work = topic.session()
            self.work.append_many(LARGE)
        self.work.commit(KEY)

    def lease(self, topic: Topic) -> None:
        with topic.reader("reader") as reader:
            if (batch := reader.lease(KEY, max_records=50)) is not None:
                batch.ack()

    def content(self) -> Counter[bytes]:
        with Topic(self.path) as topic, topic.reader("reader") as reader:
            assert topic.verify().problems == []
            found = Counter(message.body for message in topic)
            batches = [*reader.batches(), *reader.dead(), *reader.acknowledged()]
            leased = Counter(message.body for batch in batches for message in batch.messages())
            left = Counter(message.body for message in reader.read_many(1 << 30))
            assert leased + left == found
            return found


def returned(act: Callable[[], object]) -> bool:
    """Whether it did, or raised an error with a name."""
    try:
        act()
    except NAMED:
        return False
    return True


def there_once(found: Counter[bytes], *kept: list[bytes], perhaps: list[bytes]) -> None:
    """``kept``, and of ``perhaps`` all or nothing."""
    wanted = Counter(record for each in kept for record in each)
    assert not (lost := wanted - found), f"{lost.total():,} of {wanted.total():,} records are lost whose commit returned"
    rest = found - wanted
    assert rest in (Counter(), Counter(perhaps)), f"{rest.total():,} records are there twice, or in part"


@pytest.mark.quick("a thin disk is full underneath: what returned is there, and work goes on when there is room")
@pytest.mark.parametrize("call", ["put", "session", "lease"])
@pytest.mark.parametrize("of", [OfQueue, OfTopic])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thin_disk_is_full_underneath_and_then_there_is_room(tmp_path, kind, of, call):
    with disk(tmp_path, kind, size="100m") as one:
        store = of(one.root / "store")
        opened = store.open()
        with contextlib.closing(opened):
            store.lease(opened)  # makes the directories
            one.write_back_all()
            store.small(opened)
            one.fill_pool()
            act: Callable[[Any], None] = getattr(store, call)
            done = returned(lambda: act(opened))
            one.empty_pool()
            done |= returned(lambda: act(opened))  # where it was refused, under the same key
            with contextlib.suppress(*NAMED):
                opened.close()
        if not done:
            done = returned(lambda: again(store, call))  # as after any error: open it again
        one.remount()
        there_once(store.content(), SMALL, LARGE if done and call != "lease" else [], perhaps=[] if call == "lease" else LARGE)
        again(store, call)
        one.remount()
        there_once(store.content(), SMALL, [] if call == "lease" else LARGE, perhaps=[])


def again(store: OfQueue | OfTopic, call: str) -> None:
    if hasattr(store, "work"):
        del store.work
    with contextlib.closing(store.open()) as opened:
        getattr(store, call)(opened)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_meets_a_thin_disk_that_is_full_underneath(tmp_path, kind):
    with disk(tmp_path, kind, size="100m") as one:
        store = OfQueue(one.root / "store")
        with store.open() as queue:
            store.small(queue)
        one.remount()
        stage = Stage(store.path)
        one.fill_pool(leave=2 << 20)
        done = returned(lambda: stage.put_many(LARGE)) and returned(lambda: stage.commit(KEY))
        one.empty_pool()
        done = done or (stage.records == len(LARGE) and returned(lambda: stage.commit(KEY)))
        with contextlib.suppress(*NAMED):
            stage.close()
        one.remount()
        there_once(store.content(), SMALL, LARGE if done else [], perhaps=LARGE)
        again(store, "put")
        there_once(store.content(), SMALL, LARGE, perhaps=[])


# No room in the file system itself


@contextlib.contextmanager
def without_room(one: Disk, what: str) -> Iterator[None]:
    """Other programs have taken all bytes, or all inodes."""
    others = one.root / "others"
    others.mkdir()
    try:
        if what == "inodes":
            with contextlib.suppress(OSError):
                for number in range(1 << 20):
                    (others / str(number)).touch()
        else:
            with (others / "bytes").open("wb") as file:
                size, step = 0, 64 << 20
                while step >= 4096:
                    try:
                        os.posix_fallocate(file.fileno(), size, step)
                        size += step
                    except OSError:
                        step //= 2
        yield
    finally:
        for file in others.iterdir():
            file.unlink()
        others.rmdir()


@pytest.mark.parametrize("of", [OfQueue, OfTopic])
@pytest.mark.parametrize(("kind", "what"), [("ext4", "bytes"), ("ext4", "inodes"), ("xfs", "bytes")])
def test_nothing_is_left_of_the_disk_and_then_there_is_room(tmp_path, kind, what, of):
    with disk(tmp_path, kind, *(["-N", "256"] if what == "inodes" else [])) as one:
        store = of(one.root / "store")
        opened = store.open()
        with contextlib.closing(opened):
            store.small(opened)
            kept = list[bytes]()
            with without_room(one, what):
                for record in records("tried", 300, 20_000):
                    put = opened.put if of is OfQueue else opened.append
                    try:
                        put(record)
                        kept.append(record)
                    except DiskFull:
                        if what == "bytes":
                            break
                for call in (store.put, store.session, store.lease):
                    with contextlib.suppress(DiskFull):
                        call(opened)
            for call in (store.put, store.session, store.lease):
                call(opened)  # the same object goes on
        one.remount()
        there_once(store.content(), SMALL, kept, LARGE, perhaps=[])


# The disk is full as long as nobody takes anything: whoever takes, leases and acknowledges makes room, each in its own opening


@contextlib.contextmanager
def filled(tmp_path: Path, kind: str, what: str) -> Iterator[Disk]:
    """An empty disk, which `without_room` fills."""
    if kind != "tmpfs":
        with disk(tmp_path, kind, *(["-N", "64"] if what == "inodes" else [])) as one:
            yield one
        return
    with pool(tmp_path, kind, "8m,nr_inodes=64" if what == "inodes" else "8m") as home:
        one = Disk(home, kind)
        one.root = home
        yield one


@contextlib.contextmanager
def of_queue(path: Path, **more: Any) -> Iterator[Queue]:
    with Queue(path, **more) as queue:
        yield queue


@contextlib.contextmanager
def of_reader(path: Path, **more: Any) -> Iterator[Reader]:
    with Topic(path, block_size=1 << 19, **more) as topic, topic.reader("r") as reader:
        yield reader


def killed(opened: Callable[[Path], Any], path: Path, key: str) -> None:
    """Somebody leases, and is killed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), opened(path) as source:
            source.lease(key, max_records=7)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("opened", [of_queue, of_reader])
@pytest.mark.parametrize(
    ("kind", "what"), [("tmpfs", "bytes"), ("tmpfs", "inodes"), ("ext4", "bytes"), ("ext4", "inodes"), ("xfs", "bytes")]
)
@pytest.mark.parametrize("before", ["nothing leased", "a batch in flight", "all in flight", "killed"])
def test_on_a_full_disk_whoever_leases_and_acknowledges_comes_to_the_end(tmp_path, kind, what, opened, before):
    stored = records("stored", 1500, 1000)
    with filled(tmp_path, kind, what) as one:
        path, done = one.root / "store", list[bytes]()
        with Queue(path) if opened is of_queue else Topic(path, block_size=1 << 19) as store:
            if opened is of_reader:
                store.reader("r").close()
            (store.put_many if opened is of_queue else store.append_many)(stored)
        if before.endswith("in flight"):
            with opened(path) as source:
                source.lease("flight", max_records=20 if before == "a batch in flight" else None)
        with without_room(one, what):
            if before == "killed":
                killed(opened, path, "flight")
            if before != "nothing leased":
                with opened(path) as source:
                    batch = source.find_batch("flight")
                    done += list(batch)
                    batch.ack()
            for number in range(400):
                with opened(path) as source:
                    batch = source.lease(f"key {number}", max_records=[10, 5, 200, None][min(3, number // 30)])
                    if batch is None:
                        break
                    if number % 5 == 1:
                        batch.nack("again")
                    elif number == 2:
                        batch.to_dead_letters("bad")
                    else:
                        done += list(batch)
                        batch.ack()
            with opened(path) as source:
                for batch in source.dead():
                    done += list(batch)
                    batch.drop()
                assert source.lease("last") is None
        assert Counter(done) == Counter(stored)
        with Queue(path) if opened is of_queue else Topic(path) as store:
            (store.put if opened is of_queue else store.append)(b"there is room again")
            assert store.verify().ok
