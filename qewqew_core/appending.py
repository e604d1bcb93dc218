"""`Writer`: the one process that appends to a topic; and recovery, which every opening of a writer begins with.

The order that is kept everywhere: messages into the block, past its end; the commit into the log; both durable; then the
index, which is what readers look at. So nobody reads what a power cut can take back (with ``sync="commit"``).

Recovery, by the writer that has the lock:

1. No log: a zbus server made the topic. Its index is believed, except where it contradicts the messages (see `_adopt`).
2. The log is clean, and the index says the same: nothing to do.
3. It is clean, or the index is ahead of it: a zbus server has appended since. As 1; keys are kept. A server only appends: an
   index that lacks something of what a clean log knows is damaged, and refused.
   With ``sync="never"`` the index may also be ahead because a power cut took the end of the log, which then says so.
4. Else this is what a crash of ours left. The messages that the log carries are written into their blocks again, those
   that it does not are compared with their checksum. With ``sync="never"`` a power cut may have lost some: then the
   first of these, and all commits behind it, have not happened.
5. Blocks are cut to their end; those that are not committed or were trimmed are removed; the index is written.
6. What readers have read in sessions is decided, as the log says.
7. A new log takes the place of the old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from qewqew_core import journal, lock, topic_log, zbus
from qewqew_core.errors import BadArgument, BadPath, CorruptQueue, DiskFull, QewQewError, QueueBroken, QueueClosed, QueueFull
from qewqew_core.files import Descriptors, Files, close_each, read_whole, remove_if_there, write_new
from qewqew_core.guard import Guard
from qewqew_core.journal import Log
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.outgoing import Body, Outgoing, pieces, runs
from qewqew_core.topic_log import Replayed
from qewqew_core.topic_state import Append, Block, Extent, NewBlock, Operation, Redo, TopicState, Trim
from qewqew_core.view import View
from qewqew_core.zbus import HEAD, Entry, Index

RECOVERED = b"recovered\n"  # what the lock file holds once its owner has made sure that the files agree

_logger = logging.getLogger(__name__)


class Writer(Guard):
    """Has the lock of the topic in ``directory``, and appends to it. Raises what `Topic` does."""

    _what = "topic"

    def __init__(
        self,
        files: Files,
        directory: str,
        dialect: str | None,
        block_size: int,
        sync: str,
        lock_timeout: float,
        min_free_bytes: int,
        log_bytes: int,
        resolve: Callable[[set[str], str], None],
    ) -> None:
        """``resolve`` is told which sessions were committed, and the dialect."""
        super().__init__(directory)
        self._files = files
        self.block_size = block_size
        self.sync = sync
        self.min_free_bytes = min_free_bytes
        self._log_bytes = log_bytes
        name = os.path.basename(directory)
        self._index_path = os.path.join(directory, name + ".idx")
        self._log_path = os.path.join(directory, name + ".log")
        self._data = os.path.join(directory, "data")
        self._descriptors: dict[int, int] = {}  # base offset: descriptor; of the last block
        self._unsynced: set[int] = set()  # blocks with messages that may not be on disk, but in the log
        self._publications: deque[tuple[int, dict[int, bytes]]] = deque()  # (position of the commit, what the index will say)
        self._patch: dict[int, bytes] = {}  # what could not be written of it
        self._index_fd = -1
        self._leaving = Descriptors()  # descriptors that have no owner yet, or none any more
        self._log: Log | None = None
        self._said_unsynced = False  # whether the log says that the index may be ahead of it on disk
        self._noted: set[str] = set()  # sessions that their readers have noted, though not durably
        self._lock_file: lock.HeaderLock | None = None
        self._process = os.getpid()
        self._released = False
        try:
            self._lock_file, _ = lock.acquire(os.path.join(directory, name + ".lock"), lock_timeout, follow=False)
            files.truncate(self._lock_file.fd, 0)
            self._recover(dialect, resolve)
            files.write(self._lock_file.fd, RECOVERED, 0)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError) and not isinstance(error, QewQewError):
                raise self._full(error) or BadPath(
                    f"cannot be opened: {error.strerror}", path=error.filename or directory
                ) from error
            raise
        self._opened_at = self.log.position
        self._refusal = None

    @property
    def log(self) -> Log:
        assert self._log is not None
        return self._log

    # Recovery

    def _recover(self, dialect: str | None, resolve: Callable[[set[str], str], None]) -> None:
        files = self._files
        found = self._replayed()
        if not files.exists(self._index_path):
            self._make(found)
        self._index_fd = files.open(self._index_path)
        index = zbus.unpack_index(files.read(self._index_fd, zbus.INDEX_HEAD, 0), self._index_path)
        if found is not None and found.clean:
            self._check_index(index, found.state)
        # Extended, as the original does it; and really there: what follows a commit must not meet a full disk.
        files.allocate(self._index_fd, zbus.INDEX_SIZE)
        # In the same run of the machine nothing was lost: an index that is ahead of the log was changed by somebody else.
        whole = found is not None and (found.unsynced is None or found.unsynced == files.boot() != b"")
        if found is None or (
            not self._agrees(found.state, index) and (found.clean or (whole and self._is_ahead(found.state, index)))
        ):
            self.state, ours = self._adopt(index, found, dialect), False
        else:
            ours = True
            self.state = found.state
            if dialect is not None and dialect != found.state.dialect:
                raise BadArgument(f"the topic {self.path} is in dialect {found.state.dialect}, not {dialect}")
            if found.clean:
                ends = found.end, found.snapshot_end
                self._leaving.append(files.open(self._log_path))
                self._own_log(found.generation, *ends, found.frames)
                self._rotate_at = found.snapshot_end + self._log_bytes
                self._remove_strays(ours)
                files.sync_directory(self.path)  # who was killed after putting this log into place may not have done it
                resolve(set(self.state.sessions), self.state.dialect)
                self._noted |= self.state.sessions.keys()
                return
            self._redo(found)
        self._remove_strays(ours)
        self._write_index()
        resolve(set(self.state.sessions), self.state.dialect)
        # Each reader has noted them, the killed process perhaps in the page cache alone: a new log that does not know them waits
        # for that. Else a power cut would leave what was read in limbo, and it would be delivered again.
        self._noted |= self.state.sessions.keys()
        self._store()
        self._begin_log()

    def _replayed(self) -> Replayed | None:
        try:
            data = read_whole(self._files, self._log_path)
        except FileNotFoundError:
            return None
        found = topic_log.replay(data, self._log_path)
        if found.end < len(data.rstrip(b"\0")):
            found.clean = False  # a torn frame is to be cut off
        return found

    def _make(self, found: Replayed | None) -> None:
        """A new topic, with its first block, as a zbus server makes it. Done when the index is there."""
        self._refuse_blocks("the index of the topic is missing", found is not None)
        created = now_ms()
        self._make_block(0)
        image = bytearray(zbus.new_index(created))
        image[: zbus.INDEX_HEAD] = zbus.pack_index(Index(zbus.VERSION, 1, 0, 0))
        image[zbus.entry_at(0) : zbus.entry_at(0) + zbus.ENTRY] = zbus.pack_entry(Entry(created, 0, 0, created))
        self._files.sync_directory(self._data)
        self._files.sync_directory(os.path.dirname(self.path))  # who made the directories may have been killed before doing it
        write_new(self._files, self._index_path + ".tmp", bytes(image))
        self._files.rename(self._index_path + ".tmp", self._index_path)
        self._files.sync_directory(self.path)

    def _refuse_blocks(self, what: str, always: bool = False) -> None:
        if always or any(name.endswith(".zbus") and self._block_size(name) for name in self._files.list(self._data)):
            raise CorruptQueue(
                f"{what}, and its blocks are there. Nothing was changed; bring the index back", path=self._index_path
            )

    def _block_size(self, name: str) -> int:
        with Descriptors() as fds:
            fds.append(self._files.open_to_read(os.path.join(self._data, name)))
            return self._files.size(fds[0])

    def _entry(self, block: int) -> Entry:
        return zbus.unpack_entry(self._files.read(self._index_fd, zbus.ENTRY, zbus.entry_at(block)))

    def _agrees(self, state: TopicState, index: Index) -> bool:
        if (index.start, index.blocks, index.number) != (state.start, state.count, state.number):
            return False
        entry = self._entry(state.last.block)
        return (entry.base, entry.end) == (state.last.base, state.last.end)

    @staticmethod
    def _is_ahead(state: TopicState, index: Index) -> bool:
        """As a zbus server leaves it, which appends, and removes nothing."""
        further = (index.number, index.start + index.blocks) > (state.number, state.start + state.count)
        return further and index.start <= state.start

    def _check_index(self, index: Index, state: TopicState) -> None:
        """What a zbus server may have done to a topic that was closed leaves all of it there: it only appends."""
        size, last = self._files.size(self._index_fd), state.last
        if size < zbus.INDEX_SIZE:
            self._refuse_index(f"the index was cut: it has {size:,} bytes, not {zbus.INDEX_SIZE:,}", size)
        if index.start != state.start:
            self._refuse_index(f"the index begins with block {index.start:,}, the log says {state.start:,}", zbus.START_AT)
        if index.start + index.blocks <= last.block:
            self._refuse_index(f"the index has {index.blocks:,} blocks, the log says {state.count:,}", zbus.BLOCKS_AT)
        entry = self._entry(last.block)
        if entry.base != last.base or entry.end < last.end:
            what = f"block {last.block:,} begins at {entry.base:,} and has {entry.end:,} bytes"
            self._refuse_index(f"{what}, the log says {last.base:,} and {last.end:,}", zbus.entry_at(last.block))

    def _refuse_index(self, what: str, offset: int) -> NoReturn:
        raise CorruptQueue(
            f"{what}. Nothing was changed; bring the index back, or have `qewqew topic repair` make it anew",
            path=self._index_path,
            offset=offset,
        )

    def _adopt(self, index: Index, found: Replayed | None, dialect: str | None) -> TopicState:
        """The state of a topic to which a zbus server has written; raises `CorruptQueue` if messages are missing."""
        dialect = dialect or (found.state.dialect if found else "B")
        if max(index.start, index.number) > zbus.LARGEST:
            raise CorruptQueue(f"the index is impossible: {index}", path=self._index_path, offset=0)
        if index.blocks == 0:  # nobody has opened a writer
            self._refuse_blocks("the index of the topic has no block")
            self._make_block(0)
            state = TopicState(dialect, index.start, index.number, Block(index.start, 0, now_ms()))
        else:
            last = index.start + index.blocks - 1
            entry = self._entry(last)
            if index.blocks > 1:
                before = self._entry(last - 1)
                if not entry.end and entry.base != before.base + before.end:
                    # The server was killed between the number of blocks and the entry: the block is not there.
                    last, entry = last - 1, before
            if not (0 <= entry.base <= zbus.LARGEST and 0 <= entry.end <= zbus.LARGEST_BLOCK):
                raise CorruptQueue(
                    f"the entry of block {last} is impossible: {entry}", path=self._index_path, offset=zbus.entry_at(last)
                )
            block = Block(last, entry.base, entry.created, entry.end, updated=entry.updated)
            state = TopicState(dialect, index.start, index.number, block)
            self._count(state)
            if not 0 <= state.number <= zbus.LARGEST:
                raise CorruptQueue(
                    f"the last message has the number {state.number - 1}", path=self._block_path(entry.base), offset=0
                )
            if not entry.end and not self._files.exists(self._block_path(entry.base)):
                self._make_block(entry.base)  # the server was killed between the entry and the file
        if found is not None:
            # A server that came after a crash of ours may have written over what it did not know of: no key and no session may
            # say that this was appended.
            whole = self._up_to(found, self._holds).state
            state.put_keys, state.sessions = whole.put_keys, whole.sessions
        return state

    def _up_to(self, found: Replayed, is_there: Callable[[Redo], bool]) -> Replayed:
        """What the log says without the first commit whose messages are not there, and all behind it."""
        here = [(frame, redo) for frame, redo in found.redo if redo.block.block >= found.state.start]
        lost = next((frame for frame, redo in here if not is_there(redo)), None)
        return found if lost is None else topic_log.replay(read_whole(self._files, self._log_path)[:lost], self._log_path)

    def _count(self, state: TopicState) -> None:
        """Count the messages of the last block, and give the topic's number by them: a server stores them one after the other."""
        view = View(self._files, self.path, state.dialect)
        try:
            last, block = state.last, state.last.block
            entry = Entry(last.created, last.base, last.end, last.updated)
            if entry.end:
                first = view.number_of(entry)
                self._check_dialect(view, entry, state.dialect)
                for _, number in view.heads(entry, first):
                    last.messages, state.number = last.messages + 1, number + 1
            while not entry.end and block > state.start:  # empty blocks: the number is that after the last message
                block -= 1
                following, entry = entry, view.entry(block)
                if entry.base + entry.end != following.base:  # what is appended would be written over other messages
                    raise CorruptQueue(
                        f"the entry of block {block + 1} does not follow the one before: {following}",
                        path=self._index_path,
                        offset=zbus.entry_at(block + 1),
                    )
                if entry.end:
                    self._check_dialect(view, entry, state.dialect)
                    for _, number in view.heads(entry, view.number_of(entry)):
                        state.number = number + 1
        finally:
            view.close()

    def _check_dialect(self, view: View, entry: Entry, dialect: str) -> None:
        is_c = zbus.crc_is_right(view.read(entry.base, 0, HEAD), 0)
        if is_c and dialect != "C":
            raise BadArgument(f'the topic {self.path} was written in dialect C; open it with dialect="C". Nothing was changed')

    def _redo(self, found: Replayed) -> None:
        files = self._files
        with Descriptors() as fds:
            fds.append(files.open(self._log_path))
            files.sync(fds[0])  # what a killed process has not synced must not be lost when blocks and index follow it
        while True:
            state = self.state = found.state
            for one in (*state.full, state.last):
                if not files.exists(self._block_path(one.base)):
                    self._make_block(one.base)
            # What was not durable when the power was cut has not happened.
            if (rest := self._up_to(found, self._put_again)) is found:
                break
            found = rest
        for one in (*state.full, state.last):
            self._cut(one)

    def _put_again(self, redo: Redo) -> bool:
        fd = self._descriptor(redo.block.base)
        self._unsynced.add(redo.block.base)
        if redo.data is not None:
            self._files.write(fd, redo.data, redo.offset)
            return True
        if self._holds(redo):
            return True
        if redo.synced:
            raise CorruptQueue(
                f"{redo.size:,} bytes of messages, which were on disk when they were committed, are not as they were",
                path=self._block_path(redo.block.base),
                offset=redo.offset,
            )
        return False

    def _holds(self, redo: Redo) -> bool:
        """Whether the block has the messages of a commit."""
        if not self._files.exists(self._block_path(redo.block.base)):
            return False
        fd = self._descriptor(redo.block.base)
        crc, at = redo.crc_before, redo.offset
        while at < redo.offset + redo.size:
            data = self._files.read(fd, min(LIMITS.write_bytes, redo.offset + redo.size - at), at)
            if not data:
                return False
            crc, at = zlib.crc32(data, crc), at + len(data)
        return crc == redo.crc

    def _cut(self, one: Block) -> None:
        fd = self._descriptor(one.base)
        size = self._files.size(fd)
        if size < one.end:
            raise CorruptQueue(
                f"the block has {size:,} bytes, its messages end at {one.end:,}", path=self._block_path(one.base), offset=size
            )
        if size > one.end:
            self._files.truncate(fd, one.end)

    def _remove_strays(self, ours: bool) -> None:
        """Blocks that were trimmed, and new ones that were not committed; checksums of blocks that are not full; what was being
        made, here or by a repair, when its maker was killed.

        A block behind the last that a zbus server left (it syncs nothing: a power cut may have taken the index back) is kept
        aside, as NAME.unknown.
        """
        state = self.state
        self._cut(state.last)  # first: it may refuse
        for path in (self._log_path, self._index_path):
            remove_if_there(self._files, path + ".tmp")
        first = next((one.base for one in (*state.full, state.last) if one.block == state.start), None)
        if first is None:
            first = self._entry(state.start).base
        sure = False
        for name in self._files.list(self._data):
            number, _, kind = name.partition(".")
            if kind in ("zbus", "sums", "sums.tmp") and number.isdecimal():
                end = state.last.base + (kind == "zbus")
                if int(number) < first and not sure:
                    first, sure = self._first_base(), True
                if first <= int(number) < end and kind != "sums.tmp":
                    continue
                path = os.path.join(self._data, name)
                if not ours and kind == "zbus" and int(number) >= end and self._block_size(name):
                    _logger.warning("%s: the index does not know this block; it is kept as %s.unknown", path, name)
                    self._files.rename(path, path + ".unknown")
                else:
                    self._files.unlink(path)

    def _first_base(self) -> int:
        """Where the oldest block begins; 0 if the index, being damaged, does not say it for sure."""
        state = self.state
        known = {one.block: (one.base, one.end) for one in (*state.full, state.last)}
        at = state.last.base
        for block in range(state.last.block - 1, state.start - 1, -1):
            base, end = known.get(block) or self._entry(block)[1:3]
            if base + end != at or base < 0:
                return 0
            at = base
        return at

    def _write_index(self) -> None:
        for at, data in self._index_patch(*self.state.full, self.state.last).items():
            self._files.write(self._index_fd, data, at)

    # Blocks and index

    def _block_path(self, base: int) -> str:
        return os.path.join(self._data, zbus.block_name(base))

    def _make_block(self, base: int) -> None:
        path = self._block_path(base)
        if base in self._descriptors:  # an append that was interrupted had it open
            close_each(self._descriptors, base)
        if self._files.exists(path):  # left by a crash: nothing in it is committed
            self._files.unlink(path)
        self._files.close(self._files.open(path, new=True))

    def _descriptor(self, base: int) -> int:
        fd = self._descriptors.get(base)
        if fd is None:
            close_each(self._descriptors)
            fd = self._descriptors[base] = self._files.open(self._block_path(base))
        return fd

    def _index_patch(self, *blocks: Block) -> dict[int, bytes]:
        """What the index is to say, by the place; its head comes last."""
        patch = {zbus.entry_at(one.block): zbus.pack_entry(Entry(one.created, one.base, one.end, one.updated)) for one in blocks}
        patch[0] = zbus.pack_index(Index(zbus.VERSION, self.state.count, self.state.start, self.state.number))
        return patch

    def _publish(self) -> None:
        """Let readers see what is committed and, with ``sync="commit"``, durable."""
        patch = self._patch
        while self._publications and (self.sync != "commit" or self._publications[0][0] <= self.log.durable):
            patch.update(self._publications[0][1])  # twice, if it is interrupted here, rather than never
            self._publications.popleft()
        for at in sorted(patch, reverse=True):  # the head comes last
            self._files.write(self._index_fd, patch[at], at)
        if patch:
            patch.clear()
            self._changed.notify_all()

    # Appending

    def durable(self, position: int, always: bool = False) -> None:
        """Wait until the log is on disk up to ``position``, and tell readers. Threads that wait together share one fsync."""
        if self.sync == "commit" or always:
            try:
                self.log.sync(position, refuse=self.sync == "commit")
            except QueueBroken as error:
                with self._lock:
                    self._break(error)
                raise
        if self._publications or self._patch:
            with self._exclusive():
                self._publish()

    def _append(self, messages: Iterable[Outgoing], size: int, behind: Sequence[Operation]) -> int:
        """Commit messages, which take ``size`` bytes, then other operations; returns the position of the commit in the log."""
        state, time = self.state, now_ms()
        self._check_free(size)
        inline = size <= LIMITS.inline_bytes[self.sync]
        number = state.number
        base, at, crc = state.last.base, state.last.end, state.last.crc
        begin = at  # of this commit in the block
        operations: list[Operation] = []
        made: list[int] = []
        writes: list[tuple[int, int, bytes]] = []
        try:
            for begins, run in runs(messages, at, self.block_size):
                if begins:
                    if state.count + len(made) >= zbus.RING:
                        raise QueueFull(
                            f"all {zbus.RING:,} blocks of the topic are in use. Nothing was stored; let old messages go "
                            f"(max_age, max_bytes, max_records, trim()), or use a larger block_size than {self.block_size:,}",
                            path=self.path,
                        )
                    if not inline and at > begin:
                        self._written(base)
                    base, at, crc, begin = base + at, 0, 0, 0
                    made.append(base)
                    self._make_block(base)
                    operations.append(NewBlock(time))
                frames = self._frames(run, base + at, number, time)
                if inline:
                    data = b"".join(frames)
                    operations.append(Append(len(run), data))
                    writes.append((base, at, data))
                    at += len(data)
                else:
                    start = at
                    at, crc = self._write_run(base, at, frames, crc)
                    operations.append(Extent(len(run), at - start, crc, self.sync == "commit"))
                number += len(run)
            if not inline and at > begin:
                self._written(base)
            if made and self.sync == "commit":
                self._files.sync_directory(self._data)
            for base, start, data in writes:
                self._files.write(self._descriptor(base), data, start)
                self._unsynced.add(base)
            position = self._commit([*operations, *behind], time, reserve=True)
        except QueueFull:
            self._take_back(made)
            raise
        except OSError as error:
            full = error if isinstance(error, DiskFull) else self._full(error)
            if full is None:
                raise
            self._take_back(made)
            raise full from error
        return position

    def _commit(self, operations: Sequence[Operation], time: int, reserve: bool = False) -> int:
        log, body = self.log, topic_log.commit(time, operations)
        if reserve:
            log.reserve(len(body))
        if self.sync != "commit" and not self._said_unsynced:
            log.sync(log.append(topic_log.UNSYNCED, self._files.boot()), refuse=False)
            self._said_unsynced = True
        self._committed = True
        full = len(self.state.full)
        position = log.append(topic_log.COMMIT, body)
        for operation in operations:
            self.state.apply(operation, time)
        self._publications.append((position, self._index_patch(*self.state.full[full:], self.state.last)))
        if self.sync != "commit":
            self._publish()
        if log.end > self._rotate_at:
            self._rotate()
        elif log.spare < 64 << 10:
            with contextlib.suppress(DiskFull):
                log.reserve(0)
        return position

    def _frames(self, run: Iterable[Outgoing], offset: int, number: int, time: int) -> Iterator[bytes]:
        """Messages as they stand in a block; ``offset`` and ``number`` are those of the first."""
        dialect = self.state.dialect
        for body, id, tag, corr_offset, timestamp in run:
            size = len(body)
            yield zbus.pack_head(dialect, offset, time if timestamp is None else timestamp, id, corr_offset, number, tag, size)
            if isinstance(body, Body):
                for at in range(0, size, LIMITS.write_bytes):
                    yield self._files.read(body.fd, min(LIMITS.write_bytes, size - at), body.offset + at)
            else:
                yield body
            offset, number = offset + HEAD + size, number + 1

    def _write_run(self, base: int, at: int, frames: Iterable[bytes], crc: int) -> tuple[int, int]:
        """Write past the end of a block, where no reader looks; returns where that ends, and the block's checksum up to there."""
        fd = self._descriptor(base)
        for piece in pieces(frames):
            self._files.write(fd, piece, at)
            at, crc = at + len(piece), zlib.crc32(piece, crc)
        return at, crc

    def _written(self, base: int) -> None:
        self._unsynced.add(base)
        if self.sync == "commit":
            self._sync(self._descriptor(base))

    def _take_back(self, made: list[int]) -> None:
        for base in made:
            if (fd := self._descriptors.pop(base, None)) is not None:
                self._files.close(fd)
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._block_path(base))
            self._unsynced.discard(base)
        self._files.truncate(self._descriptor(self.state.last.base), self.state.last.end)

    def _check_free(self, size: int) -> None:
        if self.min_free_bytes and (free := self._files.free(self.path)) - size < self.min_free_bytes:
            raise DiskFull(
                f"the file system has {free:,} bytes free, and min_free_bytes={self.min_free_bytes:,} are to stay free. Nothing "
                "was stored; make room, or let old messages go",
                path=self.path,
            )

    # Removing the oldest blocks

    def trim(self, blocks: int) -> None:
        """Remove the oldest blocks, durably; never the last one. First the log and the index, then the files."""
        with self._exclusive():
            start = self.state.start
            entries = [self._entry(block) for block in range(start, start + blocks)]
            # A power cut must not take a commit before this one: then the blocks would be needed. And what batches that are
            # dead or acknowledged have linked is from now on no longer redone from the log.
            self._sync_blocks()
            position = self._commit([Trim(blocks)], now_ms())
        self.durable(position, always=True)
        with self._exclusive():
            self._files.sync(self._index_fd)
            for entry in entries:
                for name in (zbus.block_name(entry.base), topic_log.sums_name(entry.base)):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(os.path.join(self._data, name))
                self._unsynced.discard(entry.base)

    # The log

    def _store(self) -> None:
        """Bring blocks, their checksums and the index to where the log is, durably."""
        state = self.state
        if self._log is not None:
            self.log.sync(self.log.position, refuse=self.sync == "commit")
            self._publish()
        self._sync_blocks()
        full = [one for one in state.full if one.pieces]
        for one in full:
            path = os.path.join(self._data, topic_log.sums_name(one.base))
            # Readers that look at it in the meantime find it whole or not at all.
            write_new(self._files, path + ".tmp", topic_log.pack_sums(one.sums()))
            self._files.rename(path + ".tmp", path)
        if full:
            self._files.sync_directory(self._data)
        self._sync(self._index_fd)

    def _sync(self, fd: int) -> None:
        """If that fails, and be it for want of room, nobody knows what is on disk."""
        try:
            self._files.sync(fd)
        except OSError as error:
            if self._log is None:
                raise
            self._log.broken(error)

    def _sync_blocks(self) -> None:
        for base in sorted(self._unsynced):
            if self._files.exists(self._block_path(base)):
                self._sync(self._descriptor(base))
        self._unsynced.clear()
        self._files.sync_directory(self._data)

    def _begin_log(self) -> None:
        """Put a new log into place."""
        state = self.state
        self._forget_sessions()
        state.prune_keys(now_ms())
        state.full.clear()
        if self._log is not None:
            self.log.replace(self.log.prepare(partial(topic_log.snapshot, state)))
        else:
            generation = journal.new_generation()
            data = topic_log.snapshot(state, generation)
            write_new(self._files, self._log_path + ".tmp", data, self._leaving)
            self._files.rename(self._log_path + ".tmp", self._log_path)
            self._files.sync_directory(self.path)
            self._own_log(generation, len(data), len(data))
        self._rotate_at = self.log.snapshot_end + max(self._log_bytes, self.log.snapshot_end)
        self._said_unsynced = False

    def _own_log(self, generation: int, end: int, snapshot_end: int, frames: int = 0) -> None:
        """The descriptor that was opened last is that of the log."""
        fds = Descriptors()
        self._leaving.hand_over(fds)
        self._log = Log(self._files, self._log_path, fds, generation, end, snapshot_end, "topic", frames)

    def noted(self, session: str) -> None:
        """All readers of a session have noted that it was committed."""
        self._noted.add(session)

    def _forget_sessions(self) -> None:
        """The log need not know of sessions that their readers have noted, once that is durable."""
        sessions = self.state.sessions
        noted = self._noted & sessions.keys()
        for name in {name for session in noted for name in sessions[session]}:
            path = os.path.join(self.path, "state", name + ".log")
            with contextlib.suppress(FileNotFoundError), Descriptors() as fds:  # the reader was deleted
                fds.append(self._files.open_to_read(path))
                self._files.sync(fds[0])
        for session in noted:
            del sessions[session]
        self._noted.clear()

    def _rotate(self) -> None:
        try:
            self._store()
            self._begin_log()
        except OSError as error:
            if isinstance(error, QueueBroken) or self._full(error) is None:
                raise
            self._rotate_at = self.log.end + self._log_bytes // 4  # where there is no room for a new log, the old one goes on

    # The end

    def close(self) -> None:
        """Leave the files as a zbus server would, and give the lock back. An interrupted call is finished by the next one."""
        with self._lock:
            whole, self._refusal = self._refusal is None, QueueClosed("the topic is closed", path=self.path)
            try:
                if whole and self.log.position > self._opened_at:
                    self._store()
                    if self.log.slow_to_open:
                        self._begin_log()
                    self.log.append(topic_log.CHECKPOINT, b"")
                    self.log.give_back()
            except DiskFull:
                pass  # without a checkpoint: the next opening makes up for it
            except OSError as error:
                if isinstance(error, QewQewError):
                    raise
                raise QueueBroken(
                    f"closing failed: {error.strerror}; opening the topic again recovers it", path=self.path
                ) from error
            finally:
                self._release()

    def _release(self) -> None:
        """Called again after an interrupt, it does what is left."""
        close_each(self._descriptors)
        if self._index_fd >= 0:
            self._leaving[len(self._leaving) :], self._index_fd = [self._index_fd], -1
        self._leaving.close()
        if self._log is not None:
            self._log.close()
        if self._lock_file is not None:
            self._lock_file.release()
        self._released = True

    def __del__(self) -> None:
        if not self._released and self._process == os.getpid():
            self._release()

    def forked(self) -> None:
        """In a forked child: the topic stays the parent's. Descriptors are closed, which drops no lock of the parent."""
        self._refusal = QueueClosed("the topic was opened before this process was forked; open it again here", path=self.path)
        self._lock = type(self._lock)()  # whoever held it does not exist here
        if self._lock_file is not None:
            self._lock_file.forked()
            self._lock_file = None
        if self._log is not None:
            self._log.forked()
        self._release()

    def patch(self, at: int, data: bytes) -> None:
        """Write a field of the index's common header, durably."""
        with self._exclusive():
            self._files.write(self._index_fd, data, at)
            self._files.sync(self._index_fd)
