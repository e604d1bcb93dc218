"""A batch for a function with a Spark session: ``@task.pyspark`` between lease and acknowledgement.

The session runs in the task's process with the connection ``spark_default``, and reads the batch by its manifest with the
format ``qewqew``. What is written is written by the batch's id, as a batch may be processed more than once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, task

from qewqew_airflow.operators.leases import QewQewAckOperator, QewQewLeaseOperator, QewQewNackOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108

with DAG("pyspark_task", schedule=None, max_active_runs=1, tags=["qewqew"], default_args={"retry_delay": timedelta(seconds=5)}):

    @task.qewqew(queue_name="pyspark_task")
    def stage() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            yield {"id": number, "shop": f"shop {number % 3}"}

    lease = QewQewLeaseOperator(task_id="lease", queue_name="pyspark_task")

    @task.pyspark(conn_id="spark_default", retries=2)
    def to_parquet(batch: dict[str, Any], spark: Any = None) -> dict[str, int]:
        from qewqew_spark.data_source import register

        register(spark)
        rows = spark.read.format("qewqew").schema("id INT, shop STRING").option("codec", "json").load(batch["manifest"])
        rows.write.mode("overwrite").parquet(f"{OUTPUT}/pyspark_task/batch={batch['batch_id']}")
        return {row["shop"]: row["count"] for row in rows.groupBy("shop").count().collect()}

    worked = to_parquet(lease.output)
    stage() >> lease
    table = Asset(f"file://{OUTPUT}/pyspark_task")
    worked >> [
        QewQewAckOperator(task_id="ack", batch=lease.output, outlets=[table]),
        QewQewNackOperator(task_id="nack", batch=lease.output),
    ]
