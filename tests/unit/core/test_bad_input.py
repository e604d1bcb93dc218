"""Bad input: a named error that says what, where and what to do, before anything on disk has changed.

Paths and arguments that queues and topics both have are tried on both; what only a topic has: test_topic_bad_input.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from damage import in_time, tree
from disk import NoSync
from plain import crashed, forget_log
from refusal import refused
from stores import STORES, QueueStore, TopicStore

import qewqew_core
from qewqew_core import (
    BadArgument,
    BadPath,
    BadRecord,
    Corrupt,
    Empty,
    QewQewError,
    Queue,
    Topic,
    inspect,
    inspect_reader,
    repair,
)
from qewqew_core.formats.chunk import POINTERS

PACKAGE = Path(qewqew_core.__file__).parent
RECORDS = [b"zero", b"", b"two", b"three", b"4", b"fifth"]


# Paths

NAN = float("nan")
BOTH = pytest.mark.parametrize("opening", [Queue, inspect])


def look_at_a_reader(path: str | Path) -> object:
    return inspect_reader(path, "r")


TOPICS = [Topic, look_at_a_reader]
ALL = pytest.mark.parametrize("opening", [Queue, inspect, *TOPICS])


@BOTH
@pytest.mark.parametrize("suffix", ["", "/", "/."])
def test_a_directory_is_no_queue(tmp_path, opening, suffix):
    (tmp_path / "d").mkdir()
    with refused(tmp_path, BadPath, "this is a directory; a queue is a file in a directory, for example .*orders.qew"):
        opening(f"{tmp_path}/d{suffix}")


@ALL
def test_a_missing_parent_is_named_with_the_command_that_makes_it(tmp_path, opening):
    with refused(tmp_path, BadPath, f"there is no directory {tmp_path}/no/such; make it first .mkdir -p", tmp_path / "no/such/q"):
        opening(tmp_path / "no" / "such" / "q")
    (tmp_path / "file").write_text("")
    with refused(tmp_path, BadPath, "there is no directory"):
        opening(tmp_path / "file" / "q")


@ALL
@pytest.mark.parametrize("path", ["", "a\0b", b"q", "\ud800", "\ud800/x", None, 7, 1.5, ["q"], "x" * 201, "ü" * 101])
def test_what_cannot_be_a_path_is_refused(tmp_path, opening, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(tmp_path, BadPath, "path is a|name of a (queue|topic) .*200 bytes"):
        opening(path)


@pytest.mark.req("REQ-36")
@BOTH
@pytest.mark.parametrize("name", ["q.30001", "q.30002", "q.65534", "q.wal", "q.batches", "q.dead", "q.lease"])
def test_a_file_of_another_queue_is_no_queue(tmp_path, opening, name):
    """The original cuts a chunk file to two bytes, and deletes it when it is closed."""
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    with refused(
        tmp_path, BadPath, f"is a file of the queue q. If you mean that queue, open {tmp_path}/q; else", tmp_path / name
    ):
        opening(tmp_path / name)
    forget_log(tmp_path / "q")  # the original leaves none
    with refused(tmp_path, BadPath, "is a file of the queue q"):
        opening(tmp_path / name)


def test_the_log_of_a_queue_without_header_is_no_queue(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many(RECORDS, key="k")
        q.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.reserve", "q.stamp", "q.wal"]
    for name in ("q.wal", "q.30001"):
        with refused(tmp_path, BadPath, "is a file of the queue"):
            Queue(tmp_path / name)


@BOTH
@pytest.mark.parametrize("content", ["x", "1\n", "hi", "hello", "id,name\n1,x\n", "\0\0\0", '{"version": 1}'])
def test_a_file_that_is_not_a_queue_is_left_alone(tmp_path, opening, content):
    (tmp_path / "notes.txt").write_text(content)
    with refused(tmp_path, BadPath, "is not the header file of a queue", tmp_path / "notes.txt"):
        opening(tmp_path / "notes.txt")


@pytest.mark.parametrize("kind", [Queue, Topic])
def test_a_path_is_refused_if_those_of_its_batches_would_be_too_long(tmp_path, kind):
    def use(size: int) -> None:
        above = str(tmp_path)
        while (rest := size - len(above)) > 200:
            above = os.path.join(above, "x" * min(199, rest - 3))  # which leaves room for a slash and a name
        os.makedirs(above, exist_ok=True)
        path = os.path.join(above, "n" * (size - len(above) - 1))
        assert len(path) == size
        with kind(path) as opened:
            opened.put(b"x") if kind is Queue else opened.append(b"x")
            with opened if kind is Queue else opened.reader("r" * 100) as source:
                batch = source.lease("run")
                assert len(list(batch)) == 1
                batch.nack()
                batch = source.lease("run")
                batch.to_dead_letters("x")
                assert len(list(source.dead()[0])) == 1
                assert opened.verify().ok

    use(3_500)
    with pytest.raises(BadPath, match=r"the path has 3,501 bytes; .* 3,500, .* Choose a shorter path"):
        use(3_501)


@ALL
def test_a_device_a_pipe_or_a_link_in_circles_is_refused_and_never_waited_for(tmp_path, opening):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    other = "is not a directory, but a topic is one" if opening in TOPICS else "is not a regular file"
    circle = "a link is in the way of a file of the (queue|topic) .Too many levels"
    for path, hint in (("/dev/null", other), (tmp_path / "pipe", other), (tmp_path / "circle", circle)):
        with in_time(), refused(tmp_path, BadPath, hint):
            opening(path)


def test_a_header_may_be_a_link_and_chunks_lie_beside_the_link(tmp_path):
    """As in the original: see 1.4 of the format."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "header").write_bytes(b"\0\0")
    (tmp_path / "q").symlink_to("real/header")
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    assert (tmp_path / "q").is_symlink()
    assert (tmp_path / "real" / "header").read_bytes() == (30001).to_bytes(2)
    assert (tmp_path / "q.30001").exists()
    with Queue(tmp_path / "q") as q:
        assert list(q) == RECORDS


@pytest.mark.parametrize("name", ["q.30001", "q.30002", "q.30004"])
def test_a_chunk_that_is_a_link_is_refused_when_the_queue_is_opened(tmp_path, name):
    """Writing through it would change a file that is not a file of this queue. REQ-15 makes chunks; nobody makes links."""
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to("elsewhere")
    with refused(tmp_path, QewQewError, name.replace(".", r"\.")):
        Queue(tmp_path / "q", chunk_size=20)


@pytest.mark.parametrize("name", ["q.30001", "q.30002", "q.9", "q.wal"])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
@BOTH
def test_something_else_at_the_place_of_a_file_of_the_queue_is_named_and_never_waited_for(tmp_path, opening, name, kind):
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    error = ""
    try:
        with in_time():
            found = opening(tmp_path / "q")
        if isinstance(found, Queue):
            with found:
                assert list(found) == RECORDS
    except QewQewError as caught:
        error = str(caught)
    assert name in error or (name == "q.9" and not error), "what is in the way is named; q.9 need not be: no record is there"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


OPEN_BOTH = """
    for opening in (Queue, inspect):
        try:
            opening(sys.argv[1])
        except BadPath as error:
            print("BadPath", error)
        else:
            print("no error")
"""


REACHABLE = "/tmp"  # by every user; the checkout, where TMPDIR may point, need not be


def as_nobody(folder: Path, program: str) -> list[str]:
    """Run the program as a user who owns nothing, with a copy of the package that everybody can read."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir=REACHABLE) as name:
        place = Path(name)
        place.chmod(0o755)
        shutil.copytree(PACKAGE, place / "qewqew_core", ignore=shutil.ignore_patterns("__pycache__"))
        for path in place.rglob("*"):
            path.chmod(0o755)
        # Imported while still root: the interpreter and its packages may lie where nobody else can read.
        prelude = "import sys, os, pendulum, portalocker\nfrom qewqew_core import *\nfrom qewqew_core import inspect\n"
        become = "os.setgid(65534)\nos.setuid(65534)\n"
        run = [sys.executable, "-B", "-c", prelude + become + textwrap.dedent(program), str(folder / "q")]
        done = subprocess.run(run, capture_output=True, text=True, cwd=place, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def open_to_all():
    """A directory that other users can reach: pytest's are for the owner alone."""
    with tempfile.TemporaryDirectory(dir=REACHABLE) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_without_permission_on_the_files_it_says_so(open_to_all):
    with Queue(open_to_all / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    before = tree(open_to_all)
    lines = as_nobody(open_to_all, OPEN_BOTH)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"BadPath {open_to_all}/q: no permission to use the queue: Permission denied")
    assert tree(open_to_all) == before


def test_without_permission_to_make_a_file_it_says_so(open_to_all):
    lines = as_nobody(open_to_all, OPEN_BOTH)
    assert lines[0].startswith(f"BadPath {open_to_all}/q: no permission to use the queue: Permission denied")
    assert lines[1] == "no error", "there is nothing, and that can be seen"
    assert tree(open_to_all) == {}


def test_without_permission_in_the_directory_nothing_of_a_call_is_stored(open_to_all):
    """Header and log can be written, but no new chunk made: whatever the error is, reopening finds all that was there."""
    with Queue(open_to_all / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    for path in open_to_all.iterdir():
        path.chmod(0o666)
    program = """
        for call in (lambda q: q.put(b"12345678"), lambda q: q.lease("key"), lambda q: q.put_many([b"123456"] * 3)):
            try:
                q = Queue(sys.argv[1], chunk_size=20)
                try:
                    call(q)
                    print("no error")
                finally:
                    q.close()
            except QewQewError as error:
                print(type(error).__name__, "ermission" in str(error))
    """
    lines = as_nobody(open_to_all, program)
    assert len(lines) == 3
    assert all(line.endswith(" True") for line in lines)
    with Queue(open_to_all / "q", chunk_size=20) as q:
        assert list(q) == RECORDS
        assert q.verify().problems == []


# Arguments


@pytest.fixture(params=STORES)
def store(request, tmp_path) -> Iterator[QueueStore | TopicStore]:
    """With the records, all of them in files."""
    make, (size, _) = STORES[request.param]
    one = make(tmp_path / "q", size, "commit", _files=NoSync())
    one.put_many(RECORDS)
    one.verify()  # writes what only the log has
    yield one
    one.close()


SHARED = [
    *(({"sync": sync}, 'sync must be "commit" or "never"') for sync in ("always", "", None, 1, [], True, b"commit")),
    *(
        ({"lock_timeout": value}, "lock_timeout must be a number of seconds")
        for value in (-1, NAN, float("inf"), "1", None, True)
    ),
    *(({"max_attempts": value}, "max_attempts must be a whole number from 1") for value in (0, -1, 1.5, "3", None)),
    *(({"retry_delay": value}, "retry_delay must be a number of seconds") for value in (-1, NAN, "1", None, timedelta(1))),
    *(({"retention": value}, "retention must be a timedelta of zero or more") for value in (timedelta(-1), 60, None, "1d")),
    *(
        ({"log_bytes": value}, "log_bytes must be a whole number from 1 to 1,073,")
        for value in (0, -1, 1.5, "1", None, True, 1 << 31)
    ),
    *(({"retention_bytes": value}, "retention_bytes must be a whole number from 0") for value in (-1, 1.5, None, 1 << 70)),
]
OF_A_QUEUE = [
    ({"chunk_size": size}, "chunk_size must be a whole number from 12 to 2,147,483,647")
    for size in (11, 1, 0, -1, 2**31, 2**32 - 1, 16.0, "64", None, True)
]
OF_A_TOPIC = [
    *({"block_size": bad} for bad in (0, -1, True, 1.5, "1", 1 << 31, None, NAN)),
    *({"dialect": bad} for bad in ("D", "b", 5, "", ["A"])),
    *({"min_free_bytes": bad} for bad in (-1, 1.0, "1", None)),
    *({"max_age": bad} for bad in (timedelta(0), timedelta(-1), 5, "1h", NAN)),
    *({"max_bytes": bad} for bad in (0, -1, 1.5, "1", True)),
    *({"max_records": bad} for bad in (0, -1, 1.5, "1", True, 1 << 64)),
    *({"slow_readers": bad} for bad in ("kill", None, True)),
]


@pytest.mark.req("REQ-2", "DEF-20")
@pytest.mark.parametrize(
    ("opening", "arguments", "hint"),
    [
        *((opening, *one) for opening in (Queue, Topic) for one in SHARED),
        *((Queue, *one) for one in OF_A_QUEUE),
        *((Topic, arguments, f"{next(iter(arguments))} must be") for arguments in OF_A_TOPIC),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_absurd_argument_of_the_constructor_is_refused_before_a_file_is_made(tmp_path, opening, arguments, hint):
    with refused(tmp_path, BadArgument, hint) as caught:
        opening(tmp_path / "q", **arguments)
    assert isinstance(caught.value, ValueError)
    assert repr(next(iter(arguments.values())))[:20] in str(caught.value)


NO_LIMITS, NO_TIMES = (0, -1, 1.5, "5", True, NAN), (NAN, "1", [], b"", True, [1])
NO_RECORDS = (None, 5, 1.5, b"bytes", bytearray(b"x"), memoryview(b"x"), "text")
NO_RECORD = ("text", None, 1, [b"x"], object())
NOT_BYTES = "record [01] is .* not bytes; encode it first|a body must be bytes-like"


@pytest.mark.parametrize(
    ("call", "bad", "error", "hint"),
    [
        *(("get_many", (bad,), BadArgument, "max_records must be a whole number") for bad in (*NO_LIMITS, None)),
        *(("get_many", (1, bad), BadArgument, "max_bytes must be a whole number") for bad in NO_LIMITS),
        *(("put_many", (bad,), BadArgument, "_many takes an iterable of (records|messages)") for bad in NO_RECORDS),
        *(("put_many", ([b"good", bad],), BadRecord, NOT_BYTES) for bad in NO_RECORD),
        *(("put", (bad,), BadRecord, NOT_BYTES) for bad in NO_RECORD),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absurd_argument_of_a_method_is_refused_and_nothing_changes(store, tmp_path, call, bad, error, hint):
    with store.session() as session:
        for target in (store, session):
            with in_time(), refused(tmp_path, error, hint):
                getattr(target, call)(*bad)
        session.rollback()
    if call == "put_many":
        with refused(tmp_path, error, hint):
            store.put_many(*bad, key="k")
    assert store.get_many(100) == RECORDS


@pytest.mark.parametrize(
    "arguments",
    [
        *({"max_records": bad} for bad in NO_LIMITS),
        *({"max_bytes": bad} for bad in NO_LIMITS),
        *({"lease_timeout": bad} for bad in (0, -1, "5", True, NAN, 1e10)),
    ],
    ids=str,
)
def test_an_absurd_limit_of_a_lease_is_refused_and_nothing_is_leased(store, tmp_path, arguments):
    with refused(tmp_path, BadArgument, f"{next(iter(arguments))} must be a"):
        store.leasing.lease("key", **arguments)
    assert store.get_many(100) == RECORDS


@pytest.mark.parametrize("timeout", NO_TIMES, ids=str)
def test_an_absurd_timeout_is_a_named_error_and_never_a_hang(store, timeout):
    store.get_many(100)
    with store.session() as session:
        acts = [store.get, store.peek, session.get]
        if isinstance(store, QueueStore):
            acts.append(lambda timeout: store.queue.get_if(bool, timeout=timeout))
        for act in acts:
            with in_time(), pytest.raises(BadArgument, match="timeout must be a number"):
                act(timeout=timeout)


def test_a_timeout_longer_than_the_system_can_wait_is_a_named_error_or_waits(store):
    store.get_many(100)
    threading.Timer(0.2, store.put, [b"0"]).start()
    with contextlib.suppress(BadArgument):
        assert store.get(timeout=float("inf")) == b"0"


@pytest.mark.parametrize("reason", [None, 5, b"bytes", ["list"]], ids=str)
@pytest.mark.parametrize("end", ["nack", "to_dead_letters"])
def test_an_absurd_reason_is_a_named_error_and_the_batch_stays(store, tmp_path, end, reason):
    batch = store.leasing.lease("key")
    with refused(tmp_path, BadArgument, "reason"):
        getattr(batch, end)(reason)
    assert store.leasing.batch(batch.id).state == "leased"


@pytest.mark.parametrize("kind", STORES)
def test_a_long_or_strange_reason_is_kept_as_far_as_it_goes(tmp_path, kind):
    make, (size, _) = STORES[kind]
    store = make(tmp_path / "q", size, "commit", max_attempts=9)
    store.put(b"0")
    for reason in ("x" * 100_000, "\ud800 half a letter", "line\nline\0", "ключ 🙂"):
        store.leasing.lease("key").nack(reason)
    store.close()
    store = make(tmp_path / "q", size, "commit")
    assert store.leasing.batches()[0].reason == "ключ 🙂"
    store.close()


@pytest.mark.parametrize("batch_id", [[], {}, None, "x"], ids=str)
def test_an_absurd_batch_id_is_a_named_error_that_is_not_printed_as_a_key(store, batch_id):
    with pytest.raises(QewQewError, match="id") as unknown:
        store.leasing.batch(batch_id)
    assert not str(unknown.value).startswith(("'", '"'))


def test_an_error_carries_its_path(store, tmp_path):
    store.get_many(100)
    with pytest.raises(Empty) as empty:
        store.get()
    assert empty.value.path == str(getattr(store, "reader", store.leasing).path)
    assert empty.value.path.startswith(str(tmp_path / "q"))


# Damage


@pytest.fixture
def closed(tmp_path) -> Path:
    """A small queue, closed: chunks 1 to 4, with a log that has a commit for everything."""
    (tmp_path / "q").mkdir()
    path = tmp_path / "q" / "q"
    with Queue(path, chunk_size=20) as q:
        q.put(b"a")
        q.put_many(RECORDS, key="k")
        assert q.get() == b"a"
    return path


def test_a_log_with_bytes_behind_it_or_of_zeros_or_of_another_queue(closed, tmp_path):
    data = closed.with_name("q.wal").read_bytes()
    (tmp_path / "other").mkdir()
    with Queue(tmp_path / "other" / "q", chunk_size=20) as q:
        q.put_many([b"other"] * 6)
    other = (tmp_path / "other" / "q.wal").read_bytes()
    contents = [
        (data + bytes(100), [RECORDS]),
        (data + b"garbage" * 30, [RECORDS]),
        (data + data, [RECORDS]),
        (bytes(len(data)), [Corrupt]),
        (b"", [Corrupt]),
        (other, [Corrupt, RECORDS]),  # it does not agree with the files: they are believed
    ]
    for number, (content, allowed) in enumerate(contents):
        copy = shutil.copytree(closed.parent, tmp_path / f"copy {number}") / "q"
        copy.with_name("q.wal").write_bytes(content)
        try:
            with Queue(copy, chunk_size=20) as q:
                assert list(q) in allowed
        except Corrupt:
            assert Corrupt in allowed


@pytest.mark.req("S6", "T24")
@pytest.mark.parametrize("content", [b"", b"no log at all", b"QEWQLOG1", b"QEWQLOG2" + bytes(100)])
@pytest.mark.parametrize("crash", [False, True])
def test_who_would_wait_an_hour_for_the_lock_is_told_of_damage_at_once(closed, tmp_path, content, crash):
    if crash:
        with Queue(closed, chunk_size=20) as q:
            q.put(b"more")
            closed = shutil.copytree(closed.parent, tmp_path / "crashed") / "q"
    log = closed.with_name("q.wal")
    log.write_bytes(content)
    with in_time(), refused(closed.parent, Corrupt, r"q\.wal", log):
        Queue(closed, chunk_size=20, lock_timeout=3600)


def test_a_header_that_refers_to_nothing_does_not_hide_the_records_that_the_log_knows(closed):
    """The chunks are as they were at the last close, so the log is right."""
    closed.write_bytes(b"\0\x40")
    with Queue(closed, chunk_size=20) as q:
        assert list(q) == RECORDS
    assert closed.read_bytes() == (30001).to_bytes(2)


def test_a_header_that_passes_over_chunks_with_records_is_refused_and_a_repair_brings_them_back(closed):
    """No state of the original: it removes a chunk before the header names the next one."""
    closed.write_bytes((30003).to_bytes(2))
    with pytest.raises(Corrupt, match="the header names chunk 30003, and not chunk 30001, whose records nobody has taken"):
        Queue(closed, chunk_size=20)
    assert repair(closed).records == len(RECORDS)
    with Queue(closed, chunk_size=20) as q:
        assert list(q) == RECORDS


def test_batches_without_their_log_are_not_forgotten(closed):
    """Nobody could say which of them were acknowledged."""
    with Queue(closed, chunk_size=20) as q:
        q.lease("key", max_records=1)
    forget_log(closed)
    with refused(closed.parent, Corrupt, "there are batches that no transaction log knows.* restore the log, or move"):
        Queue(closed, chunk_size=20)


@pytest.mark.req("DEF-18")
def test_a_failed_opening_leaves_no_lock_and_no_descriptor(closed):
    """In the original both stay until the garbage is collected."""
    good = closed.with_name("q.30001").read_bytes()
    closed.with_name("q.30001").write_bytes(POINTERS.pack(3, 15, 0) + good[10:])
    before, kept = len(os.listdir("/proc/self/fd")), []
    for _ in range(3):
        with pytest.raises(Corrupt) as caught:
            Queue(closed, chunk_size=20, lock_timeout=0)
        kept.append(caught)  # with its traceback
    assert len(os.listdir("/proc/self/fd")) == before
    closed.with_name("q.30001").write_bytes(good)
    with Queue(closed, chunk_size=20, lock_timeout=0) as q:
        assert list(q) == RECORDS


@pytest.mark.req("S18", "T16")
def test_damage_found_while_reading_is_reported_by_every_call_and_by_verify_until_it_is_set_aside(closed):
    with Queue(closed, chunk_size=20) as q:
        q._chain.rotate()  # else the log has a copy of the records, by which they can be repaired
    file = closed.with_name("q.30001")
    data = bytearray(file.read_bytes())
    data[POINTERS.unpack_from(data)[0] + 2] ^= 1
    file.write_bytes(data)
    for opening in range(2):
        with Queue(closed, chunk_size=20) as q, q.session() as session:
            calls = [q.get, q.peek, lambda: q.get_many(1), lambda: list(q), lambda: q.get_if(bool)]
            for call in [*calls, lambda: q.get(timeout=0), session.get, lambda: session.get_many(3)] * 2:
                with pytest.raises(Corrupt, match=r"do not match their checksum.* Nothing was changed") as caught:
                    call()
                assert (caught.value.path, caught.value.offset) == (str(file), POINTERS.size)
            assert (len(q), bool(q)) == (len(RECORDS) + opening, True), "nothing was taken"
            assert len(q.verify().problems) == 1
            assert not q.verify().ok
            session.put(b"behind")  # the queue can still be added to
            assert session.commit() == 1
            assert len(q) == len(RECORDS) + opening + 1
    report = repair(closed)
    assert [(one.path, one.records) for one in report.damage] == [(str(file), 1)]
    assert report.set_aside is not None
    assert Path(report.set_aside).is_dir()
    with Queue(closed, chunk_size=20) as q, q.session() as session:
        assert session.get_many(100) == [*RECORDS[1:], b"behind", b"behind"]


def test_a_chunk_that_is_missing_is_damage_by_a_name_that_callers_know(tmp_path):
    (tmp_path / "open").mkdir()
    with Queue(tmp_path / "open/q") as q:
        q.put_many([b"a"] * 3)
        copy = crashed(tmp_path / "open")
    (copy.parent / "q.30001").unlink()
    with pytest.raises(Corrupt, match=r"the chunk file is missing.*qewqew repair") as caught:
        Queue(copy.parent / "q")
    assert type(caught.value) is Corrupt
    assert caught.value.path == f"{copy.parent}/q.30001"
