"""Opening a queue, whatever is on disk: what a clean close, a crash of ours, or a Java program has left.

`recover` calls the steps in this order. docs/format/recovery.md has them under the same numbers:

1. Look, and change nothing: header, names, transaction log. Whatever contradicts itself is `Corrupt`. A commit whose records
   the disk has lost before they were synced has not happened, and none behind it.
2. No log: a Java program made the chunk files, and they are all there is. Step over every record of the chain.
3. A clean log: its last frame is a checkpoint. The header and the pointers of the first and the last chunk must say the same.
   If they do not, a Java program may have used the queue since. `java` knows how such a program changes a queue: what it can
   have made is believed, with the batches and keys of the log. Everything else is `Corrupt`.
4. A log that is not clean is the truth. Every pointer in the files must be one that we may have stored: that of the last
   checkpoint, of a handover since, or of the end of the log. Otherwise another program used the queue after our crash, and
   nobody can say which records are meant: `Corrupt`. But if the last frame is a handover, that program found what the log
   says: then `java` decides, as in step 3. (If the header names no chunk, or the chunk of another queue, it is stored again:
   a Java program that closed an empty queue just before we opened ours removes its header.)
5. The log: cut off a torn frame, and make the rest durable. After step 2, and after step 3 if it believed a Java program, put
   a new log in its place.
6. Finish what the last commit began: the moves of a lease, a put-back, an end of a batch.
7. Redo: write records that the log carries into the chunk files, as none of them was synced since the last checkpoint.
8. Make pointers and header say what the log says, durably.
9. Remove chunk files that were read to their end. Then write the checkpoint: the log says that the files agree. After a
   handover nothing of steps 7 to 9 waits for the disk, and there is no checkpoint: `Chain.store` makes up for it later. That
   the files look as the log says proves nothing, in the same run of the machine either: the disk may have lost what was in
   the page cache, or be a snapshot of itself.
10. Remove what no commit refers to: an unfinished batch, what sessions spilled, empty new chunks, temporary files.
    Requests of stages that a dead leader has taken along are marked as done, if the log says so, or given back.

A crash in any step leaves something that the same steps finish. Files with records that nothing refers to stay where they
are. They are never delivered and never overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_operations import EndLease, Forget, LeaseAgain
from qewqew_core.crc import crc32
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors, close_all
from qewqew_core.disk.files import Files, check_regular, drop_cached, read_all, remove_if_there, write_new
from qewqew_core.disk.journal import Body, Journal
from qewqew_core.disk.reserve import Reserve, with_room
from qewqew_core.errors import Corrupt, Locked
from qewqew_core.formats import chunk
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.queue import batch_files, java, paths, staged_files, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.chunk_files import own_chunk, store_header, store_pointers, sync_moved
from qewqew_core.queue.found import Found, chain_of, look
from qewqew_core.queue.java import Believed
from qewqew_core.queue.log import Replayed, Unsynced
from qewqew_core.queue.operations import Believe, JsonOperation, Lease, PutBack, Repair, Served
from qewqew_core.queue.reading import is_blank, read_pointers
from qewqew_core.queue.state import State

_logger = logging.getLogger(__name__)


@dataclass
class Recovered:
    """An open queue."""

    state: State
    log: Journal
    taken: set[int]  # ids that must not be given to new chunks
    handed_over: bool  # the last owner has left the checkpoint to this one
    unsynced: set[int]  # chunks that it has written to, and not synced
    begin: int  # the id of the first chunk of an empty queue
    by_java: bool  # a Java program has used it since it was closed
    notes: list[str]  # what a person should know


def recover(files: Files, path: str, header_fd: int, owned: dict[int, int]) -> Recovered:
    """Open the queue whose header is locked, also on a full disk. Raises `Corrupt`, or `Locked`, before anything is changed.

    ``owned`` gets the descriptors of chunks that are locked, too: the first and the last, before their pointers are believed.
    """
    return with_room(Reserve(files, path + paths.LOG), partial(_recover, files, path, header_fd, owned))


def _recover(files: Files, path: str, header_fd: int, owned: dict[int, int]) -> Recovered:
    log_fd = Descriptors()  # as long as it is open; `Journal` has the same list
    log: Journal | None = None
    try:
        found = _look(files, path, header_fd, owned, log_fd)  # step 1
        (believed, agrees), replayed = believe(files, found), found.log  # steps 2 to 4
        handed_over = found.is_handed_over and agrees
        if believed is not None:
            state = believed.state
            if replayed is not None:
                _sync_chunks(files, path, replayed.unsure & found.ids)  # the log that says the same is replaced
            log = _begin_log(files, found, believed, owned)  # step 5
            store_pointers(files, path, state)  # step 8
            store_header(files, header_fd, state.first)
            _remove_emptied(files, path, believed.empty)  # step 9
            if log.end > log.snapshot_end:  # else the files agreed
                _checkpoint(files, path, log)
            close_all(log_fd)  # the one before
        else:
            assert replayed is not None
            state, log = replayed.state, open_log(files, replayed, path, log_fd)  # step 5
            if not found.is_stamped:
                stamp.make(files, path, state.changes)
            if handed_over:
                redo(files, path, replayed.redo, durable=False)  # step 7
                for chunk_state, pointers in state.pointers():  # step 8: they agree
                    chunk_state.stored = pointers
                _remove_emptied(files, path, sorted(replayed.dropped & found.ids))  # step 9
            elif replayed.clean:
                if replayed.checkpoint_identity[:1] != files.identity(log.path)[:1]:
                    # The log has no checkpoint: a killed process may have renamed it and not synced that.
                    files.sync_directory(found.directory)
            else:
                log.sync(log.position, refuse=False)  # after a kill its last frames may be in the page cache only
                finish_moves(files, path, state, replayed.last_json_operation)  # step 6
                sync_moved(files, path)
                redo(files, path, replayed.redo)  # step 7
                store_pointers(files, path, state, unsure=replayed.unsure)  # step 8
                store_header(files, header_fd, state.first, sure=False)
                _remove_emptied(files, path, sorted(replayed.dropped & found.ids))  # step 9
                _checkpoint(files, path, log)
        left = remove_leftovers(files, path, state, found.ids)  # step 10
        as_found = replayed is not None and (handed_over or (believed is None and replayed.clean))
        taken = left if as_found else paths.chunk_ids(path, files.list(found.directory))
    except BaseException:
        close_all(log_fd)
        if log is not None:
            log.close()
        raise
    begin, notes, by_java = chunk.OUR_FIRST, list[str](), believed is not None and replayed is not None
    if believed is not None:
        notes = believed.notes
        if found.header or replayed is not None:
            # A Java program was here. Another one may have opened a header that was removed since, and take it for its queue
            # with the ids that it had then: ours are not to be the same.
            begin = random.SystemRandom().randrange(1 << 10, chunk.MAX_ID)
    unsynced = replayed.unsure if handed_over and replayed else set[int]()
    # A Java program that has closed an empty queue just before we opened it is about to remove the file of its last chunk.
    return Recovered(state, log, taken | {found.header}, handed_over, unsynced, begin, by_java, notes)


# Step 1


def _look(files: Files, path: str, header_fd: int, owned: dict[int, int], log_fd: list[int]) -> Found:
    """Step 1. After it the log and the chunks at both ends are locked, and the log is known not to be older than the batches."""
    own_log(files, path, log_fd)
    header = files.read(header_fd, 64, 0)
    found = look(files, path, header, read_all(files, log_fd[0], path + paths.LOG) if log_fd else None)
    if found.log is not None and not found.is_closed:  # what is in memory alone may be what a failed fsync has lost
        files.drop_cached(log_fd[0])
        found = look(files, path, header, read_all(files, log_fd[0], path + paths.LOG))
        for chunk_id in found.log.unsure.union(list(found.log.state.chain)[-1:]) if found.log else ():
            drop_cached(files, chunk.chunk_path(path, chunk_id))
        found = _without_lost(files, path, header, log_fd[0], found)
    ends = () if found.log is None else tuple(found.log.state.chain)
    for chunk_id in {found.header, *ends[:1], *ends[-1:]} & found.ids:
        own_chunk(files, path, owned, chunk_id)
    if found.log is not None:
        if isinstance(found.log.last_json_operation, Repair):
            raise Corrupt("a repair of the queue was interrupted; repair it again to finish", path=path)
        found.is_stamped = stamp.check(files, path, found.log.state.changes)
    return found


def _without_lost(files: Files, path: str, header: bytes, log_fd: int, found: Found) -> Found:
    """The same without a commit whose records the disk has lost before they were synced (``sync="never"``), and all behind it:
    these have not happened.
    """
    if found.log is None or (lost := lost_from(files, path, found.log)) is None:
        return found
    _logger.warning(
        '%s: records that were put with sync="never" did not reach the disk; that commit and all behind it have not happened '
        "(bytes %s to %s of the log)",
        path,
        f"{lost:,}",
        f"{found.log.end:,}",
    )
    found = look(files, path, header, read_all(files, log_fd, path + paths.LOG)[:lost])
    assert found.log is not None
    found.log.torn = True  # the rest is to be cut off
    return found


def lost_from(files: Files, path: str, replayed: Replayed) -> int | None:
    """Where in the log the first commit is whose records are not in their chunk files, though they need not have been on disk."""
    lost = [
        extent.frame
        for chunk_id, extents in replayed.unsynced.items()
        for extent in extents
        if not _is_there(files, chunk.chunk_path(path, chunk_id), extent)
    ]
    return min(lost, default=None)


def _is_there(files: Files, path: str, extent: Unsynced) -> bool:
    crc, at = extent.crc_before, extent.begin
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open_to_read(path)]) as (fd,):
        while at < extent.end and (data := files.read(fd, min(LIMITS.write_bytes, extent.end - at), at)):
            crc, at = crc32(data, crc), at + len(data)
    return at == extent.end and crc == extent.crc


def own_log(files: Files, path: str, descriptors: list[int]) -> None:
    """Open and lock the log, if there is one: its descriptor is put into the list. Raises `Locked`.

    Header and log have one owner. But a Java program may remove the header of a queue that is open; then this lock is what keeps
    another process of ours from opening it.
    """
    log_path = path + paths.LOG
    while files.exists(log_path):
        with contextlib.suppress(FileNotFoundError):  # an owner that closes an empty queue removes it
            descriptors.append(files.open(log_path))
            status = files.status(descriptors[0])
            check_regular(status, log_path)
            if not lock.whole_at_last(descriptors[0]):
                raise Locked(
                    "another process has the queue open, though a Java program has removed its header; close it there", path=path
                )
            if files.identity(log_path)[0] == status.st_ino:  # else its owner has replaced it meanwhile
                return
        close_all(descriptors)


# Steps 2 to 4


def believe(files: Files, found: Found) -> tuple[Believed | None, bool]:
    """Steps 2 to 4: what to believe of the files, None if the log is the truth; and whether header and pointers agree with it.

    After it nothing on disk is in doubt. Raises `Corrupt`, and changes nothing.
    """
    if found.log is None:
        return Believed(*_without_log(files, found)), False
    if found.is_handed_over:
        if java.was_made_anew(files, found):
            return java.believed(files, found), False
        try:
            return None, must_be_ours(files, found)
        except Corrupt:  # they are not ours: then they are those of a program that found what the log says
            return java.believed(files, found), False
    if not found.log.clean:
        return None, must_be_ours(files, found)
    if not java.is_as_closed(files, found):
        return java.believed(files, found), False
    return None, True


def _without_log(files: Files, found: Found) -> tuple[State, list[int]]:
    """Step 2: chunks and records as the pointers lead to them, and chunk files that are empty."""
    chain, empty = chain_of(files, found)
    return State.of(chain), empty


def must_be_ours(files: Files, found: Found) -> bool:
    """Step 4: files that follow a log which is not clean must be as we may have left them; whether they agree with it.

    After a handover the pointers of chunks in the middle that were not written to are not looked at.
    """
    assert found.log is not None
    state, expected = found.log.state, found.log.firsts | {found.log.state.first}
    agree, chunks = found.header == state.first, state.pointers()
    looked_at = set(state.chain)
    if found.is_handed_over:
        looked_at = found.log.unsure.union(each.id for each, _ in (*chunks[:1], *chunks[-1:]))
    torn = {first & 0xFF00 | second & 0x00FF for first in expected for second in expected}  # a write may stop in the middle
    # Any other chunk is that of a queue that a Java program began where there was no header.
    if found.header not in torn and found.header in state.chain.keys() | found.log.dropped:
        raise Corrupt(
            f"the header says chunk {found.header}, the transaction log says {sorted(expected)}: {_FOREIGN}",
            path=found.path,
            offset=0,
        )
    batch_files.check_moves(found.files, found.path, state, found.log.last_json_operation)
    coming = _coming_files(found)
    for chunk_state, pointers in chunks:
        path = chunk.chunk_path(found.path, chunk_state.id)
        if chunk_state.id not in found.ids:
            if chunk_state.id in coming:
                continue
            raise Corrupt(
                "the chunk file is missing; the transaction log says that it holds records. Nothing was changed", path=path
            )
        if chunk_state.id not in looked_at:
            continue
        on_disk = read_pointers(files, path)
        if on_disk.size < chunk_state.tail:
            raise Corrupt(
                f"the chunk file has {on_disk.size} bytes, its records end at {chunk_state.tail}. Nothing was changed", path=path
            )
        agree = agree and on_disk[1:] == pointers
        is_blank = chunk_state.id in found.log.made and not any(on_disk[1:])  # it was not synced when it was made
        if not is_blank and not found.log.may_be_ours(chunk_state, pointers, on_disk[1:]):
            raise Corrupt(
                f"head, tail, next are {on_disk[1:]}, not {chunk_state.stored} or {pointers}: {_FOREIGN}", path=path, offset=0
            )
    return agree


_FOREIGN = (
    "damage, or another program has used the queue after a crash, before QewQew had recovered it. Nothing was changed; "
    "restore the files of the queue from before that"
)


def _coming_files(found: Found) -> set[int]:
    """Chunk files that the unfinished last commit is about to put back beside the queue."""
    last = found.log and found.log.last_json_operation
    return set(last.chunks) if isinstance(last, PutBack) else set()


# Step 5


def _sync_chunks(files: Files, path: str, chunk_ids: Iterable[int]) -> None:
    for chunk_id in chunk_ids:
        with Descriptors() as fds:
            fds.append(files.open(chunk.chunk_path(path, chunk_id)))
            files.sync(fds[0])


def open_log(files: Files, replayed: Replayed, path: str, descriptor: list[int]) -> Journal:
    """Open a log that a process of ours left. Its last frame may be torn; after this it ends with a whole one."""
    (fd,) = descriptor
    size = files.size(fd)
    if size > replayed.end and (replayed.torn or not replayed.handed_over):
        files.truncate(fd, size := replayed.end)
    ends = replayed.end, replayed.snapshot_end
    counts = replayed.frames, replayed.durable
    log = Journal(files, path + paths.LOG, descriptor, replayed.generation, *ends, "queue", *counts)
    log.reserved(size)
    return log


def _begin_log(files: Files, found: Found, believed: Believed, owned: dict[int, int]) -> Journal:
    """Make a log for files that no log describes. It says what header and pointers were before, so that a crash from now on is
    one of ours.
    """
    state = believed.state
    if unknown := _unknown_batches(files, found.path, state):
        raise Corrupt(
            f"there are batches that no transaction log knows: nobody can say whether {unknown[0]}"
            f"{f' and {len(unknown) - 1} more were' if unknown[1:] else ' was'} acknowledged. Nothing was changed; restore the "
            "log, or move them away",
            path=found.path + paths.LOG,
        )
    for chunk_state in list(state.chain.values())[:: max(1, len(state.chain) - 1)]:  # the first and the last
        own_chunk(files, found.path, owned, chunk_state.id)
    state.clock = state.clock.now(files.boot())
    generation = journal.new_generation()
    data = logs.snapshot(state, generation)
    snapshot_end = len(data)
    stored = [
        (chunk_state.id, *chunk_state.stored)
        for chunk_state, pointers in state.pointers()
        if chunk_state.stored not in (None, pointers)
    ]
    if stored or believed.empty or found.header != state.first or state.served:
        served = [Served(sorted(state.served))] if state.served else []  # until step 10 the log says so, and no snapshot does
        body = logs.commit(now_ms(), [*served, Believe(found.header, stored, believed.empty)])
        data += journal.frame(logs.COMMIT, body, generation, snapshot_end)
    log_fd = Descriptors()
    try:
        _new_log(files, found.path, data, state.changes, log_fd)
    except BaseException:
        log_fd.close()  # now: a kept traceback would keep it locked
        raise
    return Journal(files, found.path + paths.LOG, log_fd, generation, len(data), snapshot_end)


def _new_log(files: Files, path: str, data: bytes, changes: int, log_fd: list[int]) -> None:
    """Put a log with this content in the place of the one that is there, durably; the list gets its descriptor."""
    log_path = path + paths.LOG
    write_new(files, log_path + ".tmp", data, log_fd)
    lock.whole(log_fd[0])
    files.rename(log_path + ".tmp", log_path)
    stamp.make(files, path, changes)


def _unknown_batches(files: Files, path: str, state: State) -> list[str]:
    """Directories with records of batches that the log does not know. Expired batches may have left some, which are known."""
    known = {*state.batches, *state.history.ids()}
    known |= {places.numbered_id(path, number) for _, number in state.expired_keys.values()}
    unknown = []
    for home in (path + places.BATCHES, path + places.DEAD):
        for name in sorted(set(files.list(home)) - known) if files.is_directory(home) else ():
            directory = os.path.join(home, name)
            if files.is_directory(directory) and set(files.list(directory)) - {manifest.MANIFEST}:
                unknown.append(directory)
    return unknown


# Step 6


def finish_moves(files: Files, path: str, state: State, last: JsonOperation | None) -> None:
    """Move the files of the last commit the rest of the way: a crash may have stopped them anywhere."""
    match last:
        case Lease(batch_id):
            batch_files.roll_forward_lease(files, path, last, state.batches[batch_id])
        case LeaseAgain(batch_id):
            batch_files.roll_forward_manifest(files, path, state.batches[batch_id])
        case EndLease(batch_id) if batch_id in state.batches:  # else it was acknowledged, and stays where it is
            places.roll_forward_place(files, path, state.batches[batch_id])
        case PutBack(batch_id, chunks, names):
            batch_files.roll_forward_put_back(files, path, batch_id, list(zip(names, chunks, strict=True)))
        case Forget(batch_ids, keep_manifest):
            places.roll_forward_forget(files, path, batch_ids, keep_manifest)


# Step 7


def redo(files: Files, path: str, redo: dict[int, list[tuple[int, Body]]], durable: bool = True) -> None:
    """Write frames that the log carries into their chunk files, durably."""
    for chunk_id, runs in redo.items():
        with Descriptors([files.open(chunk.chunk_path(path, chunk_id))]) as (fd,):
            for offset, frames in runs:
                files.write(fd, frames, offset)
            if durable:
                files.sync(fd)


# Step 9


def _remove_emptied(files: Files, path: str, chunk_ids: Iterable[int]) -> None:
    """Remove chunk files without records that neither a pointer nor the header names any more."""
    for chunk_id in chunk_ids:
        with contextlib.suppress(FileNotFoundError):  # a Java program whose it was has removed it meanwhile
            files.unlink(chunk.chunk_path(path, chunk_id))


def _checkpoint(files: Files, path: str, log: Journal) -> None:
    """Let the log say, durably, that all files agree with it."""
    files.sync_directory(os.path.dirname(path))
    log.sync(log.append(logs.CHECKPOINT, java.checkpoint_identity(files, path)), refuse=False)


# Step 10


def remove_leftovers(files: Files, path: str, state: State, ids: set[int]) -> set[int]:
    """Remove what a killed process was making and no commit refers to. Files with records stay, though the first chunk of a Java
    program gets another id: the next such program begins there. Returns the ids of the chunk files that are left.
    """
    remove_if_there(files, path + paths.NEW_LOG)
    batch_files.settle_lease(files, path, state)
    places.remove_ours(files, path + paths.SPILL)
    staged_files.settle(files, path, state.served)
    left = set(ids)
    for chunk_id in sorted(ids - state.chain.keys()):
        name = chunk.chunk_path(path, chunk_id)
        with contextlib.suppress(OSError):  # gone meanwhile, or no file at all: it is not ours
            empty = read_pointers(files, name)[1:] == (chunk.BEGIN, chunk.BEGIN, chunk.NONE) or _is_stillborn(files, name)
            if not (empty or chunk_id == chunk.JAVA_FIRST) or _is_in_use(files, name):
                continue
            if empty:
                files.unlink(name)
            else:
                free = next((other for other in range(chunk.MAX_ID, chunk.JAVA_FIRST, -1) if other not in left), None)
                if free is None:
                    continue
                files.rename(name, chunk.chunk_path(path, free))
                left.add(free)
            left.remove(chunk_id)
    if left != ids:  # a power cut could bring those that are gone back half written, as nobody has synced them
        files.sync_directory(os.path.dirname(path))
    return left


_TORN = ((0, 0), (chunk.BEGIN, 0), (chunk.BEGIN, chunk.BEGIN))  # head and tail, as far as they were written


def _is_stillborn(files: Files, path: str) -> bool:
    """Whether a process was killed while it made this chunk: all zeros, except perhaps for an empty chunk's pointers."""
    with Descriptors([files.open_to_read(path)]) as (fd,):
        begin = files.read(fd, chunk.BEGIN, 0)
        if files.size(fd) > chunk.MAX_CHUNK_SIZE or not any(
            chunk.POINTERS.pack(*torn, chunk.NONE).startswith(begin) for torn in _TORN
        ):
            return False
        return is_blank(files, fd)


def _is_in_use(files: Files, path: str) -> bool:
    """Whether a Java program has the chunk file open. It may be making it just now, for a header that was removed."""
    with Descriptors([files.open(path)]) as (fd,):
        return lock.first_locked(fd, 0, 0) is not None
