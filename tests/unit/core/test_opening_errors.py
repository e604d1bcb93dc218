"""What the system says while a store is opened or looked at: a named error with the right noun, the place and the next step.

All faults run over all stores, and all calls that open or look.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pendulum  # noqa: F401 - what is imported late must be there before this becomes another user
import pytest
from damage import in_time, tree
from disk import NoSync
from stride import swept

from qewqew_core import (
    QewQewError,
    Queue,
    Stage,
    Topic,
    inspect,
    inspect_reader,
    repair,
    repair_topic,
)
from qewqew_core.disk import ofd, waker  # noqa: F401 - also late
from qewqew_core.tools import exchange, listing, monitoring, tailing
from qewqew_core.topic.topic_inspection import inspect_topic

NOBODY = 65534
Call = Callable[[Path], object]


def make_queue(path: Path) -> None:
    with Queue(path, chunk_size=4096, _files=NoSync()) as q:
        q.put_many([b"%d" % number * 100 for number in range(60)])
        q.lease("leased", max_records=2)
        q.lease("dead", max_records=2).to_dead_letters("bad")  # type: ignore[union-attr]


def make_topic(path: Path) -> None:
    with Topic(path, block_size=2000, _files=NoSync()) as t:
        t.append_many([b"%d" % number * 100 for number in range(60)])
        with t.reader("r") as r:
            r.lease("leased", max_records=2)
            r.lease("dead", max_records=2).to_dead_letters("bad")  # type: ignore[union-attr]
            r.read()
            r.commit()


def use_queue(path: Path, use: Callable[[Queue], object], **settings: Any) -> object:
    with Queue(path, lock_timeout=0, **settings) as q:
        return use(q)


def stage(path: Path, **settings: Any) -> object:
    made = Stage(path, lock_timeout=0, **settings)
    try:
        made.put(b"staged")
        return made.commit()
    finally:
        made.close()


def use_topic(path: Path, use: Callable[[Topic], object], **settings: Any) -> object:
    with Topic(path, lock_timeout=0, **settings) as t:
        return use(t)


def use_reader(path: Path, use: Callable[[Any], object], **settings: Any) -> object:
    with Topic(path, lock_timeout=0, **settings) as t, t.reader("r") as r:
        return use(r)


def nothing(*_: object) -> None:
    pass


# By name, with the noun first: what opens a store, and what only looks.
OPENING: dict[str, Call] = {
    "queue": partial(use_queue, use=len),
    "queue, lease": partial(use_queue, use=lambda q: q.lease("new")),
    "queue, verify": partial(use_queue, use=lambda q: q.verify().problems),
    "queue, repair": partial(repair, lock_timeout=0),
    "stage": stage,
    "topic": partial(use_topic, use=lambda t: t.name),
    "topic, append": partial(use_topic, use=lambda t: t.append(b"x")),
    "topic, repair": partial(repair_topic, lock_timeout=0),
    "reader": partial(use_reader, use=lambda r: r.position()),
    "reader, lease": partial(use_reader, use=lambda r: r.lease("new")),
    "reader, read": partial(use_reader, use=lambda r: r.read().body),
}
LOOKING: dict[str, Call] = {
    "queue, inspect": inspect,
    "queue, export": lambda path: list(exchange.records(str(path), nothing)),
    "queue, tail": lambda path: list(tailing.records(str(path), 3, follow=False)),
    "queue, watch": lambda path: raise_first(monitoring.watch([str(path)])),
    "topic, inspect": inspect_topic,
    "topic, stats": partial(use_topic, use=lambda t: t.stats()),
    "topic, iterate": partial(use_topic, use=lambda t: [message.body for message in t]),
    "topic, verify": partial(use_topic, use=lambda t: t.verify().problems),
    "topic, readers": partial(use_topic, use=lambda t: t.readers()),
    "topic, export": lambda path: list(exchange.messages(str(path), nothing)),
    "topic, watch": lambda path: raise_first(monitoring.watch([str(path)])),
    "reader, inspect": lambda path: inspect_reader(path, "r"),
}
CALLS = OPENING | LOOKING


def raise_first(found: Iterator[monitoring.Watched]) -> object:
    for watched in found:
        if watched.error is not None:
            raise watched.error
    return None


def is_queue(name: str) -> bool:
    return name.startswith(("queue", "stage"))


MADE: dict[bool, Path] = {}  # a queue, and a topic


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> None:
    for one in (True, False):
        MADE[one] = tmp_path_factory.mktemp("made")
        (make_queue if one else make_topic)(MADE[one] / "q")


def copy_of(name: str, folder: Path) -> Path:
    """A new copy of the store that this call is for."""
    target = Path(tempfile.mkdtemp(dir=folder))
    shutil.copytree(MADE[is_queue(name)], target, dirs_exist_ok=True, copy_function=with_links())
    return target / "q"


def with_links() -> Callable[[str, str], object]:
    """Copies files as `shutil.copytree` wants it: a batch of a reader has links to blocks."""
    seen: dict[int, str] = {}

    def copy(one: str, other: str) -> object:
        inode = os.stat(one).st_ino
        if inode in seen:
            return os.link(seen[inode], other)
        seen[inode] = other
        return shutil.copy2(one, other)

    return copy


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can reach: pytest's are for the owner alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except QewQewError as error:
        return f"{type(error).__name__} {error.path} {error}"
    except BaseException as error:
        return f"builtin {type(error).__name__} {error}\n{traceback.format_exc()}"
    return ""


def as_nobody(act: Callable[[], object]) -> str:
    """What it raises for a user who owns nothing, as a text; empty if nothing."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(tell, said(act).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


def give(path: Path, user: int = NOBODY) -> None:
    """The store, and the directory that it is in."""
    for place in (path.parent, *path.parent.rglob("*")):
        os.chown(place, user, user)


def files_and_directories(name: str, folder: Path) -> tuple[list[str], list[str]]:
    path = copy_of(name, folder)
    found = sorted(path.parent.rglob("*"))
    return (
        [str(one.relative_to(path.parent)) for one in found if one.is_file()],
        [str(one.relative_to(path.parent)) for one in found if one.is_dir()],
    )


# No permission


@pytest.mark.parametrize("name", CALLS)
def test_who_may_not_read_the_store_of_another_user_is_told_who_he_is_whose_it_is_and_what_to_do(name, folder):
    path = copy_of(name, folder)
    path.parent.chmod(0o755)
    before = tree(folder)
    text = as_nobody(lambda: CALLS[name](path))
    noun = "directory" if name == "topic, watch" else "topic" if name.startswith("reader, i") else name.partition(",")[0]
    assert text.startswith(f"BadPath {path}"), text
    assert f"no permission to use the {noun}: Permission denied. This is user nobody (65534)" in text or noun == "reader"
    assert "belongs to root (0), mode 0" in text
    assert "run this as its owner, or let this user use it (chown, chmod)" in text
    assert tree(folder) == before


def test_a_queue_of_another_user_is_listed_so_that_a_monitor_does_not_pass_over_it(folder):
    make_queue(folder / "q")
    with Queue(folder / "leased") as q:  # leaves no header
        q.put(b"x")
        q.lease("key")

    def found() -> None:
        raise QewQewError(repr(listing.find(str(folder)).queues))

    assert as_nobody(found) == "QewQewError None ['leased', 'q']"
    text = as_nobody(lambda: raise_first(monitoring.watch([str(folder)])))
    assert text.startswith(f"BadPath {folder}/leased {folder}/leased: no permission to use the queue"), text


@pytest.mark.parametrize("name", swept(CALLS, quick=3))
@pytest.mark.parametrize("mode", [0o600, 0o644], ids=oct)
def test_a_file_or_directory_of_another_user_among_ours_is_named_and_never_passes_for_damage(name, folder, mode, every):
    files, directories = files_and_directories(name, folder)
    for other in [*every(files, quick=3), *directories]:
        path = copy_of(name, folder)
        give(path)
        os.chown(path.parent / other, 0, 0)
        (path.parent / other).chmod(mode)
        text = as_nobody(lambda path=path: CALLS[name](path))
        assert not text or text.startswith("BadPath"), (other, text)
        links = [one for one in path.parent.rglob("*") if one.samefile(path.parent / other)]  # a batch of a reader has some
        told = f"belongs to root (0), mode {mode:04o}: run this as its owner"
        assert not text or any(f"{one} {told}" in text for one in links), (other, text)
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("name", OPENING)
@pytest.mark.parametrize("owner", [0, NOBODY], ids=["of another user", "without write permission"])
def test_nothing_is_opened_or_made_in_a_directory_that_nobody_may_write_to(name, folder, owner):
    """Not only what would need it at once: what is staged there could never be leased."""
    path = copy_of(name, folder)
    give(path)
    homes = [path.parent] if is_queue(name) else [path / "state"] if name.startswith("reader") else [path]
    for home in homes:
        os.chown(home, owner, owner)
        home.chmod(0o555)
    before = tree(folder)
    text = as_nobody(lambda: OPENING[name](path))
    assert text.startswith("BadPath"), text
    assert f"This is user nobody (65534), and the directory {homes[0]} belongs to" in text, text
    assert f"mode 0555: {'let its owner use it (chmod u+rwx)' if owner else 'run this as its owner, or let'}" in text, text
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["queue", "stage", "topic", "queue, repair"])
def test_a_new_store_in_the_directory_of_another_user_is_refused_and_nothing_is_made(name, folder):
    text = as_nobody(lambda: OPENING[name](folder / "q"))
    if name == "queue, repair":
        assert not text, "there is nothing to repair"
        return
    assert text.startswith(f"BadPath {folder}/q"), text
    assert f"the directory {folder} belongs to root (0), mode 0755" in text
    assert tree(folder) == {}


@pytest.mark.parametrize("home", ["reader", "state"])
def test_a_reader_is_made_and_deleted_whole_or_not_at_all(home, folder):
    path = copy_of("reader", folder)
    give(path)
    (path / home).chmod(0o555)
    before = tree(folder)
    assert as_nobody(lambda: use_topic(path, lambda t: t.reader("new"))).startswith("BadPath")
    assert tree(folder) == before
    (path / home).chmod(0o700)

    def delete(topic: Topic) -> None:
        with topic.reader("r") as reader:
            (path / home).chmod(0o555)
            try:
                reader.delete()
            finally:
                (path / home).chmod(0o700)

    text = as_nobody(lambda: use_topic(path, delete))
    assert text.startswith("BadPath"), text
    assert "no permission to use the reader" in text
    assert as_nobody(lambda: use_topic(path, lambda t: t.delete_reader("r"))) == ""


@pytest.mark.parametrize("name", ["queue", "queue, put", "topic", "reader"])
def test_a_directory_that_loses_its_write_permission_while_the_store_is_open_loses_nothing(name, folder):
    """Nothing is leased or put; it goes on when the permission is back."""
    path = copy_of(name, folder)
    give(path)
    home = path / "state" if name == "reader" else path / "data" if name == "topic" else path.parent

    def work() -> None:
        def refused(act: Callable[[], object]) -> None:
            home.chmod(0o555)
            text = said(act)
            assert text.startswith("BadPath"), text
            assert "no permission to use the" in text, text
            home.chmod(0o755)

        large = [b"x" * 3000] * 5
        if name.startswith("queue"):
            with Queue(path, chunk_size=4096) as q:
                before = len(q)
                if name == "queue":
                    refused(lambda: q.lease("new", max_records=3))
                    assert (len(q), len(q.batches())) == (before, 1)
                    assert q.lease("new", max_records=3) is not None
                else:
                    refused(lambda: q.put_many(large))
                    assert len(q) == before
                    assert q.put_many(large) == 5
                    assert len(q) == before + 5
                assert q.verify().problems == []
            return
        with Topic(path, block_size=2000) as t:
            if name == "topic":
                before = len(t)
                t.append(b"x" * 3000)
                refused(lambda: t.append_many(large))
                assert len(t) == before + 1
                assert t.append_many(large) == 5
            else:
                with t.reader("other") as r:
                    refused(lambda: r.lease("new", max_records=3))
                    assert r.batches() == []
                    assert r.lease("new", max_records=3) is not None
            assert t.verify().problems == []

    assert as_nobody(work) == ""


# Something else where a file or a directory belongs


def put_directory(place: Path) -> None:
    place.mkdir()


def put_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{(fd := os.open(place.parent, os.O_RDONLY))}/{place.name}")
    os.close(fd)


def put_circle(place: Path) -> None:
    place.symlink_to(place.name)


OTHERS = {"a directory": put_directory, "a pipe": os.mkfifo, "a socket": put_socket, "a link": put_circle}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", OTHERS)
def test_something_else_where_a_file_belongs_is_named(name, kind, folder, every):
    files, _ = files_and_directories(name, folder)
    for file in every(files, quick=3):
        path = copy_of(name, folder)
        (path.parent / file).unlink()
        OTHERS[kind](path.parent / file)
        with in_time():
            text = said(lambda path=path: CALLS[name](path))
        assert not text or text.startswith(("BadPath", "Corrupt", "BadManifest")), (file, text)
        assert not text.startswith("BadPath") or "in the way" in text or "regular file" in text or "is a directory" in text, text
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("name", CALLS)
def test_a_file_where_a_directory_belongs_is_named(name, folder):
    _, directories = files_and_directories(name, folder)
    for directory in directories:
        path = copy_of(name, folder)
        shutil.rmtree(path.parent / directory)
        (path.parent / directory).write_bytes(b"a file")
        text = said(lambda path=path: CALLS[name](path))
        assert not text or text.startswith(("BadPath", "Corrupt", "BadManifest")), (directory, text)
        assert not text.startswith("BadPath") or directory in text, (directory, text)
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("name", CALLS)
def test_empty_directories_that_a_backup_has_forgotten_are_not_missed(name, folder):
    """git, zip and object stores keep files alone."""
    results = []
    for forgets in (False, True):
        path = folder / str(forgets) / "q"
        path.parent.mkdir()
        if is_queue(name):
            with Queue(path) as q:
                q.put_many([b"1", b"2", b"3"])
                for end in ("ack", "drop"):
                    batch = q.lease(end, max_records=1)
                    assert batch is not None
                    batch.ack() if end == "ack" else (batch.to_dead_letters("bad"), batch.drop())
        else:
            with Topic(path) as t:
                t.append(b"1")
        for place in sorted(path.parent.rglob("*"), reverse=True) if forgets else ():
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()
        results.append(re.split("oldest|timestamp", repr(CALLS[name](path)))[0])
    assert results[0] == results[1]


# A second owner


SECOND = {
    "queue": "this process has the queue open; gave up after 0 s. A queue has one owner at a time",
    "queue, repair": "this process has the queue open",
    "stage": "this process has the queue open",
    "topic, append": "this process appends to the topic; gave up after 0 s. A topic has one writer at a time",
    "topic, repair": "this process appends to the topic",
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_owner_is_told_who_has_what(name, folder):
    path = copy_of(name, folder)
    with Queue(path) if is_queue(name) else Topic(path) as owner:
        if isinstance(owner, Topic):
            owner.append(b"x")
        text = said(lambda: OPENING[name](path))
    assert text.startswith("Locked"), text
    assert SECOND[name] in text


# A full disk


class Full(NoSync):
    """Gives no more room after so many calls. What a file has it keeps."""

    left = 0

    def _use(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: str, *, new: bool = False) -> int:
        if new:
            self._use()
        return super().open(path, new=new)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if offset + len(data) > os.fstat(fd).st_blocks * 512:
            self._use()
        super().write(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        if size > os.fstat(fd).st_blocks * 512:
            self._use()
        super().allocate(fd, size)

    def make_directory(self, path: str) -> None:
        self._use()
        super().make_directory(path)


@pytest.mark.parametrize("name", [name for name in OPENING if "repair" not in name])
def test_on_a_full_disk_opening_works_or_says_so_and_works_when_there_is_room(name, folder, every):
    for left in every(range(20), quick=3):
        path = copy_of(name, folder)
        files = Full()
        files.left = left
        text = said(lambda path=path, files=files: OPENING[name](path, _files=files))  # type: ignore[call-arg]
        assert not text or text.startswith("DiskFull"), (left, text)
        assert said(lambda path=path: OPENING[name](path)) == "", left
        shutil.rmtree(path.parent)


# A disk that fails


class Failing:
    """The n-th call of the system for a file in a folder fails, and all behind it."""

    NAMES = ("open", "stat", "lstat", "listdir", "scandir", "pread")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.left, self.failed = str(folder), 1 << 60, False
        for name in self.NAMES:
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name: str, real: Callable[..., Any], where: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(where, int):
            path = os.readlink(f"/proc/self/fd/{where}") if os.path.exists(f"/proc/self/fd/{where}") else ""
        else:
            path = os.fspath(where)
        if self.left < 1 << 50 and path.startswith(self.folder):
            self.left -= 1
            if self.left < 0:
                self.failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO), None if isinstance(where, int) else where)
        return real(where, *arguments, **named)


@pytest.mark.parametrize("name", CALLS)
def test_a_disk_that_fails_is_broken_and_nothing_of_the_system_comes_through(name, folder, monkeypatch, every):
    disk = Failing(monkeypatch, folder)
    kinds = set()
    for left in every(range(40), quick=4):
        path = copy_of(name, folder)
        disk.left, disk.failed = left, False
        text = said(lambda path=path: CALLS[name](path))
        failed, disk.left = disk.failed, 1 << 60
        assert not text or text.startswith(("Broken", "Corrupt", "BadManifest")), (left, text)
        kinds.add(text.partition(" ")[0] if failed else "whole")
        assert said(lambda path=path: CALLS[name](path)) == "", left
        shutil.rmtree(path.parent)
    assert "Broken" in kinds
