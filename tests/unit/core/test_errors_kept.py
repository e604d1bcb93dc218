"""Who keeps an error keeps the frames that it came through: they must not keep open what was closed."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync

from qewqew_core import QewQewError, Queue, Stage, Topic


class Fails(NoSync):
    """The n-th call for a path fails."""

    left = 1 << 60

    def _at(self, path: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super()._at(path, act, *arguments, **named)


def use_queue(path: Path, files: Fails) -> None:
    with Queue(path, _files=files) as queue:
        queue.put_many([b"x"] * 10)
        batch = queue.lease("first", max_records=3)
        assert batch is not None
        batch.ack()
        queue.lease("second")


def use_stage(path: Path, files: Fails) -> None:
    with Stage(path, _files=files) as stage:
        stage.put_many([b"x"] * 10)


def use_topic(path: Path, files: Fails) -> None:
    with Topic(path, _files=files) as topic, topic.reader("r") as reader:
        topic.append(b"x")
        batch = reader.lease("first")
        assert batch is not None
        batch.ack()


def open_below(path: Path) -> list[str]:
    found = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return [name for name in found if name.startswith(str(path))]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What refers to itself is not closed by accident."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("use", [use_queue, use_stage, use_topic])
def test_an_error_that_is_kept_keeps_nothing_open(tmp_path: Path, use: Callable[[Path, Fails], None], uncollected: None) -> None:
    kept, call, files = list[Exception](), 0, Fails()
    while files.left > 1 << 50 or files.left < 0:
        files = Fails()
        files.left = call
        (tmp_path / str(call)).mkdir()
        try:
            use(tmp_path / str(call) / "s", files)
        except (QewQewError, OSError) as error:
            kept.append(error)
        assert open_below(tmp_path) == [], call
        call += 1
    assert len(kept) > 20
