"""Queues on many hosts, one table: each host publishes a batch of its queue, one Spark application writes them all.

On each host, then where Spark runs, then on each host again (``URL``: a place that all of them reach)::

    python fan_in.py publish /data/orders.qew "$(hostname) 2026-11-22" s3://lake/batches    # prints the URL of the batch
    spark-submit --py-files qewqew.zip fan_in.py write s3a://lake/orders URL URL ...
    python fan_in.py acknowledge /data/orders.qew URL

Whatever fails, run it again with the same arguments: a key leases the same batch again, what is published is not sent
twice, and a batch's rows replace those that an earlier run wrote. Only what is in the table is acknowledged.
"""

from __future__ import annotations

import sys
from functools import reduce

from qewqew_core import Queue
from qewqew_core.batch import manifest

SCHEMA = "id BIGINT, host STRING, amount DOUBLE"


def publish(queue: str, key: str, url: str) -> str | None:
    """Lease a batch and copy it; returns its URL, or None if nothing waits or the batch of this key is acknowledged.

    The key must name host and run: it makes the id of the batch, by which the batches of the hosts are told apart.
    """
    with Queue(queue) as q:
        batch = q.lease(key)
    # The queue is free again for its producers while the batch is sent.
    return None if batch is None or batch.state == "acked" else batch.publish(url)


def write(table: str, *urls: str) -> int:
    """Write the batches to the table, each as its partition ``batch=ID``; returns how many records they have."""
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F

    from qewqew_spark.data_source import register

    spark = SparkSession.builder.appName("fan-in").getOrCreate()
    register(spark)  # Spark finds what is installed, but not what comes with --py-files
    batches = {url: manifest.load(url) for url in urls}
    reader = spark.read.format("qewqew").schema(SCHEMA).options(codec="json", mode="FAILFAST")
    frames = [reader.load(url).withColumn("batch", F.lit(batch.id)) for url, batch in batches.items()]
    rows = reduce(DataFrame.unionAll, frames)
    # Only the partitions of these batches are replaced; each has rows, as an empty batch is never leased.
    rows.write.mode("overwrite").option("partitionOverwriteMode", "dynamic").partitionBy("batch").parquet(table)
    return sum(batch.records for batch in batches.values())


def acknowledge(queue: str, url: str) -> None:
    """The batch is in the table. Doing it twice is no error."""
    with Queue(queue) as q:
        q.batch(url.rpartition("/")[2]).ack()


if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    print({"publish": publish, "write": write, "acknowledge": acknowledge}[step](*arguments) or "")
