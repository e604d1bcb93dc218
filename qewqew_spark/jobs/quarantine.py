"""Where the bad records of batches are: as Parquet in ``<path>/batch=<id>``, each run in place of an earlier one.

They come there when all outputs are committed. A run that is killed in between must run again, and then they are the same, or
the commit of a table says that they are not.

Beside the records, ``_outputs.json`` says which records these are (`Append.bad`), and the outputs of the runs that left them out.
Such an output has the batch without them, so as long as no run of it says otherwise, they must not leave the quarantine.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from qewqew_core.errors import BatchConflict, Corrupt
from qewqew_spark.jobs.explaining import blamed_write
from qewqew_spark.jobs.output import BATCH
from qewqew_spark.tables.session import delete, exists, listed, literal, make_private, read_bytes, rename, write_bytes

NONE = "0"  # `Append.bad` of a run without bad records
_OUTPUTS = "_outputs.json"


class Quarantine:
    """The directory at ``path``, for the batches with these ids: `stage` or `stage_none`, then `commit` or `abort`."""

    def __init__(self, spark: SparkSession, path: str, batches: Collection[str]) -> None:
        self._spark = spark
        self.path = path
        self._batches = batches
        self._staging: str | None = None

    @property
    def place(self) -> str:
        """Where the records of this run are."""
        return self._home(*self._batches) if len(self._batches) == 1 else self.path

    def recover(self) -> None:
        """Undo what a `commit` has done that was killed in the middle."""
        names = listed(self._spark, self.path)
        for batch in self._batches:
            if os.path.basename(self._old(batch)) in names:
                if f"{BATCH}={batch}" in names:
                    delete(self._spark, self._old(batch))
                else:
                    rename(self._spark, self._old(batch), self._home(batch))

    def stage(self, bad: DataFrame, outputs: Collection[str], judged: Callable[[str], None]) -> dict[str, int]:
        """Write the bad records where nobody looks, and return how many there are, by the kind of reason.

        ``bad`` is computed once. ``outputs``: the places that this run writes to. ``judged``: is told of `Append.bad`, and may
        raise. Raises `BatchConflict` if a record is to leave the quarantine that another output lacks.
        """
        mine = f".{BATCH}={next(iter(self._batches))}~"
        for name in listed(self._spark, self.path):
            if name.startswith(mine):  # of a run that was killed
                delete(self._spark, f"{self.path}/{name}")
        self._staging = staging = f"{self.path}/{mine}{uuid.uuid4().hex[:12]}"
        try:
            with blamed_write(f"the quarantine {self.path}"):
                for place in [staging] if exists(self._spark, self.path) else [self.path, staging]:
                    make_private(self._spark, place)
                bad.write.mode("append").partitionBy(BATCH).parquet(staging)
            rows = _counted(self._spark.read.schema(bad.schema).parquet(literal(staging)))
        except (PySparkException, Py4JJavaError) as error:
            if exists(self._spark, staging):
                raise
            said = f"{self.place}: another run of the batch is at work, and removed what this one had staged. Nothing was added"
            raise BatchConflict(said) from error
        judged(_bad_of(rows))
        now = {batch: _bad_of(row for row in rows if row[BATCH] == batch) for batch in {str(row[BATCH]) for row in rows}}
        for batch, lacking in self._lacking(now, outputs).items():
            text = json.dumps({"bad": now[batch], "outputs": lacking})
            write_bytes(self._spark, f"{staging}/{BATCH}={batch}/{_OUTPUTS}", text.encode())
        make_private(self._spark, staging, below=True)
        return _reasons_of(rows)

    def first(self, most: int) -> list[str]:
        """Where a few of the staged records are, and why they are bad."""
        if self._staging is None:
            return []
        rows = self._spark.read.parquet(literal(self._staging)).drop("value").limit(most).collect()
        return [
            ", ".join(f"{name} {value}" for name, value in row.asDict().items() if name != "reason") + f": {row['reason']}"
            for row in rows
        ]

    def stage_none(self, outputs: Collection[str], judged: Callable[[str], None]) -> dict[str, int]:
        """The same where all records are good."""
        judged(NONE)
        self._lacking({}, outputs)
        return {}

    def keep(self, bad: Collection[str | None]) -> dict[str, int] | None:
        """Remove what was staged, as what is there from an earlier run stays, if it is this `Append.bad`.

        Returns how many there are, by the kind of reason; None if it is not.
        """
        self.abort()
        rows: list[Row] = []
        for batch in self._there():
            try:
                rows += _counted(self._spark.read.parquet(literal(self._home(batch))).withColumn(BATCH, F.lit(batch)))
            except PySparkException:  # somebody has removed files
                return None
        return _reasons_of(rows) if {*bad} == {_bad_of(rows)} else None

    def commit(self) -> None:
        """Let what was staged be there, in place of what an earlier run has put there."""
        staged = listed(self._spark, self._staging) if self._staging else []
        there = self._there()
        for batch in self._batches:
            if batch in there:
                rename(self._spark, self._home(batch), self._old(batch))
            if f"{BATCH}={batch}" in staged:
                rename(self._spark, f"{self._staging}/{BATCH}={batch}", self._home(batch))
            if batch in there:
                delete(self._spark, self._old(batch))
        self.abort()

    def show(self) -> bool:
        """Let what was staged be there to be looked at, although no output has the batch. Not in place of what an output lacks:
        then it is removed. Returns whether it is there.
        """
        if self._staging is None or any(self._then(batch)[1] for batch in self._there()):
            self.abort()
            return False
        for name in listed(self._spark, self._staging):
            if name.startswith(f"{BATCH}="):
                delete(self._spark, place := f"{self._staging}/{name}/{_OUTPUTS}")
                write_bytes(self._spark, place, json.dumps({"bad": "", "outputs": []}).encode())
        make_private(self._spark, self._staging, below=True)
        self.commit()
        return True

    def binds(self, outputs: Collection[str]) -> bool:
        """Do other outputs lack what is there now?"""
        return any({*self._then(batch)[1]} - {*outputs} for batch in self._there())

    def abort(self) -> None:
        """Remove what was staged and not committed."""
        if self._staging is not None:
            delete(self._spark, self._staging)
            self._staging = None

    def _there(self) -> list[str]:
        names = listed(self._spark, self.path)
        return [batch for batch in self._batches if f"{BATCH}={batch}" in names]

    def _home(self, batch: str) -> str:
        return f"{self.path}/{BATCH}={batch}"

    def _old(self, batch: str) -> str:
        """Where its records of an earlier run are while `commit` replaces them; Spark does not look there."""
        return f"{self.path}/.old-{BATCH}={batch}"

    def _lacking(self, now: Mapping[str, str], outputs: Collection[str]) -> dict[str, list[str]]:
        """The outputs that have the batches without the records that are bad ``now``, by batch."""
        found = {batch: sorted(outputs) for batch in now}
        for batch in self._there():
            bad, lacked = self._then(batch)
            if bad == now.get(batch, NONE):
                found[batch] = sorted({*outputs, *lacked})
            elif others := sorted({*lacked} - {*outputs}):
                raise BatchConflict(
                    f"{self._home(batch)} has the records that an earlier run of the batch left out, in which other records were "
                    f"bad: {bad.split()[0]} then, {now.get(batch, NONE).split()[0]} now. They are not in {', '.join(others)}, to "
                    "which this run does not write, so some would be lost. Write to all outputs of that run too, or set another "
                    "quarantine"
                )
        return found

    def _then(self, batch: str) -> tuple[str, list[str]]:
        """Of an earlier run: `Append.bad`, and the outputs that have the batch without these records."""
        place = f"{self._home(batch)}/{_OUTPUTS}"
        text = read_bytes(self._spark, place)
        if text is None and not any(name.endswith(".parquet") for name in listed(self._spark, self._home(batch))):
            return "", []
        try:
            found = json.loads(text or "")
            bad, lacking = str(found["bad"]), list(map(str, found["outputs"]))
            if lacking and not bad:
                raise ValueError
            return bad, lacking
        except (ValueError, LookupError, TypeError) as error:
            said = "it does not say any more which outputs lack the records here; move this directory to where you keep it"
            raise Corrupt(said, path=place) from error


def _counted(records: DataFrame) -> list[Row]:
    """How many records there are by batch and kind of reason, and a sum of hashes, which is the same in whatever order."""
    kind = F.substring_index("reason", ": ", 1).alias("kind")
    hashed = F.sum(F.xxhash64(BATCH, "value").cast("decimal(20, 0)")).alias("hashes")
    return records.groupBy(BATCH, kind).agg(F.count(F.lit(1)).alias("count"), hashed).collect()


def _reasons_of(groups: Iterable[Row]) -> dict[str, int]:
    reasons = Counter[str]()
    for row in sorted(groups, key=lambda row: str(row["kind"])):
        reasons[str(row["kind"])] += int(row["count"])
    return dict(reasons)


def _bad_of(groups: Iterable[Row]) -> str:
    """`Append.bad`"""
    counted = [(int(row["count"]), int(row["hashes"])) for row in groups]
    return f"{sum(count for count, _ in counted)} {sum(hashed for _, hashed in counted) % 2**64:016x}" if counted else NONE
