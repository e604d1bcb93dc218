"""A real Airflow on SQLite, in this process, with a home of its own; and a spark-submit to look at."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from asking import Login
from holding import Held

from qewqew_core.tools import marker

# Airflow reads its configuration when it is imported: a home of its own first, never the user's.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "False")
os.environ.setdefault("AIRFLOW__API_AUTH__JWT_SECRET", secrets.token_hex(32))  # 3.2 wants it for tasks in the process too

EXAMPLES = Path(__file__).resolve().parents[3] / "dags_examples"

Connect = Callable[..., None]


@pytest.fixture(scope="session", autouse=True)
def airflow_db() -> None:
    from airflow.utils.db import initdb

    initdb()
    keep_api_server()


def keep_api_server() -> None:
    """Airflow 3.1 and 3.2 make the API that a task speaks to anew for each task, which takes seconds, and do not wait until it is
    ready; 3.3 keeps it, and waits. To be called in each process that runs tasks.
    """
    from airflow.sdk.execution_time import supervisor

    make = supervisor.in_process_api_server

    @functools.cache
    def made() -> Any:
        server = make()
        assert server.transport  # this starts it
        deadline = time.monotonic() + 300
        while not hasattr(server.app.state, "svcs_registry"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return server

    supervisor.in_process_api_server = made


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Define a connection by its fields, as an environment variable does. A directory that is there gets its marker."""

    def define(conn_id: str, conn_type: str, host: str | None, **extra: Any) -> None:
        if host and Path(host).is_relative_to(tmp_path) and os.path.isdir(host):
            marker.init(host)
        fields = {"conn_type": conn_type, "host": host, "extra": extra}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))

    return define


@pytest.fixture
def directory(tmp_path: Path, connect: Connect) -> Path:
    """The directory of the connection qewqew_default."""
    path = tmp_path / "queues"
    path.mkdir()
    connect("qewqew_default", "qewqew", str(path), retry_delay=0)  # no test waits for minutes
    return path


@pytest.fixture(params=["queue", "topic"])
def held(request: pytest.FixtureRequest, directory: Path) -> Held:
    return Held(request.param, directory)


@pytest.fixture(scope="module")
def application() -> Iterator[Any]:
    from airflow.api_fastapi.app import create_app, purge_cached_app

    yield create_app()
    purge_cached_app()


@pytest.fixture
def client(application: Any, directory: Path) -> Iterator[Login]:
    """``client(role, *teams)`` asks as a user with this role, or (None) as nobody; ``directory`` is that of its connection."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi.testclient import TestClient

    with ExitStack() as stack:

        def login(role: str | None, *teams: str) -> TestClient:
            one = TestClient(application, raise_server_exceptions=False)
            stack.callback(one.close)
            if role is not None:
                user = SimpleAuthManagerUser(username=role, role=role, **({"teams": list(teams)} if teams else {}))
                one.cookies.set("_token", get_auth_manager().generate_jwt(user))
            return one

        yield login


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request looks at the directories anew."""
    from qewqew_airflow.page import contents

    monkeypatch.setattr(contents, "FRESH", -1.0)


class Runner:
    """Runs a DAG that a test made, with the tasks in this process."""

    def __call__(self, dag: Any) -> Run:
        """A new run of the DAG."""
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow_version import DagBag, sync_bag_to_db

        # dag.test() runs only what is registered, and in this order: see its message "not serialized".
        DagBundlesManager().sync_bundles_to_db()
        bag = DagBag(os.devnull, collect_dags=False)
        dag.fileloc, dag.relative_fileloc = __file__, Path(__file__).name
        bag.bag_dag(dag)
        sync_bag_to_db(bag, "dags-folder", None)
        return Run(dag.test())

    def again(self, dag: Any, earlier: Run | None = None) -> Run:
        """An earlier run (the DAG's last) again, all its tasks cleared. dag.test() itself would replace it by a new one."""
        from airflow.models.dagrun import DagRun
        from airflow.settings import Session

        session = Session()
        found = DagRun.find(dag_id=dag.dag_id, run_id=earlier and earlier.run_id, session=session)[-1]
        for ti in found.get_task_instances(session=session):
            if ti.state == "running":  # its process is gone, and no scheduler is here to notice
                ti.state = "up_for_retry"
        session.commit()

        def existing(*, dag: Any, session: Any, **_: Any) -> Any:
            dag_run = session.get(DagRun, found.id)
            dag_run.state, dag_run.dag = "running", dag
            session.commit()
            return dag_run

        with mock.patch("airflow.models.dagrun.get_or_create_dagrun", existing):
            return Run(dag.test(logical_date=found.logical_date))


class Run:
    """What became of a DAG run."""

    def __init__(self, dag_run: Any) -> None:
        self.run_id = dag_run.run_id
        self._instances = {(ti.task_id, ti.map_index): ti for ti in dag_run.get_task_instances()}

    def states(self) -> dict[str, str]:
        """By task, or by ``task[map_index]``."""
        return {task if index < 0 else f"{task}[{index}]": str(ti.state) for (task, index), ti in self._instances.items()}

    def tries(self, task: str) -> int:
        return self._instances[task, -1].try_number

    def result(self, task: str, map_index: int = -1) -> Any:
        """What the task returned."""
        return self._instances[task, map_index].xcom_pull(task_ids=task, map_indexes=map_index)


@pytest.fixture
def run() -> Runner:
    return Runner()


class FakeSpark:
    """A spark-submit on PATH that reads the batch it is given and does what the test says; see fake_spark_submit.py."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def next(self, *actions: str) -> None:
        (self.home / "next").write_text("\n".join(actions))

    def go(self) -> None:
        """The job that waits may end."""
        (self.home / "go").touch()

    @property
    def calls(self) -> list[dict[str, Any]]:
        file = self.home / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect: Connect) -> FakeSpark:
    home = tmp_path / "spark"
    home.mkdir()
    program = home / "spark-submit"
    command = shlex.join([sys.executable, str(Path(__file__).parent / "fake_spark_submit.py")])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SPARK", str(home))
    connect("spark_default", "spark", "local[1]")
    fake = FakeSpark(home)
    fake.next()
    return fake
