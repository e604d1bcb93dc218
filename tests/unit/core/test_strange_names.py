"""Something else in the place of any file or directory that a store may have: every look names it, and shows the other stores.

The names are those that the path modules define; `test_no_name_of_a_store_is_missing_here` keeps them complete.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import run
from disk import NoSync
from test_looks import MAKE, OTHER, packages_are_imported, shared  # noqa: F401  # fixtures
from test_owners import USER, as_root, as_user
from test_planted import sessions_and_stages_spill_soon, use_queue, use_topic  # noqa: F401  # a fixture

from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.tools import listing
from qewqew_core.topic import block_sums, topic_paths

NAMES = {
    "queue": [*paths.names_of("s"), (chunk.chunk_path("s", chunk.OUR_FIRST), False)],
    "topic": [
        *topic_paths.names_of("s", (f"x{suffix}" for suffix in topic_paths.IN_STATE)),
        *topic_paths.names_of_reader("s", "r"),
        *((path, False) for path in (topic_paths.block_of("s", 0), block_sums.path_of("s", 0))),
    ],
}
LOOKS = "ls", "stat", "check", "metrics", "top"


def put(place: Path, what: str, is_directory: bool) -> None:
    """Something else, in the place of ours."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    if what == "link":
        place.symlink_to(place.parent)
    elif what == "pipe":
        os.mkfifo(place)
    elif (what == "the other kind") is is_directory:
        place.write_bytes(b"x")
    else:
        place.mkdir()


def check_looks(kind: str, name: str, home: Path) -> None:
    for command in LOOKS:
        more = ["--once", "--json"] if command == "top" else ["--json"] if command in ("ls", "stat") else []
        result = run(command, home / "s" if command == "stat" else home, *more)
        told = " ".join((result.stdout + result.stderr).split())
        if command == "metrics":
            assert f'path="{home / "s"}",kind="{kind}"' in told
            assert 'readable{path="' in told
            assert "} 0" in told, name
        else:
            assert str(home / name) in told.replace("\\/", "/"), (command, name, told)
            assert result.exit_code or command == "top", (command, name)
        if command == "ls":
            rows: list[dict[str, Any]] = json.loads(result.stdout)
            assert ["error" in row for row in sorted(rows, key=lambda row: row["path"])] == [False, True]
    for command in ("verify", "batches", "key-status"):
        run(command, home / "s", *(["x"] if command == "key-status" else []))  # which raises what is not a named error


@pytest.mark.parametrize("what", ["link", "pipe", "the other kind"])
@pytest.mark.parametrize("kind", NAMES)
def test_whatever_is_in_the_place_of_a_name_of_a_store_is_named_by_every_look(kind: str, what: str, tmp_path: Path) -> None:
    for number, (name, is_directory) in enumerate(NAMES[kind]):
        home = tmp_path / str(number)
        home.mkdir()
        for store in ("s", "fine"):
            MAKE[kind](home / store, b"ours")
        put(home / name, what, is_directory)
        if kind == "topic" and name in (topic_paths.data_of("s"), topic_paths.log_of("s")):
            assert listing.find(str(home)).topics == ["fine", "s"]
        check_looks(kind, name, home)


@as_root
@pytest.mark.parametrize("kind", NAMES)
def test_whatever_belongs_to_somebody_else_is_named_by_every_look(kind: str, shared: Path) -> None:  # noqa: F811
    def make(home: Path) -> None:
        for store in ("s", "fine"):
            MAKE[kind](home / store, b"ours")
        for path in (home / "s").rglob("*") if kind == "topic" else ():
            path.chmod(0o777 if path.is_dir() else 0o600)
        (home / "s").chmod(0o777 if kind == "topic" else 0o600)

    for number, (name, is_directory) in enumerate(NAMES[kind]):
        home = shared / str(number)
        home.mkdir()
        home.chmod(0o777)
        as_user(make, home, USER)
        place = home / name
        if not place.exists():
            place.mkdir() if is_directory else place.touch()
        place.chmod(0o777)
        os.chown(place, OTHER, OTHER)
        as_user(lambda home, name=name: check_looks(kind, name, home), home, USER)  # type: ignore[misc]


@as_root
def test_a_directory_that_cannot_be_read_is_named_by_every_look(shared: Path) -> None:  # noqa: F811
    """There may be a topic in it. What a file system has at its top for root's repairs is none."""

    def look(path: Path) -> None:
        for command in ("ls", "check", "metrics", "top"):
            result = run(command, path, *(["--once"] if command == "top" else []))
            told = result.stdout + result.stderr
            assert "theirs" in told, command
            assert "lost+found" not in told, command
            if command == "metrics":
                assert f'qewqew_readable{{path="{path / "theirs"}",kind="directory",reader=""}} 0' in told
            else:
                assert result.exit_code or command == "top", command

    as_user(lambda path: MAKE["topic"](path, b"theirs"), shared / "theirs", OTHER)
    (shared / "lost+found").mkdir(mode=0o700)
    as_user(look, shared, USER)


def test_no_name_of_a_store_is_missing_here(tmp_path: Path) -> None:
    made = set[str]()

    class Noting(NoSync):
        def _made(self, fd: int, path: str) -> None:
            super()._made(fd, path)
            made.add(path)

        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            made.add(target)

    queue, topic = str(tmp_path / "q"), str(tmp_path / "t")
    use_queue(Path(queue), Noting)
    use_topic(Path(topic), Noting)
    for damaged in (Path(queue + paths.LOG), Path(topic_paths.index_of(topic))):
        assert damaged.exists()
    topic_paths_of_it = [name for name in made if name.startswith(topic + "/")]
    known = {queue, topic, *(path for path, _ in paths.names_of(queue))}
    known |= {path for path, _ in topic_paths.names_of(topic, map(os.path.basename, topic_paths_of_it))}
    known |= {path for path, _ in topic_paths.names_of_reader(topic, "r")}
    chunks = {chunk.chunk_path(queue, number) for number in paths.chunk_ids(queue, map(os.path.basename, made))}
    data = topic_paths.data_of(topic)
    inside = tuple(
        path + "/" for path, is_directory in (*paths.names_of(queue), *topic_paths.names_of_reader(topic, "r")) if is_directory
    )
    reserve = next(path for path, is_directory in topic_paths.names_of(topic, ()) if is_directory and path.endswith(".reserve"))
    left = {
        path for path in made - known - chunks if not path.startswith((*inside, reserve + "/")) and os.path.dirname(path) != data
    }
    assert len(made) > 20
    assert not left
