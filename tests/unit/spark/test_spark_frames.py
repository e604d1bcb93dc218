"""Framing without Spark."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qewqew_core.errors import Corrupt
from qewqew_core.formats.chunk import MAX_RECORD, frame
from qewqew_spark.source import frames
from qewqew_spark.source.frames import BATCH_BYTES, BATCH_RECORDS, frame_positions, payloads, positions_between


def read(run: bytes, records: int) -> list[list[bytes]]:
    return [values.to_pylist() for values, _ in payloads(run, records, path="q.1", offset=100)]


@given(st.lists(st.binary(max_size=300)))
@example([b""] * 5)
@example([b"x" * MAX_RECORD, b"", b"y" * MAX_RECORD])
def test_what_was_framed_comes_back(records):
    assert list(chain.from_iterable(read(frame(records), len(records)))) == records


@given(st.lists(st.binary(max_size=40), min_size=1), st.data())
def test_a_run_cut_anywhere_is_refused_with_a_place_in_the_file(records, data):
    run = frame(records)
    cut = data.draw(st.integers(0, len(run) - 1))
    with pytest.raises(Corrupt, match=r"q\.1, offset \d+: ") as caught:
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
    with pytest.raises(Corrupt, match=r"q\.1, offset 105: the record that begins here"):
        read(b"\x00\x03abc" + b"\x00\x03ab", 2)
    with pytest.raises(Corrupt, match=r"q\.1, offset 105: "):
        read(b"\x00\x03abc" + b"\x00", 1)


def test_another_number_of_records_than_announced_is_refused():
    with pytest.raises(Corrupt, match=r"offset 100: the 6 bytes from here hold 2 records, not 3"):
        read(frame([b"a", b"b"]), 3)


def test_arrays_are_bounded_in_records_and_in_bytes():
    many = [b""] * (2 * BATCH_RECORDS + 1)
    assert list(map(len, read(frame(many), len(many)))) == [BATCH_RECORDS, BATCH_RECORDS, 1]
    large = [b"x" * MAX_RECORD] * (BATCH_BYTES // MAX_RECORD * 5 // 2)
    arrays = read(frame(large), len(large))
    assert list(chain.from_iterable(arrays)) == large
    assert all(len(frame(array)) <= BATCH_BYTES for array in arrays)
    assert len(arrays) == 3


def test_a_record_larger_than_the_bound_is_an_array_of_its_own(monkeypatch):
    monkeypatch.setattr(frames, "BATCH_BYTES", 10)
    records = [b"a", b"b" * 50, b"c", b"d", b"e" * 20]
    assert read(frame(records), 5) == [[b"a"], [b"b" * 50], [b"c", b"d"], [b"e" * 20]]


def boundaries_of(records: list[bytes], at: list[int]) -> list[tuple[int, int]]:
    ends = [0, *accumulate(2 + len(record) for record in records)]
    return [(ends[number], number) for number in sorted(set(at)) if 0 < number < len(records)]


@pytest.fixture
def always(monkeypatch) -> None:
    """Pieces are walked at once, however few they are."""
    monkeypatch.setattr(frames, "WORTH_IT", 0)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_between_boundaries_are_walked_at_once_to_the_same_end(always, records, at):
    run = frame(records)
    assert positions_between(run, len(records), boundaries_of(records, at)).tolist() == frame_positions(run).tolist()


@given(
    st.binary(min_size=1, max_size=200),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 60)), max_size=5),
)
@example(b"\xff\xff", 1, [])
@example(b"\x00", 1, [])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_and_boundaries_say_nothing_is_found_but_what_the_plain_walk_finds(always, run, records, at):
    found = positions_between(run, records, sorted((min(offset, len(run) - 1), before) for offset, before in at))
    assert found is None or found.tolist() == frame_positions(run).tolist()


def test_wrong_boundaries_do_not_matter_to_what_is_read(always):
    records = [b"abc"] * 10
    found = payloads(frame(records), 10, path="q.1", offset=0, boundaries=[(6, 1)])
    assert [values.to_pylist() for values, _ in found] == [records]


def test_each_record_has_its_place_in_the_run():
    records = [b"x" * (n % 50) for n in range(2 * BATCH_RECORDS)]
    run = frame(records)
    places = list(chain.from_iterable(places.tolist() for _, places in payloads(run, len(records), path="q.1", offset=7)))
    assert places == frame_positions(run).tolist()[:-1]
