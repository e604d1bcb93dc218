"""The marker of a directory of queues tells it from the empty one that stands where a mount is missing."""

from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qewqew_core import BadArgument, BadPath, Queue
from qewqew_core.cli.main import app
from qewqew_core.tools import listing, marker


def test_a_directory_is_created_private_and_keeps_its_id(tmp_path: Path) -> None:
    place = tmp_path / "a" / "queues"
    with pytest.raises(BadPath, match="No such file"):
        marker.init(str(place))
    place.parent.mkdir()
    first, made = marker.init(str(place))
    assert made
    assert marker.init(str(place)) == (first, False) == (marker.id_of(str(place)), False)
    assert (stat.S_IMODE(place.stat().st_mode), stat.S_IMODE((place / marker.NAME).stat().st_mode)) == (0o700, 0o600)
    assert os.listdir(place) == [marker.NAME]
    assert listing.find(str(place)).queues == listing.find(str(place)).topics == []
    with pytest.raises(BadArgument, match=f"has the id '{first}' already, and not 'other'"):
        marker.init(str(place), "other")
    marker.check(str(place))
    marker.check(str(place), first)


def test_directories_have_ids_of_their_own_or_the_one_that_was_given(tmp_path: Path) -> None:
    ids = {marker.init(str(tmp_path / name))[0] for name in "abc"}
    assert len(ids) == 3
    assert marker.init(str(tmp_path / "d"), "lake-1") == ("lake-1", True)
    for wrong in "", "-a", "a b", "a/b", "x" * 101, "ä", "a\n":
        with pytest.raises(BadArgument, match="the id must be 1 to 100 letters"):
            marker.init(str(tmp_path / "e"), wrong)
    assert not (tmp_path / "e").exists()


def test_a_group_shares_the_directory_and_its_marker(tmp_path: Path) -> None:
    place, group = tmp_path / "queues", os.getegid()
    known, _ = marker.init(str(place), group=str(group))
    for each, mode in (place, 0o2770), (place / marker.NAME, 0o660):
        assert (stat.S_IMODE(each.stat().st_mode), each.stat().st_gid) == (mode, group)
    assert marker.id_of(str(place)) == known
    with Queue(place / "orders", group=str(group)) as queue:
        queue.put(b"a")


def test_no_link_leads_init_to_where_somebody_else_wants_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "nothing").symlink_to(tmp_path / "no")
    assert marker.init(str(tmp_path / "link")) == (marker.id_of(str(tmp_path / "mine")), True)
    wrong = ["nothing", "nothing/"]
    if os.geteuid() == 0:
        (tmp_path / "theirs").symlink_to(tmp_path / "other")
        (tmp_path / "other").mkdir()
        os.chown(tmp_path / "theirs", 12345, 12345, follow_symlinks=False)
        wrong += ["theirs", "theirs//"]
    for name in wrong:
        with pytest.raises(BadPath, match="is a link to nothing, or one of another user"):
            marker.init(f"{tmp_path}/{name}")
    assert not (tmp_path / "no").exists()
    for empty in "", "\0":
        with pytest.raises(BadPath, match="path is a"):
            marker.init(empty)


def test_many_at_once_give_a_directory_one_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: marker.init(str(tmp_path / "queues")), range(32)))
    assert len({known for known, _ in found}) == 1
    assert sum(made for _, made in found) == 1
    assert os.listdir(tmp_path / "queues") == [marker.NAME]


def test_a_directory_without_a_marker_or_with_another_id_is_refused_for_now(tmp_path: Path) -> None:
    with pytest.raises(BadPath, match=r"has no marker .* a mount may be missing.*run `qewqew init ") as caught:
        marker.check(str(tmp_path))
    assert caught.value.errno == errno.ENOENT
    marker.init(str(tmp_path), "here")
    with pytest.raises(BadPath, match="has the id 'here', and not 'there': another one may be mounted here") as caught:
        marker.check(str(tmp_path), "there")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("what", ["link", "dangling", "pipe", "directory", "empty", "garbage", "list", "id", "large"])
def test_what_is_not_a_marker_is_named_and_left_alone(tmp_path: Path, what: str) -> None:
    place, file = tmp_path / "queues", tmp_path / "queues" / marker.NAME
    place.mkdir()
    (tmp_path / "other").write_text('{"id": "stolen"}')
    match what:
        case "link":
            file.symlink_to(tmp_path / "other")
        case "dangling":
            file.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case _:
            content = {"empty": "", "garbage": "\0{", "list": "[1]", "id": '{"id": "../x"}', "large": "x" * (1 << 17)}
            file.write_text(content[what])
    before = file.lstat()
    for look in marker.id_of, marker.check, marker.init:
        with pytest.raises(BadPath, match=marker.NAME):
            look(str(place))
    assert (file.lstat().st_ino, file.lstat().st_size, os.listdir(place)) == (before.st_ino, before.st_size, [marker.NAME])
    assert (tmp_path / "other").read_text() == '{"id": "stolen"}'


def test_the_command_says_what_it_has_done(tmp_path: Path) -> None:
    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["init", *arguments])
        return result.exit_code, result.output

    place = str(tmp_path / "queues")
    assert call(place, "--id", "lake") == (0, f"{place} is marked now, with the id lake\n")
    assert call(place) == (0, f"{place} was marked already, with the id lake\n")
    assert json.loads(call(place, "--json")[1]) == {"path": place, "id": "lake", "created": False}
    (tmp_path / "file").touch()
    assert call(str(tmp_path / "file"))[0] != 0
