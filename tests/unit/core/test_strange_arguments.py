"""Something strange where an argument of a command, or a call, names a place: an error with a name, and nothing is changed.

The commands and their arguments are those of the command line itself.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import refused, run
from test_owners import USER, as_root, as_user, directory_of
from test_planted import a_socket

from qewqew_core import Batch, QewQewError, Queue, Stage, Topic, inspect, inspect_reader, repair, repair_topic
from qewqew_core.batch import manifest, published
from qewqew_core.batch.publishing import publish
from qewqew_core.cli.main import app
from qewqew_core.cli.terminal import FAILED

PLACES = {"PATH", "QUEUE", "TOPIC", "DIRECTORY", "FILE", "URL"}  # what the help calls an argument that names one
RAW = re.compile(r"\b(FileNotFound|NotADirectory|IsADirectory|FileExists|Permission|OS|Value)Error\b")
MORE = {("top",): ["--once"], ("repair",): ["--yes"], ("dead", "drop"): ["--yes"], ("put",): ["record"]}


def link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


def a_loop(home: Path) -> Path:
    link(home / "b", "a")
    return link(home / "a", "b")


def a_file(home: Path) -> Path:
    (home / "f").write_bytes(b"precious")
    return home / "f"


def made(make: Callable[[Path], object], path: Path) -> Path:
    make(path)
    return path


STRANGE: dict[str, Callable[[Path], str | Path]] = {
    "link to nothing": lambda home: link(home / "l", "nothing"),
    "below a link to nothing": lambda home: link(home / "l", "nothing") / "x",
    "loop of links": a_loop,
    "below a loop of links": lambda home: a_loop(home) / "x",
    "below a file": lambda home: a_file(home) / "x",
    "below a pipe": lambda home: made(os.mkfifo, home / "p") / "x",
    "socket": lambda home: made(a_socket, home / "s"),
    "directory": lambda home: made(Path.mkdir, home / "d"),
    "nothing in nothing": lambda home: home / "no" / "x",
    "long name": lambda home: home / ("x" * 300),
    "long path": lambda home: home / ("x/" * 2_100),
    "bytes that are no text": lambda home: f"{home}/\udcff",
    "NUL": lambda home: f"{home}/a\0b",
    "no name": lambda home: "",
}


def commands(found: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(found, "commands"):
        for name, command in found.commands.items():
            yield from commands(command, (*names, name))
    else:
        yield names, found


ARGUMENTS = [
    (names, command, place.name)
    for names, command in commands(typer.main.get_command(app))
    for place in command.params
    # The FILE of `orphans` is the name of a chunk file, and the places of `drain` are those of a job of Spark.
    if place.metavar in PLACES and names[0] not in ("orphans", "drain")
]


def call(names: tuple[str, ...], command: Any, place: str, strange: str | Path, good: dict[str, str]) -> list[object]:
    """A command with what is strange in that place and, in others that it needs, what is good."""
    options: list[object] = []
    given: list[object] = []
    for each in command.params:
        if each.name == place or each.required:
            value = strange if each.name == place else good[each.metavar]
            given += [value] if each.param_type_name == "argument" else []
            options += [each.opts[0], value] if each.param_type_name == "option" else []
    return [*names, *options, "--", *given] if names == ("put",) else [*names, *options, *given]


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_strange_where_an_argument_names_a_place_is_named_and_nothing_is_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (good_home := tmp_path / "good").mkdir()
    with Queue(good_home / "q") as queue, Topic(good_home / "t") as topic, topic.reader("r"):
        queue.put_many([b"x"] * 4)
        topic.append(b"x")
        batch = queue.lease("key", max_records=2)
        assert batch is not None
    good = {name: str(good_home / "q") for name in ("PATH", "QUEUE", "FILE")}
    good |= {"TOPIC": str(good_home / "t"), "URL": str(good_home / "published"), "ID": batch.id, "READER": "r", "FILTER": "a"}
    good |= {"KEY|ID": "key", "KEY": "key"}
    assert len(ARGUMENTS) > 30
    for number, (names, command, place) in enumerate(ARGUMENTS):
        (home := tmp_path / str(number)).mkdir()
        arguments = call(names, command, place, STRANGE[kind](home), good)
        before = tree(home)
        result = run(*arguments, *MORE.get(names, []))
        told = result.stdout + result.stderr
        assert not RAW.search(told), (arguments, told)
        if result.exit_code:
            assert tree(home) == before, arguments
            assert told.strip(), arguments
        shutil.rmtree(home)


def tree(home: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mode) for path in home.rglob("*"))


CALLS: dict[str, Callable[[Any], object]] = {
    "Queue": lambda path: Queue(path).put(b"x"),
    "Stage": lambda path: Stage(path).put(b"x"),
    "Topic": lambda path: Topic(path).append(b"x"),
    "stage in a store": lambda path: store_stage(path),
    "inspect": inspect,
    "inspect_reader": lambda path: inspect_reader(path, "r"),
    "repair": repair,
    "repair_topic": repair_topic,
    "manifest": manifest.load,
    "complete": lambda path: published.complete(str(path)),
    "load": lambda path: published.load(str(path), ["x-0123456789abcdef"]),
    "remove": lambda path: published.remove(str(path), ["x-0123456789abcdef"]),
}


def store_stage(path: str | Path) -> None:
    with Stage(f"file://{path}") as stage:
        stage.put(b"x")
        stage.commit("k")


@pytest.mark.parametrize("kind", STRANGE)
def test_a_call_that_is_given_what_is_strange_raises_an_error_with_a_name_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put(b"x")
        batch = queue.lease("key")
        assert isinstance(batch, Batch)
    calls = {**CALLS, "publish": lambda path: publish(batch.manifest_path, str(path))}
    refusals = 0
    for number, (name, act) in enumerate(calls.items()):
        (home := tmp_path / str(number)).mkdir()
        strange = STRANGE[kind](home)
        before = tree(home)
        try:
            act(strange)
        except QewQewError:
            refusals += 1
            assert tree(home) == before, name
    assert refusals > 3


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_metrics_replace_a_file_or_a_link_and_nothing_else(kind: str, tmp_path: Path) -> None:
    Queue(tmp_path / "q").close()
    place = tmp_path / "out"
    makes: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "socket": a_socket, "directory": Path.mkdir}
    if kind == "device":
        if os.geteuid():
            pytest.skip("only root makes devices")
        makes[kind] = lambda path: os.mknod(path, 0o20600, os.makedev(1, 3))
    makes[kind](place)
    before = tree(tmp_path)
    refused(FAILED, "metrics", tmp_path, "--output", place, match=f"out: a {kind} is in the way of this file")
    assert tree(tmp_path) == before


@as_root
def test_without_permission_it_is_said_who_may() -> None:
    with directory_of(0, 0o755) as home:
        (home / "closed").mkdir(mode=0o700)
        with Queue(home / "q") as queue:
            queue.put(b"x")
        (home / "q").chmod(0o644)

        def use(path: Path) -> None:
            for arguments in (("import", path / "q", path / "closed" / "x"), ("metrics", path, "--output", path / "out")):
                result = run(*arguments)
                if os.geteuid():
                    assert result.exit_code, arguments
                    assert "no permission" in " ".join((result.stdout + result.stderr).split()), arguments
                    assert not RAW.search(result.stdout + result.stderr), arguments

        use(home)  # as root, so that all packages are imported
        (home / "out").unlink()
        as_user(use, home, USER)


def test_a_line_without_an_end_is_no_json_before_it_fills_the_memory(tmp_path: Path) -> None:
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(1 << 40)
    refused(2, "import", tmp_path / "q", tmp_path / "zeros", match="line 1: this is not JSON")
    assert not (tmp_path / "q").exists()
