"""Stage the records of a task into a queue or topic, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseOperator, XComArg

try:
    from airflow.sdk.bases.decorator import determine_kwargs
except ImportError:  # Airflow 3.1
    from airflow.utils.operator_helpers import determine_kwargs  # type: ignore[attr-defined]
from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence

from qewqew_airflow.arguments import is_rendered_later
from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.errors import no_retry_for_the_hopeless
from qewqew_airflow.hooks.qewqew import TOPIC_SETTINGS, QewQewHook, check_settings
from qewqew_airflow.keys import task_key
from qewqew_airflow.links.qewqew import QewQewLink
from qewqew_airflow.shared import locks, metrics
from qewqew_airflow.shared.masking import hidden_in_errors
from qewqew_airflow.shared.records import awaited, is_frame, query, read_files, rows_of_frame
from qewqew_airflow.shared.source import Source, check_either
from qewqew_core import BadArgument, BadRecord, Message
from qewqew_core.secrecy import excerpt
from qewqew_core.tools.exchange import few
from qewqew_core.tools.listing import Kind
from qewqew_core.tools.reading import Reading
from qewqew_core.tools.rows import encode

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context, ObjectStoragePath


class QewQewStageOperator(BaseOperator):
    """Stages all records of a task into a queue or topic in one commit, once, however often the task is tried.

    The records come from ``records``, from the file ``path`` or from the query ``sql``. The task writes them beside the queue
    while other tasks do the same. Then it opens the queue and commits them together under `task_key`. A task that is
    retried, killed after the commit, or cleared finds its commit there and stores nothing more, even if its source gives
    other records by then.

    Returns (XCom) ``{"queue": …, "records": n}`` or ``{"topic": …, "records": n}``, where n is the number of records in the
    task's commit. The ``extra`` of the events of the assets among its ``outlets`` has the same.

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param tag: what readers of the topic filter by: text for all records (templated), or a callable that is given each
        record before it is encoded, and returns its tag or None
    :param id: likewise the id of a message, at most 39 bytes of UTF-8; it is only stored
    :param topic_settings: what the topic keeps (block_size, max_age, max_records, max_bytes, delete_committed,
        slow_readers); overrides "topic" in the connection's extra
    :param records: the records, or a callable that returns or yields them, maybe asynchronously. PythonOperator calls its
        own in the same way: with ``op_args``, ``op_kwargs`` and the keys of the context that it has parameters for. Bytes
        are staged as they are, text as UTF-8, anything else as JSON (see `encode`). A frame of pandas, polars, Arrow, DuckDB
        or Spark stands for its rows (see `rows_of_frame`). Or the output of another task, a list of records or a frame, or a
        list of such outputs. If one is mapped, each of its tasks may return a list, a frame, or one record that is not a
        list. They are staged in the order of the map indexes, without those that returned None
    :param path: a file to read instead (templated): a path, the URL of an object store (``s3://…``), or an
        ObjectStoragePath; with ``*`` or a ``/`` at its end, several, in the order of their names. See `records_of`: JSON
        lines and JSON are staged as they are written, the rows of CSV and Parquet as JSON objects. What is compressed
        (gzip, bzip2, xz, Zstandard) is known by its first bytes
    :param path_conn_id: the connection of the object store (templated)
    :param format: "jsonl", "json", "csv", "parquet" or "text"; without it the file's suffix decides
    :param format_options: how the file is read, such as ``{"delimiter": ";", "encoding": "latin-1"}``: see `Reading`
    :param sql: a query to run instead, or the name of a .sql file (templated). Each row is staged as a JSON object by the
        names of its columns; dates, times, decimals and UUIDs become text, bytes Base64
    :param sql_conn_id: the connection of the database (templated); its hook must be a DbApiHook
    :param parameters: values for the placeholders in sql, in the style of the database's driver (templated)
    :param op_args: for the callable (templated)
    :param op_kwargs: for the callable (templated)
    :param reprocess: a text that becomes a part of the key, unless it is empty (templated). With another one the task stages
        again, what its source gives then: ``"{{ dag_run.conf.get('reprocess', '') }}"``. What it has staged before stays
    :param qewqew_conn_id: the connection (templated)

    `BadArgument`, `BadPath` and `RecordTooLarge` fail the task without retries, because another try would meet them again.
    Raises `BadRecord`, `Locked`, `Full` and `DiskFull` (at the limits in the connection's extra; Airflow retries, because
    waiting here would keep out the consumer that makes space), and what `Session.commit` or `Topic.append_many` raises. In
    all these cases nothing was stored.
    """

    template_fields: Sequence[str] = (
        *("queue_name", "topic", "tag", "id", "path", "path_conn_id", "sql", "sql_conn_id", "parameters"),
        *("op_args", "op_kwargs", "reprocess", "qewqew_conn_id"),
    )
    template_fields_renderers = {"sql": "sql", "parameters": "json", "op_args": "py", "op_kwargs": "py"}  # noqa: RUF012  (as Airflow declares it)
    template_ext: Sequence[str] = (".sql",)
    shallow_copy_attrs: Sequence[str] = ("records", "op_args", "op_kwargs")  # generators cannot be copied
    operator_extra_links = (QewQewLink(),)
    ui_color = "#cfe2f3"

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        tag: str | Callable[[Any], str | None] | None = None,
        id: str | Callable[[Any], str | None] | None = None,
        topic_settings: Mapping[str, Any] | None = None,
        records: Callable[..., Iterable[Any]] | Iterable[Any] | XComArg | None = None,
        path: str | ObjectStoragePath | None = None,
        path_conn_id: str | None = None,
        format: str | None = None,
        format_options: Mapping[str, Any] | None = None,
        sql: str | None = None,
        sql_conn_id: str | None = None,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        op_args: Sequence[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        reprocess: str | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not op_args and not op_kwargs:  # an output of another task is resolved by Airflow in a templated field
            if isinstance(records, XComArg):
                records, op_args = _records_of_task, [records]
            elif isinstance(records, (list, tuple)) and any(isinstance(each, XComArg) for each in records):
                op_args = list(records)
                records = _records_of_several
        self.queue_name = queue_name
        self.topic = topic
        # In a templated field, Airflow would call a callable with the context.
        self.tag = None if callable(tag) else tag
        self.id = None if callable(id) else id
        self._tag_of = tag if callable(tag) else None
        self._id_of = id if callable(id) else None
        self.topic_settings = topic_settings
        self.records = records
        self.path = path
        self.path_conn_id = path_conn_id
        self.format = format
        self.format_options = format_options
        self.sql = sql
        self.sql_conn_id = sql_conn_id
        self.parameters = parameters
        self.op_args = op_args
        self.op_kwargs = op_kwargs
        self.reprocess = reprocess
        self.qewqew_conn_id = qewqew_conn_id
        self._staged = 0
        self._bytes: int | None = None
        check_either(queue_name, topic)
        for name, value in (("tag", tag), ("id", id), ("topic_settings", topic_settings)):
            if topic is None and value is not None:
                raise BadArgument(f"{name} is for a topic")
        self._topic_settings()
        if sum(source is None for source in (records, path, sql)) != 2:  # a frame has no ==
            raise BadArgument("give one of records, path and sql")
        if records is not None and not callable(records) and not _is_iterable_of_records(records):
            raise BadArgument(f"records must be a callable or an iterable of records, not {type(records).__name__}")
        if (op_args or op_kwargs) and not callable(records):
            raise BadArgument("op_args and op_kwargs are for a callable in records")
        for name, source in (
            ("format", "path"),
            ("format_options", "path"),
            ("path_conn_id", "path"),
            ("sql_conn_id", "sql"),
            ("parameters", "sql"),
        ):
            if getattr(self, name) is not None and getattr(self, source) is None:
                raise BadArgument(f"{name} is for {source}")
        if sql is not None and sql_conn_id is None:
            raise BadArgument("give sql_conn_id, the connection of the database for sql")
        if path is not None and not is_rendered_later(path):
            reading = self._reading()
            if not str(path).endswith(("/", "*")):  # the names of the files there say it
                reading.format_of(str(path))

    @no_retry_for_the_hopeless()
    def execute(self, context: Context) -> dict[str, Any]:
        hook, key, size = QewQewHook(self.qewqew_conn_id), task_key(context, str(self.reprocess or "")), 0
        kind, name = (Kind.QUEUE, str(self.queue_name)) if self.topic is None else (Kind.TOPIC, self.topic)
        path = hook.path(name)
        # The source may be slow, so others can use the queue or topic until the commit.
        names = {kind.value: name}
        with (
            locks.lock_wait(connection=self.qewqew_conn_id, **names),
            closing(hook.into(kind, name, **self._topic_settings())) as target,
        ):
            for messages in few(self._messages(context)):
                target.add(messages)
                size += sum(len(message.body) for message in messages)
            staged, repeated = target.commit(key)
        if repeated:
            self.log.warning(
                "Stored nothing: an earlier try staged %s records into %s under %s, or a run of this name that was deleted. "
                "To stage again what this task fetches, give it another text in reprocess, or start a run with another run id",
                f"{staged:,}",
                path,
                key,
            )
        else:
            self.log.info("Staged %s records (%s bytes) into %s, in one commit under %s", f"{staged:,}", f"{size:,}", path, key)
        metrics.count("staged", 0 if repeated else staged, connection=self.qewqew_conn_id, **names)
        if self.queue_name is not None:
            metrics.gauge(hook, Source(self.queue_name))
        self._staged, self._bytes = staged, None if repeated else size
        result = {**names, "records": staged, **({"repeated": True, "stored": 0} if repeated else {})}
        write_counts(context, self.outlets, result)
        return result

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, written_queue

        name = self.queue_name or self.topic
        return lineage(outputs=[written_queue(self.qewqew_conn_id, str(name), self._staged, self._bytes)])

    def _topic_settings(self) -> dict[str, Any]:
        return check_settings("topic_settings", "topic_settings", self.topic_settings or {}, TOPIC_SETTINGS)

    def _messages(self, context: Context) -> Iterator[Message]:
        for number, record in enumerate(self._read(context)):
            body = encode(record, number)
            tag = self.tag if self._tag_of is None else self._tag_of(record)
            id = self.id if self._id_of is None else self._id_of(record)
            for name, label in (("tag", tag), ("id", id)):
                if label is not None and not isinstance(label, str):
                    raise BadRecord(
                        f"the {name} of record {number} must be text or None, not {excerpt(label, 80)}. Nothing was stored"
                    )
            yield Message(body, tag, id)

    def _read(self, context: Context) -> Iterable[Any]:
        if self.sql is not None:
            assert self.sql_conn_id is not None  # checked in __init__
            return query(self.sql_conn_id, self.sql, self.parameters)
        if self.path is not None:
            return self._read_files()
        if not callable(self.records):
            assert self.records is not None  # checked in __init__
            return _rows_or_records(self.records)  # an XComArg became a callable
        args = self.op_args or ()
        given = {**context, **(self.op_kwargs or {})}
        records = awaited(self.records(*args, **determine_kwargs(self.records, args, given)))
        if not _is_iterable_of_records(records):
            raise BadArgument(f"the callable in records returned {type(records).__name__}, not an iterable of records")
        return _rows_or_records(records)

    def _reading(self) -> Reading:
        return Reading.of({**(self.format_options or {}), **({} if self.format is None else {"format": self.format})})

    def _read_files(self) -> Iterator[Any]:
        with hidden_in_errors(str(self.path)):
            yield from read_files(self.path, self.path_conn_id, self._reading())


def _records_of_task(output: Any) -> Iterable[Any]:
    """The records that another task returned, or each of its mapped tasks."""
    if isinstance(output, LazyXComSequence):
        return _records_of_several(*output)
    if not _is_iterable_of_records(output):
        raise BadArgument(f"the task whose output is staged returned {type(output).__name__}, not a list of records")
    return _rows_or_records(output)


def _records_of_several(*outputs: Any) -> Iterator[Any]:
    """The records of several tasks: of each a list, a frame, or one record."""
    for output in outputs:
        if isinstance(output, (list, tuple, LazyXComSequence)) or is_frame(output):
            yield from _records_of_task(output)
        elif output is not None:
            yield output


def _rows_or_records(found: Any) -> Iterable[Any]:
    return rows_of_frame(found) if is_frame(found) else cast(Iterable[Any], found)


def _is_iterable_of_records(value: Any) -> bool:
    # Iterating over text, bytes or a mapping gives letters, numbers or keys, which are hardly meant as records.
    is_other = isinstance(value, (str, bytes, bytearray, memoryview, Mapping, XComArg))
    return is_frame(value) or (isinstance(value, Iterable) and not is_other)
