"""The stage operator in a real Airflow: one commit per task, however often the task is tried."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowException

from qewqew_airflow.operators import QewQewStageOperator
from qewqew_core import Queue


def taken(directory: Path, name: str = "orders") -> list[bytes]:
    with Queue(directory / name) as queue:
        return queue.get_many(10_000)


def test_a_task_stages_its_records_in_order(run: Any, directory: Path) -> None:
    with DAG("stage_records", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=[{"id": 1}, "two", b"\x03"])
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.result("stage") == {"queue": "orders", "records": 3}
    assert taken(directory) == [b'{"id":1}', b"two", b"\x03"]


def test_a_task_that_fails_after_its_commit_stages_once(run: Any, directory: Path) -> None:
    """The commit is there, Airflow does not know: as when the worker is killed between the two."""

    def fail_once(context: Any, result: Any) -> None:
        if context["ti"].try_number == 1:
            raise AirflowException("after the commit")

    with DAG("stage_retried", schedule=None) as dag:
        QewQewStageOperator(
            task_id="stage",
            queue_name="orders",
            records=lambda ti: [f"record of try {ti.try_number}"],
            post_execute=fail_once,
            retries=1,
            retry_delay=timedelta(0),
        )
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.tries("stage") == 2
    assert ran.result("stage") == {"queue": "orders", "records": 1}
    assert taken(directory) == [b"record of try 1"]


def test_a_full_queue_fails_the_task_and_a_retry_stages_when_there_is_room(
    run: Any, directory: Path, connect: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    connect("qewqew_default", "qewqew", str(directory), max_records=2)
    with Queue(directory / "orders") as queue:
        queue.put(b"earlier")
    with DAG("stage_full", schedule=None) as dag:
        QewQewStageOperator(
            task_id="stage",
            queue_name="orders",
            records=["a", "b"],
            retries=1,
            retry_delay=timedelta(0),
            on_retry_callback=[lambda context: earlier.extend(taken(directory))],
        )
    earlier: list[bytes] = []
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.tries("stage") == 2
    assert earlier == [b"earlier"]
    assert taken(directory) == [b"a", b"b"]
    assert "QueueFull" in capfd.readouterr().out


def test_a_cleared_task_stages_nothing_and_a_new_run_stages_again(run: Any, directory: Path) -> None:
    with DAG("stage_cleared", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=lambda ti: [ti.run_id, ti.run_id])
    first = run(dag)
    cleared = run.again(dag, first)
    assert cleared.run_id == first.run_id
    assert cleared.tries("stage") == 2
    assert cleared.result("stage") == {"queue": "orders", "records": 2}
    second = run(dag)
    assert taken(directory) == [first.run_id.encode()] * 2 + [second.run_id.encode()] * 2


def test_a_cleared_task_stages_nothing_when_its_records_were_consumed(run: Any, directory: Path) -> None:
    with DAG("stage_consumed", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=["a"])
    first = run(dag)
    assert taken(directory) == [b"a"]
    assert run.again(dag, first).result("stage")["records"] == 1
    assert taken(directory) == []


def test_mapped_tasks_stage_each_their_own_and_again_only_what_is_missing(run: Any, directory: Path) -> None:
    def numbers(shop: int) -> list[str]:
        return [f"{shop} {number}" for number in range(20)]

    with DAG("stage_mapped", schedule=None) as dag:
        QewQewStageOperator.partial(task_id="stage", queue_name="orders", records=numbers).expand(
            op_kwargs=[{"shop": shop} for shop in range(4)]
        )
    first = run(dag)
    assert set(first.states().values()) == {"success"}
    assert first.result("stage", 2) == {"queue": "orders", "records": 20}
    run.again(dag, first)
    records = [record.decode() for record in taken(directory)]
    assert len(records) == 80
    for shop in range(4):
        assert [record for record in records if record.startswith(f"{shop} ")] == numbers(shop)


def test_the_result_of_another_task_and_templates_reach_the_callable(run: Any, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"file": "b"}\n')
    with DAG("stage_templates", schedule=None, params={"queue": "orders", "file": "b"}) as dag:

        @task
        def fetch() -> list[dict[str, int]]:
            return [{"id": 1}, {"id": 2}]

        QewQewStageOperator(
            task_id="stage",
            queue_name="{{ params.queue }}",
            records=lambda rows, ti: [*rows, ti.task_id],
            op_kwargs={"rows": fetch()},
        ) >> QewQewStageOperator(task_id="file", queue_name="orders", path=str(tmp_path / "{{ params.file }}.jsonl"))
    assert run(dag).states() == {"fetch": "success", "stage": "success", "file": "success"}
    assert taken(directory) == [b'{"id":1}', b'{"id":2}', b"stage", b'{"file": "b"}']


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"queue_name": "../orders", "records": ["a"]}, "BadPath"),
        ({"queue_name": "orders", "records": ["a"], "qewqew_conn_id": "nowhere"}, "nowhere"),
        ({"queue_name": "orders", "records": ["a", {1}]}, "BadRecord"),
        ({"queue_name": "orders", "records": ["a", "x" * 70_000]}, "RecordTooLarge"),
    ],
    ids=["path", "connection", "record", "size"],
)
def test_bad_input_fails_the_task_by_name_and_stores_nothing(
    run: Any, directory: Path, capfd: pytest.CaptureFixture[str], arguments: dict[str, Any], error: str
) -> None:
    with DAG("stage_bad", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **arguments)
    assert run(dag).states() == {"stage": "failed"}
    assert error in capfd.readouterr().out
    assert [path.name for path in directory.iterdir()] == []


def test_staged_json_is_what_a_reader_of_json_gets_back(run: Any, directory: Path) -> None:
    rows = [{"name": "größe", "n": None, "list": [1, 2.5, "x"]}]
    with DAG("stage_json", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=rows)
    run(dag)
    assert [json.loads(record) for record in taken(directory)] == rows
