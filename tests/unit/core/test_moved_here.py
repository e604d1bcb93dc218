"""A directory of the user's that others have renamed to a name of ours, where they may not remove anything in it: nor do we."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import tree
from stride import swept
from test_owners import USER, as_root, as_user, directory_of, queue_once, sessions, stage_once, topic_once
from test_planted import QUEUE, TOPIC, packages_are_imported, sessions_and_stages_spill_soon, use_queue, use_topic  # noqa: F401

from qewqew_core import BadPath, Queue, Topic
from qewqew_core.batch import places, published
from qewqew_core.queue import paths

MINE = ("0", "1", "7", "data.1", "main.tex", "0123456789abcdef.txt", "chapters/one.tex", "chapters/0", ".git/HEAD")


def write_thesis(home: Path) -> None:
    for name in MINE:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("years of work")


def crashed_queue(path: Path) -> None:
    """Batches of each kind, and what sessions and stages leave where they were killed."""
    with Queue(path, chunk_size=1000, max_attempts=1) as queue:
        queue.put_many([b"x" * 100] * 30)
        queue.lease("leased", max_records=2)
        batch = queue.lease("dead", max_records=2)
        assert batch is not None
        batch.nack("no")


def crashed_topic(path: Path) -> None:
    with Topic(path, max_attempts=1) as topic, topic.reader("r") as reader:
        topic.append_many([b"x" * 100] * 30)
        reader.lease("leased", max_records=2)
        batch = reader.lease("dead", max_records=2)
        assert batch is not None
        batch.nack("no")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with directory_of(0, 0o777) as path:
        yield path


@as_root
@pytest.mark.parametrize("user", [USER, 0], ids=["user", "root"])
@pytest.mark.parametrize("name", swept([name for name, is_directory in (*QUEUE, *TOPIC) if is_directory], quick=4))
def test_a_directory_that_was_moved_to_a_name_of_ours_loses_nothing(open_to_all: Path, name: str, user: int) -> None:
    """As the whole directory, and as one in it; before a queue is made, and in one that is in use."""
    make, use = (crashed_topic, use_topic) if "/" in name else (crashed_queue, use_queue)

    def check(path: Path, place: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            place.rename(place.with_name("away"))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_thesis(place)
        for act in (use, *((queue_once, stage_once, sessions) if use is use_queue else (topic_once,))):
            with contextlib.suppress(Exception):
                act(path)
            left = {each.name for each in path.parent.rglob("*") if each.is_file() and each.read_bytes() == b"years of work"}
            assert left == {Path(each).name for each in MINE}, f"{name} at {place}"

    for number, inside in enumerate(("", "mine", "s-0000000000000001")):
        for begin in (lambda path: None, make):
            home = open_to_all / f"{number}{begin is make}"

            def act(home: Path, begin: Callable[[Path], None] = begin, inside: str = inside) -> None:
                home.mkdir()
                begin(home / "s")
                check(home / "s", home / name / inside)

            act(home) if user == 0 else as_user(act, home, user)


def test_a_batch_directory_that_is_the_users_keeps_its_files_and_the_lease_says_so(tmp_path: Path) -> None:
    with Queue(tmp_path / "q") as queue:
        queue.put_many([b"1", b"2", b"3"])
        batch = queue.lease("first", max_records=1)
        assert batch is not None
        (Path(batch.manifest_path).parent / "notes.txt").write_text("mine")
        batch.ack()
        assert Path(batch.manifest_path).with_name("notes.txt").read_text() == "mine"
        write_thesis(tmp_path / ("q" + paths.LEASE))
        with pytest.raises(
            BadPath, match=r"is in the way: a directory of QewQew belongs here. Nothing was changed; move it away"
        ):
            queue.lease("second")
        shutil.move(tmp_path / ("q" + paths.LEASE), tmp_path / "thesis")
        again = queue.lease("second")
        assert again is not None
        assert list(again) == [b"2", b"3"]
    assert (tmp_path / f"q{places.BATCHES}").is_dir()


def test_what_is_no_published_batch_is_not_removed(tmp_path: Path) -> None:
    write_thesis(tmp_path / "pub" / "q-0000000000000001")
    before = tree(tmp_path)
    with pytest.raises(BadPath, match=r"it has a file .*, which is not ours, so it was left as it is"):
        published.remove(str(tmp_path / "pub"), ["q-0000000000000001"])
    assert tree(tmp_path) == before
