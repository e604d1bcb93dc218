"""The files of a reader: which there are, how they are deleted, and what killed consumers have left.

The reader exists as long as ``reader/R.rdx`` does. The log, the lock file with the seal, and the batches begin with
``state/R``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from itertools import chain

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import SMALL, Files, check_regular, check_size, read_whole, remove_if_there, write_new
from qewqew_core.disk.opening import check_kinds, opening, refused, strange
from qewqew_core.errors import BadPath, Broken, Corrupt
from qewqew_core.formats import zbus
from qewqew_core.limits import now_ms
from qewqew_core.topic import witness
from qewqew_core.topic.reader_state import ReaderState
from qewqew_core.topic.topic_paths import LOCK, LOG, names_of_reader, rdx_of, stem_of
from qewqew_core.topic.view import Position

_logger = logging.getLogger(__name__)


def make_rdx(files: Files, path: str, place: Position, filter: str | None, mask: int = 0) -> None:
    """Write such an .rdx, completely or not at all, and durably."""
    data = bytearray(zbus.new_reader(now_ms(), place.block, place.offset))
    for at, patch in (zbus.filter_patch(filter), zbus.mask_patch(mask)):
        data[at : at + len(patch)] = patch
    write_new(files, path + ".tmp", bytes(data))
    files.rename(path + ".tmp", path)
    files.sync_directory(os.path.dirname(path))


def open_lock(files: Files, fds: list[int], stem: str) -> None:
    """Open ``state/R.lock``, created if it is missing; the descriptor is added to the list."""
    files.open_into(fds, stem + LOCK, make=True)
    check_regular(status := files.status(fds[-1]), stem + LOCK)
    witness.check_no_other(files, fds[-1], stem + LOCK, status)


def is_lock_of(files: Files, fd: int, stem: str) -> bool:
    """False if the reader was deleted, with its lock file, since that was opened: the lock of another file does not count."""
    return files.is_at(fd, stem + LOCK)


def withdraw_witness(files: Files, stem: str) -> None:
    """From now on the log may be missing."""
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open(stem + LOCK)]) as (fd,):
        witness.withdraw(files, fd)


def is_in_use(files: Files, stem: str) -> bool:
    """Whether a consumer lives."""
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open_to_read(stem + LOCK)]) as (fd,):
        return lock.first_locked(fd, 1, 0) is not None
    return False


def strangers(files: Files, directory: str, name: str, closely: bool = True) -> Iterator[BadPath | Corrupt]:
    """What is in the place of a file or directory that a reader has or may have, and is not the reader's. ``closely``: also in
    the directories of its batches: many that have ended may be kept.
    """
    homes = [stem_of(directory, name) + home for home in (places.BATCHES, places.DEAD)] if closely else []
    found = list(strange(files, chain(names_of_reader(directory, name), places.names_in(files, *homes)), "reader"))
    yield from found
    if not found and (error := stranger(files, directory, name)) is not None:
        yield error


def stranger(files: Files, directory: str, name: str, log: bool = True) -> BadPath | Corrupt | None:
    """What is wrong if others have put something in the place of the .rdx or, with ``log``, of any other file or directory of the
    reader.
    """
    rdx = rdx_of(directory, name)
    if log:
        try:
            check_kinds(files, names_of_reader(directory, name), "reader")
        except BadPath as error:
            return error
    for path in (rdx, *([stem_of(directory, name) + LOG] if log else [])):
        try:
            with opening(path, "reader"), contextlib.suppress(FileNotFoundError), Descriptors() as fds:
                fds.append(files.open_to_read(path))
                if path == rdx:
                    check_size(files.size(fds[0]), path, SMALL)
        except (BadPath, Corrupt) as error:
            return error
    return None


@contextlib.contextmanager
def passing_foreign(files: Files, directory: str, name: str, log: bool = True) -> Iterator[None]:
    """Let the block fail if there is a `stranger`. It is named in the log, once, and stops nobody."""
    try:
        yield
    except (OSError, Corrupt):
        if (strange := stranger(files, directory, name, log)) is None:
            raise
        name_once(str(strange))


@functools.lru_cache(1000)
def name_once(said: str) -> None:
    """Name in the log what is wrong."""
    _logger.warning("%s", said)


def is_temporary(files: Files, directory: str, name: str) -> bool:
    """Whether it is to end with its last consumer."""
    data, rdx = b"", rdx_of(directory, name)
    with opening(rdx, "reader"):
        with passing_foreign(files, directory, name), contextlib.suppress(FileNotFoundError):
            data = read_whole(files, rdx, most=SMALL)
        ours = files.exists(stem_of(directory, name) + LOCK)  # else a zbus server has it
    return ours and len(data) >= zbus.READER_SIZE and bool(zbus.unpack_common(data).mask & zbus.DELETE_ON_EXIT)


def delete(files: Files, directory: str, name: str) -> None:
    """Remove a reader: first its .rdx, which ends it, then everything else."""
    rdx, stem = rdx_of(directory, name), stem_of(directory, name)
    for home in (os.path.dirname(rdx), os.path.dirname(stem)):
        files.check_writable(home)
    withdraw_witness(files, stem)  # it is what tells an .rdx that is missing from one that was deleted
    for path in (rdx, rdx.removesuffix(".rdx") + ".nak", stem + LOG):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        if path == rdx:
            files.sync_directory(os.path.dirname(path))
    for home in (places.BATCHES, places.DEAD):
        if files.is_directory(stem + home):
            for batch_id in files.list(stem + home):
                places.remove_ours(files, os.path.join(stem + home, batch_id))
    places.remove_empty_homes(files, stem)
    with contextlib.suppress(FileNotFoundError):
        files.unlink(stem + LOCK)
    files.sync_directory(os.path.dirname(rdx))


def remove_leftovers(files: Files, directory: str) -> None:
    """Remove what killed consumers left while they made or deleted a reader, but not what living ones are making."""
    homes = {home: files.list(os.path.join(directory, home)) for home in ("reader", "state")}

    def names(home: str, *suffixes: str) -> set[str]:
        return {name.removesuffix(suffix) for suffix in suffixes for name in homes[home] if name.endswith(suffix)} - {""}

    making = names("reader", ".rdx.tmp") | names("state", LOG + ".tmp")
    deleted = names("state", LOG, LOCK, places.BATCHES, places.DEAD) - names("reader", ".rdx")
    for name in making | deleted:
        rdx, stem = rdx_of(directory, name), stem_of(directory, name)
        fds = Descriptors()
        try:
            open_lock(files, fds, stem)
            # A process that makes or deletes the reader has this byte.
            if lock.take(fds[0], 0, 1) and is_lock_of(files, fds[0], stem):
                for path in (rdx + ".tmp", stem + LOG + ".tmp"):
                    remove_if_there(files, path)
                if not files.exists(rdx) and not witness.is_in(files, fds[0]):  # else it is missing: who opens the reader is told
                    delete(files, directory, name)
        except FileNotFoundError:
            pass  # somebody else has deleted it
        except Broken:
            raise
        except OSError as error:  # a reader that cannot be opened is told to who opens it
            name_once(f"what is left of reader {name} could not be removed: {refused(error, stem + LOCK, 'reader') or error}")
        finally:
            fds.close()


# Batches: a manifest, and hard links to blocks


def manifest_of(stem: str, batch: BatchState) -> Manifest:
    """The manifest of a batch with its present owner and attempt."""
    body = manifest.load(places.directory_of(stem, batch))
    return Manifest(**{**vars(body), "key": batch.keys[-1], "attempt": batch.attempt})


def without_files(files: Files, stem: str, state: ReaderState) -> set[str]:
    """The ids of batches whose files somebody has removed."""

    def is_whole(batch: BatchState, names: set[str]) -> bool:
        return manifest.MANIFEST in names and (len(names) > 1 or not batch.records)

    return places.without_files(files, stem, state.batches.values(), is_whole)


def roll_forward_batches(files: Files, stem: str, state: ReaderState) -> None:
    """Make the files of batches agree with what is committed, wherever a process was killed."""
    with files.entered():
        _roll_forward(files, stem, state)


def _roll_forward(files: Files, stem: str, state: ReaderState) -> None:
    for batch in state.batches.values():
        places.roll_forward_place(files, stem, batch)
        if batch.state == "leased" and batch.attempt > 1:
            places.write_manifest(files, places.directory_of(stem, batch), manifest_of(stem, batch))
    known = {*state.batches, *state.history.ids()}
    for home in (places.BATCHES, places.DEAD):
        if files.is_directory(stem + home):
            for name in files.list(stem + home):
                directory = os.path.join(stem + home, name)
                if name not in known and files.list(directory) != [manifest.MANIFEST]:
                    places.remove_ours(files, directory)
                else:
                    remove_if_there(files, os.path.join(directory, manifest.MANIFEST + ".tmp"))


def remove_spilled(files: Files, directory: str) -> None:
    """Remove the files of sessions that were killed between making one and taking its name away."""
    home = os.path.join(directory, "state")
    for name in files.list(home):
        if name.endswith(".spill"):
            with contextlib.suppress(FileNotFoundError):
                files.unlink(os.path.join(home, name))
