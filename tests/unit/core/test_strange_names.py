"""Something else in the place of any file or directory that a store may have: every look names it, and shows the other stores.

The names are those that the path modules define; `test_no_name_of_a_store_is_missing_here` keeps them complete.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import refused, run
from disk import NoSync
from test_looks import MAKE, OTHER, packages_are_imported, shared  # noqa: F401  # fixtures
from test_owners import USER, as_root, as_user, directory_of
from test_planted import PLANTED, content, sessions_and_stages_spill_soon, use_queue, use_topic  # noqa: F401  # a fixture

from qewqew_core import Queue, Topic
from qewqew_core.batch import damage_met, places
from qewqew_core.disk.files import Files, look_into
from qewqew_core.formats import chunk
from qewqew_core.queue import paths, strangers
from qewqew_core.tools import listing
from qewqew_core.topic import block_sums, topic_paths

NAMES = {
    "queue": [
        *paths.names_of("s"),
        *damage_met.names_of("s"),
        *((chunk.chunk_path("s", number), False) for number in (chunk.OUR_FIRST, 777)),
    ],
    "topic": [
        *topic_paths.names_of("s", (f"x{suffix}" for suffix in topic_paths.IN_STATE)),
        *topic_paths.names_of_reader("s", "r"),
        *damage_met.names_of("s/state/topic"),
        *((path, False) for path in (topic_paths.block_of("s", 0), block_sums.path_of("s", 0), topic_paths.block_of("s", 9999))),
    ],
}
HAS = {
    "queue": ["s" + paths.LOG, "s" + paths.STAMP, chunk.chunk_path("s", chunk.OUR_FIRST)],
    "topic": [topic_paths.lock_of("s"), topic_paths.stem_of("s", "r") + topic_paths.LOCK, topic_paths.block_of("s", 0)],
}
LOOKS = "ls", "stat", "check", "metrics", "top"


def put(place: Path, what: str, is_directory: bool) -> None:
    """Something else, in the place of ours."""
    place.parent.mkdir(exist_ok=True)
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
            if not place.parent.exists():
                place.parent.mkdir()
                os.chown(place.parent, USER, USER)
            place.mkdir() if is_directory else place.touch()
        place.chmod(0o777)
        os.chown(place, OTHER, OTHER)
        as_user(lambda home, name=name: check_looks(kind, name, home), home, USER)  # type: ignore[misc]


@as_root
@pytest.mark.parametrize("kind", NAMES)
def test_what_this_user_may_not_write_is_named_by_every_look(kind: str, shared: Path) -> None:  # noqa: F811
    def make(home: Path) -> None:
        home.mkdir()
        for store in ("s", "fine"):
            MAKE[kind](home / store, b"ours")

    def check(home: Path, place: Path) -> None:
        refused: list[bool] = []
        for mode in 0o400, 0o500:
            before = place.stat().st_mode
            if place.is_dir() == (mode == 0o500):
                place.chmod(mode)
                is_refused = run("put", home / "s", "x").exit_code == 1
                for command in ("check", "ls", "metrics"):
                    result = run(command, home / "s" if place == home else home)
                    told = " ".join((result.stdout + result.stderr).split())
                    is_named = ("no permission" in told and result.exit_code != 0) or (command == "metrics" and "} 0" in told)
                    assert is_named or not is_refused, (command, place, told)
                refused.append(is_refused)
                place.chmod(before)
        if place in (home, home / "s"):
            assert any(refused)

    home = shared / "home"
    as_user(make, home, USER)
    for place in [home if kind == "queue" else home / "s", *sorted((home / "s").rglob("*")), *home.glob("s*")]:
        if not place.name.endswith((".reserve", ".sums")) and not any(part.endswith(".reserve") for part in place.parts):
            as_user(lambda home, place=place: check(home, place), home, USER)  # type: ignore[misc]


def make_batches(kind: str, path: Path) -> None:
    """A store with an acknowledged, a leased and a dead batch."""
    with ExitStack() as opened:
        store = opened.enter_context(Queue(path) if kind == "queue" else Topic(path))
        (store.put_many if isinstance(store, Queue) else store.append_many)([b"x"] * 20)
        source = store if isinstance(store, Queue) else opened.enter_context(store.reader("r"))
        acked, _, dead = (source.lease(key, max_records=2) for key in ("acked", "leased", "dead"))
        assert acked is not None
        assert dead is not None
        acked.ack()
        dead.to_dead_letters("x")


def in_batches(home: Path) -> list[str]:
    """Each name in the directories of batches that is there, and one that may be."""
    homes = [path for suffix in (places.BATCHES, places.DEAD) for path in home.rglob(f"*{suffix}")]
    found = [path for batches in homes for path in batches.rglob("*")]
    found += [path / "another" for path in (*homes, *found) if path.is_dir()]
    return [str(path.relative_to(home)) for path in found]


@pytest.mark.parametrize("kind", NAMES)
def test_every_command_names_the_same_and_its_advice_leads_to_a_healthy_store(kind: str, tmp_path: Path) -> None:
    (aside := tmp_path / "aside").mkdir()
    (aside / "empty").touch()
    (aside / "thesis.txt").write_bytes(b"precious")
    (tmp_path / "made").mkdir()
    make_batches(kind, tmp_path / "made" / "s")
    before, planted, named = content(aside), cycle(kind for kind in PLANTED if kind != "file"), 0
    for number, name in enumerate([*(name for name, _ in NAMES[kind]), *in_batches(tmp_path / "made")]):
        home = tmp_path / str(number)
        shutil.copytree(tmp_path / "made", home)
        place = home / name
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.parent.mkdir(exist_ok=True)
        PLANTED["pipe" if (what := next(planted)) == "directory" and dict(NAMES[kind]).get(name, True) else what](place, aside)
        commands = ("ls", home), ("stat", home / "s"), ("check", home), ("verify", home / "s"), ("repair", home / "s", "--yes")
        for command, *arguments in commands:
            result = run(command, *arguments)
            told = "".join((result.stdout + result.stderr).split())  # in a table it may be broken
            if not os.path.lexists(place):
                break  # a name for a while, whatever was left there: an opening has removed it
            assert str(place) in told, (command, name, told)
            assert "moveitaway" in told, (command, name)
            assert result.exit_code == {"check": 3}.get(command, 1), (command, name)
            named += command == "repair"
        else:
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        if name.startswith(topic_paths.data_of("s")):  # nothing else has the messages
            shutil.copytree(tmp_path / "made" / "s" / "data", home / "s" / "data", dirs_exist_ok=True)
        if run("verify", home / "s").exit_code:
            assert run("repair", home / "s", "--yes").exit_code == 5, name
        assert run("verify", home / "s").exit_code == 0, name
        assert run("check", home, "--max-dead", 9).exit_code == 0, name
        assert content(aside) == before
    assert named > 20


@as_root
@pytest.mark.parametrize("whose", ["another's", "ours without rights"])
@pytest.mark.parametrize("kind", NAMES)
def test_what_an_opening_may_not_use_is_named_by_every_look(kind: str, whose: str) -> None:
    """In the user's own directory, as after a restore or a copy by root: where nobody else may write, mode and owner tell."""
    with directory_of(USER, 0o700) as top:

        def make(home: Path) -> None:
            home.mkdir()
            make_batches(kind, home / "s")
            MAKE[kind](home / "fine", b"ours")

        as_user(make, top / "made", USER)
        batches = [name for name in in_batches(top / "made") if name.count("/") > (kind == "topic") + 1][:1]
        more = ["s.777"] if kind == "queue" else ["s/state/zz.lock"]
        for number, name in enumerate([*HAS[kind], *batches, *more]):
            home = top / str(number)
            shutil.copytree(top / "made", home)
            place = home / name
            if not place.exists():
                place.parent.mkdir(exist_ok=True)
                place.touch()
            for path in (home, *home.rglob("*")):
                os.chown(path, USER, USER)
            if whose == "another's":
                os.chown(place, OTHER, OTHER)
            place.chmod(0o600 if whose == "another's" else 0)

            def look(home: Path, name: str = name) -> None:
                for command, store in (("check", home), ("ls", home), ("verify", home / "s")):
                    result = run(command, store)
                    told = " ".join((result.stdout + result.stderr).split())
                    if command == "verify" and os.access(home / name, os.R_OK | os.W_OK):
                        continue  # the opening has made a new one in its place
                    assert result.exit_code, (command, name, told)
                    assert name.rpartition("/")[2] in told.replace(" ", ""), (command, name, told)
                    assert "move away" not in told, (command, name, told)

            as_user(look, home, USER)


def test_a_topic_may_have_the_name_of_a_chunk_file(tmp_path: Path) -> None:
    MAKE["queue"](tmp_path / "s", b"ours")
    MAKE["topic"](tmp_path / "s.7", b"ours")
    assert run("ls", tmp_path).exit_code == 0
    assert run("verify", tmp_path / "s").exit_code == 0


def test_what_is_strange_at_the_name_of_a_chunk_file_is_listed_and_named_with_orphans(tmp_path: Path) -> None:
    MAKE["queue"](tmp_path / "s", b"ours")
    os.mkfifo(tmp_path / "s.7")
    listed = run("orphans", "list", tmp_path / "s")
    assert (listed.exit_code, "a pipe is in the way" in " ".join(listed.stdout.split())) == (1, True)
    (row,) = json.loads(run("orphans", "list", tmp_path / "s", "--json").stdout)
    assert (row["file"], row["records"]) == (str(tmp_path / "s.7"), None)
    for command in ("show", "adopt", "aside"):
        refused(1, "orphans", command, tmp_path / "s", "s.7", match="s.7: a pipe is in the way")
    assert not json.loads(run("verify", tmp_path / "s", "--json").stdout)["orphans"]


def test_who_looks_at_one_queue_after_the_other_does_not_list_them_all_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1001):
        (tmp_path / f"other-{number}").touch()
    for number in range(20):
        MAKE["queue"](tmp_path / f"s{number}", b"ours")
    os.mkfifo(tmp_path / "s19.7")
    listed = 0

    class Counting(Files):
        def kinds(self, path: str, *, directories: bool = False) -> dict[str, bool]:
            nonlocal listed
            listed += path == str(tmp_path)
            return super().kinds(path, directories=directories)

    ticks = count()
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    found = [[*strangers.strange_chunks(look_into(str(tmp_path), files=Counting()), str(tmp_path / f"s{n}"))] for n in range(20)]
    assert [len(errors) for errors in found] == [0] * 19 + [1]
    assert listed == 2, "what is listed is good for ten times as long as that took"


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
    left = {path for path in made - known - chunks if not path.startswith(inside) and os.path.dirname(path) != data}
    assert len(made) > 20
    assert not left
