"""A disk that fails when it is asked whether a file is there: what is there does not pass for missing, and nothing is changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import in_time
from refusal import tree

from qewqew_core import BadPath, Broken, Queue, Topic
from qewqew_core.disk.files import Files
from qewqew_core.queue import paths


def no_answer(monkeypatch: pytest.MonkeyPatch, asked: Path, error: int) -> None:
    """Whoever asks for this file gets the error, as a disk gives it that is gone."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any, *more: Any, dir_fd: int | None = None, **named: Any) -> Any:
            home = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            if isinstance(path, str) and os.path.join(home, path) == str(asked):
                raise OSError(error, os.strerror(error), path)
            return call(path, *more, dir_fd=dir_fd, **named)

        return ask

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr(os, "lstat", lambda path, **named: os.stat(path, follow_symlinks=False, **named))


def use_queue(path: Path) -> list[bytes]:
    with Queue(path) as queue:
        queue.put_many([b"one", b"two"], key="key")  # once
        return list(queue)


def use_topic(path: Path) -> list[bytes]:
    with Topic(path) as topic:
        topic.append_many([b"one", b"two"], key="key")
        return [message.body for message in topic]


def use_reader(path: Path) -> list[bytes]:
    bodies = use_topic(path)
    with Topic(path) as topic, topic.reader("reader") as reader:
        return bodies if reader.position().number == 0 else []


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("use", "asked"),
    [
        (use_queue, "q" + paths.LOG),
        (use_queue, "."),
        (use_topic, "q/q.idx"),
        (use_topic, "q/data"),
        (use_reader, "q/reader/reader.rdx"),
    ],
)
def test_what_is_there_does_not_pass_for_missing(tmp_path, monkeypatch, use, asked, error):
    path = tmp_path / "q"
    assert use(path) == [b"one", b"two"]
    before = tree(tmp_path)
    with monkeypatch.context() as failing:
        no_answer(failing, tmp_path / asked, error)
        with pytest.raises((BadPath, Broken), match=os.strerror(error)):
            use(path)
    assert tree(tmp_path) == before
    assert use(path) == [b"one", b"two"]


def test_a_lease_does_not_wait_for_a_directory_that_is_there(tmp_path, monkeypatch):
    with Queue(tmp_path / "q") as queue:
        queue.put_many([b"one", b"two"])
        assert queue.lease("first", max_records=1)
        with monkeypatch.context() as failing, in_time():
            no_answer(failing, tmp_path / "q.batches", errno.EIO)
            with pytest.raises(Broken, match="Input/output error"):
                queue.lease("second")
    with Queue(tmp_path / "q") as queue:
        assert [list(batch) for batch in queue.batches()] == [[b"one"]]
        assert list(queue) == [b"two"]


@pytest.mark.parametrize("ask", [Files.exists, Files.is_directory, Files.is_regular, Files.is_link])
def test_each_question_has_an_answer_or_an_error(tmp_path, monkeypatch, ask):
    (tmp_path / "file").touch()
    assert not ask(Files(), str(tmp_path / "missing"))
    assert not ask(Files(), str(tmp_path / "file" / "in it"))
    no_answer(monkeypatch, tmp_path / "file", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        ask(Files(), str(tmp_path / "file"))
