"""What opening knows of those that were served, repair knows too: nobody is told that nothing was stored, and stores it again.

A queue has stages whose requests a leader had put before it was killed; a topic has sessions that were committed before their
readers had noted it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import flip
from disk import JournalDisk, NoSync, image
from stride import Every
from test_group_commit import Waiting, led, requests, until

import qewqew_core.topic.topic_session
from qewqew_core import Corrupt, Queue, Topic, repair, repair_topic
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import DISK
from qewqew_core.queue import group_commit, paths
from qewqew_core.topic import topic_paths


@contextlib.contextmanager
def waiting(folder: Path) -> Iterator[None]:
    """The stages whose requests are there live: they hold their claims."""
    with Descriptors() as fds:
        for claim in {name.partition(".")[0] for name in requests(folder)}:
            fds.append(DISK.open(str(folder / "q.staged" / claim)))
            assert lock.whole(fds[-1])
        yield


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, int]]:
    """What a leader leaves that is killed before it says that it has served a request; and where frames begin in its log."""
    path, left = tmp_path / "live" / "q", tmp_path / "killed"
    path.parent.mkdir()
    at: dict[str, int] = {}
    finish = group_commit.finish
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(group_commit, "finish", lambda files, puts: later.append(lambda: finish(files, puts)))
    with Queue(path, chunk_size=200) as q, led(path):
        q.put_many([b"%d" % number * 20 for number in range(10)])
        follower = Waiting(path, [b"follower"], chunk_size=200)
        until(lambda: requests(path.parent))
        for name, act in {"before": lambda: q.put(b"before"), "served": q.serve, "behind": lambda: q.put(b"behind")}.items():
            at[name] = q._engine.log.end
            act()
        shutil.copytree(path.parent, left)
        for act in later:
            act()
        assert follower.done() == (1, 1)
    assert [name.rpartition(".")[2] for name in requests(left)] == ["taken"]
    return left, at


DAMAGE: dict[str, Callable[[Path, dict[str, int]], None]] = {
    "nothing": lambda folder, at: None,
    "the header": lambda folder, at: (folder / "q").write_bytes(b"\x75\x33"),
    "the pointers of a chunk": lambda folder, at: flip(folder / "q.30001", 6, 64),
    "the records of a chunk": lambda folder, at: flip(folder / "q.30001", 30),
    "the snapshot": lambda folder, at: flip(folder / ("q" + paths.LOG), 40),
    "the log before it": lambda folder, at: flip(folder / ("q" + paths.LOG), at["before"] + 20),
    "the log behind it": lambda folder, at: flip(folder / ("q" + paths.LOG), at["behind"] + 20),
}


def check_served(folder: Path) -> None:
    assert [name.rpartition(".")[2] for name in requests(folder)] == ["done"]
    with Queue(folder / "q") as q:
        assert list(q).count(b"follower") == 1
        assert [name.rpartition(".")[2] for name in requests(folder)] == ["done"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_repair_tells_the_stages_that_a_killed_leader_had_served(killed: tuple[Path, dict[str, int]], damage: str) -> None:
    folder, at = killed
    DAMAGE[damage](folder, at)
    with waiting(folder):
        repair(folder / "q", _files=NoSync())
        check_served(folder)


@pytest.mark.parametrize("damage", ["the pointers of a chunk", "the log before it"])
def test_so_does_one_that_is_stopped_anywhere_and_begun_again(
    killed: tuple[Path, dict[str, int]], tmp_path: Path, damage: str, every: Every
) -> None:
    folder, at = killed
    DAMAGE[damage](folder, at)
    disk = JournalDisk(str(folder))
    with waiting(folder):
        assert not repair(folder / "q", _files=disk).ok
    for stop in every(range(disk.begin, len(disk.calls) + 1), quick=5):
        stopped = tmp_path / "stopped"
        image(disk.calls[:stop], str(folder), stopped, None)
        with waiting(stopped):
            with contextlib.suppress(Corrupt):  # nobody is told that nothing was stored, by opening in between
                Queue(stopped / "q").close()
            repair(stopped / "q", _files=NoSync())
            check_served(stopped)
        shutil.rmtree(stopped)


# Topics: sessions


@pytest.fixture
def undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A topic whose process was killed after a session was committed and before its reader had noted that."""
    note, left = qewqew_core.topic.topic_session._note, tmp_path / "killed"

    def note_later(reader, session):
        topic.append(b"behind 1")
        topic.append(b"behind 2")
        shutil.copytree(tmp_path / "live", left)
        return note(reader, session)

    monkeypatch.setattr(qewqew_core.topic.topic_session, "_note", note_later)
    (tmp_path / "live").mkdir()
    with Topic(tmp_path / "live" / "t", block_size=700) as topic, topic.reader("r") as reader:
        topic.append_many([b"%d" % number * 20 for number in range(5)], key="key")
        with topic.session() as session:
            assert session.read(reader).number == 0
            session.append(b"made of it")
    return left / "t"


TOPIC_DAMAGE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "the index": lambda path: flip(Path(topic_paths.index_of(str(path))), 3),
    "no index": lambda path: Path(topic_paths.index_of(str(path))).unlink(),
    "the log": lambda path: flip(log := Path(topic_paths.log_of(str(path))), log.read_bytes().index(b"behind 1")),
}


@pytest.mark.parametrize("damage", TOPIC_DAMAGE)
def test_a_repair_of_a_topic_decides_its_sessions_as_opening_would(undecided: Path, damage: str) -> None:
    TOPIC_DAMAGE[damage](undecided)
    repair_topic(undecided, _files=NoSync())
    with Topic(undecided) as topic, topic.reader("r") as reader:
        assert [message.number for message in reader] == [1, 2, 3, 4, 5, 6, 7]
        assert topic.append_many([b"again"], key="key") == 5
        assert topic.verify().ok
