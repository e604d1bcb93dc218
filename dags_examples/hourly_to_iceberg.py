"""With a clock: what tasks stage goes into a table every hour, each order once.

``orders`` stands for whatever brings orders, a few at a time. ``orders_by_the_hour`` leases all that is there, and appends it to
the Iceberg table ``lake.shop.orders`` in one commit, which names the batch; where nothing was staged, the run is skipped. The
catalog is a file here, below ``QEWQEW_DEMO_OUTPUT``; with a REST catalog only ``LAKE`` is another. The connections are those of
``flights_to_parquet``. The worker needs ``qewqew[iceberg]``, and a catalog in a file ``pyiceberg[sql-sqlite]``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Asset

from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator

OUTPUT = os.environ.get("QEWQEW_DEMO_OUTPUT", "/tmp/qewqew-demo")  # noqa: S108
LAKE = {"type": "sql", "uri": f"sqlite:///{OUTPUT}/catalog.db", "warehouse": f"file://{OUTPUT}/warehouse"}
SHOPS = "berlin", "lyon", "porto"


def orders(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """So many orders, a minute apart."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(params["first"], params["first"] + params["count"]):
        at = (begin + timedelta(minutes=number)).isoformat()
        yield {"id": number, "shop": SHOPS[number % 3], "cents": number * 7 % 10_000, "at": at}


with DAG("orders", schedule=None, params={"first": 0, "count": 1000}, tags=["qewqew"]):
    QewQewStageOperator(task_id="stage", queue_name="orders", records=orders)

with DAG(
    "orders_by_the_hour",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,  # the next batch waits until this one is in the table
    default_args={"retries": 3, "retry_delay": timedelta(minutes=2)},
    tags=["qewqew"],
):
    QewQewSparkSubmitOperator(
        task_id="to_iceberg",
        queue_name="orders",
        lease_timeout=1800,
        schema="id BIGINT, shop STRING, cents BIGINT, at TIMESTAMP",
        outputs=[{"table": "lake.shop.orders", "format": "iceberg", "partition_by": ["day(at)"]}],
        quarantine=f"{OUTPUT}/orders-quarantine",
        conf={f"spark.sql.catalog.lake.{name}": value for name, value in LAKE.items()},
        outlets=[Asset("orders", uri="iceberg://lake/shop/orders")],  # its events say how many, and which snapshot
    )
