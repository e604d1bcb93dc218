"""A reader's log that was lost, cut or exchanged is noticed, and `repair_topic` brings the reader back: nothing committed comes
again without a word, and nothing that was not committed is lost.

`docs/format/topics.md` says what cannot be told apart.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from disk import JournalDisk, NoSync, image
from stride import Every

from qewqew_core import Corrupt, Message, QewQewError, Topic, inspect_reader, repair_topic
from qewqew_core.disk import journal
from qewqew_core.disk.files import DISK
from qewqew_core.formats import zbus
from qewqew_core.limits import LIMITS
from qewqew_core.topic import reader_log
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.reader_inspection import seal_of

END = 20  # messages


def work(path: Path, sync: Literal["commit", "never"] = "commit") -> Topic:
    """Of the reader r 0 to 7 are committed, 8 and 9 leased, 10 acknowledged, 11 is in flight; of f, "even", 0 to 4."""
    topic = Topic(path, block_size=700, sync=sync, _files=NoSync())
    topic.append_many([Message(b"%d" % number * 9, "odd" if number % 2 else "even") for number in range(END)])
    reader = topic.reader("r")
    reader.commit(*reader.read_many(8))
    reader.lease("leased", max_records=2)
    batch = reader.lease("done", max_records=1)
    assert batch is not None
    batch.ack()
    filtered = topic.reader("f", "even")
    filtered.commit(*filtered.read_many(3))
    reader.read()
    _open.extend([reader, filtered])
    return topic


_open: list[Reader] = []


@pytest.fixture(params=["closed", "killed"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    topic = work(tmp_path / "made" / "t") if (tmp_path / "made").mkdir() is None else None
    assert topic is not None
    if request.param == "killed":
        shutil.copytree(tmp_path / "made", tmp_path / "work")
    while _open:
        _open.pop().close()
    topic.close()
    if request.param == "closed":
        shutil.copytree(tmp_path / "made", tmp_path / "work")
    return tmp_path / "work" / "t"


def delivered(path: Path, name: str) -> list[int]:
    """What comes by reading, and is in batches that are leased."""
    with Topic(path, _files=NoSync()) as topic, topic.reader(name, redeliver_after=None) as reader:
        read = [one.number for one in reader.read_many(100)]
        return sorted(read + [one.number for batch in reader.batches() for one in batch.messages()])


def expected(name: str) -> list[int]:
    return [8, 9, *range(11, END)] if name == "r" else [*range(6, END, 2)]


def refused(path: Path, name: str) -> str:
    """Whoever opens it is told, and whoever looks; nothing of it is changed, and the other reader works."""
    ours = [one for one in path.rglob(f"{name}.*") if one.is_file() and one.parent.name in ("reader", "state")]
    before = {one: one.read_bytes() for one in ours}
    with Topic(path, _files=NoSync()) as topic:
        with pytest.raises(Corrupt) as caught:
            topic.reader(name)
        with pytest.raises(Corrupt):
            inspect_reader(path, name)
        assert str(caught.value) in topic.verify().problems
        assert name in topic.readers()
    assert {one: one.read_bytes() for one in before} == before
    other = "f" if name == "r" else "r"
    assert delivered(path, other) == expected(other)
    return str(caught.value)


def test_what_was_not_committed_comes_and_nothing_else(path: Path) -> None:
    assert delivered(path, "r") == expected("r")
    assert delivered(path, "f") == expected("f")


def frames(log: Path) -> list[tuple[int, int]]:
    data = log.read_bytes()
    return [(one.start, one.kind) for one in journal.frames(data, journal.generation_of(data, reader_log.MAGIC, str(log)))]


@pytest.mark.parametrize("name", ["r", "f"])
def test_a_log_that_was_cut_anywhere_before_what_was_durable_is_noticed(path: Path, name: str, every: Every) -> None:
    log = path / "state" / f"{name}.wal"
    whole = log.read_bytes()
    durable = seal_of(DISK, str(log.with_suffix("")))
    assert durable is not None
    assert durable.end > frames(log)[-3][0], "the last that was durable is nearly all"
    starts = [start for start, _ in frames(log) if start < durable.end]
    for size in {*every(range(durable.end), quick=120, full=40), *every(starts, quick=4), durable.end - 1}:
        log.write_bytes(whole[:size])
        refused(path, name)
    log.write_bytes(whole[: durable.end])
    assert delivered(path, name) == expected(name)


def lose_log(path: Path) -> None:
    (path / "state" / "r.wal").unlink()


def cut_log(path: Path) -> None:
    log = path / "state" / "r.wal"
    os.truncate(log, frames(log)[3][0])


def exchange_log(path: Path) -> None:
    """Of another reader, which is whole."""
    shutil.copy(path / "state" / "f.wal", path / "state" / "r.wal")


@pytest.mark.parametrize("damage", [lose_log, cut_log, exchange_log])
def test_repair_brings_the_reader_back_at_the_first_message_that_was_not_committed(
    path: Path, damage: Callable[[Path], None]
) -> None:
    damage(path)
    problem = refused(path, "r")
    assert "qewqew repair" in problem
    report = repair_topic(path)
    assert problem in map(str, report.damage)
    assert report.set_aside is not None, "the batches, which no log knows any more, are kept"
    assert any(one.name == "r.batches" for one in Path(report.set_aside).iterdir())
    assert delivered(path, "r") == [*range(8, END)]  # 10 was acknowledged behind 8 and 9, which are not: it comes once more
    assert delivered(path, "f") == expected("f")
    assert repair_topic(path).ok


def test_an_old_copy_of_the_log_is_noticed(tmp_path: Path) -> None:
    """Put back beside newer files, when the log was exchanged for a shorter one since, or has grown."""
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "t"
    with work(path), _open.pop(), _open.pop():
        pass
    log = path / "state" / "r.wal"
    old = log.read_bytes()
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        reader.commit(*reader.read_many(3))
    new = log.read_bytes()
    log.write_bytes(old)
    with Topic(path) as topic, pytest.raises(Corrupt, match="the end of the reader's log is missing"):
        topic.reader("r")
    log.write_bytes(new)
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        with reader._engine.exclusive():
            reader._shared.rotate()
        reader.commit(*reader.read_many(3))
    log.write_bytes(new)
    with Topic(path) as topic, pytest.raises(Corrupt, match="not the latest log of the reader"):
        topic.reader("r")
    repair_topic(path)
    assert delivered(path, "r") == [*range(8, END)]  # 8 and 9 were leased, and are not done


def test_without_the_seal_the_rdx_tells_of_a_cut_log(path: Path) -> None:
    """As in a copy without the files that are locked."""
    log = path / "state" / "f.wal"
    first = next(start for start, kind in frames(log) if kind != 1)
    with log.open("r+b") as file:
        file.truncate(first)
    for lock in (path / "state").glob("*.lock"):
        lock.unlink()
    with Topic(path, _files=NoSync()) as topic, pytest.raises(Corrupt, match=r"its \.rdx says that everything before"):
        topic.reader("f")
    assert not repair_topic(path).ok
    assert delivered(path, "f") == expected("f")


def test_a_damaged_seal_is_none(path: Path) -> None:
    for data in (b"", b"\0" * 12, b"recovered\n", os.urandom(100)):
        (path / "state" / "r.lock").write_bytes(data)
        assert delivered(path, "r") == expected("r")


NO_SERVERS: dict[str, Callable[[Path], object]] = {  # what none leaves of an .rdx
    "missing": lambda rdx: rdx.unlink(),
    "short": lambda rdx: os.truncate(rdx, 7),
    "empty": lambda rdx: os.truncate(rdx, 0),
    "zeros": lambda rdx: rdx.write_bytes(bytes(zbus.READER_SIZE)),
}


@pytest.mark.parametrize("wound", NO_SERVERS)
def test_an_rdx_that_no_server_leaves_is_noticed_and_made_anew_by_the_log(path: Path, wound: str) -> None:
    """Before, zeros moved a closed reader back to its beginning, without its filter."""
    assert delivered(path, "f") == expected("f")  # and it is closed now
    NO_SERVERS[wound](path / "reader" / "f.rdx")
    refused(path, "f")
    report = repair_topic(path)
    assert not report.ok
    assert report.set_aside is None
    assert delivered(path, "f") == expected("f")
    with Topic(path, _files=NoSync()) as topic, topic.reader("f") as reader:
        assert reader.filter == "even"


@pytest.mark.parametrize("wound", [wound for wound in NO_SERVERS if wound != "missing"])
def test_a_log_that_was_not_closed_says_all_and_the_rdx_follows(tmp_path: Path, wound: str) -> None:
    with Topic(tmp_path / "t", _files=NoSync()) as topic, topic.reader("f", "even") as reader:
        topic.append_many([Message(b"%d" % number, "odd" if number % 2 else "even") for number in range(END)])
        reader.commit(*reader.read_many(3))
        shutil.copytree(tmp_path / "t", tmp_path / "killed" / "t")
    path = tmp_path / "killed" / "t"
    NO_SERVERS[wound](path / "reader" / "f.rdx")
    for _ in range(2):
        with Topic(path, _files=NoSync()) as topic, topic.reader("f") as reader:
            assert reader.filter == "even"
            assert [message.number for message in reader.read_many(2)] == [6, 8]


def test_a_reader_whose_rdx_is_missing_holds_blocks_back_and_can_be_deleted(path: Path) -> None:
    (path / "reader" / "r.rdx").unlink()
    with Topic(path, _files=NoSync(), max_bytes=1, block_size=700) as topic:
        with topic.reader("f") as reader:
            reader.commit(*reader.read_many(100))
        topic.append(b"new")
        topic.trim()
        assert topic.stats().first <= 8
        topic.delete_reader("r")
        assert topic.readers() == ["f"]
        topic.trim()
        assert topic.stats().first > 8
        assert not list((path / "state").glob("r.*"))
        with topic.reader("r") as again:
            assert again.read().number == topic.stats().first


def test_what_a_server_has_done_to_a_closed_reader_is_believed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "t"
    with work(path), _open.pop(), _open.pop():
        pass
    rdx = path / "reader" / "f.rdx"
    for number in (3, 15, 1):  # the place of the message with this number
        with Topic(path, _files=NoSync()) as topic, topic.reader("at", start=number) as reader:
            place = reader.position()
            topic.delete_reader("at")
        rdx.write_bytes(zbus.pack_position(place.block, place.offset) + rdx.read_bytes()[12:])
        for attempt in range(2):  # also if what opens it is killed
            shutil.copytree(tmp_path / "work", tmp_path / f"{number}.{attempt}")
            with Topic(tmp_path / f"{number}.{attempt}" / "t", _files=NoSync()) as topic, topic.reader("f") as reader:
                assert reader.read().number == number + number % 2
            if not attempt:
                topic = Topic(path, _files=NoSync())
                reader = topic.reader("f")
                shutil.rmtree(tmp_path / "work" / "killed", ignore_errors=True)
                shutil.copytree(path, tmp_path / "killed" / "t")
                reader.close()
                topic.close()
        with Topic(tmp_path / "killed" / "t", _files=NoSync()) as topic, topic.reader("f") as reader:
            assert reader.read().number == number + number % 2
        shutil.rmtree(tmp_path / "killed")


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_no_kill_and_no_power_cut_passes_for_damage(
    tmp_path: Path, sync: Literal["commit", "never"], monkeypatch: pytest.MonkeyPatch, every: Every
) -> None:
    """A reader is moved to and fro, its log cut back, closed, deleted and made again, and everything stopped after any call."""
    monkeypatch.setattr(LIMITS, "reader_log_bytes", 700)
    root = tmp_path / "work"
    root.mkdir()
    disk, luck = JournalDisk(str(root)), random.Random(sync)
    with Topic(root / "t", sync=sync, block_size=900, _files=disk) as topic:
        topic.append_many([Message(b"%d" % number * 9, "odd" if number % 2 else "even") for number in range(END)])
        begin = len(disk.calls)
        for step in range(60):
            with topic.reader("r", luck.choice([None, "odd", "even"])) as reader:
                for _ in range(luck.randrange(4)):
                    reader.commit(*reader.read_many(luck.randrange(1, 4)))
                    reader.read_many(2)
                if luck.random() < 0.5:
                    reader.seek(number=luck.randrange(END))
                if (batch := reader.lease(f"{step}", max_records=2)) is not None:
                    luck.choice([batch.ack, batch.nack, batch.put_back, batch.to_dead_letters])()
            if luck.random() < 0.1:
                topic.delete_reader("r")
    noticed = []
    for stop in every(range(begin, len(disk.calls)), quick=68, full=17):
        for fate in (None, random.Random(stop)):
            folder = tmp_path / "image"
            image(disk.calls[:stop], str(root), folder, fate)
            try:
                with Topic(folder / "t", sync=sync, _files=NoSync()) as topic:
                    with topic.reader("r") as reader:
                        reader.read_many(100)
                    assert topic.verify().problems == []
            except QewQewError as error:
                noticed.append((stop, fate is None, str(error)))
            shutil.rmtree(folder)
    assert noticed == []
