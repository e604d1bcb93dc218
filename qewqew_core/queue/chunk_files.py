"""Header and chunk files, made to say what the log says: by an open queue, by recovery and by a repair."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors, close_each
from qewqew_core.disk.files import Files
from qewqew_core.errors import DiskFull, Locked
from qewqew_core.formats import chunk
from qewqew_core.queue import paths
from qewqew_core.queue.state import State


def own_chunk(files: Files, path: str, owned: dict[int, int], chunk_id: int) -> None:
    """Open and lock the file of a chunk, as a Java program does, until its descriptor in ``owned`` is closed.

    Raises `Locked` if somebody else has it.
    """
    name = chunk.chunk_path(path, chunk_id)
    try:
        owned[chunk_id] = owned.get(chunk_id) or files.open(name)
    except PermissionError:  # it may let itself be read
        raise
    except OSError:  # reading it says what is wrong with it
        pass
    if chunk_id in owned and not lock.whole_at_last(owned[chunk_id]):
        close_each(owned, chunk_id)
        raise Locked("a Java program has this chunk file open, by a header that was removed since; end it", path=name)


def store_pointers(files: Files, path: str, state: State, unsure: Collection[int] = (), durable: bool = True) -> list[int]:
    """Make head, tail and next in each chunk file say what the log says, durably; returns the chunks where they were different.

    ``unsure``: chunks that a killed process may have made, and not synced.
    """
    changed = []
    for chunk_state, pointers in state.pointers():
        if chunk_state.stored != pointers or chunk_state.id in unsure:
            with Descriptors([files.open(chunk.chunk_path(path, chunk_state.id))]) as (fd,):
                files.write(fd, chunk.POINTERS.pack(*pointers), 0)
                if durable:
                    files.sync(fd)
            chunk_state.stored = pointers
            changed.append(chunk_state.id)
    return changed


def store_header(files: Files, header_fd: int, first: int, sure: bool = True) -> None:
    """Make the header say which chunk is the first, durably, before any file that it named is removed.

    Not ``sure``: a killed process may have written the same and not synced it.
    """
    data = chunk.FIRST.pack(first)
    if not sure or files.read(header_fd, 3, 0) != data:
        files.write(header_fd, data, 0)
        files.truncate(header_fd, len(data))
        files.sync(header_fd)


def restore_header(files: Files, path: str, first: int) -> None:
    """Make the header again if it is gone: a Java program may have removed it. Durable but for its name."""
    if first and not files.exists(path):
        # If it exists after all, another one has begun a queue of its own: the next opening sees to that.
        with contextlib.suppress(FileExistsError), Descriptors([files.open(path, new=True)]) as (fd,):
            files.write(fd, chunk.FIRST.pack(first), 0)
            files.sync(fd)


def sync_moved(files: Files, path: str) -> None:
    """Make durable that spilled or staged chunks have moved into the queue's directory.

    That directory is synced first, and then the one that they came from: otherwise a power cut could find them in neither.
    """
    homes = [path + suffix for suffix in (paths.SPILL, paths.STAGED) if files.is_directory(path + suffix)]
    if homes:
        files.sync_directory(os.path.dirname(path))
    for home in homes:
        try:
            files.sync_directory(home)
        except FileNotFoundError:  # a stage that has just ended has removed it, empty
            files.sync_directory(os.path.dirname(path))


def check_free(files: Files, path: str, min_free_bytes: int, size: int) -> None:
    """Raise `DiskFull` if puts that take ``size`` more bytes of disk would leave fewer than ``min_free_bytes``."""
    if not min_free_bytes:
        return
    free = files.free(os.path.dirname(path))
    if free - size < min_free_bytes:
        raise DiskFull(
            f"the file system has {free:,} bytes free, and min_free_bytes={min_free_bytes:,} must stay free. Nothing "
            "was stored; make room, or take records",
            path=path,
        )
