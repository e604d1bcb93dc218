"""A stage whose place is a URL: one batch for each key, whatever happens to any of its requests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from typing import Any

import fsspec
import pytest

from qewqew_core import (
    BadArgument,
    BadKey,
    BadManifest,
    BadPath,
    BadRecord,
    Closed,
    DiskFull,
    InDoubt,
    RecordTooLarge,
    Stage,
    StoreError,
    StoreStage,
)
from qewqew_core.batch import published, segments
from qewqew_core.batch.store import Local, Remote, Store, Unavailable, store_of
from qewqew_core.disk.spool import Spool
from qewqew_core.limits import LIMITS

FIRST = [b"%02d" % number for number in range(10)]
CHANGED = [b"new", *FIRST]


@pytest.fixture(params=["file:", "memory:"])
def place(request, tmp_path) -> Iterator[str]:
    if request.param == "file:":
        yield f"file://{tmp_path}/staged/orders"
    else:
        yield "memory://staged/orders"
        fsspec.filesystem("memory").store.clear()


class Table:
    """What a drain makes of the place, as drain.py does: one commit has batches and their names."""

    def __init__(self, place: str) -> None:
        self.place, self.rows, self.ids = place, list[bytes](), set[str]()

    def drain(self) -> list[bytes]:
        found = published.complete(self.place)
        published.remove(self.place, self.ids.intersection(found))
        missing = [batch for batch in found if batch not in self.ids]
        for body in published.load(self.place, missing):
            store = store_of(published.place(self.place, body.id))
            rows = [row for each in body.segments for some in segments.read_records(store, body, each) for row in some]
            assert len(rows) == body.records
            self.rows += rows
        self.ids |= set(missing)
        published.remove(self.place, missing)
        return self.rows


def staged(place: str, records: list[bytes], key: str | None = "run 1", **settings: Any) -> tuple[int, int]:
    with Stage(place, **settings) as stage:
        stage.put_many(records)
        return stage.commit(key), stage.stored


def test_a_stage_is_one_batch_and_a_retry_is_told_what_was_stored(place):
    assert staged(place, FIRST) == (10, 10)
    assert staged(place, CHANGED) == (10, 0)
    assert staged(place, [], "nothing") == (0, 0)
    assert staged(place, CHANGED, "nothing") == (0, 0)
    assert staged(place, [b""], "run 2") == (1, 1)
    assert [staged(place, [b"x"], None) for _ in range(2)] == [(1, 1), (1, 1)]
    assert [body.key for body in published.load(place, published.complete(place))].count("run 1") == 1
    assert Counter(Table(place).drain()) == Counter([*FIRST, b"", b"x", b"x"])


def test_a_stage_commits_several_times_and_forgets_what_is_rolled_back(place):
    with Stage(place) as stage:
        assert isinstance(stage, StoreStage)
        stage.put(b"1")
        stage.rollback()
        assert (stage.records, stage.commit()) == (0, 0)
        stage.put(bytearray(b"2"))
        assert (stage.commit("a"), stage.records) == (1, 0)
        stage.put_many([b"3", memoryview(b"4")])
        assert (stage.commit("b"), stage.key_status("b"), stage.key_status("c")) == (2, "stored", "not stored")
        stage.put(b"5")  # the end of the block commits it
    assert sorted(Table(place).drain()) == [b"2", b"3", b"4", b"5"]
    with pytest.raises(BadRecord), Stage(place) as stage:
        stage.put_many([b"6", 7])  # type: ignore[list-item]
    assert published.complete(place) == []
    with pytest.raises(Closed):
        stage.put(b"7")


def test_many_records_are_in_segments_with_boundaries_and_never_all_in_memory(place, monkeypatch):
    for name, size in {"spill_bytes": 1000, "piece_bytes": 300, "segment_bytes": 2000, "write_bytes": 700}.items():
        monkeypatch.setattr(LIMITS, name, size)
    records = [b"%05d" % number * (number % 7) for number in range(1000)] + [b"x" * 65_535]
    with Stage(place) as stage:
        for record in records[:500]:
            stage.put(record)
        stage.put_many(records[500:])
        assert stage.records == 1001
        stage.commit("many")
    (body,) = published.load(place, published.complete(place))
    assert len(body.segments) > 5
    assert len(body.segments[0].boundaries) > 2
    assert Table(place).drain() == records


def test_what_cannot_be_stored_is_refused_and_adds_nothing(place, monkeypatch):
    with Stage(place) as stage:
        stage.put(b"1")
        for records, error in (([b"2", "text"], BadRecord), ([b"2", b"x" * 65_536], RecordTooLarge), (b"2", BadArgument)):
            with pytest.raises(error):
                stage.put_many(records)  # type: ignore[arg-type]
        monkeypatch.setattr(LIMITS, "piece_bytes", 10)
        write, calls = Spool.write, count()

        def full(self: Spool, data: bytes, offset: int) -> None:
            if next(calls) == 1:
                raise DiskFull("no room")
            write(self, data, offset)

        monkeypatch.setattr(Spool, "write", full)
        with pytest.raises(DiskFull):
            stage.put_many([b"12345678"] * 3)
        assert stage.records == 1
        stage.put_many([b"87654321"] * 2)
        with pytest.raises(BadKey):
            stage.commit("a/b")
        assert stage.commit("key") == 3
    assert Table(place).drain() == [b"1", b"87654321", b"87654321"]


@pytest.mark.parametrize("setting", ["chunk_size", "sync", "max_records", "retention", "group", "min_free_bytes", "nonsense"])
def test_what_a_place_in_a_store_does_not_have_is_refused_by_name(setting):
    with pytest.raises(BadArgument, match=setting):
        Stage("memory://staged/orders", **{setting: 1})


def test_urls_that_lead_nowhere_or_show_a_secret_are_refused():
    for url in ("nowhere://bucket/x", "s3://user:hushhush@bucket/x", "s3://bucket/x?versionId=1", "file://host/x"):
        with pytest.raises(BadArgument) as caught:
            Stage(url)
        assert "hushhush" not in str(caught.value)
    with pytest.raises(BadArgument, match="local:// cannot create a file only where there is none"):
        Stage("local:///x")


def test_a_store_that_ignores_the_condition_is_refused(place, monkeypatch):
    for kind in (Local, Remote):
        monkeypatch.setattr(kind, "create", lambda self, name, data: self.write(name, [data]))
    for _ in range(2):
        with Stage(place) as stage:
            stage.put(b"1")
            with pytest.raises(BadArgument, match="created a file twice"):
                stage.commit("k")
            stage.rollback()
    assert published.complete(place) == []


def test_what_is_not_a_manifest_or_that_of_another_key_is_named(place):
    staged(place, FIRST)
    (batch,) = published.complete(place)
    store = store_of(published.place(place, batch))
    text = store.read("manifest.json")
    for data, error in ((b"torn", BadManifest), (text.replace(b'"run 1"', b'"run 2"'), BadPath)):
        store.write("manifest.json", [data])
        with Stage(place) as stage:
            stage.put(b"1")
            with pytest.raises(error):
                stage.commit("run 1")


class Killed(BaseException):
    """As SIGKILL: nothing of the process goes on."""


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, after: bool, act: Callable[[], None]) -> Callable[[], int]:
    """Call ``act`` before or after the n-th request of a stage; what it returns counts them."""
    calls = count(1)
    done = 0

    def wrap(kind: type[Store], name: str) -> None:
        real = getattr(kind, name)

        def wrapped(self: Store, *args: Any) -> Any:
            nonlocal done
            done = number_now = next(calls)
            if number_now == number and not after:
                act()
            try:
                return real(self, *args)
            finally:
                if number_now == number and after:
                    act()

        monkeypatch.setattr(kind, name, wrapped)

    for kind in (Local, Remote):
        for name in ("create", "write", "size", "read"):
            wrap(kind, name)
    return lambda: done


def each_request(run: Callable[[int, bool], bool]) -> int:
    """``run`` with each request, before and after it, until there are no more."""
    for number in count(1):
        for after in (False, True):
            if not run(number, after):
                return number - 1
    raise AssertionError


def check_orders(place: str, monkeypatch: pytest.MonkeyPatch, first: Callable[[Table, int, bool], bool]) -> None:
    numbers = count()
    for drains in (False, True):

        def run(number: int, after: bool, drains: bool = drains) -> bool:
            table = Table(f"{place}{next(numbers)}")
            went_on = first(table, number, after)
            if drains:
                table.drain()
            is_in_place = not table.ids
            returned, _ = staged(table.place, CHANGED)
            for _ in range(2):
                table.drain()
            assert sorted(table.rows) in (sorted(FIRST), sorted(CHANGED)), (number, after, drains)
            assert returned == len(table.rows) or not is_in_place
            return went_on

        assert each_request(run) >= 5  # three of the trial, its mark, the segment, the manifest


def test_a_task_that_is_killed_at_any_request_stages_once(place, monkeypatch):
    def killed(table: Table, number: int, after: bool) -> bool:
        def kill() -> None:
            raise Killed

        with monkeypatch.context() as patch:
            at_call(patch, number, after, kill)
            try:
                staged(table.place, FIRST)
            except Killed:
                return True
        return False

    check_orders(place, monkeypatch, killed)


def test_two_live_attempts_stage_once(place, monkeypatch):
    """One is cut off at any request, another one runs to its end, and a drain perhaps; then the first goes on."""

    def overtaken(table: Table, number: int, after: bool) -> bool:
        with monkeypatch.context() as patch:
            did = []

            def other() -> None:
                did.append(staged(table.place, CHANGED))
                if number % 2:
                    table.drain()

            at_call(patch, number, after, other)
            assert staged(table.place, FIRST)[0] in (len(FIRST), len(CHANGED))
            return bool(did)

    check_orders(place, monkeypatch, overtaken)


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_lost_answer_at_any_request_stores_once(place, monkeypatch, patience):
    said = []

    def unheard(table: Table, number: int, after: bool) -> bool:
        failed = []

        def fail() -> None:
            failed.append(number)
            raise Unavailable("no answer", path=table.place)

        with monkeypatch.context() as patch, closing(Stage(table.place, lock_timeout=patience)) as stage:
            at_call(patch, number, after, fail)
            stage.put_many(FIRST)
            try:
                assert stage.commit("run 1") == 10
                assert stage.stored == 10  # if the answer was lost, the manifest is ours
            except InDoubt:
                assert (patience, stage.key_status("run 1")) == (0, "stored" if after else "not yet")
                for call in (stage.rollback, lambda: stage.put(b"1")):
                    with pytest.raises(InDoubt):
                        call()
                with pytest.raises(BadArgument, match="under the same key"):
                    stage.commit("run 2")
                if number % 2:
                    assert (stage.commit("run 1"), stage.stored) == (10, 10)
            except StoreError as error:
                said.append((type(error), error.what, patience))
                stage.rollback()
        return bool(failed)

    check_orders(place, monkeypatch, unheard)
    assert set(said) == ({(StoreError, "no answer. Nothing was stored", 0.0)} if patience == 0 else set())


def test_a_child_of_a_fork_neither_uses_nor_ends_a_stage(place):
    with Stage(place) as stage:
        stage.put(b"1")
        child = os.fork()
        if not child:
            try:
                stage.put(b"2")
            except Closed:
                stage.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert stage.commit("k") == 1
