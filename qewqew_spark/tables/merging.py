"""What a batch that replaces and removes rows makes of a table's files.

The driver looks into the key columns of the table's files, and copies the files that have keys of the batch, without these rows.
The old files go, and the copies and the batch's own files come, in one commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qewqew_core.errors import BadArgument

FEW = 100  # values that are compared with bounds one by one
_COPIES = min(4, os.cpu_count() or 1)  # at once
_BATCH, _GROUP = 1 << 16, 1 << 27  # rows that are read, bytes that are written at a time
_CODECS = {"snappy", "gzip", "zstd", "brotli", "lz4"}
File = TypeVar("File")


@dataclass(frozen=True)
class Range:
    """The least and the greatest value of a key, and all of them if they are few."""

    least: Any
    greatest: Any
    values: list[Any] | None

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Range | None:
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)) or not len(column):
            return None
        values, bounds = pc.unique(column), pc.min_max(column)
        return cls(bounds["min"].as_py(), bounds["max"].as_py(), values.to_pylist() if len(values) <= FEW else None)


class Files(Protocol[File]):
    """The files of a table as it was at the last look, and those that were written for it.

    Columns are those of `Upsert.named`.
    """

    def kinds(self) -> list[pa.DataType]:
        """The types of the columns."""

    def may_have(self, ranges: Sequence[Range | None]) -> Iterable[tuple[str, File]]:
        """The table's files and their places, but for those whose bounds say that they have no key. Raises `BadArgument`.

        ``ranges``: of each key; None if bounds do not tell.
        """

    def named_in(self, file: File) -> list[pa.ChunkedArray]:
        """The columns, with all rows of the file in their order."""

    def copy(self, file: File, keep: pa.ChunkedArray) -> File:
        """Write those rows of the file that are kept, at least one, into a new file. Raises `BadArgument`."""


@dataclass(frozen=True)
class _Found(Generic[File]):
    """What happens to a file of the table. ``newer``: the rows of the batch that the file has a newer row for."""

    replaced: bool
    copy: File | None
    newer: pa.Array


class Merge(Generic[File]):
    """What a batch makes of the table's files. Copies are kept from one try to the next.

    ``written``: the files with the rows that stay. ``deleted``: the columns of those that do not. A key is once in both.
    ``keys``: how many of the columns are keys; the other is the order. In memory are these columns of the batch, and of `_COPIES`
    files of the table.
    """

    def __init__(self, files: Files[File], keys: int, written: Sequence[File], deleted: list[list[pa.ChunkedArray]]) -> None:
        self._files, self._written, self._kinds = files, written, files.kinds()
        found = [files.named_in(file) for file in written]
        self._counts = [len(columns[0]) for columns in found]
        columns = [
            pa.chunked_array([chunk for each in (*found, *deleted) for chunk in each[at].cast(kind).chunks], kind)
            for at, kind in enumerate(self._kinds)
        ]
        self._keys = columns[:keys]
        self._order = columns[keys].combine_chunks() if len(columns) > keys else None
        self._index = Index(self._keys)
        self._known: dict[str, _Found[File]] = {}

    def __call__(self) -> tuple[list[File], list[File]]:
        """The files that go from the table as it is, and those that come."""
        removed, added = [], []
        stays = [True] * len(self._keys[0])
        candidates = [*self._files.may_have([Range.of(column) for column in self._keys])] if stays else []
        with ThreadPoolExecutor(_COPIES) as pool:
            for (_, file), found in zip(candidates, pool.map(self._look, candidates), strict=True):
                removed += [file] if found.replaced else []
                added += [found.copy] if found.copy is not None else []
                for row in found.newer.to_pylist():
                    stays[row] = False
        at = 0
        for file, count in zip(self._written, self._counts, strict=True):
            keep = stays[at : at + count]
            at += count
            if all(keep):
                added.append(file)
            elif any(keep):
                added.append(self._files.copy(file, pa.chunked_array([keep])))
        return removed, added

    def _look(self, candidate: tuple[str, File]) -> _Found[File]:
        place, file = candidate
        if place not in self._known:
            self._known[place] = self._find(file)
        return self._known[place]

    def _find(self, file: File) -> _Found[File]:
        columns = [column.cast(kind) for column, kind in zip(self._files.named_in(file), self._kinds, strict=True)]
        rows = self._index.find(columns[: len(self._keys)])
        keep, newer = rows.is_null(), pa.array([], rows.type)
        if self._order is not None and rows.null_count < len(rows):
            there, ours = columns[-1], self._order.take(rows)
            older = pc.or_(pc.fill_null(pc.greater(there, ours), False), pc.and_(there.is_valid(), ours.is_null()))
            older = pc.and_(older, rows.is_valid())
            keep, newer = pc.or_(keep, older), pc.unique(rows.filter(older))
        kept = pc.sum(keep).as_py() or 0
        replaced = kept < len(keep)
        return _Found(replaced, self._files.copy(file, keep) if replaced and kept else None, newer)


class Index:
    """Which row of a batch has these keys. A key is in the batch once, and none is null."""

    def __init__(self, keys: Sequence[pa.ChunkedArray]) -> None:
        self._steps: list[pa.Array] = []  # of each column its values, and of each pair of columns their numbers
        self._numbered(keys, lambda column: self._steps.append(pc.unique(column)))

    def find(self, keys: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
        """The numbers of the rows; null where there is none."""
        return self._numbered(keys, lambda _: None)

    def _numbered(self, keys: Sequence[pa.ChunkedArray], learn: Callable[[pa.ChunkedArray], None]) -> pa.ChunkedArray:
        steps, found = 0, None
        for column in keys:
            learn(column)
            values = self._steps[steps]
            number = pc.index_in(column, values).cast(pa.int64())
            steps += 1
            if found is not None:  # numbers of combinations that there are: never more than rows
                pair = pc.add(pc.multiply(found, len(values)), number)
                learn(pair)
                number = pc.index_in(pair, self._steps[steps]).cast(pa.int64())
                steps += 1
            found = number
        return found


def copy_rows(
    source: pq.ParquetFile, sink: Any, keep: pa.ChunkedArray, what: str, times: Mapping[str, pa.DataType]
) -> pq.FileMetaData:
    """Write the rows of a Parquet file that are kept into another, with the same columns, ids and metadata; returns its footer.

    INT96, which says of a time neither its unit nor whether it has a zone, becomes what ``times`` has for the column. Raises
    `BadArgument` for one that is not there, or is within a column.
    """
    schema, leaves = source.schema_arrow, source.metadata.schema
    for number in range(len(leaves)):
        leaf = leaves.column(number)
        if leaf.physical_type == "INT96":
            at = schema.get_field_index(leaf.path)
            if at < 0 or leaf.path not in times:
                raise BadArgument(f"{what} has times of the kind INT96 in the column {leaf.path}; have the table rewritten first")
            schema = schema.set(at, schema.field(at).with_type(times[leaf.path]))
    codec = source.metadata.row_group(0).column(0).compression.lower()
    codec = codec if codec in _CODECS else "none" if codec == "uncompressed" else "zstd"
    footers: list[pq.FileMetaData] = []
    with pq.ParquetWriter(sink, schema, compression=codec, metadata_collector=footers) as writer:
        at, waiting = 0, list[pa.Table]()

        def write() -> None:
            writer.write_table(pa.concat_tables(waiting))
            waiting.clear()

        for batch in source.iter_batches(_BATCH):
            rows = pa.Table.from_batches([batch]).filter(keep.slice(at, len(batch))).cast(schema)
            at += len(batch)
            if len(rows):
                waiting.append(rows)
            if sum(rows.nbytes for rows in waiting) >= _GROUP:
                write()
        if waiting:
            write()
    return footers[0]
