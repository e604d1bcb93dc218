"""Batches that many hosts have published under one prefix: which are there, and the end of those that nobody needs any more.

A batch is there when its manifest is (`publishing` writes it last). So the listing of the store is all there is to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qewqew_core.batch import manifest
from qewqew_core.batch.manifest import MANIFEST, Manifest
from qewqew_core.batch.store import store_of
from qewqew_core.errors import BadArgument, BadManifest, Corrupt, StoreError
from qewqew_core.secrecy import excerpt

Files = dict[str, int | None]  # of a batch: their names, and their sizes if the listing has them
ID = re.compile(r"[\w.-]+")  # of a batch: the name of a directory, of a table's partition too
FILES = re.compile(rf"{re.escape(MANIFEST)}|.+[.][1-9][0-9]{{0,4}}|[0-9]{{20}}[.]zbus")  # of a batch: chunks, or blocks
_AT_ONCE = 32  # manifests that are read at the same time
_TRIES = 3  # at removing them: a host may publish a batch again just now


def complete(prefix: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The ids of the batches that are whole under the prefix, sorted; it holds nothing but batches.

    ``options``: see `store.store_of`. Raises `StoreError`, `BadArgument`.
    """
    return [*listed(prefix, options)]


def listed(prefix: str, options: Mapping[str, Any] | None = None) -> dict[str, Files]:
    """The same with the files of each."""
    found: dict[str, Files] = {}
    for path, size in store_of(prefix, options).below().items():
        batch, _, name = path.partition("/")
        found.setdefault(batch, {})[name] = size
    return {batch: files for batch, files in sorted(found.items()) if MANIFEST in files}


def load(prefix: str, ids: Sequence[str], options: Mapping[str, Any] | None = None) -> list[Manifest]:
    """Their manifests. Raises `BadManifest`, also if a directory has not the name of its batch, and as `complete`."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda batch: _load(prefix, batch, options), _several(ids)))


def sound(
    prefix: str, batches: Mapping[str, Files], options: Mapping[str, Any] | None = None
) -> tuple[list[Manifest], dict[str, str]]:
    """The manifests of those whose manifest describes the files beside it, and why the others' do not, by their ids.

    ``batches``: as `listed` has them. Raises as `load`, without `BadManifest`.
    """

    def judged(batch: str) -> Manifest | str:
        try:
            return _load(prefix, batch, options, batches[batch])
        except (BadManifest, Corrupt) as error:
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(batches, pool.map(judged, batches), strict=True))
    return (
        [body for body in found.values() if isinstance(body, Manifest)],
        {batch: why for batch, why in found.items() if isinstance(why, str)},
    )


def _load(prefix: str, batch: str, options: Mapping[str, Any] | None, files: Files | None = None) -> Manifest:
    path = place(prefix, batch)
    body = manifest.load(path, options, files)
    if body.id != batch:  # by the name it would pass for another batch, and be written twice
        raise BadManifest(f"is of batch {body.id}; the directory must have this name", path=path)
    if not ID.fullmatch(batch):
        raise BadManifest(f"the id {batch!r} cannot be the name of a directory", path=path)
    return body


def remove(prefix: str, ids: Iterable[str], options: Mapping[str, Any] | None = None) -> None:
    """Remove these batches; it is not an error if some are gone already.

    Raises `StoreError`, also if they are still there afterwards, `BadArgument`, `BadPath` without permission, and other `OSError`
    of a directory.
    """
    left = set(_several(ids))
    for _ in range(_TRIES):
        if not left:
            return
        store_of(prefix, options).remove_each(left, FILES)
        # Clients of stores may say nothing where a right is missing.
        left.intersection_update(complete(prefix, options))
    if left:
        raise StoreError(f"{len(left)} batch(es) cannot be removed; is there the right to delete?", path=place(prefix, min(left)))


def _several(ids: Iterable[str]) -> Iterable[str]:
    if isinstance(ids, (str, bytes)):
        raise BadArgument(f"ids is a list of ids, not {excerpt(ids, 100)}; for a single one pass [ID]")
    return ids


def place(prefix: str, batch: str) -> str:
    """The path or URL of a published batch."""
    return f"{prefix.rstrip('/')}/{batch}"
