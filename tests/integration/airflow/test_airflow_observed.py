"""What Airflow's metrics and OpenLineage are told: by a StatsD server and in a file, both as users set them up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from holding import IMPORTS, Held

from qewqew_airflow.operators.leases import QewQewAckOperator, QewQewLeaseOperator, QewQewNackOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor

PROGRAM = """
import json, sys
from pathlib import Path
sys.path[:0] = {imports!r}
from conftest import Runner, keep_api_server
keep_api_server()
from test_airflow_observed import make
Path({states!r}).write_text(json.dumps(Runner()(make()).states()))
"""


def make() -> DAG:
    held = Held("queue", Path("/nowhere"))
    with DAG("observed", schedule=None) as dag:

        @task(trigger_rule="all_done")
        def work(batch: Any) -> None:
            raise RuntimeError("not today")

        stages = [QewQewStageOperator(task_id=f"stage_{name}", queue_name=name, records=["a", "bc"]) for name in ("one", "two")]
        stages.append(QewQewStageOperator(task_id="stage_news", topic="news", records=["x", "y", "z"]))
        submit = [held.operator(task_id=f"submit_{name}", queue_name=name, trigger_rule="all_done") for name in ("one", "two")]
        wait = QewQewSensor(task_id="wait", topic="news", reader="load", trigger_rule="all_done")
        lease = QewQewLeaseOperator(task_id="lease", topic="news", reader="load", max_records=2, trigger_rule="all_done")
        stages[0] >> stages[1] >> stages[2] >> submit[0] >> submit[1] >> wait >> lease
        nack = QewQewNackOperator(task_id="nack", batch=lease.output)
        work(lease.output) >> nack
        again = QewQewLeaseOperator(task_id="again", topic="news", reader="load", trigger_rule="all_done")
        nack >> again >> QewQewAckOperator(task_id="ack", batch=again.output)
    return dag


@pytest.fixture
def observed(directory: Path, spark: Any, tmp_path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The datagrams of the DAG run, and its events of lineage."""
    events = tmp_path / "events.jsonl"
    spark.next("wait", "fail")
    spark.go()
    states = tmp_path / "states.json"
    program = PROGRAM.format(imports=IMPORTS, states=str(states))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        env = {
            **os.environ,
            "AIRFLOW__METRICS__STATSD_ON": "True",
            "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
            "AIRFLOW__METRICS__STATSD_PORT": str(server.getsockname()[1]),
            "AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED": "True",
            "AIRFLOW__METRICS__METRICS_ALLOW_LIST": "qewqew",
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(events), "append": True}),
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "test",
        }
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        ended = json.loads(states.read_text())
        assert {name: ended[name] for name in ("submit_one", "submit_two", "lease", "nack", "ack")} == {
            "submit_one": "success",
            "submit_two": "failed",
            "lease": "success",
            "nack": "success",
            "ack": "success",
        }, done.stdout[-5000:]
        server.setblocking(False)
        datagrams = []
        try:
            while True:
                datagrams += server.recv(65_535).decode().splitlines()
        except BlockingIOError:
            pass
    return datagrams, [json.loads(line) for line in events.read_text().splitlines()]


def test_metrics_and_lineage_tell_what_became_of_the_records(observed: tuple[list[str], list[dict[str, Any]]]) -> None:
    datagrams, events = observed

    def told(name: str, **tags: str) -> list[str]:
        of = ",".join(f"{tag}={value}" for tag, value in {"connection": "qewqew_default", **tags}.items())
        return [line.split(":", 1)[1] for line in datagrams if line.startswith(f"airflow.qewqew.{name},{of}:")]

    news = {"topic": "news", "reader": "load"}
    assert told("staged", queue="one") == ["2|c"]
    assert told("staged", topic="news") == ["3|c"]
    assert told("leased", queue="one") == ["2|c"]
    assert told("acknowledged", queue="one") == ["2|c"]
    assert (told("leased", queue="two"), told("nacked", queue="two")) == (["2|c"], ["2|c"])
    assert told("acknowledged", queue="two") == []
    assert told("leased", **news) == ["2|c", "2|c"]
    assert (told("nacked", **news), told("acknowledged", **news)) == (["2|c"], ["2|c"])
    (lasted,) = told("batch_duration", queue="one")
    assert 0 < float(lasted.removesuffix("|ms")) < 600_000
    assert told("batch_duration", queue="two") == []
    assert len(told("lock_wait", queue="one")) >= 3, "to stage, to lease and to acknowledge"
    assert all(0 <= float(waited.removesuffix("|ms")) < 60_000 for waited in told("lock_wait", queue="one"))
    assert told("lock_wait", topic="news")
    assert told("lock_wait", **news)
    assert told("refused", queue="one") == []
    assert told("depth", queue="one") == ["2|g", "0|g", "0|g"]
    assert told("dead", queue="one") == ["0|g"] * 3
    assert len(told("oldest_age", queue="one")) == 3
    assert told("depth", **news) == ["3|g"]  # by the sensor, which counts anyway

    def lineage(name: str, kind: str) -> tuple[list[Any], list[Any]]:
        [event] = [each for each in events if each["job"]["name"] == f"observed.{name}" and each["eventType"] == kind]
        names = [[(one["namespace"], one["name"]) for one in event[side]] for side in ("inputs", "outputs")]
        return names[0], names[1]

    def queue(name: str) -> tuple[str, str]:
        return "qewqew://qewqew_default", name

    assert lineage("stage_one", "COMPLETE") == ([], [queue("one")])
    assert lineage("stage_news", "COMPLETE") == ([], [queue("news")])
    assert lineage("submit_one", "COMPLETE") == ([queue("one")], [("file", "/nowhere/orders")])
    assert lineage("submit_two", "FAIL") == ([queue("two")], [])
    assert lineage("lease", "COMPLETE") == ([queue("news")], [])
    [staged] = [one for one in events if one["job"]["name"] == "observed.stage_one" and one["eventType"] == "COMPLETE"]
    statistics = staged["outputs"][0]["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["size"]) == (2, 3)
