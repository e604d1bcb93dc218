"""The examples of docs/spark/ and docs/exactly-once.md, as they stand there; what is at ``/``, or in the bucket ``lake``, is
in a directory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import functions as F
from spark_version import PLANS_BATCHES, WRITES_STREAMS

from qewqew_core import Queue, Topic
from qewqew_core.batch import manifest
from qewqew_spark.jobs import batch as batch_job
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once

ROOT = Path(__file__).parents[3]


def examples(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


PAGES = sorted(path.name for path in (ROOT / "docs" / "spark").glob("*.md"))
EXAMPLES = [text for page in PAGES for text in examples(f"spark/{page}")]
# Run by test_spark_tables.py, and by test_spark_drain.py.
ELSEWHERE = ("from datetime import UTC", "from deltalake import", "import socket", "from qewqew_core.batch import published")
REPLACED = {
    '"/': '"{home}/',
    "jdbc:derby:/": "jdbc:derby:{home}/",
    "sqlite:////": "sqlite:///{home}/",
    "file:///": "file://{home}/",
    "s3://lake/": "{home}/lake/",
    'table = load_catalog("lake")': 'table = load_catalog("lake", **lake)',
    'SparkSession.builder.remote("sc://server:15002").getOrCreate()': "spark",  # test_spark_connect.py has a server
}

Names = dict[str, Any]  # what an example finds, and leaves
_around: dict[str, Callable[[Names, Path], Iterator[None]]] = {}


def example(begins: str) -> Callable[[Callable[[Names, Path], Iterator[None]]], None]:
    """What is there before the example with these words runs, and (behind ``yield``) what must be there afterwards."""

    def remember(around: Callable[[Names, Path], Iterator[None]]) -> None:
        _around[begins] = around

    return remember


def at_home(text: str, home: Path) -> str:
    for found, instead in REPLACED.items():
        text = text.replace(found, instead.format(home=home))
    return text


def test_each_example_is_run() -> None:
    found = [text for text in EXAMPLES if not text.startswith(ELSEWHERE)]
    assert [sum(text.startswith(begins) for begins in _around) for text in found] == [1] * len(found)
    assert len(_around) == len(found) == len(EXAMPLES) - len(ELSEWHERE)


def test_each_page_begins_with_an_example() -> None:
    for page in PAGES:
        assert re.match(r"# .*\n\n```(python|sh)\n", (ROOT / "docs" / "spark" / page).read_text()), page


@pytest.mark.parametrize("begins", _around)
def test_an_example_does_what_it_says(spark: Any, tmp_path: Path, begins: str) -> None:
    [text] = [one for one in EXAMPLES if one.startswith(begins)]
    text = at_home(text, tmp_path)
    (tmp_path / "data" / "topics").mkdir(parents=True)
    names = {"spark": spark, "F": F, "expr": F.expr, "Queue": Queue}
    around = _around[begins](names, tmp_path)
    next(around)
    try:
        exec(text, names)  # noqa: S102  # it is ours
        assert list(around) == []
    finally:
        for query in spark.streams.active:
            query.stop()


def lease(path: Path, records: Iterable[bytes], to: Path) -> None:
    with Queue(path) as queue:
        queue.put_many(records)
        shutil.copytree(Path(queue.lease("run").manifest_path).parent, to)


def records(path: Path) -> list[bytes]:
    with Queue(path) as queue:
        return list(queue)


def bodies(path: Path) -> list[bytes]:
    with Topic(path) as topic:
        return [one.body for one in topic]


def finish(names: Names) -> None:
    [query] = names["spark"].streams.active
    query.processAllAvailable()


def lines(names: Names, home: Path) -> None:
    (home / "in").mkdir()
    (home / "in" / "first.txt").write_text("one\nERROR two\nthree\n")
    names["lines"] = names["spark"].readStream.text(str(home / "in"))


@example("import os")
def first_read(names: Names, home: Path) -> Iterator[None]:
    yield
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    found = names["spark"].read.parquet(str(home / "lake" / "orders"))
    assert [(row.id, str(row.price)) for row in found.orderBy("id").collect()] == [(1, "9.90"), (2, "5.00")]
    with Queue(home / "data" / "orders.qew") as queue:
        assert [batch.state for batch in queue.acknowledged()] == ["acked"]


@example('batch = spark.read.format("qewqew")')
def batches_and_queue(names: Names, home: Path) -> Iterator[None]:
    for number, name in enumerate(["orders-3f9c", "orders-4a0d"]):
        lease(home / f"q{number}", [b"%d" % number], home / "data" / "batches" / name)
    with Queue(home / "data" / "orders.qew") as queue:
        queue.put_many([b"x"] * 1001)
    yield
    assert [bytes(row.value) for row in names["batch"].collect()] == [b"0"]
    assert [bytes(row.value) for row in names["several"].collect()] == [b"0", b"1"]
    assert names["queue"].count() == 1000


@example("orders = (")
def typed(names: Names, home: Path) -> Iterator[None]:
    good = {"id": 1, "name": "a", "at": "2026-11-21T10:00:00Z", "price": "9.90"}
    lease(home / "q", [json.dumps(good).encode(), b"{bad"], home / "queues" / "batches" / "orders-1a2b")
    yield
    first, second = names["orders"].collect()
    assert (first.id, first.name, str(first.price), first._corrupt_record) == (1, "a", "9.90", None)
    assert (second.id, second._corrupt_record) == (None, "{bad")


@example("from pyspark.sql.functions import col, from_csv")
def _(names: Names, home: Path) -> Iterator[None]:
    lease(home / "q", [b'{"id":1,"day":"24.11.2026"}', b"2;x"], home / "queues" / "batches" / "orders-1a2b")
    yield
    assert [row.id for row in names["orders"].collect()] == [1, None]
    assert str(names["orders"].first().day) == "2026-11-24"
    assert names["lines"].collect()[1] == (2, "x")


@example('df = spark.read.format("qewqew").load(')
def topic_read(names: Names, home: Path) -> Iterator[None]:
    with Topic(home / "data" / "topics" / "orders") as topic:
        for hour, tag in enumerate(["eu.paid", "eu.open", "us.paid", "us.paid"]):
            time = datetime.fromisoformat(f"2026-11-20T{hour * 7:02}:30:00+01:00")
            topic.append(b"x", tag=tag, timestamp=int(time.timestamp() * 1000))
        topic.append(b"x", tag="eu.paid", timestamp=int(datetime.fromisoformat("2026-11-21T00:00:00+01:00").timestamp() * 1000))
    yield
    assert names["df"].count() == 5
    assert [row.number for row in names["yesterday"].collect()] == [0, 2, 3]


@example("query = (\n    spark.readStream")
def topic_stream(names: Names, home: Path) -> Iterator[None]:
    if not PLANS_BATCHES:
        pytest.skip("Spark has no limits for such a stream before 4.2")
    with Topic(home / "data" / "topics" / "orders") as topic:
        topic.append_many([b"1", b"2"])
    yield
    finish(names)
    found = names["spark"].read.parquet(str(home / "lake" / "orders"))
    assert sorted(bytes(row.value) for row in found.collect()) == [b"1", b"2"]


@example("import json\n\nlatest = ")
def lag(names: Names, home: Path) -> Iterator[None]:
    if not PLANS_BATCHES:
        pytest.skip("Spark does not ask for the end of such a topic before 4.2")
    with Topic(home / "orders") as topic:
        topic.append_many([b"1", b"2"])
        stream = names["spark"].readStream.format("qewqew").option("startingOffsets", "earliest").load(topic.path)
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(home / "checkpoint"))
    names["query"] = writer.trigger(availableNow=True).start()
    assert names["query"].awaitTermination(120)
    yield
    assert (names["latest"]["number"], names["latest"]["recordsBehindLatest"]) == (2, 0)


@example("df.selectExpr(")
def queue_write(names: Names, home: Path) -> Iterator[None]:
    names["df"] = names["spark"].range(3)
    yield
    assert records(home / "data" / "orders.qew") == [b'{"id":0}', b'{"id":1}', b'{"id":2}']


@example("events = ")
def topic_write(names: Names, home: Path) -> Iterator[None]:
    names["df"] = names["spark"].sql("SELECT 'eu' AS region, 'paid' AS event, TIMESTAMP '2026-11-21 00:00:00' AS event_time")
    yield
    with Topic(home / "data" / "events") as topic:
        [message] = topic
    assert json.loads(message.body)["event"] == "paid"
    assert (message.tag, message.timestamp) == ("eu.paid", 1_795_219_200_000)


@example("writer = lines.writeStream")
def stream_write(names: Names, home: Path) -> Iterator[None]:
    if not WRITES_STREAMS:
        pytest.skip("Spark 4.0 does not write streams with Arrow")
    lines(names, home)
    yield
    finish(names)
    assert records(home / "data" / "lines.qew") == [b"one", b"ERROR two", b"three"]


@example("def both(")
def several_targets(names: Names, home: Path) -> Iterator[None]:
    lines(names, home)
    yield
    finish(names)
    assert records(home / "data" / "lines.qew") == [b"one", b"ERROR two", b"three"]
    assert bodies(home / "data" / "errors") == [b"ERROR two"]


@example("# Or a URL, s3://bucket/staging:")
def staging(names: Names, home: Path) -> Iterator[None]:
    names["df"] = names["spark"].range(2).selectExpr("CAST(id AS STRING) AS value")
    (home / "mnt" / "shared" / "staging").mkdir(parents=True)
    yield
    assert records(home / "data" / "orders.qew") == [b"0", b"1"]


@example('with Queue("/data/orders.qew") as q:')
def published(names: Names, home: Path) -> Iterator[None]:
    with Queue(home / "data" / "orders.qew") as queue:
        queue.put_many([b"1", b"2"])
    yield
    assert [bytes(row.value) for row in names["spark"].read.format("qewqew").load(names["url"]).collect()] == [b"1", b"2"]
    assert records(home / "data" / "orders.qew") == []


@example("spark = SparkSession.builder.remote(")
def connect(names: Names, home: Path) -> Iterator[None]:
    lease(home / "q", [b'{"id": 1}'], home / "lake" / "batches" / "orders-3f9c")
    yield
    assert names["orders"].collect() == [(1, None)]


@example('with Queue("/data/orders.qew") as queue:')
def cluster(names: Names, home: Path) -> Iterator[None]:
    with Queue(home / "data" / "orders.qew") as queue:
        queue.put(b'{"id": 1}')
    yield
    assert names["orders"].collect() == [(1, None)]


def a_lake(names: Names, home: Path) -> dict[str, str]:
    """The settings of the catalog `lake`, which the session has."""
    (home / "lake").mkdir()
    settings = {"type": "sql", "uri": f"sqlite:///{home}/lake/catalog.db", "warehouse": f"file://{home}/lake"}
    for name, value in settings.items():
        names["spark"].conf.set(f"spark.sql.catalog.lake.{name}", value)
    return settings


@example("from qewqew_spark.tables import append_once")
def tables(names: Names, home: Path) -> Iterator[None]:
    a_lake(names, home)
    names |= {"rows": names["spark"].range(3), "batch": SimpleNamespace(id="orders-3f9c")}
    yield
    assert not names["commit"].again
    assert append_once(names["rows"], "lake.shop.orders", "orders-3f9c").again


@example('changes = {"keys"')
def upsert(names: Names, home: Path) -> Iterator[None]:
    catalog = a_lake(names, home)
    rows = names["spark"].sql("SELECT * FROM VALUES (1, 1, 'I'), (1, 2, 'D'), (2, 1, 'U') AS t(id, changed, op)")
    names |= {"rows": rows, "batch": SimpleNamespace(id="orders-3f9c"), "append_once": append_once}
    yield
    assert load_catalog("lake", **catalog).load_table("shop.customers").scan().to_arrow().to_pylist() == [{"id": 2, "changed": 1}]


@example("from pyiceberg.catalog import load_catalog")
def branch(names: Names, home: Path) -> Iterator[None]:
    lake = a_lake(names, home)
    names |= {"lake": lake, "rows": names["spark"].range(2), "batch": SimpleNamespace(id="b"), "append_once": append_once}
    append_once(names["spark"].range(5, 6), "lake.shop.orders", "before")
    yield
    seen = names["table"].refresh().scan().to_arrow()["id"].to_pylist()
    assert sorted(seen) == sorted(names["found"]["id"].to_pylist()) == [0, 1, 5]


@example("# shop/orders.py")
def transform(names: Names, home: Path) -> Iterator[None]:
    lease(home / "flights", [b"x"], home / "batch")
    yield
    rows = names["clean"](
        names["spark"].sql("SELECT * FROM VALUES (-1), (2) AS t(delay)"), manifest.load(home / "batch")
    ).collect()
    assert [(row.delay, row.queue) for row in rows] == [(2, "flights")]


@example("bad = spark.read.parquet(")
def quarantine(names: Names, home: Path) -> Iterator[None]:
    batch = home / "b" / "orders-3f9c"
    lease(home / "q", [b'{"id":1}', b'{"id":"x"}'], batch)
    with (batch / "manifest.json").open() as file:
        id = json.load(file)["id"]
    result = batch_job.run(names["spark"], str(batch), [Output(str(home / "lake" / "orders"))], schema="id INT")
    Path(result["quarantine"]).rename(Path(result["quarantine"]).with_name("batch=orders-3f9c"))
    assert result["quarantine"].endswith(f"orders-quarantine/batch={id}")
    yield
    assert records(home / "data" / "orders.qew") == [b'{"id":"x"}']


def test_the_command_of_the_job_does_what_the_page_says(spark: Any, tmp_path: Path) -> None:
    text = examples("spark/job.md", "sh")[0].replace("\\\n", "")
    command = shlex.split(at_home(text, tmp_path).replace(" /", f" {tmp_path}/"))
    assert command[:2] == ["spark-submit", ".../qewqew_spark/jobs/batch.py"]
    good = {"id": 1, "month": 2, "carrier": "UA", "delay": 3.5}
    lease(tmp_path / "q", [json.dumps(good).encode(), b""], tmp_path / "data" / "orders.qew.batches" / "orders-3f9c")
    (tmp_path / "tmp").mkdir()
    given = vars(batch_job.arguments(command[2:]))
    result = batch_job.run(spark, given.pop("batch"), given.pop("outputs"), **{k: v for k, v in given.items() if k != "result"})
    shown = json.loads(examples("spark/job.md", "json")[0])
    assert list(result) == list(shown)
    assert list(result["outputs"][0]) == list(shown["outputs"][0])
    assert (result["good"], result["reasons"]) == (1, {"empty record": 1})
    assert [row.month for row in spark.read.parquet(str(tmp_path / "lake" / "orders")).collect()] == [2]
    assert [row.delay for row in spark.read.parquet(str(tmp_path / "lake" / "delays")).collect()] == [3.5]


def test_the_examples_of_exactly_once_print_what_they_say(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: Names = {"spark": spark}
    for place in "data", "lake":
        (tmp_path / place).mkdir()
    expected = []
    try:
        for text in examples("exactly-once.md"):
            exec(at_home(text, tmp_path), names)  # noqa: S102  # it is ours
            expected += re.findall(r"  # → (.*)$", text, re.MULTILINE)
    finally:
        for query in spark.streams.active:
            query.stop()
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 4
