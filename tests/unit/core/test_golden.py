"""Files that the original Java program wrote, or that its crashes left, open and deliver what they hold."""

import json
import shutil
from pathlib import Path

import pytest

from qewqew_core import CorruptQueue, Queue, inspect
from qewqew_core.chunk import POINTERS

CASES = sorted((Path(__file__).parents[2] / "data" / "qewqew").glob("*/case.json"))


@pytest.fixture(params=CASES, ids=lambda path: path.parent.name)
def case(request, tmp_path):
    body = json.loads(request.param.read_text())
    for file in request.param.parent.glob("queue.dat*"):
        shutil.copy(file, tmp_path)
    return body, tmp_path / body["queue"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_golden_case_delivers_what_a_lossless_reader_must(case):
    body, path = case
    expected = [bytes.fromhex(record) for record in body["expected"]]
    before = content(path.parent)
    if body["expect_error"]:
        with pytest.raises(CorruptQueue):
            Queue(path, chunk_size=body["chunk_size"])
        assert content(path.parent) == before
        return
    stats = inspect(path)
    assert (stats.records, stats.bytes) == (len(expected), sum(map(len, expected)))
    assert content(path.parent) == before  # looking changes nothing
    with Queue(path, chunk_size=body["chunk_size"]) as q:
        assert len(q) == len(expected)
        assert list(q) == expected
        assert q.verify().ok
        assert [q.get() for _ in expected] == expected
        assert not q
        q.put(b"\x01")
        assert q.get() == b"\x01"


def test_a_golden_case_goes_on_in_order_after_it_was_opened_put_to_and_opened_again(case):
    body, path = case
    expected = [bytes.fromhex(record) for record in body["expected"]]
    with Queue(path, chunk_size=body["chunk_size"]) as q:
        q.put(b"\xbb" * 3)
    with Queue(path, chunk_size=body["chunk_size"]) as q:
        assert q.get_many(1 << 30) == [*expected, b"\xbb" * 3]


def test_opening_and_closing_leaves_what_the_original_would_read(case):
    """Header, pointers and frames of the closed queue, read by a reader that knows nothing but the format."""
    body, path = case
    Queue(path, chunk_size=body["chunk_size"]).close()
    assert plain_read(path) == [bytes.fromhex(record) for record in body["expected"]]


def test_records_in_an_orphan_chunk_are_neither_delivered_nor_overwritten(tmp_path):
    for file in (CASES[0].parent.parent / "clear-then-enqueue-same-session").glob("queue.dat*"):
        shutil.copy(file, tmp_path)
    orphan = tmp_path / "queue.dat.1"
    before = orphan.read_bytes()
    with Queue(tmp_path / "queue.dat", chunk_size=64) as q:
        q.put_many([b"new"] * 100)
        assert q.get_many(1000) == [b"new"] * 100
        assert q.verify().orphans == [str(orphan)]
    assert orphan.read_bytes() == before


def plain_read(path: Path) -> list[bytes]:
    records = []
    current = int.from_bytes(path.read_bytes()) if path.exists() else 0
    while current:
        data = path.with_name(f"{path.name}.{current}").read_bytes()
        at, tail, current = POINTERS.unpack_from(data)
        assert 10 <= at < tail <= len(data), "the original mistakes an empty chunk in the chain for a record"
        while at < tail:
            length = int.from_bytes(data[at : at + 2])
            records.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        assert at == tail
    return records
