"""Finding queues and topics by their files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qewqew_core import BadPath, Queue, Topic
from qewqew_core.tools.listing import find


def put(path: Path) -> None:
    with Queue(path) as queue:
        queue.put_many([b"1", b"2"])
        queue.lease("key", max_records=1)


def test_queues_and_topics_are_found_in_the_directory_and_below_it_but_not_in_each_other(tmp_path: Path) -> None:
    for name in ("orders", "shop/orders.qew", "shop/eu/returns"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        put(tmp_path / name)
    for name in ("events", "shop/clicks"):
        with Topic(tmp_path / name) as topic, topic.reader("r"):
            topic.append(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no queue")
    for file in (tmp_path / "shop").glob("orders.qew*"):
        if file.is_file():  # in a directory of the queue's own, where none can be made
            shutil.copy(file, tmp_path / "orders.batches")
    found = find(str(tmp_path))
    assert found.queues == ["orders", "shop/orders.qew", "shop/eu/returns"]
    assert found.topics == ["events", "shop/clicks"]
    assert found.complete


def test_links_are_not_followed_and_what_cannot_be_read_below_is_left_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(outside / "orders")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    assert find(str(inside)).queues == []
    with pytest.raises(BadPath, match="Restore what is missing"):
        find(str(tmp_path / "missing"))


def test_a_listing_that_was_cut_says_so(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path / f"q{number}")
    with Topic(tmp_path / "t") as topic:
        topic.append(b"x")
    assert find(str(tmp_path), 6).complete
    cut = find(str(tmp_path), 3)
    assert (cut.queues, cut.topics, cut.complete) == (["q0", "q1", "q2"], [], False)
    for number in range(5):
        (tmp_path / f"d{number}").mkdir()
    assert not find(str(tmp_path / "."), 3).complete
