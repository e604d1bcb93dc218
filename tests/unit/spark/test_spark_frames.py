"""Framing without Spark."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qewqew_core.chunk import MAX_RECORD, frame
from qewqew_core.errors import CorruptQueue
from qewqew_spark import frames
from qewqew_spark.frames import BATCH_BYTES, BATCH_RECORDS, frame_positions, payloads


def read(run: bytes, records: int) -> list[list[bytes]]:
    return [array.to_pylist() for array in payloads(run, records, path="q.1", offset=100)]


@given(st.lists(st.binary(max_size=300)))
@example([b""] * 5)
@example([b"x" * MAX_RECORD, b"", b"y" * MAX_RECORD])
def test_what_was_framed_comes_back(records):
    assert list(chain.from_iterable(read(frame(records), len(records)))) == records


@given(st.lists(st.binary(max_size=40), min_size=1), st.data())
def test_a_run_cut_anywhere_is_refused_with_a_place_in_the_file(records, data):
    run = frame(records)
    cut = data.draw(st.integers(0, len(run) - 1))
    with pytest.raises(CorruptQueue, match=r"q\.1, offset \d+: ") as caught:
        read(run[:cut], len(records))
    assert caught.value.path == "q.1"
    assert 100 <= caught.value.offset <= 100 + cut


@given(st.binary(max_size=400))
def test_positions_never_lie_outside_of_the_run(run):
    positions = frame_positions(run)
    assert positions[0] == 0
    assert positions[-1] <= len(run)
    assert all(end - start >= 2 for start, end in pairwise(positions))


def test_the_offset_is_that_of_the_frame_that_does_not_end():
    with pytest.raises(CorruptQueue, match=r"q\.1, offset 105: the record that begins here"):
        read(b"\x00\x03abc" + b"\x00\x03ab", 2)
    with pytest.raises(CorruptQueue, match=r"q\.1, offset 105: "):
        read(b"\x00\x03abc" + b"\x00", 1)


def test_another_number_of_records_than_announced_is_refused():
    with pytest.raises(CorruptQueue, match=r"offset 100: the 6 bytes from here hold 2 records, the manifest says 3"):
        read(frame([b"a", b"b"]), 3)


def test_arrays_are_bounded_in_records_and_in_bytes():
    many = [b""] * (2 * BATCH_RECORDS + 1)
    assert list(map(len, read(frame(many), len(many)))) == [BATCH_RECORDS, BATCH_RECORDS, 1]
    large = [b"x" * MAX_RECORD] * 40
    arrays = read(frame(large), len(large))
    assert list(chain.from_iterable(arrays)) == large
    assert all(len(frame(array)) <= BATCH_BYTES for array in arrays)
    assert len(arrays) == 3


def test_a_record_larger_than_the_bound_is_an_array_of_its_own(monkeypatch):
    monkeypatch.setattr(frames, "BATCH_BYTES", 10)
    records = [b"a", b"b" * 50, b"c", b"d", b"e" * 20]
    assert read(frame(records), 5) == [[b"a"], [b"b" * 50], [b"c", b"d"], [b"e" * 20]]
