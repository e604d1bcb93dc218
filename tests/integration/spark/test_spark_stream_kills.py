"""Exactly once, whatever is killed: see killed_stream.py for what runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core import Topic
from qewqew_core.topic.topic_inspection import inspect_topic

ROOT = Path(__file__).parents[3]

OURS = re.compile(r'File ".*/qewqew_(core|spark)/|qewqew_core\.errors|AssertionError')
SCRIPT = Path(__file__).with_name("killed_stream.py")


def start(what: str, home: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    with (home / f"{what}.stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), what, str(home)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[str]) -> None:
    """The JVM and all of Python's processes at once: they are of one session, and some have groups of their own."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == process.pid:
                os.kill(int(name), signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def committed(home: Path) -> int:
    """Batches that both queries have committed."""
    return min(len(list((home / name / "commits").glob("[0-9]*"))) for name in ("of-batches", "of-files"))


def wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def failed(what: str, home: Path) -> None:
    """Spark itself may fail, as a machine may (seen: "Python worker failed to connect back", where all else is slow too): then it
    is started again. Ours may not.
    """
    lines = (home / f"{what}.stderr").read_text().splitlines()
    text = "\n".join([line for line in lines if not line.startswith("\tat ")][-100:])  # without the stacks of the JVM
    assert text
    assert not OURS.search(text), text
    print(f"{what} has failed by itself:\n{text}", flush=True)


def run(home: Path, kills: int) -> None:
    with Topic(home / "orders") as topic:
        topic.reader("batches").close()  # the other stream has one of its own
    writer = start("write", home)
    killed = failures = 0
    try:
        while killed < kills:
            process = start("stream", home)
            try:
                # From the replay of what the last kill has interrupted to some batches later.
                goal = committed(home) + random.randint(0, 1) if killed else 2
                wait(process, lambda goal=goal: committed(home) >= goal)
                (home / "retention").touch()  # from now on what both have committed is removed
                if not killed:
                    wait(process, lambda: inspect_topic(home / "orders")[0].first > 0)
                time.sleep(random.uniform(0, 2))
                if process.poll() is None:
                    killed += 1
                    print(f"kill {killed}: {committed(home)} batches committed", flush=True)
                else:
                    failed("stream", home)
                    failures += 1
                    assert failures <= 1 + kills // 20
            finally:
                kill(process)
        (home / "enough").touch()
        wrote = json.loads(writer.communicate(timeout=300)[0])
    finally:
        kill(writer)
    for _ in range(2):
        process = start("finish", home)
        try:
            lines = process.communicate(timeout=300)[0].splitlines()
        finally:
            kill(process)
        if process.returncode == 0:
            break
        failed("finish", home)
    assert process.returncode == 0
    count = wrote["messages"]
    print(wrote, lines)
    expected = [count, count, 0, count - 1, 0]
    assert json.loads(lines[-1]) == {"batches": expected, "files": expected}
    with Topic(home / "orders") as topic:
        assert len(topic.readers()) == 2


@pytest.mark.soak  # a minute; the sink's test of this kind is test_spark_sink_kills.py
def test_a_stream_that_is_killed_delivers_each_message_once(tmp_path):
    run(tmp_path, 1)


@pytest.mark.soak
def test_a_stream_that_is_killed_a_hundred_times_delivers_each_message_once(tmp_path):
    run(tmp_path, int(os.environ.get("KILLS", "100")))
