"""Any sequence of operations does what a plain list and a dictionary of batches do.

Limits are so small that log rotation, writes past the tail, boundaries and new chunks happen within a few operations.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qewqew_core import Batch, BatchConflict, BatchNotFound, Empty, Queue, RecordTooLarge, inspect
from qewqew_core.files import Files

CHUNK_SIZES = st.sampled_from([30, 64, 150, 1000])
MAX_ATTEMPTS = 3

records_ = st.binary(max_size=18)  # fits into the smallest chunk
batches_of_records = st.lists(records_, max_size=25)
keys = st.sampled_from("abcdef")
limits = st.sampled_from([None, 1, 2, 3, 5, 8, 20, 60])


@dataclass
class Model:
    """A batch, as the model knows it."""

    keys: list[str]
    records: list[bytes]
    state: str = "leased"
    attempt: int = 1


class Unsynced(Files):
    """Nothing here depends on what is durable (test_crash does), and an fsync costs more than all the rest."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in (("LOG_BYTES", 2000), ("LOG_BYTES_AT_CLOSE", 800), ("PENDING_BYTES", 60)):
            self.patch.setattr(f"qewqew_core.queue.{name}", value)
        for module in ("state", "reading", "writing"):
            self.patch.setattr(f"qewqew_core.{module}.PIECE_BYTES", 40)
        self.patch.setattr("qewqew_core.queue.INLINE_BYTES", {"commit": 70, "never": 70})
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "q"
        self.records: list[bytes] = []
        self.batches: dict[str, Model] = {}  # oldest first
        self.put_keys: dict[str, int] = {}
        self.q: Queue | None = None

    def teardown(self) -> None:
        self.q.close()
        self.agrees_when_reopened(64, "commit")
        self.q.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    # Opening

    @initialize(chunk_size=CHUNK_SIZES, sync=st.sampled_from(["commit", "never"]))
    def open(self, chunk_size, sync):
        self.q = Queue(self.path, chunk_size=chunk_size, sync=sync, max_attempts=MAX_ATTEMPTS, _files=Unsynced())

    @rule(chunk_size=CHUNK_SIZES, sync=st.sampled_from(["commit", "never"]))
    def reopen(self, chunk_size, sync):
        self.q.close()
        assert inspect(self.path).records == len(self.records)
        if not (self.records or self.batches or self.put_keys):
            assert list(self.folder.iterdir()) == []
        self.agrees_when_reopened(chunk_size, sync)

    def agrees_when_reopened(self, chunk_size, sync):
        self.open(chunk_size, sync)
        self.agrees()

    @rule()
    def agrees(self):
        """Everything that can be seen. Not after each step: looking makes the queue write out what only the log has."""
        assert list(self.q) == self.records
        found = {one.id: (one.state, one.attempt, one.key, list(one)) for one in (*self.q.batches(), *self.q.dead())}
        assert found == {
            batch_id: (one.state, one.attempt, one.keys[-1], one.records)
            for batch_id, one in self.batches.items()
            if one.state != "acked"
        }
        report = self.q.verify()
        assert report.problems == []
        assert report.orphans == []
        assert report.records == len(self.records) + sum(len(one.records) for one in self.batches.values())

    @invariant()
    def counts_agree(self):
        if self.q is not None:
            states = [one.state for one in self.batches.values()]
            stats = self.q.stats()
            assert len(self.q) == stats.records == len(self.records)
            assert bool(self.q) == bool(self.records)
            assert stats.bytes == sum(map(len, self.records))
            assert (stats.leased, stats.returned, stats.dead) == tuple(map(states.count, ("leased", "returned", "dead")))
            assert (stats.oldest is None) == (not self.records)

    @rule()
    def inspects(self):
        assert inspect(self.path) == self.q.stats()

    # Putting and taking

    @rule(record=records_)
    def put(self, record):
        self.q.put(record)
        self.records.append(record)

    @rule(records=batches_of_records)
    def put_many(self, records):
        assert self.q.put_many(iter(records)) == len(records)
        self.records += records

    @rule(records=batches_of_records, key=keys)
    def put_many_under_a_key(self, records, key):
        if key not in self.put_keys:
            self.put_keys[key] = len(records)
            self.records += records
        assert self.q.put_many(records, key=key) == self.put_keys[key]

    @rule(records=batches_of_records, extra=st.integers(1, 40), place=st.integers(0, 25))
    def put_one_too_large(self, records, extra, place):
        records.insert(place, bytes(self.q.largest_record + extra))
        with pytest.raises(RecordTooLarge):
            self.q.put_many(records)

    @rule()
    def get(self):
        if self.records:
            assert self.q.peek() == self.records[0]
            assert self.q.get() == self.records.pop(0)
        else:
            with pytest.raises(Empty):
                self.q.get()

    @rule(wanted=st.booleans())
    def get_if(self, wanted):
        found = self.q.get_if(lambda record: wanted)
        assert found == (self.records.pop(0) if wanted and self.records else None)

    @rule(max_records=limits.filter(bool), max_bytes=limits)
    def get_many(self, max_records, max_bytes):
        taken = self.q.get_many(max_records, max_bytes)
        self.takes(taken, max_records, max_bytes)

    def takes(self, taken: list[bytes], max_records: int | None, max_bytes: int | None) -> None:
        """These were the first, as many as the limits allow. Empty ones behind the last that fits may come or wait."""
        count, size = len(taken), sum(map(len, taken))
        assert taken == self.records[:count]
        assert count <= (max_records or count)
        assert size <= (max_bytes or size) or count == 1
        if max_bytes is None:
            assert count == min(max_records or len(self.records), len(self.records))
        elif count < min(max_records or len(self.records), len(self.records)):
            following = self.records[count]
            assert count > 0
            assert size + len(following) > max_bytes or (size >= max_bytes and not following)
        del self.records[:count]

    @rule()
    def clear(self):
        assert self.q.clear() == len(self.records)
        self.records.clear()

    # Batches

    @rule(key=keys, max_records=limits, max_bytes=limits)
    def lease(self, key, max_records, max_bytes):
        held = next(((batch_id, one) for batch_id, one in self.batches.items() if key in one.keys), None)
        if held and (held[1].state == "dead" or (held[1].state == "leased" and held[1].keys[-1] != key)):
            with pytest.raises(BatchConflict):
                self.q.lease(key)
            return
        held = held or next(((batch_id, one) for batch_id, one in self.batches.items() if one.state == "returned"), None)
        batch = self.q.lease(key, max_records, max_bytes)
        if held:
            batch_id, one = held
            if one.state == "returned":
                one.state, one.attempt = "leased", one.attempt + 1
                one.keys = [other for other in one.keys if other != key] + [key]
            assert (batch.id, batch.state, batch.attempt, list(batch)) == (batch_id, one.state, one.attempt, one.records)
        elif self.records:
            assert batch.id not in self.batches
            taken = list(batch)
            self.takes(taken, max_records, max_bytes)
            self.batches[batch.id] = Model([key], taken)
            assert (batch.records, batch.bytes, batch.attempt) == (len(taken), sum(map(len, taken)), 1)
        else:
            assert batch is None

    def pick(self, data, *states: str) -> tuple[Batch, Model] | None:
        ids = [batch_id for batch_id, one in self.batches.items() if one.state in states]
        if not ids:
            return None
        batch_id = data.draw(st.sampled_from(ids))
        return self.q.batch(batch_id), self.batches[batch_id]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def ack(self, data):
        if found := self.pick(data, "leased", "acked"):
            found[0].ack()
            found[1].state = "acked"

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def nack(self, data):
        if found := self.pick(data, "leased"):
            batch, one = found
            stale = self.q.batch(batch.id)
            batch.nack("reason")
            one.state = "dead" if one.attempt >= MAX_ATTEMPTS else "returned"
            assert (batch.state, list(batch)) == (one.state, one.records)
            with pytest.raises(BatchConflict):
                stale.ack()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def to_dead_letters(self, data):
        if found := self.pick(data, "leased"):
            found[0].to_dead_letters()
            found[1].state = "dead"

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def return_to_queue(self, data):
        if found := self.pick(data, "dead"):
            found[0].return_to_queue()
            found[1].state = "returned"

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def put_back(self, data):
        if found := self.pick(data, "leased", "returned", "dead"):
            batch, one = found
            batch.put_back()
            self.records[:0] = one.records
            self.is_no_more(batch)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def drop(self, data):
        if found := self.pick(data, "dead"):
            found[0].drop()
            self.is_no_more(found[0])

    def is_no_more(self, batch: Batch) -> None:
        del self.batches[batch.id]
        with pytest.raises(BatchNotFound):
            self.q.batch(batch.id)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
