"""What is said of an option that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from qewqew_core.errors import BadArgument
from qewqew_spark.options import Options
from qewqew_spark.source import batches, queues, stream, topics

READS = {
    "a batch": batches.OPTIONS,
    "a queue": queues.OPTIONS,
    "a read of a topic": topics.OPTIONS,
    "a stream of a topic": stream.OPTIONS,
}


def refusal(what: str, option: str) -> str:
    with pytest.raises(BadArgument) as caught:
        Options({option: "x"}).check(what, READS[what])
    return str(caught.value)


def typos(name: str) -> Iterator[str]:
    """A letter too few, too many, or in front of another; a plural; words with something between them."""
    for at in range(len(name)):
        yield name[:at] + name[at + 1 :]
        yield name[: at + 1] + name[at:]
        yield name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    yield name.removesuffix("s") if name.endswith("s") else name + "s"
    yield from (mark.join(re.findall("^[a-z]+|[A-Z][a-z]+", name)).lower() for mark in "_-.")


@pytest.mark.parametrize("what", READS)
def test_the_option_that_is_meant_is_named(what: str) -> None:
    known = {name.lower() for name in READS[what]}
    for name in READS[what] - {"path", "paths"}:
        for typo in typos(name):
            if typo.lower() not in known:
                assert refusal(what, typo).endswith(f"did you mean {name!r}?")


@pytest.mark.parametrize(
    ("what", "option", "meant"),
    [
        ("a stream of a topic", "maxRecordsPerTrigger", "maxOffsetsPerTrigger"),
        ("a stream of a topic", "minRowsPerTrigger", "minOffsetsPerTrigger"),
        ("a stream of a topic", "startingOffsetsByTimestamp", "startingTimestamp"),
        ("a read of a topic", "maxMessages", "maxRecords"),
        ("a batch", "numPartitions", "minPartitions"),
        ("a batch", "maxBytesPerPartition", "maxPartitionBytes"),
    ],
)
def test_other_names_of_the_same_thing_are_understood(what: str, option: str, meant: str) -> None:
    assert refusal(what, option) == f"{what} has no option {option.lower()!r}; did you mean {meant!r}?"


def test_an_option_of_another_read_is_no_typo() -> None:
    hint = "; 'endingOffsets' is an option of a read of a topic; here you can use "
    assert hint in refusal("a stream of a topic", "endingOffsets")
    assert "; 'maxRecords' is an option of a read of a queue or a topic; here you can use " in refusal("a batch", "maxRecords")
    every = {name: {what for what, known in READS.items() if name in known} for known in READS.values() for name in known}
    for name, there in every.items():
        for what in set(READS) - there:
            if name not in ("paths", "failOnDataLoss"):
                assert f"{name!r} is an option of " in refusal(what, name)


def test_what_resembles_nothing_gets_a_list() -> None:
    assert "a batch has no option 'dateformat'; you can use avroSchema, codec, " in refusal("a batch", "dateFormat")
