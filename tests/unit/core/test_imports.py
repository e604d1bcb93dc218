"""What the packages import is what pyproject.toml declares, extra by extra."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from qewqew_core import Queue

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"qewqew_core", "qewqew_spark", "qewqew_airflow"}
IMPORTED_AS = {"apache-airflow": "airflow", "zlib-ng": "zlib_ng"}  # the providers are all below airflow
COMES_WITH = {"airflow": {"fastapi", "jinja2", "pydantic", "sqlalchemy", "starlette"}, "pyspark": {"py4j"}}


def declared(*extras: str) -> set[str]:
    """The modules of the dependencies, and of these extras."""
    found: set[str] = set()
    for line in PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]:
        name = re.match(r"[\w-]+", line)[0]  # type: ignore[index]
        if not name.startswith("apache-airflow-providers"):
            found.add(IMPORTED_AS.get(name, name))
    return (found | {module for name in found for module in COMES_WITH.get(name, ())}) - {"qewqew"}


def imported(*files: Path) -> set[str]:
    """The modules of others that are imported anywhere in these files."""
    names: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names} - OURS - set(sys.stdlib_module_names)


def test_the_core_imports_what_it_declares_and_nothing_else() -> None:
    files = set((ROOT / "qewqew_core").rglob("*.py"))
    command_line = {file for file in files if file.parent.name == "cli"}
    assert imported(*files - command_line) == declared() | declared("fsspec", "files")  # these only if they are used
    assert imported(*command_line) - declared() == declared("cli") - declared()


def test_the_other_packages_import_what_their_extras_declare() -> None:
    for package, extras in (
        ("qewqew_spark", ("spark", "avro", "msgpack", "iceberg", "delta")),
        ("qewqew_airflow", ("spark", "airflow")),
    ):
        assert imported(*(ROOT / package).rglob("*.py")) <= declared(*extras), package


def test_to_read_a_batch_needs_no_package_of_others(tmp_path: Path) -> None:
    with Queue(tmp_path / "queue") as queue:
        queue.put(b"one")
        batch = queue.lease("run")
        assert batch is not None
    code = f"""
import sys
sys.modules |= dict.fromkeys(["portalocker", "pendulum", "zlib_ng", "fsspec"])  # cannot be imported
from qewqew_core.batch import manifest, segments
body = manifest.load({batch.manifest_path!r})
print(*segments.read_records({str(Path(batch.manifest_path).parent)!r}, body, body.segments[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[b'one']\n"


def test_to_stage_imports_nothing_of_topics_and_repairs(tmp_path: Path) -> None:
    code = f"""
import sys
import qewqew_core
with qewqew_core.Stage({str(tmp_path / "queue")!r}) as stage:
    stage.put(b"one")
    stage.commit("key")
print(*[name for name in sys.modules if name.startswith(("qewqew_core.topic", "qewqew_core.queue.repair"))])
for name in qewqew_core.__all__:
    assert name in dir(qewqew_core) and getattr(qewqew_core, name).__name__ == name, name
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "\n"


def test_a_queue_and_a_topic_are_the_same_with_and_without_zlib_ng(tmp_path: Path) -> None:
    """As bytes: what one has written, with its checksums, the other reads, verifies, and goes on with."""
    code = """
import sys, zlib
without, path, record = sys.argv[1:]
if without == "without":
    sys.modules["zlib_ng"] = None  # cannot be imported
from qewqew_core import Queue, Topic
from qewqew_core.crc import crc32
assert (crc32 is zlib.crc32) == (without == "without")
with Queue(path) as queue, Topic(path + ".topic") as topic:
    for store in (queue, topic):
        assert store.verify().ok
    queue.put_many([record.encode() * 100] * 1000)
    topic.append_many([record.encode() * 100] * 1000)
    print(len(queue), *sorted({bytes(each[:1]).decode() for each in queue}))
"""
    for how, shown in (("without", "1000 a"), ("with", "2000 a b"), ("without", "3000 a b c")):
        command = [sys.executable, "-c", code, how, str(tmp_path / "queue"), shown[-1]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.stdout == f"{shown}\n", done.stderr
