"""The manifest of a batch: the JSON file that hands leased records over to Spark or any other engine.

A batch is a directory: `manifest.json` and the segment files it names, each a chunk file (see
`chunk`) of which the bytes from ``start`` to ``end`` are this batch's records. Paths are relative
to the manifest, so the directory can be copied as it is, manifest last, and read where it lies.
"""

from __future__ import annotations

import builtins
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qewqew_core import chunk
from qewqew_core.errors import BadManifest, CorruptQueue

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Segment:
    """A run of records in one file."""

    file: str  # relative to the manifest
    start: int  # offset of the first record, in bytes
    end: int  # offset just past the last record
    records: int
    crc32: str  # of the bytes from start to end, eight hex digits
    boundaries: tuple[tuple[int, int], ...]  # (offset of a record, records of this segment before it)


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says; `bytes` counts payloads, without the two length bytes of each record."""

    id: str
    key: str
    queue: str
    created: str  # UTC, RFC 3339
    attempt: int
    records: int
    bytes: int
    segments: tuple[Segment, ...]

    def to_json(self) -> builtins.bytes:
        body: dict[str, Any] = {
            "version": VERSION,
            "id": self.id,
            "key": self.key,
            "queue": self.queue,
            "layout": "chunk",
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
    if version != VERSION or field(body, "layout", str) != "chunk":
        raise BadManifest(
            f"version {version}, layout {body.get('layout')!r}: this program reads version {VERSION}, layout 'chunk'; "
            "use the release of QewQew that wrote it, or a newer one",
            path=path,
        )
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
        _check_segment(segment, where, path)
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
    )
    records = sum(segment.records for segment in segments)
    payload = sum(segment.end - segment.start for segment in segments) - 2 * records
    if (manifest.records, manifest.bytes) != (records, payload):
        raise BadManifest(
            f"it says {manifest.records} records of {manifest.bytes} bytes, its segments hold {records} of {payload}",
            path=path,
        )
    return manifest


def _pairs(value: Any, where: str, path: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in value
    ):
        raise BadManifest(f"{where}'boundaries' must be a list of pairs of numbers", path=path)
    return tuple((offset, records) for offset, records in value)


def _check_segment(segment: Segment, where: str, path: str) -> None:
    name = segment.file
    if not name or name in (".", "..") or os.path.basename(name) != name or "\0" in name:
        raise BadManifest(f"{where}file {name!r} is not a plain name beside the manifest", path=path)
    if not chunk.BEGIN <= segment.start <= segment.end <= chunk.MAX_CHUNK_SIZE:
        raise BadManifest(f"{where}start {segment.start} and end {segment.end} are no range of a chunk file", path=path)
    if segment.end - segment.start < 2 * segment.records or (segment.end > segment.start) != (segment.records > 0):
        raise BadManifest(f"{where}{segment.records} records do not fit into {segment.end - segment.start} bytes", path=path)
    if len(segment.crc32) != 8 or not set(segment.crc32) <= set("0123456789abcdef"):
        raise BadManifest(f"{where}crc32 {segment.crc32!r} is not eight hex digits", path=path)
    before, counted = segment.start, 0
    for offset, records in segment.boundaries:
        if not (before < offset < segment.end and counted < records < segment.records):
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


def read_segment(directory: str, segment: Segment, run_bytes: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """The segment as runs of whole frames: (number of records, bytes for `chunk.split`).

    Runs end at boundaries, so each has about ``run_bytes``, or the whole segment where it has none.
    The checksum of the whole segment is verified before the first run is given out (the file is
    read twice, so memory does not grow with the segment). Raises `CorruptQueue`.
    """
    path = os.path.join(directory, segment.file)
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
        start, before = segment.start, 0
        for end, records in (*segment.boundaries, (segment.end, segment.records)):
            if end - start >= run_bytes or (end == segment.end and end > start):
                yield records - before, _read(file.fileno(), start, end, path)
                start, before = end, records


def _read(fd: int, start: int, end: int, path: str) -> bytes:
    data = os.pread(fd, end - start, start)
    while len(data) < end - start:
        more = os.pread(fd, end - start - len(data), start + len(data))
        if not more:
            raise CorruptQueue(f"the file ends before offset {end}", path=path, offset=start + len(data))
        data += more
    return data
