"""Any sequence of operations does what a plain list and a dictionary of batches do, through kills and power cuts too.

Limits are so small that log rotation, writes past the tail, boundaries and new chunks happen within a few operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from machine import KEYS, MOST, SIZES, SYNCS, BatchModel, BatchView, Machine, check_front
from stride import examples

from qewqew_core import Batch, Empty, Queue, RecordTooLarge, Session, inspect
from qewqew_core.keys import key_hash
from qewqew_core.limits import LIMITS

records_ = st.binary(max_size=18)  # fits into the smallest chunk
batches_of_records = st.lists(records_, max_size=25)


@dataclass(eq=False)
class Entry:
    """A record that was put and not taken for good."""

    record: bytes
    holder: Session | None = None


@dataclass
class Transaction:
    """A session, as the model knows it."""

    session: Session
    held: list[Entry] = field(default_factory=list)
    puts: list[bytes] = field(default_factory=list)


@dataclass
class Model:
    """What is committed."""

    records: list[bytes]
    batches: dict[str, BatchModel]
    idempotency_keys: dict[str, int]

    def view(self) -> tuple[list[bytes], dict[str, BatchView]]:
        return self.records, {batch_id: one.view() for batch_id, one in self.batches.items() if one.state != "acked"}

    def known(self) -> dict[bytes, int]:
        return {key_hash(key): count for key, count in self.idempotency_keys.items()}


class QueueMachine(Machine):
    sizes, names, max_attempts = (30, 64, 150, 1000), ("the queue",), 3

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(LIMITS, "pending_bytes", 60)
        self.patch.setattr(LIMITS, "log_bytes_at_close", 800)
        self.patch.setattr(LIMITS, "piece_bytes", 40)
        self.patch.setattr(LIMITS, "inline_bytes", {"commit": 70, "never": 70})
        self.patch.setattr(LIMITS, "spill_bytes", 60)
        self.entries: list[Entry] = []
        self.transactions: list[Transaction] = []
        self.batches: dict[str, BatchModel] = {}
        self.idempotency_keys: dict[str, int] = {}

    @property
    def records(self) -> list[bytes]:
        """Those that can be taken."""
        return [entry.record for entry in self.entries if entry.holder is None]

    def add(self, records: list[bytes]) -> None:
        self.entries += map(Entry, records)

    def remove(self, count: int) -> list[Entry]:
        """Take the first ``count`` that nobody holds."""
        taken = [entry for entry in self.entries if entry.holder is None][:count]
        self.entries = [entry for entry in self.entries if entry not in taken]
        return taken

    # Opening

    @initialize(size=SIZES, sync=SYNCS)
    def start(self, size, sync):
        self.open(size, sync)

    def make(self, size: int, sync: str) -> None:
        settings = {"max_attempts": self.max_attempts, "log_bytes": 2000, "_files": self.disk}
        self.q = Queue(self.folder / "q", chunk_size=size, sync=sync, **settings)

    def close(self, *, orderly: bool) -> None:
        self.q.close()

    def forget(self) -> None:
        self.transactions.clear()
        for entry in self.entries:
            entry.holder = None

    def agrees_closed(self) -> None:
        assert inspect(self.q.path).records == len(self.records)
        if not (self.records or self.batches or self.idempotency_keys):
            assert list(self.folder.iterdir()) == []

    def agrees(self) -> None:
        self.q._engine.state.check()
        assert self.seen() == Model(self.records, self.batches, self.idempotency_keys).view()
        report = self.q.verify()
        assert report.problems == []
        assert report.orphans == []
        assert report.records == len(self.entries) + sum(len(one.records) for one in self.batches.values())

    def seen(self) -> tuple[list[bytes], dict[str, BatchView]]:
        found = {one.id: (one.state, one.attempt, one.key, tuple(one)) for one in (*self.q.batches(), *self.q.dead())}
        return list(self.q), found

    def committed(self) -> Model:
        batches = {batch_id: replace(one, keys=[*one.keys]) for batch_id, one in self.batches.items()}
        return Model([entry.record for entry in self.entries], batches, dict(self.idempotency_keys))

    def go_on_from(self, before: Model, after: Model, *, returned: bool) -> None:
        known = {key: count for key, (_, count) in self.q._engine.state.idempotency_keys.items()}
        found = [one for one in (before, after) if one.view() == self.seen() and one.known() == known]
        assert found[-1:] == [after] if returned else found, f"neither {before} nor {after}, but {self.seen()}"
        now = found[-1]
        self.entries = [Entry(record) for record in now.records]
        self.batches, self.idempotency_keys = now.batches, now.idempotency_keys

    def check_counts(self) -> None:
        states = [one.state for one in self.batches.values()]
        stats = self.q.stats()
        assert len(self.q) == len(self.records)
        assert stats.records == len(self.entries)
        assert bool(self.q) == bool(self.records)
        assert stats.bytes == sum(len(entry.record) for entry in self.entries)
        assert (stats.leased, stats.returned, stats.dead) == tuple(map(states.count, ("leased", "returned", "dead")))
        assert (stats.oldest is None) == (not self.entries)

    @rule()
    def inspects(self):
        assert inspect(self.q.path) == self.q.stats()

    # Putting and taking

    @rule(record=records_)
    def put(self, record):
        self.q.put(record)
        self.add([record])

    @rule(records=batches_of_records)
    def put_many(self, records):
        assert self.q.put_many(iter(records)) == len(records)
        self.add(records)

    @rule(records=batches_of_records, key=KEYS)
    def put_many_under_a_key(self, records, key):
        if key not in self.idempotency_keys:
            self.idempotency_keys[key] = len(records)
            self.add(records)
        assert self.q.put_many(records, key=key) == self.idempotency_keys[key]

    @rule(records=batches_of_records, extra=st.integers(1, 40), place=st.integers(0, 25))
    def put_one_too_large(self, records, extra, place):
        records.insert(place, bytes(self.q.largest_record + extra))
        with pytest.raises(RecordTooLarge):
            self.q.put_many(records)

    @rule()
    def get(self):
        if self.records:
            assert self.q.peek() == self.records[0]
            assert self.q.get() == self.remove(1)[0].record
        else:
            with pytest.raises(Empty):
                self.q.get()

    @rule(wanted=st.booleans())
    def get_if(self, wanted):
        found = self.q.get_if(lambda record: wanted)
        assert found == (self.remove(1)[0].record if wanted and self.records else None)

    @rule(max_records=MOST.filter(bool), max_bytes=MOST)
    def get_many(self, max_records, max_bytes):
        taken = self.q.get_many(max_records, max_bytes)
        check_front(taken, self.records, max_records, max_bytes)
        self.remove(len(taken))

    @rule()
    def clear(self):
        assert self.q.clear() == len(self.records)
        self.remove(len(self.records))

    # Sessions

    @precondition(lambda self: len(self.transactions) < 3)
    @rule()
    def begin(self):
        self.transactions.append(Transaction(self.q.session()))

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), max_records=MOST.filter(bool))
    def get_in_session(self, data, max_records):
        one = data.draw(st.sampled_from(self.transactions))
        held = [entry for entry in self.entries if entry.holder is None][:max_records]
        if max_records == 1 and held:
            assert one.session.get() == held[0].record
        else:
            assert one.session.get_many(max_records) == [entry.record for entry in held]
        for entry in held:
            entry.holder = one.session
        one.held += held

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), records=batches_of_records)
    def put_in_session(self, data, records):
        one = data.draw(st.sampled_from(self.transactions))
        assert one.session.put_many(records) == len(records)
        one.puts += records

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), key=st.none() | KEYS)
    def commit(self, data, key):
        one = data.draw(st.sampled_from(self.transactions))
        if key is not None and key in self.idempotency_keys:
            assert one.session.commit(key=key) == self.idempotency_keys[key]
            self.let_go(one)
            return
        assert one.session.commit(key=key) == len(one.puts)
        if key is not None:
            self.idempotency_keys[key] = len(one.puts)
        self.entries = [entry for entry in self.entries if entry not in one.held]
        self.add(one.puts)
        one.held, one.puts = [], []

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), close=st.booleans())
    def rollback(self, data, close):
        one = data.draw(st.sampled_from(self.transactions))
        if close:
            one.session.close()
            self.transactions.remove(one)
        else:
            one.session.rollback()
        self.let_go(one)

    def let_go(self, one: Transaction) -> None:
        for entry in one.held:
            entry.holder = None
        one.held, one.puts = [], []

    # Batches

    def source(self, name: str) -> Queue:
        return self.q

    def batches_of(self, name: str) -> dict[str, BatchModel]:
        return self.batches

    def waiting(self, name: str) -> list[bytes]:
        return self.records

    def leased(self, name: str, batch: Batch) -> list[int]:
        self.remove(batch.records)
        return []

    def put_back(self, name: str, one: BatchModel) -> None:
        self.entries[:0] = map(Entry, one.records)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=examples(quick=25, full=120, soak=5_000),
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
