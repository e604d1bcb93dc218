"""Reads and streams of a topic as Spark calls them, but without a JVM: what is planned, what is read, what is refused."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from stride import swept

from qewqew_core import BadArgument, BadPath, Closed, CommitConflict, Corrupt, Message, MessagesLost, Topic
from qewqew_spark.options import Options
from qewqew_spark.source import stream, topics
from qewqew_spark.source.rows import TOPIC_SCHEMA

FIRST = 1_763_683_200_000  # 2025-11-21T00:00:00Z
SIZE = 300  # bytes of a message in its block
BLOCK = 350  # messages of a block


def fill(topic: Topic, numbers: range) -> None:
    """One message a second; tags a, b, b, a, b, b …"""
    for first in range(numbers.start, numbers.stop, 50):
        those = range(first, min(first + 50, numbers.stop))
        topic.append_many([Message(b"%096d" % n, "abb"[n % 3], timestamp=FIRST + 1000 * n) for n in those])


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    """Three blocks with 350, 350 and 300 messages."""
    with Topic(tmp_path / "t", block_size=100_000) as topic:
        fill(topic, range(1000))
        yield topic


def trim(topic: Topic) -> int:
    """Remove all blocks but the last, unless a reader holds them."""
    topic.max_records = 1
    try:
        return topic.trim()
    finally:
        topic.max_records = None


def read(topic: Topic, **options: Any) -> list[int]:
    return flat(parts(topic, **options))


def parts(topic: Topic, **options: Any) -> list[list[int]]:
    """The numbers of the messages of each partition."""
    reader = topics.reader(topic.path, Options({name: str(value) for name, value in options.items()}), TOPIC_SCHEMA)
    return numbers_of(reader, reader.partitions())


def flat(found: list[list[int]]) -> list[int]:
    return [number for part in found for number in part]


def numbers_of(reader: Any, partitions: list[Any]) -> list[list[int]]:
    """What tasks read of them, each after a journey."""
    found = []
    for part in partitions:
        batches = list(reader.read(pickle.loads(pickle.dumps(part))))  # noqa: S301 - as Spark does
        found.append([number for batch in batches for number in batch.column("number").to_pylist()])
    return found


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def forget_checksums(topic: Topic) -> None:
    """As a zbus server leaves a topic: messages and index, and nothing of ours."""
    topic.close()
    for path in [*Path(topic.path).glob("data/*.sums"), *Path(topic.path).glob("t.lock"), *Path(topic.path).glob("t.wal")]:
        path.unlink()


# From where to where


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(1000)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, range(1000)),
        ({"startingOffsets": 120, "endingOffsets": 777}, range(120, 777)),
        ({"startingOffsets": 350, "endingOffsets": 700}, range(350, 700)),
        ({"startingOffsets": 1000}, range(0)),
        ({"endingOffsets": 0}, range(0)),
        ({"startingOffsets": 5, "endingOffsets": 5}, range(0)),
        ({"startingTimestamp": FIRST + 400_000, "endingTimestamp": FIRST + 500_500}, range(400, 501)),
        ({"startingTimestamp": "2025-11-21T01:00:10+01:00", "endingTimestamp": "2025-11-21T00:00:20Z"}, range(10, 20)),
        ({"startingTimestamp": FIRST + 999_000}, range(999, 1000)),
        ({"startingTimestamp": FIRST + 2_000_000}, range(0)),
        ({"startingOffsets": 990, "maxRecords": 50}, range(990, 1000)),
        ({"startingOffsets": 340, "maxRecords": 20}, range(340, 360)),
        ({"filter": "a"}, range(0, 1000, 3)),
        ({"filter": "a", "startingOffsets": 340, "maxRecords": 20}, range(342, 402, 3)),
        ({"filter": "a", "endingOffsets": 100, "maxRecords": 50}, range(0, 100, 3)),
        ({"filter": "c"}, range(0)),
    ],
)
def test_what_is_asked_for_is_read(topic: Topic, options: dict[str, Any], expected: range) -> None:
    assert read(topic, **options) == list(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, "cannot start at startingOffsets=latest"),
        ({"endingOffsets": "earliest"}, "end at endingOffsets=earliest"),
        ({"startingOffsets": "first"}, "'startingOffsets' must be earliest, latest or the number of a message, not 'first'"),
        ({"startingOffsets": "-2"}, "'startingOffsets' must be earliest, latest or the number of a message, not '-2'"),
        ({"startingOffsets": 10, "endingOffsets": 9}, "the read ends at 9, before its start at 10"),
        ({"startingOffsets": 10, "endingTimestamp": FIRST}, "the read ends at message 0, before its start at message 10"),
        (
            {"startingOffsets": 1001},
            "there is no message 1001 in the topic .*/t yet: the last one is 999, the next one will be 1000",
        ),
        ({"endingOffsets": 1001}, "there is no message 1001"),
        ({"startingOffsets": 1, "startingTimestamp": 1}, "'startingOffsets' and 'startingTimestamp' contradict each other"),
        (
            {"endingTimestamp": "2025-11-21T00:00:00"},
            "'endingTimestamp' must be milliseconds since the epoch, or a time with a zone",
        ),
        ({"filter": "x" * 128}, "filter has 128 bytes"),
        ({"maxRecords": 0}, "'maxRecords' must be a whole number, 1 or more"),
        ({"startingOffset": 7}, "a read of a topic has no option 'startingoffset'; did you mean 'startingOffsets'"),
        ({"reader": "r"}, "a read of a topic has no option 'reader'"),
    ],
)
def test_what_makes_no_sense_is_refused(topic: Topic, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        read(topic, **options)


def test_there_must_be_a_topic(tmp_path: Path) -> None:
    with pytest.raises(BadPath, match="there is no topic here"):
        topics.reader(str(tmp_path / "none"), Options({}), TOPIC_SCHEMA)


def test_what_is_appended_after_planning_is_not_read(topic: Topic) -> None:
    reader = topics.reader(topic.path, Options({}), TOPIC_SCHEMA)
    planned = reader.partitions()
    fill(topic, range(1000, 1500))
    assert flat(numbers_of(reader, planned)) == list(range(1000))
    assert read(topic) == list(range(1500))


def test_a_reader_of_an_empty_topic_reads_nothing(tmp_path: Path) -> None:
    with Topic(tmp_path / "t") as topic:
        reader = topics.reader(topic.path, Options({}), TOPIC_SCHEMA)
        assert reader.partitions() == []
        assert list(reader.read(None)) == []  # type: ignore[arg-type]  # Spark makes one of its own


# Partitions


def test_blocks_are_cut_where_checksums_end_and_small_ones_share_a_partition(topic: Topic) -> None:
    assert [len(part) for part in parts(topic)] == [1000]
    assert [len(part) for part in parts(topic, maxPartitionBytes=BLOCK * SIZE)] == [350, 350, 300]
    assert [len(part) for part in parts(topic, maxPartitionBytes=20_000)] == [250, 100, 250, 100, 250, 50]
    assert [len(part) for part in parts(topic, minPartitions=2)] == [600, 400]
    assert len(parts(topic, minPartitions=1000)) == 6  # there are no more checksums
    assert parts(topic, maxPartitionBytes=20_000, startingOffsets=240, endingOffsets=260) == [[*range(240, 260)]]


def test_blocks_of_a_zbus_server_are_read_whole_and_unchecked(topic: Topic) -> None:
    forget_checksums(topic)
    damage(Path(topic.path, "data", f"{0:020d}.zbus"), SIZE - 1)
    assert [len(part) for part in parts(topic, maxPartitionBytes=20_000)] == [350, 350, 300]
    assert read(topic, startingOffsets=345, maxRecords=10) == list(range(345, 355))


@pytest.mark.parametrize("dialect", ["B", "C"])
def test_messages_have_their_columns(tmp_path: Path, dialect: Any) -> None:
    with Topic(tmp_path / "orders", dialect=dialect) as topic:
        topic.append(b"body", tag="a.b", id="7", timestamp=FIRST)
        topic.append(b"x" * (3 << 20), timestamp=FIRST)
        topic.append(b"", timestamp=FIRST)
        reader = topics.reader(topic.path, Options({}), TOPIC_SCHEMA)
        rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert rows[0] == {
        "value": b"body",
        "tag": "a.b",
        "id": "7",
        "offset": 0,
        "number": 0,
        "corr_offset": 0,
        "timestamp": datetime(2025, 11, 21, tzinfo=UTC),
        "topic": "orders",
    }
    assert [(len(row["value"]), row["tag"], row["offset"]) for row in rows[1:]] == [
        (3 << 20, None, 208),
        (0, None, 412 + (3 << 20)),
    ]


# Damage and loss


@pytest.mark.parametrize("block", [0, 2])
def test_no_message_is_given_out_before_its_checksum_is_verified(topic: Topic, block: int) -> None:
    base = block * BLOCK * SIZE
    path = Path(topic.path, "data", f"{base:020d}.zbus")
    damage(path, 260 * SIZE - 1)  # the last byte of message 259 of the block, in its second piece
    first = block * BLOCK
    assert read(topic, startingOffsets=first, endingOffsets=first + 250) == list(range(first, first + 250))
    for begin, end in ((first + 250, first + 255), (first + 270, first + 280)):  # parts of the piece
        with pytest.raises(Corrupt, match=f"{path}, offset {250 * SIZE}: the messages up to .* do not match their checksum"):
            read(topic, startingOffsets=begin, endingOffsets=end)


def test_a_message_that_is_larger_than_what_is_read_at_once_is_verified_too(tmp_path: Path) -> None:
    with Topic(tmp_path / "t") as topic:
        topic.append_many([b"x" * 5_000_000, b"y"])
        assert read(topic) == [0, 1]
        damage(tmp_path / "t" / "data" / f"{0:020d}.zbus", 5_000_203)
        reader = topics.reader(topic.path, Options({}), TOPIC_SCHEMA)
        (part,) = reader.partitions()
        with pytest.raises(Corrupt, match="offset 0: the messages up to 5000204 do not"):
            next(reader.read(part))


def test_a_start_that_was_removed_is_an_error_or_else_the_oldest_message(topic: Topic, capfd: pytest.CaptureFixture[str]) -> None:
    assert trim(topic) == 700
    assert read(topic) == list(range(700, 1000))
    with pytest.raises(
        MessagesLost, match="message 300 has been removed from the topic; the oldest one is 700: retention was faster"
    ):
        read(topic, startingOffsets=300)
    assert read(topic, startingOffsets=300, failOnDataLoss="false") == list(range(700, 1000))
    assert "message 300 has been removed from the topic; the oldest one is 700. They are missing" in capfd.readouterr().err


def test_blocks_that_are_removed_after_planning_are_an_error_or_else_left_out(
    topic: Topic, capfd: pytest.CaptureFixture[str]
) -> None:
    strict = topics.reader(topic.path, Options({"startingOffsets": "100"}), TOPIC_SCHEMA)
    lax = topics.reader(topic.path, Options({"failOnDataLoss": "false"}), TOPIC_SCHEMA)
    planned = strict.partitions(), lax.partitions()
    under_way = strict.read(planned[0][0])
    trim(topic)
    block = Path(topic.path, "data", f"{0:020d}.zbus")
    with pytest.raises(MessagesLost, match=f"{block}, offset 30000: the messages of this block up to 105000 have been removed"):
        list(under_way)
    assert numbers_of(lax, planned[1]) == [list(range(700, 1000))]
    assert capfd.readouterr().err.count("missing from the result (failOnDataLoss=false)") == 2


def test_another_topic_in_the_place_of_the_one_that_was_planned_is_noticed(topic: Topic, tmp_path: Path) -> None:
    reader = topics.reader(topic.path, Options({}), TOPIC_SCHEMA)
    planned = reader.partitions()
    replace(topic, tmp_path)
    with pytest.raises(MessagesLost, match="another topic has replaced the one that the query started with"):
        numbers_of(reader, planned)


def replace(topic: Topic, tmp_path: Path) -> None:
    """Put a topic with as many messages in its place."""
    topic.close()
    (tmp_path / "t").rename(tmp_path / "old")
    with Topic(tmp_path / "t", block_size=100_000) as other:
        fill(other, range(1000))


# Streams


def stream_of(topic: Topic, **options: Any) -> stream.TopicStream:
    texts = {name: str(value) for name, value in options.items()}
    return stream.stream_reader(Options({"path": topic.path} | texts), TOPIC_SCHEMA)


class Driver:
    """Calls a stream as Spark does since 4.2, and keeps what the checkpoint has: ends of batches, and how many are committed."""

    def __init__(self, topic: Topic, **options: Any) -> None:
        if stream.limits is None:
            pytest.skip("Spark tells a stream where its batches begin since 4.2")
        self.topic, self.options = topic, options
        self.ends: list[dict[str, Any]] = []
        self.committed = 0
        self.sink: dict[int, list[int]] = {}  # by batch: a sink that overwrites
        self.restart()

    @property
    def got(self) -> list[int]:
        return flat(list(self.sink.values()))

    def restart(self) -> None:
        """As after a SIGKILL: nothing is closed. What was planned and not committed is read again."""
        self.stream = stream_of(self.topic, **self.options)
        if self.committed:
            self.start = self.ends[self.committed - 1]
        else:
            self.start = self.journey(self.stream.initialOffset())
        if len(self.ends) > self.committed:
            self.read()

    @staticmethod
    def journey(offset: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(offset))
        return found

    def plan(self, limit: Any = None) -> bool:
        end = self.journey(self.stream.latestOffset(self.start, limit or self.stream.getDefaultReadLimit()))
        if end == self.start:
            return False
        self.ends.append(end)
        if self.committed:
            self.stream.commit(self.ends[self.committed - 1])
        return True

    def read(self, killed: bool = False) -> None:
        self.sink[len(self.ends) - 1] = flat(numbers_of(self.stream, self.stream.partitions(self.start, self.ends[-1])))
        if killed:
            self.restart()
        else:
            self.start = self.ends[-1]
            self.committed += 1

    def run(self) -> list[int]:
        """All batches that there are; how many messages each had."""
        sizes = []
        while self.plan():
            self.read()
            sizes.append(len(self.sink[len(self.ends) - 1]))
        return sizes


@pytest.mark.parametrize(
    ("options", "first", "sizes"),
    [
        ({"startingOffsets": "earliest"}, 0, [1000]),
        ({"startingOffsets": "latest"}, 1000, []),
        ({}, 1000, []),
        ({"startingOffsets": 900}, 900, [100]),
        ({"startingTimestamp": "2025-11-21T00:15:00Z"}, 900, [100]),
        ({"startingOffsets": 0, "maxOffsetsPerTrigger": 400}, 0, [400, 400, 200]),
        ({"startingOffsets": 0, "maxOffsetsPerTrigger": BLOCK}, 0, [350, 350, 300]),
        ({"startingOffsets": 0, "maxBytesPerTrigger": 401 * SIZE - 1}, 0, [400, 400, 200]),
        ({"startingOffsets": 0, "maxBytesPerTrigger": BLOCK * SIZE, "maxOffsetsPerTrigger": 400}, 0, [350, 350, 300]),
        ({"startingOffsets": 0, "maxBytesPerTrigger": 400 * SIZE, "maxOffsetsPerTrigger": BLOCK}, 0, [350, 350, 300]),
        ({"startingOffsets": 997, "maxBytesPerTrigger": 1}, 997, [1, 1, 1]),
    ],
)
def test_a_stream_takes_batches_up_to_its_limits(topic: Topic, options: dict[str, Any], first: int, sizes: list[int]) -> None:
    driver = Driver(topic, **options)
    assert driver.run() == sizes
    fill(topic, range(1000, 1100))
    driver.run()
    assert driver.got == list(range(first, 1100))
    driver.stream.stop()


def test_limits_count_messages_before_the_filter(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400, filter="a")
    assert driver.run() == [134, 133, 67]
    assert driver.got == list(range(0, 1000, 3))


def test_a_stream_that_is_told_to_read_all_ignores_its_limits(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=10, maxBytesPerTrigger=1)
    assert driver.stream.getDefaultReadLimit() == stream.limits.ReadMaxRows(10)
    assert driver.plan(stream.limits.ReadAllAvailable())
    driver.read()
    assert len(driver.got) == 1000
    assert Driver(topic, maxBytesPerTrigger=7).stream.getDefaultReadLimit() == stream.limits.ReadMaxBytes(7)
    assert Driver(topic).stream.getDefaultReadLimit() == stream.limits.ReadAllAvailable()


def test_a_batch_waits_until_there_are_enough_messages_or_long_enough(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e6
    monkeypatch.setattr(stream.time, "monotonic", lambda: now)
    driver = Driver(topic, startingOffsets=990, minOffsetsPerTrigger=50, maxTriggerDelay="10s")
    assert driver.stream.getDefaultReadLimit() == stream.limits.ReadMinRows(50)
    assert driver.run() == [10]  # the first one waits for nothing, as that of Kafka's source
    fill(topic, range(1000, 1049))
    assert driver.run() == []
    assert driver.stream.reportLatestOffset()["recordsBehindLatest"] == 49
    now += 9.9
    assert driver.run() == []
    now += 0.2
    assert driver.run() == [49]
    fill(topic, range(1049, 1099))
    assert driver.run() == [50]
    fill(topic, range(1099, 1100))
    assert driver.plan(stream.limits.ReadAllAvailable())  # trigger(once=True)
    driver.read()
    fill(topic, range(1100, 1101))
    driver.stream.prepareForTriggerAvailableNow()
    assert driver.run() == [1]
    assert driver.got == list(range(990, 1101))


def test_a_batch_that_has_waited_is_no_larger_than_its_limits(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets=0, minOffsetsPerTrigger=300, maxOffsetsPerTrigger=400)
    assert driver.run() == [400, 400]
    fill(topic, range(1000, 1100))
    assert driver.run() == [300]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minOffsetsPerTrigger": 0}, "'minOffsetsPerTrigger' must be a whole number, 1 or more"),
        ({"maxTriggerDelay": "1m"}, "'maxTriggerDelay' goes with 'minOffsetsPerTrigger'"),
        ({"minOffsetsPerTrigger": 5, "maxTriggerDelay": "soon"}, "must be a time, like 500ms, 30s, 15m or 1h, not 'soon'"),
        ({"minOffsetsPerTrigger": 5, "maxOffsetsPerTrigger": 4}, "minOffsetsPerTrigger=5 is more than maxOffsetsPerTrigger=4"),
        ({"maxRecordsPerTrigger": 5}, "has no option 'maxrecordspertrigger'; did you mean 'maxOffsetsPerTrigger'"),
    ],
)
def test_limits_that_cannot_be_are_refused(topic: Topic, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        stream_of(topic, **options)


@pytest.mark.parametrize(("text", "seconds"), [("1500", 1.5), ("1500ms", 1.5), ("2 s", None), ("2S", 2), ("15m", 900)])
def test_times_are_written_as_in_spark(topic: Topic, text: str, seconds: float | None) -> None:
    options = {"minOffsetsPerTrigger": 1, "maxTriggerDelay": text}
    if seconds is None:
        with pytest.raises(BadArgument, match="must be a time"):
            stream_of(topic, **options)
    else:
        assert stream_of(topic, **options).delay == seconds


def test_the_lag_is_what_is_behind_the_last_planned_batch(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets=100, maxOffsetsPerTrigger=400)
    assert driver.plan()
    assert {"recordsBehindLatest": 500, "bytesBehindLatest": 500 * SIZE}.items() <= driver.stream.reportLatestOffset().items()
    driver.read()
    driver.run()
    assert {"recordsBehindLatest": 0, "bytesBehindLatest": 0}.items() <= driver.stream.reportLatestOffset().items()


def test_available_now_ends_where_the_topic_ended(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400)
    driver.stream.prepareForTriggerAvailableNow()
    fill(topic, range(1000, 1500))
    assert driver.run() == [400, 400, 200]
    assert driver.stream.reportLatestOffset()["number"] == 1500
    late = Driver(topic)
    late.stream.prepareForTriggerAvailableNow()
    fill(topic, range(1500, 1600))
    late.start = late.stream.initialOffset()  # asked for after that: it is beyond the end
    assert late.run() == []


def test_a_batch_that_ended_with_its_block_is_followed_by_one_in_the_next(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest")
    driver.run()
    topic.block_size = 1
    topic.append(b"the first of a block")
    assert driver.run() == [1]
    assert driver.run() == []


@pytest.mark.parametrize("seed", swept(range(10), quick=5))
def test_each_message_comes_once_whatever_happens(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    limits = {"maxOffsetsPerTrigger": chance.randint(10, 100), "maxBytesPerTrigger": chance.randint(3000, 30_000)}
    options = {name: value for name, value in limits.items() if chance.random() < 0.6}
    with Topic(tmp_path / "t", block_size=chance.choice([1, 1000, 20_000, 1 << 20])) as topic:
        driver = Driver(topic, startingOffsets="earliest", maxPartitionBytes=chance.choice([1000, 1 << 20]), **options)
        fill(topic, range(count := 1))
        assert driver.plan()
        driver.read(killed=True)  # from now on the stream has its reader
        for _ in range(40):
            match chance.choice(["append", "append", "batch", "batch", "killed", "restart", "trim"]):
                case "append":
                    fill(topic, range(count, count := count + chance.randint(1, 70)))
                case "trim":
                    trim(topic)
                case "restart":
                    driver.restart()
                case kind:
                    if driver.plan():
                        driver.read(killed=kind == "killed")
        driver.run()
        assert driver.got == list(range(count))
        assert len(topic.readers()) == 1


# The reader of a stream


def lag(topic: Topic, name: str) -> int:
    return topic.stats().readers[name]


def test_the_reader_of_a_stream_stands_where_the_first_batch_that_is_not_committed_begins(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets=100, maxOffsetsPerTrigger=300, reader="lake")
    assert topic.readers() == []  # who reads nothing holds nothing
    lags = []
    while driver.plan():
        lags.append(lag(topic, "lake"))
        driver.read()
    assert lags == [900, 600, 300]  # of the first batch Spark says that it is committed when the second is planned
    driver.restart()
    assert not driver.plan()
    assert lag(topic, "lake") == 0


def test_blocks_stay_until_the_stream_has_committed_them(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400)
    assert driver.plan()
    assert trim(topic) == 0
    driver.read()
    assert trim(topic) == 0  # it may be read once more
    driver.restart()
    assert driver.plan()
    assert trim(topic) == 350  # batch 0 is committed, and ends in the second block
    driver.restart()  # batch 1 is planned, and replayed
    assert driver.run() == [200]
    assert driver.got == list(range(1000))


def test_each_checkpoint_has_a_reader_of_its_own(topic: Topic) -> None:
    one, two = Driver(topic, startingOffsets=0), Driver(topic, startingOffsets=0)
    assert one.run() == two.run() == [1000]
    names = topic.readers()
    assert len(names) == 2
    assert {name[:6] for name in names} == {"spark-"}
    assert {one.ends[0]["reader"], two.ends[0]["reader"]} == set(names)
    one.restart()
    fill(topic, range(1000, 1001))
    assert one.run() == [1]
    assert topic.readers() == names


@pytest.mark.parametrize("kills", [1, 2])
def test_the_first_batch_is_repeated_as_it_was_planned_although_the_beginning_was_not_kept(topic: Topic, kills: int) -> None:
    # Spark keeps where batches end. Where the first one began, it asks again: by then "latest" is another place.
    driver = Driver(topic, startingOffsets="latest")
    fill(topic, range(1000, 1100))
    assert driver.plan()
    planned = driver.ends[0]["reader"]
    for _ in range(kills):
        fill(topic, range(len(topic), len(topic) + 100))
        driver.committed = 0
        driver.restart()
        assert driver.got == list(range(1000, 1100))
    driver.run()
    assert driver.got == list(range(1000, 1100 + 100 * kills))
    assert topic.readers() == [planned]


def test_a_stream_that_never_had_a_batch_leaves_no_reader_behind(topic: Topic, tmp_path: Path) -> None:
    driver = Driver(topic)
    assert not driver.plan()
    assert len(topic.readers()) == 1  # from now on, what comes is held
    driver.stream.stop()
    assert topic.readers() == []
    named = Driver(topic, reader="mine")
    assert not named.plan()
    named.stream.stop()
    assert topic.readers() == ["mine"]


def test_a_stream_notices_that_its_reader_is_used_by_others(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=100, reader="r")
    driver.plan()
    driver.read()
    other = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=300, reader="r")
    other.plan()
    other.read()
    driver.plan()
    driver.read()
    with pytest.raises(CommitConflict, match="moved by somebody else: it stands at message 100, not at 0"):
        other.plan()
    with topic.reader("r") as reader:
        reader.read()
        with pytest.raises(CommitConflict, match="1 of its messages are in flight"):
            Driver(topic, reader="r").plan()


def test_a_reader_that_was_deleted_is_made_again_by_a_restart(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=100)
    driver.plan()
    driver.read()
    topic.delete_reader(topic.readers()[0])
    with pytest.raises(Closed, match="the reader was deleted"):
        driver.plan()
    driver.restart()
    driver.run()
    assert driver.got[-1] == 999
    assert topic.readers() == [driver.ends[0]["reader"]]


def test_a_stream_may_do_without_a_reader(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400, reader="")
    driver.plan()
    driver.read()
    assert topic.readers() == []
    assert trim(topic) == 700
    with pytest.raises(MessagesLost, match="messages 400 to 699 have been removed from the topic: retention was faster"):
        driver.run()
    driver.options["failOnDataLoss"] = "false"
    driver.restart()
    assert driver.run() == [300]
    assert driver.got == [*range(400), *range(700, 1000)]


def test_what_was_read_and_removed_is_no_loss(topic: Topic) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=350, reader="")
    driver.plan()
    driver.read()
    driver.plan()
    driver.read()
    assert trim(topic) == 700  # the place is the end of a block that is gone
    assert driver.run() == [300]


def test_a_topic_that_cannot_be_written_needs_the_option(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.close()
    log = Path(topic.path, "t.lock")
    log.unlink()
    log.mkdir()  # to root no file is read-only
    with pytest.raises(BadPath, match=r"the stream cannot make or use its reader 'spark-.*': .*option reader=''"):
        Driver(topic).plan()
    assert Driver(topic, reader="", startingOffsets="earliest").run() == [1000]


# Another topic


def test_a_stream_notices_that_its_topic_was_replaced(topic: Topic, tmp_path: Path) -> None:
    driver = Driver(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400, reader="")
    driver.plan()
    driver.read()
    replace(topic, tmp_path)
    with pytest.raises(MessagesLost, match="another topic has replaced the one that the query started with"):
        driver.plan()
    driver.restart()
    with pytest.raises(MessagesLost, match=r"the checkpoint belongs to a topic that was made at .*startingOffsets=400"):
        driver.plan()


def test_a_stream_notices_that_an_older_copy_of_its_topic_was_put_back(topic: Topic, tmp_path: Path) -> None:
    driver = Driver(topic, startingOffsets="earliest", reader="")
    topic.close()
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    with Topic(topic.path) as again:
        fill(again, range(1000, 1100))
    assert driver.run() == [1100]
    shutil.rmtree(tmp_path / "t")
    (tmp_path / "copy").rename(tmp_path / "t")
    driver.restart()
    with pytest.raises(MessagesLost, match="the checkpoint is at message 1100, but the topic ends before it"):
        driver.plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reader": "a/b"}, "'a/b' cannot be a reader's name"),
        ({"maxOffsetsPerTrigger": 0}, "'maxOffsetsPerTrigger' must be a whole number, 1 or more"),
        (
            {"maxRecords": 7},
            "has no option 'maxrecords'; 'maxRecords' is an option of a read of a queue or a topic; here you can use",
        ),
        ({"endingOffsets": 7}, "has no option 'endingoffsets'; 'endingOffsets' is an option of a read of a topic"),
        ({"startingOffsets": 1001}, "there is no message 1001"),
    ],
)
def test_what_makes_no_sense_in_a_stream_is_refused(topic: Topic, options: dict[str, Any], message: str) -> None:
    with pytest.raises((BadArgument, BadPath), match=message):
        stream_of(topic, **{"reader": "r"} | options).initialOffset()


def test_before_pyspark_4_2_a_stream_has_no_limits_and_needs_the_name_of_a_reader(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "limits", None)
    for options in ({}, {"reader": "r", "maxOffsetsPerTrigger": 1}, {"reader": "r", "maxBytesPerTrigger": 1}):
        with pytest.raises(BadArgument, match=r"before pyspark 4.2"):
            stream_of(topic, **options)
    one = stream_of(topic, reader="r", startingOffsets=900)
    start = one.initialOffset()
    end = one.latestOffset()
    assert one.latestOffset() == end
    assert flat(numbers_of(one, one.partitions(start, end))) == list(range(900, 1000))
    fill(topic, range(1000, 1100))
    again = stream_of(topic, reader="r")
    later = again.latestOffset()  # Spark has said nothing of the start by now
    assert flat(numbers_of(again, again.partitions(end, later))) == list(range(1000, 1100))
    again.commit(later)
    assert lag(topic, "r") == 0
    assert again.latestOffset() == later


def test_the_oldest_blocks_may_go_while_a_place_is_looked_for(topic: Topic) -> None:
    with topic._look() as view:
        calls: list[int] = []

        def act() -> int:
            calls.append(view.index().start)
            if len(calls) == 1:
                trim(topic)
                raise Corrupt("a block cannot be read")
            if len(calls) == 3:
                raise Corrupt("really")
            return len(calls)

        assert topics.steady(view, act) == 2
        with pytest.raises(Corrupt, match="really"):
            topics.steady(view, act)
