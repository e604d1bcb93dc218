"""An Airflow whose parts can be killed, and how a test finds the process that it wants to kill.

Nothing here waits for a fixed time: `until` waits for a condition, and fails with what it waited for.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.dataset as ds

from demo.local_airflow import BIN, LocalAirflow, Run
from qewqew_core import BatchExpired, Queue, QueueStats, inspect
from qewqew_core.formats.chunk import OUR_FIRST as FIRST

T = TypeVar("T")

# So that Airflow notices within seconds what it notices within minutes by default.
FAST = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "10",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "12",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "2",
    "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "2",
}

WRAPPER = """\
#!/bin/sh
# Before spark-submit: waits as long as the test keeps the gate closed.
touch '{gates}/submit.reached'
while [ -e '{gates}/submit.closed' ]; do sleep 0.05; done
exec '{real}' "$@"
"""


def until(condition: Callable[[], T | None], what: str, timeout: float = 300, every: float = 0.05) -> T:
    """What the condition returns once it is true; fails, saying what was awaited, after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for: {what}"
        time.sleep(every)
    return value


def stopped_in_commit(path: Path, task: int) -> bool:
    """Stops the process once its commit to this new queue has its third chunk. False, and it goes on, if it had committed."""
    until(Path(f"{path}.{FIRST + 2}").exists, "the third chunk of the commit", every=0.0002)
    with suppress(ProcessLookupError):
        os.kill(task, signal.SIGSTOP)
    if inspect(path).records == 0:
        return True
    with suppress(ProcessLookupError):
        os.kill(task, signal.SIGCONT)
    return False


def locked(path: Path) -> bool:
    """Whether any process has the queue open. Which one, only root is told: Airflow's tasks hide their open files."""
    try:
        inode = f":{path.stat().st_ino}"
    except FileNotFoundError:  # it is empty
        return False
    return any(lock.split()[5].endswith(inode) for lock in Path("/proc/locks").read_text().splitlines() if "OFDLCK" in lock)


# ------------------------------------------------------------------------------------------------------ processes


def stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if there is none."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1])
    return None


def alive(pid: int) -> bool:
    found = stat(pid)
    return found is not None and found[0] not in "ZX"


def parent(pid: int) -> int:
    found = stat(pid)
    assert found is not None, f"no process {pid}"
    return found[1]


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on, parents first."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if found := stat(int(name)):
            children.setdefault(found[1], []).append(int(name))
    todo, done = [pid], []
    while todo:
        found_here = children.get(todo.pop(0), [])
        done += found_here
        todo += found_here
    return [each for each in done if alive(each)]


def java_of(task: int) -> int | None:
    """Spark's JVM below a task, not the launcher that spark-submit runs first."""
    for pid in descendants(task):
        with suppress(OSError):
            is_java = os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "java"
            if is_java and "SparkSubmit" in command(pid) and "launcher.Main" not in command(pid):
                return pid
    return None


def python_driver_of(java: int) -> int | None:
    return next((pid for pid in descendants(java) if parent(pid) == java and "batch.py" in command(pid)), None)


def kill(*pids: int) -> None:
    """SIGKILL, and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        until(lambda pid=pid: not alive(pid), f"the end of process {pid}", every=0.005)


def gone(pids: list[int], within: float = 60) -> None:
    """Waits until none of these is alive."""
    until(lambda: not any(map(alive, pids)), f"the end of {[(pid, command(pid)) for pid in pids]}", within)


class Gate:
    """A point at which a task waits as long as the gate is closed. See the DAG of test_kills.py, and `WRAPPER`."""

    def __init__(self, gates: Path, name: str) -> None:
        self._closed, self._reached = gates / f"{name}.closed", gates / f"{name}.reached"

    def close(self) -> None:
        self._reached.unlink(missing_ok=True)
        self._closed.touch()

    def reached(self) -> None:
        """Waits until somebody stands before it."""
        until(self._reached.exists, f"a task at {self._reached.name}")

    def open(self) -> None:
        self._closed.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- Airflow


class KillableAirflow(LocalAirflow):
    """Adds what the API tells of processes, a spark-submit with a gate, and components that start again."""

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str]) -> None:
        super().__init__(home, dags, {**FAST, **env})
        self.gates = home / "gates"
        self._settings: dict[str, str] = {}

    def start(self) -> None:
        self.gates.mkdir(parents=True)
        wrapper = self.gates / "bin" / "spark-submit"
        wrapper.parent.mkdir()
        wrapper.write_text(WRAPPER.format(gates=self.gates, real=BIN / "spark-submit"))
        wrapper.chmod(0o700)
        super().start()

    def _environment(self) -> dict[str, str]:
        settings = super()._environment()
        settings["PATH"] = os.pathsep.join([str(self.gates / "bin"), settings["PATH"]])
        settings["QEWQEW_TEST_GATES"] = str(self.gates)
        self._settings = settings
        return settings

    def gate(self, name: str) -> Gate:
        return Gate(self.gates, name)

    def kill(self, component: str) -> None:
        """The component alone: its children live on, as they do when a machine is short of memory."""
        process = self._components[component]
        process.kill()
        process.wait()

    def start_again(self, component: str) -> None:
        self._components[component] = self._popen(component, self.components[component], self._settings)

    def instance(self, run: Run, task_id: str, map_index: int = -1) -> dict[str, Any]:
        """The task instance as the API has it; {} if there is none yet."""
        found = self._call("GET", f"{run.path}/taskInstances?limit=100")["task_instances"]
        return next((each for each in found if (each["task_id"], each["map_index"]) == (task_id, map_index)), {})

    def running(self, run: Run, task_id: str, map_index: int = -1, tries: int = 1, timeout: float = 300) -> int:
        """Waits until this try runs; returns the process in which the operator is executed."""

        def look() -> int | None:
            found = self.instance(run, task_id, map_index)
            state = self.state(run)
            assert state not in ("success", "failed"), f"the run ended: {state}\n{self.told(run, task_id, map_index)}"
            if found.get("state") == "running" and found["try_number"] >= tries and found["pid"] and alive(found["pid"]):
                return int(found["pid"])
            return None

        return until(look, f"try {tries} of {task_id} runs", timeout)

    def supervisor(self, task: int) -> int:
        """The process of Airflow that started this task, reports its heartbeat and its end."""
        found = parent(task)
        assert "LocalExecutor" in command(found), command(found)
        return found

    def succeeded(self, run: Run, timeout: float = 600) -> None:
        state = self.wait(run, timeout)
        assert state == "success", "\n".join(
            self.told(run, each.task_id, each.map_index) for each in self.task_instances(run) if each.state == "failed"
        )

    def told(self, run: Run, task_id: str, map_index: int = -1) -> str:
        """The logs of all tries of a task."""
        last = self.instance(run, task_id, map_index).get("try_number", 1)
        logs = [f"--- {task_id} [{map_index}] try {n}\n{self.task_log(run, task_id, n, map_index)}" for n in range(1, last + 1)]
        return "\n".join(logs)

    def tries(self, run: Run, task_id: str, map_index: int = -1) -> int:
        return int(self.instance(run, task_id, map_index)["try_number"])


# ------------------------------------------------------------------------------------------------------- outcomes


def counts(path: Path) -> tuple[int, int, int, int]:
    """Records in the queue; batches that are leased, returned, dead."""
    stats: QueueStats = inspect(path)
    return stats.records, stats.leased, stats.returned, stats.dead


def nothing_left(path: Path, batch_id: str) -> None:
    """The queue is empty, its one batch is acknowledged, and the next lease gets nothing."""
    assert counts(path) == (0, 0, 0, 0)
    assert [each.name for each in Path(f"{path}.batches").iterdir()] == [batch_id]
    chunks = [each.name for each in path.parent.iterdir() if each.name.removeprefix(path.name + ".").isdigit()]
    assert chunks == []
    assert not Path(f"{path}.lease").exists()
    with Queue(path, lock_timeout=1) as queue:
        with suppress(BatchExpired):
            assert queue.batch(batch_id).state == "acked"
        assert queue.batches() == queue.dead() == []
        assert queue.lease("whoever") is None


def rows(path: Path, *columns: str) -> Counter[tuple[Any, ...]]:
    """The rows below a path, and how often each is there."""
    table: pa.Table = ds.dataset(path, format="parquet", partitioning="hive").to_table(columns=list(columns))
    return Counter(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
