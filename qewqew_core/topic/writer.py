"""`Writer`: the one process that appends to a topic.

It always keeps this order: messages into the block, past its end; the commit into the log; both durable; then the index, which
readers look at. So nobody reads what a power cut can take back (with ``sync="commit"``). Opening a writer begins with
`topic_recovery`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import cast

from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import NotCopied
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.files import Files
from qewqew_core.disk.opening import moved, opening
from qewqew_core.errors import DiskFull, Full, QewQewError
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Entry
from qewqew_core.keys import prune
from qewqew_core.limits import LIMITS
from qewqew_core.topic import topic_log, topic_recovery, witness
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.blocks import Blocks
from qewqew_core.topic.outgoing import Body, Outgoing, portions
from qewqew_core.topic.topic_paths import lock_of
from qewqew_core.topic.topic_state import Append, Extent, NewBlock, Operation, TopicState, Trim

RECOVERED = b"recovered\n"  # what follows the witness in the lock file once its owner has made sure that the files agree


class Writer(NotCopied):
    """Has the lock of the topic in ``directory``, and appends to it. Raises what `Topic` does."""

    _released = True  # whether there is nothing to be released

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
        resolve: topic_recovery.Resolving,
    ) -> None:
        """``resolve``: see `topic_recovery.recover`."""
        self.block_size = block_size
        self.min_free_bytes = min_free_bytes
        self.engine: Engine[TopicState] = Engine(
            directory, "topic", topic_log, sync=sync == "commit", log_bytes=log_bytes, locks_log=True
        )
        self._blocks = Blocks(files, directory)
        self._sync = sync
        self._publications: deque[tuple[int, dict[int, bytes]]] = deque()  # (position of the commit, what the index will say)
        self._patch: dict[int, bytes] = {}  # what could not be written of it
        self._said_unsynced = False  # whether log and index say that they may not agree on disk
        self._noted: set[str] = set()  # sessions that their readers have noted, though not durably
        self._lock_file: lock.HeaderLock | None = None
        self._process = os.getpid()
        self._released = False
        try:
            with opening(directory, "topic"):
                self._open(files, directory, dialect, lock_timeout, resolve)
        except BaseException:
            self._release()
            raise
        self._opened_at = self.engine.log.position
        self.engine.open()

    def _open(
        self,
        files: Files,
        directory: str,
        dialect: str | None,
        lock_timeout: float,
        resolve: topic_recovery.Resolving,
    ) -> None:
        for home in (directory, self._blocks.data):
            files.check_writable(home)
        self._lock_file, _ = lock.acquire(files, lock_of(directory), lock_timeout, follow=False, what="topic")
        fd = self._lock_file.fd
        witness.check_no_other(files, fd, lock_of(directory), files.status(fd))
        files.truncate(fd, witness.SIZE)
        unread = set[str]()

        def resolving(committed: set[str], dialect: str, closed: bool) -> set[str]:
            unread.update(resolve(committed, dialect, closed))
            return unread

        self.engine.attach(*topic_recovery.recover(self._blocks, dialect, resolving), files.boot())
        sessions = self.engine.state.sessions
        self._noted |= {session for session, readers in sessions.items() if unread.isdisjoint(readers)}
        if not witness.is_in(files, fd):
            witness.write(files, fd, self._blocks.log_path)
        files.write(fd, RECOVERED, witness.SIZE)

    # Appending

    def durable(self, position: int, always: bool = False) -> None:
        """Wait until the log is on disk up to ``position``, and tell readers. Threads that wait together share one fsync.

        With ``sync="never"`` and ``always``, blocks come before the log: what it says of earlier commits is then there, too.
        """
        if always and not self.engine.sync and self._blocks.unsynced:
            with self.engine.exclusive():
                self._blocks.sync()
        self.engine.durable(position, always)
        if self._publications or self._patch:
            with self.engine.exclusive():
                self._publish()

    def check_place(self) -> None:
        """Raise `Broken` if what stands at the paths of the topic is not what is open here: no step that works by path may touch
        it. Call it before each of them, with the engine's lock.
        """
        log = self.engine.log
        for fd, path in ((log.fd, log.path), *self._blocks.open_files()):
            if not self._blocks.files.is_at(fd, path):
                raise self.engine.poison(moved(path, "topic"))

    def settle(self, error: BaseException) -> None:
        """A call that may have committed was interrupted: then it has happened, and readers see that now, not some day."""
        if self.engine.is_open and not isinstance(error, QewQewError):
            try:
                self.durable(self.engine.log.position)
            except QewQewError:
                pass  # from now on, every call raises it
            except BaseException as again:  # a second Ctrl-C, by somebody who does not wait for the disk
                self.engine.poison(InterruptedError(0, f"interrupted twice, by {type(again).__name__}"))
                raise

    def append(self, parts: Iterable[Outgoing], size: int, behind: Sequence[Operation]) -> int:
        """Commit all these messages, ``size`` bytes in total, then other operations; returns the position of the commit."""
        engine, blocks, time = self.engine, self._blocks, self.engine.now()
        state = engine.state
        self._check_free(size)
        engine.log.reserve(0)  # before files are made
        inline = size <= LIMITS.inline_bytes[self._sync]
        number = state.number
        base, at, crc = state.last.base, state.last.end, state.last.crc
        operations: list[Operation] = []
        runs: list[tuple[int, int, int]] = []  # of the block: messages, bytes, crc up to their end
        made: list[int] = []
        writes: list[tuple[int, int, bytes]] = []
        try:
            for begins, portion in portions(parts, at, self.block_size):
                if begins:
                    if state.count + len(made) >= zbus.RING:
                        raise Full(
                            f"all {zbus.RING:,} blocks of the topic are in use. Nothing was stored; remove old messages "
                            f"(max_age, max_bytes, max_records, trim()), or use a larger block_size than {self.block_size:,}",
                            path=engine.path,
                        )
                    if runs:
                        operations.append(self._written(base, runs))
                        runs = []
                    base, at, crc = base + at, 0, 0
                    if not made:
                        self.check_place()
                    made.append(base)
                    blocks.make(base)
                    operations.append(NewBlock(time))
                frames = self._frames(portion, base + at, number, time)
                if inline:
                    data = b"".join(frames)
                    operations.append(Append(portion.messages, data))
                    writes.append((base, at, data))
                    at += len(data)
                else:
                    start = at
                    at, crc = blocks.write_ahead(base, at, frames, crc)
                    runs.append((portion.messages, at - start, crc))
                number += portion.messages
            if runs:
                operations.append(self._written(base, runs))
            if made and engine.sync:
                blocks.files.sync_directory(blocks.data)
            for base, start, data in writes:
                blocks.write(base, data, start)
            position = self._commit([*operations, *behind], time, reserve=True)
        except Full:
            blocks.unmake(made, state.last)
            raise
        except OSError as error:
            refusal = error if isinstance(error, DiskFull) else engine.refused(error)
            if refusal is None:
                raise
            blocks.unmake(made, state.last)
            raise refusal from error
        return position

    def _commit(self, operations: Sequence[Operation], time: int, reserve: bool = False) -> int:
        engine, state = self.engine, self.engine.state
        if not engine.sync and not self._said_unsynced:
            engine.log.sync(engine.log.append(topic_log.UNSYNCED, self._blocks.files.boot()), refuse=False)
            self._blocks.write_index(self._blocks.index_patch(state, mark=True))
            self._said_unsynced = True
        full = len(state.full)
        position = engine.commit(operations, time, reserve=reserve)
        patch = self._blocks.index_patch(state, *state.full[full:], state.last, mark=not engine.sync)
        self._publications.append((position, patch))
        if not engine.sync:
            self._publish()
        if engine.log.end > engine.rotate_at:
            self.rotate()
        elif engine.log.spare < journal.SPARE // 2:
            with contextlib.suppress(DiskFull):
                engine.log.reserve(0)
        return position

    def _publish(self) -> None:
        """Let readers see what is committed and, with ``sync="commit"``, durable."""
        patch, engine = self._patch, self.engine
        while self._publications and (not engine.sync or self._publications[0][0] <= engine.log.durable):
            patch.update(self._publications[0][1])  # twice, if it is interrupted here, rather than never
            self._publications.popleft()
        if patch:
            self._blocks.write_index(patch)
            patch.clear()

    def _frames(self, portion: Outgoing, offset: int, number: int, time: int) -> Iterator[bytes]:
        """Messages as they stand in a block; ``offset`` and ``number`` are those of the first."""
        heads = zbus.pack_heads(self.engine.state.dialect, offset, number, time, *portion)
        bodies = portion.bodies
        # All others are smaller than the last one can be, see `portions`.
        if len(bodies) > 1 and len(bodies[-1]) < LIMITS.piece_bytes and {*map(type, bodies)} == {bytes}:
            yield b"".join(chain.from_iterable(zip(heads, cast(list[bytes], bodies), strict=True)))
            return
        for head, body in zip(heads, bodies, strict=True):
            yield head
            if isinstance(body, Body):
                for at in range(0, len(body), LIMITS.write_bytes):
                    yield self._blocks.files.read(body.fd, min(LIMITS.write_bytes, len(body) - at), body.offset + at)
            else:
                yield body

    def _written(self, base: int, runs: list[tuple[int, int, int]]) -> Extent:
        """These messages are in the block, and on disk if ``sync`` says so: the operation for the log."""
        self._blocks.unsynced.add(base)
        if self.engine.sync:
            self._blocks.sync_block(base)
        return Extent(runs, self.engine.sync)

    def _check_free(self, size: int) -> None:
        if self.min_free_bytes and (free := self._blocks.files.free(self.engine.path)) - size < self.min_free_bytes:
            raise DiskFull(
                f"the file system has {free:,} bytes free, and min_free_bytes={self.min_free_bytes:,} must stay free. Nothing "
                "was stored; make room, or remove old messages",
                path=self.engine.path,
            )

    def patch(self, at: int, data: bytes) -> None:
        """Write a field of the index's common header, durably."""
        with self.engine.exclusive():
            self._blocks.write_index({at: data})
            self._blocks.sync_index()

    # Removing the oldest blocks

    def age(self, entry: Entry) -> int:
        """Milliseconds that have surely passed since messages were appended to a full block; of one that a zbus server wrote,
        as many as its entry says, and no more than have passed since this topic was first opened here.
        """
        clock, state = self.engine.clock(), self.engine.state
        elapsed = next((block.elapsed for block in state.full if block.base == entry.base and block.pieces), None)
        if elapsed is None:
            pieces = pieces_of(self._blocks.files, self._blocks.directory, entry.base)
            elapsed = pieces[-1].elapsed if pieces else max(0, clock.elapsed - max(0, clock.wall - entry.updated))
        return clock.elapsed - elapsed

    def trim(self, count: int) -> None:
        """Remove the oldest blocks, durably; never the last one. First the log and the index, then the files."""
        try:
            with self.engine.exclusive():
                self.check_place()
                start = self.engine.state.start
                entries = [self._blocks.entry(block) for block in range(start, start + count)]
                # A power cut must not take a commit before this one: then the blocks would be needed. And what batches that are
                # dead or acknowledged have linked is from now on no longer redone from the log.
                self._blocks.sync()
                position = self._commit([Trim(count)], self.engine.now())
            self.durable(position, always=True)
            with self.engine.exclusive():
                self._blocks.sync_index()
                self.check_place()
                self._blocks.remove(entries)
        except BaseException as error:
            self.settle(error)
            raise

    # The log

    def rotate(self) -> None:
        """Replace the log by a snapshot. If there is no room for it, the old log goes on."""
        self.engine.rotate(self._checkpoint)

    def _checkpoint(self) -> None:
        self._store()
        self._forget()

    def _store(self) -> None:
        """Bring blocks, their checksums and the index to where the log is, durably."""
        self.check_place()
        self.engine.log.sync(self.engine.log.position, refuse=self.engine.sync)
        self._publish()
        self.engine.with_room(partial(self._blocks.store, self.engine.state))
        self._said_unsynced = False

    def _forget(self) -> None:
        """Forget what a new log need not know."""
        engine, state = self.engine, self.engine.state
        topic_recovery.forget_sessions(self._blocks.files, engine.path, state, self._noted)
        self._noted.clear()
        prune(state.idempotency_keys, engine.clock().elapsed)
        state.full.clear()

    def noted(self, session: str) -> None:
        """All readers of a session have noted that it was committed."""
        self._noted.add(session)

    # The end

    def close(self) -> None:
        """Leave the files as a zbus server would, and release the lock. A second call finishes an interrupted first one."""
        self.engine.close(self._end, self._release)

    def _end(self) -> None:
        log = self.engine.log
        if log.position == self._opened_at:
            return
        self._store()
        if log.slow_to_open:
            self.engine.rotate(self._forget)
        log.append(topic_log.CHECKPOINT, b"")
        log.release_spare()

    def _release(self) -> None:
        """Called again after an interrupt, it does what is left."""
        self._blocks.close()
        self.engine.release()
        if self._lock_file is not None:
            self._lock_file.release()
        self._released = True

    def __del__(self) -> None:
        if not self._released and self._process == os.getpid():
            self._release()

    def forked(self) -> None:
        """In a forked child: the topic belongs to the parent. Closes descriptors, which drops no lock of the parent."""
        self.engine.forked()
        if self._lock_file is not None:
            self._lock_file.forked()
            self._lock_file = None
        self._release()
