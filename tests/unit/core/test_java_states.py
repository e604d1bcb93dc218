"""States that the original leaves, built byte by byte: every crash point of its operations, and damaged files.

The tables are those of the format's description: "6.2" is what the original's operations leave when they are stopped
after any step, "7" the safe orders that it reads, "9" damaged input. REQ-23 says what must be delivered: every record whose
enqueue returned and that was not dequeued, at most the one in flight more, in order, nothing else. Where duplicates cannot
be told from valid data (E1, F2: REQ-34) they are delivered, and that is what these tables say.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk import JournalDisk, image
from plain import forget_log, plain_read

from qewqew_core import Corrupt, Queue, inspect, repair
from qewqew_core.formats.chunk import POINTERS

FIRST = bytes.fromhex("aaaaaa")  # the record in flight
NEW = bytes.fromhex("bbbbbb")  # what the probes put
ONE, TWO, THREE, FOUR, FIVE = (bytes([number]) * 3 for number in range(1, 6))


def chunk(size: int, head: int, tail: int, following: int, *records: bytes) -> bytes:
    """A chunk file: pointers, then these records from offset 10 on (whatever the pointers say), zeros to its size."""
    frames = b"".join(len(record).to_bytes(2) + record for record in records)
    return (POINTERS.pack(head, tail, following) + frames).ljust(size, b"\0")


@dataclass
class Left:
    """A state on disk, and what a lossless reader delivers from it."""

    name: str
    header: bytes | None
    chunks: dict[int, bytes]
    delivers: list[bytes]
    size: int = 22
    orphans: dict[int, bytes] = field(default_factory=dict)  # must stay as they are, and never be delivered
    wrong: tuple[str, int] = ("", -1)  # the file and the offset that an error names
    closing_makes: set[int] = field(default_factory=set)  # a last chunk, after which there is a free id

    @property
    def kept(self) -> dict[int, bytes]:
        """The orphans once ours has opened it: not where the next Java program begins."""
        return {65534 if number == 1 else number: data for number, data in self.orphans.items()}

    def build(self, folder: Path) -> Path:
        folder.mkdir()
        if self.header is not None:
            (folder / "q").write_bytes(self.header)
        for number, data in (self.chunks | self.orphans).items():
            (folder / f"q.{number}").write_bytes(data)
        return folder / "q"


H0, H1, H2 = b"\0\0", b"\0\1", b"\0\2"
C = chunk
W = b"\xff\xfe"  # 65534: the next id is 1
STALE = {1: C(22, 10, 20, 2, ONE, TWO), 2: C(22, 10, 15, 0, THREE)}
FULL = C(22, 10, 20, 2, ONE, TWO)
CLEARED = {1: C(22, 15, 20, 2, ONE, TWO), 2: C(22, 10, 20, 3, THREE, FOUR), 3: C(22, 10, 15, 0, FIVE)}

CRASHES = [
    Left("first enqueue, step 1: chunk file created", H0, {1: b""}, []),
    Left("first enqueue, step 2: mapped", H0, {1: C(22, 0, 0, 0)}, []),
    Left("F1, step 3: header written, chunk not initialised (DEF-2)", H1, {1: C(22, 0, 0, 0)}, []),
    Left("F1, step 5: data written", H1, {1: C(22, 0, 0, 0, FIRST)}, []),
    Left("F1, step 6: head written", H1, {1: C(22, 10, 0, 0, FIRST)}, []),
    Left("first enqueue, step 7: tail written", H1, {1: C(22, 10, 15, 0, FIRST)}, [FIRST]),
    Left("first enqueue over stale files, step 1 (C1, REQ-33)", H0, {}, [], orphans=STALE),
    Left("F2, step 3: stale chunks referred to again (REQ-34)", H1, STALE, [ONE, TWO, THREE]),
    Left("F2, step 5: data written over them", H1, {**STALE, 1: C(22, 10, 20, 2, FIRST, TWO)}, [FIRST, TWO, THREE]),
    Left("F2, step 7: tail written, next is still the stale one", H1, {**STALE, 1: C(22, 10, 15, 2, FIRST, TWO)}, [FIRST, THREE]),
    Left("F2, step 8: done", H1, {1: C(22, 10, 15, 0, FIRST)}, [FIRST], orphans={2: STALE[2]}),
    Left("plain enqueue, step 2: data behind the tail", H1, {1: C(64, 10, 20, 0, ONE, TWO, FIRST)}, [ONE, TWO], 64),
    Left("plain enqueue, step 3: tail written", H1, {1: C(64, 10, 25, 0, ONE, TWO, FIRST)}, [ONE, TWO, FIRST], 64),
    Left("R1, step 1: next refers to no file (REQ-26)", H1, {1: FULL}, [ONE, TWO]),
    Left("R1, step 2: next refers to an empty file (REQ-27)", H1, {1: FULL, 2: b""}, [ONE, TWO]),
    Left("R1, step 3: next refers to zeros", H1, {1: FULL, 2: C(22, 0, 0, 0)}, [ONE, TWO]),
    Left("R1, step 6: data in a chunk without pointers", H1, {1: FULL, 2: C(22, 0, 0, 0, FIRST)}, [ONE, TWO]),
    Left("R1, step 7: head written", H1, {1: FULL, 2: C(22, 10, 0, 0, FIRST)}, [ONE, TWO]),
    Left("roll-over, step 8: tail written", H1, {1: FULL, 2: C(22, 10, 15, 0, FIRST)}, [ONE, TWO, FIRST]),
    Left("D0, step 1: head of the read chunk not advanced", H1, CLEARED, [TWO, THREE, FOUR, FIVE]),
    Left(
        "D1, step 3: unlinked before the header moved on (REQ-25, DEF-1)", H1, {2: CLEARED[2], 3: CLEARED[3]}, [THREE, FOUR, FIVE]
    ),
    Left("drop, step 4: header moved on", H2, {2: CLEARED[2], 3: CLEARED[3]}, [THREE, FOUR, FIVE]),
    Left("plain dequeue, step 1", H1, {1: C(64, 15, 25, 0, ONE, TWO, THREE)}, [TWO, THREE], 64),
    Left(
        "E1, step 1: head reset before the tail (REQ-34, DEF-4)",
        H1,
        {1: C(64, 10, 25, 0, ONE, TWO, THREE)},
        [ONE, TWO, THREE],
        64,
    ),
    Left("last dequeue, step 2: tail reset", H1, {1: C(64, 10, 10, 0, ONE, TWO, THREE)}, [], 64),
    Left("clear, step 1: header zeroed (C1, REQ-33)", H0, {}, [], orphans=CLEARED),
    Left("clear, step 3: first chunk reset", H0, {}, [], orphans={**CLEARED, 1: C(22, 10, 10, 2, ONE, TWO)}),
    Left("clear, step 7: second chunk unlinked", H0, {1: C(22, 10, 10, 0, ONE, TWO)}, [], orphans={3: CLEARED[3]}),
    Left("C2, step 3: enqueue after clear, the header stays 0 (DEF-5)", H0, {}, [], orphans={1: C(22, 10, 15, 0, FIRST)}),
    Left("close of an empty queue, step 3", H1, {1: C(22, 10, 10, 0, ONE)}, []),
    Left("X1, step 4: chunk unlinked, header not (REQ-25)", H1, {}, []),
    Left("close, step 5: nothing left", None, {}, []),
    Left("C1: no header, but chunks with records (REQ-33)", None, {}, [], orphans=CLEARED),
    Left("W1: ids wrapped", W, {65534: C(22, 10, 20, 1, ONE, TWO), 1: C(22, 10, 15, 0, THREE)}, [ONE, TWO, THREE]),
    Left(
        "W2: ids wrapped, and the next one is that of the first chunk (DEF-12)",
        H2,
        {2: C(15, 10, 15, 65534, ONE), 65534: C(15, 10, 15, 1, TWO), 1: C(15, 10, 15, 0, THREE)},
        [ONE, TWO, THREE],
        15,
        closing_makes={3},
    ),
    Left("D1 at the wrap: the successor of 65534 is 1", W, {1: C(22, 10, 15, 0, THREE)}, [THREE]),
]

SAFE = [
    Left("S1: chunk complete, header still 0", H0, {}, [], orphans={1: C(22, 10, 15, 0, ONE)}),
    Left("S1': header refers to an initialised empty chunk", H1, {1: C(22, 10, 10, 0)}, []),
    Left(
        "S2: next file complete, not referred to",
        H1,
        {1: C(22, 10, 20, 0, ONE, TWO)},
        [ONE, TWO],
        orphans={2: C(22, 10, 15, 0, FIRST)},
    ),
    Left("S2': next refers to an initialised empty chunk", H1, {1: FULL, 2: C(22, 10, 10, 0)}, [ONE, TWO]),
    Left("S3: header moved on, read chunk still there", H2, {2: C(22, 10, 15, 0, THREE)}, [THREE], orphans={1: FULL}),
    Left("S4: read to the end without reset", H1, {1: C(64, 20, 20, 0, ONE, TWO)}, [], 64),
    Left("S4': the same in a full chunk (REQ-20)", H1, {1: C(20, 20, 20, 0, ONE, TWO)}, [], 20),
    Left("S4'': an empty chunk with a next (REQ-28)", H1, {1: C(22, 20, 20, 2, ONE, TWO), 2: C(22, 10, 15, 0, THREE)}, [THREE]),
    Left("an empty chunk with a next that begins anew", H1, {1: C(22, 10, 10, 2, ONE, TWO), 2: C(22, 10, 15, 0, THREE)}, [THREE]),
    Left("S4x: head past the tail (REQ-29)", H1, {1: C(64, 20, 10, 0, ONE, TWO)}, [], 64),
    Left("S5: header 0, chunks not yet unlinked", H0, {}, [], orphans={2: CLEARED[2], 3: CLEARED[3]}),
    Left("S6: header 0, chunks gone", H0, {}, []),
    Left(
        "S7: ids need not follow each other", H1, {1: C(22, 10, 20, 9, ONE, TWO), 9: C(22, 10, 15, 0, THREE)}, [ONE, TWO, THREE]
    ),
    Left(
        "a chain 7, 300, 2",
        b"\0\7",
        {7: C(22, 10, 15, 300, ONE), 300: C(22, 10, 15, 2, TWO), 2: C(22, 10, 15, 0, THREE)},
        [ONE, TWO, THREE],
    ),
]

DAMAGED_BUT_CLEAR = [
    Left("header -> missing file 7", b"\0\7", {}, []),
    Left("header of 0 bytes (REQ-32)", b"", {}, []),
    Left("header of 3 bytes: the first two count (REQ-32)", b"\0\1x", {1: C(22, 10, 15, 0, ONE)}, [ONE]),
    Left("the first chunk file is empty (REQ-27)", H1, {1: b""}, []),
    Left("chunk file of 5 bytes (REQ-27)", H1, {1: b"\0\0\0\n\0"}, []),
    Left("the first chunk file has 9 bytes", H1, {1: bytes(9)}, []),
    Left("chunk file of 9 bytes in the middle of nowhere", H1, {1: FULL, 2: bytes(9)}, [ONE, TWO]),
    Left("file shorter than the chunk size (REQ-35)", H1, {1: C(64, 10, 20, 0, ONE, TWO)[:20]}, [ONE, TWO], 64),
    Left("file larger than the chunk size (REQ-3, DEF-15)", H1, {1: C(40, 10, 20, 0, ONE, TWO)}, [ONE, TWO], 18),
    Left(
        "files of two lengths (REQ-3)",
        H1,
        {1: C(40, 10, 30, 2, ONE, TWO, THREE, FOUR), 2: C(22, 10, 15, 0, FIVE)},
        [ONE, TWO, THREE, FOUR, FIVE],
        18,
    ),
    Left("empty records", H1, {1: C(22, 10, 16, 0, b"", b"", b"")}, [b"", b"", b""]),
    Left("an uninitialised chunk with a next (REQ-27)", H1, {1: C(22, 0, 0, 2, FIVE), 2: C(22, 10, 15, 0, THREE)}, [THREE]),
    Left("the same with a head", H1, {1: C(22, 10, 0, 2, FIVE), 2: C(22, 10, 15, 0, THREE)}, [THREE]),
]

DAMAGED = [
    Left(name, header, chunks, [], wrong=wrong)
    for name, header, chunks, wrong in (
        ("record length runs past the tail (REQ-30)", H1, {1: C(40, 10, 18, 0, ONE, TWO)}, ("q.1", 15)),
        ("record length runs past the file", H1, {1: C(40, 10, 40, 0, ONE)[:15] + b"\xff\xff" + bytes(23)}, ("q.1", 15)),
        ("the length of the last record is cut", H1, {1: C(40, 10, 16, 0, ONE, TWO)}, ("q.1", 15)),
        ("head = -5", H1, {1: C(40, -5, 20, 0, ONE, TWO)}, ("q.1", 0)),
        ("tail = -5", H1, {1: C(40, 10, -5, 0, ONE, TWO)}, ("q.1", 4)),
        ("tail past the file", H1, {1: C(40, 10, 41, 0, ONE, TWO)}, ("q.1", 4)),
        ("head 4 inside the chunk header", H1, {1: C(40, 4, 20, 0, ONE, TWO)}, ("q.1", 0)),
        ("head 12 in the middle of a record", H1, {1: C(40, 12, 20, 0, ONE, TWO)}, ("q.1", 12)),
        ("head past the file", H1, {1: C(40, 50, 50, 0, ONE, TWO)}, ("q.1", 0)),
        ("header = 65535 (REQ-31)", b"\xff\xff", {one: C(40, 10, 20, 0, ONE, TWO) for one in (0, 1, 65535)}, ("q", 0)),
        ("next = 65535 (REQ-31)", H1, {1: C(40, 10, 20, 65535, ONE, TWO), 65535: C(40, 10, 15, 0, ONE)}, ("q.1", 8)),
        ("next = own id (REQ-31)", H1, {1: C(40, 10, 20, 1, ONE, TWO)}, ("q.1", 8)),
        ("a cycle of two (REQ-31)", H1, {1: C(40, 10, 20, 2, ONE, TWO), 2: C(40, 10, 20, 1, ONE, TWO)}, ("q.1", 8)),
        ("a cycle of empty chunks", H1, {1: C(40, 10, 10, 2), 2: C(40, 0, 0, 1)}, ("q.1", 8)),
        ("header of 1 byte (REQ-32)", b"\1", {1: C(40, 10, 20, 0, ONE, TWO)}, ("q", 0)),
        ("the second of two chunks is damaged", H1, {1: FULL, 2: C(22, 3, 15, 0, THREE)}, ("q.2", 0)),
        ("the file is cut before the tail (REQ-35)", H1, {1: C(64, 10, 20, 0, ONE, TWO)[:19]}, ("q.1", 4)),
    )
]


def names(states: list[Left]) -> dict:
    return {"argvalues": states, "ids": [state.name for state in states]}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def build(tmp_path):
    """A fresh copy of the state for each probe; orphans must be there, unchanged, after each."""

    def fresh(state: Left) -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return state.build(tmp_path / "copy")

    return fresh


def chunk_sizes(path: Path) -> set[tuple[int, int]]:
    """The number and the size of each chunk file."""
    return {(int(file.suffix[1:]), file.stat().st_size) for file in path.parent.glob("q.[0-9]*")}


def chain(path: Path) -> set[int]:
    """The chunks that the header leads to."""
    found, following = set(), int.from_bytes(path.read_bytes()) if path.exists() else 0
    while following:
        found.add(following)
        following = POINTERS.unpack_from(path.with_name(f"q.{following}").read_bytes())[2]
    return found


def orphans_untouched(path: Path, state: Left) -> bool:
    return all(path.with_name(f"q.{number}").read_bytes() == data for number, data in state.kept.items() if not empty(data))


def empty(data: bytes) -> bool:
    """Orphans without records may be removed."""
    return len(data) < POINTERS.size or POINTERS.unpack_from(data)[0] >= POINTERS.unpack_from(data)[1]


@pytest.mark.req("REQ-3", "REQ-24", "REQ-25", "REQ-27", "REQ-28", "REQ-29", "REQ-32", "REQ-33", "REQ-34", "REQ-35")
@pytest.mark.req("DEF-1", "DEF-2", "DEF-3", "DEF-12", "DEF-15")
@pytest.mark.parametrize("state", **names(CRASHES + SAFE + DAMAGED_BUT_CLEAR))
def test_a_state_of_the_original_delivers_what_was_acknowledged(build, state):
    path = build(state)
    before = content(path.parent)
    assert inspect(path).records == len(state.delivers)
    assert content(path.parent) == before, "REQ-24: looking creates and extends nothing"

    with Queue(path, chunk_size=state.size) as q:  # probe A: open, drain
        assert len(q) == len(state.delivers)
        assert list(q) == state.delivers
        assert q.verify().problems == []
        with_records = {number for number, data in state.kept.items() if not empty(data)}
        found = {int(orphan.rpartition(".")[2]) for orphan in q.verify().orphans}
        assert with_records <= found <= state.kept.keys(), "REQ-33: they can be found"
        assert [q.get() for _ in state.delivers] == state.delivers
        assert not q
    assert orphans_untouched(path, state)

    path = build(state)
    with Queue(path, chunk_size=state.size) as q:  # probe B: put, reopen, drain
        q.put(NEW)
        assert list(q) == [*state.delivers, NEW]
    assert plain_read(path) == [*state.delivers, NEW], "as the original would read it"
    with Queue(path, chunk_size=state.size) as q:
        assert q.get_many(100) == [*state.delivers, NEW]
    assert orphans_untouched(path, state)

    path = build(state)
    with Queue(path, chunk_size=state.size) as q:  # probe C: drain, put, drain in one session
        assert q.get_many(100) == state.delivers
        q.put(NEW)
        assert q.get_many(100) == [NEW]
    assert orphans_untouched(path, state)


@pytest.mark.req("REQ-3", "REQ-24", "REQ-25", "REQ-26", "REQ-28", "REQ-32", "DEF-16")
@pytest.mark.parametrize("state", **names(CRASHES + SAFE + DAMAGED_BUT_CLEAR))
def test_opening_and_closing_leaves_what_the_original_reads_alike(build, state):
    """And no chunk file more, or longer, or that nothing refers to, whatever the chunk size is."""
    for chunk_size in (12, state.size, 4096):
        path = build(state)
        before, moved = chunk_sizes(path), {(number, len(data)) for number, data in state.kept.items()}
        with Queue(path, chunk_size=chunk_size):
            assert plain_read(path) == state.delivers
            assert chunk_sizes(path) <= before | moved
        assert plain_read(path) == state.delivers
        assert {number for number, _ in chunk_sizes(path) - before - moved} == state.closing_makes
        assert {number for number, _ in chunk_sizes(path)} <= chain(path) | state.kept.keys()
        assert orphans_untouched(path, state)
        with Queue(path, chunk_size=chunk_size) as q:
            assert list(q) == state.delivers


@pytest.mark.parametrize("state", **names(CRASHES + SAFE + DAMAGED_BUT_CLEAR))
def test_leasing_and_putting_back_what_the_original_left_changes_nothing(build, state):
    path = build(state)
    with Queue(path, chunk_size=state.size) as q:
        for limit in (1, 2, None):
            batch = q.lease("key", max_records=limit)
            assert (list(batch) if batch else []) == state.delivers[:limit]
            if batch:
                batch.put_back()
        assert list(q) == state.delivers
    assert plain_read(path) == state.delivers


@pytest.mark.req("REQ-30", "REQ-31", "REQ-32", "REQ-35")
@pytest.mark.parametrize("state", **names(DAMAGED))
def test_damage_is_an_error_that_names_file_and_offset_and_changes_nothing(build, state):
    path = build(state)
    before = content(path.parent)
    for opening in (lambda: Queue(path, chunk_size=state.size), lambda: inspect(path)):
        with pytest.raises(Corrupt, match="Nothing was changed") as caught:
            opening()
        assert (caught.value.path, caught.value.offset) == (str(path.with_name(state.wrong[0])), state.wrong[1])
        assert content(path.parent) == before


# A Java program uses a queue that has a transaction log


class Original:
    """The original's stores for a queue that fits into memory; `close` as its close."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        first = int.from_bytes(path.read_bytes()) if path.exists() else 0
        self.ids: list[int] = []
        while first:
            self.ids.append(first)
            first = POINTERS.unpack_from(self.file(first).read_bytes())[2]
        if not path.exists():
            self.header(0)

    def file(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def header(self, first: int) -> None:
        self.path.write_bytes(first.to_bytes(2))

    def store(self, number: int, data: bytes | bytearray) -> None:
        self.file(number).write_bytes(data)

    def enqueue(self, record: bytes) -> None:
        if not self.ids:
            self.ids.append(1)
            self.store(1, chunk(self.size, 10, 10, 0))
            self.header(1)
        data = bytearray(self.file(self.ids[-1]).read_bytes())
        head, tail, _ = POINTERS.unpack_from(data)
        if tail + 2 + len(record) > min(self.size, len(data)):
            following = self.ids[-1] % 65534 + 1
            POINTERS.pack_into(data, 0, head, tail, following)
            self.store(self.ids[-1], data)
            self.ids.append(following)
            self.store(following, chunk(self.size, 10, 10, 0))
            return self.enqueue(record)
        data[tail : tail + 2 + len(record)] = len(record).to_bytes(2) + record
        POINTERS.pack_into(data, 0, head, tail + 2 + len(record), 0)
        self.store(self.ids[-1], data)
        return None

    def dequeue(self) -> bytes:
        data = bytearray(self.file(self.ids[0]).read_bytes())
        head, tail, following = POINTERS.unpack_from(data)
        end = head + 2 + int.from_bytes(data[head : head + 2])
        record = bytes(data[head + 2 : end])
        if end < tail:
            POINTERS.pack_into(data, 0, end, tail, following)
            self.store(self.ids[0], data)
        elif len(self.ids) == 1:
            POINTERS.pack_into(data, 0, 10, 10, 0)
            self.store(self.ids[0], data)
        else:
            self.file(self.ids.pop(0)).unlink()
            self.header(self.ids[0])
        return record

    def close(self) -> None:
        if not self.ids or (len(self.ids) == 1 and int.from_bytes(self.file(self.ids[0]).read_bytes()[4:8]) == 10):
            for number in self.ids:
                self.file(number).unlink()
            self.path.unlink()


def ours(path: Path, records: list[bytes], size: int = 22) -> None:
    with Queue(path, chunk_size=size) as q:
        q.put_many(records)


def test_what_the_original_put_behind_ours_is_delivered(tmp_path):
    ours(tmp_path / "q", [ONE, TWO, THREE])
    original = Original(tmp_path / "q", 22)
    for record in (FOUR, FIVE, FIRST):
        original.enqueue(record)
    original.close()
    assert inspect(tmp_path / "q").records == 6
    with Queue(tmp_path / "q", chunk_size=22) as q:
        assert list(q) == [ONE, TWO, THREE, FOUR, FIVE, FIRST]
        assert q.verify().problems == []


@pytest.mark.parametrize("taken", range(6))
def test_what_the_original_took_is_not_delivered_again(tmp_path, taken):
    records = [ONE, TWO, THREE, FOUR, FIVE]
    ours(tmp_path / "q", records)
    original = Original(tmp_path / "q", 22)
    assert [original.dequeue() for _ in range(taken)] == records[:taken]
    original.close()
    with Queue(tmp_path / "q", chunk_size=22) as q:
        assert list(q) == records[taken:]
        q.put(NEW)
        assert q.get_many(10) == [*records[taken:], NEW]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_records_of_the_same_sizes_in_a_queue_that_the_original_made_anew_are_delivered(tmp_path, count):
    """Header and pointers are then those that our log knows, but the bytes are not: no damage, a Java program at work.

    What tells is the header file, which is younger than our log.
    """
    ours(tmp_path / "q", [ONE] * count)
    original = Original(tmp_path / "q", 22)
    assert [original.dequeue() for _ in range(count)] == [ONE] * count
    original.close()
    original = Original(tmp_path / "q", 22)
    for _ in range(count):
        original.enqueue(TWO)
    original.close()
    written = (tmp_path / "q.wal").stat().st_mtime
    os.utime(tmp_path / "q", (written + 1, written + 1))  # a second later: the clock of file systems is coarse
    assert inspect(tmp_path / "q").records == count
    with Queue(tmp_path / "q", chunk_size=22) as q:
        assert q.get_many(100) == [TWO] * count


@pytest.mark.parametrize("count", [1, 2])
def test_records_of_the_same_sizes_that_the_original_put_into_our_chunk_look_like_damage(tmp_path, count):
    """A limit of "believe the files when they disagree": here they agree. It is an error, never wrong records, and the
    files alone, without our log, deliver them."""
    ours(tmp_path / "q", [ONE] * count)
    original = Original(tmp_path / "q", 22)
    assert [original.dequeue() for _ in range(count)] == [ONE] * count
    for _ in range(count):
        original.enqueue(TWO)
    original.close()
    with (
        pytest.raises(Corrupt, match="the file was damaged, or another program wrote to it"),
        Queue(tmp_path / "q", chunk_size=22) as q,
    ):
        q.get_many(100)
    forget_log(tmp_path / "q")
    with Queue(tmp_path / "q", chunk_size=22) as q:
        assert q.get_many(100) == [TWO] * count


def test_batches_and_keys_stay_when_the_original_has_used_the_queue(tmp_path):
    with Queue(tmp_path / "q", chunk_size=22) as q:
        q.put_many([ONE, TWO, THREE, FOUR], key="once")
        batch = q.lease("key", max_records=3)
        q.lease("acked", max_records=1).ack()
    original = Original(tmp_path / "q", 22)
    original.enqueue(FIVE)
    original.close()
    with Queue(tmp_path / "q", chunk_size=22) as q:
        assert list(q) == [FIVE]
        assert q.put_many([ONE], key="once") == 4
        assert list(q.lease("key")) == [ONE, TWO, THREE]
        assert q.lease("acked").state == "acked"
        q.lease("key").put_back()
        assert list(q) == [ONE, TWO, THREE, FIVE]
        assert q.batches() == []
        assert batch.id


def test_files_go_to_and_fro(tmp_path):
    """Ours and the original in turns on one queue, each taking some and putting some of different sizes."""
    expected: list[bytes] = []
    serial = 0
    for turn in range(40):
        fresh = []
        for _ in range(turn * 7 % 5 + 1):
            serial += 1
            fresh.append(b"%d" % serial + b"x" * (serial * 5 % 9))
        if turn % 2:
            original = Original(tmp_path / "q", 40)
            for record in fresh:
                original.enqueue(record)
            expected += fresh
            for _ in range(turn * 3 % 4):
                if expected:
                    assert original.dequeue() == expected.pop(0)
            original.close()
        else:
            with Queue(tmp_path / "q", chunk_size=40) as q:
                assert list(q) == expected
                q.put_many(fresh)
                expected += fresh
                if turn % 3 == 0:
                    batch = q.lease("key", max_records=4)
                    q.put(b"behind")
                    expected.append(b"behind")
                    batch.put_back()
                count = turn * 5 % 6
                assert [q.get() for _ in expected[:count]] == expected[:count]
                del expected[:count]
    assert expected
    with Queue(tmp_path / "q", chunk_size=40) as q:
        assert q.get_many(1000) == expected


@pytest.mark.parametrize("meddle", ["enqueue", "dequeue", "header"])
def test_a_queue_that_was_used_by_the_original_between_our_crash_and_recovery_is_not_guessed_at(tmp_path, meddle):
    """REQ-30 in spirit: log and files disagree, and nobody can say which records are meant. Never silently one of them."""
    folder = tmp_path / "live"
    folder.mkdir()
    with Queue(folder / "q", chunk_size=22) as q:
        q.put_many([ONE, TWO, THREE])
    with Queue(folder / "q", chunk_size=22) as q:
        q.put(FOUR)
        shutil.copytree(folder, tmp_path / "crashed")  # what a kill leaves
    path = tmp_path / "crashed" / "q"
    original = Original(path, 22)
    if meddle == "enqueue":
        original.enqueue(b"other")  # of the same size as our last, nothing could tell it from ours
    elif meddle == "dequeue":
        original.dequeue()
    else:
        original.header(30002)
    before = content(path.parent)
    for opening in (lambda: Queue(path, chunk_size=22), lambda: Queue(path, chunk_size=22)):
        with pytest.raises(Corrupt, match=r"another program has used the queue after a crash.* Nothing was changed; restore"):
            opening()
        assert content(path.parent) == before


def test_a_killed_queue_of_ours_that_nobody_has_touched_recovers(tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    with Queue(folder / "q", chunk_size=22) as q:
        q.put_many([ONE, TWO, THREE])
        q.get()
        q.lease("key", max_records=1)
        shutil.copytree(folder, tmp_path / "crashed")
    assert inspect(tmp_path / "crashed" / "q").records == 1
    with Queue(tmp_path / "crashed" / "q", chunk_size=22) as q:
        assert list(q) == [THREE]
        assert list(q.lease("key")) == [TWO]
    assert plain_read(tmp_path / "crashed" / "q") == [THREE]


def cleared(path: Path, step: str) -> None:
    """A Java program clears a queue of ours that has three chunks, and is killed."""
    original = Original(path, 22)
    first, *others = original.ids
    original.header(0)
    if step != "header":
        data = bytearray(original.file(first).read_bytes())
        POINTERS.pack_into(data, 0, 10, 10, 0)
        if step == "put":  # in the same session: the header stays 0 (C2)
            data[10:15] = b"\0\3" + NEW
            POINTERS.pack_into(data, 0, 10, 15, 0)
        original.store(first, data)
        for number in others[: None if step in ("removed", "put") else 1]:
            original.file(number).unlink()


@pytest.mark.parametrize("step", ["header", "removed", "put", "removing"])
def test_a_clear_of_the_original_has_happened_or_not_or_is_refused(tmp_path, step):
    records = [ONE, TWO, THREE, FOUR, FIVE]
    path = tmp_path / "q"
    ours(path, records)
    cleared(path, step)
    if step == "removing":  # nobody can say what of the rest was meant to stay
        with pytest.raises(Corrupt, match="the chunk file is missing; the log says that it holds records"):
            Queue(path, chunk_size=22)
        assert repair(path).records == len(records), "the log still had what was in the chunk that was removed"
        with Queue(path, chunk_size=22) as q:
            assert list(q) == records
        return
    delivered = records if step == "header" else []
    assert inspect(path).records == len(delivered)
    with Queue(path, chunk_size=22) as q:
        assert list(q) == delivered
        assert [record for orphan in q.orphans() for record in orphan] == ([NEW] if step == "put" else [])
        assert q.verify().ok


@pytest.mark.parametrize("put", [1, 9])
@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_a_java_program_with_a_larger_chunk_size_makes_our_files_longer_and_fills_them(tmp_path, taken, put):
    ours(tmp_path / "q", [ONE, TWO, THREE, FOUR, FIVE], size=22)
    for file in tmp_path.glob("q.[0-9]*"):  # it maps each to its chunk size
        os.truncate(file, 40)
    original = Original(tmp_path / "q", 40)
    for _ in range(taken):
        original.dequeue()
    for _ in range(put):
        original.enqueue(FIRST)
    original.close()
    for _ in range(2):
        with Queue(tmp_path / "q", chunk_size=22) as q:
            assert list(q) == [ONE, TWO, THREE, FOUR, FIVE][taken:] + [FIRST] * put
            assert q.verify().ok
    with Queue(tmp_path / "q", chunk_size=22) as q:
        q.put_many([FOUR] * 9)
        assert q.get_many(100) == [ONE, TWO, THREE, FOUR, FIVE][taken:] + [FIRST] * put + [FOUR] * 9


def test_what_a_java_program_has_taken_and_put_keeps_the_times_and_checksums_of_the_rest(tmp_path):
    path = tmp_path / "q"
    ours(path, [ONE] * 5, size=64)
    with Queue(path, chunk_size=64) as q:
        oldest = q.stats().oldest
    original = Original(path, 64)
    original.dequeue()
    original.enqueue(TWO)
    original.close()
    with Queue(path, chunk_size=64) as q:
        assert q.stats().oldest == oldest
        assert list(q) == [*[ONE] * 4, TWO]


def test_an_opening_after_a_java_program_that_is_stopped_after_any_call_is_finished_by_the_next(tmp_path):
    """What the files were is in the new log, so that a crash in the middle is one of ours."""
    live = tmp_path / "live"
    live.mkdir()
    ours(live / "q", [ONE, TWO, THREE, FOUR, FIVE])
    original = Original(live / "q", 22)
    for record in (ONE, TWO, THREE):
        original.enqueue(record)
    for _ in range(5):
        original.dequeue()
    original.close()
    original.header(original.ids[0] - 1)  # as if it had been killed when it had removed a chunk
    right = [ONE, TWO, THREE]
    disk = JournalDisk(str(live))
    Queue(live / "q", chunk_size=22, _files=disk).close()
    for stop in range(disk.begin, len(disk.calls) + 1):
        for luck in (None, random.Random(stop)):
            copy = tmp_path / "copy"
            image(disk.calls[:stop], str(live), copy, luck)
            with Queue(copy / "q", chunk_size=22) as q:
                assert list(q) == right, stop
                assert q.verify().problems == []
            shutil.rmtree(copy)
