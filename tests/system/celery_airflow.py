"""An Airflow with CeleryExecutor, Redis, PostgreSQL, and two workers that are hosts of their own as far as Airflow knows.

Redis and PostgreSQL listen on sockets in a directory of their own, so nobody else can meet them. A worker, and all that
it starts, has the name of its host in its environment, and Airflow asks it by ``hostname_callable``. What a second
host has and this has not is a disk of its own: both workers see the same directories.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from killing import KillableAirflow, until

from qewqew_airflow.local import COMPONENTS, AirflowFailed, Run, private

HOST = "QEWQEW_TEST_HOST"
HOSTNAME = f"""\
import os


def name():
    return os.environ.get("{HOST}", "main")
"""
INITDB = shutil.which("initdb") or max(glob.glob("/usr/lib/postgresql/*/bin/initdb"), default=None)  # Debian has it off PATH
MISSING = [name for name, found in (("redis-server", shutil.which("redis-server")), ("PostgreSQL", INITDB)) if not found]


def worker(name: str) -> list[str]:
    """Of Celery's queues it serves the common one and its own lane, which has the name of the host."""
    return ["celery", "worker", "-H", name, "-q", f"default,{name}", "-c", "2", "--skip-serve-logs", "--without-mingle"]


class CeleryAirflow(KillableAirflow):
    hosts = ("w1", "w2")
    components: ClassVar[Mapping[str, Sequence[str]]] = {
        **{name: COMPONENTS[name] for name in ("api-server", "scheduler", "dag-processor")},
        **{name: worker(name) for name in hosts},
    }

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str]) -> None:
        # Not below `home`: PostgreSQL refuses root, and its own user may not enter there; and the path of a socket must be short.
        self._services = Path(tempfile.mkdtemp(prefix="qewqew-", dir="/tmp"))
        self._servers: list[subprocess.Popen[bytes]] = []
        database = f"postgresql+psycopg2://airflow@/postgres?host={self._services}"
        celery = {
            "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "this_host.name",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": "",  # only the triggerer needs asyncpg
            "AIRFLOW__CELERY__BROKER_URL": f"redis+socket://{self._services}/redis",
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{database}",
            "AIRFLOW__CELERY__OPERATION_TIMEOUT": "10",  # seconds to hand a task to Redis
        }
        super().__init__(home, dags, {**celery, **env})

    # -- Redis and PostgreSQL

    def start(self) -> None:
        self.logs.mkdir(parents=True)
        config = self.home / "config"  # from where Airflow imports modules
        config.mkdir()
        (config / "this_host.py").write_text(HOSTNAME)
        assert INITDB is not None
        data = str(self._services / "data")
        if os.getuid() == 0:
            shutil.chown(self._services, "postgres", "postgres")
        if self._serve("initdb", INITDB, "-D", data, "-U", "airflow", "-A", "trust", "-E", "UTF8", "--no-sync").wait():
            raise AirflowFailed(f"initdb failed:\n{self._tail('initdb')}")
        postgres = os.path.join(os.path.dirname(os.path.realpath(INITDB)), "postgres")
        redis = ("redis-server", "--port", "0", "--unixsocket", str(self._services / "redis"), "--save", "")
        self._servers = [
            self._serve("postgresql", postgres, "-D", data, "-F", "-c", "listen_addresses=", "-k", str(self._services)),
            self._serve("redis", *redis),
        ]
        for socket in (".s.PGSQL.5432", "redis"):
            until((self._services / socket).exists, f"{self._services / socket}; the logs are in {self.logs}", 30)
        super().start()

    def _serve(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        user = "postgres" if os.getuid() == 0 else None
        with open(self.logs / f"{name}.log", "ab", opener=private) as log:
            return subprocess.Popen(
                command, cwd=self._services, user=user, group=user, umask=0o077, start_new_session=True, stdout=log, stderr=log
            )

    def stop(self, grace: float = 3) -> None:
        try:
            super().stop(grace)
        finally:
            for server in self._servers:
                server.send_signal(signal.SIGINT)  # to PostgreSQL: wait for no client
            for server in self._servers:
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    server.kill()
                    raise
            shutil.rmtree(self._services)

    # -- hosts

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
