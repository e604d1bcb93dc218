"""What a release consists of: built, installed into an environment with nothing else, and used there."""

from __future__ import annotations

import email
import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from archive import unpack

ROOT = Path(__file__).parents[3]
PACKAGES = {"qewqew_core", "qewqew_spark", "qewqew_airflow", "pyspark_qewqew"}
OF_CHECKOUT = {"run", "demo", "dags_examples", "benchmarks", "docker", "tests", "docs", "constraints.txt"}  # in no wheel
USE = """
import importlib.metadata, sys, tempfile
from qewqew_core import Queue, Topic
with Queue(tempfile.mkdtemp() + "/orders.qew") as queue:
    queue.put_many([b"one", b"two"])
    batch = queue.lease("run 1")
    assert list(batch) == [b"one", b"two"]
    batch.ack()
with Topic(tempfile.mkdtemp() + "/events") as topic, topic.reader("billing") as reader:
    topic.append(b"three")
    assert reader.read().body == b"three"
    reader.commit()
print(*sorted(each.name.lower() for each in importlib.metadata.distributions()))
"""


def run(*command: str | Path, cwd: Path, joined: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if joined else subprocess.PIPE}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, check=False, **streams)


def done(*command: str | Path, cwd: Path, joined: bool = False) -> str:
    ended = run(*command, cwd=cwd, joined=joined)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from that alone."""
    place = tmp_path_factory.mktemp("built")
    done(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", place, cwd=ROOT)
    (sdist,) = place.glob("*.tar.gz")
    unpack(sdist, place)
    done(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=place / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = place.glob("*.whl")
    return sdist, wheel


def test_a_wheel_has_the_packages_and_their_types_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == PACKAGES
    demo = {path.name for path in (ROOT / "demo").glob("*.py")}
    assert demo
    assert not demo & {name.split("/")[-1] for name in names}  # nor within a package
    assert {f"{each}/py.typed" for each in ("qewqew_core", "qewqew_spark", "qewqew_airflow")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(built[0]) as archive:
        content = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert content >= PACKAGES | OF_CHECKOUT | {"README.md", "LICENSE", "pyproject.toml"}


def test_version_and_dependencies_of_the_core_come_from_one_place(built: tuple[Path, Path]) -> None:
    (name,) = (each for each in zipfile.ZipFile(built[1]).namelist() if each.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(built[1]).read(name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == project["version"]
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(each.split(">")[0] for each in needed) == ["pendulum", "portalocker", "zlib-ng"]


def test_the_core_works_with_its_dependencies_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    done(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-cache-dir", "--constraint")
    done(*pip, ROOT / "constraints.txt", built[1], cwd=tmp_path)
    installed = done(python, "-c", USE, cwd=tmp_path).split()  # three are those of pendulum
    hardware = {"zlib-ng"} if platform.machine() in ("x86_64", "aarch64") else set[str]()
    assert set(installed) - {"python-dateutil", "six", "tzdata"} == {"pendulum", "portalocker", "qewqew"} | hardware
    told = run(tmp_path / "venv" / "bin" / "qewqew", "--help", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.strip() == "qewqew: the command line needs typer, which is not installed: pip install 'qewqew[cli]'"

    # What README and the page of installing show, with the wheel alone.
    done(*pip, ROOT / "constraints.txt", f"{built[1]}[cli]", cwd=tmp_path)
    for page, lines in (("README.md", 5), ("docs/install.md", 2)):
        text = "".join(re.findall(r"^```console\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
        shown = re.findall(r"^\$ (?!pip )(.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
        assert len(shown) >= lines
        for command, expected in shown:
            put = done("sh", "-c", f"PATH={python.parent}:$PATH; {command}", cwd=tmp_path, joined=True)
            found = "".join(f"{line.rstrip()}\n" for line in put.splitlines())
            assert re.fullmatch(re.escape(expected).replace("…", ".*"), found), f"{command}\n{found}\nis not\n{expected}"


def test_an_index_of_packages_can_show_where_it_belongs(built: tuple[Path, Path]) -> None:
    (name,) = (each for each in zipfile.ZipFile(built[1]).namelist() if each.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(built[1]).read(name))
    assert "Framework :: Apache Airflow :: Provider" in metadata.get_all("Classifier", [])
    assert {"3.11", "3.14"} <= {each.rpartition(" ")[2] for each in metadata.get_all("Classifier", [])}
    assert metadata["Author"]
