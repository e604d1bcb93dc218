"""Every byte of each file of a small topic damaged, and each file cut at every length: a named error, or what is right.

Plain reads do not check bodies: what reads get wrong `verify` and leases must not. In a topic that crashed, the end of a log
passes for commits that were torn; then fewer messages are there, as a power cut may leave them.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import Change, Copy, changes, cuts
from disk import NoSync
from work import LOG_BYTES, set_small_limits

from qewqew_core import Message, QewQewError, Topic
from qewqew_core.topic.reader import Reader

MESSAGES = [(b"%d:" % number + b"x" * (number % 5 * 9), ("a", None, "b.c")[number % 3]) for number in range(16)]
LEASED = {"key a": (4, 5), "key d": (6, 7), "key l": (8, 9)}  # numbers by key
GIVEN = {"r": {*range(6, 16)}, "f": {*range(0, 16, 3)}}  # by name of the reader: what it still has to give, and what is dead


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    set_small_limits(monkeypatch, 600)


def work(path: Path) -> Topic:
    """Four blocks, keys, batches in three states, a session, a reader with messages in flight."""
    topic = Topic(path, block_size=700, log_bytes=LOG_BYTES, _files=NoSync())
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
    kinds = {}
    with pytest.MonkeyPatch.context() as patch:
        set_small_limits(patch, 600)
        for kind in ("closed", "crashed"):
            topic = work(tmp_path_factory.mktemp("live") / "t")
            if kind == "closed":
                topic.close()
            kinds[kind] = shutil.copytree(topic.path, tmp_path_factory.mktemp(kind) / "t")
            topic.close()
    return kinds


def numbers(messages: list[Message]) -> list[int]:
    return [one.number for one in messages]


def attempt(path: Path, moved: bool, torn: bool) -> bool:
    """Use the topic; whether there was no error. What leases give, and what verify lets pass, is right.

    ``moved``: the damage passes for a zbus server that has moved a reader, so messages may come again, or not.
    ``torn``: it passes for commits that a crash has torn, so messages may be missing.
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
            fine &= lease_all(topic, name, moved, torn)
    return fine and report.ok


def lease_all(topic: Topic, name: str, moved: bool, torn: bool) -> bool:
    try:
        with topic.reader(name) as reader:
            given = [message for batch in kept(reader) for message in batch]
            for message in given:
                assert (message.body, message.tag) == MESSAGES[message.number], f"reader {name} leases {message}"
            assert moved or len({*numbers(given)}) == len(given), "a message is in two batches"
            assert moved or torn or {*numbers(given)} == GIVEN[name], f"reader {name} gives {numbers(given)}"
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


@pytest.mark.req("ZD4")
@pytest.mark.parametrize("what", [changes, cuts])
@pytest.mark.parametrize("kind", ["closed", "crashed"])
def test_any_file_may_be_damaged_or_cut_anywhere(made, kind, what, tmp_path, every):
    copy = Copy(made[kind], tmp_path / "t")
    names = [name for name in copy.files if not name.endswith(".lock") and copy.first[name] == name]
    assert {Path(name).suffix for name in names} >= {".idx", ".wal", ".zbus", ".rdx", ".json"}
    outcomes: list[bool] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in names:
        for damage in every(what(copy.files[name]), quick=200, full=100):
            with copy.damaged(name, damage):
                torn = kind == "crashed" and name.endswith(".wal")
                outcomes.append(attempt(copy.folder, name.endswith(".rdx"), torn))
    assert outcomes.count(False) > len(outcomes) / 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "a damaged length was believed"


@pytest.mark.parametrize(("offset", "mask"), [(11, 0xFF), (1040, 0x80)], ids=["first block", "size of a block"])
@pytest.mark.parametrize(("kind", "fine"), [("closed", False), ("crashed", True)])
def test_an_impossible_index_is_an_error_and_made_anew_by_the_log_of_a_crash(made, tmp_path, offset, mask, kind, fine):
    copy = Copy(made[kind], tmp_path / "t")
    with copy.damaged("t.idx", Change(offset, mask)):
        assert attempt(copy.folder, moved=False, torn=False) is fine
