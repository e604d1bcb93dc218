"""What the original makes of a queue that ours has closed, or handed over, where its files look like damage at first sight.

The shapes are those of queues that the real library left, 29,117 turns of it.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import tree
from disk import NoSync
from test_java_states import Original

from qewqew_core import Corrupt, Queue, inspect, repair
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files

SIZE = 64  # of a chunk: two of these records fit
ENDS = ["closed", "handed over"]


def numbered(begin: int, count: int) -> list[bytes]:
    """Records of different lengths, each of them once."""
    return [b"%03d" % number * (5 + number % 3) for number in range(begin, begin + count)]


@pytest.fixture
def end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ours ends: it hands over where somebody waits, who then does not come."""
    monkeypatch.setattr(lock, "is_awaited", lambda fd: request.param == "handed over")
    return str(request.param)


both = pytest.mark.parametrize("end", ENDS, indirect=True)


def ours(path: Path, records: list[bytes]) -> None:
    with Queue(path, chunk_size=SIZE, _files=NoSync()) as q:
        q.put_many(records)


def original(path: Path, take: int | None, put: list[bytes]) -> list[bytes]:
    """The original takes so many (None: all) and puts these, in one session; returns what it took."""
    java = Original(path, SIZE)
    taken = []
    while java.ids and (take is None or len(taken) < take):
        taken.append(java.dequeue())
        if len(java.ids) == 1 and int.from_bytes(java.file(java.ids[0]).read_bytes()[4:8]) == 10:
            break
    for record in put:
        java.enqueue(record)
    java.close()
    return taken


def found(path: Path) -> list[bytes]:
    """What ours finds: without the lock, and when it opens a queue; nothing is wrong, and nothing to be repaired."""
    looked = inspect(path).records
    copy = shutil.copytree(path.parent, path.parent.with_name("repaired")) / path.name
    assert repair(copy, _files=NoSync()).ok
    shutil.rmtree(copy.parent)
    with Queue(path, chunk_size=SIZE, _files=NoSync()) as q:
        records = list(q)
        assert q.verify().ok
        assert len(records) == looked
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "q"


@both
@pytest.mark.parametrize(("before", "taken"), [(6, 0), (6, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize(("anew", "taken_anew"), [(1, 0), (3, 0), (6, 0), (8, 0), (12, 7), (8, 2)])
def test_a_queue_that_was_emptied_and_begun_anew_is_delivered(
    path: Path, end: str, before: int, taken: int, anew: int, taken_anew: int
) -> None:
    """Its chunks may have ids that our log knows, and chunk 1 may be gone again."""
    if before:
        original(path, 0, numbered(0, before))
        original(path, taken, [])
    ours(path, numbered(100, 1))
    assert len(original(path, None, [])) == before - taken + 1
    assert not path.exists()
    original(path, 0, numbered(200, anew))
    original(path, taken_anew, [])
    assert found(path) == numbered(200, anew)[taken_anew:]


@both
@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize("put", [[b""], [b"", b""], [b"", b"y"], [b"y", b""], [b""] * 4])
def test_empty_records_behind_ours_are_delivered(
    path: Path, end: str, size: int, put: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    ours(path, [b"x", b"y" * size])
    original(path, 0, put)
    assert found(path) == [b"x", b"y" * size, *put]
    assert ("over zeros" in caplog.text) == (not any(put))


CHANGES: dict[str, tuple[int | None, int]] = {"takes": (2, 0), "takes all": (None, 0), "puts": (0, 3), "takes and puts": (3, 2)}


@both
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_what_the_original_has_done_is_believed_whatever_run_of_the_machine_it_is(
    path: Path, end: str, change: str, restarted: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[bytes] = []
    for number in range(rounds):  # handed over more than once
        new = numbered(10 * number, 5)
        ours(path, new)
        records += new
    take, put = CHANGES[change]
    added = numbered(500, put)
    taken = original(path, take, added)
    assert taken == records[: len(taken)]
    if restarted:
        monkeypatch.setattr(Files, "boot", lambda self: b"another run")
    assert found(path) == [*records[len(taken) :], *added]


def lost(path: Path, chunks: dict[str, bytes]) -> None:
    """The disk has lost what was in the page cache of these files."""
    for name, data in chunks.items():
        path.with_name(name).write_bytes(data)


def chunk_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.glob("q.[0-9]*")}


@pytest.mark.parametrize("end", ["handed over"], indirect=True)
@pytest.mark.parametrize("act", ["put", "get", "both"])
def test_what_was_handed_over_and_lost_by_the_disk_is_made_again_from_the_log(
    path: Path, end: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every mixture: each chunk file as it was before, or as it is. The machine was not restarted."""
    records = numbered(0, 3)
    monkeypatch.setattr(lock, "is_awaited", lambda fd: False)
    ours(path, records)
    before = chunk_files(path)
    monkeypatch.setattr(lock, "is_awaited", lambda fd: True)
    for number in range(3):
        with Queue(path, chunk_size=SIZE, _files=NoSync()) as q:
            if act in ("put", "both"):
                q.put_many(new := numbered(10 * number + 10, 2))
                records = records + new
            if act in ("get", "both"):
                assert q.get() == records[0]
                records = records[1:]
        if not records:
            return
    home, chunks = path.parent, {name: data for name, data in before.items() if path.with_name(name).exists()}
    for count in range(len(chunks) + 1):
        for which in itertools.combinations(chunks, count):
            copy = shutil.copytree(home, home.with_name("copy")) / "q"
            lost(copy, {name: chunks[name] for name in which})
            assert found(copy) == records, which
            shutil.rmtree(copy.parent)


def orphan_then(path: Path, act: Callable[[], None]) -> list[bytes]:
    """The original puts into a queue whose header was removed; then ours opens the path, and what ``act`` does follows."""
    put = numbered(0, 2)
    original(path, 0, put)
    path.unlink()  # by the process that closed the empty queue, before this one had locked it
    ours(path, numbered(100, 1))
    act()
    with Queue(path, chunk_size=SIZE, _files=NoSync()) as q:
        offered = [record for orphan in q.orphans() for record in orphan]
    assert put
    return offered


def test_an_orphan_of_the_original_is_not_overwritten_by_the_next_one(path: Path) -> None:
    def next_one() -> None:
        original(path, None, [])
        assert not path.exists()
        original(path, 0, numbered(200, 4))

    assert orphan_then(path, next_one) == numbered(0, 2)
    assert found(path) == numbered(200, 4)
    with Queue(path, chunk_size=SIZE, _files=NoSync()) as q:
        (orphan,) = q.orphans()
        assert q.adopt(orphan) == 2
        assert list(q) == [*numbered(200, 4), *numbered(0, 2)]


@both
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_header_that_is_removed_with_the_first_chunks_is_damage(path: Path, end: str, gone: int) -> None:
    ours(path, numbered(0, 12))
    chunks = sorted(path.parent.glob("q.[0-9]*"))
    assert len(chunks) > 3
    for file in (path, *chunks[:gone]):
        file.unlink()
    before = tree(path.parent)
    with pytest.raises(Corrupt, match="no Java program leaves that"):
        inspect(path)
    with pytest.raises(Corrupt, match="no Java program leaves that"):
        Queue(path, chunk_size=SIZE, _files=NoSync())
    assert tree(path.parent) == before


@both
def test_that_all_files_are_gone_is_told(path: Path, end: str, caplog: pytest.LogCaptureFixture) -> None:
    ours(path, numbered(0, 12))
    for file in (path, *path.parent.glob("q.[0-9]*")):
        file.unlink()
    assert found(path) == []
    assert "the log has 12 as not taken" in caplog.text
