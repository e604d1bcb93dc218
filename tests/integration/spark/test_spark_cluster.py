"""The batch job on a real cluster: hosts that see neither the queue nor this checkout, one of which is lost."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pyarrow.dataset as ds
import pytest
from spark_cluster import CREDENTIALS, ROOT, Cluster, running, standalone, wait_for, why_no_hosts

from qewqew_core import Queue

FAN_IN = str(ROOT / "dags_examples" / "fan_in.py")
WHY_NO_HOSTS = why_no_hosts()
WHERE = f"on 127.0.0.1, because {WHY_NO_HOSTS}" if WHY_NO_HOSTS else "in network namespaces"

# Defaults would have the driver wait for two minutes before it takes a worker for lost, and a task for as long, several times,
# when it asks for what the lost one had cached.
SHORT = {
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "4s",
    "spark.shuffle.io.connectionTimeout": "5s",
    "spark.shuffle.io.maxRetries": "0",
}


@pytest.fixture(scope="module", params=[pytest.param(not WHY_NO_HOSTS, id=WHERE)])
def cluster(request, tmp_path_factory) -> Iterator[Cluster]:
    """Its hosts do not see the directory `queues`; what is there has to be published."""
    directory = tmp_path_factory.mktemp("cluster")
    (directory / "queues").mkdir()
    with standalone(directory, directory / "queues", request.param) as made:
        yield made


def submit(cluster: Cluster, tmp_path: Path, *words: str, meanwhile: Callable[[Popen, Path], None] | None = None) -> str:
    """Run spark-submit, which must succeed; returns what it logs. ``meanwhile`` is called with the process and its log."""
    log = tmp_path / "submit.log"
    with running(cluster.submit(*words, conf=SHORT), cluster.environment(), log) as process:
        if meanwhile:
            meanwhile(process, log)
        status = process.wait(300)
    assert status == 0, log.read_text()[-3000:]
    return log.read_text()


@pytest.mark.soak  # a minute; test_celery.py has the hosts, the next test a cluster
def test_batches_of_several_hosts_become_one_table_and_a_repeated_run_leaves_one_result(cluster, spark, tmp_path):
    example = runpy.run_path(FAN_IN)
    publish, write, acknowledge = (example[step] for step in ("publish", "write", "acknowledge"))
    queues = {host: cluster.directory / "queues" / host / "orders.qew" for host in ("a", "b", "c")}  # all of one name

    def run(day: str) -> dict[str, str]:
        for number, (host, path) in enumerate(queues.items()):
            path.parent.mkdir(exist_ok=True)
            with Queue(path) as q:
                q.put_many(json.dumps({"id": one, "host": host, "amount": one / 2}).encode() for one in range(100 + number))
        return {host: publish(str(path), f"{host} {day}", str(tmp_path / "shared")) for host, path in queues.items()}

    def table() -> list[tuple]:
        rows = spark.read.parquet(str(tmp_path / "table")).select("batch", "host", "id", "amount").collect()
        return sorted(map(tuple, rows))

    first = run("Monday")
    submit(cluster, tmp_path, FAN_IN, "write", str(tmp_path / "table"), *first.values())
    expected = [
        (Path(url).name, host, one, one / 2) for number, (host, url) in enumerate(first.items()) for one in range(100 + number)
    ]
    assert table() == sorted(expected)

    # The application died before it told: all is done again, by another driver, and the same batches come.
    again = {host: publish(str(path), f"{host} Monday", str(tmp_path / "shared")) for host, path in queues.items()}
    assert again == first
    assert write(str(tmp_path / "table"), *again.values()) == 303
    assert table() == sorted(expected)
    for _ in range(2):
        for host, path in queues.items():
            acknowledge(str(path), first[host])
    assert publish(str(queues["a"]), "a Monday", str(tmp_path / "shared")) is None

    # Another run adds its batches.
    second = run("Tuesday")
    assert not {*second.values()} & {*first.values()}
    assert write(str(tmp_path / "table"), *second.values()) == 303
    assert len(table()) == 606
    for path, url in zip(queues.values(), second.values(), strict=True):
        acknowledge(str(path), url)
        with Queue(path) as q:
            assert (len(q), q.batches()) == (0, [])


# The last one: the cluster is not what it was.
def test_a_worker_that_is_cut_off_in_mid_job_changes_nothing_in_the_result(cluster, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with Queue(cluster.directory / "queues" / "orders.qew") as q:
        q.put_many(b'{"id": %d, "text": "%s"}' % (number, b"x" * 100) for number in range(12_000))
        url = q.lease("a run").publish("s3://batches/here", options={"endpoint_url": cluster.store})

    # Each task takes a second, so there are tasks on both workers when the first ones are done.
    slow = "CASE WHEN id % 1000 = 0 THEN reflect('java.lang.Thread', 'sleep', 1000L) END"
    output = {"path": str(tmp_path / "out"), "sql": f"SELECT id, {slow} AS slow FROM batch"}  # noqa: S608
    job = str(ROOT / "qewqew_spark" / "jobs" / "batch.py")
    options = "--schema=id BIGINT", "--read-option=minPartitions=12", f"--read-option=fs.endpoint_url={cluster.store}"
    words = job, url, *options, f"--output={json.dumps(output)}", f"--result={tmp_path}/result"

    def committed() -> int:
        return len([*(tmp_path / "out").glob(".qewqew/batch=*/_temporary/0/task_*")])

    def cut_off(process: Popen, log: Path) -> None:
        wait_for(lambda: committed() >= 2, log, process)
        cluster.cut_off(0)
        assert committed() < 10

    told = submit(cluster, tmp_path, *words, meanwhile=cut_off)
    assert set(re.findall(r"Starting task \d+\.0 .*executor (\d)", told)) >= {"0", "1"}, "both workers had tasks"
    assert re.search(r"Lost executor \d", told)
    assert re.search(r"Starting task \d+\.1 in stage", told), "tasks ran again"
    result = json.loads((tmp_path / "result").read_text())
    assert (result["read"], result["good"], result["outputs"][0]["written"]) == (12_000, 12_000, 12_000)
    found = ds.dataset(Path(result["outputs"][0]["path"])).to_table(["id"])["id"].to_pylist()
    assert sorted(found) == [*range(12_000)]
