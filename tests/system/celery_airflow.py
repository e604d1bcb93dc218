"""An Airflow with CeleryExecutor, Redis, PostgreSQL, and two workers that are hosts of their own as far as Airflow knows.

A worker, and all that it starts, has the name of its host in its environment, and Airflow asks it by ``hostname_callable``.
What a second host has and this has not is a disk of its own: both workers see the same directories.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import postgres_airflow
from postgres_airflow import PostgresAirflow

from demo.local_airflow import Run

HOST = "QEWQEW_TEST_HOST"
HOSTNAME = f"""\
import os


def name():
    return os.environ.get("{HOST}", "main")
"""
MISSING = [*postgres_airflow.MISSING, *([] if shutil.which("redis-server") else ["redis-server"])]


def worker(name: str) -> list[str]:
    """Of Celery's queues it serves the common one and its own lane, which has the name of the host."""
    return ["celery", "worker", "-H", name, "-q", f"default,{name}", "-c", "2", "--skip-serve-logs", "--without-mingle"]


class CeleryAirflow(PostgresAirflow):
    hosts = ("w1", "w2")
    components: ClassVar[Mapping[str, Sequence[str]]] = {
        **PostgresAirflow.components,
        **{name: worker(name) for name in hosts},
    }

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str]) -> None:
        super().__init__(home, dags, env)
        self._env |= {
            "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "this_host.name",
            "AIRFLOW__CELERY__BROKER_URL": f"redis+socket://{self.services}/redis",
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{self.database}",
            "AIRFLOW__CELERY__OPERATION_TIMEOUT": "10",  # seconds to hand a task to Redis
        }

    def start_services(self) -> None:
        config = self.home / "config"  # from where Airflow imports modules
        config.mkdir()
        (config / "this_host.py").write_text(HOSTNAME)
        super().start_services()
        socket = str(self.services / "redis")
        self.serve("redis", "redis", "redis-server", "--port", "0", "--unixsocket", socket, "--save", "")

    def _popen(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return super()._popen(name, command, {**env, HOST: name} if name in self.hosts else env)

    def host(self, run: Run, task_id: str) -> str:
        """On which host the last try of this task runs, or ran."""
        return str(self.instance(run, task_id)["hostname"])

    def on_host(self, name: str) -> list[int]:
        """Every process there: the worker, the tasks, and what these started."""
        mark = f"{HOST}={name}".encode()
        found = []
        for process in self.processes():
            with suppress(OSError):  # it ended
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process.pid)
        return found

    def kill_host(self, name: str) -> None:
        """Every process there ends by SIGKILL, and none is left to report it."""
        worker = self._components.pop(name)
        while found := self.on_host(name):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        worker.wait()
