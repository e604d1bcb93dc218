"""Many hosts, one Iceberg table: each host publishes what waits in its queue, and one DAG drains what is published.

``publish_<host>`` runs in the lane of its host (see ``lanes.py``): a task stages, here made-up orders, and another one publishes
what waits below ``QEWQEW_DEMO_OUTPUT``, a path or URL that all hosts reach, such as ``s3://lake``. ``drain`` knows no host. It
lists what is there, appends it to ``lake.shop.orders`` in one commit, and removes it. Nobody waits for anybody: a host that is
down is missing, and its batches come when it is back. Why each step may be repeated: docs/spark/drain.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG

from qewqew_airflow.operators.drain import QewQewDrainOperator
from qewqew_airflow.operators.publish import QewQewPublishOperator
from qewqew_airflow.operators.stage import QewQewStageOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
PREFIX = f"{OUTPUT}/published/orders"  # nothing else is there
HOSTS = os.environ.get("QEWQEW_DEMO_HOSTS", "w1,w2").split(",")
LAKE = {"type": "sql", "uri": f"sqlite:///{OUTPUT}/catalog.db", "warehouse": f"file://{OUTPUT}/warehouse"}


def orders(host: str) -> Iterator[dict[str, Any]]:
    """What this host has: here, made up."""
    yield from ({"id": n, "host": host, "amount": n / 4} for n in range(1000))


for host in HOSTS:
    with DAG(
        f"publish_{host}",
        schedule=None,  # or "*/5 * * * *"
        max_active_runs=1,
        default_args={"retries": 2, "retry_delay": timedelta(seconds=5), "queue": host},  # Airflow's queue: the lane
        tags=["qewqew"],
    ):
        queue = {"qewqew_conn_id": f"qewqew_{host}", "queue_name": "orders"}
        stage = QewQewStageOperator(task_id="stage", records=orders, op_kwargs={"host": host}, **queue)
        # If the task dies for good, the next run publishes its batch when the lease has ended.
        stage >> QewQewPublishOperator(task_id="publish", prefix=PREFIX, lease_timeout=timedelta(hours=1), **queue)

with DAG(
    "drain",
    schedule="*/10 * * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,  # two at once do no harm, but one of them works in vain
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["qewqew"],
):
    QewQewDrainOperator(
        task_id="drain",
        prefix=PREFIX,
        outputs=[{"table": "lake.shop.orders", "format": "iceberg", "partition_by": ["host"]}],
        schema="id BIGINT, host STRING, amount DOUBLE",
        quarantine=f"{OUTPUT}/orders-quarantine",
        conf={f"spark.sql.catalog.lake.{name}": value for name, value in LAKE.items()},
    )
