"""Two users of one group share a store: what each of them makes is for both, and for nobody else, also if one is killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import run
from disk import NoSync
from stride import Every
from test_bad_input import REACHABLE
from test_owners import as_root, as_user

from qewqew_core import Batch, Queue, Stage, Topic, inspect, repair, repair_topic
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.tools.listing import find

ONE, OTHER, OUTSIDER, GROUP = 12345, 12346, 12347, 12399
SHARED: dict[str, Any] = {"group": str(GROUP)}
UMASKS = [0, 0o022, 0o077, 0o777]
RECORD = b"card 4111-1111-1111-1111"

pytestmark = as_root


def as_member(act: Callable[[Path], object], path: Path, user: int = ONE, umask: int = 0o022) -> None:
    def with_umask(path: Path) -> None:
        os.umask(umask)
        act(path)

    as_user(with_umask, path, user, [GROUP])


def as_outsider(act: Callable[[Path], object], path: Path) -> None:
    as_user(act, path, OUTSIDER)


def fork_member(act: Callable[[], object], user: int, umask: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([GROUP])
            os.setgid(user)
            os.setuid(user)
            os.umask(umask)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(name="home")
def group_home() -> Iterator[Path]:
    """The directory of the group, which one of its members has made."""
    path = Path(tempfile.mkdtemp(dir=REACHABLE))
    os.chown(path, ONE, GROUP)
    path.chmod(0o2770)
    yield path
    shutil.rmtree(path)


def use_queue(path: Path, **settings: Any) -> None:
    with Queue(path, chunk_size=1000, max_attempts=1, **SHARED, **settings) as queue:
        queue.put_many([RECORD] * 40)
        for batch in (*queue.batches(), *queue.dead()):  # also those of others
            assert list(batch)
            batch.ack() if batch.state != "dead" else batch.drop()
        for to in ("ack", "nack", "put_back", "extend"):
            leased = queue.lease(f"{to}-{os.getuid()}-{len(queue)}", max_records=2, lease_timeout=9)
            assert leased is not None
            assert len(list(leased)) == 2
            getattr(leased, to)()
        assert queue.get_many(10)
        with queue.session() as session:
            session.put_many([RECORD * 30] * 15)
            session.rollback()
        assert queue.verify().ok


def use_stage(path: Path, **settings: Any) -> None:
    for count in (3, 30):
        with Stage(path, chunk_size=1000, **SHARED, **settings) as stage:
            stage.put_many([RECORD * 30] * count)
    use_queue(path, **settings)


def use_topic(path: Path, **settings: Any) -> None:
    settings = {"delete_committed": True, "max_attempts": 1, **SHARED, **settings}
    with Topic(path, block_size=2000, **settings) as topic, topic.reader("r") as reader:
        topic.append_many([RECORD] * 60)
        for batch in (*reader.batches(), *reader.dead()):
            assert list(batch)
            batch.ack() if batch.state != "dead" else batch.drop()
        with topic.session() as session:
            session.append(RECORD)
            session.read(reader)
        for to in ("ack", "nack", "put_back", "extend"):
            leased = reader.lease(f"{to}-{os.getuid()}-{topic.stats().next}", max_records=2, lease_timeout=9)
            assert leased is not None
            getattr(leased, to)()
        reader.commit(*reader.read_many(10))
        topic.copy_reader("r", f"copy-{os.getuid()}")
        topic.delete_reader(f"copy-{os.getuid()}")
        assert topic.verify().ok


def damage(path: Path) -> None:
    use_queue(path)
    for chunk in path.parent.glob("s.3*"):
        chunk.write_bytes(chunk.read_bytes()[:-500] + bytes(500))
    repair(path, **SHARED)


def damage_topic(path: Path) -> None:
    use_topic(path)
    (path / "s.wal").write_bytes(b"no log")
    repair_topic(path, **SHARED)


USES: dict[str, Callable[[Path], None]] = {
    "queue": use_queue,
    "stage": use_stage,
    "topic": use_topic,
    "repaired queue": damage,
    "repaired topic": damage_topic,
}


@pytest.fixture(autouse=True, scope="module")
def packages_are_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before we become somebody who may not read them."""
    place = tmp_path_factory.mktemp("packages")
    with Queue(place / "q") as queue:
        queue.put_many([b"x"] * 9)
        queue.lease("a", max_records=2)
        queue.verify()
    with Stage(place / "q") as stage:
        stage.put(b"x")
    with Topic(place / "t") as topic, topic.reader("r") as reader:
        topic.append(b"x")
        reader.lease("a")
        topic.verify()
    for command in (["stat", "q"], ["peek", "q"], ["ls", "."], ["put", "q", "x"], ["stat", "no"], ["repair", "q", "--yes"]):
        run(command[0], str(place / command[1]), *command[2:])


@pytest.fixture(autouse=True)
def sessions_and_stages_spill_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 5_000)


def of_others(home: Path) -> dict[str, str]:
    """What is not for the group and nobody else."""
    found = {}
    for path in home.rglob("*"):
        status = path.lstat()
        wanted = 0o2770 if path.is_dir() else 0o660
        if (stat.S_IMODE(status.st_mode), status.st_gid) != (wanted, GROUP) or status.st_uid not in (ONE, OTHER):
            found[str(path)] = f"{status.st_uid}:{status.st_gid} {status.st_mode:o}"
    return found


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
@pytest.mark.parametrize("use", USES)
def test_what_one_has_made_the_other_goes_on_with(use: str, umask: int, home: Path) -> None:
    for user in (ONE, OTHER, ONE, OTHER):
        as_member(USES[use], home / "s", user, umask)
        assert not of_others(home)
        umask = random.choice(UMASKS)
    assert find(str(home))


@pytest.mark.parametrize("use", USES)
def test_root_goes_on_and_keeps_nobody_out(use: str, home: Path) -> None:
    for _ in range(2):
        USES[use](home / "s")
        assert not of_others(home)
        as_member(USES[use], home / "s", OTHER)
    assert not of_others(home)


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR])
@pytest.mark.parametrize("use", USES)
def test_file_systems_that_have_no_files_without_a_name(
    use: str, error: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def no_tmpfile(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(error, "no such files here", path)
        return opened(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", no_tmpfile)
    for user in (ONE, OTHER):
        as_member(USES[use], home / "s", user)
        assert not of_others(home)


def put(path: Path, number: int, large: bool) -> None:
    for each in range(5):
        with Stage(path, lock_timeout=60, chunk_size=100_000, **SHARED) as stage:
            stage.put_many([b"%d-%d-%d" % (number, each, at) + b"x" * (40_000 * large) for at in range(30)])


def take(path: Path, into: int) -> None:
    found: list[bytes] = []
    until = time.monotonic() + 60
    while not (path.parent / "done").exists() or inspect(path).records:
        assert time.monotonic() < until
        with Queue(path, lock_timeout=60, **SHARED) as queue:
            if batch := queue.lease(f"{into}-{time.monotonic_ns()}", max_records=100):
                found += [record.rstrip(b"x") for record in batch]
                batch.ack()
        time.sleep(0.005)
    (path.parent / f"taken-{into}").write_bytes(b"\n".join(found))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_members_who_produce_and_consume_at_once_lose_nothing(large: bool, home: Path) -> None:
    """From the very beginning, when nothing is there. Small stages share commits, whoever of the members leads."""
    path = home / "s"
    users = [ONE, OTHER] * 3
    putting = [fork_member(partial(put, path, at, large), user, UMASKS[at % 4]) for at, user in enumerate(users)]
    taking = [fork_member(partial(take, path, at), user, 0o077) for at, user in enumerate((ONE, OTHER))]
    assert [end_of(pid) for pid in putting] == [0] * len(putting)
    (home / "done").touch()
    assert [end_of(pid) for pid in taking] == [0] * len(taking)
    taken = [record for at in range(2) for record in (home / f"taken-{at}").read_bytes().split(b"\n") if record]
    assert sorted(taken) == sorted(b"%d-%d-%d" % (by, each, at) for by in range(6) for each in range(5) for at in range(30))


def test_members_append_and_read_at_once(home: Path) -> None:
    path = home / "s"

    def append(number: int) -> None:
        for each in range(5):
            with Topic(path, block_size=2000, lock_timeout=60, **SHARED) as topic:
                topic.append_many([b"%d-%d-%d" % (number, each, at) for at in range(30)])

    def read(number: int) -> None:
        found: list[bytes] = []
        with Topic(path, lock_timeout=60, **SHARED) as topic, topic.reader("r") as reader:
            until = time.monotonic() + 60
            while not (home / "done").exists() or topic.stats().readers["r"]:
                assert time.monotonic() < until
                messages = reader.read_many(20)
                found += [message.body for message in messages]
                reader.commit(*messages)
                time.sleep(0.005)
        (home / f"read-{number}").write_bytes(b"\n".join(found))

    users = [ONE, OTHER] * 2
    appending = [fork_member(partial(append, at), user, UMASKS[at % 4]) for at, user in enumerate(users)]
    reading = [fork_member(partial(read, at), user, 0o077) for at, user in enumerate((ONE, OTHER))]
    assert [end_of(pid) for pid in appending] == [0] * len(appending)
    (home / "done").touch()
    assert [end_of(pid) for pid in reading] == [0] * len(reading)
    found = [body for at in range(2) for body in (home / f"read-{at}").read_bytes().split(b"\n") if body]
    assert sorted(found) == sorted(b"%d-%d-%d" % (by, each, at) for by in range(4) for each in range(5) for at in range(30))


@pytest.mark.parametrize("store", ["queue", "topic"])
def test_a_lease_of_one_is_acknowledged_or_returned_by_the_other(store: str, home: Path) -> None:
    def lease(path: Path) -> None:
        if store == "queue":
            with Queue(path, **SHARED) as queue:
                queue.put_many([b"%d" % at for at in range(9)])
                assert queue.lease("a", max_records=3)
                assert queue.lease("b", max_records=3)
        else:
            with Topic(path, **SHARED) as topic, topic.reader("r") as reader:
                topic.append_many([b"%d" % at for at in range(9)])
                assert reader.lease("a", max_records=3)
                assert reader.lease("b", max_records=3)

    def end(owner: Any) -> None:
        first, second = sorted(owner.batches(), key=lambda batch: batch.key)
        assert (list(first), list(second)) == ([b"0", b"1", b"2"], [b"3", b"4", b"5"])
        first.ack()
        second.put_back()
        again = owner.lease("c")
        assert isinstance(again, Batch)
        assert list(again) == [b"%d" % at for at in range(3, 9)]
        again.ack()

    def go_on(path: Path) -> None:
        if store == "queue":
            with Queue(path, **SHARED) as queue:
                end(queue)
        else:
            with Topic(path, **SHARED) as topic, topic.reader("r") as reader:
                end(reader)

    as_member(lease, home / "s", ONE, 0o077)
    as_member(go_on, home / "s", OTHER, 0o077)
    assert not of_others(home)


class Dying(NoSync):
    """The process is killed before a call of the file system."""

    left = 0


def _counting(name: str) -> Callable[..., object]:
    def call(self: Dying, *arguments: object, **named: object) -> object:
        Dying.left -= 1
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(super(Dying, self), name)(*arguments, **named)

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Dying, _name, _counting(_name))


@pytest.mark.parametrize("use", ["queue", "stage", "topic"])
def test_the_other_goes_on_where_one_was_killed(use: str, home: Path, every: Every) -> None:
    act: Callable[..., None] = {"queue": use_queue, "stage": use_stage, "topic": use_topic}[use]

    def die(call: int) -> None:
        Dying.left = call
        act(home / "s", _files=Dying())

    killed = 0
    for call in every(range(1, 1200), quick=60, full=15):
        if call % 2:  # on what is there, or from nothing
            for path in home.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        killed += end_of(fork_member(partial(die, call), ONE, 0o077)) == -signal.SIGKILL
        as_member(act, home / "s", OTHER, 0o022)
        assert not of_others(home), call
    assert killed > 3


@pytest.mark.parametrize("store", ["queue", "topic"])
def test_commands_take_the_group(store: str, home: Path) -> None:
    more = ["--topic"] if store == "topic" else []
    reader = ["--reader", "r"] if store == "topic" else []

    def make(path: Path) -> None:
        command = partial(run, "--group", str(GROUP))
        assert command("put", str(path), *more, "a", "b", "c").exit_code == 0
        if store == "topic":
            assert command("topic", "readers", "add", str(path), "r").exit_code == 0
            assert command("topic", "readers", "copy", str(path), "r", "s").exit_code == 0
            assert command("topic", "trim", str(path), "--delete-committed").exit_code == 0
        else:
            assert command("get", str(path)).stdout == "a\n"
            (path.parent / "rows").write_text('{"record": "d"}\n')
            assert command("import", str(path), str(path.parent / "rows")).exit_code == 0
            (path.parent / "rows").unlink()
        for name in ("verify", "batches", "dead list"):
            assert command(*name.split(), str(path), *(reader if name != "verify" else [])).exit_code == 0, name
        assert command("repair", str(path), "--yes").exit_code == 0

    as_member(make, home / "s", ONE)
    as_member(lambda path: run("--group", str(GROUP), "put", str(path), "x"), home / "s", OTHER)
    assert not of_others(home)
    assert "group" in run("put", str(home / "s"), "x").stderr


def test_a_directory_that_a_member_makes_just_now_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two calls that it takes where the umask takes rights from the group."""
    made = os.chmod

    def slowly(path: Any, mode: int, **named: Any) -> None:
        time.sleep(0.2)
        made(path, mode, **named)

    monkeypatch.setattr(os, "chmod", slowly)
    pid = fork_member(partial(use_topic, home / "s"), ONE, 0o077)
    monkeypatch.undo()
    while not (home / "s").exists():
        time.sleep(0.001)
    as_member(use_topic, home / "s", OTHER)
    assert end_of(pid) == 0


def test_looking_needs_no_group_to_be_named(home: Path) -> None:
    as_member(use_queue, home / "s", ONE)
    as_member(use_topic, home / "t", ONE)

    def look(path: Path) -> None:
        assert inspect(path).records
        for name in ("ls", "stat", "peek"):
            assert run(name, str(path)).exit_code == 0
        assert run("stat", str(path.parent / "t")).exit_code == 0

    as_member(look, home / "s", OTHER)
