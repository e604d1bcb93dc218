"""`qewqew check` and `qewqew metrics`, judged by what monitors expect: https://www.monitoring-plugins.org/doc/guidelines.html."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import done, run

from qewqew_core import Message, Queue, Topic


def checked(*arguments: object) -> tuple[int, str]:
    result = run("check", *arguments)
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"QEWQEW (OK|WARNING|CRITICAL|UNKNOWN): .+ \| records=\d+ oldest=\d+s dead=\d+", lines[0])
    return result.exit_code, result.stdout


def test_all_is_well_where_nothing_waits_too_long(tmp_path):
    with Queue(tmp_path / "orders") as q:
        q.put(b"x")
    assert checked(tmp_path, "--max-age", "2h", "--max-records", 1)[0] == 0
    assert checked(tmp_path)[0] == 0
    (tmp_path / "empty").mkdir()
    assert checked(tmp_path / "empty")[0] == 2  # a disk that is not mounted looks like this
    assert checked(tmp_path / "empty", "--expect", 0)[0] == 0


def test_bounds_are_passed_by_more_than_them(tmp_path):
    (tmp_path / "eu").mkdir()
    with Queue(tmp_path / "eu" / "orders") as q:
        q.put_many([b"x"] * 10)
    assert checked(tmp_path, "--max-records", 10, "--warn-records", 10)[0] == 0
    code, text = checked(tmp_path, "--max-records", 10, "--warn-records", 9)
    assert (code, text.split(" | ")[0]) == (1, f"QEWQEW WARNING: {tmp_path}/eu/orders: 10 records wait, more than 9")
    assert checked(tmp_path, "--max-records", 9, "--warn-records", 8)[0] == 2
    time.sleep(1.1)
    assert checked(tmp_path, "--warn-age", "1s")[0] == 1
    assert checked(tmp_path, "--max-age", "1", "--warn-age", "0.5s")[0] == 2
    assert checked(tmp_path, "--max-age", "1m")[0] == 0


def test_dead_batches_and_old_leases_ring(tmp_path):
    with Queue(tmp_path / "orders") as q:
        q.put_many([b"x"] * 2)
        q.lease("a", max_records=1).to_dead_letters()
        q.lease("b", max_records=1)
    code, text = checked(tmp_path)
    assert (code, "orders: 1 dead, more than 0" in text) == (2, True)
    assert checked(tmp_path, "--max-dead", 1)[0] == 0
    time.sleep(1.1)
    code, text = checked(tmp_path, "--max-dead", 1, "--max-lease-age", "1s")
    assert code == 2
    assert re.search(r"orders: batch orders-\w+ has been leased for [0-9.]+ s, more than 1 s, by 'b'", text)


def test_a_batch_that_has_been_leased_for_a_day_is_named_without_being_asked_for_and_the_command_returns_it(tmp_path, clock):
    path = tmp_path / "topics" / "events"
    path.parent.mkdir()
    with Queue(tmp_path / "orders") as q, Topic(path) as topic, topic.reader("lake") as reader:
        q.put_many([b"x"] * 50)
        topic.append(b"x")
        q.lease("dag|run|gone|-1", max_records=49)
        reader.lease("by hand")
        clock.advance(3600)
        q.lease("dag|run|young {}|-1")
    clock.advance(23.5 * 3600)
    code, text = checked(tmp_path)
    assert (code, text.count("has been leased for")) == (2, 2)
    assert "by 'dag|run|gone|-1'; if nobody works on it any more" in text
    for command in re.findall(r"`qewqew ([^`]*)`", text):
        done(*command.split())
    assert checked(tmp_path)[0] == 0
    assert checked(tmp_path, "--max-lease-age", "1h")[0] == 2
    clock.advance(24 * 3600)
    assert checked(tmp_path, "--max-lease-age", "3d")[0] == 0
    assert "by 'dag|run|young {}|-1'" in checked(tmp_path)[1]


def test_a_lease_that_is_over_is_no_old_lease(tmp_path):
    with Queue(tmp_path / "orders") as q:
        q.put(b"x")
        q.lease("a", lease_timeout=0.2)
    time.sleep(1.1)
    assert checked(tmp_path, "--max-lease-age", "1s")[0] == 0


def test_a_reader_counts_what_its_filter_lets_pass(tmp_path):
    with Topic(tmp_path / "events") as topic:
        topic.append_many([Message(b"x", "eu")] * 3 + [Message(b"x", "us")] * 7)
        topic.reader("eu", "eu").close()
        topic.reader("all").close()
    code, text = checked(tmp_path, "--max-records", 2)
    assert code == 2
    assert f"{tmp_path}/events, reader eu: 3 records wait, more than 2" in text
    assert f"{tmp_path}/events, reader all: 10 records wait, more than 2" in text
    assert checked(tmp_path, "--max-records", 10)[0] == 0


def test_damage_is_critical_and_what_cannot_be_read_is_unknown(tmp_path):
    for name in ("good", "bad"):
        with Queue(tmp_path / name) as q:
            q.put(b"x")
    data = bytearray((tmp_path / "bad.wal").read_bytes())
    data[30] ^= 1
    (tmp_path / "bad.wal").write_bytes(data)
    code, text = checked(tmp_path)
    assert (code, "bad: Corrupt: " in text) == (2, True)
    result = run("check", tmp_path / "missing")
    assert (result.exit_code, result.stdout.startswith("QEWQEW UNKNOWN: ")) == (3, True)
    if os.geteuid():
        (tmp_path / "bad.wal").chmod(0)
        assert checked(tmp_path)[0] == 3


def test_a_reader_whose_rdx_is_gone_is_no_reader_less(tmp_path):
    with Topic(tmp_path / "t") as topic, topic.reader("r"), topic.reader("s"):
        topic.append(b"x")
    assert "2 queues and readers" in done("check", tmp_path).decode()
    (tmp_path / "t" / "reader" / "r.rdx").unlink()
    code, text = checked(tmp_path)
    assert (code, "reader r: Corrupt: " in text) == (2, True)
    assert run("metrics", tmp_path).stdout.count("qewqew_readable{") == 2


def test_the_worst_comes_first_and_json_says_all(tmp_path):
    for name, records in (("a", 2), ("b", 5)):
        with Queue(tmp_path / name) as q:
            q.put_many([b"x"] * records)
    code, text = checked(tmp_path, "--warn-records", 1, "--max-records", 4)
    assert code == 2
    assert text.startswith(f"QEWQEW CRITICAL: {tmp_path}/b: 5 records wait, more than 4 (and 1 more) | ")
    assert text.splitlines()[1:] == [f"WARNING: {tmp_path}/a: 2 records wait, more than 1"]
    result = run("check", tmp_path, "--warn-records", 1, "--max-records", 4, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["state"], found["watched"], found["records"]) == (2, "CRITICAL", 2, 7)
    assert [problem["state"] for problem in found["problems"]] == ["CRITICAL", "WARNING"]


@pytest.mark.parametrize("text", ["2 h", "-1s", "h", "1w", ""])
def test_a_time_that_is_none_is_refused(tmp_path, text):
    result = run("check", tmp_path, "--max-age", text)
    assert result.exit_code == 2
    assert "write it as 90s, 5m, 2h or 1d" in re.sub(r"[│\s]+", " ", result.stderr)


SAMPLE = re.compile(r'(qewqew_\w+)\{path="((?:[^"\\]|\\.)*)"(?:,kind="(queue|topic)",reader="((?:[^"\\]|\\.)*)")?\} (-?[0-9.]+)')


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """As Prometheus' text format has them: each family once, with HELP and TYPE before its samples."""
    found, family = {}, ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {family} gauge"
        else:
            name, path, _, reader, value = SAMPLE.fullmatch(line).groups()
            assert name == family
            assert (name, path, reader) not in found
            found[name, path, reader or ""] = float(value)
    return found


def test_metrics_are_true_of_queues_and_readers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Queue(tmp_path / 'odd "name"') as q:
        q.put_many([b"xyz"] * 3)
        q.lease("a", max_records=1)
    with Topic(tmp_path / "events") as topic:
        topic.append_many([Message(b"x", "eu"), Message(b"x", "us")])
        topic.reader("r", "eu").close()
    found = samples(done("metrics").decode())
    queue, reader = (f'{tmp_path}/odd \\"name\\"', ""), (f"{tmp_path}/events", "r")
    assert [found[f"qewqew_{name}", *queue] for name in ("readable", "records", "bytes", "leased", "dead")] == [1, 2, 6, 1, 0]
    assert found["qewqew_records", *reader] == 1
    time.sleep(0.2)
    again = samples(done("metrics").decode())
    for name in ("oldest_age_seconds", "oldest_lease_age_seconds"):
        assert 0.2 <= again[f"qewqew_{name}", *queue] < 60
        assert again[f"qewqew_{name}", *queue] > found[f"qewqew_{name}", *queue]
    (tmp_path / "events" / "events.idx").write_bytes(b"x")
    broken = samples(done("metrics").decode())
    assert broken["qewqew_readable", f"{tmp_path}/events", ""] == 0
    assert ("qewqew_records", *reader) not in broken


def test_the_file_for_the_collector_is_replaced_again_and_again(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
    file = tmp_path / "qewqew.prom"
    command = [sys.executable, "-m", "qewqew_core", "metrics", str(tmp_path), "--output", str(file), "--every", "1s"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    try:
        seen: set[float] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < deadline:
            if file.exists():
                found = samples(file.read_text())
                seen.add(found["qewqew_oldest_age_seconds", f"{tmp_path}/q", ""])
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
    assert len(seen) == 3
    assert file.stat().st_mode & 0o777 == 0o644
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH; .ci/run gets it from Debian's prometheus")
def test_prometheus_own_tool_accepts_what_we_tell_it_and_the_alerts_ring_when_they_should(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
    subprocess.run(["promtool", "check", "metrics"], input=done("metrics", tmp_path), check=True)
    rules = Path(__file__).parents[3] / "docker" / "monitoring"
    subprocess.run(["promtool", "check", "rules", rules / "alerts.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", rules / "alerts_test.yml"], check=True)
