"""The columns of several batches, as one table has them."""

from __future__ import annotations

import pytest
from pyspark.sql.types import ArrayType, IntegerType, MapType, StringType, StructField, StructType

from qewqew_spark.tables.evolution import Contradiction, all_columns


def struct(*fields: tuple[str, object], nullable: bool = True) -> StructType:
    return StructType([StructField(name, kind, nullable, {} if nullable else {"of": "a batch"}) for name, kind in fields])


def test_all_fields_of_all_batches_are_kept_in_their_order_and_nullable():
    one = struct(("id", IntegerType()), ("x", ArrayType(struct(("a", IntegerType())), False)), nullable=False)
    two = struct(("new", MapType(StringType(), struct(("b", StringType()), nullable=False))), ("ID", IntegerType()))
    three = struct(("x", ArrayType(struct(("a", IntegerType()), ("more", StringType())))))
    assert all_columns([one, two, three], str.lower) == struct(
        ("id", IntegerType()),
        ("x", ArrayType(struct(("a", IntegerType()), ("more", StringType())))),
        ("new", MapType(StringType(), struct(("b", StringType())))),
    )
    assert all_columns([], str) == struct()
    assert all_columns([one, struct(("ID", StringType()))], str).names == ["id", "x", "ID"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IntegerType(), StringType()),
        (IntegerType(), struct(("a", IntegerType()))),
        (ArrayType(IntegerType()), ArrayType(StringType())),
        (MapType(StringType(), IntegerType()), MapType(StringType(), StringType())),
        (struct(("a", IntegerType())), struct(("a", StringType()))),
    ],
)
def test_two_types_of_one_column_contradict_each_other(one, other):
    with pytest.raises(Contradiction):
        all_columns([struct(("x", one)), struct(("x", other))], str.lower)
