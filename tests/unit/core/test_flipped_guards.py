"""The stamp of a queue and the lock files of a topic only guard the log: that it is missing, old or cut off. What is wrong in
them alone changes nothing, and the next opening or commit writes them again (docs/format).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import run
from disk import NoSync
from stride import Every

from qewqew_core import BadPath, Queue, Topic, repair, repair_topic
from qewqew_core.queue import paths, stamp
from qewqew_core.topic import reader_log, topic_paths, witness


def make(kind: str, path: Path, crashed: Path) -> None:
    """A store with batches; and as it is if its process is killed."""
    with ExitStack() as opened:
        store = opened.enter_context(Queue(path, _files=NoSync()) if kind == "queue" else Topic(path, _files=NoSync()))
        source = store if isinstance(store, Queue) else opened.enter_context(store.reader("r"))
        (store.put_many if isinstance(store, Queue) else store.append_many)([b"x"] * 20, key="put")
        acked, _ = source.lease("acked", max_records=3), source.lease("leased", max_records=2)
        assert acked is not None
        acked.ack()
        if not isinstance(source, Queue):
            source.commit(*source.read_many(2))
        shutil.copytree(path.parent, crashed.parent)


def seen(kind: str, path: Path) -> list[object]:
    """What it holds, and whether what was put is stored again."""
    with ExitStack() as opened:
        store = opened.enter_context(Queue(path, _files=NoSync()) if kind == "queue" else Topic(path, _files=NoSync()))
        source = store if isinstance(store, Queue) else opened.enter_context(store.reader("r"))
        found: list[object] = [list(batch) for batch in source.batches()]
        if isinstance(store, Queue):
            return [*found, store.put_many([b"x"] * 20, key="put"), list(store), store.verify()]
        found += [store.append_many([b"x"] * 20, key="put"), [message.body for message in store], store.verify()]
        source.commit(*source.read_many(1))  # type: ignore[union-attr]  # which writes the seal again
        return found


def flipped(data: bytes) -> Iterator[bytes]:
    """Each byte with one bit that is wrong, and what a power cut may leave."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    yield bytes(len(data))
    yield data[:-1]
    yield data + b"\0"


def has_stamp(data: bytes) -> bool:
    return stamp.unpack(data[:20]) is not None


def has_witness(data: bytes) -> bool:
    return data.startswith(b"has log\n")


def has_seal(data: bytes) -> bool:
    return has_witness(data) and reader_log.unpack_seal(data[witness.SIZE :]) is not None


GUARDS = [
    ("queue", "s" + paths.STAMP, has_stamp),
    ("topic", topic_paths.lock_of("s"), has_witness),
    ("topic", topic_paths.stem_of("s", "r") + topic_paths.LOCK, has_seal),
]


@pytest.mark.parametrize("state", ["closed", "crashed"])
@pytest.mark.parametrize(("kind", "name", "is_whole"), GUARDS)
def test_what_is_wrong_in_a_guard_alone_changes_nothing_and_is_written_again(
    kind: str, name: str, is_whole: Callable[[bytes], bool], state: str, tmp_path: Path, every: Every
) -> None:
    (tmp_path / "closed").mkdir()
    make(kind, tmp_path / "closed" / "s", tmp_path / "crashed" / "s")
    original = tmp_path / state
    guard = (original / name).read_bytes()
    assert is_whole(guard)
    shutil.copytree(original, tmp_path / "untouched")
    expected = seen(kind, tmp_path / "untouched" / "s")
    for number, data in enumerate(every(flipped(guard), quick=8, full=4)):
        home = tmp_path / str(number)
        shutil.copytree(original, home)
        (home / name).write_bytes(data)
        assert run("check", home).exit_code == 0
        assert seen(kind, home / "s") == expected, number
        assert is_whole((home / name).read_bytes()), number
        assert (repair if kind == "queue" else repair_topic)(home / "s", _files=NoSync()).ok
        shutil.rmtree(home)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name, _ in GUARDS])
def test_a_guard_that_is_another_name_of_a_file_of_the_user_does_not_change_that_file(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    make(kind, tmp_path / "home" / "s", tmp_path / "crashed" / "s")
    (tmp_path / "thesis.txt").write_bytes(b"precious, and long enough for each of them")
    guard = tmp_path / "home" / name
    guard.unlink()
    guard.hardlink_to(tmp_path / "thesis.txt")
    try:
        seen(kind, tmp_path / "home" / "s")
    except BadPath as error:
        assert "a hard link to a file with other contents is in the way" in str(error)  # noqa: PT017
        assert kind == "topic"
        guard.unlink()
        seen(kind, tmp_path / "home" / "s")
    assert (tmp_path / "thesis.txt").read_bytes() == b"precious, and long enough for each of them"
