"""What a drain costs in what does not depend on the machine: requests to the store, and tasks; at two sizes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from object_store import CREDENTIALS, Proxy, proxied, s3_client
from spark_batches import make_batch
from spark_lake import Lake

from qewqew_core.batch import published
from qewqew_spark.jobs import drain as module
from qewqew_spark.jobs.drain import drain
from qewqew_spark.jobs.output import Output
from qewqew_spark.options import Options
from qewqew_spark.source import batches, splitting

pytestmark = pytest.mark.xdist_group("spark")


def order(number: int) -> bytes:
    return b'{"id": %d}' % number


def drained(lake: Lake, prefix: str, **options: Any) -> dict[str, Any]:
    output = Output(format="delta", path=lake.name("delta"))
    return drain(lambda: lake.session, prefix, [output], schema="id BIGINT", quarantine=str(lake.place / "bad"), **options)


def ids(lake: Lake) -> list[int]:
    return [number for (number,) in sorted(lake.rows("delta"))]


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with proxied("lake") as server:
        yield server


@pytest.fixture
def of_store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    key, secret, _ = CREDENTIALS.values()  # the workers of this Spark began before
    return {"fs.endpoint_url": proxy.url, "fs.key": key, "fs.secret": secret}


def test_a_batch_takes_two_requests_to_drain_whatever_their_number(
    lake: Lake, proxy: Proxy, of_store: dict[str, str], tmp_path: Path
) -> None:
    """Manifest and segment; they are listed and removed by the thousand."""
    client, expected = s3_client(f"http://{proxy.behind}"), 0
    beside = []
    for count in 5, 150:
        for number in range(expected, expected + count):
            make_batch(tmp_path / "batch", [order(number)], batch_id=f"w{number}")
            for file in (tmp_path / "batch").iterdir():
                client.put_object(Bucket="lake", Key=f"staged/w{number}/{file.name}", Body=file.read_bytes())
        expected += count
        proxy.reset()
        assert drained(lake, "s3://lake/staged", read_options=of_store)["removed"] == count
        kinds = Counter("list" if "list-type" in each else each.split()[0] for each in proxy.seen)
        assert kinds.pop("GET") == 2 * count
        beside.append(kinds)
    assert beside[0] == beside[1]
    assert beside[0]["POST"] == 2, "removed: segments, then manifests"
    assert beside[0]["list"] <= 6
    assert ids(lake) == [*range(expected)]


def test_manifests_and_segments_are_awaited_together(lake: Lake, proxy: Proxy, of_store: dict[str, str], tmp_path: Path) -> None:
    client = s3_client(f"http://{proxy.behind}")
    for number in range(40):
        make_batch(tmp_path / "batch", [order(number)], batch_id=f"w{number}")
        for file in (tmp_path / "batch").iterdir():
            client.put_object(Bucket="lake", Key=f"staged/w{number}/{file.name}", Body=file.read_bytes())
    proxy.reset()
    waited: Counter[str] = Counter()
    together = {name: threading.Barrier(8, timeout=60) for name in ("manifest.json", "orders.qew.17")}

    def wait(request: str) -> None:
        if request.startswith("GET") and (name := urlsplit(request).path.rpartition("/")[2]) in together:
            together[name].wait()  # breaks if no eight come together, and the request has no answer
            waited[name] += 1

    proxy.before = wait
    assert drained(lake, "s3://lake/staged", read_options=of_store)["read"] == 40
    assert waited == dict.fromkeys(together, 40)
    assert ids(lake) == [*range(40)]


def test_a_task_reads_some_ahead_and_never_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "AHEAD_BYTES", 200)
    paths = []
    for number, size in enumerate([1, 300, *[1] * 30]):
        paths.append(str(make_batch(tmp_path / f"w{number}", [b"x" * size], batch_id=f"w{number}")))
    source = batches.reader(paths, Options({}), batches.SCHEMA)
    (bundle,) = source.partitions()
    running = batches._ahead(bundle.parts)
    first, second = next(running), next(running)
    assert isinstance(first.store, batches.Ahead)
    assert not isinstance(second.store, batches.Ahead), "what is large is read when its turn comes"
    running.close()
    assert sum(each.num_rows for each in source.read(bundle)) == len(paths)


@pytest.mark.parametrize(("count", "tasks"), [(100, 1), (1_000, 2)])
def test_tasks_are_as_many_as_files_need(tmp_path: Path, count: int, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    paths = [str(make_batch(tmp_path / f"w{number}", [b"x"], batch_id=f"w{number}")) for number in range(count)]
    found = batches.reader(paths, Options({}), batches.SCHEMA).partitions()
    assert len(found) == tasks
    assert max(len(each.parts) for each in found) <= -(-count // tasks) + 1
    assert splitting.OPENING * 100 < splitting.LEAST_PARTITION


def test_one_commit_has_so_many_batches_and_the_rest_waits(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 4)
    prefix = str(tmp_path / "published")
    for number in range(10):
        make_batch(Path(prefix, f"w{number}"), [order(number)], batch_id=f"w{number}")
    for damaged in 0, 1, 2, 3, 4, 6:  # the first four do not keep the others waiting
        Path(prefix, f"w{damaged}", "orders.qew.17" if damaged % 2 else "manifest.json").write_bytes(b"")
    results = [drained(lake, prefix) for _ in range(3)]
    assert [(each["batches"], each["left"]) for each in results] == [(["w5", "w7"], 2), (["w8", "w9"], 0), ([], 0)]
    assert all(len(each["damaged"]) >= 4 for each in results)
    assert ids(lake) == [5, 7, 8, 9]
    assert published.complete(prefix) == ["w0", "w1", "w2", "w3", "w4", "w6"]
