"""What a crash amid sessions leaves of the log, beside it and behind it, and in which order a commit writes.

That nothing is lost or repeated, wherever it stops and whatever fails, show test_crash.py and test_failing_calls.py.
"""

from __future__ import annotations

import random
import shutil

import pytest
from disk import JournalDisk, NoSync, image
from plain import crashed, is_plain, numbers
from work import kind as kind  # a fixture

from qewqew_core import Queue
from qewqew_core.limits import LIMITS


@pytest.mark.parametrize("kind", ["sessions"], indirect=True)
@pytest.mark.req("S15", "T5", "T9")
def test_the_log_is_replaced_by_a_rename_of_a_file_that_is_on_disk_and_each_step_may_be_the_last(tmp_path, kind, every):
    work = kind.done(tmp_path / "work", "commit", 20)
    calls, new = work.disk.calls, str(tmp_path / "work" / "q.wal.tmp")
    replaced = [number for number, call in enumerate(calls) if call.kind == "rename" and call.path == new]
    assert len(replaced) > 3
    for number in replaced:
        made = max(at for at in range(number) if calls[at].kind == "link" and calls[at].path == new)
        node = calls[made].node
        assert [call.kind for call in calls[made:number] if call.node == node] == ["link", "write", "sync"]
        assert calls[number].target == str(tmp_path / "work" / "q.wal")
        following = next(call for call in calls[number + 1 :] if call.path != str(tmp_path / "work" / "q.stamp"))
        assert (following.kind, following.path) == ("sync_directory", str(tmp_path / "work"))
        for stop in every(range(made, number + 3), quick=3):
            for chance in range(3):
                image(calls[:stop], work.disk.root, tmp_path / "image", random.Random(f"{stop}.{chance}") if chance else None)
                work.check(tmp_path / "image", work.allowed_at(stop), f"stopped after call {stop}, chance {chance}")
                shutil.rmtree(tmp_path / "image")


# One crash


@pytest.mark.req("T5")
@pytest.mark.parametrize("leftover", ["empty", "half", "garbage", "an older one"])
def test_what_a_crash_has_left_of_a_new_log_is_removed(tmp_path, leftover):
    with Queue(tmp_path / "q", chunk_size=64, _files=NoSync()) as q:
        q.put_many(numbers(0, 3))
        older = (tmp_path / "q.wal").read_bytes()
        with q.session() as session:
            session.put_many(numbers(3, 30))
        path = crashed(tmp_path)
    log, new = path.with_name("q.wal").read_bytes(), path.with_name("q.wal.tmp")
    new.write_bytes({"empty": b"", "half": log[: len(log) // 2], "garbage": b"\xff" * 500, "an older one": older}[leftover])
    with Queue(path, _files=NoSync()) as q:
        assert list(q) == numbers(0, 30)
        assert not new.exists()


@pytest.mark.req("S11", "T6")
def test_a_torn_tail_is_cut_at_any_length_and_commits_go_on_behind_the_cut(tmp_path, every):
    with Queue(tmp_path / "q", chunk_size=4096, _files=NoSync()) as q:
        q.put_many(numbers(0, 5))
        before = (tmp_path / "q.wal").read_bytes().rstrip(b"\0")
        with q.session() as session:
            session.get_many(2)
            session.put_many(numbers(5, 8))
        path = crashed(tmp_path)
    content = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    log = path.with_name("q.wal")
    whole = content[log].rstrip(b"\0")
    assert 40 < len(whole) - len(before) < 200
    for end in [*every(range(len(before), len(whole)), quick=6), len(whole)]:
        for file, data in content.items():
            file.write_bytes(data)
        log.write_bytes(whole[:end])
        expected = numbers(2, 8) if end == len(whole) else numbers(0, 5)
        for _ in range(2):
            with Queue(path, chunk_size=4096, _files=NoSync()) as q, q.session() as session:
                assert list(q) == expected
                session.put(b"new")
            expected.append(b"new")


@pytest.mark.req("S12", "T3")
@pytest.mark.parametrize("chunk_size", [64, 4096])
def test_where_to_write_follows_from_the_log_and_the_records_alone(tmp_path, chunk_size):
    """In a crash image the pointers of the chunk files still say that they are empty, and there is no other file."""
    with Queue(tmp_path / "q", chunk_size=chunk_size, _files=NoSync()) as q:
        q.put_many(numbers(0, 30))
        with q.session() as session:
            session.get_many(12)
        path = crashed(tmp_path)
    names = {file.name for file in path.parent.iterdir()}
    assert {"q", "q.wal"} <= names
    assert all(name.removeprefix("q.").isdecimal() for name in names - {"q", "q.reserve", "q.stamp", "q.wal"})
    assert {file.read_bytes()[:10] for file in path.parent.glob("q.[0-9]*")} == {b"\0\0\0\x0a\0\0\0\x0a\0\0"}
    with Queue(path, chunk_size=chunk_size) as q:
        with q.session() as session:
            session.put_many(numbers(30, 60))
        assert list(q) == numbers(12, 60)
    is_plain(path, numbers(12, 60))


# Order of the calls


@pytest.mark.req("T20")
@pytest.mark.parametrize("spill", [60, 1 << 20])
def test_a_commit_syncs_data_then_log_and_the_directory_after_what_was_made_or_renamed(tmp_path, monkeypatch, spill):
    """From the journal of calls; what a power cut then leaves is shown above."""
    monkeypatch.setattr(LIMITS, "spill_bytes", spill)
    monkeypatch.setattr(LIMITS, "inline_bytes", {"commit": 70, "never": 70})
    disk = JournalDisk(str(tmp_path))
    with Queue(tmp_path / "q", chunk_size=64, _files=disk) as q, q.session() as session:
        q.put_many(numbers(0, 5))
        log = next(call.node for call in disk.calls if call.kind == "link" and call.path == str(tmp_path / "q.wal.tmp"))
        begin = len(disk.calls)
        for number in range(100, 140):
            session.put(b"%d" % number)
        session.get()
        start = len(disk.calls)
        session.commit()
        calls = disk.calls[start:]
    made = {call.node for call in disk.calls[begin:] if call.kind == "link"}
    assert len(made) > 3
    frame = next(number for number, call in enumerate(calls) if (call.kind, call.node) == ("write", log))
    assert [call.kind for call in calls[frame:] if call.node == log] == ["write", "sync"]
    journal = [*enumerate(disk.calls[: start + frame])]
    for node in made:
        writes = [number for number, call in journal if call.node == node and call.kind in ("write", "allocate")]
        syncs = [number for number, call in journal if call.node == node and call.kind == "sync"]
        assert not writes or max(syncs) > max(writes), "payload is on disk before the commit that refers to it"
    names = [number for number, call in journal if call.kind in ("link", "rename") and call.node != log]
    directories = [number for number, call in journal if (call.kind, call.path) == ("sync_directory", str(tmp_path))]
    assert max(directories) > max(names)
    assert any(call.kind == "rename" for call in calls) == (spill == 60)
