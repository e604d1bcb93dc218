"""Why a batch cannot be read: somebody has ended it, its files were removed, or they may not be read. Queue and reader alike."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from stores import STORES
from typer.testing import CliRunner

from qewqew_core import (
    BadPath,
    Batch,
    BatchConflict,
    BatchExpired,
    Broken,
    Corrupt,
    QewQewError,
    repair,
    repair_topic,
)
from qewqew_core.batch import manifest, segments
from qewqew_core.cli.main import app

RECORDS = [b"%02d" % number * 20 for number in range(40)]


@pytest.fixture(params=STORES)
def leased(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Batch, Path]]:
    made, (size, _) = STORES[request.param]
    store = made(tmp_path / "it", size, "commit", retention=timedelta(0))
    store.put_many(RECORDS)
    batch = store.leasing.lease("key")
    assert batch is not None
    yield store, batch, Path(batch.manifest_path).parent
    store.close()


READS: dict[str, Callable[[Batch, Path], object]] = {
    "iterate": lambda batch, _: list(batch),
    "publish": lambda batch, aside: batch.publish(str(aside / "published")),
}
ENDS: dict[str, Callable[[Batch], object]] = {
    "ack": lambda batch: batch.ack(),
    "put_back": lambda batch: batch.put_back(),
    "dead": lambda batch: batch.to_dead_letters(),
}


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def remove_all_but_the_manifest(directory: Path) -> None:
    for file in directory.iterdir():
        if file.name != manifest.MANIFEST:
            file.unlink()


@pytest.mark.parametrize("how", [remove, remove_all_but_the_manifest])
@pytest.mark.parametrize("read", READS)
def test_files_that_were_removed_are_not_those_of_an_ended_batch(
    leased: tuple[Any, Batch, Path], read: str, how: Callable[[Path], None], tmp_path: Path
) -> None:
    store, batch, directory = leased
    how(directory)
    with pytest.raises(Corrupt, match="missing, though nobody has ended it"):
        READS[read](batch, tmp_path)
    store.close()
    with pytest.raises(BatchExpired, match="somebody ended the batch, or removed them"):
        READS[read](batch, tmp_path)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("read", READS)
def test_a_batch_that_somebody_has_ended_says_so(leased: tuple[Any, Batch, Path], read: str, end: str, tmp_path: Path) -> None:
    store, batch, _ = leased
    ENDS[end](store.leasing.batch(batch.id))
    with pytest.raises(BatchExpired, match=r"somebody ended the batch$"):
        READS[read](batch, tmp_path)
    store.close()
    with pytest.raises(BatchExpired, match="somebody ended the batch, or removed them"):
        READS[read](batch, tmp_path)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("when", ["manifest", "segment"])
def test_a_batch_that_is_ended_while_it_is_read_says_so(
    leased: tuple[Any, Batch, Path],
    read: str,
    end: str,
    when: str,
    is_open: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its manifest is read, and before its first segment is."""
    store, batch, _ = leased
    other = store.leasing.batch(batch.id)
    module, name = (manifest, "load") if when == "manifest" else (segments, "open_file")
    before = getattr(module, name)

    def ending(*arguments: Any, **named: Any) -> Any:
        monkeypatch.undo()
        ENDS[end](other)
        if not is_open:
            store.close()
        return before(*arguments, **named)

    if (read, when) == ("publish", "segment"):
        from qewqew_core.batch import publishing

        module = publishing
    monkeypatch.setattr(module, name, ending)
    with pytest.raises(BatchExpired, match="somebody ended the batch"):
        READS[read](batch, tmp_path)


@pytest.mark.parametrize("read", READS)
def test_files_that_may_not_be_read_are_named(
    leased: tuple[Any, Batch, Path], read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batch, directory = leased
    segment = next(file for file in directory.iterdir() if file.name != manifest.MANIFEST)
    for denied in (directory.parent, directory, directory / manifest.MANIFEST, segment):
        with monkeypatch.context() as patch:
            for name in ("stat", "lstat", "open", "listdir"):
                patch.setattr(os, name, denying(getattr(os, name), denied))
            with pytest.raises(BadPath, match="no permission to read the files of batch") as caught:
                READS[read](batch, tmp_path)
        assert str(caught.value.path).startswith(str(directory.parent))
    assert list(batch) == RECORDS


def denying(call: Callable[..., Any], denied: Path) -> Callable[..., Any]:
    """What root would see as another user."""

    def denied_or_not(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str) and Path(path).is_relative_to(denied) and (Path(path) != denied or call.__name__ != "stat"):
            raise PermissionError(13, "Permission denied", path)
        return call(path, *arguments, **named)

    return denied_or_not


@pytest.mark.parametrize("read", READS)
def test_the_target_is_not_taken_for_the_batch(leased: tuple[Any, Batch, Path], read: str, tmp_path: Path) -> None:
    _, batch, directory = leased
    (tmp_path / "published").write_text("a file")
    if read == "publish":
        with pytest.raises((OSError, QewQewError), match="published"):
            READS[read](batch, tmp_path)
    assert directory.is_dir()


# Following what the errors say


def remove_home(directory: Path) -> None:
    shutil.rmtree(directory.parent)


def remove_a_segment(directory: Path) -> None:
    next(file for file in directory.iterdir() if file.name != manifest.MANIFEST).unlink()


REMOVALS = [remove, remove_all_but_the_manifest, remove_a_segment, remove_home]


@pytest.fixture(params=STORES)
def half(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Callable[[], Any], Path]]:
    """Opens a store, of whose records a batch has the first half. Each test closes and opens it as it wants."""
    made, (_, size) = STORES[request.param]
    opened: list[Any] = []

    def reopened() -> Any:
        while opened:
            opened.pop().close()
        opened.append(made(tmp_path / "it", size, "commit"))
        return opened[-1]

    store = reopened()
    store.put_many(RECORDS)
    batch = store.leasing.lease("old", max_records=20)
    yield reopened, Path(batch.manifest_path).parent
    opened.pop().close()


def old_batch(store: Any, end: str) -> Batch:
    """The batch that was leased, after this call."""
    batch = store.leasing.find_batch("old")
    if end:
        getattr(batch, end)()
    return cast(Batch, batch)


@pytest.mark.parametrize("how", REMOVALS)
def test_a_returned_batch_without_files_becomes_a_dead_letter_and_the_rest_is_leased(
    half: tuple[Callable[[], Any], Path], how: Callable[[Path], None]
) -> None:
    opened, directory = half
    opened().leasing.batches()[0].nack()
    how(directory)
    store = opened()
    batch = store.leasing.lease("new")
    assert list(batch) == RECORDS[20:]
    (dead,) = store.leasing.dead()
    assert dead.id == directory.name
    assert "could not be leased again" in dead.reason
    assert "qewqew repair" in dead.reason
    assert str(directory) in dead.reason
    assert store.stats().dead == 1
    with pytest.raises(BatchConflict, match="could not be leased again"):
        store.leasing.lease("old")
    with pytest.raises(Corrupt, match="missing, though nobody has ended it"):
        dead.return_to_queue()
    dead.drop()
    batch.ack()
    store = opened()
    assert (store.leasing.lease("next"), store.verify().problems) == (None, [])


@pytest.mark.parametrize("how", REMOVALS)
@pytest.mark.parametrize("end", ["nack", "to_dead_letters", ""])
def test_put_back_without_files_is_refused_or_brings_the_records_from_the_topic(
    half: tuple[Callable[[], Any], Path], how: Callable[[Path], None], end: str
) -> None:
    opened, _ = half
    store = opened()
    batch = old_batch(store, end)
    how(Path(batch.manifest_path).parent)
    if hasattr(store, "topic"):
        batch.put_back()
        assert list(opened().leasing.lease("new")) == RECORDS
        return
    with pytest.raises(Corrupt, match=r"missing, though nobody has ended it.*qewqew repair"):
        batch.put_back()
    store = opened()
    assert store.leasing.batch(batch.id).state == batch.state
    assert list(store.leasing.lease("new")) == RECORDS[20:]


@pytest.mark.parametrize("how", REMOVALS)
@pytest.mark.parametrize("end", ["", "nack", "to_dead_letters"])
def test_repair_restores_what_the_error_says(
    half: tuple[Callable[[], Any], Path], how: Callable[[Path], None], end: str, tmp_path: Path
) -> None:
    """The log of a queue still has these records, and the topic its messages."""
    opened, _ = half
    store = opened()
    batch = old_batch(store, end)
    how(Path(batch.manifest_path).parent)
    (problem, *_) = store.verify().problems
    assert "are missing: somebody removed them. `qewqew repair`" in problem
    with pytest.raises(Corrupt, match="qewqew repair"):
        list(batch)
    store.close()
    (repair_topic if hasattr(store, "topic") else repair)(tmp_path / "it")
    assert list(opened().leasing.batch(batch.id)) == RECORDS[:20]


@pytest.mark.parametrize("how", REMOVALS)
@pytest.mark.parametrize("end", ["ack", "nack", "to_dead_letters"])
def test_a_leased_batch_without_files_can_be_ended(
    half: tuple[Callable[[], Any], Path], how: Callable[[Path], None], end: str
) -> None:
    opened, directory = half
    store = opened()
    how(directory)
    getattr(store.leasing.find_batch("old"), end)()
    assert list(opened().leasing.lease("new")) == RECORDS[20:]


@pytest.mark.parametrize("how", REMOVALS)
@pytest.mark.parametrize("end", ["", "nack", "to_dead_letters"])
def test_monitors_see_that_files_are_gone(
    half: tuple[Callable[[], Any], Path], how: Callable[[Path], None], end: str, tmp_path: Path
) -> None:
    opened, _ = half
    store = opened()
    batch = old_batch(store, end)
    assert (store.stats().missing, store.inspect().missing) == (0, 0)
    before = CliRunner().invoke(app, ["check", str(tmp_path), "--max-dead", "1"])
    assert before.exit_code == 0, before.output
    how(Path(batch.manifest_path).parent)
    assert (store.stats().missing, store.inspect().missing) == (1, 1)
    after = CliRunner().invoke(app, ["check", str(tmp_path), "--max-dead", "1"])
    assert after.exit_code == 2, after.output
    assert "1 batch lacks its files: somebody has removed them. `qewqew verify` names them" in after.output
    assert "qewqew_missing{" in CliRunner().invoke(app, ["metrics", str(tmp_path)]).output
    found = json.loads(CliRunner().invoke(app, ["stat", str(tmp_path / "it"), "--json"]).output)
    assert found["missing"] == 1


@pytest.mark.parametrize("end", ["to_dead_letters", "return_to_queue", "put_back", "drop", "ack"])
def test_a_batch_whose_files_are_just_moved_lacks_none(half: tuple[Callable[[], Any], Path], end: str) -> None:
    """Looked at before and after each call of the file system that its end makes."""
    opened, _ = half
    store = opened()
    batch = store.leasing.find_batch("old")
    if end in ("return_to_queue", "drop"):
        batch.to_dead_letters()
    seen = []
    files = store.leasing._files

    def looking(name: str) -> Callable[..., Any]:
        real = getattr(files, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(store.inspect().missing)
            result = real(*arguments, **named)
            seen.append(store.inspect().missing)
            return result

        return call

    for name in ("rename", "unlink", "remove_directory", "sync_directory"):
        setattr(files, name, looking(name))
    getattr(batch, end)()
    store.leasing.lease("new")
    assert len(seen) > 4
    assert set(seen) == {0}


def test_a_missing_manifest_is_told_with_what_restores_it(half: tuple[Callable[[], Any], Path]) -> None:
    opened, directory = half
    (directory / manifest.MANIFEST).unlink()
    store = opened()
    with pytest.raises(Corrupt, match=r"manifest.json: the files of batch .* are missing.*qewqew repair"):
        list(store.leasing.find_batch("old"))
    assert any("qewqew repair" in problem for problem in store.verify().problems)


@pytest.mark.parametrize("name", STORES)
def test_a_store_that_was_moved_away_makes_no_dead_letters_of_its_batches(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They lack nothing: what its owner cannot find is somewhere else."""
    made, (size, _) = STORES[name]
    (home := tmp_path / "home").mkdir()
    store = made(home / "it", size, "commit")
    store.put_many(RECORDS)
    batch = store.leasing.lease("key")
    batch.nack("again")
    home.rename(tmp_path / "moved")
    home.mkdir()
    with pytest.raises(Broken):
        store.leasing.lease("next")
    with contextlib.suppress(Broken):
        store.close()
    assert "dead letter" not in caplog.text
    store = made(tmp_path / "moved" / "it", size, "commit")
    assert store.leasing.dead() == []
    assert list(store.leasing.lease("next")) == RECORDS
    store.close()
