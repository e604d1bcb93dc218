"""Spark Connect: the client sends plans only; the server finds the format by itself and reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from spark_cluster import ROOT, SPARK_HOME, environment, free_port, running, wait_for

from qewqew_core import Message, Queue, Topic

pytest.importorskip("grpc", reason="a client of Spark Connect needs grpc: pip install 'pyspark[connect]'")

# In a process of its own: one that has a classic session can have no remote one. It imports nothing of QewQew.
CLIENT = """
import json, sys
from pyspark.sql import SparkSession

url, reads = sys.argv[1], json.loads(sys.argv[2])
spark = SparkSession.builder.remote(url).getOrCreate()
found = []
for path, schema, options, columns in reads:
    reader = spark.read.format("qewqew").options(**options)
    rows = (reader.schema(schema) if schema else reader).load(path).select(columns).collect()
    found.append([[one.decode() if isinstance(one, (bytes, bytearray)) else one for one in row] for row in rows])
spark.stop()
assert not [name for name in sys.modules if name.startswith("qewqew")]
print(json.dumps(found))
"""


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    port = free_port()
    log = tmp_path / "server.log"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    kind = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [f"{SPARK_HOME}/bin/spark-submit", "--master", "local[2]", "--class", kind, *conf]
    with running(command, environment(sys.executable, PYTHONPATH=str(ROOT)), log) as process:
        wait_for(lambda: "Spark Connect server started" in log.read_text(), log, process)
        yield f"sc://127.0.0.1:{port}"


def test_a_client_reads_batches_and_topics_without_registering_anything(server, tmp_path):
    records = [b'{"id": %d, "name": "n%d"}' % (number, number) for number in range(1000)]
    with Queue(tmp_path / "orders.qew") as q:
        q.put_many(records)
        url = q.lease("a run").publish(str(tmp_path / "published"))
    with Topic(tmp_path / "prices") as topic:
        topic.append_many([Message(b"%d" % number, "even" if number % 2 == 0 else "odd") for number in range(100)])

    reads = [
        (url, None, {}, ["offset", "value"]),
        (url, "id BIGINT, name STRING", {"codec": "json"}, ["id", "name"]),
        (str(tmp_path / "prices"), None, {"filter": "even"}, ["number", "tag", "value"]),
    ]
    command = [sys.executable, "-c", CLIENT, server, json.dumps(reads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment(sys.executable))
    assert done.returncode == 0, done.stderr[-3000:]
    raw, typed, even = json.loads(done.stdout)
    assert sorted(raw) == [[number, one.decode()] for number, one in enumerate(records)]
    assert sorted(typed) == [[number, f"n{number}"] for number in range(1000)]
    assert sorted(even) == [[number, "even", str(number)] for number in range(0, 100, 2)]
