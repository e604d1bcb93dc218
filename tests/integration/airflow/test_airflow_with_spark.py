"""The whole path with a real spark-submit: staged in Airflow, written by Spark."""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from airflow.sdk import DAG
from airflow_version import DagBag
from pyiceberg.catalog import load_catalog

from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_core import inspect, inspect_reader
from qewqew_core.batch.published import complete

EXAMPLES = Path(__file__).resolve().parents[3] / "dags_examples"
CONF = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}


@pytest.fixture(autouse=True)
def local_spark(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spark-submit beside this Python, which need not be on PATH."""
    connect("spark_default", "spark", "local[1]")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    beside = os.path.dirname(sys.executable)
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != beside]
    monkeypatch.setenv("PATH", os.pathsep.join(path))


def test_staged_rows_become_tables_partitioned_and_aggregated(run: Any, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text("id,shop,price\n4,b,8\n5,b,2\n")
    outputs = [
        {"path": str(tmp_path / "orders"), "partition_by": ["shop"]},
        {"path": str(tmp_path / "sums"), "sql": "SELECT shop, sum(CAST(price AS INT)) AS total FROM batch GROUP BY shop"},
    ]
    with DAG("with_spark", schedule=None) as dag:
        rows = [{"id": str(number), "shop": "a", "price": "1"} for number in range(1, 4)]
        stage = QewQewStageOperator(task_id="stage", queue_name="orders", records=[*rows, "not json"])
        csv = QewQewStageOperator(task_id="csv", queue_name="orders", path=str(tmp_path / "orders.csv"))
        wait = QewQewSensor(task_id="wait", queue_name="orders", min_records=6, timeout=300)
        submit = QewQewSparkSubmitOperator(
            task_id="submit", queue_name="orders", schema="id STRING, shop STRING, price STRING", outputs=outputs, conf=CONF
        )
        stage >> csv >> wait >> submit
    ran = run(dag)
    assert set(ran.states().values()) == {"success"}

    result = ran.result("submit")
    under = f"batch={result['batch_id']}"
    assert {name: result[name] for name in ("attempt", "records", "read", "good", "bad")} == {
        "attempt": 1,
        "records": 6,
        "read": 6,
        "good": 5,
        "bad": 1,
    }
    assert [(each["path"], each["written"]) for each in result["outputs"]] == [
        (str(tmp_path / "orders" / under), 5),
        (str(tmp_path / "sums" / under), 2),
    ]
    orders = ds.dataset(tmp_path / "orders" / under, partitioning="hive").to_table().to_pylist()
    assert sorted((row["id"], row["shop"]) for row in orders) == [("1", "a"), ("2", "a"), ("3", "a"), ("4", "b"), ("5", "b")]
    assert sorted(ds.dataset(tmp_path / "sums" / under).to_table().to_pydict()["total"]) == [3, 10]
    assert [row["value"] for row in ds.dataset(result["quarantine"]).to_table().to_pylist()] == [b"not json"]
    stats = inspect(directory / "orders")
    assert (stats.records, stats.leased, stats.returned) == (0, 0, 0)


def test_spark_has_a_link_to_its_ui_while_it_runs_and_the_name_of_dag_and_task(
    run: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.links.qewqew import SparkLink

    told: list[tuple[str, str]] = []
    monkeypatch.setattr(SparkLink, "tell", lambda self, ti, url: told.append((ti.task_id, url)))
    monkeypatch.setenv("SPARK_PUBLIC_DNS", "w1.example")
    job = tmp_path / "job.py"
    job.write_text(
        "import json, sys\nfrom pyspark.sql import SparkSession\ncontext = SparkSession.builder.getOrCreate().sparkContext\n"
        "json.dump({'name': context.appName, 'ui': context.uiWebUrl}, open(sys.argv[2], 'w'))\n"
    )
    with DAG("with_spark_ui", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=["x"]) >> QewQewSparkSubmitOperator(
            task_id="submit", queue_name="orders", application=str(job), application_args=["{manifest}", "{result}"]
        )
    result = run(dag).result("submit")
    assert result["name"] == "with_spark_ui.submit"
    assert told == [("submit", result["ui"])]


def test_a_job_that_fails_says_why_at_the_end_and_the_batch_is_returned(
    run: Any, directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with DAG("with_spark_failing", schedule=None) as dag:
        QewQewStageOperator(task_id="stage", queue_name="orders", records=["not json"]) >> QewQewSparkSubmitOperator(
            task_id="submit",
            queue_name="orders",
            schema="id INT",
            outputs=[{"path": str(tmp_path / "orders")}],
            max_bad_records=0,
            conf=CONF,
            execution_timeout=timedelta(minutes=20),  # a hang ends
        )
    assert run(dag).states() == {"stage": "success", "submit": "failed"}
    output = capfd.readouterr().out
    assert (
        "1 of 1 records do not decode (1 not a JSON object), max_bad_records is 0"
        in output.rpartition("SparkJobFailed: batch")[2]
    )
    assert not (tmp_path / "orders").exists()
    assert inspect(directory / "orders").returned == 1


@pytest.mark.soak  # a minute; tests/system/test_pipeline.py runs it in a whole Airflow
def test_the_example_makes_the_tables_that_the_csv_file_says(
    run: Any, directory: Path, tmp_path: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QEWQEW_DEMO_OUTPUT", str(tmp_path))
    connect("spark_default", "spark", "local[2]")
    bag = DagBag(str(EXAMPLES))
    assert not bag.import_errors
    ran = run(bag.dags["flights_to_parquet"])
    assert set(ran.states().values()) == {"success"}
    assert sum(ran.result("stage", month)["records"] for month in range(12)) == 336_776
    assert ran.result("to_parquet")["read"] == 336_776
    assert ran.result("check")["flights"] == 336_776
    assert len(ran.result("check")["delays"]) == 16


@pytest.mark.soak  # a minute; tests/system/test_pipeline.py runs it in a whole Airflow
def test_two_dags_consume_one_topic_each_with_a_reader_of_its_own(
    run: Any, directory: Path, tmp_path: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QEWQEW_DEMO_OUTPUT", str(tmp_path))
    connect("spark_default", "spark", "local[2]")
    bag = DagBag(str(EXAMPLES))
    assert not bag.import_errors
    staged = run(bag.dags["flights_topic"])
    assert sum(staged.result("stage", month)["records"] for month in range(3)) == 80_090

    jfk = run(bag.dags["flights_from_jfk"])
    assert set(jfk.states().values()) == {"success"}
    assert (jfk.result("wait")["records"], jfk.result("to_delays")["read"]) == (26_728, 26_728)
    assert sum(jfk.result("check").values()) == 26_728
    # What one has acknowledged waits for the other as before.
    topic = directory / "flights_topic"
    assert inspect_reader(topic, "jfk").records == 0
    assert inspect_reader(topic, "archive").records == 80_090

    archive = run(bag.dags["flights_archive"])
    assert set(archive.states().values()) == {"success"}
    assert (archive.result("to_parquet")["records"], archive.result("check")["flights"]) == (80_090, 80_090)
    assert inspect_reader(topic, "archive").records == 0


@pytest.mark.parametrize(
    ("name", "task", "result"),
    [
        ("livy_style", "wait", {"records": 1000, "total": 4500}),
        ("pyspark_task", "to_parquet", {"shop 0": 334, "shop 1": 333, "shop 2": 333}),
    ],
)
def test_a_batch_is_handed_to_other_engines_and_acknowledged(
    run: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, task: str, result: Any
) -> None:
    monkeypatch.setenv("QEWQEW_DEMO_OUTPUT", str(tmp_path))
    dag = DagBag(str(EXAMPLES / f"{name}.py")).dags[name]
    ran = run(dag)
    assert ran.states() == {**dict.fromkeys(dag.task_dict, "success"), "nack": "skipped"}
    assert ran.result(task) == result
    assert ran.result("ack")["state"] == "acked"
    assert inspect(directory / name).leased == 0


@pytest.mark.soak  # a minute; the test of two hosts writes into Iceberg too
def test_what_was_staged_goes_into_iceberg_by_the_hour(
    run: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged twice, drained twice, and once with nothing to do; a cleared run adds nothing."""
    monkeypatch.setenv("QEWQEW_DEMO_OUTPUT", str(tmp_path))
    dags = DagBag(str(EXAMPLES / "hourly_to_iceberg.py")).dags
    by_the_hour = dags["orders_by_the_hour"]

    def rows() -> list[int]:
        lake = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
        table = load_catalog("lake", **lake).load_table("shop.orders")
        assert [str(field.transform) for field in table.spec().fields] == ["day"]
        return sorted(table.scan().to_arrow()["id"].to_pylist())

    for times in 1, 2:
        assert run(dags["orders"]).states() == {"stage": "success"}
        ran = run(by_the_hour)
        assert ran.states() == {"to_iceberg": "success"}
        assert rows() == sorted([*range(1000)] * times)
    result = ran.result("to_iceberg")
    assert run(by_the_hour).states() == {"to_iceberg": "skipped"}
    again = run.again(by_the_hour, ran)
    assert again.result("to_iceberg")["outputs"][0]["snapshot"] == result["outputs"][0]["snapshot"]
    assert rows() == sorted([*range(1000)] * 2)
    assert inspect(directory / "orders").records == 0


def test_what_two_hosts_publish_is_drained_into_one_table(
    run: Any, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host twice, with a drain in between; a cleared publisher publishes nothing."""
    monkeypatch.setenv("QEWQEW_DEMO_OUTPUT", str(tmp_path))
    hosts = "w1", "w2"
    for host in hosts:
        (tmp_path / host).mkdir()
        connect(f"qewqew_{host}", "qewqew", str(tmp_path / host))
    dags = DagBag(str(EXAMPLES / "drain.py")).dags
    assert sorted(dags) == ["drain", "publish_w1", "publish_w2"]
    prefix = str(tmp_path / "published" / "orders")

    def rows() -> Counter[tuple[int, str]]:
        lake = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
        found = load_catalog("lake", **lake).load_table("shop.orders").scan().to_arrow()
        return Counter(zip(found["id"].to_pylist(), found["host"].to_pylist(), strict=True))

    for times in 1, 2:
        published = [run(dags[f"publish_{host}"]).result("publish") for host in hosts]
        assert complete(prefix) == sorted(os.path.basename(batch["url"]) for batch in published)
        ran = run(dags["drain"])
        assert ran.states() == {"drain": "success"}
        result = ran.result("drain")
        assert (len(result["batches"]), result["good"], result["damaged"]) == (2, 2000, {})
        assert complete(prefix) == []
        assert rows() == Counter({(number, host): times for host in hosts for number in range(1000)})
    again = run.again(dags["publish_w1"])
    assert again.result("publish")["url"] == published[0]["url"]
    assert complete(prefix) == []
    assert [inspect(tmp_path / host / "orders").records for host in hosts] == [0, 0]
