"""An Airflow on PostgreSQL, as production has it: SQLite has no row locks, by which two triggerers share their triggers, and
Airflow makes no backfill while others use it.

PostgreSQL, and what a subclass adds, listen on sockets in a directory of their own, so nobody else can meet them.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from killing import KillableAirflow, until

from demo.local_airflow import COMPONENTS, AirflowFailed, private

INITDB = shutil.which("initdb") or max(glob.glob("/usr/lib/postgresql/*/bin/initdb"), default=None)  # Debian has it off PATH
MISSING = [] if INITDB else ["PostgreSQL"]


class PostgresAirflow(KillableAirflow):
    components: ClassVar[Mapping[str, Sequence[str]]] = {
        name: COMPONENTS[name] for name in ("api-server", "scheduler", "dag-processor")
    }

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str]) -> None:
        super().__init__(home, dags, env)
        # Not below `home`: PostgreSQL refuses root, and its own user may not enter there; and the path of a socket must be short.
        self.services = Path(tempfile.mkdtemp(prefix="qewqew-", dir="/tmp"))
        self.database = f"postgresql+psycopg2://airflow@/postgres?host={self.services}"
        self._env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = self.database
        self._env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC"] = ""  # else it asks for asyncpg, which only multi_team uses
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.logs.mkdir(parents=True)
        self.start_services()
        super().start()

    def start_services(self) -> None:
        assert INITDB is not None
        data = str(self.services / "data")
        if os.getuid() == 0:
            shutil.chown(self.services, "postgres", "postgres")
        if self._run("initdb", INITDB, "-D", data, "-U", "airflow", "-A", "trust", "-E", "UTF8", "--no-sync").wait():
            raise AirflowFailed(f"initdb failed:\n{self._tail('initdb')}")
        postgres = os.path.join(os.path.dirname(os.path.realpath(INITDB)), "postgres")
        options = ("-D", data, "-F", "-c", "listen_addresses=", "-k", str(self.services))
        self.serve("postgresql", ".s.PGSQL.5432", postgres, *options)

    def serve(self, name: str, socket: str, *command: str) -> None:
        """Start a server, and wait for its socket."""
        self._servers.append(self._run(name, *command))
        until((self.services / socket).exists, f"{name} to listen; its log is in {self.logs}", 30)

    def _run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        user = "postgres" if os.getuid() == 0 else None
        with open(self.logs / f"{name}.log", "ab", opener=private) as log:
            return subprocess.Popen(
                command, cwd=self.services, user=user, group=user, umask=0o077, start_new_session=True, stdout=log, stderr=log
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
            shutil.rmtree(self.services)
