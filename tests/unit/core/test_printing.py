"""What the commands print of foreign names, reasons and records: nothing in it acts on a terminal, and JSON says the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import run

from qewqew_core import Message, Queue, Topic
from qewqew_core.cli.cli_monitoring import _replace
from qewqew_core.tools.printing import json_text, visible

# Terminal commands of one byte and of two, delete, line ends, directions of writing, what has no width, a tag, an invalid byte.
ACTING = "\x1b]0;owned\x07 \x9b2J \x7f \x85 \u2028 \u202e \u200b \U000e0041 \udc9b"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    text = ACTING.encode(errors="surrogateescape")
    with Queue(tmp_path / f"q{ACTING}", max_attempts=1) as q:
        q.put_many([text] * 6)
        q.lease("acked", max_records=1).ack()
        q.lease("dead", max_records=1).nack(f"reason {visible(ACTING[:-1])} {ACTING[:-1]}")
        q.lease("leased", max_records=1)
    with Queue(tmp_path / "q") as q:
        q.put_many([text, ACTING[:-1].encode()])
    with Topic(tmp_path / "t") as topic:
        topic.append_many([Message(ACTING[:-1].encode(), "\x1b\u202e", "\x1b\x9b")] * 3)
        topic.reader("r").close()
    (tmp_path / f"bad{ACTING}").write_bytes(b"\0\0\1")
    (tmp_path / f"bad{ACTING}.wal").write_bytes(b"QEWQWAL1garbage")
    return tmp_path


COMMANDS = [
    "ls {}", "ls {} --json", "top --once {}", "top --once {} --json", "metrics {}", "check {}", "check {} --json",
    "check {} --max-records 0", "stat {}/q!", "stat {}/q! --json", "peek {}/q --json", "get {}/q --json", "peek {}/t --json",
    "export {}/q", "export {}/t", "batches {}/q!", "batches {}/q! --json", "dead list {}/q!", "dead list {}/q! --json",
    "topic stat {}/t", "topic readers {}/t", "verify {}/q!", "verify {}/bad!", "verify {}/bad! --json", "repair {}/bad! --yes",
    "dump {}/q!.wal", "dump {}/q!.wal --json", "dump {}/q!.30000 --json", "dump {}/bad!.wal", "get {}/none!", "nack {}/q none!",
    "orphans list {}/q!", "key-status {}/q! key", "put {}/q!/under x", "nosuch! {}",
    "put --x! {}", "--x! ls {}", "ls --lock!=! {}", "get {}/q --lock-timeout=! ", "stat {}/q ! more!", "--group ! ls {}",
    "put {}/q -n!", "topic no! {}", "lease {}/q --max-records !",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_acts_on_a_terminal(place: Path, command: str) -> None:
    arguments = [word.format(place).replace("!", ACTING) for word in command.split()]
    result = run(*arguments)
    printed = (result.stdout_bytes + result.stderr_bytes).decode()
    assert [letter for letter in printed if not letter.isprintable() and letter != "\n"] == []
    assert printed


def test_json_says_the_same(place: Path) -> None:
    (row,) = (
        row for row in json.loads(run("ls", place, "--json").stdout) if row["path"].endswith(ACTING) and row["kind"] == "queue"
    )
    assert Path(row["path"]) == place / f"q{ACTING}"
    lines = run("peek", place / "q", "--json", "-n", "2").stdout.splitlines()
    assert json.loads(lines[1])["record"] == ACTING[:-1]


@pytest.mark.parametrize("value", [ACTING, {"ä": ["日本", "😀", '"\\\n\t']}, 1.5, None])
def test_the_escapes_of_json_mean_the_same_value(value: object) -> None:
    assert json.loads(json_text(value)) == value
    assert json_text(value).isprintable()


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_the_file_for_the_collector_is_written_through_nothing_that_others_put_there(tmp_path: Path, planted: str) -> None:
    precious, file = tmp_path / "precious", tmp_path / "q.prom"
    precious.write_text("precious")
    for name in (f"q.prom.{os.getpid()}.tmp", "q.prom"):
        if planted == "link":
            (tmp_path / name).symlink_to(precious)
        else:
            os.mkfifo(tmp_path / name)
    if planted == "pipe":
        with pytest.raises(NotADirectoryError, match="not a regular file"):  # it may be a device, which root would replace
            _replace(str(file), b"new")
        file.unlink()
        file.touch()
    _replace(str(file), b"new")
    assert (file.read_bytes(), file.is_symlink(), file.stat().st_mode & 0o777) == (b"new", False, 0o644)
    assert precious.read_text() == "precious"
    assert len([*tmp_path.glob("q.prom*")]) == 2


def test_no_usage_error_repeats_a_secret(tmp_path: Path) -> None:
    for arguments in (["check", tmp_path, "--max-age", "postgresql://u:Zq8vXk3p@h/db"], ["s3://AK:Zq8vXk3p@b/k"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Zq8vXk3p" not in result.stdout + result.stderr


def test_no_reason_keeps_a_secret(tmp_path: Path) -> None:
    for end in "nack", "to_dead_letters":
        with Queue(tmp_path / end) as queue:
            queue.put(b"x")
            batch = queue.lease("k")
            assert batch is not None
            getattr(batch, end)("failed: postgresql://u:Zq8vXk3p@h/db, password='Zq8vXk3p'" + " and more" * 200)
            assert batch.reason.startswith("failed: postgresql://u:…@h/db, password=")
        assert not any(b"Zq8vXk3p" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
