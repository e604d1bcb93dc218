"""What others plant in a directory that they may write, before or while we use a store in it: it is refused by name, and nothing
is read, changed or removed beyond the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk import NoSync
from stride import Every
from test_owners import USER, as_root, as_user, directory_of, empty, queue_once, sessions, stage_once, topic_once

from qewqew_core import BadPath, Batch, QewQewError, Queue, Stage, Topic, inspect, repair, repair_topic
from qewqew_core.batch import names, places, published
from qewqew_core.batch.store import Local
from qewqew_core.cli import cli_monitoring
from qewqew_core.disk.files import Files
from qewqew_core.disk.reserve import RESERVE
from qewqew_core.formats import chunk
from qewqew_core.limits import LIMITS
from qewqew_core.queue import paths
from qewqew_core.tools import exchange, listing, monitoring
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic_inspection import inspect_reader, inspect_topic

OTHER = 65534
REFUSED = (QewQewError, OSError)


@pytest.fixture(autouse=True, scope="module")
def packages_are_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before we become somebody who may not read them."""
    for act in (queue_once, stage_once, topic_once):
        act(tmp_path_factory.mktemp("packages") / "q")


@pytest.fixture(autouse=True)
def sessions_and_stages_spill_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "spill_bytes", 5_000)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """So that one user of a test can tell another one something."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def use_queue(path: Path, files: type[Files] = NoSync) -> None:
    settings: dict[str, Any] = {"chunk_size": 1000, "sync": "never", "max_attempts": 1, "lock_timeout": 0, "_files": files()}
    with contextlib.suppress(REFUSED), Queue(path, **settings) as queue:
        queue.put_many([b"x" * 100] * 50)
        for number, to in enumerate(("ack", "nack", "put_back", "extend")):
            with contextlib.suppress(REFUSED):
                batch = queue.lease(f"{to}-{len(queue)}", max_records=3 + number, lease_timeout=9)
                assert batch is not None
                getattr(batch, to)()
        with contextlib.suppress(REFUSED):
            queue.lease("whole")
        for batch in (*queue.dead(), *queue.batches()):
            with contextlib.suppress(REFUSED):
                batch.drop() if batch.state == "dead" else batch.ack()
        with contextlib.suppress(REFUSED), queue.session() as session:
            session.put_many([b"z" * 900] * 15)
        with contextlib.suppress(REFUSED):
            queue.put_many([b"x" * 100] * 50)
    with contextlib.suppress(REFUSED), Stage(path, chunk_size=1000, lock_timeout=0, _files=files()) as stage:
        stage.put_many([b"z" * 900] * 15)
    with contextlib.suppress(REFUSED):
        repair(path, lock_timeout=0, _files=files())
    for look in (inspect, lambda path: listing.find(str(path.parent))):
        with contextlib.suppress(REFUSED):
            look(path)


def use_topic(path: Path, files: type[Files] = NoSync) -> None:
    settings: dict[str, Any] = {"block_size": 1000, "lock_timeout": 0, "delete_committed": True, "max_attempts": 1}
    with contextlib.suppress(REFUSED), Topic(path, _files=files(), **settings) as topic:
        topic.append_many([b"x" * 100] * 50)
        with contextlib.suppress(REFUSED), topic.reader("r") as reader:
            for to in ("ack", "nack", "put_back"):
                with contextlib.suppress(REFUSED):
                    batch = reader.lease(f"{to}-{topic.stats().next}", max_records=2)
                    assert batch is not None
                    getattr(batch, to)()
            with contextlib.suppress(REFUSED):
                reader.commit(*reader.read_many(10))
        topic.trim()
        topic.delete_reader("r")
    with contextlib.suppress(REFUSED):
        repair_topic(path, lock_timeout=0, _files=files())
    for look in (lambda path: inspect_topic(str(path)), lambda path: listing.find(str(path.parent))):
        with contextlib.suppress(REFUSED):
            look(path)


def of_reader(suffix: str) -> str:
    return topic_paths.stem_of("s", "r") + suffix


# Every name of a store's own, from the modules that define them: directories, and files.
QUEUE = [
    *(("s" + suffix, True) for suffix in names.DIRECTORIES),
    *(("s" + suffix, False) for suffix in ("", ".30001", *names.FILES)),
]
TOPIC = [
    *((f"s/{name}", True) for name in topic_paths.DIRECTORIES),
    *((of_reader(suffix), True) for suffix in (places.BATCHES, places.DEAD)),
    (f"s/s{RESERVE}", True),
    *((name, False) for name in (topic_paths.index_of("s"), topic_paths.log_of("s"), topic_paths.lock_of("s"))),
    *((name, False) for name in (topic_paths.rdx_of("s", "r"), of_reader(topic_paths.LOG), of_reader(topic_paths.LOCK))),
    *((name + ".tmp", False) for name in (topic_paths.rdx_of("s", "r"), topic_paths.log_of("s"), of_reader(topic_paths.LOG))),
]
STORES = {"queue": (use_queue, QUEUE), "topic": (use_topic, TOPIC)}
NAMES = [(kind, name, is_directory) for kind, (_, found) in STORES.items() for name, is_directory in found]


def precious(place: Path) -> Path:
    """A directory of somebody, with names as a store has them, and others."""
    for name in ("0", "1", "thesis.txt", ".profile", "r.wal", "r.lock", "0123456789abcdef", "manifest.json", "x/y"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"precious")
    return place


def content(place: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(place.rglob("*"))}


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        fd = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link to a directory": lambda path, aside: path.symlink_to(aside),
    "link to a file": lambda path, aside: path.symlink_to(aside / "thesis.txt"),
    "link to an empty file": lambda path, aside: path.symlink_to(aside / "empty"),
    "link to nothing": lambda path, aside: path.symlink_to(aside / "nothing"),
    "link to a device": lambda path, aside: path.symlink_to("/dev/zero"),
    "pipe": lambda path, aside: os.mkfifo(path),
    "socket": lambda path, aside: a_socket(path),
    "directory": lambda path, aside: shutil.copytree(aside, path),
    "file": lambda path, aside: path.write_bytes(b"precious"),
}


@pytest.mark.parametrize("before", ["new", "used"])
@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize(("store", "name", "is_directory"), NAMES, ids=lambda value: str(value))
def test_what_is_planted_at_a_name_of_ours_leads_nobody_out(
    store: str, name: str, is_directory: bool, kind: str, before: str, tmp_path: Path
) -> None:
    aside, home = precious(tmp_path / "aside"), tmp_path / "home"
    home.mkdir()
    (aside / "empty").touch()
    use, _ = STORES[store]
    if before == "used":
        use(home / "s")
    planted = home / name
    shutil.rmtree(planted, ignore_errors=True) if planted.is_dir() else planted.unlink(missing_ok=True)
    planted.parent.mkdir(parents=True, exist_ok=True)
    PLANTED[kind](planted, aside)
    found = content(aside)
    use(home / "s")
    assert content(aside) == found


def spilled(queue: Queue) -> None:
    with queue.session() as session:
        for _ in range(15):
            session.put(b"z" * 900)
        session.rollback()


def staged(queue: Queue) -> None:
    stage = Stage(queue.path, chunk_size=1000)
    try:
        stage.put_many([b"z" * 900] * 15)
    finally:
        stage.close()


def quarantined(queue: Queue) -> None:
    Path(f"{queue.path}.7").write_bytes(chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN + 3, chunk.NONE) + b"\0\1x")
    queue.set_aside(queue.orphans()[0])


USES: dict[str, Callable[[Queue], object]] = {
    places.BATCHES: lambda queue: queue.lease("new"),
    names.LEASE: lambda queue: queue.lease("new"),
    places.DEAD: lambda queue: queue.find_batch("key").to_dead_letters("x"),
    places.DAMAGED: quarantined,
    names.SPILL: spilled,
    names.STAGED: staged,
}


@pytest.mark.parametrize("kind", [kind for kind in PLANTED if kind != "directory"])
@pytest.mark.parametrize("suffix", [suffix for suffix in names.DIRECTORIES if suffix != RESERVE])  # see test_reserve
def test_what_is_in_the_way_of_an_open_queue_is_named_before_anything_changes(suffix: str, kind: str, tmp_path: Path) -> None:
    aside, path = precious(tmp_path / "aside"), tmp_path / "q"
    (aside / "empty").touch()
    with Queue(path, _files=NoSync()) as queue:
        queue.put_many([b"x"] * 10)
        queue.lease("key", max_records=2)
        planted = Path(str(path) + suffix)
        moved = planted.rename(tmp_path / "moved") if planted.exists() else None
        PLANTED[kind](planted, aside)
        found = content(aside)
        with pytest.raises(BadPath, match=rf"q\{suffix}.* in the way.* move it away"):
            USES[suffix](queue)
        assert len(queue) == 8
        assert queue.get() == b"x"
        planted.unlink()
        if moved is not None:
            moved.rename(planted)
        USES[suffix](queue)
        assert content(aside) == found
    with Queue(path) as queue:
        assert queue.verify().ok


class Switching(NoSync):
    """Exchanges a directory of the store for a link to another one, before a call of the file system."""

    place: Path
    aside: Path
    left: int  # calls until then

    @classmethod
    def at(cls, place: Path, aside: Path, call: int) -> type[Switching]:
        return type("Switched", (cls,), {"place": place, "aside": aside, "left": call})

    def pass_by(self) -> None:
        kind = type(self)
        kind.left -= 1
        if kind.left <= 0 and self.place.is_dir() and not self.place.is_symlink() and not self.aside.exists():
            shutil.copytree(self.place, self.aside)
            for file in self.aside.rglob("*"):
                if file.is_file():
                    file.write_bytes(b"precious")
            precious(self.aside)
            self.place.rename(self.place.with_name("moved"))
            self.place.symlink_to(self.aside)


def _passing(name: str) -> Callable[..., object]:
    def call(self: Switching, *arguments: object, **named: object) -> object:
        self.pass_by()
        return getattr(super(Switching, self), name)(*arguments, **named)

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Switching, _name, _passing(_name))


@pytest.mark.parametrize(
    ("store", "name"), [(store, name) for store, name, is_directory in NAMES if is_directory], ids=lambda value: str(value)
)
def test_a_directory_that_becomes_a_link_in_the_middle_leads_nobody_out(
    store: str, name: str, tmp_path: Path, every: Every
) -> None:
    use, _ = STORES[store]
    made = 0
    for call in every(range(1, 400), quick=24, full=4):
        home, aside = tmp_path / str(call) / "home", tmp_path / str(call) / "aside"
        home.mkdir(parents=True)
        files = Switching.at(home / name, aside, call)
        use(home / "s", files)
        if aside.exists():
            made += 1
            found = {file.read_bytes() for file in aside.rglob("*") if file.is_file()}
            assert found == {b"precious"}, call
        shutil.rmtree(tmp_path / str(call))
    assert made or name.endswith((names.LEASE, paths.SPILL, RESERVE, places.DAMAGED))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which everybody makes files, as /tmp."""
    with directory_of(0, 0o1777) as path:
        yield path


SECRET = b"card 4111-1111-1111-1111"


def use_secretly(store: str) -> Callable[[Path], object]:
    def queue(path: Path) -> None:
        with Queue(path, chunk_size=1000, max_attempts=1) as queue:
            queue.put_many([SECRET] * 30)
            queue.lease("a", max_records=2).nack("x")  # type: ignore[union-attr]
            queue.lease("b", max_records=2).ack()  # type: ignore[union-attr]
            with queue.session() as session:
                session.put_many([SECRET * 30] * 30)

    def stage(path: Path) -> None:
        with Stage(path, chunk_size=1000) as stage:
            stage.put_many([SECRET * 30] * 30)

    def topic(path: Path) -> None:
        with Topic(path) as topic, topic.reader("r") as reader:
            topic.append_many([SECRET] * 30)
            reader.lease("a", max_records=2).ack()  # type: ignore[union-attr]

    return {"queue": queue, "stage": stage, "topic": topic}[store]


def others_see(place: Path) -> list[str]:
    """The files with a secret in them that belong to somebody else, or that he may read."""
    found = []
    for path in place.rglob("*"):
        status = path.lstat()
        if path.is_file() and SECRET in path.read_bytes() and (status.st_uid == OTHER or status.st_mode & 0o077):
            found.append(str(path.relative_to(place)))
    return found


@as_root
@pytest.mark.parametrize(
    ("store", "name", "is_directory"),
    [*NAMES, *(("stage", name, is_directory) for name, is_directory in QUEUE)],
    ids=lambda value: str(value),
)
def test_what_another_user_has_made_at_a_name_of_ours_is_never_taken_for_ours(
    store: str, name: str, is_directory: bool, shared: Path
) -> None:
    def plant(place: Path) -> None:
        os.umask(0)
        (place / name).parent.mkdir(0o777, parents=True, exist_ok=True)
        (place / name).mkdir(0o777) if is_directory else (place / name).touch(0o666)

    told: list[str] = []

    def use(path: Path) -> None:
        try:
            use_secretly(store)(path)
        except BadPath as error:
            (path.parent / "told").write_text(str(error))

    as_user(plant, shared, OTHER)
    as_user(use, shared / "s", USER)
    assert not others_see(shared)
    if (shared / "told").exists():
        told.append((shared / "told").read_text())
        assert f"belongs to nobody ({OTHER}), mode 0{'777' if is_directory else '666'}" in told[0] or "s: a directory" in told[0]
        assert f"this is user {USER}" in told[0]
        assert "Nothing was changed; move it away" in told[0]


@as_root
@pytest.mark.parametrize("store", ["queue", "stage", "topic"])
def test_a_whole_store_of_another_user_is_not_ours(store: str, shared: Path) -> None:
    def plant(path: Path) -> None:
        os.umask(0)
        (topic_once if store == "topic" else empty)(path)
        if store != "topic":
            queue_once(path)
        for file in (path.parent, *path.parent.rglob("*")):
            with contextlib.suppress(PermissionError):
                file.chmod(0o777 if file.is_dir() else 0o666)

    def use(path: Path) -> None:
        with pytest.raises(BadPath, match=rf"belongs to nobody \({OTHER}\), mode 0(666|777), while this is user {USER}"):
            use_secretly(store)(path)

    as_user(plant, shared / "s", OTHER)
    as_user(use, shared / "s", USER)
    assert not others_see(shared)


@as_root
@pytest.mark.parametrize("store", ["queue", "topic"])
def test_a_batch_that_another_user_has_put_in_the_place_of_ours_is_not_read(store: str, shared: Path) -> None:
    def use(path: Path) -> None:
        with Queue(path) if store == "queue" else Topic(path) as opened:
            opened.put(b"ours") if isinstance(opened, Queue) else opened.append(b"ours")
            with opened if isinstance(opened, Queue) else opened.reader("r") as source:
                batch = source.lease("run")
                assert batch is not None
                assert list(batch) == [b"ours"]
                home = Path(batch.manifest_path).parents[1]
                os.rename(home, home.with_name("moved"))
                (path.parent / "wanted").write_text(str(home))
                wait_for(lambda: (path.parent / "done").exists())
                with pytest.raises(BadPath, match=rf"belongs to nobody \({OTHER}\), mode 0755, while this is user {USER}"):
                    list(batch)
                home.rename(home.with_name("forged"))
                home.with_name("moved").rename(home)
                assert list(batch) == [b"ours"]

    def forge(place: Path) -> None:
        wait_for(lambda: (place / "wanted").exists() and (place / "wanted").read_text() != "")
        shutil.copytree(place / "copy", (place / "wanted").read_text())
        (place / "done").touch()

    shared.chmod(0o777)
    (shared / "copy").mkdir()
    if pid := os.fork():
        if store == "topic":
            (shared / "s").mkdir()
            os.chown(shared / "s", USER, USER)
            (shared / "s").chmod(0o777)
            (shared / "s" / "state").mkdir()
            os.chown(shared / "s" / "state", USER, USER)
            (shared / "s" / "state").chmod(0o777)
        as_user(use, shared / "s", USER)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        try:
            as_user(forge, shared, OTHER)
            os._exit(0)
        finally:
            os._exit(1)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o2775, 0o777, 0o1777])
@pytest.mark.parametrize("owner", ["ours", "roots"])
@pytest.mark.parametrize("act", [queue_once, stage_once, sessions, topic_once])
def test_what_is_ours_is_ours_wherever_it_is(act: Callable[[Path], object], owner: str, mode: int, shared: Path) -> None:
    """Also in a container with any user and group 0, or with a umask that lets the group write."""
    if owner == "ours":
        os.chown(shared, USER, USER)
    elif mode == 0o755:
        pytest.skip("nobody but root makes files there")
    shared.chmod(mode)

    def use(path: Path) -> None:
        act(path)
        act(path)

    as_user(use, shared / "s", USER, [0])


TOPIC_CALLS: dict[str, Callable[[Path], object]] = {
    "append": lambda path: append_one(path, b"meant for all"),
    "repair": repair_topic,
    "inspect": inspect_topic,
    "inspect a reader": lambda path: inspect_reader(path, "r"),
    "export": lambda path: list(exchange.messages(str(path), lambda done, total: None)),
}


def append_one(path: Path, body: bytes) -> None:
    with Topic(path) as topic, topic.reader("r") as reader:
        topic.append(body)
        reader.read()


@as_root
@pytest.mark.parametrize("leads_to", ["a topic", "an empty directory"])
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775])
@pytest.mark.parametrize("user", [USER, 0])
def test_a_topic_is_not_reached_through_a_link_of_another_user(user: int, mode: int, leads_to: str, shared: Path) -> None:
    private = shared / "home" / "private"
    private.mkdir(parents=True)
    (shared / "all").mkdir()
    for directory in (private.parent, private):
        os.chown(directory, user, user)
    os.chown(shared / "all", 0, OTHER if mode == 0o2775 else 0)
    (shared / "all").chmod(mode)
    as_user(lambda path: append_one(path, b"private") if leads_to == "a topic" else path.mkdir(), private / "s", user)
    as_user(lambda path: path.symlink_to(private / "s"), shared / "all" / "s", OTHER)
    before = content(private)

    def use(path: Path) -> None:
        for act in TOPIC_CALLS.values():
            with pytest.raises(BadPath, match=rf"s: a link that belongs to nobody \({OTHER}\), mode 0777, .* move it away"):
                act(path)

    as_user(use, shared / "all" / "s", user)
    assert content(private) == before


@as_root
def test_a_topic_is_not_reached_through_a_link_that_was_put_there_after_its_path_was_checked(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.chmod(0o777)

    def use(path: Path) -> None:
        append_one(path, b"private")
        path.rename(path.with_name("moved"))
        checked = topic_paths.check_topic_path

        def check(given: Path) -> str:
            full = checked(given)
            (path.parent / "ready").touch()
            while not path.is_symlink():
                time.sleep(0.01)
            return full

        monkeypatch.setattr(topic_paths, "check_topic_path", check)
        before = content(path.with_name("moved"))
        with pytest.raises(BadPath, match=rf"s: a link that belongs to nobody \({OTHER}\), mode 0777"):
            append_one(path, b"x")
        assert content(path.with_name("moved")) == before

    def plant(path: Path) -> None:
        while not (path.parent / "ready").exists():
            time.sleep(0.01)
        path.symlink_to(path.with_name("moved"))

    if pid := os.fork():
        as_user(use, shared / "s", USER)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        try:
            as_user(plant, shared / "s", OTHER)
            os._exit(0)
        finally:
            os._exit(1)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_a_topic_may_be_a_link_of_its_user_or_of_root(mode: int, shared: Path) -> None:
    os.chown(shared, USER, USER)
    shared.chmod(mode)
    as_user(lambda path: (path / "elsewhere").mkdir(), shared, USER)
    os.symlink(shared / "elsewhere" / "s", shared / "s")
    as_user(lambda path: (path / "elsewhere" / "s").mkdir(), shared, USER)
    for whose in (0, USER):
        os.lchown(shared / "s", whose, whose)
        for act in TOPIC_CALLS.values():
            for user in (USER, 0):
                as_user(act, shared / "s", user)


def session_once(path: Path) -> None:
    with Topic(path) as topic, topic.session() as session:
        session.append(b"x")


def read_once(path: Path) -> Iterator[bytes]:
    with Topic(path) as topic:
        topic.copy_reader("r", "copy")
        topic.delete_reader("copy")
        yield from (message.body for message in topic)
        topic.writer()


def trim_once(path: Path) -> None:
    with Topic(path) as topic:
        topic.append(b"x")
        topic.trim()


WRITES: dict[str, Callable[[Path], object]] = {
    "append": lambda path: append_one(path, b"x"),
    "session": session_once,
    "trim": trim_once,
    "read": lambda path: list(read_once(path)),
}


@as_root
@pytest.mark.parametrize("with_log", [False, True])
@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("call", WRITES)
def test_what_is_no_reader_of_ours_is_named_and_keeps_nobody_from_appending(
    call: str, kind: str, with_log: bool, shared: Path
) -> None:
    aside, path = precious(shared / "aside"), shared / "s"
    (aside / "empty").touch()
    as_user(lambda path: append_one(path, b"x"), path, USER)
    for directory in (path, *(path / name for name in topic_paths.DIRECTORIES)):
        directory.chmod(0o777)

    def plant(path: Path) -> None:
        os.umask(0)
        PLANTED[kind](path / "reader" / "evil.rdx", aside)
        if with_log:
            PLANTED[kind](path / "state" / "evil.wal", aside)

    def use(path: Path) -> None:
        logging.basicConfig(filename=path.parent / "told", force=True)
        for _ in range(2):
            before = length(path)
            WRITES[call](path)
            assert length(path) == before + (not call.startswith("read"))
        assert "evil.rdx" in (path.parent / "told").read_text()

    as_user(plant, path, OTHER)
    as_user(use, path, USER)


@pytest.mark.parametrize("kind", [kind for kind in PLANTED if kind != "file"])
@pytest.mark.parametrize("file", ["log", "rdx"])
def test_what_is_in_the_place_of_a_file_of_one_reader_stops_no_other_and_nothing_of_it_is_lost(
    file: str, kind: str, tmp_path: Path
) -> None:
    aside, path = precious(tmp_path / "aside"), tmp_path / "t"
    (aside / "empty").touch()
    with Topic(path, block_size=1, max_records=2, slow_readers="hold") as topic:
        topic.append_many([b"0", b"1", b"2"])
        for name in ("bad", "good"):
            with topic.reader(name) as reader:
                assert reader.read().body == b"0"
                reader.commit()
    place = path / ("state/bad.wal" if file == "log" else "reader/bad.rdx")
    place.rename(tmp_path / "kept")
    PLANTED[kind](place, aside)
    for number in range(3):
        with Topic(path, block_size=1, max_records=2, slow_readers="hold") as topic, topic.reader("good") as good:
            topic.append(b"more")
            assert good.read().body in (b"1", b"2", b"more")
            good.commit()
            assert topic.stats().readers.keys() >= {"good"}
            assert str(place) in topic.verify().strange
        assert str(place) in repair_topic(path).strange
        watched = {one.reader: one for one in monitoring.watch([str(path)])}
        assert (watched["good"].error, type(watched["bad"].error)) == (None, BadPath), number
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    (tmp_path / "kept").rename(place)
    with Topic(path) as topic, topic.reader("bad") as bad:
        assert [message.body for message in bad.read_many(9)] == [b"1", b"2", *[b"more"] * 3]


@pytest.mark.parametrize("log", ["whole", "damaged", "another thing", "gone"])
@pytest.mark.parametrize("rdx", ["large", "link"])
def test_what_is_in_the_place_of_an_rdx_lets_nothing_be_removed_that_the_reader_has_not_read(
    rdx: str, log: str, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    with Topic(path, block_size=1, max_records=2, slow_readers="hold") as topic, topic.reader("r") as reader:
        topic.append_many([b"0", b"1", b"2", b"3"])
        assert reader.read().body == b"0"
        reader.commit()
    place = path / topic_paths.rdx_of("t", "r").removeprefix("t/")
    wal = path / (topic_paths.stem_of("t", "r") + topic_paths.LOG).removeprefix("t/")
    place.unlink()
    place.write_bytes(bytes(200_000)) if rdx == "large" else place.symlink_to("/nowhere")
    if log == "damaged":
        damaged = bytearray(wal.read_bytes())
        damaged[len(damaged) // 3] ^= 255
        wal.write_bytes(damaged)
    elif log != "whole":
        wal.unlink()
        if log == "another thing":
            wal.mkdir()
    with Topic(path, block_size=1, max_records=2, slow_readers="hold") as topic:
        for _ in range(5):
            topic.append(b"more")
        with contextlib.suppress(QewQewError):
            topic.trim()
        assert topic.stats().messages >= 8  # all but the first, which it has read


@pytest.mark.parametrize("name", ["nobody", "good"])
def test_a_large_file_in_the_place_of_an_rdx_stops_nobody(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t"
    with Topic(path) as topic, topic.reader("good") as good:
        topic.append_many([b"0", b"1"])
        assert good.read().body == b"0"
        good.commit()
    (path / "reader" / f"{name}.rdx").write_bytes(bytes(200_000))
    for number in range(2, 4):
        with Topic(path) as topic:
            assert topic.append(b"more") == number
            topic.trim()
        report = repair_topic(path)
        assert (report.records, report.damage) == (number + 1, [])
        assert "has 200,000 bytes" in report.strange[str(path / "reader" / f"{name}.rdx")]


@as_root
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_reader_of_ours_is_named_and_hides_no_other(kind: str, shared: Path) -> None:
    """From who looks, repairs, removes old messages or deletes a reader."""
    aside, path = precious(shared / "aside"), shared / "s"
    (aside / "empty").touch()

    def make(path: Path) -> None:
        with Topic(path, block_size=2000) as topic, topic.reader("good") as reader:
            for _ in range(3):
                topic.append_many([b"x" * 100] * 20)
            reader.commit(*reader.read_many(100))

    as_user(make, path, USER)
    for directory in (path, *(path / name for name in topic_paths.DIRECTORIES)):
        directory.chmod(0o777)
    evil = path / "reader" / "evil.rdx"

    def use(path: Path) -> None:
        logging.basicConfig(filename=path.parent / "told", force=True)
        with Topic(path) as topic:
            for _ in range(2):
                assert topic.stats().readers == {"good": 0}
            assert str(evil) in topic.verify().strange
        assert (path.parent / "told").read_text().count(str(evil)) == 1
        assert str(evil) in repair_topic(path).strange
        with Topic(path, delete_committed=True) as topic:
            assert topic.trim()
            with pytest.raises(BadPath, match=re.escape(str(evil))):
                topic.delete_reader("evil")
            topic.delete_reader("good")

    as_user(lambda path: PLANTED[kind](evil, aside), path, OTHER)
    found = content(aside)
    as_user(use, path, USER)
    assert os.path.lexists(evil)
    assert content(aside) == found


def length(path: Path) -> int:
    with Topic(path) as topic:
        return len(topic)


def test_a_published_batch_is_not_written_through_a_link(tmp_path: Path) -> None:
    aside = precious(tmp_path / "aside")
    (tmp_path / "published").mkdir()
    with Queue(tmp_path / "q") as queue:
        queue.put(b"x")
        batch = queue.lease("run")
        assert isinstance(batch, Batch)
        (tmp_path / "published" / batch.id).symlink_to(aside)
        found = content(aside)
        with pytest.raises(BadPath, match="a link is in the way"):
            batch.publish(str(tmp_path / "published"))
    with pytest.raises(BadPath, match="a link is in the way"):
        Local(str(tmp_path / "published" / batch.id)).remove(published.FILES)
    assert content(aside) == found


@pytest.mark.parametrize("kind", ["pipe", "file", "socket", "link to a file"])
def test_what_is_in_the_place_of_a_published_batch_is_named(kind: str, tmp_path: Path) -> None:
    aside, target = precious(tmp_path / "aside"), tmp_path / "published"
    target.mkdir()
    with Queue(tmp_path / "q") as queue:
        queue.put(b"x")
        batch = queue.lease("run")
        assert isinstance(batch, Batch)
        PLANTED[kind](target / batch.id, aside)
        with pytest.raises(BadPath, match=rf"{batch.id}.* in the way of a file of the batch .* move it away"):
            batch.publish(str(target))
        with pytest.raises(BadPath, match=rf"{batch.id}.* in the way of a file of the batch .* move it away"):
            published.remove(str(target), [batch.id])


@as_root
def test_a_published_batch_of_another_user_is_refused_by_name(shared: Path) -> None:
    def publish(path: Path) -> None:
        with Queue(path) as queue:
            queue.put(b"x")
            batch = queue.lease("run")
            assert isinstance(batch, Batch)
            (path.parent / "id").write_text(Path(batch.publish(str(path.parent / "published"))).name)

    def remove(path: Path) -> None:
        with pytest.raises(BadPath, match=rf"published/s-\w+: no permission to use the batch: .* user {USER},"):
            published.remove(str(path), [(path.parent / "id").read_text()])

    as_user(publish, shared / "s", OTHER)
    as_user(remove, shared / "published", USER)


@as_root
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_file_for_the_collector_that_cannot_be_replaced_is_named(kind: str, shared: Path) -> None:
    as_user(lambda path: path.touch() if kind == "file" else path.mkdir(), shared / "out", OTHER)

    def replace(path: Path) -> None:
        with pytest.raises(OSError, match=rf"^[^']*'{path}'$"):
            cli_monitoring._replace(str(path), b"x")
        assert {file.name for file in path.parent.iterdir()} == {"out"}

    as_user(replace, shared / "out", USER)


@pytest.mark.parametrize("suffix", ["", *names.FILES, f"{places.BATCHES}/x/manifest.json"])
def test_a_pipe_beside_queues_keeps_nobody_from_looking(suffix: str, tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put(b"x")
    pipe = tmp_path / f"app{suffix}"
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    assert "q" in listing.find(str(tmp_path)).queues
