"""What our own log knows is not given up for what a damaged or strange file of a reader says, or does not say."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import Corrupt, Topic, inspect_reader, repair_topic
from qewqew_core.formats import zbus
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic_session import TopicSession


def in_child(act: object, *arguments: object) -> None:
    pid = os.fork()
    if not pid:
        try:
            act(*arguments)  # type: ignore[operator]
        finally:
            os._exit(1)
    os.waitpid(pid, 0)


def flip_mask(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at, mask = zbus.mask_patch(zbus.DELETE_ON_EXIT)
    data[at : at + len(mask)] = mask
    path.write_bytes(data)


@pytest.mark.parametrize("end", ["append", "trim", "open the reader", "in use"])
def test_a_flipped_bit_of_an_rdx_deletes_no_reader(end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t"
    rdx = Path(topic_paths.rdx_of(str(path), "r"))
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        topic.append_many([b"0", b"1"])
        assert reader.lease("run", max_records=1) is not None
        if end == "in use":
            flip_mask(rdx)
    if end != "in use":
        flip_mask(rdx)
    for _ in range(2):
        with Topic(path, _files=NoSync()) as topic:
            if end == "trim":
                topic.trim()
            elif end == "append":
                topic.append(b"2")
            else:
                topic.reader("r").close()
    assert f"{rdx}, offset {zbus.mask_patch(0)[0]}: the file says that the reader is temporary, and its log" in caplog.text
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        assert [batch.key for batch in reader.batches()] == ["run"]
        assert reader.read().body == b"1"
        reader.keep()
        caplog.clear()
    with Topic(path, _files=NoSync()) as topic:
        topic.append(b"3")
        assert not caplog.text
        topic.reader("r", temporary=True).close()
        assert topic.readers() == []


def test_a_temporary_reader_that_was_opened_again_goes_with_its_batches(tmp_path: Path) -> None:
    """Also when log and .rdx were exchanged for new ones since."""
    with Topic(tmp_path / "t", _files=NoSync()) as topic:
        topic.append_many([b"0", b"1"])
        with topic.reader("r"):
            pass
        with topic.reader("r", temporary=True) as reader:
            assert reader.lease("run", max_records=1) is not None
            with topic.reader("r") as another:
                another.set_filter("a")
            reader._shared.rotate()
        assert topic.readers() == []


def leave_undecided(path: Path) -> None:
    """Commit what two readers have read, and die before they note it."""

    def die(*_: object) -> int:
        os._exit(0)

    TopicSession._finish = die  # type: ignore[method-assign]
    topic = Topic(path)
    readers = topic.reader("one"), topic.reader("two")
    session = topic.session()
    for reader in readers:
        assert session.read(reader).body == b"0"
    session.append(b"result")
    session.commit()


@pytest.mark.parametrize(
    ("file", "what"),
    [*product(("log", "rdx", "lock"), ("directory", "link")), ("log", "damaged"), ("log", "gone"), ("rdx", "gone")],
)
def test_a_commit_is_not_forgotten_while_a_reader_of_it_cannot_be_read(file: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Topic(path) as topic:
        topic.append_many([b"0", b"1"])
        for name in ("one", "two"):
            topic.reader(name).close()
    in_child(leave_undecided, path)
    stem = topic_paths.stem_of(str(path), "two")
    place = Path({"log": stem + topic_paths.LOG, "lock": stem + topic_paths.LOCK}.get(file, topic_paths.rdx_of(str(path), "two")))
    kept = place.read_bytes()
    place.unlink()
    if what == "damaged":
        place.write_bytes(kept[: len(kept) // 2] + bytes([kept[len(kept) // 2] ^ 255]) + kept[len(kept) // 2 + 1 :])
    elif what == "directory":
        place.mkdir()
    elif what == "link":
        place.symlink_to("/nowhere")
    for number in range(3):
        with Topic(path, log_bytes=1) as topic:
            topic.append(b"%d" % number)
    if place.is_dir() or place.is_symlink() or place.exists():
        place.rmdir() if place.is_dir() else place.unlink()
    place.write_bytes(kept)
    with Topic(path) as topic:
        for name in ("one", "two"):
            with topic.reader(name) as reader:
                assert [message.body for message in reader.read_many(9)][:2] == [b"1", b"result"], name
    assert repair_topic(path).damage == []


@pytest.mark.parametrize("bit", range(7))
def test_a_flipped_bit_in_the_length_of_a_filter_hides_no_message(bit: int, tmp_path: Path) -> None:
    path = tmp_path / "t"
    rdx = Path(topic_paths.rdx_of(str(path), "r"))
    with Topic(path, _files=NoSync()) as topic, topic.reader("r"):
        topic.append_many([b"0", b"1"])
    data = bytearray(rdx.read_bytes())
    data[zbus.FILTER_AT] ^= 1 << bit
    rdx.write_bytes(data)
    with pytest.raises(Corrupt, match=r"r\.rdx.*its filter has a zero byte"):
        inspect_reader(path, "r")
    with Topic(path, _files=NoSync()) as topic, pytest.raises(Corrupt, match=r"r\.rdx.*its filter has a zero byte"):
        topic.reader("r")
    repair_topic(path)
    with Topic(path, _files=NoSync()) as topic, topic.reader("r") as reader:
        assert [message.body for message in reader.read_many(10)] == [b"0", b"1"]
