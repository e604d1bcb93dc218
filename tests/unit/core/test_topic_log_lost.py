"""A log that somebody has removed, while it was closed or after a kill: whoever opens or looks is told, and nothing is changed.

Without it a topic looks like that of a zbus server, which has neither keys nor readers' logs.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from damage import tree
from disk import JournalDisk, NoSync, image
from refusal import refused
from zbus_cases import forget_log

from qewqew_core import Broken, Corrupt, Topic, inspect_reader, repair_topic
from qewqew_core.topic.topic_inspection import inspect_topic
from qewqew_core.topic.view import View


def fill(path: Path) -> None:
    """Five pages under keys; the reader has committed the first, and leased three messages of the next."""
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        for page in range(5):
            topic.append_many([b"%d-%d" % (page, number) for number in range(3)], key=f"page {page}")
        reader.commit(*reader.read_many(3))
        reader.lease("run", max_records=3)


def fill_and_die(path: Path) -> None:
    fill(path)
    if (pid := os.fork()) == 0:
        topic = Topic(path, _files=NoSync())
        topic.append_many([b"x" * 1000] * 300, key="page 5")  # more than the log carries
        topic.append_many([b"last"], key="page 6")
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture(params=[fill, fill_and_die], ids=["closed", "killed"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fill_in: Callable[[Path], None] = request.param
    fill_in(tmp_path / "t")
    return tmp_path / "t"


LOOKS: dict[str, Callable[[Path], object]] = {
    "open": Topic,
    "inspect": inspect_topic,
    "inspect a reader": lambda path: inspect_reader(path, "r"),
    "view": lambda path: View.of(NoSync(), str(path)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_opens_a_topic_without_its_log_or_looks_at_it_is_told(path: Path, look: str) -> None:
    log = path / "t.wal"
    log.unlink()
    for _ in range(2):
        with refused(path, Corrupt, r"the log of the topic is missing.*qewqew repair", log):
            LOOKS[look](path)


@pytest.mark.parametrize("command", [["verify"], ["stat"], ["check"], ["ls"]])
def test_the_command_line_says_so_too(path: Path, command: list[str]) -> None:
    (path / "t.wal").unlink()
    target = path.parent if command == ["ls"] else path
    result = run(*command, target)
    assert "the log of the topic is missing" in result.output + result.stderr


def test_an_open_topic_says_so_at_its_next_look(path: Path) -> None:
    with Topic(path, _files=NoSync()) as topic:
        (path / "t.wal").unlink()
        with refused(path, Corrupt, "the log of the topic is missing"):
            topic.verify()
        with pytest.raises(Corrupt, match="the log of the topic is missing"):
            topic.append(b"x")


def test_repair_goes_on_without_it_and_loses_no_message(path: Path) -> None:
    messages = inspect_topic(path)[0].messages
    (path / "t.wal").unlink()
    data = {name: content for name, content in tree(path).items() if name.startswith("data/") and name.endswith(".zbus")}
    report = repair_topic(path)
    assert report.records == messages
    assert "the log of the topic is missing" in str(report.damage[0])
    assert any("no key of an append is known" in note for note in report.notes)
    assert {name: content for name, content in tree(path).items() if name in data} == data
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        assert len(topic) == messages
        (batch,) = reader.batches()
        assert list(batch) == [b"1-0", b"1-1", b"1-2"]
        assert reader.read().body == b"2-0"
        assert topic.verify().ok
    assert repair_topic(path).ok


def test_what_nothing_says_was_committed_is_set_aside_by_repair(path: Path) -> None:
    """Where the log is lost, it may have said so."""
    (block,) = (path / "data").glob("*.zbus")
    with block.open("ab") as file:
        file.write(b"perhaps")
    (path / "t.wal").unlink()
    report = repair_topic(path)
    assert report.set_aside is not None
    assert [one.read_bytes() for one in Path(report.set_aside).iterdir()] == [b"perhaps"]


def test_the_log_of_a_reader_is_missed_and_repair_keeps_its_batches(path: Path) -> None:
    (path / "state" / "r.wal").unlink()
    with Topic(path, _files=NoSync()) as topic:
        with refused(path, Corrupt, "the log of the reader is missing"):
            topic.reader("r")
        assert any("the log of the reader is missing" in problem for problem in topic.verify().problems)
    with refused(path, Corrupt, "the log of the reader is missing"):
        inspect_reader(path, "r")
    report = repair_topic(path)
    assert any("has forgotten these batches" in note for note in report.notes)
    assert report.set_aside is not None
    assert (Path(report.set_aside) / "r.batches").is_dir()
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        assert reader.read().body == b"1-0"


def test_an_rdx_and_a_log_that_are_missing_together_are_not_a_reader_that_was_deleted(path: Path) -> None:
    (path / "state" / "r.wal").unlink()
    (path / "reader" / "r.rdx").unlink()
    with Topic(path, _files=NoSync()) as topic:
        with pytest.raises(Corrupt, match="the reader was not deleted"):
            topic.reader("r")
        assert topic.readers() == ["r"]
        topic.delete_reader("r")
        assert topic.readers() == []
        assert topic.reader("r").read().body == b"0-0"


@pytest.mark.parametrize("lost", ["t.lock", "state/r.lock"])
@pytest.mark.parametrize("how", ["removed", "emptied", "overwritten"])
def test_a_witness_that_is_lost_is_written_again_by_the_next_opening(path: Path, lost: str, how: str) -> None:
    file = path / lost
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(b"" if how == "emptied" else b"\xff" * 50)
    with Topic(path, _files=NoSync()) as topic, topic.reader("r"):
        pass
    file.with_suffix(".wal").unlink()
    with pytest.raises(Corrupt, match=r"log of the .* is missing"):
        Topic(path).reader("r")


def test_a_topic_of_a_zbus_server_opens_without_a_log(path: Path) -> None:
    forget_log(path)
    with Topic(path) as topic:
        assert topic.verify().ok


def test_a_copy_without_the_locks_opens(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy" / "t", ignore=shutil.ignore_patterns("*.lock"))
    with Topic(tmp_path / "copy" / "t") as topic, topic.reader("r") as reader:
        assert topic.append_many([b"again"], key="page 0") == 3
        assert len(reader.batches()) == 1


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_from_the_first_commit_on_a_power_cut_leaves_the_witness(tmp_path: Path, sync: str) -> None:
    """Whatever else it takes: the log that it leaves is missed when it is gone."""
    root, folder = tmp_path / "work", tmp_path / "image"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Topic(root / "t", sync=sync, _files=disk) as topic:  # type: ignore[arg-type]
        topic.append(b"first")
        topic_is_made = len(disk.calls)
        with topic.reader("r"):
            reader_is_made = len(disk.calls)
            topic.append(b"second")
    for stop in range(topic_is_made, len(disk.calls) + 1):
        image(disk.calls[:stop], str(root), folder, random.Random(stop))
        (folder / "t" / "t.wal").unlink()
        with pytest.raises(Corrupt, match="the log of the topic is missing"):
            Topic(folder / "t")
        shutil.rmtree(folder)
        if stop >= reader_is_made:
            image(disk.calls[:stop], str(root), folder, random.Random(stop))
            (folder / "t" / "state" / "r.wal").unlink()
            with Topic(folder / "t") as topic, pytest.raises(Corrupt, match="the log of the reader is missing"):
                topic.reader("r")
            shutil.rmtree(folder)


def test_a_repair_that_is_stopped_leaves_a_topic_that_only_repair_takes(tmp_path: Path) -> None:
    """The keys are in the log that it has set aside: no opening may begin another one without them."""
    (tmp_path / "made").mkdir()
    fill(tmp_path / "made" / "t")
    log = tmp_path / "made" / "t" / "t.wal"
    log.write_bytes(log.read_bytes()[:-1] + b"\xff")
    (tmp_path / "made" / "t" / "t.idx").write_bytes(b"")
    root, folder = tmp_path / "work", tmp_path / "image"
    shutil.copytree(tmp_path / "made", root)
    disk = JournalDisk(str(root))
    repair_topic(root / "t", _files=disk)
    for stop in range(disk.begin, len(disk.calls) + 1):
        image(disk.calls[:stop], str(root), folder, None)
        try:
            Topic(folder / "t").close()
        except Corrupt:
            repair_topic(folder / "t")
        with Topic(folder / "t") as topic:
            assert topic.append_many([b"again"], key="page 0") == 3, f"stopped after call {stop}"
            assert len(topic) == 15
        shutil.rmtree(folder)


def test_a_reader_whose_log_was_removed_while_it_is_open_was_not_deleted(path: Path) -> None:
    with Topic(path, _files=NoSync()) as topic:
        reader = topic.reader("r")
        (path / "state" / "r.wal").unlink()
        with pytest.raises(Broken, match="moved, removed or replaced"):
            reader.read()
        reader.close()
