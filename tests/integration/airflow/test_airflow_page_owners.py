"""Leased batches whose owner will not come back, as the page shows and returns them, in a real Airflow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import Login, act, only_connection

from qewqew_core import Queue

pytestmark = pytest.mark.filterwarnings("ignore:The HMAC key")  # of an Airflow that was just made


@pytest.fixture
def leased(directory: Path, run: Any) -> Callable[..., dict[str, Any]]:
    """``leased(dag_id, state)``: a batch leased by a task of a run in Airflow, whose instance is then in this state."""

    def make(dag_id: str, state: str | None, run_state: str = "failed") -> dict[str, Any]:
        from airflow.models.dagrun import DagRun
        from airflow.models.taskinstance import TaskInstance
        from airflow.sdk import DAG, task
        from airflow.utils.session import create_session

        with DAG(dag_id, schedule=None) as dag:

            @task
            def load() -> None: ...

            load()
        run_id = run(dag).run_id
        with create_session() as session:
            session.query(TaskInstance).filter_by(dag_id=dag_id, run_id=run_id).update({"state": state})
            session.query(DagRun).filter_by(dag_id=dag_id, run_id=run_id).update({"state": run_state})
        with Queue(directory / "orders") as queue:
            queue.put_many([b"x"] * 3)
            batch = queue.lease(f"{dag_id}|{run_id}|load|-1")
            assert batch is not None
        return {"queue": "orders", "batch": batch.id, "state": "leased", "attempt": 1, "made": batch.made}

    return make


def test_a_leased_batch_whose_task_is_gone_is_stuck_and_can_be_returned(
    directory: Path, client: Login, fresh: None, leased: Any
) -> None:
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    body = leased("page_gone", "failed")
    op = client("op")
    (row,) = only_connection(op)["queues"]
    assert (row["stuck"], row["batches"][0]["owner"]["life"]) == (1, "gone")
    assert [act(op, action, body).status_code for action in ("put-back", "drop")] == [400, 400]
    answer = act(op, "return", body)
    assert (answer.status_code, answer.json()) == (200, {"batch": body["batch"], "records": 3})
    with Queue(directory / "orders") as queue:
        (batch,) = queue.batches()
    assert (batch.state, batch.reason) == ("returned", "op returned it on the page: its owner was gone")
    assert act(op, "return", body).status_code == 409
    with create_session() as session:
        (entry,) = session.query(Log).filter_by(event="qewqew_return", dag_id="page_gone").all()
        assert (entry.owner, entry.task_id, json.loads(entry.extra)["batch"]) == ("op", "load", body["batch"])


@pytest.mark.parametrize(
    ("state", "run_state"),
    [
        *[(state, "running") for state in ("running", "queued", "deferred", "up_for_retry", None, "success")],
        ("running", "failed"),
        ("up_for_retry", "failed"),
    ],
)
def test_a_leased_batch_stays_with_a_task_that_works_on_it_or_will(
    state: str | None, run_state: str, directory: Path, client: Login, fresh: None, leased: Any
) -> None:
    body = leased(f"page_alive_{state}_{run_state}", state, run_state)
    op = client("op")
    assert only_connection(op)["queues"][0]["stuck"] == 0
    answer = act(op, "return", body)
    assert (answer.status_code, "stays with its owner" in answer.json()["detail"]) == (409, True)
    with Queue(directory / "orders") as queue:
        assert [batch.state for batch in queue.batches()] == ["leased"]


def test_a_leased_batch_stays_with_a_process_that_lives_and_with_owners_that_airflow_does_not_know(
    directory: Path, client: Login, fresh: None, leased: Any
) -> None:
    import fcntl

    op = client("op")
    body = leased("page_zombie", "failed")
    fd = os.open(directory / "orders.batches" / body["batch"], os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        answer = act(op, "return", body)
        assert (answer.status_code, "a process on this host" in answer.json()["detail"]) == (409, True)
    finally:
        os.close(fd)
    for key, why in (("a program", "is not a task of Airflow"), ("nowhere|run|load|-1", "not of a DAG of this Airflow")):
        with Queue(directory / "others") as queue:
            queue.put(b"x")
            batch = queue.lease(key)
            assert batch is not None
        other = {**body, "queue": "others", "batch": batch.id, "made": batch.made}
        answer = act(op, "return", other)
        assert (answer.status_code, why in answer.json()["detail"]) == (409, True)
    assert act(op, "return", body).status_code == 200


@pytest.mark.parametrize("state", ["success", "up_for_retry", None])
def test_a_batch_of_a_renamed_dag_is_stuck_unless_its_task_runs(
    state: str | None, directory: Path, client: Login, fresh: None, leased: Any
) -> None:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    op = client("op")
    bodies = [leased(f"page_renamed_{state}", state, "running"), leased(f"page_running_{state}", "running", "running")]
    assert only_connection(op)["queues"][0]["stuck"] == 0
    with create_session() as session:  # as the DAG processor, when the file has another DAG
        session.query(DagModel).filter(DagModel.dag_id.in_([f"page_renamed_{state}", f"page_running_{state}"])).update(
            {"is_stale": True}
        )
    (row,) = only_connection(op)["queues"]
    owners = {batch["id"]: batch["owner"] for batch in row["batches"]}
    assert (row["stuck"], "was renamed or removed" in owners[bodies[0]["batch"]]["why"]) == (1, True)
    assert [act(op, "return", body).status_code for body in bodies] == [200, 409]


def test_a_batch_of_a_deleted_dag_or_run_is_stuck(directory: Path, client: Login, fresh: None, leased: Any) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session

    op, admin = client("op"), client("admin")
    bodies = [leased("page_deleted", "success", "running"), leased("page_without_run", "success", "running")]
    assert only_connection(op)["queues"][0]["stuck"] == 0
    assert admin.delete("/api/v2/dags/page_deleted").status_code == 204
    with create_session() as session:
        session.query(DagRun).filter_by(dag_id="page_without_run").delete()
    (row,) = only_connection(op)["queues"]
    owners = [batch["owner"] for batch in row["batches"]]
    assert (row["stuck"], {(one["life"], one["why"]) for one in owners}) == (
        2,
        {("gone", "Airflow no longer has its task instance")},
    )
    assert [act(op, "return", body).status_code for body in bodies] == [200, 200]


def test_a_stuck_batch_is_not_hidden_by_many_dead_ones(
    directory: Path, client: Login, fresh: None, leased: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import contents

    monkeypatch.setattr(contents, "MOST_BATCHES", 2)
    with Queue(directory / "orders", max_attempts=1) as queue:
        queue.put_many([b"x"] * 3)
        for key in "abc":
            batch = queue.lease(key, max_records=1)
            assert batch is not None
            batch.nack("it failed")
    leased("page_hidden", "failed")
    (row,) = only_connection(client("op"))["queues"]
    assert (row["dead"], row["leased"], row["stuck"], len(row["batches"])) == (3, 1, 1, 3)


@pytest.mark.parametrize("key", ["by hand", "nowhere|run|load|-1"])
def test_a_batch_whose_owner_airflow_does_not_know_is_stuck_after_a_day(
    key: str, directory: Path, client: Login, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    from qewqew_airflow.page import owners

    with Queue(directory / "orders") as queue:
        queue.put(b"x")
        batch = queue.lease(key)
        assert batch is not None
    body = {"queue": "orders", "batch": batch.id, "state": "leased", "attempt": 1, "made": batch.made}
    op, viewer = client("op"), client("viewer")
    assert (only_connection(op)["queues"][0]["stuck"], act(op, "return", body).status_code) == (0, 409)
    monkeypatch.setattr(owners, "LONGEST_LEASE", timedelta(0))
    (row,) = only_connection(op)["queues"]
    assert (row["stuck"], row["batches"][0]["owner"]["life"]) == (1, "overdue")
    (hidden,) = only_connection(viewer)["queues"]
    assert (hidden["stuck"], hidden["batches"][0]["owner"]) == (1, None)
    assert act(op, "return", body).status_code == 200
    with Queue(directory / "orders") as queue:
        (batch,) = queue.batches()
    assert (batch.state, batch.reason) == ("returned", "op returned it on the page: its owner was overdue")
