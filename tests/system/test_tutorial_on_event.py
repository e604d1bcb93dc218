"""docs/tutorial.md in a whole Airflow: the readings are staged, and the queue starts the run that writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from killing import until
from tutorial import FILES

from demo.local_airflow import LocalAirflow
from qewqew_core import inspect


@pytest.mark.soak  # a minute; test_tutorial.py runs the same DAGs, test_events.py such events
def test_the_queue_of_the_tutorial_starts_the_run(
    new_airflow: Callable[..., LocalAirflow], settings: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    for name in ("dags", "queues"):
        (tmp_path / name).mkdir()
    for name, code in FILES.items():
        (tmp_path / "dags" / name).write_text(code)
    env = settings(tmp_path / "queues", tmp_path, "local[2]")
    with new_airflow(tmp_path / "dags", **env, TUTORIAL=str(tmp_path)) as airflow:
        airflow.unpause("readings_to_parquet")
        run = airflow.trigger("readings")
        assert airflow.wait(run) == "success"
        lake = tmp_path / "lake" / "readings"
        until(lambda: list(lake.glob("**/_SUCCESS")), "the run that nobody has triggered has written", 120)
        until(lambda: inspect(tmp_path / "queues" / "readings").leased == 0, "its batch is acknowledged", 60)
        assert inspect(tmp_path / "queues" / "readings").records == 0
