"""No file descriptor is left, or no memory: a look and what fails before its commit leave the store usable, and what fails later
says why. All stores, all calls, and each place in them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync

from qewqew_core import Batch, Broken, OutOfResources, Queue, Stage, Topic, inspect, inspect_reader
from qewqew_core.limits import LIMITS

OLD = [b"%d" % number * 50 for number in range(40)]
LARGE = [b"x" * 3000] * 5
STEPS = {
    errno.EMFILE: "close files that are open, or raise the limit (ulimit -n)",
    errno.ENFILE: "close files that are open, or raise the limit of the machine (fs.file-max)",
    errno.ENOMEM: "free some memory",
}


class Scarce:
    """From the n-th call on, nothing in a folder is opened or listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
        self.folder, self.code, self.left, self.has_failed = str(folder), code, 1 << 60, False
        for name in ("open", "listdir", "scandir"):
            monkeypatch.setattr(os, name, partial(self._call, getattr(os, name)))

    def _call(self, real: Callable[..., Any], where: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(where, int) and os.fspath(where).startswith(self.folder) and self.left < 1 << 50:
            self.left -= 1
            if self.left < 0:
                self.has_failed = True
                raise OSError(self.code, os.strerror(self.code), where)
        return real(where, *arguments, **named)


class AQueue:
    def __init__(self, path: Path) -> None:
        self.path, self.source = path, Queue(path, chunk_size=4096, _files=NoSync())
        self.put = self.source.put_many
        self.close = self.source.close

    def look(self) -> object:
        return inspect(self.path)


class AReader:
    def __init__(self, path: Path) -> None:
        self.path, self.topic = path, Topic(path, block_size=4000, _files=NoSync())
        self.source = self.topic.reader("r")
        self.put = self.topic.append_many

    def look(self) -> object:
        return inspect_reader(self.path, "r")

    def close(self) -> None:
        self.source.close()
        self.topic.close()


class AStage(AQueue):
    """Beside a closed queue."""

    def __init__(self, path: Path) -> None:
        Queue(path, _files=NoSync()).close()
        self.path, self.stage = path, Stage(path, chunk_size=4096, _files=NoSync())
        self.put = self.stage.put_many
        self.close = self.stage.close


STORES: dict[str, Callable[[Path], Any]] = {"queue": AQueue, "reader": AReader, "stage": AStage}


def batch(store: Any) -> Batch:
    (found,) = store.source.batches()
    assert isinstance(found, Batch)
    return found


# By name: what it does, with a store that has a batch in flight.
LOOKS: dict[str, Callable[[Any], object]] = {
    "stats": lambda store: store.source.stats(),
    "inspect": lambda store: store.look(),
    "batches": lambda store: store.source.batches(),
    "records of a batch": lambda store: list(batch(store)),
}
OF_A_QUEUE: dict[str, Callable[[Any], object]] = {
    "verify": lambda store: store.source.verify().problems,
    "orphans": lambda store: store.source.orphans(),
    "iterate": lambda store: list(store.source),
    "key status": lambda store: store.source.key_status("k"),
}
OF_A_TOPIC: dict[str, Callable[[Any], object]] = {
    "verify": lambda store: store.topic.verify().problems,
    "topic's stats": lambda store: store.topic.stats(),
    "iterate": lambda store: len(list(store.topic)),
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "put": lambda store: store.put(LARGE),
    "lease": lambda store: store.source.lease("new", max_records=7),
    "ack": lambda store: batch(store).ack(),
    "nack": lambda store: batch(store).nack(),
    "dead": lambda store: batch(store).to_dead_letters(),
    "put back": lambda store: batch(store).put_back(),
}
OF_A_STAGE: dict[str, Callable[[Any], object]] = {
    "put": lambda store: store.put(LARGE),
    "commit": lambda store: (store.put([b"1"]), store.stage.commit()),
    "key status": lambda store: store.stage.key_status("k"),
}
MAY_BREAK = {*CHANGES, "commit"}  # behind the commit: files that follow it, and closing the queue of a stage
CALLS = [
    *(("queue", name, act) for name, act in {**LOOKS, **OF_A_QUEUE, **CHANGES}.items()),
    *(("reader", name, act) for name, act in {**LOOKS, **OF_A_TOPIC, **CHANGES}.items()),
    *(("stage", name, act) for name, act in OF_A_STAGE.items()),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 2000)


def stores(kind: str, folder: Path) -> Iterator[Any]:
    """One new store after the other."""
    for number in range(60):
        store = STORES[kind](folder / f"{number}")
        if kind != "stage":
            store.put(OLD)
            assert store.source.lease("old", max_records=5)
        yield store
        store.close()
    raise AssertionError("it never came to its end")


def held(path: Path, kind: str) -> int:
    """The records that wait or are in a batch, after opening it again."""
    store = (AReader if kind == "reader" else AQueue)(path)
    try:
        return store.source.stats().records + sum(map(len, store.source.batches()))
    finally:
        store.close()


@pytest.mark.parametrize("code", STEPS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("kind", "name", "act"), CALLS, ids=[f"{kind}, {name}" for kind, name, _ in CALLS])
def test_without_a_descriptor_nothing_is_half_done_and_the_error_says_what_to_do(
    kind: str, name: str, act: Callable[[Any], object], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, tmp_path, code)
    for left, store in enumerate(stores(kind, tmp_path)):
        scarce.left, scarce.has_failed = left, False
        error: OSError | None = None
        try:
            act(store)
        except OSError as raised:
            error = raised
        scarce.left, failed = 1 << 60, scarce.has_failed
        if error is not None:
            assert isinstance(error, OutOfResources) or (isinstance(error, Broken) and name in MAY_BREAK), repr(error)
            assert STEPS[code] in str(error)
            assert "check the disk" not in str(error).lower()
            assert str(tmp_path) in str(error.path)
        if isinstance(error, OutOfResources):
            act(store)
        elif isinstance(error, Broken):  # it has happened or not, and opening it again tells
            store.close()
            if kind == "stage":
                with Queue(store.path) as queue:
                    assert list(queue) == [b"1"]
                continue
            ended = name == "ack" or name == "dead"
            assert held(store.path, kind) in ({len(OLD), len(OLD) - 5} if ended else {len(OLD), len(OLD) + len(LARGE)})
        if not failed:
            store.close()
            return
