"""Records as Spark's own parsers read them: CSV, and JSON with types or options that the typed read does not know."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.explaining import explain
from qewqew_spark.tables.session import ddl, quoted

MALFORMED, MISFIT, NOT_UTF8 = "malformed JSON", "a value does not fit the schema", "not valid UTF-8"
SHOWN = 80  # characters of a value in a reason


class Parser(Protocol):
    """How one of Spark's parsers reads the column ``value``.

    It is made from the fields and the options, and raises `BadArgument` for those that Spark does not take.
    """

    parsed: Column  # a struct with all that is below
    reason: Column  # why the record is bad; null if it is not
    located: Column | None  # of bad records with their `reason`: this, with where in the record, if that is still to be found

    def bad(self, parsed: str) -> Column:
        """Does the record not decode, whose `parsed` is the column of this name?"""

    def field(self, parsed: str, name: str) -> Column:
        """A field of the record."""


class Csv:
    """See `Parser`. A line feed at the end of a record does not belong to its last field."""

    located: Column | None = None

    def __init__(self, spark: SparkSession, fields: StructType, corrupt: str, options: Mapping[str, str]) -> None:
        self._kinds = {field.name: ddl(field.dataType) for field in fields}
        self._corrupt = corrupt
        self._options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt}
        given = {name.lower(): value for name, value in options.items()}
        value = F.col("value").cast("string")
        self._text = F.when(value.endswith("\n"), F.regexp_replace(value, r"\r?\n$", "")).otherwise(value)
        self._comment = self._text.startswith(given["comment"]) if given.get("comment") else F.lit(False)
        self._empty = ~self._text.rlike(r"[^\x00-\x20]")
        self._utf8 = F.is_valid_utf8(value)  # of other bytes Spark makes U+FFFD
        unread = self._empty | self._comment | ~self._utf8  # of the first two Spark makes no row
        self.parsed = F.struct(unread.alias("unread"), self._fields(self._text, self._kinds).alias("fields"))
        _check(spark, self._fields(F.lit("x"), self._kinds), "from_csv")
        parser: Any = spark.sparkContext._jvm.org.apache.spark.sql.catalyst.csv.CSVExprUtils  # type: ignore[union-attr]
        self.reason = self._reason(str(parser.toDelimiterStr(given.get("sep", given.get("delimiter", ",")))))

    def bad(self, parsed: str) -> Column:
        return F.col(f"{parsed}.unread") | self.field(parsed, self._corrupt).isNotNull()

    def field(self, parsed: str, name: str) -> Column:
        return F.col(f"{parsed}.fields.{quoted(name)}")

    def _fields(self, text: Column, kinds: Mapping[str, str]) -> Column:
        columns = [f"{quoted(name)} {kind}" for name, kind in {**kinds, self._corrupt: "STRING"}.items()]
        return F.from_csv(text, ", ".join(columns), self._options)

    def _reason(self, delimiter: str) -> Column:
        """Found by reading the record again as strings, with one more field after its last."""
        names, end, fields = [*self._kinds], "\x01end", self._fields(self._text, self._kinds)
        more = {**dict.fromkeys(names, "STRING"), f"{self._corrupt}_end": "STRING"}
        behind = self._fields(F.concat(self._text, F.lit(delimiter + end)), more)
        count = F.array_position(F.array(*(behind[name] for name in more)), end) - 1
        texts = self._fields(self._text, dict.fromkeys(names, "STRING"))
        misfits = [
            F.when(
                fields[name].isNull() & texts[name].isNotNull(),
                F.concat(
                    F.lit(f'{MISFIT}: column {name}, value "'),
                    F.left(texts[name], F.lit(SHOWN)),
                    F.lit(f'", type {kind.upper()}'),
                ),
            )
            for name, kind in self._kinds.items()
        ]
        return (
            F.when(self._empty, "empty record")
            .when(~self._utf8, NOT_UTF8)
            .when(self._comment, "a comment")
            .when(fields[self._corrupt].isNull(), F.lit(None))
            .when(texts[self._corrupt].isNull(), F.coalesce(*misfits, F.lit(MISFIT)))
            .when((count >= 0) & (count < len(names)), F.concat(F.lit("too few fields: "), count, F.lit(f" of {len(names)}")))
            .otherwise(f"too many fields: more than {len(names)}")
        )


class Json:
    """See `Parser`. A record is one object with nothing after it.

    Spark ignores what follows the first value of a text. So it gets the record as the only element of an array, followed by a
    text that no record can know.
    """

    located: Column | None

    def __init__(self, spark: SparkSession, fields: StructType, options: Mapping[str, str]) -> None:
        self._options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": "corrupt"}
        self._end = uuid.uuid4().hex
        text = F.col("value").cast("string")
        # A comment, where comments are allowed, ends with the line.
        self._wrapped: Column = F.concat(F.lit('{"record":['), text, F.lit(f'\n],"end":"{self._end}"}}'))
        self._utf8 = F.is_valid_utf8(text)
        self.parsed = F.when(self._utf8, self._from_json(self._wrapped, fields))
        _check(spark, self._from_json(F.lit("{}"), fields), "from_json")
        self.reason = self._reason(text, fields)
        known = F.col("reason")
        self.located = F.when(known == MALFORMED, F.udf(_malformed, "string", useArrow=False)(text)).otherwise(known)

    def bad(self, parsed: str) -> Column:
        return ~self._good(F.col(parsed))

    def field(self, parsed: str, name: str) -> Column:
        return F.col(parsed)["record"][0][name]

    def _from_json(self, text: Column, fields: StructType) -> Column:
        record = StructField("record", ArrayType(fields))
        return F.from_json(
            text, StructType([record, *(StructField(name, StringType()) for name in ("end", "corrupt"))]), self._options
        )

    def _good(self, parsed: Column) -> Column:
        """Is there exactly one object, up to the end, and does it fit?"""
        single = (F.size(parsed["record"]) == 1) & parsed["record"][0].isNotNull()
        return F.coalesce(parsed["corrupt"].isNull() & single & (parsed["end"] == self._end), F.lit(False))

    def _reason(self, text: Column, fields: StructType) -> Column:
        """The field that does not fit is found by reading each one alone, and its text by reading all as strings."""
        texts = self._from_json(self._wrapped, StructType([StructField(field.name, StringType()) for field in fields]))
        misfits = [
            F.when(
                ~self._good(self._from_json(self._wrapped, StructType([field]))),
                F.concat(
                    F.lit(f"{MISFIT}: {field.name}: '"),
                    F.left(texts["record"][0][field.name], F.lit(SHOWN)),
                    F.lit(f"' does not fit {_shown(field.dataType)}"),
                ),
            )
            for field in fields
        ]
        return (
            F.when(text == "", "empty record")
            .when(~self._utf8, NOT_UTF8)
            .when(self._good(self._from_json(self._wrapped, fields)), F.lit(None))
            .when(self._good(texts), F.coalesce(*misfits, F.lit(MISFIT)))
            .when(text.rlike(r"^[ \t\r\n]*\{"), MALFORMED)
            .otherwise("not a JSON object")
        )


def _malformed(text: str) -> str:
    """The reason, with where Python's reader stops. It takes less than Spark's: what that has passed over may be named."""
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        return f"{MALFORMED}: at byte {len(text[: error.pos].encode())}: {error.msg.removesuffix(' at')}"
    except RecursionError:
        return f"{MALFORMED}: nested too deep"
    return MALFORMED


def _check(spark: SparkSession, parsed: Column, parser: str) -> None:
    """Spark looks at the options, and at the types, when it parses: let the optimizer parse something."""
    try:
        spark.sql("SELECT 1").select(parsed)._jdf.queryExecution().optimizedPlan()
    except (PySparkException, Py4JJavaError) as error:
        raise BadArgument(f"Spark's {parser} does not take the schema or a read option: {explain(error)}") from error


def _shown(kind: DataType) -> str:
    nested = isinstance(kind, StructType | ArrayType | MapType)
    return (kind.typeName() if nested else kind.simpleString()).upper()
