"""NOT NULL in the schema of a read: Spark plans with it, so the rows must keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from qewqew_core.errors import Corrupt

Mask = npt.NDArray[np.bool_]


def promises(field: pa.Field) -> bool:
    """Does it, or anything in it, say NOT NULL?"""
    if not field.nullable:
        return True
    kind = field.type
    if pa.types.is_map(kind):
        return promises(kind.item_field)
    if pa.types.is_list(kind):
        return promises(kind.value_field)
    return pa.types.is_struct(kind) and any(promises(kind.field(at)) for at in range(kind.num_fields))


def kept(columns: list[pa.Array], schema: pa.Schema, drop: bool, path: str, place: Callable[[int], int]) -> pa.RecordBatch:
    """The columns as a batch with the ``schema``, which has their types and says NOT NULL.

    With ``drop``, rows that lack such a value are left out; otherwise raises `Corrupt`, with ``place(row)`` as the offset.
    """
    lacking = [_lacking(column, field) for column, field in zip(columns, schema, strict=True)]
    typed = [pa.array(_Typed(column, field.type)) for column, field in zip(columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(typed, schema=schema)
    rows = np.logical_or.reduce(lacking)
    if not rows.any():
        return batch
    if drop:
        return batch.filter(pa.array(~rows))
    row = int(rows.argmax())
    name = next(field.name for field, mask in zip(schema, lacking, strict=True) if mask[row])
    raise Corrupt(
        f"this record has a null in the column {name!r} where the schema says NOT NULL, on which Spark relies; leave that out",
        path=path,
        offset=place(row),
    )


def _lacking(column: pa.Array, field: pa.Field) -> Mask:
    """In which rows there is a null where the field says NOT NULL."""
    found = np.zeros(len(column), bool)
    if not promises(field):
        return found
    valid = _mask(column.is_valid())
    if not field.nullable:
        found |= ~valid
    kind = field.type
    if pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            found |= _lacking(column.field(at), kind.field(at)) & valid
    elif pa.types.is_map(kind) or pa.types.is_list(kind):
        ends = column.offsets.to_numpy()
        values, inner = (column.items, kind.item_field) if pa.types.is_map(kind) else (column.values, kind.value_field)
        if len(values) == ends[-1] - ends[0]:  # they may be those of a slice, where the offsets still are those of the whole
            ends = ends - ends[0]
        lacking = np.concatenate(([0], np.cumsum(_lacking(values, inner))))
        found |= (lacking[ends[1:]] > lacking[ends[:-1]]) & valid
    return found


def _mask(booleans: pa.Array) -> Mask:
    return booleans.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


class _Typed:
    """An array under another type of the same layout: what Arrow's casts do not do if it says NOT NULL."""

    def __init__(self, column: pa.Array, kind: pa.DataType) -> None:
        self._column, self._kind = column, kind

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return self._kind.__arrow_c_schema__(), self._column.__arrow_c_array__()[1]
