"""The command line as a process: pipes that close, signals, a queue that others use, and the examples of docs/cli.md."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from qewqew_core import Queue, inspect

ROOT = Path(__file__).parents[3]
QEWQEW = [sys.executable, "-m", "qewqew_core"]
RECORDS = [b"%06d " % number + b"x" * 93 for number in range(10_000)]  # together more than any pipe holds
TIMEOUT = 300


def start(*arguments: object, **options) -> subprocess.Popen[bytes]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | options
    return subprocess.Popen([*QEWQEW, *map(str, arguments)], **pipes)


def run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*QEWQEW, *map(str, arguments)], input=stdin, capture_output=True, timeout=TIMEOUT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "orders.qew"


@pytest.fixture
def full(path):
    with Queue(path) as q:
        q.put_many(RECORDS)
    return path


def content(path: Path) -> list[bytes]:
    with Queue(path) as q:
        return list(q)


def until(condition) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_pipe(process: subprocess.Popen[bytes]) -> int:
    """Bytes that it has written and nobody has read."""
    return int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)


def on_terminal(*arguments: object) -> tuple[int, str]:
    """Exit code, and what a terminal of 80 columns gets."""
    terminal, other = os.openpty()
    process = start(*arguments, stdin=other, stdout=other, stderr=other, env=os.environ | {"COLUMNS": "80", "TERM": "xterm"})
    os.close(other)
    shown = b""
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as file:  # EIO: the process has ended
        while data := file.read(10_000):
            shown += data
    return process.wait(TIMEOUT), shown.decode()


@pytest.mark.quick("records go through pipes of the command line unchanged")
def test_records_go_through_pipes_unchanged(path):
    records = [b"", b"\xff\xfe", b"\r", "grün".encode(), b"x" * 65_535]
    assert run("put", path, stdin=b"".join(one + b"\n" for one in records)).stdout == b"5 records put\n"
    result = run("get", path, "--all")
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"".join(one + b"\n" for one in records)
    result = run("get", path)
    assert (result.returncode, result.stdout) == (3, b"")
    assert b"Empty" in result.stderr


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_reader_that_is_not_there_takes_nothing(full, output):
    process = start("get", full, "--all", *output)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(TIMEOUT) == 141
    assert content(full) == RECORDS


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["peek", "-n", "9999"], ["verify"]], ids=" ".join)
def test_no_command_complains_about_a_closed_pipe(full, command):
    process = start(*command, *([full.parent] if command == ["ls"] else [full]))
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(TIMEOUT) == 141


def test_what_the_reader_of_a_pipe_did_not_want_is_still_there(full):
    command = f'"{sys.executable}" -m qewqew_core get "{full}" --all | head -n 1'
    assert subprocess.run(["sh", "-c", command], capture_output=True, timeout=TIMEOUT).stdout == RECORDS[0] + b"\n"
    left = content(full)
    assert left == RECORDS[-len(left) :]
    assert len(left) >= 9000  # one commit at most went into the pipe


def test_an_output_that_is_full_takes_nothing(full):
    with open("/dev/full", "wb") as device:
        process = start("get", full, "--all", stdout=device)
        assert b"No space left on device" in process.stderr.read()
    assert process.wait(TIMEOUT) == 1
    assert content(full) == RECORDS


def test_streams_may_be_closed(full):
    def shell(command: str) -> tuple[int, bytes]:
        command = command.replace("qewqew", f'"{sys.executable}" -m qewqew_core').replace("QUEUE", f'"{full}"')
        result = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT)
        return result.returncode, result.stdout

    assert shell("exec qewqew put QUEUE <&-") == (0, b"0 records put\n")
    assert shell("exec qewqew get QUEUE <&- 2>&-") == (0, RECORDS[0] + b"\n")
    assert shell("exec qewqew get QUEUE >&-") == (1, b"qewqew: standard output is closed\n")
    assert content(full) == RECORDS[1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_get_that_is_stopped_loses_nothing(full, number):
    process = start("get", full, "--all", bufsize=0)
    printed = b""
    while len(printed) < 150_000:
        printed += process.stdout.read(10_000)
    before = -1
    while in_pipe(process) != before:  # until it waits for us
        before = in_pipe(process)
        time.sleep(0.2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert errors == (b"qewqew: interrupted; what was not yet committed has no effect\n" if number == signal.SIGINT else b"")
    printed += output
    left = content(full)
    assert left == RECORDS[-len(left) :]
    whole = printed.split(b"\n")[:-1]
    assert whole == RECORDS[: len(whole)]
    assert 0 <= len(whole) + len(left) - len(RECORDS) < 1000  # none is lost; those of one commit may come again


def test_a_put_that_is_interrupted_keeps_what_was_committed(path):
    process = start("put", path, "--batch-size", 1000)
    process.stdin.write(b"\n".join(RECORDS[:2500]) + b"\n")
    process.stdin.flush()
    until(lambda: inspect(path).records == 2000)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    # Who looks sees a commit before the put that makes it has come back.
    assert re.fullmatch(
        r"qewqew: [12],000 records put before that; they stay\n"
        r"qewqew: interrupted; what was not yet committed has no effect\n",
        errors.decode(),
    )
    assert content(path) == RECORDS[:2000]


def test_signals_never_cut_a_commit_in_two(tmp_path):
    lines = b"\n".join(RECORDS) + b"\n"
    lines = lines[: lines.rindex(b"\n", 0, 60_000) + 1]  # what a pipe holds: nothing waits until nearly all of it is put
    for number in range(12):
        path = tmp_path / f"{number}"
        process = start("put", path, "--batch-size", 10, stdin=subprocess.PIPE)
        process.stdin.write(lines)
        until(lambda path=path: inspect(path).records > 0)
        time.sleep(number / 200)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        with Queue(path) as q:
            assert q.verify().ok
            left = list(q)
        assert left == RECORDS[: len(left)]
        assert len(left) % 10 == 0
        assert left


def test_get_that_waits_leaves_the_queue_to_those_who_put(path):
    process = start("get", path, "--timeout", TIMEOUT)
    time.sleep(0.5)
    assert process.poll() is None
    assert run("put", path, "--lock-timeout", 5, "x").returncode == 0
    output, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, output, errors) == (0, b"x\n", b"")


def test_who_has_the_queue_is_told_and_looking_goes_on(full):
    with Queue(full):
        result = run("get", full, "--lock-timeout", "0")
        assert result.returncode == 4
        assert f"process {os.getpid()} has the queue open" in result.stderr.decode()
        assert run("stat", full).returncode == run("ls", full.parent).returncode == 0


def test_questions_are_asked_on_a_terminal(path):
    with Queue(path) as q:
        q.put(b"x")
        batch = q.lease("run")
        batch.to_dead_letters()
    for answer, code, left in ((b"n\n", 1, 1), (b"y\n", 0, 0)):
        terminal, other = os.openpty()
        process = start("dead", "drop", path, batch.id, stdin=other)
        os.write(terminal, answer)
        output, errors = process.communicate(timeout=TIMEOUT)
        os.close(other)
        os.close(terminal)
        assert process.returncode == code, errors
        assert b"Permanently delete 1 record of batch" in errors
        assert b"Delete" not in output
        assert inspect(path).dead == left


def test_long_work_shows_its_progress_on_a_terminal_and_short_work_does_not(path, tmp_path):
    file = tmp_path / "input"
    file.write_bytes(b"".join(b"x" * 999 + b"\n" for _ in range(6000)))
    code, shown = on_terminal("put", path, "-f", file)
    assert code == 0
    assert "putting" in shown
    assert shown.endswith("6,000 records put\r\n")
    code, shown = on_terminal("verify", path)
    assert code == 0
    assert "verifying" in shown
    file.write_bytes(b"x\n")
    assert "putting" not in on_terminal("put", path, "-f", file)[1]
    assert "repairing" in on_terminal("repair", path, "--yes")[1]
    with Queue(path) as q:
        q.lease("a key that is rather long " * 5)
    code, shown = on_terminal("batches", path)
    assert code == 0
    assert "…" not in shown
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert max(map(len, text.splitlines())) <= 80


# The examples of docs/cli.md: their output is compared, with … for what differs from run to run.

EXAMPLES = re.findall(r"^```(console|python)\n(.*?)^```$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_documentation_print_what_they_say(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "qewqew").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qewqew_core "$@"\n')
    (tools / "qewqew").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def output(command: list[str]) -> str:
        result = subprocess.run(
            command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
        )
        return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())

    assert len(EXAMPLES) > 5
    for kind, text in EXAMPLES:
        if kind == "python":
            assert output([sys.executable, "-c", text]) == ""
            continue
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            pattern = re.escape(expected).replace("…", ".*")
            found = output(["sh", "-c", command])
            assert re.fullmatch(pattern, found), f"{command}\n{found}\nis not\n{expected}"
