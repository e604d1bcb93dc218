"""The manifest of a batch: the JSON file that hands leased records over to Spark or any other engine.

A batch is a directory: `manifest.json` and the segment files it names, each a chunk file of a queue (see
`chunk`) or a block of a topic (see `zbus`) of which the bytes from ``start`` to ``end`` are this batch's
records; of a topic's, with a filter, those that match. Paths are relative to the manifest, so the
directory can be copied as it is, manifest last (`publishing` does that), and read where it lies: in any `store`.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from qewqew_core import chunk, zbus
from qewqew_core.errors import BadArgument, BadManifest, CorruptQueue, StoreError
from qewqew_core.store import Local, Read, Store, local_path, store_of
from qewqew_core.tags import Filter

MANIFEST = "manifest.json"
VERSION = 1
CHUNK, BLOCK = "chunk", "block"  # layouts: what the segment files are
_STEP = 1 << 20
_AT_ONCE = 8 << 20  # what is longer is read once to verify it, and once more to give it out


@dataclass(frozen=True)
class Segment:
    """A run of records in one file."""

    file: str  # relative to the manifest
    start: int  # offset of the first record, in bytes
    end: int  # offset just past the last record
    records: int
    crc32: str  # of the bytes from start to end, eight hex digits
    boundaries: tuple[tuple[int, int], ...]  # (offset of a record, records of this segment before it)
    checksums: tuple[str, ...] = ()  # as crc32, of the bytes from start to each boundary; () in manifests of older releases
    # Of a part that `split` cut off: the checksum of what lies before it. ``crc32`` and ``checksums`` go on from there.
    seed: str = "00000000"

    @property
    def base(self) -> int:
        """Of a block: the offset in the topic at which the file begins."""
        return int(self.file[:20])

    @property
    def splittable(self) -> bool:
        """Whether a part can be verified by itself."""
        return len(self.checksums) == len(self.boundaries)

    def split(self, size: int) -> list[Segment]:
        """Parts of at least ``size`` bytes, but for the last, cut at boundaries; the whole if it is not `splittable`."""
        if not self.splittable:
            return [self]
        parts, seed = [], self.seed
        start, before, first = self.start, 0, 0
        places = (*self.boundaries, (self.end, self.records))
        for number, ((end, records), crc32) in enumerate(zip(places, (*self.checksums, self.crc32), strict=True)):
            if end - start >= size or end == self.end:
                inside = tuple((offset, count - before) for offset, count in self.boundaries[first:number])
                checksums = self.checksums[first:number]
                parts.append(Segment(self.file, start, end, records - before, crc32, inside, checksums, seed))
                start, before, first, seed = end, records, number + 1, crc32
        return parts

    def _fields(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "seed"}
        if not self.checksums:
            del fields["checksums"]
        return fields


def checksums(crcs: Iterable[int]) -> tuple[str, ...]:
    """Eight hex digits for each."""
    values = tuple(crcs)
    return tuple(struct.pack(f">{len(values)}I", *values).hex(" ", 4).split())


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    ``records``, also those of segments and boundaries, counts what belongs to the batch: with a ``filter`` only the messages
    that match. ``bytes`` counts payloads: without the two length bytes of each record, or without the heads of messages.
    """

    id: str
    key: str
    queue: str
    created: str  # UTC, RFC 3339
    attempt: int
    records: int
    bytes: int
    segments: tuple[Segment, ...]
    layout: str = CHUNK
    # Of a topic; ``queue`` is its name.
    reader: str | None = None
    dialect: str | None = None  # "B" or "C"
    filter: str | None = None

    def files(self) -> dict[str, int]:
        """The names of the files, and where the last segment in each ends."""
        ends: dict[str, int] = {}
        for segment in self.segments:
            ends[segment.file] = max(segment.end, ends.get(segment.file, 0))
        return ends

    def to_json(self) -> builtins.bytes:
        topic = self.layout == BLOCK
        body: dict[str, Any] = {
            "version": VERSION,
            "id": self.id,
            "key": self.key,
            "queue": self.queue,
            **({"reader": self.reader} if topic else {}),
            "layout": self.layout,
            **({"dialect": self.dialect, "filter": self.filter} if topic else {}),
            "created": self.created,
            "attempt": self.attempt,
            "records": self.records,
            "bytes": self.bytes,
            "segments": [segment._fields() for segment in self.segments],
        }
        return json.dumps(body).encode()


def manifest_path(path: str | os.PathLike[str]) -> str:
    """The manifest of a batch that is given by its directory or by its manifest: a path, or a URL."""
    path = os.fspath(path)
    local = local_path(path)
    if local is None:
        return path if path.endswith(".json") else f"{path.rstrip('/')}/{MANIFEST}"
    return os.path.join(local, MANIFEST) if os.path.isdir(local) else local


def load(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Manifest:
    """Read a manifest and check all that can be checked without reading the segments.

    ``path`` is a batch directory or its manifest, or the URL of one (``options``: see `store.store_of`). Raises
    `BadManifest`, which names file and field, and `StoreError`, `BadArgument`.
    """
    path = manifest_path(path)
    store = store_of(os.path.dirname(path), options)
    try:
        text = store.read(os.path.basename(path))
    except FileNotFoundError as error:
        raise BadManifest("there is no manifest; give the directory of a batch or its manifest.json", path=path) from error
    except StoreError:
        raise
    except (OSError, CorruptQueue) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadManifest(f"the manifest cannot be read: {reason}", path=path) from error
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadManifest(f"not JSON ({error}); give the directory of a batch or its manifest.json", path=path) from error
    manifest = parse(body, path)
    _check_files(store, manifest, path)
    return manifest


def parse(body: Any, path: str) -> Manifest:
    """The manifest in a decoded JSON body; raises `BadManifest` for whatever is missing or contradicts itself."""

    def field(holder: Any, name: str, kind: type, where: str = "") -> Any:
        value: Any = holder.get(name) if isinstance(holder, dict) else None
        if type(value) is not kind:
            raise BadManifest(f"{where}{name!r} must be {kind.__name__}, not {value!r:.80}", path=path)
        if isinstance(value, int) and value < 0:
            raise BadManifest(f"{where}{name!r} is negative: {value}", path=path)
        return value

    version = field(body, "version", int)
    if version != VERSION or (layout := field(body, "layout", str)) not in (CHUNK, BLOCK):
        raise BadManifest(
            f"version {version}, layout {body.get('layout')!r}: this program reads version {VERSION}, layouts {CHUNK!r} and "
            f"{BLOCK!r}; use the release of QewQew that wrote it, or a newer one",
            path=path,
        )
    reader = dialect = pattern = None
    if layout == BLOCK:
        reader, dialect = field(body, "reader", str), field(body, "dialect", str)
        pattern = None if body.get("filter", "missing") is None else field(body, "filter", str)
        if dialect not in ("B", "C"):
            raise BadManifest(f"'dialect' must be 'B' or 'C', not {dialect!r:.80}", path=path)
    try:
        partial = bool(Filter(pattern))
    except BadArgument as error:
        raise BadManifest(f"'filter' is none: {error}", path=path) from error
    segments = []
    for number, item in enumerate(field(body, "segments", list)):
        where = f"segment {number}: "
        segment = Segment(
            field(item, "file", str, where),
            field(item, "start", int, where),
            field(item, "end", int, where),
            field(item, "records", int, where),
            field(item, "crc32", str, where),
            _pairs(item.get("boundaries", []), where, path),
            tuple(field(item, "checksums", list, where) if "checksums" in item else ()),
        )
        _check_segment(segment, layout, partial, where, path)
        segments.append(segment)
    for one, other in pairwise(sorted(segments, key=lambda segment: (segment.file, segment.start, segment.end))):
        if one.file == other.file and other.start < one.end:
            raise BadManifest(f"two segments have bytes {other.start} of file {one.file!r}", path=path)
    manifest = Manifest(
        field(body, "id", str),
        field(body, "key", str),
        field(body, "queue", str),
        field(body, "created", str),
        field(body, "attempt", int),
        field(body, "records", int),
        field(body, "bytes", int),
        tuple(segments),
        layout,
        reader,
        dialect,
        pattern,
    )
    records = sum(segment.records for segment in segments)
    payload = sum(segment.end - segment.start for segment in segments) - _OVERHEAD[layout] * records
    # How many bytes of messages a filter holds back is not said.
    fits = manifest.bytes <= payload if partial else manifest.bytes == payload
    if manifest.records != records or not fits:
        raise BadManifest(
            f"it says {manifest.records} records of {manifest.bytes} bytes, its segments hold {records} of "
            f"{'at most ' if partial else ''}{payload}",
            path=path,
        )
    return manifest


def _pairs(value: Any, where: str, path: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in value
    ):
        raise BadManifest(f"{where}'boundaries' must be a list of pairs of numbers", path=path)
    return tuple((offset, records) for offset, records in value)


_CRC = re.compile("[0-9a-f]{8}")
_OVERHEAD = {CHUNK: chunk.LENGTH.size, BLOCK: zbus.HEAD}  # bytes of a record beside its payload
_RANGES = {CHUNK: (chunk.BEGIN, chunk.MAX_CHUNK_SIZE), BLOCK: (0, zbus.LARGEST_BLOCK)}


def _check_segment(segment: Segment, layout: str, partial: bool, where: str, path: str) -> None:
    """``partial``: a filter holds messages back."""
    name = segment.file
    if not name or name in (".", "..") or os.path.basename(name) != name or "\0" in name:
        raise BadManifest(f"{where}file {name!r} is not a plain name beside the manifest", path=path)
    if layout == BLOCK and not (re.fullmatch(r"[0-9]{20}\.zbus", name) and segment.base < 1 << 63):
        raise BadManifest(
            f"{where}file {name!r} is not the name of a block: 20 digits, which are its offset, and .zbus", path=path
        )
    least, most = _RANGES[layout]
    if not least <= segment.start <= segment.end <= most:
        raise BadManifest(f"{where}start {segment.start} and end {segment.end} are no range of a {layout} file", path=path)
    size = segment.end - segment.start
    if size < _OVERHEAD[layout] * segment.records or (not partial and (size > 0) != (segment.records > 0)):
        raise BadManifest(f"{where}{segment.records} records do not fit into {size} bytes", path=path)
    if _CRC.fullmatch(segment.crc32) is None:
        raise BadManifest(f"{where}crc32 {segment.crc32!r} is not eight hex digits", path=path)
    if segment.checksums and len(segment.checksums) != len(segment.boundaries):
        raise BadManifest(
            f"{where}there are {len(segment.checksums)} checksums for {len(segment.boundaries)} boundaries", path=path
        )
    for one in segment.checksums:
        if not isinstance(one, str) or _CRC.fullmatch(one) is None:
            raise BadManifest(f"{where}checksum {one!r:.80} is not eight hex digits", path=path)
    before, counted = segment.start, 0
    for offset, records in segment.boundaries:
        rises = counted <= records <= segment.records if partial else counted < records < segment.records
        if not (before < offset < segment.end and rises):
            raise BadManifest(f"{where}boundaries must rise within the segment, found {offset}, {records}", path=path)
        before, counted = offset, records


def _check_files(store: Store, manifest: Manifest, path: str) -> None:
    """Raise `BadManifest` if a segment's file is not there, is no plain file, or is too short."""
    ends = manifest.files()
    sizes = store.sizes(list(ends))
    for name, end in ends.items():
        try:
            size = sizes[name] if name in sizes else store.size(name)
        except StoreError:
            raise
        except (OSError, UnicodeEncodeError) as error:  # JSON can name what no file can be named
            raise BadManifest(f"segment file {name!r} cannot be read: {error}", path=path) from error
        if size < end:
            raise BadManifest(f"segment file {name!r} has {size} bytes, the segment ends at {end}", path=path)


def read_records(
    store: Store | str | os.PathLike[str], manifest: Manifest, segment: Segment
) -> Iterator[list[bytes] | list[zbus.Message]]:
    """The records of a segment, in order, some 1 MiB at a time: bytes, or the messages of a topic.

    ``store``: where its file is; a directory's path will do. Raises `CorruptQueue` and `BadManifest`, and `StoreError`;
    before it gives out a record of a run that is not what its checksum says.
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


def read_segment(store: Store | str | os.PathLike[str], segment: Segment, run_bytes: int = _STEP) -> Iterator[tuple[int, bytes]]:
    """The segment of a queue as runs of whole frames: (number of records, bytes for `chunk.split`).

    Runs end at boundaries, so each has about ``run_bytes``, or the whole segment where it has none. Each is given out only
    if its checksum is right; where the manifest has only that of the whole segment, this is verified before the first
    run (the file is read twice, so memory does not grow with the segment). Raises `CorruptQueue`, and `StoreError`.
    """
    with _opened(store, segment) as file:
        crc = int(segment.seed, 16)
        for start, end, records, crc32 in _spans(segment, run_bytes):
            data = file.read(start, end)
            if crc32 is not None:
                crc = zlib.crc32(data, crc)
                file.check(start, end, crc, crc32)
            yield records, data


class Run(NamedTuple):
    """Whole messages of a block, as they stand there."""

    offset: int  # in the topic, of the first byte
    data: bytes
    bounds: array[int]  # where in data each message of the batch begins and ends, in turn; what lies between is held back

    def messages(self, manifest: Manifest) -> list[zbus.Message]:
        dialect, attempt = str(manifest.dialect), manifest.attempt
        return [zbus.unpack_message(self.data, at, self.offset, dialect, attempt) for at in self.bounds[::2]]


class Walk:
    """Goes from message to message of a block, and makes sure that they are whole, with numbers that follow each other."""

    def __init__(self, path: str, base: int, at: int, dialect: str, number: int | None, filter: Filter | None) -> None:
        """``number``: of the message that begins at ``at``; None: any. ``filter``: which messages are wanted."""
        self.at = at
        self._path, self._base, self._dialect, self._number, self._filter = path, base, dialect, number, filter or None

    def to(self, end: int, read: Read, run_bytes: int) -> Iterator[Run]:
        """The messages up to ``end`` in runs of at most ``run_bytes``, or one message; in some there may be none that is wanted.

        Raises `CorruptQueue`.
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
                raise CorruptQueue("the block ends in the head of a message", path=self._path, offset=start)
            self.at, self._number = start + at, number
            yield Run(self._base + start, data, bounds)


def read_messages(
    store: Store | str | os.PathLike[str], manifest: Manifest, segment: Segment, run_bytes: int = _STEP
) -> Iterator[Run]:
    """The segment of a topic as runs that hold one message of the batch at least, and at most ``run_bytes`` or one message.

    Checksums are verified as in `read_segment`. Raises `CorruptQueue` if the bytes are not whole messages with numbers that
    follow each other, and `BadManifest` if they, or those up to a boundary, are not as many as the manifest says.
    """
    with _opened(store, segment) as file:
        walk = Walk(file.path, segment.base, segment.start, str(manifest.dialect), None, Filter(manifest.filter))
        crc = int(segment.seed, 16)
        # Several runs, for each read of an object store is a request; and rarely more than is read at once.
        for start, end, records, crc32 in _spans(segment, 4 * run_bytes):
            read: Read = file.read
            if crc32 is not None:
                read, crc = file.verified(start, end, crc, crc32)
            found = 0
            for run in walk.to(end, read, run_bytes):
                found += len(run.bounds) // 2
                if walk.at == end and found != records:
                    raise _wrong_count(store, segment)
                if run.bounds:
                    yield run


def _wrong_count(store: Store | str | os.PathLike[str], segment: Segment) -> BadManifest:
    return BadManifest(
        f"boundaries or number of records of segment {segment.file} are not those of its records",
        path=_store(store).locate(MANIFEST),
    )


def _store(store: Store | str | os.PathLike[str]) -> Store:
    return store if isinstance(store, Store) else Local(os.fspath(store))


class SegmentFile(NamedTuple):
    """A file of segments, open."""

    path: str
    pread: Read

    def read(self, start: int, end: int) -> bytes:
        """All of these bytes; raises `CorruptQueue` if they are not there."""
        try:
            data = self.pread(start, end)
        except FileNotFoundError as error:  # other stores say so when it is read
            raise CorruptQueue(f"the segment cannot be read: {error.strerror}", path=self.path, offset=start) from error
        if len(data) < end - start:
            raise CorruptQueue(f"the file ends before offset {end}", path=self.path, offset=start + len(data))
        return data

    def check(self, start: int, end: int, crc: int, crc32: str) -> None:
        """Raise `CorruptQueue`, which names the bytes, if their checksum is not the one that was recorded."""
        if f"{crc:08x}" != crc32:
            raise CorruptQueue(
                f"the checksum of the bytes up to {end} is {crc:08x}, recorded was {crc32}: "
                "the file was damaged after it was written",
                path=self.path,
                offset=start,
            )

    def verified(self, start: int, end: int, crc: int, crc32: str) -> tuple[Read, int]:
        """What reads parts of start..end, now that it has the right checksum, which goes on from ``crc``; and that checksum."""
        if end - start <= _AT_ONCE:
            data = self.read(start, end)
            crc = zlib.crc32(data, crc)
            self.check(start, end, crc, crc32)
            return lambda first, last: data[first - start : last - start], crc
        return self.read, self.verify(start, end, crc, crc32)

    def verify(self, start: int, end: int, crc: int, crc32: str) -> int:
        for at in range(start, end, _STEP):
            crc = zlib.crc32(self.read(at, min(at + _STEP, end)), crc)
        self.check(start, end, crc, crc32)
        return crc


@contextmanager
def open_file(store: Store, name: str) -> Iterator[SegmentFile]:
    """Raises `CorruptQueue` if it cannot be read."""
    path = store.locate(name)
    with ExitStack() as stack:
        try:
            read = stack.enter_context(store.open(name))
        except StoreError:
            raise
        except OSError as error:
            raise CorruptQueue(f"the segment cannot be read: {error.strerror}", path=path) from error
        yield SegmentFile(path, read)


@contextmanager
def _opened(store: Store | str | os.PathLike[str], segment: Segment) -> Iterator[SegmentFile]:
    """The file of a segment, which was read already if only the whole has a checksum."""
    with open_file(_store(store), segment.file) as file:
        if not segment.splittable or segment.start == segment.end:
            file.verify(segment.start, segment.end, int(segment.seed, 16), segment.crc32)
        yield file


def _spans(segment: Segment, size: int) -> Iterator[tuple[int, int, int, str | None]]:
    """The segment, cut at boundaries into pieces of at least ``size`` bytes, but for the last: start, end, records, and the
    checksum of the bytes from the segment's start to end, where it is known.
    """
    places = (*segment.boundaries, (segment.end, segment.records))
    known = (*segment.checksums, segment.crc32) if segment.splittable else (None,) * len(places)
    start, before = segment.start, 0
    for (end, records), crc32 in zip(places, known, strict=True):
        if end - start >= size or (end == segment.end and end > start):
            yield start, end, records - before, crc32
            start, before = end, records
