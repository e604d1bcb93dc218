"""Failures of a bad day: each rings in `qewqew check`, and as an alert of docker/monitoring on what `qewqew metrics` says.

The time that passes is that of `LIMITS`; what holds for an hour is told to Prometheus' own tool as the same gauges for an hour.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import done, run

from qewqew_core import Queue, Topic
from qewqew_core.disk import lock
from qewqew_core.limits import LIMITS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "docker" / "monitoring" / "alerts.yml"
HOUR = 3600.0


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Let this many hours pass."""
    clock, boot_clock = LIMITS.clock, LIMITS.boot_clock

    def pass_by(hours: float, step: float = 0) -> None:
        monkeypatch.setattr(LIMITS, "clock", lambda: clock() + int((hours + step) * HOUR * 1e9))
        monkeypatch.setattr(LIMITS, "boot_clock", lambda: boot_clock() + int(hours * HOUR * 1e9))

    return pass_by


KNOWN = [line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line]


def check_alerts(path: Path, expected: set[str]) -> None:
    """These alerts fire, and no others, when the gauges have been for an hour what `qewqew metrics` says now."""
    samples = [line.rpartition(" ") for line in done("metrics", path).decode().splitlines() if not line.startswith("#")]
    if shutil.which("promtool") is None:  # .ci/run gets it from Debian's prometheus
        return
    fires = [
        {
            "expr": f'group(ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": "1h",
            "exp_samples": [{"labels": "{}", "value": 1}] if name in expected else [],
        }
        for name in KNOWN
    ]
    series = [{"series": name, "values": f"{value}x60"} for name, _, value in samples]
    asked = {"rule_files": [str(RULES)], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": fires}]}
    file = path.with_name("alerts.json")
    file.write_text(json.dumps(asked))
    told = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


def wait(path: Path) -> None:
    with Queue(path / "q") as q:
        q.put_many([b"1"] * 10)


def returned(path: Path) -> None:
    with Queue(path / "q") as q:
        q.put_many([b"1"] * 10)
        q.lease("run 1").nack("Spark is down")


def expired(path: Path) -> None:
    with Queue(path / "q") as q:
        q.put_many([b"1"] * 10)
        q.lease("run 1", lease_timeout=1800)


def leased(path: Path) -> None:
    with Queue(path / "q") as q:
        q.put_many([b"1"] * 10)
        q.lease("run 1")


def dead(path: Path) -> None:
    with Queue(path / "q", max_attempts=1) as q:
        q.put_many([b"1"] * 10)
        q.lease("run 1").nack("x")


def log_damaged(path: Path) -> None:
    wait(path)
    data = bytearray((path / "q.wal").read_bytes())
    data[40] ^= 255
    (path / "q.wal").write_bytes(data)


def chunk_gone(path: Path) -> None:
    with Queue(path / "q", chunk_size=1 << 18) as q:
        q.put_many([b"x" * 1000] * 2000)
    sorted(path.glob("q.3*"))[1].unlink()


def batch_gone(path: Path) -> None:
    leased(path)
    shutil.rmtree(next((path / "q.batches").iterdir()))


def header_gone(path: Path) -> None:
    wait(path)
    (path / "q").unlink()
    (path / "q.wal").unlink()


def no_reader(path: Path) -> None:
    with Topic(path / "t") as topic:
        topic.append_many([b"1"] * 10)


def no_consumer(path: Path) -> None:
    no_reader(path)
    with Topic(path / "t") as topic, topic.reader("billing") as reader:
        reader.read()


def reader_returned(path: Path) -> None:
    no_reader(path)
    with Topic(path / "t") as topic, topic.reader("billing") as reader:
        reader.lease("run 1").nack("Spark is down")


def reader_dead(path: Path) -> None:
    no_reader(path)
    with Topic(path / "t") as topic, topic.reader("billing") as reader:
        reader.lease("run 1").to_dead_letters()


def put_in_the_future(path: Path) -> None:
    clock = LIMITS.clock
    try:
        LIMITS.clock = lambda: clock() + int(30 * 24 * HOUR * 1e9)
        wait(path)
    finally:
        LIMITS.clock = clock


def nothing(path: Path) -> None:
    pass


LATE = "QewQewNotAcknowledged"
CASES = [
    (wait, 7, "a record has not been acknowledged for 7 h", {LATE, "QewQewRecordsWait"}),
    (returned, 72, "a record has not been acknowledged for 3 d", {LATE}),
    (expired, 72, "a record has not been acknowledged for 3 d", {LATE}),
    (leased, 7, "a record has not been acknowledged for 7 h", {LATE, "QewQewLeaseIsStuck"}),
    (dead, 7, "1 dead", {LATE, "QewQewDeadLetters"}),
    (log_damaged, 0, "Corrupt", {"QewQewCannotBeRead"}),
    (chunk_gone, 0, "the chunk file is missing", {"QewQewCannotBeRead"}),
    (batch_gone, 0, "1 batch lacks its files", {"QewQewFilesAreGone"}),
    (header_gone, 0, "the transaction log is missing", {"QewQewCannotBeRead"}),
    (no_reader, 72, "a record has not been acknowledged for 3 d", {LATE, "QewQewRecordsWait"}),
    (no_consumer, 72, "a record has not been acknowledged for 3 d", {LATE, "QewQewRecordsWait"}),
    (reader_returned, 72, "a record has not been acknowledged for 3 d", {LATE}),
    (reader_dead, 72, "a record has not been acknowledged for 3 d", {LATE, "QewQewDeadLetters"}),
    (nothing, 0, "0 queues and readers are there, fewer than 1", {"QewQewNothingFound"}),
    (put_in_the_future, 7, "a record has not been acknowledged for 7 h", {LATE, "QewQewRecordsWait"}),
]


@pytest.mark.parametrize(("fail", "hours", "said", "alerts"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_failure_rings(tmp_path, later, fail, hours, said, alerts):
    (tmp_path / "queues").mkdir()
    fail(tmp_path / "queues")
    later(hours)
    result = run("check", tmp_path / "queues", "--max-age", "6h")
    assert (result.exit_code, said in result.stdout) == (2, True), result.stdout
    check_alerts(tmp_path / "queues", alerts)


def test_a_queue_that_a_process_keeps_open_rings(tmp_path, later):
    (path := tmp_path / "queues").mkdir()
    hold = "import sys, qewqew_core; q = qewqew_core.Queue(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, path / "q"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        found = lock.holding(str(path / "q"))
        assert (found.pid, found.waiters, found.seconds <= 60) == (process.pid, 0, True)
        later(5)
        result = run("check", path, "--max-lock-age", "2h")
        assert result.exit_code == 2
        assert f"q: process {process.pid} has had it open for 5 h, more than 2 h" in result.stdout
        assert f'kind="queue",reader=""}} {process.pid}\n' in done("metrics", path).decode()
        check_alerts(path, {"QewQewLockIsHeld"})
        process.stdin.close()
    assert run("check", path, "--max-lock-age", "2h").exit_code == 0


def test_waiters_are_counted(tmp_path):
    path = str(tmp_path / "q")
    with ThreadPoolExecutor() as pool:
        with Queue(path):
            waiting = pool.submit(Queue, path)
            while (found := lock.holding(path)) is None or not found.waiters:
                assert not waiting.done()
            assert (found.pid, found.waiters) == (os.getpid(), 1)
        waiting.result().close()
    assert lock.holding(path) is None


def test_too_little_room_and_too_few_queues_ring(tmp_path):
    wait(tmp_path)
    for options, said in (
        (["--min-free-bytes", 1 << 60], "bytes are free, fewer than 1,152,921,504,606,846,976"),
        (["--expect", 2], "1 queue or reader is there, fewer than 2"),
    ):
        result = run("check", tmp_path, *options)
        assert (result.exit_code, said in result.stdout) == (2, True), result.stdout
    room = os.statvfs(tmp_path)
    few = run("check", tmp_path, "--min-free-bytes", 1, "--min-free-inodes", 1 << 60)
    assert few.exit_code == (2 if room.f_files else 0)


def test_a_path_that_is_gone_hides_no_other(tmp_path):
    (path := tmp_path / "queues").mkdir()
    wait(path)
    result = run("metrics", path, tmp_path / "gone")
    assert (result.exit_code, "gone" in result.stderr) == (1, True)
    assert f'qewqew_watched{{path="{path}"}} 1\n' in result.stdout
    assert f'qewqew_watched{{path="{tmp_path}/gone"}} 0\n' in result.stdout
    assert f'qewqew_records{{path="{path}/q",kind="queue",reader=""}} 10\n' in result.stdout


def test_nothing_rings_where_all_is_well(tmp_path, later):
    (path := tmp_path / "queues").mkdir()
    wait(path)
    no_consumer(path)
    later(1)
    assert run("check", path, "--max-age", "6h").exit_code == 0
    check_alerts(path, set())


def test_each_alert_is_tested():
    here = {name for _, _, _, alerts in CASES for name in alerts} | {"QewQewLockIsHeld"}
    assert set(KNOWN) - here <= {name for name in KNOWN if f"alertname: {name}" in RULES.with_name("alerts_test.yml").read_text()}
