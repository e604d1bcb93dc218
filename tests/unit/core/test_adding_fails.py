"""Adding to what is not committed is interrupted, or the disk fails: nothing is added, and the next try works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupts
from stride import Every

from qewqew_core import BadPath, Broken, DiskFull, OutOfResources, QewQewError, Queue, Stage, Topic
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS

RECORDS = [b"x" * 1000] * 5


def open_files() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_a_stage_that_is_interrupted_while_it_begins_goes_on(
    tmp_path: Path, every: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that opens the queue removes files whose claim is not locked."""
    monkeypatch.setattr(LIMITS, "spill_bytes", 100)
    for number, interrupt in enumerate(
        interrupts(
            every, ["queue/stage", "disk/lock", "disk/files", "disk/descriptors", "disk/directories", "batch/places"], quick=5
        )
    ):
        path = tmp_path / str(number)
        stage = Stage(path, sync="never")
        try:
            with interrupt:
                stage.put_many(RECORDS)
        except KeyboardInterrupt:
            assert len([file for file in open_files() if f"{path.name}.staged" in file]) <= 2
        if stage.records:
            stage.rollback()
        stage.put_many(RECORDS)
        with Queue(path, sync="never"):
            pass
        assert stage.commit() == len(RECORDS), interrupt.where
        stage.close()
        with Queue(path, sync="never") as queue:
            assert list(queue) == RECORDS
        assert not [file for file in open_files() if path.name in file.split("/")], interrupt.where


class Failing(Files):
    error = 0

    def _fail(self, path: str) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error), path)

    def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._fail(os.readlink(f"/proc/self/fd/{fd}"))
        super().write(fd, data, offset)

    def write_all(self, fd: int, buffers: Any, offset: int) -> None:
        self._fail(os.readlink(f"/proc/self/fd/{fd}"))
        super().write_all(fd, buffers, offset)

    def open(self, path: str, *, new: bool = False) -> int:
        self._fail(path)
        return super().open(path, new=new)

    def open_into(self, descriptors: Any, path: str, **named: bool) -> None:
        self._fail(path)
        super().open_into(descriptors, path, **named)

    def make_directory(self, path: str) -> None:
        self._fail(path)
        super().make_directory(path)


def a_stage(path: Path, files: Files) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    stage = Stage(path, _files=files)
    return lambda: stage.put_many(RECORDS), stage.commit, stage.close


def a_queues_session(path: Path, files: Files) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    queue = Queue(path, _files=files)
    session = queue.session()

    def add() -> None:
        for record in RECORDS:
            session.put(record)

    return add, session.commit, queue.close


def a_topics_session(path: Path, files: Files) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    topic = Topic(path, _files=files)
    session = topic.session()
    session.append_many(RECORDS[:1])
    return lambda: session.append_many(RECORDS[1:]), session.commit, topic.close


KINDS = {"stage": a_stage, "queue's session": a_queues_session, "topic's session": a_topics_session}


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_disk_has_a_name_and_a_path(
    tmp_path: Path, kind: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 2000)
    monkeypatch.setattr(LIMITS, "topic_spill_bytes", 1000)
    files = Failing()
    add, commit, close = KINDS[kind](tmp_path / "it", files)
    files.error = error
    with pytest.raises(QewQewError) as caught:
        add()
    named = {errno.ENOSPC: DiskFull, errno.EDQUOT: DiskFull, errno.EMFILE: OutOfResources}.get(error, (BadPath, Broken))
    assert isinstance(caught.value, named)
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(tmp_path / "it"))
    assert os.strerror(error) in str(caught.value)
    if isinstance(caught.value, (BadPath, OutOfResources)):
        assert caught.value.errno == error
    files.error = 0
    if not isinstance(caught.value, Broken):  # it goes on
        add()
        commit()
    close()
    if kind == "stage":
        with Queue(tmp_path / "it") as queue:
            assert list(queue) == RECORDS
