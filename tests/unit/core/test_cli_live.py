"""``qewqew tail`` and ``top``: what they show of queues and topics in use, without a lock."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import done, run
from stopping import stop

from qewqew_core import Message, Queue, Topic

TIMEOUT = 300


def lines(*arguments: object) -> list[bytes]:
    return done(*arguments).split(b"\n")[:-1]


class Following:
    """A command that goes on, and the lines that it has printed."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "qewqew_core", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines: list[bytes] = []
        self._thread = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stdout.readline, b"")))
        self._thread.start()

    def until(self, *lines: bytes) -> None:
        end = time.monotonic() + TIMEOUT
        while self.lines[-len(lines) :] != [line + b"\n" for line in lines]:
            assert time.monotonic() < end, self.lines
            time.sleep(0.02)


@contextlib.contextmanager
def following(*arguments: object) -> Iterator[Following]:
    one = Following(*arguments)
    try:
        yield one
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(TIMEOUT) == 130
        assert b"Traceback" not in one.process.stderr.read()
    finally:
        one.process.kill()
        one.process.wait()
        one._thread.join()
        one.process.stdout.close()
        one.process.stderr.close()


@pytest.fixture
def queue(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many([b"%d" % number for number in range(2500)])
        yield q


@pytest.fixture
def topic(tmp_path):
    with Topic(tmp_path / "t", block_size=20_000) as t:
        t.append_many([Message(b"%d" % number, f"tag.{number % 100}") for number in range(1000)])
        yield t


def state(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


# tail


@pytest.mark.parametrize("number", [0, 1, 10, 700, 2500, 9999])
def test_tail_prints_the_newest_records_of_a_queue_in_use(tmp_path, queue, number):
    before = state(tmp_path)
    assert lines("tail", queue.path, "-n", number) == [b"%d" % one for one in range(2500)][2500 - min(number, 2500) :]
    assert state(tmp_path) == before


def test_tail_does_not_show_what_was_taken(queue):
    queue.get_many(2495)
    assert lines("tail", queue.path) == [b"2495", b"2496", b"2497", b"2498", b"2499"]


@pytest.mark.parametrize("number", [0, 1, 10, 700, 9999])
def test_tail_prints_the_newest_messages_of_a_topic_in_use(tmp_path, topic, number):
    before = state(tmp_path)
    assert lines("tail", topic.path, "-n", number) == [b"%d" % one for one in range(1000)][1000 - min(number, 1000) :]
    assert state(tmp_path) == before


@pytest.mark.parametrize(("number", "expected"), [(0, []), (1, [907]), (3, [707, 807, 907]), (99, range(7, 1000, 100))])
def test_tail_counts_only_messages_that_match(topic, number, expected):
    assert lines("tail", topic.path, "-n", number, "--filter", "tag.7") == [b"%d" % one for one in expected]
    assert lines("tail", topic.path, "-n", number, "--filter", "no.such") == []


def test_tail_prints_json(queue, topic):
    assert json.loads(lines("tail", queue.path, "-n", 1, "--json")[0]) == {"record": "2499"}
    assert json.loads(lines("tail", topic.path, "-n", 1, "--json")[0])["number"] == 999


def test_tail_follows_a_topic_through_new_blocks_and_moves_no_reader(tmp_path, topic):
    with topic.reader("r") as r, following("tail", topic.path, "-n", 1, "-f") as one:
        one.until(b"999")
        topic.append(b"next", tag="x")
        one.until(b"999", b"next")
        topic.append_many([b"y" * 500] * 100)
        topic.append(b"last")
        one.until(b"y" * 500, b"last")
        assert len(one.lines) == 103
        assert r.read().body == b"0"
    assert list((tmp_path / "t" / "reader").iterdir()) == [tmp_path / "t" / "reader" / "r.rdx"]


def test_tail_follows_with_a_filter(topic):
    with following("tail", topic.path, "-n", 1, "-f", "--filter", "new.*") as one:
        time.sleep(0.5)
        topic.append(b"no", tag="old.1")
        topic.append(b"yes", tag="new.1")
        one.until(b"yes")
        assert one.lines == [b"yes\n"]


def test_tail_says_what_was_removed_before_it_came_there(tmp_path):
    with Topic(tmp_path / "t", block_size=1, max_records=1) as topic:
        topic.append(b"first")
        one = Following("tail", topic.path, "-f")
        one.until(b"first")
        stop(one.process.pid)
        for number in range(50):
            topic.append(b"%d" % number)
        topic.trim()
        one.process.send_signal(signal.SIGCONT)
        one.until(b"49")
        one.process.send_signal(signal.SIGINT)
        _, errors = one.process.communicate(timeout=TIMEOUT)
        one._thread.join()
    assert b"were removed from the topic before they could be read" in errors
    assert one.process.returncode == 130


def test_tail_follows_a_queue_whose_chunks_come_and_go(tmp_path):
    with following("tail", tmp_path / "q", "-f") as one:  # it is not even there
        time.sleep(0.5)
        with Queue(tmp_path / "q", chunk_size=4096) as q:
            q.put(b"first")
            one.until(b"first")
            q.put_many([b"%d" % number for number in range(3000)])
            one.until(b"2999")
            assert one.lines == [b"first\n", *(b"%d\n" % number for number in range(3000))]
            q.get_many(2000)
            q.put(b"more")
            one.until(b"2999", b"more")
            q.get_many(5000)
            q.put(b"in the chunk that was begun anew")
            one.until(b"more", b"in the chunk that was begun anew")
            q.lease("run")
            q.put(b"behind a batch")
            one.until(b"in the chunk that was begun anew", b"behind a batch")
            q.clear()
        with Queue(tmp_path / "q") as q:
            q.put(b"again")
            one.until(b"behind a batch", b"again")


def test_tail_says_when_there_is_nothing_and_what_does_not_go_together(tmp_path, queue):
    assert run("tail", tmp_path / "no").exit_code == 3
    assert run("tail", tmp_path / "no" / "q", "-f").exit_code == 1
    assert run("tail", tmp_path).exit_code == 1
    result = run("tail", queue.path, "--filter", "a")
    assert result.exit_code == 2
    assert "this is a queue, and --filter is only for a topic" in result.stderr


# top


def test_top_shows_queues_and_topics_and_what_cannot_be_read(tmp_path, queue, topic):
    queue.lease("run", max_records=100)
    with topic.reader("r"):
        pass
    (tmp_path / "below").mkdir()
    with Queue(tmp_path / "below" / "damaged") as q:
        q.put(b"x")
    (tmp_path / "below" / "damaged.wal").write_bytes(b"QEWQLOG1" + bytes(20))
    rows = [line.decode() for line in lines("top", tmp_path, "--once")]
    assert [line.split()[:3] for line in rows] == [
        *(["path", "kind", "records"], ["q", "queue", "2,400"], ["below/damaged", "queue", "?"], ["t", "topic", "1,000"])
    ]
    assert rows[2].endswith("the head of the transaction log is damaged")
    found = json.loads(lines("top", tmp_path, "--once", "--json")[0])
    assert list(found) == ["time", "complete", "found"]
    one = {row["path"]: row for row in found["found"]}
    assert (one["q"]["kind"], one["q"]["records"], one["q"]["leased"]) == ("queue", 2400, 1)
    assert (one["t"]["kind"], one["t"]["lag"], one["t"]["per_second"]) == ("topic", 1000, None)
    assert one["below/damaged"]["error"].startswith("Corrupt: ")


def test_top_goes_on_and_tells_how_fast_it_goes(tmp_path, queue, topic):
    with following("top", tmp_path, "--json", "--interval", 0.1) as one:
        end = time.monotonic() + TIMEOUT
        seen: set[str] = set()
        while seen != {"q", "t"}:
            queue.put(b"x")
            topic.append(b"x")
            time.sleep(0.05)
            seen.update(
                row["path"] for line in list(one.lines) for row in json.loads(line)["found"] if (row["per_second"] or 0) > 0
            )
            assert time.monotonic() < end
    assert all("counter" not in row for line in one.lines for row in json.loads(line)["found"])


def test_top_draws_a_table_on_a_terminal_and_gives_it_back(tmp_path, queue):
    terminal, other = os.openpty()
    command = [sys.executable, "-m", "qewqew_core", "top", str(tmp_path), "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=os.environ | {"TERM": "xterm"})
    os.close(other)
    shown = b""
    while shown.count(b"2,500") < 2:
        shown += os.read(terminal, 10_000)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # EIO: the process has ended
        while data := os.read(terminal, 10_000):
            shown += data
    os.close(terminal)
    assert process.wait(TIMEOUT) == 130
    assert b"Traceback" not in shown
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1


def test_top_needs_a_directory(tmp_path, queue):
    for path in (tmp_path / "no", queue.path):
        result = run("top", path)
        assert result.exit_code == 1
        assert str(path) in result.stderr
