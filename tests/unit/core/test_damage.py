"""Every byte of a small queue damaged in turn, and every file of it cut at every length: a named error or the right records.

Here for queues with batches in every state, and for queues that crashed; test_bad_input.py does it for a plain closed one. Each
byte is changed once, each sixteenth in all its eight bits. What cannot be told from a commit that a crash has torn, or from a
Java program at work, is said where it is allowed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk import NoSync

from qewqew_core import Batch, CorruptQueue, QewQewError, Queue, chunk, log, manifest, repair
from qewqew_core.chunk import split

# Of each batch: state, attempt, key, reason, and its records or the error that reading them gives.
Batches = dict[str, tuple[str, int, str, str, "list[bytes] | None"]]
View = tuple["list[bytes] | None", Batches]


def opened(path: Path, **more: object) -> Queue:
    return Queue(path, **{"chunk_size": 24, "max_attempts": 3, "lock_timeout": 0, "_files": NoSync(), **more})


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """`soon` is called before each try: one that takes ten seconds is a hang."""

    def hang(*_: object) -> None:
        raise AssertionError("a hang")

    before = signal.signal(signal.SIGALRM, hang)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def soon() -> None:
    signal.alarm(10)


def records(read: Callable[[], list[bytes]]) -> list[bytes] | None:
    """What is read, or None for a named error."""
    try:
        return read()
    except QewQewError:
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


def work(q: Queue) -> Iterator[str | None]:
    """Batches in every state, keys, and records of which some are taken. Yields after each commit, with the id of a new batch."""
    yield None
    for step in range(3):
        q.put_many([b"%d" % number for number in range(5 * step, 5 * step + 5)], key=None if step else "put")
        yield None
    q.get()
    yield None
    for key, end in (("a", "ack"), ("d", "to_dead_letters"), ("l", None), ("n", "nack")):
        batch = q.lease(key, max_records=3)
        yield batch.id
        if end:
            getattr(batch, end)(*([] if end == "ack" else ["why"]))
            yield None
    q.put(b"last")
    yield None


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[Path, list[View], set[str]]]:
    """For each kind of queue: its directory, what it was after each commit, and the ids of its batches."""
    kinds = {}
    for kind in ("closed", "crashed", "crashed without fsyncs"):
        live, kept = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp(kind.replace(" ", "-")) / "q"
        ids: set[str] = set()
        history: list[View] = []
        with opened(live / "q", sync="never" if kind.endswith("fsyncs") else "commit") as q:
            for made_now in work(q):
                ids |= {made_now} - {None}
                history.append(view(q, ids))
            if kind != "closed":
                shutil.copytree(live, kept)
        if kind == "closed":
            shutil.copytree(live, kept)
        log = kept / "q.log"
        log.write_bytes(log.read_bytes().rstrip(b"\0") + bytes(20))  # of the space behind the end, a little is enough
        kinds[kind] = kept, history, ids
    return kinds


def tree(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def changes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each byte changed, and of each sixteenth each bit."""
    for offset in range(len(data)):
        masks = [1 << bit for bit in range(8)] if offset % 16 == 0 else [(0x01, 0x10, 0x80, 0xFF)[offset % 4]]
        for mask in masks:
            yield (
                f"offset {offset} of {len(data)}, change {mask:#x}",
                data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :],
            )


def cuts(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    for size in range(len(data)):
        yield f"cut to {size} of {len(data)}", data[:size]


def replace(file: Path, data: bytes | None) -> None:
    """This content, written in place: making files and removing them, thousands of times, is slow on a real disk."""
    if data is None:
        file.unlink()
        return
    file.parent.mkdir(exist_ok=True, parents=True)
    with file.open("r+b" if file.exists() else "wb") as target:
        target.write(data)
        target.truncate(len(data))


class Copy:
    """A copy of a queue, damaged again and again, and mended."""

    def __init__(self, made: Path, place: Path) -> None:
        self.made, self.place, self.tries = tree(made), place, 0
        shutil.copytree(made, place)

    def opened(self, name: Path, data: bytes | None) -> Queue | None:
        """The queue with this content of this file; None if it is refused, with a named error, and nothing has changed."""
        soon()
        file, self.tries = self.place / name, self.tries + 1
        replace(file, data)
        before = tree(self.place) if self.tries % 10 == 0 else None
        try:
            return opened(self.place / "q")
        except CorruptQueue:
            assert before in (None, tree(self.place)), "a refused opening has changed something"
            replace(file, self.made[name])
            return None

    def renew(self) -> None:
        found = tree(self.place)
        for name in found.keys() - self.made.keys():
            replace(self.place / name, None)
            with contextlib.suppress(OSError):  # not empty
                (self.place / name).parent.rmdir()
        for name, data in self.made.items():
            if found.get(name) != data:
                replace(self.place / name, data)

    def is_right(self, name: Path, data: bytes | None, allowed: list[View], ids: set[str]) -> bool:
        """True if all that is seen is right, False for a named error; else an AssertionError."""
        q = self.opened(name, data)
        if q is None:
            return False
        with q:
            seen = view(q, ids)
            assert is_one_of(seen, allowed), f"{name}: {seen}"
            wrong = seen[0] is None or any(one[4] is None for one in seen[1].values())
            assert not (wrong and q.verify().ok), "verify finds what reading finds"
            if seen[0] is not None:
                assert q.get_many(1000) == seen[0]
        self.renew()
        return not wrong


CRASHED = ["crashed", "crashed without fsyncs"]


@pytest.mark.parametrize("kind", ["closed", *CRASHED])
def test_any_byte_of_the_log_of_a_queue_with_batches_may_be_damaged(made, kind, tmp_path):
    """In a queue that crashed, its last frame, and without fsyncs any frame, passes for a commit that was torn."""
    folder, history, ids = made[kind]
    allowed = {"closed": history[-1:], "crashed": history[-2:], "crashed without fsyncs": history}[kind]
    data = (folder / "q.log").read_bytes()
    copy = Copy(folder, tmp_path / "copy")
    outcomes = [copy.is_right(Path("q.log"), new, allowed, ids) for _, new in changes(data)]
    assert outcomes.count(False) > len(outcomes) / 3


@pytest.mark.parametrize("behind", [0, 20])
def test_a_log_that_was_cut_does_not_let_batches_be_forgotten(tmp_path, behind):
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many([b"%d" % number for number in range(10)])
        q.lease("key", max_records=4)
    path = tmp_path / "q.log"
    data = path.read_bytes()
    path.write_bytes(data[: log.replay(data, "").snapshot_end + behind])
    with pytest.raises(CorruptQueue, match="batches"):
        Queue(tmp_path / "q", chunk_size=64)


@pytest.mark.parametrize("kind", ["closed", *CRASHED])
def test_the_log_may_be_cut_anywhere(made, kind, tmp_path):
    """What is left passes for the log of a queue that crashed before: if header, chunks and batches agree, it is that."""
    folder, history, ids = made[kind]
    data = (folder / "q.log").read_bytes()
    copy = Copy(folder, tmp_path / "copy")
    allowed = history[-1:] if kind == "closed" else history
    outcomes = [copy.is_right(Path("q.log"), new, allowed, ids) for _, new in cuts(data)]
    assert outcomes.count(False) > len(outcomes) / 3


@pytest.mark.parametrize("kind", CRASHED)
@pytest.mark.parametrize("what", [changes, cuts])
def test_header_and_chunks_of_a_queue_that_crashed_may_be_damaged_or_cut_anywhere(made, kind, what, tmp_path):
    """Its log is the truth: no pointer is believed that it does not know."""
    folder, history, ids = made[kind]
    names = [name for name in tree(folder) if len(name.parts) == 1 and name.name != "q.log"]
    assert len(names) > 2
    copy, outcomes = Copy(folder, tmp_path / "copy"), []
    for name in names:
        for how, new in what((folder / name).read_bytes()):
            try:
                outcomes.append(copy.is_right(name, new, history[-1:], ids))
            except AssertionError as error:
                raise AssertionError(f"{name} {how}") from error
    assert False in outcomes
    assert True in outcomes


@pytest.mark.parametrize("what", [changes, cuts])
def test_header_and_chunks_of_a_closed_queue_with_batches_may_be_damaged_or_cut_anywhere(made, what, tmp_path):
    """Damaged pointers pass for a Java program that has used the queue: fewer records may come, or consumed ones again, or
    empty ones that the zeros behind the tail spell; but each other one was stored, whole, and in order. Batches never change.
    """
    folder, history, ids = made["closed"]
    stored = [b"%d" % number for number in range(15)] + [b"last"]
    names = [name for name in tree(folder) if len(name.parts) == 1 and name.name != "q.log"]
    copy = Copy(folder, tmp_path / "copy")
    for name in names:
        for how, new in what((folder / name).read_bytes()):
            q = copy.opened(name, new)
            if q is not None:
                with q:
                    found, batches = view(q, ids)
                copy.renew()
                assert batches == history[-1][1]
                rest = iter(stored)
                assert all(record in rest for record in found or [] if record), f"{name} {how}: {found}"


@pytest.mark.parametrize("closed", [True, False])
def test_damaged_pointers_of_a_chunk_in_the_middle_cost_no_record_and_are_found(tmp_path, closed):
    """No Java program changes them alone, so it is damage: a clean log is believed, one of a crash makes sure first."""
    records = [b"%d" % number for number in range(20)]
    (folder := tmp_path / "made").mkdir()
    with Queue(folder / "q", chunk_size=40, sync="never") as q:
        q.put_many(records)
        if not closed:
            folder = shutil.copytree(folder, tmp_path / "crashed")
    assert len(list(folder.glob("q.[0-9]*"))) == 3
    for damaged in range(chunk.BEGIN):
        copy = shutil.copytree(folder, tmp_path / str(damaged))
        data = bytearray((copy / "q.2").read_bytes())
        data[damaged] ^= 0x55
        (copy / "q.2").write_bytes(data)
        if closed:
            with Queue(copy / "q") as q:
                (problem,) = q.verify().problems
                assert f"{copy / 'q.2'}, offset 0: head, tail, next are " in problem
                assert list(q) == records
        else:
            with pytest.raises(CorruptQueue, match="head, tail, next are"):
                Queue(copy / "q")
        assert repair(copy / "q", _files=NoSync()).changed
        assert (copy / "q.2").read_bytes()[: chunk.BEGIN] == chunk.POINTERS.pack(10, 38, 3)
        with Queue(copy / "q") as q:
            assert q.verify().ok
            assert list(q) == records


@pytest.mark.parametrize("state", ["leased", "returned", "dead"])
def test_a_batch_with_a_damaged_segment_that_is_put_back_or_leased_again_gives_no_wrong_record(made, state, tmp_path):
    folder, history, _ = made["closed"]
    waiting, batches = history[-1]
    (batch_id,) = (one for one, found in batches.items() if found[0] == state)
    right = batches[batch_id][4]
    copy, outcomes = Copy(folder, tmp_path / "copy"), []
    for name in tree(folder):
        if name.parent.name == batch_id and name.name != manifest.MANIFEST:
            for how, new in changes((folder / name).read_bytes()):
                with copy.opened(name, new) as q:
                    if state == "returned":
                        assert records(lambda: list(q.lease("again"))) in (None, right), how
                    q.batch(batch_id).put_back()
                    found = records(lambda: list(q))
                    assert found in (None, right + waiting), f"{name} {how}"
                    assert (found is None) is not q.verify().ok
                    outcomes.append(found is None)
                copy.renew()
    assert True in outcomes


# The files of a batch, read by nothing but manifest and segments


def plain_records(directory: Path) -> list[bytes]:
    """As Spark reads: each segment by itself, in runs that end at boundaries."""
    found = []
    for segment in manifest.load(str(directory)).segments:
        for count, data in manifest.read_segment(str(directory), segment, 1):
            try:
                one, used = split(data)
            except ValueError as error:
                raise CorruptQueue("a boundary is not where a record begins") from error
            if (len(one), used) != (count, len(data)):
                raise CorruptQueue("a boundary does not count the records before it")
            found += one
    return found


@pytest.fixture
def batches(tmp_path, monkeypatch) -> dict[str, tuple[Path, list[bytes], Batch]]:
    """A batch in each state, of two segments or a cut one, with boundaries: its directory, its records, and the object."""
    for name, module in list(sys.modules.items()):
        if name.startswith("qewqew_core.") and hasattr(module, "PIECE_BYTES"):
            monkeypatch.setattr(module, "PIECE_BYTES", 12)
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
@pytest.mark.parametrize("what", [changes, cuts])
def test_any_file_of_a_batch_may_be_damaged_or_cut_anywhere(batches, state, what):
    """Neither reader ever gives a wrong record; what it gives before an error are the first ones."""
    directory, right, batch = batches[state]
    outcomes = {True: 0, False: 0}
    for name, data in tree(directory).items():
        for how, new in what(data):
            soon()
            replace(directory / name, new)
            given: list[bytes] = []
            try:
                for record in batch:
                    given.append(record)
            except QewQewError:
                assert given == right[: len(given)], f"{name} {how}"
                outcomes[False] += 1
            else:
                assert given == right, f"{name} {how}"
                outcomes[True] += 1
            assert records(lambda: plain_records(directory)) in (None, right), f"{name} {how}"
        replace(directory / name, data)
    assert outcomes[False] > outcomes[True]
    assert list(batch) == right
