"""The directories of batches: where they are, and how they are made, moved and removed, durably."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from qewqew_core.batch import manifest
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest
from qewqew_core.batch.segments import read_batch
from qewqew_core.disk.files import Files, write_new
from qewqew_core.disk.opening import check_kinds, strange
from qewqew_core.errors import BadPath, Corrupt, QewQewError
from qewqew_core.keys import key_hash

if TYPE_CHECKING:
    from qewqew_core.batch.batch import Batch

BATCHES, DEAD, DAMAGED = ".batches", ".dead", ".damaged"  # what the names of these directories end with
_ON_ITS_WAY = ".moving"  # behind the name of a directory of a batch that a repair moves home
# In them, in NAME.lease and in NAME.spill: manifests, blocks of topics, what sessions have put; chunks, behind a queue's name
_OURS, _CHUNK = re.compile(r"manifest[.]json([.]tmp)?|[0-9]{20}[.]zbus|[0-9]+[.][0-9]+"), re.compile("[1-9][0-9]{0,4}")


def directory_of(path: str, batch: Batch | BatchState) -> str:
    return os.path.join(path + (DEAD if batch.state == "dead" else BATCHES), batch.id)


def away_at(files: Files, path: str, batch: Batch | BatchState) -> str | None:
    """Where files of the batch are, if they are at its other place: somebody moved them, or brought back an old copy."""
    home = directory_of(path, batch)
    for directory in (os.path.join(path + suffix, batch.id) for suffix in (BATCHES, DEAD)):
        if directory != home and any(_is_ours(directory, name) for name in _names_in(files, directory)):
            return directory
    return None


def check_home(files: Files, path: str, batch: Batch | BatchState) -> None:
    """Raise `Corrupt` if files of the batch, which is not acknowledged, are at its other place."""
    if batch.state != "acked" and (there := away_at(files, path, batch)) is not None:
        what = f"files of batch {batch.id} are in {there}, where they do not belong; `qewqew repair` moves them back"
        raise Corrupt(what, path=directory_of(path, batch))


def bring_home(files: Files, path: str, batches: Iterable[BatchState]) -> list[tuple[str, str]]:
    """Move the directories of batches back that somebody has renamed, or exchanged with one another; returns from, to.

    What is moved holds a whole batch, which each byte proves, and no other directory is in its place but one that is moved too.
    """
    known = {batch.id: batch for batch in batches}
    homes = [path + suffix for suffix in (BATCHES, DEAD)]
    moves: dict[str, str] = {}  # to, from
    for directory in (place for place, is_batch in names_in(files, *homes) if is_batch and files.is_directory(place)):
        with contextlib.suppress(QewQewError, OSError):
            batch = known.get(manifest.load(directory).id)
            if batch is not None and batch.id != os.path.basename(directory):
                for _ in read_batch(files, directory, batch):
                    pass
                moves.setdefault(directory_of(path, batch), directory)
    while stay := [home for home in moves if files.exists(home) and home not in moves.values()]:
        for home in stay:
            del moves[home]
    for directory in moves.values():  # a kill in between leaves directories that the next one finds here
        files.rename(directory, directory + _ON_ITS_WAY)
    for home in {os.path.dirname(directory) for directory in moves.values()}:
        files.sync_directory(home)
    for home, directory in moves.items():
        make_home(files, path, os.path.dirname(home).removeprefix(path))
        files.rename(directory + _ON_ITS_WAY, home)
    for home in filter(files.is_directory, homes if moves else []):
        files.sync_directory(home)
    return [(directory, home) for home, directory in moves.items()]


def write_manifest(files: Files, directory: str, body: Manifest) -> None:
    """Put the manifest into place, whole or not at all, and durably."""
    prepare_manifest(files, directory, body)
    place_manifest(files, directory)


def prepare_manifest(files: Files, directory: str, body: Manifest) -> None:
    """Write it durably, but not yet into its place. This is the part that needs room."""
    write_new(files, os.path.join(directory, manifest.MANIFEST + ".tmp"), body.to_json())


def discard_manifest(files: Files, directory: str) -> None:
    files.unlink(os.path.join(directory, manifest.MANIFEST + ".tmp"))


def place_manifest(files: Files, directory: str) -> None:
    target = os.path.join(directory, manifest.MANIFEST)
    files.rename(target + ".tmp", target)
    files.sync_directory(directory)


def remove_ours(files: Files, directory: str) -> bool:
    """Remove the files of a batch, or of a session, and their directory. What a queue or topic does not put there stays, and the
    directory with it: others may have moved a directory of the user's here, in which they may not remove anything. Returns
    whether the directory is gone.
    """
    with files.entered():
        if not files.is_directory(directory):
            return True
        names = files.list(directory)
        ours = [name for name in names if _is_ours(directory, name)]
        for name in ours:
            files.unlink(os.path.join(directory, name))
        if is_all := ours == names:
            files.remove_directory(directory)
        files.sync_directory(os.path.dirname(directory))
        return is_all


def _is_ours(directory: str, name: str) -> bool:
    """Whether a file in NAME.SUFFIX/ID or NAME.SUFFIX may be one of the queue's or topic's, by its name."""
    queues = {os.path.basename(home).rpartition(".")[0] for home in (directory, os.path.dirname(directory))} - {""}
    return _OURS.fullmatch(name) is not None or any(
        name.startswith(queue + ".") and _CHUNK.fullmatch(name, len(queue) + 1) for queue in queues
    )


def on_disk(files: Files, directory: str) -> int:
    """Bytes of disk that the files of a batch take; 0 if they are gone."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for name in files.list(directory):
            total += files.status(os.path.join(directory, name)).st_blocks * 512
    return total


def names_in(files: Files, *homes: str, are_batches: bool = True) -> Iterator[tuple[str, bool]]:
    """The paths in these directories, those of batches, and in each batch, at which something else may be than belongs there, and
    whether a directory belongs there.
    """
    for home in homes:
        try:
            found = sorted(files.kinds(home, directories=are_batches).items())
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # what is there instead has a name of its own
            continue
        for name, is_right in found:
            path = os.path.join(home, name)
            yield path, are_batches
            if are_batches and is_right:
                yield from names_in(files, path, are_batches=False)


def check(files: Files, directory: str, what: str, *homes: str) -> None:
    """Raise `BadPath` if something else is in the place of one of these homes of batches, of the batch's directory there, or of a
    file of ours in ``directory``. ``what``: see `opening`.
    """
    above = [(place, True) for home in homes for place in (home, os.path.join(home, os.path.basename(directory)))]
    inside = names_in(files, directory, are_batches=False)
    check_kinds(files, chain(above, (each for each in inside if _is_ours(directory, os.path.basename(each[0])))), what)


def is_strange(files: Files, directory: str, what: str) -> bool:
    """Whether something else is in the place of this directory of a batch, or of a file in it. ``what``: see `opening`."""
    found = strange(files, chain([(directory, True)], names_in(files, directory, are_batches=False)), what)
    return next(found, None) is not None


def without_files(
    files: Files, path: str, batches: Iterable[BatchState], is_whole: Callable[[BatchState, set[str]], bool]
) -> set[str]:
    """The ids of those of these batches whose files somebody has removed. ``is_whole``: by the names in the batch's directory."""

    def lacks_files(batch: BatchState) -> bool:
        here, others = directory_of(path, batch), [os.path.join(path + home, batch.id) for home in (BATCHES, DEAD)]
        return not any(is_whole(batch, _names_in(files, place)) for place in (here, *others))  # a move may be under way

    return {batch.id for batch in batches if lacks_files(batch)}


def _names_in(files: Files, directory: str) -> set[str]:
    """Of a batch, in the place of whose files there is nothing else."""
    with contextlib.suppress(FileNotFoundError):
        found = files.list(directory)
        for name in found:
            if _is_ours(directory, name):
                files.check_kind(os.path.join(directory, name))
        return set(found)
    return set()


def remove_expired(files: Files, stem: str, name: str, numbers: Iterable[int]) -> bool:
    """Remove what is left of batches that have expired; whether anything was. See `LeaseState.prune_expired`."""
    directories = [os.path.join(stem + BATCHES, numbered_id(name, number)) for number in numbers]
    left = [*filter(files.is_directory, directories)]
    for directory in left:
        remove_ours(files, directory)
    return bool(left)


def remove_empty_homes(files: Files, path: str) -> bool:
    """Remove the directories that hold batches and dead letters, if they hold none; whether there were any."""
    removed = False
    for home in (path + BATCHES, path + DEAD):
        with contextlib.suppress(OSError):  # it is not there, or not empty
            files.remove_directory(home)
            removed = True
    return removed


def make_home(files: Files, path: str, suffix: str) -> str:
    """The directory that holds batches, made durably if it is not there, and ready for new ones."""
    home = path + suffix
    while not files.is_directory(home):
        if files.exists(home) and not files.is_directory(home):  # another process may make that of stages just now
            raise _in_the_way(home)
        try:
            files.make_directory(home)
        except FileExistsError:
            continue
        files.sync_directory(os.path.dirname(home))
        return home
    files.check_writable(home)
    return home


def make_way(files: Files, directory: str) -> None:
    """Remove what is left of ours there, so that another can have the name. Raises `BadPath` if there is something else."""
    if not remove_ours(files, directory):
        raise _in_the_way(directory)


def make_new(files: Files, directory: str) -> None:
    """Make a directory where there is nothing of ours."""
    try:
        files.make_directory(directory)
    except FileExistsError as error:
        raise _in_the_way(directory) from error


def _in_the_way(directory: str) -> BadPath:
    return BadPath("is in the way: a directory of QewQew belongs here. Nothing was changed; move it away", path=directory)


def roll_forward_place(files: Files, path: str, batch: BatchState) -> None:
    """Move the batch's directory between the batches and the dead letters."""
    dead, alive = os.path.join(path + DEAD, batch.id), os.path.join(path + BATCHES, batch.id)
    source, target = (alive, dead) if batch.state == "dead" else (dead, alive)
    if files.is_directory(source):
        make_home(files, path, DEAD if batch.state == "dead" else BATCHES)
        if files.is_directory(target):
            _take_over(files, source, target)
        else:
            files.rename(source, target)
    for home in (os.path.dirname(target), os.path.dirname(source)):
        if files.is_directory(home):  # also when a kill came after that rename: it may not be on disk yet
            files.sync_directory(home)


def _take_over(files: Files, source: str, target: str) -> None:
    """Let a batch that is at both places be at the second one alone: it was moved there, and somebody has brought files back, as
    a second backup into one directory does. The files of a batch never change, so a longer one is the whole one.
    """
    for name in files.list(source):
        there, here = os.path.join(source, name), os.path.join(target, name)
        is_longer = not files.is_regular(here) or files.status(there, follow=False).st_size > files.status(here).st_size
        if (
            _is_ours(source, name)
            and files.is_regular(there)
            and is_longer
            and (name != manifest.MANIFEST or not files.is_regular(here))
        ):
            files.rename(there, here)
    files.sync_directory(target)
    remove_ours(files, source)


def roll_forward_forget(files: Files, path: str, batch_ids: list[str], keep_manifest: bool) -> None:
    """Delete the files of batches. The manifest of an acknowledged one stays as long as its keys are remembered."""
    for batch_id in batch_ids:
        remove_ours(files, os.path.join(path + DEAD, batch_id))
        directory = os.path.join(path + BATCHES, batch_id)
        if not keep_manifest:
            remove_ours(files, directory)
        elif files.is_directory(directory):
            for name in files.list(directory):
                if name != manifest.MANIFEST and _is_ours(directory, name):
                    files.unlink(os.path.join(directory, name))


def queue_name(path: str) -> str:
    """What a queue is called in manifests and batch ids: its file name without ``.qew``."""
    return os.path.basename(path).removesuffix(".qew")


def batch_id(path: str, key: str) -> str:
    """A readable prefix and a hash of the key, safe in every file system and in Hadoop paths.

    Where the prefix is not the whole name, the hash is of both: no two names have the same ids.
    """
    name = queue_name(path)
    named = key if name == _prefix(name) else f"{name}/{key}"
    return numbered_id(path, int.from_bytes(key_hash(named)[:8]))


def numbered_id(path: str, number: int) -> str:
    return f"{_prefix(queue_name(path))}-{number:016x}"


def _prefix(name: str) -> str:
    letters = (letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in name[:80])
    return "".join(letters).strip("-_") or "batch"
