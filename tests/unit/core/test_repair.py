"""Whatever is damaged, a repair leaves a queue that opens, delivers nothing wrong, and a report that names what is missing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from damage import Change, Copy, Cut, Damage, changes, cuts, flip, grows_over_few_zeros, tree
from disk import JournalDisk, NoSync, image
from stores import STORES, QueueStore, TopicStore
from stride import swept
from test_failing_calls import NEVER, FailingDisk
from test_java_states import DAMAGED, Original
from test_java_states import build as build  # a fixture
from views import view
from work import QueueWork

from qewqew_core import (
    BadArgument,
    BadPath,
    Corrupt,
    Locked,
    QewQewError,
    Queue,
    RepairReport,
    repair,
    repair_topic,
)
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.queue.log import replay

SIZE = {"queue": 100, "topic": 700}
STRIDE = {"queue": {"quick": 160, "full": 40}, "topic": {"quick": 1280, "full": 320}}


@dataclass
class Made:
    """A queue or a topic on disk, as "q", and what was told to whom."""

    layout: str
    folder: Path
    records: list[bytes]  # that wait
    batches: dict[str, list[bytes]]  # leased, returned or dead
    ever: set[bytes]  # all that were ever put
    any_order: bool = False  # batches were put back


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(LIMITS, "piece_bytes", 40)


def opened(layout: str, folder: Path) -> QueueStore | TopicStore:
    return STORES[layout][0](folder / "q", SIZE[layout], "commit", _files=NoSync())


def repaired(layout: str, folder: Path, files: Files | None = None) -> RepairReport:
    return {"queue": repair, "topic": repair_topic}[layout](folder / "q", _files=files or NoSync())


def seen(layout: str, folder: Path) -> tuple[list[bytes], dict[str, list[bytes]]]:
    """All that is delivered, which it is by this, and the batches."""
    with contextlib.closing(opened(layout, folder)) as store:
        batches = {one.id: list(one) for one in (*store.leasing.batches(), *store.leasing.dead())}
        return store.get_many(1000), batches


def fill(store: QueueStore | TopicStore, put: Callable[..., None]) -> None:
    """Some of everything: batches of each state, keys, records that the log carries and records that it does not."""
    lease = store.leasing.lease
    put(*(f"l{n}" for n in range(8)))
    lease("leased", max_records=7)
    put(*(f"r{n}" for n in range(5)))
    lease("returned", max_records=3).nack("again")
    store.get()
    put("a1", "a2", key="putkey")
    batch = lease("returned")
    more = lease("acked", max_records=2)
    more.ack()
    batch.nack("once more")
    put(*(f"d{n}" for n in range(3)))
    store.get_many(2)
    dead = lease("dead", max_records=1) or lease("dead2", max_records=1)
    if dead.state == "leased":
        dead.to_dead_letters("bad")


def make(layout: str, folder: Path, how: str) -> Made:
    """`closed`, or `crashed` (killed); `log` (the log carries the payload) or `chunks` (and blocks)."""
    how, _, carried = how.partition(" ")
    ever: set[bytes] = set()
    live = folder / "live"
    live.mkdir(parents=True)

    def put(*records: bytes, key: str | None = None, inline: int = 3) -> None:
        ever.update(records)
        inline = 1000 if carried == "log" else inline
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LIMITS, "inline_bytes", {"commit": inline})
            if layout == "queue":
                store.queue._records.inline_bytes = inline
            store.put_many(records, key=key)

    def put_names(*names: str, key: str | None = None) -> None:
        put(*(name.encode() + b"." * (len(name) * 5 % 11) for name in names), key=key, inline=30)

    store = opened(layout, live)
    fill(store, put_names)
    if how == "crashed":
        store.close()
        store = opened(layout, live)
    for n in range(12 if how == "closed" else 9):
        put(b"w%d" % n + b"-" * n)
    store.get_many(2)
    if how == "closed":
        store.close()
    target = shutil.copytree(live, folder / how)
    store.close()
    shutil.copytree(target, folder / "seen")
    return Made(layout, target, *seen(layout, folder / "seen"), ever)


HOW = {
    "queue": ["closed log", "closed chunks", "crashed log", "crashed chunks"],
    "topic": ["closed log", "crashed chunks"],
}


@pytest.fixture(params=[(layout, how) for layout in STORES for how in HOW[layout]], ids=" ".join)
def made(request, tmp_path) -> Made:
    layout, how = request.param
    return make(layout, tmp_path, how)


def check(folder: Path, made: Made, what: str, believed: bool = False) -> bool:
    """Repair, and hold the result against what was there; whether there was damage."""
    try:
        report = repaired(made.layout, folder)
    except (BadPath, BadArgument):
        missing = tree(made.folder).keys() - tree(folder).keys()
        assert any(name.startswith("q/data") for name in missing), "all blocks are there"
        return True
    unchanged = tree(folder)
    again = repaired(made.layout, folder)
    assert all(one.what.endswith("It stays") for one in again.damage), f"{what}: {again}"  # a topic's messages in the middle
    assert tree(folder) == unchanged, what
    (check_queue if made.layout == "queue" else check_topic)(folder, made, what, believed, report, again)
    return not report.ok


def check_queue(folder: Path, made: Made, what: str, believed: bool, report: RepairReport, again: RepairReport) -> None:
    assert again.ok
    assert (again.records, again.batches) == (report.records, report.batches), what
    with Queue(folder / "q", chunk_size=SIZE["queue"], _files=NoSync()) as q:
        assert q.verify().problems == [], what
        records = list(q)
        batches = {one.id: list(one) for one in (*q.batches(), *q.dead())}
        offered = [record for orphan in q.orphans() for record in orphan]
        assert len(records) == report.records, what
    everything = [*records, *(record for batch in batches.values() for record in batch)]
    assert set(everything) <= made.ever | ({b""} if believed else set()), f"{what}: never put"
    in_log = any(damage.path.endswith(".wal") for damage in report.damage)
    firsts = list(dict.fromkeys(record for record in records if record in made.records))
    # What was put back to the front by a commit behind the damage comes in the order in which it was put.
    in_order = firsts == [record for record in made.records if record in firsts]
    assert in_order or (in_log and made.any_order), f"{what}: out of order"
    pointers = any("header was" in damage.what or "head, tail" in damage.what for damage in report.damage)
    if not (in_log or pointers or report.notes or believed):
        assert len(set(everything)) == len(everything), f"{what}: repeated, but the log is whole: {report}"
    expected = {*made.records, *(record for batch in made.batches.values() for record in batch)}
    lost = set() if believed else expected - set(everything) - set(offered)
    known = [damage.records for damage in report.damage]
    named = len(lost) <= sum(one or 0 for one in known) or None in known or (report.notes and report.ok)
    assert named, f"{what}: {lost} {report}"
    assert (report.set_aside is not None) == (not report.ok)
    if report.damage:
        assert json.loads(Path(report.set_aside, "report.json").read_text())["damage"]


@contextlib.contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except QewQewError as error:
        problems.append(str(error))


def check_topic(folder: Path, made: Made, what: str, believed: bool, report: RepairReport, again: RepairReport) -> None:
    """Messages that cannot be read stay where they are: reading them, or verify, says so."""
    with contextlib.closing(opened("topic", folder)) as store:
        problems = [*map(str, report.damage), *store.verify().problems]
        records, batches = [], {}
        for one in (*store.leasing.batches(), *store.leasing.dead()):
            with noting(problems):
                batches[one.id] = list(one)
        with noting(problems):
            while found := store.get_many(1):
                records += found
    everything = [*records, *(record for batch in batches.values() for record in batch)]
    assert problems or set(everything) <= made.ever, f"{what}: never put"
    assert problems or believed or len(set(everything)) == len(everything), f"{what}: repeated"
    lost = {*made.records, *(record for batch in made.batches.values() for record in batch)} - set(everything)
    assert problems or believed or not lost, f"{what}: {lost}"


def is_believed(name: str, damage: Damage, data: bytes) -> bool:
    """Whether the damage leaves what a program may: a log as of an earlier crash, which ends with a whole commit and tells
    nothing of those behind it; the position of a reader that a zbus server has moved; or a tail behind a few empty records.
    """
    if name.rpartition(".")[2].isdecimal() and isinstance(damage, Change) and grows_over_few_zeros(data, damage.of(data)):
        return True
    if name.endswith(".rdx"):
        return True
    if isinstance(damage, Cut) and damage.size is not None:
        with contextlib.suppress(Corrupt):
            return not any(data[replay(data[: damage.size], "").end : damage.size])
    return False


def test_what_is_not_damaged_is_not_changed(made):
    report = repaired(made.layout, made.folder)
    assert report.ok
    assert (report.damage, report.set_aside, report.notes) == ([], None, [])
    assert report.records == len(made.records if made.layout == "queue" else made.ever)  # a topic keeps them all
    assert report.batches >= len(made.batches)  # the acknowledged ones are counted too
    before = tree(made.folder)
    assert repaired(made.layout, made.folder) == report
    assert tree(made.folder) == before
    assert seen(made.layout, made.folder) == (made.records, made.batches)


@pytest.mark.parametrize("what", [changes, cuts])
def test_any_byte_of_any_file(made, what, every):
    copy, damaged = Copy(made.folder, made.folder.with_name("damaged")), 0
    for name, data in copy.files.items():
        for damage in every(what(data), **STRIDE[made.layout]):
            with copy.damaged(name, damage):
                damaged += check(copy.folder, made, f"{name}: {damage}", is_believed(name, damage, data))
    assert damaged > 3


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"), reverse=True)


@pytest.mark.parametrize("also", [None, "log", "header"])
def test_any_file_or_directory_may_be_missing(made, also, every):
    folder = made.folder.with_name("damaged")
    queue, topic = {None: ((), ()), "log": ("q.wal", "q/q.wal"), "header": ("q", "q/q.idx")}[also]
    for one in every(everything(made.folder), quick=1 if made.layout == "queue" else 8, full=1 if made.layout == "queue" else 4):
        shutil.copytree(made.folder, folder)
        if also:
            (folder / (queue if made.layout == "queue" else topic)).unlink()
        gone = folder / one.relative_to(made.folder)
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        check(folder, made, f"without {gone.name} and {also}")
        shutil.rmtree(folder)


def test_pieces_that_are_right_are_kept_and_the_report_says_where_the_others_were(tmp_path):
    with Queue(tmp_path / "q", chunk_size=1000) as q:
        q._records.inline_bytes = 0
        records = [b"%d" % n * 20 for n in range(10, 22)]
        q.put_many(records)
    at = (tmp_path / "q.30001").read_bytes().index(records[4])
    flip(tmp_path / "q.30001", at)
    data = (tmp_path / "q.30001").read_bytes()
    report = repair(tmp_path / "q")
    assert report.records == 11
    (damage,) = report.damage
    assert (damage.path, damage.offset, damage.bytes, damage.records) == (str(tmp_path / "q.30001"), at - 2, 42, 1)
    assert Path(report.set_aside, "q.30001").read_bytes()[10:] == data[10:]
    body = json.loads(Path(report.set_aside, "report.json").read_text())
    assert body["damage"][0]["path"] == "q.30001"
    assert body["moved"] == [["q.30001", "q.damaged/1/q.30001"]]
    with Queue(tmp_path / "q") as q:
        assert list(q) == records[:4] + records[5:]


def test_what_sessions_took_out_of_order_is_neither_delivered_nor_counted(tmp_path):
    live = tmp_path / "live"
    live.mkdir()
    q = Queue(live / "q", chunk_size=1000)
    q._records.inline_bytes = 0
    records = [b"%d" % n * 20 for n in range(10, 26)]
    q.put_many(records)
    holds, takes = q.session(), q.session()
    assert holds.get_many(2) == records[:2]
    assert takes.get_many(3) == records[2:5]
    takes.commit()
    shutil.copytree(live, tmp_path / "crashed")
    q.close()
    path = tmp_path / "crashed" / "q"
    file, bad = path.with_name("q.30001"), [4, 7, 8]
    for number in bad:
        flip(file, file.read_bytes().index(records[number]))
    report = repair(path)
    assert [one.records for one in report.damage] == [0, 2]  # the first was taken
    with Queue(path) as q:
        assert list(q) == [one for number, one in enumerate(records) if number not in (2, 3, *bad)]
    assert repair(path).ok


@pytest.mark.parametrize("size", [60, 3000])
def test_a_segment_keeps_what_is_right_and_its_batch_its_id(tmp_path, size):
    with Queue(tmp_path / "q", chunk_size=size) as q:
        q._records.inline_bytes = 0
        q.put_many([b"%d" % n * 20 for n in range(10, 40)])
        batch = q.lease("key", lease_timeout=3600)
        records = list(batch)
        for file in Path(batch.manifest_path).parent.glob("q.*"):
            if records[3] in (data := file.read_bytes()):
                flip(file, data.index(records[3]))
        with pytest.raises(Corrupt):
            list(batch)
    report = repair(tmp_path / "q")
    assert [one.records for one in report.damage] == [1]
    with Queue(tmp_path / "q") as q:
        again = q.lease("key")
        assert (again.id, again.attempt, again.records) == (batch.id, 1, 29)
        assert list(again) == records[:3] + records[4:]
        again.put_back()
        assert list(q) == records[:3] + records[4:]


def test_what_is_no_queue_or_in_use_is_left_alone(tmp_path):
    assert repair(tmp_path / "none") == RepairReport()
    (tmp_path / "text").write_bytes(b"no queue")
    with pytest.raises(BadPath, match="is not the header file"):
        repair(tmp_path / "text")
    assert tree(tmp_path) == {"text": b"no queue"}
    with Queue(tmp_path / "q"), pytest.raises(Locked):
        repair(tmp_path / "q", lock_timeout=0)


def test_what_a_commit_behind_the_damage_has_put_is_not_lost(tmp_path):
    """Some in the log, some in the chunk files; a key is remembered with its records."""
    live = tmp_path / "live"
    live.mkdir()
    q = Queue(live / "q", chunk_size=100)
    q.put(b"before")
    at = q._engine.log.end
    q.put(b"damaged")
    q.put_many([b"one", b"two"], key="key")
    q._records.inline_bytes = 0
    q.put_many([b"large%d" % n * 5 for n in range(8)])
    q._records.inline_bytes = 1000
    q.put(b"last")
    shutil.copytree(live, tmp_path / "crashed")
    q.close()
    path = tmp_path / "crashed" / "q"
    flip(path.with_name("q.wal"), at + 20)
    with pytest.raises(Corrupt, match=r"qewqew repair .* rescues what can be read"):
        Queue(path)
    report = repair(path)
    assert [(one.path, one.offset, one.records) for one in report.damage] == [(str(path) + ".wal", at, None)]
    assert "will be delivered again" in report.notes[0]
    with Queue(path, chunk_size=100) as q:
        assert q.put_many([b"one", b"two"], key="key") == 2
        assert list(q) == [b"before", b"one", b"two", *(b"large%d" % n * 5 for n in range(8)), b"last"]


@pytest.mark.req("T7")
@pytest.mark.parametrize("damage", ["a bit at the front", "a bit in the middle", "zeros at the end"])
def test_a_closed_queue_whose_log_is_damaged_is_refused_and_a_repair_finds_all_its_records(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(LIMITS, "log_frames_at_close", 1000)  # else its log is one frame
    records = [b"%d" % number for number in range(200, 400)]
    with Queue(tmp_path / "q", chunk_size=64, _files=NoSync()) as q, q.session() as session:
        for record in records:
            session.put(record)
            session.commit()
    log = tmp_path / "q.wal"
    assert log.stat().st_size > 7000
    if damage == "zeros at the end":
        log.write_bytes(log.read_bytes()[:-4096] + bytes(4096))
    else:
        flip(log, 5000 if damage == "a bit in the middle" else 30)
    with pytest.raises(Corrupt):
        Queue(tmp_path / "q")
    assert not repair(tmp_path / "q").ok
    with Queue(tmp_path / "q") as q:
        assert sorted(set(q)) == records


@pytest.mark.parametrize("state", [pytest.param(one, id=one.name) for one in DAMAGED])
def test_damage_that_the_original_left_is_repaired(build, state):
    path = build(state)
    report = repair(path)
    assert report.damage
    assert repair(path).ok
    with Queue(path, chunk_size=state.size) as q:
        assert len(q) == report.records
        assert q.verify().ok
        q.put(b"more")
        assert q.get_many(100)[-1] == b"more"


@pytest.mark.parametrize("meddle", ["enqueue", "dequeue", "header"])
def test_a_java_program_that_used_a_crashed_queue_loses_nothing(tmp_path, meddle):
    (tmp_path / "live").mkdir()
    with Queue(tmp_path / "live" / "q", chunk_size=22) as q:
        q.put_many([b"aaa", b"bbb", b"ccc"])
        q.close()
        with Queue(tmp_path / "live" / "q", chunk_size=22) as q:
            q.put(b"ddd")
            shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    path = tmp_path / "crashed" / "q"
    original = Original(path, 22)
    if meddle == "enqueue":
        original.enqueue(b"other")
    elif meddle == "dequeue":
        original.dequeue()
    else:
        original.header(30002)
    report = repair(path)
    with Queue(path, chunk_size=22) as q:
        records = list(q)
        offered = [record for orphan in q.orphans() for record in orphan]
    assert set(records) >= {b"bbb", b"ccc", b"ddd"}
    assert meddle != "enqueue" or b"other" in records + offered
    assert report.damage


def test_what_a_java_program_did_with_a_closed_queue_is_left_alone(tmp_path):
    with Queue(tmp_path / "q", chunk_size=22) as q:
        q.put_many([b"aaa", b"bbb", b"ccc", b"ddd"])
        q.lease("key", max_records=1)
    original = Original(tmp_path / "q", 22)
    original.dequeue()
    original.enqueue(b"eee")
    before = tree(tmp_path)
    report = repair(tmp_path / "q")
    assert report.ok
    assert "another program has used the queue" in report.notes[0]
    assert {name: data for name, data in tree(tmp_path).items() if name not in ("q.wal",)} == {
        name: data for name, data in before.items() if name not in ("q.wal",)
    }
    with Queue(tmp_path / "q") as q:
        assert list(q) == [b"ccc", b"ddd", b"eee"]
        assert list(q.batch(q.batches()[0].id)) == [b"aaa"]


@pytest.mark.parametrize("seed", swept(range(4), quick=4))
def test_random_queues_are_found_in_order_and_repaired(tmp_path, seed):
    """Whatever was done to the queue, nothing is wrong with it; and flipped somewhere, nothing wrong is delivered."""
    root = tmp_path / "work"
    work = QueueWork.done(root, "commit", seed)
    ever = {b"%d:" % n + b"x" * (n * 7 % 9) for n in range(1, work.serial + 1)}
    for stop in range(work.disk.begin + seed, len(work.disk.calls), 37):
        image(work.disk.calls[:stop], str(root), tmp_path / "image", None)
        shutil.copytree(tmp_path / "image", tmp_path / "same")
        with Queue(tmp_path / "same" / "q", chunk_size=64) as q:
            before = view(q)
        report = repair(tmp_path / "image" / "q")
        assert (report.damage, report.notes, report.set_aside) == ([], [], None)
        with Queue(tmp_path / "image" / "q", chunk_size=64) as q:
            assert view(q) == before
        batches = {key: list(one[3]) for key, one in before.readers[""].batches.items()}
        made = Made("queue", tmp_path / "image", before.records, batches, ever, any_order=True)
        for file in [one for one in everything(tmp_path / "image") if one.is_file() and one.stat().st_size][:4]:
            shutil.copytree(tmp_path / "image", tmp_path / "damaged")
            flip(
                tmp_path / "damaged" / file.relative_to(made.folder),
                random.Random(stop).randrange(file.stat().st_size),
                1 << stop % 8,
            )
            check(tmp_path / "damaged", made, f"{stop}: {file.name}")
            shutil.rmtree(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "image")
        shutil.rmtree(tmp_path / "same")


# Stopped in between


def wreck(folder: Path) -> None:
    """Damage of each kind at once."""
    for path in sorted(folder.rglob("q.[0-9]*")):
        if path.is_file() and path.stat().st_size > 30:
            flip(path, 24, 2)
    (folder / "q").write_bytes(b"\x77")
    for path in sorted(folder.rglob("manifest.json"))[:1]:
        path.unlink()


def wreck_log(folder: Path) -> None:
    wreck(folder)
    flip(folder / "q.wal", (folder / "q.wal").stat().st_size // 2)


def no_log(folder: Path) -> None:
    (folder / "q.wal").unlink()


def wreck_topic(folder: Path) -> None:
    """Logs and index at once."""
    for name in ("q.wal", "q.idx", "state/the one.wal"):
        flip(folder / "q" / name, 60 if name.endswith("one.wal") else 2)


def no_index(folder: Path) -> None:
    (folder / "q" / "q.idx").unlink()


def cut_block(folder: Path) -> None:
    block = max((folder / "q" / "data").iterdir())
    os.truncate(block, block.stat().st_size - 1)
    (folder / "q" / "q.wal").unlink()


WRECKS = [
    *(("queue", one) for one in (wreck, wreck_log, no_log)),
    *(("topic", one) for one in (wreck_topic, no_index, cut_block)),
]


def set_aside(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*.damaged/*/*") if one.is_file() and one.name != "report.json")


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize(("layout", "wrecked"), WRECKS)
def test_a_repair_that_is_stopped_anywhere_is_finished_by_the_next(tmp_path, layout, wrecked, power, every):
    made = make(layout, tmp_path, "crashed chunks")
    wrecked(made.folder)
    disk = JournalDisk(str(made.folder))
    assert not repaired(layout, made.folder, disk).ok
    shutil.copytree(made.folder, tmp_path / "good")
    good, kept = seen(layout, tmp_path / "good"), set_aside(tmp_path / "good")
    assert good[0]
    for stop in every(range(disk.begin, len(disk.calls) + 1), quick=12, full=4):
        what = f"after call {stop} of {disk.begin}..{len(disk.calls)}"
        folder = tmp_path / "image"
        image(disk.calls[:stop], str(made.folder), folder, random.Random(stop) if power else None)
        if stop % 2:  # opening it in between spoils nothing
            with contextlib.suppress(Corrupt):
                opened(layout, folder).close()
        repaired(layout, folder)
        assert seen(layout, folder) == good, what
        assert set_aside(folder) >= kept, what
        shutil.rmtree(folder)


@pytest.mark.parametrize(("error", "for_ever"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO once", "full disk"])
@pytest.mark.parametrize(("layout", "wrecked"), WRECKS)
def test_any_call_of_a_repair_may_fail(tmp_path, layout, wrecked, error, for_ever, every):
    made = make(layout, tmp_path, "crashed chunks")
    wrecked(made.folder)
    shutil.copytree(made.folder, tmp_path / "good")
    disk = FailingDisk(str(tmp_path / "good"), NEVER, error, False, False)
    repaired(layout, tmp_path / "good", disk)
    good, kept = seen(layout, tmp_path / "good"), set_aside(tmp_path / "good")
    for number in every(range(1, NEVER - disk.left + 1), quick=20, full=10):
        folder = tmp_path / "failing"
        shutil.copytree(made.folder, folder)
        failing = FailingDisk(str(folder), number, error, False, for_ever)
        with contextlib.suppress(OSError):
            repaired(layout, folder, failing)
        assert failing.failed
        repaired(layout, folder)
        assert seen(layout, folder) == good, f"{failing.failed}, call {number}"
        assert set_aside(folder) >= kept, f"{failing.failed}, call {number}"
        shutil.rmtree(folder)
