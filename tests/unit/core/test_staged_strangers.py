"""What does not belong in NAME.staged, and what others make of that directory: neither may keep anybody from a commit."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core import Queue, Stage
from qewqew_core.queue.group_commit import PUT


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        os.chdir(path.parent)
        made.bind(path.name)


def an_unreadable_file(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def a_huge_file(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(5 << 30)


STRANGERS: dict[str, Callable[[Path], object]] = {
    "socket": a_socket,
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "unreadable file": an_unreadable_file,
    "empty file": Path.touch,
    "huge file": a_huge_file,
}


def waiting_stages(path: Path, count: int) -> list[threading.Thread]:
    def commit(number: int) -> None:
        with Stage(path, lock_timeout=60) as stage:
            stage.put(b"%d" % number)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    while len([*path.parent.glob(f"{path.name}.staged/*{PUT}")]) < count - 1:
        time.sleep(0.005)
    return threads


@pytest.mark.parametrize("name", ["0123456789abcdef.0123456789abcdef.put", "x.put", "fedcba9876543210"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_among_the_requests_keeps_nobody_from_a_commit(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Queue(tmp_path / "q") as queue:
        queue.put(b"first")
        threads = waiting_stages(tmp_path / "q", 4)
        STRANGERS[kind](tmp_path / "q.staged" / name)
    for thread in threads:
        thread.join(60)
    for _ in range(2):
        with Queue(tmp_path / "q") as queue:
            assert sorted(queue) == [b"0", b"1", b"2", b"3", b"first"]


COPIES = {
    "cp": ["cp", "-a", ".", "{target}"],
    "tar": ["sh", "-c", "tar -cf - . | tar -xf - -C {target}"],
    "rsync": ["rsync", "-a", "./", "{target}/"],
    "zip": ["sh", "-c", "zip -qr {target}/a.zip . && cd {target} && unzip -q a.zip && rm a.zip"],
    "shutil": [sys.executable, "-c", "import shutil; shutil.copytree('.', '{target}', dirs_exist_ok=True)"],
}


@pytest.mark.parametrize("program", COPIES)
def test_a_queue_for_which_tasks_wait_can_be_copied_by_every_program(tmp_path: Path, program: str) -> None:
    """With what they have staged, too, as nothing there is a socket."""
    command = [word.format(target=tmp_path / "copy") for word in COPIES[program]]
    if not all(shutil.which(each) for each in (command[0], *(["zip", "unzip"] if program == "zip" else []))):
        pytest.skip(f"there is no {program}")
    (tmp_path / "store").mkdir()
    (tmp_path / "copy").mkdir()
    path = tmp_path / "store" / "q"
    with Queue(path) as queue:
        queue.put_many([b"a", b"b"])
        assert queue.lease("key", max_records=1)
        threads = waiting_stages(path, 3)
        done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    for thread in threads:
        thread.join(60)
    assert (done.returncode, done.stderr) == (0, "")
    with Queue(tmp_path / "copy" / "q") as queue:
        assert list(queue) == [b"b"]
        assert [list(batch) for batch in queue.batches()] == [[b"a"]]
        assert queue.verify().ok
    assert not (tmp_path / "copy" / "q.staged").exists()
