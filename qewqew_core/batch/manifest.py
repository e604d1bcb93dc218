"""The manifest of a batch: the JSON file that hands leased records over to Spark or any other engine.

A batch is a directory: `manifest.json` and the segment files that it names. Each is a chunk file of a queue (see `chunk`) or a
block of a topic (see `zbus`). Its bytes from ``start`` to ``end`` are the records of the batch; with a filter, the messages that
match. Paths are relative to the manifest, so the directory can be copied as it is, manifest last (`publishing` does that), and
read from any `store`.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qewqew_core import arguments
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.store import Store, local_path, store_of
from qewqew_core.disk.files import DISK
from qewqew_core.disk.opening import opening, refused
from qewqew_core.errors import BadArgument, BadManifest, Corrupt, StoreError
from qewqew_core.formats import chunk, zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.secrecy import excerpt

MANIFEST = "manifest.json"
VERSION = 1
CHUNK, BLOCK = "chunk", "block"  # layouts: what the segment files are
_AT_ONCE = 32  # manifests that are read at the same time: each waits for two answers of its store


@dataclass(frozen=True)
class Segment:
    """A run of records in one file."""

    file: str  # relative to the manifest
    start: int  # offset of the first record, in bytes
    end: int  # offset just past the last record
    records: int
    crc32: str  # of the bytes from start to end, eight hex digits
    boundaries: tuple[tuple[int, int], ...]  # (offset of a record, records of this segment before it)
    checksums: tuple[str, ...] = ()  # as crc32, of the bytes from start to each boundary
    # Of a `part`: the checksum of what lies before it. ``crc32`` and ``checksums`` go on from there.
    seed: str = "00000000"

    @property
    def base(self) -> int:
        """The offset in the topic at which a block begins."""
        return int(self.file[:20])

    @property
    def cuts(self) -> list[int]:
        """The offsets at which the segment can be cut into parts: its boundaries."""
        return [offset for offset, _ in self.boundaries]

    def part(self, start: int, end: int) -> Segment:
        """The records between two offsets. Each offset is one of its `cuts`, or an end of the segment."""
        first, last = bisect_left(self.boundaries, (start, 0)), bisect_left(self.boundaries, (end, 0))
        before, seed, records, crc32 = 0, self.seed, self.records, self.crc32
        if end < self.end:
            records, crc32 = self.boundaries[last][1], self.checksums[last]
        if start > self.start:
            before, seed = self.boundaries[first][1], self.checksums[first]
            first += 1
        inside = tuple((offset, count - before) for offset, count in self.boundaries[first:last])
        return Segment(self.file, start, end, records - before, crc32, inside, self.checksums[first:last], seed)

    def _fields(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "seed"}
        if not self.checksums:
            del fields["checksums"]
        return fields


def checksums(crcs: Iterable[int]) -> tuple[str, ...]:
    """Each checksum as eight hex digits."""
    values = tuple(crcs)
    return tuple(struct.pack(f">{len(values)}I", *values).hex(" ", 4).split())


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    ``records``, also of segments and boundaries, counts what belongs to the batch: with a ``filter`` only messages that match.
    ``bytes`` counts payload, without the two length bytes of each record or the head of each message.
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


def describing(
    batch: BatchState,
    queue: str,
    segments: Iterable[Segment],
    layout: str = CHUNK,
    reader: str | None = None,
    dialect: str | None = None,
    filter: str | None = None,
) -> Manifest:
    """The manifest of a batch with its present owner and attempt."""
    ids, numbers = (batch.id, batch.keys[-1], queue), (batch.attempt, batch.records, batch.bytes)
    return Manifest(*ids, _moment(batch.created), *numbers, tuple(segments), layout, reader, dialect, filter)


def manifest_path(path: str | os.PathLike[str]) -> str:
    """The path or URL of a batch's manifest, given the batch's directory or the manifest itself."""
    path = os.fspath(path)
    local = local_path(path)
    if local is None:
        return path if path.endswith(".json") else f"{path.rstrip('/')}/{MANIFEST}"
    with opening(arguments.check_path_text("batch", local), "batch"):
        return os.path.join(local, MANIFEST) if DISK.is_directory(local, follow=True) else local


def load(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, sizes: Mapping[str, int | None] | None = None
) -> Manifest:
    """Read a manifest and check everything that can be checked without reading the segments.

    ``path`` is a batch directory or its manifest, or the URL of one (``options``: see `store.store_of`). ``sizes``: of files
    beside it, if a listing has told them. Raises `BadManifest`, which names file and field, `BadPath` without permission, and
    `StoreError`, `BadArgument`.
    """
    path = manifest_path(path)
    store = store_of(os.path.dirname(path), options)
    try:
        text = store.read(os.path.basename(path))
    except FileNotFoundError as error:
        raise BadManifest("there is no manifest; give the directory of a batch or its manifest.json", path=path) from error
    except StoreError:
        raise
    except (OSError, Corrupt) as error:
        if isinstance(error, OSError) and (refusal := refused(error, path, "batch")) is not None:
            raise refusal from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadManifest(f"the manifest cannot be read: {reason}", path=path) from error
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadManifest(f"not JSON ({error}); give the directory of a batch or its manifest.json", path=path) from error
    manifest = parse(body, path)
    _check_files(store, manifest, path, sizes or {})
    return manifest


def load_all(paths: Sequence[str], options: Mapping[str, Any] | None = None) -> list[Manifest]:
    """The manifests of many batches, in the order of the paths; raises as `load`."""
    if len(paths) == 1:
        return [load(paths[0], options)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda path: load(path, options), paths))


def parse(body: Any, path: str) -> Manifest:
    """The manifest in a decoded JSON body; raises `BadManifest` if something is missing or contradicts itself."""

    def field(holder: Any, name: str, kind: type, where: str = "") -> Any:
        value: Any = holder.get(name) if isinstance(holder, dict) else None
        if type(value) is not kind:
            raise BadManifest(f"{where}{name!r} must be {kind.__name__}, not {excerpt(value, 80)}", path=path)
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
            raise BadManifest(f"'dialect' must be 'B' or 'C', not {excerpt(dialect, 80)}", path=path)
    try:
        partial = bool(Filter(pattern))
    except BadArgument as error:
        raise BadManifest(f"'filter' is not a filter: {error}", path=path) from error
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
    for segment, other in pairwise(sorted(segments, key=lambda segment: (segment.file, segment.start, segment.end))):
        if segment.file == other.file and other.start < segment.end:
            raise BadManifest(f"two segments have bytes {other.start} of file {segment.file!r}", path=path)
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
        raise BadManifest(f"{where}file {name!r} is not the name of a block: 20 digits (its offset) and .zbus", path=path)
    least, most = _RANGES[layout]
    if not least <= segment.start <= segment.end <= most:
        raise BadManifest(f"{where}start {segment.start} and end {segment.end} are not a range of a {layout} file", path=path)
    size = segment.end - segment.start
    if size < _OVERHEAD[layout] * segment.records or (not partial and (size > 0) != (segment.records > 0)):
        raise BadManifest(f"{where}{segment.records} records do not fit into {size} bytes", path=path)
    if _CRC.fullmatch(segment.crc32) is None:
        raise BadManifest(f"{where}crc32 {segment.crc32!r} is not eight hex digits", path=path)
    before, counted = segment.start, 0
    for offset, records in segment.boundaries:
        rises = counted <= records <= segment.records if partial else counted < records < segment.records
        if not (before < offset < segment.end and rises):
            raise BadManifest(f"{where}boundaries must rise within the segment, found {offset}, {records}", path=path)
        before, counted = offset, records
    if len(segment.checksums) != len(segment.boundaries):
        raise BadManifest(
            f"{where}there are {len(segment.checksums)} checksums for {len(segment.boundaries)} boundaries", path=path
        )
    for checksum in segment.checksums:
        if not isinstance(checksum, str) or _CRC.fullmatch(checksum) is None:
            raise BadManifest(f"{where}checksum {excerpt(checksum, 80)} is not eight hex digits", path=path)


def load_of(directory: str, id: str, records: int, size: int, created: int) -> Manifest:
    """The manifest in the directory of a batch, if it is that of the batch. Raises as `load`, and as `check_of`."""
    found = load(os.path.join(directory, MANIFEST))
    check_of(found, directory, id, records, size, created)
    return found


def check_of(found: Manifest, directory: str, id: str, records: int, size: int, created: int) -> None:
    """Raise `Corrupt` if it is not that of the batch with this id; ``size``: its payload in bytes; ``created``: in ms."""
    if (found.id, found.records, found.bytes, found.created) != (id, records, size, _moment(created)):
        it_is = f"{excerpt(found.id, 80)} with {found.records} records, made at {excerpt(found.created, 40)}"
        what = f"the manifest is not that of batch {id} with {records} records, made at {_moment(created)}, but of {it_is}"
        raise Corrupt(f"{what}: somebody has exchanged directories, or brought back an old one", path=directory)


def _moment(milliseconds: int) -> str:
    return arguments.moment(milliseconds).to_rfc3339_string().replace("+00:00", "Z")


def _check_files(store: Store, manifest: Manifest, path: str, listed: Mapping[str, int | None]) -> None:
    """Raise `BadManifest` if a segment's file is not there, is not a regular file, or is too short."""
    # A listing of many pages may have passed the segment's place before it was there.
    ends = {name: end for name, end in manifest.files().items() if (listed.get(name) or -1) < end}
    sizes = store.sizes(list(ends))
    for name, end in ends.items():
        try:
            size = sizes[name] if name in sizes else store.size(name)
        except StoreError:
            raise
        except (OSError, UnicodeEncodeError) as error:  # JSON allows names that no file can have
            raise BadManifest(f"segment file {name!r} cannot be read: {error}", path=path) from error
        if size < end:
            raise BadManifest(f"segment file {name!r} has {size} bytes, the segment ends at {end}", path=path)
