"""A topic as anyone may read it while its writer goes on: index and block files, and no lock.

The writer stores what it has committed in this order: messages, the end of their block, the entry of a new block, the number of
blocks. So everything that the index names exists. If you read the index before the end of a block, you never miss what was
written to that block before the next one began.
"""

from __future__ import annotations

import sys
import time as clock
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from qewqew_core.batch.segments import RawMessages, Walk
from qewqew_core.disk.descriptors import Descriptors, NotCopied, close_each
from qewqew_core.disk.files import Files
from qewqew_core.disk.looking import replay_live
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD, NUMBER_AT, Entry, Heads, Index, Message
from qewqew_core.topic import topic_log, witness
from qewqew_core.topic.topic_paths import block_of, index_of, log_of

WINDOW = 1 << 16  # bytes that are read at once for a few messages …
SCAN = 1 << 20  # … and for many
_OPEN_BLOCKS = 8
_BLOCKS = zbus.INDEX_HEAD - 8  # bytes of the index that say which blocks there are; then comes the number of the next message


class Position(NamedTuple):
    """A position between two messages: the block, the offset in its file, and the number of the message that begins there."""

    block: int
    offset: int
    number: int


class Found(NamedTuple):
    """A message, its position, and the position of the next one."""

    message: Message
    at: Position
    after: Position


def behind(message: Message, at: Position) -> Position:
    """The position of the next message."""
    return Position(at.block, at.offset + HEAD + len(message.body), at.number + 1)


class Stretch(NamedTuple):
    """Messages of one block, in order; with a filter those that match."""

    block: int
    base: int  # offset of the block in the topic
    places: list[int]  # where in the block each message begins
    heads: Heads
    bodies: list[bytes]  # of large ones maybe the beginning alone; the head has the length
    reached: Position  # up to here there is no other

    @property
    def size(self) -> int:
        """Bytes of all bodies."""
        return sum(self.heads.lengths)

    def messages(self) -> list[Message]:
        return zbus.messages_of(self.heads, self.bodies, [self.base + place for place in self.places])

    def behind(self) -> Position:
        """Where the last of them ends."""
        return Position(self.block, self.places[-1] + HEAD + self.heads.lengths[-1], self.heads.numbers[-1] + 1)

    def first(self, count: int) -> Stretch:
        """Only this many of them, at least one."""
        if count == len(self.places):
            return self
        part = self._replace(places=self.places[:count], heads=self.heads.first(count), bodies=self.bodies[:count])
        return part._replace(reached=part.behind())


Marks = Callable[[Entry], Sequence[int]]  # places in a block at which messages are known to begin, in order


class View(NotCopied):
    """Reads the topic in ``directory``; see the module. Raises `BadPath`, `Corrupt`."""

    @classmethod
    def of(cls, files: Files, directory: str) -> Self:
        """The topic there. Its log says the dialect; without a log a zbus server made the topic, and B is assumed."""
        with opening(directory, "topic"):
            try:
                dialect = replay_live(files, log_of(directory), topic_log.replay).state.dialect
            except FileNotFoundError:
                witness.check_topic(files, directory)
                dialect = "B"
        return cls(files, directory, dialect)

    def __init__(self, files: Files, directory: str, dialect: str) -> None:
        self._files = files
        self.directory = directory
        self.dialect = dialect
        self.path = index_of(directory)
        self._blocks = OrderedDict[int, int]()  # base offset: descriptor
        self._index = b"", Index(0, 0, 0, 0)  # as it was read last
        self._entry: tuple[int, Entry] = -1, Entry(0, 0, 0, 0)  # the same of a block; what is before that end stays there
        self._window: tuple[int, int, bytes] = (-1, 0, b"")  # base offset, where in the block, bytes
        with opening(self.path, "topic"):
            try:
                (self._fd,) = self._owned = Descriptors([files.open_to_read(self.path)])
            except FileNotFoundError as error:
                raise BadPath("there is no topic here: its index is missing", path=self.path) from error
            zbus.check_index_size(files.size(self._fd), self.path)

    def close(self) -> None:
        """You may call it twice; a second call finishes an interrupted first one."""
        close_each(self._blocks)
        self._fd = -1
        self._owned.close()

    def __del__(self) -> None:
        if getattr(self, "_blocks", None):  # `_owned` closes the index
            close_each(self._blocks)

    def index(self) -> Index:
        """The present state. A new state is read twice, because the writer may be in the middle of writing it."""
        data = self._files.read(self._fd, zbus.INDEX_HEAD, 0)
        known, index = self._index
        if data != known:
            while data != (again := self._files.read(self._fd, zbus.INDEX_HEAD, 0)):
                data = again
            index = zbus.unpack_index(data, self.path)
            self._index = data, index
        return index

    def blocks(self) -> range:
        """The existing blocks: as `index`, but without the number, which changes with each commit and must be read twice."""
        data, (known, index) = self._files.read(self._fd, zbus.INDEX_HEAD, 0), self._index
        if data[:_BLOCKS] != known[:_BLOCKS]:
            index = self.index()
        return range(index.start, index.start + index.blocks)

    def is_unsynced(self) -> bool:
        """Whether messages that were seen before may not be on disk (``sync="never"``)."""
        return any(self._files.read(self._fd, topic_log.MARK, zbus.INDEX_HEAD))

    def entry(self, block: int) -> Entry:
        data = self._files.read(self._fd, zbus.ENTRY, zbus.entry_at(block))
        if len(data) < zbus.ENTRY:  # somebody has cut it since
            zbus.check_index_size(self._files.size(self._fd), self.path)
        entry = zbus.unpack_entry(data)
        self.check_entry(block, entry)
        self._entry = block, entry
        return entry

    def check_entry(self, block: int, entry: Entry) -> None:
        """Raise `Corrupt` for an impossible entry."""
        if entry.base < 0 or not 0 <= entry.end <= zbus.LARGEST_BLOCK:
            raise Corrupt(f"the entry of block {block} is impossible: {entry}", path=self.path, offset=zbus.entry_at(block))

    def entries(self, index: Index) -> list[Entry]:
        """The entries as they are, unchecked."""
        zbus.check_index_size(self._files.size(self._fd), self.path)
        ring = self._files.read(self._fd, zbus.INDEX_SIZE - zbus.HEADER, zbus.HEADER)
        places = range(index.start, index.start + index.blocks)
        return [zbus.unpack_entry(ring, zbus.entry_at(block) - zbus.HEADER) for block in places]

    def common(self) -> zbus.Common:
        zbus.check_index_size(self._files.size(self._fd), self.path)
        return zbus.unpack_common(self._files.read(self._fd, zbus.HEADER, 0))

    # Places

    def oldest(self) -> Position:
        """The position of the oldest message, or of the next one to come."""
        while True:
            index = self.index()
            try:
                return self.first_of(index.start, index)
            except Corrupt:
                if self.index().start == index.start:  # else the block was removed meanwhile
                    raise

    def latest(self) -> Position:
        """The position of the next message to come."""
        index = self.index()
        last = index.start + index.blocks - 1
        # In this order: both are behind what the index said, or the number is too low and is corrected by reading on.
        return Position(last, self.entry(last).end, index.number) if index.blocks else Position(index.start, 0, index.number)

    def first_of(self, block: int, index: Index) -> Position:
        """The first message of a block or, if it is empty, of the one after it. If it is damaged, its reader is told."""
        while block < index.start + index.blocks:
            entry = self.entry(block)
            if entry.end:
                return Position(block, 0, self._number_here(block, entry, index))
            block += 1
        return self.latest()

    def _number_here(self, block: int, entry: Entry, index: Index) -> int:
        """The number of a block's first message; if that is damaged, a number that is not too low: that of a later block."""
        number = self.sure_number(entry)
        if number is None and self.blocks().start > block:
            raise Corrupt("the block was removed meanwhile", path=self.block_path(entry.base))
        if number is None and not block:
            return 0
        while (number is None or number > index.number) and (block := block + 1) < index.start + index.blocks:
            number = self.sure_number(self.entry(block))
        return index.number if number is None else min(number, index.number)

    def number_of(self, entry: Entry, at: int = 0) -> int:
        """The number of the message at an offset of a block: of the first one, if the block is not empty."""
        head = self.read(entry.base, at, min(HEAD, entry.end - at))
        if len(head) < HEAD:
            raise Corrupt("the block ends inside the head of a message", path=self.block_path(entry.base), offset=at)
        return zbus.number_at(head, 0)

    def sure_number(self, entry: Entry) -> int | None:
        """The same, but only of a block that is not damaged there: the first message must be whole, and the one behind it the
        next one. None if it is damaged.
        """
        try:
            number, after, placed = self._head(entry, 0)
            following, _, both = self._head(entry, after) if after < entry.end else (number + 1, 0, True)
        except Corrupt:
            return None
        # A zbus server that was killed gives a number twice. Zeros would pass for it, if they were where they say.
        follows = following == number + 1 or (following == number and placed and both)
        return number if number >= 0 and follows else None

    def _head(self, entry: Entry, at: int) -> tuple[int, int, bool]:
        """Number and end of the message there, and whether it says itself that it is there. Raises `Corrupt`."""
        head = self.read(entry.base, at, min(HEAD, entry.end - at))
        after, number = zbus.check_head(head, at, at, entry.end, None, self.dialect, self.block_path(entry.base))
        return number, after, zbus.stored_offset_at(head, 0) in (entry.base + at, at)

    def by_number(self, number: int, marks: Marks = lambda entry: ()) -> Position | None:
        """The position of the message, also of the next one to come; None if it does not exist. Blocks that are damaged where
        they begin are passed over; raises `Corrupt` if the message may be in one.
        """
        index = self.index()
        if number >= index.number:
            return self.latest() if number == index.number else None
        blocks = [
            (block, entry) for block, entry in enumerate(self.entries(index), index.start) if entry.end
        ]  # an empty block has no number
        first, behind = self._around(number, [entry for _, entry in blocks])
        damage: Corrupt | None = None
        for place in range(max(first, 0), behind):  # a message of the first one, or of a damaged one behind it
            block, entry = blocks[place]
            known = [0, *(at for at in marks(entry) if 0 < at < entry.end)] if place == first else [0]
            try:
                # Not at a mark with exactly that number: a zbus server that was killed gives a number twice.
                begin = known[max(0, bisect_left(known, number, key=lambda at: self.number_of(entry, at)) - 1)]
                for at, found in self.heads(entry, self.number_of(entry, begin), begin):
                    if found == number:
                        return Position(block, at, number)
            except Corrupt as error:
                damage = damage or error
        if damage is not None:
            raise damage
        return None

    def _around(self, number: int, entries: list[Entry]) -> tuple[int, int]:
        """The place of the last block that surely begins at or before the message (-1: none), and of the first one that surely
        begins behind it.
        """
        low, high = -1, len(entries)
        while high - low > 1:
            middle = (low + high) // 2
            for place in (*range(middle, low, -1), *range(middle + 1, high)):
                if (found := self.sure_number(entries[place])) is not None:
                    low, high = (place, high) if found <= number else (low, place)
                    break
            else:
                break
        return low, high

    def by_offset(self, offset: int) -> Position | None:
        """The position of the message with this offset in the topic, also of the next one to come; None if none begins
        there.
        """
        index = self.index()
        entries = self.entries(index)
        place = bisect_right(entries, offset, key=lambda entry: entry.base) - 1
        while place > 0 and not entries[place].end and entries[place - 1].base + entries[place - 1].end > offset:
            place -= 1
        if place < 0:
            return None
        entry = entries[place]
        if offset == entry.base + entry.end:
            return self.latest() if place == len(entries) - 1 else self.first_of(index.start + place + 1, index)
        if offset > entry.base + entry.end:
            return None
        for at, number in self.heads(entry, self.number_of(entry)):
            if entry.base + at >= offset:
                return Position(index.start + place, at, number) if entry.base + at == offset else None
        return None

    def by_time(self, time: int) -> Position:
        """The first message with a timestamp of at least ``time``, in the first block that was written to since then."""
        index = self.index()
        for block, entry in enumerate(self.entries(index), index.start):
            if entry.updated >= time and entry.end:
                for at, number, data, start in self.record_heads(entry, self.number_of(entry)):
                    if zbus.timestamp_at(data, at - start, self.dialect) >= time:
                        return Position(block, at, number)
        return self.latest()

    # Messages

    def heads(self, entry: Entry, number: int, at: int = 0) -> Iterator[tuple[int, int]]:
        """(place, number) of each message of a block from ``at`` on, whose number is ``number``; each head is checked."""
        for place, found, _, _ in self.record_heads(entry, number, at):
            yield place, found

    def record_heads(
        self, entry: Entry, number: int, at: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, bytes, int]]:
        """The same, each with bytes that contain it, and their offset in the block."""
        end = entry.end if end is None else end
        data, start, path = b"", at, self.block_path(entry.base)
        while at < end:
            if at - start + HEAD > len(data):
                start, data = at, self.read(entry.base, at, min(SCAN, end - at), HEAD)
            after, number = zbus.check_head(data, start, at, end, number, self.dialect, path)
            yield at, number, data, start
            at, number = after, number + 1

    def begin(self, place: Position) -> Position:
        """A position that `latest` may have returned, with the present number of the message there; see `first_number`."""
        entry = self.entry(place.block)
        if place.offset >= entry.end:
            return place
        head = self.read(entry.base, place.offset, min(HEAD, entry.end - place.offset)).ljust(HEAD, b"\0")
        return place._replace(number=self.first_number(place.number, head, place.offset, entry.base, place.offset, entry.end))

    def first_number(self, number: int, data: bytes, start: int, base: int, at: int, end: int) -> int:
        """The number of the message at which reading begins: its own if that is higher, because `latest` may have returned one
        too low.

        Not if anything contradicts it: its offset (in dialect A the one in its block), the next message's number, the index.
        """
        found = zbus.number_at(data, at - start)
        if found <= number or zbus.stored_offset_at(data, at - start) not in (base + at, at):
            return number
        after = at + HEAD + zbus.length_at(data, at - start)
        if at < after <= end - HEAD and zbus.number_at(self.read(base, after, HEAD), 0) not in (found, found + 1):
            return number
        until = clock.monotonic() + 1
        while self.index().number <= found:  # a writer that is at work stores the end of the block before the number
            if clock.monotonic() > until:
                return number
            clock.sleep(0.001)
        return found

    def messages(
        self, position: Position, stop: Position | None = None, filter: Filter | None = None, window: int = WINDOW
    ) -> Iterator[Found]:
        """The messages from a position on that match, up to ``stop`` or to the end of the topic."""
        for stretch in self.stretches(position, stop, filter, window):
            for message, place in zip(stretch.messages(), stretch.places, strict=True):
                at = Position(stretch.block, place, message.number)
                yield Found(message, at, behind(message, at))

    def message(self, position: Position, cut: int = sys.maxsize) -> Message | None:
        """The message at a position, its body cut as by `stretches`; None if there is none, or it was removed."""
        stretch = next(self.stretches(position, most=1, cut=cut), None)
        return None if stretch is None else stretch.messages()[0]

    def stretches(
        self,
        position: Position,
        stop: Position | None = None,
        filter: Filter | None = None,
        window: int = WINDOW,
        most: int = sys.maxsize,
        cut: int = sys.maxsize,
        blocks: range | None = None,
    ) -> Iterator[Stretch]:
        """The same in stretches, at most ``most`` messages in all. With a filter a stretch may be empty: it says how far it came.

        Of a body of 64 KiB or more, only ``cut`` bytes are read, unless they were read already. ``blocks``: the existing
        blocks, if the caller has just looked.
        """
        block, at, number = position
        begins = True
        keys_at = zbus.keys_at
        matches = filter.matches_slot if filter else None
        careful = self.dialect == "C"
        while most > 0 and (stop is None or (block, at) < (stop.block, stop.offset)):
            there, blocks = blocks or self.blocks(), None  # before the end of the block: see the module
            if block < there.start:
                return
            known, entry = self._entry
            if known != block or at >= entry.end:
                entry = self.entry(block)
            end = stop.offset if stop is not None and stop.block == block else entry.end
            if at >= end:
                if block + 1 >= there.stop or (stop is not None and stop.block == block):
                    return
                block, at = block + 1, 0
                continue
            try:
                start, data = self._load(entry.base, at, end, window)
            except Corrupt:
                if block < self.index().start:  # it was removed meanwhile
                    return
                raise
            base, loaded = entry.base, min(start + len(data), end)
            if at + HEAD > loaded:
                raise Corrupt("the block ends inside the head of a message", path=self.block_path(base), offset=at)
            if begins:
                number, begins = self.first_number(number, data, start, base, at, end), False
            places: list[int] = []
            bodies: list[bytes] = []
            last = loaded - HEAD
            while at <= last and len(places) < most:
                found, tag, length = keys_at(data, at - start + NUMBER_AT)
                body_at = at + HEAD
                after = body_at + length
                if found != number or not body_at <= after <= end or careful:
                    try:
                        _, number = zbus.check_head(data, start, at, end, number, self.dialect, self.block_path(base))
                    except Corrupt:
                        if places:
                            break  # first those before it
                        raise
                if matches is None or matches(tag):
                    if after <= loaded:
                        bodies.append(data[body_at - start : after - start])
                    elif length < WINDOW:
                        break  # load again, from this message on
                    else:  # a large body is read to where it stays, and copied no more
                        bodies.append(self.read(base, body_at, min(length, cut)))
                    places.append(at)
                at, number = after, number + 1
            most -= len(places)
            if places or matches is not None:
                heads = zbus.unpack_heads(self.dialect, data, [place - start for place in places])
                yield Stretch(block, base, places, heads, bodies, Position(block, at, number))

    def runs(self, base: int, at: int, number: int, ends: Iterable[int], filter: Filter | None = None) -> Iterator[RawMessages]:
        """The messages of a block that match, from ``at`` on, where message ``number`` begins, as they are in the file.

        A run has at most 1 MiB, or one message. ``ends``: ends of messages that may be read by now, up to the last.
        """
        walk = Walk(self.block_path(base), base, at, self.dialect, number, filter)
        for end in ends:
            yield from (run for run in walk.to(end, lambda first, last: self.read(base, first, last - first), SCAN) if run.bounds)

    def _load(self, base: int, at: int, end: int, window: int) -> tuple[int, bytes]:
        """Bytes of the block around ``at``: (where they begin, bytes); the whole head at least, and as a rule the message."""
        kept_base, start, data = self._window
        have = start + len(data) - at
        if base == kept_base and start <= at and have >= HEAD:
            length = zbus.length_at(data, at - start)
            if have >= HEAD + length:
                return start, data
        data = self.read(base, at, min(window, end - at), HEAD)
        if len(data) >= HEAD and len(data) < (size := HEAD + zbus.length_at(data, 0)) <= min(end - at, HEAD + WINDOW):
            data = self.read(base, at, size)
        self._window = (base, at, data) if len(data) <= SCAN else (-1, 0, b"")
        return at, data

    # Block files

    def block_path(self, base: int) -> str:
        return block_of(self.directory, base)

    def is_block_at(self, base: int, path: str) -> bool:
        """Whether the file at the path is the block that is read here. True if it was not read, or many others since."""
        fd = self._blocks.get(base)
        return fd is None or self._files.is_at(fd, path)

    def read(self, base: int, at: int, size: int, least: int = sys.maxsize) -> bytes:
        """Bytes of a block. Raises `Corrupt` if the file is missing or too short; never returns zeros instead. ``least``:
        this many will do, if the file ends.
        """
        fd = self._blocks.get(base)
        if fd is None:
            while len(self._blocks) >= _OPEN_BLOCKS:
                close_each(self._blocks, next(iter(self._blocks)))
            with opening(path := self.block_path(base), "topic"):
                try:
                    fd = self._blocks[base] = self._files.open_to_read(path)
                except FileNotFoundError as error:
                    raise Corrupt(f"a block cannot be read: {error.strerror}", path=path) from error
        self._blocks.move_to_end(base)  # the last one used is closed last
        data = self._files.read(fd, size, at)
        if len(data) < min(size, least):
            said = f"the file ends before the messages do, which end at {at + size} or later"
            raise Corrupt(said, path=self.block_path(base), offset=at + len(data))
        return data
