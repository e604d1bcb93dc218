"""The DAGs of docs/tutorial.md do what it says, in this process; test_tutorial_on_event.py has the queue start the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from airflow_version import DagBag
from tutorial import FILES

from qewqew_core import inspect


def test_the_dags_of_the_tutorial_stage_and_write(
    run: Any, directory: Path, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect("spark_default", "spark", "local[1]")
    monkeypatch.setenv("TUTORIAL", str(tmp_path))
    dags = {}
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
        dags |= DagBag(str(tmp_path / name)).dags
    assert set(run(dags["readings"]).states().values()) == {"success"}
    assert inspect(directory / "readings").records == 1200
    assert set(run(dags["readings_to_parquet"]).states().values()) == {"success"}
    assert inspect(directory / "readings").records == 0
    written = ds.dataset(tmp_path / "lake" / "readings", partitioning="hive").to_table()
    assert written.num_rows == 1200
    assert len(set(written["station"].to_pylist())) == 20
