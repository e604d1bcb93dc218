"""A batch is copied to an object store before its Spark job, and the copy is removed after the acknowledgement."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from holding import Held
from object_store import CREDENTIALS, object_store

SPARK_SUBMIT = """#!{python}
import json, os, sys
from qewqew_core.batch import manifest

path = next(argument for argument in sys.argv if argument.endswith("manifest.json"))
with open({home!r} + "/seen", "a") as file:
    file.write(json.dumps([path, manifest.load(path).records]) + "\\n")
try:
    os.remove({home!r} + "/fail")
except FileNotFoundError:
    sys.exit(0)
sys.exit("the executors are gone")
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with object_store() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="batches")
        yield boto3.resource("s3").Bucket("batches")


def test_the_job_reads_the_copy_which_stays_for_the_next_try_and_goes_with_the_acknowledgement(
    run: Any, held: Held, spark: Any, bucket: Any
) -> None:
    (spark.home / "spark-submit").write_text(SPARK_SUBMIT.format(python=sys.executable, home=str(spark.home)))
    (spark.home / "fail").touch()
    held.put("a", "b")
    dag = held.make("published", publish_to="s3://batches/{{ dag.dag_id }}")
    assert run(dag).states() == {"submit": "failed"}
    assert {os.path.basename(one.key) for one in bucket.objects.all()} > {"manifest.json"}
    assert held.counts()["returned"] == 1

    ran = run(dag)
    assert ran.states() == {"submit": "success"}
    seen = [json.loads(line) for line in (spark.home / "seen").read_text().splitlines()]
    assert seen == [[f"s3://batches/{dag.dag_id}/{ran.result('submit')['batch_id']}/manifest.json", 2]] * 2
    assert list(bucket.objects.all()) == []
    assert held.counts() == {"records": 0, "leased": 0, "returned": 0, "dead": 0}


def test_a_store_that_cannot_be_reached_fails_the_task_before_the_job_and_returns_the_batch(
    run: Any, held: Held, spark: Any, bucket: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    held.put("a")
    assert run(held.make("unpublished", publish_to="s3://nowhere/batches")).states() == {"submit": "failed"}
    assert "s3://nowhere/batches" in capfd.readouterr().out
    assert spark.calls == []
    assert held.counts()["returned"] == 1
