"""Real processes on one topic: one writer, readers that it never waits for, and killed ones lose and repeat nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qewqew_core import Closed, Empty, Locked, Topic, inspect_reader
from qewqew_core.disk.journal import Journal
from qewqew_core.formats.tags import Filter

TIMEOUT = 300  # seconds after which something hangs


@pytest.fixture(autouse=True)
def alarm(request) -> Iterator[None]:
    """A process that waits for ever is a failure of its test, and not the end of all tests."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done after {TIMEOUT} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(0 if request.node.get_closest_marker("soak") else TIMEOUT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def python(code: str, *arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options)


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """What is added to the list does not outlive the test."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def whole(process: subprocess.Popen[str]) -> list[str]:
    """The lines that it has printed (and that were not read yet), but for one that was cut off."""
    with process:
        return [line[:-1] for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]


def kill(process: subprocess.Popen[str]) -> list[str]:
    process.send_signal(signal.SIGKILL)
    return whole(process)


def line(process: subprocess.Popen[str]) -> str:
    text = process.stdout.readline()
    assert text.endswith("\n"), f"the process has ended: {process.wait(TIMEOUT)}"
    return text[:-1]


def tell(process: subprocess.Popen[str], word: str) -> None:
    process.stdin.write(word + "\n")
    process.stdin.flush()


# The three models

# Reads until a message says "end"; prints what it has committed. First one message alone, then waits to be told to go on.
CONSUME = """
import sys
from qewqew_core import Topic
path, name, many = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Topic(path) as topic, topic.reader(name, redeliver_after=None) as reader:
    messages = [reader.read(timeout=300)]
    print("first", messages[0].number)
    sys.stdin.readline()
    while True:
        rest = [one for one in messages if one.body != b"end"]
        if rest:  # without arguments it would commit all
            reader.commit(*rest)
        for one in rest:
            print(one.number, one.attempt, one.body.decode())
        if len(rest) < len(messages):
            break  # closing gives the end back, to the next consumer
        messages = reader.read_many(many, timeout=300) or sys.exit("nothing comes")
"""

HOLD = """
import sys
from qewqew_core import Topic
with Topic(sys.argv[1]) as topic, topic.reader(sys.argv[2], redeliver_after=None) as reader:
    print(*(one.number for one in reader.read_many(20, timeout=300)))
    sys.stdin.read()
"""


@pytest.mark.quick("consumers in several processes share a reader: each message once")
def test_unicast_consumers_share_a_reader_and_get_each_message_once(tmp_path):
    """One of three is killed: what it had not committed comes to the others at once, and nothing else comes twice."""
    path, count = tmp_path / "t", 600
    with Topic(path, block_size=8000) as topic, processes() as started:
        topic.append_many(f"message {number}".encode() for number in range(count))
        holder = python(HOLD, path, "shared")
        started.append(holder)
        held = [int(number) for number in line(holder).split()]
        assert held == list(range(20))
        started += [python(CONSUME, path, "shared", 7) for _ in range(2)]
        firsts = {int(line(one).split()[1]) for one in started[1:]}
        assert firsts == {20, 21}, "each gets the next one"
        for one in started[1:]:
            tell(one, "go")
        with topic.reader("shared", redeliver_after=None) as mine:
            while mine.stats().records != len(held):  # all others are committed
                time.sleep(0.01)
            with pytest.raises(Empty):
                mine.read(timeout=0.5)  # what a living process has is nobody else's
            began = time.monotonic()
            holder.kill()
            holder.wait()
            while mine.lag():
                time.sleep(0.01)
            assert time.monotonic() - began < 60
        topic.append(b"end")
        records = [tuple(text.split(maxsplit=2)) for one in started[1:] for text in whole(one)]
        assert [one.returncode for one in started[1:]] == [0, 0]
    assert sorted(int(number) for number, _, _ in records) == list(range(count)), "each once"
    assert all(text == f"message {number}" for number, _, text in records)
    assert {int(number) for number, attempt, _ in records if attempt != "1"} == set(held)


def test_a_message_in_flight_of_a_living_process_comes_again_when_its_time_is_over(tmp_path):
    """The process hangs, it has not died: only the clock can tell."""
    path = tmp_path / "t"
    slow = HOLD.replace("redeliver_after=None", "redeliver_after=1.0")
    with Topic(path) as topic, processes() as started:
        topic.append_many([b"0", b"1"])
        started.append(python(slow, path, "shared"))
        assert line(started[0]) == "0 1"
        with topic.reader("shared") as mine:
            again = mine.read(timeout=TIMEOUT)
            assert (again.number, again.attempt) == (0, 2)
            mine.commit(again, mine.read(timeout=TIMEOUT))
            assert mine.lag() == 0


@pytest.mark.req("Z9")
def test_multicast_each_reader_gets_all_messages_and_shares_them_among_its_consumers(tmp_path):
    path, count = tmp_path / "t", 500
    with Topic(path, block_size=8000) as topic, processes() as started:
        topic.append_many(f"message {number}".encode() for number in range(10))
        groups = {name: [python(CONSUME, path, name, 3) for _ in range(2)] for name in ("billing", "search")}
        for group in groups.values():
            started += group
            assert {line(one) for one in group} == {"first 0", "first 1"}
        for one in started:
            tell(one, "go")
        for number in range(10, count):  # while they read
            topic.append(f"message {number}".encode())
        topic.append(b"end")
        for name, group in groups.items():
            records = [[int(text.split()[0]) for text in whole(one)] for one in group]
            assert sorted(records[0] + records[1]) == list(range(count)), name
            assert all(records), "both had some"
            assert records == [sorted(one) for one in records], "and each its own in order"


BROADCAST = """
import os, sys
from qewqew_core import Topic
with Topic(sys.argv[1]) as topic, topic.reader(f"viewer-{os.getpid()}", start="latest", temporary=True) as reader:
    print(reader.name)
    while (message := reader.read(timeout=300)).body != b"end":
        print(message.number)
        reader.commit(message)
    print("end")
    sys.stdin.readline()
"""


def test_broadcast_each_consumer_gets_all_messages_and_its_reader_goes_with_it(tmp_path):
    """Also with one that is killed: then the writer finds out, before it would hold blocks back for a dead one."""
    path = tmp_path / "t"
    with Topic(path, block_size=1000, delete_committed=True) as topic, processes() as started:
        topic.append(b"before they came")
        started += [python(BROADCAST, path) for _ in range(3)]
        names = [line(one) for one in started]
        assert topic.readers() == sorted(names)
        for number in range(1, 41):
            topic.append(b"%d" % number)
        topic.append(b"end")
        for one in started:
            assert [line(one) for _ in range(40)] == [str(number) for number in range(1, 41)]
            assert line(one) == "end"
        closed, killed, alive = started
        tell(closed, "close")
        closed.wait(TIMEOUT)
        assert topic.readers() == sorted(names[1:]), "the reader of one that closes is gone at once"
        killed.kill()
        killed.wait()
        assert names[1] in topic.readers(), "nobody has looked"
        topic.trim()
        assert topic.readers() == [names[2]]
        tell(alive, "close")
        alive.wait(TIMEOUT)
        assert topic.readers() == []
        state = {one.name for one in (path / "state").iterdir()}
        assert state == set(), "nothing is left of them"


VIEW_BRIEFLY = """
import random, sys
from qewqew_core import Closed, Topic
path, cycles = sys.argv[1], int(sys.argv[2])
for cycle in range(cycles):
    with Topic(path) as topic:
        # Few names, so that several share one now and then, and one opens what another is about to delete.
        with topic.reader(f"brief-{random.randrange(3)}", start="latest", temporary=True) as reader:
            try:
                reader.commit(*reader.read_many(5, timeout=0.005))
            except Closed:
                pass  # deleted by the one that had it before
print("done")
"""


def test_temporary_readers_that_come_and_go_while_the_writer_trims_leave_nothing_behind(tmp_path):
    """Trimming looks at readers that vanish meanwhile; it must neither fail nor bring one back."""
    path = tmp_path / "t"
    with Topic(path, block_size=400, max_records=50, sync="never") as topic, processes() as started:
        topic.append(b"0")
        started += [python(VIEW_BRIEFLY, path, 60) for _ in range(4)]
        number = 0
        while any(one.poll() is None for one in started):
            number += 1
            assert topic.append(b"%d" % number) == number
            if number % 10 == 0:
                topic.stats()
        assert [whole(one) for one in started] == [["done"]] * 4
        assert topic.readers() == []
        assert [one.name for one in (path / "state").iterdir()] == []


def test_a_thread_that_waits_for_its_commit_is_not_harmed_when_another_process_cuts_the_log_back(tmp_path, monkeypatch):
    """The log that it is about to sync is closed under its hands, by another thread that has noticed first."""
    path = tmp_path / "t"
    with Topic(path) as topic, topic.reader("r") as mine, topic.reader("r") as of_another:
        topic.append_many([b"0", b"1"])
        first, second = mine.read(), of_another.read()
        sync, calls = Journal.sync, []

        def late(log: Journal, position: int, refuse: bool) -> None:
            calls.append(position)
            if len(calls) == 1:
                monkeypatch.setattr(of_another._engine, "rotate_at", 0)
                of_another.commit(second)
                thread = threading.Thread(target=mine.lag)
                thread.start()
                thread.join(TIMEOUT)
            sync(log, position, refuse)

        monkeypatch.setattr(Journal, "sync", late)
        assert mine.commit(first) == 1
        assert len(calls) > 1
        assert mine.lag() == 0
    with Topic(path) as topic, topic.reader("r") as mine:
        assert mine.lag() == 0


# Readers and the writer, at the same time

FOLLOW = """
import sys
from qewqew_core import Topic
path, name, chosen = sys.argv[1:]
with Topic(path) as topic, topic.reader(name, chosen or None) as reader:
    print("ready")
    while True:
        messages = reader.read_many(100, timeout=300) or sys.exit("nothing comes")
        print(*(one.number for one in messages))
        reader.commit(*messages)
        if messages[-1].body == b"end":
            break
"""


@pytest.mark.req("Z13")
def test_readers_in_other_processes_follow_the_writer_into_new_blocks_and_never_stop_it(tmp_path):
    path, count = tmp_path / "t", 2000
    with Topic(path, block_size=5000) as topic, processes() as started:
        started += [python(FOLLOW, path, f"r{number}", chosen) for number, chosen in enumerate(["", "eu.#", "*.2;*.end"])]
        assert [line(one) for one in started] == ["ready"] * 3
        tags = [f"{region}.{level}" for region in ("eu", "us") for level in range(3)]
        for number in range(count):
            assert topic.append(b"x", tag=tags[number % len(tags)]) == number
            if number == 500:
                for one in started:
                    one.send_signal(signal.SIGSTOP)  # wherever it is: it may have its reader's lock
            if number == 1500:
                for one in started:
                    one.send_signal(signal.SIGCONT)
        topic.append(b"end", tag="eu.end")
        assert topic.stats().blocks > 50
        for one, chosen in zip(started, ["", "eu.#", "*.2;*.end"], strict=True):
            found = [int(number) for text in whole(one) for number in text.split()]
            assert one.returncode == 0
            wanted = Filter(chosen)
            expected = [number for number in range(count) if wanted.matches(tags[number % len(tags)])]
            assert found == [*expected, count]


APPEND_FAST = """
import sys
from qewqew_core import Topic
with Topic(sys.argv[1], sync="never") as topic:
    number = len(topic)
    print("ready")
    while True:
        number += topic.append_many([b"%d" % (number + index) for index in range(3)])
"""


def test_a_reader_that_begins_at_the_latest_message_while_others_are_appended_goes_on_from_there(tmp_path):
    """Index and end of the block are two reads, and the writer may be in between."""
    path = tmp_path / "t"
    with Topic(path) as topic, processes() as started:
        started.append(python(APPEND_FAST, path))
        line(started[0])
        for _ in range(60):
            before = topic.stats().next
            with topic.reader("late", start="latest", temporary=True) as reader:
                messages = reader.read_many(5, timeout=TIMEOUT)
                assert [one.body for one in messages] == [b"%d" % one.number for one in messages]
                assert messages[0].number >= before
                assert [one.number - messages[0].number for one in messages] == list(range(len(messages)))
                assert reader.commit() == len(messages)
                assert reader.position().number == messages[-1].number + 1
            with topic.reader("lessee", start="latest", temporary=True) as reader:
                while (batch := reader.lease("a", max_records=5)) is None:
                    pass
                assert [one.body for one in batch.messages()] == [b"%d" % one.number for one in batch.messages()]


READ_SLOWLY = """
import sys, time
from qewqew_core import Topic
with Topic(sys.argv[1]) as topic, topic.reader("slow") as reader:
    print("ready")
    seen = read = 0
    while True:
        message = reader.read(timeout=300)
        assert message.body == (b"%d " % message.number) * 20, message
        assert message.number >= seen
        seen, read = message.number + 1, read + 1
        reader.commit(message)
        if read % 20 == 0:
            with topic.reader("lessee") as lessee:
                batch = lessee.lease(str(read), max_records=10)
                if batch is not None:
                    assert all(one.body.startswith(b"%d " % one.number) for one in batch.messages())
                    batch.ack()
        if message.tag == "end":
            break
    print(read, reader.lost)
"""


def test_a_reader_whose_messages_are_removed_before_it_reads_them_counts_them_and_goes_on(tmp_path):
    path, count = tmp_path / "t", 2500
    with Topic(path, block_size=4000, max_records=50, slow_readers="move", sync="never") as topic, processes() as started:
        started.append(python(READ_SLOWLY, path))
        assert line(started[0]) == "ready"
        for number in range(count):
            topic.append((b"%d " % number) * 20)
        topic.append((b"%d " % count) * 20, tag="end")
        (text,) = whole(started[0])
        read, lost = map(int, text.split())
    assert read + lost == count + 1, "each message was read, or is counted as lost"
    assert lost > 0
    assert read > 50


# The writer

WRITE = """
import sys
from qewqew_core import Message, Topic
path = sys.argv[1]
with Topic(path, block_size=1 << 14, lock_timeout=60) as topic:
    number = topic.stats().next
    while True:
        number += topic.append_many([Message(b"%d" % (number + index), "abc"[index % 3]) for index in range(7)])
        print(number)
"""


@pytest.mark.quick("a topic's writer is killed, the next one goes on, and readers read")
def test_a_writer_is_killed_and_the_next_one_goes_on_while_readers_read(tmp_path):
    """What returned is there, in order and once; readers have never seen what was not there afterwards."""
    path, luck = tmp_path / "t", random.Random(4)
    Topic(path).close()
    acknowledged = 0
    with processes() as started:
        started += [python(FOLLOW, path, name, chosen) for name, chosen in (("all", ""), ("some", "b;end"))]
        assert [line(one) for one in started] == ["ready"] * 2
        for _ in range(12):
            writer = python(WRITE, path)
            started.append(writer)
            assert int(line(writer)) > acknowledged
            time.sleep(luck.uniform(0, 0.15))
            acknowledged = max(acknowledged, *(int(text) for text in kill(writer)), 0)
        with Topic(path) as topic:
            total = topic.stats().next
            topic.append(b"end", tag="end")
            assert topic.verify().problems == []
            assert [one.body for one in topic] == [*(b"%d" % number for number in range(total)), b"end"]
            assert total >= acknowledged
            assert total % 7 == 0, "all of a commit, or nothing"
        everything, some = ([int(number) for text in whole(one) for number in text.split()] for one in started[:2])
    assert everything == list(range(total + 1))
    assert some == [*(number for number in range(total) if number % 7 % 3 == 1), total]


HOLD_TOPIC = """
import sys
from qewqew_core import Topic
with Topic(sys.argv[1]) as topic:
    topic.append(b"held")
    print("open")
    sys.stdin.read()
"""


@pytest.mark.req("Z13")
def test_a_second_writer_is_refused_and_told_who_the_first_is_but_may_read(tmp_path):
    path = tmp_path / "t"
    with processes() as started:
        started.append(python(HOLD_TOPIC, path))
        assert line(started[0]) == "open"
        with Topic(path, lock_timeout=0.3) as topic:
            began = time.monotonic()
            with pytest.raises(Locked, match=f"process {started[0].pid}") as caught:
                topic.append(b"mine")
            assert caught.value.pid == started[0].pid
            assert time.monotonic() - began >= 0.3
            assert inspect_reader(path, "r").records == 1
            with topic.reader("r") as reader:
                assert reader.read().body == b"held"
                reader.commit()
            threading.Timer(0.2, started[0].kill).start()  # the kernel gives the lock of a dead process back
        with Topic(path, lock_timeout=TIMEOUT) as topic:
            assert topic.append(b"mine") == 1


def test_a_forked_child_can_neither_append_nor_read_and_keeps_no_lock(tmp_path):
    path = tmp_path / "t"
    topic = Topic(path)
    topic.append(b"0")
    reader = topic.reader("r", redeliver_after=None)
    assert reader.read().body == b"0"
    child = os.fork()
    if child == 0:
        refused = 0
        for act in (lambda: topic.append(b"child"), reader.commit):
            try:
                act()
            except Closed:
                refused += 1
            except BaseException as error:  # no test may go on twice
                print(error, file=sys.stderr)
        topic.close()
        os.write(2, b"") if refused == 2 else os._exit(refused)
        time.sleep(TIMEOUT)
        os._exit(0)
    try:
        topic.append(b"1")
        reader.commit()
        reader.close()
        topic.close()
        with Topic(path, lock_timeout=0) as again:
            assert again.append(b"2") == 2
            with again.reader("r") as other:
                assert [one.body for one in other] == [b"1", b"2"]
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it was refused both"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


MAKE = """
import sys
from qewqew_core import Topic
print("ready")
for name in sys.stdin:
    path, dialect = name.split()
    with Topic(path, dialect=dialect if dialect != "-" else None) as topic, topic.reader("r") as reader:
        topic.append(b"x")
        assert reader.read().body == b"x"
        reader.commit()
        print(topic.dialect)
"""


@pytest.mark.parametrize("dialect", ["B", "C"])
def test_processes_that_make_one_topic_at_the_same_time_all_have_it(tmp_path, dialect):
    with processes() as started:
        started += [python(MAKE, stderr=subprocess.PIPE) for _ in range(3)]
        assert [line(one) for one in started] == ["ready"] * 3
        for number in range(40):
            for place, one in enumerate(started):
                tell(one, f"{tmp_path / str(number)} {dialect if place < 2 else dialect if dialect == 'C' else '-'}")
            assert [line(one) for one in started] == [dialect] * 3
            with Topic(tmp_path / str(number)) as topic:
                assert len(topic) == 3
        for one in started:
            assert one.communicate() == ("", "")


# Sessions

PRODUCE = """
import sys, time
from qewqew_core import Topic
path, cycle = sys.argv[1:]
number = 0
while True:
    time.sleep(0.01)  # as if it did something else too: the writer's lock is not handed over, who waits must find it free
    with Topic(path, block_size=1 << 13, lock_timeout=60) as topic:
        for _ in range(4):
            with topic.session() as session:
                for index in range(5):
                    session.append(f"{cycle}.{number}.{index}".encode(), tag="in")
                print("appends", f"{cycle}.{number}")
            print("appended", f"{cycle}.{number}")
            number += 1
            with topic.session() as session:  # and one that takes it all back
                session.append(b"never", tag="in")
                session.rollback()
"""

TRANSFORM = """
import sys, time
from qewqew_core import Empty, Topic
path, size, rotate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log_bytes = 2000 if rotate == "rotate" else 4 << 20  # the log is cut back every other commit
while True:
    time.sleep(0.01)
    with (
        Topic(path, block_size=1 << 13, lock_timeout=60, log_bytes=log_bytes) as topic,
        topic.reader("t", "in", redeliver_after=None) as reader,
    ):
        for _ in range(5):
            with topic.session() as session:
                messages = session.read_many(reader, size, timeout=0.05)
                for message in messages:
                    session.append(b"out of " + message.body, tag="out")
            if messages:
                print("took", len(messages))
            else:
                print("empty")
                break
"""


@pytest.mark.parametrize("kills", [20, pytest.param(300, marks=pytest.mark.soak)])
def test_a_producer_and_a_transformer_killed_at_random_make_one_message_out_of_each(tmp_path, kills):
    """The topic itself tells: to each message that was put in there is one that came out, whatever was killed where."""
    luck, path = random.Random(20), tmp_path / "t"
    announced: set[str] = set()
    stored: set[str] = set()
    with processes() as started:
        for cycle in range(kills):
            producer = python(PRODUCE, path, cycle)
            consumer = python(TRANSFORM, path, luck.choice([1, 3, 50]), luck.choice(["rotate", "-"]))
            started += [producer, consumer]
            lines = [line(producer)]
            line(consumer)
            time.sleep(luck.uniform(0.02, 0.25))
            for process in luck.sample([producer, consumer], 2):
                process.send_signal(signal.SIGKILL)
                process.wait()
            for text in [*lines, *whole(producer)]:
                what, commit = text.split()
                (announced if what == "appends" else stored).add(commit)
            whole(consumer)
        last = python(TRANSFORM, path, 1000, "-")
        started.append(last)
        while line(last) != "empty":
            pass
        kill(last)
    with Topic(path) as topic:
        assert topic.verify().problems == []
        incoming = [one.body.decode() for one in topic if one.tag == "in"]
        outgoing = [one.body.decode().removeprefix("out of ") for one in topic if one.tag == "out"]
        with topic.reader("t") as reader:
            assert reader.stats().records == 0
    assert outgoing != []
    assert [name for name, times in Counter(outgoing).items() if times > 1] == [], "taken twice"
    assert set(outgoing) == set(incoming), "taken, and nothing made of it"
    assert len(incoming) == len(set(incoming))
    assert "never" not in incoming
    commits = {name.rpartition(".")[0] for name in incoming}
    assert stored <= commits <= announced
    assert len(incoming) == 5 * len(commits), "half a commit"
    order = [tuple(map(int, name.split("."))) for name in incoming]
    assert order == sorted(order)


DIE = """
import os, sys
from qewqew_core import Topic
from qewqew_core.topic import participant, writer
path, place = sys.argv[1:]
die = lambda *arguments, **options: os._exit(9)
if place == "before the commit":
    writer.Writer.append = die
elif place == "before it is durable":
    writer.Writer.durable = die
else:
    participant.Participant.resolve = die
topic = Topic(path, log_bytes=1 if place == "after it, and the log was cut back" else 4 << 20)
one = topic.reader("r", redeliver_after=None)
session = topic.session()
session.append(b"out of " + session.read(one).body)
session.commit()
"""


@pytest.mark.parametrize("writes", [False, True], ids=["a reader asks", "the next writer asks"])
@pytest.mark.parametrize("place", ["before the commit", "before it is durable", "after it", "after it, and the log was cut back"])
def test_a_session_killed_while_it_commits_has_happened_or_not(tmp_path, place, writes):
    """The topic's log decides, whether it was clean before (as here) or not, and also when it was cut back meanwhile."""
    path = tmp_path / "t"
    with Topic(path) as topic:
        topic.append_many([b"0", b"1"])
        topic.reader("r").close()
    process = python(DIE, path, place)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 9
    with Topic(path) as topic:
        if writes:
            topic.append(b"2")
        happened = b"out of 0" in [one.body for one in topic]
        assert happened == (place != "before the commit"), "a kill loses nothing that was written"
        with topic.reader("r", redeliver_after=None) as reader:
            found = [reader.read(timeout=300)]
            found += reader.read_many(9)
            reader.commit()
            assert (b"0" in [one.body for one in found]) == (not happened)
            assert b"1" in [one.body for one in found]
            assert reader.lag() == 0


@pytest.mark.parametrize("key", [None, "key"])
def test_a_session_of_a_killed_process_is_decided_by_a_process_that_writes_already(tmp_path, key):
    """It has the writer's lock since before, so nobody else can open the topic to recover it."""
    path = tmp_path / "t"
    with Topic(path) as topic:
        topic.append_many([b"0", b"1"])
        topic.reader("r").close()
    with processes() as started:
        started.append(python(DIE, path, "before the commit"))
        assert started[0].wait(TIMEOUT) == 9
        with Topic(path) as topic, topic.reader("r", redeliver_after=None) as reader:
            assert topic.append_many([b"2"], key=key) == 1
            assert [reader.read(timeout=300).body for _ in range(3)] == [b"0", b"1", b"2"]


# All together, for long

SOAK_SECONDS = float(os.environ.get("QEWQEW_SOAK_SECONDS", "600"))
TAGS = ("eu.1", "eu.2", "us.1", "us.2", "asia.east.1")

SOAK_WRITE = f"""
import sys
from qewqew_core import Message, Topic
tags, luck = {TAGS!r}, __import__("random").Random()
with Topic(sys.argv[1], block_size=1 << 16, max_records=5000, lock_timeout=60) as topic:
    number = topic.stats().next
    while True:
        size = luck.choice([1, 1, 10, 100])
        number += topic.append_many(
            [Message(b"%d " % one * luck.choice([1, 10]), tags[one % len(tags)]) for one in range(number, number + size)]
        )
        print(number)
"""

# Notes what it was given before it commits, and that it has committed afterwards.
SOAK_READ = """
import sys
from qewqew_core import Topic
path, name, chosen, out = sys.argv[1:]
with Topic(path) as topic, topic.reader(name, chosen or None, redeliver_after=None) as reader, open(out, "a") as notes:
    notes.write("\\n")  # behind a line that was cut off
    while messages := reader.read_many(50, timeout=300):
        assert all(int(one.body.split()[0]) == one.number for one in messages)
        print("got", *(one.number for one in messages), file=notes, flush=True)
        reader.commit(*messages)
        print("done", *(one.number for one in messages), file=notes, flush=True)
        if messages[-1].tag == "end":
            break
"""

SOAK_LEASE = """
import os, sys, time
from qewqew_core import Topic
path, name, chosen, out = sys.argv[1:]
run, over = 0, False
with Topic(path) as topic, topic.reader(name, chosen or None) as reader:
    while not over:
        run += 1
        batch = next((one for one in reader.batches() if one.state == "leased"), None) or reader.lease(
            f"{os.getpid()} {run} {time.time_ns()}", max_records=200
        )
        if batch is None:
            time.sleep(0.01)
            continue
        messages = list(batch.messages())
        assert all(int(one.body.split()[0]) == one.number for one in messages)
        with open(f"{out}/{batch.id}", "w") as sink:  # overwritten by batch id, as the Spark job does
            print(*(one.number for one in messages), file=sink)
        batch.ack()
        over = messages[-1].tag == "end"
"""


@pytest.mark.soak
def test_a_writer_and_four_readers_with_filters_go_on_for_minutes_whatever_is_killed(tmp_path):
    """For QEWQEW_SOAK_SECONDS. What was committed does not come again, nothing is left out, and old blocks go."""
    soak(tmp_path, SOAK_SECONDS)


@pytest.mark.req("ZD12")
def test_a_writer_and_four_readers_with_filters_go_on_whatever_is_killed(tmp_path):
    soak(tmp_path, 8)


def soak(folder: Path, seconds: float) -> None:
    path, luck = folder / "t", random.Random(600)
    Topic(path, block_size=1 << 16).close()
    readers = {"all": "", "eu": "eu.*;end", "one": "*.1;#.1;end", "leased": "us.#;asia.#;end"}
    commands: dict[str, tuple[object, ...]] = {"writer": (SOAK_WRITE, path)}
    for name, chosen in readers.items():
        out = folder / name
        if name == "leased":
            out.mkdir()
        else:
            out.touch()
        commands[name] = (SOAK_LEASE if name == "leased" else SOAK_READ, path, name, chosen, out)
    with Topic(path) as topic:
        for name, chosen in readers.items():
            topic.reader(name, chosen or None).close()
    acknowledged = kills = most_blocks = 0
    with processes() as started, open(folder / "errors", "w+") as errors:
        running = {name: python(*command, stderr=errors) for name, command in commands.items()}
        started += running.values()

        def read_acknowledgements(writer: subprocess.Popen[str], last: bool) -> int:
            return max([acknowledged, *map(int, whole(writer) if last else [line(writer)])])

        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            while time.monotonic() < began + luck.uniform(0.2, 2.0):
                acknowledged = read_acknowledgements(running["writer"], False)  # so that its pipe does not fill
            assert [name for name, one in running.items() if one.poll() is not None] == [], errors.name
            for name in luck.sample(list(running), luck.randint(1, len(running))):
                running[name].kill()
                running[name].wait()
                kills += 1
                if name == "writer":
                    acknowledged = read_acknowledgements(running[name], True)
                running[name] = python(*commands[name], stderr=errors)
                started[:] = running.values()
            with Topic(path) as topic:
                most_blocks = max(most_blocks, topic.stats().blocks)
        running["writer"].kill()
        acknowledged = read_acknowledgements(running.pop("writer"), True)
        with Topic(path) as topic:
            total = topic.stats().next
            assert total >= acknowledged > 0
            topic.append(b"%d" % total, tag="end")
        for one in running.values():
            assert one.wait(TIMEOUT) == 0
        with Topic(path, max_records=5000) as topic:
            topic.trim()
            assert topic.verify().problems == []
            assert topic.stats().readers == dict.fromkeys(readers, 0)
            assert topic.stats().messages < 5000 + 2000, "old blocks are removed once all have read them"
        errors.seek(0)
        assert "Traceback" not in (told := errors.read()), told
    for name, chosen in readers.items():
        wanted = Filter(chosen)
        expected = [number for number in range(total) if wanted.matches(TAGS[number % len(TAGS)])]
        expected.append(total)
        if name == "leased":
            batches = [list(map(int, one.read_text().split())) for one in (folder / name).iterdir()]
            assert sorted(number for batch in batches for number in batch) == expected, "each in one batch"
            continue
        done: set[int] = set()
        got: set[int] = set()
        for text in (folder / name).read_text().splitlines():
            what, *numbers = text.split() or ("",)
            found = {int(number) for number in numbers}
            if what == "got":
                assert not found & done, "what was committed comes again"
                got |= found
            elif what == "done":
                done |= found
        assert got == set(expected), name
    print(f"{seconds:.0f} s: {total:,} messages, {kills} kills, at most {most_blocks} blocks")
