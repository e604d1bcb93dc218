"""Celery workers with a disk of their own each: every host has a queue and a lane, and one Spark job makes one table of all.

A lane is a Celery queue that one worker alone serves, here of the name of its host::

    airflow celery worker --queues default,w1       # on w1

The queue of a host is reached by a connection that says whose it is, so that a task in the wrong lane fails instead of making
a second queue: ``qewqew_w1`` with the directory as host, and the extra ``{"hostname": "w1"}``. Between the hosts the batches
go through ``QEWQEW_DEMO_OUTPUT``: a path or URL that all of them reach, such as ``s3a://lake``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pendulum
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, PokeReturnValue, task
from airflow.sdk.exceptions import AirflowSkipException
from fsspec.core import url_to_fs

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.keys import make_key, task_key
from qewqew_airflow.operators.stage import QewQewStageOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
FAN_IN = os.path.join(os.path.dirname(__file__), "fan_in.py")  # says why each step may be repeated
HOSTS = ("w1", "w2")
LEASE = timedelta(hours=2)  # longer than a run takes


def orders(host: str) -> Iterator[dict[str, Any]]:
    """What this host has: here, made up."""
    yield from ({"id": n, "host": host, "amount": n / 4} for n in range(1000))


@task
def publish(host: str, **context: Any) -> str:
    """Lease what is in the queue of the host, and copy it to where Spark can read it; "": nothing is there.

    If the batch is not acknowledged within `LEASE`, because the host died, the next run of its `publish` takes it up. It has the
    same id, so it replaces what this run may have written.
    """
    with QewQewHook(f"qewqew_{host}").queue("orders") as queue:
        batch = queue.lease(task_key(context), lease_timeout=LEASE.total_seconds())
    # The queue is free again for its producers while the batch is sent.
    return "" if batch is None or batch.state == "acked" else batch.publish(f"{OUTPUT}/batches")


@task.sensor(mode="reschedule", poke_interval=10)
def gather(**context: Any) -> PokeReturnValue:
    """The arguments of the one Spark job, as soon as all hosts have answered, or ``deadline`` seconds after the run began.

    A host that does not answer holds up nobody: it is reported here, and its batch joins in a later run.
    """
    urls = {host: context["ti"].xcom_pull(task_ids=f"publish_{host}") for host in HOSTS}
    missing = [host for host, url in urls.items() if url is None]
    waited = pendulum.now("UTC") - context["dag_run"].start_date
    if missing and waited.total_seconds() < context["params"]["deadline"]:
        return PokeReturnValue(is_done=False)
    if missing:
        logging.getLogger(__name__).warning("no answer from %s: the others go on without", ", ".join(missing))
    if not any(urls.values()):
        raise AirflowSkipException("nothing is in the queues that have answered")
    return PokeReturnValue(is_done=True, xcom_value=["write", f"{OUTPUT}/orders", *filter(None, urls.values())])


@task
def acknowledge(host: str, url: str, arguments: list[str], **context: Any) -> None:
    """The batch is in the table, or comes too late for it. The copy that was published has done its work."""
    if not url:
        raise AirflowSkipException(f"the queue of {host} was empty")
    written, ti = url in arguments, context["ti"]
    leased_by = make_key(ti.dag_id, ti.run_id, f"publish_{host}", ti.map_index)
    with QewQewHook(f"qewqew_{host}").queue("orders") as queue:
        if written:
            queue.batch(url.rpartition("/")[2]).ack()
        else:
            for batch in queue.batches():
                if batch.key == leased_by:
                    batch.put_back()  # the job has not written it
    store, path = url_to_fs(url)
    if store.exists(path):  # else an earlier try has removed it
        store.rm(path, recursive=True)
    if not written:
        raise AirflowSkipException(f"the job went on without {host}; the next run takes up its records")


with DAG(
    "lanes",
    schedule=None,
    max_active_runs=4,  # a run that waits for a dead host does not hold up the next one: they have different batches
    params={"deadline": 600},  # seconds; longer than a host needs in an ordinary run
    default_args={"retries": 2, "retry_delay": timedelta(seconds=5)},
    tags=["qewqew"],
):
    arguments = gather()
    write = SparkSubmitOperator(task_id="write", application=FAN_IN, application_args=arguments)
    for host in HOSTS:
        stage = QewQewStageOperator(
            task_id=f"stage_{host}",
            qewqew_conn_id=f"qewqew_{host}",
            queue_name="orders",
            records=orders,
            op_kwargs={"host": host},
            queue=host,  # Airflow's: the lane
        )
        published = publish.override(task_id=f"publish_{host}", queue=host)(host)
        stage >> published
        write >> acknowledge.override(task_id=f"acknowledge_{host}", queue=host)(host, published, arguments)
