"""A returned or dead batch in whose place something else is: it is refused by name, and no batch is taken for lost."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from damage import flip

from qewqew_core import BadPath, BatchExpired, Corrupt, Queue, Topic, repair, repair_topic
from qewqew_core.batch import manifest
from qewqew_core.disk.files import Files
from qewqew_core.formats import chunk

PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda place, _: os.mkfifo(place),
    "link": lambda place, elsewhere: place.symlink_to(elsewhere),
    "link to nothing": lambda place, elsewhere: place.symlink_to(elsewhere / "no"),
    # A file where a directory belongs, or a directory where a file does
    "other": lambda place, kept: place.write_text("not ours") if kept.is_dir() else place.mkdir(),
}


@contextmanager
def a_store(kind: str, path: Path) -> Iterator[Any]:
    if kind == "queue":
        with Queue(path) as queue:
            yield queue
    else:
        with Topic(path) as topic, topic.reader("r") as reader:
            yield reader


def fill(kind: str, path: Path) -> None:
    if kind == "queue":
        with Queue(path) as queue:
            queue.put_many([b"a", b"b"])
    else:
        with Topic(path) as topic:
            topic.append(b"a")
            topic.append(b"b")


@pytest.mark.parametrize("kind", ["queue", "topic"])
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("at", ["batches", "batch", "file", "manifest"])
def test_what_is_in_the_place_of_a_returned_batch_is_refused_and_the_batch_comes_once_it_is_gone(
    tmp_path: Path, kind: str, plant: str, at: str
) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
        batch.nack("the cluster was gone")
    directory = Path(batch.manifest_path).parent
    files = {each.name: each for each in directory.iterdir()}
    manifest = files.pop("manifest.json")
    place = {"batches": directory.parent, "batch": directory, "file": min(files.values()), "manifest": manifest}[at]
    kept = tmp_path / "kept"
    place.rename(kept)
    PLANTS[plant](place, kept)
    with pytest.raises(BadPath, match="move it away"), a_store(kind, path) as leasing:
        leasing.lease("second")
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    else:
        place.unlink()
    kept.rename(place)
    with a_store(kind, path) as leasing:
        again = leasing.lease("third")
        assert [bytes(getattr(record, "body", record)) for record in again] == [b"a", b"b"]
        assert (again.id, again.attempt) == (batch.id, 2)
        assert leasing.dead() == []
        again.ack()


@pytest.mark.parametrize("kind", ["queue", "topic"])
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("at", ["from", "to", "the home of from", "the home of to", "a file", "the manifest"])
@pytest.mark.parametrize("to", ["dead letters", "queue", "nowhere", "the front"])
def test_no_batch_is_moved_from_or_to_where_something_else_is(tmp_path: Path, kind: str, plant: str, at: str, to: str) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
        if to != "dead letters":
            batch.to_dead_letters("x")
    here = Path(batch.manifest_path).parent
    home = here.parent
    other = home.with_suffix(".dead" if to == "dead letters" else ".batches")
    files = {each.name: each for each in here.iterdir()}
    manifest = files.pop("manifest.json")
    place = {"from": here, "to": other / here.name, "the home of from": home, "the home of to": other}.get(at)
    place = place or (manifest if at == "the manifest" else min(files.values()))
    kept, was_there = tmp_path / "kept", place.exists()
    place.parent.mkdir(exist_ok=True)
    place.rename(kept) if was_there else kept.mkdir()
    PLANTS[plant](place, kept)

    def move() -> None:
        with a_store(kind, path) as leasing:
            (batch,) = leasing.batches() if to == "dead letters" else leasing.dead()
            if to == "dead letters":
                batch.to_dead_letters("x")
            else:
                {"queue": batch.return_to_queue, "nowhere": batch.drop, "the front": batch.put_back}[to]()

    with pytest.raises(BadPath, match="move it away"):
        move()
    place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    if was_there:
        kept.rename(place)
    move()
    with a_store(kind, path) as leasing:
        if to == "nowhere":
            assert leasing.lease("next") is None
            return
        (moved,) = {"queue": leasing.batches, "dead letters": leasing.dead, "the front": lambda: [leasing.lease("next")]}[to]()
        assert [bytes(getattr(record, "body", record)) for record in moved] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["queue", "topic"])
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("at", ["home", "batch", "file", "manifest"])
def test_no_batch_is_read_through_what_is_in_its_place(tmp_path: Path, kind: str, plant: str, at: str) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
        directory = Path(batch.manifest_path).parent
        files = {each.name: each for each in directory.iterdir()}
        manifest = files.pop("manifest.json")
        place = {"home": directory.parent, "batch": directory, "file": min(files.values()), "manifest": manifest}[at]
        place.rename(kept := tmp_path / "kept")
        PLANTS[plant](place, kept)
        for act in list, lambda batch: batch.publish(tmp_path / "published"):
            with pytest.raises(BadPath, match="move it away"):
                act(batch)
        assert not (tmp_path / "published").exists()
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
        kept.rename(place)
        assert len(list(batch)) == 2


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_in_the_place_of_an_acknowledged_batch_keeps_it_from_being_removed_and_nothing_else(
    tmp_path: Path, plant: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    fill("queue", path)
    with Queue(path) as queue:
        batch = queue.lease("first", max_records=1)
        assert batch is not None
        batch.ack()
    manifest = Path(batch.manifest_path)
    segment = min({*manifest.parent.iterdir()} - {manifest})
    segment.rename(kept := tmp_path / "kept")
    PLANTS[plant](segment, kept)
    with Queue(path, retention=timedelta(0)) as queue:
        second = queue.lease("second")
        assert second is not None
        second.ack()
        assert queue.lease("third") is None
    assert "expired batches could not be removed" in caplog.text
    assert segment.parent.is_dir()


@pytest.mark.parametrize("kind", ["queue", "topic"])
@pytest.mark.parametrize("end", ["return_to_queue", "put_back"])
def test_a_batch_that_was_away_when_it_became_a_dead_letter_is_found(tmp_path: Path, kind: str, end: str) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
    home = Path(batch.manifest_path).parent.parent
    home.rename(tmp_path / "away")
    with a_store(kind, path) as leasing:
        leasing.batches()[0].to_dead_letters("x")
    home.rmdir() if home.exists() else None
    (tmp_path / "away").rename(home)
    with a_store(kind, path) as leasing:
        getattr(leasing.dead()[0], end)()
        again = leasing.lease("second")
        assert [bytes(getattr(record, "body", record)) for record in again] == [b"a", b"b"]
        again.nack("x")
    directory = Path(again.manifest_path).parent
    (other := home.with_suffix(".dead")).mkdir(exist_ok=True)
    directory.rename(other / directory.name)
    with a_store(kind, path) as leasing:
        third = leasing.lease("third")
        assert (third.id, len(list(third)), leasing.dead()) == (again.id, 2, [])


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_dead_batch_comes_back_where_copies_have_left_out_empty_directories(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
        batch.to_dead_letters("x")
    (home,) = tmp_path.rglob("*.batches")
    home.rmdir()
    with a_store(kind, path) as leasing:
        leasing.dead()[0].return_to_queue()
        again = leasing.lease("second")
        assert [bytes(getattr(record, "body", record)) for record in again] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["queue", "topic"])
@pytest.mark.parametrize("state", ["leased", "returned", "dead"])
def test_a_batch_at_its_other_place_is_named_with_that_place_and_repair_says_that_it_moved_it(
    tmp_path: Path, kind: str, state: str
) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
        if state != "leased":
            (batch.nack if state == "returned" else batch.to_dead_letters)("x")
    home = Path(batch.manifest_path).parent
    other = home.parent.with_suffix(".batches" if state == "dead" else ".dead") / home.name
    other.parent.mkdir(exist_ok=True)
    home.rename(other)
    said = f"files of batch {batch.id} are in {other}, where they do not belong"
    with Queue(path) if kind == "queue" else Topic(path) as store:
        (problem,) = store.verify().problems
    assert problem.startswith(f"{home}: {said}")
    if kind == "queue":  # opening a reader moves it back
        with Queue(path) as queue, pytest.raises(Corrupt, match=re.escape(said)):
            list(queue.batch(batch.id))
    (damage,) = (repair if kind == "queue" else repair_topic)(path).damage
    assert (damage.path, damage.records, damage.what) == (
        str(home),
        0,
        f"files{' of the batch' if kind == 'queue' else ''} were in {other}; they were moved back",
    )
    with Queue(path) if kind == "queue" else Topic(path) as store:
        assert store.verify().ok
    with a_store(kind, path) as leasing:
        assert [bytes(getattr(record, "body", record)) for record in leasing.batch(batch.id)] == [b"a", b"b"]


def test_a_batch_that_becomes_a_dead_letter_while_it_is_published_was_ended(tmp_path: Path) -> None:
    with Queue(tmp_path / "q", chunk_size=1 << 12) as queue:
        queue.put_many([b"x" * 1000] * 10)
        batch = queue.lease("first")
        assert batch is not None

        def end_it(done: int, total: int) -> None:
            if batch.state == "leased":
                batch.to_dead_letters("x")

        with pytest.raises(BatchExpired, match="somebody ended the batch"):
            batch.publish(tmp_path / "out", progress=end_it)


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_files_at_the_other_place_are_moved_back_by_a_repair_though_the_directory_stayed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batch = leasing.lease("first")
    home = Path(batch.manifest_path).parent
    other = home.parent.with_suffix(".dead") / home.name
    other.mkdir(parents=True)
    for file in home.iterdir():
        file.rename(other / file.name)
    with Queue(path) if kind == "queue" else Topic(path) as store:
        (problem,) = store.verify().problems
    assert f"files of batch {batch.id} are in {other}, where they do not belong" in problem
    report = (repair if kind == "queue" else repair_topic)(path)
    assert [damage.records for damage in report.damage] == [0]
    assert not other.exists()
    with a_store(kind, path) as leasing:
        assert [bytes(getattr(record, "body", record)) for record in leasing.batch(batch.id)] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_batch_whose_directory_was_exchanged_for_another_gives_no_record_of_that(tmp_path: Path, kind: str) -> None:
    """And a repair brings it home, also if the exchange was not finished."""
    path = tmp_path / "store"
    fill(kind, path)
    with a_store(kind, path) as leasing:
        batches = [leasing.lease("first", max_records=1), leasing.lease("second")]
    one, two = (Path(batch.manifest_path).parent for batch in batches)
    one.rename(tmp_path / "kept")
    two.rename(one)
    (tmp_path / "kept").rename(two)
    with a_store(kind, path) as leasing:
        for key in "first", "second":
            batch = leasing.lease(key)
            said = f"the manifest is not that of batch {batch.id} with 1 records"
            for act in batch.__iter__().__next__, batch.check, partial(batch.publish, tmp_path / "out"):
                with pytest.raises(Corrupt, match=said):
                    act()
    assert not (tmp_path / "out").exists()
    one.rename(one.with_name("some backup"))
    report = (repair if kind == "queue" else repair_topic)(path)
    assert sorted((damage.path, damage.records) for damage in report.damage) == sorted([(str(one), 0), (str(two), 0)])
    assert all("it was moved back" in damage.what for damage in report.damage)
    with a_store(kind, path) as leasing:
        assert [list(leasing.lease(key)) for key in ("first", "second")] == [[b"a"], [b"b"]]
    assert not (repair if kind == "queue" else repair_topic)(path).damage


def test_a_batch_of_which_the_log_knows_nothing_is_named_before_a_repair_looks_at_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill("queue", path)
    with Queue(path) as queue:
        queue.lease("first")
        home = tmp_path / "store.batches"
        (kept,) = home.iterdir()
        shutil.copytree(kept, unknown := home / f"{kept.name[:-1]}x")
        (problem,) = queue.verify().problems
    assert problem == f"{unknown}: the log knows no such batch; `qewqew repair` looks what it is"
    assert [Path(damage.path).name for damage in repair(path).damage] == [unknown.name]
    with Queue(path) as queue:
        assert queue.verify().ok


@pytest.mark.parametrize("end", ["nack", "to_dead_letters"])
def test_a_batch_that_somebody_moved_to_the_place_of_an_unfinished_lease_goes_home(tmp_path: Path, end: str) -> None:
    path = tmp_path / "store"
    fill("queue", path)
    with Queue(path) as queue:
        batch = queue.lease("first", max_records=1)
        getattr(batch, end)("a reason")
    home = Path(batch.manifest_path).parent
    home.rename(tmp_path / "store.lease")
    with Queue(path) as queue:
        assert queue.verify().ok
        assert list(queue.batch(batch.id)) == [b"a"]
        assert not (tmp_path / "store.lease").exists()
        queue.lease("second").ack()
    assert not repair(path).damage


def test_bytes_before_the_records_of_a_batch_are_nobodys(tmp_path: Path) -> None:
    """Of what a chunk's file keeps of records that were taken before the lease, damage loses nothing."""
    path, records = tmp_path / "store", [b"%d" % number * 100 for number in range(9)]
    with Queue(path) as queue:
        queue.put_many(records)
        assert [queue.get() for _ in range(4)] == records[:4]
        batch = queue.lease("first")
        batch.nack("the cluster was gone")
    (segment,) = manifest.load(batch.manifest_path).segments
    assert segment.start > chunk.BEGIN
    file = Path(batch.manifest_path).with_name(segment.file)
    flip(file, segment.start - 1)
    with Queue(path) as queue:
        assert queue.verify().problems == []
        again = queue.lease("second")
        assert list(again) == records[4:]
        assert again.attempt == 2
        again.to_dead_letters("poison")
        file = Path(again.manifest_path).with_name(segment.file)
    flip(file, segment.start - 2)
    assert repair(path).damage == []
    with Queue(path) as queue:
        assert list(queue.dead()[0]) == records[4:]
        queue.put(b"last")
        queue.batch(again.id).put_back()
    (file, *_) = [each for each in sorted(tmp_path.glob("store.[0-9]*")) if each.stat().st_size > segment.start]
    flip(file, segment.start - 3)
    with Queue(path) as queue:
        assert [queue.get() for _ in range(6)] == [*records[4:], b"last"]


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_repair_that_is_stopped_while_batches_go_home_is_finished_by_the_next(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    fill(kind, whole / "store")
    with a_store(kind, whole / "store") as leasing:
        batches = [leasing.lease("first", max_records=1), leasing.lease("second")]
    one, two = (Path(batch.manifest_path).parent for batch in batches)
    one.rename(tmp_path / "kept")
    two.rename(one)
    (tmp_path / "kept").rename(two)
    rename = Files.rename
    for stop in range(4):  # two steps for each of the two
        shutil.copytree(whole, copy := tmp_path / f"copy{stop}")
        done: list[str] = []

        def stopped(self: Files, source: str, target: str, stop: int = stop, done: list[str] = done) -> None:
            if source.endswith(".moving") or target.endswith(".moving"):
                if len(done) == stop:
                    raise KeyboardInterrupt
                done.append(target)
            rename(self, source, target)

        mend = repair if kind == "queue" else repair_topic
        with monkeypatch.context() as patch:
            patch.setattr(Files, "rename", stopped)
            with pytest.raises(KeyboardInterrupt):
                mend(copy / "store")
        assert len(done) == stop
        with a_store(kind, copy / "store"):
            pass  # an opening in between changes nothing of it
        assert mend(copy / "store").damage
        with a_store(kind, copy / "store") as leasing:
            assert [list(leasing.lease(key)) for key in ("first", "second")] == [[b"a"], [b"b"]]
