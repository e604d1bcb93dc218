"""Every n-th byte of each file of a small topic damaged, and each file cut at many lengths: a named error, or what is right.

Plain reads do not check bodies: what reads get wrong `verify` and leases must not. In a topic that crashed, the end of a log
passes for commits that were torn; then fewer messages are there, as a power cut may leave them.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_damage import in_time, soon  # noqa: F401 - a fixture
from test_topic_crash import NoSync, set_small_limits

from qewqew_core import Message, QewQewError, Topic
from qewqew_core.reader import Reader

MESSAGES = [(b"%d:" % number + b"x" * (number % 5 * 9), ("a", None, "b.c")[number % 3]) for number in range(16)]
LEASED = {"key a": (4, 5), "key d": (6, 7), "key l": (8, 9)}  # numbers by key


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    set_small_limits(monkeypatch, 600)


def work(path: Path) -> Topic:
    """Four blocks, keys, batches in three states, a session, a reader with messages in flight."""
    topic = Topic(path, block_size=700, _files=NoSync())
    for begin in range(0, 12, 4):
        topic.append_many([Message(*one, timestamp=1000) for one in MESSAGES[begin : begin + 4]], key=f"put {begin}")
    with topic.reader("r") as reader, topic.session() as session:
        session.read_many(reader, 4)
        session.append_many([Message(*one, timestamp=1000) for one in MESSAGES[12:]])
    with topic.reader("r") as reader:
        for key in LEASED:
            batch = reader.lease(key, max_records=2)
            if key != "key l":
                (batch.ack if key == "key a" else batch.to_dead_letters)()
    topic.reader("f", filter="a").close()
    return topic


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    patch = pytest.MonkeyPatch()
    set_small_limits(patch, 600)
    kinds = {}
    for kind in ("closed", "crashed"):
        live, kept = tmp_path_factory.mktemp("live") / "t", tmp_path_factory.mktemp(kind) / "t"
        topic = work(live)
        if kind == "closed":
            topic.close()
        shutil.copytree(live, kept)
        topic.close()
    kinds = {kind.name.rstrip("0123456789"): kind / "t" for kind in tmp_path_factory.getbasetemp().iterdir() if "ed" in kind.name}
    patch.undo()
    return kinds


def damages(data: bytes, step: int) -> Iterator[tuple[str, bytes | None]]:
    for offset in range(0, len(data.rstrip(b"\0")) + 9, step):
        if offset < len(data):
            mask = (0x01, 0x10, 0x80, 0xFF)[offset // step % 4]
            yield f"byte {offset} ^ {mask:#x}", data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]
    for size in range(0, len(data.rstrip(b"\0")) + 1, 2 * step + 1):
        yield f"cut to {size}", data[:size]
    yield "missing", None


def numbers(messages: list[Message]) -> list[int]:
    return [one.number for one in messages]


def attempt(path: Path, moved: bool) -> bool:
    """Use the topic; whether there was no error. What leases give, and what verify lets pass, is right.

    ``moved``: the damage passes for a zbus server that has moved a reader, so messages may come again.
    """
    fine = True
    try:
        topic = Topic(path, block_size=700, max_attempts=3, lock_timeout=0, _files=NoSync())
    except QewQewError as error:
        if str(path) not in str(error):
            raise RuntimeError(f"it does not say where: {error!r}") from error
        return False
    with topic:
        found = []
        try:
            found = list(topic)
        except QewQewError:
            fine = False
        wrong = any((one.body, one.tag) != MESSAGES[one.number] for one in found if 0 <= one.number < len(MESSAGES))
        report = topic.verify()
        if wrong or not fine:
            assert not report.ok, "a plain read gives a wrong message, and verify finds nothing"
        for problem in report.problems:
            assert str(path) in problem
        for name in topic.readers():
            fine &= lease_all(topic, name, moved)
    return fine and report.ok


def lease_all(topic: Topic, name: str, moved: bool) -> bool:
    try:
        with topic.reader(name) as reader:
            given = [message for batch in kept(reader) for message in batch]
            for message in given:
                assert (message.body, message.tag) == MESSAGES[message.number], f"reader {name} leases {message}"
            assert moved or len({*numbers(given)}) == len(given), "a message is in two batches"
    except QewQewError:
        return False
    return True


def kept(reader: Reader) -> Iterator[list[Message]]:
    """What is in batches, and all that can still be leased."""
    for one in (*reader.batches(), *reader.dead()):
        yield list(one.messages())
    for number in range(20):
        batch = reader.lease(f"again {number}", max_records=5)
        if batch is None:
            return
        if batch.attempt == 1:
            yield list(batch.messages())
    raise AssertionError("there is no end of leases")


def files_of(folder: Path) -> list[Path]:
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    assert {path.suffix for path in names} >= {".idx", ".log", ".zbus", ".rdx", ".json"}
    return names


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["closed", "crashed"])
@pytest.mark.usefixtures("in_time")
def test_any_file_may_be_damaged_or_cut_anywhere(made, kind, step, tmp_path):
    folder, outcomes, seen = made[kind], {True: 0, False: 0}, set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in files_of(folder):
        if any(name.name == other.name and other.parent < name.parent for other in files_of(folder)):
            continue  # another name of a block
        for how, data in damages((folder / name).read_bytes(), step if name.suffix != ".json" else min(step, 7)):
            soon()
            copy = tmp_path / "t"
            shutil.copytree(folder, copy)
            relink(copy)
            if data is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(data)
            try:
                fine = attempt(copy, name.suffix == ".rdx")
            except AssertionError as error:
                raise AssertionError(f"{kind}: {name}, {how}: {error}") from error
            except Exception as error:
                raise AssertionError(f"{kind}: {name}, {how}: {error!r}") from error
            outcomes[fine] += 1
            seen.add((name.suffix, fine))
            shutil.rmtree(copy)
    assert outcomes[False] > 50
    assert {(".log", False), (".zbus", False), (".idx", False)} <= seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "a damaged length was believed"


def relink(folder: Path) -> None:
    """Copying has made files of what were names of one."""
    for path in folder.glob("state/*/*/*.zbus"):
        if (folder / "data" / path.name).exists():
            path.unlink()
            path.hardlink_to(folder / "data" / path.name)
