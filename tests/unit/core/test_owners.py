"""Root uses a store of a user, and the user goes on: what root makes belongs to whom the store belongs."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from refusal import tree
from test_bad_input import REACHABLE

from qewqew_core import BadPath, Queue, Stage, Topic, inspect, repair
from qewqew_core.tools.listing import find

USER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


def as_user(act: Callable[[Path], object], path: Path, user: int = USER, groups: Sequence[int] = ()) -> None:
    """Do it as another user, in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            act(path)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def directory_of(user: int, mode: int) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=REACHABLE))  # the one of pytest is for root alone
    os.chown(path, user, user)
    path.chmod(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path)


MODES = {"the user's directory": (USER, 0o755), "root's directory for all": (0, 0o777), "a sticky one": (0, 0o1777)}


@pytest.fixture(params=MODES)
def shared(request: pytest.FixtureRequest) -> Iterator[Path]:
    with directory_of(*MODES[request.param]) as path:
        yield path


@pytest.fixture
def users() -> Iterator[Path]:
    with directory_of(USER, 0o755) as path:
        yield path


@pytest.fixture(params=[0o777, 0o1777])
def roots(request: pytest.FixtureRequest) -> Iterator[Path]:
    with directory_of(0, request.param) as path:
        yield path


def queue_once(path: Path) -> None:
    with Queue(path, chunk_size=1000, max_attempts=1) as queue:
        queue.put_many([b"x" * 100] * 30)
        for to in ("ack", "nack", "put_back", "extend"):
            batch = queue.lease(f"{to}-{os.getuid()}-{len(queue)}", max_records=2, lease_timeout=9)
            assert batch is not None
            assert len(list(batch)) == 2
            getattr(batch, to)()
        for batch in (*queue.batches(), *queue.dead()):
            assert list(batch)
        assert queue.get_many(2)
        assert queue.verify().ok


def sessions(path: Path) -> None:
    with Queue(path, chunk_size=100_000) as queue, queue.session() as session:
        session.put_many([b"x" * 60_000] * 30)


def stage_once(path: Path) -> None:
    for count in (3, 40):
        with Stage(path, chunk_size=100_000) as stage:
            stage.put_many([b"y" * 60_000] * count)


def empty(path: Path) -> None:
    with Queue(path) as queue:
        queue.put_many([b"z"], key=f"{os.getuid()}")
        while queue.get_many(1000):
            pass


def damage(path: Path) -> None:
    queue_once(path)
    for chunk in path.parent.glob("q.3*"):
        chunk.write_bytes(chunk.read_bytes()[:-500] + bytes(500))
    repair(path)


def topic_once(path: Path) -> None:
    with Topic(path, block_size=2000, max_attempts=1) as topic, topic.reader("r") as reader:
        topic.append_many([b"x" * 100] * 60)
        with topic.session() as session:
            session.append(b"y" * 1000)
            session.read(reader)
        for to in ("ack", "nack", "put_back"):
            batch = reader.lease(f"{to}-{os.getuid()}-{topic.stats().next}", max_records=2)
            assert batch is not None
            getattr(batch, to)()
        reader.commit(reader.read())
        assert topic.verify().ok


USES: dict[str, tuple[Callable[[Path], object], ...]] = {
    "queue": (queue_once, stage_once, sessions),
    "empty queue": (empty, queue_once, empty, stage_once),
    "repaired queue": (queue_once, damage),
    "stage": (stage_once,),
    "topic": (topic_once,),
}


@pytest.fixture(autouse=True, scope="module")
def packages_are_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before we become somebody who may not read them."""
    for act in (queue_once, stage_once, topic_once):
        act(tmp_path_factory.mktemp("packages") / "q")


@as_root
@pytest.mark.parametrize("kind", USES)
def test_who_owns_a_store_goes_on_after_root_has_used_it(users: Path, kind: str) -> None:
    path = users / "q"
    for act in (*USES[kind], *USES[kind]):
        as_user(act, path)
        act(path)
        owners = {file: file.lstat().st_uid for file in users.rglob("*")}
        assert set(owners.values()) <= {USER}, owners
    as_user(USES[kind][0], path)


@as_root
@pytest.mark.parametrize("kind", USES)
def test_what_a_user_has_made_in_roots_directory_is_not_taken_for_roots(roots: Path, kind: str) -> None:
    """It may be there so that root puts records into it."""
    path = roots / "q"
    for act in USES[kind]:
        as_user(act, path)
    if not path.exists():  # the queue is empty
        as_user(queue_once, path)
    before = tree(roots)
    for use in (topic_once,) if kind == "topic" else (queue_once, stage_once, sessions, repair):
        with pytest.raises(BadPath, match=f"belongs to {USER}"):
            use(path)
    assert tree(roots) == before
    as_user(USES[kind][0], path)


@as_root
def test_a_directory_or_header_that_waits_for_root_is_refused(roots: Path) -> None:
    for name in ("t", "q"):
        (roots / name).mkdir() if name == "t" else (roots / name).touch()
        (roots / name).chmod(0o777 if name == "t" else 0o666)
        os.chown(roots / name, USER, USER)
    for use, name in ((topic_once, "t"), (queue_once, "q"), (stage_once, "q")):
        with pytest.raises(BadPath, match=f"belongs to {USER}"):
            use(roots / name)
    assert sorted(path.name for path in roots.rglob("*")) == ["q", "t"]


@as_root
@pytest.mark.parametrize("kind", USES)
def test_what_root_makes_is_the_owners_of_the_directory(shared: Path, kind: str) -> None:
    for act in USES[kind]:
        act(shared / "q")
    assert {file.lstat().st_uid for file in shared.rglob("*")} == {shared.stat().st_uid}


@as_root
def test_a_store_of_root_beside_those_of_a_user_stays_roots(shared: Path) -> None:
    if not shared.stat().st_uid:
        as_user(queue_once, shared / "q")
        queue_once(shared / "r")
        topic_once(shared / "q.x")
        assert {file.lstat().st_uid for file in shared.iterdir() if file.name[:2] != "q." or file.name == "q.x"} == {0, USER}
        assert not [file for file in (shared / "q.x").rglob("*") if file.lstat().st_uid]


@as_root
def test_a_link_to_nothing_makes_nothing_where_it_leads(shared: Path) -> None:
    aside = Path(tempfile.mkdtemp(dir=REACHABLE))
    try:
        os.symlink(aside / "header", shared / "q")
        os.lchown(shared / "q", USER, USER)
        for use in (queue_once, stage_once, repair):
            with pytest.raises(BadPath, match=r"a link .*is in the way of a file of the queue"):
                use(shared / "q")
        assert not [*aside.iterdir()]
    finally:
        shutil.rmtree(aside)


@pytest.mark.parametrize("kind", USES)
def test_a_umask_that_takes_everything_takes_nothing_from_the_owner(kind: str, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        before = os.umask(0o777)
        try:
            for act in (*USES[kind], *USES[kind]):
                act(path)
        finally:
            os.umask(before)

    if os.getuid():
        use(tmp_path / "q")
        return
    home = Path(tempfile.mkdtemp(dir=REACHABLE))
    try:
        os.chown(home, USER, USER)
        as_user(use, home / "q")
        for file in home.rglob("*"):
            assert stat.S_IMODE(file.lstat().st_mode) == (0o700 if file.is_dir() else 0o600)
    finally:
        shutil.rmtree(home)


@as_root
def test_waiting_stages_of_a_user_and_of_root_are_put_together(users: Path) -> None:
    as_user(queue_once, users / "q")
    before = inspect(users / "q").records
    waiting = []
    with Queue(users / "q") as queue:
        for number in range(6):
            if (pid := os.fork()) == 0:
                try:
                    if number % 2:
                        os.setgid(USER)
                        os.setuid(USER)
                    with Stage(users / "q", lock_timeout=20, chunk_size=1000) as stage:
                        stage.put(b"%d" % number)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            waiting.append(pid)
        assert len(queue) == before
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in waiting] == [0] * 6
    assert inspect(users / "q").records == before + 6
    assert find(str(users)).queues == ["q"]


@as_root
@pytest.mark.parametrize(
    "name", ["q.qew.stamp", "q.qew.wal", "q.qew", "t/t.lock", "t/t.wal", "t/state/r.lock", "t/state/new.lock"]
)
def test_root_writes_to_no_file_of_its_own_under_a_name_that_a_user_gave_it(name: str, users: Path) -> None:
    def fill(path: Path) -> None:
        with Queue(path / "q.qew") as queue, Topic(path / "t") as topic, topic.reader("r"):
            queue.put(b"1")
            topic.append(b"1")

    as_user(fill, users)

    def use() -> None:
        if name.startswith("q"):
            with Queue(users / "q.qew") as queue:
                queue.put(b"2")
        else:
            with Topic(users / "t") as topic, topic.reader("new" if "new" in name else "r") as reader:
                topic.append(b"2")
                reader.read_many(3)

    secret = users.parent / f"{users.name}.of-root"
    secret.write_bytes(b"root's")
    try:
        (users / name).unlink(missing_ok=True)
        os.link(secret, users / name)  # where fs.protected_hardlinks is 0, the user can do this
        with pytest.raises(BadPath, match=r"a hard link to a file of root \(0\)"):
            use()
        assert secret.read_bytes() == b"root's"
    finally:
        secret.unlink()


@as_root
@pytest.mark.parametrize("content", [b"ab", b"\0\1", b"", b"longer"])
def test_a_link_of_a_user_leads_root_to_no_file_of_its_own(users: Path, content: bytes) -> None:
    with directory_of(0, 0o700) as own:
        (own / "file").write_bytes(content)
        as_user(lambda path: queue_once(path / "q"), users)
        (users / "q").unlink()
        as_user(lambda path: (path / "q").symlink_to(own / "file"), users)
        for act in Queue, repair, inspect:
            with pytest.raises(BadPath, match=f"belongs to {USER}"):
                act(users / "q")
        assert [(file.name, file.read_bytes()) for file in own.iterdir()] == [("file", content)]
