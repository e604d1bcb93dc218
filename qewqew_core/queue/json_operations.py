"""Operations that happen rarely, as JSON: their names in the log, and checks of what a log says about them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain
from typing import Any

from qewqew_core.batch.batch_operations import BATCH_CHECKS, BATCH_NAMES, BATCH_OPERATIONS, batch_operation
from qewqew_core.disk.journal import Body
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Cut, Span
from qewqew_core.formats.sparse_index import IndexEntry
from qewqew_core.queue.operations import Believe, Clear, JsonOperation, Lease, PutBack, Repair, Replace
from qewqew_core.secrecy import excerpt

_JSON_OPERATIONS: dict[str, type[JsonOperation]] = {
    "believe": Believe,
    "clear": Clear,
    "lease": Lease,
    "put_back": PutBack,
    "repair": Repair,
    "replace": Replace,
}
_NAMES: dict[type[JsonOperation], str] = {kind: name for name, kind in _JSON_OPERATIONS.items()} | BATCH_NAMES


def pack(operation: JsonOperation) -> bytes:
    return json.dumps({"op": _NAMES[type(operation)], **operation._asdict()}).encode()


def unpack(body: Body) -> JsonOperation:
    """Raises `journal.NONSENSE` for JSON that QewQew cannot have written."""
    fields = json.loads(bytes(body))
    name = fields.pop("op")
    if name in BATCH_OPERATIONS:
        return batch_operation(name, fields)
    return _JSON_OPERATIONS[name](**{name: _CHECKS.get(name, _as_it_is)(value) for name, value in fields.items()})


# JSON can say anything, and names of files are made of ids: these raise ValueError for values that QewQew cannot have written.


def _number(value: Any, most: int = (1 << 64) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"this is not a number up to {most}: {excerpt(value, 120)}")
    return value


def _chunk_id(value: Any) -> int:
    return _number(value, chunk.MAX_ID)


def _numbers(values: Any) -> None:
    for value in values:
        _number(value)


def _cut(values: Any) -> Cut:
    spans, crc, pieces = values
    _numbers([crc, *chain(*spans, *pieces)])
    return Cut([Span(*span) for span in spans], crc, [IndexEntry(*piece) for piece in pieces])


def _parts(values: Any) -> list[tuple[int, Cut | int]]:
    return [(_chunk_id(chunk_id), _cut(what) if isinstance(what, list) else _number(what)) for chunk_id, what in values]


def _file(name: Any) -> str:
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError("a segment lies elsewhere")
    return str(name)


def _each(check: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda values: [check(value) for value in values]


def _as_it_is(value: Any) -> Any:
    return value  # it is checked where it is used


_CHECKS: dict[str, Callable[[Any], Any]] = {
    **BATCH_CHECKS,
    "records": _number,
    "bytes": _number,
    "parts": _parts,
    "chunk": _chunk_id,
    "new": _chunk_id,
    "chunks": _each(_chunk_id),
    "empty": _each(_chunk_id),
    "files": _each(_file),
    "cut": _cut,
    "size": lambda value: _number(value, chunk.MAX_CHUNK_SIZE),
}
