"""What an adversarial reading of the code has found: each a small window, a leak, or a promise that was too large."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from disk import JournalDisk, image

import qewqew_core.topic.reader_inspection
from qewqew_core import BadArgument, BadPath, Closed, DiskFull, Message, Topic, inspect_reader
from qewqew_core.disk.files import Files
from qewqew_core.limits import LIMITS
from qewqew_core.topic import topic_log


class Interrupted(Files):
    """Ctrl-C at the next sync of a block."""

    armed = False

    def sync(self, fd: int) -> None:
        if self.armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".zbus"):
            self.armed = False
            raise KeyboardInterrupt
        super().sync(fd)


@pytest.mark.parametrize("size", [100, 300_000])
def test_an_append_after_one_that_was_interrupted_in_a_new_block_is_stored(tmp_path: Path, size: int) -> None:
    files = Interrupted()
    with Topic(tmp_path / "t", block_size=1000, _files=files) as topic:
        topic.append(b"x" * 1000)
        files.armed = True
        with pytest.raises(KeyboardInterrupt):
            topic.append(b"a" * 300_000)
        assert topic.append(b"b" * size) == 1  # it once went into the file that the interrupted one had made, and was unlinked
        assert [len(one.body) for one in topic] == [1000, size]
    with Topic(tmp_path / "t") as topic:
        assert [len(one.body) for one in topic] == [1000, size]


@pytest.mark.parametrize("end", ["dead", "acked"])
def test_a_power_cut_after_a_trim_leaves_batches_that_are_kept_whole(tmp_path: Path, end: str) -> None:
    disk = JournalDisk(str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    with Topic(tmp_path / "disk" / "t", block_size=1000, delete_committed=True, _files=disk) as topic:
        with topic.reader("r") as reader:
            topic.append_many([b"A" * 500] * 2)
            batch = reader.lease("k")
            assert batch is not None
            batch.to_dead_letters("bad") if end == "dead" else batch.ack()
            topic.append_many([b"B" * 500] * 2)  # a new block: the one before it is removed
        assert len(os.listdir(tmp_path / "disk" / "t" / "data")) < 3
        calls = list(disk.calls)
    for seed in range(20):
        found = tmp_path / str(seed)
        image(calls, str(tmp_path / "disk"), found, random.Random(seed))
        with Topic(found / "t") as topic:
            assert topic.verify().problems == []


def test_memory_is_bounded_when_large_messages_that_were_given_back_come_again(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", sync="never") as topic, topic.reader("r") as reader:
        for _ in range(50):
            topic.append(b"x" * 1_000_000)
        while reader.read_many(1000, max_bytes=2_000_000):
            pass
        reader.nack()
        tracemalloc.start()
        try:
            assert len(reader.read_many(1000, max_bytes=2_000_000)) == 2
            reader.nack()
            batch = reader.lease("k", max_bytes=2_000_000)
            assert batch is not None
            assert len(batch) == 2
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()


def test_messages_that_were_given_back_side_by_side_are_leased_as_one_segment(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", sync="never") as topic, topic.reader("r") as reader:
        topic.append_many([b"%d" % number for number in range(1000)])
        reader.read_many(500)
        reader.nack()
        batch = reader.lease("k", max_records=600)
        assert batch is not None
        assert list(batch) == [b"%d" % number for number in range(600)]
        assert Path(batch.manifest_path).read_text().count('"file"') == 2
        batch.put_back()
        assert [one.number for one in reader.read_many(2000)] == list(range(1000))


@pytest.mark.parametrize("act", ["nack", "close"])
def test_what_a_session_is_about_to_commit_cannot_be_given_back(tmp_path: Path, act: str) -> None:
    with Topic(tmp_path / "t") as topic:
        reader = topic.reader("r")
        topic.append(b"m")
        with topic.session() as session:
            session.read(reader)
            session.append(b"out")
            writer = topic.writer()
            append = writer.append

            def meanwhile(*arguments: Any) -> int:
                """Another thread, between the reader's note and the commit."""
                thread = threading.Thread(target=getattr(reader, act))
                thread.start()
                thread.join()
                return append(*arguments)

            writer.append = meanwhile  # type: ignore[method-assign]
            assert session.commit() == 1
            writer.append = append  # type: ignore[method-assign]
        reader.close()
        with topic.reader("r") as again:
            assert [one.body for one in again.read_many(5)] == [b"out"]


def test_what_nobody_has_committed_stays_when_the_only_reader_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic(tmp_path / "t", block_size=1000, delete_committed=True, sync="never") as topic:
        topic.reader("r").close()
        for _ in range(6):
            topic.append(b"x" * 600)
        effective_state = qewqew_core.topic.reader_inspection.effective_state

        def gone(files: Files, view: Any, name: str) -> Any:
            monkeypatch.undo()
            topic.delete_reader(name)
            return effective_state(files, view, name)

        monkeypatch.setattr(qewqew_core.topic.reader_inspection, "effective_state", gone)
        assert topic.trim() == 0
        assert len(topic) == 6


def test_an_append_to_a_session_that_raised_for_want_of_room_is_not_committed(tmp_path: Path) -> None:
    class FullDisk(Files):
        full = True

        def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
            if self.full and ".spill" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(fd, data, offset)

    files = FullDisk()
    with Topic(tmp_path / "t", _files=files, sync="never") as topic, topic.session() as session:
        session.append(b"small")
        with pytest.raises(DiskFull):
            session.append(b"x" * (17 << 20))
        files.full = False
        assert session.commit() == 1
        assert [one.body for one in topic] == [b"small"]


def test_an_iteration_goes_on_at_the_oldest_message_where_blocks_are_removed_before_it(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", block_size=1000, max_records=20, sync="never") as topic:
        for number in range(20):
            topic.append(b"%03d" % number + b"x" * 500)
        messages = iter(topic)
        found = [next(messages).number]
        for number in range(20, 60):
            topic.append(b"%03d" % number + b"x" * 500)
        found += [one.number for one in messages]
        assert found[-1] == 59
        assert found == sorted(set(found))
        assert set(range(topic.stats().first, 60)) <= set(found)


def test_the_oldest_message_that_matches_is_found_behind_many_that_do_not(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", sync="never") as topic, topic.reader("r", "b") as reader:
        topic.append_many([Message(b"x" * 1000, "a")] * 200)
        topic.append(b"y", tag="b")
        assert reader.stats().records == 1
        assert reader.stats().oldest is not None
        assert inspect_reader(tmp_path / "t", "r").oldest == reader.stats().oldest


def test_readers_that_were_deleted_or_cannot_be_opened_keep_no_descriptors(tmp_path: Path) -> None:
    with Topic(tmp_path / "t") as topic:
        topic.append(b"x")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            reader = topic.reader("r")
            topic.delete_reader("r")
            with pytest.raises(Closed):
                reader.read()
            reader.close()
        os.symlink("/nowhere", tmp_path / "t" / "state" / "q.lock")
        for _ in range(10):
            with pytest.raises(BadPath, match=r"q\.lock"):
                topic.reader("q")
        assert len(os.listdir("/proc/self/fd")) == before


def open_files(below: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(str(below))]


@pytest.mark.req("ZD13")
def test_nothing_is_mapped_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", block_size=500) as topic, topic.reader("r") as reader, topic.session() as session:
        for _ in range(50):
            topic.append(b"x" * 200)
        list(reader)
        reader.lease("k")
        session.append(bytes(17 << 20))
        session.commit()
        topic.stats()
        topic.verify()
        next(iter(topic))
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert len(open_files(tmp_path)) < 30
        topic.delete_reader("r")
        assert (tmp_path / "t" / "reader").is_dir()
    assert open_files(tmp_path) == []
    with pytest.raises(BadArgument):
        Topic(tmp_path / "t", dialect="C")
    assert open_files(tmp_path) == []


def test_the_lock_file_of_a_topic_is_not_followed_to_another_file(tmp_path: Path) -> None:
    Topic(tmp_path / "t").close()
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (tmp_path / "t" / "t.lock").unlink()
    os.symlink(precious, tmp_path / "t" / "t.lock")
    with pytest.raises(BadPath, match=r"t\.lock"):
        Topic(tmp_path / "t")
    assert precious.read_bytes() == b"mine"


def test_a_second_thread_with_the_same_key_waits_until_the_first_one_is_durable(tmp_path: Path) -> None:
    class Slow(Files):
        hold = threading.Event()
        armed = False

        def sync(self, fd: int) -> None:
            if self.armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
                self.hold.wait(300)
            super().sync(fd)

    files = Slow()
    with Topic(tmp_path / "t", _files=files) as topic:
        topic.append(b"first")
        files.armed = True
        done: list[int] = []
        threads = [threading.Thread(target=lambda: done.append(topic.append_many([b"x"], key="k"))) for _ in range(2)]
        for thread in threads:
            thread.start()
        threads[1].join(0.3)
        assert done == []  # neither has returned: what a power cut can take is no answer
        files.hold.set()
        for thread in threads:
            thread.join()
        assert done == [1, 1]
        assert len(topic) == 2


def test_small_commits_are_not_all_applied_again_by_each_opening_however_few_each_has_made(tmp_path: Path) -> None:
    """A thousand are some 50 KB, which the next opening reads at once, and applied in 18 ms."""
    log, frames = tmp_path / "t" / "t.wal", []
    for commits in [1] * 80 + [200]:
        with Topic(tmp_path / "t", sync="never") as topic:
            for _ in range(commits):
                topic.append(b"x")
        frames.append(topic_log.replay(log.read_bytes(), str(log)).frames)
    assert max(frames) <= LIMITS.log_frames_at_close + 1  # the checkpoint
    assert frames[-1] == 1
