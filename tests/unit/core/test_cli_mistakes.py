"""What a user can do wrong with any command: a clear message and the right exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from commands import run
from typer.testing import Result

from qewqew_core import Queue, Topic
from qewqew_core.cli.main import app, main

# Of each command what it needs, PATH being that of what it is about.
COMMANDS: dict[str, list[str]] = {
    "put": ["PATH", "x"],
    "get": ["PATH"],
    "peek": ["PATH"],
    "ls": ["PATH"],
    "stat": ["PATH"],
    "verify": ["PATH"],
    "repair": ["PATH", "--yes"],
    "batches": ["PATH"],
    "ack": ["PATH", "id"],
    "nack": ["PATH", "id"],
    "retry": ["PATH", "id"],
    "replay": ["PATH", "key"],
    "publish": ["PATH", "id", "published"],
    "dump": ["PATH"],
    "export": ["PATH"],
    "import": ["PATH", "-"],
    "tail": ["PATH"],
    "top": ["PATH", "--once"],
    "dead list": ["PATH"],
    "dead show": ["PATH", "id"],
    "dead return": ["PATH", "id"],
    "dead drop": ["PATH", "id", "--yes"],
    "orphans list": ["PATH"],
    "orphans show": ["PATH", "file"],
    "orphans adopt": ["PATH", "file"],
    "orphans aside": ["PATH", "file"],
    "topic read": ["PATH", "--reader", "r"],
    "topic trim": ["PATH", "--delete-committed"],
    "topic readers list": ["PATH"],
    "topic readers add": ["PATH", "r"],
    "topic readers copy": ["PATH", "r", "s"],
    "topic readers seek": ["PATH", "r", "--oldest"],
    "topic readers filter": ["PATH", "r", "a"],
    "topic readers delete": ["PATH", "r", "--yes"],
    "key-status": ["PATH", "key"],
}
MAKES = {"put", "import", "topic readers add"}  # what is not there
MONITORS = {"check", "metrics"}  # with the exit codes and the output that monitors expect: test_cli_monitoring.py
OF_DIRECTORIES = {"init", "preflight"}  # test_marker.py, test_preflight.py
OF_STORES = {"drain"}  # test_cli_drain.py


def callbacks(of: typer.Typer, name: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    for one in of.registered_commands:
        yield name + (one.name or one.callback.__name__), one.callback
    for group in of.registered_groups:
        yield from callbacks(group.typer_instance, f"{name}{group.name} " if group.name else name)


def options(callback: Callable[..., object]) -> Iterator[tuple[str, type]]:
    """The names of its options, and of what type they are."""
    for name, hint in typing.get_type_hints(callback, include_extras=True).items():
        if name == "return":
            continue
        kind, info = typing.get_args(hint)[:2]
        kind = next((one for one in typing.get_args(kind) if one is not type(None)), kind)
        if isinstance(info, typer.models.OptionInfo):
            names = [one for one in (info.default, *(info.param_decls or ())) if str(one).startswith("--")]
            yield (names or [f"--{name.replace('_', '-')}"])[0], kind


def check(result: Result, *codes: int) -> None:
    assert result.exit_code in codes, (result.exit_code, result.stdout, result.stderr)
    if result.exit_code:
        assert result.stderr or "?" in result.stdout  # `ls` and `top` have errors in their table
    for line in result.stderr.splitlines() if result.exit_code not in (0, 2) else ():
        assert line.startswith("qewqew: "), result.stderr


def called(command: str, path: Path) -> list[str]:
    return [*command.split(), *(str(path) if one == "PATH" else one for one in COMMANDS[command])]


every_command = pytest.mark.parametrize("command", COMMANDS)


def test_no_command_is_forgotten_here():
    assert dict(callbacks(app)).keys() == COMMANDS.keys() | MONITORS | OF_DIRECTORIES | OF_STORES


def test_every_command_that_prints_knows_json():
    for command, callback in callbacks(app):
        assert any(name == "--json" for name, _ in options(callback)) or command == "metrics", command


@every_command
def test_where_nothing_is(command, tmp_path):
    code = 0 if command in MAKES else 1 if command in ("dump", "top") else 3
    check(run(*called(command, tmp_path / "no")), code)
    if command not in MAKES:
        assert not list(tmp_path.iterdir())


@every_command
def test_in_a_directory_that_is_not_there(command, tmp_path):
    result = run(*called(command, tmp_path / "no" / "way"))
    check(result, 1)
    assert str(tmp_path / "no") in result.stderr + result.stdout


def test_a_path_cannot_paint_the_terminal(tmp_path):
    for command in ("stat", "dump"):  # an error of ours, and one of the system
        result = run(command, tmp_path / "\033[31mno")
        assert "\033" not in result.stderr
        assert "\\x1b[31mno" in result.stderr


@every_command
def test_a_directory_with_other_files(command, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("hello")
    check(run(*called(command, tmp_path / "mine")), 0 if command in ("ls", "top") else 1)
    assert [one.name for one in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@every_command
def test_a_file_of_something_else(command, tmp_path):
    (tmp_path / "letter").write_text("hello")
    result = run(*called(command, tmp_path / "letter"))
    check(result, 2 if command == "dump" else 1)
    assert str(tmp_path / "letter") in result.stderr + result.stdout
    assert (tmp_path / "letter").read_text() == "hello"


@every_command
def test_bad_numbers(command, tmp_path):
    path = tmp_path / "q"
    if command.startswith("topic"):
        with Topic(path) as t, t.reader("r"):
            pass
    else:
        with Queue(path) as q:
            q.put(b"x")
    for option, kind in options(dict(callbacks(app))[command]):
        for bad in {int: ("x", "-1", "1.5", ""), float: ("x", "-1", "1e400", "nan", "")}.get(kind, ()):
            result = run(*called(command, path), option, bad)
            assert result.exit_code == 2, (option, bad, result.stderr)
            check(result, 2)
        if kind is int:  # more than there can be is no mistake everywhere
            check(run(*called(command, path), option, "9" * 30), 0, 2, 3)


def without_permission(place: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of each command, run by a user who may read and write nothing there."""
    calls = {command: called(command, place / ("t" if command.startswith(("top", "tail")) else "q")) for command in COMMANDS}
    calls["dump"] = ["dump", str(place / "q.30001")]
    program = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
import qewqew_core.disk.ofd  # portalocker, which is imported late
from commands import CliRunner, app

def run(arguments):
    result = CliRunner().invoke(app, arguments, input=b"", prog_name="qewqew")
    return result.exit_code, result.stdout, result.stderr, repr(result.exception)

calls = json.loads(sys.stdin.read())
for arguments in calls.values():  # to import what they need while it can be read
    run([one.replace(sys.argv[1], "/no/such") for one in arguments])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(json.dumps({command: run(arguments) for command, arguments in calls.items()}))
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, place, Path(__file__).parent],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str, str, str]] = json.loads(done.stdout)
    for command, (_, _, _, exception) in found.items():
        assert exception == "None" or exception.startswith("SystemExit("), (command, exception)
    return {command: (code, output, errors) for command, (code, output, errors, _) in found.items()}


def test_without_permission():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # which every user can reach
        place = Path(name)
        with Queue(place / "q") as q, Topic(place / "t") as t, t.reader("r"):
            q.put(b"x")
            t.append(b"x")
        for path in place.iterdir():
            path.chmod(0)
        place.chmod(0o555)  # also its owner makes no file there: only root would, who has become another
        try:
            for command, (code, output, errors) in without_permission(place).items():
                assert code == 1, (command, code, output, errors)
                assert "ermission" in errors + output, (command, errors)
                assert str(place) in errors + output, (command, errors)
                assert "Traceback" not in errors
        finally:
            place.chmod(0o700)
            (place / "t").chmod(0o700)


# Completion of the shell


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_can_be_shown_and_installed(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr(typer.testing, "_get_command", typer.main.get_command)  # it looks at the variable
    result = run("--show-completion", shell)
    check(result, 0)
    assert f"_QEWQEW_COMPLETE=complete_{shell}" in result.stdout
    check(run("--install-completion", shell), 0)
    assert any("qewqew" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_shell_completes_commands():
    words = {"COMP_WORDS": "qewqew topic rea", "COMP_CWORD": "2", "_QEWQEW_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "qewqew_core"]
    result = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, timeout=300)
    assert sorted(result.stdout.split()) == ["read", "readers"]


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [(["help", "put"], "Usage: qewqew put"), (["help"], "Usage: qewqew"), (["topic", "read", "-h"], "Usage: qewqew topic read")],
)
def test_help_is_found_where_people_look(
    arguments: list[str], shows: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["qewqew", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert shows in capsys.readouterr().out


def test_version_is_a_command_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qewqew", "version"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("qewqew 0.")
