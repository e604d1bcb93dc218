"""Messages on their way into a topic: checked, and waiting in memory or, for a session with many, in a file."""

from __future__ import annotations

import contextlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, cast

from qewqew_core.disk.descriptors import Descriptors, NotCopied
from qewqew_core.disk.files import Files
from qewqew_core.disk.opening import adding
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD, Message
from qewqew_core.limits import LIMITS

READ_BYTES = 256 << 10  # are read at once of what was spilled
_FRAME = struct.Struct(">qqBBI")  # timestamp (none: -1), corr_offset; sizes of id, tag and body, which follow


class Body(NamedTuple):
    """A large body that a session has moved to a file: bytes of that file."""

    fd: int
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


class Outgoing(NamedTuple):
    """Messages that were checked and are ready to be stored, in columns: one by one would take two or three times as long.

    The columns are the first fields of a `Message`.
    """

    bodies: list[bytes | Body]
    tags: list[str | None]
    ids: list[str | None]
    corr_offsets: list[int]
    timestamps: list[int | None]  # None: the time of the commit

    @property
    def messages(self) -> int:
        return len(self.bodies)

    @property
    def size(self) -> int:
        """The bytes that they take in blocks."""
        return HEAD * len(self.bodies) + sum(map(len, self.bodies))

    def part(self, start: int, stop: int) -> Outgoing:
        bodies, tags, ids, corr_offsets, timestamps = self
        part = slice(start, stop)
        return Outgoing(bodies[part], tags[part], ids[part], corr_offsets[part], timestamps[part])


def no_messages() -> Outgoing:
    return Outgoing([], [], [], [], [])


def checked(messages: Iterable[bytes | Message], dialect: str) -> Outgoing:
    """These messages, ready to be stored; raises what is wrong with the first one with which something is."""
    given = list(messages)
    kinds, count = {*map(type, given)}, len(given)
    if kinds == {bytes}:
        found = Outgoing(cast(list[bytes | Body], given), [None] * count, [None] * count, [0] * count, [None] * count)
    else:
        if kinds != {Message}:
            given = [message if isinstance(message, Message) else Message(message) for message in given]
        found = Outgoing(*[[*map(itemgetter(column), given)] for column in range(len(Outgoing._fields))])
    if not _is_plain(found):
        for each in map(cast(Any, Message), *found):
            zbus.check_message(each, dialect)
        # What may change after this call must not change what is stored.
        found.bodies[:] = [body if type(body) is bytes else bytes(cast(bytes, body)) for body in found.bodies]
    return found


def checked_one(message: Message, dialect: str) -> Outgoing:
    """The same for a single message, in a third of the time."""
    zbus.check_message(message, dialect)
    body, tag, id, corr_offset, timestamp, _, _, _ = message
    return Outgoing([body if type(body) is bytes else bytes(body)], [tag], [id], [corr_offset], [timestamp])


def _is_plain(messages: Outgoing) -> bool:
    """Whether nothing is wrong, and none has more than a body and a tag: whole columns at a time, in a quarter of the time."""
    bodies, tags, ids, corr_offsets, timestamps = messages
    if (
        {*map(type, bodies)} == {bytes}
        and max(map(len, bodies)) <= zbus.LARGEST_BODY
        and {*map(type, tags)} <= {str, type(None)}
        and ids.count(None) == timestamps.count(None) == len(bodies)
        and {*map(type, corr_offsets)} == {int}
        and not any(corr_offsets)
    ):
        for tag in {*tags}:
            zbus.check_tag(tag)
        return True
    return False


def portions(parts: Iterable[Outgoing], at: int, block_size: int) -> Iterator[tuple[bool, Outgoing]]:
    """Messages in portions of about 64 KiB; each begins a piece of the checksums, and may begin a block.

    ``at``: where the last block ends. All go to one block, as in the original, unless it would grow past 2 GiB.
    """
    begins = at >= block_size
    at = 0 if begins else at
    for messages in parts:
        ends = [*accumulate(map(HEAD.__add__, map(len, messages.bodies)))]
        first = before = 0
        while first < len(ends):
            if at + ends[first] - before > zbus.LARGEST_BLOCK:
                at, begins = 0, True
            fit = bisect_right(ends, before + zbus.LARGEST_BLOCK - at, first)
            stop = min(bisect_left(ends, before + LIMITS.piece_bytes, first) + 1, fit)
            yield begins, messages if stop - first == len(ends) else messages.part(first, stop)
            begins, at = False, at + ends[stop - 1] - before
            first, before = stop, ends[stop - 1]


def joined(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in buffers that are good to write: small ones joined, large ones as they are."""
    small: list[bytes] = []
    size = 0
    for buffer in buffers:
        if small and size + len(buffer) > LIMITS.write_bytes:
            yield b"".join(small)
            small, size = [], 0
        if len(buffer) >= LIMITS.write_bytes:
            yield buffer
        else:
            small.append(buffer)
            size += len(buffer)
    if small:
        yield b"".join(small)


class _Spilled(NamedTuple):
    end: int = 0  # in the file
    messages: int = 0
    size: int = 0  # in blocks


class Appends(NotCopied):
    """What a session has appended, in order: the newest part in memory, everything before in a file.

    The file has no name, and disappears with the process. You can iterate over it several times.
    """

    def __init__(self, files: Files, path: str) -> None:
        """``path``: the file's name while it is made."""
        self._files = files
        self._path = path
        self._fds = Descriptors()  # of the file, once there is one
        self._spilled = _Spilled()
        self._memory = no_messages()
        self._memory_size = 0

    def __len__(self) -> int:
        return self._spilled.messages + self._memory.messages

    @property
    def size(self) -> int:
        """The bytes that they take in blocks."""
        return self._spilled.size + self._memory.size

    def add(self, messages: Outgoing) -> None:
        """Add all, or none if it raises (`DiskFull`)."""
        size = messages.size
        if self._memory.messages and self._memory_size + size > LIMITS.topic_spill_bytes:
            self._spill()
        any(map(cast(Any, list.extend), self._memory, messages))  # in C: an interrupt comes before all columns, or after them
        self._memory_size += size

    def _spill(self) -> None:
        with adding(self._path, "topic"):
            if not self._fds:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self._path)
                self._fds.append(self._files.open(self._path, new=True))
                with contextlib.suppress(FileNotFoundError):  # a writer that begins takes it for that of a killed session
                    self._files.unlink(self._path)
            end = self._spilled.end
            for piece in joined(_frames(self._memory)):
                self._files.write(self._fds[0], piece, end)
                end += len(piece)
        # In one line: an interrupt comes before it or after it.
        self._spilled, self._memory, self._memory_size = _Spilled(end, len(self), self.size), no_messages(), 0

    def __iter__(self) -> Iterator[Outgoing]:
        at, end = 0, self._spilled.end
        while at < end:
            data = self._files.read(self._fds[0], min(READ_BYTES, end - at), at)
            begin, found = 0, no_messages()
            while begin + _FRAME.size <= len(data):
                timestamp, corr_offset, id_size, tag_size, size = _FRAME.unpack_from(data, begin)
                tag_at = begin + _FRAME.size + id_size
                body_at = tag_at + tag_size
                stop = body_at + size
                if stop > len(data) and begin:
                    break  # it is read again, from its beginning
                body = data[body_at:stop] if stop <= len(data) else Body(self._fds[0], at + body_at, size)
                found.bodies.append(body)
                found.tags.append(data[tag_at:body_at].decode() or None)
                found.ids.append(data[tag_at - id_size : tag_at].decode() or None)
                found.corr_offsets.append(corr_offset)
                found.timestamps.append(None if timestamp < 0 else timestamp)
                begin = stop
            yield found
            at += begin
        yield self._memory

    def clear(self) -> None:
        spilled = self._spilled.end
        self._spilled, self._memory, self._memory_size = _Spilled(), no_messages(), 0
        if spilled:
            self._files.truncate(self._fds[0], 0)

    def close(self) -> None:
        """You may call it twice; a second call finishes an interrupted first one."""
        self._memory = no_messages()
        self._fds.close()


def _frames(messages: Outgoing) -> Iterator[bytes]:
    for body, tag_text, id_text, corr_offset, timestamp in zip(*messages, strict=True):
        assert isinstance(body, bytes)  # what was spilled is not in memory
        id, tag = (id_text or "").encode(), (tag_text or "").encode()
        yield _FRAME.pack(-1 if timestamp is None else timestamp, corr_offset, len(id), len(tag), len(body)) + id + tag
        yield body
