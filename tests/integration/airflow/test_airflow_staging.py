"""The stage operator in a real Airflow: one commit per task, however often the task is tried."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from airflow.sdk import DAG, task
from holding import Held

from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_core import Queue, Topic, inspect_reader
from qewqew_core.tools import marker


def test_a_task_stages_its_records_in_order(run: Any, held: Held) -> None:
    with DAG(f"stage_{held.kind}_records", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, records=[{"id": 1}, "two", b"\x03"])
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.result("stage") == {held.kind: "orders", "records": 3}
    assert held.taken() == [b'{"id":1}', b"two", b"\x03"]


@pytest.mark.quick("an Airflow task that fails after its commit stages once")
def test_a_task_that_fails_after_its_commit_stages_once(run: Any, held: Held) -> None:
    """The commit is there, Airflow does not know: as when the worker is killed between the two."""

    def fail_once(context: Any, result: Any) -> None:
        if context["ti"].try_number == 1:
            raise AirflowException("after the commit")

    with DAG(f"stage_{held.kind}_retried", schedule=None) as dag:
        QewQewStageOperator(
            task_id="stage",
            **held.into,
            records=lambda ti: [f"record of try {ti.try_number}"],
            post_execute=fail_once,
            retries=1,
            retry_delay=timedelta(0),
        )
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.tries("stage") == 2
    assert ran.result("stage") == {held.kind: "orders", "records": 1, "repeated": True, "stored": 0}
    assert held.taken() == [b"record of try 1"]


@pytest.mark.parametrize("held", ["queue"], indirect=True)  # a topic has no bound that refuses
def test_a_full_queue_fails_the_task_and_a_retry_stages_when_there_is_room(
    run: Any, held: Held, connect: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    connect("qewqew_default", "qewqew", str(held.directory), max_records=2)
    with Queue(held.path) as queue:
        queue.put(b"earlier")
    with DAG(f"stage_{held.kind}_full", schedule=None) as dag:
        QewQewStageOperator(
            task_id="stage",
            **held.into,
            records=["a", "b"],
            retries=1,
            retry_delay=timedelta(0),
            on_retry_callback=[lambda context: earlier.extend(held.taken())],
        )
    earlier: list[bytes] = []
    ran = run(dag)
    assert ran.states() == {"stage": "success"}
    assert ran.tries("stage") == 2
    assert earlier == [b"earlier"]
    assert held.taken() == [b"a", b"b"]
    assert "Full" in capfd.readouterr().out


def test_a_cleared_task_stages_nothing_and_a_new_run_stages_again(run: Any, held: Held) -> None:
    with DAG(f"stage_{held.kind}_cleared", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, records=lambda ti: [ti.run_id, ti.run_id])
    first = run(dag)
    cleared = run.again(dag, first)
    assert cleared.run_id == first.run_id
    assert cleared.tries("stage") == 2
    assert cleared.result("stage") == {held.kind: "orders", "records": 2, "repeated": True, "stored": 0}
    second = run(dag)
    assert held.taken() == [first.run_id.encode()] * 2 + [second.run_id.encode()] * 2


def test_a_cleared_task_stages_nothing_when_its_records_were_consumed(run: Any, held: Held) -> None:
    with DAG(f"stage_{held.kind}_consumed", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, records=["a"])
    first = run(dag)
    assert held.taken() == [b"a"]
    assert run.again(dag, first).result("stage")["records"] == 1
    assert held.taken() == []


def test_mapped_tasks_stage_each_their_own_and_again_only_what_is_missing(run: Any, held: Held) -> None:
    def numbers(shop: int) -> list[str]:
        return [f"{shop} {number}" for number in range(20)]

    with DAG(f"stage_{held.kind}_mapped", schedule=None) as dag:
        QewQewStageOperator.partial(task_id="stage", **held.into, records=numbers).expand(
            op_kwargs=[{"shop": shop} for shop in range(4)]
        )
    first = run(dag)
    assert set(first.states().values()) == {"success"}
    assert first.result("stage", 2) == {held.kind: "orders", "records": 20}
    run.again(dag, first)
    records = [record.decode() for record in held.taken()]
    assert len(records) == 80
    for shop in range(4):
        assert [record for record in records if record.startswith(f"{shop} ")] == numbers(shop)


def test_the_result_of_another_task_and_templates_reach_the_callable(run: Any, held: Held, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"file": "b"}\n')
    with DAG(f"stage_{held.kind}_templates", schedule=None, params={"queue": "orders", "file": "b"}) as dag:

        @task
        def fetch() -> list[dict[str, int]]:
            return [{"id": 1}, {"id": 2}]

        QewQewStageOperator(
            task_id="stage",
            **{**held.into, next(iter(held.into)): "{{ params.queue }}"},
            records=lambda rows, ti: [*rows, ti.task_id],
            op_kwargs={"rows": fetch()},
        ) >> QewQewStageOperator(task_id="file", **held.into, path=str(tmp_path / "{{ params.file }}.jsonl"))
    assert run(dag).states() == {"fetch": "success", "stage": "success", "file": "success"}
    assert held.taken() == [b'{"id":1}', b'{"id":2}', b"stage", b'{"file": "b"}']


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"queue_name": "../orders", "records": ["a"]}, "BadPath"),
        ({"queue_name": "orders", "records": ["a"], "qewqew_conn_id": "nowhere"}, "nowhere"),
        ({"queue_name": "orders", "records": ["a", {1}]}, "BadRecord"),
        ({"queue_name": "orders", "records": ["a", "x" * 70_000]}, "RecordTooLarge"),
        ({"topic": "../events", "records": ["a"]}, "BadPath"),
        ({"topic": "events", "records": ["a", {1}]}, "BadRecord"),
        ({"topic": "events", "records": ["a", "x" * 128], "tag": lambda record: record}, "tag"),
        ({"topic": "events", "records": ["a", "b"], "tag": lambda record: 7 if record == "b" else None}, "the tag of record 1"),
        ({"topic": "events", "records": ["a", "b"], "id": "x" * 40}, "id"),
    ],
    ids=["path", "connection", "record", "size", "topic path", "message", "long tag", "tag", "id"],
)
def test_bad_input_fails_the_task_by_name_and_stores_nothing(
    run: Any, directory: Path, capfd: pytest.CaptureFixture[str], arguments: dict[str, Any], error: str
) -> None:
    with DAG("stage_bad", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **arguments)
    assert run(dag).states() == {"stage": "failed"}
    assert error in capfd.readouterr().out
    assert {path.name for path in directory.iterdir()} - {"events"} == {marker.NAME}
    assert inspect_reader(directory / "events", "any").records == 0


def test_staged_json_is_what_a_reader_of_json_gets_back(run: Any, held: Held) -> None:
    rows = [{"name": "größe", "n": None, "list": [1, 2.5, "x"]}]
    with DAG(f"stage_{held.kind}_json", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", **held.into, records=rows)
    run(dag)
    assert [json.loads(record) for record in held.taken()] == rows


def test_tags_and_ids_come_from_templates_or_from_each_record_and_are_filtered_by(run: Any, directory: Path) -> None:
    orders = [{"id": 1, "shop": "eu.de"}, {"id": 2, "shop": "us"}, {"id": 3, "shop": None}]
    with DAG("stage_tags", schedule=None, params={"day": "monday"}) as dag:
        QewQewStageOperator(
            task_id="each", topic="events", records=orders, tag=lambda order: order["shop"], id=lambda order: str(order["id"])
        ) >> QewQewStageOperator(
            task_id="all", topic="events", records=["x", "y"], tag="day.{{ params.day }}", id="{{ run_id[:6] }}"
        )
    ran = run(dag)
    assert ran.states() == {"each": "success", "all": "success"}
    assert ran.result("each") == {"topic": "events", "records": 3}
    with Topic(directory / "events") as topic:
        assert [(message.tag, message.id) for message in topic] == [
            *[("eu.de", "1"), ("us", "2"), (None, "3")],
            *[("day.monday", "manual")] * 2,
        ]
        with topic.reader("eu", "eu.#") as reader:
            assert [json.loads(message.body)["id"] for message in reader] == [1]


def test_a_topic_with_one_reader_is_a_queue_for_large_records_that_leaves_no_blocks(run: Any, directory: Path) -> None:
    """Bodies of more than the 64 KiB of a queue, in blocks that go when they were committed and the next task stages."""
    settings = {"delete_committed": True, "block_size": 1 << 20}

    def stage(name: str) -> None:
        with DAG(name, schedule=None) as dag:
            records = [bytes([number]) * (300_000 + number) for number in range(10)]
            QewQewStageOperator(task_id="stage", topic="images", records=records, topic_settings=settings)
        assert run(dag).states() == {"stage": "success"}

    def blocks() -> int:
        return len(list((directory / "images" / "data").glob("*.zbus")))

    stage("stage_large")
    stage("stage_more")
    assert blocks() == 2  # what was staged together lies together
    with Topic(directory / "images") as topic, topic.reader("load") as reader:
        batch = reader.lease("run 1")
        assert [len(record) for record in batch] == [300_000 + number for number in range(10)] * 2
        batch.ack()
    assert blocks() == 2
    stage("stage_last")
    assert blocks() == 1
    assert inspect_reader(directory / "images", "load").records == 10
