"""Any sequence of operations does what a plain list and a dictionary of batches do, through kills and power cuts too.

A crash stops the disk after any call of the last operation: that one has happened or not, all before it have.
Limits are so small that log rotation, writes past the tail, boundaries and new chunks happen within a few operations.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk import JournalDisk, image
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from qewqew_core import Batch, BatchConflict, BatchNotFound, Empty, Queue, RecordTooLarge, Session, inspect
from qewqew_core.state import key_hash

CHUNK_SIZES = st.sampled_from([30, 64, 150, 1000])
SYNCS = st.sampled_from(["commit", "never"])
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
class Moment:
    """What is committed after some number of calls of the disk."""

    calls: int
    sync: str
    records: list[bytes]
    batches: dict[str, Model]
    put_keys: dict[str, int]

    def view(self) -> tuple[list[bytes], dict[str, tuple[str, int, str, list[bytes]]]]:
        there = {batch_id: one for batch_id, one in self.batches.items() if one.state != "acked"}
        return self.records, {name: (one.state, one.attempt, one.keys[-1], one.records) for name, one in there.items()}

    def known(self) -> dict[bytes, int]:
        return {key_hash(key): count for key, count in self.put_keys.items()}


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in (("LOG_BYTES", 2000), ("PENDING_BYTES", 60)):
            self.patch.setattr(f"qewqew_core.queue.{name}", value)
        self.patch.setattr("qewqew_core.journal.BYTES_AT_CLOSE", 800)
        for module in ("state", "reading", "writing"):
            self.patch.setattr(f"qewqew_core.{module}.PIECE_BYTES", 40)
        self.patch.setattr("qewqew_core.queue.INLINE_BYTES", {"commit": 70, "never": 70})
        self.patch.setattr("qewqew_core.session.SPILL_BYTES", 60)
        self.home = Path(tempfile.mkdtemp())
        self.folder = self.home / "0"
        self.folder.mkdir()
        self.disk = JournalDisk(str(self.folder))
        self.path = self.folder / "q"
        self.crashes = 0
        self.entries: list[Entry] = []
        self.transactions: list[Transaction] = []
        self.moments: list[Moment] = []
        self.batches: dict[str, Model] = {}  # oldest first
        self.put_keys: dict[str, int] = {}
        self.q: Queue | None = None

    def teardown(self) -> None:
        self.q.close()
        self.forget_sessions()
        self.agrees_when_reopened(64, "commit")
        self.q.close()
        self.patch.undo()
        shutil.rmtree(self.home)

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

    @initialize(chunk_size=CHUNK_SIZES, sync=SYNCS)
    def open(self, chunk_size, sync):
        self.q = Queue(self.path, chunk_size=chunk_size, sync=sync, max_attempts=MAX_ATTEMPTS, _files=self.disk)

    @rule(chunk_size=CHUNK_SIZES, sync=SYNCS)
    def reopen(self, chunk_size, sync):
        self.q.close()
        self.forget_sessions()
        assert inspect(self.path).records == len(self.records)
        if not (self.records or self.batches or self.put_keys):
            assert list(self.folder.iterdir()) == []
        self.agrees_when_reopened(chunk_size, sync)

    def forget_sessions(self):
        """They are rolled back."""
        self.transactions.clear()
        for entry in self.entries:
            entry.holder = None

    @precondition(lambda self: len(self.moments) > 1)
    @rule(
        chunk_size=CHUNK_SIZES,
        sync=SYNCS,
        power=st.booleans(),
        seed=st.integers(0, 1 << 20),
        far=st.floats(0, 1),
    )
    def crash(self, chunk_size, sync, power, seed, far):
        before, after = self.moments
        stop = before.calls + round(far * (after.calls - before.calls))
        folder = self.home / str(self.crashes + 1)
        calls, power = self.disk.calls[:stop], power and before.sync == after.sync == "commit"
        image(calls, str(self.folder), folder, random.Random(seed) if power else None)
        self.q.close()
        shutil.rmtree(self.folder)
        # After a kill, what was not synced is in the page cache only: a later power cut may still lose it.
        self.disk = JournalDisk(str(folder), follows=None if power else (calls, str(self.folder)))
        self.folder, self.path = folder, folder / "q"
        self.crashes += 1
        self.open(chunk_size, sync)
        known = {key: count for key, (_, count) in self.q._state.put_keys.items()}
        found = [one for one in (before, after) if one.view() == self.seen() and one.known() == known]
        assert found if stop < after.calls else found[-1:] == [after], f"neither {before} nor {after}, but {self.seen()}"
        now = found[-1]
        self.entries = [Entry(record) for record in now.records]
        self.batches, self.put_keys = now.batches, now.put_keys
        self.transactions.clear()
        self.moments.clear()
        self.agrees()

    def agrees_when_reopened(self, chunk_size, sync):
        self.open(chunk_size, sync)
        self.agrees()

    @rule()
    def agrees(self):
        """Everything that can be seen. Not after each step: looking makes the queue write out what only the log has."""
        seen = self.seen()
        assert seen[0] == self.records
        assert seen[1] == self.moment().view()[1]
        report = self.q.verify()
        assert report.problems == []
        assert report.orphans == []
        assert report.records == len(self.entries) + sum(len(one.records) for one in self.batches.values())

    def seen(self):
        found = {one.id: (one.state, one.attempt, one.key, list(one)) for one in (*self.q.batches(), *self.q.dead())}
        return list(self.q), found

    def moment(self) -> Moment:
        batches = {name: Model(list(one.keys), one.records, one.state, one.attempt) for name, one in self.batches.items()}
        return Moment(len(self.disk.calls), self.q.sync, [entry.record for entry in self.entries], batches, dict(self.put_keys))

    @invariant()
    def counts_agree(self):
        if self.q is not None:
            states = [one.state for one in self.batches.values()]
            stats = self.q.stats()
            assert len(self.q) == len(self.records)
            assert stats.records == len(self.entries)
            assert bool(self.q) == bool(self.records)
            assert stats.bytes == sum(len(entry.record) for entry in self.entries)
            assert (stats.leased, stats.returned, stats.dead) == tuple(map(states.count, ("leased", "returned", "dead")))
            assert (stats.oldest is None) == (not self.entries)
            self.moments = [*self.moments[-1:], self.moment()]

    @rule()
    def inspects(self):
        assert inspect(self.path) == self.q.stats()

    # Putting and taking

    @rule(record=records_)
    def put(self, record):
        self.q.put(record)
        self.add([record])

    @rule(records=batches_of_records)
    def put_many(self, records):
        assert self.q.put_many(iter(records)) == len(records)
        self.add(records)

    @rule(records=batches_of_records, key=keys)
    def put_many_under_a_key(self, records, key):
        if key not in self.put_keys:
            self.put_keys[key] = len(records)
            self.add(records)
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
            assert self.q.get() == self.remove(1)[0].record
        else:
            with pytest.raises(Empty):
                self.q.get()

    @rule(wanted=st.booleans())
    def get_if(self, wanted):
        found = self.q.get_if(lambda record: wanted)
        assert found == (self.remove(1)[0].record if wanted and self.records else None)

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
        self.remove(count)

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
    @rule(data=st.data(), max_records=limits.filter(bool))
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
    @rule(data=st.data(), key=st.none() | keys)
    def commit(self, data, key):
        one = data.draw(st.sampled_from(self.transactions))
        if key is not None and key in self.put_keys:
            assert one.session.commit(key=key) == self.put_keys[key]
            self.let_go(one)
            return
        assert one.session.commit(key=key) == len(one.puts)
        if key is not None:
            self.put_keys[key] = len(one.puts)
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
            self.entries[:0] = map(Entry, one.records)
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
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.soak
def test_any_sequence_of_other_operations():
    run_state_machine_as_test(QueueMachine, settings=settings(TestQueueMachine.settings, max_examples=5_000, derandomize=False))
