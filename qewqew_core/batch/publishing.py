"""Copying a batch to where other machines read it: another directory, or the URL of an object store.

The files are copied first and the manifest last. So if the manifest is there, the batch is whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from qewqew_core.arguments import check_path_text
from qewqew_core.batch import manifest
from qewqew_core.batch.manifest import MANIFEST, Manifest, Segment
from qewqew_core.batch.segments import SegmentFile, open_file
from qewqew_core.batch.store import Local, Store, local_path, store_of
from qewqew_core.crc import crc32
from qewqew_core.disk.opening import adding
from qewqew_core.errors import BadArgument, BadManifest, BadPath, StoreError
from qewqew_core.secrecy import excerpt

_STEP = 4 << 20  # bytes that are in memory, beside what a store's client keeps
_NAME = re.compile(r"[\w-][\w.-]*")
_TRIES = 3  # a drain may remove an earlier copy of the batch just now


def publish(
    batch: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Copy the batch in the directory ``batch`` to ``url``/ID, where `manifest.load` reads it; returns that path or URL.

    When it returns, the whole batch is there. Its files were verified by their checksums while they were read, their sizes were
    checked after they were written, and only then was the manifest written. In a directory it is durable. If it raises or is
    killed, there is no manifest, or still that of an earlier publication: call it again. It then reads what is there, compares
    checksums of whole files, and sends those that are missing or differ. Publishing a batch twice gives the same, except for key
    and attempt, which are those of its last lease.

    ``name``: the id of the copy, if it is not to be that of the batch, which a later batch of the same key has too.
    ``options``: see `store.store_of`. ``progress`` is called with the bytes done so far, and with how many there are.

    Raises `BadManifest` and `Corrupt` (the batch is damaged: it is not published), `BadPath` if another batch is there, or
    something else, or the directory cannot be written, `BadArgument`, `StoreError`, `DiskFull`, and `Broken` (an fsync failed).
    """
    body = manifest.load(batch)
    source = Local(os.path.dirname(manifest.manifest_path(batch)))
    if name is not None:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise BadArgument(f"name is letters, digits and _-., as the name of a directory, not {excerpt(name, 100)}")
        body = replace(body, id=name)
    if _NAME.fullmatch(body.id) is None:
        raise BadManifest(f"the id {body.id!r} cannot be the name of a directory", path=source.locate(MANIFEST))
    url = check_path_text("batch", url)
    local = local_path(url)
    path = f"{url.rstrip('/')}/{body.id}" if local is None else os.path.join(os.path.abspath(local), body.id)
    target = store_of(path, options)
    with adding(target.path, "batch"):
        _check(target, body)
        target.clean()
        for left in reversed(range(_TRIES)):
            try:
                _copy(body, source, target, progress or (lambda done, total: None))
                break
            except (FileNotFoundError, BadPath, StoreError) as error:
                if not left or not isinstance(error.__cause__ or error, FileNotFoundError):
                    raise
    return path


def _copy(body: Manifest, source: Store, target: Store, tell: Callable[[int, int], None]) -> None:
    files = body.files()
    done, total = 0, sum(files.values())
    for name, size in files.items():
        of_file = sorted((segment for segment in body.segments if segment.file == name), key=lambda segment: segment.start)
        with open_file(source, name) as file:
            if not _is_there(target, name, size, _verified(file, of_file)):
                target.write(name, _told(_verified(file, of_file), done, total, tell))
                try:
                    found = target.size(name)
                except FileNotFoundError as error:
                    said = "it is gone after it was written, or its directory was moved; nothing is published, try again"
                    raise StoreError(said, path=target.locate(name)) from error
                if found != size:
                    said = f"it has {found} bytes after {size} were written; nothing is published"
                    raise StoreError(said, path=target.locate(name))
        done += size
        tell(done, total)
    target.write(MANIFEST, [body.to_json()])


def _check(target: Store, body: Manifest) -> None:
    """Raise `BadPath` if another batch is there. What is not a manifest was torn by a store that does not write at once."""
    path = target.locate(MANIFEST)
    try:
        target.size(MANIFEST)  # refuses a link, which `read` would follow
        text = target.read(MANIFEST)
    except FileNotFoundError:
        return
    try:
        there = manifest.parse(json.loads(text), path)
    except (ValueError, RecursionError):  # BadManifest is a ValueError
        return
    if (there.queue, there.reader, there.created) != (body.queue, body.reader, body.created):
        raise BadPath(
            f"is the manifest of a batch of {there.queue!r} that was made {there.created}; this one, of {body.queue!r}, was made "
            f"{body.created}. Nothing was written; publish to another place, or remove that batch if nobody reads it",
            path=path,
        )


def _verified(file: SegmentFile, segments: Iterable[Segment]) -> Iterator[bytes]:
    """The file up to the end of its last segment, so that offsets stay what they are. Raises `Corrupt` before it ends if a
    checksum is wrong.
    """
    done = 0
    for segment in segments:
        for start in range(done, segment.start, _STEP):  # not of this batch: nothing is known about these bytes
            yield file.read(start, min(start + _STEP, segment.start))
        done = max(done, segment.start)
        for part in (segment.part(*ends) for ends in pairwise([segment.start, *segment.cuts, segment.end])):
            crc = int(part.seed, 16)
            for start in range(part.start, part.end, _STEP):
                data = file.read(start, min(start + _STEP, part.end))
                crc = crc32(data, crc)
                yield data[max(0, done - start) :]
                done = max(done, start + len(data))
            file.check(part.start, part.end, crc, part.crc32)


def _is_there(target: Store, name: str, size: int, parts: Iterable[bytes]) -> bool:
    try:
        if target.size(name) != size:
            return False
    except FileNotFoundError:
        return False
    wanted = found = 0
    for part in parts:
        wanted = crc32(part, wanted)
    with target.open(name) as read:
        for start in range(0, size, _STEP):
            found = crc32(read(start, min(start + _STEP, size)), found)
    return found == wanted


def _told(parts: Iterable[bytes], done: int, total: int, tell: Callable[[int, int], None]) -> Iterator[bytes]:
    for part in parts:
        yield part
        done += len(part)
        tell(done, total)
