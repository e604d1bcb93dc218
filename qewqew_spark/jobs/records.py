"""The records of a batch as the job sees them: those that decode, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructField, StructType

from qewqew_core.batch.manifest import Manifest
from qewqew_core.errors import BadArgument, Corrupt
from qewqew_spark.data_source import QewqewDataSource
from qewqew_spark.jobs.explaining import blamed
from qewqew_spark.jobs.writing import delete, setting

REASON, METADATA = "_corrupt_reason", "_metadata"  # columns of a typed read


@dataclass(frozen=True)
class Records:
    """Of one batch, in two reads, because few batches need the second."""

    batch: str
    description: Manifest
    good: DataFrame | None  # what decodes, as columns; None if no field is known
    judged: DataFrame | None  # all, with the source's columns and `reason`, which is null where a record decodes; None: all do

    def set_aside(self, spark: SparkSession, quarantine: str) -> dict[str, int]:
        """Put the records that do not decode into the directory, in place of what is there; how many, by reason.

        Raises `Corrupt` if these are not all records of the batch.
        """
        if self.judged is None:
            delete(spark, quarantine)
            return {}
        seen = Observation()
        judged = self.judged.observe(seen, F.count(F.lit(1)).alias("rows"))
        judged.where(F.col("reason").isNotNull()).write.mode("overwrite").parquet(quarantine)
        read = int(seen.get["rows"])
        if read != self.description.records:
            raise Corrupt(f"{read} records were read, the manifest says {self.description.records}", path=self.batch)
        counted = spark.read.parquet(quarantine).groupBy(F.substring_index("reason", ": ", 1).alias("reason")).count().collect()
        if not counted:
            delete(spark, quarantine)
        return {row["reason"]: int(row["count"]) for row in sorted(counted)}


def read(
    spark: SparkSession, batch: str, description: Manifest, codec: str, schema: StructType | None, options: Mapping[str, str]
) -> Records:
    """The records of the batch, with the fields of the schema; None: those of JSON records are inferred.

    Raises `BadArgument` if they cannot be columns.
    """

    def load(columns: StructType | None = None, **more: str) -> DataFrame:
        wanted = {**options, **more}
        # As Spark would when it plans the first action, which is after `load`, and wrapped into errors of its own.
        source = QewqewDataSource({**wanted, "path": batch})
        columns = source.schema() if columns is None else columns
        source.reader(columns)
        return spark.read.format("qewqew").options(**wanted).schema(columns).load(batch)

    raw = load()
    value = F.col("value").cast("string")
    if codec == "bytes":
        return Records(batch, description, raw, None)
    if codec == "text":
        reason = F.when(~F.is_valid_utf8(value), "not valid UTF-8").alias("reason")
        return Records(
            batch, description, raw.where(F.is_valid_utf8(value)).select(value.alias("value")), raw.select("*", reason)
        )
    record = infer(spark, raw) if schema is None else schema
    _check_fields(spark, record, inferred=schema is None)

    corrupt = "_corrupt_record"
    while corrupt in map(str.lower, record.names):
        corrupt += "_"
    typed = {"codec": codec, "strict": "true", "columnNameOfCorruptRecord": corrupt}
    good = load(record, mode="DROPMALFORMED", **typed) if record.names else None
    place = StructType([field for field in raw.schema if field.name != "value"])
    more = StructField(corrupt, BinaryType()), StructField(REASON, StringType()), StructField(METADATA, place)
    fields = [field for field in record if field.name != METADATA]
    judged = load(StructType([*fields, *more]), mode="PERMISSIVE", **typed)
    columns = F.col(corrupt).alias("value"), F.col(f"{METADATA}.*"), F.col(REASON).alias("reason")
    return Records(batch, description, good, judged.select(*columns))


# For inference, a record is the only element of an array, with something behind it. Spark ignores whatever follows the first
# value, so of a record with two JSON objects, or with one and garbage, the first would count; wrapped, it breaks the array.
# Names of fields of the records cannot collide with the wrapper's either.
_BEFORE, _BEHIND = '{"record":[', '],"behind":1}'


def infer(spark: SparkSession, raw: DataFrame) -> StructType:
    """The schema of the JSON objects in ``value``, as `spark.read.json` infers it; no fields if there are none."""
    text = F.col("value").cast("string")
    wrapped: Column = F.concat(F.lit(_BEFORE), text, F.lit(_BEHIND))
    objects = raw.where(F.is_valid_utf8(text) & text.rlike(r"^[ \t\r\n]*\{")).select(wrapped)
    # Else Spark would infer one field of {"a":1} and {"A":1}, and then read nothing from the second, which has no "a".
    with setting(spark, "spark.sql.caseSensitive", "true"):
        try:
            inferred = spark.read.json(objects, mode="DROPMALFORMED").schema
        except PySparkTypeError:  # before Spark 4.2 it takes no DataFrame
            inferred = spark.read.json(objects.rdd.map(itemgetter(0)), mode="DROPMALFORMED").schema
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
