"""The benchmarks measure what they say: each peer gives back what was put, and whoever does not fails the run."""

from __future__ import annotations

import contextlib
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench, report
from benchmarks.peers import PEERS, PlainFile, QewQew, QewQewTopic, ZbusJava
from benchmarks.works import SLICE, WORKS, Case, WrongRecords, able
from qewqew_core import Locked

DOCS = Path(__file__).parents[3] / "docs"
SHORT = 0.02  # seconds
IN_PYTHON = [name for name in PEERS if name != ZbusJava.name]


def case(directory: Path, peer: str, work: str, records: int = 2_000, taken: int = 0) -> Case:
    return Case(work, peer, str(directory), 100, records, SHORT, taken)


def needs(peer: str) -> None:
    if why := PEERS[peer].missing():
        pytest.skip(why)


def no_longer_reachable(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("socket")]


@pytest.mark.parametrize("peer", IN_PYTHON)
def test_a_peer_gives_back_what_was_put_after_each_work_that_puts(peer: str, tmp_path: Path) -> None:
    needs(peer)
    for work in ("put", "put_commit", "put_many_commit", "threads_commit"):
        if able(PEERS[peer], work):
            (tmp_path / work).mkdir()
            assert WORKS[work](case(tmp_path / work, peer, work))["records"] > 0
    assert not no_longer_reachable(tmp_path)  # a server would have left it


@pytest.mark.parametrize("peer", IN_PYTHON)
def test_processes_one_after_another_take_the_records_of_a_peer_in_order(peer: str, tmp_path: Path) -> None:
    needs(peer)
    filled = WORKS["put_many"](case(tmp_path, peer, "put_many"))["records"]
    taken = 0
    for work in ("open_first", "get", "get_many"):
        if able(PEERS[peer], work):
            taken += WORKS[work](case(tmp_path, peer, work, filled, taken))["taken"]
    assert taken > SLICE


def raced(directory: Path, peer: str, work: str, processes: int, records: int) -> Case:
    return Case(work, peer, str(directory), 200, records, SHORT, processes=processes)


@pytest.mark.parametrize("work", ["race_whole", "race_by_1000"])
@pytest.mark.parametrize("peer", [name for name, one in PEERS.items() if able(one, "race_whole")])
def test_four_processes_stage_into_one_queue_of_a_peer_at_once(peer: str, work: str, tmp_path: Path) -> None:
    needs(peer)
    told = bench.run(raced(tmp_path, peer, work, 4, 8_000))
    assert "failed" not in told, told
    assert (told["records"], told["processes"], told["locked_out"]) == (8_000, 4, 0)
    assert 0 < told["longest"] <= told["whole"]
    assert told["seconds"] == pytest.approx(told["whole"] / 8_000)


def test_the_race_has_plain_files_a_table_of_sqlite_lmdb_and_redis_beside_queue_and_topic() -> None:
    racing = [name for name, one in PEERS.items() if able(one, "race_by_1000")]
    assert racing == ["plain file", "QewQew", "QewQew topic", "own sqlite3 WAL", "lmdb", "Redis list"]
    assert [name for name, one in PEERS.items() if able(one, "race_tasks")] == ["plain file", "QewQew"]


def test_many_tasks_stage_at_once_and_none_is_locked_out(tmp_path: Path) -> None:
    told = bench.run(raced(tmp_path, QewQew.name, "race_tasks", 20, 20_000))
    assert (told.get("records"), told.get("locked_out")) == (20_000, 0), told


def test_who_is_locked_out_of_a_race_is_counted_and_not_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(QewQew):
        @classmethod
        @contextlib.contextmanager
        def staging(cls, directory: str) -> Iterator[Callable[[list[list[bytes]]], object]]:
            with super().staging(directory) as commit:
                made = os.open(os.path.join(directory, "first"), os.O_CREAT)
                os.close(made)

                def commit_or_not(batches: list[list[bytes]]) -> None:
                    try:
                        os.rename(os.path.join(directory, "first"), os.path.join(directory, "taken"))
                    except FileNotFoundError:
                        commit(batches)
                    else:
                        raise Locked("another has it", path=directory)

                yield commit_or_not

    monkeypatch.setitem(PEERS, "impatient", Impatient)
    told = WORKS["race_whole"](raced(tmp_path, "impatient", "race_whole", 3, 3_000))
    assert (told["records"], told["locked_out"]) == (2_000, 1)


@pytest.mark.parametrize("peer", [PlainFile.name, QewQew.name])
def test_a_race_that_loses_a_record_fails(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loser(PEERS[peer]):  # type: ignore[name-defined, misc]
        @classmethod
        @contextlib.contextmanager
        def staging(cls, directory: str) -> Iterator[Callable[[list[list[bytes]]], object]]:
            with super().staging(directory) as commit:
                yield lambda batches: commit([batches[0][1:], *batches[1:]])

    monkeypatch.setitem(PEERS, "loser", Loser)
    with pytest.raises(WrongRecords, match="1,998 records instead of 2,000"):
        WORKS["race_whole"](raced(tmp_path, "loser", "race_whole", 2, 2_000))


@pytest.mark.parametrize("work", ["lease", "filter_all", "filter_none"])
def test_what_only_qewqew_can_do_is_measured_on_all_records(work: str, tmp_path: Path) -> None:
    peer = QewQew.name if work == "lease" else QewQewTopic.name
    WORKS["put_many"](replace(case(tmp_path, peer, "put_many"), limit=600))  # all, however slow the disk is
    assert WORKS[work](case(tmp_path, peer, work))["records"] == 2_000


def test_the_java_library_does_the_works_of_topics(tmp_path: Path) -> None:
    needs(ZbusJava.name)
    for work in ("put_many", "get_many", "filter_all", "filter_none"):
        one = replace(case(tmp_path, ZbusJava.name, work), limit=600)
        assert bench.run(one).get("records") == 2_000


@pytest.mark.parametrize("work", ["put", "put_commit", "put_many_commit", "get", "get_many", "open_first"])
def test_a_peer_that_gives_back_something_else_fails(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(PlainFile):
        def get_each(self, count: int) -> list[bytes]:
            return [record[::-1] for record in super().get_each(count)]

    monkeypatch.setitem(PEERS, "liar", Liar)
    if not work.startswith("put"):
        WORKS["put_many"](case(tmp_path, "liar", "put_many"))
    with pytest.raises(WrongRecords):
        WORKS[work](case(tmp_path, "liar", work))


def test_a_peer_that_loses_a_record_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loser(PlainFile):
        def put_each(self, records: list[bytes]) -> None:
            super().put_each(records[:-1])

    monkeypatch.setitem(PEERS, "loser", Loser)
    with pytest.raises(WrongRecords, match="of 1000, or others"):
        WORKS["put"](case(tmp_path, "loser", "put"))


def test_a_failing_process_is_a_sample_that_says_why(tmp_path: Path) -> None:
    assert bench.run(case(tmp_path, PlainFile.name, "get", 1_000))["failed"].startswith("WrongRecords: ")


def test_every_peer_has_a_turn_at_each_place_and_durable_works_stand_between_plain_files() -> None:
    plan = bench.Plan([100], 3_000, [], 2, 1, 0.1, ["plain file", "QewQew", "lmdb"], ["put", "put_commit"], [4], 5_000, 9, 1_000)
    orders = [(number, chain.works[0], names) for number, chain, names in plan.rounds()]
    assert orders == [
        (0, "put", ["plain file", "QewQew", "lmdb"]),
        (0, "put_commit", ["plain file", "QewQew", "plain file", "lmdb", "plain file"]),
        (1, "put", ["QewQew", "lmdb", "plain file"]),
        (1, "put_commit", ["plain file", "lmdb", "plain file", "QewQew", "plain file"]),
    ]


def test_races_stand_between_plain_files_with_the_processes_and_records_of_the_plan() -> None:
    works = ["race_whole", "race_by_1000", "race_tasks"]
    plan = bench.Plan([100], 3_000, [], 2, 1, 0.1, ["plain file", "QewQew", "lmdb"], works, [12, 8], 5_000, 200, 1_000)
    found = [(number, chain.works, chain.size, chain.records, chain.processes) for number, chain, _ in plan.rounds()]
    shared = [
        (("race_by_1000",), 200, 12_000, 12),
        (("race_by_1000",), 200, 8_000, 8),
        (("race_whole",), 200, 60_000, 12),
    ]
    assert found == [(0, *race) for race in [*shared, (("race_tasks",), 200, 200_000, 200)]] + [(1, *race) for race in shared]
    whole = [names for _, chain, names in plan.rounds() if chain.works == ("race_whole",)]
    assert whole[:1] == [["plain file", "QewQew", "plain file", "lmdb", "plain file"]]


def test_one_command_measures_and_prints_a_part_and_leaves_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (DOCS / "benchmarks.md").read_bytes()
    kept = tmp_path / "kept.json"
    options = ["--quick", "--repeats", "1", "--records", "2000", "--sizes", "16", "--only", "own sqlite,put"]
    assert bench.main([*options, "--json", str(kept), "--directory", str(tmp_path)]) == 0
    results = json.loads(kept.read_text())
    assert {(one["peer"], one["work"]) for one in results["samples"]} == {("plain file", "put"), ("own sqlite3 WAL", "put")}
    assert all(one["floor"] > 0 for one in results["samples"])
    assert "### 16 B, 2,000 records" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["kept.json"]
    assert (DOCS / "benchmarks.md").read_bytes() == before


@pytest.mark.parametrize("options", [["--only", "kafka"], ["--sizes", "0"], ["--sizes", "70000"]])
def test_what_cannot_be_measured_is_refused_at_once(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(options)
    assert options[0] in capsys.readouterr().err


# The report


def sample(peer: str, work: str, seconds: float, floor: float, **more: object) -> dict[str, object]:
    return {"round": 0, "work": work, "size": 100, "queue": 2_000, "peer": peer, "records": 2_000, "seconds": seconds} | (
        {"floor": floor} | more
    )


RESULTS = {
    "date": "2026-11-22",
    "minutes": 2.9,
    "machine": {"processor": "2 × a chip", "memory": "8 GiB", "system": "Linux 6", "file system": "ext4", "Python": "3.11.7"},
    "plan": {"sizes": [100], "records": 2_000, "repeats": 3, "limit": 0.15},
    "left_out": {"Redis list": "redis-server is not installed"},
    "samples": [
        sample("plain file", "put", 1e-6, 1e-6),
        sample(QewQew.name, "put", 3e-6, 1e-6),
        sample(QewQew.name, "put", 9e-6, 1e-6),
        sample(QewQew.name, "put", 3.5e-6, 1e-6),
        sample("queuelib", "put", 1.5e-6, 1e-6),
        sample("persist-queue sqlite", "get", 4e-3, 1e-6, queue=2_000),
        sample(QewQew.name, "put_many", 4e-7, 1e-6),
        sample(QewQew.name, "put_many", 5e-7, 1e-6, queue=20_000, records=20_000),
        {"round": 0, "work": "get", "size": 100, "queue": 2_000, "peer": "lmdb", "failed": "WrongRecords: none"},
    ],
}


def test_the_table_has_medians_of_ratios_with_the_best_and_what_it_is_worth_marked() -> None:
    lines = report.ratios(report.Figures(RESULTS), 100).splitlines()
    assert lines[:1] == ["### 100 B, 2,000 records"]
    assert lines[4:] == [
        "| plain file | 1 = 1.0 µs | – | – | – | – | – | – |",
        "| **QewQew** | 3.5 | **0.40** | – | – | – | – | – |",
        "| persist-queue sqlite | – | – | **4,000**† | – | – | – | – |",
        "| queuelib | **1.5**‡ | – | – | – | – | – | – |",
        "| lmdb | – | – | – | – | – | – | – |",
    ]


def test_the_report_says_what_was_left_out_or_failed() -> None:
    told = report.machine(RESULTS)
    assert "Left out: Redis list, redis-server is not installed." in told
    assert "Failed: lmdb, get: WrongRecords: none." in told


def raced_sample(peer: str, work: str, processes: int, whole: float, floor: float, **more: object) -> dict[str, object]:
    figures = {"processes": processes, "records": 1_000, "whole": whole, "longest": 0.25, "locked_out": 0}
    return sample(peer, work, whole / 1_000, floor / 1_000, size=200, queue=1_000) | figures | more


RACED = RESULTS | {
    "samples": [
        raced_sample("plain file", "race_whole", 12, 1.0, 1.0),
        raced_sample(QewQew.name, "race_whole", 12, 1.25, 1.0),
        raced_sample("plain file", "race_by_1000", 12, 2.0, 2.0),
        raced_sample(QewQew.name, "race_by_1000", 12, 9.0, 2.0),
        raced_sample("own sqlite3 WAL", "race_by_1000", 12, 4.5, 2.0),
        raced_sample("plain file", "race_tasks", 200, 10.0, 10.0),
        raced_sample(QewQew.name, "race_tasks", 200, 12.0, 10.0),
        raced_sample(QewQew.name, "race_tasks", 200, 14.0, 10.0, locked_out=3),
    ]
}


def test_the_report_leads_with_the_race() -> None:
    sections = report.sections(RACED)
    assert list(sections)[:2] == ["race", "tasks"]
    assert sections["race"].splitlines() == [
        "|  | 12 processes, one commit each | 12 processes, 1,000 records a commit | 12: speed beside own sqlite3 WAL "
        "| 12: longest commit |",
        "| --- | --: | --: | --: | --: |",
        "| plain files, one for each process | 1 = 1,000 records/s | 1 = 500 records/s | 2.2 × | 250 ms |",
        "| **QewQew** | 1.2 | 4.5 | 0.50 × | 250 ms |",
        "| own sqlite3 WAL | – | 2.2 | 1.0 × | 250 ms |",
    ]
    assert sections["tasks"].splitlines()[2:] == [
        "| plain files, one for each task | 10 s | 1.0 | – |",
        "| **QewQew** | 13 s | 1.3 | 3 |",
    ]
    assert QewQew.name in report.pictures(RACED)["bench-race.svg"]
    assert report.races(report.Figures(RESULTS)) == {}


def test_the_pictures_are_svg_with_ours_marked_and_the_same_each_time() -> None:
    found = report.pictures(RESULTS)
    assert found == report.pictures(RESULTS)
    bars = ElementTree.fromstring(found["bench-100.svg"])  # noqa: S314 - our own
    marked = [one.text for one in bars.iter("{http://www.w3.org/2000/svg}text") if one.get("class") == "name ours"]
    assert marked == [QewQew.name] * 2
    grown = ElementTree.fromstring(found["bench-growth.svg"])  # noqa: S314
    assert [one.get("class") for one in grown.iter("{http://www.w3.org/2000/svg}polyline")] == ["line ours"]


def test_the_document_tells_the_samples_that_are_kept_beside_it(tmp_path: Path) -> None:
    results = json.loads((DOCS / "benchmarks.json").read_text())
    text = (DOCS / "benchmarks.md").read_text()
    for name, section in report.sections(results).items():
        assert section in text, f"{name}: ./run bench --draw writes it anew"
    for name, picture in report.pictures(results).items():
        assert (DOCS / "images" / name).read_text() == picture
