"""``qewqew dump``: what one file says, each record, message and frame with its offset, and where it contradicts itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import zbus_cases
from commands import run

from qewqew_core import Message, Queue, Topic
from qewqew_core.formats import zbus

DATA = Path(__file__).parents[2] / "data"
BINARY = ("*.dat", "*.dat.*", "*.zbus", "*.idx", "*.rdx", "*.nak", "*.wal", "*.sums", "*.stamp", "q", "q.*")


def lines(file: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    result = run("dump", file, "--json", *options)
    assert result.exit_code == code, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def named(found: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [one for one in found if one["what"] == what]


def damage(file: Path, offset: int, size: int = 1) -> None:
    data = bytearray(file.read_bytes())
    for at in range(offset, offset + size):
        data[at] ^= 0xFF
    file.write_bytes(data)


@pytest.fixture
def busy(tmp_path):
    """A queue and a topic with all kinds of frames in their logs; returns their directory."""
    with Queue(tmp_path / "q", chunk_size=8192, retention_bytes=0) as q:
        q.put_many([b"x" * 500] * 30, key="put once")
        for number, end in enumerate(("ack", "nack", "to_dead_letters", "drop")):
            batch = q.lease(f"run {number}", max_records=3)
            batch.to_dead_letters("why") if end == "drop" else None
            getattr(batch, end)()
        q.get_many(2)
        with q.session() as one, q.session() as two:
            one.get()
            two.get()
            two.put(b"\xff")
            two.commit()
            q.lease("run 9", max_records=1)
    with Topic(tmp_path / "t", block_size=2000) as t:
        t.append_many([Message(b"body", f"tag.{number % 3}", str(number)) for number in range(30)], key="once")
        with t.reader("r", "tag.1") as r:
            r.read_many(3)
            r.commit()
            with t.session() as session:
                session.read(r)
                session.append(b"\xff")
            r.read()
            r.lease("run")
        t.append(b"y" * 300_000)
        t.trim()
    return tmp_path


def files_of(directory: Path) -> list[Path]:
    return sorted(file for pattern in BINARY for file in directory.rglob(pattern) if file.is_file())


def test_each_kind_of_file_is_told_in_order_and_without_damage(busy):
    files = files_of(busy)
    assert {file.suffix for file in files} >= {".zbus", ".idx", ".rdx", ".wal", ".sums", ".stamp", ""}
    for file in files:
        found = lines(file)
        offsets = [one["offset"] for one in found]
        assert found, file
        assert offsets == sorted(set(offsets)), file
        assert not [one for one in found if one["damage"]], file


def test_all_operations_of_all_logs_are_told(busy):
    logs = busy.rglob("*.wal")
    said = {log.name: [operation for one in lines(log) for operation in one.get("operations", [])] for log in logs}
    names = {name: {one["op"] for one in operations} for name, operations in said.items()}
    queue = {"new chunk", "append", "put key", "take", "lease", "lease again", "end lease", "forget"}
    assert names["q.wal"] == queue
    assert names["t.wal"] == {"append", "extent", "new block", "put key", "session"}
    assert names["r.wal"] >= {"deliver", "commit", "prepare", "lease"}
    dead = [one["reason"] for one in said["q.wal"] if one["op"] == "end lease" and one["state"] == "dead"]
    assert "why" in dead


@pytest.mark.parametrize("case", sorted(one.name for one in (DATA / "qewqew").iterdir() if one.is_dir()))
def test_the_files_of_the_java_library_are_told(case):
    for file in (DATA / "qewqew" / case).glob("queue*"):
        assert run("dump", file).exit_code in (0, 5)


@pytest.mark.parametrize("case", zbus_cases.cases())
def test_the_files_of_zbus_are_told(case, tmp_path):
    files = files_of(zbus_cases.case(case, tmp_path)[0])
    assert files
    for file in files:
        assert not [one for one in lines(file) if one["damage"]]


def test_a_torn_or_damaged_file_is_told_as_far_as_it_can_be(busy):
    for file in files_of(busy):
        cut = file.stat().st_size * 2 // 3
        os.truncate(file, cut)
        assert run("dump", file).exit_code in (0, 5)
        if cut > 20:
            damage(file, cut // 2, 8)
            assert run("dump", file).exit_code in (0, 5)


def test_what_the_files_of_a_queue_say(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"first", "grün".encode(), b"\xff\x00"])
        q.get()
    assert [one["first"] for one in lines(tmp_path / "q")] == [30001]
    pointers, *records = lines(tmp_path / "q.30001")
    assert (pointers["head"], pointers["tail"], pointers["next"]) == (17, 28, 0)
    assert [(one["offset"], one["number"], one["bytes"]) for one in records] == [(17, 0, 5), (24, 1, 2)]
    assert (records[0]["text"], records[1]["hex"]) == ("grün", "ff00")
    found = lines(tmp_path / "q.wal")
    assert found[0]["magic"] == "QEWQLOG1"
    put, got = named(found, "commit")
    assert [one["op"] for one in put["operations"]] == ["new chunk", "append"]
    assert put["operations"][1] == {"op": "append", "chunk": 30001, "records": 3, "bytes": 18}
    assert got["operations"] == [{"op": "take", "chunk": 30001, "start": 10, "end": 17, "records": 1}]
    assert {"log_inode", "header_inode", "header_changed"} <= named(found, "checkpoint")[-1].keys()


def test_what_the_files_of_a_topic_say(tmp_path):
    with Topic(tmp_path / "t", dialect="C") as t, t.reader("r", "a.*") as r:
        t.append(b"hello", tag="a.b", id="7", timestamp=86_400_000)
        r.read()
        r.commit()
    (message,) = lines(block := next((tmp_path / "t" / "data").glob("*.zbus")))
    assert [message[name] for name in ("number", "tag", "id", "timestamp", "text")] == [0, "a.b", "7", 86_400_000, "hello"]
    assert named(lines(tmp_path / "t" / "t.idx"), "block")[0]["end"] == zbus.HEAD + 5
    assert lines(tmp_path / "t" / "reader" / "r.rdx")[0]["filter"] == "a.*"
    assert lines(tmp_path / "t" / "state" / "r.wal")[0]["magic"] == "QEWQRDR1"
    assert run("dump", block).stdout.split() == [
        *("0", "message", "number", "0", "tag", "a.b", "id", "7", "timestamp", "1970-01-02T00:00:00.000Z"),
        *("corr_offset", "0", "bytes", "5", "hello"),
    ]


def test_of_a_long_record_the_beginning_is_shown_and_of_a_long_file_a_part(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"x" * 1000, "ü".encode() * 500, b"\xff" * 1000])
    found = lines(tmp_path / "q.30001", "--bytes", 7)
    assert [one.get("text") or one.get("hex") for one in found[1:]] == ["x" * 7, "ü" * 3, "ff" * 7]
    assert [one["number"] for one in lines(tmp_path / "q.30001", "--offset", 11, "--length", 1002)] == [1]
    assert run("dump", tmp_path / "q.30001").stdout.splitlines()[1].endswith(f"bytes 1000  {'x' * 40} …")
    assert run("dump", tmp_path / "q", "--offset", 2).exit_code == 2


def test_a_record_that_runs_past_the_end_is_damage(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"x" * 1000] * 3)
    damage(tmp_path / "q.30001", 10 + 1002, 1)
    found = lines(tmp_path / "q.30001", code=5)
    assert [(one["offset"], bool(one["damage"])) for one in found] == [(0, False), (10, False), (1012, True)]
    result = run("dump", tmp_path / "q.30001")
    assert result.stdout.count("damage: no record begins here") == 1
    assert "qewqew repair" in result.stderr
    assert run("dump", tmp_path / "q.30001", "--length", 20).exit_code == 0


def test_a_head_that_no_message_has_is_damage(tmp_path):
    with Topic(tmp_path / "t") as t:
        t.append_many([b"x" * 1000] * 20)
    first = next((tmp_path / "t" / "data").glob("*.zbus"))
    damage(first, 1204 * 10 + 200, 4)  # the length of message 10
    found = lines(first, code=5)
    assert (len(found), found[-1]["offset"], "no message 10 begins here" in found[-1]["damage"]) == (11, 1204 * 10, True)


def test_damage_in_a_log_is_a_frame_and_what_lies_behind_it_is_shown(tmp_path):
    with Queue(tmp_path / "q") as q:
        for number in range(5):
            q.put(b"%d" % number)
    whole = lines(tmp_path / "q.wal")
    second, third = named(whole, "commit")[1:3]
    damage(tmp_path / "q.wal", third["offset"] - 1)
    found = lines(tmp_path / "q.wal", code=5)
    (bad,) = (one for one in found if one["damage"])
    assert (bad["offset"], bad["what"], bad["bytes"]) == (second["offset"], "frame", third["offset"] - second["offset"])
    assert [one for one in found if one["offset"] >= third["offset"]] == whole[whole.index(third) :]
    damage(tmp_path / "q.wal", 3)
    assert "not a transaction log" in lines(tmp_path / "q.wal", code=5)[0]["damage"]


def test_a_last_frame_that_ends_in_zeros_is_not_torn(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(bytes(20))
        shutil.copy(tmp_path / "q.wal", tmp_path / "other.wal")
    data = (tmp_path / "other.wal").read_bytes().rstrip(b"\0")
    (tmp_path / "other.wal").write_bytes(data + bytes(20))
    assert lines(tmp_path / "other.wal")[-1]["what"] == "commit"


def test_a_commit_that_was_torn_is_no_damage(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"1")
        q.put(b"2")
        data = (tmp_path / "q.wal").read_bytes()
    (tmp_path / "other.wal").write_bytes(data.rstrip(b"\0")[:-1])
    assert lines(tmp_path / "other.wal")[-1]["what"] == "torn"


def test_a_file_whose_name_says_nothing_needs_to_be_told(tmp_path):
    (tmp_path / "copy").write_bytes(bytes.fromhex("0000000a0000000d00000001" + "61"))
    result = run("dump", tmp_path / "copy")
    assert result.exit_code == 2
    assert "use --as" in result.stderr
    assert [one["text"] for one in named(lines(tmp_path / "copy", "--as", "chunk"), "record")] == ["a"]
