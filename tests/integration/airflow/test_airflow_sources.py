"""What can be staged: queries, files in object stores, outputs of tasks, and what a function yields."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from airflow.sdk import DAG, ObjectStoragePath, chain, task
from airflow.sdk.io import attach
from airflow_version import DAG_TEST_TELLS_EXCEPTIONS
from holding import Held
from object_store import CREDENTIALS, object_store, s3_client

from qewqew_airflow.notifications.qewqew import QewQewNotifier
from qewqew_airflow.operators.stage import QewQewStageOperator


def rows(held: Held) -> list[Any]:
    return [json.loads(record) for record in held.taken()]


# Queries.


@pytest.fixture
def database(tmp_path: Path, connect: Any) -> Path:
    path = tmp_path / "shop.db"
    connect("shop", "sqlite", str(path))
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER, name TEXT, price REAL, photo BLOB)")
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", [(n, f"größe {n}", n / 4, b"\xff") for n in range(2500)])
    return path


def test_the_rows_of_a_query_are_staged_by_the_names_of_its_columns(run: Any, held: Held, database: Path) -> None:
    with DAG(f"sources_{held.kind}_sql", schedule=None, params={"least": 1}) as dag:
        QewQewStageOperator(
            task_id="stage",
            **held.into,
            sql="SELECT id, name, price * 2 AS twice, photo, NULL AS missing FROM orders WHERE id >= :least ORDER BY id",
            sql_conn_id="shop",
            parameters={"least": "{{ params.least }}"},
        )
    assert run(dag).result("stage")["records"] == 2499
    found = rows(held)
    assert found[0] == {"id": 1, "name": "größe 1", "twice": 0.5, "photo": "/w==", "missing": None}
    assert [row["id"] for row in found] == list(range(1, 2500))


def test_an_infinity_of_a_database_is_a_text_that_spark_reads_as_double(run: Any, held: Held, database: Path) -> None:
    with DAG(f"sources_{held.kind}_infinity", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, sql="SELECT 9e999 AS more, -9e999 AS less", sql_conn_id="shop")
    assert run(dag).result("stage")["records"] == 1
    assert rows(held) == [{"more": "Infinity", "less": "-Infinity"}]


@pytest.mark.parametrize(
    ("sql", "conn_id", "said"),
    [
        ("SELECT id, id FROM orders", "shop", "has two columns 'id'"),
        ("DELETE FROM orders", "shop", "returns no rows"),
        ("SELECT 1", "qewqew_default", "is not a database"),
    ],
    ids=["two columns", "no query", "no database"],
)
def test_a_query_that_cannot_be_staged_is_named_and_stores_nothing(
    run: Any, held: Held, database: Path, capfd: pytest.CaptureFixture[str], sql: str, conn_id: str, said: str
) -> None:
    with DAG(f"sources_{held.kind}_bad_sql", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, sql=sql, sql_conn_id=conn_id)
    assert run(dag).states() == {"stage": "failed"}
    assert said in capfd.readouterr().out
    assert held.taken() == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (2500,)


# Object stores.


@pytest.fixture(scope="module")  # what is attached stays for the life of the process
def bucket() -> Iterator[Any]:
    """A client of an S3 server with the bucket ``lake``, of which Airflow knows under s3://."""
    import s3fs

    with object_store() as url:
        client = s3_client(url)
        client.create_bucket(Bucket="lake")
        key, secret, _ = CREDENTIALS.values()
        for conn_id in (None, "lake"):  # as a provider's connection does
            attach(
                "s3", conn_id=conn_id, fs=s3fs.S3FileSystem(key=key, secret=secret, endpoint_url=url, use_listings_cache=False)
            )
        yield client


def test_files_of_an_object_store_are_staged_as_those_of_the_disk(run: Any, held: Held, bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Bucket="lake", Key="in/a.jsonl", Body=b'{"id":1}\r\n\n{"id":2}')
    bucket.put_object(Bucket="lake", Key="in/b.csv", Body='\ufeffid,name\n3,"größe\n3"\n'.encode())
    (tmp_path / "c.ndjson").write_text('{"id":4}\n')
    with DAG(f"sources_{held.kind}_store", schedule=None, params={"file": "a"}) as dag:
        files = [
            QewQewStageOperator(task_id="a", **held.into, path="s3://lake/in/{{ params.file }}.jsonl", path_conn_id="lake"),
            QewQewStageOperator(task_id="b", **held.into, path=ObjectStoragePath("s3://lake/in/b.csv")),
            QewQewStageOperator(task_id="c", **held.into, path=f"file://{tmp_path}/c.ndjson"),
            QewQewStageOperator(task_id="gone", **held.into, path="s3://lake/in/gone.csv", trigger_rule="all_done"),
        ]
        chain(*files)
    assert run(dag).states() == {"a": "success", "b": "success", "c": "success", "gone": "failed"}
    assert rows(held) == [{"id": 1}, {"id": 2}, {"id": "3", "name": "größe\n3"}, {"id": 4}]


@pytest.mark.parametrize(
    "path", ["s3://lake/many/", "s3://lake/many/*", "s3://lake/many/*.csv*", "s3://lake/m*y/*.csv*", "object"]
)
def test_several_files_of_an_object_store_are_staged_in_the_order_of_their_names(
    run: Any, held: Held, bucket: Any, path: str
) -> None:
    bucket.put_object(Bucket="lake", Key="many/b.csv", Body=b"id;name\n3;c\n")
    bucket.put_object(Bucket="lake", Key="many/a.csv.gz", Body=gzip.compress(b"id,name\n1,a\n2,\n"))
    bucket.put_object(Bucket="lake", Key="many/below/c.csv", Body=b"no")
    given: Any = ObjectStoragePath("s3://lake/many/*.csv*", conn_id="lake") if path == "object" else path
    with DAG(f"sources_{held.kind}_several_{abs(hash(path))}", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, path=given, path_conn_id=None if path == "object" else "lake")
    assert run(dag).result("stage")["records"] == 3
    assert rows(held) == [{"id": "1", "name": "a"}, {"id": "2", "name": None}, {"id": "3", "name": "c"}]


# Outputs of tasks.


def test_what_mapped_tasks_returned_is_staged_in_one_commit_in_the_order_of_their_indexes(run: Any, held: Held) -> None:
    with DAG(f"sources_{held.kind}_mapped", schedule=None) as dag:

        @task
        def fetch(page: int) -> Any:
            return [[f"{page} {number}" for number in range(2)], {"page": page}, None, "text", []][page]

        @task
        def plain() -> list[Any]:
            return [[1, 2], {"plain": True}]

        @task
        def frame() -> Any:
            return pandas.DataFrame({"id": [1, 2]})

        mapped = QewQewStageOperator(task_id="mapped", **held.into, records=fetch.expand(page=[0, 1, 2, 3, 4]))
        plain_ones = QewQewStageOperator(task_id="plain_ones", **held.into, records=plain())
        several = QewQewStageOperator(task_id="several", **held.into, records=[fetch(0), frame(), fetch(1), fetch(2)])
        chain(mapped, plain_ones, several)
    ran = run(dag)
    assert [ran.result(task_id)["records"] for task_id in ("mapped", "plain_ones", "several")] == [4, 2, 5]
    taken = held.taken()
    assert taken[:6] == [b"0 0", b"0 1", b'{"page":1}', b"text", b"[1,2]", b'{"plain":true}']
    assert taken[6:] == [b"0 0", b"0 1", b'{"id":1}', b'{"id":2}', b'{"page":1}']


def test_a_task_that_returned_no_list_is_named(run: Any, held: Held, capfd: pytest.CaptureFixture[str]) -> None:
    with DAG(f"sources_{held.kind}_no_list", schedule=None) as dag:

        @task
        def fetch() -> dict[str, int]:
            return {"id": 1}

        QewQewStageOperator(task_id="stage", **held.into, records=fetch())
    assert run(dag).states()["stage"] == "failed"
    assert "returned dict, not a list of records" in capfd.readouterr().out


# Functions.


def test_what_a_function_yields_is_staged_once(run: Any, held: Held) -> None:
    with DAG(f"sources_{held.kind}_function", schedule=None, params={"shop": "north"}) as dag:

        @task
        def count() -> int:
            return 2

        @task.qewqew(**held.into)
        def orders(number: int, shop: str, ti: Any = None, *, price: float = 1.5) -> Iterator[dict[str, Any]]:
            for one in range(number):
                yield {"shop": shop, "id": one, "price": price, "task": ti.task_id}

        orders(count(), "{{ params.shop }}", price=2.5)
        orders.override(task_id="others").partial(shop="south").expand(number=[1, 3])
    first = run(dag)
    assert set(first.states().values()) == {"success"}
    assert first.result("orders") == {held.kind: "orders", "records": 2}
    assert first.result("others", 1) == {held.kind: "orders", "records": 3}
    run.again(dag, first)
    found = rows(held)
    assert len(found) == 6
    assert [row for row in found if row["shop"] == "north"] == [
        {"shop": "north", "id": number, "price": 2.5, "task": "orders"} for number in range(2)
    ]


def test_the_notifier_stages_what_became_of_tasks_and_runs(run: Any, held: Held) -> None:
    tell = QewQewNotifier(**held.into, extra={"team": "{{ dag.dag_id }}"})
    with DAG(f"sources_{held.kind}_notices", schedule=None) as dag:

        @task(on_failure_callback=[tell, tell])
        def breaks() -> None:
            raise RuntimeError("no disk")

        @task(on_success_callback=tell)
        def works() -> None:
            pass

        breaks()
        works()
    ran = run(dag)
    found = {row["task_id"]: row for row in rows(held)}
    assert set(found) == {"breaks", "works"}
    assert {name: found["breaks"][name] for name in ("dag_id", "run_id", "try_number", "state", "exception", "team")} == {
        "dag_id": dag.dag_id,
        "run_id": ran.run_id,
        "try_number": 1,
        "state": "failed",
        "exception": "RuntimeError: no disk" if DAG_TEST_TELLS_EXCEPTIONS else None,
        "team": dag.dag_id,
    }
    assert (found["works"]["state"], found["works"]["exception"]) == ("success", None)
