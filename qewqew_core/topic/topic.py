"""`Topic`: a log that keeps its messages, with many readers; the disk queue of zbus, by rushmore.

One process at a time appends (`writer`). Any number reads at the same time, each reader at its own position (`reader`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time as clock
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Literal

from qewqew_core import arguments
from qewqew_core.batch import leases
from qewqew_core.batch.reports import Report
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Closes, Descriptors
from qewqew_core.disk.files import SMALL, Files, files_of, read_all, read_whole
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadPath, Broken, Closed, Corrupt, Locked, QewQewError
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Common, Message
from qewqew_core.keys import key_hash
from qewqew_core.secrecy import excerpt
from qewqew_core.topic import (
    outgoing,
    reader_files,
    reader_inspection,
    retention,
    topic_log,
    topic_paths,
    topic_recovery,
    topic_verification,
    witness,
)
from qewqew_core.topic.header import HasHeader
from qewqew_core.topic.outgoing import Outgoing
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.temporary import remove_temporary
from qewqew_core.topic.topic_inspection import TopicStats, all_readers, names_of_readers, stats_of
from qewqew_core.topic.topic_session import TopicSession
from qewqew_core.topic.topic_state import PutKey
from qewqew_core.topic.view import Position, View
from qewqew_core.topic.writer import RECOVERED, Writer

_logger = logging.getLogger(__name__)
_open_topics: weakref.WeakSet[Topic] = weakref.WeakSet()


class Topic(HasHeader, Closes):
    """The topic in the directory ``path``; created if it is missing. Threads may share it.

    Opening it waits for nobody. The first append takes the lock of the topic's one writer and keeps it until `close`; readers
    need no lock of the topic.

    ``block_size``: a new block file begins when the last one has reached this many bytes; messages that are appended together
    stay together. ``sync``: with "commit" (default), a call that changes the topic or a reader is durable when it returns, and
    no reader sees a message before it is; with "never" it survives the death of the process, and a power cut only after
    `close`. ``dialect``: "B" (default, reads "A" too) or "C", which zbus servers from 0.11 use; a topic keeps its dialect.
    ``lock_timeout``: seconds to wait for another writer, and for others that share a reader. ``min_free_bytes``: free space
    that appends leave on the file system. ``log_bytes``: as of a `Queue`; the log of a reader has 1 MiB.

    ``max_age``, ``max_bytes`` (of block files), ``max_records``: what the topic keeps at least. Older blocks are removed when a
    block is full, on `close` and by `trim`. ``delete_committed``: blocks that every reader (at least one) has committed are
    removed too. ``slow_readers``: with "hold" (default), blocks that a reader has not committed stay; with "move" the reader is
    moved on and counts what it lost. The last block, and blocks of leased or returned batches, are never removed.
    ``max_attempts``, ``retry_delay``, ``retention``, ``retention_bytes`` for batches of readers, and ``group``: as of a `Queue`.

    Raises `BadPath`, `BadArgument`, `Locked`, `Corrupt`, `DiskFull`, and `Broken` if the disk fails. After `Broken` the object
    refuses all calls that append.
    """

    _closed = True  # as one is that was interrupted while it was made

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size: int = zbus.BLOCK_SIZE,
        sync: Literal["commit", "never"] = "commit",
        dialect: Literal["A", "B", "C"] | None = None,
        lock_timeout: float = 10.0,
        min_free_bytes: int = 0,
        log_bytes: int = 4 << 20,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        max_records: int | None = None,
        delete_committed: bool = False,
        slow_readers: Literal["hold", "move"] = "hold",
        max_attempts: int = 5,
        retry_delay: float = 0.0,
        retention: timedelta = timedelta(days=1),
        retention_bytes: int = 1 << 30,
        group: str | None = None,
        _files: Files | None = None,
    ) -> None:
        self._opening = True
        self.block_size = arguments.check_whole("block_size", block_size, 1, zbus.LARGEST_BLOCK)
        self.sync = arguments.check_choice("sync", sync, ("commit", "never"))
        self._wanted = None if dialect is None else zbus.check_dialect(dialect)
        self.lock_timeout = arguments.check_timeout("lock_timeout", lock_timeout)
        self.min_free_bytes = arguments.check_whole("min_free_bytes", min_free_bytes, 0, sys.maxsize)
        self.log_bytes = arguments.check_whole("log_bytes", log_bytes, 1, journal.MOST_LOG_BYTES)
        if max_age is not None and (not isinstance(max_age, timedelta) or max_age <= timedelta(0)):
            raise BadArgument(f"max_age must be a timedelta above 0, or None, not {excerpt(max_age, 60)}")
        self.max_age, self.max_bytes = max_age, arguments.check_bound("max_bytes", max_bytes)
        self.max_records, self.delete_committed = arguments.check_bound("max_records", max_records), delete_committed
        self.slow_readers = arguments.check_choice("slow_readers", slow_readers, ("hold", "move"))
        leases.check_limits(max_attempts, retry_delay, retention, retention_bytes)
        self.max_attempts, self.retry_delay, self.retention = max_attempts, retry_delay, retention
        self.retention_bytes = retention_bytes
        members = None if group is None else arguments.check_group(group)
        self.path = topic_paths.check_topic_path(path)
        self.name = os.path.basename(self.path)
        self.files = files_of(_files, self.path, self.path, group=members)
        self._lock, self._sessions = threading.RLock(), 0
        self._writer: Writer | None = None
        with self.files.entering(), opening(self.path, "topic"), self.files.entered():
            topic_recovery.enter_directories(self.files, self.path)
            self.dialect = self._recovered_dialect()
            if self._wanted not in (None, self.dialect):
                raise BadArgument(f"the topic {self.path} is in dialect {self.dialect}, not {self._wanted}")
        self._closed = self._opening = False
        _open_topics.add(self)

    def _open_writer(self, lock_timeout: float) -> Writer:
        return Writer(
            self.files,
            self.path,
            self._wanted,
            self.block_size,
            self.sync,
            lock_timeout,
            self.min_free_bytes,
            self.log_bytes,
            self._recover_readers,
        )

    def _recovered_dialect(self) -> str:
        """Make sure that what a crash has left was repaired, by us or by the writer that lives; the dialect."""
        files, until = self.files, arguments.deadline(self.lock_timeout)
        lock_path, log_path = topic_paths.lock_of(self.path), topic_paths.log_of(self.path)
        while True:
            witness.check_topic(files, self.path)
            is_late = until is not None and clock.monotonic() >= until
            is_held = False
            with contextlib.suppress(OSError, Corrupt), Descriptors([files.open_to_read(lock_path)]) as (fd,):
                is_held = lock.is_held(fd)
                if is_held and read_all(files, fd, lock_path, SMALL)[witness.SIZE :] == RECOVERED:
                    return topic_log.dialect_of(read_whole(files, log_path), log_path)
            if is_late or not is_held:
                try:
                    with contextlib.closing(self._open_writer(0)) as writer:
                        return writer.engine.state.dialect
                except Locked:
                    if is_late:
                        raise
            clock.sleep(0.002)

    def writer(self) -> Writer:
        """The writer, with its lock."""
        with self._lock:
            self._usable()
            if self._writer is None:
                with opening(self.path, "topic"):
                    self._writer = self._open_writer(self.lock_timeout)
                    remove_temporary(self)
            return self._writer

    @property
    def is_closed(self) -> bool:
        return self._closed

    def recover(self) -> None:
        """Finish what a killed writer left, unless a living one has done so."""
        with self._lock:
            if self._writer is None and not self._closed:
                with contextlib.suppress(Locked):
                    self._open_writer(0).close()

    def _recover_readers(self, committed: set[str], dialect: str, closed: bool) -> set[str]:
        """Recovery, with the lock of the writer: sessions that died while they committed, and readers whose consumers died.
        Returns readers that cannot be read, so that nobody knows whether they have noted what was committed.
        """
        # Who was killed while it deleted a reader may not have done it: a power cut must not bring it back.
        # And a commit must not be forgotten as long as such a reader may come back that was part of it.
        if self._opening or committed:
            self.files.sync_directory(os.path.join(self.path, "reader"))
        reader_files.remove_leftovers(self.files, self.path)
        reader_files.remove_spilled(self.files, self.path)
        unread = set(reader_inspection.without_rdx(self.files, self.path)) if committed else set()
        for name in names_of_readers(self.files, self.path):
            state, is_read = None, False
            with reader_files.passing_foreign(self.files, self.path, name), contextlib.suppress(Corrupt):  # its reader is told
                if not closed or not reader_inspection.was_closed(self.files, self.path, name):
                    state = reader_inspection.look(self.files, self.path, name)
                is_read = True
            if not is_read:
                unread.add(name)
            if state is None:
                continue
            self.dialect = dialect  # which a topic that is just being opened does not know yet
            undecided = any(flight.session for flight in state.in_flight.values())
            if undecided or reader_inspection.is_beyond(self.files, self.path, state):
                try:
                    with self.reader(name) as reader:
                        reader.participant.resolve_all(committed)
                except (BadPath, Corrupt) as error:  # it keeps nobody from appending
                    reader_files.name_once(str(error))
                    unread.add(name)
            elif not state.clean:
                self._leave_to_a_server(name)
        return unread

    def _leave_to_a_server(self, name: str) -> None:
        """If all consumers of a reader have died, let its .rdx say what its log says, as the last of them would have done. A
        temporary one would be deleted: that is for the next one who appends.
        """
        stem = topic_paths.stem_of(self.path, name)
        if not reader_files.is_in_use(self.files, stem) and not reader_files.is_temporary(self.files, self.path, name):
            with contextlib.suppress(QewQewError):  # who opens the reader is told
                self.reader(name).close()

    # Appending

    def append(
        self,
        body: bytes,
        *,
        tag: str | None = None,
        id: str | None = None,
        corr_offset: int = 0,
        timestamp: int | None = None,
    ) -> int:
        """Append one message; returns its number. Durable when it returns, see ``sync``.

        Readers filter by ``tag`` (at most 127 bytes of UTF-8). ``id`` (39) and ``corr_offset`` are for the application.
        ``timestamp``: milliseconds since the epoch; None: now. Raises `BadRecord`, `RecordTooLarge`, `BadArgument`, `DiskFull`,
        `Full` (the topic has 10,240 blocks), `Locked` (another process appends): nothing was stored.
        """
        message = Message(body, tag, id, corr_offset, timestamp)
        return self._append(outgoing.checked_one(message, self.dialect), None)[0]

    def append_many(self, messages: Iterable[bytes | Message], key: str | None = None) -> int:
        """Append all messages, or none if one of them is wrong; returns how many. One commit, and they stay together.

        A message is a `Message(body, tag=…)`, possibly one that was read (its timestamp stays), or a body. With a ``key`` that
        was used before (within thirty days, and among the last 65,536), it stores nothing and returns what the first call
        returned. Raises as `append`.
        """
        return self._append(self.checked(messages), key)[1]

    def _append(self, ready: Outgoing, key: str | None) -> tuple[int, int]:
        """(number of the first message, how many)."""
        hashed = None if key is None else key_hash(arguments.check_key(key))
        writer = self.writer()
        try:
            with writer.engine.exclusive():
                number, blocks = writer.engine.state.number, writer.engine.state.last.block
                if hashed is not None and hashed in writer.engine.state.idempotency_keys:
                    position = writer.engine.log.position  # another thread may still be waiting for that commit
                    count = writer.engine.state.idempotency_keys[hashed][1]
                elif not ready.messages and hashed is None:
                    return number, 0
                else:
                    operations = [] if hashed is None else [PutKey(hashed, ready.messages)]
                    position, count = writer.append([ready], ready.size, operations), ready.messages
            writer.durable(position)
        except BaseException as error:
            writer.settle(error)
            raise
        if writer.engine.state.last.block != blocks:
            self.trim_quietly()
        return number, count

    def checked(self, messages: Iterable[bytes | Message]) -> Outgoing:
        """The messages, all checked before anything changes."""
        if isinstance(messages, (Message, bytes, bytearray, memoryview, str)):
            raise BadArgument("append_many takes an iterable of messages; for a single one use append")
        try:
            iterator = iter(messages)
        except TypeError as error:
            raise BadArgument(f"append_many takes an iterable of messages, not {type(messages).__name__}") from error
        return outgoing.checked(iterator, self.dialect)

    def session(self) -> TopicSession:
        """A transaction: its appends, and its reads by readers of this topic, happen together or not at all."""
        with self._lock:
            self._usable()
            self._sessions += 1
            return TopicSession(self, self._sessions)

    # Readers

    def reader(
        self,
        name: str,
        filter: str | None = None,
        start: Literal["oldest", "latest"] | int | datetime | Position = "oldest",
        *,
        window: int = 10_000,
        redeliver_after: float | None = 60.0,
        auto_commit: bool = False,
        temporary: bool = False,
    ) -> Reader:
        """The reader with this name; created if missing, at ``start``: the oldest message, the next one to come, the message
        with this number, the first since a time, or the position of another reader. Close it, or use it in a ``with``
        statement.

        ``filter``: which tags it delivers, see `Reader.set_filter`; None keeps its filter. ``window``: how many messages may be
        delivered and not committed. ``redeliver_after``: seconds after which such a message is delivered again (None: only when
        its consumer has died). ``auto_commit``: commit each message before it is handed out. ``temporary``: delete the reader
        when its last consumer closes it or dies. Raises `BadPath` for an impossible name, `BadArgument`.
        """
        self._check_place()
        return Reader(
            self,
            name,
            filter=filter,
            start=start,
            window=window,
            redeliver_after=redeliver_after,
            auto_commit=auto_commit,
            temporary=temporary,
        )

    def readers(self) -> list[str]:
        """The names of all readers, also of those whose .rdx is missing: opening one says so."""
        self._usable()
        with opening(self.path, "topic"):
            return all_readers(self.files, self.path)

    def copy_reader(self, source: str, target: str) -> None:
        """Make a reader at the position of another one, or move one there, durably. Filter and batches are not copied."""
        self._check_exists(source)
        with self.reader(source) as reader:
            place = reader.position()
        with self.reader(target, start=place) as other:
            other.move_to(place, force=True)

    def delete_reader(self, name: str) -> None:
        """Delete a reader with its batches and dead letters. Processes that have it open get `Closed`. Raises `BadArgument`."""
        self._check_exists(name)
        if name in reader_inspection.without_rdx(self.files, self.path):
            reader_files.withdraw_witness(self.files, topic_paths.stem_of(self.path, name))
            reader_files.remove_leftovers(self.files, self.path)
            return
        with self.reader(name) as reader:
            reader.delete()

    def _check_exists(self, reader: str) -> None:
        self._check_place()
        if reader not in (readers := self.readers()):
            raise BadArgument(f"the topic {self.path} has no reader {reader!r}; it has {', '.join(readers) or 'none'}")

    # What the topic says of itself

    def _usable(self) -> None:
        if self._closed and not self._opening:
            raise Closed("the topic is closed", path=self.path)

    def _check_place(self) -> None:
        """Raise `Broken` if another topic stands at the path than the one whose writer is open here."""
        self._usable()
        if self._writer is not None:
            with self._writer.engine.lock:
                self._writer.check_place()

    @contextlib.contextmanager
    def _look(self) -> Iterator[View]:
        """A view for one call: threads do not share it, and `close` does not take it away."""
        self._usable()
        with opening(self.path, "topic"):
            witness.check_topic(self.files, self.path)
            with contextlib.closing(View(self.files, self.path, self.dialect)) as view:
                yield view

    def _common(self) -> Common:
        with self._look() as view:
            return view.common()

    def _patch(self, at: int, data: bytes) -> None:
        self.writer().patch(at, data)

    def __len__(self) -> int:
        """How many messages the topic holds."""
        with self._look() as view:
            oldest = view.oldest().number  # first: a writer may append and remove meanwhile
            return view.latest().number - oldest

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Message]:
        """All messages, from the oldest on; no reader is moved."""
        with self._look() as view:
            place = view.oldest()
            while True:
                for found in view.messages(place):
                    yield found.message
                    place = found.after
                if place.block >= view.index().start:
                    return
                place = view.oldest()  # what came next was removed meanwhile

    def stats(self) -> TopicStats:
        """Counts and sizes, without a lock."""
        with self._look() as view:
            return stats_of(self.files, view)[0]

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Read everything, blocks and batches, and compare it with checksums and counts. Changes nothing.

        ``progress`` is called with the bytes of blocks read so far and in total.
        """
        with self._look() as view:
            return topic_verification.verify(self.files, view, progress)

    # Removing

    def trim(self) -> int:
        """Remove the oldest blocks that need not be kept; returns how many messages they had. Durable when it returns."""
        writer = self.writer()
        writer.engine.check_open()  # else it may say that nothing is to be removed
        with self._lock:
            with writer.engine.exclusive():
                writer.check_place()
            remove_temporary(self)
            with self._look() as view:
                blocks, messages = retention.removable(self.files, view, self, writer.age)
            if blocks:
                writer.trim(blocks)
        return messages

    def trim_quietly(self) -> None:
        """Trim after a commit: a damaged reader or a full disk must not look like a failure of the commit."""
        if self.max_age or self.max_bytes or self.max_records or self.delete_committed:
            try:
                self.trim()
            except Broken:
                raise
            except QewQewError as error:
                _logger.warning("old messages could not be removed: %s", error)

    # The end

    def close(self) -> None:
        """Leave the files as a zbus server would, and release the writer's lock. Readers stay open: they do not need it. Those
        whose process was killed are closed.

        You may call it twice; a second call finishes an interrupted first one.
        """
        with self._lock:
            try:
                if not self._closed and self._writer is not None and self._writer.engine.is_open:
                    self.trim_quietly()
                    with opening(self.path, "topic"), self.files.entered():
                        # While Python ends, nothing can be imported any more.
                        for name in () if sys.is_finalizing() else names_of_readers(self.files, self.path):
                            with reader_files.passing_foreign(self.files, self.path, name):
                                if not reader_inspection.was_closed(self.files, self.path, name):
                                    self._leave_to_a_server(name)
            finally:
                self._closed = True
                try:
                    if self._writer is not None:
                        self._writer.close()
                finally:
                    self.files.leave()  # readers go on by the path
                    _open_topics.discard(self)

    def __del__(self) -> None:
        if not self._closed:
            if self._writer is not None:
                warnings.warn(f"topic {self.path} was not closed", ResourceWarning, stacklevel=2)
            with contextlib.suppress(OSError):
                self.close()

    def _forked(self) -> None:
        """In a forked child: the topic stays the parent's."""
        self._closed = True
        self._lock = threading.RLock()  # its holder does not exist here
        if self._writer is not None:
            self._writer.forked()


def _after_fork() -> None:
    for topic in list(_open_topics):
        topic._forked()
    _open_topics.clear()


os.register_at_fork(after_in_child=_after_fork)
