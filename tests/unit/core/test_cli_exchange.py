"""``qewqew export`` and ``import``: what goes out comes in again, once, whole or not at all; and directories of DiskQueue."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from commands import done, refused, run

from qewqew_core import Corrupt, Message, Queue, Topic, inspect
from qewqew_core.tools import diskqueue

RECORDS = [b"first", b"", b"\xff\x00\xfe", "grün".encode(), b"a\nb\r\n", b'{"a": 1}', b"\xe2\x80\xa8", b"x" * 65_535]
MESSAGES = [
    Message(b"plain"),
    Message(b"\xff\x00", "order.new", "id 1", timestamp=0),
    Message("grün".encode(), "ü", None, 7, 253_402_300_799_999),
    Message(b"", None, "x", -1, (1 << 63) - 1),
]


def fill(path: Path, records: list[bytes]) -> None:
    with Queue(path) as q:
        q.put_many(records)


def content(path: Path) -> list[bytes]:
    with Queue(path) as q:
        return list(q)


def topic_content(path: Path) -> list[Message]:
    with Topic(path) as t:
        return [one._replace(offset=-1) for one in t]


def state(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


# Round trips


def test_records_come_back_as_they_were(tmp_path):
    fill(tmp_path / "q", RECORDS)
    file = tmp_path / "out.jsonl"
    assert done("export", tmp_path / "q", "--to", file) == f"8 records exported to {file}\n".encode()
    assert content(tmp_path / "q") == RECORDS
    assert done("import", tmp_path / "new", file) == b"8 records imported\n"
    assert content(tmp_path / "new") == RECORDS
    assert sorted(one.name for one in tmp_path.iterdir() if "out" in one.name) == [file.name]


def test_messages_come_back_with_tag_id_timestamp_and_corr_offset(tmp_path):
    with Topic(tmp_path / "t", dialect="B") as t:
        t.append_many(MESSAGES)
    file = tmp_path / "out.jsonl"
    assert json.loads(done("export", tmp_path / "t", "--to", file, "--json")) == {
        "path": str(tmp_path / "t"),
        "kind": "topic",
        "records": 4,
        "file": str(file),
    }
    assert done("import", tmp_path / "new", file, "--topic") == b"4 records imported\n"
    assert topic_content(tmp_path / "new") == topic_content(tmp_path / "t")


def test_json_lines_go_through_pipes_and_say_what_they_hold(tmp_path):
    with Topic(tmp_path / "t") as t:
        t.append_many(MESSAGES[1:3])
    lines = done("export", tmp_path / "t")
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"number": 0, "tag": "order.new", "id": "id 1", "timestamp": "1970-01-01T00:00:00.000Z", "base64": "/wA="},
        {"number": 1, "tag": "ü", "id": None, "timestamp": "9999-12-31T23:59:59.999Z", "corr_offset": 7, "record": "grün"},
    ]
    done("import", tmp_path / "new", "-", "--topic", stdin=lines)
    assert topic_content(tmp_path / "new") == topic_content(tmp_path / "t")


def test_what_get_and_read_print_can_be_imported(tmp_path):
    fill(tmp_path / "q", RECORDS)
    done("import", tmp_path / "new", "-", stdin=done("get", tmp_path / "q", "--all", "--json"))
    assert content(tmp_path / "new") == RECORDS
    done("put", tmp_path / "t", "--topic", "--tag", "a", "hello")
    done("import", tmp_path / "t", "-", stdin=done("peek", tmp_path / "t", "--json"))
    one, other = topic_content(tmp_path / "t")
    assert other == one._replace(number=1)


def test_only_the_record_must_be_there_and_a_queue_keeps_nothing_else(tmp_path):
    lines = b'{"record": "a"}\n{"record": "\xc3\xbc", "tag": "x"}\n'
    result = run("import", tmp_path / "q", "-", stdin=lines)
    assert "a queue stores only records: tags, ids and timestamps are left out" in result.stderr
    assert content(tmp_path / "q") == [b"a", "ü".encode()]
    done("import", tmp_path / "t", "-", "--topic", stdin=lines)
    assert [(one.body, one.tag) for one in topic_content(tmp_path / "t")] == [(b"a", None), ("ü".encode(), "x")]


def test_an_empty_queue_that_is_there_makes_an_empty_file(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"x")
        q.get()
        done("export", tmp_path / "q", "--to", tmp_path / "out.jsonl")
    assert done("import", tmp_path / "new", tmp_path / "out.jsonl") == b"0 records imported\n"


# Export: no lock, no change


def test_export_needs_no_lock_and_changes_nothing(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q, Topic(tmp_path / "t") as t:
        q.put_many([b"%d" % number for number in range(2000)])
        q.lease("run", max_records=100)
        with q.session() as one, q.session() as two:
            one.get_many(50)
            two.get_many(700)
            two.commit()  # a gap behind what the first session holds
            q.put(b"only in the log yet")
            t.append(b"x")
            before = state(tmp_path)
            expected = [b"%d" % number for number in (*range(100, 150), *range(850, 2000))] + [b"only in the log yet"]
            lines = done("export", tmp_path / "q").splitlines()
            assert [json.loads(line)["record"].encode() for line in lines] == expected
            assert len(done("export", tmp_path / "t").splitlines()) == 1
            assert state(tmp_path) == before


def test_export_replaces_no_file_and_leaves_none_behind_when_it_fails(tmp_path):
    fill(tmp_path / "q", [b"x" * 60_000] * 10)
    (tmp_path / "there").write_text("mine")
    refused(2, "export", tmp_path / "q", "--to", tmp_path / "there", match="the file exists already")
    assert (tmp_path / "there").read_text() == "mine"
    refused(1, "export", tmp_path / "q", "--to", tmp_path / "no" / "file", match="No such file")
    data = bytearray((tmp_path / "q.30001").read_bytes())
    data[300_000] ^= 1
    (tmp_path / "q.30001").write_bytes(data)
    before = {one.name for one in tmp_path.iterdir()}
    refused(5, "export", tmp_path / "q", "--to", tmp_path / "out.jsonl", match="Corrupt")
    assert {one.name for one in tmp_path.iterdir()} == before


def test_parquet_is_not_exported_but_written_by_spark(tmp_path):
    fill(tmp_path / "q", [b"x"])
    before = state(tmp_path)
    instead = 'spark.read.format("qewqew").load(PATH).write.parquet(FILE)'
    result = refused(2, "export", tmp_path / "q", "--to", tmp_path / "out.parquet", match=instead)
    assert f"BadArgument: {tmp_path}/out.parquet: " in result.stderr
    assert state(tmp_path) == before


def test_records_that_are_taken_during_an_export_are_an_error(tmp_path, monkeypatch):
    from qewqew_core.queue import inspection

    fill(tmp_path / "q", [b"x" * 1000] * 50)
    found = inspection.snapshot(str(tmp_path / "q"))
    with Queue(tmp_path / "q") as q:
        q.clear()
        q.put(b"other")
        looks = iter([found])
        monkeypatch.setattr(inspection, "snapshot", lambda path, real=inspection.snapshot: next(looks, None) or real(path))
        refused(1, "export", tmp_path / "q", "--to", tmp_path / "out", match="RecordsTaken")
    assert not (tmp_path / "out").exists()


# Import: all or nothing, and once


def test_the_same_records_are_imported_once_unless_another_key_is_given(tmp_path):
    lines = b'{"record": "a"}\n{"record": "b"}\n'
    assert done("import", tmp_path / "q", "-", stdin=lines) == b"2 records imported\n"
    assert done("import", tmp_path / "q", "-", stdin=lines) == b"nothing to do: 2 records imported before\n"
    assert json.loads(done("import", tmp_path / "q", "-", "--json", stdin=lines)) == {
        "path": str(tmp_path / "q"),
        "kind": "queue",
        "records": 2,
        "repeated": True,
    }
    done("import", tmp_path / "q", "-", "--key", "again", stdin=lines)
    done("import", tmp_path / "q", "-", stdin=lines[:16])
    assert content(tmp_path / "q") == [b"a", b"b", b"a", b"b", b"a"]


@pytest.mark.parametrize("topic", [False, True])
@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"no json", "line 2001: this is not JSON"),
        (b'{"record": 1}', "line 2001: the record is not text"),
        (b'{"base64": "&"}', "line 2001: this is not base64"),
        (b'{"record": "a", "base64": ""}', 'line 2001: this is not a JSON object with "record" or "base64"'),
        (b'["record"]', "line 2001: this is not a JSON object"),
        (b'{"record": "a", "color": "red"}', "line 2001: 'color' is not a member of a record"),
        (b'{"record": "a", "timestamp": "yesterday"}', "line 2001: Invalid isoformat string"),
        (b'{"record": "\\udc00"}', "line 2001: "),
        (b"\xff", "line 2001: "),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(tmp_path, topic, line, what):
    lines = b'{"record": "a"}\n' * 2000 + line + b"\n"
    more = ["--topic"] if topic else []
    refused(2, "import", tmp_path / "new", "-", *more, match=what, stdin=lines)
    assert not (topic_content if topic else content)(tmp_path / "new")
    refused(2, "import", tmp_path / "other", "-", *more, match="line 1: ", stdin=line + b"\n")
    assert not (tmp_path / "other").exists()  # not even made


def test_a_record_that_does_not_fit_is_named_and_nothing_is_imported(tmp_path):
    lines = b'{"record": "a"}\n' * 1500 + b'{"record": "' + b"x" * 65_536 + b'"}\n'
    refused(1, "import", tmp_path / "q", "-", match="RecordTooLarge", stdin=lines)
    assert inspect(tmp_path / "q").records == 0
    refused(2, "import", tmp_path / "t", "-", "--topic", match="BadArgument", stdin=b'{"record": "", "tag": 5}\n')


def test_parquet_is_not_imported_but_read_by_spark(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"PAR1" + b"x" * 1000)
    (tmp_path / "of-spark.parquet").mkdir()
    instead = 'spark.read.parquet(FILE).write.format("qewqew").mode("append").save(PATH)'
    for source in ("in.parquet", "of-spark.parquet", "of-spark.parquet/"):
        for more in ([], ["--topic"]):
            result = refused(2, "import", tmp_path / "new", f"{tmp_path}/{source}", *more, match=instead)
            assert f"BadArgument: {tmp_path}/{source}: " in result.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.parquet", "of-spark.parquet"]


def test_a_queue_or_topic_need_not_be_imported(tmp_path):
    fill(tmp_path / "q", [b"x"])
    done("put", tmp_path / "t", "--topic", "x")
    for source in ("q", "t"):
        refused(
            2, "import", tmp_path / "new", tmp_path / source, match=f"qewqew export {tmp_path / source} | qewqew import PATH -"
        )
    (tmp_path / "empty").mkdir()
    refused(1, "import", tmp_path / "new", tmp_path / "empty", match="this is not a directory of DiskQueue")


@pytest.mark.parametrize("topic", [False, True])
def test_an_import_that_is_killed_has_happened_or_not_and_is_done_by_the_next(tmp_path, topic):
    records = [b"%06d" % number for number in range(5000)]
    lines = b"".join(b'{"record": "%s"}\n' % one for one in records)
    target = tmp_path / "new"
    command = [sys.executable, "-m", "qewqew_core", "import", str(target), "-", *(["--topic"] if topic else [])]

    def there() -> list[bytes]:
        return [one.body for one in topic_content(target)] if topic else content(target)

    for sent in (lines[: len(lines) // 2], lines):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process.stdin.write(sent)
        process.stdin.flush()
        end = time.monotonic() + 60
        while fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)) != bytes(4):  # until it has read all of it
            assert time.monotonic() < end
            time.sleep(0.005)
        if sent == lines:
            process.stdin.close()
        process.kill()
        process.wait()
        assert len(there()) in ({0, len(records)} if sent == lines else {0})
    for _ in range(2):
        done(*command[3:], stdin=lines)
        assert there() == records


# DiskQueue


START = bytes.fromhex("12fb5bb7bb93b642acb1a897239ea3a5")
END = bytes.fromhex("05976c8656449d4eb4523146b3bfa4ce")


class DiskQueue:
    """Writes what the .NET program would: items in data files, and a log of what was put (1) and taken (2)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.log = b""
        self.places: list[tuple[int, int, int]] = []

    def store(self, file: int, item: bytes) -> tuple[int, int, int]:
        path = self.directory / f"data.{file}"
        at = path.stat().st_size if path.exists() else 0
        with path.open("ab") as opened:
            opened.write(item)
        return file, at, len(item)

    def commit(self, *operations: tuple[int, tuple[int, int, int]]) -> bytes:
        body = b"".join(struct.pack("<IBiii", 0x42FEBCA1, kind, *place) for kind, place in operations)
        transaction = START + struct.pack("<i", len(operations)) + body + END
        self.log += transaction
        (self.directory / "transaction.log").write_bytes(self.log)
        return transaction


@pytest.fixture
def net(tmp_path):
    """Items a (taken), b, the empty one, \\xff, and c in another file."""
    queue = DiskQueue(tmp_path / "net")
    a, b = queue.store(0, b"a"), queue.store(0, b"bb")
    queue.commit((1, a), (1, b), (1, (0, 3, 0)))
    queue.store(0, b"rolled back")
    queue.commit((1, queue.store(0, b"\xff")), (2, a))
    queue.commit((1, queue.store(1, b"c")))
    (queue.directory / "meta.state").write_bytes(bytes(12))
    return queue


WAITING = [b"bb", b"", b"\xff", b"c"]


@pytest.mark.parametrize("topic", [False, True])
def test_a_directory_of_diskqueue_is_imported_once_and_not_changed(tmp_path, net, topic):
    before = state(net.directory)
    more = ["--topic"] if topic else []
    assert done("import", tmp_path / "new", net.directory, *more).startswith(b"4 ")
    assert b"nothing to do" in done("import", tmp_path / "new", net.directory, *more)
    found = [one.body for one in topic_content(tmp_path / "new")] if topic else content(tmp_path / "new")
    assert found == WAITING
    assert state(net.directory) == before


def test_items_that_are_taken_before_they_are_put_are_taken(tmp_path):
    net = DiskQueue(tmp_path / "net")
    a, b = net.store(0, b"a"), net.store(0, b"b")
    net.commit((2, a), (1, b))
    net.commit((1, a))
    done("import", tmp_path / "q", net.directory)
    assert content(tmp_path / "q") == [b"b"]


def test_of_empty_items_at_one_place_as_many_wait_as_were_not_taken(tmp_path):
    net = DiskQueue(tmp_path / "net")
    net.commit(*[(1, (0, 0, 0))] * 5)
    net.commit(*[(2, (0, 0, 0))] * 2)
    done("import", tmp_path / "q", net.directory)
    assert content(tmp_path / "q") == [b""] * 3


def test_a_transaction_that_was_not_finished_has_not_happened(tmp_path, net):
    whole, before = net.log, diskqueue.find(str(net.directory))
    last = net.commit((1, net.store(1, b"d")), (1, net.store(1, b"e")))
    log = net.directory / "transaction.log"
    for cut in range(len(last)):
        log.write_bytes(whole + last[:cut])
        assert diskqueue.find(str(net.directory)) == (before.items, cut)
    result = run("import", tmp_path / "q", net.directory)
    assert "the last transaction was not finished and is left out: 69 bytes" in result.stderr
    assert content(tmp_path / "q") == WAITING
    log.write_bytes(whole + bytes(5000))
    done("import", tmp_path / "zeros", net.directory)
    assert content(tmp_path / "zeros") == WAITING


def test_a_damaged_log_is_refused_wherever_damage_can_be_seen(tmp_path, net):
    log = net.directory / "transaction.log"
    unseen, at = set(), 0  # file, start and length of an item have no checksum
    for operations in (3, 2, 1):
        for number in range(operations):
            unseen.update(range(at + 20 + 17 * number + 5, at + 20 + 17 * (number + 1)))
        at += 36 + 17 * operations
    assert at == len(net.log)
    for at in set(range(len(net.log))) - unseen:
        data = bytearray(net.log)
        data[at] ^= 0xFF
        log.write_bytes(data)
        with pytest.raises(Corrupt, match=rf"{log}, offset \d+: "):
            diskqueue.find(str(net.directory))
    refused(5, "import", tmp_path / "q", net.directory, match=f"Corrupt: {log}, offset ")
    assert not (tmp_path / "q.wal").exists()


@pytest.mark.parametrize("new", [b"", START, None])
def test_while_the_log_was_replaced_its_old_copy_counts(tmp_path, net, new):
    log, old = net.directory / "transaction.log", net.directory / "transaction.log.old_copy"
    log.rename(old)
    if new is not None:
        log.write_bytes(new)
    done("import", tmp_path / "q", net.directory)
    assert content(tmp_path / "q") == WAITING


def test_two_logs_that_say_different_things_are_refused(tmp_path, net):
    (net.directory / "transaction.log.old_copy").write_bytes(net.log)
    done("import", tmp_path / "same", net.directory)
    assert content(tmp_path / "same") == WAITING
    net.commit((1, net.store(1, b"d")))
    refused(5, "import", tmp_path / "q", net.directory, match="they differ: 4 items there, 5 here")


def test_a_missing_or_short_data_file_is_named_with_the_item(tmp_path, net):
    os.truncate(net.directory / "data.0", 10)
    refused(5, "import", tmp_path / "q", net.directory, match="data.0, offset 14: the file ends before item 3")
    (net.directory / "data.1").unlink()
    (net.directory / "data.0").write_bytes(bytes(100))
    refused(5, "import", tmp_path / "q", net.directory, match="data.1, offset 0: item 4 is in this file, which cannot be read")
    assert inspect(tmp_path / "q").records == 0


def test_a_directory_that_its_program_has_open_is_refused(tmp_path, net):
    (net.directory / "lock").write_bytes(struct.pack("<iiq", os.getpid(), 1, 0))
    refused(4, "import", tmp_path / "q", net.directory, match=f"process {os.getpid()}")
    (net.directory / "lock").write_bytes(struct.pack("<iiq", 1 << 30, 1, 0))  # it was killed
    done("import", tmp_path / "q", net.directory)
    assert content(tmp_path / "q") == WAITING
