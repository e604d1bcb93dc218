"""Opening the writer of a topic, whatever is on disk: what a clean close, a crash of ours, or a zbus server has left.

`recover` calls the steps in their order, which is that of docs/format/topics.md. The caller has the lock of the writer. A
crash in any step leaves what the same steps finish.

1. Look: the log, which is locked, and the index. A new topic is made. A log that is missing though it has a witness, and an
   index that cannot be that of the log, are damage, and refused.
2. Decide who was here last. A clean log with an index that says the same: we were, and steps 3 to 5 have nothing to do. An
   index that is ahead, or no log: a zbus server was. Anything else is what a crash of ours left.
3. After a server, its index is believed, and its last block is counted; keys and sessions are those of the log.
4. After a crash the messages that the log carries are written into their blocks again, and those that it does not are
   compared with their checksum. With ``sync="never"`` the disk may have lost some: then the first of these commits, and all
   behind it, have not happened.
5. What is not committed, or was trimmed, goes. Then the index is written.
6. What readers have read in sessions that died while they committed is decided, as the log says. The .rdx of readers whose
   consumers died says what their log says, for a zbus server.
7. A new log takes the place of the old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

from qewqew_core.crc import crc32
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors, close_all
from qewqew_core.disk.files import Files, check_regular, drop_cached, read_all, read_whole, remove_if_there, write_new
from qewqew_core.disk.journal import Journal
from qewqew_core.disk.reserve import Reserve, with_room
from qewqew_core.errors import BadArgument, Corrupt, Locked
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD, Entry, Index
from qewqew_core.keys import prune
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.topic import topic_log, witness
from qewqew_core.topic.blocks import Blocks
from qewqew_core.topic.topic_log import Replayed
from qewqew_core.topic.topic_paths import DIRECTORIES, LOG, stem_of
from qewqew_core.topic.topic_state import Block, Redo, TopicState
from qewqew_core.topic.view import View

_logger = logging.getLogger(__name__)
# Is told which sessions were committed, the dialect, and whether the topic was closed; returns which readers it could not tell
Resolving = Callable[[set[str], str, bool], set[str]]


def recover(blocks: Blocks, dialect: str | None, resolve: Resolving) -> tuple[Journal, TopicState]:
    """The steps, after which the topic can be appended to. ``dialect``: what the caller wants, if anything. Raises `Corrupt` and
    `BadArgument` before anything is changed, and errors of the system.
    """
    log_fd = Descriptors()

    def steps() -> tuple[Journal, TopicState]:
        try:
            return _recover(blocks, dialect, resolve, log_fd)
        finally:
            lock.unlock(*log_fd)  # unless the log goes on
            log_fd.close()

    return with_room(Reserve(blocks.files, blocks.log_path), steps)


def _recover(blocks: Blocks, dialect: str | None, resolve: Resolving, log_fd: Descriptors) -> tuple[Journal, TopicState]:
    found, index = _look(blocks, log_fd)
    ours, closed = _was_ours(blocks, found, index)
    if found is None or not ours:
        state = _adopt(blocks, index, found, dialect)
    else:
        _check_age(blocks, found.state)
        if dialect is not None and dialect != found.state.dialect:
            raise BadArgument(f"the topic {blocks.directory} is in dialect {found.state.dialect}, not {dialect}")
        state = found.state if closed else _redo(blocks, found)
    _remove_strays(blocks, state, ours)
    if not closed:
        blocks.write_index(blocks.index_patch(state, *state.full, state.last))
    unread = resolve(set(state.sessions), state.dialect, closed)
    if found is None or not closed:
        return _new_log(blocks, state, unread), state
    if not found.frames:  # who was killed after putting this log into place may not have done it
        blocks.files.sync_directory(blocks.directory)
    fds = Descriptors()
    log_fd.hand_over(fds)
    return _journal(blocks, found, fds), state  # the log of a topic that was closed goes on


def enter_directories(files: Files, path: str) -> None:
    """Enter the directories of a topic; those that are missing are made, durably."""
    lock.check_system(path)
    if not files.is_directory(path, follow=True):
        _make_directory(files, path)
    files.enter()
    for directory in (os.path.join(path, name) for name in DIRECTORIES):
        try:
            files.keep(directory)
        except FileNotFoundError:
            _make_directory(files, directory)
            files.keep(directory)


def _make_directory(files: Files, directory: str) -> None:
    with contextlib.suppress(FileExistsError):  # somebody else makes it too
        files.make_directory(directory)
        files.sync_directory(os.path.dirname(directory))


# Step 1


def _look(blocks: Blocks, log_fd: list[int]) -> tuple[Replayed | None, Index]:
    """Step 1. After it the log is locked, and there is an index, which may be that of the log, and it has its whole size."""
    found = _replayed(blocks, log_fd)
    if not blocks.files.exists(blocks.index_path):
        _make(blocks, found)
    index = blocks.open_index()
    if found is not None and found.clean:
        _check_index(blocks, index, found.state)
    # Really there, as the original's may not be: what follows a commit must not meet a full disk.
    blocks.files.allocate(blocks.index_fd, zbus.INDEX_SIZE)
    return found, index


def _replayed(blocks: Blocks, log_fd: list[int]) -> Replayed | None:
    try:
        _own_log(blocks.files, blocks.log_path, log_fd)
    except FileNotFoundError:
        witness.check_topic(blocks.files, blocks.directory)
        return None
    found = topic_log.replay(read_all(blocks.files, log_fd[0], blocks.log_path), blocks.log_path)
    if not found.clean:  # what is in memory alone may be what a failed fsync has lost
        blocks.files.drop_cached(log_fd[0])
        found = topic_log.replay(read_all(blocks.files, log_fd[0], blocks.log_path), blocks.log_path)
        for path in (blocks.index_path, *(blocks.path_of(block.base) for block in (*found.state.full, found.state.last))):
            drop_cached(blocks.files, path)
    if found.torn:
        found.clean = False  # that is to be cut off
    return found


def _own_log(files: Files, path: str, log_fd: list[int]) -> None:
    """Open and lock the log. Raises `Locked`.

    Log and lock file have one owner. But somebody may remove the lock file of a topic that is open; then this lock is what keeps
    another writer out.
    """
    while True:
        files.open_into(log_fd, path)
        check_regular(files.status(log_fd[0]), path)
        if not lock.whole_at_last(log_fd[0]):
            raise Locked("another process appends to the topic, though its lock file was removed; close it there", path=path)
        if files.is_at(log_fd[0], path):
            return
        close_all(log_fd)  # its owner has replaced it meanwhile


def _make(blocks: Blocks, found: Replayed | None) -> None:
    """A new topic, with its first block, as a zbus server makes it. Done when the index is there."""
    files, created = blocks.files, now_ms()
    _refuse_blocks(blocks, "the index of the topic is missing", found is not None)
    blocks.make(0)
    image = bytearray(zbus.new_index(created))
    image[: zbus.INDEX_HEAD] = zbus.pack_index(Index(zbus.VERSION, 1, 0, 0))
    image[zbus.entry_at(0) : zbus.entry_at(0) + zbus.ENTRY] = zbus.pack_entry(Entry(created, 0, 0, created))
    files.sync_directory(blocks.data)
    files.sync_directory(os.path.dirname(blocks.directory))  # who made the directories may have been killed before doing it
    write_new(files, blocks.index_path + ".tmp", bytes(image))
    files.rename(blocks.index_path + ".tmp", blocks.index_path)
    files.sync_directory(blocks.directory)


def _refuse_blocks(blocks: Blocks, what: str, always: bool = False) -> None:
    if always or any(name.endswith(".zbus") and blocks.size(name) for name in blocks.files.list(blocks.data)):
        raise Corrupt(f"{what}, and its blocks are there. Nothing was changed; restore the index", path=blocks.index_path)


def _check_index(blocks: Blocks, index: Index, state: TopicState) -> None:
    """What a zbus server may have done to a topic that was closed leaves all of it there: it only appends."""
    last = state.last
    if index.start != state.start:
        what = f"the index begins with block {index.start:,}, the log says {state.start:,}"
        raise zbus.damaged_index(what, blocks.index_path, zbus.START_AT)
    if index.start + index.blocks <= last.block:
        what = f"the index has {index.blocks:,} blocks, the log says {state.count:,}"
        raise zbus.damaged_index(what, blocks.index_path, zbus.BLOCKS_AT)
    entry = blocks.entry(last.block)
    if entry.base != last.base or entry.end < last.end:
        what = f"block {last.block:,} begins at {entry.base:,} and has {entry.end:,} bytes"
        what += f", the log says {last.base:,} and {last.end:,}"
        raise zbus.damaged_index(what, blocks.index_path, zbus.entry_at(last.block))


# Step 2


def _was_ours(blocks: Blocks, found: Replayed | None, index: Index) -> tuple[bool, bool]:
    """Step 2: whether it was a process of ours that had the topic last, and whether that closed it."""
    if found is None:
        return False, False
    if _agrees(blocks, found.state, index):
        return True, found.clean
    # An index that is ahead of the log was changed by somebody else, unless the disk has lost the end of an unsynced log: by a
    # power cut, which may have torn the mark, or in the same run of the machine, as a file system does that was aborted.
    lost = found.unsynced is not None and (found.unsynced != blocks.files.boot() or blocks.is_marked())
    return not (found.clean or (not lost and _is_ahead(found.state, index))), False


def _agrees(blocks: Blocks, state: TopicState, index: Index) -> bool:
    if (index.start, index.blocks, index.number) != (state.start, state.count, state.number):
        return False
    entry = blocks.entry(state.last.block)
    return (entry.base, entry.end) == (state.last.base, state.last.end)


def _is_ahead(state: TopicState, index: Index) -> bool:
    """As a zbus server leaves it, which appends, and removes nothing."""
    further = (index.number, index.start + index.blocks) > (state.number, state.start + state.count)
    return further and index.start <= state.start


# Step 3


def _adopt(blocks: Blocks, index: Index, found: Replayed | None, dialect: str | None) -> TopicState:
    """Step 3: the state of a topic to which a zbus server has written; raises `Corrupt` if messages are missing."""
    dialect = dialect or (found.state.dialect if found else "B")
    if max(index.start, index.number) > zbus.LARGEST:
        raise Corrupt(f"the index is impossible: {index}", path=blocks.index_path, offset=0)
    if index.blocks == 0:  # nobody has opened a writer
        _refuse_blocks(blocks, "the index of the topic has no block")
        blocks.make(0)
        state = TopicState(dialect, index.start, index.number, Block(index.start, 0, now_ms()))
    else:
        last, entry = _last_entry(blocks, index)
        state = TopicState(
            dialect, index.start, index.number, Block(last, entry.base, entry.created, entry.end, updated=entry.updated)
        )
        _count(blocks, state)
        if not 0 <= state.number <= zbus.LARGEST:
            raise Corrupt(f"the last message has the number {state.number - 1}", path=blocks.path_of(entry.base), offset=0)
        if not entry.end and not blocks.exists(entry.base):
            blocks.make(entry.base)  # the server was killed between the entry and the file
    if found is not None:
        # A server that came after a crash of ours may have written over what it did not know of: no key and no session may
        # say that this was appended.
        whole = _up_to(blocks, found, lambda redo: _holds(blocks, redo)).state
        state.idempotency_keys, state.sessions, state.clock = whole.idempotency_keys, whole.sessions, whole.clock
    return state


def _last_entry(blocks: Blocks, index: Index) -> tuple[int, Entry]:
    """The last block that a server has made, by the index."""
    last = index.start + index.blocks - 1
    entry = blocks.entry(last)
    if index.blocks > 1:
        before = blocks.entry(last - 1)
        if not entry.end and entry.base != before.base + before.end:
            # The server was killed between the number of blocks and the entry: the block is not there.
            last, entry = last - 1, before
    if not (0 <= entry.base <= zbus.LARGEST and 0 <= entry.end <= zbus.LARGEST_BLOCK):
        raise Corrupt(f"the entry of block {last} is impossible: {entry}", path=blocks.index_path, offset=zbus.entry_at(last))
    return last, entry


def _count(blocks: Blocks, state: TopicState) -> None:
    """Count the messages of the last block, and give the topic's number by them: a server stores them one after the other."""
    with contextlib.closing(View(blocks.files, blocks.directory, state.dialect)) as view:
        last, block = state.last, state.last.block
        entry = Entry(last.created, last.base, last.end, last.updated)
        if entry.end:
            first = view.number_of(entry)
            _check_counted(view, entry)
            for _, number in view.heads(entry, first):
                last.messages, state.number = last.messages + 1, number + 1
        while not entry.end and block > state.start:  # empty blocks: the number is that after the last message
            block -= 1
            following, entry = entry, view.entry(block)
            if entry.base + entry.end != following.base:  # what is appended would be written over other messages
                raise Corrupt(
                    f"the entry of block {block + 1} does not follow the one before: {following}",
                    path=blocks.index_path,
                    offset=zbus.entry_at(block + 1),
                )
            if entry.end:
                _check_counted(view, entry)
                for _, number in view.heads(entry, view.number_of(entry)):
                    state.number = number + 1


def _check_counted(view: View, entry: Entry) -> None:
    """Raise `Corrupt` if the block that is to be counted is cut, and `BadArgument` if it is in another dialect."""
    view.read(entry.base, entry.end - 1, 1)
    if view.dialect != "C" and zbus.crc_is_right(view.read(entry.base, 0, HEAD), 0):
        raise BadArgument(f'the topic {view.directory} was written in dialect C; open it with dialect="C". Nothing was changed')


def _up_to(blocks: Blocks, found: Replayed, is_there: Callable[[Redo], bool]) -> Replayed:
    """What the log says without the first commit whose messages are not there, and all behind it."""
    here = [(frame, redo) for frame, redo in found.redo if redo.block.block >= found.state.start]
    lost = next((frame for frame, redo in here if not is_there(redo)), None)
    if lost is None:
        return found
    return topic_log.replay(read_whole(blocks.files, blocks.log_path)[:lost], blocks.log_path)


# Step 4


def _redo(blocks: Blocks, found: Replayed) -> TopicState:
    """Step 4. After it every block has all that the log says, and nothing behind its end."""
    fds = Descriptors()
    fds.append(blocks.files.open(blocks.log_path))
    with contextlib.closing(_journal(blocks, found, fds)) as log:
        log.sync(log.position, refuse=False)  # what a killed process has not synced must not be lost when the files follow it
    while True:
        for block in (*found.state.full, found.state.last):
            if not blocks.exists(block.base):
                blocks.make(block.base)
        # What was not durable when the power was cut has not happened.
        if (rest := _up_to(blocks, found, lambda redo: _put_again(blocks, redo))) is found:
            break
        found = rest
    for block in (*found.state.full, found.state.last):
        blocks.cut(block)
    return found.state


def _put_again(blocks: Blocks, redo: Redo) -> bool:
    base = redo.block.base
    blocks.descriptor(base)
    blocks.unsynced.add(base)
    if redo.data is not None:
        blocks.write(base, redo.data, redo.offset)
        return True
    if _holds(blocks, redo):
        return True
    if redo.synced:
        raise Corrupt(
            f"{redo.size:,} bytes of committed messages are not as they were written",
            path=blocks.path_of(base),
            offset=redo.offset,
        )
    return False


def _holds(blocks: Blocks, redo: Redo) -> bool:
    """Whether the block has the messages of a commit."""
    if not blocks.exists(redo.block.base):
        return False
    fd = blocks.descriptor(redo.block.base)
    crc, at = redo.crc_before, redo.offset
    while at < redo.offset + redo.size:
        data = blocks.files.read(fd, min(LIMITS.write_bytes, redo.offset + redo.size - at), at)
        if not data:
            return False
        crc, at = crc32(data, crc), at + len(data)
    return crc == redo.crc


def _check_age(blocks: Blocks, state: TopicState) -> None:
    """Raise `Corrupt` if a block behind the last one has its checksums. It gets them when the log that knows it is on disk, so
    log and index are older: what they do not know would be removed.
    """
    end = state.last.base + state.last.end
    for name in blocks.files.list(blocks.data):
        base = zbus.base_of(f"{name.removesuffix('.sums')}.zbus") if name.endswith(".sums") else None
        if base is not None and base >= end:
            raise Corrupt(
                f"the log and the index are older than the blocks: they end at {end:,}, and {name} was committed behind that. "
                "Was an old copy restored? Nothing was changed; restore the latest ones, or all files from the same time",
                path=blocks.log_path,
            )


# Step 5


def _remove_strays(blocks: Blocks, state: TopicState, ours: bool) -> None:
    """Step 5: blocks that were trimmed, and new ones that were not committed; checksums of blocks that are not full; what was
    being made, here or by a repair, when its maker was killed.

    A block behind the last that a zbus server left (it syncs nothing: a power cut may have taken the index back) is kept
    aside, as NAME.unknown.
    """
    files = blocks.files
    blocks.cut(state.last)  # first: it may refuse
    for path in (blocks.log_path, blocks.index_path):
        remove_if_there(files, path + ".tmp")
    first = next((block.base for block in (*state.full, state.last) if block.block == state.start), None)
    if first is None:
        first = blocks.entry(state.start).base
    sure = False
    for name in files.list(blocks.data):
        number, _, kind = name.partition(".")
        base = zbus.base_of(f"{number}.zbus")
        if kind in ("zbus", "sums", "sums.tmp") and base is not None:
            end = state.last.base + (kind == "zbus")
            if base < first and not sure:
                first, sure = _first_base(blocks, state), True
            if first <= base < end and kind != "sums.tmp":
                continue
            path = os.path.join(blocks.data, name)
            if not ours and kind == "zbus" and base >= end and blocks.size(name):
                _logger.warning("%s: the index does not know this block; it is kept as %s.unknown", path, name)
                files.rename(path, path + ".unknown")
            else:
                files.unlink(path)


def _first_base(blocks: Blocks, state: TopicState) -> int:
    """Where the oldest block begins; 0 if the index, being damaged, does not say it for sure."""
    known = {block.block: (block.base, block.end) for block in (*state.full, state.last)}
    at = state.last.base
    for block in range(state.last.block - 1, state.start - 1, -1):
        base, end = known.get(block) or blocks.entry(block)[1:3]
        if base + end != at or base < 0:
            return 0
        at = base
    return at


def _journal(blocks: Blocks, found: Replayed, fds: list[int]) -> Journal:
    """The log as it is, open."""
    ends = found.end, found.snapshot_end
    return Journal(blocks.files, blocks.log_path, fds, found.generation, *ends, "topic", found.frames, found.durable)


# Step 7


def _new_log(blocks: Blocks, state: TopicState, unread: set[str]) -> Journal:
    """Step 7. The files say what the state says, durably, before the log does."""
    blocks.store(state)
    # Each reader has noted its sessions, the killed process perhaps in the page cache alone: a new log that does not know them
    # waits for that. Else a power cut would leave what was read in limbo, and it would be delivered again. A reader that cannot
    # be read has noted nothing.
    noted = {session for session, readers in state.sessions.items() if unread.isdisjoint(readers)}
    forget_sessions(blocks.files, blocks.directory, state, noted)
    state.clock = state.clock.now(blocks.files.boot())
    prune(state.idempotency_keys, state.clock.elapsed)
    state.full.clear()
    log = journal.create(blocks.files, blocks.log_path, lambda generation: topic_log.snapshot(state, generation), "topic")
    lock.whole(log.fd)
    return log


def forget_sessions(files: Files, directory: str, state: TopicState, noted: set[str]) -> None:
    """The log need not know of sessions that their readers have noted, once that is durable."""
    noted &= state.sessions.keys()
    unread = {name for session in noted for name in state.sessions[session] if not _sync_log(files, stem_of(directory, name))}
    for session in [session for session in noted if unread.isdisjoint(state.sessions[session])]:
        del state.sessions[session]


def _sync_log(files: Files, stem: str) -> bool:
    """Sync the log of a reader; False if something else is in its place by now."""
    with Descriptors() as fds:
        try:
            fds.append(files.open_to_read(stem + LOG))
        except FileNotFoundError:
            return True  # it was deleted
        except OSError as error:
            _logger.warning("%s: commits that this reader may not have noted stay in the log of the topic: %s", stem + LOG, error)
            return False
        files.sync(fds[0])
    return True
