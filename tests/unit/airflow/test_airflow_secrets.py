"""Secrets are on no command line, and leave no task: in all forms, at all places."""

from __future__ import annotations

import json
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Asset
from airflow.sdk.log import mask_secret
from secret_forms import IN_TEXT, NAMES, NO_SECRETS, SECRET

from qewqew_airflow.assets.qewqew import write_counts
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.notifications.qewqew import QewQewNotifier, event_of
from qewqew_airflow.operators import spark_job
from qewqew_airflow.operators.spark_operator import TEXTS
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.sensors.qewqew import QewQewSensor
from qewqew_airflow.shared.lineage import of_queue, written_output, written_queue
from qewqew_airflow.shared.masking import masked
from qewqew_core import BadArgument, BadPath, StoreError
from qewqew_spark.jobs.batch import arguments

FORMS = [*((name, SECRET) for name in NAMES), *(("anything", text) for text in IN_TEXT), ("password", 424242)]


def operator(**more: Any) -> QewQewSparkSubmitOperator:
    return QewQewSparkSubmitOperator(task_id="submit", queue_name="orders", **more)


def line_of(submit: QewQewSparkSubmitOperator) -> list[str]:
    return submit._get_hook()._build_spark_submit_command("job.py")


PLACES: dict[str, Any] = {
    "an option of an output": lambda name, value: {"outputs": [{"path": "/o", "options": {name: value}}]},
    "a property of a table": lambda name, value: {
        "outputs": [{"table": "lake.db.t", "format": "iceberg", "options": {name: value}}],
        "quarantine": "/q",
    },
    "a read option": lambda name, value: {"outputs": [{"path": "/o"}], "read_options": {name: value}},
    "Spark's conf": lambda name, value: {"outputs": [{"path": "/o"}], "conf": {name: value}},
    "conf of another application": lambda name, value: {"application": "mine.py", "conf": {name: value}},
    "an argument": lambda name, value: {"application": "mine.py", "application_args": ["{manifest}", f"--{name}={value}"]},
    "two arguments": lambda name, value: {"application": "mine.py", "application_args": ["{manifest}", f"--{name}", value]},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(place: str) -> None:
    for name, value in FORMS:
        with pytest.raises(BadArgument, match="in clear text") as caught:
            operator(**PLACES[place](name, value))
        assert str(value) not in str(caught.value), name
    for name, value in NO_SECRETS:
        if name not in ("path", "query") and not (place == "a read option" and not isinstance(value, str)):
            operator(**PLACES[place](name, value))


@pytest.mark.parametrize("reference", [{"env": "X"}, {"file": "/run/secrets/x"}])
def test_a_reference_is_on_it_instead(reference: dict[str, str], connect: Any) -> None:
    connect("spark_default", "spark", "local[1]")
    options = dict.fromkeys(NAMES, reference)
    submit = operator(outputs=[{"path": "/o", "options": options}], read_options=options, conf=options)
    submit.conf = spark_job.conf_of(submit.conf)
    command = line_of(submit)
    assert command.count(f"{NAMES[0]}={json.dumps(reference)}") == 1
    found = vars(arguments(spark_job.job_arguments("/b", submit.outputs or (), None, **submit._job_arguments())))
    assert found["outputs"][0].options == options
    assert found["read_options"] == dict.fromkeys(NAMES, json.dumps(reference))


@pytest.mark.parametrize("name", TEXTS)
def test_no_other_argument_of_spark_submit_has_a_secret(name: str) -> None:
    for text in IN_TEXT:
        submit = operator(outputs=[{"path": "/o"}])
        setattr(submit, name if hasattr(submit, name) else f"_{name}", text)
        with pytest.raises(BadArgument, match=f"submit: '{name}' has a password or another secret in clear text") as caught:
            submit._check_job()
        assert SECRET not in str(caught.value)


def test_a_master_has_no_secret(connect: Any) -> None:
    connect("spark_default", "spark", f"spark://u:{SECRET}@h:7077")
    with pytest.raises(BadArgument, match=r"connection 'spark_default': 'host' has a password .* masters take none") as caught:
        operator(outputs=[{"path": "/o"}])._check_worker()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("master", "refused"), [("yarn", True), ("local[1]", False)])
def test_the_environment_of_a_job_is_refused_where_airflow_puts_it_on_the_command_line(
    connect: Any, master: str, refused: bool
) -> None:
    connect("spark_default", "spark", master)
    for name, value in ("DB_PASSWORD", SECRET), ("DB_URL", IN_TEXT[0]):
        submit = operator(outputs=[{"path": "/o"}], env_vars={name: value})
        if refused:
            with pytest.raises(BadArgument, match=r"env_vars: .* in clear text.* environment of the worker") as caught:
                submit._check_worker()
            assert SECRET not in str(caught.value)
        else:
            submit._check_worker()
            assert SECRET not in " ".join(line_of(submit))
    if not refused:  # Airflow has been told what it is
        assert masked(f"the server said {SECRET}") == "the server said ***"


URLS = [
    f"https://u:{SECRET}@h/q",
    f"https://{SECRET}@h/q",
    f"https://h/q?token={SECRET}",
    f"s3://K:{SECRET}@b/q",
    f"sftp://h?sig={SECRET}",
]


@pytest.mark.parametrize("url", URLS)
def test_a_secret_of_a_url_is_in_no_error_of_a_task(url: str, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A user gives a URL where a directory, a name or a file belongs."""
    ti = SimpleNamespace(dag_id="d", run_id="r", state="failed", task_id="t", map_index=-1, try_number=1, max_tries=0)
    context: Any = {"ti": ti, "run_id": "r"}
    for host, name in ((url, "orders"), (f"/{url}", "orders"), ("/tmp", url)):
        connect("qewqew_default", "qewqew", host)
        hook = QewQewHook()
        tries = [
            lambda hook=hook, name=name: hook.path(name),
            lambda name=name: QewQewStageOperator(task_id="t", queue_name=name, records=[1]).execute(context),
            lambda name=name: QewQewSensor(task_id="t", queue_name=name).execute(context),
            lambda name=name: QewQewNotifier(queue_name=name).notify(context),
        ]
        for each in tries:
            with pytest.raises((BadPath, AirflowFailException)) as caught:
                each()
            assert SECRET not in f"{caught.value} {caught.value.__cause__} {caplog.text}"
        assert SECRET not in hook.test_connection()[1]
    with pytest.raises(BadArgument, match="which says no format") as unknown:
        QewQewStageOperator(task_id="t", queue_name="orders", path=url)
    assert SECRET not in str(unknown.value)


@pytest.mark.parametrize("path", [f"memory://u:{SECRET}@h/x", f"unknown://h/q?token={SECRET}"])
def test_a_secret_of_a_url_is_in_no_error_of_who_reads_it(path: str) -> None:
    operator = QewQewStageOperator(task_id="t", queue_name="orders", path=path, format="csv")
    with pytest.raises((StoreError, ValueError)) as caught:
        [*operator._read_files()]
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_setting_of_another_application_is_no_reference() -> None:
    for reference in {"env": "X"}, '{"file": "/run/secrets/x"}':
        with pytest.raises(BadArgument, match=r"conf: 'spark.x' says where its value is, .* properties_file"):
            operator(application="mine.py", conf={"spark.x": reference})
    operator(application="mine.py", conf={"spark.x": "1"}, application_args=["{manifest}", "tokens=5", "--max-tokens", "512"])


@pytest.mark.parametrize(
    "words", [["-u", f"me:{SECRET}"], ["--user", f"me:{SECRET}"], ["--pin", "1234"], [f"password: {SECRET}"]]
)
def test_a_login_is_no_argument_of_an_application(words: list[str]) -> None:
    with pytest.raises(BadArgument, match="in clear text") as caught:
        operator(application="mine.py", application_args=["{manifest}", *words])
    assert SECRET not in str(caught.value)


def test_what_leaves_a_task_has_no_secret() -> None:
    mask_secret("knowntoairflow")
    for text in *IN_TEXT, "knowntoairflow", "x knowntoairflow x":
        ti = SimpleNamespace(dag_id="d", run_id="r", state="failed", task_id="t", map_index=-1, try_number=1)
        asset = Asset("qewqew://c/q")
        event = SimpleNamespace(extra={})
        events = type("Events", (), {"__getitem__": lambda self, asset, event=event: event})()  # Airflow 3.1 cannot hash an asset
        write_counts({"outlet_events": events}, [asset], {"snapshots": {"t": text}, "read": 1})  # type: ignore[typeddict-item]
        told = [
            event_of({"ti": ti, "exception": ValueError(text)}),  # type: ignore[typeddict-item]
            event_of({"ti": ti, "exception": text}),  # type: ignore[typeddict-item]
            event.extra,
            masked({"note": [text, {"deep": (text, 1)}]}),
            of_queue("c", text),
            written_queue("c", text, 1),
            written_output({"path": text}, "spark_default"),
            written_output({"table": text}, "spark_default"),
            spark_job.last_error(f"qewqew: error: {text}") if "known" not in text else "",
        ]
        assert "known" not in str(told)
        assert SECRET not in str(told), text
    named = {"password": SECRET, "a": {"token": [SECRET, 7], "pin": 1234}, "user": "me"}
    assert masked(named) == {"password": "…", "a": {"token": ["…", "…"], "pin": "…"}, "user": "me"}
    assert masked({"read": 1, "key": "dag|run", "tokens": 5}) == {"read": 1, "key": "dag|run", "tokens": 5}


def test_what_the_ready_made_job_keeps_on_disk_is_for_its_user_alone(connect: Any) -> None:
    connect("spark_default", "spark", "local[1]")
    assert operator(outputs=[{"path": "/o"}])._get_hook().submit.keywords["umask"] == 0o077  # type: ignore[attr-defined]
    assert "umask" not in operator(application="mine.py")._get_hook().submit.keywords  # type: ignore[attr-defined]
