"""Files that the original Java program wrote, or that its crashes left, open and deliver what they hold."""

import json
import shutil
from pathlib import Path

import pytest
from damage import tree
from plain import plain_read

from qewqew_core import Corrupt, Queue, inspect

CASES = sorted((Path(__file__).parents[2] / "data" / "qewqew").glob("*/case.json"))


@pytest.fixture(params=CASES, ids=lambda path: path.parent.name)
def case(request, tmp_path):
    body = json.loads(request.param.read_text())
    for file in request.param.parent.glob("queue.dat*"):
        shutil.copy(file, tmp_path)
    return tmp_path / body["queue"], body["chunk_size"], body["expect_error"], [bytes.fromhex(one) for one in body["expected"]]


def test_a_golden_case_delivers_what_a_lossless_reader_must(case):
    path, size, is_damaged, expected = case
    before = tree(path.parent)
    if is_damaged:
        with pytest.raises(Corrupt):
            Queue(path, chunk_size=size)
        assert tree(path.parent) == before
        return
    stats = inspect(path)
    assert (stats.records, stats.bytes) == (len(expected), sum(map(len, expected)))
    assert tree(path.parent) == before  # looking changes nothing
    with Queue(path, chunk_size=size) as q:
        assert len(q) == len(expected)
        assert list(q) == expected
        assert q.verify().ok
        assert [q.get() for _ in expected] == expected
        assert not q
        q.put(b"\x01")
        assert q.get() == b"\x01"


def test_a_golden_case_goes_on_in_order_after_it_was_opened_put_to_and_opened_again(case):
    path, size, _, expected = case
    with Queue(path, chunk_size=size) as q:
        q.put(b"\xbb" * 3)
    with Queue(path, chunk_size=size) as q:
        assert q.get_many(1 << 30) == [*expected, b"\xbb" * 3]


def test_opening_and_closing_leaves_what_the_original_would_read(case):
    """Header, pointers and frames of the closed queue, read by a reader that knows nothing but the format."""
    path, size, _, expected = case
    Queue(path, chunk_size=size).close()
    assert plain_read(path) == expected


@pytest.mark.req("REQ-33", "DEF-3")
def test_records_in_an_orphan_chunk_are_neither_delivered_nor_overwritten(tmp_path):
    for file in (CASES[0].parent.parent / "clear-then-enqueue-same-session").glob("queue.dat*"):
        shutil.copy(file, tmp_path)
    before = (tmp_path / "queue.dat.1").read_bytes()
    orphan = tmp_path / "queue.dat.65534"  # not where the next Java program begins
    with Queue(tmp_path / "queue.dat", chunk_size=64) as q:
        q.put_many([b"new"] * 100)
        assert q.get_many(1000) == [b"new"] * 100
        assert q.verify().orphans == [str(orphan)]
    assert orphan.read_bytes() == before
