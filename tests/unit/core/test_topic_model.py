"""Any sequence of operations on a topic and its readers does what plain lists and sets do, through kills and power cuts too."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from machine import KEYS, SIZES, SYNCS, BatchModel, Machine
from stride import examples
from views import ReaderView, View, differences, is_between, view
from work import LOG_BYTES, set_small_limits
from zbus_cases import reference_matches

from qewqew_core import Batch, CommitConflict, Empty, Message, Topic, inspect_reader
from qewqew_core.disk.files import Files
from qewqew_core.keys import key_hash
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.reader_inspection import look
from qewqew_core.topic.topic_session import TopicSession

NAMES = st.sampled_from(["r", "s"])
TAGS = st.sampled_from([None, "a", "a.b", "c"])
FILTERS = st.sampled_from([None, None, "a", "a.#", "c;a", "zz"])
COUNTS = st.sampled_from([1, 2, 3, 5, 30])
MESSAGES = st.lists(st.tuples(st.binary(max_size=90), TAGS).map(lambda one: Message(*one)), max_size=7)
CONSUMERS = (0, 1)  # of each reader


@dataclass
class ReaderModel:
    """Numbers of messages."""

    filter: str | None
    left: set[int]  # not delivered yet; those that do not match are not in it
    flight: dict[int, tuple[int | None, int]] = field(default_factory=dict)  # consumer (None: was given back), attempt
    batches: dict[str, BatchModel] = field(default_factory=dict)
    lost: int = 0

    def again(self) -> list[int]:
        return sorted(number for number, (owner, _) in self.flight.items() if owner is None)

    def mine(self, consumer: int) -> list[int]:
        return [number for number, (owner, _) in self.flight.items() if owner == consumer]

    def take(self, count: int) -> list[int]:
        """Those that come next."""
        again = self.again()[:count]
        return again + sorted(self.left)[: count - len(again)]

    def give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            self.flight[number] = None, self.flight[number][1]

    def living(self) -> list[int]:
        """What is in batches whose messages the reader keeps."""
        return [number for one in self.batches.values() if one.state in ("leased", "returned") for number in one.numbers]


@dataclass
class Model:
    first: int = 0
    messages: list[Message] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    readers: dict[str, ReaderModel] = field(default_factory=dict)

    def view(self) -> View:
        readers = {
            name: ReaderView(
                one.filter,
                frozenset(number for number in (*one.left, *one.flight) if number >= self.first),
                {batch_id: batch.view() for batch_id, batch in one.batches.items()},
            )
            for name, one in self.readers.items()
        }
        there = {number: (one.body, one.tag) for number, one in enumerate(self.messages) if number >= self.first}
        return View(len(self.messages), self.first, there, {key_hash(key): n for key, n in self.keys.items()}, "", readers)


class TopicMachine(Machine):
    sizes, names, max_attempts = (210, 500, 1500, 10_000), ("r", "s"), 2

    def __init__(self) -> None:
        super().__init__()
        set_small_limits(self.patch, 500)
        self.model = Model()
        self.open_readers: dict[tuple[str, int], Reader] = {}
        self.session: TopicSession | None = None
        self.session_read: list[tuple[str, int, int]] = []  # reader, number, attempt
        self.session_puts: list[Message] = []

    # Opening

    @initialize(size=SIZES, sync=SYNCS, slow=st.sampled_from(["hold", "move"]), keep=st.sampled_from([None, 6]))
    def start(self, size, sync, slow, keep):
        self.slow, self.keep = slow, keep
        self.open(size, sync)

    def make(self, size: int, sync: str) -> None:
        settings = {"max_attempts": self.max_attempts, "log_bytes": LOG_BYTES, "_files": self.disk}
        settings |= {"max_records": self.keep, "slow_readers": self.slow}
        self.topic = Topic(self.folder / "t", block_size=size, sync=sync, **settings)

    def close(self, *, orderly: bool) -> None:
        if not orderly:
            self.topic.close()
        if self.session is not None:
            self.session.close()
        for reader in self.open_readers.values():
            reader.close()
        self.topic.close()

    def forget(self) -> None:
        self.open_readers.clear()
        self.session, self.session_read, self.session_puts = None, [], []
        for one in self.model.readers.values():
            one.give_back([*one.flight])

    def agrees_closed(self) -> None:
        self.trimmed()
        for name, one in self.model.readers.items():
            stats = inspect_reader(self.topic.path, name)
            there = [number for number in (*one.left, *one.flight) if number >= self.model.first]
            assert stats.records == len(there)
            assert stats.bytes == sum(len(self.model.messages[number].body) for number in there)

    def committed(self) -> Model:
        return copy.deepcopy(self.model)

    def go_on_from(self, before: Model, after: Model, *, returned: bool) -> None:
        for name in self.topic.readers():
            self.topic.reader(name).close()
        seen, views = view(self.topic), [before.view(), after.view()]
        assert is_between(seen, views[0], views[1]), differences(seen, views)
        happened = seen != views[0]
        assert happened or not returned or views[0] == views[1]
        self.model = copy.deepcopy(after if happened else before)
        self.model.first = seen.first
        for name, one in self.model.readers.items():
            state = look(Files(), self.topic.path, name)
            # A power cut may take back deliveries, and with them how often they were tried.
            one.flight = {flight.at.number: (None, flight.attempt) for flight in state.in_flight.values()}
            one.left = set(seen.readers[name].pending - one.flight.keys())
            with self.topic.reader(name) as reader:
                one.lost = reader.lost
            one.flight = {number: flight for number, flight in one.flight.items() if number >= seen.first}

    def agrees(self) -> None:
        seen, right = view(self.topic), self.model.view()
        assert seen == right, differences(seen, [right])
        report = self.topic.verify()
        assert report.problems == []
        assert report.records == len(right.messages)
        assert report.bytes == sum(len(body) for body, _ in right.messages.values())
        assert [one.body for one in self.topic] == [body for body, _ in right.messages.values()]

    def check_counts(self) -> None:
        stats = self.topic.stats()
        assert len(self.topic) == stats.messages == len(self.model.messages) - self.model.first
        assert (stats.first, stats.next) == (self.model.first, len(self.model.messages))

    # Appending

    def added(self, messages: list[Message]) -> None:
        for message in messages:
            for one in self.model.readers.values():
                if reference_matches(one.filter, message.tag):
                    one.left.add(len(self.model.messages))
            self.model.messages.append(message)
        self.trimmed()

    def trimmed(self) -> None:
        """Which blocks were removed depends on where they end; not more than may be, and nobody's."""
        first = view(self.topic).first
        assert first >= self.model.first
        if first > self.model.first:
            assert self.keep is not None
            assert len(self.model.messages) - first >= self.keep
        for one in self.model.readers.values():
            gone = [number for number in (*one.left, *one.flight) if number < first]
            assert not gone or self.slow == "move"
            if first > self.model.first:
                assert all(number >= first for number in one.living() if number >= self.model.first)
            one.lost += len(gone)
            one.left = {number for number in one.left if number >= first}
            one.flight = {number: flight for number, flight in one.flight.items() if number >= first}
        self.model.first = first

    @rule(body=st.binary(max_size=300), tag=TAGS)
    def append(self, body, tag):
        assert self.topic.append(body, tag=tag) == len(self.model.messages)
        self.added([Message(body, tag)])

    @rule(messages=MESSAGES, key=st.none() | KEYS)
    def append_many(self, messages, key):
        if key is not None and key in self.model.keys:
            assert self.topic.append_many(messages, key=key) == self.model.keys[key]
            return
        assert self.topic.append_many(messages, key=key) == len(messages)
        if key is not None:
            self.model.keys[key] = len(messages)
        self.added(messages)

    @rule()
    def trim(self):
        self.topic.trim()
        self.trimmed()

    # Reading

    def consumer(self, name: str, consumer: int) -> Reader:
        made = name not in self.model.readers
        if made:
            self.model.readers[name] = ReaderModel(None, set(range(self.model.first, len(self.model.messages))))
        if (name, consumer) not in self.open_readers:
            self.open_readers[name, consumer] = self.topic.reader(name)
        if made:  # a crash may come between this and what the rule does then
            self.moments = [self.moment()]
        return self.open_readers[name, consumer]

    def delivered(self, name: str, consumer: int, taken: list[Message], count: int) -> None:
        one = self.model.readers[name]
        expected = one.take(count)
        assert [message.number for message in taken] == expected
        for message in taken:
            stored = self.model.messages[message.number]
            attempt = one.flight[message.number][1] + 1 if message.number in one.flight else 1
            assert (message.body, message.tag, message.attempt) == (stored.body, stored.tag, attempt)
            one.flight[message.number] = consumer, attempt
        one.left -= {*expected}

    @rule(name=NAMES, consumer=st.sampled_from(CONSUMERS), count=COUNTS)
    def read(self, name, consumer, count):
        reader = self.consumer(name, consumer)
        one = self.model.readers[name]
        if one.take(1):
            assert reader.peek().number == one.take(1)[0]
        else:
            with pytest.raises(Empty):
                reader.read()
        self.delivered(name, consumer, reader.read_many(count), count)

    @rule(name=NAMES, consumer=st.sampled_from(CONSUMERS))
    def commit(self, name, consumer):
        reader = self.consumer(name, consumer)
        one = self.model.readers[name]
        mine = one.mine(consumer)
        reader.position()  # what is committed before anybody has noticed that it was removed counts as committed, not as lost
        assert reader.commit() == len(mine)
        for number in mine:
            del one.flight[number]

    @rule(name=NAMES, consumer=st.sampled_from(CONSUMERS), count=COUNTS, data=st.data())
    def read_and_commit_some(self, name, consumer, count, data):
        reader = self.consumer(name, consumer)
        taken = reader.read_many(count)
        self.delivered(name, consumer, taken, count)
        if taken:
            some = data.draw(st.lists(st.sampled_from(taken), unique=True))
            if some:
                assert reader.commit(*some) == len(some)
                for message in some:
                    del self.model.readers[name].flight[message.number]
                with pytest.raises(CommitConflict):
                    reader.commit(some[0]._replace(number=len(self.model.messages), offset=1 << 40))

    @rule(name=NAMES, consumer=st.sampled_from(CONSUMERS))
    def nack(self, name, consumer):
        reader = self.consumer(name, consumer)
        mine = self.model.readers[name].mine(consumer)
        reader.position()  # as in `commit`
        assert reader.nack() == len(mine)
        self.model.readers[name].give_back(mine)

    @rule(name=NAMES, consumer=st.sampled_from(CONSUMERS))
    def close_consumer(self, name, consumer):
        if reader := self.open_readers.pop((name, consumer), None):
            reader.close()
            one = self.model.readers[name]
            one.give_back(one.mine(consumer))

    @rule(name=NAMES, text=FILTERS, far=st.floats(0, 1))
    def seek_with_filter(self, name, text, far):
        """Together: what an earlier filter has passed over comes again only where the reader was moved."""
        reader = self.consumer(name, 0)
        number = self.model.first + round(far * (len(self.model.messages) - self.model.first))
        reader.set_filter(text)
        one = self.model.readers[name]
        one.filter = text
        one.left = {n for n in one.left if reference_matches(text, self.model.messages[n].tag)}
        reader.seek(number=number)
        one.flight.clear()
        one.left = {n for n in range(number, len(self.model.messages)) if reference_matches(text, self.model.messages[n].tag)}
        self.moments.clear()  # no crash in here: it may come between the two

    @rule(name=NAMES)
    def looks_at_a_reader(self, name):
        reader = self.consumer(name, 0)
        one = self.model.readers[name]
        stats = reader.stats()
        there = [*one.left, *one.flight]
        states = [batch.state for batch in one.batches.values()]
        assert stats.records == len(there)
        assert (stats.leased, stats.returned, stats.dead) == tuple(map(states.count, ("leased", "returned", "dead")))
        assert reader.filter == one.filter
        if one.filter is None:
            living = one.living()
            floor = min([*there, *living, len(self.model.messages)])
            if floor >= self.model.first:
                place = reader.position().number
                assert place == floor or (place < floor and living)  # a batch begins with what its filter has passed over
                assert reader.lag() == len(self.model.messages) - place

    @rule(source=NAMES, other=NAMES)
    def copy_reader(self, source, other):
        if source in self.model.readers and source != other:
            with self.topic.reader(source) as reader:
                number = reader.position().number
            if number >= self.model.first:
                self.topic.copy_reader(source, other)
                old = self.model.readers.get(other)
                text = old.filter if old else None
                left = range(number, len(self.model.messages))
                one = ReaderModel(text, {n for n in left if reference_matches(text, self.model.messages[n].tag)})
                if old is not None:
                    one.batches, one.lost = old.batches, old.lost
                self.model.readers[other] = one

    @rule(name=NAMES)
    def delete_reader(self, name):
        if name in self.model.readers and not any(one[0] == name for one in self.session_read):
            for consumer in CONSUMERS:
                if reader := self.open_readers.pop((name, consumer), None):
                    reader.close()
            self.topic.delete_reader(name)
            del self.model.readers[name]

    # Sessions: consumer 1 reads in them

    @rule(name=NAMES, count=COUNTS)
    def read_in_session(self, name, count):
        reader = self.consumer(name, 1)
        self.session = self.session or self.topic.session()
        taken = self.session.read_many(reader, count)
        self.delivered(name, 1, taken, count)
        self.session_read += [(name, message.number, message.attempt) for message in taken]

    @rule(messages=MESSAGES)
    def append_in_session(self, messages):
        self.session = self.session or self.topic.session()
        assert self.session.append_many(messages) == len(messages)
        self.session_puts += messages

    def still_there(self) -> bool:
        flights = [(self.model.readers[name].flight.get(number), attempt) for name, number, attempt in self.session_read]
        consumers = all((name, 1) in self.open_readers for name, _, _ in self.session_read)
        return consumers and all(flight == (1, attempt) for flight, attempt in flights)

    @precondition(lambda self: self.session is not None)
    @rule(key=st.none() | KEYS, rollback=st.booleans())
    def end_session(self, key, rollback):
        if rollback or not self.still_there() or key in self.model.keys:
            if not rollback and key in self.model.keys and self.still_there():
                assert self.session.commit(key=key) == self.model.keys[key]
            else:
                self.session.rollback()
            for name, number, attempt in self.session_read:
                one = self.model.readers[name]
                if (name, 1) in self.open_readers and one.flight.get(number) == (1, attempt):
                    one.give_back([number])
        else:
            assert self.session.commit(key=key) == len(self.session_puts)
            if key is not None:
                self.model.keys[key] = len(self.session_puts)
            for name, number, _ in {*self.session_read}:  # twice, if the reader was moved back in between
                del self.model.readers[name].flight[number]
            self.added(self.session_puts)
        self.session.close()
        self.session, self.session_read, self.session_puts = None, [], []

    # Batches

    def source(self, name: str) -> Reader:
        return self.consumer(name, 0)

    def batches_of(self, name: str) -> dict[str, BatchModel]:
        return self.model.readers[name].batches if name in self.model.readers else {}

    def waiting(self, name: str) -> list[bytes]:
        return [self.model.messages[number].body for number in self.model.readers[name].take(1 << 30)]

    def leased(self, name: str, batch: Batch) -> list[int]:
        one = self.model.readers[name]
        numbers = one.take(batch.records)
        assert [message.number for message in batch.messages()] == numbers
        one.left -= {*numbers}
        for number in numbers:
            one.flight.pop(number, None)
        return numbers

    def is_there(self, one: BatchModel) -> bool:
        return min(one.numbers) >= self.model.first

    def put_back(self, name: str, one: BatchModel) -> None:
        reader = self.model.readers[name]
        reader.left |= {*one.numbers} - reader.flight.keys()
        if reader.filter is not None:  # one that was set since
            reader.left = {n for n in reader.left if reference_matches(reader.filter, self.model.messages[n].tag)}


TestTopicMachine = TopicMachine.TestCase
TestTopicMachine.settings = settings(
    max_examples=examples(quick=8, full=40, soak=5_000),
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
