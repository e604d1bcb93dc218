"""Iceberg's transforms by the examples of its specification, and what a manifest says of a file."""

from __future__ import annotations

import struct
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, TruncateTransform
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
)

from qewqew_core.errors import BadArgument
from qewqew_spark.tables.data_files import Written
from qewqew_spark.tables.keys import bucket, murmur3, truncated, unscaled
from qewqew_spark.tables.partitions import transform_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (34, 2017239379),
        (Decimal("14.20"), -500754589),
        (17486, -653330422),  # the date 2017-11-16
        (1510871468000000, -2047944441),  # 2017-11-16T22:31:08
        (1510871468000001, -1207196810),
        ("iceberg", 1210000089),
        (b"\x00\x01\x02\x03", -188683207),
    ],
)
def test_a_bucket_is_that_of_the_hash_in_the_specification(value: int | str | bytes | Decimal, expected: int) -> None:
    assert bucket(1 << 31)(value) == expected & 0x7FFFFFFF
    assert bucket(1000)(value) == (expected & 0x7FFFFFFF) % 1000
    assert bucket(1000)(None) is None


def test_a_bucket_is_that_of_pyiceberg() -> None:
    for length in range(9):
        data = bytes(range(200, 200 + length))
        assert bucket(1 << 31)(data) == BucketTransform(1 << 31).transform(BinaryType())(data)
        assert murmur3(data) < 1 << 32
    for number in 0, -1, 127, 128, -128, -129, 10**20, -(10**37):
        value = Decimal(number).scaleb(-2) if abs(number) < 10**20 else Decimal(f"{number}E-2")
        assert bucket(97)(value) == BucketTransform(97).transform(DecimalType(38, 2))(value)


@pytest.mark.parametrize(
    ("kind", "width", "value", "expected"),
    [
        (IntegerType(), 10, 1, 0),
        (IntegerType(), 10, -1, -10),
        (LongType(), 10, -10, -10),
        (LongType(), 10, -11, -20),
        (DecimalType(9, 2), 50, Decimal("10.65"), Decimal("10.50")),
        (DecimalType(9, 2), 50, Decimal("-0.01"), Decimal("-0.50")),
        (StringType(), 3, "iceberg", "ice"),
        (StringType(), 2, "é😀x", "é😀"),
        (BinaryType(), 3, b"\x01\x02\x03\x04\x05", b"\x01\x02\x03"),
    ],
)
def test_truncation_is_that_of_the_specification(kind: PrimitiveType, width: int, value: object, expected: object) -> None:
    assert TruncateTransform(width).transform(kind)(value) == expected
    if isinstance(value, Decimal) and isinstance(expected, Decimal):
        assert truncated(width)(value) == str(unscaled(expected) // width)


@pytest.mark.parametrize("text", ["bucket(0, id)", "truncate(0, id)", "bucket(id)", "bucket(-1, id)", "void(id)"])
def test_a_partition_that_is_no_transform_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="partition_by: "):
        transform_of(text)


def data_file(place: Path, kind: PrimitiveType, values: pa.Array, **properties: str) -> DataFile:
    pq.write_table(pa.table({"x": values}), place / "f.parquet", row_group_size=2)
    schema = Schema(NestedField(7, "x", kind))
    properties = {f"write.metadata.metrics.{name}": value for name, value in properties.items()}
    (made,) = Written.of(schema, PartitionSpec(), properties, ["x"]).data_files(
        PyArrowFileIO(), [(str(place / "f.parquet"), (place / "f.parquet").stat().st_size)]
    )
    return made


@pytest.mark.parametrize(
    ("mode", "values", "lower", "upper"),
    [
        ("truncate(2)", ["abc", "abx", None], b"ab", b"ac"),
        ("truncate(2)", ["ab", "b"], b"ab", b"b"),
        ("truncate(2)", ["a\U0010ffffx"], "a\U0010ffff".encode(), b"b"),
        ("truncate(1)", ["\U0010ffffx"], "\U0010ffff".encode(), None),
        ("truncate(1)", ["\ud7ffx"], "\ud7ff".encode(), "\ue000".encode()),
        ("full", ["abc" * 9, ""], b"", b"abc" * 9),
        ("counts", ["a"], None, None),
        ("truncate(4)", [None, None], None, None),
    ],
)
def test_bounds_of_texts_hold_all_of_them(
    tmp_path: Path, mode: str, values: list[str | None], lower: bytes | None, upper: bytes | None
) -> None:
    made = data_file(tmp_path, StringType(), pa.array(values, pa.string()), default=mode)
    assert (made.lower_bounds.get(7), made.upper_bounds.get(7)) == (lower, upper)
    assert made.value_counts == {7: len(values)}
    assert made.null_value_counts == {7: values.count(None)}


def test_without_metrics_there_are_none(tmp_path: Path) -> None:
    made = data_file(tmp_path, StringType(), pa.array(["a"]), default="none")
    assert made.value_counts == made.null_value_counts == made.lower_bounds == made.upper_bounds == {}
    assert made.record_count == 1
    with pytest.raises(BadArgument, match=r"write\.metadata\.metrics"):
        data_file(tmp_path, StringType(), pa.array(["a"]), default="some")


def test_bounds_of_numbers_are_exact_and_leave_out_nan(tmp_path: Path) -> None:
    made = data_file(tmp_path, DoubleType(), pa.array([0.0, 1.5, None, -0.0]))
    assert struct.unpack("<d", made.upper_bounds[7]) == (1.5,)
    assert made.lower_bounds[7] == struct.pack("<d", -0.0)
    made = data_file(
        tmp_path, DecimalType(38, 2), pa.array([Decimal("-1.28"), Decimal("1.28"), Decimal("0.00")], pa.decimal128(38, 2))
    )
    assert (made.lower_bounds[7], made.upper_bounds[7]) == (b"\x80", b"\x00\x80")
