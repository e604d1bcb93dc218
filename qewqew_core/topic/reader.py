"""`Reader`: a named position in a topic. It delivers messages, commits them, and leases them as batches.

Processes that open the same reader share it. Each call takes the reader's lock for a moment, catches up with what the others
have appended to its log, and appends to it itself (`shared_log`). Readers and the topic's writer do not wait for each other. A
delivered message is in flight until it is committed or given back. It is delivered again when its time is over, or when its
process dies (`deliveries`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time as clock
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.batch.leases import HasBatches, Leases
from qewqew_core.batch.stats import QueueStats
from qewqew_core.disk.descriptors import Closes, Descriptors
from qewqew_core.disk.files import Files, remove_if_there
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import with_room
from qewqew_core.errors import Closed, CommitConflict, DiskFull, Empty, QewQewError
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Common, Message
from qewqew_core.limits import now_ms
from qewqew_core.topic import reader_files, reader_log, topic_paths
from qewqew_core.topic.deliveries import Deliveries
from qewqew_core.topic.header import HasHeader
from qewqew_core.topic.open_topic import OpenTopic
from qewqew_core.topic.participant import Participant
from qewqew_core.topic.reader_batches import ReaderBatches
from qewqew_core.topic.reader_inspection import add_naks, check_rdx, missing_rdx, not_temporary, place_of_rdx, stats_of
from qewqew_core.topic.reader_state import Lose, Move, Range, ReaderState
from qewqew_core.topic.seeking import check_start, first_place, place_of
from qewqew_core.topic.shared_log import Consumer, SharedLog
from qewqew_core.topic.topic_inspection import names_of_readers
from qewqew_core.topic.view import Position, View

_logger = logging.getLogger(__name__)
_open_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


class Reader(HasBatches, HasHeader, Closes):
    """A reader of a topic; from `Topic.reader`. Threads may share it; processes share it by opening it in each.

    `read` and `read_many` deliver each message to one consumer, in order; `commit` ends its delivery, durably. A message that
    is neither committed nor given back (`nack`, `close`) is delivered again after ``redeliver_after`` seconds, and at once when
    its consumer's process dies. At most ``window`` messages are in flight for all consumers together. With ``auto_commit`` a
    message is committed before it is handed out: none comes twice, but one may be lost with its consumer. `lease` takes
    batches, as from a queue.
    """

    _released = True  # whether there is nothing to be released

    def __init__(
        self,
        topic: OpenTopic,
        name: str,
        *,
        filter: str | None,
        start: str | int | datetime | Position,
        window: int,
        redeliver_after: float | None,
        auto_commit: bool,
        temporary: bool,
        lock_timeout: float | None = None,
    ) -> None:
        """``lock_timeout``: in seconds; None: that of the topic."""
        self.name = topic_paths.check_reader_name(name)
        self.window = arguments.check_whole("window", window, 1, 1 << 20)
        self.redeliver_after = None if redeliver_after is None else arguments.check_timeout("redeliver_after", redeliver_after)
        chosen = None if filter is None else Filter(filter)
        check_start(start)
        self.auto_commit = auto_commit
        self.topic = topic
        self._files: Files = topic.files
        self.path = topic_paths.rdx_of(topic.path, name)
        self._stem = topic_paths.stem_of(topic.path, name)
        self._consumer = Consumer()
        self._view = View(self._files, topic.path, topic.dialect)
        self._shared = SharedLog(topic, name, self._consumer, topic.lock_timeout if lock_timeout is None else lock_timeout)
        self._engine = self._shared.engine
        self._deliveries = Deliveries(name, self._shared, self._consumer, self._view, window, redeliver_after, auto_commit)
        self.participant = Participant(self._shared, self._consumer, self._deliveries)
        room = partial(_make_room_elsewhere, topic, name)  # not of this object, which would then refer to itself
        source = ReaderBatches(topic, name, self._shared, self._consumer, self._deliveries, self._view, room)
        self._leases = Leases(source, topic.max_attempts, topic.retry_delay, topic.retention, topic.retention_bytes)
        self._released = False
        try:
            with opening(self.path, "reader"):
                for path in (self.path, self._stem):
                    self._files.check_writable(os.path.dirname(path))
                self._shared.open_lock()
            self._engine.open()
            with self._engine.exclusive(), opening(self.path, "reader"):
                with_room(self._shared.room, partial(self._open, start, chosen, temporary))
                self._shared.testify()
                with contextlib.suppress(DiskFull), opening(self.path, "reader"):
                    self._shared.room.make()
                if chosen is not None and chosen.text != self._engine.state.filter:
                    self.set_filter(chosen.text)
                if temporary and not (self._engine.state.temporary and self._is_temporary()):
                    self._set_mask(self._shared.common().mask | zbus.DELETE_ON_EXIT)
            _open_readers.add(self)
        except BaseException:
            self._engine.closed_reason = Closed("the reader was never opened")
            self._release()
            raise

    # Opening

    def _open(self, start: str | int | datetime | Position, chosen: Filter | None, temporary: bool) -> None:
        files, log_path = self._files, self._stem + topic_paths.LOG
        if new := not files.exists(self.path):
            self._make(start, chosen, temporary)
        for path in (self.path, log_path):
            remove_if_there(files, path + ".tmp")  # of who was killed while making it
        data = self._shared.open_rdx()
        if new:
            self._shared.tell_all()
        whole, data = zbus.is_whole_reader(data), data.ljust(zbus.READER_SIZE, b"\0")
        block, offset = zbus.unpack_position(data)
        has_log = files.exists(log_path)
        if has_log:
            if not self._engine.has_log:
                self._shared.load((block, offset))
            check_rdx(self._engine.state, whole, self.path)
        elif self._shared.has_witness:
            raise reader_log.missing(log_path)
        if not whole:  # the original extends it. Durably: beside a log that was closed it is damaged
            if not has_log:
                place_of_rdx(self._view, block, offset, self.path)  # it raises before anything is changed
            self._shared.patch_rdx(0, zbus.whole_reader(data, now_ms()))
        if has_log:
            state = self._engine.state
            committed = state.committed_position()
            if not state.clean or (committed.block, committed.offset, state.filter) == (block, offset, zbus.unpack_filter(data)):
                self._come_back()
                if not self._shared.has_witness:  # the lock file was removed, perhaps from under others, who must see that
                    self._shared.rotate()
                return
            # A zbus server has used the reader since.
        else:
            files.sync_directory(os.path.dirname(self.path))  # who made the .rdx may have been killed before doing it
        self._adopt(block, offset, zbus.unpack_filter(data))

    def _make(self, start: str | int | datetime | Position, chosen: Filter | None, temporary: bool) -> None:
        """A new reader. It is there when its .rdx is: with its filter, and temporary, for who makes it may be killed now.

        Its log is there before: an .rdx alone is a server's, and where one names a place that a power cut has taken is damage.
        """
        if self._shared.has_witness:  # else what there is, is of a reader that was deleted
            raise missing_rdx(self.path)
        place, text = first_place(self._view, start), None if chosen is None else chosen.text
        self._shared.room.make()
        self._shared.begin(ReaderState(pending=[Range(place, None)], filter=text, temporary=temporary))
        reader_files.make_rdx(self._files, self.path, place, text, zbus.DELETE_ON_EXIT if temporary else 0)
        self._shared.roll_forward()  # of a reader that was deleted, batches may be there

    def _adopt(self, block: int, offset: int, text: str | None) -> None:
        """What a zbus server has made of the .rdx is believed; batches and keys are those of the log."""
        self._files.sync(self._shared.rdx_fd)
        place = place_of_rdx(self._view, block, offset, self.path)
        state = ReaderState(pending=[Range(place, None)], filter=text, passed=(block, offset), temporary=self._is_temporary())
        if self._engine.has_log:
            before = self._engine.state
            state.batches, state.history, state.last_lease = before.batches, before.history, before.last_lease
            state.ranges, state.expired_keys, state.clock = before.ranges, before.expired_keys, before.clock
            self._engine.detach()
        nak_path = self.path.removesuffix(".rdx") + ".nak"
        handed_out = add_naks(self._files, self._view, nak_path, state)
        self._shared.begin(state)
        if handed_out:
            with Descriptors([self._files.open(nak_path)]) as (fd,):
                for at in handed_out:
                    self._files.write(fd, b"\0", at)

    def _come_back(self) -> None:
        """If a power cut took messages from the topic (``sync="never"``) that were read already: those to come are new ones."""
        index = self._view.index()
        last = index.start + index.blocks - 1
        end = (last, self._view.entry(last).end)
        state = self._engine.state
        if state.furthest()[:2] > end:
            _logger.warning("reader %s: messages that it had read are no longer in the topic", self.name)
            latest = self._view.latest()
            offsets = [offset for offset, flight in state.in_flight.items() if flight.at[:2] >= end]
            kept = [Range(begin, stop and min(stop, latest)) for begin, stop in state.pending if begin < latest]
            if not kept or kept[-1].stop is not None:
                kept.append(Range(latest, None))
            self._shared.commit(Lose(kept, offsets, 0))

    # Reading

    def read(self, timeout: float | None = 0) -> Message:
        """The next message, now in flight. Waits up to ``timeout`` seconds (None: forever), then raises `Empty`.

        Raises `Full` if ``window`` messages are in flight, and `Corrupt`.
        """
        return self._wait(lambda: self._deliver(1, None), timeout)[0]

    def read_many(self, max_records: int, max_bytes: int | None = None, timeout: float | None = 0) -> list[Message]:
        """Up to ``max_records`` messages with a total of up to ``max_bytes`` bytes, at least one; [] after ``timeout``.

        Fewer if ``window`` leaves no room for more. Raises as `read`.
        """
        arguments.check_whole("max_records", max_records, 1, sys.maxsize)
        if max_bytes is not None:
            arguments.check_whole("max_bytes", max_bytes, 1, sys.maxsize)
        try:
            return self._wait(lambda: self._deliver(max_records, max_bytes), timeout)
        except Empty:
            return []

    def _deliver(self, max_records: int, max_bytes: int | None) -> list[Message]:
        messages, position = self._engine.run(self._deliveries.deliver, max_records, max_bytes)
        if position is not None:
            self._shared.durable(position)
        return messages

    def peek(self, timeout: float | None = 0) -> Message:
        """The message that `read` would deliver, without delivering it. Waits and raises as `read`."""
        return self._wait(lambda: self._engine.run(self._deliveries.peek), timeout)[0]

    def __iter__(self) -> Iterator[Message]:
        """The messages that wait, as `read` delivers them, until there is none."""
        with contextlib.suppress(Empty):
            while True:
                yield self.read()

    def _wait(self, act: Callable[[], list[Message]], timeout: float | None) -> list[Message]:
        deadline = arguments.deadline(timeout)
        pause = 0.001
        while True:
            if found := act():
                return found
            if self._engine.state.prepared:  # what a session had that died while it committed may be ours
                if self.participant.is_undecided():
                    self.topic.recover()
                if found := act():
                    return found
            rest = None if deadline is None else deadline - clock.monotonic()
            if rest is not None and rest <= 0:
                raise Empty("there is no message that this reader has not delivered", path=self.path)
            clock.sleep(pause if rest is None else min(pause, rest))
            pause = min(pause * 1.5, 0.02)

    # Committing

    def commit(self, *messages: Message) -> int:
        """Commit these messages, or without arguments all that this object has delivered. Returns how many.

        Durable when it returns, as `Queue.put` is. You may commit a message twice. Raises `CommitConflict` if somebody else has
        a message because its time was over, or if it was not delivered; then none was committed.
        """
        position, count = self._engine.run(self._deliveries.commit, messages)
        if count:
            self._shared.durable(position)
        return count

    def nack(self, *messages: Message, delay: float = 0.0) -> int:
        """Give these messages back, or without arguments all that this object has. They come first, after ``delay`` seconds.

        Returns how many. Raises `CommitConflict` as `commit`.
        """
        arguments.check_timeout("delay", delay)
        with self._engine.exclusive():
            return self._deliveries.nack(messages, delay)

    # Moving

    def seek(self, *, number: int | None = None, offset: int | None = None, time: datetime | None = None) -> None:
        """Go on at the message with this number or offset, or at the first since a time. Durable as `commit`.

        Deliveries that are not committed are forgotten; these messages come again if they are after the new position. Raises
        `BadArgument` if there is no such message; the number of the next message to come is valid.
        """
        with self._engine.exclusive():
            position = self._go_to(place_of(self._view, number, offset, time))
        self._shared.durable(position)

    def _go_to(self, place: Position) -> int:
        position = self._shared.commit(Move([Range(place, None)], 0))
        self._consumer.passed.clear()
        self._consumer.refresh(self._engine.state)
        return position

    def move_to(self, place: Position, expected: Position | None = None, *, force: bool = False) -> None:
        """Go on at a position from `position` or a `View`; what is before it counts as committed. Always durable.

        For programs that track positions elsewhere, and use the reader to keep messages from being removed. Raises
        `CommitConflict` and changes nothing if messages are in flight or leased, or if the reader is not at ``expected``
        (unless that was removed). With ``force`` it always moves, as `seek` does.
        """
        with self._engine.exclusive():
            if not force:
                self._check_unused(expected)
            position = self._go_to(place)
        self._shared.durable(position, always=True)

    def _check_unused(self, expected: Position | None) -> None:
        state, found = self._engine.state, self._engine.state.committed_position()
        living = [batch.id for batch in state.batches.values() if batch.state in ("leased", "returned")]
        if state.in_flight or living:
            raise CommitConflict(
                f"the reader is in use: {len(state.in_flight)} of its messages are in flight, and {len(living)} batches leased",
                path=self.path,
            )
        if expected is not None and found[:2] != expected[:2] and expected.block >= self._view.index().start:
            raise CommitConflict(
                f"the reader was moved by somebody else: it stands at message {found.number}, not at {expected.number}",
                path=self.path,
            )

    @property
    def filter(self) -> str | None:
        """Which tags the reader delivers; see `tags`."""
        with self._engine.exclusive():
            return self._engine.state.filter

    def set_filter(self, text: str | None) -> None:
        """Deliver only messages whose tags match, from now on; None or "": all. Durable; raises `BadArgument`, `Corrupt`.

        Messages that do not match count as read, also those that were delivered, or given back: they do not come again. Who has
        one may still commit it. Messages that an earlier filter has skipped come again only after `seek`; batches stay as they
        are.
        """
        chosen = Filter(text)
        with self._engine.exclusive():
            position = self._deliveries.set_filter(chosen)
            self._shared.durable(position, always=True)
            self._shared.write_rdx(*zbus.filter_patch(chosen.text))

    # What the reader says of itself, as a topic does

    def keep(self) -> None:
        """Keep a temporary reader when its last consumer has gone. Durable."""
        with self._engine.exclusive():
            if self._is_temporary():
                self._set_mask(self._shared.common().mask & ~zbus.DELETE_ON_EXIT)

    def set_mask(self, mask: int) -> None:
        """As of a topic. With `zbus.DELETE_ON_EXIT` the reader is temporary: it is deleted with its last consumer."""
        with self._engine.exclusive():
            self._set_mask(mask)

    def _set_mask(self, mask: int) -> None:
        """Log and .rdx must both say that the reader is temporary: who is killed in between leaves one that stays."""
        at, data = zbus.mask_patch(mask)
        if temporary := bool(mask & zbus.DELETE_ON_EXIT):
            self._shared.set_temporary(temporary)
        self._shared.patch_rdx(at, data)
        if not temporary:
            self._shared.set_temporary(temporary)

    def _is_temporary(self) -> bool:
        return bool(self._shared.common().mask & zbus.DELETE_ON_EXIT)

    def _common(self) -> Common:
        with self._engine.exclusive():
            return self._shared.common()

    def _patch(self, at: int, data: bytes) -> None:
        with self._engine.exclusive():
            self._shared.patch_rdx(at, data)

    # Looking

    def lag(self) -> int:
        """How many messages there are from the first uncommitted one on, whatever the filter; also those in batches."""
        with self._engine.exclusive():
            self._deliveries.drop_lost()
            return self._view.latest().number - self._engine.state.committed_position().number

    @property
    def lost(self) -> int:
        """How many messages were removed from the topic before this reader had committed them."""
        with self._engine.exclusive():
            self._deliveries.drop_lost()
            return self._engine.state.lost

    def position(self) -> Position:
        """The first message that is not committed."""
        with self._engine.exclusive():
            self._deliveries.drop_lost()
            return self._engine.state.committed_position()

    def stats(self) -> QueueStats:
        """Counts and sizes of what is not leased or committed yet. With a filter, it must read the messages to count them."""
        with self._engine.exclusive():
            self._deliveries.drop_lost()
            return stats_of(self._files, self._engine.state, self._view, self._stem)

    # The end

    def delete(self) -> None:
        """Delete the reader with its batches and dead letters. Other processes that have it open get `Closed`."""
        with self._engine.exclusive():
            reader_files.delete(self._files, self.topic.path, self.name)

    def close(self) -> None:
        """Give back what is not committed, and release the reader. A temporary reader is deleted with its last consumer.

        You may call it twice; a second call finishes an interrupted first one.
        """
        with self._engine.lock:
            if self._released:
                return
            try:
                if self._engine.is_open:
                    with self._engine.exclusive():
                        self._leave_to_others()
            except (Closed, DiskFull):
                pass  # it was deleted; or, without room: who finds its lock gone takes what it had
            finally:
                self._engine.closed_reason = Closed("the reader is closed", path=self.path)
                self._release()
                _open_readers.discard(self)

    def _leave_to_others(self) -> None:
        if self._consumer.mine:
            self._deliveries.requeue(self._deliveries.check_mine(()))
        if self._shared.leave_for_good():
            is_temporary = self._is_temporary()
            if is_temporary and self._engine.state.temporary:
                reader_files.delete(self._files, self.topic.path, self.name)
                return
            if is_temporary:
                _logger.warning("%s", not_temporary(self.path))
            self._shared.checkpoint()

    def _release(self) -> None:
        """Called again after an interrupt, it does what is left."""
        self._shared.release()
        self._view.close()
        self._released = True

    def __del__(self) -> None:
        if not self._released:
            self._engine.closed_reason = Closed("the reader is closed", path=self.path)
            with contextlib.suppress(OSError):
                self._release()

    def _forked(self) -> None:
        """In a forked child: the reader stays the parent's. Closing a descriptor drops no lock: the parent has it too."""
        self._engine.forked()
        self._release()


def _after_fork() -> None:
    for reader in list(_open_readers):
        reader._forked()
    _open_readers.clear()


os.register_at_fork(after_in_child=_after_fork)


def _make_room_elsewhere(topic: OpenTopic, name: str) -> bool:
    """Remove acknowledged batches of another reader of the topic before their time, for they keep room that all share; whether
    there were any. Readers that somebody is using just now are passed over.
    """
    for other in names_of_readers(topic.files, topic.path):
        with contextlib.suppress(QewQewError, OSError):  # it is in use, or damaged: who opens it is told
            if other != name and _makes_room(topic, other):
                return True
    return False


def open_again(topic: OpenTopic, name: str, *, temporary: bool = False, lock_timeout: float | None = None) -> Reader:
    """Open a reader that is there, not to read, but for what is to be done with it."""
    return Reader(
        topic,
        name,
        filter=None,
        start="oldest",
        window=1,
        redeliver_after=None,
        auto_commit=False,
        temporary=temporary,
        lock_timeout=lock_timeout,
    )


def _makes_room(topic: OpenTopic, name: str) -> bool:
    reader = open_again(topic, name, lock_timeout=0)
    with reader, reader._engine.exclusive():
        return reader._leases.make_room() or places.remove_empty_homes(topic.files, reader._stem)
