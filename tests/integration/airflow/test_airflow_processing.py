"""`@task.qewqew_batch`: a function gets a batch, which is acknowledged when it has returned."""

from __future__ import annotations

import re
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException
from airflow.sdk import DAG, task
from holding import Held

from qewqew_airflow.operators.batch import LeasedBatch
from qewqew_airflow.operators.process import QewQewProcessOperator
from qewqew_core import BadArgument, Queue, Topic

TAKEN: list[tuple[str, int, list[bytes]]] = []  # batch, attempt, records, in the order of calls


@pytest.fixture(autouse=True)
def _none_taken() -> None:
    TAKEN.clear()


def note(batch: Any) -> list[bytes]:
    records = [bytes(record) for record in batch]
    TAKEN.append((batch.id, batch.attempt, records))
    return records


def ended(held: Held) -> tuple[int, int, int, int]:
    counts = held.counts()
    return counts["records"], counts["leased"], counts["returned"], counts["dead"]


def test_a_function_gets_the_records_and_the_batch_is_acknowledged(run: Any, held: Held) -> None:
    held.put("a", "b", "c")
    with DAG(f"process_{held.kind}", schedule=None, params={"most": 2}) as dag:

        @task.qewqew_batch(**held.names, max_records="{{ params.most }}", lease_timeout=60)
        def load(factor: int, batch: Any, ti: Any = None) -> dict[str, Any]:
            return {"task": ti.task_id, "lines": len(note(batch)) * factor, "attempt": batch.attempt}

        first = load(10)
        first >> load.override(task_id="rest")(1)
    ran = run(dag)
    result = ran.result("load")
    assert result["returned"] == {"task": "load", "lines": 20, "attempt": 1}
    assert (result["records"], result["bytes"], result["batch_id"]) == (2, 2, TAKEN[0][0])
    assert [records for _, _, records in TAKEN] == [[b"a", b"b"], [b"c"]]
    assert ended(held) == (0, 0, 0, 0)


def test_messages_of_a_topic_have_tags(run: Any, directory: Path) -> None:
    with Topic(directory / "events") as topic:
        topic.append(b"1", tag="eu")
        topic.append(b"2", tag="us")
    with DAG("process_messages", schedule=None) as dag:
        QewQewProcessOperator(
            task_id="load",
            topic="events",
            reader="eu",
            filter="eu",
            python_callable=lambda batch: [[message.tag, message.body.decode()] for message in batch.messages()],
        )
    assert run(dag).result("load")["returned"] == [["eu", "1"]]


def test_without_records_the_task_is_skipped(run: Any, held: Held) -> None:
    with DAG(f"process_{held.kind}_none", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=note)
    assert run(dag).states() == {"load": "skipped"}
    assert TAKEN == []


def test_each_try_gets_the_same_batch_and_after_the_last_one_it_is_returned(run: Any, held: Held) -> None:
    held.put("a", "b")

    def fail(batch: Any) -> None:
        note(batch)
        held.put("later")
        raise RuntimeError("password=hush, the database is away")

    with DAG(f"process_{held.kind}_fails", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=fail, retries=1, retry_delay=0.0)
    assert run(dag).states() == {"load": "failed"}
    assert [(batch, attempt, records) for batch, attempt, records in TAKEN] == [(TAKEN[0][0], 1, [b"a", b"b"])] * 2
    assert ended(held) == (2, 0, 1, 0)
    with held.open() as opened:
        (batch,) = opened.batches()
    assert batch.reason == "RuntimeError: password=…, the database is away"


def test_a_task_that_is_cleared_gets_its_batch_again(run: Any, held: Held) -> None:
    held.put("a")
    with DAG(f"process_{held.kind}_again", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=lambda batch: len(note(batch)))
    first = run(dag)
    held.put("b")
    assert run.again(dag, first).states() == {"load": "success"}
    assert [(batch, records) for batch, _, records in TAKEN] == [(TAKEN[0][0], [b"a"])] * 2
    assert ended(held) == (1, 0, 0, 0)


def test_an_error_that_a_retry_would_meet_again_returns_the_batch_at_once(run: Any, held: Held) -> None:
    held.put("a")

    def fail(batch: Any) -> None:
        note(batch)
        raise AirflowFailException("not today")

    with DAG(f"process_{held.kind}_hopeless", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=fail, retries=3, retry_delay=0.0)
    assert run(dag).states() == {"load": "failed"}
    assert len(TAKEN) == 1
    assert ended(held) == (0, 0, 1, 0)


def test_a_function_that_skips_its_task_returns_the_batch(run: Any, held: Held) -> None:
    held.put("a")

    def skip(batch: Any) -> None:
        raise AirflowSkipException("not today")

    with DAG(f"process_{held.kind}_skips", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=skip, retries=3)
    assert run(dag).states() == {"load": "skipped"}
    assert ended(held) == (0, 0, 1, 0)


def test_work_that_nobody_would_do_is_not_acknowledged(run: Any, held: Held) -> None:
    held.put("a")
    for number, (lazy, said) in enumerate(
        [
            (lambda batch: map(note, batch), "the function has returned a map, which nobody would run"),
            (lambda batch: (note(record) for record in batch), "the function has returned a generator, which nobody would run"),
            (lambda batch: object(), "the function has returned a object, which XCom cannot store"),
        ]
    ):
        with DAG(f"process_{held.kind}_lazy_{number}", schedule=None) as dag:
            QewQewProcessOperator(task_id="load", **held.names, python_callable=lazy, do_xcom_push=False)
        assert run(dag).states() == {"load": "failed"}
        with held.open() as opened:
            (batch,) = opened.batches()
        assert batch.state == "returned"
        assert said in batch.reason
    assert TAKEN == []


def test_a_function_that_yields_is_an_error_of_the_dag_file() -> None:
    def lazy(batch: Any) -> Any:
        yield from batch

    async def later(batch: Any) -> Any:
        for record in batch:
            yield record

    for each in lazy, later:
        with pytest.raises(BadArgument, match=r"the function (lazy|later) yields, so it returns a generator, which nobody"):
            QewQewProcessOperator(task_id="load", queue_name="orders", python_callable=each)


def test_the_lease_is_extended_while_the_function_works(run: Any, held: Held) -> None:
    held.put("a")

    def work(batch: Any) -> bool:
        first = batch.expires
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with held.open() as opened:
                if opened.batches()[0].expires > first:
                    return True
            time.sleep(0.1)
        return False

    with DAG(f"process_{held.kind}_long", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=work, lease_timeout=3)
    assert run(dag).result("load")["returned"] is True


def test_a_function_whose_batch_others_may_have_is_interrupted(run: Any, held: Held, capfd: pytest.CaptureFixture[str]) -> None:
    held.put("a")
    works, interrupted = threading.Event(), threading.Event()

    def work(batch: Any) -> None:
        note(batch)
        works.set()
        try:
            for _ in range(6000):
                time.sleep(0.01)
        finally:
            interrupted.set()

    def hold() -> None:
        assert works.wait(60)
        with held.blocked():
            interrupted.wait(60)

    with DAG(f"process_{held.kind}_lost", schedule=None) as dag:
        QewQewProcessOperator(task_id="load", **held.names, python_callable=work, lease_timeout=3)
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        ran = run(dag)
    finally:
        holder.join()
    assert ran.states() == {"load": "failed"}
    assert "LeaseLost: the lease of batch orders-" in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        {"python_callable": lambda: None},
        {"python_callable": note, "queue_name": None},
        {"python_callable": note, "topic": "events"},
        {"python_callable": note, "max_records": 0},
        {"python_callable": note, "lease_timeout": 0.5},
    ],
)
def test_what_cannot_be_meant_is_an_error_of_the_dag_file(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        QewQewProcessOperator(**{"task_id": "load", "queue_name": "orders", **arguments})


def test_the_example_of_the_documentation_writes_each_record_once_whatever_is_killed(
    run: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "airflow" / "lease-and-submit.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (text,) = [each for each in examples if "orders_to_duckdb" in each]
    for given, here in (
        ("/data/orders.duckdb", str(tmp_path / "orders.duckdb")),
        ('"retries": 2}):', '"retries": 1, "retry_delay": 0.0}) as dag:'),
    ):
        assert given in text
        text = text.replace(given, here)
    (tmp_path / "example.py").write_text(text)
    made = runpy.run_path(str(tmp_path / "example.py"))
    with Queue(directory / "orders") as queue:
        queue.put_many([b'{"id": 1}', b'{"id": 2}'])
    acknowledge, failures = LeasedBatch.acknowledge, [RuntimeError("the worker is gone")]

    def fail_once(self: LeasedBatch) -> None:
        if failures:  # after the function's commit
            raise failures.pop()
        acknowledge(self)

    monkeypatch.setattr(LeasedBatch, "acknowledge", fail_once)
    ran = run(made["dag"])
    assert (ran.states(), ran.tries("load")) == ({"load": "success"}, 2)
    with duckdb.connect(str(tmp_path / "orders.duckdb")) as db:
        assert db.execute("SELECT record->>'id' FROM orders ORDER BY 1").fetchall() == [("1",), ("2",)]
