"""Many hosts publish under one prefix, and a drain appends what is there to one table of Iceberg or Delta, each batch once."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from object_store import CREDENTIALS, object_store, s3_client
from other_driver import OtherDriver, results
from spark_batches import make_batch, make_topic_batch
from spark_lake import Lake

from qewqew_core import BadArgument, Message, Queue, Stage
from qewqew_core.batch import published
from qewqew_core.batch.store import Local
from qewqew_spark.data_source import register
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs.batch import TooManyBadRecords
from qewqew_spark.jobs.drain import drain
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once

pytestmark = pytest.mark.xdist_group("spark")
KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])


def orders(numbers: Sequence[int] | range) -> list[bytes]:
    return [b'{"id": %d}' % number for number in numbers]


def publish(host: Path, prefix: str, numbers: Sequence[int] | range, run: str = "run 1") -> str:
    """What a host does with what waits in its queue, under a key that names host and run; the id of the batch."""
    with Queue(host / "orders.qew") as queue:
        queue.put_many(orders(numbers), key=f"staged in {run}")
        batch = queue.lease(f"{host.name} {run}")
        batch.publish(prefix)
        batch.ack()
    return batch.id


@pytest.fixture
def hosts(tmp_path: Path) -> Callable[[str], Path]:
    def host(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    return host


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "published")


def output(lake: Lake, kind: str) -> Output:
    return Output(format=kind, **{"table" if kind == "iceberg" else "path": lake.name(kind)})


def drained(lake: Lake, kind: str, prefix: str, **options: Any) -> dict[str, Any]:
    given = {"schema": "id BIGINT", "quarantine": str(lake.place / "bad"), **options}
    return drain(lambda: lake.session, prefix, [output(lake, kind)], **given)


def ids(lake: Lake, kind: str) -> list[int]:
    return [number for (number,) in sorted(lake.rows(kind))]


def commits(lake: Lake, kind: str) -> int:
    """How many have added files."""
    if kind == "iceberg":
        return len(lake.catalog.load_table("shop.orders").metadata.snapshots)
    from deltalake import DeltaTable

    return sum(commit["operation"] == "WRITE" for commit in DeltaTable(lake.name(kind)).history())


@pytest.mark.quick("what two hosts publish is in a table once")
@KINDS
def test_what_two_hosts_have_published_is_in_one_commit_and_goes(
    lake: Lake, kind: str, hosts: Callable[[str], Path], prefix: str
) -> None:
    found = [publish(hosts("w1"), prefix, range(100)), publish(hosts("w2"), prefix, range(100, 150))]
    result = drained(lake, kind, prefix)
    assert (result["batches"], result["read"], result["good"], result["bad"], result["removed"]) == (
        sorted(found),
        150,
        150,
        0,
        2,
    )
    assert published.complete(prefix) == os.listdir(prefix) == []
    assert ids(lake, kind) == [*range(150)]
    assert commits(lake, kind) == 1

    with Stage(f"file://{prefix}") as stage:  # a task without a disk of its own
        stage.put_many(orders(range(160, 170)))
        stage.commit("run 3")
        stage.commit("a source without records")
    assert drained(lake, kind, prefix)["read"] == 10
    assert ids(lake, kind) == [*range(150), *range(160, 170)]

    later = publish(hosts("w2"), prefix, range(150, 160), "run 2")
    assert drained(lake, kind, prefix)["batches"] == [later]
    assert ids(lake, kind) == [*range(170)]


def test_without_batches_no_spark_is_started(prefix: str) -> None:
    def start() -> Any:
        raise AssertionError("nothing is there")

    table = [Output(format="delta", path="/nowhere")]
    assert drain(start, prefix, table) == {"batches": [], "read": 0, "removed": 0, "left": 0, "damaged": {}}
    Path(prefix, "half").mkdir(parents=True)
    Path(prefix, "half", "orders.qew.0").write_bytes(b"its manifest is not there yet")
    assert drain(start, prefix, table)["batches"] == []
    assert os.listdir(prefix) == ["half"]


@pytest.mark.parametrize("output", [Output(path="/lake/orders"), Output(format="noop")])
def test_a_drain_writes_a_table_that_takes_many_batches_in_one_commit(output: Output, prefix: str) -> None:
    for outputs in [output], [Output(path="/lake", format="delta"), output]:
        with pytest.raises(BadArgument, match="a drain writes one output, a table of Iceberg or Delta"):
            drain(lambda: None, prefix, outputs)  # type: ignore[arg-type,return-value]


@KINDS
def test_a_hundred_small_batches_are_one_task(lake: Lake, kind: str, prefix: str) -> None:
    for number in range(100):
        batch = f"w{number:03}-1f"
        make_batch(Path(prefix, batch), orders(range(number * 10, number * 10 + 10)), batch_id=batch)
    result = drained(lake, kind, prefix)
    assert (len(result["batches"]), result["read"]) == (100, 1000)
    assert ids(lake, kind) == [*range(1000)]
    written = [*Path(lake.place, "warehouse" if kind == "iceberg" else "orders").rglob("*.parquet")]
    assert len(written) == 1, "a task writes a file"


class Died(BaseException):
    """What a test raises where a host is to die."""


@KINDS
def test_of_a_hundred_hosts_that_die_and_go_on_while_drains_run_each_record_is_in_the_table_once(
    lake: Lake, kind: str, hosts: Callable[[str], Path], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, chance, deaths = Local.write, random.Random(1), 0

    def maybe_die() -> None:
        nonlocal deaths
        if chance.random() < 0.1:
            deaths += 1
            raise Died

    def risky(store: Local, name: str, parts: Iterable[bytes]) -> None:
        maybe_die()
        write(store, name, parts)
        maybe_die()

    def host(number: int) -> None:
        for run in range(2):
            while True:
                try:
                    publish(hosts(f"w{number}"), prefix, [2 * number + run], f"run {run}")
                except Died:
                    continue
                break

    monkeypatch.setattr(Local, "write", risky)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(host, number) for number in range(100)]
        while not all(each.done() for each in running):
            drained(lake, kind, prefix)
        for each in running:
            each.result()
    drained(lake, kind, prefix)
    assert deaths
    assert ids(lake, kind) == [*range(200)]
    assert os.listdir(prefix) == []


@KINDS
def test_bad_records_are_in_the_quarantine_under_their_batches(lake: Lake, kind: str, prefix: str) -> None:
    for name, bad in ("w1-1f", [b"x"]), ("w2-1f", []), ("w3-1f", [b"y", b"z"]):
        make_batch(Path(prefix, name), orders([1]) + bad, batch_id=name)
    for _ in range(2):  # it fails, and nothing but the quarantine is written
        with pytest.raises(TooManyBadRecords, match=f"they are in {lake.place}/bad,"):
            drained(lake, kind, prefix, max_bad_records=2)
    assert len(published.complete(prefix)) == 3
    make_batch(Path(prefix, "w1-1f"), orders([1, 2]), batch_id="w1-1f")  # mended
    result = drained(lake, kind, prefix)
    assert (result["good"], result["bad"], result["quarantine"]) == (4, 2, f"{lake.place}/bad")
    bad = lake.session.read.parquet(result["quarantine"]).select("batch", "value").collect()
    assert sorted((row.batch, bytes(row.value)) for row in bad) == [("w3-1f", b"y"), ("w3-1f", b"z")]
    assert os.listdir(lake.place / "bad") == ["batch=w3-1f"]
    assert ids(lake, kind) == [1, 1, 1, 2]


def test_of_a_topic_too(lake: Lake, prefix: str) -> None:
    make_topic_batch(Path(prefix, "orders-1a2b"), [Message(b'{"id": %d}' % number, tag="a") for number in range(4)])
    assert drained(lake, "delta", prefix)["read"] == 4
    assert ids(lake, "delta") == [0, 1, 2, 3]


@KINDS
def test_a_batch_that_is_published_again_after_its_commit_is_removed_and_not_appended(
    lake: Lake, kind: str, hosts: Callable[[str], Path], prefix: str
) -> None:
    with Queue(hosts("w1") / "orders.qew") as queue:
        queue.put_many(orders(range(10)))
        batch = queue.lease("w1 run 1")
        for more in 0, 5:  # the second time with another batch
            batch.publish(prefix)
            if more:
                make_batch(Path(prefix, "w2-1f"), orders(range(10, 10 + more)), batch_id="w2-1f")
            assert drained(lake, kind, prefix)["removed"] == 1 + (more > 0)
    assert ids(lake, kind) == [*range(15)]
    batch_again = shutil.copytree(os.path.dirname(batch.manifest_path), f"{prefix}/{batch.id}")
    assert drained(lake, kind, prefix) == {"batches": [], "read": 0, "removed": 1, "left": 0, "damaged": {}}
    assert not Path(batch_again).exists()


@pytest.mark.parametrize("point", ["staged", "before", "after", "removed"])
@KINDS
def test_a_drain_that_is_killed_is_made_good_by_the_next(
    lake: Lake, drivers: list[OtherDriver], kind: str, point: str, prefix: str
) -> None:
    append_once(lake.session.range(0), lake.name(kind), "before", format=kind)
    for number in range(5):
        make_batch(Path(prefix, f"w{number}"), orders([number]), batch_id=f"w{number}")
    driver = drivers.pop()
    driver.drain(lake, kind, prefix, die=point)
    assert driver.result() is None
    assert driver.end() == -signal.SIGKILL
    committed = point in ("after", "removed")
    assert ids(lake, kind) == ([*range(5)] if committed else [])
    assert len(published.complete(prefix)) < 5 if point == "removed" else len(published.complete(prefix)) == 5

    make_batch(Path(prefix, "w5"), orders([5]), batch_id="w5")
    result = drained(lake, kind, prefix)
    assert result["batches"] == (["w5"] if committed else [f"w{number}" for number in range(6)])
    assert ids(lake, kind) == [*range(6)]
    assert published.complete(prefix) == []


@KINDS
def test_of_three_drains_at_once_each_batch_is_in_the_table_once(
    lake: Lake, drivers: list[OtherDriver], kind: str, prefix: str
) -> None:
    append_once(lake.session.range(0), lake.name(kind), "before", format=kind)
    for number in range(20):
        make_batch(Path(prefix, f"w{number}"), orders([number]), batch_id=f"w{number}")
    for driver in drivers[:3]:
        driver.drain(lake, kind, prefix)
    done = results(drivers[:3])
    assert sorted(batch for each in done for batch in each["batches"]) == sorted(f"w{number}" for number in range(20))
    assert ids(lake, kind) == [*range(20)]
    assert published.complete(prefix) == []


@KINDS
def test_batches_that_the_table_has_are_left_out_also_if_somebody_is_faster(lake: Lake, kind: str) -> None:
    numbers = {"a": 1, "b": 2, "c": 3}
    table, asked = lake.name(kind), []

    def rows(batches: Sequence[str]) -> Any:
        asked.append(list(batches))
        if len(asked) == 1:  # somebody else
            assert append_once(lake.session.range(2, 3), table, "b", format=kind).batches == ("b",)
        return lake.session.createDataFrame([(numbers[batch],) for batch in batches], "id BIGINT")

    lake.session.createDataFrame([(0,)], "id BIGINT")  # which makes it the active session of this thread
    first = append_once(rows, table, ["a", "b", "c"], format=kind)
    assert (asked, first.again, sorted(first.batches)) == ([["a", "b", "c"], ["a", "c"]], False, ["a", "c"])
    assert append_once(rows, table, ["a", "c"], format=kind) == first.__class__(table, first.snapshot, True, ("a", "c"))
    assert append_once(lake.session.range(9), table, "c", format=kind).again
    numbers["d"] = 4
    assert append_once(rows, table, ["a", "b", "c", "d"], format=kind).batches == ("d",)
    assert ids(lake, kind) == [1, 2, 3, 4]
    with pytest.raises(BadArgument, match="several ids and a function"):
        append_once(lake.session.range(9), table, ["e", "f"], format=kind)


PUBLISHER = """
import os, signal, sys
from qewqew_core import Queue
from qewqew_core.batch.store import Local

queue, prefix, point = sys.argv[1:]
write = Local.write

def killed(store, name, parts):
    write(store, name, parts)
    if (name == "manifest.json") == (point == "published"):
        os.kill(os.getpid(), signal.SIGKILL)

if point:
    Local.write = killed
with Queue(queue) as q:
    batch = q.lease("w1 run 1")
    if batch.state != "acked":
        batch.publish(prefix)
        batch.ack()
"""


@pytest.mark.parametrize("between", [False, True], ids=["", "and a drain comes first"])
@pytest.mark.parametrize("point", ["half", "published"])
def test_a_host_that_is_killed_while_it_publishes_goes_on_with_the_same_batch(
    lake: Lake, hosts: Callable[[str], Path], prefix: str, point: str, between: bool
) -> None:
    path = hosts("w1") / "orders.qew"
    with Queue(path) as queue:
        queue.put_many(orders(range(10)))

    def publisher(point: str) -> int:
        return subprocess.run([sys.executable, "-c", PUBLISHER, str(path), prefix, point], check=False).returncode

    assert publisher(point) == -signal.SIGKILL
    assert len(published.complete(prefix)) == (point == "published")
    if between:
        drained(lake, "delta", prefix)
    assert publisher("") == publisher("") == 0
    drained(lake, "delta", prefix)
    assert ids(lake, "delta") == [*range(10)]
    with Queue(path) as queue:
        assert (len(queue), queue.batches()) == (0, []), "it is acknowledged"
    assert os.listdir(prefix) == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with object_store() as url:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        client = s3_client(url)
        client.create_bucket(Bucket="lake")
        yield client


def test_a_prefix_of_an_object_store(lake: Lake, hosts: Callable[[str], Path], bucket: Any) -> None:
    prefix = "s3://lake/batches/orders"
    for number in range(4):
        publish(hosts(f"w{number}"), prefix, [number])
    bucket.put_object(Bucket="lake", Key="batches/orders/half/orders.qew.0", Body=b"x")
    bucket.put_object(Bucket="lake", Key="batches/orders-of-others/x/manifest.json", Body=b"x")
    options = {f"fs.{name}": value for name, value in {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}.items()}
    options["fs.key"], options["fs.secret"], _ = CREDENTIALS.values()  # the workers of this Spark began before the server
    assert drained(lake, "iceberg", prefix, read_options=options)["read"] == 4
    assert ids(lake, "iceberg") == [0, 1, 2, 3]
    left = [each["Key"] for each in bucket.list_objects_v2(Bucket="lake")["Contents"]]
    assert left == ["batches/orders-of-others/x/manifest.json", "batches/orders/half/orders.qew.0"]


def test_a_read_says_of_which_batch_a_row_is_if_it_is_asked(spark: Any, tmp_path: Path) -> None:
    register(spark)
    for name, numbers in ("w1", [1, 2]), ("w2", [3]):
        make_batch(tmp_path / name, orders(numbers), batch_id=name)
    make_topic_batch(tmp_path / "t" / "orders", [Message(b"x"), Message(b"y")])
    paths = [str(tmp_path / name) for name in ("w1", "w2")]
    reader = spark.read.format("qewqew")
    assert "batch" not in reader.load(paths).columns
    assert [tuple(row) for row in reader.schema("offset LONG, batch STRING").load(paths).collect()] == [
        (0, "w1"),
        (1, "w1"),
        (0, "w2"),
    ]
    assert [row.batch for row in spark.read.format("qewqew").schema("batch STRING").load(paths).collect()] == ["w1", "w1", "w2"]
    typed = "id INT, _metadata STRUCT<batch: STRING>"
    rows = spark.read.format("qewqew").option("codec", "json").schema(typed).load(paths).collect()
    assert [(row.id, row._metadata.batch) for row in rows] == [(1, "w1"), (2, "w1"), (3, "w2")]
    of_topic = spark.read.format("qewqew").schema("batch STRING").load(str(tmp_path / "t" / "orders"))
    assert [row.batch for row in of_topic.collect()] == ["orders-1a2b"] * 2


def test_the_examples_of_the_page(lake: Lake, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/spark/drain.md").read_text()
    of_a_host, of_a_driver = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lake.session.createDataFrame([(0,)], "id BIGINT")  # which makes it the active session of this thread
    register(lake.session)
    names = {"spark": lake.session}
    for times in 1, 2, 3:
        if times < 3:
            with Queue(tmp_path / "orders.qew") as queue:
                queue.put_many([b'{"id": %d, "shop": "eu"}' % times])
        for text in of_a_host, of_a_driver:
            text = text.replace("s3://lake/batches", f"{tmp_path}/batches").replace("/data/", f"{tmp_path}/")
            exec(compile(text, "docs/spark/drain.md", "exec"), names)  # noqa: S102 - our own page
        assert lake.rows("iceberg") == [(number, "eu") for number in range(1, min(times, 2) + 1)]
        assert os.listdir(tmp_path / "batches") == []


def test_the_application_says_what_it_did(lake: Lake, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    make_batch(Path(prefix, "w1-1f"), orders([1]), batch_id="w1-1f")
    monkeypatch.setattr(job.SparkSession.builder, "getOrCreate", lambda: lake.session)
    monkeypatch.setattr(type(lake.session), "stop", lambda self: None)
    level = lake.session.sparkContext.setLogLevel
    place = ["--output", json.dumps({"path": lake.name("delta"), "format": "delta"})]
    try:
        assert job.application([prefix, *place, "--schema", "id BIGINT"], "drain", drain) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("qewqew result: "))
        assert (said["batches"], said["read"], said["removed"]) == (["w1-1f"], 1, 1)
        assert job.application([prefix, "--output", '{"path": "/lake"}'], "drain", drain) == 2
        assert "BadArgument: a drain writes one output" in capsys.readouterr().err
    finally:
        level("OFF")
