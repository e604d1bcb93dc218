"""Whatever is damaged, a repair leaves a queue that opens, delivers nothing wrong, and a report that names what is missing."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk import JournalDisk, NoSync, image
from test_crash import Workload, script, view
from test_failing_calls import FailingDisk
from test_java_states import DAMAGED, Original
from test_java_states import build as build  # a fixture

import qewqew_core.queue
import qewqew_core.state
import qewqew_core.writing
from qewqew_core import BadPath, CorruptQueue, Queue, QueueLocked, RepairReport, repair
from qewqew_core.log import replay

SIZE = 100


@dataclass
class Made:
    """A queue on disk, and what was told to whom."""

    folder: Path
    records: list[bytes]  # that wait
    batches: dict[str, list[bytes]]  # leased, returned or dead
    ever: set[bytes]  # all that were ever put
    any_order: bool = False  # batches were put back


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(qewqew_core.writing, "PIECE_BYTES", 40)
    monkeypatch.setattr(qewqew_core.state, "PIECE_BYTES", 40)


def fill(q: Queue, ever: set[bytes], inline: bool) -> None:
    """Some of everything: batches of each state, keys, records that the log carries and records that it does not."""

    def put(*names: str, key: str | None = None) -> None:
        records = [name.encode() + b"." * (len(name) * 5 % 11) for name in names]
        ever.update(records)
        q._inline_bytes = 1000 if inline else 30
        q.put_many(records, key=key)

    put(*(f"l{n}" for n in range(8)))
    q.lease("leased", max_records=7)
    put(*(f"r{n}" for n in range(5)))
    q.lease("returned", max_records=3).nack("again")
    q.get()
    put("a1", "a2", key="putkey")
    batch = q.lease("returned")
    more = q.lease("acked", max_records=2)
    more.ack()
    batch.nack("once more")
    put(*(f"d{n}" for n in range(3)))
    q.get_many(2)
    dead = q.lease("dead", max_records=1) or q.lease("dead2", max_records=1)
    if dead.state == "leased":
        dead.to_dead_letters("bad")


def make(folder: Path, how: str) -> Made:
    """`closed`, or `crashed` (killed); `log` (the log carries the payload) or `chunks`."""
    how, _, carried = how.partition(" ")
    ever: set[bytes] = set()
    live = folder / "live"
    live.mkdir(parents=True)
    q = Queue(live / "q", chunk_size=SIZE)
    fill(q, ever, carried == "log")
    if how == "closed":
        more = [b"w%d" % n + b"-" * n for n in range(12)]
    else:
        q.close()
        q = Queue(live / "q", chunk_size=SIZE)
        more = [b"w%d" % n + b"-" * n for n in range(9)]
    for record in more:
        ever.add(record)
        q._inline_bytes = 1000 if carried == "log" else 3
        q.put(record)
    q.get_many(2)
    records, found = list(q), {one.id: list(one) for one in (*q.batches(), *q.dead())}
    if how == "closed":
        q.close()
        target = live
    else:
        target = folder / "crashed"
        shutil.copytree(live, target)
        q.close()
    return Made(target, records, found, ever)


HOW = ["closed log", "closed chunks", "crashed log", "crashed chunks"]


@pytest.fixture(params=HOW)
def made(request, tmp_path) -> Made:
    return make(tmp_path, request.param)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None for one in sorted(folder.rglob("*"))}


def check(folder: Path, made: Made, what: str) -> RepairReport:
    """Repair, and hold the result against what was there."""
    report = repair(folder / "q", _files=NoSync())
    unchanged = content(folder)
    again = repair(folder / "q", _files=NoSync())
    assert (again.ok, again.changed) == (True, False), f"{what}: {again}"
    assert content(folder) == unchanged, what
    assert (again.records, again.batches) == (report.records, report.batches), what
    with Queue(folder / "q", chunk_size=SIZE, _files=NoSync()) as q:
        assert q.verify().problems == [], what
        records = list(q)
        batches = {one.id: list(one) for one in (*q.batches(), *q.dead())}
        offered = [record for orphan in q.recover() for record in orphan]
        assert len(records) == report.records, what
    everything = [*records, *(record for batch in batches.values() for record in batch)]
    assert set(everything) <= made.ever, f"{what}: never put"
    in_log = any(damage.path.endswith(".log") for damage in report.damage)
    firsts = list(dict.fromkeys(record for record in records if record in made.records))
    # What was put back to the front by a commit behind the damage comes in the order in which it was put.
    in_order = firsts == [record for record in made.records if record in firsts]
    assert in_order or (in_log and made.any_order), f"{what}: out of order"
    pointers = any("header was" in damage.what or "head, tail" in damage.what for damage in report.damage)
    if not (in_log or pointers or report.notes or "earlier" in what):
        assert len(set(everything)) == len(everything), f"{what}: repeated, but the log is whole: {report}"
    expected = {*made.records, *(record for batch in made.batches.values() for record in batch)}
    lost = set() if "earlier" in what else expected - set(everything) - set(offered)
    known = [damage.records for damage in report.damage]
    named = len(lost) <= sum(one or 0 for one in known) or None in known or (report.notes and report.ok)
    assert named, f"{what}: {lost} {report}"
    assert report.changed == (report.set_aside is not None) == (not report.ok)
    if report.damage:
        assert json.loads(Path(report.set_aside, "report.json").read_text())["damage"]
    return report


Change = Callable[[bytes, int], Iterator[tuple[str, bytes]]]


def damaged_copies(made: Made, change: Change, every: int) -> Iterator[tuple[str, Path]]:
    """The queue in a new folder, for each file and each change of it."""
    folder = made.folder.with_name("damaged")
    for file in sorted(one for one in made.folder.rglob("*") if one.is_file()):
        name = file.relative_to(made.folder)
        for what, data in change(file.read_bytes(), every if len(file.read_bytes()) > 2 * SIZE else 1 + every // 3):
            shutil.copytree(made.folder, folder)
            (folder / name).write_bytes(data)
            yield f"{name}: {what}", folder
            shutil.rmtree(folder)


def written(data: bytes) -> int:
    """Behind that is allocated space, and little of it is enough."""
    return min(len(data), len(data.rstrip(b"\0")) + 8)


def flips(data: bytes, every: int) -> Iterator[tuple[str, bytes]]:
    for at in range(0, written(data), every):
        bit = 1 << at * 5 % 8
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def cuts(data: bytes, every: int) -> Iterator[tuple[str, bytes]]:
    for end in range(0, written(data), every):
        what = f"cut at {end}"
        with contextlib.suppress(CorruptQueue):  # a log that ends with a whole commit tells nothing of those behind it
            what += ", as if the crash was earlier" * (not any(data[replay(data[:end], "").end : end]))
        yield what, data[:end]


def test_a_queue_without_damage_is_not_changed(made):
    report = repair(made.folder / "q")
    assert (report.damage, report.changed, report.set_aside, report.notes) == ([], False, None, [])
    assert report.records == len(made.records)
    before = content(made.folder)
    assert repair(made.folder / "q") == report
    assert content(made.folder) == before
    with Queue(made.folder / "q") as q:
        assert list(q) == made.records
        assert {one.id: list(one) for one in (*q.batches(), *q.dead())} == made.batches


@pytest.mark.parametrize("change", [flips, cuts], ids=["flipped", "cut"])
@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.soak)])
def test_any_byte_of_any_file(made, change, every):
    count = 0
    for what, folder in damaged_copies(made, change, every):
        check(folder, made, what)
        count += 1
    assert count > 2000 / every


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"), reverse=True)


@pytest.mark.parametrize("also", [None, "q.log", "q"], ids=["alone", "and the log", "and the header"])
def test_any_file_or_directory_may_be_missing(made, also):
    folder = made.folder.with_name("damaged")
    for one in everything(made.folder):
        shutil.copytree(made.folder, folder)
        if also:
            (folder / also).unlink()
        gone = folder / one.relative_to(made.folder)
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        check(folder, made, f"without {gone.name} and {also}")
        shutil.rmtree(folder)


def test_pieces_that_are_right_are_kept_and_the_report_says_where_the_others_were(tmp_path):
    with Queue(tmp_path / "q", chunk_size=1000) as q:
        q._inline_bytes = 0
        records = [b"%d" % n * 20 for n in range(10, 22)]
        q.put_many(records)
    data = bytearray((tmp_path / "q.1").read_bytes())
    at = data.index(records[4])
    data[at] ^= 1
    (tmp_path / "q.1").write_bytes(data)
    report = repair(tmp_path / "q")
    assert report.records == 11
    (damage,) = report.damage
    assert (damage.path, damage.offset, damage.bytes, damage.records) == (str(tmp_path / "q.1"), at - 2, 42, 1)
    assert Path(report.set_aside, "q.1").read_bytes()[10:] == data[10:]
    body = json.loads(Path(report.set_aside, "report.json").read_text())
    assert body["damage"][0]["path"] == "q.1"
    assert body["moved"] == [["q.1", "q.damaged/1/q.1"]]
    with Queue(tmp_path / "q") as q:
        assert list(q) == records[:4] + records[5:]


def test_what_sessions_took_out_of_order_is_neither_delivered_nor_counted(tmp_path):
    live = tmp_path / "live"
    live.mkdir()
    q = Queue(live / "q", chunk_size=1000)
    q._inline_bytes = 0
    records = [b"%d" % n * 20 for n in range(10, 26)]
    q.put_many(records)
    holds, takes = q.session(), q.session()
    assert holds.get_many(2) == records[:2]
    assert takes.get_many(3) == records[2:5]
    takes.commit()
    shutil.copytree(live, tmp_path / "crashed")
    q.close()
    path = tmp_path / "crashed" / "q"
    data = bytearray(path.with_name("q.1").read_bytes())
    bad = [4, 7, 8]
    for number in bad:
        data[data.index(records[number])] ^= 1
    path.with_name("q.1").write_bytes(data)
    report = repair(path)
    assert [one.records for one in report.damage] == [0, 2]  # the first was taken
    with Queue(path) as q:
        assert list(q) == [one for number, one in enumerate(records) if number not in (2, 3, *bad)]
    assert repair(path).ok


@pytest.mark.parametrize("size", [60, 3000])
def test_a_segment_keeps_what_is_right_and_its_batch_its_id(tmp_path, size):
    with Queue(tmp_path / "q", chunk_size=size) as q:
        q._inline_bytes = 0
        q.put_many([b"%d" % n * 20 for n in range(10, 40)])
        batch = q.lease("key", lease_timeout=3600)
        records = list(batch)
        for file in Path(batch.manifest_path).parent.glob("q.*"):
            data = bytearray(file.read_bytes())
            if records[3] in data:
                data[data.index(records[3])] ^= 1
                file.write_bytes(data)
        with pytest.raises(CorruptQueue):
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
    assert content(tmp_path) == {"text": b"no queue"}
    with Queue(tmp_path / "q"), pytest.raises(QueueLocked):
        repair(tmp_path / "q", lock_timeout=0)


def test_what_a_commit_behind_the_damage_has_put_is_not_lost(tmp_path):
    """Some in the log, some in the chunk files; a key is remembered with its records."""
    live = tmp_path / "live"
    live.mkdir()
    q = Queue(live / "q", chunk_size=100)
    q.put(b"before")
    at = q._log.end
    q.put(b"damaged")
    q.put_many([b"one", b"two"], key="key")
    q._inline_bytes = 0
    q.put_many([b"large%d" % n * 5 for n in range(8)])
    q._inline_bytes = 1000
    q.put(b"last")
    shutil.copytree(live, tmp_path / "crashed")
    q.close()
    path = tmp_path / "crashed" / "q"
    log = bytearray(path.with_name("q.log").read_bytes())
    log[at + 20] ^= 1
    path.with_name("q.log").write_bytes(log)
    with pytest.raises(CorruptQueue, match=r"qewqew repair .* rescues what can be read"):
        Queue(path)
    report = repair(path)
    assert [(one.path, one.offset, one.records) for one in report.damage] == [(str(path) + ".log", at, None)]
    assert "will be delivered again" in report.notes[0]
    with Queue(path, chunk_size=100) as q:
        assert q.put_many([b"one", b"two"], key="key") == 2
        assert list(q) == [b"before", b"one", b"two", *(b"large%d" % n * 5 for n in range(8)), b"last"]


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
        original.header(2)
    report = repair(path)
    with Queue(path, chunk_size=22) as q:
        records = list(q)
        offered = [record for orphan in q.recover() for record in orphan]
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
    before = content(tmp_path)
    report = repair(tmp_path / "q")
    assert report.ok
    assert "another program has used the queue" in report.notes[0]
    assert {name: data for name, data in content(tmp_path).items() if name not in ("q.log",)} == {
        name: data for name, data in before.items() if name not in ("q.log",)
    }
    with Queue(tmp_path / "q") as q:
        assert list(q) == [b"ccc", b"ddd", b"eee"]
        assert list(q.batch(q.batches()[0].id)) == [b"aaa"]


@pytest.mark.parametrize("seed", range(4))
def test_random_queues_are_found_in_order_and_repaired(tmp_path, seed):
    """Whatever was done to the queue, nothing is wrong with it; and flipped somewhere, nothing wrong is delivered."""
    root = tmp_path / "work"
    root.mkdir()
    work = Workload(JournalDisk(str(root)), str(root / "q"), "commit", chunk_size=64)
    script(work, random.Random(seed), 40)
    ever = {b"%d:" % n + b"x" * (n * 7 % 9) for n in range(1, work.serial + 1)}
    for stop in range(work.disk.begin + seed, len(work.disk.calls), 37):
        image(work.disk.calls[:stop], str(root), tmp_path / "image", None)
        shutil.copytree(tmp_path / "image", tmp_path / "same")
        with Queue(tmp_path / "same" / "q", chunk_size=64) as q:
            seen = view(q)
        report = repair(tmp_path / "image" / "q")
        assert (report.damage, report.notes, report.changed) == ([], [], False)
        with Queue(tmp_path / "image" / "q", chunk_size=64) as q:
            assert view(q) == seen
        made = Made(tmp_path / "image", seen[0], {key: list(value[2]) for key, value in seen[1].items()}, ever, any_order=True)
        for file in [one for one in everything(tmp_path / "image") if one.is_file() and one.stat().st_size][:4]:
            shutil.copytree(tmp_path / "image", tmp_path / "damaged")
            data = bytearray(file.read_bytes())
            data[random.Random(stop).randrange(len(data))] ^= 1 << stop % 8
            (tmp_path / "damaged" / file.relative_to(made.folder)).write_bytes(data)
            check(tmp_path / "damaged", made, f"{stop}: {file.name}")
            shutil.rmtree(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "image")
        shutil.rmtree(tmp_path / "same")


# Stopped in between


def wreck(folder: Path) -> None:
    """Damage of each kind at once."""
    for path in sorted(folder.rglob("q.[0-9]*")):
        if path.is_file() and path.stat().st_size > 30:
            data = bytearray(path.read_bytes())
            data[24] ^= 2
            path.write_bytes(data)
    (folder / "q").write_bytes(b"\x77\x77")
    for path in sorted(folder.rglob("manifest.json"))[:1]:
        path.unlink()


def wreck_log(folder: Path) -> None:
    wreck(folder)
    data = bytearray((folder / "q.log").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "q.log").write_bytes(data)


def no_log(folder: Path) -> None:
    (folder / "q.log").unlink()


WRECKS = [wreck, wreck_log, no_log]


def after_repair(folder: Path) -> tuple[object, ...]:
    with Queue(folder / "q", chunk_size=SIZE, _files=NoSync()) as q:
        records, batches = view(q)
        return records, {name: batch[2] for name, batch in batches.items()}


def set_aside(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.glob("q.damaged/*/q*") if one.is_file())


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("wrecked", WRECKS)
def test_a_repair_that_is_stopped_anywhere_is_finished_by_the_next(tmp_path, wrecked, power):
    made = make(tmp_path, "crashed chunks")
    wrecked(made.folder)
    disk = JournalDisk(str(made.folder))
    report = repair(made.folder / "q", _files=disk)
    assert report.damage
    shutil.copytree(made.folder, tmp_path / "good")
    good, kept = after_repair(tmp_path / "good"), set_aside(tmp_path / "good")
    assert good[0]
    for stop in range(disk.begin, len(disk.calls) + 1):
        what = f"after call {stop} of {disk.begin}..{len(disk.calls)}"
        folder = tmp_path / "image"
        image(disk.calls[:stop], str(made.folder), folder, random.Random(stop) if power else None)
        if stop % 2:  # opening it in between spoils nothing
            with contextlib.suppress(CorruptQueue):
                Queue(folder / "q", chunk_size=SIZE, _files=NoSync()).close()
        repair(folder / "q", _files=NoSync())
        assert after_repair(folder) == good, what
        assert set_aside(folder) >= kept, what
        shutil.rmtree(folder)


@pytest.mark.parametrize(("error", "for_ever"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO once", "full disk"])
@pytest.mark.parametrize("wrecked", WRECKS)
def test_any_call_of_a_repair_may_fail(tmp_path, wrecked, error, for_ever):
    made = make(tmp_path, "crashed chunks")
    wrecked(made.folder)
    shutil.copytree(made.folder, tmp_path / "good")
    repair(tmp_path / "good" / "q")
    good, kept = after_repair(tmp_path / "good"), set_aside(tmp_path / "good")
    number, failed = 1, True
    while failed:
        folder = tmp_path / "failing"
        shutil.copytree(made.folder, folder)
        disk = FailingDisk(str(folder), number, error, False, for_ever)
        with contextlib.suppress(OSError):
            repair(folder / "q", _files=disk)
        failed = disk.failed is not None
        repair(folder / "q", _files=NoSync())
        assert after_repair(folder) == good, f"{disk.failed}, call {number}"
        assert set_aside(folder) >= kept, f"{disk.failed}, call {number}"
        shutil.rmtree(folder)
        number += 2
    assert number > 20
