"""The columns of the batches below a path, kept beside them: to look at each batch takes longer with every batch.

They are in ``<path>/.qewqew/columns-<hash of the content>.json``, as Spark writes a schema in JSON. A job that adds columns
writes a file with all that are known, and then removes those that it has read. No two jobs write one name with different
content, and of several files each counts: neither a job that is killed nor another one beside it loses columns.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.explaining import blamed
from qewqew_spark.jobs.output import BATCH
from qewqew_spark.tables.evolution import Contradiction, all_columns
from qewqew_spark.tables.session import delete, folding, listed, literal, newest, older, read_bytes, write_bytes

OWN = ".qewqew"  # the directory below a path of files that is ours; what reads the path skips names with a dot
NEWEST = 100  # this many batches are looked at where no columns are kept
_NAME = re.compile(r"columns-[0-9a-f]{16}\.json")
_UNFINISHED = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{12}}")  # what a job writes that may have been killed
LONGEST = 3600  # seconds that writing one may take


class KeptColumns:
    """The columns of all batches below ``path`` but the one in ``directory``, which is about to be replaced."""

    def __init__(self, spark: SparkSession, path: str, directory: str, format: str) -> None:
        self._spark = spark
        self._path = path
        self._directory = directory
        self._format = format
        self._kept: dict[str, StructType] = {}  # what `there` has read,
        self._found: StructType | None = None  # or what the batches say,
        self._doubted = False  # all of them?
        self._unfinished = False  # does a file lie there that nobody may be writing any more?

    def there(self) -> StructType | None:
        """The columns; None if there are no batches. Raises `BadArgument` if they contradict each other."""
        self._kept = self._read()
        if self._kept and not self._doubted:
            with suppress(Contradiction):
                return all_columns(self._kept.values(), folding(self._spark))
        self._doubted |= bool(self._kept)
        self._found = self._look()
        return self._found

    def doubt(self) -> bool:
        """Let `there` read every batch: what is kept may be of batches that are gone, or of an earlier run of this one.

        Returns False if it has done so.
        """
        before, self._doubted = self._doubted, True
        return not before

    def add(self, columns: StructType) -> None:
        """Keep the columns of the batch with those of the others: when this returns, the next job finds them."""
        fold, kept = folding(self._spark), self._read()
        known = [each for name, each in kept.items() if not self._doubted or name not in self._kept]
        if self._found is not None:
            known.insert(0, self._found)
        try:
            new = all_columns([*known, columns], fold)
        except Contradiction:  # nobody compares under the policy "ignore", or a job beside this one was quicker
            new, kept = all_columns([columns], fold), {}
        text = new.json().encode()
        name = f"columns-{hashlib.sha256(text).hexdigest()[:16]}.json"
        if name not in kept:
            delete(self._spark, f"{self._path}/{OWN}/{name}")  # that is damaged
            write_bytes(self._spark, f"{self._path}/{OWN}/{name}", text)
        for left in older(self._spark, f"{self._path}/{OWN}", LONGEST) if self._unfinished else ():
            if _UNFINISHED.fullmatch(left):
                delete(self._spark, f"{self._path}/{OWN}/{left}")
        for other in kept.keys() - {name}:
            delete(self._spark, f"{self._path}/{OWN}/{other}")

    def _read(self) -> dict[str, StructType]:
        """What is kept, by the name of the file; what holds no columns is passed over."""
        own = f"{self._path}/{OWN}"
        while True:
            names = listed(self._spark, own)
            self._unfinished = any(map(_UNFINISHED.fullmatch, names))
            texts = {name: read_bytes(self._spark, f"{own}/{name}") for name in names if _NAME.fullmatch(name)}
            if None not in texts.values():  # else another job has just put a file in place of this one
                break
        found = {}
        for name, text in texts.items():
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged
                found[name] = StructType.fromJson(json.loads(text or b""))
        return found

    def _look(self) -> StructType | None:
        """The columns in the files of the other batches: of all, or if nothing is kept of the newest."""
        names = listed(self._spark, self._path) if self._doubted else newest(self._spark, self._path, f"{BATCH}=", NEWEST)
        found = [f"{self._path}/{name}" for name in sorted(names) if name.startswith(f"{BATCH}=")]
        others = [directory for directory in found if directory != self._directory]
        if not others:
            return None
        # Recursively means also without columns made of the names of directories, whose types are guesses.
        options = {"recursiveFileLookup": True, "mergeSchema": True}
        try:
            with blamed(f"output: the batches in {self._path} contradict each other"):
                return self._spark.read.format(self._format).options(**options).load(list(map(literal, others))).schema
        except BadArgument as error:
            if "UNABLE_TO_INFER_SCHEMA" in str(error):  # directories without files, as a job leaves that was killed
                return None
            raise
