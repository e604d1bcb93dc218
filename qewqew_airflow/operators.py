"""Put records into a queue or topic, and the key that makes a task do it once."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.bases.decorator import determine_kwargs

from qewqew_airflow.arguments import is_rendered_later
from qewqew_airflow.hooks import TOPIC_SETTINGS, QewQewHook, check_settings
from qewqew_airflow.source import check_either
from qewqew_core import BadArgument, BadRecord

if TYPE_CHECKING:
    from airflow.sdk import Context

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
LONGEST_KEY = 512  # bytes; what the core takes


def task_key(context: Context) -> str:
    """The key of a task instance: ``dag_id|run_id|task_id|map_index``, the same for every try of it.

    Other tasks never get the same key: what is not a letter, a digit or one of ``_.-~:+`` is
    percent-encoded, and a key over 512 bytes ends in the SHA-256 of the whole instead.
    """
    ti = context["ti"]
    key = "|".join(quote(str(part), safe=":+") for part in (ti.dag_id, ti.run_id, ti.task_id, ti.map_index))
    if len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{key[: LONGEST_KEY - len(digest) - 1]}|{digest}"


def encode(record: Any, number: int) -> bytes:
    """One record as bytes: bytes as they are, text as UTF-8, anything else as compact JSON.

    Raises `BadRecord` naming the record by ``number`` (from 0) for what JSON does not have: dates,
    sets, NaN, keys that are not text.
    """
    try:
        if isinstance(record, (bytes, bytearray, memoryview)):
            return bytes(record)
        if isinstance(record, str):
            return record.encode()
        return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(
            f"record {number} ({type(record).__name__}) cannot be written as JSON: {error}; give bytes, text, "
            "or values that JSON has. Nothing was stored"
        ) from error


class QewQewStageOperator(BaseOperator):
    """Stages records into a queue or topic: all of a task in one commit, once, however often the task is tried.

    The records come from ``records`` or from the file ``path``. They are encoded first, then the
    queue is opened, and they are committed together under `task_key`: a task that is retried, killed
    after the commit, or cleared finds its commit there and stores nothing more, also when its source
    gives other records by then. The records of one task are held in memory; for a topic, what exceeds
    16 MiB is held in a file until it is committed.

    Returns (XCom) ``{"queue": …, "records": n}`` or ``{"topic": …, "records": n}``, n being what the task's
    one commit holds.

    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param tag: what readers of the topic filter by: a text for all records (templated), or a callable that
        is given each record, before it is encoded, and returns its tag or None
    :param id: likewise the id of a message, at most 39 bytes of UTF-8; it is stored, nothing else
    :param topic_settings: what of the topic is to be kept and how (block_size, max_age, max_records, max_bytes,
        delete_committed, slow_readers); wins over "topic" in the connection's extra
    :param records: the records, or a callable that returns or yields them, called as PythonOperator
        calls its own: with ``op_kwargs`` and those keys of the context that it has parameters for.
        Bytes are staged as they are, text as UTF-8, anything else as JSON (see `encode`).
    :param path: a file to read instead (templated). JSON lines: each line is staged as it is, without
        its end of line; it is the reader who decodes it, and counts what does not decode. CSV: each row
        is staged as a JSON object of text values, by the names in the first line; rows that have
        another number of fields fail the task. Blank lines are left out, and the log says how many.
    :param format: "jsonl" or "csv"; without it the file's suffix decides (.jsonl, .ndjson, .csv)
    :param op_kwargs: for the callable (templated)
    :param qewqew_conn_id: the connection (templated)

    Raises `BadArgument`, `BadPath`, `BadRecord`, `RecordTooLarge`, `QueueLocked`, `QueueFull` and
    `DiskFull` (at the bounds in the connection's extra: Airflow tries again; to wait here would keep
    those out who make room) and what else `Queue.put_many` or `Topic.append_many` raises; nothing was
    stored then.
    """

    template_fields: Sequence[str] = ("queue_name", "topic", "tag", "id", "path", "op_kwargs", "qewqew_conn_id")
    template_fields_renderers = {"op_kwargs": "py"}  # noqa: RUF012  (as Airflow declares it)
    shallow_copy_attrs: Sequence[str] = ("records", "op_kwargs")  # a generator cannot be copied
    ui_color = "#cfe2f3"

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        topic: str | None = None,
        tag: str | Callable[[Any], str | None] | None = None,
        id: str | Callable[[Any], str | None] | None = None,
        topic_settings: Mapping[str, Any] | None = None,
        records: Callable[..., Iterable[Any]] | Iterable[Any] | None = None,
        path: str | None = None,
        format: str | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        qewqew_conn_id: str = QewQewHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.topic = topic
        # Airflow would call a callable in a templated field, with the context.
        self.tag = None if callable(tag) else tag
        self.id = None if callable(id) else id
        self._tag_of = tag if callable(tag) else None
        self._id_of = id if callable(id) else None
        self.topic_settings = topic_settings
        self.records = records
        self.path = path
        self.format = format
        self.op_kwargs = op_kwargs
        self.qewqew_conn_id = qewqew_conn_id
        check_either(queue_name, topic)
        for name, value in (("tag", tag), ("id", id), ("topic_settings", topic_settings)):
            if topic is None and value is not None:
                raise BadArgument(f"{name} is for a topic")
        self._topic_settings()
        if (records is None) == (path is None):
            raise BadArgument("give either records or path")
        if records is not None and not callable(records) and not _is_iterable_of_records(records):
            raise BadArgument(
                f"records must be a callable or an iterable of records, not {type(records).__name__}; for the result of "
                "another task: records=lambda rows: rows, op_kwargs={'rows': other_task.output}"
            )
        if op_kwargs is not None and not callable(records):
            raise BadArgument("op_kwargs are for a callable in records")
        if format is not None and path is None:
            raise BadArgument("format is for path")
        if path is not None and not is_rendered_later(path):
            self._file_format()

    def execute(self, context: Context) -> dict[str, Any]:
        hook = QewQewHook(self.qewqew_conn_id)
        key = task_key(context)
        if self.topic is not None:
            path = hook.path(self.topic)
            staged, stored, size = self._append(hook, self.topic, context, key)
        else:
            assert self.queue_name is not None
            path = hook.path(self.queue_name)  # before the records: a wrong name must not cost a long read
            # Encoded before the queue is opened: a source may be slow, and others wait for the queue.
            records = [encode(record, number) for number, record in enumerate(self._source(context))]
            size = sum(map(len, records))
            with hook.queue(self.queue_name) as queue:
                before = len(queue)
                staged = queue.put_many(records, key=key)
                stored = len(queue) - before
        if stored == staged:
            self.log.info("Staged %s records (%s bytes) into %s, in one commit under %s", f"{staged:,}", f"{size:,}", path, key)
        else:
            self.log.info("Stored nothing: an earlier try staged %s records into %s under %s", f"{staged:,}", path, key)
        return {"queue": self.queue_name, "records": staged} if self.topic is None else {"topic": self.topic, "records": staged}

    def _append(self, hook: QewQewHook, name: str, context: Context, key: str) -> tuple[int, int, int]:
        """(records of the task's commit, how many were stored now, bytes that the source gave).

        Nobody waits for an open topic until something is appended, and the session appends when it commits.
        """
        size = 0
        with hook.topic(name, **self._topic_settings()) as topic, topic.session() as session:
            for number, record in enumerate(self._source(context)):
                body = encode(record, number)
                session.append(
                    body,
                    tag=self._label("tag", self.tag, self._tag_of, record, number),
                    id=self._label("id", self.id, self._id_of, record, number),
                )
                size += len(body)
            topic.append_many([])  # waits for other writers, so that what is counted is of this task
            before = topic.stats().next
            staged = session.commit(key)
            return staged, topic.stats().next - before, size

    def _topic_settings(self) -> dict[str, Any]:
        return check_settings("topic_settings", "topic_settings", self.topic_settings or {}, TOPIC_SETTINGS)

    @staticmethod
    def _label(name: str, text: Any, of: Callable[[Any], Any] | None, record: Any, number: int) -> str | None:
        value = text if of is None else of(record)
        if value is not None and not isinstance(value, str):
            raise BadRecord(f"the {name} of record {number} must be text or None, not {value!r:.80}. Nothing was stored")
        return value

    def _source(self, context: Context) -> Iterable[Any]:
        if self.path is not None:
            return self._rows() if self._file_format() == "csv" else self._lines()
        if not callable(self.records):
            assert self.records is not None  # checked in __init__
            return self.records
        given = {**context, **(self.op_kwargs or {})}
        records = self.records(**determine_kwargs(self.records, (), given))
        if not _is_iterable_of_records(records):
            raise BadArgument(f"the callable in records returned {type(records).__name__}, not an iterable of records")
        return records

    def _file_format(self) -> str:
        format = self.format or FORMATS.get(os.path.splitext(str(self.path))[1].lower())
        if format is None or format not in FORMATS.values():
            raise BadArgument(f"the format of {self.path!r} is {format!r}; say format='jsonl' or format='csv'")
        return format

    def _lines(self) -> Iterator[bytes]:
        blank = 0
        with open(str(self.path), "rb") as file:
            for number, line in enumerate(file):
                record = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                record = record.removesuffix(b"\n").removesuffix(b"\r")
                if record.strip():
                    yield record
                else:
                    blank += 1
        self._say_blank(blank)

    def _rows(self) -> Iterator[dict[str, str]]:
        blank = 0
        with open(str(self.path), encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            try:
                names = next(rows, [])
                if len(set(names)) < len(names):
                    raise BadRecord("the first line names a column twice", path=self.path)
                for row in rows:
                    if len(row) == len(names):
                        yield dict(zip(names, row, strict=True))
                    elif row:
                        raise BadRecord(
                            f"line {rows.line_num} has {len(row)} fields, the first line names {len(names)}. Nothing was stored",
                            path=self.path,
                        )
                    else:
                        blank += 1
            except (csv.Error, UnicodeDecodeError) as error:
                raise BadRecord(
                    f"near line {rows.line_num}: not CSV in UTF-8: {error}. Nothing was stored", path=self.path
                ) from error
        self._say_blank(blank)

    def _say_blank(self, blank: int) -> None:
        if blank:
            self.log.warning("%s: %s blank lines were left out", self.path, f"{blank:,}")


def _is_iterable_of_records(value: Any) -> bool:
    # The parts of text, bytes or a mapping are letters, numbers or keys: hardly what was meant as records.
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping, XComArg))
