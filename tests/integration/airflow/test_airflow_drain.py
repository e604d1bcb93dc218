"""The drain in Airflow, with a real spark-submit: what is under a prefix becomes one commit, and damage rings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from deltalake import DeltaTable

from qewqew_airflow.operators.drain import QewQewDrainOperator
from qewqew_core import Stage
from qewqew_core.batch import published

CONF = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}


@pytest.fixture(autouse=True)
def local_spark(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spark-submit beside this Python, which need not be on PATH."""
    connect("spark_default", "spark", "local[1]")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    beside = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != beside))


def staged(prefix: Path, *numbers: int) -> None:
    for number in numbers:
        with Stage(f"file://{prefix}") as stage:
            stage.put(b'{"id": %d}' % number)
            stage.commit(f"run {number}")


def test_what_is_staged_is_one_commit_and_what_is_damaged_fails_the_task_after_it(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prefix, table = tmp_path / "orders", tmp_path / "lake"
    with DAG("drained_here", schedule=None, params={"prefix": str(prefix)}) as dag:
        QewQewDrainOperator(
            task_id="drain",
            prefix="{{ params.prefix }}",
            outputs=[{"path": str(table), "format": "delta"}],
            schema="id BIGINT",
            conf=CONF,
            outlets=[Asset("s3://lake/orders")],
            retries=3,
            retry_delay=0,  # seconds
        )

    def ids() -> list[int]:
        return sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist())

    staged(prefix, 1, 2, 3)
    ran = run(dag)
    assert ran.states() == {"drain": "success"}
    result = ran.result("drain")
    assert (len(result["batches"]), result["read"], result["removed"], result["damaged"]) == (3, 3, 3, {})
    assert (ids(), published.complete(str(prefix))) == ([1, 2, 3], [])

    staged(prefix, 4)
    (damaged,) = published.complete(str(prefix))
    (segment,) = (prefix / damaged).glob("*.1")
    segment.write_bytes(segment.read_bytes()[:-1] + b"!")
    staged(prefix, 5)
    capfd.readouterr()
    ran = run(dag)
    assert (ran.states(), ran.tries("drain")) == ({"drain": "failed"}, 1)
    told = capfd.readouterr().out
    assert f"The batch {damaged} is damaged and left out: {segment}, offset 10: the checksum" in told
    assert f"DamagedBatches: {prefix}: 1 damaged batch(es) stay where they are, all others are committed: {damaged}." in told
    result = ran.result("drain")
    assert (len(result["batches"]), result["read"], [*result["damaged"]]) == (1, 1, [damaged])
    assert (ids(), published.complete(str(prefix))) == ([1, 2, 3, 5], [damaged])


def test_what_the_job_refuses_is_not_tried_again(run: Any, tmp_path: Path) -> None:
    staged(tmp_path / "orders", 1)
    with DAG("drained_wrong", schedule=None) as dag:
        QewQewDrainOperator(
            task_id="drain",
            prefix=str(tmp_path / "orders"),
            outputs=[{"path": str(tmp_path / "lake"), "format": "delta", "partition_by": ["nowhere"]}],
            schema="id BIGINT",
            conf=CONF,
            retries=3,
            retry_delay=0,  # seconds
        )
    ran = run(dag)
    assert (ran.states(), ran.tries("drain")) == ({"drain": "failed"}, 1)
    assert len(published.complete(str(tmp_path / "orders"))) == 1
