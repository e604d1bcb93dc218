"""Counts, times and numbers that are none: refused by each public call, at once, with or without records; nothing is changed.

What takes a number is found by its name in the signatures, so a new call is tested as soon as it is there.
"""

from __future__ import annotations

import inspect as inspecting
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qewqew_core import BadArgument, Batch, Message, Queue, Reader, Session, Stage, Topic, TopicSession, repair, repair_topic

NUMBERS = {
    *("timeout", "max_records", "max_bytes", "lease_timeout", "delay", "window", "redeliver_after", "lock_timeout", "chunk_size"),
    *(
        "min_free_bytes",
        "log_bytes",
        "max_attempts",
        "retry_delay",
        "retention_bytes",
        "block_size",
        "number",
        "offset",
        "corr_offset",
    ),
    *("timestamp", "start", "mask"),
}
AT_COMMIT = {
    "max_records",
    "max_bytes",
    "log_bytes",
    "max_attempts",
    "retry_delay",
    "retention_bytes",
}  # checked by a stage then: see its text
VALUES = [True, False, "5", "", b"", [], {}, object(), float("nan"), 1j]


class Stores:
    """One of each, with records or without."""

    def __init__(self, path: Path, full: bool) -> None:
        self.path = path
        self.Queue, self.Topic, self.Stage = Queue(path / "q"), Topic(path / "t"), Stage(path / "q")
        self.Reader, self.Session, self.TopicSession = self.Topic.reader("r"), self.Queue.session(), self.Topic.session()
        self.Queue.put(b"leased")
        batch = self.Queue.lease("key")
        assert batch is not None
        self.Batch = batch
        if full:
            self.Queue.put_many([b"1", b"2"])
            self.Topic.append_many([b"1", b"2"])
            self.Stage.put(b"staged")

    def view(self) -> object:
        return (
            list(self.Queue),
            list(self.Topic),
            self.Stage.records,
            self.Reader.stats(),
            [batch.state for batch in self.Queue.batches()],
            self.Topic.readers(),
        )

    def close(self) -> None:
        for each in (self.Reader, self.Session, self.TopicSession, self.Stage, self.Topic, self.Queue):
            each.close()


KINDS = [Queue, Session, Stage, Topic, TopicSession, Reader, Batch]


def parameters() -> Iterator[tuple[str, str, str]]:
    """Each method, with each of its parameters that is a number."""
    for kind in KINDS:
        for name, function in inspecting.getmembers(kind, inspecting.isfunction):
            if (name.startswith("_") and name != "__init__") or (name == "__init__" and kind not in (Queue, Stage, Topic)):
                continue
            if (kind is Queue and name in ("put_staged", "put_group", "serve")) or (
                kind is Topic and name in ("checked", "recover")
            ):
                continue  # not public
            for parameter in inspecting.signature(function).parameters.values():
                if parameter.name in NUMBERS:
                    yield kind.__name__, name, parameter.name
    for setting in inspecting.signature(Queue).parameters:
        if setting in NUMBERS - AT_COMMIT:
            yield "Stage", "__init__", setting


def call(stores: Stores, kind: str, method: str, named: dict[str, object]) -> object:
    if method == "__init__":
        made = {"Queue": Queue, "Stage": Stage, "Topic": Topic}[kind]
        return typing.cast(Callable[..., object], made)(stores.path / "new", **named)
    function = getattr(getattr(stores, kind), method)
    needed: dict[str, object] = {
        **{
            "record": b"x",
            "records": [b"x"],
            "predicate": lambda record: False,
            "key": "another",
            "body": b"x",
            "max_records": 1,
        },
        **{"messages": [Message(b"x")], "reader": stores.Reader, "name": "new", "text": "x"},
    }
    signature = inspecting.signature(function).parameters
    given = {name: needed[name] for name, each in signature.items() if each.default is each.empty and name in needed}
    given = {name: value for name, value in given.items() if signature[name].kind is not inspecting.Parameter.VAR_POSITIONAL}
    return function(**given | named)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("kind", "method", "parameter"), sorted(set(parameters())))
def test_what_is_no_number_is_refused_at_once(tmp_path: Path, kind: str, method: str, parameter: str, full: bool) -> None:
    stores = Stores(tmp_path, full)
    before = stores.view()
    files = sorted(tmp_path.rglob("*"))
    try:
        for value in VALUES:
            with pytest.raises(BadArgument):
                call(stores, kind, method, {parameter: value})
            assert stores.view() == before
            assert sorted(tmp_path.rglob("*")) == files
    finally:
        stores.close()


@pytest.mark.parametrize("function", [repair, repair_topic])
@pytest.mark.parametrize("value", VALUES)
def test_a_repair_does_not_wait_for_what_is_no_number(tmp_path: Path, function: Callable[..., object], value: object) -> None:
    with Queue(tmp_path / "q") as queue, Topic(tmp_path / "t") as topic:
        queue.put(b"x")
        topic.append(b"x")
    with pytest.raises(BadArgument):
        function(tmp_path / ("q" if function is repair else "t"), lock_timeout=value)
