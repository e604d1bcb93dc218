"""The commands for queues and topics alike: they find out by the path which of the two it is, and report in one shape."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from commands import done, refused, run

from qewqew_core import Queue, Topic
from qewqew_core.tools.listing import Kind, kind_of, names_in

KINDS = pytest.mark.parametrize("kind", ["queue", "topic"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "it"


def put(path: Path, kind: str, *arguments: object, stdin: bytes = b"") -> bytes:
    return done("put", path, *["--topic"] * (kind == "topic"), *arguments, stdin=stdin)


def opened(path: Path, kind: str) -> Queue | Topic:
    return Queue(path) if kind == "queue" else Topic(path)


def content(path: Path, kind: str) -> list[bytes]:
    with opened(path, kind) as store:
        return [one if isinstance(one, bytes) else one.body for one in store]


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0xFF
    file.write_bytes(data)


# Which of the two


def test_what_lies_at_a_path_is_told_by_its_files(tmp_path):
    put(tmp_path / "q", "queue", "x")
    put(tmp_path / "t", "topic", "x")
    (tmp_path / "d" / "data").mkdir(parents=True)  # as many directories have it
    (tmp_path / "d" / "data" / "mine.csv").write_text("x")
    assert (kind_of(f"{tmp_path}/q"), kind_of(f"{tmp_path}/t"), kind_of(f"{tmp_path}/t/")) == ("queue", "topic", "topic")
    assert [kind_of(f"{tmp_path}/{name}") for name in ("d", "no", "no/way", "q/below")] == [None] * 4
    assert names_in(str(tmp_path)) == ["q", "t"]
    assert kind_of(str(tmp_path)) is None


@pytest.mark.parametrize("lost", ["q", "q.wal", "q.30001"])
def test_a_queue_of_which_a_file_is_lost_is_one_still(tmp_path, lost):
    put(tmp_path / "q", "queue", "x")
    (tmp_path / lost).unlink()
    assert kind_of(f"{tmp_path}/q") is Kind.QUEUE


@pytest.mark.parametrize("lost", ["t.idx", "t.wal"])
def test_a_topic_of_which_a_file_is_lost_is_one_still_and_can_be_repaired(tmp_path, lost):
    put(tmp_path / "t", "topic", "x", "y")
    (tmp_path / "t" / lost).unlink()
    assert kind_of(f"{tmp_path}/t") is Kind.TOPIC
    assert names_in(str(tmp_path)) == ["t"]
    run("repair", tmp_path / "t", "--yes")
    assert content(tmp_path / "t", "topic") == [b"x", b"y"]


def test_a_relative_path_is_told_too(tmp_path, monkeypatch):
    put(tmp_path / "t", "topic", "x")
    monkeypatch.chdir(tmp_path / "t")
    assert kind_of(".") is Kind.TOPIC
    assert done("peek", ".") == b"x\n"


# One shape


@KINDS
def test_put_and_peek_are_the_same_for_both(path, kind):
    assert json.loads(put(path, kind, "--json", "a", "b")) == {"path": str(path), "kind": kind, "records": 2, "repeated": False}
    assert done("put", path, "c") == b"1 record put\n"  # what is there needs no --topic
    assert done("peek", path) == b"a\n"
    assert done("peek", path, "-n", 9, "-0") == b"a\0b\0c\0"
    assert [json.loads(line)["record"] for line in done("peek", path, "-n", 2, "--json").splitlines()] == ["a", "b"]
    assert content(path, kind) == [b"a", b"b", b"c"]


@KINDS
def test_peek_says_when_there_is_nothing(path, kind):
    with opened(path, kind) as store:
        if kind == "queue":
            store.put(b"x")
            store.get()
        refused(3, "peek", path, match=f"the {kind} is empty")


@KINDS
def test_nobody_is_waited_for_by_who_looks(path, kind):
    with opened(path, kind) as store:
        (store.put if kind == "queue" else store.append)(b"x")
        assert done("peek", path) == done("tail", path) == b"x\n"
        assert json.loads(done("stat", path, "--json"))["owner"] == os.getpid()
        assert done("ls", path).decode().splitlines()[1].split()[:3] == [str(path), kind, "1"]


def test_a_put_into_a_topic_of_nothing_makes_it(path):
    assert put(path, "topic") == b"0 records put\n"
    assert content(path, "topic") == []


def test_ls_has_both_in_one_table(tmp_path, monkeypatch):
    put(tmp_path / "b", "queue", "1", "22")
    put(tmp_path / "a", "topic", "333")
    put(tmp_path / "c", "topic", "4")
    monkeypatch.chdir(tmp_path)
    rows = [line.split()[:3] for line in done("ls").decode().splitlines()]
    assert rows == [["path", "kind", "records"], ["a", "topic", "1"], ["b", "queue", "2"], ["c", "topic", "1"]]
    found = json.loads(done("ls", "--json"))
    assert found[1].keys() < found[0].keys()  # what a queue has is called the same of a topic
    assert [(row["path"], row["kind"], row["records"], row["bytes"]) for row in found] == [
        *(("a", "topic", 1, 3), ("b", "queue", 2, 3), ("c", "topic", 1, 1))
    ]
    assert json.loads(done("stat", "a", "--json")) == {**found[0], "owner": None}
    assert json.loads(done("stat", "b", "--json")) == {**found[1], "owner": None}
    (looked,) = [json.loads(line)["found"] for line in done("top", "--once", "--json").splitlines()]
    assert {row["path"]: row for row in looked} == {row["path"]: row | {"per_second": None} for row in found}


@KINDS
def test_verify_and_repair_report_in_one_shape(path, kind):
    put(path, kind, "one", "two", "three")
    assert done("verify", path) == b"no problems: 3 correct records (1 file, 0 batches, 11 B)\n"
    found = {"path": str(path), "kind": kind, "ok": True, "records": 3, "bytes": 11, "files": 1, "batches": 0}
    assert json.loads(done("verify", path, "--json")) == found | {"unchecked": 0, "orphans": [], "problems": [], "strange": {}}
    whole = f"the {kind} holds 3 records and 0 batches"
    assert done("repair", path, "--yes").decode() == f"nothing to repair: {whole}\n"
    log = (path.parent if kind == "queue" else path) / "it.wal"
    flip(log, 40)
    assert run("verify", path).exit_code == 5
    refused(5, "put", path, "x", match=" repair")
    result = run("repair", path, "--yes")
    assert result.exit_code == 5
    damage, aside, mended = [line for line in result.stdout.splitlines() if not line.startswith("note: ")]
    assert damage.startswith(f"damage: {log}, offset ")
    assert Path(aside.removeprefix("set aside: ")).is_dir()
    assert mended.startswith(f"repaired: the {kind} holds ")
    again = json.loads(done("repair", path, "--yes", "--json"))
    assert list(again) == ["path", "kind", "ok", "records", "batches", "damage", "notes", "set_aside", "strange"]
    assert (again["kind"], again["records"], again["ok"]) == (kind, len(content(path, kind)), True)


@KINDS
def test_a_directory_that_is_neither_is_named_by_every_command(tmp_path, kind):
    (tmp_path / "mine").mkdir()
    for command in ("stat", "verify", "peek", "tail", "export", "batches"):
        refused(1, command, tmp_path / "mine", match=f"BadPath: {tmp_path / 'mine'}: this is a directory but not a topic")
    refused(1, "put", tmp_path / "mine", "x", match="--topic to create one")
    put(tmp_path / "mine", "topic", "x")
    assert content(tmp_path / "mine", "topic") == [b"x"]


# The wrong one of the two


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (["get"], "use `qewqew topic read` for a topic"),
        (["replay", "PATH", "key"], "move a reader back with `qewqew topic readers seek`"),
        (["orphans", "list"], "only queues have orphans"),
        (["orphans", "adopt", "PATH", "file"], "only queues have orphans"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_topic_where_a_queue_is_needed(path, command, instead):
    put(path, "topic", "x")
    arguments = [path if one == "PATH" else one for one in (command if "PATH" in command else [*command, "PATH"])]
    refused(1, *arguments, match=f"BadPath: {path}: this is a topic, but the command needs a queue: ")
    assert instead in run(*arguments).stderr


@pytest.mark.parametrize(
    "command",
    [["read", "-r", "a"], ["trim", "--max-records", "1"], ["readers", "list"], ["readers", "seek", "--latest"]],
    ids=" ".join,
)
def test_a_queue_where_a_topic_is_needed(path, command):
    put(path, "queue", "x")
    more = ["a"] if command[1] == "seek" else []
    refused(
        1,
        "topic",
        *command,
        path,
        *more,
        match=f"BadPath: {path}: this is a queue, but the command needs a topic: a queue has no readers",
    )
    assert content(path, "queue") == [b"x"]


def test_a_topic_is_not_made_where_a_queue_is(path):
    put(path, "queue", "x")
    for command in (["put", path, "--topic", "y"], ["topic", "readers", "add", path, "r"], ["import", path, "-", "--topic"]):
        refused(1, *command, match=f"BadPath: {path}: this is a queue", stdin=b'{"record": "y"}\n')
    assert content(path, "queue") == [b"x"]


@pytest.mark.parametrize(
    ("kind", "command", "option"),
    [
        *(("queue", ["put", "x"], option) for option in (["--tag", "a"], ["--id", "a"], ["--block-size", 9], ["--dialect", "B"])),
        *(("topic", ["put", "x"], option) for option in (["--chunk-size", 99], ["--max-records", 9], ["--max-bytes", 9])),
        *(("queue", [command], ["--filter", "a"]) for command in ("peek", "tail")),
        *(("queue", [command], ["--dialect", "B"]) for command in ("verify", "repair")),
        *(("queue", [command], ["--reader", "a"]) for command in ("batches",)),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value[0]),
)
def test_an_option_that_only_the_other_has_is_wrong_usage(path, kind, command, option):
    put(path, kind, "1")
    other = {"queue": "topic", "topic": "queue"}[kind]
    message = f"BadArgument: {path}: this is a {kind}, and {option[0]} is only for a {other}"
    refused(2, command[0], path, *command[1:], *option, match=message)
    assert content(path, kind) == [b"1"]


def test_batches_of_a_topic_are_those_of_a_reader_that_must_be_named(path):
    with Topic(path) as t, t.reader("etl"):
        t.append(b"x")
    for command in (["batches", path], ["ack", path, "id"], ["dead", "list", path]):
        refused(2, *command, match="choose one of its readers with --reader. It has etl")


# The lock


@KINDS
@pytest.mark.parametrize("more", [[], ["--key", "k"]], ids=["commits", "key"])
@pytest.mark.parametrize("command", ["put", "import"])
def test_nothing_is_locked_while_the_input_is_read(path, kind, command, more):
    put(path, kind, "before")
    whole = command == "import" or bool(more)
    call = [sys.executable, "-m", "qewqew_core", command, str(path), *(["-"] if command == "import" else ["--batch-size", "2"])]
    process = subprocess.Popen([*call, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    line = b'{"record": "%d"}\n' if command == "import" else b"%d\n"
    process.stdin.write(b"".join(line % number for number in range(3)))
    process.stdin.flush()
    read = lambda: fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)) == bytes(4)  # noqa: E731
    end = time.monotonic() + 60
    while not (read() and len(content(path, kind)) == (1 if whole else 3)):
        assert time.monotonic() < end
        time.sleep(0.01)
    with opened(path, kind) as store:  # with the lock, of a topic that of its writer
        store.put(b"meanwhile") if kind == "queue" else store.append(b"meanwhile")
    output, _ = process.communicate(line % 3, timeout=60)
    assert process.returncode == 0
    assert output == (b"4 records imported\n" if command == "import" else b"4 records put\n")
    expected = [b"meanwhile", b"0", b"1", b"2", b"3"] if whole else [b"0", b"1", b"meanwhile", b"2", b"3"]
    assert content(path, kind) == [b"before", *expected]


@KINDS
def test_more_than_fits_into_memory_is_one_commit(path, kind, monkeypatch):
    from qewqew_core.limits import LIMITS

    monkeypatch.setattr(LIMITS, "spill_bytes", 5000)
    monkeypatch.setattr(LIMITS, "topic_spill_bytes", 5000)
    records = [b"%06d" % number for number in range(5000)]
    for _ in range(2):
        put(path, kind, "--key", "once", stdin=b"\n".join(records))
        assert content(path, kind) == records
    assert b"nothing to do: 5,000 records put under this key before" in done("put", path, "--key", "once", stdin=b"x")
