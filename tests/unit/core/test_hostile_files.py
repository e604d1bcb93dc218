"""Files that somebody has written to do harm, with checksums that are right: a named error, little memory, and nothing outside of
the queue or topic is touched. (Bytes at random: ``tests/fuzz``; damage: test_damage.py; links and pipes: test_links_in_place.py.)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_links_in_place import QUEUE, TOPIC, content, unpacked, use_queue, use_topic

from qewqew_core import BadManifest, Corrupt, QewQewError, Queue, Topic, inspect, repair, repair_topic
from qewqew_core.batch import manifest
from qewqew_core.batch.history import Block
from qewqew_core.disk import journal
from qewqew_core.queue import log as logs
from qewqew_core.tools import diskqueue
from qewqew_core.topic import reader_log as readers
from qewqew_core.topic import topic_log as topics

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NOBODY = 65534
MOST = 1 << 30  # bytes of address space: Python and its modules take 300 MiB


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """What belongs to somebody else, as it would have to lie for each of the paths below to find it."""
    for name in ("precious-00000000000000ff", "precious"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"theirs")
        (tmp_path / name / "file").write_bytes(b"theirs")
    return tmp_path


def theirs(precious: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(precious).items() if "precious" in name.removeprefix(str(precious))}


# Paths in logs


def append(log: Path, magic: bytes, kind: int, body: bytes) -> None:
    data = log.read_bytes().rstrip(b"\0")
    end = [*journal.frames(data, generation := journal.generation_of(data, magic, str(log)))][-1].end
    log.write_bytes(data[:end] + journal.frame(kind, body, generation))


def rare(op: str, **arguments: Any) -> Callable[[Path], None]:
    body = json.dumps({"op": op, **arguments}).encode()
    return lambda log: append(log, logs.MAGIC, logs.COMMIT, bytes(8) + b"J" + len(body).to_bytes(4) + body)


def renamed(**fields: Any) -> Callable[[Path], None]:
    """The first batch of the snapshot, changed."""

    def forge(log: Path) -> None:
        state = logs.replay(log.read_bytes(), str(log)).state
        batch = next(iter(state.batches.values()))
        for name, value in fields.items():
            setattr(batch, name, value)
        log.write_bytes(logs.snapshot(state, 1))

    return forge


def more_acknowledged(log: Path) -> None:
    state = logs.replay(log.read_bytes(), str(log)).state
    state.history.blocks.append(Block(count=1 << 40))
    log.write_bytes(logs.snapshot(state, 1))


OUT = "../../../precious-00000000000000ff"
LEASED, DEAD = "queue-ff77f0cb5fcbc63b", "queue-cdab638e9b9df812"
REPORT = {"damage": [], "set_aside": "queue.damaged/1", "records": 0, "batches": 0, "changed": True, "notes": []}
FORGED = {
    "the id of a dead batch": renamed(id=OUT, state="dead"),
    "the id of an acknowledged batch": renamed(id=OUT, state="acked", chunks=[]),
    "no text as a key": renamed(keys=[7]),
    "no key": renamed(keys=[]),
    "an unknown state": renamed(state="../x"),
    "a time that is a text": renamed(changed="now"),
    "an attempt without a number": renamed(attempt=None),
    "a new batch": rare("lease", id=OUT, key="k", records=0, bytes=0, lease_timeout=None, parts=[]),
    "a copy with an id": rare(
        "lease", id=LEASED, key="k", records=0, bytes=0, lease_timeout=None, parts=[["x/../y", [[], 0, []]]]
    ),
    "a copy of part of a byte": rare(
        "lease", id=LEASED, key="k", records=0, bytes=0, lease_timeout=None, parts=[[5, [[[13.5, 20, 1]], 0, []]]]
    ),
    "files that are put back from elsewhere": rare("put_back", id=DEAD, files=["../../../../precious/file"] * 2, chunks=[7, 8]),
    "files that are put back to elsewhere": rare(
        "put_back", id=DEAD, files=["queue.1", "queue.2"], chunks=["d/../../../precious/a", 8]
    ),
    "a chunk that is replaced elsewhere": rare("replace", chunk="d/../../../precious/file", cut=[[], 0, []], new=7, size=100),
    "a chunk that is as large as nothing": rare("replace", chunk=3, cut=[[], 0, []], new=7, size=10**18),
    "a repair that moves what is elsewhere": rare("repair", moves=[["../../precious", "queue.damaged/1/x"]], report=REPORT),
    "a repair that moves to elsewhere": rare("repair", moves=[["queue.3", "queue.d/../../../precious/new"]], report=REPORT),
    "a repair that moves a file of another queue": rare("repair", moves=[["queue2/precious", "queue.d/x"]], report=REPORT),
    "a repair that moves through a link": rare("repair", moves=[["queue.link/file", "queue.damaged/1/x"]], report=REPORT),
    "a repair of nothing": rare("repair", moves=7, report=None),
    "more acknowledged batches than it lists": more_acknowledged,
    "a whole chunk with no checksum": rare(
        "lease", id=LEASED, key="k", records=0, bytes=0, lease_timeout=None, parts=[[3, None]]
    ),
    "an operation within operations": lambda log: append(
        log, logs.MAGIC, logs.COMMIT, bytes(8) + b"J" + (200_000).to_bytes(4) + b"[" * 200_000
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_log_that_was_made_by_hand_leads_nobody_out_of_the_queue(what: str, precious: Path) -> None:
    queue = unpacked(precious / "ours") / "killed" / "queue"
    (queue.parent / "queue.d").mkdir()
    (queue.parent / "queue.link").symlink_to(precious / "precious")
    (queue.parent / "queue2").mkdir()
    (queue.parent / "queue2" / "precious").write_bytes(b"theirs")
    FORGED[what](queue.parent / "queue.wal")
    before = theirs(precious)
    with pytest.raises(Corrupt, match="queue"):
        Queue(queue)
    use_queue(queue)
    with contextlib.suppress(QewQewError), Queue(queue) as opened:  # as the repair has left it
        for batch in (*opened.batches(), *opened.dead(), *opened.acknowledged()):
            with contextlib.suppress(QewQewError):
                batch.drop() if batch.state == "dead" else batch.put_back()
    assert theirs(precious) == before


def reader_snapshot(**fields: Any) -> Callable[[Path], None]:
    def forge(log: Path) -> None:
        state = readers.replay(log.read_bytes(), str(log)).state
        one = next(iter(state.batches.values()))
        for name, value in fields.items():
            setattr(one, name, value)
        state.batches = {one.id: one}
        state.ranges = {one.id: next(iter(state.ranges.values()))}
        log.write_bytes(readers.snapshot(state, 1))

    return forge


def reader_frame(name: str, *arguments: Any) -> Callable[[Path], None]:
    return lambda log: append(log, readers.MAGIC, readers.COMMIT, json.dumps([name, *arguments]).encode())


NEW = {"keys": ["k"], "state": "leased", "attempt": 1, "records": 1, "bytes": 1, "created": 1, "changed": 1}
FORGED_READERS = {
    "the id of a batch": reader_snapshot(id="../" + OUT),
    "the id of a dead batch": reader_snapshot(id="../" + OUT, state="dead"),
    "a new batch": reader_frame("lease", NEW | {"id": "../" + OUT}, [], [], None),
    "a batch in no state": reader_frame("change", "release", 1, {"id": "topic-all-f71427485bfd67bb", "state": "?", "reason": ""}),
    "a range of all numbers": reader_frame("commit", {"range": [0, 10**18, 1]}, None),
    "lists within lists": lambda log: append(log, readers.MAGIC, readers.COMMIT, b"[" * 200_000),
}


@pytest.mark.parametrize("what", FORGED_READERS)
def test_the_log_of_a_reader_that_was_made_by_hand_leads_nobody_out_of_the_topic(what: str, precious: Path) -> None:
    topic = unpacked(precious / "ours") / "killed" / "topic"
    FORGED_READERS[what](topic / "state" / "all.wal")
    before = theirs(precious)
    with Topic(topic) as opened, pytest.raises(Corrupt, match=r"all\.wal"):
        opened.reader("all")
    use_topic(topic)
    assert theirs(precious) == before


@pytest.mark.parametrize("number", [1 << 31, -1, 1.5, "1"])
def test_the_log_of_a_topic_with_a_block_that_no_index_can_have_is_damaged(number: Any, precious: Path) -> None:
    topic = unpacked(precious / "ours") / "killed" / "topic"
    (log,) = (each for each in topic.iterdir() if each.suffix == ".wal")
    state = topics.replay(log.read_bytes(), str(log)).state
    state.last.block = number
    log.write_bytes(topics.snapshot(state, 1))
    with pytest.raises(Corrupt, match=r"\.wal"):
        Topic(topic)
    use_topic(topic)


# Sizes and counts. A child process has little memory, and would end with MemoryError.


def within_little_memory(use: str, path: Path) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))

    done = subprocess.run(
        [sys.executable, __file__, use, path],
        # Arrow's own allocator gives memory back when some time has passed.
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{HERE}", "ARROW_DEFAULT_MEMORY_POOL": "system"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # The log may name what cannot be the .rdx of a reader, and nothing else.
    named = re.compile(r"/reader/\w+\.rdx: has [0-9,]+ bytes, more than any such file of QewQew")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not named.search(line)]) == (0, [])
    return done.stdout


def told(use: Callable[[], object]) -> str:
    try:
        return f"nothing wrong, {use()!s:.100}"
    except QewQewError as error:
        return f"{type(error).__name__}: {error}"


def use_all_of_a_queue(path: Path) -> None:
    with Queue(path) as queue:
        for batch in (*queue.batches(), *queue.dead()):
            print(told(lambda batch=batch: len(list(batch))))  # type: ignore[misc]
        queue.put_many([b"more"])
        list(queue)


def use_all_of_a_topic(path: Path) -> None:
    with Topic(path) as topic:
        topic.append(b"more")
        for name in topic.readers():
            with topic.reader(name) as reader:
                for batch in reader.batches():
                    print(told(lambda batch=batch: len(list(batch))))  # type: ignore[misc]
                reader.read_many(100)


def verify(kind: type[Queue | Topic], path: Path) -> bool:
    with kind(path) as one:
        return one.verify().ok


USES: dict[str, list[Callable[[Path], object]]] = {
    "queue": [inspect, use_all_of_a_queue, partial(verify, Queue), repair],
    "topic": [use_all_of_a_topic, partial(verify, Topic), repair_topic],
}


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_file_of_a_tebibyte_is_a_named_error_or_what_it_was(kind: str, tmp_path: Path) -> None:
    for number, name in enumerate(name for name in (QUEUE if kind == "queue" else TOPIC) if name.startswith("killed/")):
        place = unpacked(tmp_path / str(number))
        os.truncate(place / name, 1 << 40)  # a hole: it takes no room
    answers = within_little_memory(kind, tmp_path).splitlines()
    assert len(answers) > 3 * len(list(tmp_path.iterdir()))
    assert {answer.partition(":")[0] for answer in answers if not answer.startswith("nothing")} == {"BadManifest", "Corrupt"}
    assert any(answer.startswith("Corrupt") and "has 1,099,511,627,776 bytes" in answer for answer in answers)


@pytest.mark.parametrize("length", [0x7FFFFFFF, 0xFFFFFFFF])
def test_a_frame_that_says_that_it_has_gibibytes_was_torn_and_is_cut_off(length: int, tmp_path: Path) -> None:
    for kind, logs_of in (("queue", ["queue.wal"]), ("topic", ["topic/topic.wal", "topic/state/all.wal"])):
        for number, name in enumerate(logs_of):
            log = unpacked(tmp_path / f"{kind}{number}") / "closed" / name
            with log.open("ab") as opened:
                opened.write(length.to_bytes(4) + bytes(8) + b"\6" + b"x" * 100)
        answers = within_little_memory(kind, tmp_path).splitlines()
        assert answers
        assert all(answer.startswith("nothing wrong") for answer in answers)


def test_an_item_of_diskqueue_that_says_that_it_has_gibibytes_is_named(tmp_path: Path) -> None:
    start, end = bytes.fromhex("12fb5bb7bb93b642acb1a897239ea3a5"), bytes.fromhex("05976c8656449d4eb4523146b3bfa4ce")
    item = struct.pack("<IBiii", 0x42FEBCA1, 1, 0, 0, 0x7FFFFFFF)
    (tmp_path / "transaction.log").write_bytes((start + struct.pack("<i", 1) + item + end) * 10_000)
    (tmp_path / "data.0").write_bytes(b"short")
    answer = within_little_memory("diskqueue", tmp_path)
    assert answer.startswith("Corrupt: ")
    assert "the file ends before item 1, which has 2,147,483,647 bytes" in answer


@pytest.mark.parametrize("depth", [100_000, 10_000_000])
def test_a_manifest_of_brackets_is_no_manifest_and_takes_no_memory(depth: int, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"[" * depth)
    assert within_little_memory("manifest", tmp_path).startswith("BadManifest: ")


def segment(file: str = "q.1", start: int = 13, end: int = 16, records: int = 1, **more: Any) -> dict[str, Any]:
    return {"file": file, "start": start, "end": end, "records": records, "crc32": "00000000", **more}


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([segment(end=10**18)], "not a range of a chunk file"),
        ([segment(records=10**18)], "do not fit into 3 bytes"),
        ([segment(start=-1)], "negative"),
        ([segment(boundaries=[[10**18, 1]])], "boundaries must rise"),
        ([segment(file="../q.1")], "not a plain name"),
        ([segment(file="/etc/passwd")], "not a plain name"),
        ([segment(file="s3://bucket/q.1")], "not a plain name"),
        ([segment(file="file:///etc/passwd")], "not a plain name"),
        ([segment(), segment()], "two segments have bytes 13 of file 'q.1'"),
        ([segment(end=19, records=2), segment(), segment("q.2")], "two segments have bytes 13 of file 'q.1'"),
    ],
)
def test_a_manifest_that_asks_for_too_much_or_for_others_or_twice_is_refused(
    segments: list[Any], says: str, tmp_path: Path
) -> None:
    names = {"version": 1, "id": "q-1", "key": "k", "queue": "q", "layout": "chunk", "created": "2026-11-22T00:00:00Z"}
    body = names | {"attempt": 1, "records": len(segments), "bytes": len(segments), "segments": segments}
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(BadManifest, match=says):
        manifest.load(tmp_path)


def test_a_topic_whose_log_tells_of_thirty_thousand_sessions_opens(tmp_path: Path) -> None:
    with Topic(tmp_path / "topic") as topic, topic.reader("all"):
        topic.append(b"one")
    log = tmp_path / "topic" / "topic.wal"
    state = topics.replay(log.read_bytes(), str(log)).state
    state.sessions = {f"{number:032x}": ["all", "never was"] for number in range(30_000)}
    log.write_bytes(topics.snapshot(state, 1))
    assert within_little_memory("topic", tmp_path).splitlines()[0] == "nothing wrong, None"
    with Topic(tmp_path / "topic") as topic:
        assert [message.body for message in topic] == [b"one", b"more"]


# Another user in the same directory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def as_nobody(program: str, place: Path) -> str:
    # Which enters the directory first: those above it may be closed to others.
    return subprocess.run(
        ["/bin/sh", "-c", program],
        cwd=place,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp, with a file of root's that others cannot read."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "precious").write_bytes(b"theirs")
    return tmp_path / "shared"


@needs_root
def test_another_user_of_the_directory_reads_nothing_and_changes_nothing(shared: Path) -> None:
    with Queue(shared / "queue") as queue, Topic(shared / "topic") as topic, topic.reader("all") as reader:
        queue.put_many([b"secret"] * 10)
        queue.lease("run", max_records=5)
        topic.append(b"secret")
        reader.lease("run")
        before = content(shared)
        look = "id -u; cat queue* queue.batches/*/* topic/* topic/*/*"
        change = "for f in queue*; do mv $f away; rm -rf $f; echo x >>$f; done; rm -rf topic"
        assert as_nobody(f"{look}; {change}", shared) == f"{NOBODY}\n"
        assert content(shared) == before
        assert all(path.stat().st_mode & 0o077 == 0 for path in shared.rglob("*"))


LATER = ["queue.wal", "queue.wal.tmp", "queue.1", "queue.lease", "queue.batches", "queue.spill", "queue.dead"]


@needs_root
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("put", ["ln -s {precious} {name}", "mkfifo {name}", "mkdir -m 777 {name}", "ln -s .. {name}"])
def test_what_another_user_has_put_in_the_place_of_ours_is_refused_or_not_followed(shared: Path, name: str, put: str) -> None:
    as_nobody(put.format(precious=shared.parent / "precious", name=name), shared)
    assert os.path.lexists(shared / name)
    use_queue(shared / "queue")
    assert sorted(path.name for path in shared.parent.iterdir()) == ["precious", "shared"]
    assert (shared.parent / "precious").read_bytes() == b"theirs"


if __name__ == "__main__":
    kind, where = sys.argv[1], Path(sys.argv[2])
    if kind == "manifest":
        print(told(lambda: manifest.load(where)))
    elif kind == "diskqueue":
        print(told(lambda: list(diskqueue.read(str(where), diskqueue.find(str(where)).items, lambda *_: None))))
    else:
        for found in sorted(where.glob(f"**/{kind}")):
            for one in USES[kind]:
                print(told(lambda one=one, found=found: one(found)))  # type: ignore[misc]
