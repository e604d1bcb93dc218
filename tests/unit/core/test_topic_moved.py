"""A topic that is moved, removed or replaced while it is open: what stands at its path by then is another's, and stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import tree
from disk import NoSync

from qewqew_core import Broken, Locked, Topic
from qewqew_core.topic.reader import Reader

MOVED = "moved, removed or replaced"


def move_away(path: Path) -> None:
    path.rename(path.with_name("archived"))


def remove(path: Path) -> None:
    shutil.rmtree(path)


def switch(path: Path) -> None:
    """The directory above is a link, and leads elsewhere now."""
    (path.parents[1] / "other").mkdir()
    path.parent.unlink()
    path.parent.symlink_to(path.parents[1] / "other")


def replace_blocks(path: Path) -> None:
    """By a copy, to which a link leads."""
    (path / "data").rename(path / "old")
    shutil.copytree(path / "old", path.parent / "new")
    (path / "data").symlink_to(path.parent / "new")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "first").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "first")
    return tmp_path / "current" / "t"


def opened(path: Path, **more: Any) -> Topic:
    topic = Topic(path, **{"block_size": 2000, "_files": NoSync(), **more})
    topic.append_many([b"ours"] * 10)
    return topic


def successor(path: Path) -> dict[str, bytes]:
    """Another topic at the path, with a reader of the same name and a batch; its files."""
    if not (path / "data").exists():
        with Topic(path, _files=NoSync()) as other, other.reader("r") as reader:
            other.append_many([b"theirs"] * 100)
            reader.read_many(3)
            reader.lease("run", max_records=3)
    return tree(path)


EVENTS = [move_away, remove, switch, replace_blocks]


def fill_a_block(topic: Topic) -> None:
    topic.append_many([b"x" * 500] * 10)


def fill_the_log(topic: Topic) -> None:
    for _ in range(100):
        topic.append(b"x")


STEPS: dict[str, tuple[dict[str, Any], Callable[[Topic], object]]] = {
    "close": ({}, Topic.close),
    "close and trim": ({"max_records": 1}, Topic.close),
    "trim": ({"max_records": 1}, Topic.trim),
    "a new block": ({}, fill_a_block),
    "a new log": ({"log_bytes": 2000, "block_size": 1 << 20}, fill_the_log),
    "a reader": ({}, lambda topic: topic.reader("r")),
    "a reader is deleted": ({}, lambda topic: topic.delete_reader("r")),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("step", STEPS)
def test_no_step_by_path_changes_what_stands_there_instead(path: Path, event: Callable[[Path], None], step: str) -> None:
    settings, act = STEPS[step]
    topic = opened(path, **settings)
    event(path)
    before = successor(path)
    with pytest.raises(Broken, match=MOVED):
        act(topic)
    if not topic.is_closed:
        with pytest.raises(Broken, match=MOVED):
            topic.trim()
    topic.close()
    after = tree(path)
    if event is replace_blocks:  # the rest of the topic is what it was
        before, after = ({name: data for name, data in files.items() if "data" in name} for files in (before, after))
    assert after == before


READER_STEPS: dict[str, Callable[[Reader], object]] = {
    "read": Reader.read,
    "commit": Reader.commit,
    "lease": lambda reader: reader.lease("k", max_records=1),
    "acknowledge": lambda reader: reader.batches()[0].ack(),
    "seek": lambda reader: reader.seek(number=0),
    "delete": Reader.delete,
    "close": Reader.close,
}


@pytest.mark.parametrize("event", [move_away, remove, switch])
@pytest.mark.parametrize("step", READER_STEPS)
def test_no_step_of_a_reader_changes_what_stands_there_instead(path: Path, event: Callable[[Path], None], step: str) -> None:
    with opened(path) as topic:
        reader = topic.reader("r")
        reader.lease("run", max_records=2)
        reader.read_many(2)
    event(path)
    before = successor(path)
    with pytest.raises(Broken, match=MOVED):
        READER_STEPS[step](reader)
    reader.close()
    assert tree(path) == before


def test_a_batch_links_no_block_but_the_one_that_was_read(path: Path) -> None:
    opened(path, block_size=1 << 20).close()
    reader = Topic(path).reader("r")
    reader.read()
    replace_blocks(path)
    with pytest.raises(Broken, match=MOVED):
        reader.lease("k", max_records=1)
    reader.close()
    assert not any((path / "state" / "r.batches").iterdir())


def test_a_topic_that_only_its_own_processes_change_is_where_it_was(path: Path) -> None:
    """Another process of ours cuts the log of a reader back; that is not somebody else's."""
    with opened(path) as topic, topic.reader("r") as one, topic.reader("r") as other:
        with one._engine.exclusive():
            one._shared.rotate()
        assert other.read().body == b"ours"
        with other._engine.exclusive():
            other._shared.rotate()
        assert one.read().number == 1


def test_a_lock_file_that_is_removed_lets_no_second_writer_in(path: Path) -> None:
    topic = opened(path, max_records=5)
    (path / "t.lock").unlink()
    with pytest.raises(Locked, match="lock file was removed"):
        Topic(path, lock_timeout=0)
    fill_a_block(topic)
    topic.append(b"last")
    topic.close()
    with Topic(path) as topic:
        assert [*topic][-1].body == b"last"


def test_who_has_a_reader_whose_lock_file_was_removed_is_stopped_when_another_comes(path: Path) -> None:
    """They would not wait for each other."""
    with opened(path) as topic, topic.reader("r") as one:
        assert one.read().number == 0
        (path / "state" / "r.lock").unlink()
        assert one.read().number == 1
        one.commit()
        with topic.reader("r") as other:
            with pytest.raises(Broken, match=MOVED):
                one.read()
            assert other.read().number == 2


def test_what_was_appended_is_where_the_files_are_now(path: Path) -> None:
    topic = opened(path, block_size=1 << 20)
    move_away(path)
    topic.append(b"after")
    with pytest.raises(Broken, match=MOVED):
        topic.close()
    away = path.with_name("archived")
    away.rename(path)
    with Topic(path) as topic:
        assert [one.body for one in topic] == [b"ours"] * 10 + [b"after"]
