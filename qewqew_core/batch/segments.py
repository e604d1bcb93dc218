"""The records of a batch, read from its files. Each is verified by a checksum before it is given out."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from qewqew_core.batch import manifest
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import BLOCK, MANIFEST, Manifest, Segment
from qewqew_core.batch.store import Local, Read, Store
from qewqew_core.crc import crc32
from qewqew_core.disk.files import Files
from qewqew_core.disk.opening import refused, refusing
from qewqew_core.errors import BadManifest, Corrupt, StoreError
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Message

Place = Store | str | os.PathLike[str]  # where the files of a batch are; the path of a directory will do
_STEP = 1 << 20
_AT_ONCE = 8 << 20  # what is longer is read once to verify it, and once more to give it out


def read_records(store: Place, manifest: Manifest, segment: Segment) -> Iterator[list[bytes] | list[Message]]:
    """The records of a segment, in order, about 1 MiB at a time: bytes, or the messages of a topic.

    Raises `Corrupt`, `BadManifest` and `StoreError`, before it gives out any record of a run whose checksum is wrong.
    """
    if manifest.layout == BLOCK:
        for run in read_messages(store, manifest, segment):
            yield run.messages(manifest)
        return
    for count, frames in read_segment(store, segment):
        try:
            records = chunk.split(frames)[0]
        except ValueError:
            records = []
        if len(records) != count:
            raise _wrong_count(store, segment)
        yield records


def read_segment(store: Place, segment: Segment, run_bytes: int = _STEP) -> Iterator[tuple[int, bytes]]:
    """The segment of a queue as runs of whole frames: (number of records, bytes for `chunk.split`).

    Runs end at boundaries, so each has about ``run_bytes``. Each is given out only if its checksum is right. Raises `Corrupt`,
    and `StoreError`.
    """
    with open_file(_store(store), segment.file) as file:
        for part in _parts(segment, run_bytes):
            data = file.read(part.start, part.end)
            with _located(file, part):
                file.check(part.start, part.end, crc32(data, int(part.seed, 16)), part.crc32)
            yield part.records, data


class RawMessages(NamedTuple):
    """Whole messages of a block, as they are in it."""

    offset: int  # in the topic, of the first byte
    data: bytes
    bounds: array[int]  # where in data each message of the batch begins and ends, in turn; what lies between is held back

    def messages(self, manifest: Manifest) -> list[Message]:
        dialect, attempt = str(manifest.dialect), manifest.attempt
        return [zbus.unpack_message(self.data, at, self.offset, dialect, attempt) for at in self.bounds[::2]]


class Walk:
    """Goes from message to message of a block, and makes sure that they are whole and that their numbers follow each other."""

    def __init__(self, path: str, base: int, at: int, dialect: str, number: int | None, filter: Filter | None) -> None:
        """``number``: of the message that begins at ``at``; None: any. ``filter``: which messages are wanted."""
        self.at = at
        self._path, self._base, self._dialect, self._number, self._filter = path, base, dialect, number, filter or None

    def to(self, end: int, read: Read, run_bytes: int) -> Iterator[RawMessages]:
        """The messages up to ``end``, in runs of at most ``run_bytes`` or of one message. A run may have no wanted message.

        Raises `Corrupt`.
        """
        chosen, careful = self._filter, self._dialect == "C"
        while self.at < end:
            start, number = self.at, self._number
            data = read(start, min(start + max(run_bytes, zbus.HEAD), end))
            at, bounds = 0, array("i")
            while at + zbus.HEAD <= len(data):
                found, tag, length = zbus.keys_at(data, at + zbus.NUMBER_AT)
                stop = at + zbus.HEAD + length
                if number is None or not number - 1 <= found <= number or length < 0 or start + stop > end or careful:
                    zbus.check_head(data, start, start + at, end, number, self._dialect, self._path)
                if at and stop > len(data):
                    break  # the next run begins with it
                if chosen is None or chosen.matches_slot(tag):
                    if stop > len(data):
                        data = read(start, start + stop)
                    bounds.extend((at, stop))
                at, number = stop, found + 1
            if not at:
                raise Corrupt("the block ends inside the head of a message", path=self._path, offset=start)
            self.at, self._number = start + at, number
            yield RawMessages(self._base + start, data, bounds)


def read_messages(store: Place, manifest: Manifest, segment: Segment, run_bytes: int = _STEP) -> Iterator[RawMessages]:
    """The segment of a topic, in runs of at most ``run_bytes`` or one message. Each has at least one message of the batch.

    Checksums are verified as in `read_segment`. Raises `Corrupt` if the bytes are not whole messages whose numbers follow each
    other, and `BadManifest` if their number, in all or up to a boundary, is not the one in the manifest.
    """
    with open_file(_store(store), segment.file) as file:
        walk = Walk(file.path, segment.base, segment.start, str(manifest.dialect), None, Filter(manifest.filter))
        # Several runs, for each read of an object store is a request; and rarely more than is read at once.
        for part in _parts(segment, 4 * run_bytes):
            with _located(file, part):
                read = file.verified(part)
            found = 0
            for run in walk.to(part.end, read, run_bytes):
                found += len(run.bounds) // 2
                if walk.at == part.end and found != part.records:
                    raise _wrong_count(store, segment)
                if run.bounds:
                    yield run


def _wrong_count(store: Place, segment: Segment) -> BadManifest:
    return BadManifest(
        f"the boundaries or the number of records of segment {segment.file} do not match its records",
        path=_store(store).locate(MANIFEST),
    )


def _store(store: Place) -> Store:
    return store if isinstance(store, Store) else Local(os.fspath(store))


class SegmentFile(NamedTuple):
    """A file of segments, open."""

    path: str
    pread: Read

    def read(self, start: int, end: int) -> bytes:
        """Exactly these bytes; raises `Corrupt` if some are missing."""
        try:
            data = self.pread(start, end)
        except FileNotFoundError as error:  # other stores say so when it is read
            raise Corrupt(f"the segment cannot be read: {error.strerror}", path=self.path, offset=start) from error
        if len(data) < end - start:
            raise Corrupt(f"the file ends before offset {end}", path=self.path, offset=start + len(data))
        return data

    def check(self, start: int, end: int, crc: int, expected: str) -> None:
        """Raise `Corrupt`, which names the bytes, if their checksum is not the one that was recorded."""
        if f"{crc:08x}" != expected:
            raise Corrupt(
                f"the checksum of the bytes up to {end} is {crc:08x}, but {expected} was recorded: "
                "the file was damaged after it was written",
                path=self.path,
                offset=start,
            )

    def verified(self, part: Segment) -> Read:
        """What reads of these bytes, which have the right checksum."""
        start, end, crc = part.start, part.end, int(part.seed, 16)
        if end - start <= _AT_ONCE:
            data = self.read(start, end)
            self.check(start, end, crc32(data, crc), part.crc32)
            return lambda first, last: data[first - start : last - start]
        for at in range(start, end, _STEP):
            crc = crc32(self.read(at, min(at + _STEP, end)), crc)
        self.check(start, end, crc, part.crc32)
        return self.read


@contextmanager
def open_file(store: Store, name: str) -> Iterator[SegmentFile]:
    """Raises `Corrupt` if it cannot be read, and `BadPath` without permission."""
    path = store.locate(name)
    with ExitStack() as stack:
        try:
            read = stack.enter_context(store.open(name))
        except StoreError:
            raise
        except OSError as error:
            raise refused(error, path, "batch") or Corrupt(f"the segment cannot be read: {error.strerror}", path=path) from error
        yield SegmentFile(path, read)


def _parts(segment: Segment, size: int) -> Iterator[Segment]:
    """The segment in parts of at least ``size`` bytes, except the last one and the first ones: their records are to come soon."""
    start, least = segment.start, -(-size // 32)
    for end in (*segment.cuts, segment.end):
        if end - start >= least or end == segment.end:
            yield segment.part(start, end)
            start, least = end, min(8 * least, size)


@contextmanager
def _located(file: SegmentFile, part: Segment) -> Iterator[None]:
    """Let an error about a damaged part name the bytes between two boundaries, and not all of the part."""
    try:
        yield
    except Corrupt:
        for piece in _parts(part, 1):
            file.verified(piece)
        raise


def read_batch(files: Files, directory: str, batch: BatchState) -> Iterator[list[bytes] | list[Message]]:
    """The records of a batch of a queue or of a topic, several at a time, if its manifest is that of this batch.

    ``files``: of the store whose batch it must be. Raises `Corrupt`, `BadManifest` and `BadPath`.
    """
    with suppress(FileNotFoundError), refusing(directory, "batch"):
        files.check_ours(os.path.join(directory, MANIFEST))
    try:
        body = manifest.load_of(directory, batch.id, batch.records, batch.bytes, batch.created)
    except BadManifest as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        what = f"the files of batch {batch.id} are missing: somebody removed them. `qewqew repair` restores what can be had"
        raise BadManifest(what, path=error.__cause__.filename or directory) from error
    for segment in body.segments:
        yield from read_records(directory, body, segment)
