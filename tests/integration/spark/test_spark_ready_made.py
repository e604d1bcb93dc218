"""The ready-made job end to end: `./run matrix --quick` runs it with the oldest and with the newest Spark that are promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
from spark_lake import Lake

from qewqew_core import Queue

JOB = Path(__file__).parents[3] / "qewqew_spark" / "jobs" / "batch.py"


def test_a_batch_of_a_queue_becomes_files_and_tables_with_this_spark(tmp_path: Path) -> None:
    with Queue(tmp_path / "orders-queue") as queue:
        queue.put_many([b'{"id": 1, "shop": "eu", "at": "2026-11-27T15:00:00Z"}', b'{"id": 2, "tags": ["a", null]}', b"x"])
        batch = queue.lease("the key")
    assert batch is not None
    lake = Lake(None, tmp_path)
    settings = [f"--conf=spark.sql.catalog.lake.{name}={value}" for name, value in lake.settings.items()]
    outputs = [
        {"path": f"{tmp_path}/out"},
        {"table": lake.name("iceberg"), "format": "iceberg"},
        {"path": lake.name("delta"), "format": "delta"},
    ]
    done = subprocess.run(
        [
            *("spark-submit", "--master=local[2]", "--conf=spark.ui.enabled=false", *settings),
            *(str(JOB), str(Path(batch.manifest_path).parent), *(f"--output={json.dumps(output)}" for output in outputs)),
            *("--schema=id BIGINT, shop STRING, at TIMESTAMP, tags ARRAY<STRING>", f"--quarantine={tmp_path}/bad"),
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("qewqew result: "))
    assert (result["good"], result["bad"], [each["written"] for each in result["outputs"]]) == (2, 1, [2, 2, 2])

    (file,) = (tmp_path / "out").glob("batch=*/*.parquet")
    footer = pq.read_schema(file).metadata
    assert footer[b"org.apache.spark.version"].decode() == pyspark.__version__  # what is imported here ran there
    rows = [(1, "eu", None), (2, None, ["a", None])]
    assert [(row["id"], row["shop"], row["tags"]) for row in pq.read_table(file).to_pylist()] == rows
    assert lake.rows("iceberg", "id, shop, tags") == lake.rows("delta", "id, shop, tags") == rows
    (bad,) = (tmp_path / "bad").glob("batch=*/*.parquet")
    assert [row["value"] for row in pq.read_table(bad).to_pylist()] == [b"x"]
