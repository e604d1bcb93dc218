"""Everything that a user can see of a queue or of a topic, in one form, so that one can be held against another."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from qewqew_core import Queue, Topic
from qewqew_core.batch import manifest, places, segments
from qewqew_core.disk.files import Files
from qewqew_core.formats.tags import Filter
from qewqew_core.topic import topic_log
from qewqew_core.topic.reader_inspection import look
from qewqew_core.topic.view import View as TopicView


class ReaderView(NamedTuple):
    """What a reader has still to deliver or to see committed, by number, and its batches."""

    filter: str | None
    pending: frozenset[int]
    batches: dict[str, tuple[str, int, str, tuple[bytes, ...]]]  # state, attempt, key, bodies


class View(NamedTuple):
    """A queue is seen as messages with the numbers of their places, and as their one reader, which is called ""."""

    next: int
    first: int
    messages: dict[int, tuple[bytes, str | None]]
    keys: dict[bytes, int]
    creator: str
    readers: dict[str, ReaderView]

    @property
    def records(self) -> list[bytes]:
        return [body for body, _ in self.messages.values()]


EMPTY = View(0, 0, {}, {}, "", {})


def view(store: Queue | Topic) -> View:
    """What is committed: what sessions have taken from it and not committed is still there."""
    return view_of_queue(store) if isinstance(store, Queue) else view_of_topic(store)


def of_queue(records: list[bytes], keys: dict[bytes, int], batches: dict[str, tuple[str, int, str, tuple[bytes, ...]]]) -> View:
    messages = {place: (record, None) for place, record in enumerate(records)}
    return View(len(records), 0, messages, keys, "", {"": ReaderView(None, frozenset(messages), batches)})


def view_of_queue(q: Queue) -> View:
    """Through the queue itself, which has what only the log has written out for it."""
    q._engine.state.check()
    chunks = list(q._engine.state.chain.values())
    held = [part.unavailable for part in chunks]
    for part in chunks:
        part.unavailable = [(span.start, span.end) for span in part.consumed]
    try:
        found = {batch.id: (batch.state, batch.attempt, batch.key, tuple(batch)) for batch in (*q.batches(), *q.dead())}
        return of_queue(list(q), {key: count for key, (_, count) in q._engine.state.idempotency_keys.items()}, found)
    finally:
        for part, busy in zip(chunks, held, strict=True):
            part.unavailable = busy


def view_of_topic(topic: Topic) -> View:
    """As the files say it, without a lock and without a change."""
    files, look_at = Files(), TopicView(Files(), topic.path, topic.dialect)
    try:
        oldest, latest = look_at.oldest(), look_at.latest()
        found = [found.message for found in look_at.messages(oldest)]
        assert [message.number for message in found] == list(range(oldest.number, latest.number))
        messages = {message.number: (message.body, message.tag) for message in found}
        readers = {}
        path = f"{topic.path}/{topic.name}.wal"
        log = topic_log.replay(Path(path).read_bytes(), path).state
        if topic._writer is not None:
            topic._writer.engine.state.check()
        committed = log.sessions.keys()  # their readers may not have been able to note it
        for name in sorted(path.stem for path in Path(topic.path, "reader").glob("*.rdx")):
            state = look(files, topic.path, name)
            assert state is not None
            flights = [flight for flight in state.in_flight.values() if flight.session not in committed]
            pending = {flight.at.number for flight in flights if flight.at >= oldest}
            for start, stop in state.pending:
                for found in look_at.messages(max(start, oldest), stop, Filter(state.filter) if state.filter else None):
                    assert found.message.number not in pending, "a message is to be delivered twice"
                    pending.add(found.message.number)
            stem = f"{topic.path}/state/{name}"
            kept = {}
            for batch in state.with_history():
                directory = places.directory_of(stem, batch)
                body = manifest.load(directory)
                records = [part for segment in body.segments for part in segments.read_records(directory, body, segment)]
                bodies = tuple(message.body for part in records for message in part)
                kept[batch.id] = (batch.state, batch.attempt, batch.keys[-1], bodies)
            readers[name] = ReaderView(state.filter, frozenset(pending), kept)
        counts = {key: count for key, (_, count) in log.idempotency_keys.items()}
        return View(latest.number, oldest.number, messages, counts, look_at.common().creator, readers)
    finally:
        look_at.close()


def bases(topic: Topic) -> set[int]:
    """The base offsets of the blocks that the index knows, by which files are called."""
    look_at = TopicView(Files(), topic.path, topic.dialect)
    try:
        return {entry.base for entry in look_at.entries(look_at.index())}
    finally:
        look_at.close()


def is_between(seen: View, before: View, after: View) -> bool:
    """Whether the operation has happened, or not; old blocks, which are removed behind it, may still be there."""
    if before.creator != after.creator:  # it has no checksum; that a disk writes it whole is what a zbus server relies on too
        before, seen = before._replace(creator=after.creator), seen._replace(creator=after.creator)
    if seen in (before, after):
        return True
    if not before.first <= seen.first <= after.first or seen._replace(first=0, messages={}, readers={}) != after._replace(
        first=0, messages={}, readers={}
    ):
        return False
    newer = {number: message for number, message in seen.messages.items() if number >= after.first}
    if newer != after.messages or not (seen.messages.keys() - newer.keys()) <= before.messages.keys():
        return False
    if seen.readers.keys() != after.readers.keys():
        return False
    return all(
        reader._replace(pending=frozenset(number for number in reader.pending if number >= after.first)) == after.readers[name]
        and {number for number in reader.pending if number < after.first} <= before.readers.get(name, reader).pending
        for name, reader in seen.readers.items()
    )


def differences(seen: View, allowed: list[View]) -> str:
    """What is not as it should be, for the message of a failed test."""
    lines = []
    for number, right in enumerate(allowed):
        for name in View._fields:
            found, wanted = getattr(seen, name), getattr(right, name)
            if isinstance(wanted, dict):
                for key in sorted({*found, *wanted}, key=str):
                    if found.get(key) != wanted.get(key):
                        lines.append(f"step {number}: {name}[{key}] is {found.get(key)}, not {wanted.get(key)}")
            elif found != wanted:
                lines.append(f"step {number}: {name} is {found}, not {wanted}")
    return "; ".join(lines)
