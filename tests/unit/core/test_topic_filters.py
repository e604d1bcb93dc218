"""What a reader can deliver is one thing for read, lease, stats and whoever looks, whatever its filter was."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from disk import NoSync
from stride import Every
from zbus_cases import reference_matches

from qewqew_core import CommitConflict, Message, Topic, inspect_reader
from qewqew_core.formats import zbus
from qewqew_core.limits import LIMITS
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic_inspection import inspect_topic


def made(path: Path, tags: str, **settings: object) -> Topic:
    """A message for each tag; ``-``: none."""
    topic = Topic(path / "t", _files=NoSync(), **settings)  # type: ignore[arg-type]
    topic.append_many([Message(b"%d" % n, None if tag == "-" else tag) for n, tag in enumerate(tags)])
    return topic


def numbers(messages: list[Message]) -> list[int]:
    return [message.number for message in messages]


def rdx_of(topic: Topic, name: str = "r") -> tuple[int, int, str | None]:
    """What a server finds there: block, offset, filter."""
    data = Path(topic.path, "reader", f"{name}.rdx").read_bytes()
    return *zbus.unpack_position(data), zbus.unpack_filter(data)


def killed(path: str, program: str) -> None:
    """Runs it on the reader ``r``, and dies without closing anything."""
    lines = f"import os, sys\nfrom qewqew_core import Topic\nt = Topic(sys.argv[1])\nr = t.reader('r')\n{program}\nos._exit(9)"
    assert subprocess.run([sys.executable, "-c", lines, path]).returncode == 9


@pytest.mark.parametrize("how", ["killed", "given back", "closed"])
def test_what_no_filter_lets_through_any_more_is_not_delivered_again(tmp_path: Path, how: str) -> None:
    with made(tmp_path, "ueeu") as topic:
        if how == "killed":
            killed(topic.path, "r.read_many(2)")
        else:
            with topic.reader("r") as reader:
                reader.read_many(2)
                if how == "given back":
                    reader.nack()
        with topic.reader("r", "e") as reader:
            assert reader.stats().records == inspect_reader(topic.path, "r").records == 2
            assert reader.position().number == 1
            assert (reader.peek().number, reader.lag()) == (1, inspect_topic(topic.path)[0].readers["r"]) == (1, 3)
            for number in (1, 2):
                batch = reader.lease(f"run {number}", max_records=1)
                assert batch is not None
                assert numbers(batch.messages()) == [number]
                batch.ack()
            assert reader.lease("nothing") is None
            assert (reader.read_many(9), reader.stats().records, reader.stats().oldest, reader.lag()) == ([], 0, None, 0)


def test_who_has_a_message_that_does_not_match_any_more_may_still_commit_it(tmp_path: Path) -> None:
    with made(tmp_path, "ueue") as topic, topic.reader("r") as one, topic.reader("r") as other:
        mine, theirs = one.read_many(2), other.read_many(2)
        session = topic.session()
        one.set_filter("e")
        assert one.stats().records == 2  # those that are in somebody's hands and may come back
        assert one.commit(*mine) == 2
        assert one.commit(*mine) == 0  # a second time
        assert other.nack(*theirs) == 1  # the other one counts as read
        assert numbers(one.read_many(9)) == [3]
        one.set_filter(None)
        assert (numbers(other.read_many(9)), one.commit()) == ([], 1)
        session.close()
        one.seek(number=0)
        assert numbers(other.read_many(9)) == [0, 1, 2, 3]
        with pytest.raises(CommitConflict):
            one.commit(mine[0]._replace(attempt=2))


@pytest.mark.parametrize("mover", ["who has it", "another one"])
def test_who_has_a_message_that_does_not_match_any_more_has_it_no_longer_when_the_reader_was_moved(
    tmp_path: Path, mover: str
) -> None:
    with Topic(tmp_path / "t") as topic, topic.reader("r") as one, topic.reader("r") as other:
        topic.append_many([Message(b"0", "b"), Message(b"1", "a")])
        assert one.read().number == 0
        by = one if mover == "who has it" else other
        by.set_filter("a")
        by.seek(number=0)
        assert one.commit() == 0
        assert one.read().number == 1
        assert one.commit() == 1


def test_a_session_commits_what_it_has_read_under_another_filter(tmp_path: Path) -> None:
    with made(tmp_path, "ueue") as topic, topic.reader("r") as reader, topic.reader("r") as other, topic.session() as session:
        session.read_many(reader, 4)
        session.append(b"new")
        other.set_filter("e")
        assert session.commit() == 1
        assert reader.stats().records == 0
        other.set_filter(None)
        assert numbers(reader.read_many(9)) == [4]


@pytest.mark.parametrize("tags", ["euuueu", "eu" * 20, "uueuuueueee"])
@pytest.mark.parametrize("block_size", [200, 700, 10_000])
@pytest.mark.parametrize("limits", [{"max_records": 1}, {"max_records": 2}, {"max_bytes": 2}, {"max_bytes": 3}])
def test_limits_end_a_read_and_a_lease_behind_the_same_message(
    tmp_path: Path, tags: str, block_size: int, limits: dict[str, int]
) -> None:
    """What does not match and follows is passed over when the next one is looked for."""
    topic = Topic(tmp_path / "t", block_size=block_size, _files=NoSync())
    for number, tag in enumerate(tags):
        topic.append(b"%d" % number, tag=tag)
    with topic, topic.reader("reads", "e") as reads, topic.reader("leases", "e") as leases:
        for round in range(len(tags)):
            read, batch = reads.read_many(**{"max_records": 1 << 20, **limits}), leases.lease(f"{round}", **limits)
            reads.commit()
            assert numbers(read) == (numbers(list(batch.messages())) if batch else [])
            if batch is not None:
                batch.ack()
            assert reads.position() == leases.position()
            size = sum(len(message.body) for message in read)
            if len(read) == limits.get("max_records") or size == limits.get("max_bytes"):
                assert reads.position().number == read[-1].number + 1
            if not read:
                break
        assert reads.lag() == 0
    assert rdx_of(topic, "reads") == rdx_of(topic, "leases")


def test_a_read_that_its_bytes_end_in_a_window_leaves_none_out(tmp_path: Path, every: Every) -> None:
    """It once went on with the next window, and never delivered what was in between."""
    for seed in every(range(12), quick=4):
        chance = random.Random(seed)
        sizes = [chance.choice([10, 100, 60_000, 200_000]) for _ in range(60)]
        with Topic(tmp_path / f"t{seed}", _files=NoSync()) as topic, topic.reader("r", redeliver_after=None) as reader:
            topic.append_many([bytes(size) for size in sizes])
            got: list[int] = []
            while found := reader.read_many(1000, chance.randint(1_500_000, 2_500_000)):
                got += numbers(found)
            assert got == [*range(60)]


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("then", ["opened", "closed", "opened after a rotation"])
def test_a_server_finds_a_killed_reader_where_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, then: str
) -> None:
    with made(tmp_path, "e" * 100) as topic:
        path = topic.path
    program = f"t.sync = {sync!r}; r.close(); r = t.reader('r')\nfor _ in range(5): r.commit(*r.read_many(10))\nr.read_many(7)"
    if then == "opened after a rotation":
        program = f"from qewqew_core.limits import LIMITS\nLIMITS.reader_log_bytes = 300\n{program}"
    if then == "closed":
        with Topic(path) as topic:
            topic.append(b"new")
            with topic.reader("other") as living:
                living.read_many(3)
                killed(path, program)
                before = rdx_of(topic, "other")
        assert before[:2] == (0, 0)
    else:
        killed(path, program)
        Topic(path).close()
    found = rdx_of(topic)
    with Topic(path) as topic, topic.reader("r") as reader:
        block, offset, number = reader.position()
        assert (number, found) == (50, (block, offset, None))


def test_opening_a_topic_leaves_living_readers_and_those_of_servers_alone(tmp_path: Path) -> None:
    with made(tmp_path, "eee") as topic:
        for name in ("closed", "a server's"):
            topic.reader(name).close()
        for file in Path(topic.path, "state").glob("a server's.*"):
            file.unlink()
        living = topic.reader("living")
        topic.close()
        for sync in ("commit", "never"):
            before = {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in Path(topic.path, "state").iterdir()}
            with Topic(topic.path, sync=sync) as again:
                again.append(b"new")
            assert {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in before} == before
            assert not Path(topic.path, "state", "a server's.log").exists()
        assert numbers(living.read_many(2)) == [0, 1]
        living.close()


@pytest.mark.parametrize("history", [1, 200])
def test_opening_a_topic_reads_the_two_ends_of_the_logs_of_readers_that_were_closed(tmp_path: Path, history: int) -> None:
    class Counting(NoSync):
        read_of = 0

        def read(self, fd: int, size: int, at: int) -> bytes:
            data = super().read(fd, size, at)
            if os.readlink(f"/proc/self/fd/{fd}").endswith(("/r.log", "/s.log")):
                self.read_of += len(data)
            return data

    with made(tmp_path, "e" * 400) as topic, topic.reader("r") as r, topic.reader("s") as s:
        for reader in (r, s):
            for _ in range(history):
                reader.commit(reader.read())
    files = Counting()
    with Topic(topic.path, _files=files) as again:
        again.append(b"new")
    assert files.read_of <= 2 * 3 * 40  # on opening the topic, on the first append, and on closing it


# A model: two readers by two consumers each, filters that change, kills, small limits


class Model:
    def __init__(self) -> None:
        self.filter: str | None = None
        self.ahead: list[int] = []  # not delivered, nor passed over: a filter that is set now may still match them
        self.tags: list[str | None] = []
        self.hands: dict[int, int | None] = {}  # number: consumer, or None: nobody's; these fit the filter

    def fits(self, number: int) -> bool:
        return reference_matches(self.filter, self.tags[number])

    def left(self) -> list[int]:
        return [number for number in self.ahead if self.fits(number)]

    def next(self, limit: int) -> list[int]:
        return [*sorted(number for number, who in self.hands.items() if who is None), *self.left()][:limit]

    def take(self, taken: list[int], limit: int, who: int | None) -> None:
        """Who looks for more than there is passes over all the rest."""
        reached = max([number for number in taken if number in self.ahead], default=-1)
        self.ahead = [number for number in self.ahead if len(taken) == limit and number > reached]
        for number in taken:
            self.hands.pop(number, None)
            if who is not None:
                self.hands[number] = who


def test_a_reader_with_changing_filters_does_what_a_list_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Every
) -> None:
    monkeypatch.setattr(LIMITS, "look_at_owners", 0)
    monkeypatch.setattr(LIMITS, "reader_log_bytes", 2500)
    for seed in every(range(60), quick=10, full=2):
        run_model(tmp_path / str(seed), random.Random(seed))


def run_model(folder: Path, chance: random.Random) -> None:
    folder.mkdir()
    model = Model()
    topic = Topic(folder / "t", block_size=chance.choice([300, 2000]), sync=chance.choice(["commit", "never"]), _files=NoSync())
    consumers: dict[int, Reader] = {n: topic.reader("r", redeliver_after=None) for n in (1, 2)}
    read: dict[int, dict[int, Message]] = {1: {}, 2: {}}  # what each has in its hands, also what does not fit any more
    for step in range(60):
        who = chance.choice([1, 2])
        reader, limit = consumers[who], chance.choice([1, 1, 2, 3, 9])
        act = chance.choice(["append", "append", "read", "read", "lease", "commit", "nack", "filter", "filter", "kill", "close"])
        what = f"step {step}: {act} by {who}"
        if act == "append":
            for tag in chance.choices(["e", "u", "e.u", None], k=limit):
                model.ahead.append(topic.append(b"%d" % len(model.tags), tag=tag))
                model.tags.append(tag)
        elif act == "read":
            expected = model.next(limit)
            found = reader.read_many(limit)
            assert numbers(found) == expected, what
            model.take(expected, limit, who)
            read[who] |= {message.number: message for message in found}
        elif act == "lease":
            expected = model.next(limit)
            batch = reader.lease(f"{step}", max_records=limit)
            assert (numbers(list(batch.messages())) if batch else []) == expected, what
            model.take(expected, limit, None)
            if batch is not None:
                batch.ack()
        elif act in ("commit", "nack"):
            some = [message for message in read[who].values() if chance.random() < 0.5]
            if some and act == "commit":
                assert reader.commit(*some) == len(some), what
                for message in some:
                    if model.hands.get(message.number) == who:
                        del model.hands[message.number]
            elif some:
                back = [message.number for message in some if model.hands.get(message.number) == who]
                assert reader.nack(*some) == len(back), what
                model.hands |= dict.fromkeys(back, None)
            for message in some:
                del read[who][message.number]
        elif act == "filter":
            model.filter = chance.choice([None, "e", "e.#", "u;e", "x"])
            reader.set_filter(model.filter)
            model.hands = {number: owner for number, owner in model.hands.items() if model.fits(number)}
        else:
            if act == "kill":
                reader._release()  # as the system does it, with its locks
            else:
                reader.close()
            if chance.random() < 0.3:
                topic.close()
                topic = Topic(topic.path, block_size=topic.block_size, sync=topic.sync, _files=NoSync())  # type: ignore[arg-type]
                other = 3 - who
                consumers[other].close()
                model.hands |= {number: None for number, owner in model.hands.items() if owner == other}
                consumers[other], read[other] = topic.reader("r", redeliver_after=None), {}
            model.hands |= {number: None for number, owner in model.hands.items() if owner == who}
            consumers[who], read[who] = topic.reader("r", redeliver_after=None), {}
        waiting = len(model.left()) + len(model.hands)
        seen = consumers[who].stats().records
        assert seen == inspect_reader(topic.path, "r").records == waiting, what
        assert consumers[who].lag() == inspect_topic(topic.path)[0].readers["r"] >= waiting, what
        first = min([*model.left(), *model.hands], default=len(model.tags))
        assert consumers[who].position().number <= first, what
    for one in consumers.values():
        one.close()
    topic.close()
    assert os.path.exists(topic.path)
