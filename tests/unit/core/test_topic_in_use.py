"""A topic in use: blocks and readers that go away between two looks of somebody who has no lock; and a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core import Topic, inspect_reader
from qewqew_core.view import View
from qewqew_core.zbus import Index


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic of five messages, each in a block of its own."""
    with Topic(tmp_path / "events", block_size=1) as topic:
        for number in range(5):
            topic.append(str(number).encode(), tag="eu")
    return tmp_path / "events"


def remove_all_but(path: Path, records: int) -> None:
    with Topic(path, max_records=records, slow_readers="move") as topic:
        topic.trim()


@pytest.fixture
def after_stale_looks(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it, and the next so many looks at the index are from before three blocks were removed."""

    def prepare(looks: int) -> None:
        view = View(Topic(path)._files, str(path), "B")
        stale, look = [view.index()] * looks, View.index
        view.close()
        remove_all_but(path, 2)

        def index(self: View) -> Index:
            return stale.pop() if stale else look(self)

        monkeypatch.setattr(View, "index", index)

    return prepare


def test_a_block_that_is_removed_while_a_reader_is_inspected_is_no_damage(
    path: Path, after_stale_looks: Callable[[int], None]
) -> None:
    after_stale_looks(1)
    assert inspect_reader(path, "any").records == 2


@pytest.mark.parametrize("looks", [1, 2])
def test_a_block_that_is_removed_while_a_reader_is_made_is_no_damage(
    path: Path, after_stale_looks: Callable[[int], None], looks: int
) -> None:
    with Topic(path) as topic:
        after_stale_looks(looks)
        with topic.reader("new") as reader:
            assert [message.body for message in reader] == [b"3", b"4"]


@pytest.mark.parametrize("filter", [None, "eu"])
def test_a_reader_that_was_overtaken_is_inspected_as_it_will_go_on(path: Path, filter: str | None) -> None:
    """By what it said before, a sensor would be ready for what is not there, or with a filter never again."""
    with Topic(path) as topic, topic.reader("slow", filter):
        pass
    remove_all_but(path, 2)
    before = inspect_reader(path, "slow")
    assert (before.records, before.bytes) == (2, 2)
    with Topic(path) as topic, topic.reader("slow") as reader:
        assert (reader.stats(), reader.lost) == (before, 3)


def test_a_reader_that_is_deleted_meanwhile_is_not_counted_and_holds_nothing_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Topic, "readers", lambda self: ["gone"])
    with Topic(path, max_records=2) as topic:
        assert topic.stats().readers == {}
        assert topic.trim() == 3


def test_a_fork_leaves_the_descriptors_alone_that_a_closed_topic_once_had(path: Path) -> None:
    """The numbers are those of other files by then."""
    with Topic(path) as topic:
        topic.append(b"5")
    others = [os.open(path, os.O_RDONLY) for _ in range(20)]
    child = os.fork()
    if child == 0:
        try:
            for fd in others:
                os.fstat(fd)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for fd in others:
        os.close(fd)
    assert topic.path == str(path)  # it was there all the time
