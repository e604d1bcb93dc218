"""A real Spark cluster where the driver runs, too: the worker of Airflow is killed, the driver goes on, one try acknowledges.

Spark's standalone master takes no Python applications in cluster mode. What spark-submit would start for one, its own
class PythonRunner, it takes.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest
from airflow.sdk import DAG
from airflow_version import needs_state_store
from holding import IMPORTS, Held

from demo.local_airflow import free_ports
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_core import inspect

SPARK_HOME = Path(pyspark.__file__).parent
ROOT = Path(__file__).resolve().parents[3]
JOB = """
import os, sys, time
from qewqew_core.batch import manifest

home, path = sys.argv[1:]
body = manifest.load(path)
with open(os.path.join(home, "calls"), "a") as file:
    file.write(f"{body.id} {body.records} {path}\\n")
while not os.path.exists(os.path.join(home, "go")):
    time.sleep(0.1)
sys.exit(os.path.exists(os.path.join(home, "fail")))
"""
KILLED = """
import sys
sys.path[:0] = {imports!r}
from conftest import Runner, keep_api_server
keep_api_server()
from test_airflow_durable import make
Runner()(make(*{arguments!r}))
"""


def until(condition: Callable[[], Any], what: str, timeout: float = 120) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return value


@contextmanager
def daemon(log: Path, *words: str) -> Iterator[None]:
    """A process of Spark; it is killed with the drivers that it started."""
    env = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [str(SPARK_HOME / "bin" / "spark-class"), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=log.parent, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path, connect: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which the job says what it does; the cluster is that of the connection spark_default."""
    port, rest = free_ports(2)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("SPARK_DAEMON_MEMORY", "256m")
    monkeypatch.setenv("SPARK_MASTER_OPTS", f"-Dspark.master.rest.enabled=true -Dspark.master.rest.port={rest}")
    monkeypatch.setenv("PATH", f"{SPARK_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "job.py").write_text(JOB)
    deploy, address = "org.apache.spark.deploy", "127.0.0.1"
    with ExitStack() as stack:
        log = tmp_path / "master.log"
        stack.enter_context(daemon(log, f"{deploy}.master.Master", "--host", address, "--port", str(port), "--webui-port", "0"))
        until(lambda: "New state: ALIVE" in log.read_text(), "the master")
        log_of_worker = tmp_path / "worker.log"
        limits = ["--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / "work"), "--webui-port", "0"]
        stack.enter_context(
            daemon(log_of_worker, f"{deploy}.worker.Worker", "--host", address, *limits, f"spark://{address}:{port}")
        )
        until(lambda: "Successfully registered with master" in log_of_worker.read_text(), "the worker")
        connect(
            "spark_default",
            "spark",
            f"spark://{address}:{rest}",
            **{"deploy-mode": "cluster", "rest-scheme": "http", "rest-port": rest},
        )
        yield tmp_path


def make(home: str, dag_id: str, publish_to: str | None) -> DAG:
    with DAG(dag_id, schedule=None) as dag:
        QewQewSparkSubmitOperator(
            task_id="submit",
            queue_name="orders",
            publish_to=publish_to,
            retries=1,
            retry_delay=0,
            # The jar is any: the class is Spark's own, and so is on the class path.
            application=glob.glob(f"{SPARK_HOME}/jars/spark-tags_*.jar")[0],
            java_class="org.apache.spark.deploy.PythonRunner",
            application_args=[f"{home}/job.py", "", home, "{manifest}"],
            driver_memory="512m",
            conf={"spark.master.rest.enabled": "true"},
        )
    return dag


@needs_state_store
def test_a_worker_killed_in_cluster_mode_is_followed_by_a_try_that_waits_for_its_driver(
    run: Any, directory: Path, cluster: Path
) -> None:
    held = Held("queue", directory)
    held.put("a", "b")
    published = cluster / "published"
    arguments = (str(cluster), "durable", str(published))
    program = KILLED.format(imports=IMPORTS, arguments=arguments)
    calls = cluster / "calls"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            until(lambda: calls.exists() or process.poll() is not None, "the driver")
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            until(lambda: stored_job() is not None, "the id of the driver in the state store")
        finally:
            process.kill()
    assert held.counts() == {"records": 0, "leased": 1, "returned": 0, "dead": 0}

    held.put("later")
    (cluster / "go").touch()
    dag = make(*arguments)
    ran = run.again(dag)
    assert ran.states() == {"submit": "success"}
    [call] = calls.read_text().splitlines()  # the job ran once
    result = ran.result("submit")
    assert call.split() == [result["batch_id"], "2", f"{published}/{result['batch_id']}/manifest.json"]
    assert (result["attempt"], result["records"]) == (1, 2)
    assert held.counts() == {"records": 1, "leased": 0, "returned": 0, "dead": 0}
    assert list(published.iterdir()) == []
    assert stored_job() is None

    # Cleared, it is processed again: the driver's success was of the run before.
    again = run.again(dag, ran)
    assert again.states() == {"submit": "success"}
    assert len(calls.read_text().splitlines()) == 2
    assert inspect(directory / "orders").records == 1


def stored_job() -> str | None:
    """The id of the driver, as Airflow keeps it for the next try."""
    from airflow.models.task_state_store import TaskStateStoreModel
    from airflow.settings import Session

    with Session() as session:
        [row] = session.query(TaskStateStoreModel).filter(TaskStateStoreModel.key.startswith("spark_job_id.")).all() or [None]
        return row and str(row.value)
