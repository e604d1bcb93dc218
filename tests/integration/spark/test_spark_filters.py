"""A query has the rows that its own filters let through, whatever other queries of the same DataFrame asked for.

Spark keeps what it has planned for one query of a DataFrame, and reads that for the next one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import DataFrame
from spark_batches import make_batch, make_topic_batch
from spark_version import KEEPS_PLANS

from qewqew_core import Message, Queue, Topic
from qewqew_core.formats import zbus

RECORDS = [b'{"n": %4d}' % n for n in range(40)]
MESSAGES = [Message(record, "a", timestamp=n, number=n) for n, record in enumerate(RECORDS)]
STEP = zbus.HEAD + len(RECORDS[0])  # from a message to the next one


class Source(NamedTuple):
    path: str
    column: str  # tells where a record lies …
    first: int = 0  # … the first one there
    step: int = 1


def batch(directory: Path) -> Source:
    return Source(str(make_batch(directory, *(RECORDS[at : at + 10] for at in range(0, 40, 10)))), "offset")


def batch_of_a_topic(directory: Path) -> Source:
    first = make_topic_batch(directory, MESSAGES, cuts=[10])[0].offset
    return Source(str(directory), "offset", first, STEP)


def queue(directory: Path) -> Source:
    with Queue(directory / "orders.qew", chunk_size=100) as made:
        made.put_many(RECORDS)
    return Source(made.path, "offset")


def topic(directory: Path) -> Source:
    with Topic(directory / "orders", block_size=10 * STEP) as made:
        for at in range(0, 40, 10):
            made.append_many(MESSAGES[at : at + 10])
    return Source(made.path, "number")


@pytest.fixture(params=["filters pushed", "not pushed"])
def pushing(spark, request) -> Iterator[None]:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", str(request.param == "filters pushed").lower())
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.usefixtures("pushing")
@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
@pytest.mark.parametrize("make", [batch, batch_of_a_topic, queue, topic])
def test_queries_of_a_dataframe_do_not_filter_each_other(
    spark, tmp_path: Path, make: Callable[[Path], Source], typed: bool
) -> None:
    source = make(tmp_path)
    place = f"_metadata.{source.column}" if typed else source.column

    def load() -> DataFrame:
        reader = spark.read.format("qewqew").option("minPartitions", 3)
        if typed:
            reader = reader.option("codec", "json").schema(f"n BIGINT, _metadata STRUCT<{source.column}: BIGINT>")
        frame = reader.load(source.path)
        assert frame.rdd.getNumPartitions() > 1
        return frame

    def before(n: int) -> str:
        return f"{place} < {source.first + n * source.step}"

    # Queries one after the other.
    frame = load()
    few, last = frame.where(before(3)), frame.where(f"NOT {before(38)}")
    assert [one.count() for one in (frame, few, frame, last, frame, few)] == [40, 3, 40, 2, 40, 3]

    # The first one has a filter.
    frame = load()
    assert [frame.where(before(0)).count(), frame.count()] == [0, 40]

    # Several reads in one query.
    frame = load()
    both = frame.where(before(3)).unionAll(frame.where(f"NOT {before(38)}"))
    assert sorted((row[0] - source.first) // source.step for row in both.selectExpr(place).collect()) == [0, 1, 2, 38, 39]
    assert frame.where(before(3)).unionAll(frame).count() == 43
    load().createOrReplaceTempView("records")
    count = "(SELECT count(*) FROM records WHERE "
    counts = spark.sql(f"SELECT {count}{before(3)}), {count}true), {count}NOT {before(38)})")
    assert counts.collect() == [(3, 40, 2)]


@pytest.mark.parametrize("make", [queue, topic])
def test_a_frame_stays_at_its_first_query_and_one_that_is_loaded_again_sees_what_came_since(
    spark, tmp_path: Path, make: Callable[[Path], Source]
) -> None:
    path = make(tmp_path).path
    frame = spark.read.format("qewqew").load(path)
    assert frame.count() == 40
    if make is queue:
        with Queue(path) as again:
            again.put_many(RECORDS)
    else:
        with Topic(path) as more:
            more.append_many(MESSAGES)
    assert frame.count() == frame.where("length(value) > 0").count() == (40 if KEEPS_PLANS else 80)
    assert spark.read.format("qewqew").load(path).count() == 80


@pytest.mark.usefixtures("pushing")
def test_filters_of_every_kind_give_the_rows_that_pass_them(spark, tmp_path: Path) -> None:
    frame = spark.read.format("qewqew").option("minPartitions", 3).load(batch(tmp_path).path)
    for where, offsets in [
        ("offset >= 20 AND offset < 30 AND segment = 'orders.qew.19'", range(20, 30)),
        ("offset IN (1, 12) AND NOT offset = 1", [12]),
        ("(offset = 5 OR offset = 35) AND value IS NOT NULL", [5, 35]),
        ("offset < 0", []),
    ]:
        assert sorted(row.offset for row in frame.where(where).collect()) == list(offsets), where


@pytest.mark.usefixtures("pushing")
def test_a_field_of_the_records_is_not_taken_for_the_column_of_that_name(spark, tmp_path: Path) -> None:
    path = str(make_batch(tmp_path / "b", [b'{"offset": 100}'], [b'{"offset": 0}']))
    reader = spark.read.format("qewqew").option("codec", "json").schema("offset LONG, _metadata STRUCT<offset LONG>")
    assert reader.load(path).where("offset = 100").count() == 1
    assert reader.load(path).where("_metadata.offset = 1").select("offset").collect() == [(0,)]


@pytest.mark.xfail(KEEPS_PLANS, strict=True, reason="if this passes, this Spark is mended: see docs/decisions.md")
def test_spark_keeps_the_filters_that_it_has_pushed_to_the_query_that_they_are_from(spark) -> None:
    """Nothing of ours is in it: as long as Spark does not do this, our readers must not take filters."""
    from pyspark.sql.datasource import DataSource, DataSourceReader

    class Plain(DataSource):  # in here, for then Spark sends its code to the worker
        @classmethod
        def name(cls):
            return "plain"

        def schema(self):
            return "n LONG"

        def reader(self, schema):
            class Reader(DataSourceReader):
                most = 40

                def pushFilters(self, filters):
                    self.most = min([one.value for one in filters if type(one).__name__ == "LessThan"], default=40)
                    return filters

                def read(self, partition):
                    yield from ((n,) for n in range(self.most))

            return Reader()

    spark.dataSource.register(Plain)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("plain").load()
        assert [frame.count(), frame.where("n < 3").count(), frame.count()] == [40, 3, 40]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
