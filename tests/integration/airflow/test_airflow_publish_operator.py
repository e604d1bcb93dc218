"""`QewQewPublishOperator`: what waits on a host lies under a prefix, once, whatever is killed, cut off or tried again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from airflow.sdk import DAG, Asset, ObjectStoragePath
from holding import IMPORTS, Held
from object_store import CREDENTIALS, object_store

from qewqew_airflow.operators.batch import LeasedBatch
from qewqew_airflow.operators.publish import QewQewPublishOperator
from qewqew_core import BadArgument, Batch, Message
from qewqew_core.batch import manifest, published, segments
from qewqew_core.batch.store import store_of
from qewqew_core.tools import marker


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="lake")
        yield "s3://lake"


@pytest.fixture(params=["directory", "s3"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.getfixturevalue('bucket')}{tmp_path}" if request.param == "s3" else str(tmp_path / "published")


def make(held: Held, dag_id: str, prefix: str, **more: Any) -> DAG:
    with DAG(held.dag_id(dag_id), schedule=None) as dag:
        QewQewPublishOperator(**{"task_id": "publish", "prefix": prefix, "retry_delay": 0.0, **held.names, **more})
    return dag


class Table:
    """As the drain: a commit has the batches that the table does not have, and then they leave the prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.rows: list[bytes] = []
        self.ids: set[str] = set()

    def drain(self) -> None:
        for batch in published.complete(self.prefix):
            if batch not in self.ids:
                self.rows += read(published.place(self.prefix, batch))
                self.ids.add(batch)
            published.remove(self.prefix, [batch])


def read(path: str) -> list[bytes]:
    body, store = manifest.load(path), store_of(path)
    found = [one for segment in body.segments for some in segments.read_records(store, body, segment) for one in some]
    return [one.body if isinstance(one, Message) else one for one in found]


def ended(held: Held) -> tuple[int, int, int, int]:
    counts = held.counts()
    return counts["records"], counts["leased"], counts["returned"], counts["dead"]


def test_a_batch_is_published_and_acknowledged_and_a_cleared_task_only_repairs_what_is_there(
    run: Any, held: Held, prefix: str
) -> None:
    held.put("a", "b", "c")
    table = Table(prefix)
    dag = make(held, "publish", prefix, max_records=2, outlets=[Asset("s3://lake/orders")])
    ran = run(dag)
    result = ran.result("publish")
    (name,) = published.complete(prefix)
    assert result["url"] == f"{prefix}/{name}"
    assert name.startswith(f"{result['batch_id']}-")
    assert (result["records"], result["attempt"], ended(held)) == (2, 1, (1, 0, 0, 0))
    found = {name: value for name, value in result.items() if name != "oldest"}
    assert run.again(dag, ran).result("publish") == found

    store = store_of(result["url"])
    (segment,) = manifest.load(result["url"]).files()
    whole = store.read(segment)
    store.write(segment, [whole[:-1] + b"!"])
    run.again(dag, ran)
    assert store.read(segment) == whole
    table.drain()
    assert run.again(dag, ran).result("publish") == found
    assert published.complete(prefix) == []

    assert run(dag).states() == {"publish": "success"}
    assert run(dag).states() == {"publish": "skipped"}
    table.drain()
    assert table.rows == [b"a", b"b", b"c"]


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("drained", [False, True], ids=["there", "drained"])
def test_what_is_published_but_not_acknowledged_is_published_once(
    run: Any, held: Held, prefix: str, drained: bool, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try does it, or after the last one the next run."""
    held.put("a", "b")
    table, ack, failures = Table(prefix), Batch.ack, [RuntimeError("the disk is gone")]

    def fail_once(self: Batch) -> None:
        if failures:
            if drained:
                table.drain()
            raise failures.pop()
        ack(self)

    monkeypatch.setattr(Batch, "ack", fail_once)
    dag = make(held, f"unacknowledged_{retries}", prefix, retries=retries)
    assert run(dag).states() == {"publish": "success" if retries else "failed"}
    held.put("c")
    if not retries:
        assert ended(held) == (1, 0, 1, 0)
        assert run(dag).states() == {"publish": "success"}
    assert ended(held) == (1, 0, 0, 0)
    table.drain()
    assert (table.rows, len(table.ids), published.complete(prefix)) == ([b"a", b"b"], 1, [])


PROGRAM = """
import os, signal, sys
sys.path[:0] = {imports!r}
from conftest import Runner, keep_api_server
keep_api_server()
from holding import Held
from pathlib import Path
from test_airflow_publish_operator import make
from qewqew_core.batch.store import Local, Remote
left = [{step!r}]
def stop():
    if not left[0]:
        left[0] = -1
        os.kill(os.getpid(), signal.{signal})
def counted(write):
    def stopping(self, name, parts):
        stop()
        left[0] -= 1
        write(self, name, parts)
        stop()
    return stopping
for kind in Local, Remote:
    kind.write = counted(kind.write)
Runner()(make(Held({kind!r}, Path({directory!r})), {dag_id!r}, {prefix!r}, retries=1))
"""
STEPS = pytest.mark.parametrize("step", [0, 1, 2], ids=["before it writes", "before the manifest", "after the manifest"])


def started(held: Held, dag_id: str, prefix: str, step: int, signal: str) -> subprocess.Popen[bytes]:
    """A run of the DAG in a process that gets the signal when it has written so many files."""
    names = {"imports": [*IMPORTS, str(Path(__file__).parents[3])], "kind": held.kind, "directory": str(held.directory)}
    program = PROGRAM.format(**names, dag_id=dag_id, prefix=prefix, step=step, signal=signal)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@STEPS
@pytest.mark.parametrize(("held", "prefix"), [("queue", "s3")], indirect=True)
def test_a_worker_that_is_killed_while_it_publishes_is_followed_by_one_that_finishes(
    run: Any, held: Held, prefix: str, step: int
) -> None:
    held.put("a", "b")
    process = started(held, "killed", prefix, step, "SIGKILL")
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()[-2000:]
    assert ended(held) == (0, 1, 0, 0)
    assert len(published.complete(prefix)) == (step == 2)
    held.put("c")
    assert run.again(make(held, "killed", prefix, retries=1)).states() == {"publish": "success"}
    table = Table(prefix)
    table.drain()
    assert (table.rows, ended(held)) == ([b"a", b"b"], (1, 0, 0, 0))


@STEPS
@pytest.mark.parametrize(("held", "prefix"), [("queue", "directory")], indirect=True)
def test_a_try_waits_for_the_end_of_one_that_was_cut_off_and_goes_on(
    run: Any, held: Held, prefix: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node that the scheduler has lost."""
    held.put("a", "b")
    process = started(held, "cut_off", prefix, step, "SIGSTOP")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    extended, table = LeasedBatch.extended, Table(prefix)

    def waiting(self: LeasedBatch, kill: Any) -> Any:  # it is called first when another try has the batch
        process.send_signal(signal.SIGCONT)
        return extended(self, kill)

    monkeypatch.setattr(LeasedBatch, "extended", waiting)
    try:
        assert run.again(make(held, "cut_off", prefix, retries=1)).states() == {"publish": "success"}
    finally:
        process.send_signal(signal.SIGCONT)
        process.communicate()
    table.drain()
    table.drain()
    assert (table.rows, len(table.ids), published.complete(prefix), ended(held)) == ([b"a", b"b"], 1, [], (0, 0, 0, 0))


def test_what_another_disk_has_under_the_same_key_is_another_batch(run: Any, held: Held, prefix: str) -> None:
    """The disk is lost after the copy was made, and the run goes on with a new one."""
    held.put("a", "b")
    table = Table(prefix)
    dag = make(held, "new_disk", prefix)
    ran = run(dag)
    marked = held.directory / marker.NAME
    for path in held.directory.iterdir():
        if path != marked:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    held.put("c")
    again = run.again(dag, ran)
    assert again.states() == {"publish": "success"}
    assert again.result("publish")["batch_id"] == ran.result("publish")["batch_id"]
    table.drain()
    assert table.rows == [b"a", b"b", b"c"]


def test_a_store_that_cannot_be_reached_returns_the_batch(run: Any, held: Held, bucket: str) -> None:
    held.put("a")
    assert run(make(held, "unreached", "s3://nowhere/orders")).states() == {"publish": "failed"}
    assert ended(held) == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("", "prefix must be a directory or a URL, not ''"),
        (None, "prefix must be a directory or a URL, not None"),
        ("s3://user:hushhush@lake/orders", "contains a password"),
        (ObjectStoragePath("s3://conn@lake/orders"), "prefix: .* needs a connection of Airflow's"),
    ],
)
def test_a_prefix_that_cannot_be_meant_is_refused_before_anything_is_leased(
    run: Any, held: Held, prefix: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadArgument, match=message):
        make(held, "wrong", prefix)
    if prefix != "":
        return
    held.put("a")
    dag = make(held, "wrong_later", "{{ params.prefix }}", retries=3)
    dag.params["prefix"] = ""
    ran = run(dag)
    assert (ran.states(), ran.tries("publish"), ended(held)) == ({"publish": "failed"}, 1, (1, 0, 0, 0))
    assert "BadArgument: prefix must be a directory or a URL, not ''" in capfd.readouterr().out
