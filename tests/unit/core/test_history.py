"""Acknowledged batches, which the logs keep as lines that nobody parses until somebody asks."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from qewqew_core import BatchExpired, BatchNotFound, Corrupt, Queue, Reader, Topic, inspect, inspect_reader, repair
from qewqew_core.batch import history
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.history import Block, History
from qewqew_core.disk import journal
from qewqew_core.queue import log as logs
from qewqew_core.queue.state import State

Store = Queue | Reader


@contextmanager
def queue(folder: Path, **settings: object) -> Iterator[tuple[Store, Callable[[bytes], object]]]:
    with Queue(folder / "q", sync="never", **settings) as opened:  # type: ignore[arg-type]
        yield opened, opened.put


@contextmanager
def reader(folder: Path, **settings: object) -> Iterator[tuple[Store, Callable[[bytes], object]]]:
    with Topic(folder / "t", sync="never", **settings) as topic, topic.reader("r") as opened:  # type: ignore[arg-type]
        yield opened, topic.append


KINDS = pytest.mark.parametrize("kind", [queue, reader])


def processed(store: Store, put: Callable[[bytes], object], key: str, record: bytes = b"x") -> str:
    put(record)
    batch = store.lease(key)
    assert batch is not None
    batch.ack()
    return batch.id


@KINDS
@pytest.mark.parametrize("opened_again", [True, False])
def test_each_is_found_by_its_id_and_its_key_with_all_that_it_had(kind, opened_again, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "BLOCK_BYTES", 300)  # a few in each
    keys = [f'dag:run {number}:\N{SNOWMAN}:"{number}"' for number in range(20)]
    with kind(tmp_path) as (store, put):
        ids = [processed(store, put, key, key.encode()) for key in keys]
        if not opened_again:
            check_all(store, keys, ids)
    with kind(tmp_path) as (store, put):
        check_all(store, keys, ids)
        with pytest.raises(BatchNotFound):
            store.batch("q-0000000000000000")
        assert store.lease("run 1") is None, "the end of another key is not this key"
        processed(store, put, "run 1")
        assert [batch.key for batch in store.acknowledged()] == [*keys, "run 1"]


def check_all(store: Store, keys: list[str], ids: list[str]) -> None:
    assert [(batch.id, batch.key) for batch in store.acknowledged()] == list(zip(ids, keys, strict=True))
    for key, batch_id in zip(keys, ids, strict=True):
        for found in (store.lease(key), store.batch(batch_id), store.find_batch(key)):
            assert found is not None
            assert (found.id, found.key, found.state, found.attempt, found.records) == (batch_id, key, "acked", 1, 1)
            assert list(found) == [key.encode()]
            found.ack()  # once more is no error


@KINDS
def test_all_keys_that_had_it_find_it(kind, tmp_path):
    with kind(tmp_path) as (store, put):
        put(b"x")
        store.lease("first").nack("")
        again = store.lease("second")
        again.ack()
    with kind(tmp_path) as (store, _):
        assert store.lease("first").id == store.lease("second").id == again.id
        assert store.lease("first").attempt == 2


@KINDS
def test_the_oldest_go_when_they_are_too_many_or_too_old(kind, tmp_path, monkeypatch, clock):
    monkeypatch.setattr(history, "BLOCK_BYTES", 300)
    with kind(tmp_path) as (store, put):
        first = processed(store, put, "0", b"")
    room = 10 * (102 if kind is queue else 304)  # of payload and what the format adds
    with kind(tmp_path, retention_bytes=room) as (store, put):
        for number in range(1, 30):
            processed(store, put, str(number), bytes(100))
        assert [batch.key for batch in store.acknowledged()] == [str(number) for number in range(20, 30)]
        with pytest.raises(BatchExpired):
            store.lease("0")
        with pytest.raises(BatchExpired):
            store.batch(first)
    clock.advance(3600)
    with kind(tmp_path, retention=timedelta(minutes=59)) as (store, put):
        processed(store, put, "new")
        assert [batch.key for batch in store.acknowledged()] == ["new"]


def test_the_disk_that_they_take_is_told_without_looking(tmp_path):
    with Queue(tmp_path / "q") as q:
        for number in range(5):
            q.put_many([bytes(1000)] * 20)
            q.lease(str(number)).ack()
        q.put(b"x")
        assert inspect(tmp_path / "q").on_disk == q.stats().on_disk
    files = [Path(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    counted = [path for path in files if path.suffix not in (".stamp", ".lock") and path.parent.suffix != ".reserve"]
    assert inspect(tmp_path / "q").on_disk == sum(path.stat().st_blocks * 512 for path in counted)


@KINDS
def test_the_last_lease_is_remembered_when_its_batch_is_forgotten(kind, tmp_path):
    look = (lambda: inspect(tmp_path / "q")) if kind is queue else (lambda: inspect_reader(tmp_path / "t", "r"))
    with kind(tmp_path, retention_bytes=0) as (store, put):
        put(b"x")
        batch = store.lease("a")
        leased = look().last_lease
        batch.ack()
        put(b"y")
    assert look().last_lease == leased is not None


def test_it_is_what_a_list_of_batches_would_be():
    """Against a plain list, over random operations, packed and loaded in between."""
    for seed in range(50):
        luck = random.Random(seed)
        plain: list[tuple[BatchState, int]] = []
        state = State()
        for number in range(luck.randrange(1, 400)):
            if plain and luck.random() < 0.4:
                place = 0 if luck.random() < 0.8 else luck.randrange(len(plain))
                gone, _ = plain.pop(place)
                assert vars_of(state.history.remove(gone.id)) == vars_of(gone)
            else:
                numbers = (luck.randrange(1 << 40) for _ in range(5))
                batch = BatchState(f"q-{number:016x}", ["k" * luck.randrange(1, 99), f"{number}"], "acked", *numbers)
                plain.append((batch, luck.randrange(1 << 30)))
                state.history.add(*plain[-1])
            if luck.random() < 0.05:
                state = logs.replay(logs.snapshot(state, 7), "q.wal").state
        found = state.history
        assert [vars_of(batch) for batch in found] == [vars_of(batch) for batch, _ in plain]
        assert list(found.ids()) == [batch.id for batch, _ in plain]
        assert len(found) == len(plain)
        assert found.on_disk == sum(on_disk for _, on_disk in plain)
        state.check()
        with pytest.raises(KeyError):
            found.remove("q-ffffffffffffffff")


def vars_of(batch: BatchState) -> list[object]:
    return [getattr(batch, name) for name in BatchState.__slots__]


NONSENSE = ['["../../etc",["k"],1,1,1,1,1,1]', '["q-0123456789abcdef",["k"],1]', "[", '{"id": 1}', "[[[]]]"]


@pytest.mark.parametrize("line", NONSENSE)
def test_a_line_that_nothing_of_ours_has_written_is_refused_and_repaired(line, tmp_path):
    path = tmp_path / "q"
    with Queue(path) as q:
        q.put_many([b"1", b"2"])
        q.lease("a", max_records=1).ack()
    log = tmp_path / "q.wal"
    replayed = logs.replay(log.read_bytes(), str(log))
    replayed.state.history.blocks.append(Block(1, 1, 1, 1, b"\n" + line.encode()))
    log.write_bytes(logs.snapshot(replayed.state, journal.new_generation()))
    with Queue(path) as q:
        assert not q.verify().ok
        with pytest.raises(Corrupt, match="qewqew repair"):
            q.acknowledged()
        assert len(q) == 1
    report = repair(path)
    assert any("acknowledged" in damage.what for damage in report.damage)
    with Queue(path) as q:
        assert q.verify().ok
        assert [batch.key for batch in q.acknowledged()] == ["a"]
        assert list(q) == [b"2"]


def test_a_history_without_batches_has_no_blocks():
    found = History()
    found.add(BatchState("q-0123456789abcdef", ["k"], "acked", 1, 1, 1, 1, 1), 4096)
    assert json.loads(found.blocks[0].lines)[0] == "q-0123456789abcdef"
    found.remove("q-0123456789abcdef")
    assert not found.blocks
    assert (len(found), found.records, found.size, found.on_disk) == (0, 0, 0, 0)
