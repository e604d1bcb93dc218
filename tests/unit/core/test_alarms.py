"""Failures of a bad day: each rings in `qewqew check`, and as an alert of docker/monitoring on what `qewqew metrics` says.

The time that passes is that of `LIMITS`; what holds for an hour is told to Prometheus' own tool as the same gauges for an hour.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import done, run

from qewqew_core import Queue, Topic
from qewqew_core.limits import LIMITS

RULES = Path(__file__).parents[3] / "docker" / "monitoring" / "alerts.yml"
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


def test_nothing_rings_where_all_is_well(tmp_path, later):
    (path := tmp_path / "queues").mkdir()
    wait(path)
    no_consumer(path)
    later(1)
    assert run("check", path, "--max-age", "6h").exit_code == 0
    check_alerts(path, set())


def test_each_alert_is_tested(tmp_path):
    here = {name for _, _, _, alerts in CASES for name in alerts}
    assert set(KNOWN) - here <= {name for name in KNOWN if f"alertname: {name}" in RULES.with_name("alerts_test.yml").read_text()}
