"""What Airflow sees of the provider, and what importing it costs."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pkgutil import resolve_name
from typing import Any

import jsonschema
import pytest
from airflow_version import ProvidersManagerTaskRuntime, needs_connection_fields

from qewqew_airflow.get_provider_info import get_provider_info
from qewqew_airflow.hooks.qewqew import EXTRA, TOPIC_SETTINGS, QewQewHook


def test_the_provider_info_satisfies_the_schema_of_airflow() -> None:
    schema = importlib.resources.files("airflow").joinpath("provider_info.schema.json").read_text()
    jsonschema.validate(get_provider_info(), json.loads(schema))


def test_airflow_finds_the_provider_and_its_connection_type() -> None:
    from airflow.providers_manager import ProvidersManager

    assert ProvidersManager().providers["qewqew"].data["name"] == "QewQew"
    hook = ProvidersManagerTaskRuntime().hooks["qewqew"]
    assert hook is not None
    assert (hook.hook_class_name, hook.hook_name) == ("qewqew_airflow.hooks.qewqew.QewQewHook", "QewQew")


@needs_connection_fields
def test_airflow_finds_what_the_form_of_the_connection_shows() -> None:
    from airflow.providers_manager import ProvidersManager

    assert ProvidersManager().field_behaviours["qewqew"]["relabeling"] == {"host": "Directory"}


def test_everything_that_is_listed_can_be_imported() -> None:
    info = get_provider_info()
    parts = "hooks", "operators", "sensors", "triggers"
    for module in (module for part in parts for entry in info[part] for module in entry["python-modules"]):
        assert __import__(module)
    [asset] = info["asset-uris"]
    names = [info["connection-types"][0]["hook-class-name"], info["task-decorators"][0]["class-name"]]
    for name in [*names, *info["queues"], *info["notifications"], *info["extra-links"], *list(asset.values())[1:]]:
        assert resolve_name(name)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["get", "qewqew", "--full"], "Durable local queues and topics"),
        (["hooks"], "qewqew_airflow.hooks.qewqew.QewQewHook"),
        pytest.param(["widgets"], "retention_bytes", marks=needs_connection_fields),
        pytest.param(["behaviours"], "qewqew", marks=needs_connection_fields),
        (["queues"], "qewqew_airflow.queues.qewqew.QewQewMessageQueueProvider"),
        (["triggers"], "qewqew_airflow.triggers.qewqew"),
        (["links"], "qewqew_airflow.links.qewqew.QewQewLink"),
        (["links"], "qewqew_airflow.links.qewqew.SparkLink"),
        (["notifications"], "qewqew_airflow.notifications.qewqew.QewQewNotifier"),
        (["configs"], "qewqew"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "lists",
)
def test_airflow_lists_what_the_provider_has(command: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    from airflow.cli.cli_parser import get_parser

    arguments = get_parser().parse_args(["providers", *command, "--output", "plain"])
    arguments.func(arguments)
    assert shown in capsys.readouterr().out


def test_airflow_knows_the_decorator_and_the_assets() -> None:
    runtime = ProvidersManagerTaskRuntime()
    assert "qewqew" in dict(runtime.taskflow_decorators)
    assert runtime.asset_uri_handlers["qewqew"].__module__ == "qewqew_airflow.assets.qewqew"


def test_the_form_of_the_connection_has_the_settings_that_the_hook_takes() -> None:
    [connection] = get_provider_info()["connection-types"]
    assert list(connection["conn-fields"]) == list(EXTRA)
    assert connection["conn-fields"]["topic"]["description"] == f"JSON: {', '.join(TOPIC_SETTINGS)}"
    assert connection["connection-type"] == QewQewHook.conn_type


def run_python(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # Airflow 3.2 logs to standard output


LIGHT = (
    "arguments",
    "assets.qewqew",
    "get_provider_info",
    "hooks.qewqew",
    "keys",
    "links.qewqew",
    "operators.leases",
    "operators.stage",
    "sensors.qewqew",
    "shared.metrics",
    "shared.records",
    "shared.source",
)
MODULES = ", ".join(f"qewqew_airflow.{name}" for name in LIGHT)


def test_importing_the_provider_imports_nothing_heavy_that_airflow_does_not() -> None:
    program = f"""
import json, sys
from airflow.sdk import DAG, BaseHook, BaseOperator, BaseSensorOperator, Connection, PokeReturnValue, XComArg
before = set(sys.modules)
import {MODULES}, qewqew_airflow.decorators.qewqew, qewqew_airflow.notifications.qewqew
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    light = {"airflow", "qewqew_airflow", "qewqew_core", "portalocker", "zlib_ng"}
    assert set(run_python(program)) <= {*light, *sys.stdlib_module_names}


def test_all_but_the_spark_operator_works_where_spark_is_not_installed() -> None:
    program = f"""
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "pyarrow") or name.startswith("airflow.providers.apache.spark.operators"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import {MODULES}
try:
    import qewqew_airflow.operators.spark_submit
except ModuleNotFoundError as error:
    print(json.dumps(str(error)))
"""
    assert "airflow.providers.apache.spark" in run_python(program)


def test_the_spark_operator_is_made_without_importing_pyspark() -> None:
    """Every DAG that has one is parsed again and again."""
    program = """
import json, sys
from qewqew_core.tools.spark import ready_made_job
from qewqew_airflow.operators.drain import QewQewDrainOperator
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
QewQewSparkSubmitOperator(task_id="submit", queue_name="orders", outputs=[{"path": "/nowhere"}])
QewQewDrainOperator(task_id="drain", prefix="s3://lake/orders", outputs=[{"path": "/nowhere", "format": "delta"}])
ready_made_job("batch.py")
print(json.dumps("pyspark" in sys.modules))
"""
    assert run_python(program) is False


@pytest.mark.parametrize("name", ["QewQewStageOperator", "QewQewSensor", "QewQewSparkSubmitOperator"])
def test_the_queue_of_celery_is_left_alone(name: str) -> None:
    """BaseOperator's ``queue`` says which worker runs the task, which matters for a queue on one worker's disk."""
    modules = {"QewQewStageOperator": "operators.stage", "QewQewSensor": "sensors.qewqew"}
    arguments = {"QewQewStageOperator": {"records": []}, "QewQewSparkSubmitOperator": {"outputs": [{"path": "/nowhere"}]}}
    operator = resolve_name(f"qewqew_airflow.{modules.get(name, 'operators.spark_submit')}.{name}")(
        task_id="t", queue_name="orders", queue="host-a", **arguments.get(name, {})
    )
    assert (operator.queue, operator.queue_name) == ("host-a", "orders")
