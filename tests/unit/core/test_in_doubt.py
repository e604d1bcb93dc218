"""A leader that was stopped or killed with the records of others: their commits keep their time-out, and each is stored once.

What is not known in time is `InDoubt`, and there is a question by key that says what has become of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import done, refused
from test_group_commit import Waiting, led, requests, until

from qewqew_core import BadArgument, BadKey, BadPath, Broken, InDoubt, Locked, Queue, Stage
from qewqew_core.disk import lock
from qewqew_core.disk.files import Files
from qewqew_core.queue.group_commit import DONE, PUT

LEADER = """
import os, signal, sys
from qewqew_core import Stage
from qewqew_core.disk.files import Files
path, phase, number = sys.argv[1:]

def end(now):
    global phase
    if phase == now:
        phase = ""
        os.kill(os.getpid(), int(number))

class Leading(Files):
    taken = False

    def rename(self, source, target):
        if target.endswith(".taken"):
            end("opened")
        if target.endswith(".done"):
            end("durable")
        super().rename(source, target)
        if target.endswith(".taken"):
            self.taken = True
            end("taken")
        if target.endswith(".done"):
            end("done")

    def sync(self, fd):
        if self.taken and os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
            end("committed")
        super().sync(fd)

with Stage(path, lock_timeout=60, _files=Leading()) as stage:
    stage.put(b"leader")
    stage.commit("key of the leader")
"""
PHASES = ["waiting", "opened", "taken", "committed", "durable", "done"]
TIMEOUT = 1.0


class Follower(threading.Thread):
    """A commit, and how long it took. Its stage stays open."""

    def __init__(self, path: Path, key: str | None, record: bytes = b"follower", lock_timeout: float = TIMEOUT) -> None:
        super().__init__()
        self.stage, self.key, self.lock_timeout = Stage(path, lock_timeout=lock_timeout), key, lock_timeout
        self.stage.put(record)
        self.result: int | BaseException | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self.stage.commit(self.key)
        except BaseException as error:
            self.result = error
        self.seconds = time.monotonic() - began

    def wait(self) -> int | BaseException | None:
        self.join(60)
        assert self.seconds < self.lock_timeout + 1, "the promise"
        return self.result


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def leader(path: Path, phase: str, end: signal.Signals) -> Iterator[subprocess.Popen[bytes]]:
    """A stage that has the lead, and that comes to its end in this phase: it waits for the queue until then."""
    program = subprocess.Popen([sys.executable, "-c", LEADER, path, phase, str(int(end))])
    try:
        yield program
    finally:
        program.kill()
        program.wait()


@contextlib.contextmanager
def in_the_middle(
    path: Path, phase: str, end: signal.Signals, key: str | None, somebody: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], Follower]]:
    """A leader that was stopped or killed in a phase, and one that follows. ``somebody``: a third one waits for the queue, too,
    and keeps it.
    """
    ended = threading.Event()

    def keep() -> None:
        with Queue(path, lock_timeout=60):
            ended.wait(60)

    with Queue(path) as q:
        q.put(b"first")
        holder = contextlib.ExitStack()
        program = holder.enter_context(leader(path, phase, end))
        with open(path, "rb") as header:
            until(lambda: lock.is_awaited(header.fileno()))
        third = threading.Thread(target=keep)
        if somebody:
            third.start()
        # Where another one stores it, a busy machine may need longer.
        follower = Follower(path, key, lock_timeout=30 if phase in ("waiting", "done") and not somebody else TIMEOUT)
        until(lambda: requests(path.parent))
        if phase == "waiting":
            program.send_signal(end)
            until(lambda: state_of(program.pid) in "TZ")
    try:
        if phase != "waiting":
            until(lambda: state_of(program.pid) in "TZ")
        yield program, follower
    finally:
        ended.set()
        holder.close()
        if somebody:
            third.join(60)
        follower.stage.close()


def stored(path: Path) -> int:
    with Queue(path, lock_timeout=60) as q:
        assert q.verify().ok
        found = list(q)
    assert found.count(b"first") == 1
    assert found.count(b"leader") <= 1
    return found.count(b"follower")


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("phase", PHASES)
def test_of_a_stopped_leader_nobody_waits_longer_than_the_time_out(tmp_path: Path, phase: str, key: str | None) -> None:
    path = tmp_path / "q"
    with in_the_middle(path, phase, signal.SIGSTOP, key) as (program, follower):
        result = follower.wait()
        if phase in ("waiting", "done"):  # another one opens the queue; its records are there
            assert result == 1
        elif phase == "opened":
            assert isinstance(result, Locked)
            assert "Nothing was stored" in str(result)
            assert requests(tmp_path) == []
            if key is not None:
                assert follower.stage.key_status(key) == "not stored"
        else:
            assert isinstance(result, InDoubt)
            assert f"process {program.pid} has taken" in str(result)
            assert "key_status" in str(result)
            assert follower.stage.records == 1
            if key is not None:
                assert follower.stage.key_status(key) == "not yet"
        program.send_signal(signal.SIGCONT)
        assert program.wait(60) == 0
        if result != 1:
            assert stored(path) == isinstance(result, InDoubt), "what is not stored now never will be"
            assert follower.stage.commit(key) == 1
        assert stored(path) == 1
        if key is not None:
            assert follower.stage.key_status(key) == "stored"


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("somebody", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_of_a_killed_leader_nobody_waits_longer_either_and_it_is_known_what_was_stored(
    tmp_path: Path, phase: str, somebody: bool, key: str | None
) -> None:
    path = tmp_path / "q"
    with in_the_middle(path, phase, signal.SIGKILL, key, somebody) as (_, follower):
        result = follower.wait()
        if somebody and phase in ("waiting", "opened", "taken"):
            assert isinstance(result, Locked)
            assert "Nothing was stored" in str(result)
        else:
            assert result == 1
    again = Follower(path, key)
    if isinstance(result, Locked) or key is not None:
        assert again.wait() == 1
    else:
        again.join(60)
    again.stage.close()
    assert stored(path) == (2 if key is None and result == 1 else 1)


def test_while_a_commit_is_in_doubt_the_stage_does_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with in_the_middle(path, "taken", signal.SIGSTOP, "key") as (program, follower):
        assert isinstance(follower.wait(), InDoubt)
        stage = follower.stage
        for call in (lambda: stage.put(b"more"), lambda: stage.put_many([b"more"]), stage.rollback, lambda: stage.commit("key")):
            with pytest.raises(InDoubt):
                call()
        with pytest.raises(BadArgument, match="under the same key"):
            stage.commit("another")
        with contextlib.closing(Stage(path, lock_timeout=0.1)) as other:
            other.put(b"follower")
            with pytest.raises(InDoubt):  # the records may be stored
                other.commit("key")
        program.send_signal(signal.SIGCONT)
        program.wait(60)
        stage.rollback()  # it is stored
        stage.put(b"more")
        assert stage.commit("next") == 1
    assert stored(path) == 1
    with Queue(path) as q:
        assert q.key_status("key") == q.key_status("next") == "stored"
        assert list(q).count(b"more") == 1


@pytest.mark.parametrize("phase", ["taken", "committed"])
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_stage_that_is_closed_in_doubt_leaves_it_to_the_key(tmp_path: Path, phase: str, end: signal.Signals) -> None:
    path = tmp_path / "q"
    with in_the_middle(path, phase, signal.SIGSTOP, "key") as (program, follower):
        assert isinstance(follower.wait(), InDoubt)
        follower.stage.close()
        again = Follower(path, "key")
        assert isinstance(again.wait(), InDoubt)
        again.stage.close()
        program.send_signal(end)
        program.wait(60)
        again = Follower(path, "key")
        assert again.wait() == 1
        again.stage.close()
    assert stored(path) == 1
    assert not (tmp_path / "q.staged").exists()


def test_an_interrupt_while_a_leader_is_stopped_comes_through_and_the_next_commit_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, acquire = tmp_path / "q", lock.acquire

    def interrupted(*arguments: object, **named: object) -> object:
        if named.get("unless"):
            monkeypatch.setattr(lock, "acquire", acquire)
            (file,) = tmp_path.glob("q.staged/*.put")
            file.rename(file.with_suffix(".taken"))
            raise KeyboardInterrupt
        return acquire(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(lock, "PATIENCE", 0.05)
    with Stage(path, lock_timeout=60) as stage:
        stage.put(b"follower")
        with Queue(path) as q, led(path):
            q.put(b"first")
            monkeypatch.setattr(lock, "acquire", interrupted)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                stage.commit()
            assert time.monotonic() - began < 5
            with pytest.raises(InDoubt):
                stage.put(b"more")
        assert stage.commit() == 1
    assert stored(path) == 1


def test_the_requests_that_a_leader_cannot_put_are_given_back_at_once(tmp_path: Path) -> None:
    """Where the disk is too full for all, or one has a key that is known by now."""
    path = tmp_path / "q"
    with Queue(path) as q, led(path):
        q.put_many([b"first"], "key")
        waiting = Waiting(path, [b"again"], "key")
        until(lambda: requests(tmp_path))
        assert q.serve() == 0
        assert [name.rpartition(".")[2] for name in requests(tmp_path)] == ["put"]
    assert waiting.done() == (1, 0)


def test_there_is_a_question_by_key(tmp_path: Path) -> None:
    path = tmp_path / "q"

    def asked() -> set[str]:
        told = json.loads(done("key-status", path, "key", "--json"))
        assert told == {"path": str(path), "key": "key", "status": told["status"]}
        with Stage(path) as stage:
            return {told["status"], done("key-status", path, "key").decode().strip(), stage.key_status("key")}

    with Stage(path) as stage:
        assert stage.key_status("key") == "not stored", "there is no queue yet"
    refused(3, "key-status", path, "key", match="there is no queue here")
    with Queue(path) as q:
        q.put(b"first")
        assert asked() | {q.key_status("key")} == {"not stored"}
        with led(path):
            waiting = Waiting(path, [b"x"], "key")
            until(lambda: requests(tmp_path))
            assert asked() | {q.key_status("key")} == {"not yet"}
            assert q.key_status("another") == "not stored"
            (tmp_path / "q.staged" / "nonsense.put").write_bytes(b"?")
            os.mkfifo(tmp_path / "q.staged" / "pipe.put")
            assert asked() == {"not yet"}
            assert q.serve() == 1
            assert asked() | {q.key_status("key")} == {"stored"}
    assert waiting.done() == (1, 1)
    assert asked() == {"stored"}
    with Queue(path) as q, Stage(path) as stage:
        for ask in (q.key_status, stage.key_status):
            with pytest.raises(BadKey):
                ask("a/b")


def test_under_a_key_that_is_stored_nobody_waits_longer_than_the_time_out_for_that_answer(tmp_path: Path) -> None:
    """The queue need not be free for it. But what may not be on disk yet is no answer."""
    path = tmp_path / "q"
    with Queue(path) as q, Stage(path, lock_timeout=0.05) as stage:
        q.put_many([b"follower", b"first"], "key")
        stage.put(b"follower")
        with pytest.raises(InDoubt, match="another commit has under the same key"):
            stage.commit("key")
        with pytest.raises(Locked, match="Nothing was stored"):
            stage.commit("another")
        q.put(b"x")  # its frame says that the one before it is on disk
        assert stage.commit("key") == 2
        assert (stage.records, stage.stored) == (0, 0)
    assert stored(path) == 1


class Unsaid(Files):
    """A disk that does not say what has become of a request: once or, when it is dead, at all."""

    asked, said, dead = False, False, False

    def exists(self, path: str) -> bool:
        if self.asked and path.endswith(DONE):
            self.asked, self.said = self.dead, True
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().exists(path)

    def rename(self, source: str, target: str) -> None:
        if self.asked and self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        super().rename(source, target)
        self.asked = self.asked or (target.endswith(PUT) and not self.said)


@pytest.mark.parametrize("dead", [False, True])
def test_a_disk_that_does_not_say_what_has_become_of_a_request_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    """And no process that was stopped is blamed for it."""
    monkeypatch.setattr(lock.Lead, "take", lambda lead: False)  # another one leads
    files = Unsaid()
    files.dead = dead
    with contextlib.closing(Stage(tmp_path / "q", lock_timeout=0.5, _files=files)) as stage:
        stage.put(b"follower")
        if dead:
            with pytest.raises(Broken, match=r"the disk does not answer \(Input/output error\), so this stage does not know"):
                stage.commit("key")
        else:
            with pytest.raises(BadPath, match=r"Input/output error. Nothing was added; check the disk"):
                stage.commit("key")
            assert stage.commit("key") == 1
        files.asked = False
    with Stage(tmp_path / "q") as again:
        again.put(b"follower")
        assert again.commit("key") == 1
    with Queue(tmp_path / "q") as q:
        assert list(q) == [b"follower"]
