"""With ``sync="never"`` a disk may lose the end of the log and keep the index, also without a restart of the machine: when the
journal of a file system was aborted and it is mounted again, or a snapshot of its blocks is put back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
from disk import NoSync

from qewqew_core import Topic
from qewqew_core.disk import journal
from qewqew_core.formats import zbus
from qewqew_core.topic import topic_log

FIRST, NEW = [b"first %d" % number for number in range(10)], [b"new %d" % number for number in range(20)]


def ends(log: Path) -> list[int]:
    """Where its frames end."""
    data = log.read_bytes()
    return [one.end for one in journal.frames(data, journal.generation_of(data, topic_log.MAGIC, str(log)))]


def made(path: Path, block_size: int, more: bytes) -> Path:
    """Ten messages are durable, of which a reader has committed four. Then it read on, in what is not durable."""
    with Topic(path, block_size=block_size, _files=NoSync()) as topic, topic.reader("r") as reader:
        topic.append_many(FIRST)
        reader.commit(*reader.read_many(4))
    if (pid := os.fork()) == 0:
        topic = Topic(path, block_size=block_size, sync="never", _files=NoSync())
        reader = topic.reader("r")
        for body in NEW:
            topic.append(body + more)
        reader.commit(*reader.read_many(20))
        os._exit(0)
    os.waitpid(pid, 0)
    return path


@pytest.mark.parametrize("lost", [0, 1, 7, 18, 20])
@pytest.mark.parametrize("block", ["kept", "lost"])
@pytest.mark.parametrize("more", [b"", b"x" * 5000], ids=["carried by the log", "large"])
@pytest.mark.parametrize("block_size", [500, 1 << 20])
def test_without_a_restart_too_what_the_log_has_lost_has_not_happened(
    tmp_path: Path, block_size: int, more: bytes, block: str, lost: int
) -> None:
    """And all that it has is there."""
    path = made(tmp_path / "t", block_size, more)
    log = path / "t.wal"
    os.truncate(log, ends(log)[-1 - lost])
    if block == "lost":
        for file in (path / "data").glob("*.zbus"):
            if int(file.name[:20]) >= 2300:  # behind the first ten
                file.unlink()
            elif block_size > 500:
                os.truncate(file, 2300)
    with Topic(path, _files=NoSync()) as topic:
        found = [one.body.rstrip(b"x") for one in topic]
        assert found == [*FIRST, *NEW][: len(found)]
        assert len(found) == 30 - lost if block == "kept" or not more else len(found) >= 10
        assert topic.verify().ok
        with topic.reader("r") as reader:
            left = reader.read_many(100)
            assert [one.body.rstrip(b"x") for one in left] == found[24:]
            topic.append(b"next")
            assert [one.body for one in reader.read_many(100)] == [b"next"]


@pytest.mark.parametrize("sync", ["commit", "never"])
def test_a_closed_index_has_nothing_that_a_zbus_server_does_not_write(tmp_path: Path, sync: Literal["commit", "never"]) -> None:
    with Topic(tmp_path / "t", sync=sync) as topic:
        topic.append(b"x")
    assert not any((tmp_path / "t" / "t.idx").read_bytes()[zbus.INDEX_HEAD : 364])
