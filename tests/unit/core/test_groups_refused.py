"""What is not a group's, and who is not in it: refused by name, with owner, mode and what to do, before anything changes."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import run
from stride import swept
from test_groups import (  # noqa: F401 - fixtures
    GROUP,
    ONE,
    OTHER,
    OUTSIDER,
    RECORD,
    SHARED,
    USES,
    as_member,
    as_outsider,
    group_home,
    of_others,
    packages_are_imported,
    sessions_and_stages_spill_soon,
    use_queue,
    use_topic,
)
from test_owners import as_root, as_user, directory_of
from test_planted import NAMES, QUEUE

from qewqew_core import BadArgument, BadPath, Batch, QewQewError, Queue, Stage, Topic, inspect, repair, repair_topic
from qewqew_core.batch.places import DAMAGED
from qewqew_core.topic.topic_inspection import inspect_topic

pytestmark = as_root


@pytest.mark.parametrize("use", USES)
def test_who_is_not_in_the_group_gets_nothing(use: str, home: Path) -> None:
    as_member(USES[use], home / "s", ONE, 0)
    open_to_see = home.with_name(home.name + "-opened")  # even if the directory itself were not in the way
    shutil.copytree(home, open_to_see, copy_function=shutil.copy2)
    for path in (open_to_see, *open_to_see.rglob("*")):
        os.chown(path, ONE, GROUP)
        path.chmod(0o2770 if path.is_dir() else 0o660)
    open_to_see.chmod(0o2771)

    def look(path: Path) -> None:
        with pytest.raises(BadPath, match="no permission"):
            (Topic if "topic" in use else Queue)(path)
        with pytest.raises(BadArgument, match=rf"{OUTSIDER} is not in the group {GROUP}.*Nothing was changed"):
            (Topic if "topic" in use else Queue)(path, **SHARED)
        for name in ("s", "s.wal", "s.batches", "s/s.wal", "s/data"):
            for read in (os.listdir, Path.read_bytes):
                with pytest.raises((PermissionError, FileNotFoundError, NotADirectoryError)):
                    read(open_to_see / name)

    try:
        as_outsider(look, home / "s")
    finally:
        shutil.rmtree(open_to_see)


def tried(store: str, path: Path, **settings: Any) -> str:
    """What using it says."""
    try:
        if store == "topic":
            with Topic(path, max_attempts=1, **settings) as topic, topic.reader("r") as reader:
                topic.append_many([RECORD] * 30)
                for key in "ab":
                    batch = reader.lease(key, max_records=2)
                    assert isinstance(batch, Batch)
                    batch.nack("x")
        elif store == "stage":
            with Stage(path, chunk_size=1000, **settings) as stage:
                stage.put_many([RECORD * 30] * 15)
        else:
            with Queue(path, chunk_size=1000, max_attempts=1, **settings) as queue:
                queue.put_many([RECORD] * 300)
                for key in "ab":
                    batch = queue.lease(key, max_records=2)
                    assert isinstance(batch, Batch)
                    batch.nack("x")
                with queue.session() as session:
                    session.put_many([RECORD * 30] * 15)
    except QewQewError as error:
        return str(error)
    return ""


PLANTED = {  # modes of a file and of a directory, and the group
    "another group": (0o660, 0o2770, OTHER),
    "its maker alone": (0o600, 0o700, GROUP),
    "others read": (0o664, 0o2775, GROUP),
    "others write": (0o666, 0o2777, GROUP),
    "sticky": (0o1660, 0o3770, GROUP),
}
UNUSED = ".30001", DAMAGED  # a new queue takes another number; only repairs set something aside


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    ("store", "name", "is_directory"),
    swept([*NAMES, *(("stage", name, is_directory) for name, is_directory in QUEUE)], quick=3),
    ids=lambda value: str(value),
)
def test_what_has_another_mode_or_group_is_refused_by_name(
    store: str, name: str, is_directory: bool, planted: str, home: Path
) -> None:
    if store == "topic":  # its directories are right
        as_member(use_topic, home / "s", OTHER)
        for each in (home / "s").rglob("*"):
            if not each.is_dir():
                each.unlink()
    place, mode, group = home / name, PLANTED[planted][is_directory], PLANTED[planted][2]
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.mkdir() if is_directory else place.touch()
    os.chown(place, OTHER, group)
    place.chmod(mode)
    (home / "told").touch()
    os.chown(home / "told", ONE, GROUP)

    def use(path: Path) -> None:
        (path.parent / "told").write_text(tried(store, path, **SHARED))

    as_member(use, home / "s")
    told = (home / "told").read_text()
    if told:
        assert f"{place}: " in told or f"{place} " in told
        assert f"belongs to {OTHER}" in told
        assert f"mode {mode:04o}" in told
    elif place.exists() and not name.endswith(UNUSED):
        assert str(place) not in of_others(home)  # one of ours has replaced it
    for found in of_others(home):  # and nothing secret is where others may read
        assert Path(found).is_dir() or RECORD not in Path(found).read_bytes()


BAD_HOMES = [(0o770, GROUP), (0o2775, GROUP), (0o2777, GROUP), (0o3770, GROUP), (0o2750, GROUP), (0o2770, ONE)]


@pytest.mark.parametrize(("mode", "group"), BAD_HOMES, ids=lambda value: f"{value:o}" if value < 0o7777 else str(value))
@pytest.mark.parametrize("store", ["queue", "stage", "topic"])
def test_a_directory_that_is_not_the_groups_is_refused_with_what_to_do(store: str, mode: int, group: int, home: Path) -> None:
    """Where others may write, who makes a file in a directory with set-group-id gives it the group."""
    place = home / "s" if store == "topic" else home
    place.mkdir(exist_ok=True)
    os.chown(place, ONE, group)
    place.chmod(mode)

    def use(path: Path) -> None:
        told = tried(store, path, **SHARED)
        assert told.startswith(
            f"{place}: a directory that belongs to {ONE} and the group {group}, mode {mode:04o}, cannot be part of"
        )
        assert f"chgrp {GROUP} {place}; chmod 2770 {place}" in told
        assert "Nothing was changed" in told

    as_member(use, home / "s")
    assert not [*place.iterdir()]


@pytest.mark.parametrize("is_member", [False, True])
@pytest.mark.parametrize("store", ["queue", "stage", "topic"])
def test_a_directory_of_who_is_not_in_the_group_is_refused(store: str, is_member: bool) -> None:
    """Its owner can make files of the group in it, and the mode alone does not tell."""
    owner = next(user for user in pwd.getpwall() if user.pw_uid and user.pw_gid)
    groups = (group.gr_gid for group in grp.getgrall() if group.gr_gid != owner.pw_gid and owner.pw_name not in group.gr_mem)
    group = owner.pw_gid if is_member else next(filter(None, groups))
    with directory_of(owner.pw_uid, 0o755) as home:
        place = home / "s" if store == "topic" else home
        place.mkdir(exist_ok=True)
        os.chown(place, owner.pw_uid, group)
        place.chmod(0o2770)

        def use(path: Path) -> None:
            told = tried(store, path, group=str(group))
            if is_member:
                assert not told
                return
            who = f"{owner.pw_name} ({owner.pw_uid}), who is not in the group {grp.getgrgid(group).gr_name} (getent group)"
            assert told.startswith(f"{place}: a directory that belongs to {who}")
            assert f"chown root {place}" in told
            with pytest.raises(BadPath, match="who is not in the group"):
                (inspect_topic if store == "topic" else inspect)(path)

        as_user(use, home / "s", ONE, [group])
        assert is_member or not [*place.iterdir()]
        if not is_member:
            os.chown(place, 0, group)
            is_member = True
            as_user(use, home / "s", ONE, [group])


@pytest.mark.parametrize("kind", ["access", "default"])
@pytest.mark.parametrize("store", ["queue", "topic"])
def test_a_directory_whose_access_list_may_let_others_in_is_refused(store: str, kind: str, home: Path) -> None:
    """Its mode does not show them."""
    place = home / "s" if store == "topic" else home
    place.mkdir(exist_ok=True)
    os.chown(place, ONE, GROUP)
    place.chmod(0o2770)
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 7, OUTSIDER), (4, 7, nobody), (0x10, 7, nobody), (0x20, 0, nobody)]  # acl(5)
    os.setxattr(
        place, f"system.posix_acl_{kind}", struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)
    )
    assert place.stat().st_mode & 0o7777 == 0o2770

    def use(path: Path) -> None:
        told = tried(store, path, group=str(GROUP))
        assert f"{place}: a directory with an access list (getfacl {place})" in told
        assert f"remove the list (setfacl -b -k {place})" in told
        assert not [*place.iterdir()]

    as_member(use, home / "s", ONE)
    os.removexattr(place, f"system.posix_acl_{kind}")
    as_member(USES[store], home / "s", OTHER)


@pytest.mark.parametrize("user", [ONE, OTHER, 0])
@pytest.mark.parametrize("store", ["queue", "stage", "topic"])
def test_a_store_of_a_group_is_not_opened_without_its_name(store: str, user: int, home: Path) -> None:
    """Not even by who has made it: new files would keep the others out."""
    as_member(USES[store], home / "s", ONE)
    before = sorted(home.rglob("*"))

    def use(path: Path) -> None:
        acts: list[Callable[[], str]] = [partial(tried, store, path)]
        acts.append(partial(tried, "topic" if store == "topic" else "queue", path))
        acts.append(lambda: run("repair", str(path), "--yes").stderr)
        for act in acts:
            told = act()
            assert f"belongs to {ONE}" in told
            assert f"is shared by the group {GROUP}" in told
            assert f"open it with group='{GROUP}' (qewqew --group {GROUP})" in told
            assert "Nothing was changed" in told

    use(home / "s") if user == 0 else as_member(use, home / "s", user)
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("first", [True, False], ids=["header is there", "header is missing"])
def test_a_stage_without_the_name_makes_nothing_that_keeps_others_out(first: bool, home: Path) -> None:
    as_member(use_queue, home / "s", ONE)
    if not first:
        (home / "s").unlink()
    before = sorted(home.rglob("*"))

    def use(path: Path) -> None:
        with pytest.raises(BadPath, match="is shared by the group"):
            Stage(path)

    as_member(use, home / "s", OTHER)
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("user", [ONE, OTHER])
@pytest.mark.parametrize("store", ["queue", "stage", "topic"])
def test_a_store_of_one_user_is_not_opened_for_a_group(store: str, user: int, home: Path) -> None:
    as_member(lambda path: tried(store, path), home / "s", ONE)
    before = {path: path.lstat().st_mode for path in home.rglob("*")}

    def use(path: Path) -> None:
        told = tried(store, path, **SHARED)
        assert f"belongs to {ONE}" in told, told
        assert f"chgrp {GROUP} " in told or "chown, chmod" in told

    as_member(use, home / "s", user)
    assert {path: path.lstat().st_mode for path in home.rglob("*")} == before


@pytest.mark.parametrize("group", [1, b"x", "", "no-such-group", "-1", "²", str(1 << 70), "4294967295", ("a",)])
@pytest.mark.parametrize("act", [Queue, Stage, Topic, repair, repair_topic])
def test_a_group_that_is_none_is_refused(act: Callable[..., object], group: Any, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="group"):
        act(tmp_path / "s", group=group)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("act", [Queue, Stage, Topic, repair, repair_topic])
def test_who_is_no_member_is_told_so_before_anything_is_made(act: Callable[..., object], home: Path) -> None:
    home.chmod(0o777)

    def use(path: Path) -> None:
        with pytest.raises(BadArgument, match=rf"user {OUTSIDER} is not in the group {GROUP}"):
            act(path, **SHARED)

    as_outsider(use, home / "s")
    assert not [*home.iterdir()]


def test_a_group_may_be_given_by_its_name(home: Path) -> None:
    group = next(each for each in grp.getgrall() if each.gr_gid)
    os.chown(home, ONE, group.gr_gid)
    home.chmod(0o2770)

    def use(path: Path) -> None:
        with Queue(path, group=group.gr_name) as queue:
            queue.put(RECORD)
        with pytest.raises(BadPath, match=f"group='{group.gr_name}'"):
            Queue(path)

    as_user(use, home / "s", ONE, [group.gr_gid])
    assert (home / "s").stat().st_gid == group.gr_gid
