"""SIGKILL for every part of a pipeline in a real Airflow with a real Spark. Afterwards every record is there, once.

`test_every_part_is_killed_in_one_run_of_a_year_of_flights` kills everything in turn in one run of the example DAG. The
other tests run a small DAG, and stop it at a gate where the moment matters.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from killing import (
    KillableAirflow,
    alive,
    counts,
    descendants,
    gone,
    java_of,
    kill,
    locked,
    nothing_left,
    python_driver_of,
    rows,
    stopped_in_commit,
    until,
)

from demo import flights
from demo.local_airflow import Run
from qewqew_core import Queue
from qewqew_core.disk.lock import holder

EXAMPLE = Path(__file__).parents[2] / "dags_examples" / "flights_to_parquet.py"
FLIGHTS = 336_776

SMALL = """
import os
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator

GATES = Path(os.environ["QEWQEW_TEST_GATES"])
OUTPUT = os.environ["QEWQEW_DEMO_OUTPUT"]
NAME = "{{ dag_run.conf['name'] }}"
SQL = "{{ dag_run.conf.get('sql') if ti.try_number == 1 and 'sql' in dag_run.conf else 'SELECT n FROM batch' }}"


def numbers(dag_run):
    conf = dag_run.conf
    first = conf.get("first", 0)
    pad = "x" * conf.get("pad", 0)
    yield from ({"n": n, "pad": pad} for n in range(first, first + conf.get("records", 1000)))
    (GATES / "stage.reached").touch()
    while (GATES / "stage.closed").exists():
        time.sleep(0.05)


for dag_id, retries, lease_timeout in (("small", 4, None), ("last_try", 0, None), ("timed", 0, 10)):
    with DAG(dag_id, schedule=None, default_args={"retries": retries, "retry_delay": timedelta(seconds=1)}):
        stage = QewQewStageOperator(task_id="stage", queue_name=NAME, records=numbers)
        wait = QewQewSensor(task_id="wait", queue_name=NAME, poke_interval=1, timeout=300)
        to_parquet = QewQewSparkSubmitOperator(
            task_id="to_parquet",
            queue_name=NAME,
            lease_timeout=lease_timeout,
            schema="n BIGINT, pad STRING",
            outputs=[
                {"path": f"{OUTPUT}/{NAME}/rows", "sql": SQL},
                {"path": f"{OUTPUT}/{NAME}/second/count", "sql": "SELECT count(*) AS count FROM batch"},
            ],
            conf={"spark.ui.enabled": "false", "spark.log.level": "ERROR"},
        )
        stage >> wait >> to_parquet

with DAG("staging", schedule=None, default_args={"retries": 4, "retry_delay": timedelta(seconds=1)}):
    QewQewStageOperator(task_id="stage", queue_name=NAME, records=numbers)

with DAG("sensors", schedule=None, default_args={"retries": 4, "retry_delay": timedelta(seconds=1)}):
    for mode in ("poke", "reschedule"):
        QewQewSensor(task_id=mode, mode=mode, queue_name=NAME, min_records=3, poke_interval=1, timeout=300)
"""

# The first try sleeps this many milliseconds for each row that it writes, so that there is time to kill it.
SLOWLY = "SELECT n, java_method('java.lang.Thread', 'sleep', CAST({} AS BIGINT)) AS slept FROM batch"


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queues")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def killable(
    tmp_path_factory: pytest.TempPathFactory, queues: Path, output: Path, settings: Callable[..., dict[str, str]]
) -> Iterator[KillableAirflow]:
    dags = tmp_path_factory.mktemp("dags")
    (dags / "small.py").write_text(SMALL)
    more_tries = EXAMPLE.read_text().replace(
        '"retries": 2, "retry_delay": timedelta(seconds=5)', '"retries": 9, "retry_delay": timedelta(seconds=1)'
    )
    assert '"retries": 9' in more_tries
    (dags / EXAMPLE.name).write_text(more_tries)
    with KillableAirflow(tmp_path_factory.mktemp("airflow"), dags, settings(queues, output, "local[2]")) as running:
        yield running


@pytest.fixture
def airflow(killable: KillableAirflow) -> Iterator[KillableAirflow]:
    yield killable
    for name in ("stage", "submit"):
        killable.gate(name).open()


def the_batch(airflow: KillableAirflow, run: Run) -> str:
    return str(airflow.xcom(run, "to_parquet")["batch_id"])


def leased(path: Path) -> str:
    """The id of the one batch that is leased, read without the lock."""
    assert counts(path)[1] == 1
    return next(Path(f"{path}.batches").iterdir()).name


def unfinished(table: Path) -> set[Path]:
    """The files that Spark is writing, or was writing when it was killed; their names are new for each try."""
    with suppress(FileNotFoundError):  # moved into place while we look
        return set(table.glob(".qewqew/batch=*/_temporary/**/*.parquet"))
    return set()


def all_numbers(output: Path, name: str, records: int = 1000) -> None:
    """Every number is in the table, each once."""
    assert rows(output / name / "rows", "n") == Counter((n,) for n in range(records))
    assert rows(output / name / "second" / "count", "count") == Counter([(records,)])


def staged_once(path: Path, records: int = 1000) -> None:
    """Every number is in the queue, each once and in order."""
    with Queue(path, lock_timeout=1) as queue:
        assert [json.loads(record)["n"] for record in queue.get_many(records + 1)] == list(range(records))


# ----------------------------------------------------------------------------------------------------- everything


@pytest.mark.skipif(os.geteuid() != 0, reason="of an Airflow task only root is told which queue it has open")
@pytest.mark.soak  # three and a half minutes; each part is killed by a test of its own below
def test_every_part_is_killed_in_one_run_of_a_year_of_flights(airflow: KillableAirflow, queues: Path, output: Path) -> None:
    path = queues / "flights"
    submit = airflow.gate("submit")
    submit.close()
    run = airflow.trigger("flights_to_parquet")

    # Staging: three tasks as soon as they run, three that have the queue open, one supervisor.
    killed: set[int] = set()
    for month in (0, 1, 2):
        kill(airflow.running(run, "stage", month))
    supervisor = airflow.supervisor(airflow.running(run, "stage", 3))
    kill(supervisor)
    while len(killed) < 3 and counts(path)[0] < FLIGHTS:
        owner = holder(str(path))
        if owner and owner not in killed:
            with suppress(ProcessLookupError):  # it was quicker
                kill(owner)
                killed.add(owner)
    assert killed
    until(lambda: counts(path)[0] == FLIGHTS, "all months are staged", 120)

    # The sensor.
    kill(airflow.running(run, "wait"))

    # Between lease and spark-submit.
    submit.reached()
    task = airflow.running(run, "to_parquet")
    batch_id = leased(path)
    below = descendants(task)
    assert below
    kill(task)
    gone(below)
    submit.open()

    # The driver while it writes: the JVM, then the Python program, then the task itself.
    table, left = output / "flights", set[Path]()
    for tries, victim in ((2, "JVM"), (3, "Python"), (4, "task")):
        task = airflow.running(run, "to_parquet", tries=tries)
        until(lambda left=left: unfinished(table) - left, f"Spark writes, try {tries}")
        assert leased(path) == batch_id
        assert not locked(path)  # nobody waits for the queue while Spark runs, and Spark inherits no lock
        java = java_of(task)
        assert java is not None
        driver = python_driver_of(java)
        assert driver is not None
        kill({"JVM": java, "Python": driver, "task": task}[victim])
        gone([java, driver])
        left = unfinished(table)

    # Between the end of Spark and the acknowledgement: the test has the queue, so the task waits for it.
    task = airflow.running(run, "to_parquet", tries=5)
    java = until(lambda: java_of(task), "Spark runs")
    with Queue(path) as queue:
        gone([java], 120)
        assert (output / "delays" / f"batch={batch_id}" / "_SUCCESS").exists()
        assert queue.batch(batch_id).state == "leased"
        assert alive(task)
        kill(task)

    # The scheduler.
    task = airflow.running(run, "to_parquet", tries=6)
    airflow.kill("scheduler")
    airflow.start_again("scheduler")

    airflow.succeeded(run)
    assert the_batch(airflow, run) == batch_id
    nothing_left(path, batch_id)
    expected = flights.input_table()
    assert len(expected) == FLIGHTS
    flights.compare_rows(expected, flights.parquet_table(table, expected.column_names))
    flights.compare_delays(expected, flights.parquet_table(output / "delays", ["carrier", "flights", "mean_dep_delay"]))
    assert sum(airflow.xcom(run, "stage", map_index=month)["records"] for month in range(12)) == FLIGHTS
    assert airflow.xcom(run, "to_parquet")["attempt"] == 1  # never returned, so it was leased once


# -------------------------------------------------------------------------------------------------------- staging


def test_a_staging_task_killed_before_its_commit_stages_once(airflow: KillableAirflow, queues: Path) -> None:
    gate = airflow.gate("stage")
    gate.close()
    run = airflow.trigger("staging", {"name": "before"})
    gate.reached()
    kill(airflow.running(run, "stage"))
    gate.open()
    airflow.succeeded(run)
    assert airflow.tries(run, "stage") == 2
    staged_once(queues / "before")


def test_a_staging_task_killed_in_its_commit_stages_once(airflow: KillableAirflow, queues: Path) -> None:
    gate = airflow.gate("stage")
    for again in range(10):  # on a busy machine this process may be too late: the task has committed, and another is tried
        path = queues / f"amid{again}"
        gate.close()
        run = airflow.trigger("staging", {"name": path.name, "records": 4000, "pad": 60_000})
        gate.reached()
        task = airflow.running(run, "stage")
        gate.open()
        if stopped_in_commit(path, task):
            break
        airflow.succeeded(run)
    else:
        pytest.fail("ten times too late: it was committed")
    assert locked(path)
    kill(task)
    airflow.succeeded(run)
    assert airflow.tries(run, "stage") == 2
    staged_once(path, 4000)


def test_a_staging_task_killed_after_its_commit_stages_once(airflow: KillableAirflow, queues: Path) -> None:
    path = queues / "after"
    gate = airflow.gate("stage")
    gate.close()
    run = airflow.trigger("staging", {"name": "after"})
    gate.reached()
    task = airflow.running(run, "stage")
    supervisor = airflow.supervisor(task)
    os.kill(supervisor, signal.SIGSTOP)  # so that the task can commit, and not report it
    try:
        gate.open()
        until(lambda: counts(path)[0] == 1000 and not locked(path), "the commit")
        kill(task)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    airflow.succeeded(run)
    assert airflow.tries(run, "stage") == 2
    assert "Stored nothing: an earlier try staged 1,000 records" in airflow.task_log(run, "stage", 2)
    staged_once(path)


def test_a_staging_task_that_outlives_its_supervisor_stages_once(airflow: KillableAirflow, queues: Path) -> None:
    path = queues / "orphan"
    gate = airflow.gate("stage")
    gate.close()
    run = airflow.trigger("staging", {"name": "orphan"})
    gate.reached()
    task = airflow.running(run, "stage")
    kill(airflow.supervisor(task))
    assert alive(task)
    second = airflow.running(run, "stage", tries=2)  # while the first still runs
    assert alive(task)
    gate.open()  # both go on
    gone([task, second], 60)
    airflow.succeeded(run)
    staged_once(path)


# ----------------------------------------------------------------------------------------------------- the sensor


def test_a_killed_sensor_goes_on_in_both_modes(airflow: KillableAirflow, queues: Path) -> None:
    run = airflow.trigger("sensors", {"name": "watched"})
    with Queue(queues / "watched") as queue:
        queue.put_many([b"1", b"2"])
    kill(airflow.running(run, "poke"))
    kill(airflow.running(run, "reschedule"))
    kill(airflow.supervisor(airflow.running(run, "poke", tries=2)))
    until(lambda: airflow.tries(run, "reschedule") >= 2, "the second try of the sensor in mode reschedule")
    kill(airflow.supervisor(airflow.running(run, "reschedule", tries=2)))
    for mode in ("poke", "reschedule"):
        until(lambda mode=mode: airflow.tries(run, mode) >= 3, f"the third try in mode {mode}")
        assert airflow.instance(run, mode)["state"] != "success"
    with Queue(queues / "watched") as queue:
        queue.put(b"3")
    airflow.succeeded(run)
    for mode in ("poke", "reschedule"):
        assert airflow.xcom(run, mode)["records"] == 3
    assert counts(queues / "watched") == (3, 0, 0, 0)


# ---------------------------------------------------------------------------------------------------------- Spark


@pytest.mark.soak  # a minute; tests/integration/airflow/test_airflow_lease_and_submit.py shows it without a scheduler
def test_a_driver_does_not_outlive_the_supervisor_of_its_task(airflow: KillableAirflow, queues: Path, output: Path) -> None:
    """Airflow starts the retry when the supervisor is missed: two drivers would write the same batch at the same time."""
    path = queues / "fatherless"
    run = airflow.trigger("small", {"name": "fatherless", "sql": SLOWLY.format(30)})
    task = airflow.running(run, "to_parquet")
    java = until(lambda: java_of(task), "Spark runs")
    batch_id = leased(path)
    until(lambda: unfinished(output / "fatherless" / "rows"), "Spark writes")
    kill(airflow.supervisor(task))
    try:
        gone([task, java], 8)  # sooner than Airflow misses it
    finally:
        airflow.succeeded(run)
    nothing_left(path, batch_id)
    all_numbers(output, "fatherless")


def test_a_killed_scheduler_leaves_one_result(airflow: KillableAirflow, queues: Path, output: Path) -> None:
    path = queues / "unscheduled"
    run = airflow.trigger("small", {"name": "unscheduled", "sql": SLOWLY.format(30)})
    task = airflow.running(run, "to_parquet")
    java = until(lambda: java_of(task), "Spark runs")
    batch_id = leased(path)
    until(lambda: unfinished(output / "unscheduled" / "rows"), "Spark writes")
    airflow.kill("scheduler")
    airflow.start_again("scheduler")
    # The new scheduler starts the task again, as it cannot adopt it, and the first is told to stop.
    airflow.succeeded(run)
    gone([task, java])
    assert the_batch(airflow, run) == batch_id
    nothing_left(path, batch_id)
    all_numbers(output, "unscheduled")


@pytest.mark.soak  # a minute and a half; the test of this name in tests/integration/airflow shows it without a scheduler
def test_the_last_failure_returns_the_batch_and_the_next_run_gets_it_first(
    airflow: KillableAirflow, queues: Path, output: Path
) -> None:
    path = queues / "returned"
    obstacle = output / "returned" / "second"
    obstacle.parent.mkdir()
    obstacle.touch()  # a file where the second output wants a directory: the job fails after it wrote the first
    failed = airflow.trigger("last_try", {"name": "returned", "sql": "SELECT n, -1 AS mark FROM batch"})
    assert airflow.wait(failed) == "failed"
    assert counts(path) == (0, 0, 1, 0)
    with Queue(path) as queue:
        (batch,) = queue.batches()
        assert (batch.state, batch.attempt, batch.records) == ("returned", 1, 1000)
        assert "SparkJobFailed" in batch.reason
    left = output / "returned" / "rows" / f"batch={batch.id}"
    assert rows(left, "n", "mark") == Counter((n, -1) for n in range(1000))

    obstacle.unlink()
    run = airflow.trigger("last_try", {"name": "returned", "first": 1000, "records": 500})
    airflow.succeeded(run)
    result = airflow.xcom(run, "to_parquet")
    assert (result["batch_id"], result["attempt"], result["records"]) == (batch.id, 2, 1000)
    all_numbers(output, "returned")
    assert counts(path) == (500, 0, 0, 0)  # what this run staged waits for the next

    another = airflow.trigger("last_try", {"name": "returned", "first": 1500, "records": 500})
    airflow.succeeded(another)
    result = airflow.xcom(another, "to_parquet")
    assert (result["attempt"], result["records"]) == (1, 1000)
    assert rows(output / "returned" / "rows", "n") == Counter((n,) for n in range(2000))
    assert counts(path) == (0, 0, 0, 0)


def test_a_task_killed_on_its_last_try_gets_the_same_batch_when_it_is_cleared(
    airflow: KillableAirflow, queues: Path, output: Path
) -> None:
    path = queues / "cleared"
    submit = airflow.gate("submit")
    submit.close()
    run = airflow.trigger("last_try", {"name": "cleared"})
    submit.reached()
    task = airflow.running(run, "to_parquet")
    batch_id = leased(path)
    kill(task)
    assert airflow.wait(run) == "failed"
    assert leased(path) == batch_id
    submit.open()
    airflow.clear(run, "to_parquet")
    airflow.succeeded(run)
    assert the_batch(airflow, run) == batch_id
    nothing_left(path, batch_id)
    all_numbers(output, "cleared")


@pytest.mark.soak  # a minute; tests/integration/airflow/test_airflow_lease_and_submit.py shows it without a scheduler
def test_a_batch_whose_task_was_killed_on_its_last_try_goes_to_the_next_run_when_its_time_is_over(
    airflow: KillableAirflow, queues: Path, output: Path
) -> None:
    path = queues / "timed"
    submit = airflow.gate("submit")
    submit.close()
    killed = airflow.trigger("timed", {"name": "timed"})
    submit.reached()
    task = airflow.running(killed, "to_parquet")
    batch_id = leased(path)
    kill(task)
    assert airflow.wait(killed) == "failed"
    submit.open()
    run = airflow.trigger("timed", {"name": "timed", "records": 0})  # its sensor waits for nothing but the lease to end
    airflow.succeeded(run)
    assert "its lease has ended" in airflow.xcom(run, "wait")["ready"]
    assert (the_batch(airflow, run), airflow.xcom(run, "to_parquet")["attempt"]) == (batch_id, 2)
    nothing_left(path, batch_id)
    all_numbers(output, "timed")
