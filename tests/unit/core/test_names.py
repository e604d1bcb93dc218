"""Names in pairs: what would meet the files of another queue, topic or reader is refused at the first call; the rest works, in
whichever order the two are made.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from qewqew_core import BadPath, Queue, Stage, Topic, inspect, repair, repair_topic
from qewqew_core.batch import names
from qewqew_core.batch.places import BATCHES, DAMAGED, DEAD
from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic_inspection import inspect_topic

OWN = [*dict.fromkeys(getattr(paths, name) for name in paths.__all__ if name.isupper()), *(BATCHES, DEAD, DAMAGED)]
CHUNKS = [f".{number}" for number in (chunk.JAVA_FIRST, 2026, chunk.OUR_FIRST, chunk.MAX_ID)]
NOT_OWN = [".log", ".20261126", f".{chunk.MAX_ID + 1}", ".0", ".007", "-2026", ".tmp", ".wal2", ".x.idx", ".batches.qew", ".²"]


def use_queue(path: Path) -> None:
    """Two rounds of all that makes files."""
    for _ in range(2):
        with Queue(path, chunk_size=1000, max_attempts=1) as queue:
            queue.put_many([b"x" * 100] * 30)
            before = len(queue)
            for nack in (False, True):
                batch = queue.lease(f"{before}-{nack}", max_records=2)
                assert batch is not None
                batch.nack() if nack else batch.ack()
        with Stage(path, chunk_size=1000) as stage:
            stage.put_many([b"y" * 100] * 3)
        with Queue(path) as queue:
            assert len(queue) == before - 4 + 3
            assert queue.verify().ok
            assert not queue.orphans()


def use_topic(path: Path, reader: str = "r", verify: bool = True) -> None:
    for _ in range(2):
        with Topic(path, block_size=500, max_attempts=1) as topic, topic.reader(reader) as there:
            number = topic.append(b"x" * 100)
            topic.append_many([b"x" * 100] * 29)
            for nack in (False, True):
                batch = there.lease(f"{number}-{nack}", max_records=2)
                assert batch is not None
                batch.nack() if nack else batch.ack()
            there.commit(there.read())
            assert not verify or topic.verify().ok


CALLS: dict[str, Callable[[Path], object]] = {
    "Queue": Queue,
    "Stage": Stage,
    "inspect": inspect,
    "repair": repair,
    "Topic": Topic,
    "inspect_topic": inspect_topic,
    "repair_topic": repair_topic,
}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("suffix", OWN + CHUNKS)
def test_a_name_of_another_queues_files_is_refused_at_the_first_call(
    tmp_path: Path, suffix: str, call: str, is_there: bool
) -> None:
    if is_there:
        use_queue(tmp_path / "events")
    before = sorted(tmp_path.rglob("*"))
    path = tmp_path / f"events{suffix}"
    if suffix in CHUNKS and "opic" in call:
        return  # the queue takes another id, see below
    with pytest.raises(BadPath, match=r"queue events|this is a directory|is not a directory"):
        CALLS[call](path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("suffix", names.DIRECTORIES)
def test_nothing_can_be_in_a_directory_that_a_queue_clears(tmp_path: Path, suffix: str, call: str) -> None:
    (tmp_path / f"events{suffix}").mkdir()
    with pytest.raises(BadPath, match="is that of the queue events"):
        CALLS[call](tmp_path / f"events{suffix}" / "q")


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("other", NOT_OWN)
@pytest.mark.parametrize("kind", [use_queue, use_topic])
def test_any_other_name_works_beside_a_queue_in_both_orders(
    tmp_path: Path, kind: Callable[[Path], None], other: str, order: tuple[int, int]
) -> None:
    uses: list[Callable[[], None]] = [lambda: use_queue(tmp_path / "events"), lambda: kind(tmp_path / f"events{other}")]
    for place in (*order, *order):
        uses[place]()


def test_a_queue_steps_over_topics_that_are_called_like_its_chunks(tmp_path: Path) -> None:
    for suffix in CHUNKS:
        use_topic(tmp_path / f"events{suffix}")
    use_queue(tmp_path / "events")
    for suffix in CHUNKS:
        use_topic(tmp_path / f"events{suffix}")
    with Queue(tmp_path / "events") as queue:
        assert queue.verify().ok


READERS = ["r", *(f"r{suffix}" for suffix in (*OWN, *CHUNKS, *NOT_OWN, topic_paths.LOCK, ".rdx", ".rdx.tmp", ".nak"))]
READERS += ["topic", "topic.damaged", "data", "reader", "state", "t"]


@pytest.mark.parametrize("backwards", [False, True])
def test_readers_of_any_name_are_beside_each_other(tmp_path: Path, backwards: bool) -> None:
    wanted = READERS[::-1] if backwards else READERS
    for name in (*wanted, *wanted):
        use_topic(tmp_path / "t", name, verify=name == wanted[-1])
    for number, name in enumerate(wanted):
        with Topic(tmp_path / "t") as topic:
            assert set(topic.readers()) == set(wanted[number:])
            topic.delete_reader(name)


@pytest.mark.parametrize("name", ["data", "reader", "state", "x.idx", "x.lock", "x.wal2", "x.zbus", "topic"])
def test_a_topic_may_have_the_names_of_its_own_files(tmp_path: Path, name: str) -> None:
    use_topic(tmp_path / name, name)
