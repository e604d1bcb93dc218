"""A batch for an engine that is asked by HTTP: lease, submit, wait, acknowledge or return, each a task of its own.

So it is with Livy, a REST service of one's own, a notebook server: whatever takes a job and is asked later what became of it.
Here it is a small program that runs beside the task (``SERVICE``); with Livy, ``submit`` is a `LivyOperator` with
``args=["{{ ti.xcom_pull('lease')['manifest'] }}"]``, which waits by itself. The hand-over is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, PokeReturnValue, task

from qewqew_airflow.assets.qewqew import create_asset
from qewqew_airflow.operators.leases import QewQewAckOperator, QewQewLeaseOperator, QewQewNackOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
SERVICE = """
import json, os, sys
from qewqew_core.batch import manifest, segments

path, target = sys.argv[1:]
body = manifest.load(path)
directory = os.path.dirname(path)
parts = (part for segment in body.segments for part in segments.read_records(directory, body, segment))
total = sum(json.loads(record)["price"] for part in parts for record in part)
with open(target + ".part", "w") as file:
    json.dump({"records": body.records, "total": total}, file)
os.replace(target + ".part", target)  # under the batch's id: a second time replaces the first
"""

with DAG("livy_style", schedule=None, max_active_runs=1, tags=["qewqew"], default_args={"retry_delay": timedelta(seconds=5)}):

    @task.qewqew(queue_name="livy_style", outlets=[create_asset(name="livy_style")])
    def stage() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            yield {"id": number, "price": number % 10}

    # Nobody extends the lease: a day is more than all of the rest can take.
    lease = QewQewLeaseOperator(task_id="lease", queue_name="livy_style", max_records=100_000, lease_timeout=timedelta(days=1))

    @task(retries=2)
    def submit(batch: dict[str, Any]) -> str:
        """Start the job; returns where its answer will be."""
        import subprocess
        import sys

        os.makedirs(f"{OUTPUT}/livy_style", exist_ok=True)
        answer = f"{OUTPUT}/livy_style/{batch['batch_id']}.json"
        subprocess.Popen([sys.executable, "-c", SERVICE, batch["manifest"], answer], start_new_session=True)  # noqa: S603
        return answer

    @task.sensor(poke_interval=1, timeout=600, mode="reschedule")
    def wait(answer: str) -> PokeReturnValue:
        """Ask what became of it."""
        import json

        if not os.path.exists(answer):
            return PokeReturnValue(is_done=False)
        with open(answer) as file:
            return PokeReturnValue(is_done=True, xcom_value=json.load(file))

    job = submit(lease.output)
    waited = wait(job)
    ack = QewQewAckOperator(task_id="ack", batch=lease.output)
    nack = QewQewNackOperator(task_id="nack", batch=lease.output)
    stage() >> lease
    # Of all tasks that work on the batch: "one_failed" looks at those directly before it.
    [job, waited] >> nack
    waited >> ack
