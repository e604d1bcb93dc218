"""The records of a batch as the job sees them: those that decode, and why the others do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructField, StructType

from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument, Corrupt
from qewqew_spark.data_source import batch_reader, columns_of
from qewqew_spark.jobs.explaining import blamed, explain
from qewqew_spark.jobs.output import WHOLE
from qewqew_spark.tables.session import delete, quoted, setting

REASON, METADATA = "_corrupt_reason", "_metadata"  # columns of a typed read
MISFIT = "a value does not fit the schema"
# What Spark's CSV and JSON readers know of files, or of finding a schema, or of writing: a record is none of these.
_NOT_OF_RECORDS = {
    *("header", "linesep", "multiline", "enforceschema", "inferschema", "preferdate", "columnpruning", "singlevariantcolumn"),
    *("compression", "extension", "quoteall", "escapequotes", "inputbuffersize", "encoding", "charset", "mode", "codec"),
    *("pretty", "sortkeys", "ignorenullfields", "writenonasciicharacterascodepoint", "useunsaferow", "columnnameofcorruptrecord"),
}
_OF_INFERENCE = {"primitivesasstring", "prefersdecimal", "dropfieldifallnull", "infertimestamp", "samplingratio"}


@dataclass(frozen=True)
class Records:
    """All records of one batch, and which of them are good."""

    batch: str
    description: Manifest
    rows: DataFrame | None  # a row for each record; None if no field is known
    bad: Column  # of `rows`: does the record not decode?
    columns: list[Column]  # of `rows`: what the view has
    judge: Callable[[], DataFrame]  # all, with the source's columns and `reason`, which is null where a record decodes

    def good(self, seen: Observation) -> DataFrame | None:
        """Those that decode. Whoever reads them reports to ``seen`` how many records there are (`read`), and how many `bad`."""
        if self.rows is None:
            return None
        counts = F.count(F.lit(1)).alias("read"), F.count(F.when(self.bad, 1)).alias("bad")
        return self.rows.observe(seen, *counts).where(~self.bad).select(self.columns)

    def set_aside(self, spark: SparkSession, quarantine: str) -> dict[str, int]:
        """Put the records that do not decode into the directory, in place of what is there; how many, by the kind of reason.

        Raises `Corrupt` if these are not all records of the batch.
        """
        seen = Observation()
        judged = self.judge().observe(seen, F.count(F.lit(1)).alias("read"))
        judged.where(F.col("reason").isNotNull()).write.mode("overwrite").parquet(quarantine)
        read = observed(seen).get("read")
        if read != self.description.records:
            raise Corrupt(f"{read} records were read, the manifest says {self.description.records}", path=self.batch)
        kind = F.substring_index("reason", ": ", 1).alias("kind")
        counted = spark.read.schema(judged.schema).parquet(quarantine).groupBy(kind).count().collect()
        if not counted:
            delete(spark, quarantine)
        return {row["kind"]: int(row["count"]) for row in sorted(counted)}


def observed(seen: Observation) -> dict[str, int]:
    """What an action that has ended reported; nothing if the optimizer found that it need not look at the rows.

    `Observation.get` would wait for ever then, before Spark 4.2, which reports a row without columns.
    """
    report: Any = seen._jo
    deadline = time.monotonic() + 10  # Spark before 4.2 reports some moments after the action
    while not report.future().isCompleted():
        if time.monotonic() > deadline:
            return {}
        time.sleep(0.01)
    return seen.get if report.getRow().length() else {}


def read(
    spark: SparkSession, batch: str, description: Manifest, codec: str, schema: StructType | None, options: Mapping[str, str]
) -> Records:
    """The records of the batch, with the fields of the schema; None: those of JSON records are inferred.

    Raises `BadArgument` if they cannot be columns.
    """
    known = _options_of_spark(spark, codec)
    theirs = {name: value for name, value in options.items() if name.lower() in known}
    ours = {name: value for name, value in options.items() if name not in theirs}
    if useless := sorted(name for name in theirs if name.lower() in _NOT_OF_RECORDS):
        raise BadArgument(f"the read option {useless[0]!r} is for files, and here each record is a text of its own, in UTF-8")
    place = columns_of(description)

    def load(columns: StructType, **more: str) -> DataFrame:
        wanted = {**ours, **more}
        # As Spark would when it plans the first action, which is after `load`, and wrapped into errors of its own.
        batch_reader(batch, wanted, columns, description)
        return spark.read.format("qewqew").options(**wanted).schema(columns).load(batch)

    def judged(rows: DataFrame, reason: Column) -> Callable[[], DataFrame]:
        return lambda: rows.select("*", reason.alias("reason"))

    value = F.col("value").cast("string")
    if codec in WHOLE:
        rows = load(place)
        bad = F.lit(False) if codec == "bytes" else ~F.is_valid_utf8(value)
        columns = [F.col(name) for name in place.names] if codec == "bytes" else [value.alias("value")]
        return Records(batch, description, rows, bad, columns, judged(rows, F.when(bad, "not valid UTF-8")))

    record = infer(spark, load(StructType([place["value"]])), theirs) if schema is None else schema
    _check_fields(spark, record, inferred=schema is None)
    corrupt = "_corrupt_record"
    while corrupt in map(str.lower, record.names):
        corrupt += "_"
    fields = StructType([field for field in record if field.name != METADATA])

    if codec == "csv":
        wanted = StructType([more for field in record if field.name == METADATA for more in _fields(field.dataType)])
        with blamed("the schema"):
            raw = load(StructType([place["value"], *wanted]))
            parsed = _Csv(spark, fields, corrupt, theirs)
            beside = F.struct(*wanted.names).alias(METADATA) if wanted.names else F.lit(None).alias(METADATA)
            parsed_rows = raw.select(beside, parsed.blank.alias("blank"), parsed.fields.alias("fields"))
            bad = F.col("blank") | F.col(f"fields.{quoted(corrupt)}").isNotNull()
            names = [METADATA if name == METADATA else f"fields.{quoted(name)}" for name in record.names]
            columns = [F.col(name) for name in names]
            return Records(batch, description, parsed_rows, bad, columns, lambda: parsed.judged(load(place)))

    typed = {"codec": codec, "strict": "true", "columnNameOfCorruptRecord": corrupt, "mode": "PERMISSIVE"}
    typed |= {name: value for name, value in theirs.items() if name.lower() not in _OF_INFERENCE}
    reason = StructField(REASON, StringType())
    more = StructField(corrupt, BinaryType()), reason, StructField(METADATA, StructType([*place][1:]))

    def judge() -> DataFrame:
        shown = F.col(corrupt).alias("value"), F.col(f"{METADATA}.*"), F.col(REASON).alias("reason")
        return load(StructType([*fields, *more]), **typed).select(*shown)

    decoded = load(StructType([*record, reason]), **typed) if record.names else None
    return Records(batch, description, decoded, F.col(REASON).isNotNull(), [F.col(quoted(name)) for name in record.names], judge)


def _fields(kind: DataType) -> list[StructField]:
    return [*kind] if isinstance(kind, StructType) else []


def _options_of_spark(spark: SparkSession, codec: str) -> set[str]:
    """The names of the options of Spark's own parser for the codec, in small letters."""
    parsers: Any = spark.sparkContext._jvm.org.apache.spark.sql.catalyst  # type: ignore[union-attr]
    if codec not in ("csv", "json"):
        return set()
    known = parsers.csv.CSVOptions if codec == "csv" else parsers.json.JSONOptions
    return set(str(known.getAllOptions().mkString(" ")).lower().split())


class _Csv:
    """Records as Spark's `from_csv` reads them. A line feed at the end of a record is none of its last field.

    Raises `BadArgument` for a schema or an option that `from_csv` does not take.
    """

    def __init__(self, spark: SparkSession, fields: StructType, corrupt: str, options: Mapping[str, str]) -> None:
        self._kinds = {field.name: field.dataType.simpleString() for field in fields}
        self._corrupt = corrupt
        self._options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt}
        given = {name.lower(): value for name, value in options.items()}
        delimiter = given.get("sep", given.get("delimiter", ","))
        value = F.col("value").cast("string")
        self.text = F.when(value.endswith("\n"), F.regexp_replace(value, r"\r?\n$", "")).otherwise(value)
        self._comment = self.text.startswith(given["comment"]) if given.get("comment") else F.lit(False)
        self._empty = ~self.text.rlike(r"[^\x00-\x20]")
        self.blank = self._empty | self._comment  # Spark makes no row of such a line
        self.fields = self._parsed(self.text, self._kinds)
        try:  # Spark looks at its options, and at the types, when it parses: let the optimizer parse something
            some = spark.sql("SELECT 1").select(self._parsed(F.lit("x"), self._kinds))
            some._jdf.queryExecution().optimizedPlan()
            parser: Any = spark.sparkContext._jvm.org.apache.spark.sql.catalyst.csv.CSVExprUtils  # type: ignore[union-attr]
            self._delimiter = str(parser.toDelimiterStr(delimiter))
        except (PySparkException, Py4JJavaError) as error:
            raise BadArgument(f"the schema or a read option is nothing for Spark's from_csv: {explain(error)}") from error

    def _parsed(self, text: Column, kinds: Mapping[str, str]) -> Column:
        columns = [f"{quoted(name)} {kind}" for name, kind in {**kinds, self._corrupt: "STRING"}.items()]
        return F.from_csv(text, ", ".join(columns), self._options)

    def judged(self, rows: DataFrame) -> DataFrame:
        """All records, with `reason`. Why one is bad is found by reading it again as texts, and with a field behind its last."""
        names = [*self._kinds]
        end = "\x01end"
        more = {**dict.fromkeys(names, "STRING"), f"{self._corrupt}_end": "STRING"}
        behind = self._parsed(F.concat(self.text, F.lit(self._delimiter + end)), more)
        count = F.array_position(F.array(*(behind[name] for name in more)), end) - 1
        texts = self._parsed(self.text, dict.fromkeys(names, "STRING"))
        misfits = [
            F.when(
                self.fields[name].isNull() & texts[name].isNotNull(),
                F.concat(
                    F.lit(f'{MISFIT}: column {name}, value "'), F.left(texts[name], F.lit(80)), F.lit(f'", type {kind.upper()}')
                ),
            )
            for name, kind in self._kinds.items()
        ]
        reason = (
            F.when(self._empty, "empty record")
            .when(self._comment, "a comment")
            .when(self.fields[self._corrupt].isNull(), F.lit(None))
            .when(texts[self._corrupt].isNull(), F.coalesce(*misfits, F.lit(MISFIT)))
            .when((count >= 0) & (count < len(names)), F.concat(F.lit("too few fields: "), count, F.lit(f" of {len(names)}")))
            .otherwise(f"too many fields: more than {len(names)}")
        )
        return rows.select("*", reason.alias("reason"))


# For inference, a record is the only element of an array, with something behind it. Spark ignores whatever follows the first
# value, so of a record with two JSON objects, or with one and garbage, the first would count; wrapped, it breaks the array.
# Names of fields of the records cannot collide with the wrapper's either.
_BEFORE, _BEHIND = '{"record":[', '],"behind":1}'


def infer(spark: SparkSession, raw: DataFrame, options: Mapping[str, str]) -> StructType:
    """The schema of the JSON objects in ``value``, as `spark.read.json` infers it with the options; none: no fields."""
    text = F.col("value").cast("string")
    wrapped: Column = F.concat(F.lit(_BEFORE), text, F.lit(_BEHIND))
    objects = raw.where(F.is_valid_utf8(text) & text.rlike(r"^[ \t\r\n]*\{")).select(wrapped)
    # Else Spark would infer one field of {"a":1} and {"A":1}, and then read nothing from the second, which has no "a".
    reader = spark.read.options(**{**options, "mode": "DROPMALFORMED"})
    with setting(spark, "spark.sql.caseSensitive", "true"):
        try:
            inferred = reader.json(objects).schema
        except PySparkTypeError:  # before Spark 4.2 it takes no DataFrame
            inferred = reader.json(objects.rdd.map(itemgetter(0))).schema
    kind = inferred["record"].dataType if "record" in inferred.names else None
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        return kind.elementType
    return StructType()


def parsed(schema: str) -> StructType:
    """The schema in a DDL text; raises `BadArgument`."""
    with blamed("the schema"):
        found = StructType.fromDDL(schema)
    if not isinstance(found, StructType) or not found.names:
        raise BadArgument(f"the schema {schema!r:.200} has no columns; write it like 'id BIGINT, name STRING'")
    return found


def check_names(spark: SparkSession, names: list[str], where: str, cure: str) -> None:
    """Raise `BadArgument` if Spark takes two of the names for one."""
    sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
    seen: dict[str, str] = {}
    for name in names:
        key = name if sensitive else name.lower()
        if key in seen:
            raise BadArgument(f"{where} that Spark takes for one: {seen[key]!r} and {name!r}; {cure}")
        seen[key] = name


def _check_fields(spark: SparkSession, record: StructType, inferred: bool) -> None:
    for struct in _structs(record):
        check_names(spark, struct.names, "the records have fields", "give a schema")
    taken = {REASON, METADATA} if inferred else {REASON}
    if clash := taken & set(record.names):
        raise BadArgument(f"the records have a field {min(clash)!r}, a name of the job's own; give a schema without it")


def _structs(kind: DataType) -> Iterator[StructType]:
    """The structs in a type, itself included."""
    if isinstance(kind, StructType):
        yield kind
        for each in kind:
            yield from _structs(each.dataType)
    elif isinstance(kind, ArrayType):
        yield from _structs(kind.elementType)
    elif isinstance(kind, MapType):
        yield from _structs(kind.valueType)
