"""What only `repair_topic` mends: index, blocks, logs of readers. What it promises as `repair` does is in test_repair.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip, tree
from disk import NoSync
from stride import Every
from zbus_cases import forget_log

from qewqew_core import Batch, Corrupt, Message, QewQewError, Topic, repair_topic
from qewqew_core.formats import zbus


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three blocks, two readers: one in the middle, one that has leased."""
    made = tmp_path / "events"
    with Topic(made, block_size=1500) as topic:
        topic.append_many([Message(b"%d" % number, tag="a") for number in range(5)], key="first")
        for number in range(5, 20):
            topic.append(b"%d" % number, tag="b")
        with topic.reader("middle") as reader:
            reader.commit(*reader.read_many(7))
        with topic.reader("leases") as reader:
            assert reader.lease("key", max_records=3)
    return made


def bodies(path: Path) -> list[bytes]:
    with Topic(path) as topic:
        return [one.body for one in topic]


def test_a_damaged_log_is_set_aside_and_no_message_is_lost(path: Path) -> None:
    log = path / "events.wal"
    flip(log, 30)
    with pytest.raises(Corrupt, match=r"events\.wal"):
        Topic(path)
    report = repair_topic(path)
    assert len(report.damage) == 1
    assert "events.wal" in report.damage[0].path
    assert report.set_aside is not None
    assert (Path(report.set_aside) / "events.wal").is_file()
    assert bodies(path) == [b"%d" % number for number in range(20)]
    with Topic(path) as topic, topic.reader("middle") as reader:
        assert reader.read().number == 7


def test_other_files_among_the_blocks_are_left_alone(path: Path) -> None:
    others = ["backup.zbus", f"{'9' * 20}.zbus", f"{'1' * 21}.zbus", f"{'1' * 21}.sums", f"{'٣' * 20}.zbus", ".zbus"]
    for name in others:
        (path / "data" / name).write_bytes(b"not ours")
    flip(path / "events.wal", 30)
    assert len(repair_topic(path).damage) == 1
    assert bodies(path) == [b"%d" % number for number in range(20)]
    assert {(path / "data" / name).read_bytes() for name in others} == {b"not ours"}


def damage_behind_the_keys(path: Path) -> None:
    with Topic(path, block_size=1500) as topic:
        topic.append(b"20")
        topic.append(b"21")
    data = (path / "events.wal").read_bytes()
    place = data.index(b"21", data.rindex(b"20"))  # the body of the last message, in its frame
    flip(path / "events.wal", place)


def test_keys_before_the_damage_of_the_log_still_count(path: Path) -> None:
    damage_behind_the_keys(path)
    repair_topic(path)
    with Topic(path) as topic:
        assert topic.append_many([b"again"], key="first") == 5
        assert [one.body for one in topic] == [b"%d" % number for number in range(22)]


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "version"])
def test_an_index_is_made_anew_from_the_blocks(path: Path, how: str) -> None:
    index = path / "events.idx"
    acts: dict[str, Callable[[], object]] = {
        "missing": index.unlink,
        "empty": lambda: index.write_bytes(b""),
        "garbage": lambda: index.write_bytes(b"\xa5" * zbus.INDEX_SIZE),
        "version": lambda: flip(index, 3),
    }
    acts[how]()
    with pytest.raises(QewQewError):
        Topic(path)
    report = repair_topic(path)
    assert "index" in " ".join(map(str, report.damage))
    assert bodies(path) == [b"%d" % number for number in range(20)]
    with Topic(path) as topic:
        assert topic.append(b"20") == 20
        assert topic.verify().ok
        with topic.reader("leases") as reader:
            (batch,) = reader.batches()
            assert list(batch) == [b"0", b"1", b"2"]


def test_a_last_block_that_was_cut_loses_only_its_last_messages(path: Path) -> None:
    last = max((path / "data").glob("*.zbus"))
    os.truncate(last, last.stat().st_size - 1)
    forget_log(path)  # after a power cut
    with pytest.raises(Corrupt):
        Topic(path)
    report = repair_topic(path)
    assert report.damage[-1].bytes
    assert report.set_aside is not None
    assert len(list(Path(report.set_aside).iterdir())) >= 1
    assert bodies(path) == [b"%d" % number for number in range(19)]
    with Topic(path) as topic:
        assert topic.append(b"new") == 19
        assert topic.verify().ok


@pytest.mark.parametrize("log", ["log", "no log"])
@pytest.mark.parametrize("which", [0, 1])
def test_blocks_behind_one_that_is_lost_keep_their_numbers_so_readers_go_on_where_they_were(
    path: Path, which: int, log: str
) -> None:
    with Topic(path, block_size=1500) as topic, topic.reader("far") as reader:
        messages = reader.read_many(18)
        reader.commit(*messages)
        assert messages[-1].offset > int(max((path / "data").glob("*.zbus")).stem), "it is in the last block"
    blocks = sorted((path / "data").glob("*.zbus"))
    assert len(blocks) == 3
    blocks[which].unlink()
    if log == "no log":
        (path / "events.wal").unlink()
    assert blocks[which].name in " ".join(map(str, repair_topic(path).damage)) or which == 0
    with Topic(path, block_size=1500) as topic, topic.reader("far") as reader:
        assert [message.body for message in reader] == [b"18", b"19"]
        assert topic.append(b"new") == 20
        assert reader.read().body == b"new"
        if which == 1:
            with topic.reader("begin", start="oldest") as begin:
                assert begin.read().body == b"0"
                with pytest.raises(Corrupt, match=blocks[1].name):
                    list(begin)


def test_a_damaged_log_of_a_reader_is_set_aside_and_it_goes_on_at_its_rdx(path: Path) -> None:
    flip(path / "state" / "middle.wal", 40)
    with Topic(path) as topic, pytest.raises(Corrupt):
        topic.reader("middle")
    report = repair_topic(path)
    assert any("middle.wal" in problem for problem in map(str, report.damage))
    with Topic(path) as topic, topic.reader("middle") as reader:
        assert reader.read().number == 7


def test_a_reader_that_stands_where_no_message_begins_goes_back_to_one(path: Path) -> None:
    for suffix in (".wal", ".lock"):  # a reader of a zbus server
        (path / "state" / f"middle{suffix}").unlink()
    rdx = path / "reader" / "middle.rdx"
    data = rdx.read_bytes()
    rdx.write_bytes(zbus.pack_position(0, 300) + data[12:])
    with Topic(path) as topic, pytest.raises(Corrupt):
        topic.reader("middle")
    assert not repair_topic(path).ok
    with Topic(path) as topic, topic.reader("middle") as reader:
        assert reader.read().number == 1


def test_what_cannot_be_mended_is_said(tmp_path: Path) -> None:
    (tmp_path / "none" / "data").mkdir(parents=True)
    (tmp_path / "none" / "none.wal").write_bytes(b"junk")
    with pytest.raises(QewQewError):
        repair_topic(tmp_path / "none")
    with pytest.raises(QewQewError):
        repair_topic(tmp_path / "missing")


@pytest.mark.parametrize("damaged", [lambda path: flip(path / "events.idx", 3), damage_behind_the_keys], ids=["index", "log"])
def test_keys_outlive_a_repair_that_is_stopped(path: Path, damaged: Callable[[Path], None]) -> None:
    class Stopped(NoSync):
        def rename(self, source: str, target: str) -> None:
            if target.endswith(".idx"):
                raise OSError("stopped")
            super().rename(source, target)

    damaged(path)
    with pytest.raises(OSError, match="stopped"):
        repair_topic(path, _files=Stopped())
    repair_topic(path)
    with Topic(path) as topic:
        before = len(topic)
        assert topic.append_many([b"again"], key="first") == 5
        assert len(topic) == before >= 20


@pytest.mark.parametrize("size", [20, 400, 1040])
def test_messages_behind_an_index_that_was_cut_are_not_lost_in_silence(path: Path, size: int) -> None:
    os.truncate(path / "events.idx", size)
    assert not repair_topic(path).ok
    assert len(bodies(path)) == 20


@pytest.mark.parametrize("byte", range(12))
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_bit_of_the_place_where_a_closed_reader_stands_hides_no_message_and_repair_undoes_it(
    path: Path, byte: int, bit: int
) -> None:
    rdx = path / "reader" / "leases.rdx"
    good = rdx.read_bytes()
    with Topic(path) as topic, topic.reader("leases") as reader:
        expected = [(batch.key, list(batch)) for batch in reader.batches()]
    bad = bytearray(good)
    bad[byte] ^= 1 << bit
    rdx.write_bytes(bad)
    try:
        with Topic(path) as topic:
            topic.reader("leases").close()
    except Corrupt as error:
        assert error.path.endswith("leases.rdx")  # noqa: PT017
        assert rdx.read_bytes() == bad
        assert len(repair_topic(path).damage) == 1
        assert repair_topic(path).ok
        assert rdx.read_bytes() == good
    else:  # where a server may have moved it: to the beginning of another message, or of the block behind the last
        block, offset = zbus.unpack_position(bytes(bad))
        assert block in range(4)
        assert offset in {0, *range(0, 1500, 205), *range(0, 1500, 206)}
        return
    with Topic(path) as topic, topic.reader("leases") as reader:
        assert [(batch.key, list(batch)) for batch in reader.batches()] == expected
        assert [message.number for message in reader.read_many(99)] == list(range(3, 20))


@pytest.mark.parametrize("byte", range(8, 20))
def test_an_entry_of_the_index_that_opening_does_not_look_at_is_made_anew_too(path: Path, byte: int) -> None:
    index = path / "events.idx"
    flip(index, zbus.entry_at(0) + byte)
    with pytest.raises(Corrupt):
        bodies(path)
    assert len(repair_topic(path).damage) == 1
    assert repair_topic(path).ok
    assert bodies(path) == [b"%d" % number for number in range(20)]
    with Topic(path) as topic, topic.reader("middle") as reader, topic.reader("leases") as leases:
        assert [message.number for message in reader.read_many(99)] == list(range(7, 20))
        assert [list(batch) for batch in leases.batches()] == [[b"0", b"1", b"2"]]
        assert topic.append_many([b"again"], key="first") == 5


def test_a_manifest_is_made_anew_by_the_readers_log_wherever_it_is_damaged(tmp_path: Path, every: Every) -> None:
    """Of a leased batch, of one that is leased again, and of a dead one; also where it, or its whole directory, is missing."""
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    whole.mkdir()
    with Topic(whole / "t", block_size=700) as topic, topic.reader("r", filter="a") as reader:
        topic.append_many([Message(b"x" * number, tag="a" if number % 3 else "b") for number in range(60)])
        for key in "leased", "again", "dead":
            batch = reader.lease(key, max_records=8)
            assert batch is not None
            if key == "again":
                batch.nack()
                assert reader.lease(key)
        batch.to_dead_letters("a reason")
        expected = {batch.id: [message.body for message in batch.messages()] for batch in (*reader.batches(), *reader.dead())}
    manifests = [path.relative_to(whole) for path in sorted(whole.glob("t/state/r.*/*/manifest.json"))]
    assert len(manifests) == len(expected) == 3
    places = [(path, at) for path in manifests for at in (None, -1, *range((whole / path).stat().st_size))]
    for path, at in every(places, quick=32, full=8):
        shutil.copytree(whole, copy)
        if at is None:
            shutil.rmtree((copy / path).parent)
        elif at < 0:
            (copy / path).unlink()
        else:
            flip(copy / path, at)
        repair_topic(copy / "t")
        with Topic(copy / "t") as topic, topic.reader("r") as reader:
            found = {batch.id: [message.body for message in batch.messages()] for batch in (*reader.batches(), *reader.dead())}
            assert found == expected, f"{path} at {at}"
            assert topic.verify().ok, f"{path} at {at}"
        shutil.rmtree(copy)


def test_a_manifest_whose_messages_are_gone_is_set_aside_with_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Topic(path, block_size=400, max_records=5, slow_readers="move") as topic, topic.reader("r") as reader:
        topic.append_many([b"x"] * 3)
        batch = reader.lease("key")
        assert batch is not None
        batch.to_dead_letters("it holds no block")
        for _ in range(20):
            topic.append(b"y")
        topic.trim()
        assert topic.stats().first >= 3
    (manifest,) = path.glob("state/r.dead/*/manifest.json")
    flip(manifest, 5)
    damaged = manifest.read_bytes()
    report = repair_topic(path)
    (found,) = report.damage
    assert f"batch {batch.id} (dead, key 'key') cannot be read" in found.what
    assert found.records == 3
    assert report.set_aside is not None
    assert (Path(report.set_aside) / batch.id / "manifest.json").read_bytes() == damaged
    with Topic(path) as topic, topic.reader("r") as reader:
        assert topic.verify().ok
        assert reader.dead() == []


ENDS: dict[str, Callable[[Batch], object]] = {
    "leased": lambda batch: None,
    "returned": lambda batch: batch.nack(),
    "dead": lambda batch: batch.to_dead_letters("bad"),
    "acked": lambda batch: batch.ack(),
}
WOUNDS: dict[str, Callable[[Path], object]] = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 3),
    "flipped": lambda path: flip(path, 100),
    "missing": lambda path: path.unlink(),
}
BODIES = [b"%03d" % number + b"x" * 50 for number in range(20)]  # in two blocks; 15 of them are in the batch


def with_a_batch(folder: Path, state: str) -> tuple[Path, Path]:
    """A topic with such a batch, whose files are copies, as after a restore; and the second file of the batch."""
    (folder / "made").mkdir()
    with Topic(folder / "made" / "t", block_size=1000) as topic, topic.reader("r") as reader:
        topic.append_many(BODIES[:10])
        topic.append_many(BODIES[10:])
        batch = reader.lease("key", max_records=15)
        assert batch is not None
        ENDS[state](batch)
    shutil.copytree(folder / "made", folder / "copy")
    file = sorted((folder / "copy" / "t").glob(f"state/r.*/{batch.id}/*.zbus"))[-1]
    return folder / "copy" / "t", file


@pytest.mark.parametrize("wound", WOUNDS)
@pytest.mark.parametrize("state", ENDS)
def test_a_damaged_file_of_a_batch_is_replaced_by_the_block(tmp_path: Path, state: str, wound: str) -> None:
    path, file = with_a_batch(tmp_path, state)
    WOUNDS[wound](file)
    report = repair_topic(path)
    assert [(damage.path, damage.records) for damage in report.damage] == [(str(file), 0)]
    assert (report.set_aside is None) == (wound == "missing")
    assert repair_topic(path).ok
    with Topic(path) as topic, topic.reader("r") as reader:
        assert topic.verify().problems == []
        (batch,) = [*reader.batches(), *reader.dead(), *reader.acknowledged()]
        assert (batch.state, [message.body for message in batch.messages()]) == (state, BODIES[:15])


@pytest.mark.parametrize("state", ENDS)
def test_a_batch_that_nobody_can_read_is_set_aside_and_the_reader_goes_on(tmp_path: Path, state: str) -> None:
    """Before, each of its leases raised, for ever, and a repair changed nothing."""
    path, file = with_a_batch(tmp_path, state)
    os.truncate(file, 0)
    flip(path / "data" / file.name, 257 * 2 + 200)  # the length of the third message
    report = repair_topic(path)
    (damage,) = [one for one in report.damage if "batch" in one.what]
    assert f"batch {file.parent.name} ({state}, key 'key') cannot be read" in damage.what
    assert report.set_aside is not None
    assert (Path(report.set_aside) / file.parent.name / "manifest.json").exists()
    with Topic(path, block_size=1000) as topic, topic.reader("r") as reader:
        assert (reader.batches(), reader.dead(), reader.acknowledged()) == ([], [], [])
        assert all(file.name in problem and "batches" not in problem for problem in topic.verify().problems)
        if state in ("leased", "returned"):
            assert [message.body for message in reader.read_many(10)] == BODIES[:10]
        topic.append(b"new")
        reader.seek(number=20)
        batch = reader.lease("next")
        assert batch is not None
        assert [message.body for message in batch.messages()] == [b"new"]


@pytest.mark.parametrize("more", [0, 3, 40], ids=["nothing since", "fewer since", "more since"])
@pytest.mark.parametrize("state", ENDS)
def test_a_batch_whose_messages_a_disk_has_lost_is_set_aside_and_the_reader_goes_on(
    tmp_path: Path, state: str, more: int
) -> None:
    """The topic is as before they were appended; others may have their numbers since."""
    path = tmp_path / "t"
    with Topic(path) as topic, topic.reader("r") as reader:
        topic.append_many(BODIES[:5])
        reader.commit(*reader.read_many(5))
    shutil.copytree(path, tmp_path / "before")
    with Topic(path) as topic, topic.reader("r") as reader:
        topic.append_many(BODIES[5:])
        batch = reader.lease("key")
        assert batch is not None
        ENDS[state](batch)
    for name in ("data", "t.idx", "t.wal"):
        shutil.rmtree(path / name) if name == "data" else (path / name).unlink()
        (shutil.copytree if name == "data" else shutil.copy)(tmp_path / "before" / name, path / name)
    (file,) = path.glob("state/r.*/*/*.zbus")
    os.truncate(file, 257 * 5)
    with Topic(path) as topic:
        topic.append_many([b"since %d" % number for number in range(more)])
    report = repair_topic(path)
    (damage,) = [one for one in report.damage if "batch" in one.what]
    assert batch.id in damage.what
    with Topic(path) as topic, topic.reader("r") as reader:
        assert topic.verify().problems == []
        assert (reader.batches(), reader.dead(), reader.acknowledged()) == ([], [], [])
        topic.append(b"new")
        again = reader.lease("next")
        assert again is not None
        found = [message.body for message in again.messages()]
        assert found[-1] == b"new"
        if state in ("leased", "returned"):
            assert found == [*(b"since %d" % number for number in range(more)), b"new"]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("before", [1, 5])  # in a block that goes on, and several
def test_a_log_and_an_index_that_are_older_than_the_blocks_are_refused_and_a_repair_finds_all(
    tmp_path: Path, before: int, killed: bool
) -> None:
    path = tmp_path / "t"

    def own_files() -> dict[str, bytes]:
        return {name: (path / name).read_bytes() for name in ("t.idx", "t.wal")}

    with Topic(path, block_size=700) as topic:
        topic.append_many([b"%d" % number for number in range(before)])
        old = own_files()
    if not killed:
        old = own_files()
    with Topic(path, block_size=700) as topic, topic.reader("r") as reader:
        for number in range(before, 20):
            topic.append(b"%d" % number)
        assert len(reader.read_many(12)) == 12
        reader.commit()
    for name, data in old.items():
        (path / name).write_bytes(data)
    there = tree(path)
    with pytest.raises(Corrupt, match="the log and the index are older than the blocks"):
        Topic(path)
    assert tree(path) == there | {"t.lock": tree(path)["t.lock"]}  # which does not say any more that the files agree
    assert repair_topic(path).damage
    with Topic(path) as topic:
        assert topic.verify().ok
        with topic.reader("all") as reader:
            assert [message.body for message in reader.read_many(100)] == [b"%d" % number for number in range(20)]
        with topic.reader("r") as reader:
            assert [message.body for message in reader.read_many(100)] == [b"%d" % number for number in range(12, 20)]


def test_zeros_in_the_place_of_a_block_are_no_messages(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Topic(path) as topic:
        topic.append_many([b"%d" % number * 30 for number in range(60)])
    (block,) = path.glob("data/*.zbus")
    (path / "t.idx").rename(tmp_path / "x")
    block.rename(path / "t.idx")
    (tmp_path / "x").rename(block)
    assert repair_topic(path).damage
    with Topic(path) as topic, topic.reader("r") as reader:
        assert reader.read_many(10_000) == []
