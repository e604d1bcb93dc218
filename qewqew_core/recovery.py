"""Opening whatever is on disk: what a clean close, a crash of ours, or a Java program has left.

The procedure, by the numbers that stand in the code and in docs/format.md:

1. Look, and change nothing: header, names, transaction log. What contradicts itself is `CorruptQueue`.
2. No log: the chunk files are all there is (a Java program made them). Step over every record of the chain.
3. A clean log (its last frame is a checkpoint): the header must say the same, and the pointers of the first and the last
   chunk. If they do not, a Java program has used the queue since: believe the files, as in 2, and keep batches and keys
   of the log.
4. A log that is not clean is the truth. Every pointer in the files must be one that we may have stored: that of
   the last checkpoint, or of the end of the log. Otherwise another program has used the queue after our crash,
   and nobody can say which records are meant: `CorruptQueue`.
5. Cut a torn frame off the log.
6. Finish what the last commit began: the moves of a lease, a put-back, an end of a batch.
7. Redo: payload that the log carries goes into the chunk files.
8. Remove what no commit refers to: chunks read to the end, an unfinished new batch, empty new chunks, temporary files.
9. Checkpoint: store pointers and header, make them durable, and write the checkpoint frame. (Or, from 2 and 3, a new log.)

A crash in any step leaves what the same steps finish. Files with records that nothing refers to are left where they
are: never delivered, never overwritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from qewqew_core import batch as batches
from qewqew_core import chunk, journal, layout, manifest
from qewqew_core import log as logs
from qewqew_core.errors import BadPath, CorruptQueue
from qewqew_core.files import Files, read_whole, write_new
from qewqew_core.journal import Log
from qewqew_core.log import Replayed
from qewqew_core.reading import BLOCK, read_pointers, scan, unread
from qewqew_core.state import Chunk, State


@dataclass
class Found:
    """Step 1: what is on disk."""

    path: str
    header: int  # id of the first chunk; 0 also where there is no header
    ids: set[int]  # of chunk files
    log: Replayed | None


def look(files: Files, path: str, header: bytes | None) -> Found:
    """Step 1. ``header`` is the content of the header file."""
    first, longer = chunk.NONE, False
    if header:
        if len(header) == 1:
            raise CorruptQueue("the header file has one byte; it must have two. Nothing was changed", path=path, offset=0)
        (first,) = chunk.FIRST.unpack_from(header)
        longer = len(header) > chunk.FIRST.size
    ids = layout.chunk_ids(path, files.list(os.path.dirname(path)))
    replayed = None
    log_path = path + layout.LOG
    if files.exists(log_path):
        replayed = logs.replay(read_whole(files, log_path), log_path)
    if longer and first not in ids and replayed is None:
        raise BadPath("is not the header file of a queue: it has more than two bytes and no chunk files beside it", path=path)
    check_reference(first, path, 0)
    return Found(path, first, ids, replayed)


def check_reference(chunk_id: int, path: str, offset: int) -> None:
    if chunk_id > chunk.MAX_ID:
        raise CorruptQueue(
            f"refers to chunk {chunk_id}; ids end at {chunk.MAX_ID}. Nothing was changed", path=path, offset=offset
        )


def agree(files: Files, found: Found, *, all_chunks: bool = False) -> bool:
    """Step 3: whether header and pointers say what a clean log says.

    The original reads from the first chunk and writes to the last: no other one changes alone, unless it is damaged.
    """
    assert found.log is not None
    state = found.log.state
    if found.header != state.first or not state.chain.keys() <= found.ids:
        return False
    expected = state.pointers()
    looked_at = {one.id for one, _ in (expected if all_chunks else expected[:1] + expected[-1:])}
    looked_at.update(layout.chunk_ids(found.path, files.irregular(os.path.dirname(found.path))))  # that is refused
    for one, pointers in expected:
        if one.id not in looked_at:
            continue
        on_disk = read_pointers(files, chunk.chunk_path(found.path, one.id))
        if on_disk[1:] != pointers or on_disk.size < one.tail:
            return False
    if state.chain and found.log.seal and _made_anew(files, found.path, found.log.seal):
        return all(as_committed(files, chunk.chunk_path(found.path, one.id), one) for one in state.chain.values())
    return True


def seal(files: Files, path: str) -> bytes:
    """What a checkpoint says of the files, so that `_made_anew` can tell."""
    return logs.checkpoint(files.identity(path + layout.LOG)[0], *files.identity(path))


def _made_anew(files: Files, path: str, seal: tuple[int, ...]) -> bool:
    """Whether another program has written the header since the checkpoint, though it says the same.

    The original removes an empty queue and makes it anew, perhaps with other records of the same sizes. In a copy of the
    directory nothing can be told: there the log is another file too.
    """
    log_inode, *header = seal
    return files.identity(path + layout.LOG)[0] == log_inode and files.identity(path) != tuple(header)


def as_committed(files: Files, path: str, one: Chunk) -> bool:
    fd = files.open_to_read(path)
    try:
        for _ in unread(files, fd, path, one):
            pass
    except CorruptQueue:
        return False
    finally:
        files.close(fd)
    return True


def chain_of(files: Files, found: Found) -> tuple[dict[int, Chunk], list[int]]:
    """Step 2: the chunks with records, in order, as the files alone tell, and the ids of empty ones in the chain.

    The rules for states that the original leaves are REQ-24 to REQ-35 of the format: a missing first chunk is
    skipped if its successor is there, a missing next chunk ends the chain, an uninitialised chunk is empty.
    """
    chain: dict[int, Chunk] = {}
    empty: dict[int, None] = {}
    current = found.header
    if current and current not in found.ids:
        _must_be_read(files, found)
        current = chunk.successor(current)  # the original unlinks a read chunk before it moves the header on
    while current in found.ids:
        path = chunk.chunk_path(found.path, current)
        if current in chain or current in empty:
            raise CorruptQueue(f"the chain of chunks comes back to chunk {current}. Nothing was changed", path=path, offset=8)
        on_disk = read_pointers(files, path)
        size, head, tail, following = on_disk
        check_reference(following, path, 8)
        if size < chunk.BEGIN or (head in (0, chunk.BEGIN) and tail == 0) or (chunk.BEGIN <= tail < head <= size):
            empty[current] = None
        elif not chunk.BEGIN <= head <= tail <= size:
            raise CorruptQueue(
                f"head {head} and tail {tail} do not lie in the chunk, which has {size} bytes. Nothing was changed",
                path=path,
                offset=0 if not chunk.BEGIN <= head <= size else 4,
            )
        elif head == tail:
            empty[current] = None
        else:
            chain[current] = scan(files, path, current, on_disk)
        current = following
    return chain, list(empty)


def _must_be_read(files: Files, found: Found) -> None:
    """The header refers to a missing chunk: the original leaves that only when it has read and removed the chunk."""
    if found.log is None or chunk.successor(found.header) in found.ids:
        return
    for one, pointers in found.log.state.pointers()[:1]:
        if one.id in found.ids and read_pointers(files, chunk.chunk_path(found.path, one.id))[1:] == pointers:
            raise CorruptQueue(
                f"the header refers to chunk {found.header}, of which there is no file, but chunk {one.id} has records that "
                "nobody has taken: the header was damaged. Nothing was changed; restore it",
                path=found.path,
                offset=0,
            )


def must_be_ours(files: Files, found: Found) -> None:
    """Step 4: the files of a queue that crashed must be as we may have left them."""
    assert found.log is not None
    state, expected = found.log.state, found.log.firsts | {found.log.state.first}
    torn = {first & 0xFF00 | second & 0x00FF for first in expected for second in expected}  # a write may stop in the middle
    if found.header not in torn:
        raise CorruptQueue(
            f"the header says chunk {found.header}, the transaction log says {sorted(expected)}: {_FOREIGN}",
            path=found.path,
            offset=0,
        )
    coming = _coming_files(found)
    for one, pointers in state.pointers():
        path = chunk.chunk_path(found.path, one.id)
        if one.id not in found.ids:
            if one.id in coming:
                continue
            raise CorruptQueue(
                "the chunk file is missing; the transaction log says that it holds records. Nothing was changed", path=path
            )
        on_disk = read_pointers(files, path)
        if on_disk.size < one.tail:
            raise CorruptQueue(
                f"the chunk file has {on_disk.size} bytes, its records end at {one.tail}. Nothing was changed", path=path
            )
        if one.stored is not None and any(
            found_one not in (old, new) for found_one, old, new in zip(on_disk[1:], one.stored, pointers, strict=True)
        ):
            raise CorruptQueue(
                f"head, tail, next are {on_disk[1:]}, not {one.stored} or {pointers}: {_FOREIGN}", path=path, offset=0
            )


_FOREIGN = (
    "damage, or another program has used the queue after a crash, before QewQew had recovered it. Nothing was changed; "
    "restore the files of the queue from before that"
)


def _coming_files(found: Found) -> set[int]:
    """Chunk files that the unfinished last commit is about to put back beside the queue."""
    rare = found.log and found.log.last_rare
    return set(rare["chunks"]) if rare and rare["op"] == "put_back" else set()


def recover(files: Files, path: str, header_fd: int) -> tuple[State, Log, set[int]]:
    """Open the queue whose header is locked: its state, its log, and the ids that must not be given to new chunks.

    Raises `CorruptQueue` before anything is changed.
    """
    found = look(files, path, files.read(header_fd, 64, 0))
    if found.log is not None and found.log.translated:
        files.close(_new_log(files, path, found.log.translated))
    if found.log is not None and found.log.last_rare is not None and found.log.last_rare["op"] == "repair":
        raise CorruptQueue("a repair of the queue was interrupted; repair it again, that finishes it", path=path)
    if found.log is not None and not found.log.clean:
        must_be_ours(files, found)
        state, log = found.log.state, open_log(files, found.log, path)
        _recover_crashed(files, path, header_fd, found, found.log, log)
    elif found.log is not None and agree(files, found):
        if found.log.seal[:1] != files.identity(path + layout.LOG)[:1]:  # no checkpoint is in this file: a killed process may
            files.sync_directory(os.path.dirname(path))  # have renamed it, and not synced that
        state, log = found.log.state, open_log(files, found.log, path)
    else:
        state, log = _believe_files(files, header_fd, found)
    remove_leftovers(files, path, state, found.ids)
    taken = layout.chunk_ids(path, files.list(os.path.dirname(path)))
    return state, log, taken


def _recover_crashed(files: Files, path: str, header_fd: int, found: Found, replayed: Replayed, log: Log) -> None:
    """Steps 5 to 9 for a log that is not clean."""
    state = replayed.state
    try:
        log.sync(log.position, refuse=False)  # after a kill its last frames may be in the page cache only: files follow the log
        finish_moves(files, path, state, replayed.last_rare)
        sync_spill(files, path)
        redo(files, path, state, replayed.redo)
        store_pointers(files, path, state, unsure=replayed.made)
        store_header(files, header_fd, state.first, sure=False)
        for chunk_id in sorted(replayed.gone & found.ids):
            files.unlink(chunk.chunk_path(path, chunk_id))
        files.sync_directory(os.path.dirname(path))
        log.sync(log.append(logs.CHECKPOINT, seal(files, path)), refuse=False)
    except BaseException:
        log.close()
        raise


def open_log(files: Files, replayed: Replayed, path: str) -> Log:
    """Step 5."""
    fd = files.open(path + layout.LOG)
    if files.size(fd) > replayed.end:
        files.truncate(fd, replayed.end)
    return Log(files, path + layout.LOG, fd, replayed.generation, replayed.end, replayed.snapshot_end, frames=replayed.frames)


def finish_moves(files: Files, path: str, state: State, rare: dict[str, Any] | None) -> None:
    """Step 6."""
    if rare is None:
        return
    op = rare["op"]
    if op == "lease":
        batches.settle_lease(files, path, state.batches[rare["id"]])
    elif op == "lease_again":
        batches.settle_manifest(files, path, state.batches[rare["id"]])
    elif op == "release":
        batches.settle_place(files, path, state.batches[rare["id"]])
    elif op == "put_back":
        batches.settle_put_back(files, path, rare["id"], list(zip(rare["files"], rare["chunks"], strict=True)))
    elif op == "forget":
        batches.settle_forget(files, path, rare["ids"], rare["keep_manifest"])


def sync_spill(files: Files, path: str) -> None:
    """Chunks that sessions spilled have left this directory for the queue's: a move is durable when both are synced.

    First that which they are in now, or a power cut could find them in neither.
    """
    if files.is_directory(path + layout.SPILL):
        files.sync_directory(os.path.dirname(path))
        files.sync_directory(path + layout.SPILL)


def redo(files: Files, path: str, state: State, redo: dict[int, list[tuple[int, bytes]]]) -> None:
    """Step 7. Made durable by the checkpoint, which syncs every chunk whose pointers it stores."""
    for chunk_id, runs in redo.items():
        fd = files.open(chunk.chunk_path(path, chunk_id))
        try:
            for offset, frames in runs:
                files.write(fd, frames, offset)
            files.sync(fd)
        finally:
            files.close(fd)


def remove_leftovers(files: Files, path: str, state: State, ids: set[int]) -> None:
    """Step 8."""
    for temporary in (path + layout.LOG + ".tmp",):
        if files.exists(temporary):
            files.unlink(temporary)
    batches.remove_tree(files, path + layout.LEASE)
    batches.remove_tree(files, path + layout.SPILL)
    removed = False
    for chunk_id in sorted(ids - state.chain.keys()):
        name = chunk.chunk_path(path, chunk_id)
        with contextlib.suppress(OSError):  # gone meanwhile, or no file at all: it is not ours
            if read_pointers(files, name)[1:] == (chunk.BEGIN, chunk.BEGIN, chunk.NONE) or _is_stillborn(files, name):
                files.unlink(name)
                removed = True
    if removed:  # a power cut could bring them back half written, as nobody has synced them
        files.sync_directory(os.path.dirname(path))


_TORN = ((0, 0), (chunk.BEGIN, 0), (chunk.BEGIN, chunk.BEGIN))  # head and tail, as far as they were written


def _is_stillborn(files: Files, path: str) -> bool:
    """Whether the making of a chunk was stopped: nothing but zeros, but for the pointers of an empty one perhaps."""
    fd = files.open_to_read(path)
    try:
        size, begin = files.size(fd), files.read(fd, chunk.BEGIN, 0)
        if not any(chunk.POINTERS.pack(*torn, chunk.NONE).startswith(begin) for torn in _TORN):
            return False
        return not any(any(files.read(fd, BLOCK, at)) for at in range(chunk.BEGIN, size, BLOCK))
    finally:
        files.close(fd)


def _believe_files(files: Files, header_fd: int, found: Found) -> tuple[State, Log]:
    """Steps 2, 3 and 9 for a queue that no log describes, or that a Java program has used."""
    old = found.log.state if found.log else None
    if found.log is not None:
        _must_not_have_shrunk(files, found, found.log)
    chain, empty = chain_of(files, found)
    if unknown := _unknown_batches(files, found.path, old):
        raise CorruptQueue(
            f"there are batches that no transaction log knows: nobody can say whether {unknown[0]}"
            f"{f' and {len(unknown) - 1} more were' if unknown[1:] else ' was'} acknowledged. Nothing was changed; restore the "
            "log, or move them away",
            path=found.path + layout.LOG,
        )
    state = State.of(chain)
    if old is not None:
        state.batches, state.put_keys, state.expired_keys = old.batches, old.put_keys, old.expired_keys
    # The log first: if a crash follows, it does not agree with the files, which are then believed again.
    data = logs.snapshot(state, generation := journal.new_generation())
    fd = _new_log(files, found.path, data)
    log = Log(files, found.path + layout.LOG, fd, generation, len(data), len(data))
    store_pointers(files, found.path, state)
    store_header(files, header_fd, state.first)
    for chunk_id in empty:
        files.unlink(chunk.chunk_path(found.path, chunk_id))
    return state, log


def _new_log(files: Files, path: str, data: bytes) -> int:
    """Put a log with this content in the place of the one that is there, durably; returns its descriptor."""
    log_path = path + layout.LOG
    fd = write_new(files, log_path + ".tmp", data)
    files.rename(log_path + ".tmp", log_path)
    files.sync_directory(os.path.dirname(path))
    return fd


def _must_not_have_shrunk(files: Files, found: Found, log: Replayed) -> None:
    """The original never cuts a chunk file. A shorter one is another queue's, made anew with the header, or damage."""
    if log.seal and _made_anew(files, found.path, log.seal):
        return
    for one in log.state.chain.values():
        path = chunk.chunk_path(found.path, one.id)
        if one.id in found.ids and (size := read_pointers(files, path).size) < one.tail:
            raise CorruptQueue(
                f"the chunk file has {size} bytes, its records end at {one.tail}: it was cut. Nothing was changed", path=path
            )


def _unknown_batches(files: Files, path: str, state: State | None) -> list[str]:
    """Directories with records of batches that the log does not know. Of those that have expired, some may be left."""
    known = set(state.batches) if state else set()
    if state:
        known |= {layout.numbered_id(path, number) for _, number in state.expired_keys.values()}
    unknown = []
    for home in (path + layout.BATCHES, path + layout.DEAD):
        for name in sorted(set(files.list(home)) - known) if files.is_directory(home) else ():
            directory = os.path.join(home, name)
            if files.is_directory(directory) and set(files.list(directory)) - {manifest.MANIFEST}:
                unknown.append(directory)
    return unknown


def store_pointers(files: Files, path: str, state: State, unsure: Collection[int] = ()) -> None:
    """Step 9: make head, tail and next in each chunk file say what the log says, durably.

    ``unsure``: chunks that a killed process may have made, and not synced.
    """
    for one, pointers in state.pointers():
        if one.stored != pointers or one.id in unsure:
            fd = files.open(chunk.chunk_path(path, one.id))
            try:
                files.write(fd, chunk.POINTERS.pack(*pointers), 0)
                files.sync(fd)
            finally:
                files.close(fd)
            one.stored = pointers


def store_header(files: Files, header_fd: int, first: int, sure: bool = True) -> None:
    """Step 9: make the header say which chunk is the first, durably, before anything it referred to is removed.

    Not ``sure``: a killed process may have written just that, and not synced it.
    """
    data = chunk.FIRST.pack(first)
    if not sure or files.read(header_fd, 3, 0) != data:
        files.write(header_fd, data, 0)
        files.truncate(header_fd, len(data))
        files.sync(header_fd)
