"""Lease, submit, acknowledge, in a real Airflow; what becomes of the batch when something fails in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow_version import needs_retry_policies, needs_state_store
from holding import IMPORTS, Held

from qewqew_airflow.errors import SparkJobFailed
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_core import Batch, Locked, Queue, Reader
from qewqew_core.tools import marker

# Success.


def test_a_batch_is_leased_processed_and_acknowledged(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b", "c")
    ran = run(held.make("success"))
    assert ran.states() == {"submit": "success"}
    [call] = spark.calls
    assert call["records"] == ["a", "b", "c"]
    assert (call["leased"], call["attempt"]) == (1, 1)
    assert call["application"].endswith("qewqew_spark/jobs/batch.py")
    assert json.loads(call["arguments"][2]) == {"path": "/nowhere/orders"}
    assert call["python"] == sys.executable
    result = {"batch_id": call["id"], "attempt": 1, "records": 3, "bytes": 3, "read": 3, "good": 3, "bad": 0}
    told = ran.result("submit")
    oldest = told.pop("oldest", None)
    assert told == result
    assert (oldest is not None) == (held.kind == "queue")
    if oldest:
        assert abs(datetime.now(UTC) - datetime.fromisoformat(oldest)) < timedelta(minutes=10)
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}


def test_all_arguments_of_the_job_reach_it(run: Any, held: Held, spark: Any) -> None:
    held.put("a")
    outputs = [{"path": "/nowhere/{{ params.table }}", "partition_by": ["day"]}, {"path": "/nowhere/b", "sql": "SELECT 1 AS x"}]
    with DAG(held.dag_id("arguments"), schedule=None, params={"table": "orders"}) as dag:
        held.operator(
            outputs=outputs, schema="id INT", quarantine="/nowhere/q", max_bad_records=0, conf={"spark.ui.enabled": "false"}
        )
    assert run(dag).states() == {"submit": "success"}
    [call] = spark.calls
    manifest, *arguments = call["arguments"]
    assert os.path.basename(manifest) == "manifest.json"
    assert arguments[:10:2] == ["--output", "--output", "--schema", "--quarantine", "--max-bad-records"]
    assert json.loads(arguments[1]) == {"path": "/nowhere/orders", "partition_by": ["day"]}
    assert arguments[5:10:2] == ["id INT", "/nowhere/q", "0"]
    assert call["options"] == ["--master", "local[1]", "--conf", "spark.ui.enabled=false", "--name", f"{dag.dag_id}.submit"]


def test_numbers_are_templates_and_values_in_outputs_are_results_of_other_tasks(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b", "c")
    with DAG(held.dag_id("templates"), schedule=None, params={"n": 2, "evolution": "fail"}) as dag:

        @task
        def place() -> str:
            return "/nowhere/told"

        held.operator(
            max_records="{% if params.n %}{{ params.n }}{% endif %}",
            lease_timeout="{{ 60 * params.n }}",
            max_bad_records="{{ params.n }}",
            schema_evolution="{{ params.evolution }}",
            outputs=[{"path": place()}, {"path": Path("/nowhere/path")}],
        )
    ran = run(dag)
    assert ran.states() == {"place": "success", "submit": "success"}
    [call] = spark.calls
    assert call["records"] == ["a", "b"]
    arguments = call["arguments"]
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert (given["--max-bad-records"], given["--schema-evolution"]) == ("2", "fail")
    paths = [
        json.loads(value)["path"] for name, value in zip(arguments[1::2], arguments[2::2], strict=True) if name == "--output"
    ]
    assert paths == ["/nowhere/told", "/nowhere/path"]


def test_an_application_of_ones_own_gets_what_it_asks_for(run: Any, held: Held, spark: Any, tmp_path: Path) -> None:
    held.put("a")
    application = tmp_path / "mine.py"
    arguments = ["{manifest}", "--id={batch_id}", "--result", "{result}", "{{ params.day }}", '{"batch": {}}', 7]
    with DAG(held.dag_id("own"), schedule=None, params={"day": "monday"}) as dag:
        held.operator(outputs=None, application=str(application), application_args=arguments) >> held.operator(
            task_id="plain", outputs=None, application=str(application)
        )
        held.put("b")
    dag.task_dict["submit"].max_records = 1
    ran = run(dag)
    assert ran.states() == {"submit": "success", "plain": "success"}
    first, second = spark.calls
    assert first["application"] == str(application)
    assert first["arguments"][1] == f"--id={first['id']}"
    assert first["arguments"][4:] == ["monday", '{"batch": {}}', "7"]
    assert ran.result("submit")["read"] == 1
    assert len(second["arguments"]) == 1
    plain = ran.result("plain")
    plain.pop("oldest", None)
    assert plain == {"batch_id": second["id"], "attempt": 1, "records": 1, "bytes": 1}


def test_two_tasks_get_different_batches_of_the_size_they_ask_for(run: Any, held: Held, spark: Any) -> None:
    held.put(*"abcde")
    with DAG(held.dag_id("two"), schedule=None) as dag:
        held.operator(task_id="one", max_records=2) >> held.operator(task_id="two", max_bytes=1) >> held.operator(task_id="rest")
    run(dag)
    assert [call["records"] for call in spark.calls] == [["a", "b"], ["c"], ["d", "e"]]


def test_an_empty_queue_skips_the_task_and_what_follows(run: Any, held: Held, spark: Any) -> None:
    with DAG(held.dag_id("empty"), schedule=None) as dag:

        @task
        def after(batch: Any) -> None:
            pass

        after(held.operator().output)
    assert run(dag).states() == {"submit": "skipped", "after": "skipped"}
    assert spark.calls == []
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}
    if held.kind == "queue":  # what an empty one leaves; a reader keeps its place
        assert [path.name for path in held.directory.iterdir()] == [marker.NAME]


# Failure.


def test_a_failure_with_retries_left_keeps_the_lease_for_the_same_batch(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b")
    spark.next("fail", "error")
    ran = run(held.make("retried", retries=2))
    assert ran.states() == {"submit": "success"}
    assert ran.tries("submit") == 3
    assert [(call["records"], call["attempt"], call["leased"], call["returned"]) for call in spark.calls] == [
        (["a", "b"], 1, 1, 0)
    ] * 3
    assert len({call["id"] for call in spark.calls}) == 1
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}


def test_the_last_failure_returns_the_batch_and_the_next_run_gets_it_first(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b")
    spark.next("fail", "fail")
    dag = held.make("returned", retries=1)
    assert run(dag).states() == {"submit": "failed"}
    assert held.counts() == {"records": 0, "leased": 0, "returned": 1, "dead": 0}
    with held.open() as queue:
        [batch] = queue.batches()
        assert "3 of 3 records do not decode, max_bad_records is 0" in batch.reason

    held.put("c")
    assert run(dag).states() == {"submit": "success"}
    assert run(dag).states() == {"submit": "success"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a", "b"], 1)] * 2 + [(["a", "b"], 2), (["c"], 1)]
    assert len({call["id"] for call in spark.calls[:3]}) == 1


def test_after_max_attempts_the_batch_is_a_dead_letter_and_does_not_stop_the_queue(
    run: Any, held: Held, spark: Any, connect: Any
) -> None:
    connect("qewqew_default", "qewqew", str(held.directory), max_attempts=1)
    held.put("poison")
    spark.next("fail")
    dag = held.make("dead")
    first = run(dag)
    assert first.states() == {"submit": "failed"}
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 1}
    held.put("b")
    assert run(dag).states() == {"submit": "success"}
    assert [call["records"] for call in spark.calls] == [["poison"], ["b"]]
    # Clearing the task must not give it other records instead.
    held.put("c")
    assert run.again(dag, first).states() == {"submit": "failed"}
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 1}


@needs_retry_policies
def test_a_retry_policy_that_gives_up_returns_the_batch(run: Any, held: Held, spark: Any) -> None:
    from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

    held.put("a")
    spark.next("fail")
    policy = ExceptionRetryPolicy(rules=[RetryRule(exception=SparkJobFailed, action=RetryAction.FAIL)])
    ran = run(held.make("policy", retries=3, retry_policy=policy))
    assert ran.states() == {"submit": "failed"}
    assert ran.tries("submit") == 1
    assert held.counts()["returned"] == 1


def test_a_time_out_kills_the_driver_before_the_batch_is_returned(
    run: Any, held: Held, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.put("a")
    spark.next("stay")
    nack, alive = Batch.nack, []
    monkeypatch.setattr(
        Batch, "nack", lambda self, reason: (alive.append(not is_gone(spark.calls[0]["pid"])), nack(self, reason))
    )
    assert run(held.make("timeout", execution_timeout=timedelta(seconds=8))).states() == {"submit": "failed"}
    assert alive == [False]
    assert held.counts()["returned"] == 1


def test_a_task_that_cannot_acknowledge_processes_the_same_batch_again(
    run: Any, held: Held, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the worker is lost after the job succeeded."""
    held.put("a")
    ack, failures = Batch.ack, [OSError("the disk is gone")]
    monkeypatch.setattr(Batch, "ack", lambda self: ack(self) if not failures else (_ for _ in ()).throw(failures.pop()))
    assert run(held.make("unacknowledged", retries=1)).states() == {"submit": "success"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a"], 1)] * 2
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}


def test_the_failed_task_tells_the_cause_last(run: Any, held: Held, spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    held.put("a")
    spark.next("error")
    run(held.make("cause"))
    output = capfd.readouterr().out
    _, named, end = output.rpartition("SparkJobFailed: batch orders-")
    assert named
    assert "ValueError: the disk of the executor is full" in end
    assert "Cannot execute" not in end  # the whole output of spark-submit stands above


# Killed and cleared.

KILLED = """
import sys
sys.path[:0] = {imports!r}
from conftest import Runner, keep_api_server
keep_api_server()
from holding import Held
from pathlib import Path
Runner()(Held({kind!r}, Path({directory!r})).make({dag_id!r}, **{arguments!r}))
"""


def run_and_be_killed(held: Held, dag_id: str, **arguments: Any) -> None:
    """Run a DAG in a process that the fake spark-submit kills."""
    directory = str(held.directory)
    program = KILLED.format(imports=IMPORTS, kind=held.kind, directory=directory, dag_id=dag_id, arguments=arguments)
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]


@pytest.mark.quick("a killed Airflow task takes its Spark driver along; the next try gets the same batch")
def test_a_killed_task_takes_its_driver_along_and_the_next_try_gets_the_same_batch(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b")
    spark.next("kill")
    run_and_be_killed(held, "killed", retries=1)
    assert held.counts() == {"records": 0, "leased": 1, "returned": 0, "dead": 0}
    # A driver that lived on would write at the same time as the next one.
    assert is_gone(spark.calls[0]["pid"])

    held.put("c")
    assert run.again(held.make("killed", retries=1)).states() == {"submit": "success"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a", "b"], 1)] * 2
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 0}


def test_a_task_that_is_stopped_keeps_the_lease_even_on_its_last_try(run: Any, held: Held, spark: Any) -> None:
    """A user who marks or clears a running task, or a worker that shuts down, sends SIGTERM."""
    held.put("a")
    spark.next("terminate")
    dag = held.make("stopped")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        stopped = run(dag)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert stopped.states() == {"submit": "failed"}
    assert is_gone(spark.calls[0]["pid"])
    assert held.counts() == {"records": 0, "leased": 1, "returned": 0, "dead": 0}
    assert run.again(dag, stopped).states() == {"submit": "success"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a"], 1)] * 2


def is_gone(pid: int) -> bool:
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_cleared_task_processes_the_same_batch_again_and_takes_nothing_new(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b")
    dag = held.make("cleared")
    first = run(dag)
    held.put("c")
    cleared = run.again(dag, first)
    assert cleared.states() == {"submit": "success"}
    assert cleared.result("submit") == first.result("submit")
    assert [call["records"] for call in spark.calls] == [["a", "b"]] * 2
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 0}


def test_a_cleared_task_that_fails_this_time_leaves_its_batch_acknowledged(run: Any, held: Held, spark: Any) -> None:
    held.put("a")
    dag = held.make("cleared_failing")
    first = run(dag)
    spark.next("fail")
    assert run.again(dag, first).states() == {"submit": "failed"}
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}
    assert run.again(dag, first).states() == {"submit": "success"}
    assert [call["records"] for call in spark.calls] == [["a"]] * 3


def test_a_task_whose_returned_batch_another_run_finished_processes_that_batch_when_cleared(
    run: Any, held: Held, spark: Any
) -> None:
    held.put("a")
    spark.next("fail")
    dag = held.make("overtaken")
    first = run(dag)
    run(dag)
    held.put("b")
    assert run.again(dag, first).states() == {"submit": "success"}
    assert [call["records"] for call in spark.calls] == [["a"]] * 3
    assert held.counts()["records"] == 1


def test_a_cleared_task_whose_batch_has_expired_fails_at_once_and_takes_nothing_new(
    run: Any, held: Held, spark: Any, connect: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    connect("qewqew_default", "qewqew", str(held.directory), retention_bytes=0)
    held.put("a")
    dag = held.make("expired", retries=3)
    first = run(dag)
    held.put("b")
    cleared = run.again(dag, first)
    assert cleared.states() == {"submit": "failed"}
    assert cleared.tries("submit") == 2
    assert len(spark.calls) == 1
    assert held.counts()["records"] == 1
    output = capfd.readouterr().out
    assert "BatchExpired" in output
    assert "Trigger a new run" in output


# Leases that end by themselves.


def until(condition: Callable[[], Any], timeout: float = 300) -> Any:
    """What the condition returns once it is true."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def meanwhile(spark: Any, act: Callable[[], Any], ran: Callable[[], Any]) -> tuple[Any, Any]:
    """Act in another thread as soon as Spark runs; what became of the run, and what ``act`` returned."""

    def wait_and_act() -> Any:
        try:
            until(lambda: spark.calls)
            return act()
        finally:
            spark.go()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(wait_and_act)
        return ran(), acting.result()


def nobody_extends() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("lease of")]


def expires(held: Held) -> Any:
    with held.open() as queue:
        return queue.batches()[0].expires


def test_the_lease_is_extended_while_the_job_takes_longer_than_it_lasts(run: Any, held: Held, spark: Any) -> None:
    held.put("a", "b")
    spark.next("wait")
    leases = []

    def try_to_lease() -> bool:
        with held.open() as queue:
            leases.append(queue.lease("another"))
            return bool(queue.batches()[0].expires > end)

    end = None

    def watch() -> None:
        nonlocal end
        end = expires(held) + timedelta(seconds=2)
        until(try_to_lease)

    ran, _ = meanwhile(spark, watch, lambda: run(held.make("extended", lease_timeout=timedelta(seconds=1.5))))
    assert ran.states() == {"submit": "success"}
    assert len(leases) > 10
    assert set(leases) == {None}
    assert ran.result("submit")["attempt"] == 1
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}
    assert nobody_extends()


# For a queue: who has a topic or its reader open locks nobody out.
@pytest.mark.parametrize("held", ["queue"], indirect=True)
def test_a_queue_that_is_locked_is_extended_as_soon_as_it_is_free(
    run: Any, held: Held, spark: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    held.put("a")
    spark.next("wait")
    locked = []
    opened = QewQewHook.queue

    def count(self: QewQewHook, name: str, **settings: Any) -> Queue:
        try:
            return opened(self, name, **settings)
        except Locked as error:
            locked.append(error)
            raise

    monkeypatch.setattr(QewQewHook, "queue", count)

    def hold() -> None:
        with held.open() as queue:
            before = queue.batches()[0].expires
            until(lambda: len(locked) >= 3)
        until(lambda: expires(held) > before)

    ran, _ = meanwhile(spark, hold, lambda: run(held.make("locked", lease_timeout=4)))
    assert ran.states() == {"submit": "success"}
    assert "could not be extended" not in capfd.readouterr().out  # a queue in use is nothing to warn of
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}


def test_a_lease_that_could_not_be_extended_in_time_is_given_up(
    run: Any, held: Held, spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who keeps others out all the time may have leased the batch."""
    held.put("a")
    spark.next("stay")

    def hold() -> bool:
        with held.blocked():
            return is_gone(spark.calls[0]["pid"])

    dag = held.make("too_late", lease_timeout=3)
    ran, killed = meanwhile(spark, hold, lambda: run(dag))
    assert killed
    assert ran.states() == {"submit": "failed"}
    output = capfd.readouterr().out
    why = "has the queue open" if held.kind == "queue" else "is using the reader"
    assert why in output.partition("killing the work on it: ")[2].splitlines()[0]
    assert "LeaseLost: the lease of batch orders-" in output
    assert held.counts() == {"records": 0, "leased": 0, "returned": 1, "dead": 0}
    assert run(dag).states() == {"submit": "success"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a"], 1), (["a"], 2)]


def lease_again(queue: Queue | Reader, key: str | None = None) -> None:
    [batch] = queue.batches()
    batch.nack()
    queue.lease(key or batch.key)


@pytest.mark.parametrize(
    ("take", "left", "said"),
    [
        (
            lambda queue: lease_again(queue, "thief"),
            {"records": 0, "leased": 1, "returned": 0, "dead": 0},
            "has been leased again by thief",
        ),
        (lease_again, {"records": 0, "leased": 1, "returned": 0, "dead": 0}, "has been leased again by spark_"),
        (
            lambda queue: queue.batches()[0].nack(),
            {"records": 0, "leased": 0, "returned": 1, "dead": 0},
            "is returned, not leased",
        ),
        (
            lambda queue: queue.batches()[0].put_back(),
            {"records": 1, "leased": 0, "returned": 0, "dead": 0},
            "no batch has the id",
        ),
    ],
    ids=["leased", "leased by another try", "returned", "put back"],
)
def test_a_task_that_lost_its_lease_kills_spark_and_acknowledges_nothing(
    run: Any, held: Held, spark: Any, capfd: pytest.CaptureFixture[str], take: Any, left: dict[str, int], said: str
) -> None:
    held.put("a")
    spark.next("stay")

    def steal() -> bool:
        with held.open() as queue:
            take(queue)
        return is_gone(spark.calls[0]["pid"])

    ran, killed = meanwhile(spark, steal, lambda: run(held.make("lost", lease_timeout=6)))
    assert killed
    assert ran.states() == {"submit": "failed"}
    assert held.counts() == left
    _, named, end = capfd.readouterr().out.rpartition("LeaseLost: the lease of batch orders-")
    assert named
    assert said in end
    assert nobody_extends()


def test_a_batch_whose_task_was_killed_on_its_last_try_goes_to_the_next_run_when_its_time_is_over(
    run: Any, held: Held, spark: Any
) -> None:
    held.put("a", "b")
    spark.next("kill")
    run_and_be_killed(held, "killed_last", lease_timeout=3)
    held.put("c")
    with DAG(held.dag_id("after_killed_last"), schedule=None) as dag:
        wait = QewQewSensor(task_id="wait", **held.names, min_records=2, poke_interval=0.2, timeout=300)
        wait >> held.operator(lease_timeout=3)
    ran = run(dag)
    assert ran.states() == {"wait": "success", "submit": "success"}
    assert "its lease has ended" in ran.result("wait")["ready"]
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a", "b"], 1), (["a", "b"], 2)]
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 0}


def test_a_time_out_of_the_lease_changes_nothing_for_retries_and_cleared_tasks(run: Any, held: Held, spark: Any) -> None:
    held.put("a")
    spark.next("fail")
    dag = held.make("timed", retries=1, lease_timeout=60)
    first = run(dag)
    assert first.states() == {"submit": "success"}
    assert run.again(dag, first).states() == {"submit": "success"}
    spark.next("fail", "fail")
    held.put("b")
    assert run(dag).states() == {"submit": "failed"}
    assert [(call["records"], call["attempt"]) for call in spark.calls] == [(["a"], 1)] * 3 + [(["b"], 1)] * 2
    assert held.counts() == {"records": 0, "leased": 0, "returned": 1, "dead": 0}
    assert nobody_extends()


# Nothing is leased for a job that cannot run.


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda m, c, d: m.delenv("AIRFLOW_CONN_SPARK_DEFAULT"), "connection 'spark_default' does not exist"),
        (lambda m, c, d: c("spark_default", "spark", ""), "does not name a Spark master"),
        (lambda m, c, d: c("spark_default", "spark", "local[1]", **{"spark-binary": "rm"}), "spark-binary"),
        (lambda m, c, d: (m.setenv("PATH", "/nowhere"), m.setattr(sys, "executable", "/nowhere/python")), "SparkSubmitNotFound"),
        (lambda m, c, d: m.setenv("JAVA_HOME", "/nowhere"), "JAVA_HOME is /nowhere"),
        (lambda m, c, d: c("qewqew_default", "qewqew", str(d / "missing")), "does not exist on this worker"),
        pytest.param(
            lambda m, c, d: c("spark_default", "spark", "yarn", **{"deploy-mode": "cluster"}),
            "give yarn_track_via_rm_api=True",
            marks=needs_state_store,
        ),
    ],
    ids=["connection", "master", "binary", "spark-submit", "java", "directory", "durable"],
)
def test_what_is_missing_is_named_before_anything_is_leased(
    run: Any,
    held: Held,
    spark: Any,
    connect: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    prepare: Any,
    error: str,
) -> None:
    held.put("a")
    prepare(monkeypatch, connect, held.directory)
    assert run(held.make("missing")).states() == {"submit": "failed"}
    assert error in capfd.readouterr().out
    assert spark.calls == []
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 0}


def test_a_last_try_that_does_not_reach_spark_returns_what_an_earlier_one_leased(
    run: Any, held: Held, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.put("a")
    spark.next("fail")
    dag = held.make("unreached", retries=1)
    dag.task_dict["submit"].on_retry_callback = [lambda context: monkeypatch.setenv("JAVA_HOME", "/nowhere")]
    assert run(dag).states() == {"submit": "failed"}
    assert len(spark.calls) == 1
    assert held.counts() == {"records": 0, "leased": 0, "returned": 1, "dead": 0}


@pytest.mark.quick("stage and submit in one run of Airflow, and clearing all of it changes nothing")
def test_stage_and_submit_in_one_run_and_clearing_all_of_it_changes_nothing(run: Any, held: Held, spark: Any) -> None:
    with DAG(held.dag_id("all"), schedule=None) as dag:
        QewQewStageOperator.partial(task_id="stage", **held.into).expand(records=[["a"], ["b"]]) >> held.operator()
    first = run(dag)
    run.again(dag, first)
    first_call, second_call = [call["records"] for call in spark.calls]
    assert sorted(first_call) == ["a", "b"]  # mapped tasks run in any order
    assert second_call == first_call
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}
