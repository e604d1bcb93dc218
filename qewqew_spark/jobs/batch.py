"""The application that `spark-submit` runs: one batch of JSON records in, tables out.

::

    spark-submit .../qewqew_spark/jobs/batch.py BATCH --output '{"path": "/data/orders"}' [--schema DDL] ...

Every record of the batch ends either in the view ``batch``, which the outputs are made of, or in the
quarantine with the reason why it does not decode. Outputs and quarantine are overwritten under the
batch's id, so a job that runs again on the same batch leaves one result. See docs/spark.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # py4j has no types
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, IntegerType, MapType, StringType, StructField, StructType
from pyspark.storagelevel import StorageLevel

try:
    from qewqew_core import manifest
    from qewqew_core.errors import BadArgument, CorruptQueue, QewQewError
    from qewqew_spark.output import FILE_FORMATS, ROW_FORMATS, Output, check_outputs
    from qewqew_spark.source import QewqewDataSource, local_path
except ModuleNotFoundError as error:
    # Submitted by its path, where the package is not installed: sys.path has this file's directory only.
    sys.exit(
        f"qewqew: error: {error}; install qewqew (with its extra 'spark') into {sys.executable}, which runs Spark's Python, "
        "or give spark-submit its packages as a zip with --py-files"
    )

VIEW = "batch"  # the name of the view, and of the directory level and partition column made of the batch's id


class TooManyBadRecords(QewQewError):
    """More records do not decode than ``max_bad_records`` allows. They are in the quarantine; no output was written."""


def run(
    spark: SparkSession,
    batch: str,
    outputs: Sequence[Output],
    *,
    schema: str | None = None,
    quarantine: str | None = None,
    max_bad_records: int | None = None,
) -> dict[str, Any]:
    """Decode the batch and write the outputs; returns what the result file holds.

    ``batch``: its directory or manifest. ``schema``: of the records, as DDL; None: inferred from
    them. ``quarantine``: where the records go that do not decode, to ``<quarantine>/batch=<id>``; None:
    beside the first output that has a path, with ``-quarantine`` appended. ``max_bad_records``: if more do not
    decode, nothing but the quarantine is written; None: any number.

    Raises `BadArgument` and `BadManifest` before anything is written, `TooManyBadRecords`,
    and what Spark raises when a write fails (then the same call may be made again).
    """
    began = time.monotonic()
    batch = local_path(batch)
    description = manifest.load(batch)
    if not re.fullmatch(r"[\w.-]+", description.id):
        raise BadArgument(f"{batch}: the id {description.id!r} cannot be the name of a directory")
    under = f"{VIEW}={description.id}"
    targets = [None if output.path is None else f"{output.path.rstrip('/')}/{under}" for output in outputs]
    quarantine = check_outputs(outputs, quarantine, max_bad_records)
    quarantined = f"{quarantine}/{under}"
    for output in outputs:
        if output.format.lower() not in ROW_FORMATS | FILE_FORMATS:
            _check_format(spark, output.format)
    given = None if schema is None else _parse(schema)

    # Explicitly, and not only by discovery, which any broken pyspark_* module on the path prevents.
    spark.dataSource.register(QewqewDataSource)
    raw = spark.read.format("qewqew").load(batch)
    record = infer(spark, raw) if given is None else given
    for struct in _structs(record):
        _check_names(spark, struct.names, "the records have fields", "give a schema")
    with _blamed("the schema"):
        decoded, bad = decode(raw, record)
    # The decoded rows serve the count, the quarantine and every output, so they are kept rather than
    # read and parsed each time: in memory as far as it goes, then on the executors' disks.
    decoded.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        decoded.where(F.col(bad).isNull()).drop(bad).createOrReplaceTempView(VIEW)
        writable = given is not None or bool(record.names)
        tables = [_table(spark, output) for output in outputs] if writable else []

        counts = {
            row["reason"]: int(row["count"]) for row in decoded.groupBy(F.col(bad)["reason"].alias("reason")).count().collect()
        }
        good = counts.pop(None, 0)
        failed = sum(counts.values())
        if good + failed != description.records:
            raise CorruptQueue(f"{good + failed} records were read, the manifest says {description.records}", path=batch)
        if failed:
            rows = decoded.where(F.col(bad).isNotNull()).select(f"{bad}.*")
            rows.write.mode("overwrite").parquet(quarantined)
        else:
            _delete(spark, quarantined)  # of an earlier run, under another schema
        if max_bad_records is not None and failed > max_bad_records:
            listed = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
            raise TooManyBadRecords(
                f"{failed} of {description.records} records do not decode ({listed}), max_bad_records is {max_bad_records}; "
                f"they are in {quarantined}, no output was written"
            )
        if writable:
            written = [_write(table, output, target) for table, output, target in zip(tables, outputs, targets, strict=True)]
        else:
            written = [0] * len(outputs)
            for target in filter(None, targets):
                _delete(spark, target)
    finally:
        spark.catalog.dropTempView(VIEW)
        decoded.unpersist()
    return {
        "batch": description.id,
        "attempt": description.attempt,
        "read": description.records,
        "good": good,
        "bad": failed,
        "outputs": [
            {"path": target, "format": output.format, "written": rows}
            for output, target, rows in zip(outputs, targets, written, strict=True)
        ],
        "quarantine": quarantined if failed else None,
        "note": None if writable else "no schema was given and no record has a field to infer one from: no output was written",
        "seconds": round(time.monotonic() - began, 3),
    }


# A record is parsed as the only element of an array, with something behind it. Spark's parser ignores
# whatever follows the first value, so of a record with two JSON objects, or with one and garbage, the rest
# would vanish silently; wrapped, it breaks the array, makes it longer, or hides what is behind it.
# Names of fields of the records cannot collide with the wrapper's either.
_BEFORE, _BEHIND = '{"record":[', '],"behind":1}'


def _wrapped() -> Column:
    return F.concat(F.lit(_BEFORE), F.col("value").cast("string"), F.lit(_BEHIND))


def infer(spark: SparkSession, raw: DataFrame) -> StructType:
    """The schema of the JSON objects in ``value``, as `spark.read.json` infers it; no fields if there are none."""
    text = F.col("value").cast("string")
    objects = raw.where(F.is_valid_utf8(text) & text.rlike(r"^[ \t\r\n]*\{")).select(_wrapped())
    sensitive = spark.conf.get("spark.sql.caseSensitive")
    # Else Spark would infer one field of {"a":1} and {"A":1}, and then read nothing from the second, which has no "a".
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        inferred = spark.read.json(objects, mode="DROPMALFORMED").schema
    finally:
        spark.conf.set("spark.sql.caseSensitive", str(sensitive))
    kind = inferred["record"].dataType if "record" in inferred.names else None
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        return kind.elementType
    return StructType()


def decode(raw: DataFrame, schema: StructType) -> tuple[DataFrame, str]:
    """The records with their fields as columns, and the name of one more column: null where the record is good.

    Where it is bad, that column holds the columns of ``raw`` and ``reason``.
    """
    wrapper = StructType(
        [
            StructField("record", ArrayType(schema)),
            StructField("behind", IntegerType()),
            StructField("corrupt", StringType()),
        ]
    )
    text = F.col("value").cast("string")
    records, behind, corrupt = F.col("json.record"), F.col("json.behind"), F.col("json.corrupt")
    record = F.get(records, F.lit(0))
    is_object = text.rlike(r"^[ \t\r\n]*\{")
    reason = (
        F.when(F.length("value") == 0, "empty record")
        .when(~F.is_valid_utf8(text), "not valid UTF-8")
        .when(corrupt.isNull() & behind.isNotNull() & (F.size(records) == 1) & record.isNotNull(), F.lit(None))
        .when(~is_object, "not a JSON object")
        .when(corrupt.isNull() & (F.size(records) > 1), "more than one JSON value")
        .when(behind.isNull() | records.isNull(), "malformed JSON")
        .otherwise("a value does not fit the schema")
    )
    bad = "bad"
    while bad in map(str.lower, schema.names):
        bad += "_"
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "corrupt"}
    parsed = raw.select("*", F.from_json(_wrapped(), wrapper, options).alias("json"))
    judged = parsed.select(*raw.columns, record.alias("record"), reason.alias("reason"))
    details = F.struct(*raw.columns, "reason")
    columns = ["record.*"] if schema.names else []
    return judged.select(*columns, F.when(F.col("reason").isNotNull(), details).alias(bad)), bad


def _check_format(spark: SparkSession, name: str) -> None:
    """Raise `BadArgument` if this Spark does not know the format: it would be found out only after other outputs were written."""
    try:
        # Reading a path that cannot exist is the one public way to look a format up; any other failure is none of ours.
        spark.read.format(name).schema("x INT").load("/nonexistent/qewqew")
    except (PySparkException, Py4JJavaError) as error:
        if re.search("Failed to find (the )?data source", explain(error)):
            raise BadArgument(f"output: format {name!r}: {explain(error)}") from error


def _parse(schema: str) -> StructType:
    with _blamed("the schema"):
        parsed = StructType.fromDDL(schema)
    if not isinstance(parsed, StructType) or not parsed.names:
        raise BadArgument(f"the schema {schema!r:.200} has no columns; write it like 'id BIGINT, name STRING'")
    return parsed


def _table(spark: SparkSession, output: Output) -> DataFrame:
    """What the output writes, analysed but not computed; raises `BadArgument`."""
    if output.sql is None:
        table = spark.table(VIEW)
    else:
        with _blamed(f"the query {output.sql!r:.200}"):
            # spark.sql would execute a command (INSERT, DROP ...) at once: only a query may pass.
            spark._jsparkSession.sessionState().sqlParser().parseQuery(output.sql)
            table = spark.sql(output.sql)
    _check_names(spark, table.columns, "an output has columns", "rename or drop one with 'sql'")
    if output.path is not None and _named(spark, VIEW, table.columns):
        # It would be hidden by the partition column when the table is read.
        raise BadArgument(
            "output: the column 'batch' collides with the directory level batch=<id>; rename it with 'sql': "
            "SELECT * EXCEPT (batch), batch AS other FROM batch"
        )
    _check_names(spark, output.partition_by, "an output has columns in 'partition_by'", "name each once")
    for column in output.partition_by:
        if not _named(spark, column, table.columns):
            raise BadArgument(f"output: no column {column!r} to partition by; there are {', '.join(table.columns)}")
    if output.partition_by and len(output.partition_by) >= len(table.columns):
        raise BadArgument("output: 'partition_by' has every column, so none is left to be written")
    return table


def _write(table: DataFrame, output: Output, target: str | None) -> int:
    """Write the output and return how many rows went into it."""
    observation = Observation()
    writer = table.observe(observation, F.count(F.lit(1)).alias("rows")).write.format(output.format)
    for name, value in output.options.items():
        writer = writer.option(name, value)
    if output.partition_by:
        writer = writer.partitionBy(*output.partition_by)
    if target is None:
        writer.mode("append").save()
    else:
        # In the mode "dynamic" a partition that this run no longer has would survive from the last one.
        writer.mode("overwrite").option("partitionOverwriteMode", "static").save(target)
    return int(observation.get["rows"])


def _delete(spark: SparkSession, path: str) -> None:
    """Remove a directory in whatever file system Spark writes to; it need not exist."""
    jvm: Any = spark.sparkContext._jvm  # the only way to Hadoop's file systems from Python
    target = jvm.org.apache.hadoop.fs.Path(path)
    target.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).delete(target, True)


def _named(spark: SparkSession, name: str, columns: Sequence[str]) -> bool:
    """Is it a column, in the sense of this session?"""
    if spark.conf.get("spark.sql.caseSensitive") == "true":
        return name in columns
    return name.lower() in map(str.lower, columns)


def _check_names(spark: SparkSession, names: Sequence[str], where: str, cure: str) -> None:
    seen: list[str] = []
    for name in names:
        if _named(spark, name, seen):
            same = next(other for other in seen if other.lower() == name.lower())
            raise BadArgument(f"{where} that Spark takes for one: {same!r} and {name!r}; {cure}")
        seen.append(name)


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


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """What does not pass Spark's parser or analysis within is the fault of ``what``: raise `BadArgument`."""
    try:
        yield
    except AnalysisException as error:
        raise BadArgument(f"{what}: {explain(error)}") from error


def explain(error: BaseException) -> str:
    """The one line of an error that says what happened, out of the traces around it."""
    text = str(error).strip()
    if isinstance(error, Py4JJavaError):
        text = text.partition("\n: ")[2] or text
    if isinstance(error, QewQewError) or not text:
        return " ".join((text or repr(error)).split("\n"))
    if ours := re.findall(r"qewqew_core\.errors\.\w+: (.+)", text):  # raised in one of Spark's Python processes
        return str(ours[-1])
    head, mark, trace = text.partition("Traceback (most recent call last):")
    if mark:
        lines = [line for line in trace.partition("\n\tat ")[0].split("\n") if line.strip() and "SQLSTATE" not in line]
        return f"{' '.join(head.split())} {lines[-1].strip()}".strip() if lines else text.split("\n")[0]
    causes = re.findall(r"^Caused by: (.+)", text, re.MULTILINE)
    first = text.split("\n")[0].rstrip(";")
    return first if not causes or causes[-1] in first else f"{first} (caused by {causes[-1]})"


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without Spark; raises `BadArgument`."""
    parser = _Arguments(prog="batch.py", description="Decode a batch of JSON records and write it as tables.", allow_abbrev=False)
    parser.add_argument("batch", metavar="BATCH", help="directory or manifest.json of the batch")
    parser.add_argument(
        "--output",
        action="append",
        required=True,
        metavar="JSON",
        help='{"path": ..., "sql": ..., "format": ..., "partition_by": [...], "options": {...}}; may be repeated',
    )
    parser.add_argument("--schema", metavar="DDL", help="of the records, like 'id BIGINT, name STRING'; default: inferred")
    parser.add_argument(
        "--quarantine", metavar="PATH", help="for records that do not decode; default: first output's path + '-quarantine'"
    )
    parser.add_argument("--max-bad-records", type=int, metavar="N", help="fail if more do not decode; default: any number")
    parser.add_argument("--result", metavar="FILE", help="where to write what was done, as JSON, when all is done")
    found = parser.parse_args(argv)
    found.output = [Output.from_json(text) for text in found.output]
    check_outputs(found.output, found.quarantine, found.max_bad_records)
    found.batch = local_path(found.batch)
    manifest.load(found.batch)
    if found.result is not None and not os.path.isdir(os.path.dirname(os.path.abspath(found.result))):
        raise BadArgument(f"the directory of the result file {found.result!r} does not exist")
    return found


def write_result(path: str, result: Mapping[str, Any]) -> None:
    """Write the result so that the file is there in full or not at all (mode 0600)."""
    path = os.path.abspath(path)
    descriptor, temporary = tempfile.mkstemp(prefix=".qewqew-", dir=os.path.dirname(path))
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(result, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line printed is ``qewqew result: JSON``, or ``qewqew: error: ...`` on stderr.

    Returns the exit status: 0, 2 for bad arguments (nothing was written), 1 for any other failure.
    """
    # PySpark logs each error that it raises, with the whole trace of the JVM; what a reader needs is the last line.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    spark: SparkSession | None = None
    try:
        found = arguments(argv)
        spark = SparkSession.builder.appName("qewqew batch").getOrCreate()
        result = run(
            spark,
            found.batch,
            found.output,
            schema=found.schema,
            quarantine=found.quarantine,
            max_bad_records=found.max_bad_records,
        )
        if found.result is not None:
            write_result(found.result, result)
        status, stream, line = 0, sys.stdout, f"qewqew result: {json.dumps(result)}"
    except Exception as error:
        if not isinstance(error, (QewQewError, PySparkException, Py4JJavaError, OSError)):
            traceback.print_exc()  # not a mistake of the user's but one of ours
        status, stream, line = 2 if isinstance(error, BadArgument) else 1, sys.stderr, f"qewqew: error: {explain(error)}"
    if spark is not None:
        # Stopped before the last line is printed, and silently, so that it is the last.
        with suppress(Exception):  # a JVM that died cannot be stopped, and is not what to report
            spark.sparkContext.setLogLevel("OFF")
            spark.stop()
    sys.stdout.flush()
    print(line, file=stream, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
