"""A real Airflow for the system tests.

`airflow` is one for the whole session: starting it takes some ten seconds. Its DAGs folder holds ``dags_examples`` and
takes more: write a file into ``airflow.dags``, and ``airflow.trigger`` waits until it was read. Its connections are
``qewqew_default`` (`queues`) and ``spark_default`` (``local[*]``); the example DAG writes below `output`.
A test that kills components, or needs other settings, takes an Airflow of its own from `new_airflow`.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core.tools import marker

DAGS_EXAMPLES = Path(__file__).parents[2] / "dags_examples"


def pytest_configure() -> None:
    # A test run that is ended politely stops its Airflow as one that is interrupted does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the connection ``qewqew_default`` of `airflow`."""
    return tmp_path_factory.mktemp("queues")


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example DAG writes its tables in `airflow`."""
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="session")
def settings() -> Callable[[Path, Path, str], dict[str, str]]:
    """``settings(queues, output, master)`` is the environment of an Airflow with these directories and this Spark."""

    def make(queues: Path, output: Path, master: str) -> dict[str, str]:
        marker.init(str(queues))
        return {
            "AIRFLOW_CONN_QEWQEW_DEFAULT": json.dumps(
                {"conn_type": "qewqew", "host": str(queues), "extra": {"retry_delay": 0}}  # no test waits for minutes
            ),
            "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": master}),
            "QEWQEW_DEMO_OUTPUT": str(output),
        }

    return make


@pytest.fixture(scope="session")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, queues: Path, output: Path, settings: Callable[..., dict[str, str]]
) -> Iterator[LocalAirflow]:
    dags = tmp_path_factory.mktemp("dags")
    shutil.copytree(DAGS_EXAMPLES, dags, dirs_exist_ok=True)
    with LocalAirflow(tmp_path_factory.mktemp("airflow"), dags, settings(queues, output, "local[*]")) as running:
        yield running


@pytest.fixture
def new_airflow(tmp_path: Path) -> Iterator[Callable[..., LocalAirflow]]:
    """``new_airflow(dags, **env)`` is an Airflow that was not started yet; what it has running is stopped with the test."""
    with ExitStack() as stack:

        def make(dags: Path, **env: str) -> LocalAirflow:
            made = LocalAirflow(tmp_path / "airflow", dags, env)
            stack.callback(made.stop)
            return made

        yield make
