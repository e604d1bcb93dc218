"""A stream that is killed, with everything that belongs to it, at any point: each line is written once, in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spark_version import WRITES_STREAMS

from qewqew_core import Queue, Topic

pytestmark = pytest.mark.skipif(not WRITES_STREAMS, reason="Spark 4.0 does not write streams with Arrow")

LINES = 50  # of each file, which is a micro-batch

QUERY = """
import sys
from pyspark.sql import SparkSession

directory, kind = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
lines = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{directory}/in").repartition(2)
writing = lines.writeStream.format("qewqew").option("kind", kind).option("checkpointLocation", f"{directory}/checkpoint")
writing.trigger(availableNow=True).start(f"{directory}/out").awaitTermination()
"""


def start(directory: Path, kind: str) -> subprocess.Popen:
    # A session of its own: Spark's Python workers have process groups of their own, and are to be killed too.
    return subprocess.Popen(
        [sys.executable, "-c", QUERY, str(directory), kind],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def members(session: int) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            # The name of a command may have spaces and parentheses; behind it: state, parent, group, session.
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(name))
    return found


def kill(process: subprocess.Popen) -> None:
    while living := members(process.pid):
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()


def sizes(path: Path) -> tuple[int, ...]:
    """What changes with each commit."""
    return tuple(file.stat().st_size for file in (Path(f"{path}.log"), path / f"{path.name}.wal") if file.exists())


def run(directory: Path, kind: str, kills: int, seed: int) -> int:
    """Kill the query so often, each time soon after one of its commits; returns how many micro-batches were done twice."""
    draw = random.Random(seed)
    (directory / "in").mkdir()
    files = 3 * kills + 3
    for number in range(files):
        file = directory / "in" / f"{number}.txt"
        file.write_text("\n".join(f"{number} {line}" for line in range(LINES)))
        os.utime(file, (1_700_000_000 + number,) * 2)
    replayed = 0
    for _ in range(kills):
        process = start(directory, kind)
        for _ in range(draw.randint(1, 3)):
            before = sizes(directory / "out")
            while sizes(directory / "out") == before and process.poll() is None:
                time.sleep(0.001)
        time.sleep(draw.choice([0, draw.random() * 0.05, draw.random()]))
        kill(process)
        commits = directory / "checkpoint" / "commits"
        done = len([name for name in os.listdir(commits) if name.isdecimal()]) if commits.exists() else 0
        written = stored(directory / "out", kind)
        assert len(written) % LINES == 0  # whole micro-batches
        replayed += len(written) // LINES > done
    process = start(directory, kind)
    assert process.wait() == 0
    written = stored(directory / "out", kind)
    whole = [[f"{number} {line}".encode() for line in range(LINES)] for number in range(files)]
    assert [sorted(written[at : at + LINES]) for at in range(0, len(written), LINES)] == [sorted(one) for one in whole]
    assert not list(directory.glob("*staging*"))
    return replayed


def stored(path: Path, kind: str) -> list[bytes]:
    if kind == "queue":
        with Queue(path) as queue:
            return list(queue)
    with Topic(path) as topic:
        return [message.body for message in topic]


def test_a_stream_that_is_killed_writes_each_line_once(tmp_path):
    run(tmp_path, "queue", kills=1, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_a_stream_that_is_killed_many_times_writes_each_line_once(tmp_path, kind):
    # Else the kills have missed what they are for: the moment between our commit and Spark's.
    replayed = run(tmp_path, kind, kills=20, seed=2)
    print(f"{replayed} of 20 kills fell between the two commits")
    assert replayed > 0
