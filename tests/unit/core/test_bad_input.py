"""Bad input: a named error that says what, where and what to do, before anything on disk has changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import qewqew_core
from qewqew_core import (
    BadArgument,
    BadPath,
    BadRecord,
    CorruptQueue,
    Empty,
    QewQewError,
    Queue,
    inspect,
)
from qewqew_core.chunk import POINTERS

PACKAGE = Path(qewqew_core.__file__).parent
RECORDS = [b"zero", b"", b"two", b"three", b"4", b"fifth"]


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Names and bytes of all below the folder."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


@contextlib.contextmanager
def refused(folder: Path, error: type[Exception], match: str, path: Path | None = None):
    """The block raises this error, about this path, with this hint, and changes nothing below the folder."""
    before = tree(folder)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert tree(folder) == before
    assert isinstance(caught.value, QewQewError)
    if path is not None:
        assert caught.value.path == str(path)


def in_time(call: Callable[[], object], seconds: float = 60) -> object:
    """What the call returns or raises, in another thread: a hang fails the test instead of stopping it."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, f"no answer within {seconds} s"
    value, error = result[0]
    if error is not None:
        raise error
    return value


# Paths

BOTH = pytest.mark.parametrize("opening", [Queue, inspect])


@BOTH
@pytest.mark.parametrize("suffix", ["", "/", "/."])
def test_a_directory_is_no_queue(tmp_path, opening, suffix):
    (tmp_path / "d").mkdir()
    with refused(tmp_path, BadPath, "is a directory; a queue is a file in a directory, for example .*orders.qew"):
        opening(f"{tmp_path}/d{suffix}")


@BOTH
def test_a_missing_parent_is_named_with_the_command_that_makes_it(tmp_path, opening):
    with refused(tmp_path, BadPath, f"there is no directory {tmp_path}/no/such; make it first .mkdir -p", tmp_path / "no/such/q"):
        opening(tmp_path / "no" / "such" / "q")
    (tmp_path / "file").write_text("")
    with refused(tmp_path, BadPath, "there is no directory"):
        opening(tmp_path / "file" / "q")


@BOTH
@pytest.mark.parametrize("path", ["", "a\0b", b"q", "\ud800", None, 7, "x" * 201, "ü" * 101])
def test_what_cannot_be_a_path_is_refused(tmp_path, opening, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(tmp_path, BadPath, "path|name of a queue"):
        opening(path)


@BOTH
@pytest.mark.parametrize("name", ["q.1", "q.2", "q.65534", "q.log", "q.batches", "q.dead", "q.lease"])
def test_a_file_of_another_queue_is_no_queue(tmp_path, opening, name):
    """REQ-36: the original cuts a chunk file to two bytes, and deletes it when it is closed."""
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    with refused(tmp_path, BadPath, f"is a file of the queue {tmp_path}/q; open that, or choose another name", tmp_path / name):
        opening(tmp_path / name)


def test_the_log_of_a_queue_without_header_is_no_queue(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put_many(RECORDS, key="k")
        q.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["q.log"]
    for name in ("q.log", "q.1"):
        with refused(tmp_path, BadPath, "is a file of the queue"):
            Queue(tmp_path / name)


def test_a_name_that_only_looks_like_a_chunk_is_a_queue(tmp_path):
    with Queue(tmp_path / "2026.11") as q:
        q.put(b"0")
    assert inspect(tmp_path / "2026.11").records == 1


@BOTH
@pytest.mark.parametrize("content", ["hello", "id,name\n1,x\n", "\0\0\0", '{"version": 1}'])
def test_a_file_that_is_not_a_queue_is_left_alone(tmp_path, opening, content):
    (tmp_path / "notes.txt").write_text(content)
    with refused(tmp_path, BadPath, "is not the header file of a queue", tmp_path / "notes.txt"):
        opening(tmp_path / "notes.txt")


@BOTH
def test_a_device_or_a_pipe_is_no_queue(tmp_path, opening):
    with refused(tmp_path, BadPath, "is not a regular file"):
        opening("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadPath, match="is not a regular file"):
        in_time(lambda: opening(tmp_path / "pipe"))


@BOTH
def test_a_link_that_goes_in_circles_is_refused(tmp_path, opening):
    (tmp_path / "q").symlink_to("q")
    with refused(tmp_path, BadPath, "cannot be looked at: Too many levels"):
        opening(tmp_path / "q")


def test_a_header_may_be_a_link_and_chunks_lie_beside_the_link(tmp_path):
    """As in the original: see 1.4 of the format."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "header").write_bytes(b"\0\0")
    (tmp_path / "q").symlink_to("real/header")
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    assert (tmp_path / "q").is_symlink()
    assert (tmp_path / "real" / "header").read_bytes() == b"\0\1"
    assert (tmp_path / "q.1").exists()
    with Queue(tmp_path / "q") as q:
        assert list(q) == RECORDS


@pytest.mark.parametrize("name", ["q.1", "q.2", "q.4"])
def test_a_chunk_that_is_a_link_is_refused_when_the_queue_is_opened(tmp_path, name):
    """Writing through it would change a file that is not the queue's. REQ-15 makes chunks; nobody makes links."""
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to("elsewhere")
    with refused(tmp_path, QewQewError, name.replace(".", r"\.")):
        Queue(tmp_path / "q", chunk_size=20)


@pytest.mark.parametrize("name", ["q.1", "q.2", "q.9", "q.log"])
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
        found = in_time(lambda: opening(tmp_path / "q"))
        if isinstance(found, Queue):
            with found:
                assert list(found) == RECORDS
    except QewQewError as caught:
        error = str(caught)
    finally:
        if kind == "pipe":  # let a thread that hangs there go
            os.close(os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK))
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
        prelude = "import sys, os, pendulum\nfrom qewqew_core import *\nfrom qewqew_core import inspect\n"
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
    assert lines[0].startswith(f"BadPath {open_to_all}/q: no permission to open the queue")
    assert lines[1].startswith(f"BadPath {open_to_all}/q")
    assert "no permission to read the queue" in lines[1]
    assert tree(open_to_all) == before


def test_without_permission_to_make_a_file_it_says_so(open_to_all):
    lines = as_nobody(open_to_all, OPEN_BOTH)
    assert lines[0].startswith(f"BadPath {open_to_all}/q: no permission to open the queue: Permission denied")
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


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        *(
            ({"chunk_size": size}, "chunk_size must be a whole number from 12 to 2,147,483,647")
            for size in (11, 0, -1, 2**31, 1.5, "64", None, True)
        ),
        *(({"sync": sync}, 'sync must be "commit" or "never"') for sync in ("always", "", None, 1, [])),
        *(
            ({"lock_timeout": value}, "lock_timeout must be a number of seconds")
            for value in (-1, float("nan"), float("inf"), "1", None, True)
        ),
        *(({"max_attempts": value}, "max_attempts must be a whole number from 1") for value in (0, -1, 1.5, "3", None)),
        *(
            ({"retention": value}, "retention must be a timedelta that is not negative")
            for value in (timedelta(-1), 60, None, "1d")
        ),
        *(({"retention_bytes": value}, "retention_bytes must be a whole number from 0") for value in (-1, 1.5, None, 1 << 70)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_absurd_argument_of_the_constructor_is_refused_before_a_file_is_made(tmp_path, arguments, hint):
    with refused(tmp_path, BadArgument, hint) as caught:
        Queue(tmp_path / "q", **arguments)
    assert isinstance(caught.value, ValueError)
    assert repr(next(iter(arguments.values())))[:20] in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda q, n=n: q.get_many(n), BadArgument) for n in (0, -1, 1.5, None, "5", True)),
        *((lambda q, n=n: q.get_many(1, n), BadArgument) for n in (0, -1, 1.5, "5")),
        *(
            (lambda q, n=n: q.put_many(n), (BadArgument, BadRecord))
            for n in (b"bytes", "text", bytearray(b"x"), [[1]], ["a"], [None])
        ),
        *((lambda q, n=n: q.put(n), BadRecord) for n in ("text", None, 1, [b"x"], object())),
    ],
)
def test_an_absurd_argument_of_a_method_is_refused_and_nothing_changes(tmp_path, call, error):
    with Queue(tmp_path / "q", chunk_size=20) as q:
        q.put_many(RECORDS)
        list(q)  # writes what only the log has
        with refused(tmp_path, error, "must be|is .* not bytes; encode it first|for a single one use put"):
            call(q)
        assert list(q) == RECORDS


@pytest.mark.parametrize("records", [None, 5, 1.5], ids=str)
def test_put_many_of_what_is_no_iterable_is_a_named_error(tmp_path, records):
    with Queue(tmp_path / "q") as q, pytest.raises((BadArgument, BadRecord), match="iterable"):
        q.put_many(records)


@pytest.mark.parametrize("timeout", [float("nan"), "1", [], b""], ids=str)
@pytest.mark.parametrize("method", ["get", "peek", "get_if"])
def test_an_absurd_timeout_is_a_named_error_and_never_a_hang(tmp_path, method, timeout):
    with Queue(tmp_path / "q") as q:
        before = [bool] if method == "get_if" else []
        with pytest.raises(BadArgument, match="timeout"):
            in_time(lambda: getattr(q, method)(*before, timeout=timeout), 2)


def test_a_timeout_longer_than_the_system_can_wait_is_a_named_error_or_waits(tmp_path):
    with Queue(tmp_path / "q") as q:
        threading.Timer(0.2, q.put, [b"0"]).start()
        with contextlib.suppress(BadArgument):
            assert q.get(timeout=float("inf")) == b"0"


@pytest.mark.parametrize("reason", [None, 5, b"bytes", ["list"]], ids=str)
@pytest.mark.parametrize("end", ["nack", "to_dead_letters"])
def test_an_absurd_reason_is_a_named_error_and_the_batch_stays(tmp_path, end, reason):
    with Queue(tmp_path / "q") as q:
        q.put(b"0")
        batch = q.lease("key")
        with pytest.raises(BadArgument, match="reason"):
            getattr(batch, end)(reason)
        assert q.batch(batch.id).state == "leased"


def test_a_long_or_strange_reason_is_kept_as_far_as_it_goes(tmp_path):
    with Queue(tmp_path / "q", max_attempts=9) as q:
        q.put(b"0")
        for reason in ("x" * 100_000, "\ud800 half a letter", "line\nline\0", "ключ 🙂"):
            q.lease("key").nack(reason)
    with Queue(tmp_path / "q") as q:
        assert q.batches()[0].reason == "ключ 🙂"


@pytest.mark.parametrize("batch_id", [[], {}], ids=str)
def test_an_absurd_batch_id_is_a_named_error(tmp_path, batch_id):
    with Queue(tmp_path / "q") as q, pytest.raises(QewQewError, match="id"):
        q.batch(batch_id)


def test_an_error_carries_its_path_and_a_batch_not_found_is_not_printed_as_a_key(tmp_path):
    with Queue(tmp_path / "q") as q:
        with pytest.raises(Empty) as empty:
            q.get()
        assert empty.value.path == str(tmp_path / "q")
        with pytest.raises(QewQewError) as unknown:
            q.batch("x")
        assert not str(unknown.value).startswith(("'", '"'))


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


def outcome(path: Path) -> list[bytes] | type[Exception]:
    """The records, or the error, that a damaged queue gives; an opening that fails has changed nothing."""
    before = tree(path.parent)
    try:
        q = Queue(path, chunk_size=20)
    except CorruptQueue as error:
        where = error.path
        assert tree(path.parent) == before
    else:
        with q:
            try:
                records = list(q)
            except CorruptQueue as error:
                where = f"{error.path} {error.offset:d}"
            else:
                assert q.get_many(100) == records, "taking gives what looking gave"
                return records
    assert where.startswith(str(path))
    return CorruptQueue


def damaged(path: Path, name: str, offset: int, change: int):
    """A copy of the queue with one byte changed."""
    copy = path.parent.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path.parent, copy)
    file = copy / name
    data = bytearray(file.read_bytes())
    data[offset] ^= change
    file.write_bytes(data)
    return copy / path.name


CHANGES = (0x01, 0x80, 0xFF)


def test_any_byte_of_the_log_may_be_damaged(closed):
    """An error, or the right records. Damage of the last frame, which only says that the queue was closed, costs nothing."""
    size = (closed.with_name("q.log")).stat().st_size
    right = 0
    for offset in range(size):
        for change in CHANGES:
            found = outcome(damaged(closed, "q.log", offset, change))
            assert found in (CorruptQueue, RECORDS), f"offset {offset} of {size}, change {change:#x}"
            right += found == RECORDS
    assert right < size / 2


def test_the_log_may_be_cut_anywhere(closed):
    """What is cut is indistinguishable from a commit that was torn by a crash, but header and pointers tell more."""
    data = closed.with_name("q.log").read_bytes()
    for size in range(len(data)):
        copy = damaged(closed, "q.log", 0, 0)
        copy.with_name("q.log").write_bytes(data[:size])
        assert outcome(copy) in (CorruptQueue, RECORDS), f"cut to {size} bytes"


def test_a_log_with_bytes_behind_it_or_of_zeros_or_of_another_queue(closed, tmp_path):
    data = closed.with_name("q.log").read_bytes()
    (tmp_path / "other").mkdir()
    with Queue(tmp_path / "other" / "q", chunk_size=20) as q:
        q.put_many([b"other"] * 6)
    other = (tmp_path / "other" / "q.log").read_bytes()
    for content, allowed in (
        (data + bytes(100), [RECORDS]),
        (data + b"garbage" * 30, [RECORDS]),
        (data + data, [RECORDS]),
        (bytes(len(data)), [CorruptQueue]),
        (b"", [CorruptQueue]),
        (other, [CorruptQueue, RECORDS]),  # it does not agree with the files: they are believed
    ):
        copy = damaged(closed, "q.log", 0, 0)
        copy.with_name("q.log").write_bytes(content)
        assert outcome(copy) in allowed


@pytest.mark.parametrize("name", ["q.1", "q.2", "q.3"])
def test_any_byte_of_a_record_may_be_damaged(closed, name):
    """Lengths and payloads: never a wrong record."""
    data = closed.with_name(name).read_bytes()
    head, tail, _ = POINTERS.unpack_from(data)
    for offset in range(10, len(data)):
        for change in CHANGES:
            expected = CorruptQueue if head <= offset < tail else None
            found = outcome(damaged(closed, name, offset, change))
            if expected is None:  # consumed or unused: nobody reads it, though the checksum of a piece may cover it
                assert found in (RECORDS, CorruptQueue)
            else:
                assert found is CorruptQueue, f"{name}, offset {offset}, change {change:#x}"


@pytest.mark.parametrize("name", ["q.2", "q.3"])
def test_any_byte_of_a_pointer_in_the_middle_may_be_damaged(closed, name):
    """A Java program reads the first chunk and writes to the last: others it does not change alone, so it was not one."""
    for offset in range(10):
        for change in (*(1 << bit for bit in range(8)), 0xFF):
            assert outcome(damaged(closed, name, offset, change)) == RECORDS, f"{name}, offset {offset}, change {change:#x}"


@pytest.mark.parametrize("name", ["q.1", "q.4", "q"])
def test_any_byte_of_a_pointer_may_be_damaged(closed, name):
    """Damage that the checksums of the log cannot find, by design: changed header or pointers say "a Java program used it".

    A flipped bit in them that still describes whole records is indistinguishable from a Java program that took some
    (head moved on, header moved on, tail and next cut) or from one that was killed (header or next without a file). Then
    fewer records come, or consumed ones again, or empty ones (the zeros behind the tail spell them, and a Java program may
    have put such), as the files say; but each other is one that was stored, whole, and in order. Everything else is an error.
    """
    stored = [b"a", *RECORDS]
    errors = 0
    for offset in range(min(10, len(closed.with_name(name).read_bytes()))):
        for change in (*(1 << bit for bit in range(8)), 0xFF):
            found = outcome(damaged(closed, name, offset, change))
            if found is CorruptQueue:
                errors += 1
                continue
            rest = iter(stored)
            assert all(record in rest for record in found if record), f"{name}, offset {offset}, change {change:#x}: {found}"
    assert errors or name == "q"


def test_a_header_that_refers_to_nothing_does_not_hide_the_records_that_the_log_knows(closed):
    """No state of the original: its header refers to a missing chunk only when that chunk was read and unlinked."""
    closed.write_bytes(b"\0\x40")
    with pytest.raises(CorruptQueue, match="header"):
        Queue(closed, chunk_size=20)


@pytest.mark.parametrize("name", ["q.1", "q.2", "q.3"])
def test_a_chunk_file_may_be_missing_or_cut_anywhere(closed, name):
    stored = [b"a", *RECORDS]
    data = closed.with_name(name).read_bytes()
    for size in [None, *range(len(data))]:
        copy = damaged(closed, name, 0, 0)
        if size is None:
            copy.with_name(name).unlink()
        else:
            copy.with_name(name).write_bytes(data[:size])
        found = outcome(copy)
        rest = iter(stored)
        assert found is CorruptQueue or all(record in rest for record in found), f"{name} cut to {size}: {found}"


def test_batches_without_their_log_are_not_forgotten(closed):
    """Nobody could say which of them were acknowledged."""
    with Queue(closed, chunk_size=20) as q:
        q.lease("key", max_records=1)
    closed.with_name("q.log").unlink()
    with refused(closed.parent, CorruptQueue, "there are batches that no transaction log knows.* restore the log, or move"):
        Queue(closed, chunk_size=20)


def test_a_failed_opening_leaves_no_lock_and_no_descriptor(closed):
    """DEF-18: in the original both stay until the garbage is collected."""
    good = closed.with_name("q.1").read_bytes()
    closed.with_name("q.1").write_bytes(POINTERS.pack(3, 15, 0) + good[10:])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CorruptQueue):
            Queue(closed, chunk_size=20, lock_timeout=0)
    assert len(os.listdir("/proc/self/fd")) == before
    closed.with_name("q.1").write_bytes(good)
    with Queue(closed, chunk_size=20, lock_timeout=0) as q:
        assert list(q) == RECORDS


def test_damage_found_while_reading_is_reported_by_every_call_and_by_verify(closed):
    file = closed.with_name("q.1")
    data = bytearray(file.read_bytes())
    data[POINTERS.unpack_from(data)[0] + 2] ^= 1
    file.write_bytes(data)
    with Queue(closed, chunk_size=20) as q:
        for call in (q.get, q.peek, lambda: q.get_many(1), lambda: list(q), lambda: q.get_if(bool)):
            with pytest.raises(CorruptQueue, match=r"q\.1, offset .* checksum .* Nothing was changed"):
                call()
        assert len(q) == len(RECORDS), "nothing was taken"
        assert len(q.verify().problems) == 1
        assert not q.verify().ok
        q.put(b"behind")  # the queue can still be added to
        assert len(q) == len(RECORDS) + 1
