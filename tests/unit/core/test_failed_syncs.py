"""A failed fsync is `Broken`, whatever the system says, and is never tried again: not by that object, whatever it is asked to do.

The kernel reports such an error once. It marks the data as written, and the next fsync of it succeeds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plain import numbers

from qewqew_core import Broken, Closed, Queue, Stage, Topic
from qewqew_core.batch.publishing import publish
from qewqew_core.limits import LIMITS

RECORDS = [b"%03d" % number * 100 for number in range(40)]
Act = Callable[[], object]


class Syncs:
    """The calls of the system that sync: the n-th one from `fail` on fails, and those behind it succeed, as a kernel's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
        self.left, self.calls, self.failed, self.error = 0, 0, False, error
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._call)

    def _call(self, fd: int) -> None:
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            self.failed = True
            raise OSError(self.error, os.strerror(self.error))

    def fail(self, number: int) -> None:
        self.left, self.failed = number, False


@pytest.fixture(params=[errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=["ENOSPC", "EDQUOT", "EIO"])
def syncs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    monkeypatch.setattr(LIMITS, "spill_bytes", 1000)
    monkeypatch.setattr(LIMITS, "inline_bytes", {"commit": 2000, "never": 2000})
    return Syncs(monkeypatch, request.param)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Each makes a store, and returns what is done to it while an fsync fails, and what closes it.


def filled(folder: Path, **settings: Any) -> Queue:
    queue = Queue(folder / "q", chunk_size=2000, **settings)
    queue.put_many(RECORDS)
    for record in numbers(0, 5):
        queue.put(record)  # in the log alone
    return queue


def put(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    return partial(queue.put, b"x"), queue.close


def put_many(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    return partial(queue.put_many, RECORDS), queue.close


def get_many(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    return partial(queue.get_many, 20), queue.close


def cutting_the_log_back(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder, log_bytes=1)
    return partial(queue.put_many, RECORDS[:3]), queue.close


def lease(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    return partial(queue.lease, "key", max_records=42), queue.close


def lease_again(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    queue.lease("key").nack("")
    return partial(queue.lease, "another"), queue.close


def put_back(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    return queue.lease("key").put_back, queue.close


def session(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    opened = queue.session()
    opened.put_many(RECORDS)
    opened.get_many(3)
    return opened.commit, queue.close


def session_that_spills(folder: Path) -> tuple[Act, Act]:
    queue = filled(folder)
    opened = queue.session()

    def act() -> None:
        opened.put_many(RECORDS)
        opened.put(b"x")
        opened.commit()

    return act, queue.close


def stage(folder: Path) -> tuple[Act, Act]:
    filled(folder).close()
    opened = Stage(folder / "q", chunk_size=2000)
    opened.put(b"x")
    return opened.commit, opened.close


def stage_that_spills(folder: Path) -> tuple[Act, Act]:
    filled(folder).close()
    opened = Stage(folder / "q", chunk_size=2000)

    def act() -> None:
        opened.put_many(RECORDS)
        opened.commit()

    return act, opened.close


def stage_with_a_key(folder: Path) -> tuple[Act, Act]:
    act, close = stage(folder)
    return partial(act, "key"), close


def made(folder: Path, **settings: Any) -> Topic:
    topic = Topic(folder / "t", block_size=4000, **settings)
    topic.append_many(RECORDS)
    for record in numbers(0, 5):
        topic.append(record)
    return topic


def append(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    return partial(topic.append, b"x"), topic.close


def append_many(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    return partial(topic.append_many, RECORDS), topic.close


def cutting_the_log_of_a_topic_back(folder: Path) -> tuple[Act, Act]:
    topic = made(folder, log_bytes=1)
    return partial(topic.append, b"x"), topic.close


def trim(folder: Path) -> tuple[Act, Act]:
    made(folder).close()
    topic = Topic(folder / "t", block_size=4000, max_records=1)
    topic.append(b"x")  # which opens the writer
    return topic.trim, topic.close


def topic_session(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    opened, readers = topic.session(), [topic.reader("one"), topic.reader("two")]
    opened.append_many(RECORDS)
    for reader in readers:
        opened.read_many(reader, 3)
    return opened.commit, topic.close


def commit(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    reader = topic.reader("one")
    reader.read_many(3)
    return reader.commit, reader.close


def seek(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    reader = topic.reader("one")
    return partial(reader.seek, number=3), reader.close


def lease_of_a_reader(folder: Path) -> tuple[Act, Act]:
    topic = made(folder)
    reader = topic.reader("one")
    return partial(reader.lease, "key", max_records=30), reader.close


ACTS = [
    put,
    put_many,
    get_many,
    cutting_the_log_back,
    lease,
    lease_again,
    put_back,
    session,
    session_that_spills,
    stage,
    stage_that_spills,
    stage_with_a_key,
    append,
    append_many,
    cutting_the_log_of_a_topic_back,
    trim,
    topic_session,
    commit,
    seek,
    lease_of_a_reader,
]


@pytest.mark.parametrize("make", ACTS, ids=lambda act: act.__name__.replace("_", " "))
def test_a_failed_fsync_is_broken_and_never_tried_again(tmp_path: Path, syncs: Syncs, make: Callable[[Path], Any]) -> None:
    """Whichever fsync of a call fails: it raises `Broken`, and the object syncs and writes nothing any more, closed or not."""
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        syncs.fail(0)
        act, close = make(folder)
        syncs.fail(number)
        error = raised(act)
        syncs.left = 0
        if error is None and not syncs.failed:
            close()
            assert number > 1
            break
        calls, before = syncs.calls, contents(folder)
        assert isinstance(error, Broken), f"fsync {number}: {error!r}"
        assert error.path
        assert "an fsync failed" in str(error)
        if make is not topic_session:  # which has one part in each of three stores
            for _ in range(2):
                with pytest.raises(Broken):
                    act()
            assert syncs.calls == calls, f"fsync {number}"
            close()
            assert syncs.calls == calls, f"fsync {number}"
            kept = {name: data for name, data in before.items() if ".staged/" not in name}
            assert contents(folder) == kept, f"fsync {number}"
        else:
            close()
        opened(folder)


def raised(act: Act) -> BaseException | None:
    try:
        act()
    except Exception as error:  # looked at by the test
        return error
    return None


def opened(folder: Path) -> None:
    """What was acknowledged before is there."""
    if (folder / "q").exists():
        with Queue(folder / "q") as queue:
            assert queue.verify().ok
    else:
        with Topic(folder / "t") as topic:
            assert topic.verify().ok


@pytest.mark.parametrize("make", [filled, made], ids=["queue", "topic"])
def test_a_failed_fsync_of_an_opening_or_a_close_is_broken(tmp_path: Path, syncs: Syncs, make: Callable[[Path], Any]) -> None:
    kind = Queue if make is filled else Topic
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        syncs.fail(0)
        store = make(folder)
        path = store.path
        syncs.fail(number)
        error = raised(store.close) or raised(lambda path=path: kind(path).close())
        if not syncs.failed:
            assert error is None
            break
        assert isinstance(error, Broken), f"fsync {number}: {error!r}"
        opened(folder)
    assert number > 2


def test_a_failed_fsync_of_a_reader_that_is_made_is_broken(tmp_path: Path, syncs: Syncs) -> None:
    syncs.fail(0)
    with made(tmp_path) as topic:
        for number in range(1, 100):
            syncs.fail(number)
            error = raised(lambda number=number: topic.reader(f"reader{number}").close())
            syncs.left = 0
            if not syncs.failed:
                break
            assert isinstance(error, Broken), f"fsync {number}: {error!r}"
            with topic.reader(f"reader{number}") as reader:
                assert len(reader.read_many(100)) == len(RECORDS) + 5
    assert number > 4


def test_a_failed_fsync_of_a_published_copy_is_broken_and_what_was_not_synced_does_not_pass_for_copied(
    tmp_path: Path, syncs: Syncs
) -> None:
    syncs.fail(0)
    queue = filled(tmp_path)
    batch = queue.lease("key")
    for number in range(1, 100):
        target = tmp_path / f"copy{number}"
        syncs.fail(number)
        error = raised(lambda target=target: publish(Path(batch.manifest_path).parent, str(target)))
        syncs.left = 0
        if not syncs.failed:
            break
        assert isinstance(error, Broken), f"fsync {number}: {error!r}"
        found = {path.stat().st_ino for path in target.rglob("*") if path.is_file()}
        calls = syncs.calls
        publish(Path(batch.manifest_path).parent, str(target))
        files = [path for path in target.rglob("*") if path.is_file()]
        written = [path for path in files if path.stat().st_ino not in found]
        assert syncs.calls - calls >= 2 * len(written) > 0  # each with its name
        with suppress(Closed):
            assert len(list(batch)) == len(RECORDS) + 5
    assert number > 4
    queue.close()
