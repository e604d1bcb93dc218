"""The Python examples of docs/airflow/: Airflow takes each of them, and the one that opens a page runs."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from airflow_version import DagBag

from qewqew_core import Queue

PAGES = Path(__file__).parents[3] / "docs" / "airflow"
EXAMPLES = {
    f"{page.stem}-{number}": text
    for page in sorted(PAGES.glob("*.md"))
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
}
OPENING = [name for name in EXAMPLES if name.endswith("-0")]
# What the pages call yours, and what a fragment takes from the examples before it.
YOURS = """
from airflow.sdk import DAG, task
from qewqew_airflow.notifications.qewqew import QewQewNotifier
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor


def fetch_orders():
    return [{"id": number, "shop": "eu"} for number in range(3)]


def fetch_events():
    return [{"shop": "eu", "kind": "order"} for _ in range(3)]


def fetch_images():
    return [b"image"]


def pages(day):
    return [fetch_orders()]
"""


def dags_of(name: str, tmp_path: Path) -> list[Any]:
    """The DAGs of an example, in its order; asserts that Airflow imports it. A fragment is put into a DAG."""
    text = EXAMPLES[name].replace("100_000", "3").replace('"/data/', f'"{tmp_path}/')
    text = text.replace("/data/queues", str(tmp_path / "queues"))
    text = text.replace("retries=2", "retries=0").replace('"retries": 2', '"retries": 0')  # a failure waits for no retry
    if "with DAG(" not in text:
        text = 'with DAG("fragment", schedule=None):\n' + textwrap.indent(text, "    ")
    file = tmp_path / "example.py"
    file.write_text(f"{YOURS}\n{text}")
    bag = DagBag(str(file))
    assert bag.import_errors == {}
    assert bag.dags
    return [bag.dags[dag_id] for dag_id in sorted(bag.dags, key=lambda dag_id: text.index(f'DAG("{dag_id}"'))]


@pytest.mark.quick("Airflow takes the examples of docs/airflow")
@pytest.mark.parametrize("name", EXAMPLES)
def test_airflow_takes_each_example(name: str, tmp_path: Path) -> None:
    dags_of(name, tmp_path)


@pytest.mark.parametrize("name", OPENING)
def test_the_example_that_opens_a_page_runs(
    name: str, run: Any, directory: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES / f"{name.removesuffix('-0')}.md"
    for variable, value in re.findall(r"(AIRFLOW_CONN_\w+)='(.*)'", page.read_text()):
        monkeypatch.setenv(variable, value.replace("/var/lib/qewqew", str(directory)))
    monkeypatch.setattr("qewqew_airflow.hooks.qewqew.get_hostname", lambda: "w1")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{os.path.dirname(sys.executable)}")  # of `qewqew check`
    stages = re.search("QewQewStageOperator|hook.queue", EXAMPLES[name])
    with Queue(directory / "orders") as queue:
        queue.put_many([] if stages else [b'{"id": 1}'] * 3)
    for dag in dags_of(name, tmp_path):
        assert set(run(dag).states().values()) == {"success"}
    if "QewQewSparkSubmitOperator(" in EXAMPLES[name]:
        [job] = spark.calls
        assert len(job["records"]) == 3
