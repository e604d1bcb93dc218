"""``qewqew dump``: each byte of a file in one field, with the names of docs/format.md, and where the damage is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import zbus_cases
from commands import run

from qewqew_core import Message, Queue, Topic, zbus

DATA = Path(__file__).parents[2] / "data"
BINARY = ("*.dat", "*.dat.*", "*.zbus", "*.idx", "*.rdx", "*.nak", "*.log", "*.sums", "q", "q.*")


def fields(file: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    result = run("dump", file, "--json", "--bytes", 1 << 20, *options)
    assert result.exit_code == code, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def values(found: list[dict[str, Any]], part: str = "") -> dict[str, Any]:
    return {one["field"]: one["value"] for one in found if one["part"] == part and one["length"]}


def damage(file: Path, offset: int, size: int = 1) -> None:
    data = bytearray(file.read_bytes())
    for at in range(offset, offset + size):
        data[at] ^= 0xFF
    file.write_bytes(data)


def check_covers(file: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run("dump", file, "--json", "--bytes", 10**9).stdout.splitlines()]
    assert b"".join(bytes.fromhex(one["hex"]) for one in found) == file.read_bytes()
    at = 0
    for one in found:
        assert one["offset"] == at or not one["length"]
        at += one["length"]
    return found


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


def test_each_byte_of_each_file_is_in_one_field(busy):
    files = files_of(busy)
    assert {file.suffix for file in files} >= {".zbus", ".idx", ".rdx", ".log", ".sums", ""}
    for file in files:
        assert not [one for one in check_covers(file) if one["damage"]], file


@pytest.mark.parametrize("case", sorted(one.name for one in (DATA / "qewqew").iterdir() if one.is_dir()))
def test_each_byte_of_the_files_of_the_java_library_is_in_one_field(case):
    for file in (DATA / "qewqew" / case).glob("queue*"):
        check_covers(file)


@pytest.mark.parametrize("case", zbus_cases.cases())
def test_each_byte_of_the_files_of_zbus_is_in_one_field(case, tmp_path):
    files = files_of(zbus_cases.case(case, tmp_path)[0])
    assert files
    for file in files:
        assert not [one for one in check_covers(file) if one["damage"]]


def test_a_torn_or_damaged_file_is_covered_too(busy):
    for file in files_of(busy):
        cut = file.stat().st_size * 2 // 3
        os.truncate(file, cut)
        check_covers(file)
        if cut > 20:
            damage(file, cut // 2, 8)
            check_covers(file)


def test_the_fields_of_a_queue(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"first", "grün".encode(), b"\xff\x00"])
        q.get()
    assert values(fields(tmp_path / "q")) == {"first": 30001}
    found = fields(tmp_path / "q.30001")
    assert values(found) == {
        "head": 17,
        "tail": 28,
        "next": 0,
        "taken": "records that are taken",
        "unused": "zeros",
    }
    assert values(found, "record 0") == {"length": 5, "payload": "grün"}
    assert values(found, "record 1") == {"length": 2, "payload": None}
    found = fields(tmp_path / "q.log")
    assert values(found)["magic"] == "QEWQLOG1"
    commit = values(found, "frame 1, commit")
    assert (commit["operation"], commit["records"], commit["appended"]) == ("A", 3, None)
    assert {"time", "durable", "crc32"} <= set(commit)
    assert list(values(found, "frame 3, checkpoint"))[-3:] == ["log_inode", "header_inode", "header_changed"]


def test_the_fields_of_a_topic(tmp_path):
    with Topic(tmp_path / "t", dialect="C") as t, t.reader("r", "a.*") as r:
        t.append(b"hello", tag="a.b", id="7", timestamp=86_400_000)
        r.read()
        r.commit()
    found = fields(next((tmp_path / "t" / "data").glob("*.zbus")))
    assert list(values(found, "message 0")) == ["offset", "crc32", "id", "timestamp", "number", "tag", "length", "body"]
    message = values(found, "message 0")
    assert [message[name] for name in ("id", "tag", "timestamp", "body")] == ["7", "a.b", 86_400_000, "hello"]
    assert values(fields(tmp_path / "t" / "t.idx"), "block 0")["end"] == zbus.HEAD + 5
    assert values(fields(tmp_path / "t" / "reader" / "r.rdx"))["filter"] == "a.*"
    assert values(fields(tmp_path / "t" / "state" / "r.log"))["magic"] == "QEWQRDR1"
    text = run("dump", tmp_path / "t" / "t.log").stdout
    assert "\nframe 2, commit\n" in text
    lines = run("dump", next((tmp_path / "t" / "data").glob("*.zbus"))).stdout.splitlines()
    assert lines[:2] == ["    offset  bytes                      field           value", "message 0"]
    assert "        56  00 00 00 00 05 26 5c 00    timestamp       86400000 (1970-01-02T00:00:00.000Z)" in lines


def test_the_fields_of_a_manifest(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"x"] * 3)
        batch = q.lease("run")
    found = fields(batch.manifest_path)
    assert values(found)["records"] == "3"
    text = Path(batch.manifest_path).read_bytes()
    for one in found:
        assert text[one["offset"] : one["offset"] + one["length"]].startswith(f'"{one["field"]}":'.encode())
    Path(batch.manifest_path).write_bytes(text.replace(b'"records": 3', b'"records": "3"'))
    assert "records" in fields(batch.manifest_path, code=5)[0]["damage"]
    Path(batch.manifest_path).write_bytes(text[:100])
    assert fields(batch.manifest_path, code=5)[-1]["field"]


def test_damage_in_a_chunk_is_told_by_the_log(tmp_path):
    with Queue(tmp_path / "q") as q:
        for _ in range(3):
            q.put_many([b"x" * 1000] * 100)
    damage(tmp_path / "q.30001", 150_000)
    found = [one for one in fields(tmp_path / "q.30001", code=5) if one["damage"]]
    assert [(one["offset"], one["field"]) for one in found] == [(66_142, "checksum")]
    assert found[0]["damage"] == "the bytes 66142 to 166342 do not have the checksum with which they were committed"
    result = run("dump", tmp_path / "q.30001", "--offset", 66_142, "--length", 10)
    assert result.exit_code == 5
    assert result.stdout.count("damage: ") == 1
    assert "qewqew repair" in result.stderr
    assert run("dump", tmp_path / "q.30001", "--offset", 210_000, "--length", 50).exit_code == 0


def test_records_behind_a_broken_length_are_found_again(tmp_path):
    with Queue(tmp_path / "q", chunk_size=1 << 20) as q:
        for _ in range(3):
            q.put_many([b"x" * 1000] * 100)
    data = bytearray((tmp_path / "q.30001").read_bytes())
    data[10 + 1002 * 110 : 10 + 1002 * 110 + 2] = b"\xff\xff"  # from there on lengths are taken from the middle of records
    (tmp_path / "q.30001").write_bytes(data)
    found = fields(tmp_path / "q.30001", code=5)
    broken = [one for one in found if one["damage"] and one["field"] == "record"]
    assert [one["offset"] + one["length"] for one in broken][-1] in (66_142, 200_410, 300_610)
    assert [one["offset"] for one in found if one["field"] == "checksum"] == [66_142]


def test_damage_in_a_batch_is_told_by_its_manifest(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"x" * 1000] * 3)
        batch = q.lease("run")
    (file,) = (one for one in Path(batch.manifest_path).parent.iterdir() if one.name != "manifest.json")
    assert not [one for one in fields(file) if one["damage"]]
    damage(file, 1500)
    assert [one["field"] for one in fields(file, code=5) if one["damage"]] == ["checksum"]


def test_damage_in_a_block_is_told_by_its_checksums_and_its_heads(tmp_path):
    with Topic(tmp_path / "t", block_size=1 << 20) as t:
        for _ in range(12):
            t.append_many([b"x" * 1000] * 100)
    first = sorted((tmp_path / "t" / "data").glob("*.zbus"))[0]
    damage(first, 300_000)
    (one,) = (one for one in fields(first, code=5) if one["damage"])
    assert one["field"] == "checksum"
    assert one["offset"] <= 300_000
    damage(first, 1204 * 10 + 200, 4)  # the length of message 10
    found = fields(first, code=5)
    assert [one["offset"] for one in found if one["damage"] and one["length"]] == [1204 * 10]
    assert values(found, "message 200")["number"] == 200  # the next piece is read again


def test_damage_in_a_log_is_a_frame_and_what_lies_behind_it_is_shown(tmp_path):
    with Queue(tmp_path / "q") as q:
        for number in range(5):
            q.put(b"%d" % number)
    whole = fields(tmp_path / "q.log")
    second = [one for one in whole if one["part"] == "frame 2, commit"]
    damage(tmp_path / "q.log", second[-1]["offset"])
    found = fields(tmp_path / "q.log", code=5)
    (bad,) = (one for one in found if one["damage"])
    assert (bad["offset"], bad["field"]) == (second[0]["offset"], "frame")
    assert bad["length"] == sum(one["length"] for one in second)
    assert [one["field"] for one in found if one["part"] == "frame 2, commit"] == [one["field"] for one in second]
    damage(tmp_path / "q.log", 3)
    assert "not a transaction log" in fields(tmp_path / "q.log", code=5)[0]["damage"]


def test_a_commit_that_was_torn_is_no_damage(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"1")
        q.put(b"2")
        data = (tmp_path / "q.log").read_bytes()
    (tmp_path / "other.log").write_bytes(data.rstrip(b"\0")[:-1])
    found = fields(tmp_path / "other.log")
    assert found[-1]["field"] == "torn"


def test_bytes_that_only_the_log_of_an_open_queue_has_are_no_damage(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many([b"one", b"two"])
        found = fields(tmp_path / "q.30001")
        where, what = (one["value"] for one in found if one["field"] == "records")
        assert where.startswith("from 10 to 20")
        assert what == "10 more bytes of records are in the transaction log only"


def test_a_file_whose_name_says_nothing_needs_to_be_told(tmp_path):
    (tmp_path / "copy").write_bytes(bytes.fromhex("0000000a0000000d00000001" + "61"))
    result = run("dump", tmp_path / "copy")
    assert result.exit_code == 2
    assert "say it with --as" in result.stderr
    assert values(fields(tmp_path / "copy", "--as", "chunk"), "record 0") == {"length": 1, "payload": "a"}
