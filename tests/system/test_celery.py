"""CeleryExecutor with two workers: which host has a queue, and what becomes of it when a host dies.

The workers share the machine's file system, so what is said here of a shared directory is true of a file system whose
locks hold between hosts; see docs/airflow/workers.md.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery_airflow import MISSING, CeleryAirflow
from killing import counts, java_of, locked, nothing_left, rows, stopped_in_commit, until

from qewqew_core import Queue
from qewqew_core.tools import marker

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
RECORDS = 1500

DAGS = """
import os
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_key
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator

GATES = Path(os.environ["QEWQEW_TEST_GATES"])
OUTPUT = os.environ["QEWQEW_DEMO_OUTPUT"]
# The first try sleeps for each row that it writes, so that there is time to kill it.
SLOWLY = "SELECT n, java_method('java.lang.Thread', 'sleep', CAST(50 AS BIGINT)) AS slept FROM batch"
HERE_AND_THERE = ("w1", "w2")


def numbers():
    yield from ({"n": n, "pad": "x" * 60_000} for n in range(1500))
    (GATES / "stage.reached").touch()
    while (GATES / "stage.closed").exists():
        time.sleep(0.05)


with DAG("shared", schedule=None, default_args={"retries": 4, "retry_delay": timedelta(seconds=1)}, params={"name": ""}):
    NAME = "{{ params.name }}"
    QewQewStageOperator(task_id="stage", queue_name=NAME, records=numbers) >> QewQewSparkSubmitOperator(
        task_id="to_parquet",
        queue_name=NAME,
        schema="n BIGINT",
        outputs=[{"path": f"{OUTPUT}/{NAME}", "sql": "{{ params.slowly if ti.try_number == 1 else 'SELECT n FROM batch' }}"}],
        params={"slowly": SLOWLY},
        conf={"spark.ui.enabled": "false", "spark.log.level": "ERROR"},
    )

with DAG("drained", schedule=None):
    for host in HERE_AND_THERE:

        @task(task_id=f"drain_{host}", queue=host)
        def drain(host, **context):
            (GATES / host).touch()
            while not all((GATES / each).exists() for each in HERE_AND_THERE):  # so that neither has the queue for itself
                time.sleep(0.01)
            taken = {}
            while True:
                with QewQewHook().queue("drained") as queue:
                    batch = queue.lease(f"{task_key(context)}|{len(taken)}", max_records=10)
                if batch is None:
                    return taken
                taken[batch.id] = [int(record) for record in batch]
                with QewQewHook().queue("drained") as queue:
                    queue.batch(batch.id).ack()

        drain(host)

with DAG("misrouted", schedule=None):
    of_w1 = {"qewqew_conn_id": "qewqew_w1", "queue_name": "misrouted", "queue": "w2"}
    QewQewStageOperator(task_id="stage", records=[b"1"], **of_w1)
    QewQewSensor(task_id="wait", poke_interval=1, timeout=300, **of_w1)
    QewQewSparkSubmitOperator(task_id="to_parquet", outputs=[{"path": f"{OUTPUT}/misrouted"}], **of_w1)
"""


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the host of its name each directory, as its connection says, but for ``shared``."""
    directory = tmp_path_factory.mktemp("queues")
    for name in ("shared", *CeleryAirflow.hosts):
        marker.init(str(directory / name))
    return directory


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, queues: Path, output: Path, settings: Callable[[Path, Path, str], dict[str, str]]
) -> Iterator[CeleryAirflow]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    dags = tmp_path_factory.mktemp("dags")
    for name in ("lanes.py", "fan_in.py"):
        shutil.copy(EXAMPLES / name, dags)
    (dags / "workers.py").write_text(DAGS)

    def connection(directory: str, hostname: str) -> str:
        extra = {"hostname": hostname, "retry_delay": 0, "chunk_size": 2**20}  # so small that a commit has a middle
        return json.dumps({"conn_type": "qewqew", "host": str(queues / directory), "extra": extra})

    connections = {f"AIRFLOW_CONN_QEWQEW_{host.upper()}": connection(host, host) for host in CeleryAirflow.hosts}
    connections["AIRFLOW_CONN_QEWQEW_DEFAULT"] = connection("shared", "*")
    env = {**settings(queues, output, "local[2]"), **connections}
    with CeleryAirflow(tmp_path_factory.mktemp("airflow"), dags, env) as running:
        yield running


def test_a_task_in_the_wrong_lane_fails_at_once_and_makes_no_second_queue(airflow: CeleryAirflow, queues: Path) -> None:
    run = airflow.trigger("misrouted")
    assert airflow.wait(run) == "failed"
    for task_id in ("stage", "wait", "to_parquet"):
        assert airflow.instance(run, task_id)["state"] == "failed"
        assert airflow.host(run, task_id) == "w2"
        told = airflow.task_log(run, task_id)
        assert (
            f"WrongHost: {queues / 'w1'}: connection 'qewqew_w1' has this directory on host 'w1', but this runs on 'w2'" in told
        )
        assert "give the task a queue= that only the worker on 'w1' serves" in told
    assert [path.name for path in (queues / "w1").iterdir()] == [marker.NAME]


def test_two_tasks_on_two_hosts_drain_one_queue(airflow: CeleryAirflow, queues: Path) -> None:
    path = queues / "shared" / "drained"
    with Queue(path) as queue:
        queue.put_many(str(n).encode() for n in range(RECORDS))
    run = airflow.trigger("drained")
    airflow.succeeded(run)
    taken = {host: airflow.xcom(run, f"drain_{host}") for host in airflow.hosts}
    for host, batches in taken.items():
        assert airflow.host(run, f"drain_{host}") == host
        assert batches, f"{host} got nothing"
    assert not taken["w1"].keys() & taken["w2"].keys()
    records = [n for batches in taken.values() for batch in batches.values() for n in batch]
    assert Counter(records) == Counter(range(RECORDS))
    assert counts(path) == (0, 0, 0, 0)


@pytest.mark.soak  # a minute; the fan-in is tested on a cluster too
def test_each_host_has_its_queue_and_one_spark_job_makes_one_table(airflow: CeleryAirflow, queues: Path, output: Path) -> None:
    run = airflow.trigger("lanes")
    airflow.succeeded(run)
    for host in airflow.hosts:
        for task_id in (f"stage_{host}", f"publish_{host}", f"acknowledge_{host}"):
            assert airflow.host(run, task_id) == host
        batch_id = airflow.xcom(run, f"publish_{host}").rpartition("/")[2]
        nothing_left(queues / host / "orders", batch_id)
        table = output / "orders" / f"batch={batch_id}"
        assert rows(table, "id", "host", "amount") == Counter((n, host, n / 4) for n in range(1000))
    assert len(rows(output / "orders", "batch", "id")) == 2000
    assert list((output / "batches").iterdir()) == [], "what was published goes when it is in the table"


@pytest.mark.soak  # two minutes
def test_a_host_that_does_not_answer_holds_up_nobody_and_its_batch_joins_later(
    airflow: CeleryAirflow, queues: Path, output: Path
) -> None:
    shutil.rmtree(output / "orders", ignore_errors=True)
    airflow.kill_host("w2")
    try:
        first = airflow.trigger("lanes", {"deadline": 30})
        until(lambda: airflow.instance(first, "acknowledge_w1")["state"] == "success", "the other host's batch is in the table")
        assert "no answer from w2: the others go on without" in airflow.task_log(first, "gather")
        assert {host for _, host in rows(output / "orders", "id", "host")} == {"w1"}
        second = airflow.trigger("lanes", {"deadline": 30})
        until(lambda: airflow.instance(second, "acknowledge_w1")["state"] == "success", "the next run is not held up")
        assert rows(output / "orders", "host") == Counter({("w1",): 2000})
    finally:
        airflow.start_again("w2")
    for run in (first, second):
        airflow.wait(run)
        assert airflow.instance(run, "acknowledge_w2")["state"] == "skipped", "the job of the run has not written it"
    assert counts(queues / "w2" / "orders") == (2000, 0, 0, 0)
    airflow.succeeded(airflow.trigger("lanes"))
    assert rows(output / "orders", "host") == Counter({("w1",): 3000, ("w2",): 3000})
    assert list((output / "batches").iterdir()) == []


def test_the_other_host_goes_on_where_one_was_killed_in_staging_and_then_in_spark(
    airflow: CeleryAirflow, queues: Path, output: Path
) -> None:
    gate = airflow.gate("stage")
    for again in range(10):  # on a busy machine this process may be too late: the task has committed, and another is tried
        path = queues / "shared" / f"shared{again}"
        gate.close()
        run = airflow.trigger("shared", {"name": path.name})
        gate.reached()
        task = airflow.running(run, "stage")
        first = airflow.host(run, "stage")
        gate.open()
        if stopped_in_commit(path, task):
            break
        airflow.succeeded(run)
    else:
        pytest.fail("ten times too late: it was committed")
    assert locked(path)
    airflow.kill_host(first)

    until(lambda: counts(path)[0] == RECORDS, "the other host stages")
    airflow.start_again(first)

    task = airflow.running(run, "to_parquet")
    second = airflow.host(run, "to_parquet")
    until(lambda: java_of(task), "Spark runs")
    until(lambda: list((output / path.name).glob(".qewqew/batch=*/_temporary/**/*.parquet")), "Spark writes")
    assert counts(path)[1] == 1
    (batch,) = Path(f"{path}.batches").iterdir()
    airflow.kill_host(second)

    airflow.succeeded(run)
    for task_id, killed in (("stage", first), ("to_parquet", second)):
        assert airflow.tries(run, task_id) == 2
        assert airflow.host(run, task_id) != killed
    result = airflow.xcom(run, "to_parquet")
    assert (result["batch_id"], result["attempt"], result["records"]) == (batch.name, 1, RECORDS)
    nothing_left(path, batch.name)
    assert rows(output / path.name, "n") == Counter((n,) for n in range(RECORDS))
