"""What the machines of queues and topics share: opening, kills and power cuts, and batches, which are the same for both.

A crash stops the disk after any call of the last operation: that one has happened or not, all before it have.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk import JournalDisk, image
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qewqew_core import BatchConflict, BatchNotFound

SIZES = st.integers(0, 3)  # of chunks or blocks
SYNCS = st.sampled_from(["commit", "never"])
KEYS = st.sampled_from("abcdef")
MOST = st.sampled_from([None, 1, 2, 3, 5, 8, 20, 60])
ENDS = {  # of a batch that is …
    "ack": ("leased", "acked"),
    "nack": ("leased",),
    "to_dead_letters": ("leased",),
    "return_to_queue": ("dead",),
    "retry": ("returned",),
    "drop": ("dead",),
    "put_back": ("leased", "returned", "dead"),
}
BatchView = tuple[str, int, str, tuple[bytes, ...]]


@dataclass
class BatchModel:
    """A batch, as the model knows it."""

    keys: list[str]
    records: tuple[bytes, ...]
    numbers: list[int]  # of messages of a topic
    state: str = "leased"
    attempt: int = 1

    def view(self) -> BatchView:
        return self.state, self.attempt, self.keys[-1], self.records


@dataclass
class Moment:
    """What is committed after some number of calls of the disk."""

    calls: int
    sync: str
    model: Any


def check_front(taken: list[bytes], waiting: list[bytes], max_records: int | None, max_bytes: int | None) -> None:
    """These are the first, as many as the limits allow. Empty ones behind the last that fits may come or wait."""
    count, size, most = len(taken), sum(map(len, taken)), min(max_records or len(waiting), len(waiting))
    assert taken == waiting[:count]
    assert count <= most
    assert size <= (max_bytes or size) or count == 1
    if max_bytes is None:
        assert count == most
    elif count < most:
        following = waiting[count]
        assert count > 0
        assert size + len(following) > max_bytes or (size >= max_bytes and not following)


class Machine(RuleBasedStateMachine):
    """A store, and what it should have: the model. Each machine says:

    - ``make(size, sync)`` opens the store; ``close(orderly=)`` closes it, and what was made by it: before it, if orderly;
    - ``forget()``: what was open is closed, or was killed: what it had not committed is rolled back;
    - ``agrees()``: the open store has what the model has, in all that can be seen; ``agrees_closed()``: so has the closed one;
    - ``check_counts()``: what is cheap to see, and changes nothing;
    - ``committed()``: a copy of the model, without what nobody has committed;
    - ``go_on_from(before, after, returned=)``: the store is as one of these, the second if the operation had ``returned``, and
      from now on the model is so too;
    - ``source(name)``: what batches are leased from; ``batches_of(name)``: the model of them, by id, oldest first;
    - ``waiting(name)``: what can be leased, in this order; ``leased(name, batch)``: of these, what is in the new batch waits no
      longer, and these are its numbers; ``put_back(name, model)``: it waits again; ``is_there(model)``:
      whether it can be put back.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]  # of what batches are leased from
    max_attempts: int
    is_there = staticmethod(lambda model: True)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.home = Path(tempfile.mkdtemp())
        self.folder = self.home / "0"
        self.folder.mkdir()
        self.disk = JournalDisk(str(self.folder))
        self.crashes = 0
        self.sync: str | None = None  # until it is opened
        self.moments: list[Moment] = []  # before the last operation, and after it

    # Opening and crashes

    def teardown(self) -> None:
        try:
            self.reopen(1, "commit")
            self.close(orderly=False)
        finally:
            self.patch.undo()
            shutil.rmtree(self.home)

    def open(self, size: int, sync: str) -> None:
        self.make(self.sizes[size], sync)
        self.sync = sync

    @rule(size=SIZES, sync=SYNCS)
    def reopen(self, size, sync):
        self.close(orderly=True)
        self.forget()
        self.agrees_closed()
        self.open(size, sync)
        self.agrees()

    @precondition(lambda self: len(self.moments) > 1)
    @rule(size=SIZES, sync=SYNCS, power=st.booleans(), seed=st.integers(0, 1 << 20), far=st.floats(0, 1))
    def crash(self, size, sync, power, seed, far):
        before, after = self.moments
        stop = before.calls + round(far * (after.calls - before.calls))
        folder, calls = self.home / str(self.crashes + 1), self.disk.calls[:stop]
        power = power and before.sync == after.sync == "commit"
        image(calls, str(self.folder), folder, random.Random(seed) if power else None)
        self.close(orderly=False)
        self.forget()
        shutil.rmtree(self.folder)
        # After a kill, what was not synced is in the page cache only: a later power cut may still lose it.
        self.disk = JournalDisk(str(folder), follows=None if power else (calls, str(self.folder)))
        self.folder = folder
        self.crashes += 1
        self.open(size, sync)
        self.go_on_from(before.model, after.model, returned=stop == after.calls)
        self.moments.clear()
        self.agrees()

    @rule()
    def looks(self):
        """Not after each step: looking makes a queue write out what only the log has."""
        self.agrees()

    def moment(self) -> Moment:
        return Moment(len(self.disk.calls), self.sync, self.committed())

    @invariant()
    def counts_agree(self):
        if self.sync is not None:
            self.check_counts()
            self.moments = [*self.moments[-1:], self.moment()]

    # Batches

    @rule(data=st.data(), key=KEYS, max_records=MOST, max_bytes=MOST)
    def lease(self, data, key, max_records, max_bytes):
        name = data.draw(st.sampled_from(self.names))
        source, all_batches = self.source(name), self.batches_of(name)
        held = next(((batch_id, model) for batch_id, model in all_batches.items() if key in model.keys), None)
        if held and (held[1].state == "dead" or (held[1].state == "leased" and held[1].keys[-1] != key)):
            with pytest.raises(BatchConflict):
                source.lease(key)
            return
        held = held or next(((batch_id, model) for batch_id, model in all_batches.items() if model.state == "returned"), None)
        waiting = self.waiting(name)
        batch = source.lease(key, max_records, max_bytes)
        if held:
            batch_id, model = held
            if model.state == "returned":
                model.state, model.attempt = "leased", model.attempt + 1
                model.keys = [other for other in model.keys if other != key] + [key]
            assert (batch.id, batch.state, batch.attempt, tuple(batch)) == (batch_id, model.state, model.attempt, model.records)
        elif waiting:
            assert batch.id not in all_batches
            taken = list(batch)
            check_front(taken, waiting, max_records, max_bytes)
            all_batches[batch.id] = BatchModel([key], tuple(taken), self.leased(name, batch))
            assert (batch.records, batch.bytes, batch.attempt) == (len(taken), sum(map(len, taken)), 1)
        else:
            assert batch is None

    @precondition(lambda self: any(map(self.batches_of, self.names)))
    @rule(data=st.data(), end=st.sampled_from(["ack", "nack", "to_dead_letters"]))
    def end_a_lease(self, data, end):
        self.end(data, end)

    @precondition(lambda self: any(map(self.batches_of, self.names)))
    @rule(data=st.data(), end=st.sampled_from(["put_back", "return_to_queue", "retry", "drop"]))
    def undo_a_batch(self, data, end):
        self.end(data, end)

    def end(self, data: Any, end: str) -> None:
        """End one of the batches that can be ended so, if there is one."""
        found = [
            (name, batch_id)
            for name in self.names
            for batch_id, model in self.batches_of(name).items()
            if model.state in ENDS[end]
        ]
        if not found:
            return
        name, batch_id = data.draw(st.sampled_from(found))
        source, all_batches = self.source(name), self.batches_of(name)
        batch, stale, model = source.batch(batch_id), source.batch(batch_id), all_batches[batch_id]
        if end == "put_back" and not self.is_there(model):
            with pytest.raises(BatchConflict):
                batch.put_back()
            return
        getattr(batch, end)()
        if end in ("put_back", "drop"):
            del all_batches[batch_id]
            for act in (stale.ack, lambda: source.batch(batch_id)):
                with pytest.raises(BatchNotFound):
                    act()
            if end == "put_back":
                self.put_back(name, model)
            return
        model.state = {"ack": "acked", "return_to_queue": "returned", "retry": "returned"}.get(end, "dead")
        if end == "nack" and model.attempt < self.max_attempts:
            model.state = "returned"
        assert (batch.state, tuple(batch)) == (model.state, model.records)
        if end != "ack":
            with pytest.raises(BatchConflict):
                stale.ack()
