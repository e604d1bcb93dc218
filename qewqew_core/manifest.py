"""The manifest of a batch: the JSON file that hands leased records over to Spark or any other engine.

A batch is a directory: `manifest.json` and the segment files it names, each a chunk file of a queue (see
`chunk`) or a block of a topic (see `zbus`) of which the bytes from ``start`` to ``end`` are this batch's
records; of a topic's, with a filter, those that match. Paths are relative to the manifest, so the
directory can be copied as it is, manifest last, and read where it lies.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from qewqew_core import chunk, zbus
from qewqew_core.errors import BadArgument, BadManifest, CorruptQueue
from qewqew_core.tags import Filter

MANIFEST = "manifest.json"
VERSION = 1
CHUNK, BLOCK = "chunk", "block"  # layouts: what the segment files are


@dataclass(frozen=True)
class Segment:
    """A run of records in one file."""

    file: str  # relative to the manifest
    start: int  # offset of the first record, in bytes
    end: int  # offset just past the last record
    records: int
    crc32: str  # of the bytes from start to end, eight hex digits
    boundaries: tuple[tuple[int, int], ...]  # (offset of a record, records of this segment before it)

    @property
    def base(self) -> int:
        """Of a block: the offset in the topic at which the file begins."""
        return int(self.file[:20])


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
            "segments": [vars(segment) for segment in self.segments],
        }
        return json.dumps(body).encode()


def manifest_path(path: str) -> str:
    """The manifest of a batch that is given by its directory or by its manifest."""
    return os.path.join(path, MANIFEST) if os.path.isdir(path) else path


def load(path: str) -> Manifest:
    """Read a manifest and check all that can be checked without reading the segments.

    ``path`` is a batch directory or its manifest. Raises `BadManifest`, which names file and field.
    """
    path = manifest_path(path)
    try:
        with open(path, "rb") as file:
            body = json.load(file)
    except FileNotFoundError as error:
        raise BadManifest("there is no manifest; give the directory of a batch or its manifest.json", path=path) from error
    except OSError as error:
        raise BadManifest(f"the manifest cannot be read: {error.strerror}", path=path) from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadManifest(f"not JSON ({error}); give the directory of a batch or its manifest.json", path=path) from error
    manifest = parse(body, path)
    for segment in manifest.segments:
        _check_file(segment, path)
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
        )
        _check_segment(segment, layout, partial, where, path)
        segments.append(segment)
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
    if len(segment.crc32) != 8 or not set(segment.crc32) <= set("0123456789abcdef"):
        raise BadManifest(f"{where}crc32 {segment.crc32!r} is not eight hex digits", path=path)
    before, counted = segment.start, 0
    for offset, records in segment.boundaries:
        rises = counted <= records <= segment.records if partial else counted < records < segment.records
        if not (before < offset < segment.end and rises):
            raise BadManifest(f"{where}boundaries must rise within the segment, found {offset}, {records}", path=path)
        before, counted = offset, records


def _check_file(segment: Segment, path: str) -> None:
    file = os.path.join(os.path.dirname(path), segment.file)
    try:
        status = os.lstat(file)
    except (OSError, UnicodeEncodeError) as error:  # JSON can name what no file can be named
        raise BadManifest(f"segment file {segment.file!r} cannot be read: {error}", path=path) from error
    if not os.path.isfile(file) or os.path.islink(file):
        raise BadManifest(f"segment file {segment.file!r} is not a regular file", path=path)
    if status.st_size < segment.end:
        raise BadManifest(
            f"segment file {segment.file!r} has {status.st_size} bytes, the segment ends at {segment.end}", path=path
        )


def read_records(directory: str, manifest: Manifest, segment: Segment) -> Iterator[list[bytes] | list[zbus.Message]]:
    """The records of a segment, in order, some 1 MiB at a time: bytes, or the messages of a topic.

    Raises `CorruptQueue` and `BadManifest`; before the first record if the segment is not what its checksum says.
    """
    if manifest.layout == BLOCK:
        for run in read_messages(directory, manifest, segment):
            yield run.messages(manifest)
        return
    for count, frames in read_segment(directory, segment):
        try:
            records = chunk.split(frames)[0]
        except ValueError:
            records = []
        if len(records) != count:
            raise _wrong_count(directory, segment)
        yield records


def read_segment(directory: str, segment: Segment, run_bytes: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """The segment of a queue as runs of whole frames: (number of records, bytes for `chunk.split`).

    Runs end at boundaries, so each has about ``run_bytes``, or the whole segment where it has none.
    The checksum of the whole segment is verified before the first run is given out (the file is
    read twice, so memory does not grow with the segment). Raises `CorruptQueue`.
    """
    path = os.path.join(directory, segment.file)
    with _verified(path, segment) as fd:
        for start, end, records in _spans(segment, run_bytes):
            yield records, _read(fd, start, end, path)


class Run(NamedTuple):
    """Whole messages of a block, as they stand there."""

    offset: int  # in the topic, of the first byte
    data: bytes
    bounds: array[int]  # where in data each message of the batch begins and ends, in turn; what lies between is held back

    def messages(self, manifest: Manifest) -> list[zbus.Message]:
        dialect, attempt = str(manifest.dialect), manifest.attempt
        return [zbus.unpack_message(self.data, at, self.offset, dialect, attempt) for at in self.bounds[::2]]


def read_messages(directory: str, manifest: Manifest, segment: Segment, run_bytes: int = 1 << 20) -> Iterator[Run]:
    """The segment of a topic as runs that hold one message of the batch at least, and at most ``run_bytes`` or one message.

    The checksum is verified as in `read_segment`. Raises `CorruptQueue` if the bytes are not whole messages with numbers that
    follow each other, and `BadManifest` if they, or those up to a boundary, are not as many as the manifest says.
    """
    path = os.path.join(directory, segment.file)
    chosen = Filter(manifest.filter)
    next_number = None
    with _verified(path, segment) as fd:
        # Half of it, so that what lies between two boundaries is rarely more than is read at once.
        for start, end, records in _spans(segment, run_bytes // 2):
            found = 0
            while start < end:
                data = _read(fd, start, min(start + max(run_bytes, zbus.HEAD), end), path)
                at, bounds = 0, array("i")
                while at + zbus.HEAD <= len(data):
                    length = zbus.length_at(data, at)
                    stop = at + zbus.HEAD + length
                    if length < 0 or start + stop > end:
                        raise CorruptQueue(
                            f"the message that begins here says that its body has {length} bytes; the manifest says that one "
                            f"ends at {end}",
                            path=path,
                            offset=start + at,
                        )
                    if at and stop > len(data):
                        break  # the next run begins with it
                    number = zbus.number_at(data, at)
                    # A zbus server that was killed gives a number twice.
                    if next_number is not None and number not in (next_number, next_number - 1):
                        raise CorruptQueue(f"here message {next_number} should begin, not {number}", path=path, offset=start + at)
                    next_number = number + 1
                    if not chosen or chosen.matches_slot(data[at + zbus.TAG_AT : at + zbus.LENGTH_AT]):
                        if stop > len(data):
                            data = _read(fd, start, start + stop, path)
                        bounds.extend((at, stop))
                    at = stop
                if not at:
                    raise CorruptQueue(
                        f"no message has room in the {end - start} bytes from here; the manifest says that one ends at {end}",
                        path=path,
                        offset=start,
                    )
                found += len(bounds) // 2
                start += at
                if start == end and found != records:
                    raise _wrong_count(directory, segment)
                if bounds:
                    yield Run(segment.base + start - at, data, bounds)


def _wrong_count(directory: str, segment: Segment) -> BadManifest:
    return BadManifest(
        f"boundaries or number of records of segment {segment.file} are not those of its records",
        path=os.path.join(directory, MANIFEST),
    )


@contextmanager
def _verified(path: str, segment: Segment) -> Iterator[int]:
    """The descriptor of the segment's file, with the bytes that the checksum says; else `CorruptQueue`."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the with below closes it
    except OSError as error:
        raise CorruptQueue(f"the segment cannot be read: {error.strerror}", path=path) from error
    with file:
        crc = 0
        for at in range(segment.start, segment.end, 1 << 20):
            crc = zlib.crc32(_read(file.fileno(), at, min(at + (1 << 20), segment.end), path), crc)
        if f"{crc:08x}" != segment.crc32:
            raise CorruptQueue(
                f"the checksum of the bytes up to {segment.end} is {crc:08x}, the manifest says {segment.crc32}: "
                "the file was damaged after it was written",
                path=path,
                offset=segment.start,
            )
        yield file.fileno()


def _spans(segment: Segment, size: int) -> Iterator[tuple[int, int, int]]:
    """The segment, cut at boundaries into pieces of at least ``size`` bytes, but for the last: (start, end, records)."""
    start, before = segment.start, 0
    for end, records in (*segment.boundaries, (segment.end, segment.records)):
        if end - start >= size or (end == segment.end and end > start):
            yield start, end, records - before
            start, before = end, records


def _read(fd: int, start: int, end: int, path: str) -> bytes:
    data = os.pread(fd, end - start, start)
    while len(data) < end - start:
        more = os.pread(fd, end - start - len(data), start + len(data))
        if not more:
            raise CorruptQueue(f"the file ends before offset {end}", path=path, offset=start + len(data))
        data += more
    return data
