"""The command line: every command, what it prints, and its exit codes."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from commands import done, refused, run
from plain import forget_log

from qewqew_core import Queue, inspect
from qewqew_core.cli.terminal import EXIT_CODES

RECORDS = [b"first", b"", b"\xff\x00\xfe", "grün".encode(), b"a\nb", b"last"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "orders.qew"


def fill(path: Path, records: list[bytes]) -> None:
    with Queue(path) as q:
        q.put_many(records)


def content(path: Path) -> list[bytes]:
    with Queue(path) as q:
        return list(q)


def lease(path: Path, key: str, **options) -> str:
    with Queue(path) as q:
        batch = q.lease(key, **options)
        assert batch is not None
        return batch.id


def damage(path: Path, offset: int = 12) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


# put


def test_put_takes_records_from_the_arguments(path):
    assert done("put", path, "one", "", "zwölf", "--", "--not-an-option") == b"4 records put\n"
    assert content(path) == [b"one", b"", "zwölf".encode(), b"--not-an-option"]


def test_put_takes_bytes_that_are_no_text_from_the_arguments(path):
    assert done("put", path, os.fsdecode(b"\xff\xfe")) == b"1 record put\n"
    assert content(path) == [b"\xff\xfe"]


@pytest.mark.parametrize(
    ("data", "options", "records"),
    [
        (b"", [], []),
        (b"a\nb\n", [], [b"a", b"b"]),
        (b"a\n\nb", ["--lines"], [b"a", b"", b"b"]),
        (b"\n", [], [b""]),
        (b"a\r\n\xff\x00\n", [], [b"a\r", b"\xff\x00"]),
        (b"a\nb\0\0c", ["--null"], [b"a\nb", b"", b"c"]),
        (b"a\nb\n", ["--whole"], [b"a\nb\n"]),
        (b"", ["--whole"], [b""]),
    ],
)
@pytest.mark.parametrize("source", ["stdin", "-", "file"])
def test_put_splits_its_input(path, tmp_path, data, options, records, source):
    file = tmp_path / "input"
    file.write_bytes(data)
    named = {"stdin": [], "-": ["-f", "-"], "file": ["--file", file]}[source]
    assert done("put", path, *options, *named, stdin=data if source != "file" else b"") == (
        f"{len(records)} record{'s' * (len(records) != 1)} put\n".encode()
    )
    assert content(path) == records


def test_records_may_span_what_is_read_at_once(path, tmp_path):
    records = [bytes([65 + number % 26]) * (number % 60_000) for number in range(0, 300_000, 7_919)]
    file = tmp_path / "input"
    file.write_bytes(b"\n".join(records))
    assert json.loads(done("put", path, "-f", file, "--json")) == {
        "path": str(path),
        "kind": "queue",
        "records": len(records),
        "repeated": False,
    }
    assert content(path) == records


def test_put_commits_in_batches_and_says_what_was_stored_before_an_error(path):
    result = refused(1, "put", path, "--batch-size", 2, match="RecordTooLarge", stdin=b"1\n2\n3\n4\n5\n" + b"x" * 65_536)
    assert "4 records put before that; they stay" in result.stderr
    assert content(path) == [b"1", b"2", b"3", b"4"]


def test_put_with_a_key_is_one_commit_that_happens_once(path):
    lines = b"\n".join(str(number).encode() for number in range(2500))
    refused(1, "put", path, "--key", "k", match="RecordTooLarge", stdin=lines + b"\n" + b"x" * 65_536)
    assert inspect(path).records == 0
    assert done("put", path, "--key", "k", stdin=lines) == b"2,500 records put\n"
    assert b"nothing to do" in done("put", path, "--key", "k", stdin=lines)
    assert json.loads(done("put", path, "--key", "k", "--json", stdin=lines)) == {
        "path": str(path),
        "kind": "queue",
        "records": 2500,
        "repeated": True,
    }
    assert inspect(path).records == 2500


def test_put_takes_the_settings_of_a_queue(path):
    done("put", path, "--chunk-size", 4096, "x")
    assert (path.parent / "orders.qew.30001").stat().st_size == 4096


# get and peek


def test_get_takes_as_many_as_it_is_told(path):
    fill(path, [b"1", b"2", b"3", b"4"])
    assert done("get", path) == b"1\n"
    assert done("get", path, "-n", 2) == b"2\n3\n"
    assert done("get", path, "-n", 5) == b"4\n"
    refused(3, "get", path, match="there is no queue here")


def test_get_and_peek_write_records_as_they_are(path):
    fill(path, RECORDS)
    text, null = b"".join(one + b"\n" for one in RECORDS), b"".join(one + b"\0" for one in RECORDS)
    assert done("peek", path, "-n", 100) == text
    assert done("peek", path, "-n", 2, "--null") == b"first\0\0"
    assert done("peek", path) == b"first\n"
    assert content(path) == RECORDS
    assert done("get", path, "--all", "-0") == null
    fill(path, RECORDS)
    assert done("get", path, "-a") == text


def test_json_lines_hold_any_record(path):
    fill(path, RECORDS)
    for command in ("peek", "get"):
        lines = [json.loads(line) for line in done(command, path, "-n", 100, "--json").splitlines()]
        assert [
            one["record"].encode() if "record" in one else base64.b64decode(one["base64"], validate=True) for one in lines
        ] == RECORDS
        assert [list(one) for one in lines].count(["base64"]) == 1


def test_get_all_takes_more_than_one_commit_holds(path):
    records = [b"%d" % number for number in range(2500)]
    fill(path, records)
    assert done("get", path, "--all").splitlines() == records
    assert inspect(path).records == 0


def test_get_waits_for_the_first_record_and_no_longer(path):
    began = time.monotonic()
    refused(3, "get", path, "--timeout", 0.3, match="there is no queue here")
    assert 0.3 <= time.monotonic() - began < 60
    assert not list(path.parent.iterdir())


# Looking


def test_ls_finds_the_queues_of_a_directory_and_nothing_else(tmp_path):
    fill(tmp_path / "plain", [b"x"])
    fill(tmp_path / "with.dots.qew", [b"x"])
    fill(tmp_path / "of java", [b"x"])
    forget_log(tmp_path / "of java")
    with Queue(tmp_path / "remembers", retention_bytes=0) as q:
        q.put(b"x")
        batch = q.lease("run")
        batch.ack()
    fill(tmp_path / "emptied", [b"x"])
    with Queue(tmp_path / "emptied") as q:
        q.get()
    (tmp_path / "notes.wal").write_text("a log of something else")
    (tmp_path / "notes").write_text("and its file")
    (tmp_path / "pid").write_text("42")
    (tmp_path / "other.batches").mkdir()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory.wal").write_text("x")
    with Queue(tmp_path / "open") as q:
        q.put(b"x")
        rows = json.loads(done("ls", tmp_path, "--json"))
    assert [Path(row["path"]).name for row in rows] == ["of java", "open", "plain", "remembers", "with.dots.qew"]
    assert [row["records"] for row in rows] == [1, 1, 1, 0, 1]


def test_ls_prints_a_table_that_is_not_cut_off(tmp_path):
    name = "q" * 150
    fill(tmp_path / name, [b"x" * 1536, b""])
    lease(tmp_path / name, "run", max_records=1)
    lines = done("ls", tmp_path).decode().splitlines()
    columns = ["path", "kind", "records", "bytes", "oldest", "lag", "leased", "returned", "dead", "on", "disk"]
    assert lines[0].split() == columns
    assert lines[1].startswith(f"{tmp_path / name}  queue        1    0 B  a few seconds            1         0     0")
    assert len(lines) == 2


def test_ls_takes_single_queues_and_knows_the_working_directory(tmp_path, monkeypatch):
    fill(tmp_path / "a", [b"x"])
    fill(tmp_path / "b", [b"x"])
    monkeypatch.chdir(tmp_path)
    assert [row["path"] for row in json.loads(done("ls", "--json"))] == ["a", "b"]
    assert [row["path"] for row in json.loads(done("ls", "b", "--json"))] == ["b"]


def test_ls_shows_what_cannot_be_read_and_goes_on(tmp_path):
    for name in ("a", "b", "c"):
        fill(tmp_path / name, [b"x"])
    damage(tmp_path / "a.wal", 40)
    (tmp_path / "b").write_bytes(b"x")
    result = run("ls", tmp_path, "--json")
    rows = json.loads(result.stdout)
    assert ["error" in row for row in rows] == [True, True, False]
    assert rows[0]["error"].startswith("Corrupt: ")
    assert result.exit_code == 5
    result = run("ls", tmp_path)
    assert [line.split()[1:3] for line in result.stdout.splitlines()] == [
        *(["kind", "records"], ["queue", "?"], ["queue", "?"], ["queue", "1"])
    ]
    assert "Corrupt" in result.stdout
    assert result.exit_code == 5


def test_ls_says_when_there_is_nothing(tmp_path):
    assert run("ls", tmp_path).stderr.startswith("qewqew: no queues or topics here")
    assert done("ls", tmp_path, "--json") == b"[]\n"
    result = run("ls", tmp_path / "no")
    assert result.exit_code == 3
    assert "there is no queue or topic here" in result.stdout


def test_stat_has_stable_keys(path):
    fill(path, [b"one", b"two", b"three"])
    lease(path, "run", max_records=1)
    found = json.loads(done("stat", path, "--json"))
    counts = [
        "records",
        "bytes",
        "oldest",
        "leased",
        "returned",
        "dead",
        "on_disk",
        "last_lease",
        "oldest_lease",
        "clock_step",
        "delayed",
        "next_due",
        "missing",
        "files",
    ]
    assert list(found) == ["path", "kind", *counts, "owner"]
    assert (found["records"], found["bytes"], found["leased"], found["owner"]) == (2, 8, 1, None)
    age = datetime.now().astimezone() - datetime.fromisoformat(found["oldest"])
    assert timedelta(0) <= age < timedelta(minutes=5)
    text = done("stat", path).decode()
    assert "records    2\n" in text
    assert "leased     1 batch\n" in text


def test_stat_needs_no_lock_and_says_who_has_it(path):
    with Queue(path) as q:
        q.put(b"x")
        assert json.loads(done("stat", path, "--json"))["owner"] == os.getpid()
        assert f"process {os.getpid()}" in done("stat", path).decode()


def test_verify_reports_what_it_read(path):
    fill(path, [b"one", b"two", b"three"])
    lease(path, "run", max_records=1)
    assert done("verify", path) == b"no problems: 3 correct records (1 file, 1 batch, 11 B)\n"
    assert json.loads(done("verify", path, "--json")) == {
        "path": str(path),
        "kind": "queue",
        "ok": True,
        "records": 3,
        "bytes": 11,
        "files": 1,
        "batches": 1,
        "unchecked": 0,
        "orphans": [],
        "problems": [],
        "strange": {},
    }


@pytest.mark.parametrize("what", ["chunk", "log"])
def test_verify_finds_damage(path, what):
    fill(path, [b"one", b"two"])
    damage(Path(f"{path}.30001") if what == "chunk" else Path(f"{path}.wal"))
    result = refused(5, "verify", path, match="qewqew repair")
    assert result.stdout.startswith(f"damage: {path}.")
    assert "1 problem: " in result.stdout
    result = refused(5, "verify", path, "--json", match="qewqew repair")
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert len(found["problems"]) == 1


@pytest.mark.parametrize("what", ["chunk", "log"])
def test_repair_says_what_it_did(path, what):
    fill(path, [b"one", b"two"])
    damage(Path(f"{path}.30001") if what == "chunk" else Path(f"{path}.wal"), 12)
    before = sorted(path.parent.iterdir())
    refused(2, "repair", path, match="--yes")
    assert sorted(path.parent.iterdir()) == before
    result = run("repair", path, "--yes")
    assert result.exit_code == 5
    damaged, aside, mended = result.stdout.splitlines()
    assert damaged.startswith(f"damage: {path}.{'30001' if what == 'chunk' else 'wal'}, offset ")
    assert aside == f"set aside: {path}.damaged/1"
    assert mended.startswith("repaired: the queue holds ")
    assert (path.parent / "orders.qew.damaged" / "1" / "report.json").is_file()
    assert b"nothing to repair: the queue holds " in done("repair", path, "-y")
    done("verify", path)


def test_repair_prints_json(path):
    fill(path, [b"one", b"two"])
    damage(Path(f"{path}.30001"))
    result = run("repair", path, "--yes", "--json")
    assert result.exit_code == 5
    found = json.loads(result.stdout)
    assert list(found) == ["path", "kind", "ok", "records", "batches", "damage", "notes", "set_aside", "strange"]
    assert list(found["damage"][0]) == ["path", "offset", "bytes", "records", "what"]
    assert (found["ok"], found["records"], found["damage"][0]["records"]) == (False, 2, 0)  # the log still has them
    assert json.loads(done("repair", path, "--yes", "--json"))["ok"] is True


@pytest.fixture
def orphan(path):
    fill(path, [b"mine"])
    fill(path.parent / "other", RECORDS)
    (path.parent / "other.30001").rename(path.parent / "orders.qew.9")
    for name in ("other", "other.wal"):
        (path.parent / name).unlink()
    return path.parent / "orders.qew.9"


def test_orphans_are_found_and_shown(path, orphan):
    assert str(orphan) in done("verify", path).decode()
    assert json.loads(done("orphans", "list", path, "--json")) == [
        {"file": str(orphan), "records": len(RECORDS), "bytes": sum(map(len, RECORDS)), "problem": None}
    ]
    assert done("orphans", "list", path).decode().splitlines()[1].split() == ["orders.qew.9", "6", "20", "B"]
    assert done("orphans", "show", path, "orders.qew.9", "-0") == b"".join(one + b"\0" for one in RECORDS)
    assert done("orphans", "show", path, orphan, "-n", 1) == b"first\n"


def test_orphans_are_adopted(path, orphan):
    refused(3, "orphans", "adopt", path, "orders.qew.9", "orders.qew.8", match="no orphan is called 'orders.qew.8'")
    assert done("orphans", "adopt", path, "orders.qew.9") == b"orders.qew.9: 6 records appended to the queue\n"
    assert content(path) == [b"mine", *RECORDS]
    assert not orphan.exists()
    assert run("orphans", "list", path).stderr == "qewqew: no orphans\n"


def test_orphans_are_set_aside(path, orphan):
    assert json.loads(done("orphans", "aside", path, orphan, "--json"))[0]["file"] == str(orphan)
    assert not orphan.exists()
    assert (path.parent / "orders.qew.damaged" / "1" / "orders.qew.9").is_file()
    assert content(path) == [b"mine"]


def test_the_progress_of_verify_ends_where_it_should(path):
    with Queue(path, chunk_size=1 << 20) as q:
        q.put_many([b"x" * 1000] * 3000)
        q.lease("run", max_records=1500)
        seen: list[tuple[int, int]] = []
        assert q.verify(lambda *progress: seen.append(progress)).ok
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == (3000 * 1002, 3000 * 1002)


# Batches


def test_batches_lists_them(path):
    fill(path, [b"1", b"2", b"3"])
    first = lease(path, "run 1", max_records=1)
    second = lease(path, "run 2", max_records=2, lease_timeout=3600)
    done("nack", path, first, "--reason", "no [bold]luck[/]\nat all")
    found = json.loads(done("batches", path, "--json"))
    keys = ["id", "key", "state", "attempt", "records", "bytes", "reason", "created", "expires", "due", "manifest"]
    assert [list(one) for one in found] == [keys, keys]
    assert [(one["id"], one["key"], one["state"], one["records"]) for one in found] == [
        (first, "run 1", "returned", 1),
        (second, "run 2", "leased", 2),
    ]
    assert found[0]["reason"] == "no [bold]luck[/]\nat all"
    assert found[0]["expires"] is None
    assert datetime.fromisoformat(found[1]["expires"]) > datetime.now().astimezone()
    assert Path(found[1]["manifest"]).is_file()
    lines = done("batches", path).decode().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"{first}  run 1  returned        1        1    1 B  ")
    assert lines[1].endswith(r"no [bold]luck[/]\nat all")


def test_a_queue_without_batches_says_so(path):
    fill(path, [b"1"])
    assert "no batch is leased" in run("batches", path).stderr
    assert "no dead letters" in run("dead", "list", path).stderr
    assert done("batches", path, "--json") == done("dead", "list", path, "--json") == b"[]\n"


def test_ack_ends_batches(path):
    fill(path, [b"1", b"2", b"3"])
    ids = [lease(path, f"run {number}", max_records=1) for number in range(3)]
    assert done("ack", path, ids[0]).decode() == f"{ids[0]} is acked\n"
    assert done("ack", path, ids[0]).decode() == f"{ids[0]} is acked\n"  # twice is no error
    ended = json.loads(done("ack", path, ids[1], ids[2], ids[1], "--json"))
    assert [(one["id"], one["state"]) for one in ended] == [(ids[1], "acked"), (ids[2], "acked")]
    assert done("batches", path, "--json") == b"[]\n"


def test_ack_does_nothing_if_a_batch_is_not_there(path):
    fill(path, [b"1"])
    batch_id = lease(path, "run")
    refused(3, "ack", path, batch_id, "orders-0123456789abcdef", match="BatchNotFound")
    assert inspect(path).leased == 1


def test_ack_drops_no_records_that_their_owner_wants_to_keep(path):
    with Queue(path, retention=timedelta(days=400), retention_bytes=1 << 40) as q:
        q.put_many([b"1", b"2"])
        first, second = q.lease("run 1", max_records=1), q.lease("run 2", max_records=1)
        first.ack()
    log = Path(f"{path}.wal")
    assert log.exists()
    done("ack", path, second.id)
    assert list(first) == [b"1"]
    assert list(second) == [b"2"]


def test_retry_makes_a_returned_batch_due_now(path):
    with Queue(path, retry_delay=3600) as q:
        q.put(b"x")
        batch = q.lease("run 1")
        batch.nack("the table is away")
    assert re.search(r"returned, due in (59 minutes|1 hour)", done("batches", path).decode())
    assert re.search(r"returned +1 batch, 1 not due yet: the first in (59 minutes|1 hour)\n", done("stat", path).decode())
    (listed,), shown = json.loads(done("batches", path, "--json")), json.loads(done("stat", path, "--json"))
    assert (shown["returned"], shown["delayed"], shown["next_due"]) == (1, 1, listed["due"])
    assert b"qewqew_delayed{" in done("metrics", path)
    assert done("retry", path, batch.id).decode() == f"{batch.id} is returned\n"
    assert json.loads(done("stat", path, "--json"))["delayed"] == 0
    with Queue(path) as q:
        assert q.lease("run 2").id == batch.id
    refused(1, "retry", path, batch.id, match="BatchConflict")


def test_nack_returns_batches_and_at_last_sends_them_to_the_dead_letters(path):
    fill(path, [b"1", b"2"])
    batch_id = lease(path, "run")
    assert done("nack", path, batch_id, "--reason", "why").decode() == f"{batch_id} is returned\n"
    refused(1, "nack", path, batch_id, match="BatchConflict")
    assert lease(path, "run") == batch_id
    ended = json.loads(done("nack", path, batch_id, "--max-attempts", 2, "--json"))
    assert ended[0]["state"] == "dead"
    assert inspect(path).dead == 1


@pytest.fixture
def dead(path):
    fill(path, RECORDS)
    batch_id = lease(path, "run")
    with Queue(path) as q:
        q.batch(batch_id).to_dead_letters("cannot be read")
    return batch_id


def test_dead_letters_are_listed_and_shown(path, dead):
    assert json.loads(done("dead", "list", path, "--json"))[0]["id"] == dead
    assert "cannot be read" in done("dead", "list", path).decode()
    assert done("dead", "show", path, dead, "--null") == b"".join(one + b"\0" for one in RECORDS)
    assert done("dead", "show", path, dead, "-n", 1) == b"first\n"
    assert len(done("dead", "show", path, dead, "--json").splitlines()) == len(RECORDS)


def test_a_dead_batch_goes_back(path, dead):
    assert done("dead", "return", path, dead).decode() == f"{dead} is returned\n"
    assert lease(path, "another run") == dead
    refused(1, "dead", "return", path, dead, match="BatchConflict")
    refused(1, "dead", "show", path, dead, match="is leased, not dead")
    refused(1, "dead", "drop", path, dead, "--yes", match="is leased, not dead")


def test_all_dead_batches_go_back_or_those_of_one_reason(path):
    with Queue(path) as q:
        q.put_many(RECORDS)
        for number, reason in enumerate(["no table", "the cluster was gone", "the cluster was full"]):
            q.lease(f"run {number}", max_records=1).to_dead_letters(reason)
    gone = [batch["id"] for batch in json.loads(done("dead", "list", path, "--reason", "cluster", "--json"))]
    assert len(gone) == 2
    for wrong in (["--all", gone[0]], [], ["--reason", "cluster"], ["--reason", "cluster", gone[0]]):
        refused(2, "dead", "return", path, *wrong, match="give the ids of the batches, or --all")
    returned = json.loads(done("dead", "return", path, "--all", "--reason", "cluster", "--json"))
    assert [(batch["id"], batch["state"]) for batch in returned] == [(id, "returned") for id in gone]
    result = run("dead", "return", path, "--all", "--reason", "cluster")
    assert (result.exit_code, "no dead letter has 'cluster' in its reason" in result.stderr) == (0, True)
    assert len(done("dead", "return", path, "--all").splitlines()) == 1
    assert json.loads(done("dead", "return", path, "--all", "--json")) == []
    with Queue(path) as q:
        assert (len(q.batches()), q.dead()) == (3, [])


def test_dead_batches_are_found_by_the_cause_that_they_share(path):
    with Queue(path) as q:
        q.put_many(RECORDS)
        for number, reason in enumerate(["Path /lake/1 is there", "Path /lake/2 is there", "no table"]):
            q.lease(f"run {number}", max_records=1).to_dead_letters(reason)
    assert len(json.loads(done("dead", "list", path, "--reason", "Path … is there", "--json"))) == 2


def test_a_dead_batch_is_dropped_only_on_purpose(path, dead):
    refused(2, "dead", "drop", path, dead, match="--yes")
    assert inspect(path).dead == 1
    assert json.loads(done("dead", "drop", path, dead, "--yes", "--json")) == {"id": dead, "records": len(RECORDS)}
    assert not Path(f"{path}.wal").exists()
    refused(3, "dead", "drop", path, dead, "--yes", match="there is no queue or topic here")


# Errors and exit codes

WITHOUT_BATCH = [["get"], ["peek"], ["stat"], ["verify"], ["repair", "--yes"], ["batches"], ["dead", "list"], ["orphans", "list"]]
WITH_BATCH = [
    *(["ack"], ["nack"], ["retry"], ["dead", "show"], ["dead", "return"], ["dead", "drop", "--yes"]),
    *(["orphans", "show"], ["orphans", "adopt"], ["orphans", "aside"]),
]


@pytest.mark.parametrize("command", [*WITHOUT_BATCH, *WITH_BATCH], ids=" ".join)
def test_where_there_is_no_queue_none_is_made(path, command):
    refused(3, *command, path, *(["id"] if command in WITH_BATCH else []), match="there is no queue")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("command", [*WITHOUT_BATCH, *WITH_BATCH, ["put"]], ids=" ".join)
def test_a_path_that_cannot_be_a_queue_is_named(tmp_path, command):
    more = ["id"] if command in WITH_BATCH else []
    refused(1, *command, tmp_path / "no" / "q", *more, match=f"BadPath: {tmp_path / 'no' / 'q'}: there is no directory")
    refused(1, *command, tmp_path, *more, match="this is a directory")


@pytest.mark.parametrize(
    "command", [one for one in [*WITHOUT_BATCH, *WITH_BATCH] if one not in (["stat"], ["peek"])], ids=" ".join
)
def test_a_locked_queue_is_4(path, command):
    more = ["id"] if command in WITH_BATCH else []
    with Queue(path) as q:
        q.put(b"x")
        refused(4, *command, path, *more, "--lock-timeout", 0, match="Locked")


@pytest.mark.parametrize("command", [one for one in WITHOUT_BATCH + WITH_BATCH if one[0] != "repair"], ids=" ".join)
def test_a_damaged_queue_is_5(path, command):
    fill(path, [b"x"])
    damage(Path(f"{path}.wal"), 40)
    result = run(*command, path, *(["id"] if command in WITH_BATCH else []))
    assert result.exit_code == 5
    assert "qewqew repair" in result.stderr


def test_damaged_records_are_5(path, dead):
    fill(path, RECORDS)
    damage(Path(f"{path}.30001"))
    for command in ("get", "peek"):
        refused(5, command, path, match="Corrupt")
    damage(next(Path(f"{path}.dead").glob("*/orders.qew.*")))
    refused(5, "dead", "show", path, dead, match="Corrupt")
    next(Path(f"{path}.dead").glob("*/manifest.json")).write_text("{")
    refused(5, "dead", "show", path, dead, match="BadManifest")


@pytest.mark.parametrize("bound", [("--max-records", 2), ("--max-bytes", 2), ("--min-free-bytes", 1 << 60)])
def test_a_full_queue_or_disk_is_6(path, bound):
    refused(6, "put", path, *bound, "1", "2", "3", match="Full: ")
    assert inspect(path).records == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["put"],
        ["put", "PATH", "--batch-size", 0, "x"],
        ["put", "PATH", "--lines", "--null"],
        ["put", "PATH", "--whole", "x"],
        ["put", "PATH", "-f", "-", "x"],
        ["put", "PATH", "--chunk-size", 3, "x"],
        ["put", "PATH", "--log-bytes", 0, "x"],
        ["put", "PATH", "--key", "a/b", "x"],
        ["put", "PATH", "--lock-timeout", "nan", "x"],
        ["get", "PATH", "-n", 0],
        ["get", "PATH", "--all", "-n", 3],
        ["get", "PATH", "--timeout", -1],
        ["peek", "PATH", "PATH"],
        ["ack", "PATH"],
        ["stat"],
        ["dead", "nonsense", "PATH"],
        ["dead", "show", "PATH"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_wrong_usage_is_2(path, arguments):
    result = run(*(path if one == "PATH" else one for one in arguments))
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""
    assert not list(path.parent.iterdir())


def test_a_file_that_cannot_be_read_is_an_error_and_no_queue_is_made(path, tmp_path):
    refused(1, "put", path, "-f", tmp_path / "no", match=f"BadPath: {tmp_path / 'no'}: the file cannot be used: No such file")
    refused(1, "put", path, "-f", tmp_path, match=f"BadPath: {tmp_path}: a directory is in the way of this file")
    assert not list(tmp_path.iterdir())


def test_the_exit_codes_are_documented():
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    help_text = done("--help").decode()
    for code in {code for _, code in EXIT_CODES} | {0, 1, 130, 141}:
        assert f"| {code} |" in text
        assert f" {code} " in help_text
    for kind, code in EXIT_CODES:
        row = next(line for line in text.splitlines() if line.startswith(f"| {code} |"))
        assert f"`{kind.__name__}`" in row


def test_help_and_version():
    assert done("--version").startswith(b"qewqew 0.")
    assert run().exit_code == run("dead").exit_code == 2
    for command in ("put", "get", "peek", "ls", "stat", "verify", "repair", "batches", "ack", "nack", "retry"):
        assert b"Usage: qewqew " + command.encode() in done(command, "--help")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_only_the_command_line_needs_typer_and_rich():
    code = "import sys, qewqew_core; print([name for name in ('typer', 'rich', 'qewqew_core.cli.main') if name in sys.modules])"
    assert python(code).stdout == "[]\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_what_is_missing_is_named_with_what_to_install(missing):
    result = python(f"import sys; sys.modules[{missing!r}] = None; from qewqew_core.cli.main import main; main()")
    assert result.returncode == 1
    assert result.stderr.startswith(f"qewqew: the command line needs {missing}")
    assert result.stderr.endswith("which is not installed: pip install 'qewqew[cli]'\n")
