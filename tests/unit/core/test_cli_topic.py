"""``qewqew topic``, and the commands for batches with ``--reader``: what they print, and their exit codes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import done, refused, run
from zbus_cases import forget_log

from qewqew_core import Corrupt, DiskFull, Message, Topic, TopicSession, inspect_reader
from qewqew_core.formats import zbus

BODIES = [b"first", b"", b"\xff\x00\xfe", "grün".encode(), b"a\nb", b"last"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events"


def fill(path: Path, messages: list[bytes | Message], **settings) -> None:
    with Topic(path, **settings) as t:
        t.append_many(messages)


def content(path: Path) -> list[bytes]:
    with Topic(path) as t:
        return [one.body for one in t]


def lag(path: Path, name: str) -> int:
    with Topic(path) as t:
        return t.stats().readers[name]


def lease(path: Path, key: str, **options) -> str:
    with Topic(path) as t, t.reader("etl") as r:
        batch = r.lease(key, **options)
        assert batch is not None
        return batch.id


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


# append


def test_append_takes_bodies_from_the_arguments_and_gives_all_the_same_tag_and_id(path):
    assert done("put", path, "--topic", "--tag", "order.new", "--id", "7", "one", "", os.fsdecode(b"\xff")) == (
        b"3 records put\n"
    )
    with Topic(path) as t:
        assert [(one.body, one.tag, one.id) for one in t] == [(body, "order.new", "7") for body in (b"one", b"", b"\xff")]


@pytest.mark.parametrize(
    ("data", "options", "bodies"),
    [
        (b"", [], []),
        (b"a\n\nb", ["--lines"], [b"a", b"", b"b"]),
        (b"a\nb\0\0c", ["--null"], [b"a\nb", b"", b"c"]),
        (b"a\nb\n", ["--whole"], [b"a\nb\n"]),
        (b"x" * 100_000 + b"\ny", [], [b"x" * 100_000, b"y"]),  # a queue would refuse it
    ],
    ids=["nothing", "lines", "null", "whole", "large"],
)
def test_append_splits_its_input_as_put_does(path, tmp_path, data, options, bodies):
    file = tmp_path / "input"
    file.write_bytes(data)
    done("put", path, "--topic", *options, "-f", file)
    done("put", path, "--topic", *options, stdin=data)
    assert content(path) == bodies * 2


def test_append_with_a_key_is_one_commit_that_happens_once(path):
    lines = b"\n".join(b"%d" % number for number in range(2500))
    assert done("put", path, "--topic", "--key", "k", stdin=lines) == b"2,500 records put\n"
    assert done("put", path, "--topic", "--key", "k", stdin=lines) == (
        b"nothing to do: 2,500 records put under this key before\n"
    )
    assert json.loads(done("put", path, "--topic", "--key", "k", "--json", stdin=lines)) == {
        "path": str(path),
        "kind": "topic",
        "records": 2500,
        "repeated": True,
    }
    assert len(content(path)) == 2500


def test_append_says_what_was_stored_before_an_error(path, monkeypatch):
    commit = TopicSession.commit

    def until_the_disk_is_full(session: TopicSession, key: str | None) -> int:
        if len(content(path)) == 4:
            raise DiskFull("no room", path=path)
        return commit(session, key)

    monkeypatch.setattr(TopicSession, "commit", until_the_disk_is_full)
    result = refused(6, "put", path, "--topic", "--batch-size", 2, match="DiskFull", stdin=b"1\n2\n3\n4\n5\n")
    assert "4 records put before that; they stay" in result.stderr
    assert content(path) == [b"1", b"2", b"3", b"4"]


def test_a_tag_that_does_not_fit_is_refused_and_nothing_is_stored(path):
    assert refused(2, "put", path, "--topic", "--tag", "x" * 128, "a", match="BadArgument: tag has 128 bytes").stdout == ""
    assert content(path) == []


def test_append_takes_the_settings_of_a_topic(path):
    done("put", path, "--topic", "--block-size", 1, "--batch-size", 1, "--dialect", "C", "a", "b", "c")
    with Topic(path) as t:
        assert (t.stats().blocks, t.dialect) == (3, "C")


# read and peek


def test_read_passes_what_it_printed_and_each_reader_has_its_own_place(path):
    fill(path, [b"1", b"2", b"3", b"4"])
    assert done("topic", "read", path, "-r", "a") == b"1\n"
    assert done("topic", "read", path, "-r", "a", "-n", 2) == b"2\n3\n"
    assert done("topic", "read", path, "--reader", "b", "--all") == b"1\n2\n3\n4\n"
    assert done("topic", "read", path, "-r", "a", "-n", 9) == b"4\n"
    refused(3, "topic", "read", path, "-r", "a", match="no message waits for this reader")
    assert content(path) == [b"1", b"2", b"3", b"4"]


def test_read_all_takes_more_than_one_commit_holds(path):
    bodies = [b"%d" % number for number in range(2500)]
    fill(path, bodies)
    assert done("topic", "read", path, "-r", "a", "--all").splitlines() == bodies
    assert lag(path, "a") == 0


def test_read_without_commit_leaves_the_messages_to_the_reader(path):
    fill(path, BODIES)
    for _ in range(2):
        assert done("topic", "read", path, "-r", "a", "--all", "--no-commit", "-0") == b"".join(one + b"\0" for one in BODIES)
    assert lag(path, "a") == len(BODIES)


def test_a_filter_is_the_readers_from_then_on(path):
    fill(path, [Message(b"1", "order.new"), Message(b"2", "invoice"), Message(b"3", "order.paid"), Message(b"4", "order.new")])
    assert done("topic", "read", path, "-r", "a", "--filter", "order.*") == b"1\n"
    assert done("topic", "read", path, "-r", "a", "--all") == b"3\n4\n"
    assert done("topic", "readers", "filter", path, "a", "invoice.#;order.new") == (
        b"a delivers messages that match invoice.#;order.new\n"
    )
    done("topic", "readers", "seek", path, "a", "--oldest")
    assert done("topic", "read", path, "-r", "a", "--all") == b"1\n2\n4\n"
    assert done("topic", "readers", "filter", path, "a", "") == b"a delivers all messages\n"


def test_json_holds_any_message_and_what_is_known_of_it(path):
    fill(path, [Message(body, f"tag.{number}", str(number), 0, 1000 + number) for number, body in enumerate(BODIES)])
    for command in (["peek"], ["topic", "read", "-r", "a"]):
        found = [json.loads(line) for line in done(*command, path, "-n", 100, "--json").splitlines()]
        bodies = [one["record"].encode() if "record" in one else base64.b64decode(one["base64"], validate=True) for one in found]
        assert bodies == BODIES
        assert list(found[0]) == ["number", "tag", "id", "timestamp", "attempt", "record"]
        assert list(found[2]) == ["number", "tag", "id", "timestamp", "attempt", "base64"]
        assert [(one["number"], one["tag"], one["id"], one["attempt"]) for one in found] == [
            (number, f"tag.{number}", str(number), 1) for number in range(len(BODIES))
        ]
        assert found[1]["timestamp"] == "1970-01-01T00:00:01.001Z"


def test_peek_moves_no_reader_and_makes_none(path):
    fill(path, [Message(b"1", "a"), Message(b"2", "b"), b"3"])
    assert done("peek", path) == b"1\n"
    assert done("peek", path, "-n", 9) == b"1\n2\n3\n"
    assert done("peek", path, "-n", 9, "--filter", "b") == b"2\n"
    refused(3, "peek", path, "--filter", "c", match="no message matches")
    with Topic(path) as t:
        assert t.readers() == []


def test_read_waits_for_the_first_message_and_no_longer(path):
    fill(path, [])
    began = time.monotonic()
    refused(3, "topic", "read", path, "-r", "a", "--timeout", 0.3, match="no message waits")
    assert 0.3 <= time.monotonic() - began < 60


def test_what_could_not_be_written_was_not_passed(path):
    fill(path, BODIES)
    with open("/dev/full", "wb") as device:
        command = [sys.executable, "-m", "qewqew_core", "topic", "read", path, "-r", "a", "--all"]
        result = subprocess.run(command, stdout=device, stderr=subprocess.PIPE, timeout=300)
    assert (result.returncode, b"No space left on device" in result.stderr) == (1, True)
    assert lag(path, "a") == len(BODIES)
    assert done("topic", "read", path, "-r", "a", "--all", "-0") == b"".join(one + b"\0" for one in BODIES)


def test_read_goes_on_while_somebody_else_appends(path):
    with Topic(path) as t:
        t.append(b"x")
        assert done("topic", "read", path, "-r", "a") == b"x\n"
        refused(4, "put", path, "--topic", "--lock-timeout", 0, "y", match="Locked")
        assert json.loads(done("stat", path, "--json"))["owner"] == os.getpid()


def test_a_new_reader_begins_where_it_is_told(path):
    times = [datetime(2025, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    fill(path, [Message(b"%d" % day, timestamp=int(one.timestamp() * 1000)) for day, one in enumerate(times, 1)])
    for start, expected in (
        ("2", b"3\n"),
        ("oldest", b"1\n"),
        ("2025-01-01T12:00:00", b"2\n"),
        ("2025-01-03T01:00:00+02:00", b"3\n"),
    ):
        assert done("topic", "read", path, "-r", f"r{start.replace(':', '')}", "--start", start) == expected
    refused(3, "topic", "read", path, "-r", "new", "--start", "latest", match="no message waits")


# Looking


def test_ls_finds_the_topics_of_a_directory_and_nothing_else(tmp_path, monkeypatch):
    fill(tmp_path / "a", [b"1", b"22"])
    fill(tmp_path / "b", [b"x"])
    with Topic(tmp_path / "a") as t, t.reader("r"):
        pass
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("x")
    rows = json.loads(done("ls", tmp_path, "--json"))
    assert [(Path(row["path"]).name, row["kind"], row["records"], row["bytes"], row["lag"]) for row in rows] == [
        *(("a", "topic", 2, 3, 2), ("b", "topic", 1, 1, None))
    ]
    monkeypatch.chdir(tmp_path)
    lines = done("ls", "b", ".").decode().splitlines()
    assert [line.split()[0::2][:2] for line in lines] == [["path", "records"], ["b", "1"], ["a", "2"], ["b", "1"]]
    assert run("ls", "directory").stderr.startswith("qewqew: no queues or topics here")


def test_ls_shows_what_cannot_be_read_and_goes_on(tmp_path):
    fill(tmp_path / "a", [b"1"])
    fill(tmp_path / "b", [b"1"])
    (tmp_path / "a" / "a.idx").write_bytes(b"x" * 100)
    result = run("ls", tmp_path, tmp_path / "no")
    assert result.exit_code == 5
    assert "Corrupt" in result.stdout
    assert "there is no queue or topic here" in result.stdout
    assert [line.split()[1:3] for line in result.stdout.splitlines()] == [
        *(["kind", "records"], ["topic", "?"], ["topic", "1"], ["?", "?"])
    ]


def test_stat_shows_the_topic_and_its_readers(path):
    fill(path, [Message(b"one", "a"), Message(b"three", "b")], block_size=1)
    fill(path, [b""], block_size=1)
    done("topic", "read", path, "-r", "slow", "--filter", "a;b")
    lease(path, "run", max_records=1)
    found = json.loads(done("stat", path, "--json"))
    assert list(found) == [
        *("path", "kind", "records", "bytes", "oldest", "leased", "returned", "dead", "on_disk", "last_lease", "oldest_lease"),
        "clock_step",
        "delayed",
        "next_due",
        "missing",
        *("files", "newest", "first", "next", "lag", "readers", "owner"),
    ]
    assert [found[key] for key in ("records", "bytes", "files", "first", "next", "lag", "owner")] == [3, 8, 2, 0, 3, 3, None]
    assert [found[key] for key in ("leased", "returned", "dead")] == [1, 0, 0]
    assert found["on_disk"] > 0
    age = datetime.now().astimezone() - datetime.fromisoformat(found["oldest"])
    assert timedelta(0) <= age < timedelta(minutes=5)
    zeros = {"in_flight": 0, "lost": 0, "returned": 0, "dead": 0}
    assert found["readers"] == [
        {"reader": "etl", "filter": None, "lag": 3, "leased": 1} | zeros,
        {"reader": "slow", "filter": "a;b", "lag": 2, "leased": 0} | zeros,
    ]
    assert json.loads(done("topic", "readers", "list", path, "--json")) == found["readers"]
    lines = done("stat", path).decode().splitlines()
    assert lines[1] == "records    3 (0 to 2)"
    assert [line.split() for line in lines[-3:]] == [
        ["reader", "filter", "lag", "in", "flight", "lost", "leased", "returned", "dead"],
        ["etl", "3", "0", "0", "1", "0", "0"],
        ["slow", "a;b", "2", "0", "0", "0", "0", "0"],
    ]
    assert done("topic", "readers", "list", path).decode().splitlines() == lines[-3:]


def test_stat_and_readers_say_when_there_is_nothing(path):
    fill(path, [])
    assert b"records    0\n" in done("stat", path)
    assert "the topic has no readers" in run("topic", "readers", "list", path).stderr
    assert done("topic", "readers", "list", path, "--json") == b"[]\n"


def test_verify_reports_what_it_read(path):
    fill(path, [b"one", b"two", b"three"])
    lease(path, "run", max_records=1)
    assert done("verify", path) == b"no problems: 3 correct records (1 file, 1 batch, 11 B)\n"
    found = json.loads(done("verify", path, "--json"))
    assert [found[key] for key in ("path", "ok", "records", "bytes", "files", "batches", "problems")] == [
        *(str(path), True, 3, 11, 1, 1, [])
    ]


def test_verify_says_what_nobody_kept_a_checksum_of(path):
    fill(path, [b"one", b"two"])
    forget_log(path)
    assert done("verify", path).decode().splitlines() == [
        "no problems: 2 correct records (1 file, 0 batches, 6 B)",
        "414 B have no checksum: a zbus server wrote them, or the log with the checksum was lost",
    ]


@pytest.mark.parametrize("what", ["block", "log"])
def test_verify_finds_damage(path, what):
    fill(path, [b"one", b"two"])
    file = path / "events.wal" if what == "log" else path / "data" / f"{0:020d}.zbus"
    damage(file, 40 if what == "log" else 205)
    result = refused(5, "verify", path, match=f"`qewqew repair {path}` rescues what can be read")
    assert result.stdout.startswith(f"damage: {file}, offset ")
    assert "1 problem: " in result.stdout
    found = json.loads(refused(5, "verify", path, "--json", match="qewqew repair").stdout)
    assert (found["ok"], len(found["problems"])) == (False, 1)


def test_repair_mends_what_verify_found_and_asks_first(path):
    fill(path, [b"one", b"two"])
    damage(path / "events.wal", 40)
    refused(5, "put", path, "--topic", "x", match="`qewqew verify` lists all damage, `qewqew repair` rescues")
    refused(2, "repair", path, match="--yes")
    result = run("repair", path, "--yes")
    assert result.exit_code == 5
    damaged, forgotten, aside, mended = result.stdout.splitlines()
    assert damaged.startswith(f"damage: {path / 'events.wal'}, offset ")
    assert Path(aside.removeprefix("set aside: ")).is_dir()
    assert "no key of an append is known any more" in forgotten
    assert mended == "repaired: the topic holds 2 records and 0 batches"
    assert content(path) == [b"one", b"two"]
    assert done("repair", path, "-y") == b"nothing to repair: the topic holds 2 records and 0 batches\n"
    assert json.loads(done("repair", path, "-y", "--json"))["ok"] is True


# trim


def test_trim_removes_what_it_is_told_to_and_nothing_that_a_reader_still_has_to_get(path):
    for number in range(5):
        fill(path, [b"%d" % number], block_size=1)
    done("topic", "read", path, "-r", "a", "-n", 2)
    refused(2, "topic", "trim", path, match="--max-age")
    refused(2, "topic", "trim", path, "--max-age", 0, match="above 0")
    assert done("topic", "trim", path, "--max-age", 3600) == b"0 records removed, 5 left\n"
    assert done("topic", "trim", path, "--delete-committed") == b"2 records removed, 3 left\n"
    assert done("topic", "trim", path, "--max-records", 1) == b"0 records removed, 3 left\n"
    assert json.loads(done("topic", "trim", path, "--max-bytes", 1, "--slow-readers", "move", "--json")) == {
        "path": str(path),
        "removed": 2,
        "records": 1,
    }
    assert done("topic", "read", path, "-r", "a") == b"4\n"
    assert json.loads(done("topic", "readers", "list", path, "--json"))[0]["lost"] == 2


# Readers


def test_readers_are_added_copied_moved_and_deleted(path):
    assert done("topic", "readers", "add", path, "a", "--filter", "x.#") == b"a begins at message 0\n"
    fill(path, [Message(b"%d" % number, "x.y", timestamp=1000 * number) for number in range(5)])
    refused(2, "topic", "readers", "add", path, "a", match="there is a reader a already")
    done("topic", "read", path, "-r", "a", "-n", 2)
    assert done("topic", "readers", "copy", path, "a", "b") == b"b is now at message 2\n"
    for where, number in (
        *((["--number", 4], 4), (["--offset", 0], 0), (["--oldest"], 0), (["--latest"], 5)),
        (["--time", "1970-01-01T00:00:03"], 3),
    ):
        assert done("topic", "readers", "seek", path, "b", *where) == f"b is now at message {number}\n".encode()
    refused(2, "topic", "readers", "seek", path, "b", "--number", 9, match="there is no message 9")
    refused(2, "topic", "readers", "seek", path, "b", "--oldest", "--latest", match="say where to")
    refused(2, "topic", "readers", "seek", path, "b", match="say where to")
    refused(2, "topic", "readers", "seek", path, "b", "--time", "yesterday", match="--time must be a time")
    refused(2, "topic", "readers", "delete", path, "b", match="--yes")
    assert done("topic", "readers", "delete", path, "b", "--yes") == b"b is deleted\n"
    with Topic(path) as t:
        assert t.readers() == ["a"]
    assert lag(path, "a") == 3


@pytest.mark.parametrize(
    "command",
    [["readers", "copy"], ["readers", "seek", "--latest"], ["readers", "filter"], ["readers", "delete", "--yes"]],
    ids=" ".join,
)
def test_a_reader_that_is_not_there_is_not_made(path, command):
    fill(path, [b"x"])
    more = ["other"] if command[1] in ("copy", "filter") else []
    refused(3, "topic", *command, path, "nobody", *more, match="no reader 'nobody'")
    with Topic(path) as t:
        assert t.readers() == []


def test_an_index_that_ends_in_the_head_of_a_message_is_damage_and_nobody_reads_on_for_ever(path):
    fill(path, [b"one", b"two"])
    with Topic(path) as t:
        with open(path / "events.idx", "r+b") as index:
            index.seek(zbus.entry_at(0))
            entry = zbus.unpack_entry(index.read(zbus.ENTRY))
            index.seek(zbus.entry_at(0))
            index.write(zbus.pack_entry(entry._replace(end=entry.end + 10)))
        with open(path / "data" / f"{0:020d}.zbus", "ab") as block:
            block.write(bytes(10))
        found = iter(t)
        assert [next(found).body, next(found).body] == [b"one", b"two"]
        with pytest.raises(Corrupt, match="ends inside the head of a message"):
            next(found)
        with t.reader("a", filter="x") as r, pytest.raises(Corrupt, match="ends inside the head of a message"):
            r.read()


def test_what_is_done_to_readers_is_printed_as_json_too(path):
    fill(path, [b"1", b"2", b"3"])

    def printed(*arguments: object) -> dict[str, object]:
        return json.loads(done("topic", "readers", *arguments, "--json"))

    assert printed("add", path, "a", "--start", 1) == {"reader": "a", "number": 1}
    assert printed("copy", path, "a", "b") == {"reader": "b", "number": 1}
    assert printed("seek", path, "b", "--latest") == {"reader": "b", "number": 3}
    assert printed("filter", path, "b", "x.*") == {"reader": "b", "filter": "x.*"}
    assert printed("filter", path, "b", "") == {"reader": "b", "filter": None}
    assert printed("delete", path, "b", "--yes") == {"reader": "b"}


# Batches of readers: the commands of queues


def test_batches_of_a_reader_are_listed_and_acknowledged(path):
    fill(path, [b"1", b"2", b"3"])
    first, second = lease(path, "run 1", max_records=1), lease(path, "run 2")
    found = json.loads(done("batches", path, "--reader", "etl", "--json"))
    assert [(one["id"], one["key"], one["records"], one["state"]) for one in found] == [
        (first, "run 1", 1, "leased"),
        (second, "run 2", 2, "leased"),
    ]
    assert Path(found[0]["manifest"]).is_file()
    assert done("ack", path, first, "--reader", "etl") == f"{first} is acked\n".encode()
    assert done("nack", path, second, "--reader", "etl", "--reason", "no luck") == f"{second} is returned\n".encode()
    assert lag(path, "etl") == 2
    refused(3, "ack", path, "events-etl-0123456789abcdef", "--reader", "etl", match="BatchNotFound")
    refused(3, "batches", path, "--reader", "nobody", match="no reader 'nobody'; it has etl")


def test_dead_letters_of_a_reader_are_shown_returned_and_dropped(path):
    fill(path, BODIES)
    batch = lease(path, "run")
    done("nack", path, batch, "--reader", "etl", "--max-attempts", 1)
    assert json.loads(done("dead", "list", path, "--reader", "etl", "--json"))[0]["id"] == batch
    assert done("dead", "show", path, batch, "--reader", "etl", "--null") == b"".join(one + b"\0" for one in BODIES)
    assert done("dead", "return", path, batch, "--reader", "etl") == f"{batch} is returned\n".encode()
    assert inspect_reader(path, "etl").returned == 1
    assert lease(path, "again") == batch
    done("nack", path, batch, "--reader", "etl", "--max-attempts", 1)
    assert json.loads(done("dead", "drop", path, batch, "--reader", "etl", "--yes", "--json")) == {
        "id": batch,
        "records": len(BODIES),
    }
    assert inspect_reader(path, "etl").dead == 0


def test_damage_of_a_batch_names_the_commands_for_topics(path):
    fill(path, [b"1", b"2"])
    batch = lease(path, "run")
    done("nack", path, batch, "--reader", "etl", "--max-attempts", 1)
    damage(path / "data" / f"{0:020d}.zbus", 205)
    refused(5, "dead", "show", path, batch, "--reader", "etl", match="`qewqew verify` lists all damage")


# Errors

EXISTING = [
    *(["read", "-r", "a"], ["trim", "--max-records", "1"], ["readers", "list"], ["readers", "seek", "--latest"]),
    *(["readers", "copy"], ["readers", "filter"], ["readers", "delete"]),
]
ARGUMENTS = {"seek": ["a"], "copy": ["a", "b"], "filter": ["a", "x"], "delete": ["a", "-y"], "add": ["a"]}


@pytest.mark.parametrize("command", EXISTING, ids=" ".join)
def test_where_there_is_no_topic_none_is_made(path, command):
    refused(3, "topic", *command, path, *ARGUMENTS.get(command[1], []), match="there is no topic here")
    assert not path.exists()


@pytest.mark.parametrize("command", [*EXISTING, ["readers", "add"]], ids=" ".join)
def test_a_path_that_cannot_be_a_topic_is_named(tmp_path, command):
    more = ARGUMENTS.get(command[1], [])
    refused(1, "topic", *command, tmp_path / "no" / "t", *more, match=f"BadPath: {tmp_path / 'no' / 't'}: there is no directory")
    (tmp_path / "file").write_bytes(b"")
    refused(1, "topic", *command, tmp_path / "file", *more, match=f"{tmp_path / 'file'}: this is another kind of file")


def test_a_topic_that_is_appended_to_is_4_for_who_appends_or_trims(path):
    with Topic(path) as t:
        t.append(b"x")
        refused(4, "put", path, "--topic", "--lock-timeout", 0, "x", match="Locked")
        refused(4, "topic", "trim", path, "--lock-timeout", 0, "--max-records", 1, match="Locked")


def test_a_full_disk_is_6(path):
    refused(6, "put", path, "--topic", "--min-free-bytes", 1 << 60, "x", match="DiskFull: ")
    assert content(path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "nonsense"],
        ["put", "--topic"],
        ["put", "PATH", "--topic", "--lines", "--null"],
        ["put", "PATH", "--topic", "--whole", "x"],
        ["put", "PATH", "--topic", "--batch-size", 0, "x"],
        ["put", "PATH", "--topic", "--block-size", 0, "x"],
        ["put", "PATH", "--topic", "--log-bytes", 0, "x"],
        ["put", "PATH", "--topic", "--dialect", "D", "x"],
        ["put", "PATH", "--topic", "--key", "a/b", "x"],
        ["topic", "read", "PATH"],
        ["topic", "read", "PATH", "-r", "a", "--all", "-n", 3],
        ["topic", "read", "PATH", "-r", "a", "--start", "yesterday"],
        ["topic", "read", "PATH", "-r", "a", "--timeout", -1],
        ["topic", "readers", "nonsense"],
        ["topic", "trim", "PATH", "--slow-readers", "x"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_wrong_usage_is_2(path, arguments):
    result = run(*(path if one == "PATH" else one for one in arguments))
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""
    assert not path.exists()


def test_the_commands_are_documented():
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for command in ("read", "trim"):
        assert f"`topic {command}`" in text
        assert f"Usage: qewqew topic {command}".encode() in done("topic", command, "--help")
    for command in ("list", "add", "copy", "seek", "filter", "delete"):
        assert f"Usage: qewqew topic readers {command}".encode() in done("topic", "readers", command, "--help")
    assert run("topic").exit_code == run("topic", "readers").exit_code == 2
