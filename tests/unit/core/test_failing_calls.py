"""Each call of the file system fails once, or from then on, for every call in turn: on a queue, sessions on one, and a topic.

A named error, nothing acknowledged is lost, nothing is half done; what met a full disk works on when there is room again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from disk import JournalDisk, NoSync
from plain import crashed, is_plain, numbers
from stride import LEVEL
from views import View
from work import Action, Drawn, HandedOverWork, QueueWork, SessionWork, TopicSessionWork, TopicWork, Work
from work import kind as kind  # a fixture

from qewqew_core import BadPath, Broken, Closed, DiskFull, QewQewError, Queue
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.files import failed_sync

NEVER = 1 << 60
LENGTH = 40
CHANGES = (
    "open",
    "open_into",
    "write",
    "allocate",
    "truncate",
    "sync",
    "sync_directory",
    "link",
    "rename",
    "unlink",
    "make_directory",
    "remove_directory",
)


class FailingDisk(JournalDisk):
    """Fails the n-th call that could change something; ``short``: a write that fails has written half."""

    def __init__(self, root: str, number: int, error: int, short: bool, for_ever: bool) -> None:
        super().__init__(root)
        self.left, self.error, self.short, self.for_ever = number, error, short, for_ever
        self.failed: str | None = None


def _failing(name: str):
    def call(self, *arguments, **named):
        self.left -= 1
        gives_room = name == "unlink" or (name == "truncate" and self.error == errno.ENOSPC)
        if self.left == 0 or (self.left < 0 and self.for_ever and not gives_room):
            self.failed = self.failed or name
            if name == "write" and self.short:
                fd, data, offset = arguments
                JournalDisk.write(self, fd, data[: len(data) // 2], offset)
            path = arguments[0] if isinstance(arguments[0], str) else None
            error = OSError(self.error, "made to fail", path)
            raise failed_sync(error, path) if name.startswith("sync") else error
        return getattr(JournalDisk, name)(self, *arguments, **named)

    return call


for _name in CHANGES:
    setattr(FailingDisk, _name, _failing(_name))


class Stopped(Exception):
    """The work met an error after which its objects refuse to go on."""


class Failing(Work):
    """Goes on after a full disk, as a user would, and stops at any other error."""

    disk: FailingDisk
    again: ClassVar[tuple[type[QewQewError], ...]] = (DiskFull,)  # then it works when there is room, without being opened anew
    refused = 0  # objects that refused to go on
    stride = 60, 20

    def open(self) -> None:
        try:
            super().open()
        except DiskFull:
            self.disk.left = NEVER
            super().open()
        except QewQewError:
            self.disk.left = NEVER
            raise Stopped from None

    def close(self) -> None:
        try:
            super().close()
        except DiskFull:
            self.disk.left = NEVER
            super().close()
        except QewQewError:
            self.stop()

    def do(self, action: Action) -> None:
        try:
            action()
        except self.again:
            self.disk.left = NEVER
            action()
        except Broken:
            self.stop()
        self.note()

    def stop(self) -> NoReturn:
        """What is broken refuses all calls, and lets go of everything."""
        self.disk.left = NEVER
        for engine, call in self.refusing():
            if isinstance(engine.closed_reason, Broken):
                self.refused += 1
                with pytest.raises(Broken):
                    call()
        self.let_go()
        raise Stopped

    def refusing(self) -> list[tuple[Engine[Any], Action]]:
        return [(self.store._engine, lambda: self.store.put(b"refused"))]

    def let_go(self) -> None:
        self.store.close()


class FailingQueue(Failing, QueueWork):
    pass


class FailingHandedOver(Failing, HandedOverWork):
    pass


class FailingSessions(Failing, SessionWork):
    pass


class FailingTopic(Failing, TopicWork):
    again = DiskFull, BadPath  # BadPath: the first append opens files
    stride = 80, 40

    def session_put(self, drawn: Drawn) -> None:
        try:
            super().session_put(drawn)
        except OSError as error:  # the session's own file: but for a full disk, what the system says is raised as it is
            if isinstance(error, QewQewError):
                raise
            self.stop()

    def refusing(self) -> list[tuple[Engine[Any], Action]]:
        calls: list[tuple[Engine[Any], Action]] = [(reader._engine, reader.position) for reader in self.readers]
        writer = self.store._writer
        return calls if writer is None else [*calls, (writer.engine, lambda: self.store.append(b"refused"))]

    def let_go(self) -> None:
        for session in self.sessions:
            with contextlib.suppress(Broken, Closed):
                session.close()
        for reader in self.readers:
            reader.close()
        self.store.close()


class FailingTopicSessions(FailingTopic, TopicSessionWork):
    pass


FAILING: dict[type[Work], type[Failing]] = {
    QueueWork: FailingQueue,
    HandedOverWork: FailingHandedOver,
    SessionWork: FailingSessions,
    TopicWork: FailingTopic,
    TopicSessionWork: FailingTopicSessions,
}


def run_with_failure(
    tmp_path: Path, kind: type[Work], seed: int, good: list[View], number: int, error: int, short: bool, for_ever: bool
) -> tuple[str | None, int]:
    root, luck = tmp_path / "work", random.Random(seed)
    root.mkdir()
    disk = FailingDisk(str(root), number, error, short, for_ever)
    work = FAILING[kind](disk, "commit", kind.options_of(luck), known=None if issubclass(kind, TopicWork) else good)
    try:
        work.script(luck, LENGTH)
        stopped = False
    except Stopped:
        stopped = True
    before = work.steps[-1][1] if work.steps else work.empty
    allowed = (
        [before, good[min(max(1, len(work.steps)), len(good) - 1)]] if stopped else [before]
    )  # what was in flight has happened, or not
    work.check(root, allowed, f"seed {seed}: {disk.failed}, change number {number}, failed with {errno.errorcode[error]}")
    shutil.rmtree(root)
    return disk.failed, work.refused


@pytest.fixture(params=[1, 2])
def good_run(request, tmp_path, kind) -> tuple[int, list[View]]:
    """What there is after each operation of the same script, on a disk that never fails."""
    work = kind.begun(tmp_path / "good", "commit", luck := random.Random(request.param))
    work.script(luck, LENGTH)
    return request.param, [seen for _, seen in work.steps]


@pytest.mark.req("S9", "ZD14")
@pytest.mark.parametrize(
    ("error", "short", "for_ever", "first"),  # beginning at different calls, a quick run has more of them
    [(errno.EIO, False, False, 1), (errno.EIO, True, True, 12), (errno.ENOSPC, False, False, 20), (errno.ENOSPC, True, True, 28)],
    ids=["EIO once", "EIO from then on, short writes", "full disk once", "full disk until there is room, short writes"],
)
def test_any_call_may_fail(tmp_path, kind, good_run, every, error, short, for_ever, first, caplog):
    caplog.set_level(logging.ERROR, "qewqew_core")
    kinds, refusals, (quick, full) = set(), 0, FAILING[kind].stride
    for number in every(range(first, 10_000), quick=quick, full=full):
        failed, refused = run_with_failure(tmp_path, kind, *good_run, number, error, short, for_ever)
        if not failed:
            break
        kinds.add(failed)
        refusals += refused > 0
    assert number > 60
    assert kinds <= {*CHANGES}
    assert kinds
    if LEVEL == "soak":  # a thinned sweep meets them, or not
        assert kinds >= {"open", "write", "sync", "sync_directory", "rename"}
        assert kind is not SessionWork or "allocate" in kinds
        assert error != errno.EIO or refusals > 10


@pytest.mark.req("S9", "T25")
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_commit_of_a_session_on_a_full_disk_leaves_nothing_half_done_and_can_be_made_again_or_rolled_back(tmp_path, call):
    """As often as it is tried, whichever call fails first. On a broken disk opening the queue again decides: all or nothing."""
    disk = FailingDisk(str(tmp_path), NEVER, errno.ENOSPC, short=False, for_ever=True)
    with Queue(tmp_path / "q", chunk_size=64, _files=disk) as q:
        q.put_many(numbers(0, 9))
        session = q.session()
        for again in (False, True):
            session.put_many(numbers(100, 200))
            assert session.get_many(2) == numbers(0, 2)
            for _ in range(3):
                disk.left = call
                with pytest.raises(DiskFull, match="Nothing was stored"):
                    session.commit()
                disk.left = NEVER
                with Queue(crashed(tmp_path), _files=NoSync()) as dead:
                    assert list(dead) == numbers(0, 9)
            assert q.peek() == b"2"
            if again:
                assert session.commit() == 100
            else:
                disk.left = 1
                session.rollback()
                disk.left = NEVER
                assert list(q) == numbers(0, 9)
        left = [*numbers(2, 9), *numbers(100, 200)]
        session.get()
        session.put(b"new")
        disk.left, disk.error = min(call, 2), errno.EIO
        with pytest.raises(Broken, match=r"open (the queue|it) again"):
            session.commit()
        disk.left = NEVER
    with Queue(tmp_path / "q", _files=NoSync()) as q:
        found = list(q)
    assert found in (left, [*left[1:], b"new"])
    is_plain(tmp_path / "q", found)


def test_a_failed_fsync_is_not_tried_again(tmp_path):
    class Refusing(JournalDisk):
        tries = 0

        def sync(self, fd):
            if self.refuse:
                self.tries += 1
                raise failed_sync(OSError(errno.EIO, "made to fail"), None)

    disk = Refusing(str(tmp_path))
    disk.refuse = False
    q = Queue(tmp_path / "q", _files=disk)
    q.put(b"kept")
    disk.refuse = True
    with pytest.raises(Broken, match="refuses every further call"):
        q.put(b"refused")
    for call in (lambda: q.put(b"more"), q.get, q.peek, lambda: len(q), q.clear, lambda: q.lease("key")):
        with pytest.raises(Broken):
            call()
    q.close()
    assert disk.tries == 1
    disk.refuse = False
    with Queue(tmp_path / "q") as again:  # the put that raised must not come back, the one that returned must
        assert list(again) == [b"kept"]


def test_a_failed_fsync_fails_every_commit_that_waited_for_it(tmp_path):
    """The second thread must not try again, be told that all is well, and acknowledge what was cut off the log."""
    entered, go_on = threading.Event(), threading.Event()

    class FailsOnce(JournalDisk):
        armed = False

        def sync(self, fd):
            if self.armed:
                self.armed = False
                entered.set()
                go_on.wait(300)
                raise failed_sync(OSError(errno.EIO, "made to fail"), None)

    disk = FailsOnce(str(tmp_path))
    q = Queue(tmp_path / "q", _files=disk)
    q.put(b"kept")
    disk.armed = True
    outcomes = []

    def put(record):
        try:
            q.put(record)
            outcomes.append("stored")
        except Broken:
            outcomes.append("refused")

    first = threading.Thread(target=put, args=(b"first",))
    first.start()
    assert entered.wait(300)
    second = threading.Thread(target=put, args=(b"second",))
    second.start()
    while len(q) < 3:  # the second put is committed, and waits for its fsync
        time.sleep(0.001)
    go_on.set()
    first.join()
    second.join()
    assert outcomes == ["refused", "refused"]
    q.close()
    with Queue(tmp_path / "q") as again:
        assert list(again) == [b"kept"]
