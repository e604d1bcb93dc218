"""Does a busy queue notice that an Airflow watches it? python benchmarks/watched.py [--seconds 30] [--rate 10000] [--json]

Batches of 100 records of 200 bytes are put into a queue at a fixed rate: with nobody there, then beside an idle Airflow, then
while its asset watcher and a deferred sensor wait for more than will come, and ten open pages ask for all numbers as often as
the page does. Told are the times that putting a batch took, and the CPU time of the triggerer and of the API server.
It needs the environment of ``./run``: eval "$(.venv/bin/python -m demo.local_airflow)"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from demo.local_airflow import LocalAirflow
from qewqew_core import Queue
from qewqew_core.tools import marker

BATCH, SIZE = 100, 200
PAGES, REFRESH = 10, 5.0  # seconds, as in the page's script
TICKS = os.sysconf("SC_CLK_TCK")
DAGS = """
from airflow.sdk import DAG, Asset, AssetWatcher
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.triggers.qewqew import QewQewEventTrigger

trigger = QewQewEventTrigger(queue_name="busy", min_records=10**12)
with DAG("watching", schedule=[Asset("busy", watchers=[AssetWatcher(name="busy", trigger=trigger)])]):
    pass
with DAG("sensing", schedule=None):
    QewQewSensor(task_id="wait", queue_name="busy", min_records=10**12, deferrable=True)
"""


def put(path: Path, seconds: float, rate: int) -> list[float]:
    """Seconds that each batch took, at this many records a second."""
    batch = [os.urandom(SIZE) for _ in range(BATCH)]
    took = []
    with Queue(path) as queue:
        due = time.perf_counter()
        end = due + seconds
        while due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            queue.put_many(batch)
            took.append(time.perf_counter() - began)
            due += BATCH / rate
    return took


def cpu(session: int) -> float:
    """Seconds that the processes of this session have computed: each component of `LocalAirflow` has one of its own."""
    stats = [stat.read_text().rpartition(")")[2].split() for stat in Path("/proc").glob("[0-9]*/stat") if stat.exists()]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats if int(fields[3]) == session) / TICKS


def look(airflow: LocalAirflow, done: threading.Event, took: list[float]) -> None:
    while not done.is_set():
        began = time.perf_counter()
        assert airflow._call("GET", "/qewqew/data/state")["connections"]
        took.append(time.perf_counter() - began)
        done.wait(REFRESH)


def summary(took: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took, n=100)
    return {"median_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000, "max_ms": max(took) * 1000, "count": len(took)}


def measure(home: Path, seconds: float, rate: int) -> dict[str, Any]:
    queues, dags = home / "queues", home / "dags"
    marker.init(str(queues))
    dags.mkdir()
    (dags / "watching.py").write_text(DAGS)
    result: dict[str, Any] = {"put, alone": summary(put(queues / "alone", seconds, rate))}
    connection = json.dumps({"conn_type": "qewqew", "host": str(queues)})
    with LocalAirflow(home / "airflow", dags, {"AIRFLOW_CONN_QEWQEW_DEFAULT": connection}) as airflow:
        with Queue(queues / "busy") as queue:
            queue.put_many([b"first"])
        airflow.unpause("watching")
        run = airflow.trigger("sensing")
        while [each.state for each in airflow.task_instances(run)] != ["deferred"]:
            airflow.check()
            time.sleep(0.5)
        processes = {name: airflow._components[name].pid for name in ("triggerer", "api-server")}
        done, looks = threading.Event(), list[float]()
        pages = [threading.Thread(target=look, args=(airflow, done, looks)) for _ in range(PAGES)]
        result["put, an idle Airflow"] = summary(put(queues / "idle", seconds, rate))
        before = {name: cpu(pid) for name, pid in processes.items()}
        for page in pages:
            page.start()
        try:
            result["put, watched"] = summary(put(queues / "busy", seconds, rate))
        finally:
            done.set()
            for page in pages:
                page.join()
        result["page, all numbers"] = summary(looks)
        result["percent of a core"] = {name: 100 * (cpu(pid) - before[name]) / seconds for name, pid in processes.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=int, default=10_000, help="records a second")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        result = measure(Path(home), given.seconds, given.rate)
    if given.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(f"{name:22}", "  ".join(f"{what} {figure:.2f}" for what, figure in figures.items()))


if __name__ == "__main__":
    main()
