"""What a task says that has met damage, and who remembers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qewqew_airflow.errors import no_retry_for_the_hopeless
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_core import Corrupt, Queue, Topic
from qewqew_core.tools.monitoring import watch


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 255
    file.write_bytes(data)


def test_a_task_says_what_to_run_and_check_remembers_it(directory: Path) -> None:
    with Queue(directory / "orders") as queue:
        queue.put_many([b"x" * 1000] * 1000)
    damage(next(directory.glob("orders.3*")), 50_000)
    told = (
        rf"Run `qewqew verify {directory}/orders` on this host, which lists all damage, then `qewqew repair {directory}/orders`"
    )
    with pytest.raises(Corrupt, match=told) as caught, no_retry_for_the_hopeless(), QewQewHook().queue("orders") as queue:
        queue.get_many(1000)
    assert caught.value.path in {str(file) for file in directory.glob("orders.3*")}
    (watched,) = watch([str(directory)])
    assert watched.stats is not None  # a look does not read the records
    assert watched.damage == str(caught.value.__cause__)


def test_of_a_topic_too(directory: Path) -> None:
    with Topic(directory / "events") as topic:
        topic.append_many([b"x" * 100] * 10)
    damage(next((directory / "events" / "data").iterdir()), 0)
    told = rf"Run `qewqew verify {directory}/events` on this host"
    with pytest.raises(Corrupt, match=told), no_retry_for_the_hopeless(), QewQewHook().topic("events") as topic:
        topic.reader("load").lease("run 1")
    (watched, *_) = watch([str(directory)])
    assert watched.damage is not None
