"""What the Spark operator refuses, and how it judges a failure."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, AirflowSkipException
from airflow.sdk import ObjectStoragePath
from airflow_version import HAS_RETRY_POLICIES, needs_retry_policies

from qewqew_airflow.errors import LeaseLost, SparkJobFailed
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.operators.batch import LeasedBatch, is_last_try, lease
from qewqew_airflow.operators.spark_job import check_job, job_arguments, last_error, read_result, ui_of
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_airflow.shared.source import Source
from qewqew_core import BadArgument, BadPath, Batch, Queue, Topic
from qewqew_core.errors import JavaNotFound, SparkSubmitNotFound
from qewqew_core.tools import marker
from qewqew_core.tools.spark import check_java, find_spark_submit, ready_made_job
from qewqew_spark.jobs.batch import arguments
from qewqew_spark.jobs.output import Output

OUTPUTS = [{"path": "/nowhere"}]


def operator(**arguments: Any) -> QewQewSparkSubmitOperator:
    return QewQewSparkSubmitOperator(**{"task_id": "submit", "queue_name": "orders", **arguments})


# Arguments.


@pytest.mark.parametrize(
    "outputs",
    [
        [{"path": "/a"}],
        [{"path": "/a", "sql": "SELECT 1", "format": "delta", "partition_by": ["day"], "options": {"compression": "zstd"}}],
        [{"path": "/a"}, {"path": "/b"}],
        [
            {"path": "/a"},
            {"format": "jdbc", "options": {"url": "jdbc:x", "dbtable": "orders", "password": {"env": "DB_PASSWORD"}}},
            {"format": "jdbc", "options": {"url": "jdbc:x", "dbtable": "sums", "password": {"file": "/run/secrets/db"}}},
        ],
        [{"path": "/a", "transform": "shop.orders:clean"}, {"table": "lake.db.orders", "format": "iceberg"}],
        [
            {
                "path": "/a",
                "format": "delta",
                "keys": ["id"],
                "order_by": "ts",
                "operation": {"column": "op", "delete": ["D"]},
            },
        ],
    ],
)
def test_outputs_that_the_job_can_write(outputs: Any) -> None:
    check_job(outputs, max_bad_records=0)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "a list of at least one"),
        ([], "no output; give at least one"),
        ("/a", "a list of at least one"),
        ({"path": "/a"}, "a list of at least one"),
        (["/a"], "must be an object with fields"),
        ([{}], "needs a 'path'"),
        ([{"path": ""}], "'path' must be a path"),
        ([{"path": "/"}], "the root directory"),
        ([{"path": 1}], "'path' must be a path"),
        ([{"format": "CSV"}], "needs a 'path'"),
        ([{"path": "/a"}, {"path": "/a/"}], "two outputs"),
        ([{"path": "/a", "partitionBy": ["day"]}], "unknown field 'partitionBy'"),
        ([{"path": "/a", "partition_by": "day"}], "'partition_by' must be a list of column names"),
        ([{"path": "/a", "partition_by": [""]}], "list of column names"),
        ([{"path": "/a", "partition_by": [1]}], "list of column names"),
        ([{"path": "/a", "keys": ["id"]}], "'keys' is for the formats"),
        ([{"path": "/a", "format": "delta", "keys": ["id"], "operation": {"column": "op"}}], "'operation' must be like"),
        ([{"path": "/a", "options": ["x"]}], "'options' must be an object"),
        ([{"path": "/a", "options": {"x": object()}}], "the option 'x' must be a string, a number"),
        ([{"format": "jdbc", "options": {"url": "jdbc:x", "dbtable": "orders"}}], "so set quarantine to where records go"),
        ([{"format": "jdbc", "options": {"url": "x", "dbtable": "y", "password": "z"}}], "in clear text"),
    ],
)
def test_outputs_that_are_wrong_are_an_error_of_the_dag_file(outputs: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        operator(outputs=outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": OUTPUTS, "application_args": ["x"]}, "for an application of your own"),
        ({"application": "mine.py", "outputs": OUTPUTS}, "outputs is for the ready-made job"),
        ({"application": "mine.py", "schema": "id INT"}, "schema is for the ready-made job"),
        ({"application": "mine.py", "application_args": ["x", "{batch_id}"]}, "must hold {manifest}"),
        *[
            ({"outputs": OUTPUTS, name: value}, name)
            for name in ("max_records", "max_bytes")
            for value in (0, -1, 1.5, True, "x")
        ],
        ({"outputs": OUTPUTS, "max_bad_records": -1}, "max_bad_records"),
        ({"outputs": OUTPUTS, "codec": "xml"}, "codec must be one of json, csv"),
        ({"outputs": OUTPUTS, "codec": "avro"}, "the codec 'avro' needs a schema"),
        ({"outputs": OUTPUTS, "schema_evolution": "grow"}, "schema_evolution must be one of"),
        ({"outputs": OUTPUTS, "codec": "text", "rescued": "more"}, "takes no .rescued."),
        ({"outputs": OUTPUTS, "read_options": {"mode": "FAILFAST"}}, "the read option 'mode' is set by the job itself"),
        ({"application": "mine.py", "codec": "csv"}, "codec is for the ready-made job"),
        *[
            ({"outputs": OUTPUTS, "lease_timeout": value}, "lease_timeout")
            for value in (0, -1, 0.9, timedelta(0), True, float("nan"), float("inf"), "soon")
        ],
    ],
)
def test_arguments_that_contradict_each_other_are_an_error_of_the_dag_file(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        operator(**arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"queue_name": None}, "either queue_name or topic"),
        ({"topic": "events", "reader": "load"}, "either queue_name or topic"),
        ({"queue_name": None, "topic": "events"}, "needs the name of one of its readers"),
        ({"filter": "eu.#"}, "filter is for a topic"),
        ({"start": "latest"}, "start is for a topic"),
        ({"queue_name": None, "topic": "events", "reader": "load", "start": "newest"}, "start must be"),
    ],
)
def test_it_leases_from_a_queue_or_from_a_reader_of_a_topic(names: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        operator(outputs=OUTPUTS, **names)


def test_a_reader_is_made_at_the_oldest_message_or_where_the_operator_says_with_its_filter(directory: Path) -> None:
    with Topic(directory / "events") as topic:
        for number in range(4):
            topic.append(str(number).encode(), tag="odd" if number % 2 else "even")
    hook = QewQewHook()

    def leased(reader: str, max_records: int | None = None, **arguments: Any) -> list[bytes]:
        submit = operator(queue_name=None, topic="events", reader=reader, outputs=OUTPUTS, **arguments)
        return list(lease(hook, submit._source(), f"key {arguments} {max_records}", max_records, None, None).batch)

    assert leased("all") == [b"0", b"1", b"2", b"3"]
    with pytest.raises(AirflowSkipException, match="reader late of topic events is empty: there is nothing to lease"):
        leased("late", start="latest")
    assert leased("two", start=2, max_records=1) == [b"2"]
    assert leased("two", start=2) == [b"3"]
    assert leased("odd", filter="odd", max_records=1) == [b"1"]
    assert leased("odd") == [b"3"]  # the filter is the reader's


def test_a_task_that_fails_before_it_has_leased_makes_no_reader_to_return_a_batch_to(directory: Path) -> None:
    submit = operator(queue_name=None, topic="events", reader="load", outputs=OUTPUTS)
    context: Any = {"ti": SimpleNamespace(try_number=1, max_tries=0)}
    submit._after_failure(context, QewQewHook(), "key", AirflowException("no Java"))
    assert [path.name for path in directory.iterdir()] == [marker.NAME]
    submit.topic = "../events"
    with pytest.raises(BadPath, match="is not the name"):
        submit._source().path(QewQewHook())


def test_the_ready_made_job_is_found() -> None:
    for name in "batch.py", "drain.py":
        assert Path(ready_made_job(name)).name == name


# The worker.


def test_java_is_where_spark_submit_looks_for_it(tmp_path: Path) -> None:
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(mode=0o755)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-env.sh").touch()
    home, path = str(tmp_path / "home"), str(java.parent)
    check_java({"JAVA_HOME": home, "PATH": "/nowhere"})
    check_java({"PATH": path})
    check_java({"SPARK_HOME": str(tmp_path), "PATH": "/nowhere"})
    check_java({"SPARK_CONF_DIR": str(tmp_path / "conf"), "PATH": "/nowhere"})
    with pytest.raises(JavaNotFound, match="JAVA_HOME is /nowhere"):
        check_java({"JAVA_HOME": "/nowhere", "PATH": path})
    with pytest.raises(JavaNotFound, match="install Java"):
        check_java({"PATH": "/nowhere"})


def test_spark_submit_is_taken_from_path_else_from_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("path", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spark-submit").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert find_spark_submit("spark-submit", {"PATH": str(tmp_path / "path")}) == "spark-submit"
    assert find_spark_submit("spark-submit", {"PATH": "/nowhere"}) == str(tmp_path / "beside" / "spark-submit")
    with pytest.raises(SparkSubmitNotFound, match="'spark3-submit' is neither"):
        find_spark_submit("spark3-submit", {"PATH": "/nowhere"})


@pytest.mark.parametrize(("spark", "client"), [("4.3.0", "4.2.0"), (None, "4.2.0"), ("4.2.0", "4.2.0"), ("4.3.0", None)])
def test_pyspark_beside_another_version_of_its_client_is_refused(
    spark: str | None, client: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("pyspark", spark), ("pyspark_client", client)):
        if version:
            metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if spark:
        (tmp_path / "spark-submit").touch(mode=0o755)
    if spark == client or client is None:
        assert find_spark_submit("spark-submit", {"PATH": "/nowhere"}) == str(tmp_path / "spark-submit")
    else:
        with pytest.raises(SparkSubmitNotFound, match=r"pyspark==4\.2\.0"):
            find_spark_submit("spark-submit", {"PATH": "/nowhere"})


def test_a_driver_dies_with_the_process_that_started_it() -> None:
    program = (
        "import os, subprocess, sys, signal\n"
        "from functools import partial\n"
        "from qewqew_airflow.operators.spark_worker import end_with\n"
        "end = partial(end_with, os.getpid())\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=end, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(done.stdout.splitlines()[-1])}/cmdline")  # Airflow 3.2 logs to standard output, too
    for _ in range(600):
        try:
            if not child.read_bytes():  # dead, and waiting to be reaped
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.1)
    pytest.fail("the child lives on")


def test_a_try_waits_until_an_earlier_one_that_lives_on_has_ended(tmp_path: Path) -> None:
    """Two jobs on one batch would destroy each other's output: the lock is the kernel's, and ends with the process."""
    batch: Any = SimpleNamespace(id="b", manifest_path=str(tmp_path / "manifest.json"))
    hold = (
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    earlier = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE)
    assert earlier.stdout is not None
    earlier.stdout.readline()
    threading.Timer(0.5, earlier.kill).start()
    began = time.monotonic()
    with LeasedBatch(QewQewHook(), Source("orders"), batch, None, 0.0).alone(kill):
        assert time.monotonic() - began > 0.3
        assert earlier.wait() == -signal.SIGKILL


# The lease, while Spark runs.


def kill() -> None:
    pytest.fail("the lease is not lost")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["queue", "topic"])
def source(directory: Path, request: pytest.FixtureRequest) -> Source:
    if request.param == "queue":
        with Queue(directory / "orders") as queue:
            queue.put(b"a")
        return Source("orders")
    with Topic(directory / "orders") as topic:
        topic.append(b"a")
    return Source(topic="orders", reader="load")


def leased_for_three_seconds(source: Source) -> LeasedBatch:
    return lease(QewQewHook(), source, "key", None, None, 3.0)


def nobody_extends() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("lease of")]


def test_an_extension_that_fails_is_tried_again(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, tried = Batch.extend, list[float]()

    def fail_twice(self: Batch, lease_timeout: float) -> None:
        tried.append(lease_timeout)
        if len(tried) < 3:
            raise OSError("the disk is slow")
        extend(self, lease_timeout)

    monkeypatch.setattr(Batch, "extend", fail_twice)
    leased = leased_for_three_seconds(source)
    with leased.extended(kill):
        until(lambda: len(tried) == 3)
    with source.open(QewQewHook()) as queue:
        assert queue.batch(leased.batch.id).expires > leased.batch.expires
    assert tried == [3.0] * 3
    assert nobody_extends()


def test_a_lease_that_cannot_be_extended_until_it_is_over_is_lost(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = list[float]()
    end = time.monotonic() + 2.9  # before the lease, which takes its time on a busy machine
    leased = leased_for_three_seconds(source)

    def kill() -> None:
        kills.append(time.monotonic())
        if len(kills) == 1:
            raise OSError("no answer")

    monkeypatch.setattr(Batch, "extend", lambda self, lease_timeout: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(LeaseLost, match=r"not extended within 3 s: the disk is gone"), leased.extended(kill):  # noqa: PT012
        until(lambda: len(kills) == 2)  # until Spark is dead
        raise SparkJobFailed("killed")
    assert kills[0] > end
    assert nobody_extends()


def test_a_batch_that_an_earlier_try_acknowledges_meanwhile_is_not_lost(source: Source) -> None:
    leased = leased_for_three_seconds(source)
    with leased.extended(kill):
        with source.open(QewQewHook()) as queue:
            queue.batch(leased.batch.id).ack()
        until(nobody_extends)
    again = leased_for_three_seconds(source)
    with again.extended(kill):
        assert nobody_extends()


def test_a_try_that_waits_for_an_earlier_one_keeps_the_lease(source: Source) -> None:
    leased = leased_for_three_seconds(source)
    earlier = os.open(os.path.dirname(leased.batch.manifest_path), os.O_RDONLY)
    fcntl.flock(earlier, fcntl.LOCK_EX)

    def expires() -> Any:
        with source.open(QewQewHook()) as queue:
            return queue.batch(leased.batch.id).expires

    def end() -> None:
        try:
            until(lambda: expires() > leased.batch.expires)
        finally:
            os.close(earlier)

    thread = threading.Thread(target=end)
    thread.start()
    with leased.alone(kill):
        assert nobody_extends()
        assert expires() > leased.batch.expires
    thread.join()


def test_what_ends_the_job_ends_the_extension(source: Source) -> None:
    leased = leased_for_three_seconds(source)
    with pytest.raises(KeyboardInterrupt), leased.extended(kill):  # noqa: PT012
        assert not nobody_extends()
        raise KeyboardInterrupt
    assert nobody_extends()


# Failures.


def retry_policy() -> Any:
    from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

    rules = [RetryRule(exception=KeyError, action=RetryAction.FAIL), RetryRule(exception=OSError, action=RetryAction.RETRY)]
    return ExceptionRetryPolicy(rules=rules)


@pytest.mark.parametrize(
    ("try_number", "max_tries", "error", "last"),
    [
        (1, 0, AirflowException("x"), True),
        (1, 2, AirflowException("x"), False),
        (2, 2, AirflowException("x"), False),
        (3, 2, AirflowException("x"), True),
        (1, 2, AirflowFailException("x"), True),
        pytest.param(1, 2, KeyError("x"), True, marks=needs_retry_policies),  # the policy gives up
        (1, 2, ValueError("x"), False),
        (3, 2, OSError("x"), True),  # the policy says retry, there are none left
    ],
)
def test_the_last_failure_is_the_one_that_airflow_does_not_retry(
    try_number: int, max_tries: int, error: Exception, last: bool
) -> None:
    policy = {"retry_policy": retry_policy()} if HAS_RETRY_POLICIES else {}
    submit = operator(outputs=OUTPUTS, **policy)
    context: Any = {"ti": SimpleNamespace(try_number=try_number, max_tries=max_tries)}
    assert is_last_try(submit, context, error) is last


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "Cannot execute: spark-submit. Error code is: 1.\nLast spark-submit output:\nValueError: other\n"
            "qewqew: error: 3 of 5 records do not decode\nINFO done",
            "3 of 5 records do not decode",
        ),
        (
            "Cannot execute: spark-submit. Error code is: 1.\nTraceback (most recent call last):\nKeyError: x\nValueError: y\n.",
            "ValueError: y",
        ),
        ("Cannot execute\nException in thread\nCaused by: java.net.ConnectException: refused\n\tat x", "Caused by: java.net"),
        ("Cannot execute: spark-submit. Error code is: 137.\nINFO a", "Cannot execute: spark-submit. Error code is: 137."),
        ("", "no output"),
    ],
)
def test_the_cause_is_found_in_the_output_of_spark_submit(output: str, cause: str) -> None:
    assert last_error(output).startswith(cause)


def test_the_result_of_a_job_is_an_object_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read_result(str(path)) == {}
    path.write_text('{"read": 3}')
    assert read_result(str(path)) == {"read": 3}
    for content in ("", "[1]", "{"):
        path.write_text(content)
        with pytest.raises(SparkJobFailed, match="result"):
            read_result(str(path))


def test_all_that_is_said_of_the_job_is_on_its_command_line(connect: Any) -> None:
    connect("spark_default", "spark", "local[1]")
    said = {
        "codec": "json",
        "schema": "id INT",
        "read_options": {"sep": ";", "fs.endpoint_url": "http://minio:9000/?a=b"},
        "quarantine": "/quarantine",
        "max_bad_records": 0,
        "schema_evolution": "fail",
        "rescued": "_rescued",
    }
    submit = operator(outputs=[{"table": "db.orders", "transform": "a:b"}], **said)
    command = job_arguments("/batch/manifest.json", submit.outputs or (), None, **submit._job_arguments())
    parsed = vars(arguments(command))
    assert [parsed.pop(name) for name in ("batch", "outputs", "result")] == [
        "/batch/manifest.json",
        [Output(table="db.orders", transform="a:b")],
        None,
    ]
    assert parsed == said


@pytest.mark.parametrize(("mode", "here"), [("client", True), ("cluster", False)])
def test_in_cluster_mode_the_job_gets_nothing_of_this_worker_but_the_manifest(
    connect: Any, monkeypatch: pytest.MonkeyPatch, mode: str, here: bool
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    connect("spark_default", "spark", "spark://master:7077", **{"deploy-mode": mode})
    submit = operator(outputs=OUTPUTS)
    submit._check_worker()
    assert submit._driver_is_here is here
    assert ("PYSPARK_PYTHON" in (submit.env_vars or {})) is here
    assert "--result" not in job_arguments("/batch/manifest.json", OUTPUTS, None)
    assert job_arguments("/batch/manifest.json", OUTPUTS, "/tmp/result")[-2:] == ["--result", "/tmp/result"]


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("26/11/25 06:35:22 INFO Utils: Successfully started service 'SparkUI' on port 4041.", "http://w1:4041"),
        ("26/11/25 06:35:27 INFO SparkUI: Stopped Spark web UI at http://localhost:4040", None),
        ("\t tracking URL: https://rm:8090/proxy/application_1_2/", "https://rm:8090/proxy/application_1_2/"),
        ("INFO Utils: Successfully started service 'sparkDriver' on port 4040.", None),
        ("tracking URL: N/A", None),
        ("tracking URL: javascript:alert(1)", None),
    ],
)
def test_the_address_of_sparks_ui_is_found_in_its_output(line: str, url: str | None) -> None:
    assert ui_of(line, "w1") == url


def test_the_job_has_the_name_of_dag_and_task_unless_it_is_given_one() -> None:
    assert operator(outputs=OUTPUTS).name == "{{ ti.dag_id }}.{{ ti.task_id }}"
    assert operator(outputs=OUTPUTS, name="mine").name == "mine"
    assert operator(outputs=OUTPUTS, conf={"spark.app.name": "by conf"}).name == "by conf"


@pytest.mark.parametrize("name", ["max_records", "max_bytes", "lease_timeout", "max_bad_records"])
@pytest.mark.parametrize("value", ["{{ params.n }}", "{% if params.n %}1{% endif %}", "{# none #}1"])
def test_a_number_may_be_a_template(name: str, value: str) -> None:
    made = operator(outputs=OUTPUTS, **{name: value})
    assert getattr(made, name) == value
    assert name in made.template_fields


@pytest.mark.parametrize("name", ["max_records", "max_bytes", "lease_timeout", "max_bad_records"])
def test_a_number_is_checked_when_it_is_rendered(name: str) -> None:
    made = operator(outputs=OUTPUTS, **{name: "{{ params.n }}"})
    setattr(made, name, "many")  # as Airflow renders it
    with pytest.raises(BadArgument, match=f"{name} must be"):
        made._check_job()
    setattr(made, name, "7")
    made._check_job()
    assert getattr(made, name) == 7


def test_a_path_of_airflow_with_a_connection_is_refused() -> None:
    assert operator(outputs=[{"path": ObjectStoragePath("s3://lake/orders")}]).outputs == [{"path": "s3://lake/orders"}]
    with pytest.raises(BadArgument, match="Spark does not know"):
        operator(outputs=[{"path": ObjectStoragePath("s3://lake/orders", conn_id="aws")}])


@pytest.mark.parametrize(
    ("text", "start"), [("7", 7), ("2026-01-01T00:00:00+00:00", datetime(2026, 1, 1, tzinfo=UTC)), ("latest", "latest")]
)
def test_a_reader_begins_where_a_rendered_text_says(text: str, start: object) -> None:
    assert Source(topic="t", reader="r", start=text).start == start  # type: ignore[arg-type]
    assert Source(topic="t", reader="r", start="{{ params.at }}").start == "{{ params.at }}"  # type: ignore[arg-type]
    for wrong in ("soon", "2026-01-01T00:00:00", "-1"):
        with pytest.raises(BadArgument, match="start"):
            Source(topic="t", reader="r", start=wrong)  # type: ignore[arg-type]
