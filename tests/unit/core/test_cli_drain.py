"""`qewqew drain` starts the job as the options say, passes on what it says, and ends as it does. Spark is a stand-in here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import done, refused, run

OUTPUT = '{"table": "lake.shop.orders", "format": "iceberg"}'
RESULT = {"batches": ["a-1", "b-2"], "read": 1200, "good": 1200, "bad": 0, "removed": 2, "left": 0, "damaged": {}}
PROGRAM = """#!{python}
import json, os, sys
with open({home!r} + "/called", "w") as file:
    json.dump([sys.argv[1:], os.environ["PYSPARK_PYTHON"]], file)
with open({home!r} + "/output") as file:
    print(file.read(), flush=True)
sys.exit({status})
"""


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A spark-submit and a java that say and end as a test wants."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("JAVA_HOME", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "java").touch(mode=0o755)

    def says(*lines: str, status: int = 0) -> None:
        (tmp_path / "output").write_text("\n".join(lines))
        program = tmp_path / "spark-submit"
        program.write_text(PROGRAM.format(python=sys.executable, home=str(tmp_path), status=status))
        program.chmod(0o755)

    says("WARN NativeCodeLoader", f"qewqew result: {json.dumps(RESULT)}")
    return says


def called(tmp_path: Path) -> list[str]:
    words, python = json.loads((tmp_path / "called").read_text())
    assert python == sys.executable
    return [str(word) for word in words]


def test_the_options_are_those_of_the_job_and_of_spark(spark: Callable[..., None], tmp_path: Path) -> None:
    options = ["--schema", "id BIGINT", "--quarantine", "/q", "--max-bad-records", 7, "--codec", "json", "--rescued", "more"]
    options += ["--read-option", "fs.endpoint_url=http://store", "--read-option", "mode=FAILFAST", "--schema-evolution", "fail"]
    confs = ["--conf", "spark.a=1", "--conf", 'spark.b.password={"env": "B"}']
    assert done("drain", "s3://lake/batches", "--output", OUTPUT, *options, *confs, "--", "--master", "local[2]") == (
        b"2 batches with 1,200 records committed\n"
    )
    words = called(tmp_path)
    job = next(number for number, word in enumerate(words) if word.endswith("drain.py"))
    assert os.path.isfile(words[job])
    assert words[:job] == [*map(str, confs), "--master", "local[2]"]
    assert words[job + 1] == "s3://lake/batches"
    from qewqew_spark.jobs.batch import arguments

    found = vars(arguments(words[job + 1 :], "drain"))
    assert (found["schema"], found["quarantine"], found["max_bad_records"], found["rescued"]) == ("id BIGINT", "/q", 7, "more")
    assert (found["codec"], found["schema_evolution"]) == ("json", "fail")
    assert found["read_options"] == {"fs.endpoint_url": "http://store", "mode": "FAILFAST"}
    assert found["outputs"][0].table == "lake.shop.orders"


def test_the_result_is_for_people_or_for_programs(spark: Callable[..., None]) -> None:
    assert json.loads(done("drain", "/batches", "--output", OUTPUT, "--json")) == RESULT
    spark(f"qewqew result: {json.dumps({**RESULT, 'batches': ['a'], 'read': 1, 'left': 2000})}")
    assert done("drain", "/batches", "--output", OUTPUT) == b"1 batch with 1 record committed; 2,000 wait for the next drain\n"
    spark("application_1 is FINISHED")  # as in cluster mode
    result = run("drain", "/batches", "--output", OUTPUT)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "qewqew: done; the driver has the result\n")


def test_damaged_batches_are_named_and_the_exit_code_is_3(spark: Callable[..., None]) -> None:
    named = "qewqew: the batch b-2 is damaged and left out: /batches/b-2/orders.1: the checksum is wrong"
    error = "qewqew: error: 1 damaged batch(es) stay where they are, all others are committed: b-2"
    found = {**RESULT, "damaged": {"b-2": "the checksum is wrong"}}
    spark("WARN x", named, f"qewqew result: {json.dumps(found)}", error, status=3)
    result = refused(3, "drain", "/batches", "--output", OUTPUT, "--json", match=named)
    assert result.stderr.splitlines() == [named, error]
    assert json.loads(result.stdout) == found


@pytest.mark.parametrize(("status", "code"), [(2, 2), (1, 1), (137, 1)])
def test_what_the_job_says_is_passed_on_and_what_spark_says_only_if_that_is_all(
    spark: Callable[..., None], status: int, code: int
) -> None:
    spark("WARN x", "qewqew: error: BadArgument: the codec 'csv' needs a schema", status=status)
    result = refused(code, "drain", "/batches", "--output", OUTPUT, match="error: BadArgument: the codec 'csv' needs a schema")
    assert "WARN" not in result.stderr
    told = "qewqew: the batch b-2 is damaged and left out"
    spark(told, *(f"line {number}" for number in range(100)), "Exception: master password=hushhush", status=status)
    result = refused(code, "drain", "/batches", "--output", OUTPUT, match=f"spark-submit failed, with exit status {status}")
    assert "line 99" in result.stderr
    assert "line 1\n" not in result.stderr
    assert "hushhush" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["s3://user:hushhush@lake/batches"], "the s3 URL contains a password"),
        (["/batches", "--conf", "spark.hadoop.fs.s3a.secret.key=hushhush"], "in clear text"),
        (["/batches", "--", "--conf", "spark.hadoop.fs.s3a.secret.key=hushhush"], "in clear text"),
        (["/batches", "--conf", "spark.a"], "--conf must be NAME=VALUE"),
        (["/batches", "/more"], "unexpected argument"),
        (["/batches", "--max-bad-records", "-1"], "--max-bad-records"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_spark_starts(
    spark: Callable[..., None], tmp_path: Path, arguments: list[str], match: str
) -> None:
    result = refused(2, "drain", "--output", OUTPUT, *arguments, match=match)
    assert "hushhush" not in result.stderr + result.stdout
    assert not (tmp_path / "called").exists()


def test_without_spark_or_java_it_says_what_to_install(
    spark: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "java").unlink()
    refused(1, "drain", "/batches", "--output", OUTPUT, match="JavaNotFound: spark-submit needs Java; install Java 17 or newer")
    (tmp_path / "spark-submit").unlink()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    refused(1, "drain", "/batches", "--output", OUTPUT, match="SparkSubmitNotFound: 'spark-submit' is neither on PATH nor beside")
