"""What a reader has delivered and is not committed: in memory, in runs until one is asked for; and in its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qewqew_core import Corrupt, Message, Topic
from qewqew_core.disk import journal
from qewqew_core.topic import reader_log
from qewqew_core.topic.in_flight import Flight, Flights, evenly
from qewqew_core.topic.reader_state import Commit, Range, ReaderState
from qewqew_core.topic.view import Position

SIZES = st.lists(st.sampled_from([204, 204, 204, 205, 300]), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(st.sampled_from(["hand out", "commit", "commit last", "give back", "again", "look"]), SIZES), max_size=30
)


@given(STEPS)
def test_flights_are_those_of_a_plain_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    flights, plain, at, number, last = Flights(), dict[int, Flight](), 0, 0, list[int]()
    for what, sizes in steps:
        some = sorted(plain)[:: sizes[0] % 3 + 1]
        if what == "hand out":
            places = [at + sum(sizes[:count]) for count in range(len(sizes))]
            flights.deliver(1, 5, [(1000, 2, 1, number, evenly(places))])
            last = [1000 + place for place in places]
            for count, place in enumerate(places):
                plain[1000 + place] = Flight(Position(2, place, number + count), 1, 5, 1)
            at, number = at + sum(sizes), number + len(sizes)
        elif what in ("commit", "commit last"):
            gone = some if what == "commit" else [offset for offset in last if offset in plain]
            flights.remove(evenly(gone))
            for offset in gone:
                del plain[offset]
        elif what == "again" and some:
            again = [(1000, 2, plain[one].attempt + 1, plain[one].at.number, [one - 1000]) for one in some]
            flights.deliver(2, 9, again)
            for one in some:
                plain[one] = Flight(plain[one].at, 2, 9, plain[one].attempt + 1)
        elif what == "give back" and some:
            flights[some[0]] = plain[some[0]] = plain[some[0]]._replace(owner=0)
        elif what == "look":
            assert dict(flights) == plain
        assert len(flights) == len(plain)
        assert flights.first() == min((one.at for one in plain.values()), default=None)
    assert dict(flights) == plain


@given(st.lists(st.integers(0, 1 << 40), max_size=8))
def test_numbers_are_the_same_as_a_range_in_the_log(numbers: list[int]) -> None:
    state = ReaderState(pending=[Range(Position(0, 0, 0), None)])
    state.in_flight.deliver(1, None, [(0, 0, 1, 0, sorted({*numbers, 0}))])
    body = reader_log.pack(Commit(evenly(sorted({*numbers})), None))
    reader_log.replay_frame(journal.Frame(0, reader_log.COMMIT, body, len(body)), state, "r.wal", 0)
    assert [*state.in_flight] == ([] if 0 in numbers else [0])


@pytest.mark.parametrize("text", ["[0,1152921504606846976,1]", "[0,9,0]", "7"])
def test_a_range_that_nothing_of_ours_has_written_is_refused_in_little_memory(text: str) -> None:
    state = ReaderState(pending=[Range(Position(0, 0, 0), None)])
    body = b'["commit",{"range":%s},null]' % text.encode()
    with pytest.raises(Corrupt, match="contradicts"):
        reader_log.replay_frame(journal.Frame(0, reader_log.COMMIT, body, len(body)), state, "r.wal", 0)


def test_a_thousand_messages_of_one_size_take_little_room_in_the_log(tmp_path: Path) -> None:
    with Topic(tmp_path / "t") as topic, topic.reader("r") as reader:
        topic.append_many([b"%04d" % number for number in range(1000)])
        log = tmp_path / "t" / "state" / "r.wal"
        before = log.stat().st_size
        assert [int(one.body) for one in reader.read_many(1000)] == list(range(1000))
        assert reader.commit() == 1000
        assert log.stat().st_size - before < 500


def test_of_messages_that_came_together_any_may_be_committed_and_the_others_come_again(tmp_path: Path) -> None:
    bodies = [b"x" * (number % 7) for number in range(100)]
    with Topic(tmp_path / "t") as topic:
        topic.append_many(Message(body, "odd" if number % 2 else "even") for number, body in enumerate(bodies))
        for name, filter, numbers in (("all", None, range(100)), ("half", "odd", range(1, 100, 2))):
            with topic.reader(name, filter) as reader:
                read = reader.read_many(100)
                assert [(one.number, one.body) for one in read] == [(number, bodies[number]) for number in numbers]
                assert reader.commit(*read[3:40], read[0]) == 38
                assert reader.position().number == read[1].number
            with topic.reader(name) as reader:  # what was not committed was given back
                again = reader.read_many(100)
                assert [one.number for one in again] == [numbers[at] for at in (1, 2, *range(40, len(numbers)))]
                assert {one.attempt for one in again} == {2}
