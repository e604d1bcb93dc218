"""Writing rows to a queue or a topic: everything of a job, or of a micro-batch, in one commit, or nothing.

Each task *stages* its records: it writes them to a file that the driver can read too. When all tasks are done, Spark gives
the driver what they returned, for each partition from the one attempt that counts (a task may run again after a failure, or
twice at once). The driver puts all these records into the target in one commit, in the order of the partitions. If there is a
key, a second commit under it writes nothing. A micro-batch's key is the query's id, which the checkpoint keeps, and the
batch's number.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from qewqew_core import arguments
from qewqew_core.batch.store import Local, Remote, Store, store_of
from qewqew_core.crc import crc32
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadPath, Corrupt, DiskFull
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.zbus import Message
from qewqew_core.queue import paths
from qewqew_core.queue.stage import Stage
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic import Topic
from qewqew_spark.options import Options, local_path
from qewqew_spark.sink.encoding import AS_JSON, check_columns, encode, records_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:  # pyspark 4.0 has none: see `stream_writer`
    DataSourceStreamArrowWriter = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)

PIECE_BYTES = 1 << 20  # of a staged file are in memory at a time, unless a single record is larger
STAGED = re.compile("[0-9]+-[0-9a-f]{32}")  # the files of tasks
LEFT_OVER = 7 * 86_400  # seconds after which a staging directory that nobody has written to is one of a job that was killed
QUERY_ID = "sql.streaming.queryId"  # a local property of the tasks of a stream; the same whenever it goes on from its checkpoint
OPTIONS = {"path", "kind", "sync", "lockTimeout", "stagingPath", "group"}
OPTIONS_OF = {"queue": {"chunkSize"}, "topic": {"blockSize", "dialect"}}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """A record batch in a staged file: a message of Arrow IPC, right after the one before."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task has staged. There is no file if there are no pieces."""

    job: str
    file: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Sink:
    """Where rows go, and how; made by `sink_of` on the driver, travels to the executors."""

    kind: str
    path: str
    settings: Mapping[str, Any]  # of the Queue or Topic
    largest: int  # bytes of its largest record
    staging: str  # what the path or URL of a job's staging directory begins with
    storage: Mapping[str, str] = field(repr=False)  # options of its file system: there may be secrets in them

    def store(self, job: str) -> Store:
        return store_of(self.staging + job, self.storage)

    # On an executor

    def stage(self, batches: Iterable[pa.RecordBatch], job: str, home: str) -> Staged:
        """Write the records of a task's rows to a file. ``home``: the directory that must exist, unless it is on a store.

        Raises `BadPath`, `DiskFull`, `StoreError`, and for bad rows what `encode` raises.
        """
        partition = _task().partitionId()
        store, staged = self.store(job), Staged(job, f"{partition}-{uuid.uuid4().hex}", [])
        parts = self._parts(batches, partition, staged.pieces)
        first = next(parts, None)
        if first is None:
            return staged
        if isinstance(store, Local) and not _is_directory(home):
            raise BadPath(f"a task cannot stage its records here, because it finds no such directory; {_SHARED}", path=home)
        try:
            store.write(staged.file, chain([first], parts))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no room to stage records: {error.strerror}. Nothing was stored", path=store.path) from error
            raise
        return staged

    def _parts(self, batches: Iterable[pa.RecordBatch], partition: int, pieces: list[Piece]) -> Iterator[bytes]:
        """The pieces of a staged file; they are described in ``pieces``."""
        number = 0
        for rows in batches:
            records = encode(rows, self.kind, self.largest, partition, number)
            step = max(1, PIECE_BYTES * records.num_rows // max(1, records.nbytes))
            for at in range(0, records.num_rows, step):
                part = records.slice(at, step).serialize().to_pybytes()
                pieces.append(Piece(len(part), crc32(part)))
                yield part
            number += rows.num_rows

    # On the driver

    def commit(self, messages: Iterable[WriterCommitMessage | None], job: str, key: str | None) -> None:
        """Put what was staged into the target, in one commit, and remove it from where it was staged.

        Raises `BadPath` or `Corrupt` if what was staged is not there as it was, and what the target raises
        (`Locked`, `DiskFull`, …): nothing was stored.
        """
        pieces = chain.from_iterable(self._read(staged) for staged in messages if isinstance(staged, Staged))
        if self.kind == "queue":
            with Stage(self.path, **self.settings) as stage:
                for records in pieces:
                    stage.put_many(records.column("value").to_pylist())
                stage.commit(key)
        else:
            with Topic(self.path, **self.settings) as topic, closing(topic.session()) as appends:
                for records in pieces:
                    appends.append_many(starmap(Message, zip(*(column.to_pylist() for column in records.columns), strict=True)))
                appends.commit(key)
        self.remove(job)

    def _read(self, staged: Staged) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # late: the driver plans writes without it

        if not staged.pieces:
            return
        schema, store, at = records_schema(self.kind), self.store(staged.job), 0
        path = store.locate(staged.file)
        try:
            with store.open(staged.file) as read:
                for piece in staged.pieces:
                    data = read(at, at + piece.size)
                    if len(data) != piece.size or crc32(data) != piece.crc32:
                        raise Corrupt("these are not the bytes that a task staged here. Nothing was stored", path=path, offset=at)
                    yield pa.ipc.read_record_batch(pa.py_buffer(data), schema)
                    at += piece.size
        except FileNotFoundError as error:
            what = "the driver does not find the records that a task staged here. Nothing was stored"
            raise BadPath(f"{what}; {_SHARED}", path=path) from error

    def remove(self, job: str) -> None:
        """Remove what a job has staged, and what other jobs staged long ago. Failures are only logged."""
        store = self.store(job)
        try:
            store.remove(STAGED)
            if isinstance(store, Local):
                for directory in glob.glob(glob.escape(self.staging) + "*"):
                    with suppress(FileNotFoundError):  # somebody else removes it too
                        if _changed(directory) < time.time() - LEFT_OVER:
                            Local(directory).remove(STAGED)
        except Exception as error:
            _logger.warning("the staged records in %s could not be removed: %s", store.path, error)


class Writer(DataSourceArrowWriter):
    """Writes a job. One object, made on the driver, is pickled for its tasks and for the commit."""

    def __init__(self, sink: Sink, key: str | None) -> None:
        self.sink, self.key = sink, key
        self.job = uuid.uuid4().hex
        store = sink.store(self.job)
        if isinstance(store, Local):
            try:
                os.mkdir(store.path, 0o700)
            except OSError as error:
                what = f"cannot make this directory to stage records in: {error.strerror}. You can set another stagingPath"
                raise BadPath(what, path=store.path) from error

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        # The driver's directory: a task that runs on when the job has failed does not make it again.
        return self.sink.stage(iterator, self.job, self.sink.store(self.job).path)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.sink.commit(messages, self.job, self.key)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.sink.remove(self.job)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. The object that commits is not that of the tasks: only they know the query."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        query = _task().getLocalProperty(QUERY_ID)
        if not query:
            raise BadArgument(
                "this Spark does not tell tasks which query they belong to; write in foreachBatch, with the option key"
            )
        return self.sink.stage(iterator, query, os.path.dirname(self.sink.staging))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # A query has one micro-batch at a time: what its directory has besides is left over from attempts that were killed.
        for query in _jobs(messages):
            self.sink.commit(messages, query, f"spark {query} {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for query in _jobs(messages):
            self.sink.remove(query)


def writer(options: Options, schema: StructType, overwrite: bool) -> Writer:
    """The writer of a DataFrame's rows. Wrong options, paths and schemas raise before anything is written."""
    if overwrite:
        raise BadArgument("the format 'qewqew' only appends; use .mode('append'), and to start over, remove the target first")
    sink = sink_of(options, schema, "a write", {"key"})
    key = options.text("key")
    return Writer(sink, None if key is None else arguments.check_key(key))


def stream_writer(options: Options, schema: StructType, overwrite: bool) -> StreamWriter:
    """What writes the rows of a stream. Raises as `writer`."""
    if not hasattr(datasource, "DataSourceStreamArrowWriter"):
        raise BadArgument("writing a stream needs pyspark 4.1 or newer; with 4.0, write in foreachBatch, with the option key")
    if overwrite:
        raise BadArgument("the format 'qewqew' only appends: the output mode must be 'append'")
    return StreamWriter(sink_of(options, schema, "a stream", {"checkpointLocation", "queryName"}))


def sink_of(options: Options, schema: StructType, what: str, more: set[str]) -> Sink:
    """``what`` is written, as in "a stream"; ``more``: options that it has in addition to `OPTIONS`."""
    given = options.text("path")
    if not given:
        raise BadArgument("no path; give save() or start() the path of a queue or a topic")
    path = local_path(given)
    if isinstance(store_of(path), Remote):
        raise BadArgument(f"{path}: a queue or topic must be on a file system of the driver's host; give a path there")
    there = "topic" if os.path.isdir(path) else "queue" if os.path.exists(path) or os.path.exists(path + paths.LOG) else None
    kind = options.choice("kind", ("queue", "topic"), there or "queue")
    if "codec" in options:
        raise BadArgument(f"{what} to a {kind} has no option 'codec': a record is the content of the column 'value'; {AS_JSON}")
    options.check(f"{what} to a {kind}", OPTIONS | OPTIONS_OF[kind] | more, ["fs."])
    if kind != (there or kind):
        raise BadArgument(f"{path} is a {there}, not a {kind}")
    settings: dict[str, Any] = {
        "sync": options.choice("sync", ("commit", "never"), "commit"),
        "lock_timeout": options.whole("lockTimeout", 60, least=0),
        "group": options.text("group"),
    }
    if kind == "queue":
        path = paths.check_path(path)
        size = options.size("chunkSize", 16 << 20)
        settings["chunk_size"] = arguments.check_whole("chunkSize", size, chunk.MIN_CHUNK_SIZE, chunk.MAX_CHUNK_SIZE)
        largest = chunk.largest_record(settings["chunk_size"])
    else:
        path = topic_paths.check_topic_path(path)
        size = options.size("blockSize", zbus.BLOCK_SIZE)
        settings["block_size"] = arguments.check_whole("blockSize", size, 1, zbus.LARGEST_BLOCK)
        settings["dialect"] = options.choice("dialect", ("A", "B", "C"), "") or None
        largest = zbus.LARGEST_BODY
    check_columns(schema, kind)
    home = local_path(options.text("stagingPath") or os.path.dirname(path)).rstrip("/")
    sink = Sink(kind, path, settings, largest, f"{home}/{os.path.basename(path)}.staging-", options.under("fs."))
    store = sink.store("")
    store.check()
    if isinstance(store, Local) and not _is_directory(home):
        raise BadPath("the directory to stage records in does not exist; make it, or set another stagingPath", path=home)
    return sink


def _is_directory(path: str) -> bool:
    with opening(path, "directory to stage records in", "try again"):
        return DISK.is_directory(path, follow=True)


_SHARED = "set the option stagingPath to a directory, or a URL of an object store, that the driver and all executors share"


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _jobs(messages: Iterable[WriterCommitMessage | None]) -> set[str]:
    return {staged.job for staged in messages if isinstance(staged, Staged)}


def _changed(directory: str) -> float:
    """When a file in it was last written, or made."""
    return max(os.stat(path).st_mtime for path in [directory, *(entry.path for entry in os.scandir(directory))])
