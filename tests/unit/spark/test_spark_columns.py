"""Messages of a topic as Arrow columns, without Spark."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qewqew_core.batch.segments import RawMessages
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Message
from qewqew_spark.source.frames import messages
from qewqew_spark.source.rows import TOPIC_SCHEMA

BASE = 7_000_000_000
LONG = st.integers(-(1 << 63), (1 << 63) - 1)


def run_of(listed: list[tuple[Message, bool]], dialect: str) -> RawMessages:
    """The messages, and whether they belong to the batch."""
    data, bounds = b"", array("i")
    for one, matches in listed:
        at, id, tag = len(data), (one.id or "").encode(), (one.tag or "").encode()
        data += zbus.pack_head(dialect, BASE + at, one.timestamp, id, one.corr_offset, one.number, tag, len(one.body)) + one.body
        if matches:
            bounds.extend((at, len(data)))
    return RawMessages(BASE, data, bounds)


def columns(run: RawMessages, dialect: str) -> list[pa.Array]:
    return messages(run, dialect, "orders", TOPIC_SCHEMA.names).columns


def moment(milliseconds: int) -> int | None:
    """In microseconds, as Spark has it."""
    return milliseconds * 1000 if -(1 << 63) <= milliseconds * 1000 < 1 << 63 else None


MESSAGE = st.builds(
    Message,
    body=st.binary(max_size=50),
    tag=st.none() | st.text("a.ü😀", min_size=1, max_size=30),
    id=st.none() | st.text("iü", min_size=1, max_size=19),
    corr_offset=LONG,
    timestamp=LONG,
    number=LONG,
)
EARLIEST = Message(b"", timestamp=-(1 << 63), number=1)


@given(st.lists(st.tuples(MESSAGE, st.booleans()), min_size=1, max_size=12), st.sampled_from("BC"))
@example([(EARLIEST, True), (EARLIEST._replace(timestamp=9223372036854775, tag="t" * 127, id="i" * 39), True)], "B")
def test_columns_have_what_the_messages_have(listed, dialect):
    run = run_of(listed, dialect)
    if not run.bounds:
        return
    found = columns(run, dialect)
    assert [str(one.type) for one in found] == ["binary", "string", "string", *["int64"] * 3, "timestamp[us, tz=UTC]", "string"]
    for one in found:
        one.validate(full=True)
    expected = [zbus.unpack_message(run.data, at, BASE, dialect) for at in run.bounds[::2]]
    assert found[0].to_pylist() == [one.body for one in expected]
    assert found[1].to_pylist() == [one.tag for one in expected]
    assert found[2].to_pylist() == [one.id for one in expected]
    assert found[3].to_pylist() == [one.offset for one in expected]
    assert found[4].to_pylist() == [one.number for one in expected]
    assert found[5].to_pylist() == [one.corr_offset for one in expected]
    assert found[6].cast(pa.int64()).to_pylist() == [moment(one.timestamp) for one in expected]
    assert set(found[7].to_pylist()) == {"orders"}


def test_only_the_columns_that_are_needed_are_built():
    run = run_of([(Message(b"x", timestamp=0, number=7), True)] * 2, "B")
    assert messages(run, "B", "orders", {"number", "topic"}).to_pydict() == {"number": [7, 7], "topic": ["orders"] * 2}


def test_a_time_is_utc():
    run = run_of([(Message(b"x", timestamp=1_763_683_200_123, number=0), True)], "C")
    assert columns(run, "C")[6].to_pylist() == [datetime(2025, 11, 21, tzinfo=UTC) + timedelta(milliseconds=123)]


@pytest.mark.parametrize("dialect", ["B", "C"])
def test_text_that_is_cut_short_has_replacement_characters(dialect):
    """As the original wrote it: it counted characters, and stored bytes."""
    run = run_of([(Message(b"x", "aü", "iü", timestamp=0, number=0), True)] * 2, dialect)
    data = bytearray(run.data)
    data[zbus.TAG_AT] = data[16] = 2
    tag, id = columns(run._replace(data=bytes(data)), dialect)[1:3]
    assert tag.to_pylist() == ["a�", "aü"]
    assert id.to_pylist() == ["i�", "iü"]


def test_a_single_body_is_not_copied():
    run = run_of([(Message(b"x" * 1000, timestamp=0, number=0), True)], "B")
    address = pa.py_buffer(run.data).address
    assert columns(run, "B")[0].buffers()[2].address == address
