"""The files in docker/: what can be said of them without an engine; then all of it, built and run, and two workers killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker_engine import ROOT, STAND_IN, Docker, docker_compose, docker_engine, provide, why_no_engine
from killing import FAST, KillableAirflow, nothing_left, until

from demo import flights
from demo.local_airflow import Run, free_ports

DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BUILT = "qewqew:local"
BASE = re.findall(r"^FROM (\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
ONCE = {"init"}  # ends, and the others wait for that
SECRET = re.compile("PASSWORD|SECRET|KEY|AUTH|SQL_ALCHEMY_CONN|BROKER_URL|RESULT_BACKEND")


def secrets(directory: Path) -> dict[str, str]:
    """What a copy of docker/secrets writes there."""
    shutil.copy(DOCKER / "secrets", directory)
    subprocess.run([directory / "secrets"], check=True)
    return dict(line.split("=", 1) for line in (directory / ".env").read_text().splitlines())


# -------------------------------------------------------------------------------------------------- without an engine


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_watched_nobodys_root_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["image"] == BUILT or re.fullmatch(r"[a-z]+:\d+\.\d[\w.-]*", service["image"])
    assert service["user"].partition(":")[0] not in ("", "0", "root")
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "cap_add", "network_mode", "pid", "env_file"} & service.keys()
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if name in ONCE:
        assert service["restart"] == "no"
    else:
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"]


def test_all_that_is_kept_is_in_named_volumes() -> None:
    mounts = {mount for service in SERVICES.values() for mount in service.get("volumes", ())}
    named = {mount.partition(":")[0] for mount in mounts if re.match(r"\w+:/", mount)}
    assert named == COMPOSE["volumes"].keys() == {"postgres", "redis", "logs", "queues", "lake"}
    others = [mount for mount in mounts if not re.match(r"\w+:/", mount)]
    assert others
    assert all(mount.endswith(":ro") for mount in others)


def test_the_base_image_has_the_airflow_of_the_constraints() -> None:
    [version] = re.findall(r"^apache-airflow==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [base.split("-")[:2] for base in BASE] == [["apache/airflow:slim", version]]


def test_no_secret_is_in_a_file_but_the_one_that_is_made_with_random_values(tmp_path: Path) -> None:
    given = r"\$\{(\w+):\?run docker/secrets once\}"
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET.search(name) or re.fullmatch(rf"[\w+:/@]*{given}[\w@/]*", value), name
    for line in COMPOSE["configs"]["spark"]["content"].splitlines():
        assert "secret " not in line or re.fullmatch(rf"spark\.authenticate\.secret {given}", line) or line.startswith("#")
    needed = set(re.findall(given, (DOCKER / "compose.yaml").read_text()))
    made = []
    for directory in tmp_path / "one", tmp_path / "two":
        directory.mkdir()
        made.append(secrets(directory))
        assert (directory / ".env").stat().st_mode & 0o777 == 0o600
    one, two = made
    assert one.keys() == two.keys() == needed
    assert len({*one.values(), *two.values()}) == 2 * len(needed)
    assert all(re.fullmatch(r"[\w=-]{44,64}", value) for value in one.values())
    again = subprocess.run([tmp_path / "one" / "secrets"], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert f"{tmp_path / 'one' / '.env'} is there already" in again.stderr
    assert "docker compose down --volumes" in again.stderr
    assert (tmp_path / "one" / ".env").read_text() == "".join(f"{name}={value}\n" for name, value in one.items())
    if shutil.which("git"):
        ignored = subprocess.run(["git", "check-ignore", "-q", "docker/.env"], cwd=ROOT, check=False)
        assert ignored.returncode in (0, 128)  # 128: not a checkout


def test_compose_takes_the_file_and_says_what_it_lacks(tmp_path: Path) -> None:
    with docker_compose() as compose:
        if not compose:
            pytest.skip("there is no docker compose, and it cannot be had: that takes root, mmdebstrap, and Debian's packages")
        made = secrets(tmp_path)
        plain = {name: value for name, value in os.environ.items() if name not in made}
        command = [*compose, "--env-file", tmp_path / ".env", "--file", DOCKER / "compose.yaml", "config", "--quiet"]
        assert subprocess.run(command, env=plain, capture_output=True, text=True, check=False).stderr == ""
        (tmp_path / ".env").write_text("")
        lacking = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
        assert lacking.returncode
        assert "run docker/secrets once" in lacking.stderr


# ----------------------------------------------------------------------------------------------------- with an engine


class ComposeAirflow(KillableAirflow):
    """What docker/compose.yaml runs, under a name of its own; it is asked by Airflow's API, as every other Airflow here."""

    def __init__(self, docker: Docker, home: Path) -> None:
        super().__init__(home, ROOT / "dags_examples", {})
        self.docker = docker
        self.image = f"qewqew:test-{os.getpid()}"
        self.secrets = secrets(home)
        [self.port] = free_ports(1)
        # Airflow is to notice within seconds what it notices within minutes by default.
        other = {name: {"image": self.image} for name, service in SERVICES.items() if service["image"] == BUILT}
        for name in other:
            if "AIRFLOW__CORE__EXECUTOR" in SERVICES[name]["environment"]:
                other[name]["environment"] = FAST
        (home / "other.yaml").write_text(json.dumps({"services": other}))
        with (home / ".env").open("a") as env:
            env.write(f"AIRFLOW_PORT={self.port}\n")

    def compose(self, *words: str, timeout: float = 300) -> str:
        files = "--file", str(DOCKER / "compose.yaml"), "--file", str(self.home / "other.yaml")
        project = "--project-name", f"qewqew-test-{os.getpid()}", "--env-file", str(self.home / ".env")
        return self.docker("compose", *project, *files, *words, timeout=timeout)

    def password(self) -> str:
        return self.secrets["AIRFLOW_ADMIN_PASSWORD"]

    def containers(self) -> list[Mapping[str, Any]]:
        ids = self.compose("ps", "--all", "--quiet").split()
        return list(json.loads(self.docker("inspect", *ids)))

    def workers_that_run(self, run: Run, task_id: str) -> list[str]:
        """The containers in which tries of this task run now; Airflow knows them by the first part of their ids."""
        found = self._call("GET", f"{run.path}/taskInstances?limit=100")["task_instances"]
        assert self.state(run) != "failed", found
        return [
            each["hostname"] for each in found if (each["task_id"], each["state"]) == (task_id, "running") and each["hostname"]
        ]

    def kill_all_in(self, container: str) -> None:
        """All processes end by SIGKILL but the first, which no process in there can kill, and which ends as its child has ended.
        (After ``docker kill`` the engine would not start it again.)
        """
        before = json.loads(self.docker("inspect", container))[0]["RestartCount"]
        self.docker("exec", container, "sh", "-c", "kill -9 -1")
        until(lambda: json.loads(self.docker("inspect", container))[0]["RestartCount"] > before, f"{container} is started again")

    def files(self, path: str, to: Path) -> Path:
        """A copy of a directory of the workers."""
        self.compose("cp", f"worker:{path}", str(to))
        return to / Path(path).name


@pytest.fixture
def stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[ComposeAirflow]:
    if reason := why_no_engine():
        pytest.skip(reason)

    def tell(what: str) -> None:
        with capsys.disabled():
            print(f"\n{time.monotonic() - begun:4.0f} s: {what}", end="", flush=True)

    begun = time.monotonic()
    with docker_engine() as docker:
        tell("the engine runs")
        stand_ins = provide(docker, {*BASE, *(each["image"] for each in SERVICES.values())} - {BUILT})
        tell(f"no registry: stand-ins were made for {', '.join(stand_ins)}" if stand_ins else "the base images are there")
        airflow = ComposeAirflow(docker, tmp_path)
        try:
            airflow.compose("build", timeout=1800)
            tell("the image is built")
            airflow.compose("up", "--wait", "--wait-timeout", "600", timeout=700)
            tell("all services are healthy")
            yield airflow
            tell("done")
        finally:
            airflow.compose("down", "--volumes", "--timeout", "5", timeout=120)
            docker("image", "rm", "--force", airflow.image, *stand_ins, *([STAND_IN] if stand_ins else []))
    tell("nothing is left")


@pytest.mark.soak  # nine minutes
def test_each_flight_is_in_the_table_once_though_a_worker_is_killed_in_staging_and_one_in_spark(
    stack: ComposeAirflow, tmp_path: Path
) -> None:
    run = stack.trigger(flights.DAG_ID)
    staging = until(lambda: stack.workers_that_run(run, "stage"), "a worker stages")
    stack.kill_all_in(staging[0])

    def writing() -> str | None:
        for worker in stack.workers_that_run(run, "to_parquet"):
            if stack.docker("exec", worker, "find", "/lake", "-path", "*/flights/*/_temporary/*.parquet"):
                return worker
        return None

    stack.kill_all_in(until(writing, "Spark writes", 600))
    stack.succeeded(run, 900)
    assert stack.tries(run, "to_parquet") == 2
    batch = stack.xcom(run, "to_parquet")
    assert (batch["records"], batch["good"], batch["bad"], batch["attempt"]) == (336_776, 336_776, 0, 1)

    lake = stack.files("/lake", tmp_path)
    expected = flights.input_table()
    flights.compare_rows(expected, flights.parquet_table(lake / "flights", expected.column_names))
    flights.compare_delays(expected, flights.parquet_table(lake / "delays", ["carrier", "flights", "mean_dep_delay"]))
    nothing_left(stack.files("/var/lib/qewqew", tmp_path) / "flights", batch["batch_id"])
    for container in stack.containers():
        state = container["State"]
        assert (state["Status"], state["ExitCode"]) == ("exited", 0) if "Health" not in state else state["Status"] == "running"
