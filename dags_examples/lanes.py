"""Celery workers with a disk of their own each: every host has a queue and a lane, and one Spark job makes one table of all.

A lane is a Celery queue that one worker alone serves, here of the name of its host::

    airflow celery worker --queues default,w1       # on w1

The queue of a host is reached by a connection that says whose it is, so that a task in the wrong lane fails instead of making
a second queue: ``qewqew_w1`` with the directory as host, and the extra ``{"hostname": "w1"}``. Between the hosts the batches
go through ``QEWQEW_DEMO_OUTPUT``: a path or URL that all of them reach, such as ``s3a://lake``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowSkipException
from fsspec.core import url_to_fs

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import task_key
from qewqew_airflow.operators.stage import QewQewStageOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
FAN_IN = os.path.join(os.path.dirname(__file__), "fan_in.py")  # says why each step may be repeated
HOSTS = ("w1", "w2")


def orders(host: str) -> Iterator[dict[str, Any]]:
    """What this host has: here, made up."""
    yield from ({"id": n, "host": host, "amount": n / 4} for n in range(1000))


@task
def publish(host: str, **context: Any) -> str | None:
    """Lease what is in the queue of the host, and copy it to where Spark can read it; None: nothing is there."""
    with QewQewHook(f"qewqew_{host}").queue("orders") as queue:
        batch = queue.lease(task_key(context))
    # The queue is free again for its producers while the batch is sent.
    return None if batch is None or batch.state == "acked" else batch.publish(f"{OUTPUT}/batches")


@task
def acknowledge(host: str, url: str | None) -> None:
    """The batch is in the table; the copy that was published has done its work."""
    if url is None:
        raise AirflowSkipException(f"the queue of {host} was empty")
    with QewQewHook(f"qewqew_{host}").queue("orders") as queue:
        queue.batch(url.rpartition("/")[2]).ack()
    store, path = url_to_fs(url)
    if store.exists(path):  # else an earlier try has removed it
        store.rm(path, recursive=True)


@task(trigger_rule="all_done")
def arguments(urls: list[str | None]) -> list[str]:
    """Of the one Spark job: the batches of the hosts that have one. A host that is down joins in the next run."""
    if not any(urls):
        raise AirflowSkipException("all queues are empty")
    return ["write", f"{OUTPUT}/orders", *filter(None, urls)]


with DAG(
    "lanes",
    schedule=None,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(seconds=5)},
    tags=["qewqew"],
):
    published = {}
    for host in HOSTS:
        stage = QewQewStageOperator(
            task_id=f"stage_{host}",
            qewqew_conn_id=f"qewqew_{host}",
            queue_name="orders",
            records=orders,
            op_kwargs={"host": host},
            queue=host,  # Airflow's: the lane
        )
        published[host] = publish.override(task_id=f"publish_{host}", queue=host)(host)
        stage >> published[host]
    write = SparkSubmitOperator(task_id="write", application=FAN_IN, application_args=arguments(list(published.values())))
    for host, url in published.items():
        write >> acknowledge.override(task_id=f"acknowledge_{host}", queue=host)(host, url)
