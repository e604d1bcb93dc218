"""`qewqew drain` with a real spark-submit, as cron runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from qewqew_core import Stage
from qewqew_core.batch import published


def drain(prefix: Path, table: Path, *more: str) -> subprocess.CompletedProcess[str]:
    output = json.dumps({"path": str(table), "format": "delta"})
    settings = ["--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=1"]
    command = [sys.executable, "-m", "qewqew_core", "drain", str(prefix), "--output", output, *settings, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def staged(prefix: Path, *numbers: int) -> None:
    for number in numbers:
        with Stage(f"file://{prefix}") as stage:
            stage.put(b'{"id": %d}' % number)
            stage.commit(f"run {number}")


def test_what_is_published_is_one_commit_and_damage_is_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    beside = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != beside))
    prefix, table = tmp_path / "batches", tmp_path / "lake"
    typed = "--schema", "id BIGINT"

    done = drain(prefix, table, *typed, "--", "--master", "local[1]")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 batches with 0 records committed\n", "")
    staged(prefix, 1, 2)
    damaged = published.complete(str(prefix))[0]
    (segment,) = (prefix / damaged).glob("*.1")
    segment.write_bytes(segment.read_bytes()[:-1] + b"!")
    done = drain(prefix, table, *typed, "--json", "--", "--master", "local[1]")
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout)
    assert (len(result["batches"]), result["read"], [*result["damaged"]]) == (1, 1, [damaged])
    assert f"qewqew: the batch {damaged} is damaged and left out: {segment}" in done.stderr
    assert all(line.startswith("qewqew: ") for line in done.stderr.splitlines())
    assert len(DeltaTable(table).to_pyarrow_table()) == 1
    assert published.complete(str(prefix)) == [damaged]

    done = drain(prefix, table, *typed, "--codec", "xml", "--", "--master", "local[1]")
    assert (done.returncode, done.stdout) == (2, "")
    assert "qewqew: error: BadArgument: " in done.stderr
