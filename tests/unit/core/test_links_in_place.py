"""A link in the place of a file of ours, or of a name that is made at need: what it leads to is never changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from qewqew_core import QewQewError, Queue, Topic, inspect, repair, repair_topic
from qewqew_core.topic.topic_inspection import inspect_topic

with tempfile.TemporaryDirectory() as _place:
    for _end in ("closed", "killed"):
        subprocess.run([sys.executable, Path(__file__).with_name("some_of_everything.py"), Path(_place, _end), _end], check=True)
    MADE = {str(path.relative_to(_place)): path.read_bytes() for path in sorted(Path(_place).rglob("*")) if path.is_file()}
NAMES = list(MADE)
QUEUE = [name for name in NAMES if name.split("/")[1].startswith("queue") and name.split("/")[1] != "queue"]  # it may be a link
TOPIC = [name for name in NAMES if name.split("/")[1] == "topic" and name.count("/") > 1]
MISSING = ["queue.wal.tmp", "queue.lease", "queue.spill", "topic/topic.log.tmp", "topic/state/all.log.tmp"]
REFUSED = (QewQewError, OSError)


def unpacked(tmp_path: Path) -> Path:
    for name, data in MADE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def content(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def use_queue(path: Path) -> None:
    for use in (inspect, repair):
        with contextlib.suppress(REFUSED):
            use(path)
    with contextlib.suppress(REFUSED), Queue(path, chunk_size=1 << 20, sync="never") as queue:
        queue.put_many([b"y" * 50] * 20)
        for batch in (*queue.batches(), *queue.dead()):
            with contextlib.suppress(REFUSED):
                batch.return_to_queue() if batch.state == "dead" else batch.ack()
        with contextlib.suppress(REFUSED), queue.session() as session:
            session.put_many([b"z" * 60] * 20_000)
        with contextlib.suppress(REFUSED):
            queue.lease("mine")
        queue.get_many(100)


def use_topic(path: Path) -> None:
    for use in (inspect_topic, repair_topic):
        with contextlib.suppress(REFUSED):
            use(str(path))
    with contextlib.suppress(REFUSED), Topic(path, block_size=1000, delete_committed=True) as topic:
        for name in ("all", "odd"):
            with contextlib.suppress(REFUSED), topic.reader(name) as reader:
                for batch in reader.batches():
                    batch.ack()
                reader.commit(*reader.read_many(100))
                reader.lease("mine")
        topic.append_many([b"y" * 500] * 20)
        topic.trim()


@pytest.mark.parametrize("name", [*QUEUE, *TOPIC, *(f"killed/{name}" for name in MISSING)])
def test_a_link_in_the_place_of_ours_leads_nobody_out(name: str, tmp_path: Path) -> None:
    ours = unpacked(tmp_path / "ours") / name
    precious = tmp_path / "precious" / "here"
    precious.parent.mkdir()
    if ours.exists():
        shutil.move(ours, precious)
    elif name.endswith(".tmp"):
        precious.write_bytes(b"precious")
    else:
        precious.mkdir()
        (precious / "file").write_bytes(b"precious")
    ours.symlink_to(precious)
    before = content(tmp_path / "precious")
    end, what = name.split("/")[:2]
    use = use_topic if what == "topic" else use_queue
    use(tmp_path / "ours" / end / ("topic" if what == "topic" else "queue"))
    assert content(tmp_path / "precious") == before


@pytest.mark.parametrize("name", [name for name in (*QUEUE, *TOPIC) if name.startswith("killed/")])
def test_a_pipe_in_the_place_of_ours_stops_nobody(name: str, tmp_path: Path) -> None:
    ours = unpacked(tmp_path) / name
    ours.unlink()
    os.mkfifo(ours)
    what = name.split("/")[1]
    use = use_topic if what == "topic" else use_queue
    where = tmp_path / "killed" / ("topic" if what == "topic" else "queue")
    ended: list[None] = []
    user = threading.Thread(target=lambda: ended.append(use(where)), daemon=True)
    user.start()
    user.join(300)
    assert ended, "it waits for somebody to write into the pipe, or has failed"
