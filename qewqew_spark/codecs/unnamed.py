"""What records have under names that the schema does not know: where it is, and as JSON. A null is nothing."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from pyspark.sql import types

from qewqew_spark.codecs import Places
from qewqew_spark.codecs.repeated import Object, Several

# The names that a struct has, each with what is known of its values; of the elements of an array or the values of a map, a
# list of one. None: there is no struct within, so that nothing can be without a name.
Names = dict[str, Any] | list[Any] | None
_SIGNS = re.compile(r"""[.\[\]{}"]""")


def names_of(kind: types.DataType) -> Names:
    match kind:
        case types.StructType():
            return {field.name: names_of(field.dataType) for field in kind}
        case types.ArrayType():
            inner = names_of(kind.elementType)
        case types.MapType():
            inner = names_of(kind.valueType)
        case _:
            return None
    return None if inner is None else [inner]


def unnamed(value: Any, names: Names, at: str = "") -> Iterator[tuple[str, Any]]:
    """The places, like `a.b`, `c[0].d`, and `e{key}.f` in a map, and the values there, of what has no name.

    Of the values of a repeated name the last counts that is not null. A place is there twice if a map has its key twice.
    """
    for each in value.values if isinstance(value, Several) else [value]:
        if isinstance(each, dict) and isinstance(names, dict):
            for name, inner in each.items():
                place = f"{at}.{_spelled(name)}" if at else _spelled(name)
                if name not in names:
                    values = inner.values if isinstance(inner, Several) else [inner]
                    yield from ((place, last) for last in [last for last in values if last is not None][-1:])
                elif names[name] is not None:
                    yield from unnamed(inner, names[name], place)
        elif isinstance(each, list) and isinstance(names, list):
            for number, inner in enumerate(each):
                yield from unnamed(inner, names[0], f"{at}[{number}]")
        elif isinstance(each, dict) and isinstance(names, list):
            for name, inner in each.items():
                yield from unnamed(inner, names[0], f"{at}{{{_spelled(name)}}}")


def _spelled(name: Any) -> str:
    """The name in a place: as a JSON text if it could be read as something else."""
    text = str(name)
    return _text(text) if not text or _SIGNS.search(text) else text


def beyond(
    rows: Sequence[dict[str, Any]], names: Names, without: Container[int], most: int | None, leaf: Callable[[Any], str]
) -> tuple[dict[int, Places], int]:
    """`Decoded.unnamed` and `Decoded.unseen` of rows, but of those ``without``; ``most``: see `Codec.decode`."""
    found: dict[int, Places] = {}
    unseen = 0
    if most is None or not isinstance(names, dict):
        return found, unseen
    flat = not any(names.values())
    for number, row in enumerate(rows):
        if (flat and row.keys() <= names.keys()) or number in without:
            continue
        places = unnamed(row, names)
        if len(found) < most:
            if there := [(place, text_of(value, leaf)) for place, value in places]:
                found[number] = there
        else:
            unseen += any(True for _ in places)
    return found, unseen


def text_of(value: Any, leaf: Callable[[Any], str]) -> str:
    """The value as JSON; ``leaf`` writes what holds no others."""
    if isinstance(value, dict):
        pairs = value.pairs if isinstance(value, Object) else value.items()
        return f"{{{','.join(f'{_text(str(name))}:{text_of(each, leaf)}' for name, each in pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(text_of(each, leaf) for each in value)}]"
    return leaf(value)


def written(found: Places) -> str:
    """`Decoded.unnamed` of one row as a JSON object."""
    return f"{{{', '.join(f'{_text(place)}: {value}' for place, value in found)}}}"


def of_json(value: Any) -> str:
    """A leaf of a JSON text, where numbers are the bytes that are written."""
    return value.decode() if isinstance(value, bytes) else _text(value)


def of_object(value: Any) -> str:
    """A leaf of another format: bytes in base64, and what JSON does not have as Python writes it."""
    if isinstance(value, bytes):
        return _text(base64.b64encode(value).decode())
    if isinstance(value, bool | int | str) or value is None or (isinstance(value, float) and math.isfinite(value)):
        return _text(value)
    return _text(str(value))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
