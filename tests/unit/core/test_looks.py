"""Looks, which take no lock: they show what is ours, never what others have put in its place, and holes cost them nothing."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import run
from test_owners import USER, as_root, as_user, directory_of

from qewqew_core import BadPath, Corrupt, Queue, Stage, Topic, inspect, inspect_reader
from qewqew_core.disk.files import SMALL, Files, look_into, read_whole
from qewqew_core.formats import chunk
from qewqew_core.queue import paths, stamp
from qewqew_core.queue.inspection import snapshot
from qewqew_core.topic import topic_paths
from qewqew_core.topic.topic_inspection import inspect_topic

OTHER, ONE, TWO, GROUP = 65534, 12345, 12346, 12399
FORGED = b"forged"


def make_queue(path: Path, record: bytes) -> None:
    with Queue(path) as queue:
        queue.put_many([record] * 3, key=record.decode())


def make_topic(path: Path, record: bytes) -> None:
    with Topic(path) as topic, topic.reader("r"):
        topic.append_many([record] * 3)


def stage_looks(path: Path) -> None:
    with Stage(path) as stage:
        stage.key_status("forged")


MAKE = {"queue": make_queue, "topic": make_topic}
WHOLE = "whole"
FILES = {
    "queue": [WHOLE, "s", "s" + paths.LOG, Path(chunk.chunk_path("s", chunk.OUR_FIRST)).name],
    "topic": [
        *(WHOLE, topic_paths.index_of("s"), topic_paths.log_of("s"), topic_paths.block_of("s", 0), topic_paths.rdx_of("s", "r")),
        *(topic_paths.stem_of("s", "r") + suffix for suffix in (topic_paths.LOG, topic_paths.LOCK)),
    ],
}
CALLS: dict[str, dict[str, Callable[[Path], object]]] = {
    "queue": {"inspect": inspect, "snapshot": lambda path: snapshot(str(path))},
    "topic": {"inspect": inspect_topic, "reader": lambda path: inspect_reader(path, "r")},
}
OF_RECORDS = ["peek", "tail", "export"]
OF_NUMBERS = ["ls", "stat", "check", "metrics"]


@pytest.fixture(autouse=True, scope="module")
def packages_are_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before we become somebody who may not read them."""
    for kind, make in MAKE.items():
        path = tmp_path_factory.mktemp("packages") / "s"
        make(path, b"x")
        for command in (*OF_RECORDS, *OF_NUMBERS):
            assert run(command, path).exit_code == 0
        if kind == "queue":
            path.write_bytes(b"x")
            stage_looks(path.parent / "t")
            for command in ("ls", "peek", "check"):
                assert run(command, path).exit_code
            assert run("key-status", path, "x").exit_code


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which everybody makes files."""
    with directory_of(0, 0o777) as path:
        yield path


def plant(home: Path, kind: str, name: str) -> Path:
    """A store of ours and, in its place or that of one of its files, one of somebody else."""
    forged = home / "forged"
    forged.mkdir()
    forged.chmod(0o777)
    as_user(lambda path: MAKE[kind](path, b"ours"), home / "s")
    as_user(lambda path: MAKE[kind](path, FORGED), forged / "s", OTHER)
    for path in (home / "s", *home.rglob("*")):
        path.chmod(0o777)  # whoever may write there could do that, too
    names = [file.name for file in forged.iterdir()] if name == WHOLE else [name]
    for each in names:
        (home / each).rename(home / (each + ".moved")) if name != WHOLE or (home / each).exists() else None
        (forged / each).rename(home / each)
    for path in (home, *home.rglob("*.moved")):
        if path != home:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(forged)
    return home / "s"


@as_root
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names])
def test_what_somebody_else_has_put_in_the_place_of_ours_is_shown_by_no_look(kind: str, name: str, shared: Path) -> None:
    def look(path: Path) -> None:
        # Which hides neither the topic nor other readers.
        is_one_readers = name in {path for path, _ in topic_paths.names_of_reader("s", "r")}
        for call in CALLS[kind].values():
            if (name.endswith(".30001") and call is not CALLS[kind]["inspect"]) or (is_one_readers and call is inspect_topic):
                continue
            with pytest.raises(BadPath, match=rf"belongs to nobody \({OTHER}\).* while this is user {USER}"):
                call(path)
        for command in [*OF_NUMBERS, *([] if is_one_readers else OF_RECORDS)]:
            result = run(command, path)
            assert FORGED not in result.stdout_bytes, command
            if command == "metrics":
                assert result.exit_code or re.search(rb"readable{.*} 0", result.stdout_bytes)
            else:
                assert result.exit_code, command
                assert f"({OTHER})" in " ".join((result.stdout + result.stderr).split()), command
        if kind == "queue" and not name.endswith(".30001"):
            assert run("key-status", path, "forged").exit_code
            with pytest.raises(BadPath):
                stage_looks(path)

    path = plant(shared, kind, name)
    as_user(look, path)


@as_root
@pytest.mark.parametrize("kind", MAKE)
def test_one_that_is_not_ours_hides_no_other(kind: str, shared: Path) -> None:
    def look(path: Path) -> None:
        listed = run("ls", path.parent)
        assert listed.exit_code
        assert "fine" in listed.stdout
        assert "BadPath" in listed.stdout
        metrics = run("metrics", path.parent).stdout
        assert metrics.count("qewqew_records{") == 1
        assert run("check", path.parent).exit_code

    path = plant(shared, kind, WHOLE)
    as_user(lambda path: MAKE[kind](path, b"ours"), shared / "fine")
    as_user(look, path)


@as_root
@pytest.mark.parametrize("kind", MAKE)
def test_verify_names_a_batch_that_is_not_ours(kind: str, shared: Path) -> None:
    def opened(path: Path) -> Queue | Topic:
        return Queue(path) if kind == "queue" else Topic(path)

    def verify(path: Path) -> None:
        with opened(path) as store:
            assert f"({OTHER})" in " ".join(store.verify().strange.values())

    def lease(path: Path) -> None:
        with opened(path) as store:
            source = store if isinstance(store, Queue) else store.reader("r")
            assert source.lease("run") is not None

    as_user(lambda path: MAKE[kind](path, b"ours"), shared / "s")
    as_user(lease, shared / "s")
    (manifest,) = shared.rglob("manifest.json")
    for file in (manifest.parent, manifest):
        os.chown(file, OTHER, OTHER)
        file.chmod(0o777)
    if kind == "topic":
        (shared / "s").chmod(0o777)
    as_user(verify, shared / "s")


@as_root
@pytest.mark.parametrize("kind", MAKE)
def test_a_look_at_the_store_of_a_group_needs_no_name_of_it(kind: str, shared: Path) -> None:
    def make(path: Path) -> None:
        with Queue(path, group=str(GROUP)) if kind == "queue" else Topic(path, group=str(GROUP)) as store:
            if isinstance(store, Queue):
                store.put(b"x")
            else:
                store.append(b"x")
                store.reader("r").close()

    def look(path: Path) -> None:
        for call in CALLS[kind].values():
            call(path)
        for command in (*OF_RECORDS, *OF_NUMBERS):
            assert run(command, path).exit_code == 0, command

    os.chown(shared, ONE, GROUP)
    shared.chmod(0o2770)
    as_user(make, shared / "s", ONE, [GROUP])
    for user in (ONE, TWO):
        as_user(look, shared / "s", user, [GROUP])
    look(shared / "s")  # root


@as_root
def test_a_header_that_is_a_link_of_somebody_else_is_not_followed(shared: Path) -> None:
    path = shared / "s"
    as_user(lambda path: make_queue(path, b"ours"), path)
    (shared / "s").rename(shared / "two")
    as_user(lambda path: path.symlink_to(shared / "two"), path, OTHER)

    def look(path: Path) -> None:
        with pytest.raises(BadPath, match="a link that belongs to"):
            inspect(path)

    as_user(look, path)


def test_a_header_that_is_a_link_of_ours_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "s"
    make_queue(path, b"ours")
    path.rename(tmp_path / "elsewhere" / "header")
    path.symlink_to(tmp_path / "elsewhere" / "header")
    with Queue(path) as queue:
        assert queue.get() == b"ours"
        assert queue.verify().strange == {}
    for command in (*OF_RECORDS, *OF_NUMBERS):
        assert run(command, path).exit_code == 0, command
    (tmp_path / "elsewhere" / "header").unlink()
    with pytest.raises(BadPath, match=r"a link is in the way of a file of the queue .it leads to nothing"):
        Queue(path)
    assert "a link is in the way of a file of the queue (it leads to nothing)" in run("check", path).output


@as_root
def test_a_stamp_of_somebody_else_is_named_before_there_is_a_queue(shared: Path) -> None:
    """And says nothing about the queue: it is no sign of a log that was lost."""
    path = shared / "s"

    def use(path: Path) -> None:
        for act in inspect, Queue, snapshot:
            with pytest.raises(BadPath, match=rf"a file that belongs to .*{OTHER}.* is in the way of a file of the queue"):
                act(str(path))

    as_user(lambda path: Path(f"{path}{paths.STAMP}").write_bytes(stamp.BODY.pack(stamp.MAGIC, 1) + bytes(4)), path, OTHER)
    as_user(use, path)


# Large files that take no room


SPARSE = (1 << 31) - 4097
MEMORY = 600 << 20


def grow(path: Path, begin: bytes = b"") -> None:
    with path.open("ab") as file:
        file.write(begin)
    os.truncate(path, SPARSE)


def with_little_memory(act: Callable[[Path], object]) -> Callable[[Path], object]:
    def limited(path: Path) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        act(path)

    return limited


@as_root
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names if name not in (WHOLE, "s.30001")]
)
def test_a_sparse_file_of_gibibytes_costs_a_look_no_memory(kind: str, name: str, shared: Path) -> None:
    def look(path: Path) -> None:
        grow(path.parent / name)
        for call in CALLS[kind].values():
            try:
                call(path)  # what is behind its end says nothing
            except Corrupt as error:
                assert "bytes, more than any such file of QewQew" in str(error)  # noqa: PT017
                assert str(path.parent / name) in str(error)  # noqa: PT017
        run("dump", path.parent / name)

    as_user(lambda path: MAKE[kind](path, b"ours"), shared / "s")
    as_user(with_little_memory(look), shared / "s")


@pytest.mark.parametrize("size", [SMALL + 1, SPARSE])
def test_what_is_larger_than_its_kind_is_named_before_it_is_read(size: int, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", size)
    with pytest.raises(Corrupt, match=f"has {size:,} bytes, more than any such file of QewQew"):
        read_whole(Files(), str(tmp_path / "f"), most=SMALL)


def test_a_file_that_is_a_hole_in_the_middle_is_named_and_a_hole_at_its_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    grow(path, b"begin")
    try:
        fd = os.open(path, os.O_RDONLY)
        if os.lseek(fd, 0, os.SEEK_HOLE) == SPARSE:
            pytest.skip("this file system tells of no holes")
    except OSError as error:
        assert error.errno == errno.EINVAL  # noqa: PT017
        pytest.skip("this file system tells of no holes")
    finally:
        os.close(fd)
    assert read_whole(look_into(str(tmp_path)), str(path)).rstrip(b"\0") == b"begin"
    with path.open("r+b") as file:
        file.seek(SPARSE - 1)
        file.write(b"x")
    with pytest.raises(Corrupt, match="has holes of more than 67,108,864 bytes"):
        read_whole(Files(), str(path))
