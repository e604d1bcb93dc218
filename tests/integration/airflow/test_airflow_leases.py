"""Lease, work with any engine, acknowledge or return, each a task of its own, in a real Airflow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, task, task_group
from airflow_version import needs_rules_by_index
from holding import Held

from qewqew_airflow.assets.qewqew import create_asset
from qewqew_airflow.operators.leases import QewQewAckOperator, QewQewLeaseOperator, QewQewNackOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_core import BadArgument, Queue
from qewqew_core.batch import manifest, segments
from qewqew_core.tools import marker

NOTHING = {"records": 0, "leased": 0, "returned": 0, "dead": 0}


class Engine:
    """What works on batches in place of Livy, Spark or a program: the records it was given, and how it is to end."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.fails = 0
        self.during: Callable[[], Any] = lambda: None

    def work(self, batch: dict[str, Any]) -> None:
        body = manifest.load(batch["manifest"])
        directory = str(Path(batch["manifest"]).parent)
        records = [one for segment in body.segments for some in segments.read_records(directory, body, segment) for one in some]
        self.seen.append([getattr(one, "body", one).decode() for one in records])
        self.during()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the engine lost an executor")

    def dag(self, held: Held, name: str, *, outlets: list[Any] | None = None, retries: int = 0, **limits: Any) -> DAG:
        """The hand-over: the tasks lease, work, ack and nack."""
        with DAG(held.dag_id(name), schedule=None, default_args={"retry_delay": timedelta(0)}) as dag:
            lease = QewQewLeaseOperator(task_id="lease", **held.names, **limits)
            work = task(task_id="work", retries=retries)(self.work)(lease.output)
            ack = QewQewAckOperator(task_id="ack", batch=lease.output, retries=2, outlets=outlets or [])
            work >> [ack, QewQewNackOperator(task_id="nack", batch=lease.output, retries=2)]
        return dag


@pytest.fixture
def engine() -> Engine:
    return Engine()


def states(lease: str, work: str, ack: str, nack: str) -> dict[str, str]:
    return {"lease": lease, "work": work, "ack": ack, "nack": nack}


DONE = states("success", "success", "success", "skipped")
RETURNED = states("success", "failed", "upstream_failed", "success")


def test_a_batch_goes_through_the_engine_and_is_acknowledged(run: Any, held: Held, engine: Engine) -> None:
    held.put("a", "b", "c")
    ran = run(engine.dag(held, "leases_success", max_records="{{ 1 + 1 }}"))
    assert ran.states() == DONE
    assert engine.seen == [["a", "b"]]
    leased = ran.result("lease")
    where = {held.kind: "orders", **({"reader": "load"} if held.kind == "topic" else {})}
    assert {name: leased[name] for name in (*where, "connection", "attempt", "records", "bytes")} == {
        **where,
        "connection": "qewqew_default",
        "attempt": 1,
        "records": 2,
        "bytes": 2,
    }
    assert ran.result("ack") == {
        **where,
        "batch_id": leased["batch_id"],
        "attempt": 1,
        "records": 2,
        "bytes": 2,
        "state": "acked",
    }
    assert held.counts() == {**NOTHING, "records": 1}


def test_an_empty_queue_skips_all_that_follows(run: Any, held: Held, engine: Engine) -> None:
    assert set(run(engine.dag(held, "leases_empty")).states().values()) == {"skipped"}
    assert engine.seen == []


@pytest.mark.parametrize("rule", ["all_done", "one_success", "none_failed", "always", "one_failed", "all_done_setup_success"])
def test_an_acknowledgement_that_does_not_wait_for_the_work_is_refused_when_the_dag_is_parsed(rule: str) -> None:
    with pytest.raises(BadArgument, match=f"trigger_rule '{rule}': it would acknowledge a batch on which the work has failed"):
        QewQewAckOperator(task_id="ack", batch="b", queue_name="orders", trigger_rule=rule)
    with pytest.raises(BadArgument, match="a teardown: it would acknowledge"):
        QewQewAckOperator(task_id="ack", batch="b", queue_name="orders").as_teardown()
    with DAG("d", default_args={"trigger_rule": rule}), pytest.raises(BadArgument, match=rule):
        QewQewAckOperator(task_id="ack", batch="b", queue_name="orders")
    assert QewQewAckOperator(
        task_id="ack", batch="b", queue_name="orders", trigger_rule="none_failed_min_one_success"
    ).trigger_rule


@pytest.mark.parametrize("late", [{"trigger_rule": "all_done"}, {"is_teardown": True}])
def test_a_trigger_rule_that_is_set_later_acknowledges_nothing(run: Any, held: Held, late: dict[str, Any]) -> None:
    held.put("a")
    with DAG(f"late_{held.kind}_{next(iter(late))}", schedule=None) as dag:
        lease = QewQewLeaseOperator(task_id="lease", **held.names)
        ack = QewQewAckOperator(task_id="ack", batch=lease.output)
        for name, value in late.items():
            setattr(ack, name, value)
    assert run(dag).states()["ack"] == "failed"
    assert held.counts() == NOTHING | {"leased": 1}


def test_a_retry_of_the_engine_works_on_the_same_batch(run: Any, held: Held, engine: Engine) -> None:
    held.put("a")
    engine.fails = 1
    engine.during = lambda: held.put("later")
    assert run(engine.dag(held, "leases_retry", retries=1)).states() == DONE
    assert engine.seen == [["a"], ["a"]]
    assert held.counts() == {**NOTHING, "records": 2}


def test_the_last_failure_returns_the_batch_and_the_next_run_gets_it_first(run: Any, held: Held, engine: Engine) -> None:
    held.put("a")
    engine.fails = 1
    dag = engine.dag(held, "leases_failure")
    failed = run(dag)
    assert failed.states() == RETURNED
    assert failed.result("nack")["state"] == "returned"
    with held.open() as opened:
        assert opened.batches()[0].reason == f"a task failed in run {failed.run_id} of {dag.dag_id}"
    held.put("b")
    assert run(dag).states() == DONE
    assert engine.seen == [["a"], ["a"]]
    assert held.counts() == {**NOTHING, "records": 1}


def test_a_batch_that_was_returned_too_often_is_a_dead_letter(run: Any, held: Held, engine: Engine, connect: Any) -> None:
    connect("qewqew_default", "qewqew", str(held.directory), max_attempts=1)
    held.put("a")
    engine.fails = 1
    assert run(engine.dag(held, "leases_dead")).result("nack")["state"] == "dead"
    assert held.counts() == {**NOTHING, "dead": 1}


def test_clearing_the_whole_run_processes_the_same_batch_again_and_acknowledges_it_once(
    run: Any, held: Held, engine: Engine
) -> None:
    held.put("a")
    dag = engine.dag(held, "leases_cleared")
    first = run(dag)
    held.put("b")
    again = run.again(dag, first)
    assert again.states() == DONE
    assert again.result("lease") == first.result("lease")
    assert engine.seen == [["a"], ["a"]]
    # One that fails now was acknowledged before, and stays so.
    engine.fails = 1
    failed = run.again(dag, first)
    assert failed.states() == RETURNED
    assert failed.result("nack")["state"] == "acked"
    assert held.counts() == {**NOTHING, "records": 1}


def test_clearing_a_run_that_failed_leases_its_returned_batch_again(run: Any, held: Held, engine: Engine) -> None:
    held.put("a")
    engine.fails = 1
    dag = engine.dag(held, "leases_cleared_failure")
    first = run(dag)
    held.put("b")
    again = run.again(dag, first)
    assert again.states() == DONE
    assert again.result("lease")["attempt"] == 2
    assert engine.seen == [["a"], ["a"]]


def test_a_cleared_lease_fails_without_retries_when_its_batch_has_expired(
    run: Any, held: Held, engine: Engine, connect: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    connect("qewqew_default", "qewqew", str(held.directory), retention_bytes=0)
    held.put("a")
    dag = engine.dag(held, "leases_expired")
    dag.task_dict["lease"].retries = 3
    first = run(dag)
    cleared = run.again(dag, first)
    assert (cleared.states()["lease"], cleared.tries("lease")) == ("failed", 2)
    assert "BatchExpired" in capfd.readouterr().out


def lease_for_another(held: Held) -> None:
    with held.open() as opened:
        opened.batches()[0].nack("its time was over")
        opened.lease("another|run|lease|-1")


@pytest.mark.parametrize("ends", ["ack", "nack"])
def test_a_batch_that_another_has_leased_since_is_left_to_it(
    run: Any, held: Held, engine: Engine, ends: str, capfd: pytest.CaptureFixture[str]
) -> None:
    held.put("a")
    engine.during = lambda: lease_for_another(held)
    engine.fails = int(ends == "nack")
    ran = run(engine.dag(held, f"leases_stale_{ends}"))
    assert ran.states()[ends] == "failed"
    assert ran.tries(ends) == 1
    assert "BatchConflict: batch orders-" in (output := capfd.readouterr().out)
    assert "has been leased again by another|run|lease|-1, attempt 2" in output
    assert held.counts() == {**NOTHING, "leased": 1}


def test_a_batch_whose_lease_time_was_over_is_not_acknowledged(
    run: Any, held: Held, engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing extends the lease when its task has ended."""
    held.put("a")

    def outlast() -> None:
        with held.open() as opened:
            until = opened.batches()[0].expires
            while datetime.now(until.tzinfo) < until:
                pass
            opened.return_expired()

    engine.during = outlast
    ran = run(engine.dag(held, "leases_over", lease_timeout=1))
    assert (ran.states()["ack"], ran.tries("ack")) == ("failed", 1)
    assert "is returned, not leased" in capfd.readouterr().out
    assert held.counts() == {**NOTHING, "returned": 1}


def test_an_id_alone_ends_a_batch_of_this_run_only(
    run: Any, held: Held, engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    held.put("a", "b")
    with held.open() as opened:
        foreign = opened.lease("another|run|lease|-1", 1)
    with DAG(held.dag_id("leases_by_id"), schedule=None) as dag:
        lease = QewQewLeaseOperator(task_id="lease", **held.names)
        by_id = QewQewAckOperator(task_id="by_id", batch="{{ ti.xcom_pull('lease')['batch_id'] }}", **held.names)
        by_text = QewQewAckOperator(task_id="by_text", batch="{{ ti.xcom_pull('lease') | tojson }}")
        lease >> by_id >> by_text
        for name, batch in (("foreign", foreign.id), ("unknown", "orders-nothing")):
            QewQewAckOperator(task_id=name, batch=batch, **held.names, retries=2)
    ran = run(dag)
    assert ran.states() == {
        "lease": "success",
        "by_id": "success",
        "by_text": "success",
        "foreign": "failed",
        "unknown": "failed",
    }
    assert (ran.tries("foreign"), ran.tries("unknown")) == (1, 1)
    assert "not by a task of this run" in (output := capfd.readouterr().out)
    assert "BatchNotFound" in output
    assert held.counts() == {**NOTHING, "leased": 1}


def test_a_wrong_name_makes_nothing(run: Any, directory: Path) -> None:
    with DAG("leases_wrong_name", schedule=None) as dag:
        QewQewAckOperator(task_id="queue", batch="orders-1", queue_name="orders")
        QewQewAckOperator(task_id="topic", batch="orders-1", topic="orders", reader="load")
    assert run(dag).states() == {"queue": "failed", "topic": "failed"}
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_runs_at_the_same_time_have_batches_of_their_own(run: Any, held: Held) -> None:
    """As with max_active_runs above 1, or a backfill: the second run leases while the first has its batch."""
    with DAG(held.dag_id("leases_runs"), schedule=None) as dag:
        QewQewLeaseOperator(task_id="lease", **held.names, max_records=2)
    held.put(*"abcde")
    batches = [run(dag).result("lease") for _ in range(3)]
    assert [batch["records"] for batch in batches] == [2, 2, 1]
    assert len({batch["batch_id"] for batch in batches}) == 3
    assert held.counts() == {**NOTHING, "leased": 3}


@pytest.mark.parametrize("fails", ["nothing", pytest.param("b", marks=needs_rules_by_index)])
def test_mapped_tasks_lease_and_end_each_their_own(run: Any, directory: Path, fails: str) -> None:
    for shop in "abc":
        with Queue(directory / shop) as queue:
            queue.put_many([shop.encode()])
    with DAG(f"leases_mapped_{fails}", schedule=None) as dag:

        @task
        def work(batch: dict[str, Any]) -> None:
            if batch["queue"] == fails:
                raise RuntimeError("not this one")

        @task_group
        def hand_over(shop: str) -> None:
            lease = QewQewLeaseOperator(task_id="lease", queue_name=shop)
            ends = [
                QewQewAckOperator(task_id="ack", batch=lease.output),
                QewQewNackOperator(task_id="nack", batch=lease.output),
            ]
            work(lease.output) >> ends

        hand_over.expand(shop=["a", "b", "c", "empty"])
    ran = run(dag).states()
    ack, nack = ("upstream_failed", "success") if fails == "b" else ("success", "skipped")
    assert [ran[f"hand_over.ack[{number}]"] for number in range(4)] == ["success", ack, "success", "skipped"]
    assert [ran[f"hand_over.nack[{number}]"] for number in range(4)] == ["skipped", nack, "skipped", "skipped"]
    held = [Held("queue", directory), Held("queue", directory)]
    for one, shop in zip(held, "ab", strict=True):
        one.path = directory / shop
    assert [one.counts()["returned"] for one in held] == [0, int(fails == "b")]


def test_assets_are_told_how_much_it_was(run: Any, held: Held, engine: Engine) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.settings import Session

    staged, table = create_asset(name=f"told_{held.kind}"), Asset(f"file:///told/{held.kind}")
    assert staged.uri == f"qewqew://qewqew_default/told_{held.kind}"
    with DAG(held.dag_id("leases_assets_stage"), schedule=None) as stage:
        QewQewStageOperator(task_id="stage", **held.into, records=["a", "b"], outlets=[staged])
    run(stage)
    ran = run(engine.dag(held, "leases_assets", outlets=[table]))
    assert ran.states() == DONE
    with Session() as session:
        extras = {event.asset.uri: event.extra for event in session.query(AssetEvent).all()}
    assert extras[staged.uri] == {held.kind: "orders", "records": 2}
    assert extras[table.uri] == ran.result("ack")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QewQewLeaseOperator(task_id="t"), "give either queue_name or topic"),
        (lambda: QewQewLeaseOperator(task_id="t", topic="orders"), "the name of one of its readers"),
        (lambda: QewQewLeaseOperator(task_id="t", queue_name="orders", max_records=0), "max_records is 0"),
        (lambda: QewQewLeaseOperator(task_id="t", queue_name="orders", lease_timeout=0.5), "lease_timeout is 0.5 s"),
        (lambda: QewQewAckOperator(task_id="t", batch="orders-1"), "give its queue_name"),
        (lambda: QewQewNackOperator(task_id="t", batch="orders-1", topic="orders"), "the name of one of its readers"),
    ],
    ids=["neither", "reader", "records", "time-out", "id alone", "reader of a batch"],
)
def test_what_cannot_be_meant_is_an_error_of_the_dag_file(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        make()
