"""What the stage operator makes of a source, and the key it stages under."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pandas
import pyarrow as pa
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException

from qewqew_airflow.keys import task_key, task_of
from qewqew_airflow.operators.stage import QewQewStageOperator, _records_of_several
from qewqew_core import BadArgument, BadRecord, Locked, Queue, Topic
from qewqew_core.tools import marker
from qewqew_core.tools.rows import encode


def context(dag_id: str = "shop", run_id: str = "manual__1", task_id: str = "stage", map_index: int = -1) -> Any:
    return {"ti": SimpleNamespace(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=map_index, try_number=1)}


def staged(directory: Path, **arguments: Any) -> list[bytes]:
    """The records that the operator puts into an empty queue."""
    operator = QewQewStageOperator(task_id="stage", queue_name="orders", **arguments)
    result = operator.execute(context())
    with Queue(directory / "orders") as queue:
        records = queue.get_many(1000)
    assert result == {"queue": "orders", "records": len(records)}
    return records


# The key.


def test_the_key_names_the_task_instance_and_not_the_try() -> None:
    assert task_key(context(run_id="manual__2026-11-20T15:00:00+00:00")) == "shop|manual__2026-11-20T15:00:00+00:00|stage|-1"
    again = context()
    again["ti"].try_number = 2
    assert task_key(context()) == task_key(again)


def test_no_two_task_instances_share_a_key() -> None:
    contexts = [
        context(),
        context(dag_id="shop|manual__1", run_id="x"),
        context(dag_id="shop", run_id="manual__1|x"),
        context(dag_id="shop%7C", run_id="manual__1"),
        context(map_index=0),
        context(map_index=1),
        context(task_id="stage2"),
        *[context(dag_id="x" * 250, run_id="y" * 250, task_id="z" * 250, map_index=number) for number in (1, 2)],
    ]
    assert len({task_key(one) for one in contexts}) == len(contexts)


@pytest.mark.parametrize("part", ["a/b", "a\\b", "../x", "a\nb", "ü" * 250, "x" * 250, " "])
def test_a_key_is_never_hostile(directory: Path, part: str) -> None:
    key = task_key(context(dag_id=part, run_id=part, task_id=part))
    with Queue(directory / "orders") as queue:
        assert queue.put_many([b"1"], key=key) == 1


def test_another_text_in_reprocess_stages_again_and_the_same_one_once(directory: Path) -> None:
    def operator(reprocess: str | None) -> Any:
        return QewQewStageOperator(task_id="stage", queue_name="orders", records=[1, 2], reprocess=reprocess).execute(context())

    first = {"queue": "orders", "records": 2}
    for reprocess in None, "corrected", "once|more", "x" * 600:
        assert operator(reprocess) == first
        assert operator(reprocess) == {**first, "repeated": True, "stored": 0}
    assert operator("") == {**first, "repeated": True, "stored": 0}
    assert task_of(task_key(context(), "once|more")) == task_of(task_key(context()))
    assert task_key(context(), "a") != task_key(context(), "b") != task_key(context())
    with Queue(directory / "orders") as queue:
        assert len(queue) == 8


# Records.


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b"\xff\x00", b"\xff\x00"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (b"", b""),
        ("größe", "größe".encode()),
        ({"größe": 1, "b": [None, True, 1.5]}, '{"größe":1,"b":[null,true,1.5]}'.encode()),
        ([1, "a"], b'[1,"a"]'),
        (7, b"7"),
        (None, b"null"),
    ],
)
def test_bytes_stay_text_is_utf8_and_the_rest_is_json(record: Any, expected: bytes) -> None:
    assert encode(record, 0) == expected


@pytest.mark.parametrize("record", [{"day": date(2026, 11, 20)}, {1, 2}, float("nan"), {"a": float("inf")}, "\ud800", object()])
def test_what_json_does_not_have_is_refused_by_number_and_nothing_is_stored(directory: Path, record: Any) -> None:
    with pytest.raises(BadRecord, match=r"record 2 \("):
        staged(directory, records=[b"0", b"1", record])
    assert not (directory / "orders").exists()


def test_an_iterable_a_generator_and_a_callable_are_sources(directory: Path) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    for source in ([0, 1, 2], numbers(), numbers, lambda: [0, 1, 2]):
        assert staged_anew(directory, source) == [b"0", b"1", b"2"]


def staged_anew(directory: Path, source: Any, **arguments: Any) -> list[bytes]:
    shutil.rmtree(directory)
    marker.init(str(directory))
    return staged(directory, records=source, **arguments)


def test_a_callable_gets_op_kwargs_and_the_context_keys_it_names(directory: Path) -> None:
    def source(ti: Any, month: int) -> list[str]:
        return [f"{ti.dag_id} {month}"]

    assert staged(directory, records=source, op_kwargs={"month": 3}) == [b"shop 3"]


def test_a_callable_with_kwargs_gets_the_whole_context(directory: Path) -> None:
    assert staged(directory, records=lambda **all: sorted(all), op_kwargs={"month": 3}) == [b"month", b"ti"]


def test_no_records_are_no_error(directory: Path) -> None:
    assert staged(directory, records=[]) == []


@pytest.mark.parametrize("value", ["text", b"bytes", {"a": 1}, 7])
def test_records_that_are_no_records_are_refused(directory: Path, value: Any) -> None:
    with pytest.raises(BadArgument, match="iterable of records"):
        QewQewStageOperator(task_id="stage", queue_name="orders", records=value)
    with pytest.raises(AirflowFailException, match="iterable of records"):
        staged(directory, records=lambda: value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"records": [], "topic": "events"},
        {"records": [], "queue_name": None},
        {"records": [], "tag": "eu"},
        {"records": [], "id": str},
        {"records": [], "topic_settings": {"max_records": 1}},
        *[
            {"records": [], "queue_name": None, "topic": "events", "topic_settings": settings}
            for settings in ({"max_records": 0}, {"chunk_size": 4096}, {"delete_committed": "yes"}, [1])
        ],
        {"records": [], "path": "a.csv"},
        {"path": "a.xlsx"},
        {"path": "a"},
        {"path": "a.csv", "format": "xml"},
        {"records": [], "format": "csv"},
        {"records": [], "op_kwargs": {"a": 1}},
    ],
)
def test_a_source_that_is_missing_or_contradicts_itself_is_an_error_of_the_dag_file(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        QewQewStageOperator(**{"task_id": "stage", "queue_name": "orders", **arguments})


# Files.


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, bytes], str]:
    def write(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def test_the_lines_of_a_file_are_staged_as_they_are(directory: Path, file: Callable[[str, bytes], str]) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a":2}\nnot json\n  {"a":3}'
    expected = [b'{"a": 1}', b'{"a":2}', b"not json", b'  {"a":3}']
    assert staged(directory, path=file("orders.jsonl", content)) == expected


def test_the_suffix_says_the_format_and_format_wins(directory: Path, file: Callable[[str, bytes], str]) -> None:
    assert staged(directory, path=file("orders.NDJSON", b"1\n")) == [b"1"]
    with Queue(directory / "others") as queue:
        queue.put(b"")
    operator = QewQewStageOperator(task_id="other", queue_name="others", path=file("orders.txt", b"a\n1\n"), format="csv")
    assert operator.execute(context(task_id="other"))["records"] == 1


def test_the_rows_of_a_csv_are_json_objects_of_text(directory: Path, file: Callable[[str, bytes], str]) -> None:
    content = '\ufeffid,name\r\n1,"a ""b"",\nc"\r\n\r\n2,größe\r\n'.encode()
    assert staged(directory, path=file("orders.csv", content)) == [
        b'{"id":"1","name":"a \\"b\\",\\nc"}',
        '{"id":"2","name":"größe"}'.encode(),
    ]


@pytest.mark.parametrize("content", [b"", b"id,name\n"])
def test_a_csv_without_rows_has_no_records(directory: Path, file: Callable[[str, bytes], str], content: bytes) -> None:
    assert staged(directory, path=file("orders.csv", content)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,name\n1,a\n2\n", "line 3 has 1 fields, but the first line has 2"),
        (b"id,name\n1,a,b\n", "line 2 has 3 fields"),
        (b"id,id\n1,2\n", "has a column twice"),
        (b'id,name\n1,"a"b\n', "line 2: not CSV"),
        (b'id,name\n1,"a\n', "not CSV"),
        (b"id,name\n1,\xff\n", "near line 2: this is not utf-8"),
    ],
)
def test_a_csv_that_is_damaged_is_refused_by_line(
    directory: Path, file: Callable[[str, bytes], str], content: bytes, message: str
) -> None:
    with pytest.raises(BadRecord, match=message):
        staged(directory, path=file("orders.csv", content))
    assert not (directory / "orders").exists()


def test_a_file_that_does_not_exist_is_named(directory: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"/nowhere/orders\.csv"):
        staged(directory, path="/nowhere/orders.csv")


def test_a_pattern_or_a_directory_stands_for_its_files_in_the_order_of_their_names(
    directory: Path, file: Callable[[str, bytes], str]
) -> None:
    second, first = file("b.csv", b"id;shop\n2;\n"), file("a.csv.gz", gzip.compress(b"id,shop\n1,eu\n"))
    want = [b'{"id":"1","shop":"eu"}', b'{"id":"2","shop":null}']
    assert staged(directory, path=f"{Path(first).parent}/*.csv*") == want
    (Path(second).parent / "in").mkdir()
    for each in first, second:
        shutil.move(each, Path(each).parent / "in")
    for path in f"{Path(first).parent}/in/", f"{Path(first).parent}/in/*", f"{Path(first).parent}/*/*":
        shutil.rmtree(directory)
        marker.init(str(directory))
        assert staged(directory, path=path) == want
    with pytest.raises(FileNotFoundError, match="No file is there"):
        staged(directory, path=f"{Path(first).parent}/*.json")


def test_options_of_the_format_are_those_of_a_file(directory: Path, file: Callable[[str, bytes], str]) -> None:
    path = file("orders.csv", "id|größe\n1|1.234,5\n".encode("latin-1"))
    options = {"encoding": "latin-1", "decimal_comma": ["größe"]}
    assert staged(directory, path=path, format_options=options) == ['{"id":"1","größe":"1234.5"}'.encode()]
    with pytest.raises(BadArgument, match="no option of a file is called 'sep'"):
        QewQewStageOperator(task_id="stage", queue_name="orders", path=path, format_options={"sep": ";"})


# Frames


def frames() -> dict[str, Callable[[], Any]]:
    columns = {"id": [1, 2], "at": [datetime(2026, 11, 24), None], "price": [0.5, float("nan")]}
    table = pa.table(columns)
    return {
        "pandas": lambda: pandas.DataFrame(columns),
        "pandas by a name": lambda: pandas.DataFrame(columns).set_index("id"),
        "pandas, a part": lambda: pandas.DataFrame(columns).iloc[[0, 1]].set_index(pandas.Index([7, 9])),
        "a table of Arrow": lambda: table,
        "a batch of Arrow": lambda: table.to_batches()[0],
        "a reader of Arrow": lambda: pa.RecordBatchReader.from_batches(table.schema, table.to_batches()),
        "duckdb": lambda: duckdb.connect().from_arrow(table),
    }


@pytest.mark.parametrize("kind", frames())
def test_a_frame_stands_for_its_rows(directory: Path, kind: str) -> None:
    price = "null" if kind.startswith("pandas") else '"NaN"'  # which pandas has for no value
    want = [b'{"id":1,"at":"2026-11-24T00:00:00","price":0.5}', f'{{"id":2,"at":null,"price":{price}}}'.encode()]
    make = frames()[kind]
    assert staged(directory, records=make) == want
    assert staged_anew(directory, make()) == want
    # As another task, or several, give it
    assert staged_anew(directory, _records_of_several, op_args=[make(), None, make()]) == want * 2


def test_what_has_columns_and_gives_no_rows_is_refused(directory: Path) -> None:
    class Lazy:
        columns = ("id", "shop")

        def __iter__(self) -> Iterator[str]:
            return iter(self.columns)

    with pytest.raises(AirflowFailException, match="Lazy is not an iterable of records, and gives no stream"):
        staged(directory, records=Lazy)


def test_an_asynchronous_function_returns_or_yields_records(directory: Path) -> None:
    async def returned(n: int) -> list[int]:
        await asyncio.sleep(0)
        return list(range(n))

    async def yielded(n: int) -> AsyncIterator[int]:
        for number in range(n):
            await asyncio.sleep(0)
            yield number

    assert staged(directory, records=returned, op_kwargs={"n": 3}) == [b"0", b"1", b"2"]
    assert staged_anew(directory, yielded, op_kwargs={"n": 3}) == [b"0", b"1", b"2"]


def test_a_path_in_a_template_is_judged_when_it_is_rendered(directory: Path) -> None:
    operator = QewQewStageOperator(task_id="stage", queue_name="orders", path="/nowhere/{{ ds }}.xml")
    operator.path = "/nowhere/2026-11-20.xml"
    with pytest.raises(AirflowFailException, match=r"BadArgument: .*ends with '.xml', which says no format"):
        operator.execute(context())


# Topics.


def appended(directory: Path, run_id: str = "manual__1", **arguments: Any) -> list[tuple[bytes, str | None, str | None]]:
    """(body, tag, id) of all messages of the topic after the operator has run."""
    operator = QewQewStageOperator(task_id="stage", topic="events", **arguments)
    result = operator.execute(context(run_id=run_id))
    with Topic(directory / "events") as topic:
        messages = [(message.body, message.tag, message.id) for message in topic]
    assert result["topic"] == "events"
    assert result["records"] <= len(messages)
    return messages


def test_each_record_is_a_message_with_its_tag_and_id(directory: Path) -> None:
    def length(record: Any) -> str:
        return str(len(record))

    records = [{"größe": 1}, "text", b"\xff\x00", b""]
    assert appended(directory, records=records, tag=length, id=lambda record: None if record == b"" else "x") == [
        ('{"größe":1}'.encode(), "1", "x"),
        (b"text", "4", "x"),
        (b"\xff\x00", "2", "x"),
        (b"", "0", None),
    ]


def test_a_callable_tag_is_given_the_record_as_its_source_gave_it(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"shop": "eu"}\n')
    (tmp_path / "a.csv").write_text("shop\nus\n")
    appended(directory, "1", path=str(tmp_path / "a.jsonl"), tag=lambda line: line.decode()[10:12])
    assert appended(directory, "2", path=str(tmp_path / "a.csv"), tag=lambda row: row["shop"]) == [
        (b'{"shop": "eu"}', "eu", None),
        (b'{"shop":"us"}', "us", None),
    ]


def test_airflow_renders_a_tag_of_text_and_leaves_a_callable_alone(directory: Path) -> None:
    """Airflow calls a callable that it finds in a templated field, and would take what that returns for the tag."""
    calls: list[Any] = []
    operator = QewQewStageOperator(task_id="stage", topic="events", records=["a"], tag=calls.append, id="{{ params.id }}")
    operator.render_template_fields({"params": {"id": "seven"}})
    assert calls == []
    operator.execute(context())
    assert calls == ["a"]
    with Topic(directory / "events") as topic:
        assert [message.id for message in topic] == ["seven"]


def test_a_task_appends_once_and_says_so(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert appended(directory, records=["a", "b"]) == [(b"a", None, None), (b"b", None, None)]
    assert "Staged 2 records (2 bytes)" in capfd.readouterr().out
    assert appended(directory, records=["c"]) == [(b"a", None, None), (b"b", None, None)]
    assert "Stored nothing: an earlier try staged 2 records" in capfd.readouterr().out
    # The topic has no more messages than before, if as many were removed.
    settings = {"block_size": 1, "max_records": 2}
    assert appended(directory, "another", records=["d", "e"], topic_settings=settings) == [(b"d", None, None), (b"e", None, None)]
    assert "Staged 2 records (2 bytes)" in capfd.readouterr().out


def test_what_was_appended_before_an_error_is_not_there(directory: Path) -> None:
    """Also of a source so large that its beginning was already written to disk."""

    def source() -> Iterator[bytes]:
        for number in range(20):
            yield bytes([number]) * (1 << 20)
        raise OSError("the source broke off")

    with pytest.raises(OSError, match="broke off"):
        appended(directory, records=source)
    with Topic(directory / "events") as topic:
        assert len(topic) == 0
    assert list((directory / "events" / "state").iterdir()) == []
    assert len(appended(directory, records=lambda: [b"x" * (1 << 20)] * 20)) == 20


def test_a_topic_that_another_process_writes_to_is_waited_for_and_then_an_error(
    directory: Path, connect: Callable[..., None]
) -> None:
    connect("qewqew_default", "qewqew", str(directory), lock_timeout=0.05)
    with Topic(directory / "events") as topic:
        topic.append(b"first")
        with pytest.raises(Locked):
            appended(directory, records=["a"])
    assert appended(directory, records=["a"]) == [(b"first", None, None), (b"a", None, None)]


def test_the_settings_of_the_task_win_over_those_of_the_connection(directory: Path, connect: Callable[..., None]) -> None:
    connect("qewqew_default", "qewqew", str(directory), topic={"block_size": 1, "max_records": 1})
    for number in range(3):
        kept = appended(directory, str(number), records=[str(number)])
    assert kept == [(b"2", None, None)]
    for number in range(3, 6):
        kept = appended(directory, str(number), records=[str(number)], topic_settings={"max_records": 3})
    assert [body for body, _, _ in kept] == [b"3", b"4", b"5"]
