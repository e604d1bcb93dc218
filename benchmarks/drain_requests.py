"""How long a drain takes from an object store that answers late, and how many requests and tasks it makes.

::

    .venv/bin/python -m benchmarks.drain_requests [--batches 1000] [--records 10] [--latency 0.04]

moto is the store, behind a proxy that waits before it passes each request on; Spark has two processors, and has started.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/integration/spark")]

from object_store import CREDENTIALS, proxied, s3_client  # noqa: E402
from spark_batches import make_batch  # noqa: E402

from qewqew_spark.jobs.drain import drain  # noqa: E402
from qewqew_spark.jobs.output import Output  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--records", type=int, default=10)
    parser.add_argument("--latency", type=float, default=0.04, metavar="SECONDS")
    given = parser.parse_args()
    os.environ.update(CREDENTIALS, PYSPARK_PYTHON=sys.executable)
    with tempfile.TemporaryDirectory() as place, proxied("lake") as store:
        client = s3_client(f"http://{store.behind}")
        for batch in range(given.batches):
            numbers = range(batch * given.records, (batch + 1) * given.records)
            directory = Path(place, "batch")
            make_batch(directory, [b'{"id": %d}' % number for number in numbers], batch_id=f"w{batch:06}")
            for file in directory.iterdir():
                client.put_object(Bucket="lake", Key=f"staged/w{batch:06}/{file.name}", Body=file.read_bytes())
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        spark.range(2).mapInArrow(lambda batches: batches, "id LONG").collect()
        store.reset()
        store.before = lambda request: time.sleep(given.latency)
        begun = time.monotonic()
        table = f"{place}/orders"
        options = {"fs.endpoint_url": store.url}
        result = drain(
            lambda: spark, "s3://lake/staged", [Output(path=table, format="delta")], schema="id BIGINT",
            read_options=options, quarantine=f"{place}/bad",
        )  # fmt: skip
        seconds = time.monotonic() - begun
        assert result["read"] == given.batches * given.records, result
        kinds = Counter("list" if "list-type" in each else each.split()[0] for each in store.seen)
        files = len(list(Path(table).rglob("*.parquet")))
        print(f"{given.batches} batches of {given.records} records, {given.latency * 1000:g} ms: {seconds:.1f} s, ", end="")
        print(f"{len(store.seen)} requests {dict(kinds)}, {files} task(s)", flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
