"""A damaged batch stops nobody: it stays under the prefix, is named, and all others are committed, each once."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from object_store import CREDENTIALS, Proxy, proxied, s3_client
from other_driver import OtherDriver, results
from spark_batches import make_batch, make_topic_batch
from spark_lake import Lake

from qewqew_core import Message, StoreError
from qewqew_core.batch import manifest, published
from qewqew_spark.jobs import batch as job
from qewqew_spark.jobs import drain as module
from qewqew_spark.jobs.drain import drain
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables import append_once

pytestmark = pytest.mark.xdist_group("spark")
KINDS = pytest.mark.parametrize("kind", ["iceberg", "delta"])


def order(number: int) -> bytes:
    return b'{"id": %d}' % number


def output(lake: Lake, kind: str) -> Output:
    return Output(format=kind, **{"table" if kind == "iceberg" else "path": lake.name(kind)})


def drained(lake: Lake, kind: str, prefix: Path | str, **options: Any) -> dict[str, Any]:
    given = {"schema": "id BIGINT", "quarantine": str(lake.place / "bad"), **options}
    return drain(lambda: lake.session, str(prefix), [output(lake, kind)], **given)


def ids(lake: Lake, kind: str) -> list[int]:
    return [number for (number,) in sorted(lake.rows(kind))]


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def say(path: Path, **fields: Any) -> None:
    """Let the manifest say this instead."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def count_wrong(path: Path) -> None:
    """A manifest whose checksums are right, of records that are counted wrong."""
    body = json.loads(path.read_text())
    (segment,) = body["segments"]
    say(path, records=2, bytes=segment["end"] - segment["start"] - 4, segments=[segment | {"records": 2}])


SEGMENT = "orders.qew.17"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda at: flip(at / SEGMENT), "the checksum of the bytes"),
    "a short file": (lambda at: os.truncate(at / SEGMENT, 13), f"segment file '{SEGMENT}' has 13 bytes, the segment ends at"),
    "no file": (lambda at: os.unlink(at / SEGMENT), f"segment file '{SEGMENT}' cannot be read"),
    "an empty manifest": (lambda at: os.truncate(at / manifest.MANIFEST, 0), "not JSON"),
    "no manifest": (lambda at: (at / manifest.MANIFEST).write_bytes(b"\xff\x00"), "not JSON"),
    "another object": (lambda at: (at / manifest.MANIFEST).write_text("[1]"), "'version' must be int"),
    "the manifest of another batch": (lambda at: say(at / manifest.MANIFEST, id="w1"), "is of batch w1; the directory must have"),
    "a wrong count": (lambda at: count_wrong(at / manifest.MANIFEST), "hold 1 records, not 2"),
}


def damage(prefix: Path, mended: Path) -> dict[str, str]:
    """A batch damaged in each way, with an order for each; what they should be is in ``mended``. Returns why, by the ids."""
    why = {}
    for number, (act, said) in enumerate(DAMAGE.values(), 100):
        make_batch(mended / f"d{number}", [order(number)], batch_id=f"d{number}")
        shutil.copytree(mended / f"d{number}", prefix / f"d{number}")
        act(prefix / f"d{number}")
        why[f"d{number}"] = said
    return why


def sound(prefix: Path, *numbers: int) -> None:
    for number in numbers:
        make_batch(prefix / f"w{number}", [order(number)], batch_id=f"w{number}")


def files(prefix: Path) -> dict[str, bytes]:
    return {str(path.relative_to(prefix)): path.read_bytes() for path in prefix.rglob("*") if path.is_file()}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "published").mkdir()
    return tmp_path / "published"


@pytest.mark.quick("a damaged batch stops nobody")
@KINDS
def test_damaged_batches_are_left_out_named_and_tried_again(
    lake: Lake, kind: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = damage(prefix, tmp_path / "mended")
    before = files(prefix)
    sound(prefix, 1, 2, 3)
    result = drained(lake, kind, prefix)
    assert (result["batches"], result["read"], result["removed"]) == (["w1", "w2", "w3"], 3, 3)
    assert sorted(result["damaged"]) == sorted(why)
    told = capsys.readouterr().err
    for batch, said in why.items():
        assert said in result["damaged"][batch], batch
        assert str(prefix / batch) in result["damaged"][batch], "where"
        assert f"qewqew: the batch {batch} is damaged and left out: {result['damaged'][batch]}\n" in told
    assert ids(lake, kind) == [1, 2, 3]
    assert files(prefix) == before, "nothing of them is removed or changed"

    sound(prefix, 4)
    result = drained(lake, kind, prefix)
    assert (result["batches"], sorted(result["damaged"])) == (["w4"], sorted(why))
    result = drained(lake, kind, prefix)
    assert (result["batches"], result["removed"], sorted(result["damaged"])) == ([], 0, sorted(why))
    assert (ids(lake, kind), files(prefix)) == ([1, 2, 3, 4], before)

    shutil.rmtree(prefix)
    shutil.copytree(tmp_path / "mended", prefix)  # their hosts have published them again
    assert (drained(lake, kind, prefix)["batches"], os.listdir(prefix)) == (sorted(why), [])
    assert ids(lake, kind) == [1, 2, 3, 4, *range(100, 100 + len(DAMAGE))]


def test_of_a_topic_too(lake: Lake, prefix: Path) -> None:
    make_topic_batch(prefix / "orders-1a2b", [Message(order(2))])
    (block,) = (prefix / "orders-1a2b").glob("*.zbus")
    flip(block)
    assert "the checksum of the bytes" in drained(lake, "delta", prefix)["damaged"]["orders-1a2b"]
    flip(block)
    assert drained(lake, "delta", prefix)["damaged"] == {}
    assert ids(lake, "delta") == [2]


def test_a_damaged_batch_that_the_table_has_is_removed_as_any_other(lake: Lake, prefix: Path) -> None:
    append_once(lake.session.range(1, 2), lake.name("delta"), "w1", format="delta")
    sound(prefix, 1, 2)
    flip(prefix / "w1" / SEGMENT)
    result = drained(lake, "delta", prefix)
    assert (result["batches"], result["removed"], result["damaged"]) == (["w2"], 2, {})
    assert ids(lake, "delta") == [1, 2]


def test_records_that_do_not_decode_or_a_schema_that_is_inferred_change_nothing(lake: Lake, prefix: Path) -> None:
    sound(prefix, 1, 2)
    make_batch(prefix / "w3", [b"not json", order(3)], batch_id="w3")
    flip(prefix / "w2" / SEGMENT)
    result = drained(lake, "delta", prefix, schema=None)
    assert (result["batches"], result["good"], result["bad"], [*result["damaged"]]) == (["w1", "w3"], 2, 1, ["w2"])
    assert ids(lake, "delta") == [1, 3]
    assert os.listdir(lake.place / "bad") == ["batch=w3"]


@pytest.mark.parametrize("point", ["looked", "staged", "before", "after", "removed"])
@KINDS
def test_a_kill_with_a_damaged_batch_there_is_made_good_by_the_next_drain(
    lake: Lake, drivers: list[OtherDriver], kind: str, point: str, prefix: Path, tmp_path: Path
) -> None:
    append_once(lake.session.range(0), lake.name(kind), "before", format=kind)
    why = damage(prefix, tmp_path / "mended")
    before = files(prefix)
    sound(prefix, 0, 1, 2, 3, 4)
    driver = drivers.pop()
    driver.drain(lake, kind, str(prefix), die=point)
    assert driver.result() is None
    assert driver.end() == -signal.SIGKILL
    committed = point in ("after", "removed")
    assert ids(lake, kind) == ([*range(5)] if committed else [])

    sound(prefix, 5)
    result = drained(lake, kind, prefix)
    assert result["batches"] == (["w5"] if committed else [f"w{number}" for number in range(6)])
    assert sorted(result["damaged"]) == sorted(why)
    assert (ids(lake, kind), files(prefix)) == ([*range(6)], before)


@KINDS
def test_of_three_drains_at_once_none_takes_what_another_removes_for_damaged(
    lake: Lake, drivers: list[OtherDriver], kind: str, prefix: Path, tmp_path: Path
) -> None:
    append_once(lake.session.range(0), lake.name(kind), "before", format=kind)
    why = damage(prefix, tmp_path / "mended")
    before = files(prefix)
    sound(prefix, *range(20))
    for driver in drivers[:3]:
        driver.drain(lake, kind, str(prefix))
    done = results(drivers[:3])
    assert sorted(batch for each in done for batch in each["batches"]) == sorted(f"w{number}" for number in range(20))
    for each in done:
        assert sorted(each["damaged"]) == sorted(why)
    assert (ids(lake, kind), files(prefix)) == ([*range(20)], before)


def test_what_is_gone_when_it_is_looked_at_is_not_damaged(lake: Lake, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody moves a batch away while the drain runs."""
    sound(prefix, 1, 2)
    look = published.sound

    def late(*arguments: Any) -> Any:
        shutil.rmtree(prefix / "w2", ignore_errors=True)
        return look(*arguments)

    monkeypatch.setattr(module.published, "sound", late)
    result = drained(lake, "delta", prefix)
    assert (result["batches"], result["damaged"]) == (["w1"], {})


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with proxied("lake") as server:
        yield server


def test_what_a_store_does_not_give_just_now_is_not_damaged(
    lake: Lake, proxy: Proxy, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {"endpoint_url": proxy.url, "config_kwargs": {"retries": {"max_attempts": 0}}}
    key, secret, _ = CREDENTIALS.values()  # the workers of this Spark began before
    options = {f"fs.{name}": json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    options |= {"fs.key": key, "fs.secret": secret}
    sound(prefix, 1, 2)
    for name, data in files(prefix).items():
        s3_client(proxy.url).put_object(Bucket="lake", Key=f"staged/{name}", Body=data)
    append_once(lake.session.range(0), lake.name("delta"), "before", format="delta")
    for name in manifest.MANIFEST, SEGMENT:
        proxy.reset()
        proxy.fails = f"staged/w1/{name}"
        with pytest.raises(Exception, match="so it says") as raised:
            drained(lake, "delta", "s3://lake/staged", read_options=options)
        assert name != manifest.MANIFEST or isinstance(raised.value, StoreError)
        assert ids(lake, "delta") == []
        assert len(published.complete("s3://lake/staged", given)) == 2
    proxy.reset()
    assert drained(lake, "delta", "s3://lake/staged", read_options=options)["damaged"] == {}
    assert ids(lake, "delta") == [1, 2]


def test_the_application_commits_all_others_and_then_fails(
    lake: Lake, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound(prefix, 1, 2)
    flip(prefix / "w2" / SEGMENT)
    monkeypatch.setattr(job.SparkSession.builder, "getOrCreate", lambda: lake.session)
    monkeypatch.setattr(type(lake.session), "stop", lambda self: None)
    place = json.dumps({"path": lake.name("delta"), "format": "delta"})
    arguments = [str(prefix), "--output", place, "--schema", "id BIGINT", "--result", str(tmp_path / "result")]
    try:
        assert job.application(arguments, "drain", drain) == job.DAMAGED == 3
    finally:
        lake.session.sparkContext.setLogLevel("OFF")
    told = capsys.readouterr()
    said = json.loads(told.out.splitlines()[-1].removeprefix("qewqew result: "))
    assert (said["batches"], [*said["damaged"]]) == (["w1"], ["w2"])
    assert json.loads((tmp_path / "result").read_text()) == said
    assert told.err.splitlines()[-1] == ("qewqew: error: 1 damaged batch(es) stay where they are, all others are committed: w2")
    assert ids(lake, "delta") == [1]
