"""What earlier versions have written opens, says the same, and goes on. See tests/data/earlier/README.md."""

from __future__ import annotations

import random
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
from disk import JournalDisk, image

from qewqew_core import Queue, Topic, inspect, manifest

EARLIER = Path(__file__).parents[2] / "data" / "earlier"
sys.path.insert(0, str(EARLIER))
from make import message  # noqa: E402

VERSIONS = sorted(file.name.removesuffix(".tar.gz") for file in EARLIER.glob("*.tar.gz"))
RECORDS = [b"record %02d " % number + b"x" * number for number in range(40)]


HAD_NO_TOPICS = ("2026-11-20-0402ae8", "2026-11-20-c7b40cd")


def unpack(version: str, tmp_path: Path) -> Path:
    with tarfile.open(EARLIER / f"{version}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def batch_records(path: str) -> list[bytes]:
    body, directory = manifest.load(path), str(Path(path).parent)
    parts = (part for segment in body.segments for part in manifest.read_records(directory, body, segment))
    return [getattr(record, "body", record) for part in parts for record in part]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_queue_of_an_earlier_version_goes_on(version: str, end: str, tmp_path: Path) -> None:
    path = unpack(version, tmp_path) / end / "queue"
    seen = inspect(path)
    assert (seen.records, seen.leased, seen.returned, seen.dead) == (20, 1, 1, 1)
    with Queue(path, chunk_size=300) as queue:
        assert queue.verify().ok
        assert queue.put_many([b"not again"], key="first") == 30  # what it put then
        leased, returned = queue.lease("leased"), queue.lease("returned")
        assert leased is not None
        assert returned is not None
        assert (leased.attempt, returned.attempt) == (1, 2)
        (dead,) = queue.dead()
        assert dead.reason == "cannot be parsed"
        found = [batch_records(each.manifest_path) for each in (leased, dead, returned)]
        assert found == [RECORDS[8:12], RECORDS[12:16], RECORDS[16:20]]
        for batch in (leased, returned):
            batch.ack()
        dead.return_to_queue()
        again = queue.lease("again", max_records=1)
        assert again is not None
        assert batch_records(again.manifest_path) == RECORDS[12:16]
        again.ack()
        queue.put(b"new")
        assert queue.get_many(100) == [*RECORDS[20:], b"new"]
        assert queue.verify().ok


def held(queue: Queue) -> list[object]:
    batches = [*queue.batches(), *queue.dead()]
    assert queue.verify().ok
    return [list(queue), *((batch.id, batch.state, batch.attempt, batch_records(batch.manifest_path)) for batch in batches)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_a_queue_of_an_earlier_version_that_is_stopped_while_it_is_opened_first_loses_nothing(
    version: str, power: bool, tmp_path: Path
) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    for file in (unpack(version, tmp_path) / "killed").glob("queue*"):
        file.rename(home / file.name)
    disk = JournalDisk(str(home))
    with Queue(home / "queue", chunk_size=300, _files=disk) as queue:
        expected = held(queue)
    assert len(disk.calls) > disk.begin + 5
    for stop in range(disk.begin, len(disk.calls) + 1):
        for chance in range(5 if power else 1):
            image(disk.calls[:stop], str(home), copy, random.Random(f"{stop}.{chance}") if power else None)
            assert inspect(copy / "queue").records == 20
            with Queue(copy / "queue", chunk_size=300) as queue:
                assert held(queue) == expected, f"stopped after call {stop} of {len(disk.calls)}, chance {chance}"
            shutil.rmtree(copy)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_batch_that_an_earlier_version_has_put_back_is_at_the_front(version: str, end: str, tmp_path: Path) -> None:
    with Queue(unpack(version, tmp_path) / end / "put-back", chunk_size=300) as queue:
        assert queue.get_many(100) == [b"record %02d" % number for number in range(2, 13)]


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in HAD_NO_TOPICS])
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_topic_of_an_earlier_version_goes_on(version: str, end: str, tmp_path: Path) -> None:
    path = unpack(version, tmp_path) / end / "topic"
    expected = [message(number) for number in range(40)]
    with Topic(path, block_size=1000) as topic:
        assert topic.verify().ok
        assert topic.append_many([message(0)], key="first") == 30
        with topic.reader("all") as every, topic.reader("odd") as odd:
            batch = every.lease("leased")
            assert batch is not None
            assert batch_records(batch.manifest_path) == [each.body for each in expected[3:7]]
            batch.ack()
            rest = every.read_many(100)
            assert [(each.body, each.tag) for each in rest] == [(each.body, each.tag) for each in expected[7:]]
            assert odd.filter == "odd"
            assert [each.body for each in odd.read_many(100)] == [each.body for each in expected[9::2]]
            every.commit(*rest)
            topic.append(b"new", tag="odd")
            assert (every.read().body, odd.read().body) == (b"new", b"new")
        assert topic.verify().ok
