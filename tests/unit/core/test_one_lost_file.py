"""A kill and one file that is lost, cut or damaged, together: neither opening nor a repair makes less readable than it found.

Random work is stopped after any call of the disk, as in test_crash.py, and one file is damaged. What is in the other files of
committed records is there after a failed opening too, and after a repair it is delivered or set aside. What was
taken or acknowledged does not come again, and nothing comes twice. Whoever refuses says what is wrong, and has changed nothing if
he says so.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from damage import Change, Cut, Damage, tree, write, written
from disk import JournalDisk, NoSync, image
from stride import Every, swept
from views import View
from work import QueueWork, SessionWork, TopicWork, Work

from qewqew_core import Corrupt, QewQewError, Queue, repair, repair_topic
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths

MARK = re.compile(rb"<\d{6}>")  # with which each record begins, wherever it is


def marked(record: bytes, serial: int) -> bytes:
    return b"<%06d>" % serial + record


class MarkedQueue(QueueWork):
    def record(self, luck: random.Random) -> Any:
        return marked(super().record(luck), self.serial)


class MarkedSessions(SessionWork):
    most_records = 4

    def record(self, luck: random.Random) -> Any:
        return marked(super().record(luck), self.serial)


class MarkedTopic(TopicWork):
    def record(self, luck: random.Random) -> Any:
        message = super().record(luck)
        return message._replace(body=marked(message.body, self.serial))


KINDS: dict[str, tuple[type[Work], int]] = {
    "queue, log carries": (MarkedQueue, 10_000),
    "queue, chunks carry": (MarkedQueue, 30),
    "sessions": (MarkedSessions, 70),
    "topic, log carries": (MarkedTopic, 100_000),
    "topic, blocks carry": (MarkedTopic, 300),
}


def marks(folder: Path, where: str = "") -> set[bytes]:
    """Which records are in any file below the folder whose path has this in it. What logs carry besides goes when they are cut
    back.
    """
    return {
        record
        for name, data in tree(folder).items()
        if isinstance(data, bytes) and where in name and not name.endswith((paths.LOG, ".log"))
        for record in MARK.findall(data)
    }


def mark(record: bytes) -> bytes:
    return record[:8]


@dataclass
class Case:
    """What was there when the disk was stopped, and which file is damaged then."""

    work: Work
    folder: Path
    before: View
    after: View
    name: str
    what: str

    def seen(self, place: str) -> tuple[set[bytes], set[bytes]]:
        """The records of the messages, or of batches, before the operation that was stopped, and after it."""
        return tuple(  # type: ignore[return-value]
            {
                mark(record)
                for reader in one.readers.values()
                for state, _, _, records in reader.batches.values()
                if state != "acked"
                for record in records
            }
            if place == "batches"
            else set(map(mark, one.records))
            for one in (self.before, self.after)
        )

    def live(self) -> set[bytes]:
        """Those that are committed and were not taken, whether the operation has happened or not."""
        (waiting, then_waiting), (leased, then_leased) = self.seen("messages"), self.seen("batches")
        return (waiting | leased) & (then_waiting | then_leased)

    def maybe(self) -> set[bytes]:
        """Those that may be there."""
        return set().union(*self.seen("messages"), *self.seen("batches"))


def damages(data: bytes, luck: random.Random) -> list[Damage]:
    end = written(data)
    found: list[Damage] = [Cut(None)]
    if end > 1:
        found += [Cut(luck.randrange(end)), Change(luck.randrange(end), 1 << luck.randrange(8))]
    return found


def tells_nothing(name: str, damage: Damage, data: bytes) -> bool:
    """Whether the damage leaves what a crash or another program may, which is in docs/format: what cannot be told apart."""
    changed = damage.of(data)
    if name.endswith((paths.LOG, ".rdx", ".lock", ".idx")) and isinstance(damage, Cut):
        return True
    if name == "q" + paths.LOG and changed is not None:
        with contextlib.suppress(Corrupt):
            logs.replay(changed, name)
            return True
    is_pointer = re.fullmatch(r"q(\.\d+)?", name) is not None and isinstance(damage, Change) and damage.offset < 10
    return is_pointer or name.endswith(".rdx")


def check_error(case: Case, error: QewQewError) -> None:
    """It says what is wrong, and where."""
    assert "No such file" not in str(error), f"{case.what}: {error}"
    assert error.path, f"{case.what}: {error!r}"


def check_opening(case: Case, readable: set[bytes]) -> None:
    found, said = tree(case.folder), ""
    try:
        store = case.work.opened(case.folder, NoSync())
    except QewQewError as error:
        check_error(case, error)
        said = str(error)
    else:
        try:
            with store:
                case.work.settle(store)
        except QewQewError as error:
            check_error(case, error)
    if "Nothing was changed" in said:
        now = tree(case.folder)
        changed = {name for name in found.keys() | now.keys() if found.get(name) != now.get(name) and not name.endswith(".lock")}
        assert not changed, f"{case.what}: {said}, but {changed} changed"
    lost = readable - marks(case.folder)
    assert not lost, f"{case.what}: opening has lost {sorted(lost)}"


def check_queue(case: Case, readable: set[bytes]) -> None:
    repair(case.folder / "q", _files=NoSync())
    with case.work.opened(case.folder, NoSync()) as q:
        delivered = Counter(mark(record) for batch in (*q.batches(), *q.dead()) for record in batch)
        delivered.update(mark(record) for record in q)
        offered = {mark(record) for orphan in q.orphans() for record in orphan}
    lost = readable - delivered.keys() - offered - marks(case.folder, ".damaged/")
    assert not lost, f"{case.what}: repair has lost {sorted(lost)}"
    if not case.name.endswith(paths.LOG):
        assert delivered.keys() <= case.maybe(), f"{case.what}: {sorted(delivered.keys() - case.maybe())} come again"
        assert set(delivered.values()) <= {1}, f"{case.what}: {[one for one in delivered if delivered[one] > 1]} come twice"


def check_topic(case: Case, readable: set[bytes]) -> None:
    if not [*case.folder.glob("t/data/*.zbus")]:
        with contextlib.suppress(Corrupt):  # there are no blocks; or opening has made one, as the log has all of it
            repair_topic(case.folder / "t", _files=NoSync())
        return
    repair_topic(case.folder / "t", _files=NoSync())
    lost = readable - marks(case.folder)
    assert not lost, f"{case.what}: repair has lost {sorted(lost)}"
    with case.work.opened(case.folder, NoSync()) as topic:
        for name in case.before.readers.keys() & case.after.readers.keys():
            if Path(case.name).stem == name or case.name.endswith((".zbus", ".idx", ".log")):
                continue
            before, after = case.before.readers[name], case.after.readers[name]
            with topic.reader(name) as reader:
                numbers = [message.number for message in reader]
            assert len(numbers) == len(set(numbers)), f"{case.what}: {name} delivers twice"
            assert {*numbers} <= before.pending | after.pending, f"{case.what}: {name} delivers again {numbers}"
            if before.filter == after.filter:
                left = {number for number in before.pending & after.pending if number >= case.after.first}
                assert left <= {*numbers}, f"{case.what}: {name} does not deliver {left - {*numbers}}"


@pytest.mark.parametrize("seed", swept(range(4), quick=2))
@pytest.mark.parametrize("kind", KINDS)
def test_neither_opening_nor_repair_makes_less_readable_than_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, every: Every
) -> None:
    chosen, inline = KINDS[kind]
    chosen.small_limits(monkeypatch, inline)
    root, folder, checked = tmp_path / "work", tmp_path / "image", 0
    work = chosen.done(root, "commit", seed)
    calls = work.disk.calls
    for stop in every(range(work.disk.begin, len(calls) + 1), quick=20, full=5):
        luck = random.Random(f"{seed}.{stop}")
        image(calls[:stop], str(root), folder, None)
        files = {name: data for name, data in sorted(tree(folder).items()) if isinstance(data, bytes) and data}
        for name in luck.sample([*files], min(3, len(files))):
            damage = luck.choice(damages(files[name], luck))
            if tells_nothing(name, damage, files[name]):
                continue
            allowed = work.allowed_at(stop)
            what = f"seed {seed}, stopped after call {stop} of {len(calls)}, {name}: {damage}"
            case = Case(work, tmp_path / "damaged", allowed[0], allowed[-1], name, what)
            image(calls[:stop], str(root), case.folder, None)  # links of one file stay so
            write(case.folder / name, damage.of(files[name]))
            # Pieces of a damaged file that are right are kept, too: see test_repair.py.
            readable = (marks(case.folder) & case.live()) - set(MARK.findall(files[name]))
            try:
                if luck.randrange(2):
                    check_opening(case, readable)
                (check_topic if issubclass(chosen, TopicWork) else check_queue)(case, readable)
            except (QewQewError, OSError) as error:
                raise AssertionError(what) from error
            checked += 1
            shutil.rmtree(case.folder)
        shutil.rmtree(folder)
    assert checked > 10


@pytest.mark.parametrize("lost", ["copy", "directory", "manifest", "nothing"])
def test_a_lease_without_its_copy_leaves_the_chunk_that_stays_alone(tmp_path: Path, lost: str) -> None:
    """Killed after the frame of the lease and before its last rename. The copy and the chunk have the same name."""
    root, records = tmp_path / "work", [b"%03d" % number + b"x" * 600 for number in range(100)]
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", _files=disk) as q:
        q.put_many(records)
        q.lease("key", max_records=10)
        (last,) = [number for number, call in enumerate(disk.calls) if call.kind == "rename" and call.path.endswith("q.lease")]
        image(disk.calls[:last], str(root), tmp_path / "killed", None)
    path, making = tmp_path / "killed" / "q", tmp_path / "killed" / "q.lease"
    if lost == "directory":
        shutil.rmtree(making)
    elif lost != "nothing":
        (making / {"copy": "q.30001", "manifest": "manifest.json"}[lost]).unlink()
    if lost != "nothing":
        before = tree(tmp_path / "killed")
        with pytest.raises(Corrupt, match=r"is missing.* Nothing was changed\. `qewqew repair"):
            Queue(path)
        assert tree(tmp_path / "killed") == before
        repair(path)
    with Queue(path) as q:
        assert [list(batch) for batch in q.batches()] == [records[:10]]
        assert list(q) == records[10:]
        assert q.verify().ok


def test_the_unused_end_of_a_leased_chunk_is_given_back_wherever_a_kill_comes(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    disk = JournalDisk(str(root))
    with Queue(root / "q", _files=disk) as q:
        q.put_many([b"x" * 1000] * 10)
        begin = len(disk.calls)
        q.lease("key")
        for stop in range(begin, len(disk.calls) + 1):
            image(disk.calls[:stop], str(root), tmp_path / "killed", None)
            with Queue(tmp_path / "killed" / "q", _files=NoSync()) as opened:
                for batch in opened.batches():
                    (segment,) = Path(batch.manifest_path).parent.glob("q.3*")
                    assert segment.stat().st_size == 10 + 10 * 1002, f"stopped after call {stop}"
            shutil.rmtree(tmp_path / "killed")
