"""Messages on their way into a topic: checked, and waiting in memory or, for a session with many, in a file."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from qewqew_core.disk.engine import naming_full_disk
from qewqew_core.disk.files import Descriptors, Files
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD, Message
from qewqew_core.limits import LIMITS

READ_BYTES = 1 << 20  # are read at once of what was spilled
_FRAME = struct.Struct(">qqBBI")  # timestamp (none: -1), corr_offset; sizes of id, tag and body, which follow


class Body(NamedTuple):
    """A large body that a session has moved to a file: bytes of that file."""

    fd: int
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


class Spilled(NamedTuple):
    """A `Message` with such a body."""

    body: Body
    tag: str | None
    id: str | None
    corr_offset: int
    timestamp: int | None
    number: int = -1
    offset: int = -1
    attempt: int = 1


Outgoing = Message | Spilled  # that was checked, and is ready to be stored; number, offset and attempt say nothing yet


def checked(messages: list[Message], dialect: str) -> list[Outgoing]:
    """The same message, ready to be stored; raises what is wrong with it."""
    if len(messages) > 1 and _is_plain(messages):
        return [*messages]
    for message in messages:
        zbus.check_message(message, dialect)
    # What may change after this call must not change what is stored.
    return [message if type(message.body) is bytes else message._replace(body=bytes(message.body)) for message in messages]


def _is_plain(messages: list[Message]) -> bool:
    """Whether nothing is wrong, and none has more than a body and a tag: whole columns at a time, in a quarter of the time."""
    bodies, tags, ids, corr_offsets, timestamps, _, _, _ = zip(*messages, strict=True)
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


def size_of(messages: Collection[Outgoing]) -> int:
    """The bytes that they take in blocks."""
    return HEAD * len(messages) + sum([len(message[0]) for message in messages])


def portions(messages: Iterable[Outgoing], at: int, block_size: int) -> Iterator[tuple[bool, list[Outgoing]]]:
    """Messages in portions of about 64 KiB; each begins a piece of the checksums, and may begin a block.

    ``at``: where the last block ends. All go to one block, as in the original, unless it would grow past 2 GiB.
    """
    begins = at >= block_size
    at = 0 if begins else at
    portion: list[Outgoing] = []
    size = 0
    for message in messages:
        length = HEAD + len(message[0])
        full = at + length > zbus.LARGEST_BLOCK
        if portion and (full or size >= LIMITS.piece_bytes):
            yield begins, portion
            portion, size, begins = [], 0, False
        if full:
            at, begins = 0, True
        portion.append(message)
        size += length
        at += length
    if portion:
        yield begins, portion


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


class Appends:
    """What a session has appended, in order: the newest part in memory, everything before in a file.

    The file has no name, and disappears with the process. You can iterate over it several times.
    """

    def __init__(self, files: Files, path: str) -> None:
        """``path``: the file's name while it is made."""
        self._files = files
        self._path = path
        self._fds = Descriptors()  # of the file, once there is one
        self._spilled = _Spilled()
        self._memory: list[Outgoing] = []
        self._memory_size = 0

    def __len__(self) -> int:
        return self._spilled.messages + len(self._memory)

    @property
    def size(self) -> int:
        """The bytes that they take in blocks."""
        return self._spilled.size + size_of(self._memory)

    def add(self, messages: list[Outgoing]) -> None:
        """Add all, or none if it raises (`DiskFull`)."""
        size = size_of(messages)
        if self._memory and self._memory_size + size > LIMITS.topic_spill_bytes:
            self._spill()
        self._memory += messages
        self._memory_size += size

    def _spill(self) -> None:
        with naming_full_disk(self._path):
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
        self._spilled, self._memory, self._memory_size = _Spilled(end, len(self), self.size), [], 0

    def __iter__(self) -> Iterator[Outgoing]:
        at, end = 0, self._spilled.end
        while at < end:
            data = self._files.read(self._fds[0], min(READ_BYTES, end - at), at)
            begin = 0
            while begin + _FRAME.size <= len(data):
                timestamp, corr_offset, id_size, tag_size, size = _FRAME.unpack_from(data, begin)
                tag_at = begin + _FRAME.size + id_size
                body_at = tag_at + tag_size
                stop = body_at + size
                if stop > len(data) and begin:
                    break  # it is read again, from its beginning
                body = data[body_at:stop] if stop <= len(data) else Body(self._fds[0], at + body_at, size)
                id, tag = data[tag_at - id_size : tag_at].decode() or None, data[tag_at:body_at].decode() or None
                kind: Callable[..., Outgoing] = Message if isinstance(body, bytes) else Spilled
                yield kind(body, tag, id, corr_offset, None if timestamp < 0 else timestamp)
                begin = stop
            at += begin
        yield from self._memory

    def clear(self) -> None:
        spilled = self._spilled.end
        self._spilled, self._memory, self._memory_size = _Spilled(), [], 0
        if spilled:
            self._files.truncate(self._fds[0], 0)

    def close(self) -> None:
        """You may call it twice; a second call finishes an interrupted first one."""
        self._memory = []
        self._fds.close()


def _frames(messages: Iterable[Outgoing]) -> Iterator[bytes]:
    for body, tag_text, id_text, corr_offset, timestamp, _, _, _ in messages:
        assert isinstance(body, bytes)  # what was spilled is not in memory
        id, tag = (id_text or "").encode(), (tag_text or "").encode()
        yield _FRAME.pack(-1 if timestamp is None else timestamp, corr_offset, len(id), len(tag), len(body)) + id + tag
        yield body
