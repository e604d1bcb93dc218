"""Opening whatever is on disk: what a clean close, a crash of ours, or a Java program has left.

The procedure, by the numbers that stand in the code and in docs/format.md:

1. Look, and change nothing: header, names, transaction log. What contradicts itself is `CorruptQueue`.
2. No log: the chunk files are all there is (a Java program made them). Step over every record of the chain.
3. A clean log (its last frame is a checkpoint): the header must say the same, and the pointers of the first and the last
   chunk. If they do not, a Java program may have used the queue since; `java` has the ways in which one changes a queue.
   What has come about so is believed, and batches and keys are those of the log; everything else is `CorruptQueue`.
4. A log that is not clean is the truth. Every pointer in the files must be one that we may have stored: that of
   the last checkpoint, or of the end of the log. Otherwise another program has used the queue after our crash,
   and nobody can say which records are meant: `CorruptQueue`. (A header that names no chunk, or the chunk of another
   queue, is stored anew: a Java program that closed an empty queue just before ours was opened removes its header.)
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
import errno
import os
import random
import stat
from collections.abc import Collection
from dataclasses import dataclass

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_operations import EndLease, Forget, LeaseAgain
from qewqew_core.disk import journal, lock
from qewqew_core.disk.files import Descriptors, Files, close_all, close_each, read_all, write_new
from qewqew_core.disk.journal import Log
from qewqew_core.errors import CorruptQueue, QueueLocked
from qewqew_core.formats import chunk
from qewqew_core.limits import now_ms
from qewqew_core.queue import batch_files, java, paths, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.found import Found, chain_of, look
from qewqew_core.queue.java import Believed
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.operations import Believe, Lease, PutBack, Rare, Repair
from qewqew_core.queue.reading import BLOCK, read_pointers
from qewqew_core.queue.state import State


def must_be_ours(files: Files, found: Found) -> None:
    """Step 4: the files of a queue that crashed must be as we may have left them."""
    assert found.log is not None
    state, expected = found.log.state, found.log.firsts | {found.log.state.first}
    torn = {first & 0xFF00 | second & 0x00FF for first in expected for second in expected}  # a write may stop in the middle
    # Any other chunk is that of a queue that a Java program began where there was no header.
    if found.header not in torn and found.header in state.chain.keys() | found.log.gone:
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
    last = found.log and found.log.last_rare
    return set(last.chunks) if isinstance(last, PutBack) else set()


@dataclass
class Recovered:
    """An open queue."""

    state: State
    log: Log
    taken: set[int]  # ids that must not be given to new chunks
    begin: int  # the id of the first chunk of an empty queue
    notes: list[str]  # what a person should know


def recover(files: Files, path: str, header_fd: int, owned: dict[int, int]) -> Recovered:
    """Open the queue whose header is locked. Raises `CorruptQueue`, or `QueueLocked`, before anything is changed.

    ``owned`` gets the descriptors of chunks that are locked, too: the first and the last, before their pointers are believed.
    """
    log_fd: list[int] = []  # as long as it is open; `Log` has the same list
    try:
        own_log(files, path, log_fd)
        header = files.read(header_fd, 64, 0)
        found = look(files, path, header, read_all(files, log_fd[0], path + paths.LOG) if log_fd else None)
        ends = () if found.log is None else tuple(found.log.state.chain)
        for chunk_id in {found.header, *ends[:1], *ends[-1:]} & found.ids:
            own_chunk(files, path, owned, chunk_id)
        if found.log is not None and isinstance(found.log.last_rare, Repair):
            raise CorruptQueue("a repair of the queue was interrupted; repair it again, that finishes it", path=path)
        if found.log is not None:
            stamp.check(files, path, found.log.state.changes)
        notes: list[str] = []
        begin = chunk.OUR_FIRST
        if found.log is not None and not found.log.clean:
            must_be_ours(files, found)
            state, log = found.log.state, open_log(files, found.log, path, log_fd)
            _recover_crashed(files, path, header_fd, found, found.log, log)
        elif found.log is not None and java.is_as_closed(files, found):
            if found.log.seal[:1] != files.identity(path + paths.LOG)[:1]:  # no checkpoint is in this file: a killed process
                files.sync_directory(os.path.dirname(path))  # may have renamed it, and not synced that
            state, log = found.log.state, open_log(files, found.log, path, log_fd)
        else:
            believed = Believed(*_without_log(files, found)) if found.log is None else java.believed(files, found)
            state, notes, log = believed.state, believed.notes, _begin_log(files, header_fd, found, believed, owned)
            close_all(log_fd)  # the one before
            if found.header or found.log is not None:
                # A Java program was here. Another one may have opened a header that was removed since, and take it for its queue
                # with the ids that it had then: ours are not to be the same.
                begin = random.SystemRandom().randrange(1 << 10, chunk.MAX_ID)
        remove_leftovers(files, path, state, found.ids)
        taken = paths.chunk_ids(path, files.list(os.path.dirname(path)))
    except BaseException:
        close_all(log_fd)
        raise
    # A Java program that has closed an empty queue just before we opened it is about to remove the file of its last chunk.
    return Recovered(state, log, taken | {found.header}, begin, notes)


def own_chunk(files: Files, path: str, owned: dict[int, int], chunk_id: int) -> None:
    """Open and lock the file of a chunk, as a Java program does, until its descriptor in ``owned`` is closed.

    Raises `QueueLocked` if somebody else has it.
    """
    name = chunk.chunk_path(path, chunk_id)
    with contextlib.suppress(OSError):  # who reads it says what is wrong with it
        owned[chunk_id] = owned.get(chunk_id) or files.open(name)
    if chunk_id in owned and not lock.whole(owned[chunk_id]):
        close_each(owned, chunk_id)
        raise QueueLocked("a Java program has this chunk file open, by a header that was removed since; end it", path=name)


def own_log(files: Files, path: str, descriptors: list[int]) -> None:
    """Open and lock the log, if there is one: its descriptor is put into the list. Raises `QueueLocked`.

    Header and log have one owner. But a Java program may remove the header of a queue that is open; then this lock is what keeps
    another process of ours from opening it.
    """
    log_path = path + paths.LOG
    while files.exists(log_path):
        with contextlib.suppress(FileNotFoundError):  # an owner that closes an empty queue removes it
            descriptors.append(files.open(log_path))
            status = os.fstat(descriptors[0])
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", log_path)
            if not lock.whole(descriptors[0]):
                raise QueueLocked(
                    "another process has the queue open, though a Java program has removed its header; close it there", path=path
                )
            if files.identity(log_path)[0] == status.st_ino:  # else its owner has replaced it meanwhile
                return
        close_all(descriptors)


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
        log.sync(log.append(logs.CHECKPOINT, java.seal(files, path)), refuse=False)
    except BaseException:
        log.close()
        raise


def open_log(files: Files, replayed: Replayed, path: str, descriptor: list[int]) -> Log:
    """Step 5."""
    (fd,) = descriptor
    if files.size(fd) > replayed.end:
        files.truncate(fd, replayed.end)
    ends = replayed.end, replayed.snapshot_end
    return Log(files, path + paths.LOG, descriptor, replayed.generation, *ends, frames=replayed.frames)


def finish_moves(files: Files, path: str, state: State, last: Rare | None) -> None:
    """Step 6."""
    match last:
        case Lease(batch_id):
            batch_files.settle_lease(files, path, state.batches[batch_id])
        case LeaseAgain(batch_id):
            batch_files.settle_manifest(files, path, state.batches[batch_id])
        case EndLease(batch_id):
            places.settle_place(files, path, state.batches[batch_id])
        case PutBack(batch_id, chunks, names):
            batch_files.settle_put_back(files, path, batch_id, list(zip(names, chunks, strict=True)))
        case Forget(batch_ids, keep_manifest):
            places.settle_forget(files, path, batch_ids, keep_manifest)


def sync_spill(files: Files, path: str) -> None:
    """Chunks that sessions spilled have left this directory for the queue's: a move is durable when both are synced.

    First that which they are in now, or a power cut could find them in neither.
    """
    if files.is_directory(path + paths.SPILL):
        files.sync_directory(os.path.dirname(path))
        files.sync_directory(path + paths.SPILL)


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
    for temporary in (path + paths.LOG + ".tmp",):
        if files.exists(temporary):
            files.unlink(temporary)
    places.remove_tree(files, path + paths.LEASE)
    places.remove_tree(files, path + paths.SPILL)
    removed = False
    for chunk_id in sorted(ids - state.chain.keys()):
        name = chunk.chunk_path(path, chunk_id)
        with contextlib.suppress(OSError):  # gone meanwhile, or no file at all: it is not ours
            empty = read_pointers(files, name)[1:] == (chunk.BEGIN, chunk.BEGIN, chunk.NONE) or _is_stillborn(files, name)
            if empty and not _is_in_use(files, name):
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


def restore_header(files: Files, path: str, first: int) -> None:
    """Make the header anew, durable but for its name, if a Java program has removed it, or is not there for another reason."""
    if first and not files.exists(path):
        with contextlib.suppress(FileExistsError):  # another one has begun a queue of its own: the next opening sees to that
            fd = files.open(path, new=True)
            try:
                files.write(fd, chunk.FIRST.pack(first), 0)
                files.sync(fd)
            finally:
                files.close(fd)


def _is_in_use(files: Files, path: str) -> bool:
    """Whether a Java program has the chunk file: it is just making it, for a header that was removed."""
    with Descriptors() as fds:
        fds.append(files.open(path))
        return lock.first_locked(fds[0], 0, 0) is not None


def _without_log(files: Files, found: Found) -> tuple[State, list[int]]:
    """Step 2."""
    chain, empty = chain_of(files, found)
    return State.of(chain), empty


def _begin_log(files: Files, header_fd: int, found: Found, believed: Believed, owned: dict[int, int]) -> Log:
    """Step 9 for a queue that no log describes, or that a Java program has used."""
    state = believed.state
    if unknown := _unknown_batches(files, found.path, state):
        raise CorruptQueue(
            f"there are batches that no transaction log knows: nobody can say whether {unknown[0]}"
            f"{f' and {len(unknown) - 1} more were' if unknown[1:] else ' was'} acknowledged. Nothing was changed; restore the "
            "log, or move them away",
            path=found.path + paths.LOG,
        )
    for one in list(state.chain.values())[:: max(1, len(state.chain) - 1)]:  # the first and the last
        own_chunk(files, found.path, owned, one.id)
    if found.log is None:
        stamp.remove(files, found.path)
    # The log first. It says, too, what the files were before they followed it, so a crash in between is one of ours.
    generation = journal.new_generation()
    data = logs.snapshot(state, generation)
    snapshot_end = len(data)
    stored = [(one.id, *one.stored) for one, pointers in state.pointers() if one.stored not in (None, pointers)]
    differs = bool(stored or believed.empty or found.header != state.first)
    if differs:
        body = logs.commit(now_ms(), [Believe(found.header, stored, believed.empty)])
        data += journal.frame(logs.COMMIT, body, generation, snapshot_end)
    log_fd: list[int] = []
    try:
        _new_log(files, found.path, data, log_fd)
        log = Log(files, found.path + paths.LOG, log_fd, generation, len(data), snapshot_end)
        store_pointers(files, found.path, state)
        store_header(files, header_fd, state.first)
        for chunk_id in believed.empty:
            with contextlib.suppress(FileNotFoundError):  # the Java program whose it was has removed it meanwhile
                files.unlink(chunk.chunk_path(found.path, chunk_id))
        if differs:
            files.sync_directory(found.directory)
            log.sync(log.append(logs.CHECKPOINT, java.seal(files, found.path)), refuse=False)
    except BaseException:
        close_all(log_fd)
        raise
    return log


def _new_log(files: Files, path: str, data: bytes, log_fd: list[int]) -> None:
    """Put a log with this content in the place of the one that is there, durably; the list gets its descriptor."""
    log_path = path + paths.LOG
    write_new(files, log_path + ".tmp", data, log_fd)
    lock.whole(log_fd[0])
    files.rename(log_path + ".tmp", log_path)
    files.sync_directory(os.path.dirname(path))


def _unknown_batches(files: Files, path: str, state: State) -> list[str]:
    """Directories with records of batches that the log does not know. Of those that have expired, some may be left."""
    known = set(state.batches) | {places.numbered_id(path, number) for _, number in state.expired_keys.values()}
    unknown = []
    for home in (path + places.BATCHES, path + places.DEAD):
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
