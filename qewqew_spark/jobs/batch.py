"""The application that `spark-submit` runs: one batch of records in, tables out.

::

    spark-submit .../qewqew_spark/jobs/batch.py BATCH --output '{"path": "/data/orders"}' [--schema DDL] ...

Every record of the batch ends either in the view ``batch``, which the outputs are made of, or in the
quarantine with the reason why it does not decode. Outputs and quarantine are overwritten under the
batch's id, so a job that runs again on the same batch leaves one result. See docs/spark/job.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NoReturn

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from pyspark.storagelevel import StorageLevel

from qewqew_core.secrecy import excerpt

try:
    from qewqew_core import references, secrecy
    from qewqew_core.batch import manifest
    from qewqew_core.errors import BadArgument, BatchConflict, Corrupt, QewQewError
    from qewqew_spark.data_source import register
    from qewqew_spark.jobs import records
    from qewqew_spark.jobs.agreeing import agreed
    from qewqew_spark.jobs.explaining import blamed_write, explain
    from qewqew_spark.jobs.fitting import unfit
    from qewqew_spark.jobs.output import BATCH, CODECS, SCHEMA_EVOLUTIONS, Option, Output, check_arguments, check_places
    from qewqew_spark.jobs.quarantine import Quarantine
    from qewqew_spark.jobs.querying import TransformFailed, has_rows, table_of
    from qewqew_spark.jobs.records import observed
    from qewqew_spark.jobs.routing import Routed, routed
    from qewqew_spark.jobs.sinks import sink_of
    from qewqew_spark.jobs.writing import Sink
    from qewqew_spark.options import Options, local_path
    from qewqew_spark.tables.session import copy_of, folding
except ModuleNotFoundError as error:
    # Submitted by its path, where the package is not installed: sys.path has this file's directory only.
    sys.exit(
        f"qewqew: error: {error}; install qewqew (with its extra 'spark') into {sys.executable}, which runs Spark's Python, "
        "or give spark-submit its packages as a zip with --py-files"
    )


NOTHING = "no schema was given and no record has a field to infer one from: an output without columns was not written"
DAMAGED = 3  # the exit status if all is committed except damaged batches: somebody must look after them
FEW = 3  # bad records that an error names
KEPT = "the batch was there already, and its bad records are those of then: by now, others would be bad"


class TooManyBadRecords(QewQewError):
    """More records do not decode than ``max_bad_records`` allows, or all. They are in the quarantine; no output was written."""


def run(
    spark: SparkSession,
    batch: str | records.Batches,
    outputs: Sequence[Output],
    *,
    codec: str = "json",
    schema: str | None = None,
    read_options: Mapping[str, Option] | None = None,
    quarantine: str | None = None,
    max_bad_records: int | None = None,
    schema_evolution: str = "merge",
    rescued: str | None = None,
) -> dict[str, Any]:
    """Decode the batch and write the outputs; returns what the result file holds.

    ``batch``: its directory, manifest or URL; or what is at hand of one, or of several. ``codec``: what the records are, one
    of `CODECS`. ``schema``: of the records, as DDL; None: inferred from JSON records. ``read_options``: of the data source.
    ``quarantine``: where the records go that do not decode, to ``<quarantine>/batch=<id>``; None: beside the first output that
    has a path, with ``-quarantine`` appended. ``max_bad_records``: if more do not decode, nothing but the quarantine is
    written; None: any number, but not all. ``schema_evolution``: see `evolution.new_columns`. ``rescued``: the name of a column
    of the view for what the schema does not name in a record, as JSON.

    Threads may share the session, which stays as it is: each call works in a copy, which has the view, and which a transform
    gets as ``batch.sparkSession``.

    Raises `BadArgument` and `BadManifest` before anything is written, `TooManyBadRecords`, `BatchConflict` if a table has
    some of several batches already, or the batch from a run in which other records were bad, and what Spark raises when a write
    fails (then the same call may be made again).
    """
    try:
        with copy_of(spark) as session:
            return run_in(
                session,
                batch,
                outputs,
                codec=codec,
                schema=schema,
                read_options=read_options,
                quarantine=quarantine,
                max_bad_records=max_bad_records,
                schema_evolution=schema_evolution,
                rescued=rescued,
            )
    finally:
        for output in outputs:
            with suppress(PySparkException, Py4JJavaError):  # there may be no such table
                if output.table is not None and (not output.appends or output.commit == "spark"):
                    spark.catalog.refreshTable(output.table)  # of whose files a session keeps a list


def run_in(
    spark: SparkSession,
    batch: str | records.Batches,
    outputs: Sequence[Output],
    *,
    codec: str = "json",
    schema: str | None = None,
    read_options: Mapping[str, Option] | None = None,
    quarantine: str | None = None,
    max_bad_records: int | None = None,
    schema_evolution: str = "merge",
    rescued: str | None = None,
) -> dict[str, Any]:
    """`run` in the session itself, which nobody else may use meanwhile, and which then has the format `qewqew` and a setting."""
    began = time.monotonic()
    quarantine = check_arguments(
        outputs,
        codec=codec,
        schema=schema,
        read_options=read_options,
        quarantine=quarantine,
        max_bad_records=max_bad_records,
        schema_evolution=schema_evolution,
        rescued=rescued,
    )
    options = references.resolved(read_options or {})
    batches = batch_at(batch, options) if isinstance(batch, str) else batch
    given = None if schema is None else records.parsed(schema)
    fold = folding(spark)

    def place_of(output: Output) -> Sink:
        # What the records have beyond the columns is rescued when they are read, and only the column for it is new.
        policy = "merge" if schema_evolution == "rescue" and output.is_plain else schema_evolution
        return sink_of(spark, output, batches.manifests, policy)

    def agreeing(record: StructType, inferred: bool) -> StructType:
        if inferred or schema_evolution == "rescue":
            return agreed(record, chain(*places), schema_evolution, inferred)
        return record

    places = [[] if output.route else [place_of(output)] for output in outputs]  # of each output, one for each route
    if any(output.transform for output in outputs):  # which may read more; nothing else does by the format, and it takes a second
        register(spark)
        # Spark 4.2.0 hangs where a Python function takes rows that were persisted, as those of several outputs are.
        spark.conf.set("spark.sql.inMemoryColumnarStorage.enableVectorizedReader", "false")

    def unfitting(fields: StructType, column: Callable[[str], Column]) -> Column | None:
        return unfit(outputs, chain(*places), fold, fields, column)

    found = records.read(spark, batches, codec, given, options, unfitting, rescued, agreeing)
    name = f"records of {batches.ids[0]}"
    seen = Observation(name)
    persisted: DataFrame | None = None
    note: str | None = None

    def made_of(good: DataFrame | None) -> list[DataFrame]:
        if good is None:
            return []
        if not all(output.is_plain for output in outputs):  # it takes Spark a moment
            good.createOrReplaceTempView(BATCH)
        return [table_of(spark, output, good, batches.manifests) for output in outputs]

    def write(early: bool) -> None:
        # What nobody sees before its commit goes first: if it fails, nothing has been replaced.
        for number in sorted(range(len(tables)), key=lambda at: not sinks[at].staged):
            if made[number] and first[number] == early:
                rows[number] = _write(sinks[number], tables[number])

    aside = Quarantine(spark, quarantine, batches.ids)
    aside.recover()

    def judged(bad: str) -> None:
        for sink in sinks:
            sink.judged(bad)

    try:
        if found.rows is not None and any(output.route for output in outputs):
            persisted = found.rows.persist(StorageLevel.MEMORY_AND_DISK)
            for of, output, table in zip(places, outputs, made_of(found.good(Observation())), strict=True):
                if output.route:
                    of += map(place_of, routed(output, table, fold))
            check_places([sink.output for sink in chain(*places)], quarantine)
        sinks = [*chain(*places)]
        written_to = {sink.output.place or sink.output.format for sink in sinks}
        rows: list[int | None] = [None] * len(sinks)
        made = [False] * len(sinks)  # has the output a column to write?
        good = found.good(seen)
        tables = [
            sink.output.rows(table) if isinstance(sink.output, Routed) else table
            for table, of in zip(made_of(good), places, strict=False)
            for sink in of
        ]
        for number, (sink, table) in enumerate(zip(sinks, tables, strict=False)):
            with blamed_write(f"output: {sink.output.place or sink.output.format}"):
                tables[number] = sink.settled(table)
                if has_rows(sink.output, tables[number]):
                    made[number] = True
                    sink.check(tables[number])
        # What nobody sees before its commit is written in the pass that counts the records.
        first = [columns and sink.early() for sink, columns in zip(sinks, made, strict=True)]
        try:
            if good is not None:
                passes = sum(str(table._jdf.queryExecution().analyzed()).count(f"{name},") for table in tables)
                if passes + (not any(first)) > 1 and persisted is None:
                    # To decode costs more than to keep: in memory as far as it goes, then on the executors' disks.
                    persisted = good.persist(StorageLevel.MEMORY_AND_DISK)
                if not any(first):
                    good.write.format("noop").mode("overwrite").save()
                write(early=True)
            counts = {} if good is None else observed(seen)
            if counts.get("read") != batches.records:
                # A query has not read all, or reads some twice, or a lost task was counted twice.
                counts = found.counted()
            whole = counts.get("read") == batches.records
            try:
                if whole and counts["bad"] == 0:
                    reasons = aside.stage_none(written_to, judged)
                else:
                    reasons = found.set_aside(aside, written_to, judged)
                    if whole and counts["bad"] != sum(reasons.values()):
                        raise Corrupt(f"{counts['bad']} bad records were found first, then {reasons}", path=str(batches))
            except BatchConflict:
                # Columns have other types since, maybe by another batch. What this batch has come to is whole.
                stay = [sink.stays for sink in sinks]
                kept = aside.keep([each.bad for each in stay if each]) if all(stay) else None
                if kept is None:
                    raise
                reasons, note = kept, KEPT
            bad = sum(reasons.values())
            if 0 < bad == batches.records if max_bad_records is None else bad > max_bad_records:
                listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                said = f"{bad} of {batches.records} records do not decode ({listed}), "
                said += "which is all of them" if max_bad_records is None else f"max_bad_records is {max_bad_records}"
                few = "".join(f"; {each}" for each in aside.first(FEW))
                where = f"they are in {aside.place}" if aside.show() else f"{aside.place} stays, as outputs lack what is there"
                raise TooManyBadRecords(f"{said}; {where}, no output was written{few}")
            if whole and note is None:
                found.check_named(counts)
            write(early=False)
        except BaseException:
            for sink in sinks:
                with suppress(Exception):  # what went wrong is what to report; the next run of the batch removes the rest
                    sink.abort()
            raise
        for sink, written in zip(sinks, made, strict=True):
            sink.commit() if written else sink.clear()
        if note is None:
            aside.commit()
    finally:
        with suppress(Exception):  # as of the sinks
            aside.abort()
        spark.catalog.dropTempView(BATCH)
        if persisted is not None:
            persisted.unpersist()
    one = {"batch": batches.ids[0], "attempt": batches.manifests[0].attempt}
    return {
        **(one if len(batches.ids) == 1 else {"batches": batches.ids}),
        "codec": codec,
        "read": batches.records,
        "bytes": batches.bytes,
        "good": batches.records - bad,
        "bad": bad,
        "reasons": reasons,
        "unnamed": records.unnamed_in(counts),
        "outputs": [
            {**sink.place, "format": sink.output.format, "written": count or 0, "left_out": [*sink.left_out, *sink.untyped]}
            for sink, count in zip(sinks, rows, strict=True)
        ],
        "quarantine": aside.place if bad else None,
        "note": NOTHING if found.rows is None or not all(made) else note,
        "seconds": round(time.monotonic() - began, 3),
    }


def batch_at(batch: str, options: Mapping[str, Any]) -> records.Batches:
    """The batch at this path or URL; raises `BadManifest`, `BadArgument`, `StoreError`."""
    path = local_path(batch)
    return records.Batches([path], [manifest.load(path, Options(options).under("fs."))])


def _write(sink: Sink, table: DataFrame) -> int:
    """Write the output and return how many rows went into it."""
    seen = Observation()
    with blamed_write(f"output: {sink.output.place or sink.output.format}"):
        sink.write(table.observe(seen, F.count(F.lit(1)).alias("rows")))
    return int(observed(seen)["rows"])


# What an application is called, what it does, and what its first argument is.
SOURCES = {
    "batch": ("Decode a batch of records and write it as tables.", "directory, manifest.json or URL of the batch"),
    "drain": ("Write all batches under a prefix to one table.", "directory or URL under which batches are published"),
}


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def arguments(argv: Sequence[str] | None = None, source: str = "batch") -> argparse.Namespace:
    """The command line, checked as far as it can be without Spark; raises `BadArgument`. ``source``: one of `SOURCES`."""
    description, help = SOURCES[source]
    parser = _Arguments(prog=f"{source}.py", description=description, allow_abbrev=False)
    add = parser.add_argument
    add(source, metavar=source.upper(), help=help)
    fields = '{"path" or "table": …, "sql" or "transform": …, "format": …, "route": …, "keys": […], "options": {…}, …}'
    add("--output", dest="outputs", action="append", required=True, metavar="JSON", help=f"{fields}; may be repeated")
    add("--codec", default="json", help=f"what the records are: {', '.join(CODECS)}; default: json")
    add("--schema", metavar="DDL", help="fields of the records, like 'id BIGINT, name STRING'; default: inferred from JSON")
    text = "an option of the codec, like sep=; for CSV; may be repeated"
    add("--read-option", dest="read_options", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--quarantine", metavar="PATH", help="where bad records go; default: first output's path + '-quarantine'")
    add("--max-bad-records", type=int, metavar="N", help="fail if more do not decode; default: if all do not")
    text = f"when columns are new or missing: {', '.join(SCHEMA_EVOLUTIONS)}; default: merge"
    add("--schema-evolution", default="merge", metavar="POLICY", help=text)
    text = "a column for what the schema does not name, as JSON; default: it is counted only"
    add("--rescued", metavar="COLUMN", help=text)
    add("--result", metavar="FILE", help="where to write the result as JSON, when all else is done")
    found = parser.parse_args(argv)
    found.outputs = [Output.from_json(text) for text in found.outputs]
    pairs = [pair.partition("=") for pair in found.read_options]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise BadArgument(f"argument --read-option: write it like NAME=VALUE, not {excerpt(wrong[0], 80)}")
    found.read_options = {name: value for name, _, value in pairs}
    references.refuse_in_clear("argument --read-option", found.read_options)
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
    """The application; see `application`."""

    def job(start: Callable[[], SparkSession], batch: str, outputs: Sequence[Output], **found: Any) -> dict[str, Any]:
        batches = batch_at(batch, found["read_options"])  # before Spark starts
        spark = start()
        records.start_workers(spark, batches)
        return run_in(spark, batches, outputs, **found)  # a transform may ask Spark for *the* session

    return application(argv, "batch", job)


def application(argv: Sequence[str] | None, source: str, job: Callable[..., dict[str, Any]]) -> int:
    """Run the job; the last line printed is ``qewqew result: JSON``, or ``qewqew: error: ...`` on stderr.

    ``job`` is given what starts Spark, the place to read, and the options by their names; it returns the result. Returns the
    exit status: 0, 2 for bad arguments (nothing was written), `DAMAGED` if batches were left out (then both lines are printed),
    1 for any other failure.
    """
    # PySpark logs each error that it raises, with the whole trace of the JVM; what a reader needs is the last line.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    spark: SparkSession | None = None

    def start() -> SparkSession:
        nonlocal spark
        SparkContext.setSystemProperty("spark.app.name", f"qewqew {source}")  # before it, `SparkConf` knows no command line
        builder: SparkSession.Builder = SparkSession.builder.appName(f"qewqew {source}")
        settings = {name: value for name, value in SparkConf().getAll() if references.is_reference(value)}
        spark = builder.config(map=references.resolved(settings)).getOrCreate()
        _check_catalog(spark, found["outputs"])
        return spark

    try:
        found = vars(arguments(argv, source))
        place, result_file = found.pop(source), found.pop("result")
        check_arguments(**found)
        result = job(start, place, **found)
        if result_file is not None:
            write_result(result_file, result)
        status, lines = 0, [(sys.stdout, f"qewqew result: {json.dumps(result)}")]
        if damaged := result.get("damaged"):
            first = ", ".join([*damaged][:10]) + (" …" if len(damaged) > 10 else "")
            said = f"{len(damaged)} damaged batch(es) stay where they are, all others are committed: {first}"
            status, lines = DAMAGED, [*lines, (sys.stderr, f"qewqew: error: {said}")]
    except Exception as error:
        # The trace of what is not a mistake in the arguments but one in a program, of the user's or ours.
        if isinstance(error, TransformFailed) or not isinstance(error, (QewQewError, PySparkException, Py4JJavaError, OSError)):
            trace = traceback.format_exception(error.__cause__ if isinstance(error, TransformFailed) else error)
            sys.stderr.write(secrecy.hide("".join(trace)))
        # By this name Airflow's operator knows that another try will not help.
        status, name = (2, "BadArgument: ") if isinstance(error, BadArgument) else (1, "")
        lines = [(sys.stderr, f"qewqew: error: {name}{explain(error)}")]
    if spark is not None:
        # Stopped before the last lines are printed, and silently, so that they are the last.
        with suppress(Exception):  # a JVM that died cannot be stopped, and is not what to report
            context = spark.sparkContext
            context.setLogLevel("OFF")
            context._accumulatorServer = None  # type: ignore[assignment]  # PySpark would wait for its thread, up to a second
            spark.stop()
    sys.stdout.flush()
    for stream, line in lines:
        print(line, file=stream, flush=True)
    return status


def _check_catalog(spark: SparkSession, outputs: Sequence[Output]) -> None:
    """Raise `BadArgument` for a table of a catalog that is forgotten when this application ends."""
    for output in outputs:
        if output.table is not None and not output.appends:
            catalogs = f"spark.sql.catalog.{output.table.partition('.')[0]}", "spark.sql.catalog.spark_catalog"
            kept = spark.conf.get("spark.sql.catalogImplementation") != "in-memory"
            if not kept and not any(spark.conf.get(name, None) for name in catalogs):
                raise BadArgument(
                    f"output: table {output.table}: the catalog of this Spark is forgotten when the job ends; configure one, "
                    "for example Hive's with --conf spark.sql.catalogImplementation=hive"
                )


if __name__ == "__main__":
    # Spark's Python puts this directory first, where a user's transform module `batch` or `records` would be ours.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main())
