"""Every byte of a small queue damaged in turn, and every file of it cut at every length: a named error or the right records.

Most queues have batches in every state; some crashed. What cannot be told from a commit that a crash has torn, or from a Java
program at work, is said where it is allowed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import Change, Copy, Cut, Damage, changes, cuts, flip, grows_over_few_zeros, in_time, tree, write
from disk import NoSync
from plain import crashed, numbers

from qewqew_core import Batch, Broken, Corrupt, QewQewError, Queue, repair
from qewqew_core.batch import manifest, segments
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk import split
from qewqew_core.limits import LIMITS
from qewqew_core.queue import log

# Of each batch: state, attempt, key, reason, and its records or the error that reading them gives.
Batches = dict[str, tuple[str, int, str, str, "list[bytes] | None"]]
View = tuple["list[bytes] | None", Batches]


def opened(path: Path, **more: object) -> Queue:
    return Queue(path, **{"chunk_size": 24, "max_attempts": 3, "lock_timeout": 0, "_files": NoSync(), **more})


def records(read: Callable[[], list[bytes]]) -> list[bytes] | None:
    """What is read, or None for a named error."""
    try:
        return read()
    except QewQewError as error:
        where = error.path
    assert where, "it does not say where"
    return None


def view(q: Queue, ids: set[str]) -> View:
    """What a user sees: the records, and these batches."""
    found: Batches = {}
    for one in ids:
        try:
            batch = q.batch(one)
        except QewQewError:
            continue  # there is none, or its records are no longer kept
        found[one] = (batch.state, batch.attempt, batch.key, batch.reason, records(lambda batch=batch: list(batch)))
    return records(lambda: list(q)), found


def is_one_of(seen: View, allowed: list[View]) -> bool:
    """Whether it is one of these, but for what is an error."""
    for right, batches in allowed:
        if (
            seen[0] in (None, right)
            and seen[1].keys() == batches.keys()
            and all(
                one[:4] == batches[name][:4] and (one[4] is None or one[4] == batches[name][4]) for name, one in seen[1].items()
            )
        ):
            return True
    return False


def work(q: Queue, *, batches: bool) -> Iterator[str | None]:
    """Keys, records of which some are taken, a session, batches in every state.

    Yields after each commit, with the id of a new batch.
    """
    yield None
    for step in range(3):
        q.put_many([b"%d" % number for number in range(5 * step, 5 * step + 5)], key=None if step else "put")
        yield None
    q.get()
    yield None
    with q.session() as session:
        session.get()
        session.put(b"of a session")
    yield None
    for key, end in (("a", "ack"), ("d", "to_dead_letters"), ("l", None), ("n", "nack")) if batches else ():
        batch = q.lease(key, max_records=3)
        yield batch.id
        if end:
            getattr(batch, end)(*([] if end == "ack" else ["why"]))
            yield None
    q.put(b"last")
    yield None


CLOSED = ["closed", "closed without batches"]
CRASHED = ["crashed", "crashed without fsyncs"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[Path, list[View], set[str]]]:
    """For each kind of queue: its directory, what it was after each commit, and the ids of its batches."""
    kinds = {}
    for kind in (*CLOSED, *CRASHED):
        live, kept = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp(kind.replace(" ", "-")) / "q"
        ids: set[str] = set()
        history: list[View] = []
        with opened(live / "q", sync="never" if kind.endswith("fsyncs") else "commit") as q:
            for made_now in work(q, batches=kind != "closed without batches"):
                ids |= {made_now} - {None}
                history.append(view(q, ids))
            if kind in CRASHED:
                shutil.copytree(live, kept)
        if kind in CLOSED:
            shutil.copytree(live, kept)
        log = kept / "q.wal"
        log.write_bytes(log.read_bytes().rstrip(b"\0") + bytes(20))  # of the space behind the end, a little is enough
        kinds[kind] = kept, history, ids
    return kinds


class QueueCopy(Copy):
    def opened(self) -> Queue | None:
        """The queue as it is now; None if it is refused, with a named error, and nothing has changed."""
        before = tree(self.folder)
        try:
            return opened(self.folder / "q")
        except Corrupt as error:
            where = error.path
        assert where.startswith(str(self.folder)), "it does not say where"
        assert tree(self.folder) == before, "a refused opening has changed something"
        return None

    def is_right(self, name: str, damage: Damage, allowed: list[View], ids: set[str]) -> bool:
        """True if all that is seen is right, False for a named error; else an AssertionError."""
        with self.damaged(name, damage):
            q = self.opened()
            if q is None:
                return False
            with q:
                seen = view(q, ids)
                assert is_one_of(seen, allowed), seen
                wrong = seen[0] is None or any(one[4] is None for one in seen[1].values())
                assert not (wrong and q.verify().ok), "verify finds what reading finds"
                if seen[0] is not None:
                    assert q.get_many(1000) == seen[0]
            return not wrong


every_what = pytest.mark.parametrize("what", [changes, cuts])


@pytest.mark.req("T8")
@pytest.mark.parametrize("kind", [*CLOSED, *CRASHED])
@every_what
def test_the_log_may_be_damaged_or_cut_anywhere(made, kind, what, tmp_path, every):
    """In a queue that crashed, its last frame, and without fsyncs any frame, passes for a commit that was torn. What is left of
    a log that was cut passes for that of a queue that crashed before: if header, chunks and batches agree, it is that.
    """
    folder, history, ids = made[kind]
    allowed = history[-1:] if kind in CLOSED else history[-2:] if (kind, what) == ("crashed", changes) else history
    copy = QueueCopy(folder, tmp_path / "copy")
    outcomes = [copy.is_right("q.wal", one, allowed, ids) for one in every(what(copy.files["q.wal"]), quick=40, full=10)]
    assert outcomes.count(False) > len(outcomes) / 3


@pytest.mark.parametrize("behind", [0, 20])
def test_a_log_that_was_cut_does_not_let_batches_be_forgotten(tmp_path, behind):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many([b"%d" % number for number in range(10)])
        q.lease("key", max_records=4)
    path = tmp_path / "q.wal"
    data = path.read_bytes()
    path.write_bytes(data[: log.replay(data, "").snapshot_end + behind])
    with pytest.raises(Corrupt, match="batches"):
        Queue(tmp_path / "q", chunk_size=64)


def sweep(copy: QueueCopy, what: Callable[[bytes], list[Damage]]) -> list[tuple[str, Damage]]:
    """All damages of header and chunks."""
    names = [name for name in copy.files if "/" not in name and name != "q.wal"]
    assert len(names) > 2
    return [(name, damage) for name in names for damage in what(copy.files[name])]


@pytest.mark.req("T3b")
@pytest.mark.parametrize("kind", CRASHED)
@every_what
def test_header_and_chunks_of_a_queue_that_crashed_may_be_damaged_or_cut_anywhere(made, kind, what, tmp_path, every):
    """Its log is the truth: no pointer is believed that it does not know."""
    folder, history, ids = made[kind]
    copy = QueueCopy(folder, tmp_path / "copy")
    outcomes = {copy.is_right(*one, history[-1:], ids) for one in every(sweep(copy, what), quick=20, full=10)}
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", CLOSED)
@every_what
def test_header_and_chunks_of_a_closed_queue_may_be_damaged_or_cut_anywhere(made, kind, what, tmp_path, every):
    """All records, or an error: a Java program leaves none of this, but for two things. A head that lies at the beginning of a
    record is what it leaves when it has taken those before, and a tail behind a few zeros when it has put empty records. Batches
    never change.
    """
    folder, history, ids = made[kind]
    right = history[-1][0]
    first = f"q.{int.from_bytes((folder / 'q').read_bytes())}"
    copy = QueueCopy(folder, tmp_path / "copy")
    for name, damage in every(sweep(copy, what), quick=20, full=10):
        with copy.damaged(name, damage):
            q = copy.opened()
            if q is not None:
                with q:
                    found, batches = view(q, ids)
                    assert found is None or q.get_many(1000) == found
                assert batches == history[-1][1]
                new, old = damage.of(copy.files[name]), copy.files[name]
                taken = name == first and new[4:] == old[4:] and found and found == right[-len(found) :]
                put = grows_over_few_zeros(old, new) and found and found[: len(right)] == right and not any(found[len(right) :])
                assert found in (None, right) or taken or put, found


@pytest.mark.parametrize("closed", [True, False])
def test_damaged_pointers_of_a_chunk_in_the_middle_cost_no_record_and_are_found(tmp_path, closed):
    """No Java program changes them alone, so it is damage: a clean log is believed, one of a crash makes sure first."""
    records = [b"%d" % number for number in range(20)]
    (folder := tmp_path / "made").mkdir()
    with opened(folder / "q", chunk_size=40, sync="never") as q:
        q.put_many(records)
        if not closed:
            folder = shutil.copytree(folder, tmp_path / "crashed")
    assert len(list(folder.glob("q.[0-9]*"))) == 3
    copy = Copy(folder, tmp_path / "copy")
    path, chunk_file = copy.folder / "q", copy.folder / "q.30002"
    for offset in range(chunk.BEGIN):
        with copy.damaged("q.30002", Change(offset, 0x55)):
            if closed:
                with opened(path) as q:
                    (problem,) = q.verify().problems
                    assert f"{chunk_file}, offset 0: head, tail, next are " in problem
                    assert list(q) == records
            else:
                with pytest.raises(Corrupt, match="head, tail, next are"):
                    opened(path)
            assert not repair(path, _files=NoSync()).ok
            assert chunk_file.read_bytes()[: chunk.BEGIN] == chunk.POINTERS.pack(10, 38, 30003)
            with opened(path) as q:
                assert q.verify().ok
                assert list(q) == records


@pytest.mark.req("T3b")
@pytest.mark.parametrize("name", ["q", "q.30001"])
@pytest.mark.parametrize("content", [None, b"", b"\0", b"\xff" * 10, bytes(10)])
def test_whatever_the_header_or_the_pointers_of_a_queue_that_crashed_say_no_record_is_overwritten(tmp_path, name, content):
    with opened(tmp_path / "q", chunk_size=4096) as q:
        q.put_many(numbers(0, 3))
        with q.session() as session:
            session.put(b"3")
        path = crashed(tmp_path)
    file = path.with_name(name)
    write(file, content + file.read_bytes()[10:] if content and len(content) == 10 else content)
    try:
        with opened(path, chunk_size=4096) as q:
            q.put(b"4")
            assert list(q) == numbers(0, 5)
    except Corrupt as error:
        assert error.path == str(file)  # noqa: PT017 - either is right
        assert file.exists() == (content is not None)


@pytest.mark.req("T7")
@pytest.mark.parametrize("chunk_id", [30001, 30002, 30004])
@pytest.mark.parametrize("offset", [10, 11, 12, 14, 33])
def test_a_flipped_bit_is_found_when_its_turn_comes_and_the_records_of_other_chunks_are_whole(tmp_path, chunk_id, offset):
    path, file, right = tmp_path / "q", tmp_path / f"q.{chunk_id}", numbers(100, 140)
    with opened(path, chunk_size=64) as q:
        q.put_many(right)
        q._chain.rotate()  # else the log has a copy of the records
    flip(file, offset, 4)
    before = 10 * (chunk_id - 30001)
    with opened(path) as q, q.session() as session:
        assert len(q.verify().problems) == 1
        assert not before or session.get_many(before) == right[:before]
        with pytest.raises(Corrupt) as caught:
            session.get()
        assert caught.value.path == str(file)
        session.rollback()
    repair(path)
    with opened(path) as q:
        assert list(q) in (right[:before] + right[before + 10 :], right), "repair may find the bit"


@pytest.mark.req("S17", "T23")
@pytest.mark.parametrize("chunk_id", [30001, 30002])
@pytest.mark.parametrize("size", [2, 9, 10, 12, 30, 40])
def test_a_chunk_that_is_cut_under_an_open_queue_is_named_until_it_is_whole_and_what_is_put_is_right(tmp_path, chunk_id, size):
    file, right = tmp_path / f"q.{chunk_id}", numbers(100, 140)
    with opened(tmp_path / "q", chunk_size=64) as q, q.session() as session:
        q.put_many(right)
        data = file.read_bytes()
        os.truncate(file, size)
        session.put(b"new")
        session.commit()
        before = session.get_many(10) if chunk_id == 30002 else []
        with pytest.raises(Corrupt, match="the file ends before its last record") as caught:
            session.get()
        assert (caught.value.path, caught.value.offset) == (str(file), max(size, 10))
        write(file, data)
        assert [*before, *session.get_many(100)] == [*right, b"new"]


@pytest.mark.req("S17")
def test_a_chunk_that_is_gone_under_an_open_queue_is_named_and_not_made_anew(tmp_path):
    with opened(tmp_path / "q", chunk_size=64) as q:
        q.put_many(numbers(100, 140))
    file = tmp_path / "q.30003"
    with opened(tmp_path / "q") as q:
        session = q.session()
        file.unlink()
        session.get_many(20)
        with pytest.raises(Broken, match="No such file or directory") as caught:
            session.get()
        assert caught.value.path == str(file)
    assert not file.exists()


@pytest.mark.req("S17", "T23")
@pytest.mark.parametrize(
    ("kind", "chunk_id", "size"),
    [
        *(("crashed", chunk_id, size) for chunk_id in (30001, 30002) for size in (None, 2, 9, 10, 12, 30, 40)),
        *(("closed", 30001, size) for size in (None, 0, 2, 9, 12)),
        ("closed", 30002, None),  # cut, it is found when its turn comes
    ],
)
def test_a_chunk_that_is_cut_or_gone_is_named_by_the_opening_which_makes_no_file(tmp_path, kind, chunk_id, size):
    right = numbers(100, 140)
    with opened(tmp_path / "q", chunk_size=64) as q:
        q.put_many(right)
        path = crashed(tmp_path)
    if kind == "closed":
        path = tmp_path / "q"
    file = path.with_name(f"q.{chunk_id}")
    write(file, Cut(size).of(file.read_bytes()))
    before = tree(path.parent)
    with pytest.raises(Corrupt, match="chunk file") as caught:
        opened(path)
    assert caught.value.path == str(file)
    assert tree(path.parent) == before
    repair(path)
    with opened(path) as q, q.session() as session:
        session.put(b"new")
        session.commit()
        start = 10 * (chunk_id - 30001)
        others = {*right[:start], *right[start + 10 :], b"new"}
        found = session.get_many(100)
        assert [one for one in found if one in others] == sorted(others)
        assert set(found) <= {*right, b"new"}


@pytest.mark.parametrize("state", ["leased", "returned", "dead"])
def test_a_batch_with_a_damaged_segment_that_is_put_back_or_leased_again_gives_no_wrong_record(made, state, tmp_path, every):
    folder, history, _ = made["closed"]
    waiting, batches = history[-1]
    (batch_id,) = (one for one, found in batches.items() if found[0] == state)
    right = batches[batch_id][4]
    copy, outcomes = QueueCopy(folder, tmp_path / "copy"), []
    names = [name for name in copy.files if Path(name).parent.name == batch_id and Path(name).name != manifest.MANIFEST]
    for name, damage in every([(one, damage) for one in names for damage in changes(copy.files[one])], quick=20, full=10):
        with copy.damaged(name, damage), copy.opened() as q:
            if state == "returned":
                leased = q.lease("again")
                assert records(lambda leased=leased: list(leased)) in ((None, right) if leased.id == batch_id else (waiting,))
                if leased.id != batch_id:  # the damaged one is a dead letter now
                    leased.put_back()
            q.batch(batch_id).put_back()
            found = records(lambda: list(q))
            assert found in (None, right + waiting)
            assert (found is None) is not q.verify().ok
            outcomes.append(found is None)
    assert True in outcomes


# The files of a batch, read by nothing but manifest and segments


def plain_records(directory: Path) -> list[bytes]:
    """As Spark reads: each segment by itself, in runs that end at boundaries."""
    found = []
    for segment in manifest.load(str(directory)).segments:
        for count, data in segments.read_segment(str(directory), segment, 1):
            try:
                one, used = split(data)
            except ValueError as error:
                raise Corrupt("a boundary is not where a record begins", path=str(directory)) from error
            if (len(one), used) != (count, len(data)):
                raise Corrupt("a boundary does not count the records before it", path=str(directory))
            found += one
    return found


@pytest.fixture
def batches(tmp_path, monkeypatch) -> dict[str, tuple[Path, list[bytes], Batch]]:
    """A batch in each state, of two segments or a cut one, with boundaries: its directory, its records, and the object."""
    monkeypatch.setattr(LIMITS, "piece_bytes", 12)
    found = {}
    q = opened(tmp_path / "q", chunk_size=40)
    numbers = [b"%d" % number * (number % 4) for number in range(60)]
    for record in numbers:
        q.put(record)
    q.get()
    ends = {"leased": None, "returned": "nack", "dead": "to_dead_letters", "acked": "ack"}
    leased = {state: q.lease(state, max_records=14) for state in ends}
    for first, (state, batch) in zip(range(1, 60, 14), leased.items(), strict=False):
        if ends[state]:
            getattr(batch, ends[state])()
        found[state] = Path(batch.manifest_path).parent, numbers[first : first + 14], batch
        assert list(batch) == plain_records(found[state][0]) == found[state][1]
    q.close()
    assert any(segment.boundaries for segment in manifest.load(str(found["leased"][0])).segments)
    return found


@pytest.mark.parametrize("state", ["leased", "returned", "dead", "acked"])
@every_what
def test_any_file_of_a_batch_may_be_damaged_or_cut_anywhere(batches, state, what, every):
    """Neither reader ever gives a wrong record; what it gives before an error are the first ones."""
    directory, right, batch = batches[state]
    outcomes = {True: 0, False: 0}
    files = tree(directory)
    for name, damage in every([(name, one) for name, data in files.items() for one in what(data)], quick=20, full=10):
        write(directory / name, damage.of(files[name]))
        given: list[bytes] = []
        try:
            with in_time():
                for record in batch:
                    given.append(record)
        except QewQewError:
            assert given == right[: len(given)], f"{name} {damage}"
            outcomes[False] += 1
        else:
            assert given == right, f"{name} {damage}"
            outcomes[True] += 1
        assert records(lambda: plain_records(directory)) in (None, right), f"{name} {damage}"
        write(directory / name, files[name])
    assert outcomes[False] > outcomes[True]
    assert list(batch) == right
