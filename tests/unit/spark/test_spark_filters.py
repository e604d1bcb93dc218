"""What is made of Spark's filters, without Spark."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import datasource
from pyspark.sql.types import LongType, StructField, StructType

from qewqew_spark.options import Options
from qewqew_spark.pushdown import ANY, PrunedReader, Range, bounds_of
from qewqew_spark.rows import SCHEMA, Rows

ROWS = Rows(SCHEMA, SCHEMA, Options({}))
TESTS = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "In": lambda value, these: value in these,
    "Not": lambda value, other: value != other,
}
SMALL = st.integers(0, 8)


def filter_of(kind: str, column: tuple[str, ...], value: Any) -> Any:
    if kind == "Not":
        return datasource.Not(datasource.EqualTo(column, value))
    return getattr(datasource, kind)(column, value)


FILTERS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(set(TESTS) - {"In"})), SMALL),
        st.tuples(st.just("In"), st.lists(SMALL, min_size=1, max_size=3).map(tuple)),
    ),
    max_size=4,
)


pushed = pytest.mark.skipif(not hasattr(datasource, "EqualTo"), reason="pyspark 4.0 pushes no filters")


class Reader(PrunedReader):
    def read(self, partition):
        raise NotImplementedError


@pushed
@settings(deadline=None)
@given(FILTERS, SMALL, SMALL)
def test_a_row_that_passes_the_filters_is_never_left_out(filters, one, other):
    least, most = sorted((one, other))
    reader = Reader(ROWS)
    reader.bounds = bounds_of([filter_of(kind, ("offset",), value) for kind, value in filters], ROWS)
    passing = [number for number in range(least, most + 1) if all(TESTS[kind](number, value) for kind, value in filters)]
    if passing:
        assert reader.may_hold(offset=(least, most))
    assert reader.may_hold(offset=(None, None))
    assert reader.may_hold(segment=("a", "a"))


@pushed
def test_each_filter_narrows_the_range_of_its_column():
    filters = [
        filter_of("GreaterThan", ("offset",), 3),
        filter_of("LessThanOrEqual", ("offset",), 10),
        filter_of("In", ("offset",), (9, 5, 12)),
        filter_of("EqualTo", ("segment",), "q.1"),
        filter_of("EqualTo", ("value",), None),
        filter_of("In", ("value",), (b"x", None)),
        datasource.IsNotNull(("value",)),
        datasource.StringStartsWith(("segment",), "q"),
    ]
    assert bounds_of(filters, ROWS) == {"offset": Range(5, 10), "segment": Range("q.1", "q.1")}


def test_ranges_meet_at_their_ends_and_where_nothing_is_known():
    assert all(Range(2, 4).meets(*ends) for ends in [(4, 9), (0, 2), (3, 3), (None, None), (None, 2), (4, None)])
    assert not any(Range(2, 4).meets(*ends) for ends in [(5, 9), (0, 1), (None, 1), (5, None)])
    assert all(ANY.meets(*ends) for ends in [(None, None), (1, 2), ("a", "b")])
    assert not Range(5, 3).meets(0, 4)  # nothing passes filters that exclude each other


def test_a_reader_takes_filters_only_in_the_worker_that_asks():
    """A session in which filters are not pushed, which is the default, refuses a reader that has the method."""
    base = datasource.DataSourceReader
    assert getattr(PrunedReader, "pushFilters", None) is getattr(base, "pushFilters", None)


def test_of_a_typed_read_only_the_metadata_is_the_sources():
    schema = StructType(
        [StructField("offset", LongType()), StructField("_metadata", StructType([StructField("offset", LongType())]))]
    )
    rows = Rows(SCHEMA, schema, Options({"codec": "json"}))
    assert rows.source_column(("offset",)) is None
    assert rows.source_column(("_metadata", "offset")) == "offset"
    assert rows.source_column(("_metadata",)) is None
    assert ROWS.source_column(("offset",)) == "offset"
    assert ROWS.source_column(("offset", "x")) is None
