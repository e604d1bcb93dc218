"""What a topic and its readers make under another name first, or remove last: whoever is killed in the middle leaves nothing for
ever, and what a living process is making stays.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from stride import Every

from qewqew_core import Locked, Message, Topic
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.topic.reader_inspection import look

BASE = "00000000000000000000"
WRITERS = ("t.idx.tmp", "t.wal.tmp", f"data/{BASE}.sums.tmp")
READERS = ("reader/x.rdx.tmp", "state/x.wal.tmp")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("r") as reader:
        topic.append_many([b"0", b"1", b"2"])
        assert reader.lease("key", max_records=1) is not None
    return tmp_path / "t"


def plant(path: Path, *names: str) -> list[Path]:
    for name in names:
        (path / name).write_bytes(b"half of what was to be")
    return [path / name for name in names]


def there(files: list[Path]) -> list[str]:
    return [one.name for one in files if one.exists()]


@pytest.mark.parametrize("name", [*WRITERS, *READERS, "reader/r.rdx.tmp", "state/r.wal.tmp", "state/12-1.spill"])
def test_what_a_killed_process_was_making_goes_with_the_next_opening(path: Path, name: str) -> None:
    planted = plant(path, name)
    with Topic(path, _files=NoSync()) as topic:
        assert there(planted) == []
        plant(path, name)
        topic.append(b"3")  # takes the lock of the writer
        assert there(planted) == []
        assert not (path / "state" / "x.lock").exists()
        with topic.reader("r") as reader:
            assert [one.body for one in reader.read_many(9)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("name", ["reader/r.rdx.tmp", "state/r.wal.tmp", "state/r.batches/{batch}/manifest.json.tmp"])
def test_what_a_killed_consumer_was_making_goes_when_its_reader_is_used(path: Path, name: str) -> None:
    with Topic(path, _files=NoSync()) as topic:
        topic.append(b"3")  # the lock of the writer is taken already
        (batch,) = [one.name for one in (path / "state" / "r.batches").iterdir()]
        planted = plant(path, name.format(batch=batch))
        with topic.reader("r") as reader:
            assert [list(one) for one in reader.batches()] == [[b"0"]]
            assert there(planted) == []


def test_what_a_living_writer_is_making_stays(path: Path) -> None:
    with Topic(path, _files=NoSync()) as topic:
        topic.append(b"3")
        planted = plant(path, *WRITERS)
        with Topic(path, lock_timeout=0, _files=NoSync()) as other, pytest.raises(Locked):
            other.append(b"refused")
        assert len(there(planted)) == len(WRITERS)


@contextmanager
def in_a_call(path: Path, name: str) -> Iterator[None]:
    """Another process is making this reader, or is in a call of it."""
    fd = os.open(path / "state" / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert lock.take(fd, 0, 1)
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["x", "r"])
def test_what_a_living_consumer_is_making_stays(path: Path, name: str) -> None:
    with in_a_call(path, name):
        planted = plant(path, f"reader/{name}.rdx.tmp", f"state/{name}.wal.tmp")
        with Topic(path, _files=NoSync()) as topic:
            topic.append(b"3")
        assert len(there(planted)) == 2
        assert (path / "state" / f"{name}.lock").exists()
    Topic(path, _files=NoSync()).close()
    assert there(planted) == []


def test_what_a_living_session_has_spilled_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a writer begins in the moment in which its file has a name."""
    monkeypatch.setattr(LIMITS, "topic_spill_bytes", 10)

    class Slow(NoSync):
        def open(self, path: str, *, new: bool = False) -> int:
            fd = super().open(path, new=new)
            if path.endswith(".spill"):
                Topic(os.path.dirname(os.path.dirname(path)), _files=NoSync()).close()
                assert not os.path.exists(path)
            return fd

    with Topic(path, _files=Slow()) as topic, topic.session() as session:
        session.append_many([b"x" * 50])
        session.append_many([b"y" * 50])
        session.append_many([b"z" * 50])
        assert session.commit() == 3
        assert [one.body for one in topic][3:] == [b"x" * 50, b"y" * 50, b"z" * 50]


@pytest.mark.parametrize("what", ["make", "delete"])
def test_a_reader_that_was_half_made_or_half_deleted_leaves_nothing(tmp_path: Path, what: str, every: Every) -> None:
    """Wherever it was stopped: with the next opening it is there, whole, or nothing of it is."""
    root = tmp_path / "work"
    root.mkdir()
    with Topic(root / "t", _files=NoSync()) as topic:
        topic.append_many([b"0", b"1", b"2"])
        if what == "delete":
            with topic.reader("x") as reader:
                for key in ("dead", "leased"):
                    batch = reader.lease(key, max_records=1)
                    if batch is not None and key == "dead":
                        batch.to_dead_letters()
        disk = JournalDisk(str(root))
        topic.files = disk
        if what == "delete":
            topic.delete_reader("x")
        else:
            topic.reader("x").close()
    outcomes = set()
    for stop in every(range(disk.begin, len(disk.calls) + 1), quick=5):
        for fate in (None, *map(random.Random, range(6))):
            folder = tmp_path / "image"
            image(disk.calls[:stop], str(root), folder, fate)
            with Topic(folder / "t", _files=NoSync()) as topic:
                left = sorted(one.name for home in ("reader", "state") for one in (folder / "t" / home).iterdir())
                assert bool(left) == (topic.readers() == ["x"]), f"stopped after call {stop}: {left}"
                with topic.reader("x") as reader:
                    found = [one.number for one in reader.read_many(9)]
                    assert found == ([2] if reader.batches() or reader.dead() else [0, 1, 2]), f"stopped after call {stop}"
                outcomes.add(bool(left))
            shutil.rmtree(folder)
    assert outcomes == {True, False}


# A reader is made with its filter


@pytest.mark.parametrize("temporary", [False, True])
def test_a_reader_is_there_with_its_filter_or_not_at_all(tmp_path: Path, temporary: bool, every: Every) -> None:
    """Stopped after any call of making it; then it is opened without naming a filter, as a consumer that comes later does."""
    root = tmp_path / "work"
    root.mkdir()
    with Topic(root / "t", _files=NoSync()) as topic:
        topic.append_many([Message(b"0", "eu.paid"), Message(b"1", "us.paid"), Message(b"2", "eu.new")])
        disk = JournalDisk(str(root))
        topic.files = disk
        topic.reader("eu", "eu.*", start=1, temporary=temporary)
        calls = list(disk.calls)
    outcomes = set()
    for stop in every(range(disk.begin, len(calls) + 1), quick=5):
        for fate in (None, *map(random.Random, range(6))):
            folder = tmp_path / "image"
            image(calls[:stop], str(root), folder, fate)
            with Topic(folder / "t", _files=NoSync()) as topic:
                outcomes.add(there_ := topic.readers() == ["eu"])
                if there_:
                    state = look(topic.files, topic.path, "eu")
                    assert state is None or state.filter == "eu.*"
                    with topic.reader("eu") as reader:
                        assert reader.filter == "eu.*", f"stopped after call {stop} of {len(calls)}"
                        assert [one.body for one in reader] == [b"2"]
                    assert (topic.readers() == []) == temporary
            shutil.rmtree(folder)
    assert outcomes == {True, False}


def test_a_process_that_is_killed_while_it_makes_a_reader_leaves_none_without_its_filter(tmp_path: Path) -> None:
    with Topic(tmp_path / "t") as topic:
        topic.append_many([Message(b"0", "us"), Message(b"1", "eu")])
    program = """if True:
        import os, sys
        from qewqew_core import Topic
        from qewqew_core.disk.files import Files
        class Dies(Files):
            def sync_directory(self, path):
                if path.endswith("reader") and os.path.exists(path + "/eu.rdx"):
                    os._exit(9)
                super().sync_directory(path)
        Topic(sys.argv[1], _files=Dies()).reader("eu", "eu")
    """
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "t"], check=False).returncode == 9
    with Topic(tmp_path / "t") as topic, topic.reader("eu") as reader:
        assert [one.body for one in reader] == [b"1"]


@pytest.mark.parametrize("byte", [0xFF, 0x55, 0])
def test_a_reader_whose_rdx_says_nothing_that_can_be_keeps_nobody_from_appending(tmp_path, byte):
    with Topic(tmp_path / "t") as topic:
        topic.append_many([b"%d" % number for number in range(20)])
        for name in ("r1", "r2"):
            with topic.reader(name) as reader:
                reader.commit(reader.read())
    (tmp_path / "t/reader/r1.rdx").write_bytes(bytes([byte]) * 5000)
    with Topic(tmp_path / "t") as topic:
        assert topic.append(b"20") == 20
        with topic.reader("r2") as reader:
            assert [message.body for message in reader.read_many(30)] == [b"%d" % number for number in range(1, 21)]


def test_a_block_that_retention_removes_while_it_is_leased_is_in_the_batch(tmp_path):
    class Removing(Files):
        def link(self, source, target):
            super().link(source, target)
            os.unlink(source)

    with Topic(tmp_path / "t", block_size=4000) as topic:
        topic.append_many([b"%d" % number * 20 for number in range(100)])
    with Topic(tmp_path / "t", _files=Removing()) as topic, topic.reader("r") as reader:
        batch = reader.lease("key", max_records=5)
        assert [bytes(body) for body in batch] == [b"%d" % number * 20 for number in range(5)]
        batch.ack()
