"""The records of one batch, or of several, as the job sees them: those that decode, and why the others do not."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, CharType, DataType, MapType, StringType, StructField, StructType, VarcharType

from qewqew_core.batch import published
from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument, Corrupt
from qewqew_core.secrecy import excerpt
from qewqew_spark.jobs.explaining import blamed
from qewqew_spark.jobs.output import BATCH, WHOLE
from qewqew_spark.jobs.parsers import Csv, Json, Parser
from qewqew_spark.jobs.quarantine import Quarantine
from qewqew_spark.jobs.untyped import has_untyped, untyped
from qewqew_spark.options import Options
from qewqew_spark.source.batches import RUN_BYTES, BatchReader, columns_of, reader, unnamed_text
from qewqew_spark.tables.session import conformed, folding, quoted, setting

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Of the fields, and of what gives one by its name: a reason, null if the outputs can hold the record; None if they hold any.
Unfit = Callable[[StructType, Callable[[str], Column]], Column | None]
REASON, METADATA, UNNAMED = "_corrupt_reason", "_metadata", "_unnamed_fields"  # columns of a typed read …
NAMED = "_named_fields"  # … and of one by Spark's parser
NAMES = 100  # of fields that the schema does not name, in a result …
SHOWN = 10  # … and in an error
# Options of Spark's CSV and JSON readers for files, for finding a schema, or for writing: they make no sense for a record.
_NOT_OF_RECORDS = {
    *("header", "linesep", "multiline", "enforceschema", "inferschema", "preferdate", "columnpruning", "singlevariantcolumn"),
    *("compression", "extension", "quoteall", "escapequotes", "inputbuffersize", "encoding", "charset", "mode", "codec"),
    *("pretty", "sortkeys", "ignorenullfields", "writenonasciicharacterascodepoint", "useunsaferow", "columnnameofcorruptrecord"),
}
_FILLED = "dropfieldifallnull"
SAMPLE = 1000  # records in which most fields have a value
_OF_INFERENCE = {"primitivesasstring", "prefersdecimal", _FILLED, "infertimestamp", "samplingratio"}


@dataclass(frozen=True)
class Batches:
    """What the job reads: paths or URLs, and the manifests that are there. Raises `BadArgument`."""

    paths: Sequence[str]
    manifests: Sequence[Manifest]

    def __post_init__(self) -> None:
        for path, batch in zip(self.paths, self.manifests, strict=True):
            if not published.ID.fullmatch(batch.id):
                raise BadArgument(f"{path}: the id {batch.id!r} cannot be the name of a directory")

    def __str__(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def ids(self) -> list[str]:
        return [batch.id for batch in self.manifests]

    @property
    def records(self) -> int:
        return sum(batch.records for batch in self.manifests)

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self.manifests)


@dataclass(frozen=True)
class Records:
    """All records of the batches, and which of them are good."""

    batches: Batches
    rows: DataFrame | None  # a row for each record; None if no field is known
    bad: Callable[[], Column]  # of `rows`: does the record not decode, or do the outputs not hold it?
    columns: list[Column]  # of `rows`: what the view has
    judge: Callable[[], DataFrame]  # all, with the source's columns and `reason`, which is null where a record decodes
    located: Column | None = None  # of bad ones of `judge`: the reason with where in the record, if that is still to be found
    unnamed: Column | None = None  # of `rows`: what the schema does not name, as a typed read tells it
    # The fields of a schema that was given, where nothing keeps the others. And of `rows`: have records one of these fields, and
    # others: where `unnamed` does not tell.
    given: Sequence[str] = ()
    has: tuple[Column, Column] | None = None

    def good(self, seen: Observation) -> DataFrame | None:
        """The records that decode. Reading them reports to ``seen`` how many records there are (`read`), how many `bad` ones, how
        many have no value (`null`) in the fields that were given, and `unnamed` or how many have `others`, if that is known.
        """
        if self.rows is None:
            return None
        bad = self.bad()
        counts = [F.count(F.lit(1)).alias("read"), F.count(F.when(bad, 1)).alias("bad")]
        if self.unnamed is not None:
            counts.append(F.concat_ws("\n", F.collect_list(self.unnamed)).alias("unnamed"))
        if self.given and self.unnamed is not None:
            named = F.coalesce(*(F.when(F.col(quoted(name)).isNotNull(), 1) for name in self.given))
            counts.append(F.count(F.when(~bad & named.isNull(), 1)).alias("null"))
        elif self.given and self.has is not None:
            ours, others = self.has
            counts.append(F.count(F.when(~bad & ~ours, 1)).alias("null"))
            counts.append(F.count(F.when(~bad & others, 1)).alias("others"))
        return self.rows.observe(seen, *counts).where(~bad).select(self.columns)

    def counted(self) -> dict[str, Any]:
        """What `good` reports; nothing if no field is known."""
        if (good := self.good(seen := Observation())) is None:
            return {}
        good.write.format("noop").mode("overwrite").save()
        return observed(seen)

    def check_named(self, counts: Mapping[str, Any]) -> None:
        """Raise `BadArgument` if no record has a value in a field of the schema, and some have others: all rows would be null.

        ``counts``: what `good` reports.
        """
        unnamed, good = unnamed_in(counts), counts.get("read", 0) - counts.get("bad", 0)
        others = counts.get("others", 0) if unnamed is None else unnamed["records"]
        if others and 0 < good == counts.get("null"):
            theirs = "others" if unnamed is None else ", ".join([*unnamed["fields"]][:SHOWN])
            said = f"no record has a value in a field of the schema ({', '.join(self.given[:SHOWN])}); they have {theirs}"
            raise BadArgument(f"the schema: {said}. No output was written; names must be equal, letter by letter")

    def set_aside(self, quarantine: Quarantine, outputs: Collection[str], judged: Callable[[str], None]) -> dict[str, int]:
        """Stage the records that do not decode for the quarantine.

        Returns how many, by the kind of reason. Raises `Corrupt` if these are not all records of the batches, and as
        `Quarantine.stage`.
        """
        seen = Observation()
        rows = self.judge().observe(seen, F.count(F.lit(1)).alias("read"))
        bad = rows.where(F.col("reason").isNotNull())
        if self.located is not None:
            bad = bad.withColumn("reason", self.located)

        def checked(bad: str) -> None:
            if (read := observed(seen).get("read")) != self.batches.records:
                raise Corrupt(f"{read} records were read, the manifest says {self.batches.records}", path=str(self.batches))
            judged(bad)

        return quarantine.stage(bad, outputs, checked)


def unnamed_in(counts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `Records.good` reports of fields that the schema does not name: how many records have some, and which."""
    if "unnamed" not in counts:
        return None
    found, names = 0, Counter[str]()
    for text in counts["unnamed"].splitlines():
        told = json.loads(text)
        found += told["records"]
        names.update(told["fields"])
    return {"records": found, "fields": dict(names.most_common(NAMES))}


def observed(seen: Observation) -> dict[str, Any]:
    """What a finished action reported; empty if the optimizer found that it need not look at the rows.

    In that case `Observation.get` never returns before Spark 4.2, which reports a row without columns.
    """
    report: Any = seen._jo
    deadline = time.monotonic() + 10  # Spark before 4.2 reports some moments after the action
    while not report.future().isCompleted():
        if time.monotonic() > deadline:
            return {}
        time.sleep(0.01)
    told = report.future().value().get().get()  # a row since Spark 4.1, before a map of Scala
    return seen.get if told.size() else {}


def read(
    spark: SparkSession,
    batches: Batches,
    codec: str,
    schema: StructType | None,
    options: Mapping[str, str],
    unfit: Unfit = lambda fields, field: None,
    rescued: str | None = None,
    agreed: Callable[[StructType, bool], StructType] = lambda fields, inferred: fields,
) -> Records:
    """The records of the batches, with the fields of the schema; None: those of JSON records are inferred.

    ``unfit``: why the outputs cannot hold a record that decodes; called whenever the records are used. ``rescued``: the name of a
    column for what the schema does not name. ``agreed``: what the outputs make of the schema, which was inferred or given. Raises
    `BadArgument` if the fields cannot be columns.
    """
    known = _options_of_spark(spark, codec)
    theirs = {name: value for name, value in options.items() if name.lower() in known}
    ours = {name: value for name, value in options.items() if name not in theirs}
    if useless := sorted(name for name in theirs if name.lower() in _NOT_OF_RECORDS):
        raise BadArgument(f"the read option {useless[0]!r} is for files, and here each record is a text of its own, in UTF-8")
    place = columns_of(batches.manifests[0])

    def load(columns: StructType, **more: str) -> DataFrame:
        return rows_of(spark, reader(batches.paths, Options({**ours, **more}), columns, batches.manifests), columns)

    value = F.col("value").cast("string")
    if codec in WHOLE:
        rows = load(place)
        bad = F.lit(False) if codec == "bytes" else ~F.is_valid_utf8(value)
        columns = [F.col(name) for name in place.names if name != BATCH] if codec == "bytes" else [value.alias("value")]
        why = F.when(bad, "not valid UTF-8").alias("reason")
        return Records(batches, rows, lambda: bad, columns, lambda: rows.select("*", why))

    # Any record may lack any value: NOT NULL is not enforced, as Spark's readers have it.
    if schema is None:
        record, shown = (agreed(each, True) for each in infer(spark, load(StructType([place["value"]])), theirs))
    else:
        record = shown = agreed(schema.toNullable(), False)
    _check_fields(spark, record, inferred=schema is None, rescued=rescued)

    def seen(name: str, value: Column) -> Column:
        """The field as the view has it."""
        return conformed(value, record[name].dataType, shown[name].dataType, str).alias(name)

    corrupt = "_corrupt_record"
    while corrupt in map(str.lower, (*record.names, rescued or "")):
        corrupt += "_"
    fields = StructType([field for field in record if field.name != METADATA])

    def by_spark(parser: Parser) -> Records:
        beside = [more.name for field in record if field.name == METADATA for more in _fields(field.dataType)]
        metadata = F.struct(*beside).alias(METADATA) if beside else F.lit(None).alias(METADATA)
        kept = [F.udf(_unnamed_of(fields), "string", useArrow=False)(value).alias(rescued)] if rescued else []
        given, has = fields.names if isinstance(parser, Json) and schema is not None and not rescued else [], None
        if given:
            keys = F.json_object_keys(value)
            kept = [keys.alias(NAMED)]
            ours = F.arrays_overlap(F.col(NAMED), F.array(*map(F.lit, given)))
            has = F.coalesce(ours, F.lit(False)), F.size(NAMED) > 0
        rows = load(StructType([place["value"], *(place[name] for name in beside)])).select(
            metadata, parser.parsed.alias("parsed"), *kept
        )
        columns = [F.col(name) if name == METADATA else seen(name, parser.field("parsed", name)) for name in record.names]
        columns += [F.col(quoted(rescued))] if rescued else []

        def unfit_of(parsed: str) -> Column | None:
            return unfit(fields, lambda name: parser.field(parsed, name))

        def judge() -> DataFrame:
            more = unfit_of("parsed")
            if more is None:
                return load(place).select("*", parser.reason.alias("reason"))
            judged = load(place).select("*", parser.reason.alias("reason"), parser.parsed.alias("parsed"))
            return judged.withColumn("reason", F.coalesce("reason", more)).drop("parsed")

        def bad() -> Column:
            return _any(parser.bad("parsed"), unfit_of("parsed"))

        return Records(batches, rows, bad, columns, judge, parser.located, given=given, has=has)

    if codec == "csv":
        return by_spark(Csv(spark, fields, corrupt, theirs))
    of_values = {name: value for name, value in theirs.items() if name.lower() not in _OF_INFERENCE}
    if codec == "json" and not {name.lower() for name in of_values} <= {"timezone"}:
        return by_spark(Json(spark, fields, of_values))

    typed = {"codec": codec, "columnNameOfCorruptRecord": corrupt, "mode": "PERMISSIVE"}
    if codec == "json":
        typed |= {"strict": "true", "timeZone": str(spark.conf.get("spark.sql.session.timeZone")), **of_values}
        if "fromtexts" not in map(str.lower, ours):
            typed["fromTexts"] = "true"
    reason, unnamed = StructField(REASON, StringType()), StructField(UNNAMED, StringType())
    extra = [StructField(rescued, StringType())] if rescued else []

    def unfit_typed() -> Column | None:
        return unfit(fields, lambda name: F.col(quoted(name)))

    kept, *beside = place  # the record itself, and where it was
    more = StructField(corrupt, BinaryType()), reason

    def judge() -> DataFrame:
        value, why, unfitting = F.col(corrupt), F.col(REASON), unfit_typed()
        if unfitting is not None:  # records that decode
            value, why = F.coalesce(value, f"{METADATA}.{kept.name}"), F.coalesce(why, unfitting)
        metadata = StructField(METADATA, StructType(beside if unfitting is None else [*place]))
        shown = value.alias("value"), *(F.col(f"{METADATA}.{each.name}") for each in beside), why.alias("reason")
        return load(StructType([*fields, *more, metadata]), **typed).select(*shown)

    try:
        keep = {"rescued": rescued} if rescued else {}
        decoded = load(StructType([*record, *extra, reason, unnamed]), **typed, **keep) if record.names else None
    except BadArgument:
        if codec == "json":
            with suppress(BadArgument):
                return by_spark(Json(spark, fields, of_values))  # it knows more types
        raise

    def bad_typed() -> Column:
        return _any(F.col(REASON).isNotNull(), unfit_typed())

    columns = [seen(name, F.col(quoted(name))) for name in record.names] + [F.col(quoted(each.name)) for each in extra]
    given = [] if schema is None or rescued else fields.names
    return Records(batches, decoded, bad_typed, columns, judge, unnamed=F.col(UNNAMED), given=given)


def _any(bad: Column, unfit: Column | None) -> Column:
    return bad if unfit is None else bad | unfit.isNotNull()


def rows_of(spark: SparkSession, source: BatchReader, columns: StructType) -> DataFrame:
    """What `spark.read.format("qewqew")` gives, and sooner: for a data source in Python, Spark starts three processes before the
    first task, one after the other, to find it, to make it and to plan it. Here the driver knows everything already.
    """
    parts = source.partitions()

    def read(numbers: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from source.read(parts[number])

    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(read, columns)


def damaged_of(spark: SparkSession, batches: Batches, options: Mapping[str, str]) -> dict[str, str]:
    """Which of the batches are damaged, by their ids, and why; reads all of them. ``options``: those of the store are used."""
    place = columns_of(batches.manifests[0])
    of_store = Options({name: value for name, value in options.items() if name.lower().startswith("fs.")})
    source = reader(batches.paths, of_store, StructType([place["offset"]]), batches.manifests)
    parts = source.partitions()
    return dict(spark.sparkContext.parallelize(parts, max(1, len(parts))).flatMap(source.damage).collect())


def start_workers(spark: SparkSession, batches: Batches) -> None:
    """Have Spark start its Python processes while it plans the first query, and not only then. Returns at once."""
    context = spark.sparkContext
    # Spark sets it for DataFrames, and these use no processes that have another environment.
    context.environment["SPARK_SIMPLIFIED_TRACEBACK"] = "1"
    tasks = min(context.defaultParallelism, 1 + batches.bytes // RUN_BYTES)

    def load(_: object) -> None:
        with suppress(ImportError):
            from qewqew_spark.source.batches import import_all

            import_all()

    def start() -> None:
        with suppress(Exception):  # the query will say what is wrong
            context.setJobDescription("QewQew: start Python")
            context.parallelize(range(tasks), tasks).foreach(load)

    Thread(target=start, daemon=True).start()


def _fields(kind: DataType) -> list[StructField]:
    return [*kind] if isinstance(kind, StructType) else []


def _options_of_spark(spark: SparkSession, codec: str) -> set[str]:
    """The names of the options of Spark's own parser for the codec, in small letters."""
    parsers: Any = spark.sparkContext._jvm.org.apache.spark.sql.catalyst  # type: ignore[union-attr]
    if codec not in ("csv", "json"):
        return set()
    known = parsers.csv.CSVOptions if codec == "csv" else parsers.json.JSONOptions
    return set(str(known.getAllOptions().mkString(" ")).lower().split())


# For inference, a record is the only element of an array, with something behind it. Spark ignores whatever follows the first
# value, so of a record with two JSON objects, or with one and garbage, the first would count; wrapped, it breaks the array.
# Names of fields of the records cannot collide with the wrapper's either.
_BEFORE, _BEHIND = '{"record":[', '],"behind":1}'


def infer(spark: SparkSession, raw: DataFrame, options: Mapping[str, str]) -> tuple[StructType, StructType]:
    """The schema of the JSON objects in ``value``, as `spark.read.json` infers it with the options; none: no fields.

    And the same with NULL in place of STRING where no record has a value, and Spark only guesses; see `untyped`.
    """
    text = F.col("value").cast("string")
    wrapped: Column = F.concat(F.lit(_BEFORE), text, F.lit(_BEHIND))
    objects = raw.where(F.is_valid_utf8(text) & text.rlike(r"^[ \t\r\n]*\{")).select(wrapped)
    found = _inferred(spark, objects, options)
    if any(name.lower() == _FILLED for name in options) or not has_untyped(untyped(found, None)):
        return found, found
    filled = {**options, _FILLED: "true"}
    known = untyped(found, _inferred(spark, objects.limit(SAMPLE), filled))
    if has_untyped(known):
        known = untyped(found, _inferred(spark, objects, filled))
    assert isinstance(known, StructType)
    return found, known


def _inferred(spark: SparkSession, objects: DataFrame, options: Mapping[str, str]) -> StructType:
    # Else Spark would infer one field of {"a":1} and {"A":1}, and then read nothing from the second, which has no "a".
    spark_reader = spark.read.options(**{**options, "mode": "DROPMALFORMED"})
    with setting(spark, "spark.sql.caseSensitive", "true"), blamed("a read option"):
        try:
            inferred = spark_reader.json(objects).schema
        except PySparkTypeError:  # before Spark 4.2 it takes no DataFrame
            inferred = spark_reader.json(objects.rdd.map(itemgetter(0))).schema
    kind = inferred["record"].dataType if "record" in inferred.names else None
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        return kind.elementType
    return StructType()


def parsed(schema: str) -> StructType:
    """The schema in a DDL text, without NOT NULL, which bad records break; raises `BadArgument`."""
    with blamed("the schema"):
        found = StructType.fromDDL(schema)
    if not isinstance(found, StructType) or not found.names:
        raise BadArgument(f"the schema {excerpt(schema, 200)} has no columns; write it like 'id BIGINT, name STRING'")
    for struct in _structs(found):
        for field in struct:
            kind = field.dataType
            while isinstance(kind, ArrayType | MapType):
                kind = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
            if isinstance(kind, CharType | VarcharType):  # Spark has these for columns of its tables only
                raise BadArgument(
                    f"the schema: the field {field.name!r} is {kind.simpleString().upper()}, and a record may hold a text of any "
                    f"length: make it STRING, and cut it with 'sql', like left({field.name}, {kind.length})"
                )
    return found.toNullable()


def check_names(spark: SparkSession, names: list[str], where: str, cure: str) -> None:
    """Raise `BadArgument` if Spark takes two of the names for one."""
    fold, seen = folding(spark), dict[str, str]()
    for name in names:
        if other := seen.get(fold(name)):
            raise BadArgument(f"{where} that Spark takes for one: {other!r} and {name!r}; {cure}")
        seen[fold(name)] = name


def _unnamed_of(fields: StructType) -> Callable[[str], str | None]:
    """What the fields do not name in a JSON object, as JSON; nothing of what Python's reader does not take."""
    return partial(unnamed_text, fields)


def _check_fields(spark: SparkSession, record: StructType, inferred: bool, rescued: str | None) -> None:
    for struct in _structs(record):
        check_names(spark, struct.names, "the records have fields", "give a schema")
    taken = {REASON, UNNAMED, METADATA} if inferred else {REASON, UNNAMED}
    if clash := taken & set(record.names):
        raise BadArgument(f"the records have a field {min(clash)!r}, a name that the job itself uses; give a schema without it")
    if rescued is not None:
        names = [*record.names, REASON, UNNAMED, METADATA, rescued]
        check_names(spark, names, "with 'rescued' there are columns", "give it another name")


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
