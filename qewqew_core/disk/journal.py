"""The framing of logs: a checked head, then checksummed frames that are only ever appended. No other module knows its bytes.

A log is a snapshot of a state, followed by one frame for each commit since. A commit *is* its frame: it happened if
and only if the whole frame is in the log. Each kind of log gives the kinds of frames their meaning: for queues see
`log`. All integers are big-endian::

     0        8           12      16          each frame:   0        4       8         12     13
    ┌────────┬───────────┬───────┬────────┬──             ┌────────┬───────┬─────────┬──────┬────────┐
    │ magic  │generation │ crc32 │ frame  │ frame …       │ length │ crc32 │ durable │ kind │ body   │
    │        │    u32    │       │        │               │  u32   │  u32  │   u32   │  u8  │ length │
    └────────┴───────────┴───────┴────────┴──             └────────┴───────┴─────────┴──────┴────────┘

A frame's crc covers everything behind it. It begins with the generation, which is new for each snapshot, so bytes of an
older log are never taken for frames. ``durable`` is the offset up to which the log was on disk when the frame was written.
Kind 0 is unwritten space.

The first thing that is not a whole frame ends the log: that commit was torn, never happened, and is cut off. But if a good
frame further on says that the place was durable, it was not torn but damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

from qewqew_core.checksum import Parts, crc_of_front
from qewqew_core.crc import crc32
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors, NotCopied, close_all, close_first
from qewqew_core.disk.files import Files, write_new
from qewqew_core.disk.opening import moved, opening, remedy
from qewqew_core.disk.reserve import FULL, Reserve, with_room
from qewqew_core.errors import BadPath, Broken, Corrupt, DiskFull
from qewqew_core.limits import LIMITS

_HEAD = struct.Struct(">8sII")
_FRAME = struct.Struct(">IIIB")
_UNCHECKED, _CHECKED_HEAD = struct.Struct(">II"), struct.Struct(">IB")  # its two parts
_CHECKED = _UNCHECKED.size  # the crc covers the frame from here on
BEGIN = _HEAD.size  # offset of the first frame

MOST_LOG_BYTES = 1 << 30  # how much a log may be allowed to grow before it is cut back: it is read whole
SPARE = 64 << 10  # kept behind the end of an open log, so that records can be taken, and make room, on a full disk


# Writing


def new_generation() -> int:
    """Random, so that no record can hold bytes that pass for a frame of the log it is in."""
    return int.from_bytes(os.urandom(4))


def head(magic: bytes, generation: int) -> bytes:
    """What a log begins with; ``magic`` has eight bytes, and tells one kind of log from another."""
    begin = _HEAD.pack(magic, generation, 0)[:-4]
    return begin + crc32(begin).to_bytes(4)


def frame(kind: int, body: bytes, generation: int, durable: int = 0) -> bytes:
    head = _CHECKED_HEAD.pack(durable, kind)
    return b"".join((_UNCHECKED.pack(len(body), crc32(body, crc32(head, generation))), head, body))


# Reading


Body = bytes | memoryview  # of a frame: where a log is replayed, nothing of it is copied but for what the state keeps


class Place(NamedTuple):
    """Where a whole frame is."""

    start: int
    kind: int
    body: int  # where that begins
    end: int


class Frame(NamedTuple):
    """A whole frame, and where it is."""

    start: int
    kind: int
    body: bytes
    end: int


def generation_of(data: bytes, magic: bytes, path: str) -> int:
    """Check the head of a log; raises `Corrupt` with path and offset."""
    if len(data) < _HEAD.size:
        raise Corrupt("the transaction log is cut short", path=path, offset=len(data))
    found, generation, crc = _HEAD.unpack_from(data)
    if found != magic:
        raise Corrupt("this is not a transaction log of version 1", path=path, offset=0)
    if crc != crc32(data[: _HEAD.size - 4]):
        raise Corrupt("the head of the transaction log is damaged", path=path, offset=0)
    return int(generation)


def places(data: bytes, generation: int, at: int = BEGIN) -> Iterator[Place]:
    """Where the frames are from ``at`` (the first) on, up to one that is not whole."""
    while (end := _frame_end(data, generation, at)) is not None:
        yield Place(at, data[at + _FRAME.size - 1], at + _FRAME.size, end)
        at = end


def _frame_end(data: bytes, generation: int, at: int) -> int | None:
    """Where the frame at ``at`` ends, if there is a whole one."""
    if at + _FRAME.size > len(data):
        return None
    length, crc, _, kind = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + int(length)
    if not kind or end > len(data) or crc32(memoryview(data)[at + _CHECKED : end], generation) != crc:
        return None
    return end


def frames(data: bytes, generation: int, at: int = BEGIN) -> Iterator[Frame]:
    """The same, with the bodies."""
    for start, kind, body, end in places(data, generation, at):
        yield Frame(start, kind, data[body:end], end)


def durable_at(data: bytes, start: int) -> int:
    """How much of the log was on disk when the frame that begins there was written, as it says."""
    durable: int = _FRAME.unpack_from(data, start)[2]
    return durable


def ends_with(files: Files, path: str, kind: int) -> bool:
    """Whether a log ends with a frame of this kind that has no body. Only the two ends of the file are read."""
    with Descriptors([files.open_to_read(path)]) as (fd,):
        begin = files.read(fd, _HEAD.size, 0)
        last = files.read(fd, _FRAME.size, max(0, files.size(fd) - _FRAME.size))
    generation = int(_HEAD.unpack(begin)[1]) if len(begin) == _HEAD.size else 0
    return _frame_end(last, generation, 0) == len(last) and last[-1] == kind


_ZEROS = bytes(64 << 10)


def ends_in_zeros(data: bytes, at: int) -> bool:
    """Whether there are only zeros from ``at`` on, where no frame can hide."""
    return all(data.startswith(_ZEROS[: len(data) - begin], begin) for begin in range(at, len(data), len(_ZEROS)))


def was_durable(data: bytes, generation: int, at: int, kinds: Collection[int]) -> bool:
    """Whether a good frame behind ``at`` says that ``at`` was on disk before it was written itself.

    ``kinds``: what is appended to a log. Frames of its snapshot say nothing of the kind.
    """
    return any(True for _ in find_frames(data, generation, at + 1, kinds, at + 1))


# What a body that QewQew cannot have written raises while it is read and applied.
NONSENSE = (ValueError, KeyError, IndexError, struct.error, TypeError, AttributeError, RecursionError, AssertionError)


def contradiction(error: Exception, path: str, offset: int) -> Corrupt:
    """For a frame that raises `NONSENSE`. Its checksum is right, so it was written so: better no queue than a wrong one."""
    return Corrupt(f"a frame of the log contradicts what came before it: {error!r}", path=path, offset=offset)


def json_fields(body: bytes) -> dict[str, Any]:
    """The body of a frame that is a JSON object. Raises ValueError for any other, and RecursionError."""
    fields = json.loads(body)
    if type(fields) is not dict:
        raise ValueError("this is not a JSON object")
    return fields


# A damaged log


def find_frames(data: bytes, generation: int, at: int, kinds: Collection[int], durable: int = 0) -> Iterator[Frame]:
    """Whole frames of these kinds from ``at`` on, wherever they begin, that say that ``durable`` bytes or more were on disk.

    Frames may seem to begin everywhere and to reach to the end of the log. A long one costs no more than a short one (`Parts`),
    so the time is linear in the size of the log, whatever is in it.
    """
    parts, kind = None, re.compile(b"[%b]" % re.escape(bytes(kinds)))
    while found := kind.search(data, at + _FRAME.size - 1):
        at, body = found.end() - _FRAME.size, found.end()
        length, crc, until, _ = _FRAME.unpack_from(data, at)
        end = body + int(length)
        if durable <= until <= at and end <= len(data):  # tells most places apart before a checksum is computed
            parts = parts or Parts(data)
            if parts.crc(at + _CHECKED, end, generation) == crc:
                yield Frame(at, data[body - 1], data[body:end], end)
                at = end - 1
        at += 1


def find_generation(data: bytes, magic: bytes, kinds: Collection[int]) -> int | None:
    """The generation in the head or, if that is damaged, the one with which the checksum of the first frame begins. That frame is
    of one of these ``kinds``.
    """
    if len(data) < _HEAD.size + _FRAME.size:
        return None
    generation: int = _HEAD.unpack_from(data)[1]
    if data[: _HEAD.size] == head(magic, generation):
        return generation
    length, crc, _, kind = _FRAME.unpack_from(data, _HEAD.size)
    first = data[_HEAD.size + _CHECKED : _HEAD.size + _FRAME.size + length]
    if kind not in kinds or len(first) < length + _FRAME.size - _CHECKED:
        return None
    return crc_of_front(crc, crc32(first), len(first))


# An open log


def create(files: Files, path: str, snapshot: Callable[[int], bytes], owner: str, room: Reserve | None = None) -> Journal:
    """Put a new log in place, whole or not at all, and durably. ``snapshot`` makes all of it for a generation, head included."""
    generation, fds = new_generation(), Descriptors()
    data = snapshot(generation)
    with_room(room or Reserve(files, path), partial(write_new, files, path + ".tmp", data, fds))
    files.rename(path + ".tmp", path)
    files.sync_directory(parent(path))
    return Journal(files, path, fds, generation, len(data), len(data), owner, room=room)


class Prepared(NamedTuple):
    """A snapshot that is to become the log."""

    fd: int
    generation: int
    size: int


class Journal(NotCopied):
    """An open log, for appending. Positions count bytes over all generations and never go back.

    ``owner``: what errors call that which the log belongs to.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        fds: list[int],
        generation: int,
        end: int,
        snapshot_end: int,
        owner: str = "queue",
        frames: int = 0,
        durable: int = 0,
        room: Reserve | None = None,
    ) -> None:
        """``fds``: a list with the descriptor. Others that have the list may close it too. ``durable``: how much of what is
        behind the snapshot is on disk, as the last frame says. ``room``: the reserve, if it is not beside this log.
        """
        self._files = files
        self.path = path
        self._room = room or Reserve(files, path)
        self._owner = owner
        (self.fd,) = self._owned = fds  # empty once it is closed
        self.generation = generation
        self.end = end  # offset in the file: where the next frame goes
        self.snapshot_end = snapshot_end
        self.frames = frames  # behind the snapshot
        self._base = 0  # position of offset 0
        self._failed: Broken | None = None  # of a sync
        self._returned = end  # commits up to here have returned to their callers, durable or not
        # Nobody syncs the descriptor while a thread has both. They are taken by `with`, never in a generator: an interrupt could
        # leave one behind that has them, and then `close` in the same thread would wait forever.
        self._sync_lock = threading.Lock()  # of the next line
        self._turn = threading.Lock()  # held by the thread that syncs the descriptor: each time a new one
        self._allocated = end  # size of the file; what lies behind the end is zeros
        self.synced = max(snapshot_end, durable)
        self.has_reserve = True  # as far as this process knows
        self._doubtful = end  # what was appended up to here, before this process opened the log, may not be on disk

    @property
    def position(self) -> int:
        return self._base + self.end

    @property
    def durable(self) -> int:
        """The position up to which this process knows the log to be on disk."""
        return self._base + self.synced

    def reserved(self, size: int) -> None:
        """Say that the file has this size, with nothing but zeros behind the end."""
        self._allocated = size

    def follow(self, end: int) -> None:
        """Another process has appended, up to this offset."""
        self.end = end
        self._allocated = max(self._allocated, end)

    def append(self, kind: int, body: bytes) -> int:
        """Write one frame; returns the position that `sync` takes. On an error nothing of it is left.

        Raises `DiskFull`; any other error, or one while taking a torn frame back, is `Broken`.
        """
        data = frame(kind, body, self.generation, self.synced)
        try:
            self._files.write(self.fd, data, self.end)
        except OSError as error:
            self._cut(self.end, error)
            if error.errno not in FULL or not self.release():  # a put has reserved its bytes
                self._full_or_broken(error, len(data))
            return self.append(kind, body)
        self.end = end = self.end + len(data)
        self.frames += 1
        if end > self._allocated:
            self._allocated = end
        return self._base + end

    @property
    def slow_to_open(self) -> bool:
        """Whether the next opening would have much to do. If so, the log is cut back to a snapshot when it is closed."""
        return self.end - self.snapshot_end > LIMITS.log_bytes_at_close or self.frames > LIMITS.log_frames_at_close

    @property
    def spare(self) -> int:
        """Bytes behind the end that are sure to be there when the disk is full."""
        return self._allocated - self.end

    def reserve(self, size: int) -> None:
        """Make sure that ``size`` bytes can be appended, that `SPARE` bytes are left then, and that there is a `Reserve`. Raises
        `DiskFull`.
        """
        wanted = self.end + size + SPARE
        if wanted > self._allocated:
            self._make_reserve()
            self._allocate(wanted + SPARE, size)

    def restore_reserve(self) -> None:
        """Make the `Reserve` again, as far as there is room."""
        with contextlib.suppress(DiskFull, BadPath):  # who puts is told
            self._make_reserve()

    def keep(self, size: int) -> None:
        """Make sure that `release` can give what moving files needs after the next commit, which has ``size`` bytes. Raises
        `DiskFull`.
        """
        size += self._room.for_moves
        if self.spare < size:
            self._allocate(self.end + size, size)

    def _make_reserve(self) -> None:
        try:
            with opening(self.path, self._owner, "try again"):
                self._room.make()
        except BadPath as error:
            if self._files.is_at(self.fd, self.path):
                raise
            raise moved(self.path, self._owner) from error
        self.has_reserve = True

    def _allocate(self, until: int, size: int) -> None:
        try:
            self._files.allocate(self.fd, until)
        except OSError as error:
            self._full_or_broken(error, size)
        self._allocated = until

    def release_spare(self) -> bool:
        """Give the space behind the end back to the file system; whether there was any."""
        spare = self.spare
        if spare:
            self._cut(self.end, None)
        return spare > 0

    def release(self) -> bool:
        """Give back that and the `Reserve`."""
        self.has_reserve = False
        return self.release_spare() | self._room.release()

    def sync(self, position: int, refuse: bool) -> None:
        """Make everything up to ``position`` durable. Threads that wait here together share one fsync.

        Raises `Broken`; then nothing is sure. ``refuse``: commits that are not durable have not returned to their callers, so
        they must not come back when the log is opened again.
        """
        while self._base + self.synced < position:
            turn = threading.Lock()
            with turn:
                with self._sync_lock:
                    under_way = self._turn
                    if first := not under_way.locked():
                        self._turn = turn
                if first:
                    self._sync(refuse)
            if not first:
                with under_way:  # its own, so that nobody whose commit is on disk waits for the sync that follows
                    pass

    def _sync(self, refuse: bool) -> None:
        if self._failed is not None:
            raise self._failed.with_traceback(None)  # tried again, the kernel would report success; and the log was cut
        end = self.end
        try:
            if self._doubtful > self.synced:
                self._write_doubtful()
            self._files.sync(self.fd)
        except Broken as error:
            self._failed = error
            if refuse:
                with contextlib.suppress(Broken):  # the first error says enough
                    self._cut(max(self.synced, self._returned), None)
            raise
        self.synced = max(self.synced, end)

    def _write_doubtful(self) -> None:
        """Write again what others have left. If an fsync of theirs has failed, the kernel takes it for written, and a sync alone
        would not write it.
        """
        try:
            data = self._files.read(self.fd, self._doubtful - self.synced, self.synced)
            self._files.write(self.fd, data, self.synced)
        except OSError as error:
            self.broken(error)
        self._doubtful = 0

    def prepare(self, snapshot: Callable[[int], bytes]) -> Prepared:
        """Write a new log beside this one, durably. Raises OSError; then nothing has changed.

        ``snapshot`` makes all of it for a generation, head included.
        """
        generation = new_generation()
        data = snapshot(generation)
        write_new(self._files, self.path + ".tmp", data, self._owned)  # `close` closes it in any case
        return Prepared(self._owned[-1], generation, len(data))

    def replace(self, new: Prepared) -> None:
        """Go on in the prepared log. By now all other files say what it says. Raises `Broken`."""
        try:
            self._files.rename(self.path + ".tmp", self.path)
        except OSError as error:
            self.broken(error)
        self._files.sync_directory(parent(self.path))
        with self._sync_lock, self._turn:
            self._base += self.end - new.size
            self.fd, self.generation, self.frames = new.fd, new.generation, 0
            close_first(self._owned)
            self.end = self.snapshot_end = self.synced = self._returned = self._allocated = self._doubtful = new.size

    def close(self, unlock: bool = False) -> None:
        """A second call does nothing, or finishes a first one that was interrupted."""
        with self._sync_lock, self._turn:
            if unlock:
                lock.unlock(*self._owned)
            close_all(self._owned)

    def __del__(self) -> None:
        if getattr(self, "_owned", None):  # else it was interrupted while it was made, or is closed
            close_all(self._owned)

    def replaced(self) -> None:
        """Another process has put a durable snapshot in its place: threads in `sync` have nothing left to wait for."""
        with self._sync_lock, self._turn:
            self.synced = sys.maxsize - self._base
            close_all(self._owned)

    def forked(self) -> None:
        """In a forked child: the thread that held the lock does not exist here."""
        self._sync_lock = threading.Lock()
        self._turn = threading.Lock()

    def _cut(self, end: int, cause: OSError | None) -> None:
        try:
            self._files.truncate(self.fd, end)
        except OSError as error:
            self.broken(cause or error)
        self._allocated = end

    def _full_or_broken(self, error: OSError, size: int) -> NoReturn:
        if error.errno not in FULL:
            self.broken(error)
        what = f"no room for a commit of {size:,} bytes" if size else "no room on the file system"
        raise DiskFull(f"{what}: {error.strerror}. Nothing was stored", path=self.path) from error

    def broken(self, error: OSError) -> NoReturn:
        raise Broken(
            f"writing failed: {error.strerror}. This {self._owner} object refuses every further call; {remedy(error)}, then open "
            f"the {self._owner} again: that recovers all that was committed",
            path=self.path,
        ) from error


def parent(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
