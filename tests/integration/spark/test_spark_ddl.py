"""What is refused without Spark is refused by Spark: it is asked."""

from __future__ import annotations

import random
import re

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType
from stride import examples

from qewqew_core import BadArgument
from qewqew_spark.jobs.ddl import check_schema
from qewqew_spark.tables.evolution import relaxed
from qewqew_spark.tables.session import columns_ddl

RIGHT = """
a STRING
id BIGINT NOT NULL
id BIGINT NOT NULL COMMENT 'k'
a: STRING, b :INT
a struct<x:int,y:array<string>>
a STRUCT<x: INT COMMENT 'c', y INT NOT NULL>
a STRUCT<>
a DECIMAL(10,2), b DEC(3), c NUMERIC
a DECIMAL(38,38), b DECIMAL(1,0), c ARRAY<DEC(38)>
m MAP<STRING, ARRAY<INT>>
m MAP<STRING,STRUCT<b:INT>>, n ARRAY<ARRAY<DATE>>
`odd name` INT COMMENT 'it\\'s', `a``b` INT, `a.b` INT
a INT COMMENT "b, c INT"
c CHAR(3), v VARCHAR(9)
t TIMESTAMP_NTZ, u TIMESTAMP_LTZ, v VARIANT, w VOID
i INTERVAL DAY TO SECOND, j INTERVAL YEAR, k INTERVAL
b BINARY, y BYTE, s SHORT, l LONG, r REAL, f FLOAT, t TINYINT
date DATE, timestamp TIMESTAMP, order INT, from STRING, not INT, comment STRING
a STRING COLLATE UTF8_LCASE
1a INT, _b INT
struct<a:int,b:array<struct<c:string>>>
"""
WRONG = """
a STRING NOT A TYPE
a
a STRNG
a INT b INT
a INT,
, a INT
a DECIMAL(
a DECIMAL(x y z
a ARRAY
a ARRAY<INT
a ARRAY<INT>>
a MAP<INT>
a STRUCT<b>
a b c
a.b INT
'a' INT
a INT;
a INT) , b INT
a STRING NOT
a INT COMMENT
a INT COMMENT b
a-b INT
a INTERVAL DAY TO
struct<a:int>,b INT
STRING
"""


def spark_takes(schema: str) -> bool:
    try:
        return isinstance(StructType.fromDDL(schema), StructType)  # it takes the name of a type, too
    except PySparkException:
        return False


def we_take(schema: str) -> bool:
    try:
        check_schema(schema)
    except BadArgument:
        return False
    return True


@pytest.mark.parametrize("schema", RIGHT.strip().splitlines())
def test_what_spark_takes_passes(spark, schema):
    assert spark_takes(schema)
    check_schema(schema)


@pytest.mark.parametrize("schema", WRONG.strip().splitlines())
def test_what_is_wrong_is_refused_by_both(spark, schema):
    assert not spark_takes(schema)
    assert not we_take(schema)


@pytest.mark.parametrize("schema", RIGHT.strip().splitlines())
@pytest.mark.parametrize("name", ["x", "a`b", "a-b", "1e5", "a:INT>, planted STRING, t STRUCT<b", "a` INT, `planted` INT, `t"])
def test_types_become_sql_whatever_their_fields_are_called(spark, schema, name):
    types = StructType.fromDDL(schema)
    columns = relaxed(StructType([StructField(name, MapType(StringType(), ArrayType(StructType([StructField(name, types)]))))]))
    back, there = (re.sub('"metadata":{[^}]*}', "", each.json()) for each in (StructType.fromDDL(columns_ddl(columns)), columns))
    assert back == there
    check_schema(columns_ddl(columns))


def test_nothing_is_refused_that_spark_takes(spark):
    """Of texts made of the words and signs of schemas, in any order."""
    luck = random.Random(3)
    words = ["a", "b", "`c d`", "INT", "STRING", "DECIMAL", "(", "10", ",", "2", ")", "ARRAY", "<", ">", "STRUCT", "MAP", ":"]
    words += ["NOT", "NULL", "COMMENT", "'x'", "INTERVAL", "DAY", "TO", "SECOND", "TIMESTAMP"]
    whole = [line for line in RIGHT.strip().splitlines() if len(line) > 1]
    taken = refused = 0
    for _ in range(examples(quick=300, full=1500, soak=20_000)):
        if luck.random() < 0.5:
            schema = " ".join(luck.choices(words, k=luck.randint(1, 6)))
        else:
            parts = luck.choice(whole).split(" ")
            parts[luck.randrange(len(parts))] = luck.choice(words)
            schema = " ".join(parts)
        if we_take(schema):
            taken += 1
        else:
            refused += 1
            assert not spark_takes(schema), schema
    assert taken > 20
    assert refused > 20


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ("a STRING NOT A TYPE", "'NOT A TYPE'"),
        ("a STRNG, b INT", "'a STRNG, b INT'"),
        ("`a, b` INT COMMENT 'c, d', e ARRAY<STRUCT<f: INT>>, g ARRAY<STRNG>", "'g ARRAY<STRNG>'"),
        ("a INT,", "the end"),
        (" ", "the end"),
    ],
)
def test_it_says_where(schema, place):
    with pytest.raises(BadArgument, match=f"is wrong at {place}: a column and one of Spark's types are expected there"):
        check_schema(schema)
